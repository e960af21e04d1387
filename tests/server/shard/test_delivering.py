"""What is written to a consumer bears a time that is not before its due time, and what a consumer
is told of its credit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.engine_rig import Rig
from support.in_process import InProcess
from support.shard_rig import Peer, ShardRig, started
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.topics import Dispatch
from tickwheel.model.lateness import Cause
from tickwheel.model.records import NO_PAST, TaskRow
from tickwheel.server.metrics.observed import Lateness
from tickwheel.server.shard.shard import Delivering

rig = started(ShardRig)


def test_a_clock_set_back_makes_no_broadcast_early() -> None:
    rig, written = Rig(), list[int]()
    owner = SimpleNamespace(deliver=lambda epoch, now_ms, items: written.append(now_ms))
    subscriber = Broadcaster(owner, rig.core.topic("t"), 10, "")
    delivering = Delivering(rig.engine, cast(Any, None), Lateness(10))
    items = [
        (TaskRow(1, rig.now_ms - 5, "t", b""), 1, NO_PAST),
        (TaskRow(2, rig.now_ms, "t", b""), 1, NO_PAST),
    ]
    delivering.write(Dispatch(subscriber, items, rig.now_ms + 3), rig.now_ms - 500_000)
    assert written == [rig.now_ms + 3]
    assert rig.core.totals.early == 0


def test_each_late_delivery_is_counted_by_cause() -> None:
    rig, lateness = Rig(), Lateness(10)
    subscriber = rig.subscribe()
    subscriber.sink = cast(Any, SimpleNamespace(deliver=lambda epoch, now_ms, items: None))
    delivering = Delivering(rig.engine, cast(Any, None), lateness)
    dues_ms = [rig.now_ms - late_ms for late_ms in (0, 500, 700)]
    items = [
        (TaskRow(number, due_ms, "t", b""), 1, NO_PAST) for number, due_ms in enumerate(dues_ms)
    ]
    some: list[Cause | None] = [None, Cause.RATE, Cause.PAUSED]
    delivering.write(Dispatch(subscriber, items, 0, some), rig.now_ms)
    delivering.write(Dispatch(subscriber, items[1:], 0, Cause.RATE), rig.now_ms)
    counts = {cause: sum(one.counts) for cause, one in lateness.by_cause.items()}
    assert {cause: count for cause, count in counts.items() if count} == {
        Cause.RATE: 3, Cause.PAUSED: 1,
    }  # fmt: skip


async def test_prefetch_answers_in_flight_and_ready_counts(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 2, None)
    assert (await peer.enqueue(*[("t", b"", 0, None)] * 5))[0] == T.OK
    await rig.settle()
    assert await peer.do(T.PREFETCH, 1, 2, True) == {"in_flight": 2, "ready": 3}
    assert await peer.do(T.PREFETCH, 1, 1, True) == {"in_flight": 2, "ready": 3}
    assert await peer.do(T.PREFETCH, 1, 4) is None
    await rig.settle()
    assert await peer.do(T.PREFETCH, 1, 4, True) == {"in_flight": 4, "ready": 1}
    assert await peer.do(T.PREFETCH, 1, 4, False) is None
    answer = await peer.refused(T.PREFETCH, 1, 9, "x")
    assert answer == ("bad_request", "tell must be true or false, not 'x'")
    assert await peer.do(T.PREFETCH, 1, 4, True) == {"in_flight": 4, "ready": 1}


async def test_tasks_blocked_by_an_order_key_are_not_ready(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 3, None)
    assert (await peer.enqueue(*[("t", b"", 0, {"order_key": "k"})] * 5))[0] == T.OK
    await rig.settle()
    assert await peer.do(T.PREFETCH, 1, 3, True) == {"in_flight": 1, "ready": 0}


async def test_a_closed_connection_is_not_kept_for_its_order_keys(rig: ShardRig) -> None:
    peers = [await rig.peer(), await rig.peer()]
    for peer in peers:
        await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peers[0].enqueue(*[("t", b"", 0, {"order_key": str(n)}) for n in range(20)])
    await rig.settle()
    group = rig.core.find_group("t", "g")
    assert group is not None
    preferences = rig.core.orderings.by_group[group].preferences
    remembered = set(preferences._last_subscribers.values())
    assert len(remembered) == 2
    peers[0].transport.lose()
    assert sorted(subscriber.sink is None for subscriber in remembered) == [False, True]


@pytest.mark.parametrize(
    "frame",
    [
        (T.GROUP_CREATE, "t", "late", {}),
        (T.SUBSCRIBE, 1, "t", "late", 10, None),
        (T.PULL, "t", "late", 10, 0, None),
    ],
)
async def test_a_new_group_is_owed_the_tasks_that_have_not_fired(
    daemon: InProcess, peer: Peer, frame: tuple[Any, ...]
) -> None:
    await daemon.ask(peer, T.GROUP_CREATE, "t", "first", {})
    _, ids = await daemon.ask(peer, T.ENQUEUE, 0, (("t", b"", 0), ("t", b"", 10)))
    daemon.sources.now_ms += 20  # the second task is due, and no tick has fired it
    await daemon.ask(peer, *frame)
    tasks = await daemon.ask(peer, T.LOOKUP, ids)
    assert [set(task["groups"]) for task in tasks] == [{"first"}, {"first", "late"}]
