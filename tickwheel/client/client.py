"""The client: one object, one connection, safe to share between tasks of an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from tickwheel.client.address import addresses
from tickwheel.client.consumer import Delivery, Settler
from tickwheel.client.link import Link
from tickwheel.client.producer import Parcel, Producer, task_bytes
from tickwheel.client.subscription import Subscription
from tickwheel.client.values import (
    DeadLetter,
    PropertyValue,
    Receipt,
    Rescheduled,
    Seconds,
    Stats,
    Task,
    TaskInfo,
    due_fields,
    task_fields,
    to_ms,
)
from tickwheel.errors import BadRequest, BodyTooLarge, TickwheelError
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType

PAGE = 500
ROUND_TRIP_S = 5.0
"""What a PULL's answer may take beyond its own waiting time."""
LONG_S = 3600.0
"""For a backup: as long as it takes."""


class Client:
    """A producer and consumer of one daemon (or of one of several addresses).

    ``url``: ``tcp://HOST:PORT``, several separated by commas; None: ``TICKWHEEL_URL`` or
    ``tcp://127.0.0.1:7355``. A call is tried again over reconnects for ``send_timeout`` times
    (1 + ``retries``) seconds. All errors derive from ``TickwheelError``.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        send_timeout: float = 3.0,
        retries: int = 2,
        connect_timeout: float = 3.0,
        name: str = "python",
    ) -> None:
        if retries < 0 or send_timeout <= 0 or connect_timeout <= 0:
            raise BadRequest(
                f"send_timeout {send_timeout} and connect_timeout {connect_timeout} must be above"
                f" 0, retries {retries} must not be negative"
            )
        token = token if token is not None else os.environ.get("TICKWHEEL_TOKEN")
        self._retries = retries
        self._timeout_s = send_timeout * (1 + retries)
        self._close_timeout_s = send_timeout
        self._where = (addresses(url), token, name, connect_timeout)
        self._made: tuple[Link, Producer, Settler] | None = None
        self._subscriptions: list[Subscription] = []
        self._numbers = 0

    # --- life ------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect. Raises Unreachable, Unauthorized, VersionUnsupported."""
        if self._made is None:
            link = Link(*self._where)
            self._made = link, Producer(link), Settler(link, self._timeout_s)
        try:
            await self._link.start()
        except BaseException:
            await self._link.stop()
            self._made = None
            raise

    async def close(self) -> None:
        """Release what was not started, wait for what is unanswered (bounded), say BYE."""
        if self._made is None:
            return
        link, producer, settler = self._made
        try:
            async with asyncio.timeout(self._close_timeout_s):
                for subscription in list(self._subscriptions):
                    await subscription.close()
                await settler.drained()
                await producer.drained()
                if link.connected:
                    await link.call(FrameType.BYE, timeout_s=self._close_timeout_s, lasting=False)
        except (TimeoutError, TickwheelError):
            pass  # what was not answered fails below, with its own words
        finally:
            self._subscriptions.clear()
            self._made = None
            await link.stop()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the daemon said in answer to HELLO: v, epoch, node, now_ms, limits."""
        return self._link.server_info

    @property
    def _link(self) -> Link:
        return self._parts()[0]

    def _parts(self) -> tuple[Link, Producer, Settler]:
        if self._made is None:
            raise BadRequest("the client is not connected: use `async with Client(…)` or connect()")
        return self._made

    async def _call(self, kind: FrameType, *fields: Any, **options: Any) -> Any:
        options.setdefault("timeout_s", self._timeout_s)
        return await self._link.call(kind, *fields, **options)

    # --- producing ---------------------------------------------------------------------------

    async def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, PropertyValue] | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
    ) -> Receipt:
        """Enqueue one task; it is durable when this returns.

        Raises OutcomeUnknown when it was sent and no answer came in time, Unreachable when it
        was not sent, or the daemon's error.
        """
        task = Task(topic, body, delay, at, key, tag, properties, priority, ttl)
        receipt: Receipt = await self._put([task_fields(task)], many=False)
        return receipt

    def enqueue_nowait(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, PropertyValue] | None = None,
        priority: int = 0,
        ttl: Seconds | None = None,
    ) -> asyncio.Future[Receipt]:
        """Like ``enqueue`` without waiting. Calls of one step of the loop share a frame."""
        task = Task(topic, body, delay, at, key, tag, properties, priority, ttl)
        return self._put([task_fields(task)], many=False)

    async def enqueue_many(self, tasks: Iterable[Task]) -> list[Receipt]:
        """Enqueue tasks in frames as large as allowed. Each frame is all or nothing; when one
        fails, its error is raised and the others may have been taken."""
        futures = [self._put(some, many=True) for some in self._frames(tasks)]
        if not futures:
            return []
        results = await asyncio.gather(*futures, return_exceptions=True)
        receipts: list[Receipt] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            receipts += result
        return receipts

    def _frames(self, tasks: Iterable[Task]) -> list[list[tuple[Any, ...]]]:
        limits = self._link.limits
        count_max, size_max = min(limits.tasks_per_frame_max, 1000), limits.frame_bytes_max // 4
        frames: list[list[tuple[Any, ...]]] = []
        size = size_max
        for task in tasks:
            fields = task_fields(task)
            size += task_bytes(fields)
            if size > size_max or len(frames[-1]) >= count_max:
                frames.append([])
                size = task_bytes(fields)
            frames[-1].append(fields)
        return frames

    def _put(self, tasks: Sequence[tuple[Any, ...]], *, many: bool) -> asyncio.Future[Any]:
        link, producer, _ = self._parts()
        link.check()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        parcel = Parcel(tasks, loop.create_future(), deadline_s, self._retries, many)
        for task in tasks:
            if len(task[1]) > link.limits.body_bytes_max:
                raise BodyTooLarge(
                    f"body has {len(task[1])} bytes; the limit is"
                    f" {link.limits.body_bytes_max} (body_bytes_max)"
                )
        if parcel.size > link.limits.frame_bytes_max - 4096:
            raise BodyTooLarge(
                f"the task has about {parcel.size} bytes with its properties; the limit is"
                f" {link.limits.frame_bytes_max} (frame_bytes_max)"
            )
        producer.put(parcel)
        return parcel.future

    async def oneway(self, task: Task) -> None:
        """Send and forget: no answer, no resend, perhaps lost. Raises ConnectionLost."""
        self._link.check()
        self._link.send(encode((int(FrameType.ONEWAY), 0, (task_fields(task),))))

    # --- by id ---------------------------------------------------------------------------------

    async def cancel(self, id: int) -> str:  # noqa: A002
        """ "cancelled", or why not: "already_cancelled", "in_flight", "acked", "expired",
        "dead", "deleted", "gone", "unknown"."""
        return (await self.cancel_many([id]))[0]

    async def cancel_many(self, ids: Iterable[int]) -> list[str]:
        return [str(word) for word in await self._by_ids(FrameType.CANCEL, ids)]

    async def reschedule(
        self,
        id: int,  # noqa: A002
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
    ) -> Rescheduled:
        """Move a task that is not in flight to another time."""
        if delay is None and at is None:
            raise BadRequest("give delay or at")
        answer = await self._call(FrameType.RESCHEDULE, [(id, *due_fields(delay, at))])
        return Rescheduled(*answer[0])

    async def run_now(self, id: int) -> Rescheduled:  # noqa: A002
        return (await self.run_now_many([id]))[0]

    async def run_now_many(self, ids: Iterable[int]) -> list[Rescheduled]:
        return [Rescheduled(*pair) for pair in await self._by_ids(FrameType.RUN_NOW, ids)]

    async def lookup(self, id: int) -> TaskInfo:  # noqa: A002
        """Where a task stands; ``state`` is "unknown" or "gone" when nothing is known of it."""
        return (await self.lookup_many([id]))[0]

    async def lookup_many(self, ids: Iterable[int]) -> list[TaskInfo]:
        return [TaskInfo.from_wire(raw) for raw in await self._by_ids(FrameType.LOOKUP, ids)]

    async def _by_ids(self, kind: FrameType, ids: Iterable[int]) -> list[Any]:
        wanted = list(ids)
        most = self._link.limits.ids_per_frame_max
        answers: list[Any] = []
        for start in range(0, len(wanted), most):
            answers += await self._call(kind, wanted[start : start + most])
        return answers

    async def list_tasks(
        self, *, topic: str | None = None, state: str | None = None, limit: int | None = None
    ) -> AsyncIterator[TaskInfo]:
        """Unfinished tasks in order of id, at most ``limit``."""
        async for raw in self._pages(FrameType.LIST, "tasks", limit, topic=topic, state=state):
            yield TaskInfo.from_wire(raw)

    async def _pages(
        self, kind: FrameType, name: str, limit: int | None, **filters: Any
    ) -> AsyncIterator[Any]:
        options = {key: value for key, value in filters.items() if value is not None}
        left = limit if limit is not None else -1
        while left:
            size = PAGE if left < 0 else min(left, PAGE)
            page = await self._call(kind, options | {"limit": size})
            for item in page[name]:
                yield item
                left -= 1
                if not left:
                    return
            if page["next"] is None:
                return
            options["after"] = page["next"]

    # --- consuming -----------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        *,
        group: str = "default",
        prefetch: int = 256,
        lease: Seconds | None = None,
    ) -> Subscription:
        """Deliveries of a topic to a group: ``async with`` it, then ``async for``.

        At most ``prefetch`` deliveries are unfinished at one time. ``lease``: how long one may
        take before it is somebody else's; the daemon's default is 30 s.
        """
        link, _, settler = self._parts()
        self._numbers += 1
        made = Subscription(link, settler, self._numbers, topic, group, prefetch, lease)
        self._subscriptions = [s for s in self._subscriptions if not s.closed]
        self._subscriptions.append(made)
        return made

    async def pull(
        self,
        topic: str,
        *,
        group: str = "default",
        max: int = 32,  # noqa: A002
        wait: Seconds = 0.0,
        lease: Seconds | None = None,
    ) -> list[Delivery]:
        """Up to ``max`` deliveries, waiting ``wait`` for the first one; perhaps none."""
        wait_ms = to_ms(wait, "wait")
        options = {} if lease is None else {"lease_ms": to_ms(lease, "lease")}
        epoch, delivered_ms, items = await self._call(
            *(FrameType.PULL, topic, group, max, wait_ms, options),
            timeout_s=wait_ms / 1000 + ROUND_TRIP_S,
        )
        settler = self._parts()[2]
        return [Delivery(settler, topic, group, epoch, delivered_ms, item) for item in items]

    # --- dead letters, counts, upkeep ------------------------------------------------------------

    async def dead_list(
        self, *, topic: str | None = None, group: str | None = None, limit: int | None = None
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters in order of (id, group)."""
        async for raw in self._pages(FrameType.DEAD_LIST, "dead", limit, topic=topic, group=group):
            yield DeadLetter.from_wire(raw)

    async def dead_requeue(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Give (id, group) another round of attempts, from now: "requeued", "unknown", …"""
        return [str(word) for word in await self._call(FrameType.DEAD_REQUEUE, list(pairs))]

    async def dead_delete(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Drop dead letters for good: "deleted", "unknown", …"""
        return [str(word) for word in await self._call(FrameType.DEAD_DELETE, list(pairs))]

    async def stats(self) -> Stats:
        return Stats.from_wire(await self._call(FrameType.STATS))

    async def backup(self, name: str) -> Mapping[str, Any]:
        """Have the daemon write a consistent copy into its backup folder: path, bytes."""
        answer: Mapping[str, Any] = await self._call(
            FrameType.BACKUP, name, timeout_s=LONG_S, lasting=False
        )
        return answer

    async def ping(self) -> None:
        """A round trip. Raises when there is none."""
        await self._call(FrameType.PING)
