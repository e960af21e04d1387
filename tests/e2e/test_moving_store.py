"""Daemons on a Redis that moves: they say where it is, and go on where it went."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.raw import Raw
from support.redis_groups import Cluster, SentinelGroup, slot_of
from support.waiting import comes, until
from tickwheel import Client, Task
from tickwheel.api.frames import FrameType as T

SLOT = slot_of("tw:default:0")
TASKS = 200


def where(daemon: Daemon) -> str:
    """The server that the daemon says has the store."""
    with Raw(daemon.port) as raw:
        return str(raw.call(T.STATUS)[2]["store_at"])


def over_http(daemon: Daemon, path: str) -> str:
    with urllib.request.urlopen(f"{daemon.http}{path}", timeout=60) as response:  # noqa: S310
        return str(response.read().decode())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[SentinelGroup]:
    made = SentinelGroup(tmp_path / "group")
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "group")
    try:
        yield made.start()
    finally:
        made.stop()


async def _enqueue_and_get_all(daemon: Daemon, move: Callable[[], object]) -> None:
    """Tasks that are handed in before and while the store moves come."""
    async with Client(daemon.url) as client:
        await client.enqueue_many([Task("t", b"%d" % n) for n in range(TASKS)])
        await asyncio.to_thread(move)
        ids = [(await client.enqueue("t", b"later")).id for _ in range(5)]
        got: set[int] = set()
        async for delivery in client.subscribe("t"):
            got.add(delivery.id)
            await delivery.ack()
            if len(got) == TASKS + len(ids):
                break
        assert got >= set(ids)


async def test_a_sentinel_failover_is_followed_and_logged(
    group: SentinelGroup, tmp_path: Path
) -> None:
    with Daemon(tmp_path / "d", store=group.url("wait_replicas=1"), http=True) as daemon:
        before = group.master
        assert where(daemon) == f"127.0.0.1:{before.port}"
        await _enqueue_and_get_all(daemon, before.kill)
        now = group.moved_from(before)
        assert await comes(lambda: where(daemon) == f"127.0.0.1:{now.port}")
        text = over_http(daemon, "/metrics")
        assert f'tickwheel_store_info{{server="127.0.0.1:{now.port}"}} 1' in text
        assert "tickwheel_store_moves_total 1" in text
        moved = f"moved from 127.0.0.1:{before.port} to 127.0.0.1:{now.port}"
        await comes(lambda: moved in daemon.log_text())
        status = json.loads(over_http(daemon, "/v1/status"))
        assert status["store_at"] == f"127.0.0.1:{now.port}"


@pytest.mark.slow  # persistence/redis/test_redis_cluster.py; a Sentinel is above
async def test_a_moved_cluster_slot_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    with Daemon(tmp_path / "d", store=cluster.url("wait_replicas=1"), http=True) as daemon:
        before = cluster.owner_of(SLOT)
        to = next(node for node in cluster.masters() if node is not before)
        await _enqueue_and_get_all(daemon, lambda: cluster.migrate(SLOT, to))
        assert await comes(lambda: where(daemon) == f"127.0.0.1:{to.port}")
        assert "tickwheel_store_moves_total 1" in over_http(daemon, "/metrics")


def test_a_start_waits_for_a_master_and_logs_it(group: SentinelGroup, tmp_path: Path) -> None:
    master = group.master
    for sentinel in group.sentinels[:2]:
        sentinel.kill()
    master.kill()
    daemon = Daemon(tmp_path / "d", store=group.url())
    daemon.spawn()
    try:
        text = until(lambda: "waiting" in daemon.log_text() and daemon.log_text())
        assert "a reachable store" in text
        assert f"127.0.0.1:{master.port}" in text
        master.start()
        daemon.wait_ready()
    finally:
        daemon.close()
