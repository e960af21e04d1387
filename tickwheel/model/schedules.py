"""What a recurring schedule is, as values: what was asked for, and how far it has come.

Pure data. A schedule makes one task each time that its cron expression or its interval says; that
time is the *planned time* of the occurrence. Times are integer milliseconds of the wall clock.
When planned times are is said by ``engine/timetables.py``, what becomes of each by
``engine/schedules.py``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tickwheel.model.records import TaskOptions

CATCH_UPS: Final = ("skip", "last", "all")
"""Which missed occurrences are made up for: none, the newest, or all."""
OVERLAPS: Final = ("allow", "skip", "queue_one", "cancel_previous")
"""What an occurrence does while the task of the run before is unfinished."""
GAPS: Final = ("after", "skip")
"""When a fixed time in an hour that is jumped over comes: after the jump, or never."""
FOLDS: Final = ("first", "second", "both")
"""Which one counts of a fixed time in an hour that comes twice."""
RECENT_MAX = 20
"""How many runs a schedule remembers."""
NAME_PROPERTY = "tickwheel.schedule"
PLANNED_PROPERTY = "tickwheel.planned_ms"
"""The properties of a schedule's task: its planned time, and the schedule's name."""
OWN_PROPERTIES = 2

FIRED, MISSED, OVERLAPPED, RUN = "fired", "missed", "overlap", "run"
QUEUED, BACKFILLED = "queued", "backfill"
"""Outcomes in events only: a schedule does not remember them as runs."""


class Schedule(NamedTuple):
    """What a schedule was asked to do."""

    name: str
    topic: str
    body: bytes
    options: TaskOptions | None
    """The options of its tasks, without the two properties of each occurrence."""
    cron: str | None
    timezone: str
    """The IANA name of the time zone of ``cron``."""
    every_ms: int | None
    """The interval, instead of ``cron``: planned times are ``anchor_ms`` + n times this."""
    anchor_ms: int
    jitter_ms: int = 0
    """The most that a task is due after its planned time; the same for the same occurrence."""
    start_ms: int | None = None
    """There is no planned time before this,"""
    end_ms: int | None = None
    """nor after this,"""
    runs_max: int | None = None
    """nor after so many runs."""
    gap: str = "after"
    fold: str = "first"
    catch_up: str = "last"
    catch_up_ms: int = 86_400_000
    """Occurrences that were missed longer ago than this are not made up for."""
    overlap: str = "allow"


class Run(NamedTuple):
    """What became of an occurrence, or of several that were missed together."""

    planned_ms: int
    """The planned time of the occurrence, or of the newest of them."""
    at_ms: int
    """When the outcome was decided."""
    outcome: str
    """FIRED, MISSED, OVERLAPPED, or RUN (at an operator's word)."""
    id: int = 0
    """The id of the task; 0: the run has none."""
    occurrences: int = 1


class ScheduleRow(NamedTuple):
    """A schedule, and how far it has come."""

    schedule: Schedule
    paused: bool = False
    next_ms: int | None = None
    """The first planned time without a decision; None: there will be none."""
    runs: int = 0
    """How many occurrences have fired."""
    last_id: int = 0
    """The id of the task of the newest run."""
    queued_ms: int | None = None
    """The planned time of an occurrence that waits for the end of that task."""
    recent: tuple[Run, ...] = ()
    """The newest runs, oldest first, at most ``RECENT_MAX``."""
