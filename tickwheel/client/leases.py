"""Leases are kept up: those of deliveries that wait in a buffer, and those of handed-out ones.

``Extender`` is the timer and the EXTEND frames, all that need it in one frame (an epoch).
``Leases`` are the deliveries that somebody works on or holds. After a third of a lease it is
extended, and all at once on a new connection, where the daemon gives up what nobody claims within
seconds. A lease is lost when the daemon says so, or when it ended by this side's clock without a
word from the daemon; then whoever holds it is notified, once. Invariant: an extension never asks
for a shorter lease than the subscription's, and the clock of a lease starts when it was asked for,
not when answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from tickwheel.api.frames import FrameType
from tickwheel.client.connection import LOGGER, Connection
from tickwheel.client.delivery import Delivery
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from tickwheel.client.requests import Calls

SURE = 0.9
"""The share of a lease that is relied upon: its clock began at the daemon."""
EXTEND_AFTER = 1 / 3
"""The share of a lease after which held deliveries are extended."""
TICKS_PER_LEASE = 16
EXTENDED = "extended"


class Leased(Protocol):
    """Deliveries whose leases are extended together."""

    extending: bool
    """Whether the daemon is being asked to extend the leases."""


T = TypeVar("T", bound=Leased)


class Lot(NamedTuple, Generic[T]):
    """The receipts of one EXTEND frame, and their owners."""

    epoch: int
    ids: list[int]
    attempts: list[int]
    owners: list[T]


class Extender(Generic[T]):
    """Extends the leases of one topic and group. ``tick`` is called some times in a lease, from
    ``begin`` until it says that nothing is left to look after."""

    def __init__(
        self,
        calls: Calls,
        topic: str,
        group: str,
        lease_s: Callable[[], float],
        tick: Callable[[float], bool],
        extended: Callable[[Lot[T], float, Sequence[str]], None],
    ) -> None:
        """``extended`` gets the daemon's words for a lot, and when they were asked for."""
        self._reconnector = calls.reconnector
        self._call = calls.call
        self._names = topic, group
        self._lease_s = lease_s
        self._on_tick = tick
        self._extended = extended
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def begin(self) -> None:
        """Begin to tick, if that has not begun."""
        if self._timer is None and not self._stopped:
            delay_s = self._lease_s() / TICKS_PER_LEASE
            self._timer = self._reconnector.loop.call_later(delay_s, self._tick)

    def stop(self) -> None:
        """Tick no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if not self._stopped and self._on_tick(self._reconnector.loop.time()):
            self.begin()

    def extend(self, lots: Iterable[Lot[T]]) -> None:
        """Ask to extend these lots, if there is a connection."""
        if self._reconnector.connection is None:
            return
        for lot in lots:
            for owner in lot.owners:
                owner.extending = True
            self._reconnector.spawn(self._ask(lot))

    async def _ask(self, lot: Lot[T]) -> None:
        asked_s, lease_ms = self._reconnector.loop.time(), int(self._lease_s() * 1000)
        fields = (*self._names, lot.epoch, lot.ids, lot.attempts, lease_ms)
        try:
            words = await self._call(FrameType.EXTEND, *fields, repeat=False)
        except TickwheelError as error:
            LOGGER.info("leases were not extended: %s: %s", error.code, error.message)
            return
        finally:
            for owner in lot.owners:
                owner.extending = False
        self._extended(lot, asked_s, list(map(str, words or (EXTENDED for _ in lot.ids))))


class Hold:
    """One delivery whose lease is kept up while it is worked on."""

    __slots__ = ("delivery", "extending", "lost", "since_s")

    def __init__(self, delivery: Delivery, since_s: float, lost: Callable[[str], None]) -> None:
        self.delivery = delivery
        self.since_s = since_s
        """When the lease began, at the latest."""
        self.lost = lost
        """Called with the daemon's word when the lease is lost."""
        self.extending = False


InHand = tuple[Delivery, float, Callable[[str], None]]
"""(delivery, its ``lease_until_s`` when it was handed out, what to call with the daemon's word when
the lease is lost)."""


