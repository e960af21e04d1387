"""A real daemon on a real Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import Daemon, DaemonFailed
from support.raw import Raw
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000


@pytest.fixture
def daemon(server: RedisServer, tmp_path: Path) -> Iterator[Daemon]:
    server.lay_out()  # nobody has to wait for an owner of the empty store
    with Daemon(tmp_path / "daemon", store=server.url(), lease_checkpoint_s=0) as made:
        yield made


def test_tasks_in_flight_are_visible_in_redis(daemon: Daemon, server: RedisServer) -> None:
    with Raw(daemon.port) as raw:
        _, (task_id,) = raw.enqueue(("t", b"x", 0))[2]
        raw.call(T.PULL, "t", "g", 1, 20_000, {"lease_ms": 60_000})
        # The next batches carry the lease's checkpoint.
        raw.enqueue(("t", b"far", DAY_MS))
        raw.enqueue(("t", b"far", DAY_MS))
    answer = server.call("ZRANGE", "{tw:default:0}:prepare", "0", "-1", "WITHSCORES").decode()
    assert str(task_id) in answer
    assert "g" in answer


def test_a_daemon_waits_for_a_frozen_redis(daemon: Daemon, server: RedisServer) -> None:
    with Raw(daemon.port) as raw:
        raw.enqueue(("t", b"before", DAY_MS))
        server.pause()
        request = raw.send(T.ENQUEUE, 0, [("t", b"meanwhile", DAY_MS)])
        raw.call(T.PING)
        server.go_on()
        assert raw.answer(request)[0] == T.OK
        assert raw.call(T.STATS)[2]["scheduled"] == 2


def test_the_password_is_not_in_the_log(server: RedisServer, tmp_path: Path) -> None:
    server.lay_out().call("CONFIG", "SET", "requirepass", "sesam")
    url = server.url(user=":sesam@")
    with Daemon(tmp_path / "secret", store=url) as daemon, Raw(daemon.port) as raw:
        assert raw.enqueue(("t", b"x", DAY_MS))[0] == T.OK
    assert "recovered" in daemon.log_text()
    assert "sesam" not in daemon.log_text()


def test_a_start_before_its_redis_waits_for_it(server: RedisServer, tmp_path: Path) -> None:
    server.kill()
    early = Daemon(tmp_path / "daemon", store=server.url())
    with contextlib.closing(early):
        early.spawn()
        until(lambda: "a reachable store" in early.log_text(), log=early.log_text)
        server.start()
        early.wait_ready()
        with Raw(early.port) as raw:
            raw.enqueue(("t", b"x", DAY_MS))


def test_a_stop_ends_the_wait_for_redis(server: RedisServer, tmp_path: Path) -> None:
    server.kill()
    early = Daemon(tmp_path / "daemon", store=server.url(), store_wait_s=3_600)
    with contextlib.closing(early):
        early.spawn()
        until(lambda: "a reachable store" in early.log_text(), log=early.log_text)
        assert early.terminate() == 0
        assert "Traceback" not in early.log_text()


def test_a_redis_that_stays_unreachable_ends_the_start(server: RedisServer, tmp_path: Path) -> None:
    server.kill()
    with pytest.raises(DaemonFailed, match="store redis"):
        Daemon(tmp_path / "daemon", store=server.url(), store_wait_s=0.5).start()
