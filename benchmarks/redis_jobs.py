"""The peer of the Redis cases: a program that keeps delayed tasks in Redis without Tickwheel.

The common recipe, a sorted set of due times and a hash of bodies, through redis-py: ``ZADD`` and
``HSET`` for each task, in pipelines without MULTI. Keys, members, due
times and bodies are what Tickwheel writes, without the record around the body; they are made
before the clock starts, so what is measured is redis-py and Redis.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator
from typing import Any

from benchmarks import payload
from benchmarks.client_jobs import loop_factory
from benchmarks.scale import CONNECTIONS, REDIS_PIPELINE

STORE_QUEUE = b"{tw:peer:0}:store"
TASK = b"{tw:peer:0}:task"

Task = tuple[bytes, int, bytes]
"""Id, due in milliseconds, body."""


def _tasks(count: int, seed: int, first_id: int) -> list[Task]:
    texts = payload.bodies(seed)
    delays = payload.delays_s(count, seed)
    now_ms = int(time.time() * 1000)
    return [
        (b"%019d" % (first_id + i), now_ms + int(delays[i] * 1000), texts[i % len(texts)])
        for i in range(count)
    ]


def _shares(count: int, seed: int, connections: int) -> list[list[Task]]:
    share, odd = divmod(count, connections)
    first_id = time.time_ns() // 1_000_000 << 20
    shares = []
    for index in range(connections):
        size = share + (index < odd)
        shares.append(_tasks(size, seed + index, first_id))
        first_id += size
    return shares


def _without_hiredis() -> None:
    """Make redis-py work as without hiredis, whose parser and packer are in C."""
    if "redis" in sys.modules:
        raise AssertionError("redis-py was imported already, and found hiredis")
    sys.modules["hiredis"] = None  # type: ignore[assignment]  # so an import of it fails
    from redis.utils import HIREDIS_AVAILABLE

    assert not HIREDIS_AVAILABLE


def _check(replies: list[Any], tasks: int) -> None:
    if len(replies) != 2 * tasks or any(reply != 1 for reply in replies):
        raise AssertionError(f"{tasks} tasks: {replies!r:.200}")


def redis_py_async(
    port: int,
    count: int,
    seed: int,
    connections: int = CONNECTIONS,
    untimed: bool = False,
    plain: bool = False,
    together: bool = False,
) -> Generator[None, None, dict[str, Any]]:
    """Use ``redis.asyncio`` with several connections, each with one pipeline after the other.

    ``untimed``: without the time-out that redis-py 8.1 sets unless it gets another (6.4 and 7.1
    set none). It costs a timer for each of the two replies of a task. ``plain``: without hiredis.
    ``together``: one ZADD and one HSET for all tasks of a pipeline, instead of one for each.
    """
    if plain:
        _without_hiredis()
    import redis.asyncio as redis

    async def put(client: Any, tasks: list[Task]) -> None:
        for start in range(0, len(tasks), REDIS_PIPELINE):
            some = tasks[start : start + REDIS_PIPELINE]
            pipeline = client.pipeline(transaction=False)
            for member, due_ms, body in some:
                pipeline.zadd(STORE_QUEUE, {member: due_ms})
                pipeline.hset(TASK, member, body)
            _check(await pipeline.execute(), len(some))

    async def put_together(client: Any, tasks: list[Task]) -> None:
        for start in range(0, len(tasks), REDIS_PIPELINE):
            some = tasks[start : start + REDIS_PIPELINE]
            pipeline = client.pipeline(transaction=False)
            pipeline.zadd(STORE_QUEUE, {member: due_ms for member, due_ms, _ in some})
            pipeline.hset(TASK, mapping={member: body for member, _, body in some})
            replies = await pipeline.execute()
            assert replies == [len(some)] * 2, f"{len(some)} tasks: {replies!r:.200}"

    async def connect() -> list[Any]:
        options: dict[str, Any] = {"socket_timeout": None} if untimed else {}
        clients = [
            redis.Redis(port=port, single_connection_client=True, **options)
            for _ in range(connections)
        ]
        for client in clients:
            await client.initialize()
            await client.ping()
        return clients

    async def run(clients: list[Any], shares: list[list[Task]]) -> None:
        await asyncio.gather(*map(put_together if together else put, clients, shares))

    async def close(clients: list[Any]) -> None:
        for client in clients:
            await client.aclose()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        clients = runner.run(connect())
        shares = _shares(count, seed, connections)
        yield
        cpu_s, started_s = time.process_time(), time.perf_counter()
        runner.run(run(clients, shares))
        figures = {
            "elapsed_s": time.perf_counter() - started_s,
            "client_cpu_s": time.process_time() - cpu_s,
            "count": count,
        }
        runner.run(close(clients))
        return figures


def redis_py_sync(
    port: int, count: int, seed: int, plain: bool = False
) -> Generator[None, None, dict[str, Any]]:
    """Use ``redis.Redis`` with one connection and one pipeline after the other. ``plain``: see
    above."""
    if plain:
        _without_hiredis()
    import redis

    with redis.Redis(port=port) as client:
        client.ping()
        (tasks,) = _shares(count, seed, 1)
        yield
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for start in range(0, len(tasks), REDIS_PIPELINE):
            some = tasks[start : start + REDIS_PIPELINE]
            pipeline = client.pipeline(transaction=False)
            for member, due_ms, body in some:
                pipeline.zadd(STORE_QUEUE, {member: due_ms})
                pipeline.hset(TASK, member, body)
            _check(pipeline.execute(), len(some))
        return {
            "elapsed_s": time.perf_counter() - started_s,
            "client_cpu_s": time.process_time() - cpu_s,
            "count": count,
        }
