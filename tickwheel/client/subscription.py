"""A subscription: deliveries pushed by the daemon, buffered here, handed out one by one.

``Subscription`` lives over reconnects; ``Subscriptions`` are all of one client, by the numbers that
DELIVER frames carry; ``SubscribeOptions`` is what one was asked to be, sent again after every
reconnect; ``AutoAck`` settles what its reader is done with; ``Buffer`` holds what waits to be
handed out, with leases that are kept up.

Invariants: nothing is acked here; what was not handed out is given back at the end without costing
an attempt; nothing is handed out after ``close``, or with a lease that can have ended as far as
this side can know; nothing is extended by itself that was handed out (``keep_leases`` is for
that: a worker extends what its handlers work on). Times are the event loop's, in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast, get_args

from tickwheel.api.frames import FrameType
from tickwheel.api.groups import SET_OTHERWISE, TO_CHANGE, FilterFields, GroupFields, MadeGroup
from tickwheel.api.kinds import FLAG
from tickwheel.api.policies import Retry, policy_wire
from tickwheel.client.connection import LOGGER, Connection, Signal
from tickwheel.client.delivery import FINISHED, Delivered, Delivery, DeliveryBatch
from tickwheel.client.encodings import PLAIN, Codec
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.leases import EXTENDED, SURE, Extender, InHand, Leases, Lot
from tickwheel.client.requests import Calls, read, retry_pause_s
from tickwheel.errors import (
    BadBody,
    BadRequest,
    ClientClosed,
    Conflict,
    ConnectionLost,
    NotFound,
    ProtocolError,
    TickwheelError,
    Undecodable,
    shown,
    text_of,
)
from tickwheel.waiting import to_its_end

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator

    from tickwheel.client.delivery import Acks
    from tickwheel.client.reconnector import Reconnector


REASON_CHARACTERS_MAX = 1000
"""Characters of an exception's text that are sent; the daemon keeps still less."""
TRACE_CHARACTERS_MAX = 16_000
"""Characters of a traceback that are sent, from its end."""
_OURS = str(Path(__file__).parent)


def reason_of(error: BaseException, delivery: Delivered) -> str:
    """The reason for a nack: "Type: text" on the first line, and the traceback from where it leaves
    this client behind that. Of an encrypted delivery types and lines alone: what an exception says
    may have come out of the body."""
    name = type(error).__name__
    if delivery.encrypted_with is not None:
        return f"{name}\n{_bare_trace(error)}".rstrip()[-TRACE_CHARACTERS_MAX:]
    text = " ".join(text_of(error).splitlines())
    said = (f"{name}: {text}" if text else name)[:REASON_CHARACTERS_MAX]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    if trace is None:
        return said
    try:
        told = text_of("".join(traceback.format_exception(type(error), error, trace)))
    except Exception:  # attributes of the exception that a traceback shows may be anything
        return said
    told = told.removeprefix("Traceback (most recent call last):\n").rstrip()
    return f"{said}\n{told[-TRACE_CHARACTERS_MAX:]}"


def _bare_trace(error: BaseException) -> str:
    """Where an exception came from, and those before it: files, lines, functions, types."""
    told: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        lines = (
            f'  File "{code.co_filename}", line {number}, in {code.co_name}'
            for code, number in ((f.f_code, n) for f, n in traceback.walk_tb(one.__traceback__))
            if not code.co_filename.startswith(_OURS)
        )
        told.append("\n".join([*lines, type(one).__name__]))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "\n".join(reversed(told))


async def settle_failed(delivery: Delivery, error: BaseException) -> None:
    """Settle a delivery whose consumer has raised: a nack; released when it was cancelled or
    interrupted, or when another client may be able to unpack the body, rejected when none is."""
    if isinstance(error, BadBody):
        await delivery.reject(f"{type(error).__name__}: {text_of(error)}")
    elif isinstance(error, (Exception, SystemExit)) and not isinstance(error, Undecodable):
        await delivery.nack(reason=reason_of(error, delivery))
    else:
        await delivery.release()