class Leases:
    """Keeps up the leases of one topic and group until ``close``. A source of the reconnector with
    a timer of its own.

    Whoever works on many short ones need not ``hold`` each: ``in_hand`` is asked, at every tick,
    what is worked on at the moment; after ``begin`` there are ticks.
    """

    def __init__(
        self,
        calls: Calls,
        topic: str,
        group: str,
        lease_s: float,
        in_hand: Callable[[], Iterable[InHand]] = tuple,
    ) -> None:
        self._reconnector = calls.reconnector
        self._in_hand = in_hand
        self._lease_s = lease_s
        self._holds: dict[int, Hold] = {}
        """Holds by the identity of their deliveries: attempts of one task may overlap here."""
        self._extender: Extender[Hold] = Extender(
            calls, topic, group, lambda: lease_s, self._tick, self._extended
        )
        self._reconnector.sources.append(self)

    # --- for those who work -----------------------------------------------------------------------

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        """Keep the delivery's lease up until ``drop``."""
        self._hold(delivery, delivery.lease_until_s, lost)
        self._extender.begin()

    def begin(self) -> None:
        """Begin to tick, because something is in hand; may be called again."""
        self._extender.begin()

    def _hold(self, delivery: Delivery, until_s: float, lost: Callable[[str], None]) -> None:
        self._holds[id(delivery)] = Hold(delivery, until_s - self._lease_s * SURE, lost)

    def _hold_in_hand(self) -> None:
        for delivery, until_s, lost in self._in_hand():
            if id(delivery) not in self._holds:
                self._hold(delivery, until_s, lost)

    def drop(self, delivery: Delivery) -> None:
        """Stop keeping up the lease of a delivery that is being settled, if it is held."""
        self._holds.pop(id(delivery), None)

    def close(self) -> list[Delivery]:
        """Keep no lease up any more; returns the deliveries that were held."""
        held = [hold.delivery for hold in self._holds.values()]
        self._holds.clear()
        self._extender.stop()
        if self in self._reconnector.sources:
            self._reconnector.sources.remove(self)
        return held

    # --- keeping them up --------------------------------------------------------------------------

    def _tick(self, now_s: float) -> bool:
        self._hold_in_hand()
        for hold in [h for h in self._holds.values() if now_s >= h.since_s + self._lease_s]:
            self._lose(hold, f"not extended for {self._lease_s:g} s")
        due_s = now_s - self._lease_s * EXTEND_AFTER
        self._extend(hold for hold in self._holds.values() if hold.since_s <= due_s)
        return bool(self._holds)

    def _extend(self, holds: Iterable[Hold]) -> None:
        wanted = [hold for hold in holds if not hold.extending]
        self._extender.extend(self._lots(wanted))

    def _lots(self, holds: list[Hold]) -> Iterator[Lot[Hold]]:
        holds.sort(key=_epoch)
        step = self._reconnector.limits.ids_per_frame_max
        for epoch, some in groupby(holds, key=_epoch):
            same = list(some)
            for start in range(0, len(same), step):
                part = same[start : start + step]
                ids = [hold.delivery.id for hold in part]
                yield Lot(epoch, ids, [hold.delivery.attempt for hold in part], part)

    def _extended(self, lot: Lot[Hold], asked_s: float, words: Sequence[str]) -> None:
        for hold, word in zip(lot.owners, words, strict=False):
            if word == EXTENDED:
                hold.since_s = asked_s
            else:
                self._lose(hold, word)

    def _lose(self, hold: Hold, word: str) -> None:
        # What was dropped meanwhile was finished: the word is about that.
        if self._holds.pop(id(hold.delivery), None) is hold:
            hold.lost(word)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Extend held leases on a new connection, before the daemon gives the tasks to others."""
        self._hold_in_hand()
        self._extend(self._holds.values())

    def down(self) -> None:
        """Do nothing: leases last for some seconds without a connection."""

    def collect(self, connection: Connection) -> None:
        """Do nothing: EXTEND frames are sent by the timer."""

    def sweep(self, now_s: float) -> None:
        """Do nothing: leases have a timer of their own, because they may be short."""

    def stop(self, error: TickwheelError) -> None:
        """Stop keeping up leases: the client is closed."""
        self._holds.clear()
        self._extender.stop()


def _epoch(hold: Hold) -> int:
    return hold.delivery.epoch
