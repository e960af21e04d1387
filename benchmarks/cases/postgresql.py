"""An even rate on PostgreSQL while a transaction of somebody else stays open, beside other queues.

The transaction lets no vacuum remove a row that has died since it began, so a queue that changes or
deletes rows reads over more and more of them.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.context import Context, Result, load_of
from benchmarks.mixed_jobs import topic_name
from benchmarks.peers import Queue
from benchmarks.postgres_server import TickwheelOnPostgres
from benchmarks.scale import RUN_TIMEOUT_S

RATE = 2_000
DELAY_S = (1.0, 3.0)
WARM_UP_S = 3.0
GRACE_S = 5.0
"""Seconds after the last enqueue in which a queue may finish its jobs."""
TASK_TABLES = "^(task|note)_"
_SAMPLES = 40
_SEED = 500
_MIB = 1024 * 1024


def postgres_steady(context: Context) -> Result:
    """Tasks in calls of 20, due 1 to 3 s later: through the client and a ``Worker``, and through
    the client and the worker of each other queue."""
    result = Result("postgres_steady")
    for queue in (None, *context.queues):
        _record(result, queue, _measure(context, context.scale.postgres_s, queue))
    if not context.queues:
        result.missing.append("other queues on PostgreSQL (--peers all)")
    return result


def postgres_long(context: Context) -> Result:
    """The same for ten minutes, without other queues."""
    result = Result("postgres_long")
    _record(result, None, _measure(context, context.scale.mixed_s, None))
    return result


def _measure(context: Context, seconds: float, queue: Queue | None) -> dict[str, Any]:
    consuming: dict[str, Any] = {
        "count": int(RATE * seconds),
        "warm_up_s": min(WARM_UP_S, seconds / 2),
    }
    producing = {"rate": RATE, "seconds": seconds, "delay_s": DELAY_S}
    watching = {"seconds": seconds, "samples": _SAMPLES, "hold_s": seconds + GRACE_S}
    limit_s = int(seconds) + RUN_TIMEOUT_S
    if queue is None:
        consume, produce = "client_consume", "mixed_produce"
        consuming |= {"topic": topic_name(0), "within_s": limit_s}
        producing |= {"topics": 1, "seed": _SEED}
    else:
        consume, produce = "consume", "produce"
        consuming["seconds"] = seconds + GRACE_S
    with context.tickwheel() if queue is None else context.postgres() as server:
        postgres = server.server if isinstance(server, TickwheelOnPostgres) else server
        tables = TASK_TABLES if queue is None else ""
        # The transaction begins last: a migration of a queue could wait for its end.
        with (
            load_of(server, consume, limit_s=limit_s, queue=queue, **consuming) as consumer,
            load_of(server, produce, limit_s=limit_s, queue=queue, **producing) as producer,
            load_of(
                postgres, "postgres_watch", limit_s=limit_s, tables=tables, **watching
            ) as watch,
        ):
            cpu_s = server.cpu_s()
            for load in (watch, consumer, producer):
                load.start()
            figures = {"produced": producer.result(), "consumed": consumer.result()}
            figures["server_cpu_s"] = server.cpu_s() - cpu_s
            return {**figures, **watch.result()}


def _record(result: Result, queue: Queue | None, figures: dict[str, Any]) -> None:
    name, prefix = ("tickwheel", "") if queue is None else (queue.name, f"{queue.key}_")
    result.details[name] = figures
    consumed, samples = figures["consumed"], figures["samples"]
    late = consumed["client_late_ms" if queue is None else "late_ms"]
    # Less the time from the last enqueue until its task is due.
    rate = min(RATE, consumed["count"] / (consumed["elapsed_s"] - DELAY_S[1]))
    task_us = figures["server_cpu_s"] / consumed["count"] * 1e6
    sizes = [sample["bytes"] for sample in samples]
    dead, dead_all = (max(sample[key] for sample in samples) for key in ("dead", "dead_all"))
    quarter = len(sizes) // 4
    early, last = sizes[quarter : 2 * quarter], sizes[-quarter:]
    growth = statistics.median(last) / statistics.median(early)
    metrics = {"rate": rate, "server_us": task_us, "dead": dead, "growth": growth}
    metrics |= {f"late_{key}_ms": value for key, value in late.items()}
    if queue is None:
        metrics["early"] = consumed["early"]
    for key, value in metrics.items():
        result.metric(f"{prefix}{key}", value)
    lateness = ", ".join(f"{key} {value:,.1f} ms" for key, value in late.items())
    result.row(f"{name}, {RATE:,} a second", f"{rate:,.0f}/s, {task_us:,.0f} us; late {lateness}")
    mib = ", ".join(
        f"{size / _MIB:,.1f}"
        for size in (sizes[0], statistics.median(early), max(sizes), sizes[-1])
    )
    result.row(f"{name}, dead rows; of all tables", f"{dead:,}; {dead_all:,}")
    result.row(f"{name}, MiB at first, in the second quarter, at most, at last", mib)
