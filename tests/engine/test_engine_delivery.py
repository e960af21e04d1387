"""From due to delivered: never early, by priority, within credit, in turn, not after its ttl."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, Rig
from tickwheel.engine.topics import DELIVERY_BYTES
from tickwheel.model.records import TaskOptions


def ids(rig: Rig) -> list[int]:
    return [got.id for got in rig.tick()]


def test_a_task_is_delivered_in_its_millisecond_and_not_before(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue(delay_ms=12_345)
    assert rig.after(12_344).tick() == []
    rig.pass_time(1)
    assert ids(rig) == [task_id]


def test_tasks_of_all_kinds_due_together_are_delivered(rig: Rig) -> None:
    """One topic after the other, with one group and with two, with ttl, priority, order keys, a
    retry and a row that is not in memory between them: each comes as it would alone."""
    for topic in ("t", "u"):
        rig.subscribe(topic, prefetch=100)
    rig.subscribe("u", "other", prefetch=100)
    again = rig.enqueue(delay_ms=0)
    assert rig.nack(rig.one(), 50) == "retrying"
    rig.commit()
    new = [
        (topic, rig.now_ms + 50, b"b", options)
        for topic in ("t", "t", "u", "t", "u")
        for options in (
            None,
            TaskOptions(priority=3),
            TaskOptions(ttl_ms=1),
            TaskOptions(order_key="a"),
            TaskOptions(key="k"),
        )
    ]
    rig.engine.intake.enqueue(None, None, 0, new, len(new), rig.now_ms)
    rig.commit()
    known = sorted(rig.core.resident_rows)
    rig.core.drop(known[0])
    rig.after(50).fire()
    recount(rig)
    rig.load()
    assert rig.core.scheduled == 0
    seen: list[tuple[str, str, int]] = []
    while got := rig.tick():
        seen += [(item.group.topic.name, item.group.name, item.id) for item in got]
        for item in got:
            assert rig.ack(item) == "acked"
        rig.commit()
        recount(rig)
    of_u = [("u", group, known[i]) for group in ("default", "other") for i in range(25)
            if new[i][0] == "u"]  # fmt: skip
    of_t = [("t", "default", known[i]) for i in range(25) if new[i][0] == "t"]
    assert sorted(seen) == sorted([*of_u, *of_t, ("t", "default", again)])


@pytest.mark.parametrize("back_ms", [1, 600])
def test_a_fired_task_is_not_early_after_a_clock_set_back(rig: Rig, back_ms: int) -> None:
    task_id = rig.enqueue(delay_ms=1_000)
    rig.after(1_000).subscribe(prefetch=0)
    rig.fire()
    rig.now_ms -= back_ms
    rig.subscribe()
    assert rig.dispatch() == []
    assert rig.state(task_id) == "waiting"
    recount(rig)
    assert rig.after(back_ms - 1).tick() == []
    assert rig.after(1).one().attempt == 1


def test_a_task_that_waits_for_the_clock_can_be_cancelled_and_rescheduled() -> None:
    for command in (Rig.cancel, lambda rig, task_id: rig.reschedule(task_id, 50)):
        rig = Rig()
        rig.subscribe()
        task_id = rig.enqueue(delay_ms=1_000)
        rig.after(1_000).fire()
        rig.now_ms -= 600
        rig.dispatch()
        assert command(rig, task_id) in ("cancelled", "scheduled")
        recount(rig)
        rig.pass_time(50)
        assert [got.id for got in rig.tick()] == list(rig.known([task_id]))


def test_a_clock_jump_delivers_the_tasks_due(rig: Rig) -> None:
    rig.subscribe()
    due = rig.enqueue(delay_ms=3_600_000)
    rig.enqueue(delay_ms=3_600_001)
    rig.now_ms += 3_600_000
    assert ids(rig) == [due]


def test_higher_priorities_come_first_and_equals_in_order(rig: Rig) -> None:
    plain = [rig.enqueue() for _ in range(2)]
    high = [rig.enqueue(priority=9) for _ in range(2)]
    low = [rig.enqueue(priority=1)]
    rig.subscribe()
    assert ids(rig) == [*high, *low, *plain]


def test_credit_returns_with_the_commit_of_the_ack(rig: Rig) -> None:
    rig.subscribe(prefetch=2)
    for _ in range(3):
        rig.enqueue()
    first, _ = rig.tick()
    rig.ack(first)
    assert rig.tick() == []
    rig.commit()
    assert len(rig.tick()) == 1


def test_some_credit_returns_before_the_acks_commit() -> None:
    rig = Rig(replace(CONFIG, acks_ahead_max=2))
    subscriber = rig.subscribe(prefetch=2)
    for _ in range(6):
        rig.enqueue()
    for got in rig.tick():
        rig.ack(got)
    third, fourth = rig.tick()
    assert subscriber.credit == 0
    rig.ack(third)
    assert rig.tick() == [], "two acks wait for the store; the third takes credit"
    rig.seal()
    rig.ack(fourth)
    assert rig.tick() == []
    rig.refuse()
    assert rig.tick() == [], "a batch that was refused has confirmed nothing"
    rig.commit()
    assert subscriber.credit == 2
    assert len(rig.tick()) == 2
    recount(rig)


def test_a_blocked_subscriber_gets_no_tasks(rig: Rig) -> None:
    subscriber = rig.subscribe()
    subscriber.blocked = True
    rig.enqueue()
    assert rig.tick() == []
    subscriber.blocked = False
    rig.core.reconsider(subscriber)
    assert len(rig.tick()) == 1


def test_a_lowered_prefetch_applies_to_later_deliveries(rig: Rig) -> None:
    subscriber = rig.subscribe(prefetch=3)
    for _ in range(4):
        rig.enqueue()
    got = rig.tick()
    subscriber.prefetch = 1
    rig.ack(got[0])
    rig.ack(got[1])
    rig.commit()
    assert rig.tick() == []
    rig.ack(got[2])
    rig.commit()
    assert len(rig.tick()) == 1


def test_subscribers_of_a_group_share_its_tasks_in_turn(rig: Rig) -> None:
    both = [rig.subscribe(prefetch=100) for _ in range(2)]
    rig.store(count=10)
    got = rig.tick()
    assert [sum(item.subscriber is s for item in got) for s in both] == [5, 5]
    firsts = []
    for _ in range(4):
        rig.enqueue()
        firsts.append(both.index(rig.one().subscriber))
    assert firsts in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_busy_group_does_not_delay_another() -> None:
    config = replace(CONFIG, delivery_frame_tasks_max=4)
    rig = Rig(config)
    rig.subscribe("busy")
    rig.subscribe("quiet")
    rig.stage("busy", count=50)
    (quiet,) = rig.store("quiet")
    rig.fire()
    dispatches, more = rig.engine.delivery.dispatch(*rig.now, 8)
    assert more
    assert quiet in [row.id for dispatch in dispatches for row, _, _ in dispatch.items]


def test_frames_are_split_by_bytes_in_order() -> None:
    rig = Rig(replace(CONFIG, delivery_frame_bytes_max=2 * (60 + DELIVERY_BYTES)))
    rig.subscribe()
    sent = rig.store(count=5, body=b"x" * 60)
    rig.fire()
    frames = []
    more = True
    while more:
        dispatches, more = rig.engine.delivery.dispatch(*rig.now, 1)
        frames += [[row.id for row, _, _ in dispatch.items] for dispatch in dispatches]
    assert [len(frame) for frame in frames] == [2, 2, 1]
    assert [i for frame in frames for i in frame] == sent
    recount(rig)


def test_a_pull_leaves_after_its_first_delivery(rig: Rig) -> None:
    rig.subscribe(prefetch=3, once=True)
    rig.store(count=5)
    assert len(rig.tick()) == 3
    assert rig.tick() == []
    assert not rig.group().subscribers


def test_deliveries_can_be_acked_after_unsubscribe(rig: Rig) -> None:
    subscriber = rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.engine.subscriptions.unsubscribe(subscriber)
    rig.engine.subscriptions.unsubscribe(subscriber)
    rig.enqueue()
    assert rig.tick() == []
    assert rig.ack(got) == "acked"


def test_a_ttl_ends_a_task_that_nobody_took_in_time(rig: Rig) -> None:
    late, taken = rig.enqueue(ttl_ms=100), rig.enqueue(ttl_ms=101)
    rig.after(101).subscribe()
    assert ids(rig) == [taken]
    assert rig.state(late) == "expired"
    rig.commit()
    assert late not in rig.rows.tasks
    assert rig.core.totals.expired == 1


def test_a_ttl_ending_between_attempts_expires_the_task(rig: Rig) -> None:
    rig.subscribe()
    task_id = rig.enqueue(ttl_ms=100)
    rig.nack(rig.one(), 200)
    assert rig.after(200).tick() == []
    assert rig.state(task_id) == "expired"
    rig.commit()
    assert rig.rows.is_empty()


def test_rows_over_the_memory_budget_are_read_again() -> None:
    rig = Rig(replace(CONFIG, resident_bytes_max=500, loading_max=3))
    sent = rig.store(count=20)
    assert rig.core.resident_bytes <= 1_000
    rig.subscribe()
    assert sorted(ids(rig)) == sent
    recount(rig)


def test_a_far_task_is_read_before_its_due_time() -> None:
    rig = Rig(replace(CONFIG, resident_horizon_ms=0))
    task_id = rig.enqueue(delay_ms=250)
    assert task_id not in rig.core.resident_rows
    rig.after(200).fire()
    assert task_id in rig.core.resident_rows
    recount(rig)
