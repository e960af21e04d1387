"""The load process of procrastinate, with the interpreter of its own environment. Bulk is
``batch_defer_async``, which has one due time for a call; finished jobs are deleted."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from benchmarks import payload
from benchmarks.client_jobs import loop_factory, timed
from benchmarks.consume import percentiles
from benchmarks.load import main
from benchmarks.mixed_jobs import STEP_S, paced
from benchmarks.payload import Job
from benchmarks.scale import CONNECTIONS

_CONCURRENT = 24
_PER_CALL = 1_000
_POLL_S = 0.01
"""Due jobs are polled for, by default every 5 s; only new jobs are notified."""
_SEED = 1
_UNFINISHED = "SELECT count(*) AS n FROM procrastinate_jobs"


class _Queue:
    """An open application with one task, which calls ``begun`` with its due time in ms."""

    def __init__(self, port: int, connections: int, begun: Callable[[int], None]) -> None:
        import procrastinate

        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        size = {"min_size": connections, "max_size": connections}
        connector = procrastinate.PsycopgConnector(conninfo=self.url, **size)
        self.app = procrastinate.App(connector=connector)

        @self.app.task(name="bench")
        async def bench(body: str, due_ms: int) -> None:
            begun(due_ms)

        self._task: Any = bench
        self._bodies = [body.decode() for body in payload.bodies(_SEED)]

    async def open(self) -> None:
        await self.app.open_async()
        if not await self.app.check_connection_async():
            await self.app.schema_manager.apply_schema_async()

    async def put(self, count: int, due_s: float) -> None:
        due_ms, bodies = int(due_s * 1000), self._bodies
        jobs = [{"body": bodies[i % len(bodies)], "due_ms": due_ms} for i in range(count)]
        at = datetime.fromtimestamp(due_ms / 1000, UTC)
        await self._task.configure(schedule_at=at).batch_defer_async(*jobs)

    async def work(self, *, wait: bool) -> None:
        await self.app.run_worker_async(
            concurrency=_CONCURRENT,
            delete_jobs="always",
            fetch_job_polling_interval=_POLL_S,
            install_signal_handlers=False,
            wait=wait,
        )

    async def unfinished(self) -> int:
        return int((await self.app.connector.execute_query_one_async(_UNFINISHED))["n"])


def _opened(
    runner: asyncio.Runner,
    port: int,
    connections: int,
    begun: Callable[[int], None] = lambda due_ms: None,
) -> _Queue:
    queue = _Queue(port, connections, begun)
    runner.run(queue.open())
    return queue


async def _put_all(queue: _Queue, calls: list[float], per_call: int, in_flight: int) -> None:
    """Defer ``per_call`` jobs for each due time."""
    left = iter(calls)

    async def caller() -> None:
        for due_s in left:
            await queue.put(per_call, due_s)

    await asyncio.gather(*(caller() for _ in range(in_flight)))


def bulk(port: int, count: int, per_call: int, in_flight: int) -> Job:
    """Defer ``count`` jobs that are due over the span."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        queue = _opened(runner, port, in_flight)
        calls = [time.time() + delay_s for delay_s in payload.delays_s(count // per_call, _SEED)]
        yield
        figures = timed(runner, _put_all(queue, calls, per_call, in_flight), count)
        stored = runner.run(queue.unfinished())
        assert stored == count, f"{stored} of {count} jobs"
        return figures


def burst(port: int, count: int) -> Job:
    """Run a worker until no job is left. All are due before it starts."""
    import psycopg

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        queue = _opened(runner, port, CONNECTIONS + _CONCURRENT)
        per_call = min(count, _PER_CALL)
        calls = [time.time()] * (count // per_call)
        runner.run(_put_all(queue, calls, per_call, CONNECTIONS))
        with psycopg.connect(queue.url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
        yield
        figures = timed(runner, queue.work(wait=False), count)
        left = runner.run(queue.unfinished())
        assert left == 0, f"{left} of {count} jobs are left"
        return figures


def produce(port: int, rate: int, seconds: float, delay_s: tuple[float, float]) -> Job:
    """Defer ``rate`` jobs per second in calls every 10 ms, until the time is over."""
    source, per_call = random.Random(_SEED), int(rate * STEP_S)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        queue = _opened(runner, port, CONNECTIONS)
        sent, behind_s = 0, 0.0

        async def put(step: int) -> None:
            await queue.put(per_call, time.time() + source.uniform(*delay_s))

        async def run() -> None:
            nonlocal sent, behind_s
            steps, behind_s = await paced(put, round(seconds / STEP_S), until_s=seconds)
            sent = steps * per_call

        yield
        figures = timed(runner, run(), 0)
        return {**figures, "count": sent, "behind_ms": behind_s * 1000}


def consume(port: int, count: int, seconds: float, warm_up_s: float) -> Job:
    """Run a worker until ``count`` jobs have begun, or for ``seconds``. The time ends with the last
    that has begun."""
    late_ms: list[float] = []
    left, from_ms, last_s, over = count, 0.0, 0.0, asyncio.Event()

    def begun(due_ms: int) -> None:
        nonlocal left, last_s
        last_s = time.perf_counter()
        if due_ms >= from_ms:
            late_ms.append(time.time() * 1000 - due_ms)
        left -= 1
        if left == 0:
            over.set()

    async def run(working: asyncio.Task[None]) -> None:
        waiting = asyncio.create_task(over.wait())
        await asyncio.wait({waiting, working}, timeout=seconds, return_when="FIRST_COMPLETED")
        assert not working.done(), working

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(queue.work(wait=True))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        queue = _opened(runner, port, CONNECTIONS + _CONCURRENT, begun)
        working = runner.run(start())
        yield
        from_ms, started_s = (time.time() + warm_up_s) * 1000, time.perf_counter()
        figures = timed(runner, run(working), count)
        took = {"count": count - left, "elapsed_s": last_s - started_s}
        return {**figures, **took, "late_ms": percentiles(late_ms)}


if __name__ == "__main__":
    logging.getLogger("procrastinate").setLevel(logging.ERROR)
    sys.exit(main({job.__name__: job for job in (bulk, burst, produce, consume)}))
