"""Who uses the daemons in a run: producers, consumers and workers, by the real client; and the
journal of what each of them saw, as the judge of the torture reads it.

A program is a host of its own, which may be killed, frozen or cut off; the next one of its name
begins anew, as a process that is started again. What was confirmed to one that died counts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from crash.ordered import Seen, Sent
from crash.records import (
    NO_CONNECTION,
    Accepted,
    Delivered,
    Finished,
    Journal,
    Looked,
    Refused,
)
from simulation.loop import EPOCH_MS, Host, passes
from tickwheel import errors
from tickwheel.api.tasks import basis_of
from tickwheel.client import Client, Delivery, Partly, Receipt, Task
from tickwheel.client.worker import Worker
from tickwheel.errors import TickwheelError
from tickwheel.model.records import ID_STEP

if TYPE_CHECKING:
    from simulation.loop import SimLoop
    from simulation.network import Network, Trace

WORK, ORDERED, PLANNED = "work", "ordered", "planned"
GROUPS = {WORK: ("one", "two"), ORDERED: ("line",), PLANNED: ("clock",)}
KEYS = ("a", "b")
DELAY_MS_MAX = 2_000
LEASE_S = 1.0
GENTLE_LEASE_S = 5.0
"""Where nothing happens but hand-overs: longer than all of them."""
RETRY_S = 0.2
"""A pause after an error that may pass."""
EVERY_S = 1.0
NAME = "each-second"
LEGAL = frozenset(("stale", "cancelled", "dead"))
"""Words for an ack that came too late; ``gone`` and ``unknown`` would mean that a task is lost."""


class SimClient(Client):
    """The product's client, whose connections are those of the simulated network."""

    def __init__(self, net: Network, host: Host, url: str, **options: Any) -> None:
        super().__init__(url, send_timeout=1.0, retries=3, heartbeat=0.5, **options)
        self._options.open_to = partial(net.open_to, here=host)


class Records:
    """What all programs of a run have seen."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._orders = count(1)
        self.journal = Journal("all")
        self.seen: list[Seen] = []
        self.sent: list[Sent] = []
        self.runs: dict[int, set[int]] = {}
        """Moment of a schedule → the ids of the tasks that came for it."""
        self.there_ms: dict[int, int] = {}
        """Id → when a task's enqueue was confirmed."""
        self.basis: dict[int, str] = {}
        """Id → what says in which shard a task is, of those that have it."""
        self.acked: set[tuple[int, str]] = set()
        self._asked: set[tuple[int, str]] = set()
        """What an ack was sent for."""
        self.over: set[int] = set()
        """Tasks that were cancelled."""
        self.errors: list[str] = []
        """Errors of enqueues."""
        self.is_ready = asyncio.Event()
        """The groups are there."""
        self.tried = 0
        """Tokens that were given out."""

    @property
    def now_ms(self) -> int:
        """The true time, which no program knows."""
        return EPOCH_MS + int(self._loop.time() * 1000)

    def order(self) -> int:
        return next(self._orders)

    def open_tasks(self, *, sure: bool = True) -> list[str]:
        """The tasks that were confirmed and have not ended. ``sure`` False: without those of which
        an ack was sent and not confirmed."""
        return [
            f"{token} for {group}"
            for item in self.journal.accepted
            for token, task_id in zip(item.tokens, item.ids, strict=True)
            for group in GROUPS[item.topic]
            if task_id not in self.over and (task_id, group) not in self.acked
            if sure or (task_id, group) not in self._asked
        ]

    def delivered(self, one: Delivery) -> None:
        if one.topic == PLANNED:
            assert one.planned is not None
            self.runs.setdefault(int(one.planned.timestamp() * 1000), set()).add(one.id)
            return
        order = self.order()
        self.journal.delivered.append(
            Delivered(
                one.id, one.group, one.body.decode(), one.epoch, one.attempt, one.due_ms,
                one.delivered_ms, self.now_ms, NO_CONNECTION, order,
            )
        )  # fmt: skip
        basis = basis_of(None, one.order_key, one.key)
        if basis is not None:
            self.basis[one.id] = basis
        if one.topic == ORDERED:
            self.seen.append(
                Seen(one.id, one.group, one.order_key or "", "", one.due_ms, one.epoch,
                     one.attempt, order, one.delivered_ms, 0)
            )  # fmt: skip

    def sends(self, one: Delivery, kind: str) -> None:
        """Note that an end is about to be sent."""
        if kind == "ack":
            self._asked.add((one.id, one.group))
        self.sent.append(Sent(one.id, one.group, one.epoch, one.attempt, self.order(), kind))

    def ended(self, one: Delivery, word: str, epoch: int) -> None:
        """Note what an ack was answered with."""
        if word in ("acked", "done"):
            self.confirmed(one.id, one.group, epoch)
        elif word not in LEGAL:
            self.journal.odd.append(f"ack of {one.id} for {one.group} answered {word!r}")

    def confirmed(self, task_id: int, group: str, epoch: int) -> None:
        self.acked.add((task_id, group))
        end = (task_id, group, "acked", epoch, self.now_ms, NO_CONNECTION, self.order())
        self.journal.finished.append(Finished(*end))

    def is_unconfirmed(self, task_id: int, group: str) -> bool:
        """Whether an ack was sent, and nobody has seen an answer that it counts."""
        return (task_id, group) in self._asked - self.acked

    def cancelled(self, task_id: int, word: str, epoch: int) -> None:
        if word in ("cancelled", "already_cancelled"):
            self.over.add(task_id)
            end = (task_id, None, "cancelled", epoch, self.now_ms, NO_CONNECTION, self.order())
            self.journal.finished.append(Finished(*end))
        elif word not in ("in_flight", "acked"):
            self.journal.odd.append(f"cancel of {task_id} answered {word!r}")


