"""``python -m simulation.cases NAME…``: what the tests look at, apart from the many runs, as JSON.

The simulation replaces the time and the randomness of its process, so the tests have it in another
one. A case returns what it saw and judges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

from simulation import runs, whole
from simulation.loop import Host, SimLoop, passes, simulated
from simulation.network import Network
from simulation.store import STORE, Server
from simulation.world import GENTLE_EACH, World, simulate
from tickwheel.client.connection import Connection
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import StoreError
from tickwheel.server.fleet.lease import Leadership

SEEDS_MAX = 200
NAMED = (3, 4)
"""Seeds that are run again: one with violence, one without."""
LOST_TWICE = 503
"""A seed whose store loses batches again while those that it had lost are written again."""
LOST = ("open", "small", "handles")
"""Requests of a takeover whose answer is lost."""


def named() -> list[Any]:
    """The runs of a few seeds, then some of them once more."""
    return [vars(simulate(seed)) for seed in (*range(1, 6), LOST_TWICE, *NAMED)]


def named_whole() -> list[Any]:
    """Two runs of the whole, and the first one once more."""
    first, second = NAMED
    return [vars(whole.simulate(seed)) for seed in (first, second, first)]


def without_faults() -> dict[str, Any]:
    """A run without faults for each number of daemons."""
    return {
        nodes: vars(simulate(7 * GENTLE_EACH, nodes=int(nodes), faults=False))
        for nodes in ("1", "2", "3")
    }


def failing() -> dict[str, Any]:
    """Runs with a leader that delivers on when its lease may be over, until one of them fails."""

    def always(self: Leadership, mono_ms: int) -> bool:
        return True

    shown = io.StringIO()
    with mock.patch.object(Leadership, "may_deliver", always):
        with contextlib.redirect_stdout(shown):
            report = runs.run_all(range(1, SEEDS_MAX + 1), stop_at=1)
        again = [vars(simulate(failed.seed)) for failed in report.failed]
    failed = [vars(outcome) for outcome in report.failed]
    return {"failed": failed, "again": again, "shown": shown.getvalue()}


def store_away() -> dict[str, Any]:
    """Runs in which the store goes away in the first takeover: each time at another request."""
    return {lost: _store_away(lost) for lost in LOST}


def _store_away(lost: str) -> dict[str, Any]:
    seen: list[str] = []
    with simulated(1) as loop:
        world = World(1, loop, nodes=1, faults=False)
        trace = world.trace

        def cutting(*what: Any) -> None:
            trace(*what)
            if what[0] == "store" and what[2] == lost and lost not in seen:
                seen.append(lost)
                world.net.block(STORE, "node-a", one_way=True)  # its answer is lost
                loop.call_later(2.5, world.net.unblock, STORE, "node-a")

        world.trace = world.net.trace = cutting  # type: ignore[method-assign]
        loop.run_until_complete(world.run())
        return {"seen": seen} | vars(world.outcome())


def hosts() -> dict[str, Any]:
    """What runs of a killed host, and of a frozen one that goes on, beside the others."""
    ran: list[str] = []
    with simulated(1) as loop:
        one, two = Host(loop, "one"), Host(loop, "two")
        for host in (one, two):
            host.call_at(1.0, ran.append, f"{host} at 1")
            host.call_at(3.0, ran.append, f"{host} at 3")
        loop.call_later(0.5, one.kill)
        loop.call_later(0.5, two.freeze)
        loop.call_later(2.0, two.thaw)
        loop.call_later(4.0, loop.stop)
        loop.call_later(1.5, lambda: ran.append("middle"))
        loop.run_forever()
        return {"ran": ran, "ended_s": loop.time()}


def programs() -> list[str]:
    """What is done by programs that have not ended: one of a killed host, one that never began,
    and one that wants to begin more when it is closed."""
    did: list[str] = []

    async def more() -> None:
        did.append("more")

    async def wait(name: str) -> None:
        try:
            await passes(10)
            did.append(f"{name} goes on")
        finally:
            did.append(f"{name} closes")
            await asyncio.gather(more(), more())
            did.append(f"{name} ends")

    def late(loop: SimLoop, host: Host) -> None:
        host.spawn(wait("late"))
        loop.stop()

    with simulated(1) as loop:
        killed, alive = Host(loop, "killed"), Host(loop, "alive")
        killed.spawn(wait("killed"))
        alive.spawn(wait("alive"))
        loop.call_later(1, killed.kill)
        loop.call_later(2, late, loop, alive)
        loop.run_forever()
        did.append("over")
    return did


def network() -> list[tuple[int, str]]:
    """What arrives, of two connections of a slow network: which of them, and its bytes."""
    arrived: list[tuple[int, str]] = []
    with simulated(1) as loop:
        net = Network(loop, random.Random(1), lambda *what: None)
        here, there = Host(loop, "here"), Host(loop, "there")
        net.is_slow = True
        made: list[Any] = []

        class Receiver(asyncio.Protocol):
            def __init__(self) -> None:
                made.append(self)

            def data_received(self, data: bytes) -> None:
                arrived.append((made.index(self), data.decode()))

        net.listen(("there", 1), there, Receiver)

        async def send(number: int) -> None:
            connection = Connection(lambda *what: None, lambda: None)
            await net.open_to(connection, ("there", 1), None, here)
            for n in range(5):
                connection.put(b"%d" % n)
                connection.flush()
                await passes(0.01)

        async def both() -> None:
            await asyncio.gather(send(0), send(1))
            await passes(5)

        loop.run_until_complete(here.spawn(both()))
    return arrived


def server() -> dict[str, Any]:
    """What the server says to batches of two owners, the first of which it has forgotten."""
    with simulated(1) as loop:
        net = Network(loop, random.Random(1), lambda *what: None)
        server = Server(loop, Host(loop, STORE), net, random.Random(1))

        def commit(epoch: int, owner: str, n: int) -> str | bool:
            try:
                return server.commit(epoch, owner, n, Effects(), 1)
            except StoreError as error:
                return type(error).__name__

        first = server.open("one", 0, 1, may_create=True)
        texts = [commit(first.epoch, "one", 1), commit(first.epoch, "one", 1)]
        second = server.open("two", 0, 1, may_create=False)
        texts += [commit(first.epoch, "one", 2), commit(second.epoch, "two", 3)]
        return {"said": texts, "last_batch": second.last_batch, "fenced": server.fenced}


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        named, named_whole, without_faults, failing, store_away, hosts, programs, network, server,
    )
}  # fmt: skip


def result(case: Callable[[], Any]) -> dict[str, Any]:
    """What a case returns, or how it broke; and what it has left behind."""
    runs.LEFT.clear()
    try:
        seen = {"result": case()}
    except Exception:
        seen = {"error": traceback.format_exc()}
    gc.collect()
    return seen | {"left": list(runs.LEFT)}


def main() -> None:
    runs.prepare()
    names = sys.argv[1:] or CASES
    print(json.dumps({name: result(CASES[name]) for name in names}))  # noqa: T201  # its output


if __name__ == "__main__":
    main()
