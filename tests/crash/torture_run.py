"""One torture run from seed to verdict: clients, killer, drain, checker, audit.

What is done to the daemon and its store is a ``Havoc``; everything else is the same in all runs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from daemon import Daemon

from crash.checker import Verdict, check
from crash.failover import Failover
from crash.fair_clients import FairConsumer, FairProducer
from crash.killer import Killer
from crash.link import Link, Numbers, now_ms
from crash.plan import GROUPS, SETTINGS, Plan
from crash.records import Requeued
from crash.redis_faults import RedisFaults
from crash.redis_rig import RedisRig
from crash.rough_consumers import RoughConsumer, RoughPuller
from crash.rough_producer import RoughProducer
from tickwheel.persistence import audit
from tickwheel.protocol.frames import FrameType

SQLITE = "wal_bytes=131072&reserve_bytes=0"
"""A small log, so that it is written back many times in a run."""
ENDINGS_MAX = 1_000_000
"""How each task of a run ended is to be known until its last ack is asked about."""
DRAIN_TIMEOUT_S = 60.0
LOOK_S = 0.05
COUNTS = ("pending", "ready", "in_flight", "waiting", "dead")
FAULTS_ANSWER_TIMEOUT_S = 30.0
"""What Redis is asked about waits until Redis is back."""
KEEP_MS = 600
"""So that a Redis that came back older is mended in both ways, by the batches and from memory."""
LINES_MAX = 25
"""In the log about one start or one fault."""
LEADER_TTL_S = 1.0
"""The one who takes over after a kill has to wait so long."""


class Havoc(Protocol):
    """What goes wrong in a run; afterwards a daemon serves."""

    @property
    def problems(self) -> list[str]: ...

    @property
    def missed(self) -> list[str]:
        """What should have happened at least once and did not."""
        ...

    async def run(self) -> None: ...

    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is like. ``kills`` counts kills of the daemon, or faults of its store."""

    kills: int
    seed: int
    store: str = "sqlite"
    """``sqlite``, ``redis`` (a server of the run's own), or a store URL."""
    faults: bool = False
    """Redis goes wrong too."""
    daemons: int = 1
    driver: str = "redis"
    every_place: bool = True
    """Each failpoint has to kill once."""
    hold_s_max: float = 6.0
    """How long a fault lasts at most."""
    without: frozenset[str] = frozenset()
    """Faults that are left out."""


