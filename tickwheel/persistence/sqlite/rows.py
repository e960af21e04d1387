"""Converts between rows and columns, and defines statements that write many rows at once.

Columns that most rows do not need (extras, past) are NULL and cost nothing. At each statement the
writer's thread releases the interpreter lock several times, so the number of statements matters
more than the number of rows. Statements have a few fixed sizes, each prepared once: a batch of 500
rows is one statement of 512 rows, of which 12 are empty. This module begins no transaction.

Key hashes are written together with packs and single rows, but recovery reads them separately. A
pack with keys has a row in ``pack_key``, and a single row with a key has one in ``task_key``. A
hash stays as long as its pack or row; ``gone`` records which tasks have left a pack.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from itertools import chain, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tickwheel.model.key_hash import NO_KEY, KeyHash
from tickwheel.model.records import (
    ID_STEP,
    DeadRow,
    Past,
    ProgressRow,
    TaskRow,
    keys_alone,
    keys_bytes,
    options_bytes,
)
from tickwheel.persistence.codec import (
    decode_extras,
    decode_past,
    decode_record,
    encode_extras,
    encode_past,
    encode_records,
    key_text,
    kind_of,
    progress_state,
)
from tickwheel.persistence.contract import Keyed
from tickwheel.persistence.sqlite.database import blob_join, blob_of
from tickwheel.persistence.sqlite.packs import DUE_BYTES, PackIndex, PackValues, ids_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tickwheel.model.kinds import Effects, RecordKey


ROWS_MAX = 512
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, ROWS_MAX)
"""Possible numbers of rows in a statement. At most a third of the rows is padding, and up to 512
rows need only one statement. 512 rows of 7 columns stay below SQLite's limit of 32,766
variables."""


def sizes_for(count: int, rows_max: int = ROWS_MAX) -> Iterator[int]:
    """Yield the sizes of statements for ``count`` rows. The last one can include padding."""
    largest = max(size for size in SIZES if size <= rows_max)
    while count > 0:
        size = largest if count >= largest else next(s for s in SIZES if s >= count)
        yield size
        count -= size


class Multi:
    """A multi-row statement; ``run`` splits, pads and executes it."""

    def __init__(self, head: str, columns: int, tail: str) -> None:
        self._columns = columns
        row = "(" + ",".join("?" * columns) + ")"
        self._texts = {size: head + ",".join([row] * size) + tail for size in SIZES}

    def run(
        self,
        connection: sqlite3.Connection,
        rows: Iterable[Sequence[object]],
        rows_max: int = ROWS_MAX,
    ) -> None:
        """Execute the statement for all rows, with at most ``rows_max`` rows at once."""
        values = list(chain.from_iterable(rows))
        columns = self._columns
        start = 0
        for size in sizes_for(len(values) // columns, rows_max):
            padded = values[start : start + size * columns]
            padded += [None] * (size * columns - len(padded))
            connection.execute(self._texts[size], padded)
            start += size * columns


def insert(verb: str, table: str, columns: int) -> Multi:
    """Return a statement that inserts rows, except padding, whose first column is NULL."""
    return Multi(f"{verb} INTO {table} SELECT * FROM (VALUES ", columns, ") WHERE column1 NOTNULL")


# OR ROLLBACK: a duplicate id rolls back the whole batch, so SQLite needs no statement journal.
INSERT_TASKS = insert("INSERT OR ROLLBACK", "task", 5)
INSERT_PACKS = insert("INSERT OR ROLLBACK", "pack", 6)
REPLACE_GONE = insert("REPLACE", "gone", 2)
REPLACE_MOVED = insert("REPLACE", "moved", 2)
REPLACE_TASKS = insert("REPLACE", "task", 5)
REPLACE_PREPARE = insert("REPLACE", "prepare", 7)
REPLACE_DEAD = insert("REPLACE", "dead", 8)
REPLACE_RECORDS = insert("REPLACE", "record", 3)


def _delete(table: str, columns: dict[str, str]) -> Multi:
    """Return a statement that deletes by key. The casts make SQLite use the index. No row matches
    padding."""
    casts = ", ".join(f"CAST(column{i} AS {kind})" for i, kind in enumerate(columns.values(), 1))
    head = f"DELETE FROM {table} WHERE ({', '.join(columns)}) IN (SELECT {casts} FROM (VALUES "
    return Multi(head, len(columns), "))")


DELETE_PREPARE = _delete("prepare", {"id": "INTEGER", "grp": "TEXT"})
DELETE_DEAD = _delete("dead", {"id": "INTEGER", "grp": "TEXT"})

# The argument is str() of a list of integers: one argument for any number of ids.
DELETE_TASKS_BY_ID = "DELETE FROM task WHERE id IN (SELECT value FROM json_each(?))"
DELETE_RECORDS = "DELETE FROM record WHERE kind = ? AND key IN (SELECT value FROM json_each(?))"
DELETE_PACKS = "DELETE FROM pack WHERE first IN (SELECT value FROM json_each(?))"
DELETE_GONE = "DELETE FROM gone WHERE first IN (SELECT value FROM json_each(?))"
DELETE_MOVED = "DELETE FROM moved WHERE first IN (SELECT value FROM json_each(?))"
READ_PACKS = (
    "SELECT pack.*, ifnull(mask, 0), dues FROM pack LEFT JOIN gone USING (first)"
    " LEFT JOIN moved USING (first) WHERE first IN (SELECT value FROM json_each(?))"
)
DUES = (
    f"CASE WHEN length(dues) = {DUE_BYTES} * count THEN dues"
    f" ELSE substr(head, 1, {DUE_BYTES} * count) END"
)
"""SQL expression for the current due times of a pack."""
READ_DUES = (
    f"SELECT json_group_array(json_array(first, count)), {{join}} FROM (SELECT first, count,"
    f" {DUES} AS now FROM pack LEFT JOIN moved USING (first)"
    " WHERE first IN (SELECT value FROM json_each(?)))"
)
INSERT_MOVES = "INSERT OR ROLLBACK INTO move VALUES (?, ?)"
READ_MOVES = "SELECT data FROM move ORDER BY batch"
COUNT_MOVES = "SELECT ifnull(sum(length(data)), 0) / 16 FROM move"
DELETE_MOVES = "DELETE FROM move"
MOVE_ROWS = (
    "REPLACE INTO task SELECT task.id, json_extract(value, '$[1]'), topic, body, extras"
    " FROM json_each(?) JOIN task ON task.id = json_extract(value, '$[0]')"
)
READ_BODIES = "SELECT id, body FROM task WHERE id IN (SELECT value FROM json_each(?))"
ALL_PACKS = (
    "SELECT pack.*, ifnull(mask, 0), dues FROM pack LEFT JOIN gone USING (first)"
    " LEFT JOIN moved USING (first) ORDER BY first"
)
PACK_INDEX = (
    "SELECT first, count, ifnull(mask, 0) FROM pack LEFT JOIN gone USING (first) ORDER BY first"
)
DELETE_PREPARE_BY_ID = "DELETE FROM prepare WHERE id IN (SELECT value FROM json_each(?))"
DELETE_DEAD_BY_ID = "DELETE FROM dead WHERE id IN (SELECT value FROM json_each(?))"

READ_RECORDS = "SELECT kind, data FROM record"

INSERT_ENDING = "INSERT OR ROLLBACK INTO ending VALUES (?, ?, ?)"
# At most 64 of the oldest rows. This keeps up with new rows, because each batch adds one.
_OLDEST_ENDINGS = (
    "SELECT batch FROM (SELECT batch, upto FROM ending ORDER BY batch LIMIT 64) WHERE upto <="
)
TRIM_ENDINGS = f"DELETE FROM ending WHERE batch IN ({_OLDEST_ENDINGS} ?)"

_CURRENT = (
    "(SELECT group_concat(value, ' ') FROM"
    " (SELECT value FROM meta WHERE key IN ('epoch', 'last_batch', 'owner') ORDER BY key))"
)


def _advance(n: str, id_mark: str, position_ms: str) -> str:
    """Return the statement that records a batch in ``meta``, with these parameters."""
    return (
        f"UPDATE meta SET value = CASE key WHEN 'last_batch' THEN {n}"
        f" WHEN 'id_mark' THEN max(value, {id_mark}) ELSE {position_ms} END"
        " WHERE key IN ('last_batch', 'id_mark', 'position_ms')"
    )


# This statement checks and advances: 3 rows change if epoch, owner and number are right.
ADVANCE = f"{_advance('?1', '?2', '?3')} AND {_CURRENT} = ?4"
ADVANCED_ROWS = 3


def expected_meta(epoch: int, owner: str, n: int) -> str:
    """Return the last argument of ``ADVANCE``: the values in ``meta`` before batch ``n``."""
    return f"{epoch} {n - 1} {owner}"


SMALL = "small"
_SMALL_COLUMNS = (
    "expected", "n", "id_mark", "position_ms", "id", "due_ms", "topic", "body", "extras",
    "hash", "kind", "record_key", "data", "drop_kind", "drops", "loose", "keyed", "progress",
    "dead", "upto", "endings", "trim_upto",
)  # fmt: skip
# One statement writes a small batch and is its transaction. NULL columns write nothing. The view
# and its trigger are temporary, and not stored in the database.
MAKE_SMALL = (
    f"CREATE TEMP VIEW {SMALL} AS SELECT "
    + ", ".join(f"NULL AS {name}" for name in _SMALL_COLUMNS),
    f"""CREATE TEMP TRIGGER write_{SMALL} INSTEAD OF INSERT ON {SMALL} BEGIN
        SELECT RAISE(ABORT, 'not the next batch') WHERE NEW.expected IS NOT {_CURRENT};
        {_advance("NEW.n", "NEW.id_mark", "NEW.position_ms")};
        INSERT INTO task SELECT NEW.id, NEW.due_ms, NEW.topic, NEW.body, NEW.extras
            WHERE NEW.id NOTNULL;
        REPLACE INTO task_key SELECT NEW.id, NEW.hash WHERE NEW.hash NOTNULL;
        REPLACE INTO record SELECT NEW.kind, NEW.record_key, NEW.data WHERE NEW.kind NOTNULL;
        DELETE FROM record WHERE kind = NEW.drop_kind
            AND key IN (SELECT value FROM json_each(NEW.drops));
        DELETE FROM task WHERE id IN (SELECT value FROM json_each(NEW.loose));
        DELETE FROM task_key WHERE id IN (SELECT value FROM json_each(NEW.keyed));
        DELETE FROM prepare WHERE id IN (SELECT value FROM json_each(NEW.progress));
        DELETE FROM dead WHERE id IN (SELECT value FROM json_each(NEW.dead));
        INSERT INTO ending SELECT NEW.n, NEW.upto, NEW.endings WHERE NEW.upto NOTNULL;
        DELETE FROM ending WHERE NEW.trim_upto NOTNULL
            AND batch IN ({_OLDEST_ENDINGS} NEW.trim_upto);
    END""",
)
WRITE_SMALL = f"INSERT INTO {SMALL} VALUES ({', '.join('?' * len(_SMALL_COLUMNS))})"
NOT_NEXT_BATCH = "SQLITE_CONSTRAINT_TRIGGER"
"""Name of the error that ``WRITE_SMALL`` raises if the batch is not the next one in ``meta``."""
SMALL_MAX = 32
"""Maximum number of ended tasks, and of records, in a small batch. For larger batches, several
statements are as fast."""
HASH_AT = 5
"""Index of the hash of the new task's key in ``small_values``."""
_NO_TASK = (None,) * 6
_NO_RECORD = (None,) * 3
_NO_DROPS = (None,) * 2


