"""Tasks as HTTP clients say them: JSON, or a raw body with headers."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tickwheel.api.frames import REQUEST_MAX, SESSION_BYTES
from tickwheel.api.kinds import POLICY, RULE, Kind, Policy, Rule, Whole
from tickwheel.api.tasks import TaskFields
from tickwheel.api.times import moment_ms
from tickwheel.errors import BadRequest, shown
from tickwheel.limits import delay_of_level
from tickwheel.model.records import ID_STEP
from tickwheel.model.retry import duration_ms, parse_policy, rule_wire
from tickwheel.server.http import types
from tickwheel.server.http.said import said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tickwheel.server.shard.callers import Principal

HEADER = b"tickwheel-"
PROPERTY_HEADER = b"tickwheel-property-"
IDEMPOTENCY_KEY_LENGTH_MAX = 255
MAPS = [field.name for field in TaskFields.fields() if isinstance(field.kind, (Policy, Rule))]
"""Fields that are a word or a map; in a header, a map is JSON."""
_WHOLE = [field.name for field in TaskFields.fields() if isinstance(field.kind, Whole)]
_NUMBERS = ("delay_ms", "due_ms", *_WHOLE)


class Given(NamedTuple):
    """A task in the form of the operations, and what its due time follows from."""

    task: tuple[Any, ...]
    delay_ms: int | None
    due_ms: int | None

    def due(self, accepted_ms: int) -> int:
        """When the task is due if it was accepted at ``accepted_ms``."""
        if self.delay_ms is not None:
            return accepted_ms + self.delay_ms
        return max(accepted_ms, self.due_ms or 0)


class Kept(NamedTuple):
    """The tasks that an enqueue has kept."""

    ids: Sequence[int]
    dues_ms: Sequence[int | None]
    words: Sequence[str] | None = None
    """What became of each task; None: all are stored."""

    def lines(self) -> list[bytes]:
        """One line of JSON for each task."""
        words = repeat("stored") if self.words is None else self.words
        return [
            b'{"id":"%d","due_ms":%b,"outcome":"%b"}'
            % (task_id, b"null" if due_ms is None else b"%d" % due_ms, word.encode())
            for task_id, due_ms, word in zip(self.ids, self.dues_ms, words, strict=False)
        ]


def kept(answer: tuple[Any, ...], given: Sequence[Given]) -> Kept:
    """The tasks in the answer to an enqueue, as ``Exchange`` has it: of a new request; all ids, for
    a resend; or all ids and due times, where these were chosen."""
    accepted_ms, first = answer[:2]
    if isinstance(first, int):
        ids: Sequence[int] = range(first, first + answer[2] * ID_STEP, ID_STEP)
    else:
        ids = first
        more = answer[2] if len(answer) > 2 else {}
        if "dues_ms" in more:
            return Kept(ids, more["dues_ms"])
        if "outcomes" in more:  # (word, due time) of each
            words, dues_ms = zip(*more["outcomes"], strict=True)
            return Kept(ids, dues_ms, words)
    return Kept(ids, [one.due(accepted_ms) for one in given])


def body_of(given: types.TaskFields, field: str) -> bytes:
    """The body of a task, as text or from base64. Raises BadRequest."""
    if given.body is not None:
        if given.body_base64 is not None:
            raise BadRequest(f"{field} must have one of body and body_base64")
        return given.body.encode()
    return given.body_base64 or b""


def due_of(given: types.When, field: str) -> tuple[int | None, int | None]:
    """(delay_ms, due_ms), of which at most one is set. Raises BadRequest."""
    delay_ms = given.delay_ms
    if given.delay is not None:
        delay_ms = span_ms(given.delay, delay_ms, "delay", field)
    if given.at is None:
        return delay_ms, given.due_ms
    if given.due_ms is not None:
        raise BadRequest(f"{field} must have one of delay_ms, due_ms and at")
    return delay_ms, moment_ms(given.at, "at")


def span_ms(written: str | float, ms: int | None, name: str, field: str) -> int:
    """A duration in milliseconds; ``written`` as text or seconds, or else ``ms``, but not both.
    Raises BadRequest."""
    if ms is not None:
        raise BadRequest(f"{field} must have one of {name} and {name}_ms")
    with _refused(f"{field}: {name}"):
        return duration_ms(written)


@contextmanager
def _refused(field: str) -> Iterator[None]:
    """Turn a ValueError of what cannot be read into BadRequest."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(f"{field}: {error}") from None


