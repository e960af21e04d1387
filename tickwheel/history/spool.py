"""The spool: files to which the daemon appends batches, and which its writer process reads.

Each batch is a msgpack array ``[batch, [record, …]]``, written with one ``write`` and no sync: it
survives the end of the daemon, but not a power cut. Invariants:

* ``Spool.append`` never waits for the writer, and never raises an error for a disk or a record. If
  it fails, it sets ``trouble`` and returns False, and the caller continues without that part of the
  history.
* A file contains only complete arrays: the rest of a failed write is truncated.
* The current file is locked before it gets its name, and stays so until its daemon ends. The
  lock tells the writer whether more data can follow.
* A torn tail is not an error for a reader, which reads only complete arrays. Every call reads from
  a position between two arrays. The reader keeps no bytes after complete arrays, because a full
  disk can make the daemon truncate them.

A batch is appended when it is durable. ``Pending`` saves it before the store gets it, so a SIGKILL
in between loses no event: the next daemon appends the batch if the store has it.
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

from tickwheel.history.lines import begins_set_back, policy_map
from tickwheel.history.segments import PARTIAL_PREFIX, STATE

ROTATE_BYTES = 16 << 20
BYTES_MAX = 256 << 20
FILES_IN_BOUND_MIN = 4
"""Minimum number of files that fit into the limit. Only whole files are removed, so fewer files
would free space too rarely."""
CHUNK_BYTES = 128 << 10
ARRAY_BYTES_MAX = 1 << 30
"""Maximum bytes of an array. A longer array counts as damage, because no batch is as large."""
KEPT_BYTES_MAX = 1 << 20
"""If a pending batch has more bytes than this, ``discard`` truncates its file."""
COUNTER = "spool-number"
"""Name of the file that contains the number of the newest spool file."""
PENDING = "pending-"
"""Prefix of the names of the two files for batches that are being committed; 0 or 1 follows."""

_NAME = re.compile(r"spool-(\d+)-(\d+)")
_HEADER = struct.Struct("<QQQI")
"""The header of a pending batch: epoch, batch, length and checksum of the data."""


class SpoolName(NamedTuple):
    """The parts of a spool file's name. Names sort in the order in which the files were written."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"spool-{self.epoch}-{self.number:06d}"


def parse_spool(name: str) -> SpoolName | None:
    match = _NAME.fullmatch(name)
    return SpoolName(int(match[1]), int(match[2])) if match is not None else None


# --- appending -------------------------------------------------------------------------------


