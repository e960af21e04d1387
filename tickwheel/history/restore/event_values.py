"""What events hold, as the records that stores keep. Pure; raises ValueError for what is none."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from tickwheel.history.segments import Event
from tickwheel.model.coalescing import Coalescing, checked
from tickwheel.model.records import (
    LINE_SETTINGS,
    FormerFilter,
    GroupSettings,
    Replayed,
    TaskOptions,
)
from tickwheel.model.retry import of_history


def body_of(event: Event) -> bytes | None:
    """The body in an event; None: the history holds no bodies."""
    text = event.get("body")
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"the body of task {event.get('task_id')}: {error}") from None


def options_of(event: Event) -> TaskOptions | None:
    key, replay_of, replayed = event.get("key"), event.get("replay_of"), None
    if replay_of is not None:
        key, replayed = None, Replayed(int(replay_of), event["replay_to"], key)
    found = TaskOptions(
        key=key,
        tag=event.get("tag"),
        properties=event.get("props"),
        priority=event.get("priority", 0),
        ttl_ms=event.get("ttl_ms"),
        retry=of_history(event.get("retry")),
        within_ms=event.get("within_ms"),
        asked_ms=event.get("asked_ms"),
        order_key=event.get("order_key"),
        replayed=replayed,
    )
    return None if found == TaskOptions() else found


def _rule(given: Any) -> Coalescing | None:
    return None if given is None else checked(given, "if_pending")


def _former(tags: str | None, where: str | None, due_ms: int, order: str) -> FormerFilter:
    return FormerFilter(tags, where, int(due_ms), int(order))


def settings_of(given: Mapping[str, Any] | None) -> GroupSettings | None:
    """The settings in an event; None: nothing was ever set."""
    if not given:
        return None
    found = GroupSettings(
        paused=bool(given.get("paused", False)),
        rate=given.get("rate"),
        burst=given.get("burst"),
        retry=of_history(given.get("retry")),
        closed_ms=given.get("closed_ms"),
        if_pending=_rule(given.get("if_pending")),
        broadcast_only=bool(given.get("broadcast_only", False)),
        tags=given.get("tags"),
        where=given.get("where"),
        former=tuple(_former(*fields) for fields in given.get("former", ())),
        **{name: given[name] for name in LINE_SETTINGS if name in given},
    )
    return None if found == GroupSettings() else found
