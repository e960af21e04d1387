"""The answer to STATS: counts from engine memory, O(topics), no scan."""

from __future__ import annotations

from typing import Any

from tickwheel.clock import Now
from tickwheel.server.shell import Shell
from tickwheel.version import __version__
from tickwheel.wheel.groups import Group, Topic


def stats_map(shell: Shell, now: Now) -> dict[str, Any]:
    """What ``tickwheel stats`` shows; ``docs/protocol.md`` lists the fields."""
    core = shell.core
    wheel, totals = core.wheel, core.totals
    topics = {topic.name: topic_map(topic) for topic in core.topics.values()}
    sums = {
        name: sum(topic[name] for topic in topics.values())
        for name in ("ready", "in_flight", "waiting")
    }
    return {
        "node": shell.settings.node,
        "version": __version__,
        "epoch": shell.epoch,
        "now_ms": now.now_ms,
        "uptime_s": (now.mono_ms - shell.started_mono_ms) / 1000,
        "slots": core.config.slots,
        "tick_ms": core.config.tick_ms,
        "slot": wheel.slot_of(now.now_ms),
        "position_ms": wheel.position_ms,
        "wheel_bytes": wheel.memory_bytes,
        "resident_bytes": core.resident_bytes,
        "pending": core.scheduled,
        **sums,
        "dead": core.dead,
        "enqueued": totals.enqueued,
        "delivered": totals.delivered,
        "acked": totals.acked,
        "nacked": totals.nacked,
        "retried": totals.retried,
        "expired": totals.expired,
        "cancelled": totals.cancelled,
        "leases_over": totals.leases_over,
        "early": totals.early,
        "batches": shell.committer.last_batch,
        "connections": len(shell.connections),
        "subscribers": sum(
            len(group.subscribers) for t in core.topics.values() for group in t.groups.values()
        ),
        "sessions": len(core.sessions),
        "store_ok": shell.committer.trouble is None,
        "lateness": shell.lateness.summary(),
        "topics": topics,
    }


def topic_map(topic: Topic) -> dict[str, Any]:
    """One topic; what is due before any group exists counts as ready."""
    groups = {group.name: group_map(group) for group in topic.groups.values()}
    holders = list(topic.groups.values())
    if topic.unowned is not None:
        holders.append(topic.unowned)
    return {
        "pending": topic.scheduled,
        "ready": sum(group.ready_count for group in holders),
        "in_flight": sum(len(group.flight) for group in holders),
        "waiting": sum(len(group.waiting) for group in holders),
        "dead": sum(group.dead for group in holders),
        "enqueued": topic.enqueued,
        "delivered": topic.delivered,
        "acked": topic.acked,
        "cancelled": topic.cancelled,
        "groups": groups,
    }


def group_map(group: Group) -> dict[str, Any]:
    return {
        "ready": group.ready_count,
        "in_flight": len(group.flight),
        "waiting": len(group.waiting),
        "dead": group.dead,
        "subscribers": len(group.subscribers),
        "delivered": group.delivered,
        "acked": group.acked,
    }
