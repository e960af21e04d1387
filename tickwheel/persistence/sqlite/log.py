"""The write-ahead log: written back in time between batches, and room on the disk for what comes
next.

``Log`` bounds it under constant load: when more than ``limit_bytes`` of it are in use, everything
is written back (a checkpoint) and the log starts over in place. How much is in use cannot be asked
of SQLite through Python, and the file keeps its size when the log starts over; so the salts are
compared, which https://sqlite.org/walformat.html specifies: frames of the current round carry the
salts of the log's header. Opening the log file is harmless, other than the database file or the
shared memory file, whose locks belong to the process and end when any descriptor is closed.

A full disk (``room.Room``) and a busy log are answers here; every other sqlite3.Error or OSError
is raised, and means that the store must stop.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from typing import TYPE_CHECKING

from tickwheel import failpoints
from tickwheel.persistence.sqlite.database import is_busy, is_full

if TYPE_CHECKING:
    from tickwheel.persistence.sqlite.database import Room, SqliteOptions

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
RESTART_WAIT_MS = 50
"""How long a checkpoint waits for readers of the log, in ms; short reads take far less."""


class Log:
    """The log beside one database. Used by the writer's thread only."""

    def __init__(self, path: str, page_bytes: int, limit_bytes: int, busy_ms: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        frame = os.pread(self._fd, FRAME_HEADER_BYTES, offset)
        if len(frame) < FRAME_HEADER_BYTES:
            return False
        return frame[8:16] == os.pread(self._fd, HEADER_BYTES, 0)[16:24]

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


log = logging.getLogger(__name__)


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
