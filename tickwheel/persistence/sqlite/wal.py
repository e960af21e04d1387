"""The write-ahead log's size and its writing back into the database (a checkpoint).

Bounds the log under constant load: when more than ``limit_bytes`` of it are in use, everything
is written back and the log starts over in place. How much is in use cannot be asked of SQLite
through Python, and the file keeps its size when the log starts over; so the salts are compared,
which https://sqlite.org/walformat.html specifies: frames of the current round carry the salts
of the log's header. Opening the log file is harmless, other than the database file or the
shared memory file, whose locks belong to the process and end when any descriptor is closed.
"""

from __future__ import annotations

import os
import sqlite3

from tickwheel import failpoints

HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24
RESTART_WAIT_MS = 50
"""How long a checkpoint waits for readers of the log; short reads take far less."""


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
