"""Engine values as frames' fields: deliveries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.engine.topics import Item
from tickwheel.model.records import TaskOptions
from tickwheel.protocol.codec import encode_all


def delivery_items(items: Iterable[Item]) -> list[tuple[Any, ...]]:
    """The deliveries of a DELIVER frame."""
    return [
        (row[0], attempt, row[1], row[3])
        if row[4] is None
        else (row[0], attempt, row[1], row[3], delivery_options(row[4]))
        for row, attempt in items
    ]


def delivery_options(task_options: TaskOptions) -> dict[str, Any]:
    """What a task has beside its body; absent fields are left out."""
    options: dict[str, Any] = {}
    if task_options.key is not None:
        options["key"] = task_options.key
    if task_options.tag is not None:
        options["tag"] = task_options.tag
    if task_options.properties:
        options["props"] = task_options.properties
    if task_options.priority:
        options["priority"] = task_options.priority
    if task_options.order_key is not None:
        options["order_key"] = task_options.order_key
    replayed = task_options.replayed
    if replayed is not None:
        options["replay_of"] = replayed.id
        if replayed.key is not None:
            options["key"] = replayed.key
    return options


def value_bytes(value: object) -> int:
    """What a plain value takes in an answer."""
    return len(encode_all((value,)))
