"""Readers of a task's options for a delivery, and of its fields in a request over HTTP.

Written by scripts/generate from the options of tickwheel/api/tasks.py: change that, and run it.
"""

from __future__ import annotations

from typing import Any

from tickwheel.model.records import TaskOptions


def delivered(options: TaskOptions) -> dict[str, Any]:
    """Return the options of a task for a delivery; absent options are left out."""
    key, tag, properties, priority, _, _, _, _, _, order_key, replayed, trace, encoding, _ = options
    found: dict[str, Any] = {}
    if key is not None:
        found["key"] = key
    if tag is not None:
        found["tag"] = tag
    if properties:
        found["properties"] = properties
    if priority:
        found["priority"] = priority
    if order_key is not None:
        found["order_key"] = order_key
    if trace is not None:
        found["trace"] = trace
    if encoding is not None:
        found["encoding"] = encoding
    if replayed is not None:
        found["replay_of"] = replayed.id
        if replayed.key is not None:
            found["key"] = replayed.key
    return found


def task_values(given: Any) -> dict[str, Any]:
    """Return the fields of a task in JSON except its due time; absent fields are left out."""
    found: dict[str, Any] = {}
    if given.key is not None:
        found["key"] = given.key
    if given.tag is not None:
        found["tag"] = given.tag
    if given.properties:
        found["properties"] = given.properties
    if given.priority:
        found["priority"] = given.priority
    if given.ttl_ms is not None:
        found["ttl_ms"] = given.ttl_ms
    if given.ttl is not None:
        found["ttl"] = given.ttl
    if given.within_ms is not None:
        found["within_ms"] = given.within_ms
    if given.within is not None:
        found["within"] = given.within
    if given.order_key is not None:
        found["order_key"] = given.order_key
    if given.trace is not None:
        found["trace"] = given.trace
    if given.encoding is not None:
        found["encoding"] = given.encoding
    if given.shard_by is not None:
        found["shard_by"] = given.shard_by
    if given.retry is not None:
        found["retry"] = given.retry
    if given.if_pending is not None:
        found["if_pending"] = given.if_pending
    return found
