"""Checks of strings, numbers and properties from clients, and the size of a task, which daemon and
client share.

The checks raise ``InvalidValue``, which the daemon and the client convert to errors of the
protocol. Invariant: a value that passes can be encoded as msgpack and UTF-8, so that every store,
the history and every client can represent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")

FILTER_LENGTH_MAX = 2_048
"""Maximum characters of each of a filter's ``tags`` and ``where``."""
SHARD_BITS = 10
"""The lowest bits of a task's id are the number of the shard that assigned it."""
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1
"""The range of a property's integers: signed 64 bits."""
EXTRAS_BYTES = 64
"""Bytes of the names and headers of all options in a frame."""
PROPERTY_BYTES = 8
"""Bytes of the headers of a property's name and value."""
WINDOW_BYTES = 40
"""Bytes of the names and numbers of a due window."""
ORDER_KEY_BYTES = 16
"""Bytes of the name and headers of an order key."""
TRACE_BYTES = 64
"""Bytes of a traceparent with its name and headers."""
ENCODING_BYTES = 12
"""Bytes of the name and headers of an encoding."""
SHARD_BY_BYTES = 12
"""Bytes of the name and headers of ``shard_by``."""
NUMBER_BYTES = 9
"""Bytes of the longest number in msgpack."""
TEXT_HEADS = {
    "key": 0, "tag": 0, "order_key": ORDER_KEY_BYTES, "encoding": ENCODING_BYTES,
    "shard_by": SHARD_BY_BYTES,
}  # fmt: skip
"""Option that is a text → bytes of its name and headers."""


def shard_of(name: str, count: int) -> int:
    """Return which of ``count`` shards is that of a task with this basis, or the home of a topic
    and its groups."""
    return crc32(name.encode()) % count


def whole_number(text: str) -> int | None:
    """Return the number in a text of up to 19 ASCII digits, or None for any other text. ``int``
    accepts other digits too, and raises ValueError for thousands of them."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


class InvalidValue(ValueError):
    """A value is not valid. ``is_too_long`` means that a length or a count exceeds its limit."""

    def __init__(self, text: str, *values: object, is_too_long: bool = False) -> None:
        """``text`` has a ``{}`` for each of ``values``."""
        super().__init__(text, *values)
        self._text = text
        self._values = values
        self.is_too_long = is_too_long

    def message(self, shown: Callable[[object], str] = repr) -> str:
        """Return the message. ``shown`` shortens and escapes a value from outside."""
        return self._text.format(*map(shown, self._values))

    def __str__(self) -> str:
        return self.message()


def members(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return the members of a JSON object; also the ``object_pairs_hook`` of a parser. Raise
    InvalidValue for a repeated name, because one of its values would be lost."""
    result: dict[str, T] = {}
    for name, value in pairs:
        if name in result:
            raise InvalidValue("{} occurs more than once", name)
        result[name] = value
    return result


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode the text. It cannot encode half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def place_in_trace(traceparent: str) -> tuple[int, int, int, int]:
    """Return (version, trace id, span id, flags) of a checked ``traceparent``."""
    version, trace_id, span_id, flags = traceparent.split("-")
    return int(version, 16), int(trace_id, 16), int(span_id, 16), int(flags, 16)


def check_text(value: Any, field: str, length_max: int, limit: str = "") -> str:
    """Return the value if it is a string of at most ``length_max`` characters. ``limit`` is the
    limit's name for the message. Raise InvalidValue otherwise."""
    if not isinstance(value, str):
        raise InvalidValue(f"{field} must be a string, not {{}}", value)
    if len(value) > length_max:
        limit_name = f" ({limit})" if limit else ""
        raise InvalidValue(
            f"{field} has {len(value)} characters; the limit is {length_max}{limit_name}",
            is_too_long=True,
        )
    if not is_utf8(value):
        raise InvalidValue(f"{field} must be a string that UTF-8 can encode, not {{}}", value)
    return value


def check_properties(
    properties: Any, field: str, *, properties_max: int, name_length_max: int, value_bytes_max: int
) -> None:
    """Check a map of names to strings, 64-bit integers, finite numbers and booleans. Raise
    InvalidValue for any other value."""
    if not isinstance(properties, Mapping):
        raise InvalidValue(f"{field} must be a map, not {{}}", properties)
    if len(properties) > properties_max:
        raise InvalidValue(
            f"{field} has {len(properties)} entries; the limit is {properties_max}"
            " (properties_max)",
            is_too_long=True,
        )
    for name, value in properties.items():
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


def check_property(value: Any, field: str, bytes_max: int, *names: str) -> None:
    """Check the value of one property. ``field`` has a ``{}`` for each of ``names``. Raise
    InvalidValue if the value is not valid."""
    if isinstance(value, str):
        if not is_utf8(value):
            text = f"{field} must be a string that UTF-8 can encode, not {{}}"
            raise InvalidValue(text, *names, value)
        size_bytes = len(value.encode())
        if size_bytes > bytes_max:
            limit = f"the limit is {bytes_max} (property_value_bytes_max)"
            text = f"{field} has {size_bytes} bytes; {limit}"
            raise InvalidValue(text, *names, is_too_long=True)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidValue(f"{field} must be a finite number, not {{}}", *names, value)
    elif not isinstance(value, int):  # bool is a subclass of int
        text = f"{field} must be a string, number or boolean, not {{}}"
        raise InvalidValue(text, *names, value)
    elif not INTEGER_MIN <= value <= INTEGER_MAX:
        text = f"{field} must be an integer between {INTEGER_MIN} and {INTEGER_MAX}, not {{}}"
        raise InvalidValue(text, *names, value)


# --- the size of a task --------------------------------------------------------------------------


def text_bytes(text: str) -> int:
    """Return the length of a text in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def stored_bytes(options: Mapping[str, Any]) -> int:
    """Return ``model.records.options_bytes`` of a task's checked options in wire form, for programs
    that do not have the daemon's records."""
    size = EXTRAS_BYTES
    for name, value in options.items():
        if name in TEXT_HEADS:
            size += TEXT_HEADS[name] + text_bytes(value)
        elif name == "trace":
            size += TRACE_BYTES
        elif name == "within_ms":
            size += WINDOW_BYTES
        elif name == "properties":
            for key, number in value.items():
                size += PROPERTY_BYTES + text_bytes(key)
                size += text_bytes(number) if type(number) is str else NUMBER_BYTES
        elif name == "retry" and not isinstance(value, str):
            size += NUMBER_BYTES * (len(value.get("delays_ms", ())) + 6)
    return size
