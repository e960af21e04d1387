"""Each task's way from its enqueue to its end, put together from its events.

One row a task and group. A journey is *closed* when the task's enqueue is known and the task has
ended: the event that ended it said so (``ended``), or, in history without that field, every group
that was seen has come to an end. What is closed is written once. What is not is carried from
run to run in ``open``: a run merges its new events into it, closes what it can and writes the
rest anew. So the work of a run grows with what is new and what is unfinished, not with history,
and events may arrive in any order. A group that turns up after all others had finished makes a
journey of its own without an enqueue, which closes no more but is never mistaken for stuck once
it was acked.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports import schema
from tickwheel.reports.rollups import quarter
from tickwheel.reports.schema import FINAL, TASK_EVENTS
from tickwheel.reports.settings import QUARTER_MS

DAY_MS = 86_400_000
UNTAKEN = "untaken"
SLOW_KEPT = 50
"""Slow keys that are kept for each quarter of an hour, topic and group."""
CODES = 32
"""``last_code`` = time_ms × 32 + the event's place in TASK_EVENTS: one number to compare."""
_RANK = {event: rank for rank, event in enumerate(TASK_EVENTS)}
_INFO = ("task_id", "topic", "key", "producer", "enqueued_ms", "planned_ms")
_LEG = (
    "task_id", "topic", "group", "due_ms", "came_due_ms", "first_ms", "acked_ms", "ended_ms",
    "whole_ms", "partly", "last_code", "deliveries", "attempts",
)  # fmt: skip


def enqueues(events: DataFrame) -> DataFrame:
    """What the enqueue says of each task."""
    return events.filter(F.col("event") == "enqueued").select(
        "task_id", "topic", "key", "producer",
        F.col("time_ms").alias("enqueued_ms"), F.col("due_ms").alias("planned_ms"),
    )  # fmt: skip


def legs(events: DataFrame) -> DataFrame:
    """What one set of events says of each task in each group; numbers only, so it is quick.

    Events of the whole task (cancelled, rescheduled, expired) are the leg of group ``""``.
    """
    c = F.col
    broadcast = (c("event") == "delivered") & c("group").isNull()
    found = events.filter(
        c("event").isin(*TASK_EVENTS) & (c("event") != "enqueued") & ~broadcast
    ).withColumn("group", F.coalesce("group", F.lit("")))
    first = (c("event") == "delivered") & (c("attempt") == 1)
    rank = F.create_map(*(F.lit(x) for pair in _RANK.items() for x in pair))
    return (
        found.repartition("task_id")
        .groupBy("task_id", "topic", "group")
        .agg(
            # The newest due time, whichever event has it.
            F.max_by("due_ms", F.when(c("due_ms").isNotNull(), c("time_ms"))).alias("due_ms"),
            # A retry has a due time of its own; the task was due at the first.
            F.min(F.when(c("event") == "delivered", c("due_ms"))).alias("came_due_ms"),
            F.min(F.when(first, c("time_ms"))).alias("first_ms"),
            F.min(F.when(c("event") == "acked", c("time_ms"))).alias("acked_ms"),
            F.min(F.when(c("event").isin(*FINAL), c("time_ms"))).alias("ended_ms"),
            # When the whole task had ended; whether an end of this group left it to others.
            F.min(F.when(c("ended"), c("time_ms"))).alias("whole_ms"),
            F.coalesce(F.max(~c("ended")), F.lit(False)).alias("partly"),
            F.max(c("time_ms") * CODES + rank[c("event")]).alias("last_code"),
            F.count(F.when(c("event") == "delivered", 1)).alias("deliveries"),
            F.max("attempt").alias("attempts"),
        )
    )


def merge_legs(found: DataFrame) -> DataFrame:
    """The legs of several runs as one."""
    return (
        found.repartition("task_id")
        .groupBy("task_id", "topic", "group")
        .agg(
            F.max_by("due_ms", F.when(F.col("due_ms").isNotNull(), F.col("last_code"))).alias(
                "due_ms"
            ),
            F.min("came_due_ms").alias("came_due_ms"),
            F.min("first_ms").alias("first_ms"),
            F.min("acked_ms").alias("acked_ms"),
            F.min("ended_ms").alias("ended_ms"),
            F.min("whole_ms").alias("whole_ms"),
            F.max("partly").alias("partly"),
            F.max("last_code").alias("last_code"),
            F.sum("deliveries").alias("deliveries"),
            F.max("attempts").alias("attempts"),
        )
    )


def advance(events: DataFrame, unfinished: DataFrame | None) -> DataFrame:
    """New events and the journeys open so far → all journeys, with ``closed`` for each."""
    enqueued, seen = enqueues(events), legs(events)
    if unfinished is not None:
        enqueued = enqueued.unionByName(
            unfinished.filter("lead and enqueued_ms is not null").select(*_INFO)
        )
        kept = unfinished.filter("`group` is not null").select(*_LEG)
        seen = merge_legs(seen.unionByName(kept))
    return _joined(enqueued, seen)


def journeys(events: DataFrame) -> DataFrame:
    """The journeys of one whole set of events."""
    return advance(events, None)


