"""A subscription: deliveries pushed by the daemon, buffered here, handed out one by one.

Keeps the subscription alive over reconnects and the leases of what waits in the buffer up; what
was handed out is its consumer's. Invariants: nothing is acked here; what was not handed out is
given back at the end without costing an attempt; nothing is handed out after ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tickwheel.client.autoack import AutoAck, Reader
from tickwheel.client.buffer import Buffer
from tickwheel.client.calls import retry_pause_s
from tickwheel.client.connection import LOGGER
from tickwheel.client.delivery import Delivery, Parcel
from tickwheel.client.futures import Signal
from tickwheel.client.subscribing import Wish
from tickwheel.client.upkeep import Upkeep
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    Conflict,
    ConnectionLost,
    NotFound,
    ProtocolError,
    TickwheelError,
)
from tickwheel.protocol.frames import FrameType

if TYPE_CHECKING:
    from tickwheel.client.subscriptions import Subscriptions

LEASE_GUESS_S = 30.0
"""Until the daemon has said how long its leases are."""
STREAK_MAX = 128
"""So many deliveries are handed out before the event loop gets its turn: acks leave, and more
deliveries come in, while a fast consumer works."""


class Subscription:
    """``async with client.subscribe(…) as deliveries: async for delivery in deliveries: …``

    Several tasks may iterate over one subscription; each delivery goes to one of them. Without
    ``async with`` it starts at the first delivery asked for and ends with the client.
    """

    def __init__(
        self,
        subscriptions: Subscriptions,
        number: int,
        wish: Wish,
        prefetch: int,
    ) -> None:
        self.topic, self.group, self.leased = wish.topic, wish.group, wish.leased
        self._wish = wish
        self._auto = AutoAck() if wish.auto_ack else None
        self._all = subscriptions
        self._link = subscriptions.link
        self._call = subscriptions.calls.call
        self._number = number
        self._prefetch = prefetch
        self._buffer = Buffer(_lease_guess_s(wish))
        self._arrived = Signal()
        self._upkeep = Upkeep(
            subscriptions.calls, self._buffer, self.topic, self.group, self._arrived.tell
        )
        self._starting = asyncio.Lock()
        self._on = False
        self._closed = False
        self._error: TickwheelError | None = None
        self._subscribing = False
        self._credit = prefetch
        """What the daemon was told; less than ``prefetch`` while an old buffer drains."""
        self._streak = 0
        self._resuming: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Subscribe. Raises what the daemon objects to. Harmless when it is started."""
        async with self._starting:
            if not self._on and not self._closed:
                self._all.add(self._number, self)
                try:
                    await self._subscribe()
                except BaseException:
                    # The daemon may have done it all the same, or be about to.
                    self._end()
                    self._link.spawn(self._leave())
                    raise
                self._on = True
        return self

    async def close(self) -> None:
        """No more deliveries; those not handed out go back. Harmless when it is closed."""
        if not self._closed:
            self._end()
            await self._leave()

    async def _leave(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()  # a SUBSCRIBE after the UNSUBSCRIBE would stay for ever
        try:
            if self._link.connection is not None:
                with suppress(TickwheelError):
                    await self._call(FrameType.UNSUBSCRIBE, self._number, repeat=False)
                if self.leased:
                    await self._upkeep.release()
        finally:
            self._all.remove(self._number)

    async def set_prefetch(self, prefetch: int) -> None:
        """How many unsettled deliveries the daemon may have out here; 0 pauses."""
        self._all.check_prefetch(prefetch)
        self._prefetch = prefetch
        if self._on:
            self._credit = prefetch
            await self._call(FrameType.PREFETCH, self._number, prefetch)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._auto is not None:
                await self._auto.left(error)
        finally:
            await self.close()

    def _end(self) -> None:
        self._closed = True
        self._upkeep.stop()
        self._arrived.tell()

    def fail(self, error: TickwheelError) -> None:
        """No more deliveries will come; those who iterate are told."""
        if not self._closed:
            self._error = error
            self._end()

    def ended(self, error: TickwheelError) -> None:
        """The daemon has, or wants, no such subscription any more."""
        LOGGER.error("subscription to %s ended: %s: %s", self.topic, error.code, error.message)
        self.fail(error)
        self._link.spawn(self._leave())

    # --- handing out ----------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self if self._auto is None else self._auto.reader(self._take)

    @property
    def lease_s(self) -> float:
        """How long its leases are, by the daemon's last word."""
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
            delivery = self._buffer.take(self._link.loop.time())
            if delivery is not None:
                self._streak += 1
                return delivery
            if self._credit != self._prefetch and not self._subscribing:
                self._credit = self._prefetch
                # The old buffer is handed out: the whole prefetch from now on.
                self._link.spawn(self._tell_credit())
            self._streak = 0
            await self._arrived.wait()
        if self._error is not None and not isinstance(self._error, ClientClosed):
            raise self._error
        raise StopAsyncIteration

    async def batches(self, max_deliveries: int = 256) -> AsyncIterator[list[Delivery]]:
        """What is there, at least one, at most ``max_deliveries`` at a time."""
        source = aiter(self)
        async for first in source:
            batch = [first]
            now_s = self._link.loop.time()
            while len(batch) < max_deliveries:
                delivery = self._buffer.take(now_s)
                if delivery is None:
                    break
                batch.append(delivery)
            self._streak = STREAK_MAX
            if isinstance(source, Reader):
                source.took(batch)
            yield batch

    def deliver(self, parcel: Parcel) -> None:
        """Deliveries have come."""
        self._buffer.put(parcel, self._link.loop.time())
        self._arrived.tell()
        if not self.leased:
            self._hold_back()
        else:
            self._upkeep.begin()

    def _hold_back(self) -> None:
        """Nothing is acked, so nothing but this keeps a daemon from sending ever more."""
        if self._credit and len(self._buffer) >= self._prefetch:
            self._credit = 0
            self._link.spawn(self._tell_credit())

    # --- over reconnects ------------------------------------------------------------------------

    def connection_lost(self) -> None:
        if self.leased:
            self._buffer.connection_lost(self._link.loop.time())

    def connection_up(self) -> None:
        """Subscribe again, and keep what was delivered before."""
        if self._closed or not self._on:
            return
        if self._resuming is None or self._resuming.done():
            self._resuming = self._link.spawn(self._resume())
        self._upkeep.confirm()

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
        self._subscribing, undone = True, False
        try:
            while not self._closed:
                # What waits here from before counts: a flapping line must not pile up work.
                self._credit = max(0, self._prefetch - len(self._buffer))
                fields = self._wish.fields(self._number, self._credit)
                try:
                    # Not repeated by itself: whatever answers did so on the present connection.
                    answer = await self._call(FrameType.SUBSCRIBE, *fields, repeat=False)
                except ConnectionLost:
                    continue
                except Conflict:
                    if undone or not await self._undo():
                        raise
                    undone = True
                    continue
                self._set_lease(answer)
                return
        finally:
            self._subscribing = False

    async def _undo(self) -> bool:
        """Whether the number was taken: by a SUBSCRIBE that was done, but not answered in time.
        Else the conflict is about something else."""
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
            raise ProtocolError(f"SUBSCRIBE's answer has no lease_ms: {answer!r:.100}") from None
        if self.leased:
            self._buffer.set_lease(lease_ms / 1000, self._link.loop.time())

    async def _tell_credit(self) -> None:
        with suppress(TickwheelError):
            await self._call(FrameType.PREFETCH, self._number, self._credit, repeat=False)


def _lease_guess_s(wish: Wish) -> float:
    if not wish.leased:
        return float("inf")
    return LEASE_GUESS_S if wish.lease_ms is None else wish.lease_ms / 1000
