"""Every example runs against a real daemon, says what it is there to show, and ends well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.waiting import until
from tickwheel.sync import Client

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 60

# What each must print, in this order, as patterns of whole lines.
EXPECTED = {
    "order_timeout": [
        r"order 1001: to be paid until \d\d:\d\d:\d\d\.\d+",
        r"order 1002: paid, its time-out is cancelled",
        r"order 100[13]: not paid in time, closed \(\d+ ms late\)",
        r"order 100[13]: not paid in time, closed \(\d+ ms late\)",
    ],
    "debounce": [
        r"changed to 'O': stored",
        r"changed to 'On': replaced",
        r"changed to 'Once': replaced",
        r"indexed document-7: 'Once'",
        r"changed again: stored",
    ],
    "retry_dead_letters": [
        r"attempt 1: the mail server does not answer; retrying",
        r"attempt 2: the mail server does not answer; retrying",
        r"attempt 3: the mail server does not answer; dead",
        r"dead letter of mailer: the mail server does not answer",
        r"  attempt 3: the mail server does not answer",
        r"the mail server is repaired",
        r"dead letter: requeued",
        r"attempt 4: sent to ann@example\.com",
        r"the task is acked",
    ],
    "typed_tasks": [
        r"refused: remind: \$\.amount: .*",
        r"order 1001: 42\.00 CHF are due",
        r"order 1000: 9\.90 EUR are due",
    ],
    "fan_out": [r"billing did 6 of 6, shipping 6 of 6"],
    "idempotent_consumer": [
        r"order 7001: the bank does not answer; retrying",
        r"order 7001: charged \(attempt \d\)",
        r"charged: 7001, 7002",
    ],
    "daily_reminder": [
        r"example.reminder: planned for 09:00 in Berlin",
        r"example.reminder: planned for 09:00 in Berlin",
        r"example.poll: run 1, \d+ ms after its planned time",
        r"example.poll: run 2, \d+ ms after its planned time",
        r"example.poll: 2 runs, over",
    ],
    "django_on_commit": [
        r"order 1: placed",
        r"order 2: the card was refused; rolled back",
        r"order 3: placed",
        r"order [13]: not paid in time, 1 closed",
        r"order [13]: not paid in time, 1 closed",
        r"orders left: 0",
    ],
    "inbox_fastapi": [
        r"order 1: 402",
        r"order 2: 201",
        r"order 2: not paid in time, \{'2': 'closed'\}",
    ],
    "inbox_django": [
        r"order 1: 402",
        r"order 2: 201",
        r"order 2: not paid in time, \{'2': 'closed'\}",
    ],
    "fastapi_lifespan": [
        r"order 1: 201",
        r"order 2: 201",
        r"order 1: paid, \['cancelled'\]",
        r"wrong: 400 bad_request",
        r"order 2: not paid in time",
    ],
    "outbox": [
        r"order 3: the card was refused; rolled back, and its task with it",
        r"the relay died before it deleted the rows",
        r"enqueued: 2, then 0",
        r"order-[12]: not paid in time",
        r"order-[12]: not paid in time",
        r"tasks left: 0",
    ],
    "sqlalchemy_outbox": [
        r"order 3: rolled back, and its task with it",
        r"the outbox waits: unreachable",
        r"enqueued: 2, then 0",
        r"order [12]: not paid in time",
        r"order [12]: not paid in time",
    ],
    "worker_app": [
        r"report (early|broken|endless): printed at attempt 2",
        r"dead letter: there is no such report",
    ],
}
ALSO = {
    "fan_out": [r"billing-1: order \d", r"billing-2: order \d", r"shipping-1: order \d"],
    "idempotent_consumer": [r"order 7001: was charged before, nothing to do"],
    "worker_app": [
        r"report monthly: printed at attempt 1",
        r"report early: printed at attempt 2",
        r"report broken: printed at attempt 2",
        r"report endless: printed at attempt 2",
        r"cleaned /var/spool/reports",
    ],
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("examples")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
def shop(shared_postgres: PostgresServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program whose daemon takes tasks and acks from its database."""
    shared_postgres.sql("CREATE DATABASE shop")
    inbox = shared_postgres.database_url("shop")
    with Daemon(tmp_path, args=("--inbox", inbox)) as daemon, Client(daemon.url) as client:
        has_inbox = "SELECT to_regclass('tickwheel.inbox_state') IS NOT NULL"
        until(lambda: shared_postgres.sql(has_inbox, db="shop")[0][0], log=daemon.log_text)
        yield {
            "TICKWHEEL_URL": daemon.url, "PGHOST": "127.0.0.1", "PGUSER": "postgres",
            "PGPORT": str(shared_postgres.port),
        }  # fmt: skip
        until(lambda: client.stats().acked == 1, log=daemon.log_text)  # the ack in the transaction


CONTRIB = ("fastapi_lifespan", "inbox_django", "sqlalchemy_outbox")
"""contrib/ and inbox/ have quick tests of these features."""
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in CONTRIB else name
    for name in sorted(EXPECTED)
]


@pytest.mark.parametrize("name", NAMES)
def test_each_example_prints_its_documented_output(
    name: str, running: Daemon, request: pytest.FixtureRequest
) -> None:
    environment = {**os.environ, "TICKWHEEL_URL": running.url, "PYTHONPATH": str(ROOT)}
    if name == "inbox_django":
        environment |= request.getfixturevalue("shop")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = iter(done.stdout.splitlines())
    for pattern in [*EXPECTED[name], "done"]:
        result = any(re.fullmatch(pattern, line) for line in lines)
        assert result, f"{pattern!r} is not in:\n{done.stdout}{done.stderr}"
    for pattern in ALSO.get(name, ()):
        assert re.search(f"^{pattern}$", done.stdout, re.MULTILINE), (pattern, done.stdout)


def test_every_example_is_tested_and_named_in_the_readme() -> None:
    programs = [path.stem for path in EXAMPLES.glob("*.py")]
    names = {name for name in programs if not name.startswith("test_")}  # those are run by pytest
    assert names == set(EXPECTED)
    readme = (EXAMPLES / "README.md").read_text()
    assert {name for name in names if f"]({name}.py)" in readme} == names
