"""Keys that operators have paused: their tasks are not handed out, and nobody else has to wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.test_engine_ordering import OrderRig, fair_rig, rig_with
from support.engine_recount import recount, recounted
from support.engine_rig import CONFIG, Rig
from tickwheel.engine.ordering import REMEMBERED_MAX
from tickwheel.engine.tasks import PausedKeyState
from tickwheel.model.kinds import PAUSED_KEY, Bulk, PausedKey, Selection
from tickwheel.model.lateness import Cause

rig = recounted(OrderRig)
RESTARTS = (None, Rig.crash, Rig.stop_and_start)


def pause(rig: OrderRig, value: Any, fair_by: str | None = None, by: str = "ops") -> PausedKey:
    key = PausedKey("t", "default", fair_by, value, rig.now_ms, by)
    return rig.engine.key_control.pause(rig.group(), key)


def resume(rig: OrderRig, value: Any, fair_by: str | None = None) -> PausedKey | None:
    return rig.engine.key_control.resume(rig.group(), fair_by, value, rig.now_ms)


def paused(rig: OrderRig) -> list[PausedKeyState]:
    return rig.engine.key_control.paused_keys(rig.group())


@pytest.mark.parametrize("restart", RESTARTS)
def test_tasks_of_a_paused_key_wait_for_its_resume(restart: Any) -> None:
    rig, (a1, b1, plain) = rig_with(("a", 0), ("b", 0), (None, 0))
    key = pause(rig, "a")
    rig.commit()
    if restart is not None:
        restart(rig)
        rig.subscribe()
    assert set(rig.ids()) == {b1, plain}
    a2 = rig.put("a")
    rig.pass_time(60_000)
    rig.fire()
    assert paused(rig) == [PausedKeyState(key, 2)], "also those that nobody has tried to hand out"
    assert set(rig.ids()) <= {b1, plain}
    assert paused(rig) == [PausedKeyState(key, 2)]
    assert resume(rig, "a") == key
    got = rig.one()
    assert got.id == a1
    rig.done(got)
    assert a2 in rig.ids()
    assert paused(rig) == []


@pytest.mark.parametrize("restart", RESTARTS[1:])
def test_a_resumed_key_is_not_paused_after_a_restart(restart: Any) -> None:
    rig, (a1,) = rig_with(("a", 0))
    pause(rig, "a")
    rig.commit()
    resume(rig, "a")
    rig.commit()
    restart(rig)
    rig.subscribe()
    assert rig.ids() == [a1]


@pytest.mark.parametrize("restart", RESTARTS)
def test_tasks_of_a_paused_value_wait_for_its_resume(restart: Any) -> None:
    rig = fair_rig()
    ids = [rig.put(None, tenant=tenant) for tenant in ("a", "a", "b", "a")]
    pause(rig, "a", "tenant")
    rig.commit()
    if restart is not None:
        restart(rig)
    rig.subscribe()
    assert rig.ids() == [ids[2]]
    ids.append(rig.put(None, tenant="a"))
    assert rig.ids() == []
    assert paused(rig)[0].waiting == 4
    resume(rig, "a", "tenant")
    assert rig.ids() == [ids[0], ids[1], ids[3], ids[4]]


def test_ready_tasks_of_a_paused_value_keep_their_order() -> None:
    """Tasks of a value that were ready before the pause come first, in order."""
    rig = fair_rig()
    ids = [rig.put(None, tenant="a", lands=False) for _ in range(200)]
    rig.commit()
    rig.fire()
    pause(rig, "a", "tenant")
    assert paused(rig)[0].waiting == 200
    other = rig.put(None, tenant="b")
    subscriber = rig.subscribe(prefetch=1_000)
    assert rig.ids() == [other]
    assert paused(rig)[0].waiting == 200
    resume(rig, "a", "tenant")
    assert [got.id for got in rig.tick()] == ids
    assert subscriber.outstanding == 201


def test_a_task_in_flight_of_a_paused_key_can_be_acked() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    got = rig.one()
    pause(rig, "a")
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.state(a1) == "acked"
    assert rig.ids() == []
    resume(rig, "a")
    assert rig.ids() == [a2]


@pytest.mark.parametrize("how", ["nack", "lapse", "snooze"])
def test_a_returned_task_keeps_its_paused_key(how: str) -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    got = rig.one()
    pause(rig, "a")
    if how == "nack":
        rig.nack(got)
    elif how == "snooze":
        rig.snooze(got, 10)
    rig.pass_time(60_000)
    earlier = rig.put("a", -90_000)
    assert rig.ids() == []
    rig.commit()
    assert rig.ids() == []
    resume(rig, "a")
    again = rig.one()
    assert (again.id, again.attempt) == (a1, 2)
    rig.done(again)
    assert rig.one().id == earlier
    assert rig.state(a2) == "ready"


def test_a_resumed_key_starts_with_the_earliest_task() -> None:
    rig, (later,) = rig_with(("a", 0))
    pause(rig, "a")
    assert rig.ids() == []
    earlier = rig.put("a", -1_000)
    resume(rig, "a")
    assert rig.ids() == [earlier]
    assert rig.state(later) == "ready"


def test_a_key_that_nobody_has_used_can_be_paused(rig: OrderRig) -> None:
    rig.subscribe()
    assert pause(rig, "a").value == "a"
    rig.commit()
    first = rig.put("a")
    assert rig.ids() == []
    resume(rig, "a")
    assert rig.ids() == [first]


def test_pausing_again_keeps_who_and_since_when(rig: OrderRig) -> None:
    rig.subscribe()
    first = pause(rig, "a", by="ann")
    rig.pass_time(1_000)
    assert pause(rig, "a", by="bob") == first
    assert resume(rig, "a") == first
    assert resume(rig, "a") is None


@pytest.mark.parametrize(("one", "other"), [("1", 1), (1, True), ("True", True), (1.5, "1.5")])
def test_values_of_different_types_are_different_keys(one: Any, other: Any) -> None:
    rig = fair_rig()
    rig.subscribe()
    for value in (one, other):
        pause(rig, value, "tenant")
    rig.commit()
    assert len(rig.rows.paused_keys) == len(paused(rig)) == 2
    resume(rig, one, "tenant")
    rig.commit()
    rig.crash()
    rig.subscribe()
    ids = [rig.put(None, tenant=value) for value in (one, other)]
    assert rig.ids() == ids[:1]


def test_equal_numbers_are_the_same_key() -> None:
    rig = fair_rig()
    first = pause(rig, 2, "tenant")
    assert pause(rig, 2.0, "tenant") == first
    assert PAUSED_KEY.key(first) == PAUSED_KEY.key(first._replace(value=2.0))


@pytest.mark.parametrize("what", ["cancel", "move", "run now"])
def test_tasks_of_a_paused_key_can_be_cancelled_and_rescheduled(rig: OrderRig, what: str) -> None:
    rig.subscribe()
    pause(rig, "a")
    first, second = rig.put("a"), rig.put("a")
    assert rig.ids() == []
    if what == "cancel":
        assert rig.cancel(first) == "cancelled"
    else:
        assert rig.reschedule(first, 5_000 if what == "move" else 0) == "scheduled"
    recount(rig)
    rig.commit()
    assert rig.ids() == []  # also run now does not go round the pause
    resume(rig, "a")
    assert rig.ids() == [first if what == "run now" else second]


def test_tasks_of_a_paused_key_expire() -> None:
    rig, _ = rig_with()
    pause_first = rig.put("b")
    rig.tick()
    pause(rig, "a")
    first, second = rig.put("a", ttl_ms=1_000), rig.put("a")
    assert rig.ids() == []
    rig.pass_time(2_000)
    assert rig.ids() == []
    rig.commit()
    assert rig.state(first) == "expired"
    resume(rig, "a")
    assert rig.ids() == [second]
    assert rig.state(pause_first) == "in_flight"


def test_bulk_operations_change_tasks_of_a_paused_key() -> None:
    rig, ids = rig_with(("a", 0), ("b", 0))
    pause(rig, "a")
    assert rig.ids() == [ids[1]]
    known = rig.known(ids[:1])
    bulk = Bulk("j", "cancel", "t", Selection(), (), None, rig.now_ms, rig.core.landed_id)
    rig.engine.bulks.act(bulk, list(known.values()), "t", {}, {}, rig.now_ms, 10_000)
    rig.commit()
    assert rig.state(ids[0]) == "cancelled"


def test_a_paused_key_does_not_affect_other_groups(rig: OrderRig) -> None:
    rig.create_group("t", "default")
    rig.create_group("t", "other")
    pause(rig, "a")
    first = rig.put("a")
    rig.subscribe()
    rig.subscribe(group="other")
    (got,) = rig.tick()
    assert (got.id, got.group.name) == (first, "other")


def test_a_paused_order_key_uses_no_share_of_its_value() -> None:
    rig = fair_rig(limit_each=1)
    rig.subscribe()
    pause(rig, "k")
    kept, other = rig.put("k", tenant="a"), rig.put(None, tenant="a")
    got = rig.one()
    assert got.id == other
    resume(rig, "k")
    assert rig.ids() == []
    rig.done(got)
    assert rig.ids() == [kept]


def test_an_order_key_and_a_value_are_paused_apart() -> None:
    rig = fair_rig()
    rig.subscribe()
    pause(rig, "k")
    pause(rig, "a", "tenant")
    first = rig.put("k", tenant="a")
    assert rig.ids() == []
    resume(rig, "k")
    assert rig.ids() == []
    assert [task.key.fair_by for task in paused(rig)] == ["tenant"]
    resume(rig, "a", "tenant")
    assert rig.ids() == [first]


@pytest.mark.parametrize("by", [None, "region"])
def test_a_changed_fair_by_frees_tasks_of_a_paused_value(by: str | None) -> None:
    rig = fair_rig()
    rig.subscribe()
    pause(rig, "a", "tenant")
    first = rig.put(None, tenant="a", region="x")
    order = rig.put("k", tenant="a", region="x")
    pause(rig, "k")
    assert rig.ids() == []
    rig.configure("t", "default", fair_by=by)
    assert rig.ids() == [first]
    assert [task.key.value for task in paused(rig)] == ["k"]
    rig.configure("t", "default", fair_by="tenant")
    rig.commit()
    rig.crash()
    rig.subscribe()
    assert [task.key.value for task in paused(rig)] == ["k"]
    other = rig.put(None, tenant="a")
    assert other in rig.ids()
    resume(rig, "k")
    assert rig.ids() == [order]


def test_a_paused_value_holds_an_unread_backlog(rig: OrderRig) -> None:
    rig.create_group("t", "default")
    ids = [rig.put(None, tenant=tenant) for tenant in ("a", "b", "a")]
    rig.fire()
    rig.configure("t", "default", fair_by="tenant")
    pause(rig, "a", "tenant")
    rig.subscribe()
    assert rig.ids() == [ids[1]]
    resume(rig, "a", "tenant")
    assert rig.ids() == [ids[0], ids[2]]


@pytest.mark.parametrize("released", [True, False])
def test_a_held_key_that_is_paused_waits_for_both(released: bool) -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.configure("t", "default", order_failure="hold", order_attempts=1)
    assert rig.nack(rig.one()) == "held"
    pause(rig, "a")
    known, control = rig.find(a1), rig.engine.key_control
    assert known is not None
    (control.release if released else control.skip)(rig.group(), known, rig.now_ms)
    rig.commit()
    assert rig.ids() == []
    resume(rig, "a")
    assert rig.one().id == (a1 if released else a2)


def test_a_paused_key_is_not_held() -> None:
    rig, (a1,) = rig_with(("a", 0))
    pause(rig, "a")
    assert rig.ids() == []
    known, control = rig.find(a1), rig.engine.key_control
    assert known is not None
    for act in (control.release, control.skip):
        assert act(rig.group(), known, rig.now_ms) == "not_held"
    assert rig.ids() == []
    assert rig.group().held == 0


@pytest.mark.parametrize("crashes", [True, False])
def test_the_deletion_of_a_group_drops_its_paused_keys(rig: OrderRig, crashes: bool) -> None:
    rig.create_group("t", "default")
    rig.create_group("t", "other")
    pause(rig, "a")
    for _ in range(3):
        rig.put("a")
    rig.subscribe()
    assert rig.ids() == []
    group = rig.close_group("t", "default")
    rig.commit()
    assert rig.rows.paused_keys == {}
    if crashes:
        rig.crash()
        rig.fire()
        group = rig.group()
    while not rig.drain(group):
        rig.commit()
    rig.commit()
    rig.create_group("t", "default")
    assert paused(rig) == []


@pytest.mark.parametrize(("group", "fair_by"), [("gone", None), ("default", "tenant")])
def test_a_pause_of_a_missing_group_is_dropped_at_a_start(
    rig: OrderRig, group: str, fair_by: str | None
) -> None:
    """As after a restore of an older backup."""
    rig.create_group("t", "default")
    rig.commit()
    key = PausedKey("t", group, fair_by, "a", rig.now_ms, "ops")
    rig.rows.paused_keys[PAUSED_KEY.key(key)] = key
    rig.crash()
    rig.commit()
    assert rig.rows.paused_keys == {}


@pytest.mark.parametrize("many", [True, False], ids=["many", "one"])
def test_lease_batches_leave_paused_keys_out(rig: OrderRig, many: bool) -> None:
    """With an order key each, tasks are handed out in one step, unless one of the keys is odd."""
    rig.create_group("t", "default")
    pause(rig, "k3")
    ids = [rig.put(f"k{n}", lands=False) for n in range(6)]
    rig.commit()
    for _ in range(3 if many else 1):
        rig.subscribe()
    assert sorted(rig.ids()) == [*ids[:3], *ids[4:]]


def test_paused_tasks_without_rows_in_memory_wait() -> None:
    rig = OrderRig(replace(CONFIG, resident_bytes_max=0))
    rig.create_group("t", "default")
    pause(rig, "a")
    kept, other = rig.put("a"), rig.put("b")
    rig.subscribe()
    assert rig.ids() == [other]
    rig.pass_time(60_000)
    resume(rig, "a")
    assert kept in rig.ids()


# --- how it is shown --------------------------------------------------------------------------


def test_order_lines_show_paused_keys() -> None:
    rig = fair_rig(limit_each=5)
    rig.subscribe()
    pause(rig, "k")
    pause(rig, "a", "tenant")
    for _ in range(3):
        rig.put("k", tenant="b")
        rig.put(None, tenant="a")
    rig.tick()
    result = rig.engine.key_control.longest_queues(rig.group(), 10)
    assert [(item.kind, item.state, item.waiting) for item in result] == [
        ("fair", "paused", 3),
        ("order", "paused", 2),
    ]


def test_paused_tasks_count_for_the_oldest_age() -> None:
    rig, _ = rig_with(("a", 0))
    begin_ms = rig.now_ms
    pause(rig, "a")
    rig.tick()
    rig.pass_time(5_000)
    assert rig.group().oldest_since_ms() == begin_ms


# --- why it is late ---------------------------------------------------------------------------


@pytest.mark.parametrize("restart", RESTARTS)
def test_lateness_by_a_paused_key_has_its_cause(restart: Any) -> None:
    rig, (a1, a2, b1) = rig_with(("a", 0), ("a", 0), ("b", 40_000))
    pause(rig, "a")
    rig.tick()
    rig.commit()
    rig.pass_time(30_000)
    if restart is not None:
        restart(rig)
        rig.subscribe()
    rig.pass_time(10_000)
    assert rig.one().id == b1
    resume(rig, "a")
    got = rig.one()
    rig.pass_time(1_000)
    rig.done(got)
    assert rig.one().id == a2  # its turn came late, too, but most of its wait was the pause
    assert (rig.causes[a1], rig.causes[a2]) == (Cause.KEY_PAUSED, Cause.KEY_PAUSED)
    assert rig.causes[b1] is None


def test_deliveries_of_a_frame_have_separate_causes() -> None:
    rig = fair_rig(limit_each=1)
    subscriber = rig.subscribe()
    pause(rig, "a", "tenant")
    ids = [rig.put(None, tenant=tenant) for tenant in ("a", "b", "b")]
    first = rig.one()
    rig.pass_time(5_000)
    resume(rig, "a", "tenant")
    assert rig.ack(first) == "acked"
    rig.commit()
    assert {got.id for got in rig.tick()} == {ids[0], ids[2]}
    assert (rig.causes[ids[0]], rig.causes[ids[2]]) == (Cause.KEY_PAUSED, Cause.KEY_BUSY)
    assert subscriber.outstanding == 2


def test_remembered_past_pauses_are_limited(rig: OrderRig) -> None:
    rig.subscribe()
    pause(rig, "first")
    for number in range(2 * REMEMBERED_MAX):
        pause(rig, f"k{number}")
        resume(rig, f"k{number}")
    assert len(rig.group().key_intervals) == REMEMBERED_MAX + 1
    first = rig.put("first")
    rig.pass_time(1_000)
    assert rig.ids() == []
    resume(rig, "first")
    rig.one()
    assert rig.causes[first] is Cause.KEY_PAUSED
