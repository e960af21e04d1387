-- The statements of the store, each under a line with its name. The names of the tables of a part
-- or a generation end with {at}: the shard and the number, S_N.

-- === sessions ===================================================================================

-- name: session
-- The settings that the session does not have, and the server's address. Sets what older releases
-- lack.
SELECT ARRAY(
        SELECT s.name FROM unnest($1::text[], $2::text[]) AS s(name, value)
        WHERE current_setting(s.name) <> s.value
    ),
    CASE WHEN current_setting('server_version_num')::int >= 170000
        THEN set_config('transaction_timeout', '0', false) END,
    host(inet_server_addr()), inet_server_port()

-- name: facts
SELECT current_setting('server_version_num')::int / 10000 AS version,
    pg_is_in_recovery() AS is_standby,
    current_setting('server_encoding') AS encoding,
    current_setting('default_transaction_read_only') AS read_only,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS standbys,
    current_user AS role, current_database() AS database,
    to_regnamespace($1) IS NOT NULL AS has_schema,
    has_database_privilege(current_database(), 'CREATE') AS may_create_schema,
    coalesce(has_schema_privilege(to_regnamespace($1)::oid, 'USAGE'), false) AS may_use,
    coalesce(has_schema_privilege(to_regnamespace($1)::oid, 'CREATE'), false) AS may_create,
    EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relname = 'layout')
        AS has_layout,
    EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relname = 'shard')
        AS has_shards

-- name: probe
CREATE TABLE probe_{0} (data bytea);
ALTER TABLE probe_{0} ALTER data SET STORAGE PLAIN;
INSERT INTO probe_{0} SELECT decode(repeat('00', 4000), 'hex') FROM generate_series(1, {1});
ROLLBACK

-- === the tables of a shard ======================================================================

-- name: part_tables
CREATE TABLE task_{at} (
    id bigint NOT NULL, batch bigint NOT NULL, due_ms bigint NOT NULL, topic text NOT NULL,
    key bytea, body bytea NOT NULL, extras bytea, PRIMARY KEY (id, batch)
);
CREATE TABLE note_{at} (
    id bigint NOT NULL, batch bigint NOT NULL, kind smallint NOT NULL,
    name text COLLATE "C" NOT NULL, data bytea
);
CREATE INDEX ON note_{at} (id);
CREATE INDEX ON note_{at} (id, name) WHERE kind = 3;

-- name: generation_tables
CREATE TABLE journal_{at} (
    batch bigint PRIMARY KEY, id_mark bigint NOT NULL, position_ms bigint NOT NULL,
    ended int NOT NULL, outcomes bytea
);
CREATE TABLE record_{at} (
    kind int NOT NULL, key text COLLATE "C" NOT NULL, batch bigint NOT NULL, data bytea
);
-- Entries of an index have at most 2,704 bytes. A value of `fair_by` makes a longer key.
CREATE INDEX ON record_{at} (kind, left(key, 600));

-- name: drop
DROP TABLE IF EXISTS task_{at}, note_{at}, journal_{at}, record_{at}

-- name: read_parts
SELECT number, low FROM part WHERE shard = $1 ORDER BY low

-- name: next_number
SELECT nextval('part_number')

-- name: layout
SELECT coalesce(max(format), 0) FROM layout

-- name: users
-- The daemons that have opened a shard other than $1.
SELECT l.owner, l.address, 'shard ' || l.shard || ', which has an older layout'
FROM lease l JOIN shard s ON s.number = l.shard AND s.owner = l.owner
WHERE l.until > clock_timestamp() AND l.shard IS DISTINCT FROM $1::int

-- name: leases
SELECT owner, address, 'shard ' || shard FROM lease
WHERE until > clock_timestamp() AND ($1::int IS NULL OR shard = $1)

-- name: abandoned
SELECT relname FROM pg_class
WHERE relnamespace = to_regnamespace($2) AND relkind = 'r'
    AND relname ~ ('^(task|note|journal|record)_' || $1::int || '_[0-9]+$')
    AND substring(relname FROM '[0-9]+$')::bigint <= $3

-- === epochs =====================================================================================

-- name: shard
SELECT * FROM shard WHERE number = $1

-- name: new_shard
INSERT INTO shard (number, incarnation, epoch, owner, link, clean, opened_ms, past, branch,
    generation)
VALUES ($1, $2, $3, $4, 1, $5, $6, '', $7, $8) ON CONFLICT DO NOTHING RETURNING number

-- name: begin_epoch
UPDATE shard SET epoch = greatest(epoch + 1, $2), owner = $3, link = link + 1, clean = false,
    opened_ms = $4, past = $5, branch = ''
