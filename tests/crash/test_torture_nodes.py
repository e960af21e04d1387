"""Torture over nodes that share a Redis: the runs that `make torture NODES=4` makes longer.

Nothing acknowledged is lost, nothing comes early, after its confirmed end, or out of order within
an order key, and no shard is silent for longer than it may be.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from crash.nodes_run import NodesRun
from crash.silences import (
    AGAIN,
    BACK,
    Beat,
    Bound,
    Judged,
    Timeline,
    Window,
    judge,
    of_fault,
    silences,
    verdicts,
)
from crash.torture_run import Options
from crash.walls import Doors, Wall
from support.ports import free_ports
from support.redis_groups import Cluster, asked
from support.redis_server import program
from support.waiting import rest, soon


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


async def test_a_cluster_behind_proxies_names_the_proxies(tmp_path: Path) -> None:
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


async def test_doors_shut_and_swallow_and_let_clients_in_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    first = free_ports(2)
    servers = [await asyncio.start_server(answer, "127.0.0.1", first + i) for i in range(2)]
    doors = Doors(seed=1, count=2)
    row = doors.before(first)
    await doors.start()

    async def echoed(client: Stream) -> bytes:
        client[1].write(b"said\n")
        return await soon(client[0].readline())

    clients = [await asyncio.open_connection("127.0.0.1", row + i) for i in (0, 1)]
    try:
        assert [await echoed(item) for item in clients] == [b"said\n"] * 2
        await doors.shut(row, 0.2)
        for item in clients:
            with pytest.raises(ConnectionError):
                await echoed(item)
        clients.append(again := await asyncio.open_connection("127.0.0.1", row))
        assert await echoed(again) == b"said\n"

        await doors.tell("swallow", row)
        again[1].write(b"lost, late or dead\n")
        coming = asyncio.create_task(again[0].readline())
        await rest(0.3)
        assert not coming.done(), "something came through a black hole, or its end"
        await doors.tell("unswallow", row)
        with suppress(ConnectionError):
            assert await soon(coming) in (b"lost, late or dead\n", b"")
        clients.append(another := await asyncio.open_connection("127.0.0.1", row))
        assert await echoed(another) == b"said\n"
    finally:
        for _, writer in clients:
            writer.close()
            with suppress(ConnectionError):
                await soon(writer.wait_closed())
        await doors.stop()
        for server in servers:
            server.close()
            await soon(server.wait_closed())


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def beats(*came: int, away: tuple[int, int] = (0, 0)) -> list[Beat]:
    """What a shard delivers that has something due every 100 ms from 0 to 10,000; nothing comes
    between the two moments ``away``, and all of it at the second one. ``came``: of no beat."""
    first, last = away
    due = range(0, 10_001, 100)
    results = [Beat(last if first < item < last else item, item) for item in due]
    return sorted([*results, *(Beat(item, AGAIN) for item in came)])


def longest(of_shard: Sequence[Beat], began_ms: int = 0, next_ms: int = AGAIN) -> tuple[int, int]:
    result = silences(of_shard, 0, began_ms, next_ms)
    return max(((item.until_ms - item.since_ms, item.since_ms) for item in result), default=(0, 0))


def test_a_silence_begins_at_a_missing_beat() -> None:
    assert longest(beats()) == (0, 0), "all came when it was due"
    assert longest(beats(away=(2_000, 3_450))) == (1_350, 2_100)
    assert longest(beats(2_500, away=(2_000, 3_450))) == (950, 2_500), "a redelivery is a delivery"
    paused = [Beat(1_000, 1_000), Beat(9_000, 9_000)]
    assert longest(paused) == (0, 0), "nothing was due meanwhile"
    assert longest([]) == (0, 0)


def test_a_silence_is_of_the_fault_that_began_with_it() -> None:
    of_shard = beats(away=(2_000, 3_450))
    assert longest(of_shard, 1_900, 5_000) == (1_350, 2_100)
    assert longest(of_shard, 2_250, 5_000) == (1_350, 2_100), "it began just before the fault"
    assert longest(of_shard, 2_400, 5_000) == (0, 0), "it had lasted since the one before"
    assert longest(of_shard, 1_000, 2_250) == (0, 0), "of the next one, which began just then"
    assert longest(of_shard, 1_000, 2_400) == (1_350, 2_100)
    assert longest(of_shard, 5_000, 9_000) == (0, 0)


KILLED = Bound("a killed node", ("kill",), 1.0)


def test_a_silence_after_the_last_fault_belongs_to_none() -> None:
    kill = Window("kill", 500, is_clean=True, ended_ms=1_000)
    silent = {0: beats(away=(2_000, 3_450))}
    for over_ms, seconds in ((5_000, 1.35), (1_500, 0.0)):
        timeline = Timeline([kill], over_ms)
        ((_, next_ms),) = timeline.ends()
        result = of_fault(silent, kill, next_ms)
        assert max((item.seconds for item in result), default=0.0) == seconds


def judged(windows: Sequence[Window], *shards: Sequence[Beat]) -> tuple[Judged, str]:
    timeline = Timeline(list(windows))
    (found,) = judge(timeline, dict(enumerate(shards)), [KILLED])
    return found, "\n".join(verdicts(timeline, [found]))


def test_a_gap_is_judged_per_fault() -> None:
    silent = beats(away=(2_000, 3_450))
    kill = Window("kill", 1_950, is_clean=True, ended_ms=3_600)
    found, said = judged([kill], beats(), silent)
    assert [(silence.shard, silence.seconds) for silence, _ in found.broken] == [(1, 1.35)]
    assert "broken by 0.35 s" in said
    assert "1.35 s of shard 1 at 00:00:02.100, by kill" in said
    short, said = judged([kill], beats(away=(2_000, 2_900)))
    assert not short.broken
    assert "held by 1 faults, longest 0.80 s of shard 0" in said
    none, said = judged([replace(kill, kind="freeze")], silent)
    assert (none.alone, none.mixed) == ([], [])
    assert "nothing to judge" in said


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (Window("redis kill", 2_500, is_clean=False, ended_ms=5_000), "beside redis kill"),
        (Window("redis kill", 1_000, is_clean=True, ended_ms=2_600), "beside redis kill"),
        (Window(BACK, 1_000, is_clean=True, ended_ms=2_600), f"beside {BACK}"),
    ],
)
def test_a_gap_with_another_fault_in_it_is_shown_and_not_judged(other: Window, shown: str) -> None:
    kill = Window("kill", 1_950, is_clean=True, ended_ms=2_400)
    windows = sorted((kill, other), key=lambda one: one.began_ms)
    found, said = judged(windows, beats(away=(2_000, 3_450)))
    assert not found.broken
    assert [silence.seconds for silence, _ in found.mixed] == [1.35]
    assert f"not judged, {shown}" in said


def test_a_gap_is_not_judged_while_shards_are_on_their_way() -> None:
    before = Window("drain", 500, is_clean=True, ended_ms=1_000)
    kill = Window("kill", 1_950, is_clean=False, ended_ms=3_600)
    found, said = judged([before, kill], beats(away=(2_000, 3_450)))
    assert not found.broken
    assert "beside shards on their way after drain" in said
    elsewhere = replace(before, began_ms=3_500, ended_ms=4_000)
    for next_one in (elsewhere, Window(BACK, 2_500, is_clean=True, ended_ms=5_000)):
        alone, _ = judged([replace(kill, is_clean=True), next_one], beats(away=(2_000, 3_450)))
        assert alone.broken, "the next fault began when all was over; the way back is of this one"
