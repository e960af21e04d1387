-- The inbox of Tickwheel in an application's SQLite database, layout 1. The daemon creates it;
-- `tickwheel inbox sql --sqlite` prints it. Applications insert rows into tickwheel_inbox.

CREATE TABLE IF NOT EXISTS tickwheel_inbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- writers take turns, so this is the order of commits
    at_ms INTEGER NOT NULL
        DEFAULT (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) + 1),
    verb TEXT NOT NULL CHECK (verb IN ('enqueue', 'cancel', 'reschedule', 'ack')),
    topic TEXT,
    body BLOB,
    delay_ms INTEGER,
    due_ms INTEGER,
    options TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(options))
);

-- One row: what the taker has sent, or was about to send.
CREATE TABLE IF NOT EXISTS tickwheel_inbox_batch (
    layout INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    session BLOB NOT NULL,
    number INTEGER NOT NULL,
    after_id INTEGER NOT NULL,
    until_id INTEGER NOT NULL,
    rows INTEGER NOT NULL,
    ids TEXT,
    rest TEXT,
    offset_ms INTEGER NOT NULL,
    shards INTEGER NOT NULL,
    recorded_ms INTEGER NOT NULL
);
INSERT INTO tickwheel_inbox_batch
    SELECT 1, 0, x'', 0, 0, 0, 0, NULL, NULL, 0, 1, 0
    WHERE NOT EXISTS (SELECT 1 FROM tickwheel_inbox_batch);

-- One row for each task and group that was acknowledged in a transaction in the last week, so that
-- no second attempt can be.
CREATE TABLE IF NOT EXISTS tickwheel_inbox_acks (
    task_id INTEGER NOT NULL,
    task_group TEXT NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (task_id, task_group)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tickwheel_inbox_acks_at ON tickwheel_inbox_acks (at_ms);
CREATE TRIGGER IF NOT EXISTS tickwheel_inbox_ack BEFORE INSERT ON tickwheel_inbox
WHEN NEW.verb = 'ack'
BEGIN
    SELECT RAISE(ABORT, 'stale_receipt: another attempt has acknowledged this task')
    WHERE EXISTS (
        SELECT 1 FROM tickwheel_inbox_acks WHERE task_id = json_extract(NEW.options, '$.id')
            AND task_group = json_extract(NEW.options, '$.group')
    );
    INSERT INTO tickwheel_inbox_acks VALUES (
        json_extract(NEW.options, '$.id'), json_extract(NEW.options, '$.group'),
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
    );
END;

-- Rows that the daemon refused. They wait for an operator.
CREATE TABLE IF NOT EXISTS tickwheel_inbox_refused (
    id INTEGER PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    verb TEXT NOT NULL,
    topic TEXT,
    body BLOB,
    delay_ms INTEGER,
    due_ms INTEGER,
    options TEXT NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL
);
