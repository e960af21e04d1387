"""Transactions of a torture run: producers that die between the enqueue and the commit, others that
are asked what became of it, and a judge that knows half tasks.

The *ledger* is the producers' own database: what stands there is decided, before the daemon hears
of it. A producer writes into it and sends the decision, or dies in between; who is asked looks it
up, and writes "rollback" where nothing stands. So what a transaction has to become is known without
a clock, however often the daemon was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from crash.rough_consumers import RoughConsumer
from crash.workload import RETRYABLE, Workload
from support.waiting import rest
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Client, Task
from tickwheel.errors import TickwheelError
from tickwheel.protocol import Frame

TOPIC, GROUP, PRODUCERS = "transacted", "default", "tellers"
PRODUCERS_MAX = 2
AGAIN_S = 0.1
DEATHS = ("while preparing", "before the ledger", "before the commit", "after the commit", "")
"""When a producer dies; most of them live."""


@dataclass(slots=True)
class Deal:
    """One transaction, as its producers know it."""

    name: str
    kept: set[str] = field(default_factory=set)
    """Half tasks whose enqueue was answered;"""
    sent: set[str] = field(default_factory=set)
    """and all that were sent."""
    answered: set[str] = field(default_factory=set)
    """"commit" or "rollback", as the daemon has said."""
    state: str = ""
    """What the daemon says in the end."""


class Ledger:
    """The final decision of each transaction."""

    def __init__(self) -> None:
        self.decisions: dict[str, str] = {}

    def decide(self, name: str, decision: str) -> str:
        """The decision that stands, which may be another one."""
        return self.decisions.setdefault(name, decision)


class Transacting(Workload):
    """Transactions, of producers that die."""

    what = "transactions"
    settings: ClassVar = {"transaction_check_s": 0.3, "transaction_check_every_s": 0.2}

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._numbers = Numbers()
        self.ledger = Ledger()
        self.deals: dict[str, Deal] = {}
        self.asked = 0
        """Questions that came;"""
        self.deaths = 0
        """producers that died;"""
        self.by_operator = 0
        """and transactions that an operator had to decide."""
        self.consumers = [
            RoughConsumer(plan, "transacted", TOPIC, GROUP, shard=shard)
            for shard in range(plan.shards)
        ]

    async def begin(self) -> None:
        await self.caller.get(T.SUBSCRIBE, 1, TOPIC, GROUP, 0, {})

    async def run(self) -> None:
        answering = [
            asyncio.create_task(self._answer(number, shard))
            for shard in range(self.plan.shards)
            for number in range(2)
        ]
        producing = [self._produce(number) for number in range(PRODUCERS_MAX)]
        try:
            await asyncio.gather(*producing)
            await self._decide_the_rest()
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    # --- producers that die --------------------------------------------------------------------

    async def _produce(self, teller: int) -> None:
        rnd, count = self.plan.rnd(f"teller-{teller}"), 0
        while self.plan.producing:
            if not self.plan.is_making:
                await rest(AGAIN_S)
                continue
            count += 1
            deal = Deal(f"deal-{teller}-{count}")
            self.deals[deal.name] = deal
            death = rnd.choice(DEATHS) if rnd.random() < 0.6 else ""
            decision = "commit" if rnd.random() < 0.7 else "rollback"
            parts = [rnd.randrange(1, 4) for _ in range(rnd.randrange(1, 4))]
            how = deal, parts, death, decision, rnd.choice([0, 0, 400])
            try:
                if self.plan.operator is not None and teller % 2:
                    await self._trade_by_client(self.plan.operator, *how)
                else:
                    await self._trade(*how)
            except Lost:
                self.deaths += 1  # like one that has no second connection
            await rest(AGAIN_S * rnd.random())

    async def _trade(
        self, deal: Deal, parts: list[int], death: str, decision: str, delay_ms: int
    ) -> None:
        link = await self.plan.link(self._numbers, self.plan.shard_of(deal.name))
        try:
            for part, count in enumerate(parts, 1):
                bodies = [f"{deal.name}/{part}/{n}" for n in range(count)]
                deal.sent.update(bodies)
                tasks = [(TOPIC, body.encode(), delay_ms) for body in bodies]
                fields = (deal.name, PRODUCERS, part, tasks, None)
                if death == "while preparing" and part == len(parts):
                    link.send(T.PREPARE, *fields)
                    raise Lost("died")
                frame = await self._twice(link, T.PREPARE, *fields)
                if frame[0] != T.OK:
                    self._too_late(deal, frame)
                    return
                deal.kept.update(bodies)
            if death == "before the ledger":
                raise Lost("died")
            decision = self.ledger.decide(deal.name, decision)
            kind = T.COMMIT if decision == "commit" else T.ROLLBACK
            if death == "before the commit":
                raise Lost("died")
            if death == "after the commit":
                link.send(kind, deal.name)
                await asyncio.sleep(0)
                raise Lost("died")
            self._noted(deal, decision, await self._twice(link, kind, deal.name))
        finally:
            link.abort()

    async def _trade_by_client(
        self, client: Client, deal: Deal, parts: list[int], death: str, decision: str, delay_ms: int
    ) -> None:
        """The same through the real client, which finds the shard: that of a key, or of the name.
        Where it gets no answer the producer dies."""
        rnd = self.plan.rnd(deal.name)
        key = f"key of {deal.name}" if rnd.random() < 0.5 else None
        transaction = client.transaction(PRODUCERS, id=deal.name)
        try:
            for part, count in enumerate(parts, 1):
                bodies = [f"{deal.name}/{part}/{n}" for n in range(count)]
                deal.sent.update(bodies)
                await transaction.enqueue_many(
                    Task(TOPIC, body.encode(), delay=delay_ms / 1_000, key=key) for body in bodies
                )
                deal.kept.update(bodies)
                if death == "while preparing":
                    raise Lost("died")
            if death == "before the ledger":
                raise Lost("died")
            decision = self.ledger.decide(deal.name, decision)
            if death == "before the commit":
                raise Lost("died")
            await (transaction.commit() if decision == "commit" else transaction.rollback())
            deal.answered.add(decision)
        except TickwheelError as error:
            if error.retryable:
                raise Lost(error.message) from error
            self._too_late(deal, (T.ERROR, 0, error.code, error.message))

    def _too_late(self, deal: Deal, frame: Frame) -> None:
        """Accept a refused task only if another producer rolled the transaction back."""
        decision = self.ledger.decisions.get(deal.name)
        if decision != "rollback" or frame[2] != "transaction_rolled_back":
            self.odd.append(f"a task of {deal.name} ({decision}) was answered {frame}")

    async def _twice(self, link: Link, kind: T, *fields: Any) -> Frame:
        """Again when it was refused; raises Lost when the connection breaks."""
        while True:
            frame = await link.call(kind, *fields)
            if frame[0] == T.OK or frame[2] not in RETRYABLE:
                return frame
            await rest(AGAIN_S)

    def _noted(self, deal: Deal, decision: str, frame: Frame) -> None:
        if frame[0] == T.OK:
            deal.answered.add(decision)
        else:
            self.odd.append(f"{decision} of {deal.name} was answered {frame}")

    # --- those who are asked -------------------------------------------------------------------

    async def _answer(self, number: int, shard: int) -> None:
        rnd = self.plan.rnd(self.plan.named(f"answerer-{number}", shard))
        while True:
            questions: asyncio.Queue[str] = asyncio.Queue()

            def delivered(_: Link, frame: Frame, into: asyncio.Queue[str] = questions) -> None:
                if frame[0] == T.CHECK:
                    for name, *_rest in frame[2]:
                        into.put_nowait(name)

            link = await self.plan.link(self._numbers, shard, delivered=delivered)
            try:
                await self._twice(link, T.CHECKS, [PRODUCERS])
                while not link.down:
                    async with asyncio.timeout(1.0):
                        name = await questions.get()
                    self.asked += 1
                    if rnd.random() < 0.2:
                        continue  # it does not know; it is asked again
                    await self._say(link, name)
            except (Lost, TimeoutError):
                continue
            finally:
                link.abort()

    async def _say(self, link: Link, name: str) -> None:
        deal = self.deals[name]
        # Nothing there: nobody will write anything else any more.
        decision = self.ledger.decide(name, "rollback")
        kind = T.COMMIT if decision == "commit" else T.ROLLBACK
        self._noted(deal, decision, await self._twice(link, kind, name))

    # --- the end -------------------------------------------------------------------------------

    async def _decide_the_rest(self) -> None:
        """Decide parked transactions by the ledger, as an operator; others get checkbacks."""
        while True:
            page = (await self.caller.get(T.TRANSACTION_LIST, {"limit": 1_000}))["transactions"]
            if not page:
                return
            for row in page:
                if row["state"] == "parked":
                    self.by_operator += 1
                    decision = self.ledger.decide(row["id"], "rollback")
                    kind = T.COMMIT if decision == "commit" else T.ROLLBACK
                    await self.caller.get(kind, row["id"])
            await rest(AGAIN_S)

    async def look(self) -> None:
        for deal in self.deals.values():
            frame = await self.caller.ask(T.TRANSACTION_SHOW, deal.name)
            deal.state = frame[2]["state"] if frame[0] == T.OK else frame[2]

    def text(self) -> str:
        states = [deal.state for deal in self.deals.values()]
        return (
            f"transactions {len(states)}, committed {states.count('committed')}, rolled back"
            f" {states.count('rolled_back')}, producers that died {self.deaths}, questions"
            f" {self.asked}, decided by an operator {self.by_operator}"
        )

    @property
    def shows_enough(self) -> bool:
        return bool(self.asked and self.deaths)

    def judge(self) -> list[str]:
        delivered = [
            item.token
            for journal in self.plan.journals
            for item in journal.delivered
            if item.token.startswith("deal-")
        ]
        result = judge(self.deals.values(), self.ledger.decisions, delivered)
        if not self.shows_enough:
            result.append(f"the run shows nothing: {self.text()}")
        return result


# --- the judge -----------------------------------------------------------------------------------

_STATES = {"commit": "committed", "rollback": "rolled_back"}


def judge(
    deals: Iterable[Deal], decisions: Mapping[str, str], delivered: Collection[str]
) -> list[str]:
    """Half tasks that were seen, tasks that were lost, and transactions that went both ways."""
    came: dict[str, set[str]] = {}
    for body in delivered:
        came.setdefault(body.split("/")[0], set()).add(body)
    wrong: list[str] = []
    for deal in deals:
        wrong += _judge_one(deal, decisions.get(deal.name), came.pop(deal.name, set()))
    return [*wrong, *(f"nobody's: {name} was never begun" for name in came)]


def _judge_one(deal: Deal, decision: str | None, came: set[str]) -> list[str]:
    name, wrong = deal.name, []
    if len(deal.answered) > 1 or deal.answered - {decision}:
        wrong.append(f"both ways: {name} was answered {sorted(deal.answered)}, not {decision}")
    if deal.state == "unknown_transaction":
        if deal.kept:
            wrong.append(f"lost: nobody knows {name}, of which {len(deal.kept)} tasks were kept")
    elif decision is None or deal.state != _STATES[decision]:
        wrong.append(f"both ways: {name} is {deal.state}, and was decided {decision}")
    if decision != "commit":
        wrong += [f"half a task was seen: {body}" for body in sorted(came)]
        return wrong
    wrong += [f"lost: {body} was committed" for body in sorted(deal.kept - came)]
    return wrong + [f"unknown: {body} was never sent" for body in sorted(came - deal.sent)]
