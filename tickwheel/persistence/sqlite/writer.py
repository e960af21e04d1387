"""The only connection that writes: opening, batches, and what their errors mean; and the
write-ahead log, written back in time between batches.

Plain synchronous code; every method is called on the writer's thread. The order of a batch's
statements does not matter, because no key is in two maps. Invariants:

* A batch is one transaction, which checks epoch, owner and number itself; what is cached
  beside the database (``_endings_upto``, ``_packs``, ``_logged``, the two flags) changes after
  COMMIT only.
* After an error that is not a lack of room or another's lock, nothing is written any more.

``Log`` bounds the log under constant load: when more than ``limit_bytes`` of it are in use,
everything is written back (a checkpoint) and the log starts over in place. How much is in use
cannot be asked of SQLite through Python, and the file keeps its size when the log starts over; so
the salts are compared, which https://sqlite.org/walformat.html specifies: frames of the current
round carry the salts of the log's header. Opening the log file is harmless, other than the database
file or the shared memory file, whose locks belong to the process and end when any descriptor is
closed. A full disk (``database.Room``) and a busy log are answers there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from array import array
from typing import TYPE_CHECKING

from tickwheel import failpoints
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.records import ID_STEP, NO_BODY
from tickwheel.persistence.codec import encode_endings
from tickwheel.persistence.contract import (
    CommitRefused,
    Fenced,
    Opened,
    StoreBroken,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.identity import begin
from tickwheel.persistence.sqlite import rows as sql
from tickwheel.persistence.sqlite.database import (
    Room,
    StoreLock,
    begin_epoch,
    blob_join,
    blob_of,
    connect_writer,
    describe,
    disk_bytes,
    error_name,
    identify_file,
    is_busy,
    is_full,
    left_behind,
    make_durable,
    read_meta,
)
from tickwheel.persistence.sqlite.packs import Change, Pack, PackIndex, PackValues, pack_bytes
from tickwheel.persistence.sqlite.rows import (
    ROWS_MAX,
    STATEMENT_BYTES_MAX,
    dead_values,
    progress_values,
    task_rows_max,
    task_values,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tickwheel.model.kinds import Effects
    from tickwheel.model.records import Outcome, TaskRow
    from tickwheel.persistence.contract import Known
    from tickwheel.persistence.sqlite.database import SqliteOptions


def write(connection: sqlite3.Connection, effects: Effects, updated: dict[int, TaskRow]) -> None:
    """Write all of a batch except new tasks, ``moved`` and ``ended``."""
    if updated:
        tasks = updated.values()
        sql.REPLACE_TASKS.run(connection, task_values(tasks), task_rows_max(tasks))
    if effects.progress:
        progress = [row for row in effects.progress.values() if row is not None]
        sql.REPLACE_PREPARE.run(connection, progress_values(progress))
        if len(progress) < len(effects.progress):
            drops = [key for key, row in effects.progress.items() if row is None]
            sql.DELETE_PREPARE.run(connection, drops)
    if effects.dead:
        dead = [row for row in effects.dead.values() if row is not None]
        sql.REPLACE_DEAD.run(connection, dead_values(dead))
        drops = [key for key, row in effects.dead.items() if row is None]
        sql.DELETE_DEAD.run(connection, drops)
    if effects.records:
        written = sql.record_values(effects.records)
        if written:
            sql.REPLACE_RECORDS.run(connection, written, sql.record_rows_max(written))
        if len(written) < len(effects.records):
            for number, keys_of_it in sql.dropped_keys(effects.records).items():
                connection.execute(sql.DELETE_RECORDS, (number, json.dumps(keys_of_it)))


def enqueue(
    connection: sqlite3.Connection, packs: Sequence[PackValues], loose: Collection[TaskRow]
) -> None:
    """Write new tasks, as ``packs.split`` has divided them."""
    if packs:
        size = max(map(pack_bytes, packs))
        rows_max = max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX // size))
        sql.INSERT_PACKS.run(connection, packs, rows_max)
    if loose:
        sql.INSERT_TASKS.run(connection, task_values(loose), task_rows_max(loose))


def leave_packs(connection: sqlite3.Connection, change: Change) -> None:
    """Let tasks leave their packs: they ended, or have a row of their own from now on."""
    if change.masks:
        sql.REPLACE_GONE.run(connection, change.masks.items())
    if change.done:
        drop_packs(connection, change.done)


def drop_packs(connection: sqlite3.Connection, firsts: list[int]) -> None:
    connection.execute(sql.DELETE_PACK_KEYS, (str(firsts),))
    connection.execute(sql.DELETE_PACKS, (str(firsts),))
    connection.execute(sql.DELETE_GONE, (str(firsts),))
    connection.execute(sql.DELETE_MOVED, (str(firsts),))


def move(connection: sqlite3.Connection, n: int, moved: dict[int, int], packs: PackIndex) -> int:
    """Write new due times; returns how many of them went to the end of table ``move``."""
    loose = packs.loose(moved)
    if loose:
        connection.execute(sql.MOVE_ROWS, (json.dumps([(i, moved[i]) for i in loose]),))
        moved = moved.copy()
        for task_id in loose:
            del moved[task_id]
    if moved:
        connection.execute(sql.INSERT_MOVES, (n, sql.move_values(moved)))
    return len(moved)


def merge_moves(connection: sqlite3.Connection, packs: PackIndex) -> None:
    """Write the due times of table ``move`` beside the packs of their tasks. Of a task that has
    left its pack meanwhile nothing is written."""
    moved = sql.read_moves(connection)
    connection.execute(sql.DELETE_MOVES)
    statement = sql.READ_DUES.format(join=blob_join(connection).format("now"))
    ids = sorted(moved)
    for start in range(0, len(ids), MOVES_AT_ONCE):
        packed, _ = packs.places(ids[start : start + MOVES_AT_ONCE])
        places, joined = connection.execute(statement, (str(list(packed)),)).fetchone()
        all_dues_ms, at = array("q", blob_of(joined)), 0
        values: list[tuple[int, bytes]] = []
        for first, count in json.loads(places):
            for task_id in packed[first]:
                all_dues_ms[at + (task_id - first) // ID_STEP] = moved[task_id]
            values.append((first, all_dues_ms[at : at + count].tobytes()))
            at += count
        sql.REPLACE_MOVED.run(connection, values)


def with_bodies(
    connection: sqlite3.Connection, updated: dict[int, TaskRow], packs: PackIndex
) -> dict[int, TaskRow]:
    """``updated`` with stored bodies in place of ``NO_BODY``."""
    ids = [task_id for task_id, row in updated.items() if row.body is NO_BODY]
    if not ids:
        return updated
    packed, _ = packs.places(ids)
    bodies: dict[int, bytes] = dict(connection.execute(sql.READ_BODIES, (str(ids),)).fetchall())
    for values in connection.execute(sql.READ_PACKS, (str(list(packed)),)).fetchall():
        bodies |= {row.id: row.body for row in Pack(*values).rows(packed[values[0]])}
    # One that is not stored any more must not become a task with an empty body.
    return updated | {i: updated[i]._replace(body=bodies[i]) for i in ids}


def take_apart(connection: sqlite3.Connection, firsts: list[int], key_hash: KeyHash) -> bool:
    """Give the tasks left in these packs rows of their own; whether some have a key."""
    rows: list[TaskRow] = []
    for values in connection.execute(sql.READ_PACKS, (str(firsts),)).fetchall():
        rows += Pack(*values).rows()
    drop_packs(connection, firsts)
    sql.INSERT_TASKS.run(connection, task_values(rows), task_rows_max(rows))
    return sql.write_loose_keys(connection, key_hash, rows)


def end(
    connection: sqlite3.Connection,
    n: int,
    effects: Effects,
    *,
    loose: list[int],
    has_progress: bool,
    has_dead: bool,
    has_keys: bool,
    upto: int,
    endings_max: int,
) -> None:
    """Drop all rows of the ended tasks and remember how they ended, within the bound.

    ``loose``: those that have a row of their own. ``upto`` is the number of endings written
    before; the flags say which tables have rows.
    """
    ids = str(list(effects.ended))
    if loose:
        connection.execute(sql.DELETE_TASKS_BY_ID, (str(loose),))
        if has_keys:
            connection.execute(sql.DELETE_TASK_KEYS, (str(loose),))
    if has_progress:
        connection.execute(sql.DELETE_PREPARE_BY_ID, (ids,))
    if has_dead:
        connection.execute(sql.DELETE_DEAD_BY_ID, (ids,))
    upto += len(effects.ended)
    connection.execute(sql.INSERT_ENDING, (n, upto, encode_endings(effects.ended)))
    if upto > endings_max:
        connection.execute(sql.TRIM_ENDINGS, (upto - endings_max,))


MOVES_MAX = 32_768
"""How many new due times are kept in the order of their batches, before they are written beside
their packs together: a page holds eight packs' due times. Every reader remembers them."""
MOVES_AT_ONCE = 1_000
"""How many due times are written beside packs at once: half a kilobyte a pack."""

