"""Subscriptions: deliveries pushed by the daemon, buffered here, and read one by one.

``Subscription`` survives reconnects; ``Subscriptions`` has all subscriptions of a client by the
number in DELIVER frames; ``SubscribeOptions`` are the options of a subscription, sent again after
every reconnect; ``AutoAck`` settles deliveries that their reader has finished; ``Buffer`` holds
unread deliveries while their leases are extended; ``SpreadSubscription`` combines the
subscriptions on several shards into one, the front.

Invariants: only ``AutoAck`` acks, and only finished deliveries; unread deliveries are released at
the end without counting a failure; no delivery is read after ``close``, or with a lease that may
have ended as far as this side can tell; the lease of a delivery that was read is extended only by
``keep_leases``, for example by a worker. Times are the event loop's, in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast, get_args

from tickwheel.api.frames import FrameType
from tickwheel.api.groups import SET_OTHERWISE, TO_CHANGE, FilterFields, GroupFields, MadeGroup
from tickwheel.api.kinds import FLAG
from tickwheel.api.policies import Retry, policy_wire
from tickwheel.client.connection import LOGGER, Signal
from tickwheel.client.delivery import (
    FINISHED,
    Delivered,
    Delivery,
    DeliveryBatch,
    mark_retrieved,
)
from tickwheel.client.encodings import PLAIN, Codec
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.leases import EXTENDED, SURE, Extender, InHand, Leases, Lot
from tickwheel.client.reconnector import Source
from tickwheel.client.requests import Calls, raise_first, read, retry_pause_s
from tickwheel.errors import (
    BadBody,
    BadRequest,
    ClientClosed,
    Conflict,
    ConnectionLost,
    NotFound,
    OutcomeUnknown,
    ProtocolError,
    TickwheelError,
    Undecodable,
    shown,
    text_of,
)
from tickwheel.waiting import finish_despite_cancellation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from tickwheel.client.delivery import Acks
    from tickwheel.client.reconnector import Reconnector


REASON_CHARACTERS_MAX = 1000
"""Maximum characters of an exception's text that are sent; the daemon keeps fewer."""
TRACE_CHARACTERS_MAX = 16_000
"""Maximum characters of a traceback that are sent, counted from its end."""
_CLIENT_FOLDER = str(Path(__file__).parent)


def reason_of(error: BaseException, delivery: Delivered) -> str:
    """Return the reason for a nack: "Type: text" on the first line, then the traceback without this
    client's own frames. For an encrypted delivery it has only types and lines, because an
    exception's text may quote the body."""
    name = type(error).__name__
    if delivery.encrypted_with is not None:
        return f"{name}\n{_bare_trace(error)}".rstrip()[-TRACE_CHARACTERS_MAX:]
    text = " ".join(text_of(error).splitlines())
    summary = (f"{name}: {text}" if text else name)[:REASON_CHARACTERS_MAX]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_CLIENT_FOLDER):
        trace = trace.tb_next
    if trace is None:
        return summary
    try:
        lines = text_of("".join(traceback.format_exception(type(error), error, trace)))
    except Exception:  # a traceback shows attributes of the exception, which may be malformed
        return summary
    lines = lines.removeprefix("Traceback (most recent call last):\n").rstrip()
    return f"{summary}\n{lines[-TRACE_CHARACTERS_MAX:]}"


def _bare_trace(error: BaseException) -> str:
    """Return the origin of an exception and of its causes: files, lines, functions, types."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        lines = (
            f'  File "{code.co_filename}", line {number}, in {code.co_name}'
            for code, number in ((f.f_code, n) for f, n in traceback.walk_tb(link.__traceback__))
            if not code.co_filename.startswith(_CLIENT_FOLDER)
        )
        parts.append("\n".join([*lines, type(link).__name__]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n".join(reversed(parts))


async def settle_failed(delivery: Delivery, error: BaseException) -> None:
    """Settle a delivery whose consumer raised: nack it; release it after a cancellation or an
    interrupt, or if another client may be able to unpack the body; reject it if no client can."""
    if isinstance(error, BadBody):
        await delivery.reject(f"{type(error).__name__}: {text_of(error)}")
    elif isinstance(error, (Exception, SystemExit)) and not isinstance(error, Undecodable):
        await delivery.nack(reason=reason_of(error, delivery))
    else:
        await delivery.release()


class Reader:
    """One ``async for``, and the deliveries that its body is handling."""

    def __init__(self, take: Callable[[], Coroutine[Any, Any, Delivery]]) -> None:
        self._take = take
        self._held: Sequence[Delivery] = ()
        self.task = asyncio.current_task()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        self.ack()
        delivery = await self._take()
        self.took((delivery,))
        return delivery

    def took(self, deliveries: Sequence[Delivery]) -> None:
        """Remember the deliveries that the body receives."""
        self._held, self.task = deliveries, asyncio.current_task()

    def ack(self) -> None:
        """Ack the deliveries that the body has finished."""
        for delivery in self.take_unsettled():
            with suppress(TickwheelError):  # closed: the lease ends by itself
                delivery.ack_unwatched()

    def take_unsettled(self) -> list[Delivery]:
        """Remove and return the deliveries of the body, without those that it has settled."""
        held, self._held = self._held, ()
        return [delivery for delivery in held if not delivery.settled]


class AutoAck:
    """The readers of one subscription.

    With ``auto_ack=True``, asking for the next delivery acks the previous one. An iterator does not
    learn how the body of its ``async for`` ended, so the rules are:

    * When an ``async for`` (or ``aiter()``, or ``batches()``) asks for the next delivery, the
      previous one is acked, even if the body caught an exception. The same holds for a new
      ``async for`` in the same task of the event loop.
    * When ``async with`` ends without an exception (``break``, ``return``, the end), that task's
      deliveries are acked.
    * When an exception leaves ``async with``, that task's deliveries are nacked, with "Type: text"
      as the reason; after a cancellation they are released.
    * Without ``async with``, and in other asyncio tasks than the one that leaves it, a ``break`` or
      an exception goes unnoticed: the lease ends, and the delivery's task is delivered again.

    A delivery that the body settled itself (``ack``, ``nack``, …) is left alone. Leases are not
    extended while a body runs.
    """

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def reader(self, take: Callable[[], Coroutine[Any, Any, Delivery]]) -> Reader:
        """Return the reader of a new ``async for``, which ends an earlier one in the same task."""
        task = asyncio.current_task()
        for reader in self._readers:
            if reader.task is task:
                reader.ack()
        # Nobody asks the readers of ended tasks for more; their leases end by themselves.
        others = [r for r in self._readers if r.task is not None and not r.task.done()]
        new = Reader(take)
        self._readers = [*(reader for reader in others if reader.task is not task), new]
        return new

    async def on_exit(self, error: BaseException | None) -> None:
        """Settle the current task's deliveries as it leaves the ``async with``."""
        task = asyncio.current_task()
        for reader in [reader for reader in self._readers if reader.task is task]:
            if error is None:
                reader.ack()
                continue
            for delivery in reader.take_unsettled():
                with suppress(TickwheelError):
                    await settle_failed(delivery, error)


