"""Computes rollups, which are exact counts of events, and journeys, which are the courses of tasks.

Rollups are counts by quarter of an hour, small enough to compute all figures from them. They are
additive: the counts of two sets of events are the union of their rows, so a run adds the counts of
its new events and never changes old counts. Percentiles stay exact, because the values themselves
are counted (milliseconds repeat often), not summarized.

The exception is :func:`rates`: if the events of a second are in two runs, its peak is not the
larger of the two counts. So a run computes the affected quarters again from the whole table, and
for each quarter the rows of the newest run are valid.

A journey is the course of a task in a group, from its enqueue to its end, with one row for each
task and group. It is *closed* when the task's enqueue is known and the task has ended: its last
event has ``ended``, or, in a history without that field, all groups with events have ended. Closed
journeys are written once. Unfinished journeys are carried from run to run in ``open``: a run merges
its new events into them, closes those it can, and writes the others again. So the work of a run
grows with new and unfinished tasks, not with the history, and events can arrive in any order. A
group that appears after all others have finished gets a journey without an enqueue, which is never
closed, but is not stuck after an ack.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports import QUARTER_MS, schema
from tickwheel.reports.schema import (
    FINAL,
    KEY_BUSY,
    NO_TOPIC,
    OCCURRENCE_EVENTS,
    REASON_MAX,
    TASK_EVENTS,
    TRANSACTION_EVENTS,
    TRANSACTION_WITH_AGE,
)

RATED = ("enqueued", "delivered", "acked")
FAILED = ("nacked", "lease_over", "dead")
TASKS_MAX = 1_000_000_000
"""Upper bound of the number of tasks of a transaction."""
WITH_REASON = ("nacked", "lease_over", "dead", "expired")


def quarter(time_ms: Column, span_ms: int = QUARTER_MS) -> Column:
    """Return the start of the quarter of an hour, or other UTC span, of ``time_ms``."""
    return time_ms - F.pmod(time_ms, F.lit(span_ms))


def _keys(span_ms: int = QUARTER_MS) -> list[Column]:
    return [
        quarter(F.col("time_ms"), span_ms).alias("quarter_ms"),
        F.coalesce("topic", F.lit(NO_TOPIC)).alias("topic"),
        F.coalesce("group", F.lit("")).alias("group"),
    ]


def facts(events: DataFrame, span_ms: int = QUARTER_MS) -> DataFrame:
    """Count events by attempt and measured value. The table contains facts by quarter of an hour.
    Any other ``span_ms`` must divide a quarter. ``value_ms`` is the lateness of a first delivery,
    the time from delivery to ack, or the age of a transaction; otherwise it is null.
    ``held``: an order key or fair share made a first delivery late."""
    measured = F.when(F.col("event") == "delivered", F.col("lateness_ms")).when(
        F.col("event").isin("acked", *TRANSACTION_WITH_AGE), F.col("ack_ms")
    )
    counted = F.when(F.col("event") == "dropped", F.coalesce("count", F.lit(1))).otherwise(1)
    first = (F.col("event") == "delivered") & F.col("lateness_ms").isNotNull()
    unclean = (F.col("event") == "started") & (F.col("clean") == F.lit(False))
    return events.groupBy(
        *_keys(span_ms),
        "event",
        # For a start, this column tells whether the daemon had ended cleanly; for a transaction, it
        # is the number of tasks.
        F.when(unclean, -1)
        .when(F.col("event").isin(*TRANSACTION_EVENTS), _tasks())
        .otherwise(F.coalesce("attempt", F.lit(0)))
        .alias("attempt"),
        measured.alias("value_ms"),
        F.when(first & (F.col("cause") == KEY_BUSY), True).alias("held"),
    ).agg(F.sum(counted).cast("long").alias("n"))


def _tasks() -> Column:
    """Return a transaction's number of tasks, which is bounded: a line can contain any number."""
    return F.least(F.coalesce("count", F.lit(0)), F.lit(TASKS_MAX)).cast("int")


