"""Extends the leases of buffered deliveries, and of deliveries in handlers.

``Extender`` has the timer and sends the EXTEND frames, with all leases of an epoch in one frame.
``Leases`` has the deliveries that a program works on. A lease is extended after a third of it has
passed, and on a new connection, because the daemon soon ends the leases of a broken one. A lease is
lost when the daemon says so, or when it has ended by this side's clock without an answer; its
holder is then notified once. Invariants: an extension never requests a shorter lease than the
subscription's, and a lease is counted from the request, not from the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from tickwheel.api.frames import FrameType
from tickwheel.api.times import duration_ms
from tickwheel.client.connection import LOGGER
from tickwheel.client.delivery import Delivery
from tickwheel.client.reconnector import Source
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from tickwheel.client.requests import Calls

SURE = 0.9
"""Share of a lease that is relied upon, because the lease began earlier at the daemon."""
EXTEND_AFTER = 1 / 3
"""Share of a lease after which held deliveries are extended."""
TICKS_PER_LEASE = 16
EXTENDED = "extended"


class Leased(Protocol):
    """Deliveries whose leases are extended together."""

    extending: bool
    """Whether an EXTEND for these leases is unanswered."""


T = TypeVar("T", bound=Leased)


class Lot(NamedTuple, Generic[T]):
    """The receipts of one EXTEND frame, and their owners."""

    epoch: int
    ids: list[int]
    attempts: list[int]
    owners: list[T]


class Extender(Generic[T]):
    """Extends the leases of one topic and group. ``tick`` is called several times in a lease, from
    ``begin`` until it returns False."""

    def __init__(
        self,
        calls: Calls,
        topic: str,
        group: str,
        lease_s: Callable[[], float],
        tick: Callable[[float], bool],
        extended: Callable[[Lot[T], float, Sequence[str]], None],
    ) -> None:
        """``extended`` gets a lot, the time of its request, and the daemon's answer for each id."""
        self._reconnector = calls.reconnector
        self._call = calls.call
        self._names = topic, group
        self._lease_s = lease_s
        self._on_tick = tick
        self._extended = extended
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def begin(self) -> None:
        """Start the timer, unless it runs."""
        if self._timer is None and not self._stopped:
            delay_s = self._lease_s() / TICKS_PER_LEASE
            self._timer = self._reconnector.loop.call_later(delay_s, self._tick)

    def stop(self) -> None:
        """Stop the timer for good."""
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
        sent_s, lease_ms = self._reconnector.loop.time(), duration_ms(self._lease_s(), "lease")
        fields = (*self._names, lot.epoch, lot.ids, lot.attempts, lease_ms)
        try:
            words = await self._call(FrameType.EXTEND, *fields, repeat=False)
        except TickwheelError as error:
            LOGGER.info("leases were not extended: %s: %s", error.code, error.message)
            return
        finally:
            for owner in lot.owners:
                owner.extending = False
        self._extended(lot, sent_s, list(map(str, words or (EXTENDED for _ in lot.ids))))


class Hold:
    """One delivery whose lease is extended while a program works on it."""

    __slots__ = ("delivery", "extending", "lost", "since_s")

    def __init__(self, delivery: Delivery, since_s: float, lost: Callable[[str], None]) -> None:
        self.delivery = delivery
        self.since_s = since_s
        """The latest possible beginning of the lease."""
        self.lost = lost
        """Called with the daemon's answer when the lease is lost."""
        self.extending = False


InHand = tuple[Delivery, float, Callable[[str], None]]
"""(delivery, its ``lease_until_s`` when it was received, a callback that gets the daemon's answer
when the lease is lost)."""


class Leases(Source):
    """Extends the leases of one topic and group until ``close``. A source of the reconnector with
    a separate timer.

    A program with many short handlers need not ``hold`` each delivery: every tick asks ``in_hand``
    for the current ones. ``begin`` starts the ticks.
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
        """Holds by the identity of their deliveries: several attempts of a task may be held."""
        self._extender: Extender[Hold] = Extender(
            calls, topic, group, lambda: lease_s, self._tick, self._extended
        )
        self._reconnector.sources.append(self)

    # --- for programs -----------------------------------------------------------------------------

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        """Extend the delivery's lease until ``drop``."""
        self._hold(delivery, delivery.lease_until_s, lost)
        self._extender.begin()

    def begin(self) -> None:
        """Start to tick for deliveries of ``in_hand``. Can be called again."""
        self._extender.begin()

    def _hold(self, delivery: Delivery, until_s: float, lost: Callable[[str], None]) -> None:
        self._holds[id(delivery)] = Hold(delivery, until_s - self._lease_s * SURE, lost)

    def _hold_in_hand(self) -> None:
        for delivery, until_s, lost in self._in_hand():
            if id(delivery) not in self._holds:
                self._hold(delivery, until_s, lost)

    def drop(self, delivery: Delivery) -> None:
        """Stop extending the lease of a delivery that is being settled, if it is held."""
        self._holds.pop(id(delivery), None)

    def close(self) -> list[Delivery]:
        """Extend no more leases. Return the deliveries that were held."""
        held = [hold.delivery for hold in self._holds.values()]
        self._holds.clear()
        self._extender.stop()
        if self in self._reconnector.sources:
            self._reconnector.sources.remove(self)
        return held

    # --- extending --------------------------------------------------------------------------------

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
        for epoch, members in groupby(holds, key=_epoch):
            same = list(members)
            for start in range(0, len(same), step):
                part = same[start : start + step]
                ids = [hold.delivery.id for hold in part]
                yield Lot(epoch, ids, [hold.delivery.attempt for hold in part], part)

    def _extended(self, lot: Lot[Hold], sent_s: float, words: Sequence[str]) -> None:
        for hold, word in zip(lot.owners, words, strict=False):
            if word == EXTENDED:
                hold.since_s = sent_s
            else:
                self._lose(hold, word)

    def _lose(self, hold: Hold, word: str) -> None:
        # A delivery that is no longer held was settled, and the answer is about that.
        if self._holds.pop(id(hold.delivery), None) is hold:
            hold.lost(word)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Extend held leases on a new connection, before the daemon gives the tasks to others. A
        failed extension is repeated with the next tick, like that of an older lease."""
        self._hold_in_hand()
        due_s = self._reconnector.loop.time() - self._lease_s * EXTEND_AFTER
        for hold in self._holds.values():
            hold.since_s = min(hold.since_s, due_s)
        self._extend(self._holds.values())

    def stop(self, error: TickwheelError) -> None:
        """Stop extending leases: the client is closed."""
        self._holds.clear()
        self._extender.stop()


def _epoch(hold: Hold) -> int:
    return hold.delivery.epoch