LEASE_GUESS_S = 30.0
"""Assumed seconds of a lease until the daemon announces its length."""
STREAK_MAX = 128
"""Deliveries after which a fast consumer yields to the event loop, so that acks are sent and more
deliveries arrive."""
PREFETCH = 256
"""Default prefetch of a subscription, at each shard."""


BUFFER_BYTES_MAX = 16 * 1024 * 1024
"""Maximum bytes of bodies buffered in one subscription, over all shards. When the buffer exceeds
it, the subscription asks for no more until the buffer is empty."""
PART_BYTES_MIN = 256 * 1024
"""Minimum part of one shard in ``BUFFER_BYTES_MAX``."""


OnMismatch = Literal["update", "warn", "refuse"]
"""What a worker does at its start when its group's settings differ from its code."""


def checked_on_mismatch(word: Any) -> OnMismatch | None:
    """Return a valid word or None. Raise BadRequest."""
    if word is not None and word not in get_args(OnMismatch):
        allowed = ", ".join(get_args(OnMismatch))
        raise BadRequest(f"on_mismatch must be one of {allowed}, not {shown(word)}")
    return cast("OnMismatch | None", word)


class Mismatch:
    """Handles settings that a subscription names and that differ from its group's.

    All shards of a subscription share one object, so that the group is changed once. Invariant:
    settings are changed only at the start. Otherwise a worker of an older release that reconnects
    would undo the changes of a newer one.
    """

    def __init__(self, word: OnMismatch | None, update: Callable[[], Awaitable[object]]) -> None:
        """``word``: None means "warn" if only ``retry`` differs, and "refuse" otherwise."""
        self._word = word
        self._update = update
        self._updating = asyncio.Lock()
        self._is_updated = False
        self._logged: set[str] = set()
        self.has_started = False
        """Whether the subscription has started on at least one shard."""

    async def settle(self, conflict: Conflict) -> None:
        """Return when the subscription can use the group's settings. Raise the conflict, or the
        error of changing the settings."""
        difference, _, command = conflict.message.partition(TO_CHANGE)
        differs = difference.partition(SET_OTHERWISE)[2].split("; ")
        is_retry = all(text.startswith("retry") for text in differs)
        word = self._word or ("warn" if is_retry else "refuse")
        if word == "refuse":
            raise conflict
        if word == "update" and not self.has_started:
            async with self._updating:
                if not self._is_updated:
                    LOGGER.warning("%s; the group will get this code's settings", difference)
                    await self._update()
                    self._is_updated = True
        elif difference not in self._logged:
            self._logged.add(difference)
            text = "%s. The group keeps its settings; to give it this code's: %s"
            LOGGER.warning(text, difference, command)


