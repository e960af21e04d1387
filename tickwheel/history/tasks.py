"""Tasks out of the history, by key, topic and the time of their enqueue, the newest first: what
each was, and what became of it. For finished ones, of which a store knows their ends at most.

The functions read segments and nothing else. A daemon has them asked by a process of its own
(``lookup.py``), with an answer that is bounded in tasks, in bytes and in time.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from tickwheel.errors import LimitExceeded
from tickwheel.history import read
from tickwheel.history.read import Query
from tickwheel.history.segments import Event, Segment, Tally
from tickwheel.history.story import BYTES_MAX, Hurried

TASKS_MAX: Final = 1_000
"""Tasks in one answer to a daemon."""
KEPT_MAX: Final = 100_000
"""Enqueues of an hour that are remembered while it is looked through."""
PART: Final = 256
"""Tasks whose events are looked for at once."""
_ENDS: Final = ("acked", "cancelled", "expired", "deleted", "filtered")
_WHAT: Final = (
    "topic", "key", "tag", "order_key", "priority", "ttl_ms", "within_ms", "props", "schedule",
)  # fmt: skip
UNFINISHED: Final = "unfinished"


class Wanted(NamedTuple):
    """Which tasks are looked for; None: any. Enqueued from ``since_ms`` to before ``until_ms``."""

    key: str | None = None
    topic: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


def search(history_dir: Path, wanted: Wanted, tally: Tally) -> Iterator[dict[str, Any]]:
    """Outlines of the tasks, the newest first, as they are found."""
    query = Query(
        key=wanted.key,
        topic=wanted.topic,
        events=read.ENQUEUED,
        since_ms=wanted.since_ms,
        until_ms=wanted.until_ms,
    )
    for hour_ms, hour in reversed(read.hours(history_dir, query)):
        ids = deque(_enqueued(hour, query, tally), maxlen=KEPT_MAX)
        newest_first = reversed(dict.fromkeys(ids))
        while some := list(islice(newest_first, PART)):
            yield from _outlines(history_dir, hour_ms, some, tally)


def _enqueued(hour: list[Segment], query: Query, tally: Tally) -> Iterator[int]:
    for event in read.merged(hour, query, tally):
        task_id = read.task_id(event)
        if task_id is not None and query.key in (None, event.get("key")):
            yield task_id


def _outlines(
    history_dir: Path, since_ms: int, ids: Sequence[int], tally: Tally
) -> Iterator[dict[str, Any]]:
    stories: dict[int, list[Event]] = {one: [] for one in ids}
    query = Query(ids=stories.keys(), since_ms=since_ms)
    for event in read.search(history_dir, query, tally):
        stories[int(event["task_id"])].append(event)
    for task_id, events in stories.items():
        yield outline(task_id, events)


def outline(task_id: int, events: Sequence[Event]) -> dict[str, Any]:
    """What a task was, and what became of it, by its events in their order: all that is known of
    ``topic``, ``key``, its other options and its body; ``state`` is its end, "dead", or
    "unfinished"; ``ended_ms`` when that was."""
    found: dict[str, Any] = {"id": str(task_id), "state": UNFINISHED, "ended_ms": None}
    found |= {"enqueued_ms": None, "due_ms": None, "attempts": 0}
    dead: dict[str, str] = {}
    for event in events:
        name, group = str(event["event"]), str(event.get("group", ""))
        if name in ("enqueued", "replaced"):
            _take_over(found, event)
        elif name == "rescheduled":
            found["due_ms"] = event.get("due_ms")
        elif name == "delivered":
            found["attempts"] = max(found["attempts"], int(event.get("attempt", 0)))
        elif name == "dead":
            dead[group] = str(event.get("reason", ""))
        elif name == "requeued":
            dead.pop(group, None)
        if name in _ENDS and (not group or event.get("ended")):
            found |= {"state": name, "ended_ms": event["time_ms"]}
    if found["state"] == UNFINISHED and dead:
        found |= {"state": "dead", "reason": next(reversed(dead.values()))}
    return found


def _take_over(found: dict[str, Any], event: Event) -> None:
    found |= {name: event[name] for name in _WHAT if name in event}
    found["due_ms"] = event.get("due_ms")
    if event["event"] == "enqueued":
        found["enqueued_ms"] = event["time_ms"]
    if "props" in found:
        found["properties"] = found.pop("props")
    if "body" in event:
        found.pop("body", None)
        found.pop("body_base64", None)
        body = base64.b64decode(event["body"])
        try:
            found["body"] = body.decode()
        except UnicodeDecodeError:
            found["body_base64"] = event["body"]


def find(folder: Path, wanted: Wanted, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Outlines of at most ``limit`` tasks and ``BYTES_MAX`` bytes as JSON, and whether these are
    all that there are."""
    found: list[dict[str, Any]] = []
    left = BYTES_MAX
    with contextlib.suppress(LimitExceeded):
        for one in search(folder, wanted, Hurried()):
            left -= len(json.dumps(one))
            if left < 0 or len(found) == limit:
                return found, False
            found.append(one)
        return found, True
    return found, False
