"""Output: plain columns into a pipe, one object a line with --json."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tickwheel.cli.output import Grid, Output


def test_columns_are_aligned_and_numbers_right_aligned() -> None:
    grid = Grid(("id", "topic"), right=frozenset(("id",)))
    grid.rows.extend([("7", "a"), ("1234", "orders")])
    assert grid.plain() == "  id  topic\n   7  a\n1234  orders"


def test_an_empty_table_prints_its_header() -> None:
    assert Grid(("id", "topic"), title="Tasks").plain() == "Tasks\nid  topic"


@pytest.mark.parametrize("more", ["", "\udcff.db"], ids=["text", "path"])
def test_a_json_record_is_one_line(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    raw, fields = io.BytesIO(), {"id": "1", "body": f"two\nlines, ünïcode{more}"}
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    Output(as_json=True).record(fields)
    out = raw.getvalue().decode()
    assert out.count("\n") == 1 and ("ü" in out) != bool(more)
    assert json.loads(out) == fields


def test_output_survives_a_terminal_that_knows_only_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Output(as_json=True).record({"body": "ü"})
    Output(as_json=False).line("ü")
    assert raw.getvalue() == b'{"body": "\\u00fc"}\n?\n'
