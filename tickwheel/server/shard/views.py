"""Tasks and dead letters as the operations answer them: plain maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tickwheel.api.tasks import kept_options
from tickwheel.engine.tasks import GroupView
from tickwheel.model.records import DeadRow, Failure, TaskOptions, TaskSnapshot

ValueBytes = Callable[[object], int]
"""The bytes that a plain value takes in an answer, as the transport knows."""


def task_map(
    known: TaskSnapshot, state: str, slot: int, cycles: int, groups: dict[str, GroupView]
) -> dict[str, Any]:
    """A live task as LOOKUP and LIST answer it."""
    row = known.row
    options = row.options or TaskOptions()
    replayed = options.replayed
    again = {} if replayed is None else {"replay_of": replayed.id, "replay_to": replayed.group}
    return again | {
        "id": row.id,
        "state": state,
        "topic": row.topic,
        "body": row.body,
        "due_ms": row.due_ms,
        "enqueued_ms": row.enqueued_ms,
        **{name: options[place] for name, place in _LISTED},
        "key": options.key if replayed is None else replayed.key,
        "properties": options.properties or {},
        "asked_ms": options.asked_ms,
        "slot": slot,
        "cycles": cycles,
        "groups": {
            name: {
                "state": view.state,
                "attempt": view.attempt,
                "at_ms": view.at_ms,
                "failures": [told(one) for one in view.failures],
                "retries_left": view.retries_left,
                "snoozes": view.snoozes,
                "deaths": view.deaths,
            }
            for name, view in groups.items()
        },
    }


_LISTED = [
    (field.name, TaskOptions._fields.index(field.name))
    for field, option in kept_options()
    if option.is_listed
]
"""The options that are shown with a task: each name, and its place in ``TaskOptions``."""


def fitting(
    task: dict[str, Any], bytes_max: int, value_bytes: ValueBytes
) -> tuple[dict[str, Any], int]:
    """The task's map, and its bytes in an answer. If very many groups have failed with the task, it
    has only the newest failure of each group, or none."""
    size = value_bytes(task)
    for kept in (1, 0):
        if size <= bytes_max or not task.get("groups"):
            break
        groups = {
            name: view | {"failures": view["failures"][len(view["failures"]) - kept :]}
            for name, view in task["groups"].items()
        }
        task = task | {"groups": groups}
        size = value_bytes(task)
    return task, size


class ToldFailure(NamedTuple):
    """A failure as it is answered."""

    attempt: int
    at_ms: int
    reason: str
    subscriber: str
    trace: str
    """The trace; empty: there is none, or it is not kept."""


def told(failure: Failure) -> ToldFailure:
    attempt, at_ms, reason, subscriber = failure
    summary, _, trace = reason.partition("\n")
    return ToldFailure(attempt, at_ms, summary, subscriber, trace)


def dead_map(row: DeadRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "group": row.group,
        "topic": row.topic,
        "died_ms": row.died_ms,
        "attempt": row.attempt,
        "reason": row.reason,
        "failed": row.failed,
        "deaths": row.deaths,
        "failures": [told(one) for one in row.failures],
    }
