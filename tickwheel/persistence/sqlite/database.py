"""The database file: settings of the store, connections, the lock that keeps two daemons off one
database, room on the disk, the layout, and how a database is opened.

Every connection of the store is made here, so that settings that promise durability cannot
differ between them. Threads are the caller's business: a connection is used by one at a time.

The lock is ``flock`` on a file beside the database, held for as long as the store is open: it
belongs to the open file, so it ends with the process however that ends, and it also keeps out a
second store in the same process. The file stays behind; removing it would let two daemons lock two
files of one name. Its text is pid and owner, for people, and the incarnation of the store: so a
start notices that the database beside it is gone.

The database file itself is locked, too (``StoreLock``), because a hard link, or a file mounted into
two containers, is one database under two names. That descriptor lives as long as the lock: closing
any descriptor of a database ends the locks that SQLite holds on it in this process. A database
under two names is refused also while nobody else has it: the write-ahead log lies beside one of
the names, and is missed under the other.

The layout of the database: tables, the marks by which it is known as ours, its version; and how
a database is opened: look first, then lay out or upgrade, and begin an epoch durably.

Made to be read with the ``sqlite3`` shell. Must not know threads or batches.

Recipe for a new layout, once one was released: raise ``LAYOUT``, and add the statements that turn
the former layout into it to ``UPGRADES``. A golden dump of every layout stays in ``tests/golden``.

``Room`` is room on the disk: enqueues stop while there is enough left for acks, and go on later.

Three sources of room, in this order:

* Free space. An enqueue batch needs it twice, once for the log and once for the database.
* The reserve, a file of allocated blocks, given up when the disk is full all the same: writing
  the log back may make the database grow by nearly as much as the log holds.
* Free pages inside the database. A backlog that filled the disk and was worked off leaves the
  file as large as it was; new tasks fit into it (``inside``).

A disk that is used beyond ``disk_refuse`` counts as one without free space, though the reserve is
kept: others may need what is left.

Knows files and sizes, not SQL. Used by the writer's thread; ``has_room`` is read by others.
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
from tickwheel.persistence.contract import Known, Opened, StoreUnusable
from tickwheel.persistence.identity import (
    COPY,
    NEW,
    Began,
    Beginning,
    Held,
    mark_of,
    past_text,
    read_past,
)
from tickwheel.persistence.identity import begin as begin_as

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSE_MARGIN = 0.01
"""How far below ``disk_refuse`` the use of the disk must fall before enqueues begin again."""


class Disk(NamedTuple):
    """What is free on a disk, and how much of it is used."""

    free_bytes: int
    """The bytes that an ordinary user may still write."""
    used: float
    """The used share, from 0 to 1, of what ordinary users may have, as ``df`` shows it."""


class Room:
    """Decides what may be written to the disk of one database."""

    def __init__(
        self, path: str, reserve_bytes: int, log_bytes: int, disk_refuse: float = 1.0
    ) -> None:
        """``disk_refuse``: the used share that stops enqueues; 1: only what does not fit."""
        self._disk_refuse = disk_refuse
        self._reserve_path = path + ".reserve"
        self._reserve_bytes = reserve_bytes
        self._enough_bytes = log_bytes
        """Bytes that must be free beside the reserve before enqueues begin (again)."""
        self._low_bytes = log_bytes // 4
        """Enqueues stop before fewer bytes than this are left."""
        self.has_room = True
        self.inside = False
        """Whether room is in free pages of the database only; the log must not grow then either."""
        self.too_used = ""
        """Why there is no room on a disk that is not full: its use, and the limit; else empty."""

    @property
    def why_not(self) -> str:
        """Why enqueues are refused, for the error's message."""
        return self.too_used or "no room on the disk"

    def allows(self, task_bytes: int, free_page_bytes: int | None) -> bool:
        """Whether a batch with so many bytes of new tasks may be tried; remembers a no.

        ``free_page_bytes`` is needed while ``inside``.
        """
        if not self.has_room:
            return False
        if self.inside:
            free = free_page_bytes or 0
        else:
            found = measure(self._reserve_path)
            free = 0 if self._is_too_used(found) else found.free_bytes
        self.has_room = free >= 2 * task_bytes + self._low_bytes
        return self.has_room

    def _is_too_used(self, found: Disk) -> bool:
        limit = self._disk_refuse - (REFUSE_MARGIN if self.too_used else 0)
        is_too_used = self._disk_refuse < 1 and found.used > limit
        self.too_used = (
            f"its disk is {found.used:.1%} full; the limit is {self._disk_refuse:.1%} (disk_refuse)"
            if is_too_used
            else ""
        )
        return is_too_used

    def find(self, free_page_bytes: int) -> bool:
        """Look for room again; returns whether there is some."""
        reserved = self._take_reserve()
        if not self._is_too_used(measure(self._reserve_path)) and reserved:
            self.inside = False
            self.has_room = True
        else:
            self.inside = free_page_bytes >= 2 * self._low_bytes
            self.has_room = self.inside
        return self.has_room

    def give_up(self) -> None:
        """The disk is full: free the reserve's blocks. Enqueues have no room from here on."""
        self.has_room = self.inside = False
        with contextlib.suppress(OSError):
            os.unlink(self._reserve_path)

    def _take_reserve(self) -> bool:
        """Allocate the reserve if that leaves enough; one that is held is kept in any case."""
        try:
            fd = os.open(self._reserve_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        try:
            held = min(os.fstat(fd).st_blocks * 512, self._reserve_bytes)
            free = free_bytes(self._reserve_path) + held
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
    """The disk that holds ``path``; one that says nothing of itself counts as full."""
    try:
        use = disk.measure(os.path.dirname(path) or ".")
    except OSError:
        return Disk(0, 1.0)
    return Disk(use.free_bytes, use.share)


def free_bytes(path: str) -> int:
    """The bytes that an ordinary user may still write on the disk of ``path``; 0: unknown."""
    return measure(path).free_bytes


def disk_bytes(path: str) -> int:
    """The bytes of the disk that holds ``path``."""
    found = os.statvfs(os.path.dirname(path) or ".")
    return found.f_blocks * found.f_frsize


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """Options of the SQLite store; a URL may have them: ``sqlite:///x.db?wal_bytes=4194304``."""

    wal_bytes: int = 16 * MIB
    """The write-ahead log is written back into the database when it has grown to this."""
    reserve_bytes: int = 24 * MIB
    """Kept free for acks on a full disk. At least ``wal_bytes`` and some: writing the log back
    may make the database grow by nearly as much as the log holds. 0 keeps no reserve."""
    writer_cache_bytes: int = 4 * MIB
    reader_cache_bytes: int = 2 * MIB
    endings_max: int = 100_000
    """For how many finished tasks the ending is remembered."""
    busy_ms: int = 5_000
    """How long to wait for another process (a shell) that holds the write lock, in ms."""

    disk_refuse: float = 1.0
    """Enqueues are refused while more of the disk than this share is used. The daemon's setting;
    not part of a URL, so that tools which copy a store are not stopped by it."""

    def fitted(self, disk_bytes: int) -> SqliteOptions:
        """These options for a disk of that size: small volumes cannot spare what large ones can."""
        return replace(
            self,
            wal_bytes=min(self.wal_bytes, disk_bytes // 16),
            reserve_bytes=min(self.reserve_bytes, disk_bytes // 8),
        )


def options_from(url: str, settings: Sequence[tuple[str, int]]) -> SqliteOptions:
    """Options from a URL's query; raises StoreUnusable for one that does not exist."""
    known = {field.name for field in fields(SqliteOptions)} - {"disk_refuse"}
    for name, _ in settings:
        if name not in known:
            raise StoreUnusable(
                f"store {url!r}: unknown setting {name!r}; known are {', '.join(sorted(known))}"
            )
    return SqliteOptions(**dict(settings))


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
        self.store = ""
        """The incarnation of the store beside the lock; empty: there was none yet."""

    def acquire(self, owner: str) -> None:
        """Take the lock. Raises StoreUnusable naming the holder."""
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
        said = _text_of(fd).rpartition(_STORE)
        self.store = said[2].strip() if said[1] else ""
        self._holder = f"pid {os.getpid()} {owner}\n"
        self._write(self._holder)

    def note(self, store: str) -> None:
        """Remember the incarnation of the store, also when the lock is released; empty: none."""
        self.store = store
        self._write(self._holder)

    def release(self) -> None:
        if self._fd >= 0:
            self._write("")
            self.give_up()

    def give_up(self) -> None:
        """Close the descriptor and change nothing else."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        _HELD.discard(self)

    def _write(self, holder: str) -> None:
        data = f"{holder}{_STORE}{self.store}\n".encode() if self.store else holder.encode()
        try:
            # In this order: the block that a file has is there on a full disk, too.
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        except OSError:
            # The lock itself counts all the same.
            return


_STORE = "store "
"""Begins the line of a lock's text that has the incarnation."""


def _text_of(fd: int) -> str:
    return os.pread(fd, 400, 0).decode(errors="replace")


def _in_use(path: str, holder: str, lock: str) -> StoreUnusable:
    who = holder or "another process"
    return StoreUnusable(f"{path} is in use by {who} (lock {lock}); stop that one first")


_HELD: set[FileLock | StoreLock] = set()
"""The locks of this process. A child by ``fork`` has copies of their descriptors, which would hold
the locks when the parent has ended; closing a copy leaves the parent's lock as it is."""


def _after_fork() -> None:
    for lock in list(_HELD):
        lock.give_up()


os.register_at_fork(after_in_child=_after_fork)


class StoreLock:
    """The lock of a database: on the file beside it, and on the file itself."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._beside = FileLock(path + ".lock")
        self._fd = -1
        self._file: tuple[int, int] | None = None

    @property
    def store(self) -> str:
        """The incarnation of the store that was here when the lock was used last; empty: none."""
        return self._beside.store

    def note(self, incarnation: str) -> None:
        """Remember which store is here; empty: none."""
        self._beside.note(incarnation)

    def acquire(self, owner: str) -> None:
        """Take the lock; a database that is not there yet is locked by ``lock_file``. Raises
        StoreUnusable for one that is in use, or has another name."""
        self._beside.acquire(owner)
        try:
            if os.path.exists(self._path):
                self.lock_file()
        except BaseException:
            self.release()
            raise

    def lock_file(self) -> None:
        """Lock the database file, made if need be. Raises StoreUnusable."""
        if self._fd >= 0:
            return
        try:
            check_names(self._path)
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(self._path)
                # Before a descriptor is opened, whose end would end SQLite's locks in this process.
                if (found.st_dev, found.st_ino) in _FILES:
                    raise _in_use(self._path, "this process under another name", self._path)
            fd = os.open(self._path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnusable(f"cannot open {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            who = "another process under another name"
            raise _in_use(self._path, who, self._path) from error
        found = os.fstat(fd)
        self._fd, self._file = fd, (found.st_dev, found.st_ino)
        for end in ("", *FILES_BESIDE):
            disk.tighten(self._path + end)
        _FILES.add(self._file)
        _HELD.add(self)

    def release(self) -> None:
        """Release the lock, after every connection to the database was closed."""
        self.give_up()
        self._beside.release()

    def give_up(self) -> None:
        """Close the descriptor of the database."""
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
    """Raises StoreUnusable when the database file has another name: the log is beside one of
    them."""
    with contextlib.suppress(FileNotFoundError):
        names = os.stat(path).st_nlink
        if names > 1:
            raise StoreUnusable(
                f"{path} has {names} names (hard links), and its write-ahead log lies beside one of"
                f" them: remove the other ones (find DIR -samefile {path}), or copy it with"
                " `tickwheel backup`"
            )
    if _is_mounted(path):
        raise StoreUnusable(
            f"{path} is a mount point of its own, and its write-ahead log would lie outside of it:"
            " mount the folder that it is in"
        )


def _is_mounted(path: str) -> bool:
    """Whether exactly this file was mounted; False where the system does not say."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            points = {line.split(" ", 5)[4] for line in file if line.count(" ") > 4}
    except OSError:
        return False
    # What mountinfo escapes: space, tab, line feed, backslash.
    for character in "\\ \t\n":
        path = path.replace(character, f"\\{ord(character):03o}")
    return path in points


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

GIVEN_UP_FOR = "given_up_for"
"""The name, in table ``meta``, of where the records were taken to when the number of shards was
changed. A store that has it is not opened any more."""
PAST = "past"
"""The name of the epochs before the newest one: see ``identity.py``."""
BRANCH = "branch"
"""The name of why the next epoch begins a new branch of the store."""
CAME_TO = "came_to"
"""The name of the batch that a copy of another kind of store has come to; its own count from 1."""
SINCE_EPOCH = "since_epoch"
"""The name of the first epoch of a store whose tasks were taken over from stores of other shards:
events of earlier epochs in the history are about tasks that may be elsewhere."""


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


@contextlib.contextmanager
def changing(path: str) -> Iterator[sqlite3.Connection]:
    """Change a store that nobody has open, in one transaction that is durable on return."""
    with contextlib.closing(_connect(path, "rw", IDENTIFY_CACHE_BYTES, busy_ms=1_000)) as store:
        store.execute("PRAGMA synchronous = FULL")
        store.execute("BEGIN IMMEDIATE")
        yield store
        store.execute("COMMIT")


def write_meta(path: str, values: Mapping[str, int | str]) -> None:
    """Add values to the meta table of a store that nobody has open, durably on return."""
    with changing(path) as store:
        store.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def make_another(path: str, dropped_kinds: Sequence[int]) -> None:
    """Turn a copy of a store that nobody has open into a store of its own, durably on return: with
    an epoch and an incarnation that are not the former's, every delivery given back, and without
    records of these kinds and endings."""
    with changing(path) as copy:
        copy.execute(
            "UPDATE prepare SET state = ? WHERE state = ?",
            (ProgressState.RELEASED, ProgressState.IN_FLIGHT),
        )
        copy.executemany("DELETE FROM record WHERE kind = ?", [(one,) for one in dropped_kinds])
        copy.execute("DELETE FROM ending")
        copy.execute("DELETE FROM meta WHERE key IN (?, ?, ?)", (BRANCH, PAST, CAME_TO))
        values = {"epoch": 0, "owner": "", "incarnation": secrets.token_hex(16)}
        copy.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())


def forget_endings(path: str, batch: int) -> None:
    """Forget the endings of batches up to this one, in a store that nobody has open."""
    with changing(path) as store:
        store.execute("DELETE FROM ending WHERE batch <= ?", (batch,))


@contextlib.contextmanager
def looking(path: str, cache_bytes: int | None = None) -> Iterator[sqlite3.Connection | None]:
    """One moment of a store, which is not changed; None: the file is empty. Raises
    StoreUnusable."""
    try:
        connection = connect_reader(path, cache_bytes or IDENTIFY_CACHE_BYTES, 1_000, mode="ro")
        with contextlib.closing(connection), snapshot(connection):
            yield connection if identify(connection, path) else None
    except sqlite3.Error as error:
        raise StoreUnusable(f"cannot read {path}: {describe(error)}") from error


def meta_of(path: str) -> dict[str, int | str]:
    """The meta table of a store; empty: the file is, too. Raises StoreUnusable."""
    with looking(path) as connection:
        return {} if connection is None else read_meta(connection, path)


def held_by(meta: dict[str, int | str]) -> Held:
    """What the store says of itself."""
    batch = int(meta.get(CAME_TO, meta["last_batch"]))
    last = Began(int(meta["epoch"]), mark_of(str(meta["owner"])), batch)
    past = read_past(str(meta.get(PAST, "")))
    return Held(last, str(meta["incarnation"]), past, str(meta.get(BRANCH, "")))


def copy_meta(held: Held) -> dict[str, int | str]:
    """The values for the meta table of a copy of another kind of store that says this of itself."""
    last = held.last
    return {
        "epoch": last.epoch, "owner": f"copy/{last.mark}", CAME_TO: last.batch,
        "incarnation": held.incarnation, PAST: past_text(held.past), BRANCH: COPY,
    }  # fmt: skip


def left_behind(path: str, incarnation: str) -> list[Known]:
    """The files beside a database that is missing or empty, which say that there was a store.
    ``incarnation``: what its lock says. A daemon that was killed in its first start leaves none of
    this."""
    found = []
    if incarnation:
        found.append(Known(f"{path}.lock (of incarnation {incarnation})"))
    if os.path.exists(f"{path}.reserve"):
        found.append(Known(f"{path}.reserve beside it"))
    with contextlib.suppress(OSError):
        # An empty database in a file that is not empty may have a log of its first transaction.
        if os.path.getsize(f"{path}-wal") and not (os.path.exists(path) and os.path.getsize(path)):
            found.append(Known(f"{path}-wal beside it"))
    return found


FILES_BESIDE = ("-wal", "-shm", ".lock", ".reserve")
"""Ends of the names of a database's other files."""


def part_name(path: str, pid: int) -> str:
    """The name of a database while process ``pid`` makes it."""
    return f"{path}.part-{pid}"


def remove_database(path: str) -> None:
    """Remove a database that nobody has open, and the files beside it."""
    for end in ("", *FILES_BESIDE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{end}")


@contextlib.contextmanager
def whole_or_nothing(path: str) -> Iterator[str]:
    """The name under which to make a database that has the name ``path`` when it is whole, durably
    on return. Raises FileExistsError when there is a file of that name by then; an error leaves
    nothing behind."""
    part = part_name(path, os.getpid())
    try:
        yield part
        os.link(part, path)
        disk.sync(os.path.dirname(path) or ".")
    finally:
        remove_database(part)


def set_aside(path: str) -> None:
    """Take away what a store that is gone has left beside ``path``: a database that comes there
    must not be given its log. The log is kept under another name, as it may hold tasks."""
    for end in ("-shm", ".reserve"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{end}")
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(f"{path}-wal"):
            os.replace(f"{path}-wal", f"{path}.lost-{secrets.token_hex(4)}-wal")


def begin_anew(path: str, busy_ms: int = 1_000) -> None:
    """Make room for a new store at ``path``, on an operator's word. Raises StoreUnusable when one
    is there that was used."""
    lock = StoreLock(path)
    lock.acquire("init")
    try:
        if identify_file(path, busy_ms):
            if batches := meta_of(path)["last_batch"]:
                raise StoreUnusable(
                    f"{path} holds a store, of {batches} batches: `tickwheel init --branch` goes on"
                    " with what it has; to begin without it, move the file away"
                )
        else:
            set_aside(path)
            lock.note("")
    finally:
        lock.release()


def begin_branch(path: str, busy_ms: int = 1_000) -> Held:
    """Let the next epoch of a store begin a new branch, on an operator's word; what the store said
    of itself. Raises StoreUnusable when there is none."""
    lock = StoreLock(path)
    lock.acquire("init")
    try:
        if not identify_file(path, busy_ms):
            raise StoreUnusable(f"{path} is empty: there is no store to go on with")
        held = held_by(meta_of(path))
        write_meta(path, {BRANCH: NEW})
    finally:
        lock.release()
    return held


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
    known: Sequence[Known] = (),
) -> Opened:
    """Begin an epoch, durable on return; returns what ``meta`` said before. The caller adds what is
    known of room. Raises StoreUnusable when the store lacks what is ``known``."""

    def begin() -> tuple[dict[str, int | str], Beginning, str]:
        return _begin_epoch(connection, path, layout, owner, now_ms, epoch_min, known)

    try:
        before, beginning, incarnation = begin()
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if not is_full(error, path):
            raise
        room.give_up()
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


def check_not_given_up(meta: Mapping[str, int | str], path: str, instead: str) -> None:
    """Raises StoreUnusable for a database that counts no more; ``instead``: what to do instead,
    where ``{folder}`` stands for the folder of those that count."""
    if GIVEN_UP_FOR in meta:
        folder = meta[GIVEN_UP_FOR]
        raise StoreUnusable(
            f"{path}: its tasks were taken to {folder} by `tickwheel reshard`;"
            f" {instead.format(folder=folder)}, or run reshard again if it was cut off"
        )


def _begin_epoch(
    connection: sqlite3.Connection,
    path: str,
    layout: int,
    owner: str,
    now_ms: int,
    epoch_min: int,
    known: Sequence[Known],
) -> tuple[dict[str, int | str], Beginning, str]:
    connection.execute("BEGIN IMMEDIATE")
    if layout:
        upgrade(connection, layout)
    else:
        create(connection)
    before = read_meta(connection, path)
    check_not_given_up(before, path, "serve that")
    beginning = begin_as(path, held_by(before) if layout else None, known, epoch_min)
    incarnation = secrets.token_hex(16) if beginning.is_branch else str(before["incarnation"])
    values: dict[str, int | str] = {
        "epoch": beginning.epoch,
        "incarnation": incarnation,
        PAST: past_text(beginning.past),
        "owner": owner,
        "clean": 0,
        "opened_ms": now_ms,
    }
    connection.executemany("REPLACE INTO meta VALUES (?, ?)", values.items())
    connection.execute("DELETE FROM meta WHERE key IN (?, ?)", (BRANCH, CAME_TO))
    connection.execute("COMMIT")
    return before, beginning, incarnation
