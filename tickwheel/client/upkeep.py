"""Leases of what waits in one subscription's buffer: extended while it waits, given up at the end.

Invariant: nothing is extended that was handed out; the consumer's work is the consumer's (a
worker extends what its handlers work on, see ``worker/leases.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tickwheel.client.buffer import Buffer, Lot, lots
from tickwheel.client.calls import Calls
from tickwheel.client.connection import LOGGER
from tickwheel.client.delivery import Parcel
from tickwheel.errors import TickwheelError
from tickwheel.protocol.frames import FrameType

TICKS_PER_LEASE = 16


class Upkeep:
    """Works from the first ``begin`` to ``stop``, while the buffer holds anything."""

    def __init__(
        self, calls: Calls, buffer: Buffer, topic: str, group: str, changed: Callable[[], None]
    ) -> None:
        self._link = calls.link
        self._call = calls.call
        self._buffer = buffer
        self._names = topic, group
        self._changed = changed
        """Told when deliveries that were held back may be handed out."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def begin(self) -> None:
        """The buffer holds something."""
        if self._timer is None and not self._stopped:
            delay_s = self._buffer.lease_s / TICKS_PER_LEASE
            self._timer = self._link.loop.call_later(delay_s, self._tick)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._buffer and not self._stopped:
            self.begin()
            if self._link.connection is not None:
                self._extend(self._buffer.to_extend(self._link.loop.time()))

    def confirm(self) -> None:
        """A new connection: what was delivered on the old one has a lease still, or not."""
        self._extend(self._buffer.to_confirm(self._link.loop.time()))

    def _extend(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            parcel.extending = True
        for lot in lots(parcels, self._link.limits.ids_per_frame_max):
            self._link.spawn(self._extend_lot(lot))

    async def _extend_lot(self, lot: Lot) -> None:
        asked_s, lease_ms = self._link.loop.time(), int(self._buffer.lease_s * 1000)
        head = (FrameType.EXTEND, *self._names, lot.epoch, lot.ids, lot.attempts)
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
        self._changed()

    async def release(self) -> None:
        """Give all that waits back unstarted; if that fails their leases end by themselves."""
        # The last lot first: each goes to the front of the line.
        parcels, limit = self._buffer.clear(), self._link.limits.ids_per_frame_max
        for lot in reversed(list(lots(parcels, limit))):
            with suppress(TickwheelError):
                await self._call(
                    FrameType.RELEASE, *self._names, lot.epoch, lot.ids, lot.attempts, repeat=False
                )
