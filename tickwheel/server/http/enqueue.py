"""Handlers of enqueues: one task, several tasks, half tasks of a transaction, raw bodies,
CloudEvents, and NDJSON streams with one task on each line.

Lines that arrive together are enqueued by one call of the exchange. While it is committed, the next
lines are read. Each line gets an answer, and answers have the order of the lines. A client can
send lines for hours and read the answers at the same time.

A request has at most ``LINES_MAX`` lines, and at most ``REQUESTS_MAX`` requests have unwritten
answers at a time. The handler stops reading from a client that does not read its answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.api import cloudevents
from tickwheel.api.tasks import kept_options
from tickwheel.errors import (
    BadRequest,
    BodyTooLarge,
    TickwheelError,
    UnsupportedMediaType,
    shown,
)
from tickwheel.server.http import types
from tickwheel.server.http.call import JSON, ClientGone, as_json, decoded
from tickwheel.server.http.call import line as problem_line
from tickwheel.server.http.types import request_identity, stored_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tickwheel.api.shapes import Field
    from tickwheel.server.http.call import Call
    from tickwheel.server.http.types import ReadTask

_one_or_many = msgspec.json.Decoder(types.OneOrMany)


async def enqueue(call: Call) -> None:
    """Enqueue the tasks in a body of any accepted content type: JSON, lines or CloudEvents."""
    kind = call.content_type
    if kind == NDJSON:
        _refuse_idempotency_key(call)
        await LineStream(call).run()
    elif kind in (JSON, "") and not _is_binary_event(call):
        await _enqueue_json(call)
    elif _is_cloudevent(call):
        await _enqueue_events(call, "")
    else:
        raise UnsupportedMediaType(
            f"content-type must be {JSON}, {NDJSON} or a CloudEvents type, not {shown(kind)};"
            " send raw bodies to /v1/topics/TOPIC/tasks"
        )


async def enqueue_raw(call: Call) -> None:
    """Enqueue a task whose body is the request's body. Headers contain its fields."""
    topic = call.path_values["topic"]
    if _is_cloudevent(call):
        await _enqueue_events(call, topic)
        return
    body = await call.body.read()
    await _enqueue_one(call, call.common.reader.task_from_headers(topic, call.headers, body))


async def _enqueue_json(call: Call) -> None:
    request, read = await call.json(_one_or_many), call.common.reader.task
    if request.tasks is None:
        if request.transaction is not None:
            raise BadRequest("a request with transaction must have the field tasks")
        await _enqueue_one(call, read(request, request.topic))
        return
    if request != types.OneOrMany(tasks=request.tasks, transaction=request.transaction):
        raise BadRequest("a request must have either tasks or the fields of one task, not both")
    read_tasks = [read(task, task.topic, f"tasks[{i}]") for i, task in enumerate(request.tasks)]
    if request.transaction is not None:
        await _prepare(call, request.transaction, read_tasks)
    else:
        await _enqueue_many(call, read_tasks)


async def _prepare(call: Call, transaction: types.TransactionRef, many: Sequence[ReadTask]) -> None:
    """Store half tasks. The answer, which has no ids, is sent when they are durable."""
    if call.header(b"idempotency-key") is not None:
        raise BadRequest(
            "idempotency-key is not allowed with a transaction: its id and part identify the"
            " request"
        )
    tasks, part = tuple(read_task.task for read_task in many), transaction.part
    options = {"from": transaction.count_from}
    await call.exchange.prepare(transaction.id, transaction.group, part, tasks, options)
    await call.answer({"transaction": transaction.id, "part": part, "tasks": len(tasks)})


async def _enqueue_events(call: Call, topic: str) -> None:
    data = await call.body.read()
    events, is_batch = _read_events(call, topic, data)
    if not events:
        await call.answer({"tasks": []})
    else:
        await (_enqueue_many(call, events) if is_batch else _enqueue_one(call, events[0]))


async def _enqueue_one(call: Call, read_task: ReadTask) -> None:
    answer = await _enqueue(call, (read_task.task,))
    await call.answer(stored_tasks(answer, (read_task,)).lines()[0])


