"""The page's tables and how figures are written for people. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any
from zoneinfo import ZoneInfo

from tickwheel.reports.settings import ReportSettings

LISTED_MAX = 40
"""Rows of one table on the page; the CSV beside it has all."""

Row = dict[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""Heading, the row's field, how it is written. Right-aligned unless it is text."""


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.{3 if 0.99 < share < 1 else 1}f} %"


def duration(ms: float | None) -> str:
    if ms is None:
        return "–"
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms:.3g} ms"


def text(value: Any) -> str:
    return "–" if value in {None, ""} else str(value)


def change(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def points(share: float | None) -> str:
    """A difference of shares."""
    return "–" if share is None else f"{100 * share:+.3f}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def tables(rows: Mapping[str, list[Row]], settings: ReportSettings) -> str:
    """All tables; one without rows is left out."""
    zone = ZoneInfo(settings.timezone)

    def moment(ms: int | None) -> str:
        if ms is None:
            return "–"
        return datetime.fromtimestamp(ms / 1000, UTC).astimezone(zone).strftime("%m-%d %H:%M:%S")

    days = rows["day_against_day"]
    named: list[Column] = [("topic", "topic", text), ("group", "group", text)]
    parts = [
        _table("Topics and groups", "Lateness of first deliveries; time to the ack.",
               rows["by_topic"], [*named, *_SERVICE]),
        _table("Objectives", "Share of first deliveries that are on time. Budget: the lateness "
               "there was, as a multiple of what the objective allows.",
               rows["slo"], [*named, *_SLO], bad=lambda row: row["met"] is False),
        _table("Days that missed an objective", "", rows["slo_breaches"],
               [("day", "local", text), *named, *_BREACH]),
        _table("Day against day", "Changes against the day before.",
               days if len({row["local"] for row in days}) > 1 else [],
               [("day", "local", text), *named, *_DAYS]),
        _table("Stuck tasks", f"Not ended {duration(settings.stuck_after_ms)} after they should "
               "have been.", rows["stuck"],
               [("task", "task_id", text), *named, ("state", "state", text), ("key", "key", text),
                ("expected", "expected_ms", moment), ("overdue", "overdue_ms", duration),
                ("attempts", "attempts", count)]),
        _table("Slowest keys", "Each by its slowest task, from due to the ack.",
               rows["slowest_keys"],
               [*named, ("key", "key", text), ("took", "took_ms", duration),
                ("due", "came_due_ms", moment), ("deliveries", "deliveries", count),
                ("task", "task_id", text)]),
        _table("Slowest producers", "Their tasks, from due to the ack.", rows["producers"],
               [("topic", "topic", text), ("producer", "name", text), *_PRODUCERS]),
        _table("Slowest subscribers", "From a delivery to its ack.", rows["subscribers"],
               [*named, ("subscriber", "name", text), *_SUBSCRIBERS]),
        _table("Peak rates", "The busiest second.", rows["peaks"],
               [*named, ("event", "event", text), ("a second", "per_second", count),
                ("at", "at_ms", moment)]),
        _table("Why deliveries failed", "", rows["reasons"],
               [*named, ("event", "event", text), ("reason", "reason", text), ("n", "n", count)]),
        _table("The daemon", "", rows["daemon"], [("what", "what", text), ("n", "n", count)]),
        _table("Quarantine", "Lines of the history that are no events.", rows["quarantine"],
               [("reason", "reason", text), ("lines", "lines", count),
                ("segment", "segment", text), ("example", "example", _cut)]),
    ]  # fmt: skip
    return "".join(parts)


_SERVICE: list[Column] = [
    ("enqueued", "enqueued", count), ("delivered", "delivered", count), ("acked", "acked", count),
    ("retried", "nacked", count), ("dead", "dead", count), ("on time", "on_time_share", percent),
    ("p50", "late_p50_ms", duration), ("p90", "late_p90_ms", duration),
    ("p99", "late_p99_ms", duration), ("max", "late_max_ms", duration),
    ("ack p50", "ack_p50_ms", duration), ("ack p99", "ack_p99_ms", duration),
    ("first try", "first_try_share", percent),
]  # fmt: skip
_SLO: list[Column] = [
    ("target", "target_ms", duration), ("objective", "objective", percent),
    ("on time", "on_time_share", percent), ("budget used", "budget_used", times),
    ("days missed", "days_missed", count), ("hours missed", "hours_missed", count),
    ("first deliveries", "first_deliveries", count),
]  # fmt: skip
_BREACH: list[Column] = [
    ("target", "target_ms", duration), ("objective", "objective", percent),
    ("on time", "on_time_share", percent), ("p99", "late_p99_ms", duration),
    ("max", "late_max_ms", duration),
]  # fmt: skip
_DAYS: list[Column] = [
    ("enqueued", "enqueued", count), ("change", "enqueued_change", change),
    ("delivered", "delivered", count), ("change", "delivered_change", change),
    ("dead", "dead", count), ("change", "dead_change", change),
    ("p99", "late_p99_ms", duration), ("change", "late_p99_ms_change", change),
    ("on time", "on_time_share", percent), ("points", "on_time_change", points),
]  # fmt: skip
_PRODUCERS: list[Column] = [
    ("enqueued", "enqueued", count), ("acked", "acked", count),
    ("mean", "took_mean_ms", duration), ("worst", "took_max_ms", duration),
    ("redelivered", "redelivered", count),
]  # fmt: skip
_SUBSCRIBERS: list[Column] = [
    ("delivered", "delivered", count), ("acked", "acked", count), ("failed", "failed", count),
    ("mean", "ack_mean_ms", duration), ("worst", "ack_max_ms", duration),
]  # fmt: skip


def _cut(value: Any) -> str:
    shown = text(value)
    return shown if len(shown) <= 120 else shown[:119] + "…"


def _table(
    title: str,
    remark: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    bad: Callable[[Row], bool] = lambda row: False,
) -> str:
    if not rows:
        return ""
    kinds = ["text" if write in {text, _cut} else "n" for _, _, write in columns]
    heads = "".join(
        f'<th class="{kind}">{escape(name)}</th>'
        for (name, _, _), kind in zip(columns, kinds, strict=True)
    )
    lines = []
    for row in rows[:LISTED_MAX]:
        mark = " bad" if bad(row) else ""
        cells = "".join(
            f'<td class="{kind}{mark if kind == "n" else ""}">{escape(write(row[name]))}</td>'
            for (_, name, write), kind in zip(columns, kinds, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    if len(rows) > LISTED_MAX:
        remark += f" The first {LISTED_MAX} of {len(rows):,}; the CSV has all."
    return (
        f'<div class="table"><h2>{escape(title)}</h2><p>{escape(remark.strip())}</p>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
