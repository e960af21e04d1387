"""The cases of ``--store redis``: what the daemon makes of Redis, beside redis-py alone.

The burst and lateness cases are those of the embedded store, on this one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.cases.enqueue import put_tasks
from benchmarks.cases.pending import (
    consumer_when_active,
    fill,
    first_delivery_s,
    put_overdue,
    until_pending,
)
from benchmarks.context import Contestant, Context, Result, alternate, measured, rates
from benchmarks.redis_server import Redis, TickwheelOnRedis
from benchmarks.scale import BODY_BYTES, CONNECTIONS, REDIS_PIPELINE, WINDOW

PEERS = {
    "redis_py": f"redis.asyncio, pipelines of {REDIS_PIPELINE} tasks, {CONNECTIONS} connections",
    "redis_py_untimed": "redis.asyncio, the same, socket_timeout=None",
    "redis_py_sync": f"redis.Redis, pipelines of {REDIS_PIPELINE} tasks, 1 connection",
    "redis_py_plain": "redis.asyncio, the defaults, without hiredis",
    "redis_py_sync_plain": "redis.Redis, the same, without hiredis",
}
"""All ZADD + HSET a task. The first is redis-py with its defaults and with hiredis, and what the
bound is about. Installing redis-py alone does not bring hiredis: the last two are that."""
_RECOVERY_TIMEOUT_S = 60.0
NO_MIRROR = "?mirror=no"
QUIETS_KEPT = 6
"""Quiet periods at full scale after which nothing is kept for a Redis that came back older
(``keep_ms``)."""
LEASE = "{tw:default:0}:leader"


def redis_enqueue(context: Context) -> Result:
    """Durable enqueues through the daemon, and the same tasks through redis-py pipelines."""
    result = Result("redis_enqueue")
    scale = context.scale
    count = scale.redis_tasks
    ours = {
        "frame": ("tickwheel, one task a frame", 1, WINDOW),
        "batched": (
            f"tickwheel, {scale.redis_tasks_per_frame} tasks a frame",
            scale.redis_tasks_per_frame,
            scale.redis_frames_window,
        ),
    }

    def tickwheel(per_frame: int, window: int) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                assert isinstance(daemon, TickwheelOnRedis)
                return _with_redis(
                    daemon.server, lambda: put_tasks(daemon, count, per_frame, window, seed)
                )

        return run

    def peer(job: str, **more: object) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.redis() as redis:
                return _with_redis(
                    redis, lambda: measured(redis, job, count=count, seed=seed, **more)
                )

        return run

    contestants: dict[str, Contestant] = {
        name: tickwheel(per_frame, window) for name, (_, per_frame, window) in ours.items()
    }
    if context.peers:
        contestants["redis_py"] = peer("redis_py_async")
        contestants["redis_py_untimed"] = peer("redis_py_async", untimed=True)
        contestants["redis_py_sync"] = peer("redis_py_sync")
        contestants["redis_py_plain"] = peer("redis_py_async", plain=True)
        contestants["redis_py_sync_plain"] = peer("redis_py_sync", plain=True)
    rounds_of = alternate(context, result.case, contestants)
    for name, rounds in rounds_of.items():
        what = ours[name][0] if name in ours else PEERS[name]
        result.rate(name, what, rates(rounds), _busy(rounds, daemon=name in ours))
        result.metric(f"{name}_redis_us", _redis_us(rounds))
    rate = {name: result.metrics[f"{result.case}.{name}"] for name in rounds_of}
    for name in ours if context.peers else ():
        for other, theirs in PEERS.items():
            suffix, what = other.removeprefix("redis_py"), f"{ours[name][0]} / {theirs}"
            result.ratio(f"ratio_{name}{suffix}", what, rate[name] / rate[other])
    if not context.peers:
        result.missing.append(f"redis-py: {context.peers_missing}")
    return result


def redis_bulk_client(context: Context) -> Result:
    """Large calls of the Python client, and redis.asyncio without its time-out."""
    result = Result("redis_bulk_client")
    scale = context.scale
    count = scale.bulk
    calls = {
        "count": count,
        "per_call": scale.bulk_per_call,
        "in_flight": scale.bulk_in_flight,
    }

    def ours(columns: bool) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                assert isinstance(daemon, TickwheelOnRedis)
                load = partial(measured, daemon, "client_bulk", columns=columns, seed=seed, **calls)
                return _with_redis(daemon.server, load)

        return run

    def peer(together: bool) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.redis() as redis:
                way = {"untimed": True, "together": together}
                load = partial(measured, redis, "redis_py_async", count=count, seed=seed, **way)
                return _with_redis(redis, load)

        return run

    names = {
        "columns": "client, enqueue_columns",
        "objects": "client, enqueue_many",
        "redis_py": "redis.asyncio without its time-out, ZADD and HSET a task",
        "redis_py_together": f"the same, one ZADD and one HSET for {REDIS_PIPELINE}",
    }
    contestants = {"columns": ours(columns=True), "objects": ours(columns=False)}
    if context.peers:
        contestants["redis_py"] = peer(together=False)
        contestants["redis_py_together"] = peer(together=True)
    else:
        result.missing.append(f"redis-py: {context.peers_missing}")
    rounds_of = alternate(context, result.case, contestants)
    rate = {}
    for name, rounds in rounds_of.items():
        shares = _busy(rounds, daemon=name in ("columns", "objects"))
        rate[name] = result.rate(name, names[name], rates(rounds), shares)
        result.metric(f"{name}_redis_us", _redis_us(rounds))
    for other in ("redis_py", "redis_py_together") if context.peers else ():
        for name in ("columns", "objects"):
            suffix, what = other.removeprefix("redis_py"), f"{names[name]} / {names[other]}"
            result.ratio(f"ratio_{name}{suffix}", what, rate[name] / rate[other])
    return result


def _with_redis(redis: Redis, load: Any) -> dict[str, Any]:
    cpu_s = redis.cpu_s()
    figures: dict[str, Any] = load()
    return {**figures, "redis_cpu_s": redis.cpu_s() - cpu_s}


def _redis_us(rounds: Sequence[dict[str, Any]]) -> float:
    """Processor time of redis-server for a task, the best round's."""
    best: float = min(figures["redis_cpu_s"] / figures["count"] for figures in rounds)
    return best * 1e6


