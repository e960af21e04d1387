"""Keys that an operator pauses and resumes, over the wire."""

from __future__ import annotations

from typing import Any

import pytest

from server.shard.test_lining import fail, later, pull, put
from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.limits import PAUSED_KEYS_MAX, Limits

SHARED = {"fair_by": "tenant", "order_failure": "hold", "order_attempts": 1}


def of_tenant(name: Any) -> dict[str, Any]:
    return {"properties": {"tenant": name}}


async def got(peer: Peer) -> list[int]:
    return [task_id for task_id, _ in (await pull(peer))[1]]


def deliveries(peer: Peer) -> list[Any]:
    return [item for frame in peer.frames() if frame[0] == T.DELIVER for item in frame[4]]


@pytest.mark.parametrize("named", [("a", None), (None, "acme"), (None, 7), (None, True)])
async def test_a_key_is_paused_and_resumed(daemon: InProcess, named: tuple[Any, Any]) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    since_ms, options = daemon.sources.now_ms, of_tenant(named[1])
    if named[0] is not None:
        options = {"order_key": named[0]}
    fields = {"paused": True, "since_ms": since_ms, "by": "anonymous"}
    assert await peer.do(T.PAUSE_KEY, "t", "g", *named) == fields | {"changed": True}
    first, other = await put(daemon, peer, options, {"order_key": "other"})
    await later(daemon, 5_000)
    assert await peer.do(T.PAUSE_KEY, "t", "g", *named) == fields | {"changed": False}
    assert await got(peer) == [other]
    daemon.recount()
    over = fields | {"paused": False, "changed": True}
    assert await peer.do(T.RESUME_KEY, "t", "g", *named) == over
    await daemon.settle()
    assert await got(peer) == [first]
    nothing = {"paused": False, "changed": False, "since_ms": None, "by": None}
    assert await peer.do(T.RESUME_KEY, "t", "g", *named) == nothing
    daemon.recount()


async def test_resuming_a_key_delivers_its_waiting_tasks(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    await peer.do(T.PAUSE_KEY, "t", "g", "a", None)
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 100, None)
    await put(daemon, peer, {"order_key": "a"})
    assert deliveries(peer) == []
    await peer.do(T.RESUME_KEY, "t", "g", "a", None)
    await daemon.settle()
    assert len(deliveries(peer)) == 1


async def test_a_held_key_may_be_paused_as_well(daemon: InProcess) -> None:
    """To try its task again, or to give it up, is not to resume the key."""
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    first, second = await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"})
    assert await fail(daemon, peer) == [first]
    await peer.do(T.PAUSE_KEY, "t", "g", "a", None)
    assert await peer.do(T.RELEASE_KEY, "t", "g", None, "a") == ((first, "released"),)
    await daemon.settle()
    assert await got(peer) == []
    for kind in (T.RELEASE_KEY, T.SKIP_KEY):
        assert await peer.do(kind, "t", "g", None, "a") == ((None, "not_held"),)
    await peer.do(T.RESUME_KEY, "t", "g", "a", None)
    await daemon.settle()
    assert await got(peer) == [first]
    assert (await peer.do(T.HELD_KEYS, "t", "g", None))["held"] == 0
    assert second > first


async def test_paused_keys_show_by_whom_and_since_when(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    since_ms = daemon.sources.now_ms
    await peer.do(T.PAUSE_KEY, "t", "g", "a", None)
    await later(daemon, 5_000)
    await peer.do(T.PAUSE_KEY, "t", "g", None, 7)
    await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"}, of_tenant(7), of_tenant("7"))
    assert len(await got(peer)) == 1
    fields = {"by": "anonymous"}
    first = {"kind": "order", "value": "a", "since_ms": since_ms, "waiting": 2, **fields}
    second = {"kind": "fair", "value": 7, "since_ms": since_ms + 5_000, "waiting": 1, **fields}
    answer = await peer.do(T.HELD_KEYS, "t", "g", None)
    assert answer == {"keys": (), "held": 0, "paused": (first, second)}
    assert (await peer.do(T.HELD_KEYS, "t", "g", {"limit": 1}))["paused"] == (first,)
    group = (await peer.do(T.STATS))["topics"]["t"]["groups"]["g"]
    assert (group["held"], group["paused_keys"], group["in_lines"]) == (0, 2, 3)
    lines = (await peer.do(T.KEY_LINES, "t", "g", None))["lines"]
    assert {(line["value"], line["state"]) for line in lines} == {("a", "paused"), (7, "paused")}


async def test_paused_keys_are_cut_to_the_frame_limit(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    for number in range(20):
        await peer.do(T.PAUSE_KEY, "t", "g", None, f"{number}" + "v" * 4_000)
    assert len((await peer.do(T.HELD_KEYS, "t", "g", None))["paused"]) == 20
    monkeypatch.setattr(daemon.shard, "limits", Limits(frame_bytes_max=100_000))
    assert 4 < len((await peer.do(T.HELD_KEYS, "t", "g", None))["paused"]) < 7


async def test_paused_keys_of_a_group_are_limited(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Limits().paused_keys_max == PAUSED_KEYS_MAX
    monkeypatch.setattr(daemon.shard, "limits", Limits(paused_keys_max=2))
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", SHARED)
    await peer.do(T.GROUP_CREATE, "t", "other", SHARED)
    await peer.do(T.PAUSE_KEY, "t", "g", "a", None)
    await peer.do(T.PAUSE_KEY, "t", "g", None, "acme")
    code, message = await peer.refused(T.PAUSE_KEY, "t", "g", "b", None)
    assert code == "limit_exceeded" and "the limit is 2 (paused_keys_max)" in message
    assert (await peer.do(T.PAUSE_KEY, "t", "g", "a", None))["paused"]
    assert (await peer.do(T.PAUSE_KEY, "t", "other", "b", None))["paused"]
    await peer.do(T.RESUME_KEY, "t", "g", "a", None)
    assert (await peer.do(T.PAUSE_KEY, "t", "g", "b", None))["paused"]
    daemon.recount()