def reasons(events: DataFrame) -> DataFrame:
    """Count the reasons of failed deliveries. Long numbers in reasons (ids, sizes) become ``#``."""
    reason = F.left(F.coalesce("reason", F.lit("(none given)")), F.lit(REASON_MAX))
    return (
        events.filter(F.col("event").isin(*WITH_REASON))
        .groupBy(*_keys(), "event", F.regexp_replace(reason, r"\d{4,}", "#").alias("reason"))
        .agg(F.count(F.lit(1)).alias("n"))
    )


def parties(events: DataFrame) -> DataFrame:
    """Count events by producer and subscriber, without ports, which vary by connection."""
    event = F.col("event")
    party = F.when(event == "enqueued", F.col("producer")).otherwise(F.col("subscriber"))
    role = F.when(event == "enqueued", "producer").otherwise("subscriber")
    counted = event.isin("enqueued", "delivered", "acked", *FAILED) & party.isNotNull()
    took = F.when(event == "acked", F.col("ack_ms"))

    def count(which: Column, name: str) -> Column:
        return F.count(F.when(which, 1)).alias(name)

    return (
        events.filter(counted)
        .groupBy(*_keys(), role.alias("role"), without_port(party).alias("name"))
        .agg(
            count(event.isin("enqueued", "delivered"), "n"),
            count(event == "acked", "acked"),
            count(event.isin(*FAILED), "failed"),
            F.sum(took).alias("took_sum_ms"),
            F.max(took).alias("took_max_ms"),
        )
    )


def without_port(party: Column) -> Column:
    """Return a name without its port (``:`` and digits). A regular expression costs several times
    as much."""
    host = F.rtrim(party, F.lit("0123456789"))
    has_port = host.endswith(":") & (F.length(host) < F.length(party))
    return F.when(has_port, F.left(host, F.length(host) - 1)).otherwise(party)


def occurrences(events: DataFrame) -> DataFrame:
    """Count the occurrences of schedules by outcome and lateness."""
    event = F.col("event")
    outcome = F.when(event == "occurrence_queued", "queued").otherwise(
        F.coalesce("reason", F.lit("fired"))
    )
    return (
        events.filter(event.isin(*OCCURRENCE_EVENTS))
        .groupBy(
            *_keys(), "schedule", outcome.alias("outcome"), F.col("lateness_ms").alias("value_ms")
        )
        .agg(F.sum(F.coalesce("count", F.lit(1))).cast("long").alias("n"))
    )


def rates(events: DataFrame, run: int) -> DataFrame:
    """Return the busiest second of each quarter: the number of events and the time."""
    second = F.floor(F.col("time_ms") / 1000)
    *_, topic, group = _keys()
    seconds = (
        events.filter(F.col("event").isin(*RATED))
        .groupBy(topic, group, "event", second.alias("second"))
        .agg(F.count(F.lit(1)).alias("n"))
    )
    # If several seconds are equally busy, take the first. A single number is compared without a
    # sort, unlike a struct.
    quarter_s = QUARTER_MS // 1000
    left = quarter_s - 1 - F.pmod("second", F.lit(quarter_s))
    busiest = F.max(F.col("n") * quarter_s + left)
    passed = quarter_s - 1 - F.pmod("busiest", F.lit(quarter_s))
    return (
        seconds.withColumn("quarter_ms", quarter(F.col("second") * 1000))
        .groupBy("quarter_ms", "topic", "group", "event")
        .agg(busiest.alias("busiest"))
        .select(
            "quarter_ms", "topic", "group", "event",
            F.floor(F.col("busiest") / quarter_s).alias("peak"),
            (F.col("quarter_ms") + passed * 1000).alias("at_ms"), F.lit(run).alias("run"),
        )
    )  # fmt: skip


def newest_rates(rows: DataFrame) -> DataFrame:
    """Return, for each quarter, the rows of the newest run."""
    same_quarter = Window.partitionBy("quarter_ms", "topic", "group", "event")
    return (
        rows.withColumn("newest", F.max("run").over(same_quarter))
        .filter("run = newest")
        .drop("newest")
    )


