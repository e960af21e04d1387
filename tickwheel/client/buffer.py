"""Deliveries that wait to be handed out, and how long their leases hold. No I/O, no clock.

Times are the event loop's, in seconds. Invariant: what is handed out has a lease that cannot have
ended yet, as far as this side can know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from tickwheel.client.delivery import Delivery, Parcel

SURE = 0.9
"""The share of a lease that is relied upon: its clock started at the daemon, not here."""
EXTEND_BELOW = 0.55
"""A lease with less than this share left is extended: after 0.45 to 0.5 of it, that is."""
GRACE_S = 5.0
"""A broken connection keeps its leases for so long at most."""


class Buffer:
    """Parcels in order of arrival. Those from before a broken connection are apart: others may
    have their tasks by now, so they wait until the daemon has extended them."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.dropped = 0
        """Deliveries whose lease ended here; the daemon delivers them again."""
        self._parcels: deque[Parcel] = deque()
        self._unsure: deque[Parcel] = deque()

    def __len__(self) -> int:
        return sum(len(parcel.items) for parcel in (*self._unsure, *self._parcels))

    def __bool__(self) -> bool:
        return len(self) > 0

    def put(self, parcel: Parcel, now_s: float) -> None:
        parcel.until_s = now_s + self.lease_s * SURE
        self._parcels.append(parcel)

    def take(self, now_s: float) -> Delivery | None:
        """The oldest delivery, removed; None when there is none."""
        parcels = self._parcels
        while parcels:
            parcel = parcels[0]
            if parcel.items:
                if now_s < parcel.until_s:
                    return Delivery(parcel, parcel.items.pop())
                self.dropped += len(parcel.items)
                parcel.items.clear()
            parcels.popleft()
        return None

    def set_lease(self, lease_s: float, now_s: float) -> None:
        """The daemon said how long leases are."""
        if lease_s < self.lease_s:
            for parcel in self._parcels:
                parcel.until_s = min(parcel.until_s, now_s + lease_s * SURE)
        self.lease_s = lease_s

    def connection_lost(self, now_s: float) -> None:
        self._unsure.extend(self._parcels)
        self._parcels.clear()
        for parcel in self._unsure:
            parcel.until_s = min(parcel.until_s, now_s + GRACE_S * SURE)

    def to_confirm(self, now_s: float) -> list[Parcel]:
        """Those from before, to be extended on the new connection if that can help."""
        self._drop_ended(now_s)
        return [parcel for parcel in self._unsure if not parcel.extending]

    def to_extend(self, now_s: float) -> list[Parcel]:
        """Parcels whose leases are half over, without those that are being extended."""
        self._drop_ended(now_s)
        latest_s = now_s + self.lease_s * (EXTEND_BELOW - 1 + SURE)
        return [
            parcel
            for parcel in self._parcels
            if parcel.items and not parcel.extending and now_s < parcel.until_s <= latest_s
        ]

    def extended(self, parcels: Iterable[Parcel], asked_s: float, stale: set[int]) -> None:
        """The daemon extended what waits in these parcels, all but the ``stale`` ones."""
        sure: list[Parcel] = []
        for parcel in parcels:
            parcel.until_s = asked_s + self.lease_s * SURE
            if stale:
                kept = [item for item in parcel.items if item[0] not in stale]
                self.dropped += len(parcel.items) - len(kept)
                parcel.items[:] = kept
            if parcel in self._unsure:
                self._unsure.remove(parcel)
                sure.append(parcel)
        self._parcels.extendleft(reversed(sure))

    def _drop_ended(self, now_s: float) -> None:
        for parcel in [parcel for parcel in self._unsure if parcel.until_s <= now_s]:
            self.dropped += len(parcel.items)
            self._unsure.remove(parcel)

    def clear(self) -> list[Parcel]:
        """Every parcel that still holds deliveries; they are out of the buffer then."""
        parcels = [parcel for parcel in (*self._unsure, *self._parcels) if parcel.items]
        self._unsure.clear()
        self._parcels.clear()
        return parcels


class Lot(NamedTuple):
    """Receipts of one frame, and the parcels they wait in."""

    epoch: int
    ids: list[int]
    attempts: list[int]
    parcels: list[Parcel]


def lots(parcels: Iterable[Parcel], ids_max: int) -> Iterator[Lot]:
    """What waits in ``parcels``, in order, as few frames' worth of receipts."""
    for epoch, some in groupby(parcels, attrgetter("epoch")):
        waiting = [(parcel, item) for parcel in some for item in reversed(parcel.items)]
        for start in range(0, len(waiting), ids_max):
            part = waiting[start : start + ids_max]
            yield Lot(
                epoch,
                [item[0] for _, item in part],
                [item[1] for _, item in part],
                list(dict.fromkeys(parcel for parcel, _ in part)),
            )
