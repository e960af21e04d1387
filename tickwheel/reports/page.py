"""The report as one HTML page, which needs no network and no other file.

The tables are plain HTML. A script in the page draws the charts from data in the page. All values
from the history (topics, keys, reasons) are escaped. The module uses no files except its assets.
The span of the report determines the length of the charts' buckets, from a second to a day
(``grain``); the figures use the same function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from tickwheel.reports import HOUR_MS, QUARTER_MS, ReportSettings, Row, Rows

if TYPE_CHECKING:
    from tickwheel.reports.state import Manifest

STEPS_MS = (1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 180_000, 300_000, QUARTER_MS)
"""Lengths of steps. Each divides a quarter of an hour, so no step spans two local hours."""
BUCKETS_MAX = 240
"""Maximum number of steps in a chart."""
HOURS_MAX = 24 * 15
"""Maximum number of hours in a chart. A longer span has a bucket for each day."""
FINE_ROWS_MAX = 2_000_000
"""Maximum number of events in the table for steps below a quarter of an hour in charts, because the
events themselves must be counted for them."""


@dataclass(frozen=True)
class Grain:
    """The buckets of the charts."""

    name: str
    """``step``, ``hour`` or ``day``; charts show the figures ``by_step``, ``by_hour`` or
    ``by_day``."""
    step_ms: int
    """Length of a bucket in milliseconds. It is approximate for hours and days."""

    @property
    def is_fine(self) -> bool:
        """Whether buckets are shorter than the quarters of an hour for which figures are stored."""
        return self.step_ms < QUARTER_MS

    @property
    def text(self) -> str:
        """The length of a bucket in words, such as ``5 seconds`` or ``hour``."""
        if self.name != "step":
            return self.name
        size, unit = (self.step_ms // 60_000, "minute")
        if not size:
            size, unit = (self.step_ms // 1_000, "second")
        return unit if size == 1 else f"{size} {unit}s"


def grain(manifest: Manifest, settings: ReportSettings) -> Grain:
    """Return the shortest buckets that do not exceed the maximum number in the report's span."""
    first_ms, last_ms = manifest.first_ms or 0, manifest.last_ms or 0
    begin_ms = first_ms if settings.since_ms is None else max(first_ms, settings.since_ms)
    end_ms = last_ms if settings.until_ms is None else min(last_ms, settings.until_ms)
    span_ms = max(0, end_ms - begin_ms)
    for step_ms in STEPS_MS:
        if step_ms < QUARTER_MS and manifest.rows > FINE_ROWS_MAX:
            continue
        if span_ms < step_ms * BUCKETS_MAX:
            return Grain("step", step_ms)
    if span_ms <= HOURS_MAX * HOUR_MS:
        return Grain("hour", HOUR_MS)
    return Grain("day", 24 * HOUR_MS)


# --- the page -------------------------------------------------------------------------------------


HEAT_TOPICS_MAX = 60
"""Maximum number of topics in the heat map, which shows the busiest."""

EXAMPLES_MAX = 3_000
"""Maximum number of example tasks that the buckets of the charts list in total."""

_SHORT = {
    "p50": "late_p50_ms", "p90": "late_p90_ms", "p99": "late_p99_ms", "max": "late_max_ms",
    "share": "on_time_share", "first": "first_deliveries", "target": "target_ms",
    "acked": "acked", "nacked": "nacked", "lease_over": "lease_over", "dead": "dead",
    "expired": "expired", "cancelled": "cancelled",
}  # fmt: skip
_MEASURED = frozenset({"p50", "p90", "p99", "max", "share"})