class Subscription:
    """``async with client.subscribe(…) as deliveries: async for delivery in deliveries: …``

    Several tasks can iterate over one subscription; each delivery goes to one of them. Without
    ``async with`` the subscription starts at the first request for a delivery and ends with the
    client.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        number: int,
        subscribe_options: SubscribeOptions,
        prefetch: int | None,
    ) -> None:
        """``prefetch``: None means ``PREFETCH`` at each shard."""
        self.topic, self.group, self.leased = (
            subscribe_options.topic,
            subscribe_options.group,
            subscribe_options.leased,
        )
        self.auto_ack = subscribe_options.auto_ack
        self._options = subscribe_options
        self._auto = AutoAck() if subscribe_options.auto_ack else None
        self._all = subscriptions
        self._reconnector = subscriptions.reconnector
        self._call = subscriptions.calls.call
        self._number = number
        self._prefetch = PREFETCH if prefetch is None else prefetch
        self._divides = prefetch is not None
        """Whether shards divide the prefetch, because the caller has set it."""
        self._buffer = Buffer(_lease_guess_s(subscribe_options))
        self._arrived = Signal()
        self._extender: Extender[DeliveryBatch] = Extender(
            subscriptions.calls,
            self.topic,
            self.group,
            lambda: self._buffer.lease_s,
            self._extend_waiting,
            self._extended,
        )
        self._starters = 0
        """Callers that wait for the start."""
        self._is_started = False
        self._closed = False
        self._error: TickwheelError | None = None
        self.mismatch: Mismatch | None = None
        """Handles settings that differ from the group's; None: a Conflict ends the subscription."""
        self._subscribing = False
        self._credit = self._prefetch
        """The prefetch requested from the daemon; smaller while an old buffer drains."""
        self._bytes_max = subscriptions.buffer_bytes_max
        self.has_room: Callable[[int], bool] = lambda buffered_bytes: True
        """Receives the bytes of buffered bodies. While it returns False, no deliveries are
        requested. It applies if there is one shard, and is called again by each read."""
        self._streak = 0
        self.received = 0
        """Deliveries received."""
        self._resuming: asyncio.Task[None] | None = None
        """Subscribes, at the start and on each new connection."""
        self._parts: SpreadSubscription | None = None
        """The subscriptions on all shards, if this is the front of several."""
        self._new_group: MadeGroup | None = None
        self._front: Subscription | None = None
        """The front, if this is the part of one shard."""
        self._shard = 0
        """The shard of a part."""

    # --- life -----------------------------------------------------------------------------------

    @property
    def new_group(self) -> MadeGroup | None:
        """A description of the group, if this subscription created it."""
        parts = self._parts
        return self._new_group if parts is None else parts.new_group

    async def start(self) -> Self:
        """Subscribe. Raise the daemon's refusal. Does nothing when started. A cancelled start ends
        the subscription, unless somebody else waits for it."""
        try:
            await self._wait_started()
        except asyncio.CancelledError:
            if not self._starters:
                self._give_up()
            raise
        return self

    async def _wait_started(self) -> None:
        """Start if necessary, and wait until that has ended. Raise the error that prevents it."""
        if self._is_started:
            return
        if not self._closed and (self._resuming is None or self._resuming.done()):
            self._resuming = self._reconnector.loop.create_task(self._begin())
            self._resuming.add_done_callback(mark_retrieved)
        starting = self._resuming
        if starting is None:  # closed before its start
            return
        self._starters += 1
        try:
            await asyncio.wait((starting,))
        finally:
            self._starters -= 1
        if not starting.cancelled():  # cancelled: closed during its start
            starting.result()

    async def _begin(self) -> None:
        parts = await self._all.parts(self) if self._front is None else None
        self._all.add(self._number, self)
        try:
            if parts is None:
                await self._subscribe()
            else:
                self._parts, self._buffer = parts, parts.buffer
                await parts.start()
        except Exception:
            self._give_up()  # the daemon may still have subscribed, or be about to
            raise
        self._is_started = True

    @property
    def closed(self) -> bool:
        """Whether the subscription has ended."""
        return self._closed

    async def close(self) -> None:
        """End the subscription and release unread deliveries. Can be called again."""
        if not self._closed:
            self._end()
            await self._leave()

    async def _leave(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()  # a SUBSCRIBE after the UNSUBSCRIBE would stay
        try:
            if self._parts is not None:
                await self._parts.close()
            elif self._reconnector.connection is not None:
                with suppress(TickwheelError):
                    await self._call(FrameType.UNSUBSCRIBE, self._number, repeat=False)
                if self.leased:
                    await self._release()
        finally:
            self._all.remove(self._number)

    async def set_prefetch(self, prefetch: int) -> None:
        """Set the maximum number of this subscription's unsettled deliveries; 0 pauses it."""
        self._all.check_prefetch(prefetch)
        self._prefetch, self._divides = prefetch, True
        if self._parts is not None:
            self._credit = prefetch
            await self._parts.set_prefetch(prefetch)
        elif self._is_started:
            self._credit = prefetch
            if self._reconnector.connection is not None:
                with suppress(ConnectionLost, NotFound):  # the next SUBSCRIBE sends it
                    await self._call(FrameType.PREFETCH, self._number, prefetch, repeat=False)

    @property
    def has_full_credit(self) -> bool:
        """Whether the whole prefetch was requested on the current connection."""
        is_complete = self._credit == self._prefetch and not self._subscribing
        return self._is_started and is_complete and self._reconnector.connection is not None

    async def update_prefetch(self, prefetch: int) -> tuple[int, int]:
        """Set the prefetch. Return this subscription's unsettled deliveries, and the group's tasks
        that wait for credit. Raise an error while the daemon is unreachable; the prefetch is then
        set on the next connection."""
        self._prefetch = self._credit = prefetch
        use = await self._call(FrameType.PREFETCH, self._number, prefetch, True, repeat=False)
        return use["in_flight"], use["ready"]

    async def give_back(self) -> None:
        """Release unread deliveries, without counting a failure."""
        if self._parts is not None:
            await self._parts.give_back()
        elif self.leased and self._reconnector.connection is not None:
            await self._release()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await finish_despite_cancellation(self.close())  # ``__aexit__`` is not called
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._auto is not None:
                await self._auto.on_exit(error)
        finally:
            await self.close()

    def _end(self) -> None:
        self._closed = True
        self._extender.stop()
        self._arrived.notify()

    def _give_up(self) -> None:
        """``close`` without waiting."""
        if not self._closed:
            self._end()
            self._reconnector.spawn(self._leave())

    def fail(self, error: TickwheelError) -> None:
        """End the subscription with an error, which iteration raises."""
        if self._front is not None:
            self._front.fail(error)
        if not self._closed:
            self._error = error
            self._end()

    def ended(self, error: TickwheelError) -> None:
        """End a subscription that the daemon has ended or refuses."""
        LOGGER.error("subscription to %s ended: %s: %s", self.topic, error.code, error.message)
        self.fail(error)
        front = self._front or self
        front._reconnector.spawn(front._leave())

    # --- reading --------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self if self._auto is None else self._auto.reader(self.take)

    @property
    def lease_s(self) -> float:
        """The length of leases in seconds, as last announced by the daemon."""
        return self._buffer.lease_s

    def __anext__(self) -> Coroutine[Any, Any, Delivery]:
        if self._auto is not None:
            raise BadRequest("with auto_ack, use async for, or anext() on aiter(subscription)")
        return self.take()

    async def take(self) -> Delivery:
        """Return the next delivery, which ``auto_ack`` does not settle. Raise StopAsyncIteration
        when the subscription has ended, and the error that prevented its start. A start goes on
        when the reader is cancelled, so that a time limit for a read does not end it."""
        if not self._is_started:
            await self._wait_started()
        if self._streak >= STREAK_MAX:
            self._streak = 0
            await asyncio.sleep(0)
        while not self._closed:
            delivery = self._buffer.take(self._reconnector.loop.time())
            if delivery is not None:
                self._streak += 1
                return delivery
            is_short = self._credit != self._prefetch and not self._subscribing
            if is_short and self.has_room(self._buffer.size_bytes):
                self.refill()
            self._streak = 0
            await self._arrived.wait()
        if self._error is not None and not isinstance(self._error, ClientClosed):
            raise self._error.with_traceback(None)
        raise StopAsyncIteration

    def take_now(self) -> Delivery | None:
        """Return a buffered delivery. None: there is none, or the event loop should run first. For
        a caller that also iterates."""
        if self._streak >= STREAK_MAX or self._closed:
            return None
        delivery = self._buffer.take(self._reconnector.loop.time())
        self._streak += delivery is not None
        return delivery

    async def batches(self, max_deliveries: int = 256) -> AsyncIterator[list[Delivery]]:
        """Yield lists of 1 to ``max_deliveries`` buffered deliveries."""
        source = aiter(self)
        async for first in source:
            batch = [first]
            now_s = self._reconnector.loop.time()
            while len(batch) < max_deliveries:
                delivery = self._buffer.take(now_s)
                if delivery is None:
                    break
                batch.append(delivery)
            self._streak = STREAK_MAX
            if isinstance(source, Reader):
                source.took(batch)
            yield batch

    def deliver(self, batch: DeliveryBatch) -> None:
        """Buffer deliveries that have arrived."""
        count = len(batch.items)
        self._buffer.put(batch, self._reconnector.loop.time())
        self.received += count
        self._arrived.notify(count)
        self._hold_back()
        if self.leased:
            self._extender.begin()

    def _hold_back(self) -> None:
        """Request no more while the buffer has too many bytes or, where no acks limit the daemon,
        too many deliveries."""
        size_bytes = self._buffer.size_bytes
        is_full = (
            size_bytes >= self._bytes_max
            or not self.has_room(size_bytes)
            or (not self.leased and len(self._buffer) >= self._prefetch)
        )
        if self._credit and is_full:
            self._credit = 0
            self._reconnector.spawn(self._send_credit())

    # --- leases ---------------------------------------------------------------------------------

    def _extend_waiting(self, now_s: float) -> bool:
        self._extend(self._buffer.to_extend(now_s))
        if not self._buffer:
            self._arrived.notify()  # a reader requests the credit of dropped deliveries
        return bool(self._buffer)

    def _extend(self, batches: list[DeliveryBatch]) -> None:
        self._extender.extend(lots(batches, self._reconnector.limits.ids_per_frame_max))

    def _extended(self, lot: Lot[DeliveryBatch], sent_s: float, words: Sequence[str]) -> None:
        pairs = zip(lot.ids, words, strict=False)
        stale = {task_id for task_id, word in pairs if word != EXTENDED}
        self._buffer.extended(lot.owners, sent_s, stale)
        self._arrived.notify()

    async def _release(self) -> None:
        """Release all unread deliveries; if that fails, their leases end by themselves."""
        # Release the last lot first: each goes to the front of the group's queue.
        batches, limit = self._buffer.clear(), self._reconnector.limits.ids_per_frame_max
        for lot in reversed(list(lots(batches, limit))):
            fields = (self.topic, self.group, lot.epoch, lot.ids, lot.attempts)
            with suppress(TickwheelError):
                await self._call(FrameType.RELEASE, *fields, repeat=False)

    def refill(self) -> None:
        """Request the whole prefetch, if less was requested and the buffer is empty."""
        if self._credit != self._prefetch and not self._subscribing and not self._buffer:
            self._credit = self._prefetch
            self._reconnector.spawn(self._send_credit())

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]] = tuple) -> Leases:
        """Return a ``Leases``, which extends leases of deliveries that were read: those passed to
        ``hold`` and those of ``in_hand``. Requires ``start``, which learns the length of leases.
        The caller closes the ``Leases``."""
        if self._parts is not None:
            return self._parts.keep_leases(in_hand)
        return Leases(self._all.calls, self.topic, self.group, self.lease_s, in_hand)

    # --- reconnects -----------------------------------------------------------------------------

    def connection_lost(self) -> None:
        if self.leased and self._parts is None:
            self._buffer.connection_lost()

    def connection_up(self) -> None:
        """Subscribe again on a new connection, and keep earlier deliveries."""
        if self._closed or not self._is_started or self._parts is not None:
            return
        if self._resuming is None or self._resuming.done():
            self._resuming = self._reconnector.spawn(self._resume())
        # Leases of deliveries of the old connection may have ended.
        self._extend(self._buffer.to_confirm(self._reconnector.loop.time()))

    async def _resume(self) -> None:
        tries = 0
        while not self._closed:
            try:
                await self._subscribe()
                return
            except TickwheelError as error:
                if not error.retryable:
                    self.ended(error)
                    return
            await asyncio.sleep(retry_pause_s(tries))
            tries += 1

    async def _subscribe(self) -> None:
        self._subscribing, undone, options = True, False, self._options
        try:
            while not self._closed:
                # Buffered deliveries count, so that a connection that flaps does not pile up work.
                self._credit = max(0, self._prefetch - len(self._buffer))
                fields = options.fields(self._number, self._credit)
                try:
                    # Without repeats the answer is one of the current connection.
                    answer = await self._call(FrameType.SUBSCRIBE, *fields, repeat=False)
                except ConnectionLost:
                    continue
                except Conflict as conflict:
                    if await self._undo():
                        if undone:
                            text = "the daemon refuses to subscribe, and keeps the number"
                            raise OutcomeUnknown(text) from conflict
                        undone = True
                        continue
                    if self.mismatch is None or SET_OTHERWISE not in conflict.message:
                        raise
                    await self.mismatch.settle(conflict)
                    options = replace(options, retry=None, settings=GroupKeywords())
                    continue
                self._set_lease(answer)
                return
        finally:
            self._subscribing = False
            self._arrived.notify()  # a reader that has emptied the buffer requests more credit

    async def _undo(self) -> bool:
        """Unsubscribe in case an earlier SUBSCRIBE took the number, but was not answered in time or
        not stored. Return whether it is free now. Otherwise the conflict has another cause."""
        try:
            await self._call(FrameType.UNSUBSCRIBE, self._number, repeat=False)
        except NotFound:
            return False
        except ConnectionLost:
            pass
        return True

    def _set_lease(self, answer: Any) -> None:
        try:
            lease_ms = int(answer["lease_ms"])
        except (TypeError, LookupError, ValueError):
            message = f"the daemon's answer to subscribe has no lease_ms: {answer!r:.100}"
            raise ProtocolError(message) from None
        if answer.get("new_group") is not None:
            self._new_group = read(MadeGroup.of, answer["new_group"])
        if self.leased:
            self._buffer.set_lease(lease_ms / 1000, self._reconnector.loop.time())

    async def _send_credit(self) -> None:
        with suppress(TickwheelError):
            await self._call(FrameType.PREFETCH, self._number, self._credit, repeat=False)


