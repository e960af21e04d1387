"""Producers whose tasks have keys and rules, and the judge of what became of them.

Some keys are shared by all of them, with ``keep`` and ``reject``: of such a key at most one task is
unfinished, whoever asks and whenever. Others are one producer's own, with ``replace``, and far
away: of these there is one task from the first to the last, under one id, and what is delivered in
the end is the newest body that was confirmed. Requests are sent one after the other, so that which
is the newest is known; answers are lost on purpose, and asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from crash.fair_clients import FairConsumer
from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from crash.records import Journal
from crash.rough_consumers import RoughConsumer
from crash.rough_producer import RETRYABLE, delay_ms
from crash.workload import Caller, Workload
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.protocol import Frame

KEYED = "keyed"
GROUP = "default"
SHARED = tuple(f"shared-{n}" for n in range(5))
OWN = 3
FAR_MS = 3_600_000
PAUSE_S = 0.01
LEGAL = {"keep": {"stored", "kept"}, "reject": {"stored", "rejected"}, "replace": {"replaced"}}
UNFINISHED = {"scheduled", "ready", "waiting", "in_flight"}


class KeyedProducer:
    """One of them."""

    def __init__(self, plan: Plan, name: str, caller: Caller) -> None:
        self._plan = plan
        self._caller = caller
        self._rnd = plan.rnd(name)
        self._name = name
        self._journal = plan.journal(name)
        self._numbers = Numbers()
        self._session = self._rnd.randbytes(16)
        self._tokens = 0
        self.stored: dict[str, int] = {}
        """Token → id, of shared keys."""
        self.merged: dict[str, int] = {}
        """Ids that were answered for tasks that were not stored."""
        self.own: dict[str, tuple[int, str]] = {}
        """Key → id and newest token."""
        self.looks = 0

    async def run(self) -> None:
        while self._plan.producing:
            if not self._plan.is_making:
                await rest(PAUSE_S)
                continue
            tasks = [self._task() for _ in range(self._rnd.choice((1, 1, 2, 4)))]
            for shard in range(self._plan.shards):
                here = [task for task in tasks if self._plan.shard_of(task[3]["key"]) == shard]
                if here:
                    await self._settle(here, shard)
            await rest(PAUSE_S * self._rnd.random())
        for key in list(self.own):
            await self._caller.get(FrameType.RUN_NOW, None, {"topic": KEYED, "key": key})

    def _task(self) -> tuple[Any, ...]:
        rnd = self._rnd
        self._tokens += 1
        token = f"{self._name}/{self._tokens}"
        if rnd.random() < 0.4:
            key = f"{self._name}/{rnd.randrange(OWN)}"
            return KEYED, token.encode(), FAR_MS, {"key": key, "if_pending": "replace"}
        rule = rnd.choice(("keep", "reject"))
        options = {"key": rnd.choice(SHARED), "if_pending": rule}
        return KEYED, token.encode(), delay_ms(rnd), options

    async def _settle(self, tasks: Sequence[tuple[Any, ...]], shard: int) -> None:
        """Send one request until it is answered, and the same number once more now and then."""
        number, rnd = self._numbers.next(), self._rnd
        first: Frame | None = None
        while first is None or rnd.random() < 0.1:
            link = await self._plan.link(self._numbers, shard, session=self._session)
            try:
                frame = await self._send(link, number, tasks)
                if frame[0] == FrameType.ERROR and frame[2] in RETRYABLE:
                    continue
                if first is None:
                    first = frame
                    self._write_down(tasks, frame)
                elif frame[:3] != first[:3]:
                    self._journal.odd.append(f"{tasks}: first {first}, then {frame}")
                if rnd.random() < 0.3:
                    await self._look(link, rnd.choice(tasks)[3]["key"])
            except Lost:
                self._journal.resent += 1
            finally:
                link.abort()

    async def _send(self, link: Link, number: int, tasks: Sequence[Any]) -> Frame:
        answer = link.send_as(number, FrameType.ENQUEUE, number, tasks)
        if self._rnd.random() < 0.1:
            await rest(PAUSE_S * self._rnd.random())
            raise Lost("on purpose, with the answer on its way")
        return await link.wait(answer)

    def _write_down(self, tasks: Sequence[tuple[Any, ...]], frame: Frame) -> None:
        if frame[0] != FrameType.OK or len(frame[2]) != 3:
            self._journal.odd.append(f"{tasks} was answered {frame}")
            return
        _, ids, more = frame[2]
        for (_, body, _, options), task_id, (word, _) in zip(
            tasks, ids, more["outcomes"], strict=True
        ):
            token, key, rule = body.decode(), options["key"], options["if_pending"]
            known = self.own.get(key)
            legal = LEGAL[rule] if rule != "replace" or known is not None else {"stored"}
            if word not in legal or (known is not None and known[0] != task_id):
                self._journal.odd.append(f"{token} ({options}, {known}): {word} {task_id}")
            if rule == "replace":
                self.own[key] = task_id, token
            elif word == "stored":
                self.stored[token] = task_id
            else:
                self.merged[token] = task_id

    async def _look(self, link: Link, key: str) -> None:
        """One moment of the key: at most one unfinished task, dead letters apart."""
        frame = await link.call(FrameType.LOOKUP, None, {"topic": KEYED, "key": key})
        if frame[0] != FrameType.OK:
            return
        self.looks += 1
        rows = [(task["id"], task["state"]) for task in frame[2] if task["state"] in UNFINISHED]
        if len(rows) > 1:
            self._journal.odd.append(f"{key} is pending {len(rows)} times: {rows}")


class Keyed(Workload):
    """Tasks with keys and rules, of several producers."""

    what = "keys"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._producers = [KeyedProducer(plan, f"keyed-{i}", self.caller) for i in range(3)]
        self.consumers = [
            FairConsumer(plan, "fair-keyed", KEYED, GROUP),
            *(
                RoughConsumer(plan, "rough-keyed", KEYED, GROUP, shard=shard)
                for shard in range(plan.shards)
            ),
        ]

    async def begin(self) -> None:
        await self.caller.get(FrameType.SUBSCRIBE, 1, KEYED, GROUP, 0, {})

    async def run(self) -> None:
        await asyncio.gather(*(producer.run() for producer in self._producers))

    @property
    def shows_enough(self) -> bool:
        return any(producer.stored for producer in self._producers) and all(
            producer.merged and producer.own for producer in self._producers
        )

    def judge(self) -> list[str]:
        return judge(self._producers, self.plan.journals)

    def text(self) -> str:
        stored = sum(len(producer.stored) for producer in self._producers)
        return f"with keys: stored {stored}, looks {sum(p.looks for p in self._producers)}"


def judge(producers: Sequence[KeyedProducer], journals: Iterable[Journal]) -> list[str]:
    """Return the violations after the run."""
    came: dict[str, set[int]] = {}
    acked: set[int] = set()
    for journal in journals:
        for delivery in journal.delivered:
            came.setdefault(delivery.token, set()).add(delivery.id)
        acked |= {end.id for end in journal.finished if end.how == "acked"}
    wrong: list[str] = []
    ids = {task_id for producer in producers for task_id in producer.stored.values()}
    for producer in producers:
        newest = {token: task_id for task_id, token in producer.own.values()}
        for token, task_id in (producer.stored | newest).items():
            if came.get(token) != {task_id} or task_id not in acked:
                wrong.append(f"lost: {token} (id {task_id}) came as {came.get(token)}")
        for token, task_id in producer.merged.items():
            if token in came:
                wrong.append(f"{token} was merged into {task_id}, and came as {came[token]}")
            if task_id not in ids:
                wrong.append(f"{token} was merged into {task_id}, which nobody has stored")
        replaced = [
            token for token in came
            if token.startswith(f"{producer._name}/")
            and token not in producer.stored and token not in newest
        ]  # fmt: skip
        wrong += [f"{token} was replaced, and came" for token in replaced]
    if not (ids and all(producer.merged and producer.own for producer in producers)):
        wrong.append("the run shows nothing of keys")
    return wrong