def small_values(effects: Effects, key_hash: KeyHash) -> tuple[object, ...] | None:
    """Return the columns of ``WRITE_SMALL`` for a batch with at most one new task, one written
    record, and removed records of one kind. Return None for any other batch. For ended
    tasks only the number is checked; their columns follow these."""
    enqueued, records = effects.enqueued, effects.records
    if len(enqueued) > 1 or max(len(effects.ended), len(records)) > SMALL_MAX:
        return None
    if effects.updated or effects.moved or effects.progress or effects.dead:
        return None
    task: Sequence[object] = _NO_TASK
    if enqueued:
        hashes = effects.hashes or key_hash.of_rows(enqueued.values())
        (values,) = task_values(enqueued.values())
        hashed = hashes.get(next(iter(enqueued)))
        task = (*values, None if hashed is None else _signed(hashed))
    record: Sequence[object] = _NO_RECORD
    drops: Sequence[object] = _NO_DROPS
    if records:
        written, dropped = record_values(records), dropped_keys(records)
        if len(written) > 1 or len(dropped) > 1:
            return None
        if written:
            (record,) = written
        for number, keys in dropped.items():
            drops = number, json.dumps(keys)
    return *task, *record, *drops


def move_values(moved: dict[int, int]) -> bytes:
    """Encode the new due times of a batch for table ``move``."""
    pairs = array("q", bytes(16 * len(moved)))
    pairs[::2], pairs[1::2] = array("q", moved), array("q", moved.values())
    return pairs.tobytes()


