"""The producer that loses answers on purpose and sends its requests again, bad ones among them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from crash.link import Link, Lost, Numbers, now_ms
from crash.plan import GROUPS, Plan
from crash.records import Accepted, Refused
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
        floor = min([*self._open, *self._settled])
        frame = await link.wait(link.send_as(number, FrameType.ENQUEUE, floor, request.tasks))
        self._journal.resent += 1
        if frame[0] == FrameType.OK and before[0] == FrameType.OK:
            self._accepted(request, frame)
        if frame[:3] != before[:3] and frame[2] not in RETRYABLE:
            self._journal.odd.append(f"{request}: first {before}, then {frame}")