class Reader:
    """One ``async for``, and the deliveries that its body works on."""

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
        """Note the deliveries that the body gets."""
        self._held, self.task = deliveries, asyncio.current_task()

    def ack(self) -> None:
        """Ack the deliveries that the body is done with."""
        for delivery in self.open():
            with suppress(TickwheelError):  # closed: the lease ends by itself
                delivery.ack_unwatched()

    def open(self) -> list[Delivery]:
        """The deliveries that the body has not settled; none of them is returned twice."""
        held, self._held = self._held, ()
        return [delivery for delivery in held if not delivery.settled]


class AutoAck:
    """The readers of one subscription.

    ``auto_ack=True``: deliveries are acked by coming back for the next one.
    An iterator does not learn how the body of its ``async for`` ended. What it does know is this:

    * An ``async for`` (or ``aiter()``, or ``batches()``) that asks for the next delivery is done
      with what it got before: acked, also when the body caught an exception itself. The same holds
      for a new ``async for`` in the same task of the event loop.
    * ``async with`` that is left without an exception (``break``, ``return``, the end): what that
      task got is acked.
    * ``async with`` that is left by an exception: what that task got is nacked, with "Type: text"
      as the reason; when the task was cancelled it is released.
    * Without ``async with`` a ``break`` or an exception goes unnoticed, and so does what the bodies
      of other tasks do: the lease ends by itself, and the task is delivered again.

    What the body settled on its own (``ack``, ``nack``, …) is left alone. Leases are not kept up
    while a body runs.
    """

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def reader(self, take: Callable[[], Coroutine[Any, Any, Delivery]]) -> Reader:
        """A new ``async for``: the body of an earlier one in the same task is over."""
        task = asyncio.current_task()
        for reader in self._readers:
            if reader.task is task:
                reader.ack()
        # Bodies of tasks that have ended are nobody's any more; their leases end by themselves.
        others = [r for r in self._readers if r.task is not None and not r.task.done()]
        made = Reader(take)
        self._readers = [*(reader for reader in others if reader.task is not task), made]
        return made

    async def left(self, error: BaseException | None) -> None:
        """Settle what the current task holds as it leaves the ``async with``: ack, nack,
        release."""
        task = asyncio.current_task()
        for reader in [reader for reader in self._readers if reader.task is task]:
            if error is None:
                reader.ack()
                continue
            for delivery in reader.open():
                with suppress(TickwheelError):
                    await settle_failed(delivery, error)


LEASE_GUESS_S = 30.0
"""The assumed length of leases, in seconds, until the daemon has said it."""
STREAK_MAX = 128
"""After so many deliveries the event loop gets a turn, so that acks leave, and more deliveries come
in, while a fast consumer works."""
PREFETCH = 256
"""The prefetch of a subscription that names none, at each shard."""


