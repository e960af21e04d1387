"""Byte counts and limits of the engine, each tested at the limit and one above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.encodings import ENCODING, LONGEST
from support.engine_recount import recount
from support.engine_rig import CONFIG, Rig
from support.traces import TRACE
from tickwheel.engine import firing
from tickwheel.engine.firing import Broadcaster, Broadcasts
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import DELIVERY_BYTES, FRAME_HEAD_BYTES, Dispatch, Item, Subscriber
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import (
    ATTEMPT_MAX,
    Past,
    Replayed,
    TaskOptions,
    TaskRow,
    size_of,
    task_bytes,
)
from tickwheel.protocol import encode
from tickwheel.server.tcp.listener import delivery_items

ID_MAX = 2**63 - 1

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
values = texts | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.booleans()
all_extras = st.builds(
    TaskOptions,
    key=st.none() | texts,
    tag=st.none() | texts,
    properties=st.none() | st.dictionaries(texts, values, max_size=70),
    priority=st.integers(0, 255),
    ttl_ms=st.none() | st.integers(1, 2**53),
    replayed=st.none() | st.builds(Replayed, st.integers(1, ID_MAX), texts, st.none() | texts),
    trace=st.none() | st.just(TRACE),
    encoding=st.none() | st.sampled_from((ENCODING, LONGEST)),
    shard_by=st.none() | texts,
)
rows = st.builds(
    TaskRow,
    id=st.integers(1, ID_MAX),
    due_ms=st.integers(0, ID_MAX),
    topic=st.just("t"),
    body=st.binary(max_size=300),
    options=st.none() | all_extras,
)
counts = st.integers(0, ATTEMPT_MAX)
pasts = st.builds(Past, st.just(()), counts, counts, counts)
items = st.tuples(rows, st.integers(1, ID_MAX), pasts)
WORST = Past(failed=ATTEMPT_MAX, deaths=ATTEMPT_MAX)


@given(item=items)
@example(
    item=(
        TaskRow(ID_MAX, ID_MAX, "t", b"", TaskOptions(properties={"p": "é" * 200})),
        ID_MAX,
        WORST,
    )
)
@example(item=(TaskRow(ID_MAX, ID_MAX, "t", b"", TaskOptions("k" * 300, "é" * 300)), ID_MAX, WORST))
@example(item=(TaskRow(ID_MAX, ID_MAX, "t", b""), ID_MAX, WORST))
def test_an_encoded_task_is_no_larger_than_counted(item: Item) -> None:
    (wire,) = delivery_items([item])
    assert len(encode(wire)) <= DELIVERY_BYTES + task_bytes(item[0])


@given(some=st.lists(items, max_size=20), pull=st.booleans())
def test_a_frame_adds_no_more_than_its_head(some: list[Item], pull: bool) -> None:
    wire, edge = delivery_items(some), 2**64 - 1
    frame: Any = (65, edge, (edge, edge, wire)) if pull else (67, 2**32 - 1, edge, edge, wire)
    most = sum(DELIVERY_BYTES + task_bytes(row) for row, _, _ in some) + FRAME_HEAD_BYTES
    # A header of five bytes counts even more of them than there are here.
    assert len(encode(frame)) <= most


def test_a_task_of_its_own_policy_counts_its_table() -> None:
    table = RetryPolicy(kind="table", delays_ms=(10**11,) * 1024)
    plain = TaskRow(1, 1, "t", b"x" * 7)
    assert task_bytes(plain) == 7
    assert task_bytes(plain._replace(options=TaskOptions(retry=table))) > 7 + 1024 * 8


# --- frames --------------------------------------------------------------------------------------


def frames(rig: Rig, limit: int = 1_000) -> list[list[Dispatch]]:
    """What each call of ``dispatch`` hands out, until there is no more."""
    calls = []
    more = True
    while more:
        dispatches, more = rig.engine.delivery.dispatch(*rig.now, limit)
        calls.append(dispatches)
    return calls


def framed(dispatch: Dispatch) -> int:
    return sum(DELIVERY_BYTES + task_bytes(row) for row, _, _ in dispatch.items)


def with_property(rig: Rig, size: int, *, topic: str = "t") -> None:
    options = TaskOptions(properties={"p": "v" * size})
    row = (topic, rig.now_ms, b"", options)
    rig.engine.intake.enqueue(None, None, 0, [row], size_of(b"", options), rig.now_ms)


@pytest.mark.parametrize("over", [0, 1])
def test_a_frame_ends_at_its_limit_of_bytes(over: int) -> None:
    size = DELIVERY_BYTES + task_bytes(
        TaskRow(1, 1, "t", b"", TaskOptions(properties={"p": "v" * 50}))
    )
    rig = Rig(replace(CONFIG, delivery_frame_bytes_max=2 * size - over))
    rig.subscribe()
    for _ in range(4):
        with_property(rig, 50)
    rig.commit()
    rig.fire()
    results = [len(d.items) for call in frames(rig) for d in call]
    assert results == ([1, 1, 1, 1] if over else [2, 2])
    recount(rig)


def test_a_task_above_the_limit_of_a_frame_is_delivered_alone() -> None:
    """It was enqueued when the limit was higher."""
    rig = Rig(replace(CONFIG, delivery_frame_bytes_max=500))
    rig.subscribe()
    for size in (10, 3_000, 10, 10, 3_000):
        with_property(rig, size)
    rig.commit()
    rig.fire()
    dispatches = [d for call in frames(rig) for d in call]
    assert [len(d.items) for d in dispatches] == [1, 1, 2, 1]
    assert all(framed(d) <= 500 or len(d.items) == 1 for d in dispatches)
    recount(rig)


def test_bytes_of_a_dispatch_are_limited() -> None:
    rig = Rig(replace(CONFIG, delivery_frame_bytes_max=1_000, dispatch_bytes_max=3_000))
    for _ in range(50):
        rig.subscribe(prefetch=10)
    rig.store(count=50, body=b"x" * 900)
    rig.fire()
    calls = frames(rig)
    assert sum(len(d.items) for call in calls for d in call) == 50
    assert max(sum(map(framed, call)) for call in calls) <= 3_000 + 1_000
    recount(rig)


def test_the_frames_of_a_broadcast_end_at_the_same_limit() -> None:
    rig = Rig(replace(CONFIG, delivery_frame_bytes_max=500))
    one = Broadcaster(None, rig.core.topic("t"), 1)
    rig.engine.subscriptions.subscribe(one)
    for size in (10, 3_000, 10, 10, 3_000):
        with_property(rig, size)
    rig.commit()
    rig.fire()
    assert one.size_bytes > 6_000
    dispatches = [d for call in frames(rig) for d in call]
    assert [len(d.items) for d in dispatches] == [1, 1, 2, 1]
    assert one.size_bytes == 0


def test_extras_count_as_resident_and_as_staged(rig: Rig) -> None:
    with_property(rig, 5_000)
    assert rig.engine.intake.inflight_bytes >= 5_000
    rig.commit()
    assert rig.engine.intake.inflight_bytes == 0
    assert rig.core.resident_bytes >= 5_000


# --- at most once, while the commit waits --------------------------------------------------------


def test_uncommitted_at_most_once_deliveries_are_limited() -> None:
    size = DELIVERY_BYTES + 100
    config = replace(CONFIG, handed_bytes_max=4 * size, delivery_frame_bytes_max=2 * size)
    rig = Rig(config)
    for _ in range(3):
        rig.subscribe(at_most_once=True, prefetch=100)
    rig.subscribe("other", at_most_once=True, prefetch=100)
    rig.stage(count=20, body=b"x" * 100)
    rig.store("other", count=3, body=b"x" * 100)
    rig.fire()
    frames(rig)
    assert 4 * size <= rig.core.handed_bytes <= 6 * size
    recount(rig)
    frames(rig)
    assert rig.core.handed_bytes <= 6 * size, "nothing more before the commit"
    while rig.core.handed_bytes:
        rig.commit()
        frames(rig)
    assert len(rig.handed) == 23
    recount(rig)


# --- in flight -----------------------------------------------------------------------------------


def test_tasks_in_flight_are_limited() -> None:
    rig = Rig(replace(CONFIG, in_flight_max=7))
    rig.subscribe()
    rig.subscribe("other")
    rig.stage(count=6)
    rig.store("other", count=6)
    got = rig.tick()
    assert len(got) == rig.core.in_flight == 7
    assert rig.tick() == []
    rig.ack(got[0])
    rig.nack(got[1], delay_ms=10_000)
    rig.release(got[2])
    assert len(rig.tick()) == 3
    recount(rig)
    assert len(rig.after(60_000).tick()) == 7
    recount(rig)
    rig.crash()
    recount(rig)


# --- subscribers ---------------------------------------------------------------------------------


class Counted(Subscriber):
    """Says how often it was asked for its credit."""

    asked = 0

    @property
    def credit(self) -> int:
        Counted.asked += 1
        return super().credit


def test_a_delivery_costs_the_same_however_many_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = rig.subscribe(prefetch=1).group
    waiting = [Counted(None, group, 1, 1_000, once=True) for _ in range(2_000)]
    for item in waiting:
        rig.engine.subscriptions.subscribe(item)
    rig.store(count=5)
    Counted.asked = 0
    assert [got.subscriber for got in rig.tick()][1:] == waiting[:4], "in turn"
    assert Counted.asked < 20
    rig.store(count=3)
    Counted.asked = 0
    assert [got.subscriber for got in rig.tick()] == waiting[4:7]
    assert Counted.asked < 20
    for item in waiting:
        rig.disconnect(item)
        rig.disconnect(item)


def test_a_subscriber_with_new_credit_gets_a_turn(rig: Rig) -> None:
    full, blocked, paused = (rig.subscribe(prefetch=1) for _ in range(3))
    blocked.blocked = True
    paused.prefetch = 0
    rig.store(count=4)
    (first,) = rig.tick()
    assert first.subscriber is full
    for one, change in ((blocked, {"blocked": False}), (paused, {"prefetch": 1})):
        for name, value in change.items():
            setattr(one, name, value)
        rig.core.reconsider(one)
        assert rig.one().subscriber is one
    rig.ack(first)
    assert rig.tick() == []
    rig.commit()
    assert rig.one().subscriber is full


def test_the_slowest_broadcast_is_ended_at_the_byte_limit() -> None:
    rig = Rig(replace(CONFIG, broadcasts_bytes_max=10_000))
    slow, slower, fast = (Broadcaster(None, rig.core.topic(name), 1) for name in ("t", "u", "t"))
    for item in (slow, slower, fast):
        rig.engine.subscriptions.subscribe(item)
    slow.blocked = slower.blocked = True
    for topic, size in (("u", 4_000), ("u", 3_000), ("t", 500)):
        rig.enqueue(topic, body=b"x" * size)
        rig.tick()
    assert rig.core.cut == []
    rig.enqueue("t", body=b"x" * 1_000)
    rig.fire()
    ((cut, code, message),) = rig.core.cut
    assert (cut, code) == (slower, "limit_exceeded")
    assert "the limit is 10000 (broadcasts_bytes_max)" in message
    assert not slower.is_subscribed and slow.is_subscribed and fast.is_subscribed
    assert [got.subscriber for got in rig.tick()] == [fast]
    recount(rig)


def test_broadcasts_above_the_byte_limit_are_compared_once_for_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(replace(CONFIG, broadcasts_bytes_max=10_000))
    broadcasters = [Broadcaster(None, rig.core.topic("t"), 1) for _ in range(100)]
    for item in broadcasters:
        rig.engine.subscriptions.subscribe(item)
        item.blocked = True
    compared, cut_largest = list[int](), Broadcasts._cut_largest

    def compare(broadcasts: Broadcasts) -> None:
        compared.append(broadcasts.waiting_bytes)
        cut_largest(broadcasts)

    monkeypatch.setattr(Broadcasts, "_cut_largest", compare)
    for is_shared in (True, False):
        rig.enqueue("t", body=b"x" * 500)
        rig.fire()
        assert not rig.core.cut if is_shared else len(rig.core.cut) == 94
    assert compared == [75_000, 150_000]
    assert rig.engine.firing.broadcasts.waiting_bytes == 6 * 1_500
    recount(rig)


@pytest.mark.parametrize("kind", ["groups", "broadcasts"])
def test_receivers_of_due_tasks_per_step_are_limited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(firing, "STEPS_PER_TICK", 10)
    for n in range(5):
        if kind == "groups":
            rig.subscribe(group=f"g{n}")
        else:
            broadcaster = Broadcaster(None, rig.core.topic("t"), 100)
            rig.engine.subscriptions.subscribe(broadcaster)
    ids = rig.store(delay_ms=1, count=7)
    rig.pass_time(1)
    left: list[int] = []
    while rig.engine.firing.fire(rig.now_ms, 1_000):
        left.append(rig.core.scheduled)
        recount(rig)
    assert left == [5, 3, 1] and rig.core.scheduled == 0
    got = rig.tick()
    assert [delivery.id for delivery in got] == ids * 5


# --- topics --------------------------------------------------------------------------------------


def forget(rig: Rig) -> list[str]:
    return sorted(rig.engine.grouping.forget_idle(1_000))


def test_an_empty_topic_is_forgotten(rig: Rig) -> None:
    for topic in ("cancelled", "expired", "ready", "lives"):
        rig.enqueue(topic, 0 if topic in ("ready", "expired") else 1_000, ttl_ms=10)
    ids = {row.topic: i for i, row in rig.rows.tasks.items()}
    rig.fire()
    assert forget(rig) == []
    rig.cancel(ids["cancelled"])
    rig.cancel(ids["ready"])
    recount(rig)
    assert forget(rig) == ["cancelled", "ready"]
    rig.after(20).tick()
    rig.commit()
    assert forget(rig) == ["expired"]
    assert rig.core.topics.keys() == {"lives"}
    assert rig.core.totals.enqueued == 4 and rig.core.totals.cancelled == 2
    assert rig.state(ids["ready"]) == "cancelled"


def test_groups_settings_and_tasks_keep_a_topic(rig: Rig) -> None:
    staged = rig.core.topic("staged")
    rig.configure("set", paused=True)
    rig.subscribe("grouped", "g")
    listener = Broadcaster(None, rig.core.topic("heard"), 1)
    rig.engine.subscriptions.subscribe(listener)
    rig.core.topic("empty")
    (task_id,) = rig.stage("staged", 1_000)
    assert forget(rig) == ["empty"]
    assert rig.seal() is not None
    rig.core.maybe_idle["staged"] = None
    assert forget(rig) == [], "it is with the store"
    rig.apply()
    assert rig.core.sealed is not None
    batch = rig.core.sealed
    rig.engine.intake.mark_durable(batch)
    rig.core.maybe_idle["staged"] = None
    assert forget(rig) == [], "it is on its way to the wheel"
    rig.engine.intake.land(batch, rig.now_ms)
    rig.core.maybe_idle["staged"] = None
    assert forget(rig) == [] and rig.core.topics["staged"] is staged
    rig.configure("set", paused=False)
    rig.delete_group("grouped", "g")
    rig.disconnect(listener)
    rig.cancel(task_id)
    assert forget(rig) == ["grouped", "heard", "set", "staged"]
    rig.commit()


@pytest.mark.parametrize("how", ["refused", "withdrawn"])
def test_a_topic_of_refused_tasks_is_forgotten(rig: Rig, how: str) -> None:
    rig.core.topic("t")
    rig.stage("t", 1_000)
    assert forget(rig) == []
    if how == "refused":
        rig.seal()
        rig.refuse()
    else:
        rig.engine.intake.withdraw()
    assert forget(rig) == ["t"]


def test_a_forgotten_topic_can_be_used_again() -> None:
    rig = Rig(EngineConfig())
    rig.cancel(rig.enqueue("t", 1_000))
    assert forget(rig) == ["t"]
    task_id = rig.enqueue("t")
    rig.subscribe("t")
    assert rig.one().id == task_id
    rig.commit()
    rig.crash()
    assert rig.core.topics["t"].groups.keys() == {"default"}
    recount(rig)
