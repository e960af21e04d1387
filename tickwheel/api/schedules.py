"""Recurring schedules: put, listed, shown, paused, run, backfilled, deleted."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import BODY, FLAG, ID, KEY, NAME, Choice, Moment, Span, Text, Whole
from tickwheel.api.shapes import REQUIRED, Answer, Block, Request, called, maybe_when, when
from tickwheel.api.tasks import PAGE, AcceptedIds, ScheduledTaskFields
from tickwheel.api.times import moment
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Over, Right, Unique, Verb
from tickwheel.model.values import INTEGER_MAX, SHARD_BITS

CRON_LENGTH_MAX: Final = 255
RUNS_MAX: Final = 2**53 - 1
NEXT_MAX: Final = 100
"""How many planned times one request may ask for."""


class ScheduleName(Request):
    """The request names a schedule."""

    name: Annotated[str, NAME, "The name of the schedule."]


class NewSchedule(ScheduleName):
    """A recurring schedule: ``cron`` with ``timezone``, or ``every_ms``. Its operation checks the
    fields together, with the daemon's settings."""

    topic: Annotated[str, NAME, "The topic of its tasks."] = called("topic", default=REQUIRED)
    body: Annotated[bytes | None, BODY, "The body of its tasks; by default empty."] = None
    task: Annotated[
        Mapping[str, Any] | None,
        Block(ScheduledTaskFields),
        "The options of its tasks: key, tag, properties, priority, … as of an enqueued task.",
    ] = None
    cron: Annotated[
        str | None,
        Text(CRON_LENGTH_MAX),
        "A cron expression: five fields, six with seconds first, or @daily, …",
    ] = None
    timezone: Annotated[str | None, KEY, "The IANA time zone of cron; by default UTC."] = None
    every_ms: Annotated[int | None, Span(), "The interval."] = None
    anchor_ms: Annotated[
        int | None,
        Moment(),
        "The moment that the interval is counted from; by default when the schedule was first put.",
    ] = None
    jitter_ms: Annotated[
        int | None, Span(), "The longest time by which a task is due after its planned time."
    ] = None
    start_ms: Annotated[int | None, Moment(), "Nothing is planned before."] = None
    end_ms: Annotated[int | None, Moment(), "Nothing is planned after."] = None
    runs_max: Annotated[
        int | None, Whole(1, RUNS_MAX), "The most runs; without it there is no limit."
    ] = None
    gap: Annotated[
        str | None,
        Choice("Gap", "after", "skip"),
        "The rule for a local time that the clock skips.",
    ] = None
    fold: Annotated[
        str | None,
        Choice("Fold", "first", "second", "both"),
        "Which one of a local time that comes twice holds.",
    ] = None
    catch_up: Annotated[
        str | None,
        Choice("CatchUp", "last", "skip", "all"),
        "Which missed occurrences are made up for.",
    ] = None
    catch_up_ms: Annotated[
        int | None,
        Span(),
        "The age beyond which no missed occurrence is made up for; by default a day.",
    ] = called("catch_up_window")
    overlap: Annotated[
        str | None,
        Choice("Overlap", "allow", "skip", "queue_one", "cancel_previous"),
        "What happens while the task before is unfinished.",
    ] = None


class ScheduleLook(ScheduleName):
    """The request asks for a schedule with its next times."""

    next: Annotated[int, Whole(0, NEXT_MAX), "How many planned times to answer."] = called(
        "planned", default=5
    )


class Backfill(ScheduleName):
    """The request asks for the occurrences from ``from_ms`` up to, and without, ``to_ms``."""

    from_ms: Annotated[int, Moment(), "The first moment."] = called("start", default=REQUIRED)
    to_ms: Annotated[int, Moment(), "The first moment after the time that is meant."] = called(
        "end", default=REQUIRED
    )


