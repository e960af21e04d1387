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

    name: Annotated[str, NAME, "Its name."]


class NewSchedule(ScheduleName):
    """A recurring schedule: ``cron`` with ``timezone``, or ``every_ms``. Its operation checks the
    fields together, with the daemon's settings."""

    topic: Annotated[str, NAME, "Of its tasks."] = called("topic", default=REQUIRED)
    body: Annotated[bytes | None, BODY, "Of its tasks; default empty."] = None
    task: Annotated[
        Mapping[str, Any] | None,
        Block(ScheduledTaskFields),
        "Of its tasks: key, tag, properties, priority, … as of an enqueued task.",
    ] = None
    cron: Annotated[
        str | None,
        Text(CRON_LENGTH_MAX),
        "Five fields, six with seconds first, or @daily, …",
    ] = None
    timezone: Annotated[str | None, KEY, "IANA, of cron; default UTC."] = None
    every_ms: Annotated[int | None, Span(), "Instead of cron: the interval."] = None
    anchor_ms: Annotated[
        int | None, Moment(), "What the interval is counted from; default: when it was first put."
    ] = None
    jitter_ms: Annotated[
        int | None, Span(), "A task is due up to so much after its planned time."
    ] = None
    start_ms: Annotated[int | None, Moment(), "Nothing is planned before."] = None
    end_ms: Annotated[int | None, Moment(), "Nothing is planned after."] = None
    runs_max: Annotated[int | None, Whole(1, RUNS_MAX), "So many runs and no more."] = None
    gap: Annotated[
        str | None, Choice("Gap", "after", "skip"), "A fixed time that the clock jumps over."
    ] = None
    fold: Annotated[
        str | None, Choice("Fold", "first", "second", "both"), "A fixed time that comes twice."
    ] = None
    catch_up: Annotated[
        str | None, Choice("CatchUp", "last", "skip", "all"), "What was missed."
    ] = None
    catch_up_ms: Annotated[int | None, Span(), "Nothing older is made up for; default a day."] = (
        called("catch_up_window")
    )
    overlap: Annotated[
        str | None,
        Choice("Overlap", "allow", "skip", "queue_one", "cancel_previous"),
        "While the task before is unfinished.",
    ] = None


class ScheduleLook(ScheduleName):
    """The request asks for a schedule with its next times."""

    next: Annotated[int, Whole(0, NEXT_MAX), "How many planned times."] = called(
        "planned", default=5
    )


class Backfill(ScheduleName):
    """The request asks for the occurrences from ``from_ms`` up to, and without, ``to_ms``."""

    from_ms: Annotated[int, Moment(), "The first moment."] = called("start", default=REQUIRED)
    to_ms: Annotated[int, Moment(), "The moment behind the last."] = called("end", default=REQUIRED)


class ClaimName(Request):
    """The request claims a name for a shard, ends a claim that nothing was made of, or, at the
    shard that it was claimed for, says under which claim something will be made."""

    name: Annotated[str, NAME, "What is claimed."]
    topic: Annotated[str, NAME, "Of the tasks."] = called("topic", default=REQUIRED)
    shard: Annotated[int, Whole(0, 2**SHARD_BITS - 1), "Where they belong."] = called(
        "shard", default=REQUIRED
    )
    number: Annotated[int, Whole(0, INTEGER_MAX), "Of the claim; 0: it is asked for."] = 0
    over: Annotated[bool, FLAG, "The claim shall end."] = False


class NameClaimed(Answer):
    """Where a name is in use."""

    shard: Annotated[int, "The shard that has what is named, or may make it."]
    number: Annotated[int, "Of the claim; 0: there is none, and none is needed."]