def _busy(rounds: Sequence[dict[str, Any]], *, daemon: bool) -> str:
    elapsed_s = sum(figures["elapsed_s"] for figures in rounds)
    names = ("redis", "server", "client") if daemon else ("redis", "client")
    shares = [
        f"{'load' if name == 'client' else 'daemon' if name == 'server' else name}"
        f" {sum(figures[f'{name}_cpu_s'] for figures in rounds) / elapsed_s:.0%}"
        for name in names
    ]
    return f"; CPU: {', '.join(shares)}; Redis {_redis_us(rounds):.1f} us a task"


def redis_memory(context: Context) -> Result:
    """The daemon's memory a pending task, whose bodies all are in it, and Redis's own."""
    return _memory(context, "redis_memory", "")


def redis_memory_no_mirror(context: Context) -> Result:
    """The same with ``?mirror=no``: handles, as on SQLite."""
    return _memory(context, "redis_memory_no_mirror", NO_MIRROR)


def _memory(context: Context, case: str, query: str) -> Result:
    result = Result(case)
    count = context.scale.pending
    folder, redis = context.fresh_folder("tickwheel"), context.redis()
    with TickwheelOnRedis(folder, redis, context.daemon_command, query=query) as daemon:
        empty = daemon.quiet_memory_bytes(context.scale.quiet_s)
        redis_empty = int(daemon.server.info()["used_memory"])
        fill(context, daemon)
        if query == NO_MIRROR:
            time.sleep(QUIETS_KEPT * context.scale.quiet_s)
        full = daemon.quiet_memory_bytes(context.scale.quiet_s)
        redis_full = int(daemon.server.info()["used_memory"])
        pending = daemon.stats()["scheduled"]
    assert pending == count, f"{pending} pending instead of {count}"
    ours = (full["VmRSS"] - empty["VmRSS"]) / count
    theirs = (redis_full - redis_empty) / count
    result.metric("bytes_per_task", ours)
    result.metric("redis_bytes_per_task", theirs)
    result.details["moments"] = {"at 0": empty, f"at {count:,}": full}
    result.row(f"the daemon, a pending task of {BODY_BYTES} B", f"{ours:.1f} B")
    result.row("redis-server (used_memory), the same", f"{theirs:.1f} B")
    return result


