"""Order keys and fair shares of a torture run: producers of keyed tasks, consumers that nack, stall
and answer late, and a judge of what they saw.

*Order*: of one key and group the tasks come one after the other, in the order of due times and
ids. The next one comes when somebody has sent the end of the one before, by the receipt of its last
delivery (or, when the daemon was killed since, of any: it may not know of the last one). After that
the one before never comes again, but for a dead letter that is brought back. *Shares*: never more
than so many of one value are in flight for sure.

Each key belongs to one producer, which enqueues with one delay: so ids and due times rise together.
What this process sent and received has one order (``Link.order``), and a delivery follows from the
end before it: the judge needs no clock for the order.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from crash.fair_clients import _client
from crash.link import Link, now_ms
from crash.plan import LEASE_MS, Plan
from crash.records import Delivered, Journal
from crash.rough_consumers import RoughConsumer, RoughPuller
from crash.settle import Receipt, Settler
from crash.workload import Workload
from support.waiting import rest
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Client, Task
from tickwheel.errors import TickwheelError

TOPIC = "ordered"
LIMIT_EACH = 2
ORDERED, SHARED = "one-by-one", "shared"
GROUPS = {
    ORDERED: {"order_retry_ms": 50, "order_failure": "retry"},
    SHARED: {
        "order_retry_ms": 50,
        "order_failure": "retry",
        "fair_by": "tenant",
        "limit_each": LIMIT_EACH,
    },
}
PRODUCERS, KEYS, TENANTS = 2, 12, 3
DELAY_S = 0.05
PAUSE_S = 1.0
MARGIN_MS = 50
"""A lease that would end so soon may have ended."""


class Seen(NamedTuple):
    """One delivery, as a consumer got it."""

    id: int
    group: str
    key: str
    tenant: str
    due_ms: int
    epoch: int
    attempt: int
    order: int
    delivered_ms: int
    link: int


class Sent(NamedTuple):
    """The end of a delivery (or that it is given back), as it was sent."""

    id: int
    group: str
    epoch: int
    attempt: int
    order: int
    kind: str


class Ordering(Workload):
    """Order keys and fair shares."""

    what = "order keys"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.seen: list[Seen] = []
        self.sent: list[Sent] = []
        self.closed_ms: dict[int, int] = {}
        """By link: when a consumer gave it up."""
        self.answered: set[str] = set()
        """Tasks whose enqueue was answered."""
        self.consumers = [
            kind(plan, f"{name}-{group}", group, self, shard)
            for kind, name in ((_Consumer, "ordered"), (_Puller, "ordered-puller"))
            for group in GROUPS
            for shard in range(plan.shards)
        ]

    async def begin(self) -> None:
        for group, settings in GROUPS.items():
            await self.caller.get(T.GROUP_CREATE, TOPIC, group, settings)

    async def run(self) -> None:
        await asyncio.gather(*(self._produce(number) for number in range(PRODUCERS)))

    async def _produce(self, number: int) -> None:
        async with _client(self.plan, f"orderer-{number}") as client:
            keys = (self._make(client, f"{number}.{key}") for key in range(KEYS))
            await asyncio.gather(*keys)

    async def _make(self, client: Client, key: str) -> None:
        """Tasks of one key, one request after the other."""
        rnd, count = self.plan.rnd(f"orderer-{key}"), 0
        while self.plan.producing:
            await rest(PAUSE_S * rnd.random())
            if not self.plan.is_making:
                continue
            tasks = []
            for _ in range(rnd.choice((1, 1, 1, 3))):
                count += 1
                tenant = f"t{rnd.randrange(TENANTS)}"
                body = f"{TOPIC}/{key}/{tenant}/{count}".encode()
                properties = {"tenant": tenant}
                task = Task(TOPIC, body, delay=DELAY_S, order_key=key, properties=properties)
                tasks.append(task)
            try:
                await client.enqueue_many(tasks)
            except TickwheelError as error:
                if not error.retryable:
                    raise
            else:
                self.answered.update(task.body.decode() for task in tasks)

    def note(self, group: str, one: Delivered) -> None:
        """A delivery has come."""
        _, key, tenant, _ = one.token.split("/")
        self.seen.append(
            Seen(one.id, group, key, tenant, one.due_ms, one.epoch, one.attempt, one.order,
                 one.delivered_ms, one.connection)
        )  # fmt: skip

    def ends(self, receipts: Iterable[Receipt], kind: str) -> None:
        """Their ends are being sent."""
        for receipt in receipts:
            self.sent.append(
                Sent(receipt.id, receipt.group, receipt.epoch, receipt.attempt, Link.order(), kind)
            )

    @property
    def shows_enough(self) -> bool:
        return bool(self.answered)

    def text(self) -> str:
        again = len(self.seen) - len({(item.id, item.group) for item in self.seen})
        return (
            f"with order keys: tasks {len(self.answered)}, deliveries {len(self.seen)} ({again}"
            f" repeated), ends sent {len(self.sent)}"
        )

    def judge(self) -> list[str]:
        delivered = {
            group: {
                item.token
                for journal in self.plan.journals
                for item in journal.delivered
                if item.group == group and item.token.startswith(f"{TOPIC}/")
            }
            for group in GROUPS
        }
        texts = [
            f"lost: {token} never came to {group}"
            for group, came in delivered.items()
            for token in sorted(self.answered - came)
        ]
        for group in GROUPS:
            texts += judge_order(
                [item for item in self.seen if item.group == group],
                [item for item in self.sent if item.group == group],
            )
        for shard in range(self.plan.shards):  # each has limits of its own
            shared = [
                item
                for item in self.seen
                if item.group == SHARED and self.plan.shard_of_id(item.id) == shard
            ]
            texts += judge_shares(shared, self.sent, self.closed_ms, LIMIT_EACH, LEASE_MS)
        if not self.answered or len(self.seen) <= len(self.answered):
            texts.append(f"the run shows nothing: {self.text()}")
        return texts


# --- consumers -----------------------------------------------------------------------------------


class _Noting(Settler):
    """Says when ends are sent."""

    def __init__(self, plan: Plan, journal: Journal, all_: Ordering) -> None:
        super().__init__(plan, journal)
        self._all = all_

    async def ack(self, link: Link, receipts: Sequence[Receipt]) -> None:
        self._all.ends(receipts, "ack")
        await super().ack(link, receipts)

    async def end(self, link: Link, kind: T, receipt: Receipt, delay_ms: int | None = None) -> None:
        self._all.ends((receipt,), kind.name.lower())
        await super().end(link, kind, receipt, delay_ms)


class _Consumer(RoughConsumer):
    """The manners of the others, of deliveries that are noted in their order."""

    def __init__(self, plan: Plan, name: str, group: str, all_: Ordering, shard: int) -> None:
        super().__init__(plan, name, TOPIC, group, shard=shard)
        self._all = all_
        self._settler = _Noting(plan, self._journal, all_)

    def _note(
        self, link: Link, epoch: int, delivered_ms: int, items: tuple[tuple[object, ...], ...]
    ) -> None:
        before = len(self._journal.delivered)
        super()._note(link, epoch, delivered_ms, items)
        for item in self._journal.delivered[before:]:
            self._all.note(self._group, item)

    async def _by_receipt(self, link: Link, kind: T, receipt: Receipt, *more: int) -> None:
        if kind is T.RELEASE:
            self._all.ends((receipt,), "release")
        await super()._by_receipt(link, kind, receipt, *more)

    async def _talk(self, link: Link) -> None:
        try:
            await super()._talk(link)
        finally:
            self._all.closed_ms[link.name] = now_ms()


class _Puller(_Consumer, RoughPuller):
    """The same with PULL."""


# --- the judge -----------------------------------------------------------------------------------


def judge_order(seen: Sequence[Seen], sent: Sequence[Sent]) -> list[str]:
    """Return tasks of a key that a group got out of order, together, or repeated too late."""
    by_key: dict[str, list[Seen]] = defaultdict(list)
    for one in seen:
        by_key[one.key].append(one)
    ends: dict[int, list[Sent]] = defaultdict(list)
    for end in sent:
        ends[end.id].append(end)
    rejected = {end.id for end in sent if end.kind == "reject"}
    wrong: list[str] = []
    for some in by_key.values():
        wrong += _judge_key(sorted(some, key=lambda one: one.order), ends, rejected)
    return wrong


def _judge_key(
    seen: Sequence[Seen], ends: Mapping[int, Sequence[Sent]], rejected: set[int]
) -> list[str]:
    wrong: list[str] = []
    last: dict[int, Seen] = {}
    """By task, its last delivery so far; the tasks in the order in which they came first."""
    began_ms = 0
    """The newest of them, by the daemon's clock: what it wrote before may be read after it."""
    for task in seen:
        if task.id in last:
            newest = last[next(reversed(last))]
            is_over = (newest.due_ms, newest.id) > (task.due_ms, task.id)
            if is_over and task.id not in rejected and task.delivered_ms >= began_ms:
                wrong.append(f"again, after a later one of its key: {task}")
            last[task.id] = max(last[task.id], task, key=lambda known: (known.epoch, known.attempt))
            continue
        before = last[next(reversed(last))] if last else None
        if before is not None:
            is_earlier = (before.due_ms, before.id) > (task.due_ms, task.id)
            if is_earlier:
                wrong.append(f"out of order: {task} came after {before}")
            # One that was given back comes again, behind those that are due before it.
            of_before = [
                end
                for end in ends.get(before.id, ())
                if is_earlier or end.kind in ("ack", "reject")
            ]
            if before.id not in rejected and not any(
                end.order < task.order
                and (end.epoch, end.attempt) == (before.epoch, before.attempt)
                for end in of_before
            ):
                text = f"two at a time: {task} came before the end of {before}"
                wrong.append(f"{text}; sent were {of_before}")
        last[task.id], began_ms = task, task.delivered_ms
    return wrong


