-- The inbox of Tickwheel in an application's PostgreSQL database (14 or later), layout 1.
--
-- An application calls enqueue, cancel and reschedule in its own transactions. The daemon's taker
-- reads the rows when their transactions have committed. The daemon creates all this when it has
-- the privilege; otherwise run this file as the role with which the daemon connects. The schema is
-- `tickwheel`; `tickwheel inbox sql --schema NAME` prints the file for another one.
--
-- An application needs these privileges and no others:
--     GRANT USAGE ON SCHEMA tickwheel TO application;
--     GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tickwheel TO application;

-- CREATE SCHEMA IF NOT EXISTS would need the privilege also when the schema exists.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'tickwheel') THEN
        CREATE SCHEMA tickwheel;
    END IF;
END $$;

-- No CACHE: of two rows, the one whose insertion began after the other had committed has the higher
-- id.
CREATE SEQUENCE tickwheel.inbox_id;

-- Rows are only inserted. They leave by TRUNCATE: two tables take them alternately, and each is
-- truncated when all its rows are taken, so neither has dead rows of committed transactions.
CREATE TABLE tickwheel.inbox_0 (
    id bigint PRIMARY KEY,
    xid xid8 NOT NULL,          -- of the transaction that inserted the row
    at_ms bigint NOT NULL,      -- by the clock of this database
    verb text NOT NULL,         -- enqueue, cancel, reschedule or ack
    topic text,
    body bytea,
    delay_ms bigint,
    due_ms bigint,
    options jsonb NOT NULL
) WITH (autovacuum_enabled = false);
CREATE INDEX inbox_0_xid ON tickwheel.inbox_0 (xid, id);
CREATE TABLE tickwheel.inbox_1 (LIKE tickwheel.inbox_0 INCLUDING ALL)
    WITH (autovacuum_enabled = false);