def render(
    rows: Mapping[str, Rows], topics: Sequence[str], manifest: Manifest, settings: ReportSettings
) -> str:
    """Return the HTML of the page."""
    buckets = grain(manifest, settings)
    assets = files("tickwheel.reports") / "assets"
    filled = {
        "css": (assets / "report.css").read_text("utf-8"),
        "library": (assets / "uplot.min.js").read_text("utf-8"),
        "charts": (assets / "charts.js").read_text("utf-8"),
        "script": (assets / "report.js").read_text("utf-8"),
        "span": escape(_span(rows, topics, settings)),
        "grain": escape(buckets.text),
        "busiest": f", the {HEAT_TOPICS_MAX} busiest" if len(topics) > HEAT_TOPICS_MAX else "",
        "notices": _notices(rows, manifest),
        "cards": _cards(
            rows["all"][0] if rows["by_topic"] else {}, rows["stuck_by_group"], rows["slo"]
        ),
        "tables": tables(rows, settings),
        "footer": _footer(manifest, settings),
        "data": _json(_data(rows, buckets, settings.timezone)),
    }
    text = (assets / "report.html").read_text("utf-8")
    head, *parts = text.split("@@")
    # Replace placeholders only in the template, never in values.
    pieces = [filled.get(part, part) if i % 2 == 0 else part for i, part in enumerate(parts)]
    return head + "".join(pieces)


def _data(rows: Mapping[str, Rows], buckets: Grain, timezone: str) -> dict[str, Any]:
    """Return the data for the page's script."""
    chosen = rows[f"by_{buckets.name}"]
    names = _names(chosen)
    return {
        "zone": timezone,
        "step": buckets.step_ms,
        "grain": buckets.name,
        "buckets": _times({row["start_ms"] for row in chosen}, buckets, timezone),
        "names": names,
        "cards": {f"{topic}\n{group}": _cards_of(rows, topic, group) for topic, group in names},
        "all": [_slim(row) for row in rows[f"all_by_{buckets.name}"]],
        "rows": [{"topic": row["topic"], "group": row["group"], **_slim(row)} for row in chosen],
        "attempts": rows["attempts"],
        "reasons": rows["reasons"],
        "heat": _heat(rows["by_hour"]),
        "backlog": _backlog(rows["backlog_by_step" if buckets.name == "step" else "backlog"]),
        "examples": [
            {"at": row["start_ms"], "topic": row["topic"], "group": row["group"],
             "task": str(row["task_id"]), "key": row["key"], "took": row["took_ms"]}
            for row in rows["examples"][:EXAMPLES_MAX]
        ],
    }  # fmt: skip


def _names(rows: Rows) -> list[tuple[str, str]]:
    """Return the page's choices: (topic, group) of each group, and (topic, "") of topics without
    groups, such as those that only have broadcasts."""
    names = {(row["topic"], row["group"]) for row in rows if row["group"]}
    grouped = {topic for topic, _ in names}
    return sorted(names | {(row["topic"], "") for row in rows if row["topic"] not in grouped})


def _times(starts: set[int], buckets: Grain, timezone: str) -> list[int]:
    """Return the start of every bucket in the span, including empty ones."""
    if not starts:
        return []
    if buckets.name != "day":
        return sorted(starts | set(range(min(starts), max(starts), buckets.step_ms)))
    zone, day = ZoneInfo(timezone), timedelta(days=1)
    start = datetime.fromtimestamp(min(starts) / 1000, zone)
    while (start_ms := round(start.timestamp() * 1000)) < max(starts):
        starts = starts | {start_ms}
        start += day  # in wall-clock time, because a day can have 23 hours
    return sorted(starts)


def _slim(row: Row) -> Row:
    """Return a row without nulls, and without zeros except in ``_MEASURED`` fields. The script
    fills in what is missing."""
    values = {
        short: row[name] or 0
        for short, name in _SHORT.items()
        if row[name] or (row[name] == 0 and short in _MEASURED)
    }
    return {"at": row["start_ms"], **values}


