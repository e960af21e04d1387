"""Topics for broadcasts only: what comes due ends, and nothing waits for a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.shard.test_topic_deletion import words
from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.server.shard.background import CHUNK

ALONE = {"broadcast_only": True}


async def put(daemon: InProcess, peer: Peer, *delays_ms: int, topic: str = "t") -> list[int]:
    tasks = tuple((topic, b"x", delay_ms, {"ttl_ms": 60_000}) for delay_ms in delays_ms)
    answer = await peer.enqueue(*tasks)
    assert answer[0] == T.OK, answer
    await daemon.settle()
    return list(answer[2][1])


async def topic(peer: Peer) -> dict[str, Any]:
    result: dict[str, Any] = (await peer.do(T.STATS))["topics"]["t"]
    return result


@pytest.mark.parametrize("listeners", [0, 1, 2])
async def test_due_tasks_of_a_broadcast_only_topic_are_broadcast_and_end(
    daemon: InProcess, listeners: int
) -> None:
    peer = daemon.connect()
    heard = [daemon.connect() for _ in range(listeners)]
    for element in heard:
        await element.do(T.SUBSCRIBE, 1, "t", None, 1, {"broadcast": True})
    assert (await peer.do(T.CONFIGURE, "t", None, ALONE))["broadcast_only"] is True
    now, later = await put(daemon, peer, 0, 5_000)
    assert await words(peer, [now, later]) == ["expired", "scheduled"]
    daemon.pass_time(5_000)
    await daemon.settle()
    assert await words(peer, [now, later]) == ["expired", "expired"]
    for element in heard:
        results = [
            item[0] for frame in element.frames() if frame[0] == T.DELIVER for item in frame[4]
        ]
        assert results == [now, later]
    counts = await topic(peer)
    assert (counts["ready"], counts["scheduled"], counts["oldest_ready_ms"]) == (0, 0, 0)
    assert counts["broadcast_only"] is True
    assert daemon.store._tasks == {}
    daemon.recount()


async def test_broadcast_only_ends_the_waiting_backlog(daemon: InProcess) -> None:
    peer = daemon.connect()
    ids = await put(daemon, peer, *([0] * (CHUNK + 1)))
    (later,) = await put(daemon, peer, 5_000)
    assert (await topic(peer))["ready"] == CHUNK + 1
    await peer.do(T.CONFIGURE, "t", None, ALONE)
    while (await topic(peer))["ready"]:
        await daemon.settle()
    assert set(await words(peer, ids)) == {"expired"}
    assert await words(peer, [later]) == ["scheduled"]
    daemon.recount()


async def test_a_broadcast_only_topic_has_no_groups(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.CONFIGURE, "t", None, ALONE)
    for kind, *fields in (
        (T.GROUP_CREATE, "t", "g", None),
        (T.SUBSCRIBE, 1, "t", "g", 1, None),
        (T.PULL, "t", "g", 1, 0, None),
    ):
        code, message = await peer.refused(kind, *fields)
        assert (code, "t is for broadcasts only" in message) == ("conflict", True)
    await peer.do(T.GROUP_CREATE, "u", "g", None)
    code, message = await peer.refused(T.CONFIGURE, "u", None, ALONE)
    assert (code, "u has 1 groups" in message) == ("conflict", True)
    assert (await peer.refused(T.CONFIGURE, "u", "g", ALONE))[0] == "bad_request"
    assert (await peer.refused(T.GROUP_CREATE, "u", "h", ALONE))[0] == "bad_request"
    assert (await peer.refused(T.CONFIGURE, "t", None, {"broadcast_only": 1}))[0] == "bad_request"


async def test_broadcast_only_survives_a_restart_and_can_be_unset(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        ids = await put(daemon, peer, 5_000)
        await peer.do(T.CONFIGURE, "t", None, ALONE)
        store = daemon.store.copy()
    now_ms = daemon.sources.now_ms + 6_000
    async with InProcess(tmp_path, store=store, now_ms=now_ms) as daemon:
        peer = daemon.connect()
        await daemon.settle()
        assert await words(peer, ids) == ["expired"]
        settings = await peer.do(T.CONFIGURE, "t", None, {"broadcast_only": False})
        assert "broadcast_only" not in settings
        ids = await put(daemon, peer, 0)
        assert await words(peer, ids) == ["ready"]
        await peer.do(T.GROUP_CREATE, "t", "g", None)
        daemon.recount()


async def test_ending_the_backlog_resumes_after_a_crash(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        ids = await put(daemon, peer, *([0] * (2 * CHUNK)))
        await peer.do(T.CONFIGURE, "t", None, ALONE)
        store = daemon.store.copy()
    async with InProcess(tmp_path, store=store, now_ms=daemon.sources.now_ms) as daemon:
        peer = daemon.connect()
        while (await topic(peer))["ready"] or (await topic(peer))["scheduled"]:
            await daemon.settle()
        assert set(await words(peer, ids)) == {"expired"}
        daemon.recount()
