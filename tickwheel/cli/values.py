"""What people type and read: durations, times, ids, properties, retry policies. Pure: no terminal,
no clock. Parsers raise ValueError with a sentence that names the value; the caller adds which
argument it was.

A retry policy is written as a SPEC:

    exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1
    fixed:delay=30s,retries=5
    table:10s,30s,1m;retries=8        beyond the table its last delay
    none, default, rocketmq, or a name that the daemon's settings define

What a SPEC leaves out takes the daemon's default. What exceeds the daemon's limits is refused by
the daemon.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from tickwheel.client import Retry
from tickwheel.model.retry import FIELDS, NAME, RETRIES_MAX

UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000,
}  # fmt: skip
DURATION_MS_MAX = 2**53
ID_MAX = 2**63 - 1
BODY_SHOWN_MAX = 60
"""Characters of a body in a table; JSON holds all of it."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_DURATION_HELP = "write for example 30s, 5m, 1h30m, 500ms or 2d"


def parse_duration(text: str) -> float:
    """Seconds. ``1h30m``, ``500ms``, ``1.5s``; a bare number is seconds. Whole milliseconds."""
    cleaned = text.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", cleaned):
        cleaned += "s"
    parts = _PART.findall(cleaned)
    if not parts or "".join(number + unit for number, unit in parts) != cleaned:
        raise ValueError(f"{text!r} is not a duration; {_DURATION_HELP}")
    units = [UNITS_MS[unit] for _, unit in parts]
    if sorted(set(units), reverse=True) != units:
        raise ValueError(f"{text!r}: each unit once, the largest first; {_DURATION_HELP}")
    total_ms = sum(Decimal(number) * UNITS_MS[unit] for number, unit in parts)
    if total_ms > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is longer than can be counted")
    return int(total_ms) / 1000


def parse_at(text: str) -> datetime:
    """ISO-8601 with a zone. Without one it is this machine's local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.astimezone() if found.tzinfo is None else found
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no ISO-8601 time; write for example 2030-01-31T09:00:00+01:00"
        ) from None


def parse_id(text: str) -> int:
    """A task's id as the daemon gave it."""
    if not text.isascii() or not text.isdecimal() or int(text) > ID_MAX:
        raise ValueError(f"{text!r} is no task id (a whole number from 0 to 2^63 - 1)")
    return int(text)


def parse_property(text: str) -> tuple[str, str | int | float | bool]:
    """``name=value``, a text, which may hold more equals signs, or be empty; ``name:=value``: a
    number, true or false."""
    name, equals, value = text.partition("=")
    if not equals or name in {"", ":"}:
        raise ValueError(f"{text!r} is no property; write name=value, or name:=number")
    if not name.endswith(":"):
        return name, value
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, (int, float)):
        raise ValueError(f"{text!r}: a number, true or false is needed behind :=")
    return name[:-1], found


def format_duration(seconds: float) -> str:
    """The two largest units that say it: ``1h 30m``, ``12.5 s``, ``3 ms``."""
    total_ms = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 and total_ms else ""
    if total_ms < 1_000:
        return f"{sign}{total_ms} ms"
    if total_ms < 60_000:
        return f"{sign}{total_ms / 1000:.3g} s"
    parts: list[str] = []
    rest_ms = total_ms
    for unit in ("d", "h", "m", "s"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
        if len(parts) == 2:
            break
    return sign + " ".join(parts)


def format_count(value: Any) -> str:
    """``12,345``; a dash when it is not known."""
    return f"{value:,}" if isinstance(value, int) else "-"


def format_time(at_ms: int | None) -> str:
    """Local time to the millisecond; a dash for none."""
    if at_ms is None:
        return "-"
    try:
        local = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
    return local.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}"


def iso_time(at_ms: int) -> str:
    """UTC, as JSON readers expect it."""
    found = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def body_fields(body: bytes) -> dict[str, Any]:
    """``{"body": text}`` when it is UTF-8, else ``{"body_base64": …}``; bulk input reads both."""
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def printable(text: str, length_max: int | None = None) -> str:
    """``text`` on one line, without anything that a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if length_max is not None and len(shown) > length_max:
        return shown[: length_max - 1] + "…"
    return shown


def body_text(body: bytes, length_max: int | None = BODY_SHOWN_MAX) -> str:
    """A body for people."""
    try:
        return printable(body.decode("utf-8"), length_max)
    except UnicodeDecodeError:
        return f"({len(body)} bytes that are no text)"


# --- retry policies ------------------------------------------------------------------------------

Policy = str | dict[str, Any]
"""As the wire has it: a name, or a map with "kind"."""

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)
SPEC_FIELDS: dict[str, dict[str, str]] = {
    kind: {name.removesuffix("_ms"): name for name in names if name != "delays_ms"}
    for kind, names in FIELDS.items()
    if names
}
"""What each kind may say, and its name on the wire."""
_KNOWN = "known are exponential:…, fixed:…, table:…, none, default, rocketmq, or a name"


def parse_policy(text: str) -> Policy:
    """A SPEC."""
    kind, colon, rest = text.strip().partition(":")
    kind = kind.strip()
    if kind in SPEC_FIELDS:
        return _table(rest) if kind == "table" else {"kind": kind, **_fields(kind, rest)}
    if colon or not NAME.fullmatch(kind):
        raise ValueError(f"{text!r:.80} is no retry policy; {_KNOWN}")
    return kind


def policy_of_json(value: Any) -> Policy:
    """A SPEC, or a map as the wire has it, from a line of JSON."""
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


def describe_rule(raw: str | Mapping[str, Any]) -> str:
    """In one line, as the wire has it."""
    if isinstance(raw, str):
        return raw
    parts = [str(raw["action"])]
    for name, value in raw.items():
        if name.endswith("_ms"):
            parts.append(f"{name.removesuffix('_ms')}={format_duration(value / 1000)}")
        elif name != "action":
            parts.append(f"{name}={value}")
    return " ".join(parts)


def retry_of(policy: Policy | None) -> Retry | None:
    """What was read, as the client takes it."""
    return None if policy is None else Retry.of(policy)


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
        for name, wire in SPEC_FIELDS.get(kind, {}).items()
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
