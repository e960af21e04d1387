"""The tables of a shard and the statements on them.

| table | rows |
|---|---|
| task_S_P | tasks of part P: ``(id, batch)`` and their columns; a changed task is another row |
| note_S_P | changes to these tasks: ended, replaced, the progress or the dead letter of a group |
| journal_S_G | one row for each batch: its number, marks and outcomes |
| record_S_G | records of every kind; a changed record is another row |

Rows are only added, never changed or deleted, so no number of tasks leaves dead rows, and a
transaction that somebody keeps open does not make the tables grow. Every row has the number of its
batch. The newest row of a key counts; one without data drops the key. What no longer counts leaves
with its table: ``upkeep.py`` copies the rest to a new table and drops the old one.

A part is a range of ids, because an end names a task by its id alone. Ids grow with time, so that
new tasks go to the last part. ``Parts`` is the map of a shard at one moment.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from tickwheel.model.records import ID_MAX, TaskOptions, TaskRow
from tickwheel.persistence.codec import (
    decode_extras,
    encode_dead,
    encode_endings,
    encode_extras_of,
    encode_progress,
    encode_records,
    key_text,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tickwheel.model.kinds import Effects

LAYOUT: Final = 1
ENDED, REPLACED, PROGRESS, DEAD = 0, 1, 2, 3
"""Kinds of notes. ENDED: all earlier rows of the task. REPLACED: its rows of earlier batches."""


class Parts(NamedTuple):
    """The tables of a shard at one moment."""

    shard: int
    generation: int
    numbers: tuple[int, ...]
    """The parts, in the order of their ids."""
    lows: tuple[int, ...]
    """The lowest id of each part. The first part also has all lower ids."""

    def of(self, task_id: int) -> int:
        """Return the number of the part with this id."""
        return self.numbers[max(0, bisect_right(self.lows, task_id) - 1)]

    def split(self, ids: Collection[int]) -> dict[int, list[int]]:
        """Return part → its ids, in their order."""
        if not ids:
            return {}
        if min(ids) >= self.lows[-1] or len(self.numbers) == 1:
            return {self.numbers[-1]: list(ids)}
        parts: dict[int, list[int]] = {}
        for task_id in ids:
            parts.setdefault(self.of(task_id), []).append(task_id)
        return parts

    def since(self, task_id: int) -> tuple[int, ...]:
        """Return the parts with this id and all higher ones, in order."""
        return self.numbers[self.numbers.index(self.of(task_id)) :]

    def upto(self, task_id: int) -> tuple[int, ...]:
        """Return the parts with this id and all lower ones, the highest first."""
        return self.numbers[self.numbers.index(self.of(task_id)) :: -1]

    @property
    def tables(self) -> list[str]:
        shard, generation = self.shard, self.generation
        return [
            *(f"task_{shard}_{number}" for number in self.numbers),
            *(f"note_{shard}_{number}" for number in self.numbers),
            f"journal_{shard}_{generation}",
            f"record_{shard}_{generation}",
        ]


KEY_CHARS: Final = 600
"""Number of characters of a record's key in its index, whose entries have at most 2,704 bytes. A
value of ``fair_by`` makes a longer key."""
_PART_TABLES = """
CREATE TABLE task_{0} (
    id bigint NOT NULL, batch bigint NOT NULL, due_ms bigint NOT NULL, topic text NOT NULL,
    key bytea, body bytea NOT NULL, extras bytea, PRIMARY KEY (id, batch)
);
CREATE TABLE note_{0} (
    id bigint NOT NULL, batch bigint NOT NULL, kind smallint NOT NULL,
    name text COLLATE "C" NOT NULL, data bytea
);
CREATE INDEX ON note_{0} (id);
CREATE INDEX ON note_{0} (id, name) WHERE kind = 3;
"""
_GENERATION_TABLES = """
CREATE TABLE journal_{0} (
    batch bigint PRIMARY KEY, id_mark bigint NOT NULL, position_ms bigint NOT NULL,
    ended int NOT NULL, outcomes bytea
);
CREATE TABLE record_{0} (
    kind int NOT NULL, key text COLLATE "C" NOT NULL, batch bigint NOT NULL, data bytea
);
CREATE INDEX ON record_{0} (kind, left(key, {1}));
"""


def part_tables(shard: int, number: int) -> str:
    return _PART_TABLES.format(f"{shard}_{number}")


def generation_tables(shard: int, generation: int) -> str:
    return _GENERATION_TABLES.format(f"{shard}_{generation}", KEY_CHARS)


def drop_part(shard: int, number: int) -> str:
    return f"DROP TABLE IF EXISTS task_{shard}_{number}, note_{shard}_{number}"


def drop_generation(shard: int, generation: int) -> str:
    return f"DROP TABLE IF EXISTS journal_{shard}_{generation}, record_{shard}_{generation}"


PARTS = "SELECT number, low FROM part WHERE shard = $1 ORDER BY low"
FENCE = (
    "SELECT 1 FROM shard WHERE number = $1 AND epoch = $2 AND owner = $3 AND link = $4"
    " FOR NO KEY UPDATE"
)
"""Held until the end of the transaction. The row is not changed."""

# --- batches -------------------------------------------------------------------------------------

_BATCH = (
    "WITH f AS ({fence}), j AS (INSERT INTO journal_{at}"
    " SELECT $5::bigint, $6::bigint, $7::bigint, $8::int, $9::bytea FROM f RETURNING 1)"
)
_NEW_TASKS = (
    ", t{part} AS (INSERT INTO task_{shard}_{part}"
    " (id, batch, due_ms, topic, key, body, extras)"
    " SELECT u.id, $5, u.due_ms, u.topic, u.key, u.body, u.extras FROM f, unnest(${0}::bigint[],"
    " ${1}::bigint[], ${2}::text[], ${3}::bytea[], ${4}::bytea[], ${5}::bytea[])"
    " AS u(id, due_ms, topic, key, body, extras))"
)
_NEW_NOTES = (
    ", n{part} AS (INSERT INTO note_{shard}_{part} (id, batch, kind, name, data)"
    " SELECT u.id, $5, u.kind, u.name, u.data FROM f,"
    " unnest(${0}::bigint[], ${1}::smallint[], ${2}::text[], ${3}::bytea[])"
    " AS u(id, kind, name, data))"
)
_NEW_RECORDS = (
    ", r AS (INSERT INTO record_{at} (kind, key, batch, data)"
    " SELECT u.kind, u.key, $5, u.data FROM f,"
    " unnest(${0}::int[], ${1}::text[], ${2}::bytea[]) AS u(kind, key, data))"
)
MARKS = 9
"""Number of arguments before the columns: the fence's, batch, marks and outcomes."""


