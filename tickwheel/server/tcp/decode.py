"""Checks of frames as such; what is in them, ``server.checks`` and the operations check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tickwheel.api.frames import REQUEST_MAX
from tickwheel.errors import BadRequest
from tickwheel.server import checks


def arity(frame: Sequence[Any], count: int, fields: str) -> None:
    """Raises BadRequest unless the frame has ``count`` fields behind type and request."""
    if len(frame) - 2 != count:
        raise BadRequest(f"the frame has {len(frame) - 2} fields, expected {count}: {fields}")


def request_number(value: object) -> int:
    return checks.integer(value, "request", 0, REQUEST_MAX)
