"""How far groups were behind: what is remembered of it, for how long, of how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.server.metrics.observed import Lateness
from tickwheel.server.shard import background
from tickwheel.server.shard.background import RECENT_SAMPLES, SAMPLE_S, SAMPLES, Lags

STEP_MS = SAMPLE_S * 1000
HOUR = SAMPLES
LEASE_MS = 10 * 3_600_000


class Watched:
    """A daemon, and samples that are taken when a test says so."""

    def __init__(self, daemon: InProcess) -> None:
        self.daemon = daemon
        self.peer: Peer = daemon.connect()
        self.lateness = Lateness()
        self.lags = Lags(daemon.shard.core, daemon.shard.clock, self.lateness)

    async def group(self, name: str) -> None:
        assert (await self.peer.call(T.GROUP_CREATE, "t", name, None))[0] == T.OK

    async def enqueue(self, count: int) -> None:
        assert (await self.peer.enqueue(*(("t", b"", 0) for _ in range(count))))[0] == T.OK
        await self.daemon.settle()

    async def take_all(self, group: str) -> None:
        """Somebody has them from now on."""
        answer = await self.peer.call(T.PULL, "t", group, 1000, 0, {"lease_ms": LEASE_MS})
        assert answer[0] == T.OK, answer
        await self.daemon.settle()

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.daemon.pass_time(STEP_MS)
            await self.lags.look()

    def of(self, name: str) -> dict[str, Any]:
        group = self.daemon.shard.core.find_group("t", name)
        assert group is not None
        return self.lags.of(group)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with InProcess(tmp_path) as daemon:
        yield Watched(daemon)


async def test_lag_samples_have_ready_count_and_oldest_age(watched: Watched) -> None:
    await watched.group("g")
    await watched.look()
    await watched.enqueue(3)
    await watched.look()
    await watched.enqueue(1)
    await watched.look()
    await watched.take_all("g")
    await watched.look()
    result = watched.of("g")
    assert result["every_ms"] == STEP_MS
    assert result["taken_ms"] == [NOW_MS + number * STEP_MS for number in (1, 2, 3, 4)]
    assert result["ready"] == [0, 3, 4, 0]
    assert result["oldest_ready_ms"] == [0, STEP_MS, 2 * STEP_MS, 0]


async def test_lag_samples_cover_an_hour_newest_last(watched: Watched) -> None:
    await watched.group("g")
    await watched.enqueue(1)
    await watched.look(HOUR + 7)
    result = watched.of("g")
    assert {len(result[name]) for name in ("taken_ms", "ready", "oldest_ready_ms")} == {SAMPLES}
    assert result["oldest_ready_ms"] == [n * STEP_MS for n in range(8, HOUR + 8)]
    assert result["taken_ms"] == [NOW_MS + n * STEP_MS for n in range(8, HOUR + 8)]


async def test_a_group_without_lag_stores_no_samples(watched: Watched) -> None:
    await watched.group("g")
    await watched.look(3)
    assert watched.lags._samples == {}
    assert watched.of("g")["ready"] == [0, 0, 0]
    await watched.enqueue(1)
    await watched.look()
    await watched.take_all("g")
    await watched.look(HOUR - 1)
    assert watched.of("g")["ready"] == [1] + [0] * (HOUR - 1)
    await watched.look()
    assert watched.lags._samples == {}
    assert watched.of("g")["ready"] == [0] * HOUR


async def test_groups_with_samples_are_limited(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "GROUPS_KEPT_MAX", 2)
    for name in ("a", "b"):
        await watched.group(name)
    await watched.enqueue(1)
    await watched.look(2)
    assert [watched.of(name)["ready"] for name in "ab"] == [[1, 1]] * 2
    await watched.group("c")
    await watched.enqueue(1)
    await watched.look()
    assert len(watched.lags._samples) == 2
    assert [watched.of(name)["ready"] for name in "ab"] == [[1, 1, 2]] * 2
    assert watched.of("c")["ready"] == [None, None, None], "never 0: it is not known"
    await watched.take_all("c")
    await watched.look()
    assert watched.of("c")["oldest_ready_ms"] == [None, None, None, 0]


async def test_a_deleted_group_makes_room(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "GROUPS_KEPT_MAX", 1)
    await watched.group("a")
    await watched.enqueue(1)
    await watched.look()
    assert (await watched.peer.call(T.GROUP_DELETE, "t", "a", True))[0] == T.OK
    await watched.daemon.settle()
    await watched.group("b")
    await watched.enqueue(1)
    await watched.look(2)
    assert watched.of("b")["ready"] == [None, None, 1]


async def test_a_sample_is_seen_when_it_is_whole(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SAMPLED_AT_A_TIME", 1)
    for name in ("a", "b"):
        await watched.group(name)
    await watched.enqueue(1)
    await watched.look(HOUR)
    before = [watched.of(name) for name in "ab"]
    looking = asyncio.create_task(watched.lags.look())
    await asyncio.sleep(0)
    assert not looking.done()
    assert [watched.of(name) for name in "ab"] == before
    await looking
    assert watched.of("a") != before[0]


async def test_lateness_is_recent_for_a_minute(watched: Watched) -> None:
    """However seldom somebody asks: what was late an hour ago is not late now."""
    assert watched.lags.recent_lateness()["recent_count"] == 0
    await watched.look()
    watched.lateness.note("t", [500, 500])
    recent = watched.lags.recent_lateness()
    assert (recent["recent_count"], recent["recent_p99_ms"]) == (2, 500)
    await watched.look(RECENT_SAMPLES - 1)
    assert watched.lags.recent_lateness()["recent_count"] == 2
    await watched.look()
    assert set(watched.lags.recent_lateness().values()) == {0}
    assert watched.lateness.summary()["p99_ms"] == 500
