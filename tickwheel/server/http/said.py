"""What an HTTP request says of a task, in its own words.

Written by scripts/generate from the options of tickwheel/api/tasks.py: change that, and run it.
"""

# ruff: noqa: C901, PLR0912
from __future__ import annotations

from typing import Any


def said(given: Any) -> dict[str, Any]:
    """What a task in JSON says beside when it is due; absent fields are left out."""
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
    if given.retry is not None:
        found["retry"] = given.retry
    if given.if_pending is not None:
        found["if_pending"] = given.if_pending
    return found
