"""Rows that are read for delivery: no more than can be delivered, or than there is room for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, Got, Rig
from tickwheel.engine.delivery import READ_AHEAD_TASKS
from tickwheel.engine.state import ROW_OVERHEAD_BYTES
from tickwheel.engine.topics import Group, Subscriber

SIZE = 1_000
ROW = SIZE + ROW_OVERHEAD_BYTES


def rig_with(ready: int, room: int, **options: int) -> Rig:
    """A backlog of which no row is in memory, and room for some."""
    rig = Rig(replace(CONFIG, resident_bytes_max=room * ROW))
    rig.create_group("t", "default")
    for _ in range(ready):
        rig.stage(body=bytes(SIZE), **options)
    rig.commit()
    rig.fire()
    for task_id in list(rig.core.resident_rows):
        rig.core.drop(task_id)
    return rig


def block(rig: Rig, subscribers: list[Subscriber], rnd: random.Random) -> None:
    """Some connections are behind, others are not any more."""
    for subscriber in subscribers:
        subscriber.blocked = rnd.random() < 0.3
        if not subscriber.blocked:
            rig.core.reconsider(subscriber)


@pytest.mark.parametrize("prefetch", [1, 7, 300])
def test_loading_tasks_are_limited_by_credit(prefetch: int) -> None:
    """However often there is a tick before the first row has come."""
    rig = rig_with(ready=1_000, room=0)
    rig.subscribe(prefetch=prefetch)
    for _ in range(20):
        rig.engine.delivery.dispatch(*rig.now, 4_096)
        assert len(rig.group().loading) == prefetch
    assert sum(map(len, rig.core.ready_rows_to_read.values())) == prefetch
    assert len(rig.dispatch()) == prefetch
    recount(rig)


def test_loading_tasks_count_for_all_subscribers() -> None:
    rig = rig_with(ready=100, room=0)
    for prefetch in (3, 5):
        rig.subscribe(prefetch=prefetch)
    for _ in range(5):
        rig.engine.delivery.dispatch(*rig.now, 4_096)
    assert len(rig.group().loading) == 8
    assert len(rig.dispatch()) == 8


def test_loading_tasks_are_limited_by_the_rate() -> None:
    rig = rig_with(ready=100, room=0)
    rig.configure(group="default", rate=1.0, burst=4)
    rig.subscribe(prefetch=50)
    for _ in range(5):
        rig.engine.delivery.dispatch(*rig.now, 4_096)
    assert len(rig.group().loading) == 4
    assert len(rig.dispatch()) == 4


def test_a_row_that_is_missing_does_not_stop_the_others() -> None:
    rig = rig_with(ready=10, room=0)
    rig.subscribe(prefetch=1)
    rig.engine.delivery.dispatch(*rig.now, 4_096)
    (missing,) = rig.group().loading
    rig.core.ready_rows_to_read.clear()
    rig.core.missing[missing] = None
    rig.engine.delivery.reading.process_rows(rig.group(), [missing], {})
    got = rig.dispatch()
    assert len(got) == 1 and got[0].id != missing
    assert rig.group().ready_count == 9, "it is counted still"


def test_the_backlog_is_read_ahead_if_memory_allows() -> None:
    """So that a subscriber with little credit does not wait for the store at each task."""
    rig = rig_with(ready=3 * READ_AHEAD_TASKS, room=2 * READ_AHEAD_TASKS)
    rig.subscribe(prefetch=1)
    order: list[int] = []
    reads = 0
    for _ in range(READ_AHEAD_TASKS // 10):
        reads += not rig.core.resident_rows
        (got,) = rig.dispatch()
        order.append(got.id)
        rig.ack(got)
        rig.commit()
        assert len(rig.group().loading) <= READ_AHEAD_TASKS
    assert reads == 1
    assert order == sorted(order)


def test_loaded_rows_stay_within_the_budget_and_the_last_load() -> None:
    """Random consumers, some of which stop taking while rows are read for them."""
    rnd = random.Random()
    seed = rnd.randrange(2**32)
    rnd.seed(seed)
    for room in (0, 3, 40):
        rig = rig_with(ready=400, room=room)
        subscribers = [rig.subscribe(prefetch=rnd.choice((1, 5, 50))) for _ in range(3)]
        seen: list[Got] = []
        load = 0
        for _ in range(600):
            block(rig, subscribers, rnd)
            dispatches, _ = rig.engine.delivery.dispatch(*rig.now, 4_096)
            seen += rig.take(dispatches)
            block(rig, subscribers, rnd)
            load = max([load, *(len(ids) for ids in rig.core.ready_rows_to_read.values())])
            rig.load()
            assert rig.core.resident_bytes <= (room + 1 + load) * ROW, f"seed {seed}"
            for got in [g for g in seen if rig.lease(g)]:
                if rnd.random() < 0.5:
                    rig.ack(got)
            rig.commit()
        recount(rig)
        assert len({got.id for got in seen}) == 400, f"seed {seed}: all have come"


def test_a_returned_task_keeps_its_priority() -> None:
    """Also when its row is not in memory: it must not fall behind, nor get ahead of others."""
    rig = rig_with(ready=30, room=0, priority=5)
    for _ in range(10):
        rig.stage(body=bytes(SIZE), priority=9)
    rig.commit()
    rig.fire()
    rig.subscribe(prefetch=4)
    for task_id in list(rig.core.resident_rows):
        rig.core.drop(task_id)
    for _ in range(3):
        rig.engine.delivery.dispatch(*rig.now, 4_096)
    group = rig.group()
    assert set(group.loading.values()) <= {5, 9}
    rig.engine.delivery.reading.return_unread(group, list(group.loading))
    levels = {len(level) for level in group.ready.levels().values()}
    assert levels == {10, 30, 0}, "nothing plain"


def test_a_row_owed_to_others_is_not_kept_without_room() -> None:
    rig = rig_with(ready=0, room=0)
    rig.create_group("t", "slow")
    for _ in range(50):
        rig.stage(body=bytes(SIZE))
    rig.commit()
    rig.fire()
    rig.subscribe(prefetch=50)
    assert len(rig.dispatch()) == 50
    assert rig.core.resident_bytes <= ROW


def test_repeated_looks_at_a_group_do_not_hold_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_with(ready=3, room=3)
    rig.subscribe()
    looks = 0

    def looked_at(group: Group, *_: object) -> int:
        nonlocal looks
        looks += 1
        rig.core.wake(group)
        return 0

    monkeypatch.setattr(rig.engine.delivery, "_dispatch_group", looked_at)
    assert rig.engine.delivery.dispatch(*rig.now, 100) == ([], True)
    assert looks == 100
