"""Consumers as they should not be: stalling, forgetting, late, gone with a full buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from crash.link import Link, Lost, Numbers, now_ms
from crash.plan import LEASE_MS, Plan
from crash.records import Cast, Delivered
from crash.settle import Receipt, Settler
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.protocol import Frame

ROUND_S = 0.02
PING_SHARE = 0.05
"""Share of rounds with a PING, about one per lease."""
SHARDS_A_ROUND = 2
"""Where there are more shards, there are more consumers, and each has longer rounds."""
PREFETCH = 300
"""Prefetch of a well-behaved consumer."""
BEHIND_MAX = 2 * PREFETCH
"""Of the deliveries that have come meanwhile: so many, the newest, are treated one by one. On a
busy machine leases end sooner than that is done, everything comes again, and one who treated all of
it would be further behind each time."""
PULL_MAX = 32
PULL_REFUSED = {"draining", "refused", "overloaded"}


class RoughConsumer:
    """One subscription over many connections. Receipts outlive connections and daemons.

    ``until``: what ends it; None: when everything is consumed. ``also_legal``: words that an ack
    may be answered with, too. ``shard``: where, when there are several.
    """

    once = False

    def __init__(
        self,
        plan: Plan,
        name: str,
        topic: str,
        group: str,
        until: asyncio.Event | None = None,
        also_legal: Iterable[str] = (),
        shard: int = 0,
    ) -> None:
        name = plan.named(name, shard)
        self._plan = plan
        self._shard = shard
        self._until = until or plan.consumed
        self._topic = topic
        self._group = group
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._settler = Settler(plan, self._journal, also_legal)
        self._numbers = Numbers()
        slower = max(1, plan.shards // SHARDS_A_ROUND)
        self._round_s, self._ping_share = ROUND_S * slower, min(0.5, PING_SHARE * slower)
        self._inbox: list[Receipt] = []
        self._lease_ms = LEASE_MS
        """Lease time of the current subscription."""
        self._held: list[tuple[int, Receipt]] = []
        """(when to ack, receipt): later than the lease allows, as often as not."""

    async def run(self) -> None:
        while not self._until.is_set():
            link = await self._plan.link(self._numbers, self._shard, delivered=self._delivered)
            try:
                await self._talk(link)
            except Lost:
                self._leave()
            finally:
                link.abort()
        await self._settler.settle_rest()

    async def _talk(self, link: Link) -> None:
        again, self._settler.unconfirmed = self._settler.unconfirmed, []
        await self._settler.ack(link, again)
        if self._until.is_set():
            return  # a SUBSCRIBE now would make its group anew
        await self._begin(link)
        while not self._until.is_set():
            await self._get(link)
            inbox, self._inbox = self._inbox, []
            await self._fit(link)
            if not self._plan.misbehaving or self._plan.quiet:
                await self._ack_late(link)
                await self._settler.ack(link, inbox)
                continue
            if self._rnd.random() < 0.02:
                self._inbox = inbox
                raise Lost("on purpose, with deliveries in the buffer")
            for receipt in inbox[-BEHIND_MAX:]:
                if self._plan.misbehaving and not self._plan.quiet:
                    await self._treat(link, receipt)
                else:
                    self._held.append((0, receipt))  # the run ends meanwhile
            await self._ack_late(link)

    async def _begin(self, link: Link) -> None:
        choice = (1, 20, PREFETCH) if self._plan.misbehaving else (PREFETCH,)
        prefetch = self._rnd.choice(choice)
        self._lease_ms = self._plan.lease_ms
        options = {"lease_ms": self._lease_ms}
        frame = await link.call(FrameType.SUBSCRIBE, 1, self._topic, self._group, prefetch, options)
        if frame[0] != FrameType.OK:
            raise Lost(f"SUBSCRIBE was answered {frame}")

    async def _fit(self, link: Link) -> None:
        """Once everything is to be worked off, with the prefetch and the lease for that: a backlog
        that comes one by one would take longer than the end of a run waits."""
        if self._lease_ms < self._plan.lease_ms:
            await link.call(FrameType.UNSUBSCRIBE, 1)
            if not self._until.is_set():
                await self._begin(link)

    async def _get(self, link: Link) -> None:
        """Deliveries come by themselves; a subscription only has to wait, and to show now and
        then that it is there: after a lease of its ended it gets nothing before it does."""
        await rest(self._round_s)
        if self._rnd.random() < self._ping_share:
            link.send(FrameType.PING)
        if link.down:
            raise Lost("while waiting")

    def _delivered(self, link: Link, frame: Frame) -> None:
        if frame[0] == FrameType.ENDED:
            return self._ended(link, frame)
        _, _, epoch, delivered_ms, items = frame
        return self._note(link, epoch, delivered_ms, items)

    def _ended(self, link: Link, frame: Frame) -> None:
        """Its group was deleted: it comes again only to one that is still to be there."""
        if self._until is self._plan.consumed:
            self._journal.odd.append(f"a subscription was ended: {frame}")
        link.abort()

    def _note(
        self, link: Link, epoch: int, delivered_ms: int, items: tuple[tuple[object, ...], ...]
    ) -> None:
        got_ms = now_ms()
        for item in items:
            task_id, attempt, due_ms, body = item[:4]
            options = item[4] if len(item) > 4 else {}
            assert isinstance(task_id, int) and isinstance(attempt, int)
            assert isinstance(due_ms, int) and isinstance(body, bytes)
            self._inbox.append(Receipt(self._topic, self._group, task_id, epoch, attempt))
            self._journal.delivered.append(
                Delivered(
                    task_id,
                    self._group,
                    body.decode().strip(),
                    epoch,
                    attempt,
                    due_ms,
                    delivered_ms,
                    got_ms,
                    link.name,
                    Link.order(),
                    link.opened_ms,
                    once=self.once,
                    priority=options.get("priority", 0),
                )
            )

    async def _treat(self, link: Link, receipt: Receipt) -> None:
        rnd, dice = self._rnd, self._rnd.random()
        if dice < 0.40:
            self._held.append((0, receipt))
        elif dice < 0.60:
            self._hold(receipt, LEASE_MS * 3)
        elif dice < 0.72:
            await self._settler.end(link, FrameType.NACK, receipt, rnd.randrange(300))
        elif dice < 0.75:
            await self._settler.end(link, FrameType.REJECT, receipt)
        elif dice < 0.82:
            await self._by_receipt(link, FrameType.RELEASE, receipt)
        elif dice < 0.90:
            await self._by_receipt(link, FrameType.EXTEND, receipt, LEASE_MS * 2)
            self._hold(receipt, LEASE_MS * 2)
        elif dice < 0.95:
            self._held += [(0, receipt), (now_ms() + 50, receipt)]
        # else: forgotten; its lease will end

    def _hold(self, receipt: Receipt, ms_max: int) -> None:
        self._held.append((now_ms() + self._rnd.randrange(ms_max), receipt))

    async def _by_receipt(self, link: Link, kind: FrameType, receipt: Receipt, *more: int) -> None:
        fields = (*receipt.place, [receipt.id], [receipt.attempt], *more)
        frame = await link.call(kind, *fields)
        if frame[0] != FrameType.OK:
            self._journal.odd.append(f"{kind.name} was answered {frame}")

    async def _ack_late(self, link: Link) -> None:
        now = now_ms()
        due = [receipt for at_ms, receipt in self._held if at_ms <= now]
        self._held = [held for held in self._held if held[0] > now]
        if due:
            await self._settler.ack(link, due)

    def _leave(self) -> None:
        """Keep some buffered deliveries for acks after the reconnect and forget the others."""
        for receipt in self._inbox:
            if self._rnd.random() < 0.5:
                self._hold(receipt, LEASE_MS)
        self._inbox = []


class RoughPuller(RoughConsumer):
    """The same manners with PULL; every now and then it goes away with a pull open."""

    async def _begin(self, link: Link) -> None:
        """There is nothing to subscribe to."""

    async def _fit(self, link: Link) -> None:
        """Each pull has its own lease."""

    async def _get(self, link: Link) -> None:
        wait_ms = self._rnd.choice((0, 30, 200))
        fields = (self._topic, self._group, PULL_MAX, wait_ms, {"lease_ms": self._plan.lease_ms})
        answer = link.send(FrameType.PULL, *fields)
        if self._plan.misbehaving and self._rnd.random() < 0.03:
            raise Lost("on purpose, with a pull open")
        frame = await link.wait(answer)
        if frame[0] == FrameType.OK:
            self._note(link, *frame[2])
        elif frame[2] == "not_found" and self._until is not self._plan.consumed:
            raise Lost("its group was deleted")
        elif frame[2] not in PULL_REFUSED:
            self._journal.odd.append(f"PULL was answered {frame}")
        await rest(self._round_s)


class OnceConsumer(RoughConsumer):
    """At most once: there is nothing to settle, and nothing may come a second time."""

    once = True

    async def _talk(self, link: Link) -> None:
        options = {"ack": "on_delivery"}
        frame = await link.call(FrameType.SUBSCRIBE, 1, self._topic, self._group, PULL_MAX, options)
        if frame[0] != FrameType.OK:
            raise Lost(f"SUBSCRIBE was answered {frame}")
        while not self._until.is_set():
            await self._get(link)
            if self._plan.misbehaving and self._plan.may_break and self._rnd.random() < 0.01:
                raise Lost("on purpose, with deliveries on their way")

    async def _treat(self, link: Link, receipt: Receipt) -> None:
        raise AssertionError("nothing is to be done")


class Listener:
    """A broadcast subscription: all that its topic has while it is connected."""

    def __init__(self, plan: Plan, name: str, topic: str, shard: int = 0) -> None:
        self._plan = plan
        self._topic = topic
        self._shard = shard
        self._journal = plan.journal(plan.named(name, shard))
        self._numbers = Numbers()
        self._heard: list[Delivered] = []

    async def run(self) -> None:
        while not self._plan.consumed.is_set():
            self._heard = []
            link = await self._plan.link(self._numbers, self._shard, delivered=self._delivered)
            shard = self._shard if self._plan.shards > 1 else None
            cast = Cast(self._topic, link.epoch, 0, delivered=self._heard, shard=shard)
            self._journal.casts.append(cast)
            try:
                await self._listen(link, cast)
            except Lost:
                cast.lost = True
            finally:
                link.abort()

    async def _listen(self, link: Link, cast: Cast) -> None:
        options = {"broadcast": True}
        frame = await link.call(FrameType.SUBSCRIBE, 1, self._topic, None, 1, options)
        if frame[0] != FrameType.OK:
            raise Lost(f"SUBSCRIBE was answered {frame}")
        cast.confirmed = Link.order()
        while not self._plan.consumed.is_set():
            await rest(ROUND_S)
            if link.down:
                raise Lost("while listening")
        await link.call(FrameType.STATS)  # what was written before it has come

    def _delivered(self, link: Link, frame: Frame) -> None:
        if frame[0] == FrameType.ENDED:
            return link.abort()
        _, _, epoch, delivered_ms, items = frame
        for item in items:
            options = item[4] if len(item) > 4 else {}
            self._heard.append(
                Delivered(
                    item[0],
                    "",
                    item[3].decode().strip(),
                    epoch,
                    item[1],
                    item[2],
                    delivered_ms,
                    now_ms(),
                    link.name,
                    Link.order(),
                    link.opened_ms,
                    priority=options.get("priority", 0),
                )
            )
        return None
