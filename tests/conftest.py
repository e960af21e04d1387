"""For all tests: repeatable Hypothesis runs, no daemon settings from somebody's shell, one
Redis that is only read and written, and the order in which several processes share the work."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.redis_server import RedisServer
from tickwheel import Client

# The seed of a failing example is printed, so that it can be repeated anywhere.
hypothesis.settings.register_profile("tickwheel", deadline=None, print_blob=True)
# Where it is enough to know that something fails, no time goes into a smaller example of it.
hypothesis.settings.register_profile(
    "any-example",
    parent=hypothesis.settings.get_profile("tickwheel"),
    phases=[item for item in hypothesis.Phase if item is not hypothesis.Phase.shrink],
)
# `make test`: a part of the examples; the rest of them is for `make test-full`.
hypothesis.settings.register_profile(
    "quick", parent=hypothesis.settings.get_profile("tickwheel"), max_examples=20
)
hypothesis.settings.load_profile(os.environ.get("EXAMPLES", "tickwheel"))
IS_QUICK = os.environ.get("EXAMPLES") == "quick"
MACHINE_EXAMPLES_MAX = 10
"""Maximum examples of a state machine in `make test`."""
FUNCTION_EXAMPLES_MAX = 30
"""Maximum examples of a function with a number of its own."""
USED_SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a function; it has no public name for it."""

for _name in [name for name in os.environ if name.startswith("TICKWHEEL_")]:
    del os.environ[_name]

# Who starts the tests in the background leaves SIGINT ignored, and so would every process that a
# test starts and ends by Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER = ("reports", "console")
"""Folders whose tests share something that is dear to start: a Spark, a Chromium."""
APART = (
    "mutations/test_mutations.py", "crash/test_everything.py", "crash/test_torture.py",
    "crash/test_torture_redis.py", "crash/test_nemeses.py",
)  # fmt: skip
"""Files whose tests share nothing and last long: each test is by itself."""
LONG = (
    "reports", "console", "e2e/test_docs.py", "persistence/test_conformance.py",
    "e2e/test_groups_daemon.py", "crash/test_everything.py", "crash/test_nemeses.py",
    "crash/test_torture_redis.py", "crash/test_torture.py", "mutations/test_mutations.py",
    "crash/test_torture_nodes.py", "e2e/test_nodes.py", "e2e/test_failover.py",
    "e2e/test_nodes_clients.py", "e2e/test_http_document.py",
    "persistence/redis/test_redis_sentinel.py", "observe/test_grafana.py",
    "simulation/test_simulation.py", "e2e/test_worker_daemon.py", "history/test_writer_process.py",
    "server/tcp/test_fuzz.py", "client/test_worker.py", "repository/test_repository.py",
    "e2e/test_deployed.py", "engine/test_timetables_model.py", "repository/test_site.py",
    "e2e/test_cli.py", "e2e/test_bulk.py", "cli/test_app.py",
    "e2e/test_reshard.py", "e2e/test_following.py", "repository/test_base_install.py",
    "e2e/test_cli_groups_daemon.py", "repository/test_benchmarks.py", "contrib/test_django.py",
    "outbound/test_kills.py", "upgrade/test_upgrade.py",
)  # fmt: skip
"""Begun first, so that no process is left with one of them at the end."""

COLLECTED = pytest.StashKey[frozenset[str]]()
LAST_WORDS_MAX = 3_000
"""Maximum characters of each failure."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    functions = {item.function for item in items if isinstance(item, pytest.Function)}
    for function in functions if IS_QUICK else ():
        own = getattr(function, USED_SETTINGS, None)
        if own is not None and own.max_examples > FUNCTION_EXAMPLES_MAX:
            few = hypothesis.settings(own, max_examples=FUNCTION_EXAMPLES_MAX)
            setattr(function, USED_SETTINGS, few)
    for machine in {item.cls for item in items if isinstance(item, pytest.Function)}:
        of_machine = getattr(machine, "settings", None)
        if IS_QUICK and isinstance(of_machine, hypothesis.settings):
            most = min(of_machine.max_examples, MACHINE_EXAMPLES_MAX)
            machine.settings = hypothesis.settings(of_machine, max_examples=most)
    ranks = {place: rank for rank, place in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(_place(item.nodeid), len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Until all are collected nothing becomes garbage that is worth looking for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is there now stays until the end: no collection of garbage looks at it again. There are
    400,000 objects of 7,000 tests, and many a test collects garbage, to see what it left."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """A file, or a folder that belongs together, stays in one process, with few exceptions."""
    return _InPlaces(config, log)


class _InPlaces(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        place = _place(nodeid)
        return nodeid if place in APART else place


def _place(nodeid: str) -> str:
    path = nodeid.partition("::")[0].removeprefix("tests/")
    folder = path.partition("/")[0]
    return folder if folder in TOGETHER else path


class _LastWords:
    """After an internal error, of pytest or of one of its processes, pytest does not say what has
    failed until then. This says both, in the end, where who reads a part of the output sees it."""

    def __init__(self) -> None:
        self._failed: list[str] = []
        self._errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = report.longreprtext[-LAST_WORDS_MAX:]
            self._failed.append(f"FAILED {report.nodeid} ({report.when})\n{text}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._errors.append(f"INTERNAL ERROR\n{str(excrepr)[-LAST_WORDS_MAX:]}")

    def pytest_unconfigure(self) -> None:
        if self._errors:
            print("\n".join(self._failed + self._errors), flush=True)  # noqa: T201  # its output


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # it is not one of several processes
        config.pluginmanager.register(_LastWords())


@pytest.fixture(scope="session")
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """The ids of all tests that were collected, also of those that this run leaves out."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that only read and write; it is emptied before each."""
    server = RedisServer(tmp_path_factory.mktemp("redis") / "data").start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """One server for all tests that only read and write; each has schemas of its own."""
    with PostgresServer.running() as server:
        yield server


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """``make_daemon(lease_default_s=1, …)``: a Daemon with these settings, not started yet."""
    made: list[Daemon] = []

    def make(kind: type[Daemon] = Daemon, **options: Any) -> Daemon:
        made.append(kind(tmp_path / f"daemon-{len(made)}", **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that the tests of a module share."""
    folder = tmp_path_factory.mktemp("running")
    with Daemon(folder, retry_base_s=0.05, retry_jitter=0, retry_max=2) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
async def client(running: Daemon) -> AsyncIterator[Client]:
    """A client of the daemon that a module's tests share."""
    async with Client(running.url) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """One of its own for each test."""
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
