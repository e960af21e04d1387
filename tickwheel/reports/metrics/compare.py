"""Against what was promised, and against the day before."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports.metrics import service as buckets


def slo(by_day: DataFrame, by_hour: DataFrame, objectives: DataFrame) -> DataFrame:
    """Each topic and group against its objective: the whole, and how many days and hours missed.

    ``budget_used`` is the share of the lateness that the objective allows; above 1 is a breach.
    ``by_day`` and ``by_hour`` are :func:`service.service` (or ``lateness``) by these buckets.
    """
    days = _missed(by_day, objectives, "days")
    hours = _missed(by_hour, objectives, "hours").select("topic", "group", "hours", "hours_missed")
    share = F.col("on_time") / F.col("first_deliveries")
    judged = (
        days.join(hours, ["topic", "group"], "left")
        .withColumn("on_time_share", share)
        .withColumns(
            {
                "met": F.col("on_time_share") >= F.col("objective"),
                "budget_used": _budget_used(),
            }
        )
    )
    return buckets.ordered(judged, "met", F.desc_nulls_first("budget_used"), "topic", "group")


def breaches(by_day: DataFrame, objectives: DataFrame) -> DataFrame:
    """The days on which an objective was missed."""
    found = by_day.join(F.broadcast(objectives.drop("target_ms")), "topic")
    missed = found.filter("on_time_share < objective").select(
        "local", "topic", "group", "target_ms", "objective", "on_time_share",
        "first_deliveries", "late_p99_ms", "late_max_ms",
    )  # fmt: skip
    return buckets.ordered(missed, "local", "topic", "group")


def day_against_day(by_day: DataFrame) -> DataFrame:
    """Each day's figures and their change from the day before that has any (not a ratio of 0)."""
    same = Window.partitionBy("topic", "group").orderBy("start_ms")
    figures = ("enqueued", "delivered", "acked", "dead", "late_p50_ms", "late_p99_ms")
    columns: dict[str, Column] = {}
    for name in figures:
        before = F.lag(name).over(same)
        columns[f"{name}_change"] = F.when(before != 0, (F.col(name) - before) / before)
    columns["on_time_change"] = F.col("on_time_share") - F.lag("on_time_share").over(same)
    compared = by_day.withColumns(columns).select(
        "local", "topic", "group", *figures, "on_time_share", *columns
    )
    return buckets.ordered(compared, "topic", "group", "local")


def _missed(found: DataFrame, objectives: DataFrame, name: str) -> DataFrame:
    judged = found.drop("objective").join(
        F.broadcast(objectives.select("topic", "objective")), "topic"
    )
    return (
        judged.filter("first_deliveries > 0")
        .groupBy("topic", "group")
        .agg(
            F.max("target_ms").alias("target_ms"),
            F.max("objective").alias("objective"),
            F.sum("first_deliveries").alias("first_deliveries"),
            F.sum("on_time").alias("on_time"),
            F.count(F.lit(1)).alias(name),
            F.count(F.when(F.col("on_time_share") < F.col("objective"), 1)).alias(f"{name}_missed"),
        )
    )


def _budget_used() -> Column:
    late, allowed = 1 - F.col("on_time_share"), 1 - F.col("objective")
    return (
        F.when(allowed > 0, late / allowed)
        .when(late > 0, F.lit(None).cast("double"))
        .otherwise(0.0)
    )
