"""A subscription: deliveries pushed by the daemon, buffered here, handed out one by one.

Keeps the subscription alive over reconnects and the leases of what waits in the buffer up; what
was handed out is its consumer's. Invariants: nothing is acked here; what was not handed out is
given back at the end without costing an attempt; nothing is handed out after ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tickwheel.client.buffer import Buffer, Lot, lots
from tickwheel.client.calls import retry_pause_s
from tickwheel.client.connection import LOGGER
from tickwheel.client.delivery import Delivery, Parcel
from tickwheel.client.futures import Signal
from tickwheel.errors import ClientClosed, Conflict, ProtocolError, TickwheelError
from tickwheel.protocol.frames import FrameType

if TYPE_CHECKING:
    from tickwheel.client.subscriptions import Subscriptions

LEASE_GUESS_S = 30.0
"""Until the daemon has said how long its leases are."""
TICKS_PER_LEASE = 16
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
        topic: str,
        group: str,
        prefetch: int,
        lease_ms: int | None,
    ) -> None:
        self.topic = topic
        self.group = group
        self._all = subscriptions
        self._link = subscriptions.link
        self._call = subscriptions.calls.call
        self._number = number
        self._prefetch = prefetch
        self._lease_ms = lease_ms
        self._buffer = Buffer(LEASE_GUESS_S if lease_ms is None else lease_ms / 1000)
        self._arrived = Signal()
        self._starting = asyncio.Lock()
        self._on = False
        self._closed = False
        self._error: TickwheelError | None = None
        self._subscribing = False
        self._missed = False
        """A new connection came while the subscribing was under way."""
        self._credit = prefetch
        """What the daemon was told; less than ``prefetch`` while an old buffer drains."""
        self._timer: asyncio.TimerHandle | None = None
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
                await self._release(self._buffer.clear())
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
        await self.close()

    def _end(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arrived.tell()

    def fail(self, error: TickwheelError) -> None:
        """No more deliveries will come; those who iterate are told."""
        if not self._closed:
            self._error = error
            self._end()

    # --- handing out ----------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
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
                self._link.spawn(self._restore_credit())
            self._streak = 0
            await self._arrived.wait()
        if self._error is not None and not isinstance(self._error, ClientClosed):
            raise self._error
        raise StopAsyncIteration

    async def batches(self, max_deliveries: int = 256) -> AsyncIterator[list[Delivery]]:
        """What is there, at least one, at most ``max_deliveries`` at a time."""
        async for first in self:
            batch = [first]
            now_s = self._link.loop.time()
            while len(batch) < max_deliveries:
                delivery = self._buffer.take(now_s)
                if delivery is None:
                    break
                batch.append(delivery)
            self._streak = STREAK_MAX
            yield batch

    def deliver(self, parcel: Parcel) -> None:
        """Deliveries have come."""
        self._buffer.put(parcel, self._link.loop.time())
        self._arrived.tell()
        if self._timer is None and not self._closed:
            self._arm()

    # --- over reconnects ------------------------------------------------------------------------

    def connection_lost(self) -> None:
        self._buffer.connection_lost(self._link.loop.time())

    def connection_up(self) -> None:
        """Subscribe again, and keep what was delivered before."""
        if self._closed:
            return
        self._missed = True
        if self._on and not self._subscribing:
            self._resuming = self._link.spawn(self._resume())
            self._extend(self._buffer.to_confirm(self._link.loop.time()))

    async def _resume(self) -> None:
        tries = 0
        while not self._closed:
            try:
                await self._subscribe()
                return
            except TickwheelError as error:
                if not error.retryable:
                    LOGGER.error(
                        "subscription to %s ended: %s: %s", self.topic, error.code, error.message
                    )
                    self.fail(error)
                    return
            await asyncio.sleep(retry_pause_s(tries))
            tries += 1

    async def _subscribe(self) -> None:
        self._subscribing = True
        try:
            self._missed = True
            while self._missed and not self._closed:
                self._missed = False
                # What waits here from before counts: a flapping line must not pile up work.
                self._credit = max(0, self._prefetch - len(self._buffer))
                options = {} if self._lease_ms is None else {"lease_ms": self._lease_ms}
                fields = (self._number, self.topic, self.group, self._credit, options)
                try:
                    answer = await self._call(FrameType.SUBSCRIBE, *fields)
                except Conflict:
                    continue  # asked again on a new connection, which had the repeat already
                self._set_lease(answer)
        finally:
            self._subscribing = False

    def _set_lease(self, answer: Any) -> None:
        try:
            lease_ms = int(answer["lease_ms"])
        except (TypeError, LookupError, ValueError):
            raise ProtocolError(f"SUBSCRIBE's answer has no lease_ms: {answer!r:.100}") from None
        self._buffer.set_lease(lease_ms / 1000, self._link.loop.time())

    async def _restore_credit(self) -> None:
        """The old buffer is handed out: the whole prefetch from now on."""
        with suppress(TickwheelError):
            await self._call(FrameType.PREFETCH, self._number, self._prefetch, repeat=False)

    # --- leases of what waits -------------------------------------------------------------------

    def _arm(self) -> None:
        delay_s = self._buffer.lease_s / TICKS_PER_LEASE
        self._timer = self._link.loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._buffer and not self._closed:
            self._arm()
            if self._link.connection is not None:
                self._extend(self._buffer.to_extend(self._link.loop.time()))

    def _extend(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            parcel.extending = True
        for lot in lots(parcels, self._link.limits.ids_per_frame_max):
            self._link.spawn(self._extend_lot(lot))

    async def _extend_lot(self, lot: Lot) -> None:
        asked_s, lease_ms = self._link.loop.time(), int(self._buffer.lease_s * 1000)
        head = (FrameType.EXTEND, self.topic, self.group, lot.epoch, lot.ids, lot.attempts)
        try:
            words = await self._call(*head, lease_ms, repeat=False)
        except TickwheelError as error:
            LOGGER.info("leases that wait were not extended: %s: %s", error.code, error.message)
            return
        finally:
            for parcel in lot.parcels:
                parcel.extending = False
        said = zip(lot.ids, words or (), strict=False)
        stale = {task_id for task_id, word in said if word != "extended"}
        self._buffer.extended(lot.parcels, asked_s, stale)
        self._arrived.tell()

    async def _release(self, parcels: Iterable[Parcel]) -> None:
        """Give deliveries back unstarted; if that fails their leases end by themselves."""
        # The last lot first: each goes to the front of the line.
        for lot in reversed(list(lots(parcels, self._link.limits.ids_per_frame_max))):
            fields = (self.topic, self.group, lot.epoch, lot.ids, lot.attempts)
            with suppress(TickwheelError):
                await self._call(FrameType.RELEASE, *fields, repeat=False)
