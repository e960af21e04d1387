"""The table of limits in ``docs/limits.md`` is whole and true: settings, defaults, tests."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tickwheel.server.settings import Settings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "limits.md").read_text()
NO_CONTAINERS = {"retry_max", "delay_max_s", "lease_max_s"}
"""Limits of a number, which nothing grows with."""


def rows() -> list[list[str]]:
    """Cells of both tables."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "what"]


SETTINGS = {row[1].strip("`"): row for row in rows() if "." not in row[1]}
CONSTANTS = {row[1].strip("`"): row for row in rows() if "." in row[1]}


def shown(name: str, value: int) -> str:
    """A default as the table has it."""
    if "bytes" in name.lower():
        for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return str(value)


def test_the_table_lists_every_limit() -> None:
    names = {name for name in Settings.model_fields if re.search(r"_max$|_bytes_soft$", name)}
    assert names - NO_CONTAINERS == SETTINGS.keys()


def test_the_tables_defaults_are_current() -> None:
    for name, row in SETTINGS.items():
        value = Settings.model_fields[name].default
        if value is not None:
            assert row[2] == shown(name, value), name
    for path, row in CONSTANTS.items():
        module, _, name = path.rpartition(".")
        assert row[2] == shown(name, getattr(importlib.import_module(module), name)), path


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1].strip("`").rpartition(".")[2])
def test_the_tables_tests_exist(row: list[str]) -> None:
    assert row[3], "what happens when it is reached?"
    named = re.findall(r"`(test_\w+)`", row[4])
    assert named
    for test in named:
        files = [f for f in (ROOT / "tests").rglob("test_*.py") if f"def {test}(" in f.read_text()]
        assert files, test


def test_most_limit_tests_are_in_the_table() -> None:
    """Who adds a test there says in the table what it is about."""
    text = (ROOT / "tests/server/test_bounds.py").read_text()
    named = "\n".join(row[4] for row in rows())
    tests = re.findall(r"^async def (test_\w+)", text, re.MULTILINE)
    others = [test for test in tests if f"`{test}`" not in named]
    assert len(others) < len(tests) / 2
