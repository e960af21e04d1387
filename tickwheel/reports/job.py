"""The whole job: bring the table up to date, compute the figures, write them and the page.

``tickwheel report`` runs it on one machine, spark-submit on a cluster (through submit.py). Paths
are Hadoop's throughout. Every figure is written as Parquet and CSV, all of them as one page. A
new report replaces the last one's figures. See docs/reports.md.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from tickwheel.reports import page, state
from tickwheel.reports.figures import AT_ONCE, Figure, figures
from tickwheel.reports.files import FAILED, Files, in_short
from tickwheel.reports.session import started
from tickwheel.reports.settings import HOUR_MS, ReportError, ReportSettings, Rows
from tickwheel.reports.table import Loader, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Progress = Callable[[str, int, int], None]
"""``progress(stage, done, of)``; stages are "loading" (bytes) and "figures"."""


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
        """The summary that is shown, and kept for the next run."""
        manifest, rows = self.loaded.manifest, self.rows
        return state.Summary(
            page=self.page,
            new_events=self.loaded.rows,
            events=manifest.rows,
            duplicates=manifest.duplicates,
            synthetic=manifest.synthetic,
            stuck=len(rows["stuck"]),
            all=(rows["all"] or [{}])[0],
            topics=rows["by_topic"],
            slo=rows["slo"],
            quarantine=rows["quarantine"],
            load_s=self.load_s,
            figures_s=self.figures_s,
        )


def run(spark: SparkSession, settings: ReportSettings, progress: Progress | None = None) -> Report:
    """Make one report. Raises ReportError for whatever keeps it from being made."""
    try:
        return _run(spark, settings, progress or (lambda stage, done, of: None))
    except (*FAILED, OSError) as error:
        raise ReportError(in_short(error)) from error


def _run(spark: SparkSession, settings: ReportSettings, progress: Progress) -> Report:
    loader = Loader(spark, settings, progress)
    # Held to the end: the next run sweeps away what only this one's figures are read from, and
    # two that write figures into one folder would mix them.
    with loader.lock() as lock:
        begun_s = time.monotonic()
        loaded = loader.load_within(lock)
        loaded_s = time.monotonic()
        progress("figures", 0, 1)
        found, topics = figures(loader.table, loaded.manifest, settings)
        ready: list[str] = []

        def done(name: str) -> None:
            ready.append(name)
            progress("figures", len(ready), len(found))

        lock.refresh()
        state.forget_last(settings)
        write_figures(spark, found, settings.out, done)
        rows = {name: figure.rows for name, figure in found.items()}
        place = state.page_path(settings)
        text = page.render(rows, topics, loaded.manifest, settings)
        Files(spark).write(place, text)
        figures_s = time.monotonic() - loaded_s
        made = Report(place, loaded, topics, rows, loaded_s - begun_s, figures_s, settings)
        state.keep_last(settings, loaded.manifest.run, made.summary())
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """For spark-submit; the same options as ``tickwheel report``."""
    try:
        settings, master = parse(arguments)
        with started(master) as spark:
            report = run(spark, settings)
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)  # noqa: T201  # a program's own output
        return 1
    manifest = report.loaded.manifest
    print(  # noqa: T201
        f"report: {report.loaded.rows} new rows, {manifest.rows} in all, "
        f"load {report.load_s:.1f} s, figures {report.figures_s:.1f} s: {report.page}"
    )
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[ReportSettings, str | None]:
    """Settings and master from a command line."""
    parser = argparse.ArgumentParser(prog="submit.py", description=__doc__)
    parser.add_argument("--history", required=True)
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
    parser.add_argument("--master", help="default: what spark-submit says")
    given = vars(parser.parse_args(arguments))
    return ReportSettings.of(given, int(given["stuck_after_s"] * 1000)), given["master"]


def write_figures(
    spark: SparkSession, found: dict[str, Figure], out: str, done: Callable[[str], None]
) -> None:
    """Write each figure as ``metrics/NAME.parquet`` and ``csv/NAME.csv``."""
    files = Files(spark)
    root = out.rstrip("/")

    def write(name: str) -> None:
        figure = found[name]
        rows = [tuple(row.values()) for row in figure.rows]
        # Its rows come from Spark, or have the types that are named beside them.
        frame = spark.createDataFrame(rows, figure.shape, verifySchema=False)
        frame.coalesce(1).write.mode("overwrite").parquet(f"{root}/metrics/{name}.parquet")
        files.write(f"{root}/csv/{name}.csv", csv_text(frame.columns, figure.rows))
        done(name)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(write, found))


def csv_text(columns: list[str], rows: Rows) -> str:
    """The rows as CSV with a header; null is empty, as spreadsheets expect."""
    return "".join(
        [
            _line(columns),
            *(_line(["" if row[c] is None else _cell(row[c]) for c in columns]) for row in rows),
        ]
    )


def _line(cells: list[Any]) -> str:
    # The writer quotes what its own end of a line consists of. A bare CR in a key must be quoted,
    # too: many readers take it for the end of the row, and what follows for a cell of its own.
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue()[:-2] + "\n"


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula, with all digits of a number."""
    if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r", "\n"}:
        return "'" + value
    return value
