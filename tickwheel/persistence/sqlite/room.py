"""Room on the disk: enqueues stop while there is enough left for acks, and go on later.

Three sources of room, in this order:

* Free space. An enqueue batch needs it twice, once for the log and once for the database.
* The reserve, a file of allocated blocks, given up when the disk is full all the same: writing
  the log back may make the database grow by nearly as much as the log holds.
* Free pages inside the database. A backlog that filled the disk and was worked off leaves the
  file as large as it was; new tasks fit into it (``inside``).

Knows files and sizes, not SQL. Used by the writer's thread; ``has_room`` is read by others.
"""

from __future__ import annotations

import contextlib
import os


class Room:
    """What may be written to the disk of one database."""

    def __init__(self, path: str, reserve_bytes: int, log_bytes: int) -> None:
        self._reserve_path = path + ".reserve"
        self._reserve_bytes = reserve_bytes
        self._enough_bytes = log_bytes
        """Left free beside the reserve before enqueues begin (again)."""
        self._low_bytes = log_bytes // 4
        """Enqueues stop before less than this would be left."""
        self.has_room = True
        self.inside = False
        """Room is in free pages of the database only; the log must not grow either."""

    def allows(self, task_bytes: int, free_page_bytes: int | None) -> bool:
        """Whether a batch with so many bytes of new tasks may be tried; remembers a no.

        ``free_page_bytes`` is needed while ``inside``.
        """
        if not self.has_room:
            return False
        free = free_page_bytes if self.inside else free_bytes(self._reserve_path)
        self.has_room = free is not None and free >= 2 * task_bytes + self._low_bytes
        return self.has_room

    def find(self, free_page_bytes: int) -> bool:
        """Look for room again; whether there is some."""
        if self._take_reserve():
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


def free_bytes(path: str) -> int:
    """What an ordinary user may still write on the disk that holds ``path``; 0 if unknown."""
    try:
        disk = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def disk_bytes(path: str) -> int:
    """The size of the disk that holds ``path``."""
    disk = os.statvfs(os.path.dirname(path) or ".")
    return disk.f_blocks * disk.f_frsize
