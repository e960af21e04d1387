"""Acks: by the current receipt, by an earlier one, late, repeated, misdirected."""

from __future__ import annotations

from itertools import product

import pytest

from support.engine_rig import LEASE_MS, Got, Rig
from tickwheel.model.records import ATTEMPT_MAX, ProgressState


def delivered(rig: Rig, **options: int) -> Got:
    rig.enqueue(**options)
    return rig.one()


def test_an_ack_ends_the_task_at_once_and_durably_with_its_batch(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    assert rig.ack(got) == "acked"
    assert rig.state(got.id) == "acked"
    assert got.id in rig.rows.tasks
    rig.commit()
    assert rig.rows.is_empty()
    assert rig.core.totals.acked == rig.group().acked == 1


def test_a_lease_does_not_end_while_its_ack_is_being_committed(rig: Rig) -> None:
    rig.subscribe()
    rig.ack(delivered(rig))
    rig.seal()
    assert rig.after(10 * LEASE_MS).tick() == []
    rig.refuse()
    assert rig.after(10 * LEASE_MS).tick() == []


def test_a_repeated_ack_is_answered_done(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.ack(got)
    assert rig.ack(got) == "done"
    rig.commit()
    assert rig.ack(got) == "done"
    rig.crash()
    rig.subscribe()
    assert rig.ack(got) == "done"


def test_a_repeated_ack_of_one_of_two_groups_is_answered_done(rig: Rig) -> None:
    rig.subscribe(group="a")
    rig.subscribe(group="b")
    rig.enqueue()
    (first, _) = rig.tick()
    assert [rig.ack(first), rig.ack(first)] == ["acked", "done"]
    rig.commit()
    assert rig.ack(first) == "done"


def test_an_earlier_receipt_acks_a_ready_task(rig: Rig) -> None:
    subscriber = rig.subscribe()
    got = delivered(rig)
    subscriber.prefetch = 0
    rig.after(LEASE_MS).tick()
    assert rig.state(got.id) == "ready"
    assert rig.ack(got) == "acked"
    subscriber.prefetch = 100
    rig.core.reconsider(subscriber)
    assert rig.tick() == []
    rig.commit()
    assert rig.rows.is_empty()


def test_an_earlier_receipt_acks_a_waiting_task(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.nack(got, 0)
    assert rig.ack(got) == "acked"
    assert len(rig.core.wheel) == 0
    assert rig.tick() == []


def test_an_earlier_receipt_acks_a_task_in_flight(rig: Rig) -> None:
    rig.subscribe()
    first = delivered(rig)
    second = rig.after(LEASE_MS).one()
    assert (second.attempt, rig.ack(first), rig.ack(second)) == (2, "acked", "done")
    rig.commit()
    assert second.subscriber.outstanding == 0


def test_an_ack_while_the_row_is_being_read_ends_the_task(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.after(LEASE_MS).expire()
    rig.engine.delivery.dispatch(*rig.now, 100)
    assert rig.group().loading
    assert rig.ack(got) == "acked"
    rig.load()
    assert rig.dispatch() == []


def test_an_ack_by_an_invented_receipt_is_stale(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    group = got.group
    assert rig.ack_receipt(group, got.epoch, got.id, 2) == "stale"
    assert rig.ack_receipt(group, got.epoch + 1, got.id, 1) == "stale"
    scheduled = rig.enqueue(delay_ms=1_000)
    assert rig.ack_receipt(group, got.epoch, scheduled, 1) == "stale"
    assert rig.state(got.id) == "in_flight"


@pytest.mark.parametrize("state", ["scheduled", "ready", "in_flight", "waiting"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_an_impossible_receipt_never_ends_a_task(rig: Rig, state: str, restarted: bool) -> None:
    """Whatever the task is doing, and whatever an earlier epoch may have forgotten."""
    subscriber = rig.subscribe()
    task_id = rig.enqueue(delay_ms=1_000 if state == "scheduled" else 0)
    group = rig.group()
    if state == "ready":
        rig.disconnect(subscriber)
    for got in rig.tick():
        if state == "waiting":
            rig.nack(got, delay_ms=60_000)
    if restarted:
        rig.stop_and_start()
        group = rig.group()
    newest = max((lease.attempt for lease in group.flight.values()), default=1)
    epochs = (0, -1, rig.epoch, rig.epoch + 1, 2**63 - 1, 2**64 - 1)
    attempts = (0, -1, newest + 1, ATTEMPT_MAX, ATTEMPT_MAX + 1, 2**63 - 1, 2**64 - 1)
    before = rig.state(task_id)
    for epoch, attempt in product(epochs, attempts):
        assert rig.ack_receipt(group, epoch, task_id, attempt) == "stale", (epoch, attempt)
    for epoch, attempt in product((1, rig.epoch - 1), (0, -1, ATTEMPT_MAX + 1, 2**64 - 1)):
        assert rig.ack_receipt(group, epoch, task_id, attempt) == "stale", (epoch, attempt)
    assert rig.state(task_id) == before


def test_a_forged_receipt_does_not_affect_genuine_receipts(rig: Rig) -> None:
    rig.subscribe()
    ids = [rig.enqueue() for _ in range(3)]
    rig.tick()
    unresolved = rig.engine.settlement.ack(rig.group(), rig.epoch, ids, [1, 0, 1])
    assert unresolved == [1]
    assert [rig.state(task_id) for task_id in ids] == ["acked", "in_flight", "acked"]


def test_an_ack_of_an_id_that_never_was_is_unknown(rig: Rig) -> None:
    group = rig.subscribe().group
    last = rig.enqueue(delay_ms=1_000)
    assert rig.ack_receipt(group, 1, last + 1024, 1) == "unknown"
    assert rig.ack_receipt(group, 1, last - 1024, 1) == "gone"


def test_an_ack_says_how_else_the_task_ended(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.nack(got, 1_000)
    rig.cancel(got.id)
    assert rig.ack(got) == "cancelled"
    dead = delivered(rig)
    rig.reject(dead)
    assert rig.ack(dead) == "dead"
    rig.delete_dead(dead.id)
    assert rig.ack(dead) == "deleted"


def test_an_ack_by_a_group_without_the_task_is_stale(rig: Rig) -> None:
    rig.subscribe(group="first")
    rig.enqueue()
    rig.commit()
    rig.fire()
    rig.after(1).subscribe(group="second", prefetch=0)
    rig.crash()
    late = rig.subscribe(group="second", prefetch=0).group
    rig.subscribe(group="first")
    got = rig.one()
    assert got.group.name == "first"
    assert rig.ack_receipt(late, 1, got.id, 1) == "stale"
    assert rig.state(got.id) == "in_flight"


def test_an_ack_that_names_another_topic_leaves_the_task_alone(rig: Rig) -> None:
    other = rig.subscribe("other").group
    task_id = rig.enqueue("t")
    rig.crash()
    rig.subscribe("other")
    rig.fire()
    assert rig.ack_receipt(other, 1, task_id, 1) == "stale"
    assert rig.state(task_id) == "ready"


def test_a_receipt_from_before_a_crash_acks_a_scheduled_task(rig: Rig) -> None:
    rig.subscribe()
    rig.commit()
    got = delivered(rig)
    rig.crash()
    assert rig.state(got.id) == "scheduled"
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()
    assert rig.tick() == []


def test_a_receipt_from_before_a_crash_acks_a_task_in_flight(rig: Rig) -> None:
    rig.subscribe()
    rig.commit()
    first = delivered(rig)
    rig.crash()
    rig.subscribe()
    second = rig.one()
    assert (second.epoch, second.attempt) == (2, 1)
    assert (rig.ack(first), rig.ack(second)) == ("acked", "done")


def test_a_receipt_forgotten_in_a_crash_is_stale_after_redelivery(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.after(200).commit()
    assert rig.rows.progress[got.id, "default"].state is ProgressState.IN_FLIGHT
    second = rig.after(LEASE_MS).one()
    assert second.attempt == 2
    rig.crash()
    assert rig.state(got.id) == "in_flight"
    assert rig.ack(second) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_credits_of_joined_batches_add_up(rig: Rig) -> None:
    subscriber = rig.subscribe()
    for _ in range(2):
        rig.enqueue()
    first, second = rig.tick()
    rig.ack(first)
    rig.seal()
    rig.ack(second)
    rig.refuse()
    rig.commit()
    assert subscriber.outstanding == 0
