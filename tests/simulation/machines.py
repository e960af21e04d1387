"""Machines of the simulation: each runs a node, which is the processes that its parent starts.

The product's are the registrar and the parent's rules (``NodeParent``). Stand-ins are the store's
list of nodes (``Registry``, with the rules of ``nodes_beat.lua``) and the processes, which are
hosts. What a daemon's process does is said by whoever derives from ``Machine``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from simulation.loop import EPOCH_MS, Host, SimLoop
from simulation.network import Network
from simulation.store import Line, Server, Unanswered
from simulation.world import DAEMON, PORT, TTL_S, Log
from tickwheel.errors import TickwheelError
from tickwheel.persistence.contract import NodeRecord, NodesSeen, StoreAway
from tickwheel.server.fleet.board import Board, Bulletin, Member, Node, State
from tickwheel.server.fleet.nodes import BULLETIN_CHANGED, NodeParent
from tickwheel.server.fleet.processes import Process, ProcessKind
from tickwheel.server.fleet.registrar import Registrar
from tickwheel.server.settings import Settings

if TYPE_CHECKING:
    import random

    from simulation.nodes import NodesWorld
    from tickwheel.server.fleet.registrar import FrontDoor

BIRTH_S = (0.02, 0.12)
"""How long a process takes to begin."""
RESTART_S = (0.1, 3.0)


@cache
def settings_of(name: str, capacity: float = 1.0) -> Settings:
    """Return the settings of a node."""
    return Settings(
        **DAEMON,
        store="redis://store/?shards=2",
        node=name,
        node_capacity=capacity,
        listen=f"{name}:{PORT}",
        insecure=True,
        advertise=f"tcp://{name}:{PORT}",
    )


@cache
def settings_of_shard(name: str, shard: int) -> Settings:
    """Return the settings of a node's daemon."""
    address = f"{name}:{PORT + 1 + shard}"
    own = {"store": "memory:", "shard": shard, "listen": address, "advertise": f"tcp://{address}"}
    return settings_of(name).model_copy(update=own)


# --- the list of nodes ---------------------------------------------------------------------------


class Registry(Server):
    """The store's list of nodes: what ``nodes_beat.lua`` does."""

    def __init__(self, loop: SimLoop, host: Host, net: Network, rnd: random.Random) -> None:
        super().__init__(loop, host, net, rnd)
        self.nodes: dict[str, NodeRecord] = {}
        self.until_ms: dict[str, int] = {}
        self.placed: dict[int, str] = {}
        self.drained: set[str] = set()
        self._route: dict[int, tuple[int, str]] = {}
        self.version = 0

    def beat(self, me: NodeRecord, instead_of: str, *, leaves: bool) -> NodesSeen:
        now_ms = EPOCH_MS + int(self.loop.time() * 1000)
        for name in [name for name, end_ms in self.until_ms.items() if end_ms <= now_ms]:
            del self.nodes[name], self.until_ms[name]
        there = self.nodes.get(me.name)
        is_mine = there is None or there.run in (me.run, instead_of)
        if is_mine and leaves:
            self.nodes.pop(me.name, None)
            self.until_ms.pop(me.name, None)
        elif is_mine:
            self.nodes[me.name], self.until_ms[me.name] = me, now_ms + me.ttl_ms
            for claim in me.claims:
                before = self._route.get(claim.shard, (0, ""))
                if (claim.epoch, claim.address) != before and claim.epoch >= before[0]:
                    self._route[claim.shard] = (claim.epoch, claim.address)
                    self.version += 1
        others = {name: one for name, one in self.nodes.items() if is_mine or name != me.name}
        return NodesSeen(
            now_ms=now_ms,
            nodes=others,
            seen_ms={name: self.until_ms[name] - one.ttl_ms for name, one in self.nodes.items()},
            placed=dict(self.placed),
            drained=frozenset(self.drained),
            version=self.version,
            namesake=None if is_mine else there,
        )


class NodeRegistry:
    """What a registrar has of it; see ``contract.NodeRegistry``."""

    def __init__(self, machine: Machine, line: Line) -> None:
        self._machine, self._line = machine, line

    async def _say(self, me: NodeRecord, instead_of: str, *, leaves: bool) -> NodesSeen:
        registry = self._machine.world.registry
        try:
            return await self._line.call(
                "leave" if leaves else "beat",
                lambda: registry.beat(me, instead_of, leaves=leaves),
                TTL_S / 4,
            )
        except Unanswered:
            raise StoreAway("the store does not answer") from None

    async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
        seen = self._machine.seen = await self._say(me, instead_of, leaves=False)
        return seen

    async def leave(self, me: NodeRecord) -> None:
        await self._say(replace(me, claims=()), "", leaves=True)

    async def close(self) -> None:
        """Do nothing: there is nothing to give back."""


