"""Each figure alone, on rows made by hand; percentiles against numpy; clocks that change."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.story import ms
from tickwheel.reports import Slo, metrics, rollups, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

HOUR = 3_600_000
T0 = ms("2026-11-20T10:00:00")


def rows(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    result = frame.select(*columns) if columns else frame
    return [tuple(row) for row in result.collect()]


def events(spark: SparkSession, *made: dict[str, Any]) -> DataFrame:
    """Rows of the table; what is not named is null."""
    names = [f.name for f in spark.createDataFrame([], schema.ROW).schema]
    filled = [
        tuple({"topic": "t", "shard": 0, **item}.get(name) for name in names) for item in made
    ]
    return spark.createDataFrame(filled, schema.ROW)


def facts(spark: SparkSession, *made: tuple[Any, ...]) -> DataFrame:
    """``(hour, topic, group, event, attempt, value, n)``, with a target of 10 ms."""
    from pyspark.sql import functions as F

    facts = [(T0 + row[0] * HOUR, *row[1:6], None, row[6]) for row in made]
    return spark.createDataFrame(facts, schema.FACTS).withColumns(
        {"target_ms": F.lit(10).cast("long"), "objective": F.lit(0.9)}
    )


def one(
    figure: Callable[..., DataFrame], frame: DataFrame, keys: Sequence[str], *more: Any,
    zone: str = "UTC", **options: Any
) -> DataFrame:  # fmt: skip
    """A figure's table by ``keys``, sorted by these and ``more``."""
    cube = metrics.Cube({"one": keys}, zone)
    result = figure(frame, cube, **options)
    names = cube.columns("one", result.columns)
    first = [name for name in names if name in {*metrics.BUCKET, *keys}]
    return result.select(*names).orderBy(*first, *more)


def test_volumes_count_each_event_and_redeliveries(spark: SparkSession) -> None:
    counted = facts(
        spark,
        (0, "a", "", "enqueued", 0, None, 5),
        (0, "a", "g", "delivered", 1, 3, 4),
        (0, "a", "g", "delivered", 2, None, 2),
        (1, "a", "g", "acked", 2, 9, 3),
        (1, "b", "g", "dead", 3, None, 1),
    )
    names = ("topic", "group", "enqueued", "delivered", "redelivered", "acked", "dead")
    assert rows(one(metrics.service, counted, ["topic", "group"]), *names) == [
        ("a", "", 5, 0, 0, 0, 0),
        ("a", "g", 0, 6, 2, 3, 0),
        ("b", "g", 0, 0, 0, 0, 1),
    ]


def test_lateness_is_of_first_deliveries_and_exact(spark: SparkSession) -> None:
    """Against numpy over every single value, though only their counts are kept."""
    seed = random.Random(6)
    late = [int(seed.lognormvariate(2, 1.5)) for _ in range(5_000)]
    made = [
        {"time_ms": T0 + i, "event": "delivered", "attempt": 1, "lateness_ms": value,
         "group": "g", "due_ms": T0, "epoch": 1, "seq": i}
        for i, value in enumerate(late)
    ] + [
        {"time_ms": T0, "event": "delivered", "attempt": 2, "group": "g", "due_ms": T0 - 9_000},
        {"time_ms": T0, "event": "acked", "attempt": 1, "ack_ms": 123_456, "group": "g"},
    ]  # fmt: skip
    slos = [Slo("t*", 10), Slo("*", 99)]
    counted = metrics.with_targets(rollups.facts(events(spark, *made)), slos)
    (found,) = one(metrics.service, counted, ["topic"]).collect()
    for share, name in ((50, "p50"), (90, "p90"), (99, "p99")):
        assert found[f"late_{name}_ms"] == pytest.approx(np.percentile(late, share), abs=1e-9)
    assert found.late_max_ms == max(late)
    assert found.first_deliveries == len(late)
    assert found.on_time == sum(value <= 10 for value in late)
    assert found.on_time_share == pytest.approx(np.mean(np.array(late) <= 10))


