"""What the client takes and gives: tasks, receipts, look-ups, counts. Plain values.

Times are ``datetime`` (aware), ``timedelta`` or seconds as float; the wire's integer
milliseconds are made here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tickwheel.errors import BadRequest

Seconds = float | timedelta
PropertyValue = str | int | float | bool


def to_ms(value: Seconds, name: str) -> int:
    """Whole milliseconds of a duration. Raises BadRequest for what is none, or negative."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise BadRequest(f"{name} must be seconds or a timedelta, not {value!r}")
    if not math.isfinite(seconds) or seconds < 0:
        raise BadRequest(f"{name} must be finite and not negative, not {value!r}")
    return round(seconds * 1000)


def moment_ms(value: datetime, name: str) -> int:
    """Milliseconds since 1970 of an aware datetime."""
    if not isinstance(value, datetime):
        raise BadRequest(f"{name} must be a datetime, not {value!r}")
    if value.tzinfo is None:
        raise BadRequest(f"{name} must have a time zone: {value!r} does not say which moment it is")
    return (value - _EPOCH) // timedelta(milliseconds=1)


def moment(ms: int) -> datetime:
    """The aware datetime (UTC) of milliseconds since 1970."""
    return _EPOCH + timedelta(milliseconds=ms)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Task:
    """One task to enqueue. Give ``delay`` (from now) or ``at`` (a moment), or neither: at once.

    ``priority`` 0 to 255, the highest is delivered first among tasks that are due. ``ttl``:
    how long after its due time it is still worth delivering.
    """

    topic: str
    body: bytes
    delay: Seconds | None = None
    at: datetime | None = None
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, PropertyValue] | None = None
    priority: int = 0
    ttl: Seconds | None = None


def task_fields(task: Task) -> tuple[Any, ...]:
    """The task as ENQUEUE carries it. Raises BadRequest naming the field."""
    if not isinstance(task.topic, str):
        raise BadRequest(f"topic must be a string, not {task.topic!r}")
    body = task.body
    if type(body) is not bytes:
        if not isinstance(body, (bytearray, memoryview)):
            raise BadRequest(f"body must be bytes, not {type(body).__name__}")
        body = bytes(body)
    delay_ms, due_ms = due_fields(task.delay, task.at)
    options: dict[str, Any] = {}
    if due_ms is not None:
        options["due_ms"] = due_ms
    if task.key is not None:
        options["key"] = task.key
    if task.tag is not None:
        options["tag"] = task.tag
    if task.properties:
        options["props"] = dict(task.properties)
    if task.priority:
        options["priority"] = task.priority
    if task.ttl is not None:
        options["ttl_ms"] = to_ms(task.ttl, "ttl")
    if options:
        return (task.topic, body, delay_ms, options)
    return (task.topic, body, delay_ms)


def due_fields(delay: Seconds | None, at: datetime | None) -> tuple[int | None, int | None]:
    """(delay_ms, due_ms), one of them None."""
    if at is None:
        return (0 if delay is None else to_ms(delay, "delay")), None
    if delay is not None:
        raise BadRequest("give delay or at, not both")
    return None, moment_ms(at, "at")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The daemon has taken the task durably."""

    id: int
    due_ms: int

    @property
    def due(self) -> datetime:
        return moment(self.due_ms)


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """``status`` is "scheduled", or the state that forbids it."""

    status: str
    due_ms: int | None

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as look-up and list show it. What is finished has only ``id`` and ``state``.

    ``groups`` maps a group's name to its standing: state, attempt, at_ms, failures.
    """

    id: int
    state: str
    topic: str | None = None
    body: bytes | None = None
    due_ms: int | None = None
    enqueued_ms: int | None = None
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, PropertyValue] = field(default_factory=dict)
    priority: int = 0
    ttl_ms: int | None = None
    slot: int | None = None
    cycles: int | None = None
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> TaskInfo:
        known = {name: raw[name] for name in _INFO_FIELDS if name in raw}
        return cls(**known, properties=raw.get("props") or {}, raw=raw)


_INFO_FIELDS = (
    *("id", "state", "topic", "body", "due_ms", "enqueued_ms", "key", "tag"),
    *("priority", "ttl_ms", "slot", "cycles", "groups"),
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that one group gave up on. ``failures``: (attempt, at_ms, reason), oldest first."""

    id: int
    group: str
    topic: str
    died_ms: int
    attempt: int
    reason: str
    failures: tuple[tuple[int, int, str], ...]

    @property
    def died(self) -> datetime:
        return moment(self.died_ms)

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> DeadLetter:
        fields = ("id", "group", "topic", "died_ms", "attempt", "reason")
        return cls(**{name: raw[name] for name in fields}, failures=tuple(raw["failures"]))


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Counts of one group of a topic."""

    ready: int
    in_flight: int
    waiting: int
    dead: int
    subscribers: int
    delivered: int
    acked: int


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Counts of one topic; the last four since the daemon's start."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    cancelled: int
    groups: Mapping[str, GroupStats]


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of the whole daemon. ``raw`` holds everything it said (docs/protocol.md)."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    early: int
    epoch: int
    topics: Mapping[str, TopicStats]
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> Stats:
        topics = {}
        for name, counts in raw["topics"].items():
            groups = {g: _counts(GroupStats, c) for g, c in counts["groups"].items()}
            topics[name] = _counts(TopicStats, {**counts, "groups": groups})
        stats: Stats = _counts(cls, {**raw, "topics": topics, "raw": raw})
        return stats


def _counts(kind: Any, given: Mapping[str, Any]) -> Any:
    """A newer daemon may say more; that stays in ``raw``."""
    return kind(**{name: given[name] for name in kind.__dataclass_fields__})
