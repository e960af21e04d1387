"""The simulation holds, repeats itself, and finds what was broken on purpose; see
docs/durability.md. Seeded bugs that it finds are in tests/mutations/bugs.py."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from simulation import runs
from simulation.faults import FAILING_OVER, FAULTS
from simulation.loop import Host, passes, simulated
from simulation.network import Network
from simulation.store import STORE, Server
from simulation.world import GENTLE_EACH, World, simulate
from tickwheel.client.connection import Connection
from tickwheel.model.effects import Effects
from tickwheel.persistence.contract import Fenced, StoreBehind
from tickwheel.server.lease import Leadership

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 200
NAMED = (3, 4)
"""Seeds whose traces are compared: one with violence, one without."""


def test_every_run_holds() -> None:
    report = runs.run_all(1, SEEDS, stop_at=1)
    assert not report.failed, runs.failure(report.failed[0])
    assert report.runs == SEEDS
    assert {*FAULTS, *FAILING_OVER} <= set(report.faults), "each fault happens"
    for seen in ("deposed", "recovered_after_unclean_stop", "store_trouble", "clock_jumped"):
        assert report.events[seen], f"no run has seen {seen}"
    counts = report.counts
    assert counts["epochs"] > SEEDS and counts["fenced"], "leaders change, and old ones write on"
    assert counts["replays"], "a store has lost what it had confirmed"
    assert counts["tasks"] > 10 * SEEDS and counts["deliveries"] > counts["tasks"]


def _hash_in_a_process(seed: int) -> str:
    """The hash of the trace of a run in a process of its own, as ``make simulate`` begins it."""
    program = f"from simulation.world import simulate; print(simulate({seed}).trace_hash)"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("seed", NAMED)
def test_a_seed_is_one_run_in_every_process(seed: int) -> None:
    here = simulate(seed)
    assert here.lines > 200
    assert simulate(seed).trace_hash == here.trace_hash
    assert _hash_in_a_process(seed) == _hash_in_a_process(seed)


def test_seeds_are_different_runs() -> None:
    assert len({simulate(seed).trace_hash for seed in range(1, 6)}) == 5


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_without_faults_nothing_comes_twice(nodes: int) -> None:
    outcome = simulate(7 * GENTLE_EACH, nodes=nodes, faults=False)
    assert not outcome.problems
    assert outcome.counts["epochs"] == 1
    assert outcome.counts["tasks"] == 20


def test_a_failure_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """With a leader that delivers on when its lease may be over."""

    def always(self: Leadership, mono_ms: int) -> bool:
        return True

    with mock.patch.object(Leadership, "may_deliver", always):
        report = runs.run_all(1, SEEDS, stop_at=1)
        (failed,) = report.failed
        again = simulate(failed.seed)
    assert any("two lead" in problem for problem in failed.problems)
    assert (again.problems, again.trace_hash) == (failed.problems, failed.trace_hash)
    shown = capsys.readouterr().out
    assert f"make simulate SEED={failed.seed}" in shown
    assert failed.trace_hash in shown


# --- one thing at a time -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["open", "small", "handles"])
def test_a_store_that_goes_away_in_the_first_takeover_does_not_end_the_daemon(lost: str) -> None:
    """It waited for the lease; now it tries on, as it does in every later takeover."""
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
        outcome = world.outcome()
    assert seen == [lost]
    assert not outcome.problems
    assert outcome.events["takeover_failed"] == 1
    assert outcome.events["serving"] == 1, "it is the same process"


def test_a_killed_host_runs_nothing_more_and_a_frozen_one_later() -> None:
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
        assert loop.time() == 4.0
    assert ran == ["middle", "two at 1", "two at 3"]


def test_the_network_keeps_the_order_of_a_connection_and_not_between_them() -> None:
    """Bytes of one arrive in order, whatever the latency; those of others overtake them."""
    arrived: list[tuple[int, bytes]] = []
    with simulated(1) as loop:
        net = Network(loop, random.Random(1), lambda *what: None)
        here, there = Host(loop, "here"), Host(loop, "there")
        net.is_slow = True
        made: list[Any] = []

        class Receiver(asyncio.Protocol):
            def __init__(self) -> None:
                made.append(self)

            def data_received(self, data: bytes) -> None:
                arrived.append((made.index(self), data))

        net.listening["there"] = there, Receiver

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
    for number in (0, 1):
        assert b"".join(data for one, data in arrived if one == number) == b"01234"
    assert [one for one, _ in arrived] != sorted(one for one, _ in arrived), "they overtake"


def test_the_server_takes_batches_of_the_newest_owner_alone() -> None:
    with simulated(1) as loop:
        net = Network(loop, random.Random(1), lambda *what: None)
        server = Server(loop, Host(loop, STORE), net, random.Random(1))
        first = server.open("one", 0, 1, may_create=True)
        assert server.commit(first.epoch, "one", 1, Effects(), 1)
        assert not server.commit(first.epoch, "one", 1, Effects(), 1), "it is there"
        second = server.open("two", 0, 1, may_create=False)
        assert second.last_batch == 1
        with pytest.raises(Fenced):
            server.commit(first.epoch, "one", 2, Effects(), 1)
        with pytest.raises(StoreBehind):
            server.commit(second.epoch, "two", 3, Effects(), 1)
        assert server.fenced == 1