@lru_cache(maxsize=256)
def batch_statement(
    shard: int, generation: int, with_tasks: tuple[int, ...], with_notes: tuple[int, ...],
    has_records: bool,
) -> str:  # fmt: skip
    """Return the statement that applies a batch if this connection holds the shard. It returns the
    number of batches that it has applied."""
    statement = _BATCH.format(fence=FENCE, at=f"{shard}_{generation}")
    at = MARKS + 1
    for part in with_tasks:
        statement += _NEW_TASKS.format(*range(at, at + 6), part=part, shard=shard)
        at += 6
    for part in with_notes:
        statement += _NEW_NOTES.format(*range(at, at + 4), part=part, shard=shard)
        at += 4
    if has_records:
        statement += _NEW_RECORDS.format(*range(at, at + 3), at=f"{shard}_{generation}")
    return f"{statement} SELECT count(*) FROM j"


Note = tuple[int, int, str, "bytes | None"]
"""Id, kind, name and data."""


class Batch(NamedTuple):
    """A batch in the form that is sent, and what it adds to each part."""

    statement: str
    arguments: list[object]
    """The arguments after the fence's, the number and the id mark."""
    rows: dict[int, tuple[int, int]]
    """Part → number of new rows of tasks, and their bytes."""
    notes: dict[int, tuple[int, int]]
    """Part → number of new notes, and how many of them end or replace a row."""
    record_bytes: int


