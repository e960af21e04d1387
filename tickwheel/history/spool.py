"""The spool: what the daemon appends to, batch by batch, for the writer process to turn into files.

One msgpack array ``[batch, [record, …]]`` a batch, one ``write`` each, no sync: what is written
survives the end of the daemon, not a power cut. Invariants:

* ``append`` never raises for what a disk or a record can do, and never waits for the writer: it
  answers False, ``trouble`` says why, and the caller goes on without that history.
* A file holds whole arrays, whatever went wrong; what a failed write left is cut off.
* The file that is appended to is locked as long as its daemon lives: so the writer knows whether
  more may come. It appears under its name with the lock on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from tickwheel.history.names import COUNTER, PART, SpoolName, parse_spool
from tickwheel.history.records import policy_map

ROTATE_BYTES = 16 << 20
BYTES_MAX = 256 << 20
FILES_IN_BOUND_MIN = 4
"""A file is removed as a whole: with fewer of them within the bound, little would ever be free."""


class Spool:
    """One epoch's appending end. ``folder`` is ``names.state_folder(…)``; it is made if need be."""

    def __init__(self, folder: str | Path, epoch: int, bytes_max: int = BYTES_MAX) -> None:
        self._folder = Path(folder)
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._rotate_bytes = max(1, min(ROTATE_BYTES, bytes_max // FILES_IN_BOUND_MIN))
        # Surrogates cannot come over the wire; a spool must not fail for one all the same.
        self._pack = msgpack.Packer(unicode_errors="surrogatepass", default=policy_map).pack
        self._fd: int | None = None
        self._path = self._folder
        self._length = 0
        self._others_bytes = 0
        """All other files of the folder when they were looked at last; the writer removes them."""
        self.trouble: str | None = None
        """Why the last append was refused; None when it was not."""
        self.refused = 0
        """Batches that were refused so far."""

    def append(self, n: int, records: Sequence[Sequence[Any]]) -> bool:
        """Append one batch. False: it was not kept, see ``trouble``; nothing of it is there."""
        data = self.pack(n, records)
        return data is not None and self.append_packed(data)

    def pack(self, n: int, records: Sequence[Sequence[Any]]) -> bytes | None:
        """What is to be appended; None when it cannot be, see ``trouble``."""
        try:
            data: bytes = self._pack((n, records))
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(f"the records cannot be packed: {error}")
            return None
        return data

    def append_packed(self, data: bytes) -> bool:
        """The same for what ``pack`` made."""
        try:
            if self._fd is None or self._length >= self._rotate_bytes:
                self._rotate()
            if self._length + self._others_bytes + len(data) > self._bytes_max:
                self._others_bytes = self._measure()
                if self._length + self._others_bytes + len(data) > self._bytes_max:
                    return self._refuse(f"it holds its {self._bytes_max} bytes already")
            self._write(data)
        except OSError as error:
            return self._refuse(str(error))
        self.trouble = None
        return True

    def close(self, clean: bool = False) -> None:
        """Nothing more will come. ``clean`` also makes what is there survive a power cut."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            if clean:
                os.fsync(self._fd)
        self._release()

    def is_lost(self) -> bool:
        """Whether nobody would read what is appended: the file, or its folder, was removed or
        moved. Asked now and then; the next append after a yes begins another file."""
        if self._fd is None:
            return False
        try:
            is_lost = not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            is_lost = True
        except OSError:
            return False
        if is_lost:
            self._release()
        return is_lost

    @property
    def bytes_held(self) -> int:
        """About how much waits for the writer."""
        return self._length + self._others_bytes

    def measure(self) -> int:
        """How much waits for the writer, looked at now."""
        with contextlib.suppress(OSError):
            self._others_bytes = self._measure()
        return self.bytes_held

    # --- details -----------------------------------------------------------------------------

    def _refuse(self, why: str) -> bool:
        self.trouble = why
        self.refused += 1
        return False

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(28, f"only {written} of {len(data)} bytes were written")
        except OSError:
            self._cut()
            raise
        self._length += written

    def _cut(self) -> None:
        """Take away what a failed write left; where that fails too, leave the file for good."""
        assert self._fd is not None
        try:
            os.ftruncate(self._fd, self._length)
        except OSError:
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            self._others_bytes += self._length
            self._length = 0

    def _rotate(self) -> None:
        """Begin the next file. The one before stays as it is when that fails."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._next_number()
        path = self._folder / str(SpoolName(self._epoch, number))
        part = self._folder / f"{PART}{path.name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(part, flags, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(part, path)
        except OSError:
            os.close(fd)
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)
        self._release()
        self._fd, self._path, self._length = fd, path, 0
        with contextlib.suppress(OSError):
            counter = self._folder / COUNTER
            counter.with_name(PART + COUNTER).write_text(str(number))
            counter.with_name(PART + COUNTER).rename(counter)
        self._others_bytes = self._measure()

    def _next_number(self) -> int:
        """Above all that were ever used here: epochs begin anew with a new store."""
        used = [name.number for name in map(parse_spool, os.listdir(self._folder)) if name]
        with contextlib.suppress(OSError, ValueError):
            used.append(int((self._folder / COUNTER).read_text()))
        return max(used, default=0) + 1

    def _measure(self) -> int:
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if parse_spool(entry.name) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_size
        return total - self._length
