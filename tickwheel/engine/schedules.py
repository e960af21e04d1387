"""Decides the occurrences of schedules: each creates one task, or is skipped for a reason.

The task of an occurrence and the advance of its schedule are in the same effects, so a store
contains both or neither, and each occurrence creates exactly one task, even after kills and
failovers. The module is pure; ``timetables`` computes planned times and holds the state of
schedules.

An occurrence is decided when it is due. If several have come due while the daemon was down or the
schedule was paused, the newest is current, and the others were missed. The newest also counts as
missed if it is older than ``CURRENT_MS_MAX``.

| catch-up | fires |
|---|---|
| skip | the newest, unless it was missed |
| last | the newest, unless it is older than the window |
| all | all that are not older than the window |
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.engine.events import DELETED, PAUSED, PUT, RESUMED
from tickwheel.engine.sessions import Source
from tickwheel.engine.timetables import LoadedSchedule, Timetable, Undo
from tickwheel.model.kinds import (
    BACKFILLED,
    FIRED,
    MISSED,
    NAME_PROPERTY,
    OVERLAPPED,
    PLANNED_PROPERTY,
    QUEUED,
    RECENT_MAX,
    RUN,
    SCHEDULE,
    Run,
    Schedule,
    ScheduleRow,
)
from tickwheel.model.records import ID_STEP, TaskOptions, size_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tickwheel.engine.enqueue import Intake
    from tickwheel.engine.sessions import ReplySink
    from tickwheel.engine.state import Core
    from tickwheel.engine.tasks import Control
    from tickwheel.model.records import NewTask, TaskSnapshot

CURRENT_MS_MAX = 60_000
"""Age from which an undecided occurrence counts as missed."""
FIRED_MAX = 100
"""Maximum occurrences of a schedule that fire in one batch."""
COUNTED_MAX = 1_000
"""Limit up to which missed occurrences are counted. A count that reaches it is a lower bound."""
FIRE_BYTES_MAX = 8 << 20
"""Bytes after which a call of ``fire`` stops. It can exceed this by the tasks of one schedule."""
FIRE_STEPS_MAX = 2_048
"""Steps (planning steps, and ``TASK_STEPS`` per task) after which a call of ``fire`` stops. It can
exceed this by the steps of one schedule."""
TASK_STEPS = 4
"""Cost of creating a task, in planning steps."""
RETRY_MS = 1_000
"""How long schedules wait after new tasks were refused or their topic was full, in ms."""
_MIX = 0x9E37_79B9_7F4A_7C15


class Schedules:
    """The verbs on schedules. Verbs must not change a staged schedule."""

    def __init__(self, core: Core, intake: Intake, control: Control) -> None:
        self._core = core
        self._schedule_heap = core.schedule_heap
        self._intake = intake
        self._control = control

    # --- create, change, delete ------------------------------------------------------------

    def put(self, schedule: Schedule, table: Timetable, now_ms: int) -> str:
        """Create or change a schedule. Return "created", "updated" or "unchanged". A new timing
        begins after ``now_ms``; earlier runs still count towards ``runs_max``."""
        existing = self._schedule_heap.by_name.get(schedule.name)
        if existing is None:
            row = ScheduleRow(schedule, next_ms=table.after(now_ms))
            entry = self._schedule_heap.by_name[schedule.name] = LoadedSchedule(row, table)
            self._record_change(entry, row, PUT)
            return "created"
        before = existing.row
        if before.schedule == schedule:
            return "unchanged"
        next_ms = before.next_ms
        if _timing(before.schedule) != _timing(schedule):
            next_ms = table.after(now_ms)
        existing.table = table
        queued_ms = before.queued_ms if schedule.overlap == "queue_one" else None
        if schedule.runs_max is not None and before.runs >= schedule.runs_max:
            next_ms = queued_ms = None
        elif next_ms is None:
            next_ms = table.after(now_ms)
        row = before._replace(schedule=schedule, next_ms=next_ms, queued_ms=queued_ms)
        self._record_change(existing, row, PUT, same_body=schedule.body == before.schedule.body)
        return "updated"

    def pause(self, entry: LoadedSchedule, *, paused: bool) -> None:
        """Pause a schedule, so that it does not fire, or resume it; its catch-up then applies."""
        if entry.row.paused != paused:
            row = entry.row._replace(paused=paused)
            self._record_change(entry, row, PAUSED if paused else RESUMED)

    def delete(self, entry: LoadedSchedule) -> None:
        """Delete a schedule, but not its tasks."""
        self._schedule_heap.forget(entry)
        self._core.open.effects.drop(SCHEDULE, entry.name)
        self._core.recorder.schedule_changed(entry.row, DELETED)

    def restore(self, row: ScheduleRow, table: Timetable) -> None:
        """Restore a schedule. Then look up its newest task and call ``unwatch_ended``."""
        entry = self._schedule_heap.by_name[row.schedule.name] = LoadedSchedule(row, table)
        if row.last_id:
            self._schedule_heap.watch(entry)
        self._schedule_heap.arm(entry)

    def unwatch_ended(self, requested: Iterable[int], snapshots: dict[int, TaskSnapshot]) -> None:
        """Stop watching ``requested`` tasks that have ended. ``snapshots`` are the stored ones."""
        ended = [
            i for i in requested
            if i not in snapshots or (snapshots[i].dead and not self._control.is_owed(snapshots[i]))
        ]  # fmt: skip
        self._schedule_heap.ended(ended)

    # --- occurrences -----------------------------------------------------------------------

    def fire(self, now_ms: int, limit: int, *, accepts: bool) -> bool:
        """Decide the due occurrences of up to ``limit`` schedules. Return whether to call this
        again at once. Without ``accepts``, new tasks are currently refused, and the occurrences
        wait."""
        core, schedule_heap = self._core, self._schedule_heap
        schedule_heap.limit_waits(now_ms + RETRY_MS)  # they are longer after a clock was set back
        bytes_max = self._intake.inflight_bytes + FIRE_BYTES_MAX
        steps_left = FIRE_STEPS_MAX
        for _ in range(limit):
            if self._intake.inflight_bytes > bytes_max or steps_left <= 0:
                return True
            entry = schedule_heap.pop(now_ms)
            if entry is None:
                return False
            room = min(core.room, FIRED_MAX)
            if not accepts or room <= 0:
                schedule_heap.blocked_until_ms = now_ms + RETRY_MS
                schedule_heap.arm(entry)
                return False
            if entry.row.schedule.topic in core.full_topics:
                schedule_heap.retry(entry, now_ms + RETRY_MS)
                continue
            table, enqueued = entry.table, core.open.effects.enqueued
            before = table.steps + len(enqueued) * TASK_STEPS
            self._decide(entry, now_ms, room)
            steps_left -= table.steps + len(enqueued) * TASK_STEPS - before
            schedule_heap.arm(entry)
        return True

    def _decide(self, entry: LoadedSchedule, now_ms: int, room: int) -> None:
        """Decide the due occurrences of a schedule, at most ``room``. Missed occurrences are
        counted without iterating over them."""
        decision = _Decision(entry, now_ms)
        decision.fire_queued()
        row = entry.row
        if row.next_ms is not None and row.next_ms <= now_ms:
            due, missed, newest_ms = _due_occurrences(row, entry.table, now_ms, room)
            if missed:
                decision.miss(newest_ms, missed)
            for planned_ms in due:
                if decision.is_over:
                    break
                if not decision.take(planned_ms):
                    # The task to replace is looked up first; then the occurrence is decided again.
                    entry.cancelling = True
                    self._schedule_heap.to_cancel.append(entry)
                    return
            next_ms = entry.table.after(due[-1] if due else now_ms)
            decision.row = decision.row._replace(next_ms=next_ms)
        self._advance(entry, decision, now_ms)

    def _advance(self, entry: LoadedSchedule, decision: _Decision, now_ms: int) -> None:
        """Write the schedule's row after a decision, and stage the tasks that fired."""
        totals, fired = self._core.totals, decision.fired
        if decision.is_over:
            decision.row = decision.row._replace(next_ms=None, queued_ms=None)
        row = decision.row
        if fired:
            ids = self._stage(entry, row.schedule, fired, now_ms)
            for planned_ms, task_id in zip(fired, ids, strict=True):
                decision.note(Run(planned_ms, now_ms, FIRED, task_id))
            row = decision.row._replace(runs=row.runs + len(fired), last_id=ids[-1])
            undo = self._core.open.runs[entry]
            undo.missed, undo.overlapped = decision.missed, decision.overlapped
            undo.late_ms = [now_ms - planned_ms for planned_ms in fired]
            undo.watched_id = undo.before.last_id if entry.unfinished else 0
        else:
            totals.schedules_missed += decision.missed
            totals.schedules_overlapped += decision.overlapped
        entry.row = row
        self._core.open.effects.put(SCHEDULE, row)
        if decision.outcomes:
            self._core.recorder.occurred(row, decision.outcomes, now_ms, staged=bool(fired))
        if fired:  # with any ``overlap``, which can be changed before the task ends
            self._schedule_heap.watch(entry)

    def _stage(
        self,
        entry: LoadedSchedule,
        schedule: Schedule,
        times_ms: Sequence[int],
        now_ms: int,
        address: ReplySink | None = None,
        request: int = 0,
    ) -> range:
        """Stage the tasks of these occurrences in the open batch. Return their ids."""
        tasks = [_new_task(schedule, planned_ms, now_ms) for planned_ms in times_ms]
        if schedule.options is not None and schedule.options.within_ms is not None:
            tasks = self._intake.place(tasks, now_ms)
        size_bytes = sum(size_of(task[2], task[3]) for task in tasks)
        source = Source(f"schedule {schedule.name}")
        first = self._intake.enqueue(address, None, request, tasks, size_bytes, now_ms, source)
        self._core.open.runs.setdefault(entry, Undo(entry.row))
        entry.staged = True
        self._schedule_heap.arm(entry)  # not checked before the batch is durable
        return range(first, first + len(tasks) * ID_STEP, ID_STEP)

    def replace(self, entry: LoadedSchedule, task_id: int, snapshot: TaskSnapshot | None) -> None:
        """Cancel the task of the previous run (``cancel_previous``). ``snapshot`` is its stored
        record. A task in flight is not cancelled."""
        entry.cancelling = False
        row = entry.row
        is_wanted = row.schedule.overlap == "cancel_previous" and not row.paused
        if is_wanted and entry.unfinished and row.last_id == task_id:
            self._schedule_heap.unwatch(entry)
            self._control.cancel(task_id, snapshot)
        if self._schedule_heap.by_name.get(entry.name) is entry:
            self._schedule_heap.arm(entry)

    # --- on demand -------------------------------------------------------------------------

    def run(self, entry: LoadedSchedule, address: ReplySink, request: int, now_ms: int) -> None:
        """Create a task now, independently of planned times. ``address`` gets its id when it is
        durable. The task does not count as a run and does not overlap with runs."""
        (task_id,) = self._stage(entry, entry.row.schedule, [now_ms], now_ms, address, request)
        run = Run(now_ms, now_ms, RUN, task_id)
        row = _with_run(entry.row, run)
        entry.row = row
        self._core.open.effects.put(SCHEDULE, row)
        self._core.recorder.occurred(row, [run], now_ms, staged=True)

    def backfill(
        self,
        entry: LoadedSchedule,
        times_ms: Sequence[int],
        address: ReplySink,
        request: int,
        now_ms: int,
    ) -> None:
        """Create a task, due now, for each occurrence. ``address`` gets the durable ids."""
        ids = self._stage(entry, entry.row.schedule, times_ms, now_ms, address, request)
        runs = [
            Run(planned_ms, now_ms, BACKFILLED, task_id)
            for planned_ms, task_id in zip(times_ms, ids, strict=True)
        ]
        self._core.recorder.occurred(entry.row, runs, now_ms, staged=True)

    def _record_change(
        self, entry: LoadedSchedule, row: ScheduleRow, event: str, *, same_body: bool = False
    ) -> None:
        entry.row = row
        self._core.open.effects.put(SCHEDULE, row)
        self._core.recorder.schedule_changed(row, event, same_body=same_body)
        self._schedule_heap.arm(entry)


