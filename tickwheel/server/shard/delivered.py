"""What consumers see of a task's options.

Written by scripts/generate from the options of tickwheel/api/tasks.py: change that, and run it.
"""

from __future__ import annotations

from typing import Any

from tickwheel.model.records import TaskOptions


def delivered(options: TaskOptions) -> dict[str, Any]:
    """What a delivery says of a task beside its body; absent options are left out."""
    key, tag, properties, priority, _, _, _, _, _, order_key, replayed, trace, encoding = options
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
