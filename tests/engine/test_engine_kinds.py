"""Kinds of subscriptions and tasks: at most once, broadcast, priority, times to live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, Rig
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.queues import FAIR_EVERY

# --- at most once --------------------------------------------------------------------------------


def test_at_most_once_ends_durably_before_the_delivery(rig: Rig) -> None:
    rig.subscribe(at_most_once=True)
    task_id = rig.enqueue()
    assert rig.tick() == [], "nothing is written yet"
    assert rig.state(task_id) == "acked"
    rig.seal()
    rig.apply()
    assert not rig.rows.tasks
    assert rig.handed == []
    rig.land()
    (got,) = rig.handed
    assert (got.id, got.attempt) == (task_id, 1)
    assert rig.ack(got) == "done"


def test_a_crash_before_an_at_most_once_commit_redelivers(rig: Rig) -> None:
    rig.subscribe(at_most_once=True)
    task_id = rig.enqueue()
    rig.tick()
    rig.crash()
    assert rig.handed == []
    rig.subscribe()
    assert rig.one().id == task_id


def test_a_crash_after_an_at_most_once_commit_never_redelivers(rig: Rig) -> None:
    rig.subscribe(at_most_once=True)
    rig.enqueue()
    rig.tick()
    rig.seal()
    rig.apply()
    rig.crash()
    rig.subscribe()
    assert rig.tick() == []
    assert rig.rows.is_empty()


def test_a_refused_batch_delays_an_at_most_once_delivery(rig: Rig) -> None:
    rig.subscribe(at_most_once=True)
    task_id = rig.enqueue()
    rig.tick()
    rig.seal()
    rig.refuse()
    assert rig.handed == []
    rig.commit()
    assert [got.id for got in rig.handed] == [task_id]


def test_at_most_once_credit_returns_with_the_commit(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=2, at_most_once=True)
    rig.store(count=5)
    rig.tick()
    assert (subscriber.credit, rig.group().ready_count) == (0, 3)
    rig.commit()
    assert subscriber.credit == 2
    rig.tick()
    rig.commit()
    rig.tick()
    rig.commit()
    assert len(rig.handed) == 5


def test_at_most_once_keeps_the_task_for_other_groups(rig: Rig) -> None:
    rig.subscribe(group="a", at_most_once=True)
    rig.subscribe(group="b")
    task_id = rig.enqueue()
    (mine,) = rig.tick()
    rig.commit()
    assert [got.group.name for got in rig.handed] == ["a"]
    rig.crash()
    rig.subscribe(group="a")
    rig.subscribe(group="b")
    assert [(got.id, got.group.name) for got in rig.tick()] == [(task_id, "b")]
    assert rig.ack(mine) == "acked"


# --- broadcast -----------------------------------------------------------------------------------


def broadcaster(rig: Rig, prefetch: int = 1) -> Broadcaster:
    one = Broadcaster(None, rig.core.topic("t"), prefetch)
    rig.engine.subscriptions.subscribe(one)
    return one


def test_a_broadcast_has_the_time_of_its_offer(rig: Rig) -> None:
    """The clock may go back before it is written, and its stamp must be one that there was."""
    one = broadcaster(rig)
    rig.enqueue()
    rig.fire()
    offered_ms = rig.now_ms
    rig.now_ms -= 5_000
    dispatches, _ = rig.engine.delivery.dispatch(rig.now_ms, rig.mono_ms, 10)
    assert [(d.subscriber, d.taken_ms) for d in dispatches] == [(one, offered_ms)]


def test_a_broadcast_is_not_early_after_a_clock_set_back() -> None:
    """Its row was being read meanwhile."""
    rig = Rig(replace(CONFIG, resident_bytes_max=0))
    one = broadcaster(rig)
    task_id = rig.enqueue(delay_ms=50)
    rig.pass_time(50)
    rig.engine.firing.fire(rig.now_ms, 10)
    assert task_id in rig.core.firing
    rig.now_ms -= 50
    rig.load()
    assert rig.tick() == []
    assert rig.state(task_id) == "scheduled"
    recount(rig)
    rig.pass_time(50)
    assert [(got.subscriber, got.id) for got in rig.tick()] == [(one, task_id)]


def test_broadcasts_reach_all_listeners_and_own_no_tasks(rig: Rig) -> None:
    ones = [broadcaster(rig) for _ in range(2)]
    task_id = rig.enqueue()
    got = rig.tick()
    assert [(delivery.subscriber, delivery.id, delivery.attempt) for delivery in got] == [
        (ones[0], task_id, 1), (ones[1], task_id, 1),
    ]  # fmt: skip
    assert rig.state(task_id) == "ready", "it waits for its first group"
    rig.subscribe()
    assert rig.one().id == task_id
    assert rig.core.topics["t"].groups.keys() == {"default"}


def test_older_and_retried_tasks_are_not_broadcast(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    rig.fire()
    one = broadcaster(rig)
    (got,) = rig.tick()
    assert got.subscriber is not one
    rig.nack(got, 100)
    rig.pass_time(100)
    assert [again.subscriber for again in rig.tick()] == [got.subscriber]


def test_a_slow_broadcast_is_ended_at_its_task_limit() -> None:
    rig = Rig(replace(CONFIG, broadcast_tasks_max=5))
    slow, fast = broadcaster(rig), broadcaster(rig)
    slow.blocked = True
    for _ in range(5):
        rig.enqueue()
        assert [got.subscriber for got in rig.tick()] == [fast]
    assert (len(slow.buffer), rig.core.cut) == (5, [])
    rig.enqueue()
    rig.fire()
    ((cut, code, message),) = rig.core.cut
    assert (cut, code) == (slow, "limit_exceeded")
    assert "has 6 unsent tasks; the limit is 5 (broadcast_tasks_max)" in message
    assert not slow.is_subscribed
    assert not slow.buffer
    assert [got.subscriber for got in rig.tick()] == [fast]


def test_a_slow_broadcast_is_ended_at_its_byte_limit() -> None:
    rig = Rig(replace(CONFIG, broadcast_bytes_max=3_000))
    slow = broadcaster(rig)
    slow.blocked = True
    for size in (1_000, 1_000):
        rig.enqueue(body=b"x" * size)
        rig.fire()
    assert rig.core.cut == []
    rig.enqueue(body=b"x" * 300)
    rig.fire()
    assert "the limit is 3000 (broadcast_bytes_max)" in rig.core.cut[0][2]


def test_a_single_body_over_the_limit_is_still_delivered() -> None:
    rig = Rig(replace(CONFIG, broadcast_bytes_max=100))
    broadcaster(rig)
    rig.enqueue(body=b"x" * 5_000)
    assert len(rig.tick()) == 1


def test_a_slow_broadcast_catches_up_in_order(rig: Rig) -> None:
    one = broadcaster(rig, prefetch=0)
    ids = [rig.enqueue(delay_ms=i) for i in range(700)]
    assert rig.after(1_000).tick() == []
    one.prefetch = 1
    assert [got.id for got in rig.tick()] == ids
    assert one.size_bytes == 0


def test_a_disconnected_broadcast_gets_no_tasks(rig: Rig) -> None:
    one = broadcaster(rig)
    one.blocked = True
    rig.enqueue()
    rig.fire()
    rig.disconnect(one)
    one.blocked = False
    rig.enqueue()
    assert rig.tick() == []


def test_a_paused_topic_is_not_broadcast(rig: Rig) -> None:
    broadcaster(rig)
    rig.configure("t", paused=True)
    rig.enqueue()
    assert rig.tick() == []
    rig.configure("t", paused=False)
    assert rig.tick() == []
    rig.enqueue()
    assert len(rig.tick()) == 1


# --- priority ------------------------------------------------------------------------------------


def test_low_priorities_get_one_delivery_in_sixteen(rig: Rig) -> None:
    rig.subscribe(prefetch=FAIR_EVERY)
    low = [rig.enqueue(priority=1) for _ in range(2)]
    rig.store(count=40, priority=200)
    first = rig.tick()
    assert [got.id for got in first if got.id in low] == low[:1]
    for got in first:
        rig.ack(got)
    rig.commit()
    assert [got.id for got in rig.tick() if got.id in low] == low[1:]


# --- times to live -------------------------------------------------------------------------------


@pytest.mark.parametrize("situation", ["no group", "no subscriber", "no credit", "paused", "rate"])
def test_a_ttl_expires_without_subscribers(rig: Rig, situation: str) -> None:
    if situation != "no group":
        rig.subscribe(prefetch=0 if situation in ("no subscriber", "no credit") else 10)
    if situation == "paused":
        rig.configure("t", paused=True)
    if situation == "rate":
        rig.configure("t", rate=0.001, burst=1)
        rig.enqueue()
        rig.one()
    task_id = rig.enqueue(ttl_ms=200)
    rig.tick()
    assert rig.engine.wake_in_ms(*rig.now) is not None
    rig.after(200).tick()
    assert rig.state(task_id) == "ready", "not before its time"
    recount(rig)
    rig.after(1).fire()
    assert rig.state(task_id) == "expired"
    assert rig.core.totals.expired == 1
    rig.commit()
    assert task_id not in rig.rows.tasks


def test_a_ttl_ends_while_it_waits_for_a_retry(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue(ttl_ms=200)
    rig.nack(rig.one(), 60_000)
    rig.after(201).fire()
    assert rig.state(task_id) == "expired"


def test_a_task_in_flight_expires_only_when_returned(rig: Rig) -> None:
    rig.subscribe()
    acked, nacked = rig.enqueue(ttl_ms=200), rig.enqueue(ttl_ms=200)
    got = {delivery.id: delivery for delivery in rig.tick()}
    rig.after(1_000).fire()
    assert rig.state(acked) == rig.state(nacked) == "in_flight"
    assert rig.ack(got[acked]) == "acked"
    assert rig.nack(got[nacked], 5_000) == "retrying"
    rig.fire()
    assert rig.state(nacked) == "expired"


def test_a_ttl_ends_for_each_group_on_its_own(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.subscribe(group="b", prefetch=0)
    task_id = rig.enqueue(ttl_ms=200)
    got = rig.one()
    rig.after(201).fire()
    recount(rig)
    assert rig.state(task_id) == "in_flight"
    assert [rig.group(name=n).expired for n in "ab"] == [0, 1]
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_many_ttls_end_in_bounded_steps() -> None:
    rig = Rig(replace(CONFIG, lapsing_max=10))
    rig.store(count=35, ttl_ms=10)
    rig.fire()
    rig.pass_time(11)
    firing = rig.engine.firing
    assert firing.request_lapsed(rig.now_ms, 100)
    assert len(rig.core.lapsed_rows_to_read) == 10
    assert not firing.request_lapsed(rig.now_ms, 100), "as many are being looked up as may be"
    recount(rig)
    rig.fire()
    assert rig.core.totals.expired == 35
    recount(rig)


def test_a_reschedule_restarts_the_ttl(rig: Rig) -> None:
    rig.subscribe(prefetch=0)
    task_id = rig.enqueue(ttl_ms=200)
    rig.fire()
    assert rig.reschedule(task_id, 1_000) == "scheduled"
    rig.after(1_000).fire()
    rig.after(200).fire()
    assert rig.state(task_id) == "ready"
    rig.after(1).fire()
    assert rig.state(task_id) == "expired"


def test_a_cancel_during_an_expiry_read_wins(rig: Rig) -> None:
    rig.subscribe(prefetch=0)
    task_id = rig.enqueue(ttl_ms=5)
    rig.fire()
    rig.pass_time(6)
    rig.engine.firing.request_lapsed(rig.now_ms, 10)
    assert rig.cancel(task_id) == "cancelled"
    rig.load()
    assert rig.state(task_id) == "cancelled"


def test_a_clock_set_back_during_an_expiry_read_keeps_the_task(rig: Rig) -> None:
    rig.subscribe(prefetch=0)
    task_id = rig.enqueue(ttl_ms=5)
    rig.fire()
    rig.pass_time(6)
    rig.engine.firing.request_lapsed(rig.now_ms, 10)
    rig.now_ms -= 3
    rig.load()
    assert rig.state(task_id) == "ready"
    recount(rig)
    rig.after(3).fire()
    assert rig.state(task_id) == "expired"


def test_ttls_continue_after_a_crash(rig: Rig) -> None:
    rig.subscribe()
    nacked = rig.enqueue(ttl_ms=500)
    rig.nack(rig.one(), 60_000)
    ready = rig.enqueue(ttl_ms=500)
    rig.commit()
    rig.crash()
    rig.fire()
    recount(rig)
    rig.after(501).fire()
    assert [rig.state(i) for i in (nacked, ready)] == ["expired", "expired"]
