"""A task that stands for another is one group's alone: who gets it, who does not, also after a
crash; its key, its filter, its end."""

from __future__ import annotations

import pytest

from engine.filter_rig import FilterRig
from support.engine_recount import recount
from support.engine_rig import Got
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.groups import Original, repeated_task
from tickwheel.engine.ordering import shared_value
from tickwheel.model.records import ID_STEP, Outcome, Replayed, TaskOptions, size_of


class ResetRig(FilterRig):
    """Adds tasks that stand for others."""

    def again(self, group: str, of: int = 3, *, lands: bool = True, **options: object) -> int:
        original = Original(of, TaskOptions(**options), b"b")  # type: ignore[arg-type]  # as a test says
        task = repeated_task(original, "t", group, self.now_ms)
        self.engine.intake.stage([task], size_of(task[2], task[3]), self.now_ms, None)
        if lands:
            self.commit()
        return self.core.ids.last


@pytest.fixture
def rig() -> ResetRig:
    return ResetRig()


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("group", ["a", "b"])
def test_a_replayed_task_goes_only_to_its_group(rig: ResetRig, group: str, crashes: bool) -> None:
    rig.make("a")
    rig.make("b")
    rig.pass_time(10)
    task_id = rig.again(group)
    if crashes:
        rig.fire()
        rig.crash()
    rig.consume("a", "b")
    assert {name: rig.had(name) for name in "ab"} == {"a": [], "b": []} | {group: [task_id]}
    recount(rig)
    if crashes:
        rig.stop_and_start()
        assert {name: rig.had(name) for name in "ab"} == {"a": [], "b": []} | {group: [task_id]}
    lease = rig.group("t", group).flight[task_id]
    rig.engine.settlement.ack(lease.group, lease.epoch, [task_id], [lease.attempt])
    rig.commit()
    assert rig.rows.outcomes == {task_id: Outcome.ACKED}
    assert rig.rows.is_empty()
    recount(rig)


WAYS = {
    "in flight": False,
    "waits": False,
    "a dead letter": False,
    "requeued": False,
    "acked": True,
    "a letter that was deleted": True,
    "requeued and acked": True,
    "filtered": True,
    "expired": False,
    "expired after a failure": False,
    "replaced": False,
}
"""How group a stands with a task that b still has; whether a reset gives it to a again."""


def stand(rig: ResetRig, way: str) -> int:
    """A task with which a stands so, and that is not over in b."""
    rig.make("a", (None, "wanted IS NOT NULL") if way == "filtered" else (None, None))
    rig.make("b")
    task_id = rig.put(ttl_ms=40 if way.startswith("expired") else None)
    if way in ("filtered", "expired"):
        rig.subscribe("t", "b")  # it is in flight there, when its time to live is over
        assert [got.id for got in rig.tick()] == [task_id]
    else:
        for name in "ab" if way == "replaced" else "a":
            rig.subscribe("t", name)
        (got,) = (each for each in rig.tick() if each.group.name == "a")
        settle(rig, got, way)
    if way.startswith("expired"):
        if way != "expired":
            rig.subscribe("t", "b")
            rig.tick()
        rig.after(50).fire()
    return task_id


def settle(rig: ResetRig, got: Got, way: str) -> None:
    if way == "acked":
        assert rig.ack(got) == "acked"
    elif way in ("waits", "expired after a failure"):
        assert rig.nack(got, delay_ms=60_000) == "retrying"
    elif way == "replaced":
        known = rig.find(got.id)
        assert known is not None
        rig.engine.control.give_way(known, got.id + ID_STEP, rig.now_ms)
        assert rig.nack(got) == "cancelled"
    elif way != "in flight":
        rig.reject(got)
        if way == "a letter that was deleted":
            assert rig.delete_dead(got.id, "a") == "deleted"
        elif way.startswith("requeued"):
            assert rig.requeue(got.id, "a") == "requeued"
            if way == "requeued and acked":
                (got,) = rig.tick()
                assert rig.ack(got) == "acked"


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_state_in_a_group_decides_a_replay(rig: ResetRig, way: str, crashes: bool) -> None:
    task_id = stand(rig, way)
    rig.commit()
    if crashes:
        rig.stop_and_start()
        rig.fire()
        rig.commit()
    recount(rig)
    known = rig.find(task_id)
    assert known is not None
    assert rig.engine.resets.can_repeat(rig.group("t", "a"), known) is WAYS[way]


def test_unfired_tasks_after_a_restart_are_replayed(rig: ResetRig) -> None:
    rig.make("a")
    task_id = rig.put()
    rig.after(1).fire()
    late = rig.make("late")
    rig.commit()
    rig.stop_and_start()
    known = rig.find(task_id)
    assert known is not None and rig.state(task_id) == "scheduled"
    can_repeat = rig.engine.resets.can_repeat
    assert can_repeat(rig.group("t", late.name), known), "it was never owed it"
    assert not can_repeat(rig.group("t", "a"), known), "it comes to it anyway"