def judge_shares(
    seen: Sequence[Seen],
    sent: Sequence[Sent],
    closed_ms: Mapping[int, int],
    limit: int,
    lease_ms: int,
) -> list[str]:
    """Of one group: deliveries that made too many of one value, of which all others were in flight
    for sure: leased by the same daemon, not ended, on a connection that stood. The daemon may know
    before its consumer that one is gone, so something must have come on it since; and what was
    slow on its way may have been written before what came earlier."""
    heard_ms: dict[int, int] = {}
    for one in seen:
        heard_ms[one.link] = max(one.delivered_ms, heard_ms.get(one.link, 0))
    ends: dict[tuple[int, str, int, int], int] = {}
    for end in sent:
        ends.setdefault((end.id, end.group, end.epoch, end.attempt), end.order)
    by_value: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    for one in sorted(seen, key=lambda one: one.order):
        by_value[one.tenant, one.epoch].append(one)
    wrong: list[str] = []
    for some in by_value.values():
        for index, one in enumerate(some):
            flying = {
                other.id
                for other in some[:index]
                if other.id != one.id
                and other.delivered_ms <= one.delivered_ms
                and other.delivered_ms + lease_ms - MARGIN_MS > one.delivered_ms
                and ends.get((other.id, other.group, other.epoch, other.attempt), one.order)
                >= one.order
                and closed_ms.get(other.link, one.delivered_ms + 1) > one.delivered_ms
                and heard_ms[other.link] >= one.delivered_ms
            }
            if len(flying) >= limit:
                wrong.append(f"{len(flying) + 1} in flight of one value: {one}")
    return wrong