class _Decision:
    """The decision about the due occurrences of a schedule, and its new row."""

    def __init__(self, entry: LoadedSchedule, now_ms: int) -> None:
        self.row = entry.row
        self.fired: list[int] = []
        self.outcomes: list[Run] = []
        """All outcomes of occurrences, for the history."""
        self.missed = self.overlapped = 0
        self._unfinished = entry.unfinished
        self._now_ms = now_ms

    @property
    def is_over(self) -> bool:
        """Whether the schedule has reached ``runs_max`` runs."""
        runs_max = self.row.schedule.runs_max
        return runs_max is not None and self.row.runs + len(self.fired) >= runs_max

    def fire_queued(self) -> None:
        """Fire the queued occurrence if the task for which it waited has ended."""
        queued_ms = self.row.queued_ms
        if queued_ms is not None and not self._unfinished:
            self.fired.append(queued_ms)
            self.row = self.row._replace(queued_ms=None)

    def miss(self, newest_ms: int, count: int) -> None:
        """Count ``count`` missed occurrences, the newest of which is at ``newest_ms``."""
        self.missed += count
        self.note(Run(newest_ms, self._now_ms, MISSED, occurrences=count))

    def take(self, planned_ms: int) -> bool:
        """Decide an occurrence. Return False if the previous task must be cancelled first."""
        overlap = self.row.schedule.overlap
        overlaps = overlap != "allow" and (self._unfinished or self.fired)
        if not overlaps:
            self.fired.append(planned_ms)
        elif overlap == "cancel_previous":
            if self._unfinished:
                return False
            # No consumer would get the previous task.
            self._skip(self.fired.pop())
            self.fired.append(planned_ms)
        elif overlap == "queue_one" and self.row.queued_ms is None:
            self.row = self.row._replace(queued_ms=planned_ms)
            self.outcomes.append(Run(planned_ms, self._now_ms, QUEUED))
        else:
            self._skip(planned_ms)
        return True

    def _skip(self, planned_ms: int) -> None:
        self.overlapped += 1
        self.note(Run(planned_ms, self._now_ms, OVERLAPPED))

    def note(self, run: Run) -> None:
        """Add a run to the schedule's remembered runs, and to the history."""
        self.row = _with_run(self.row, run)
        self.outcomes.append(run)


