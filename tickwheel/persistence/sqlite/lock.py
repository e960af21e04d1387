"""One daemon a database: a lock file beside it, held for as long as the store is open.

The lock is ``flock``: it belongs to the open file, so it ends with the process however that
ends, and it also keeps out a second store in the same process. The file stays behind; removing
it would let two daemons lock two files of one name. Its text is for people: pid and owner.
"""

from __future__ import annotations

import fcntl
import os

from tickwheel.persistence.store import StoreUnusable


class FileLock:
    """Exclusive; not waited for. Usable again after ``release``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, owner: str) -> None:
        """Raises StoreUnusable naming the holder."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreUnusable(f"cannot open the lock {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StoreUnusable(
                f"{self.path.removesuffix('.lock')} is in use by {holder or 'another process'}"
                f" (lock {self.path}); stop that one first"
            ) from error
        self._fd = fd
        self._write(f"pid {os.getpid()} {owner}\n")

    def release(self) -> None:
        if self._fd >= 0:
            self._write("")
            os.close(self._fd)
            self._fd = -1

    def _write(self, text: str) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError:
            # The text is a courtesy; on a full disk the lock itself still counts.
            return
