"""Pause and rate limits of topics and groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, LEASE_MS, Rig

# --- pause -------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "default"])
def test_a_pause_stops_deliveries_but_accepts_acks(rig: Rig, group: str | None) -> None:
    rig.subscribe()
    first = rig.enqueue()
    (before,) = rig.tick()
    rig.configure("t", group, paused=True)
    second, third = rig.enqueue(), rig.enqueue(delay_ms=500)
    assert rig.tick() == []
    assert rig.after(500).tick() == []
    assert [rig.state(i) for i in (first, second, third)] == ["in_flight", "ready", "ready"]
    assert rig.ack(before) == "acked"
    rig.configure("t", group, paused=False)
    assert [got.id for got in rig.tick()] == [second, third]


def test_retries_become_ready_during_a_pause(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    rig.nack(rig.one(), 100)
    rig.configure("t", "default", paused=True)
    assert rig.after(100).tick() == []
    assert rig.group().ready_count == 1
    rig.configure("t", "default", paused=False)
    assert rig.one().attempt == 2


def test_leases_expire_during_a_pause(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue()
    rig.one()
    rig.configure("t", paused=True)
    assert rig.after(LEASE_MS).tick() == []
    assert rig.state(task_id) == "ready"


def test_a_paused_group_does_not_stop_the_others(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.configure("t", "a", paused=True)
    rig.enqueue()
    assert [got.group.name for got in rig.tick()] == ["b"]
    rig.configure("t", paused=True)
    rig.enqueue()
    assert rig.tick() == []
    rig.configure("t", "a", paused=False)
    assert rig.tick() == [], "the topic is paused"
    rig.configure("t", paused=False)
    assert sorted(got.group.name for got in rig.tick()) == ["a", "a", "b"]


def test_pause_and_resume_survive_a_crash(rig: Rig) -> None:
    rig.subscribe()
    rig.configure("t", paused=True)
    rig.enqueue()
    rig.crash()
    rig.subscribe()
    assert rig.tick() == []
    rig.configure("t", paused=False)
    rig.commit()
    assert rig.rows.groups.keys() == {("t", "default")}
    rig.crash()
    rig.subscribe()
    rig.one()


def test_a_topic_can_be_paused_before_anybody_uses_it(rig: Rig) -> None:
    rig.configure("later", paused=True)
    rig.commit()
    rig.crash()
    rig.subscribe("later")
    rig.enqueue("later")
    assert rig.tick() == []


# --- rates -------------------------------------------------------------------------------------


def test_a_rate_allows_a_burst_then_single_deliveries(rig: Rig) -> None:
    rig.subscribe()
    rig.configure("t", "default", rate=10.0, burst=3)
    rig.store(count=10)
    assert len(rig.tick()) == 3
    assert rig.engine.wake_in_ms(*rig.now) == 100, "exactly when the next token is there"
    assert rig.after(99).tick() == []
    assert len(rig.after(1).tick()) == 1
    assert len(rig.after(10_000).tick()) == 3


@pytest.mark.parametrize(("burst", "at_once"), [(8, 2), (1, 1), (None, 5)])
def test_a_rate_is_divided_by_the_shards(burst: int | None, at_once: int) -> None:
    rig = Rig(replace(CONFIG, shards=4))
    rig.subscribe()
    rig.configure("t", "default", rate=20.0, burst=burst)
    rig.store(count=20)
    assert len(rig.tick()) == at_once
    assert rig.after(199).tick() == []
    assert len(rig.after(1).tick()) == 1


def test_a_topics_rate_is_shared_by_its_groups(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.configure("t", rate=10.0, burst=1)
    rig.store(count=10)
    names = []
    for _ in range(10):
        names += [got.group.name for got in rig.tick()]
        rig.pass_time(100)
    assert len(names) == 10
    assert names.count("a") == names.count("b") == 5


def test_topic_and_group_rates_apply_together(rig: Rig) -> None:
    rig.subscribe_all("ab")
    rig.configure("t", rate=4.0, burst=1)
    rig.configure("t", "a", rate=1.0, burst=1)
    rig.store(count=50)
    names = []
    for _ in range(1_000):
        names += [got.group.name for got in rig.tick()]
        rig.pass_time(10)
    assert 5 <= names.count("a") <= 10
    assert 38 <= len(names) <= 41


def test_undeliverable_tasks_use_no_rate(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=0)
    rig.configure("t", "default", rate=1.0, burst=1)
    gone = rig.enqueue(ttl_ms=10)
    left = rig.enqueue()
    cancelled = rig.enqueue()
    rig.fire()
    assert rig.cancel(cancelled) == "cancelled"
    rig.pass_time(11)
    subscriber.prefetch = 100
    rig.core.reconsider(subscriber)
    assert rig.one().id == left
    assert rig.state(gone) == "expired"


def test_removing_a_rate_delivers_at_once(rig: Rig) -> None:
    rig.subscribe()
    rig.configure("t", rate=1.0)
    rig.store(count=5)
    assert len(rig.tick()) == 1
    rig.configure("t", rate=None)
    assert len(rig.tick()) == 4


def test_changing_a_rate_gives_no_second_burst(rig: Rig) -> None:
    rig.subscribe(prefetch=1_000)
    rig.configure("t", rate=100.0)
    rig.store(count=500)
    assert len(rig.tick()) == 100
    rig.configure("t", rate=50.0)
    assert rig.tick() == []
    assert len(rig.after(20).tick()) == 1


def test_rates_outlast_a_crash(rig: Rig) -> None:
    rig.configure("t", rate=2.0, burst=1)
    rig.subscribe()
    rig.store(count=9)
    rig.crash()
    rig.subscribe()
    assert len(rig.tick()) == 1
    assert rig.engine.delivery.next_token_mono_ms() == 500


def test_a_rate_with_rows_that_are_not_in_memory() -> None:
    rig = Rig(replace(CONFIG, resident_bytes_max=1))
    rig.subscribe()
    rig.configure("t", rate=10.0, burst=1)
    rig.store(count=3)
    for left in (2, 1, 0):
        rig.one()
        assert rig.group().ready_count == left
        rig.pass_time(100)
    recount(rig)
