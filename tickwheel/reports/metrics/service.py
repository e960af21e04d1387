"""How much, how punctual, how quick: from the facts, by whatever keys.

Percentiles are exact, with the usual linear interpolation between neighbours: the facts hold
how often each value occurred. A share of nothing is null, not 0 and not 1.

Hours and days are as people in a time zone know them. A local hour is named by the instant it
begins (``start_ms``), so that at the end of summer time the two hours that are both called 02:00
stay two; ``local`` names it with its offset. A day has 23 or 25 hours when the clocks change. Zones
are whole quarters of an hour off UTC, and so is the data, so nothing is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tickwheel.reports.rollups import quarter
from tickwheel.reports.schema import TASK_EVENTS
from tickwheel.reports.settings import QUARTER_MS, TARGET_MS, Slo, pattern_regex

BUCKET = ("start_ms", "local")


def hours(rows: DataFrame, timezone: str) -> DataFrame:
    """``rows`` (with ``quarter_ms``) with the local hour each belongs to."""
    return rows.withColumns(
        {"start_ms": _hour_ms(timezone), "local": _hour_name(F.col("quarter_ms"), timezone)}
    )


def days(rows: DataFrame, timezone: str) -> DataFrame:
    """``rows`` (with ``quarter_ms``) with the local day each belongs to."""
    return rows.withColumns(
        {"start_ms": _day_ms(timezone), "local": _day_name(F.col("quarter_ms"), timezone)}
    )


def steps(rows: DataFrame, timezone: str, step_ms: int) -> DataFrame:
    """``rows`` (with ``quarter_ms``) with the step of ``step_ms`` each belongs to."""
    start = quarter(F.col("quarter_ms"), step_ms)
    return rows.withColumns({"start_ms": start, "local": _second_name(start, timezone)})


def _hour_ms(timezone: str) -> Column:
    at = F.col("quarter_ms")
    return at - F.minute(_wall(at, timezone)).cast("long") * 60_000 - F.pmod(at, F.lit(60_000))


def _day_ms(timezone: str) -> Column:
    wall = _wall(F.col("quarter_ms"), timezone)
    return F.unix_millis(F.to_utc_timestamp(F.date_trunc("day", wall), timezone))


def _hour_name(quarter_ms: Column, timezone: str) -> Column:
    return _named(quarter_ms, timezone, "yyyy-MM-dd HH:'00'")


def _second_name(at_ms: Column, timezone: str) -> Column:
    return _named(at_ms, timezone, "yyyy-MM-dd HH:mm:ss")


def _named(quarter_ms: Column, timezone: str, pattern: str) -> Column:
    wall = _wall(quarter_ms, timezone)
    offset_min = ((F.unix_millis(wall) - quarter_ms) / 60_000).cast("int")
    sign = F.when(offset_min < 0, "-").otherwise("+")
    size = F.abs(offset_min)
    zone = F.format_string("%s%02d:%02d", sign, F.floor(size / 60), F.pmod(size, F.lit(60)))
    return F.concat(F.date_format(wall, pattern), zone)


def _day_name(quarter_ms: Column, timezone: str) -> Column:
    return F.date_format(_wall(quarter_ms, timezone), "yyyy-MM-dd")


def _wall(ms: Column, timezone: str) -> Column:
    """The wall-clock time in a zone, as if it were UTC (the session's zone is UTC)."""
    return F.from_utc_timestamp(F.timestamp_millis(ms), timezone)


STEP, HOUR, DAY = "step_ms", "hour_ms", "day_ms"
"""Keys of a :class:`Cube`: a step of its own length, the local hour, the local day."""
TIMES = frozenset({STEP, HOUR, DAY})


@dataclass(frozen=True)
class Cube:
    """Several groupings of the same rows, by the names of the tables they become.

    All of them are one pass with grouping sets: one plan for Spark, where each alone is a plan of
    its own. In a table ``STEP``, ``HOUR`` and ``DAY`` become ``start_ms`` and ``local``.
    """

    tables: Mapping[str, Sequence[str]]
    timezone: str
    step_ms: int = QUARTER_MS

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for keys in self.tables.values() for key in keys))

    def aggregate(
        self, rows: DataFrame, more: Sequence[str], values: Sequence[Column]
    ) -> DataFrame:
        """``values`` of each group; ``more`` are further keys of every table."""
        names = [*self.keys, *more]
        zone = self.timezone
        times = {STEP: quarter(F.col("quarter_ms"), self.step_ms), HOUR: _hour_ms(zone),
                 DAY: _day_ms(zone)}  # fmt: skip
        placed = rows.withColumns({name: times[name] for name in names if name in times})
        sets = [[F.col(name) for name in (*keys, *more)] for keys in self.tables.values()]
        found = placed.groupingSets(sets, *names).agg(
            F.grouping_id().alias("level"), F.max("quarter_ms").alias("quarter_ms"), *values
        )
        local = {STEP: _second_name(F.col(STEP), zone) if STEP in names else F.lit(None),
                 HOUR: _hour_name(F.col("quarter_ms"), zone),
                 DAY: _day_name(F.col("quarter_ms"), zone)}  # fmt: skip
        there = [name for name in times if name in names]
        named = {
            "start_ms": F.coalesce(*there, F.lit(None)),
            "local": F.coalesce(
                *(F.when(F.col(name).isNotNull(), local[name]) for name in there), F.lit(None)
            ),
        }
        return found.withColumns(named).drop("quarter_ms", *there)

    def columns(self, table: str, found: Sequence[str]) -> list[str]:
        """The columns of a table among ``found``, in order: those of :meth:`aggregate`."""
        keys = self.tables[table]
        timed = BUCKET if TIMES & set(keys) else ()
        chosen = [*timed, *(key for key in keys if key not in TIMES)]
        left = {*chosen, *self.keys, *BUCKET, "level"}
        return [*chosen, *(name for name in found if name not in left)]

    def levels(self, more: Sequence[str] = ()) -> dict[int, str]:
        """``level`` → table: ``level`` has a bit for each key that a table is not grouped by."""
        names = [*self.keys, *more]
        return {
            int("".join(str(int(name not in {*keys, *more})) for name in names) or "0", 2): table
            for table, keys in self.tables.items()
        }