def log_new_group(logger: logging.Logger, new: MadeGroup, topic: str, group: str) -> None:
    """Log that a group was created: as a warning if an operator should check it (``is_odd``)."""
    logger.log(logging.WARNING if new.is_odd else logging.INFO, "%s", new.describe(topic, group))


def _lease_guess_s(subscribe_options: SubscribeOptions) -> float:
    if not subscribe_options.leased:
        return float("inf")
    return (
        LEASE_GUESS_S if subscribe_options.lease_ms is None else subscribe_options.lease_ms / 1000
    )


class Subscriptions(Source):
    """All subscriptions of a client; forwards deliveries and reconnects to each."""

    def __init__(
        self,
        reconnector: Reconnector,
        calls: Calls,
        acks: Acks,
        codec: Codec = PLAIN,
        parts: Callable[[Subscription], Awaitable[SpreadSubscription | None]] | None = None,
    ) -> None:
        """``parts`` returns the subscriptions on all shards that deliver to a front subscription;
        None: there is one shard."""
        self._codec = codec
        self.buffer_bytes_max = BUFFER_BYTES_MAX
        self.reconnector = reconnector
        self.calls = calls
        self.acks = acks
        self._parts = parts
        self._open: dict[int, Subscription] = {}
        self._last_number = 0

    def make(self, subscribe_options: SubscribeOptions, prefetch: int | None) -> Subscription:
        """Create a subscription without starting it. Raise BadRequest."""
        if prefetch is not None:
            self.check_prefetch(prefetch)
        self._last_number += 1
        return Subscription(self, self._last_number, subscribe_options, prefetch)

    async def parts(self, front: Subscription) -> SpreadSubscription | None:
        """Return the subscriptions on all shards that deliver to ``front``; None: there is one
        shard. Raise if the number of shards is unknown."""
        return None if self._parts is None else await self._parts(front)

    def check_prefetch(self, prefetch: Any) -> None:
        limit = self.reconnector.limits.prefetch_max
        if type(prefetch) is not int or not 0 <= prefetch <= limit:
            raise BadRequest(
                f"prefetch must be an integer between 0 and {limit} (prefetch_max),"
                f" not {shown(prefetch)}"
            )

    def add(self, number: int, subscription: Subscription) -> None:
        self._open[number] = subscription

    def remove(self, number: int) -> None:
        self._open.pop(number, None)

    def all(self) -> list[Subscription]:
        return list(self._open.values())

    def deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        """Buffer a DELIVER frame; ignore one for a subscription that has ended."""
        subscription = self._open.get(sub)
        if subscription is None or not items:
            return
        topic, group, leased = subscription.topic, subscription.group, subscription.leased
        subscription.deliver(self.batch(topic, group, epoch, delivered_ms, items, leased=leased))

    def ended(self, sub: int, error: TickwheelError) -> None:
        """End a subscription that the daemon ended: its group was deleted, or it reads too
        slowly."""
        subscription = self._open.get(sub)
        if subscription is not None:
            subscription.ended(error)

    def batch(
        self, topic: str, group: str, epoch: int, delivered_ms: int, items: tuple[Any, ...],
        *, leased: bool = True,
    ) -> DeliveryBatch:  # fmt: skip
        """Return the deliveries of one frame. Raise ValueError if they are malformed."""
        if min(map(len, items)) < 4:
            raise ValueError("a delivery has fewer than 4 fields")
        calls = self.calls if leased else FINISHED
        acks = self.acks.channel(topic, group, epoch) if leased else FINISHED
        waiting = list(items[::-1])
        return DeliveryBatch(calls, acks, topic, group, epoch, delivered_ms, waiting, self._codec)

    def pulled(self, topic: str, group: str, answer: Any) -> list[Delivery]:
        """Return the deliveries in the answer to a PULL. Raise ValueError and similar errors if it
        is malformed."""
        epoch, delivered_ms, items = answer[:3]
        if not items:
            return []
        batch = self.batch(topic, group, epoch, delivered_ms, items)
        return [Delivery(batch, item) for item in items]

    def give_back(self, topic: str, group: str, answer: Any) -> None:
        """Release the deliveries of a PULL whose caller no longer waits."""
        epoch, _, items = answer[:3]
        if items:
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            self.reconnector.spawn(self._release(topic, group, epoch, ids, attempts))

    async def _release(self, *fields: Any) -> None:
        with suppress(TickwheelError):
            await self.calls.call(FrameType.RELEASE, *fields, repeat=False)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        for subscription in self.all():
            subscription.connection_up()

    def down(self) -> None:
        for subscription in self.all():
            subscription.connection_lost()

    def stop(self, error: TickwheelError) -> None:
        for subscription in self.all():
            subscription.fail(error)
        self._open.clear()


