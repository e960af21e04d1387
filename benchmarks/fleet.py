"""Memory and fairness with many topics, groups and subscribers in one daemon.

    python -m benchmarks.fleet                      # 100 topics x 10 groups, 1 and 10 a group
    python -m benchmarks.fleet --per-group 1 --tasks 50000

A run starts a daemon (SQLite store, default settings), connects the subscribers, and enqueues tasks
over all topics that are due at the same time. Every group gets each task of its topic, and its
members share them. This is one wave; several waves show growing memory. The output is JSON. The
exit code is 1 if a subscriber was starved (it got less than a tenth of its share), a delivery was
early, an ack was refused, or memory grew in the second half of the waves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environment import NoDisk, choose_folder
from benchmarks.servers import Tickwheel
from tickwheel.client import Client, Subscription, Task

BODY = b"x" * 64
PREFETCH = 64
LEAD_S = 1.0
"""Time from the last enqueue until all tasks are due."""
QUIET_S = 1.0
TIMEOUT_S = 300.0
STARVED_BELOW = 0.1
"""Minimum part of its fair share that each subscriber must get."""
GROWTH_MAX = 1.1
"""Maximum ratio of the memory after the last wave to that after half of the waves."""
ENQUEUE_AT_ONCE = 4096


@dataclass(slots=True)
class Member:
    """A subscriber of a group."""

    topic: int
    group: int
    subscription: Subscription
    delivered: int = 0
    first_s: float | None = None
    """Time of its first delivery in a wave."""


@dataclass(slots=True)
class Wave:
    """The missing acks of one wave, and the time of its last ack."""

    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    refused: int = 0
    early: int = 0
    last_s: float = 0.0

    def acked(self, ack: asyncio.Future[str]) -> None:
        self.refused += ack.cancelled() or ack.exception() is not None or ack.result() != "acked"
        self.left -= 1
        if not self.left:
            self.last_s = time.time()
            self.done.set()


class Fleet:
    """The subscribers of one run."""

    def __init__(self, daemon: Tickwheel, options: argparse.Namespace, per_group: int) -> None:
        self._daemon = daemon
        self._options = options
        self._per_group = per_group
        self.members: list[Member] = []
        self.wave = Wave(0)

    async def run(self) -> dict[str, Any]:
        """Connect, go through the waves, and return the figures."""
        daemon, options = self._daemon, self._options
        async with AsyncExitStack() as open_:
            url = f"tcp://127.0.0.1:{daemon.port}"
            clients = [
                await open_.enter_async_context(Client(url)) for _ in range(options.connections)
            ]
            memory = {"connected_bytes": await self._memory()}
            await self._subscribe(clients)
            memory["subscribed_bytes"] = await self._memory()
            readers = [asyncio.create_task(self._read(member)) for member in self.members]
            waves = []
            for number in range(options.waves):
                waves.append(await self._one_wave(clients[0]))
                memory[f"after_wave_{number + 1}_bytes"] = await self._memory()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            return self._figures(memory, waves)

    async def _memory(self) -> int:
        memory = await asyncio.to_thread(self._daemon.quiet_memory_bytes, QUIET_S)
        return memory["VmRSS"]

    async def _subscribe(self, clients: list[Client]) -> None:
        """Subscribe the members of each group on different connections."""
        options = self._options
        for place in range(self._per_group):
            for topic in range(options.topics):
                for group in range(options.groups):
                    number = (topic * options.groups + group) * self._per_group + place
                    subscription = clients[number % len(clients)].subscribe(
                        f"fleet.{topic}", group=f"group-{group}", prefetch=PREFETCH
                    )
                    self.members.append(Member(topic, group, subscription))
        starting = [member.subscription.start() for member in self.members]
        for start in range(0, len(starting), ENQUEUE_AT_ONCE):
            await asyncio.gather(*starting[start : start + ENQUEUE_AT_ONCE])

    async def _read(self, member: Member) -> None:
        async for delivery in member.subscription:
            if member.first_s is None:
                member.first_s = time.time()
            member.delivered += 1
            self.wave.early += delivery.delivered_ms < delivery.due_ms
            delivery.ack_nowait().add_done_callback(self.wave.acked)

    async def _one_wave(self, client: Client) -> dict[str, Any]:
        options = self._options
        self.wave = wave = Wave(options.tasks * options.groups)
        for member in self.members:
            member.first_s = None
        due_s = time.time() + LEAD_S + options.tasks / 20_000
        at = datetime.fromtimestamp(due_s, UTC)
        tasks = (Task(f"fleet.{n % options.topics}", BODY, at=at) for n in range(options.tasks))
        await client.enqueue_many(tasks)
        enqueued_s = time.time()
        async with asyncio.timeout(TIMEOUT_S):
            await wave.done.wait()
        firsts = sorted(1000 * (m.first_s - due_s) for m in self.members if m.first_s is not None)
        elapsed_s = wave.last_s - max(due_s, enqueued_s)
        return {
            "deliveries_per_s": round(options.tasks * options.groups / elapsed_s),
            "elapsed_s": round(elapsed_s, 3),
            "all_in_time": enqueued_s < due_s,
            "first_delivery_ms": spread(firsts),
            "without_any": sum(member.first_s is None for member in self.members),
            "early": wave.early,
            "refused": wave.refused,
        }

    def _figures(self, memory: dict[str, int], waves: list[dict[str, Any]]) -> dict[str, Any]:
        options, count = self._options, len(self.members)
        fair = options.tasks / options.topics * options.waves / self._per_group
        delivered = sorted(member.delivered for member in self.members)
        starved = sum(tasks < fair * STARVED_BELOW for tasks in delivered)
        # Up to the middle the daemon fills its memory of tasks that ended (endings_max).
        middle, last = (
            memory[f"after_wave_{number}_bytes"]
            for number in (-(-options.waves // 2), options.waves)
        )
        a_subscriber = (memory["subscribed_bytes"] - memory["connected_bytes"]) / count
        return {
            "topics": options.topics,
            "groups": options.topics * options.groups,
            "subscribers": count,
            "connections": options.connections,
            "tasks_a_wave": options.tasks,
            "memory": memory | {"bytes_a_subscriber": round(a_subscriber)},
            "memory_grew": last > middle * GROWTH_MAX,
            "deliveries_a_subscriber": spread(delivered) | {"fair": fair},
            "starved": starved,
            "waves": waves,
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the smallest, middle and largest of sorted values."""
    if not values:
        return {}
    summary = {"min": values[0], "median": statistics.median(values), "max": values[-1]}
    return {name: round(value, 1) for name, value in summary.items()}


