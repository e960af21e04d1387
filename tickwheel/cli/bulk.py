"""Tasks from JSON lines, for ``enqueue --from``. Pure: lines in, tasks or a named mistake out.

One object a line: ``topic``, ``body`` (text) or ``body_base64``, ``delay`` (seconds, or text
such as ``"5m"``) or ``at`` (ISO-8601), ``key``, ``tag``, ``properties``, ``priority``, ``ttl``,
``retry`` (a SPEC such as ``"fixed:delay=30s,retries=5"``, or a map as the wire has it).
What a line does not say is taken from the command's own options.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from tickwheel.cli.values import Policy, parse_at, parse_duration, policy_of_json, retry_of
from tickwheel.client import Task
from tickwheel.errors import BadRequest

FIELDS = frozenset(
    (
        "topic", "body", "body_base64", "delay", "at", "key", "tag", "properties", "priority",
        "ttl", "retry",
    )
)  # fmt: skip
PRIORITY_MAX = 255

T = TypeVar("T")


@dataclass(frozen=True)
class Defaults:
    """What holds for lines that do not say it themselves."""

    topic: str | None = None
    delay: float | None = None
    at: datetime | None = None
    tag: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    ttl: float | None = None
    retry: Policy | None = None


class BadLine(BadRequest):
    """A line of the input cannot be read as a task; the message names line and field."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")
        self.number = number


def read_tasks(lines: Iterable[bytes], defaults: Defaults) -> Iterator[tuple[Task, int]]:
    """Each task with the bytes of its line; empty lines are passed over. Raises BadLine."""
    skipped_bytes = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            skipped_bytes += len(line)
            continue
        try:
            yield read_task(line, defaults), len(line) + skipped_bytes
        except ValueError as error:
            raise BadLine(number, str(error)) from None
        skipped_bytes = 0


def read_task(line: bytes, defaults: Defaults) -> Task:
    """One line. Raises ValueError naming the field."""
    given = _object(line)
    unknown = sorted(given.keys() - FIELDS)
    if unknown:
        raise ValueError(f"field {unknown[0]}: not known; known are {', '.join(sorted(FIELDS))}")
    delay, at = _due(given, defaults)
    topic = _text(given, "topic") or defaults.topic
    if topic is None:
        raise ValueError("field topic: missing (in the line and on the command line)")
    properties = {**defaults.properties, **_properties(given)}
    ttl = given.get("ttl")
    return Task(
        topic,
        _body(given),
        delay=delay,
        at=at,
        key=_text(given, "key"),
        tag=_text(given, "tag") or defaults.tag,
        properties=properties or None,
        priority=_priority(given, defaults.priority),
        ttl=defaults.ttl if ttl is None else _duration("ttl", ttl),
        retry=retry_of(_retry(given, defaults.retry)),
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is needed, not {type(found).__name__}")
    return found


def _due(given: dict[str, Any], defaults: Defaults) -> tuple[float | None, datetime | None]:
    delay, at = given.get("delay"), given.get("at")
    if delay is not None and at is not None:
        raise ValueError("field at: give delay or at, not both")
    if at is not None:
        return None, _parse("at", parse_at, at)
    if delay is not None:
        return _duration("delay", delay), None
    return defaults.delay, defaults.at


def _body(given: dict[str, Any]) -> bytes:
    encoded = given.get("body_base64")
    if ("body" in given) == (encoded is not None):
        raise ValueError("field body: give body or body_base64, one of them")
    if encoded is None:
        text = given["body"]
        if not isinstance(text, str):
            raise ValueError(f"field body: text is needed, not {text!r:.40}")
        return _utf8("body", text)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("field body_base64: not base64") from None


def _text(given: dict[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"field {name}: text that is not empty is needed, not {value!r:.40}")
    _utf8(name, value)
    return value


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"field {name}: holds half a surrogate pair") from None


def _properties(given: dict[str, Any]) -> dict[str, str]:
    value = given.get("properties")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError(f"field properties: an object of texts is needed, not {value!r:.40}")
    return value


def _priority(given: dict[str, Any], default: int) -> int:
    value = given.get("priority")
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= PRIORITY_MAX:
        raise ValueError(f"field priority: 0 to {PRIORITY_MAX} is allowed, not {value!r:.40}")
    return value


def _retry(given: dict[str, Any], default: Policy | None) -> Policy | None:
    value = given.get("retry")
    if value is None:
        return default
    try:
        return policy_of_json(value)
    except ValueError as error:
        raise ValueError(f"field retry: {error}") from None


def _duration(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value < float("inf"):
            raise ValueError(f"field {name}: {value} is no duration")
        value = f"{value:f}"
    return _parse(name, parse_duration, value)


def _parse(name: str, parse: Callable[[str], T], value: Any) -> T:
    if not isinstance(value, str):
        raise ValueError(f"field {name}: {value!r:.40} is of the wrong type")
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"field {name}: {error}") from None
