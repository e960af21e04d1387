"""Recurring schedules: put, list, show, pause, resume, run, backfill, delete.

A command on a schedule with a run that is not durable yet waits for that: a run may still be
undone, and nothing may rest on it. That wait is one commit.

``only``: a schedule of another topic is as if it were not there; but its name is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from tickwheel.api.tasks import kept_options
from tickwheel.engine.timetables import BadTiming, Timetable
from tickwheel.errors import (
    BacklogFull,
    BadRequest,
    Forbidden,
    LimitExceeded,
    NotFound,
)
from tickwheel.model.kinds import OF_SCHEDULE, OWN_PROPERTIES, Schedule
from tickwheel.model.records import MOMENT_MS_MAX, TaskOptions, size_of
from tickwheel.server import checks
from tickwheel.server.shard.names import check_new_name
from tickwheel.server.shard.new_tasks import check_stays
from tickwheel.server.shard.parts import when_free
from tickwheel.server.shard.views import Page, policy_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.api.schedules import Backfill, NamesPage, NewSchedule, ScheduleLook, ScheduleName
    from tickwheel.engine.timetables import Planned
    from tickwheel.model.kinds import ScheduleRow
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.callers import Ask, Only
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.views import ValueBytes

CATCH_UP_MS = 86_400_000
BACKFILL_MAX = 1_000
"""How many occurrences one request may backfill."""
LOOKED_AT = 50
"""How many planned times of a new schedule are checked against the minimal distance."""


@dataclass(eq=False)
class Scheduling:
    """The operations on schedules."""

    _parts: Parts
    _new_tasks: NewTasks
    _value_bytes: ValueBytes
    _check_door: Callable[[], None]
    """Raises what keeps new tasks out."""

    def __post_init__(self) -> None:
        self._core = self._parts.core
        self._schedule_heap = self._core.schedule_heap

    # --- put -----------------------------------------------------------------------------------

    def put_schedule(self, ask: Ask[NewSchedule]) -> None:
        """Make a schedule, or change it to what is given; the answer has ``outcome``: "created",
        "updated" or "unchanged". Raises BadRequest, LimitExceeded, BodyTooLarge, Forbidden."""

        def put() -> None:
            self._check_seen(ask.request, ask.only)
            self._put(ask)

        self._when_settled(ask, ask.request.name, put)

    def _check_seen(self, asked: NewSchedule, only: Only | None) -> None:
        """Raises Forbidden if the schedule is, or would be, of a topic that must not be touched."""
        if only is None:
            return
        name, topic = asked.name, asked.topic
        known = self._schedule_heap.known.get(name)
        if not only(topic):
            raise Forbidden(f"schedules of topic {topic} are not this caller's to make")
        if known is not None and not only(known.row.schedule.topic):
            raise Forbidden(f"schedule {name} is not this caller's to change; choose another name")

    def _put(self, ask: Ask[NewSchedule]) -> None:
        known, limit = self._schedule_heap.known, self._parts.settings.schedules_max
        name, now_ms = ask.request.name, ask.now.now_ms
        if name not in known and len(known) >= limit:
            raise LimitExceeded(
                f"schedule {name} is new and there are {len(known)} schedules; the limit is"
                f" {limit} (schedules_max)"
            )
        if name not in known:
            check_new_name(self._core, OF_SCHEDULE, name)
        schedule = self._checked(ask.request, now_ms)
        check_stays(self._core, schedule.topic)
        table = self._timetable(schedule, now_ms)
        checks.storable_schedule(schedule)
        outcome = self._parts.border.act().schedules.put(schedule, table, now_ms)
        answer = self._map(known[name].row) | {"outcome": outcome}
        self._parts.committer.answer(ask, answer)
        self._parts.wake()

    def _checked(self, asked: NewSchedule, now_ms: int) -> Schedule:
        """The checked schedule; raises what is wrong with the first bad field."""
        given = (asked.topic, b"" if asked.body is None else asked.body, 0, asked.task)
        topic, _, body, task_options = self._new_tasks.careful(given, "schedule", now_ms)
        if task_options is not None and task_options.within_ms is not None:
            task_options = task_options._replace(asked_ms=None)  # each occurrence has its own
        self._check_size(body, task_options)
        if (asked.cron is None) == (asked.every_ms is None):
            raise BadRequest("a schedule must have either cron or every_ms")
        if asked.cron is None and asked.timezone is not None:
            raise BadRequest("timezone goes with cron, not with every_ms")
        if asked.cron is not None and asked.anchor_ms is not None:
            raise BadRequest("anchor_ms goes with every_ms, not with cron")
        if asked.every_ms is not None:
            self._check_interval(asked.every_ms)
        catch_up_ms = CATCH_UP_MS if asked.catch_up_ms is None else asked.catch_up_ms
        return Schedule(
            asked.name,
            topic,
            body,
            task_options,
            asked.cron,
            asked.timezone or "UTC",
            asked.every_ms,
            self._anchor(asked, now_ms),
            self._span(asked.jitter_ms or 0, "jitter_ms"),
            _moment(asked.start_ms, "start_ms"),
            _moment(asked.end_ms, "end_ms"),
            asked.runs_max,
            asked.gap or "after",
            asked.fold or "first",
            asked.catch_up or "last",
            self._span(catch_up_ms, "catch_up_ms"),
            asked.overlap or "allow",
        )

    def _check_interval(self, every_ms: int) -> None:
        least_ms = int(self._parts.settings.schedule_interval_min_s * 1000)
        if every_ms < least_ms:
            raise BadRequest(
                f"every_ms is {every_ms}; the minimum is {least_ms} (schedule_interval_min_s)"
            )
        self._span(every_ms, "every_ms")

    def _span(self, value_ms: int, field: str) -> int:
        return checks.integer(value_ms, field, 0, self._parts.limits.delay_ms_max)

    def _check_size(self, body: bytes, options: TaskOptions | None) -> None:
        limits, bytes_max = self._parts.limits, self._parts.settings.schedule_bytes_max
        if size_of(body, options) > bytes_max:
            raise LimitExceeded(
                f"schedule has {size_of(body, options)} bytes with all its fields; the limit is"
                f" {bytes_max} (schedule_bytes_max)"
            )
        count = len(options.properties or ()) if options is not None else 0
        if count + OWN_PROPERTIES > limits.properties_max:
            raise LimitExceeded(
                f"schedule.props has {count} entries, and its tasks get {OWN_PROPERTIES} more; the"
                f" limit is {limits.properties_max} (properties_max)"
            )

    def _anchor(self, asked: NewSchedule, now_ms: int) -> int:
        """The moment from which an interval counts; by default when it was first given."""
        if asked.every_ms is None:
            return 0
        if asked.anchor_ms is not None:
            return checks.moment(asked.anchor_ms, "anchor_ms")
        known = self._schedule_heap.known.get(asked.name)
        if known is not None and known.row.schedule.every_ms == asked.every_ms:
            return known.row.schedule.anchor_ms
        return now_ms

    def _timetable(self, schedule: Schedule, now_ms: int) -> Timetable:
        try:
            table = Timetable(schedule, is_new=True)
        except BadTiming as error:
            value = checks.shown(getattr(schedule, error.field))
            raise BadRequest(f"{error.field} {value} {error}") from None
        first_ms = table.after(now_ms)
        if first_ms is None:
            raise BadRequest("it never runs: nothing is planned between now and its end")
        least_ms = int(self._parts.settings.schedule_interval_min_s * 1000)
        if schedule.cron is not None and least_ms > 1_000:
            times = islice(table.between(first_ms, MOMENT_MS_MAX), LOOKED_AT)
            apart_ms = min((b - a for a, b in pairwise(times)), default=least_ms)
            if apart_ms < least_ms:
                raise BadRequest(
                    f"cron {checks.shown(schedule.cron)} runs every {apart_ms} ms; the minimum is"
                    f" {least_ms} (schedule_interval_min_s)"
                )
        return table

    # --- looking -------------------------------------------------------------------------------

    def list_schedules(self, ask: Ask[NamesPage]) -> None:
        """Answer a page of schedules by name."""
        after, only = ask.request.after, ask.only
        names = sorted(n for n in self._schedule_heap.known if after is None or n > after)
        rows = (self._schedule_heap.known[name].row for name in names)
        seen = (self._map(row) for row in rows if only is None or only(row.schedule.topic))
        page = Page(self._parts, ask.request.limit, self._value_bytes)
        self._parts.committer.answer(ask, page.answer(seen, "schedules", "name"))

    def show_schedule(self, ask: Ask[ScheduleLook]) -> None:
        """Answer a schedule, its next planned times and its newest runs with what became of their
        tasks. Raises NotFound, Overloaded."""
        planned_one = self._found(ask.request.name, ask.only)
        row, table, count = planned_one.row, planned_one.table, ask.request.next
        first_ms = row.next_ms
        planned: list[int] = []
        if first_ms is not None:
            planned = list(islice(table.between(first_ms, MOMENT_MS_MAX), count))
        if row.schedule.runs_max is not None:
            planned = planned[: row.schedule.runs_max - row.runs]
        ids = list(dict.fromkeys(run.id for run in row.recent if run.id))
        states: dict[int, str] = {}
        control = self._parts.engine.control

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            for index in some:
                task = known.get(ids[index])
                state = control.absent(ids[index]) if task is None else control.state(task)
                states[ids[index]] = str(state)

        def done() -> None:
            answer = self._map(row) | {
                "planned_ms": planned,
                "recent": [
                    run._asdict() | {"id": run.id or None, "state": states.get(run.id)}
                    for run in row.recent
                ],
            }
            self._parts.committer.answer(ask, answer)

        self._parts.commands.put(ask.caller, ask.refuse, ids, act, done)

    # --- changing ------------------------------------------------------------------------------

    def pause_schedule(self, ask: Ask[ScheduleName]) -> None:
        """Pause a schedule, which fires nothing then. Raises NotFound."""
        self._pause(ask, paused=True)

    def resume_schedule(self, ask: Ask[ScheduleName]) -> None:
        """Resume a schedule: what was missed is for its catch-up. Raises NotFound."""
        self._pause(ask, paused=False)

    def _pause(self, ask: Ask[ScheduleName], *, paused: bool) -> None:
        def act(planned: Planned) -> None:
            self._parts.border.act().schedules.pause(planned, paused=paused)
            self._parts.committer.answer(ask, self._map(planned.row))
            self._parts.wake()

        self._on(ask, act)

    def delete_schedule(self, ask: Ask[ScheduleName]) -> None:
        """Delete a schedule; its tasks stay. Raises NotFound."""

        def act(planned: Planned) -> None:
            self._parts.border.act().schedules.delete(planned)
            self._parts.committer.answer(ask, self._map(planned.row))

        self._on(ask, act)

    def run_schedule(self, ask: Ask[ScheduleName]) -> None:
        """Make a task of a schedule at once; the sink's ``accepted`` gets its id. Raises as an
        enqueue, and NotFound."""

        def act(planned: Planned) -> None:
            self._check_room(1)
            schedules = self._parts.border.act().schedules
            schedules.run(planned, ask.replies, ask.number, ask.now.now_ms)
            self._parts.wake()

        self._on(ask, act)

    def backfill_schedule(self, ask: Ask[Backfill]) -> None:
        """Make a task for each occurrence from ``from_ms`` up to, and without, ``to_ms``; the
        sink's ``accepted`` gets their ids. Raises as an enqueue, and NotFound."""
        from_ms = checks.moment(ask.request.from_ms, "from_ms")
        to_ms = checks.moment(ask.request.to_ms, "to_ms", from_ms)

        def act(planned: Planned) -> None:
            table, most = planned.table, BACKFILL_MAX + 1
            # Counting is cheaper than finding them, and ends after so many years.
            count, times_ms = table.count(from_ms, to_ms - 1, most), list[int]()
            if count < most:
                times_ms = list(islice(table.between(from_ms, to_ms - 1), most))
            if most in (count, len(times_ms)):
                raise LimitExceeded(
                    f"more than {BACKFILL_MAX} occurrences are planned there (BACKFILL_MAX); name"
                    " a shorter range"
                )
            if not times_ms:
                raise BadRequest("no occurrence is planned there")
            self._check_room(len(times_ms))
            schedules = self._parts.border.act().schedules
            schedules.backfill(planned, times_ms, ask.replies, ask.number, ask.now.now_ms)
            self._parts.wake()

        self._on(ask, act)

    def _check_room(self, count: int) -> None:
        self._check_door()
        if count > self._core.room:
            raise BacklogFull(f"there is no room for {count} tasks more (tasks_max, scheduled_max)")

    # --- what these have in common -------------------------------------------------------------

    def _found(self, name: str, only: Only | None) -> Planned:
        found = self._schedule_heap.known.get(name)
        if found is None or (only is not None and not only(found.row.schedule.topic)):
            raise NotFound(f"there is no schedule {name}")
        return found

    def _on(self, ask: Ask[Any], act: Callable[[Planned], None]) -> None:
        """Run ``act`` on a schedule that is there, once nothing of it is under way."""
        name, only = ask.request.name, ask.only
        self._found(name, only)
        self._when_settled(ask, name, lambda: act(self._found(name, only)))

    def _when_settled(self, ask: Ask[Any], name: str, act: Callable[[], None]) -> None:
        def is_free() -> bool:
            planned = self._schedule_heap.known.get(name)
            return planned is None or not planned.staged

        when_free(self._parts, ask.caller, "a command on a schedule", is_free, act, ask.refuse)

    def _map(self, row: ScheduleRow) -> dict[str, Any]:
        """A schedule as every answer has it."""
        schedule = row.schedule._asdict()
        options = schedule.pop("options") or TaskOptions()
        kept = {field.name: getattr(options, field.name) for field, _ in kept_options()}
        task = kept | {
            "priority": options.priority or None,
            "retry": policy_map(options.retry, self._core.policies),
        }
        return schedule | {
            "task": {name: value for name, value in task.items() if value is not None},
            "paused": row.paused,
            "next_ms": row.next_ms,
            "runs": row.runs,
            "queued_ms": row.queued_ms,
        }


def _moment(value_ms: int | None, field: str) -> int | None:
    return None if value_ms is None else checks.moment(value_ms, field)