def test_ack_times_and_outcomes(spark: SparkSession) -> None:
    counted = facts(
        spark,
        (0, "a", "g", "delivered", 1, 0, 10),
        (0, "a", "g", "delivered", 2, None, 2),
        (0, "a", "g", "acked", 1, 10, 7),
        (0, "a", "g", "acked", 1, 40, 1),
        (0, "a", "g", "acked", 2, 20, 1),
        (0, "a", "g", "nacked", 1, None, 1),
        (0, "a", "g", "lease_over", 1, None, 1),
        (0, "a", "g", "dead", 2, None, 1),
        (0, "b", "", "enqueued", 0, None, 1),
    )
    whole = one(metrics.service, counted, ["topic"])
    spread = ("ack_p50_ms", "ack_p90_ms", "ack_p99_ms", "ack_max_ms")
    took = rows(whole, "topic", *spread)
    values = np.percentile([10] * 7 + [20, 40], [50, 90, 99])
    assert took[0] == ("a", *(pytest.approx(v) for v in values), 40)
    assert took[1] == ("b", None, None, None, None)
    shares = ("first_try_share", "dead_share", "redelivered_share")
    assert rows(whole, "topic", *shares) == [
        ("a", pytest.approx(8 / 10), pytest.approx(1 / 10), pytest.approx(2 / 12)),
        ("b", None, None, None),
    ]
    assert rows(one(metrics.attempts, counted, ["topic"], "attempt")) == [
        ("a", 1, 10, 8, 2, 0, pytest.approx(0.8)),
        ("a", 2, 2, 1, 1, 1, pytest.approx(0.5)),
    ]


def test_reasons_are_the_most_frequent_of_each_event(spark: SparkSession) -> None:
    made = [
        {"time_ms": T0, "event": "nacked", "group": "g", "reason": f"order {n} is locked"}
        for n in (123456, 99999, 1000)
    ] + [
        {"time_ms": T0, "event": "nacked", "group": "g", "reason": "HTTP 503"},
        {"time_ms": T0, "event": "dead", "group": "g"},
        {"time_ms": T0, "event": "acked", "group": "g", "reason": "not one"},
    ]
    result = rollups.reasons(events(spark, *made))
    assert rows(one(metrics.reasons, result, ["topic"], "event", top=1)) == [
        ("t", "dead", "(none given)", 1), ("t", "nacked", "order # is locked", 3),
    ]  # fmt: skip


def test_the_peak_is_the_busiest_second(spark: SparkSession) -> None:
    times = [0, 999, 1000, 1500, 1999, HOUR, HOUR + 1, HOUR + 2]
    made = [{"time_ms": T0 + at, "event": "enqueued"} for at in times]
    rates = rollups.rates(events(spark, *made), run=1)
    assert sorted(rows(rates, "quarter_ms", "peak", "at_ms")) == [
        (T0, 3, T0 + 1000), (T0 + HOUR, 3, T0 + HOUR),
    ]  # fmt: skip
    assert rows(one(metrics.peaks, rates, ["topic"], "event")) == [("t", "enqueued", 3, T0 + 1000)]
    # Of seconds that are equally busy it is the first, in whatever order they come.
    equal = [{"time_ms": T0 + 1_000 * second, "event": "acked"} for second in (7, 3, 1, 9, 5, 2)]
    assert rows(rollups.rates(events(spark, *equal), 1), "peak", "at_ms") == [(1, T0 + 1_000)]
    more = rollups.rates(events(spark, *made, {"time_ms": T0, "event": "enqueued"}), run=2)
    newest = rollups.newest_rates(rates.unionByName(more))
    assert {row.run for row in newest.collect()} == {2}


def test_the_backlog_counts_started_and_unfinished_tasks(spark: SparkSession) -> None:
    """Three wait at the most, within the hour; what ended before the history began is no debt."""
    quarter = HOUR // 4
    steps = [(0, 2), (1, 1), (2, -2), (5, -1)]
    waits = [(T0 + q * quarter, "t", "g", "due", n) for q, n in steps]
    waits += [(T0, "old", "g", "due", -4), (T0 + HOUR, "old", "g", "due", 1)]
    result = metrics.backlog(spark.createDataFrame(waits, schema.WAITS), "UTC")
    assert rows(result, "start_ms", "topic", "at_end", "most") == [
        (T0, "old", 0, 0), (T0, "t", 1, 3), (T0 + HOUR, "old", 1, 1), (T0 + HOUR, "t", 0, 1),
    ]  # fmt: skip


