"""Engine values as frames' fields: deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tickwheel.engine.topics import Item
from tickwheel.model.records import NO_PAST, Past, TaskOptions, columns_of, is_absent
from tickwheel.protocol.codec import encode_all


def delivery_items(items: Sequence[Item]) -> list[tuple[Any, ...]]:
    """The deliveries of a DELIVER frame."""
    all_options = [row[4] for row, _, _ in items]
    pasts = [past for _, _, past in items]
    are_first = pasts.count(NO_PAST) == len(pasts)
    if are_first and not any(all_options):
        return [(row[0], attempt, row[1], row[3]) for row, attempt, _ in items]
    extras = delivery_extras(all_options)
    if not are_first:
        extras = list(map(_with_past, extras, pasts))
    return [
        (row[0], attempt, row[1], row[3])
        if options is None
        else (row[0], attempt, row[1], row[3], options)
        for (row, attempt, _), options in zip(items, extras, strict=True)
    ]


def _with_past(options: dict[str, Any] | None, past: Past) -> dict[str, Any] | None:
    """The options with the numbers of failures and deaths, where there are some."""
    counts = {"failures": past.failed, "deaths": past.deaths}
    said = {name: count for name, count in counts.items() if count}
    return {**(options or {}), **said} if said else options


def delivery_extras(all_options: Sequence[TaskOptions | None]) -> Sequence[dict[str, Any] | None]:
    """``delivery_options`` of each task that has some."""
    if all(all_options):
        columns = columns_of(all_options)
        present = [
            (name, column)
            for name, column in (
                ("key", columns.key),
                ("tag", columns.tag),
                ("order_key", columns.order_key),
                ("properties", columns.properties),
                ("replay_of", columns.replayed),
            )
            if not is_absent(column)
        ]
        if len(present) == 1 and not any(columns.priority):
            ((name, column),) = present
            if all(column) and name != "replay_of":
                return [{name: value} for value in column]
    return [None if options is None else delivery_options(options) for options in all_options]


def delivery_options(task_options: TaskOptions) -> dict[str, Any]:
    """What a delivery says of a task beside its body; absent options are left out."""
    key, tag, properties, priority, *_, order_key, replayed = task_options
    options: dict[str, Any] = {}
    if key is not None:
        options["key"] = key
    if tag is not None:
        options["tag"] = tag
    if properties:
        options["properties"] = properties
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
    """The bytes that a plain value takes in an answer."""
    return len(encode_all((value,)))
