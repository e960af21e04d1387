"""Figures: functions from the DataFrames of ``table.py`` to a DataFrame.

They use no clock, file or setting: zones, targets and horizons are arguments. A :class:`Cube` is
the set of groupings of a figure; one pass computes the rows of all its tables, unordered.

Percentiles are exact, with linear interpolation between neighbours, because the facts contain the
number of occurrences of each value. A share whose total is 0 is null.

Hours and days are those of a time zone. A local hour is identified by its first instant
(``start_ms``), which distinguishes the two hours called 02:00 at the end of summer time; ``local``
contains the hour and its offset. A day has 23 or 25 hours when the clocks change. The offsets of
zones are multiples of a quarter of an hour, like the data, so no row spans two hours.

Comparisons (with objectives, with the previous day) are computed without Spark from the few rows of
:func:`service` by hour or day, topic and group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports import QUARTER_MS, TARGET_MS, Rows, Slo, pattern_regex
from tickwheel.reports.rollups import last_event, last_ms, quarter
from tickwheel.reports.schema import TASK_EVENTS

BUCKET = ("start_ms", "local")
STEP, HOUR, DAY = "step_ms", "hour_ms", "day_ms"
"""Kinds of time buckets: a step of any length, the local hour, the local day."""
_PATTERNS = {STEP: "yyyy-MM-dd HH:mm:ss", HOUR: "yyyy-MM-dd HH:'00'", DAY: "yyyy-MM-dd"}


def bucketed(rows: DataFrame, bucket: str, timezone: str, step_ms: int = QUARTER_MS) -> DataFrame:
    """Return ``rows``, which must have ``quarter_ms``, with the columns of their buckets."""
    start = _start(bucket, timezone, step_ms)
    start_ms = start if bucket == STEP else F.col("quarter_ms")
    return rows.withColumns({"start_ms": start, "local": _local(bucket, start_ms, timezone)})


def _start(bucket: str, timezone: str, step_ms: int) -> Column:
    """Return the start of the bucket of ``quarter_ms``."""
    at_ms = F.col("quarter_ms")
    if bucket == STEP:
        return quarter(at_ms, step_ms)
    wall = _wall(at_ms, timezone)
    if bucket == DAY:
        return F.unix_millis(F.to_utc_timestamp(F.date_trunc("day", wall), timezone))
    return at_ms - F.minute(wall).cast("long") * 60_000 - F.pmod(at_ms, F.lit(60_000))


def _local(bucket: str, at_ms: Column, timezone: str) -> Column:
    """Return the local name of the bucket of ``at_ms``. Steps and hours have an offset."""
    wall = _wall(at_ms, timezone)
    name = F.date_format(wall, _PATTERNS[bucket])
    if bucket == DAY:
        return name
    offset_min = ((F.unix_millis(wall) - at_ms) / 60_000).cast("int")
    sign = F.when(offset_min < 0, "-").otherwise("+")
    size = F.abs(offset_min)
    zone = F.format_string("%s%02d:%02d", sign, F.floor(size / 60), F.pmod(size, F.lit(60)))
    return F.concat(name, zone)


def _wall(ms: Column, timezone: str) -> Column:
    """Return the wall-clock time in a zone as a timestamp in UTC, which is the zone of the
    session."""
    return F.from_utc_timestamp(F.timestamp_millis(ms), timezone)


@dataclass(frozen=True)
class Cube:
    """Several groupings of the same rows: table → its keys. One pass with grouping sets computes
    all of them, as one plan for Spark instead of several. In a table, ``STEP``, ``HOUR`` and
    ``DAY`` become ``start_ms`` and ``local``."""

    tables: Mapping[str, Sequence[str]]
    timezone: str
    step_ms: int = QUARTER_MS

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for keys in self.tables.values() for key in keys))

    def aggregate(
        self, rows: DataFrame, more: Sequence[str], values: Sequence[Column]
    ) -> DataFrame:
        """Return ``values`` of each group. ``more``: additional keys of every table."""
        names = [*self.keys, *more]
        times = [name for name in _PATTERNS if name in names]
        placed = rows.withColumns({t: _start(t, self.timezone, self.step_ms) for t in times})
        sets = [[F.col(name) for name in (*keys, *more)] for keys in self.tables.values()]
        grouped = placed.groupingSets(sets, *names).agg(
            F.grouping_id().alias("level"), F.max("quarter_ms").alias("quarter_ms"), *values
        )
        local = (
            F.when(
                F.col(t).isNotNull(),
                _local(t, F.col(t if t == STEP else "quarter_ms"), self.timezone),
            )
            for t in times
        )
        named = {
            "start_ms": F.coalesce(*times, F.lit(None)),
            "local": F.coalesce(*local, F.lit(None)),
        }
        return grouped.withColumns(named).drop("quarter_ms", *times)

    def columns(self, table: str, names: Sequence[str]) -> list[str]:
        """Return the columns of a table, in order, out of the ``names`` in :meth:`aggregate`."""
        keys = self.tables[table]
        timed = BUCKET if _PATTERNS.keys() & set(keys) else ()
        chosen = [*timed, *(key for key in keys if key not in _PATTERNS)]
        excluded = {*chosen, *self.keys, *BUCKET, "level"}
        return [*chosen, *(name for name in names if name not in excluded)]

    def levels(self, more: Sequence[str] = ()) -> dict[int, str]:
        """Return ``level`` → table. ``level`` has a bit for each key that the table lacks."""
        names = [*self.keys, *more]
        return {
            int("".join(str(int(name not in {*keys, *more})) for name in names) or "0", 2): table
            for table, keys in self.tables.items()
        }


def ordered(rows: DataFrame, *by: str | Column) -> DataFrame:
    """Return the rows sorted, in one partition, because figures have few rows. A sort over several
    partitions would compute the rows twice, because it must first determine the boundaries."""
    return rows.repartition(1).sortWithinPartitions(*by) if by else rows


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def with_targets(facts: DataFrame, slos: Sequence[Slo]) -> DataFrame:
    """Return facts with ``target_ms``, from the first objective that matches their topic."""
    target = F.lit(TARGET_MS)
    for slo in reversed(slos):
        matches = F.col("topic").rlike(f"^(?:{pattern_regex(slo.pattern)})$")
        target = F.when(matches, F.lit(slo.target_ms)).otherwise(target)
    return facts.withColumn("target_ms", target.cast("long"))


def service(facts: DataFrame, cube: Cube) -> DataFrame:
    """Return volumes, lateness, ack times and outcomes, in one pass."""
    values = [
        *_volumes(),
        *_lateness(),
        *_spread(F.col("event") == "acked", "ack"),
        *_outcomes(),
        *_held_up(),
    ]
    return cube.aggregate(facts, (), values)


def attempts(facts: DataFrame, cube: Cube) -> DataFrame:
    """Return, by attempt, the number of deliveries, how they ended, and the share that
    succeeded."""
    event = F.col("event")
    counted = facts.filter(
        event.isin("delivered", "acked", "nacked", "lease_over", "dead") & (F.col("attempt") > 0)
    )
    # Every delivery ends in one of three events: if it became a dead letter, only `dead` is
    # written, not its nack or the end of its lease.
    failed = _count(event.isin("nacked", "lease_over", "dead"))
    ended = _count(event.isin("acked", "nacked", "lease_over", "dead"))
    values = [
        _count(event == "delivered").alias("delivered"),
        _count(event == "acked").alias("acked"),
        failed.alias("failed"),
        _count(event == "dead").alias("dead"),
        _share(_count(event == "acked"), ended).alias("success_share"),
    ]
    return cube.aggregate(counted, ("attempt",), values)


def reasons(rows: DataFrame, cube: Cube, top: int) -> DataFrame:
    """Return the most frequent reasons of failed deliveries, for each event."""
    counted = cube.aggregate(rows, ("event", "reason"), [F.sum("n").alias("n")])
    keys = [*BUCKET, *(key for key in cube.keys if key not in _PATTERNS)]
    most_frequent = Window.partitionBy(*keys, "event").orderBy(F.desc("n"), "reason")
    ranked = counted.withColumn("rank", F.row_number().over(most_frequent))
    return ranked.filter(F.col("rank") <= top).drop("rank")


def peaks(rates: DataFrame, cube: Cube) -> DataFrame:
    """Return the busiest second for each event: the number of events, and the time."""
    busiest = F.struct(
        F.col("peak"), (-F.col("at_ms")).alias("before")
    )  # the first of equal seconds
    peak = cube.aggregate(rates, ("event",), [F.max(busiest).alias("busiest")])
    values = {"per_second": F.col("busiest.peak"), "at_ms": -F.col("busiest.before")}
    return peak.withColumns(values).drop("busiest")


def _volumes() -> list[Column]:
    event = F.col("event")
    retried = (event == "delivered") & (F.col("attempt") > 1)
    return [
        *(_count(event == name).alias(name) for name in TASK_EVENTS),
        _count(retried).alias("redelivered"),
    ]


def _first() -> Column:
    return (F.col("event") == "delivered") & F.col("value_ms").isNotNull()


def _lateness() -> list[Column]:
    first = _first()
    on_time = first & (F.col("value_ms") <= F.col("target_ms"))
    return [
        _count(first).alias("first_deliveries"),
        _count(on_time).alias("on_time"),
        _share(_count(on_time), _count(first)).alias("on_time_share"),
        F.max("target_ms").alias("target_ms"),
        *_spread(first, "late"),
    ]


def _outcomes() -> list[Column]:
    event, first = F.col("event"), F.col("attempt") == 1
    acked, dead = _count(event == "acked"), _count(event == "dead")
    first_ended = event.isin("acked", "nacked", "lease_over", "dead") & first
    first_share = _share(_count((event == "acked") & first), _count(first_ended))
    retried = (event == "delivered") & (F.col("attempt") > 1)
    return [
        first_share.alias("first_try_share"),
        _share(dead, acked + dead).alias("dead_share"),
        _share(_count(retried), _count(event == "delivered")).alias("redelivered_share"),
    ]


def _held_up() -> list[Column]:
    """Return the number, total lateness and maximum lateness of first deliveries that were late
    because of their order key or fair share."""
    late = F.when(F.col("held"), F.col("value_ms"))
    return [
        _count(F.col("held")).alias("held_up"),
        F.sum(F.col("n") * late).alias("held_up_sum_ms"),
        F.max(late).alias("held_up_max_ms"),
    ]


def _spread(which: Column, name: str) -> list[Column]:
    value = F.when(which, F.col("value_ms"))
    percentiles = F.percentile(value, list(PERCENTILES.values()), F.col("n"))
    return [
        *(percentiles[i].alias(f"{name}_{label}_ms") for i, label in enumerate(PERCENTILES)),
        F.max(value).alias(f"{name}_max_ms"),
    ]


def _share(part: Column, total: Column) -> Column:
    return F.when(total > 0, part / total)


# --- recurring schedules -------------------------------------------------------------------------


def schedules(occurrences: DataFrame, cube: Cube) -> DataFrame:
    """Return, by schedule, the occurrences by outcome and the lateness of those that fired. Runs on
    demand and backfills, which operators start, do not count as planned."""
    planned = F.col("outcome").isin("fired", "missed", "overlap")
    values = [
        _count(planned).alias("planned"),
        *(_of_outcome(outcome).alias(name) for outcome, name in _NAMES.items()),
        _share(_of_outcome("fired"), _count(planned)).alias("fired_share"),
        *_spread(F.col("outcome") == "fired", "late"),
    ]
    return cube.aggregate(occurrences, ("schedule", "topic"), values)


_NAMES = {
    "fired": "fired", "missed": "missed", "overlap": "overlapped", "queued": "queued",
    "run": "on_demand", "backfill": "backfilled",
}  # fmt: skip


def _of_outcome(outcome: str) -> Column:
    return _count(F.col("outcome") == outcome)


def _count(which: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, F.col("n"))), F.lit(0))


# --- the slowest keys, producers and subscribers -------------------------------------------------


EXAMPLES_KEPT = 3


def slowest_keys(slow: DataFrame, top: int) -> DataFrame:
    """Return keys with their slowest task, measured from due time to ack, slowest first."""
    row = F.struct("took_ms", "task_id", "came_due_ms", "acked_ms", "deliveries")
    return (
        slow.filter("key is not null")
        .groupBy("topic", "group", "key")
        .agg(F.max(row).alias("worst"))
        .select("topic", "group", "key", "worst.*")
        .orderBy(F.desc("took_ms"), "task_id")
        .limit(top)
    )


def producers(parties: DataFrame, origins: DataFrame, top: int) -> DataFrame:
    """Return producers with the number of their tasks, and the times from due time to ack."""
    enqueued = parties.filter("role = 'producer'").groupBy("topic", "name")
    ended = origins.groupBy("topic", "name").agg(
        F.sum("acked").alias("acked"),
        (F.sum("took_sum_ms") / F.sum("acked")).alias("took_mean_ms"),
        F.max("took_max_ms").alias("took_max_ms"),
        F.sum("failed").alias("redelivered"),
    )
    return (
        enqueued.agg(F.sum("n").alias("enqueued"))
        .join(ended, ["topic", "name"], "left")
        .orderBy(F.desc_nulls_last("took_mean_ms"), "topic", "name")
        .limit(top)
    )


def subscribers(parties: DataFrame, top: int) -> DataFrame:
    """Return subscribers with their deliveries, ack times and failures."""
    return (
        parties.filter("role = 'subscriber'")
        .groupBy("topic", "group", "name")
        .agg(
            F.sum("n").alias("delivered"),
            F.sum("acked").alias("acked"),
            F.sum("failed").alias("failed"),
            _share(F.sum("took_sum_ms"), F.sum("acked")).alias("ack_mean_ms"),
            F.max("took_max_ms").alias("ack_max_ms"),
        )
        .orderBy(F.desc_nulls_last("ack_mean_ms"), "topic", "group", "name")
        .limit(top)
    )


def examples(ended: DataFrame, split: Callable[[DataFrame], DataFrame]) -> DataFrame:
    """Return the tasks of each bucket, topic and group that took longest from due time to ack.
    ``split`` adds the bucket (``start_ms``) to rows with ``quarter_ms``."""
    took = F.col("acked_ms") - F.col("came_due_ms")
    name = ("start_ms", "topic", "group")
    longest = Window.partitionBy(*name).orderBy(F.desc("took_ms"), "task_id")
    acked = ended.filter("acked_ms is not null and came_due_ms is not null")
    timed = split(acked.withColumns({"quarter_ms": F.col("acked_ms"), "took_ms": took}))
    return (
        timed.withColumn("rank", F.row_number().over(longest))
        .filter(F.col("rank") <= EXAMPLES_KEPT)
        .select(*name, "task_id", "key", "came_due_ms", "took_ms", "deliveries")
        .orderBy(*name, F.desc("took_ms"), "task_id")
    )


# --- backlogs and stuck tasks --------------------------------------------------------------------


NEVER = "never delivered"
OWED = "never delivered to another group"
STATES = {
    "delivered": "in flight", "nacked": "waits for its retry", "lease_over": "lease over",
    "released": "given back", "requeued": "requeued", "rescheduled": NEVER,
}  # fmt: skip


def backlog(
    waits: DataFrame,
    timezone: str,
    since_ms: int | None = None,
    until_ms: int | None = None,
    step_ms: int | None = None,
) -> DataFrame:
    """Return each backlog at the end of every hour in which it changed, and its maximum in that
    hour. With ``step_ms``, steps of this length replace hours.

    Backlogs are running sums over ``waits``, which must begin with the first event. Ends of waits
    that began before the history do not make a sum negative. Hours before ``since_ms`` are left
    out; tasks that still wait at ``since_ms`` count in its hour. The maximum is that of the values
    at the ends of the intervals of ``waits``, usually quarters of an hour.
    """
    name = ("kind", "topic", "group")
    changes = waits.groupBy("quarter_ms", *name).agg(F.sum("n").alias("n"))
    so_far = Window.partitionBy(*name).orderBy("quarter_ms")
    sums = changes.withColumn("sum", F.sum("n").over(so_far))
    # The negative of the lowest sum is the number of waits that began before the history.
    before = F.least(F.min("sum").over(Window.partitionBy(*name)), F.lit(0))
    # The level before an hour's first change also counts towards the hour's maximum.
    level = sums.withColumn("level", F.col("sum") - before).withColumn(
        "held", F.coalesce(F.lag("level").over(so_far), "level")
    )
    if until_ms is not None:
        level = level.filter(F.col("quarter_ms") < until_ms)
    if since_ms is not None:
        level = _since(level, name, since_ms)
    bucket = HOUR if step_ms is None else STEP
    timed = bucketed(level, bucket, timezone, step_ms or QUARTER_MS)
    levels = timed.groupBy(*BUCKET, *name).agg(
        F.max_by("level", "quarter_ms").alias("at_end"),
        F.max(F.greatest("level", "held")).alias("most"),
    )
    return ordered(levels, "start_ms", *name)


def _since(level: DataFrame, name: Sequence[str], since_ms: int) -> DataFrame:
    """Return the levels from ``since_ms`` on, beginning with the last level before it."""
    at_ms = F.greatest("quarter_ms", F.lit(since_ms))
    last = Window.partitionBy(*name, at_ms).orderBy(F.desc("quarter_ms"))
    levels = level.withColumn("rank", F.row_number().over(last)).filter("rank = 1").drop("rank")
    earlier = F.col("quarter_ms") < since_ms
    return (
        levels.filter(~(earlier & (F.col("level") == 0)))
        .withColumn("held", F.when(earlier, F.col("level")).otherwise(F.col("held")))
        .withColumn("quarter_ms", at_ms)
    )


def stuck(unfinished: DataFrame, horizon_ms: int, after_ms: int) -> DataFrame:
    """Return the tasks, by group, that are overdue by more than ``after_ms`` at ``horizon_ms``.

    If all groups in the history have finished a task that has not ended, one row says that it was
    never delivered to another group.

    Dead letters are not stuck: they wait for people, and are counted as dead. Tasks that wait for a
    retry or were delivered recently are not stuck, because their next step is not overdue. A change
    of the due time, which is an event of group ``""``, moves the next step in every group.
    """
    c = F.col
    moved = F.max(F.when(c("group") == "", F.struct("last_code", "due_ms"))).over(
        Window.partitionBy("task_id")
    )
    event = last_event(c("last_code"))
    unseen = c("group").isNull() | (c("group") == "")
    owed = c("owed") & c("lead")
    names = F.create_map(*(F.lit(x) for pair in STATES.items() for x in pair))
    # A task that was delivered to a group is judged by its events in that group.
    due = F.greatest(
        "due_ms", F.when(unseen, c("planned_ms")), F.when(~unseen, last_ms(c("last_code")))
    )
    moved_ms = F.when(c("moved.last_code") > c("last_code"), c("moved.due_ms"))
    with_moves = unfinished.withColumn("moved", moved).filter(c("ended_ms").isNull() | owed)
    candidates = with_moves.withColumns(
        {
            "state": F.when(owed, OWED).when(unseen, NEVER).otherwise(F.element_at(names, event)),
            "expected_ms": F.when(owed, F.greatest("left_ms", "moved.due_ms")).otherwise(
                F.coalesce(moved_ms, due)
            ),
            "event": event,
            "unseen": unseen,
        }
    )
    overdue = F.lit(horizon_ms) - c("expected_ms")
    # A task that has rows for groups needs no row for the task as a whole.
    shown = owed | ~c("unseen") | (c("lead") & c("left_ms").isNull())
    return (
        candidates.filter(shown & (overdue > after_ms) & (F.coalesce("event", F.lit("")) != "dead"))
        .select(
            "task_id", "topic",
            F.when(owed, "").otherwise(F.coalesce("group", F.lit(""))).alias("group"),
            "state", "key", "producer", "enqueued_ms", "expected_ms",
            overdue.alias("overdue_ms"),
            F.when(owed, 0).otherwise(F.coalesce("attempts", F.lit(0))).alias("attempts"),
        )
        .orderBy(F.desc("overdue_ms"), "task_id", "group")
    )  # fmt: skip


def stuck_by_group(tasks: DataFrame, since_ms: int | None = None) -> DataFrame:
    """Summarize :func:`stuck`: the number of tasks in each state, the number that were expected
    after ``since_ms`` (``lately``), and the task that is longest overdue."""
    late = F.col("expected_ms") >= (since_ms or 0)
    counted = tasks.groupBy("topic", "group", "state").agg(
        F.count(F.lit(1)).alias("tasks"),
        F.count(F.when(late, 1)).alias("lately"),
        F.max("overdue_ms").alias("overdue_ms"),
        F.min("expected_ms").alias("expected_ms"),
        F.min_by("task_id", "expected_ms").alias("task_id"),
    )
    return ordered(counted, F.desc("tasks"), "topic", "group", "state")


# --- comparisons with objectives and with the previous day ---------------------------------------


Objective = Callable[[str], float]
"""Topic → the share of its first deliveries that must be on time."""

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
    """Compare each topic and group with its objective, in total and by day and hour.
    ``budget_used`` is the used share of the late deliveries that the objective allows. A value
    above 1 is a breach."""
    hours, results = _by_name(by_hour), []
    for (topic, group), days in _by_name(by_day).items():
        objective_share = objective(topic)
        first = sum(row["first_deliveries"] for row in days)
        on_time = sum(row["on_time"] for row in days)
        group_hours = hours[topic, group]
        results.append(
            {
                "topic": topic, "group": group,
                "target_ms": max(row["target_ms"] for row in days), "objective": objective_share,
                "first_deliveries": first, "on_time": on_time,
                "days": len(days), "days_missed": _missed(days, objective_share),
                "hours": len(group_hours), "hours_missed": _missed(group_hours, objective_share),
                "on_time_share": on_time / first, "met": on_time / first >= objective_share,
                "budget_used": _budget_used(on_time / first, objective_share),
            }
        )  # fmt: skip

    def worst_first(row: dict[str, Any]) -> tuple[Any, ...]:
        used = row["budget_used"]
        return row["met"], used is not None, -(used or 0), row["topic"], row["group"]

    return sorted(results, key=worst_first)


def breaches(by_day: Rows, objective: Objective) -> Rows:
    """Return the days on which an objective was missed."""
    names = ("local", "topic", "group", "target_ms", "objective", "on_time_share",
             "first_deliveries", "late_p99_ms", "late_max_ms")  # fmt: skip
    judged = ({**row, "objective": objective(row["topic"])} for row in by_day)
    return [
        {name: row[name] for name in names}
        for row in sorted(judged, key=lambda row: (row["local"], row["topic"], row["group"]))
        if row["on_time_share"] is not None and row["on_time_share"] < row["objective"]
    ]


def day_against_day(by_day: Rows) -> Rows:
    """Return each day's figures and their change from the previous day. A change from 0, or from a
    day without figures, is null."""
    compared: Rows = []
    before: dict[str, Any] = {}
    for row in sorted(by_day, key=lambda row: (row["topic"], row["group"], row["start_ms"])):
        if before and (_name(before) != _name(row) or _days_after(before, row) != 1):
            before = {}
        kept = {k: row[k] for k in ("local", "topic", "group", *_COMPARED, "on_time_share")}
        changes = {f"{k}_change": _change(row[k], before.get(k)) for k in _COMPARED}
        share, last = row["on_time_share"], before.get("on_time_share")
        points = None if share is None or last is None else share - last
        compared.append({**kept, **changes, "on_time_change": points})
        before = row
    return compared


def _days_after(before: dict[str, Any], row: dict[str, Any]) -> int:
    return (date.fromisoformat(row["local"]) - date.fromisoformat(before["local"])).days


def _change(value: float | None, previous: float | None) -> float | None:
    return None if value is None or not previous else (value - previous) / previous


def _by_name(rows: Rows) -> dict[tuple[str, str], Rows]:
    """Group the rows with first deliveries by topic and group."""
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