def _heat(by_hour: Rows) -> list[dict[str, Any]]:
    """Return 24 cells for each of the busiest topics, with deliveries, p99 and failures. Means are
    over all days of the report, also those without events."""
    cells_of: dict[str, list[list[tuple[int, float | None, int]]]] = {}
    for row in by_hour:
        if row["group"] or row["delivered"]:
            cells = cells_of.setdefault(row["topic"], [[] for _ in range(24)])
            failed = row["nacked"] + row["lease_over"] + row["dead"]
            hour = int(row["local"][11:13])
            cells[hour].append((row["delivered"], row["late_p99_ms"], failed))
    dates = [date.fromisoformat(row["local"][:10]) for row in by_hour]
    days = (max(dates) - min(dates)).days + 1 if dates else 0
    busiest = sorted(
        cells_of, key=lambda topic: -sum(x[0] for cell in cells_of[topic] for x in cell)
    )
    shown = {topic: cells_of[topic] for topic in busiest[:HEAT_TOPICS_MAX]}
    return [
        {
            "topic": topic,
            "delivered": [sum(x[0] for x in c) / days if c else None for c in cells],
            "late": [max((x[1] for x in c if x[1] is not None), default=None) for c in cells],
            "failed": [sum(x[2] for x in c) / days if c else None for c in cells],
        }
        for topic, cells in sorted(shown.items())
    ]


def _backlog(rows: Rows) -> list[dict[str, Any]]:
    """Return an entry for each backlog, with its levels in order of time."""
    entries: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        name = (row["kind"], row["topic"], row["group"])
        entry = entries.setdefault(
            name, {"kind": name[0], "topic": name[1], "group": name[2], "at": [], "level": []}
        )
        entry["at"].append(row["start_ms"])
        entry["level"].append(row["at_end"])
    return list(entries.values())


def _span(rows: Mapping[str, Rows], topics: Sequence[str], settings: ReportSettings) -> str:
    starts = [row["local"] for row in rows["by_hour"]]
    if not starts:
        return "no events in the requested time"
    topic_count = f"{len(topics)} topic{'s' if len(topics) != 1 else ''}"
    return f"{min(starts)[:16]} to {max(starts)[:13]}:59, {settings.timezone}, {topic_count}"


def _cards_of(rows: Mapping[str, Rows], topic: str, group: str) -> str:
    """Return the cards for a topic or group. The cards of a group include figures of its topic."""
    selected = {"topic": topic, "group": group}
    service = next(
        (row for row in with_topic_counts(rows["by_topic"]) if selected.items() <= row.items()), {}
    )
    stuck = [row for row in rows["stuck_by_group"]
             if row["topic"] == topic and row["group"] in {"", group}]  # fmt: skip
    return _cards(service, stuck, [row for row in rows["slo"] if selected.items() <= row.items()])


def _stuck_remark(rows: Mapping[str, Rows]) -> str:
    total, listed = sum(row["tasks"] for row in rows["stuck_by_group"]), len(rows["stuck"])
    if total == listed:
        return "Longest overdue first."
    return f"The {listed:,} longest overdue of {total:,} tasks."


def _cards(row: Row, stuck_by_group: Rows, objectives: Rows) -> str:
    if not row:
        return ""
    stuck = sum(summary["tasks"] for summary in stuck_by_group)
    missed = any(objective["met"] is False for objective in objectives) or row["undelivered"]
    cards = [
        ("tasks enqueued", count(row["enqueued"]), ""),
        ("deliveries", count(row["delivered"]), ""),
        ("on time, of all due tasks", percent(row["kept_share"]), "bad" if missed else "good"),
        ("never delivered", count(row["undelivered"]), "bad" if row["undelivered"] else "good"),
        ("lateness p50", duration(row["late_p50_ms"]), ""),
        ("lateness p99", duration(row["late_p99_ms"]), ""),
        ("acked at the first try", percent(row["first_try_share"]), ""),
        ("dead letters", count(row["dead"]), "bad" if row["dead"] else ""),
        ("stuck tasks", count(stuck), "bad" if stuck else "good"),
    ]
    return "".join(
        f'<div class="card {kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value, kind in cards
    )


TOPIC_COUNTS = ("enqueued", "rescheduled", "cancelled", "expired")
"""Events of a task as a whole, which have no group."""


def with_topic_counts(by_topic: Rows) -> Rows:
    """Return a row for each group, with the counts of its topic; and the rows of topics without
    groups."""

    def extend(row: Row, topic_row: Row) -> Row:
        return {name: row[name] + topic_row.get(name, 0) for name in TOPIC_COUNTS}

    return _with_topics(by_topic, ("topic",), extend)