class Run:
    """One run; ``verdict`` and ``problems`` after ``go``."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.plan = Plan(options.seed, large=options.store == "redis")
        self.redis: RedisRig | None = None
        store = options.store
        if store == "redis":
            query = f"driver={options.driver}&keep_ms={KEEP_MS}&endings_max={ENDINGS_MAX}"
            self.redis = RedisRig(folder, query, proxied=options.faults)
        elif store == "sqlite":
            store = f"sqlite:///{folder / 'store.db'}?{SQLITE}&endings_max={ENDINGS_MAX}"
        self.daemons = [
            Daemon(
                folder / f"daemon-{i}",
                store=store,
                leader_ttl_s=LEADER_TTL_S,
                endings_max=ENDINGS_MAX,
                **SETTINGS,
            )
            for i in range(options.daemons)
        ]
        self.havoc = self._make_havoc(self.redis)
        self.verdict = Verdict()
        self.problems: list[str] = []

    async def go(self) -> None:
        try:
            if self.redis is not None:
                await self.redis.start()
                for daemon in self.daemons:
                    daemon.store = self.redis.url
            await self._go()
        finally:
            for daemon in self.daemons:
                await daemon.akill()
            if self.redis is not None:
                await self.redis.stop()
        self.verdict = check(self.plan.journals, GROUPS)
        self.problems += [*self.havoc.problems, *self.havoc.missed]
        self._look_at_logs()
        if not (self.verdict.tasks and self.verdict.duplicates and self.verdict.resent):
            self.problems.append(f"the run shows nothing: {self.verdict.text()}")

    def _make_havoc(self, redis: RedisRig | None) -> Havoc:
        options, plan = self.options, self.plan
        kills = 0 if options.faults else options.kills
        common = (plan, kills, self._disturbed)
        every = options.every_place
        victim: Killer | Failover
        if options.daemons > 1:
            victim = Failover(self.daemons, *common, ttl_s=LEADER_TTL_S, every_place=every)
        else:
            victim = Killer(self.daemons[0], *common, every_place=every)
        if redis is None or not options.faults:
            return victim
        plan.answer_timeout_s = FAULTS_ANSWER_TIMEOUT_S
        return RedisFaults(
            redis,
            victim,
            plan,
            options.kills,
            hold_s_max=options.hold_s_max,
            without=options.without,
        )

    def _disturbed(self) -> int:
        return self.redis.disturbed if self.redis is not None else 0

    async def _go(self) -> None:
        for daemon in self.daemons:
            await daemon.astart()
        self.plan.ports = [daemon.port for daemon in self.daemons]
        await self._make_groups()
        async with asyncio.TaskGroup() as everybody:
            producers = [everybody.create_task(p.run()) for p in self._producers()]
            for consumer in self._consumers():
                everybody.create_task(consumer.run())
            await self.havoc.run()
            self.plan.producing = False
            await asyncio.wait(producers)
            self.plan.misbehaving = False
            await self._drain()
            self.plan.consumed.set()
        await self._look_at_what_is_left()

    def _producers(self) -> list[Any]:
        plan = self.plan
        rough = [RoughProducer(plan, f"rough-producer-{i}") for i in range(3)]
        return [*rough, FairProducer(plan, "fair-producer")]

    def _consumers(self) -> list[Any]:
        plan = self.plan
        return [
            *(
                FairConsumer(plan, f"fair-{topic}-{group}", topic, group)
                for topic, groups in GROUPS.items()
                if topic != "rough"
                for group in groups
            ),
            RoughConsumer(plan, "rough-work", "work", "default"),
            RoughConsumer(plan, "rough-billing", "shared", "billing"),
            RoughConsumer(plan, "rough-1", "rough", "default"),
            RoughConsumer(plan, "rough-2", "rough", "default"),
            RoughPuller(plan, "puller-rough", "rough", "default"),
            RoughPuller(plan, "puller-audit", "shared", "audit"),
        ]

    async def _make_groups(self) -> None:
        """Before the first task, so that all of them are owed every task."""
        link = await self.plan.link(Numbers())
        pairs = [(topic, group) for topic, groups in GROUPS.items() for group in groups]
        for number, (topic, group) in enumerate(pairs):
            frame = await link.call(FrameType.SUBSCRIBE, number, topic, group, 0, {})
            assert frame[0] == FrameType.OK, frame
        link.abort()

    # --- the end ---------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Until the daemon says that nothing is left; dead letters are brought back."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        journal = self.plan.journal("operator")
        link = await self.plan.link(Numbers())
        while True:
            counts = await self._counts(link)
            if not any(counts.values()):
                return link.abort()
            if time.monotonic() > deadline:
                self.problems.append(f"still there after {DRAIN_TIMEOUT_S} s: {counts}")
                return link.abort()
            if counts["dead"]:
                listed = await link.call(FrameType.DEAD_LIST, {"limit": 1000})
                letters = [(letter["id"], letter["group"]) for letter in listed[2]["dead"]]
                journal.requeued += [Requeued(i, group, now_ms()) for i, group in letters]
                await link.call(FrameType.DEAD_REQUEUE, letters)
            await asyncio.sleep(LOOK_S)

    async def _counts(self, link: Link) -> dict[str, int]:
        found = (await link.call(FrameType.STATS))[2]
        if found["early"]:
            self.problems.append(f"the daemon held back {found['early']} early deliveries")
        return {name: found[name] for name in COUNTS}

    async def _look_at_what_is_left(self) -> None:
        """Still nothing after everything was settled, after a stop, and in the file itself."""
        link = await self.plan.link(Numbers())
        counts = await self._counts(link)
        link.abort()
        if any(counts.values()):
            self.problems.append(f"left in the daemon at the end: {counts}")
        for daemon in self.daemons:
            if (code := await daemon.aterminate()) != 0:
                self.problems.append(f"SIGTERM at the end: exit code {code}")
        if self.redis is not None:
            self.problems += [f"left in Redis: {name}" for name in await self.redis.left()]
        store = self.daemons[0].store
        if not store.startswith("sqlite:"):
            return
        found = audit.check(store)
        self.problems += [f"audit: {problem}" for problem in found.problems]
        if found.tasks or found.progress or found.dead:
            self.problems.append(f"left in the store: {found}")

    def _look_at_logs(self) -> None:
        text = self.log_text()
        if "Traceback" in text:
            self.problems.append("there is a traceback in the daemon's log")
        happened = sum(daemon.starts for daemon in self.daemons) + self._disturbed() // 2
        lines = text.count("\n")
        if lines > happened * LINES_MAX:
            self.problems.append(f"{lines} lines of log about {happened} starts and faults")

    def log_text(self) -> str:
        """What the daemons wrote."""
        return "\n".join(daemon.log_text() for daemon in self.daemons)

    def report(self) -> str:
        lines = [
            f"seed {self.plan.seed}: {self.havoc.text()}",
            self.verdict.text(),
            *(f"PROBLEM {problem}" for problem in self.problems),
        ]
        return "\n".join([*lines, "torture: " + ("all promises held" if self.good else "FAILED")])

    @property
    def good(self) -> bool:
        return not self.problems and not self.verdict.violations
