"""The batch that is with the store: noted before, so that SIGKILL in between costs no event.

A batch is appended to the spool when it is durable. A daemon that is killed after the store had
it, and before that, leaves it here; its successor knows from the store whether it became durable,
and appends it then. There are two places, taken in turn, because a batch may be sent to the store
while the one before it is being appended. Nothing is synced, as everywhere in the history.

A successor crosses out what it takes: a daemon that was only frozen sees that, and does not append
it a second time.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from tickwheel.history.names import PENDING, STATE

_HEADER = struct.Struct("<QQQI")
"""epoch, batch, length, checksum of what follows"""
KEPT_BYTES_MAX = 1 << 20
"""What is longer is given back to the disk at once."""


class Pending:
    """One epoch's. Raises nothing: where it cannot be written, a kill may cost a batch."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._epoch = epoch
        self._fds: list[int] = []
        self._noted: dict[int, bytes] = {}
        """Batches that stand there, by their headers."""
        with contextlib.suppress(OSError):
            for slot in range(2):
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fds.append(os.open(folder / f"{PENDING}{slot}", flags, 0o640))

    def note(self, n: int, data: bytes) -> None:
        """``data`` is what is to be appended when the batch is durable."""
        slot = n % 2
        if slot >= len(self._fds):
            return
        header = _HEADER.pack(self._epoch, n, len(data), zlib.crc32(data))
        # Half of it, on a full disk, has a wrong checksum, and need not be crossed out.
        with contextlib.suppress(OSError):
            if os.pwritev(self._fds[slot], (header, data), 0) == len(header) + len(data):
                self._noted[n] = header

    def is_taken(self, n: int) -> bool:
        """Whether a successor has it."""
        if n not in self._noted:
            return False
        try:
            header = os.pread(self._fds[n % 2], _HEADER.size, 0)
        except OSError:
            return False
        # Crossed out, that is: a file that was emptied or damaged is no reason to drop a batch.
        return len(header) == _HEADER.size and not any(header)

    def kept(self, n: int) -> None:
        """It is appended, or never will be."""
        header = self._noted.pop(n, None)
        if header is None:
            return
        with contextlib.suppress(OSError):
            if _HEADER.unpack(header)[2] > KEPT_BYTES_MAX:
                os.ftruncate(self._fds[n % 2], 0)
            else:
                os.pwrite(self._fds[n % 2], bytes(len(header)), 0)

    def close(self, clean: bool = False) -> None:
        """``clean``: nothing of it is needed any more."""
        fds, self._fds = self._fds, []
        self._noted.clear()
        for fd in fds:
            if clean:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
            os.close(fd)


def take(history_dir: Path, shard: int, epoch: int, last_batch: int) -> list[tuple[int, bytes]]:
    """What the daemon before ``epoch`` left though it was durable, by number; it is removed.

    Only of the epoch right before: later ones may have used the number for another batch. What
    is of ``epoch`` or later belongs to whoever succeeded a daemon that was frozen in its start.
    """
    found: list[tuple[int, bytes]] = []
    for path in (history_dir / STATE).glob(f"*-s{shard}/{PENDING}[01]"):
        with contextlib.suppress(OSError):
            with path.open("rb+") as file:
                data = file.read()
                header = data[: _HEADER.size].ljust(_HEADER.size, b"\0")
                its_epoch, n, length, checksum = _HEADER.unpack(header)
                if its_epoch >= epoch:
                    continue
                file.seek(0)
                file.write(bytes(_HEADER.size))
            path.unlink()
            body = data[_HEADER.size : _HEADER.size + length]
            is_whole = len(body) == length and zlib.crc32(body) == checksum
            if length and is_whole and its_epoch + 1 == epoch and n <= last_batch:
                found.append((n, body))
    return sorted(found)