def encode(effects: Effects, parts: Parts, endings_max: int) -> Batch:
    """Encode a batch."""
    rows = effects.enqueued | effects.updated if effects.updated else effects.enqueued
    tasks = {part: [rows[task_id] for task_id in ids] for part, ids in parts.split(rows).items()}
    notes: dict[int, list[Note]] = {}
    for kind, changed in ((ENDED, effects.ended), (REPLACED, effects.updated)):
        for part, ids in parts.split(changed).items():
            notes.setdefault(part, []).extend([(task_id, kind, "", None) for task_id in ids])
    for (task_id, group), progress in effects.progress.items():
        data = None if progress is None else encode_progress(progress)
        notes.setdefault(parts.of(task_id), []).append((task_id, PROGRESS, group, data))
    for (task_id, group), dead in effects.dead.items():
        data = None if dead is None else encode_dead(dead)
        notes.setdefault(parts.of(task_id), []).append((task_id, DEAD, group, data))
    outcomes = None
    if effects.ended:
        outcomes = encode_endings(dict(list(effects.ended.items())[-endings_max:]))
    ended = min(len(effects.ended), endings_max)
    arguments: list[object] = [effects.position_ms, ended, outcomes]
    for part_rows in tasks.values():
        arguments += columns(part_rows)
    for part_notes in notes.values():
        arguments += map(list, zip(*part_notes, strict=True))
    records: list[bytes | None] = []
    if effects.records:
        records = encode_records(effects.records)
        arguments += [
            [kind.number for kind, _ in effects.records],
            [key_text(key) for _, key in effects.records],
            records,
        ]
    statement = batch_statement(
        parts.shard, parts.generation, tuple(tasks), tuple(notes), bool(effects.records)
    )
    return Batch(
        statement,
        arguments,
        {part: (len(rows), sum(len(row[3]) for row in rows)) for part, rows in tasks.items()},
        {
            part: (len(part_notes), sum(kind <= REPLACED for _, kind, _, _ in part_notes))
            for part, part_notes in notes.items()
        },
        sum(len(record) for record in records if record is not None),
    )


def columns(rows: Sequence[TaskRow]) -> list[list[object]]:
    """Return the columns id, due_ms, topic, key, body and extras of these rows."""
    ids, dues_ms, topics, bodies, options = map(list, zip(*rows, strict=True))
    keys: list[object] = [None] * len(rows)
    extras: list[object] = [None] * len(rows)
    if any(options):
        for index, packed in enumerate(encode_extras_of(options)):
            if isinstance(packed, str):
                keys[index] = packed.encode()
            elif packed is not None:
                extras[index] = packed
                key = options[index].key
                keys[index] = None if key is None else key.encode()
    return [ids, dues_ms, topics, keys, bodies, extras]


def options_from(key: bytes | None, extras: bytes | None) -> TaskOptions | None:
    """Return the options of a row. A task with no option but a key has no ``extras``."""
    if extras is not None:
        return decode_extras(extras)
    return None if key is None else TaskOptions(key.decode())


# --- reads ---------------------------------------------------------------------------------------

_COUNTS = (
    "NOT EXISTS (SELECT FROM note_{at} g WHERE g.id = t.id"
    " AND (g.kind = 0 AND g.batch >= t.batch OR g.kind = 1 AND g.batch > t.batch))"
)
"""Whether the row of a task is its newest, and the task has not ended."""
_NOTE_COUNTS = (
    "n.data IS NOT NULL AND NOT EXISTS (SELECT FROM note_{at} g WHERE g.id = n.id"
    " AND (g.kind = 0 AND g.batch >= n.batch"
    " OR g.kind = n.kind AND g.name = n.name AND g.batch > n.batch))"
)
"""Whether a note is the newest of its kind and name, has data, and the task has not ended."""
TASK, LAST_BATCH = -2, -1
"""The first column of rows that are not notes: a task, or the number of the last batch."""
_ROWS_OF_PART = (
    "SELECT i.ord, t.id, t.due_ms, t.topic, t.key, t.extras, t.body,"
    " octet_length(t.body) + coalesce(octet_length(t.extras), 0) AS size"
    " FROM unnest(${0}::bigint[], ${1}::int[]) AS i(id, ord) JOIN task_{at} t ON t.id = i.id"
    f" WHERE {_COUNTS}"
)
_NOTES_OF_PART = (
    " UNION ALL SELECT n.kind, n.id, n.batch, n.name, NULL, NULL, n.data"
    " FROM unnest(${0}::bigint[]) AS i(id) JOIN note_{at} n ON n.id = i.id WHERE n.kind <> 1"
)


