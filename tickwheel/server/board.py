"""What the processes of several shards know of each, where all of them can read it; and a daemon's
side of its node, which rests on that.

Shared memory: who writes waits for nobody, and a process that is started later finds all of it. The
parent writes what it knows of each daemon, each daemon of a node its own role, and the registrar of
a node a bulletin: where all shards are, as it has decided and seen. Each has its own place.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from tickwheel.errors import BadRequest, NotFound
from tickwheel.persistence import open_nodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.persistence.contract import NodeRegistry
    from tickwheel.server.settings import Settings


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


# --- a daemon's side of its node ------------------------------------------------------------------

DOORS_MAX: Final = 16
"""Front doors that HELLO names."""
_ROLES: Final = {"active": Role.ACTIVE, "standby": Role.STANDBY}


class Node(NamedTuple):
    """What the processes of a node have in common."""

    settings: Settings
    """Of the node; ``listen`` is its front door."""
    shards: list[Settings]
    """Those of each shard's daemon."""
    registry: str
    """The URL of the store that has the list of nodes."""
    board: Board
    bulletin: Bulletin
    run: str
    """Marks this run of the node."""
    life: str
    """Marks the parent's process, so that others on its machine see its end."""
    since_ms: int
    heard: int
    """A pipe on which the registrar hears that there is something new on the board,"""
    nudge: int
    """and the end of it where that is said."""

    def say(self) -> None:
        """Let the registrar look at the board."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.nudge, b".")


class Member:
    """A daemon's side of its node: ``parts.Directory``, and what it says of its own part.

    ``shard`` is None for the front door, which has none."""

    def __init__(self, node: Node, shard: int | None) -> None:
        self._node = node
        self.shard = shard
        self.count = len(node.shards)

    def note(self, role: str, epoch: int, since_ms: int) -> None:
        """Say which part this daemon has in its shard from now on."""
        assert self.shard is not None, "the front door has no part"
        part = Part(os.getpid(), _ROLES.get(role, Role.STARTING), epoch, since_ms)
        self._node.board.write_part(self.shard, part)
        self._node.say()

    def hurries(self) -> bool:
        """Whether the lease of this daemon's shard is about to be given back."""
        return self.shard in self._node.bulletin.read().get("expected", ())

    @property
    def successor(self) -> str | None:
        """The address of the daemon to which this one's shard is given; None: nobody gets it, or
        that is not known."""
        assert self.shard is not None, "the front door has nothing to give"
        bulletin = self._node.bulletin.read()
        return (bulletin["heirs"][self.shard] or None) if bulletin else None

    @property
    def http(self) -> str | None:
        """The HTTP of the whole node, which finds each shard wherever it is; None: it has none."""
        said = self._node.settings
        return said.http_for_others(str(said.http_url)) if said.http else None

    # --- the directory ---------------------------------------------------------------------------

    def whereabouts(self, shard: int) -> tuple[str, str]:
        """(address, HTTP) of the daemon that leads a shard; empty where that is not known."""
        said = self._node.bulletin.read()
        if not 0 <= shard < self.count or not said:
            return "", ""
        return said["route"][shard], said["http"][shard]

    def any_whereabouts(self) -> tuple[str, str]:
        """The same of any shard that is led, one of this node first."""
        said = self._node.bulletin.read()
        own = {one.advertise for one in self._node.shards}
        pairs = list(zip(said.get("route", ()), said.get("http", ()), strict=True))
        led = sorted((pair for pair in pairs if pair[0]), key=lambda pair: pair[0] not in own)
        return led[0] if led else ("", "")

    def route(self) -> tuple[int, tuple[str, ...]]:
        """(version, the addresses of all shards in their order; empty where nobody is known)."""
        said = self._node.bulletin.read()
        return said.get("version", 0), tuple(said.get("route", ("",) * self.count))

    def doors(self) -> tuple[str, ...]:
        """The front doors of the nodes that are there, some of many."""
        nodes = self.listing()["nodes"]
        return tuple(one["address"] for one in nodes[:DOORS_MAX])

    def listing(self) -> dict[str, Any]:
        """What the verb ``nodes`` answers."""
        empty = {"nodes": [], "shards": [], "route_version": 0}
        return dict(self._node.bulletin.read().get("listing", empty))

    @property
    def measured(self) -> dict[str, float]:
        """What metrics say of the node, by the last part of their names."""
        return dict(self._node.bulletin.read().get("measured", {}))

    async def place(self, shard: int, node: str | None) -> None:
        """Note where a shard shall be. Raises BadRequest, NotFound, StoreError."""
        if shard >= self.count:
            raise BadRequest(f"shard must be between 0 and {self.count - 1}, not {shard}")
        if node is not None:
            self._known(node)
        async with self._registry() as registry:
            await registry.place(shard, node)

    async def drain(self, node: str, *, draining: bool) -> None:
        """Note whether a node shall have no shards. Raises NotFound, StoreError."""
        if draining:
            self._known(node)
        async with self._registry() as registry:
            await registry.drain(node, draining=draining)

    def _known(self, node: str) -> None:
        names = [one["node"] for one in self.listing()["nodes"]]
        if node not in names:
            raise NotFound(f"node {node!r} is not there; there are {', '.join(names) or 'none'}")

    @contextlib.asynccontextmanager
    async def _registry(self) -> AsyncIterator[NodeRegistry]:
        """The registry, by a connection for one wish of an operator."""
        registry = open_nodes(self._node.registry, self.count)
        try:
            yield registry
        finally:
            await registry.close()
