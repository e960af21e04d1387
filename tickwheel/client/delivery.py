"""Deliveries as handlers see them, the batches that they arrive in, and their acks.

``Acks`` gathers the acks of one step of the event loop into one ACK frame for each topic, group and
epoch. Invariants: an ack is sent again on every new connection until it is answered or its time is
over (an ack with an earlier receipt still finishes its task); its future is completed exactly once;
only the daemon answers an ack.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from tickwheel.api.frames import (
    AckWord,
    ExtendWord,
    FrameType,
    NackWord,
    RejectWord,
    ReleaseWord,
    SnoozeWord,
)
from tickwheel.api.times import Duration, duration_ms, moment, seconds
from tickwheel.client.connection import LOGGER, Connection, Signal, fail
from tickwheel.client.encodings import PLAIN, UNPACK_ASIDE_BYTES, Codec, key_of
from tickwheel.client.reconnector import Reconnector, Source
from tickwheel.client.requests import SETTLEMENT_BYTES, Outbox, Resendable
from tickwheel.client.task_options import DeliveredOptions
from tickwheel.errors import (
    BadRequest,
    NotActive,
    SendTimeout,
    StaleReceipt,
    TickwheelError,
    Undecodable,
    shown,
    text_of,
)
from tickwheel.limits import ID_MAX, Limits
from tickwheel.protocol import encode

if TYPE_CHECKING:
    from tickwheel.client.requests import Calls


Item = tuple[Any, ...]
"""(id, attempt, due_ms, body) or the same with a map of options."""
REASON_BYTES_MAX = 64 * 1024
"""Maximum bytes of a reason in UTF-8. The daemon accepts as many characters."""
ACK_IN_S = 60.0
"""Seconds that a transaction with an ack has to commit, unless no lease may be as long."""
RECEIPT_BYTES = 18
"""Maximum bytes of one ack's id and attempt in a frame."""
UNPACKED = 5
"""Index in an item of its unpacked body, or of the error that unpacking raised. An item is shorter
until ``body`` has unpacked it."""


class Finished:
    """Settles deliveries without the daemon. A delivery with at-most-once semantics or of a
    broadcast was finished before it was sent, so every verb returns "done" at once."""

    __slots__ = ()
    WORD = "done"
    limits = Limits(delay_ms_max=ID_MAX)

    def add(self, task_id: int, attempt: int) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result(self.WORD)
        return future

    def add_unwatched(self, task_id: int, attempt: int) -> None:
        """Do nothing: nobody waits for the answer."""

    async def call(self, kind: FrameType, *fields: Any, until_s: float | None = None) -> list[str]:
        return [self.WORD]


FINISHED = Finished()


class DeliveryBatch:
    """Fields that the deliveries of one frame share."""

    __slots__ = ("acks", "calls", "codec", "delivered_ms", "epoch", "extending", "group", "items",
                 "size_bytes", "topic", "until_s")  # fmt: skip

    def __init__(
        self,
        calls: Calls | Finished,
        acks: Channel | Finished,
        topic: str,
        group: str,
        epoch: int,
        delivered_ms: int,
        items: list[Item],
        codec: Codec = PLAIN,
    ) -> None:
        self.codec = codec
        self.calls = calls
        self.acks = acks
        self.topic = topic
        self.group = group
        self.epoch = epoch
        self.delivered_ms = delivered_ms
        self.items = items
        """The deliveries that the program has not received, in reverse order."""
        self.until_s = 0.0
        """The earliest time at which the leases can end, by the loop's clock in seconds."""
        self.extending = False
        self.size_bytes = 0
        """Total bytes of the bodies in the frame."""


