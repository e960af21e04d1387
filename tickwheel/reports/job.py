"""The report job: load new history into the table, compute all figures, and write them and the
page.

``tickwheel report`` runs it on one machine, spark-submit on a cluster (through submit.py). All
paths are Hadoop paths. Every figure is written as Parquet and CSV, and all figures together as one
page. A new report replaces the figures of the last one. See docs/reports.md.

The job has few Spark plans, because with a small history each plan costs more than its rows: one
plan computes all tables of a figure (:class:`~metrics.Cube`), and the driver computes further
tables from their rows. The figures do not depend on the size of the history.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StructField, StructType

from tickwheel.reports import (
    HOUR_MS,
    ReportError,
    ReportSettings,
    Rows,
    metrics,
    page,
    pattern_regex,
    rollups,
    schema,
    state,
)
from tickwheel.reports.files import SPARK_ERRORS, Files, in_short
from tickwheel.reports.metrics import BUCKET, DAY, HOUR, STEP, Cube
from tickwheel.reports.page import Grain, grain
from tickwheel.reports.session import started
from tickwheel.reports.table import CONCURRENT_JOBS, Loader, Outcome, Progress

if TYPE_CHECKING:
    from pyspark.sql import Row

    from tickwheel.reports.state import Manifest
    from tickwheel.reports.table import Table


@dataclass(frozen=True)
class Report:
    """The result of one run."""

    page: str
    loaded: Outcome
    topics: list[str]
    rows: dict[str, Rows]
    load_s: float
    figures_s: float
    settings: ReportSettings = field(repr=False)

    def summary(self) -> state.Summary:
        """Return the summary, which is printed and saved for the next run."""
        manifest, rows = self.loaded.manifest, self.rows
        return state.Summary(
            page=self.page,
            left_out=self.loaded.left_out,
            new_events=self.loaded.rows,
            events=manifest.rows,
            duplicates=manifest.duplicates,
            synthetic=manifest.synthetic,
            stuck=sum(row["tasks"] for row in rows["stuck_by_group"]),
            stuck_listed=len(rows["stuck"]),
            all=(rows["all"] or [{}])[0],
            topics=rows["by_topic"],
            slo=rows["slo"],
            quarantine=rows["quarantine"],
            load_s=self.load_s,
            figures_s=self.figures_s,
        )


def run(spark: SparkSession, settings: ReportSettings, progress: Progress | None = None) -> Report:
    """Make one report. Raise ReportError for every failure."""
    try:
        return _run(spark, settings, progress or (lambda stage, done, of: None))
    except (*SPARK_ERRORS, OSError) as error:
        raise ReportError(in_short(error)) from error


def _run(spark: SparkSession, settings: ReportSettings, progress: Progress) -> Report:
    loader = Loader(spark, settings, progress)
    # The lock is held to the end. Otherwise another run would delete files from which this run
    # reads its figures, and two runs would mix their figures in one folder.
    with loader.lock() as lock:
        begun_s = time.monotonic()
        loaded = loader.load(lock)
        loaded_s = time.monotonic()
        progress("figures", 0, 1)
        by_name, topics = figures(loader.table, loaded.manifest, settings)
        ready: list[str] = []

        def done(name: str) -> None:
            ready.append(name)
            progress("figures", len(ready), len(by_name))

        lock.refresh()
        state.forget_report(settings)
        write_figures(spark, by_name, settings.out, done)
        rows = {name: figure.rows for name, figure in by_name.items()}
        page_path = state.page_path(settings)
        text = page.render(rows, topics, loaded.manifest, settings)
        Files(spark).write(page_path, text)
        figures_s = time.monotonic() - loaded_s
        report = Report(page_path, loaded, topics, rows, loaded_s - begun_s, figures_s, settings)
        state.save_report(settings, loaded.manifest.run, report.summary())
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a report under spark-submit, with the options of ``tickwheel report``."""
    try:
        settings, master = parse(arguments)
        with started(master) as spark:
            report = run(spark, settings)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)  # noqa: T201  # a program's own output
        return 1
    manifest = report.loaded.manifest
    for folder in report.loaded.left_out:
        print(f"report: {state.left_out_remark(folder)}", file=sys.stderr)  # noqa: T201
    print(  # noqa: T201
        f"report: {report.loaded.rows} new rows, {manifest.rows} in all, "
        f"load {report.load_s:.1f} s, figures {report.figures_s:.1f} s: {report.page}"
    )
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[ReportSettings, str | None]:
    """Parse a command line. Return the settings and the master."""
    parser = argparse.ArgumentParser(prog="submit.py", description=__doc__)
    parser.add_argument("--history", required=True, action="append", help="repeatable")
    parser.add_argument("--out", required=True)
    parser.add_argument("--since", help="ISO-8601, or a date")
    parser.add_argument("--until", help="ISO-8601, or a date")
    parser.add_argument("--topic", action="append", default=[])
    parser.add_argument("--timezone", default="UTC")
    parser.add_argument("--slo", action="append", default=[], metavar="TOPIC=TARGET@SHARE%%")
    parser.add_argument("--stuck-after-s", type=float, default=HOUR_MS / 1000)
    parser.add_argument("--sealed-only", action="store_true")
    parser.add_argument("--batch-mb", type=int, default=256)
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--master", help="default: spark-submit's master")
    options = vars(parser.parse_args(arguments))
    return ReportSettings.of(options, round(options["stuck_after_s"] * 1000)), options["master"]


