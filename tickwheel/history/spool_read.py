"""The spool's reading end: whole arrays from a position on.

A torn tail is no error: an array counts when all of it is there. What is cut off by the one who
appends (after a full disk) must not be remembered, so every call reads the file anew from the
position, which always lies between two arrays.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from tickwheel.history.names import SpoolName, parse_spool

CHUNK_BYTES = 128 << 10
ARRAY_BYTES_MAX = 1 << 30
"""No batch is as large; beyond it the bytes are damaged."""


class Chunk(NamedTuple):
    """Some arrays, and where the next one begins."""

    arrays: list[tuple[int, list[Any]]]
    offset: int
    damaged: str = ""
    """Why nothing can be read from ``offset`` on; empty when nothing is wrong."""


def files(folder: Path) -> list[SpoolName]:
    """The spool files that are there, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in map(parse_spool, names) if name is not None)


def is_held(path: Path) -> bool:
    """Whether the daemon that appends to the file lives: more may come."""
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
    """The arrays of about ``chunk_bytes`` from ``offset`` on; none when none is whole.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_open(fd, offset, chunk_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, offset: int, chunk_bytes: int = CHUNK_BYTES) -> Chunk:
    """The same of an open file."""
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
                damaged = "something that is no batch"
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