def test_a_partial_backlog_starts_with_earlier_tasks(spark: SparkSession) -> None:
    """Nothing changes in the first hours asked for; what is 0 by then is not shown."""
    changes = [(T0, "t", "g", "due", 7), (T0 + HOUR, "t", "g", "due", -2),
            (T0 + 5 * HOUR, "t", "g", "due", -4), (T0 + 6 * HOUR, "t", "g", "due", -1),
            (T0, "u", "g", "due", 1), (T0 + HOUR, "u", "g", "due", -1)]  # fmt: skip
    waits = spark.createDataFrame(changes, schema.WAITS)
    columns = ("start_ms", "topic", "at_end", "most")
    since_ms, until_ms = T0 + 3 * HOUR + HOUR // 4, T0 + 6 * HOUR
    assert rows(metrics.backlog(waits, "UTC", since_ms, until_ms), *columns) == [
        (T0 + 3 * HOUR, "t", 5, 5), (T0 + 5 * HOUR, "t", 1, 5),
    ]  # fmt: skip
    assert rows(metrics.backlog(waits, "UTC", T0 + HOUR), *columns)[0] == (T0 + HOUR, "t", 5, 7)


def journey_events(spark: SparkSession, moved: str = "rescheduled") -> DataFrame:
    """Six tasks: done, dead, in flight, never seen, moved, done in one group of two."""
    made: list[dict[str, Any]] = []

    def add(task: int, at: int, event: str, **more: Any) -> None:
        made.append({"task_id": task, "time_ms": T0 + at, "event": event, **more})

    for task in range(1, 7):
        add(task, task, "enqueued", due_ms=T0 + 1_000, key=f"k{task}", producer="p:1")
    add(1, 1_005, "delivered", group="g", attempt=1, due_ms=T0 + 1_000)
    add(1, 1_025, "nacked", group="g", attempt=1, due_ms=T0 + 9_000)
    add(1, 9_000, "delivered", group="g", attempt=2, due_ms=T0 + 9_000)
    add(1, 9_100, "acked", group="g", attempt=2)
    add(2, 1_000, "delivered", group="g", attempt=1, due_ms=T0 + 1_000)
    add(2, 1_500, "dead", group="g", attempt=1)
    add(3, 1_000, "delivered", group="g", attempt=1, due_ms=T0 + 1_000)
    add(5, 500, moved, due_ms=T0 + 3 * HOUR)
    for group in ("g", "h"):
        add(6, 1_000, "delivered", group=group, attempt=1, due_ms=T0 + 1_000)
    add(6, 1_200, "acked", group="g", attempt=1)
    return events(spark, *made)


