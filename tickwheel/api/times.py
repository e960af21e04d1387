"""Python's durations and moments as the wire's milliseconds, and back. Reads no clock.

Invariant: rounding never makes anything earlier than asked; what is below a microsecond is
taken for the noise of binary fractions.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from tickwheel.errors import BadRequest, shown
from tickwheel.model.policies import parse_duration

Duration = float | timedelta | str
"""Seconds, a timedelta, or text as the command line has it: ``"1h30m"``, ``"500ms"``."""

EPOCH = datetime.fromtimestamp(0, UTC)
_MICROSECOND = timedelta(microseconds=1)
_MS_MAX = 2**53
"""The longest time, in ms: beyond it floats lose whole milliseconds."""


def duration_ms(value: Any, field: str) -> int:
    """A duration in whole milliseconds, rounded up. Raises BadRequest."""
    if isinstance(value, timedelta):
        micros = value // _MICROSECOND
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or value * 1000 > _MS_MAX:
            raise BadRequest(f"{field} must be a number of seconds, not {shown(value)}")
        micros = round(value * 1_000_000)
    elif isinstance(value, str):
        try:
            return round(parse_duration(value) * 1000)
        except ValueError as problem:
            raise BadRequest(f"{field}: {problem}") from None
    else:
        said = 'seconds, a timedelta or text such as "5m"'
        raise BadRequest(f"{field} must be {said}, not {shown(value)}")
    if micros < 0:
        raise BadRequest(f"{field} must not be negative, but is {shown(value)}")
    return -(-micros // 1000)


def seconds(value: Any, field: str) -> float:
    """A duration in seconds, which must be above 0. Raises BadRequest."""
    found_ms = duration_ms(value, field)
    if found_ms <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    if isinstance(value, str):
        return found_ms / 1000
    return float(value.total_seconds() if isinstance(value, timedelta) else value)


def moment_ms(value: Any, field: str) -> int:
    """Milliseconds since 1970 of an aware datetime, rounded up. Raises BadRequest."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise BadRequest(f"{field} must be a datetime with a time zone, not {shown(value)}")
    return -(-((value - EPOCH) // _MICROSECOND) // 1000)


_TIME = re.compile(
    r"[0-9]{4}(-?)[0-9]{2}\1[0-9]{2}"
    r"(?:[T ][0-9]{2}(?::?[0-9]{2}(?::?[0-9]{2}(?:[.,][0-9]{1,6})?)?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-5][0-9])?)?)?",
    re.IGNORECASE,
)
"""A date, or a date and a time of which only seconds have a fraction."""


def parse_time(text: str) -> datetime:
    """The moment of an ISO-8601 time. Without a zone it is this machine's local time. Raises
    ValueError."""
    cleaned = text.strip()
    try:
        if _TIME.fullmatch(cleaned) is None:
            raise ValueError
        found = datetime.fromisoformat(cleaned.upper())
        return local_time(found) if found.tzinfo is None else found
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r:.60} is not an ISO-8601 time; write for example 2030-01-31T09:00:00+01:00"
        ) from None


def local_time(naive: datetime) -> datetime:
    """The moment at which this machine's clock shows a time: the first of two; and of a time that
    the clock skips, the moment by the offset before (RFC 5545, 3.3.5). Raises OverflowError."""
    whole = naive.replace(microsecond=0, fold=0).timestamp()
    found = datetime.fromtimestamp(whole, UTC).astimezone()
    return found.replace(microsecond=naive.microsecond)


def moment(ms: int) -> datetime:
    """The aware datetime (UTC) of milliseconds since 1970."""
    return EPOCH + timedelta(milliseconds=ms)
