-- The tables that all shards of a Tickwheel store share. The daemon runs this file when it opens a
-- schema that lacks them; a DBA can run it before, as the daemon's role:
--   CREATE SCHEMA tickwheel AUTHORIZATION tickwheel;
--   SET ROLE tickwheel; SET search_path = tickwheel; \i schema.sql
-- A shard's own tables are created with the shard: task_S_P and note_S_P for each of its parts (rows
-- of `part`), journal_S_G and record_S_G for its generation (`shard.generation`).

CREATE TABLE IF NOT EXISTS layout (
    format int NOT NULL
);
INSERT INTO layout SELECT 1 WHERE NOT EXISTS (SELECT FROM layout);

-- Numbers of parts and generations. A number is never used again, so that a daemon that was deposed
-- cannot change a table of its successor.
CREATE SEQUENCE IF NOT EXISTS part_number;

-- The fence. A batch locks this row and checks epoch, owner and link; it does not change the row, so
-- that no number of batches leaves dead rows here.
CREATE TABLE IF NOT EXISTS shard (
    number int PRIMARY KEY,
    incarnation text NOT NULL,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    link bigint NOT NULL,
    clean boolean NOT NULL,
    opened_ms bigint NOT NULL,
    past text NOT NULL,
    branch text NOT NULL,
    generation bigint NOT NULL
);

-- A part has the tasks whose id is at least `low` and below the next part's.
CREATE TABLE IF NOT EXISTS part (
    shard int NOT NULL,
    number bigint NOT NULL,
    low bigint NOT NULL,
    PRIMARY KEY (shard, number)
);

-- The leader's lease. `until` is compared with the clock of this server only.
CREATE TABLE IF NOT EXISTS lease (
    shard int PRIMARY KEY,
    owner text NOT NULL,
    address text NOT NULL,
    since_ms bigint NOT NULL,
    epoch bigint NOT NULL,
    life text NOT NULL,
    http text NOT NULL,
    until timestamptz NOT NULL,
    timeline text NOT NULL
);

CREATE TABLE IF NOT EXISTS standby (
    shard int NOT NULL,
    node text NOT NULL,
    address text NOT NULL,
    since_ms bigint NOT NULL,
    http text NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (shard, node, address)
);

-- The registry of the nodes that share this schema.
CREATE TABLE IF NOT EXISTS registry (
    shards int NOT NULL,
    version bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS node (
    name text PRIMARY KEY,
    run text NOT NULL,
    record text NOT NULL,
    until timestamptz NOT NULL
);
CREATE TABLE IF NOT EXISTS placed (
    shard int PRIMARY KEY,
    node text NOT NULL
);
CREATE TABLE IF NOT EXISTS drained (
    node text PRIMARY KEY
);
CREATE TABLE IF NOT EXISTS route (
    shard int PRIMARY KEY,
    epoch bigint NOT NULL,
    address text NOT NULL
);
