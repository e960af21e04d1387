"""Order keys: one at a time, in order, whatever becomes of the one before. Fair shares: values
take turns, and no more than so many are in flight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_recount import recount, recounted
from support.engine_rig import CONFIG, Got, Rig
from tickwheel.engine import queues
from tickwheel.engine.queues import (
    FEW_MAX,
    STALE_MIN,
    KeyPartitions,
    Order,
    PriorityLevel,
    ReadyQueue,
)
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import Subscriber
from tickwheel.model.lateness import Cause
from tickwheel.model.policies import Coalescing
from tickwheel.model.records import ORDER_ATTEMPTS, TaskOptions, size_of


class OrderRig(Rig):
    """Tasks with order keys and properties."""

    def put(
        self,
        order_key: str | None,
        delay_ms: int = 0,
        *,
        lands: bool = True,
        priority: int = 0,
        ttl_ms: int | None = None,
        **properties: Any,
    ) -> int:
        options = TaskOptions(
            order_key=order_key, priority=priority, ttl_ms=ttl_ms, properties=properties or None
        )
        new = "t", self.now_ms + delay_ms, b"b", options
        self.engine.intake.enqueue(None, None, 0, [new], size_of(*new[2:]), self.now_ms)
        task_id = self.core.ids.last
        if lands:
            self.commit()
        return task_id

    def after_commit(self) -> Got:
        """The only delivery, which comes when what was before it is durable."""
        assert self.tick() == []
        self.commit()
        recount(self)
        return self.one()

    def ids(self) -> list[int]:
        recount(self)
        return [got.id for got in self.tick()]

    def done(self, got: Got) -> None:
        assert self.ack(got) == "acked"
        self.commit()


rig = recounted(OrderRig)


def rig_with(*tasks: tuple[str | None, int]) -> tuple[OrderRig, list[int]]:
    rig = OrderRig()
    rig.subscribe()
    return rig, [rig.put(key, delay_ms) for key, delay_ms in tasks]


def test_one_task_of_an_order_key_runs_at_a_time() -> None:
    rig, (a1, a2, b1, plain) = rig_with(("a", 0), ("a", 0), ("b", 0), (None, 0))
    got = {delivery.id: delivery for delivery in rig.tick()}
    assert list(got) == [a1, b1, plain]
    rig.done(got[b1])
    assert rig.ids() == []
    rig.done(got[a1])
    assert rig.ids() == [a2]


@pytest.mark.parametrize("closes_again", [False, True])
def test_tasks_deferred_by_a_deletion_keep_the_order_of_their_key(closes_again: bool) -> None:
    rig = OrderRig(replace(CONFIG, loading_max=4))
    rig.subscribe(group="a", prefetch=0)
    rig.put(None)
    rig.fire()
    rig.close_group("t", "a")
    ids = [rig.after(1).put("k") for _ in range(9)]
    rig.fire()
    rig.subscribe(group="b")
    ids.append(rig.after(1).put("k"))
    if closes_again:
        rig.close_group("t", "b")
        rig.engine.firing.fire(rig.now_ms, 1_000)
        rig.load()
        ids.append(rig.after(1).put("k"))
        rig.subscribe(group="c")
    delivered = []
    while len(delivered) < len(ids):
        rig.engine.firing.fire(rig.now_ms, 1_000)
        rig.load()
        recount(rig)
        while got := rig.dispatch():
            delivered += [each.id for each in got]
            rig.done(got[0])
    assert delivered == ids


def test_the_next_task_of_a_key_waits_for_the_durable_ack() -> None:
    rig, (first, second) = rig_with(("a", 0), ("a", 0))
    assert rig.ack(rig.one()) == "acked"
    assert rig.ids() == []
    rig.seal()
    assert rig.ids() == []
    rig.refuse()
    assert rig.ids() == []
    rig.commit()
    assert rig.ids() == [second]
    assert rig.state(first) == "acked"


def test_a_crash_before_the_durable_ack_repeats_the_task() -> None:
    rig, (first, second) = rig_with(("a", 0), ("a", 0))
    rig.ack(rig.one())
    rig.crash()
    rig.subscribe()
    assert [got.id for got in rig.tick()] == [first]
    rig.pass_time(60_000)
    rig.done(rig.after_commit())
    assert rig.ids() == [second]


@pytest.mark.parametrize("what", ["cancel", "move", "move-fired"])
@pytest.mark.parametrize("end", ["commit", "refuse", "crash"])
def test_uncommitted_changes_hold_the_tasks_behind(what: str, end: str) -> None:
    """A scheduled one leaves, and that is not durable when the one behind it comes due."""
    rig, (first, second) = rig_with(("a", 100), ("a", 200))
    if what == "move-fired":
        rig.pass_time(150)
        rig.engine.firing.fire(rig.now_ms, 10)
    if what == "cancel":
        assert rig.cancel(first) == "cancelled"
    else:
        assert rig.reschedule(first, 1_000) == "scheduled"
    rig.pass_time(300)
    assert rig.ids() == []
    if end == "crash":
        rig.crash()
        rig.subscribe()
        rig.pass_time(0)
        assert rig.ids() == [first]
        return
    assert rig.seal() is not None
    if end == "refuse":
        rig.refuse()
        assert rig.ids() == []
    rig.commit()
    assert rig.ids() == [second]


@pytest.mark.parametrize("acks_first", [True, False])
def test_a_key_continues_when_all_changes_are_durable(acks_first: bool) -> None:
    rig, (_, second, third) = rig_with(("a", 0), ("a", 0), ("a", 0))
    got = rig.one()
    if acks_first:
        assert rig.ack(got) == "acked"
        rig.seal()
        assert rig.cancel(second) == "cancelled"
    else:
        assert rig.cancel(second) == "cancelled"
        rig.seal()
        assert rig.ack(got) == "acked"
    rig.apply_and_land()
    assert rig.ids() == []
    rig.commit()
    assert rig.ids() == [third]


def test_a_task_moved_behind_another_follows_it(rig: OrderRig) -> None:
    """It was the first of its key, and comes due again before it is durable that it left."""
    rig.create_group("t", "default")
    moved, other = rig.put("a"), rig.put("a", 50)
    rig.after(60).fire()
    assert rig.reschedule(moved, 100) == "scheduled"
    rig.after(150).fire()
    rig.commit()
    rig.subscribe()
    assert rig.ids() == [other]
    rig.commit()
    rig.put("b")
    assert moved not in rig.ids()


def test_a_returning_task_behind_others_does_not_block_its_key(rig: OrderRig) -> None:
    """It has been had in another group, so it waits in this one, where it was never first."""
    rig.subscribe(group="quick")
    rig.create_group("t", "slow")
    first, moved = rig.put("a"), rig.put("a")
    rig.done(rig.one())
    rig.nack(rig.one())
    rig.commit()
    assert rig.reschedule(moved, 500) == "scheduled"
    rig.commit()
    assert rig.reschedule(moved, 0) == "scheduled"
    rig.subscribe(group="slow")
    assert "slow" not in {got.group.name for got in rig.tick()}
    rig.commit()
    (got,) = [got for got in rig.tick() if got.group.name == "slow"]
    assert got.id == first
    rig.done(got)
    assert moved in rig.ids()


def test_tasks_of_a_key_run_by_due_time_then_enqueue_order(rig: OrderRig) -> None:
    late, early, same = rig.put("a", 300), rig.put("a", 100), rig.put("a", 100)
    rig.after(1_000).subscribe()
    seen: list[int] = []
    while got := rig.tick():
        seen += [task.id for task in got]
        rig.done(got[0])
    assert seen == [early, same, late]


def test_an_undelivered_task_gives_way_to_an_earlier_one(rig: OrderRig) -> None:
    """As a transaction's tasks, which are due before they land."""
    rig.fire()
    later = rig.put("a", 0)
    rig.fire()
    new = "t", rig.now_ms - 500, b"b", TaskOptions(order_key="a", priority=3)
    rig.engine.intake.enqueue(None, None, 0, [new], 10, rig.now_ms)
    earlier = rig.core.ids.last
    rig.commit()
    rig.fire()
    rig.subscribe()
    got = rig.one()
    assert got.id == earlier
    rig.done(got)
    assert rig.ids() == [later]