BUFFER_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of bodies that may wait in one subscription, of all shards together: when there are more,
the daemon is asked for none until what is here is handed out."""
PART_BYTES_MIN = 256 * 1024
"""Of that, the least part of one shard."""


OnMismatch = Literal["update", "warn", "refuse"]
"""What a worker does at its start about a group that is set otherwise than its code says."""


def checked_on_mismatch(word: Any) -> OnMismatch | None:
    """The word, or None. Raises BadRequest."""
    if word is not None and word not in get_args(OnMismatch):
        known = ", ".join(get_args(OnMismatch))
        raise BadRequest(f"on_mismatch must be one of {known}, not {shown(word)}")
    return cast("OnMismatch | None", word)


class Mismatch:
    """What becomes of settings that a subscription names and its group has otherwise.

    One object for all shards of a subscription, so that they are changed once. Invariant: settings
    are changed at the start only: a worker of an older release that connects again would undo what
    the newer ones have set.
    """

    def __init__(self, word: OnMismatch | None, update: Callable[[], Awaitable[object]]) -> None:
        """``word``: None is "warn" of ``retry``, and "refuse" of all else."""
        self._word = word
        self._update = update
        self._updating = asyncio.Lock()
        self._is_updated = False
        self._said: set[str] = set()
        self.has_started = False
        """Whether the subscription has started; of several shards, on one at least."""

    async def settle(self, conflict: Conflict) -> None:
        """Return when the subscription goes on with the settings that the group has then. Raises
        the conflict, or why the settings could not be changed."""
        found, _, command = conflict.message.partition(TO_CHANGE)
        differs = found.partition(SET_OTHERWISE)[2].split("; ")
        is_retry = all(text.startswith("retry") for text in differs)
        word = self._word or ("warn" if is_retry else "refuse")
        if word == "refuse":
            raise conflict
        if word == "update" and not self.has_started:
            async with self._updating:
                if not self._is_updated:
                    LOGGER.warning("%s; this code's settings become the group's", found)
                    await self._update()
                    self._is_updated = True
        elif found not in self._said:
            self._said.add(found)
            text = "%s. The group's own settings hold; this code's become the group's by: %s"
            LOGGER.warning(text, found, command)


class Spread(Protocol):
    """A subscription on each of several shards, as the one that is in front of them sees them."""

    @property
    def buffer(self) -> Buffer:
        """What has come from all of them."""

    @property
    def new_group(self) -> MadeGroup | None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def set_prefetch(self, prefetch: int) -> None: ...

    async def give_back(self) -> None: ...

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]]) -> Leases: ...


class Subscription:
    """``async with client.subscribe(…) as deliveries: async for delivery in deliveries: …``

    Several tasks may iterate over one subscription; each delivery goes to one of them. Without
    ``async with`` it starts at the first delivery asked for and ends with the client.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        number: int,
        subscribe_options: SubscribeOptions,
        prefetch: int | None,
    ) -> None:
        """``prefetch``: None is ``PREFETCH``, at each shard where there are several."""
        self.topic, self.group, self.leased = (
            subscribe_options.topic,
            subscribe_options.group,
            subscribe_options.leased,
        )
        self.auto_ack = subscribe_options.auto_ack
        self._wish = subscribe_options
        self._auto = AutoAck() if subscribe_options.auto_ack else None
        self._all = subscriptions
        self._reconnector = subscriptions.reconnector
        self._call = subscriptions.calls.call
        self._number = number
        self._prefetch = PREFETCH if prefetch is None else prefetch
        self._divides = prefetch is not None
        """Whether shards have a part of the prefetch each, because somebody has named it."""
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
        self._starting = asyncio.Lock()
        self._on = False
        self._closed = False
        self._error: TickwheelError | None = None
        self.mismatch: Mismatch | None = None
        """What becomes of settings that the group has otherwise; None: a Conflict."""
        self._subscribing = False
        self._credit = self._prefetch
        """The prefetch that the daemon was asked for; smaller while an old buffer drains."""
        self._bytes_max = subscriptions.buffer_bytes_max
        self._streak = 0
        self.came = 0
        """How many deliveries have come."""
        self._resuming: asyncio.Task[None] | None = None
        self._parts: Spread | None = None
        self._new_group: MadeGroup | None = None
        """Over several shards: a subscription on each, of which this one is the front."""
        self._front: Subscription | None = None
        """Of such a part: the front,"""
        self._shard = 0
        """and which shard it is of."""

    # --- life -----------------------------------------------------------------------------------

    @property
    def new_group(self) -> MadeGroup | None:
        """What there is to say of the group, if this subscription has made it."""
        parts = self._parts
        return self._new_group if parts is None else parts.new_group

    async def start(self) -> Self:
        """Subscribe. Raises what the daemon objects to. Harmless when it is started."""
        async with self._starting:
            parts = await self._all.parts(self) if self._front is None else None
            if not self._on and not self._closed:
                self._all.add(self._number, self)
                try:
                    if parts is not None:
                        self._parts, self._buffer = parts, parts.buffer
                        await parts.start()
                    else:
                        await self._subscribe()
                except BaseException:
                    # The daemon may have done it all the same, or be about to.
                    self._end()
                    self._reconnector.spawn(self._leave())
                    raise
                self._on = True
        return self

    async def close(self) -> None:
        """End the subscription; deliveries not handed out go back. It may be called again."""
        if not self._closed:
            self._end()
            await self._leave()

    async def _leave(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()  # a SUBSCRIBE after the UNSUBSCRIBE would stay for ever
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
        """Set how many unsettled deliveries the daemon may have out here; 0 pauses."""
        self._all.check_prefetch(prefetch)
        self._prefetch, self._divides = prefetch, True
        if self._parts is not None:
            self._credit = prefetch
            await self._parts.set_prefetch(prefetch)
        elif self._on:
            self._credit = prefetch
            await self._call(FrameType.PREFETCH, self._number, prefetch)

    @property
    def takes_credit(self) -> bool:
        """Whether the daemon has been asked for the whole prefetch, on the present connection."""
        is_asked = self._credit == self._prefetch and not self._subscribing
        return self._on and is_asked and self._reconnector.connection is not None

    async def tell_prefetch(self, prefetch: int) -> tuple[int, int]:
        """Set the prefetch; how many deliveries of this subscription are unsettled then, and how
        many more tasks of the group wait for credit. If the daemon is away it is set when it is
        back; raised is why."""
        self._prefetch = self._credit = prefetch
        told = await self._call(FrameType.PREFETCH, self._number, prefetch, True, repeat=False)
        return told["in_flight"], told["ready"]

    async def give_back(self) -> None:
        """Give back deliveries that were not handed out, without counting a failure."""
        if self._parts is not None:
            await self._parts.give_back()
        elif self.leased and self._reconnector.connection is not None:
            await self._release()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await to_its_end(self.close())  # nobody else will
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._auto is not None:
                await self._auto.left(error)
        finally:
            await self.close()

    def _end(self) -> None:
        self._closed = True
        self._extender.stop()
        self._arrived.notify()

    def fail(self, error: TickwheelError) -> None:
        """End the subscription with an error, which those who iterate are told."""
        if self._front is not None:
            self._front.fail(error)
        if not self._closed:
            self._error = error
            self._end()

    def ended(self, error: TickwheelError) -> None:
        """End a subscription that the daemon does not have, or does not want, any more."""
        LOGGER.error("subscription to %s ended: %s: %s", self.topic, error.code, error.message)
        self.fail(error)
        front = self._front or self
        front._reconnector.spawn(front._leave())

    # --- handing out ----------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self if self._auto is None else self._auto.reader(self._take)

    @property
    def lease_s(self) -> float:
        """How long leases are, in seconds, as the daemon said last."""
        return self._buffer.lease_s

    def __anext__(self) -> Coroutine[Any, Any, Delivery]:
        if self._auto is not None:
            raise BadRequest("auto_ack needs async for, or anext() of aiter(subscription)")
        return self._take()

    async def _take(self) -> Delivery:
        if not self._on:
            await self.start()
        if self._streak >= STREAK_MAX:
            self._streak = 0
            await asyncio.sleep(0)
        while not self._closed:
            delivery = self._buffer.take(self._reconnector.loop.time())
            if delivery is not None:
                self._streak += 1
                return delivery
            if self._credit != self._prefetch and not self._subscribing:
                self._credit = self._prefetch
                # The old buffer is handed out: the whole prefetch from now on.
                self._reconnector.spawn(self._send_credit())
            self._streak = 0
            await self._arrived.wait()
        if self._error is not None and not isinstance(self._error, ClientClosed):
            raise self._error
        raise StopAsyncIteration

    def take_now(self) -> Delivery | None:
        """A delivery that is here already; None: there is none, or the event loop should get its
        turn. For a caller who also iterates."""
        if self._streak >= STREAK_MAX or self._closed:
            return None
        delivery = self._buffer.take(self._reconnector.loop.time())
        self._streak += delivery is not None
        return delivery

    async def batches(self, max_deliveries: int = 256) -> AsyncIterator[list[Delivery]]:
        """Lists of the deliveries that are there: at least one, at most ``max_deliveries``."""
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
        """Take deliveries that have come."""
        count = len(batch.items)
        self._buffer.put(batch, self._reconnector.loop.time())
        self.came += count
        self._arrived.notify(count)
        self._hold_back()
        if self.leased:
            self._extender.begin()

    def _hold_back(self) -> None:
        """Ask for no more while the buffer is full: of bytes, and of deliveries where without acks
        nothing else stops a daemon."""
        is_full = self._buffer.size_bytes >= self._bytes_max or (
            not self.leased and len(self._buffer) >= self._prefetch
        )
        if self._credit and is_full:
            self._credit = 0
            self._reconnector.spawn(self._send_credit())

    # --- leases ---------------------------------------------------------------------------------

    def _extend_waiting(self, now_s: float) -> bool:
        self._extend(self._buffer.to_extend(now_s))
        return bool(self._buffer)

    def _extend(self, batches: list[DeliveryBatch]) -> None:
        self._extender.extend(lots(batches, self._reconnector.limits.ids_per_frame_max))

    def _extended(self, lot: Lot[DeliveryBatch], asked_s: float, words: Sequence[str]) -> None:
        said = zip(lot.ids, words, strict=False)
        stale = {task_id for task_id, word in said if word != EXTENDED}
        self._buffer.extended(lot.owners, asked_s, stale)
        self._arrived.notify()

    async def _release(self) -> None:
        """Give all waiting deliveries back unstarted; if that fails, their leases end in time."""
        # The last lot first: each goes to the front of the line.
        batches, limit = self._buffer.clear(), self._reconnector.limits.ids_per_frame_max
        for lot in reversed(list(lots(batches, limit))):
            fields = (self.topic, self.group, lot.epoch, lot.ids, lot.attempts)
            with suppress(TickwheelError):
                await self._call(FrameType.RELEASE, *fields, repeat=False)

    def refill(self) -> None:
        """Ask for the whole prefetch, if less was asked for and all that came is handed out."""
        if self._credit != self._prefetch and not self._subscribing and not self._buffer:
            self._credit = self._prefetch
            self._reconnector.spawn(self._send_credit())

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]] = tuple) -> Leases:
        """Keeps up the leases of handed-out deliveries, those it is given and those ``in_hand``. To
        be closed; only after ``start``, which says how long leases are."""
        if self._parts is not None:
            return self._parts.keep_leases(in_hand)
        return Leases(self._all.calls, self.topic, self.group, self.lease_s, in_hand)

    # --- over reconnects ------------------------------------------------------------------------

    def connection_lost(self) -> None:
        if self.leased and self._parts is None:
            self._buffer.connection_lost()

    def connection_up(self) -> None:
        """Subscribe again on a new connection, and keep what was delivered before."""
        if self._closed or not self._on or self._parts is not None:
            return
        if self._resuming is None or self._resuming.done():
            self._resuming = self._reconnector.spawn(self._resume())
        # What was delivered on the old connection has a lease still, or not.
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
        self._subscribing, undone, wish = True, False, self._wish
        try:
            while not self._closed:
                # What waits here from before counts: a flapping line must not pile up work.
                self._credit = max(0, self._prefetch - len(self._buffer))
                fields = wish.fields(self._number, self._credit)
                try:
                    # Not repeated by itself: whatever answers did so on the present connection.
                    answer = await self._call(FrameType.SUBSCRIBE, *fields, repeat=False)
                except ConnectionLost:
                    continue
                except Conflict as conflict:
                    if not undone and await self._undo():
                        undone = True
                        continue
                    if self.mismatch is None or SET_OTHERWISE not in conflict.message:
                        raise
                    await self.mismatch.settle(conflict)
                    wish = replace(wish, retry=None, settings=GroupKeywords())
                    continue
                self._set_lease(answer)
                return
        finally:
            self._subscribing = False

    async def _undo(self) -> bool:
        """Whether the number was taken by a SUBSCRIBE that was done but not answered in time, and
        is free now. Else the conflict is about something else."""
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
            said = f"the daemon's answer to subscribe has no lease_ms: {answer!r:.100}"
            raise ProtocolError(said) from None
        if answer.get("new_group") is not None:
            self._new_group = read(MadeGroup.of, answer["new_group"])
        if self.leased:
            self._buffer.set_lease(lease_ms / 1000, self._reconnector.loop.time())

    async def _send_credit(self) -> None:
        with suppress(TickwheelError):
            await self._call(FrameType.PREFETCH, self._number, self._credit, repeat=False)


