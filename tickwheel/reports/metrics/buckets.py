"""Hours and days as people in a time zone know them.

A local hour is told by the instant it begins (``start_ms``), so that at the end of summer time
the two hours that are both called 02:00 stay two; ``local`` names it with its offset. A day has
23 or 25 hours when the clocks change. Zones are whole quarters of an hour off UTC, and so is the
data, so nothing is split.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

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