def merged(name: str, rows: DataFrame) -> DataFrame:
    """Merge the rows of several runs into those of one; for ``rates`` pass only the newest rows."""
    if name in ("rates", "slow"):
        return rows
    worst = {"took_max_ms"} & set(rows.columns)
    sums = [c for c in ("n", "acked", "failed", "took_sum_ms") if c in rows.columns]
    keys = [c for c in rows.columns if c not in {*sums, *worst}]
    return rows.groupBy(*keys).agg(
        *(F.sum(c).alias(c) for c in sums), *(F.max(c).alias(c) for c in worst)
    )


# --- journeys ------------------------------------------------------------------------------------


UNTAKEN = "untaken"
SLOW_KEPT = 50
"""Maximum number of slow keys for each quarter of an hour, topic and group."""
CODES = 32
"""``last_code`` = time_ms × 32 + the event's index in TASK_EVENTS, a single comparable number."""
_RANK = {event: rank for rank, event in enumerate(TASK_EVENTS)}
_RANK["replaced"] = _RANK["rescheduled"]  # both change the due time
_TIES = 1 << 20
"""Multiplied with the longest time until ``TIME_MS_MAX``, this is less than a LONG's maximum."""
_INFO = ("task_id", "topic", "key", "producer", "enqueued_ms", "planned_ms")
_LEG = (
    "task_id", "topic", "group", "due_ms", "came_due_ms", "first_ms", "acked_ms", "ended_ms",
    "whole_ms", "partly", "last_code", "deliveries", "attempts",
)  # fmt: skip


def enqueues(events: DataFrame) -> DataFrame:
    """Return the fields of each task's enqueue."""
    return events.filter(F.col("event") == "enqueued").select(
        "task_id", "topic", "key", "producer",
        F.col("time_ms").alias("enqueued_ms"), F.col("due_ms").alias("planned_ms"),
    )  # fmt: skip


def legs(events: DataFrame) -> DataFrame:
    """Return the course of each task in each group, as far as these events show it, as numbers.
    Events of the whole task (cancelled, replaced, expired) belong to group ``""``."""
    c = F.col
    broadcast = (c("event") == "delivered") & c("group").isNull()
    rank = F.create_map(*(F.lit(x) for pair in _RANK.items() for x in pair))
    # Numbers are shuffled and compared faster than texts.
    changes = events.filter(
        c("event").isin(*_RANK) & (c("event") != "enqueued") & ~broadcast
    ).select(
        "task_id", "topic", F.coalesce("group", F.lit("")).alias("group"), "time_ms", "due_ms",
        "attempt", "ended", rank[c("event")].alias("rank"),
    )  # fmt: skip
    delivered = c("rank") == _RANK["delivered"]
    final = c("rank").isin(*(_RANK[event] for event in FINAL))
    return (
        changes.repartition("task_id")
        .groupBy("task_id", "topic", "group")
        .agg(
            # Take the newest due time in any event.
            F.max_by("due_ms", F.when(c("due_ms").isNotNull(), c("time_ms"))).alias("due_ms"),
            # Retries have later due times, so the first one is that of the task.
            F.min(F.when(delivered, c("due_ms"))).alias("came_due_ms"),
            F.min(F.when(delivered & (c("attempt") == 1), c("time_ms"))).alias("first_ms"),
            F.min(F.when(c("rank") == _RANK["acked"], c("time_ms"))).alias("acked_ms"),
            F.min(F.when(final, c("time_ms"))).alias("ended_ms"),
            # When the whole task ended, and whether it ended in this group before it ended in all
            # groups.
            F.min(F.when(c("ended"), c("time_ms"))).alias("whole_ms"),
            F.coalesce(F.max(~c("ended")), F.lit(False)).alias("partly"),
            F.max(c("time_ms") * CODES + c("rank")).alias("last_code"),
            F.count(F.when(delivered, 1)).alias("deliveries"),
            F.max("attempt").alias("attempts"),
        )
    )


def merge_legs(parts: DataFrame) -> DataFrame:
    """Merge the legs of several runs."""
    newest = F.max_by("due_ms", F.when(F.col("due_ms").isNotNull(), F.col("last_code")))
    first = ("came_due_ms", "first_ms", "acked_ms", "ended_ms", "whole_ms")
    return (
        parts.repartition("task_id")
        .groupBy("task_id", "topic", "group")
        .agg(
            newest.alias("due_ms"),
            *(F.min(name).alias(name) for name in first),
            *(F.max(name).alias(name) for name in ("partly", "last_code")),
            F.sum("deliveries").alias("deliveries"),
            F.max("attempts").alias("attempts"),
        )
    )