_FILTER = FilterFields.__annotations__.keys()
MANUAL, ON_DELIVERY = "manual", "on_delivery"
GROUP_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SubscribeOptions:
    """The options of one subscription."""

    topic: str
    group: str
    """The group; empty for a broadcast."""
    lease_ms: int | None = None
    retry: Retry | None = None
    ack: str = MANUAL
    auto_ack: bool = False
    broadcast: bool = False
    settings: GroupKeywords = field(default_factory=GroupKeywords)

    @property
    def leased(self) -> bool:
        """Whether deliveries have leases and must be acked."""
        return self.ack == MANUAL and not self.broadcast

    def fields(self, number: int, prefetch: int) -> tuple[Any, ...]:
        """Return the fields of the SUBSCRIBE frame."""
        options: dict[str, Any] = {}
        if self.lease_ms is not None:
            options["lease_ms"] = self.lease_ms
        if self.retry is not None:
            options["retry"] = self.retry.to_wire()
        if self.ack != MANUAL:
            options["ack"] = self.ack
        if self.broadcast:
            options["broadcast"] = True
        options |= GroupFields.of_keywords(self.settings)
        return number, self.topic, self.group or None, prefetch, options


def subscribe_options(
    topic: str,
    group: str,
    *,
    lease_ms: int | None,
    retry: Retry | None,
    ack: str,
    auto_ack: bool,
    broadcast: bool,
    settings: GroupKeywords,
) -> SubscribeOptions:
    """Return checked options. Raise BadRequest naming options that contradict each other."""
    if ack not in (MANUAL, ON_DELIVERY):
        raise BadRequest(f"ack must be {MANUAL!r} or {ON_DELIVERY!r}, not {shown(ack)}")
    FLAG.of_python(auto_ack, "auto_ack")
    FLAG.of_python(broadcast, "broadcast")
    if retry is not None:
        policy_wire(retry, "retry")
    not_filter = GroupFields.of_keywords(settings).keys() - _FILTER
    kind = "broadcast" if broadcast else f"ack={ack!r}"
    if broadcast or ack != MANUAL:
        meaningless = [
            name
            for name, is_set in (
                ("group", broadcast and group not in ("", GROUP_DEFAULT)),
                ("retry", retry is not None),
                ("lease", lease_ms is not None),
                ("auto_ack", auto_ack),
                *((name, broadcast) for name in sorted(not_filter)),
            )
            if is_set
        ]
        if meaningless:
            raise BadRequest(f"{meaningless[0]} has no effect with {kind}")
    return SubscribeOptions(
        topic, "" if broadcast else group, lease_ms, retry, ack, auto_ack, broadcast, settings
    )


