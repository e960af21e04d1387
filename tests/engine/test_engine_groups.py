"""Several groups: who is owed what, and when a task that is owed to many has ended."""

from __future__ import annotations

import pytest

from support.engine_recount import recount
from support.engine_rig import Got, Rig
from tickwheel.model.policies import Coalescing
from tickwheel.model.records import ProgressState


def by_group(got: list[Got]) -> dict[str, Got]:
    assert len({item.group.name for item in got}) == len(got)
    return {item.group.name: item for item in got}


def test_every_group_gets_every_task(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.subscribe(group="b")
    task_id = rig.enqueue()
    got = by_group(rig.tick())
    assert {name: one.id for name, one in got.items()} == {"a": task_id, "b": task_id}


def test_the_first_group_gets_tasks_due_before_it(rig: Rig) -> None:
    sent = [rig.enqueue(), rig.enqueue(priority=3)]
    rig.fire()
    rig.after(1_000).fire()
    rig.subscribe(group="first")
    assert rig.group(name="first").since_ms == 0
    assert sorted(delivery.id for delivery in rig.tick()) == sent


def test_a_later_group_gets_tasks_due_after_it(rig: Rig) -> None:
    rig.subscribe(group="first", prefetch=0)
    rig.enqueue()
    rig.fire()
    rig.after(1).subscribe(group="late")
    assert rig.tick() == []
    both = rig.enqueue(delay_ms=10)
    assert rig.after(10).one().id == both


def test_a_group_made_in_the_millisecond_of_a_fired_task_misses_it(rig: Rig) -> None:
    rig.subscribe(group="first", prefetch=0)
    task_id = rig.enqueue()
    rig.fire()
    rig.subscribe(group="late")
    assert rig.tick() == []
    assert rig.cancel(task_id) == "cancelled"
    assert rig.group(name="late").ready_count == 0


def test_the_same_groups_are_owed_a_task_after_a_restart(rig: Rig) -> None:
    rig.subscribe(group="first")
    early = rig.enqueue()
    rig.fire()
    rig.after(5).subscribe(group="late")
    both = rig.enqueue()
    rig.crash()
    rig.subscribe_all(("first", "late"))
    got = sorted((delivery.group.name, delivery.id) for delivery in rig.tick())
    assert got == [("first", early), ("first", both), ("late", both)]


def test_a_task_ends_with_the_last_ack(rig: Rig) -> None:
    rig.subscribe_all("abc")
    task_id = rig.enqueue()
    got = by_group(rig.tick())
    for group in "ab":
        rig.ack(got[group])
        rig.commit()
        assert rig.rows.progress[task_id, group].state is ProgressState.DONE
        recount(rig)
    rig.ack(got["c"])
    rig.commit()
    assert rig.rows.is_empty()
    assert not rig.core.resident_rows


def test_a_group_that_acked_does_not_get_it_again_after_a_crash(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.enqueue()
    got = by_group(rig.tick())
    rig.ack(got["a"])
    rig.commit()
    rig.crash()
    rig.subscribe_all("ab")
    assert rig.one().group.name == "b"


def test_each_group_has_its_own_attempts(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.enqueue()
    got = by_group(rig.tick())
    rig.nack(got["a"], 100)
    rig.ack(got["b"])
    again = rig.after(100).one()
    assert (again.group.name, again.attempt) == ("a", 2)


def test_retries_of_two_groups_in_one_millisecond_both_run(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.enqueue()
    for delivery in rig.tick():
        rig.nack(delivery, 100)
    assert sorted(by_group(rig.after(100).tick())) == ["a", "b"]


def test_a_groups_retry_does_not_affect_another_groups(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.enqueue()
    got = by_group(rig.tick())
    rig.nack(got["a"], 100)
    rig.nack(got["b"], 200)
    assert rig.after(100).one().group.name == "a"
    recount(rig)
    assert rig.after(100).one().group.name == "b"


def test_a_groups_dead_letter_keeps_the_task(rig: Rig) -> None:
    rig.subscribe_all("ab")
    task_id = rig.enqueue()
    got = by_group(rig.tick())
    rig.reject(got["a"])
    rig.ack(got["b"])
    assert rig.state(task_id) == "dead"
    assert not rig.core.resident_rows
    rig.commit()
    recount(rig)
    rig.crash()
    assert rig.state(task_id) == "dead"
    recount(rig)
    assert rig.delete_dead(task_id, "a") == "deleted"
    rig.commit()
    assert rig.rows.is_empty()


def test_a_requeued_dead_letter_is_delivered_to_its_group_only(rig: Rig) -> None:
    rig.subscribe_all("ab")
    task_id = rig.enqueue()
    got = by_group(rig.tick())
    rig.reject(got["a"])
    rig.ack(got["b"])
    assert rig.requeue(task_id, "a") == "requeued"
    rig.commit()
    recount(rig)
    rig.crash()
    rig.subscribe_all("ab")
    again = rig.one()
    assert again.group.name == "a"
    rig.ack(again)
    rig.commit()
    assert rig.rows.is_empty()


def test_a_deleted_dead_letter_leaves_the_task_to_the_others(rig: Rig) -> None:
    rig.subscribe_all("ab")
    task_id = rig.enqueue()
    got = by_group(rig.tick())
    rig.reject(got["a"])
    assert rig.delete_dead(task_id, "a") == "deleted"
    rig.commit()
    recount(rig)
    assert rig.ack(got["a"]) == "done"
    assert rig.ack(got["b"]) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_each_group_has_its_own_dead_letter_of_a_task(rig: Rig) -> None:
    rig.subscribe_all("ab")
    task_id = rig.enqueue()
    for delivery in rig.tick():
        rig.reject(delivery)
    assert rig.core.dead == 2
    rig.delete_dead(task_id, "a")
    assert rig.state(task_id) == "dead"
    recount(rig)
    rig.delete_dead(task_id, "b")
    assert rig.state(task_id) == "deleted"


def test_the_last_group_decides_how_a_task_ended(rig: Rig) -> None:
    rig.subscribe(group="a")
    slow = rig.subscribe(group="b", prefetch=0)
    task_id = rig.enqueue(ttl_ms=100)
    got = rig.one()
    rig.ack(got)
    rig.pass_time(101)
    slow.prefetch = 1
    rig.core.reconsider(slow)
    assert rig.tick() == []
    assert rig.state(task_id) == "expired"
    rig.commit()
    assert rig.rows.is_empty()


def test_groups_have_backlogs_of_their_own(rig: Rig) -> None:
    rig.subscribe(group="a", prefetch=0)
    rig.subscribe(group="b")
    rig.store(count=4)
    assert len(rig.tick()) == 4
    assert (rig.group(name="a").ready_count, rig.group(name="b").ready_count) == (4, 0)


def test_a_rescheduled_ready_task_is_owed_again_when_due(rig: Rig) -> None:
    rig.subscribe_all("ab", prefetch=0)
    task_id = rig.enqueue()
    rig.fire()
    assert rig.reschedule(task_id, 5_000) == "scheduled"
    recount(rig)
    rig.after(1).subscribe(group="c")
    assert rig.after(4_999).one().group.name == "c"
    assert [rig.group(name=name).ready_count for name in "ab"] == [1, 1]


@pytest.mark.parametrize("end", ["nack", "ack", "crash"])
@pytest.mark.parametrize("made", ["after the newer task", "before it", "with its replay"])
def test_a_replay_gives_no_older_body_after_a_newer_one(rig: Rig, made: str, end: str) -> None:
    rig.subscribe(group="a")
    rig.enqueue(key="k", body=b"old")
    got = rig.one()
    rig.commit()
    rig.pass_time(10)
    if made != "after the newer task":
        rig.create_group("t", "late", 0, replays=made == "with its replay")
    rig.coalesce(Coalescing("replace"), 0, b"new")
    rig.commit()
    if made == "after the newer task":
        rig.create_group("t", "late", 0, replays=False)
    if end == "crash":
        rig.commit()
        rig.crash()
    else:
        assert (rig.nack(got, 0) if end == "nack" else rig.ack(got)) in ("cancelled", "acked")
    late = rig.group("t", "late")
    while rig.replay(late):
        pass
    rig.subscribe(group="late")
    assert [each.body for each in rig.tick() if each.group is late] == [b"new"]
    rig.commit()
    recount(rig)