def moves_of(data: bytes) -> dict[int, int]:
    """Decode the concatenated ``move_values`` of batches: id → due_ms."""
    pairs = array("q", data)
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def read_moves(connection: sqlite3.Connection) -> dict[int, int]:
    """Return id → due_ms of table ``move``, whose due times are not yet in ``moved``."""
    return moves_of(b"".join(data for (data,) in connection.execute(READ_MOVES).fetchall()))


STATEMENT_BYTES_MAX = 1 << 20
"""Maximum bytes of a statement's values, which SQLite copies and keeps until its next use."""
ROW_BYTES = 64
"""Approximate bytes of a task without its body: id, due time, topic, headers."""

_extras_of = itemgetter(4)
_body_of = itemgetter(3)


def task_values(rows: Collection[TaskRow]) -> Collection[Sequence[object]]:
    """Return the columns of task rows. A row without extras needs no conversion."""
    if not any(map(_extras_of, rows)):
        return rows
    return [
        row if row[4] is None else (row[0], row[1], row[2], row[3], encode_extras(row[4]))
        for row in rows
    ]


def task_bytes(rows: Collection[TaskRow]) -> int:
    """Return the approximate bytes of the rows in the database."""
    size_bytes = sum(map(len, map(_body_of, rows))) + ROW_BYTES * len(rows)
    if any(map(_extras_of, rows)):
        keys = keys_alone(list(map(_extras_of, rows)))
        if keys is not None:
            return size_bytes + keys_bytes(keys)
        size_bytes += sum(options_bytes(row[4]) for row in rows if row[4] is not None)
    return size_bytes


