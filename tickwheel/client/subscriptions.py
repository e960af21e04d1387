"""All subscriptions of one client, by the numbers that DELIVER frames carry."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tickwheel.client.acks import Acks
from tickwheel.client.calls import Calls
from tickwheel.client.connection import Connection
from tickwheel.client.delivery import FINISHED, Delivery, Parcel
from tickwheel.client.link import Link
from tickwheel.client.subscribing import Wish
from tickwheel.client.subscription import Subscription
from tickwheel.client.times import shown
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.protocol.frames import FrameType


class Subscriptions:
    """Where deliveries are sorted, and where reconnects are passed on."""

    def __init__(self, link: Link, calls: Calls, acks: Acks) -> None:
        self.link = link
        self.calls = calls
        self.acks = acks
        self._open: dict[int, Subscription] = {}
        self._last_number = 0

    def make(self, wish: Wish, prefetch: int) -> Subscription:
        """A subscription that is not started. Raises BadRequest."""
        self.check_prefetch(prefetch)
        self._last_number += 1
        return Subscription(self, self._last_number, wish, prefetch)

    def check_prefetch(self, prefetch: Any) -> None:
        limit = self.link.limits.prefetch_max
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
        """A DELIVER frame; one for a subscription that has ended is passed over."""
        subscription = self._open.get(sub)
        if subscription is None or not items:
            return
        topic, group, leased = subscription.topic, subscription.group, subscription.leased
        subscription.deliver(self.parcel(topic, group, epoch, delivered_ms, items, leased=leased))

    def ended(self, sub: int, error: TickwheelError) -> None:
        """The daemon ended a subscription: its group was deleted, or it reads too slowly."""
        subscription = self._open.get(sub)
        if subscription is not None:
            subscription.ended(error)

    def parcel(
        self, topic: str, group: str, epoch: int, delivered_ms: int, items: tuple[Any, ...],
        *, leased: bool = True,
    ) -> Parcel:  # fmt: skip
        """Deliveries of one frame. Raises ValueError when they are none."""
        if min(map(len, items)) < 4:
            raise ValueError("a delivery has fewer than 4 fields")
        calls = self.calls if leased else FINISHED
        acks = self.acks.channel(topic, group, epoch) if leased else FINISHED
        return Parcel(calls, acks, topic, group, epoch, delivered_ms, list(items[::-1]))

    def pulled(self, topic: str, group: str, answer: Any) -> list[Delivery]:
        """The answer to a PULL. Raises ValueError and the like when it is none."""
        epoch, delivered_ms, items = answer
        if not items:
            return []
        parcel = self.parcel(topic, group, epoch, delivered_ms, items)
        return [Delivery(parcel, item) for item in items]

    def give_back(self, topic: str, group: str, answer: Any) -> None:
        """The caller of a PULL has gone: its deliveries are free again at once."""
        epoch, _, items = answer
        if items:
            ids, attempts = [item[0] for item in items], [item[1] for item in items]
            self.link.spawn(self._release(topic, group, epoch, ids, attempts))

    async def _release(self, *fields: Any) -> None:
        with suppress(TickwheelError):
            await self.calls.call(FrameType.RELEASE, *fields, repeat=False)

    # --- a source of the link -------------------------------------------------------------------

    def up(self) -> None:
        for subscription in self.all():
            subscription.connection_up()

    def down(self) -> None:
        for subscription in self.all():
            subscription.connection_lost()

    def collect(self, connection: Connection) -> None:
        """Nothing of its own to write."""

    def sweep(self, now_s: float) -> None:
        """Each has its own timer: leases may be short."""

    def stop(self, error: TickwheelError) -> None:
        for subscription in self.all():
            subscription.fail(error)
        self._open.clear()
