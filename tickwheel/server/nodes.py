"""A node: a machine's daemons for some of the shards in a Redis that several nodes share.

``run`` implements ``tickwheel serve --store 'redis://…?shards=N'``. It is the parent
(``processes.py``) of a daemon for each of the node's shards and of the *registrar*
(``registrar.py``), which decides which shards these are. They communicate through ``board.py``.

Invariants: two daemons of a shard cannot both write, regardless of the registrar, because daemons
are elected and fenced. An unwanted daemon is drained, never killed. Without a registrar nothing
changes.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from typing import TYPE_CHECKING, Final

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest
from tickwheel.persistence import shard_count, shard_url, without_secrets
from tickwheel.server import checks, daemon
from tickwheel.server.board import Board, Bulletin, Member, Node, State
from tickwheel.server.lease import Life
from tickwheel.server.logs import configure
from tickwheel.server.processes import (
    Parent,
    Process,
    ProcessKind,
    audit_of_http,
    live_with,
    places_of,
    say_ready,
)
from tickwheel.server.roles import check_folders, store_url
from tickwheel.server.settings import Settings

if TYPE_CHECKING:
    from tickwheel.server.logs import Log

LOOK: Final = 255
"""The registrar's message for a new bulletin, in the pipe to which daemons write their numbers."""


def run(settings: Settings) -> int:
    """Run a node until SIGTERM or SIGINT. Return 0 after a clean stop, or 1 after an error.

    It returns in each of the processes. Raise BadRequest or StoreUnusable for unusable settings.
    """
    check_folders(settings)
    log = configure(settings.log_format, settings.log_level, settings.node)
    try:
        node = _node_of(settings)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    count = len(node.shards)
    detail = f"a node for {count} shards of {without_secrets(settings.store)}"
    log.info("starting", detail=detail, pid=os.getpid())
    processes = [Process(it.shard, it, is_wanted=False) for it in node.shards]
    if node.settings.http is not None:
        whole = node.settings.model_copy(update={"audit_file": audit_of_http(node.settings)})
        processes.append(Process(count, whole, ProcessKind.HTTP_ALL))
    processes.append(Process(len(processes), node.settings, ProcessKind.REGISTRAR))
    with NodeParent(node, processes, log) as parent:
        mine = parent.watch()
    if mine is None:
        return parent.code
    live_with(parent.lifeline)
    ready = parent.ready
    if mine.kind is ProcessKind.REGISTRAR:
        from tickwheel.server import registrar

        return registrar.run(
            node, lambda: say_ready(ready, LOOK), lambda: say_ready(ready, mine.number)
        )
    if mine.kind is ProcessKind.HTTP_ALL:
        from tickwheel.server.http import all_shards

        return all_shards.run(
            mine.settings,
            node.shards,
            node.board,
            lambda: say_ready(ready, mine.number),
            lambda: node.bulletin.read().get("wanted", ()),
            lambda shard: Member(node, None).whereabouts(shard)[1],
        )
    structlog.contextvars.bind_contextvars(shard=mine.number)
    member = Member(node, mine.number)
    return daemon.run(mine.settings, lambda: say_ready(ready, mine.number), member)


def _node_of(settings: Settings) -> Node:
    """Return the node of these settings. Raise OSError if an address is in use, or BadRequest for
    settings that a node does not allow."""
    count = shard_count(settings.store)
    assert count is not None, "the store's URL names a number of shards"
    of = f"shards ({count})"
    if settings.processes != 1:
        raise BadRequest(
            f"processes ({settings.processes}) cannot be set with {of} in the store's URL; it is"
            " only for a folder of databases"
        )
    if settings.shard or settings.route:
        name = "shard" if settings.shard else "route"
        raise BadRequest(f"{name} cannot be set with {of}: the node sets it for its daemons")
    if settings.http_all is not None:
        raise BadRequest(
            f"http_all ({settings.http_all}) cannot be set on a node; http serves all shards"
        )
    checks.name(settings.node, "node")  # operators and other nodes use the name
    places = places_of(settings, count + 1, of)
    heard, nudge = os.pipe()
    os.set_blocking(heard, False)
    os.set_blocking(nudge, False)
    shards = [
        places.of_shard(settings, shard, shard + 1, store=shard_url(settings.store, shard))
        for shard in range(count)
    ]
    return Node(
        settings.model_copy(update=places.of(0)),
        shards,
        store_url(shards[0]),
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
        """Whether the registrar is handing the shards over because the node is stopping."""

    def _note(self, process: Process, state: State) -> None:
        super()._note(process, state)
        self._node.say()

    def _note_ready(self, numbers: bytes) -> None:
        if LOOK in numbers:
            self._look()
        super()._note_ready(numbers.replace(bytes([LOOK]), b""))

    def _look(self) -> None:
        """Start and drain daemons as the bulletin requires."""
        wanted = frozenset(self._node.bulletin.read().get("wanted", ()))
        for process in self._shards:
            was, process.is_wanted = process.is_wanted, process.number in wanted
            if was and not process.is_wanted and not self._is_ending:
                self._send(signal.SIGTERM, [process])
            elif process.is_wanted and not was and process.pid is None:
                process.due_s = time.monotonic()

    def _stop(self) -> None:
        """Let the registrar hand the shards over first. A second call does not wait for it."""
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
        """Return whether to end the node: never after one of its daemons has served."""
        has_served = any(process.has_served for process in self._shards)
        return super()._is_fatal(process, code) and not has_served

    def _all_serve(self) -> None:
        settings = self._node.settings
        if not self._is_announced:
            self._is_announced = True
            self._log.info("node_serves", url=settings.advertise)
        self._write_ready_file(str(settings.advertise), settings.http_url)
