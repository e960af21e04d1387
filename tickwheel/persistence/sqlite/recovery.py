"""What a start reads: the small tables whole, and the handles of all tasks in due order.

Synchronous, on connections of their own that are closed afterwards. Handles are sorted once
into a temporary table outside the database, so that the snapshot ends before the first chunk
is handed out: commits go on and the log can start over while a million handles are loaded. What
is handed out is still the one moment of that snapshot.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from itertools import chain, starmap

from tickwheel.model.records import ID_STEP, Ending
from tickwheel.persistence.codec import decode_endings
from tickwheel.persistence.sqlite.connection import snapshot
from tickwheel.persistence.sqlite.packs import dues_of, ids_of, topics_of
from tickwheel.persistence.sqlite.rows import group_row, progress_row, session_row
from tickwheel.persistence.store import Handles, Small

PACKS_AT_ONCE = 1_000

_LOOSE = "CREATE TEMP TABLE found AS SELECT id, due_ms, topic FROM main.task"
_PACKED = (
    "SELECT first, count, head, topics, ifnull(mask, 0) FROM pack LEFT JOIN gone USING (first)"
)
_ADD = "INSERT INTO temp.found VALUES (?, ?, ?)"
_SORT = "CREATE TEMP TABLE handle AS SELECT id, due_ms, topic FROM temp.found ORDER BY due_ms, id"
_CHUNK = (
    "SELECT json_group_array(id), json_group_array(due_ms), json_group_array(topic)"
    " FROM temp.handle WHERE rowid > ? AND rowid <= ?"
)


def read_small(connection: sqlite3.Connection, endings_max: int) -> Small:
    """As of one moment."""
    with snapshot(connection):
        return Small(
            groups=[group_row(*row) for row in connection.execute("SELECT * FROM grp")],
            sessions=[session_row(*row) for row in connection.execute("SELECT * FROM session")],
            progress=[progress_row(*row) for row in connection.execute("SELECT * FROM prepare")],
            dead=list(connection.execute("SELECT id, grp, topic FROM dead ORDER BY id, grp")),
            endings=_endings(connection, endings_max),
        )


def _endings(connection: sqlite3.Connection, endings_max: int) -> list[tuple[int, Ending]]:
    found: list[tuple[int, Ending]] = []
    for (data,) in connection.execute("SELECT data FROM ending ORDER BY batch"):
        found += decode_endings(data)
    return found[-endings_max:]


def _handles(
    first: int, count: int, head: bytes, names: str, mask: int
) -> Iterator[tuple[int, int, str]]:
    dues_ms, topics = dues_of(head, count), topics_of(names, count)
    if not mask:
        return zip(ids_of(first, count, 0), dues_ms, topics, strict=True)
    bits = ((task_id - first) // ID_STEP for task_id in ids_of(first, count, mask))
    return ((first + bit * ID_STEP, dues_ms[bit], topics[bit]) for bit in bits)


class HandleReader:
    """One pass over all handles in due order; each ``next`` is one statement."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """The connection is closed by ``close``."""
        self._connection = connection
        self._row = 0
        self._topics: dict[str, str] = {}

    def sort(self) -> None:
        """In a temporary file; in memory when there is no room for one."""
        connection = self._connection
        connection.execute("PRAGMA query_only = OFF")  # it forbids temporary tables too
        connection.execute("PRAGMA temp_store = FILE")
        try:
            self._collect()
        except sqlite3.OperationalError:
            connection.execute("PRAGMA temp_store = MEMORY")  # drops what there is of both
            self._collect()

    def _collect(self) -> None:
        connection = self._connection
        connection.execute("BEGIN")
        try:
            connection.execute(_LOOSE)
            packs = connection.execute(_PACKED)
            while some := packs.fetchmany(PACKS_AT_ONCE):
                connection.executemany(_ADD, chain.from_iterable(starmap(_handles, some)))
            connection.execute(_SORT)
            connection.execute("DROP TABLE temp.found")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def next(self, chunk: int) -> Handles:
        """Empty when there are no more."""
        columns = self._connection.execute(_CHUNK, (self._row, self._row + chunk)).fetchone()
        ids, dues_ms, topics = map(json.loads, columns)
        self._row += chunk
        shared = self._topics
        return Handles(
            ids=ids, dues_ms=dues_ms, topics=[shared.setdefault(topic, topic) for topic in topics]
        )

    def close(self) -> None:
        self._connection.close()