def redis_recovery(context: Context) -> Result:
    """SIGKILL at n pending and some due; start again at once, on a Redis that stayed up.

    From the start of the process until it leads, which it may when its predecessor's lease has
    run out; until a consumer that subscribes then has its first delivery; until everything is
    loaded, which is when the stats count n.
    """
    result = Result("redis_recovery")
    scale = context.scale
    folder = context.fresh_folder("tickwheel")
    with (
        context.redis() as redis,
        TickwheelOnRedis(folder, redis, context.daemon_command) as daemon,
    ):
        fill(context, daemon)
        put_overdue(context, daemon)
        daemon.kill()
        with TickwheelOnRedis(folder, redis, context.daemon_command) as again:
            consumer = consumer_when_active(again, scale.overdue)
            active_s = time.perf_counter() - again.started_s
            with closing(consumer):
                consumer.run(scale.overdue, _RECOVERY_TIMEOUT_S)
            first_s = first_delivery_s(again, consumer)
            loaded_s = until_pending(again, scale.pending)
    figures = {"active_s": active_s, "first_delivery_s": first_s, "loaded_s": loaded_s}
    for name, value in figures.items():
        result.metric(name, value)
    result.metric("early", consumer.early)
    what = f"{scale.pending:,} pending, SIGKILL, start at once, until it leads"
    result.row(f"{what} (a lease of 3 s runs out first)", f"{active_s:.2f} s")
    result.row("until the first delivery of what is due", f"{first_s:.2f} s")
    result.row(f"until the first stats that say {scale.pending:,} pending", f"{loaded_s:.2f} s")
    return result


def redis_takeover(context: Context) -> Result:
    """SIGKILL at n pending and some due, while a standby waits; with the mirror and without.

    From the end of the lease until a consumer has its first delivery, until all that was due is
    delivered, and until everything is loaded.
    """
    result = Result("redis_takeover")
    early = 0
    for name, query in (("mirror", ""), ("no_mirror", NO_MIRROR)):
        early += _takeover(context, result, name, query)
    result.metric("early", early)
    return result


def redis_ten_million(context: Context) -> Result:
    """The same without the mirror at ten million pending."""
    result = Result("redis_ten_million")
    scale = replace(context.scale, pending=context.scale.long_bulk)
    early = _takeover(replace(context, scale=scale), result, "no_mirror", NO_MIRROR)
    result.metric("early", early)
    return result


def _takeover(context: Context, result: Result, name: str, query: str) -> int:
    """Note what a takeover took; how many tasks came early."""
    figures = _taken_over(context, query)
    result.details[name] = figures
    what = f"{context.scale.pending:,} pending, {name.replace('_', ' ')}, from the lease's end"
    for key, text in _TAKEOVER.items():
        result.metric(f"{name}_{key}", figures[key])
        result.row(f"{what} {text}", f"{figures[key]:.2f} s")
    return int(figures["early"])


_TAKEOVER = {
    "first_delivery_s": "to the first delivery",
    "delivered_s": "until all that was due is delivered",
    "loaded_s": "until all are loaded",
}


def _taken_over(context: Context, query: str) -> dict[str, float]:
    scale, redis = context.scale, context.redis()
    folders = [context.fresh_folder("tickwheel") for _ in range(2)]
    with TickwheelOnRedis(folders[0], redis, context.daemon_command, query=query) as daemon:
        fill(context, daemon)
        with TickwheelOnRedis(folders[1], redis, context.daemon_command, query=query) as standby:
            put_overdue(context, daemon)
            daemon.kill()
            lease_end_s = time.time() + redis.pttl_ms(LEASE) / 1000
            with closing(consumer_when_active(standby, scale.overdue)) as consumer:
                consumer.run(scale.overdue, _RECOVERY_TIMEOUT_S)
            delivered_s = time.time() - lease_end_s
            until_pending(standby, scale.pending)
            return {
                "first_delivery_s": consumer.first_s - lease_end_s,
                "delivered_s": delivered_s,
                "loaded_s": time.time() - lease_end_s,
                "early": consumer.early,
            }
