"""Nodes that share a Redis, and what is done to them: the rig and the faults of a torture run.

A node is killed with all of its processes, frozen for longer than its lease and woken, stopped,
drained by an operator, cut off from Redis by a proxy that delivers late what it held, or from its
clients by another one, while it keeps its shards; one of its daemons alone is killed, or its
registrar; a shard is sent elsewhere. Redis suffers what
``moving_rig`` and ``redis_rig`` have: masters are killed and give way, slots migrate. Everything
serves again before the next fault; half of the times all shards are where they should be, too.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from crash.link import Lost, Numbers, now_ms
from crash.moving_rig import ClusterRig
from crash.plan import Plan
from crash.probe import POLL_S, WELL_S_MAX, Probe
from crash.redis_faults import Rig
from crash.redis_rig import ALWAYS, KEYS, RedisRig
from crash.silences import BACK, Timeline
from crash.walls import Doors, Wall
from support import nodes
from support.daemon import START_TIMEOUT_S
from support.nodes import family
from support.redis_groups import ask, slot_of
from support.waiting import busy_s, rest
from tickwheel.api.nodes import Nodes
from tickwheel.client import Client
from tickwheel.errors import NotFound, TickwheelError

TTL_S = 3.0
"""How long a lease of the nodes, and what they say of themselves, lasts."""
LAPSED_S_MAX = 5.0 + TTL_S
"""A shard whose node has died delivers again within 5 s; on a machine that has other work too the
judge waits longer. See ``Window.patience_s``."""
HANDED_S_MAX = 0.8 * TTL_S
"""A shard that is handed over is silent for less than 0.5 s; one that is silent for longer than
this was not handed over: its lease has lapsed."""
STOP_S_MAX = 40.0
MOVED_S_MAX = 60.0
"""Later than this all shards are where they should be, or will never be."""
SETTLES = 0.5
REST_S_MAX = 0.5
REDIS_HOLD_S = (0.2, 3.0)
SHUT_S = (2.0, 4.0)
"""Seconds for which clients cannot reach a node."""
FOUND_S_MAX = SHUT_S[1] + 10.0
"""Maximum seconds until a client finds an unreachable shard again."""
OF_ALL = "nodes"
OVERLOAD = 1.25
"""Maximum load of a node as a multiple of its fair share."""
ASK_AGAIN_S = 0.1
QUIET = ("registrar", "move", "drain", "stop", BACK)
"""Faults whose shards are handed over, or not touched."""
LAPSE = ("kill", "freeze", "cut", "daemon")
"""Faults after which others take a lease that has lapsed, or the same one its own."""
SHUT = ("clients reset", "clients swallowed")
"""Faults between clients and a node, which leads its shards all the time."""


class Node(nodes.Node):
    """One node, over any number of starts. It listens at ``first_port`` and above, and says that it
    is found at ``door`` and above."""

    def __init__(
        self, folder: Path, name: str, store: str, shards: int, doors: Doors, **settings: Any
    ) -> None:
        super().__init__(folder, name, store, shards, **settings)
        self.door = doors.before(self.first_port)
        self._listens = self._listen
        self.settings["advertise"] = f"tcp://127.0.0.1:{self.door}"

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout_s)
        self._listen = self._listens  # what it says of itself is where others find it

    def port_of(self, shard: int) -> int:
        """Where its daemon of this shard listens, when there is one."""
        return self.first_port + 1 + shard

    def kill(self) -> None:
        """All of its processes, as when the machine fails."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().kill()

    def _processes(self) -> list[int]:
        """Its parent, and all that this has started."""
        return family(self.pid) if self.alive else []

    def process_at(self, port: int) -> int | None:
        """Its process that listens there."""
        inodes = _listening_at(port)
        for pid in reversed(self._processes()):
            with suppress(OSError):
                files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
                if inodes & {name[8:-1] for name in files if name.startswith("socket:[")}:
                    return pid
        return None


