"""Recurring schedules: put, list, show, pause, resume, run, backfill, delete.

A command on a schedule with a run that is not durable yet waits for that: a run may still be
undone, and nothing may rest on it. That wait is one commit.

``only``: a schedule of another topic is as if it were not there; but its name is taken.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from tickwheel.engine.timetables import CRON_LENGTH_MAX, BadTiming, Timetable
from tickwheel.errors import (
    BacklogFull,
    BadRequest,
    Forbidden,
    LimitExceeded,
    NotFound,
    TickwheelError,
)
from tickwheel.model.records import MOMENT_MS_MAX, TaskOptions, size_of
from tickwheel.model.schedules import CATCH_UPS, FOLDS, GAPS, OVERLAPS, OWN_PROPERTIES, Schedule
from tickwheel.server import checks, policies
from tickwheel.server.shard import storable
from tickwheel.server.shard.new_tasks import check_stays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.clock import Now
    from tickwheel.engine.timetables import Planned
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.model.schedules import Run, ScheduleRow
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.views import ValueBytes

PUT_OPTIONS = (
    "topic", "body", "task", "cron", "timezone", "every_ms", "anchor_ms", "jitter_ms", "start_ms",
    "end_ms", "runs_max", "gap", "fold", "catch_up", "catch_up_ms", "overlap",
)  # fmt: skip
LIST_OPTIONS = ("after", "limit")
PAGE_MAX = 1_000
PAGE_DEFAULT = 100
NEXT_MAX = 100
"""How many planned times one request may ask for."""
NEXT_DEFAULT = 5
BACKFILL_MAX = 1_000
"""How many occurrences one request may backfill."""
RUNS_MAX = 2**53 - 1
LOOKED_AT = 50
"""How many planned times of a new schedule are checked against the minimal distance."""


class Scheduling:
    """The operations on schedules."""

    def __init__(
        self, shard: Shard, value_bytes: ValueBytes, check_door: Callable[[], None]
    ) -> None:
        """``check_door`` raises what keeps new tasks out."""
        self._shard = shard
        self._core = shard.core
        self._schedule_heap = shard.core.schedule_heap
        self._value_bytes = value_bytes
        self._check_door = check_door

    # --- put -----------------------------------------------------------------------------------

    def put_schedule(
        self,
        caller: Caller,
        request: int,
        name: object,
        options: dict[str, Any],
        now: Now,
        *,
        only: Only | None = None,
    ) -> None:
        """Make a schedule, or change it to what is given; the answer has ``outcome``: "created",
        "updated" or "unchanged". Raises BadRequest, LimitExceeded, BodyTooLarge, Forbidden."""
        checked = checks.name(name, "name")

        def put() -> None:
            self._check_seen(checked, options.get("topic"), only)
            self._put(caller, request, checked, options, now)

        self._when_settled(caller, request, checked, put)

    def _check_seen(self, name: str, topic: object, only: Only | None) -> None:
        """Raises Forbidden if the schedule is, or would be, of a topic that must not be touched."""
        if only is None:
            return
        known = self._schedule_heap.known.get(name)
        if not only(checks.name(topic, "topic")):
            raise Forbidden(f"schedules of topic {topic} are not this caller's to make")
        if known is not None and not only(known.row.schedule.topic):
            raise Forbidden(f"schedule {name} is not this caller's to change; choose another name")

    def _put(
        self, caller: Caller, request: int, name: str, options: dict[str, Any], now: Now
    ) -> None:
        known, limit = self._schedule_heap.known, self._shard.settings.schedules_max
        if name not in known and len(known) >= limit:
            raise LimitExceeded(
                f"schedule {name} is new and there are {len(known)} schedules; the limit is"
                f" {limit} (schedules_max)"
            )
        schedule = self._checked(name, options, now.now_ms)
        check_stays(self._core, schedule.topic)
        table = self._timetable(schedule, now.now_ms)
        storable.check_schedule(schedule)
        outcome = self._shard.border.act().schedules.put(schedule, table, now.now_ms)
        answer = self._map(known[name].row) | {"outcome": outcome}
        self._shard.committer.reply(caller.replies, request, answer)
        self._shard.wake()

    def _checked(self, name: str, given: dict[str, Any], now_ms: int) -> Schedule:
        """The checked schedule; raises what is wrong with the first bad field."""
        task = (given.get("topic"), given.get("body", b""), 0, given.get("task"))
        topic, _, body, task_options = self._shard.new_tasks.careful(task, "schedule", now_ms)
        if task_options is not None and task_options.within_ms is not None:
            task_options = task_options._replace(asked_ms=None)  # each occurrence has its own
        self._check_size(body, task_options)
        cron, every_ms = given.get("cron"), given.get("every_ms")
        if (cron is None) == (every_ms is None):
            raise BadRequest("a schedule must have either cron or every_ms")
        if cron is None and given.get("timezone") is not None:
            raise BadRequest("timezone goes with cron, not with every_ms")
        if cron is not None and given.get("anchor_ms") is not None:
            raise BadRequest("anchor_ms goes with every_ms, not with cron")
        limits = self._shard.limits
        if every_ms is not None:
            least_ms = int(self._shard.settings.schedule_interval_min_s * 1000)
            if type(every_ms) is int and every_ms < least_ms:
                raise BadRequest(
                    f"every_ms is {every_ms}; the minimum is {least_ms} (schedule_interval_min_s)"
                )
            checks.integer(every_ms, "every_ms", least_ms, limits.delay_ms_max)
        return Schedule(
            name,
            topic,
            body,
            task_options,
            None if cron is None else checks.text(cron, "cron", CRON_LENGTH_MAX),
            checks.text(given.get("timezone") or "UTC", "timezone", limits.key_length_max),
            every_ms,
            self._anchor(name, every_ms, given.get("anchor_ms"), now_ms),
            checks.integer(given.get("jitter_ms", 0), "jitter_ms", 0, limits.delay_ms_max),
            _moment(given, "start_ms"),
            _moment(given, "end_ms"),
            _optional(given, "runs_max", 1, RUNS_MAX),
            _word(given, "gap", GAPS, "after"),
            _word(given, "fold", FOLDS, "first"),
            _word(given, "catch_up", CATCH_UPS, "last"),
            checks.integer(
                given.get("catch_up_ms", 86_400_000), "catch_up_ms", 0, limits.delay_ms_max
            ),
            _word(given, "overlap", OVERLAPS, "allow"),
        )

    def _check_size(self, body: bytes, options: TaskOptions | None) -> None:
        limits, bytes_max = self._shard.limits, self._shard.settings.schedule_bytes_max
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

    def _anchor(self, name: str, every_ms: int | None, anchor_ms: object, now_ms: int) -> int:
        """The moment from which an interval counts; by default when it was first given."""
        if every_ms is None:
            return 0
        if anchor_ms is not None:
            return checks.moment(anchor_ms, "anchor_ms")
        known = self._schedule_heap.known.get(name)
        if known is not None and known.row.schedule.every_ms == every_ms:
            return known.row.schedule.anchor_ms
        return now_ms

    def _timetable(self, schedule: Schedule, now_ms: int) -> Timetable:
        try:
            table = Timetable(schedule)
        except BadTiming as error:
            value = checks.shown(getattr(schedule, error.field))
            raise BadRequest(f"{error.field} {value} {error}") from None
        first_ms = table.after(now_ms)
        if first_ms is None:
            raise BadRequest("it never runs: nothing is planned between now and its end")
        least_ms = int(self._shard.settings.schedule_interval_min_s * 1000)
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

    def list_schedules(
        self, caller: Caller, request: int, options: dict[str, Any], *, only: Only | None = None
    ) -> None:
        """A page of schedules by name; ``next`` of the answer is ``after`` of the next page.
        ``options``: ``after``, ``limit``. Raises BadRequest."""
        after = options.get("after")
        if after is not None:
            checks.name(after, "after")
        limit = checks.integer(options.get("limit", PAGE_DEFAULT), "limit", 1, PAGE_MAX)
        bytes_left = self._shard.limits.frame_bytes_max // 2
        found: list[dict[str, Any]] = []
        following: str | None = None
        for name in sorted(n for n in self._schedule_heap.known if after is None or n > after):
            row = self._schedule_heap.known[name].row
            if only is not None and not only(row.schedule.topic):
                continue
            one = self._map(row)
            bytes_left -= self._value_bytes(one)
            if len(found) >= limit or (found and bytes_left < 0):
                following = found[-1]["name"]
                break
            found.append(one)
        answer = {"schedules": found, "next": following}
        self._shard.committer.reply(caller.replies, request, answer)

    def show_schedule(
        self,
        caller: Caller,
        request: int,
        name: object,
        options: dict[str, Any],
        now: Now,
        *,
        only: Only | None = None,
    ) -> None:
        """Answer a schedule, its next planned times (``next``: how many) and its newest runs with
        what became of their tasks. Raises BadRequest, NotFound, Overloaded."""
        row, table = self._found(name, only).row, self._found(name, only).table
        count = checks.integer(options.get("next", NEXT_DEFAULT), "next", 0, NEXT_MAX)
        first_ms = row.next_ms
        planned: list[int] = []
        if first_ms is not None:
            planned = list(islice(table.between(first_ms, MOMENT_MS_MAX), count))
        if row.schedule.runs_max is not None:
            planned = planned[: row.schedule.runs_max - row.runs]
        ids = list(dict.fromkeys(run.id for run in row.recent if run.id))
        states: dict[int, str] = {}
        control = self._shard.engine.control

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            for index in some:
                task = known.get(ids[index])
                state = control.absent(ids[index]) if task is None else control.state(task)
                states[ids[index]] = str(state)

        def done() -> None:
            answer = self._map(row) | {
                "next": planned,
                "recent": [_run_map(run, states) for run in row.recent],
            }
            self._shard.committer.reply(caller.replies, request, answer)

        self._shard.commands.put(caller, request, ids, act, done)

    # --- changing ------------------------------------------------------------------------------

    def pause_schedule(
        self,
        caller: Caller,
        request: int,
        name: object,
        *,
        paused: bool,
        only: Only | None = None,
    ) -> None:
        """Pause a schedule, which fires nothing then, or resume it. Raises BadRequest, NotFound."""

        def act(planned: Planned) -> None:
            self._shard.border.act().schedules.pause(planned, paused=paused)
            self._shard.committer.reply(caller.replies, request, self._map(planned.row))
            self._shard.wake()

        self._on(caller, request, name, only, act)

    def delete_schedule(
        self, caller: Caller, request: int, name: object, *, only: Only | None = None
    ) -> None:
        """Delete a schedule; its tasks stay. Raises BadRequest, NotFound."""

        def act(planned: Planned) -> None:
            self._shard.border.act().schedules.delete(planned)
            self._shard.committer.reply(caller.replies, request, self._map(planned.row))

        self._on(caller, request, name, only, act)

    def run_schedule(
        self, caller: Caller, request: int, name: object, now: Now, *, only: Only | None = None
    ) -> None:
        """Make a task of a schedule at once; the sink's ``accepted`` gets its id. Raises as an
        enqueue, and NotFound."""

        def act(planned: Planned) -> None:
            self._check_room(1)
            schedules = self._shard.border.act().schedules
            schedules.run(planned, caller.replies, request, now.now_ms)
            self._shard.wake()

        self._on(caller, request, name, only, act)

    def backfill_schedule(
        self,
        caller: Caller,
        request: int,
        name: object,
        options: dict[str, Any],
        now: Now,
        *,
        only: Only | None = None,
    ) -> None:
        """Make a task for each occurrence from ``from_ms`` up to, and without, ``to_ms``; the
        sink's ``accepted`` gets their ids. Raises as an enqueue, and NotFound."""
        from_ms = checks.moment(options.get("from_ms"), "from_ms")
        to_ms = checks.moment(options.get("to_ms"), "to_ms", from_ms)

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
            schedules = self._shard.border.act().schedules
            schedules.backfill(planned, times_ms, caller.replies, request, now.now_ms)
            self._shard.wake()

        self._on(caller, request, name, only, act)

    def _check_room(self, count: int) -> None:
        self._check_door()
        if count > self._core.room:
            raise BacklogFull(f"there is no room for {count} tasks more (tasks_max, pending_max)")

    # --- what these have in common -------------------------------------------------------------

    def _found(self, name: object, only: Only | None) -> Planned:
        checked = checks.name(name, "name")
        found = self._schedule_heap.known.get(checked)
        if found is None or (only is not None and not only(found.row.schedule.topic)):
            raise NotFound(f"there is no schedule {checked}")
        return found

    def _on(
        self,
        caller: Caller,
        request: int,
        name: object,
        only: Only | None,
        act: Callable[[Planned], None],
    ) -> None:
        """Run ``act`` on a schedule that is there, once nothing of it is under way."""
        found = self._found(name, only)
        self._when_settled(caller, request, found.name, lambda: act(self._found(name, only)))

    def _when_settled(
        self, caller: Caller, request: int, name: str, act: Callable[[], None]
    ) -> None:
        planned = self._schedule_heap.known.get(name)
        if planned is None or not planned.staged:
            act()
            return

        def again() -> None:
            if not caller.is_open:
                return
            border = self._shard.border
            border.begin()
            try:
                self._when_settled(caller, request, name, act)
            except TickwheelError as error:
                caller.refuse(request, error)
            except Exception as error:
                caller.refuse(request, border.contain("a command on a schedule", error))

        self._shard.committer.after_all(again)

    def _map(self, row: ScheduleRow) -> dict[str, Any]:
        """A schedule as every answer has it."""
        schedule = row.schedule._asdict()
        options = schedule.pop("options") or TaskOptions()
        task = {
            "key": options.key,
            "tag": options.tag,
            "properties": options.properties,
            "priority": options.priority or None,
            "ttl_ms": options.ttl_ms,
            "within_ms": options.within_ms,
            "order_key": options.order_key,
            "retry": policies.policy_map(options.retry, self._core.policies),
        }
        return schedule | {
            "task": {name: value for name, value in task.items() if value is not None},
            "paused": row.paused,
            "next_ms": row.next_ms,
            "runs": row.runs,
            "queued_ms": row.queued_ms,
        }


def _run_map(run: Run, states: dict[int, str]) -> dict[str, Any]:
    return run._asdict() | {"id": run.id or None, "state": states.get(run.id)}


def _moment(given: dict[str, Any], field: str) -> int | None:
    return _optional(given, field, 0, MOMENT_MS_MAX)


def _optional(given: dict[str, Any], field: str, low: int, high: int) -> int | None:
    value = given.get(field)
    return None if value is None else checks.integer(value, field, low, high)


def _word(given: dict[str, Any], field: str, known: tuple[str, ...], default: str) -> str:
    value = given.get(field, default)
    if value not in known:
        checks.wrong(field, f"one of {', '.join(known)}", value)
    return str(value)
