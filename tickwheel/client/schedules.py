"""Recurring schedules as the client gives and gets them.

Pure: what a caller says becomes the map of the wire, what the daemon answers becomes values. The
daemon checks what it is given; here is checked only what would mean something else on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tickwheel.api.times import Duration, duration_ms, moment, moment_ms
from tickwheel.client.wire import wire_of
from tickwheel.errors import BadRequest

Map = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """What became of an occurrence, or of several that were missed together."""

    planned: datetime
    at: datetime
    """When that was decided."""
    outcome: str
    """"fired", "missed", "overlap" (the task before was unfinished) or "run" (on demand)."""
    task_id: int | None
    state: str | None
    """Of its task: "scheduled", "in_flight", "acked", "gone", …"""
    occurrences: int

    @classmethod
    def of(cls, raw: Map) -> ScheduleRun:
        return cls(
            moment(raw["planned_ms"]),
            moment(raw["at_ms"]),
            str(raw["outcome"]),
            raw.get("id"),
            raw.get("state"),
            int(raw.get("occurrences", 1)),
        )


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule as it is. ``raw`` has all that the daemon says of it, times in milliseconds."""

    name: str
    topic: str
    body: bytes
    paused: bool
    next: datetime | None
    """The next planned time; None: there will be none."""
    runs: int
    """Occurrences that fired."""
    outcome: str | None
    """Of a put: "created", "updated", "unchanged"."""
    planned: tuple[datetime, ...]
    """Of a show: the next planned times."""
    recent: tuple[ScheduleRun, ...]
    """Of a show: the newest runs, oldest first."""
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> ScheduleInfo:
        next_ms = raw.get("next_ms")
        return cls(
            name=str(raw["name"]),
            topic=str(raw["topic"]),
            body=raw["body"],
            paused=bool(raw["paused"]),
            next=None if next_ms is None else moment(next_ms),
            runs=int(raw["runs"]),
            outcome=raw.get("outcome"),
            planned=tuple(map(moment, raw.get("next") or ())),
            recent=tuple(map(ScheduleRun.of, raw.get("recent") or ())),
            raw=raw,
        )


def task_options(options: Mapping[str, object]) -> dict[str, Any]:
    """The options of a schedule's tasks for the wire. Raises BadRequest."""
    found = wire_of(options)
    # What is nothing is not sent: that the schedule is unchanged is seen by comparing.
    return {name: it for name, it in found.items() if it or name not in ("priority", "properties")}


def put_options(
    topic: str,
    body: bytes,
    task: dict[str, Any],
    *,
    every: Duration | None,
    anchor: datetime | None,
    jitter: Duration | None,
    start: datetime | None,
    end: datetime | None,
    catch_up_window: Duration | None,
    **plain: Any,
) -> dict[str, Any]:
    """The map of a SCHEDULE_PUT; ``plain`` fields are the same on the wire. Raises BadRequest."""
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise BadRequest(f"body must be bytes, not {type(body).__name__}")
    durations = {"every_ms": every, "jitter_ms": jitter, "catch_up_ms": catch_up_window}
    moments = {"anchor_ms": anchor, "start_ms": start, "end_ms": end}
    found: dict[str, Any] = {"topic": topic, "body": bytes(body), "task": task or None, **plain}
    for name, duration in durations.items():
        found[name] = None if duration is None else duration_ms(duration, name[:-3])
    for name, at in moments.items():
        found[name] = None if at is None else moment_ms(at, name[:-3])
    return {name: value for name, value in found.items() if value is not None}
