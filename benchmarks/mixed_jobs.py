"""A mixed load through the client: many topics with several groups each, and some failures.

The producer keeps a steady rate; what it could not keep up with is its ``behind_ms``. Consumers
nack a share of all first attempts, which come again a second later, and ack everything else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextlib import AsyncExitStack
from typing import Any

from benchmarks import payload
from benchmarks.client_jobs import loop_factory
from benchmarks.scale import CONNECTIONS, RUN_TIMEOUT_S

Job = Generator[None, None, dict[str, Any]]

STEP_S = 0.01
_IN_FLIGHT = 32
_RETRY_S = 1.0


def topic_name(number: int) -> str:
    return f"mixed.{number}"


async def paced(
    put: Callable[[int], Coroutine[Any, Any, None]], steps: int, until_s: float = float("inf")
) -> tuple[int, float]:
    """Call ``put`` with the number of each step, every ``STEP_S``, with at most ``_IN_FLIGHT``
    unfinished calls. Return the number of calls, which is lower if ``until_s`` is over before, and
    the maximum delay of a call in s."""
    room, started_s, behind_s = asyncio.Semaphore(_IN_FLIGHT), time.perf_counter(), 0.0

    async def call(step: int) -> None:
        try:
            await put(step)
        finally:
            room.release()

    async with asyncio.TaskGroup() as calls:
        for step in range(steps):
            early_s = started_s + step * STEP_S - time.perf_counter()
            behind_s = max(behind_s, -early_s)
            await asyncio.sleep(max(0.0, early_s))
            await room.acquire()
            if time.perf_counter() - started_s > until_s:
                return step, behind_s
            calls.create_task(call(step))
    return steps, behind_s


def mixed_produce(
    port: int, topics: int, rate: int, seconds: float, delay_s: tuple[float, float], seed: int
) -> Job:
    """Enqueue ``rate`` tasks per second over all topics, due within ``delay_s``, every 10 ms."""
    from tickwheel.client import Client, Task

    source, texts = random.Random(seed), payload.bodies(seed)
    client = Client(f"tcp://127.0.0.1:{port}")
    per_step = int(rate * STEP_S)
    steps = round(seconds / STEP_S)

    async def put(step: int) -> None:
        first = step * per_step
        tasks = [
            Task(topic_name(n % topics), texts[n % len(texts)], delay=source.uniform(*delay_s))
            for n in range(first, first + per_step)
        ]
        await client.enqueue_many(tasks)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_connect(client))
        yield
        cpu_s, started_s = time.process_time(), time.perf_counter()
        _, behind_s = runner.run(paced(put, steps))
        figures = {
            "count": steps * per_step,
            "elapsed_s": time.perf_counter() - started_s,
            "client_cpu_s": time.process_time() - cpu_s,
            "behind_ms": behind_s * 1000,
        }
        runner.run(client.close())
        return figures


class _Seen:
    """The consumers' deliveries so far. Lateness is counted per millisecond to save memory."""

    def __init__(self, wanted: int) -> None:
        self.left = wanted
        self.done = asyncio.Event()
        self.late_ms: Counter[int] = Counter()
        self.early = self.nacked = self.refused = self.repeated = 0

    def acked(self, ack: asyncio.Future[str]) -> None:
        self.refused += ack.result() != "acked"
        self.left -= 1
        if not self.left:
            self.done.set()


def mixed_consume(
    port: int, topics: int, groups: int, count: int, nack_share: float, seconds: float, seed: int
) -> Job:
    """Consume in all groups of all topics until each has acked its share of ``count`` tasks."""
    from tickwheel.client import Client

    source = random.Random(seed)
    seen = _Seen(count * groups)
    clients = [Client(f"tcp://127.0.0.1:{port}") for _ in range(CONNECTIONS)]
    nacks: set[asyncio.Task[str]] = set()

    async def read(subscription: Any) -> None:
        async for delivery in subscription:
            if delivery.attempt == 1:
                seen.late_ms[delivery.delivered_ms - delivery.due_ms] += 1
                if source.random() < nack_share:
                    seen.nacked += 1
                    nack = asyncio.create_task(delivery.nack(_RETRY_S))
                    nacks.add(nack)
                    nack.add_done_callback(nacks.discard)
                    continue
            seen.repeated += delivery.attempt > 2
            delivery.ack_nowait().add_done_callback(seen.acked)

    async def subscribe() -> list[asyncio.Task[None]]:
        readers = []
        for client in clients:
            await client.connect()
        for number in range(topics * groups):
            topic, group = topic_name(number % topics), f"group-{number // topics}"
            subscription = clients[number % CONNECTIONS].subscribe(topic, group=group)
            readers.append(asyncio.create_task(read(await subscription.start())))
        return readers

    async def finish(readers: list[asyncio.Task[None]]) -> None:
        over = asyncio.create_task(seen.done.wait())
        limit_s = seconds + RUN_TIMEOUT_S / 2
        await asyncio.wait({over, *readers}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        async with AsyncExitStack() as closing:
            for client in clients:
                closing.push_async_callback(client.close)
            for task in (over, *readers):
                task.cancel()
            ends = await asyncio.gather(*readers, return_exceptions=True)
        if seen.left > 0:
            wrong = next((end for end in ends if isinstance(end, Exception)), None)
            raise TimeoutError(f"{seen.left} of {count * groups} acks are missing") from wrong

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        readers = runner.run(subscribe())
        yield
        cpu_s = time.process_time()
        runner.run(finish(readers))
        return {
            "count": count * groups,
            "client_cpu_s": time.process_time() - cpu_s,
            "late_ms": _spread(seen.late_ms),
            "early": sum(number for late_ms, number in seen.late_ms.items() if late_ms < 0),
            "nacked": seen.nacked,
            "refused": seen.refused,
            "repeated": seen.repeated,
        }


async def _connect(client: Any) -> None:
    await client.connect()


def _spread(counts: Counter[int]) -> dict[str, float]:
    """Return p50, p99 and maximum of the counted values."""
    left = {"p50": counts.total() * 0.50, "p99": counts.total() * 0.99}
    result: dict[str, float] = {}
    passed = 0
    for value, number in sorted(counts.items()):
        passed += number
        for name, place in left.items():
            if name not in result and passed >= place:
                result[name] = value
    return {**result, "max": max(counts)}
