"""The cases of each store by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases.burst import burst, burst_client, history
from benchmarks.cases.by_id import random_access
from benchmarks.cases.client import bulk_client, bulk_client_long, single_client
from benchmarks.cases.enqueue import enqueue_batched, enqueue_frame, enqueue_sequential
from benchmarks.cases.forward import forward
from benchmarks.cases.held_loop import held_loop
from benchmarks.cases.http import http
from benchmarks.cases.keys import keys
from benchmarks.cases.large import due_million, mixed_day, ten_million
from benchmarks.cases.lateness import lateness
from benchmarks.cases.order import filters, order
from benchmarks.cases.pending import memory, rate_pending, recovery
from benchmarks.cases.postgresql import postgres_long, postgres_steady
from benchmarks.cases.push import push
from benchmarks.cases.redis import (
    redis_bulk_client,
    redis_enqueue,
    redis_memory,
    redis_memory_no_mirror,
    redis_recovery,
    redis_takeover,
    redis_ten_million,
)
from benchmarks.cases.shards import shards
from benchmarks.cases.steady import sequential_client, steady, steady_history, steady_worker
from benchmarks.cases.transactions import transactions
from benchmarks.cases.virtual_week import virtual_week
from benchmarks.context import Context, Result

Cases = dict[str, Callable[[Context], Result]]


def _named(*cases: Callable[[Context], Result]) -> Cases:
    return {case.__name__: case for case in cases}


CASES: dict[str, Cases] = {
    "sqlite": _named(
        enqueue_frame,
        enqueue_batched,
        enqueue_sequential,
        bulk_client,
        bulk_client_long,
        single_client,
        burst,
        burst_client,
        history,
        lateness,
        steady,
        steady_history,
        steady_worker,
        sequential_client,
        memory,
        random_access,
        recovery,
        rate_pending,
        keys,
        order,
        filters,
        transactions,
        http,
        forward,
        push,
        shards,
        held_loop,
        virtual_week,
        ten_million,
        due_million,
        mixed_day,
    ),
    "redis": _named(
        redis_enqueue,
        redis_bulk_client,
        burst,
        lateness,
        steady,
        steady_worker,
        sequential_client,
        redis_memory,
        redis_memory_no_mirror,
        redis_recovery,
        redis_takeover,
        redis_ten_million,
    ),
    "postgresql": _named(
        bulk_client,
        burst,
        burst_client,
        lateness,
        steady,
        postgres_steady,
        postgres_long,
    ),
}

HEAVY = frozenset(
    {
        "bulk_client_long",
        "ten_million",
        "redis_ten_million",
        "due_million",
        "mixed_day",
        "postgres_long",
    }
)
"""Cases that run only when they are named: they take minutes, or gigabytes of disk."""
