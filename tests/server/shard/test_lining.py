"""Held keys and lines as operators see them, and what they do about them, over the wire."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from server.shard.test_filters import put
from support.in_process import InProcess
from support.shard_rig import Peer
from support.waiting import counted_turns
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.tasks import KeyControl
from tickwheel.server.shard import reads

HOLD = {"order_failure": "hold", "order_attempts": 1}


async def later(daemon: InProcess, ms: int) -> None:
    daemon.pass_time(ms)
    daemon.shard.wake()
    await daemon.settle()


async def pull(peer: Peer, count: int = 100) -> tuple[int, list[tuple[int, int]]]:
    epoch, _, items = await peer.do(T.PULL, "t", "g", count, 0, None)
    return epoch, [(item[0], item[1]) for item in items]


async def fail(daemon: InProcess, peer: Peer, reason: str = "why") -> list[int]:
    """Every task that can be had is nacked; their ids."""
    epoch, items = await pull(peer)
    nacks = tuple((task_id, epoch, attempt, None, reason) for task_id, attempt in items)
    await peer.do(T.NACK, "t", "g", nacks)
    await daemon.settle()
    return [task_id for task_id, _ in items]


async def held_up(daemon: InProcess, peer: Peer) -> list[int]:
    """Two tasks of key a, the first of which is held, and one of b, held as well."""
    await peer.do(T.GROUP_CREATE, "t", "g", HOLD)
    ids = await put(daemon, peer, *({"order_key": key} for key in ("a", "a", "b")))
    assert await fail(daemon, peer) == [ids[0], ids[2]]
    return ids


async def test_held_keys_are_shown_with_their_reason_and_age(daemon: InProcess) -> None:
    peer = daemon.connect()
    first, _, other = await held_up(daemon, peer)
    since_ms = daemon.sources.now_ms
    await later(daemon, 5_000)
    answer = await peer.do(T.HELD_KEYS, "t", "g", None)
    assert answer["held"] == 2
    name = answer["keys"][0]["subscriber"]
    shown = {"since_ms": since_ms, "attempt": 1, "reason": "why", "subscriber": name}
    assert list(answer["keys"]) == [
        {"id": first, "key": "a", "waiting": 1, **shown},
        {"id": other, "key": "b", "waiting": 0, **shown},
    ]
    assert len((await peer.do(T.HELD_KEYS, "t", "g", {"limit": 1}))["keys"]) == 1
    group = (await peer.do(T.STATS))["topics"]["t"]["groups"]["g"]
    assert (group["held"], group["in_lines"], group["ready"]) == (2, 1, 1)
    (task,) = await peer.do(T.LOOKUP, (first,))
    assert task["groups"]["g"]["state"] == "held"
    daemon.recount()


@pytest.mark.parametrize("by_key", [False, True])
async def test_a_held_key_is_released_or_skipped(daemon: InProcess, by_key: bool) -> None:
    peer = daemon.connect()
    first, second, other = await held_up(daemon, peer)
    await later(daemon, 9_000)
    assert (await pull(peer))[1] == []

    def which(task_id: int, key: str) -> tuple[Any, Any]:
        return (None, key) if by_key else ((task_id,), None)

    assert await peer.do(T.RELEASE_KEY, "t", "g", *which(first, "a")) == ((first, "released"),)
    assert await peer.do(T.SKIP_KEY, "t", "g", *which(other, "b")) == ((other, "skipped"),)
    await daemon.settle()
    again = None if by_key else first
    assert await peer.do(T.RELEASE_KEY, "t", "g", *which(first, "a")) == ((again, "not_held"),)
    epoch, items = await pull(peer)
    assert items == [(first, 2)]
    dead = (await peer.do(T.DEAD_LIST, {}))["dead"]
    assert [(letter["id"], letter["reason"]) for letter in dead] == [
        (other, "skipped: its key was held")
    ]
    assert await peer.do(T.ACK, "t", "g", epoch, (first,), (1,)) == ("stale",)
    assert await peer.do(T.ACK, "t", "g", epoch, (first,), (2,)) is None
    await daemon.settle()
    assert (await pull(peer))[1] == [(second, 1)]
    assert await peer.do(T.HELD_KEYS, "t", "g", None) == {"keys": (), "held": 0, "paused": ()}
    daemon.recount()


async def test_listings_of_keys_per_step_are_limited(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", HOLD)
    await put(daemon, peer, *({"order_key": str(n)} for n in range(10) for _ in range(2)))
    monkeypatch.setattr(reads, "IDS_PER_READ_MAX", 20)
    steps, listed = Counter[int](), KeyControl.longest_queues

    def longest(*args: Any) -> Any:
        steps[turns[0]] += 1
        return listed(*args)

    monkeypatch.setattr(KeyControl, "longest_queues", longest)
    with counted_turns() as turns:
        answers = await daemon.send(peer, *[(T.KEY_LINES, "t", "g", {"limit": 1})] * 10)
    assert {len(answer[0]["lines"]) for answer in answers} == {1}
    assert sum(steps.values()) == 10 and max(steps.values()) == 2


@pytest.mark.parametrize("by_key", [False, True])
async def test_a_held_task_is_found_among_any_number(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch, by_key: bool
) -> None:
    peer = daemon.connect()
    _, _, newest = await held_up(daemon, peer)
    read, wanted = daemon.shard.reader.read_some, list[int]()

    def noted(ids: list[int], *limits: Any, **options: Any) -> Any:
        wanted.extend(ids)
        return read(ids, *limits, **options)

    monkeypatch.setattr(daemon.shard.reader, "read_some", noted)
    which = (None, "b") if by_key else ((newest,), None)
    assert await peer.do(T.RELEASE_KEY, "t", "g", *which) == ((newest, "released"),)
    assert set(wanted) == {newest}


async def test_nack_and_reject_answer_that_the_key_is_held(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", HOLD)
    one, other, plain = await put(daemon, peer, {"order_key": "a"}, {"order_key": "b"}, {})
    epoch, items = await pull(peer)
    attempts = dict(items)
    nacked = ((one, epoch, attempts[one], None, None),)
    assert await peer.do(T.NACK, "t", "g", nacked) == ("held",)
    rejected = tuple((i, epoch, attempts[i], None) for i in (other, plain))
    assert await peer.do(T.REJECT, "t", "g", rejected) == ("held", "dead")
    assert (await peer.do(T.HELD_KEYS, "t", "g", None))["held"] == 2


async def test_several_held_keys_are_named_by_task_ids(daemon: InProcess) -> None:
    peer = daemon.connect()
    first, second, other = await held_up(daemon, peer)
    answer = await peer.do(T.RELEASE_KEY, "t", "g", (other, second, 12345, first, other), None)
    assert answer == (
        (other, "released"), (second, "not_held"), (12345, "not_held"), (first, "released"),
        (other, "released"),
    )  # fmt: skip
    await daemon.settle()
    assert sorted((await pull(peer))[1]) == [(first, 2), (other, 2)]


async def test_lines_show_which_task_blocks_which(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", {"fair_by": "tenant", "limit_each": 1})
    tenants = (
        [{"properties": {"tenant": "acme"}}] * 3 + [{"properties": {"tenant": 7}}] * 2 + [{}] * 2
    )
    ids = await put(
        daemon, peer, *tenants, *[{"order_key": "a", "properties": {"tenant": "x"}}] * 2
    )
    assert len((await pull(peer))[1]) == 4
    answer = await peer.do(T.KEY_LINES, "t", "g", None)
    assert answer["waiting"] == 5
    lines = {(line["kind"], line["value"]): line for line in answer["lines"]}
    assert {named: (line["state"], line["in_flight"], line["waiting"])
            for named, line in lines.items()} == {
        ("fair", "acme"): ("limited", 1, 2), ("fair", 7): ("limited", 1, 1),
        ("fair", None): ("limited", 1, 1), ("order", "a"): ("in_flight", 1, 1),
    }  # fmt: skip
    assert answer["lines"][0]["value"] == "acme"
    assert {line["id"] for line in answer["lines"]} <= set(ids)
    assert len((await peer.do(T.KEY_LINES, "t", "g", {"limit": 2}))["lines"]) == 2
    daemon.recount()


async def test_order_lines_are_cut_to_the_frame_limit(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", {"fair_by": "tenant", "limit_each": 1})
    values = [{"properties": {"tenant": f"{n}" + "v" * 4000}} for n in range(60)]
    await put(daemon, peer, *values, *values)
    assert len((await pull(peer))[1]) == 60
    assert len((await peer.do(T.KEY_LINES, "t", "g", None))["lines"]) == 60
    monkeypatch.setattr(daemon.shard, "limits", daemon.shard.limits.__class__(
        **daemon.shard.limits.to_wire() | {"frame_bytes_max": 100_000}))  # fmt: skip
    answer = await peer.do(T.KEY_LINES, "t", "g", None)
    assert 10 < len(answer["lines"]) < 13 and answer["waiting"] == 60
