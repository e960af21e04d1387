"""Operations on schedules: put, list, show, pause, resume, run, backfill and delete.

A command on a schedule waits, for at most one commit, until the schedule's newest run is durable,
because the run can still be undone.

A caller's topic filter (``topic_filter``) hides the schedules of other topics, but their names stay
reserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from tickwheel.api.tasks import kept_options
from tickwheel.engine.timetables import BadTiming, Timetable
from tickwheel.errors import (
    BadRequest,
    Forbidden,
    LimitExceeded,
    NotFound,
)
from tickwheel.model.kinds import OWN_PROPERTIES, SCHEDULE_NAMES, Schedule
from tickwheel.model.policies import duration_ms
from tickwheel.model.records import MOMENT_MS_MAX, TaskOptions, size_of
from tickwheel.server import checks
from tickwheel.server.shard.names import check_new_name
from tickwheel.server.shard.new_tasks import check_stays
from tickwheel.server.shard.parts import when_free
from tickwheel.server.shard.views import Page, policy_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.api.schedules import Backfill, NamesPage, NewSchedule, ScheduleLook, ScheduleName
    from tickwheel.engine.timetables import LoadedSchedule
    from tickwheel.model.kinds import ScheduleRow
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.callers import Call, TopicFilter
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.views import ValueBytes

CATCH_UP_MS = 86_400_000
BACKFILL_MAX = 1_000
"""Maximum number of occurrences that one request backfills."""
TIMES_CHECKED = 50
"""Number of planned times of a new schedule that are checked against the minimum interval."""


@dataclass(eq=False)
class Scheduling:
    """The operations on schedules."""

    _parts: Parts
    _new_tasks: NewTasks
    _value_bytes: ValueBytes
    _check_accepting: Callable[[], None]
    """Raises an error if new tasks are currently refused."""

    def __post_init__(self) -> None:
        self._core = self._parts.core
        self._schedule_heap = self._core.schedule_heap

    # --- put -----------------------------------------------------------------------------------

    def put_schedule(self, call: Call[NewSchedule]) -> None:
        """Create or replace a schedule. The answer's ``outcome`` is "created", "updated" or
        "unchanged". Raise BadRequest, LimitExceeded, BodyTooLarge, Forbidden."""

        def put() -> None:
            self._check_visible(call.request.name, call.topic_filter)
            self._put(call)

        self._when_settled(call, call.request.name, put)

    def _check_visible(self, name: str, topic_filter: TopicFilter | None) -> None:
        """Raise Forbidden if a schedule of a topic that the caller may not use has the name."""
        existing = self._schedule_heap.by_name.get(name)
        if existing is None or topic_filter is None or topic_filter(existing.row.schedule.topic):
            return
        raise Forbidden(f"this caller may not change schedule {name}; choose another name")

    def _put(self, call: Call[NewSchedule]) -> None:
        schedules, limit = self._schedule_heap.by_name, self._parts.settings.schedules_max
        name, now_ms = call.request.name, call.now.now_ms
        if name not in schedules and len(schedules) >= limit:
            raise LimitExceeded(
                f"cannot create schedule {name}: there are already {len(schedules)} schedules;"
                f" the limit is {limit} (schedules_max)"
            )
        if name not in schedules:
            check_new_name(self._core, SCHEDULE_NAMES, name)
        schedule = self._checked(call.request, now_ms)
        check_stays(self._core, schedule.topic)
        table = self._timetable(schedule, now_ms)
        checks.storable_schedule(schedule)
        outcome = self._parts.border.act().schedules.put(schedule, table, now_ms)
        answer = self._map(schedules[name].row) | {"outcome": outcome}
        self._parts.committer.answer(call, answer)
        self._parts.wake()

    def _checked(self, request: NewSchedule, now_ms: int) -> Schedule:
        """Check the request, return its schedule. Raise the error of the first invalid field."""
        task = (request.topic, b"" if request.body is None else request.body, 0, request.task)
        topic, _, body, task_options = self._new_tasks.check_task(task, "schedule", now_ms)
        if task_options is not None and task_options.within_ms is not None:
            task_options = task_options._replace(asked_ms=None)  # each occurrence sets its own
        self._check_size(body, task_options)
        if (request.cron is None) == (request.every_ms is None):
            raise BadRequest("a schedule must have either cron or every_ms")
        if request.cron is None and request.timezone is not None:
            raise BadRequest("timezone must not be combined with every_ms, only with cron")
        if request.cron is not None and request.anchor_ms is not None:
            raise BadRequest("anchor_ms must not be combined with cron, only with every_ms")
        if request.every_ms is not None:
            self._check_interval(request.every_ms)
        catch_up_ms = CATCH_UP_MS if request.catch_up_ms is None else request.catch_up_ms
        return Schedule(
            request.name,
            topic,
            body,
            task_options,
            request.cron,
            request.timezone or "UTC",
            request.every_ms,
            self._anchor(request, now_ms),
            self._span(request.jitter_ms or 0, "jitter_ms"),
            _moment(request.start_ms, "start_ms"),
            _moment(request.end_ms, "end_ms"),
            request.runs_max,
            request.gap or "after",
            request.fold or "first",
            request.catch_up or "last",
            self._span(catch_up_ms, "catch_up_ms"),
            request.overlap or "allow",
        )

    def _check_interval(self, every_ms: int) -> None:
        least_ms = duration_ms(self._parts.settings.schedule_interval_min_s)
        if every_ms < least_ms:
            raise BadRequest(
                f"every_ms must be at least {least_ms} (schedule_interval_min_s), not {every_ms}"
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

    def _anchor(self, request: NewSchedule, now_ms: int) -> int:
        """Return the time from which intervals are counted; by default, the time at which a
        schedule with this interval was first put."""
        if request.every_ms is None:
            return 0
        if request.anchor_ms is not None:
            return checks.moment(request.anchor_ms, "anchor_ms")
        existing = self._schedule_heap.by_name.get(request.name)
        if existing is not None and existing.row.schedule.every_ms == request.every_ms:
            return existing.row.schedule.anchor_ms
        return now_ms

    def _timetable(self, schedule: Schedule, now_ms: int) -> Timetable:
        try:
            table = Timetable(schedule, is_new=True)
        except BadTiming as error:
            value = checks.shown(getattr(schedule, error.field))
            raise BadRequest(f"{error.field} {value} {error}") from None
        first_ms = table.after(now_ms)
        if first_ms is None:
            raise BadRequest("the schedule never runs: no time is planned between now and its end")
        least_ms = duration_ms(self._parts.settings.schedule_interval_min_s)
        if schedule.cron is not None and least_ms > 1_000:
            times = islice(table.between(first_ms, MOMENT_MS_MAX), TIMES_CHECKED)
            apart_ms = min((b - a for a, b in pairwise(times)), default=least_ms)
            if apart_ms < least_ms:
                raise BadRequest(
                    f"cron {checks.shown(schedule.cron)} has times only {apart_ms} ms apart; the"
                    f" minimum is {least_ms} ms (schedule_interval_min_s)"
                )
        return table

    # --- reads ---------------------------------------------------------------------------------

    def list_schedules(self, call: Call[NamesPage]) -> None:
        """Answer with a page of schedules, sorted by name."""
        after, topic_filter = call.request.after, call.topic_filter
        names = sorted(n for n in self._schedule_heap.by_name if after is None or n > after)
        rows = (self._schedule_heap.by_name[name].row for name in names)
        maps = (
            self._map(row)
            for row in rows
            if topic_filter is None or topic_filter(row.schedule.topic)
        )
        page = Page(self._parts, call.request.limit, self._value_bytes)
        self._parts.committer.answer(call, page.answer(maps, "schedules", "name"))

    def show_schedule(self, call: Call[ScheduleLook]) -> None:
        """Answer with a schedule, its next planned times, and its newest runs with the states of
        their tasks. Raise NotFound, Overloaded."""
        schedule = self._find(call.request.name, call.topic_filter)
        row, table, count = schedule.row, schedule.table, call.request.next
        first_ms = row.next_ms
        planned_ms: list[int] = []
        if first_ms is not None:
            planned_ms = list(islice(table.between(first_ms, MOMENT_MS_MAX), count))
        if row.schedule.runs_max is not None:
            planned_ms = planned_ms[: row.schedule.runs_max - row.runs]
        ids = list(dict.fromkeys(run.id for run in row.recent if run.id))
        states: dict[int, str] = {}
        control = self._parts.engine.control

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            for index in indexes:
                task = snapshots.get(ids[index])
                state = control.absent(ids[index]) if task is None else control.state(task)
                states[ids[index]] = str(state)

        def done() -> None:
            answer = self._map(row) | {
                "planned_ms": planned_ms,
                "recent": [
                    run._asdict() | {"id": run.id or None, "state": states.get(run.id)}
                    for run in row.recent
                ],
            }
            self._parts.committer.answer(call, answer)

        self._parts.commands.put(call.caller, call.refuse, ids, act, done)

    # --- changes -------------------------------------------------------------------------------

    def pause_schedule(self, call: Call[ScheduleName]) -> None:
        """Pause a schedule, so that it does not fire. Raise NotFound."""
        self._pause(call, paused=True)

    def resume_schedule(self, call: Call[ScheduleName]) -> None:
        """Resume a schedule. Its catch-up setting determines what happens to missed runs. Raise
        NotFound."""
        self._pause(call, paused=False)

    def _pause(self, call: Call[ScheduleName], *, paused: bool) -> None:
        def act(entry: LoadedSchedule) -> None:
            self._parts.border.act().schedules.pause(entry, paused=paused)
            self._parts.committer.answer(call, self._map(entry.row))
            self._parts.wake()

        self._change_when_settled(call, act)

    def delete_schedule(self, call: Call[ScheduleName]) -> None:
        """Delete a schedule, but not its tasks. Raise NotFound."""

        def act(entry: LoadedSchedule) -> None:
            self._parts.border.act().schedules.delete(entry)
            self._parts.committer.answer(call, self._map(entry.row))

        self._change_when_settled(call, act)

    def run_schedule(self, call: Call[ScheduleName]) -> None:
        """Enqueue a task of a schedule at once; the sink's ``accepted`` gets its id. Raise
        NotFound, or any error of an enqueue."""

        def act(entry: LoadedSchedule) -> None:
            self._check_room(entry, 1)
            schedules = self._parts.border.act().schedules
            schedules.run(entry, call.replies, call.number, call.now.now_ms)
            self._parts.wake()

        self._change_when_settled(call, act)

    def backfill_schedule(self, call: Call[Backfill]) -> None:
        """Enqueue a task for each occurrence from ``from_ms`` up to but excluding ``to_ms``. The
        sink's ``accepted`` gets their ids. Raise NotFound, or any error of an enqueue."""
        from_ms = checks.moment(call.request.from_ms, "from_ms")
        to_ms = checks.moment(call.request.to_ms, "to_ms", from_ms)

        def act(entry: LoadedSchedule) -> None:
            table, most = entry.table, BACKFILL_MAX + 1
            # Counting is cheaper than computing the times, and is limited to ``YEARS_MAX`` years.
            count, times_ms = table.count(from_ms, to_ms - 1, most), list[int]()
            if count < most:
                times_ms = list(islice(table.between(from_ms, to_ms - 1), most))
            if most in (count, len(times_ms)):
                raise LimitExceeded(
                    f"more than {BACKFILL_MAX} (BACKFILL_MAX) occurrences are planned between"
                    " from_ms and to_ms; choose a shorter range"
                )
            if not times_ms:
                raise BadRequest("no occurrence is planned between from_ms and to_ms")
            self._check_room(entry, len(times_ms))
            schedules = self._parts.border.act().schedules
            schedules.backfill(entry, times_ms, call.replies, call.number, call.now.now_ms)
            self._parts.wake()

        self._change_when_settled(call, act)

    def _check_room(self, entry: LoadedSchedule, count: int) -> None:
        self._check_accepting()
        self._new_tasks.check_room([(entry.row.schedule.topic, 0, b"", None)] * count)

    # --- shared --------------------------------------------------------------------------------

    def _find(self, name: str, topic_filter: TopicFilter | None) -> LoadedSchedule:
        entry = self._schedule_heap.by_name.get(name)
        if entry is None or (
            topic_filter is not None and not topic_filter(entry.row.schedule.topic)
        ):
            raise NotFound(f"there is no schedule {name}")
        return entry

    def _change_when_settled(self, call: Call[Any], act: Callable[[LoadedSchedule], None]) -> None:
        """Call ``act`` with the schedule once its newest run is durable. Raise NotFound."""
        name, topic_filter = call.request.name, call.topic_filter
        self._find(name, topic_filter)
        self._when_settled(call, name, lambda: act(self._find(name, topic_filter)))

    def _when_settled(self, call: Call[Any], name: str, act: Callable[[], None]) -> None:
        def is_free() -> bool:
            entry = self._schedule_heap.by_name.get(name)
            return entry is None or not entry.staged

        when_free(self._parts, call.caller, "a command on a schedule", is_free, act, call.refuse)

    def _map(self, row: ScheduleRow) -> dict[str, Any]:
        """Return a schedule as the map that all answers use."""
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