log = logging.getLogger(__name__)

NO_CHANGE = Change()
NO_ENDS = (None,) * 7

LOOK_EVERY_BATCHES = 64
"""How often to look whether PrepareQueue, dead letters and keys of rows on their own are empty, to
skip their deletes."""


class Writer:
    """The writing connection of one database, open or not."""

    def __init__(self, path: str, options: SqliteOptions) -> None:
        self._path = path
        self._wanted = options
        self._lock = StoreLock(path)
        self._room = Room(path, 0, 0)
        self._connection: sqlite3.Connection | None = None
        self._upkeep: Upkeep | None = None
        self._broken = ""
        self._endings_upto = 0
        self._has_progress = True
        self._has_dead = True
        self._has_keys = True
        """Whether rows on their own have keys."""
        self._key_hash = KeyHash(b"")
        self._batches = 0
        self._logged = 0
        """How many due times are in table ``move``."""
        self._packs = PackIndex()

    @property
    def has_room(self) -> bool:
        return self._room.has_room

    # --- opening and closing -----------------------------------------------------------------

    def open(
        self, owner: str, now_ms: int, epoch_min: int = 1, known: Sequence[Known] = ()
    ) -> Opened:
        """Open the database. Raises StoreUnusable; lock and connection are then released."""
        self._lock.acquire(owner)
        try:
            return self._open(owner, now_ms, epoch_min, known)
        except BaseException as error:
            self._release()
            if isinstance(error, sqlite3.Error | OSError):
                raise StoreUnusable(f"cannot open {self._path}: {describe(error)}") from error
            raise

    def _open(self, owner: str, now_ms: int, epoch_min: int, known: Sequence[Known]) -> Opened:
        layout = identify_file(self._path, self._wanted.busy_ms)
        if not layout:
            # Before anything is made: SQLite would remove a log that lies beside an empty file.
            known = (*known, *left_behind(self._path, self._lock.store))
            begin(self._path, None, known)
        self._lock.lock_file()
        options = self._wanted.fitted(disk_bytes(self._path))
        # The log may exceed its limit by a batch without being cut.
        log_bytes_max = options.wal_bytes + options.wal_bytes // 4
        connection = self._connection = connect_writer(
            self._path, options.writer_cache_bytes, options.busy_ms, log_bytes_max
        )
        make_durable(connection)
        room = Room(self._path, options.reserve_bytes, options.wal_bytes, options.disk_refuse)
        self._room = room
        opened = begin_epoch(connection, self._path, layout, owner, now_ms, room, epoch_min, known)
        self._lock.note(opened.incarnation)
        self._key_hash = KeyHash(opened.key_seed)
        (upto,) = connection.execute("SELECT max(upto) FROM ending").fetchone()
        self._endings_upto = upto or 0
        self._look(connection)
        for statement in sql.MAKE_SMALL:
            connection.execute(statement)
        self._packs.load(connection.execute(sql.PACK_INDEX))
        (self._logged,) = connection.execute(sql.COUNT_MOVES).fetchone()
        self._broken = ""
        self._upkeep = Upkeep(connection, self._path, options, room)
        self._upkeep.start()
        opened.has_room, opened.no_room = room.has_room, room.why_not
        return opened

    def close(self, clean: bool) -> None:
        """Close the database, if it is open, after every reader was closed."""
        if self._connection is None or self._upkeep is None:
            return
        try:
            if not self._broken:
                if clean:
                    self._connection.execute("UPDATE meta SET value = 1 WHERE key = 'clean'")
                self._upkeep.finish()
        except (sqlite3.Error, OSError) as error:
            # All batches are in the log; the next open finds them there, not closed cleanly.
            log.warning("store %s: not closed cleanly: %s", self._path, describe(error))
        finally:
            self._release()

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error as error:
                log.warning("store %s: closing failed: %s", self._path, describe(error))
        if self._upkeep is not None:
            self._upkeep.close()
            self._upkeep = None
        self._lock.release()

    # --- batches -----------------------------------------------------------------------------

    def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``."""
        connection, upkeep = self._usable()
        makes_tasks = effects.makes_tasks
        try:
            if makes_tasks and not upkeep.allows(sql.enqueued_bytes(effects)):
                if not self._is_next(connection, epoch, owner, n):
                    return False
                raise self._full(n)
            applied = self._apply(connection, epoch, owner, n, effects)
        except sqlite3.Error as error:
            self._raise_unless_full(connection, error, n)
            self._make_room(connection, upkeep)
            if makes_tasks:
                raise self._full(n) from error
            applied = self._again(connection, epoch, owner, n, effects)
        if applied:
            try:
                upkeep.after_batch()
            except (sqlite3.Error, OSError) as error:
                # This batch is durable; the error shows from the next one on.
                self._break(connection, error)
        return applied

    def _again(
        self, connection: sqlite3.Connection, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool:
        """Write a batch without new tasks, after the reserve was given up for it."""
        try:
            return self._apply(connection, epoch, owner, n, effects)
        except sqlite3.Error as error:
            self._raise_unless_full(connection, error, n)
            raise self._full(n) from error

    def _apply(
        self, connection: sqlite3.Connection, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool:
        applied = self._small_transaction(connection, epoch, owner, n, effects)
        if applied is None:
            applied = self._transaction(connection, epoch, owner, n, effects)
        return applied

    def _small_transaction(
        self, connection: sqlite3.Connection, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool | None:
        """Write a small batch as one statement, which costs two thirds of five. None: it is not
        small, and nothing was written."""
        try:
            values = sql.small_values(effects, self._key_hash)
            enqueued, ended = effects.enqueued, effects.ended
            if values is None or self._packs.looks_next or self._packs.places(enqueued)[0]:
                return None
            ends = self._ends(connection, ended) if ended else NO_ENDS
            if ends is None:
                return None
            marks = (sql.expected_meta(epoch, owner, n), n, effects.id_mark, effects.position_ms)
            connection.execute(sql.WRITE_SMALL, (*marks, *values, *ends))
        except sqlite3.IntegrityError as error:
            if error_name(error) != sql.NOT_NEXT:
                raise
            if self._is_next(connection, epoch, owner, n):
                raise StoreError("meta says that the batch is next, and did not advance") from error
            return False
        except (sqlite3.Error, Fenced, CommitRefused):
            raise
        except Exception as error:
            # Values that SQLite cannot take: a bug of the caller.
            raise self._break(connection, error) from error
        self._packs.sparse_now(NO_CHANGE)
        self._endings_upto += len(ended)
        self._has_keys |= values[sql.HASH_AT] is not None
        return True

    def _ends(
        self, connection: sqlite3.Connection, ended: dict[int, Outcome]
    ) -> tuple[object, ...] | None:
        """The columns of ``sql.WRITE_SMALL`` for tasks that have ended; None: packs change."""
        change = self._packs.leaving(ended)
        if change.masks or change.done:
            return None
        self._look_sometimes(connection)
        ids, upto = str(list(ended)), self._endings_upto + len(ended)
        trim_upto = upto - self._wanted.endings_max
        return (
            ids,
            ids if self._has_keys else None,
            ids if self._has_progress else None,
            ids if self._has_dead else None,
            upto,
            encode_endings(ended),
            trim_upto if trim_upto > 0 else None,
        )

    def _transaction(
        self, connection: sqlite3.Connection, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool:
        connection.execute("BEGIN IMMEDIATE")
        try:
            expected = sql.expected_meta(epoch, owner, n)
            marks = (n, effects.id_mark, effects.position_ms, expected)
            if connection.execute(sql.ADVANCE, marks).rowcount != sql.ADVANCED_ROWS:
                connection.execute("ROLLBACK")
                if self._is_next(connection, epoch, owner, n):
                    raise StoreError("meta says that the batch is next, and did not advance")
                return False
            packs, loose = self._packs.split(effects.enqueued)
            change = Change()
            updated = effects.updated
            if updated:
                updated = with_bodies(connection, updated, self._packs)
                if self._has_keys:
                    connection.execute(sql.DELETE_TASK_KEYS, (str(list(updated)),))
            if effects.ended or effects.updated:
                change = self._packs.leaving((*effects.ended, *effects.updated))
                leave_packs(connection, change)
            if effects.ended:
                self._look_sometimes(connection)
                end(
                    connection,
                    n,
                    effects,
                    loose=change.loose,
                    has_progress=self._has_progress,
                    has_dead=self._has_dead,
                    has_keys=self._has_keys,
                    upto=self._endings_upto,
                    endings_max=self._wanted.endings_max,
                )
            enqueue(connection, packs, loose)
            write(connection, effects, updated)
            has_keys = sql.write_keys(
                connection,
                self._key_hash,
                packs,
                [*loose, *updated.values()],
                effects.enqueued,
                effects.hashes,
            )
            logged = self._logged
            if effects.moved:
                logged += move(connection, n, effects.moved, self._packs)
            sparse = self._packs.sparse_now(change)
            if logged and (sparse or (effects.moved and logged > MOVES_MAX)):
                merge_moves(connection, self._packs)
                logged = 0
            if sparse:
                has_keys |= take_apart(connection, sparse, self._key_hash)
            connection.execute("COMMIT")
        except (sqlite3.Error, Fenced, CommitRefused):
            raise
        except Exception as error:
            # Values that SQLite cannot take: a bug of the caller, and never half a batch.
            raise self._break(connection, error) from error
        self._packs.adopt(packs, change)
        self._packs.drop(sparse)
        self._logged = logged
        self._endings_upto += len(effects.ended)
        self._has_progress |= bool(effects.progress)
        self._has_dead |= bool(effects.dead)
        self._has_keys |= has_keys
        return True

    def _is_next(self, connection: sqlite3.Connection, epoch: int, owner: str, n: int) -> bool:
        """Whether batch ``n`` is the next to be applied; False: it has been applied."""
        meta = read_meta(connection, self._path)
        if (epoch, owner) != (meta["epoch"], meta["owner"]):
            raise Fenced(
                f"epoch {epoch} of {owner!r} is over:"
                f" epoch {meta['epoch']} of {meta['owner']!r} began"
            )
        last = int(meta["last_batch"])
        if n > last + 1:
            raise CommitRefused(f"batch {n} does not follow batch {last}")
        return n == last + 1

    def _look_sometimes(self, connection: sqlite3.Connection) -> None:
        self._batches += 1
        if self._batches % LOOK_EVERY_BATCHES == 0 and (
            self._has_progress or self._has_dead or self._has_keys
        ):
            self._look(connection)

    def _look(self, connection: sqlite3.Connection) -> None:
        """Learn whether any progress, dead letters or keys of rows on their own exist."""
        found = connection.execute(
            "SELECT EXISTS(SELECT 1 FROM prepare), EXISTS(SELECT 1 FROM dead),"
            " EXISTS(SELECT 1 FROM task_key)"
        ).fetchone()
        self._has_progress, self._has_dead, self._has_keys = map(bool, found)

    def probe_room(self) -> bool:
        """See ``Store.probe_room``."""
        connection, upkeep = self._usable()
        try:
            return upkeep.probe_room()
        except (sqlite3.Error, OSError) as error:
            raise self._break(connection, error) from error

    # --- what can go wrong -------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises StoreBroken after an error that retrying cannot mend."""
        if self._broken:
            raise StoreBroken(self._broken)

    def _usable(self) -> tuple[sqlite3.Connection, Upkeep]:
        self.check_usable()
        if self._connection is None or self._upkeep is None:
            raise StoreBroken("the store is not open")
        return self._connection, self._upkeep

    def _raise_unless_full(
        self, connection: sqlite3.Connection, error: sqlite3.Error, n: int
    ) -> None:
        """Roll back; return only when the disk was full and nothing of the batch landed."""
        self._rollback(connection)
        self.check_usable()
        if is_busy(error):
            raise CommitRefused(
                f"batch {n}: another process holds the write lock of {self._path}"
            ) from error
        if not is_full(error, self._path):
            raise self._break(connection, error) from error

    def _make_room(self, connection: sqlite3.Connection, upkeep: Upkeep) -> None:
        try:
            upkeep.without_room()
        except (sqlite3.Error, OSError) as error:
            raise self._break(connection, error) from error

    def _full(self, n: int) -> CommitRefused:
        return CommitRefused(f"batch {n}: {self._path}: {self._room.why_not}", full=True)

    def _break(self, connection: sqlite3.Connection, error: BaseException) -> StoreBroken:
        """Refuse all calls from now on: after a failed sync a second one proves nothing."""
        self._broken = f"store {self._path} failed: {describe(error)}; restart to recover"
        log.error("%s", self._broken)
        self._rollback(connection)
        return StoreBroken(self._broken)

    def _rollback(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._broken = self._broken or f"store {self._path} failed: {describe(error)}"
            log.error("store %s: rolling back failed: %s", self._path, describe(error))


# --- the log -------------------------------------------------------------------------------------

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
AHEAD_BYTES = 256 << 10
"""How far ahead of the log its room is written: about twenty batches of one task."""
RESTART_WAIT_MS = 50
"""How long a checkpoint waits for readers of the log, in ms; short reads take far less."""


class Log:
    """The log beside one database. Used by the writer's thread only."""

    def __init__(self, path: str, page_bytes: int, limit_bytes: int, busy_ms: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size_bytes = os.fstat(self._fd).st_size
        self._frame_bytes = FRAME_HEADER_BYTES + page_bytes
        self._busy_ms = busy_ms
        self.set_limit(limit_bytes)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def set_limit(self, limit_bytes: int) -> None:
        self._limit_frames = self._next_frames = max(1, limit_bytes // self._frame_bytes)

    def is_over_limit(self) -> bool:
        """Whether the frame at the limit belongs to the current round."""
        offset = HEADER_BYTES + (self._next_frames - 1) * self._frame_bytes
        if offset + FRAME_HEADER_BYTES > self._size_bytes:
            self._look_at_size()
            if offset + FRAME_HEADER_BYTES > self._size_bytes:
                return False
        frame = os.pread(self._fd, FRAME_HEADER_BYTES, offset)
        if len(frame) < FRAME_HEADER_BYTES:
            self._look_at_size()
            return False
        return frame[8:16] == os.pread(self._fd, HEADER_BYTES, 0)[16:24]

    def _look_at_size(self) -> None:
        """Learn how large the file is. While it grows in small steps, zeros are written behind it:
        a sync of what is written over costs less than one of a file that has become longer, and
        SQLite ends the log where zeros begin, as it does at frames of a former round."""
        size_bytes = os.fstat(self._fd).st_size
        grown_bytes, self._size_bytes = size_bytes - self._size_bytes, size_bytes
        limit_bytes = HEADER_BYTES + self._limit_frames * self._frame_bytes
        ahead_bytes = min(AHEAD_BYTES, limit_bytes - size_bytes)
        if 0 < grown_bytes < AHEAD_BYTES // 4 and ahead_bytes > 0:
            with contextlib.suppress(OSError):  # a full disk is noticed by what needs the room
                self._size_bytes += os.pwrite(self._fd, bytes(ahead_bytes), size_bytes)

    def checkpoint(self, connection: sqlite3.Connection, mode: str = "RESTART") -> bool:
        """Write the log back and let it start over; whether no reader was in the way.

        Raises sqlite3.Error; the log then still holds everything.
        """
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        failpoints.hit("sqlite.checkpoint")
        connection.execute(f"PRAGMA busy_timeout = {RESTART_WAIT_MS}")
        try:
            busy, frames, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {self._busy_ms}")
        # With a long reader in the way (a backup) the log goes on growing. Waiting for it holds
        # commits up, so each further try comes when the log has grown by half.
        self._next_frames = frames + frames // 2 + 1 if busy else self._limit_frames
        return not busy


class Upkeep:
    """Keeps the log and the reserve of an open database; used by the writer's thread."""

    def __init__(
        self, connection: sqlite3.Connection, path: str, options: SqliteOptions, room: Room
    ) -> None:
        self._connection = connection
        self._path = path
        self._room = room
        self._log_bytes = options.wal_bytes
        (self._page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        self._log = Log(path + "-wal", self._page_bytes, options.wal_bytes, options.busy_ms)

    def start(self) -> None:
        """Write back what a crash left in the log, and look for room, after opening."""
        self._checkpoint()
        if not self._find_room():
            self._log_refusal("no room on the disk")

    def finish(self) -> None:
        """Write the log back before closing."""
        self._checkpoint("TRUNCATE")

    def close(self) -> None:
        self._log.close()

    def after_batch(self) -> None:
        if not self._log.is_over_limit():
            return
        if not self._checkpoint():
            self.without_room()
        elif self._room.inside:
            self._find_room()

    def allows(self, task_bytes: int) -> bool:
        """Whether new tasks of so many bytes may be written; what cannot fit is not even tried."""
        room = self._room
        if not room.has_room:
            return False
        free = self._free_page_bytes() if room.inside else None
        if not room.allows(task_bytes, free):
            self._log_refusal("little room on the disk")
            self._log.set_limit(self._log_bytes // 4)
        return room.has_room

    def _log_refusal(self, what: str) -> None:
        """Log a refusal, unless ``disk_refuse`` is the cause: the daemon logs that itself."""
        if not self._room.too_used:
            log.warning("store %s: %s; enqueues are refused", self._path, what)

    def without_room(self) -> None:
        """Give up the reserve, so that the log can be written back and start over."""
        if self._room.has_room:
            log.warning("store %s: the disk is full; enqueues are refused", self._path)
        self._room.give_up()
        self._log.set_limit(self._log_bytes // 4)
        self._checkpoint()

    def probe_room(self) -> bool:
        """See ``Store.probe_room``."""
        if self._room.has_room:
            return True
        # What the log holds must have its place in the database before room is counted.
        if not self._checkpoint() or not self._find_room():
            return False
        log.info("store %s: there is room again", self._path)
        return True

    def _find_room(self) -> bool:
        room = self._room
        found = room.find(self._free_page_bytes())
        on_disk = found and not room.inside
        self._log.set_limit(self._log_bytes if on_disk else self._log_bytes // 4)
        return found

    def _checkpoint(self, mode: str = "RESTART") -> bool:
        """Write the log back. False: the disk is full, and the log still holds everything."""
        try:
            self._log.checkpoint(self._connection, mode)
        except sqlite3.Error as error:
            if is_full(error, self._path):
                return False
            if not is_busy(error):
                raise
        return True

    def _free_page_bytes(self) -> int:
        (pages,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        return int(pages) * int(self._page_bytes)
