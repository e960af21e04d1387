"""What the parent of several shards knows of each, where its children can read it.

Shared memory: the parent writes and waits for nobody, and a process that is started later finds all
of it. Knows nothing of processes and of HTTP.
"""

from __future__ import annotations

import mmap
import signal
import struct
from enum import IntEnum
from typing import NamedTuple


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


_SEEN = struct.Struct("5q")


class Board:
    """What the parent knows of ``count`` shards."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _SEEN.size)
        self.count = count

    def write(self, shard: int, seen: Seen) -> None:
        _SEEN.pack_into(self._memory, shard * _SEEN.size, *seen)

    def read(self, shard: int) -> Seen:
        """Read until two readings agree: the parent may be writing."""
        found = None
        while found != (found := _SEEN.unpack_from(self._memory, shard * _SEEN.size)):
            pass
        pid, state, *rest = found
        return Seen(pid, State(state), *rest)


def how_ended(code: int) -> str:
    """An exit code, or a signal as a negative number, in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
