"""A node: a machine's daemons for some of the shards in a store that several nodes share.

``run`` implements ``tickwheel serve --store 'redis://…?shards=N'``. It is the parent
(``processes.py``) of a daemon for each of the node's shards and of the *registrar*
(``registrar.py``), which decides which shards these are. They communicate through ``board.py``.

Invariants: two daemons of a shard cannot both write, regardless of the registrar, because daemons
are elected and fenced. An unwanted daemon is drained, never killed. While no registrar runs, the
set of daemons stays as it is.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest
from tickwheel.persistence import shard_count, shard_url, without_secrets
from tickwheel.server import checks, daemon
from tickwheel.server.fleet.board import Board, Bulletin, Member, Node, State
from tickwheel.server.fleet.lease import Life
from tickwheel.server.fleet.processes import (
    Parent,
    Process,
    ProcessKind,
    audit_of_http,
    choose_addresses,
    exit_with_parent,
    report_ready,
)
from tickwheel.server.logs import configure
from tickwheel.server.roles import check_folders, store_url
from tickwheel.server.settings import Settings

if TYPE_CHECKING:
    from tickwheel.server.logs import Log

BULLETIN_CHANGED: Final = 255
"""Announces a new bulletin to the parent, in the pipe to which daemons write their numbers."""


def run(settings: Settings) -> int:
    """Run a node until SIGTERM or SIGINT. Return 0 after a clean stop, or 1 after an error.

    It returns in every forked process. Raise BadRequest or StoreUnusable for unusable settings.
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
    processes = [Process(shard.shard, shard, is_wanted=False) for shard in node.shards]
    if node.settings.http is not None:
        changes = {"audit_file": audit_of_http(node.settings)}
        http_settings = node.settings.model_copy(update=changes)
        processes.append(Process(count, http_settings, ProcessKind.HTTP_ALL))
    processes.append(Process(len(processes), node.settings, ProcessKind.REGISTRAR))
    with NodeParent(node, processes, log) as parent:
        own_process = parent.watch()
    if own_process is None:
        return parent.code
    exit_with_parent(parent.lifeline)
    on_start = partial(report_ready, parent.ready, own_process.number)
    if own_process.kind is ProcessKind.REGISTRAR:
        from tickwheel.server.fleet import registrar

        return registrar.run(node, partial(report_ready, parent.ready, BULLETIN_CHANGED), on_start)
    if own_process.kind is ProcessKind.HTTP_ALL:
        from tickwheel.server.http import all_shards

        return all_shards.run(
            own_process.settings,
            node.shards,
            node.board,
            on_start,
            lambda: node.bulletin.read().get("wanted", ()),
            lambda shard: Member(node, None).whereabouts(shard)[1],
        )
    structlog.contextvars.bind_contextvars(shard=own_process.number)
    member = Member(node, own_process.number)
    return daemon.run(own_process.settings, on_start, member)


def _node_of(settings: Settings) -> Node:
    """Return the node that these settings describe. Raise OSError if an address is in use, or
    BadRequest for settings that a node does not allow."""
    count = shard_count(settings.store)
    assert count is not None, "the store's URL names a number of shards"
    feature = f"shards ({count})"
    if settings.processes != 1:
        raise BadRequest(
            f"processes ({settings.processes}) cannot be set with {feature} in the store's URL;"
            " processes is only for a folder of databases"
        )
    if settings.shard or settings.route:
        name = "shard" if settings.shard else "route"
        raise BadRequest(f"{name} cannot be set with {feature}: the node sets it for its daemons")
    if settings.http_all is not None:
        raise BadRequest(
            f"http_all ({settings.http_all}) cannot be set on a node; http serves all shards"
        )
    checks.name(settings.node, "node")  # operators and other nodes use the name
    addresses = choose_addresses(settings, count + 1, feature)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    shards = [
        addresses.shard_settings(settings, shard, shard + 1, store=shard_url(settings.store, shard))
        for shard in range(count)
    ]
    return Node(
        settings.model_copy(update=addresses.settings_of(0)),
        shards,
        store_url(shards[0]),
        Board(count),
        Bulletin(),
        uuid.uuid4().hex[:12],
        str(Life.own() or ""),
        sources().wall_ms(),
        wake_reader,
        wake_writer,
    )


# --- the parent ----------------------------------------------------------------------------------


class NodeParent(Parent):
    """The parent process of a node. It runs the daemons that the bulletin names."""

    def __init__(self, node: Node, processes: list[Process], log: Log) -> None:
        super().__init__(node.settings, processes, node.board, log)
        self._node = node
        self._registrar = processes[-1]
        self._is_announced = self._is_leaving = False
        """Whether the registrar is handing the shards over because the node is stopping."""

    def _note(self, process: Process, state: State) -> None:
        super()._note(process, state)
        self._node.wake_registrar()

    def _note_ready(self, numbers: bytes) -> None:
        if BULLETIN_CHANGED in numbers:
            self._apply_bulletin()
        super()._note_ready(numbers.replace(bytes([BULLETIN_CHANGED]), b""))

    def _apply_bulletin(self) -> None:
        """Start and drain daemons so that those run which the bulletin names."""
        wanted = frozenset(self._node.bulletin.read().get("wanted", ()))
        for process in self._shards:
            was_wanted, process.is_wanted = process.is_wanted, process.number in wanted
            if was_wanted and not process.is_wanted and not self._is_ending:
                self._send(signal.SIGTERM, [process])
            elif process.is_wanted and not was_wanted and process.pid is None:
                process.due_s = time.monotonic()

    def _stop(self) -> None:
        """Let the registrar hand all shards over first. A second call does not wait for that."""
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
        """Return whether to end the node. A node whose daemons have served is never ended."""
        has_served = any(process.has_served for process in self._shards)
        return super()._is_fatal(process, code) and not has_served

    def _all_serve(self) -> None:
        settings = self._node.settings
        if not self._is_announced:
            self._is_announced = True
            self._log.info("node_serves", url=settings.advertise)
        self._write_ready_file(str(settings.advertise), settings.http_url)
