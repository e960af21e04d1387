"""Connections to one database file, what an error of SQLite means for a batch, and the lock that
keeps two daemons off one database.

Every connection of the store is made here, so that settings that promise durability cannot
differ between them. Threads are the caller's business: a connection is used by one at a time.

The lock is ``flock`` on a file beside the database, held for as long as the store is open: it
belongs to the open file, so it ends with the process however that ends, and it also keeps out a
second store in the same process. The file stays behind; removing it would let two daemons lock two
files of one name. Its text is for people: pid and owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import quote

from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.sqlite.room import free_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_BYTES = 4096
STATEMENTS_MAX = 128

_FULL_IF_NO_SPACE = ("SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP")
"""Errors raised before anything of a batch is in the log; a full disk hides behind them."""


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
    """A connection that may write, and has changed nothing in the file: see ``make_durable``."""
    connection = _connect(path, "rwc", cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # A log that grew beyond this (a long reader) is cut when it starts over; below it the
    # blocks are used again, which makes a sync cheaper than appending.
    connection.execute(f"PRAGMA journal_size_limit = {log_bytes_max}")
    # Some distributions build SQLite to overwrite deleted rows with zeros: twice the log.
    connection.execute("PRAGMA secure_delete = OFF")
    return connection


def make_durable(connection: sqlite3.Connection) -> None:
    """Set a write-ahead log, synced at every commit, on a file that is known to be ours."""
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log on this file system (got {mode!r})")
    connection.execute("PRAGMA synchronous = FULL")


def connect_reader(
    path: str, cache_bytes: int, busy_ms: int, mode: str = "rw"
) -> sqlite3.Connection:
    """A connection that reads beside the writer; ``ro``: the file must not change at all."""
    connection = _connect(path, mode, cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA query_only = ON")
    return connection


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all reads inside see the same batches."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# Concatenating blobs keeps their bytes in the versions of SQLite there are, but no document
# promises it: the first use of a connection tries it, and falls back to twice the bytes.
_JOIN_RAW = "CAST(group_concat({}, '') AS BLOB)"
_JOIN_HEX = "group_concat(hex({}), '')"
_TRIAL = "SELECT {} FROM (SELECT x'00FF' AS b UNION ALL SELECT x'' UNION ALL SELECT x'FE00')"


def blob_join(connection: sqlite3.Connection) -> str:
    """The expression that puts blobs end to end; what comes of it is for ``blob_of``."""
    trial = connection.execute(_TRIAL.format(_JOIN_RAW.format("b"))).fetchone()
    return _JOIN_RAW if trial == (b"\x00\xff\xfe\x00",) else _JOIN_HEX


def blob_of(joined: bytes | str | None) -> bytes:
    """The bytes of a joined column: blobs end to end, in hex, or NULL for none."""
    if not joined:
        return b""
    return bytes.fromhex(joined) if isinstance(joined, str) else joined


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
    """The name of SQLite's error, such as ``SQLITE_IOERR_FSYNC``; empty for Python's own."""
    return getattr(error, "sqlite_errorname", None) or ""


def describe(error: BaseException) -> str:
    name = error_name(error) if isinstance(error, sqlite3.Error) else type(error).__name__
    return f"{error} ({name})" if name else str(error)


class FileLock:
    """An exclusive lock on a file, not waited for. It may be taken again after ``release``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, owner: str) -> None:
        """Take the lock. Raises StoreUnusable naming the holder."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnusable(f"cannot open the lock {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StoreUnusable(
                f"{self.path.removesuffix('.lock')} is in use by {holder or 'another process'}"
                f" (lock {self.path}); stop that one first"
            ) from error
        self._fd = fd
        self._write(f"pid {os.getpid()} {owner}\n")

    def release(self) -> None:
        if self._fd >= 0:
            self._write("")
            os.close(self._fd)
            self._fd = -1

    def _write(self, text: str) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError:
            # The text is a courtesy; on a full disk the lock itself still counts.
            return
