"""Producers of the torture: one that loses answers and resends, one that uses the real client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from crash.link import Link, Lost, Numbers, now_ms
from crash.plan import GROUPS, Plan
from crash.records import Accepted, Moved, Refused
from tickwheel.client import Client, Task
from tickwheel.errors import BadRequest, OutcomeUnknown, Refused as RefusedError, TickwheelError
from tickwheel.protocol.codec import Frame
from tickwheel.protocol.frames import FrameType

PIPELINE_MAX = 12
PAUSE_S = 0.03
TOPICS = tuple(GROUPS)
RETRYABLE = {"refused", "store_full", "overloaded", "window_full", "draining", "outcome_unknown"}


def delay_ms(rnd: random.Random) -> int:
    """Mostly soon, some at once, some over a few rotations of the wheel."""
    return rnd.choice((0, rnd.randrange(50), rnd.randrange(600), rnd.randrange(2_500)))


@dataclass(slots=True)
class Request:
    """An ENQUEUE that is not settled."""

    number: int
    topic: str
    tokens: tuple[str, ...]
    tasks: list[Any]
    good: bool
    first_sent_ms: int = 0
    sendings: int = 0


class RoughProducer:
    """Pipelines, goes away without reading answers, and sends the same numbers again."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._numbers = Numbers()
        self._session = self._rnd.randbytes(16)
        self._open: dict[int, Request] = {}
        self._settled: dict[int, tuple[Request, Frame]] = {}
        """Answered, and not below the floor: the daemon must say the same again."""

    async def run(self) -> None:
        while self._plan.producing or self._open:
            link = await self._plan.link(self._numbers, session=self._session)
            try:
                await self._talk(link)
            except Lost:
                self._journal.resent += len(self._open)
            finally:
                link.abort()

    async def _talk(self, link: Link) -> None:
        rnd = self._rnd
        waiting = {r.number: self._send(link, r) for r in list(self._open.values())}
        while self._plan.producing or waiting:
            while self._plan.producing and len(waiting) < rnd.randint(1, PIPELINE_MAX):
                request = self._make()
                waiting[request.number] = self._send(link, request)
            if self._plan.producing and rnd.random() < 0.03:
                raise Lost("on purpose, with answers on their way")
            if self._settled and rnd.random() < 0.1:
                await self._ask_again(link)
            number = min(waiting)
            frame = await link.wait(waiting.pop(number))
            if not self._settle(self._open[number], frame):
                waiting[number] = self._send(link, self._open[number])
            await asyncio.sleep(PAUSE_S * rnd.random())

    def _make(self) -> Request:
        rnd, number = self._rnd, self._numbers.next()
        topic = rnd.choice(TOPICS)
        tokens = tuple(f"{self._name}/{number}/{i}" for i in range(rnd.choice((1, 1, 2, 7))))
        tasks: list[Any] = [self._task(topic, token) for token in tokens]
        good = rnd.random() > 0.1
        if not good:
            spoiled = rnd.randrange(len(tasks))
            tasks[spoiled] = rnd.choice(
                ([topic, b"x", -1], ["no topic?", b"x", 1], [topic, "text", 1], [topic], 7)
            )
        request = self._open[number] = Request(number, topic, tokens, tasks, good)
        return request

    def _task(self, topic: str, token: str) -> list[Any]:
        body = token.encode() + b" " * self._rnd.choice((0, 0, 100, 2_000))
        wait_ms = delay_ms(self._rnd)
        if self._rnd.random() < 0.3:
            return [topic, body, None, {"due_ms": now_ms() + wait_ms, "key": token}]
        return [topic, body, wait_ms]

    def _send(self, link: Link, request: Request) -> asyncio.Future[Frame]:
        request.first_sent_ms = request.first_sent_ms or now_ms()
        request.sendings += 1
        floor = min(self._open)
        self._settled = {n: kept for n, kept in self._settled.items() if n >= floor}
        return link.send_as(request.number, FrameType.ENQUEUE, floor, request.tasks)

    def _settle(self, request: Request, frame: Frame) -> bool:
        """Write the answer down; False when the request has to be sent once more."""
        if frame[0] == FrameType.OK:
            if not request.good:
                self._journal.odd.append(f"a bad request was accepted: {request} {frame}")
            self._accepted(request, frame)
        elif frame[2] in RETRYABLE:
            return False
        else:
            if request.good:
                self._journal.odd.append(f"a good request was refused: {request} {frame}")
            self._journal.refused.append(Refused(request.tokens, frame[2]))
        del self._open[request.number]
        self._settled[request.number] = request, frame
        return True

    def _accepted(self, request: Request, frame: Frame) -> None:
        accepted_ms, ids = frame[2]
        if not request.first_sent_ms <= accepted_ms <= now_ms():
            self._journal.odd.append(f"accepted at {accepted_ms}: {request}")
        dues = tuple(
            accepted_ms + task[2] if task[2] is not None else max(task[3]["due_ms"], accepted_ms)
            for task in request.tasks
        )
        self._journal.accepted.append(Accepted(request.topic, request.tokens, ids, dues))

    async def _ask_again(self, link: Link) -> None:
        """An answered request once more: the same answer, and nothing new."""
        number = self._rnd.choice(sorted(self._settled))
        request, before = self._settled[number]
        floor = min([*self._open, number])
        frame = await link.wait(
            link.send_as(number, FrameType.ENQUEUE, floor, request.tasks)
        )
        self._journal.resent += 1
        if frame[0] == FrameType.OK and before[0] == FrameType.OK:
            self._accepted(request, frame)
        if frame[:3] != before[:3] and frame[2] not in RETRYABLE:
            self._journal.odd.append(f"{request}: first {before}, then {frame}")


