"""The tables of a shard, and the statements on them (``sql/statements.sql``).

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
from importlib.resources import files
from operator import add
from typing import TYPE_CHECKING, Final, NamedTuple

from tickwheel.model.records import TaskOptions, TaskRow
from tickwheel.persistence.codec import (
    decode_extras,
    encode_dead,
    encode_endings,
    encode_extras_of,
    encode_progress,
    encode_records,
    key_text,
)
from tickwheel.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tickwheel.model.kinds import Effects

LAYOUT: Final = 1
FOLDER: Final = files(__package__) / "sql"
SQL: Final = read_statements(FOLDER / "statements.sql")
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
    def at(self) -> str:
        """How the names of the generation's tables end."""
        return f"{self.shard}_{self.generation}"

    @property
    def tables(self) -> list[str]:
        parts = [
            f"{table}_{self.shard}_{number}"
            for table in ("task", "note")
            for number in self.numbers
        ]
        return [*parts, f"journal_{self.at}", f"record_{self.at}"]


# --- batches -------------------------------------------------------------------------------------

MARKS = 9
"""Number of arguments before the columns: the fence's, batch, marks and outcomes."""


@lru_cache(maxsize=256)
def batch_statement(
    shard: int, generation: int, with_tasks: tuple[int, ...], with_notes: tuple[int, ...],
    has_records: bool,
) -> str:  # fmt: skip
    """Return the statement that applies a batch if this connection holds the shard. It returns the
    number of batches that it has applied."""
    added = [("new_tasks", 6, part) for part in with_tasks]
    added += [("new_notes", 4, part) for part in with_notes]
    added += [("new_records", 3, generation)] * has_records
    statement, first = SQL["batch"].format(at=f"{shard}_{generation}"), MARKS + 1
    for name, count, number in added:
        places = range(first, first + count)
        statement += SQL[name].format(*places, number=number, at=f"{shard}_{number}")
        first += count
    return f"{statement} SELECT count(*) FROM j"


Note = tuple[int, int, str, "bytes | None"]
"""Id, kind, name and data."""


class Filling(NamedTuple):
    """How full a part is. The counts after a start are those of ``upkeep.py``."""

    rows: int = 0
    size_bytes: int = 0
    notes: int = 0
    passed: int = 0
    """Number of rows that no longer count, because their tasks have ended or changed."""

    @property
    def counting(self) -> int:
        """The number of rows that count."""
        return max(0, self.rows - self.passed)

    def plus(self, more: Filling) -> Filling:
        return Filling(*map(add, self, more))


class Batch(NamedTuple):
    """A batch in the form that is sent, and what it adds to each part."""

    statement: str
    arguments: list[object]
    """The arguments after the fence's, the number and the id mark."""
    added: dict[int, Filling]
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
    added = {
        part: Filling(len(rows), sum(len(row[3]) for row in rows)) for part, rows in tasks.items()
    }
    for part, part_notes in notes.items():
        passed = sum(kind <= REPLACED for _, kind, _, _ in part_notes)
        added[part] = added.get(part, Filling()).plus(Filling(0, 0, len(part_notes), passed))
    record_bytes = sum(len(record) for record in records if record is not None)
    return Batch(statement, arguments, added, record_bytes)


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

TASK, LAST_BATCH = -2, -1
"""The first column of rows of ``read`` that are not notes: a task, or the number of the last
batch."""


@lru_cache(maxsize=256)
def read_statement(shard: int, generation: int, numbers: tuple[int, ...]) -> str:
    """Return the statement that reads tasks of these parts by id. Its first argument limits the
    bytes; each part has two arguments, ids and their places in the order of the read."""
    tasks, notes = [], []
    for index, number in enumerate(numbers):
        at = f"{shard}_{number}"
        tasks.append(SQL["tasks_of_part"].format(2 + 2 * index, 3 + 2 * index, at=at))
        notes.append(SQL["notes_of_part"].format(2 + 2 * index, at=at))
    task_rows, note_rows = " UNION ALL ".join(tasks), " ".join(notes)
    at = f"{shard}_{generation}"
    return SQL["read"].format(at=at, task_rows=task_rows, note_rows=note_rows)


def handles_statement(shard: int, numbers: Iterable[int], *, late: bool) -> str:
    """Return the statement for tasks due before $1, or ``late`` for all others, in due order."""
    of_part, compare = SQL["handles_of_part"], ">=" if late else "<"
    tasks = [of_part.format(at=f"{shard}_{number}", compare=compare) for number in numbers]
    return SQL["handles"].format(tasks=" UNION ALL ".join(tasks))


# --- copies --------------------------------------------------------------------------------------


def _later(tables: Sequence[str], shard: int, source: int, target: int) -> str:
    return "".join(
        SQL["copy_later"].format(table=table, shard=shard, source=source, target=target)
        for table in tables
    )


def switch_parts(shard: int, sources: Sequence[int], target: int | None, low: int) -> str:
    """Return the statement that replaces parts with their copy, with all that was added to them
    after batch $5. ``target`` None: nothing of them counts."""
    later = ""
    if target is not None:
        later = "".join(_later(("task", "note"), shard, source, target) for source in sources)
        later += f", p AS (INSERT INTO part SELECT {shard}, {target}, {low} FROM f)"
    numbers = ", ".join(map(str, sources))
    return SQL["switch_parts"].format(shard=shard, sources=numbers, copies=later)


def switch_generation(shard: int, source: int, target: int) -> str:
    """Return the statement that replaces a generation with its copy, as ``switch_parts`` does."""
    later = _later(("journal", "record"), shard, source, target)
    return SQL["switch_generation"].format(target=target, copies=later)