def enqueued_bytes(effects: Effects) -> int:
    """Return ``task_bytes`` of new tasks and half tasks. Use the engine's count if it has one."""
    if effects.enqueued_bytes:
        return effects.enqueued_bytes + ROW_BYTES * len(effects.enqueued)
    sizes = effects.half_task_sizes()
    return task_bytes(effects.enqueued.values()) + sum(sizes) + ROW_BYTES * len(sizes)


def task_rows_max(rows: Collection[TaskRow]) -> int:
    """Return the maximum number of these rows in one statement."""
    size_bytes = task_bytes(rows)
    if size_bytes <= STATEMENT_BYTES_MAX:
        return ROWS_MAX
    return max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX * len(rows) // size_bytes))


def progress_values(rows: Iterable[ProgressRow]) -> Iterator[Sequence[object]]:
    return (
        (
            row.id,
            row.group,
            int(row.state),
            row.attempt,
            row.at_ms,
            row.epoch,
            encode_past(row.past),
        )
        for row in rows
    )


def dead_values(rows: Iterable[DeadRow]) -> Iterator[Sequence[object]]:
    return (
        (
            *row[:6],
            row.newest_id,
            encode_past(Past(row.failures, row.failed, deaths=row.deaths)),
        )
        for row in rows
    )


def record_values(records: Mapping[RecordKey, Any]) -> list[tuple[int, str, bytes]]:
    """Return the columns of all records except removed ones."""
    return [
        (kind.number, key_text(key), data)
        for (kind, key), data in zip(records, encode_records(records), strict=True)
        if data is not None
    ]


