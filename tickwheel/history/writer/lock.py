"""The lock of a state folder: one writer at a time has it.

A folder that was removed or moved takes its lock along: then there is nothing that its holder
could go on with, and a new folder has a lock of its own.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from tickwheel.history import spool_read
from tickwheel.history.names import LOCK

GLANCE_S = 0.05


class Lock:
    """``take`` it; it lasts as long as the process. Raises OSError where there is no folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1
        self._open()

    def take(self, is_over: Callable[[float], bool]) -> bool:
        """Wait for it. False: it is another's, who will write all that is there.

        ``is_over`` waits so many seconds at most, and says whether the daemon is gone by then.
        """
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_over(GLANCE_S) and not self._is_left():
                    return False
            else:
                if not self.is_gone:
                    return True
                os.close(self._fd)
                self._open()

    @property
    def is_gone(self) -> bool:
        """The folder was removed or moved."""
        try:
            there = os.stat(self._folder / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not os.path.samestat(there, os.fstat(self._fd))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _is_left(self) -> bool:
        """Whether something is in the spool that no living daemon adds to: a writer that is about
        to end may have seen its last, and what a living one has is its own writer's work."""
        names = spool_read.files(self._folder)
        living = {n.epoch for n in names if spool_read.is_held(self._folder / str(n))}
        return any(name.epoch not in living for name in names)
