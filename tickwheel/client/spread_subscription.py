"""A subscription over several shards: one on each, behind one front that hands out what they get.

Imported with ``client/shards.py`` by a client that has learnt of several shards. Invariants:

* What a shard delivered is settled at that shard, and its lease is kept up there.
* A shard that is away holds up nobody: it comes in when it is there.
* A prefetch that somebody has named is divided: each shard has at least 1 of it, and the deliveries
  of all together are never more than it, or than one for each shard if it is smaller than that.
  Where the work is follows from what the shards say of themselves; credit goes there.
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
"""How long, in seconds, a subscription or a pull waits for shards that are away, when one is
there."""
IN_A_ROW = 16
"""Deliveries of one shard before the next one has its turn."""
LOOK_S, LOOK_MAX_S = 0.2, 1.6
"""How long, in seconds, between two looks at where the work is; twice as long after each look that
has moved no credit, up to the most."""


class ShareUse(NamedTuple):
    """How much one shard uses of its share of a prefetch, and whether more would help."""

    share: int
    """The part of the prefetch."""
    in_flight: int
    ready: int
    """Tasks of the group that are ready there, and wait for credit of anybody."""

    @property
    def is_short(self) -> bool:
        """Whether tasks wait because the share is used up."""
        return self.ready > 0 and self.in_flight >= self.share


def divided(prefetch: int, loads: Sequence[ShareUse]) -> list[int]:
    """The shares of a prefetch: at least 1 for each shard, the rest by max-min fairness of what
    each has and could have; what nobody could use now is divided equally."""
    shares = [1] * len(loads)
    left = prefetch - len(loads)
    uses = [load.in_flight + load.ready * load.is_short for load in loads]
    order = sorted(range(len(loads)), key=uses.__getitem__)
    for most in (uses, [prefetch] * len(loads)):
        for position, index in enumerate(order):
            equal = left // (len(order) - position)
            more = max(0, min(equal, most[index] - shares[index]))
            shares[index] += more
            left -= more
    return shares


class SpreadBuffer(Buffer):
    """What has come from all shards, handed out in turn, some of each."""

    def __init__(self, lease_s: float) -> None:
        super().__init__(lease_s)
        self.parts: list[Subscription] = []
        self._turn = self._left = 0
        self._present = Buffer(lease_s)
        """That of the shard whose turn it is, for as many deliveries as are left."""

    def __len__(self) -> int:
        return sum(len(part._buffer) for part in self.parts)

    def take(self, now_s: float) -> Delivery | None:
        if self._left:
            delivery = self._present.take(now_s)
            if delivery is not None:
                self._left -= 1
                return delivery
        parts = self.parts
        for _ in parts:
            self._turn = (self._turn + 1) % len(parts)
            part = parts[self._turn]
            delivery = part._buffer.take(now_s)
            if delivery is not None:
                self._present, self._left = part._buffer, IN_A_ROW - 1
                return delivery
            part.refill()
        self._left = 0
        return None


class SpreadSubscription:
    """A subscription on each shard, behind one front that hands out what they get."""

    def __init__(self, links: Sequence[Link], front: Subscription) -> None:
        self._links = links
        self._front = front
        self.buffer = SpreadBuffer(front._buffer.lease_s)
        self._leases: list[SpreadLeases] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._shares = self._equal_shares(front._prefetch)
        """The prefetch of each shard: never less than what its daemon may have been told."""
        self._dividing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    @property
    def _parts(self) -> list[Subscription]:
        return self.buffer.parts

    async def start(self) -> None:
        """Subscribe at all shards that are there. Raises what one of them objects to, and why there
        is none; those that are away come in later."""
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
        self._begin_following()

    @property
    def _count(self) -> int:
        return len(self._links)

    def _equal_shares(self, prefetch: int) -> list[int]:
        """The part of a prefetch that each shard gets at first: at least 1, unless it is 0; all of
        one that nobody has named."""
        if not self._front._divides:
            return [prefetch] * self._count
        each, extra = divmod(prefetch, self._count)
        return [max(each + (shard < extra), min(prefetch, 1)) for shard in range(self._count)]

    async def _join(self, shard: int) -> None:
        """Subscribe at one shard."""
        front = self._front
        link = self._links[shard]
        link.ready()  # what else waits for the connection must not end with this
        await link.connect()
        part = link.subscriptions.make(front._wish, self._shares[shard])
        part._front, part._arrived, part.mismatch = front, front._arrived, front.mismatch
        part._bytes_max = max(PART_BYTES_MIN, front._bytes_max // self._count)
        await part.start()
        if front._closed:
            await part.close()
            return
        self._parts.append(part)
        part._shard = shard
        self.buffer.lease_s = min(one.lease_s for one in self._parts)
        for leases in self._leases:
            leases.add(part)
        front._arrived.notify()
        if part._prefetch != self._shares[shard]:
            try:
                await part.set_prefetch(self._shares[shard])
            except TickwheelError as error:
                if not error.retryable:
                    raise
                # It subscribes again with this share when it is back: to join twice were too much.

    def _join_later(self, shard: int) -> None:
        task = self._front._reconnector.spawn(self._keep_joining(shard))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _keep_joining(self, shard: int) -> None:
        front, tries = self._front, 0
        LOGGER.warning("shard %d is away; the subscription to %s goes on", shard, front.topic)
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
        """What the shards say of the group, if one of them has made it."""
        return MadeGroup.joined(part.new_group for part in self._parts)

    async def close(self) -> None:
        """End the subscriptions of all shards."""
        for task in (*self._joining, self._following):
            if task is not None:
                task.cancel()
        for part in self._parts:
            part._end()
        await asyncio.gather(*(part._leave() for part in self._parts), return_exceptions=True)

    # --- the prefetch ---------------------------------------------------------------------------

    async def set_prefetch(self, prefetch: int) -> None:
        """Divide another prefetch, by what the shards had of the last one; a shard that is away is
        told when it comes."""
        async with self._dividing:
            if 0 in self._shares or prefetch < self._count:
                self._shares = self._equal_shares(prefetch)
            else:
                self._shares = divided(
                    prefetch, [ShareUse(share, share, 0) for share in self._shares]
                )
            works = []
            for part in self._parts:
                share = self._shares[part._shard]
                if part._reconnector.connection is None:
                    part._prefetch = share
                else:
                    works.append(part.set_prefetch(share))
            raise_first(await asyncio.gather(*works, return_exceptions=True))
        self._begin_following()

    def _begin_following(self) -> None:
        """From now on credit goes to where the work is, if there is any to divide."""
        front = self._front
        if self._following is None and front._divides and front.leased:
            self._following = front._reconnector.spawn(self._follow())

    async def _follow(self) -> None:
        """Look again and again where the work is, as long as deliveries come or wait for credit."""
        pause_s, came, is_short = LOOK_S, 0, False
        while True:
            await asyncio.sleep(pause_s)
            before, came = came, sum(part.came for part in self._parts)
            has_moved = False
            if self._front._prefetch > self._count and (is_short or came != before):
                try:
                    async with self._dividing:
                        is_short, has_moved = await self._move_credit()
                except TickwheelError as error:
                    # A daemon of an older release does not tell. The shares stay as they are.
                    LOGGER.info("credit stays where it is: %s: %s", error.code, error.message)
                    return
            pause_s = LOOK_S if has_moved else min(2 * pause_s, LOOK_MAX_S)

    async def _move_credit(self) -> tuple[bool, bool]:
        """Give credit that one shard does not use to another one that has more work than credit;
        whether there was such a shard, and whether credit has moved. What a shard gets, others have
        given up before, and it is not in use there any more."""
        parts = [part for part in self._parts if part.takes_credit]
        loads = await self._tell_all({part: self._shares[part._shard] for part in parts})
        if not any(load.is_short for load in loads.values()):
            return False, False
        others = sum(self._shares) - sum(load.share for load in loads.values())
        prefetch = self._front._prefetch - others
        wanted = dict(zip(loads, divided(prefetch, [*loads.values()]), strict=True))
        less = {part: share for part, share in wanted.items() if share < loads[part].share}
        loads |= await self._tell_all(less)
        free = prefetch - sum(max(load.share, load.in_flight) for load in loads.values())
        more = {}
        for part, share in wanted.items():
            added = min(share - loads[part].share, free)
            if added > 0:
                free -= added
                more[part] = loads[part].share + added
        await self._tell_all(more)
        return True, bool(less or more)

    async def _tell_all(self, shares: Mapping[Subscription, int]) -> dict[Subscription, ShareUse]:
        """Set these shares; what the shards have then that are not away."""
        said = await asyncio.gather(*(self._tell(part, share) for part, share in shares.items()))
        return {part: load for part, load in zip(shares, said, strict=True) if load is not None}

    async def _tell(self, part: Subscription, share: int) -> ShareUse | None:
        """Set the share of one shard; what it has then. None: that shard is away, and gets the
        share when it is back; until it has answered, the greater one counts as its own, because
        the daemon may have either. Raises what it objects to."""
        self._shares[part._shard] = max(share, self._shares[part._shard])
        try:
            found = ShareUse(share, *await part.tell_prefetch(share))
        except TickwheelError as error:
            if not error.retryable:
                raise
            return None
        self._shares[part._shard] = share
        return found

    async def give_back(self) -> None:
        await asyncio.gather(*(part.give_back() for part in self._parts))

    def keep_leases(self, in_hand: Callable[[], Iterable[InHand]]) -> SpreadLeases:
        leases = SpreadLeases(self._parts, in_hand)
        self._leases.append(leases)
        return leases


class SpreadLeases(Leases):
    """What ``Leases`` is for the deliveries of one shard, for those of several."""

    def __init__(
        self, parts: Iterable[Subscription], in_hand: Callable[[], Iterable[InHand]]
    ) -> None:
        self._in_hand = in_hand
        self._of: dict[Any, Leases] = {}
        """The calls of a shard's client → the leases of its deliveries."""
        self._is_closed = False
        for part in parts:
            self.add(part)

    def add(self, part: Subscription) -> None:
        """Keep up leases of one more shard, too."""
        if not self._is_closed:
            calls = part._all.calls
            leases = part.keep_leases(lambda: self._in_hand_of(calls))
            self._of[calls] = leases

    def _in_hand_of(self, calls: Any) -> Iterable[InHand]:
        return (one for one in self._in_hand() if one[0]._batch.calls is calls)

    def hold(self, delivery: Delivery, lost: Callable[[str], None]) -> None:
        leases = self._of.get(delivery._batch.calls)
        if leases is not None:  # one that had its end before it was sent has no lease
            leases.hold(delivery, lost)

    def begin(self) -> None:
        for leases in self._of.values():
            leases.begin()

    def drop(self, delivery: Delivery) -> None:
        leases = self._of.get(delivery._batch.calls)
        if leases is not None:
            leases.drop(delivery)

    def close(self) -> list[Delivery]:
        self._is_closed = True
        return [delivery for leases in self._of.values() for delivery in leases.close()]