def dropped_keys(records: Mapping[RecordKey, Any]) -> dict[int, list[str]]:
    """Return number of a kind → keys of its removed records."""
    dropped: dict[int, list[str]] = {}
    for (kind, key), row in records.items():
        if row is None:
            dropped.setdefault(kind.number, []).append(key_text(key))
    return dropped


def record_rows_max(values: Sequence[tuple[int, str, bytes]]) -> int:
    """Return the maximum number of these records in one statement."""
    size = max(len(data) for _, _, data in values)
    return max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX // size))


def record_row(number: int, data: bytes) -> tuple[RecordKey, Any]:
    """Decode a record's key and row from its stored kind and data. Raise RecordUnreadable."""
    kind = kind_of(number)
    row = decode_record(kind, data)
    return (kind, kind.key(row)), row


def read_records(connection: sqlite3.Connection) -> dict[RecordKey, Any]:
    return dict(record_row(*stored) for stored in connection.execute(READ_RECORDS))


def progress_row(
    task_id: int, group: str, state: int, attempt: int, at_ms: int, epoch: int, past: Any
) -> ProgressRow:
    return ProgressRow(
        task_id, group, progress_state(state), attempt, at_ms, epoch, *decode_past(past)
    )


def dead_row(
    task_id: int,
    group: str,
    topic: str,
    died_ms: int,
    attempt: int,
    reason: str,
    newest_id: int,
    past: Any,
) -> DeadRow:
    failures, failed, _, deaths, _ = decode_past(past)
    named = task_id, group, topic, died_ms, attempt, reason
    return DeadRow(*named, failures, failed, newest_id, deaths)


def task_row(task_id: int, due_ms: int, topic: str, body: bytes, options: Any) -> TaskRow:
    return TaskRow(task_id, due_ms, topic, body, decode_extras(options))


def from_json(text: str) -> list[list[Any]]:
    """Decode ``json_group_array(json_array(…, hex(past)))``, with the last column as bytes."""
    rows: list[list[Any]] = json.loads(text)
    for row in rows:
        row[-1] = bytes.fromhex(row[-1])
    return rows


HASH_BYTES = 8
PACKS_AT_ONCE = 150
"""Number of packs read at once, with up to 9,000 tasks. Indexing them blocks the event loop."""
ROWS_AT_ONCE = 10_000
_SIGN, _RANGE = 1 << 63, 1 << 64

_REPLACE_PACK_KEYS = insert("REPLACE", "pack_key", 2)
_REPLACE_TASK_KEYS = insert("REPLACE", "task_key", 2)
DELETE_PACK_KEYS = "DELETE FROM pack_key WHERE first IN (SELECT value FROM json_each(?))"
DELETE_TASK_KEYS = "DELETE FROM task_key WHERE id IN (SELECT value FROM json_each(?))"
_COUNT = (
    "SELECT (SELECT ifnull(sum(length(hashes)), 0) / 8 FROM pack_key)"
    " + (SELECT count(*) FROM task_key)"
)
_LOOSE = (
    "SELECT json_group_array(id), json_group_array(hash) FROM"
    " (SELECT id, hash FROM task_key WHERE id > ? ORDER BY id LIMIT ?)"
)
_PACKED = (
    "SELECT json_group_array(json_array(first, length(hashes) / 8, mask)), {hashes} FROM"
    " (SELECT first, hashes, ifnull(mask, 0) AS mask FROM pack_key LEFT JOIN gone USING (first)"
    " WHERE first > ? ORDER BY first LIMIT ?)"
)


