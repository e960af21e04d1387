"""What a report says of transactions, of schedules, and of filters and order keys.

Each tells of a morning of its own, in topics and a shard of its own; one run of Spark makes one
report of the three, which no test changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.story import Book, ms, write
from tickwheel.history.lines import EVENTS, EventKind, Renderer
from tickwheel.model.lateness import Cause
from tickwheel.reports import ReportSettings, schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report
    from tickwheel.reports.table import Outcome


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Report:
    from tickwheel.reports.job import run

    folder = tmp_path_factory.mktemp("mornings")
    history = folder / "history"
    write(history, morning_of_orders())
    write(history, morning_of_transactions().events)
    write(history, morning_of_schedules(wrong=True).events)
    return run(spark, ReportSettings((str(history),), str(folder / "out")))


# --- transactions ---------------------------------------------------------------------------------


def said(book: Book, at: str, what: str, name: str, tasks: int, age_ms: int | None = None) -> None:
    age = {} if age_ms is None else {"ack_ms": age_ms}
    book.add(at, f"transaction_{what}", transaction=name, count=tasks, **age)


def morning_of_transactions() -> Book:
    book = Book(shard=1)
    book.task(1, "letters", "10:00:00", "10:01:00")
    for name, tasks in (("a", 2), ("a", 3), ("b", 10), ("c", 1)):
        said(book, "10:00:00", "prepared", name, tasks)
    said(book, "10:00:01", "committed", "a", 5, 1_000)
    said(book, "10:00:04", "committed", "d", 7, 4_000)
    said(book, "10:59:00", "rolled_back", "b", 10, 59)
    said(book, "10:01:00", "checked", "c", 1)
    said(book, "10:02:00", "checked", "c", 1)
    # What no daemon says is bounded, and not trusted.
    book.add("10:03:00", "transaction_checked", transaction="x")
    return book


def test_transactions_are_counted_by_outcome(made: Report) -> None:
    rows = {row.pop("what"): row for row in map(dict, made.rows["transactions"])}
    none = {"age_mean_ms": None, "age_max_ms": None}
    assert rows == {
        "prepared": {"n": 4, "tasks": 16} | none,
        "committed": {"n": 2, "tasks": 12, "age_mean_ms": 2_500.0, "age_max_ms": 4_000},
        "rolled_back": {"n": 1, "tasks": 10, "age_mean_ms": 59.0, "age_max_ms": 59},
        "checked": {"n": 3, "tasks": 2} | none,
        "parked": {"n": 0, "tasks": 0} | none,
    }
    assert "<h2>Transactions</h2>" in Path(made.page).read_text()


# --- schedules ------------------------------------------------------------------------------------

SCHEDULE = {"topic": "mails", "schedule": "daily", "runs": 7}


def fired(book: Book, at: str, late_ms: int, reason: str | None = None, **more: object) -> None:
    time_ms = ms(f"{book.day}T{at}")
    why = {} if reason is None else {"reason": reason}
    book.add(at, "occurrence_fired", 1, **SCHEDULE | more, planned_ms=time_ms - late_ms,
             lateness_ms=late_ms, **why)  # fmt: skip


def morning_of_schedules(*, wrong: bool) -> Book:
    """``wrong``: with two events that are none."""
    book = Book(shard=2)
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
    if wrong:
        # No schedule, no planned time: neither is counted, both are in the quarantine.
        book.add("10:07:00", "occurrence_fired", 1, topic="mails", planned_ms=0, lateness_ms=0)
        book.add("10:07:00", "occurrence_skipped", topic="mails", schedule="daily", reason="missed")
    return book


def test_reports_know_every_event_of_the_history() -> None:
    assert set(schema.EVENTS) == set(EVENTS)


def test_schedules_compare_planned_and_actual_runs(made: Report) -> None:
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


# --- filters and order keys -----------------------------------------------------------------------

DUE = ms("2026-11-20T10:00:00")
HELD = (150, 4_000)
"""How late the order key made the first deliveries of ``billing``."""
TITLE = "<h2>Filtered and held up</h2>"


def lines(*records: list[Any]) -> Iterator[dict[str, Any]]:
    """As a daemon writes them."""
    renderer, seq = Renderer("n1", 0, 1), count(1)
    for record in records:
        for text in renderer.render(record, 0):
            yield json.loads(text) | {"seq": next(seq)}


def delivered(
    group: str | None, late_ms: int, tasks: list[int], cause: str | None, attempt: int = 1
) -> list[Any]:
    dues = [DUE] * len(tasks)
    return [EventKind.DELIVERED, DUE + late_ms, "orders", group, "w@1", tasks, attempt, dues, cause]


def filtered(group: str, tasks: list[int], *, last: bool) -> list[Any]:
    return [EventKind.ENDED, DUE, "orders", group, "filtered", tasks, last]


def morning_of_orders() -> Iterator[dict[str, Any]]:
    """Eight orders. ``billing`` goes by an order key, ``eu`` by a filter, ``all`` by neither."""
    tasks = list(range(1, 9))
    return lines(
        [EventKind.ENQUEUED, DUE - 1_000, "shop-1", tasks, [DUE] * 8, "orders", {}, None],
        delivered("billing", 3, [1, 2], None),
        delivered("billing", HELD[0], [3, 4, 5], Cause.KEY_BUSY),
        delivered("billing", HELD[1], [6], Cause.KEY_BUSY),
        # Later than all of them, of another cause.
        delivered("billing", 9_000, [7], Cause.NO_CREDIT),
        # Not a first one: no lateness, whatever stands beside it.
        delivered("billing", 60_000, [1], Cause.KEY_BUSY, attempt=2),
        filtered("eu", [1, 2, 3], last=False),
        filtered("eu", [4], last=True),
        delivered("eu", 200, [5], Cause.KEY_BUSY),
        delivered("all", 150, tasks, Cause.LOOP_BUSY),
    )


LATER = DUE + 24 * 3_600_000
"""So much later that figures are made from the counts that are kept, not from the events."""


def next_day() -> Iterator[dict[str, Any]]:
    """One more that is held up."""
    late_ms = LATER - DUE
    for line in lines(delivered("billing", late_ms, [8], Cause.KEY_BUSY)):
        yield line | {"epoch": 2}


def figures(rows: list[dict[str, Any]]) -> dict[str, tuple[int | None, ...]]:
    """Of each group of orders what its filter left out, and of first deliveries how many were held
    up, how late in all, and the latest."""
    names = ("filtered", "first_deliveries", "held_up", "held_up_sum_ms", "held_up_max_ms")
    orders = [row for row in rows if row["topic"] == "orders"]
    return {row["group"]: tuple(row[name] for name in names) for row in orders}


MORNING = {
    "": (0, 0, 0, None, None),
    "all": (0, 8, 0, None, None),
    "billing": (0, 7, 4, 3 * HELD[0] + HELD[1], HELD[1]),
    "eu": (4, 1, 1, 200, 200),
}


@pytest.mark.slow
def test_left_out_by_filters_and_held_up_by_keys(
    made: Report, spark: SparkSession, tmp_path: Path
) -> None:
    """From the events; and from the counts that are kept, which is what long histories have."""
    from tickwheel.reports.job import run

    for table in ("by_topic", "by_day"):
        assert figures(made.rows[table]) == MORNING, table
    (whole,) = made.rows["all"]
    assert (whole["filtered"], whole["held_up"], whole["held_up_sum_ms"]) == (4, 5, 4_650)
    shown = Path(made.page).read_text().split(TITLE)[1].split("</table>")[0]
    assert shown.count("<tr data-topic=") == 2
    assert 'data-group="billing"' in shown and 'data-group="eu"' in shown
    assert ">4.45 s</td>" in shown and ">4 s</td>" in shown
    shutil.copytree(Path(made.settings.out).parent, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "history", next_day(), 2)
    made = run(spark, ReportSettings((str(tmp_path / "history"),), str(tmp_path / "out")))
    longest = LATER - DUE
    held = (0, 8, 5, 3 * HELD[0] + HELD[1] + longest, longest)
    assert figures(made.rows["by_topic"]) == MORNING | {"billing": held}
    by_day = {day: [row for row in made.rows["by_day"] if row["local"] == day]
              for day in ("2026-11-20", "2026-11-21")}  # fmt: skip
    assert figures(by_day["2026-11-20"]) == MORNING
    assert figures(by_day["2026-11-21"]) == {"billing": (0, 1, 1, longest, longest)}


@pytest.mark.slow
def test_a_table_without_causes_is_extended(
    spark: SparkSession, load: Callable[..., Outcome], report: Callable[..., Report],
    history: Path, tmp_path: Path
) -> None:  # fmt: skip
    """What that version loaded was held up by nothing that is known; what comes later counts."""
    write(history, morning_of_orders())
    load()
    table = tmp_path / "out/table"
    without(spark, table / "facts/run=1", "held")
    without(spark, table / "events/run=1", "cause", "date", "topic_part")
    assert figures(report().rows["by_topic"])["billing"] == (0, 7, 0, None, None)
    write(history, next_day(), 2)
    longest = LATER - DUE
    assert figures(report().rows["by_topic"])["billing"] == (0, 8, 1, longest, longest)


def without(spark: SparkSession, place: Path, column: str, *folders: str) -> None:
    """The files below ``place`` as a version wrote them that had no such column."""
    result = spark.read.parquet(str(place))
    assert column in result.columns
    made = place.with_name("_made")
    result.drop(column).write.partitionBy(*folders).parquet(str(made))
    shutil.rmtree(place)
    made.rename(place)


def test_the_cause_is_called_as_the_daemon_calls_it() -> None:
    assert schema.KEY_BUSY == Cause.KEY_BUSY
