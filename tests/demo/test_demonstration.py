"""``tickwheel demo`` on a real PostgreSQL, as ``make demo STORE=postgresql`` runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cli_runner import NOWHERE, Cli
from support.daemon import Daemon
from support.postgresql import PostgresServer, folder_of_programs
from support.waiting import WAIT_S
from tickwheel.cli.app import EXIT_INTERRUPTED
from tickwheel.demo.demonstration import Records, look_up_unanswered
from tickwheel.sync import Client
from tickwheel.testing import TestWheel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of all temporary files, which the user of PostgreSQL may enter."""
    folder_of_programs()
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o711)
        yield Path(path)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration with a PostgreSQL, as a group of processes like that of a terminal."""
    python = (sys.executable, "-m")
    process = subprocess.Popen(
        [*python, "scripts.with_postgresql", *python, "tickwheel", "demo", "--tasks", "500",
         "--store", "{url}", "--inbox", "{url}", *arguments],
        cwd=ROOT, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "TICKWHEEL_HISTORY_DIR": f"{folder}/history"},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.terminate()


def test_the_demo_on_postgresql_loses_nothing_in_a_kill(folder: Path) -> None:
    with running(folder, "--seconds", "5", "--json") as process:
        out, err = process.communicate(timeout=2 * WAIT_S)
        assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert (summary["acked"], summary["kills"], summary["lost"], summary["early"]) == (500, 1, 0, 0)
    assert (summary["committed"], summary["committed_delivered"]) == (20, 20)
    assert (summary["rolled_back"], summary["rolled_back_delivered"]) == (20, 0)
    assert list(folder.iterdir()) == []  # no history either: that setting is another daemon's


def test_ctrl_c_ends_the_demo_and_then_its_postgresql(folder: Path) -> None:
    with running(folder, "--seconds", "60", "--plain") as process:
        assert process.stdout is not None
        assert any("enqueued" in line for line in process.stdout), "it has ended"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == EXIT_INTERRUPTED, err
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


async def test_an_ack_whose_answer_was_lost_counts_if_it_was_stored() -> None:
    async with TestWheel() as wheel:
        acked = await wheel.client.enqueue("orders", b"1")
        unacked = await wheel.client.enqueue("orders", b"2")
        async with wheel.client.subscribe("orders", group="g", prefetch=1) as deliveries:
            await (await anext(deliveries)).ack()
        ids = {acked.id, unacked.id}
        records = Records(due_ms=dict.fromkeys(ids, 0), unanswered=ids)
        await look_up_unanswered(wheel.client, records)
    assert records.acked == {acked.id}


def refusal(*arguments: str) -> str:
    return Cli(NOWHERE).fails(1, "demo", *arguments)


def test_the_demo_refuses_a_store_in_use(shared_postgres: PostgresServer, tmp_path: Path) -> None:
    url = shared_postgres.url()
    with Daemon(tmp_path, store=url) as daemon, Client(daemon.url) as client:
        client.enqueue("orders", b"42", delay="1h")
        assert "another daemon serves this store" in refusal("--store", url)
    assert "its unfinished tasks: 1" in refusal("--store", url)


def test_the_demo_refuses_an_inbox_in_use(shared_postgres: PostgresServer) -> None:
    shared_postgres.sql("CREATE DATABASE used")
    table = "CREATE TABLE tickwheel.inbox_state ()"
    shared_postgres.sql("CREATE SCHEMA tickwheel", table, db="used")
    assert "it has an inbox already" in refusal("--inbox", shared_postgres.database_url("used"))
