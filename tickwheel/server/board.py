"""State that the processes of several shards share, and a daemon's side of its node.

The state is in shared memory: writers never wait, and a process that starts later can read
everything. The parent writes the state of each daemon, each daemon of a node writes its own role,
and the registrar of a node writes a bulletin with the locations of all shards. Each writer has a
place of its own.
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
    """The state of a shard's daemon, as its parent sees it."""

    DOWN = 0
    STARTING = 1
    SERVES = 2


class Seen(NamedTuple):
    """A shard's daemon, as its parent last saw it."""

    pid: int
    """The daemon's process, or 0 if it does not run."""
    state: State
    since_ms: int
    """When the state began (wall-clock ms)."""
    restarts: int
    ended: int
    """Exit code of the previous process, or its signal as a negative number."""


class Role(IntEnum):
    """The role that a daemon reports."""

    STARTING = 0
    STANDBY = 1
    ACTIVE = 2


class Part(NamedTuple):
    """A daemon's role in its shard, as the daemon reports it."""

    pid: int
    """The reporting process, or 0 if there was no report."""
    role: Role
    epoch: int
    since_ms: int


_SEEN, _PART = struct.Struct("5q"), struct.Struct("4q")


class Board:
    """The states and roles of the daemons of ``count`` shards."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * (_SEEN.size + _PART.size))
        self.count = count

    def write(self, shard: int, seen: Seen) -> None:
        _SEEN.pack_into(self._memory, shard * _SEEN.size, *seen)

    def read(self, shard: int) -> Seen:
        """Return the parent's entry for a shard."""
        pid, state, *rest = self._read(_SEEN, shard * _SEEN.size)
        return Seen(pid, State(state), *rest)

    def write_part(self, shard: int, part: Part) -> None:
        _PART.pack_into(self._memory, self._place_of_part(shard), *part)

    def read_part(self, shard: int) -> Part | None:
        """Return the report of a shard's daemon, or None if it does not run or has not reported."""
        pid, role, *rest = self._read(_PART, self._place_of_part(shard))
        return Part(pid, Role(role), *rest) if pid and pid == self.read(shard).pid else None

    def _place_of_part(self, shard: int) -> int:
        return self.count * _SEEN.size + shard * _PART.size

    def _read(self, form: struct.Struct, place: int) -> tuple[int, ...]:
        """Read until two reads agree, because another process may be writing."""
        fields = None
        while fields != (fields := form.unpack_from(self._memory, place)):
            pass
        return fields


_HEAD = struct.Struct("3q")
BULLETIN_BYTES = 1 << 20


class Bulletin:
    """A map that one process writes and others read.

    The memory has places for two maps, and a head that names the current one. A new map is written
    to the other place, so readers always get a complete map, even if the writer was killed while
    writing.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + 2 * BULLETIN_BYTES)
        self._head: tuple[int, ...] = ()
        self._read: dict[str, Any] = {}

    def write(self, content: dict[str, Any]) -> None:
        """Write a new map. Raise ValueError if it is too large."""
        data = json.dumps(content, separators=(",", ":")).encode()
        if len(data) > BULLETIN_BYTES:
            raise ValueError(f"a bulletin of {len(data)} bytes; the limit is {BULLETIN_BYTES}")
        number = _HEAD.unpack_from(self._memory)[0] + 1
        place = _place_of(number)
        self._memory[place : place + len(data)] = data
        _HEAD.pack_into(self._memory, 0, number, len(data), crc32(data))

    def read(self) -> dict[str, Any]:
        """Return the newest map, or an empty one before the first write. The caller must not change
        it."""
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
            # Two maps were written meanwhile, or the head is being written. It will change soon.
        return self._read


def _place_of(number: int) -> int:
    """Return the offset of a bulletin in the memory."""
    return _HEAD.size + number % 2 * BULLETIN_BYTES


def how_ended(code: int) -> str:
    """Return an exit code, or a signal given as a negative number, as text."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


# --- a daemon's side of its node ------------------------------------------------------------------

DOORS_MAX: Final = 16
"""Maximum front doors in the answer to HELLO."""
_ROLES: Final = {"active": Role.ACTIVE, "standby": Role.STANDBY}