WHERE number = $1 AND epoch = $6 AND incarnation = $7 AND (SELECT max(format) FROM layout) = $8
RETURNING epoch, generation

-- name: last
-- The last batch and its marks; zeros before the first.
SELECT coalesce(max(batch), 0) AS last, coalesce(max(id_mark), 0) AS id_mark,
    coalesce(max(position_ms), 0) AS position_ms
FROM (SELECT * FROM journal_{at} ORDER BY batch DESC LIMIT 1) j

-- name: claim
UPDATE shard SET link = link + 1
WHERE number = $1 AND epoch = $2 AND owner = $3 AND incarnation = $4
    AND (SELECT max(format) FROM layout) = $5
RETURNING link, generation

-- name: owner
SELECT epoch, owner, incarnation, (SELECT max(format) FROM layout) FROM shard WHERE number = $1

-- name: end_epoch
UPDATE shard SET clean = true WHERE number = $1 AND epoch = $2 AND owner = $3 RETURNING 1

-- name: remove_shard
DELETE FROM shard WHERE number = $1 AND epoch = $2 AND incarnation = $3 RETURNING generation

-- name: begin_branch
-- The new incarnation fences earlier users of the shard.
UPDATE shard SET branch = $2, incarnation = $3, link = link + 1 WHERE number = $1 RETURNING 1

-- === batches ====================================================================================

-- name: fence
-- Held until the end of the transaction. The row is not changed.
SELECT 1 FROM shard WHERE number = $1 AND epoch = $2 AND owner = $3 AND link = $4
FOR NO KEY UPDATE

-- name: batch
-- $5: the number of the batch.
WITH f AS ({include fence}), j AS (INSERT INTO journal_{at}
    SELECT $5::bigint, $6::bigint, $7::bigint, $8::int, $9::bytea FROM f RETURNING 1)

-- name: new_tasks
, t{number} AS (INSERT INTO task_{at} (id, batch, due_ms, topic, key, body, extras)
    SELECT u.id, $5, u.due_ms, u.topic, u.key, u.body, u.extras
    FROM f, unnest(${0}::bigint[], ${1}::bigint[], ${2}::text[], ${3}::bytea[], ${4}::bytea[],
        ${5}::bytea[]) AS u(id, due_ms, topic, key, body, extras))

-- name: new_notes
, n{number} AS (INSERT INTO note_{at} (id, batch, kind, name, data)
    SELECT u.id, $5, u.kind, u.name, u.data
    FROM f, unnest(${0}::bigint[], ${1}::smallint[], ${2}::text[], ${3}::bytea[])
        AS u(id, kind, name, data))

-- name: new_records
, r AS (INSERT INTO record_{at} (kind, key, batch, data)
    SELECT u.kind, u.key, $5, u.data
    FROM f, unnest(${0}::int[], ${1}::text[], ${2}::bytea[]) AS u(kind, key, data))

-- name: new_part
-- Adds part $5, from the id $6 on, if its table $7 is on this server.
WITH f AS ({include fence}), p AS (INSERT INTO part SELECT $1, $5::bigint, $6::bigint FROM f
    WHERE to_regclass($7::text) IS NOT NULL RETURNING 1)
SELECT count(*) FROM p

-- === reads ======================================================================================

-- name: row_counts
-- Whether the row of a task is its newest, and the task has not ended.
NOT EXISTS (SELECT FROM note_{at} g WHERE g.id = t.id
    AND (g.kind = 0 AND g.batch >= t.batch OR g.kind = 1 AND g.batch > t.batch))

-- name: note_counts
-- Whether a note is the newest of its kind and name, has data, and the task has not ended.
n.data IS NOT NULL AND NOT EXISTS (SELECT FROM note_{at} g WHERE g.id = n.id
    AND (g.kind = 0 AND g.batch >= n.batch
        OR g.kind = n.kind AND g.name = n.name AND g.batch > n.batch))

-- name: tasks_of_part
SELECT i.ord, t.id, t.due_ms, t.topic, t.key, t.extras, t.body,
    octet_length(t.body) + coalesce(octet_length(t.extras), 0) AS size
FROM unnest(${0}::bigint[], ${1}::int[]) AS i(id, ord) JOIN task_{at} t ON t.id = i.id
WHERE {include row_counts}

-- name: notes_of_part
UNION ALL SELECT n.kind, n.id, n.batch, n.name, NULL, NULL, n.data
FROM unnest(${0}::bigint[]) AS i(id) JOIN note_{at} n ON n.id = i.id WHERE n.kind <> 1

