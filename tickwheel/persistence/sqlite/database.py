"""The database file: options, connections, locks, room on the disk, layout, and opening.

All connections of the store are opened here, so their durability settings cannot differ. One thread
at a time uses a connection. This module must not know threads or batches.

The lock is ``flock`` on a file next to the database while the store is open. It belongs to the open
file, so it ends with the process, and it also excludes a second store in the same process. The lock
file is never removed, because two daemons could then lock two files with the same name. It contains
pid and owner, for people, and the incarnation, which proves to a starting daemon that a missing
database existed.

The database file is also locked (``StoreLock``), because a hard link, or a file mounted into two
containers, gives one database two names. Its descriptor stays open as long as the lock, because
closing any descriptor of a database ends SQLite's locks on it in this process. A database with two
names is always refused, because its write-ahead log is next to only one of them.

A start identifies the database, then initializes or upgrades it, and begins an epoch durably. To
change a released layout, raise ``LAYOUT`` and add the statements that upgrade the previous layout
to ``UPGRADES``. A golden dump of every layout stays in ``tests/golden``.

``Room`` stops enqueues on a nearly full disk while acks still have room. Room comes from three
sources, in this order:

* Free space. An enqueue batch needs space twice, for the log and for the database.
* The reserve, a file of allocated blocks that is deleted when the disk is full. Writing the log
  back can make the database grow by nearly the size of the log.
* Free pages inside the database (``inside``). After a backlog has ended, the file stays as large as
  it was, and has room for new tasks.

A disk used above ``disk_refuse`` counts as full, but the reserve is kept. The writer's thread uses
``Room``; other threads read ``has_room``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from tickwheel import disk
from tickwheel.model.key_hash import SEED_BYTES
from tickwheel.model.records import ProgressState
from tickwheel.persistence.contract import Evidence, Opened, StoreError, StoreUnusable
from tickwheel.persistence.identity import (
    COPY,
    NEW,
    Beginning,
    EpochRecord,
    StoreIdentity,
    mark_of,
    next_epoch,
    past_text,
    read_past,
)
from tickwheel.upgrades import Upgrade

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSE_MARGIN = 0.01
"""Share of the disk by which usage must fall below ``disk_refuse`` before enqueues resume."""


class Disk(NamedTuple):
    """The use of a disk."""

    free_bytes: int
    """Bytes available to ordinary users."""
    used: float
    """The used share, from 0 to 1, as shown by ``df``."""


class Room:
    """Decides whether the disk of a database has room for new tasks."""

    def __init__(
        self, path: str, reserve_bytes: int, log_bytes: int, disk_refuse: float = 1.0
    ) -> None:
        """``disk_refuse``: the used share above which enqueues stop; 1: no such limit."""
        self._disk_refuse = disk_refuse
        self._reserve_path = path + ".reserve"
        self._reserve_bytes = reserve_bytes
        self._enough_bytes = log_bytes
        """Free bytes, in addition to the reserve, at which enqueues begin or resume."""
        self._low_bytes = log_bytes // 4
        """Free bytes that enqueues must leave."""
        self.has_room = True
        self.inside = False
        """Whether only free pages of the database have room. If so, the log must not grow."""
        self.refusal = ""
        """Why enqueues are refused if disk usage is above ``disk_refuse``; otherwise empty."""

    @property
    def why_not(self) -> str:
        """Why enqueues are refused, for error messages."""
        return self.refusal or "no room on the disk"

    def allows(self, task_bytes: int, free_page_bytes: int | None) -> bool:
        """Return whether a batch with ``task_bytes`` of new tasks has room, and set ``has_room``.
        ``free_page_bytes`` must not be None while ``inside``."""
        if not self.has_room:
            return False
        if self.inside:
            free = free_page_bytes or 0
        else:
            use = measure(self._reserve_path)
            free = 0 if self._is_too_used(use) else use.free_bytes
        self.has_room = free >= 2 * task_bytes + self._low_bytes
        return self.has_room

    def _is_too_used(self, use: Disk) -> bool:
        limit = self._disk_refuse - (REFUSE_MARGIN if self.refusal else 0)
        is_too_used = self._disk_refuse < 1 and use.used > limit
        self.refusal = (
            f"its disk is {use.used:.1%} full; the limit is {self._disk_refuse:.1%} (disk_refuse)"
            if is_too_used
            else ""
        )
        return is_too_used

    def find(self, free_page_bytes: int) -> bool:
        """Check again whether there is room. Return ``has_room``."""
        reserved = self._take_reserve()
        if not self._is_too_used(measure(self._reserve_path)) and reserved:
            self.inside = False
            self.has_room = True
        else:
            self.inside = free_page_bytes >= 2 * self._low_bytes
            self.has_room = self.inside
        return self.has_room

    def release_reserve(self) -> None:
        """Delete the reserve of a full disk. Enqueues have no room until ``find`` succeeds."""
        self.has_room = self.inside = False
        with contextlib.suppress(OSError):
            os.unlink(self._reserve_path)

    def _take_reserve(self) -> bool:
        """Allocate the reserve if that leaves enough free space. Return whether it is complete."""
        try:
            fd = os.open(self._reserve_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        try:
            allocated_bytes = min(os.fstat(fd).st_blocks * 512, self._reserve_bytes)
            free = free_bytes(self._reserve_path) + allocated_bytes
            if free < self._reserve_bytes + self._enough_bytes:
                return False
            os.ftruncate(fd, self._reserve_bytes)
            if self._reserve_bytes:
                os.posix_fallocate(fd, 0, self._reserve_bytes)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def measure(path: str) -> Disk:
    """Return the usage of the disk of ``path``. A disk that cannot be measured counts as full."""
    try:
        use = disk.measure(os.path.dirname(path) or ".")
    except OSError:
        return Disk(0, 1.0)
    return Disk(use.free_bytes, use.share)


def free_bytes(path: str) -> int:
    """Return the bytes available to ordinary users on the disk of ``path``, or 0 if unknown."""
    return measure(path).free_bytes


def disk_bytes(path: str) -> int:
    """Return the size in bytes of the disk of ``path``."""
    use = os.statvfs(os.path.dirname(path) or ".")
    return use.f_blocks * use.f_frsize


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """Options of the SQLite store, also as a URL query: ``sqlite:///x.db?wal_bytes=4194304``."""

    wal_bytes: int = 16 * MIB
    """Size of the write-ahead log at which it is written back into the database."""
    reserve_bytes: int = 24 * MIB
    """Bytes reserved for acks on a full disk; 0: none. The default exceeds ``wal_bytes``, because
    writing the log back can make the database grow by nearly the size of the log."""
    writer_cache_bytes: int = 4 * MIB
    reader_cache_bytes: int = 2 * MIB
    endings_max: int = 100_000
    """Number of finished tasks whose outcomes are kept."""
    busy_ms: int = 5_000
    """Maximum milliseconds to wait for another process (a shell) that holds the write lock."""

    disk_refuse: float = 1.0
    """Used share of the disk above which enqueues are refused. The daemon sets it; it is not part
    of a URL, so it does not stop tools that copy a store."""

    def fitted(self, disk_bytes: int) -> SqliteOptions:
        """Return these options with log and reserve limited to shares of a disk of this size."""
        return replace(
            self,
            wal_bytes=min(self.wal_bytes, disk_bytes // 16),
            reserve_bytes=min(self.reserve_bytes, disk_bytes // 8),
        )


def options_from(url: str, settings: Sequence[tuple[str, int]]) -> SqliteOptions:
    """Return the options in a URL's query. Raise StoreUnusable for an unknown option."""
    names = {field.name for field in fields(SqliteOptions)} - {"disk_refuse"}
    for name, _ in settings:
        if name not in names:
            raise StoreUnusable(
                f"store {url!r}: unknown setting {name!r}; use {', '.join(sorted(names))}"
            )
    return SqliteOptions(**dict(settings))


PAGE_BYTES = 4096
STATEMENTS_MAX = 128

_FULL_IF_NO_SPACE = ("SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP")
"""Errors that a full disk can cause before any part of a batch has been written to the log."""


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
    # Keep intermediate results in memory, because the disk can be full.
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def connect_writer(
    path: str, cache_bytes: int, busy_ms: int, log_bytes_max: int
) -> sqlite3.Connection:
    """Return a connection for writing, without changing the file; see ``make_durable``."""
    connection = _connect(path, "rwc", cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # A log that exceeds this size (because of a long read) is truncated when it starts over. A
    # smaller log keeps its blocks, because syncing reused blocks costs less than appended blocks.
    connection.execute(f"PRAGMA journal_size_limit = {log_bytes_max}")
    # Some distributions build SQLite to overwrite deleted rows with zeros, which doubles the log.
    connection.execute("PRAGMA secure_delete = OFF")
    return connection


def make_durable(connection: sqlite3.Connection) -> None:
    """Make each commit durable with a synced log. Call it only after ``identify_file``."""
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"no WAL on this file system: journal_mode is {mode!r}")
    connection.execute("PRAGMA synchronous = FULL")


def connect_reader(
    path: str, cache_bytes: int, busy_ms: int, mode: str = "rw"
) -> sqlite3.Connection:
    """Return a connection for reads concurrent with the writer; mode ``ro`` never changes the
    file."""
    connection = _connect(path, mode, cache_bytes, busy_ms)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA query_only = ON")
    return connection


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all statements of the block read one snapshot of the database."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# All current versions of SQLite preserve the bytes of blobs that they concatenate, but this is not
# documented. So each connection first tries it, and falls back to hex, which is twice as long.
_JOIN_RAW = "CAST(group_concat({}, '') AS BLOB)"
_JOIN_HEX = "group_concat(hex({}), '')"
_TRIAL = "SELECT {} FROM (SELECT x'00FF' AS b UNION ALL SELECT x'' UNION ALL SELECT x'FE00')"


def blob_join(connection: sqlite3.Connection) -> str:
    """Return the expression that concatenates blobs; ``blob_of`` decodes its result."""
    trial = connection.execute(_TRIAL.format(_JOIN_RAW.format("b"))).fetchone()
    return _JOIN_RAW if trial == (b"\x00\xff\xfe\x00",) else _JOIN_HEX


def blob_of(joined: bytes | str | None) -> bytes:
    """Return the bytes in a ``blob_join`` column, which contains concatenated blobs, hex, or
    NULL."""
    if not joined:
        return b""
    return bytes.fromhex(joined) if isinstance(joined, str) else joined


def is_full(error: sqlite3.Error, path: str) -> bool:
    """Return whether the disk was full, so that no part of the transaction was written."""
    name = error_name(error)
    if name == "SQLITE_FULL":
        return True
    return name in _FULL_IF_NO_SPACE and free_bytes(path) < PAGE_BYTES * 16


def is_busy(error: sqlite3.Error) -> bool:
    return error_name(error).startswith("SQLITE_BUSY")


def cannot_open(error: sqlite3.Error) -> bool:
    """Return whether a file could not be opened, usually because descriptors were used up."""
    return error_name(error).startswith("SQLITE_CANTOPEN")


def error_name(error: sqlite3.Error) -> str:
    """Return SQLite's name of an error, such as ``SQLITE_IOERR_FSYNC``; or "" for Python's
    errors."""
    return getattr(error, "sqlite_errorname", None) or ""


def describe(error: BaseException) -> str:
    name = error_name(error) if isinstance(error, sqlite3.Error) else type(error).__name__
    return f"{error} ({name})" if name else str(error)


class FileLock:
    """An exclusive lock on a file. ``acquire`` never waits, and can be called again after
    ``release``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self.incarnation = ""
        """The incarnation of the store that the lock protects; empty: there was no store."""

    def acquire(self, owner: str) -> None:
        """Take the lock. Raise StoreUnusable, which names the holder, if it is taken."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnusable(f"cannot open the lock {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _text_of(fd).partition("\n")[0].strip()
            os.close(fd)
            raise _in_use(self.path.removesuffix(".lock"), holder, self.path) from error
        self._fd = fd
        _HELD.add(self)
        _, label, incarnation = _text_of(fd).rpartition(_STORE)
        self.incarnation = incarnation.strip() if label else ""
        self._holder = f"pid {os.getpid()} {owner}\n"
        self._write(self._holder)

    def note(self, incarnation: str) -> None:
        """Record the incarnation of the store in the lock file, where it stays after
        ``release``."""
        self.incarnation = incarnation
        self._write(self._holder)

    def release(self) -> None:
        if self._fd >= 0:
            self._write("")
            self.close_descriptor()

    def close_descriptor(self) -> None:
        """Close the descriptor without changing the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        _HELD.discard(self)

    def _write(self, holder: str) -> None:
        line = f"{_STORE}{self.incarnation}\n" if self.incarnation else ""
        data = f"{holder}{line}".encode()
        try:
            # Do not truncate first: on a full disk the file could lose its block.
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        except OSError:
            # The lock is valid even if its text cannot be written.
            return


_STORE = "store "
"""Prefix of the line in a lock file that contains the incarnation."""


def _text_of(fd: int) -> str:
    return os.pread(fd, 400, 0).decode(errors="replace")


def _in_use(path: str, holder: str, lock: str) -> StoreUnusable:
    holder_text = holder or "another process"
    return StoreUnusable(
        f"{path} is in use by {holder_text} (lock {lock}); stop that process first"
    )


_HELD: set[FileLock | StoreLock] = set()
"""The locks of this process. A forked child closes its copies of their descriptors, because open
copies would keep the locks after the parent has ended. Closing a copy does not release the parent's
lock."""


def _after_fork() -> None:
    for lock in list(_HELD):
        lock.close_descriptor()


os.register_at_fork(after_in_child=_after_fork)


class StoreLock:
    """The lock of a database: on its lock file, and on the database file itself."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._beside = FileLock(path + ".lock")
        self._fd = -1
        self._file: tuple[int, int] | None = None

    @property
    def incarnation(self) -> str:
        """The incarnation of the store when the lock was last used; empty: there was no store."""
        return self._beside.incarnation

    def note(self, incarnation: str) -> None:
        """Record the incarnation of the store; empty if there is no store."""
        self._beside.note(incarnation)

    def acquire(self, owner: str) -> None:
        """Take the lock; call ``lock_file`` for a database created afterwards. Raise StoreUnusable
        if the database is in use or has a second name."""
        self._beside.acquire(owner)
        try:
            if os.path.exists(self._path):
                self.lock_file()
        except BaseException:
            self.release()
            raise

    def lock_file(self) -> None:
        """Lock the database file, which is created if it is missing. Raise StoreUnusable."""
        if self._fd >= 0:
            return
        try:
            check_names(self._path)
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(self._path)
                # Check this first, because closing a descriptor would end SQLite's locks.
                if (status.st_dev, status.st_ino) in _FILES:
                    raise StoreUnusable(
                        f"{self._path} is already open in this process under another name"
                    )
            fd = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnusable(f"cannot open {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            name = "another process, which opened it under another name"
            raise _in_use(self._path, name, self._path) from error
        status = os.fstat(fd)
        self._fd, self._file = fd, (status.st_dev, status.st_ino)
        for suffix in ("", *FILES_BESIDE):
            disk.tighten(self._path + suffix)
        _FILES.add(self._file)
        _HELD.add(self)

    def release(self) -> None:
        """Release the lock after all connections to the database were closed."""
        self.close_descriptor()
        self._beside.release()

    def close_descriptor(self) -> None:
        """Close the descriptor of the database file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._file is not None:
            _FILES.discard(self._file)
            self._file = None
        _HELD.discard(self)


_FILES: set[tuple[int, int]] = set()
"""Device and inode of the databases that this process has locked."""
MOUNTS = "/proc/self/mountinfo"


def check_names(path: str) -> None:
    """Raise StoreUnusable if the database file has several hard links or is a mount point: its log
    would be next to only one of its names."""
    with contextlib.suppress(FileNotFoundError):
        names = os.stat(path).st_nlink
        if names > 1:
            raise StoreUnusable(
                f"{path} has {names} names (hard links), but its write-ahead log is next to only"
                f" one of them: remove the others (find DIR -samefile {path}), or copy it with"
                " `tickwheel backup`"
            )
    if _is_mounted(path):
        raise StoreUnusable(
            f"{path} is a mount point, and its write-ahead log would be outside the mount:"
            " mount its folder instead"
        )


def _is_mounted(path: str) -> bool:
    """Return whether this file itself is a mount point; False if the system does not report mount
    points."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            points = {line.split(" ", 5)[4] for line in file if line.count(" ") > 4}
    except OSError:
        return False
    # mountinfo escapes space, tab, line feed and backslash.
    for character in "\\ \t\n":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path in points


APPLICATION_ID = 0x544B_574C
"""'TKWL' in the file's header, which ``file`` and ``PRAGMA application_id`` read."""
UNRELEASED_ID = 0x5457_4845
"""'TWHE' in databases from before the first release, whose layouts are not supported."""
LAYOUT = 1
UPGRADES: dict[int, tuple[str, ...]] = {}
"""Layout → the statements that upgrade it to the next layout, in one transaction."""

TABLES = (
    # The StoreQueue: a task stays in it until its last group has finished it. No column is NOT
    # NULL, because SQLite would need a statement journal for this check.
    "CREATE TABLE task(id INTEGER PRIMARY KEY, due_ms INTEGER, topic TEXT, body BLOB, extras BLOB)",
    # The same for tasks that arrived together (see packs.py). No id is in both tables.
    """CREATE TABLE pack(
        first INTEGER PRIMARY KEY, count INTEGER, head BLOB, topics TEXT, bodies BLOB,
        extras BLOB)""",
    # A bit for each task that has left its pack.
    "CREATE TABLE gone(first INTEGER PRIMARY KEY, mask INTEGER)",
    # All due times of a pack, encoded as in its head, once any of them has changed.
    "CREATE TABLE moved(first INTEGER PRIMARY KEY, dues BLOB)",
    # New due times of packed tasks that are not yet in moved, a row for each batch: (id, due_ms), 8
    # bytes each. The newest due time of a task applies.
    "CREATE TABLE move(batch INTEGER PRIMARY KEY, data BLOB)",
    # Hashes of topic and key (model/key_hash.py, with the seed in meta) of tasks that have a key:
    # for a pack 8 bytes for each task, 0 without a key; for a single row a signed number.
    "CREATE TABLE pack_key(first INTEGER PRIMARY KEY, hashes BLOB)",
    "CREATE TABLE task_key(id INTEGER PRIMARY KEY, hash INTEGER)",
    # The PrepareQueue: tasks that were delivered to a group and are not finished. state: 1 in
    # flight (until at_ms), 2 waiting (for at_ms), 3 released, 4 done, 5 held (since), 6 expired in
    # the group
    """CREATE TABLE prepare(
        id INTEGER, grp TEXT, state INTEGER, attempt INTEGER, at_ms INTEGER, epoch INTEGER,
        past BLOB, PRIMARY KEY(id, grp)) WITHOUT ROWID""",
    """CREATE TABLE dead(
        id INTEGER, grp TEXT, topic TEXT, died_ms INTEGER, attempt INTEGER, reason TEXT,
        behind_id INTEGER, past BLOB, PRIMARY KEY(id, grp)) WITHOUT ROWID""",
    # Records with a key: groups, answers to producer sessions, schedules, … model/kinds.py has the
    # kinds and their numbers.
    "CREATE TABLE record(kind INTEGER, key TEXT, data BLOB, PRIMARY KEY(kind, key)) WITHOUT ROWID",
    # Outcomes of tasks, a row for each batch. upto counts all outcomes up to and including those of
    # this row.
    "CREATE TABLE ending(batch INTEGER PRIMARY KEY, upto INTEGER, data BLOB)",
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID",
)
KEY_SEED = "key_seed"
"""Key in ``meta`` of the seed of key hashes, in hex."""
META = (
    "layout", "incarnation", "epoch", "owner", "last_batch", "id_mark", "position_ms", "clean",
    KEY_SEED,
)  # fmt: skip

MOVED_TO = "given_up_for"
"""Key in ``meta`` of the folder to which a change of the number of shards has moved the tasks. A
store with this key is not opened."""
PAST = "past"
"""Key in ``meta`` of the epochs before the newest one; see ``identity.py``."""
BRANCH = "branch"
"""Key in ``meta`` of the reason why the next epoch begins a new branch."""
ORIGINAL_BATCH = "came_to"
"""Key in ``meta`` of a copy of another kind of store: the original's last batch. The copy numbers
its own batches from 1."""
SINCE_EPOCH = "since_epoch"
"""Key in ``meta`` of the first epoch after a change of the number of shards: history events of
earlier epochs can be about tasks that are now in other shards."""


def identify(connection: sqlite3.Connection, path: str) -> int:
    """Return the layout version of an open database, or 0 if it is empty. Change nothing. Raise
    StoreUnusable for a file of another program or a newer layout."""
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (layout,) = connection.execute("PRAGMA user_version").fetchone()
        (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname == "SQLITE_NOTADB":
            raise StoreUnusable(f"{path} is not a SQLite database; use another path") from error
        raise
    if not application_id and not layout and not objects:
        return 0
    if application_id == UNRELEASED_ID:
        raise StoreUnusable(
            f"{path} was written before the first release, and its format is no longer supported;"
            " drain it with the program that wrote it, and use another path"
        )
    if application_id != APPLICATION_ID:
        raise StoreUnusable(
            f"{path} is a SQLite database of another program"
            f" (application_id {application_id:#x}); use another path"
        )
    if layout > LAYOUT:
        raise StoreUnusable(
            f"{path} has layout {layout}; this release reads up to {LAYOUT}: use a newer release"
        )
    if layout < 1:
        raise StoreUnusable(f"{path} has no layout version; restore a backup")
    return int(layout)


def create(connection: sqlite3.Connection) -> None:
    """Initialize an empty database inside the caller's transaction."""
    for statement in TABLES:
        connection.execute(statement)
    key_seed = secrets.token_bytes(SEED_BYTES).hex()
    values = (LAYOUT, secrets.token_hex(16), 0, "", 0, 0, 0, 1, key_seed)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", zip(META, values, strict=True))
    # Both values are in the header page, so the transaction includes them.
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {LAYOUT}")


def upgrade_steps(layout: int) -> tuple[str, ...]:
    """Return the statements that upgrade a database with this layout, in one transaction."""
    if layout in (0, LAYOUT):
        return ()
    return (
        *(statement for step in range(layout, LAYOUT) for statement in UPGRADES[step]),
        f"UPDATE meta SET value = {LAYOUT} WHERE key = 'layout'",
        f"PRAGMA user_version = {LAYOUT}",
    )


def read_meta(connection: sqlite3.Connection, path: str) -> dict[str, int | str]:
    """Return the table ``meta``. Raise StoreUnusable if one of the keys in ``META`` is missing."""
    meta: dict[str, int | str] = dict(connection.execute("SELECT key, value FROM meta"))
    missing = [key for key in META if key not in meta]
    if missing:
        raise StoreUnusable(f"{path}: meta lacks {', '.join(missing)}; restore a backup")
    return meta


@contextlib.contextmanager
def changing(path: str) -> Iterator[sqlite3.Connection]:
    """Change a store that nobody has open, in one durable transaction."""
    with contextlib.closing(_connect(path, "rw", IDENTIFY_CACHE_BYTES, busy_ms=1_000)) as store:
        store.execute("PRAGMA synchronous = FULL")
        store.execute("BEGIN IMMEDIATE")
        yield store
        store.execute("COMMIT")


def write_meta(path: str, values: Mapping[str, int | str]) -> None:
    """Add values durably to ``meta`` of a store that nobody has open."""
    with changing(path) as store:
        store.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def make_another(path: str, dropped_kinds: Sequence[int]) -> None:
    """Durably turn a copy of a store, which nobody has open, into an independent store. The store
    gets a new incarnation, and has no epochs, no outcomes and no records of ``dropped_kinds``. Its
    deliveries in flight are released."""
    with changing(path) as copy:
        copy.execute(
            "UPDATE prepare SET state = ? WHERE state = ?",
            (ProgressState.RELEASED, ProgressState.IN_FLIGHT),
        )
        kinds = [(number,) for number in dropped_kinds]
        copy.executemany("DELETE FROM record WHERE kind = ?", kinds)
        copy.execute("DELETE FROM ending")
        copy.execute("DELETE FROM meta WHERE key IN (?, ?, ?)", (BRANCH, PAST, ORIGINAL_BATCH))
        values = {"epoch": 0, "owner": "", "incarnation": secrets.token_hex(16)}
        copy.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def forget_endings(path: str, batch: int) -> None:
    """Delete the outcomes of batches up to ``batch`` in a store that nobody has open."""
    with changing(path) as store:
        store.execute("DELETE FROM ending WHERE batch <= ?", (batch,))


@contextlib.contextmanager
def open_snapshot(path: str, cache_bytes: int | None = None) -> Iterator[sqlite3.Connection | None]:
    """Yield a read-only snapshot of a store, or None for an empty file. Raise StoreUnusable."""
    try:
        connection = connect_reader(path, cache_bytes or IDENTIFY_CACHE_BYTES, 1_000, mode="ro")
        with contextlib.closing(connection), snapshot(connection):
            yield connection if identify(connection, path) else None
    except sqlite3.Error as error:
        raise StoreUnusable(f"cannot read {path}: {describe(error)}") from error


def meta_of(path: str) -> dict[str, int | str]:
    """Return the table ``meta`` of a store, or nothing for an empty file. Raise StoreUnusable."""
    with open_snapshot(path) as connection:
        return {} if connection is None else read_meta(connection, path)


def identity_of(meta: dict[str, int | str]) -> StoreIdentity:
    """Return the identity recorded in ``meta``."""
    batch = int(meta.get(ORIGINAL_BATCH, meta["last_batch"]))
    last = EpochRecord(int(meta["epoch"]), mark_of(str(meta["owner"])), batch)
    past = read_past(str(meta.get(PAST, "")))
    return StoreIdentity(last, str(meta["incarnation"]), past, str(meta.get(BRANCH, "")))


def copy_meta(identity: StoreIdentity) -> dict[str, int | str]:
    """Return the values of ``meta`` for the copy of a store of another kind with this identity."""
    last = identity.last
    return {
        "epoch": last.epoch, "owner": f"copy/{last.mark}", ORIGINAL_BATCH: last.batch,
        "incarnation": identity.incarnation, PAST: past_text(identity.past), BRANCH: COPY,
    }  # fmt: skip


def left_behind(path: str, incarnation: str) -> list[Evidence]:
    """Return the evidence that a missing or empty database existed: ``incarnation``, from its lock
    file, and other files next to it. A daemon killed during its first start leaves none."""
    facts = []
    if incarnation:
        facts.append(Evidence(f"{path}.lock (of incarnation {incarnation})"))
    if os.path.exists(f"{path}.reserve"):
        facts.append(Evidence(f"{path}.reserve"))
    with contextlib.suppress(OSError):
        # A file that is not empty may have the log of its own first transaction: no evidence.
        if os.path.getsize(f"{path}-wal") and not (os.path.exists(path) and os.path.getsize(path)):
            facts.append(Evidence(f"{path}-wal"))
    return facts


FILES_BESIDE = ("-wal", "-shm", ".lock", ".reserve")
"""Suffixes of the names of the files that belong to a database."""


def part_name(path: str, pid: int) -> str:
    """Return the name that a new database has while process ``pid`` creates it."""
    return f"{path}.part-{pid}"


def remove_database(path: str) -> None:
    """Remove a database that nobody has open, and the files that belong to it."""
    for suffix in ("", *FILES_BESIDE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


@contextlib.contextmanager
def whole_or_nothing(path: str) -> Iterator[str]:
    """Yield a temporary name for a new database, and give it the name ``path`` durably afterwards.
    Raise FileExistsError if ``path`` exists by then, StoreError if SQLite could not write back the
    log. An error leaves no files."""
    part = part_name(path, os.getpid())
    remove_database(part)  # a killed process can have had the same number, as in a container
    try:
        yield part
        if os.path.exists(f"{part}-wal"):
            raise StoreError(f"{path} could not be completed: its log was not written back")
        os.link(part, path)
        disk.sync(os.path.dirname(path) or ".")
    finally:
        remove_database(part)


def set_aside(path: str) -> None:
    """Remove the files that a missing store left next to ``path``. A new database must not use the
    old log, but the log is kept under another name, because it can contain tasks."""
    for suffix in ("-shm", ".reserve"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(f"{path}-wal"):
            os.replace(f"{path}-wal", f"{path}.lost-{secrets.token_hex(4)}-wal")


def begin_anew(path: str, busy_ms: int = 1_000) -> None:
    """Prepare ``path`` for a new store, on an operator's request. Raise StoreUnusable if the path
    has a store that was used."""
    lock = StoreLock(path)
    lock.acquire("init")
    try:
        if identify_file(path, busy_ms):
            if batches := meta_of(path)["last_batch"]:
                raise StoreUnusable(
                    f"{path} is a store with {batches} batches: `tickwheel init --branch` continues"
                    " with its data; to start with an empty store, move the file away"
                )
        else:
            set_aside(path)
            lock.note("")
    finally:
        lock.release()


def upgrade(path: str, *, dry_run: bool = False, busy_ms: int = 1_000) -> Upgrade:
    """Upgrade a store that no daemon has open to ``LAYOUT``; ``dry_run``: change nothing. Return
    what was, or would be, done. Raise StoreUnusable."""
    lock = StoreLock(path)
    try:
        layout = identify_file(path, busy_ms)
        steps = upgrade_steps(layout)
        if steps and not dry_run:
            lock.acquire("upgrade")
            with changing(path) as store:
                for statement in upgrade_steps(identify(store, path)):
                    store.execute(statement)
    except sqlite3.Error as error:
        raise StoreUnusable(f"cannot upgrade {path}: {describe(error)}") from error
    finally:
        lock.release()
    return Upgrade(path, layout, LAYOUT, tuple(f"{statement};" for statement in steps))


def begin_branch(path: str, busy_ms: int = 1_000) -> StoreIdentity:
    """On an operator's request, mark a store so that its next epoch begins a new branch. Return its
    identity. Raise StoreUnusable if there is no store."""
    lock = StoreLock(path)
    lock.acquire("init")
    try:
        if not identify_file(path, busy_ms):
            raise StoreUnusable(f"{path} is missing or empty: there is no store to continue with")
        identity = identity_of(meta_of(path))
        write_meta(path, {BRANCH: NEW})
    finally:
        lock.release()
    return identity


IDENTIFY_CACHE_BYTES = 1 << 16
MAGIC = b"SQLite format 3\0"


def identify_file(path: str, busy_ms: int) -> int:
    """Return the layout version of a file, or 0 for a new file. Leave other programs' files
    alone."""
    if not os.path.exists(path) or not os.path.getsize(path):
        return 0
    # If the creation of the file was interrupted, its journal must be rolled back.
    mode = "rw" if os.path.exists(path + "-journal") else "ro"
    if mode == "ro" and _read_magic(path) != MAGIC:
        raise StoreUnusable(f"{path} is not a SQLite database; use another path")
    connection = connect_reader(path, IDENTIFY_CACHE_BYTES, busy_ms, mode=mode)
    with contextlib.closing(connection):
        return identify(connection, path)


def _read_magic(path: str) -> bytes:
    # No connection may be open: closing this descriptor would end its locks.
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
    evidence: Sequence[Evidence] = (),
) -> Opened:
    """Begin an epoch durably; the caller sets ``has_room`` in the result. Raise StoreUnusable if
    the store lacks an epoch or batch in ``evidence``."""

    def begin() -> tuple[dict[str, int | str], Beginning, str]:
        return _begin_epoch(connection, path, layout, owner, now_ms, epoch_min, evidence)

    try:
        before, beginning, incarnation = begin()
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not is_full(error, path):
            raise
        room.release_reserve()
        before, beginning, incarnation = begin()
    if not layout:
        disk.sync(os.path.dirname(path) or ".")
    return Opened(
        epoch=beginning.epoch,
        last_batch=int(before["last_batch"]),
        id_mark=int(before["id_mark"]),
        position_ms=int(before["position_ms"]),
        clean=bool(before["clean"]),
        created=not layout,
        key_seed=bytes.fromhex(str(before[KEY_SEED])),
        since_epoch=int(before.get(SINCE_EPOCH, 0)),
        mark=mark_of(owner),
        incarnation=incarnation,
        after=beginning.after,
        is_branch=beginning.is_branch,
        is_behind=beginning.is_behind,
    )


def check_not_moved(meta: Mapping[str, int | str], path: str, instead: str) -> None:
    """Raise StoreUnusable for a database whose tasks were moved by a change of the number of
    shards. ``instead`` is advice in which ``{folder}`` stands for the folder with the tasks."""
    if MOVED_TO in meta:
        folder = meta[MOVED_TO]
        raise StoreUnusable(
            f"{path}: its tasks were moved to {folder} by `tickwheel reshard`;"
            f" {instead.format(folder=folder)}, or run reshard again if it was interrupted"
        )


def _begin_epoch(
    connection: sqlite3.Connection,
    path: str,
    layout: int,
    owner: str,
    now_ms: int,
    epoch_min: int,
    evidence: Sequence[Evidence],
) -> tuple[dict[str, int | str], Beginning, str]:
    connection.execute("BEGIN IMMEDIATE")
    for statement in upgrade_steps(layout):
        connection.execute(statement)
    if not layout:
        create(connection)
    meta = read_meta(connection, path)
    check_not_moved(meta, path, "serve that")
    beginning = next_epoch(path, identity_of(meta) if layout else None, evidence, epoch_min)
    incarnation = secrets.token_hex(16) if beginning.is_branch else str(meta["incarnation"])
    values: dict[str, int | str] = {
        "epoch": beginning.epoch,
        "incarnation": incarnation,
        PAST: past_text(beginning.past),
        "owner": owner,
        "clean": 0,
        "opened_ms": now_ms,
    }
    connection.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())
    connection.execute("DELETE FROM meta WHERE key IN (?, ?)", (BRANCH, ORIGINAL_BATCH))
    connection.execute("COMMIT")
    return meta, beginning, incarnation
