"""A little of everything, so that every metric has a value.

    PYTHONPATH=tests python -m observe.load tcp://127.0.0.1:7355 [TASKS_A_SECOND]

Runs until it is ended: tasks of several topics with delays, acks, nacks that are retried or end
as dead letters, cancels, times to live that pass, a broadcast, a topic that nobody consumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from typing import NamedTuple

from support.waiting import rest
from tickwheel import Client, Retry, Task

TICK_S = 0.05
QUICK_RETRY = Retry.fixed(0.3, retries=1)


class Consumer(NamedTuple):
    topic: str
    group: str
    fails_every: int = 0
    """Every so manieth delivery is nacked; 0: none."""


CONSUMERS = (
    Consumer("orders.close", "billing"),
    Consumer("orders.close", "mail", fails_every=7),
    Consumer("reports.daily", "default", fails_every=2),
    Consumer("carts.remind", "default"),
)
UNCONSUMED = "audit.archive"
BROADCAST = "prices.changed"


async def consume(client: Client, consumer: Consumer) -> None:
    topic, group, fails_every = consumer
    subscription = client.subscribe(topic, group=group, retry=QUICK_RETRY)
    count = 0
    async for delivery in subscription:
        count += 1
        if fails_every and count % fails_every == 0:
            await delivery.nack(reason="the mail server said no")
        else:
            delivery.ack_nowait()


async def listen(client: Client) -> None:
    async for _ in client.subscribe(BROADCAST, group="", broadcast=True):
        pass


async def produce(client: Client, per_s: float) -> None:
    """A few tasks every tick; one of ten is cancelled, one of ten is not wanted for long."""
    topics = itertools.cycle([*(consumer.topic for consumer in CONSUMERS), UNCONSUMED, BROADCAST])
    delays_s = itertools.cycle([0.0, 0.1, 0.25, 0.5, 1.0, 2.0])
    customers = itertools.cycle(range(500))
    per_tick = max(6, round(per_s * TICK_S))
    while True:
        tasks = [
            Task(topic, b"{}", delay=next(delays_s), key=f"customer-{next(customers)}")
            for topic in _some(topics, per_tick)
        ]
        receipts = await client.enqueue_many(tasks)
        await client.cancel_many([receipt.id for receipt in receipts[::10]])
        await client.enqueue(UNCONSUMED, b"{}", delay=0.2, ttl=0.2)
        await rest(TICK_S)


def _some(topics: itertools.cycle[str], count: int) -> list[str]:
    return list(itertools.islice(topics, count))


async def run(url: str, per_s: float) -> None:
    async with Client(url, name="load") as producer, Client(url, name="consumers") as client:
        await producer.create_group(UNCONSUMED, "default")
        async with asyncio.TaskGroup() as group:
            for consumer in CONSUMERS:
                group.create_task(consume(client, consumer))
            group.create_task(listen(client))
            group.create_task(produce(producer, per_s))


async def main(url: str, per_s: float) -> None:
    work = asyncio.ensure_future(run(url, per_s))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 200.0))
