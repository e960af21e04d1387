"""Retry policies and settings on the wire: checked maps to values, and values to maps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tickwheel.errors import BadRequest, LimitExceeded, TickwheelError
from tickwheel.model.records import GroupSettings
from tickwheel.model.retry import BUILT_IN, DEFAULT, PolicyRef, RetryPolicy
from tickwheel.server import checks

DELAY_MS_MAX = 315_576_000_000
"""Ten years."""
RETRIES_MAX = 65_535
STEPS_MAX = 1_024
FACTOR_MAX = 1_000_000.0
RATE_MAX = 1_000_000_000.0
RATE_MIN = 1e-6
BURST_MAX = 1_000_000_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_FIELDS = {
    "exponential": ("base_ms", "factor", "cap_ms", "retries", "jitter"),
    "fixed": ("delay_ms", "retries", "jitter"),
    "table": ("delays_ms", "retries"),
    "none": (),
}


def policy(value: Any, field: str, known: Mapping[str, RetryPolicy]) -> PolicyRef:
    """A policy as a client gives it. ``known``: those that may be named, the default included.

    Numbers that a map leaves out are the default policy's.
    """
    if isinstance(value, str):
        if value not in known:
            names = ", ".join(sorted(known))
            raise BadRequest(
                f"{field}: the policy {checks.shown(value)} is not known; known: {names}"
            )
        return value
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be a policy's name or a map, not {checks.shown(value)}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise BadRequest(
            f"{field}.kind must be one of {', '.join(_FIELDS)}, not {checks.shown(kind)}"
        )
    given = {name: number for name, number in value.items() if number is not None}
    checks.options(given, ("kind", *_FIELDS[kind]), field)
    return _numbers(kind, given, field, known[DEFAULT])


def named(given: Mapping[str, Any], default: RetryPolicy) -> dict[str, RetryPolicy]:
    """The policies that the settings define. Raises ValueError for one that is wrong."""
    found: dict[str, RetryPolicy] = {}
    for name, value in given.items():
        if name in BUILT_IN or name == DEFAULT:
            raise ValueError(f"the policy {name} is defined already; choose another name")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"a policy's name is a letter and up to 63 of A-Z a-z 0-9 . _ -, not {name!r}"
            )
        try:
            one = policy(value, f"retry_policies.{name}", {DEFAULT: default})
        except TickwheelError as error:
            raise ValueError(error.message) from None
        if isinstance(one, str):
            raise ValueError(f"retry_policies.{name} must be a table of numbers, not a name")
        found[name] = one
    return found


def _numbers(kind: str, given: dict[str, Any], field: str, default: RetryPolicy) -> RetryPolicy:
    def ms(name: str, missing: int) -> int:
        return checks.integer(given.get(name, missing), f"{field}.{name}", 0, DELAY_MS_MAX)

    if kind == "none":
        return BUILT_IN["none"]
    retries = checks.integer(
        given.get("retries", default.retries_max), f"{field}.retries", 0, RETRIES_MAX
    )
    if kind == "table":
        return RetryPolicy(0, 1.0, 0, retries, 0.0, kind, _table(given.get("delays_ms"), field))
    jitter = _number(given.get("jitter", default.jitter), f"{field}.jitter", 0.0, 1.0)
    if kind == "fixed":
        return RetryPolicy(ms("delay_ms", default.base_ms), 1.0, 0, retries, jitter, kind)
    factor = _number(given.get("factor", default.factor), f"{field}.factor", 1.0, FACTOR_MAX)
    base_ms = ms("base_ms", default.base_ms)
    cap_ms = ms("cap_ms", max(default.cap_ms, base_ms))
    if cap_ms < base_ms:
        raise BadRequest(f"{field}.cap_ms is {cap_ms}, less than base_ms, {base_ms}")
    return RetryPolicy(base_ms, factor, cap_ms, retries, jitter, kind)


def _table(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not value:
        raise BadRequest(f"{field}.delays_ms must be an array of delays, not {checks.shown(value)}")
    if len(value) > STEPS_MAX:
        raise LimitExceeded(f"{field}.delays_ms has {len(value)} delays; the limit is {STEPS_MAX}")
    return tuple(
        checks.integer(delay, f"{field}.delays_ms[{i}]", 0, DELAY_MS_MAX)
        for i, delay in enumerate(value)
    )


def _number(value: Any, field: str, low: float, high: float) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise BadRequest(
            f"{field} must be a number of {low:g} to {high:g}, not {checks.shown(value)}"
        )
    return float(value)


def policy_map(ref: PolicyRef | None, known: Mapping[str, RetryPolicy]) -> dict[str, Any] | None:
    """A policy as it is answered: always its numbers, with its name when it was named."""
    if ref is None:
        return None
    numbers = known.get(ref, known[DEFAULT]) if isinstance(ref, str) else ref
    told: dict[str, Any] = {"kind": numbers.kind}
    if isinstance(ref, str):
        told["name"] = ref
    values = {
        "base_ms": numbers.base_ms,
        "factor": numbers.factor,
        "cap_ms": numbers.cap_ms,
        "delay_ms": numbers.base_ms,
        "delays_ms": numbers.delays_ms,
        "retries": numbers.retries_max,
        "jitter": numbers.jitter,
    }
    return told | {name: values[name] for name in _FIELDS[numbers.kind]}


def equal(one: PolicyRef, other: PolicyRef, known: Mapping[str, RetryPolicy]) -> bool:
    """Whether they are one policy: the same name, or the same numbers."""
    return one == other or policy_map(one, known) == policy_map(other, known)


def told(ref: PolicyRef) -> str:
    """A policy in an error message."""
    if isinstance(ref, str):
        return repr(ref)
    numbers = policy_map(ref, {DEFAULT: ref}) or {}
    return checks.shown(numbers)


def settings(
    given: Mapping[str, Any], before: GroupSettings, known: Mapping[str, RetryPolicy]
) -> GroupSettings:
    """``before`` with the fields that are named in ``given``, checked."""
    after = before
    if "paused" in given:
        if not isinstance(given["paused"], bool):
            raise BadRequest(f"paused must be true or false, not {checks.shown(given['paused'])}")
        after = after._replace(paused=given["paused"])
    if "rate" in given:
        rate = given["rate"]
        if rate is not None:
            rate = _number(rate, "rate", RATE_MIN, RATE_MAX)
        after = after._replace(rate=rate)
    if "burst" in given:
        burst = given["burst"]
        if burst is not None:
            checks.integer(burst, "burst", 1, BURST_MAX)
        after = after._replace(burst=burst)
    if "retry" in given:
        retry = given["retry"]
        after = after._replace(retry=None if retry is None else policy(retry, "retry", known))
    return after


def settings_map(
    topic: str, group: str | None, found: GroupSettings, known: Mapping[str, RetryPolicy]
) -> dict[str, Any]:
    """As CONFIGURE and GROUP_CREATE answer them."""
    return {
        "topic": topic,
        "group": group,
        "paused": found.paused,
        "rate": found.rate,
        "burst": found.burst,
        "retry": policy_map(found.retry, known),
    }
