"""A daemon with ``?mirror=no``: its Redis comes back older, or empty; a takeover."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.test_redis_mirror_daemon import PATIENCE_S, pulled
from support.daemon import Daemon, DaemonFailed
from support.history_daemon import taken_up
from support.raw import Raw
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.api.frames import FrameType as T
from tickwheel.cli.app import run

DAY_MS = 86_400_000
QUERY = "call_ms=300&connect_ms=300&mirror=no"
SETTINGS: dict[str, Any] = {"leader_ttl_s": 1.0, "resident_horizon_s": 1.0}
"""So that bodies have to be read before they are due."""


@pytest.fixture
def daemon(server: RedisServer, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(
        tmp_path / "daemon",
        store=server.url(QUERY),
        history_dir=tmp_path / "history",
        history_bodies="true",
        backup_dir=tmp_path,
        **SETTINGS,
    ) as running:
        yield running


def _tasks(name: str, count: int, delay_ms: int) -> list[tuple[str, bytes, int]]:
    return [("t", b"%b %d" % (name.encode(), n), delay_ms) for n in range(count)]


def _bodies(*tasks: tuple[str, bytes, int]) -> list[bytes]:
    return sorted(body for _, body, _ in tasks)


def test_batches_lost_by_redis_are_replayed(daemon: Daemon, server: RedisServer) -> None:
    """Killed, and the end of its log is gone, as with a power cut and ``everysec``."""
    with Raw(daemon.port) as raw:
        first, second = _tasks("first", 100, 4_000), _tasks("second", 100, 4_000)
        assert raw.enqueue(*first)[0] == T.OK
        size_bytes = os.path.getsize(server.log_tail())
        assert raw.enqueue(*second)[0] == T.OK
        server.kill()
        os.truncate(server.log_tail(), size_bytes)
        server.start()
        assert sorted(pulled(raw, 200)) == _bodies(*first, *second)
    assert "came back with older data: replaying" in daemon.log_text()
    assert daemon.alive


def test_an_emptied_redis_stops_the_daemon_and_is_restored(
    daemon: Daemon, server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Raw(daemon.port) as raw:
        saved, later = _tasks("saved", 50, DAY_MS), _tasks("later", 50, DAY_MS)
        assert raw.enqueue(*saved)[0] == T.OK
        backup = raw.call(T.BACKUP, "nightly.db")[2]["path"]
        assert raw.enqueue(*later)[0] == T.OK
        assert raw.call(T.STATUS)[2]["mirror"] is False
    assert run(["status", "--url", daemon.url]) == 0
    assert "mirror: no: " in capsys.readouterr().out
    before = len(daemon.log_text().splitlines())
    server.restart_from(None)
    assert daemon.wait(PATIENCE_S) == 1
    lines = [line for line in daemon.log_text().splitlines()[before:] if "restore" in line]
    assert len(lines) == 1, daemon.log_text()
    assert "has lost its data" in lines[0]
    assert "`tickwheel restore`" in lines[0]
    assert "next start recovers" not in lines[0]
    assert "Traceback" not in daemon.log_text()
    with pytest.raises(DaemonFailed, match=r"(?s)ended with 1.*mirror=no"):
        daemon.start()
    asyncio.run(taken_up(tmp_path / "history"))
    url = server.url(QUERY)
    source = ["--from", str(backup), "--history", str(tmp_path / "history"), "--json"]
    assert run(["restore", *source, "--into", url]) != 0, "not into what is left"
    assert "tickwheel init --force" in capsys.readouterr().err
    assert run(["init", "--force", "--yes", "--store", url]) == 0
    capsys.readouterr()
    assert run(["restore", *source, "--into", url]) == 0
    assert json.loads(capsys.readouterr().out)["restored"] == 100
    daemon.start()
    with Raw(daemon.port) as raw:
        page = raw.call(T.LIST, {"limit": 200})[2]["tasks"]
        assert sorted(row["body"] for row in page) == _bodies(*saved, *later)
        assert raw.call(T.STATS)[2]["scheduled"] == 100


def test_a_takeover_reads_bodies_only_when_they_are_due_soon(
    server: RedisServer, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": server.url(QUERY), **SETTINGS}
    with (
        Daemon(tmp_path / "first", **options) as active,
        Daemon(tmp_path / "second", **options) as standby,
    ):
        soon, far = _tasks("soon", 300, 3_000), _tasks("far", 300, DAY_MS)
        with Raw(active.port) as raw:
            assert raw.enqueue(*soon)[0] == T.OK
            _, far_ids = raw.enqueue(*far)[2]
        active.kill()
        until(lambda: _role(standby) == "active", PATIENCE_S)
        with Raw(standby.port) as raw:
            assert sorted(pulled(raw, 300)) == _bodies(*soon)
            result = raw.call(T.LOOKUP, list(far_ids))[2]
            assert [row["body"] for row in result] == [body for _, body, _ in far]
            assert raw.call(T.STATS)[2]["scheduled"] == 300


def test_a_standby_refuses_an_incomplete_redis(server: RedisServer, tmp_path: Path) -> None:
    """The active one knows that its Redis came back too old; the standby does not."""
    options: dict[str, Any] = {"store": server.url(f"{QUERY}&keep_bytes=10"), **SETTINGS}
    with (
        Daemon(tmp_path / "first", **options) as active,
        Daemon(tmp_path / "second", **options) as standby,
    ):
        with Raw(active.port) as raw:
            assert raw.enqueue(*_tasks("old", 10, DAY_MS))[0] == T.OK
            older = server.snapshot()
            assert raw.enqueue(*_tasks("new", 10, DAY_MS))[0] == T.OK
            assert raw.enqueue(*_tasks("newest", 10, DAY_MS))[0] == T.OK
        server.restart_from(older)
        assert active.wait(PATIENCE_S) == 1
        until(lambda: "store_is_partial" in standby.log_text(), PATIENCE_S)
        assert "tickwheel restore" in standby.log_text()
        assert _role(standby) == "standby"
        assert server.call("HLEN", "{tw:default:0}:task") == b":10\r\n"


def _role(daemon: Daemon) -> str:
    try:
        with Raw(daemon.port) as raw:
            return str(raw.call(T.STATUS)[2]["role"])
    except (OSError, EOFError):
        return ""  # its role is changing