Keys = Sequence[str] | Cube
"""The keys of a figure: columns, or several sets of them at once."""


def grouped(
    rows: DataFrame, keys: Keys, more: Sequence[str], values: Sequence[Column]
) -> DataFrame:
    """``values`` by ``keys`` and ``more``: of a cube every table, in no order; else in order."""
    if isinstance(keys, Cube):
        return keys.aggregate(rows, more, values)
    return rows.groupBy(*keys, *more).agg(*values)


def ordered(rows: DataFrame, *by: str | Column) -> DataFrame:
    """The rows sorted. Figures are few rows, so one partition does; a sort over several would first
    run everything below it once more, to find where to part them."""
    return rows.repartition(1).sortWithinPartitions(*by) if by else rows


def _ordered(found: DataFrame, keys: Keys, *more: str | Column) -> DataFrame:
    """The rows in order; a cube's tables are sorted when they are apart."""
    return found if isinstance(keys, Cube) else ordered(found, *keys, *more)


PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def with_targets(facts: DataFrame, slos: Sequence[Slo]) -> DataFrame:
    """Facts with the ``target_ms`` of their topics: of the first objective that matches."""
    target = F.lit(TARGET_MS)
    for slo in reversed(slos):
        matches = F.col("topic").rlike(f"^(?:{pattern_regex(slo.pattern)})$")
        target = F.when(matches, F.lit(slo.target_ms)).otherwise(target)
    return facts.withColumn("target_ms", target.cast("long"))


def volumes(facts: DataFrame, keys: Keys) -> DataFrame:
    """How many of each event; ``redelivered`` are deliveries after the first."""
    return _ordered(grouped(facts, keys, (), _volumes()), keys)


def lateness(facts: DataFrame, keys: Keys) -> DataFrame:
    """First deliveries: share on time (facts with targets), percentiles and maximum."""
    return _ordered(grouped(facts, keys, (), _lateness()), keys)


def ack_times(facts: DataFrame, keys: Keys) -> DataFrame:
    """The times from delivery to ack."""
    return _ordered(grouped(facts, keys, (), _ack_times()), keys)


def outcomes(facts: DataFrame, keys: Keys) -> DataFrame:
    """First-try success, dead-letter rate, share of redeliveries."""
    return _ordered(grouped(facts, keys, (), _outcomes()), keys)


def service(facts: DataFrame, keys: Keys) -> DataFrame:
    """Volumes, lateness, ack times and outcomes in one pass."""
    values = [*_volumes(), *_lateness(), *_ack_times(), *_outcomes(), *_held_up()]
    return _ordered(grouped(facts, keys, (), values), keys)


def totals(facts: DataFrame) -> DataFrame:
    """How often each event happened in all."""
    return ordered(facts.groupBy("event").agg(F.sum("n").alias("n")), "event")


def attempts(facts: DataFrame, keys: Keys) -> DataFrame:
    """By attempt: deliveries, how they ended, and the share that succeeded."""
    event = F.col("event")
    counted = facts.filter(
        event.isin("delivered", "acked", "nacked", "lease_over", "dead") & (F.col("attempt") > 0)
    )
    # A delivery that died was nacked or its lease was over with the same attempt, but only the
    # `dead` is written: every delivery ends in one of the three.
    failed = _count(event.isin("nacked", "lease_over", "dead"))
    ended = _count(event.isin("acked", "nacked", "lease_over", "dead"))
    values = [
        _count(event == "delivered").alias("delivered"),
        _count(event == "acked").alias("acked"),
        failed.alias("failed"),
        _count(event == "dead").alias("dead"),
        _share(_count(event == "acked"), ended).alias("success_share"),
    ]
    return _ordered(grouped(counted, keys, ("attempt",), values), keys, "attempt")


def reasons(found: DataFrame, keys: Keys, top: int) -> DataFrame:
    """The most frequent reasons of failed deliveries, for each event."""
    counted = grouped(found, keys, ("event", "reason"), [F.sum("n").alias("n")])
    same = [*BUCKET, *(k for k in keys.keys if k not in TIMES)] if isinstance(keys, Cube) else keys
    most = Window.partitionBy(*same, "event").orderBy(F.desc("n"), "reason")
    placed = counted.withColumn("place", F.row_number().over(most))
    found = placed.filter(F.col("place") <= top).drop("place")
    return _ordered(found, keys, "event", F.desc("n"))


def peaks(rates: DataFrame, keys: Keys) -> DataFrame:
    """The busiest second of each event: how many in it, and when."""
    busiest = F.struct(F.col("peak"), (-F.col("at_ms")).alias("before"))  # the first of equals
    found = grouped(rates, keys, ("event",), [F.max(busiest).alias("busiest")])
    values = {
        "per_second": F.col("busiest.peak"),
        "at_ms": -F.col("busiest.before"),
    }
    return _ordered(found.withColumns(values).drop("busiest"), keys, "event")


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


def _held_up() -> list[Column]:
    """First deliveries that their order key or fair share made late: how many, how late in all, and
    the latest."""
    late = F.when(F.col("held"), F.col("value_ms"))
    return [
        _count(F.col("held")).alias("held_up"),
        F.sum(F.col("n") * late).alias("held_up_sum_ms"),
        F.max(late).alias("held_up_max_ms"),
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
