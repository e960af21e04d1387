"""Verbs on recurring schedules: put, list, show, pause, run, backfill, delete."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import BODY, FLAG, ID, KEY, NAME, Choice, Moment, Span, Text, Whole
from tickwheel.api.shapes import REQUIRED, Answer, Block, Request, called, maybe_when, when
from tickwheel.api.tasks import PAGE, AcceptedIds, ScheduledTaskFields
from tickwheel.api.times import moment
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Right, Routing, Unique, Verb
from tickwheel.model.values import INTEGER_MAX, SHARD_BITS

CRON_LENGTH_MAX: Final = 255
RUNS_MAX: Final = 2**53 - 1
NEXT_MAX: Final = 100
"""Maximum planned times in one answer."""


class ScheduleName(Request):
    """The request names a schedule."""

    name: Annotated[str, NAME, "The name of the schedule."]


class NewSchedule(ScheduleName):
    """A recurring schedule with ``cron`` and ``timezone``, or with ``every_ms``. The daemon checks
    whether the fields are compatible with each other and with its settings."""

    topic: Annotated[str, NAME, "The topic of its tasks."] = called("topic", default=REQUIRED)
    body: Annotated[bytes | None, BODY, "The body of its tasks; by default empty."] = None
    task: Annotated[
        Mapping[str, Any] | None,
        Block(ScheduledTaskFields),
        "The options of its tasks: key, tag, properties, priority, … as for an enqueued task.",
    ] = None
    cron: Annotated[
        str | None,
        Text(CRON_LENGTH_MAX),
        "A cron expression: five fields, six fields that begin with seconds, or @daily, …",
    ] = None
    timezone: Annotated[
        str | None, KEY, "The IANA time zone of the cron expression; by default UTC."
    ] = None
    every_ms: Annotated[int | None, Span(), "The interval, instead of a cron expression."] = None
    anchor_ms: Annotated[
        int | None,
        Moment(),
        "The moment from which intervals are counted; by default, when the schedule was first put.",
    ] = None
    jitter_ms: Annotated[
        int | None, Span(), "Maximum random delay of a task after its planned time."
    ] = None
    start_ms: Annotated[int | None, Moment(), "Nothing is planned before this moment."] = None
    end_ms: Annotated[int | None, Moment(), "Nothing is planned after this moment."] = None
    runs_max: Annotated[
        int | None, Whole(1, RUNS_MAX), "Maximum number of runs; unlimited by default."
    ] = None
    gap: Annotated[
        str | None,
        Choice("Gap", "after", "skip"),
        "The rule for a local time that the clock skips.",
    ] = None
    fold: Annotated[
        str | None,
        Choice("Fold", "first", "second", "both"),
        "Which occurrence of a repeated local time applies.",
    ] = None
    catch_up: Annotated[
        str | None,
        Choice("CatchUp", "last", "skip", "all"),
        "Which missed occurrences run later.",
    ] = None
    catch_up_ms: Annotated[
        int | None,
        Span(),
        "Maximum age of missed occurrences that run later; by default a day.",
    ] = called("catch_up_window")
    overlap: Annotated[
        str | None,
        Choice("Overlap", "allow", "skip", "queue_one", "cancel_previous"),
        "The action when an occurrence is due and the previous task is unfinished.",
    ] = None


class ScheduleLook(ScheduleName):
    """The request asks for a schedule and its next planned times."""

    next: Annotated[int, Whole(0, NEXT_MAX), "How many planned times to return."] = called(
        "planned", default=5
    )


class Backfill(ScheduleName):
    """The request asks for the occurrences from ``from_ms`` up to but excluding ``to_ms``."""

    from_ms: Annotated[int, Moment(), "The start of the range."] = called("start", default=REQUIRED)
    to_ms: Annotated[int, Moment(), "The end of the range, exclusive."] = called(
        "end", default=REQUIRED
    )


class ClaimName(Request):
    """The request claims a name for a shard, or ends an unused claim. At the shard for which the
    name was claimed, it announces the claim, which a later request will use."""

    name: Annotated[str, NAME, "The name to claim."]
    topic: Annotated[str, NAME, "The topic of the tasks."] = called("topic", default=REQUIRED)
    shard: Annotated[int, Whole(0, 2**SHARD_BITS - 1), "The shard of the tasks."] = called(
        "shard", default=REQUIRED
    )
    number: Annotated[int, Whole(0, INTEGER_MAX), "The claim's number; 0 for a new claim."] = 0
    over: Annotated[bool, FLAG, "Whether to end the claim."] = False


class NameClaimed(Answer):
    """The shard for which a name is claimed."""

    shard: Annotated[int, "The shard that has, or is allowed to create, the named object."]
    number: Annotated[int, "The claim's number; 0 if no claim is needed."]


class NamesPage(Request):
    """The request asks for a page, ordered by name."""

    after: Annotated[str | None, NAME, "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class ScheduleRun(Answer):
    """One occurrence, or several that were missed together, and the outcome."""

    planned_ms: Annotated[
        int, Moment(), "When the occurrence was planned, in milliseconds since 1970."
    ]
    at_ms: Annotated[int, Moment(), "When the outcome was decided."]
    outcome: Annotated[
        str, '"fired", "missed", "overlap" (the previous task was unfinished) or "run" (on demand).'
    ]
    id: Annotated[int | None, ID, "The id of its task."] = None
    occurrences: Annotated[
        int, "How many occurrences this entry covers; more than 1 if several were missed together."
    ] = 1
    state: Annotated[
        str | None, 'The state of its task: "scheduled", "in_flight", "acked", "gone", …'
    ] = None

    @property
    def task_id(self) -> int | None:
        """The id of its task."""
        return self.id

    planned = when("planned_ms", "When it was planned.")
    at = when("at_ms", "When the outcome was decided.")


class ScheduleInfo(Answer):
    """A schedule and its progress."""

    name: Annotated[str, NAME, "The name of the schedule."]
    topic: Annotated[str, NAME, "The topic of its tasks."]
    body: Annotated[bytes, BODY, "The body of its tasks."]
    task: Annotated[Mapping[str, Any], "The options of its tasks: key, tag, properties, …"] = {}
    cron: Annotated[str | None, "The cron expression; None if there is an interval."] = None
    timezone: Annotated[str, "The IANA time zone of the cron expression."] = "UTC"
    every_ms: Annotated[
        int | None, "The interval, in milliseconds; None if there is a cron expression."
    ] = None
    anchor_ms: Annotated[
        int, Moment(), "The moment from which intervals are counted, in milliseconds since 1970."
    ] = 0
    jitter_ms: Annotated[
        int, "Maximum random delay of a task after its planned time, in milliseconds."
    ] = 0
    start_ms: Annotated[
        int | None, Moment(), "Nothing is planned before this moment, in milliseconds since 1970."
    ] = None
    end_ms: Annotated[
        int | None, Moment(), "Nothing is planned after this moment, in milliseconds since 1970."
    ] = None
    runs_max: Annotated[int | None, "Maximum number of runs; None means unlimited."] = None
    gap: Annotated[str, 'The rule for a local time that the clock skips: "after" or "skip".'] = (
        "after"
    )
    fold: Annotated[
        str, 'Which occurrence of a repeated local time applies: "first", "second" or "both".'
    ] = "first"
    catch_up: Annotated[str, 'Which missed occurrences run later: "last", "skip" or "all".'] = (
        "last"
    )
    catch_up_ms: Annotated[
        int, "Maximum age of missed occurrences that run later, in milliseconds."
    ] = 0
    overlap: Annotated[
        str,
        'The action when the previous task is unfinished: "allow", "skip", "queue_one" or'
        ' "cancel_previous".',
    ] = "allow"
    paused: Annotated[bool, "Whether the schedule is paused."]
    next_ms: Annotated[int | None, Moment(), "The next planned time; None if there is none."] = None
    runs: Annotated[int, "Number of occurrences that fired."]
    queued_ms: Annotated[
        int | None,
        Moment(),
        "The planned time of the occurrence that waits for the previous task, in milliseconds since"
        " 1970.",
    ] = None
    outcome: Annotated[str | None, 'In the answer to a put: "created", "updated", "unchanged".'] = (
        None
    )
    planned_ms: Annotated[list[int] | None, "In the answer to a show: the next planned times."] = (
        None
    )
    recent: Annotated[
        tuple[ScheduleRun, ...], "In the answer to a show: the newest runs, the oldest first."
    ] = ()

    next = maybe_when("next_ms", "The next planned time; None if there is none.")

    @property
    def planned(self) -> tuple[datetime, ...]:
        """In the answer to a show: the next planned times."""
        return tuple(map(moment, self.planned_ms or ()))


class ScheduleList(Answer):
    """A page of schedules, by name."""

    schedules: Annotated[list[ScheduleInfo], "The schedules of this page."]
    next: Annotated[str | None, NAME, "``after`` for the next page; None on the last page."]


_TAG, _PATH, _UNKNOWN = "schedules", "/v1/schedules/{name}", ("not_found",)
_READ, _OPERATE = Need(Right.READ, Of.FOUND), Need(Right.OPERATE, Of.FOUND)


def _on_one(name: str, word: str, summary: str, text: str, method: str, **options: Any) -> Verb:
    """Declare a verb that changes one schedule."""
    defaults: dict[str, Any] = {"request": ScheduleName, "answer": ScheduleInfo, "errors": _UNKNOWN}
    return Verb(
        name=name, need=_OPERATE, summary=summary, text=text, frame=FrameType.SCHEDULE, word=word,
        tag=_TAG, audit=Audit.ALWAYS, changes=True, methods=(Method(method),) * bool(method),
        command=f"schedule {word} NAME", routing=Routing.NAME,
        **(defaults | options),
    )  # fmt: skip


VERBS: Final = (
    Verb("put_schedule", NewSchedule, ScheduleInfo, _OPERATE, "Create or change a schedule",
         "", FrameType.SCHEDULE_PUT, path=f"PUT {_PATH}", tag=_TAG, status=201,
         errors=("conflict",), audit=Audit.ALWAYS, changes=True, command="schedule put NAME",
         routing=Routing.BASIS, unique=Unique("name", Home.NAME)),
    Verb("claim_schedule", ClaimName, NameClaimed, _OPERATE,
         "Claim the name of a schedule among several shards",
         "", FrameType.CLAIM, "schedule", errors=("conflict",), audit=Audit.ALWAYS, changes=True,
         routing=Routing.CLAIM),
    Verb("list_schedules", NamesPage, ScheduleList, _READ, "List schedules",
         "Return all schedules, ordered by name.",
         FrameType.SCHEDULE_LIST, path="GET /v1/schedules", tag=_TAG, pages="schedules",
         methods=(Method("list_schedules"),), command="schedule list", routing=Routing.PAGES),
    Verb("show_schedule", ScheduleLook, ScheduleInfo, _READ,
         "Show a schedule, its next times and newest runs",
         "Return one schedule with its next ``planned`` times and its newest runs. Raise NotFound"
         " if there is no such schedule.",
         FrameType.SCHEDULE, "show", path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
         methods=(Method("show_schedule"),), command="schedule show NAME", routing=Routing.NAME),
    _on_one("pause_schedule", "pause", "Pause a schedule",
            "Fire no occurrence until the schedule is resumed. Raise NotFound if there is no such"
            " schedule.", "pause_schedule",
            path=f"POST {_PATH}/pause"),
    _on_one("resume_schedule", "resume", "Resume a schedule",
            "Resume a paused schedule. Its ``catch_up`` determines which missed runs"
            " follow. Raise NotFound if there is no such schedule.",
            "resume_schedule", path=f"POST {_PATH}/resume"),
    _on_one("run_schedule", "run", "Enqueue a task of a schedule now",
            "Enqueue a task of the schedule that is due now.", "", answer=AcceptedIds,
            path=f"POST {_PATH}/run", status=201, errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("backfill_schedule", "backfill", "Enqueue a task for each occurrence in a range",
            "Enqueue a task that is due now for each occurrence in a range, at most 1,000.", "",
            request=Backfill, answer=AcceptedIds, path=f"POST {_PATH}/backfill", status=201,
            errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("delete_schedule", "delete", "Delete a schedule; its tasks stay",
            "Delete a schedule and return it; its tasks stay. Raise NotFound if there is no such"
            " schedule.",
            "delete_schedule", path=f"DELETE {_PATH}", repeat=False),
)  # fmt: skip