def _listening_at(port: int) -> set[str]:
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {row[9] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


class NodesCluster(ClusterRig):
    """The Cluster, whose faults meet the slot of any shard, or that of the nodes' registry."""

    def __init__(self, folder: Path, query: str, shards: int) -> None:
        super().__init__(folder, query)
        self._tags = [tag_of(shard) for shard in range(shards)]

    async def suffer(self, name: str, rnd: random.Random, hold_s: float) -> None:
        self._slot = slot_of(rnd.choice((*self._tags, tag_of(OF_ALL))))
        await super().suffer(name, rnd, hold_s)

    async def left(self) -> list[str]:
        results = []
        for tag in self._tags:
            self._slot = slot_of(tag)
            master = await asyncio.to_thread(self._master)
            names = [f"{{{tag}}}:{name}" for name in KEYS]
            results += [n for n in names if await asyncio.to_thread(ask, master, "EXISTS", n)]
        return results

    @property
    def servers(self) -> list[int]:
        """Their ports."""
        return [node.port for node in self.group.nodes]


class NodesRedis(RedisRig):
    """One server, of all shards."""

    def __init__(self, folder: Path, query: str, shards: int) -> None:
        super().__init__(folder, query)
        self._shards = shards
        self.faults = {name: self.faults[name] for name in ("stop", "kill", "pause", "cut")}

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        return {ALWAYS: frozenset(self.faults)}

    async def left(self) -> list[str]:
        names = [f"{{{tag_of(shard)}}}:{name}" for shard in range(self._shards) for name in KEYS]
        return [name for name in names if await self._call("EXISTS", name) != b":0\r\n"]

    @property
    def servers(self) -> list[int]:
        return [self.server.port]


def tag_of(shard: int | str) -> str:
    """Return the hash tag of the keys of a shard, or of common keys."""
    return f"tw:default:{shard}"


# --- the faults ----------------------------------------------------------------------------------


class NodeFaults:
    """``run`` makes ``count`` faults, each kind at least once; then all nodes serve."""

    def __init__(
        self, nodes: Sequence[Node], rig: Rig, wall: Wall, doors: Doors, plan: Plan, count: int
    ) -> None:
        """``wall``: before the last node; ``doors``: before all."""
        self._nodes = nodes
        self._rig = rig
        self._wall = wall
        self._doors = doors
        self._plan = plan
        self._rnd = plan.rnd("nodes")
        self._faults: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "stop": self._stop,
            "drain": self._drain,
            "move": self._move,
            "daemon": self._daemon,
            "registrar": self._registrar,
            "cut": self._cut,
            "clients reset": self._reset_clients,
            "clients swallowed": self._swallow_clients,
        }
        (of_redis,) = rig.kinds.values()
        self._kinds = self._chosen(count, [*self._faults, *(f"redis {k}" for k in of_redis)])
        self._probes = [Probe(plan) for _ in range(plan.shards)]
        self._numbers = Numbers()
        self._own: list[str] = []
        self._is_settled = False
        self.done: Counter[str] = Counter()
        self.timeline = Timeline()
        self.slowest_s = 0.0
        """The longest time after a fault until everything worked again."""
        self.slowest_back_s = 0.0
        """And until every shard was where it should be."""

    def _chosen(self, count: int, kinds: list[str]) -> list[str]:
        """Return the faults in order, which depend on the seed alone."""
        self._rnd.shuffle(kinds)
        more = self._rnd.choices(kinds, k=max(0, count - len(kinds)))
        chosen = kinds[:count] + more
        self._rnd.shuffle(chosen)
        return chosen

    @property
    def problems(self) -> list[str]:
        return [*self._own, *(text for probe in self._probes for text in probe.problems)]

    @property
    def missed(self) -> list[str]:
        return [f"{kind}: it never happened" for kind in set(self._kinds) if not self.done[kind]]

    def text(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))
        return (
            f"faults {self.done.total()} ({shown}), all served again after {self.slowest_s:.1f} s"
            f" at most, every shard was where it belongs after {self.slowest_back_s:.1f} s"
        )

    async def run(self) -> None:
        watching = asyncio.create_task(self.timeline.watch())
        try:
            await self._run()
        finally:
            watching.cancel()
            self.timeline.over_ms = now_ms()

    async def _run(self) -> None:
        await self._settle("at the beginning")
        for kind in self._kinds:
            await rest(REST_S_MAX * self._rnd.random())
            with self.timeline.window(kind, is_clean=self._is_settled):
                await self._make(kind)
                await self._well(f"after {kind}")
            self.done[kind] += 1
            self._is_settled = False
            if self._rnd.random() < SETTLES:
                with self.timeline.window(BACK, is_clean=True):
                    await self._settle(f"after {kind}")
            if self._own:
                return  # what comes after it would only hide it
        await self._settle("at the end")

    async def _make(self, kind: str) -> None:
        if kind.startswith("redis "):
            hold_s = self._rnd.uniform(*REDIS_HOLD_S)
            await self._rig.suffer(kind.removeprefix("redis "), self._rnd, hold_s)
        else:
            await self._faults[kind]()

    # --- what is done to nodes -----------------------------------------------------------------

    async def _kill(self) -> None:
        """Half of the times it is back before its lease has lapsed."""
        node = self._rnd.choice(self._nodes)
        self.timeline.note(f"{node.name} killed")
        await node.akill()
        if self._rnd.random() < 0.5:
            await rest(TTL_S * self._rnd.uniform(1.0, 2.0))
        await self._start(node)

    async def _start(self, node: Node) -> None:
        await node.astart()
        self.timeline.note(f"{node.name} started")

    async def _freeze(self) -> None:
        node = self._rnd.choice(self._nodes)
        self.timeline.note(f"{node.name} frozen")
        frozen = await asyncio.to_thread(node.freeze)
        try:
            await rest(TTL_S * self._rnd.uniform(1.1, 2.0))
        finally:
            node.wake(frozen)
            self.timeline.note(f"{node.name} woken")

    async def _stop(self) -> None:
        node = self._rnd.choice(self._nodes)
        self.timeline.note(f"{node.name} told to stop")
        if (code := await node.aterminate(STOP_S_MAX)) != 0:
            self._own.append(f"SIGTERM: {node.name} ended with {code}")
        self.timeline.note(f"{node.name} stopped")
        await rest(REST_S_MAX * self._rnd.random())
        await self._start(node)

    async def _drain(self) -> None:
        name = self._rnd.choice(self._nodes).name

        def is_empty(found: Nodes) -> bool:
            return all(shard.node not in (None, name) for shard in found.shards)

        await self._told(lambda client: client.drain_node(name))
        self.timeline.note(f"{name} told to drain")
        await self._until(is_empty, f"drained, {name} has shards still")
        await self._told(lambda client: client.drain_node(name, draining=False))
        self.timeline.note(f"{name} drained, and told to take shards again")

    async def _move(self) -> None:
        """Half of the times nobody wishes it to be anywhere afterwards."""
        shard = self._rnd.randrange(self._plan.shards)
        name = self._rnd.choice(self._nodes).name
        await self._told(lambda client: client.move_shard(shard, name))
        self.timeline.note(f"shard {shard} sent to {name}")
        await self._until(
            lambda found: found.shards[shard].node == name, f"shard {shard} did not come to {name}"
        )
        if self._rnd.random() < 0.5:
            await self._told(lambda client: client.move_shard(shard))

    async def _daemon(self) -> None:
        """Kill the daemon of a random shard."""
        shard = self._rnd.randrange(self._plan.shards)
        await self._kill_at(lambda node: node.port_of(shard), f"shard {shard}")

    async def _registrar(self) -> None:
        await self._kill_at(lambda node: node.first_port, "a front door")

    async def _kill_at(self, port_of: Callable[[Node], int], what: str) -> None:
        """Kill the process of some node that listens at the port."""
        for node in self._rnd.sample(self._nodes, len(self._nodes)):
            if (pid := node.process_at(port_of(node))) not in (None, node.pid):
                self.timeline.note(f"{node.name}'s daemon of {what} killed")
                os.kill(pid, signal.SIGKILL)
                return
        self._own.append(f"nobody listens for {what}")

    async def _cut(self) -> None:
        """The last node from Redis."""
        self.timeline.note(f"{self._nodes[-1].name} cut off from Redis")
        await self._wall.cut(self._rnd, TTL_S * self._rnd.uniform(1.1, 2.0))
        self.timeline.note(f"{self._nodes[-1].name} has Redis again")

    async def _reset_clients(self) -> None:
        await self._shut("resets its clients", self._doors.shut)

    async def _swallow_clients(self) -> None:
        await self._shut("swallows what its clients say", self._doors.swallow)

    async def _shut(self, how: str, do: Callable[[int, float], Awaitable[None]]) -> None:
        """From its clients alone: it renews its leases, so nobody takes its shards. On a machine
        that let it wait for a processor they may have lapsed."""
        node = self._rnd.choice(self._nodes)
        led, began_busy_s = await self._led_by(node), busy_s()
        self.timeline.note(f"the way to {node.name} {how}")
        await do(node.door, self._rnd.uniform(*SHUT_S))
        self.timeline.note(f"clients reach {node.name} again")
        after = await self._led_by(node)
        was_idle = busy_s() - began_busy_s < TTL_S / 2
        if self._is_settled and was_idle and after != led:
            self._own.append(f"{node.name} {how}: it led (shard: epoch) {led}, now {after}")

    async def _led_by(self, node: Node) -> dict[int, int]:
        """The shards of a node, and in which epochs."""
        result: Nodes = await self._told(lambda client: client.nodes())
        return {shard.shard: shard.epoch for shard in result.shards if shard.node == node.name}

    # --- whether all is well -------------------------------------------------------------------

    async def _told(self, say: Callable[[Client], Awaitable[Any]]) -> Any:
        """What an operator is answered, however often that takes: a node that has just begun, or
        was frozen, may not be known yet to the one that is asked."""
        client = self._plan.operator
        assert client is not None
        late_s = time.monotonic() + MOVED_S_MAX
        while True:
            try:
                return await say(client)
            except TickwheelError as error:
                is_wrong = not error.retryable and not isinstance(error, NotFound)
                if is_wrong or time.monotonic() > late_s:
                    raise
            await rest(ASK_AGAIN_S)

    async def _until(self, fits: Callable[[Nodes], bool], problem: str) -> None:
        late_s = time.monotonic() + MOVED_S_MAX
        while not fits(result := await self._told(lambda client: client.nodes())):
            if time.monotonic() > late_s:
                shown = [(s.shard, s.node, s.wanted, s.placed, s.waits) for s in result.shards]
                alive = [(node.node, node.draining, node.shards) for node in result.nodes]
                self._own.append(f"{problem} after {MOVED_S_MAX:g} s: {alive} {shown}")
                return
            self._look(problem)
            await rest(ASK_AGAIN_S)

    async def _settle(self, when: str) -> None:
        """Until every shard is where it should be, and no node has too many."""
        began_s = time.monotonic()
        await self._until(self._are_settled, f"{when}: shards are not where they should be")
        self.slowest_back_s = max(self.slowest_back_s, time.monotonic() - began_s)
        self._is_settled = True

    def _are_settled(self, found: Nodes) -> bool:
        names = {node.name for node in self._nodes}
        if {node.node for node in found.nodes} != names or any(n.draining for n in found.nodes):
            return False
        if any(shard.node is None or shard.node != shard.wanted for shard in found.shards):
            return False
        anywhere = Counter(shard.node for shard in found.shards if shard.placed is None)
        most = math.ceil(OVERLOAD * self._plan.shards / len(names))
        return max(anywhere.values(), default=0) <= most

    async def _well(self, when: str) -> None:
        """Until every shard takes a task and gives it up again."""
        began_s, began_busy_s = time.monotonic(), busy_s()

        async def well(shard: int, probe: Probe) -> None:
            while not await self._works(shard, probe):
                self._look(when)
                if time.monotonic() - began_s > WELL_S_MAX + min(60.0, busy_s() - began_busy_s):
                    self._own.append(f"shard {shard} does not work for {WELL_S_MAX} s {when}")
                    return
                await rest(POLL_S)

        await asyncio.gather(*(well(*item) for item in enumerate(self._probes)))
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    async def _works(self, shard: int, probe: Probe) -> bool:
        with suppress(Lost, TimeoutError):
            async with asyncio.timeout(WELL_S_MAX):
                link = await self._plan.link(self._numbers, shard)
            link.abort()
            assert self._plan.homes is not None
            return await probe.works([self._plan.homes[shard]])
        return False

    def _look(self, when: str) -> None:
        """Nobody ends by itself."""
        for node in self._nodes:
            if not node.alive:
                self._own.append(f"{node.name} ended by itself with {node.wait(0)} {when}")
                node.spawn()
