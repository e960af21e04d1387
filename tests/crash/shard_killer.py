"""Ends the daemons of ``serve --processes`` again and again, one of them or the parent of all.

The parent starts each daemon again by itself; a new parent is started here, at once, as a
supervisor would. So a daemon also dies while another one is away, and while it recovers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from crash.plan import Plan
from crash.probe import Probe
from support.daemon import Daemon
from support.waiting import rest

PARENT_EVERY = 5
"""So many daemons are ended for one parent. The parent waits longer before a start each time that a
daemon ends soon after its last one; a new one begins anew."""
LIFE_S_MAX = 0.7
UP_S_MAX = 30.0
"""Later than this it hangs."""
WAITS = 0.7
"""How often all serve again before the next one is ended."""
SHARD, SHARD_STOP, PARENT, PARENT_STOP = "shard", "shard stopped", "parent", "parent stopped"
KINDS = (SHARD, SHARD_STOP, PARENT, PARENT_STOP)
POLL_S = 0.02


class ShardKiller:
    """``run`` ends ``kills`` daemons by SIGKILL, and a parent for each ``PARENT_EVERY`` of them;
    beside these, some by SIGTERM. It leaves all of them up."""

    def __init__(self, parent: Daemon, plan: Plan, kills: int) -> None:
        self._parent = parent
        self._plan = plan
        self._kills = kills
        self._rnd = plan.rnd("shard killer")
        self._probes: list[Probe] = []
        self._own: list[str] = []
        self.done: Counter[str] = Counter()
        self.slowest_s = 0.0
        """The longest time until all served again after the parent was killed."""

    @property
    def problems(self) -> list[str]:
        return [*self._own, *(text for probe in self._probes for text in probe.problems)]

    @property
    def missed(self) -> list[str]:
        """What never happened: the run has not shown what it should."""
        return [
            f"{kind}: it never happened" for kind in KINDS if self._kills and not self.done[kind]
        ]

    def text(self) -> str:
        shown = ", ".join(f"{kind} {self.done[kind]}" for kind in KINDS)
        return (
            f"ended {self.done.total()} ({shown}), starts of parents {self._parent.starts}, all"
            f" served again after {self.slowest_s:.1f} s at most"
        )

    async def run(self) -> None:
        for kind in self._kinds():
            await rest(LIFE_S_MAX * self._rnd.random())
            await self._end(kind)
            if self._rnd.random() < WAITS:
                await self._up(f"after {kind}")
        await self._up("at the end")
        self._probes = [Probe(self._plan) for _ in self._plan.ports]
        for probe, port in zip(self._probes, self._plan.ports, strict=True):
            await probe.well((port,), "at the end", self.look)

    def _kinds(self) -> list[str]:
        """In groups of one parent; in each by chance."""
        kinds: list[str] = []
        for number in range(0, self._kills, PARENT_EVERY):
            some = [SHARD] * min(PARENT_EVERY, self._kills - number)
            some += [PARENT, SHARD_STOP] if number % (4 * PARENT_EVERY) == 0 else [PARENT]
            self._rnd.shuffle(some)
            kinds += some
        return [*kinds, PARENT_STOP] if kinds else []

    async def _end(self, kind: str) -> None:
        began_s = time.monotonic()
        if kind == PARENT:
            await self._parent.akill()
            await self._start()
            await self._up(f"after {kind}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        elif kind == PARENT_STOP:
            if (code := await self._parent.aterminate()) != 0:
                self._own.append(f"SIGTERM: the parent ended with {code}")
            await self._start()
        else:
            await self._end_one(signal.SIGKILL if kind == SHARD else signal.SIGTERM)
        self.done[kind] += 1

    async def _end_one(self, number: signal.Signals) -> None:
        """Any daemon, whatever it is doing; as soon as there is one."""
        while not (pids := children_of(self._parent.pid)):
            await self.look("while all its daemons were away")
            await rest(POLL_S)
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile: ``_up`` judges it
            os.kill(self._rnd.choice(sorted(pids)), number)

    async def _start(self) -> None:
        self._parent.spawn()
        await asyncio.to_thread(self._parent.wait_ready)

    async def _up(self, when: str) -> None:
        """Until all serve: those that the ready file names are those that are there."""
        late_s = time.monotonic() + UP_S_MAX
        while time.monotonic() < late_s:
            await self.look(when)
            if served_by(self._parent) == children_of(self._parent.pid):
                return
            await rest(POLL_S)
        self._own.append(f"not all serve within {UP_S_MAX} s {when}")

    async def look(self, when: str) -> None:
        """A parent that ended by itself is a problem; one is started again."""
        if not self._parent.alive:
            self._own.append(f"the parent ended by itself with {self._parent.wait(0)} {when}")
            await self._start()


def children_of(pid: int) -> set[int]:
    """The processes that have this parent and have not ended."""
    results = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                results.add(int(path.parent.name))
    return results


def served_by(parent: Daemon) -> set[int]:
    """The processes that the ready file names."""
    try:
        answer = json.loads((parent.folder / "ready.json").read_text())
    except OSError:
        return set()
    return {shard["pid"] for shard in answer["shards"]}
