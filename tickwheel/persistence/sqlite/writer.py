"""The only connection that writes: its opening, batches and their errors; and the write-ahead log,
which is written back between batches.

The code is synchronous and runs on the writer's thread. The order of a batch's statements does not
matter, because no key is in two maps. Invariants:

* A batch is one transaction, which checks epoch, owner and number itself. Values cached in memory
  (``_endings_upto``, ``_packs``, ``_move_count``, the flags) change only after COMMIT.
* After any error other than a full disk or another process's lock, nothing more is written.

``Log`` bounds the log under constant load: when more than ``limit_bytes`` of the log are in use, it
is written back (a checkpoint) and starts over in place. Python's sqlite3 does not report the bytes
in use, and the file keeps its size when the log starts over. So ``Log`` compares salts, which
https://sqlite.org/walformat.html specifies: frames of the current round have the salts of the log's
header. ``Log`` may open the log file, but not the database file or the shared memory file, because
closing any descriptor of those ends the process's locks.
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
from tickwheel.persistence.identity import next_epoch
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
    from tickwheel.persistence.contract import Evidence
    from tickwheel.persistence.sqlite.database import SqliteOptions


def write(connection: sqlite3.Connection, effects: Effects, updated: dict[int, TaskRow]) -> None:
    """Write a batch except its new tasks, ``moved`` and ``ended``."""
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
            for number, keys in sql.dropped_keys(effects.records).items():
                connection.execute(sql.DELETE_RECORDS, (number, json.dumps(keys)))


def enqueue(
    connection: sqlite3.Connection, packs: Sequence[PackValues], loose: Collection[TaskRow]
) -> None:
    """Write new tasks, divided by ``packs.split``."""
    if packs:
        size = max(map(pack_bytes, packs))
        rows_max = max(1, min(ROWS_MAX, STATEMENT_BYTES_MAX // size))
        sql.INSERT_PACKS.run(connection, packs, rows_max)
    if loose:
        sql.INSERT_TASKS.run(connection, task_values(loose), task_rows_max(loose))


def leave_packs(connection: sqlite3.Connection, change: Change) -> None:
    """Write the changes of packs whose tasks have ended or get single rows."""
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
    """Write new due times. Return how many of them were added to table ``move``."""
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
    """Move the due times of table ``move`` into ``moved``, except those of tasks that have left
    their packs."""
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
    """Return ``updated`` with stored bodies in place of ``NO_BODY``."""
    ids = [task_id for task_id, row in updated.items() if row.body is NO_BODY]
    if not ids:
        return updated
    packed, _ = packs.places(ids)
    bodies: dict[int, bytes] = dict(connection.execute(sql.READ_BODIES, (str(ids),)).fetchall())
    for values in connection.execute(sql.READ_PACKS, (str(list(packed)),)).fetchall():
        bodies |= {row.id: row.body for row in Pack(*values).rows(packed[values[0]])}
    # For a task that is no longer stored, the lookup raises an error instead of writing an empty
    # body.
    return updated | {i: updated[i]._replace(body=bodies[i]) for i in ids}


def take_apart(connection: sqlite3.Connection, firsts: list[int], key_hash: KeyHash) -> bool:
    """Replace these packs with single rows for their remaining tasks. Return whether any of these
    tasks has a key."""
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
    """Delete all rows of the ended tasks, and write their outcomes up to ``endings_max``.
    ``loose``: ended tasks with single rows. ``upto``: number of outcomes written before. The flags
    tell which tables have rows."""
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
"""Maximum number of due times in table ``move``, which every reader keeps in memory. More are
merged into ``moved`` together, because a page of ``moved`` has the due times of eight packs."""
MOVES_AT_ONCE = 1_000
"""Number of due times that are merged into ``moved`` at once. A pack's row has 500 bytes."""

log = logging.getLogger(__name__)

NO_CHANGE = Change()
NO_ENDS = (None,) * 7

LOOK_EVERY_BATCHES = 64
"""Number of batches between two checks whether the PrepareQueue, dead letters and keys of single
rows are empty. Deletes from empty tables are skipped."""


