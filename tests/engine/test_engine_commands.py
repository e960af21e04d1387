"""Cancel, reschedule and run-now, in every state a task can be in; and what look-ups say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.test_engine_ordering import OrderRig
from support.engine_recount import recount
from support.engine_rig import CONFIG, LEASE_MS, Got, Rig
from tickwheel.engine.tasks import GroupView

ROWS_ON_DEMAND = replace(CONFIG, resident_horizon_ms=0, resident_bytes_max=0)


def scheduled(rig: Rig) -> int:
    return rig.enqueue(delay_ms=1_000)


def firing(rig: Rig) -> int:
    """Its handle has fired and its row is being read."""
    task_id = rig.enqueue()
    rig.engine.firing.fire(rig.now_ms, 10)
    assert task_id in rig.core.firing
    return task_id


def in_default_backlog(rig: Rig) -> int:
    task_id = rig.enqueue()
    rig.fire()
    return task_id


def ready(rig: Rig) -> int:
    rig.subscribe(prefetch=0)
    return in_default_backlog(rig)


def loading(rig: Rig) -> int:
    """Its turn has come and its row is being read."""
    rig.subscribe(prefetch=1)
    task_id = rig.enqueue()
    rig.fire()
    rig.engine.delivery.dispatch(*rig.now, 10)
    assert task_id in rig.group().loading
    return task_id


def waiting(rig: Rig) -> int:
    got = flying(rig)
    rig.nack(got, 500)
    return got.id


def flying(rig: Rig) -> Got:
    rig.subscribe()
    rig.enqueue()
    return rig.one()


BEFORE = [scheduled, firing, in_default_backlog, ready, loading, waiting]


def rig_for(before: object) -> Rig:
    return Rig(ROWS_ON_DEMAND if before in (firing, loading) else CONFIG)


@pytest.mark.parametrize("before", BEFORE)
def test_a_cancelled_task_never_comes(before: object) -> None:
    rig = rig_for(before)
    assert callable(before)
    task_id = before(rig)
    assert rig.cancel(task_id) == "cancelled"
    assert rig.cancel(task_id) == "already_cancelled"
    rig.load()
    rig.subscribe()
    assert rig.after(10_000).tick() == []
    rig.commit()
    assert rig.rows.is_empty()
    assert len(rig.core.wheel) == 0
    recount(rig)


@pytest.mark.parametrize("before", BEFORE)
def test_a_rescheduled_task_is_delivered_once_at_its_new_time(before: object) -> None:
    rig = rig_for(before)
    assert callable(before)
    task_id = before(rig)
    assert rig.reschedule(task_id, 120_000) == "scheduled"
    recount(rig)
    rig.load()
    rig.subscribe()
    assert rig.after(119_999).tick() == []
    assert rig.after(1).one().id == task_id
    assert rig.tick() == []
    recount(rig)


@pytest.mark.parametrize("before", BEFORE)
def test_a_new_time_survives_a_crash(before: object) -> None:
    rig = rig_for(before)
    assert callable(before)
    task_id = before(rig)
    rig.reschedule(task_id, 120_000)
    rig.commit()
    rig.crash()
    rig.subscribe()
    assert rig.after(119_999).tick() == []
    assert rig.after(1).one().id == task_id
    recount(rig)


@pytest.mark.parametrize("before", BEFORE)
def test_run_now_makes_it_due_now(before: object) -> None:
    rig = rig_for(before)
    assert callable(before)
    task_id = before(rig)
    assert rig.reschedule(task_id, 0) == "scheduled"
    rig.load()
    rig.subscribe()
    assert rig.one().id == task_id
    recount(rig)


def test_a_reschedule_during_a_read_delivers_once() -> None:
    rig = Rig(ROWS_ON_DEMAND)
    rig.subscribe()
    task_id = firing(rig)
    rig.reschedule(task_id, 0)
    rig.engine.firing.fire(rig.now_ms, 10)
    assert rig.core.rows_to_read.count(task_id) == 2
    assert rig.one().id == task_id
    assert rig.tick() == []
    recount(rig)


def test_a_task_in_flight_is_neither_cancelled_nor_rescheduled(rig: Rig) -> None:
    got = flying(rig)
    assert rig.cancel(got.id) == rig.reschedule(got.id, 0) == "in_flight"
    assert rig.ack(got) == "acked"
    assert rig.cancel(got.id) == rig.reschedule(got.id, 0) == "acked"


def test_a_dead_letter_is_neither_cancelled_nor_rescheduled(rig: Rig) -> None:
    got = flying(rig)
    rig.reject(got)
    assert rig.cancel(got.id) == rig.reschedule(got.id, 0) == "dead"


def test_unknown_and_finished_ids_are_distinguished(rig: Rig) -> None:
    task_id = scheduled(rig)
    assert rig.cancel(task_id + 1024) == rig.reschedule(task_id + 1024, 0) == "unknown"
    assert rig.cancel(task_id + 1) == rig.cancel(0) == rig.cancel(-1024) == "unknown"
    assert rig.cancel(task_id - 1024) == rig.reschedule(task_id - 1024, 0) == "gone"
    rig.cancel(task_id)
    assert rig.reschedule(task_id, 0) == "already_cancelled"


def test_a_reschedule_keeps_attempts_and_failures(rig: Rig) -> None:
    task_id = waiting(rig)
    rig.reschedule(task_id, 5_000)
    assert rig.after(4_999).tick() == []
    again = rig.after(1).one()
    assert again.attempt == 2
    assert len(rig.held(again).past.failures) == 1


def test_a_cancel_takes_the_dead_letter_of_another_group_with_it(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.enqueue()
    rig.subscribe(group="b", prefetch=0)
    (got,) = rig.tick()
    rig.reject(got)
    assert (rig.state(got.id), rig.core.dead) == ("ready", 1)
    assert rig.cancel(got.id) == "cancelled"
    assert (rig.core.dead, rig.group(name="a").dead) == (0, 0)
    rig.commit()
    assert rig.rows.is_empty()


@pytest.mark.parametrize("order_key", [None, "o"])
def test_a_cancel_makes_room_in_a_full_backlog(order_key: str | None) -> None:
    rig = OrderRig(replace(CONFIG, backlog_max=2))
    rig.put(order_key)
    second = rig.put(order_key)
    rig.fire()
    assert "t" in rig.core.full_topics
    rig.cancel(second)
    assert "t" not in rig.core.full_topics
    rig.enqueue()
    rig.fire()
    assert "t" in rig.core.full_topics
    rig.subscribe()
    assert "t" not in rig.core.full_topics


def view(rig: Rig, task_id: int) -> dict[str, GroupView]:
    known = rig.find(task_id)
    assert known is not None
    return rig.engine.control.view(known, rig.now_ms - rig.mono_ms)


def test_a_lookup_has_the_state_of_each_group(rig: Rig) -> None:
    groups = ("acks", "dies", "flies", "never reads", "waits")
    for group in groups:
        rig.subscribe(group=group, prefetch=0 if group == "never reads" else 1)
    task_id = rig.enqueue(delay_ms=100)
    assert view(rig, task_id) == {}
    rig.pass_time(100)
    got = {delivery.group.name: delivery for delivery in rig.tick()}
    rig.ack(got["acks"])
    rig.reject(got["dies"], "why")
    rig.nack(got["waits"], 700, "not yet")
    assert view(rig, task_id) == {
        "acks": GroupView("acked", 1, 0, (), 0),
        "dies": GroupView("dead", 1, rig.now_ms, ((1, rig.now_ms, "why", ""),), 0),
        "flies": GroupView("in_flight", 1, rig.now_ms + LEASE_MS, (), 3),
        "never reads": GroupView("ready", 0, rig.now_ms, (), 3),
        "waits": GroupView("waiting", 1, rig.now_ms + 700, ((1, rig.now_ms, "not yet", ""),), 3),
    }
    assert rig.state(task_id) == "in_flight"
