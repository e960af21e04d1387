"""``tickwheel demo`` on a real PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.waiting import WAIT_S
from tickwheel.sync import Client

DEMO = [sys.executable, "-m", "tickwheel", "demo", "--tasks", "500"]


def refusal(*arguments: str) -> str:
    done = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr
    return done.stderr


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
