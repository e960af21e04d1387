"""Against what was promised, and against the day before: from rows that are figures already.

Few rows, so they are reckoned with here and not by Spark. Rows are those of :func:`service.service`
by hour or day, topic and group; so is their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

Rows = list[dict[str, Any]]
Objective = Callable[[str], float]
"""Topic → the share of its first deliveries that shall be on time."""

SLO = """
    topic STRING, `group` STRING, target_ms LONG, objective DOUBLE, first_deliveries LONG,
    on_time LONG, days LONG, days_missed LONG, hours LONG, hours_missed LONG, on_time_share DOUBLE,
    met BOOLEAN, budget_used DOUBLE
"""
BREACHES = """
    local STRING, topic STRING, `group` STRING, target_ms LONG, objective DOUBLE,
    on_time_share DOUBLE, first_deliveries LONG, late_p99_ms DOUBLE, late_max_ms LONG
"""
DAY_AGAINST_DAY = """
    local STRING, topic STRING, `group` STRING, enqueued LONG, delivered LONG, acked LONG,
    dead LONG, late_p50_ms DOUBLE, late_p99_ms DOUBLE, on_time_share DOUBLE,
    enqueued_change DOUBLE, delivered_change DOUBLE, acked_change DOUBLE, dead_change DOUBLE,
    late_p50_ms_change DOUBLE, late_p99_ms_change DOUBLE, on_time_change DOUBLE
"""
_COMPARED = ("enqueued", "delivered", "acked", "dead", "late_p50_ms", "late_p99_ms")


def slo(by_day: Rows, by_hour: Rows, objective: Objective) -> Rows:
    """Each topic and group against its objective: the whole, and how many days and hours missed.

    ``budget_used`` is the share of the lateness that the objective allows; above 1 is a breach.
    """
    hours, found = _by_name(by_hour), []
    for (topic, group), days in _by_name(by_day).items():
        wanted = objective(topic)
        first = sum(row["first_deliveries"] for row in days)
        on_time = sum(row["on_time"] for row in days)
        same = hours[topic, group]
        found.append(
            {
                "topic": topic, "group": group,
                "target_ms": max(row["target_ms"] for row in days), "objective": wanted,
                "first_deliveries": first, "on_time": on_time,
                "days": len(days), "days_missed": _missed(days, wanted),
                "hours": len(same), "hours_missed": _missed(same, wanted),
                "on_time_share": on_time / first, "met": on_time / first >= wanted,
                "budget_used": _budget_used(on_time / first, wanted),
            }
        )  # fmt: skip

    def worst_first(row: dict[str, Any]) -> tuple[Any, ...]:
        used = row["budget_used"]
        return row["met"], used is not None, -(used or 0), row["topic"], row["group"]

    return sorted(found, key=worst_first)


def breaches(by_day: Rows, objective: Objective) -> Rows:
    """The days on which an objective was missed."""
    names = ("local", "topic", "group", "target_ms", "objective", "on_time_share",
             "first_deliveries", "late_p99_ms", "late_max_ms")  # fmt: skip
    judged = ({**row, "objective": objective(row["topic"])} for row in by_day)
    return [
        {name: row[name] for name in names}
        for row in sorted(judged, key=lambda row: (row["local"], row["topic"], row["group"]))
        if row["on_time_share"] is not None and row["on_time_share"] < row["objective"]
    ]


def day_against_day(by_day: Rows) -> Rows:
    """Each day's figures and their change from the day before that has any (not a ratio of 0)."""
    found: Rows = []
    before: dict[str, Any] = {}
    for row in sorted(by_day, key=lambda row: (row["topic"], row["group"], row["start_ms"])):
        if before and _name(before) != _name(row):
            before = {}
        kept = {k: row[k] for k in ("local", "topic", "group", *_COMPARED, "on_time_share")}
        changes = {f"{k}_change": _change(row[k], before.get(k)) for k in _COMPARED}
        share, last = row["on_time_share"], before.get("on_time_share")
        points = None if share is None or last is None else share - last
        found.append({**kept, **changes, "on_time_change": points})
        before = row
    return found


def _change(now: float | None, before: float | None) -> float | None:
    return None if now is None or not before else (now - before) / before


def _by_name(rows: Rows) -> dict[tuple[str, str], Rows]:
    """Rows with a first delivery, by topic and group."""
    delivered = (row for row in rows if row["first_deliveries"])
    return {name: list(same) for name, same in groupby(sorted(delivered, key=_name), _name)}


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["topic"], row["group"]


def _missed(rows: Iterable[dict[str, Any]], objective: float) -> int:
    return sum(row["on_time_share"] < objective for row in rows)


def _budget_used(share: float, objective: float) -> float | None:
    late, allowed = 1 - share, 1 - objective
    if allowed > 0:
        return late / allowed
    return None if late > 0 else 0.0