@lru_cache(maxsize=256)
def read_statement(shard: int, generation: int, numbers: tuple[int, ...]) -> str:
    """Return the statement that reads tasks of these parts by id. Its first argument limits the
    bytes; each part has two arguments, ids and their places in the order of the read."""
    tasks, notes = [], []
    for index, number in enumerate(numbers):
        at = f"{shard}_{number}"
        tasks.append(_ROWS_OF_PART.format(2 + 2 * index, 3 + 2 * index, at=at))
        notes.append(_NOTES_OF_PART.format(2 + 2 * index, at=at))
    return (
        f"SELECT {TASK} AS kind, id, due_ms, topic, key, extras,"
        " CASE WHEN sum(size) OVER (ORDER BY ord) - size < $1 THEN body END AS data"
        f" FROM ({' UNION ALL '.join(tasks)}) AS r{''.join(notes)}"
        f" UNION ALL SELECT {LAST_BATCH}, max(batch), 0, '', NULL, NULL, NULL"
        f" FROM journal_{shard}_{generation}"
    )


def ids_statement(at: str, *, back: bool) -> str:
    """Return the statement for the next ids after $1, or ``back`` from $1 on, with the topic $2, up
    to $3."""
    compare, order = ("<=", " DESC") if back else (">", "")
    return (
        f"SELECT t.id FROM task_{at} t WHERE t.id {compare} $1::bigint"
        f" AND ($2::text IS NULL OR t.topic = $2) AND {_COUNTS.format(at=at)}"
        f" ORDER BY t.id{order} LIMIT $3"
    )


def count_statement(at: str) -> str:
    """Return the statement for the number of tasks."""
    return f"SELECT count(*) FROM task_{at} t WHERE {_COUNTS.format(at=at)}"


def dead_statement(at: str) -> str:
    """Return the statement for the next dead letters after (id $1, group $2), up to $4. Group $3,
    unless it is NULL."""
    return (
        f"SELECT n.data FROM note_{at} n WHERE n.kind = 3 AND (n.id, n.name) > ($1::bigint, $2)"
        f" AND ($3::text IS NULL OR n.name = $3) AND {_NOTE_COUNTS.format(at=at)}"
        " ORDER BY n.id, n.name LIMIT $4"
    )


def notes_statement(at: str) -> str:
    """Return the statement for all progress and dead letters."""
    return (
        f"SELECT n.kind, n.data FROM note_{at} n WHERE n.kind >= 2 AND {_NOTE_COUNTS.format(at=at)}"
    )


def records_statement(at: str, condition: str = "true") -> str:
    """Return the statement for the newest records that satisfy a condition."""
    return (
        f"SELECT kind, key, data FROM (SELECT DISTINCT ON (kind, key) kind, key, data"
        f" FROM record_{at} WHERE {condition} ORDER BY kind, key, batch DESC) r"
        " WHERE data IS NOT NULL"
    )


def outcomes_statement(at: str) -> str:
    """Return the statement for the newest rows with outcomes, up to $1 outcomes."""
    return (
        "SELECT outcomes FROM"
        " (SELECT batch, outcomes, sum(ended) OVER (ORDER BY batch DESC) - ended"
        f" AS newer FROM journal_{at} WHERE ended > 0) j WHERE newer < $1 ORDER BY batch"
    )


