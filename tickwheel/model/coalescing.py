"""What becomes of a task whose key a pending task has: the rule that a producer gives with it, or a
topic has for all, and the outcome that it is answered.

Values and their checks only; what counts as pending is ``engine/enqueue.py``. Outside memory a
rule is the name of its action, when nothing else is said, or a map of ``FIELDS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from tickwheel.model.retry import DELAY_MS_MAX, InvalidPolicy

ADD, KEEP, REPLACE, REJECT = ACTIONS = ("add", "keep", "replace", "reject")
STARTED, FINISHED = UNTIL = ("started", "finished")
BOTH, BODY, DUE = REPLACES = ("both", "body", "due")
NEW, LATER, EARLIER = DUES = ("new", "later", "earlier")
FIELDS: Mapping[str, tuple[str, ...]] = {
    ADD: (),
    KEEP: ("window_ms", "unique_until"),
    REPLACE: ("window_ms", "replaces", "due", "max_wait_ms"),
    REJECT: ("window_ms", "unique_until"),
}
"""The fields that each action takes beside itself."""
_WORDS = {"unique_until": UNTIL, "replaces": REPLACES, "due": DUES}


class Coalescing(NamedTuple):
    """``add``: store it, whatever is pending. ``keep``: the pending task stays as it is, and this
    one is not stored. ``replace``: this one takes the place of the pending one. ``reject``: refuse
    it."""

    action: str
    window_ms: int | None = None
    """How long after its enqueue a task counts as pending; None: until it is finished."""
    unique_until: str = FINISHED
    """Whether a task that a consumer has, or has had and finished while others are still owed it,
    is pending: not for ``started``. One that waits for a retry always is."""
    replaces: str = BOTH
    """What is taken over: the body with all options, the due time, or both."""
    due: str = NEW
    """Which due time holds, where it is taken over: the new one, or the later or the earlier."""
    max_wait_ms: int | None = None
    """The latest due time of a replaced task, counted from its first enqueue; None: no limit."""

    def to_map(self) -> str | dict[str, Any]:
        """The rule in the form of the wire, without fields that have their defaults."""
        plain = Coalescing(self.action)
        said = {
            name: getattr(self, name)
            for name in FIELDS[self.action]
            if getattr(self, name) != getattr(plain, name)
        }
        return {"action": self.action, **said} if said else self.action


class Merging(IntEnum):
    """What became of a task that had a rule. The numbers are stored."""

    STORED = 1
    KEPT = 2
    REPLACED = 3
    REJECTED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


Merged = tuple[tuple[int, int, int], ...]
"""(Merging, id, due_ms) of each task of a request; id and due time are of the task that stands."""


def checked(given: Any, field: str) -> Coalescing:
    """A checked rule from a name or a map. Raises InvalidPolicy."""
    if isinstance(given, str):
        given = {"action": given}
    elif not isinstance(given, Mapping):
        raise InvalidPolicy(
            f"{field} must be one of {', '.join(ACTIONS)}, or a map, not {{}}", given
        )
    action = given.get("action")
    if not isinstance(action, str) or action not in ACTIONS:
        raise InvalidPolicy(f"{field} must be one of {', '.join(ACTIONS)}, not {{}}", action)
    allowed = FIELDS[action]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "action" or value is None:
            continue
        if name not in allowed:
            known = ", ".join(allowed) or "nothing more"
            raise InvalidPolicy(f"{field}: {action} has no {{}}; known: {known}", name)
        words = _WORDS.get(name)
        if words is None:
            if type(value) is not int or not 1 <= value <= DELAY_MS_MAX:
                text = f"{field}.{name} must be an integer of 1 to {DELAY_MS_MAX}, not {{}}"
                raise InvalidPolicy(text, value)
        elif not isinstance(value, str) or value not in words:
            text = f"{field}.{name} must be one of {', '.join(words)}, not {{}}"
            raise InvalidPolicy(text, value)
        found[name] = value
    rule = Coalescing(action, **found)
    if rule.replaces == BODY and (rule.due != NEW or rule.max_wait_ms is not None):
        raise InvalidPolicy(
            f"{field}: due and max_wait_ms say nothing where the body alone is replaced"
        )
    return rule