class Delivered(DeliveredOptions):
    """A delivered task, read-only."""

    __slots__ = ("_batch", "_item")

    def __init__(self, of: Delivered) -> None:
        """``of``: the same delivery in another form."""
        self._batch: DeliveryBatch = of._batch
        self._item: Item = of._item

    @property
    def raw(self) -> tuple[Any, ...]:
        """The daemon's item: id, attempt, due_ms, the stored body, and a map of other fields if
        there are any (docs/protocol.md, DELIVER)."""
        return self._item[:UNPACKED]

    # --- the task -------------------------------------------------------------------------------

    @property
    def id(self) -> int:
        return self._item[0]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def attempt(self) -> int:
        """The number of this delivery of the task to this group, from 1. It never decreases: it
        also counts released deliveries and deliveries before a requeue."""
        return self._item[1]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def failures(self) -> int:
        """Failed deliveries to this group since the task was enqueued or requeued. The retry policy
        counts these."""
        return int(self._options.get("failures", 0))

    @property
    def deaths(self) -> int:
        """Consumers that died while they had the task, since it was enqueued or requeued. A
        connection that receives a task with deaths has no other task at that time."""
        return int(self._options.get("deaths", 0))

    @property
    def due_ms(self) -> int:
        return self._item[2]  # type: ignore[no-any-return]  # as the daemon sent it

    @property
    def due(self) -> datetime:
        return moment(self._item[2])

    @property
    def body(self) -> bytes:
        """The body, unpacked by its ``encoding``. Raises Undecodable if this client cannot unpack
        it, and BadBody if no client can."""
        item = self._item
        if len(item) == 4:
            return item[3]  # type: ignore[no-any-return]  # as the daemon sent it
        if len(item) > UNPACKED:
            if isinstance(item[UNPACKED], Undecodable):
                raise item[UNPACKED]
            return item[UNPACKED]  # type: ignore[no-any-return]  # unpacked below
        encoding = item[4].get("encoding")
        if encoding is None:
            return item[3]  # type: ignore[no-any-return]  # as the daemon sent it
        try:
            body = self._batch.codec.unpack(self._batch.topic, item[3], encoding)
        except Undecodable as error:
            self._item = (*item, error)
            raise
        self._item = (*item, body)
        return body

    @property
    def encrypted_with(self) -> str | None:
        """The name of the key that encrypts the body; None: the body is not encrypted."""
        return None if len(self._item) == 4 else key_of(self._item[4].get("encoding"))

    @property
    def replay_of(self) -> int | None:
        """The id of the task that this one replays after a reset of the group; None: not a
        replay."""
        task_id: int | None = self._options.get("replay_of")
        return task_id

    @property
    def schedule(self) -> str | None:
        """The recurring schedule that created the task; None: it was enqueued."""
        name = self.properties.get("tickwheel.schedule")
        return None if name is None else str(name)

    @property
    def planned(self) -> datetime | None:
        """The planned time of the schedule's occurrence; None: not created by a schedule."""
        planned_ms = self.properties.get("tickwheel.planned_ms")
        return moment(planned_ms) if isinstance(planned_ms, int) else None

    # --- the delivery ---------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        return self._batch.topic

    @property
    def group(self) -> str:
        return self._batch.group

    @property
    def epoch(self) -> int:
        """The epoch of the daemon that sent this delivery; part of the receipt."""
        return self._batch.epoch

    @property
    def delivered_ms(self) -> int:
        """When the daemon sent the delivery, by its clock."""
        return self._batch.delivered_ms

    @property
    def lease_until_s(self) -> float:
        """The earliest time at which the lease can end, by the loop's clock in seconds; valid only
        when the program has just received the delivery."""
        return self._batch.until_s

    def __repr__(self) -> str:
        key = "" if self.key is None else f" {self.key!r:.80}"
        label = f"{self.topic}{key}, group {self.group}, attempt {self.attempt}"
        return f"<Delivery {self.id} of {label}>"


