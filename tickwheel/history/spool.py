"""The spool: what the daemon appends to, batch by batch, and what its writer process reads.

One msgpack array ``[batch, [record, …]]`` a batch, written with one ``write`` and without a sync:
what is written survives the end of the daemon, not a power cut. Invariants:

* ``Spool.append`` never raises for what a disk or a record can do, and never waits for the writer.
  It answers False, ``trouble`` says why, and the caller goes on without that history.
* A file holds whole arrays, whatever went wrong: what a failed write left is cut off.
* The file that is appended to is locked as long as its daemon lives. It appears under its name
  with the lock on it. So the writer knows whether more may come.
* A torn tail is no error to a reader: an array counts when all of it is there. What is cut off
  after a full disk must not be remembered, so every call reads the file again from a position,
  and a position always lies between two arrays.

A batch is appended when it is durable. ``Pending`` notes it before it goes to the store, so that a
SIGKILL in between costs no event: the daemon that follows knows from the store whether the batch
became durable, and appends it then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from tickwheel.history.lines import policy_map
from tickwheel.history.segments import PART, STATE

ROTATE_BYTES = 16 << 20
BYTES_MAX = 256 << 20
FILES_IN_BOUND_MIN = 4
"""Files within the bound, at least: a file is removed as a whole, so fewer would free little."""
CHUNK_BYTES = 128 << 10
ARRAY_BYTES_MAX = 1 << 30
"""The longest array: no batch is as large, so beyond it the bytes are damaged."""
KEPT_BYTES_MAX = 1 << 20
"""A longer note of a pending batch is given back to the disk at once."""
COUNTER = "spool-number"
"""The file with the number of the newest spool file."""
PENDING = "pending-"
"""With 0 or 1 behind it: the file of a batch that is with the store."""

_NAME = re.compile(r"spool-(\d+)-(\d+)")
_HEADER = struct.Struct("<QQQI")
"""The header of a pending batch: epoch, batch, length, checksum of what follows."""


class SpoolName(NamedTuple):
    """The parts of a spool file's name; they sort in the order of writing."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"spool-{self.epoch}-{self.number:06d}"


def parse_spool(name: str) -> SpoolName | None:
    found = _NAME.fullmatch(name)
    return SpoolName(int(found[1]), int(found[2])) if found is not None else None


# --- the appending end -----------------------------------------------------------------------


class Spool:
    """Appends the records of one epoch. ``folder`` is ``state_folder(…)``, made if need be."""

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
        """The bytes of all other files of the folder at the last look; the writer removes them."""
        self.trouble: str | None = None
        """Why the last append was refused; None: it was not."""
        self.refused = 0
        """How many batches were refused so far."""

    def append(self, n: int, records: Sequence[Sequence[Any]]) -> bool:
        """Append one batch. False: it was not kept, see ``trouble``; nothing of it is there."""
        data = self.pack(n, records)
        return data is not None and self.append_packed(data)

    def pack(self, n: int, records: Sequence[Sequence[Any]]) -> bytes | None:
        """The bytes to append for a batch; None: it cannot be packed, see ``trouble``."""
        try:
            data: bytes = self._pack((n, records))
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(f"the records cannot be packed: {error}")
            return None
        return data

    def append_packed(self, data: bytes) -> bool:
        """Append a batch that ``pack`` made. False: it was not kept."""
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
        """End the appending. ``clean``: make what is there survive a power cut."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            if clean:
                os.fsync(self._fd)
        self._release()

    def is_lost(self) -> bool:
        """Whether nobody would read what is appended, because the file or its folder was removed or
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
        """About how many bytes wait for the writer."""
        return self._length + self._others_bytes

    def measure(self) -> int:
        """How many bytes wait for the writer, measured now."""
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
        """Cut off what a failed write left; if that fails too, leave the file for good."""
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
        """Begin the next file; if that fails, the one before stays in use."""
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
        """A number above all that were ever used here: epochs begin anew with a new store."""
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


# --- the reading end -------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Some arrays of a spool file, and where the next one begins."""

    arrays: list[tuple[int, list[Any]]]
    offset: int
    damaged: str = ""
    """Why nothing can be read from ``offset`` on; empty: nothing is wrong."""


