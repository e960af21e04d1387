"""Converts Python's durations and moments to milliseconds on the wire, and back. It reads no clock.

Invariant: rounding never makes a time earlier than requested. Fractions of a microsecond are
treated as noise of binary fractions.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from tickwheel.errors import BadRequest, shown
from tickwheel.model.policies import parse_duration

Duration = float | timedelta | str
"""Seconds, a timedelta, or text as on the command line: ``"1h30m"``, ``"500ms"``."""

EPOCH = datetime.fromtimestamp(0, UTC)
_MICROSECOND = timedelta(microseconds=1)
_MS_MAX = 2**53
"""Maximum duration in ms. Beyond it, a float in seconds loses whole milliseconds."""


def duration_ms(value: Any, field: str) -> int:
    """Return a duration in milliseconds, rounded up. Raise BadRequest for an invalid duration."""
    if isinstance(value, timedelta):
        micros = value // _MICROSECOND
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not -_MS_MAX <= value * 1000 <= _MS_MAX:  # an integer may be too large for a float
            expected = f"a finite number of seconds up to {_MS_MAX // 1000}"
            raise BadRequest(f"{field} must be {expected}, not {shown(value)}")
        micros = round(value * 1_000_000)
    elif isinstance(value, str):
        try:
            return round(parse_duration(value) * 1000)
        except ValueError as problem:
            raise BadRequest(f"{field}: {problem}") from None
    else:
        expected = 'seconds, a timedelta or text such as "5m"'
        raise BadRequest(f"{field} must be {expected}, not {shown(value)}")
    if micros < 0:
        raise BadRequest(f"{field} must be at least 0, not {shown(value)}")
    return -(-micros // 1000)


def seconds(value: Any, field: str) -> float:
    """Return a duration in seconds. Raise BadRequest unless it is above 0."""
    whole_ms = duration_ms(value, field)
    if whole_ms <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    if isinstance(value, str):
        return whole_ms / 1000
    return float(value.total_seconds() if isinstance(value, timedelta) else value)


def moment_ms(value: Any, field: str) -> int:
    """Return an aware datetime in milliseconds since 1970, rounded up. Raise BadRequest for any
    other value."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise BadRequest(f"{field} must be a datetime with a time zone, not {shown(value)}")
    return -(-((value - EPOCH) // _MICROSECOND) // 1000)


_TIME = re.compile(
    r"[0-9]{4}(-?)[0-9]{2}\1[0-9]{2}"
    r"(?:[T ][0-9]{2}(?::?[0-9]{2}(?::?[0-9]{2}(?:[.,][0-9]{1,6})?)?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-5][0-9])?)?)?",
    re.IGNORECASE,
)
"""A date, or a date and a time in which only seconds can have a fraction."""


def parse_time(text: str) -> datetime:
    """Return the moment of an ISO-8601 time. A time without a zone is local time of this machine.
    Raise ValueError for any other text."""
    cleaned = text.strip()
    try:
        if _TIME.fullmatch(cleaned) is None:
            raise ValueError
        parsed = datetime.fromisoformat(cleaned.upper())
        return local_time(parsed) if parsed.tzinfo is None else parsed
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r:.60} is not an ISO-8601 time; write for example 2030-01-31T09:00:00+01:00"
        ) from None


def local_time(naive: datetime) -> datetime:
    """Return the moment of a local time of this machine. A repeated time means its first
    occurrence. A skipped time is read with the offset from before the gap (RFC 5545, 3.3.5). Raise
    OverflowError if it is out of range."""
    seconds_since_epoch = naive.replace(microsecond=0, fold=0).timestamp()
    local = datetime.fromtimestamp(seconds_since_epoch, UTC).astimezone()
    return local.replace(microsecond=naive.microsecond)


def moment(ms: int) -> datetime:
    """Return milliseconds since 1970 as an aware datetime in UTC."""
    return EPOCH + timedelta(milliseconds=ms)
