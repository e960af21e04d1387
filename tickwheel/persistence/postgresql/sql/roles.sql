-- The role of the daemon. It owns the schema, because it creates and drops the parts of the tasks,
-- and needs nothing else in the database. Run this file as a superuser:
--   psql -d app -v schema=tickwheel -v role=tickwheel -v password=SECRET -f roles.sql
CREATE ROLE :"role" LOGIN PASSWORD :'password' NOSUPERUSER NOCREATEDB NOCREATEROLE;
CREATE SCHEMA :"schema" AUTHORIZATION :"role";
REVOKE ALL ON SCHEMA :"schema" FROM PUBLIC;
SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'role') \gexec
