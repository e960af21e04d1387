"""The job as programs: killed half way, by the command line, by spark-submit."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import tickwheel
from benchmarks import reports as benchmark
from reports.conftest import QUICK, QUICK_JAVA
from support.stand_in import stand_in
from support.story import story, write
from tickwheel.cli.app import app
from tickwheel.cli.history import report_grid
from tickwheel.reports import ReportSettings
from tickwheel.reports.session import LITTLE_BYTES, LITTLE_ROWS, little_to_do
from tickwheel.reports.state import Loaded, Manifest, newest_manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report
    from tickwheel.reports.table import Outcome

START_S = 120.0
LOADING = """
import sys
from tickwheel.reports import ReportSettings
from tickwheel.reports.job import run
from tickwheel.reports.session import started
with started("local[2]", quiet=True) as spark:
    run(spark, ReportSettings((sys.argv[1],), sys.argv[2]))
"""


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, str]:
    """An environment in which a Spark of its own is as quick as the tests' session."""
    conf = tmp_path / "conf"
    conf.mkdir()
    text = "".join(f"{name} {value}\n" for name, value in QUICK.items())
    (conf / "spark-defaults.conf").write_text(text)
    return {**os.environ, "SPARK_CONF_DIR": str(conf), "JDK_JAVA_OPTIONS": QUICK_JAVA}


@pytest.mark.slow  # test_load.py: what such a run has left
def test_a_killed_run_has_no_effect(
    spark: SparkSession, quick: dict[str, str], history: Path, tmp_path: Path,
    load: Callable[..., Outcome]
) -> None:  # fmt: skip
    """SIGKILL while the second run is writing; then the same run again."""
    from tickwheel.reports.files import Files
    from tickwheel.reports.table import Table

    events = story().events
    write(history, events[:12], number=1)
    first = load()
    write(history, events[12:], number=2)
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, str(history), str(tmp_path / "out")],
        env=quick, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    root = tmp_path / "out/table"
    deadline_s = time.monotonic() + START_S
    try:
        while not (root / "events/run=2").exists():
            assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
            assert time.monotonic() < deadline_s
            time.sleep(0.005)  # real time: another process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    killed = newest_manifest(Files(spark), str(root))
    assert killed == first.manifest
    assert (root / "_lock").exists()
    answer = load()
    table = Table(spark, Files(spark), str(root))
    assert 0 < killed.rows < answer.manifest.rows == len(events)
    assert table.events(answer.manifest).count() == len(events)
    counted = table.rollup("facts", answer.manifest).selectExpr("sum(n)").first()
    # The event "dropped" counts for the seven that it stands for.
    assert counted is not None
    assert counted[0] == len(events) + 6
    assert not (root / "_lock").exists()


def test_a_report_needs_a_history_but_no_events(
    command: Callable[..., tuple[int, str, str]], history: Path, tmp_path: Path
) -> None:
    place = ["--history", str(history), "--out", str(tmp_path / "out")]
    code, said, remarks = command("report", *place)
    assert (code, said) == (1, "")
    assert f"report_failed: {history}: the folder has no history" in remarks.splitlines()[-1]
    assert not (tmp_path / "out/report.html").exists()
    [path] = write(history, story().events[:1])
    path.write_bytes(gzip.compress(b""))
    code, said, remarks = command("report", *place)
    assert code == 0
    assert "0 new events, 0 in all" in said
    assert "loading history" in remarks
    page = (tmp_path / "out/report.html").read_text()
    assert "no events in the requested time" in page


