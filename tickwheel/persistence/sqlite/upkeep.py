"""Between batches: writing the log back in time, and room on the disk for what comes next.

Puts ``wal.Log`` and ``room.Room`` together. A full disk and a busy log are answers here;
every other sqlite3.Error or OSError is raised, and means that the store must stop.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection

from tickwheel.model.records import TaskRow
from tickwheel.persistence.sqlite.connection import is_busy, is_full
from tickwheel.persistence.sqlite.options import SqliteOptions
from tickwheel.persistence.sqlite.room import Room
from tickwheel.persistence.sqlite.rows import task_bytes
from tickwheel.persistence.sqlite.wal import Log

log = logging.getLogger(__name__)


class Upkeep:
    """Of one open database; used by the writer's thread."""

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
        """Right after opening: write back what a crash left in the log, and look for room."""
        self._checkpoint()
        if not self._find_room():
            self._tell("no room on the disk")

    def finish(self) -> None:
        """Right before closing."""
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

    def allows(self, tasks: Collection[TaskRow]) -> bool:
        """Whether new tasks may be written; a batch that cannot fit is not even tried."""
        room = self._room
        if not room.has_room:
            return False
        free = self._free_page_bytes() if room.inside else None
        if not room.allows(task_bytes(tasks), free):
            self._tell("little room on the disk")
            self._log.set_limit(self._log_bytes // 4)
        return room.has_room

    def _tell(self, what: str) -> None:
        """Of a limit that was set, those who are refused hear, and the daemon's log."""
        if not self._room.too_used:
            log.warning("store %s: %s; enqueues are refused", self._path, what)

    def without_room(self) -> None:
        """Give up the reserve, and with it write the log back, so that it starts over."""
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
        """False when the disk is full; the log then still holds everything."""
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
