"""Measures disk usage, which the store and the history compare with their limits, makes files
durable, and restricts the permissions of the files that this process creates."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

FILE_MODES = ("0600", "0640", "0644")
"""Values of the setting ``file_mode``."""
FILE_MODE = "0640"
_withheld = 0
"""Permission bits that ``withhold`` has removed from new files of this process."""


class Use(NamedTuple):
    """Disk usage as ``df`` shows it. ``bytes`` is the space that ordinary users can use."""

    used_bytes: int
    bytes: int

    @property
    def share(self) -> float:
        """The used fraction, from 0 to 1."""
        return self.used_bytes / max(1, self.bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that an ordinary user can still write."""
        return self.bytes - self.used_bytes


def measure(folder: str | Path) -> Use:
    """Return the usage of the disk that holds ``folder``. Raise OSError on failure."""
    disk = os.statvfs(folder)
    used = disk.f_blocks - disk.f_bfree
    return Use(used * disk.f_frsize, (used + disk.f_bavail) * disk.f_frsize)


def sync(path: str | Path) -> None:
    """Make a file's contents durable, or the names of the files in a folder. Raise OSError if that
    fails."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def withhold(file_mode: str) -> None:
    """Restrict new files of this process and its children to this mode, one of ``FILE_MODES``. New
    folders also get execute permission. A stricter umask stays in force."""
    global _withheld  # noqa: PLW0603  # the umask, which it extends, belongs to the process
    mode = int(file_mode, 8)
    _withheld = 0o777 & ~(mode | mode >> 2 & 0o111)
    os.umask(os.umask(0o777) | _withheld)


def tighten(path: str) -> None:
    """Apply the restriction of ``withhold`` to an existing file. A file that is missing or belongs
    to another user is not changed."""
    if not _withheld:
        return
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode & 0o777
        if mode & _withheld:
            os.chmod(path, mode & ~_withheld)
