"""The burst through the real client: what a consumer written in Python gets.

Two ways to finish a task: ``ack_nowait()`` (a future, nobody waits in line) and a handler a
delivery that awaits ``ack()``, many handlers at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any

from benchmarks.consume import GROUP
from benchmarks.payload import TOPIC
from benchmarks.scale import CONNECTIONS, RUN_TIMEOUT_S

HANDLERS = 256
"""Handlers of one subscription that may be running."""


class _Meter:
    """Counts confirmed acks until all are there."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.early = self.repeated = self.refused = 0
        self.done = asyncio.Event()
        self.last_s = 0.0

    def note(self, delivery: Any) -> None:
        self.early += delivery.delivered_ms < delivery.due_ms
        self.repeated += delivery.attempt > 1

    def confirmed(self, status: str) -> None:
        self.refused += status not in ("acked", "done")
        self.left -= 1
        if self.left <= 0:
            self.last_s = time.time()
            self.done.set()


async def _nowait(deliveries: Any, meter: _Meter) -> None:
    def confirmed(future: asyncio.Future[str]) -> None:
        meter.confirmed(future.result())

    async for delivery in deliveries:
        meter.note(delivery)
        delivery.ack_nowait().add_done_callback(confirmed)


async def _awaiting(deliveries: Any, meter: _Meter) -> None:
    room = asyncio.Semaphore(HANDLERS)

    async def handle(delivery: Any) -> None:
        try:
            meter.confirmed(await delivery.ack())
        finally:
            room.release()

    async with asyncio.TaskGroup() as handlers:
        async for delivery in deliveries:
            meter.note(delivery)
            await room.acquire()
            handlers.create_task(handle(delivery))


def client_burst(
    port: int, count: int, due_ms: int, prefetch: int, awaiting: bool
) -> Generator[None, None, dict[str, Any]]:
    """Deliveries of tasks due at one moment through ``tickwheel.client``."""
    from tickwheel.client import Client

    consume = _awaiting if awaiting else _nowait

    async def one(meter: _Meter, subscribed: asyncio.Semaphore) -> None:
        async with (
            Client(f"tcp://127.0.0.1:{port}") as client,
            client.subscribe(TOPIC, group=GROUP, prefetch=prefetch) as deliveries,
        ):
            subscribed.release()
            await consume(deliveries, meter)

    async def subscribe() -> tuple[_Meter, list[asyncio.Task[None]]]:
        meter, subscribed = _Meter(count), asyncio.Semaphore(0)
        tasks = [asyncio.create_task(one(meter, subscribed)) for _ in range(CONNECTIONS)]
        for _ in tasks:
            await asyncio.wait_for(subscribed.acquire(), RUN_TIMEOUT_S)
        return meter, tasks

    async def finish(meter: _Meter, tasks: list[asyncio.Task[None]]) -> None:
        over = asyncio.create_task(meter.done.wait())
        await asyncio.wait(
            {over, *tasks}, timeout=RUN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (over, *tasks):
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if meter.left > 0:
            wrong = next((end for end in ends if isinstance(end, Exception)), None)
            raise TimeoutError(f"{meter.left} of {count} acks are missing") from wrong

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        meter, tasks = runner.run(subscribe())
        yield
        cpu_s = time.process_time()
        runner.run(finish(meter, tasks))
        return {
            "elapsed_s": meter.last_s - due_ms / 1000,
            "client_cpu_s": time.process_time() - cpu_s,
            "count": count,
            "early": meter.early,
            "repeated": meter.repeated,
            "refused": meter.refused,
        }


def loop_factory() -> Any:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
