"""The layout of the database: tables, the marks by which it is known as ours, its version; and how
a database is opened: look first, then lay out or upgrade, and begin an epoch durably.

Made to be read with the ``sqlite3`` shell. Must not know threads or batches.

Recipe for a new layout, once one was released: raise ``LAYOUT``, and add the statements that turn
the former layout into it to ``UPGRADES``. A golden dump of every layout stays in ``tests/golden``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from typing import TYPE_CHECKING

from tickwheel.model.key_hash import SEED_BYTES
from tickwheel.persistence.contract import Opened, StoreUnusable
from tickwheel.persistence.sqlite.connection import connect_reader, is_full

if TYPE_CHECKING:
    from tickwheel.persistence.sqlite.room import Room


APPLICATION_ID = 0x544B_574C
"""'TKWL', in the file's header, where ``file`` and ``PRAGMA application_id`` find it."""
UNRELEASED_ID = 0x5457_4845
"""'TWHE', of databases from before the first release, whose layouts are not read."""
LAYOUT = 1
UPGRADES: dict[int, tuple[str, ...]] = {}
"""A layout → the statements that make the next one of it, in one transaction."""

TABLES = (
    # The StoreQueue: a task stays here until its last group is done with it. No column is
    # NOT NULL, because checking that would make SQLite keep a statement journal.
    "CREATE TABLE task(id INTEGER PRIMARY KEY, due_ms INTEGER, topic TEXT, body BLOB, extras BLOB)",
    # The same for tasks that arrived together: see packs.py. No id is in both.
    """CREATE TABLE pack(
        first INTEGER PRIMARY KEY, count INTEGER, head BLOB, topics TEXT, bodies BLOB,
        extras BLOB)""",
    # Which tasks of a pack have left it: a bit for each.
    "CREATE TABLE gone(first INTEGER PRIMARY KEY, mask INTEGER)",
    # The due times of a pack of which some were changed: as in its head.
    "CREATE TABLE moved(first INTEGER PRIMARY KEY, dues BLOB)",
    # New due times of tasks in packs that are not in moved yet, a row a batch: (id, due_ms) of
    # each, 8 bytes each. The newest counts.
    "CREATE TABLE move(batch INTEGER PRIMARY KEY, data BLOB)",
    # Hashes of topic and key (model/key_hash.py, by the seed in meta) of tasks that have a key. Of
    # a pack of which some have: 8 bytes for each, 0 without a key. Of rows on their own: signed.
    "CREATE TABLE pack_key(first INTEGER PRIMARY KEY, hashes BLOB)",
    "CREATE TABLE task_key(id INTEGER PRIMARY KEY, hash INTEGER)",
    # The PrepareQueue: what was delivered and is not finished, for each group.
    # state: 1 in flight (until at_ms), 2 waiting (for at_ms), 3 released, 4 done, 5 held (since),
    # 6 expired in the group
    """CREATE TABLE prepare(
        id INTEGER, grp TEXT, state INTEGER, attempt INTEGER, at_ms INTEGER, epoch INTEGER,
        past BLOB, PRIMARY KEY(id, grp)) WITHOUT ROWID""",
    """CREATE TABLE dead(
        id INTEGER, grp TEXT, topic TEXT, died_ms INTEGER, attempt INTEGER, reason TEXT,
        behind_id INTEGER, past BLOB, PRIMARY KEY(id, grp)) WITHOUT ROWID""",
    # What is kept under a key of its own: groups, answers to producer sessions, schedules, … The
    # kinds and their numbers are in model/kinds.py.
    "CREATE TABLE record(kind INTEGER, key TEXT, data BLOB, PRIMARY KEY(kind, key)) WITHOUT ROWID",
    # How tasks ended, a row a batch. upto counts the endings written so far, this row's included.
    "CREATE TABLE ending(batch INTEGER PRIMARY KEY, upto INTEGER, data BLOB)",
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID",
)
KEY_SEED = "key_seed"
"""The name of the seed of key hashes in table ``meta``; the value is in hex."""
META = (
    "layout", "incarnation", "epoch", "owner", "last_batch", "id_mark", "position_ms", "clean",
    KEY_SEED,
)  # fmt: skip


def identify(connection: sqlite3.Connection, path: str) -> int:
    """The layout version of an open database, 0 for an empty one; changes nothing.

    Raises StoreUnusable for a file of something else and for a newer layout.
    """
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (layout,) = connection.execute("PRAGMA user_version").fetchone()
        (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname == "SQLITE_NOTADB":
            raise StoreUnusable(f"{path} is not a SQLite database; name another file") from error
        raise
    if not application_id and not layout and not objects:
        return 0
    if application_id == UNRELEASED_ID:
        raise StoreUnusable(
            f"{path} was written before the first release and is not read any more; drain it with"
            " the program that wrote it, and name another file"
        )
    if application_id != APPLICATION_ID:
        raise StoreUnusable(
            f"{path} is a SQLite database of another program"
            f" (application_id {application_id:#x}); name another file"
        )
    if layout > LAYOUT:
        raise StoreUnusable(
            f"{path} has layout {layout}; this release reads up to {LAYOUT}: use a newer release"
        )
    if layout < 1:
        raise StoreUnusable(f"{path} has no layout version; restore a backup")
    return int(layout)


def create(connection: sqlite3.Connection) -> None:
    """Lay out an empty database inside the caller's transaction."""
    for statement in TABLES:
        connection.execute(statement)
    key_seed = secrets.token_bytes(SEED_BYTES).hex()
    values = (LAYOUT, secrets.token_hex(16), 0, "", 0, 0, 0, 1, key_seed)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", zip(META, values, strict=True))
    _mark(connection)


def upgrade(connection: sqlite3.Connection, layout: int) -> None:
    """Bring an older layout up to date inside the caller's transaction."""
    if layout == LAYOUT:
        return
    for step in range(layout, LAYOUT):
        for statement in UPGRADES[step]:
            connection.execute(statement)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'layout'", (LAYOUT,))
    _mark(connection)


def _mark(connection: sqlite3.Connection) -> None:
    # Both are in the header page, so they are part of the transaction like any row.
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {LAYOUT}")


def read_meta(connection: sqlite3.Connection, path: str) -> dict[str, int | str]:
    """The meta table as a map; raises StoreUnusable when something is missing in it."""
    meta: dict[str, int | str] = dict(connection.execute("SELECT key, value FROM meta"))
    missing = [key for key in META if key not in meta]
    if missing:
        raise StoreUnusable(f"{path}: meta lacks {', '.join(missing)}; restore a backup")
    return meta


IDENTIFY_CACHE_BYTES = 1 << 16
MAGIC = b"SQLite format 3\0"


def identify_file(path: str, busy_ms: int) -> int:
    """The layout of the file; 0: it is new. A file that is not ours stays as it is."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return 0
    # A journal is left when the creation of the file was cut short: it must be rolled back.
    mode = "rw" if os.path.exists(path + "-journal") else "ro"
    if mode == "ro" and _begin_of(path) != MAGIC:
        raise StoreUnusable(f"{path} is not a SQLite database; name another file")
    connection = connect_reader(path, IDENTIFY_CACHE_BYTES, busy_ms, mode=mode)
    with contextlib.closing(connection):
        return identify(connection, path)


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
    """Begin an epoch, durable on return; returns what ``meta`` said before. The caller adds what is
    known of room."""
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
        key_seed=bytes.fromhex(str(before[KEY_SEED])),
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
        upgrade(connection, layout)
    else:
        create(connection)
    before = read_meta(connection, path)
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
