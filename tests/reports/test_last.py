"""A report without news is the last one again, without Spark; any change makes another."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from reports.conftest import CHOSEN
from support.story import story, write
from tickwheel.cli.app import app
from tickwheel.reports import ReportSettings, session, state
from tickwheel.reports.state import unchanged_summary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report

LATER = [{**event, "seq": event["seq"] + 100} for event in story().events[:2]]
"""What a report of the story has not seen."""


@pytest.fixture(scope="module")
def kept(whole_story: Report) -> Report:
    return whole_story


@pytest.fixture
def settings(kept: Report, tmp_path: Path) -> ReportSettings:
    """A copy of it and of its history: what a test changes is its own."""
    shutil.copytree(Path(kept.settings.out).parent, tmp_path, dirs_exist_ok=True)
    return ReportSettings((str(tmp_path / "history"),), str(tmp_path / "out"), **CHOSEN)


def test_the_last_report_is_reused_without_changes(kept: Report, settings: ReportSettings) -> None:
    result = unchanged_summary(settings)
    assert result is not None
    answer = kept.summary()
    assert result.topics == answer.topics == kept.rows["by_topic"]
    assert (result.all, result.slo, result.stuck) == (answer.all, answer.slo, answer.stuck)
    assert (result.new_events, result.events) == (0, answer.new_events)
    assert result.page == f"{settings.out}/report.html"


def grow(settings: ReportSettings) -> None:
    write(Path(settings.history[0]), LATER, number=2)


def grow_an_open_one(settings: ReportSettings) -> None:
    write(Path(settings.history[0]), LATER, number=2, sealed=False)


def seal_again(settings: ReportSettings) -> None:
    """A segment of another size under the same name."""
    path = next(Path(settings.history[0]).rglob("*.gz"))
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"\n" * 40, 1))


def load_only(settings: ReportSettings) -> None:
    """As a run does that is killed before its figures: the table is another."""
    folder = Path(settings.table) / "_manifests"
    newest = max(folder.iterdir())
    text = json.loads(newest.read_text()) | {"run": int(newest.stem) + 1}
    (folder / f"{int(newest.stem) + 1:08d}.json").write_text(json.dumps(text))


def lock(settings: ReportSettings) -> None:
    (Path(settings.table) / "_lock").write_text("{}")


def change_a_figure(settings: ReportSettings) -> None:
    with (Path(settings.out) / "csv/by_topic.csv").open("a") as file:
        file.write("\n")


def lose_a_figure(settings: ReportSettings) -> None:
    shutil.rmtree(Path(settings.out) / "metrics/by_day.parquet")


def lose_the_page(settings: ReportSettings) -> None:
    (Path(settings.out) / "report.html").unlink()


def tear(settings: ReportSettings) -> None:
    path = Path(settings.table) / state.REPORT
    path.write_text(path.read_text()[:200])


def lose_the_table(settings: ReportSettings) -> None:
    shutil.rmtree(settings.table)


def write_figures(settings: ReportSettings) -> None:
    """As a run begins to, and is killed in."""
    state.forget_report(settings)


@pytest.mark.parametrize(
    "change",
    [grow, grow_an_open_one, seal_again, load_only, lock, change_a_figure, lose_a_figure,
     lose_the_page, tear, lose_the_table, write_figures],
)  # fmt: skip
def test_any_changed_file_makes_a_new_report(
    settings: ReportSettings, change: Callable[[ReportSettings], None]
) -> None:
    assert unchanged_summary(settings)
    change(settings)
    assert unchanged_summary(settings) is None


@pytest.mark.parametrize(
    "other",
    [
        {"timezone": "UTC"}, {"since_ms": 0}, {"until_ms": 4_000_000_000_000 // 900_000 * 900_000},
        {"topics": ("mail*",)}, {"slos": (("*", 5),)}, {"stuck_after_ms": 1},
        {"open_segments": False}, {"top": 3},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_any_changed_option_makes_a_new_report(
    settings: ReportSettings, other: dict[str, Any]
) -> None:
    from tickwheel.reports import Slo

    if "slos" in other:
        other = {"slos": tuple(Slo(*slo) for slo in other["slos"])}
    assert (
        unchanged_summary(ReportSettings(settings.history, settings.out, **CHOSEN | other)) is None
    )
    # How much is loaded at a time says nothing about the result.
    same = ReportSettings(settings.history, settings.out, **CHOSEN, batch_bytes=99)
    assert unchanged_summary(same)


def test_any_changed_version_makes_a_new_report(
    settings: ReportSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is what the package's files hold: a script of the page counts like a figure."""
    copy = tmp_path / "reports"
    shutil.copytree(Path(state.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(state, "files", lambda name: copy)
    assert unchanged_summary(settings)
    for part in ("assets/report.css", "metrics.py"):
        text = (copy / part).read_text()
        (copy / part).write_text(text.replace(" ", "  ", 1))
        assert unchanged_summary(settings) is None
        (copy / part).write_text(text)
        assert unchanged_summary(settings)


def test_a_failed_run_invalidates_the_last_report(
    settings: ReportSettings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its figures are there, some are those of the report before."""
    from tickwheel.reports import job

    def failing(*arguments: object) -> None:
        raise OSError("no space left on the device")

    def one(*arguments: object) -> tuple[dict[str, job.Figure], list[str]]:
        """Which figures there are decides nothing, and one is soon made."""
        return {"by_topic": job.Figure([{"topic": "t"}], "topic string")}, ["t"]

    assert unchanged_summary(settings)
    monkeypatch.setattr(job, "figures", one)
    monkeypatch.setattr(job, "csv_text", failing)
    with pytest.raises(session.ReportError, match="no space"):
        job.run(spark, settings)
    assert not (Path(settings.table) / state.REPORT).exists()
    assert unchanged_summary(settings) is None


def test_remote_files_are_left_to_spark(settings: ReportSettings) -> None:
    assert (
        unchanged_summary(
            ReportSettings((f"file://{settings.history[0]}",), settings.out, **CHOSEN)
        )
        is None
    )


def test_the_command_answers_without_spark(
    kept: Report, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says the same as with it; a change starts Spark."""
    monkeypatch.setattr(session, "missing_part", lambda: None)

    def refused(*arguments: object, **options: object) -> None:
        raise session.ReportError("Spark was started")

    monkeypatch.setattr(session, "started", refused)
    command = ["report", "--history", settings.history[0], "--out", settings.out, "--timezone",
               "Europe/Berlin", "--slo", "orders.*=100ms@99%"]  # fmt: skip

    def run(*more: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, [*command, *more], standalone_mode=False)
        return int(done.return_value or 0), done.stdout, done.stderr

    code, said, remarks = run()
    assert code == 0
    assert "0 new events, " in said and "orders" in said
    assert "starting Spark" not in remarks
    # The history was loaded from another folder; named beside this one it is not left out.
    (loaded,) = kept.settings.history
    assert f"left out: {loaded} was loaded by the last report" in remarks
    code, said, remarks = run("--history", loaded)
    assert (code, "0 new events, " in said, "left out" in remarks) == (0, True, False)
    assert json.loads(run("--history", loaded, "--json")[1])["left_out"] == []
    answer = json.loads(run("--json")[1])
    assert answer["left_out"] == [loaded]
    assert (answer["new_events"], answer["load_s"], answer["figures_s"]) == (0, 0, 0)
    assert answer["all"]["enqueued"] > 0
    code, _, remarks = run("--top", "3")
    assert (code, "Spark was started" in remarks) == (1, True)
