"""Figures as CSV: what a spreadsheet and other readers make of them."""

from __future__ import annotations

import csv
import io

import pytest

from tickwheel.reports.job import csv_text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1"])
def test_csv_cells_are_never_formulas(text: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text(["key"], [{"key": text}]), newline=""))
    assert row["key"] == "'" + text


@pytest.mark.parametrize(
    "text", ["a\rb", "a\nb", "a\r\n=1", 'a"b,c;d', " x ", "\u2028", "\x85", "ä💥", "'", "x" * 255]
)
def test_texts_are_read_back_unchanged(text: str) -> None:
    rows = [{"key": text, "n": 1}, {"key": "next", "n": None}]
    written = csv_text(["key", "n"], rows)
    assert list(csv.reader(io.StringIO(written, newline=""))) == [
        ["key", "n"], [text, "1"], ["next", ""],
    ]  # fmt: skip
    # A bare CR ends a row for many readers, unless it is quoted.
    assert "\r" not in written or '"' in written
    assert written.endswith("next,\n")


def test_numbers_have_all_their_digits() -> None:
    values = [1234567.25, 0.9999995, 61_000.0, 1e-9, 2**60, -3]
    text = csv_text(["v"], [{"v": value} for value in values])
    assert [float(line) for line in text.split()[1:]] == values