def test_priority_decides_between_keys_but_not_within_one(rig: OrderRig) -> None:
    low, high, other = rig.put("a"), rig.put("a", priority=9), rig.put("b", priority=1)
    rig.subscribe(prefetch=1)
    order: list[int] = []
    while got := rig.tick():
        order.append(got[0].id)
        rig.done(got[0])
    assert order == [other, low, high]


@pytest.mark.parametrize("keys", [(None, None, None), ("a", "b", "c")])
@pytest.mark.parametrize(("before", "after"), [(0, 9), (9, 0)])
def test_a_ready_task_is_replaced_with_its_new_priority(
    rig: OrderRig, keys: tuple[str | None, ...], before: int, after: int
) -> None:
    """Also where the old entry and the new one are looked at together, for several consumers."""
    rig.create_group("t", "default")
    others = [rig.put(key) for key in keys]
    task_id = rig.enqueue(key="k", priority=before)
    rig.fire()
    assert rig.coalesce(Coalescing("replace"), 0, b"new", priority=after) == task_id
    rig.commit()
    rig.fire()
    recount(rig)
    rig.subscribe()
    rig.subscribe()
    got = [delivery.id for delivery in rig.tick()]
    expected = [task_id, *others] if after else [*others, task_id]
    assert got == expected if keys[0] is None else sorted(got) == sorted(expected)


def test_a_priority_survives_a_clock_set_back(rig: OrderRig) -> None:
    rig.create_group("t", "default")
    low, high, gone = rig.put(None), rig.put(None, priority=9), rig.put(None, priority=9)
    rig.fire()
    rig.now_ms -= 1_000
    subscriber = rig.subscribe(prefetch=1)
    assert rig.ids() == []
    subscriber.prefetch = 0
    early = rig.put(None)
    rig.fire()
    rig.after(1_000).fire()
    assert rig.cancel(gone) == "cancelled"
    subscriber.prefetch = 1
    rig.core.reconsider(subscriber)
    order: list[int] = []
    while got := rig.tick():
        order.append(got[0].id)
        rig.done(got[0])
    assert order == [high, early, low]


def test_a_failing_task_holds_only_its_key() -> None:
    rig, (a1, a2, b1, b2) = rig_with(("a", 0), ("a", 0), ("b", 0), ("b", 0))
    rig.configure("t", "default", order_failure="retry")
    got = {delivery.id: delivery for delivery in rig.tick()}
    assert rig.nack(got[a1]) == "retrying"
    rig.done(got[b1])
    assert rig.ids() == [b2]
    for attempt in range(2, 30):
        rig.pass_time(999)
        assert rig.ids() == []
        (again,) = rig.after(1).tick()
        assert (again.id, again.attempt) == (a1, attempt)
        rig.nack(again)
        rig.commit()
        recount(rig)
    rig.pass_time(1_000)
    rig.done(rig.one())
    assert rig.ids() == [a2]