def write_figures(
    spark: SparkSession, by_name: dict[str, Figure], out: str, done: Callable[[str], None]
) -> None:
    """Write each figure as ``metrics/NAME.parquet`` and ``csv/NAME.csv``."""
    files = Files(spark)
    root = out.rstrip("/")

    def write(name: str) -> None:
        figure = by_name[name]
        rows = [tuple(row.values()) for row in figure.rows]
        # Rows come from Spark, or have the types in the figure's shape.
        frame = spark.createDataFrame(rows, figure.shape, verifySchema=False)
        frame.coalesce(1).write.mode("overwrite").parquet(f"{root}/metrics/{name}.parquet")
        files.write(f"{root}/csv/{name}.csv", csv_text(frame.columns, figure.rows))
        done(name)

    with ThreadPoolExecutor(CONCURRENT_JOBS) as pool:
        list(pool.map(write, by_name))


def csv_text(columns: list[str], rows: Rows) -> str:
    """Return the rows as CSV with a header. Null becomes an empty cell, as spreadsheets expect."""
    return "".join(
        [
            _line(columns),
            *(_line(["" if row[c] is None else _cell(row[c]) for c in columns]) for row in rows),
        ]
    )


def _line(cells: list[Any]) -> str:
    # The csv module quotes cells that contain characters of its line terminator. A CR in a key must
    # be quoted, because many readers treat it as the end of the row.
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue()[:-2] + "\n"


def _cell(value: Any) -> Any:
    """Return a cell that spreadsheets do not treat as a formula."""
    if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r", "\n"}:
        return "'" + value
    return value


# --- the figures ---------------------------------------------------------------------------------

KEYS = ("topic", "group")
STUCK_LISTED_MAX = 10_000
"""Maximum number of tasks in the table ``stuck``; ``stuck_by_group`` counts all."""
STEP_TABLES = {"by_step": "by_hour", "all_by_step": "all_by_hour", "backlog_by_step": "backlog"}
"""Table by the step of the charts → table with the same columns. The tables are empty if the charts
are by hour or day."""


@dataclass(frozen=True)
class Figure:
    """One table: its rows in order, and the schema of its columns."""

    rows: Rows
    shape: StructType | str