EXTEND_BELOW = 0.55
"""Remaining share of a lease below which it is extended: when 0.45 to 0.5 of it has passed."""


class Buffer:
    """Batches of deliveries in order of arrival. Batches from before a broken connection are kept
    apart until the daemon has extended their leases, because other consumers may have the tasks."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.dropped = 0
        """Deliveries with leases that ended here; the daemon delivers them again."""
        self.size_bytes = 0
        """Bytes of buffered bodies; a batch counts in full until its last delivery is read."""
        self._batches: deque[DeliveryBatch] = deque()
        self._unsure: deque[DeliveryBatch] = deque()

    def __len__(self) -> int:
        return sum(len(batch.items) for batch in (*self._unsure, *self._batches))

    def __bool__(self) -> bool:
        return len(self) > 0

    def put(self, batch: DeliveryBatch, now_s: float) -> None:
        batch.until_s = now_s + self.lease_s * SURE
        batch.size_bytes = sum([len(item[3]) for item in batch.items])
        self.size_bytes += batch.size_bytes
        self._batches.append(batch)

    def take(self, now_s: float) -> Delivery | None:
        """Remove and return the oldest delivery, or None."""
        batches = self._batches
        while batches:
            batch = batches[0]
            if batch.items:
                if now_s < batch.until_s:
                    return Delivery(batch, batch.items.pop())
                self.dropped += len(batch.items)
                batch.items.clear()
            self.size_bytes -= batches.popleft().size_bytes
        return None

    def set_lease(self, lease_s: float, now_s: float) -> None:
        """Set the length of leases that the daemon announced."""
        if lease_s < self.lease_s:
            for batch in self._batches:
                batch.until_s = min(batch.until_s, now_s + lease_s * SURE)
        self.lease_s = lease_s

    def connection_lost(self) -> None:
        """Set batches aside until the daemon extends their leases: a broken connection shortens
        leases, an orderly stop of the daemon does not."""
        self._unsure.extend(self._batches)
        self._batches.clear()

    def to_confirm(self, now_s: float) -> list[DeliveryBatch]:
        """Return batches from before a broken connection that can be extended on the new one."""
        self._drop_ended(now_s)
        return [batch for batch in self._unsure if not batch.extending]

    def to_extend(self, now_s: float) -> list[DeliveryBatch]:
        """Return batches that are not being extended: past half of their leases, or not confirmed
        since a broken connection."""
        latest_s = now_s + self.lease_s * (EXTEND_BELOW - 1 + SURE)
        due = [
            batch
            for batch in self._batches
            if batch.items and not batch.extending and now_s < batch.until_s <= latest_s
        ]
        return [*self.to_confirm(now_s), *due]

    def extended(self, batches: Iterable[DeliveryBatch], sent_s: float, stale: set[int]) -> None:
        """Record that the daemon extended these batches, except the ``stale`` deliveries."""
        sure: list[DeliveryBatch] = []
        for batch in batches:
            batch.until_s = sent_s + self.lease_s * SURE
            if stale:
                kept = [item for item in batch.items if item[0] not in stale]
                self.dropped += len(batch.items) - len(kept)
                batch.items[:] = kept
            if batch in self._unsure:
                self._unsure.remove(batch)
                sure.append(batch)
        self._batches.extendleft(reversed(sure))

    def _drop_ended(self, now_s: float) -> None:
        for batch in [batch for batch in self._unsure if batch.until_s <= now_s]:
            self.dropped += len(batch.items)
            self.size_bytes -= batch.size_bytes
            self._unsure.remove(batch)

    def clear(self) -> list[DeliveryBatch]:
        """Remove and return every batch with unread deliveries."""
        batches = [batch for batch in (*self._unsure, *self._batches) if batch.items]
        self._unsure.clear()
        self._batches.clear()
        self.size_bytes = 0
        return batches


def lots(batches: Iterable[DeliveryBatch], ids_max: int) -> Iterator[Lot[DeliveryBatch]]:
    """Yield the unread deliveries of ``batches`` in order, in as few frames as possible."""
    for epoch, members in groupby(batches, attrgetter("epoch")):
        waiting = [(batch, item) for batch in members for item in reversed(batch.items)]
        for start in range(0, len(waiting), ids_max):
            part = waiting[start : start + ids_max]
            yield Lot(
                epoch,
                [item[0] for _, item in part],
                [item[1] for _, item in part],
                list(dict.fromkeys(batch for batch, _ in part)),
            )


# --- several shards ------------------------------------------------------------------------------

JOIN_S = 2.0
"""Seconds that a subscription or a pull waits for unreachable shards once one is connected."""
IN_A_ROW = 16
"""Deliveries of one shard before the turn of the next."""
BALANCE_PAUSE_S, BALANCE_PAUSE_MAX_S = 0.2, 1.6
"""Minimum and maximum seconds between checks of which shards have waiting tasks. The pause doubles
after each check that moved no credit."""


class ShareUse(NamedTuple):
    """How much of its share of a prefetch a shard uses, and how many tasks wait there."""

    share: int
    """The shard's part of the prefetch."""
    in_flight: int
    ready: int
    """The group's ready tasks at the shard, which wait for credit."""

    @property
    def is_short(self) -> bool:
        """Whether tasks wait because the share is used up."""
        return self.ready > 0 and self.in_flight >= self.share