def _due_occurrences(
    row: ScheduleRow, table: Timetable, now_ms: int, limit: int
) -> tuple[list[int], int, int]:
    """Return (at most ``limit`` occurrences to decide now, number of missed occurrences before
    them, the newest missed occurrence)."""
    schedule, first_ms = row.schedule, row.next_ms
    assert first_ms is not None
    window_ms = 0 if schedule.catch_up == "skip" else schedule.catch_up_ms
    oldest_ms = max(first_ms, now_ms - max(window_ms, CURRENT_MS_MAX))
    if schedule.catch_up == "all":
        due = list(islice(table.between(oldest_ms, now_ms), limit))
    else:
        newest_ms = table.newest(first_ms, now_ms)
        due = [newest_ms] if newest_ms >= oldest_ms else []
    until_ms = due[0] - 1 if due else now_ms
    if first_ms > until_ms:
        return due, 0, 0
    missed = table.count(first_ms, until_ms, COUNTED_MAX)
    return due, missed, table.newest(first_ms, until_ms)


def _timing(schedule: Schedule) -> tuple[object, ...]:
    return (
        schedule.cron, schedule.timezone, schedule.every_ms, schedule.anchor_ms,
        schedule.start_ms, schedule.end_ms, schedule.gap, schedule.fold,
    )  # fmt: skip


def _with_run(row: ScheduleRow, run: Run) -> ScheduleRow:
    return row._replace(recent=(*row.recent, run)[-RECENT_MAX:])


def _new_task(schedule: Schedule, planned_ms: int, now_ms: int) -> NewTask:
    options = schedule.options or TaskOptions()
    properties = dict(options.properties or {})
    properties[NAME_PROPERTY] = schedule.name
    properties[PLANNED_PROPERTY] = planned_ms
    asked_ms = planned_ms + jitter_of(schedule, planned_ms)
    options = options._replace(properties=properties)
    if options.within_ms is not None:
        options = options._replace(asked_ms=asked_ms)
    return schedule.topic, max(now_ms, asked_ms), schedule.body, options


def jitter_of(schedule: Schedule, planned_ms: int) -> int:
    """Return the jitter of an occurrence in ms, a function of the name and the planned time."""
    if not schedule.jitter_ms:
        return 0
    mixed = planned_ms
    for byte in schedule.name.encode():
        mixed = ((mixed ^ byte) * _MIX) % 2**64
    return (mixed >> 20) % (schedule.jitter_ms + 1)
