"""The bounds that a full run has to hold, in one table, and their check.

A bound names a metric of a case. Its figure is compared as measured, not rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Relation = Literal[">=", "<=", "<", "=="]
_COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq}
Verdict = Literal["holds", "broken", "not measured"]


@dataclass(frozen=True)
class Bound:
    """``metric relation limit``. Those that hold at any scale are judged in a quick run too."""

    metric: str
    relation: Relation
    limit: float
    what: str
    any_scale: bool = False
    needs_peer: bool = False
    store: str | None = None
    """The only store that it is about; None: any that has the case."""

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        if self.metric not in metrics:
            return "not measured"
        held = _COMPARE[self.relation](metrics[self.metric], self.limit)
        return "holds" if held else "broken"


def _peer(metric: str, limit: float, what: str) -> Bound:
    """The peer is beanstalkd."""
    return Bound(metric, ">=", limit, what, needs_peer=True, store="sqlite")


BOUNDS: tuple[Bound, ...] = (
    _peer("enqueue_frame.ratio_no_log", 1.0, "durable enqueue, one a frame / put, no log"),
    _peer("enqueue_frame.ratio_log", 1.5, "durable enqueue, one a frame / put, default log"),
    _peer("enqueue_frame.ratio_log_each", 12.0, "durable enqueue, one a frame / put, fsync each"),
    _peer("enqueue_batched.ratio_no_log", 2.0, "durable enqueue, batched / put, no log"),
    _peer("burst.ratio_no_log", 1.0, "burst with durable acks / reserve + delete, no log"),
    Bound("burst.early", "==", 0, "early in the burst", any_scale=True),
    Bound("history.ratio", ">=", 0.9, "delivery with a history / without"),
    Bound("lateness.daemon_p99_ms_at_2000", "<", 5.0, "lateness p99 at 2,000 a second, ms"),
    Bound("lateness.early", "==", 0, "early at a steady rate", any_scale=True),
    Bound("memory.bytes_per_task", "<=", 64.0, "memory a pending task, B"),
    Bound("recovery.counted_s", "<", 5.0, "recovery of 1 M after SIGKILL, s"),
    Bound("rate_pending.ratio", ">=", 0.8, "enqueue rate at 1 M pending / at 0"),
    Bound(
        "redis_enqueue.ratio_batched",
        ">=",
        3.0,
        "durable enqueue / ZADD + HSET through redis-py",
        needs_peer=True,
    ),
    Bound("redis_recovery.loaded_s", "<", 15.0, "recovery of 1 M after SIGKILL, s"),
    Bound("redis_recovery.early", "==", 0, "early after recovery", any_scale=True),
)


@dataclass(frozen=True)
class Judged:
    """A bound with its figure; ``None`` when there is none."""

    bound: Bound
    measured: float | None
    verdict: Verdict


def judge(
    metrics: Mapping[str, float], cases: Iterable[str], *, full: bool, store: str = "sqlite"
) -> list[Judged]:
    """The bounds of the cases that were asked for; in a quick run those of any scale."""
    asked = frozenset(cases)
    return [
        Judged(bound, metrics.get(bound.metric), bound.judge(metrics))
        for bound in BOUNDS
        if bound.metric.split(".")[0] in asked
        and bound.store in (None, store)
        and (full or bound.any_scale)
    ]


def failed(judged: Iterable[Judged], *, peers_wanted: bool) -> list[Judged]:
    """What makes ``--check`` fail: broken bounds, and those that could not be measured unless
    only because peers were not wanted."""
    return [
        one
        for one in judged
        if one.verdict == "broken"
        or (one.verdict == "not measured" and (peers_wanted or not one.bound.needs_peer))
    ]
