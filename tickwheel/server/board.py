"""What the processes of several shards know of each, where all of them can read it.

Shared memory: who writes waits for nobody, and a process that is started later finds all of it. The
parent writes what it knows of each daemon, each daemon of a node its own role, and the registrar of
a node a bulletin: where all shards are. Each has its own place. Knows nothing of processes and of
HTTP.
"""

from __future__ import annotations

import json
import mmap
import signal
import struct
from enum import IntEnum
from typing import Any, NamedTuple
from zlib import crc32


class State(IntEnum):
    """What the parent knows of the daemon of a shard."""

    DOWN = 0
    STARTING = 1
    SERVES = 2


class Seen(NamedTuple):
    """The daemon of a shard, as the parent has seen it last."""

    pid: int
    """0: it does not run."""
    state: State
    since_ms: int
    """When that began, by the wall clock."""
    restarts: int
    ended: int
    """How the process before ended: its exit code, or its signal as a negative number."""


class Role(IntEnum):
    """What a daemon says of itself."""

    STARTING = 0
    STANDBY = 1
    ACTIVE = 2


class Part(NamedTuple):
    """The part that a daemon has in its shard, as it says itself."""

    pid: int
    """The process that said so; 0: none has yet."""
    role: Role
    epoch: int
    since_ms: int


_SEEN, _PART = struct.Struct("5q"), struct.Struct("4q")


class Board:
    """What is known of the daemons of ``count`` shards."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * (_SEEN.size + _PART.size))
        self.count = count

    def write(self, shard: int, seen: Seen) -> None:
        _SEEN.pack_into(self._memory, shard * _SEEN.size, *seen)

    def read(self, shard: int) -> Seen:
        """What the parent has written of a shard."""
        pid, state, *rest = self._read(_SEEN, shard * _SEEN.size)
        return Seen(pid, State(state), *rest)

    def write_part(self, shard: int, part: Part) -> None:
        _PART.pack_into(self._memory, self._place_of_part(shard), *part)

    def read_part(self, shard: int) -> Part | None:
        """What the daemon of a shard says; None: it does not run, or has not said anything."""
        pid, role, *rest = self._read(_PART, self._place_of_part(shard))
        return Part(pid, Role(role), *rest) if pid and pid == self.read(shard).pid else None

    def _place_of_part(self, shard: int) -> int:
        return self.count * _SEEN.size + shard * _PART.size

    def _read(self, form: struct.Struct, place: int) -> tuple[int, ...]:
        """Read until two readings agree: somebody may be writing."""
        found = None
        while found != (found := form.unpack_from(self._memory, place)):
            pass
        return found


_HEAD = struct.Struct("3q")
BULLETIN_BYTES = 1 << 20


class Bulletin:
    """A map that one process writes and others read; a whole one, or the one before.

    There is a place for each of two, and a head that says which one counts. The other one is
    written meanwhile, so that who reads finds the one before whole, also when the writer was killed
    in the middle.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + 2 * BULLETIN_BYTES)
        self._head: tuple[int, ...] = ()
        self._read: dict[str, Any] = {}

    def write(self, said: dict[str, Any]) -> None:
        """Raises ValueError for a map that is too large."""
        data = json.dumps(said, separators=(",", ":")).encode()
        if len(data) > BULLETIN_BYTES:
            raise ValueError(f"a bulletin of {len(data)} bytes; the limit is {BULLETIN_BYTES}")
        number = _HEAD.unpack_from(self._memory)[0] + 1
        place = _place_of(number)
        self._memory[place : place + len(data)] = data
        _HEAD.pack_into(self._memory, 0, number, len(data), crc32(data))

    def read(self) -> dict[str, Any]:
        """The newest one, which must not be changed; empty: there was none yet."""
        head = None
        while head != (head := _HEAD.unpack_from(self._memory)):
            number, size, check = head
            if head == self._head or not number:
                break
            if 0 < size <= BULLETIN_BYTES:
                place = _place_of(number)
                data = self._memory[place : place + size]
                if crc32(data) == check:
                    self._head, self._read = head, json.loads(data)
                    break
            # Two were written meanwhile, or the head is being written: it is another one soon.
        return self._read


def _place_of(number: int) -> int:
    """Where a bulletin stands in the memory."""
    return _HEAD.size + number % 2 * BULLETIN_BYTES


def how_ended(code: int) -> str:
    """An exit code, or a signal as a negative number, in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
