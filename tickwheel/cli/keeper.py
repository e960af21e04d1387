"""Leases kept up while a delivery is held, and given back at the end."""

from __future__ import annotations

import asyncio
import contextlib

from tickwheel.client import Delivery
from tickwheel.errors import TickwheelError

EXTENSIONS_PER_LEASE = 3
"""So many tries before a lease is over: one lost answer is no reason to deliver again."""


class Keeper:
    """Holds deliveries; the lease of each is extended until it is dropped or released."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held: dict[int, Delivery] = {}
        self._running: asyncio.Task[None] | None = None

    def hold(self, delivery: Delivery) -> None:
        self._held[delivery.id] = delivery
        if self._running is None:
            self._running = asyncio.create_task(self._keep())

    def drop(self, delivery: Delivery) -> None:
        """It is being settled; its lease is somebody else's business now."""
        self._held.pop(delivery.id, None)

    async def release_all(self) -> None:
        """Give back what is held, without a cost in attempts. Harmless when nothing is."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        held = list(self._held.values())
        self._held.clear()
        # A release that fails is no loss: the lease ends by itself.
        await asyncio.gather(*(d.release() for d in held), return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / EXTENSIONS_PER_LEASE)
            for delivery in list(self._held.values()):
                with contextlib.suppress(TickwheelError):
                    await delivery.extend(self._lease_s)
