"""Spreading what is pending: at once by ids and by key, all that matches as a bulk operation; what
it leaves, what it refuses, how it goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.shard.test_bulk import TURNS_MAX, done, ended, put, tried
from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from support.waiting import counted_turns
from tickwheel.api.frames import FrameType as T
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import bulk as bulks

HOUR_MS, MINUTE_MS = 3_600_000, 60_000
START_MS = NOW_MS + HOUR_MS
KEY = {"topic": "t", "key": "k"}


async def dues(peer: Peer, ids: list[int]) -> list[int]:
    return [task["due_ms"] for task in await peer.do(T.LOOKUP, tuple(ids))]


def heaviest(dues_ms: list[int]) -> int:
    return max(Counter(due_ms // 1_000 for due_ms in dues_ms).values())


async def test_tasks_matching_a_filter_are_spread(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    crowd = [await put(peer, tag="crowd") for _ in range(120)]
    other = await put(peer, tag="other")
    now = [await put(peer, 0, tag="crowd") for _ in range(2)]
    await peer.do(T.PULL, "t", "g", 1, 0, None)
    asked = {"tags": "crowd", "within_ms": MINUTE_MS}
    wanted = await tried(peer, "spread", **asked)
    assert (wanted["matched"], wanted["refused"]) == (122, {"in_flight": 1, "ready": 1})
    result = await done(peer, "spread", **asked)
    assert (result["matched"], result["changed"]) == (122, 120)
    assert result["refused"] == {"in_flight": 1, "ready": 1}
    assert result["arguments"] == {"within_ms": MINUTE_MS}
    moved = await dues(peer, crowd)
    assert all(START_MS <= due_ms < START_MS + MINUTE_MS for due_ms in moved)
    assert heaviest(moved) <= 3, "of 120 that one tick had, over 60"
    assert await dues(peer, [other, *now]) == [START_MS, NOW_MS, NOW_MS]


async def test_tasks_are_spread_by_ids_and_by_key(daemon: InProcess) -> None:
    peer = daemon.connect()
    ids = [await put(peer, key="k") for _ in range(20)]
    answer = await peer.do(T.SPREAD, tuple(ids), {"within_ms": 10_000})
    assert [(one, word) for one, word, _ in answer] == [(task_id, "scheduled") for task_id in ids]
    moved = await dues(peer, ids)
    assert moved == [due_ms for *_, due_ms in answer]
    assert all(START_MS <= due_ms < START_MS + 10_000 for due_ms in moved)
    assert heaviest(moved) <= 3
    start_ms = START_MS - HOUR_MS // 2
    window = {"start_ms": start_ms, "end_ms": start_ms + 20_000}
    answer = await peer.do(T.SPREAD, None, {**KEY, **window})
    moved = await dues(peer, ids)
    assert moved == [due_ms for *_, due_ms in answer]
    assert all(start_ms <= due_ms < start_ms + 20_000 for due_ms in moved), "earlier than it was"
    assert heaviest(moved) == 1
    assert await peer.do(T.SPREAD, (5,), {"within_ms": 1}) == ((5, "unknown"),)
    await peer.do(T.CANCEL, tuple(ids))
    assert await peer.do(T.SPREAD, None, {**KEY, **window}) == ((ids[-1], "already_cancelled"),)


async def test_a_long_spread_yields_between_its_parts(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick is looked for, for each task: that must not hold everybody up."""
    peer, steps, choose = daemon.connect(), list[int](), daemon.shard.core.windows.choose
    ids = [await put(peer) for _ in range(25)]
    monkeypatch.setattr("tickwheel.server.shard.tasks.TASKS_PER_STEP_MAX", {"spread": 10})

    def chosen(asked_ms: int, end_ms: int, count: int, now_ms: int) -> list[int]:
        steps.extend([turns[0]] * count)
        return choose(asked_ms, end_ms, count, now_ms)

    monkeypatch.setattr(daemon.shard.core.windows, "choose", chosen)
    with counted_turns() as turns:
        answer = await peer.do(T.SPREAD, tuple(ids), {"within_ms": 60_000})
    assert [one for one, *_ in answer] == ids
    assert sorted(Counter(steps).values()) == [5, 10, 10]


async def test_a_spread_resumes_after_a_restart_and_moves_each_task_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "PAGE", 10)
    store = MemoryStore()
    async with InProcess(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        ids = [await put(peer) for _ in range(60)]
        await peer.do(T.BULK_MAKE, "t", "spread", {"within_ms": MINUTE_MS, "id": "s"})
        for _ in range(TURNS_MAX):
            result = await peer.do(T.BULK, "s", "show")
            if result["changed"] >= 20:
                break
            await asyncio.sleep(0)
        assert result["state"] == "running" and 20 <= result["changed"] < 60
        half = store.copy()
        first = (await dues(peer, ids))[:20]
    async with InProcess(tmp_path, store=half) as daemon:
        peer = daemon.connect()
        result = await ended(peer, "s")
        assert (result["looked_at"], result["changed"], result["refused"]) == (60, 60, {})
        moved = await dues(peer, ids)
        assert moved[:20] == first, "what was moved before stays where it is"
        assert all(START_MS <= due_ms < START_MS + MINUTE_MS for due_ms in moved)
        assert heaviest(moved) <= 2
        daemon.recount()


@pytest.mark.parametrize(
    ("window", "code", "says"),
    [
        ({}, "bad_request", "within_ms, or start_ms and end_ms"),
        ({"within_ms": 5, "end_ms": 9}, "bad_request", "within_ms, or start_ms and end_ms"),
        ({"end_ms": NOW_MS}, "bad_request", "within_ms, or start_ms and end_ms"),
        ({"start_ms": NOW_MS, "end_ms": NOW_MS}, "bad_request", "within_ms must be"),
        ({"start_ms": NOW_MS + 5, "end_ms": NOW_MS}, "bad_request", "within_ms must be"),
        ({"within_ms": 0}, "bad_request", "within_ms must be"),
        ({"within_ms": "10m"}, "bad_request", "within_ms must be"),
        ({"within_ms": 86_400_001}, "limit_exceeded", "the limit is 86400000 (within_ms_max)"),
        (
            {"start_ms": NOW_MS, "end_ms": NOW_MS + 86_400_001},
            "limit_exceeded",
            "the limit is 86400000 (within_ms_max)",
        ),
        ({"start_ms": NOW_MS + 10**14, "within_ms": 5}, "due_too_far", "limit"),
    ],
)
async def test_an_invalid_spread_window_is_refused(
    daemon: InProcess, window: dict[str, Any], code: str, says: str
) -> None:
    peer = daemon.connect()
    task_id = await put(peer)
    for frame in ((T.SPREAD, (task_id,), window), (T.BULK_MAKE, "t", "spread", window)):
        refusal = await peer.refused(*frame)
        assert refusal[0] == code and says in refusal[1], refusal
    assert await dues(peer, [task_id]) == [START_MS]


async def test_a_window_at_its_limit_is_accepted(daemon: InProcess) -> None:
    peer = daemon.connect()
    task_id = await put(peer)
    window = {"start_ms": START_MS, "end_ms": START_MS + 86_400_000}
    ((_, word, due_ms),) = await peer.do(T.SPREAD, (task_id,), window)
    assert word == "scheduled" and START_MS <= due_ms < START_MS + 86_400_000
