"""What a plain value from a client may be, so that every store, the history and every client can
hold it: the one check of texts, numbers and properties, for the daemon's ways in and the client.

Knows no wire error: what is wrong is an ``InvalidValue``, which the daemon and the client turn into
theirs. Invariant: what passes can be encoded, as msgpack and as UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

FILTER_LENGTH_MAX = 2_048
"""Characters that a filter's ``tags``, and its ``where``, may have."""
SHARD_BITS = 10
"""The lowest bits of a task's id are the number of the shard that has assigned it."""
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1
"""The whole numbers that a property may have: those of 64 bits with a sign."""


def shard_of(name: str, count: int) -> int:
    """The shard, of ``count``, that a name belongs to: of the basis of a task, where the task is;
    of a topic, where its settings and those of its groups have their home."""
    return crc32(name.encode()) % count


class InvalidValue(ValueError):
    """A value that cannot be taken. ``is_too_long``: a length or count is over its limit."""

    def __init__(self, text: str, *values: object, is_too_long: bool = False) -> None:
        """``text`` has ``{}`` at each place of a value."""
        super().__init__(text, *values)
        self._text = text
        self._values = values
        self.is_too_long = is_too_long

    def message(self, shown: Callable[[object], str] = repr) -> str:
        """The message; ``shown`` makes a value from outside short and harmless."""
        return self._text.format(*map(shown, self._values))

    def __str__(self) -> str:
        return self.message()


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can encode the text: half of a surrogate pair is no character."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def place_in_trace(traceparent: str) -> tuple[int, int, int, int]:
    """(version, trace id, span id, flags) of a ``traceparent`` that was checked."""
    version, trace_id, span_id, flags = traceparent.split("-")
    return int(version, 16), int(trace_id, 16), int(span_id, 16), int(flags, 16)


def check_text(value: Any, field: str, length_max: int, limit: str = "") -> str:
    """A string of at most ``length_max`` characters; ``limit`` is the name of that limit, if it
    has one. Raises InvalidValue."""
    if not isinstance(value, str):
        raise InvalidValue(f"{field} must be a string, not {{}}", value)
    if len(value) > length_max:
        named = f" ({limit})" if limit else ""
        raise InvalidValue(
            f"{field} has {len(value)} characters; the limit is {length_max}{named}",
            is_too_long=True,
        )
    if not is_utf8(value):
        raise InvalidValue(f"{field} must be text that UTF-8 can say, not {{}}", value)
    return value


def check_properties(
    given: Any, field: str, *, properties_max: int, name_length_max: int, value_bytes_max: int
) -> None:
    """A map of names to strings, whole numbers of 64 bits, finite numbers and booleans. Raises
    InvalidValue."""
    if not isinstance(given, Mapping):
        raise InvalidValue(f"{field} must be a map, not {{}}", given)
    if len(given) > properties_max:
        raise InvalidValue(
            f"{field} has {len(given)} entries; the limit is {properties_max} (properties_max)",
            is_too_long=True,
        )
    for name, value in given.items():
        if type(name) is not str or len(name) > name_length_max or not name.isascii():
            check_text(name, f"{field} key", name_length_max, "key_length_max")
        kind = type(value)
        is_usual = (
            (kind is str and len(value) <= value_bytes_max and value.isascii())
            or (kind is int and INTEGER_MIN <= value <= INTEGER_MAX)
            or kind is bool
        )
        if not is_usual:
            check_property(value, f"{field}[{{}}]", value_bytes_max, name)


def check_property(value: Any, field: str, bytes_max: int, *named: str) -> None:
    """The value of one property. ``field`` has ``{}`` at each place of ``named``. Raises
    InvalidValue."""
    if isinstance(value, str):
        if not is_utf8(value):
            text = f"{field} must be text that UTF-8 can say, not {{}}"
            raise InvalidValue(text, *named, value)
        size_bytes = len(value.encode())
        if size_bytes > bytes_max:
            limit = f"the limit is {bytes_max} (property_value_bytes_max)"
            text = f"{field} has {size_bytes} bytes; {limit}"
            raise InvalidValue(text, *named, is_too_long=True)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidValue(f"{field} must be a finite number, not {{}}", *named, value)
    elif not isinstance(value, int):  # true and false are
        text = f"{field} must be a string, number or boolean, not {{}}"
        raise InvalidValue(text, *named, value)
    elif not INTEGER_MIN <= value <= INTEGER_MAX:
        text = f"{field} must be an integer of {INTEGER_MIN} to {INTEGER_MAX}, not {{}}"
        raise InvalidValue(text, *named, value)
