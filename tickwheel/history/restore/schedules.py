"""What events mean for schedules: from those of a backup to those at the last event.

Each event says how far its schedule has come, so the newest counts, and it does no harm that some
had happened before the backup was made. Pure; raises ValueError for an event that is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.history.read import task_id
from tickwheel.history.restore.event_values import body_of, options_of
from tickwheel.history.segments import Event
from tickwheel.model.schedules import (
    BACKFILLED,
    FIRED,
    RECENT_MAX,
    RUN,
    Run,
    Schedule,
    ScheduleRow,
)

_FIELDS = frozenset(Schedule._fields) - {"name", "topic", "body", "options"}


class Schedules:
    """The state of schedules after events: ``apply`` each; ``rows`` are then to be stored."""

    def __init__(self, rows: Iterable[ScheduleRow]) -> None:
        self._rows = {row.schedule.name: row for row in rows}
        self._without_body: set[str] = set()

    def rows(self) -> list[ScheduleRow]:
        """The schedules that can be restored."""
        return [row for name, row in self._rows.items() if name not in self._without_body]

    def without_body(self) -> list[str]:
        """Names of schedules put after the backup, whose bodies the history does not hold."""
        return sorted(self._without_body)

    def apply(self, event: Event) -> bool:
        """Apply one event. False: it is not one of a schedule."""
        kind, name = event["event"], event.get("schedule")
        if name is None:
            return False
        if kind == "schedule_put":
            self._put(name, event)
        elif kind == "schedule_deleted":
            self._rows.pop(name, None)
            self._without_body.discard(name)
        elif (row := self._rows.get(name)) is not None:
            if kind in ("schedule_paused", "schedule_resumed"):
                row = row._replace(paused=kind == "schedule_paused")
            elif kind.startswith("occurrence_"):
                row = _noted(row, event)
            self._rows[name] = _advanced(row, event)
        return True

    def _put(self, name: str, event: Event) -> None:
        settings = dict(event["settings"])
        before, body = self._rows.get(name), body_of(event)
        known = before is not None and name not in self._without_body
        if body is None and known and settings.get("same_body"):
            assert before is not None
            body = before.schedule.body
        self._without_body.discard(name)
        if body is None:
            self._without_body.add(name)
        schedule = schedule_of(name, event["topic"], body or b"", settings)
        row = ScheduleRow(schedule) if before is None else before._replace(schedule=schedule)
        row = row._replace(paused=bool(settings.get("paused", False)))
        self._rows[name] = _advanced(row, event)


def schedule_of(name: str, topic: str, body: bytes, settings: dict[str, Any]) -> Schedule:
    """The schedule that a ``schedule_put`` has asked for."""
    fields = {field: value for field, value in settings.items() if field in _FIELDS}
    given = {"cron": None, "timezone": "UTC", "every_ms": None, "anchor_ms": 0} | fields
    return Schedule(name, topic, body, options_of(settings.get("task") or {}), **given)


def _advanced(row: ScheduleRow, event: Event) -> ScheduleRow:
    return row._replace(
        next_ms=event.get("next_ms"), runs=int(event["runs"]), queued_ms=event.get("queued_ms")
    )


def _noted(row: ScheduleRow, event: Event) -> ScheduleRow:
    outcome = str(event.get("reason", FIRED))
    if event["event"] == "occurrence_queued" or outcome == BACKFILLED:
        return row
    made = task_id(event) or 0
    run = Run(event["planned_ms"], event["time_ms"], outcome, made, event.get("count", 1))
    if run not in row.recent:
        row = row._replace(recent=(*row.recent, run)[-RECENT_MAX:])
    return row if outcome == RUN or not made else row._replace(last_id=made)
