"""Torture over nodes that share a Redis: the runs that `make torture NODES=4` makes longer.

Nothing acknowledged is lost, nothing comes early, after its confirmed end, or out of order within
an order key, and no shard is silent for longer than it may be.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest

from crash.nodes import Wall
from crash.nodes_run import NodesRun, longest
from crash.torture_run import Options
from support.redis_groups import Cluster, asked
from support.redis_server import program


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"store": "redis", "nodes": 2, "shards": 4, "kills": 6}, id="short"),
        pytest.param(
            {"store": "redis", "nodes": 3, "shards": 4, "kills": 60},
            id="redis",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"store": "cluster", "nodes": 4, "shards": 16, "kills": 100},
            id="cluster",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"store": "cluster", "nodes": 3, "shards": 8, "kills": 40, "mirror": False},
            id="no-mirror",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_all_promises_hold_over_nodes(tmp_path: Path, how: dict[str, int | str]) -> None:
    program()
    run = NodesRun(Options(seed=secrets.randbelow(2**31), **how), tmp_path)  # type: ignore[arg-type]  # fields of each type
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()


async def test_behind_a_wall_a_cluster_names_its_proxies(tmp_path: Path) -> None:
    """So a node behind it is cut off when they are."""
    cluster = Cluster(tmp_path / "group")
    wall = Wall([node.port for node in cluster.nodes])
    await asyncio.to_thread(cluster.start)
    await wall.start()
    try:
        url = wall.url(cluster.url(seeds=6))
        ports = {int(seed.rpartition(":")[2]) for seed in url.split("/")[2].split(",")}
        assert len(ports) == 6
        assert not ports & {node.port for node in cluster.nodes}
        first = min(ports)
        slots = await asyncio.to_thread(asked, first, "", "CLUSTER", "SLOTS")
        named = {server[1] for _, _, *servers in slots for server in servers}
        assert len(named) >= 3
        assert named <= ports
        moved = {str(await asyncio.to_thread(asked, first, "", "GET", key)) for key in "abcdef"}
        named = {int(text.rpartition(":")[2]) for text in moved if text.startswith("MOVED")}
        assert named
        assert named <= ports - {first}
    finally:
        await wall.stop()
        await asyncio.to_thread(cluster.stop)


def test_a_silence_is_of_the_fault_that_began_with_it() -> None:
    came = [10_000, 10_100, 11_400, 11_500, 14_500, 14_600]
    assert longest(came, 10_200, 20_000) == (3.0, 11_500)
    assert longest(came, 10_200, 11_700) == (1.3, 10_100), "of the next one, which began just then"
    assert longest(came, 11_700, 20_000) == (3.0, 11_500)
    assert longest(came, 12_501, 15_600) == (0.1, 14_500), "it had lasted since the one before"
    assert longest(came, 30_000, 40_000) == (0, 30_000)
    assert longest([], 10_000, 20_000) == (0, 10_000)