def files(folder: Path) -> list[SpoolName]:
    """The spool files of a folder, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in map(parse_spool, names) if name is not None)


def is_held(path: Path) -> bool:
    """Whether the daemon that appends to the file lives, so that more may come."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def read_chunk(path: Path, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Chunk:
    """Arrays of about ``chunk_bytes`` from ``offset`` on; none when none is whole.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_open(fd, offset, chunk_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Chunk:
    """``read_chunk`` of an open file."""
    size = os.fstat(fd).st_size
    while True:
        data = os.pread(fd, chunk_bytes, offset)
        found = _parse(data, offset)
        if found.arrays or found.damaged or offset + len(data) >= size:
            return found
        if chunk_bytes > ARRAY_BYTES_MAX:
            return found._replace(damaged=f"an array is longer than {ARRAY_BYTES_MAX} bytes")
        chunk_bytes *= 4


def _parse(data: bytes, offset: int) -> Chunk:
    # A limit for each of the lengths that damaged bytes may claim: memory is asked for by them.
    unpacker = msgpack.Unpacker(
        strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=ARRAY_BYTES_MAX
    )
    unpacker.feed(data)
    arrays: list[tuple[int, list[Any]]] = []
    end, damaged = offset, ""
    try:
        for array in unpacker:
            if not _is_batch(array):
                damaged = "something that is not a batch"
                break
            arrays.append((array[0], array[1]))
            end = offset + unpacker.tell()
    except (ValueError, msgpack.UnpackException) as error:
        damaged = f"not msgpack: {type(error).__name__}"
    return Chunk(arrays, end, damaged)


def _is_batch(array: Any) -> bool:
    return (
        type(array) is list and len(array) == 2 and type(array[0]) is int and type(array[1]) is list
    )


# --- the batch that is with the store --------------------------------------------------------


class Pending:
    """One epoch's. Raises nothing: where it cannot be written, a kill may cost a batch.

    There are two places, taken in turn, because a batch may be sent to the store while the one
    before it is being appended. A successor crosses out what it takes: a daemon that was only
    frozen sees that, and does not append it a second time. Nothing is synced, as everywhere in
    the history.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._epoch = epoch
        self._fds: list[int] = []
        self._noted: dict[int, bytes] = {}
        """Number of a noted batch → its header."""
        with contextlib.suppress(OSError):
            for slot in range(2):
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fds.append(os.open(folder / f"{PENDING}{slot}", flags, 0o640))

    def note(self, n: int, data: bytes) -> None:
        """Note ``data``, which is to be appended when the batch is durable."""
        slot = n % 2
        if slot >= len(self._fds):
            return
        header = _HEADER.pack(self._epoch, n, len(data), zlib.crc32(data))
        # Half of it, on a full disk, has a wrong checksum, and need not be crossed out.
        with contextlib.suppress(OSError):
            if os.pwritev(self._fds[slot], (header, data), 0) == len(header) + len(data):
                self._noted[n] = header

    def is_taken(self, n: int) -> bool:
        """Whether a successor has taken the batch."""
        if n not in self._noted:
            return False
        try:
            header = os.pread(self._fds[n % 2], _HEADER.size, 0)
        except OSError:
            return False
        # Crossed out, that is: a file that was emptied or damaged is no reason to drop a batch.
        return len(header) == _HEADER.size and not any(header)

    def kept(self, n: int) -> None:
        """Cross out a batch that is appended, or never will be."""
        header = self._noted.pop(n, None)
        if header is None:
            return
        with contextlib.suppress(OSError):
            if _HEADER.unpack(header)[2] > KEPT_BYTES_MAX:
                os.ftruncate(self._fds[n % 2], 0)
            else:
                os.pwrite(self._fds[n % 2], bytes(len(header)), 0)

    def close(self, clean: bool = False) -> None:
        """Close the files; ``clean``: nothing in them is needed any more."""
        fds, self._fds = self._fds, []
        self._noted.clear()
        for fd in fds:
            if clean:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
            os.close(fd)


def take_pending(
    history_dir: Path, shard: int, epoch: int, last_batch: int
) -> list[tuple[int, bytes]]:
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
