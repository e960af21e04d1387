"""A report by schedule: planned against fired, missed, skipped, and how late."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.story import Book, ms, write
from tickwheel.history.lines import EVENTS
from tickwheel.reports import ReportSettings, schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from tickwheel.reports.load import Outcome

SCHEDULE = {"topic": "mails", "schedule": "daily", "runs": 7}


def fired(book: Book, at: str, late_ms: int, reason: str | None = None, **more: object) -> None:
    time_ms = ms(f"{book.day}T{at}")
    why = {} if reason is None else {"reason": reason}
    book.add(at, "occurrence_fired", 1, **SCHEDULE | more, planned_ms=time_ms - late_ms,
             lateness_ms=late_ms, **why)  # fmt: skip


def morning() -> Book:
    book = Book()
    book.add("10:00:00", "schedule_put", **SCHEDULE, settings={"cron": "@daily"})
    for late_ms in (0, 10, 20, 4_000):
        fired(book, "10:01:00", late_ms)
    fired(book, "10:02:00", 0, "run")
    fired(book, "10:02:00", 3_600_000, "backfill")
    planned_ms = ms("2026-11-20T10:00:00")
    book.add("10:03:00", "occurrence_skipped", **SCHEDULE, planned_ms=planned_ms, reason="missed",
             count=5)  # fmt: skip
    book.add("10:04:00", "occurrence_skipped", **SCHEDULE, planned_ms=planned_ms, reason="overlap")
    book.add("10:05:00", "occurrence_queued", **SCHEDULE, planned_ms=planned_ms)
    fired(book, "10:06:00", 7, topic="polls", schedule="poll")
    return book


def test_every_event_of_the_history_is_one_of_a_report() -> None:
    assert set(schema.EVENTS) == set(EVENTS)


def test_what_was_planned_against_what_became_of_it(spark: SparkSession, tmp_path: Path) -> None:
    from tickwheel.reports.job import run

    book = morning()
    # No schedule, no planned time: neither is counted, both are in the quarantine.
    book.add("10:07:00", "occurrence_fired", 1, topic="mails", planned_ms=0, lateness_ms=0)
    book.add("10:07:00", "occurrence_skipped", topic="mails", schedule="daily", reason="missed")
    write(tmp_path / "history", book.events)
    settings = ReportSettings(str(tmp_path / "history"), str(tmp_path / "out"))
    made = run(spark, settings)
    daily, poll = made.rows["schedules"]
    assert daily == {
        "schedule": "daily", "topic": "mails", "planned": 10, "fired": 4, "missed": 5,
        "overlapped": 1, "queued": 1, "on_demand": 1, "backfilled": 1, "fired_share": 0.4,
        "late_p50_ms": 15.0, "late_p90_ms": pytest.approx(20 + 0.7 * 3_980),
        "late_p99_ms": pytest.approx(20 + 0.97 * 3_980), "late_max_ms": 4_000,
    }  # fmt: skip
    assert (poll["schedule"], poll["planned"], poll["fired_share"]) == ("poll", 1, 1.0)
    assert [row["local"] for row in made.rows["schedules_by_day"]] == ["2026-11-20"] * 2
    (bad,) = made.rows["quarantine"]
    assert (bad["reason"], bad["lines"]) == ("missing", 2)
    page = Path(made.page).read_text()
    assert "<h2>Schedules</h2>" in page and '<td class="n bad" data-v="5">5</td>' in page


def test_a_table_of_a_version_without_schedules_goes_on(
    spark: SparkSession, load: Callable[..., Outcome], history: Path, tmp_path: Path
) -> None:
    from tickwheel.reports.files import Files
    from tickwheel.reports.table import Table

    write(history, morning().events)
    load()
    shutil.rmtree(tmp_path / "out" / "table" / "occurrences")
    later = Book("2026-11-21", epoch=2)
    fired(later, "10:06:00", 7)
    write(history, later.events, 2)
    manifest = load().manifest
    table = Table(spark, Files(spark), str(tmp_path / "out" / "table"))
    (row,) = table.rollup("occurrences", manifest).collect()
    assert (row.schedule, row.outcome, row.value_ms, row.n) == ("daily", "fired", 7, 1)
