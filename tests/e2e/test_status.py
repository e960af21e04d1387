"""``tickwheel status`` and ``client.status()`` against a real daemon on SQLite."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from support.daemon import Daemon
from tickwheel import Client
from tickwheel.client import statuses

TIMEOUT_S = 60.0
NOWHERE = "tcp://127.0.0.1:1"
Make = Callable[..., Daemon]


def status(url: str, *options: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tickwheel", "status", "--url", url, *options],
        capture_output=True, timeout=TIMEOUT_S, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_the_only_daemon_is_active_and_ready(daemon: Daemon) -> None:
    head, row, durability = status(daemon.url).splitlines()
    assert head.split()[:4] == ["address", "node", "role", "state"]
    assert row.split()[0] == daemon.url.removeprefix("tcp://")
    assert row.split()[2:5] == ["active", "ready", "1"]
    assert "NOT OK" not in row
    assert durability.startswith("durability: synced to the disk before each answer")


def test_json_has_every_field(daemon: Daemon) -> None:
    first, second = map(json.loads, status(f"{daemon.url},{NOWHERE}", "--json").splitlines())
    assert first["reachable"] is True
    assert first["url"] == first["address"] == daemon.url
    assert {
        "node", "version", "role", "state", "detail", "epoch", "address", "since_ms", "active",
        "store", "store_ok", "durability", "now_ms", "uptime_s", "loaded",
    } <= set(first)  # fmt: skip
    assert first["store"].startswith("sqlite:///")
    assert first["now_ms"] >= first["since_ms"] > 0
    assert second["reachable"] is False


def test_a_daemon_that_has_ended_is_not_reachable(make_daemon: Make) -> None:
    daemon = make_daemon().start()
    daemon.terminate()
    assert "unreachable" in status(daemon.url, expect=3)


def test_the_token_is_needed(make_daemon: Make) -> None:
    daemon = make_daemon(serve_token="secret").start()
    assert "unauthorized" in status(daemon.url, expect=1)
    assert "ready" in status(daemon.url, "--token", "secret")


async def test_the_client_returns_the_same_status(daemon: Daemon) -> None:
    async with Client(daemon.url) as client:
        assert client.server_info["role"] == "active"
        mine = await client.status()
    answers: dict[str, Any] = await statuses(f"{daemon.url},{NOWHERE}")
    assert answers[daemon.url].since_ms == mine.since_ms
    assert answers[daemon.url].epoch == mine.epoch == 1
    assert mine.serves
