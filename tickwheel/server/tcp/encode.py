"""Engine values as frames' fields: deliveries, look-ups, lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.engine.tasks import GroupView, Known
from tickwheel.engine.topics import Item
from tickwheel.model.records import DeadRow, Extras
from tickwheel.protocol.codec import encode


def delivery_items(items: Iterable[Item]) -> list[tuple[Any, ...]]:
    """The deliveries of a DELIVER frame."""
    return [
        (row[0], attempt, row[1], row[3])
        if row[4] is None
        else (row[0], attempt, row[1], row[3], delivery_options(row[4]))
        for row, attempt in items
    ]


def delivery_options(extras: Extras) -> dict[str, Any]:
    """What a task has beside its body; absent fields are left out."""
    options: dict[str, Any] = {}
    if extras.key is not None:
        options["key"] = extras.key
    if extras.tag is not None:
        options["tag"] = extras.tag
    if extras.properties:
        options["props"] = extras.properties
    if extras.priority:
        options["priority"] = extras.priority
    return options


def task_map(
    known: Known, state: str, slot: int, cycles: int, groups: dict[str, GroupView]
) -> dict[str, Any]:
    """A live task as LOOKUP and LIST answer it."""
    row = known.row
    extras = row.extras or Extras()
    return {
        "id": row.id,
        "state": state,
        "topic": row.topic,
        "body": row.body,
        "due_ms": row.due_ms,
        "enqueued_ms": row.enqueued_ms,
        "key": extras.key,
        "tag": extras.tag,
        "props": extras.properties or {},
        "priority": extras.priority,
        "ttl_ms": extras.ttl_ms,
        "slot": slot,
        "cycles": cycles,
        "groups": {
            name: {
                "state": view.state,
                "attempt": view.attempt,
                "at_ms": view.at_ms,
                "failures": view.failures,
                "retries_left": view.retries_left,
            }
            for name, view in groups.items()
        },
    }


def fitting(told: dict[str, Any], bytes_max: int) -> tuple[dict[str, Any], int]:
    """A task map, and its bytes in a frame. One that is too large because very many groups have
    failed with it is told with the newest failure of each, or with none."""
    size = len(encode(told))
    for kept in (1, 0):
        if size <= bytes_max or not told.get("groups"):
            break
        groups = {
            name: view | {"failures": view["failures"][len(view["failures"]) - kept :]}
            for name, view in told["groups"].items()
        }
        told = told | {"groups": groups}
        size = len(encode(told))
    return told, size


def dead_map(row: DeadRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "group": row.group,
        "topic": row.topic,
        "died_ms": row.died_ms,
        "attempt": row.attempt,
        "reason": row.reason,
        "failures": row.failures,
    }
