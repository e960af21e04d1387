"""What a report says of transactions: how many, of how many tasks, how old at their ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from support.story import Book, write
from tickwheel.reports import ReportSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def said(book: Book, at: str, what: str, name: str, tasks: int, age_ms: int | None = None) -> None:
    age = {} if age_ms is None else {"ack_ms": age_ms}
    book.add(at, f"transaction_{what}", transaction=name, count=tasks, **age)


def test_what_became_of_transactions(spark: SparkSession, tmp_path: Path) -> None:
    from tickwheel.reports.job import run

    book = Book()
    book.task(1, "mails", "10:00:00", "10:01:00")
    for name, tasks in (("a", 2), ("a", 3), ("b", 10), ("c", 1)):
        said(book, "10:00:00", "prepared", name, tasks)
    said(book, "10:00:01", "committed", "a", 5, 1_000)
    said(book, "10:00:04", "committed", "d", 7, 4_000)
    said(book, "10:59:00", "rolled_back", "b", 10, 59)
    said(book, "10:01:00", "checked", "c", 1)
    said(book, "10:02:00", "checked", "c", 1)
    # What no daemon says is bounded, and not trusted.
    book.add("10:03:00", "transaction_checked", transaction="x")
    write(tmp_path / "history", book.events)
    made = run(spark, ReportSettings(str(tmp_path / "history"), str(tmp_path / "out")))
    rows = {row.pop("what"): row for row in map(dict, made.rows["transactions"])}
    none = {"age_mean_ms": None, "age_max_ms": None}
    assert rows == {
        "prepared": {"n": 4, "tasks": 16} | none,
        "committed": {"n": 2, "tasks": 12, "age_mean_ms": 2_500.0, "age_max_ms": 4_000},
        "rolled_back": {"n": 1, "tasks": 10, "age_mean_ms": 59.0, "age_max_ms": 59},
        "checked": {"n": 3, "tasks": 2} | none,
        "parked": {"n": 0, "tasks": 0} | none,
    }
    assert "<h2>Transactions</h2>" in Path(made.page).read_text()


def test_without_any_there_is_no_table(spark: SparkSession, tmp_path: Path) -> None:
    from tickwheel.reports.job import run

    book = Book()
    book.task(1, "mails", "10:00:00", "10:01:00")
    write(tmp_path / "history", book.events)
    made = run(spark, ReportSettings(str(tmp_path / "history"), str(tmp_path / "out")))
    assert made.rows["transactions"] == []
    assert "<h2>Transactions</h2>" not in Path(made.page).read_text()
