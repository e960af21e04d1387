"""What the processes of a node have in common, and a daemon's side of it.

What the registrar (``registrar.py``) has decided and seen stands on a bulletin in shared memory,
which the parent (``nodes.py``) and the daemons read; what a daemon is stands on the board, which
the registrar reads. Nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.errors import BadRequest, NotFound
from tickwheel.persistence import open_nodes
from tickwheel.server.board import Part, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.persistence.contract import NodeRegistry
    from tickwheel.server.board import Board, Bulletin
    from tickwheel.server.settings import Settings

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
            raise BadRequest(f"shard must be 0 to {self.count - 1}, not {shard}")
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