def failures(figures: dict[str, Any]) -> list[str]:
    """Return the violations of the bounds."""
    violations = []
    if figures["starved"]:
        violations.append(
            f"{figures['starved']} of {figures['subscribers']} subscribers are starved"
        )
    if figures["memory_grew"]:
        violations.append("memory grew in the second half of the waves")
    counts = {name: sum(wave[name] for wave in figures["waves"]) for name in ("early", "refused")}
    return violations + [f"{count} {name}" for name, count in counts.items() if count]


def measure(options: argparse.Namespace, per_group: int, folder: Path) -> dict[str, Any]:
    """Make a run with a new daemon."""
    with Tickwheel(folder / f"fleet-{per_group}") as daemon:
        before = daemon.quiet_memory_bytes(QUIET_S)["VmRSS"]
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            figures = runner.run(Fleet(daemon, options, per_group).run())
        figures["memory"]["started_bytes"] = before
        figures["daemon_cpu_s"] = round(daemon.cpu_s(), 2)
        return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--groups", type=int, default=10, help="of each topic")
    parser.add_argument("--per-group", type=int, nargs="+", default=[1, 10], help="subscribers")
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=20_000, help="of one wave, over all topics")
    parser.add_argument("--waves", type=int, default=10)
    parser.add_argument("--dir", help="where databases go; default: a folder on a real disk")
    options = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    try:
        place = choose_folder(options.dir)
    except NoDisk as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tickwheel-fleet-", dir=place) as folder:
        runs = [measure(options, count, Path(folder)) for count in options.per_group]
    print(json.dumps(runs, indent=2))
    wrong = [f"{run['subscribers']} subscribers: {text}" for run in runs for text in failures(run)]
    for text in wrong:
        print(f"fleet: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
