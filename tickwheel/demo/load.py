"""The work of the demonstration: a producer, consumers, and their own books.

The books are the clients' alone: what the daemon confirmed, what it delivered, which acks it
confirmed. At the end they say whether anything was lost or early.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from tickwheel.client import Client, Delivery, Receipt
from tickwheel.errors import TickwheelError

TOPIC = "demo.orders"
GROUP = "billing"
FAILS_TWICE_EVERY = 500
CONSUMERS = 2


@dataclass
class Books:
    """What producer and consumers saw."""

    due_ms: dict[int, int] = field(default_factory=dict)
    """Confirmed tasks and when they are due."""
    deliveries: dict[int, int] = field(default_factory=dict)
    nacked: int = 0
    acked: set[int] = field(default_factory=set)
    """Tasks whose ack was confirmed."""
    early: int = 0
    late_ms: list[int] = field(default_factory=list)
    """Of first deliveries."""
    due_of_late: list[int] = field(default_factory=list)
    """The due times that belong to ``late_ms``."""
    refused: int = 0
    """Enqueues that failed in the end; the producer was told."""

    @property
    def duplicates(self) -> int:
        """Deliveries that were neither the first one nor asked for by a nack."""
        return sum(self.deliveries.values()) - len(self.deliveries) - self.nacked

    @property
    def lost(self) -> int:
        return len(self.due_ms.keys() - self.acked)


def percentile(values: list[int], share: float) -> int:
    """Nearest rank; 0 for nothing."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def produce(client: Client, books: Books, tasks: int, seconds: float, seed: int) -> None:
    """``tasks`` enqueues, evenly over ``seconds``, each due 1 to 5 s later."""
    random_ = random.Random(seed)
    began = time.monotonic()
    waiting: set[asyncio.Future[Receipt]] = set()

    def confirmed(future: asyncio.Future[Receipt]) -> None:
        waiting.discard(future)
        if future.cancelled() or future.exception() is not None:
            books.refused += 1
        else:
            receipt = future.result()
            books.due_ms[receipt.id] = receipt.due_ms

    for number in range(tasks):
        wait_s = began + number * seconds / tasks - time.monotonic()
        if wait_s > 0.001:
            await asyncio.sleep(wait_s)
        fails = number % FAILS_TWICE_EVERY == 0
        body = f"order {number}{' fails twice' if fails else ''}".encode()
        future = client.enqueue_nowait(TOPIC, body, delay=random_.uniform(1.0, 5.0))
        waiting.add(future)
        future.add_done_callback(confirmed)
    while waiting:
        await asyncio.wait(set(waiting))


async def consume(client: Client, books: Books) -> None:
    """Ack what comes; what says so fails twice first. Until cancelled."""
    async with client.subscribe(TOPIC, group=GROUP, prefetch=512) as deliveries:
        async for delivery in deliveries:
            _note(books, delivery)
            if delivery.body.endswith(b"fails twice") and delivery.attempt <= 2:
                books.nacked += 1
                _watch(asyncio.ensure_future(delivery.nack(reason="it always fails twice")))
            else:
                _confirm(books, delivery)


def _note(books: Books, delivery: Delivery) -> None:
    seen = books.deliveries.get(delivery.id, 0)
    books.deliveries[delivery.id] = seen + 1
    late_ms = delivery.delivered_ms - delivery.due_ms
    if late_ms < 0 or time.time_ns() // 1_000_000 < delivery.due_ms:
        books.early += 1
    if not seen:
        books.late_ms.append(late_ms)
        books.due_of_late.append(delivery.due_ms)


def _confirm(books: Books, delivery: Delivery) -> None:
    def done(future: asyncio.Future[str]) -> None:
        if not future.cancelled() and future.exception() is None:
            if future.result() in ("acked", "done"):
                books.acked.add(delivery.id)

    delivery.ack_nowait().add_done_callback(done)


def _watch(future: asyncio.Future[str]) -> None:
    """A nack that is lost with its connection is no news: the lease ends, the task comes back."""
    future.add_done_callback(
        lambda f: None if f.cancelled() or isinstance(f.exception(), TickwheelError) else f.result()
    )
