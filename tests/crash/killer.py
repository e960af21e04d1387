"""Ends the daemon again and again: at random moments, and at every named place of its code."""

from __future__ import annotations

import asyncio
import signal

from daemon import Daemon, DaemonFailed

from crash.plan import Plan
from tickwheel import failpoints

FAILPOINT_WAIT_S = 1.5
"""A place that is not passed by then is tried again later; SIGKILL ends this life."""
LIFE_S_MAX = 0.7
COUNTS_MAX = {
    "commit.before": 25,
    "commit.after": 25,
    "deliver.before_checkpoint": 15,
    "sqlite.checkpoint": 4,
    "recovery.middle": 1,
}
"""How often a place is passed before it kills, at most."""
GRACEFUL_EVERY = 6
EXTRA_MAX = 30
"""More kills than asked for, until every place has killed once."""
_KILLED = -signal.SIGKILL


class Killer:
    """``run`` ends the daemon ``kills`` times and leaves a fresh one behind."""

    def __init__(self, daemon: Daemon, plan: Plan, kills: int) -> None:
        self._daemon = daemon
        self._rnd = plan.rnd("killer")
        self._kills = kills
        self.problems: list[str] = []
        self.random_kills = 0
        self.stops = 0

    @property
    def missed(self) -> list[str]:
        """Places that never killed: the run has not shown what it should."""
        return sorted(set(failpoints.NAMES) - set(self._daemon.hits))

    async def run(self) -> None:
        done = 0
        while done < self._kills or (self.missed and done < self._kills + EXTRA_MAX):
            name = self._place(done)
            if name:
                self._daemon.failpoints = f"{name}={self._rnd.randint(1, COUNTS_MAX[name])}"
            alive = await self._start()
            if alive and self._rnd.random() < 1 / GRACEFUL_EVERY and not name:
                await self._stop()
                alive = await self._start()
            if alive:
                await self._live(FAILPOINT_WAIT_S if name else LIFE_S_MAX * self._rnd.random())
            done += 1
        await self._start()

    def _place(self, done: int) -> str:
        """Every second kill at a named place, those that have not killed yet first."""
        if done % 2 == 0 and done < self._kills:
            return ""
        wanted = self.missed or list(failpoints.NAMES)
        return self._rnd.choice(wanted)

    async def _start(self) -> bool:
        """False when it was killed before it served."""
        if self._daemon.alive:
            return True
        self._daemon.spawn()
        try:
            await asyncio.to_thread(self._daemon.wait_ready)
        except DaemonFailed as error:
            if self._daemon.alive or self._daemon.wait(0) != _KILLED:
                raise
            del error
            return False
        return True

    async def _live(self, life_s: float) -> None:
        """Until a failpoint kills it, or for so long."""
        try:
            code = await self._daemon.awaited(life_s)
        except DaemonFailed:
            self.random_kills += 1
            await self._daemon.akill()
            return
        if code != _KILLED:
            self.problems.append(f"the daemon ended by itself with {code}")

    async def _stop(self) -> None:
        self.stops += 1
        code = await self._daemon.aterminate()
        if code != 0:
            self.problems.append(f"SIGTERM: the daemon ended with {code}")
