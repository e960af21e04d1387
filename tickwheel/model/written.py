"""What people write: durations, and retry policies as a SPEC. Pure: no clock, no terminal.

    exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1
    fixed:delay=30s,retries=5
    table:10s,30s,1m;retries=8        beyond the table its last delay
    none, default, rocketmq, or a name that the daemon's settings define

What a SPEC leaves out takes the daemon's default. What exceeds the daemon's limits is refused by
the daemon. Parsers raise ValueError with a sentence that names the value; the caller adds which
field or argument it was.

A task in JSON is one format, on a line of the command line's and over HTTP (docs/http.md). A field
that is a time comes in two forms: ``delay`` as people write it, and ``delay_ms``, of which one may
be given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tickwheel.model.retry import FIELDS, NAME, RETRIES_MAX

UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000,
}  # fmt: skip
DURATION_MS_MAX = 2**53
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_DURATION_HELP = "write for example 30s, 5m, 1h30m, 500ms or 2d"

RULE_DURATIONS: Final = ("window", "max_wait")
"""The durations of a rule about pending keys; on the wire they end in ``_ms``."""


def parse_duration(text: str) -> float:
    """Seconds of ``1h30m``, ``500ms`` or ``1.5s``; a bare number is seconds. Whole milliseconds."""
    cleaned = text.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", cleaned):
        cleaned += "s"
    parts = _PART.findall(cleaned)
    if not parts or "".join(number + unit for number, unit in parts) != cleaned:
        raise ValueError(f"{text!r} is not a duration; {_DURATION_HELP}")
    units = [UNITS_MS[unit] for _, unit in parts]
    if sorted(set(units), reverse=True) != units:
        raise ValueError(f"{text!r}: each unit once, the largest first; {_DURATION_HELP}")
    total_ms = _whole(parts)
    if total_ms > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is longer than can be counted")
    return total_ms / 1000


def _whole(parts: Sequence[tuple[str, str]]) -> int:
    """Whole milliseconds of numbers with units, without the noise of binary fractions."""
    digits = max(len(number.partition(".")[2]) for number, _ in parts)
    total = 0
    for number, unit in parts:
        whole, _, fraction = number.partition(".")
        total += int(whole + fraction.ljust(digits, "0")) * UNITS_MS[unit]
    return int(total // 10**digits)


def parse_shift(text: str) -> float:
    """Seconds of a shift: later, or earlier behind a minus sign."""
    cleaned = text.strip()
    return -parse_duration(cleaned[1:]) if cleaned.startswith("-") else parse_duration(cleaned)


def duration_ms(value: Any) -> int:
    """Whole milliseconds of a duration in text, or of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r:.40} is no duration; {_DURATION_HELP}")
    if not isinstance(value, str):
        if not 0 <= value * 1000 <= DURATION_MS_MAX:
            raise ValueError(f"{value!r:.40} is no duration; {_DURATION_HELP}")
        value = f"{value:f}"
    return round(parse_duration(value) * 1000)


def rule_wire(given: Mapping[str, Any]) -> dict[str, Any]:
    """A rule about pending keys, with its durations in the form of the wire."""
    found = dict(given)
    for name in RULE_DURATIONS:
        value = found.pop(name, None)
        if value is None:
            continue
        if found.get(f"{name}_ms") is not None:
            raise ValueError(f"give {name} or {name}_ms, not both")
        try:
            found[f"{name}_ms"] = duration_ms(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


# --- retry policies ------------------------------------------------------------------------------

Policy = str | dict[str, Any]
"""A policy in the form of the wire: a name, or a map with "kind"."""

SPEC_FIELDS: dict[str, dict[str, str]] = {
    kind: {name.removesuffix("_ms"): name for name in names if name != "delays_ms"}
    for kind, names in FIELDS.items()
    if names
}
"""The fields that a SPEC of each kind may have, and their names on the wire."""
_KNOWN = "known are exponential:…, fixed:…, table:…, none, default, rocketmq, or a name"


def parse_policy(text: str) -> Policy:
    """The policy of a SPEC in the form of the wire. Raises ValueError."""
    kind, colon, rest = text.strip().partition(":")
    kind = kind.strip()
    if kind in SPEC_FIELDS:
        return _table(rest) if kind == "table" else {"kind": kind, **_fields(kind, rest)}
    if colon or not NAME.fullmatch(kind):
        raise ValueError(f"{text!r:.80} is no retry policy; {_KNOWN}")
    return kind


def policy_of_json(value: Any) -> Policy:
    """A policy from JSON: a SPEC, or a map in the form of the wire. Raises ValueError."""
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, dict):
        raise ValueError(f"a SPEC or an object is needed, not {value!r:.40}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"kind is {kind!r:.40}; known are none, {', '.join(SPEC_FIELDS)}")
    known = ("kind", *FIELDS[kind])
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


def _fields(kind: str, text: str) -> dict[str, Any]:
    known = SPEC_FIELDS[kind]
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
