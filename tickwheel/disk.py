"""How much of a disk is used, which the store and the history go by, each with limits of its own;
what makes a file durable; and who else may read the files that this process makes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

FILE_MODES = ("0600", "0640", "0644")
"""The choices of the setting ``file_mode``."""
FILE_MODE = "0640"
_withheld = 0
"""The permission bits that ``withhold`` has taken from every file of this process."""


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


def withhold(file_mode: str) -> None:
    """Let every file that this process and its children make have at most this mode, one of
    ``FILE_MODES``, and every folder the same with the right to enter it. A stricter umask stays."""
    global _withheld  # noqa: PLW0603  # the umask is the process's, and this is a part of it
    mode = int(file_mode, 8)
    _withheld = 0o777 & ~(mode | mode >> 2 & 0o111)
    os.umask(os.umask(0o777) | _withheld)


def tighten(path: str) -> None:
    """Take from a file that an earlier process made what ``withhold`` takes from new ones. A
    missing file, and one that belongs to somebody else, stays as it is."""
    if not _withheld:
        return
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode & 0o777
        if mode & _withheld:
            os.chmod(path, mode & ~_withheld)