def write_keys(
    connection: sqlite3.Connection,
    key_hash: KeyHash,
    packs: Iterable[PackValues],
    loose: Iterable[TaskRow],
    enqueued: Mapping[int, TaskRow],
    computed: Mapping[int, int],
) -> bool:
    """Write the key hashes of new packs, whose tasks are among ``enqueued``, and of ``loose`` rows.
    ``computed``: hashes that were already computed. Return whether a loose row has a key."""
    values: list[tuple[int, bytes]] = []
    computed_ids = list(computed)
    if len(computed) == len(enqueued) and computed_ids == list(enqueued):  # usually: all have keys
        all_hashes, at = array("Q", computed.values()), 0
        for first, count, *_ in packs:
            at = bisect_left(computed_ids, first, at)
            values.append((first, all_hashes[at : at + count].tobytes()))
        packs = ()
    for first, count, _, _, _, extras in packs:
        if extras is not None:
            ids = range(first, first + count * ID_STEP, ID_STEP)
            hashes = list(map(computed.get, ids, repeat(NO_KEY)))
            if NO_KEY in hashes:
                missing = [enqueued[i] for i, hashed in zip(ids, hashes, strict=True) if not hashed]
                of_rows = key_hash.of_rows(missing)
                hashes = [
                    hashed or of_rows.get(i, NO_KEY) for i, hashed in zip(ids, hashes, strict=True)
                ]
            if any(hashes):
                values.append((first, array("Q", hashes).tobytes()))
    if values:
        _REPLACE_PACK_KEYS.run(connection, values)
    return write_loose_keys(connection, key_hash, loose)


def write_loose_keys(
    connection: sqlite3.Connection, key_hash: KeyHash, rows: Iterable[TaskRow]
) -> bool:
    """Write the key hashes of single rows. Return whether any of them has a key."""
    hashes = key_hash.of_rows(rows)
    if hashes:
        _REPLACE_TASK_KEYS.run(connection, zip(hashes, map(_signed, hashes.values()), strict=True))
    return bool(hashes)


def _signed(hashed: int) -> int:
    return hashed if hashed < _SIGN else hashed - _RANGE


def read_keys(connection: sqlite3.Connection) -> Iterator[Keyed]:
    """Yield all key hashes in chunks. The writer can commit between two chunks. A task that it
    moves from a pack that was yielded to a single row is not yielded again."""
    (expected,) = connection.execute(_COUNT).fetchone()
    statement = _PACKED.format(hashes=blob_join(connection).format("hashes"))
    yielded: list[tuple[int, int, int]] = []
    after, count = -1, PACKS_AT_ONCE
    while count == PACKS_AT_ONCE:
        places, joined = connection.execute(statement, (after, PACKS_AT_ONCE)).fetchone()
        packs, all_hashes, at = json.loads(places), array("Q", blob_of(joined)), 0
        ids, hashes = array("q"), array("Q")
        for first, size, mask in packs:
            _add(ids, hashes, first, all_hashes[at : at + size], mask)
            at += size
        yield Keyed(ids, hashes, expected)
        yielded += packs
        after, count = packs[-1][0] if packs else after, len(packs)
    index = PackIndex()
    index.load(yielded)
    after, count = -1, ROWS_AT_ONCE
    while count == ROWS_AT_ONCE:
        columns = connection.execute(_LOOSE, (after, ROWS_AT_ONCE)).fetchone()
        loose, signed = map(json.loads, columns)
        after, count = loose[-1] if loose else after, len(loose)
        hashes = array("Q", array("q", signed).tobytes())
        remaining = index.loose(loose)
        if len(remaining) < count:
            of_ids = dict(zip(loose, hashes, strict=True))
            loose, hashes = remaining, array("Q", map(of_ids.__getitem__, remaining))
        yield Keyed(loose, hashes, expected)


def _add(
    ids: array[int], hashes: array[int], first: int, pack_hashes: array[int], mask: int
) -> None:
    """Add the tasks that are still in a pack and have a key. ``pack_hashes``: the pack's hashes."""
    count = len(pack_hashes)
    if not mask and NO_KEY not in pack_hashes:
        ids.extend(range(first, first + count * ID_STEP, ID_STEP))
        hashes.extend(pack_hashes)
        return
    remaining: Collection[int] = ids_of(first, count, mask)
    for task_id in remaining:
        hashed = pack_hashes[(task_id - first) // ID_STEP]
        if hashed != NO_KEY:
            ids.append(task_id)
            hashes.append(hashed)