-- What the taker has sent, or was about to send; the last row counts. Also truncated.
CREATE TABLE tickwheel.inbox_batches (
    seq bigint PRIMARY KEY,
    session bytea NOT NULL,     -- of the taker at the daemon
    number bigint NOT NULL,     -- of the request in that session
    snapshot pg_snapshot NOT NULL,  -- all rows visible in it were taken before
    bound xid8 NOT NULL,        -- transactions from here on began after that snapshot,
    floor bigint NOT NULL,      -- and their rows have higher ids than this
    target pg_snapshot NOT NULL,    -- the batch is of rows visible in it,
    after_id bigint NOT NULL,   -- with ids above this
    until_id bigint NOT NULL,   -- and up to this
    is_last boolean NOT NULL,   -- whether these are the last new rows visible in it
    next_bound xid8 NOT NULL,
    next_floor bigint NOT NULL,
    rows integer NOT NULL,      -- the number of rows that it sends
    ids bigint[],               -- these rows if they are not all, and
    rest bigint[],              -- the rows that are still to be sent
    offset_ms bigint NOT NULL,  -- the daemon's clock minus that of this database
    shards integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (autovacuum_enabled = false);

-- One row for each task and group that was acknowledged in a transaction in the last week, so that
-- no second attempt can be.
CREATE TABLE tickwheel.inbox_acks (
    task_id bigint NOT NULL,
    task_group text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (task_id, task_group)
);
CREATE INDEX inbox_acks_at ON tickwheel.inbox_acks (at);

-- Rows that the daemon refused. They wait for an operator.
CREATE TABLE tickwheel.inbox_refused (
    id bigint PRIMARY KEY,
    at_ms bigint NOT NULL,
    verb text NOT NULL,
    topic text,
    body bytea,
    delay_ms bigint,
    due_ms bigint,
    options jsonb NOT NULL,
    code text NOT NULL,         -- of the table of errors
    message text NOT NULL,
    refused_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row: which table takes new rows, and the daemon's limits, which the taker keeps current.
CREATE TABLE tickwheel.inbox_state (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    layout integer NOT NULL DEFAULT 1,
    side smallint NOT NULL DEFAULT 0,
    cluster text,               -- the system identifier of the cluster that the xids belong to
    body_bytes_max bigint NOT NULL,
    task_bytes_max bigint NOT NULL,
    delay_ms_max bigint NOT NULL,
    within_ms_max bigint NOT NULL,
    key_length_max bigint NOT NULL,
    properties_max bigint NOT NULL,
    property_value_bytes_max bigint NOT NULL
);

CREATE FUNCTION tickwheel.inbox_refuse(code text, message text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING MESSAGE = code || ': ' || message, DETAIL = code, ERRCODE = CASE code
        WHEN 'bad_request' THEN 'TW001' WHEN 'limit_exceeded' THEN 'TW002'
        WHEN 'body_too_large' THEN 'TW003' WHEN 'due_too_far' THEN 'TW004'
        WHEN 'stale_receipt' THEN 'TW005' ELSE 'TW000' END;
END $$;

-- Whether a value of a map is as `allowed` says: one of its words, text, a number within its bounds,
-- or a list of such numbers.
CREATE FUNCTION tickwheel.inbox_fits(value jsonb, allowed jsonb) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    word text := value #>> '{}';
BEGIN
    IF allowed ? 'words' THEN
        RETURN jsonb_typeof(value) = 'string' AND allowed -> 'words' ? word;
    END IF;
    IF allowed ? 'length' THEN
        RETURN jsonb_typeof(value) = 'string'
            AND char_length(word) <= (allowed ->> 'length')::integer;
    END IF;
    IF allowed ? 'many' THEN
        IF jsonb_typeof(value) <> 'array' THEN
            RETURN false;
        END IF;
        RETURN jsonb_array_length(value) BETWEEN 1 AND (allowed ->> 'many')::integer
            AND NOT EXISTS (
                SELECT FROM jsonb_array_elements(value) AS one
                WHERE NOT tickwheel.inbox_fits(one, allowed - 'many')
            );
    END IF;
    IF jsonb_typeof(value) <> 'number' OR allowed ? 'whole' AND word !~ '^-?[0-9]+$' THEN
        RETURN false;
    END IF;
    RETURN word::numeric BETWEEN (allowed ->> 'low')::numeric AND (allowed ->> 'high')::numeric;
END $$;

-- Check that a map has only these fields. `owner` names the map in messages.
CREATE FUNCTION tickwheel.inbox_check_fields(owner text, map jsonb, fields jsonb)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    name text;
    allowed jsonb;
    value jsonb;
BEGIN
    FOR name, value IN SELECT * FROM jsonb_each(map) LOOP
        IF NOT fields ? name AND value <> 'null' THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', format('%s has no option %L', owner, left(name, 60)));
        END IF;
    END LOOP;
    FOR name, allowed IN SELECT * FROM jsonb_each(fields) LOOP
        value := coalesce(map -> name, 'null');
        CONTINUE WHEN value = 'null' AND NOT allowed ? 'needed';
        IF NOT tickwheel.inbox_fits(value, allowed) THEN
            PERFORM tickwheel.inbox_refuse('bad_request', format(
                '%s.%s must be %s, not %L', owner, name, allowed ->> 'text',
                left(value #>> '{}', 60)));
        END IF;
    END LOOP;
END $$;

-- Check a map whose value of `selector` is one of `kinds`, each of which has other fields.
CREATE FUNCTION tickwheel.inbox_check_map(owner text, map jsonb, selector text, kinds jsonb)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_typeof(map -> selector) IS DISTINCT FROM 'string' OR NOT kinds ? (map ->> selector)
    THEN
        PERFORM tickwheel.inbox_refuse('bad_request', format(
            '%s.%s must be one of %s, not %L', owner, selector,
            (SELECT string_agg(k, ', ' ORDER BY k) FROM jsonb_object_keys(kinds) AS k),
            left(map ->> selector, 60)));
    END IF;
    PERFORM tickwheel.inbox_check_fields(owner, map - selector, kinds -> (map ->> selector));
END $$;

-- generated: options
CREATE FUNCTION tickwheel.inbox_check_options(options jsonb, state tickwheel.inbox_state)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    name text;
    value jsonb;
    word text;
BEGIN
    FOR name, value IN SELECT * FROM jsonb_each(options) LOOP
        word := value #>> '{}';
        IF name = 'key' THEN
            IF jsonb_typeof(value) <> 'string' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'key must be text, not %L',
                    left(word, 60)));
            END IF;
            IF char_length(word) > state.key_length_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'key has %s characters; the limit is %s (key_length_max)',
                    char_length(word), state.key_length_max));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'tag' THEN
            IF jsonb_typeof(value) <> 'string' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'tag must be text, not %L',
                    left(word, 60)));
            END IF;
            IF char_length(word) > state.key_length_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'tag has %s characters; the limit is %s (key_length_max)',
                    char_length(word), state.key_length_max));
            END IF;
            IF word IN ('', '*') OR word LIKE '%||%' OR word <> btrim(word, E'\u0009\u000a\u000b\u000c\u000d\u001c\u001d\u001e\u001f\u0020\u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000') THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'tag must be not empty, not *, without ||, without outer blanks, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'properties' THEN
            IF jsonb_typeof(value) <> 'object' OR EXISTS (SELECT FROM jsonb_each(value) AS p(k, v) WHERE jsonb_typeof(v) NOT IN ('string', 'number', 'boolean') OR k = '') THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'properties must be a map of names to text, numbers or booleans, not %L',
                    left(word, 60)));
            END IF;
            IF EXISTS (SELECT FROM jsonb_each(value) AS p(k, v) WHERE CASE WHEN jsonb_typeof(v) = 'number' AND v #>> '{}' ~ '^-?[0-9]+$' THEN (v #>> '{}')::numeric NOT BETWEEN -9223372036854775808 AND 9223372036854775807 END) THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'properties must be a map without integers of more than 64 bits, not %L',
                    left(word, 60)));
            END IF;
            IF EXISTS (SELECT FROM jsonb_each(value) AS p(k, v) WHERE CASE WHEN jsonb_typeof(v) = 'number' THEN abs((v #>> '{}')::numeric) > 1.7976931348623157e+308 END) THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'properties must be a map without numbers above 1.79769e+308, not %L',
                    left(word, 60)));
            END IF;
            IF (SELECT count(*) FROM jsonb_each(value)) > state.properties_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'properties has %s; the limit is %s (properties_max)',
                    (SELECT count(*) FROM jsonb_each(value)), state.properties_max));
            END IF;
            IF (SELECT max(octet_length(v #>> '{}')) FROM jsonb_each(value) AS p(k, v) WHERE jsonb_typeof(v) = 'string') > state.property_value_bytes_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'a property has %s bytes; the limit is %s (property_value_bytes_max)',
                    (SELECT max(octet_length(v #>> '{}')) FROM jsonb_each(value) AS p(k, v) WHERE jsonb_typeof(v) = 'string'), state.property_value_bytes_max));
            END IF;
            IF (SELECT max(char_length(k)) FROM jsonb_each(value) AS p(k, v)) > state.key_length_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'the name of a property has %s characters; the limit is %s (key_length_max)',
                    (SELECT max(char_length(k)) FROM jsonb_each(value) AS p(k, v)), state.key_length_max));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'priority' THEN
            IF jsonb_typeof(value) <> 'number' OR word !~ '^-?[0-9]+$' OR word::numeric NOT BETWEEN 0 AND 255 THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'priority must be a whole number from 0 to 255, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'ttl_ms' THEN
            IF jsonb_typeof(value) <> 'number' OR word !~ '^-?[0-9]+$' OR word::numeric NOT BETWEEN 1 AND state.delay_ms_max THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'ttl_ms must be a whole number from 1 to delay_ms_max, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'within_ms' THEN
            IF jsonb_typeof(value) <> 'number' OR word !~ '^-?[0-9]+$' OR word::numeric NOT BETWEEN 0 AND state.within_ms_max THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'within_ms must be a whole number from 0 to within_ms_max, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'order_key' THEN
            IF jsonb_typeof(value) <> 'string' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'order_key must be text, not %L',
                    left(word, 60)));
            END IF;
            IF char_length(word) > state.key_length_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'order_key has %s characters; the limit is %s (key_length_max)',
                    char_length(word), state.key_length_max));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'trace' THEN
            IF jsonb_typeof(value) <> 'string' OR char_length(word) > 255 OR word !~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'trace must be a valid traceparent, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'encoding' THEN
            IF jsonb_typeof(value) <> 'string' OR char_length(word) > 255 OR word !~ '^[a-z0-9][a-z0-9.+-]*(;[a-z]+=[A-Za-z0-9._:/+-]+)*(,[a-z0-9][a-z0-9.+-]*(;[a-z]+=[A-Za-z0-9._:/+-]+)*)*$' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'encoding must be a valid encoding, not %L',
                    left(word, 60)));
            END IF;
            IF length(word) - length(replace(word, ',', '')) + (split_part(split_part(word, ',', 1), ';', 1) IN ('aesgcm', 'zlib', 'zstd'))::integer > 2 THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'encoding has %s steps; the limit is 2 (encoding_steps_max)',
                    length(word) - length(replace(word, ',', '')) + (split_part(split_part(word, ',', 1), ';', 1) IN ('aesgcm', 'zlib', 'zstd'))::integer));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'shard_by' THEN
            IF jsonb_typeof(value) <> 'string' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'shard_by must be text, not %L',
                    left(word, 60)));
            END IF;
            IF char_length(word) > state.key_length_max THEN
                PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                    'shard_by has %s characters; the limit is %s (key_length_max)',
                    char_length(word), state.key_length_max));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'retry' THEN
            IF jsonb_typeof(value) = 'object' THEN
                PERFORM tickwheel.inbox_check_map('retry', value, 'kind',
                    jsonb_build_object(
                    'exponential', '{"base_ms": {"text": "a whole number from 0 to 315576000000", "low": 0, "high": 315576000000, "whole": true}, "factor": {"text": "a number from 1 to 1e+06", "low": 1.0, "high": 1000000.0}, "cap_ms": {"text": "a whole number from 0 to 315576000000", "low": 0, "high": 315576000000, "whole": true}, "retries": {"text": "a whole number from 0 to 65535", "low": 0, "high": 65535, "whole": true}, "jitter": {"text": "a number from 0 to 1", "low": 0.0, "high": 1.0}}'::jsonb,
                    'fixed', '{"delay_ms": {"text": "a whole number from 0 to 315576000000", "low": 0, "high": 315576000000, "whole": true}, "retries": {"text": "a whole number from 0 to 65535", "low": 0, "high": 65535, "whole": true}, "jitter": {"text": "a number from 0 to 1", "low": 0.0, "high": 1.0}}'::jsonb,
                    'table', '{"delays_ms": {"text": "1 to 1024 numbers, each a whole number from 0 to 315576000000", "low": 0, "high": 315576000000, "whole": true, "many": 1024, "needed": true}, "retries": {"text": "a whole number from 0 to 65535", "low": 0, "high": 65535, "whole": true}}'::jsonb,
                    'none', '{}'::jsonb));
                IF (value ->> 'cap_ms')::numeric < (value ->> 'base_ms')::numeric THEN
                    PERFORM tickwheel.inbox_refuse('bad_request', 'retry: cap_ms must be at least base_ms');
                END IF;
            ELSIF jsonb_typeof(value) <> 'string' OR word !~ '^[A-Za-z][A-Za-z0-9._-]{0,63}$' THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'retry must be the name of a policy or a map, not %L', left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'delay_level' THEN
            IF jsonb_typeof(value) <> 'number' OR word !~ '^-?[0-9]+$' OR word::numeric NOT BETWEEN 1 AND 2147483647 THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'delay_level must be a whole number from 1 to 2147483647, not %L',
                    left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        IF name = 'if_pending' THEN
            IF jsonb_typeof(value) = 'object' THEN
                PERFORM tickwheel.inbox_check_map('if_pending', value, 'action',
                    jsonb_build_object(
                    'add', '{}'::jsonb,
                    'keep', '{"window_ms": {"text": "a whole number from 1 to 315576000000", "low": 1, "high": 315576000000, "whole": true}, "unique_until": {"text": "one of started, finished", "words": ["started", "finished"]}}'::jsonb,
                    'replace', '{"window_ms": {"text": "a whole number from 1 to 315576000000", "low": 1, "high": 315576000000, "whole": true}, "replaces": {"text": "one of both, body, due", "words": ["both", "body", "due"]}, "due": {"text": "one of new, later, earlier", "words": ["new", "later", "earlier"]}, "max_wait_ms": {"text": "a whole number from 1 to 315576000000", "low": 1, "high": 315576000000, "whole": true}}'::jsonb,
                    'reject', '{"window_ms": {"text": "a whole number from 1 to 315576000000", "low": 1, "high": 315576000000, "whole": true}, "unique_until": {"text": "one of started, finished", "words": ["started", "finished"]}}'::jsonb));
                IF value ->> 'replaces' = 'body' AND (value ->> 'max_wait_ms' IS NOT NULL OR value ->> 'due' <> 'new') THEN
                    PERFORM tickwheel.inbox_refuse('bad_request', 'if_pending: due and max_wait_ms need replaces both or due, not body');
                END IF;
            ELSIF jsonb_typeof(value) <> 'string' OR word NOT IN ('add', 'keep', 'replace', 'reject') THEN
                PERFORM tickwheel.inbox_refuse('bad_request', format(
                    'if_pending must be one of add, keep, replace, reject, or a map, not %L', left(word, 60)));
            END IF;
            CONTINUE;
        END IF;
        PERFORM tickwheel.inbox_refuse('bad_request', format('unknown option %L', left(name, 60)));
    END LOOP;
