"""Schedules of a lost store: their events lead from a backup to what the store holds at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.schedule_rig import ScheduleRig
from engine.test_schedules_model import SchedulesMachine
from history.recording_rig import RecordingRig
from history.test_restore_model import lines
from support.engine_rig import CONFIG
from support.history_rig import NOW_MS, enqueued, make_id, write
from support.restore_rig import STARTED, held, make_backup, restored, run, stopped, url
from tickwheel.history.daemon import Recorder, schedule_map
from tickwheel.history.fold import Fold, Owners
from tickwheel.history.lines import EventKind
from tickwheel.model.kinds import SCHEDULE, Run, Schedule, ScheduleRow, keyed
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import TaskOptions

A, B = make_id(1), make_id(2)
OPTIONS = TaskOptions("k", None, {"n": 1}, 3, 60_000, RetryPolicy(5, 1.0, 0, 3, 0.0, "fixed"))
DAILY = Schedule("daily", "t", b"\x00body", OPTIONS, "0 9 * * *", "Europe/Berlin", None, 0)
POLL = Schedule("poll", "t", b"x", None, None, "UTC", 90_000, 7, jitter_ms=5, runs_max=9)
ROW = ScheduleRow(POLL, next_ms=NOW_MS + 3, runs=2)


def put(schedule: Schedule, row: ScheduleRow, *, body: bool = True, same: bool = False) -> Any:
    """The record as the daemon writes it."""
    recorder = Recorder(1, lambda: (NOW_MS + 10, 0), str, bodies=body)
    recorder.schedule_changed(row._replace(schedule=schedule), "put", same_body=same)
    notes = recorder.cut()
    assert notes is not None
    return notes.records[0]


def test_every_field_of_a_schedule_is_in_its_event() -> None:
    assert set(schedule_map(ScheduleRow(DAILY, paused=True))) | {
        "name", "topic", "body", "every_ms", "start_ms", "end_ms", "runs_max",
    } == {*Schedule._fields, "paused", "task"} - {"options"}  # fmt: skip


async def test_a_schedule_put_since_is_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(SCHEDULE, [ROW]))
    daily = ScheduleRow(DAILY, next_ms=NOW_MS + 500)
    changed = ROW._replace(schedule=POLL._replace(every_ms=60_000, jitter_ms=0), next_ms=NOW_MS + 9)
    write(
        tmp_path,
        [[STARTED], [put(DAILY, daily)], [put(changed.schedule, changed)],
         [[EventKind.SCHEDULE, NOW_MS + 11, "t", "daily", "paused",
           {"next_ms": NOW_MS + 500, "runs": 0}, None]],
         [stopped()]],
    )  # fmt: skip
    report, result = await restored(tmp_path, backup)
    result = result.small.of_kind(SCHEDULE)
    assert sorted(result) == [daily._replace(paused=True), changed]
    assert report.exact and report.schedules == 2


async def test_runs_since_the_backup_are_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(SCHEDULE, [ROW]))
    state = {"next_ms": NOW_MS + 90_003, "runs": 3, "queued_ms": NOW_MS + 3}
    runs = [[NOW_MS, "missed", 0, 4], [NOW_MS + 1, "fired", A, 1], [NOW_MS + 3, "queued", 0, 1]]
    write(
        tmp_path,
        [[STARTED], [enqueued([A, B], bodies=[b"", b""])],
         [[EventKind.OCCURRENCE, NOW_MS + 5, "t", "poll", runs, state]],
         [[EventKind.OCCURRENCE, NOW_MS + 6, "t", "poll", [[NOW_MS + 6, "run", B, 1]], state]],
         [[EventKind.OCCURRENCE, NOW_MS + 7, "t", "gone", [[NOW_MS, "fired", B, 1]], state]],
         [stopped()]],
    )  # fmt: skip
    report = await run(tmp_path, backup)
    (found,) = (await held(url(tmp_path))).small.of_kind(SCHEDULE)
    assert found == ScheduleRow(
        POLL, next_ms=NOW_MS + 90_003, runs=3, last_id=A, queued_ms=NOW_MS + 3,
        recent=(
            Run(NOW_MS, NOW_MS + 5, "missed", occurrences=4),
            Run(NOW_MS + 1, NOW_MS + 5, "fired", A),
            Run(NOW_MS + 6, NOW_MS + 6, "run", B),
        ),
    )  # fmt: skip
    assert report.exact


async def test_a_deleted_schedule_is_not_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(SCHEDULE, [ROW]))
    gone = [EventKind.SCHEDULE, NOW_MS + 5, "t", "poll", "deleted", {"runs": 2}, None]
    write(tmp_path, [[STARTED], [gone], [stopped()]])
    assert (await run(tmp_path, backup)).schedules == 0
    assert (await held(url(tmp_path))).small.of_kind(SCHEDULE) == []


async def test_schedule_events_from_before_the_backup_are_ignored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, records=keyed(SCHEDULE, [ROW]))
    gone = [EventKind.SCHEDULE, NOW_MS - 5, "t", "poll", "deleted", {"runs": 2}, None]
    write(tmp_path, [[STARTED, gone], [stopped()]])
    await run(tmp_path, backup)
    assert (await held(url(tmp_path))).small.of_kind(SCHEDULE) == [ROW]


@pytest.mark.parametrize("same", [True, False])
async def test_a_changed_schedule_without_its_body_is_named(tmp_path: Path, same: bool) -> None:
    backup = await make_backup(tmp_path, records=keyed(SCHEDULE, [ROW]))
    other = ROW._replace(schedule=POLL._replace(every_ms=60_000))
    write(tmp_path, [[STARTED], [put(other.schedule, other, body=False, same=same)], [stopped()]])
    report = await run(tmp_path, backup)
    if same:
        assert (await held(url(tmp_path))).small.of_kind(SCHEDULE) == [other]
        return
    assert report.refused and report.schedules_without_body == ["poll"]
    assert not (tmp_path / "new.db").exists()
    report = await run(tmp_path, backup, allow_missing_bodies=True)
    assert not report.exact and report.schedules_without_body == ["poll"]
    assert (await held(url(tmp_path))).small.of_kind(SCHEDULE) == []


# --- against the engine ------------------------------------------------------------------------


class RecordingScheduleRig(RecordingRig, ScheduleRig):
    """Keeps what is durable."""


def test_a_refused_run_has_no_event() -> None:
    """Its task is forgotten; when it comes again it is another one."""
    rig = RecordingScheduleRig(CONFIG)
    rig.put(catch_up="all")
    rig.commit()
    rig.pass_time(20_000)
    rig.plan()
    rig.seal()
    rig.refuse()
    rig.settle()
    fired = [e for e in lines(rig.history) if e["event"] == "occurrence_fired"]
    assert [(int(e["task_id"]), e["planned_ms"]) for e in fired] == [
        (row.id, planned_ms) for row, planned_ms in zip(rig.tasks_of(), rig.times_of(), strict=True)
    ]
    fold = Fold(Owners([]), 0, 0)
    for event in lines(rig.history):
        fold.apply([event])
    assert fold.schedules.rows() == list(rig.rows.schedules.values())


class RestoreSchedulesMachine(SchedulesMachine):
    """Whatever becomes of schedules, their events lead to what the store holds."""

    rig: RecordingScheduleRig

    def new_rig(self, now_ms: int) -> ScheduleRig:
        self.copies: list[tuple[list[ScheduleRow], int]] = [([], 0)]
        return RecordingScheduleRig(CONFIG, now_ms)

    @rule()
    def back_up(self) -> None:
        self.copies.append((list(self.rig.rows.schedules.values()), len(self.rig.history)))

    @rule(pick=st.integers(0, 100))
    def restore(self, pick: int) -> None:
        rows, records = self.copies[pick % len(self.copies)]
        fold = Fold(Owners([]), 0, 0, rows)
        for event in lines(self.rig.history[records:]):
            fold.apply([event])
        assert fold.unusable == 0
        assert sorted(fold.schedules.rows()) == sorted(self.rig.rows.schedules.values())

    @rule(every_ms=st.sampled_from([5_000, 11_000]), deleted=st.booleans())
    def put_again(self, every_ms: int, deleted: bool) -> None:
        planned = self.rig.core.schedule_heap.by_name.get("again")
        if planned is not None and planned.staged:
            return
        if planned is not None and deleted:
            self.rig.engine.schedules.delete(planned)
        self.rig.put("again", every_ms=every_ms, overlap="queue_one", catch_up="last")

    def teardown(self) -> None:
        super().teardown()
        for pick in range(len(self.copies)):
            self.restore(pick)


TestRestoreSchedules = RestoreSchedulesMachine.TestCase
TestRestoreSchedules.settings = settings(
    report_multiple_bugs=False,
    phases=[Phase.reuse, Phase.generate],
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
)
