"""Who and what is slow: keys, producers, subscribers."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

EXAMPLES_KEPT = 3


def keys(slow: DataFrame, top: int) -> DataFrame:
    """Each key by its slowest task, from due to the ack; the slowest keys first."""
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
    """Each producer: how much it enqueued, and how long its tasks took from due to the ack."""
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
    """Each subscriber: how much it got, how quick it acked, how often it failed."""
    return (
        parties.filter("role = 'subscriber'")
        .groupBy("topic", "group", "name")
        .agg(
            F.sum("n").alias("delivered"),
            F.sum("acked").alias("acked"),
            F.sum("failed").alias("failed"),
            F.when(F.sum("acked") > 0, F.sum("took_sum_ms") / F.sum("acked")).alias("ack_mean_ms"),
            F.max("took_max_ms").alias("ack_max_ms"),
        )
        .orderBy(F.desc_nulls_last("ack_mean_ms"), "topic", "group", "name")
        .limit(top)
    )


def examples(
    ended: DataFrame, split: Callable[[DataFrame], DataFrame], kept: int = EXAMPLES_KEPT
) -> DataFrame:
    """Of each bucket, topic and group the tasks that took longest from due to the ack.

    ``split`` adds the bucket (``start_ms``) to rows with ``quarter_ms``.
    """
    took = F.col("acked_ms") - F.col("came_due_ms")
    name = ("start_ms", "topic", "group")
    longest = Window.partitionBy(*name).orderBy(F.desc("took_ms"), "task_id")
    known = ended.filter("acked_ms is not null and came_due_ms is not null")
    timed = split(known.withColumns({"quarter_ms": F.col("acked_ms"), "took_ms": took}))
    return (
        timed.withColumn("place", F.row_number().over(longest))
        .filter(F.col("place") <= kept)
        .select(*name, "task_id", "key", "came_due_ms", "took_ms", "deliveries")
        .orderBy(*name, F.desc("took_ms"), "task_id")
    )
