"""What events hold, as the records that stores keep. Pure; raises ValueError for what is none."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tickwheel.history.segments import Event
from tickwheel.model.records import Extras, GroupSettings
from tickwheel.model.retry import BUILT_IN, PolicyRef, RetryPolicy


def body_of(event: Event) -> bytes | None:
    """None when the history holds no bodies."""
    text = event.get("body")
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"the body of task {event.get('task_id')}: {error}") from None


def options_of(event: Event) -> Extras | None:
    found = Extras(
        key=event.get("key"),
        tag=event.get("tag"),
        properties=event.get("props"),
        priority=event.get("priority", 0),
        ttl_ms=event.get("ttl_ms"),
        retry=policy_of(event.get("retry")),
    )
    return None if found == Extras() else found


def policy_of(given: Any) -> PolicyRef | None:
    """A policy as the wire has it, by its name or its numbers; or as records have it."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, list):
        kind, base_ms, factor, cap_ms, retries, jitter, delays_ms = given
        return RetryPolicy(base_ms, factor, cap_ms, retries, jitter, kind, tuple(delays_ms))
    if isinstance(given, Mapping):
        if "name" in given:
            return str(given["name"])
        return _numbers(given)
    raise ValueError(f"{given!r:.100} is no retry policy")


def _numbers(given: Mapping[str, Any]) -> RetryPolicy:
    kind, retries = given.get("kind"), given.get("retries", 16)
    if kind == "none":
        return BUILT_IN["none"]
    if kind == "table":
        return RetryPolicy(0, 1.0, 0, retries, 0.0, kind, tuple(given["delays_ms"]))
    jitter = given.get("jitter", 0.1)
    if kind == "fixed":
        return RetryPolicy(given["delay_ms"], 1.0, 0, retries, jitter, kind)
    if kind == "exponential":
        return RetryPolicy(given["base_ms"], given["factor"], given["cap_ms"], retries, jitter)
    raise ValueError(f"{kind!r:.100} is no kind of retry policy")


def settings_of(given: Mapping[str, Any] | None) -> GroupSettings | None:
    """None when nothing was ever set."""
    if not given:
        return None
    found = GroupSettings(
        paused=bool(given.get("paused", False)),
        rate=given.get("rate"),
        burst=given.get("burst"),
        retry=policy_of(given.get("retry")),
    )
    return None if found == GroupSettings() else found
