"""The producer that loses answers on purpose and sends its requests again, bad ones among them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from crash.link import Link, Lost, Numbers, now_ms
from crash.plan import BRIEF, Plan
from crash.records import Accepted, Refused
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.protocol import Frame

PIPELINE_MAX = 12
PAUSE_S = 0.03
RETRYABLE = {"refused", "store_full", "overloaded", "window_full", "draining", "outcome_unknown"}


PRIORITIES = (0, 0, 0, 1, 9, 255)
WINDOWS_MS = (1, 150, 700)
WINDOW_SHARE = 0.15


def ttl_ms(rnd: random.Random, topic: str) -> int | None:
    """Often shorter than a lease or a restart lasts."""
    return rnd.choice((1, 150, 400, 1_500, 60_000)) if topic == BRIEF else None


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
    ttl_ms: int | None
    priority: int
    first_sent_ms: int = 0
    first_sent: int = 0
    """Its place among all that was sent and received."""
    sendings: int = 0


class RoughProducer:
    """Pipelines, goes away without reading answers, and sends the same numbers again."""

    def __init__(self, plan: Plan, name: str, shard: int = 0) -> None:
        """``shard``: to which all of its tasks go, when there are several."""
        self._plan = plan
        self._shard = shard % plan.shards
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
            link = await self._plan.link(self._numbers, self._shard, session=self._session)
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
            while self._plan.is_making and len(waiting) < rnd.randint(1, PIPELINE_MAX):
                request = self._make()
                waiting[request.number] = self._send(link, request)
            if self._plan.is_making and rnd.random() < 0.03:
                raise Lost("on purpose, with answers on their way")
            if self._settled and not self._plan.quiet and rnd.random() < 0.1:
                await self._ask_again(link)
            if not waiting:
                await rest(PAUSE_S)
                continue
            number = min(waiting)
            frame = await link.wait(waiting.pop(number))
            if not self._settle(self._open[number], frame):
                waiting[number] = self._send(link, self._open[number])
            await rest(PAUSE_S * rnd.random())

    def _make(self) -> Request:
        rnd, number = self._rnd, self._numbers.next()
        topic = rnd.choice(self._plan.topics)
        tokens = tuple(f"{self._name}/{number}/{i}" for i in range(rnd.choice((1, 1, 2, 7))))
        priority, ttl = rnd.choice(PRIORITIES), ttl_ms(rnd, topic)
        options = {"priority": priority} if priority else {}
        options |= {} if ttl is None else {"ttl_ms": ttl}
        tasks: list[Any] = [self._task(topic, token, options) for token in tokens]
        good = rnd.random() > 0.1
        if not good:
            spoiled = rnd.randrange(len(tasks))
            tasks[spoiled] = rnd.choice(
                ([topic, b"x", -1], ["no topic?", b"x", 1], [topic, "text", 1], [topic], 7)
            )
        request = self._open[number] = Request(number, topic, tokens, tasks, good, ttl, priority)
        return request

    def _task(self, topic: str, token: str, options: dict[str, int]) -> list[Any]:
        body = token.encode() + b" " * self._rnd.choice((0, 0, 100, 2_000))
        wait_ms = delay_ms(self._rnd)
        if self._rnd.random() < WINDOW_SHARE:
            options = {**options, "within_ms": self._rnd.choice(WINDOWS_MS)}
        if self._rnd.random() < 0.3:
            return [topic, body, None, {"due_ms": now_ms() + wait_ms, "key": token, **options}]
        return [topic, body, wait_ms, options] if options else [topic, body, wait_ms]

    def _send(self, link: Link, request: Request) -> asyncio.Future[Frame]:
        request.first_sent_ms = request.first_sent_ms or now_ms()
        request.first_sent = request.first_sent or Link.order()
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
        accepted_ms, ids, *more = frame[2]
        clocks, sent_ms = self._plan.clocks, request.first_sent_ms
        if not clocks.low(sent_ms, now_ms()) <= accepted_ms <= clocks.high(sent_ms, now_ms()):
            self._journal.odd.append(f"accepted at {accepted_ms}: {request}")
        asked = [
            accepted_ms + task[2] if task[2] is not None else max(task[3]["due_ms"], accepted_ms)
            for task in request.tasks
        ]
        dues = tuple(more[0]["dues_ms"]) if more else tuple(asked)
        if None in dues:
            return  # the first answer was lost, and by now nobody knows the moments any more
        for asked_ms, due_ms, task in zip(asked, dues, request.tasks, strict=True):
            within_ms = task[3].get("within_ms", 0) if len(task) == 4 else 0
            if not asked_ms <= due_ms <= asked_ms + within_ms:
                self._journal.odd.append(f"due at {due_ms}, not in its window: {request}")
            self._journal.placed += due_ms > asked_ms
        self._journal.accepted.append(
            Accepted(
                request.topic,
                request.tokens,
                ids,
                dues,
                request.first_sent,
                Link.order(),
                request.ttl_ms,
                request.priority,
            )
        )

    async def _ask_again(self, link: Link) -> None:
        """An answered request once more: the same answer, and nothing new."""
        number = self._rnd.choice(sorted(self._settled))
        request, before = self._settled[number]
        floor = min([*self._open, *self._settled])
        frame = await link.wait(link.send_as(number, FrameType.ENQUEUE, floor, request.tasks))
        self._journal.resent += 1
        if frame[0] == FrameType.OK and before[0] == FrameType.OK:
            self._accepted(request, frame)
        if not _is_same(before, frame) and frame[2] not in RETRYABLE:
            self._journal.odd.append(f"{request}: first {before}, then {frame}")


def _is_same(before: Frame, frame: Frame) -> bool:
    """The moments that were chosen for tasks which have ended by now are forgotten."""
    if frame[:2] != before[:2] or frame[0] != FrameType.OK or len(frame[2]) == 2:
        return bool(frame[:3] == before[:3])
    first, again = (row[2][2]["dues_ms"] for row in (before, frame))
    dues_are_same = all(two in (None, one) for one, two in zip(first, again, strict=True))
    return bool(frame[2][:2] == before[2][:2] and dues_are_same)
