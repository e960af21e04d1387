"""``enqueue`` in its four ways: awaited, as a future, many at a time, and one way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from tickwheel.client.producer import Producer, gather_receipts
from tickwheel.client.reconnector import Link
from tickwheel.client.retry import Retry
from tickwheel.client.tasks import FRAME_BYTES, Draft, Receipt, Task, TaskChecker, Value
from tickwheel.client.times import Duration
from tickwheel.errors import ClientClosed, TickwheelError
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType, Limits

FRAMES_AHEAD = 8
"""Frames of one ``enqueue_many`` that may be on their way at a time."""
_NO_OPTIONS = (None, None, None, None, 0, None, None)


class Enqueuing:
    """What producers call; mixed into ``Client``."""

    _link: Link
    _producer: Producer
    _checker: TaskChecker
    _send_timeout_s: float

    def _ready(self) -> None:
        raise ClientClosed

    async def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
    ) -> Receipt:
        """Store a task durably; due after ``delay``, or ``at``, else at once.

        ``retry``: its own policy, which wins over its group's and topic's. Concurrent calls
        share frames. Raises BadRequest when it is wrong; Refused (or a kind of
        it) or Unreachable when it was certainly not stored; OutcomeUnknown when nobody knows.
        """
        draft = self._draft(topic, body, delay, at, key, tag, properties, priority, ttl, retry)
        if self._producer.is_full:
            await self._producer.wait_room()
        receipt: Receipt = await self._producer.add(draft)
        return receipt

    def enqueue_nowait(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
    ) -> asyncio.Future[Receipt]:
        """``enqueue`` as a future.

        Raises at once what is wrong with the task, and Overloaded when too many wait; what goes
        wrong later is the future's. One that nobody looks at is only logged.
        """
        draft = self._draft(topic, body, delay, at, key, tag, properties, priority, ttl, retry)
        return self._producer.add(draft)

    async def enqueue_many(self, tasks: Iterable[Task]) -> list[Receipt]:
        """Store tasks; their receipts in order. All are checked before the first is sent.

        What fits one frame (``limits.tasks_per_frame_max`` tasks and ``frame_bytes_max`` bytes)
        is stored as a whole or not at all. More goes out in several; when some of them were
        stored and others not, Partly says which.
        """
        self._ready()
        frames = list(_frames(self._checker.check_all(tasks), self._link.limits))
        futures: list[asyncio.Future[list[Receipt]]] = []
        trouble: TickwheelError | None = None
        for index, frame in enumerate(frames):
            if index >= FRAMES_AHEAD:
                # When one has failed the rest is not even begun.
                await asyncio.wait((futures[index - FRAMES_AHEAD],))
                if futures[index - FRAMES_AHEAD].exception() is not None:
                    break
            try:
                if self._producer.is_full:
                    await self._producer.wait_room()
                size = sum([draft[1] for draft in frame])
                futures.append(self._producer.add_many([draft[0] for draft in frame], size))
            except TickwheelError as error:
                trouble = error
                break
        return await gather_receipts(futures, [len(frame) for frame in frames], trouble)

    async def oneway(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Send a task and forget it: no answer, no retry, no promise that it is stored.

        Raises what is wrong with it, and Unreachable when there is no connection to send it on.
        """
        draft = self._draft(topic, body, delay, at, key, tag, properties, priority, ttl, retry)
        connection = await self._link.wait_up(self._send_timeout_s)
        if not connection.has_room:
            await connection.wait_room(self._send_timeout_s)
        connection.put(encode((int(FrameType.ONEWAY), 0, (draft.wire,))))
        self._link.wake()

    def _draft(self, topic: str, body: bytes, delay: Duration | None, *options: Any) -> Draft:
        self._ready()
        if options == _NO_OPTIONS:
            draft = self._checker.plain(topic, body, delay)
            if draft is not None:
                return draft
        at, key, tag, properties, priority, ttl, retry = options
        task = Task(
            topic, body, delay=delay, at=at, key=key, tag=tag, properties=properties,
            priority=priority, ttl=ttl, retry=retry,
        )  # fmt: skip
        return self._checker.check(task)


def _frames(drafts: list[Draft], limits: Limits) -> Iterable[list[Draft]]:
    """Slices that fit a frame each."""
    bytes_max, count_max = limits.frame_bytes_max - FRAME_BYTES, limits.tasks_per_frame_max
    start = size = 0
    for index, draft in enumerate(drafts):
        size += draft[1]
        if size > bytes_max or index - start >= count_max:
            yield drafts[start:index]
            start, size = index, draft[1]
    if start < len(drafts):
        yield drafts[start:]
