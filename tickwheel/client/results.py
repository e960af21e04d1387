"""What the client's questions are answered with: read-only views of the daemon's maps.

Every class keeps the daemon's answer in ``raw``: fields that a newer daemon adds are there.
Whatever has not the shape of ``docs/protocol.md`` is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict, TypeVar

from tickwheel.client.retry import Retry
from tickwheel.client.tasks import Value
from tickwheel.client.times import moment
from tickwheel.errors import ProtocolError

Map = Mapping[str, Any]
Failure = tuple[int, int, str, str]
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
    retries_left: int | None = None
    """Before it is dead; None: the daemon does not say."""

    @classmethod
    def of(cls, raw: Map) -> GroupInfo:
        failures, left = _failures(raw["failures"]), raw.get("retries_left")
        return cls(raw["state"], raw["attempt"], raw["at_ms"], failures, left)


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
    nacked: int
    expired: int
    since_ms: int
    """It is owed what is due from then on, and what was enqueued since it was made; 0: all that
    is there."""
    oldest_ready_ms: int
    """For how long the oldest of the ready ones has been; 0: there is none."""
    replay: float | None
    """It begins in the past: how much (0 to 1) of what was there before it has been looked at;
    None: all of it."""
    paused: bool
    rate: float | None
    burst: int | None
    retry: Retry | None
    raw: Map = field(repr=False)

    @property
    def retrying(self) -> int:
        """Those that wait for their next attempt."""
        return self.waiting

    @classmethod
    def of(cls, raw: Map) -> GroupStats:
        names = ("ready", "in_flight", "waiting", "dead", "subscribers", "delivered", "acked")
        newer = _newer(raw, "nacked", "expired", "since_ms", "oldest_ready_ms")
        replay = raw.get("replay")
        share = None if replay is None else float(replay["share"])
        return cls(**_counts(raw, names), **newer, replay=share, **_settings(raw), raw=raw)


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
    oldest_ready_ms: int
    """For how long the oldest of the ready ones has been; 0: there is none."""
    broadcasters: int
    """Subscribers that get everything while they are connected."""
    paused: bool
    rate: float | None
    burst: int | None
    retry: Retry | None
    groups: Mapping[str, GroupStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> TopicStats:
        groups = {name: GroupStats.of(group) for name, group in raw["groups"].items()}
        newer = _newer(raw, "oldest_ready_ms", "broadcasters")
        return cls(**_counts(raw, _COUNTS), **newer, **_settings(raw), groups=groups, raw=raw)


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
    dead_total: int
    """That ever became dead letters."""
    dead_expired: int
    """Dead letters that were kept for as long as they are kept."""
    dropped_once: int
    """Deliveries of at-most-once subscriptions that had their end and were not sent."""
    topics: Mapping[str, TopicStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> Stats:
        topics = {name: TopicStats.of(topic) for name, topic in raw["topics"].items()}
        newer = _newer(raw, "dead_total", "dead_expired", "dropped_once")
        return cls(**_counts(raw, _COUNTS), **newer, topics=topics, raw=raw)


class Backup(TypedDict):
    """Where a backup was written, on the daemon's machine."""

    path: str
    bytes: int


def _counts(raw: Map, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: int(raw[name]) for name in names}


def _newer(raw: Map, *names: str) -> dict[str, Any]:
    """Counts that an older daemon does not have."""
    return {name: int(raw.get(name) or 0) for name in names}


def _settings(raw: Map) -> dict[str, Any]:
    retry = raw.get("retry")
    return {
        "paused": bool(raw.get("paused", False)),
        "rate": raw.get("rate"),
        "burst": raw.get("burst"),
        "retry": None if retry is None else Retry.of(retry),
    }


def _failures(raw: Any) -> tuple[Failure, ...]:
    return tuple((one[0], one[1], one[2], one[3] if len(one) > 3 else "") for one in raw)