@pytest.mark.parametrize("moved", ["rescheduled", "replaced"])
def test_journeys_follow_each_task_to_its_end(spark: SparkSession, moved: str) -> None:
    result = rollups.advance(journey_events(spark, moved), None).persist()
    closed = result.filter("closed")
    assert rows(
        closed, "task_id", "group", "came_due_ms", "acked_ms", "deliveries", "attempts"
    ) == [(1, "g", T0 + 1_000, T0 + 9_100, 2, 2)]
    assert rows(rollups.slow(closed), "key", "took_ms") == [("k1", 8_100)]
    assert rows(rollups.origins(closed), "name", "n", "took_sum_ms") == [("p", 1, 8_100)]
    unfinished = result.filter("not closed").drop("closed")
    names = ("task_id", "group", "state", "overdue_ms")
    assert rows(metrics.stuck(unfinished, T0 + 2 * HOUR, HOUR), *names) == [
        (3, "g", "in flight", 2 * HOUR - 1_000),
        (4, "", "never delivered", 2 * HOUR - 1_000),
        (6, "h", "in flight", 2 * HOUR - 1_000),
    ]
    short = metrics.stuck_by_group(metrics.stuck(unfinished, T0 + 2 * HOUR, HOUR), T0 + 1_001)
    # All came due before the time that is shown.
    assert sorted(rows(short, "group", "state", "tasks", "lately", "task_id")) == [
        ("", "never delivered", 1, 0, 4), ("g", "in flight", 1, 0, 3), ("h", "in flight", 1, 0, 6),
    ]  # fmt: skip
    whole = metrics.stuck_by_group(metrics.stuck(unfinished, T0 + 2 * HOUR, HOUR))
    assert {row.lately for row in whole.collect()} == {1}
    assert not rows(metrics.stuck(unfinished, T0 + HOUR, HOUR))
    late = rows(metrics.stuck(unfinished, T0 + 5 * HOUR, HOUR), "task_id")
    assert sorted(late) == [(3,), (4,), (5,), (6,)]
    waits = {
        (row.kind, row.group, row.quarter_ms): row.n
        for row in rollups.waits(result, T0 + 2 * HOUR).collect()
    }
    assert not [name for name in waits if name[2] > T0]  # task 5 is due later than is known
    # Six were enqueued, four were delivered in that quarter (and three of their groups did not
    # end); one came due and nobody got it, which one sees only with the time.
    assert waits["scheduled", "", T0] == 6 - 5
    assert waits["due", "", T0] == 1
    assert waits["due", "g", T0] == 4 - 3
    assert waits["due", "h", T0] == 1
    result.unpersist()


def test_a_task_missing_in_a_group_is_unfinished(spark: SparkSession) -> None:
    """``ended`` says whether the last ack was the last; without it, all that were seen is all."""
    made: list[dict[str, Any]] = []
    for task, said in ((1, (False, None)), (2, (False, True)), (3, (None, None)), (4, (None,))):
        made.append({"task_id": task, "time_ms": T0, "event": "enqueued", "due_ms": T0 + 100})
        for number, ended in enumerate(said):
            group = f"g{number}"
            if task == 1 and number:
                continue  # the other group has never got it
            made.append({"task_id": task, "time_ms": T0 + 100, "event": "delivered",
                         "attempt": 1, "due_ms": T0 + 100, "group": group})  # fmt: skip
            made.append({"task_id": task, "time_ms": T0 + 150 + number, "event": "acked",
                         "attempt": 1, "group": group, "ended": ended})  # fmt: skip
    made.append({"task_id": 4, "time_ms": T0 + 9, "event": "rescheduled", "due_ms": T0 + 100})
    made[-2]["ended"] = False  # task 4, too, and it has a row of its own as a whole
    whole = events(spark, *made)
    result = rollups.advance(whole, None).persist()
    assert sorted(set(rows(result.filter("closed"), "task_id"))) == [(2,), (3,)]
    unfinished = result.filter("not closed").drop("closed")
    names = ("task_id", "group", "state", "expected_ms", "attempts")
    assert sorted(rows(metrics.stuck(unfinished, T0 + 2 * HOUR, HOUR), *names)) == [
        (1, "", metrics.OWED, T0 + 100, 0), (4, "", metrics.OWED, T0 + 100, 0),
    ]  # fmt: skip
    # The other group gets it in a later run, and with that it is over.
    last = {"task_id": 1, "time_ms": T0 + HOUR, "group": "g1", "attempt": 1}
    later = events(
        spark,
        {**last, "event": "delivered", "due_ms": T0 + 100},
        {**last, "event": "acked", "ended": True},
    )
    second = rollups.advance(later, unfinished)
    assert set(rows(second.filter("closed"), "task_id")) == {(1,)}
    assert set(rows(second.filter("not closed"), "task_id")) == {(4,)}
    # What comes late of a task that is over is not taken for one that some group lacks.
    rest = {"task_id": 2, "time_ms": T0 + 99, "group": "g9", "event": "acked", "ended": False}
    third = rollups.advance(events(spark, rest), None).filter("not closed").drop("closed")
    assert third.count() == 1
    assert not rows(metrics.stuck(third, T0 + 2 * HOUR, HOUR))
    result.unpersist()


