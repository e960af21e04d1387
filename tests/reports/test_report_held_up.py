"""What a report says of filters and order keys: what was left out, and what was held up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.story import Book, ms, write
from tickwheel.history.lines import Kind, Renderer
from tickwheel.model.lateness import Cause
from tickwheel.reports import schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report
    from tickwheel.reports.load import Outcome

DUE = ms("2026-11-20T10:00:00")
HELD = (150, 4_000)
"""How late the order key made the first deliveries of ``billing``."""
TITLE = "<h2>Left out and held up</h2>"


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
    return [Kind.DELIVERED, DUE + late_ms, "orders", group, "w@1", tasks, attempt, dues, cause]


def filtered(group: str, tasks: list[int], *, last: bool) -> list[Any]:
    return [Kind.ENDED, DUE, "orders", group, "filtered", tasks, last]


def morning() -> Iterator[dict[str, Any]]:
    """Eight orders. ``billing`` goes by an order key, ``eu`` by a filter, ``all`` by neither."""
    tasks = list(range(1, 9))
    return lines(
        [Kind.ENQUEUED, DUE - 1_000, "shop-1", tasks, [DUE] * 8, "orders", {}, None],
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
    for one in lines(delivered("billing", late_ms, [8], Cause.KEY_BUSY)):
        yield one | {"epoch": 2}


def figures(rows: list[dict[str, Any]]) -> dict[str, tuple[int | None, ...]]:
    """Of each group what its filter left out, and of first deliveries how many were held up, how
    late in all, and the latest."""
    names = ("filtered", "first_deliveries", "held_up", "held_up_sum_ms", "held_up_max_ms")
    return {row["group"]: tuple(row[name] for name in names) for row in rows}


MORNING = {
    "": (0, 0, 0, None, None),
    "all": (0, 8, 0, None, None),
    "billing": (0, 7, 4, 3 * HELD[0] + HELD[1], HELD[1]),
    "eu": (4, 1, 1, 200, 200),
}


def test_left_out_by_filters_and_held_up_by_keys(
    report: Callable[..., Report], history: Path
) -> None:
    """From the events; and from the counts that are kept, which is what long histories have."""
    write(history, morning())
    made = report()
    for table in ("by_topic", "by_day"):
        assert figures(made.rows[table]) == MORNING, table
    (whole,) = made.rows["all"]
    assert (whole["filtered"], whole["held_up"], whole["held_up_sum_ms"]) == (4, 5, 4_650)
    shown = Path(made.page).read_text().split(TITLE)[1].split("</table>")[0]
    assert shown.count("<tr data-topic=") == 2
    assert 'data-group="billing"' in shown and 'data-group="eu"' in shown
    assert ">4.45 s</td>" in shown and ">4 s</td>" in shown
    write(history, next_day(), 2)
    made = report()
    longest = LATER - DUE
    held = (0, 8, 5, 3 * HELD[0] + HELD[1] + longest, longest)
    assert figures(made.rows["by_topic"]) == MORNING | {"billing": held}
    by_day = {day: [row for row in made.rows["by_day"] if row["local"] == day]
              for day in ("2026-11-20", "2026-11-21")}  # fmt: skip
    assert figures(by_day["2026-11-20"]) == MORNING
    assert figures(by_day["2026-11-21"]) == {"billing": (0, 1, 1, longest, longest)}


@pytest.mark.slow
def test_without_any_there_is_no_table(report: Callable[..., Report], history: Path) -> None:
    book = Book()
    book.task(1, "mails", "10:00:00", "10:01:00")
    book.delivery(1, "mails", "default", "10:01:00", 150)
    write(history, book.events)
    made = report()
    assert figures(made.rows["by_topic"])["default"] == (0, 1, 0, None, None)
    assert TITLE not in Path(made.page).read_text()


@pytest.mark.slow
def test_a_table_of_a_version_without_causes_goes_on(
    spark: SparkSession, load: Callable[..., Outcome], report: Callable[..., Report],
    history: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """What that version loaded was held up by nothing that is known; what comes later counts."""
    write(history, morning())
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
    found = spark.read.parquet(str(place))
    assert column in found.columns
    made = place.with_name("_made")
    found.drop(column).write.partitionBy(*folders).parquet(str(made))
    shutil.rmtree(place)
    made.rename(place)


def test_the_cause_is_called_as_the_daemon_calls_it() -> None:
    assert schema.KEY_BUSY == Cause.KEY_BUSY
