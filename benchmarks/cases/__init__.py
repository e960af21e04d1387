"""The cases of each store by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases.burst import burst, burst_client, history
from benchmarks.cases.enqueue import enqueue_batched, enqueue_frame, enqueue_sequential
from benchmarks.cases.lateness import lateness
from benchmarks.cases.pending import memory, rate_pending, recovery
from benchmarks.cases.redis import redis_enqueue, redis_memory, redis_recovery
from benchmarks.context import Context, Result

Cases = dict[str, Callable[[Context], Result]]


def _named(*cases: Callable[[Context], Result]) -> Cases:
    return {case.__name__: case for case in cases}


CASES: dict[str, Cases] = {
    "sqlite": _named(
        enqueue_frame,
        enqueue_batched,
        enqueue_sequential,
        burst,
        burst_client,
        history,
        lateness,
        memory,
        recovery,
        rate_pending,
    ),
    "redis": _named(redis_enqueue, burst, lateness, redis_memory, redis_recovery),
}
