"""One torture run from seed to verdict: clients, killer, drain, checker, audit.

    python -m tests.crash.torture --kills 200 --seed 7 [--store URL] [--keep FOLDER]

Exit code 1 when any promise was broken, a failpoint was never passed, or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemon import Daemon

from crash.checker import Verdict, check
from crash.fair_clients import FairConsumer, FairProducer
from crash.killer import Killer
from crash.link import Link, Numbers, now_ms
from crash.plan import GROUPS, SETTINGS, Plan
from crash.records import Requeued
from crash.rough_consumers import RoughConsumer, RoughPuller
from crash.rough_producer import RoughProducer
from tickwheel.persistence import audit
from tickwheel.protocol.frames import FrameType

WAL_BYTES = 128 * 1024
"""Small, so that the log is written back many times in a run."""
DRAIN_TIMEOUT_S = 60.0
LOOK_S = 0.05
COUNTS = ("pending", "ready", "in_flight", "waiting", "dead")


class Run:
    """One run; ``verdict`` and ``problems`` after ``go``."""

    def __init__(self, kills: int, seed: int, folder: Path, store: str | None = None) -> None:
        path = folder / "store.db"
        self.plan = Plan(seed)
        self.daemon = Daemon(
            folder,
            store=store or f"sqlite:///{path}?wal_bytes={WAL_BYTES}&reserve_bytes=0",
            **SETTINGS,
        )
        self.killer = Killer(self.daemon, self.plan, kills)
        self.verdict = Verdict()
        self.problems: list[str] = []

    async def go(self) -> None:
        try:
            await self._go()
        finally:
            await self.daemon.akill()
        self.verdict = check(self.plan.journals, GROUPS)
        self.problems += self.killer.problems
        self.problems += [f"failpoint {name} was never passed" for name in self.killer.missed]
        if not (self.verdict.tasks and self.verdict.duplicates and self.verdict.resent):
            self.problems.append(f"the run shows nothing: {self.verdict.text()}")

    async def _go(self) -> None:
        await self.daemon.astart()
        self.plan.port = self.daemon.port
        await self._make_groups()
        async with asyncio.TaskGroup() as everybody:
            producers = [everybody.create_task(p.run()) for p in self._producers()]
            for consumer in self._consumers():
                everybody.create_task(consumer.run())
            await self.killer.run()
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
        if (code := await self.daemon.aterminate()) != 0:
            self.problems.append(f"SIGTERM at the end: exit code {code}")
        if not self.daemon.store.startswith("sqlite:"):
            return
        found = audit.check(self.daemon.store)
        self.problems += [f"audit: {problem}" for problem in found.problems]
        if found.tasks or found.progress or found.dead:
            self.problems.append(f"left in the store: {found}")

    def report(self) -> str:
        hits = self.daemon.hits
        places = ", ".join(f"{name} {hits.count(name)}" for name in sorted(set(hits)))
        lines = [
            f"seed {self.plan.seed}: kills at random {self.killer.random_kills}, at failpoints"
            f" {len(hits)} ({places}), graceful stops {self.killer.stops + 1},"
            f" starts {self.daemon.starts}",
            self.verdict.text(),
            *(f"PROBLEM {problem}" for problem in self.problems),
        ]
        good = not self.problems and not self.verdict.violations
        return "\n".join([*lines, "torture: " + ("all promises held" if good else "FAILED")])

    @property
    def good(self) -> bool:
        return not self.problems and not self.verdict.violations


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    parser.add_argument("--store", default=None, help="store URL (default: SQLite, in a folder)")
    parser.add_argument("--keep", type=Path, default=None, help="folder for store and log")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else secrets.randbelow(2**31)
    print(f"torture: seed {seed}, {given.kills} kills", flush=True)  # noqa: T201  # its output
    with tempfile.TemporaryDirectory(prefix="tickwheel-torture-") as made:
        run = Run(given.kills, seed, given.keep or Path(made), given.store)
        started_s = time.monotonic()
        try:
            asyncio.run(run.go())
        except BaseExceptionGroup as group:
            run.problems += [f"a client failed: {error!r}" for error in _leaves(group)]
        print(run.report(), f"({time.monotonic() - started_s:.1f} s)")  # noqa: T201
        if not run.good:
            print(run.daemon.log_text()[-4000:], file=sys.stderr)  # noqa: T201
    return 0 if run.good else 1


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
