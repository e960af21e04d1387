"""The torture's users of the real client: what it says was done must have been done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from crash.link import Link, now_ms
from crash.plan import BRIEF, LEASE_MS, Plan
from crash.records import NO_CONNECTION, Accepted, Delivered, Finished, Moved, Refused
from crash.rough_producer import PAUSE_S, PRIORITIES, WINDOW_SHARE, WINDOWS_MS, delay_ms, ttl_ms
from crash.settle import Receipt as SettlerReceipt
from crash.settle import Settler
from support.waiting import rest
from tickwheel import errors
from tickwheel.client import Client, Delivery, Partly, Receipt, Task
from tickwheel.errors import TickwheelError
from tickwheel.model.records import ID_STEP

LARGE_COUNT, LARGE_DELAY_MS = 5_200, 15_000
"""Tasks of a batch that exceeds one Redis script."""
LARGE_SHARE = 0.01
LAG_MS_MAX = 500
"""A consumer that reads what was sent longer ago has more that it has not read, for as long again
at most: when it reads nothing then, nothing is left."""

_BEGIN = datetime.fromtimestamp(0, UTC)


@asynccontextmanager
async def _client(plan: Plan, name: str) -> AsyncIterator[Client]:
    """The real client, connected as soon as there is a daemon."""
    while True:
        client = Client(plan.url, send_timeout=1.0, retries=3, name=name)
        try:
            await client.connect()
            break
        except (errors.Unreachable, errors.NotActive):
            await rest(PAUSE_S)
    try:
        yield client
    finally:
        await client.close()


def _epoch_now(client: Client, task_id: int) -> int:
    """That of the daemon that answered about a task, or of a later one."""
    if client._shards is not None:
        link = client._shards.links[task_id % ID_STEP]
        return int(link.reconnector.info["epoch"])
    return int(client.server_info["epoch"])


class FairProducer:
    """The real client: single tasks, batches, cancels and reschedules."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._made = 0
        self._repeat: list[list[int]] = []
        """Cancels without an answer."""

    async def run(self) -> None:
        async with _client(self._plan, self._name) as client:
            while self._plan.producing:
                verbs = (self._one, self._many, self._bad, self._undo, self._move)
                large = self._plan.large and self._rnd.random() < LARGE_SHARE
                if self._plan.is_making:
                    await self._try(self._large if large else self._rnd.choice(verbs), client)
                await rest(PAUSE_S * self._rnd.random())
            while self._repeat:
                await self._try(self._undo_again, client)

    async def _try(self, verb: Callable[[Client], Awaitable[None]], client: Client) -> None:
        """An error without an answer promises nothing; what the daemon refused is noted."""
        try:
            await verb(client)
        except TickwheelError as error:
            if not error.retryable:
                self._journal.odd.append(f"{verb.__name__}: {type(error).__name__}: {error}")
            await rest(PAUSE_S)

    def _tokens(self, count: int) -> list[str]:
        self._made += count
        return [f"{self._name}/{self._made - i}" for i in range(count)]

    async def _enqueue(
        self, client: Client, topic: str, tokens: list[str], wait_ms: int
    ) -> list[int]:
        ttl, priority, sent = ttl_ms(self._rnd, topic), self._rnd.choice(PRIORITIES), Link.order()
        within_ms = self._rnd.choice(WINDOWS_MS) if self._rnd.random() < WINDOW_SHARE else 0
        options: dict[str, Any] = {
            "delay": wait_ms / 1000,
            "ttl": None if ttl is None else ttl / 1000,
            "priority": priority,
            "within": within_ms / 1000 or None,
        }
        # With several shards, keyed batches go to all of them and others to one.
        has_keys = self._plan.shards > 1 and self._rnd.random() < 0.5
        keys = [token if has_keys else None for token in tokens]
        failed: TickwheelError | None = None
        outcomes: Sequence[Receipt | TickwheelError]
        try:
            if len(tokens) == 1:
                body = tokens[0].encode()
                outcomes = [await client.enqueue(topic, body, key=keys[0], **options)]
            else:
                outcomes = await client.enqueue_many(
                    Task(topic, token.encode(), key=key, **options)
                    for token, key in zip(tokens, keys, strict=True)
                )
        except (errors.Refused, Partly) as error:
            failed = error
            outcomes = error.receipts if isinstance(error, Partly) else [error] * len(tokens)
        ended = list(zip(tokens, outcomes, strict=True))
        stored = [(token, one) for token, one in ended if isinstance(one, Receipt)]
        self._journal.refused += [
            Refused((token,), one.code) for token, one in ended if isinstance(one, errors.Refused)
        ]
        if stored:
            names = tuple(token for token, _ in stored)
            ids = tuple(one.id for _, one in stored)
            dues_ms = tuple(one.due_ms for _, one in stored)
            order = sent, Link.order()
            accepted = Accepted(topic, names, ids, dues_ms, *order, ttl, priority, within_ms)
            self._journal.accepted.append(accepted)
        if failed is not None:
            raise failed
        return [one.id for _, one in stored]

    async def _one(self, client: Client) -> None:
        topic = self._rnd.choice(self._plan.topics)
        await self._enqueue(client, topic, self._tokens(1), delay_ms(self._rnd))

    async def _many(self, client: Client) -> None:
        topic = self._rnd.choice(self._plan.topics)
        await self._enqueue(client, topic, self._tokens(20), delay_ms(self._rnd))

    async def _bad(self, client: Client) -> None:
        tokens = self._tokens(2)
        tasks = [Task("work", tokens[0].encode()), Task("not a topic", tokens[1].encode())]
        try:
            await client.enqueue_many(tasks)
        except errors.BadRequest as error:
            self._journal.refused.append(Refused(tuple(tokens), error.code))

    async def _undo(self, client: Client) -> None:
        self._repeat.append(await self._enqueue(client, "work", self._tokens(1), 300))
        await self._undo_again(client)

    async def _large(self, client: Client) -> None:
        tokens = self._tokens(LARGE_COUNT)
        self._repeat.append(await self._enqueue(client, "work", tokens, LARGE_DELAY_MS))
        await self._undo_again(client)

    async def _undo_again(self, client: Client) -> None:
        ids = self._repeat[0]
        for task_id, word in zip(ids, await client.cancel_many(ids), strict=True):
            self._undone(task_id, word, _epoch_now(client, task_id))
        self._repeat.remove(ids)

    def _undone(self, task_id: int, word: str, epoch: int) -> None:
        if word in ("cancelled", "already_cancelled"):
            end = (task_id, None, "cancelled", epoch, now_ms(), NO_CONNECTION, Link.order())
            self._journal.finished.append(Finished(*end))
        elif word not in ("in_flight", "acked", "dead"):
            self._journal.odd.append(f"cancel of {task_id} answered {word!r}")

    async def _move(self, client: Client) -> None:
        (task_id,) = await self._enqueue(client, "work", self._tokens(1), 400)
        for wait_ms in (900, 200):
            due_ms = now_ms() + wait_ms
            await self._move_once(client, task_id, due_ms)

    async def _move_once(self, client: Client, task_id: int, due_ms: int) -> None:
        # Whatever the answer, a first sending whose own answer was lost may have been applied.
        self._journal.moved.append(Moved(task_id, due_ms, None))
        answer = await client.reschedule(task_id, at=_BEGIN + timedelta(milliseconds=due_ms))
        if answer.status == "scheduled":
            assert answer.due is not None
            set_ms = (answer.due - _BEGIN) // timedelta(milliseconds=1)
            self._journal.moved.append(Moved(task_id, set_ms, now_ms()))
        elif answer.status not in ("in_flight", "acked", "dead"):
            self._journal.odd.append(f"reschedule of {task_id} answered {answer!r}")