class Delivery(Delivered):
    """One task, finished by ``ack`` or ``reject``, or returned by ``nack``, ``snooze`` or
    ``release``.

    Each verb returns a word when the settlement is durable: "acked", "retrying", … If something
    else settled the delivery first, the word names that ("stale", "cancelled", "gone", …). Each
    takes ``timeout``, like the client's calls. After its timeout an ack is still resent, for as
    long as an ack without a timeout. A delivery that is not settled is delivered again when its
    lease ends.
    """

    __slots__ = ("settled",)

    def __init__(self, batch: DeliveryBatch, item: Item) -> None:
        self._batch = batch
        self._item = item
        self.settled = False
        """Whether ack, nack, reject, release or snooze was called, even if not yet answered."""

    # --- settlement -----------------------------------------------------------------------------

    async def ack(self, *, timeout: Duration | None = None) -> AckWord:
        """Finish the task. Return "acked" when that is durable, or the task's other outcome."""
        if timeout is not None:
            return await self._ack_within(_timeout_s(timeout))
        self.settled = True
        return cast("AckWord", await self._batch.acks.add(self._item[0], self._item[1]))

    async def _ack_within(self, time_s: float) -> AckWord:
        answer = self.ack_nowait()
        done, _ = await asyncio.wait((answer,), timeout=time_s)
        if not done:
            answer.add_done_callback(mark_retrieved)
            raise SendTimeout(
                f"the ack was not answered within {time_s:g} s; it is still being sent"
            )
        return answer.result()

    def ack_nowait(self) -> asyncio.Future[AckWord]:
        """``ack`` as a future; acks of the same step of the event loop share a frame."""
        self.settled = True
        answer = self._batch.acks.add(self._item[0], self._item[1])
        return cast("asyncio.Future[AckWord]", answer)

    def ack_unwatched(self) -> None:
        """``ack`` without waiting; an answer that is not "acked" is logged."""
        self.settled = True
        self._batch.acks.add_unwatched(self._item[0], self._item[1])

    async def ack_in(
        self, connection: Any, *, schema: str = "tickwheel", timeout: Duration | None = None
    ) -> None:
        """Acknowledge in the transaction of ``connection``, so that the handler's changes and the
        ack commit together (docs/inbox.md). A worker acknowledges again when the handler returns,
        which is harmless. ``timeout`` bounds the request to the daemon, not the write.

        Raise StaleReceipt if the lease has ended, or another attempt has acknowledged the task in a
        transaction; let the error roll back the transaction.
        """
        from tickwheel.client.sql import ack_command, write  # few programs need it

        command = ack_command(self.topic, self.group, self.epoch, self.id, self.attempt)
        word = await self.extend(ack_in_s(self), timeout=timeout)
        if word != "extended":
            raise StaleReceipt(f"task {self.id}, attempt {self.attempt}: {word}")
        result = write(connection, command, schema)
        if isinstance(result, Awaitable):
            await result

    async def nack(
        self,
        delay: Duration | None = None,
        reason: str | None = None,
        *,
        timeout: Duration | None = None,
    ) -> NackWord:
        """Report a failure. The task is delivered again after ``delay`` (default: the retry
        policy), or becomes a dead letter when its retries are used up. Return "retrying", "dead",
        "held" (its order key waits for an operator), or "cancelled" (a newer task with its key has
        replaced it). ``delay`` is cut to the daemon's ``delay_max_s``, ``reason`` to 64 KiB; lone
        surrogates are escaped."""
        delay_ms = None if delay is None else self._delay_ms(delay)
        item, until_s = (*self._receipt, delay_ms, self._sent(reason)), _until_s(timeout)
        self.settled = True
        return cast("NackWord", await self._send_item(FrameType.NACK, [item], until_s))

    async def reject(
        self, reason: str | None = None, *, timeout: Duration | None = None
    ) -> RejectWord:
        """Report a permanent failure: the task becomes a dead letter at once. Return "dead", or
        "held" (its order key waits for an operator). ``reason`` is as in ``nack``."""
        item, until_s = (*self._receipt, self._sent(reason)), _until_s(timeout)
        self.settled = True
        word = await self._send_item(FrameType.REJECT, [item], until_s)
        return cast("RejectWord", word)

    async def extend(self, seconds: Duration, *, timeout: Duration | None = None) -> ExtendWord:
        """Extend the lease to ``seconds`` from now. Return "extended", or why it was not."""
        lease_ms, until_s = duration_ms(seconds, "seconds"), _until_s(timeout)
        word = await self._send_receipt(FrameType.EXTEND, "extended", until_s, lease_ms)
        return cast("ExtendWord", word)

    async def release(self, *, timeout: Duration | None = None) -> ReleaseWord:
        """Give the task back: it is ready at once, without a failure. Return "released"."""
        until_s = _until_s(timeout)
        self.settled = True
        word = await self._send_receipt(FrameType.RELEASE, "released", until_s)
        return cast("ReleaseWord", word)

    async def snooze(self, delay: Duration, *, timeout: Duration | None = None) -> SnoozeWord:
        """Postpone the task by ``delay``, cut to the daemon's ``delay_max_s``, without counting a
        failure. Return "snoozed", or "too_often" when the group has postponed the task
        ``snoozes_max`` times; the delivery is then still unsettled."""
        item, until_s = (*self._receipt, self._delay_ms(delay)), _until_s(timeout)
        self.settled = True
        word = await self._send_item(FrameType.SNOOZE, [item], until_s)
        self.settled = word != "too_often"
        return cast("SnoozeWord", word)

    @property
    def _receipt(self) -> tuple[int, int, int]:
        return self._item[0], self._batch.epoch, self._item[1]

    def _delay_ms(self, delay: Duration) -> int:
        """Return the delay that is sent, in ms: cut, because the daemon would refuse a longer one,
        and the task would wait for the end of its lease. Raise BadRequest."""
        delay_ms, most_ms = duration_ms(delay, "delay"), self._batch.calls.limits.delay_ms_max
        if delay_ms > most_ms:
            LOGGER.warning("%r: the delay of %d ms was cut to the daemon's delay_max_s, %d ms",
                           self, delay_ms, most_ms)  # fmt: skip
        return min(delay_ms, most_ms)

    def _sent(self, reason: str | None) -> str | None:
        """Return the reason that is sent: cut, and without lone surrogates. Raise BadRequest."""
        if reason is None:
            return None
        if not isinstance(reason, str):
            raise BadRequest(f"reason must be a str, not {shown(reason)}")
        cut = text_of(reason[:REASON_BYTES_MAX]).encode()
        frame_bytes_max = self._batch.calls.limits.frame_bytes_max
        bytes_max = min(REASON_BYTES_MAX, frame_bytes_max - SETTLEMENT_BYTES)
        return cut[:bytes_max].decode(errors="ignore")

    async def _send_item(
        self, kind: FrameType, items: list[tuple[Any, ...]], until_s: float | None
    ) -> str:
        batch = self._batch
        words = await batch.calls.call(kind, batch.topic, batch.group, items, until_s=until_s)
        return str(words[0])

    async def _send_receipt(
        self, kind: FrameType, usual: str, until_s: float | None, *rest: Any
    ) -> str:
        batch, (task_id, epoch, attempt) = self._batch, self._receipt
        head = (batch.topic, batch.group, epoch, [task_id], [attempt])
        words = await batch.calls.call(kind, *head, *rest, until_s=until_s)
        return usual if words is None else str(words[0])


