"""What a start reads, and copies of a database in use. Both run beside the writer, synchronously,
on connections of their own.

A start reads the small tables whole, and the handles of all tasks in due order. Handles are sorted
once into a temporary table outside the database, so that the snapshot ends before the first chunk
is handed out: commits go on and the log can start over while a million handles are loaded. What
is handed out is still the one moment of that snapshot.

A copy is consistent. It is written under another name, synced, and given its name last: a file of
the name asked for is always whole. It never replaces a file that is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from itertools import chain, starmap
from typing import TYPE_CHECKING

from tickwheel.model.records import ID_STEP, Outcome
from tickwheel.persistence.codec import decode_endings
from tickwheel.persistence.contract import Handles, Small, StoreError
from tickwheel.persistence.sqlite.connection import describe, snapshot
from tickwheel.persistence.sqlite.packs import dues_of, ids_of, topics_of
from tickwheel.persistence.sqlite.room import free_bytes
from tickwheel.persistence.sqlite.rows import group_row, progress_row, session_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
            outcomes=_endings(connection, endings_max),
        )


def _endings(connection: sqlite3.Connection, endings_max: int) -> list[tuple[int, Outcome]]:
    found: list[tuple[int, Outcome]] = []
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


PAGES_A_STEP = 4096


def copy_database(
    source: sqlite3.Connection, path: str, slack_bytes: int, stop: Callable[[], bool]
) -> int:
    """Copy everything committed so far to ``path``; the copy's size in bytes.

    ``slack_bytes`` stay free on the disk. ``stop`` is asked between steps, to give up.
    """
    if os.path.lexists(path):
        raise StoreError(f"backup: {path} exists already")
    part = f"{path}.part-{os.getpid()}"
    try:
        _copy(source, part, slack_bytes, stop)
        size_bytes = os.path.getsize(part)
        _publish(part, path)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"backup to {path} failed: {describe(error)}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return size_bytes


def _copy(
    source: sqlite3.Connection, part: str, slack_bytes: int, stop: Callable[[], bool]
) -> None:
    def progress(status: int, remaining: int, total: int) -> None:
        if stop():
            raise StoreError("backup: the store is closing")

    # One snapshot around all steps: without it a commit would start the copy over.
    with snapshot(source):
        (pages,) = source.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("SELECT 1 FROM meta").fetchone()
        if free_bytes(part) < pages * page_bytes + slack_bytes:
            raise StoreError(f"backup: no room on the disk for {pages * page_bytes} bytes more")
        target = sqlite3.connect(part, isolation_level=None)
        try:
            target.execute("PRAGMA synchronous = OFF")  # synced once, when it is whole
            source.backup(target, pages=PAGES_A_STEP, progress=progress, sleep=0)
        finally:
            target.close()
    fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(part: str, path: str) -> None:
    """Give the copy its name, unless that exists by now; durable when it returns."""
    os.link(part, path)
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