# --- a machine and its processes -----------------------------------------------------------------


class ProcessHost(Host):
    """A process of a machine. All of a machine have its name, by which the network knows it."""

    def __init__(self, machine: Machine, part: str, pid: int) -> None:
        super().__init__(machine.world.loop, machine.name)
        self.machine, self.part, self.pid = machine, part, pid
        self.is_frozen = machine.is_frozen
        self.terminate: Callable[[], object] = self._end_at_once
        """What SIGTERM does."""
        self.licence: Callable[[int], bool] = lambda mono_ms: False
        """Whether it may deliver at a moment of its steady clock, while it leads."""
        self.epoch = 0
        """0: it does not lead."""
        self.process: Process | None = None

    def __repr__(self) -> str:
        return f"{self.name}/{self.part}"

    def _end_at_once(self) -> None:
        self.machine.ended(self, -signal.SIGTERM)

    @property
    def may_deliver(self) -> bool:
        return bool(self.epoch) and self.licence(self.mono_ms())


class SimNode(Node):
    """A node whose pipe is looked at by the simulation's loop."""

    def wake_registrar(self) -> None:
        super().wake_registrar()
        cast(SimLoop, asyncio.get_running_loop()).is_readable(self.wake_reader)


class SimParent(NodeParent):
    """The parent with its rules; processes begin, end and hear signals in the simulation."""

    def __init__(self, machine: Machine, node: Node, processes: list[Process], log: Any) -> None:
        super().__init__(node, processes, log)
        self._machine = machine

    def go_on(self) -> None:
        """What ``watch`` does in each of its turns."""
        machine, now_s = self._machine, self._machine.world.loop.time()
        for process in self._processes:
            if process.pid is None and process.is_wanted and not self._is_ending:
                if process.due_s <= now_s:
                    self._start(process)
                else:
                    machine.parent_host.call_at(process.due_s, self.go_on)
        if self._is_ending and all(process.pid is None for process in self._processes):
            machine.over(self.code)

    def _start(self, process: Process) -> bool:
        process.pid = self._machine.begin(process)
        process.starts += 1
        process.began_s = self._machine.world.loop.time()
        self._note(process, State.STARTING)
        return False

    def _send(self, number: int, processes: list[Process]) -> None:
        for process in processes:
            host = self._machine.hosts.get(process.pid or 0)
            if host is not None:  # else it has just ended
                if process.kind is ProcessKind.SHARD:
                    self._machine.world.stops(host, process.number, is_node=self._is_ending)
                if number == signal.SIGKILL:
                    self._machine.kill_process(host)
                else:
                    host.call_at(host.loop.time(), lambda host=host: host.terminate())

    def says(self, number: int) -> None:
        self._note_ready(bytes([number]))
        self.go_on()

    def ends(self, process: Process, code: int) -> None:
        self._note_end(process, code)
        self.go_on()

    def stop(self) -> None:
        self._note_signal(signal.SIGTERM)
        self.go_on()


