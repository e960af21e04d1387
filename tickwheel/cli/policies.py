"""Retry policies as people write them (SPEC), as the wire has them, and back. Pure.

    exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1
    fixed:delay=30s,retries=5
    table:10s,30s,1m;retries=8        beyond the table its last delay
    none, default, rocketmq, or a name that the daemon's settings define

What a SPEC leaves out takes the daemon's default; what is too much for the daemon, it says.
Parsers raise ValueError that names the field and the value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tickwheel.cli.values import UNITS_MS, parse_duration
from tickwheel.client import Retry

Policy = str | dict[str, Any]
"""As the wire has it: a name, or a map with "kind"."""

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)
FIELDS: dict[str, dict[str, str]] = {
    "exponential": {
        "base": "base_ms", "factor": "factor", "cap": "cap_ms", "retries": "retries",
        "jitter": "jitter",
    },
    "fixed": {"delay": "delay_ms", "retries": "retries", "jitter": "jitter"},
    "table": {"retries": "retries"},
}  # fmt: skip
"""What each kind may say, and its name on the wire."""
RETRIES_MAX = 65_535
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_KNOWN = "known are exponential:…, fixed:…, table:…, none, default, rocketmq, or a name"


# --- from people -----------------------------------------------------------------------------


def parse_policy(text: str) -> Policy:
    """A SPEC."""
    kind, colon, rest = text.strip().partition(":")
    kind = kind.strip()
    if kind in FIELDS:
        return _table(rest) if kind == "table" else {"kind": kind, **_fields(kind, rest)}
    if colon or not _NAME.fullmatch(kind):
        raise ValueError(f"{text!r:.80} is no retry policy; {_KNOWN}")
    return kind


def policy_of_json(value: Any) -> Policy:
    """A SPEC, or a map as the wire has it, from a line of JSON."""
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, dict):
        raise ValueError(f"a SPEC or an object is needed, not {value!r:.40}")
    kind = value.get("kind")
    if kind != "none" and kind not in FIELDS:
        raise ValueError(f"kind is {kind!r:.40}; known are none, {', '.join(FIELDS)}")
    known = {"kind", *FIELDS.get(kind, {}).values()} | ({"delays_ms"} if kind == "table" else set())
    for name, given in value.items():
        if name not in known:
            raise ValueError(f"{name} is no part of kind {kind}")
        if name != "kind" and not _fits(name, given):
            raise ValueError(f"{name} is {given!r:.40}, which is no such number")
    return dict(value)


def _fits(name: str, given: Any) -> bool:
    if name == "delays_ms":
        return isinstance(given, list) and all(type(delay) is int for delay in given)
    return type(given) is int or (type(given) is float and name in {"factor", "jitter"})


def retry_of(policy: Policy | None) -> Retry | None:
    """What was read, as the client takes it."""
    return None if policy is None else Retry.of(policy)


def _fields(kind: str, text: str) -> dict[str, Any]:
    known = FIELDS[kind]
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ValueError(f"{part!r:.60} in {kind}: write {', '.join(f'{n}=…' for n in known)}")
        if known[name] in found:
            raise ValueError(f"{name} is given twice")
        found[known[name]] = _value(name, value)
    return found


def _table(text: str) -> dict[str, Any]:
    delays, _, rest = text.partition(";")
    if not delays.strip():
        raise ValueError("table needs its delays: table:10s,30s,1m")
    delays_ms = [_delay_ms("table", delay) for delay in delays.split(",")]
    return {"kind": "table", "delays_ms": delays_ms, **_fields("table", rest)}


def _value(name: str, text: str) -> int | float:
    if name == "retries":
        if not text.isascii() or not text.isdecimal() or int(text) > RETRIES_MAX:
            raise ValueError(f"retries is {text!r:.40}; 0 to {RETRIES_MAX} is allowed")
        return int(text)
    if name in {"factor", "jitter"}:
        return _number(name, text)
    return _delay_ms(name, text)


def _number(name: str, text: str) -> float:
    least, most = (1.0, math.inf) if name == "factor" else (0.0, 1.0)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r:.40}; a number is needed") from None
    if not (least <= value <= most and math.isfinite(value)):
        allowed = "1 or more" if name == "factor" else "0 to 1"
        raise ValueError(f"{name} is {text}; {allowed} is allowed")
    return value


def _delay_ms(name: str, text: str) -> int:
    try:
        return round(parse_duration(text) * 1000)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# --- for people ------------------------------------------------------------------------------


def format_policy(policy: Mapping[str, Any] | str | None) -> str:
    """A SPEC that ``parse_policy`` reads back; a dash for none set."""
    if policy is None:
        return "-"
    if isinstance(policy, str):
        return policy
    kind = str(policy.get("kind"))
    if policy.get("name"):
        return str(policy["name"])
    if kind == "table":
        delays = ",".join(spec_duration(delay) for delay in policy.get("delays_ms", ()))
        retries = policy.get("retries")
        return f"table:{delays}" + ("" if retries is None else f";retries={retries}")
    parts = [
        f"{name}={_shown(name, policy[wire])}"
        for name, wire in FIELDS.get(kind, {}).items()
        if policy.get(wire) is not None
    ]
    return f"{kind}:{','.join(parts)}" if parts else kind


def short_policy(policy: Mapping[str, Any] | str | None) -> str:
    """For a narrow column: the name, or the kind and how many retries; a dash for none set."""
    if not isinstance(policy, Mapping) or policy.get("name") or policy.get("kind") == "none":
        return format_policy(policy)
    return f"{policy.get('kind')} x{policy.get('retries')}"


def describe_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The SPEC; behind a name, what it stands for."""
    spec = format_policy(policy)
    if isinstance(policy, str) or policy is None or not policy.get("name"):
        return spec
    meant = format_policy({key: value for key, value in policy.items() if key != "name"})
    return spec if meant == spec else f"{spec} ({meant})"


def spec_duration(ms: int) -> str:
    """Exact, as a SPEC has it: ``1m30s``, ``500ms``, ``2h``."""
    parts, rest_ms = [], ms
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _shown(name: str, value: Any) -> str:
    if name not in {"factor", "jitter"}:
        return str(value) if name == "retries" else spec_duration(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