class Node(NamedTuple):
    """The values that all processes of a node share."""

    settings: Settings
    """Settings of the node; ``listen`` is its front door."""
    shards: list[Settings]
    """Settings of each shard's daemon."""
    registry: str
    """URL of the store with the list of nodes."""
    board: Board
    bulletin: Bulletin
    run: str
    """Identifies this run of the node."""
    life: str
    """Identifies the parent process, so that other processes on its machine can see its end."""
    since_ms: int
    heard: int
    """Read end of the pipe that tells the registrar about changes of the board."""
    nudge: int
    """Write end of this pipe."""

    def say(self) -> None:
        """Tell the registrar that the board has changed."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.nudge, b".")


class Member:
    """A daemon's side of its node: its ``parts.Directory``, and the reports of its own role.

    ``shard`` is None for the front door."""

    def __init__(self, node: Node, shard: int | None) -> None:
        self._node = node
        self.shard = shard
        self.count = len(node.shards)

    def note(self, role: str, epoch: int, since_ms: int) -> None:
        """Report the new role of this daemon in its shard."""
        assert self.shard is not None, "the front door has no part"
        part = Part(os.getpid(), _ROLES.get(role, Role.STARTING), epoch, since_ms)
        self._node.board.write_part(self.shard, part)
        self._node.say()

    def hurries(self) -> bool:
        """Return whether the lease of this daemon's shard is about to be released."""
        return self.shard in self._node.bulletin.read().get("expected", ())

    @property
    def successor(self) -> str | None:
        """The address of the daemon to which this one hands its shard over, or None if there is
        none or it is unknown."""
        assert self.shard is not None, "the front door has no shard"
        bulletin = self._node.bulletin.read()
        return (bulletin["heirs"][self.shard] or None) if bulletin else None

    @property
    def http(self) -> str | None:
        """The URL of the node's HTTP API, which serves all shards, or None without HTTP."""
        settings = self._node.settings
        return settings.http_for_others(str(settings.http_url)) if settings.http else None

    # --- the directory ---------------------------------------------------------------------------

    def whereabouts(self, shard: int) -> tuple[str, str]:
        """Return (address, HTTP URL) of the daemon that leads a shard; unknown values are empty."""
        bulletin = self._node.bulletin.read()
        if not 0 <= shard < self.count or not bulletin:
            return "", ""
        return bulletin["route"][shard], bulletin["http"][shard]

    def any_whereabouts(self) -> tuple[str, str]:
        """Return (address, HTTP URL) of the leader of any shard, preferably one of this node."""
        bulletin = self._node.bulletin.read()
        own = {settings.advertise for settings in self._node.shards}
        pairs = list(zip(bulletin.get("route", ()), bulletin.get("http", ()), strict=True))
        led = sorted((pair for pair in pairs if pair[0]), key=lambda pair: pair[0] not in own)
        return led[0] if led else ("", "")

    def route(self) -> tuple[int, tuple[str, ...]]:
        """Return the version and the addresses of all shards' leaders; unknown ones are empty."""
        bulletin = self._node.bulletin.read()
        return bulletin.get("version", 0), tuple(bulletin.get("route", ("",) * self.count))

    def doors(self) -> tuple[str, ...]:
        """Return the addresses of up to ``DOORS_MAX`` nodes."""
        nodes = self.listing()["nodes"]
        return tuple(node["address"] for node in nodes[:DOORS_MAX])

    def listing(self) -> dict[str, Any]:
        """Return the answer to the verb ``nodes``."""
        empty = {"nodes": [], "shards": [], "route_version": 0}
        return dict(self._node.bulletin.read().get("listing", empty))

    @property
    def measured(self) -> dict[str, float]:
        """Values of the node's metrics, by the last part of their names."""
        return dict(self._node.bulletin.read().get("measured", {}))

    async def place(self, shard: int, node: str | None) -> None:
        """Place a shard on a node. Raise BadRequest, NotFound or StoreError."""
        if shard >= self.count:
            raise BadRequest(f"shard must be between 0 and {self.count - 1}, not {shard}")
        if node is not None:
            self._check_node(node)
        async with self._registry() as registry:
            await registry.place(shard, node)

    async def drain(self, node: str, *, draining: bool) -> None:
        """Drain a node or end its draining. Raise NotFound or StoreError."""
        if draining:
            self._check_node(node)
        async with self._registry() as registry:
            await registry.drain(node, draining=draining)

    def _check_node(self, name: str) -> None:
        names = [node["node"] for node in self.listing()["nodes"]]
        if name not in names:
            raise NotFound(f"node {name!r} not found; existing nodes: {', '.join(names) or 'none'}")

    @contextlib.asynccontextmanager
    async def _registry(self) -> AsyncIterator[NodeRegistry]:
        """Open the registry for one request of an operator."""
        registry = open_nodes(self._node.registry, self.count)
        try:
            yield registry
        finally:
            await registry.close()
