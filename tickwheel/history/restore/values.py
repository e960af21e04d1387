"""What events hold, as the records that stores keep. Pure; raises ValueError for what is none."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tickwheel.history.segments import Event
from tickwheel.wheel.records import Extras, GroupSettings
from tickwheel.wheel.retry import BUILT_IN, PolicyRef, RetryPolicy


def body_of(event: Event) -> bytes | None:
    """None when the history holds no bodies."""
    text = event.get("body")
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"the body of task {event.get('task_id')}: {error}") from None


def extras_of(event: Event) -> Extras | None:
    found = Extras(
        key=event.get("key"),
        tag=event.get("tag"),
        properties=event.get("props"),
        priority=event.get("priority", 0),
        ttl_ms=event.get("ttl_ms"),
        retry=policy_of(event.get("retry")),
    )
    return None if found == Extras() else found


def policy_of(told: Any) -> PolicyRef | None:
    """A policy as the wire has it, by its name or its numbers; or as records have it."""
    if told is None or isinstance(told, str):
        return told
    if isinstance(told, list):
        kind, base_ms, factor, cap_ms, retries, jitter, delays_ms = told
        return RetryPolicy(base_ms, factor, cap_ms, retries, jitter, kind, tuple(delays_ms))
    if isinstance(told, Mapping):
        if "name" in told:
            return str(told["name"])
        return _numbers(told)
    raise ValueError(f"{told!r:.100} is no retry policy")


def _numbers(told: Mapping[str, Any]) -> RetryPolicy:
    kind, retries = told.get("kind"), told.get("retries", 16)
    if kind == "none":
        return BUILT_IN["none"]
    if kind == "table":
        return RetryPolicy(0, 1.0, 0, retries, 0.0, kind, tuple(told["delays_ms"]))
    jitter = told.get("jitter", 0.1)
    if kind == "fixed":
        return RetryPolicy(told["delay_ms"], 1.0, 0, retries, jitter, kind)
    if kind == "exponential":
        return RetryPolicy(told["base_ms"], told["factor"], told["cap_ms"], retries, jitter)
    raise ValueError(f"{kind!r:.100} is no kind of retry policy")


def settings_of(told: Mapping[str, Any] | None) -> GroupSettings | None:
    """None when nothing was ever set."""
    if not told:
        return None
    found = GroupSettings(
        paused=bool(told.get("paused", False)),
        rate=told.get("rate"),
        burst=told.get("burst"),
        retry=policy_of(told.get("retry")),
    )
    return None if found == GroupSettings() else found