class Spool:
    """Appends the records of one epoch. ``folder`` is ``state_folder(…)``, created if missing."""

    def __init__(self, folder: str | Path, epoch: int, bytes_max: int = BYTES_MAX) -> None:
        self._folder = Path(folder)
        self._epoch = epoch
        self._bytes_max = bytes_max
        self._rotate_bytes = max(1, min(ROTATE_BYTES, bytes_max // FILES_IN_BOUND_MIN))
        # Clients cannot send surrogates, but the spool must not fail if it gets one.
        self._pack = msgpack.Packer(unicode_errors="surrogatepass", default=policy_map).pack
        self._fd: int | None = None
        self._path = self._folder
        self._length = 0
        self._others_bytes = 0
        """Bytes of the folder's other files when they were last measured."""
        self.trouble: str | None = None
        """Why the last append failed; None: it succeeded."""
        self.refused = 0
        """Number of batches that could not be appended."""

    def append(self, n: int, records: Sequence[Sequence[Any]]) -> bool:
        """Append one batch as a whole. Return False if this failed; see ``trouble``."""
        data = self.pack(n, records)
        return data is not None and self.append_packed(data)

    def pack(self, n: int, records: Sequence[Sequence[Any]]) -> bytes | None:
        """Return the bytes to append for a batch. None means that it cannot be packed."""
        try:
            data: bytes = self._pack((n, records))
        except (TypeError, ValueError, OverflowError) as error:
            self._refuse(f"the records cannot be packed: {error}")
            return None
        return data

    def append_packed(self, data: bytes) -> bool:
        """Append the bytes that ``pack`` returned. Return False if it failed."""
        try:
            if self._fd is None or self._length >= self._rotate_bytes:
                self._rotate()
            if self._length + self._others_bytes + len(data) > self._bytes_max:
                self._others_bytes = self._measure()
                if self._length + self._others_bytes + len(data) > self._bytes_max:
                    return self._refuse(f"the spool is full; the limit is {self._bytes_max} bytes")
            self._write(data)
        except OSError as error:
            return self._refuse(str(error))
        self.trouble = None
        return True

    def close(self, clean: bool = False) -> None:
        """Close the current file. ``clean``: sync it first."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            if clean:
                os.fsync(self._fd)
        self._release()

    def is_lost(self) -> bool:
        """Return whether the current file or its folder was removed or moved, so that nobody would
        read the file. If so, the next append begins a new file."""
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
        """Approximate bytes that wait for the writer."""
        return self._length + self._others_bytes

    def measure(self) -> int:
        """Measure and return the bytes that wait for the writer."""
        with contextlib.suppress(OSError):
            self._others_bytes = self._measure()
        return self.bytes_held

    # --- details -----------------------------------------------------------------------------

    def _refuse(self, reason: str) -> bool:
        self.trouble = reason
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
        """Truncate the rest of a failed write. If that fails, abandon the file."""
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
        """Begin the next file. If that fails, the current file stays in use."""
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._next_number()
        path = self._folder / str(SpoolName(self._epoch, number))
        part = self._folder / f"{PARTIAL_PREFIX}{path.name}.{os.getpid()}"
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
            counter.with_name(PARTIAL_PREFIX + COUNTER).write_text(str(number))
            counter.with_name(PARTIAL_PREFIX + COUNTER).rename(counter)
        self._others_bytes = self._measure()

    def _next_number(self) -> int:
        """Return a number not yet used in this folder, because a new store repeats epochs."""
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


# --- reading ---------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Consecutive arrays of a spool file, and the offset of the next array. An array that begins
    with a clock that was set back is the first of its chunk."""

    arrays: list[tuple[int, list[Any]]]
    offset: int
    damage: str = ""
    """Why the file cannot be read from ``offset`` on; empty: there is no damage."""


def files(folder: Path) -> list[SpoolName]:
    """Return the spool files of a folder, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in map(parse_spool, names) if name is not None)


def is_held(path: Path) -> bool:
    """Return whether a running daemon may still append to the file."""
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
    """Read complete arrays of about ``chunk_bytes`` from ``offset`` on, or none. Raise OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_open(fd, offset, chunk_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Chunk:
    """Read from an open file as ``read_chunk`` does."""
    size = os.fstat(fd).st_size
    while True:
        data = os.pread(fd, chunk_bytes, offset)
        chunk = _parse(data, offset)
        if chunk.arrays or chunk.damage or offset + len(data) >= size:
            return chunk
        if chunk_bytes > ARRAY_BYTES_MAX:
            return chunk._replace(damage=f"an array is longer than {ARRAY_BYTES_MAX} bytes")
        chunk_bytes *= 4


def _parse(data: bytes, offset: int) -> Chunk:
    # Damaged bytes can contain any length; this bounds the memory that msgpack allocates.
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
            if arrays and begins_set_back(array[1]):
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


# --- pending batches -------------------------------------------------------------------------


class Pending:
    """The batches of one epoch that are being committed. Methods raise no errors; if writing fails,
    a SIGKILL can lose a batch.

    Two files are used in turn, because a batch can be sent to the store while the previous one is
    being appended. A successor zeroes the header of a batch that it takes over, so that a daemon
    that was only paused does not append the batch again. Like all of the history, the files are not
    synced.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self._epoch = epoch
        self._fds: list[int] = []
        self._noted: dict[int, bytes] = {}
        """Number of a saved batch → its header."""
        with contextlib.suppress(OSError):
            for slot in range(2):
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fds.append(os.open(folder / f"{PENDING}{slot}", flags, 0o640))

    def note(self, n: int, data: bytes) -> None:
        """Save ``data``, which will be appended when the batch is durable."""
        slot = n % 2
        if slot >= len(self._fds):
            return
        header = _HEADER.pack(self._epoch, n, len(data), zlib.crc32(data))
        # A partial write on a full disk needs no zeroing, because its checksum is wrong.
        with contextlib.suppress(OSError):
            if os.pwritev(self._fds[slot], (header, data), 0) == len(header) + len(data):
                self._noted[n] = header

    def is_taken(self, n: int) -> bool:
        """Return whether a successor has taken the batch."""
        if n not in self._noted:
            return False
        try:
            header = os.pread(self._fds[n % 2], _HEADER.size, 0)
        except OSError:
            return False
        # Only a zeroed header counts; a truncated or damaged file must not drop a batch.
        return len(header) == _HEADER.size and not any(header)

    def discard(self, n: int) -> None:
        """Zero the header of a batch that was appended, or never will be appended."""
        header = self._noted.pop(n, None)
        if header is None:
            return
        with contextlib.suppress(OSError):
            if _HEADER.unpack(header)[2] > KEPT_BYTES_MAX:
                os.ftruncate(self._fds[n % 2], 0)
            else:
                os.pwrite(self._fds[n % 2], bytes(len(header)), 0)

    def close(self, clean: bool = False) -> None:
        """Close the files. ``clean``: also empty them."""
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
    """Remove and return the durable pending batches of the epoch before ``epoch``, by number.
    Batches of older epochs are ignored, because later epochs can have used their numbers. Batches
    of ``epoch`` or later belong to the successor of a daemon that was paused during its start."""
    batches: list[tuple[int, bytes]] = []
    for path in (history_dir / STATE).glob(f"*-s{shard}/{PENDING}[01]"):
        with contextlib.suppress(OSError):
            with path.open("rb+") as file:
                data = file.read()
                header = data[: _HEADER.size].ljust(_HEADER.size, b"\0")
                batch_epoch, n, length, checksum = _HEADER.unpack(header)
                if batch_epoch >= epoch:
                    continue
                file.seek(0)
                file.write(bytes(_HEADER.size))
            path.unlink()
            body = data[_HEADER.size : _HEADER.size + length]
            is_whole = len(body) == length and zlib.crc32(body) == checksum
            if length and is_whole and batch_epoch + 1 == epoch and n <= last_batch:
                batches.append((n, body))
    return sorted(batches)
