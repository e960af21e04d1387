"""Connections to one database file, and what an error of SQLite means for a batch.

Every connection of the store is made here, so that settings that promise durability cannot
differ between them. Threads are the caller's business: a connection is used by one at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from urllib.parse import quote

from tickwheel.persistence.sqlite.room import free_bytes

PAGE_BYTES = 4096
STATEMENTS_MAX = 128

_FULL_IF_NO_SPACE = ("SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP")
"""Raised before anything of a batch is in the log, also for a full disk: its errno is hidden."""


def _connect(path: str, mode: str, cache_bytes: int, busy_ms: int) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}",
        uri=True,
        timeout=busy_ms / 1000,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=STATEMENTS_MAX,
    )
    connection.execute(f"PRAGMA cache_size = {-(cache_bytes // 1024)}")
    connection.execute("PRAGMA mmap_size = 0")
    # Intermediate results stay off the disk, which may be full.
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def connect_writer(
    path: str, cache_bytes: int, busy_ms: int, log_bytes_max: int
) -> sqlite3.Connection:
    """Changes nothing in an existing file yet: see ``make_durable``."""
    connection = _connect(path, "rwc", cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # A log that grew beyond this (a long reader) is cut when it starts over; below it the
    # blocks are used again, which makes a sync cheaper than appending.
    connection.execute(f"PRAGMA journal_size_limit = {log_bytes_max}")
    # Some distributions build SQLite to overwrite deleted rows with zeros: twice the log.
    connection.execute("PRAGMA secure_delete = OFF")
    return connection


def make_durable(connection: sqlite3.Connection) -> None:
    """Write-ahead log, synced at every commit. Only for a file that is known to be ours."""
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log on this file system (got {mode!r})")
    connection.execute("PRAGMA synchronous = FULL")


def connect_reader(
    path: str, cache_bytes: int, busy_ms: int, mode: str = "rw"
) -> sqlite3.Connection:
    """For reading beside the writer; ``ro`` for a file that must not change at all."""
    connection = _connect(path, mode, cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA query_only = ON")
    return connection


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All reads inside see the same batches."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def is_full(error: sqlite3.Error, path: str) -> bool:
    """Whether there was no room on the disk, and nothing of the transaction can have landed."""
    name = error_name(error)
    if name == "SQLITE_FULL":
        return True
    return name in _FULL_IF_NO_SPACE and free_bytes(path) < PAGE_BYTES * 16


def is_busy(error: sqlite3.Error) -> bool:
    return error_name(error).startswith("SQLITE_BUSY")


def cannot_open(error: sqlite3.Error) -> bool:
    """Whether a file could not be opened, mostly for want of descriptors."""
    return error_name(error).startswith("SQLITE_CANTOPEN")


def error_name(error: sqlite3.Error) -> str:
    """For example ``SQLITE_IOERR_FSYNC``; empty for errors that are Python's own."""
    return getattr(error, "sqlite_errorname", None) or ""


def describe(error: BaseException) -> str:
    name = error_name(error) if isinstance(error, sqlite3.Error) else type(error).__name__
    return f"{error} ({name})" if name else str(error)