-- name: read
-- Tasks with bodies of up to $1 bytes, their notes, and the last batch, which has the kind -1.
SELECT -2 AS kind, id, due_ms, topic, key, extras,
    CASE WHEN sum(size) OVER (ORDER BY ord) - size < $1 THEN body END AS data
FROM ({task_rows}) AS r {note_rows}
UNION ALL SELECT -1, max(batch), 0, '', NULL, NULL, NULL FROM journal_{at}

-- name: ids
-- The next ids after $1 with the topic $2, up to $3.
SELECT t.id FROM task_{at} t
WHERE t.id > $1::bigint AND ($2::text IS NULL OR t.topic = $2) AND {include row_counts}
ORDER BY t.id LIMIT $3

-- name: ids_back
-- The same, backwards from $1 on.
SELECT t.id FROM task_{at} t
WHERE t.id <= $1::bigint AND ($2::text IS NULL OR t.topic = $2) AND {include row_counts}
ORDER BY t.id DESC LIMIT $3

-- name: count_tasks
SELECT count(*) FROM task_{at} t WHERE {include row_counts}

-- name: dead
-- The next dead letters after (id $1, group $2), up to $4. Group $3, unless it is NULL.
SELECT n.data FROM note_{at} n
WHERE n.kind = 3 AND (n.id, n.name) > ($1::bigint, $2) AND ($3::text IS NULL OR n.name = $3)
    AND {include note_counts}
ORDER BY n.id, n.name LIMIT $4

-- name: notes
-- All progress and dead letters.
SELECT n.kind, n.data FROM note_{at} n WHERE n.kind >= 2 AND {include note_counts}

-- name: count_notes
SELECT kind, count(*) FROM ({include notes}) n GROUP BY kind

-- name: records
-- The newest records.
SELECT kind, key, data FROM (
    SELECT DISTINCT ON (kind, key) kind, key, data FROM record_{at} ORDER BY kind, key, batch DESC
) r WHERE data IS NOT NULL

-- name: count_records
SELECT count(*) FROM ({include records}) r

-- name: records_of_kind
SELECT data FROM (
    SELECT DISTINCT ON (key) key, data FROM record_{at} WHERE kind = $1 ORDER BY key, batch DESC
) r WHERE data IS NOT NULL

-- name: records_with_keys
SELECT kind, key FROM (
    SELECT DISTINCT ON (kind, key) kind, key, data FROM record_{at}
    WHERE (kind, left(key, 600), key) IN (
        SELECT kind, left(key, 600), key FROM unnest($1::int[], $2::text[]) AS u(kind, key))
    ORDER BY kind, key, batch DESC
) r WHERE data IS NOT NULL

-- name: outcomes
-- The newest rows with outcomes, up to $1 outcomes.
SELECT outcomes FROM (
    SELECT batch, outcomes, sum(ended) OVER (ORDER BY batch DESC) - ended AS newer
    FROM journal_{at} WHERE ended > 0
) j WHERE newer < $1 ORDER BY batch

-- name: handles_of_part
SELECT id, due_ms, topic, key FROM task_{at} t WHERE t.due_ms {compare} $1 AND {include row_counts}

-- name: handles
SELECT id, due_ms, topic, key FROM ({tasks}) h ORDER BY due_ms, id

-- name: fill_of_part
-- Rows and bytes of tasks; notes, and how many of them end or replace a row.
SELECT t.*, n.* FROM (SELECT count(*), coalesce(sum(octet_length(body)), 0) FROM task_{at}) t,
    (SELECT count(*), count(*) FILTER (WHERE kind < 2) FROM note_{at}) n

-- name: fill_of_generation
SELECT (SELECT count(*) FROM journal_{at}),
    (SELECT coalesce(sum(octet_length(data)), 0) FROM record_{at})

-- name: highest_id
SELECT greatest((SELECT max(id) FROM task_{at}), (SELECT max(id) FROM note_{at}))

-- === copies =====================================================================================

-- name: copy_tasks
INSERT INTO task_{to} SELECT t.* FROM task_{at} t WHERE {include row_counts}

-- name: copy_notes
INSERT INTO note_{to} SELECT n.* FROM note_{at} n WHERE n.kind >= 2 AND {include note_counts}

-- name: copy_records
INSERT INTO record_{to} SELECT kind, key, batch, data FROM (
    SELECT DISTINCT ON (kind, key) * FROM record_{at} ORDER BY kind, key, batch DESC
) r WHERE data IS NOT NULL