Order = Callable[[dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class Plan:
    """A Spark plan, and the function that builds tables from its rows."""

    frame: DataFrame
    tables: Callable[[list[Row]], Mapping[str, Figure]]


def figures(
    table: Table, manifest: Manifest, settings: ReportSettings
) -> tuple[dict[str, Figure], list[str]]:
    """Return the figures of the report from the table at ``manifest``, and the report's topics."""
    buckets = grain(manifest, settings)
    facts = in_span(_facts(table, manifest, buckets), settings).persist()
    try:
        plans = [
            *_of_facts(facts, buckets, settings),
            *_of_rollups(table, manifest, settings),
            *_of_tasks(table, manifest, buckets, settings),
        ]
        with ThreadPoolExecutor(CONCURRENT_JOBS) as pool:
            results = [pool.submit(plan.frame.collect) for plan in plans]
            tables: dict[str, Figure] = {}
            for plan, rows in zip(plans, results, strict=True):
                tables |= plan.tables(rows.result())
    finally:
        facts.unpersist()
    tables |= {name: tables.get(name) or Figure([], tables[like].shape)
               for name, like in STEP_TABLES.items()}  # fmt: skip
    tables |= compared(tables["by_day"].rows, tables["by_hour"].rows, settings)
    if not tables["all"].rows:
        tables["all"] = Figure([_empty_figures(tables["all"])], tables["all"].shape)
    for name in ("by_topic", "all"):
        tables[name] = with_undelivered(tables[name], tables["stuck_by_group"].rows)
    counts = tables.pop("counts").rows
    topics = {row["topic"] for row in counts} - {schema.NO_TOPIC}
    chosen = sorted(filter(settings.wants, topics))
    tables["totals"] = totals(counts, {*chosen, schema.NO_TOPIC})
    tables["daemon"] = daemon(counts)
    tables["transactions"] = transactions(counts)
    return tables, chosen


def _facts(table: Table, manifest: Manifest, buckets: Grain) -> DataFrame:
    """Return the stored facts or, for charts with shorter buckets, facts counted from the
    events."""
    if buckets.is_fine:
        return rollups.facts(table.events(manifest), buckets.step_ms)
    return table.rollup("facts", manifest)


def _of_facts(facts: DataFrame, buckets: Grain, settings: ReportSettings) -> list[Plan]:
    counted = metrics.with_targets(
        of_topics(facts.filter(facts.topic != schema.NO_TOPIC), settings), settings.slos
    )
    every: dict[str, tuple[str, ...]] = {
        "by_hour": (HOUR, *KEYS), "by_day": (DAY, *KEYS), "by_topic": KEYS,
        "all_by_hour": (HOUR,), "all_by_day": (DAY,), "all": (),
    }  # fmt: skip
    if buckets.name == "step":
        every |= {"by_step": (STEP, *KEYS), "all_by_step": (STEP,)}
    cube = Cube(every, settings.timezone, buckets.step_ms)
    attempts = over_time("attempts", settings)
    unclean = (facts.attempt == -1).alias("unclean")
    weighted = F.col("n") * F.col("value_ms")
    counts = facts.groupBy("topic", "event", unclean).agg(
        F.sum("n").alias("n"),
        # These sums, which are cheap, are needed only for transactions.
        F.sum(F.col("n") * F.col("attempt")).alias("tasks"),
        F.sum(weighted).alias("took_sum_ms"),
        F.max("value_ms").alias("took_max_ms"),
    )
    return [
        cubed(cube, metrics.service(counted, cube)),
        cubed(attempts, metrics.attempts(counted, attempts), "attempt"),
        alone("counts", counts),
    ]


def _of_rollups(table: Table, manifest: Manifest, settings: ReportSettings) -> list[Plan]:
    def rollup(name: str) -> DataFrame:
        return of_topics(in_span(table.rollup(name, manifest), settings), settings)

    reasons, peaks = over_time("reasons", settings), over_time("peaks", settings)
    recurred = Cube({"schedules": (), "schedules_by_day": (DAY,)}, settings.timezone)
    parties = rollup("parties")
    return [
        cubed(reasons, metrics.reasons(rollup("reasons"), reasons, settings.top), "event",
              "reason", first=lambda row: (row["event"], -row["n"])),
        cubed(peaks, metrics.peaks(rollup("rates"), peaks), "event"),
        alone("slowest_keys", metrics.slowest_keys(rollup("slow"), settings.top)),
        alone("producers", metrics.producers(parties, rollup("origins"), settings.top)),
        alone("subscribers", metrics.subscribers(parties, settings.top)),
        cubed(recurred, metrics.schedules(rollup("occurrences"), recurred), "schedule", "topic"),
        alone("quarantine", quarantine(table.quarantine(manifest))),
    ]  # fmt: skip


def _of_tasks(
    table: Table, manifest: Manifest, buckets: Grain, settings: ReportSettings
) -> list[Plan]:
    """Return the plans for backlogs, stuck tasks and slow tasks."""
    unfinished = of_topics(table.open_journeys(manifest), settings)
    known_ms = manifest.last_ms or 0
    horizon_ms = known_ms if settings.until_ms is None else min(known_ms, settings.until_ms)
    waits = of_topics(table.rollup("waits", manifest), settings)
    slow = of_topics(in_span(table.rollup("slow", manifest), settings), settings)
    span = settings.since_ms, settings.until_ms
    step_waits = waits.unionByName(rollups.waits(unfinished, known_ms))
    hourly = metrics.backlog(step_waits, settings.timezone, *span)
    if buckets.is_fine:
        ended = of_topics(table.closed_journeys(manifest.journeys), settings)
        slow = in_span(ended.withColumn("quarter_ms", F.col("acked_ms")), settings)
        step_waits = rollups.waits(ended, None, buckets.step_ms).unionByName(
            rollups.waits(unfinished, known_ms, buckets.step_ms)
        )
    plans = []
    if buckets.name == "step":
        backlog = metrics.backlog(step_waits, settings.timezone, *span, buckets.step_ms)
        plans.append(alone("backlog_by_step", backlog))
    stuck = metrics.stuck(unfinished, horizon_ms, settings.stuck_after_ms)

    def split(rows: DataFrame) -> DataFrame:
        return metrics.bucketed(rows, f"{buckets.name}_ms", settings.timezone, buckets.step_ms)

    return [
        *plans,
        alone("backlog", hourly),
        alone("stuck", stuck.limit(STUCK_LISTED_MAX)),
        alone("stuck_by_group", metrics.stuck_by_group(stuck, settings.since_ms)),
        alone("examples", metrics.examples(slow, split)),
    ]


def over_time(name: str, settings: ReportSettings) -> Cube:
    """Return a cube by topic and group, in total, by hour and by day."""
    return Cube(
        {name: KEYS, f"{name}_by_hour": (HOUR, *KEYS), f"{name}_by_day": (DAY, *KEYS)},
        settings.timezone,
    )


def alone(name: str, frame: DataFrame) -> Plan:
    """Return a plan of one table."""
    return Plan(frame, lambda rows: {name: Figure([row.asDict() for row in rows], frame.schema)})


def cubed(cube: Cube, frame: DataFrame, *more: str, first: Order | None = None) -> Plan:
    """Return a plan of several tables. They are sorted by ``first`` if given, then by keys and
    ``more``."""
    columns = {name: cube.columns(name, frame.columns) for name in cube.tables}
    levels = cube.levels(more)

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        keys = tuple(row[name] for name in (*BUCKET[:1], *cube.keys, *more) if name in row)
        begins = tuple(row[name] for name in (*BUCKET[:1], *KEYS) if name in row)
        return keys if first is None else (*begins, *first(row), *keys)

    def tables(cells: list[Row]) -> dict[str, Figure]:
        by_table: dict[str, Rows] = {name: [] for name in cube.tables}
        for row in cells:
            name = levels[row.level]
            by_table[name].append({column: row[column] for column in columns[name]})
        return {
            name: Figure(sorted(rows, key=order), frame.select(*columns[name]).schema)
            for name, rows in by_table.items()
        }

    return Plan(frame, tables)


def compared(by_day: Rows, by_hour: Rows, settings: ReportSettings) -> dict[str, Figure]:
    """Return the comparisons with the objectives and with the previous days."""

    def objective(topic: str) -> float:
        return settings.slo_of(topic).objective

    return {
        "slo": Figure(metrics.slo(by_day, by_hour, objective), metrics.SLO),
        "slo_breaches": Figure(metrics.breaches(by_day, objective), metrics.BREACHES),
        "day_against_day": Figure(metrics.day_against_day(by_day), metrics.DAY_AGAINST_DAY),
    }


def in_span(rows: DataFrame, settings: ReportSettings) -> DataFrame:
    """Return the rows from ``since`` up to but excluding ``until``."""
    if settings.since_ms is not None:
        rows = rows.filter(rows.quarter_ms >= settings.since_ms)
    if settings.until_ms is not None:
        rows = rows.filter(rows.quarter_ms < settings.until_ms)
    return rows


def of_topics(rows: DataFrame, settings: ReportSettings) -> DataFrame:
    """Return the rows of the requested topics."""
    if not settings.topics:
        return rows
    patterns = map(pattern_regex, settings.topics)
    return rows.filter(rows.topic.rlike("^(?:" + "|".join(patterns) + ")$"))


def with_undelivered(service: Figure, stuck: Rows) -> Figure:
    """Add ``undelivered``, the number of tasks that came due in the report's span and were never
    delivered, and ``kept_share``, the share of all tasks due so far that were delivered on time."""
    shape: Any = service.shape
    wider = StructType([*shape.fields, StructField("undelivered", LongType()),
                        StructField("kept_share", DoubleType())])  # fmt: skip
    rows = []
    for row in service.rows:
        stuck_tasks = (tasks for tasks in stuck if row.get("topic") in {None, tasks["topic"]})
        lost = sum(tasks["lately"] for tasks in stuck_tasks if tasks["state"] == metrics.NEVER)
        # No group received these tasks, so they count for the topic.
        due = row["first_deliveries"] + lost
        share = row["on_time"] / due if due else None
        rows.append({**row, "undelivered": lost, "kept_share": share})
    return Figure(rows, wider)


def totals(counts: Rows, topics: set[str]) -> Figure:
    """Return the number of events of each kind."""
    chosen = ((row["event"], row["n"]) for row in counts if row["topic"] in topics)
    return Figure(_summed("event", chosen), "event STRING, n LONG")


def daemon(counts: Rows) -> Figure:
    """Return the numbers of the daemon's starts, starts after a crash, stops, and dropped
    events."""
    events = (
        ("started after a crash" if row["unclean"] else row["event"], row["n"])
        for row in counts
        if row["event"] in {"started", "stopped", "dropped"}
    )
    return Figure(_summed("what", events), "what STRING, n LONG")


def transactions(counts: Rows) -> Figure:
    """Return transactions by outcome: their number, their tasks, and their ages from the first
    task. If there were any transactions, every outcome has a row."""
    by_event = {row["event"]: row for row in counts if row["event"] in schema.TRANSACTION_EVENTS}
    rows = []
    for event in schema.TRANSACTION_EVENTS if by_event else ():
        row = by_event.get(event, {"n": 0, "tasks": 0, "took_sum_ms": None, "took_max_ms": None})
        total_ms = row["took_sum_ms"]
        mean_ms = None if total_ms is None else total_ms / row["n"]
        rows.append({
            "what": event.removeprefix("transaction_"), "n": row["n"], "tasks": row["tasks"],
            "age_mean_ms": mean_ms, "age_max_ms": row["took_max_ms"],
        })  # fmt: skip
    return Figure(rows, TRANSACTIONS)


TRANSACTIONS = "what STRING, n LONG, tasks LONG, age_mean_ms DOUBLE, age_max_ms LONG"


def quarantine(lines: DataFrame) -> DataFrame:
    """Return invalid lines by reason, with an example of each."""
    by_reason = lines.groupBy("reason").agg(
        F.count(F.lit(1)).alias("lines"),
        F.sum("bytes").alias("bytes"),
        F.min("segment").alias("segment"),
        F.min_by("line", "segment").alias("example"),
    )
    return metrics.ordered(by_reason, "reason")


def _summed(column: str, counts: Iterable[tuple[str, int]]) -> Rows:
    same = groupby(sorted(counts), lambda pair: pair[0])
    return [{column: name, "n": sum(n for _, n in pairs)} for name, pairs in same]


def _empty_figures(service: Figure) -> dict[str, Any]:
    """Return the figures of a history without events: counts are 0, measured values are null."""
    counts = {*schema.TASK_EVENTS, "redelivered", "first_deliveries", "on_time", "held_up"}
    shape: Any = service.shape
    return {name: 0 if name in counts else None for name in shape.names}