def _with_topics(rows: Rows, key_fields: Sequence[str], extend: Callable[[Row, Row], Row]) -> Rows:
    """Return a row for each group, extended by ``extend(row, topic_row)``, and the rows of topics
    without groups. ``topic_row`` is the topic's row with the same values in ``key_fields``, or
    empty."""

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in key_fields)

    topic_rows = {key(row): row for row in rows if not row["group"]}
    grouped = {key(row) for row in rows if row["group"]}
    return [
        {**row, **extend(row, topic_rows.get(key(row), {}))} if row["group"] else row
        for row in rows
        if row["group"] or key(row) not in grouped
    ]


def _notices(rows: Mapping[str, Rows], manifest: Manifest) -> str:
    notices = []
    if manifest.synthetic:
        share = "All" if manifest.synthetic == manifest.rows else count(manifest.synthetic)
        text = "of the events were generated by “tickwheel history generate”, not measured."
        notices.append(("", f"Synthetic data: {share} {text}"))
    dropped = sum(row["n"] for row in rows["daemon"] if row["what"] == "dropped")
    if dropped:
        notices.append(("bad", f"{count(dropped)} events are missing: the daemon dropped them "
                               "because its disk was too slow or full."))  # fmt: skip
    bad = sum(row["lines"] for row in rows["quarantine"])
    if bad:
        notices.append(("", f"{count(bad)} lines could not be read and are in the quarantine."))
    return "".join(f'<p class="notice {kind}">{escape(text)}</p>' for kind, text in notices)


def _footer(manifest: Manifest, settings: ReportSettings) -> str:
    last = "–"
    if manifest.last_ms is not None:
        zone = ZoneInfo(settings.timezone)
        newest_at = datetime.fromtimestamp(manifest.last_ms / 1000, UTC).astimezone(zone)
        last = newest_at.strftime("%Y-%m-%d %H:%M:%S %Z")
    return escape(
        f"{count(manifest.rows)} events from {count(len(manifest.segments))} segments, the newest "
        f"from {last}. {count(manifest.duplicates)} duplicate lines, from repeated reads of "
        "growing segments or from several folders, count once. Percentiles are exact. "
        "On-time shares refer to first deliveries, success shares to ended deliveries."
    )


def _json(data: Any) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


LISTED_MAX = 500
"""Maximum number of rows in a table of the page. Its CSV file contains all rows."""

Column = tuple[str, str, Callable[[Any], str]]
"""(heading, field of the row, function that formats a cell)."""


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


def wrappable(value: Any) -> str:
    """Format the name of a topic or group, which can be wrapped after its separators."""
    return text(value)


def unwrapped(value: Any) -> str:
    """Format text that is never wrapped, such as an id or a day."""
    return text(value)


def spaced(value: Any) -> str:
    return text(value).replace("_", " ")


