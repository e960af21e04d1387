"""How much of a disk is used, which the store and the history go by, each with limits of its own;
and what makes a file durable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """The use of a disk as ``df`` shows it: of what ordinary users may have at all."""

    used_bytes: int
    bytes: int

    @property
    def share(self) -> float:
        """The used share, from 0 to 1."""
        return self.used_bytes / max(1, self.bytes)

    @property
    def free_bytes(self) -> int:
        """The bytes that an ordinary user may still write."""
        return self.bytes - self.used_bytes


def measure(folder: str | Path) -> Use:
    """The use of the disk that holds ``folder``. Raises OSError."""
    disk = os.statvfs(folder)
    used = disk.f_blocks - disk.f_bfree
    return Use(used * disk.f_frsize, (used + disk.f_bavail) * disk.f_frsize)


def sync(path: str | Path) -> None:
    """Make what a file holds durable, or the names of the files in a folder. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
