"""What becomes of a task whose key is pending: an argument, checked, in the shape of the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from tickwheel.api.times import Duration, duration_ms
from tickwheel.api.words import Action, DueOf, Replaces, UniqueUntil
from tickwheel.errors import BadRequest, shown
from tickwheel.model.coalescing import ADD, Coalescing, checked
from tickwheel.model.retry import InvalidPolicy


@dataclass(frozen=True, slots=True)
class IfPending:
    """What becomes of a task whose topic and key another one has that is pending: scheduled, ready,
    waiting for a retry, or in flight.

    ``action``: "keep" (the pending one stays as it is, this one is not stored), "replace" (this one
    takes its place), "reject" (this one is refused) or "add" (it is stored as well). ``window``,
    in seconds: a task counts as pending for so long after it was enqueued; default: until it is
    finished. ``unique_until``, for "keep" and "reject": "finished", or "started": what a consumer
    has does not count.

    For "replace": ``replaces`` the "body" with all options, the "due" time, or "both"; ``due``: the
    "new" time holds, or the "later" or the "earlier" of the two; ``max_wait``, in seconds: how long
    after its first enqueue the task is due at the latest. What a consumer has is never replaced.
    Raises nothing: it is checked when a task is enqueued with it.
    """

    action: Action
    _: KW_ONLY
    window: Duration | None = None
    unique_until: UniqueUntil | None = None
    replaces: Replaces | None = None
    due: DueOf | None = None
    max_wait: Duration | None = None

    @classmethod
    def of(cls, raw: str | Mapping[str, Any]) -> IfPending:
        """An ``IfPending`` from its form on the wire."""
        if isinstance(raw, str):
            return cls(cast("Action", raw))
        words = {name: raw.get(name) for name in ("unique_until", "replaces", "due")}
        return cls(
            cast("Action", str(raw["action"])),
            window=_seconds(raw.get("window_ms")),
            max_wait=_seconds(raw.get("max_wait_ms")),
            **words,
        )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def rule_wire(value: Any, field: str) -> str | dict[str, Any]:
    """An ``IfPending`` or the name of an action, for the wire. Raises BadRequest."""
    given = IfPending(cast("Action", value)) if isinstance(value, str) else value
    if not isinstance(given, IfPending):
        raise BadRequest(
            f'{field} must be a word such as "keep", or an IfPending, not {shown(value)}'
        )
    said: dict[str, Any] = {
        "action": given.action,
        "unique_until": given.unique_until,
        "replaces": given.replaces,
        "due": given.due,
    }
    for name in ("window", "max_wait"):
        duration = getattr(given, name)
        if duration is not None:
            said[f"{name}_ms"] = duration_ms(duration, f"{field}.{name}")
    try:
        rule: Coalescing = checked(said, field)
    except InvalidPolicy as error:
        raise BadRequest(error.message(shown)) from None
    return rule.to_map()


def task_rule_wire(value: Any, key: str | None, field: str) -> str | dict[str, Any]:
    """A task's rule for the wire; the task must have a key. Raises BadRequest."""
    rule = rule_wire(value, field)
    if key is None and rule != ADD:
        action = rule if isinstance(rule, str) else rule["action"]
        raise BadRequest(f"{field} is {action}, which needs a key")
    return rule