@pytest.mark.slow
def test_the_command_reports_a_part_of_a_history(
    command: Callable[..., tuple[int, str, str]], history: Path, tmp_path: Path
) -> None:
    place = ["--history", str(history), "--out", str(tmp_path / "out")]
    write(history, story().events)
    code, said, _ = command(
        "report", *place, "--json", "--since", "2026-11-20T10:30", "--until", "2026-11-20T11:00",
        "--topic", "orders.*", "--stuck-after", "30m",
    )  # fmt: skip
    assert code == 0
    answer = json.loads(said)
    assert answer["new_events"] == len(story().events)
    assert answer["all"]["enqueued"] == 0
    assert (answer["all"]["delivered"], answer["all"]["acked"]) == (5, 4)
    assert [row["group"] for row in answer["topics"]] == ["audit", "billing"]
    assert answer["stuck"] == 0
    assert answer["synthetic"] is False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--since", "soon"], "ISO-8601"),
        (["--since", "2026-11-20T10:07"], "quarter"),
        (["--timezone", "Mars/Olympus"], "time zone"),
        (["--slo", "nonsense"], "not an SLO"),
        (["--slo", f"*={'9' * 5_000}ms"], "not an SLO"),
        (["--since", "2026-11-21", "--until", "2026-11-20"], "before"),
        (["--out", "report [new]"], "name a folder without"),
        (["--history", "/data/{a,b}"], "name a folder without"),
        # Spark finds these out.
        (["--history", "/nowhere"], "history_dir"),
        (["--history", "foo://bucket/history"], 'No FileSystem for scheme "foo"'),
        (["--history", "1:2"], "Relative path in absolute URI"),
        (["--out", "/dev/null/report"], "/dev/null"),
    ],
)
def test_invalid_options_are_one_line_errors(
    command: Callable[..., tuple[int, str, str]], history: Path, tmp_path: Path,
    arguments: list[str], reason: str
) -> None:  # fmt: skip
    write(history, story().events[:1])
    place = ["--history", str(history), "--out", str(tmp_path / "out")]
    code, _, remarks = command("report", *place, *arguments)
    assert code == 1
    *stages, said = remarks.splitlines()
    assert reason in said
    assert all(stage in remarks_of_stages() for stage in stages)
    assert "\tat " not in remarks


def remarks_of_stages() -> set[str]:
    return {f"tickwheel: {text}" for text in ("starting Spark", "loading history (0.0 MB)",
                                              "computing figures")}  # fmt: skip


