"""The filter of a group, as it is sent. What it says, the daemon alone reads."""

from __future__ import annotations

from typing import Any

from tickwheel.errors import BadRequest, shown


def filter_wire(tags: Any = None, where: Any = None) -> dict[str, str]:
    """What is given of it. Raises BadRequest naming what is no text."""
    found: dict[str, str] = {}
    for name, text in (("tags", tags), ("where", where)):
        if text is not None:
            if not isinstance(text, str):
                raise BadRequest(f"{name} must be a str, not {shown(text)}")
            found[name] = text
    return found