class Program:
    """A client's process, which is started again when it was killed."""

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        net: Network,
        url: str,
        records: Records,
        rnd: random.Random,
        trace: Trace,
        work: Callable[[Program, SimClient], Coroutine[Any, Any, None]],
    ) -> None:
        self.name, self._loop, self._net, self._url = name, loop, net, url
        self.records, self.rnd, self._trace, self._work = records, rnd, trace, work
        self.host = Host(loop, name)
        self.life: asyncio.Task[None]
        self.is_calm = False
        """Whether it behaves well from now on, because no more faults come."""
        self.holds_s = 0.0
        """How long it works on a delivery, at most."""
        self.failed: list[str] = []
        self._tokens = count(1)

    def start(self) -> None:
        self.host = Host(self._loop, self.name)
        self.life = self.host.spawn(self._life())

    @property
    def lease_s(self) -> float:
        """How long its deliveries are its own."""
        return GENTLE_LEASE_S if self.is_calm else LEASE_S

    @property
    def is_done(self) -> bool:
        """Whether its work is over."""
        return self.life.done()

    def kill(self) -> None:
        self.host.kill()
        self._net.died(self.host, silently=False)

    async def _life(self) -> None:
        client = SimClient(self._net, self.host, self._url, name=self.name)
        while True:
            try:
                await client.connect()
                break
            except (errors.Unreachable, errors.NotActive):
                await passes(RETRY_S)
        try:
            await self._work(self, client)
        except Exception as error:
            self.failed.append(f"{self.name}: {type(error).__name__}: {error}")

    def token(self) -> str:
        self.records.tried += 1
        return f"{self.name}/{next(self._tokens)}"

    def trace(self, *what: object) -> None:
        self._trace("program", self.host, *what)


def epoch_of(client: Any, task_id: int) -> int:
    """That of the daemon that answered about a task, or of a later one."""
    one = client._link if client._shards is None else client._shards.links[task_id % ID_STEP]
    return int(one.reconnector.info["epoch"])


# --- producers -----------------------------------------------------------------------------------


