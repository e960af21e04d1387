"""The receipt of a delivery is that of no other one, whatever brings the task again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.test_engine_ordering import OrderRig
from support.engine_recount import recount, recounted
from support.engine_rig import GRACE_MS, LEASE_MS, Got
from tickwheel.engine.topics import Subscriber
from tickwheel.model.policies import Coalescing
from tickwheel.model.records import ATTEMPT_MAX

rig = recounted(OrderRig)

Way = Callable[[OrderRig, Got], None]


def nacked(rig: OrderRig, got: Got) -> None:
    rig.nack(got, 0)


def snoozed(rig: OrderRig, got: Got) -> None:
    rig.snooze(got, 100)


def lapsed(rig: OrderRig, got: Got) -> None:
    rig.after(LEASE_MS).expire()


def cut_off(rig: OrderRig, got: Got) -> None:
    rig.disconnect(got.subscriber)
    rig.after(GRACE_MS).expire()
    rig.subscribe()


def requeued(rig: OrderRig, got: Got) -> None:
    rig.configure("t", "default", order_failure="dead")
    rig.reject(got)
    rig.commit()
    assert rig.requeue(got.id) == "requeued"


def held_and_released(rig: OrderRig, got: Got) -> None:
    rig.configure("t", "default", order_failure="hold")
    rig.reject(got)
    rig.commit()
    known = rig.find(got.id)
    assert known is not None
    word = rig.engine.key_control.release(got.group, known, rig.now_ms)
    if word == "not_held":  # it has no order key: a dead letter
        assert rig.requeue(got.id) == "requeued"


def held_and_skipped(rig: OrderRig, got: Got) -> None:
    rig.configure("t", "default", order_failure="hold")
    rig.reject(got)
    rig.commit()
    known = rig.find(got.id)
    assert known is not None
    rig.engine.key_control.skip(got.group, known, rig.now_ms)
    rig.commit()
    assert rig.requeue(got.id) == "requeued"


def released(rig: OrderRig, got: Got) -> None:
    rig.release(got)


def released_and_run_now(rig: OrderRig, got: Got) -> None:
    rig.release(got)
    rig.commit()
    assert rig.reschedule(got.id, 0) == "scheduled"


def released_and_moved(rig: OrderRig, got: Got) -> None:
    rig.release(got)
    rig.commit()
    assert rig.reschedule(got.id, 500) == "scheduled"
    rig.commit()
    assert rig.reschedule(got.id, 1_000) == "scheduled"


def nacked_and_run_now(rig: OrderRig, got: Got) -> None:
    rig.nack(got, 60_000)
    rig.commit()
    assert rig.reschedule(got.id, 0) == "scheduled"


WAYS: tuple[Way, ...] = (
    nacked, snoozed, lapsed, cut_off, requeued, held_and_released, held_and_skipped, released,
    released_and_run_now, released_and_moved, nacked_and_run_now,
)  # fmt: skip


def again(rig: OrderRig) -> Got:
    """Its next delivery."""
    for _ in range(10):
        rig.commit()
        rig.pass_time(500)
        if result := rig.tick():
            (got,) = result
            return got
    raise AssertionError("it never comes")


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_receipts_are_unique(rig: OrderRig, first: Way, second: Way, key: str | None) -> None:
    rig.subscribe()
    task_id = rig.put(key)
    rig.put(key, 3_600_000)  # so that something is behind it
    old = [again(rig)]
    for way in (first, second):
        way(rig, old[-1])
        recount(rig)
        old.append(again(rig))
    *old, newest = old
    assert [got.attempt for got in old] == [1, 2]
    assert (newest.id, newest.attempt) == (task_id, 3)
    for got in old:
        assert rig.lease(got) is None, "what needs the current receipt takes an earlier one"
        if key is not None:
            assert rig.ack(got) == "stale", "somebody else's work ends with it"
    assert rig.lease(newest) is not None
    assert rig.ack(newest) == "acked"
    recount(rig)
    assert not rig.core.numbered or not rig.group().numbers


@pytest.mark.parametrize("way", [released, requeued])
def test_an_earlier_receipt_acks_a_task_without_an_order_key(rig: OrderRig, way: Way) -> None:
    """The work was done, so it is not done twice."""
    rig.subscribe()
    rig.put(None)
    got = again(rig)
    way(rig, got)
    assert rig.ack(got._replace(attempt=2)) == "stale"
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def crashed(rig: OrderRig, got: Got) -> None:
    rig.crash(down_ms=200)
    rig.subscribe_all(rig.core.topic("t").groups)


def crashed_and_moved(rig: OrderRig, got: Got) -> None:
    crashed(rig, got)
    assert rig.reschedule(got.id, 500) == "scheduled"


def moved_and_crashed(rig: OrderRig, got: Got) -> None:
    released_and_moved(rig, got)
    rig.commit()
    crashed(rig, got)


CRASHES = (crashed, crashed_and_moved, moved_and_crashed)


@pytest.mark.parametrize("way", [*WAYS, *CRASHES])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_receipt_does_not_settle_a_later_body(rig: OrderRig, way: Way, groups: int) -> None:
    """A new id, or after a crash that lost the delivery, another epoch tells the bodies apart."""
    rig.subscribe_all(["other", "default"][-groups:])
    task_id = rig.enqueue(delay_ms=50, key="k", body=b"old")
    mine = {got.group.name: got for got in rig.after(50).tick()}
    old = mine.pop("default")
    for other in mine.values():
        rig.release(other)
    way(rig, old)
    rig.commit()
    newer_id = rig.coalesce(Coalescing("replace"), 60_000, b"new")
    rig.commit()
    assert (newer_id == task_id) == (way in CRASHES)
    word = "stale" if way in CRASHES else "cancelled"
    assert rig.ack(old) == word
    got = rig.after(60_000).tick()
    assert [(each.id, each.body) for each in got] == [(newer_id, b"new")] * groups
    assert rig.ack(old) == word
    rig.crash()
    assert rig.ack(old) == word


@pytest.mark.parametrize(("key", "word"), [(None, "acked"), ("k", "stale")])
def test_a_released_and_moved_task_knows_its_receipt(
    rig: OrderRig, key: str | None, word: str
) -> None:
    rig.subscribe()
    rig.subscribe(group="other")
    rig.put(key)
    mine = {got.group.name: got for got in rig.tick()}
    assert rig.ack(mine["other"]) == "acked"  # so that it waits, and is not scheduled anew
    rig.release(mine["default"])
    rig.commit()
    assert rig.reschedule(mine["default"].id, 500) == "scheduled"
    assert rig.ack(mine["default"]._replace(attempt=2)) == "stale"
    assert rig.ack(mine["default"]) == word
    rig.commit()


@pytest.mark.parametrize("count", [1, 3_000])
def test_a_released_delivery_costs_no_row(rig: OrderRig, count: int) -> None:
    """A consumer that closes gives back whatever it had fetched ahead."""
    consumer: Subscriber = rig.subscribe(prefetch=count)
    rig.store(count=count)
    deliveries = rig.tick()
    assert len(deliveries) == count
    for got in reversed(deliveries):
        rig.release(got)
    rig.engine.subscriptions.unsubscribe(consumer)
    rig.commit()
    assert not rig.rows.progress
    assert len(rig.group().numbers) == count and not rig.group().delivery_attempts
    rig.subscribe(prefetch=count)
    deliveries = rig.tick()
    assert [(got.attempt, got.failures) for got in deliveries] == [(2, 0)] * count
    assert not rig.group().numbers


def test_the_number_of_a_task_that_ended_is_forgotten(rig: OrderRig) -> None:
    rig.subscribe()
    task_id = rig.put(None)
    rig.release(again(rig))
    assert rig.group().numbers == {task_id: 1}
    assert rig.cancel(task_id) == "cancelled"
    assert not rig.group().numbers and not rig.core.numbered


def test_numbers_are_kept_by_topic(rig: OrderRig) -> None:
    for topic in ("t", "u"):
        rig.subscribe(topic)
        rig.enqueue(topic)
    mine, other = rig.tick()
    rig.release(mine)
    rig.release(other)
    assert rig.core.numbered.keys() == {"t", "u"}
    assert rig.cancel(mine.id) == "cancelled"
    assert rig.core.numbered == {"u": {other.group: None}}
    rig.delete_group("u", "default")
    assert not rig.core.numbered


def test_failures_and_not_deliveries_use_up_the_retries(rig: OrderRig) -> None:
    rig.subscribe()
    rig.put(None)
    retries = rig.config.retry.retries_max
    got = again(rig)
    for failed in range(retries + 1):
        for way in (released, snoozed):
            way(rig, got)
            got = again(rig)
            assert got.failures == failed
        word = rig.nack(got, 0)
        if failed < retries:
            assert word == "retrying"
            got = again(rig)
    assert word == "dead"
    rig.commit()
    (letter,) = rig.rows.dead.values()
    assert (letter.attempt, letter.failed) == (got.attempt, retries + 1)
    assert got.attempt == 3 * (retries + 1) <= ATTEMPT_MAX