def divide(prefetch: int, loads: Sequence[ShareUse]) -> list[int]:
    """Divide a prefetch: each shard gets at least 1, the rest is divided by max-min fairness. A
    shard's demand is its used and usable credit. The rest beyond all demands is divided equally."""
    shares = [1] * len(loads)
    left = prefetch - len(loads)
    demands = [load.in_flight + load.ready * load.is_short for load in loads]
    order = sorted(range(len(loads)), key=demands.__getitem__)
    for limits in (demands, [prefetch] * len(loads)):
        for position, index in enumerate(order):
            equal = left // (len(order) - position)
            more = max(0, min(equal, limits[index] - shares[index]))
            shares[index] += more
            left -= more
    return shares


class SpreadBuffer(Buffer):
    """Reads the deliveries of all shards in turn, up to ``IN_A_ROW`` from each."""

    def __init__(self, lease_s: float) -> None:
        super().__init__(lease_s)
        self.parts: list[Subscription] = []
        self._turn = self._left = 0
        self._current = Buffer(lease_s)
        """The buffer of the current shard, whose turn lasts for ``_left`` more deliveries."""

    def __len__(self) -> int:
        return sum(len(part._buffer) for part in self.parts)

    def take(self, now_s: float) -> Delivery | None:
        if self._left:
            delivery = self._current.take(now_s)
            if delivery is not None:
                self._left -= 1
                return delivery
        parts = self.parts
        for _ in parts:
            self._turn = (self._turn + 1) % len(parts)
            part = parts[self._turn]
            delivery = part._buffer.take(now_s)
            if delivery is not None:
                self._current, self._left = part._buffer, IN_A_ROW - 1
                return delivery
            part.refill()
        self._left = 0
        return None


