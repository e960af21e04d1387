"""Exact counts by the quarter of an hour, small enough to compute any figure from.

They are additive: the counts of two sets of events are the union of their rows, so a run adds
the counts of its new events and never touches old ones. Percentiles stay exact because the
values themselves are counted (milliseconds repeat a lot), not summarised.

The one exception is :func:`rates`: the peak of two halves of a second is not the larger half,
so a run computes the quarters it touched anew from the whole table, and the newest run's rows of
a quarter hold.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports.schema import (
    KEY_BUSY,
    NO_TOPIC,
    OCCURRENCE_EVENTS,
    REASON_MAX,
    TRANSACTION_ENDS,
    TRANSACTION_EVENTS,
)
from tickwheel.reports.settings import QUARTER_MS

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
            *_keys(),
            "schedule",
            outcome.alias("outcome"),
            F.col("lateness_ms").alias("value_ms"),
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
    """The rows of several runs as one run would have written them."""
    if name == "rates":
        return newest_rates(found)
    worst = {"took_max_ms"} & set(found.columns)
    sums = [c for c in ("n", "acked", "failed", "took_sum_ms") if c in found.columns]
    keys = [c for c in found.columns if c not in {*sums, *worst}]
    return found.groupBy(*keys).agg(
        *(F.sum(c).alias(c) for c in sums), *(F.max(c).alias(c) for c in worst)
    )