class FairConsumer:
    """The real client, which acks what it gets; most of it without waiting for each."""

    prefetches: Sequence[int] = (4, 64, 500)
    waits = 0.2
    """How often it reads nothing until an ack is answered."""

    def __init__(self, plan: Plan, name: str, topic: str, group: str) -> None:
        self._plan = plan
        self._name = name
        self._topic = topic
        self._group = group
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._settler = Settler(plan, self._journal, ("expired",) if topic == BRIEF else ())
        self._acks: set[asyncio.Task[None]] = set()
        self._prefetch = 0
        """Prefetch of the current subscription; 0 without one."""
        self._lease_ms = LEASE_MS
        """Lease time of the latest subscription."""
        self._behind_until_ms = 0
        """Until then it may have deliveries that it has not read."""
        self._acks_since_ms = 0
        """Since when it reads nothing, because it waits for an ack; 0: it reads."""
        self.place = topic, group

    @property
    def is_free(self) -> bool:
        """It would take another delivery at once, and none waits until it has read those before."""
        now = now_ms()
        if now < self._behind_until_ms:
            return False
        if self._acks_since_ms and now - self._acks_since_ms > LAG_MS_MAX:
            return False
        return len(self._acks) < self._prefetch

    async def run(self) -> None:
        async with _client(self._plan, self._name) as client:
            receiving = asyncio.create_task(self._receive(client))
            over = asyncio.create_task(self._plan.consumed.wait())
            await asyncio.wait((receiving, over), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                over.cancel()
                receiving.result()
            receiving.cancel()
            await asyncio.gather(receiving, *self._acks, return_exceptions=True)
        await self._settler.settle_rest()

    async def _receive(self, client: Client) -> None:
        while True:
            try:
                await self._receive_once(client)
            except TickwheelError as error:
                self._prefetch = 0
                if not error.retryable:
                    raise
            else:
                if not self._is_outgrown:
                    raise AssertionError(f"{self._name}: the subscription ended by itself")

    @property
    def _is_outgrown(self) -> bool:
        """Everything is to be worked off, and the subscription's lease is too short for that."""
        return self._lease_ms < self._plan.lease_ms

    async def _receive_once(self, client: Client) -> None:
        """A subscription lasts over restarts; only its begin needs a daemon that is there."""
        prefetch, self._lease_ms = self._rnd.choice(self.prefetches), self._plan.lease_ms
        async with client.subscribe(
            self._topic, group=self._group, prefetch=prefetch, lease=self._lease_ms / 1_000
        ) as deliveries:
            self._prefetch = prefetch
            async for delivery in deliveries:
                self._note(delivery)
                ack = asyncio.create_task(self._ack(client, delivery))
                self._acks.add(ack)
                ack.add_done_callback(self._acks.discard)
                if self._rnd.random() < self.waits:
                    self._acks_since_ms = now_ms()
                    await asyncio.wait((ack,))
                    self._acks_since_ms = 0
                if self._is_outgrown:
                    return

    def _note(self, delivery: Delivery) -> None:
        now = now_ms()
        if now - delivery.delivered_ms > LAG_MS_MAX:
            self._behind_until_ms = now + LAG_MS_MAX
        self._journal.delivered.append(
            Delivered(
                delivery.id,
                delivery.group,
                delivery.body.decode().strip(),
                delivery.epoch,
                delivery.attempt,
                delivery.due_ms,
                delivery.delivered_ms,
                now_ms(),
                NO_CONNECTION,
                Link.order(),
                priority=delivery.priority,
            )
        )

    async def _ack(self, client: Client, delivery: Delivery) -> None:
        receipt = SettlerReceipt(
            delivery.topic, delivery.group, delivery.id, delivery.epoch, delivery.attempt
        )
        try:
            word = await delivery.ack()
        except TickwheelError:
            self._settler.unconfirmed.append(receipt)
            return
        epoch = _epoch_now(client, receipt.id)
        self._settler.word(receipt, word, epoch, NO_CONNECTION, Link.order())
