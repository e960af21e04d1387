"""``tickwheel status`` and ``client.status()`` against a real daemon on SQLite."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.daemon import Daemon
from tickwheel import Client
from tickwheel.client import statuses

TIMEOUT_S = 60.0
NOWHERE = "tcp://127.0.0.1:1"


def status(url: str, *options: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tickwheel", "status", "--url", url, *options],
        capture_output=True, timeout=TIMEOUT_S, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


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


async def test_the_client_returns_the_same_status(daemon: Daemon) -> None:
    async with Client(daemon.url) as client:
        assert client.server_info["role"] == "active"
        mine = await client.status()
    answers: dict[str, Any] = await statuses(f"{daemon.url},{NOWHERE}")
    assert answers[daemon.url].since_ms == mine.since_ms
    assert answers[daemon.url].epoch == mine.epoch == 1
    assert mine.serves