def test_a_retry_is_expected_when_it_was_rescheduled_to(spark: SparkSession) -> None:
    """Later, at once, and in a group that has not had it: the event names no group."""
    made: list[dict[str, Any]] = []

    def add(task: int, at: int, event: str, **more: Any) -> None:
        made.append({"task_id": task, "time_ms": T0 + at, "event": event, **more})

    later, soon = T0 + 9 * HOUR, T0 + 2_000
    for task, next_ms, moved_ms in ((1, soon, later), (2, later, soon), (3, None, later)):
        add(task, 1, "enqueued", due_ms=T0 + 100)
        add(task, 100, "delivered", group="g", attempt=1, due_ms=T0 + 100)
        if next_ms is None:
            add(task, 200, "acked", group="g", attempt=1, ended=False)
        else:
            add(task, 200, "nacked", group="g", attempt=1, due_ms=next_ms)
        add(task, 300, "rescheduled", due_ms=moved_ms)
    unfinished = rollups.advance(events(spark, *made), None).drop("closed")
    names = ("task_id", "group", "state", "expected_ms")
    assert rows(metrics.stuck(unfinished, T0 + 2 * HOUR, HOUR), *names) == [
        (2, "g", "waits for its retry", soon)
    ]
    assert sorted(rows(metrics.stuck(unfinished, T0 + 11 * HOUR, HOUR), *names)) == [
        (1, "g", "waits for its retry", later),
        (2, "g", "waits for its retry", soon),
        (3, "", metrics.OWED, later),
    ]


def test_journeys_do_not_depend_on_the_order_of_runs(spark: SparkSession) -> None:
    whole = journey_events(spark)
    late, early = whole.filter("time_ms % 2 = 0"), whole.filter("time_ms % 2 = 1")
    first = rollups.advance(late, None)
    second = rollups.advance(early, first.filter("not closed").drop("closed"))
    seen = sorted(map(repr, first.filter("closed").union(second).drop("lead").collect()))
    assert seen == sorted(map(repr, rollups.advance(whole, None).drop("lead").collect()))


def test_the_slowest_keys_of_each_quarter_are_listed(spark: SparkSession) -> None:
    """One key's many slow tasks, and those without a key, leave room for others; so does a day."""
    closed = [
        (task, "t", "g", key, T0 + at - took, T0 + at, 1)
        for task, key, at, took in [
            (1, "worst", 1, 900), (2, "worst", 2, 800), (3, None, 3, 700), (4, "next", 4, 50),
            (5, "later", HOUR, 9), (6, "fast", 5, 1),
        ]
    ]  # fmt: skip
    frame = spark.createDataFrame(
        closed, "task_id LONG, topic STRING, `group` STRING, key STRING, came_due_ms LONG, "
        "acked_ms LONG, deliveries LONG",
    )  # fmt: skip
    results = sorted(rows(rollups.slow(frame, limit=2), "took_ms", "key", "task_id", "quarter_ms"))
    assert results == [
        (9, "later", 5, T0 + HOUR), (50, "next", 4, T0), (900, "worst", 1, T0),
    ]  # fmt: skip


def test_the_slowest_come_first(spark: SparkSession) -> None:
    slow = [
        (T0, "t", "g", "fast", 1, T0, T0 + 5, 5, 1), (T0, "t", "g", "slow", 2, T0, T0 + 90, 90, 1),
        (T0, "t", "g", "slow", 3, T0, T0 + 70, 70, 1), (T0, "t", "g", None, 4, T0, T0 + 99, 99, 1),
    ]  # fmt: skip
    result = metrics.slowest_keys(spark.createDataFrame(slow, schema.SLOW), top=1)
    assert rows(result, "key", "took_ms", "task_id") == [("slow", 90, 2)]
    made = [
        {"time_ms": T0, "event": "enqueued", "producer": "shop:50001"},
        {"time_ms": T0, "event": "enqueued", "producer": "shop:50002"},
        {"time_ms": T0, "event": "delivered", "group": "g", "subscriber": "w1@10.0.0.1:1"},
        {
            "time_ms": T0,
            "event": "acked",
            "group": "g",
            "subscriber": "w1@10.0.0.1:1",
            "ack_ms": 30,
        },
        {
            "time_ms": T0,
            "event": "acked",
            "group": "g",
            "subscriber": "w1@10.0.0.1:2",
            "ack_ms": 50,
        },
        {"time_ms": T0, "event": "nacked", "group": "g", "subscriber": "w2@10.0.0.1:2"},
    ]
    parties = rollups.parties(events(spark, *made)).persist()
    assert rows(metrics.subscribers(parties, top=9)) == [
        ("t", "g", "w1@10.0.0.1", 1, 2, 0, 40.0, 50),
        ("t", "g", "w2@10.0.0.1", 0, 0, 1, None, None),
    ]  # fmt: skip
    origins = rollups.origins(rollups.advance(journey_events(spark), None).filter("closed"))
    by_name = {row.name: row for row in metrics.producers(parties, origins, top=9).collect()}
    assert (by_name["shop"].enqueued, by_name["shop"].acked) == (2, None)
    parties.unpersist()


