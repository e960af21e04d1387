"""``docs/reports.md`` says what the job does: commands, options, tables, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.main import get_command

from tickwheel.cli.app import app
from tickwheel.reports import job

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = {"history", "report"}
TEXT = (DOCS / "reports.md").read_text()


def fenced(language: str) -> list[str]:
    matches = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [text for said, text in matches if said == language]


def first_column(head: str) -> list[str]:
    """Names in backticks of the first column of the table that begins with this heading."""
    table = TEXT.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_reports_examples_run(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """In a folder of their own; then the tables name exactly the files that are there.

    The tests' Spark was started elsewhere, so the folders are given to it with their full path.
    """
    lines = [line for block in fenced("bash") for line in block.splitlines()]
    assert len(lines) == 2
    for line in lines:
        name, first, *words = shlex.split(line, comments=True)
        assert name == "tickwheel"
        code, said, _ = command(first, *(f"{tmp_path}/{w}" if w in FOLDERS else w for w in words))
        assert code == 0, (line, said)
    page = (tmp_path / "report/report.html").read_text()
    assert "2026-11-20 06:00 to 2026-11-20 17:59, Europe/Berlin, 1 topic" in page
    named = first_column("table, `csv/NAME.csv`, `metrics/NAME.parquet`")
    made = {path.stem for path in (tmp_path / "report/csv").glob("*.csv")}
    assert set(named) == made == {p.stem for p in (tmp_path / "report/metrics").glob("*.parquet")}


def test_options_and_their_defaults_are_those_of_the_command() -> None:
    command: Any = get_command(app).commands["report"]  # type: ignore[attr-defined]  # a group
    there = {name: option for option in command.params for name in option.opts}
    assert set(first_column("option | default | what")) >= there.keys() - {"--help"}
    rows = re.findall(r"^\| `(--[\w-]+)` \| `?([\w\[\]*]+)`? \|", TEXT, re.MULTILINE)
    assert len(rows) >= 6
    for name, default in rows:
        shown = {"None": "all"}.get(str(there[name].default), str(there[name].default))
        assert name == "--slo" or shown == default, name


def test_the_documented_spark_submit_options_are_valid() -> None:
    shown = [line for block in fenced("") for line in re.split(r"(?<!\\)\n", block)]
    submitted = [
        shlex.split(line.replace("\\\n", "")) for line in shown if line.startswith("spark-submit")
    ]
    assert len(submitted) == 3
    for words in submitted:
        at = words.index("job/tickwheel/reports/submit.py")
        settings, master = job.parse(words[at + 1 :])
        assert master is None
        assert settings.history[0].startswith(("hdfs://", "s3a://", "/shared/"))
        batch_mb = 1024 if settings.history[0].startswith("/shared/") else 4096
        assert settings.batch_bytes == batch_mb << 20


def test_links_of_the_reports_page_resolve() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in t]
    assert len(targets) >= 3
    assert [target for target in targets if not (DOCS / target).exists()] == []
