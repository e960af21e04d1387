-- The statements of the taker on the tables of postgresql.sql, each under a line with its name.

-- name: foreign_settings
-- The settings that a session does not have.
SELECT string_agg(s.name, ', ') FROM unnest($1::text[], $2::text[]) AS s(name, value)
WHERE current_setting(s.name) <> s.value

-- name: be_durable
-- A batch must be durable before it is sent.
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'

-- name: facts
SELECT pg_is_in_recovery() AS is_standby, current_setting('server_encoding') AS encoding,
    current_setting('server_version_num')::int AS version,
    to_regclass('tickwheel.inbox_state') IS NOT NULL AS has_tables

-- name: layout
SELECT layout FROM tickwheel.inbox_state

-- name: lead
SELECT pg_try_advisory_lock(hashtext('tickwheel inbox'),
    'tickwheel.inbox_state'::regclass::oid::bigint::bit(32)::integer)

-- name: clock_ms
SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint

-- name: announce
UPDATE tickwheel.inbox_state SET ({names}) = ROW({places})
WHERE ({names}) IS DISTINCT FROM ROW({places})

-- === rows =======================================================================================

-- name: columns
r.id, r.xid, r.verb, r.topic, r.body, r.delay_ms, r.due_ms, r.options::text AS options, r.at_ms

-- name: is_visible
-- $5: the snapshot whose rows are read; NULL: the current one.
($5::text IS NULL OR pg_visible_in_snapshot(r.xid, $5::text::pg_snapshot))

-- name: side
-- New rows of a table: visible now, but not in the snapshot $1. $2: an xid that was assigned after
-- that snapshot; transactions from there on have higher ids than $3.
(SELECT found.* FROM pg_snapshot_xip($1::text::pg_snapshot) AS late(xid), LATERAL (
    SELECT {include columns} FROM tickwheel.{table} AS r
    WHERE r.xid = late.xid AND r.id > $4 AND {include is_visible}
    ORDER BY r.id LIMIT $6) AS found)
UNION ALL
(SELECT {include columns} FROM (
    SELECT * FROM tickwheel.{table} AS r
    WHERE r.xid >= pg_snapshot_xmax($1::text::pg_snapshot) AND r.xid < $2::text::xid8
        AND r.id > $4 AND {include is_visible} OFFSET 0) AS r
ORDER BY r.id LIMIT $6)
UNION ALL
(SELECT {include columns} FROM tickwheel.{table} AS r
WHERE r.id > greatest($3::bigint, $4) AND (r.xid >= $2::text::xid8) IS NOT FALSE
    AND {include is_visible}
ORDER BY r.id LIMIT $6)

-- name: read
-- The next rows after $4, up to $6 rows and $7 bytes of bodies.
SELECT pg_current_snapshot()::text AS snapshot, last.id AS last_id, r.*
FROM (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS id FROM tickwheel.inbox_id) AS last
LEFT JOIN LATERAL (
    SELECT id, verb, topic, body, delay_ms, due_ms, options, at_ms, found FROM (
        SELECT *, count(*) OVER () AS found,
            sum(octet_length(body)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING EXCLUDE CURRENT ROW)
                AS bytes_before
        FROM (SELECT * FROM ({sides}) AS new ORDER BY id LIMIT $6) AS first
    ) AS measured WHERE coalesce(bytes_before, 0) < $7
) AS r ON true ORDER BY r.id

-- name: refuse
INSERT INTO tickwheel.inbox_refused
    (id, at_ms, verb, topic, body, delay_ms, due_ms, options, code, message)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9, $10) ON CONFLICT (id) DO NOTHING

-- name: count_refused
SELECT count(*) FROM tickwheel.inbox_refused

-- === batches ====================================================================================

-- name: record
INSERT INTO tickwheel.inbox_batches (
    seq, session, number, snapshot, bound, floor, target, after_id, until_id, is_last,
    next_bound, next_floor, rows, ids, rest, offset_ms, shards, at
)
SELECT $1::bigint, $2::bytea, $3::bigint, $4::text::pg_snapshot, $5::text::xid8, $6::bigint,
    $7::text::pg_snapshot, $8::bigint, $9::bigint, $10::boolean,
    coalesce($11::text::xid8, pg_current_xact_id()), $12::bigint, $13::integer, $14::bigint[],
    $15::bigint[], $16::bigint, $17::integer, coalesce($18::timestamptz, clock_timestamp())
WHERE NOT EXISTS (SELECT FROM tickwheel.inbox_batches WHERE seq >= $1::bigint)
RETURNING next_bound::text

-- name: state
SELECT side, cluster, (SELECT count(*) FROM tickwheel.inbox_batches) AS batches
FROM tickwheel.inbox_state

-- name: last
SELECT seq, session, number, snapshot::text, bound::text, floor, target::text, after_id, until_id,
    is_last, next_bound::text, next_floor, rows, ids, rest, offset_ms, shards, at,
    extract(epoch FROM clock_timestamp() - at)::float8 AS age_s
FROM tickwheel.inbox_batches ORDER BY seq DESC LIMIT 1

-- name: cluster
SELECT system_identifier::text FROM pg_control_system()

-- name: store_cluster
UPDATE tickwheel.inbox_state SET cluster = $1

-- name: realign
SELECT tickwheel.inbox_realign($1::text::pg_snapshot, $2)

-- name: next_xid
SELECT (pg_current_xact_id()::text::bigint + 1)::text

-- === removals ===================================================================================

-- name: rotate
UPDATE tickwheel.inbox_state SET side = $1

-- name: is_filled
-- Whether a table has rows, or space to give back.
SELECT EXISTS (SELECT FROM tickwheel.{table}) OR pg_relation_size('tickwheel.{table}') > 0

-- name: lock
LOCK TABLE tickwheel.{table} IN ACCESS EXCLUSIVE MODE NOWAIT

-- name: has_new
-- Whether a table has rows that are not visible in the snapshot $1.
SELECT EXISTS (SELECT FROM tickwheel.{table} WHERE xid >= pg_snapshot_xmax($1::text::pg_snapshot))
    OR EXISTS (SELECT FROM tickwheel.{table} AS r, pg_snapshot_xip($1::text::pg_snapshot) AS x(id)
        WHERE r.xid = x.id)

-- name: truncate
TRUNCATE tickwheel.{table}

-- name: sweep
DELETE FROM tickwheel.inbox_acks WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM tickwheel.inbox_acks
    WHERE at < clock_timestamp() - $1::float8 * interval '1 second' ORDER BY at LIMIT $2))
