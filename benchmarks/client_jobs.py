"""Loads through the real client, as for a producer or consumer written in Python.

Enqueues come in large calls, or one by one from many coroutines. The burst has four ways to
finish a task: ``ack_nowait()`` (a future, nobody waits in line), a handler a delivery that awaits
``ack()``, many handlers at a time, as many loops over one subscription that do the same, and a
``Worker``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks import payload
from benchmarks.consume import GROUP, percentiles
from benchmarks.payload import TOPIC
from benchmarks.scale import CONNECTIONS, DUE_SPAN_S, RUN_TIMEOUT_S

if TYPE_CHECKING:
    from tickwheel.client import Client

FORWARD_LEAD_S = 4.0
"""Seconds from the first enqueue of forwarded tasks to the first due time."""
FORWARD_PER_CALL = 10_000
HANDLERS = 256
"""Maximum concurrent handlers of a subscription."""


class _Meter:
    """Counts confirmed acks until all have arrived."""

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


async def _looping(deliveries: Any, meter: _Meter) -> None:
    async def loop() -> None:
        async for delivery in deliveries:
            meter.note(delivery)
            meter.confirmed(await delivery.ack())

    async with asyncio.TaskGroup() as loops:
        for _ in range(HANDLERS):
            loops.create_task(loop())


def client_burst(
    port: int, count: int, due_ms: int, way: str, connections: int = CONNECTIONS
) -> Generator[None, None, dict[str, Any]]:
    """Deliveries of tasks due at one moment through ``tickwheel.client``, with its defaults.

    ``way`` is ack_nowait, await_ack (an asyncio task for each delivery), await_loop (tasks that
    share the subscription), or worker (a ``Worker`` whose handler only counts). ``connections`` is
    the number of clients.
    """
    from tickwheel.client import Client

    meter = _Meter(count)
    clients = [Client(f"tcp://127.0.0.1:{port}") for _ in range(connections)]
    consume = {"ack_nowait": _nowait, "await_ack": _awaiting, "await_loop": _looping}

    async def one(client: Client) -> None:
        async with client.subscribe(TOPIC, group=GROUP) as deliveries:
            await consume[way](deliveries, meter)

    async def subscribe() -> list[asyncio.Task[None]]:
        for client in clients:
            await client.connect()
        run = _work(clients, meter) if way == "worker" else [one(client) for client in clients]
        return [asyncio.create_task(consumer) for consumer in run]

    async def finish(tasks: list[asyncio.Task[None]]) -> None:
        over = asyncio.create_task(meter.done.wait())
        await asyncio.wait(
            {over, *tasks}, timeout=RUN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if way == "worker" and not meter.left:
            await asyncio.wait(tasks, timeout=RUN_TIMEOUT_S)
            meter.last_s = time.time()  # a worker ends when all its acks are confirmed
        for task in (over, *tasks):
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        if meter.left > 0:
            wrong = next((end for end in ends if isinstance(end, Exception)), None)
            raise TimeoutError(f"{meter.left} of {count} acks are missing") from wrong

    async def close() -> int:
        acked = (await clients[0].stats()).acked
        for client in clients:
            await client.close()
        return acked

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        tasks = runner.run(subscribe())
        while runner.run(_subscribers(clients[0])) < connections:
            assert not any(task.done() for task in tasks), tasks
        yield
        cpu_s = time.process_time()
        runner.run(finish(tasks))
        figures = {
            "elapsed_s": meter.last_s - due_ms / 1000,
            "client_cpu_s": time.process_time() - cpu_s,
            "count": count,
            "early": meter.early,
            "repeated": meter.repeated,
            "refused": meter.refused,
        }
        acked = runner.run(close())
        assert acked == count, f"{acked} of {count} tasks are acked"
        return figures


def _work(clients: list[Client], meter: _Meter) -> list[Coroutine[Any, Any, None]]:
    """Run a worker on each client, and stop all when the last handler has begun."""
    from tickwheel.client.worker import Worker

    workers = [Worker(client, signals=False) for client in clients]

    async def handle(delivery: Any) -> None:
        meter.note(delivery)
        meter.confirmed("acked")
        if not meter.left:
            for worker in workers:
                worker.stop()

    for worker in workers:
        worker.on(TOPIC, group=GROUP)(handle)
    return [worker.run() for worker in workers]


async def _subscribers(client: Client, name: str = TOPIC) -> int:
    topic = (await client.stats()).topics.get(name)
    return topic.groups[GROUP].subscribers if topic and GROUP in topic.groups else 0


def client_bulk(
    port: int,
    count: int,
    per_call: int,
    in_flight: int,
    seed: int,
    columns: bool,
    span_s: float = DUE_SPAN_S,
) -> Generator[None, None, dict[str, Any]]:
    """Large calls of one client, ``in_flight`` at a time: ``enqueue_columns``, or
    ``enqueue_many`` with Task objects."""
    from tickwheel.client import Client, Task

    def bodies_and_delays(number: int) -> tuple[list[bytes], list[float]]:
        texts = payload.bodies(seed + number)
        bodies = [texts[i % len(texts)] for i in range(per_call)]
        return bodies, payload.delays_s(per_call, seed + number, span_s)

    def tasks(number: int) -> list[Task]:
        pairs = zip(*bodies_and_delays(number), strict=True)
        return [Task(TOPIC, body, delay=delay) for body, delay in pairs]

    client = Client(f"tcp://127.0.0.1:{port}")

    async def put_columns(calls: Iterator[tuple[list[bytes], list[float]]]) -> None:
        for bodies, delays in calls:
            receipts = await client.enqueue_columns(TOPIC, bodies, delays=delays)
            assert len(receipts) == per_call

    async def put_tasks(calls: Iterator[list[Task]]) -> None:
        for some in calls:
            receipts = await client.enqueue_many(some)
            assert len(receipts) == per_call

    async def run(put: Callable[[Any], Coroutine[Any, Any, None]], calls: Iterator[Any]) -> None:
        # One iterator for all: whoever is free takes the next call.
        await asyncio.gather(*(put(calls) for _ in range(in_flight)))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_connect(client))
        made: Iterator[Any] = payload.in_calls(
            bodies_and_delays if columns else tasks, count, per_call
        )
        yield
        figures = timed(runner, run(put_columns if columns else put_tasks, made), count)
        runner.run(_close(client, count))
        return figures


def client_single(
    port: int, count: int, callers: int, seed: int
) -> Generator[None, None, dict[str, Any]]:
    """Let ``callers`` coroutines share a client. Each awaits one enqueue after the other."""
    from tickwheel.client import Client

    texts, delays = payload.bodies(seed), payload.delays_s(count, seed)
    tasks = [(texts[i % len(texts)], delay) for i, delay in enumerate(delays)]
    client = Client(f"tcp://127.0.0.1:{port}")

    async def put(share: list[tuple[bytes, float]]) -> None:
        for body, delay in share:
            await client.enqueue(TOPIC, body, delay=delay)

    async def run(shares: list[list[tuple[bytes, float]]]) -> None:
        await asyncio.gather(*(put(share) for share in shares))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_connect(client))
        shares = [tasks[start::callers] for start in range(callers)]
        yield
        figures = timed(runner, run(shares), count)
        runner.run(_close(client, count))
        return figures


def client_sequential(port: int, count: int, seed: int) -> Generator[None, None, dict[str, Any]]:
    """Await one enqueue after the other in one coroutine."""
    from tickwheel.client import Client

    texts, delays = payload.bodies(seed), payload.delays_s(count, seed)
    client = Client(f"tcp://127.0.0.1:{port}")
    latencies_ms: list[float] = []

    async def run() -> None:
        for number, delay in enumerate(delays):
            began_s = time.perf_counter()
            await client.enqueue(TOPIC, texts[number % len(texts)], delay=delay)
            latencies_ms.append((time.perf_counter() - began_s) * 1000)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_connect(client))
        yield
        figures = timed(runner, run(), count)
        runner.run(_close(client, count))
        return {**figures, "latency_ms": percentiles(latencies_ms)}


def client_sequential_acks(
    port: int, count: int, seed: int
) -> Generator[None, None, dict[str, Any]]:
    """Await ``ack()`` for one task after the other in the only loop of a subscription. All tasks
    are ready when it begins."""
    from tickwheel.client import Client, Task

    texts = payload.bodies(seed)
    client = Client(f"tcp://127.0.0.1:{port}")

    async def fill() -> None:
        await client.connect()
        await client.create_group(TOPIC, GROUP)
        await client.enqueue_many([Task(TOPIC, texts[n % len(texts)]) for n in range(count)])

    async def run() -> None:
        done = 0
        async with client.subscribe(TOPIC, group=GROUP) as deliveries:
            async for delivery in deliveries:
                assert await delivery.ack() == "acked"
                done += 1
                if done == count:
                    return

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(fill())
        yield
        figures = timed(runner, run(), count)
        runner.run(_close(client, 0))
        return figures


def client_consume(
    port: int,
    count: int,
    warm_up_s: float,
    topic: str = TOPIC,
    within_s: float = RUN_TIMEOUT_S,
) -> Generator[None, None, dict[str, Any]]:
    """Run a ``Worker`` whose handler records the lateness of each task after the warm-up."""
    from tickwheel.client import Client
    from tickwheel.client.worker import Worker

    client = Client(f"tcp://127.0.0.1:{port}")
    worker = Worker(client, signals=False)
    late_ms: list[float] = []
    early = left = 0

    @worker.on(topic, group=GROUP)
    async def handle(delivery: Any) -> None:
        nonlocal early, left
        now_ms = time.time() * 1000
        early += now_ms < delivery.due_ms or delivery.delivered_ms < delivery.due_ms
        if delivery.due_ms >= from_ms:
            late_ms.append(now_ms - delivery.due_ms)
        left -= 1
        if not left:
            worker.stop()

    async def begin() -> asyncio.Task[None]:
        await client.connect()
        return asyncio.create_task(worker.run())

    async def finish(running: asyncio.Task[None]) -> None:
        await asyncio.wait_for(running, within_s)
        await client.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        left, from_ms = count, 0.0
        running = runner.run(begin())
        while not runner.run(_subscribers(client, topic)):
            assert not running.done(), running
        yield
        from_ms = (time.time() + warm_up_s) * 1000
        figures = timed(runner, finish(running), count)
        return {**figures, "early": early, "client_late_ms": percentiles(late_ms)}


def client_forward(
    port: int, count: int, rate: int, target: str, prefetch: int | None = None
) -> Generator[None, None, dict[str, Any]]:
    """Run a forwarder's ``Runner``, and record the lateness of each task when the target has
    confirmed it. The tasks are enqueued before and come due at an even rate."""
    from tickwheel.client import Client
    from tickwheel.outbound.runner import Runner
    from tickwheel.outbound.target import target_of

    client = Client(f"tcp://127.0.0.1:{port}")
    late_ms: list[float] = []
    early = repeated = 0
    over = asyncio.Event()

    def settled(delivery: Any, outcome: Any, word: str) -> None:
        nonlocal early, repeated
        assert word == "acked", outcome
        late_ms.append(time.time() * 1000 - delivery.due_ms)
        early += delivery.delivered_ms < delivery.due_ms
        repeated += delivery.attempt > 1
        if len(late_ms) == count:
            over.set()

    async def fill() -> Runner:
        await client.connect()
        await client.create_group(TOPIC, GROUP)
        texts, first_s = payload.bodies(rate), time.time() + FORWARD_LEAD_S
        for start in range(0, count, FORWARD_PER_CALL):
            numbers = range(start, min(start + FORWARD_PER_CALL, count))
            now_s = time.time()
            delays = [first_s + number / rate - now_s for number in numbers]
            bodies = [texts[number % len(texts)] for number in numbers]
            await client.enqueue_columns(TOPIC, bodies, delays=delays)
        assert time.time() < first_s, "the first ones are due before all are enqueued"
        to = target_of(target)
        return Runner(client, TOPIC, GROUP, to, prefetch=prefetch, on_settled=settled)

    async def forward(forwarder: Runner) -> None:
        running = asyncio.create_task(forwarder.run())
        waiting = asyncio.create_task(over.wait())
        await asyncio.wait(
            {running, waiting}, timeout=RUN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        await forwarder.stop()
        await running
        await client.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        forwarder = runner.run(fill())
        yield
        figures = timed(runner, forward(forwarder), count)
        assert len(late_ms) == count, f"{count - len(late_ms)} of {count} were not forwarded"
        lateness = {"late_ms": percentiles(late_ms), "early": early, "repeated": repeated}
        return {**figures, **lateness, "batch": count / max(1, forwarder.batches)}


def client_transactions(
    port: int, count: int, per_call: int, callers: int, seed: int, plain: bool
) -> Generator[None, None, dict[str, Any]]:
    """Let ``callers`` coroutines of a client each run one transaction of ``per_call`` tasks after
    the other, or the same calls without transactions if ``plain``."""
    from tickwheel.client import Client, Task

    texts, delays = payload.bodies(seed), payload.delays_s(count, seed)
    tasks = [Task(TOPIC, texts[i % len(texts)], delay=delay) for i, delay in enumerate(delays)]
    calls = [tasks[start : start + per_call] for start in range(0, count, per_call)]
    client = Client(f"tcp://127.0.0.1:{port}")

    async def put(share: list[list[Task]]) -> None:
        for some in share:
            if plain:
                await client.enqueue_many(some)
                continue
            async with client.transaction("benchmark") as transaction:
                await transaction.enqueue_many(some)

    async def run(shares: list[list[list[Task]]]) -> None:
        await asyncio.gather(*(put(share) for share in shares))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_connect(client))
        shares = [calls[start::callers] for start in range(callers)]
        yield
        figures = timed(runner, run(shares), count)
        runner.run(_close(client, count))
        return figures


async def _connect(client: Client) -> None:
    await client.connect()


async def _close(client: Client, count: int) -> None:
    """Return the figures after a check that they are complete."""
    pending = (await client.stats()).scheduled
    await client.close()
    assert pending == count, f"{pending} of {count} tasks are pending"


def timed(runner: asyncio.Runner, work: Coroutine[Any, Any, None], count: int) -> dict[str, Any]:
    """Run a coroutine. Return the figures of ``count`` tasks."""
    cpu_s, started_s = time.process_time(), time.perf_counter()
    runner.run(work)
    elapsed_s = time.perf_counter() - started_s
    client_cpu_s = time.process_time() - cpu_s
    return {"elapsed_s": elapsed_s, "client_cpu_s": client_cpu_s, "count": count}


def loop_factory() -> Any:
    """Return uvloop's event loop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
