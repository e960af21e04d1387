"""What people type and read: times, ids, properties; durations and retry policies as text. Pure: no
terminal, no clock. Parsers raise ValueError with a sentence that names the value; the caller adds
which argument it was. Durations and policies are read by ``model/written.py``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tickwheel.client import Retry
from tickwheel.model.written import SPEC_FIELDS, UNITS_MS, Policy

ID_MAX = 2**63 - 1
BODY_SHOWN_MAX = 60
"""Characters of a body in a table; JSON holds all of it."""


def parse_at(text: str) -> datetime:
    """A time in ISO-8601 with a zone. Without a zone it is this machine's local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.astimezone() if found.tzinfo is None else found
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no ISO-8601 time; write for example 2030-01-31T09:00:00+01:00"
        ) from None


def parse_id(text: str) -> int:
    """A task's id as the daemon gave it. Raises ValueError."""
    if not text.isascii() or not text.isdecimal() or int(text) > ID_MAX:
        raise ValueError(f"{text!r} is no task id (a whole number from 0 to 2^63 - 1)")
    return int(text)


def parse_property(text: str) -> tuple[str, str | int | float | bool]:
    """A property: ``name=value`` is a text, which may be empty or hold more equals signs;
    ``name:=value`` is a number, true or false."""
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
    """A duration in its two largest units: ``1h 30m``, ``12.5 s``, ``3 ms``."""
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
    """A count as ``12,345``; a dash when it is not known."""
    return f"{value:,}" if isinstance(value, int) else "-"


def format_time(at_ms: int | None) -> str:
    """A local time to the millisecond; a dash for none."""
    if at_ms is None:
        return "-"
    try:
        local = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
    return local.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}"


def iso_time(at_ms: int) -> str:
    """A time in UTC, as JSON readers expect it."""
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
    """A body as text for people, cut to ``length_max`` characters."""
    try:
        return printable(body.decode("utf-8"), length_max)
    except UnicodeDecodeError:
        return f"({len(body)} bytes that are no text)"


# --- retry policies ------------------------------------------------------------------------------

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)


def describe_rule(raw: str | Mapping[str, Any]) -> str:
    """A rule about pending keys on one line."""
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
    """The policy as the client takes it."""
    return None if policy is None else Retry.of(policy)


def format_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The policy as a SPEC that ``parse_policy`` reads back; a dash when none is set."""
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
    """The policy for a narrow column: its name, or kind and number of retries; a dash for none."""
    if not isinstance(policy, Mapping) or policy.get("name") or policy.get("kind") == "none":
        return format_policy(policy)
    return f"{policy.get('kind')} x{policy.get('retries')}"


def describe_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The policy as a SPEC, with the meaning of a name behind it."""
    spec = format_policy(policy)
    if isinstance(policy, str) or policy is None or not policy.get("name"):
        return spec
    meant = format_policy({key: value for key, value in policy.items() if key != "name"})
    return spec if meant == spec else f"{spec} ({meant})"


def spec_duration(ms: int) -> str:
    """A duration exactly, as a SPEC has it: ``1m30s``, ``500ms``, ``2h``."""
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
