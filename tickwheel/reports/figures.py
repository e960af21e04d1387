"""All figures of one report, by the names of the files they are written to."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.reports import journeys, schema
from tickwheel.reports.metrics import compare, service, slowest, waiting
from tickwheel.reports.metrics import schedules as recurring
from tickwheel.reports.metrics import service as buckets
from tickwheel.reports.settings import ReportSettings, pattern_regex
from tickwheel.reports.table import Manifest, Table

KEYS = ("topic", "group")
STUCK_LISTED_MAX = 10_000


@dataclass(frozen=True)
class Figures:
    """DataFrames by name, and what has to be let go of when they are written."""

    frames: dict[str, DataFrame]
    held: list[DataFrame]
    topics: list[str]

    def release(self) -> None:
        for frame in self.held:
            frame.unpersist()


def figures(
    spark: SparkSession, table: Table, manifest: Manifest, settings: ReportSettings
) -> Figures:
    """What the report says, computed from the table as ``manifest`` describes it."""
    whole = {name: table.rollup(name, manifest) for name in schema.ROLLUPS}
    part = {name: wanted(frame, settings) for name, frame in whole.items()}
    facts = part["facts"].persist()
    topics = sorted(
        row.topic
        for row in facts.select("topic").distinct().collect()
        if row.topic != schema.NO_TOPIC and settings.wants(row.topic)
    )
    targets = _targets(spark, topics, settings)
    counted = service.with_targets(facts, targets)
    columns = service.everything()
    hours = buckets.hours(counted, settings.timezone)
    days = buckets.days(counted, settings.timezone)
    by_hour = service.service(hours, [*buckets.BUCKET, *KEYS], columns).persist()
    by_day = service.service(days, [*buckets.BUCKET, *KEYS], columns).persist()
    objectives = targets.drop("target_ms")
    reasons, rates = (of_topics(part[name], settings) for name in ("reasons", "rates"))
    occurrences = of_topics(part["occurrences"], settings)
    unfinished = of_topics(table.open_journeys(manifest), settings)
    known_ms = manifest.last_ms or 0
    horizon_ms = known_ms if settings.until_ms is None else min(known_ms, settings.until_ms)
    waits = of_topics(whole["waits"], settings).unionByName(journeys.waits(unfinished, known_ms))
    frames = {
        "totals": service.totals(facts.filter(facts.topic.isin(*topics, schema.NO_TOPIC))),
        "by_hour": by_hour,
        "by_day": by_day,
        "by_topic": service.service(counted, KEYS, columns),
        "all_by_hour": service.service(hours, buckets.BUCKET, columns),
        "all_by_day": service.service(days, buckets.BUCKET, columns),
        "all": service.service(counted, [], columns),
        "attempts": service.attempts(counted, KEYS),
        "reasons": service.reasons(reasons, KEYS, settings.top),
        "peaks": service.peaks(rates, KEYS),
        **over_time(counted, reasons, rates, settings),
        "backlog": waiting.backlog(waits, settings.timezone, settings.since_ms, settings.until_ms),
        "slowest_keys": slowest.keys(of_topics(part["slow"], settings), settings.top),
        "producers": slowest.producers(
            of_topics(part["parties"], settings), of_topics(part["origins"], settings), settings.top
        ),
        "subscribers": slowest.subscribers(of_topics(part["parties"], settings), settings.top),
        "stuck": waiting.stuck(unfinished, horizon_ms, settings.stuck_after_ms).limit(
            STUCK_LISTED_MAX
        ),
        "slo": compare.slo(by_day, by_hour, objectives),
        "slo_breaches": compare.breaches(by_day, targets),
        "day_against_day": compare.day_against_day(by_day),
        "schedules": recurring.schedules(occurrences, []),
        "schedules_by_day": recurring.schedules(
            buckets.days(occurrences, settings.timezone), buckets.BUCKET
        ),
        "daemon": daemon(facts),
        "quarantine": quarantine(table.quarantine(manifest)),
    }
    return Figures(frames, [facts, by_hour, by_day], topics)


def over_time(
    counted: DataFrame, reasons: DataFrame, rates: DataFrame, settings: ReportSettings
) -> dict[str, DataFrame]:
    """Attempts, reasons and peak rates by hour and by day."""
    keys, found = [*buckets.BUCKET, *KEYS], {}
    for name, split in (("hour", buckets.hours), ("day", buckets.days)):
        said, seen, fast = (split(rows, settings.timezone) for rows in (counted, reasons, rates))
        found[f"attempts_by_{name}"] = service.attempts(said, keys)
        found[f"reasons_by_{name}"] = service.reasons(seen, keys, settings.top)
        found[f"peaks_by_{name}"] = service.peaks(fast, keys)
    return found


def wanted(rows: DataFrame, settings: ReportSettings) -> DataFrame:
    """The rows of the time asked for: not before ``since``, and before ``until``."""
    if settings.since_ms is not None:
        rows = rows.filter(rows.quarter_ms >= settings.since_ms)
    if settings.until_ms is not None:
        rows = rows.filter(rows.quarter_ms < settings.until_ms)
    return rows


def of_topics(rows: DataFrame, settings: ReportSettings) -> DataFrame:
    """The rows of the topics asked for."""
    if not settings.topics:
        return rows
    patterns = map(pattern_regex, settings.topics)
    return rows.filter(rows.topic.rlike("^(?:" + "|".join(patterns) + ")$"))


def daemon(facts: DataFrame) -> DataFrame:
    """Starts (``attempt`` -1: after an unclean end), stops, and history that was dropped."""
    name = F.when(F.col("attempt") == -1, "started after a crash").otherwise(F.col("event"))
    found = (
        facts.filter(F.col("event").isin("started", "stopped", "dropped"))
        .groupBy(name.alias("what"))
        .agg(F.sum("n").alias("n"))
    )
    return buckets.ordered(found, "what")


def quarantine(lines: DataFrame) -> DataFrame:
    """Bad lines by reason, with one of each to look at."""
    found = lines.groupBy("reason").agg(
        F.count(F.lit(1)).alias("lines"),
        F.sum("bytes").alias("bytes"),
        F.min("segment").alias("segment"),
        F.min_by("line", "segment").alias("example"),
    )
    return buckets.ordered(found, "reason")


def _targets(spark: SparkSession, topics: list[str], settings: ReportSettings) -> DataFrame:
    rows = [
        (topic, slo.target_ms, slo.objective)
        for topic in topics
        for slo in (settings.slo_of(topic),)
    ]
    return spark.createDataFrame(rows, "topic STRING, target_ms LONG, objective DOUBLE")