class NamesPage(Request):
    """The request asks for a page by name."""

    after: Annotated[str | None, NAME, "``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


class ScheduleRun(Answer):
    """One occurrence, or several that were missed together, and what became of them."""

    planned_ms: Annotated[int, Moment()]
    at_ms: Annotated[int, Moment(), "When that was decided."]
    outcome: Annotated[
        str, '"fired", "missed", "overlap" (the task before was unfinished) or "run" (on demand).'
    ]
    id: Annotated[int | None, ID, "Of its task."] = None
    occurrences: int = 1
    state: Annotated[str | None, 'Of its task: "scheduled", "in_flight", "acked", "gone", …'] = None

    @property
    def task_id(self) -> int | None:
        """The id of its task."""
        return self.id

    planned = when("planned_ms", "When it was planned.")
    at = when("at_ms", "When that was decided.")


class ScheduleInfo(Answer):
    """A schedule, and how far it has come."""

    name: Annotated[str, NAME]
    topic: Annotated[str, NAME]
    body: Annotated[bytes, BODY]
    task: Annotated[Mapping[str, Any], "Of its tasks: key, tag, properties, …"] = {}
    cron: str | None = None
    timezone: str = "UTC"
    every_ms: int | None = None
    anchor_ms: Annotated[int, Moment()] = 0
    jitter_ms: int = 0
    start_ms: Annotated[int | None, Moment()] = None
    end_ms: Annotated[int | None, Moment()] = None
    runs_max: int | None = None
    gap: str = "after"
    fold: str = "first"
    catch_up: str = "last"
    catch_up_ms: int = 0
    overlap: str = "allow"
    paused: bool
    next_ms: Annotated[int | None, Moment(), "None: there will be none."] = None
    runs: Annotated[int, "Occurrences that fired."]
    queued_ms: Annotated[int | None, Moment()] = None
    outcome: Annotated[str | None, 'Of a put: "created", "updated", "unchanged".'] = None
    planned_ms: Annotated[list[int] | None, "Of a show: the next planned times."] = None
    recent: Annotated[tuple[ScheduleRun, ...], "Of a show: the newest runs, oldest first."] = ()

    next = maybe_when("next_ms", "The next planned time; None: there will be none.")

    @property
    def planned(self) -> tuple[datetime, ...]:
        """Of a show: the next planned times."""
        return tuple(map(moment, self.planned_ms or ()))


class ScheduleList(Answer):
    """A page of schedules, by name."""

    schedules: list[ScheduleInfo]
    next: Annotated[str | None, NAME]


_TAG, _PATH, _UNKNOWN = "schedules", "/v1/schedules/{name}", ("not_found",)
_READ, _OPERATE = Need(Right.READ, Of.FOUND), Need(Right.OPERATE, Of.FOUND)


def _on_one(name: str, word: str, summary: str, text: str, method: str, **more: Any) -> Verb:
    """A verb on one schedule that changes it."""
    said: dict[str, Any] = {"request": ScheduleName, "answer": ScheduleInfo, "errors": _UNKNOWN}
    return Verb(
        name=name, need=_OPERATE, summary=summary, text=text, frame=FrameType.SCHEDULE, word=word,
        tag=_TAG, audit=Audit.ALWAYS, changes=True, methods=(Method(method),) * bool(method),
        over=Over.NAME,
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
         "One, with its next ``planned`` times and its newest runs. Raises NotFound.",
         FrameType.SCHEDULE, "show", path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
         methods=(Method("show_schedule"),), over=Over.NAME),
    _on_one("pause_schedule", "pause", "Pause",
            "Nothing of it fires until it is resumed. Raises NotFound.", "pause_schedule",
            path=f"POST {_PATH}/pause"),
    _on_one("resume_schedule", "resume", "Resume",
            "What was missed meanwhile is for its catch-up. Raises NotFound.", "resume_schedule",
            path=f"POST {_PATH}/resume"),
    _on_one("run_schedule", "run", "A task of it at once", "", "", answer=AcceptedIds,
            path=f"POST {_PATH}/run", status=201, errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("backfill_schedule", "backfill", "A task for each occurrence of a time", "", "",
            request=Backfill, answer=AcceptedIds, path=f"POST {_PATH}/backfill", status=201,
            errors=(*_UNKNOWN, "store_full"), repeat=False),
    _on_one("delete_schedule", "delete", "Delete a schedule; its tasks stay",
            "It, as it was; its tasks stay. Raises NotFound.", "delete_schedule",
            path=f"DELETE {_PATH}", repeat=False),
)  # fmt: skip
