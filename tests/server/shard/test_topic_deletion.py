"""The deletion of a topic: what is refused, what goes, in which steps, and over a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from support.store_rows import kept
from tickwheel.api.frames import FrameType as T
from tickwheel.model.kinds import GROUP
from tickwheel.server.shard.background import CHUNK

BIN = "going"
NOBODY = {"scheduled": 0, "ready": 0, "in_flight": 0, "waiting": 0, "dead": 0, "groups": 0}


def stall(daemon: InProcess, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Commits wait until it is set."""
    commit, gate = daemon.store.commit, asyncio.Event()

    async def when_open(*batch: Any) -> bool:
        await gate.wait()
        return await commit(*batch)

    monkeypatch.setattr(daemon.store, "commit", when_open)
    return gate


async def put(peer: Peer, *delays_ms: int, topic: str = BIN, **options: Any) -> list[int]:
    tasks = tuple((topic, b"x", delay_ms, options) for delay_ms in delays_ms)
    answer = await peer.enqueue(*tasks)
    assert answer[0] == T.OK, answer
    return list(answer[2][1])


async def words(peer: Peer, ids: list[int]) -> list[str]:
    return [task["state"] for task in await peer.do(T.LOOKUP, tuple(ids))]


async def of_every_kind(daemon: InProcess, peer: Peer) -> list[int]:
    """Tasks of the topic: scheduled, ready, in flight, waiting, dead, and with a key."""
    await peer.do(T.SUBSCRIBE, 1, BIN, "g", 3, None)
    ids = await put(peer, 0, 0, 0)
    await daemon.settle()
    epoch, leased = next((f[2], f[4]) for f in peer.frames() if f[0] == T.DELIVER)
    one, two, _ = ((item[0], epoch, item[1]) for item in leased)
    assert await peer.do(T.NACK, BIN, "g", ((*one, 9_000, None),)) == ("retrying",)
    assert await peer.do(T.REJECT, BIN, "g", ((*two, "bad"),)) == ("dead",)
    await peer.do(T.PREFETCH, 1, 0)
    ids += await put(peer, 0, 60_000)
    ids += await put(peer, 30_000, key="k")
    await peer.do(T.GROUP_CREATE, BIN, "other", {"since": "first"})
    await daemon.settle()
    return ids


# --- what is refused -----------------------------------------------------------------------------


async def test_deleting_a_topic_with_tasks_needs_force(daemon: InProcess) -> None:
    peer = daemon.connect()
    ids = await of_every_kind(daemon, peer)
    before = await words(peer, ids)
    code, message = await peer.refused(T.TOPIC_DELETE, BIN, False)
    assert code == "conflict"
    # The other group is owed all four that came due.
    assert "2 scheduled, 5 ready, 1 in_flight, 1 waiting, 1 dead and has 1 subscribers" in message
    assert await words(peer, ids) == before
    daemon.recount()


