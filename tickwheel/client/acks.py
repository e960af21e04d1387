"""Acks: those of one step of the loop leave as one ACK frame a topic, group and epoch.

Knows receipts and no delivery. Invariants: an ack is sent again on every new connection until
it is answered or its time is over (an ack by an earlier receipt still finishes its task); its
future is done exactly once; no ack is answered here, only by the daemon.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

from tickwheel.api.frames import FrameType
from tickwheel.client.connection import LOGGER, Connection, Signal, fail
from tickwheel.client.reconnector import Reconnector
from tickwheel.client.resending import Outbox, Resendable
from tickwheel.errors import NotActive, TickwheelError
from tickwheel.protocol.codec import encode

_ACK = int(FrameType.ACK)

AckFuture = asyncio.Future[str]


class Channel:
    """Where the acks of one topic, group and epoch gather until the end of the loop's step."""

    __slots__ = ("__weakref__", "_acks", "_create_future", "attempts", "epoch", "futures", "group",
                 "ids", "topic")  # fmt: skip

    def __init__(self, acks: Acks, topic: str, group: str, epoch: int) -> None:
        self._acks = acks
        self._create_future = acks.reconnector.loop.create_future
        self.topic = topic
        self.group = group
        self.epoch = epoch
        self.ids: list[int] = []
        self.attempts: list[int] = []
        self.futures: list[AckFuture | None] = []
        """The future of each ack; None: nobody waits for it."""

    def add(self, task_id: int, attempt: int) -> AckFuture:
        """Ack one delivery; the future of the daemon's word for it."""
        if not self.ids:
            self._acks.gather(self)
        future: AckFuture = self._create_future()
        self.ids.append(task_id)
        self.attempts.append(attempt)
        self.futures.append(future)
        return future

    def add_unwatched(self, task_id: int, attempt: int) -> None:
        """Ack one delivery without a future: an unusual answer is logged."""
        if not self.ids:
            self._acks.gather(self)
        self.ids.append(task_id)
        self.attempts.append(attempt)
        self.futures.append(None)


class AckFrame(Resendable):
    """Some acks of one channel on their way to the daemon."""

    __slots__ = ("_acks", "attempts", "channel", "futures", "ids")

    def __init__(
        self,
        acks: Acks,
        channel: Channel,
        ids: list[int],
        attempts: list[int],
        futures: list[AckFuture | None],
    ) -> None:
        began_s = acks.reconnector.loop.time()
        super().__init__(began_s, began_s + acks.total_s)
        self._acks = acks
        self.channel = channel
        self.ids = ids
        self.attempts = attempts
        self.futures = futures

    def answered(self, result: Any) -> None:
        if result is None:
            for future in self.futures:
                if future is not None and not future.done():
                    future.set_result("acked")
        else:
            for future, task_id, word in zip(self.futures, self.ids, result, strict=True):
                if future is None:
                    self._log_unusual(task_id, word)
                elif not future.done():
                    future.set_result(word)
        self._acks.finish(self)

    def _log_unusual(self, task_id: int, word: Any) -> None:
        if word != "acked":
            names = self.channel.topic, self.channel.group
            LOGGER.info("task %d of %s, group %s: its ack was answered %s", task_id, *names, word)

    def failed(self, error: TickwheelError) -> None:
        if isinstance(error, NotActive):
            self._acks.outbox.add_again(self)
        elif error.retryable and not error.closes_connection:
            self._acks.outbox.pause(self, error)  # until its time is over
        else:
            self._acks.give_up(self, error)

    def lost(self) -> None:
        self._acks.outbox.add(self)

    def expired(self) -> None:
        self._acks.give_up(self, self.overdue(self._acks.reconnector, "ACK"))


class Acks:
    """All acks of one client."""

    def __init__(self, reconnector: Reconnector, total_s: float) -> None:
        self.reconnector = reconnector
        self.total_s = total_s
        self._channels: WeakValueDictionary[tuple[str, str, int], Channel] = WeakValueDictionary()
        self._gathering: list[Channel] = []
        self.outbox: Outbox[AckFrame] = Outbox(reconnector)
        self._unfinished: set[AckFrame] = set()
        self._finished = Signal()
        self._stopped: TickwheelError | None = None

    def channel(self, topic: str, group: str, epoch: int) -> Channel:
        key = (topic, group, epoch)
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = Channel(self, topic, group, epoch)
        return found

    def gather(self, channel: Channel) -> None:
        """Note that a channel has its first ack of this step of the loop. Raises ClientClosed."""
        if self._stopped is not None:
            raise self._stopped
        self._gathering.append(channel)
        self.reconnector.wake()

    async def wait_idle(self) -> None:
        """Wait until every ack has its answer."""
        while self._unfinished or self._gathering:
            await self._finished.wait()

    async def wait_answered(self) -> None:
        """Wait until every ack that was given up to now has its answer."""
        self._close_channels()
        asked = set(self._unfinished)
        while asked & self._unfinished:
            await self._finished.wait()

    # --- frames ---------------------------------------------------------------------------------

    def give_up(self, frame: AckFrame, error: TickwheelError) -> None:
        failed = sum(future is None or fail(future, error) for future in frame.futures)
        if failed:
            LOGGER.warning("%d acks failed: %s: %s", failed, error.code, error.message)
        self.finish(frame)

    def finish(self, frame: AckFrame) -> None:
        self._unfinished.discard(frame)
        self.outbox.forget(frame)
        self._finished.notify()

    def _close_channels(self) -> None:
        gathering, self._gathering = self._gathering, []
        step = self.reconnector.limits.ids_per_frame_max
        for channel in gathering:
            ids, channel.ids = channel.ids, []
            attempts, channel.attempts = channel.attempts, []
            futures, channel.futures = channel.futures, []
            for start in range(0, len(ids), step):
                end = start + step
                parts = ids[start:end], attempts[start:end], futures[start:end]
                frame = AckFrame(self, channel, *parts)
                self._unfinished.add(frame)
                self.outbox.extend((frame,))

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Do nothing: acks that were lost wait to be sent already."""

    def down(self) -> None:
        """Do nothing: each ack that was sent learns that it is lost."""

    def collect(self, connection: Connection) -> None:
        """Write the waiting acks, also while enqueues are held back."""
        self._close_channels()
        for frame in self.outbox.take():
            if frame not in self._unfinished:
                continue
            frame.sent += 1
            frame.refusal = None
            channel, number = frame.channel, self.reconnector.next_number()
            head = (_ACK, number, channel.topic, channel.group, channel.epoch)
            connection.ask(number, frame, encode((*head, frame.ids, frame.attempts)))

    def sweep(self, now_s: float) -> None:
        self._close_channels()  # without a connection nobody else does
        for frame in [f for f in self._unfinished if f.deadline_s <= now_s]:
            frame.expired()

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        self._close_channels()
        for frame in list(self._unfinished):
            self.give_up(frame, error)
        self.outbox.take_all()
