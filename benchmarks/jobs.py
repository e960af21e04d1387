"""The jobs of a load process. Each job prepares (encodes, connects), then runs on command.

A job is a generator function: the ``yield`` is where it is ready and waits for the start; it
returns its figures as plain JSON values.
"""

from __future__ import annotations

import array
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import payload
from benchmarks.by_id_jobs import by_id, by_key, nack
from benchmarks.client_jobs import (
    client_bulk,
    client_burst,
    client_consume,
    client_forward,
    client_sequential,
    client_sequential_acks,
    client_single,
    client_transactions,
)
from benchmarks.consume import BeanstalkdConsumer, TickwheelConsumer, percentiles
from benchmarks.environment import syncs_s
from benchmarks.http_jobs import http_lines, http_put
from benchmarks.mixed_jobs import mixed_consume, mixed_produce
from benchmarks.payload import Job, shares
from benchmarks.postgres_jobs import (
    postgres_burst,
    postgres_copy,
    postgres_fill,
    postgres_insert,
    postgres_watch,
)
from benchmarks.pump import Stream, one_by_one, timed_pump
from benchmarks.redis_jobs import redis_py_async, redis_py_sync
from benchmarks.scale import CONNECTIONS, RUN_TIMEOUT_S
from benchmarks.wire import (
    Control,
    FrameCounter,
    check_inserted,
    connect,
    count_lines,
    results,
)
from tickwheel.api.frames import FrameType


def tickwheel_put(
    port: int,
    count: int,
    tasks_per_frame: int,
    window: int,
    seed: int,
    due_ms: int | None = None,
    ids_file: str | None = None,
    connections: int = CONNECTIONS,
    keyed: bool = False,
    shape: str | None = None,
) -> Job:
    """Send pipelined durable enqueues. Optionally write the ids to a file of int64."""
    streams = [
        Stream(
            Control(port, session=True).sock,
            payload.enqueue_frames(
                share, tasks_per_frame, window, seed + index, due_ms, keyed=keyed, shape=shape
            ),
            window,
            FrameCounter(),
        )
        for index, share in enumerate(shares(count, connections))
    ]
    yield
    figures = timed_pump(streams)
    ids = array.array("q")
    for stream in streams:
        for _, some in results(stream.replies):
            ids.extend(some)
    assert len(set(ids)) == count, f"{len(set(ids))} different ids for {count} tasks"
    if ids_file is not None:
        Path(ids_file).write_bytes(ids.tobytes())
    return {**figures, "count": count}


def beanstalkd_put(
    port: int,
    count: int,
    window: int,
    seed: int,
    delay_s: int | None = None,
    connections: int = CONNECTIONS,
) -> Job:
    """Send pipelined ``put`` commands."""
    streams = [
        Stream(
            connect(port), payload.beanstalkd_puts(share, seed + i, delay_s), window, count_lines
        )
        for i, share in enumerate(shares(count, connections))
    ]
    yield
    figures = timed_pump(streams)
    assert sum(check_inserted(stream.replies) for stream in streams) == count
    return {**figures, "count": count}


def tickwheel_sequential(port: int, count: int, seed: int) -> Job:
    """Enqueue one task per frame, each after the previous answer."""
    load = payload.enqueue_frames(count, 1, 1, seed)
    stream = Stream(Control(port, session=True).sock, load, 1, FrameCounter())
    yield
    cpu_s = time.process_time()
    took = one_by_one(stream)
    figures = _sequential_figures(took, cpu_s)
    assert sum(1 for _ in results(stream.replies)) == count
    return figures


def beanstalkd_sequential(port: int, count: int, seed: int) -> Job:
    stream = Stream(connect(port), payload.beanstalkd_puts(count, seed), 1, count_lines)
    yield
    cpu_s = time.process_time()
    took = one_by_one(stream)
    figures = _sequential_figures(took, cpu_s)
    assert check_inserted(stream.replies) == count
    return figures


def echo_sequential(port: int, count: int, seed: int, sync_in: str) -> Job:
    """Measure the minimum for both: the same requests to an echo server, and as many syncs of 4
    KiB, as if each request took one round trip and one sync."""
    stream = Stream(connect(port), payload.enqueue_frames(count, 1, 1, seed), 1, FrameCounter())
    yield
    cpu_s = time.process_time()
    echoes = one_by_one(stream)
    syncs = syncs_s(Path(sync_in), count)
    figures = _sequential_figures([a + b for a, b in zip(echoes, syncs, strict=True)], cpu_s)
    over = syncs_s(Path(sync_in), count, in_place=True)
    parts = {"echo_ms": echoes, "sync_ms": syncs, "sync_in_place_ms": over}
    for name, took in parts.items():
        figures[name] = percentiles([seconds * 1000 for seconds in took])
    return figures


def _sequential_figures(took: list[float], cpu_s: float) -> dict[str, Any]:
    return {
        "elapsed_s": sum(took),
        "client_cpu_s": time.process_time() - cpu_s,
        "count": len(took),
        "latency_ms": percentiles([seconds * 1000 for seconds in took]),
    }


