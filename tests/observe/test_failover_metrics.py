"""What two daemons on one Redis show while the lead goes from one to the other."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.daemon import Daemon
from support.raw import Raw
from support.redis_server import RedisServer
from support.waiting import until
from tickwheel.api.frames import FrameType as T

TIMEOUT_S = 10.0


def scraped(daemon: Daemon) -> dict[str, float]:
    """Values by name and labels, as text."""
    with urllib.request.urlopen(daemon.http + "/metrics", timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def work(daemon: Daemon, count: int) -> None:
    with Raw(daemon.port) as raw:
        raw.enqueue(*[("t", b"x", 0)] * count)
        left = count
        while left:
            epoch, _, items = raw.call(T.PULL, "t", "g", left, 20_000, {})[2]
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            raw.call(T.ACK, "t", "g", epoch, ids, attempts)
            left -= len(items)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start()
    yield made
    made.kill()


def test_metrics_follow_a_failover_and_back(server: RedisServer, tmp_path: Path) -> None:
    server.lay_out()
    store, ttl_s = server.url(), 2.5
    with (
        Daemon(tmp_path / "a", store=store, http=True, leader_ttl_s=ttl_s) as first,
        Daemon(tmp_path / "b", store=store, http=True, leader_ttl_s=ttl_s) as second,
    ):
        work(first, 3)
        before = scraped(second)
        assert (before["tickwheel_leader"], before["tickwheel_serving"]) == (0, 0)
        assert before["tickwheel_store_up"] == 1
        assert before["tickwheel_failovers_total"] == 0
        assert "tickwheel_delivered_total t g" not in before
        assert scraped(first)["tickwheel_delivered_total t g"] == 3

        first.pause()
        until(lambda: scraped(second)["tickwheel_leader"] == 1, TIMEOUT_S)
        first.go_on()
        until(lambda: scraped(first)["tickwheel_leader"] == 0, TIMEOUT_S)
        work(second, 2)

        shown = scraped(second)
        assert shown["tickwheel_failovers_total"] == 1
        assert shown["tickwheel_delivered_total t g"] == 2
        assert shown["tickwheel_recovery_seconds"] > 0
        assert shown["tickwheel_store_replays_total"] == 0
        deposed = scraped(first)
        assert deposed["tickwheel_deposed_total"] == 1
        assert deposed["tickwheel_delivered_total t g"] == 3, "what was counted stays counted"
        assert "tickwheel_ready_tasks t g" not in deposed, "a standby knows no states"

        until(lambda: scraped(first)["tickwheel_epoch"] == shown["tickwheel_epoch"], TIMEOUT_S)

        second.terminate()
        until(lambda: scraped(first)["tickwheel_leader"] == 1, TIMEOUT_S)
        work(first, 4)
        again = scraped(first)
        assert again["tickwheel_delivered_total t g"] == 7
        assert again["tickwheel_failovers_total"] == 1
        assert again["tickwheel_early_total"] == 0


def test_an_unavailable_redis_shows_in_the_metrics(server: RedisServer, tmp_path: Path) -> None:
    server.lay_out()
    with Daemon(tmp_path / "a", store=server.url(), http=True, outcome_timeout_s=0.3) as daemon:
        with Raw(daemon.port) as raw:
            raw.enqueue(("t", b"x", 0))
            server.pause()
            raw.send(T.ENQUEUE, raw.request + 1, [("t", b"y", 0)])
            until(lambda: scraped(daemon)["tickwheel_store_up"] == 0, TIMEOUT_S)
            until(lambda: scraped(daemon)["tickwheel_store_errors_total unknown"] >= 1, TIMEOUT_S)
            server.go_on()
            until(lambda: scraped(daemon)["tickwheel_store_up"] == 1, TIMEOUT_S)
        assert scraped(daemon)["tickwheel_commit_seconds_count"] >= 2
