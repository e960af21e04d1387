"""Room on the disk: enqueues stop while there is enough left for acks, and go on later.

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
import os
from typing import NamedTuple

from tickwheel import disk

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
