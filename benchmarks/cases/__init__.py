"""The cases by name, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases.burst import burst, burst_client
from benchmarks.cases.enqueue import enqueue_batched, enqueue_frame, enqueue_sequential
from benchmarks.cases.lateness import lateness
from benchmarks.cases.pending import memory, rate_pending, recovery
from benchmarks.context import Context, Result

CASES: dict[str, Callable[[Context], Result]] = {
    case.__name__: case
    for case in (
        enqueue_frame,
        enqueue_batched,
        enqueue_sequential,
        burst,
        burst_client,
        lateness,
        memory,
        recovery,
        rate_pending,
    )
}
