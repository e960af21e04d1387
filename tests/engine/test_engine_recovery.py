"""What a restart brings back: from rows to the same promises."""

from __future__ import annotations

import pytest

from support.engine_recount import recount
from support.engine_rig import GRACE_MS, LEASE_MS, NOW_MS, Got, Rig
from tickwheel.engine import state
from tickwheel.engine.state import IdSource, Outcomes
from tickwheel.model.records import Outcome

LATE_MS = 21
"""Leases may end that much late."""


def checkpointed(rig: Rig) -> Got:
    rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.after(100).commit()
    return got


def test_scheduled_tasks_are_delivered_when_due_after_a_restart(rig: Rig) -> None:
    task_id = rig.enqueue(delay_ms=5_000)
    rig.crash(down_ms=1_000)
    rig.subscribe()
    assert rig.after(3_999).tick() == []
    assert rig.after(1).one().id == task_id


def test_tasks_due_during_a_restart_are_delivered_in_order(rig: Rig) -> None:
    second, first = rig.enqueue(delay_ms=2_000), rig.enqueue(delay_ms=1_000)
    rig.crash(down_ms=3_000)
    rig.subscribe()
    assert [got.id for got in rig.tick()] == [first, second]


def test_a_lease_lasts_for_the_grace_after_a_crash(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.crash()
    rig.subscribe()
    assert rig.state(got.id) == "in_flight"
    assert rig.engine.recovery.leases_kept == 1
    assert rig.after(GRACE_MS - 1).tick() == []
    assert rig.lease(got) is not None
    again = rig.after(1 + LATE_MS).one()
    assert (again.attempt, again.epoch) == (2, 2)


def test_a_clock_set_back_does_not_prolong_leases() -> None:
    for hours in (1, 1_000):
        rig = Rig()
        rig.subscribe()
        rig.enqueue()
        got = rig.one()
        rig.stop_and_start(back_ms=hours * 3_600_000)
        rig.subscribe()
        assert rig.lease(got) is not None
        assert rig.after(LEASE_MS + LATE_MS).tick() == [], "it is not due by this clock"
        assert rig.lease(got) is None
        recount(rig)


@pytest.mark.parametrize("step_ms", [-18_000_000, 18_000_000])
@pytest.mark.parametrize("end", ["stop", "crash"])
def test_a_clock_set_while_the_daemon_runs_ends_no_lease(step_ms: int, end: str) -> None:
    rig = Rig()
    before = checkpointed(rig)
    rig.now_ms += step_ms
    rig.enqueue()
    after = rig.one()
    rig.after(100).commit()
    rig.after(10_000)
    ends_mono_ms = [rig.held(got).deadline_mono_ms for got in (before, after)]
    if end == "stop":
        rig.stop_and_start(down_ms=1_000)
    else:
        rig.crash()
        ends_mono_ms = [rig.mono_ms + GRACE_MS] * 2
    rig.subscribe()
    assert rig.tick() == []
    kept_ms = 1_000 if end == "stop" and step_ms < 0 else 0  # the stop was after this start
    for got, end_mono_ms in zip((before, after), ends_mono_ms, strict=True):
        assert rig.held(got).deadline_mono_ms == end_mono_ms + kept_ms
    recount(rig)


@pytest.mark.parametrize("ends", [("stop", "stop"), ("crash", "stop"), ("stop", "crash", "stop")])
def test_no_later_start_prolongs_a_lease(ends: tuple[str, ...]) -> None:
    """The clock went back before the first start, and was right at the others: an end of a lease
    that the earlier clock has shown must not outlive that start."""
    rig = Rig()
    got = checkpointed(rig)
    back_ms = 7_200_000
    for end in ends:
        if end == "crash":
            rig.now_ms -= back_ms
            rig.crash(down_ms=1)
        else:
            rig.stop_and_start(back_ms=back_ms)
        rig.enqueue(delay_ms=86_400_000)
        rig.commit()  # with a position of the wheel by the clock that was set back
        back_ms = 0
    rig.subscribe()
    assert rig.lease(got) is not None
    rig.after(LEASE_MS + LATE_MS).tick()
    assert rig.lease(got) is None
    recount(rig)


def test_the_grace_after_a_crash_outlives_a_clean_stop(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.crash()
    rig.stop_and_start()
    rig.subscribe()
    assert rig.lease(got) is not None
    assert rig.after(GRACE_MS + LATE_MS).one().attempt == 2


def test_after_a_clean_stop_a_lease_lasts_as_long_as_it_had_left(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    got = rig.one()
    rig.stop_and_start(down_ms=1_000)
    rig.subscribe()
    assert rig.after(LEASE_MS - 1_001).tick() == []
    assert rig.lease(got) is not None
    assert rig.after(1 + LATE_MS).one().attempt == 2


def test_a_lease_that_ended_during_the_restart_is_over(rig: Rig) -> None:
    checkpointed(rig)
    rig.crash(down_ms=LEASE_MS)
    rig.subscribe()
    assert rig.one().attempt == 2


def test_an_old_lease_can_be_nacked_extended_and_released(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.crash()
    rig.extend(got, LEASE_MS)
    rig.release(got)
    rig.subscribe()
    again = rig.one()
    assert (again.attempt, again.epoch) == (2, 2)
    rig.nack(again, 100)
    rig.commit()


def test_an_uncommitted_delivery_is_repeated_after_a_crash(rig: Rig) -> None:
    rig.subscribe()
    rig.enqueue()
    first = rig.one()
    rig.crash()
    rig.subscribe()
    assert rig.one()._replace(subscriber=first.subscriber) == first._replace(epoch=2)


def test_a_retry_keeps_time_and_reason_over_a_restart(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.nack(got, 10_000, "why")
    rig.commit()
    rig.crash(down_ms=4_000)
    rig.subscribe()
    assert rig.after(5_999).tick() == []
    again = rig.after(1).one()
    assert again.attempt == 2
    assert [f.reason for f in rig.held(again).past.failures] == ["why"]


def test_a_batch_that_was_applied_before_the_crash_counts(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.ack(got)
    rig.seal()
    rig.apply()
    rig.crash()
    rig.subscribe()
    assert rig.tick() == []
    assert rig.ack(got) == "done"


def test_an_uncommitted_ack_can_be_repeated_after_a_crash(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.ack(got)
    rig.seal()
    rig.crash()
    rig.subscribe()
    assert rig.ack(got) == "acked"
    rig.commit()
    assert rig.rows.is_empty()


def test_a_clock_set_back_during_a_restart_loses_no_retry(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.nack(got, 200)
    rig.commit()
    rig.now_ms -= 60_000
    rig.crash()
    rig.subscribe()
    recount(rig)
    assert rig.state(got.id) == "waiting"
    assert rig.after(60_199).tick() == []
    assert rig.after(1).one().attempt == 2


def test_a_task_can_be_cancelled_after_a_restart_with_an_older_clock(rig: Rig) -> None:
    got = checkpointed(rig)
    rig.after(LEASE_MS).expire()
    rig.commit()
    rig.now_ms -= 3_600_000
    rig.crash()
    assert rig.state(got.id) == "ready"
    recount(rig)
    assert rig.cancel(got.id) == "cancelled"
    recount(rig)
    assert rig.core.scheduled == 0


def test_an_uncommitted_group_is_created_again(rig: Rig) -> None:
    task_id = rig.enqueue()
    rig.subscribe(group="first")
    rig.crash()
    assert not rig.core.topics["t"].groups
    rig.fire()
    rig.after(1_000).subscribe(group="first")
    assert rig.one().id == task_id


def test_ended_tasks_are_known_after_a_restart(rig: Rig) -> None:
    task_id = rig.enqueue(delay_ms=1_000)
    rig.cancel(task_id)
    rig.commit()
    rig.crash()
    assert rig.state(task_id) == "cancelled"
    assert rig.cancel(task_id) == "already_cancelled"


def test_outcomes_are_limited_to_the_newest() -> None:
    outcomes = Outcomes(bound=100)
    for task_id in range(1_000):
        outcomes.add(task_id, Outcome.ACKED)
        assert len(outcomes) <= 100
    assert all(outcomes.get(task_id) is Outcome.ACKED for task_id in range(951, 1_000))
    assert outcomes.get(0) is None
    tiny = Outcomes(bound=1)
    tiny.add(1, Outcome.ACKED)
    tiny.add(2, Outcome.EXPIRED)
    assert tiny.get(2) is Outcome.EXPIRED


def test_ids_start_above_the_mark_of_any_shard() -> None:
    for mark in (0, 5 << 10, (5 << 10) + 7, (5 << 10) + 900):
        source = IdSource(7, mark)
        task_id = source.take(1, now_ms=0)
        assert task_id > mark
        assert task_id % 1024 == 7
    assert IdSource(7, 0).take(1, NOW_MS) < IdSource(8, 0).take(1, NOW_MS)


def test_ids_ahead_of_the_clock_have_the_time_of_their_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "NOTES_MAX", 4)
    source = IdSource(7, 0)
    right = source.take(1, NOW_MS)
    source.note_time(NOW_MS)
    ahead = source.take(1, NOW_MS + 90_000)
    source.note_time(NOW_MS + 1)
    later = source.take(1, NOW_MS + 2)
    assert [source.assigned_ms(i, NOW_MS + 3) - NOW_MS for i in (right, ahead, later)] == [0, 1, 3]
    for after_ms in (500, 1_001, 9_000):
        source.note_time(NOW_MS + after_ms)
    now_ms = NOW_MS + 9_500
    assert [source.assigned_ms(i, now_ms) - NOW_MS for i in (right, ahead, later)] == [0, 1, 1_001]
    source.note_time(NOW_MS - 50)  # set back again
    assert [source.assigned_ms(i, now_ms) - NOW_MS for i in (ahead, later)] == [-50, -50]
    source.note_time(NOW_MS + 95_000)  # the clock has caught up
    for after_ms in range(5):
        source.take(1, NOW_MS)
        source.note_time(NOW_MS + 1_000 * after_ms)
    assert source.assigned_ms(right, now_ms) == NOW_MS
    assert source.assigned_ms(source.last, now_ms) == NOW_MS + 4_000
    assert source.assigned_ms(ahead, now_ms) == NOW_MS + 2_000
