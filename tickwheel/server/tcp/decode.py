"""Checks of what clients send: each failure names the field, the limit and the value.

``Drafts`` checks the tasks of an ENQUEUE or ONEWAY frame, the hot path of the first half. Frames of
one plain task each have a faster path still and come here only to say what is wrong.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NoReturn

from tickwheel import errors
from tickwheel.errors import BacklogFull, BadRequest, BodyTooLarge, DueTooFar, LimitExceeded
from tickwheel.model.records import DEFAULT_GROUP, Draft, Extras, size_of, text_bytes
from tickwheel.protocol.frames import ID_MAX, REQUEST_MAX, Limits
from tickwheel.server import policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel.engine.state import Core

shown = errors.shown
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,255}")


def integer(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{field} must be an integer of {low} to {high}, not {shown(value)}")
    return value


def text(value: object, field: str, length_max: int) -> str:
    if type(value) is not str:
        raise BadRequest(f"{field} must be a string, not {shown(value)}")
    if len(value) > length_max:
        raise LimitExceeded(f"{field} has {len(value)} characters; the limit is {length_max}")
    return value


def name(value: object, field: str) -> str:
    if type(value) is not str or not _NAME.fullmatch(value):
        raise BadRequest(f"{field} must be 1 to 255 of A-Z a-z 0-9 . _ : / -, not {shown(value)}")
    return value


def group_name(value: object) -> str:
    return DEFAULT_GROUP if value is None else name(value, "group")


def arity(frame: Sequence[Any], count: int, fields: str) -> None:
    """``count`` elements after type and request."""
    if len(frame) - 2 != count:
        raise BadRequest(f"the frame has {len(frame) - 2} fields, expected {count}: {fields}")


def options(value: object, allowed: Sequence[str], field: str = "options") -> dict[str, Any]:
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(f"{field} must be a map, not {shown(value)}")
    for key in value:
        if key not in allowed:
            known = ", ".join(allowed)
            raise BadRequest(f"{field} has an unknown key {shown(key)}; known: {known}")
    return value


def sequence(value: object, field: str, length_max: int) -> Sequence[Any]:
    if type(value) is not tuple:
        raise BadRequest(f"{field} must be an array, not {shown(value)}")
    if len(value) > length_max:
        raise LimitExceeded(f"{field} has {len(value)} elements; the limit is {length_max}")
    return value


def task_ids(value: object, limits: Limits) -> Sequence[int]:
    ids = sequence(value, "ids", limits.ids_per_frame_max)
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > ID_MAX):
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i <= ID_MAX)
        raise BadRequest(f"ids must be integers of 0 to {ID_MAX}, not {shown(wrong)}")
    return ids


def numbers(value: object, field: str, count: int) -> Sequence[int]:
    """As many non-negative integers as there are ids."""
    found = sequence(value, field, count)
    if len(found) != count:
        raise BadRequest(f"{field} has {len(found)} elements, but there are {count} ids")
    if found and (set(map(type, found)) != {int} or min(found) < 0):
        raise BadRequest(f"{field} must be non-negative integers")
    return found


def request_number(value: object) -> int:
    return integer(value, "request", 0, REQUEST_MAX)


def due(delay_ms: object, due_ms: object, field: str, now_ms: int, limits: Limits) -> int:
    """The due time that a delay or an absolute time gives; the past counts as now."""
    if (delay_ms is None) == (due_ms is None):
        raise BadRequest(f"{field} must have either delay_ms or due_ms")
    if delay_ms is not None:
        if type(delay_ms) is not int or delay_ms < 0:
            raise BadRequest(
                f"{field}.delay_ms must be a non-negative integer, not {shown(delay_ms)}"
            )
        wait_ms = delay_ms
    else:
        if type(due_ms) is not int:
            raise BadRequest(f"{field}.due_ms must be an integer, not {shown(due_ms)}")
        wait_ms = max(0, due_ms - now_ms)
    if wait_ms > limits.delay_ms_max:
        raise DueTooFar(
            f"{field} is due in {wait_ms} ms; the limit is {limits.delay_ms_max} (delay_ms_max)"
        )
    return now_ms + wait_ms


def wrong(field: str, expected: str, value: object) -> NoReturn:
    raise BadRequest(f"{field} must be {expected}, not {shown(value)}")


_OPTIONS = ("due_ms", "key", "tag", "props", "priority", "ttl_ms", "retry")


class Drafts:
    """Parses tasks against the limits of one daemon."""

    def __init__(
        self, core: Core, limits: Limits, make_topic_room: Callable[[Iterable[str]], None]
    ) -> None:
        self._core = core
        self._make_topic_room = make_topic_room
        self._limits = limits
        self._topics = core.topics

    def parse(self, tasks: Sequence[Any], now_ms: int) -> tuple[list[Draft], int]:
        """(drafts, their bytes); raises what is wrong with the first bad task."""
        limits, topics = self._limits, self._topics
        body_max, delay_max = limits.body_bytes_max, limits.delay_ms_max
        drafts: list[Draft] = []
        new_topics: dict[str, None] = {}
        size = 0
        for index, task in enumerate(tasks):
            if type(task) is tuple and len(task) == 3:
                topic, body, delay_ms = task
                if (
                    type(body) is bytes
                    and type(delay_ms) is int
                    and 0 <= delay_ms <= delay_max
                    and len(body) <= body_max
                    and type(topic) is str
                    and topic in topics
                ):
                    drafts.append((topic, now_ms + delay_ms, body, None))
                    size += len(body)
                    continue
            draft = self._careful(task, f"tasks[{index}]", now_ms)
            if draft[0] not in topics:
                new_topics[draft[0]] = None
            drafts.append(draft)
            size += size_of(draft[2], draft[3])
        self._check_room(drafts)
        if new_topics:
            self._make_topic_room(new_topics)
            for name in new_topics:
                self._core.topic(name)
        return drafts, size

    def _check_room(self, drafts: list[Draft]) -> None:
        core = self._core
        if len(drafts) > core.room:
            count, limit = core.scheduled + core.staged, "pending_max"
            if core.config.tasks_max - core.tasks < core.config.pending_max - core.scheduled:
                count, limit = core.tasks + core.staged, "tasks_max"
            raise BacklogFull(
                f"there are {count} tasks, and {len(drafts)} more would be too many; the limit is"
                f" {getattr(core.config, limit)} ({limit})"
            )
        if core.full_topics:
            for draft in drafts:
                if draft[0] in core.full_topics:
                    raise BacklogFull(
                        f"topic {draft[0]} has no group and {core.config.backlog_max} tasks"
                        " that are due (backlog_max)"
                    )

    def _careful(self, task: Any, field: str, now_ms: int) -> Draft:
        if type(task) is not tuple or len(task) not in (3, 4):
            raise BadRequest(
                f"{field} must be an array [topic, body, delay_ms] or one with options,"
                f" not {shown(task)}"
            )
        topic = name(task[0], f"{field}.topic")
        body = task[1]
        if type(body) is not bytes:
            raise BadRequest(f"{field}.body must be binary, not {shown(body)}")
        if len(body) > self._limits.body_bytes_max:
            raise BodyTooLarge(
                f"{field}.body has {len(body)} bytes; the limit is"
                f" {self._limits.body_bytes_max} (body_bytes_max)"
            )
        given = options(task[3] if len(task) == 4 else None, _OPTIONS, field)
        due_ms = due(task[2], given.get("due_ms"), field, now_ms, self._limits)
        extras = self._extras(given, field)
        if extras is not None and size_of(body, extras) > self._limits.task_bytes_max:
            raise LimitExceeded(
                f"{field} has {size_of(body, extras)} bytes with all its fields; the limit is"
                f" {self._limits.task_bytes_max} (task_bytes_max)"
            )
        return topic, due_ms, body, extras

    def _extras(self, given: dict[str, Any], field: str) -> Extras | None:
        limits = self._limits
        key, tag, ttl_ms = given.get("key"), given.get("tag"), given.get("ttl_ms")
        if key is not None:
            text(key, f"{field}.key", limits.key_length_max)
        if tag is not None:
            text(tag, f"{field}.tag", limits.key_length_max)
        if ttl_ms is not None:
            integer(ttl_ms, f"{field}.ttl_ms", 1, limits.delay_ms_max)
        priority = integer(given.get("priority", 0), f"{field}.priority", 0, 255)
        properties = self._properties(given.get("props"), field)
        retry = given.get("retry")
        if retry is not None:
            retry = policies.policy(retry, f"{field}.retry", self._core.policies)
        extras = Extras(key, tag, properties, priority, ttl_ms, retry)
        return None if extras == _NOTHING else extras

    def _properties(self, value: Any, field: str) -> dict[str, Any] | None:
        if not value and (value is None or type(value) is dict):
            return None
        if type(value) is not dict:
            raise BadRequest(f"{field}.props must be a map, not {shown(value)}")
        limits = self._limits
        if len(value) > limits.properties_max:
            raise LimitExceeded(
                f"{field}.props has {len(value)} entries; the limit is"
                f" {limits.properties_max} (properties_max)"
            )
        for key, item in value.items():
            text(key, f"{field}.props key", limits.key_length_max)
            if type(item) not in (str, int, float, bool):
                raise BadRequest(
                    f"{field}.props[{shown(key)}] must be a string, number or boolean,"
                    f" not {shown(item)}"
                )
            if type(item) is str and text_bytes(item) > limits.property_value_bytes_max:
                raise LimitExceeded(
                    f"{field}.props[{shown(key)}] has {text_bytes(item)} bytes; the limit"
                    f" is {limits.property_value_bytes_max} (property_value_bytes_max)"
                )
            if type(item) is float and not math.isfinite(item):
                raise BadRequest(f"{field}.props[{shown(key)}] must be a finite number")
        return value


_NOTHING = Extras()
