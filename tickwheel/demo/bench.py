"""The load of ``tickwheel bench``: producers and consumers on one daemon, measured, bounded.

A topic of its own for each run; what a run enqueues it also consumes. The numbers are a
client's: they include this process's own work, and this process is often the slower side.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tickwheel.api.words import AckWord
from tickwheel.client import Client, Delivery, Receipt, Task
from tickwheel.errors import NotFound, TickwheelError

GROUP = "bench"
UNANSWERED_MAX = 512
"""Enqueues under way at a time when each task is a call of its own."""
BATCH_TASKS = 1_000
PREFETCH = 2_048
LEAD_S = 1.0
"""How long before its due time, in seconds, a task of the lateness run is enqueued."""


@dataclass
class Result:
    """What one run measured. A rate of None was not measured."""

    tasks: int = 0
    enqueue_single_per_s: float = 0.0
    enqueue_batched_per_s: float = 0.0
    delivery_per_s: float = 0.0
    early: int = 0
    late_ms: list[int] = field(default_factory=list)


class Bench:
    """One run against one daemon."""

    def __init__(self, client: Client, topic: str, body_bytes: int) -> None:
        self._client = client
        self._topic = topic
        self._body = b"x" * body_bytes
        self.result = Result()

    async def enqueue_single(self, count: int) -> None:
        """Enqueue each task in a call of its own, many under way; the client may merge calls."""
        began = time.monotonic()
        waiting: deque[asyncio.Future[Receipt]] = deque()
        for _ in range(count):
            if len(waiting) >= UNANSWERED_MAX:
                await waiting.popleft()
            waiting.append(self._client.enqueue_nowait(self._topic, self._body, delay=0))
        await asyncio.gather(*waiting)
        self.result.enqueue_single_per_s = _rate(count, began)
        self.result.tasks += count

    async def enqueue_batched(self, count: int) -> None:
        """Enqueue tasks in lists."""
        began = time.monotonic()
        for start in range(0, count, BATCH_TASKS):
            size = min(BATCH_TASKS, count - start)
            await self._client.enqueue_many(
                [Task(self._topic, self._body, delay=0) for _ in range(size)]
            )
        self.result.enqueue_batched_per_s = _rate(count, began)
        self.result.tasks += count

    async def deliver(self, count: int) -> None:
        """Take and ack what is due already, until the last ack is durable."""
        began = time.monotonic()
        await self._consume(count, lambda delivery: None)
        self.result.delivery_per_s = _rate(count, began)

    async def lateness(self, per_s: int, seconds: float) -> None:
        """Enqueue tasks at an even rate, each due a little later, while they are consumed."""
        count = int(per_s * seconds)
        consuming = asyncio.create_task(self._consume(count, self._note))
        began = time.monotonic()
        first_ms = time.time_ns() // 1_000_000 + int(LEAD_S * 1000)
        waiting: set[asyncio.Future[Receipt]] = set()
        try:
            for number in range(count):
                ahead_s = began + number / per_s - time.monotonic()
                if ahead_s > 0.002:
                    await asyncio.sleep(ahead_s)
                late_ms = time.time_ns() // 1_000_000 - first_ms + int(LEAD_S * 1000)
                offset_ms = number * 1000 / per_s - late_ms
                delay_s = max(0.0, LEAD_S + offset_ms / 1000)
                future = self._client.enqueue_nowait(self._topic, self._body, delay=delay_s)
                waiting.add(future)
                future.add_done_callback(waiting.discard)
                if len(waiting) >= UNANSWERED_MAX * 4:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*waiting)
            await consuming
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        self.result.tasks += count

    async def clear(self) -> None:
        """Delete the group with what a failed run left in it."""
        with contextlib.suppress(NotFound):
            await self._client.delete_group(self._topic, GROUP, force=True)

    def _note(self, delivery: Delivery) -> None:
        late_ms = delivery.delivered_ms - delivery.due_ms
        self.result.early += late_ms < 0
        self.result.late_ms.append(late_ms)

    async def _consume(self, count: int, note: Callable[[Delivery], None]) -> None:
        acks: set[asyncio.Future[AckWord]] = set()
        stream = self._client.subscribe(self._topic, group=GROUP, prefetch=PREFETCH)
        async with stream as deliveries:
            async for delivery in _first(deliveries, count):
                note(delivery)
                ack = delivery.ack_nowait()
                acks.add(ack)
                ack.add_done_callback(acks.discard)
            failed = [
                found
                for found in await asyncio.gather(*acks, return_exceptions=True)
                if isinstance(found, TickwheelError)
            ]
        if failed:
            raise failed[0]


async def _first(deliveries: AsyncIterator[Delivery], count: int) -> AsyncIterator[Delivery]:
    """The first ``count`` different tasks, and those that are delivered twice meanwhile."""
    seen: set[int] = set()
    while len(seen) < count:
        delivery = await anext(deliveries)
        seen.add(delivery.id)
        yield delivery


def _rate(count: int, began: float) -> float:
    return count / max(time.monotonic() - began, 0.000_001)


def percentile(values: list[int], share: float) -> int:
    """The percentile by nearest rank; 0: there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0