@pytest.mark.parametrize(
    ("settings", "failures", "word"),
    [
        ({}, ORDER_ATTEMPTS, "held"),
        ({"order_failure": "hold"}, ORDER_ATTEMPTS, "held"),
        ({"order_attempts": 3}, 3, "held"),
        ({"order_failure": "dead"}, ORDER_ATTEMPTS, "dead"),
        ({"order_failure": "dead", "order_attempts": 1}, 1, "dead"),
    ],
)
def test_a_permanently_failing_task_does_not_block_its_key_for_ever(
    settings: dict[str, Any], failures: int, word: str
) -> None:
    """Unless the group says so."""
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.configure("t", "default", order_retry_ms=10, **settings)
    for failed in range(1, failures + 1):
        got = rig.one()
        assert (got.id, got.attempt) == (a1, failed)
        assert rig.nack(got) == (word if failed == failures else "retrying")
        rig.commit()
        rig.pass_time(10)
    rig.pass_time(1_000_000)
    assert rig.group().held == (word == "held")
    assert rig.ids() == ([] if word == "held" else [a2])


def test_order_failure_dead_buries_after_order_attempts() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.configure("t", "default", order_failure="dead", order_attempts=2, order_retry_ms=10)
    assert rig.nack(rig.one()) == "retrying"
    rig.pass_time(10)
    assert rig.nack(rig.after_commit()) == "dead"
    assert rig.ids() == []
    rig.commit()
    assert rig.ids() == [a2]
    assert rig.state(a1) == "dead"


def test_a_requeued_task_precedes_later_tasks_of_its_key() -> None:
    rig, (a1, a2, a3) = rig_with(("a", 0), ("a", 0), ("a", 0))
    rig.configure("t", "default", order_failure="dead")
    rig.reject(rig.one())
    rig.commit()
    got = rig.one()
    assert got.id == a2
    assert rig.requeue(a1) == "requeued"
    rig.commit()
    assert rig.ids() == []
    rig.done(got)
    got = rig.one()
    assert got.id == a1
    rig.done(got)
    assert rig.ids() == [a3]


def test_a_task_requeued_before_its_durable_end_keeps_its_turn() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.configure("t", "default", order_failure="dead")
    rig.reject(rig.one())
    assert rig.requeue(a1) == "requeued"
    rig.commit()
    got = rig.one()
    assert got.id == a1
    rig.done(got)
    assert rig.ids() == [a2]


def rig_of_two_groups(
    count: int, done: int, config: EngineConfig = CONFIG
) -> tuple[OrderRig, list[int]]:
    """Tasks of a key, of which "mail" has finished the first ``done``; "ledger" has had none, and
    has no subscriber."""
    rig = OrderRig(config)
    for name in ("ledger", "mail"):
        rig.create_group("t", name)
    subscriber = rig.subscribe(group="mail")
    ids = [rig.put("a") for _ in range(count)]
    for _ in range(done):
        rig.done(rig.one())
    rig.engine.subscriptions.unsubscribe(subscriber)
    return rig, ids


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("is_durable", [True, False])
def test_a_task_due_again_before_its_durable_end_runs_alone(times: int, is_durable: bool) -> None:
    """Moved, and so out of its turn; and back in it, before or after that is durable."""
    rig, ids = rig_of_two_groups(3, 1)
    rig.subscribe(group="ledger")
    for _ in range(times):
        assert rig.reschedule(ids[0], 0) == "scheduled"
        if is_durable:
            rig.commit()
        rig.fire()
    rig.commit()
    for wanted in ids:
        got = rig.one()
        assert got.id == wanted
        assert rig.ids() == []
        rig.done(got)


@pytest.mark.parametrize("is_looked_at", [True, False])
@pytest.mark.parametrize("has_room", [True, False])
def test_a_task_due_again_during_its_read_waits_for_the_commit(
    has_room: bool, is_looked_at: bool
) -> None:
    """The read was for the turn that it had before."""
    rig, ids = rig_of_two_groups(3, 1, replace(CONFIG, resident_bytes_max=0))
    rig.subscribe(group="ledger")
    rig.fire()
    rig.engine.delivery.dispatch(*rig.now, 100)
    ledger, wants = rig.group(name="ledger"), rig.core.ready_rows_to_read
    ((group, asked),), rig.core.ready_rows_to_read = wants.items(), {}
    assert (group, asked) == (ledger, ids[:1])
    assert rig.reschedule(ids[0], 0) == "scheduled"
    rig.engine.firing.fire(rig.now_ms, 100)
    rows = {i: known.row for i, known in rig.known(asked).items()}
    if has_room:
        rig.engine.delivery.reading.process_rows(ledger, asked, rows)
    else:
        rig.engine.delivery.reading.return_unread(ledger, asked)
    if is_looked_at:
        assert rig.ids() == []
    rig.commit()
    for wanted in ids:
        got = rig.one()
        assert got.id == wanted
        assert rig.ids() == []
        rig.done(got)


