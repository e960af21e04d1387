"""Redis goes wrong in every way, again and again, while daemons are killed now and then.

A fault that loses what Redis had confirmed is mended from the daemon's memory: so the daemon is
well when it begins, and is not killed before it is well again. More faults may come meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Protocol

from crash.plan import Plan
from support.waiting import rest

HOLD_S_MIN = 0.2
LONG_EVERY = 4
"""One fault in this number has the full duration, the others a quarter."""
STRIKE_SHARE = 0.35
"""Share of lossless faults during which the daemon is killed."""
WELL_SHARE = 0.5
"""Share of faults after which everything must work before the next."""
CHANGE_SHARE = 0.2
"""Share of recoveries after which the daemon is changed."""
REST_S_MAX = 0.5


class Victim(Protocol):
    """The daemon, or daemons, on this Redis; they have troubles of their own."""

    @property
    def problems(self) -> list[str]: ...

    @property
    def missed(self) -> list[str]: ...

    def text(self) -> str: ...

    async def well(self, when: str) -> float:
        """Wait until all works and is in memory; for how long, in seconds."""
        ...

    async def look(self, when: str) -> None:
        """Whether everybody lives."""
        ...

    async def strike(self) -> None:
        """SIGKILL, and a start; Redis may be away."""
        ...

    async def change(self) -> None:
        """One trouble of its own. Redis is well."""
        ...

    async def finish(self) -> None:
        """All that did not happen yet; then everybody is up."""
        ...


class Rig(Protocol):
    """The servers of a run, and what can be done to them: see ``redis_rig``, ``moving_rig``."""

    disturbed: int

    @property
    def url(self) -> str: ...

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        """The faults there are, for each way in which the servers may be set."""
        ...

    @property
    def lossy(self) -> dict[str, frozenset[str]]:
        """Return the faults that can lose confirmed batches."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def sync(self, mode: str) -> None:
        """Set the servers in this way."""
        ...

    async def suffer(self, name: str, rnd: random.Random, hold_s: float) -> None:
        """Make a fault; it is over, and the servers are well again, when this returns."""
        ...

    async def left(self) -> list[str]:
        """Keys that should be gone when nothing is pending."""
        ...


class RedisFaults:
    """``run`` makes ``count`` faults, as many with each way in which the servers may be set, or
    more until there was one of each kind."""

    def __init__(
        self,
        rig: Rig,
        victim: Victim,
        plan: Plan,
        count: int,
        *,
        hold_s_max: float,
        without: frozenset[str],
    ) -> None:
        self._rig = rig
        self._victim = victim
        self._rnd = plan.rnd("faults")
        self._count = count
        self._hold_s_max = hold_s_max
        self._kinds = {mode: sorted(kinds - without) for mode, kinds in rig.kinds.items()}
        self.done: Counter[str] = Counter()
        self._strikes = 0
        self._slowest_s = 0.0
        """The longest time after a fault until everything worked again."""
        self._whole = False
        """All that was confirmed is in the daemon's memory."""
        self._owing = False
        """Redis may lack something of it: the daemon must live."""

    @property
    def problems(self) -> list[str]:
        return self._victim.problems

    @property
    def missed(self) -> list[str]:
        never = [
            f"fault {kind} was never made with {mode}"
            for mode, kinds in self._kinds.items()
            for kind in kinds
            if not self.done[f"{mode}/{kind}"]
        ]
        return never + self._victim.missed

    def text(self) -> str:
        shown = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        return (
            f"{self._victim.text()}\nfaults of it {self.done.total()} ({shown}), with a kill of"
            f" the daemon {self._strikes}, well again after {self._slowest_s:.1f} s at most"
        )

    async def run(self) -> None:
        for mode, kinds in self._kinds.items():
            await self._rig.sync(mode)
            for _ in range(max(self._count // len(self._kinds), len(kinds))):
                await self._fault(mode, self._next(mode))
                await rest(REST_S_MAX * self._rnd.random())
            await self._well("at the end")
        await self._victim.finish()

    def _next(self, mode: str) -> str:
        """Return the next fault; unused ones come first."""
        kinds = self._kinds[mode]
        fewest = [kind for kind in kinds if not self.done[f"{mode}/{kind}"]]
        return self._rnd.choice(fewest or kinds)

    async def _fault(self, mode: str, kind: str) -> None:
        rnd = self._rnd
        longest_s = self._hold_s_max / (1 if rnd.random() < 1 / LONG_EVERY else 4)
        hold_s = rnd.uniform(HOLD_S_MIN, max(HOLD_S_MIN, longest_s))
        strike, well = rnd.random() < STRIKE_SHARE, rnd.random() < WELL_SHARE
        if kind in self._rig.lossy[mode]:
            if not self._whole:
                await self._well(f"before the fault {mode}/{kind}")
            self._owing = True
        acting = asyncio.create_task(self._rig.suffer(kind, rnd, hold_s))
        if strike and not self._owing:
            self._strikes += 1
            self._whole = False
            await rest(hold_s * rnd.random())
            await self._victim.strike()
        await acting
        self.done[f"{mode}/{kind}"] += 1
        where = f"after the fault {mode}/{kind} ({hold_s:.1f} s)"
        await self._victim.look(where)
        if well:
            await self._well(where)
            if rnd.random() < CHANGE_SHARE:
                self._whole = False
                await self._victim.change()

    async def _well(self, when: str) -> None:
        self._slowest_s = max(self._slowest_s, await self._victim.well(when))
        self._whole, self._owing = True, False