END $$;

-- The size of a task as the daemon counts it.
CREATE FUNCTION tickwheel.inbox_task_bytes(body bytea, options jsonb)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (length(body) + coalesce(64 + sum(CASE name
        WHEN 'key' THEN 0 + octet_length(value #>> '{}')
        WHEN 'tag' THEN 0 + octet_length(value #>> '{}')
        WHEN 'order_key' THEN 16 + octet_length(value #>> '{}')
        WHEN 'encoding' THEN 12 + octet_length(value #>> '{}')
        WHEN 'shard_by' THEN 12 + octet_length(value #>> '{}')
        WHEN 'trace' THEN 64
        WHEN 'within_ms' THEN 40
        WHEN 'properties' THEN (
            SELECT sum(8 + octet_length(k) + CASE jsonb_typeof(v)
                WHEN 'string' THEN octet_length(v #>> '{}') ELSE 9 END)
            FROM jsonb_each(value) AS p(k, v))
        WHEN 'retry' THEN CASE WHEN jsonb_typeof(value) = 'object' THEN 9 * (6 + CASE
            WHEN jsonb_typeof(value -> 'delays_ms') = 'array'
            THEN jsonb_array_length(value -> 'delays_ms') ELSE 0 END) ELSE 0 END
        ELSE 0 END), 0))::bigint
    FROM jsonb_each(options) AS o(name, value)
    WHERE name NOT IN ('delay_level', 'if_pending') AND value NOT IN ('0', '{}')
$$;
-- end

CREATE FUNCTION tickwheel.inbox_check(
    verb text, topic text, body bytea, delay_ms bigint, due_ms bigint, options jsonb,
    state tickwheel.inbox_state
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    now_ms bigint := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    has_delay boolean := delay_ms IS NOT NULL OR due_ms IS NOT NULL;
    whole jsonb := '{"text": "a whole number of 63 bits", "low": 0, "high": 9223372036854775807,
        "whole": true}';
    words jsonb := jsonb_build_object('length', state.key_length_max, 'text',
        format('text of up to %s characters (key_length_max)', state.key_length_max));
    size bigint;
BEGIN
    IF jsonb_typeof(options) <> 'object' THEN
        PERFORM tickwheel.inbox_refuse('bad_request', 'options must be a map');
    END IF;
    IF topic IS NOT NULL AND topic !~ '^[A-Za-z0-9._:/-]{1,255}$' THEN
        PERFORM tickwheel.inbox_refuse('bad_request', format(
            'topic must be 1 to 255 characters from A-Z a-z 0-9 . _ : / -, not %L',
            left(topic, 60)));
    END IF;
    IF delay_ms IS NOT NULL AND due_ms IS NOT NULL THEN
        PERFORM tickwheel.inbox_refuse('bad_request', 'use only one of delay and at');
    END IF;
    IF delay_ms < 0 THEN
        PERFORM tickwheel.inbox_refuse(
            'bad_request', format('delay must be at least 0, not %s ms', delay_ms));
    END IF;
    IF due_ms < 0 THEN
        PERFORM tickwheel.inbox_refuse('bad_request', 'at must not be before 1970');
    END IF;
    IF delay_ms > state.delay_ms_max OR due_ms - now_ms > state.delay_ms_max THEN
        PERFORM tickwheel.inbox_refuse('due_too_far', format(
            'the task is due in %s ms; the limit is %s ms (delay_ms_max)',
            coalesce(delay_ms, due_ms - now_ms), state.delay_ms_max));
    END IF;
    IF verb = 'enqueue' THEN
        IF topic IS NULL OR body IS NULL THEN
            PERFORM tickwheel.inbox_refuse('bad_request', 'a task must have a topic and a body');
        END IF;
        IF length(body) > state.body_bytes_max THEN
            PERFORM tickwheel.inbox_refuse('body_too_large', format(
                'body has %s bytes; the limit is %s (body_bytes_max)',
                length(body), state.body_bytes_max));
        END IF;
        IF options ? 'delay_level' AND has_delay THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'use only one of delay_level, delay and at');
        END IF;
        PERFORM tickwheel.inbox_check_options(options, state);
        IF options ? 'order_key' AND options ? 'retry' THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'a task has either order_key or retry, not both');
        END IF;
        IF options ? 'order_key'
            AND coalesce(options ->> 'shard_by', options ->> 'order_key')
                <> options ->> 'order_key' THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'shard_by and order_key must be equal');
        END IF;
        IF coalesce(options #>> '{if_pending,action}', options ->> 'if_pending', 'add') <> 'add'
            AND NOT options ? 'key' THEN
            PERFORM tickwheel.inbox_refuse('bad_request', 'if_pending needs a key');
        END IF;
        size := tickwheel.inbox_task_bytes(body, options);
        IF size > state.task_bytes_max THEN
            PERFORM tickwheel.inbox_refuse('limit_exceeded', format(
                'the task has %s bytes with all its fields; the limit is %s (task_bytes_max)',
                size, state.task_bytes_max));
        END IF;
    ELSIF verb = 'ack' THEN
        IF topic IS NULL OR NOT options ?& ARRAY['id', 'group', 'epoch', 'attempt'] THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'an ack must have topic, id, group, epoch and attempt');
        END IF;
        PERFORM tickwheel.inbox_check_fields('ack', options, jsonb_build_object(
            'id', whole, 'group', words, 'epoch', whole, 'attempt', whole));
    ELSE
        IF (options ? 'id') = (topic IS NOT NULL AND options ? 'key') THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'select tasks either by id or by topic and key');
        END IF;
        IF has_delay <> (verb = 'reschedule') THEN
            PERFORM tickwheel.inbox_refuse(
                'bad_request', 'reschedule must have exactly one of delay and at');
        END IF;
        PERFORM tickwheel.inbox_check_fields(
            verb, options, jsonb_build_object('id', whole, 'key', words));
    END IF;
END $$;

-- Add a row and return its id. Applications in Python call this function, all others the functions
-- below. `options` has the form of the protocol.
CREATE FUNCTION tickwheel.inbox_put(
    verb text, topic text, body bytea, delay_ms bigint, due_ms bigint, options jsonb
) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    state tickwheel.inbox_state;
    own_xid xid8;
    row_id bigint;
    now_ms bigint := ceil(extract(epoch FROM clock_timestamp()) * 1000);
BEGIN
    IF verb IS NULL OR verb NOT IN ('enqueue', 'cancel', 'reschedule', 'ack') THEN
        PERFORM tickwheel.inbox_refuse('bad_request', format(
            'verb must be enqueue, cancel, reschedule or ack, not %L', verb));
    END IF;
    SELECT * INTO STRICT state FROM tickwheel.inbox_state;
    options := coalesce(options, '{}');
    PERFORM tickwheel.inbox_check(verb, topic, body, delay_ms, due_ms, options, state);
    IF verb = 'ack' THEN
        -- This waits for another transaction that acknowledges the same task.
        INSERT INTO tickwheel.inbox_acks
            VALUES ((options ->> 'id')::bigint, options ->> 'group') ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            PERFORM tickwheel.inbox_refuse(
                'stale_receipt', 'another attempt has acknowledged this task');
        END IF;
    END IF;
    own_xid := pg_current_xact_id();  -- before the id: see inbox_batches.floor
    row_id := nextval('tickwheel.inbox_id');
    IF state.side = 0 THEN
        INSERT INTO tickwheel.inbox_0
            VALUES (row_id, own_xid, now_ms, verb, topic, body, delay_ms, due_ms, options);
    ELSE
        INSERT INTO tickwheel.inbox_1
            VALUES (row_id, own_xid, now_ms, verb, topic, body, delay_ms, due_ms, options);
    END IF;
    RETURN row_id;
END $$;

-- The milliseconds of a duration or a moment, rounded up so that no task is early.
CREATE FUNCTION tickwheel.inbox_ms(field text, seconds numeric) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF seconds IN ('Infinity', '-Infinity') THEN
        PERFORM tickwheel.inbox_refuse(
            'bad_request', format('%s must be finite, not %s', field, seconds));
    END IF;
    RETURN ceil(seconds * 1000);
END $$;

-- A word, or JSON of a map.
CREATE FUNCTION tickwheel.inbox_json(value text) RETURNS jsonb LANGUAGE sql IMMUTABLE AS
    $$SELECT CASE WHEN value LIKE '{%' THEN value::jsonb ELSE to_jsonb(value) END$$;

-- Drop the options that are not set.
CREATE FUNCTION tickwheel.inbox_options(options jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(key, value), '{}') FROM jsonb_each(options)
    WHERE value <> 'null'
$$;

-- generated: enqueue
-- Enqueue a task when this transaction commits. Return the row's id.
CREATE FUNCTION tickwheel.enqueue(
    topic text,
    body bytea,
    delay interval DEFAULT NULL,
    at timestamptz DEFAULT NULL,
    key text DEFAULT NULL,
    tag text DEFAULT NULL,
    properties jsonb DEFAULT NULL,
    priority integer DEFAULT NULL,
    ttl interval DEFAULT NULL,
    within interval DEFAULT NULL,
    order_key text DEFAULT NULL,
    trace text DEFAULT NULL,
    encoding text DEFAULT NULL,
    shard_by text DEFAULT NULL,
    retry text DEFAULT NULL,
    delay_level integer DEFAULT NULL,
    if_pending text DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT tickwheel.inbox_put('enqueue', topic, body,
        tickwheel.inbox_ms('delay', extract(epoch FROM delay)),
        tickwheel.inbox_ms('at', extract(epoch FROM at)),
        tickwheel.inbox_options(jsonb_build_object(
            'key', key,
            'tag', tag,
            'properties', properties,
            'priority', priority,
            'ttl_ms', tickwheel.inbox_ms('ttl', extract(epoch FROM ttl)),
            'within_ms', tickwheel.inbox_ms('within', extract(epoch FROM within)),
            'order_key', order_key,
            'trace', trace,
            'encoding', encoding,
            'shard_by', shard_by,
            'retry', tickwheel.inbox_json(retry),
            'delay_level', delay_level,
            'if_pending', tickwheel.inbox_json(if_pending))))
$$;

-- The same for a body that is text.
CREATE FUNCTION tickwheel.enqueue(
    topic text,
    body text,
    delay interval DEFAULT NULL,
    at timestamptz DEFAULT NULL,
    key text DEFAULT NULL,
    tag text DEFAULT NULL,
    properties jsonb DEFAULT NULL,
    priority integer DEFAULT NULL,
    ttl interval DEFAULT NULL,
    within interval DEFAULT NULL,
    order_key text DEFAULT NULL,
    trace text DEFAULT NULL,
    encoding text DEFAULT NULL,
    shard_by text DEFAULT NULL,
    retry text DEFAULT NULL,
    delay_level integer DEFAULT NULL,
    if_pending text DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT tickwheel.inbox_put('enqueue', topic, convert_to(body, 'UTF8'),
        tickwheel.inbox_ms('delay', extract(epoch FROM delay)),
        tickwheel.inbox_ms('at', extract(epoch FROM at)),
        tickwheel.inbox_options(jsonb_build_object(
            'key', key,
            'tag', tag,
            'properties', properties,
            'priority', priority,
            'ttl_ms', tickwheel.inbox_ms('ttl', extract(epoch FROM ttl)),
            'within_ms', tickwheel.inbox_ms('within', extract(epoch FROM within)),
            'order_key', order_key,
            'trace', trace,
            'encoding', encoding,
            'shard_by', shard_by,
            'retry', tickwheel.inbox_json(retry),
            'delay_level', delay_level,
            'if_pending', tickwheel.inbox_json(if_pending))))
$$;

-- The same for a body that is JSON.
CREATE FUNCTION tickwheel.enqueue(
    topic text,
    body jsonb,
    delay interval DEFAULT NULL,
    at timestamptz DEFAULT NULL,
    key text DEFAULT NULL,
    tag text DEFAULT NULL,
    properties jsonb DEFAULT NULL,
    priority integer DEFAULT NULL,
    ttl interval DEFAULT NULL,
    within interval DEFAULT NULL,
    order_key text DEFAULT NULL,
    trace text DEFAULT NULL,
    encoding text DEFAULT NULL,
    shard_by text DEFAULT NULL,
    retry text DEFAULT NULL,
    delay_level integer DEFAULT NULL,
    if_pending text DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT tickwheel.inbox_put('enqueue', topic, convert_to(body::text, 'UTF8'),
        tickwheel.inbox_ms('delay', extract(epoch FROM delay)),
        tickwheel.inbox_ms('at', extract(epoch FROM at)),
        tickwheel.inbox_options(jsonb_build_object(
            'key', key,
            'tag', tag,
            'properties', properties,
            'priority', priority,
            'ttl_ms', tickwheel.inbox_ms('ttl', extract(epoch FROM ttl)),
            'within_ms', tickwheel.inbox_ms('within', extract(epoch FROM within)),
            'order_key', order_key,
            'trace', trace,
            'encoding', coalesce(encoding, 'json'),
            'shard_by', shard_by,
            'retry', tickwheel.inbox_json(retry),
            'delay_level', delay_level,
            'if_pending', tickwheel.inbox_json(if_pending))))
$$;

-- end

-- Cancel a task by its id, or all unfinished tasks of a topic that have a key.
CREATE FUNCTION tickwheel.cancel(
    id bigint DEFAULT NULL, topic text DEFAULT NULL, key text DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT tickwheel.inbox_put('cancel', topic, NULL, NULL, NULL,
        tickwheel.inbox_options(jsonb_build_object('id', id, 'key', key)))
$$;

-- Give a task, or all unfinished tasks of a topic that have a key, a new due time.
CREATE FUNCTION tickwheel.reschedule(
    id bigint DEFAULT NULL, topic text DEFAULT NULL, key text DEFAULT NULL,
    delay interval DEFAULT NULL, at timestamptz DEFAULT NULL
) RETURNS bigint LANGUAGE sql AS $$
    SELECT tickwheel.inbox_put('reschedule', topic, NULL,
        tickwheel.inbox_ms('delay', extract(epoch FROM delay)),
        tickwheel.inbox_ms('at', extract(epoch FROM at)),
        tickwheel.inbox_options(jsonb_build_object('id', id, 'key', key)))
$$;

-- After the database was restored into another cluster, the ids of transactions mean nothing. Give
-- rows that were not taken new ones, and return the snapshot before: no row is visible in it.
CREATE FUNCTION tickwheel.inbox_realign(taken pg_snapshot, taken_id bigint) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    before pg_snapshot := pg_current_snapshot();
BEGIN
    LOCK TABLE tickwheel.inbox_0, tickwheel.inbox_1 IN ACCESS EXCLUSIVE MODE;
    DELETE FROM tickwheel.inbox_0 WHERE id <= taken_id AND pg_visible_in_snapshot(xid, taken);
    DELETE FROM tickwheel.inbox_1 WHERE id <= taken_id AND pg_visible_in_snapshot(xid, taken);
    UPDATE tickwheel.inbox_0 SET xid = pg_current_xact_id();
    UPDATE tickwheel.inbox_1 SET xid = pg_current_xact_id();
    RETURN before::text;
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tickwheel FROM PUBLIC;
-- generated: limits
INSERT INTO tickwheel.inbox_state (body_bytes_max, task_bytes_max, delay_ms_max, within_ms_max, key_length_max, properties_max, property_value_bytes_max)
    VALUES (1048576, 1114112, 315576000000, 86400000, 255, 64, 4096);
-- end
