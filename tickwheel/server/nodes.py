"""A node: one machine's daemons for some of the shards of a Redis that several nodes share.

``run`` is what ``tickwheel serve --store 'redis://…?shards=N'`` does. It is the parent
(``parent.py``) of a daemon for each shard that the node shall have, and of the *registrar*
(``registrar.py``), which decides which ones these are. What the registrar has decided and seen
stands on a bulletin in shared memory, which parent and daemons read; what a daemon is stands on the
board, which the registrar reads. ``Member`` is a daemon's side of it.

Invariants: whatever the registrar says or fails to say, two daemons of a shard cannot both write:
they are elected, and fenced, as daemons that stand by for each other are. A daemon that is not
wanted is drained, never killed. Without a registrar all stays as it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest, NotFound
from tickwheel.persistence import open_nodes, shard_count, shard_url, without_secrets
from tickwheel.server import daemon
from tickwheel.server.board import Board, Bulletin, Part, Role, State
from tickwheel.server.lease import Life
from tickwheel.server.logs import configure
from tickwheel.server.parent import (
    Kind,
    Parent,
    Process,
    following,
    live_with,
    places_of,
    say_ready,
)
from tickwheel.server.roles import store_url
from tickwheel.server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.persistence.contract import NodeRegistry
    from tickwheel.server.logs import Log

LOOK: Final = 255
"""What the registrar writes, where daemons write their numbers: there is a new bulletin."""
_ROLES: Final = {"active": Role.ACTIVE, "standby": Role.STANDBY}


class Node(NamedTuple):
    """What the processes of a node have in common."""

    settings: Settings
    """Of the node; ``listen`` is its front door."""
    shards: list[Settings]
    """Those of each shard's daemon."""
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


def run(settings: Settings) -> int:
    """Be a node until SIGTERM or SIGINT. 0 after a clean stop, 1 when it could not go on.

    Returns in each of the processes. Raises BadRequest and StoreUnusable for what cannot be served.
    """
    log = configure(settings.log_format, settings.log_level).bind(node=settings.node)
    try:
        node = _node_of(settings)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    count = len(node.shards)
    detail = f"a node for {count} shards of {without_secrets(settings.store)}"
    log.info("starting", detail=detail, pid=os.getpid())
    processes = [Process(one.shard, one, is_wanted=False) for one in node.shards]
    if node.settings.http is not None:
        whole = node.settings.model_copy(update={"audit_file": None})
        processes.append(Process(count, whole, Kind.HTTP_ALL))
    processes.append(Process(len(processes), node.settings, Kind.REGISTRAR))
    with NodeParent(node, processes, log) as parent:
        mine = parent.watch()
    if mine is None:
        return parent.code
    live_with(parent.lifeline)
    ready = parent.ready
    if mine.kind is Kind.REGISTRAR:
        from tickwheel.server import registrar

        return registrar.run(
            node, lambda: say_ready(ready, LOOK), lambda: say_ready(ready, mine.number)
        )
    if mine.kind is Kind.HTTP_ALL:
        from tickwheel.server.http import whole as http_of_node

        return http_of_node.run(
            mine.settings,
            node.shards,
            node.board,
            lambda: say_ready(ready, mine.number),
            lambda: node.bulletin.read().get("wanted", ()),
        )
    structlog.contextvars.bind_contextvars(shard=mine.number)
    member = Member(node, mine.number)
    return daemon.run(mine.settings, lambda: say_ready(ready, mine.number), member)


def _node_of(settings: Settings) -> Node:
    """The node of these settings. Raises OSError when an address is taken, BadRequest for what
    cannot be of a node."""
    count = shard_count(settings.store)
    assert count is not None, "the store's URL names a number of shards"
    of = f"shards ({count})"
    if settings.processes != 1:
        raise BadRequest(
            f"processes ({settings.processes}) is of a folder of databases; of a node's store the"
            f" URL says how many {of} there are"
        )
    if settings.shard or settings.route:
        name = "shard" if settings.shard else "route"
        raise BadRequest(f"{name} cannot be set with {of}: the node's daemons have it")
    if settings.http_all is not None:
        raise BadRequest(f"http_all ({settings.http_all}) is of a folder of shards, not of a node")
    places = places_of(settings, count + 1, of)
    http_advertise = list[str]()
    if settings.http_advertise is not None:
        http_advertise = following(settings.http_advertise, "http_advertise", count + 1, of)
    heard, nudge = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(nudge, False)
    shards = [
        settings.model_copy(
            update={
                "store": shard_url(settings.store, shard),
                "shard": shard,
                "listen": places.listen[shard + 1],
                "advertise": places.route[shard + 1],
                "http": places.http[shard + 1] if places.http else None,
                "http_advertise": http_advertise[shard + 1] if http_advertise else None,
                "audit_file": settings.audit_file and f"{settings.audit_file}.shard-{shard}",
                "ready_file": None,
            }
        )
        for shard in range(count)
    ]
    door = {
        "listen": places.listen[0],
        "advertise": places.route[0],
        "http": places.http[0] if places.http else None,
    }
    return Node(
        settings.model_copy(update=door),
        shards,
        Board(count),
        Bulletin(),
        uuid.uuid4().hex[:12],
        str(Life.own() or ""),
        sources().wall_ms(),
        heard,
        nudge,
    )


# --- the parent ----------------------------------------------------------------------------------


class NodeParent(Parent):
    """The parent of a node's daemons, which are those that the bulletin names."""

    def __init__(self, node: Node, processes: list[Process], log: Log) -> None:
        super().__init__(node.settings, processes, node.board, log)
        self._node = node
        self._registrar = processes[-1]
        self._is_announced = self._is_leaving = False
        """Whether the registrar hands the shards over, because the node shall end."""

    def _note(self, process: Process, state: State) -> None:
        super()._note(process, state)
        self._node.say()

    def _note_ready(self, numbers: bytes) -> None:
        if LOOK in numbers:
            self._look()
        super()._note_ready(numbers.replace(bytes([LOOK]), b""))

    def _look(self) -> None:
        """Start and drain what the bulletin says."""
        wanted = frozenset(self._node.bulletin.read().get("wanted", ()))
        for process in self._shards:
            was, process.is_wanted = process.is_wanted, process.number in wanted
            if was and not process.is_wanted and not self._is_ending:
                self._send(signal.SIGTERM, [process])
            elif process.is_wanted and not was and process.pid is None:
                process.due_s = time.monotonic()

    def _stop(self) -> None:
        """Let the registrar hand the shards over first; asked once more, do not wait for that."""
        if self._registrar.pid is None or self._is_leaving:
            super()._stop()
            return
        self._is_leaving = True
        self._send(signal.SIGTERM, [self._registrar])

    def _note_end(self, process: Process, code: int) -> None:
        if process is self._registrar and self._is_leaving and not self._is_ending:
            process.pid, process.ended = None, code
            self._end(0)
            return
        super()._note_end(process, code)

    def _is_fatal(self, process: Process, code: int) -> bool:
        """Once it has served, a node goes on with what it has."""
        has_served = any(one.has_served for one in self._shards)
        return super()._is_fatal(process, code) and not has_served

    def _all_serve(self) -> None:
        said = self._node.settings
        if not self._is_announced:
            self._is_announced = True
            self._log.info("node_serves", url=said.advertise)
        self._write_ready_file(str(said.advertise), said.http_url)


# --- a daemon ------------------------------------------------------------------------------------


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
        registry = open_nodes(store_url(self._node.shards[0]), self.count)
        try:
            yield registry
        finally:
            await registry.close()
