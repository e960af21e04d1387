"""Deliveries and what becomes of them: acks by the batch, leases kept up, nacks, releases."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from tickwheel.client.link import Link
from tickwheel.client.producer import fail
from tickwheel.client.values import PropertyValue, Seconds, moment, to_ms
from tickwheel.errors import TickwheelError
from tickwheel.protocol.frames import FrameType

_NOTHING: dict[str, Any] = {}


class Settler:
    """Sends what consumers say about deliveries; acks of one step of the loop share a frame."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self.timeout_s = timeout_s
        self._acks: dict[tuple[str, str, int], list[tuple[int, int, asyncio.Future[str]]]] = {}
        self._unanswered = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def ack(self, delivery: Delivery) -> asyncio.Future[str]:
        self._link.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        acks = self._acks
        if not acks:
            self._idle.clear()
            loop.call_soon(self._flush)
        place = (delivery.topic, delivery.group, delivery.epoch)
        acks.setdefault(place, []).append((delivery.id, delivery.attempt, future))
        return future

    async def drained(self) -> None:
        """Until every ack is answered."""
        await self._idle.wait()

    def _flush(self) -> None:
        acks, self._acks = self._acks, {}
        most = self._link.limits.ids_per_frame_max
        for place, found in acks.items():
            for start in range(0, len(found), most):
                self._send(place, found[start : start + most])

    def _send(
        self, place: tuple[str, str, int], some: list[tuple[int, int, asyncio.Future[str]]]
    ) -> None:
        ids, attempts, futures = zip(*some, strict=True)

        def answered(words: Any, error: TickwheelError | None) -> None:
            self._unanswered -= 1
            for index, future in enumerate(futures):
                if error is not None:
                    fail(future, error)
                elif not future.done():
                    future.set_result("acked" if words is None else words[index])
            if not self._unanswered and not self._acks:
                self._idle.set()

        self._unanswered += 1
        deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        self._link.post(FrameType.ACK, (*place, ids, attempts), deadline_s, answered)

    async def settle(self, kind: FrameType, delivery: Delivery, *fields: Any) -> str:
        """NACK or REJECT one delivery; the daemon's word."""
        item = (delivery.id, delivery.epoch, delivery.attempt, *fields)
        place = (delivery.topic, delivery.group)
        words = await self._link.call(kind, *place, (item,), timeout_s=self.timeout_s)
        return str(words[0])

    async def keep(
        self,
        kind: FrameType,
        place: tuple[str, str, int],
        ids: list[int],
        attempts: list[int],
        *fields: Any,
    ) -> list[str] | None:
        """EXTEND or RELEASE; None when it was done for all."""
        answer = await self._link.call(
            kind, *place, ids, attempts, *fields, timeout_s=self.timeout_s
        )
        return None if answer is None else list(answer)


class Delivery:
    """One attempt at one task. It stays leased until it is acked, or its lease is over.

    ``delivered_ms`` is the daemon's stamp; ``attempt`` is 1 at the first delivery. Id, epoch
    and attempt are the receipt.
    """

    __slots__ = (
        *("id", "topic", "group", "body", "key", "tag", "properties", "priority"),
        *("due_ms", "delivered_ms", "attempt", "epoch", "_settler"),
    )

    id: int
    topic: str
    group: str
    body: bytes
    key: str | None
    tag: str | None
    properties: dict[str, PropertyValue]
    priority: int
    due_ms: int
    delivered_ms: int
    attempt: int
    epoch: int

    def __init__(
        self,
        settler: Settler,
        topic: str,
        group: str,
        epoch: int,
        delivered_ms: int,
        item: tuple[Any, ...],
    ) -> None:
        self._settler = settler
        self.topic = topic
        self.group = group
        self.epoch = epoch
        self.delivered_ms = delivered_ms
        self.id, self.attempt, self.due_ms, self.body = item[:4]
        options = item[4] if len(item) > 4 else _NOTHING
        self.key = options.get("key")
        self.tag = options.get("tag")
        self.properties = options.get("props") or {}
        self.priority = options.get("priority", 0)

    @property
    def due(self) -> datetime:
        return moment(self.due_ms)

    async def ack(self) -> str:
        """Done. Durable when it returns: "acked", or "done" if it was before.

        Other words say why it could not be: "cancelled", "expired", "deleted", "dead",
        "gone", "stale", "unknown". Raises TickwheelError when no answer came.
        """
        return await self._settler.ack(self)

    def ack_nowait(self) -> asyncio.Future[str]:
        """Like ``ack`` without waiting: the future is done when the ack is durable."""
        return self._settler.ack(self)

    async def nack(self, delay: Seconds | None = None, reason: str | None = None) -> str:
        """It failed: again after ``delay``, or by the retry policy. "retrying", "dead", "stale"."""
        delay_ms = None if delay is None else to_ms(delay, "delay")
        return await self._settler.settle(FrameType.NACK, self, delay_ms, reason)

    async def reject(self, reason: str | None = None) -> str:
        """It can never succeed: to the dead letters. "dead", "stale", …"""
        return await self._settler.settle(FrameType.REJECT, self, reason)

    async def extend(self, seconds: Seconds) -> str:
        """The lease ends ``seconds`` from now. "extended", "stale", …"""
        return await self._keep(FrameType.EXTEND, "extended", to_ms(seconds, "seconds"))

    async def release(self) -> str:
        """Given back unstarted: ready at once, the attempt does not count. "released", …"""
        return await self._keep(FrameType.RELEASE, "released")

    async def _keep(self, kind: FrameType, usual: str, *fields: Any) -> str:
        place = (self.topic, self.group, self.epoch)
        words = await self._settler.keep(kind, place, [self.id], [self.attempt], *fields)
        return usual if words is None else words[0]

    def __repr__(self) -> str:
        return (
            f"<Delivery {self.id} of {self.topic} to {self.group}, attempt {self.attempt},"
            f" {len(self.body)} bytes>"
        )
