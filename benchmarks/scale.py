"""The counts of a full run, whose figures count, and of a quick run."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES = 100
CONNECTIONS = 4
"""Connections of each load and each consumer, including those of the peer."""
WINDOW = 1_000
"""Unanswered requests per connection, including the peer's (the daemon's limit is 1,024)."""
DUE_SPAN_S = 7 * 86_400
PEER_BURST_WINDOW = 32
"""Unanswered reserves per connection of beanstalkd's consumer. More are slower, because deletes
often scan all jobs that the connection has reserved."""
POSTGRES_POOL = 64
"""Connections of the pool for single inserts. With more connections, more inserts commit
together."""
POSTGRES_FETCH = 500
"""Records per fetch of PostgreSQL's consumer."""
REDIS_PIPELINE = 500
"""Tasks per pipeline of redis-py, each with a ZADD and an HSET."""
RUN_TIMEOUT_S = 180
"""Maximum seconds of a load process, after which it ends itself."""


@dataclass(frozen=True)
class Scale:
    """Counts of a run. They and ``RUN_TIMEOUT_S`` bound every case."""

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
    """How long each rate goes on."""
    steady_rates: tuple[int, ...]
    forward_rates: tuple[int, ...]
    forward_s: float
    """Seconds of each rate of forwarded tasks."""
    pending: int
    """Tasks of the memory, recovery and rate cases."""
    by_id: int
    """Ids of one round of each verb; a round needs twice as many of those pending."""
    by_id_rounds: int
    quiet_s: float
    """Seconds of unchanged memory after which a daemon counts as quiet."""
    bulk: int
    """Tasks of a run of large calls through the client."""
    bulk_per_call: int
    bulk_in_flight: int
    long_bulk: int
    """The same of the long run, and of the store of ten million."""
    long_per_call: int
    long_in_flight: int
    long_rounds: int
    single: int
    """Tasks of a run of single enqueues from many coroutines, and for a peer that is slow."""
    single_synced: int
    http: int
    """Single enqueues over HTTP, and lines of a stream."""
    http_lines: int
    shards_rounds: int
    """When two shards are compared with one daemon."""
    shards_lead_s: float
    held: int
    """How much there is of whatever a client holds the event loop with."""
    held_s: float
    week_handled: int
    """Tasks of a virtual week in the test wheel, and of one that nobody consumes."""
    week_unread: int
    due_million: int
    due_million_lead_s: float
    due_million_rounds: int
    mixed_s: float
    """How long the mixed day and ``postgres_long`` are."""
    postgres_s: float
    """How long ``postgres_steady`` is."""
    redis_tasks: int
    """Tasks of an enqueue run on Redis."""
    redis_tasks_per_frame: int
    redis_frames_window: int
    """Unanswered frames a connection."""
    restarts: int
    """Kills and starts of the recovery case; the median counts."""
    overdue: int
    """Tasks that come due while the daemon is down, and how long before they are put."""
    overdue_lead_ms: int


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
    steady_rates=(100, 1_000, 2_000, 5_000, 10_000),
    forward_rates=(2_000, 10_000, 20_000),
    forward_s=10.0,
    pending=1_000_000,
    by_id=50_000,
    by_id_rounds=3,
    quiet_s=2.0,
    bulk=100_000,
    bulk_per_call=1_000,
    bulk_in_flight=16,
    long_bulk=10_000_000,
    long_per_call=2_000,
    long_in_flight=12,
    long_rounds=1,
    single=100_000,
    single_synced=20_000,
    http=40_000,
    http_lines=400_000,
    shards_rounds=3,
    shards_lead_s=3.0,
    held=200_000,
    held_s=8.0,
    week_handled=100_000,
    week_unread=1_000_000,
    due_million=1_000_000,
    due_million_lead_s=30.0,
    due_million_rounds=3,
    mixed_s=600.0,
    postgres_s=30.0,
    redis_tasks=200_000,
    redis_frames_window=4,
    redis_tasks_per_frame=REDIS_PIPELINE,
    restarts=3,
    overdue=1_000,
    overdue_lead_ms=1_000,
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
    burst_lead_s=1.2,
    lateness_rates=(2_000,),
    lateness_s=1.0,
    steady_rates=(2_000,),
    forward_rates=(20_000,),
    forward_s=0.1,
    pending=5_000,
    by_id=1_000,
    by_id_rounds=2,
    quiet_s=0.2,
    bulk=8_000,
    bulk_per_call=1_000,
    bulk_in_flight=16,
    long_bulk=20_000,
    long_per_call=2_000,
    long_in_flight=12,
    long_rounds=1,
    single=2_000,
    single_synced=2_000,
    http=1_000,
    http_lines=8_000,
    shards_rounds=1,
    shards_lead_s=1.2,
    held=2_000,
    held_s=0.5,
    week_handled=200,
    week_unread=1_000,
    due_million=2_000,
    due_million_lead_s=5.0,
    due_million_rounds=1,
    mixed_s=2.0,
    postgres_s=1.0,
    redis_tasks=4_000,
    redis_frames_window=4,
    redis_tasks_per_frame=REDIS_PIPELINE,
    restarts=1,
    overdue=50,
    overdue_lead_ms=500,
)
