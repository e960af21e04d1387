"""Events of the history for people: a row, a line, a sentence about each. No input or output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_duration, format_time, printable

COLUMNS = ("time", "event", "task", "topic", "group", "what")
FLOW_COLUMNS = ("time", "after", "event", "group", "attempt", "what", "node")
REASON_SHOWN_MAX = 80
Event = dict[str, Any]


def events_grid(events: Iterable[Event]) -> Grid:
    """A row for each, in the order given."""
    return Grid(COLUMNS, rows=[cells(event) for event in events], right=frozenset(("task",)))


def cells(event: Event) -> tuple[str, ...]:
    return (
        format_time(event["time_ms"]),
        _word(event),
        _text(event, "task_id"),
        _text(event, "topic"),
        _text(event, "group"),
        what(event, with_attempt=True),
    )


def line(event: Event) -> str:
    """The same as one line, for what is shown as it comes."""
    at, word, task, topic, group, told = cells(event)
    return f"{at}  {word:<12}  {task:>19}  {topic}  {group}  {told}".rstrip()


def flow_grid(task_id: int, events: Iterable[Event]) -> Grid:
    """One task's story: when, how long after the one before, what, who, where."""
    grid = Grid(
        FLOW_COLUMNS, title=f"History of task {task_id}", right=frozenset(("after", "attempt"))
    )
    before_ms: int | None = None
    for event in events:
        at_ms = event["time_ms"]
        after = "" if before_ms is None else format_duration((at_ms - before_ms) / 1000)
        before_ms = at_ms
        grid.rows.append(
            (
                format_time(at_ms),
                after,
                _word(event),
                _text(event, "group"),
                str(event.get("attempt", "")),
                what(event, with_attempt=False),
                _text(event, "node"),
            )
        )
    return grid


def what(event: Event, *, with_attempt: bool) -> str:
    """What is to be known of an event beside its name."""
    parts = []
    if with_attempt and event.get("attempt", 1) != 1:
        parts.append(f"attempt {event['attempt']}")
    if "lateness_ms" in event:
        parts.append(f"+{format_duration(event['lateness_ms'] / 1000)}")
    if "ack_ms" in event:
        parts.append(f"in {format_duration(event['ack_ms'] / 1000)}")
    if "due_ms" in event and event.get("event") != "delivered":
        word = "next" if event.get("event") == "nacked" else "due"
        parts.append(f"{word} {format_time(event['due_ms'])}")
    parts += [f"{name}={_text(event, name)}" for name in ("key", "tag") if name in event]
    for name in ("subscriber", "producer"):
        if name in event:
            parts.append(f"by {_text(event, name)}")
    if "reason" in event:
        parts.append(printable(str(event["reason"]), REASON_SHOWN_MAX))
    if "count" in event:
        parts.append(f"{event['count']:,} events")
    if "clean" in event:
        parts.append("clean" if event["clean"] else "after an unclean stop")
    return ", ".join(parts)


def _word(event: Event) -> str:
    return _text(event, "event").replace("_", " ")


def _text(event: Event, name: str) -> str:
    value = event.get(name)
    return "" if value is None else printable(str(value))
