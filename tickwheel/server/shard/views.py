"""Creates the maps of tasks, dead letters, counts and settings that answers contain.

Counts are read from the engine's memory in O(topics), without a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tickwheel.api.tasks import kept_options
from tickwheel.clock import Now
from tickwheel.engine.state import Core
from tickwheel.engine.tasks import GroupView
from tickwheel.engine.topics import Group, Topic
from tickwheel.model.policies import DEFAULT, Merging, PolicyRef, RetryPolicy
from tickwheel.model.records import (
    LINE_SETTINGS,
    ORDER_SETTINGS,
    DeadRow,
    Failure,
    GroupSettings,
    OrderRules,
    OrderSettings,
    TaskOptions,
    TaskSnapshot,
)
from tickwheel.server.shard.parts import Parts
from tickwheel.version import __version__

ValueBytes = Callable[[object], int]
"""Returns the size in bytes of a plain value in an answer of the transport."""


def task_map(
    task: TaskSnapshot, state: str, slot: int, cycles: int, groups: dict[str, GroupView]
) -> dict[str, Any]:
    """Return an unfinished task as the map that LOOKUP and LIST use."""
    row = task.row
    options = row.options or TaskOptions()
    replayed = options.replayed
    replay_fields = (
        {} if replayed is None else {"replay_of": replayed.id, "replay_to": replayed.group}
    )
    return replay_fields | {
        "id": row.id,
        "state": state,
        "topic": row.topic,
        "body": row.body,
        "due_ms": row.due_ms,
        "enqueued_ms": row.enqueued_ms,
        **{name: options[index] for name, index in _LISTED},
        "key": options.key if replayed is None else replayed.key,
        "properties": options.properties or {},
        "asked_ms": options.asked_ms,
        "slot": slot,
        "cycles": cycles,
        "groups": {
            name: view._asdict() | {"failures": [failure_map(failure) for failure in view.failures]}
            for name, view in groups.items()
        },
    }


_LISTED = [
    (field.name, TaskOptions._fields.index(field.name))
    for field, option in kept_options()
    if option.is_listed
]
"""(name, index in ``TaskOptions``) of the options of a task that are shown."""


def fitting(
    task: dict[str, Any], bytes_max: int, value_bytes: ValueBytes
) -> tuple[dict[str, Any], int]:
    """Return (the task's map, its size in bytes in an answer). If the map is larger than
    ``bytes_max``, keep only the newest failure of each group, or none."""
    size = value_bytes(task)
    for kept in (1, 0):
        if size <= bytes_max or not task.get("groups"):
            break
        groups = {
            name: view | {"failures": view["failures"][len(view["failures"]) - kept :]}
            for name, view in task["groups"].items()
        }
        task = task | {"groups": groups}
        size = value_bytes(task)
    return task, size


class FailureView(NamedTuple):
    """A failure as all answers contain it."""

    attempt: int
    at_ms: int
    reason: str
    subscriber: str
    trace: str
    """The trace, or an empty string if none is stored."""


def failure_map(failure: Failure) -> FailureView:
    attempt, at_ms, reason, subscriber = failure
    summary, _, trace = reason.partition("\n")
    return FailureView(attempt, at_ms, summary, subscriber, trace)


def dead_map(row: DeadRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "group": row.group,
        "topic": row.topic,
        "died_ms": row.died_ms,
        "attempt": row.attempt,
        "reason": row.reason,
        "failed": row.failed,
        "deaths": row.deaths,
        "failures": [failure_map(failure) for failure in row.failures],
    }


# --- counts --------------------------------------------------------------------------------------

STATES = ("ready", "in_flight", "waiting")
_TOPIC_COUNTS = ("scheduled", *STATES, "dead", "enqueued", "delivered", "acked", "cancelled")
_GROUP_COUNTS = ("nacked", "snoozed", "deaths", "expired", "filtered", "subscribers")
_COUNTED = ("delivered", "acked", *_GROUP_COUNTS[:-1])
_TOTALS = (
    "dropped_once", "enqueued", "delivered", "acked", "nacked", "snoozed", "deaths", "retried",
    "expired", "filtered", "cancelled", "leases_over", "early",
)  # fmt: skip


class StatsAnswer:
    """The counts of ``tickwheel stats``, of which ``docs/protocol.md`` lists the fields. The caller
    passes the topics one by one, because all of them would block the loop."""

    def __init__(
        self, parts: Parts, now: Now, value_bytes: ValueBytes, *, is_partial: bool
    ) -> None:
        """With ``is_partial``, counts include only the topics of ``take``, and counts of the whole
        daemon are left out."""
        self._parts = parts
        self._now = now
        self._value_bytes = value_bytes
        self._is_partial = is_partial
        self._bytes_left = parts.settings.out_room_bytes // 2
        self._sums = dict.fromkeys(_TOPIC_COUNTS + _GROUP_COUNTS, 0)
        self._shown: dict[str, dict[str, Any]] = {}
        self._left_out = 0

    def take(self, topic: Topic) -> None:
        """Add the counts of a topic, and show the topic if it and all earlier ones fit."""
        sums = self._sums
        for name, count in _topic_counts(topic).items():
            sums[name] += count
        for group in topic.live_groups:
            for name, count in _group_counts(group).items():
                sums[name] += count
        if self._bytes_left >= 0:
            counts = topic_map(self._parts.core, topic, self._now)
            self._bytes_left -= self._value_bytes((topic.name, counts))
            if self._bytes_left >= 0:
                self._shown[topic.name] = counts
                return
        self._left_out += 1

    def answer(self) -> dict[str, Any]:
        parts, now = self._parts, self._now
        core = parts.core
        return {
            "node": parts.settings.node,
            "version": __version__,
            "epoch": parts.epoch,
            "now_ms": now.now_ms,
            "uptime_s": (now.mono_ms - parts.started_mono_ms) / 1000,
            "slots": core.config.slots,
            "tick_ms": core.config.tick_ms,
            "slot": core.wheel.slot_of(now.now_ms),
            "position_ms": core.wheel.position_ms,
            "store_ok": parts.committer.trouble is None,
            **(self._sums if self._is_partial else _daemon_counts(parts, self._sums)),
            "partial": self._is_partial,
            "topics": self._shown,
            "topics_left_out": self._left_out,
        }


def _topic_counts(topic: Topic) -> dict[str, int]:
    """Return ``_TOPIC_COUNTS`` of a topic."""
    return {
        "scheduled": topic.scheduled,
        **topic.held(),
        "enqueued": topic.enqueued,
        "delivered": topic.delivered,
        "acked": topic.acked,
        "cancelled": topic.cancelled,
    }


def _group_counts(group: Group) -> dict[str, int]:
    """Return ``_GROUP_COUNTS`` of a group."""
    counts = {name: getattr(group, name) for name in _GROUP_COUNTS[:-1]}
    return counts | {"subscribers": len(group.subscribers)}


def _daemon_counts(parts: Parts, sums: Mapping[str, int]) -> dict[str, Any]:
    """Return the counts of the whole daemon. ``sums`` are those of all topics."""
    core = parts.core
    wheel, totals, registry = core.wheel, core.totals, core.transaction_registry
    return {
        "wheel_bytes": wheel.memory_bytes,
        "resident_bytes": core.resident_bytes,
        "scheduled": core.scheduled,
        **{name: sums[name] for name in STATES},
        "dead": core.dead,
        "dead_total": totals.dead,
        "dead_expired": totals.dead_expired,
        **{name: getattr(totals, name) for name in _TOTALS},
        "batches": parts.committer.last_batch,
        "connections": len(parts.callers),
        "subscribers": sums["subscribers"],
        "sessions": len(core.sessions),
        "schedules": len(core.schedule_heap.by_name),
        "transactions": {
            "open": registry.undecided - registry.parked,
            "parked": registry.parked,
            "half_tasks": registry.tasks,
            "bytes": registry.size_bytes,
        },
        "lateness": parts.observed.lateness.summary(),
    }


class Page:
    """One page of a list: as many maps as fit into an answer, at most ``limit``."""

    def __init__(self, parts: Parts, limit: int, value_bytes: ValueBytes) -> None:
        self.items: list[dict[str, Any]] = []
        self._limit = limit
        self._bytes_left = parts.limits.frame_bytes_max // 2
        self._value_bytes = value_bytes

    def take(self, item: dict[str, Any]) -> bool:
        """Add a map. Return False if the page is full. The first map always fits."""
        self._bytes_left -= self._value_bytes(item)
        if len(self.items) >= self._limit or (self.items and self._bytes_left < 0):
            return False
        self.items.append(item)
        return True

    def answer(self, maps: Iterable[dict[str, Any]], name: str, key: str) -> dict[str, Any]:
        """Return an answer whose field ``name`` contains as many of ``maps`` as fit. If there are
        more, ``next`` is the ``key`` of the last map in the answer."""
        is_all = all(map(self.take, maps))
        return {name: self.items, "next": None if is_all else self.items[-1][key]}


NOT_STORED = (Merging.KEPT, Merging.REPLACED, Merging.REJECTED)


def topic_map(core: Core, topic: Topic, now: Now) -> dict[str, Any]:
    """Return the counts of one topic. Due tasks count as ready even if the topic has no group.
    Tasks of a group that is being deleted count, although the group is not listed."""
    return {
        **_topic_counts(topic),
        **{what.word: topic.merged[what] for what in NOT_STORED},
        "oldest_ready_ms": max(age_ms(group, now) for group in topic.holders),
        "broadcasters": len(topic.broadcasters),
        **settings_map(topic.settings, core.policies),
        "groups": {group.name: group_map(core, group, now) for group in topic.live_groups},
        **({} if topic.settings.closed_ms is None else {"deleting": True}),
    }


def group_map(core: Core, group: Group, now: Now) -> dict[str, Any]:
    return {
        "ready": group.ready_count,
        "in_flight": len(group.flight),
        "waiting": len(group.waiting),
        "retrying": len(group.waiting),
        "dead": group.dead,
        **_key_counts(group),
        "subscribers": len(group.subscribers),
        **{name: getattr(group, name) for name in _COUNTED},
        "since_ms": group.since_ms,
        "unused_ms": group.unused_ms(now.mono_ms),
        "replay": replay_map(group),
        "oldest_ready_ms": age_ms(group, now),
        **settings_map(group.settings, core.policies, is_ordered=group.is_ordered),
    }


def _key_counts(group: Group) -> dict[str, int]:
    """Return the counts for order keys and fair shares, if the group has had such tasks."""
    if not group.is_ordered:
        return {}
    paused = len(group.paused_keys)
    return {"held": group.held, "paused_keys": paused, "in_lines": group.awaiting_turn}


def replay_map(group: Group) -> dict[str, Any] | None:
    """Return the progress of the group's replay of earlier tasks, or None if none is running."""
    replay = group.topic.replays.get(group)
    if replay is None:
        return None
    return {"looked_at": replay.looked_at, "given": replay.given, "share": replay.share}


def age_ms(group: Group, now: Now) -> int:
    """Return the age in ms of the oldest ready task, or 0 if no task is ready."""
    since_ms = group.oldest_since_ms()
    return max(0, now.now_ms - since_ms) if since_ms is not None else 0


# --- settings -------------------------------------------------------------------------------------


def policy_map(ref: PolicyRef | None, policies: Mapping[str, RetryPolicy]) -> dict[str, Any] | None:
    """Return a policy with its numbers, and with its name if it has one."""
    if ref is None:
        return None
    if isinstance(ref, RetryPolicy):
        return ref.to_map()
    numbers = policies.get(ref, policies[DEFAULT]).to_map()
    return {"kind": numbers.pop("kind"), "name": ref} | numbers


def settings_map(
    settings: GroupSettings, policies: Mapping[str, RetryPolicy], *, is_ordered: bool = False
) -> dict[str, Any]:
    """Return the settings of a topic or group. ``is_ordered`` is the one of
    ``specific_settings``."""
    return {
        "paused": settings.paused,
        "rate": settings.rate,
        "burst": settings.burst,
        "retry": policy_map(settings.retry, policies),
        **specific_settings(settings, is_ordered=is_ordered),
    }


def specific_settings(settings: GroupSettings, *, is_ordered: bool) -> dict[str, Any]:
    """Return those settings that only topics or only groups have and that were changed. Settings of
    order keys are complete if any is changed or the group has had a task with an order key
    (``is_ordered``)."""
    rule = {} if settings.if_pending is None else {"if_pending": settings.if_pending.to_map()}
    named: dict[str, Any] = {
        "broadcast_only": settings.broadcast_only or None,
        "tags": settings.tags,
    }
    named |= {"where": settings.where, "paused_ms": settings.paused_ms}
    lines = order_settings(settings)
    is_ordered |= settings.order != OrderSettings()
    named |= effective_order_settings(settings) if is_ordered else lines
    return rule | {name: value for name, value in named.items() if value is not None}


def order_settings(settings: GroupSettings) -> dict[str, Any]:
    """Return a group's settings of order keys and fair shares by name; None means unset."""
    return dict(zip(LINE_SETTINGS, (*settings.order, *settings.shares), strict=True))


def effective_order_settings(settings: GroupSettings) -> dict[str, Any]:
    """Return the effective settings of order keys and fair shares, including defaults."""
    rules = OrderRules.of(settings.order)
    return order_settings(settings) | dict(zip(ORDER_SETTINGS, rules, strict=True))
