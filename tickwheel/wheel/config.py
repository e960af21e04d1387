"""What an engine is told at its start, and what it counts from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tickwheel.wheel.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of the engine; times in ms."""

    slots: int = 3600
    tick_ms: int = 1000
    shard: int = 0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    policies: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """Policies that may be named, beside ``BUILT_IN`` and the default one."""
    resident_horizon_ms: int = 60_000
    """A new task due within this keeps its row in memory."""
    resident_bytes_max: int = 256 * 1024 * 1024
    loading_max: int = 20_000
    """Rows being read for firing at one time."""
    lease_checkpoint_ms: int = 100
    """A delivery that is finished sooner never touches the PrepareQueue."""
    reconnect_grace_ms: int = 5_000
    endings_max: int = 100_000
    sessions_max: int = 100_000
    session_outcomes_max: int = 1_000_000
    """Of all sessions; beyond it those that were not used for long are forgotten first."""
    session_idle_ms_max: int = 86_400_000
    session_evict_idle_ms_min: int = 60_000
    topics_max: int = 100_000
    groups_per_topic_max: int = 1_000
    groups_max: int = 200_000
    tasks_max: int = 100_000_000
    """Not finished."""
    pending_max: int = 100_000_000
    """Scheduled."""
    backlog_max: int = 20_000_000
    """Tasks that are due on one topic that has no group yet."""
    delivery_frame_tasks_max: int = 512
    delivery_frame_bytes_max: int = 1024 * 1024
    dispatch_bytes_max: int = 16 * 1024 * 1024
    """Handed out by one call of ``dispatch``, and a frame more."""
    handed_bytes_max: int = 16 * 1024 * 1024
    """At-most-once deliveries that wait for their commit, and a frame more."""
    in_flight_max: int = 2_000_000
    """Deliveries that are not finished, of all groups."""
    lapsing_max: int = 10_000
    """Tasks whose ttl is over that are being looked up at one time."""
    broadcast_tasks_max: int = 10_000
    broadcast_bytes_max: int = 32 * 1024 * 1024
    """What may wait for one broadcast subscription whose connection is behind."""
    broadcasts_bytes_max: int = 256 * 1024 * 1024
    """The same for all of them."""
    subscribers_max: int = 100_000
    """Subscriptions and pulls that are open."""


@dataclass(slots=True)
class Totals:
    """Counted since the start."""

    enqueued: int = 0
    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    retried: int = 0
    expired: int = 0
    cancelled: int = 0
    leases_over: int = 0
    dead: int = 0
    dead_expired: int = 0
    """Dead letters deleted because their retention was over."""
    rows_missing: int = 0
    """Must stay 0: tasks that had not ended and whose rows a store did not have."""
    dropped_once: int = 0
    """At-most-once deliveries whose consumer was gone when they could have been written."""
    early: int = 0
    """Must stay 0: deliveries stopped at the last check because they were not due."""
