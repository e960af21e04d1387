"""What waits: backlogs over time, and tasks that should have ended and did not."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports.journeys import last_event, last_ms
from tickwheel.reports.metrics import service as buckets

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
    """Of each hour in which it changed: how many wait at its end, and the most in it. With
    ``step_ms`` of each such step instead.

    These are running sums over all of ``waits``, so ``waits`` must reach back to the first event.
    An end whose beginning lies before the history does not make a sum negative. ``since_ms``
    leaves out the hours before it; what still waits from then counts in the hour of ``since_ms``.
    The most is taken at the quarters of an hour, or whatever ``waits`` are kept by.
    """
    name = ("kind", "topic", "group")
    steps = waits.groupBy("quarter_ms", *name).agg(F.sum("n").alias("n"))
    so_far = Window.partitionBy(*name).orderBy("quarter_ms")
    sums = steps.withColumn("sum", F.sum("n").over(so_far))
    # The lowest value of the sum: so many had begun before the history did.
    before = F.least(F.min("sum").over(Window.partitionBy(*name)), F.lit(0))
    # What an hour begins with was in it, too, though its first change may have ended it.
    level = sums.withColumn("level", F.col("sum") - before).withColumn(
        "held", F.coalesce(F.lag("level").over(so_far), "level")
    )
    if until_ms is not None:
        level = level.filter(F.col("quarter_ms") < until_ms)
    if since_ms is not None:
        level = _since(level, name, since_ms)
    timed = (
        buckets.hours(level, timezone)
        if step_ms is None
        else buckets.steps(level, timezone, step_ms)
    )
    found = timed.groupBy(*buckets.BUCKET, *name).agg(
        F.max_by("level", "quarter_ms").alias("at_end"),
        F.max(F.greatest("level", "held")).alias("most"),
    )
    return buckets.ordered(found, "start_ms", *name)


def _since(level: DataFrame, name: Sequence[str], since_ms: int) -> DataFrame:
    """The levels without the quarters before ``since_ms``, which begins with what was left then."""
    at = F.greatest("quarter_ms", F.lit(since_ms))
    last = Window.partitionBy(*name, at).orderBy(F.desc("quarter_ms"))
    kept = level.withColumn("place", F.row_number().over(last)).filter("place = 1").drop("place")
    earlier = F.col("quarter_ms") < since_ms
    return (
        kept.filter(~(earlier & (F.col("level") == 0)))
        .withColumn("held", F.when(earlier, F.col("level")).otherwise(F.col("held")))
        .withColumn("quarter_ms", at)
    )


def stuck(unfinished: DataFrame, horizon_ms: int, after_ms: int) -> DataFrame:
    """Tasks (in their groups) whose end is overdue by more than ``after_ms`` at ``horizon_ms``.

    Of a task that all groups seen so far are done with, and that had not ended with the last of
    them, one row says that some other group has not got it.

    Dead letters are not stuck: they wait for people, and are counted as dead. What waits for a
    retry or was handed out lately is not stuck either: its next step is not overdue yet.
    """
    c = F.col
    event = last_event(c("last_code"))
    unseen = c("group").isNull() | (c("group") == "")
    owed = c("owed") & c("lead")
    names = F.create_map(*(F.lit(x) for pair in STATES.items() for x in pair))
    # A task that a group has seen is judged by what that group did, not by its other rows.
    due = F.greatest(
        "due_ms", F.when(unseen, c("planned_ms")), F.when(~unseen, last_ms(c("last_code")))
    )
    found = unfinished.filter(c("ended_ms").isNull() | owed).withColumns(
        {
            "state": F.when(owed, OWED).when(unseen, NEVER).otherwise(F.element_at(names, event)),
            "expected_ms": F.when(owed, c("left_ms")).otherwise(due),
            "event": event,
            "unseen": unseen,
        }
    )
    overdue = F.lit(horizon_ms) - c("expected_ms")
    # With a group of its own the row of the task as a whole says nothing new.
    shown = owed | ~c("unseen") | (c("lead") & c("left_ms").isNull())
    return (
        found.filter(shown & (overdue > after_ms) & (F.coalesce("event", F.lit("")) != "dead"))
        .select(
            "task_id", "topic",
            F.when(owed, "").otherwise(F.coalesce("group", F.lit(""))).alias("group"),
            "state", "key", "producer", "enqueued_ms", "expected_ms",
            overdue.alias("overdue_ms"),
            F.when(owed, 0).otherwise(F.coalesce("attempts", F.lit(0))).alias("attempts"),
        )
        .orderBy(F.desc("overdue_ms"), "task_id", "group")
    )  # fmt: skip


def stuck_by_group(found: DataFrame, since_ms: int | None = None) -> DataFrame:
    """:func:`stuck` in short: tasks in each state, how many of them since ``since_ms``
    (``lately``), and the longest overdue."""
    late = F.col("expected_ms") >= (since_ms or 0)
    counted = found.groupBy("topic", "group", "state").agg(
        F.count(F.lit(1)).alias("tasks"),
        F.count(F.when(late, 1)).alias("lately"),
        F.max("overdue_ms").alias("overdue_ms"),
        F.min("expected_ms").alias("expected_ms"),
        F.min_by("task_id", "expected_ms").alias("task_id"),
    )
    return buckets.ordered(counted, F.desc("tasks"), "topic", "group", "state")
