"""How much, how punctual, how quick: from the facts, by whatever keys.

Percentiles are exact, with the usual linear interpolation between neighbours: the facts hold
how often each value occurred. A share of nothing is null, not 0 and not 1.

Hours and days are as people in a time zone know them. A local hour is named by the instant it
begins (``start_ms``), so that at the end of summer time the two hours that are both called 02:00
stay two; ``local`` names it with its offset. A day has 23 or 25 hours when the clocks change. Zones
are whole quarters of an hour off UTC, and so is the data, so nothing is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports.schema import TASK_EVENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET = ("start_ms", "local")


def hours(rows: DataFrame, timezone: str) -> DataFrame:
    """``rows`` (with ``quarter_ms``) with the local hour each belongs to."""
    wall = _wall(timezone)
    start = F.col("quarter_ms") - F.minute(wall).cast("long") * 60_000
    offset_min = ((F.unix_millis(wall) - F.col("quarter_ms")) / 60_000).cast("int")
    sign = F.when(offset_min < 0, "-").otherwise("+")
    size = F.abs(offset_min)
    zone = F.format_string("%s%02d:%02d", sign, F.floor(size / 60), F.pmod(size, F.lit(60)))
    local = F.concat(F.date_format(wall, "yyyy-MM-dd HH:'00'"), zone)
    return rows.withColumns({"start_ms": start, "local": local, "hour": F.hour(wall)})


def days(rows: DataFrame, timezone: str) -> DataFrame:
    """``rows`` (with ``quarter_ms``) with the local day each belongs to."""
    wall = _wall(timezone)
    start = F.unix_millis(F.to_utc_timestamp(F.date_trunc("day", wall), timezone))
    return rows.withColumns({"start_ms": start, "local": F.date_format(wall, "yyyy-MM-dd")})


def ordered(rows: DataFrame, *by: str | Column) -> DataFrame:
    """Sorted. Figures are few rows, so one partition does; a sort over several would first run
    everything below it once more, to find where to part them."""
    return rows.repartition(1).sortWithinPartitions(*by) if by else rows


def _wall(timezone: str) -> Column:
    """The time that a clock on a wall shows, as if it were UTC (the session's zone is UTC)."""
    return F.from_utc_timestamp(F.timestamp_millis("quarter_ms"), timezone)


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def with_targets(facts: DataFrame, targets: DataFrame) -> DataFrame:
    """Facts with ``target_ms`` and ``objective`` of their topics."""
    return facts.join(F.broadcast(targets), "topic")


def volumes(facts: DataFrame, keys: Sequence[str]) -> DataFrame:
    """How many of each event; ``redelivered`` are deliveries after the first."""
    return _ordered(facts.groupBy(*keys).agg(*_volumes()), keys)


def lateness(facts: DataFrame, keys: Sequence[str]) -> DataFrame:
    """First deliveries: share on time (facts with targets), percentiles and maximum."""
    return _ordered(facts.groupBy(*keys).agg(*_lateness()), keys)


def ack_times(facts: DataFrame, keys: Sequence[str]) -> DataFrame:
    """From a delivery to its ack."""
    return _ordered(facts.groupBy(*keys).agg(*_ack_times()), keys)


def outcomes(facts: DataFrame, keys: Sequence[str]) -> DataFrame:
    """First-try success, dead-letter rate, share of redeliveries."""
    return _ordered(facts.groupBy(*keys).agg(*_outcomes()), keys)


def everything() -> list[Column]:
    """All of the above. Made once for several :func:`service`: each column costs round trips."""
    return [*_volumes(), *_lateness(), *_ack_times(), *_outcomes()]


def service(
    facts: DataFrame, keys: Sequence[str], columns: Sequence[Column] | None = None
) -> DataFrame:
    """All of the above in one pass; ``columns`` are :func:`everything`."""
    return _ordered(facts.groupBy(*keys).agg(*(columns or everything())), keys)


def totals(facts: DataFrame) -> DataFrame:
    """How many of each event in all."""
    return ordered(facts.groupBy("event").agg(F.sum("n").alias("n")), "event")


def attempts(facts: DataFrame, keys: Sequence[str]) -> DataFrame:
    """By attempt: deliveries, how they ended, and the share that succeeded."""
    event = F.col("event")
    counted = facts.filter(
        event.isin("delivered", "acked", "nacked", "lease_over", "dead") & (F.col("attempt") > 0)
    )
    # A delivery that died was nacked or its lease was over with the same attempt, but only the
    # `dead` is written: every delivery ends in one of the three.
    failed = _count(event.isin("nacked", "lease_over", "dead"))
    ended = _count(event.isin("acked", "nacked", "lease_over", "dead"))
    return _ordered(
        counted.groupBy(*keys, "attempt").agg(
            _count(event == "delivered").alias("delivered"),
            _count(event == "acked").alias("acked"),
            failed.alias("failed"),
            _count(event == "dead").alias("dead"),
            _share(_count(event == "acked"), ended).alias("success_share"),
        ),
        [*keys, "attempt"],
    )


def reasons(found: DataFrame, keys: Sequence[str], top: int) -> DataFrame:
    """Why deliveries failed: the most frequent of each event."""
    counted = found.groupBy(*keys, "event", "reason").agg(F.sum("n").alias("n"))
    most = Window.partitionBy(*keys, "event").orderBy(F.desc("n"), "reason")
    placed = counted.withColumn("place", F.row_number().over(most))
    found = placed.filter(F.col("place") <= top).drop("place")
    return ordered(found, *keys, "event", F.desc("n"))


def peaks(rates: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The busiest second: how many in it, and when."""
    busiest = F.struct(F.col("peak"), (-F.col("at_ms")).alias("before"))  # the first of equals
    found = rates.groupBy(*keys, "event").agg(F.max(busiest).alias("busiest"))
    at = (-F.col("busiest.before")).alias("at_ms")
    return _ordered(
        found.select(*keys, "event", F.col("busiest.peak").alias("per_second"), at),
        [*keys, "event"],
    )


def _volumes() -> list[Column]:
    event = F.col("event")
    again = (event == "delivered") & (F.col("attempt") > 1)
    return [
        *(_count(event == name).alias(name) for name in TASK_EVENTS),
        _count(again).alias("redelivered"),
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


def _ack_times() -> list[Column]:
    return _spread(F.col("event") == "acked", "ack")


def _outcomes() -> list[Column]:
    event, first = F.col("event"), F.col("attempt") == 1
    acked, dead = _count(event == "acked"), _count(event == "dead")
    first_ended = event.isin("acked", "nacked", "lease_over", "dead") & first
    first_share = _share(_count((event == "acked") & first), _count(first_ended))
    again = (event == "delivered") & (F.col("attempt") > 1)
    return [
        first_share.alias("first_try_share"),
        _share(dead, acked + dead).alias("dead_share"),
        _share(_count(again), _count(event == "delivered")).alias("redelivered_share"),
    ]


def _spread(which: Column, name: str) -> list[Column]:
    value = F.when(which, F.col("value_ms"))
    found = F.percentile(value, list(PERCENTILES.values()), F.col("n"))
    return [
        *(found[i].alias(f"{name}_{label}_ms") for i, label in enumerate(PERCENTILES)),
        F.max(value).alias(f"{name}_max_ms"),
    ]


def _count(which: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, F.col("n"))), F.lit(0))


def _share(part: Column, whole: Column) -> Column:
    return F.when(whole > 0, part / whole)


def _ordered(found: DataFrame, keys: Sequence[str]) -> DataFrame:
    return ordered(found, *keys)
