"""Enqueues: one, many, half tasks of a transaction, raw bodies, CloudEvents, streams of lines
(NDJSON), of which each line is a task, and is answered by a line.

Lines that came together are one request to the operations; the next ones are read while those are
committed. The answers come in the order of the lines, and each line has its own. Nothing waits for
the end: a client may send for hours, and reads as it goes.

Bounded: ``LINES_MAX`` lines a request and ``UNDER_WAY_MAX`` requests of which the answers are not
written; a client that does not read its answers is not read from any more.
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
from tickwheel.server.http.types import kept, once

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tickwheel.api.shapes import Field
    from tickwheel.server.http.call import Call
    from tickwheel.server.http.types import Given

_one_or_many = msgspec.json.Decoder(types.OneOrMany)


async def enqueue(call: Call) -> None:
    """Enqueue tasks in the form of the content type: JSON, lines or CloudEvents."""
    kind = call.content_type
    if kind == NDJSON:
        _check_no_key(call)
        await Bulk(call).run()
    elif kind in (JSON, "") and not _is_binary(call):
        await _json(call)
    elif _is_any(call):
        await _cloudevents(call, "")
    else:
        raise UnsupportedMediaType(
            f"content-type must be {JSON}, {NDJSON} or one of CloudEvents, not {shown(kind)};"
            " a raw body goes to /v1/topics/TOPIC/tasks"
        )


async def enqueue_raw(call: Call) -> None:
    """Enqueue a task whose body is the request's body, and whose fields are in headers."""
    topic = call.named["topic"]
    if _is_any(call):
        await _cloudevents(call, topic)
        return
    body = await call.incoming.read()
    await _one(call, call.common.reader.of_headers(topic, call.headers, body))


async def _json(call: Call) -> None:
    given, read = await call.json(_one_or_many), call.common.reader.task
    if given.tasks is None:
        if given.transaction is not None:
            raise BadRequest("a request with a transaction has its tasks in tasks")
        await _one(call, read(given, given.topic))
        return
    if given != types.OneOrMany(tasks=given.tasks, transaction=given.transaction):
        raise BadRequest("a request has the fields of one task, or tasks, not both")
    many = [read(task, task.topic, f"tasks[{i}]") for i, task in enumerate(given.tasks)]
    if given.transaction is not None:
        await _prepare(call, given.transaction, many)
    else:
        await _many(call, many)


async def _prepare(call: Call, of: types.OfTransaction, many: Sequence[Given]) -> None:
    """Keep half tasks; answered without ids when they are durable."""
    if call.header(b"idempotency-key") is not None:
        raise BadRequest("idempotency-key is not for a transaction: its part is the resend")
    tasks = tuple(given.task for given in many)
    await call.exchange.prepare(of.id, of.group, of.part, tasks, {"from": of.count_from})
    await call.answer({"transaction": of.id, "part": of.part, "tasks": len(tasks)})


async def _cloudevents(call: Call, topic: str) -> None:
    data = await call.incoming.read()
    events, is_batch = _read_events(call, topic, data)
    if not events:
        await call.answer({"tasks": []})
    else:
        await (_many(call, events) if is_batch else _one(call, events[0]))


async def _one(call: Call, given: Given) -> None:
    answer = await _enqueue(call, (given.task,))
    await call.answer(kept(answer, (given,)).lines()[0])


async def _many(call: Call, many: Sequence[Given]) -> None:
    answer = await _enqueue(call, tuple([given.task for given in many]))
    await call.answer(b'{"tasks":[%b]}' % b",".join(kept(answer, many).lines()))


def _enqueue(call: Call, tasks: tuple[Any, ...]) -> asyncio.Future[Any]:
    exchange, key = call.exchange, call.header(b"idempotency-key")
    if key is None:
        return exchange.enqueue(tasks)
    return exchange.enqueue_once(once(key, exchange.caller.principal, tasks), tasks)


def _check_no_key(call: Call) -> None:
    if call.header(b"idempotency-key") is not None:
        raise BadRequest(
            "idempotency-key is for requests that are accepted as a whole, not for a stream of"
            " lines; give its tasks a key, or send requests with up to tasks_per_frame_max tasks"
        )


# --- CloudEvents 1.0: binary, structured and batched ---------------------------------------------


STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
_ATTRIBUTE_HEADER = b"ce-"
_DATA_TYPE = "application/json"
"""The ``datacontenttype`` that the JSON format implies where an event has none."""
_OF_EVENTS = [(option.event, field) for field, option in kept_options() if option.event]
"""Attributes of extensions that are an option of the task, and that option; its header wins."""

_event = msgspec.json.Decoder(dict[str, msgspec.Raw])
_events = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_value = msgspec.json.Decoder()
_base64 = msgspec.json.Decoder(str | None)
_json_type = ("json", "+json")