class FairProducer:
    """The real client: single tasks, batches, cancels and reschedules."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._made = 0
        self._repeat: list[int] = []
        """Cancels without an answer."""

    async def run(self) -> None:
        async with Client(
            f"tcp://127.0.0.1:{self._plan.port}", send_timeout=1.0, retries=3, name=self._name
        ) as client:
            while self._plan.producing:
                verb = self._rnd.choice((self._one, self._many, self._bad, self._undo, self._move))
                await self._try(verb, client)
                await asyncio.sleep(PAUSE_S * self._rnd.random())
            while self._repeat:
                await self._try(self._undo_again, client)

    async def _try(self, verb: Callable[[Client], Awaitable[None]], client: Client) -> None:
        """An error without an answer promises nothing; what the daemon refused is noted."""
        try:
            await verb(client)
        except TickwheelError as error:
            if not error.retryable:
                self._journal.odd.append(f"{verb.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(PAUSE_S)

    def _tokens(self, count: int) -> list[str]:
        self._made += count
        return [f"{self._name}/{self._made - i}" for i in range(count)]

    async def _enqueue(self, client: Client, topic: str, tokens: list[str], wait_ms: int) -> int:
        tasks = [Task(topic, token.encode(), delay=wait_ms / 1000) for token in tokens]
        try:
            if len(tasks) == 1:
                receipts = [await client.enqueue(topic, tasks[0].body, delay=wait_ms / 1000)]
            else:
                receipts = await client.enqueue_many(tasks)
        except RefusedError as error:
            self._journal.refused.append(Refused(tuple(tokens), error.code))
            raise
        self._journal.accepted.append(
            Accepted(
                topic,
                tuple(tokens),
                tuple(receipt.id for receipt in receipts),
                tuple(receipt.due_ms for receipt in receipts),
            )
        )
        return receipts[0].id

    async def _one(self, client: Client) -> None:
        topic = self._rnd.choice(TOPICS)
        await self._enqueue(client, topic, self._tokens(1), delay_ms(self._rnd))

    async def _many(self, client: Client) -> None:
        topic = self._rnd.choice(TOPICS)
        await self._enqueue(client, topic, self._tokens(20), delay_ms(self._rnd))

    async def _bad(self, client: Client) -> None:
        tokens = self._tokens(2)
        tasks = [Task("work", tokens[0].encode()), Task("not a topic", tokens[1].encode())]
        try:
            await client.enqueue_many(tasks)
        except BadRequest as error:
            self._journal.refused.append(Refused(tuple(tokens), error.code))

    async def _undo(self, client: Client) -> None:
        task_id = await self._enqueue(client, "work", self._tokens(1), 300)
        self._repeat.append(task_id)
        await self._undo_again(client)

    async def _undo_again(self, client: Client) -> None:
        task_id = self._repeat[0]
        word = await client.cancel(task_id)
        if word in ("cancelled", "already_cancelled"):
            self._journal.finished.append(_cancelled(task_id, client))
        elif word not in ("in_flight", "acked", "dead"):
            self._journal.odd.append(f"cancel of {task_id} answered {word!r}")
        self._repeat.remove(task_id)

    async def _move(self, client: Client) -> None:
        task_id = await self._enqueue(client, "work", self._tokens(1), 400)
        for wait_ms in (900, 200):
            due_ms = now_ms() + wait_ms
            await self._move_once(client, task_id, due_ms)

    async def _move_once(self, client: Client, task_id: int, due_ms: int) -> None:
        try:
            answer = await client.reschedule(task_id, at=_datetime(due_ms))
        except (OutcomeUnknown, TickwheelError):
            self._journal.moved.append(Moved(task_id, due_ms, None))
            raise
        if answer.status == "scheduled":
            self._journal.moved.append(Moved(task_id, due_ms, now_ms()))
        elif answer.status not in ("in_flight", "acked", "dead"):
            self._journal.odd.append(f"reschedule of {task_id} answered {answer!r}")
