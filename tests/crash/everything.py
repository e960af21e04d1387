"""Everything at once, beside a daemon that is killed: each feature is used in the middle of all
others, by chance, and what clients saw is judged (``witness.py``).

    python -m tests.crash.torture --nemesis everything --seed 7 --minutes 1

A run is a scene: meddlers and pullers, a killer, a clock that is moved. Then everything is let go,
and the daemon has to drain: no task, no dead letter, no negative count, nothing in the store.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from crash.clocks import Clocked, Clocks
from crash.killer import COUNTS_MAX, places_of
from crash.meddlers import GROUPS, SCHEDULES, Meddler, Puller
from crash.plan import Plan
from crash.torture_run import ENDINGS_MAX, SQLITE
from crash.witness import Witness
from support.daemon import DaemonFailed
from support.waiting import rest
from tickwheel.client import Client
from tickwheel.errors import TickwheelError
from tickwheel.persistence import audit

KEEPER = ("t0", "g0")
TOPICS = ("t0", "t1", "t2")
MEDDLERS = 4
LIFE_S = (1.5, 5.0)
"""How long the daemon lives, at least and at most."""
CLOCK_S = (0.3, 2.0)
CLOCK_MS = 8_000
"""So far it is moved, either way."""
DRIFT = 0.02
LOOK_S = 0.2
CROWDED = 1_200
"""Waiting tasks from which on no further ones are enqueued."""
DRAIN_S = 60.0
"""Seconds without the end of any remaining task after which the run is stuck."""
DRAIN_ALL_S = 300.0
SENT_AGAIN_S = 8.0
NOTES_MAX = 40
LOG_SHOWN = 1_500
ASKED_ABOUT = 500
UNWANTED = ("internal_error", "rows_missing", "Traceback")
"""What the daemon must never log."""
WAITS = ("ready", "in_flight", "waiting")


class Scene:
    """One run; ``problems`` after ``go``."""

    def __init__(self, seed: int, seconds: float, folder: Path) -> None:
        self.seed = seed
        self.topics, self.keeper = TOPICS, KEEPER
        self.is_over = self.is_crowded = False
        self._seconds = seconds
        self._until_s = 0.0
        self._plan = Plan(seed)
        self._rnd = self.rnd("scene")
        self.witness = Witness(self._plan.clocks, KEEPER)
        self.daemon = self._make_daemon(folder)
        self._moves_clock = self._rnd.random() < 0.5
        self._killing = asyncio.Lock()
        self._kills: Counter[str] = Counter()
        self._is_armed = False
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)

    def rnd(self, name: str) -> random.Random:
        """Return a random generator per name, so that users do not affect each other."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, who: str, what: str) -> None:
        """For a report: what was done last."""
        self._notes.append(f"{who}: {what}")

    @property
    def problems(self) -> list[str]:
        return self.witness.problems

    @property
    def is_meddling(self) -> bool:
        return time.monotonic() < self._until_s and not self.problems

    def _make_daemon(self, folder: Path) -> Clocked:
        rnd, settings = self._rnd, dict[str, Any]()
        settings |= {"reconnect_grace_s": 0.5, "transaction_check_s": 1.0}
        settings |= {"transaction_check_every_s": 1.0, "retry_base_s": 0.05, "retry_cap_s": 0.3}
        settings |= {"retry_max": 3, "endings_max": ENDINGS_MAX, "log_format": "json"}
        settings["lease_checkpoint_s"] = rnd.choice((0.0, 0.05, 0.1))
        settings["resident_horizon_s"] = rnd.choice((0.0, 60.0))
        settings["tick_ms"] = rnd.choice((100, 1_000))
        if rnd.random() < 0.5:
            settings |= {"history_dir": folder / "history", "history_bodies": True}
        query = f"{SQLITE}&endings_max={ENDINGS_MAX}"
        store = f"sqlite:///{folder / 'everything.db'}?{query}"
        clocks: Clocks = self._plan.clocks
        return Clocked(folder / "daemon", clocks, 0, store=store, **settings)

    # --- from beginning to end -------------------------------------------------------------------

    async def go(self) -> None:
        clients: list[Client] = []
        try:
            await self.daemon.astart()
            for number in range(3):
                client = Client(self.daemon.url, send_timeout=SENT_AGAIN_S, name=f"every-{number}")
                clients.append(await client.connect())
            await clients[0].create_group(*KEEPER, start="first")
            await self._go(clients)
        except BaseExceptionGroup as group:
            self.witness.bad(f"a client failed: {group.exceptions!r:.600}")
        finally:
            for client in clients:
                with suppress(TickwheelError):
                    await client.close(1)
            await self.daemon.akill()
        text = self.daemon.log_text()
        for word in UNWANTED:
            if word in text:
                self.witness.bad(f"in the log: {text[text.index(word) :][:LOG_SHOWN]}")

    async def _go(self, clients: list[Client]) -> None:
        self._until_s = time.monotonic() + self._seconds
        async with asyncio.TaskGroup() as group:
            meddlers = [
                group.create_task(Meddler(self, clients[n % 2], f"meddler-{n}").run())
                for n in range(MEDDLERS)
            ]
            for topic in TOPICS:
                for name in GROUPS:
                    group.create_task(Puller(self, clients[2], topic, name).run())
            havoc = [group.create_task(work()) for work in (self._kill, self._move_clock)]
            watching = group.create_task(self._watch(clients[0]))
            await asyncio.wait([*meddlers, *havoc])
            if not self.problems:
                await self._drain(clients[0])
            self.is_over = True
            watching.cancel()
        if not self.problems:
            await self._judge(clients[0])
            await self._close()

    # --- what goes wrong -------------------------------------------------------------------------

    async def _kill(self) -> None:
        """SIGKILL and SIGTERM; and named places, at which the daemon kills itself."""
        rnd = self.rnd("killer")
        while self.is_meddling:
            await rest(rnd.uniform(*LIFE_S))
            async with self._killing:
                if not self.is_meddling:
                    return
                is_kill = rnd.random() < 0.7
                self.witness.new_era()
                if not self.daemon.alive:
                    self._look_at_end(self.daemon.wait(0))
                elif is_kill:
                    await self.daemon.akill()
                else:
                    self._look_at_end(await self.daemon.aterminate())
                self._kills["SIGKILL" if is_kill else "SIGTERM"] += 1
                if rnd.random() < 0.5:
                    place = rnd.choice(places_of(self.daemon.store))
                    count = rnd.randint(1, 8 * COUNTS_MAX.get(place, 1))
                    self.daemon.failpoints, self._is_armed = f"{place}={count}", True
                await self._start()

    async def _start(self) -> None:
        """However often a named place ends the start."""
        while True:
            try:
                await self.daemon.astart()
            except DaemonFailed:
                if self.daemon.alive:
                    raise
                self._look_at_end(self.daemon.wait(0))
                if self.problems:
                    return
            else:
                self.witness.new_era()
                return

    def _look_at_end(self, code: int) -> None:
        """By itself it ends at a named place only, by SIGKILL; asked to, with 0."""
        if code == -9 and self._is_armed:
            self._kills["failpoint"] += 1
        elif code != 0:
            self.witness.bad(f"the daemon ended with {code}; before that: {list(self._notes)}")
        self._is_armed = False

    async def _move_clock(self) -> None:
        rnd = self.rnd("clock")
        while self.is_meddling and self._moves_clock:
            await rest(rnd.uniform(*CLOCK_S))
            if rnd.random() < 0.3:
                self.daemon.set_clock(rate=1 + rnd.uniform(-DRIFT, DRIFT))
            else:
                self.daemon.set_clock(rnd.randint(-CLOCK_MS, CLOCK_MS))
            self._kills["clock"] += 1
        # Beyond all that is due by any of them.
        if self._moves_clock:
            self.daemon.set_clock(2 * CLOCK_MS, 1.0)

    async def _watch(self, client: Client) -> None:
        """The daemon is there, what ends it is known, and what it counts can be."""
        while True:
            await rest(LOOK_S)
            async with self._killing:
                if not self.daemon.alive and not self.problems:
                    code = self.daemon.wait(0)
                    if code == 0:
                        self.witness.bad("the daemon ended by itself with 0")
                    self._look_at_end(code)
                    self.witness.new_era()
                    await self._start()
            with suppress(TickwheelError):
                self.is_crowded = self._waiting((await client.stats()).raw) > CROWDED

    def _waiting(self, stats: dict[str, Any] | Any) -> int:
        """All that is not over; and no count is below 0."""
        waiting = 0
        self.witness.counted(stats, "the daemon")
        for name, topic in stats["topics"].items():
            self.witness.counted(topic, name)
            # Tasks of a group being deleted count only for the topic.
            waiting += topic["scheduled"] + sum(topic[state] for state in WAITS)
            waiting += "deleting" in topic
            for group, counts in topic["groups"].items():
                self.witness.counted(counts, f"{name} {group}")
        if stats["early"]:
            self.witness.bad(f"the daemon held back {stats['early']} early deliveries")
        return waiting

    # --- the end ---------------------------------------------------------------------------------

    async def _drain(self, client: Client) -> None:
        """Nothing holds anybody back any more: all of it is acked."""
        left, least = None, sys.maxsize
        until_s = stuck_s = time.monotonic() + DRAIN_ALL_S
        while time.monotonic() < min(until_s, stuck_s) and not self.problems:
            try:
                for name in SCHEDULES:
                    with suppress(TickwheelError):
                        await client.delete_schedule(name)
                async for transaction in client.list_transactions():
                    if transaction.state in ("open", "parked"):
                        await client.rollback_transaction(transaction.id)
                # A reset that is slow makes tasks when nothing else is left.
                making = [item async for item in client.list_bulk(state="running")]
                stats = (await client.stats()).raw
                for topic, found in stats["topics"].items():
                    for group, counts in found["groups"].items():
                        await self._let_go(client, topic, group, counts)
                    if any(counts["dead"] for counts in found["groups"].values()):
                        await client.dead_delete(topic=topic, filter={})
                left = {t: _left_of(found) for t, found in stats["topics"].items()}
                waiting = self._waiting(stats) + stats["dead"] + len(making)
                if not waiting:
                    return
                if waiting < least:
                    least, stuck_s = waiting, time.monotonic() + DRAIN_S
            except TickwheelError as error:
                self.witness.error(error, "the drain")
            await rest(LOOK_S)
        if not self.problems:
            self.witness.bad(f"left, and no less for {DRAIN_S:g} s: {left}")

    async def _let_go(self, client: Client, topic: str, group: str, counts: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"paused": False, "rate": None, "tags": None, "where": None}
        settings |= {"rate_each": None} if counts.get("rate_each") else {}
        with suppress(TickwheelError):  # it may be going
            await client.configure(topic, group, **settings)
            for held in await client.held_keys(topic, group):
                await client.skip_key(topic, group, held.id)

    async def _judge(self, client: Client) -> None:
        """How all that was acknowledged has ended."""
        ids = sorted(self.witness.accepted)
        for begin in range(0, len(ids), ASKED_ABOUT):
            for task in await client.lookup_many(ids[begin : begin + ASKED_ABOUT]):
                self.witness.ended(task.id, task.state)
        async for task in client.list_tasks():
            self.witness.bad(f"still listed: {task.id} of {task.topic}, {task.state}")

    async def _close(self) -> None:
        if (code := await self.daemon.aterminate()) != 0:
            self.witness.bad(f"SIGTERM at the end: exit code {code}")
        result = audit.check(self.daemon.store)
        for problem in result.problems:
            self.witness.bad(f"audit: {problem}")
        if result.tasks or result.progress or result.dead:
            self.witness.bad(f"left in the store: {result}")

    def report(self) -> str:
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self._kills.items()))
        verdict = "all promises held" if not self.problems else "FAILED"
        lines = [f"seed {self.seed}: {kills}", self.witness.text()]
        lines += [f"PROBLEM {problem}" for problem in self.problems]
        if self.problems:
            lines.append(f"last: {list(self._notes)}")
        return "\n".join([*lines, f"everything: {verdict}"])


def _left_of(topic: dict[str, Any]) -> dict[str, Any]:
    groups = {
        name: {state: counts[state] for state in (*WAITS, "dead") if counts[state]}
        for name, counts in topic["groups"].items()
    }
    return {"scheduled": topic["scheduled"]} | {name: left for name, left in groups.items() if left}


async def run(seed: int, seconds: float, folder: Path) -> Scene:
    """One scene, from its seed to its verdict."""
    scene = Scene(seed, seconds, folder)
    await scene.go()
    return scene
