"""Keywords in the shape of the wire: one line for each, which has its name there and its check.

What is checked is what would mean something else on the wire, or nothing; bounds are the daemon's
business. The keywords of tasks that are enqueued are checked in ``tasks.py``, against its limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tickwheel.api.pending import rule_wire
from tickwheel.api.retry import policy_wire
from tickwheel.api.times import duration_ms, moment_ms
from tickwheel.errors import BadRequest, shown


def wire_of(named: Mapping[str, object], *, with_none: bool = False) -> dict[str, Any]:
    """The named keywords of ``WIRE``, checked, in the form of the wire. One that is None is left
    out or, ``with_none``, sent as such. Raises BadRequest naming the keyword."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        wire_name, check = WIRE[name]
        if value is not None or check is flag:
            found[wire_name] = check(value, name)
        elif with_none:
            found[wire_name] = None
    return found


def wire_names(names: Iterable[str]) -> list[str]:
    """The names of these keywords on the wire."""
    return [WIRE[name][0] for name in names]


def flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{field} must be True or False, not {shown(value)}")
    return value


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{field} must be a str, not {shown(value)}")
    return value


def _integer(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"{field} must be an integer, not {shown(value)}")
    return value


def _number(value: Any, field: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise BadRequest(f"{field} must be a number, not {shown(value)}")
    return value


def _rate(value: Any, field: str) -> float:
    wrong = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong or not math.isfinite(value) or value <= 0:
        raise BadRequest(
            f"{field} must be a number above 0 (deliveries a second), not {shown(value)}"
        )
    return float(value)


def _burst(value: Any, field: str) -> int:
    if type(value) is not int or value < 1:
        raise BadRequest(f"{field} must be an integer of 1 or more, not {shown(value)}")
    return value


def _properties(value: Any, _: str) -> dict[str, Any]:
    return dict(value)


def _as_it_is(value: Any, _: str) -> Any:
    """The value unchanged: the daemon checks it."""
    return value


WIRE: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    # of the tasks of schedules
    "key": ("key", _as_it_is),
    "tag": ("tag", _as_it_is),
    "properties": ("properties", _properties),
    "priority": ("priority", _as_it_is),
    "ttl": ("ttl_ms", duration_ms),
    "retry": ("retry", policy_wire),
    "within": ("within_ms", duration_ms),
    "order_key": ("order_key", _as_it_is),
    # of groups and topics
    "tags": ("tags", _text),
    "where": ("where", _text),
    "order_retry": ("order_retry_ms", duration_ms),
    "order_attempts": ("order_attempts", _integer),
    "order_failure": ("order_failure", _text),
    "fair_by": ("fair_by", _text),
    "limit_each": ("limit_each", _integer),
    "rate_each": ("rate_each", _number),
    "rate": ("rate", _rate),
    "burst": ("burst", _burst),
    "paused": ("paused", flag),
    "if_pending": ("if_pending", rule_wire),
    "broadcast_only": ("broadcast_only", flag),
    # of selections
    "key_prefix": ("key_prefix", _text),
    "due_from": ("due_from_ms", moment_ms),
    "due_to": ("due_to_ms", moment_ms),
    "state": ("state", _text),
    "group": ("group", _text),
    "reason": ("reason", _text),
}
