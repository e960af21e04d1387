"""A report's files: every figure as Parquet and CSV, all of them as one page.

A new report replaces the last one's figures; the table below it is none of this module's
business. Figures are computed once, into Parquet, and read back for the rest.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tickwheel.reports.files import Files

AT_ONCE = 3

Rows = list[dict[str, Any]]


def write_figures(
    spark: SparkSession, frames: dict[str, DataFrame], out: str, done: Callable[[str], None]
) -> dict[str, Rows]:
    """Write each as ``metrics/NAME.parquet`` and ``csv/NAME.csv``; their rows by name."""
    files = Files(spark)
    root = out.rstrip("/")

    def write(name: str) -> tuple[str, Rows]:
        place = f"{root}/metrics/{name}.parquet"
        frame = frames[name]
        frame.coalesce(1).write.mode("overwrite").parquet(place)
        found = spark.read.schema(frame.schema).parquet(place)
        rows = [row.asDict() for row in found.collect()]
        files.write(f"{root}/csv/{name}.csv", csv_text(found.columns, rows))
        done(name)
        return name, rows

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(pool.map(write, frames))


def csv_text(columns: list[str], rows: Rows) -> str:
    """With a header; nothing is written for null, as spreadsheets expect."""
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
    """No cell that a spreadsheet would take for a formula. Numbers with all their digits."""
    if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r", "\n"}:
        return "'" + value
    return value