@pytest.mark.slow  # test_load.py: one report at a time
def test_the_table_is_locked_until_the_page_is_written(
    report: Callable[..., Report], load: Callable[..., Outcome], history: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Another run would sweep away what the figures are still read from."""
    from tickwheel.reports import ReportError, job

    write(history, story().events)
    tried = []
    render = job.page.render

    def meanwhile(*arguments: Any) -> str:
        with pytest.raises(ReportError, match="another report uses this table"):
            load()
        tried.append(True)
        return render(*arguments)

    monkeypatch.setattr(job.page, "render", meanwhile)
    made = report()
    assert tried
    assert Path(made.page).exists()
    assert load().rows == 0


@pytest.mark.parametrize("missing", ["pyspark", "java"])
def test_missing_parts_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    """No Spark is needed to say that Spark is missing."""
    from tickwheel.reports import session

    if missing == "pyspark":
        result = stand_in(importlib.util, find_spec=lambda name: None)
        monkeypatch.setattr(session, "importlib", stand_in(importlib, util=result))
    else:
        monkeypatch.setattr(session, "shutil", stand_in(shutil, which=lambda name: None))
        monkeypatch.delenv("JAVA_HOME", raising=False)
    done = CliRunner().invoke(
        app, ["report", "--history", str(tmp_path), "--out", str(tmp_path)], standalone_mode=False
    )
    assert done.return_value == 1
    assert missing in done.stderr.lower()
    assert "install" in done.stderr


def test_a_failed_spark_start_names_the_reason(tmp_path: Path) -> None:
    from tickwheel.reports.session import _reason

    log = tmp_path / "log"
    log.write_text(
        "WARNING: Using incubator modules\n26/11/21 15:53:49 WARN Utils: a name\n"
        'Exception in thread "main" org.apache.spark.SparkException: What is x?\n'
        "\tat org.apache.spark.A.b(C.scala:1)\n"
        "\tat org.apache.spark.A.c(C.scala:2)\n"
    )
    assert _reason(RuntimeError("gateway exited"), log) == (
        'Exception in thread "main" org.apache.spark.SparkException: What is x?'
    )
    assert _reason(RuntimeError("gateway exited"), None) == "gateway exited"


@pytest.mark.parametrize(
    ("new_bytes", "rows", "little"),
    [(0, 0, True), (LITTLE_BYTES, 0, False), (9, LITTLE_ROWS - 1, True), (9, LITTLE_ROWS, False)],
)
def test_the_java_compiler_follows_the_amount_of_work(
    tmp_path: Path, new_bytes: int, rows: int, little: bool
) -> None:
    """What is loaded already does not count as new."""
    hour, manifests = tmp_path / "h/dt=2026-11-21/hour=10", tmp_path / "out/table/_manifests"
    hour.mkdir(parents=True)
    manifests.mkdir(parents=True)
    held, size = "dt=2026-11-21/hour=10/node-1-s0-e1-000001.jsonl", 1_000
    for number, length in ((1, size), (2, new_bytes)):
        with (hour / f"node-1-s0-e1-00000{number}.jsonl.gz").open("wb") as file:
            file.truncate(length)  # no block of the disk is taken
    manifest = Manifest(run=2, rows=rows, segments={held: Loaded(size, True, 2, 1)})
    (manifests / "00000002.json").write_text(manifest.to_text())
    assert little_to_do(ReportSettings((str(tmp_path / "h"),), str(tmp_path / "out"))) is little
    assert not little_to_do(ReportSettings(("s3a://h",), str(tmp_path / "out")))


def test_the_summary_names_missed_objectives() -> None:
    row = {
        "topic": "t", "group": "g", "enqueued": 0, "delivered": 1234, "acked": 1, "nacked": 2,
        "dead": 3, "on_time_share": 0.5, "late_p50_ms": 1.0, "late_p99_ms": None,
        "late_max_ms": 61_000, "first_try_share": 1.0,
    }  # fmt: skip
    text = report_grid([row], [{"topic": "t", "group": "g", "met": False}]).plain()
    assert text.splitlines()[1].split() == [
        "t", "g", "0", "1,234", "1", "2", "3", "50.00", "%", "1", "ms", "-", "1m", "1s", "100.00",
        "%", "MISSED",
    ]  # fmt: skip


@pytest.mark.slow
def test_spark_submit_runs_the_same_job_on_urls(
    spark: SparkSession, quick: dict[str, str], history: Path, tmp_path: Path
) -> None:
    """As docs/reports.md says: a zip of the package and msgpack, submit.py from anywhere."""
    import msgpack
    import pyspark

    from tickwheel.reports import submit

    write(history, story().events)
    job = tmp_path / "job"
    for package in (Path(tickwheel.__file__).parent, Path(msgpack.__file__).parent):
        shutil.copytree(package, job / package.name, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.make_archive(str(tmp_path / "tickwheel"), "zip", job)
    script = tmp_path / "elsewhere/deeper/still/submit.py"
    script.parent.mkdir(parents=True)
    shutil.copy(submit.__file__, script)
    shutil.rmtree(job)
    program = Path(pyspark.__file__).parent / "bin/spark-submit"
    done = subprocess.run(
        [str(program), "--master", "local[2]", "--py-files", str(tmp_path / "tickwheel.zip"),
         str(script), "--history", history.as_uri(),
         "--out", (tmp_path / "out").as_uri(), "--timezone", "Europe/Berlin"],
        cwd=tmp_path, env={**quick, "PYTHONPATH": "", "PYSPARK_PYTHON": sys.executable,
                           "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(story().events)} new rows" in done.stdout
    assert (tmp_path / "out/report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_benchmark_runs_and_counts_everything_once(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Small; says nothing about speed. ``spark`` is here for what it says when there is none."""
    report = tmp_path / "figures.json"
    benchmark.main(["--events", "5000", "--master", "local[2]", "--memory", "1g",
                    "--dir", str(tmp_path), "--json", str(report)])  # fmt: skip
    answer = json.loads(report.read_text())
    first, second = answer["first"], answer["second"]
    assert 0 < second["events"] < first["events"]
    assert second["events_in_all"] == first["events"] + second["events"]
    assert second["events_in_all"] == answer["generate"]["events"]
    assert first["jvm_peak_mb"] > 0
    assert "new data took" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("tickwheel-reports-*")] == []


@pytest.mark.slow
def test_the_benchmark_of_small_histories_measures_each_part(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands themselves, once; says nothing about speed."""
    report = tmp_path / "figures.json"
    benchmark.main(["--small", "--events", "2000", "--dir", str(tmp_path), "--json", str(report)])
    answer = json.loads(report.read_text())
    assert answer["least"].keys() == benchmark.SMALL_MAX_S.keys()
    assert all(seconds > 0 for seconds in answer["least"].values())
    # Without news nothing is made, so Spark is not started either.
    assert answer["least"]["without news"] < answer["least"]["1 % more"] / 2
    assert capsys.readouterr().out.count("wanted: <=") == len(benchmark.SMALL_MAX_S)
    assert [path.name for path in tmp_path.glob("tickwheel-reports-*")] == []
