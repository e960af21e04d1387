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
"""Which of the occurrences that were missed are made up for: none, the newest, all of them."""
OVERLAPS: Final = ("allow", "skip", "queue_one", "cancel_previous")
"""What an occurrence does while the task of the run before is unfinished."""
GAPS: Final = ("after", "skip")
"""A fixed time in an hour that does not exist: when that hour has been jumped over, or never."""
FOLDS: Final = ("first", "second", "both")
"""A fixed time in an hour that comes twice: which of the two it is."""
RECENT_MAX = 20
"""Runs that a schedule remembers."""
NAME_PROPERTY = "tickwheel.schedule"
PLANNED_PROPERTY = "tickwheel.planned_ms"
"""Properties of a schedule's task: whose it is, and its planned time."""
OWN_PROPERTIES = 2

FIRED, MISSED, OVERLAPPED, RUN = "fired", "missed", "overlap", "run"
QUEUED, BACKFILLED = "queued", "backfill"
"""Of events only: a schedule does not remember these as runs."""


class Schedule(NamedTuple):
    """What was asked for."""

    name: str
    topic: str
    body: bytes
    options: TaskOptions | None
    """Of its tasks; the two properties of each occurrence are not in it."""
    cron: str | None
    timezone: str
    """IANA; of ``cron``."""
    every_ms: int | None
    """Instead of ``cron``: planned times are ``anchor_ms`` + n times this."""
    anchor_ms: int
    jitter_ms: int = 0
    """A task is due up to so much after its planned time: the same for the same occurrence."""
    start_ms: int | None = None
    """No planned time before this,"""
    end_ms: int | None = None
    """nor after this,"""
    runs_max: int | None = None
    """nor after so many runs."""
    gap: str = "after"
    fold: str = "first"
    catch_up: str = "last"
    catch_up_ms: int = 86_400_000
    """Older ones are not made up for."""
    overlap: str = "allow"


class Run(NamedTuple):
    """What became of an occurrence, or of several that were missed together."""

    planned_ms: int
    """Of the newest of them."""
    at_ms: int
    """When that was decided."""
    outcome: str
    """FIRED, MISSED, OVERLAPPED, or RUN (at an operator's word)."""
    id: int = 0
    """Of its task; 0: it has none."""
    occurrences: int = 1


class ScheduleRow(NamedTuple):
    """A schedule, and how far it has come."""

    schedule: Schedule
    paused: bool = False
    next_ms: int | None = None
    """The first planned time that nothing was decided of; None: there will be none."""
    runs: int = 0
    """Occurrences that fired."""
    last_id: int = 0
    """The task of the newest run."""
    queued_ms: int | None = None
    """An occurrence that waits for the end of that task."""
    recent: tuple[Run, ...] = ()
    """The newest, oldest first, at most ``RECENT_MAX``."""
