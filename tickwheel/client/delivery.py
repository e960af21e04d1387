"""Deliveries as the business code sees them, and the batches they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tickwheel.client.tasks import Value
from tickwheel.client.times import Duration, duration_ms, moment
from tickwheel.protocol.frames import FrameType

if TYPE_CHECKING:
    from tickwheel.client.acks import Channel
    from tickwheel.client.requests import Calls

Item = tuple[Any, ...]
"""(id, attempt, due_ms, body) or the same with a map of options."""
_NOTHING: Mapping[str, Any] = {}


class Finished:
    """Stands for the daemon where nothing is left to be said: what is delivered at most once, or
    by a broadcast, had its end before it was sent. Every verb is answered "done" at once."""

    __slots__ = ()
    WORD = "done"

    def add(self, task_id: int, attempt: int) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result(self.WORD)
        return future

    def add_unwatched(self, task_id: int, attempt: int) -> None:
        """Nobody wants the answer."""

    async def call(self, kind: FrameType, *fields: Any) -> list[str]:
        return [self.WORD]


FINISHED = Finished()


class DeliveryBatch:
    """What deliveries of one frame have in common."""

    __slots__ = ("acks", "calls", "delivered_ms", "epoch", "extending", "group", "items", "topic",
                 "until_s")  # fmt: skip

    def __init__(
        self,
        calls: Calls | Finished,
        acks: Channel | Finished,
        topic: str,
        group: str,
        epoch: int,
        delivered_ms: int,
        items: list[Item],
    ) -> None:
        self.calls = calls
        self.acks = acks
        self.topic = topic
        self.group = group
        self.epoch = epoch
        self.delivered_ms = delivered_ms
        self.items = items
        """Those that were not handed out, last first."""
        self.until_s = 0.0
        """Until when their leases hold for sure, by the loop's clock."""
        self.extending = False


class Delivery:
    """One task, to be finished by ``ack``, or given back by ``nack``, ``reject``, ``release``.

    Each verb is answered when it is durable, by a word: "acked", "retrying", … or, when
    something else came first, what became of the task ("stale", "cancelled", "gone", …).
    """

    __slots__ = ("_batch", "_item", "settled")

    def __init__(self, batch: DeliveryBatch, item: Item) -> None:
        self._batch = batch
        self._item = item
        self.settled = False
        """Whether ack, nack, reject or release was called; not whether it was answered."""

    # --- the task -------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        return self._item[0]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def attempt(self) -> int:
        """1 for the first delivery to this group."""
        return self._item[1]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def due_ms(self) -> int:
        return self._item[2]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def due(self) -> datetime:
        return moment(self._item[2])

    @property
    def body(self) -> bytes:
        return self._item[3]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def key(self) -> str | None:
        return self._options.get("key")

    @property
    def tag(self) -> str | None:
        return self._options.get("tag")

    @property
    def properties(self) -> Mapping[str, Value]:
        found: Mapping[str, Value] = self._options.get("props", _NOTHING)
        return found

    @property
    def schedule(self) -> str | None:
        """The recurring schedule that it is an occurrence of."""
        found = self.properties.get("tickwheel.schedule")
        return None if found is None else str(found)

    @property
    def planned(self) -> datetime | None:
        """When that occurrence was planned."""
        found = self.properties.get("tickwheel.planned_ms")
        return moment(found) if isinstance(found, int) else None

    @property
    def priority(self) -> int:
        return int(self._options.get("priority", 0))

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._item[4] if len(self._item) > 4 else _NOTHING

    # --- the delivery ---------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        return self._batch.topic

    @property
    def group(self) -> str:
        return self._batch.group

    @property
    def epoch(self) -> int:
        """The daemon's start that this delivery belongs to; part of the receipt."""
        return self._batch.epoch

    @property
    def delivered_ms(self) -> int:
        """When it was sent, by the daemon's clock."""
        return self._batch.delivered_ms

    @property
    def lease_until_s(self) -> float:
        """When it was handed out: until when its lease holds for sure, by the loop's clock."""
        return self._batch.until_s

    # --- what becomes of it ---------------------------------------------------------------------

    async def ack(self) -> str:
        """Done. "acked" when it is durable, or what else became of the task."""
        self.settled = True
        return await self._batch.acks.add(self._item[0], self._item[1])

    def ack_nowait(self) -> asyncio.Future[str]:
        """``ack`` as a future; acks of one step of the event loop share a frame."""
        self.settled = True
        return self._batch.acks.add(self._item[0], self._item[1])

    def ack_unwatched(self) -> None:
        """``ack`` for one who does not wait; an answer that is not "acked" is logged."""
        self.settled = True
        self._batch.acks.add_unwatched(self._item[0], self._item[1])

    async def nack(self, delay: Duration | None = None, reason: str | None = None) -> str:
        """It failed: again after ``delay`` (default: the daemon's retry policy), or, when its
        retries are used up, to the dead letters. "retrying" or "dead"."""
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        item = (*self._receipt, delay_ms, reason)
        self.settled = True
        return await self._one(FrameType.NACK, [item])

    async def reject(self, reason: str | None = None) -> str:
        """It can never succeed: to the dead letters at once. "dead"."""
        self.settled = True
        return await self._one(FrameType.REJECT, [(*self._receipt, reason)])

    async def extend(self, seconds: Duration) -> str:
        """The lease ends ``seconds`` from now. "extended", or why there is none."""
        lease_ms = duration_ms(seconds, "seconds")
        return await self._plain(FrameType.EXTEND, "extended", lease_ms)

    async def release(self) -> str:
        """Back unstarted: ready at once, and the attempt does not count. "released"."""
        self.settled = True
        return await self._plain(FrameType.RELEASE, "released")

    async def snooze(self, delay: Duration) -> str:
        """Not now: again after ``delay``, and the attempt does not count. "snoozed"; "too_often"
        when the group has postponed the task as often as the daemon allows (``snoozes_max``): then
        the delivery is still yours to settle."""
        item = (*self._receipt, duration_ms(delay, "delay"))
        self.settled = True
        word = await self._one(FrameType.SNOOZE, [item])
        self.settled = word != "too_often"
        return word

    @property
    def _receipt(self) -> tuple[int, int, int]:
        return self._item[0], self._batch.epoch, self._item[1]

    async def _one(self, kind: FrameType, items: list[tuple[Any, ...]]) -> str:
        batch = self._batch
        words = await batch.calls.call(kind, batch.topic, batch.group, items)
        return str(words[0])

    async def _plain(self, kind: FrameType, usual: str, *rest: Any) -> str:
        batch, (task_id, epoch, attempt) = self._batch, self._receipt
        head = (batch.topic, batch.group, epoch, [task_id], [attempt])
        words = await batch.calls.call(kind, *head, *rest)
        return usual if words is None else str(words[0])

    def __repr__(self) -> str:
        return f"<Delivery {self.id} of {self.topic}, group {self.group}, attempt {self.attempt}>"