def log_new_group(logger: logging.Logger, new: MadeGroup, topic: str, group: str) -> None:
    """Log that a group was made: as a warning where tasks waited before, or wait for nobody."""
    logger.log(logging.WARNING if new.is_odd else logging.INFO, "%s", new.told(topic, group))


def _lease_guess_s(subscribe_options: SubscribeOptions) -> float:
    if not subscribe_options.leased:
        return float("inf")
    return (
        LEASE_GUESS_S if subscribe_options.lease_ms is None else subscribe_options.lease_ms / 1000
    )


class Subscriptions:
    """All subscriptions of a client: passes deliveries and reconnects on to each."""

    def __init__(
        self,
        reconnector: Reconnector,
        calls: Calls,
        acks: Acks,
        codec: Codec = PLAIN,
        parts: Callable[[Subscription], Awaitable[Spread | None]] | None = None,
    ) -> None:
        """``parts``: of a subscription, one on each shard, where there are several."""
        self._codec = codec
        self.buffer_bytes_max = BUFFER_BYTES_MAX
        self.reconnector = reconnector
        self.calls = calls
        self.acks = acks
        self._parts = parts
        self._open: dict[int, Subscription] = {}
        self._last_number = 0

    def make(self, subscribe_options: SubscribeOptions, prefetch: int | None) -> Subscription:
        """A subscription that is not started. Raises BadRequest."""
        if prefetch is not None:
            self.check_prefetch(prefetch)
        self._last_number += 1
        return Subscription(self, self._last_number, subscribe_options, prefetch)

    async def parts(self, front: Subscription) -> Spread | None:
        """A subscription on each shard, if there are several. Raises why that is not known."""
        return None if self._parts is None else await self._parts(front)

    def check_prefetch(self, prefetch: Any) -> None:
        limit = self.reconnector.limits.prefetch_max
        if type(prefetch) is not int or not 0 <= prefetch <= limit:
            raise BadRequest(
                f"prefetch must be an integer of 0 to {limit} (prefetch_max), not {shown(prefetch)}"
            )

    def add(self, number: int, subscription: Subscription) -> None:
        self._open[number] = subscription

    def remove(self, number: int) -> None:
        self._open.pop(number, None)

    def all(self) -> list[Subscription]:
        return list(self._open.values())

    def deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        """Take a DELIVER frame; one for a subscription that has ended is passed over."""
        subscription = self._open.get(sub)
        if subscription is None or not items:
            return
        topic, group, leased = subscription.topic, subscription.group, subscription.leased
        subscription.deliver(self.batch(topic, group, epoch, delivered_ms, items, leased=leased))

    def ended(self, sub: int, error: TickwheelError) -> None:
        """End a subscription for the daemon: its group was deleted, or it reads too slowly."""
        subscription = self._open.get(sub)
        if subscription is not None:
            subscription.ended(error)

    def batch(
        self, topic: str, group: str, epoch: int, delivered_ms: int, items: tuple[Any, ...],
        *, leased: bool = True,
    ) -> DeliveryBatch:  # fmt: skip
        """The deliveries of one frame. Raises ValueError if they are none."""
        if min(map(len, items)) < 4:
            raise ValueError("a delivery has fewer than 4 fields")
        calls = self.calls if leased else FINISHED
        acks = self.acks.channel(topic, group, epoch) if leased else FINISHED
        waiting = list(items[::-1])
        return DeliveryBatch(calls, acks, topic, group, epoch, delivered_ms, waiting, self._codec)

    def pulled(self, topic: str, group: str, answer: Any) -> list[Delivery]:
        """The deliveries in the answer to a PULL. Raises ValueError and the like if it is none."""
        epoch, delivered_ms, items = answer[:3]
        if not items:
            return []
        batch = self.batch(topic, group, epoch, delivered_ms, items)
        return [Delivery(batch, item) for item in items]

    def give_back(self, topic: str, group: str, answer: Any) -> None:
        """Release the deliveries of a PULL whose caller has gone."""
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

    def collect(self, connection: Connection) -> None:
        """Do nothing: subscriptions send their frames as calls."""

    def sweep(self, now_s: float) -> None:
        """Do nothing: each subscription has a timer of its own, because leases may be short."""

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
        """Whether deliveries have leases, and have to be acked."""
        return self.ack == MANUAL and not self.broadcast

    def fields(self, number: int, prefetch: int) -> tuple[Any, ...]:
        """The fields of the SUBSCRIBE frame."""
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
    """The checked options. Raises BadRequest naming what does not go together."""
    if ack not in (MANUAL, ON_DELIVERY):
        raise BadRequest(f"ack must be {MANUAL!r} or {ON_DELIVERY!r}, not {shown(ack)}")
    FLAG.of_python(auto_ack, "auto_ack")
    FLAG.of_python(broadcast, "broadcast")
    if retry is not None:
        policy_wire(retry, "retry")
    not_filter = GroupFields.of_keywords(settings).keys() - _FILTER
    kind = "broadcast" if broadcast else f"ack={ack!r}"
    if broadcast or ack != MANUAL:
        given = [
            name
            for name, is_given in (
                ("group", broadcast and group not in ("", GROUP_DEFAULT)),
                ("retry", retry is not None),
                ("lease", lease_ms is not None),
                ("auto_ack", auto_ack),
                *((name, broadcast) for name in sorted(not_filter)),
            )
            if is_given
        ]
        if given:
            raise BadRequest(f"{given[0]} has no meaning with {kind}: nothing is delivered again")
    return SubscribeOptions(
        topic, "" if broadcast else group, lease_ms, retry, ack, auto_ack, broadcast, settings
    )


