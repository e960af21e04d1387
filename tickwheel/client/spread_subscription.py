"""A subscription over several shards: one per shard, all read through a single front.

Imported with ``client/shards.py`` once a client has learnt of several shards. Invariants:

* A delivery is settled, and its lease extended, at the shard that sent it.
* An unreachable shard does not delay the others: its subscription starts when it is back.
* A prefetch that the caller has set is divided. Each shard gets at least 1, and all shards together
  never deliver more than the prefetch, or than one per shard if it is smaller than their number.
  Credit moves to the shards that report waiting tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.groups import MadeGroup
from tickwheel.client.connection import LOGGER
from tickwheel.client.leases import Leases
from tickwheel.client.merging import raise_first
from tickwheel.client.requests import retry_pause_s
from tickwheel.client.subscription import PART_BYTES_MIN, Buffer, Subscription
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.leases import InHand
    from tickwheel.client.link import Link

JOIN_S = 2.0
"""Seconds that a subscription or a pull waits for unreachable shards once one is connected."""
IN_A_ROW = 16
"""Deliveries of one shard before the turn of the next."""
BALANCE_PAUSE_S, BALANCE_PAUSE_MAX_S = 0.2, 1.6
"""Minimum and maximum seconds between checks of which shards have waiting tasks. The pause doubles
after each check that moved no credit."""


class ShareUse(NamedTuple):
    """How much of its share of a prefetch a shard uses, and how many tasks wait there."""

    share: int
    """The shard's part of the prefetch."""
    in_flight: int
    ready: int
    """The group's ready tasks at the shard, which wait for credit."""

    @property
    def is_short(self) -> bool:
        """Whether tasks wait because the share is used up."""
        return self.ready > 0 and self.in_flight >= self.share


def divide(prefetch: int, loads: Sequence[ShareUse]) -> list[int]:
    """Divide a prefetch: each shard gets at least 1, the rest is divided by max-min fairness. A
    shard's demand is its used and usable credit. The rest beyond all demands is divided equally."""
    shares = [1] * len(loads)
    left = prefetch - len(loads)
    demands = [load.in_flight + load.ready * load.is_short for load in loads]
    order = sorted(range(len(loads)), key=demands.__getitem__)
    for limits in (demands, [prefetch] * len(loads)):
        for position, index in enumerate(order):
            equal = left // (len(order) - position)
            more = max(0, min(equal, limits[index] - shares[index]))
            shares[index] += more
            left -= more
    return shares


class SpreadBuffer(Buffer):
    """Reads the deliveries of all shards in turn, up to ``IN_A_ROW`` from each."""

    def __init__(self, lease_s: float) -> None:
        super().__init__(lease_s)
        self.parts: list[Subscription] = []
        self._turn = self._left = 0
        self._current = Buffer(lease_s)
        """The buffer of the current shard, whose turn lasts for ``_left`` more deliveries."""

    def __len__(self) -> int:
        return sum(len(part._buffer) for part in self.parts)

    def take(self, now_s: float) -> Delivery | None:
        if self._left:
            delivery = self._current.take(now_s)
            if delivery is not None:
                self._left -= 1
                return delivery
        parts = self.parts
        for _ in parts:
            self._turn = (self._turn + 1) % len(parts)
            part = parts[self._turn]
            delivery = part._buffer.take(now_s)
            if delivery is not None:
                self._current, self._left = part._buffer, IN_A_ROW - 1
                return delivery
            part.refill()
        self._left = 0
        return None


