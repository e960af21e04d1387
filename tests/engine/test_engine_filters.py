"""What the filter of a group leaves out: not owed, counted, ended when nobody wants it; and the
moment of a change, which a crash does not move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.filter_rig import FilterRig
from support.engine_recount import recount
from support.engine_rig import CONFIG
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.ownership import needs_place
from tickwheel.model.filters import STEPS_PER_TICK, Filter
from tickwheel.model.records import FormerFilter, Outcome, TaskOptions

EU, US, BIG = ("eu", None), ("us", None), (None, "amount > 10")
ALL = (None, None)


@pytest.fixture
def rig() -> FilterRig:
    return FilterRig()


# --- what is left out ------------------------------------------------------------------------


def test_groups_get_the_tasks_that_match_their_filter(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b", BIG)
    rig.make("c")
    plain, small, large = rig.put(), rig.put(tag="eu", amount=5), rig.put(tag="eu", amount=11)
    other = rig.put(tag="us", amount=99)
    rig.consume("a", "b", "c")
    assert [rig.had(name) for name in "abc"] == [
        [small, large],
        [large, other],
        [plain, small, large, other],
    ]
    assert [rig.group("t", name).filtered for name in "abc"] == [2, 2, 0]
    assert rig.core.totals.filtered == 4
    assert rig.views(plain) == {"a": ("filtered", 0), "b": ("filtered", 0), "c": ("in_flight", 1)}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_task_that_no_group_wants_is_filtered(rig: FilterRig, groups: int) -> None:
    for name in "ab"[:groups]:
        rig.make(name, EU)
    gone, kept = rig.put(tag="us", ttl_ms=60_000), rig.put(tag="eu", ttl_ms=60_000)
    rig.consume("a")
    assert (rig.state(gone), rig.state(kept)) == ("filtered", "in_flight")
    assert not rig.group("t", "a").ready_count
    rig.commit()
    assert rig.rows.outcomes == {gone: Outcome.FILTERED}
    assert rig.rows.tasks.keys() == {kept}
    assert rig.core.tasks == 1
    assert len(rig.core.lifetimes) == groups - 1
    assert gone not in rig.core.resident_rows
    rig.crash()
    assert rig.state(gone) == "filtered"


def test_tasks_due_together_are_filtered_together(rig: FilterRig) -> None:
    rig.make("a", EU)
    options = [TaskOptions(key=f"k{n % 3}", tag="eu" if n % 2 else "us") for n in range(10)]
    new = [("t", rig.now_ms + 5, b"b", item) for item in (*options, TaskOptions(key="k0"))]
    rig.engine.intake.enqueue(None, None, 0, new, 1_000, rig.now_ms)
    rig.commit()
    ids = sorted(rig.core.resident_rows)
    rig.pass_time(5)
    rig.engine.firing.fire(rig.now_ms, len(new))
    assert rig.core.steps_left == STEPS_PER_TICK - len(new)
    recount(rig)
    ours, others = ids[1:10:2], {*ids[:10:2], ids[10]}
    assert rig.core.resident_rows.keys() == set(ours)
    assert (rig.group("t", "a").filtered, rig.core.totals.filtered) == (6, 6)
    rig.commit()
    assert rig.rows.outcomes == dict.fromkeys(others, Outcome.FILTERED)
    rig.subscribe("t", "a")
    assert [delivery.id for delivery in rig.tick()] == ours
    assert sorted(i for n in range(3) for i in rig.core.keys.find("t", f"k{n}")) == ours


def test_the_last_ack_of_a_matching_group_ends_the_task(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b", US)
    rig.make("c")
    (task_id,) = (rig.put(tag="us"),)
    subscribers = [rig.subscribe("t", name) for name in "abc"]
    got = rig.tick()
    assert [item.subscriber for item in got] == subscribers[1:]
    rig.ack(got[0])
    assert rig.state(task_id) == "in_flight"
    rig.ack(got[1])
    assert rig.state(task_id) == "acked"
    assert not rig.core.owed


def test_partly_filtered_tasks_are_cancelled_and_rescheduled(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b", US)
    one, other = rig.put(tag="us"), rig.put(tag="us")
    rig.fire()
    assert rig.group("t", "b").ready_count == 2
    assert rig.cancel(one) == "cancelled"
    assert rig.reschedule(other, 1_000) == "scheduled"
    assert rig.group("t", "b").ready_count == 0
    rig.commit()
    rig.pass_time(1_000)
    rig.consume("a", "b")
    assert (rig.had("a"), rig.had("b")) == ([], [other])


def test_plain_tasks_are_filtered_without_rows_in_memory() -> None:
    rig = FilterRig(replace(CONFIG, resident_bytes_max=0))
    rig.make("a", (None, "amount IS NULL AND priority = 0"))
    rig.make("b", EU)
    plain, paid = rig.put(5_000), rig.put(5_000, amount=1)
    rig.pass_time(5_000)
    rig.consume("a", "b")
    assert (rig.had("a"), rig.had("b")) == ([plain], [])
    assert rig.state(paid) == "filtered"


# --- the first group of a topic ---------------------------------------------------------------


def test_the_backlog_of_the_first_group_is_filtered_on_delivery(rig: FilterRig) -> None:
    ids = [rig.put(tag="eu" if n % 2 else "us", ttl_ms=60_000) for n in range(6)]
    rig.fire()
    group = rig.make("a", EU)
    later = rig.put(tag="us")
    assert group.ready_count == 6
    rig.refilter("a", US)
    rig.consume("a")
    assert rig.had("a") == sorted([*ids[1::2], later][:3])
    assert group.filtered == 4
    assert [rig.state(i) for i in ids[::2]] == ["filtered"] * 3
    assert not group.ready_count
    assert len(rig.core.lifetimes) == 0


def test_the_backlog_is_filtered_after_a_crash(rig: FilterRig) -> None:
    ids = [rig.put(tag="eu" if n % 2 else "us") for n in range(6)]
    rig.fire()
    rig.make("a", EU)
    rig.commit()
    rig.crash()
    rig.consume("a")
    assert rig.had("a") == ids[1::2]
    assert [rig.state(i) for i in ids[::2]] == ["filtered"] * 3


# --- groups that look back --------------------------------------------------------------------


def test_a_replayed_group_gets_matching_tasks(rig: FilterRig) -> None:
    rig.make("a")
    one, other = rig.put(tag="eu"), rig.put(tag="us")
    rig.fire()
    group = rig.make("b", US, 0)
    while rig.replay(group):
        pass
    rig.consume("b")
    assert rig.had("b") == [other]
    assert group.filtered == 1
    assert rig.views(one).keys() == {"a", "b"}


def test_a_task_that_fires_during_a_replay_is_counted_once(rig: FilterRig) -> None:
    rig.make("a")
    rig.put(1_000, tag="eu")
    group = rig.make("b", US, 0)
    rig.after(1_000).fire()
    assert group.filtered == 1
    while rig.replay(group):
        pass
    assert group.filtered == 1


@pytest.mark.parametrize("tag", ["eu", "us"])
def test_a_task_finished_before_a_replay_reaches_it_is_filtered_then(
    rig: FilterRig, tag: str
) -> None:
    rig.make("a")
    task_id = rig.put(tag=tag, ttl_ms=60_000)
    rig.subscribe("t", "a")
    (got,) = rig.tick()
    group = rig.make("b", US, 0)
    rig.ack(got)
    assert task_id in group.loading
    rig.commit()
    while rig.replay(group):
        pass
    rig.consume("b")
    wanted = tag == "us"
    assert rig.had("b") == [task_id] * wanted
    assert rig.state(task_id) == ("in_flight" if wanted else "filtered")
    assert group.filtered == (not wanted)
    assert not group.loading


# --- the moment of a change -------------------------------------------------------------------


@pytest.mark.parametrize("crashes", [False, True])
def test_tasks_due_before_a_change_use_the_old_filter(rig: FilterRig, crashes: bool) -> None:
    rig.make("a", EU)
    rig.make("b")
    before, coming = rig.put(tag="eu"), rig.put(1_000, tag="eu")
    left_out = rig.put(tag="us")
    rig.fire()
    rig.refilter("a", US)
    after = rig.put(tag="us")
    rig.commit()
    if crashes:
        rig.crash()
    rig.consume("a", "b")
    rig.after(1_000).tick()
    assert rig.had("a") == sorted([before, after])
    assert rig.had("b") == sorted([before, coming, left_out, after])


def test_overdue_unfired_tasks_use_the_old_filter(rig: FilterRig) -> None:
    rig.make("a", EU)
    ids = [rig.put(delay_ms, tag=tag) for delay_ms in (0, 5, 6) for tag in ("eu", "us")]
    rig.pass_time(5)
    rig.refilter("a", US)
    rig.pass_time(1)
    rig.consume("a")
    assert rig.had("a") == [ids[0], ids[2], ids[5]]


def test_a_task_being_read_during_a_change_uses_the_old_filter() -> None:
    rig = FilterRig(replace(CONFIG, resident_bytes_max=0))
    rig.make("a", EU)
    task_id = rig.put(tag="eu")
    rig.engine.firing.fire(rig.now_ms, 100)
    assert task_id in rig.core.firing
    rig.refilter("a", US)
    rig.consume("a")
    assert rig.had("a") == [task_id]


def test_a_change_that_was_not_durable_is_forgotten_by_a_crash(rig: FilterRig) -> None:
    rig.make("a", EU)
    task_id = rig.put(1_000, tag="us")
    rig.refilter("a", US)
    rig.crash()
    rig.pass_time(1_000)
    rig.consume("a")
    assert rig.had("a") == []
    assert rig.state(task_id) == "filtered"


def test_a_change_stays_when_its_batch_is_refused(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.commit()
    rig.refilter("a", US)
    rig.put(tag="us", lands=False)
    rig.seal()
    rig.refuse()
    kept = rig.put(tag="us")
    rig.consume("a")
    assert rig.had("a") == [kept]
    rig.crash()
    assert rig.group("t", "a").settings.tags == "us"


def test_a_task_rescheduled_after_a_change_uses_the_new_filter(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.configure("t", "a", paused=True)
    old = rig.put(tag="eu")
    rig.fire()
    rig.refilter("a", US)
    assert rig.reschedule(old, 0) == "scheduled"
    rig.consume("a")
    assert rig.state(old) == "filtered"


def test_a_task_moved_to_now_before_a_change_uses_the_old_filter(rig: FilterRig) -> None:
    """Behind a group that came meanwhile, so that it has a place later than all ids there are."""
    rig.make("a")
    task_id = rig.put(1)
    rig.consume("a")
    rig.commit()
    rig.make("b")
    rig.commit()
    assert rig.reschedule(task_id, 0) == "scheduled"
    rig.commit()
    rig.refilter("a", EU)
    rig.commit()
    rig.consume("a", "b")
    assert rig.had("a") == rig.had("b") == [task_id]


def test_a_requeued_dead_letter_ignores_the_new_filter(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.subscribe("t", "a")
    task_id = rig.put(tag="eu")
    rig.reject(rig.one())
    rig.refilter("a", US)
    rig.commit()
    rig.crash()
    assert rig.requeue(task_id, "a") == "requeued"
    rig.commit()
    rig.crash()
    rig.consume("a")
    assert rig.had("a") == [task_id]


def test_a_clock_set_back_does_not_move_a_filter_change(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b")
    old = rig.put(tag="eu")
    rig.after(2_000).fire()
    rig.stop_and_start(back_ms=5_000)
    rig.refilter("a", US)
    rig.commit()
    rig.pass_time(6_000)
    rig.consume("a", "b")
    assert rig.had("a") == [old]


def test_a_change_without_due_tasks_keeps_no_former_filter(rig: FilterRig) -> None:
    group = rig.make("a", EU)
    rig.put(60_000, tag="eu")
    rig.refilter("a", US)
    assert group.settings.former == ()
    rig.put(tag="us")
    rig.consume("a")
    rig.refilter("a", EU)
    rig.refilter("a", BIG)
    assert group.settings.former == (FormerFilter("us", None, rig.now_ms, rig.core.wheel_id),)
    for lease in list(group.flight.values()):
        assert not rig.engine.settlement.ack(group, lease.epoch, [lease.id], [lease.attempt])
    rig.refilter("a", ALL)
    assert group.settings.former == ()
    assert group.judge is None
    assert not rig.core.topic("t").filtering


def test_each_former_filter_applies_to_its_period(rig: FilterRig) -> None:
    rig.make("a", EU)
    wanted = [rig.put(tag="eu"), 0, 0]
    rig.put(tag="us")
    rig.fire()
    rig.refilter("a", US)
    rig.put(tag="eu")
    wanted[1] = rig.put(tag="us")
    rig.fire()
    rig.refilter("a", BIG)
    rig.put(tag="us")
    wanted[2] = rig.put(amount=11)
    rig.commit()
    for _ in range(2):
        rig.crash()
        rig.consume("a")
        assert rig.had("a") == wanted
    assert [task.tags for task in rig.group("t", "a").settings.former] == ["eu", "us"]


def test_a_crash_does_not_move_tasks_between_groups(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b", US)
    rig.subscribe("t", "b")
    task_id = rig.put(tag="us")
    (got,) = rig.tick()
    rig.nack(got, 1_000)
    rig.commit()
    rig.crash()
    rig.pass_time(1_000)
    rig.consume("a", "b")
    assert (rig.had("a"), rig.had("b")) == ([], [task_id])


def test_tasks_rescheduled_after_a_change_get_places(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b")
    rig.put()
    rig.consume("b")
    far = [rig.put(1_000) for _ in range(3)]
    rig.after(500).fire()
    rig.pass_time(4_000)
    rig.refilter("a", (None, "tag IS NULL"))
    rig.stop_and_start(back_ms=4_200)
    for task_id in far:
        assert rig.reschedule(task_id, 1_000) == "scheduled"
    rig.commit()
    rig.pass_time(1_000)
    rig.consume("a", "b")
    assert rig.had("a") == far


def test_an_equivalent_filter_is_no_change(rig: FilterRig) -> None:
    group = rig.make("a", (None, "amount > 10"))
    rig.put(amount=11)
    rig.consume("a")
    rig.refilter("a", (None, "(amount   > 10.0)"))
    assert group.settings.former == ()
    assert group.settings.where == "(amount   > 10.0)"


def test_places_are_given_only_if_a_former_filter_would_apply(rig: FilterRig) -> None:
    group = rig.make("a", EU)
    old = rig.put(tag="eu")
    rig.consume("a")
    rig.pass_time(1_000)
    rig.refilter("a", US)
    known = rig.find(old)
    assert known is not None
    moment_ms = group.settings.former[0].due_ms
    assert needs_place([group], known.row._replace(due_ms=moment_ms))
    assert not needs_place([group], known.row._replace(due_ms=moment_ms + 1))


def test_deleting_a_group_deletes_its_filter(rig: FilterRig) -> None:
    rig.make("a", EU)
    rig.make("b")
    assert rig.core.topic("t").filtering
    rig.delete_group("t", "a")
    assert not rig.core.topic("t").filtering
    rig.make("a")
    task_id = rig.put(tag="us")
    rig.consume("a", "b")
    assert rig.had("a") == rig.had("b") == [task_id]


# --- broadcasts -------------------------------------------------------------------------------


def test_a_broadcast_has_a_filter_of_its_own(rig: FilterRig) -> None:
    rig.make("a", EU)
    topic = rig.core.topic("t")
    for number, wanted in enumerate((None, Filter("us"), Filter(where="amount > 10"))):
        subscriber = Broadcaster(None, topic, 100, str(number), wanted)
        rig.engine.subscriptions.subscribe(subscriber)
    one, other = rig.put(tag="us", amount=1), rig.put(tag="eu", amount=11)
    got = [(delivery.subscriber.label, delivery.id) for delivery in rig.tick()]
    assert sorted(got) == [("0", one), ("0", other), ("1", one), ("2", other)]
    assert rig.state(one) == "filtered"


# --- judging is bounded ----------------------------------------------------------------------

DEAR = (None, "s LIKE '%" + "a_" * 25 + "%'")


def dear_steps() -> int:
    return Filter(*DEAR).steps


def test_a_text_search_costs_more_than_a_comparison() -> None:
    assert Filter("eu").steps == 1
    assert Filter(None, "a > 1 AND b = 2 OR s LIKE 'x%'").steps == 4
    assert dear_steps() > 10_000


@pytest.mark.parametrize("resident", [True, False])
def test_tasks_filtered_per_step_are_limited(resident: bool) -> None:
    rig = FilterRig(CONFIG if resident else replace(CONFIG, resident_bytes_max=0))
    rig.make("a", DEAR)
    rig.make("b")
    ids = [rig.put(1_000, s="x", lands=n == 99) for n in range(100)]
    rig.pass_time(1_000)
    at_once = -(-STEPS_PER_TICK // dear_steps())
    looks = 0
    while rig.group("t", "a").filtered < len(ids):
        before = rig.group("t", "a").filtered
        more = rig.engine.firing.fire(rig.now_ms, 1_000)
        looks += 1
        judged = rig.group("t", "a").filtered - before
        assert judged <= at_once
        if rig.core.rows_to_read:
            rig.load()
            judged = rig.group("t", "a").filtered - before
            assert judged <= 2 * at_once
        else:
            assert more == (rig.group("t", "a").filtered < len(ids))
        recount(rig)
    assert looks >= len(ids) // (2 * at_once)
    rig.consume("b")
    assert rig.had("b") == ids


def test_unfiltered_tasks_can_be_cancelled_and_rescheduled(rig: FilterRig) -> None:
    rig.make("a", DEAR)
    rig.make("b")
    ids = [rig.put(1_000, s="x", lands=n == 29) for n in range(30)]
    rig.pass_time(1_000)
    assert rig.engine.firing.fire(rig.now_ms, 1_000)
    assert {rig.state(i) for i in ids[-3:]} == {"scheduled"}
    assert rig.cancel(ids[-1]) == "cancelled"
    assert rig.reschedule(ids[-2], 500) == "scheduled"
    recount(rig)
    rig.consume("a", "b")
    assert rig.had("b") == ids[:-2]
    rig.pass_time(500)
    rig.consume("b")
    assert rig.had("b") == ids[:-1]


def test_the_backlog_of_a_new_filter_is_judged_in_steps(rig: FilterRig) -> None:
    ids = [rig.put(s="x", lands=n == 29) for n in range(30)]
    rig.fire()
    rig.make("a", DEAR)
    rig.subscribe("t", "a")
    at_once = -(-STEPS_PER_TICK // dear_steps())
    more, looks = True, 0
    while more:
        before = rig.group("t", "a").filtered
        out, more = rig.engine.delivery.dispatch(rig.now_ms, rig.mono_ms, 1_000)
        assert out == []
        assert rig.group("t", "a").filtered - before <= at_once
        looks += 1
    assert looks >= len(ids) // at_once
    assert rig.group("t", "a").filtered == len(ids)