-- name: copy_journal
-- The last batch always counts.
INSERT INTO journal_{to} SELECT batch, id_mark, position_ms, ended, outcomes FROM (
    SELECT *, sum(ended) OVER (ORDER BY batch DESC) - ended AS newer, max(batch) OVER () AS last
    FROM journal_{at}
) j WHERE batch = last OR ended > 0 AND newer < {endings_max}

-- name: copy_later
-- What was added to a table after batch $5.
, {table}{source} AS (INSERT INTO {table}_{shard}_{target}
    SELECT c.* FROM f, {table}_{shard}_{source} c WHERE c.batch > $5)

-- name: switch_generation
WITH f AS (UPDATE shard SET generation = {target}
    WHERE number = $1 AND epoch = $2 AND owner = $3 AND link = $4 RETURNING 1) {copies}
SELECT count(*) FROM f

-- name: switch_parts
WITH f AS ({include fence}) {copies}, d AS (DELETE FROM part USING f
    WHERE shard = {shard} AND number IN ({sources}))
SELECT count(*), max($5::bigint) FROM f

-- name: link
SELECT max(link) FROM shard WHERE number = $1

-- === the leader's lease =========================================================================

-- name: timeline
CASE WHEN pg_is_in_recovery() THEN ''
    ELSE left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END

-- name: look
SELECT l.owner, l.address, l.since_ms, l.epoch AS lease_epoch, l.life, l.http,
    coalesce(ceil(1000 * extract(epoch FROM l.until - clock_timestamp())), 0)::bigint AS left_ms,
    coalesce(l.timeline = {include timeline}, false) AS leased_here,
    s.incarnation, s.epoch, s.owner AS opened_by, s.clean,
    pg_is_in_recovery() AS is_standby,
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::bigint AS up_s
FROM (SELECT) one LEFT JOIN lease l ON l.shard = $1 LEFT JOIN shard s ON s.number = $1

-- name: acquire
INSERT INTO lease (shard, owner, address, since_ms, epoch, life, http, until, timeline)
VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp() + $8::int * interval '1 millisecond',
    {include timeline})
ON CONFLICT (shard) DO UPDATE SET owner = excluded.owner, address = excluded.address,
    since_ms = excluded.since_ms, epoch = excluded.epoch, life = excluded.life,
    http = excluded.http, until = excluded.until, timeline = excluded.timeline
WHERE lease.until <= clock_timestamp() OR lease.owner IN (excluded.owner, $9)
RETURNING 1

-- name: renew
UPDATE lease SET address = $3, since_ms = $4, epoch = $5, life = $6, http = $7,
    until = clock_timestamp() + $8::int * interval '1 millisecond', timeline = {include timeline}
WHERE shard = $1 AND owner = $2 AND until > clock_timestamp()
RETURNING 1

-- name: release
UPDATE lease SET until = to_timestamp(0) WHERE shard = $1 AND owner = $2

-- name: announce
INSERT INTO standby (shard, node, address, since_ms, http, until)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::int * interval '1 millisecond')
ON CONFLICT (shard, node, address) DO UPDATE SET since_ms = excluded.since_ms,
    http = excluded.http, until = excluded.until

-- name: standbys
SELECT node, address, http, since_ms FROM standby
WHERE shard = $1 AND until > clock_timestamp() ORDER BY node, address LIMIT $2

-- === the registry of nodes ======================================================================

-- name: register
INSERT INTO registry SELECT $1::int, 0 WHERE NOT EXISTS (SELECT FROM registry)

-- name: expire
DELETE FROM node WHERE until <= clock_timestamp()

-- name: beat
INSERT INTO node (name, run, record, until)
VALUES ($1, $2, $3, clock_timestamp() + $4::int * interval '1 millisecond')
ON CONFLICT (name) DO UPDATE SET run = excluded.run, record = excluded.record,
    until = excluded.until

-- name: route
INSERT INTO route (shard, epoch, address) VALUES ($1, $2, $3)
ON CONFLICT (shard) DO UPDATE SET epoch = excluded.epoch, address = excluded.address
WHERE (route.epoch, route.address) <> (excluded.epoch, excluded.address)
    AND route.epoch <= excluded.epoch
RETURNING 1

-- name: nodes
SELECT name, record, (1000 * extract(epoch FROM until))::bigint AS until_ms FROM node

-- name: now_ms
SELECT (1000 * extract(epoch FROM clock_timestamp()))::bigint

-- name: place
INSERT INTO placed VALUES ($1, $2) ON CONFLICT (shard) DO UPDATE SET node = excluded.node