def ack_in_s(delivery: Delivered) -> float:
    """Return the lease, in seconds, that a transaction with the delivery's ack gets."""
    return min(ACK_IN_S, delivery._batch.calls.limits.lease_ms_max / 1000)


async def unpack_aside(delivery: Delivery) -> None:
    """Unpack a large body in a thread, so that ``Delivery.body`` does not block the event loop.
    Errors are left to ``body``."""
    item = delivery._item
    if (
        len(item) == UNPACKED
        and len(item[3]) > UNPACK_ASIDE_BYTES
        and delivery.encoding is not None
    ):
        with suppress(Undecodable):
            await asyncio.to_thread(lambda: delivery.body)


def _timeout_s(timeout: Duration) -> float:
    return seconds(timeout, "timeout")


def _until_s(timeout: Duration | None) -> float | None:
    if timeout is None:
        return None
    return asyncio.get_running_loop().time() + _timeout_s(timeout)


def mark_retrieved(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that perhaps nobody awaits, so that asyncio logs nothing."""
    if not answer.cancelled():
        answer.exception()


_ACK = int(FrameType.ACK)

AckFuture = asyncio.Future[str]


class Channel:
    """Gathers the acks of one topic, group and epoch until the end of the loop's step."""

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
        """The future of each ack; None: nobody waits for the answer."""

    def add(self, task_id: int, attempt: int) -> AckFuture:
        """Ack one delivery. Return the future of the daemon's answer."""
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
    """Acks of one channel on their way to the daemon."""

    __slots__ = ("_acks", "attempts", "channel", "futures", "ids", "is_awaited")

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
        self.is_awaited = futures.count(None) < len(futures)
        """Whether somebody may wait for an answer. If not, the daemon can delay it."""

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
            LOGGER.info(
                "task %d of %s, group %s: the daemon answered its ack with %s",
                task_id,
                *names,
                word,
            )

    def failed(self, error: TickwheelError) -> None:
        if isinstance(error, NotActive):
            self._acks.outbox.add_again(self)
        elif error.retryable and not error.closes_connection:
            self._acks.outbox.pause(self, error)  # until the ack's time is over
        else:
            self._acks.give_up(self, error)

    def lost(self) -> None:
        self.is_unsure = True
        self._acks.outbox.add(self)

    def expired(self) -> None:
        self._acks.give_up(self, self.overdue(self._acks.reconnector, "ack"))


class Acks(Source):
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
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self, topic, group, epoch)
        return channel

    def gather(self, channel: Channel) -> None:
        """Register a channel at its first ack in this step of the loop. Raise ClientClosed."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        self._gathering.append(channel)
        self.reconnector.wake()

    async def wait_idle(self) -> None:
        """Wait until every ack is answered."""
        while self._unfinished or self._gathering:
            await self._finished.wait()

    async def wait_answered(self) -> None:
        """Wait until every ack sent up to now is answered."""
        self._close_channels()
        pending = set(self._unfinished)
        while pending & self._unfinished:
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
        limits = self.reconnector.limits
        step = (limits.frame_bytes_max - SETTLEMENT_BYTES) // RECEIPT_BYTES
        step = max(1, min(limits.ids_per_frame_max, step))
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

    def collect(self, connection: Connection) -> None:
        """Write the waiting acks, even while enqueues are held back."""
        self._close_channels()
        for frame in self.outbox.take():
            if frame not in self._unfinished:
                continue
            frame.sent += 1
            frame.refusal = None
            channel, number = frame.channel, self.reconnector.next_number()
            head = (_ACK, number, channel.topic, channel.group, channel.epoch)
            may_gather = () if frame.is_awaited else (True,)
            connection.ask(number, frame, encode((*head, frame.ids, frame.attempts, *may_gather)))

    def sweep(self, now_s: float) -> None:
        self._close_channels()  # ``collect`` is not called without a connection
        for frame in [f for f in self._unfinished if f.deadline_s <= now_s]:
            frame.expired()

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        self._close_channels()
        for frame in list(self._unfinished):
            self.give_up(frame, error)
        self.outbox.take_all()
