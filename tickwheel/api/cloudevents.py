"""Attributes of CloudEvents 1.0 and their encoding in HTTP headers.

Sources: CloudEvents 1.0.2, sections 3 (context attributes) and 4 (types); HTTP protocol binding
1.0.2, section 3.1.3.2 (header values). The HTTP port reads events by these rules, and the push
target writes events by them. This module does not know tasks or transports.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from tickwheel.errors import BadRequest, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VERSION: Final = "1.0"
REQUIRED: Final = ("id", "source", "specversion", "type")
INTEGER_MIN: Final = -(2**31)
INTEGER_MAX: Final = 2**31 - 1

_NAME = re.compile("[a-z0-9]+")
# Control characters, surrogates, and noncharacters of Unicode.
_NOT_TEXT = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
    + "]"
)
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")
_URI = re.compile(rf"[A-Za-z][A-Za-z0-9+.\-]*:{_URI_REFERENCE.pattern}")
_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_MEDIA_TYPE = re.compile(
    rf'{_WORD}/{_WORD}(?:[ \t]*;[ \t]*{_WORD}=(?:{_WORD}|"(?:[^"\\]|\\.)*"))*[ \t]*;?[ \t]*'
)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)


def is_time(text: str) -> bool:
    """Return whether the text is a timestamp of RFC 3339, which allows second 60."""
    match = _TIME.fullmatch(text)
    if match is None or match[3] > "60":
        return False
    try:
        datetime.fromisoformat(f"{match[1]}T{match[2]}:{min(match[3], '59')}")
    except ValueError:
        return False
    return True


_FORMS: Final[Mapping[str, tuple[Callable[[str], object], str]]] = {
    "specversion": (VERSION.__eq__, f"{VERSION!r}"),
    "id": (bool, "a string of 1 character or more"),
    "source": (_URI_REFERENCE.fullmatch, "a URI reference"),
    "type": (bool, "a string of 1 character or more"),
    "subject": (bool, "a string of 1 character or more"),
    "datacontenttype": (_MEDIA_TYPE.fullmatch, "a media type"),
    "dataschema": (_URI.fullmatch, "a URI with its scheme"),
    "time": (is_time, "a time of RFC 3339"),
}
"""Attribute of the specification → (check of its text, description of the valid form)."""


def invalid_reason(name: str, value: object) -> str | None:
    """Return why an attribute is not valid, or None if it is valid."""
    if not _NAME.fullmatch(name):
        return f"the name of the event's attribute {shown(name)} must consist of a-z and 0-9"
    if name in ("data", "data_base64"):
        return f"the event's attribute cannot be named {name}, the name of the event's data"
    form = _FORMS.get(name)
    if isinstance(value, str):
        if _NOT_TEXT.search(value):
            return f"the event's {name} contains a control or invalid character: {shown(value)}"
        if form is None or form[0](value):
            return None
    elif form is None:
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            if INTEGER_MIN <= value <= INTEGER_MAX:
                return None
            return (
                f"the event's {name} must be an integer between {INTEGER_MIN} and {INTEGER_MAX},"
                f" not {shown(value)}"
            )
    must_be = "a string, an integer or a boolean" if form is None else form[1]
    return f"the event's {name} must be {must_be}, not {shown(value)}"


def check(attributes: Mapping[str, object]) -> None:
    """Raise BadRequest unless these are the attributes of a valid event."""
    for name in REQUIRED:
        if name not in attributes:
            raise BadRequest(f"the event's {name} is missing")
    for name, value in attributes.items():
        reason = invalid_reason(name, value)
        if reason is not None:
            raise BadRequest(reason)


_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_LONE_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def header_text(name: str, value: bytes) -> str:
    """Return the attribute in a header ``ce-NAME``: remove quotes, undo percent-encoding once, and
    decode UTF-8. Raise BadRequest if one of these steps fails."""
    unquoted = _QUOTED.sub(lambda match: re.sub(rb"\\(.)", rb"\1", match[1]), value)
    reason = ""
    if b'"' in _QUOTED.sub(b"", value):
        reason = "a quote that is not closed"
    elif _LONE_PERCENT.search(unquoted):
        reason = "a % that is not followed by two hex digits"
    try:
        text = unquote_to_bytes(unquoted).decode()
    except UnicodeDecodeError:
        reason = "percent-encoding that is not UTF-8"
    if reason:
        raise BadRequest(f"header ce-{name} has {reason}: {shown(value.decode('latin-1'))}")
    return text
