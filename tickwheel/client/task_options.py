"""A task as producers create it, and the options that consumers read.

Written by scripts/generate from the options of tickwheel/api/tasks.py: change that, and run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any

from tickwheel.api.frames import Action
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.tasks import Value, kept_options
from tickwheel.api.times import Duration
from tickwheel.limits import Limits


@dataclass(slots=True)
class Task:
    """A task for ``enqueue_many``, due after ``delay`` (seconds, or a timedelta) or at ``at``
    (an aware datetime), else at once.

    See TaskKeywords for the other fields. Enqueueing checks the task.
    """

    topic: str
    body: bytes
    _: KW_ONLY
    delay: Duration | None = None
    at: datetime | None = None
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, Value] | None = None
    priority: int = 0
    ttl: Duration | None = None
    within: Duration | None = None
    order_key: str | None = None
    trace: str | None = None
    encoding: str | None = None
    shard_by: str | None = None
    retry: Retry | None = None
    delay_level: int | None = None
    if_pending: Action | IfPending | None = None


def is_bare(task: Task) -> bool:
    """Return whether a task has only a topic, a body and a delay."""
    return not (
        task.at is not None
        or task.key is not None
        or task.tag is not None
        or task.properties
        or task.priority != 0
        or type(task.priority) is not int
        or task.ttl is not None
        or task.within is not None
        or task.order_key is not None
        or task.trace is not None
        or task.encoding is not None
        or task.shard_by is not None
        or task.retry is not None
        or task.delay_level is not None
        or task.if_pending is not None
    )


_CHECKS = {field.name: field.kind.of_task for field, _ in kept_options()}
_key = _CHECKS["key"]
_tag = _CHECKS["tag"]
_properties = _CHECKS["properties"]
_priority = _CHECKS["priority"]
_ttl_ms = _CHECKS["ttl_ms"]
_within_ms = _CHECKS["within_ms"]
_order_key = _CHECKS["order_key"]
_trace = _CHECKS["trace"]
_encoding = _CHECKS["encoding"]
_shard_by = _CHECKS["shard_by"]
_retry = _CHECKS["retry"]


def checked_options(task: Task, field: str, limits: Limits) -> dict[str, Any]:
    """Return the checked options that are stored with a task, in wire form. ``field`` is the
    task's name in errors. Raises BadRequest, LimitExceeded."""
    found: dict[str, Any] = {}
    if task.key is not None:
        found["key"] = _key(task.key, f"{field}.key", limits)
    if task.tag is not None:
        found["tag"] = _tag(task.tag, f"{field}.tag", limits)
    if task.properties:
        found["properties"] = _properties(task.properties, f"{field}.properties", limits)
    if task.priority != 0 or type(task.priority) is not int:
        found["priority"] = _priority(task.priority, f"{field}.priority", limits)
    if task.ttl is not None:
        found["ttl_ms"] = _ttl_ms(task.ttl, f"{field}.ttl", limits)
    if task.within is not None:
        found["within_ms"] = _within_ms(task.within, f"{field}.within", limits)
    if task.order_key is not None:
        found["order_key"] = _order_key(task.order_key, f"{field}.order_key", limits)
    if task.trace is not None:
        found["trace"] = _trace(task.trace, f"{field}.trace", limits)
    if task.encoding is not None:
        found["encoding"] = _encoding(task.encoding, f"{field}.encoding", limits)
    if task.shard_by is not None:
        found["shard_by"] = _shard_by(task.shard_by, f"{field}.shard_by", limits)
    if task.retry is not None:
        found["retry"] = _retry(task.retry, f"{field}.retry", limits)
    return found


_NOTHING: Mapping[str, Any] = {}


class DeliveredOptions:
    """The options of a task in ``_item``, an item of a DELIVER frame."""

    __slots__ = ()

    _item: tuple[Any, ...]

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._item[4] if len(self._item) > 4 else _NOTHING

    @property
    def key(self) -> str | None:
        """Your name for the task, which you can use to cancel, reschedule or look it up; several
        tasks can share one key."""
        value: str | None = self._options.get("key", None)
        return value

    @property
    def tag(self) -> str | None:
        """One word by which groups filter: not empty, not `*`, without `||`, and without leading or
        trailing blanks."""
        value: str | None = self._options.get("tag", None)
        return value

    @property
    def properties(self) -> Mapping[str, Value]:
        """Values for consumers, by name: text, 64-bit integers, finite floats, booleans."""
        value: Mapping[str, Value] = self._options.get("properties", _NOTHING)
        return value

    @property
    def priority(self) -> int:
        """Due tasks with a higher priority are delivered first; by default 0."""
        value: int = self._options.get("priority", 0)
        return value

    @property
    def order_key(self) -> str | None:
        """Each group gets the tasks of one order key one at a time, by due time, then in the order
        in which they were enqueued. The group's ``order_retry`` decides when a failed task is tried
        again, so ``retry`` cannot be combined with an order key."""
        value: str | None = self._options.get("order_key", None)
        return value

    @property
    def trace(self) -> str | None:
        """The producer's W3C ``traceparent``. It is part of each delivery, so that the consumers'
        spans belong to the same trace."""
        value: str | None = self._options.get("trace", None)
        return value

    @property
    def encoding(self) -> str | None:
        """The body's type and the steps applied to it, in order, such as ``json;v=2,zlib``; None
        means plain bytes. The daemon stores it without reading the body."""
        value: str | None = self._options.get("encoding", None)
        return value