async def _enqueue_many(call: Call, read_tasks: Sequence[ReadTask]) -> None:
    answer = await _enqueue(call, tuple([read_task.task for read_task in read_tasks]))
    await call.answer(b'{"tasks":[%b]}' % b",".join(stored_tasks(answer, read_tasks).lines()))


def _enqueue(call: Call, tasks: tuple[Any, ...]) -> asyncio.Future[Any]:
    exchange, key = call.exchange, call.header(b"idempotency-key")
    if key is None:
        return exchange.enqueue(tasks)
    return exchange.enqueue_once(request_identity(key, exchange.caller.principal, tasks), tasks)


def _refuse_idempotency_key(call: Call) -> None:
    if call.header(b"idempotency-key") is not None:
        raise BadRequest(
            "idempotency-key is not allowed with a stream of lines, each of which is accepted"
            " separately; give each task a key, or send requests with up to tasks_per_frame_max"
            " tasks"
        )


# --- CloudEvents 1.0: binary, structured and batched ---------------------------------------------


STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
_ATTRIBUTE_HEADER = b"ce-"
_DATA_TYPE = "application/json"
"""The ``datacontenttype`` of an event in the JSON format that does not set it."""
_EXTENSIONS = [(option.event, field) for field, option in kept_options() if option.event]
"""Each extension attribute that sets an option of the task, with this option. The option's own
header takes precedence."""

_event = msgspec.json.Decoder(dict[str, msgspec.Raw])
_events = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_value = msgspec.json.Decoder()
_base64 = msgspec.json.Decoder(str | None)
_json_type = ("json", "+json")


def _is_binary_event(call: Call) -> bool:
    """Return whether the request is an event whose attributes are in headers."""
    return b"ce-specversion" in call.headers


def _is_cloudevent(call: Call) -> bool:
    return call.content_type in (STRUCTURED, BATCHED) or _is_binary_event(call)


def _read_events(call: Call, topic: str, data: bytes) -> tuple[list[ReadTask], bool]:
    """Return a task for each event, and whether the request is a batch of events. Raise BadRequest
    for invalid events."""
    if call.content_type == BATCHED:
        events = decoded(data, _events, unique=False)
        _check_members(data)
        return [_event_task(call, topic, event) for event in events], True
    if call.content_type == STRUCTURED:
        event = decoded(data, _event, unique=False)
        _check_members(data)
        return [_event_task(call, topic, event)], False
    attributes: dict[str, types.Property] = {}
    for header, value in call.headers.items():
        if header.startswith(_ATTRIBUTE_HEADER):
            name = header[len(_ATTRIBUTE_HEADER) :].decode("latin-1")
            attributes[name] = cloudevents.header_text(name, value)
    if "datacontenttype" in attributes:
        raise BadRequest("send datacontenttype as the header Content-Type, not ce-datacontenttype")
    content_type = call.header(b"content-type")
    if content_type:
        attributes["datacontenttype"] = content_type
    return [_task(call, topic, attributes, data)], False


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object in their order, including repeated members."""


def _check_members(data: bytes) -> None:
    """Raise BadRequest if an event is not UTF-8 or repeats a member, because the decoder would drop
    one of the values. Members of an event's data are not checked."""
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_Members, parse_int=str, parse_float=str
        )
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    for event in [value] if isinstance(value, _Members) else value:
        names = set[str]()
        for name, _ in event:
            if name in names:
                raise BadRequest(f"the event has {shown(name)} more than once")
            names.add(name)