def test_a_group_with_a_future_start_gets_a_replayed_task(rig: ResetRig) -> None:
    rig.make("a")
    rig.make("b", since_ms=rig.now_ms + 60_000)
    task_id = rig.again("b")
    rig.crash()
    rig.consume("a", "b")
    assert (rig.had("a"), rig.had("b")) == ([], [task_id])


def test_a_later_group_does_not_get_a_replayed_task(rig: ResetRig) -> None:
    rig.make("a")
    rig.pass_time(5)
    task_id = rig.again("a")
    rig.fire()
    late = rig.make("late", since_ms=rig.now_ms - 5)
    subscriber = rig.subscribe("t", "a")
    (got,) = rig.tick()
    rig.ack(got)
    # The replay of the new group has not looked at it yet, and it ends all the same.
    assert (got.id, rig.state(task_id)) == (task_id, "acked")
    rig.replay(late)
    assert late.ready_count == 0
    rig.disconnect(subscriber)
    rig.again("a")
    rig.fire()
    rig.replay(rig.make("later", since_ms=rig.now_ms - 5))
    assert rig.group("t", "later").ready_count == 0
    recount(rig)


@pytest.mark.parametrize("others", [0, 1])
def test_a_replayed_task_ends_without_its_group(rig: ResetRig, others: int) -> None:
    for name in "bc"[:others]:
        rig.make(name)
    rig.make("a")
    fired = rig.again("a")
    rig.fire()
    staged = rig.again("a", lands=False)
    rig.close_group("t", "a")
    while not rig.drain(rig.group("t", "a")):
        rig.commit()
    rig.commit()
    rig.fire()
    rig.commit()
    assert rig.rows.outcomes == {fired: Outcome.DELETED, staged: Outcome.DELETED}
    assert rig.rows.is_empty()
    assert rig.core.tasks == 0
    recount(rig)


def test_a_replayed_task_of_a_deleted_group_ends_after_a_crash(rig: ResetRig) -> None:
    rig.make("b")
    rig.make("a")
    task_id = rig.again("a")
    rig.fire()
    rig.close_group("t", "a")
    rig.commit()
    rig.crash()
    rig.consume("b")
    rig.commit()
    assert rig.had("b") == []
    assert rig.rows.outcomes == {task_id: Outcome.DELETED}


def test_a_replayed_tasks_key_is_found_but_not_pending(rig: ResetRig) -> None:
    rig.make("a", (None, "key LIKE 'customer%'"))
    wanted, other = rig.again("a", key="customer 7"), rig.again("a", key="else")
    assert not list(rig.core.keys.find("t", "customer 7"))
    rig.crash()
    rig.consume("a")
    assert rig.had("a") == [wanted]
    assert not list(rig.core.keys.find("t", "customer 7"))
    rig.commit()
    assert rig.rows.outcomes == {other: Outcome.FILTERED}


def test_a_replayed_task_is_not_broadcast(rig: ResetRig) -> None:
    rig.make("a")
    rig.engine.subscriptions.subscribe(Broadcaster(None, rig.core.topic("t"), 100))
    rig.again("a")
    plain = rig.put()
    rig.fire()
    dispatches, _ = rig.engine.delivery.dispatch(rig.now_ms, rig.mono_ms, 100)
    assert [row.id for dispatch in dispatches for row, _, _ in dispatch.items] == [plain]


def test_a_rescheduled_replayed_task_keeps_its_group(rig: ResetRig) -> None:
    rig.make("a")
    rig.make("b")
    task_id = rig.again("b")
    rig.fire()
    assert rig.reschedule(task_id, 500) == "scheduled"
    rig.commit()
    rig.after(500).crash()
    rig.consume("a", "b")
    assert (rig.had("a"), rig.had("b")) == ([], [task_id])


def test_a_replayed_task_follows_its_order_key(rig: ResetRig) -> None:
    """One at a time for its key, with the tasks of that key, and fairly by its own."""
    rig.make("a")
    rig.make("b")
    first, second = (rig.again("b", of=n, order_key="c") for n in (3, 4))
    plain = rig.again("b", of=5)
    rig.subscribe("t", "b")
    got = rig.tick()
    assert sorted(task.id for task in got) == [first, plain]
    rig.ack(next(task for task in got if task.id == first))
    rig.commit()
    held = rig.one()
    assert held.id == second
    assert rig.group("t", "a").ready_count == 0
    recount(rig)
    late = rig.make("late", since_ms=rig.now_ms)
    rig.ack(held)
    # The replay of the new group has not come to it, and it ends all the same.
    assert rig.state(second) == "acked"
    rig.replay(late)
    assert not late.holds_any
    keyed = TaskOptions(replayed=Replayed(3, "b", "k"))
    assert shared_value(rig.rows.tasks[plain]._replace(options=keyed), "key") == "k"
