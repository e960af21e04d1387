"""What ``tickwheel top`` shows, worked out from one STATS after the other. Pure.

Rates are differences of the daemon's totals over the daemon's own uptime, so that neither a
step of a clock nor a slow terminal bends them. After a restart the totals begin anew: no rate
until there are two answers of the same daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Map = Mapping[str, Any]
Key = tuple[str, str | None]
"""(topic, group or None for the topic itself)"""

RATED = ("enqueued", "delivered", "acked")
SORTS = ("busy", "name", "pending", "ready", "in-flight", "retrying", "dead", "age")
_FIELD = {"in-flight": "in_flight", "retrying": "waiting", "age": "oldest_ms"}


@dataclass(frozen=True)
class Row:
    """A topic, or a group of it. A rate is None while it cannot be known."""

    topic: str
    group: str | None
    pending: int | None
    ready: int
    in_flight: int
    waiting: int
    dead: int
    oldest_ms: int
    paused: bool
    enqueued_per_s: float | None = None
    delivered_per_s: float | None = None
    acked_per_s: float | None = None

    @property
    def busy(self) -> float:
        return self.delivered_per_s or 0.0


@dataclass(frozen=True)
class Frame:
    """One moment."""

    node: str
    role: str
    version: str
    epoch: int
    uptime_s: float
    store_ok: bool
    counts: Mapping[str, int]
    rates: Mapping[str, float | None]
    oldest_ms: int
    lateness: Map
    early: int
    connections: int
    subscribers: int
    topics: tuple[tuple[Row, tuple[Row, ...]], ...]
    """Each topic with its groups, sorted."""
    trouble: str = ""
    """Why this is not of now: the daemon cannot be asked."""

    def lost(self, why: str) -> Frame:
        """The last one that is known, with what is the matter."""
        return replace(self, trouble=why)

    def fields(self) -> dict[str, Any]:
        """As ``--json`` shows it."""
        return {
            "node": self.node,
            "role": self.role,
            "version": self.version,
            "epoch": self.epoch,
            "uptime_s": self.uptime_s,
            "store_ok": self.store_ok,
            **self.counts,
            **{f"{name}_per_s": value for name, value in self.rates.items()},
            "oldest_ready_ms": self.oldest_ms,
            "lateness": dict(self.lateness),
            "early": self.early,
            "connections": self.connections,
            "subscribers": self.subscribers,
            "reconnecting": bool(self.trouble),
            "topics": [
                {**_row_fields(topic), "groups": [_row_fields(group) for group in groups]}
                for topic, groups in self.topics
            ],
        }


NOTHING = Frame("-", "-", "-", 0, 0.0, True, {}, {}, 0, {}, 0, 0, 0, ())
"""Before the first answer."""


def _row_fields(row: Row) -> dict[str, Any]:
    name = {"topic": row.topic} if row.group is None else {"group": row.group}
    pending = {} if row.pending is None else {"pending": row.pending}
    enqueued = {} if row.group is not None else {"enqueued_per_s": row.enqueued_per_s}
    return {
        **name,
        **pending,
        "ready": row.ready,
        "in_flight": row.in_flight,
        "waiting": row.waiting,
        "dead": row.dead,
        "oldest_ready_ms": row.oldest_ms,
        "paused": row.paused,
        **enqueued,
        "delivered_per_s": row.delivered_per_s,
        "acked_per_s": row.acked_per_s,
    }


@dataclass
class Meter:
    """Keeps the answer before, for the rates."""

    sort: str = "busy"
    _before: Map | None = field(default=None, init=False)

    def read(self, raw: Map, role: str = "active") -> Frame:
        """The frame of one STATS."""
        before = self._before
        if before is not None and not _same_run(before, raw):
            before = None
        self._before = raw
        took_s = 0.0 if before is None else raw["uptime_s"] - before["uptime_s"]
        topics_before: Map = {} if before is None else before["topics"]
        topics = [
            self._topic(name, topic, topics_before.get(name), took_s)
            for name, topic in raw["topics"].items()
        ]
        counts = {n: int(raw[n]) for n in ("pending", "ready", "in_flight", "waiting", "dead")}
        return Frame(
            node=str(raw["node"]),
            role=role,
            version=str(raw["version"]),
            epoch=raw["epoch"],
            uptime_s=raw["uptime_s"],
            store_ok=bool(raw["store_ok"]),
            counts=counts,
            rates=_rates(raw, before, took_s),
            oldest_ms=max((topic.oldest_ms for topic, _ in topics), default=0),
            lateness=raw.get("lateness") or {},
            early=raw["early"],
            connections=raw["connections"],
            subscribers=raw["subscribers"],
            topics=tuple(sorted(topics, key=lambda found: _order(found[0], self.sort))),
        )

    def _topic(
        self, name: str, raw: Map, before: Map | None, took_s: float
    ) -> tuple[Row, tuple[Row, ...]]:
        groups_before: Map = (before or {}).get("groups") or {}
        groups = [
            _row((name, group), of_group, groups_before.get(group), took_s)
            for group, of_group in (raw.get("groups") or {}).items()
        ]
        groups.sort(key=lambda row: _order(row, self.sort))
        return _row((name, None), raw, before, took_s), tuple(groups)


def _same_run(before: Map, now: Map) -> bool:
    same = before["epoch"] == now["epoch"] and before["node"] == now["node"]
    return bool(same and now["uptime_s"] > before["uptime_s"])


def _rates(raw: Map, before: Map | None, took_s: float) -> dict[str, float | None]:
    """What is new since then counts from 0: a topic that came to be in between."""
    if took_s <= 0:
        return dict.fromkeys(RATED)
    return {
        name: round((raw[name] - (before or {}).get(name, 0)) / took_s, 1)
        for name in RATED
        if name in raw
    }


def _row(key: Key, raw: Map, before: Map | None, took_s: float) -> Row:
    topic, group = key
    rates = _rates(raw, before, took_s)
    return Row(
        topic,
        group,
        raw.get("pending"),
        raw["ready"],
        raw["in_flight"],
        raw["waiting"],
        raw["dead"],
        raw.get("oldest_ready_ms") or 0,
        bool(raw.get("paused")),
        **{f"{name}_per_s": rates.get(name) for name in RATED},
    )


def _order(row: Row, sort: str) -> tuple[float, str, str]:
    """Largest first; what is equal by name."""
    value = 0.0 if sort == "name" else getattr(row, _FIELD.get(sort, sort)) or 0
    return -float(value), row.topic, row.group or ""