def advance(events: DataFrame, unfinished: DataFrame | None) -> DataFrame:
    """Merge new events into the open journeys. Return all journeys with a column ``closed``."""
    enqueued, task_legs = enqueues(events), legs(events)
    if unfinished is not None:
        enqueued = enqueued.unionByName(
            unfinished.filter("lead and enqueued_ms is not null").select(*_INFO)
        )
        earlier_legs = unfinished.filter("`group` is not null").select(*_LEG)
        task_legs = merge_legs(task_legs.unionByName(earlier_legs))
    return _joined(enqueued, _with_siblings(task_legs))


def _with_siblings(task_legs: DataFrame) -> DataFrame:
    """Add to each leg the columns that depend on all legs of its task. Computed before the join,
    they need no further shuffle: a full join has no known partitioning, the legs have."""
    c = F.col
    in_order = Window.partitionBy("task_id").orderBy("group")
    same_task = in_order.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    # The group "" ends the whole task; other groups end it if their event has ``ended``.
    whole = F.coalesce(F.when(c("group") == "", c("ended_ms")), c("whole_ms"))
    all_ended = F.min(F.when(c("group") != "", c("ended_ms").isNotNull())).over(same_task)
    return task_legs.withColumns(
        {
            "whole_end_ms": F.min(whole).over(same_task),
            "any_partly": F.max("partly").over(same_task),
            "quiet": F.coalesce(all_ended, F.lit(False)),
            "lead": F.row_number().over(in_order) == 1,
            "left_ms": F.min(F.coalesce("came_due_ms", "ended_ms")).over(same_task),
        }
    )


def _joined(enqueued: DataFrame, task_legs: DataFrame) -> DataFrame:
    c = F.col
    joined = enqueued.join(
        task_legs.withColumnRenamed("topic", "seen_topic"), "task_id", "full"
    ).withColumn("topic", F.coalesce("topic", "seen_topic"))
    quiet, partly = F.coalesce("quiet", F.lit(False)), F.coalesce("any_partly", F.lit(False))
    ended = c("whole_end_ms").isNotNull() | (quiet & ~partly)
    # A leg without an enqueue may be a late part of a journey that an earlier run has closed.
    owed = c("enqueued_ms").isNotNull() & c("whole_end_ms").isNull() & quiet & partly
    return joined.withColumns(
        {
            "closed": c("enqueued_ms").isNotNull() & ended,
            "lead": F.coalesce("lead", F.lit(True)),
            "owed": owed,
        }
    ).drop("seen_topic", "whole_end_ms", "any_partly", "quiet")


def last_event(last_code: Column) -> Column:
    """Return the name of the event in a ``last_code``, or null for null."""
    index = (F.pmod(last_code, F.lit(CODES)) + 1).cast("int")
    # Spark assumes that element_at of a literal array is never null, and returns the last element
    # for a null index.
    return F.when(last_code.isNotNull(), F.element_at(F.array(*map(F.lit, TASK_EVENTS)), index))


def last_ms(last_code: Column) -> Column:
    """Return the time in a ``last_code``."""
    return F.floor(last_code / CODES).cast("long")


def slow(closed: DataFrame, limit: int = SLOW_KEPT) -> DataFrame:
    """Return the slowest keys of each quarter, each with its slowest task, from due to ack. A
    report can select any quarters. A key appears only once per quarter, however often it is
    slow."""
    took_ms = F.col("acked_ms") - F.col("came_due_ms")
    # Every run takes the same one of equally slow tasks. A single number is compared without
    # a sort, unlike a struct.
    rank = took_ms * _TIES + F.pmod("task_id", F.lit(_TIES))
    worst = ("task_id", "came_due_ms", "acked_ms", "deliveries")
    name = ("quarter_ms", "topic", "group")
    slowest = Window.partitionBy(*name).orderBy(F.desc("took_ms"), "task_id")
    return (
        closed.filter("acked_ms is not null and came_due_ms is not null and key is not null")
        .withColumns({"quarter_ms": quarter(F.col("acked_ms")), "rank": rank})
        # Both steps share one shuffle.
        .repartition(*name)
        .groupBy(*name, "key")
        .agg(*(F.max_by(column, "rank").alias(column) for column in worst))
        .withColumn("took_ms", took_ms)
        .withColumn("rank", F.row_number().over(slowest))
        .filter(F.col("rank") <= limit)
        .drop("rank")
    )


