"""Groups that are made by an operator, and groups that are deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, Rig
from tickwheel.model.policies import Coalescing
from tickwheel.model.records import ProgressState

# --- made ----------------------------------------------------------------------------------------


def test_the_first_group_gets_the_whole_backlog(rig: Rig) -> None:
    early = rig.enqueue()
    rig.fire()
    rig.pass_time(1_000)
    assert rig.create_group("t", "g", rig.now_ms).since_ms == 0
    rig.subscribe(group="g")
    assert rig.one().id == early


def test_a_group_from_the_first_task_gets_unfinished_tasks(rig: Rig) -> None:
    rig.subscribe(group="a")
    acked, flying, waiting, dead_lettered = (rig.enqueue() for _ in range(4))
    scheduled = rig.enqueue(delay_ms=100)
    got = {delivery.id: delivery for delivery in rig.tick()}
    rig.ack(got[acked])
    rig.nack(got[waiting], 5_000)
    rig.reject(got[dead_lettered])
    rig.create_group("t", "b", 0)
    recount(rig)
    rig.after(100).subscribe(group="b")
    mine = [delivery.id for delivery in rig.tick() if delivery.group.name == "b"]
    assert sorted(mine) == sorted([flying, waiting, dead_lettered, scheduled])


def test_a_group_from_a_time_gets_tasks_due_since(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    rig.enqueue()
    rig.pass_time(1_000)
    since_ms = rig.now_ms
    later = rig.enqueue()
    rig.after(1_000).fire()
    rig.create_group("t", "b", since_ms)
    rig.subscribe(group="b")
    assert rig.one().id == later


@pytest.mark.parametrize("crashes", [False, True])
def test_a_start_in_the_past_means_the_same_after_a_crash(rig: Rig, crashes: bool) -> None:
    rig.subscribe(group="a", prefetch=0)
    ids = [rig.enqueue() for _ in range(3)]
    rig.fire()
    rig.create_group("t", "b", 0)
    rig.commit()
    if crashes:
        rig.crash()
    rig.subscribe(group="b")
    assert sorted(delivery.id for delivery in rig.tick()) == ids


def test_replaying_a_page_twice_changes_nothing(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    task_id = rig.enqueue()
    rig.fire()
    group = rig.create_group("t", "b", 0, replays=False)
    known = rig.find(task_id)
    assert known is not None
    replay = rig.core.topics["t"].replays[group]
    for following in (task_id - 1, None, None):
        rig.engine.ownership.examine_page(replay, [known], following, rig.now_ms)
    assert group.ready_count == 1


# --- deleted -------------------------------------------------------------------------------------


def held(rig: Rig, group: str) -> dict[str, int]:
    """A group with one of everything. Their ids by name."""
    consumer = rig.subscribe(group=group, prefetch=4)
    names = ("acked", "flying", "waiting", "buried", "ready")
    ids = {name: rig.enqueue() for name in names}
    got = {delivery.id: delivery for delivery in rig.tick() if delivery.group.name == group}
    rig.ack(got[ids["acked"]])
    rig.nack(got[ids["waiting"]], 5_000)
    rig.reject(got[ids["buried"]])
    consumer.prefetch = 0
    ids["scheduled"] = rig.enqueue(delay_ms=500)
    return ids


def test_deleting_the_only_group_keeps_scheduled_tasks(rig: Rig) -> None:
    ids = held(rig, "a")
    rig.delete_group("t", "a")
    recount(rig)
    words = {name: rig.state(task_id) for name, task_id in ids.items()}
    assert words == {
        "acked": "acked", "flying": "deleted", "waiting": "deleted", "buried": "deleted",
        "ready": "deleted", "scheduled": "scheduled",
    }  # fmt: skip
    assert not rig.rows.groups and not rig.rows.progress and not rig.rows.dead
    rig.after(500).fire()
    assert rig.state(ids["scheduled"]) == "ready"
    rig.subscribe(group="next")
    assert rig.one().id == ids["scheduled"]


def test_deleting_one_of_two_groups_keeps_the_others_tasks(rig: Rig) -> None:
    rig.subscribe(group="b", prefetch=0)
    ids = held(rig, "a")
    rig.delete_group("t", "a")
    recount(rig)
    assert {rig.state(task_id) for name, task_id in ids.items() if name != "scheduled"} == {"ready"}
    done = {k: row.state for k, row in rig.rows.progress.items()}
    assert done == {(ids["acked"], "a"): ProgressState.DONE}
    rig.after(500).subscribe(group="b")
    got = rig.tick()
    assert sorted(task.id for task in got) == sorted(ids.values())
    for item in got:
        assert rig.ack(item) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_deleting_the_first_group_keeps_the_second_ones_tasks(rig: Rig) -> None:
    """Tasks owed to the first group alone name no group and must not be given to another."""
    rig.subscribe(group="a", prefetch=0)
    old = rig.enqueue()
    rig.fire()
    rig.after(1).subscribe(group="b", prefetch=0)
    both = rig.enqueue()
    rig.fire()
    group = rig.close_group("t", "a")
    late = rig.after(1).enqueue()
    rig.fire()
    recount(rig)
    while not rig.drain(group, 1):
        rig.commit()
        recount(rig)
    assert [rig.state(i) for i in (old, both, late)] == ["deleted", "ready", "ready"]
    rig.subscribe(group="b")
    assert sorted(delivery.id for delivery in rig.tick()) == [both, late]


def test_tasks_due_during_a_deletion_wait_for_the_next_group(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    rig.store(count=3)
    rig.fire()
    group = rig.close_group("t", "a")
    late = rig.after(1).enqueue()
    rig.fire()
    assert rig.state(late) == "scheduled"
    recount(rig)
    assert rig.cancel(rig.enqueue()) == "cancelled"
    rig.fire()
    while not rig.drain(group, 1):
        rig.commit()
    rig.fire()
    assert rig.state(late) == "ready"
    recount(rig)
    rig.subscribe(group="b")
    assert rig.one().id == late


@pytest.mark.parametrize("action", ["keep", "reject", "replace"])
def test_a_task_that_ends_with_its_group_is_not_pending(rig: Rig, action: str) -> None:
    rig.subscribe(group="a", prefetch=0)
    old = rig.enqueue(key="k")
    rig.fire()
    group = rig.close_group("t", "a")
    new = rig.coalesce(Coalescing(action), 0)
    rig.commit()
    while not rig.drain(group):
        rig.commit()
    rig.commit()
    rig.fire()
    assert (rig.state(old), rig.state(new)) == ("deleted", "ready")


def test_a_new_group_gets_tasks_due_during_a_deletion(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    old = rig.enqueue()
    rig.fire()
    group = rig.close_group("t", "a")
    late = rig.after(5).enqueue()
    rig.fire()
    rig.after(5).subscribe(group="b")
    assert rig.one().id == late
    rig.commit()
    rig.crash()
    (group,) = [g for g in rig.core.topics["t"].groups.values() if g.is_closed]
    assert not rig.drain(group), "what it held comes due anew, and is its own until then"
    rig.fire()
    while not rig.drain(group):
        rig.commit()
    rig.commit()
    assert rig.state(old) == "deleted"
    rig.subscribe(group="b")
    assert rig.one().id == late


@pytest.mark.parametrize("finishes", [False, True])
def test_tasks_due_during_a_deletion_do_not_stop_other_topics(finishes: bool) -> None:
    rig = Rig(replace(CONFIG, loading_max=10))
    rig.subscribe(group="a", prefetch=0)
    rig.enqueue()
    rig.fire()
    group = rig.close_group("t", "a")
    late = rig.after(1).store(count=30)
    rig.fire()
    while finishes and not rig.drain(group):
        rig.commit()
    rig.subscribe(group="b")
    other = rig.enqueue("other")
    rig.engine.firing.fire(rig.now_ms, 1_000)
    assert rig.state(other) == "ready"
    cancelled = late.pop()
    assert rig.cancel(cancelled) == "cancelled"
    while rig.core.refiring:
        rig.load()
        rig.engine.firing.fire(rig.now_ms, 1_000)
        assert len(rig.core.firing) <= 10
        recount(rig)
    assert [got.id for got in rig.tick()] == late


def test_tasks_due_during_a_deletion_fill_the_backlog() -> None:
    rig = Rig(replace(CONFIG, backlog_max=3))
    rig.subscribe(group="a", prefetch=0)
    rig.enqueue()
    rig.fire()
    group = rig.close_group("t", "a")
    ids = [rig.after(1).enqueue() for _ in range(3)]
    rig.fire()
    assert rig.core.full_topics == {"t": None}
    rig.cancel(ids.pop())
    assert not rig.core.full_topics
    ids.append(rig.enqueue())
    rig.fire()
    while not rig.drain(group):
        rig.commit()
    rig.fire()
    assert rig.core.full_topics == {"t": None}
    rig.subscribe(group="b")
    assert not rig.core.full_topics
    assert [got.id for got in rig.tick()] == ids


@pytest.mark.parametrize("steps", range(5))
def test_a_deletion_resumes_after_a_crash(rig: Rig, steps: int) -> None:
    ids = held(rig, "a")
    group = rig.close_group("t", "a")
    rig.commit()
    for _ in range(steps):
        rig.drain(group, 1)
        rig.commit()
    rig.crash()
    recount(rig)
    rig.fire()
    group = rig.group("t", "a")
    assert group.is_closed
    for _ in range(20):
        if rig.drain(group, 1):
            break
        rig.commit()
        recount(rig)
    rig.commit()
    words = {rig.state(ids[name]) for name in ("flying", "waiting", "buried", "ready")}
    assert words == {"deleted"}
    assert rig.state(ids["scheduled"]) == "scheduled"
    assert not rig.rows.groups


def test_acks_and_nacks_count_until_the_deletion_reaches_the_task(rig: Rig) -> None:
    rig.subscribe(group="a")
    first, second, third = (rig.enqueue() for _ in range(3))
    got = {delivery.id: delivery for delivery in rig.tick()}
    group = rig.close_group("t", "a")
    assert rig.ack(got[first]) == "acked"
    assert rig.nack(got[second], 100) == "retrying"
    while not rig.drain(group):
        rig.commit()
    rig.commit()
    assert [rig.state(i) for i in (first, second, third)] == ["acked", "deleted", "deleted"]
    assert rig.ack(got[third]) == "deleted"


def test_a_deleted_groups_name_can_be_reused(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.enqueue()
    rig.tick()
    rig.delete_group("t", "a")
    rig.subscribe(group="a")
    fresh = rig.enqueue()
    assert rig.one().id == fresh
    rig.crash()
    rig.subscribe(group="a")
    assert rig.one().id == fresh


def test_a_deletion_goes_in_bounded_steps(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    rig.store(count=1_000)
    rig.fire()
    group, sizes = rig.close_group("t", "a"), []
    rig.commit()
    while not rig.drain(group, 100):
        sizes.append(len(rig.core.open.effects.ended))
        rig.commit()
    assert sizes == [100] * 10


def test_subscriptions_of_a_deleted_group_are_cut(rig: Rig) -> None:
    subscriber = rig.subscribe(group="a")
    rig.engine.closing.close(rig.group("t", "a"))
    assert rig.core.cut == [(subscriber, "not_found", "group a of topic t was deleted")]
    rig.enqueue()
    assert rig.tick() == []


def test_a_task_without_stored_groups_waits_for_the_next_group(rig: Rig) -> None:
    """A store that somebody edited: nothing of it may be lost."""
    rig.subscribe(group="a")
    task_id = rig.enqueue()
    rig.nack(rig.one(), 5)
    rig.commit()
    rig.rows.groups.clear()
    rig.crash()
    assert rig.state(task_id) == "ready"
    rig.subscribe(group="b")
    got = rig.one()
    assert got.id == task_id
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()