def test_a_moved_task_gives_way_to_an_earlier_one() -> None:
    rig, (a1, a2) = rig_of_two_groups(2, 2)
    for task_id, delay_ms in ((a1, 100), (a2, 10)):
        assert rig.reschedule(task_id, delay_ms) == "scheduled"
        rig.commit()
    rig.after(10).fire()
    rig.after(90).fire()
    rig.subscribe(group="ledger")
    for wanted in (a1, a2):
        got = rig.one()
        assert got.id == wanted
        rig.done(got)


@pytest.mark.parametrize("restart", [None, Rig.crash, Rig.stop_and_start])
@pytest.mark.parametrize("what", ["release", "skip"])
def test_a_held_key_waits_for_an_operator(restart: Any, what: str) -> None:
    rig, (a1, a2, b1) = rig_with(("a", 0), ("a", 0), ("b", 0))
    rig.configure("t", "default", order_failure="hold", order_attempts=1)
    got = {delivery.id: delivery for delivery in rig.tick()}
    assert rig.nack(got[a1], reason="broken") == "held"
    rig.done(got[b1])
    held_ms = rig.now_ms
    if restart is not None:
        restart(rig)
        rig.subscribe()
    rig.pass_time(10_000_000)
    assert rig.ids() == []
    (held,) = rig.engine.key_control.held_keys(rig.group())
    assert (held.task_id, held.since_ms, held.attempt, held.waiting) == (a1, held_ms, 1, 1)
    assert rig.views(a1) == {"default": ("held", 1)}
    known = rig.find(a1)
    assert known is not None
    control, group = rig.engine.key_control, rig.group()
    if what == "release":
        assert control.release(group, known, rig.now_ms) == "released"
        assert control.release(group, known, rig.now_ms) == "not_held"
        again = rig.after_commit()
        assert (again.id, again.attempt, again.failures) == (a1, 2, 0)
        rig.done(again)
    else:
        assert control.skip(group, known, rig.now_ms) == "skipped"
        assert control.skip(group, known, rig.now_ms) == "not_held"
        assert rig.ids() == []
        rig.commit()
        assert rig.state(a1) == "dead"
    assert control.held_keys(group) == []
    assert rig.ids() == [a2]


def test_a_rejected_task_holds_its_key() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.configure("t", "default", order_failure="hold")
    rig.reject(rig.one())
    rig.commit()
    assert rig.ids() == []
    assert rig.cancel(a1) == "cancelled"
    rig.commit()
    assert rig.ids() == [a2]
    assert rig.engine.key_control.held_keys(rig.group()) == []