class ClaimName(Request):
    """The request claims a name for a shard, ends a claim that nothing was made of, or, at the
    shard that it was claimed for, says under which claim something will be made."""

    name: Annotated[str, NAME, "The name to claim."]
    topic: Annotated[str, NAME, "The topic of the tasks."] = called("topic", default=REQUIRED)
    shard: Annotated[int, Whole(0, 2**SHARD_BITS - 1), "The shard that the tasks belong to."] = (
        called("shard", default=REQUIRED)
    )
    number: Annotated[int, Whole(0, INTEGER_MAX), "The claim's number; 0: this asks for one."] = 0
    over: Annotated[bool, FLAG, "The claim shall end."] = False


class NameClaimed(Answer):
    """Where a name is in use."""

    shard: Annotated[int, "The shard that has what is named, or may make it."]
    number: Annotated[int, "The claim's number; 0: none is needed."]


class NamesPage(Request):
    """The request asks for a page by name."""

    after: Annotated[str | None, NAME, "The ``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "The most items of the answer."] = 100


class ScheduleRun(Answer):
    """One occurrence, or several that were missed together, and what became of them."""

    planned_ms: Annotated[
        int, Moment(), "When the occurrence was planned, in milliseconds since 1970."
    ]
    at_ms: Annotated[int, Moment(), "When that was decided."]
    outcome: Annotated[
        str, '"fired", "missed", "overlap" (the task before was unfinished) or "run" (on demand).'
    ]
    id: Annotated[int | None, ID, "The id of its task."] = None
    occurrences: Annotated[
        int, "How many occurrences this stands for; more than 1 where several were missed together."
    ] = 1
    state: Annotated[
        str | None, 'Its task\'s state: "scheduled", "in_flight", "acked", "gone", …'
    ] = None

    @property
    def task_id(self) -> int | None:
        """The id of its task."""
        return self.id

    planned = when("planned_ms", "When it was planned.")
    at = when("at_ms", "When that was decided.")


class ScheduleInfo(Answer):
    """A schedule, and how far it has come."""

    name: Annotated[str, NAME, "The name of the schedule."]
    topic: Annotated[str, NAME, "The topic of its tasks."]
    body: Annotated[bytes, BODY, "The body of its tasks."]
    task: Annotated[Mapping[str, Any], "The options of its tasks: key, tag, properties, …"] = {}
    cron: Annotated[str | None, "The cron expression; None: the schedule has an interval."] = None
    timezone: Annotated[str, "The IANA time zone of the cron expression."] = "UTC"
    every_ms: Annotated[
        int | None, "The interval, in milliseconds; None: the schedule has a cron expression."
    ] = None
    anchor_ms: Annotated[
        int, Moment(), "The moment that the interval is counted from, in milliseconds since 1970."
    ] = 0
    jitter_ms: Annotated[
        int, "The longest time, in milliseconds, by which a task is due after its planned time."
    ] = 0
    start_ms: Annotated[
        int | None, Moment(), "Nothing is planned before this moment, in milliseconds since 1970."
    ] = None
    end_ms: Annotated[
        int | None, Moment(), "Nothing is planned after this moment, in milliseconds since 1970."
    ] = None
    runs_max: Annotated[int | None, "How many runs there are at most; None: there is no limit."] = (
        None
    )
    gap: Annotated[str, 'The rule for a local time that the clock skips: "after" or "skip".'] = (
        "after"
    )
    fold: Annotated[
        str, 'Which one of a local time that comes twice holds: "first", "second" or "both".'
    ] = "first"
    catch_up: Annotated[
        str, 'Which missed occurrences are made up for: "last", "skip" or "all".'
    ] = "last"
    catch_up_ms: Annotated[
        int, "The age beyond which no missed occurrence is made up for, in milliseconds."
    ] = 0
    overlap: Annotated[
        str,
        'What happens while the task before is unfinished: "allow", "skip", "queue_one" or'
        ' "cancel_previous".',
    ] = "allow"
    paused: Annotated[bool, "Whether the schedule is paused."]
    next_ms: Annotated[int | None, Moment(), "The next planned time; None: there will be none."] = (
        None
    )
    runs: Annotated[int, "Occurrences that fired."]
    queued_ms: Annotated[
        int | None,
        Moment(),
        "The planned time of the occurrence that waits for the task before, in milliseconds"
        " since 1970.",
    ] = None
    outcome: Annotated[str | None, 'After a put: "created", "updated", "unchanged".'] = None
    planned_ms: Annotated[list[int] | None, "In a show: the next planned times."] = None
    recent: Annotated[tuple[ScheduleRun, ...], "In a show: the newest runs, oldest first."] = ()

    next = maybe_when("next_ms", "The next planned time; None: there will be none.")

    @property
    def planned(self) -> tuple[datetime, ...]:
        """In a show: the next planned times."""
        return tuple(map(moment, self.planned_ms or ()))


class ScheduleList(Answer):
    """A page of schedules, by name."""

    schedules: Annotated[list[ScheduleInfo], "The schedules of this page."]
    next: Annotated[str | None, NAME, "The ``after`` of the next page; None: this is the last one."]


_TAG, _PATH, _UNKNOWN = "schedules", "/v1/schedules/{name}", ("not_found",)
_READ, _OPERATE = Need(Right.READ, Of.FOUND), Need(Right.OPERATE, Of.FOUND)


def _on_one(name: str, word: str, summary: str, text: str, method: str, **more: Any) -> Verb:
    """A verb on one schedule that changes it."""
    said: dict[str, Any] = {"request": ScheduleName, "answer": ScheduleInfo, "errors": _UNKNOWN}
    return Verb(
        name=name, need=_OPERATE, summary=summary, text=text, frame=FrameType.SCHEDULE, word=word,
        tag=_TAG, audit=Audit.ALWAYS, changes=True, methods=(Method(method),) * bool(method),
        command=f"schedule {word} NAME", over=Over.NAME,
        **(said | more),
    )  # fmt: skip


VERBS: Final = (
    Verb("put_schedule", NewSchedule, ScheduleInfo, _OPERATE, "Make a schedule, or make it so",
         "", FrameType.SCHEDULE_PUT, path=f"PUT {_PATH}", tag=_TAG, status=201,
         audit=Audit.ALWAYS, changes=True, over=Over.BASIS, unique=Unique("name", Home.NAME)),
    Verb("claim_schedule", ClaimName, NameClaimed, _OPERATE,
         "Claim the name of a schedule, where there are several shards",
         "", FrameType.CLAIM, "schedule", errors=("conflict",), audit=Audit.ALWAYS, changes=True,
         over=Over.CLAIM),
    Verb("list_schedules", NamesPage, ScheduleList, _READ, "List schedules",
         "All schedules, by name.", FrameType.SCHEDULE_LIST, path="GET /v1/schedules", tag=_TAG,
         pages="schedules", methods=(Method("list_schedules"),), over=Over.PAGES),
    Verb("show_schedule", ScheduleLook, ScheduleInfo, _READ,
         "One schedule, its next times and newest runs",
         "One schedule, with its next ``planned`` times and its newest runs. Raises NotFound.",
         FrameType.SCHEDULE, "show", path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
         methods=(Method("show_schedule"),), command="schedule show NAME", over=Over.NAME),
    _on_one("pause_schedule", "pause", "Pause",
            "Nothing of it fires until it is resumed. Raises NotFound.", "pause_schedule",
            path=f"POST {_PATH}/pause"),
    _on_one("resume_schedule", "resume", "Resume",
            "Go on; what was missed meanwhile is for its catch-up. Raises NotFound.",
            "resume_schedule", path=f"POST {_PATH}/resume"),
    _on_one("run_schedule", "run", "A task of it at once",
            "A task of it at once, whatever is planned.", "", answer=AcceptedIds,
            path=f"POST {_PATH}/run", status=201, errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("backfill_schedule", "backfill", "A task for each occurrence of a time",
            "A task for each occurrence of a range, due at once; at most 1,000.", "",
            request=Backfill, answer=AcceptedIds, path=f"POST {_PATH}/backfill", status=201,
            errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("delete_schedule", "delete", "Delete a schedule; its tasks stay",
            "Delete a schedule; its tasks stay. The answer is what it was. Raises NotFound.",
            "delete_schedule", path=f"DELETE {_PATH}", repeat=False),
)  # fmt: skip