def _joined(enqueued: DataFrame, seen: DataFrame) -> DataFrame:
    c = F.col
    same_task = Window.partitionBy("task_id")
    # The group "" ends the whole task; the others end each for itself, the last one said so.
    whole = F.coalesce(F.when(c("group") == "", c("ended_ms")), c("whole_ms"))
    whole_end = F.min(whole).over(same_task)
    partly = F.coalesce(F.max("partly").over(same_task), F.lit(False))
    all_ended = F.min(F.when(c("group") != "", c("ended_ms").isNotNull())).over(same_task)
    joined = enqueued.join(
        seen.withColumnRenamed("topic", "seen_topic"), "task_id", "full"
    ).withColumn("topic", F.coalesce("topic", "seen_topic"))
    quiet = F.coalesce(all_ended, F.lit(False))
    ended = whole_end.isNotNull() | (quiet & ~partly)
    # Without its enqueue it may be the late rest of a task that an earlier run has closed.
    owed = c("enqueued_ms").isNotNull() & whole_end.isNull() & quiet & partly
    lead = F.row_number().over(same_task.orderBy(c("group").asc_nulls_first())) == 1
    left = F.min(F.coalesce("came_due_ms", "ended_ms")).over(same_task)
    return joined.drop("seen_topic").withColumns(
        {
            "closed": c("enqueued_ms").isNotNull() & ended,
            "lead": lead,
            "left_ms": left,
            "owed": owed,
        }
    )


def last_event(last_code: Column) -> Column:
    """The name in a ``last_code``; null for null."""
    place = (F.pmod(last_code, F.lit(CODES)) + 1).cast("int")
    # Spark takes element_at of a literal array for never null, and a null place for the last.
    return F.when(last_code.isNotNull(), F.element_at(F.array(*map(F.lit, TASK_EVENTS)), place))


def last_ms(last_code: Column) -> Column:
    """The time in a ``last_code``."""
    return F.floor(last_code / CODES).cast("long")


def slow(closed: DataFrame, kept: int = SLOW_KEPT) -> DataFrame:
    """From due to the ack: of each key its slowest task, of each quarter the slowest keys.

    By the quarter, because a report may ask for any; by the key, so that one that is slow often
    takes no more than one place.
    """
    worst = F.struct(
        (F.col("acked_ms") - F.col("came_due_ms")).alias("took_ms"),
        "task_id", "came_due_ms", "acked_ms", "deliveries",
    )  # fmt: skip
    name = ("quarter_ms", "topic", "group")
    slowest = Window.partitionBy(*name).orderBy(F.desc("took_ms"), "task_id")
    return (
        closed.filter("acked_ms is not null and came_due_ms is not null and key is not null")
        .withColumn("quarter_ms", quarter(F.col("acked_ms")))
        # One shuffle for both steps.
        .repartition(*name)
        .groupBy(*name, "key")
        .agg(F.max(worst).alias("worst"))
        .select(*name, "key", "worst.*")
        .withColumn("place", F.row_number().over(slowest))
        .filter(F.col("place") <= kept)
        .drop("place")
    )


def waits(found: DataFrame, horizon_ms: int | None = None, span_ms: int = QUARTER_MS) -> DataFrame:
    """How many began and ceased to wait, by quarter: additive, so backlogs are running sums.

    ``scheduled``: a task from its enqueue until it comes due (or is cancelled). ``due``: a task
    in a group from its due time to its end, or into the dead letters; before any group got it
    it is due in group ``""``. Unfinished journeys need ``horizon_ms``: the time up to which they
    are known.
    """
    c = F.col
    begun = c("enqueued_ms")
    # In the row that leads, the group "" has the newest due time, if it was ever changed.
    planned = F.coalesce(F.when(c("group") == "", c("due_ms")), c("planned_ms"))
    planned = F.greatest(planned, begun)
    over_at = F.lit(schema.TIME_MS_MAX if horizon_ms is None else horizon_ms)
    left = F.greatest(F.least(c("left_ms"), planned), begun)
    dead = F.when(last_event(c("last_code")) == "dead", last_ms(c("last_code")))
    over = F.coalesce(c("ended_ms"), dead)
    of_group = c("came_due_ms").isNotNull()
    of_task = c("lead") & begun.isNotNull()
    untaken = of_task & (planned <= over_at) & (c("left_ms").isNull() | (c("left_ms") > planned))
    steps = (
        (of_task, "scheduled", begun, 1),
        (of_task & (left <= over_at), "scheduled", left, -1),
        (untaken, UNTAKEN, planned, 1),
        (untaken, UNTAKEN, c("left_ms"), -1),
        (of_group, "due", F.greatest(c("came_due_ms"), begun), 1),
        (of_group, "due", over, -1),
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
        found.select("topic", "group", F.explode(changes).alias("change"))
        .select("topic", "group", "change.*")
        .filter("quarter_ms is not null")
        .groupBy("quarter_ms", "topic", group.alias("group"), kind.alias("kind"))
        .agg(F.sum("step").cast("long").alias("n"))
    )


def origins(closed: DataFrame) -> DataFrame:
    """What became of each producer's tasks, in the shape of :func:`rollups.parties`."""
    took = F.col("acked_ms") - F.col("came_due_ms")
    return (
        closed.filter("acked_ms is not null and producer is not null")
        .groupBy(
            quarter(F.col("acked_ms")).alias("quarter_ms"), "topic", "group",
            F.lit("origin").alias("role"),
            F.regexp_replace("producer", r":\d+$", "").alias("name"),
        )
        .agg(
            F.count(F.lit(1)).alias("n"),
            F.count(F.lit(1)).alias("acked"),
            F.sum(F.col("deliveries") - 1).alias("failed"),
            F.sum(took).alias("took_sum_ms"),
            F.max(took).alias("took_max_ms"),
        )
    )  # fmt: skip
