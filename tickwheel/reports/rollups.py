"""What is kept of events beside themselves: exact counts, and each task's way.

Rollups are exact counts by the quarter of an hour, small enough to compute any figure from.

They are additive: the counts of two sets of events are the union of their rows, so a run adds
the counts of its new events and never touches old ones. Percentiles stay exact because the
values themselves are counted (milliseconds repeat a lot), not summarised.

The one exception is :func:`rates`: the peak of two halves of a second is not the larger half,
so a run computes the quarters it touched anew from the whole table, and the newest run's rows of
a quarter hold.

Journeys are each task's way from its enqueue to its end, put together from its events.

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
    TRANSACTION_ENDS,
    TRANSACTION_EVENTS,
)

RATED = ("enqueued", "delivered", "acked")
FAILED = ("nacked", "lease_over", "dead")
TASKS_MAX = 1_000_000_000
"""Above the number of tasks that any transaction has."""
WITH_REASON = ("nacked", "lease_over", "dead", "expired")


def quarter(time_ms: Column, span_ms: int = QUARTER_MS) -> Column:
    """The start of the quarter of an hour (or other UTC span) that holds ``time_ms``."""
    return time_ms - F.pmod(time_ms, F.lit(span_ms))


def _keys(span_ms: int = QUARTER_MS) -> list[Column]:
    return [
        quarter(F.col("time_ms"), span_ms).alias("quarter_ms"),
        F.coalesce("topic", F.lit(NO_TOPIC)).alias("topic"),
        F.coalesce("group", F.lit("")).alias("group"),
    ]


def facts(events: DataFrame, span_ms: int = QUARTER_MS) -> DataFrame:
    """How often what happened, by attempt and by the value measured.

    What is kept is by the quarter of an hour; another ``span_ms`` divides it.
    ``value_ms`` is the lateness of a first delivery, the time to the ack of an ack, the age of a
    transaction that ends, else null. ``held``: its order key or fair share made a first delivery
    late.
    """
    measured = F.when(F.col("event") == "delivered", F.col("lateness_ms")).when(
        F.col("event").isin("acked", *TRANSACTION_ENDS), F.col("ack_ms")
    )
    counted = F.when(F.col("event") == "dropped", F.coalesce("count", F.lit(1))).otherwise(1)
    first = (F.col("event") == "delivered") & F.col("lateness_ms").isNotNull()
    unclean = (F.col("event") == "started") & (F.col("clean") == F.lit(False))
    return events.groupBy(
        *_keys(span_ms),
        "event",
        # A start has no attempt; here it says whether the daemon had ended cleanly before, and of a
        # transaction how many tasks it is about.
        F.when(unclean, -1)
        .when(F.col("event").isin(*TRANSACTION_EVENTS), _tasks())
        .otherwise(F.coalesce("attempt", F.lit(0)))
        .alias("attempt"),
        measured.alias("value_ms"),
        F.when(first & (F.col("cause") == KEY_BUSY), True).alias("held"),
    ).agg(F.sum(counted).cast("long").alias("n"))


def _tasks() -> Column:
    """The number of tasks of a transaction, from a line that may say anything."""
    return F.least(F.coalesce("count", F.lit(0)), F.lit(TASKS_MAX)).cast("int")


def reasons(events: DataFrame) -> DataFrame:
    """Reasons of failed deliveries. Long numbers in them (ids, sizes) become ``#``."""
    reason = F.left(F.coalesce("reason", F.lit("(none given)")), F.lit(REASON_MAX))
    return (
        events.filter(F.col("event").isin(*WITH_REASON))
        .groupBy(*_keys(), "event", F.regexp_replace(reason, r"\d{4,}", "#").alias("reason"))
        .agg(F.count(F.lit(1)).alias("n"))
    )


