"""What people type and read: durations, times, ids, properties. Pure; no terminal, no clock.

Parsers raise ValueError with a sentence that names the value; the caller adds which argument.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

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


def parse_property(text: str) -> tuple[str, str]:
    """``name=value``; the value may hold more equals signs, or be empty."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is no property; write name=value")
    return name, value


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