def waits(rows: DataFrame, horizon_ms: int | None = None, span_ms: int = QUARTER_MS) -> DataFrame:
    """Count the beginnings and ends of waits by quarter. Backlogs are running sums of these counts.
    ``scheduled``: a task from its enqueue until it is due or cancelled. ``due``: a task in a group
    from its due time until it ends or becomes a dead letter; before its first delivery it is due in
    group ``""``. For unfinished journeys, ``horizon_ms`` is the time up to which they are known."""
    c = F.col
    begun = c("enqueued_ms")
    # The leading row of group "" has the newest due time, if the due time was changed.
    planned = F.coalesce(F.when(c("group") == "", c("due_ms")), c("planned_ms"))
    planned = F.greatest(planned, begun)
    over_at = F.lit(schema.TIME_MS_MAX if horizon_ms is None else horizon_ms)
    left_ms = F.greatest(F.least(c("left_ms"), planned), begun)
    dead = F.when(last_event(c("last_code")) == "dead", last_ms(c("last_code")))
    over_ms = F.coalesce(c("ended_ms"), dead)
    of_group = c("came_due_ms").isNotNull()
    of_task = c("lead") & begun.isNotNull()
    untaken = of_task & (planned <= over_at) & (c("left_ms").isNull() | (c("left_ms") > planned))
    steps = (
        (of_task, "scheduled", begun, 1),
        (of_task & (left_ms <= over_at), "scheduled", left_ms, -1),
        (untaken, UNTAKEN, planned, 1),
        (untaken, UNTAKEN, c("left_ms"), -1),
        (of_group, "due", F.greatest(c("came_due_ms"), begun), 1),
        (of_group, "due", over_ms, -1),
    )
    changes = F.array(
        *(
            F.struct(
                F.when(which, quarter(at, span_ms)).alias("quarter_ms"),
                F.lit(kind).alias("kind"),
                F.lit(step).alias("step"),
            )
            for which, kind, at, step in steps
        )
    )
    group = F.when(c("kind") == "due", F.coalesce("group", F.lit(""))).otherwise("")
    kind = F.when(c("kind") == UNTAKEN, "due").otherwise(c("kind"))
    return (
        rows.select("topic", "group", F.explode(changes).alias("change"))
        .select("topic", "group", "change.*")
        .filter("quarter_ms is not null")
        .groupBy("quarter_ms", "topic", group.alias("group"), kind.alias("kind"))
        .agg(F.sum("step").cast("long").alias("n"))
    )


def origins(closed: DataFrame) -> DataFrame:
    """Count the finished tasks of each producer, in the form of :func:`parties`."""
    took = F.col("acked_ms") - F.col("came_due_ms")
    return (
        closed.filter("acked_ms is not null and producer is not null")
        .groupBy(
            quarter(F.col("acked_ms")).alias("quarter_ms"), "topic", "group",
            F.lit("origin").alias("role"),
            without_port(F.col("producer")).alias("name"),
        )
        .agg(
            F.count(F.lit(1)).alias("n"),
            F.count(F.lit(1)).alias("acked"),
            F.sum(F.col("deliveries") - 1).alias("failed"),
            F.sum(took).alias("took_sum_ms"),
            F.max(took).alias("took_max_ms"),
        )
    )  # fmt: skip


EVENT_ROLLUPS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "facts": facts, "reasons": reasons, "parties": parties, "occurrences": occurrences,
}  # fmt: skip
"""Rollups computed from a run's new events."""
JOURNEY_ROLLUPS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "slow": slow,
    "waits": waits,
    "origins": origins,
}
"""Rollups computed from the journeys that a run has closed."""
