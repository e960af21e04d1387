"""How much of everything a run does: the full one, whose figures count, and the quick one."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES = 100
CONNECTIONS = 4
"""Of each load and each consumer, the peer's too."""
WINDOW = 1_000
"""Requests a connection leaves unanswered, the peer's too (the daemon's limit is 1,024)."""
DUE_SPAN_S = 7 * 86_400
PEER_BURST_WINDOW = 32
"""Reserves a connection of beanstalkd's consumer keeps on their way. Its best: it looks through
all jobs that a connection has reserved at many a delete, so a larger window slows it down."""
REDIS_PIPELINE = 500
"""Tasks of one pipeline of redis-py, each a ZADD and a HSET."""
RUN_TIMEOUT_S = 180
"""A load process that is not done by then ends itself."""


@dataclass(frozen=True)
class Scale:
    """Counts of one run. Every case is bounded by them and by ``RUN_TIMEOUT_S``."""

    name: str
    rounds: int
    """Alternating rounds of a comparison; the median counts."""
    frames: int
    """Tasks of an enqueue run, one a frame."""
    frames_synced: int
    """The same for a peer that syncs every put, which is slow."""
    batched: int
    tasks_per_frame: int
    frames_window: int
    """Unanswered frames a connection when frames are large."""
    sequential: int
    burst: int
    history_burst: int
    """The burst that is compared with and without a history."""
    burst_lead_s: float
    """From the start of a burst's preparation to its due moment."""
    lateness_rates: tuple[int, ...]
    lateness_s: float
    pending: int
    """Tasks of the memory, recovery and rate cases."""
    quiet_s: float
    """A daemon is quiet when its memory has not changed for so long."""
    redis_tasks: int
    """Tasks of an enqueue run on Redis."""
    redis_tasks_per_frame: int
    redis_frames_window: int
    """Unanswered frames a connection."""
    redis_overdue: int
    """Tasks that come due while the daemon is down, and how long before they are put."""
    redis_overdue_lead_ms: int


FULL = Scale(
    name="full",
    rounds=5,
    frames=200_000,
    frames_synced=20_000,
    batched=400_000,
    tasks_per_frame=200,
    frames_window=16,
    sequential=3_000,
    burst=50_000,
    history_burst=200_000,
    burst_lead_s=6.0,
    lateness_rates=(500, 2_000, 10_000),
    lateness_s=20.0,
    pending=1_000_000,
    quiet_s=2.0,
    redis_tasks=200_000,
    redis_frames_window=4,
    redis_tasks_per_frame=REDIS_PIPELINE,
    redis_overdue=1_000,
    redis_overdue_lead_ms=1_000,
)
QUICK = Scale(
    name="quick",
    rounds=1,
    frames=4_000,
    frames_synced=1_000,
    batched=8_000,
    tasks_per_frame=200,
    frames_window=16,
    sequential=50,
    burst=1_000,
    history_burst=1_000,
    burst_lead_s=2.5,
    lateness_rates=(2_000,),
    lateness_s=1.0,
    pending=5_000,
    quiet_s=0.2,
    redis_tasks=4_000,
    redis_frames_window=4,
    redis_tasks_per_frame=REDIS_PIPELINE,
    redis_overdue=50,
    redis_overdue_lead_ms=500,
)
