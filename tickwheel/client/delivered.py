"""What consumers read of a task's options.

Written by scripts/generate from the options of tickwheel/api/tasks.py: change that, and run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tickwheel.api.tasks import Value

_NOTHING: Mapping[str, Any] = {}


class DeliveredOptions:
    """The options of a task in ``_item``, which is as a DELIVER frame has it."""

    __slots__ = ()

    _item: tuple[Any, ...]

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._item[4] if len(self._item) > 4 else _NOTHING

    @property
    def key(self) -> str | None:
        """Your own name for the task, by which it is cancelled, rescheduled and looked up; several
        tasks may have the same."""
        found: str | None = self._options.get("key", None)
        return found

    @property
    def tag(self) -> str | None:
        """One word for consumers, by which groups filter."""
        found: str | None = self._options.get("tag", None)
        return found

    @property
    def properties(self) -> Mapping[str, Value]:
        """For consumers, by name: text, numbers (whole ones of 64 bits, finite ones), booleans."""
        found: Mapping[str, Value] = self._options.get("properties", _NOTHING)
        return found

    @property
    def priority(self) -> int:
        """0 (which is the default) to 255: among tasks that are due the higher goes first."""
        found: int = self._options.get("priority", 0)
        return found

    @property
    def order_key(self) -> str | None:
        """Each group gets the tasks of one order key one at a time, by when they are due, then in
        the order in which they were enqueued. The group's ``order_retry`` says when one that has
        failed is tried again, so ``retry`` does not go with it."""
        found: str | None = self._options.get("order_key", None)
        return found

    @property
    def trace(self) -> str | None:
        """The W3C ``traceparent`` of whoever makes the task; its consumers have it with each
        delivery, so that their spans belong to the same trace."""
        found: str | None = self._options.get("trace", None)
        return found

    @property
    def encoding(self) -> str | None:
        """What the body is, and what was done to it in that order, such as ``json;v=2,zlib``; None:
        plain bytes. The daemon keeps it, and does not look into the body."""
        found: str | None = self._options.get("encoding", None)
        return found