class Reader:
    """Reads tasks from requests, with the daemon's table of delay levels."""

    def __init__(self, delay_levels_ms: Sequence[int]) -> None:
        self._levels_ms = delay_levels_ms

    def task(self, given: types.TaskFields, topic: str | None, field: str = "task") -> Given:
        """A task from JSON; the operation checks the rest. Raises BadRequest."""
        if topic is None:
            raise BadRequest(f"{field} must have a topic")
        body = body_of(given, field)
        delay_ms, due_ms = due_of(given, field)
        options = _options(given, field)
        if due_ms is None and given.delay_level is None:
            # The usual case: a delay, or none.
            if delay_ms is None:
                delay_ms = 0
            task = (topic, body, delay_ms, options) if options else (topic, body, delay_ms)
            return Given(task, delay_ms, None)
        if due_ms is not None:
            options["due_ms"] = due_ms
        if given.delay_level is not None:
            options["delay_level"] = given.delay_level
            if given.delay_level > 0:
                levelled_ms = delay_of_level(self._levels_ms, given.delay_level)
                return Given((topic, body, delay_ms, options), levelled_ms, None)
        return Given((topic, body, delay_ms, options), delay_ms, due_ms)

    def of_headers(self, topic: str, headers: dict[bytes, bytes], body: bytes) -> Given:
        """A task from a raw body and headers ``Tickwheel-…``. Raises BadRequest."""
        fields: dict[str, Any] = {}
        properties: dict[str, str] = {}
        for name, value in headers.items():
            if not name.startswith(HEADER):
                continue
            text = _header_text(name, value)
            if name.startswith(PROPERTY_HEADER):
                properties[name[len(PROPERTY_HEADER) :].decode("latin-1")] = text
            else:
                field = name[len(HEADER) :].decode("latin-1").replace("-", "_")
                fields[field] = _number(name, text) if field in _NUMBERS else text
        if properties:
            fields["properties"] = properties
        for field in MAPS:
            if fields.get(field, "").startswith("{"):
                header = f"tickwheel-{field.replace('_', '-')}"
                fields[field] = _json_header(header, fields[field])
        named = fields.pop("topic", topic)
        if topic and named != topic:
            raise BadRequest(f"tickwheel-topic is {shown(named)}, but the path names {topic}")
        if fields.keys() & {"body", "body_base64"}:
            raise BadRequest("the body is the request's, not a header's")
        try:
            given = msgspec.convert(fields, types.TaskFields)
        except msgspec.ValidationError as error:
            raise BadRequest(f"headers tickwheel-*: {error}") from None
        given.body_base64 = body
        return self.task(given, named, "the task")


def _options(given: types.TaskFields, field: str) -> dict[str, Any]:
    options = said(given)
    if not options:
        return options
    for name, read in _READ:
        if name in options:
            options[name] = read(options[name], f"{field}: {name}")
    for written, name in _SPANS:
        if written in options:
            options[name] = span_ms(options.pop(written), options.get(name), written, field)
    return options


def policy(given: Any, field: str = "retry") -> Any:
    """A policy in the form of the operations: a name, or a map with tuples. Raises BadRequest."""
    if isinstance(given, str) and ":" in given:
        with _refused(field):
            given = parse_policy(given)
    if isinstance(given, dict):
        return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return given


def rule(given: Any, field: str) -> Any:
    """A rule about pending keys in the form of the operations. Raises BadRequest."""
    if not isinstance(given, dict):
        return given
    with _refused(field):
        return rule_wire(given)


_READERS: dict[Kind, Callable[[Any, str], Any]] = {POLICY: policy, RULE: rule}
_READ = [
    (field.name, _READERS[field.kind]) for field in TaskFields.fields() if field.kind in _READERS
]
"""What is not in the form of the operations yet."""
_SPANS = [(field.python, field.name) for field in TaskFields.fields() if field.kind.unit]
"""Spans of time as people write them, and in milliseconds."""


def _header_text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name.decode('latin-1')} is no UTF-8") from None


def _number(name: bytes, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BadRequest(f"{name.decode('latin-1')} must be a whole number, not {shown(text)}")
    return int(text)


def _json_header(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{name} is no JSON: {shown(text)}") from None


# --- resends -------------------------------------------------------------------------------------


class Once(NamedTuple):
    """The session and number by which a resent request is recognised."""

    session: bytes
    fingerprint: int


def once(key: str, principal: Principal, tasks: Sequence[Any]) -> Once:
    """The ``Once`` of an ``Idempotency-Key``, which each principal has its own of, and of the tasks
    that it is for. Raises BadRequest."""
    if not 0 < len(key) <= IDEMPOTENCY_KEY_LENGTH_MAX:
        raise BadRequest(
            f"idempotency-key has {len(key)} characters; 1 to {IDEMPOTENCY_KEY_LENGTH_MAX} are"
            " allowed"
        )
    name = msgspec.msgpack.encode((principal.name, key))
    session = hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"tw-http-once").digest()
    payload = _encode_payload(tasks)
    digest = hashlib.blake2b(payload, digest_size=8).digest()
    return Once(session, 1 + int.from_bytes(digest, "big") % REQUEST_MAX)


def _encode_payload(tasks: Sequence[Any]) -> bytes:
    """Bytes that are the same for the same tasks, in whatever order their fields came."""
    try:
        return msgspec.msgpack.encode(tasks, order="sorted")
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"a number is too large: {error}") from None