class SpreadSubscription:
    """One subscription per shard, all read through a single front subscription."""

    def __init__(self, links: Sequence[Link], front: Subscription) -> None:
        self._links = links
        self._front = front
        self.buffer = SpreadBuffer(front._buffer.lease_s)
        self._leases: list[SpreadLeases] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._shares = self._equal_shares(front._prefetch)
        """The prefetch of each shard, at least the value that its daemon may currently use."""
        self._dividing = asyncio.Lock()
        self._balancing: asyncio.Task[None] | None = None

    @property
    def _parts(self) -> list[Subscription]:
        return self.buffer.parts

    async def start(self) -> None:
        """Subscribe at all connected shards; unreachable ones join later. Raise a shard's
        refusal, or an error if no shard is connected."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + JOIN_S
        joining = {loop.create_task(self._join(shard)): shard for shard in range(self._count)}
        try:
            waiting, errors = set(joining), {}
            while waiting:
                left_s = max(0.0, until_s - loop.time()) if self._parts else None
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                errors.update({t: error for t in done if (error := t.exception()) is not None})
                for error in errors.values():
                    if not isinstance(error, TickwheelError) or not error.retryable:
                        raise error
                if not done and left_s is not None:
                    break
            if not self._parts:
                raise next(iter(errors.values()))
        except BaseException:
            for task in joining:
                task.cancel()
            raise
        for task in waiting:
            task.cancel()
        for task in (*errors, *waiting):
            self._join_later(joining[task])
        self._begin_balancing()

    @property
    def _count(self) -> int:
        return len(self._links)

    def _equal_shares(self, prefetch: int) -> list[int]:
        """Return the initial share of each shard: an equal part of at least 1, unless the prefetch
        is 0. A default prefetch is not divided."""
        if not self._front._divides:
            return [prefetch] * self._count
        each, extra = divmod(prefetch, self._count)
        return [max(each + (shard < extra), min(prefetch, 1)) for shard in range(self._count)]

    async def _join(self, shard: int) -> None:
        """Subscribe at one shard."""
        front = self._front
        link = self._links[shard]
        link.ready()  # so that cancelling this join does not end the other waiters
        await link.connect()
        part = link.subscriptions.make(front._options, self._shares[shard])
        part._front, part._arrived, part.mismatch = front, front._arrived, front.mismatch
        part._bytes_max = max(PART_BYTES_MIN, front._bytes_max // self._count)
        await part.start()
        if front._closed:
            await part.close()
            return
        self._parts.append(part)
        part._shard = shard
        self.buffer.lease_s = min(part.lease_s for part in self._parts)
        for leases in self._leases:
            leases.add(part)
        front._arrived.notify()
        if part._prefetch != self._shares[shard]:
            try:
                await part.set_prefetch(self._shares[shard])
            except TickwheelError as error:
                if not error.retryable:
                    raise
                # The part subscribes again with this share when the shard is back: do not join
                # twice.

    def _join_later(self, shard: int) -> None:
        task = self._front._reconnector.spawn(self._keep_joining(shard))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _keep_joining(self, shard: int) -> None:
        front, tries = self._front, 0
        LOGGER.warning(
            "shard %d is unreachable; the subscription to %s goes on without it", shard, front.topic
        )
        while not front._closed:
            try:
                await self._join(shard)
                return
            except TickwheelError as error:
                if not error.retryable:
                    front.ended(error)
                    return
            await asyncio.sleep(retry_pause_s(tries))
            tries += 1

    @property
    def new_group(self) -> MadeGroup | None:
        """A description of the group, if one of the shards created it."""
        return MadeGroup.joined(part.new_group for part in self._parts)

    async def close(self) -> None:
        """End the subscriptions on all shards."""
        for task in (*self._joining, self._balancing):
            if task is not None:
                task.cancel()
        for part in self._parts:
            part._end()
        await asyncio.gather(*(part._leave() for part in self._parts), return_exceptions=True)

    # --- the prefetch ---------------------------------------------------------------------------

    async def set_prefetch(self, prefetch: int) -> None:
        """Divide a new prefetch in proportion to the current shares. An unreachable shard gets its
        share when it is back."""
        async with self._dividing:
            if 0 in self._shares or prefetch < self._count:
                self._shares = self._equal_shares(prefetch)
            else:
                self._shares = divide(
                    prefetch, [ShareUse(share, share, 0) for share in self._shares]
                )
            requests = []
            for part in self._parts:
                share = self._shares[part._shard]
                if part._reconnector.connection is None:
                    part._prefetch = share
                else:
                    requests.append(part.set_prefetch(share))
            raise_first(await asyncio.gather(*requests, return_exceptions=True))
        self._begin_balancing()

    def _begin_balancing(self) -> None:
        """Start to move credit to shards with waiting tasks, if there is credit to divide."""
        front = self._front
        if self._balancing is None and front._divides and front.leased:
            self._balancing = front._reconnector.spawn(self._balance())

    async def _balance(self) -> None:
        """Move credit repeatedly while deliveries arrive or tasks wait for credit."""
        pause_s, received, is_short = BALANCE_PAUSE_S, 0, False
        while True:
            await asyncio.sleep(pause_s)
            before, received = received, sum(part.received for part in self._parts)
            has_moved = False
            if self._front._prefetch > self._count and (is_short or received != before):
                try:
                    async with self._dividing:
                        is_short, has_moved = await self._move_credit()
                except TickwheelError as error:
                    # A daemon of an older release does not report its use. The shares stay as they
                    # are.
                    LOGGER.info(
                        "balancing credit between shards failed: %s: %s", error.code, error.message
                    )
                    return
            pause_s = BALANCE_PAUSE_S if has_moved else min(2 * pause_s, BALANCE_PAUSE_MAX_S)

    async def _move_credit(self) -> tuple[bool, bool]:
        """Move credit from shards that do not use it to shards with tasks that wait for credit.
        Return whether a shard was short of credit, and whether credit moved. A shard gets only
        credit that others have given up and no longer use."""
        parts = [part for part in self._parts if part.takes_credit]
        loads = await self._update_shares({part: self._shares[part._shard] for part in parts})
        if not any(load.is_short for load in loads.values()):
            return False, False
        others = sum(self._shares) - sum(load.share for load in loads.values())
        prefetch = self._front._prefetch - others
        wanted = dict(zip(loads, divide(prefetch, [*loads.values()]), strict=True))
        less = {part: share for part, share in wanted.items() if share < loads[part].share}
        loads |= await self._update_shares(less)
        free = prefetch - sum(max(load.share, load.in_flight) for load in loads.values())
        more = {}
        for part, share in wanted.items():
            added = min(share - loads[part].share, free)
            if added > 0:
                free -= added
                more[part] = loads[part].share + added
        await self._update_shares(more)
        return True, bool(less or more)

    async def _update_shares(
        self, shares: Mapping[Subscription, int]
    ) -> dict[Subscription, ShareUse]:
        """Set these shares. Return the use of each reachable shard."""
        uses = await asyncio.gather(*(self._update(part, share) for part, share in shares.items()))
        return {part: use for part, use in zip(shares, uses, strict=True) if use is not None}

    async def _update(self, part: Subscription, share: int) -> ShareUse | None:
        """Set the share of one shard. Return its use, or None if it is unreachable; then it gets
        the share when it is back. Until it answers, the greater share counts, because the daemon
        may have either. Raise the daemon's refusal."""
        self._shares[part._shard] = max(share, self._shares[part._shard])
        try:
            use = ShareUse(share, *await part.update_prefetch(share))
        except TickwheelError as error:
            if not error.retryable:
                raise
            return None
        self._shares[part._shard] = share
        return use

    async def give_back(self) -> None:
        await asyncio.gather(*(part.give_back() for part in self._parts))

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]]) -> SpreadLeases:
        leases = SpreadLeases(self._parts, in_hand)
        self._leases.append(leases)
        return leases


