"""What is written of the shard's life: kinds of records in the spool, events and fields in files.

Tables only. A record of the spool is ``[kind, time_ms, …]`` with whole columns; it becomes an
event, one JSON line, for each of its tasks. ``docs/history.md`` is the reference for readers; a
test holds the two together.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

SCHEMA_VERSION = 1


class Kind(IntEnum):
    """The first element of a record; what follows stands beside it."""

    ENQUEUED = 1
    """time_ms, producer, ids, dues, topics (one | each), extras {index: …}, bodies | nil"""
    DELIVERED = 2
    """time_ms, topic, group, subscriber, ids, attempts, dues"""
    ACKED = 3
    """time_ms, topic, group, subscriber, epoch, ids, attempts, delivered_ms[, ended]; ``ended``:
    one or each, whether that ended the task (no other group has it any more)"""
    NACKED = 4
    """time_ms, topic, group, subscriber, ids, attempts, next_ms, reasons"""
    LEASE_OVER = 5
    """time_ms, topic, group, subscriber, ids, attempts, reasons"""
    RELEASED = 6
    """time_ms, topic, group, subscriber, ids, attempts"""
    DEAD = 7
    """time_ms, topic, group, ids, attempts, reasons"""
    ENDED = 8
    """time_ms, topic, group | nil, "cancelled" | "expired" | "deleted", ids[, ended]"""
    RESCHEDULED = 9
    """time_ms, topic, ids, dues[, places in the order]"""
    REQUEUED = 10
    """time_ms, topic, group, ids"""
    GROUP = 11
    """time_ms, topic, group | nil, "created" | "deleted" | "configured"[, details]"""
    DAEMON = 12
    """time_ms, "started" | "stopped", details"""
    DROPPED = 13
    """time_ms, count[, reason]"""


ENDINGS = ("cancelled", "expired", "deleted")
GROUP_EVENTS = {
    "created": "group_created", "deleted": "group_deleted", "configured": "group_configured",
}  # fmt: skip
DAEMON_EVENTS = ("started", "stopped")
EVENTS = (
    "enqueued", "rescheduled", "cancelled", "delivered", "acked", "nacked", "lease_over",
    "released", "dead", "requeued", "expired", "deleted", *GROUP_EVENTS.values(), *DAEMON_EVENTS,
    "dropped",
)  # fmt: skip
FIELDS = (
    "v", "time_ms", "event", "task_id", "topic", "group", "key", "tag", "due_ms", "attempt",
    "lateness_ms", "ack_ms", "ended", "subscriber", "producer", "reason", "body", "priority",
    "ttl_ms", "props", "retry", "since_ms", "since_id", "order_id", "settings", "clean",
    "details", "count", "node", "shard", "epoch", "seq", "synthetic",
)  # fmt: skip
EXTRAS = ("key", "tag", "props", "priority", "ttl_ms", "retry")
"""The names of an enqueued task's extras when they come as an array."""

_POLICY_FIELDS = {
    "exponential": ("base_ms", "factor", "cap_ms", "retries", "jitter"),
    "fixed": ("delay_ms", "retries", "jitter"),
    "table": ("delays_ms", "retries"),
    "none": (),
}


def policy_map(policy: Any) -> dict[str, Any]:
    """A retry policy's numbers as the wire has them. Raises TypeError for anything else."""
    kind = getattr(policy, "kind", None)
    if kind not in _POLICY_FIELDS:
        raise TypeError(f"a {type(policy).__name__} is nothing that a record holds")
    values = {
        "base_ms": policy.base_ms,
        "factor": policy.factor,
        "cap_ms": policy.cap_ms,
        "delay_ms": policy.base_ms,
        "delays_ms": list(policy.delays_ms),
        "retries": policy.retries_max,
        "jitter": policy.jitter,
    }
    return {"kind": kind} | {name: values[name] for name in _POLICY_FIELDS[kind]}
