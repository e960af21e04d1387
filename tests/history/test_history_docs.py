"""``docs/history.md`` says what the code does: fields, events, kinds, settings, one-liners."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from support.history_rig import delivered, make_id, write
from tickwheel.cli.app import app
from tickwheel.history import spool, writer
from tickwheel.history.lines import EVENTS, FIELDS

TEXT = (Path(__file__).parents[2] / "docs" / "history.md").read_text()
PROGRAMS = re.findall(r"```python\n# (\w+)\n(.*?)```", TEXT, re.DOTALL)


def first_column(head: str) -> list[str]:
    """Of the table that begins with this line."""
    table = TEXT.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    return [line.split("|")[1].strip().strip("`") for line in table.splitlines()[2:]]


def test_the_document_lists_fields_and_events_in_order() -> None:
    assert first_column("field | type | what") == list(FIELDS)
    assert sorted(first_column("event | what has happened")) == sorted(EVENTS)


def test_defaults_are_those_of_the_code() -> None:
    assert writer.SEGMENT_BYTES == 64 << 20 and "`history_segment_bytes` | 64 MiB" in TEXT
    assert spool.BYTES_MAX == 256 << 20 and "`history_spool_bytes_max` | 256 MiB" in TEXT
    assert writer.RETENTION_S == 72 * 3600 and "`history_retention_s` | 72 h" in TEXT
    assert writer.CLEAN_HOUR == 4 and "`history_clean_hour` | 4" in TEXT


def test_the_commands_exist_with_their_options() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("tickwheel ")]
    shown = [shlex.split(line, comments=True)[1:] for line in lines]
    assert len(shown) >= 8
    for words in shown:
        command: Any = get_command(app).commands[words[0]]  # type: ignore[attr-defined]  # a group
        command = getattr(command, "commands", {}).get("list", command)
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize(("name", "program"), PROGRAMS)
def test_the_documented_one_liners_run(name: str, program: str, tmp_path: Path) -> None:
    ast.parse(program)
    library = {"pandas": "pandas", "DuckDB": "duckdb", "Spark": "pyspark"}[name]
    if name == "Spark" or importlib.util.find_spec(library) is None:
        return  # Spark takes half a minute to start; the tests of the reports read with it
    write(tmp_path, [[delivered([make_id(1)])]])
    namespace: dict[str, Any] = {}
    *body, last = ast.parse(program.replace("DIR", str(tmp_path))).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(body, []), name, "exec"), namespace)  # noqa: S102  # the documents own
    shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)  # noqa: S307
    assert "t" in str(shown) and "2" in str(shown)


def test_each_library_has_a_one_liner() -> None:
    assert [name for name, _ in PROGRAMS] == ["pandas", "DuckDB", "Spark"]
