"""Ends the daemon again and again: at random moments, and at every named place of its code."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from crash.plan import Plan
from crash.probe import Probe
from support.daemon import Daemon, DaemonFailed
from support.waiting import rest
from tickwheel import failpoints

FAILPOINT_WAIT_S = 1.5
"""A place that is not passed by then is tried again later; SIGKILL ends this life."""
LAST_WAIT_S = 15.0
"""The same when all kills are over, and a place has not killed yet: it gets its time, however busy
the machine is, and kills when it is passed for the first time."""
LIFE_S_MAX = 0.7
COUNTS_MAX = {
    "commit.before": 25,
    "commit.after": 25,
    "deliver.before_checkpoint": 15,
    "sqlite.checkpoint": 4,
}
"""How often a place is passed before it kills, at most; others kill at once."""
GRACEFUL_EVERY = 6
EXTRA_MAX = 30
"""More kills than asked for, until every place has killed once."""
IN_VAIN_MAX = 1
"""Starts that may fail though nothing disturbs the store: on a busy machine a connection through
the proxy may take longer than the daemon waits for it."""
START_PATIENCE_S = 40.0
"""Seconds in which a daemon can refuse to start because of its store."""
TRY_AGAIN_S = 0.1
_KILLED = -signal.SIGKILL
_GAVE_UP = 1


def places_of(store_url: str) -> list[str]:
    """The failpoints that a daemon on such a store passes."""
    kind = store_url.partition(":")[0]
    stores = ("sqlite", "redis", "postgresql")
    return [n for n in failpoints.NAMES if n.partition(".")[0] not in stores or n.startswith(kind)]


class Killer:
    """``run`` ends the daemon ``kills`` times and leaves a fresh one behind.

    ``disturbed`` counts what was done to the store; an odd number: it is being done now. A
    start meanwhile may fail, and is tried again. ``every_place``: each has to kill once.
    """

    def __init__(
        self,
        daemon: Daemon,
        plan: Plan,
        kills: int,
        disturbed: Callable[[], int],
        *,
        every_place: bool = True,
    ) -> None:
        self.daemon = daemon
        self._rnd = plan.rnd("killer")
        self._kills = kills
        self._disturbed = disturbed
        self._places = places_of(daemon.store)
        self._wanted = self._places if every_place else []
        self._probe = Probe(plan)
        self._own: list[str] = []
        self.random_kills = 0
        self.stops = 0
        self.starts_given_up = 0
        """Starts that failed because the store was being disturbed."""

    @property
    def problems(self) -> list[str]:
        return [*self._own, *self._probe.problems]

    @property
    def missed(self) -> list[str]:
        """What never happened: the run has not shown what it should."""
        hits = self.daemon.hits
        return [f"failpoint {name} was never passed" for name in self._wanted if name not in hits]

    def text(self) -> str:
        hits = self.daemon.hits
        places = ", ".join(f"{name} {hits.count(name)}" for name in sorted(set(hits)))
        given_up = f", of them {self.starts_given_up} in vain" if self.starts_given_up else ""
        return (
            f"kills at random {self.random_kills}, at failpoints {len(hits)} ({places}),"
            f" graceful stops {self.stops + 1}, starts {self.daemon.starts}{given_up}"
        )

    async def run(self) -> None:
        for done in range(self._kills):
            await self.kill_once(at_place=done % 2 == 1)
        await self.finish()

    async def finish(self) -> None:
        """Places that have not killed yet, and a start."""
        for _ in range(EXTRA_MAX):
            if self.missed:
                await self.kill_once(at_place=True, patient=True)
        await self.start()

    async def change(self) -> None:
        await self.kill_once(at_place=True)
        await self.start()

    async def strike(self) -> None:
        await self.kill()
        await self.start()

    async def well(self, when: str) -> float:
        """Wait until all works and is in memory."""
        return await self._probe.well((self.daemon.port,), when, self.look)

    async def kill_once(self, *, at_place: bool, patient: bool = False) -> None:
        """One life of the daemon, with its end."""
        name = self._place() if at_place else ""
        if name:
            await self.kill()  # it has to start with it
            count = 1 if patient else self._rnd.randint(1, COUNTS_MAX.get(name, 1))
            self.daemon.failpoints = f"{name}={count}"
        alive = await self._start()
        if alive and not name and self._rnd.random() < 1 / GRACEFUL_EVERY:
            await self._stop()
            alive = await self._start()
        if alive:
            wait_s = LAST_WAIT_S if patient else FAILPOINT_WAIT_S
            await self._live(wait_s if name else LIFE_S_MAX * self._rnd.random())

    def _place(self) -> str:
        """Return the next failpoint; unused ones come first."""
        hits = set(self.daemon.hits)
        return self._rnd.choice([n for n in self._places if n not in hits] or self._places)

    async def start(self) -> None:
        """It serves when this returns."""
        while not await self._start():
            pass

    async def _start(self) -> bool:
        """False when it was killed before it served."""
        if self.daemon.alive:
            return True
        patience, in_vain = time.monotonic() + START_PATIENCE_S, 0
        while True:
            before = self._disturbed()
            self.daemon.spawn()
            try:
                await asyncio.to_thread(self.daemon.wait_ready)
            except DaemonFailed:
                code = None if self.daemon.alive else self.daemon.wait(0)
                if code == _KILLED:
                    return False
                in_vain += before % 2 == 0 and self._disturbed() == before
                if code != _GAVE_UP or in_vain > IN_VAIN_MAX or time.monotonic() > patience:
                    raise
                self.starts_given_up += 1
                await rest(TRY_AGAIN_S)
            else:
                return True

    async def kill(self) -> None:
        """At this very moment."""
        if self.daemon.alive:
            self.random_kills += 1
            await self.daemon.akill()

    async def _live(self, life_s: float) -> None:
        """Let the daemon live until a failpoint kills it or `life_s` has passed."""
        try:
            code = await self.daemon.awaited(life_s)
        except DaemonFailed:
            await self.kill()
            return
        if code != _KILLED:
            self._own.append(f"the daemon ended by itself with {code}")

    async def _stop(self) -> None:
        self.stops += 1
        code = await self.daemon.aterminate()
        if code != 0:
            self._own.append(f"SIGTERM: the daemon ended with {code}")

    async def look(self, when: str) -> None:
        """A daemon that ended by itself is a problem; it is started again."""
        if not self.daemon.alive:
            self._own.append(f"the daemon ended by itself with {self.daemon.wait(0)} {when}")
            await self.start()
