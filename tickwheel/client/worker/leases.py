"""The heartbeat: leases of deliveries that handlers of one lane work on are kept up.

After a third of a lease it is extended, all that need it in one frame (an epoch), and all at once
on a new connection, where the daemon gives up what nobody claims within seconds. A lease is lost
when the daemon says so, or when it ended by this side's clock without a word from the daemon;
then whoever holds it is notified, once. Invariant: an extension never asks for a shorter lease than
the subscription's, and the clock of a lease starts when it was asked for, not when answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from tickwheel.client.connection import LOGGER, Connection
from tickwheel.client.delivery import Delivery
from tickwheel.client.subscription import SURE
from tickwheel.errors import TickwheelError
from tickwheel.protocol.frames import FrameType

if TYPE_CHECKING:
    from tickwheel.client.requests import Calls

EXTEND_AFTER = 1 / 3
"""The share of a lease after which it is extended."""
TICKS_PER_LEASE = 12


class Hold:
    """One delivery that is being worked on."""

    __slots__ = ("asking", "delivery", "lost", "since_s")

    def __init__(self, delivery: Delivery, since_s: float, lost: Callable[[str], None]) -> None:
        self.delivery = delivery
        self.since_s = since_s
        """When its lease began, at the latest."""
        self.lost = lost
        """Called with the daemon's word for it."""
        self.asking = False


class Leases:
    """Of one topic and group. A source of the reconnector; has a timer of its own."""

    def __init__(self, calls: Calls, topic: str, group: str, lease_s: float) -> None:
        self._reconnector = calls.reconnector
        self._call = calls.call
        self._names = topic, group
        self._lease_s = lease_s
        self._holds: dict[int, Hold] = {}
        """By the identity of the delivery: attempts of one task may overlap here."""
        self._timer: asyncio.TimerHandle | None = None

    # --- for jobs -------------------------------------------------------------------------------

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        """Keep its lease up until ``drop``."""
        since_s = delivery.lease_until_s - self._lease_s * SURE
        self._holds[id(delivery)] = Hold(delivery, since_s, lost)
        if self._timer is None:
            self._arm()

    def drop(self, delivery: Delivery) -> None:
        """Its handler has ended. Harmless when it is not held."""
        self._holds.pop(id(delivery), None)

    # --- the heartbeat --------------------------------------------------------------------------

    def _arm(self) -> None:
        delay_s = self._lease_s / TICKS_PER_LEASE
        self._timer = self._reconnector.loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._holds:
            return
        self._arm()
        now_s = self._reconnector.loop.time()
        for hold in [h for h in self._holds.values() if now_s >= h.since_s + self._lease_s]:
            self._lose(hold, f"not extended for {self._lease_s:g} s")
        if self._reconnector.connection is not None:
            due_s = now_s - self._lease_s * EXTEND_AFTER
            self._extend(hold for hold in self._holds.values() if hold.since_s <= due_s)

    def _extend(self, holds: Iterable[Hold]) -> None:
        wanted = sorted((h for h in holds if not h.asking), key=lambda h: h.delivery.epoch)
        for epoch, some in groupby(wanted, key=lambda h: h.delivery.epoch):
            group, step = list(some), self._reconnector.limits.ids_per_frame_max
            for start in range(0, len(group), step):
                part = group[start : start + step]
                for hold in part:
                    hold.asking = True
                self._reconnector.spawn(self._ask(epoch, part))

    async def _ask(self, epoch: int, holds: list[Hold]) -> None:
        asked_s, lease_ms = self._reconnector.loop.time(), int(self._lease_s * 1000)
        ids = [hold.delivery.id for hold in holds]
        attempts = [hold.delivery.attempt for hold in holds]
        try:
            words = await self._call(
                FrameType.EXTEND, *self._names, epoch, ids, attempts, lease_ms, repeat=False
            )
        except TickwheelError as error:
            LOGGER.info("leases were not extended: %s: %s", error.code, error.message)
            return
        finally:
            for hold in holds:
                hold.asking = False
        for hold, word in zip(holds, words or ["extended"] * len(holds), strict=False):
            if word == "extended":
                hold.since_s = asked_s
            else:
                self._lose(hold, str(word))

    def _lose(self, hold: Hold, word: str) -> None:
        # What was dropped meanwhile was finished: the word is about that.
        if self._holds.pop(id(hold.delivery), None) is hold:
            hold.lost(word)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Claim what is held, before the daemon gives it to others."""
        self._extend(self._holds.values())

    def down(self) -> None:
        """Nothing to do: leases last for some seconds without a connection."""

    def collect(self, connection: Connection) -> None:
        """Nothing of its own to write."""

    def sweep(self, now_s: float) -> None:
        """It has its own timer: leases may be short."""

    def stop(self, error: TickwheelError) -> None:
        """No more heartbeats."""
        self._holds.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
