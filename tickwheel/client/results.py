"""What the client's questions are answered with: read-only views of the daemon's maps.

Every class keeps the daemon's answer in ``raw``: fields that a newer daemon adds are there.
Whatever has not the shape of ``docs/protocol.md`` is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict, TypeVar

from tickwheel.client.tasks import Value
from tickwheel.client.times import moment
from tickwheel.errors import ProtocolError

Map = Mapping[str, Any]
Failure = tuple[int, int, str]
"""(attempt, when in ms since 1970, reason)"""
T = TypeVar("T")


def read(parse: Callable[[Any], T], answer: Any) -> T:
    """``parse(answer)``. Raises ProtocolError when the answer has not the shape it expects."""
    try:
        return parse(answer)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise ProtocolError(
            f"the daemon's answer cannot be understood: {type(problem).__name__}: {problem!s:.200}"
        ) from None


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """``status`` "scheduled": it has the new ``due``. Else what forbids it, and no ``due``."""

    status: str
    due_ms: int | None

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, answer: Any) -> Rescheduled:
        status, due_ms = answer
        return cls(str(status), None if due_ms is None else int(due_ms))


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """How one group stands with a task."""

    state: str
    attempt: int
    at_ms: int
    """When its lease ends, its retry comes, it died or was acked, by ``state``."""
    failures: tuple[Failure, ...]

    @classmethod
    def of(cls, raw: Map) -> GroupInfo:
        return cls(raw["state"], raw["attempt"], raw["at_ms"], _failures(raw["failures"]))


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as ``lookup`` finds it. When it is not stored any more, only id and state."""

    id: int
    state: str
    """"scheduled", "ready", "in_flight", "waiting", "dead", or how it ended: "acked",
    "cancelled", "expired", "deleted"; "gone": long ago; "unknown": never heard of."""
    raw: Map = field(repr=False)
    topic: str | None = None
    body: bytes | None = None
    due_ms: int | None = None
    enqueued_ms: int | None = None
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, Value] = field(default_factory=dict)
    priority: int = 0
    ttl_ms: int | None = None
    slot: int | None = None
    cycles: int | None = None
    """Rotations of the wheel left."""
    groups: Mapping[str, GroupInfo] = field(default_factory=dict)

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, raw: Map) -> TaskInfo:
        groups = {name: GroupInfo.of(group) for name, group in raw.get("groups", {}).items()}
        names = ("topic", "body", "due_ms", "enqueued_ms", "key", "tag", "ttl_ms", "slot", "cycles")
        return cls(
            int(raw["id"]),
            str(raw["state"]),
            raw,
            **{name: raw.get(name) for name in names},
            properties=raw.get("props") or {},
            priority=raw.get("priority", 0),
            groups=groups,
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that a group could not finish, until it is requeued or deleted."""

    id: int
    group: str
    topic: str
    died_ms: int
    attempt: int
    reason: str
    failures: tuple[Failure, ...]
    raw: Map = field(repr=False)

    @property
    def died(self) -> datetime:
        return moment(self.died_ms)

    @classmethod
    def of(cls, raw: Map) -> DeadLetter:
        return cls(
            raw["id"],
            raw["group"],
            raw["topic"],
            raw["died_ms"],
            raw["attempt"],
            raw["reason"],
            _failures(raw["failures"]),
            raw,
        )


@dataclass(frozen=True, slots=True)
class GroupStats:
    ready: int
    in_flight: int
    waiting: int
    dead: int
    subscribers: int
    delivered: int
    acked: int
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> GroupStats:
        names = ("ready", "in_flight", "waiting", "dead", "subscribers", "delivered", "acked")
        return cls(**_counts(raw, names), raw=raw)


_COUNTS = ("pending", "ready", "in_flight", "waiting", "dead", "enqueued", "delivered", "acked")


@dataclass(frozen=True, slots=True)
class TopicStats:
    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    groups: Mapping[str, GroupStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> TopicStats:
        groups = {name: GroupStats.of(group) for name, group in raw["groups"].items()}
        return cls(**_counts(raw, _COUNTS), groups=groups, raw=raw)


@dataclass(frozen=True, slots=True)
class Stats:
    """The daemon's counts at one moment; totals are since its start."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    topics: Mapping[str, TopicStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> Stats:
        topics = {name: TopicStats.of(topic) for name, topic in raw["topics"].items()}
        return cls(**_counts(raw, _COUNTS), topics=topics, raw=raw)


class Backup(TypedDict):
    """Where a backup was written, on the daemon's machine."""

    path: str
    bytes: int


def _counts(raw: Map, names: tuple[str, ...]) -> dict[str, int]:
    return {name: int(raw[name]) for name in names}


def _failures(raw: Any) -> tuple[Failure, ...]:
    return tuple((attempt, at_ms, reason) for attempt, at_ms, reason in raw)