def change(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def points(share: float | None) -> str:
    """Format a difference of shares in percentage points."""
    return "–" if share is None else f"{100 * share:+.3f}"


def multiple(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def newest(days: list[Row]) -> list[Row]:
    """Return the rows of the last day for which there is a previous day, largest changes first."""
    last = max((row["local"] for row in days), default="")
    changed = [row for row in days if row["local"] == last and row["delivered_change"] is not None]
    return sorted(changed, key=lambda row: -abs(row["delivered_change"]))


def with_topic_counts_by_day(rows: Rows) -> Rows:
    """Return a row for each group and day, with the number of enqueued tasks of its topic."""

    def extend(row: Row, topic_row: Row) -> Row:
        return {name: (topic_row or row)[name] for name in ("enqueued", "enqueued_change")}

    return _with_topics(rows, ("topic", "local"), extend)


def tables(rows: Mapping[str, list[Row]], settings: ReportSettings) -> str:
    """Return all tables of the page that have rows."""
    zone = ZoneInfo(settings.timezone)

    def moment(ms: int | None) -> str:
        if ms is None:
            return "–"
        return datetime.fromtimestamp(ms / 1000, UTC).astimezone(zone).strftime("%m-%d %H:%M:%S")

    days = with_topic_counts_by_day(rows["day_against_day"])
    last = newest(days)
    named: list[Column] = [("topic", "topic", wrappable), ("group", "group", wrappable)]
    parts = [
        _table("Topics and groups", "Lateness of first deliveries; time to the ack. Enqueued, "
               "cancelled and expired are the topic’s.", with_topic_counts(rows["by_topic"]),
               [*named, *_SERVICE], bad=lambda row: bool(row["undelivered"])),
        _table("Filtered and held up", "Tasks that the group’s filter excluded; first deliveries "
               "that were late because of their order key or fair share.",
               [row for row in rows["by_topic"] if row["filtered"] or row["held_up"]],
               [*named, *_HELD_UP]),
        _table("Objectives", "Share of first deliveries that were on time. Budget: late "
               "deliveries, as a multiple of those that the objective allows.",
               rows["slo"], [*named, *_SLO], bad=lambda row: row["met"] is False),
        _table("Days that missed an objective", "", rows["slo_breaches"],
               [("day", "local", unwrapped), *named, *_BREACH]),
        _table("Changes", f"{last[0]['local']} compared with the previous day. Enqueued is the "
               "topic’s." if last else "", last, [*named, *_DAYS]),
        _table("Day by day", "Each day, compared with the previous day. "
               "Enqueued is the topic’s.",
               days if len({row["local"] for row in days}) > 2 else [],
               [*named, ("day", "local", unwrapped), *_DAYS]),
        _table("Stuck tasks by group", f"Overdue by more than {duration(settings.stuck_after_ms)}.",
               rows["stuck_by_group"],
               [*named, ("state", "state", text), ("tasks", "tasks", count),
                ("longest overdue", "overdue_ms", duration), ("since", "expected_ms", moment),
                ("for example", "task_id", unwrapped)]),
        _table("Stuck tasks", _stuck_remark(rows), rows["stuck"],
               [("task", "task_id", unwrapped), *named, ("state", "state", text),
                ("key", "key", text), ("expected", "expected_ms", moment),
                ("overdue", "overdue_ms", duration), ("attempts", "attempts", count)]),
        _table("Slowest keys", "Each with its slowest task, from due to ack.",
               rows["slowest_keys"],
               [*named, ("key", "key", text), ("took", "took_ms", duration),
                ("due", "came_due_ms", moment), ("deliveries", "deliveries", count),
                ("task", "task_id", unwrapped)]),
        _table("Slowest producers", "Times of their tasks, from due to ack.", rows["producers"],
               [("topic", "topic", wrappable), ("producer", "name", wrappable), *_PRODUCERS]),
        _table("Slowest subscribers", "Times from delivery to ack.", rows["subscribers"],
               [*named, ("subscriber", "name", wrappable), *_SUBSCRIBERS]),
        _table("Peak rates", "The busiest second.", rows["peaks"],
               [*named, ("event", "event", spaced), ("per second", "per_second", count),
                ("at", "at_ms", moment)]),
        _table("Why deliveries failed", "", rows["reasons"],
               [*named, ("event", "event", spaced), ("reason", "reason", text), ("n", "n", count)]),
        _table("Schedules", "Occurrences by outcome, and the lateness of those that fired.",
               rows["schedules"],
               [("schedule", "schedule", wrappable), ("topic", "topic", wrappable), *_SCHEDULES],
               lambda row: bool(row["missed"])),
        _table("Transactions", "Transactions by outcome, their tasks, and their ages from the "
               "first task to the outcome.", rows["transactions"],
               [("outcome", "what", text), ("n", "n", count), ("tasks", "tasks", count),
                ("mean age", "age_mean_ms", duration), ("oldest", "age_max_ms", duration)]),
        _table("The daemon", "", rows["daemon"], [("event", "what", text), ("n", "n", count)]),
        _table("Quarantine", "Lines of the history that are not valid events.", rows["quarantine"],
               [("reason", "reason", text), ("lines", "lines", count),
                ("segment", "segment", text), ("example", "example", _cut)]),
    ]  # fmt: skip
    return "".join(parts)


_SERVICE: list[Column] = [
    ("enqueued", "enqueued", count), ("delivered", "delivered", count), ("acked", "acked", count),
    ("cancelled", "cancelled", count), ("expired", "expired", count),
    ("retried", "nacked", count), ("dead", "dead", count),
    ("never delivered", "undelivered", count), ("on time", "kept_share", percent),
    ("p50", "late_p50_ms", duration), ("p90", "late_p90_ms", duration),
    ("p99", "late_p99_ms", duration), ("max", "late_max_ms", duration),
    ("ack p50", "ack_p50_ms", duration), ("ack p99", "ack_p99_ms", duration),
    ("first try", "first_try_share", percent),
]  # fmt: skip
_HELD_UP: list[Column] = [
    ("filtered", "filtered", count), ("first deliveries", "first_deliveries", count),
    ("held up", "held_up", count), ("total lateness", "held_up_sum_ms", duration),
    ("longest", "held_up_max_ms", duration),
]  # fmt: skip
_SLO: list[Column] = [
    ("target", "target_ms", duration), ("objective", "objective", percent),
    ("on time", "on_time_share", percent), ("budget used", "budget_used", multiple),
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

_SCHEDULES: list[Column] = [
    ("planned", "planned", count), ("fired", "fired", count), ("share", "fired_share", percent),
    ("missed", "missed", count), ("overlapped", "overlapped", count),
    ("on demand", "on_demand", count), ("backfilled", "backfilled", count),
    ("late p50", "late_p50_ms", duration), ("late p99", "late_p99_ms", duration),
    ("late max", "late_max_ms", duration),
]  # fmt: skip


def _cut(value: Any) -> str:
    shown = text(value)
    return shown if len(shown) <= 120 else shown[:119] + "…"


_KINDS: dict[Callable[[Any], str], str] = {
    text: "text", _cut: "text", spaced: "text", wrappable: "text name", unwrapped: "text word",
}  # fmt: skip
"""Function that formats a cell → the cell's class. All other functions format numbers."""


def _with_breaks(escaped: str, kind: str) -> str:
    """Return an escaped name with ``<wbr>`` after its separators."""
    return _PART.sub(r"\1<wbr>", escaped) if kind == "text name" else escaped


_PART = re.compile(r"([./:@_-])(?=\w)")


def _table(
    title: str,
    remark: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    bad: Callable[[Row], bool] = lambda row: False,
) -> str:
    if not rows:
        return ""
    kinds = [_KINDS.get(write, "n") for _, _, write in columns]
    heads = "".join(
        f'<th class="{kind}"><button type="button">{escape(head)}</button></th>'
        for (head, _, _), kind in zip(columns, kinds, strict=True)
    )
    lines = []
    for row in rows[:LISTED_MAX]:
        mark = " bad" if bad(row) else ""
        cells = "".join(
            f'<td class="{kind}{mark if kind == "n" else ""}"{_sort_attribute(row[field], kind)}>'
            f"{_with_breaks(escape(write(row[field])), kind)}</td>"
            for (_, field, write), kind in zip(columns, kinds, strict=True)
        )
        lines.append(f"<tr{_row_attributes(row)}>{cells}</tr>")
    if len(rows) > LISTED_MAX:
        remark += f" The first {LISTED_MAX} of {len(rows):,} rows; the CSV has all."
    return (
        f'<div class="table"><h2>{escape(title)}</h2><p>{escape(remark.strip())}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></div>"
    )


def _sort_attribute(value: Any, kind: str) -> str:
    """Return the HTML attribute with the value by which a numeric cell is sorted."""
    return "" if kind != "n" or value is None else f' data-v="{float(value):.17g}"'


def _row_attributes(row: Row) -> str:
    """Return the HTML attributes with a row's topic and group, by which the page selects rows."""
    return "".join(
        f' data-{name}="{escape(str(row[name]))}"' for name in ("topic", "group") if name in row
    )
