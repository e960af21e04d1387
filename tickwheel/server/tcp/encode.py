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
    key, tag, properties, priority, *_, order_key, replayed = task_options
    options: dict[str, Any] = {}
    if key is not None:
        options["key"] = key
    if tag is not None:
        options["tag"] = tag
    if properties:
        options["props"] = properties
    if priority:
        options["priority"] = priority
    if order_key is not None:
        options["order_key"] = order_key
    if replayed is not None:
        options["replay_of"] = replayed.id
        if replayed.key is not None:
            options["key"] = replayed.key
    return options


def value_bytes(value: object) -> int:
    """What a plain value takes in an answer."""
    return len(encode_all((value,)))