def _event_task(call: Call, topic: str, event: dict[str, msgspec.Raw]) -> ReadTask:
    data, data_base64 = event.pop("data", None), event.pop("data_base64", None)
    attributes = {name: decoded(bytes(raw), _value) for name, raw in event.items()}
    # In the JSON format, an attribute that is not set can be null.
    attributes = {name: value for name, value in attributes.items() if value is not None}
    encoded = None if data_base64 is None else decoded(bytes(data_base64), _base64)
    if encoded is not None:
        if data is not None:
            raise BadRequest("the event must have either data or data_base64, not both")
        return _task(call, topic, attributes, _from_base64(encoded))
    if data is None:
        return _task(call, topic, attributes, b"")
    kind = str(attributes.setdefault("datacontenttype", _DATA_TYPE))
    is_json = kind.partition(";")[0].strip().lower().partition("/")[2].endswith(_json_type)
    # Keep JSON unchanged: a parser would alter numbers and repeated members.
    body = bytes(data)
    if body.startswith(b'"') and not is_json:
        body = str(decoded(body, _value)).encode()
    return _task(call, topic, attributes, body)


def _from_base64(text: str) -> bytes:
    with suppress(ValueError):
        return base64.b64decode(text, validate=True)
    raise BadRequest(f"data_base64 must be base64, not {shown(text)}")


def _task(call: Call, topic: str, attributes: dict[str, types.Property], body: bytes) -> ReadTask:
    cloudevents.check(attributes)
    read_task = call.common.reader.task_from_headers(topic, call.headers, body)
    options = dict(read_task.task[3]) if len(read_task.task) > 3 else {}
    for attribute, field in _EXTENSIONS:
        value = attributes.get(attribute)
        if value and field.name not in options and not _is_ignored(call, field, value):
            options[field.name] = value
    event_properties = {f"ce-{name}": value for name, value in attributes.items()}
    options["properties"] = options.get("properties", {}) | event_properties
    return read_task._replace(task=(*read_task.task[:3], options))


def _is_ignored(call: Call, field: Field, value: types.Property) -> bool:
    """Return whether to ignore an attribute, as W3C Trace Context requires for an invalid
    traceparent."""
    if field.name != "trace":
        return False
    try:
        field.kind.check(value, field.name, call.exchange.limits)
    except TickwheelError:
        return True
    return False


# --- tasks as a stream of lines ------------------------------------------------------------------


NDJSON = "application/x-ndjson"
LINES_MAX = 500
"""Maximum lines that one call of the exchange enqueues."""
SLICE_BYTES = 32 * 1024
"""Maximum bytes of lines that one step decodes, so that the event loop can also deliver tasks."""
REQUESTS_MAX = 4
"""Maximum requests whose answers are not yet written."""
_decoder = msgspec.json.Decoder(types.NewTask)
_Future = asyncio.Future[Any]
Line = tuple[int, "ReadTask | None"]
"""The number of a line, and its task or None if it is invalid."""


