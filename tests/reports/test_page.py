"""The page's tables, from rows that are figures already."""

from __future__ import annotations

from typing import Any

import pytest

from tickwheel.cli.history import show_report
from tickwheel.cli.output import Output
from tickwheel.reports import ReportSettings, metrics
from tickwheel.reports.page import _heat, newest, with_topic_counts_by_day
from tickwheel.reports.state import Summary


def day(local: str, topic: str, group: str, **more: Any) -> dict[str, Any]:
    usual = {"enqueued": 0, "enqueued_change": None, "delivered": 0, "delivered_change": None}
    return {"local": local, "topic": topic, "group": group, **usual, **more}


def test_days_without_events_are_days() -> None:
    """The day before a Monday is a Sunday, and a week has seven days to share its events."""
    figures = dict.fromkeys(("enqueued", "delivered", "acked", "dead"), 10)
    figures |= {"late_p50_ms": 1.0, "late_p99_ms": 1.0, "on_time_share": 1.0}
    days = [
        {"local": local, "start_ms": at, "topic": "t", "group": "g", **figures}
        for at, local in enumerate(("2026-11-20", "2026-11-23", "2026-11-24"))
    ]
    changes = [row["delivered_change"] for row in metrics.day_against_day(days)]
    assert changes == [None, None, 0.0]
    hours = [
        {**row, "local": f"{row['local']} 09:00+00:00", "nacked": 0, "lease_over": 0, "dead": 1}
        for row in days
    ]
    (topic,) = _heat(hours)
    assert (topic["delivered"][9], topic["failed"][9]) == (30 / 5, 3 / 5)


def test_enqueued_tasks_are_shown_for_each_group() -> None:
    """Apart they would say of a group that nothing was enqueued, and of its topic that nothing
    was delivered."""
    rows = [
        day("11-21", "orders", "", enqueued=10),
        day("11-22", "orders", "", enqueued=12, enqueued_change=0.2),
        day("11-21", "orders", "billing", delivered=9),
        day("11-22", "orders", "billing", delivered=12, delivered_change=0.3),
        day("11-22", "orders", "mail", delivered=11),
        day("11-22", "news", "", enqueued=3),
    ]
    assert with_topic_counts_by_day(rows) == [
        day("11-21", "orders", "billing", enqueued=10, delivered=9),
        day("11-22", "orders", "billing", enqueued=12, enqueued_change=0.2, delivered=12,
            delivered_change=0.3),
        day("11-22", "orders", "mail", enqueued=12, enqueued_change=0.2, delivered=11),
        day("11-22", "news", "", enqueued=3),
    ]  # fmt: skip
    assert newest(with_topic_counts_by_day(rows)) == [with_topic_counts_by_day(rows)[1]]


def test_a_day_on_which_a_topic_was_only_enqueued_to_stays() -> None:
    rows = [day("11-21", "orders", "", enqueued=10), day("11-22", "orders", "g", delivered=1)]
    assert with_topic_counts_by_day(rows) == rows


def test_the_summary_has_enqueued_tasks_per_group(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "topic": "orders", "group": "billing", "enqueued": 0, "rescheduled": 0, "cancelled": 0,
        "expired": 0, "delivered": 6, "acked": 6, "nacked": 0, "dead": 0, "on_time_share": 1.0,
        "late_p50_ms": 1.0, "late_p99_ms": 2.0, "late_max_ms": 3, "first_try_share": 1.0,
    }  # fmt: skip
    of_topic = {**row, "group": "", "enqueued": 7, "delivered": 0, "acked": 0}
    made = Summary(
        page="report.html", left_out=[], new_events=1, events=1, duplicates=0, synthetic=0,
        stuck=0, stuck_listed=0, all={}, topics=[of_topic, row], slo=[], quarantine=[],
        load_s=1.0, figures_s=1.0,
    )  # fmt: skip
    show_report(Output(as_json=False), made, ReportSettings(("history",), "out"), 1.0)
    head, line, empty, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["topic", "group", "enqueued", "delivered"]
    assert line.split()[:4] == ["orders", "billing", "7", "6"]
    assert not empty
