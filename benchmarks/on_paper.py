"""Estimate the throughput of a fleet on Redis from figures of this machine.

First it measures one daemon on one redis-server without a mirror, at a few rates: what a task and a
batch cost the daemon and Redis, and what a pending task takes in the memory of both. Then it
reckons the fleet that is asked for, and plays some seconds of one of its Redis masters with all
shards that live there, event by event, for how late tasks are.

What it leaves out: the network between machines (a round trip is given by ``--trip-us``), replicas,
uneven shards, and whatever else a machine of that size does. So it says what cannot hold, and by
how much the rest has room; that something holds is shown by running it alone.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path

from benchmarks.cases.lateness import lateness_at
from benchmarks.context import Context
from benchmarks.environment import choose_folder
from benchmarks.load import Load
from benchmarks.redis_server import Redis, TickwheelOnRedis, find_redis
from benchmarks.scale import FULL

RATES = (1_000, 5_000, 20_000)
"""Rate of tasks, per second, while costs are measured."""
SECONDS = 8.0
DELAY_MS = (1_000, 1_000)
PENDING = 200_000
QUIET_S = 2.0
KEPT_S = 65.0
"""Time for which the daemon keeps batches for a Redis that lost its newest data."""
ENQUEUE_PART = 0.5
"""The enqueue's share of the cost of a task in the daemon and in Redis."""
BUSY_MAX = 0.8
"""Maximum load of a thread, which leaves room for uneven load."""


@dataclass(frozen=True)
class Costs:
    """Processor time of a daemon and its redis-server, per batch and per task."""

    batch_us: float
    task_us: float
    redis_batch_us: float
    redis_task_us: float
    pending_bytes: float
    redis_pending_bytes: float


@dataclass(frozen=True)
class Fleet:
    nodes: int
    masters: int
    shards: int
    pending: int
    rate: int
    trip_us: float


# --- measured ------------------------------------------------------------------------------------


def measure(folder: Path, program: str) -> Costs:
    """Measure the costs on this machine."""
    scale = replace(FULL, lateness_s=SECONDS)
    context = Context(scale, folder / "case", None, peers=False, quiet=True)
    rows = []
    for rate in RATES:
        redis = Redis(folder / f"redis-{rate}", program)
        with TickwheelOnRedis(folder / f"at-{rate}", redis, query="?mirror=no") as daemon:
            before, redis_s = daemon.stats()["batches"], redis.cpu_s()
            sample = lateness_at(context, daemon, rate, DELAY_MS)
            batches = daemon.stats()["batches"] - before
            redis_s = redis.cpu_s() - redis_s
        server_s, count = sample["server_cpu_s"], sample["count"]
        rows.append((batches, count, server_s * 1e6, redis_s * 1e6))
        print(
            f"{rate:,} a second: {batches / count:.3f} batches a task,"
            f" daemon {server_s / count * 1e6:.1f} us a task, Redis {redis_s / count * 1e6:.1f} us"
        )
    batch_us, task_us = fit([(b, n, us) for b, n, us, _ in rows])
    redis_batch_us, redis_task_us = fit([(b, n, us) for b, n, _, us in rows])
    pending = measure_pending(folder, program)
    return Costs(batch_us, task_us, redis_batch_us, redis_task_us, *pending)


def fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the CPU time of a batch and of a task, by least squares of the relative errors."""
    scaled = [(b / us, n / us) for b, n, us in rows]
    bb, bn = sum(b * b for b, _ in scaled), sum(b * n for b, n in scaled)
    nn, b1, n1 = sum(n * n for _, n in scaled), sum(b for b, _ in scaled), sum(n for _, n in scaled)
    det = bb * nn - bn * bn
    return (b1 * nn - n1 * bn) / det, (n1 * bb - b1 * bn) / det


def measure_pending(folder: Path, program: str) -> tuple[float, float]:
    """Return the memory of the daemon and of Redis, in bytes per task that is due in a day."""
    redis = Redis(folder / "redis-pending", program)
    with TickwheelOnRedis(folder / "pending", redis, query="?mirror=no") as daemon:
        memory, used = daemon.quiet_memory_bytes(QUIET_S)["VmRSS"], used_memory(redis)
        day_ms = int((time.time() + 86_400) * 1000)
        put = Load(
            "tickwheel_put", port=daemon.port, count=PENDING, tasks_per_frame=500, window=4,
            due_ms=day_ms, seed=1,
        )  # fmt: skip
        with put as load:
            load.run()
        time.sleep(KEPT_S)
        memory = daemon.quiet_memory_bytes(QUIET_S)["VmRSS"] - memory
        return memory / PENDING, (used_memory(redis) - used) / PENDING


def used_memory(redis: Redis) -> int:
    return int(redis.info()["used_memory"])


# --- played --------------------------------------------------------------------------------------


@dataclass
class Shard:
    """A daemon: a thread that processes frames, ticks, acks and answers in order of arrival, with
    one batch at a time on its way to Redis. Times are microseconds since the start."""

    free_us: float = 0.0
    """When the thread has finished its current work."""
    busy_us: float = 0.0
    open: float = 0.0
    """Numbers of enqueued and acked tasks in the open batch."""
    waiting_us: list[float] = field(default_factory=list)
    """Arrival times of the frames of the open batch."""
    sent_us: list[float] | None = None
    """Arrival times of the frames of the batch on its way, or None without one."""

    def work(self, now_us: float, cost_us: float) -> float:
        """Do some work. Return when it is done."""
        self.free_us = max(self.free_us, now_us) + cost_us
        self.busy_us += cost_us
        return self.free_us


class Master:
    """A Redis master and its shards. Tasks arrive at random. Tasks of a shard that arrive in the
    same millisecond are one frame, and are due and acked together."""

    def __init__(self, fleet: Fleet, costs: Costs, seed: int) -> None:
        self._costs, self._trip_us = costs, fleet.trip_us
        self._random = random.Random(seed)
        self._each_ms = fleet.rate / fleet.shards / 1000
        self._enqueue_us = costs.task_us * ENQUEUE_PART
        self._fire_us = costs.task_us * (1 - ENQUEUE_PART)
        self._events: list[tuple[float, int, Callable[[Shard, float, int], None], Shard, int]] = []
        self._order = 0
        self._free_us = 0.0
        self.shards = [Shard() for _ in range(max(1, round(fleet.shards / fleet.masters)))]
        self.busy_us = 0.0
        self.late_ms: list[float] = []
        self.answered_ms: list[float] = []
        """Return the time from an enqueue to its answer."""
        self.batches, self.begun = 0, 0.0

    def play(self, seconds: float) -> None:
        for shard in self.shards:
            self._at(self._random.random() * 1000, self._frame, shard)
            self._at(self._random.random() * 1000, self._due, shard)
        while self._events and self._events[0][0] <= seconds * 1e6:
            now_us, _, happens, shard, count = heappop(self._events)
            happens(shard, now_us, count)

    def _at(
        self, when_us: float, happens: Callable[[Shard, float, int], None], shard: Shard,
        count: int = 0,
    ) -> None:  # fmt: skip
        self._order += 1
        heappush(self._events, (when_us, self._order, happens, shard, count))

    def _frame(self, shard: Shard, now_us: float, _: int) -> None:
        self._at(now_us + 1000, self._frame, shard)
        count = poisson(self._random, self._each_ms)
        if count:
            done_us = shard.work(now_us, count * self._enqueue_us)
            shard.open += count
            shard.waiting_us.append(now_us)
            self._begin(shard, done_us)

    def _due(self, shard: Shard, now_us: float, _: int) -> None:
        self._at(now_us + 1000, self._due, shard)
        count = poisson(self._random, self._each_ms)
        if count:
            done_us = shard.work(now_us, count * self._fire_us / 2)
            self.late_ms.append((done_us + self._trip_us / 2 - now_us) / 1000)
            self._at(done_us + self._trip_us, self._acks, shard, count)

    def _acks(self, shard: Shard, now_us: float, count: int) -> None:
        shard.open += count
        self._begin(shard, shard.work(now_us, count * self._fire_us / 2))

    def _begin(self, shard: Shard, now_us: float) -> None:
        """Send the open batch unless another one is on its way."""
        if shard.sent_us is not None or not shard.open:
            return
        left_us = shard.work(now_us, self._costs.batch_us)
        size, shard.open = shard.open, 0.0
        shard.sent_us, shard.waiting_us = shard.waiting_us, []
        cost_us = self._costs.redis_batch_us + size * self._costs.redis_task_us / 2
        self._free_us = max(self._free_us, left_us + self._trip_us / 2) + cost_us
        self.busy_us += cost_us
        self.batches, self.begun = self.batches + 1, self.begun + size
        self._at(self._free_us + self._trip_us / 2, self._answer, shard)

    def _answer(self, shard: Shard, now_us: float, _: int) -> None:
        since_us, shard.sent_us = shard.sent_us or (), None
        self.answered_ms += [(now_us + self._trip_us / 2 - at) / 1000 for at in since_us]
        self._begin(shard, now_us)


def poisson(rnd: random.Random, mean: float) -> int:
    """Return a random number of events with this mean. Large numbers are normally distributed."""
    if mean > 30:
        return max(0, round(rnd.gauss(mean, mean**0.5)))
    count, left = 0, rnd.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + rnd.expovariate(1.0)
    return count


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


# --- shown ---------------------------------------------------------------------------------------


def show(fleet: Fleet, costs: Costs, seconds: float) -> None:
    print(
        f"\none daemon: {costs.batch_us:.0f} us a batch and {costs.task_us:.2f} us a task"
        f" (enqueued, fired, acked); Redis: {costs.redis_batch_us:.0f} us a batch and"
        f" {costs.redis_task_us:.2f} us a task; a pending task: {costs.pending_bytes:.0f} B of the"
        f" daemon's memory, {costs.redis_pending_bytes:.0f} B of Redis's"
    )
    gib = 2**30
    print(
        f"\n{fleet.nodes} nodes, {fleet.shards} shards, {fleet.masters} masters,"
        f" {fleet.pending:,} pending, {fleet.rate:,} a second"
    )
    print(
        f"  memory: {fleet.pending * costs.redis_pending_bytes / fleet.masters / gib:,.0f} GiB a"
        f" master (and a replica), {fleet.pending * costs.pending_bytes / fleet.nodes / gib:,.1f}"
        f" GiB a node"
    )
    for masters in sorted({fleet.masters, fleet.masters * 3 // 2, fleet.masters * 2}):
        one = replace(fleet, masters=masters)
        master = Master(one, costs, seed=1)
        master.play(seconds)
        redis_busy = master.busy_us / seconds / 1e6
        daemon_busy = statistics.mean(shard.busy_us for shard in master.shards) / seconds / 1e6
        holds = max(redis_busy, daemon_busy) <= BUSY_MAX
        print(
            f"  {masters} masters: Redis {redis_busy:.0%} busy, a daemon {daemon_busy:.0%},"
            f" {master.begun / max(1, master.batches):.0f} in a batch; late p50"
            f" {percentile(master.late_ms, 0.5):.2f} ms, p99 {percentile(master.late_ms, 0.99):.2f}"
            f" ms; enqueue answered p99 {percentile(master.answered_ms, 0.99):.1f} ms"
            f"{'' if holds else '  <- no room'}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_paper", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--masters", type=int, default=8)
    parser.add_argument("--shards", type=int, default=64, help="of all nodes")
    parser.add_argument("--pending", type=int, default=1_000_000_000)
    parser.add_argument("--rate", type=int, default=1_000_000, help="tasks a second")
    parser.add_argument("--trip-us", type=float, default=200.0, help="a round trip, in us")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long it plays")
    options = parser.parse_args(arguments)
    redis = find_redis()
    if redis is None:
        print("no redis-server is installed", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-paper-", dir=choose_folder(None)))
    try:
        costs = measure(folder, redis[0])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    fleet = Fleet(
        options.nodes, options.masters, options.shards, options.pending, options.rate,
        options.trip_us,
    )  # fmt: skip
    show(fleet, costs, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
