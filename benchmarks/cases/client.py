"""Durable enqueues through the Python client; PostgreSQL by hand and other queues on it beside."""

from __future__ import annotations

from typing import Any

from benchmarks.context import Contestant, Context, Result, alternate, measured
from benchmarks.peers import Queue
from benchmarks.scale import POSTGRES_POOL

COPY = "PostgreSQL, COPY"
CALLERS = (200, 1_000)
_LIMIT_S = 900


def bulk_client(context: Context) -> Result:
    """Large calls, many at a time: columns, and Task objects."""
    scale = context.scale
    return _bulk(
        context,
        Result("bulk_client"),
        {"count": scale.bulk, "per_call": scale.bulk_per_call, "in_flight": scale.bulk_in_flight},
        {"columns": True, "objects": False},
        scale.rounds,
    )


def bulk_client_long(context: Context) -> Result:
    """The same for so long that what a run leaves behind counts: log, index, wheel."""
    scale = context.scale
    return _bulk(
        context,
        Result("bulk_client_long"),
        {
            "count": scale.long_bulk,
            "per_call": scale.long_per_call,
            "in_flight": scale.long_in_flight,
        },
        {"columns": True},
        scale.long_rounds,
    )


def _bulk(
    context: Context, result: Result, size: dict[str, int], ways: dict[str, bool], rounds: int
) -> Result:
    def ours(columns: bool) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                return measured(
                    daemon, "client_bulk", limit_s=_LIMIT_S, seed=seed, columns=columns, **size
                )

        return run

    def theirs(seed: int) -> dict[str, Any]:
        with context.postgres() as postgres:
            return measured(postgres, "postgres_copy", limit_s=_LIMIT_S, seed=seed, **size)

    def other(queue: Queue) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.postgres() as postgres:
                return measured(postgres, "bulk", limit_s=_LIMIT_S, queue=queue, **size)

        return run

    contestants = {name: ours(columns) for name, columns in ways.items()}
    if context.postgres_programs is not None:
        contestants["copy"] = theirs
        contestants |= {queue.key: other(queue) for queue in context.queues}
    rounds_of = alternate(context, result.case, contestants, rounds)
    calls = f"{size['per_call']:,} a call, {size['in_flight']} calls in flight"
    names = {
        "columns": f"client, enqueue_columns, {calls}",
        "objects": f"client, enqueue_many, {calls}",
        "copy": f"{COPY}, {calls}",
        **{queue.key: f"{queue.name}, {calls}" for queue in context.queues},
    }
    rate = {name: result.median(name, names[name], found) for name, found in rounds_of.items()}
    if "copy" in rate:
        for name in ways:
            result.ratio(f"ratio_{name}", f"client, {name} / {COPY}", rate[name] / rate["copy"])
    else:
        result.missing.append(f"PostgreSQL: {context.postgres_missing}")
    result.against_queues("client, columns", rate["columns"], context)
    return result


def single_client(context: Context) -> Result:
    """Many coroutines of one client, each awaiting one enqueue after the other."""
    result = Result("single_client")
    scale = context.scale

    def ours(callers: int) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.tickwheel() as daemon:
                return measured(
                    daemon, "client_single", count=scale.single, callers=callers, seed=seed
                )

        return run

    def theirs(callers: int) -> Contestant:
        def run(seed: int) -> dict[str, Any]:
            with context.postgres() as postgres:
                count = scale.single_synced
                return measured(
                    postgres, "postgres_insert", count=count, callers=callers, seed=seed
                )

        return run

    contestants = {f"rate_{callers}": ours(callers) for callers in CALLERS}
    if context.postgres_programs is not None:
        contestants |= {f"insert_{callers}": theirs(callers) for callers in CALLERS}
    else:
        result.missing.append(f"PostgreSQL: {context.postgres_missing}")
    rounds_of = alternate(context, result.case, contestants)
    for callers in CALLERS:
        what = f"client, {callers:,} coroutines that await enqueue()"
        rate = result.median(f"rate_{callers}", what, rounds_of[f"rate_{callers}"])
        if f"insert_{callers}" in rounds_of:
            what = f"PostgreSQL, INSERT, {callers:,} coroutines, a pool of {POSTGRES_POOL}"
            theirs_rate = result.median(f"insert_{callers}", what, rounds_of[f"insert_{callers}"])
            what = f"client / INSERT, {callers:,} coroutines"
            result.ratio(f"ratio_{callers}", what, rate / theirs_rate)
    return result
