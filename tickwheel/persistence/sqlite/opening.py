"""Opening a database: look first, then lay out or upgrade, and begin an epoch durably."""

from __future__ import annotations

import contextlib
import os
import sqlite3

from tickwheel.persistence.sqlite import schema
from tickwheel.persistence.sqlite.connection import connect_reader, is_full
from tickwheel.persistence.sqlite.room import Room
from tickwheel.persistence.store import Opened, StoreUnusable

IDENTIFY_CACHE_BYTES = 1 << 16
MAGIC = b"SQLite format 3\0"


def identify(path: str, busy_ms: int) -> int:
    """The layout of the file, 0 for a new one. A file that is not ours stays as it is."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return 0
    # A journal is left when the creation of the file was cut short: it must be rolled back.
    mode = "rw" if os.path.exists(path + "-journal") else "ro"
    if mode == "ro" and _begin_of(path) != MAGIC:
        raise StoreUnusable(f"{path} is not a SQLite database; name another file")
    connection = connect_reader(path, IDENTIFY_CACHE_BYTES, busy_ms, mode=mode)
    with contextlib.closing(connection):
        return schema.identify(connection, path)


def _begin_of(path: str) -> bytes:
    # No connection to this file is open: closing a descriptor of it would end SQLite's locks.
    with open(path, "rb") as file:
        return file.read(len(MAGIC))


def begin_epoch(
    connection: sqlite3.Connection,
    path: str,
    layout: int,
    owner: str,
    now_ms: int,
    room: Room,
    epoch_min: int = 1,
) -> Opened:
    """What meta said before, and the new epoch, which is durable when it returns. Of room the
    caller knows more."""
    try:
        before = _begin_epoch(connection, path, layout, owner, now_ms, epoch_min)
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not is_full(error, path):
            raise
        room.give_up()
        before = _begin_epoch(connection, path, layout, owner, now_ms, epoch_min)
    if not layout:
        _sync_folder(path)
    return Opened(
        epoch=_next_epoch(before, epoch_min),
        last_batch=int(before["last_batch"]),
        id_mark=int(before["id_mark"]),
        position_ms=int(before["position_ms"]),
        clean=bool(before["clean"]),
        created=not layout,
    )


def _next_epoch(before: dict[str, int | str], epoch_min: int) -> int:
    return max(int(before["epoch"]) + 1, epoch_min)


def _begin_epoch(
    connection: sqlite3.Connection,
    path: str,
    layout: int,
    owner: str,
    now_ms: int,
    epoch_min: int,
) -> dict[str, int | str]:
    connection.execute("BEGIN IMMEDIATE")
    if layout:
        schema.upgrade(connection, layout)
    else:
        schema.create(connection)
    before = schema.read_meta(connection, path)
    values: dict[str, int | str] = {
        "epoch": _next_epoch(before, epoch_min),
        "owner": owner,
        "clean": 0,
        "opened_ms": now_ms,
    }
    connection.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())
    connection.execute("COMMIT")
    return before


def _sync_folder(path: str) -> None:
    """Make the names of files that were made in the folder of ``path`` durable."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
