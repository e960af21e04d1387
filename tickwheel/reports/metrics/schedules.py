"""Recurring schedules: what was planned, and what became of it."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tickwheel.reports.metrics.service import PERCENTILES, Cube, Keys, grouped, ordered


def schedules(occurrences: DataFrame, keys: Keys) -> DataFrame:
    """By schedule: decided occurrences, how many became a task and how late, how many were skipped
    and why. What an operator wanted (a run on demand, a backfill) was not planned."""
    planned = F.col("outcome").isin("fired", "missed", "overlap")
    late = F.when(F.col("outcome") == "fired", F.col("value_ms"))
    spread = F.percentile(late, list(PERCENTILES.values()), F.col("n"))
    values = [
        _count(planned).alias("planned"),
        *(_of(outcome).alias(name) for outcome, name in _NAMES.items()),
        F.when(_count(planned) > 0, _of("fired") / _count(planned)).alias("fired_share"),
        *(spread[i].alias(f"late_{name}_ms") for i, name in enumerate(PERCENTILES)),
        F.max(late).alias("late_max_ms"),
    ]
    found = grouped(occurrences, keys, ("schedule", "topic"), values)
    return found if isinstance(keys, Cube) else ordered(found, *keys, "schedule", "topic")


_NAMES = {
    "fired": "fired", "missed": "missed", "overlap": "overlapped", "queued": "queued",
    "run": "on_demand", "backfill": "backfilled",
}  # fmt: skip


def _of(outcome: str) -> Column:
    return _count(F.col("outcome") == outcome)


def _count(which: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, F.col("n"))), F.lit(0))