@pytest.mark.parametrize("what", ["cancel", "reschedule", "expire"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_task_that_leaves_frees_its_key(rig: OrderRig, what: str, which: int) -> None:
    ids = [rig.put("a", ttl_ms=50 if what == "expire" and which == n else None) for n in range(3)]
    rig.fire()
    if what == "cancel":
        assert rig.cancel(ids[which]) == "cancelled"
    elif what == "reschedule":
        assert rig.reschedule(ids[which], 5_000) == "scheduled"
    rig.after(100).commit()
    rig.fire()
    rig.commit()
    recount(rig)
    rig.subscribe()
    seen: list[int] = []
    while got := rig.tick():
        seen.append(got[0].id)
        rig.done(got[0])
    left = [task_id for task_id in ids if task_id != ids[which]]
    assert seen == left


def test_a_rescheduled_attempted_task_keeps_its_turn() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.nack(rig.one())
    assert rig.reschedule(a1, 10_000) == "scheduled"
    rig.commit()
    rig.pass_time(9_999)
    assert rig.ids() == []
    rig.crash(down_ms=0)
    rig.subscribe()
    assert rig.ids() == []
    got = rig.after(1).one()
    assert (got.id, got.attempt) == (a1, 2)
    rig.done(got)
    assert rig.ids() == [a2]


def test_only_the_current_receipt_ends_an_ordered_task() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    first = rig.one()
    rig.nack(first, 0)
    second = rig.after_commit()
    assert second.attempt == 2
    assert rig.ack(first) == "stale"
    rig.done(second)
    assert rig.ids() == [a2]
    assert rig.state(a1) == "acked"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_receipts_from_before_a_crash_are_stale_for_ordered_tasks(checkpointed: bool) -> None:
    """The crash may have made the daemon forget that somebody else has had it since."""
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    first = rig.one()
    rig.pass_time(31_000)
    second = rig.after_commit()
    if checkpointed:
        rig.seal(checkpoint_all=True)
        rig.apply_and_land()
    rig.crash()
    rig.subscribe()
    assert rig.ack(first) == "stale"
    assert rig.ack(second) == ("acked" if checkpointed else "stale")
    rig.commit()
    assert rig.ids() == ([a2] if checkpointed else [a1])


def test_an_expired_lease_keeps_the_turn() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    rig.one()
    rig.pass_time(31_000)
    got = rig.after_commit()
    assert (got.id, got.attempt) == (a1, 2)
    rig.done(got)
    assert rig.ids() == [a2]


def test_at_most_once_delivers_the_next_of_a_key_after_the_commit(rig: OrderRig) -> None:
    a1, a2 = rig.put("a"), rig.put("a")
    rig.subscribe(at_most_once=True)
    rig.tick()
    assert rig.handed == []
    rig.commit()
    assert [got.id for got in rig.handed] == [a1]
    rig.tick()
    rig.commit()
    assert [got.id for got in rig.handed] == [a1, a2]


def test_ordered_tasks_without_rows_in_memory_run_in_order() -> None:
    rig = OrderRig(replace(CONFIG, resident_horizon_ms=1_000))
    rig.subscribe()
    far = [rig.put("a", 5_000), rig.put("b", 5_001)]
    rig.pass_time(4_500)
    near = [rig.put("a", 501), rig.put("b", 501)]
    for task_id in far:
        rig.core.drop(task_id)
    rig.pass_time(600)
    more = rig.engine.firing.fire(rig.now_ms, 1_000)
    assert not more
    assert rig.dispatch() == [], "those due before them are being read"
    rig.load()
    got = rig.dispatch()
    assert [task.id for task in got] == far
    for item in got:
        rig.done(item)
    assert rig.ids() == near


def test_a_replayed_group_gets_a_key_in_order(rig: OrderRig) -> None:
    """Earlier tasks are replayed in pages ordered by id."""
    rig.create_group("t", "first")
    late, early = rig.put("a", 300), rig.put("a", 100)
    rig.after(300).fire()
    group = rig.create_group("t", "second", 1, replays=False)
    rig.subscribe(group="second")
    while group in group.topic.replays:
        assert rig.tick() == []
        rig.replay(group, 1)
    rig.commit()
    for task_id in (early, late):
        got = rig.one()
        assert got.id == task_id
        rig.done(got)


def test_a_group_can_be_deleted_in_the_batch_ending_its_replay(rig: OrderRig) -> None:
    """What its keys waited for is durable when there is no such group any more."""
    rig.create_group("t", "first")
    rig.put("a", 100)
    rig.after(100).fire()
    group = rig.create_group("t", "second", 1, replays=False)
    rig.commit()
    while group in group.topic.replays:
        rig.replay(group, 1)
    assert group.is_ordered
    rig.close_group("t", "second")
    while not rig.drain(group):
        pass
    rig.commit()
    assert rig.tick() == []
    recount(rig)


def test_a_replayed_group_waits_for_uncommitted_acks_of_a_key(rig: OrderRig) -> None:
    """A crash would give it that task, which is before the others of its key."""
    rig.subscribe(group="first")
    rig.put("a")
    second = rig.put("a")
    assert rig.ack(rig.one()) == "acked"
    rig.create_group("t", "late", 1)
    rig.subscribe(group="late")
    assert rig.tick() == []
    rig.commit()
    assert {(got.id, got.group.name) for got in rig.tick()} == {(second, "first"), (second, "late")}


def test_a_replay_skips_tasks_that_return_after_a_commit(rig: OrderRig) -> None:
    rig.subscribe(group="quick")
    rig.create_group("t", "slow")
    first = rig.put("a")
    rig.done(rig.one())
    group = rig.create_group("t", "late", 1, replays=False)
    rig.subscribe(group="late")
    assert rig.reschedule(first, 0) == "scheduled"
    assert rig.tick() == []
    assert first in rig.core.orderings.rejoining_ids(group)
    rig.replay(group)
    rig.commit()
    recount(rig)
    assert [got.id for got in rig.tick()] == [first]


def test_deleting_a_group_drops_its_order_lines(rig: OrderRig) -> None:
    rig.create_group("t", "g")
    rig.create_group("t", "h")
    ids = [rig.put("a") for _ in range(5)]
    rig.fire()
    rig.delete_group("t", "g")
    recount(rig)
    rig.subscribe(group="h")
    seen: list[int] = []
    while got := rig.tick():
        seen.append(got[0].id)
        rig.done(got[0])
    assert seen == ids


def test_keys_prefer_their_previous_subscriber(rig: OrderRig) -> None:
    subscribers = [rig.subscribe() for _ in range(4)]
    keys = [f"k{n}" for n in range(160)]  # a subscriber may have but a twelfth of the partitions
    had: dict[str, object] = {}
    for round_ in range(5):
        ids = {rig.put(key): key for key in keys}
        got = rig.tick()
        assert len(got) == len(keys)
        for item in got:
            key = ids[item.id]
            assert had.setdefault(key, item.subscriber) is item.subscriber
            rig.done(item)
        if round_ == 2:
            subscribers.append(rig.subscribe())  # takes none of those that have a subscriber
    assert len({id(item) for item in had.values()}) == 4
    gone = subscribers[0]
    rig.disconnect(gone)
    ids = {rig.put(key): key for key in keys}
    for item in rig.tick():
        before = had[ids[item.id]]
        assert item.subscriber is before or before is gone
        rig.done(item)


def test_a_slow_subscriber_does_not_hold_up_its_keys(rig: OrderRig) -> None:
    slow, quick = rig.subscribe(prefetch=1), rig.subscribe(prefetch=100)
    ids = {rig.put(f"k{n}") for n in range(40)}
    got = rig.tick()
    assert {task.id for task in got} == ids
    assert sum(item.subscriber is slow for item in got) == 1
    assert sum(item.subscriber is quick for item in got) == 39


def test_few_partitions_move_when_a_subscriber_joins_or_leaves(rig: OrderRig) -> None:
    partitions, members = KeyPartitions[Subscriber](), [rig.subscribe() for _ in range(5)]
    for member in members[:4]:
        partitions.join(member)
    before = partitions.of(range(1, 65), {})
    partitions.join(members[4])
    after = partitions.of(range(1, 65), {})
    assert all(a is b or b is members[4] for a, b in zip(before, after, strict=True))
    partitions.leave(members[0])
    for a, b in zip(after, partitions.of(range(1, 65), {}), strict=True):
        assert b is not members[0]
        assert a is b or a is members[0]


def test_a_million_heads_leave_the_dictionary() -> None:
    order = Order()
    for n in range(1, FEW_MAX + 1_000):
        assert order.claim(n * 0x9E3779B97F4A7C15 % 2**64, n)
    assert len(order) == FEW_MAX + 999
    for n in range(1, FEW_MAX + 1_000):
        mark = n * 0x9E3779B97F4A7C15 % 2**64
        assert order.head(mark) == n
        assert not order.claim(mark, n + 1)
        order.queue(mark, n + 10**9, 5, n + 10**9)
        assert order.promote([mark]) == ([n + 10**9], [5])
        assert order.promote([mark]) == ([], [])
        assert order.head(mark) == 0
    assert len(order) == 0


arrivals = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=30)


@given(before=arrivals, arriving=arrivals, few=st.integers(1, 8))
def test_arriving_together_equals_arriving_in_turn(
    before: list[tuple[int, int]], arriving: list[tuple[int, int]], few: int
) -> None:
    """Arrivals are (mark, due_ms); the dictionary is soon full."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(queues, "FEW_MAX", few)
        one, many = Order(), Order()
        for order in (one, many):
            for task_id, (mark, due_ms) in enumerate(before, 1):
                order.arrive(mark, task_id, due_ms, task_id)
        ids = range(len(before) + 1, len(before) + len(arriving) + 1)
        marks, dues_ms = zip(*arriving, strict=True)
        triples = zip(marks, ids, dues_ms, strict=True)
        holders = [i for mark, i, due_ms in triples if one.arrive(mark, i, due_ms, i)]
        assert many.arrive_all(marks, ids, dues_ms) == holders
        assert (many.waiting, len(many)) == (one.waiting, len(one))
        for mark in range(1, 7):
            for _ in range(60):
                assert many.promote([mark]) == one.promote([mark])


def test_two_returning_tasks_of_a_key_both_run(rig: OrderRig) -> None:
    """One is given back, and one ends its wait that was had in another group only."""
    rig.subscribe(group="quick")
    first, moved = rig.put("a"), rig.put("a")
    rig.create_group("t", "slow")
    rig.create_group("t", "slower", 1, replays=False)
    rig.subscribe(group="slower")
    while rig.replay(rig.group("t", "slower")):
        pass
    rig.commit()
    mine = {got.group.name: got for got in rig.tick()}
    rig.done(mine["quick"])
    (got,) = [got for got in rig.tick() if got.group.name == "quick"]
    rig.nack(got)
    assert rig.reschedule(moved, 0) == "scheduled"
    rig.release(mine["slower"])
    rig.tick()
    rig.commit()
    (got,) = [got for got in rig.tick() if got.group.name == "slower"]
    assert got.id == first
    rig.done(got)
    assert [got.id for got in rig.tick() if got.group.name == "slower"] == [moved]


def test_a_filter_skips_all_tasks_due_together(rig: OrderRig) -> None:
    rig.subscribe()
    rig.configure("t", "default", tags="eu")
    rig.commit()
    group = rig.group()
    rig.core.orderings.begin(group)  # as with the first task of a key that it lets pass
    first = rig.put("a")
    assert rig.ids() == []
    assert rig.state(first) == "filtered"


# --- fair shares -------------------------------------------------------------------------------


def fair_rig(**settings: Any) -> OrderRig:
    rig = OrderRig()
    rig.create_group("t", "default")
    rig.configure("t", "default", fair_by="tenant", **settings)
    return rig


def test_a_busy_tenant_does_not_delay_others() -> None:
    rig = fair_rig()
    many = [rig.put(None, tenant="big", lands=False) for _ in range(2_000)]
    rig.commit()
    few = [rig.put(None, tenant=f"small{n}") for n in range(3)]
    rig.fire()
    rig.subscribe(prefetch=100)
    got = rig.ids()
    assert set(few) <= set(got)
    assert len(got) == 100
    assert [i for i in got if i in set(many)] == many[: len(got) - 3]


def test_limit_each_limits_tasks_in_flight_per_value() -> None:
    rig = fair_rig(limit_each=2)
    ids = [rig.put(None, tenant=tenant) for tenant in ("a", "a", "a", "b", "b", "b")]
    rig.put(None)
    rig.subscribe()
    got = rig.tick()
    assert {task.id for task in got} >= {*ids[:2], *ids[3:5]}
    assert len(got) == 5
    recount(rig)
    rig.nack(got[0], 10)
    (third,) = rig.tick()
    assert third.id == ids[2]
    rig.pass_time(10)
    assert rig.ids() == []
    rig.done(third)
    (again,) = rig.tick()
    assert (again.id, again.attempt) == (ids[0], 2)
    rig.configure("t", "default", limit_each=3)
    assert rig.ids() == [ids[5]]


def test_rate_each_limits_the_rate_per_value() -> None:
    rig = fair_rig(rate_each=2.0)
    a = [rig.put(None, tenant="a") for _ in range(5)]
    b = [rig.put(None, tenant="b") for _ in range(1)]
    rig.subscribe()
    assert set(rig.ids()) == {*a[:2], *b}
    assert rig.ids() == []
    rig.seal(checkpoint_all=True)
    rig.apply_and_land()
    assert rig.engine.wake_in_ms(rig.now_ms, rig.mono_ms) == 500
    rig.pass_time(499)
    assert rig.ids() == []
    rig.pass_time(1)
    assert rig.ids() == [a[2]]
    rig.pass_time(1_000)
    assert rig.ids() == a[3:]


def test_tasks_waiting_for_their_share_can_be_cancelled() -> None:
    rig = fair_rig(limit_each=1)
    ids = [rig.put(None, tenant="a") for _ in range(5)]
    rig.subscribe()
    (got,) = rig.tick()
    assert rig.cancel(ids[2]) == "cancelled"
    assert rig.reschedule(ids[1], 1_000) == "scheduled"
    rig.commit()
    recount(rig)
    rig.done(got)
    (got,) = rig.tick()
    assert got.id == ids[3]
    rig.pass_time(1_000)
    assert rig.ids() == []
    rig.done(got)
    (got,) = rig.tick()
    assert got.id == ids[4]
    rig.done(got)
    assert rig.ids() == [ids[1]]


@pytest.mark.parametrize("restart", [Rig.crash, Rig.stop_and_start])
def test_limit_each_counts_tasks_in_flight_after_a_restart(restart: Any) -> None:
    rig = fair_rig(limit_each=2)
    ids = [rig.put(None, tenant="a") for _ in range(4)]
    rig.subscribe()
    assert rig.ids() == ids[:2]
    rig.seal(checkpoint_all=True)
    rig.apply_and_land()
    restart(rig)
    rig.subscribe()
    assert rig.ids() == []
    rig.pass_time(6_000 if restart is Rig.crash else 31_000)
    assert rig.ids() == ids[2:], "what comes back stands behind the others"


def test_a_changed_fair_by_applies_to_later_tasks() -> None:
    rig = fair_rig(limit_each=1)
    ids = [rig.put(None, tenant="a", region="x") for _ in range(4)]
    rig.fire()
    rig.configure("t", "default", fair_by="region", limit_each=2)
    recount(rig)
    ids += [rig.put(None, tenant="b", region="y") for _ in range(4)]
    assert rig.cancel(ids[1]) == "cancelled"
    rig.commit()
    rig.subscribe()
    assert rig.ids() == [ids[0], *ids[2:4], *ids[4:6]]
    rig.configure("t", "default", fair_by=None, limit_each=None)
    assert rig.ids() == ids[6:]


def test_order_and_shares_hold_together() -> None:
    rig = fair_rig(limit_each=2)
    a = [rig.put("k", tenant="a") for _ in range(3)]
    others = [rig.put(f"k{n}", tenant="a") for n in range(3)]
    rig.subscribe()
    got = rig.tick()
    assert [task.id for task in got] == [a[0], others[0]]
    rig.done(got[0])
    (one,) = rig.tick()
    assert one.id == others[1], "it was queued before the next one of the key had its turn"
    rig.done(got[1])
    assert rig.ids() == [others[2]]
    rig.done(one)
    assert rig.ids() == [a[1]]


def test_order_lines_show_which_task_blocks() -> None:
    rig = fair_rig(limit_each=1)
    for _ in range(3):
        rig.put("k", tenant="b")
    ids = [rig.put(None, tenant="a") for _ in range(5)]
    rig.subscribe()
    rig.tick()
    queues = rig.engine.key_control.longest_queues(rig.group(), 10)
    assert [(queue.kind, queue.state, queue.in_flight, queue.waiting) for queue in queues] == [
        ("fair", "limited", 1, 4),
        ("order", "in_flight", 1, 2),
    ]
    assert queues[0].task_id == ids[1]


# --- why it is late ----------------------------------------------------------------------------


def test_lateness_by_a_busy_key_has_its_cause() -> None:
    rig, (a1, a2) = rig_with(("a", 0), ("a", 0))
    first = rig.one()
    rig.pass_time(5_000)
    rig.done(first)
    assert rig.one().id == a2
    assert (rig.causes[a1], rig.causes[a2]) == (None, Cause.KEY_BUSY)


def test_lateness_by_a_share_has_its_cause() -> None:
    rig = fair_rig(limit_each=1)
    ids = [rig.put(None, tenant="a"), rig.put(None, tenant="a")]
    rig.subscribe()
    first = rig.one()
    rig.pass_time(5_000)
    rig.done(first)
    assert rig.one().id == ids[1]
    assert rig.causes == {ids[0]: None, ids[1]: Cause.KEY_BUSY}


@pytest.mark.parametrize("of", ["key", "share"])
@pytest.mark.parametrize("held", [Cause.NO_SUBSCRIBER, Cause.PAUSED, Cause.STORE, None])
@pytest.mark.parametrize("turn_ms", [500, 10_000])
def test_the_longest_wait_is_the_cause_of_lateness(
    of: str, held: Cause | None, turn_ms: int
) -> None:
    """All of a wait is not the turn's because its end was: whatever covers most of it."""
    rig = fair_rig(limit_each=2)
    subscriber = rig.subscribe()
    if held is Cause.NO_SUBSCRIBER:
        rig.disconnect(subscriber)
    rig.configure("t", "default", paused=held is Cause.PAUSED)
    for number in range(6):
        rig.put(
            f"k{number % 2}" if of == "key" else None, tenant=f"t{number}" if of == "key" else "a"
        )
    rig.commit()
    began_ms = rig.now_ms
    if held in (Cause.NO_SUBSCRIBER, Cause.PAUSED):
        assert rig.tick() == []
    rig.pass_time(5_000)
    if held is Cause.STORE:
        rig.core.ledger.daemon.add(Cause.STORE, began_ms, rig.now_ms)
    if held is Cause.NO_SUBSCRIBER:
        rig.subscribe()
    rig.configure("t", "default", paused=False)
    first = rig.tick()
    assert len(first) == 2
    whole = held or Cause.LOOP_BUSY
    assert {rig.causes[task.id] for task in first} == {whole}
    rig.pass_time(turn_ms)
    for item in first:
        rig.done(item)
    later = rig.tick()
    assert len(later) == 2
    turn = held is None or turn_ms > 5_000
    assert {rig.causes[task.id] for task in later} == {Cause.KEY_BUSY if turn else whole}


def test_lateness_by_a_pause_applies_to_ordered_tasks() -> None:
    rig, ids = rig_with(("a", 1_000), ("b", 1_000))
    rig.configure("t", "default", paused=True)
    assert rig.after(1_000).tick() == []
    rig.after(5_000).configure("t", "default", paused=False)
    assert len(rig.tick()) == 2
    assert {rig.causes[i] for i in ids} == {Cause.PAUSED}


def test_tasks_waiting_in_lines_count_for_the_oldest_age() -> None:
    rig, _ = rig_with(("a", 0), ("a", 10))
    begin_ms = rig.now_ms
    rig.one()
    rig.after(5_000).fire()
    assert rig.group().oldest_since_ms() == begin_ms + 10
    fair = fair_rig(limit_each=1)
    for _ in range(2):
        fair.put(None, tenant="a")
    fair.subscribe()
    fair.one()
    fair.pass_time(5_000)
    assert fair.group().oldest_since_ms() == begin_ms


def test_a_higher_rate_applies_at_once() -> None:
    rig = fair_rig(rate_each=0.001)
    ids = [rig.put(None, tenant="a") for _ in range(4)]
    rig.subscribe()
    assert rig.ids() == ids[:1]
    assert rig.ids() == []
    rig.configure("t", "default", rate_each=10.0)
    rig.pass_time(1_000)
    assert rig.ids() == ids[1:]


def test_many_that_wait_for_their_share_can_leave() -> None:
    """What they leave behind is dropped, and costs no look at all of it for each."""
    rig = fair_rig(limit_each=1)
    ids = [rig.put(None, tenant="a", lands=n == 4_999) for n in range(5_000)]
    rig.fire()
    (share,) = rig.core.orderings.by_group[rig.group()].shares.by_mark.values()
    for task_id in ids[1:-1]:
        assert rig.cancel(task_id) == "cancelled"
        assert share.queue is not None
        assert len(share.queue) <= 2 * share.waiting + STALE_MIN + 1
    rig.commit()
    recount(rig)
    rig.subscribe()
    (got,) = rig.tick()
    rig.done(got)
    assert rig.ids() == [ids[-1]]


def test_tasks_that_leave_after_a_changed_fair_by_cost_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some were ready before, and others wait for a place of their value."""
    rig = OrderRig()
    rig.create_group("t", "default")
    early = [rig.put(None, tenant="a") for _ in range(4)]
    rig.fire()
    rig.configure("t", "default", fair_by="tenant", limit_each=1)
    called, *late = [rig.put(None, tenant="a") for _ in range(4)]
    rig.fire()
    looks, levels = 0, ReadyQueue.levels

    def look(queue: ReadyQueue) -> dict[int, PriorityLevel]:
        nonlocal looks
        looks += 1
        return levels(queue)

    monkeypatch.setattr(ReadyQueue, "levels", look)
    for task_id in (late[0], early[1], late[2], early[2]):
        assert rig.cancel(task_id) == "cancelled"
    assert looks <= 2
    rig.subscribe()
    assert rig.ids() == [early[0], early[3], called]
    assert rig.core.orderings.by_group[rig.group()].shares.unshared == set(), "none is ready"
    rig.engine.sweep(rig.mono_ms)
    recount(rig)


@pytest.mark.parametrize("then", ["cancel", "nack", "lapse", "move"])
def test_a_changed_fair_by_ignores_tasks_already_ready(then: str) -> None:
    rig = fair_rig(limit_each=1)
    ids = [rig.put("k", tenant="a", region="x") for _ in range(3)]
    ids += [rig.put(None, tenant="a", region="x") for _ in range(3)]
    rig.subscribe()
    got = rig.one()
    if then == "nack":
        rig.nack(got, 50)
    rig.configure("t", "default", fair_by="region")
    ids += [rig.put(None, tenant="b", region="x") for _ in range(3)]
    if then == "lapse":
        rig.pass_time(31_000)
    rig.after(50).commit()
    for _ in range(3):
        rig.tick()
        rig.commit()
        recount(rig)
    for task_id in ids:
        if then == "move":
            rig.reschedule(task_id, 10)
        else:
            rig.cancel(task_id)
        recount(rig)
    rig.commit()
    recount(rig)
    for _ in range(40):
        rig.pass_time(40_000)
        for delivery in rig.tick():
            rig.ack(delivery)
        rig.commit()
        recount(rig)
    assert not rig.rows.tasks


def test_a_deletion_with_a_held_key_resumes_after_a_crash(rig: OrderRig) -> None:
    rig.create_group("t", "g")
    rig.configure("t", "g", order_failure="hold", order_attempts=1)
    task_id = rig.put("a")
    rig.subscribe(group="g")
    assert rig.nack(rig.one()) == "held"
    rig.close_group("t", "g")
    rig.commit()
    rig.crash()
    assert "g" in rig.views(task_id)
    group = rig.group("t", "g")
    while not rig.drain(group):
        rig.tick()
        rig.commit()
    rig.commit()
    assert rig.state(task_id) == "deleted"
