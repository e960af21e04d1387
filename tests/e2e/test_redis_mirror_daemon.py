"""A daemon whose Redis comes back empty, is away, or holds more than may be in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.raw import Raw
from support.redis_server import RedisServer
from tickwheel.api.frames import FrameType as T

DAY_MS = 86_400_000
PATIENCE_S = 30.0
QUICK = "call_ms=300&connect_ms=300"


def pulled(raw: Raw, count: int) -> list[bytes]:
    """That many bodies, acknowledged."""
    bodies: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(bodies) < count and time.monotonic() < deadline:
        epoch, _, items = raw.call(T.PULL, "t", "g", 1_000, 500, {})[2]
        if items:
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            assert raw.call(T.ACK, "t", "g", epoch, ids, attempts)[0] == T.OK
            bodies += [item[3] for item in items]
    return bodies


@pytest.mark.parametrize("log_format", [pytest.param("console", marks=pytest.mark.slow), "json"])
def test_everything_is_delivered_after_redis_came_back_empty(
    server: RedisServer, tmp_path: Path, log_format: str
) -> None:
    settings = {"log_format": log_format, "leader_ttl_s": 1.0, "resident_horizon_s": 1.0}
    with (
        Daemon(tmp_path / "daemon", store=server.url(QUICK), **settings) as daemon,
        Raw(daemon.port) as raw,
    ):
        soon = [("t", b"soon %d" % n, 3_000 + n) for n in range(400)]
        far = [("t", b"far %d" % n, DAY_MS) for n in range(400)]
        assert raw.enqueue(*soon)[0] == T.OK
        _, far_ids = raw.enqueue(*far)[2]
        server.restart_from(None)
        bodies = pulled(raw, 400)
        assert sorted(bodies) == sorted(body for _, body, _ in soon)
        lines = [line for line in daemon.log_text().splitlines() if "redis.recovery" in line]
        assert len(lines) == 2, daemon.log_text()
        assert "has lost its data" in lines[0]
        assert "800 tasks" in lines[1]
        if log_format == "json":
            assert [json.loads(line)["level"] for line in lines] == ["error", "warning"]
        # And it is in Redis again: another daemon finds what is left.
        daemon.restart()
        with Raw(daemon.port) as other:
            result = other.call(T.LOOKUP, list(far_ids))[2]
            assert [row["body"] for row in result] == [body for _, body, _ in far]
            assert other.call(T.STATS)[2]["scheduled"] == 400
    assert "Traceback" not in daemon.log_text()


def test_deliveries_continue_while_redis_is_frozen(server: RedisServer, tmp_path: Path) -> None:
    """Bodies are not in the engine's memory: they come from the mirror."""
    server.lay_out()
    settings = {"leader_ttl_s": 15.0, "resident_horizon_s": 0.5}
    with (
        Daemon(tmp_path / "daemon", store=server.url(QUICK), **settings) as daemon,
        Raw(daemon.port) as raw,
    ):
        tasks = [("t", b"%d" % n, 1_500) for n in range(50)]
        assert raw.enqueue(*tasks)[0] == T.OK
        raw.call(T.SUBSCRIBE, 1, "t", "g", 100, {})
        server.pause()
        try:
            delivered: list[bytes] = []
            while len(delivered) < 50:
                frame = raw.next()
                if frame[0] == T.DELIVER:
                    delivered += [item[3] for item in frame[4]]
        finally:
            server.go_on()
        assert sorted(delivered) == sorted(body for _, body, _ in tasks)


def test_a_redis_outage_logs_few_lines(server: RedisServer, tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "daemon", store=server.url(QUICK), leader_ttl_s=1.0) as daemon,
        Raw(daemon.port) as raw,
    ):
        assert raw.enqueue(("t", b"before", DAY_MS))[0] == T.OK
        before = len(daemon.log_text().splitlines())
        server.kill()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            raw.call(T.ENQUEUE, raw.request + 1, [("t", b"meanwhile", DAY_MS)])
        server.start()
        deadline = time.monotonic() + PATIENCE_S
        while raw.enqueue(("t", b"after", DAY_MS))[0] != T.OK and time.monotonic() < deadline:
            pass
        lines = daemon.log_text().splitlines()[before:]
        assert len(lines) <= 6, lines
        assert "Traceback" not in daemon.log_text()


def test_tasks_over_the_mirrors_limit_are_refused(server: RedisServer, tmp_path: Path) -> None:
    settings = {"leader_ttl_s": 1.0, "resident_bytes_max": 100_000}
    with (
        Daemon(tmp_path / "daemon", store=server.url(QUICK), **settings) as daemon,
        Raw(daemon.port) as raw,
    ):
        assert raw.enqueue(*[("t", bytes(500), 0) for _ in range(100)])[0] == T.OK
        refused = raw.enqueue(*[("t", bytes(500), 0) for _ in range(100)])
        assert refused[0] == T.ERROR
        assert refused[2] == "store_full"
        assert "resident_bytes_max" in refused[3]
        assert len(pulled(raw, 100)) == 100
        deadline = time.monotonic() + PATIENCE_S
        while raw.enqueue(("t", b"x", DAY_MS))[0] != T.OK:
            assert time.monotonic() < deadline