@pytest.mark.parametrize("staged", [True, False])
async def test_one_scheduled_task_refuses_the_deletion(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    peer = daemon.connect()
    if staged:
        gate = stall(daemon, monkeypatch)
        peer.send(T.ENQUEUE, peer.request + 1, ((BIN, b"", 60_000),))
    else:
        await put(peer, 60_000)
    code, message = await peer.refused(T.TOPIC_DELETE, BIN, False)
    if staged:
        gate.set()
    assert (code, "1 scheduled" in message) == ("conflict", True)


@pytest.mark.parametrize("options", [None, {"broadcast": True}])
async def test_a_subscriber_refuses_the_deletion(daemon: InProcess, options: Any) -> None:
    peer = daemon.connect()
    await peer.do(T.SUBSCRIBE, 1, BIN, None, 3, options)
    code, message = await peer.refused(T.TOPIC_DELETE, BIN, False)
    assert (code, "has 1 subscribers" in message) == ("conflict", True)


@pytest.mark.parametrize("force", [False, True])
async def test_a_schedule_of_the_topic_refuses_the_deletion(daemon: InProcess, force: bool) -> None:
    peer = daemon.connect()
    await peer.do(T.SCHEDULE_PUT, "nightly", {"topic": BIN, "every_ms": 60_000})
    await peer.do(T.SCHEDULE_PUT, "elsewhere", {"topic": "t", "every_ms": 60_000})
    await peer.do(T.GROUP_CREATE, BIN, "g", None)
    code, message = await peer.refused(T.TOPIC_DELETE, BIN, force)
    assert code == "conflict"
    assert message == "schedules enqueue to topic going: nightly; delete them first"
    await peer.do(T.SCHEDULE, "nightly", "delete", None)
    assert await peer.do(T.TOPIC_DELETE, BIN, force) == NOBODY | {"groups": 1}


async def test_a_topic_being_deleted_accepts_no_tasks(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = daemon.connect(session=b"s" * 16), daemon.connect()
    await put(peer, *([60_000] * (CHUNK + 1)))
    await put(peer, 0, topic="t")
    wanted = (
        (T.ENQUEUE, 1, ((BIN, b"", 0),)),
        (T.ENQUEUE, 1, ((BIN, b"", 0, {"key": "k", "if_pending": {"action": "keep"}}),)),
        (T.ENQUEUE_COLUMNS, 1, BIN, (b"",), 0),
        (T.SUBSCRIBE, 2, BIN, "g", 1, None),
        (T.SUBSCRIBE, 3, BIN, None, 1, {"broadcast": True}),
        (T.PULL, BIN, "g", 1, 0, None),
        (T.GROUP_CREATE, BIN, "g", None),
        (T.CONFIGURE, BIN, None, {"paused": True}),
        (T.SCHEDULE_PUT, "s", {"topic": BIN, "every_ms": 60_000}),
        (T.TOPIC_DELETE, BIN, True),
    )
    gate = stall(daemon, monkeypatch)
    asked = other.send(T.TOPIC_DELETE, BIN, True)
    await daemon.turn()
    requests = [peer.send(kind, *fields) for kind, *fields in wanted]
    fine = peer.send(T.ENQUEUE, 1, (("t", b"", 0),))
    for request in requests:
        answer = await peer.answer(request)
        assert answer[2:] == ("refused", "topic going is being deleted; try again soon"), answer
    gate.set()
    assert (await peer.answer(fine))[0] == T.OK
    assert (await other.answer(asked))[2] == NOBODY | {"scheduled": CHUNK + 1}
    await daemon.settle()
    daemon.recount()
    assert len(await put(peer, 0)) == 1, "and then it is there again, a new one"


# --- what goes -----------------------------------------------------------------------------------


async def test_a_forced_deletion_ends_only_the_topics_tasks(daemon: InProcess) -> None:
    peer = daemon.connect()
    ids = await of_every_kind(daemon, peer)
    stays = await put(peer, 0, 60_000, topic="t")
    rule = {"action": "keep"}
    await peer.do(T.CONFIGURE, BIN, None, {"rate": 5, "retry": "none", "if_pending": rule})
    held = await peer.do(T.TOPIC_DELETE, BIN, True)
    assert held == {
        "scheduled": 2, "ready": 5, "in_flight": 1, "waiting": 1, "dead": 1, "groups": 2,
    }  # fmt: skip
    await daemon.settle()
    assert (T.ENDED, 1, "not_found", "group g of topic going was deleted") in peer.kept
    assert await words(peer, ids) == ["deleted"] * len(ids)
    assert await words(peer, stays) == ["ready", "scheduled"]
    assert await peer.do(T.DEAD_LIST, None) == {"dead": (), "next": None}
    assert BIN not in (await peer.do(T.STATS))["topics"]
    assert not any(topic == BIN for topic, _ in kept(daemon.store, GROUP))
    assert await peer.do(T.CANCEL, None, {"topic": BIN, "key": "k"}) == ((ids[-1], "deleted"),)
    daemon.recount()
    await put(peer, 0, key="k")
    fresh = (await peer.do(T.STATS))["topics"][BIN]
    assert (fresh["rate"], fresh["retry"], fresh["groups"]) == (None, None, {})
    assert "if_pending" not in fresh


async def test_deleting_a_topic_without_groups_ends_its_backlog(daemon: InProcess) -> None:
    peer, listener = daemon.connect(), daemon.connect()
    await listener.do(T.SUBSCRIBE, 4, BIN, None, 1, {"broadcast": True})
    ids = await put(peer, *([0] * (2 * CHUNK + 1)))
    await daemon.settle()
    held = await peer.do(T.TOPIC_DELETE, BIN, True)
    assert held == NOBODY | {"ready": len(ids)}
    await daemon.settle()
    assert listener.frames()[-1] == (T.ENDED, 4, "not_found", "topic going was deleted")
    assert set(await words(peer, ids)) == {"deleted"}
    daemon.recount()


async def test_an_empty_topic_is_deleted_at_once(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.CONFIGURE, BIN, None, {"paused": True})
    assert await peer.do(T.TOPIC_DELETE, BIN, False) == NOBODY
    await daemon.settle()
    assert BIN not in daemon.shard.core.topics
    assert kept(daemon.store, GROUP) == {}


async def test_deleting_a_topic_answers_waiting_pulls(daemon: InProcess) -> None:
    peer, other = daemon.connect(), daemon.connect()
    waiting = peer.send(T.PULL, BIN, "g", 1, 60_000, None)
    await daemon.turn()
    await other.do(T.TOPIC_DELETE, BIN, True)
    assert (await peer.answer(waiting))[2] == "not_found"


# --- over a crash --------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 5, 10, 20, 40])
async def test_a_deletion_resumes_after_a_restart(tmp_path: Path, turns: int) -> None:
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        ids = await of_every_kind(daemon, peer)
        ids += await put(peer, *([60_000] * 3 * CHUNK))
        await peer.do(T.CONFIGURE, BIN, None, {"rate": 5})
        await peer.do(T.TOPIC_DELETE, BIN, True)
        for _ in range(turns):
            await asyncio.sleep(0)
        store = daemon.store.copy()  # as a crash leaves it
    async with InProcess(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        await daemon.settle()
        assert set(await words(peer, ids)) == {"deleted"}
        assert BIN not in (await peer.do(T.STATS))["topics"]
        assert kept(store, GROUP) == {}
        daemon.recount()


async def test_a_group_keeps_its_tasks_while_a_start_loads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without force, it is not deleted for counts that lack tasks due before the start."""
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        await peer.do(T.GROUP_CREATE, BIN, "g", None)
        await put(peer, 0, 60_000)
        await daemon.settle()
        store = daemon.store
    gate, read_some = asyncio.Event(), store.read_some

    async def when_open(*given: Any) -> Any:
        await gate.wait()
        return await read_some(*given)

    monkeypatch.setattr(store, "read_some", when_open)
    for ready, now_ms in ((1, NOW_MS), (2, NOW_MS + 90_000)):
        gate.clear()
        async with InProcess(tmp_path, store=store, now_ms=now_ms) as daemon:
            peer = daemon.connect()
            code, message = await peer.refused(T.GROUP_DELETE, BIN, "g", False)
            assert code == "refused" and "use force" in message
            gate.set()
            await daemon.settle()
            code, message = await peer.refused(T.GROUP_DELETE, BIN, "g", False)
            assert code == "conflict" and f"holds {ready} ready" in message