class LineStream:
    """A request whose body is a stream of lines."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reader = call.common.reader
        self._line_bytes_max = call.exchange.settings.http_body_bytes
        self._unanswered: deque[tuple[list[Line], _Future | TickwheelError]] = deque()
        self._partial_line = bytearray()
        self._lines_read = 0
        """Number of lines that were read, including empty lines."""

    async def run(self) -> None:
        """Read and answer lines until the last line, or until reading fails."""
        call = self._call
        await call.begin(NDJSON)
        failure: TickwheelError | None = None
        try:
            async for part in call.body.parts():
                if call.exchange.ended is not None:
                    raise call.exchange.ended
                await self._take(part)
            if self._partial_line.strip():
                await self._enqueue_lines(bytes(self._partial_line))
        except ClientGone:
            for _, answer in self._unanswered:
                if isinstance(answer, asyncio.Future):
                    answer.cancel()
            self._unanswered.clear()
            raise
        except TickwheelError as error:
            failure = error
        while self._unanswered:
            await self._answer_first()
        next_line: Line = (self._lines_read + 1, None)
        last = b"" if failure is None else _answer_line(next_line, failure) + b"\n"
        await call.piece(last, more=False)

    async def _take(self, part: bytes) -> None:
        end = part.rfind(b"\n") + 1
        if not end:
            self._keep(part)
            return
        data = b"".join((self._partial_line, part[:end]))
        self._partial_line.clear()
        start = 0
        while start < len(data):
            stop = data.rfind(b"\n", start, start + SLICE_BYTES) + 1
            if not stop:
                stop = data.index(b"\n", start) + 1
            await self._enqueue_lines(data[start:stop])
            start = stop
            await asyncio.sleep(0)
        self._keep(part[end:])

    def _keep(self, part: bytes) -> None:
        """Add a part to the unfinished line. Raise BodyTooLarge, Overloaded."""
        size = len(self._partial_line) + len(part)
        if size > self._line_bytes_max:
            raise BodyTooLarge(
                f"a line has at least {size} bytes; the limit is {self._line_bytes_max}"
                " (http_body_bytes_max)"
            )
        self._call.body.hold(size)
        self._partial_line += part

    async def _enqueue_lines(self, data: bytes) -> None:
        """Enqueue the tasks of complete lines, in several requests if necessary."""
        first = self._lines_read + 1
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        self._lines_read += count
        try:
            new_tasks: Iterable[types.NewTask] = _decoder.decode_lines(data)
            tasks = [self._reader.task(task, task.topic) for task in new_tasks]
            if types.may_repeat(data, _value.decode_lines):
                tasks = []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TickwheelError):
            tasks = []
        # The decoder does not see where a line ends. But these braces always separate two tasks, so
        # if they are at the end of every line, as many tasks as lines are one task in each.
        if not len(tasks) == count == data.count(b"}\n{") + 1:
            await self._one_by_one(data, first)
            return
        lines: list[Line] = list(enumerate(tasks, first))
        for start in range(0, count, LINES_MAX):
            await self._put(lines[start : start + LINES_MAX])

    async def _one_by_one(self, data: bytes, first: int) -> None:
        """Decode lines individually, because some may be empty or not exactly one task."""
        valid_lines: list[Line] = []
        for number, line in enumerate(data.split(b"\n"), first):
            if not line.strip():
                continue
            try:
                task = decoded(line, _decoder)
                valid_lines.append((number, self._reader.task(task, task.topic)))
                if len(valid_lines) < LINES_MAX:
                    continue
                problem = None
            except BadRequest as error:
                problem = error
            if valid_lines:
                await self._put(valid_lines)
            if problem is not None:
                await self._add([(number, None)], problem)
            valid_lines = []
        if valid_lines:
            await self._put(valid_lines)

    async def _put(self, lines: list[Line]) -> None:
        """Enqueue the tasks of up to ``LINES_MAX`` lines in one request."""
        tasks = tuple(read_task.task for _, read_task in lines if read_task is not None)
        answer: _Future | TickwheelError
        try:
            answer = self._call.exchange.enqueue_each(tasks)
        except TickwheelError as error:
            answer = error
        await self._add(lines, answer)

    async def _add(self, lines: list[Line], answer: _Future | TickwheelError) -> None:
        self._unanswered.append((lines, answer))
        while len(self._unanswered) >= REQUESTS_MAX or self._first_is_answered():
            await self._answer_first()

    def _first_is_answered(self) -> bool:
        if not self._unanswered:
            return False
        answer = self._unanswered[0][1]
        return isinstance(answer, TickwheelError) or answer.done()

    async def _answer_first(self) -> None:
        lines, answer = self._unanswered.popleft()
        try:
            if isinstance(answer, TickwheelError):
                raise answer
            outcomes = await answer
        except TickwheelError as error:
            outcomes = [error] * len(lines)
        if isinstance(outcomes, list):
            answer_lines = [_answer_line(*pair) for pair in zip(lines, outcomes, strict=True)]
        else:
            answer_lines = stored_tasks(
                outcomes, [read_task for _, read_task in lines if read_task is not None]
            ).lines()
        await self._call.piece(b"\n".join(answer_lines) + b"\n")


def _answer_line(line: Line, outcome: Any) -> bytes:
    """Return the answer to a line. ``outcome`` is the answer to its enqueue, or its error."""
    number, read_task = line
    if isinstance(outcome, TickwheelError):
        return as_json({"error": problem_line(outcome, number)})
    if isinstance(outcome, BaseException) or read_task is None:
        raise outcome
    return stored_tasks(outcome, [read_task]).lines()[0]