async def produce(
    tasks: int, span_s: float, keys: Sequence[str], program: Program, client: SimClient
) -> None:
    """Enqueue so many tasks over so long a time; some with an order key, some cancelled. ``keys``:
    further order keys; with these, some of the other tasks have a key of their own, and some come
    several at a time, for any shards."""
    await program.records.is_ready.wait()
    for _ in range(tasks):
        await passes(program.rnd.uniform(0, 2 * span_s / tasks))
        draw = program.rnd.random()
        if draw < 0.3:
            order_key = program.rnd.choice((*KEYS, *keys))
            await _enqueue(program, client, ORDERED, order_key=order_key)
            continue
        key = f"{program.name}.{program.rnd.random()}" if keys and draw < 0.6 else None
        if keys and draw < 0.4:
            await _enqueue_many(program, client, WORK, (key, f"{key}.1", f"{key}.2", None))
            continue
        task_id = await _enqueue(program, client, WORK, key=key)
        if task_id is not None and draw > 0.85:
            await _cancel(program, client, task_id)


async def probe(keys: Sequence[str], program: Program, client: SimClient) -> None:
    """Enqueue one task of each topic with each of these keys: whoever has these shards works, and
    whoever consumes has not lost one of them."""
    await program.records.is_ready.wait()
    for key in keys:
        while await _enqueue(program, client, WORK, key=key) is None:
            await passes(RETRY_S)
        while await _enqueue(program, client, ORDERED, order_key=key) is None:
            await passes(RETRY_S)


async def _enqueue(program: Program, client: SimClient, topic: str, **options: Any) -> int | None:
    """The id of a task that was confirmed; None: it was not, and it may be there or not."""
    token, sent = program.token(), program.records.order()
    try:
        receipt = await client.enqueue(topic, token.encode(), delay=_delay_s(program), **options)
    except TickwheelError as error:
        _not_accepted(program, token, error)
        return None
    _accepted(program, topic, token, receipt, sent)
    return receipt.id


async def _enqueue_many(
    program: Program, client: SimClient, topic: str, keys: Sequence[str | None]
) -> None:
    """Enqueue a task for each key, all in one call: each shard has its own answer."""
    tokens, sent = [program.token() for _ in keys], program.records.order()
    delay_s = _delay_s(program)
    tasks = [
        Task(topic, token.encode(), delay=delay_s, key=key)
        for token, key in zip(tokens, keys, strict=True)
    ]
    ends: Sequence[Receipt | TickwheelError]
    try:
        ends = await client.enqueue_many(tasks)
    except Partly as error:
        ends = error.receipts
    except TickwheelError as error:
        ends = [error] * len(tasks)
    for token, end in zip(tokens, ends, strict=True):
        if isinstance(end, TickwheelError):
            _not_accepted(program, token, end)
        else:
            _accepted(program, topic, token, end, sent)


def _delay_s(program: Program) -> float:
    return program.rnd.choice((0, program.rnd.randint(1, DELAY_MS_MAX))) / 1000


def _accepted(program: Program, topic: str, token: str, receipt: Receipt, sent: int) -> None:
    records = program.records
    named = (token,), (receipt.id,), (receipt.due_ms,)
    records.journal.accepted.append(Accepted(topic, *named, sent, records.order()))
    records.there_ms[receipt.id] = records.now_ms
    program.trace("accepted", token, receipt.id)


def _not_accepted(program: Program, token: str, error: TickwheelError) -> None:
    """Note an enqueue that was not confirmed. Raises what cannot be."""
    records = program.records
    records.errors.append(f"{token}: {error.code}: {error}")
    if isinstance(error, errors.Refused):
        records.journal.refused.append(Refused((token,), error.code))
    elif not isinstance(error, (errors.OutcomeUnknown, errors.Unreachable)):
        raise error
    else:
        program.trace("unknown", token, error.code)


async def _cancel(program: Program, client: SimClient, task_id: int) -> None:
    try:
        word = await client.cancel(task_id)
    except TickwheelError as error:
        if not error.retryable:
            raise
        return
    program.records.cancelled(task_id, word, epoch_of(client, task_id))
    program.trace("cancel", task_id, word)


