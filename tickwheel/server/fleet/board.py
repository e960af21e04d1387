"""State that the processes of several shards share, and a daemon's access to its node.

The state is in shared memory: writers never wait, and a process that starts later can read
everything. The parent writes the state of each daemon, each daemon of a node writes its own role,
and the registrar of a node writes a bulletin with the locations of all shards. Each writer writes
to a separate part of the memory.
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
    """The state of a shard's daemon, as its parent knows it."""

    DOWN = 0
    STARTING = 1
    SERVES = 2


class ProcessState(NamedTuple):
    """The process of a shard's daemon, as its parent last reported it."""

    pid: int
    """Process id of the daemon, or 0 if it does not run."""
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


class RoleReport(NamedTuple):
    """The role that a daemon reports for its shard."""

    pid: int
    """Process id of the reporting daemon, or 0 if there was no report."""
    role: Role
    epoch: int
    since_ms: int


_PROCESS_STATE, _ROLE_REPORT = struct.Struct("5q"), struct.Struct("4q")


class Board:
    """The states and roles of the daemons of ``count`` shards."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * (_PROCESS_STATE.size + _ROLE_REPORT.size))
        self.count = count

    def write(self, shard: int, process: ProcessState) -> None:
        _PROCESS_STATE.pack_into(self._memory, shard * _PROCESS_STATE.size, *process)

    def read(self, shard: int) -> ProcessState:
        """Return the parent's last report about a shard's daemon."""
        pid, state, *rest = self._read(_PROCESS_STATE, shard * _PROCESS_STATE.size)
        return ProcessState(pid, State(state), *rest)

    def write_role(self, shard: int, report: RoleReport) -> None:
        _ROLE_REPORT.pack_into(self._memory, self._role_offset(shard), *report)

    def read_role(self, shard: int) -> RoleReport | None:
        """Return the report of a shard's daemon, or None if it does not run or has not reported."""
        pid, role, *rest = self._read(_ROLE_REPORT, self._role_offset(shard))
        return RoleReport(pid, Role(role), *rest) if pid and pid == self.read(shard).pid else None

    def _role_offset(self, shard: int) -> int:
        return self.count * _PROCESS_STATE.size + shard * _ROLE_REPORT.size

    def _read(self, form: struct.Struct, offset: int) -> tuple[int, ...]:
        """Read until two reads agree, because another process may be writing."""
        fields = None
        while fields != (fields := form.unpack_from(self._memory, offset)):
            pass
        return fields


_HEAD = struct.Struct("3q")
BULLETIN_BYTES = 1 << 20


class Bulletin:
    """A map that one process writes and others read.

    The memory has room for two maps, and a head with the number of the current one. A new map
    overwrites the older one, so readers always get a complete map, even if the writer was killed
    while writing.
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
        offset = _bulletin_offset(number)
        self._memory[offset : offset + len(data)] = data
        _HEAD.pack_into(self._memory, 0, number, len(data), crc32(data))

    def read(self) -> dict[str, Any]:
        """Return the newest map, or an empty map before the first write. It must not be changed."""
        head = None
        while head != (head := _HEAD.unpack_from(self._memory)):
            number, size, check = head
            if head == self._head or not number:
                break
            if 0 < size <= BULLETIN_BYTES:
                offset = _bulletin_offset(number)
                data = self._memory[offset : offset + size]
                if crc32(data) == check:
                    self._head, self._read = head, json.loads(data)
                    break
            # Two maps were written since the head was read, or the head is being written. In both
            # cases the head changes soon.
        return self._read


def _bulletin_offset(number: int) -> int:
    """Return the offset in the memory of the map with this number."""
    return _HEAD.size + number % 2 * BULLETIN_BYTES


def how_ended(code: int) -> str:
    """Return a text for an exit code, or for a signal if ``code`` is negative."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


# --- a daemon's access to its node ----------------------------------------------------------------

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
    """URL of the store that contains the list of nodes."""
    board: Board
    bulletin: Bulletin
    run: str
    """Identifies this run of the node."""
    life: str
    """Identifies the parent process, so that processes on the same machine can detect its end."""
    since_ms: int
    wake_reader: int
    """Read end of the pipe that tells the registrar about changes of the board."""
    wake_writer: int
    """Write end of the pipe of ``wake_reader``."""

    def wake_registrar(self) -> None:
        """Tell the registrar that the board has changed."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.wake_writer, b".")


class Member:
    """A daemon's access to its node. It is the daemon's ``parts.Directory`` and reports the
    daemon's role. ``shard`` is None for the front door."""

    def __init__(self, node: Node, shard: int | None) -> None:
        self._node = node
        self.shard = shard
        self.count = len(node.shards)

    def note(self, role: str, epoch: int, since_ms: int) -> None:
        """Report the new role of this daemon in its shard."""
        assert self.shard is not None, "the front door has no role"
        report = RoleReport(os.getpid(), _ROLES.get(role, Role.STARTING), epoch, since_ms)
        self._node.board.write_role(self.shard, report)
        self._node.wake_registrar()

    def is_release_near(self) -> bool:
        """Return whether the lease of this daemon's shard is about to be released."""
        return self.shard in self._node.bulletin.read().get("expected", ())

    @property
    def successor(self) -> str | None:
        """The address of the daemon to which this daemon hands its shard over; None if it does not,
        or if the address is unknown."""
        assert self.shard is not None, "the front door has no shard"
        bulletin = self._node.bulletin.read()
        return (bulletin["heirs"][self.shard] or None) if bulletin else None

    @property
    def http(self) -> str | None:
        """The URL of the node's HTTP API, which serves all shards; None if HTTP is off."""
        settings = self._node.settings
        return settings.http_for_others(str(settings.http_url)) if settings.http else None

    # --- the directory ---------------------------------------------------------------------------

    def whereabouts(self, shard: int) -> tuple[str, str]:
        """Return the address and HTTP URL of the daemon that leads a shard; "" if unknown."""
        bulletin = self._node.bulletin.read()
        if not 0 <= shard < self.count or not bulletin:
            return "", ""
        return bulletin["route"][shard], bulletin["http"][shard]

    def any_whereabouts(self) -> tuple[str, str]:
        """Return the address and HTTP URL of the leader of any shard, preferably on this node."""
        bulletin = self._node.bulletin.read()
        own = {settings.advertise for settings in self._node.shards}
        pairs = list(zip(bulletin.get("route", ()), bulletin.get("http", ()), strict=True))
        leaders = sorted((pair for pair in pairs if pair[0]), key=lambda pair: pair[0] not in own)
        return leaders[0] if leaders else ("", "")

    def route(self) -> tuple[int, tuple[str, ...]]:
        """Return the route version and the address of each shard's leader; "" if unknown."""
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
        """Values of the node's metrics, by the last part of the metrics' names."""
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
        """Begin or stop draining a node. Raise NotFound or StoreError."""
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