def handles_statement(shard: int, numbers: Iterable[int], *, late: bool) -> str:
    """Return the statement for tasks due before $1, or ``late`` for all others, in due order."""
    compare = ">=" if late else "<"
    tasks = " UNION ALL ".join(
        f"SELECT id, due_ms, topic, key FROM task_{at} t WHERE t.due_ms {compare} $1"
        f" AND {_COUNTS.format(at=at)}"
        for at in (f"{shard}_{number}" for number in numbers)
    )
    return f"SELECT id, due_ms, topic, key FROM ({tasks}) h ORDER BY due_ms, id"


def possible(ids: Iterable[int]) -> list[int]:
    """Return the ids that a store can have, each once."""
    return [task_id for task_id in dict.fromkeys(ids) if 0 <= task_id <= ID_MAX]


# --- copies --------------------------------------------------------------------------------------


def copy_part(shard: int, source: int, target: int) -> tuple[str, str]:
    """Return the statements that copy what counts in a part."""
    at, to = f"{shard}_{source}", f"{shard}_{target}"
    return (
        f"INSERT INTO task_{to} SELECT t.* FROM task_{at} t WHERE {_COUNTS.format(at=at)}",
        f"INSERT INTO note_{to} SELECT n.* FROM note_{at} n WHERE n.kind >= 2"
        f" AND {_NOTE_COUNTS.format(at=at)}",
    )


def copy_generation(shard: int, source: int, target: int, endings_max: int) -> tuple[str, str]:
    """Return the statements that copy what counts in a generation; the last batch always does."""
    at, to = f"{shard}_{source}", f"{shard}_{target}"
    return (
        f"INSERT INTO record_{to} SELECT kind, key, batch, data"
        " FROM (SELECT DISTINCT ON (kind, key) *"
        f" FROM record_{at} ORDER BY kind, key, batch DESC) r WHERE data IS NOT NULL",
        f"INSERT INTO journal_{to} SELECT batch, id_mark, position_ms, ended, outcomes FROM"
        " (SELECT *, sum(ended) OVER (ORDER BY batch DESC) - ended AS newer,"
        f" max(batch) OVER () AS last FROM journal_{at}) j"
        f" WHERE batch = last OR ended > 0 AND newer < {endings_max}",
    )


def switch_parts(shard: int, sources: Sequence[int], target: int | None, low: int) -> str:
    """Return the statement that replaces parts with their copy, with all that was added to them
    after batch $5. ``target`` None: nothing of them counts."""
    statement = f"WITH f AS ({FENCE})"
    for source in sources if target is not None else ():
        for table in ("task", "note"):
            statement += (
                f", {table}{source} AS (INSERT INTO {table}_{shard}_{target}"
                f" SELECT c.* FROM f, {table}_{shard}_{source} c WHERE c.batch > $5)"
            )
    numbers = ", ".join(map(str, sources))
    statement += (
        f", d AS (DELETE FROM part USING f WHERE shard = {shard} AND number IN ({numbers}))"
    )
    if target is not None:
        statement += f", p AS (INSERT INTO part SELECT {shard}, {target}, {low} FROM f)"
    return f"{statement} SELECT count(*), max($5::bigint) FROM f"


def switch_generation(shard: int, source: int, target: int) -> str:
    """Return the statement that replaces a generation with its copy, as ``switch_parts`` does."""
    copies = "".join(
        f", {table} AS (INSERT INTO {table}_{shard}_{target}"
        f" SELECT c.* FROM f, {table}_{shard}_{source} c WHERE c.batch > $5)"
        for table in ("journal", "record")
    )
    return (
        f"WITH f AS (UPDATE shard SET generation = {target} WHERE number = $1 AND epoch = $2"
        f" AND owner = $3 AND link = $4 RETURNING 1){copies} SELECT count(*) FROM f"
    )


NEW_PART = (
    f"WITH f AS ({FENCE}), p AS (INSERT INTO part SELECT $1, $5::bigint, $6::bigint FROM f"
    " WHERE to_regclass($7::text) IS NOT NULL RETURNING 1) SELECT count(*) FROM p"
)
"""Adds part $5, from the id $6 on, if its table $7 is on this server."""
