"""A subscription: an async iterator over deliveries, with a buffer whose leases are kept up.

Deliveries wait in the buffer in the daemon's batches. A batch that is old has its leases
extended; one whose leases are over is dropped, because its tasks are somebody else's by then.
After a lost connection a batch is not handed out before an extension has shown that its
leases still hold. On close, what was not handed out is released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Self

from tickwheel.client.consumer import Delivery, Settler
from tickwheel.client.link import Link
from tickwheel.client.values import Seconds, to_ms
from tickwheel.errors import ConnectionLost, TickwheelError
from tickwheel.protocol.frames import FrameType

AGAIN_S = 0.2
"""Between two tries to subscribe."""


class Batch:
    """Deliveries of one frame that were not handed out yet."""

    __slots__ = ("busy", "deadline_s", "delivered_ms", "epoch", "fresh_s", "items", "sure")

    def __init__(
        self, epoch: int, delivered_ms: int, items: Any, now_s: float, lease_s: float
    ) -> None:
        self.epoch = epoch
        self.delivered_ms = delivered_ms
        self.items: deque[tuple[Any, ...]] = deque(items)
        self.fresh_s = now_s
        self.deadline_s = now_s + lease_s
        self.sure = True
        """Its leases hold as far as is known."""
        self.busy = False
        """An extension is under way."""

    def receipts(self) -> tuple[list[int], list[int]]:
        return [item[0] for item in self.items], [item[1] for item in self.items]


class Subscription:
    """``async with`` and ``async for``; made by ``Client.subscribe``."""

    def __init__(
        self,
        link: Link,
        settler: Settler,
        number: int,
        topic: str,
        group: str,
        prefetch: int,
        lease: Seconds | None,
    ) -> None:
        self.topic = topic
        self.group = group
        self.prefetch = prefetch
        self._link = link
        self._settler = settler
        self._number = number
        self._options = {} if lease is None else {"lease_ms": to_ms(lease, "lease")}
        self._lease_s = 30.0
        self._batches: deque[Batch] = deque()
        self._arrived = asyncio.Event()
        self._started = False
        self._closed = False
        self._error: TickwheelError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe. Raises the daemon's error."""
        if self._started:
            return
        self._started = True
        self._link.deliver[self._number] = self._take
        deadline_s = asyncio.get_running_loop().time() + self._settler.timeout_s
        try:
            await self._subscribe_patiently(deadline_s)
        except BaseException:
            self._link.deliver.pop(self._number, None)
            raise
        self._link.on_connected.append(self._rejoin)
        self._link.on_lost.append(self._lost)
        self._link.on_sweep.append(self._sweep)

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """No more deliveries; what was not handed out goes back, without costing an attempt."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        if not self._started:
            return
        for hooks, hook in (
            (self._link.on_connected, self._rejoin),
            (self._link.on_lost, self._lost),
        ):
            if hook in hooks:
                hooks.remove(hook)
        if self._sweep in self._link.on_sweep:
            self._link.on_sweep.remove(self._sweep)
        try:
            if self._link.connected:
                await self._leave()
        except TickwheelError:
            pass  # the leases end by themselves
        finally:
            self._link.deliver.pop(self._number, None)
            for task in self._tasks:
                task.cancel()
            self._batches.clear()

    async def _leave(self) -> None:
        await self._link.call(
            FrameType.UNSUBSCRIBE, self._number, timeout_s=self._settler.timeout_s, lasting=False
        )
        batches, self._batches = self._batches, deque()
        for batch in batches:
            if batch.items:
                place = (self.topic, self.group, batch.epoch)
                await self._settler.keep(FrameType.RELEASE, place, *batch.receipts())

    async def _subscribe(self) -> None:
        answer = await self._link.call(
            FrameType.SUBSCRIBE,
            self._number,
            self.topic,
            self.group,
            self.prefetch,
            self._options,
            timeout_s=self._settler.timeout_s,
            lasting=False,
        )
        self._lease_s = answer["lease_ms"] / 1000

    # --- deliveries ------------------------------------------------------------------------

    def _take(self, epoch: int, delivered_ms: int, items: Any) -> None:
        now_s = asyncio.get_running_loop().time()
        self._batches.append(Batch(epoch, delivered_ms, items, now_s, self._lease_s))
        self._arrived.set()

    def _next(self) -> Delivery | None:
        batches = self._batches
        if not batches:
            return None
        now_s = asyncio.get_running_loop().time()
        while batches:
            batch = batches[0]
            if not batch.items or batch.deadline_s <= now_s:
                batches.popleft()
                continue
            if not batch.sure:
                return self._next_sure(now_s)
            item = batch.items.popleft()
            return self._delivery(batch, item)
        return None

    def _next_sure(self, now_s: float) -> Delivery | None:
        """From behind batches that wait for word about their leases."""
        for batch in self._batches:
            if batch.sure and batch.items and batch.deadline_s > now_s:
                return self._delivery(batch, batch.items.popleft())
        return None

    def _delivery(self, batch: Batch, item: tuple[Any, ...]) -> Delivery:
        return Delivery(
            self._settler, self.topic, self.group, batch.epoch, batch.delivered_ms, item
        )

    async def __anext__(self) -> Delivery:
        if not self._started:
            await self.start()
        while True:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            delivery = self._next()
            if delivery is not None:
                return delivery
            if self._link.failed is not None:
                self._link.check()
            self._arrived.clear()
            await self._arrived.wait()

    def __aiter__(self) -> Self:
        return self

    async def batches(self, max: int = 256) -> AsyncIterator[list[Delivery]]:  # noqa: A002
        """Lists of 1 to ``max`` deliveries, as many as have come."""
        async for first in self:
            found = [first]
            while len(found) < max and (more := self._next()) is not None:
                found.append(more)
            yield found

    # --- leases ----------------------------------------------------------------------------

    def _sweep(self, now_s: float) -> None:
        if not self._link.connected:
            return
        for batch in self._batches:
            old = now_s - batch.fresh_s >= self._lease_s / 3
            if batch.items and not batch.busy and (old or not batch.sure):
                batch.busy = True
                self._spawn(self._extend(batch))

    async def _extend(self, batch: Batch) -> None:
        ids, attempts = batch.receipts()
        place = (self.topic, self.group, batch.epoch)
        lease_ms = round(self._lease_s * 1000)
        asked_s = asyncio.get_running_loop().time()
        try:
            words = await self._settler.keep(FrameType.EXTEND, place, ids, attempts, lease_ms)
        except TickwheelError:
            return
        finally:
            batch.busy = False
        if words is not None:
            kept = {i for i, word in zip(ids, words, strict=True) if word == "extended"}
            batch.items = deque(item for item in batch.items if item[0] in kept)
        batch.fresh_s, batch.deadline_s, batch.sure = asked_s, asked_s + self._lease_s, True
        self._arrived.set()

    # --- connections -----------------------------------------------------------------------

    def _lost(self) -> None:
        for batch in self._batches:
            batch.sure = False
        self._arrived.set()

    def _rejoin(self) -> None:
        self._spawn(self._join_again())

    async def _join_again(self) -> None:
        """On a new connection; when that one is lost too, the next one begins again."""
        try:
            await self._subscribe_patiently(None)
        except ConnectionLost:
            return
        except TickwheelError as error:
            self._error = error
            self._arrived.set()
            return
        self._sweep(asyncio.get_running_loop().time())

    async def _subscribe_patiently(self, deadline_s: float | None) -> None:
        """Try until it works, until the deadline, or (None) as long as this connection lasts."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._subscribe()
            except TickwheelError as error:
                if deadline_s is None:
                    over = isinstance(error, ConnectionLost)
                else:
                    over = loop.time() >= deadline_s
                if over or not error.retryable:
                    raise
            else:
                return
            await asyncio.sleep(AGAIN_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