class Machine:
    """A machine that runs a node, again and again."""

    def __init__(self, world: NodesWorld, name: str) -> None:
        self.world, self.name = world, name
        self.parent_host: ProcessHost
        self.hosts: dict[int, ProcessHost] = {}
        """Process id → the process that lives."""
        self.is_alive = self.is_frozen = self.is_leaving = False
        self.is_gone = False
        """Whether it does not come back."""
        self.was_hit = False
        """Whether one of its processes was killed since the start."""
        self.seen: NodesSeen | None = None
        """What its registrar was told last."""
        self.capacity = world.rnd.choice((1.0, 1.0, 1.0, 2.0))
        self._pipes: list[int] = []

    def start(self) -> None:
        if self.is_alive:
            return
        world = self.world
        world.trace("start", self.name)
        world.net.is_back(self.name)
        self.is_alive, self.is_leaving, self.is_gone, self.is_frozen = True, False, False, False
        self.hosts, self.seen, self.was_hit = {}, None, False
        self.parent_host = ProcessHost(self, "parent", next(world.pids))
        wake_reader, wake_writer = os.pipe()
        for pipe in (wake_reader, wake_writer):
            os.set_blocking(pipe, False)
        self._pipes += (wake_reader, wake_writer)
        world.loop.pipes.add(wake_reader)
        settings = settings_of(self.name, self.capacity)
        self.node = SimNode(
            settings=settings,
            shards=[settings_of_shard(self.name, shard) for shard in range(world.count)],
            registry="",
            board=Board(world.count),
            bulletin=Bulletin(),
            run=f"run-{self.parent_host.pid}",
            life=f"{self.name}:{self.parent_host.pid}",
            since_ms=self.parent_host.wall_ms(),
            wake_reader=wake_reader,
            wake_writer=wake_writer,
        )
        self.member = Member(self.node, None)
        processes = [Process(item.shard, item, is_wanted=False) for item in self.node.shards]
        processes.append(Process(world.count, settings, ProcessKind.REGISTRAR))
        log = cast(Any, Log(world, self.parent_host))
        self.parent = SimParent(self, self.node, processes, log)
        self._tell(self.parent.go_on)

    def _tell(self, act: Callable[..., object], *args: Any) -> None:
        """Let the parent do something."""
        self.parent_host.call_at(self.world.loop.time(), act, *args)

    def begin(self, process: Process) -> int:
        """Begin a process; its id."""
        pid = next(self.world.pids)
        part = "registrar" if process.kind is ProcessKind.REGISTRAR else f"shard-{process.number}"
        host = self.hosts[pid] = ProcessHost(self, part, pid)
        host.process = process
        life = self._registrar if process.kind is ProcessKind.REGISTRAR else self.serve
        begins_s = self.world.loop.time() + self.world.rnd.uniform(*BIRTH_S)
        host.call_at(begins_s, lambda: host.spawn(life(host, process)))
        return pid

    def ended(self, host: ProcessHost, code: int) -> None:
        """A process has ended, and its parent hears of it."""
        if host.is_alive:
            host.kill()
            self.world.ends(host)
            self.world.net.died(host, silently=False)
            self.hosts.pop(host.pid, None)
            assert host.process is not None
            self._tell(self.parent.ends, host.process, code)

    async def _registrar(self, host: ProcessHost, process: Process) -> None:
        code, say = 0, self._say
        registrar = Registrar(
            self.node,
            cast(Any, Log(self.world, host)),
            lambda: say(BULLETIN_CHANGED),
            lambda: say(process.number),
        )
        host.terminate = registrar.leave
        door = self.door(host)
        try:
            if door is not None:
                await door.start()
            await registrar.run()
        except TickwheelError as error:
            self.world.problems.append(f"{host} ended: {type(error).__name__}: {error}")
            code = 1
        await registrar.close()
        if door is not None:
            await door.stop()
        self.ended(host, code)

    def _say(self, number: int) -> None:
        self._tell(self.parent.says, number)

    def serves(self, process: Process) -> None:
        """Let the parent know that a daemon serves, or stands by."""
        self._say(process.number)

    # --- what others say --------------------------------------------------------------------------

    async def serve(self, host: ProcessHost, process: Process) -> None:
        """Be the daemon of a shard, until it ends."""
        raise NotImplementedError

    def door(self, host: ProcessHost) -> FrontDoor | None:
        """The front door of the node; None: nobody comes."""
        return None

    # --- what happens to it -----------------------------------------------------------------------

    def over(self, code: int) -> None:
        """The parent has ended."""
        world = self.world
        world.trace("over", self.name, code)
        if code and not self.was_hit:
            world.problems.append(f"{self.name} ended with code {code}")
        was_leaving = self.is_leaving
        self._end(silently=False)
        if not was_leaving or not self.is_gone:
            self._start_later()

    def _end(self, *, silently: bool) -> None:
        for host in (*self.hosts.values(), self.parent_host):
            host.kill()
            self.world.ends(host)
            self.world.net.died(host, silently=silently)
        self.hosts = {}
        self.is_alive = self.is_leaving = False

    def _start_later(self) -> None:
        after_s = self.world.rnd.uniform(*RESTART_S)
        self.world.loop.call_later(after_s, self.restart, context=Context())

    def restart(self) -> None:
        if not self.is_gone:
            self.start()

    def stop(self, *, for_good: bool) -> None:
        """SIGTERM to the parent."""
        if self.is_alive:
            self.is_leaving, self.is_gone = True, for_good
            self._tell(self.parent.stop)

    def kill(self, *, silently: bool, for_good: bool) -> None:
        """The machine, or its parent process, is gone."""
        if self.is_alive:
            self._end(silently=silently)
            self.is_gone = for_good
            if not for_good:
                self._start_later()

    def kill_process(self, host: ProcessHost) -> None:
        self.was_hit = True
        self.ended(host, -signal.SIGKILL)

    def freeze(self) -> None:
        if not self.is_alive:
            return
        self.is_frozen = True
        for host in (*self.hosts.values(), self.parent_host):
            host.freeze()

    def thaw(self) -> None:
        self.is_frozen = False
        if self.is_alive:
            for host in (*self.hosts.values(), self.parent_host):
                host.thaw()

    def is_over(self, pid: int) -> bool:
        """Whether the process with this number has ended."""
        return not self.is_alive or pid not in (self.parent_host.pid, *self.hosts)

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