async def plan(program: Program, client: SimClient) -> None:
    """Make the groups, so that they are owed every task, and the schedule."""
    while True:
        try:
            for topic, groups in GROUPS.items():
                for group in groups:
                    await client.create_group(topic, group)
            await client.put_schedule(NAME, topic=PLANNED, body=b"tick", every=EVERY_S)
            program.records.is_ready.set()
            return
        except TickwheelError as error:
            if not error.retryable:
                raise
            await passes(RETRY_S)


# --- consumers -----------------------------------------------------------------------------------


async def consume(places: Sequence[tuple[str, str]], program: Program, client: SimClient) -> None:
    """Take deliveries of several groups for ever, and end them in one way or another."""
    if not program.records.is_ready.is_set():
        await plan(program, client)
    await asyncio.gather(*(_consume(*place, program, client) for place in places))


async def _consume(topic: str, group: str, program: Program, client: SimClient) -> None:
    while True:
        try:
            async with client.subscribe(
                topic, group=group, prefetch=4, lease=program.lease_s
            ) as deliveries:
                async for delivery in deliveries:
                    await _treat(program, client, delivery)
        except TickwheelError as error:
            if not error.retryable:
                raise
        await passes(RETRY_S)


async def _treat(program: Program, client: SimClient, one: Delivery) -> None:
    records = program.records
    records.delivered(one)
    program.trace("delivered", one.topic, one.group, one.id, one.epoch, one.attempt)
    draw = 1.0 if program.is_calm else program.rnd.random()
    if program.holds_s:
        await passes(program.rnd.uniform(0, program.holds_s))
    try:
        if draw < 0.06:
            return  # its lease lapses
        if draw < 0.15:
            await _nack(program, client, one)
        elif draw < 0.2:
            records.sends(one, "release")
            await one.release()
            program.trace("released", one.id)
        else:
            records.sends(one, "ack")
            word = await one.ack()
            records.ended(one, word, epoch_of(client, one.id))
            program.trace("acked", one.id)
    except TickwheelError as error:
        if not error.retryable:
            raise


async def _nack(program: Program, client: SimClient, one: Delivery) -> None:
    delay_ms = program.rnd.randint(50, 500)
    program.records.sends(one, "nack")
    word = await one.nack(delay=delay_ms / 1000)
    if word == "retrying":
        program.trace("nacked", one.id, delay_ms)


async def work(program: Program, client: SimClient) -> None:
    """The real worker, on tasks with order keys."""
    while True:
        worker = Worker(client, grace=1.0, signals=False)

        @worker.on(ORDERED, group=GROUPS[ORDERED][0], concurrency=4, lease=program.lease_s)
        async def handle(one: Delivery) -> None:
            program.records.delivered(one)
            program.trace("delivered", one.topic, one.group, one.id, one.epoch, one.attempt)
            await passes(program.rnd.uniform(0, 0.05))
            program.records.sends(one, "ack")
            word = await one.ack()
            program.records.ended(one, word, epoch_of(client, one.id))
            program.trace("acked", one.id)

        try:
            await worker.run()
        except TickwheelError as error:
            if not error.retryable:
                raise
        await passes(RETRY_S)


async def look(program: Program, client: SimClient) -> None:
    """Ask what became of every confirmed task. An ack whose answer was lost, or came to a handler
    that was cancelled meanwhile, is confirmed by what is said of its task."""
    records, journal = program.records, program.records.journal
    topics = {task_id: item.topic for item in journal.accepted for task_id in item.ids}
    journal.looked.clear()
    for info in await client.lookup_many(list(topics)) if topics else ():
        journal.looked.append(Looked(info.id, info.state, records.now_ms))
        for group in GROUPS[topics[info.id]] if info.state == "acked" else ():
            if records.is_unconfirmed(info.id, group):
                records.confirmed(info.id, group, epoch_of(client, info.id))