EXTEND_BELOW = 0.55
"""A lease with less than this share left is extended: that is after 0.45 to 0.5 of it."""


class Buffer:
    """Batches of deliveries in order of arrival. Those from before a broken connection are apart:
    others may have their tasks by now, so they wait until the daemon has extended them."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.dropped = 0
        """Deliveries whose lease ended here; the daemon delivers them again."""
        self.size_bytes = 0
        """The bytes of bodies that wait; of a batch all count until it is handed out whole."""
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
        """Remove and return the oldest delivery; None: there is none."""
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
        """Take the length of leases that the daemon has said."""
        if lease_s < self.lease_s:
            for batch in self._batches:
                batch.until_s = min(batch.until_s, now_s + lease_s * SURE)
        self.lease_s = lease_s

    def connection_lost(self) -> None:
        """Wait for the daemon's word on how long leases go on: a broken connection shortens them, a
        daemon that stopped in order keeps them whole."""
        self._unsure.extend(self._batches)
        self._batches.clear()

    def to_confirm(self, now_s: float) -> list[DeliveryBatch]:
        """Batches from before a broken connection that can be extended on the new one."""
        self._drop_ended(now_s)
        return [batch for batch in self._unsure if not batch.extending]

    def to_extend(self, now_s: float) -> list[DeliveryBatch]:
        """Batches whose leases are half over and that are not being extended."""
        self._drop_ended(now_s)
        latest_s = now_s + self.lease_s * (EXTEND_BELOW - 1 + SURE)
        return [
            batch
            for batch in self._batches
            if batch.items and not batch.extending and now_s < batch.until_s <= latest_s
        ]

    def extended(self, batches: Iterable[DeliveryBatch], asked_s: float, stale: set[int]) -> None:
        """Note that the daemon extended these batches, except the ``stale`` deliveries."""
        sure: list[DeliveryBatch] = []
        for batch in batches:
            batch.until_s = asked_s + self.lease_s * SURE
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
        """Remove and return every batch that still holds deliveries."""
        batches = [batch for batch in (*self._unsure, *self._batches) if batch.items]
        self._unsure.clear()
        self._batches.clear()
        self.size_bytes = 0
        return batches


def lots(batches: Iterable[DeliveryBatch], ids_max: int) -> Iterator[Lot[DeliveryBatch]]:
    """The waiting deliveries of ``batches``, in order, in as few frames of receipts as possible."""
    for epoch, some in groupby(batches, attrgetter("epoch")):
        waiting = [(batch, item) for batch in some for item in reversed(batch.items)]
        for start in range(0, len(waiting), ids_max):
            part = waiting[start : start + ids_max]
            yield Lot(
                epoch,
                [item[0] for _, item in part],
                [item[1] for _, item in part],
                list(dict.fromkeys(batch for batch, _ in part)),
            )
