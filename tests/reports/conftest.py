"""Real Spark, one session for all tests here; missing parts fail where CI is set.

The session is set up for many tiny jobs: no code generation, the quick compiler only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from reports.browser import Browser, found
from support.story import story, write
from tickwheel.cli.app import app
from tickwheel.reports import ReportSettings, Slo
from tickwheel.reports.session import missing_part, started

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report
    from tickwheel.reports.table import Outcome

QUICK = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
}
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -Xshare:auto"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark in this process' own JVM."""
    missing = missing_part()
    if missing is not None:
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    os.environ["JDK_JAVA_OPTIONS"] = QUICK_JAVA
    with started("local[2]", memory="1g", quiet=True) as session:
        for name, value in QUICK.items():
            session.conf.set(name, value)
        yield session
    del os.environ["JDK_JAVA_OPTIONS"]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """An empty history."""
    folder = tmp_path / "history"
    folder.mkdir()
    return folder


CHOSEN: dict[str, Any] = {
    "slos": (Slo.parse("orders.*=100ms@99%"),), "timezone": "Europe/Berlin"
}  # fmt: skip
"""What the report of the story is made with."""


@pytest.fixture(scope="session")
def whole_story(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Its report; one bad line and one synthetic event are among the history. Nobody changes it."""
    from tickwheel.reports.job import run

    folder = tmp_path_factory.mktemp("story")
    events = story().events
    events[1]["synthetic"] = True
    write(folder / "history", events, tail='{"v":1,"reason":"</script><b>')
    return run(spark, ReportSettings((str(folder / "history"),), str(folder / "out"), **CHOSEN))


@pytest.fixture
def load(spark: SparkSession, history: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """``load(batch_bytes=…)``: bring the table in ``tmp_path/out`` up to date."""
    from tickwheel.reports.table import Loader

    def run(**options: object) -> Outcome:
        settings = ReportSettings((str(history),), str(tmp_path / "out"), **options)  # type: ignore[arg-type]  # what a test names
        loader = Loader(spark, settings, lambda stage, done, of: None)
        with loader.lock() as lock:
            return loader.load(lock)

    return run


@pytest.fixture
def report(spark: SparkSession, history: Path, tmp_path: Path) -> Callable[..., Report]:
    """``report(since_ms=…)``: the whole job."""
    from tickwheel.reports.job import run

    def make(**options: object) -> Report:
        settings = ReportSettings((str(history),), str(tmp_path / "out"), **options)  # type: ignore[arg-type]  # what a test names
        return run(spark, settings)

    return make


@pytest.fixture
def command(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """``command("report", …)`` in this process, on the tests' Spark: exit code, output, remarks."""
    from tickwheel.reports import session

    @contextmanager
    def ours(master: str | None, **options: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(session, "started", ours)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, list(arguments), standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return int(done.return_value or 0), done.stdout, done.stderr

    return run


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return found(tmp_path / "chromium")