def tickwheel_burst(port: int, count: int, due_ms: int, prefetch: int) -> Job:
    """Take tasks that are due at the same time, and ack them per read. The time ends with the last
    confirmed ack."""
    consumer = TickwheelConsumer(port, CONNECTIONS, prefetch)
    yield
    cpu_s = time.process_time()
    consumer.run(count, RUN_TIMEOUT_S)
    return {
        "elapsed_s": consumer.last_s - due_ms / 1000,
        "first_ms": consumer.first_s * 1000 - due_ms,
        "client_cpu_s": time.process_time() - cpu_s,
        "count": consumer.acked,
        "early": consumer.early,
        "repeated": consumer.repeated,
    }


def beanstalkd_burst(port: int, count: int, window: int) -> Job:
    """``reserve`` and ``delete`` ready jobs. The time begins with the first byte sent."""
    consumer = BeanstalkdConsumer(port, CONNECTIONS, window)
    yield
    cpu_s = time.process_time()
    elapsed_s = consumer.run(count, RUN_TIMEOUT_S)
    client_cpu_s = time.process_time() - cpu_s
    return {"elapsed_s": elapsed_s, "client_cpu_s": client_cpu_s, "count": consumer.deleted}


def watch(port: int, count: int, due_ms: int) -> Job:
    """Send PING and STATS in turn, from the due time until ``count`` tasks are acked."""
    control = Control(port)
    took_ms: dict[FrameType, list[float]] = {FrameType.PING: [], FrameType.STATS: []}
    yield
    time.sleep(max(0.0, due_ms / 1000 - time.time()))
    acked = 0
    while acked < count:
        for kind, took in took_ms.items():
            started_s = time.perf_counter()
            answer = control.ask(kind)
            took.append((time.perf_counter() - started_s) * 1000)
        acked = answer["acked"]
        time.sleep(0.002)
    return {f"{kind.name.lower()}_ms": percentiles(took) for kind, took in took_ms.items()}


def ping(port: int, seconds: float) -> Job:
    """Send one PING after another for ``seconds``."""
    control, took = Control(port), list[float]()
    yield
    until_s = time.perf_counter() + seconds
    while (started_s := time.perf_counter()) < until_s:
        control.ask(FrameType.PING)
        took.append((time.perf_counter() - started_s) * 1000)
        time.sleep(0.002)
    return {"ping_ms": percentiles(took)}


def consume(
    port: int, count: int, prefetch: int, warm_up_s: float, connections: int = CONNECTIONS
) -> Job:
    """Ack deliveries as they arrive, and record the lateness of tasks due after the warm-up."""
    consumer = TickwheelConsumer(port, connections, prefetch)
    yield
    consumer.run(count, RUN_TIMEOUT_S, int((time.time() + warm_up_s) * 1000))
    return {
        "count": consumer.acked,
        "early": consumer.early,
        "repeated": consumer.repeated,
        "measured": len(consumer.daemon_late_ms),
        "daemon_late_ms": percentiles(consumer.daemon_late_ms),
        "client_late_ms": percentiles(consumer.client_late_ms),
    }


def pace(port: int, rate: int, seconds: float, window: int, delay_ms: list[int], seed: int) -> Job:
    """Enqueue at a steady rate, with one task per frame and the tasks of a millisecond at once."""
    count = int(rate * seconds)
    load = payload.paced_frames(count, window, seed, (delay_ms[0], delay_ms[1]))
    stream = Stream(Control(port, session=True).sock, load, window, FrameCounter())
    stream.sock.setblocking(False)
    yield
    behind_s = 0.0
    started_s = time.perf_counter()
    while stream.answered < count:
        now_s = time.perf_counter() - started_s
        due = min(count, int(now_s * rate) + 1)
        stream.sendable = max(stream.sendable, min(due, stream.answered + window))
        behind_s = max(behind_s, (due - stream.sendable) / rate)
        stream.send()
        if select.select([stream.sock], [], [], 0)[0]:
            stream.read()
        time.sleep(0.001)
        assert now_s < RUN_TIMEOUT_S, f"{stream.answered} of {count} answers"
    assert sum(1 for _ in results(stream.replies)) == count
    return {"count": count, "behind_ms": behind_s * 1000}


JOBS: dict[str, Callable[..., Job]] = {
    job.__name__: job
    for job in (
        tickwheel_put,
        beanstalkd_put,
        tickwheel_sequential,
        beanstalkd_sequential,
        echo_sequential,
        tickwheel_burst,
        beanstalkd_burst,
        watch,
        ping,
        consume,
        pace,
        by_id,
        by_key,
        nack,
        client_bulk,
        client_burst,
        client_consume,
        client_forward,
        client_sequential,
        client_sequential_acks,
        client_single,
        client_transactions,
        http_put,
        http_lines,
        mixed_consume,
        mixed_produce,
        postgres_burst,
        postgres_copy,
        postgres_fill,
        postgres_insert,
        postgres_watch,
        redis_py_async,
        redis_py_sync,
    )
}
