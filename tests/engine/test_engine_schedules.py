"""Schedules: each occurrence is one task, over restarts, refusals and jumps of the clock; what is
missed, and what overlaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from engine.schedule_rig import DAY_MS, ScheduleRig
from support.engine_recount import recounted
from support.engine_rig import CONFIG, NOW_MS
from tickwheel.engine.schedules import (
    COUNTED_MAX,
    CURRENT_MS_MAX,
    FIRE_BYTES_MAX,
    FIRE_STEPS_MAX,
    FIRED_MAX,
    TASK_STEPS,
    jitter_of,
)
from tickwheel.model.kinds import RECENT_MAX, SCHEDULE, Schedule
from tickwheel.model.records import TaskOptions

rig = recounted(ScheduleRig)


def after(*seconds: int) -> list[int]:
    return [NOW_MS + second * 1_000 for second in seconds]


def test_an_occurrence_becomes_a_task_naming_its_schedule(rig: ScheduleRig) -> None:
    options = TaskOptions("k", "tag", {"mine": 1}, 7, 5_000)
    assert rig.put(topic="t", body=b"hi", options=options) == "created"
    rig.settle()
    rig.after(9_999).settle()
    assert rig.tasks_of() == []
    rig.after(1).settle()
    (row,) = rig.tasks_of()
    assert (row.topic, row.body, row.due_ms) == ("t", b"hi", NOW_MS + 10_000)
    assert row.options is not None and row.options.properties == {
        "mine": 1, "tickwheel.schedule": "s", "tickwheel.planned_ms": NOW_MS + 10_000,
    }  # fmt: skip
    assert row.options._replace(properties=options.properties) == options
    assert rig.outcomes() == [("fired", 1)]
    rig.subscribe("t")
    assert rig.one().id == row.id


def test_a_run_and_its_schedules_advance_are_one_batch(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).plan()
    batch = rig.seal()
    assert batch is not None
    (row,) = batch.effects.of_kind(SCHEDULE).values()
    assert row is not None
    assert list(batch.effects.enqueued) == [row.last_id]
    assert row.next_ms == NOW_MS + 20_000


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_crash_neither_loses_nor_doubles_an_occurrence(
    rig: ScheduleRig, is_applied: bool
) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).plan()
    assert rig.seal() is not None
    if is_applied:
        rig.apply()
    rig.crash()
    rig.settle()
    assert rig.times_of() == after(10)
    rig.after(10_000).settle()
    assert rig.times_of() == after(10, 20)


def test_a_run_in_a_refused_batch_is_repeated(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).plan()
    assert rig.planned().staged
    rig.seal()
    rig.refuse()
    assert not rig.planned().staged
    rig.commit()
    assert rig.rows.schedules["s"].next_ms == NOW_MS + 10_000
    assert rig.tasks_of() == []
    rig.after(5_000).settle()
    assert rig.times_of() == after(10)
    assert rig.core.totals.schedules_fired == 1


def remembered(rig: ScheduleRig) -> tuple[object, ...]:
    """All that is remembered of a schedule, and all that has been counted."""
    planned, totals, schedule_heap = rig.planned(), rig.core.totals, rig.core.schedule_heap
    counts = (totals.schedules_fired, totals.schedules_missed, totals.schedules_overlapped)
    due_ms = schedule_heap._due._times_ms.get(planned.name)
    return (
        planned.row, planned.unfinished, planned.staged, planned.cancelling, due_ms,
        schedule_heap.watched_ids(), list(schedule_heap.late_ms), counts, rig.core.tasks,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", ["allow", "skip", "queue_one", "cancel_previous"])
@pytest.mark.parametrize("is_unfinished", [True, False])
@pytest.mark.parametrize("what", ["run", "backfill", "occurrence"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_refused_batch_leaves_a_schedule_unchanged(
    rig: ScheduleRig, overlap: str, is_unfinished: bool, what: str, is_sealed: bool
) -> None:
    rig.subscribe("s")
    rig.put(overlap=overlap)
    rig.after(10_000).settle()
    got = rig.one()
    if not is_unfinished:
        rig.ack(got)
        rig.commit()
    schedules, address = rig.engine.schedules, cast("Any", "operator")
    before = remembered(rig)
    if what == "run":
        schedules.run(rig.planned(), address, 1, rig.now_ms)
    elif what == "backfill":
        schedules.backfill(rig.planned(), after(3, 4), address, 1, rig.now_ms)
    else:
        if is_unfinished and overlap != "allow":
            return  # nothing fires
        # Some of these were missed, and some overlap.
        rig.after(10_000_000).plan()
    assert rig.planned().staged
    if is_sealed:
        rig.seal()
        rig.refuse()
    else:
        rig.engine.intake.withdraw()
    assert remembered(rig) == before
    rig.settle()
    if what == "occurrence":
        assert rig.core.totals.schedules_missed == 999


def test_a_task_ended_in_a_refused_run_stays_ended(rig: ScheduleRig) -> None:
    rig.subscribe("s")
    rig.put(overlap="skip")
    rig.after(10_000).settle()
    got = rig.one()
    rig.engine.schedules.run(rig.planned(), cast("Any", "operator"), 1, rig.now_ms)
    rig.ack(got)
    rig.seal()
    rig.refuse()
    rig.commit()
    assert not rig.planned().unfinished
    rig.after(10_000).settle()
    assert rig.outcomes() == [("fired", 1), ("fired", 1)]


def test_a_withdrawn_run_is_repeated(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).plan()
    rig.engine.intake.withdraw()
    rig.settle()
    assert rig.times_of() == after(10)


def test_a_schedule_put_in_a_refused_batch_is_kept(rig: ScheduleRig) -> None:
    rig.put(start_ms=NOW_MS)
    rig.after(10_000).plan()
    rig.seal()
    rig.refuse()
    rig.commit()
    assert rig.rows.schedules.keys() == {"s"}
    rig.settle()
    assert rig.times_of() == after(10)


def test_schedules_wait_while_tasks_are_refused(rig: ScheduleRig) -> None:
    rig.put(catch_up="all")
    rig.settle()
    rig.after(25_000).plan(accepts=False)
    next_ms = rig.core.schedule_heap.next_ms()
    assert next_ms is not None and next_ms > rig.now_ms, "else the shard would spin"
    rig.after(1_000).settle()
    assert rig.times_of() == after(10, 20)


def test_a_clock_set_back_does_not_prolong_a_schedules_wait(rig: ScheduleRig) -> None:
    rig.put(catch_up="all")
    rig.settle()
    rig.after(3_600_000).plan(accepts=False)
    rig.now_ms -= 3_500_000
    rig.plan(accepts=False)
    assert rig.core.schedule_heap.next_ms() == rig.now_ms + 1_000
    rig.after(1_000).settle()
    assert rig.times_of() == after(*range(10, 110, 10))


def test_a_full_topic_delays_only_its_own_schedules() -> None:
    rig = ScheduleRig(replace(CONFIG, backlog_max=1))
    task_id = rig.enqueue("s")
    rig.fire()
    for name in "su":
        rig.put(name, catch_up="all")
    rig.after(25_000).settle()
    assert (rig.outcomes("s"), rig.outcomes("u")) == ([], [("fired", 1)] * 2)
    rig.cancel(task_id)
    rig.now_ms -= 4_000
    rig.plan()
    assert rig.core.schedule_heap.next_ms() == rig.now_ms + 1_000, "a clock that was set back"
    rig.after(1_000).settle()
    assert rig.times_of("s") == after(10, 20)


def test_schedules_wait_for_room_without_losses() -> None:
    rig = ScheduleRig(replace(CONFIG, tasks_max=2))
    rig.put(catch_up="all")
    rig.settle()
    rig.after(45_000).settle()
    assert rig.times_of() == after(10, 20)
    rig.cancel(rig.tasks_of()[0].id)
    rig.commit()
    rig.after(1_000).settle()
    assert rig.times_of() == after(20, 30)


def test_bytes_of_runs_per_call_are_limited(rig: ScheduleRig) -> None:
    for name in "abc":
        rig.put(name, body=bytes(FIRE_BYTES_MAX // 2))
    rig.settle()
    rig.pass_time(10_000)
    assert rig.engine.schedules.fire(rig.now_ms, 100, accepts=True)
    assert len(rig.core.open.effects.enqueued) == 2
    rig.settle()
    assert [len(rig.tasks_of(name)) for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("catch_up", ["skip", "last", "all"])
@pytest.mark.parametrize("jump_ms", [3_600_000, 400 * DAY_MS])
def test_catch_up_after_a_clock_jump_is_sliced(
    rig: ScheduleRig, catch_up: str, jump_ms: int
) -> None:
    """One call does a bounded amount of work, whatever was missed."""
    count = 300
    every = [{"every_ms": 1_000}, {"cron": "* * * * * *", "timezone": "Europe/Berlin"}]
    every.append({"cron": "0-59 0-59 0-23 * * *", "timezone": "America/New_York"})
    names = [f"s{n}" for n in range(count)]
    for n, name in enumerate(names):
        rig.put(name, catch_up=catch_up, catch_up_ms=600_000, **every[n % len(every)])
    rig.settle()
    rig.pass_time(jump_ms)
    tables = [rig.planned(name).table for name in names]
    made = rig.core.open.effects.enqueued

    def work() -> int:
        return sum(table.steps for table in tables) + len(made) * TASK_STEPS

    of_one = FIRED_MAX * (TASK_STEPS + 4) + 200
    calls, more = 0, True
    while more:
        before = work()
        more = rig.engine.schedules.fire(rig.now_ms, 64, accepts=True)
        assert work() - before <= FIRE_STEPS_MAX + of_one
        calls += 1
    assert 1 < calls <= count
    undos = rig.core.open.runs
    assert undos.keys() == {rig.planned(name) for name in names}
    assert {undo.missed for undo in undos.values()} == {COUNTED_MAX}


def test_a_clock_set_back_repeats_no_run(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).settle()
    rig.stop_and_start(back_ms=8_000)
    rig.settle()
    rig.after(8_000).settle()
    assert rig.times_of() == after(10)
    rig.after(10_000).settle()
    assert rig.times_of() == after(10, 20)


def test_a_restart_does_not_shift_an_interval(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    for _ in range(10):
        rig.pass_time(7_000)
        rig.stop_and_start()
        rig.settle()
    assert rig.times_of() == after(10, 20, 30, 40, 50, 60, 70)


# --- catch-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "window_ms", "expected", "missed"),
    [
        ("all", DAY_MS, list(range(10, 610, 10)), 0),
        ("all", 200_000, list(range(410, 610, 10)), 40),
        ("last", DAY_MS, [600], 59),
        ("skip", DAY_MS, [600], 59),
    ],
)
@pytest.mark.parametrize("how", ["down", "paused"])
def test_missed_occurrences_follow_catch_up(
    rig: ScheduleRig, how: str, catch_up: str, window_ms: int, expected: list[int], missed: int
) -> None:
    rig.put(catch_up=catch_up, catch_up_ms=window_ms)
    rig.settle()
    if how == "down":
        rig.crash(down_ms=605_000)
    else:
        rig.engine.schedules.pause(rig.planned(), paused=True)
        rig.after(605_000).settle()
        assert rig.tasks_of() == []
        rig.engine.schedules.pause(rig.planned(), paused=False)
    rig.settle()
    assert rig.times_of() == after(*expected)
    assert rig.core.totals.schedules_missed == missed
    rig.after(5_000).settle()
    assert rig.times_of()[-1:] == after(610)


@pytest.mark.parametrize(("late_ms", "is_fired"), [(CURRENT_MS_MAX, True), (60_001, False)])
def test_catch_up_skip_fires_up_to_a_minute_late(
    rig: ScheduleRig, late_ms: int, is_fired: bool
) -> None:
    rig.put(every_ms=DAY_MS, catch_up="skip")
    rig.settle()
    rig.crash(down_ms=DAY_MS + late_ms)
    rig.settle()
    assert rig.times_of() == after(*[86_400] * is_fired)


def test_a_weekly_occurrence_survives_a_restart_at_its_time(rig: ScheduleRig) -> None:
    rig.put(every_ms=7 * DAY_MS, catch_up="last")
    rig.settle()
    rig.crash(down_ms=7 * DAY_MS + DAY_MS // 2)
    rig.settle()
    assert rig.times_of() == after(7 * 86_400)


def test_a_long_absence_is_caught_up_in_batches(rig: ScheduleRig) -> None:
    rig.put(catch_up="all", catch_up_ms=10_000 * (FIRED_MAX + 1) - 1)
    rig.settle()
    rig.crash(down_ms=10_000 * (COUNTED_MAX + FIRED_MAX + 50))
    rig.plan()
    rig.commit()
    assert len(rig.tasks_of()) == FIRED_MAX
    assert rig.core.totals.schedules_missed == COUNTED_MAX
    rig.settle()
    assert len(rig.tasks_of()) == FIRED_MAX + 1


def test_the_newest_runs_are_remembered(rig: ScheduleRig) -> None:
    rig.put(catch_up="all")
    rig.settle()
    for count in (RECENT_MAX, RECENT_MAX + 1):
        rig.after(10_000 * RECENT_MAX if count == RECENT_MAX else 10_000).settle()
        assert len(rig.outcomes()) == RECENT_MAX
    assert rig.planned().row.runs == RECENT_MAX + 1


# --- overlap -------------------------------------------------------------------------------------


def test_overlap_skip_drops_overlapping_occurrences(rig: ScheduleRig) -> None:
    rig.put(overlap="skip")
    rig.subscribe("s")
    rig.settle()
    rig.after(10_000).settle()
    first = rig.one()
    rig.after(20_000).settle()
    assert rig.times_of() == after(10)
    rig.ack(first)
    rig.after(10_000).settle()
    assert rig.times_of() == after(40)
    assert rig.core.totals.schedules_overlapped == 1


def test_overlap_queue_one_fires_the_first_waiting_occurrence(rig: ScheduleRig) -> None:
    rig.put(overlap="queue_one")
    rig.subscribe("s")
    rig.settle()
    rig.after(10_000).settle()
    first = rig.one()
    for _ in range(3):
        rig.after(10_000).settle()
    assert rig.planned().row.queued_ms == NOW_MS + 20_000
    rig.crash()
    rig.subscribe("s")
    rig.settle()
    assert rig.planned().row.queued_ms == NOW_MS + 20_000
    rig.ack(first)
    rig.settle()
    assert rig.times_of() == after(20)
    assert rig.planned().row.queued_ms is None


@pytest.mark.parametrize("is_taken", [True, False])
def test_overlap_cancel_previous_cancels_an_undelivered_task(
    rig: ScheduleRig, is_taken: bool
) -> None:
    rig.put(overlap="cancel_previous")
    rig.settle()
    rig.after(10_000).settle()
    if is_taken:
        rig.subscribe("s", prefetch=1)
        rig.one()
    rig.after(10_000).settle()
    assert rig.times_of() == after(10, 20) if is_taken else after(20)
    assert rig.core.totals.cancelled == (not is_taken)


@pytest.mark.parametrize("restart", [True, False])
def test_a_dead_letter_does_not_overlap(rig: ScheduleRig, restart: bool) -> None:
    rig.put(overlap="skip")
    rig.subscribe("s")
    rig.settle()
    rig.after(10_000).settle()
    rig.reject(rig.one())
    rig.commit()
    if restart:
        rig.crash()
    rig.after(10_000).settle()
    assert rig.times_of() == after(10, 20)


def test_a_task_ended_before_a_crash_does_not_overlap(rig: ScheduleRig) -> None:
    rig.put(overlap="skip")
    rig.settle()
    rig.after(10_000).settle()
    rig.cancel(rig.tasks_of()[0].id)
    rig.commit()
    rig.crash()
    rig.after(10_000).settle()
    assert rig.times_of() == after(20)


# --- counts, jitter, changes ---------------------------------------------------------------------


def test_runs_max_limits_the_runs(rig: ScheduleRig) -> None:
    rig.put(catch_up="all", runs_max=3)
    rig.settle()
    rig.after(100_000).settle()
    assert rig.times_of() == after(10, 20, 30)
    assert rig.planned().row.next_ms is None
    rig.crash()
    rig.after(100_000).settle()
    assert len(rig.tasks_of()) == 3


def test_a_lowered_runs_max_drops_the_queued_occurrence(rig: ScheduleRig) -> None:
    rig.put(overlap="queue_one")
    rig.subscribe("s")
    rig.settle()
    rig.after(10_000).settle()
    got = rig.one()
    rig.after(10_000).settle()
    assert rig.planned().row.queued_ms == NOW_MS + 20_000
    assert rig.put(anchor_ms=NOW_MS, overlap="queue_one", runs_max=1) == "updated"
    rig.ack(got)
    rig.settle()
    assert (rig.planned().row.runs, rig.tasks_of()) == (1, [])


def test_jitter_is_bounded_and_the_same_after_a_restart() -> None:
    schedule = Schedule("s", "t", b"", None, None, "UTC", 10, 0, jitter_ms=500)
    results = [jitter_of(schedule, n * 1_000) for n in range(1_000)]
    assert results == [jitter_of(schedule, n * 1_000) for n in range(1_000)]
    assert min(results) < 20 and 480 < max(results) <= 500
    assert results != [jitter_of(schedule._replace(name="o"), n * 1_000) for n in range(1_000)]
    rig = ScheduleRig()
    rig.put(jitter_ms=5_000)
    rig.settle()
    rig.after(10_000).settle()
    (row,) = rig.tasks_of()
    wanted = rig.planned().row.schedule
    assert row.due_ms == NOW_MS + 10_000 + jitter_of(wanted, NOW_MS + 10_000)


def test_putting_the_same_schedule_again_is_unchanged(rig: ScheduleRig) -> None:
    rig.put()
    rig.settle()
    rig.after(10_000).settle()
    assert rig.put(anchor_ms=NOW_MS) == "unchanged"
    rig.pass_time(3_000)
    assert rig.put(body=b"new", anchor_ms=NOW_MS) == "updated"
    assert rig.planned().row.next_ms == NOW_MS + 20_000
    assert rig.put(every_ms=60_000) == "updated"
    assert rig.planned().row.next_ms == NOW_MS + 73_000
    assert rig.planned().row.runs == 1


def test_a_changed_overlap_applies_to_an_unfinished_task(rig: ScheduleRig) -> None:
    rig.subscribe("s")
    rig.put(anchor_ms=NOW_MS)
    rig.settle()
    rig.after(10_000).settle()
    got = rig.one()
    assert rig.put(anchor_ms=NOW_MS, overlap="skip") == "updated"
    rig.after(10_000).settle()
    assert (rig.times_of(), rig.core.totals.schedules_overlapped) == (after(10), 1)
    rig.ack(got)
    rig.after(10_000).settle()
    assert rig.times_of()[-1:] == after(30)


def test_an_overlap_changed_during_a_look_up_cancels_nothing(rig: ScheduleRig) -> None:
    rig.put(overlap="cancel_previous")
    rig.settle()
    rig.after(10_000).settle()
    rig.after(10_000).engine.schedules.fire(rig.now_ms, 100, accepts=True)
    (entry,), rig.core.schedule_heap.to_cancel = rig.core.schedule_heap.to_cancel, []
    rig.put(anchor_ms=NOW_MS, overlap="allow")
    task_id = entry.row.last_id
    rig.engine.schedules.replace(entry, task_id, rig.known([task_id])[task_id])
    rig.settle()
    assert rig.times_of() == after(10, 20)


def test_deleting_a_schedule_keeps_its_tasks(rig: ScheduleRig) -> None:
    rig.put(overlap="skip")
    rig.settle()
    rig.after(10_000).settle()
    rig.engine.schedules.delete(rig.planned())
    rig.after(10_000).settle()
    assert rig.times_of() == after(10)
    assert rig.rows.schedules == {}
    assert rig.put() == "created"


def test_a_run_on_demand_does_not_count_as_an_occurrence(rig: ScheduleRig) -> None:
    rig.put(runs_max=1)
    rig.settle()
    rig.engine.schedules.run(rig.planned(), object(), 7, rig.now_ms)  # type: ignore[arg-type]
    assert rig.planned().staged
    rig.settle()
    assert rig.times_of() == [NOW_MS]
    assert rig.outcomes() == [("run", 1)]
    rig.after(10_000).settle()
    assert rig.times_of() == after(0, 10)


@pytest.mark.parametrize("what", ["run", "backfill"])
def test_overlap_is_decided_after_a_run_on_demand_is_durable(rig: ScheduleRig, what: str) -> None:
    """Neither to skip nor to queue: it would be forgotten with the run, and told all the same."""
    rig.subscribe("s")
    rig.put(overlap="queue_one")
    rig.after(10_000).settle()
    rig.pass_time(35_000)
    if what == "run":
        rig.engine.schedules.run(rig.planned(), cast("Any", "operator"), 1, rig.now_ms)
    else:
        rig.engine.schedules.backfill(
            rig.planned(), after(3), cast("Any", "operator"), 1, rig.now_ms
        )
    before = rig.planned().row
    rig.plan()
    assert rig.planned().row == before
    rig.settle()
    assert rig.planned().row.queued_ms == NOW_MS + 40_000


def test_repeated_pauses_leave_no_heap_entries(rig: ScheduleRig) -> None:
    rig.put()
    for _ in range(1_000):
        for paused in (True, False):
            rig.engine.schedules.pause(rig.planned(), paused=paused)
    assert len(rig.core.schedule_heap._due._heap) < 100
