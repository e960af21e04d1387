"""Two daemons on one Redis: the active one dies, freezes, stops, and the other takes over."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from crash.killer import COUNTS_MAX, EXTRA_MAX, LAST_WAIT_S, Killer, places_of
from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from crash.probe import Probe
from support.daemon import Daemon, DaemonFailed
from support.waiting import rest
from tickwheel.api.frames import FrameType

TAKEOVER_S_MAX = 20.0
"""Later than this it hangs. How long it takes is shown (``slowest_s``), and no test's business: the
machine may have other work."""
REST_S_MAX = 0.7
PLACE_WAIT_S = 2.0
POLL_S = 0.02
KINDS = ("kill", "freeze", "hiccup", "stop", "standby", "place")


class Failover:
    """``run`` makes ``count`` changes, of each kind at least one, and leaves both daemons up.

    ``kill`` (SIGKILL), ``freeze`` (SIGSTOP until the other has taken over), ``hiccup`` (SIGSTOP
    about as long as the lease: whoever leads then), ``stop`` (SIGTERM), ``standby`` (that one is
    killed), ``place`` (both are, the one that takes over at a failpoint).
    """

    def __init__(
        self,
        daemons: Sequence[Daemon],
        plan: Plan,
        count: int,
        disturbed: Callable[[], int],
        *,
        ttl_s: float,
        every_place: bool,
    ) -> None:
        self._killers = {daemon: Killer(daemon, plan, 0, disturbed) for daemon in daemons}
        self._rnd = plan.rnd("failover")
        self._plan = plan
        self._count = count
        self._wanted = places_of(daemons[0].store) if every_place else []
        self._ttl_s = ttl_s
        self._probe = Probe(plan)
        self._own: list[str] = []
        self.done: Counter[str] = Counter()
        self._is_last = False
        """Whether all else is over: a place gets its time now, however busy the machine is."""
        self.slowest_s = 0.0
        """The longest takeover."""

    @property
    def problems(self) -> list[str]:
        killers = (text for killer in self._killers.values() for text in killer.problems)
        return [*self._own, *self._probe.problems, *killers]

    @property
    def missed(self) -> list[str]:
        kinds = [f"{kind} never happened" for kind in KINDS if not self.done[kind]]
        return kinds + [f"failpoint {name} was never passed" for name in self._places_missed()]

    def text(self) -> str:
        shown = ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))
        hits = [name for daemon in self._killers for name in daemon.hits]
        places = ", ".join(f"{name} {hits.count(name)}" for name in sorted(set(hits)))
        starts = ", ".join(str(daemon.starts) for daemon in self._killers)
        return (
            f"changes {self.done.total()} ({shown}), at failpoints {len(hits)} ({places}),"
            f" starts {starts}, takeovers took {self.slowest_s:.1f} s at most"
        )

    async def run(self) -> None:
        for _ in range(self._count):
            await self.change()
            await rest(REST_S_MAX * self._rnd.random())
        await self.finish()

    async def finish(self) -> None:
        """What did not happen yet; then both are up."""
        while not all(self.done[kind] for kind in KINDS):
            await self.change()
        self._is_last = True
        for _ in range(EXTRA_MAX):
            if self._places_missed():
                await self._change("place")
        await self._start_all()
        await self.well("at the end")

    async def change(self) -> None:
        """One of the kinds, those that did not happen yet first."""
        kinds = [kind for kind in KINDS if not self.done[kind]] or KINDS
        await self._change(self._rnd.choice(kinds))

    async def strike(self) -> None:
        """The one that worked last, which need not be the active one by now."""
        await self._killers[self._latest].kill()
        await self._start_all()

    def _places_missed(self) -> list[str]:
        hits = {name for daemon in self._killers for name in daemon.hits}
        return [name for name in self._wanted if name not in hits]

    # --- changes ---------------------------------------------------------------------------

    async def _change(self, kind: str) -> None:
        await self._start_all()
        await self.well(f"before {kind}")
        active = self._latest
        (other,) = (daemon for daemon in self._killers if daemon is not active)
        await getattr(self, f"_{kind}")(active, other)
        self.done[kind] += 1
        await self.look(f"after {kind}")

    async def _kill(self, active: Daemon, other: Daemon) -> None:
        await self._killers[active].kill()
        await self._taken_over(other, "SIGKILL")
        await self._start_all()

    async def _freeze(self, active: Daemon, other: Daemon) -> None:
        epoch = await self._epoch_of(active)
        active.pause()
        try:
            await self._taken_over(other, "SIGSTOP")
            # The other one delivers meanwhile what this one thinks is its own.
            await rest(self._ttl_s * self._rnd.uniform(0.3, 1.5))
        finally:
            active.go_on()
        await self._gave_way(active, epoch, "after SIGCONT")

    async def _hiccup(self, active: Daemon, other: Daemon) -> None:
        active.pause()
        await rest(self._ttl_s * self._rnd.uniform(0.5, 1.8))
        active.go_on()

    async def _stop(self, active: Daemon, other: Daemon) -> None:
        code = await active.aterminate()
        if code != 0:
            self._own.append(f"SIGTERM: the daemon ended with {code}")
        await self._taken_over(other, "SIGTERM")
        await self._start_all()

    async def _standby(self, active: Daemon, other: Daemon) -> None:
        await self._killers[other].kill()
        await rest(REST_S_MAX * self._rnd.random())
        await self._start_all()

    async def _place(self, active: Daemon, other: Daemon) -> None:
        """The one that takes over does not come far."""
        name = self._rnd.choice(self._places_missed() or places_of(active.store))
        await self._killers[other].kill()
        count = 1 if self._is_last else self._rnd.randint(1, COUNTS_MAX.get(name, 1))
        other.failpoints = f"{name}={count}"
        await self._killers[other].start()
        await self._killers[active].kill()
        with suppress(DaemonFailed):
            await other.awaited(self._ttl_s + (LAST_WAIT_S if self._is_last else PLACE_WAIT_S))
        await self._killers[other].kill()
        await self._start_all()

    # --- looking ---------------------------------------------------------------------------

    async def _start_all(self) -> None:
        await asyncio.gather(*(killer.start() for killer in self._killers.values()))

    async def well(self, when: str) -> float:
        """Wait until one works and has everything in memory."""
        return await self._probe.well([d.port for d in self._killers], when, self.look)

    @property
    def _latest(self) -> Daemon:
        return next(d for d in self._killers if self._probe.port in (d.port, 0))

    async def look(self, when: str) -> None:
        for killer in self._killers.values():
            await killer.look(when)

    async def _taken_over(self, other: Daemon, after: str) -> None:
        took_s = await self._probe.well((other.port,), f"after {after}", self._killers[other].look)
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > TAKEOVER_S_MAX:
            self._own.append(f"taking over after {after} took {took_s:.1f} s")

    async def _epoch_of(self, daemon: Daemon) -> int:
        """0: it cannot be asked now."""
        return (await self._role_of(daemon))[1]

    async def _role_of(self, daemon: Daemon) -> tuple[str, int]:
        try:
            link = await Link.open(daemon.port, Numbers(), any_role=True)
        except Lost:
            return "none", 0
        try:
            return (await link.call(FrameType.STATUS))[2]["role"], link.epoch
        except Lost:
            return "none", 0
        finally:
            link.abort()

    async def _gave_way(self, daemon: Daemon, epoch: int, when: str) -> None:
        """It stands by, or leads anew in a later epoch, because the other one lost the store."""
        deadline, role, now = time.monotonic() + TAKEOVER_S_MAX, "", 0
        while time.monotonic() < deadline:
            role, now = await self._role_of(daemon)
            if role == "standby" or (role == "active" and now > epoch > 0):
                return
            await rest(POLL_S)
        self._own.append(f"the deposed daemon is {role!r} in epoch {now} {when}; it had {epoch}")
