"""Consumers that die are not failures of the tasks they had, and take no others with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.test_engine_ordering import OrderRig
from support.engine_recount import recount
from support.engine_rig import CONFIG, GRACE_MS, LEASE_MS, Got, Rig
from tickwheel.engine.delivery import KEEP_MS
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import Presence, Subscriber
from tickwheel.model.records import CONSUMER_DIED, ProgressState

KILLED = "its connection broke (process 7 of host)"
LAST = replace(CONFIG, deaths_max=2)
"""One death more ends a task whose consumer has died once."""


def kill(rig: Rig, subscriber: Subscriber) -> None:
    """And its grace is over."""
    rig.disconnect(subscriber, KILLED)
    rig.after(GRACE_MS).expire()
    recount(rig)


def handed_out(rig: Rig) -> list[Got]:
    deliveries = rig.tick()
    rig.commit()
    recount(rig)
    return deliveries


def after(rig: Rig, ms: int) -> list[Got]:
    rig.pass_time(ms)
    return handed_out(rig)


def deadly(config: EngineConfig = CONFIG, key: str | None = None) -> tuple[OrderRig, int]:
    """A task whose consumer has died once."""
    rig = OrderRig(config)
    consumer = rig.subscribe()
    task_id = rig.put(key)
    (got,) = handed_out(rig)
    kill(rig, consumer)
    rig.commit()
    return rig, got.id if got.id == task_id else 0


def test_a_death_counts_apart_from_failures_and_delays_the_retry() -> None:
    rig, task_id = deadly()
    row = rig.rows.progress[task_id, "default"]
    assert (row.state, row.attempt, row.failed, row.deaths) == (ProgressState.WAITING, 1, 0, 1)
    assert row.at_ms == rig.now_ms + 1_000
    assert [failure.reason for failure in row.failures] == [f"{CONSUMER_DIED}: {KILLED}"]
    assert rig.group().deaths == rig.core.totals.deaths == 1
    assert (rig.core.totals.leases_over, rig.core.totals.nacked) == (0, 0)
    rig.subscribe()
    assert after(rig, 999) == []
    (got,) = after(rig, 1)
    assert (got.id, got.attempt, got.failures, got.deaths) == (task_id, 2, 0, 1)
    view = rig.engine.control.view(rig.known([task_id])[task_id], 0)["default"]
    assert (view.retries_left, view.deaths) == (rig.config.retry.retries_max, 1)
    rig.nack(got, 0)
    (got,) = handed_out(rig)
    assert (got.failures, got.deaths) == (1, 1)
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_too_many_deaths_make_a_dead_letter() -> None:
    rig, task_id = deadly()
    for wait_ms in (1_000, 2_000):
        consumer = rig.subscribe()
        (got,) = after(rig, wait_ms)
        kill(rig, consumer)
        rig.commit()
    letter = rig.rows.dead[task_id, "default"]
    assert letter.reason == f"{CONSUMER_DIED}: {KILLED}"
    assert (letter.attempt, letter.failed, letter.deaths) == (3, 0, 3)
    assert [failure.attempt for failure in letter.failures] == [1, 2, 3]
    rig.subscribe()
    assert rig.requeue(task_id) == "requeued"
    (got,) = handed_out(rig)
    assert (got.attempt, got.failures, got.deaths) == (4, 0, 0)


def test_a_nack_with_the_death_reason_is_a_failure() -> None:
    """A consumer that says so of itself has failed, and uses up the retries."""
    rig = Rig(replace(CONFIG, retry=replace(CONFIG.retry, retries_max=1)))
    rig.subscribe()
    task_id = rig.enqueue()
    (got,) = handed_out(rig)
    assert rig.nack(got, 0, f"{CONSUMER_DIED}: {KILLED}") == "retrying"
    rig.commit()
    row = rig.rows.progress[task_id, "default"]
    assert (row.failed, row.deaths) == (1, 0)
    (got,) = handed_out(rig)
    assert rig.nack(got, 0, CONSUMER_DIED) == "dead"
    rig.commit()
    letter = rig.rows.dead[task_id, "default"]
    assert (letter.reason, letter.failed, letter.deaths) == (f"nack: {CONSUMER_DIED}", 2, 0)


def test_the_waits_double_up_to_the_longest() -> None:
    rig, task_id = deadly(replace(CONFIG, deaths_max=20))
    waits_ms = []
    for _ in range(9):
        waits_ms.append(rig.rows.progress[task_id, "default"].at_ms - rig.now_ms)
        consumer = rig.subscribe()
        (got,) = after(rig, waits_ms[-1])
        kill(rig, consumer)
        rig.commit()
    assert waits_ms == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]


def lapses(rig: Rig, got: Got) -> None:
    rig.after(LEASE_MS).expire()


def leaves(rig: Rig, got: Got) -> None:
    """It said that it goes, with the delivery in its hands."""
    rig.disconnect(got.subscriber)
    rig.after(GRACE_MS).expire()


@pytest.mark.parametrize("end", [lapses, leaves])
def test_other_lost_deliveries_are_failures(rig: Rig, end: Callable[[Rig, Got], None]) -> None:
    rig.subscribe()
    rig.enqueue()
    (got,) = handed_out(rig)
    end(rig, got)
    rig.subscribe()
    (again,) = handed_out(rig)
    assert (again.failures, again.deaths) == (1, 0)
    assert rig.core.totals.deaths == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lease_extended_on_another_connection_belongs_to_it(rig: Rig, restarts: bool) -> None:
    first = rig.subscribe()
    task_id = rig.enqueue()
    (got,) = handed_out(rig)
    rig.commit()
    if restarts:
        rig.stop_and_start()
    else:
        rig.disconnect(first)
    second = rig.subscribe(prefetch=1)
    rig.extend(got, 10 * LEASE_MS, second)
    rig.enqueue()
    assert handed_out(rig) == [], "its prefetch is used up"
    kill(rig, second)
    rig.commit()
    row = rig.rows.progress[task_id, "default"]
    assert (row.state, row.deaths, row.failed) == (ProgressState.WAITING, 1, 0)


def test_settled_and_extended_deliveries_do_not_count_as_deaths(rig: Rig) -> None:
    consumer = rig.subscribe()
    for _ in range(4):
        rig.enqueue()
    acked, extended, released, _ = handed_out(rig)
    rig.disconnect(consumer, KILLED)
    rig.pass_time(GRACE_MS - 1)
    assert rig.ack(acked) == "acked"
    rig.extend(extended, LEASE_MS)
    rig.release(released)
    rig.after(1).expire()
    assert rig.core.totals.deaths == 1
    assert rig.lease(extended) is not None


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_of_the_daemon_counts_no_deaths(clean: bool) -> None:
    rig, task_id = deadly()
    rig.subscribe()
    rig.enqueue()
    after(rig, 1_000)
    rig.after(200).commit()
    if clean:
        rig.stop_and_start()
    else:
        rig.crash()
    recount(rig)
    rig.after(LEASE_MS).subscribe()
    by_id = {got.id: got for got in handed_out(rig)}
    by_id |= {got.id: got for got in after(rig, 1)}
    assert rig.core.totals.deaths == 0
    assert {got.deaths for i, got in by_id.items() if i != task_id} == {0}
    for got in list(by_id.values()):
        rig.ack(got)
    for got in handed_out(rig):
        by_id[got.id] = got
    assert by_id[task_id].deaths == 1, "what was counted before is kept"


# --- alone ----------------------------------------------------------------------------------


def test_prefetched_tasks_of_a_dead_consumer_are_redelivered(rig: Rig) -> None:
    """One kill -9 says nothing about thousands of tasks that were there."""
    consumer = rig.subscribe()
    ids = {*rig.stage(count=50)}
    rig.commit()
    assert len(handed_out(rig)) == 50
    kill(rig, consumer)
    rig.subscribe()
    result = after(rig, 1_000)
    assert {got.id for got in result} == ids and {got.deaths for got in result} == {1}


def test_a_poison_task_does_not_bury_its_neighbours(rig: Rig) -> None:
    poison, *innocent = rig.store(count=20)
    acked = set[int]()
    for _ in range(200):
        if (poison, "default") in rig.rows.dead and acked == {*innocent}:
            break
        consumer = rig.subscribe(prefetch=8)
        result = after(rig, 4_000)
        if poison in {got.id for got in result}:
            assert got_alone(result) or max(got.deaths for got in result) < 2
            kill(rig, consumer)
        else:
            acked |= {got.id for got in result if rig.ack(got) == "acked"}
            rig.commit()
            rig.disconnect(consumer)
        rig.commit()
    assert rig.rows.dead.keys() == {(poison, "default")}
    assert acked == {*innocent}


def got_alone(found: list[Got]) -> bool:
    return len(found) == 1


def test_a_suspect_task_is_alone_on_its_connection() -> None:
    rig, task_id = deadly(LAST)
    first, second = rig.subscribe(prefetch=5), rig.subscribe(prefetch=5)
    rig.store(count=4)
    others = handed_out(rig)
    assert len(others) == 4 and {got.subscriber for got in others} == {first, second}
    assert after(rig, 1_000) == []
    rig.store(count=20)
    deliveries = handed_out(rig)
    # One of the two is kept free; the other one goes on.
    kept = first if first.presence.kept_for else second
    goes_on = second if kept is first else first
    assert task_id not in {got.id for got in deliveries}
    assert {got.subscriber for got in deliveries} == {goes_on}
    for got in others:
        if got.subscriber is kept:
            rig.ack(got)
    (got,) = [got for got in handed_out(rig) if got.subscriber is kept]
    assert got.id == task_id
    assert not [got for got in after(rig, 10) if got.subscriber is kept]
    assert rig.ack(got) == "acked"
    rig.commit()
    assert len([got for got in handed_out(rig) if got.subscriber is kept]) == 5


def test_a_connection_has_several_subscriptions() -> None:
    rig, task_id = deadly(LAST)
    one, other = rig.subscribe(), rig.subscribe(group="other")
    del one.presence.subscribers[one], other.presence.subscribers[other]
    one.presence = other.presence = Presence()
    one.presence.subscribers |= {one: None, other: None}
    rig.group(name="other")
    rig.enqueue()
    deliveries = handed_out(rig)
    assert {got.group.name for got in deliveries} == {"default", "other"}
    assert task_id not in {got.id for got in after(rig, 1_000)}
    rig.enqueue()
    assert handed_out(rig) == [], "it is kept free"
    for got in deliveries:
        rig.ack(got)
    rig.commit()
    (got,) = handed_out(rig)
    assert (got.id, got.subscriber) == (task_id, one)
    rig.nack(got, 60_000)
    rig.commit()
    assert {got.group.name for got in handed_out(rig)} == {"default", "other"}


def test_work_that_lasts_does_not_cost_a_connection() -> None:
    rig, task_id = deadly(LAST)
    consumer = rig.subscribe(prefetch=2, lease_ms=100 * KEEP_MS)
    rig.enqueue()
    (lasting,) = handed_out(rig)
    rig.enqueue()
    (second,) = handed_out(rig)
    rig.ack(second)
    rig.commit()
    assert after(rig, 1_000) == []
    assert consumer.presence.kept_for is rig.group()
    rig.enqueue()
    assert handed_out(rig) == []
    assert rig.engine.wake_in_ms(*rig.now) in range(KEEP_MS + 1)
    (other,) = after(rig, KEEP_MS)
    assert other.id != task_id
    rig.ack(other)
    rig.commit()
    rig.enqueue()
    (other,) = after(rig, KEEP_MS - 1)
    rig.ack(other)
    rig.ack(lasting)
    rig.commit()
    (got,) = after(rig, 1)
    assert got.id == task_id


def test_other_tasks_run_between_two_suspects() -> None:
    rig = Rig(LAST)
    consumer = rig.subscribe()
    deadly_ids = set(rig.stage(count=3))
    rig.commit()
    assert len(handed_out(rig)) == 3
    kill(rig, consumer)
    rig.after(1_000).fire()
    rig.store(count=3)
    rig.subscribe(prefetch=1)
    order = []
    for _ in range(6):
        (got,) = handed_out(rig)
        order.append(got.id in deadly_ids)
        rig.ack(got)
        rig.commit()
    assert order.count(True) == 3
    assert not any(one and other for one, other in pairwise(order))
    assert rig.tick() == []


@pytest.mark.parametrize("how", ["release", "cancel", "expire", "close"])
def test_a_suspect_task_waiting_for_a_connection_can_end(how: str) -> None:
    rig = OrderRig(LAST)
    consumer = rig.subscribe()
    task_id = rig.put(None, ttl_ms=60_000)
    handed_out(rig)
    kill(rig, consumer)
    busy = rig.subscribe()
    rig.enqueue()
    handed_out(rig)
    assert after(rig, 1_000) == []
    assert list(rig.group().isolated) == [task_id]
    if how == "cancel":
        assert rig.cancel(task_id) == "cancelled"
    elif how == "expire":
        rig.after(60_000).fire()
    elif how == "close":
        rig.delete_group("t", "default")
        assert not rig.core.kept_connections and busy.presence.kept_for is None
        return
    else:
        rig.disconnect(busy)
        assert busy.presence.kept_for is None
        rig.subscribe()
        (got,) = handed_out(rig)
        assert got.id == task_id
        rig.release(got)
        rig.commit()
        (again,) = handed_out(rig)
        assert (again.id, again.deaths, again.failures) == (task_id, 1, 0)
        rig.ack(again)
    rig.commit()
    recount(rig)
    handed_out(rig)
    assert not rig.core.kept_connections
    rig.enqueue()
    assert len(handed_out(rig)) == 1, "others come again"


# --- order keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["dead", "hold", "retry"])
def test_an_order_key_with_a_poison_task_follows_its_policy(failure: str) -> None:
    rig, task_id = deadly(key="k")
    rig.configure("t", "default", order_failure=failure)
    behind = rig.put("k")
    for _ in range(5):
        if rig.state(task_id) == "dead" or rig.group().held:
            break
        consumer = rig.subscribe()
        (got,) = after(rig, 60_000)
        assert got.id == task_id, "its key waits for it"
        kill(rig, consumer)
        rig.commit()
    rig.subscribe()
    if failure == "hold":
        (held,) = rig.engine.key_control.held_keys(rig.group())
        assert held.task_id == task_id
        assert rig.rows.progress[task_id, "default"].deaths == 3
        known = rig.find(task_id)
        assert known is not None
        rig.engine.key_control.release(rig.group(), known, rig.now_ms)
        rig.commit()
        (got,) = handed_out(rig)
        assert (got.id, got.attempt, got.deaths) == (task_id, 4, 0)
    elif failure == "dead":
        assert rig.rows.dead[task_id, "default"].deaths == 3
        (got,) = handed_out(rig)
        assert got.id == behind
    else:
        assert rig.rows.progress[task_id, "default"].deaths == 6
        (got,) = after(rig, 60_000)
        assert got.id == task_id


@pytest.mark.parametrize("config", [LAST, replace(LAST, resident_bytes_max=0)])
def test_several_suspects_use_separate_connections(config: EngineConfig) -> None:
    """Also where their rows have to be read; innocent ones go elsewhere, or between them."""
    rig = OrderRig(config)
    rig.create_group("t", "default")
    deadly_ids = {rig.put(None) for _ in range(4)}
    consumer = rig.subscribe()
    assert {got.id for got in handed_out(rig)} == deadly_ids
    kill(rig, consumer)
    rig.commit()
    rig.after(1_000).fire()
    consumers = [rig.subscribe(), rig.subscribe()]
    first = handed_out(rig)
    assert len(first) == 2
    assert {got.subscriber for got in first} == set(consumers)
    innocent = rig.put(None)
    assert handed_out(rig) == []
    seen = [got.id for got in first]
    had = first
    while had:
        for got in had:
            assert rig.ack(got) == "acked"
        rig.commit()
        had = handed_out(rig)
        alone = Counter(got.subscriber for got in had if got.deaths)
        assert all(count == 1 for count in alone.values())
        assert all(got.deaths or not alone[got.subscriber] for got in had)
        seen += [got.id for got in had]
    assert sorted(seen) == sorted({*deadly_ids, innocent})


def test_a_suspect_being_read_reserves_one_connection() -> None:
    """With several that were free a dispatch had no end: each look let the last one in again."""
    rig = OrderRig(replace(LAST, resident_bytes_max=0))
    rig.create_group("t", "default")
    lone = rig.put(None)
    consumer = rig.subscribe()
    assert len(handed_out(rig)) == 1
    kill(rig, consumer)
    consumers = [rig.subscribe(prefetch=2) for _ in range(3)]
    others = {rig.put(None) for _ in range(3)}
    busy = handed_out(rig)
    assert {got.subscriber for got in busy} == set(consumers)
    assert after(rig, 1_000) == [], "none is free"
    others |= {rig.put(None) for _ in range(20)}
    rig.fire()
    for got in busy:
        rig.ack(got)
        others.discard(got.id)
    rig.commit()
    rig.core.drop(lone)  # for want of room, while it waited to be alone
    kept = []
    for _ in range(4):
        dispatches, more = rig.engine.delivery.dispatch(*rig.now, 1_000)
        assert not (dispatches or more), "nothing can be done before the rows are read"
        kept.append([item for item in consumers if item.presence.kept_for is rig.group()])
        rig.core.wake(rig.group())
    assert len(kept[0]) == 1 and kept == kept[:1] * 4
    rig.load()
    had = handed_out(rig)
    assert lone in {got.id for got in had}
    while had:
        others -= {got.id for got in had if rig.ack(got) == "acked"}
        rig.commit()
        had = handed_out(rig)
    assert not others