class SpreadSubscription:
    """One subscription per shard, all read through a single front subscription. Invariants:

    * A delivery is settled, and its lease extended, at the shard that sent it.
    * An unreachable shard does not delay the others: its subscription starts when it is back.
    * A prefetch that the caller has set is divided. Each shard gets at least 1, and all shards
      together never deliver more than the prefetch, or than one delivery per shard if there are
      more shards. Credit moves to the shards that report waiting tasks.
    """

    def __init__(
        self,
        count: int,
        subscriptions_at: Callable[[int], Awaitable[Subscriptions]],
        front: Subscription,
    ) -> None:
        """``subscriptions_at`` connects to a shard and returns its subscriptions."""
        self._count = count
        self._subscriptions_at = subscriptions_at
        self._front = front
        self.buffer = SpreadBuffer(front._buffer.lease_s)
        self._leases: list[SpreadLeases] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._shares = self._equal_shares(front._prefetch)
        """The prefetch of each shard, never below the value that its daemon may currently use."""
        self._dividing = asyncio.Lock()
        self._balancing: asyncio.Task[None] | None = None

    @property
    def _parts(self) -> list[Subscription]:
        return self.buffer.parts

    async def start(self) -> None:
        """Subscribe at all connected shards; unreachable ones join later. Raise a shard's
        refusal, or an error if no shard is connected."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + JOIN_S
        joining = {loop.create_task(self._join(shard)): shard for shard in range(self._count)}
        try:
            waiting, errors = set(joining), {}
            while waiting:
                left_s = max(0.0, until_s - loop.time()) if self._parts else None
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                errors.update({t: error for t in done if (error := t.exception()) is not None})
                for error in errors.values():
                    if not isinstance(error, TickwheelError) or not error.retryable:
                        raise error
                if not done and left_s is not None:
                    break
            if not self._parts:
                if self._front._closed:
                    return
                raise next(iter(errors.values()))
        except BaseException:
            for task in joining:
                task.cancel()
            raise
        for task in waiting:
            task.cancel()
        for task in (*errors, *waiting):
            self._join_later(joining[task])
        self._begin_balancing()

    def _equal_shares(self, prefetch: int) -> list[int]:
        """Return the initial share of each shard: an equal part of at least 1, unless the prefetch
        is 0. A default prefetch is not divided."""
        if not self._front._divides:
            return [prefetch] * self._count
        each, extra = divmod(prefetch, self._count)
        return [max(each + (shard < extra), min(prefetch, 1)) for shard in range(self._count)]

    async def _join(self, shard: int) -> None:
        """Subscribe at one shard."""
        front = self._front
        subscriptions = await self._subscriptions_at(shard)
        part = subscriptions.make(front._options, self._shares[shard])
        part._front, part._arrived, part.mismatch = front, front._arrived, front.mismatch
        part._bytes_max = max(PART_BYTES_MIN, front._bytes_max // self._count)
        await part.start()
        if front._closed:
            part._give_up()
            return
        self._parts.append(part)
        part._shard = shard
        self.buffer.lease_s = min(part.lease_s for part in self._parts)
        for leases in self._leases:
            leases.add(part)
        front._arrived.notify()
        if part._prefetch != self._shares[shard]:
            try:
                await part.set_prefetch(self._shares[shard])
            except TickwheelError as error:
                if not error.retryable:
                    raise
                # When the shard is back, the part subscribes again with this share: do not join
                # twice.

    def _join_later(self, shard: int) -> None:
        task = self._front._reconnector.spawn(self._keep_joining(shard))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _keep_joining(self, shard: int) -> None:
        front, tries = self._front, 0
        LOGGER.warning(
            "shard %d is unreachable; the subscription to %s goes on without it", shard, front.topic
        )
        while not front._closed:
            try:
                await self._join(shard)
                return
            except TickwheelError as error:
                if not error.retryable:
                    front.ended(error)
                    return
            await asyncio.sleep(retry_pause_s(tries))
            tries += 1

    @property
    def new_group(self) -> MadeGroup | None:
        """A description of the group, if one of the shards created it."""
        return MadeGroup.joined(part.new_group for part in self._parts)

    async def close(self) -> None:
        """End the subscriptions on all shards."""
        for task in (*self._joining, self._balancing):
            if task is not None:
                task.cancel()
        for part in self._parts:
            part._end()
        await asyncio.gather(*(part._leave() for part in self._parts), return_exceptions=True)

    # --- the prefetch ---------------------------------------------------------------------------

    async def set_prefetch(self, prefetch: int) -> None:
        """Divide a new prefetch in proportion to the current shares. An unreachable shard gets its
        share when it is back."""
        async with self._dividing:
            if 0 in self._shares or prefetch < self._count:
                self._shares = self._equal_shares(prefetch)
            else:
                self._shares = divide(
                    prefetch, [ShareUse(share, share, 0) for share in self._shares]
                )
            requests = (part.set_prefetch(self._shares[part._shard]) for part in self._parts)
            raise_first(await asyncio.gather(*requests, return_exceptions=True))
        self._begin_balancing()

    def _begin_balancing(self) -> None:
        """Start to move credit to shards with waiting tasks, if there is credit to divide."""
        front = self._front
        if self._balancing is None and front._divides and front.leased:
            self._balancing = front._reconnector.spawn(self._balance())

    async def _balance(self) -> None:
        """Move credit repeatedly while deliveries arrive or tasks wait for credit."""
        pause_s, received, is_short = BALANCE_PAUSE_S, 0, False
        while True:
            await asyncio.sleep(pause_s)
            before, received = received, sum(part.received for part in self._parts)
            has_moved = False
            if self._front._prefetch > self._count and (is_short or received != before):
                try:
                    async with self._dividing:
                        is_short, has_moved = await self._move_credit()
                except TickwheelError as error:
                    # A daemon of an older release does not report its use. The shares stay as they
                    # are.
                    LOGGER.info(
                        "balancing credit between shards failed: %s: %s", error.code, error.message
                    )
                    return
            pause_s = BALANCE_PAUSE_S if has_moved else min(2 * pause_s, BALANCE_PAUSE_MAX_S)

    async def _move_credit(self) -> tuple[bool, bool]:
        """Move credit from shards that do not use it to shards with tasks that wait for credit.
        Return whether a shard was short of credit, and whether credit moved. A shard gets only
        credit that others have given up and no longer use."""
        parts = [part for part in self._parts if part.has_full_credit]
        loads = await self._update_shares({part: self._shares[part._shard] for part in parts})
        if not any(load.is_short for load in loads.values()):
            return False, False
        others = sum(self._shares) - sum(load.share for load in loads.values())
        prefetch = self._front._prefetch - others
        wanted = dict(zip(loads, divide(prefetch, [*loads.values()]), strict=True))
        less = {part: share for part, share in wanted.items() if share < loads[part].share}
        loads |= await self._update_shares(less)
        free = prefetch - sum(max(load.share, load.in_flight) for load in loads.values())
        more = {}
        for part, share in wanted.items():
            added = min(share - loads[part].share, free)
            if added > 0:
                free -= added
                more[part] = loads[part].share + added
        await self._update_shares(more)
        return True, bool(less or more)

    async def _update_shares(
        self, shares: Mapping[Subscription, int]
    ) -> dict[Subscription, ShareUse]:
        """Set these shares. Return the use of each reachable shard."""
        uses = await asyncio.gather(*(self._update(part, share) for part, share in shares.items()))
        return {part: use for part, use in zip(shares, uses, strict=True) if use is not None}

    async def _update(self, part: Subscription, share: int) -> ShareUse | None:
        """Set the share of one shard. Return its use, or None if it is unreachable; then it gets
        the share when it is back. Until it answers, the greater share counts, because the daemon
        may have either. Raise the daemon's refusal."""
        self._shares[part._shard] = max(share, self._shares[part._shard])
        try:
            use = ShareUse(share, *await part.update_prefetch(share))
        except NotFound:  # it has a new connection, and is not subscribed again yet
            return None
        except TickwheelError as error:
            if not error.retryable:
                raise
            return None
        self._shares[part._shard] = share
        return use

    async def give_back(self) -> None:
        await asyncio.gather(*(part.give_back() for part in self._parts))

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]]) -> SpreadLeases:
        leases = SpreadLeases(self._parts, in_hand)
        self._leases.append(leases)
        return leases


class SpreadLeases(Leases):
    """``Leases`` for the deliveries of several shards."""

    def __init__(
        self, parts: Iterable[Subscription], in_hand: Callable[[], Iterable[InHand]]
    ) -> None:
        self._in_hand = in_hand
        self._by_calls: dict[Any, Leases] = {}
        """The leases of each shard's deliveries, by the calls of its link."""
        self._is_closed = False
        for part in parts:
            self.add(part)

    def add(self, part: Subscription) -> None:
        """Extend leases of a part that joined."""
        if not self._is_closed:
            calls = part._all.calls
            leases = part.keep_leases(lambda: self._in_hand_of(calls))
            self._by_calls[calls] = leases

    def _in_hand_of(self, calls: Any) -> Iterable[InHand]:
        return (entry for entry in self._in_hand() if entry[0]._batch.calls is calls)

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        leases = self._by_calls.get(delivery._batch.calls)
        if leases is not None:  # a delivery without acks has no lease
            leases.hold(delivery, lost)

    def begin(self) -> None:
        for leases in self._by_calls.values():
            leases.begin()

    def drop(self, delivery: Delivery) -> None:
        leases = self._by_calls.get(delivery._batch.calls)
        if leases is not None:
            leases.drop(delivery)

    def close(self) -> list[Delivery]:
        self._is_closed = True
        return [delivery for leases in self._by_calls.values() for delivery in leases.close()]