def _is_binary(call: Call) -> bool:
    """Whether the attributes of the event are in headers."""
    return b"ce-specversion" in call.headers


def _is_any(call: Call) -> bool:
    return call.content_type in (STRUCTURED, BATCHED) or _is_binary(call)


def _read_events(call: Call, topic: str, data: bytes) -> tuple[list[Given], bool]:
    """(tasks, whether the request is a batch of events). Raises BadRequest."""
    if call.content_type == BATCHED:
        events = decoded(data, _events)
        _check_members(data)
        return [_structured(call, topic, event) for event in events], True
    if call.content_type == STRUCTURED:
        event = decoded(data, _event)
        _check_members(data)
        return [_structured(call, topic, event)], False
    attributes: dict[str, types.Property] = {}
    for header, value in call.headers.items():
        if header.startswith(_ATTRIBUTE_HEADER):
            name = header[len(_ATTRIBUTE_HEADER) :].decode("latin-1")
            attributes[name] = cloudevents.header_text(name, value)
    if "datacontenttype" in attributes:
        raise BadRequest("the event's datacontenttype is the header Content-Type, not ce-…")
    content_type = call.header(b"content-type")
    if content_type:
        attributes["datacontenttype"] = content_type
    return [_task(call, topic, attributes, data)], False


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object in their order, repeated ones too."""


def _check_members(data: bytes) -> None:
    """Raise BadRequest if an event has a member twice, of which a decoder would drop one, or is
    not UTF-8. Members of its data are the consumer's affair."""
    try:
        found = json.loads(
            data.decode(), object_pairs_hook=_Members, parse_int=str, parse_float=str
        )
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    for event in [found] if isinstance(found, _Members) else found:
        seen = set[str]()
        for name, _ in event:
            if name in seen:
                raise BadRequest(f"the event has {shown(name)} more than once")
            seen.add(name)


def _structured(call: Call, topic: str, event: dict[str, msgspec.Raw]) -> Given:
    data, packed = event.pop("data", None), event.pop("data_base64", None)
    attributes = {name: decoded(bytes(raw), _value) for name, raw in event.items()}
    # The format lets a sender write an attribute that it does not set as null.
    attributes = {name: value for name, value in attributes.items() if value is not None}
    encoded = None if packed is None else decoded(bytes(packed), _base64)
    if encoded is not None:
        if data is not None:
            raise BadRequest("the event must have one of data and data_base64")
        return _task(call, topic, attributes, _from_base64(encoded))
    if data is None:
        return _task(call, topic, attributes, b"")
    kind = str(attributes.setdefault("datacontenttype", _DATA_TYPE))
    is_json = kind.partition(";")[0].strip().lower().partition("/")[2].endswith(_json_type)
    # JSON stays as it was written: a parser would change numbers and repeated members.
    body = bytes(data)
    if body.startswith(b'"') and not is_json:
        body = str(decoded(body, _value)).encode()
    return _task(call, topic, attributes, body)


def _from_base64(packed: str) -> bytes:
    with suppress(ValueError):
        return base64.b64decode(packed, validate=True)
    raise BadRequest(f"data_base64 must be base64, not {shown(packed)}")


def _task(call: Call, topic: str, attributes: dict[str, types.Property], body: bytes) -> Given:
    cloudevents.check(attributes)
    given = call.common.reader.of_headers(topic, call.headers, body)
    options = dict(given.task[3]) if len(given.task) > 3 else {}
    for attribute, field in _OF_EVENTS:
        value = attributes.get(attribute)
        if value and field.name not in options and not _is_ignored(call, field, value):
            options[field.name] = value
    own = options.get("properties", {})
    options["properties"] = own | {f"ce-{name}": value for name, value in attributes.items()}
    return given._replace(task=(*given.task[:3], options))


def _is_ignored(call: Call, field: Field, value: types.Property) -> bool:
    """Whether the option is not taken from its attribute. W3C Trace Context demands of receivers
    that they go on without a place in a trace that they cannot read."""
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
"""Lines of one request to the operations."""
SLICE_BYTES = 32 * 1024
"""Bytes of lines that are decoded at a time: the loop has tasks to deliver, too."""
UNDER_WAY_MAX = 4
_decoder = msgspec.json.Decoder(types.NewTask)
_Future = asyncio.Future[Any]
Line = tuple[int, "Given | None"]
"""The number of a line, and its task; None: it is no task."""


