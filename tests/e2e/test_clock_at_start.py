"""A start, or a taking over, with a clock that is far ahead of what the store has seen.

Each daemon follows a clock file of its own (``tickwheel.clock``); the machine's is not touched.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.http_asking import ask
from support.raw import Raw
from support.redis_server import RedisServer
from support.steering import WallClock
from support.waiting import until
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000
UNTIL_S = 10.0


def status(daemon: Daemon) -> dict[str, Any]:
    """One that begins to lead sends away those who are connected: they ask again."""
    while True:
        try:
            with Raw(daemon.port) as raw:
                answer: dict[str, Any] = raw.call(T.STATUS)[2]
                return answer
        except (EOFError, ConnectionResetError):
            assert daemon.alive


def pulled(daemon: Daemon, wait_ms: int = 0) -> list[bytes]:
    """The bodies that come due for a new pull of topic t, acked."""
    with Raw(daemon.port) as raw:
        epoch, _, items = raw.call(T.PULL, "t", "g", 100, wait_ms, {})[2]
        if items:
            raw.call(T.ACK, "t", "g", epoch, [i[0] for i in items], [i[1] for i in items])
        return [item[3] for item in items]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start().lay_out()
    yield made
    made.kill()


def left_behind(daemon: Daemon) -> None:
    """A group, and tasks for today and for later; then the daemon is down."""
    daemon.start()
    with Raw(daemon.port) as raw:
        raw.call(T.GROUP_CREATE, "t", "g", {})
        raw.enqueue(("t", b"in 1 day", DAY_MS), ("t", b"in 20 days", 20 * DAY_MS))
    daemon.kill()


def is_held(daemon: Daemon) -> bool:
    answer = status(daemon)
    if answer["state"] != "clock_held":
        return False
    assert "30.0 days ahead of the last time in the store" in answer["detail"]
    assert "clock_hold_start_over_s" in answer["detail"]
    assert "--accept-clock" in answer["detail"]
    return True


def test_a_clock_a_month_ahead_fires_no_task(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    daemon = Daemon(tmp_path / "d", http=True, env=clock.env)
    try:
        left_behind(daemon)
        clock.step(30 * DAY_MS)
        for _ in range(2):  # it does not get used to it
            daemon.start()
            assert is_held(daemon)
            assert pulled(daemon, 300) == []
            daemon.kill()
        daemon.start()
        answer = ask(daemon.http, "GET", "/readyz")
        assert (answer.status, answer.json["status"]) == (503, "clock_held")
        until(lambda: " clock_held " in daemon.log_text(), UNTIL_S)

        with Raw(daemon.port) as raw:  # what is asked for now works by the time that goes on
            raw.enqueue(("t", b"now", 50))
        assert pulled(daemon, 20_000) == [b"now"]

        clock.step(-30 * DAY_MS)
        until(lambda: status(daemon)["state"] == "ready", UNTIL_S)
        assert pulled(daemon) == []
        until(lambda: "clock_released" in daemon.log_text(), UNTIL_S)  # a thread writes it
    finally:
        daemon.close()


@pytest.mark.parametrize("how", ["flag", "signal"])
def test_an_operator_can_accept_the_clock(tmp_path: Path, how: str) -> None:
    clock = WallClock(tmp_path / "clock")
    daemon = Daemon(tmp_path / "d", env=clock.env)
    try:
        left_behind(daemon)
        clock.step(30 * DAY_MS)
        if how == "flag":
            daemon.args = ("--accept-clock",)
            daemon.start()
        else:
            daemon.start()
            assert is_held(daemon)
            os.kill(daemon.pid, signal.SIGUSR1)
            until(lambda: status(daemon)["state"] == "ready", UNTIL_S)
        assert sorted(pulled(daemon, 20_000)) == [b"in 1 day", b"in 20 days"]
        daemon.args = ()
        daemon.restart()
        assert status(daemon)["state"] == "ready", "it is the store's time now"
    finally:
        daemon.close()


def test_a_long_stop_does_not_hold_the_clock(tmp_path: Path) -> None:
    """Below the limit, and with nothing that could fire at any distance."""
    clock = WallClock(tmp_path / "clock")
    daemon = Daemon(tmp_path / "d", env=clock.env)
    try:
        left_behind(daemon)
        clock.step(6 * DAY_MS)
        daemon.start()
        until(lambda: status(daemon)["state"] == "ready", UNTIL_S)
        assert pulled(daemon, 20_000) == [b"in 1 day"]
        clock.step(15 * DAY_MS)
        until(lambda: status(daemon)["state"] == "clock_held", UNTIL_S)
        os.kill(daemon.pid, signal.SIGUSR1)
        assert pulled(daemon, 20_000) == [b"in 20 days"]
        daemon.kill()
        clock.step(10_000 * DAY_MS)
        daemon.start()
        until(lambda: status(daemon)["state"] == "ready", UNTIL_S)  # nothing is pending
        assert "clock_held" not in daemon.log_text()
    finally:
        daemon.close()


def test_a_standby_with_a_wrong_clock_fires_no_task(server: RedisServer, tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock", 30 * DAY_MS)
    options: dict[str, Any] = {"store": server.url(), "leader_ttl_s": 3.0}
    active = Daemon(tmp_path / "right", **options)
    wrong = Daemon(tmp_path / "wrong", env=clock.env, node="wrong", **options)
    try:
        active.start()
        wrong.start()
        with Raw(active.port) as raw:
            raw.call(T.GROUP_CREATE, "t", "g", {})
            raw.enqueue(("t", b"in 20 days", 20 * DAY_MS))
        active.kill()
        until(lambda: status(wrong)["role"] == "active", UNTIL_S)
        assert is_held(wrong)
        assert pulled(wrong, 300) == []
        clock.step(-30 * DAY_MS)
        until(lambda: status(wrong)["state"] == "ready", UNTIL_S)
        assert pulled(wrong) == []
    finally:
        active.close()
        wrong.close()
