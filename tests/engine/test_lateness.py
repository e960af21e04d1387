"""Each late delivery has one cause: whatever covers most of its wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_rig import CONFIG, LEASE_MS, Rig
from tickwheel.engine.events import STARTING_MS
from tickwheel.engine.firing import Broadcaster
from tickwheel.model.kinds import TargetRow
from tickwheel.model.lateness import LATE_MS, Cause, HoldIntervals, shares
from tickwheel.model.records import GroupSettings

LATE = LATE_MS + 1


def cause(rig: Rig, task_id: int) -> Cause | None:
    """Why its delivery, which is made now, is late."""
    assert task_id in {got.id for got in rig.tick()}
    return rig.causes[task_id]


def pause(rig: Rig, *, paused: bool) -> None:
    rig.engine.grouping.set(rig.group(), GroupSettings(paused=paused), rig.mono_ms)
    rig.dispatch()


@pytest.mark.parametrize(("late_ms", "has_one"), [(0, False), (LATE_MS, False), (LATE, True)])
def test_only_late_deliveries_have_a_cause(rig: Rig, late_ms: int, has_one: bool) -> None:
    rig.subscribe()
    task_id = rig.enqueue(delay_ms=1_000)
    rig.pass_time(1_000 + late_ms)
    assert cause(rig, task_id) is (Cause.LOOP_BUSY if has_one else None)


@pytest.mark.parametrize("has_group", [True, False])
def test_a_missing_subscriber_is_the_cause(rig: Rig, has_group: bool) -> None:
    if has_group:
        rig.disconnect(rig.subscribe())
    task_id = rig.enqueue()
    rig.tick()
    rig.after(5_000).subscribe()
    assert cause(rig, task_id) is Cause.NO_SUBSCRIBER


@pytest.mark.parametrize("whole_topic", [False, True])
def test_a_pause_is_the_cause(rig: Rig, whole_topic: bool) -> None:
    rig.subscribe()
    for paused in (True, False):
        settings = GroupSettings(paused=paused)
        if whole_topic:
            rig.engine.grouping.set_topic(rig.core.topic("t"), settings, rig.mono_ms)
        else:
            rig.engine.grouping.set(rig.group(), settings, rig.mono_ms)
        if paused:
            task_id = rig.enqueue()
            rig.tick()
            rig.pass_time(LATE)
    assert cause(rig, task_id) is Cause.PAUSED


def test_a_pause_outranks_a_missing_subscriber(rig: Rig) -> None:
    subscriber = rig.subscribe()
    task_id = rig.enqueue()
    pause(rig, paused=True)
    rig.disconnect(subscriber)
    rig.tick()
    rig.pass_time(3_000)
    pause(rig, paused=False)
    rig.after(1_000).subscribe()
    assert cause(rig, task_id) is Cause.PAUSED


def test_a_rate_is_the_cause(rig: Rig) -> None:
    rig.subscribe()
    rig.engine.grouping.set(rig.group(), GroupSettings(rate=1.0, burst=1), rig.mono_ms)
    first, second = rig.enqueue(), rig.enqueue()
    assert cause(rig, first) is None
    rig.pass_time(1_000)
    assert cause(rig, second) is Cause.RATE


@pytest.mark.parametrize(("is_pushed", "found"), [(False, Cause.NO_CREDIT), (True, Cause.ENDPOINT)])
def test_a_consumer_without_credit_is_the_cause(rig: Rig, is_pushed: bool, found: Cause) -> None:
    rig.subscribe(prefetch=1)
    if is_pushed:
        row = TargetRow("t", rig.group().name, "push", "https://example.com", (), (), 1, "me")
        rig.engine.grouping.set_target(row)
    first, second = rig.enqueue(), rig.enqueue()
    got = rig.one()
    assert got.id == first
    rig.pass_time(2_000)
    rig.ack(got)
    rig.commit()
    assert cause(rig, second) is found


def test_an_uncommitted_ack_makes_the_store_the_cause() -> None:
    rig = Rig(replace(CONFIG, acks_ahead_max=1))
    rig.subscribe(prefetch=1)
    *_, last = rig.store(count=3)
    for _ in range(2):
        rig.ack(rig.one())
    assert rig.tick() == []
    rig.after(2_000).commit()
    assert cause(rig, last) is Cause.STORE


def test_a_backlog_has_one_cause(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=10)
    rig.store(count=100)
    rig.causes.clear()
    while len(rig.causes) < 100:
        got = rig.tick()
        rig.pass_time(50)
        for item in got:
            rig.ack(item)
        rig.commit()
    late = [found for found in rig.causes.values() if found is not None]
    assert subscriber.is_subscribed
    assert len(late) > 60
    assert set(late) == {Cause.NO_CREDIT}


def test_an_expired_lease_is_the_cause(rig: Rig) -> None:
    hanging = rig.subscribe(prefetch=5)
    rig.frozen.add(hanging)
    rig.enqueue()
    rig.one()
    task_id = rig.after(LEASE_MS).enqueue()
    rig.tick()
    rig.pass_time(5_000)
    rig.engine.subscriptions.consumer_responded(hanging.presence, [hanging])
    assert cause(rig, task_id) is Cause.LEASE_OVER


@pytest.mark.parametrize("how", ["snoozed", "released", "requeued"])
def test_a_redelivered_task_is_not_late(rig: Rig, how: str) -> None:
    rig.subscribe()
    task_id = rig.enqueue()
    got = rig.one()
    rig.pass_time(1_000)
    if how == "snoozed":
        rig.snooze(got, 60_000)
    elif how == "released":
        rig.release(got)
    else:
        rig.reject(got)
        rig.commit()
        rig.requeue(task_id)
    other_id = rig.enqueue()
    rig.pass_time(60_000)
    assert cause(rig, task_id) is None
    assert rig.causes[other_id] is Cause.LOOP_BUSY


def test_a_retry_has_no_cause(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue()
    rig.nack(rig.one(), 5_000)
    rig.pass_time(5_000)
    assert cause(rig, task_id) is None


def test_a_stopped_daemon_is_the_cause(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue(delay_ms=1_000)
    stopped_ms = rig.now_ms
    rig.crash(down_ms=5_000)
    rig.core.ledger.begin(stopped_ms, rig.now_ms)
    rig.tick()
    rig.after(STARTING_MS - 1).subscribe()
    assert cause(rig, task_id) is Cause.DAEMON_DOWN


def test_a_wait_before_a_restart_has_an_unknown_cause(rig: Rig) -> None:
    rig.disconnect(rig.subscribe())
    task_id = rig.enqueue()
    rig.tick()
    rig.pass_time(60_000)
    stopped_ms = rig.now_ms
    rig.crash(down_ms=1_000)
    rig.core.ledger.begin(stopped_ms, rig.now_ms)
    rig.subscribe()
    assert cause(rig, task_id) is Cause.UNKNOWN


def test_consumers_absent_after_a_start_are_the_cause(rig: Rig) -> None:
    rig.disconnect(rig.subscribe())
    task_id = rig.enqueue(delay_ms=1_000)
    stopped_ms = rig.now_ms
    rig.crash(down_ms=1_000)
    rig.core.ledger.begin(stopped_ms, rig.now_ms)
    rig.tick()
    rig.after(60_000).subscribe()
    assert cause(rig, task_id) is Cause.NO_SUBSCRIBER


@pytest.mark.parametrize("held", [Cause.STORE, Cause.CLOCK, Cause.LOOP_BUSY])
def test_a_busy_loop_is_the_cause(rig: Rig, held: Cause) -> None:
    rig.subscribe()
    task_id = rig.enqueue(delay_ms=1_000)
    rig.pass_time(3_000)
    rig.core.ledger.daemon.add(held, rig.now_ms - 2_000, rig.now_ms)
    assert cause(rig, task_id) is held


def test_a_busy_loop_outranks_missing_credit(rig: Rig) -> None:
    rig.subscribe(prefetch=1)
    rig.store(count=2)
    got = rig.one()
    rig.pass_time(2_000)
    rig.core.ledger.daemon.add(Cause.LOOP_BUSY, rig.now_ms - 1_900, rig.now_ms)
    rig.ack(got)
    rig.commit()
    assert rig.causes[rig.one().id] is Cause.LOOP_BUSY


def test_a_limited_dispatch_makes_the_loop_the_cause() -> None:
    rig = Rig(replace(CONFIG, dispatch_bytes_max=1))
    rig.disconnect(rig.subscribe())
    rig.store(count=3)
    rig.tick()
    rig.after(LATE).subscribe(prefetch=1)
    rig.subscribe(prefetch=1)
    rig.subscribe(prefetch=1)
    delivery, found = rig.engine.delivery, list[Cause | None]()
    for _ in range(3):
        dispatches, _ = delivery.dispatch(rig.now_ms, rig.mono_ms, 1)
        found += [rig.causes[got.id] for got in rig.take(dispatches)]
        rig.pass_time(2_000)
    assert found == [Cause.NO_SUBSCRIBER, Cause.LOOP_BUSY, Cause.LOOP_BUSY]


def test_deliveries_of_a_frame_have_separate_causes(rig: Rig) -> None:
    rig.disconnect(rig.subscribe())
    old = rig.store(count=3)
    rig.tick()
    rig.pass_time(10_000)
    pause(rig, paused=True)
    late = rig.store(count=3)
    rig.tick()
    rig.pass_time(5_000)
    pause(rig, paused=False)
    fresh = rig.store(count=2)
    rig.fire()
    rig.subscribe()
    assert len(rig.dispatch()) == 8
    assert [rig.causes[i] for i in old] == [Cause.NO_SUBSCRIBER] * 3
    assert [rig.causes[i] for i in late] == [Cause.PAUSED] * 3
    assert [rig.causes[i] for i in fresh] == [None] * 2


def test_a_blocked_broadcast_connection_is_the_cause(rig: Rig) -> None:
    broadcaster = Broadcaster(None, rig.core.topic("t"), 10)
    rig.engine.subscriptions.subscribe(broadcaster)
    broadcaster.blocked = True
    task_id = rig.enqueue()
    rig.tick()
    rig.pass_time(1_000)
    broadcaster.blocked = False
    assert cause(rig, task_id) is Cause.NO_CREDIT
    rig.commit()
    other = rig.enqueue(delay_ms=1_000)
    rig.pass_time(1_000 + LATE)
    assert cause(rig, other) is Cause.LOOP_BUSY, "that wait is over"


CAUSES = st.sampled_from(Cause)
HOLD_INTERVALS = st.lists(st.tuples(CAUSES, st.integers(0, 50), st.integers(1, 50)), max_size=12)


@given(HOLD_INTERVALS, HOLD_INTERVALS, st.integers(0, 40), st.integers(1, 60))
def test_every_millisecond_has_the_first_cause_that_covers_it(
    own: list[tuple[Cause, int, int]],
    daemons: list[tuple[Cause, int, int]],
    from_ms: int,
    late_ms: int,
) -> None:
    made: list[HoldIntervals] = []
    for given_ in (own, daemons):
        hold_intervals = HoldIntervals()
        for what, start_ms, length_ms in given_:
            hold_intervals.add(what, start_ms, start_ms + length_ms)
        made.append(hold_intervals)
    until_ms = from_ms + late_ms
    slow = dict.fromkeys(Cause, 0)
    for ms in range(from_ms, until_ms):
        covering = [
            what
            for what in Cause
            for holds in made
            if (interval := holds.interval_of(what)) is not None and interval[0] <= ms < interval[1]
        ]
        slow[min(covering, key=list(Cause).index) if covering else Cause.LOOP_BUSY] += 1
    result = shares(from_ms, until_ms, made)
    assert {what: ms for what, ms in result.items() if ms} == {
        w: ms for w, ms in slow.items() if ms
    }


def test_returning_consumers_end_the_start_phase(rig: Rig) -> None:
    rig.disconnect(rig.subscribe())
    rig.enqueue(delay_ms=500)
    stopped_ms = rig.now_ms
    rig.crash(down_ms=1_000)
    rig.core.ledger.begin(stopped_ms, rig.now_ms)
    rig.tick()
    rig.after(LATE).subscribe()
    assert rig.causes[rig.one().id] is Cause.DAEMON_DOWN
    task_id = rig.enqueue(delay_ms=500)
    rig.pass_time(500 + LATE)
    assert cause(rig, task_id) is Cause.LOOP_BUSY