class Writer:
    """The writer of one database, open or closed."""

    def __init__(self, path: str, options: SqliteOptions) -> None:
        self._path = path
        self._options = options
        self._lock = StoreLock(path)
        self._room = Room(path, 0, 0)
        self._connection: sqlite3.Connection | None = None
        self._upkeep: Upkeep | None = None
        self._broken = ""
        self._endings_upto = 0
        self._has_progress = True
        self._has_dead = True
        self._has_keys = True
        """Whether single rows have keys."""
        self._key_hash = KeyHash(b"")
        self._batches = 0
        self._move_count = 0
        """Number of due times in table ``move``."""
        self._packs = PackIndex()

    @property
    def has_room(self) -> bool:
        return self._room.has_room

    # --- opening and closing -----------------------------------------------------------------

    def open(
        self, owner: str, now_ms: int, epoch_min: int = 1, evidence: Sequence[Evidence] = ()
    ) -> Opened:
        """Open the database. On failure, release lock and connection, and raise StoreUnusable."""
        self._lock.acquire(owner)
        try:
            return self._open(owner, now_ms, epoch_min, evidence)
        except BaseException as error:
            self._release()
            if isinstance(error, sqlite3.Error | OSError):
                raise StoreUnusable(f"cannot open {self._path}: {describe(error)}") from error
            raise

    def _open(
        self, owner: str, now_ms: int, epoch_min: int, evidence: Sequence[Evidence]
    ) -> Opened:
        layout = identify_file(self._path, self._options.busy_ms)
        if not layout:
            # Check this before any file is created, because SQLite would remove the log of an empty
            # file.
            evidence = (*evidence, *left_behind(self._path, self._lock.incarnation))
            next_epoch(self._path, None, evidence)
        self._lock.lock_file()
        options = self._options.fitted(disk_bytes(self._path))
        # The log may exceed its limit by one batch without being truncated.
        log_bytes_max = options.wal_bytes + options.wal_bytes // 4
        connection = self._connection = connect_writer(
            self._path, options.writer_cache_bytes, options.busy_ms, log_bytes_max
        )
        make_durable(connection)
        room = Room(self._path, options.reserve_bytes, options.wal_bytes, options.disk_refuse)
        self._room = room
        opened = begin_epoch(
            connection, self._path, layout, owner, now_ms, room, epoch_min, evidence
        )
        self._lock.note(opened.incarnation)
        self._key_hash = KeyHash(opened.key_seed)
        (upto,) = connection.execute("SELECT max(upto) FROM ending").fetchone()
        self._endings_upto = upto or 0
        self._check_empty(connection)
        for statement in sql.MAKE_SMALL:
            connection.execute(statement)
        self._packs.load(connection.execute(sql.PACK_INDEX))
        (self._move_count,) = connection.execute(sql.COUNT_MOVES).fetchone()
        self._broken = ""
        self._upkeep = Upkeep(connection, self._path, options, room)
        self._upkeep.start()
        opened.has_room, opened.no_room = room.has_room, room.why_not
        return opened

    def close(self, clean: bool) -> None:
        """Close the database if it is open. Readers must be closed first."""
        if self._connection is None or self._upkeep is None:
            return
        try:
            if not self._broken:
                if clean:
                    self._connection.execute("UPDATE meta SET value = 1 WHERE key = 'clean'")
                self._upkeep.finish()
        except (sqlite3.Error, OSError) as error:
            # The next start reads all batches from the log.
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
            applied = self._retry_without_tasks(connection, epoch, owner, n, effects)
        if applied:
            try:
                upkeep.after_batch()
            except (sqlite3.Error, OSError) as error:
                # This batch is durable. The next batch raises the error.
                self._break(connection, error)
        return applied

    def _retry_without_tasks(
        self, connection: sqlite3.Connection, epoch: int, owner: str, n: int, effects: Effects
    ) -> bool:
        """Write a batch without new tasks after the reserve was deleted to make room."""
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
        """Write a small batch with one statement, which costs two thirds of five statements. If the
        batch is not small, return None without writing anything."""
        try:
            values = sql.small_values(effects, self._key_hash)
            enqueued, ended = effects.enqueued, effects.ended
            if values is None or self._packs.searches_next or self._packs.places(enqueued)[0]:
                return None
            ends = self._ended_columns(connection, ended) if ended else NO_ENDS
            if ends is None:
                return None
            marks = (sql.expected_meta(epoch, owner, n), n, effects.id_mark, effects.position_ms)
            connection.execute(sql.WRITE_SMALL, (*marks, *values, *ends))
        except sqlite3.IntegrityError as error:
            if error_name(error) != sql.NOT_NEXT_BATCH:
                raise
            if self._is_next(connection, epoch, owner, n):
                raise StoreError(
                    f"batch {n} is the next one in the meta table, but was not applied"
                ) from error
            return False
        except (sqlite3.Error, Fenced, CommitRefused):
            raise
        except Exception as error:
            # Values that SQLite cannot store are a bug in the caller.
            raise self._break(connection, error) from error
        self._packs.sparse_now(NO_CHANGE)
        self._endings_upto += len(ended)
        self._has_keys |= values[sql.HASH_AT] is not None
        return True

    def _ended_columns(
        self, connection: sqlite3.Connection, ended: dict[int, Outcome]
    ) -> tuple[object, ...] | None:
        """Return the columns of ``sql.WRITE_SMALL`` for ended tasks, or None if packs change."""
        change = self._packs.leaving(ended)
        if change.masks or change.done:
            return None
        self._check_empty_sometimes(connection)
        ids, upto = str(list(ended)), self._endings_upto + len(ended)
        trim_upto = upto - self._options.endings_max
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
                    raise StoreError(
                        f"batch {n} is the next one in the meta table, but was not applied"
                    )
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
                self._check_empty_sometimes(connection)
                end(
                    connection,
                    n,
                    effects,
                    loose=change.loose,
                    has_progress=self._has_progress,
                    has_dead=self._has_dead,
                    has_keys=self._has_keys,
                    upto=self._endings_upto,
                    endings_max=self._options.endings_max,
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
            move_count = self._move_count
            if effects.moved:
                move_count += move(connection, n, effects.moved, self._packs)
            sparse = self._packs.sparse_now(change)
            if move_count and (sparse or (effects.moved and move_count > MOVES_MAX)):
                merge_moves(connection, self._packs)
                move_count = 0
            if sparse:
                has_keys |= take_apart(connection, sparse, self._key_hash)
            connection.execute("COMMIT")
        except (sqlite3.Error, Fenced, CommitRefused):
            raise
        except Exception as error:
            # Values that SQLite cannot store are a bug in the caller. Roll back the batch.
            raise self._break(connection, error) from error
        self._packs.adopt(packs, change)
        self._packs.drop(sparse)
        self._move_count = move_count
        self._endings_upto += len(effects.ended)
        self._has_progress |= bool(effects.progress)
        self._has_dead |= bool(effects.dead)
        self._has_keys |= has_keys
        return True

    def _is_next(self, connection: sqlite3.Connection, epoch: int, owner: str, n: int) -> bool:
        """Return True if batch ``n`` is the next one, or False if it has been applied. Otherwise
        raise Fenced or CommitRefused."""
        meta = read_meta(connection, self._path)
        if (epoch, owner) != (meta["epoch"], meta["owner"]):
            raise Fenced(
                f"epoch {epoch} of {owner!r} ended:"
                f" epoch {meta['epoch']} of {meta['owner']!r} began"
            )
        last = int(meta["last_batch"])
        if n > last + 1:
            raise CommitRefused(f"batch {n} does not follow batch {last}")
        return n == last + 1

    def _check_empty_sometimes(self, connection: sqlite3.Connection) -> None:
        self._batches += 1
        if self._batches % LOOK_EVERY_BATCHES == 0 and (
            self._has_progress or self._has_dead or self._has_keys
        ):
            self._check_empty(connection)

    def _check_empty(self, connection: sqlite3.Connection) -> None:
        """Set the flags for progress, dead letters and keys of single rows."""
        flags = connection.execute(
            "SELECT EXISTS(SELECT 1 FROM prepare), EXISTS(SELECT 1 FROM dead),"
            " EXISTS(SELECT 1 FROM task_key)"
        ).fetchone()
        self._has_progress, self._has_dead, self._has_keys = map(bool, flags)

    def probe_room(self) -> bool:
        """See ``Store.probe_room``."""
        connection, upkeep = self._usable()
        try:
            return upkeep.probe_room()
        except (sqlite3.Error, OSError) as error:
            raise self._break(connection, error) from error

    # --- errors ------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise StoreBroken if an error has occurred that a retry cannot fix."""
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
        """Roll back. Return only if the disk was full and no part of the batch was written."""
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
        """Refuse all later calls, because a sync after a failed one proves nothing."""
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
"""Number of zero bytes that are written after the log in advance, enough for about twenty batches
of one task."""
RESTART_WAIT_MS = 50
"""How long a checkpoint waits for readers of the log, in milliseconds. Short reads take less."""


class Log:
    """The write-ahead log of one database; used only by the writer's thread."""

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
        """Return whether the frame at the limit belongs to the current round."""
        offset = HEADER_BYTES + (self._next_frames - 1) * self._frame_bytes
        if offset + FRAME_HEADER_BYTES > self._size_bytes:
            self._update_size()
            if offset + FRAME_HEADER_BYTES > self._size_bytes:
                return False
        frame = os.pread(self._fd, FRAME_HEADER_BYTES, offset)
        if len(frame) < FRAME_HEADER_BYTES:
            self._update_size()
            return False
        return frame[8:16] == os.pread(self._fd, HEADER_BYTES, 0)[16:24]

    def _update_size(self) -> None:
        """Read the size of the file. While the file grows in small steps, write zeros at its end,
        because a sync of overwritten bytes costs less than a sync of a longer file. For SQLite the
        log ends at zeros, as it does at frames of an earlier round."""
        size_bytes = os.fstat(self._fd).st_size
        grown_bytes, self._size_bytes = size_bytes - self._size_bytes, size_bytes
        limit_bytes = HEADER_BYTES + self._limit_frames * self._frame_bytes
        ahead_bytes = min(AHEAD_BYTES, limit_bytes - size_bytes)
        if 0 < grown_bytes < AHEAD_BYTES // 4 and ahead_bytes > 0:
            with contextlib.suppress(OSError):  # the next batch reports a full disk
                self._size_bytes += os.pwrite(self._fd, bytes(ahead_bytes), size_bytes)

    def checkpoint(self, connection: sqlite3.Connection, mode: str = "RESTART") -> bool:
        """Write the log back and start it over. Return False if a reader prevented that. If it
        raises sqlite3.Error, the log still contains all batches."""
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        failpoints.hit("sqlite.checkpoint")
        connection.execute(f"PRAGMA busy_timeout = {RESTART_WAIT_MS}")
        try:
            busy, frames, _ = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {self._busy_ms}")
        # A long read (a backup) makes the log grow. Waiting for it would delay commits, so the next
        # attempt is made when the log has grown by half.
        self._next_frames = frames + frames // 2 + 1 if busy else self._limit_frames
        return not busy


class Upkeep:
    """Maintains the log and the reserve of an open database; used by the writer's thread."""

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
        """After opening, write back the log that a crash has left, and check for room."""
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
        """Return whether the disk has room for new tasks of ``task_bytes``."""
        room = self._room
        if not room.has_room:
            return False
        free = self._free_page_bytes() if room.inside else None
        if not room.allows(task_bytes, free):
            self._log_refusal("little room on the disk")
            self._log.set_limit(self._log_bytes // 4)
        return room.has_room

    def _log_refusal(self, cause: str) -> None:
        """Log a refusal, unless ``disk_refuse`` caused it, which the daemon logs."""
        if not self._room.refusal:
            log.warning("store %s: %s; enqueues are refused", self._path, cause)

    def without_room(self) -> None:
        """Delete the reserve, so that the log can be written back and start over."""
        if self._room.has_room:
            log.warning("store %s: the disk is full; enqueues are refused", self._path)
        self._room.release_reserve()
        self._log.set_limit(self._log_bytes // 4)
        self._checkpoint()

    def probe_room(self) -> bool:
        """See ``Store.probe_room``."""
        if self._room.has_room:
            return True
        # Batches in the log must be written to the database before free space is measured.
        if not self._checkpoint() or not self._find_room():
            return False
        log.info("store %s: the disk has room again", self._path)
        return True

    def _find_room(self) -> bool:
        room = self._room
        has_room = room.find(self._free_page_bytes())
        on_disk = has_room and not room.inside
        self._log.set_limit(self._log_bytes if on_disk else self._log_bytes // 4)
        return has_room

    def _checkpoint(self, mode: str = "RESTART") -> bool:
        """Write the log back. Return False if the disk is full; the log then has all batches."""
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
