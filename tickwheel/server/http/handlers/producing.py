"""Enqueues: one, many, half tasks of a transaction, raw bodies, CloudEvents, streams of lines."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import BadRequest, UnsupportedMediaType, shown
from tickwheel.server.http import cloudevents, types
from tickwheel.server.http.bulk import NDJSON, Bulk
from tickwheel.server.http.encode import JSON
from tickwheel.server.http.new_tasks import Reader, kept, once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.server.http.call import Call
    from tickwheel.server.http.new_tasks import Given

_one_or_many = msgspec.json.Decoder(types.OneOrMany)


class Producing:
    """The requests of producers."""

    def __init__(self, delay_levels_ms: Sequence[int]) -> None:
        self._reader = Reader(delay_levels_ms)

    async def enqueue(self, call: Call) -> None:
        """Enqueue tasks in the form of the content type: JSON, lines or CloudEvents."""
        kind = call.content_type
        if kind == NDJSON:
            _check_no_key(call)
            await Bulk(call, self._reader).run()
        elif kind in (JSON, "") and not cloudevents.is_binary(call):
            await self._json(call)
        elif cloudevents.is_any(call):
            await self._cloudevents(call, "")
        else:
            raise UnsupportedMediaType(
                f"content-type must be {JSON}, {NDJSON} or one of CloudEvents, not {shown(kind)};"
                " a raw body goes to /v1/topics/TOPIC/tasks"
            )

    async def enqueue_raw(self, call: Call) -> None:
        """Enqueue a task whose body is the request's body, and whose fields are in headers."""
        topic = call.named["topic"]
        if cloudevents.is_any(call):
            await self._cloudevents(call, topic)
            return
        body = await call.incoming.read()
        await self._one(call, self._reader.of_headers(topic, call.headers, body))

    async def _json(self, call: Call) -> None:
        given = await call.json(_one_or_many)
        if given.tasks is None:
            if given.transaction is not None:
                raise BadRequest("a request with a transaction has its tasks in tasks")
            await self._one(call, self._reader.task(given, given.topic))
            return
        if given != types.OneOrMany(tasks=given.tasks, transaction=given.transaction):
            raise BadRequest("a request has the fields of one task, or tasks, not both")
        read = self._reader.task
        many = [read(task, task.topic, f"tasks[{i}]") for i, task in enumerate(given.tasks)]
        if given.transaction is not None:
            await self._prepare(call, given.transaction, many)
        else:
            await self._many(call, many)

    @staticmethod
    async def _prepare(call: Call, of: types.OfTransaction, many: Sequence[Given]) -> None:
        """Keep half tasks; answered without ids when they are durable."""
        if call.header(b"idempotency-key") is not None:
            raise BadRequest("idempotency-key is not for a transaction: its part is the resend")
        exchange, operations, now = call.exchange, call.operations, call.now
        caller, options = exchange.caller, {"from": of.count_from}
        tasks = tuple(given.task for given in many)
        await exchange.ask(
            lambda number: operations.prepare(
                caller, number, of.id, of.group, of.part, tasks, options, now
            )
        )
        await call.answer({"transaction": of.id, "part": of.part, "tasks": len(tasks)})

    async def _cloudevents(self, call: Call, topic: str) -> None:
        data = await call.incoming.read()
        events, is_batch = cloudevents.read(call, topic, data, self._reader)
        await (self._many(call, events) if is_batch else self._one(call, events[0]))

    async def _one(self, call: Call, given: Given) -> None:
        answer = await self._enqueue(call, (given.task,))
        await call.answer(kept(answer, (given,)).lines()[0])

    async def _many(self, call: Call, many: Sequence[Given]) -> None:
        answer = await self._enqueue(call, tuple([given.task for given in many]))
        await call.answer(b'{"tasks":[%b]}' % b",".join(kept(answer, many).lines()))

    @staticmethod
    def _enqueue(call: Call, tasks: tuple[Any, ...]) -> asyncio.Future[Any]:
        exchange = call.exchange
        operations, caller = exchange.operations, exchange.caller
        now, key = operations.clock.read(), call.header(b"idempotency-key")
        if key is None:
            enqueue = operations.enqueue
            return exchange.ask(lambda number: enqueue(caller, number, 0, tasks, now))
        session, fingerprint = once(key, caller.principal, tasks)
        act = partial(operations.enqueue_once, caller, session)
        return exchange.ask(lambda number: act(number, tasks, now), number=fingerprint)


def _check_no_key(call: Call) -> None:
    if call.header(b"idempotency-key") is not None:
        raise BadRequest(
            "idempotency-key is for requests that are accepted as a whole, not for a stream of"
            " lines; give its tasks a key, or send requests with up to tasks_per_frame_max tasks"
        )