def parties(events: DataFrame) -> DataFrame:
    """Counts of each producer and subscriber, without ports, which change with every connection."""
    event = F.col("event")
    who = F.when(event == "enqueued", F.col("producer")).otherwise(F.col("subscriber"))
    role = F.when(event == "enqueued", "producer").otherwise("subscriber")
    counted = event.isin("enqueued", "delivered", "acked", *FAILED) & who.isNotNull()
    took = F.when(event == "acked", F.col("ack_ms"))

    def count(which: Column, name: str) -> Column:
        return F.count(F.when(which, 1)).alias(name)

    return (
        events.filter(counted)
        .groupBy(*_keys(), role.alias("role"), F.regexp_replace(who, r":\d+$", "").alias("name"))
        .agg(
            count(event.isin("enqueued", "delivered"), "n"),
            count(event == "acked", "acked"),
            count(event.isin(*FAILED), "failed"),
            F.sum(took).alias("took_sum_ms"),
            F.max(took).alias("took_max_ms"),
        )
    )


def occurrences(events: DataFrame) -> DataFrame:
    """What became of the occurrences of schedules, by how late the planned ones fired."""
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
    """The busiest second of each quarter: how many in it, and when it was."""
    second = F.col("time_ms") - F.pmod(F.col("time_ms"), F.lit(1000))
    seconds = (
        events.filter(F.col("event").isin(*RATED))
        .groupBy(*_keys(), "event", second.alias("second_ms"))
        .agg(F.count(F.lit(1)).alias("n"))
    )
    # The first of seconds that are equally busy.
    busiest = F.struct(F.col("n"), (-F.col("second_ms")).alias("before"))
    return (
        seconds.groupBy("quarter_ms", "topic", "group", "event")
        .agg(F.max(busiest).alias("busiest"))
        .select(
            "quarter_ms", "topic", "group", "event", F.col("busiest.n").alias("peak"),
            (-F.col("busiest.before")).alias("at_ms"), F.lit(run).alias("run"),
        )
    )  # fmt: skip


def newest_rates(found: DataFrame) -> DataFrame:
    """For each quarter the rows of the run that saw most of it."""
    same = Window.partitionBy("quarter_ms", "topic", "group", "event")
    return found.withColumn("newest", F.max("run").over(same)).filter("run = newest").drop("newest")


def merged(name: str, found: DataFrame) -> DataFrame:
    """The rows of several runs, with those of ``rates`` that hold, as of one run."""
    if name in ("rates", "slow"):
        return found
    worst = {"took_max_ms"} & set(found.columns)
    sums = [c for c in ("n", "acked", "failed", "took_sum_ms") if c in found.columns]
    keys = [c for c in found.columns if c not in {*sums, *worst}]
    return found.groupBy(*keys).agg(
        *(F.sum(c).alias(c) for c in sums), *(F.max(c).alias(c) for c in worst)
    )


# --- journeys ------------------------------------------------------------------------------------


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
    newest = F.max_by("due_ms", F.when(F.col("due_ms").isNotNull(), F.col("last_code")))
    first = ("came_due_ms", "first_ms", "acked_ms", "ended_ms", "whole_ms")
    return (
        found.repartition("task_id")
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
    """New events and the journeys open so far → all journeys, with ``closed`` for each."""
    enqueued, seen = enqueues(events), legs(events)
    if unfinished is not None:
        enqueued = enqueued.unionByName(
            unfinished.filter("lead and enqueued_ms is not null").select(*_INFO)
        )
        kept = unfinished.filter("`group` is not null").select(*_LEG)
        seen = merge_legs(seen.unionByName(kept))
    return _joined(enqueued, seen)


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


OF_EVENTS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "facts": facts, "reasons": reasons, "parties": parties, "occurrences": occurrences,
}  # fmt: skip
"""Rollups that are made of a run's new events alone."""
OF_JOURNEYS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "slow": slow,
    "waits": waits,
    "origins": origins,
}
"""Rollups that are made of the journeys that a run has closed."""
