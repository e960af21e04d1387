"""Leases: over, extended, released, kept for a moment after a connection broke."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

from support.engine_recount import recount
from support.engine_rig import CONFIG, GRACE_MS, LEASE_MS, RETRY, Got, Rig
from tickwheel.engine.settlement import EXPIRY_SCAN_GAP_MS_MIN as GAP_MS
from tickwheel.engine.topics import Lease, Subscriber
from tickwheel.model.records import ProgressState


def delivered(rig: Rig) -> Got:
    rig.enqueue()
    return rig.one()


def test_an_expired_lease_starts_the_next_attempt(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    assert rig.after(LEASE_MS - 1).tick() == []
    again = rig.after(1).one()
    assert (again.id, again.attempt) == (got.id, 2)
    assert [f.reason for f in rig.held(again).past.failures] == ["lease over"]
    assert again.subscriber.outstanding == 1


def test_a_lease_does_not_follow_the_wall_clock(rig: Rig) -> None:
    rig.subscribe()
    delivered(rig)
    rig.now_ms += 10 * LEASE_MS
    assert rig.tick() == []


def test_repeated_lease_expiries_end_as_a_dead_letter() -> None:
    rig = Rig(replace(CONFIG, retry=replace(RETRY, retries_max=1)))
    rig.subscribe()
    got = delivered(rig)
    rig.after(LEASE_MS).one()
    assert rig.after(LEASE_MS + GAP_MS).tick() == []
    assert rig.state(got.id) == "dead"
    recount(rig)


def test_an_extended_lease_ends_that_much_later(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.pass_time(LEASE_MS - 1)
    rig.extend(got, LEASE_MS)
    assert rig.after(LEASE_MS - 1).tick() == []
    assert rig.after(1 + GAP_MS).one().attempt == 2


def test_a_lease_can_be_made_shorter(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.extend(got, 100)
    assert rig.after(100).one().attempt == 2


def test_a_released_delivery_does_not_count(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=1)
    got = delivered(rig)
    rig.release(got)
    assert rig.tick() == []
    rig.commit()
    assert subscriber.outstanding == 0
    again = rig.one()
    assert (again.id, again.attempt, again.failures) == (got.id, 2, 0)
    assert rig.views(got.id) == {"default": ("in_flight", 2)}
    rig.commit()
    assert not rig.rows.progress


def test_released_deliveries_are_first_in_line(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=2)
    rig.subscribe(group="keeps the rows in memory", prefetch=0)
    ids = rig.store(count=3)
    for got in reversed(rig.tick()):
        rig.release(got)
    rig.commit()
    assert [got.id for got in rig.tick() if got.subscriber is subscriber] == ids[:2]


def test_a_disconnect_releases_only_its_own_leases(rig: Rig) -> None:
    class Unwalked(dict[int, Lease]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("the deliveries of the whole group are looked at")

        keys = values = items = __iter__  # type: ignore[assignment]

    leaving, staying = rig.subscribe(prefetch=3), rig.subscribe(prefetch=3)
    ids = rig.store(count=6)
    before = {got.id: got.subscriber for got in rig.tick()}
    mine = [task_id for task_id in ids if before[task_id] is leaving]
    group = rig.group("t", "default")
    flight, group.flight = group.flight, Unwalked(group.flight)
    rig.engine.subscriptions.unsubscribe(leaving)
    leases = rig.engine.settlement.leases_of([leaving, leaving])
    rig.engine.settlement.release_all(leases, rig.now_ms)
    assert not leaving.held and len(group.flight) == len(mine) == 3
    group.flight = {i: lease for i, lease in flight.items() if i in staying.held}
    rig.commit()
    again = rig.subscribe(prefetch=3)
    assert [(got.id, got.attempt) for got in rig.tick()] == [(task_id, 2) for task_id in mine]
    assert list(again.held) == mine


def test_leases_of_many_subscribers_are_released_in_order_in_parts(rig: Rig) -> None:
    leaving = [rig.subscribe(prefetch=4) for _ in range(2)]
    group, first = leaving[0].group, list[Got]()
    for _ in range(2):
        rig.store(count=4)
        first += rig.after(1).tick()
    assert [len(each.held) for each in leaving] == [4, 4]
    for each in leaving:
        rig.engine.subscriptions.unsubscribe(each)
    leases = rig.engine.settlement.leases_of(leaving)
    rig.engine.settlement.release_all(islice(leases, 3), rig.now_ms)
    assert len(group.flight) == 5
    rig.ack(first[0])
    rig.engine.settlement.release_all(leases, rig.now_ms)
    assert not group.flight and len(group.ready) == 7
    rig.commit()
    rig.subscribe()
    assert [got.id for got in rig.tick()] == [got.id for got in first[1:]]


def test_leases_that_time_out_together_end_in_steps(rig: Rig) -> None:
    gone = rig.subscribe(prefetch=10)
    rig.store(count=10)
    got = rig.tick()
    rig.disconnect(gone)
    rig.pass_time(GRACE_MS)
    settlement, group, left = rig.engine.settlement, rig.group(), list[int]()
    assert settlement.expire(*rig.now, 4)
    flying = [each for each in got if each.id in group.flight]
    assert len(flying) == 6
    rig.ack(flying[-1])
    settlement.extend(rig.held(flying[-2]), LEASE_MS, rig.mono_ms)
    recount(rig)
    while settlement.expire(*rig.now, 2):
        left.append(len(group.flight))
        recount(rig)
    assert left == [3, 1]
    assert [*group.flight] == [flying[-2].id] and rig.core.totals.leases_over == 8
    assert rig.after(LEASE_MS).expire() == 1
    recount(rig)


def test_a_release_keeps_earlier_failures(rig: Rig) -> None:
    rig.subscribe()
    rig.nack(delivered(rig), 0, "first")
    second = rig.one()
    rig.release(second)
    rig.commit()
    row = rig.rows.progress[second.id, "default"]
    assert (row.attempt, row.failed) == (2, 1)
    third = rig.one()
    assert (third.attempt, third.failures) == (3, 1)
    assert [f.reason for f in rig.held(third).past.failures] == ["first"]


def test_a_broken_connection_keeps_its_leases_for_the_grace_only(rig: Rig) -> None:
    gone, other = rig.subscribe(prefetch=1), rig.subscribe(prefetch=0)
    got = delivered(rig)
    assert got.subscriber is gone
    rig.disconnect(gone)
    other.prefetch = 1
    assert rig.after(GRACE_MS - 1).tick() == []
    again = rig.after(1).one()
    assert again.subscriber is other
    assert [f.reason for f in rig.held(again).past.failures] == ["connection lost"]


def test_a_broken_connection_does_not_make_a_lease_longer(rig: Rig) -> None:
    gone = rig.subscribe(lease_ms=1_000)
    delivered(rig)
    rig.disconnect(gone)
    rig.subscribe()
    assert rig.after(1_000).one().attempt == 2


def test_an_ack_within_the_grace_is_accepted(rig: Rig) -> None:
    gone = rig.subscribe()
    got = delivered(rig)
    rig.disconnect(gone)
    rig.subscribe()
    rig.pass_time(GRACE_MS - 1)
    assert rig.ack(got) == "acked"
    assert rig.after(GRACE_MS).tick() == []


def test_an_extension_by_a_consumer_that_is_back_keeps_the_lease(rig: Rig) -> None:
    gone = rig.subscribe()
    got = delivered(rig)
    rig.disconnect(gone)
    rig.extend(got, LEASE_MS)
    rig.subscribe()
    assert rig.after(LEASE_MS - 1).tick() == []
    assert rig.after(1 + GAP_MS).one().attempt == 2


def test_a_quick_ack_leaves_no_progress_in_any_batch(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.stage()
    batch = rig.seal()
    assert batch is not None and not batch.effects.progress
    rig.apply_and_land()
    rig.pass_time(99)
    rig.ack(got)
    batch = rig.seal()
    assert batch is not None and not batch.effects.progress
    rig.apply_and_land()
    assert rig.after(1_000).seal() is None
    assert rig.engine.next_checkpoint_mono_ms() is None


def test_a_slow_delivery_is_checkpointed_once(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    assert rig.engine.next_checkpoint_mono_ms() == rig.mono_ms + 100
    rig.after(100).commit()
    row = rig.rows.progress[got.id, "default"]
    assert (row.state, row.attempt, row.epoch) == (ProgressState.IN_FLIGHT, 1, 1)
    assert row.at_ms == rig.now_ms - 100 + LEASE_MS
    assert rig.seal() is None
    assert rig.engine.next_checkpoint_mono_ms() is None


def test_an_extension_is_checkpointed(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    rig.after(100).commit()
    rig.extend(got, 2 * LEASE_MS)
    rig.commit()
    assert rig.rows.progress[got.id, "default"].at_ms == rig.now_ms + 2 * LEASE_MS


def test_a_stop_checkpoints_every_delivery(rig: Rig) -> None:
    rig.subscribe()
    got = delivered(rig)
    assert rig.seal(checkpoint_all=True) is not None
    rig.apply_and_land()
    assert rig.rows.progress[got.id, "default"].state is ProgressState.IN_FLIGHT


# --- a consumer that holds its connection and is dead ---------------------------------------------


def frozen(rig: Rig, **options: Any) -> Subscriber:
    subscriber = rig.subscribe(**options)
    rig.frozen.add(subscriber)
    return subscriber


def test_a_frozen_consumer_costs_each_task_one_attempt(rig: Rig) -> None:
    dead = frozen(rig, prefetch=3)
    for _ in range(10):
        rig.stage()
    rig.commit()
    had = rig.tick()
    assert len(had) == 3
    for _ in range(20):
        assert rig.after(LEASE_MS + GAP_MS).tick() == []
    group = rig.group()
    assert (group.ready_count, len(group.flight), group.dead) == (10, 0, 0)
    assert {len(group.delivery_attempts[task.id].past.failures) for task in had} == {1}
    assert dead.outstanding == 0
    rig.commit()


def test_tasks_of_a_frozen_consumer_go_to_others(rig: Rig) -> None:
    frozen(rig, prefetch=3)
    for _ in range(3):
        rig.stage()
    rig.commit()
    assert len(rig.tick()) == 3
    living = rig.subscribe()
    got = rig.after(LEASE_MS).tick()
    assert [(delivery.subscriber, delivery.attempt) for delivery in got] == [(living, 2)] * 3
    assert {rig.ack(item) for item in got} == {"acked"}


def test_a_frozen_consumer_gets_tasks_after_a_sign_of_life(rig: Rig) -> None:
    slow = frozen(rig, prefetch=1)
    got = delivered(rig)
    assert rig.after(LEASE_MS).tick() == []
    rig.engine.subscriptions.consumer_responded(slow.presence, [slow])
    again = rig.one()
    assert (again.id, again.attempt) == (got.id, 2)
    rig.pass_time(LEASE_MS + GAP_MS)
    assert rig.tick() == [], "what it did before does not count for the next lease"


def test_subscriptions_of_a_connection_freeze_together() -> None:
    rig = Rig()  # presences that are put together here are not counted
    one, other, elsewhere = frozen(rig), rig.subscribe("u"), rig.subscribe("v")
    other.presence = one.presence
    pull = rig.subscribe("w", once=True)
    pull.presence = one.presence
    delivered(rig)
    assert rig.after(LEASE_MS).tick() == []
    for topic in ("u", "v", "w"):
        rig.stage(topic)
    rig.commit()
    assert [got.subscriber for got in rig.tick()] == [elsewhere]
    rig.engine.subscriptions.consumer_responded(one.presence, [one, other, pull])
    assert {got.subscriber for got in rig.tick()} == {one, other, pull}


def test_a_frozen_consumers_later_pull_is_served() -> None:
    """Somebody who has dropped a task and asks again is there; pulls that wait in a row with
    nobody behind them would take one attempt each."""
    rig = Rig()  # presences that are put together here are not counted
    pulls = [rig.subscribe(once=True, prefetch=1) for _ in range(3)]
    rig.frozen.update(pulls)
    for pull in pulls:
        pull.presence, pull.asked_mono_ms = pulls[0].presence, rig.mono_ms
    rig.pass_time(1)
    first = delivered(rig)
    assert rig.after(LEASE_MS).tick() == []
    later = rig.subscribe(once=True, prefetch=1)
    rig.frozen.add(later)
    later.presence, later.asked_mono_ms = pulls[0].presence, rig.mono_ms - LEASE_MS
    assert [(got.subscriber, got.id, got.attempt) for got in rig.tick()] == [(later, first.id, 2)]
    assert rig.after(LEASE_MS + GAP_MS).tick() == []
    assert rig.group().ready_count == 1


def test_an_expired_lease_of_a_gone_connection_freezes_no_consumer(rig: Rig) -> None:
    """Taken over from before a restart, or of a connection that is gone."""
    before = rig.subscribe(prefetch=1)
    delivered(rig)
    rig.stop_and_start()
    here = frozen(rig)
    rig.pass_time(LEASE_MS)
    assert [(got.subscriber, got.attempt) for got in rig.tick()] == [(here, 2)]
    assert before is not here