def test_objectives_breaches_and_days(spark: SparkSession) -> None:
    """Day one keeps 9 of 10 on time and just meets 90 %; day two does not."""
    counted = facts(
        spark,
        (0, "a", "g", "delivered", 1, 5, 9),
        (1, "a", "g", "delivered", 1, 50, 1),
        (24, "a", "g", "delivered", 1, 5, 4),
        (24, "a", "g", "delivered", 1, 50, 6),
        (24, "a", "g", "acked", 1, 50, 12),
    )
    by_hour, by_day = (
        [row.asDict() for row in one(metrics.service, counted, (span, "topic", "group")).collect()]
        for span in (metrics.HOUR, metrics.DAY)
    )
    objective = {"a": 0.9}.__getitem__
    (found,) = metrics.slo(by_day, by_hour, objective)
    assert (found["days"], found["days_missed"]) == (2, 1)
    assert (found["hours"], found["hours_missed"]) == (3, 2)
    assert found["met"] is False
    assert found["on_time_share"] == pytest.approx(13 / 20)
    assert found["budget_used"] == pytest.approx(0.35 / 0.1)
    (missed,) = metrics.breaches(by_day, objective)
    assert (missed["local"], missed["on_time_share"]) == ("2026-11-21", pytest.approx(0.4))
    names = ("local", "delivered", "delivered_change", "acked_change", "on_time_change")
    assert [tuple(row[name] for name in names) for row in metrics.day_against_day(by_day)] == [
        ("2026-11-20", 10, None, None, None),
        ("2026-11-21", 10, 0.0, None, pytest.approx(-0.5)),
    ]


@pytest.mark.parametrize(
    ("zone", "day", "hours", "twice"),
    [
        ("Europe/Berlin", "2026-10-25", 25, ["02:00+02:00", "02:00+01:00"]),
        ("Europe/Berlin", "2026-03-29", 23, []),
        ("Asia/Kolkata", "2026-03-29", 24, []),
    ],
)
def test_days_have_the_hours_that_clocks_show(
    spark: SparkSession, zone: str, day: str, hours: int, twice: list[str]
) -> None:
    """One event a quarter over three days around the change."""
    begin = ms(f"{day}T00:00:00") - 24 * HOUR
    facts = [(begin + i * HOUR // 4, "t", "g", "acked", 1, 1, None, 1) for i in range(4 * 72)]
    counted = metrics.with_targets(spark.createDataFrame(facts, schema.FACTS), ())
    by_day = rows(one(metrics.service, counted, [metrics.DAY], zone=zone), "local", "acked")
    assert dict(by_day)[day] == 4 * hours
    result = one(metrics.service, counted, [metrics.HOUR], zone=zone)
    inside = [row for row in rows(result, "local", "acked", "start_ms") if row[0].startswith(day)]
    assert len(inside) == hours
    assert {row[1] for row in inside} == {4}
    assert [row[0][11:] for row in inside if " 02:" in row[0]] == twice or hours == 24
    steps = {b[2] - a[2] for a, b in itertools.pairwise(inside)}
    assert steps == {HOUR}
