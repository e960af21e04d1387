"""Statements over many rows at once, in a few fixed sizes so that each is prepared once.

A statement costs the writer's thread several hand-overs of the interpreter lock, so few
statements matter more than few rows: a batch of 500 is one statement of 512 rows of which 12
are empty. Knows SQL and flat lists of values; must not know transactions or records.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

ROWS_MAX = 512
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, ROWS_MAX)
"""Rows a statement: at most a third of one is padding, and up to 512 rows need only one.
512 rows of 7 columns stay below SQLite's limit of 32,766 variables."""


def sizes_for(count: int, rows_max: int = ROWS_MAX) -> Iterator[int]:
    """Sizes of the statements that take ``count`` rows; the last may be larger than its rest."""
    largest = max(size for size in SIZES if size <= rows_max)
    while count > 0:
        size = largest if count >= largest else next(s for s in SIZES if s >= count)
        yield size
        count -= size


class Multi:
    """One kind of multi-row statement; ``run`` splits, pads and executes it."""

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
        """Each row has as many values as columns; at most ``rows_max`` in one statement."""
        values = list(chain.from_iterable(rows))
        columns = self._columns
        start = 0
        for size in sizes_for(len(values) // columns, rows_max):
            some = values[start : start + size * columns]
            some += [None] * (size * columns - len(some))
            connection.execute(self._texts[size], some)
            start += size * columns


def _insert(verb: str, table: str, columns: int) -> Multi:
    """Rows whose first column is NULL are padding and left out."""
    return Multi(f"{verb} INTO {table} SELECT * FROM (VALUES ", columns, ") WHERE column1 NOTNULL")


# OR ROLLBACK: an id that exists already ends the whole batch, and SQLite needs no journal of
# the statement for that.
INSERT_TASKS = _insert("INSERT OR ROLLBACK", "task", 5)
INSERT_PACKS = _insert("INSERT OR ROLLBACK", "pack", 6)
REPLACE_GONE = _insert("REPLACE", "gone", 2)
REPLACE_TASKS = _insert("REPLACE", "task", 5)
REPLACE_PREPARE = _insert("REPLACE", "prepare", 7)
REPLACE_DEAD = _insert("REPLACE", "dead", 7)
REPLACE_SESSIONS = _insert("REPLACE", "session", 4)
REPLACE_GROUPS = _insert("REPLACE", "grp", 5)


def _delete(table: str, columns: dict[str, str]) -> Multi:
    """By key. The casts let SQLite use the index; padding equals nothing, so deletes nothing."""
    casts = ", ".join(f"CAST(column{i} AS {kind})" for i, kind in enumerate(columns.values(), 1))
    head = f"DELETE FROM {table} WHERE ({', '.join(columns)}) IN (SELECT {casts} FROM (VALUES "
    return Multi(head, len(columns), "))")


DELETE_PREPARE = _delete("prepare", {"id": "INTEGER", "grp": "TEXT"})
DELETE_DEAD = _delete("dead", {"id": "INTEGER", "grp": "TEXT"})
DELETE_GROUPS = _delete("grp", {"topic": "TEXT", "grp": "TEXT"})
DELETE_SESSIONS = _delete("session", {"session": "BLOB"})

# With str() of a list of ints as the argument: one argument for any number of ids.
DELETE_TASKS_BY_ID = "DELETE FROM task WHERE id IN (SELECT value FROM json_each(?))"
DELETE_PACKS = "DELETE FROM pack WHERE first IN (SELECT value FROM json_each(?))"
DELETE_GONE = "DELETE FROM gone WHERE first IN (SELECT value FROM json_each(?))"
READ_PACKS = (
    "SELECT pack.*, ifnull(mask, 0) FROM pack LEFT JOIN gone USING (first)"
    " WHERE first IN (SELECT value FROM json_each(?))"
)
ALL_PACKS = "SELECT pack.*, ifnull(mask, 0) FROM pack LEFT JOIN gone USING (first) ORDER BY first"
PACK_INDEX = (
    "SELECT first, count, ifnull(mask, 0) FROM pack LEFT JOIN gone USING (first) ORDER BY first"
)
DELETE_PREPARE_BY_ID = "DELETE FROM prepare WHERE id IN (SELECT value FROM json_each(?))"
DELETE_DEAD_BY_ID = "DELETE FROM dead WHERE id IN (SELECT value FROM json_each(?))"

INSERT_ENDING = "INSERT OR ROLLBACK INTO ending VALUES (?, ?, ?)"
# Oldest first and a few at a time: each batch adds one row, so this catches up.
TRIM_ENDINGS = (
    "DELETE FROM ending WHERE batch IN"
    " (SELECT batch FROM (SELECT batch, upto FROM ending ORDER BY batch LIMIT 64) WHERE upto <= ?)"
)

# Checks and moves on in one statement: 3 rows change if epoch, owner and number are right.
ADVANCE = (
    "UPDATE meta SET value = CASE key WHEN 'last_batch' THEN ?1"
    " WHEN 'id_mark' THEN max(value, ?2) ELSE ?3 END"
    " WHERE key IN ('last_batch', 'id_mark', 'position_ms')"
    " AND (SELECT group_concat(value, ' ') FROM"
    " (SELECT value FROM meta WHERE key IN ('epoch', 'last_batch', 'owner') ORDER BY key)) = ?4"
)
ADVANCED_ROWS = 3


def expected_meta(epoch: int, owner: str, n: int) -> str:
    """The last argument of ``ADVANCE``: what meta must say for batch ``n`` to be the next."""
    return f"{epoch} {n - 1} {owner}"