class Bulk:
    """One request with a stream of lines."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reader = call.common.reader
        self._line_bytes_max = call.exchange.settings.http_body_bytes
        self._under_way: deque[tuple[list[Line], _Future | TickwheelError]] = deque()
        self._rest = b""
        self._read = 0
        """How many lines were looked at, empty ones included."""

    async def run(self) -> None:
        """Read and answer lines until the client has sent the last one, or one cannot be read."""
        call = self._call
        await call.begin(NDJSON)
        failed: TickwheelError | None = None
        try:
            async for part in call.incoming.parts():
                await self._take(part)
            if self._rest.strip():
                await self._lines(self._rest)
        except ClientGone:
            for _, answer in self._under_way:
                if isinstance(answer, asyncio.Future):
                    answer.cancel()  # nobody waits for it any more
            self._under_way.clear()
            raise
        except TickwheelError as error:
            failed = error
        while self._under_way:
            await self._answer_first()
        last = b"" if failed is None else _answer_line((self._read + 1, None), failed) + b"\n"
        await call.piece(last, more=False)

    async def _take(self, part: bytes) -> None:
        end = part.rfind(b"\n") + 1
        if not end:
            self._rest += part
            if len(self._rest) > self._line_bytes_max:
                raise BodyTooLarge(
                    f"a line has {len(self._rest)} bytes or more; the limit is"
                    f" {self._line_bytes_max} (http_body_bytes_max)"
                )
            return
        data = self._rest + part[:end] if self._rest else part[:end]
        self._rest = part[end:]
        start = 0
        while start < len(data):
            stop = data.rfind(b"\n", start, start + SLICE_BYTES) + 1
            if not stop:
                stop = data.index(b"\n", start) + 1
            await self._lines(data[start:stop])
            start = stop
            await asyncio.sleep(0)

    async def _lines(self, data: bytes) -> None:
        """Take whole lines, in as many requests to the operations as are needed."""
        first = self._read + 1
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        self._read += count
        try:
            found: Iterable[types.NewTask] = _decoder.decode_lines(data)
            given = [self._reader.task(task, task.topic) for task in found]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TickwheelError):
            await self._one_by_one(data, first)
            return
        # Some may be empty.
        numbers = range(first, first + count) if len(given) == count else _numbers(data, first)
        lines: list[Line] = list(zip(numbers, given, strict=True))
        for start in range(0, len(lines), LINES_MAX):
            await self._put(lines[start : start + LINES_MAX])

    async def _one_by_one(self, data: bytes, first: int) -> None:
        """Take lines one by one, because some are wrong and the others are not."""
        good: list[Line] = []
        for number, line in enumerate(data.split(b"\n"), first):
            if not line.strip():
                continue
            try:
                task = decoded(line, _decoder)
                good.append((number, self._reader.task(task, task.topic)))
                if len(good) < LINES_MAX:
                    continue
                wrong = None
            except BadRequest as error:
                wrong = error
            if good:
                await self._put(good)
            if wrong is not None:
                await self._add([(number, None)], wrong)
            good = []
        if good:
            await self._put(good)

    async def _put(self, lines: list[Line]) -> None:
        """Enqueue the tasks of these lines."""
        tasks = tuple(one.task for _, one in lines if one is not None)
        answer: _Future | TickwheelError
        try:
            answer = self._call.exchange.enqueue_each(tasks)
        except TickwheelError as error:
            answer = error
        await self._add(lines, answer)

    async def _add(self, lines: list[Line], answer: _Future | TickwheelError) -> None:
        self._under_way.append((lines, answer))
        while len(self._under_way) >= UNDER_WAY_MAX or self._first_is_known():
            await self._answer_first()

    def _first_is_known(self) -> bool:
        if not self._under_way:
            return False
        answer = self._under_way[0][1]
        return isinstance(answer, TickwheelError) or answer.done()

    async def _answer_first(self) -> None:
        lines, answer = self._under_way.popleft()
        try:
            if isinstance(answer, TickwheelError):
                raise answer
            found = await answer
        except TickwheelError as error:
            found = [error] * len(lines)
        if isinstance(found, list):
            written = [_answer_line(line, end) for line, end in zip(lines, found, strict=True)]
        else:
            written = kept(found, [one for _, one in lines if one is not None]).lines()
        await self._call.piece(b"\n".join(written) + b"\n")


def _answer_line(line: Line, end: Any) -> bytes:
    """Return the answer to a line, whose task was taken with the answer ``end`` or is refused with
    the error ``end``."""
    number, given = line
    if isinstance(end, TickwheelError):
        return as_json({"error": problem_line(end, number)})
    if isinstance(end, BaseException) or given is None:
        raise end
    return kept(end, [given]).lines()[0]


def _numbers(data: bytes, first: int) -> list[int]:
    """The numbers of the lines that are not empty."""
    lines = enumerate(data.split(b"\n"), first)
    return [number for number, line in lines if line.strip()]
