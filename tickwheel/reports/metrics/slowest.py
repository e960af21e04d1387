"""Who and what is slow: keys, producers, subscribers."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


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