class SpreadLeases(Leases):
    """``Leases`` for the deliveries of several shards."""

    def __init__(
        self, parts: Iterable[Subscription], in_hand: Callable[[], Iterable[InHand]]
    ) -> None:
        self._in_hand = in_hand
        self._by_calls: dict[Any, Leases] = {}
        """The leases of each shard's deliveries, by the calls of its link."""
        self._is_closed = False
        for part in parts:
            self.add(part)

    def add(self, part: Subscription) -> None:
        """Extend leases of a part that joined."""
        if not self._is_closed:
            calls = part._all.calls
            leases = part.keep_leases(lambda: self._in_hand_of(calls))
            self._by_calls[calls] = leases

    def _in_hand_of(self, calls: Any) -> Iterable[InHand]:
        return (entry for entry in self._in_hand() if entry[0]._batch.calls is calls)

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        leases = self._by_calls.get(delivery._batch.calls)
        if leases is not None:  # a delivery without acks has no lease
            leases.hold(delivery, lost)

    def begin(self) -> None:
        for leases in self._by_calls.values():
            leases.begin()

    def drop(self, delivery: Delivery) -> None:
        leases = self._by_calls.get(delivery._batch.calls)
        if leases is not None:
            leases.drop(delivery)

    def close(self) -> list[Delivery]:
        self._is_closed = True
        return [delivery for leases in self._by_calls.values() for delivery in leases.close()]
