"""Nodes in the simulation: who has which shard, while machines come, go, die and stand still.

What runs is the product's ``Registrar`` with its placement, the parent's rules (``NodeParent``) and
each daemon's ``Leadership``. Stand-ins are the store's list of nodes (``Registry``, with the rules
of ``nodes_beat.lua``), the processes, which are hosts, and a daemon's work: it leads, gives the
lease back when it is asked to stop, and needs some time for that.

Each fourth run is calm: one thing happens after the other, all of it on purpose. There a shard may
be without a leader for ``GAP_S`` only, and no shard moves that need not. In the others anything
goes wrong; when it is over, all must come to where the placement wants it, within ``BOUND_S``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any
from unittest import mock

from simulation.loop import Host, SimLoop, host_here, passes, simulated
from simulation.machines import (
    TTL_S,
    Machine,
    NodeRegistry,
    ProcessHost,
    Registry,
    settings_of_shard,
)
from simulation.store import STORE, Line, NodeElection, Server, Unanswered
from simulation.world import Outcome, Run
from tickwheel.clock import Clock
from tickwheel.persistence.contract import Fenced
from tickwheel.server.fleet import processes as parents
from tickwheel.server.fleet import registrar as registrars
from tickwheel.server.fleet.board import Member, Node, Role
from tickwheel.server.fleet.lease import Deposed, Leadership
from tickwheel.server.fleet.processes import Process, ProcessKind
from tickwheel.server.fleet.registrar import place

GAP_S = 0.5
"""Maximum seconds without a leader during a handover."""
BOUND_S = 30.0
"""Within so many seconds after the last fault, or after each wish of a calm run, all is where it
shall be."""
STAYS_S = 1.0
"""Seconds without a move after which the placement is stable."""
FAULTS_S = 4.0
CALM_EACH = 4
"""One in this number of seeds is a run without faults."""
WISHES = 4
"""Number of operator requests in a run without faults."""
LOOK_S = 0.1
DRAIN_S = (0.01, 0.3)
"""How long a daemon takes to give its shard back."""
WRITE_S = 0.3


class StandIn:
    """A daemon without work: its part in the election, and the time that a drain takes."""

    def __init__(
        self, host: ProcessHost, shard: int, node: Node, on_start: Callable[[], None]
    ) -> None:
        self._host, self._shard, self._on_start = host, shard, on_start
        self._member = Member(node, shard)
        self._world = world = host.machine.world
        self._server = world.shards[shard]
        self._line = Line(self._server, host, world.trace)
        self._owner = f"{host.name}/{host.pid}"
        self._address = str(node.shards[shard].advertise)
        self._leadership = Leadership(
            NodeElection(Line(self._server, host, world.trace), int(TTL_S * 1000)),
            int(TTL_S * 1000),
            Clock(1_000_000, host),
            on_event=self._on_event,
            on_renewed=lambda: world.one_leads(host, shard),
            is_release_near=self._member.is_release_near,
        )
        host.licence = self._leadership.may_deliver
        self._leading: asyncio.Task[None] | None = None
        self._has_started = False

    def _on_event(self, event: str, text: str) -> None:
        self._world.trace("log", self._host, event)
        self._world.events[event] += 1

    def _note(self, role: str, epoch: int) -> None:
        self._host.epoch = epoch
        self._member.note(role, epoch, self._host.wall_ms())

    def _started(self) -> None:
        """It leads or stands by, for the first time."""
        if not self._has_started:
            self._has_started = True
            self._on_start()

    async def run(self) -> None:
        leadership = self._leadership
        await leadership.prepare(None)
        self._leading = self._host.spawn(self._campaign())
        await asyncio.wait({self._leading})

    async def _campaign(self) -> None:
        leadership = self._leadership
        is_turn = await leadership.first_campaign(self._owner, self._address)
        if not is_turn:
            self._note("standby", 0)
            self._started()
        while True:
            if not is_turn:
                await leadership.campaign(self._owner, self._address)
            is_turn = False
            try:
                await self._lead()
            except Unanswered:
                await leadership.resign()
            except (Deposed, Fenced):
                leadership.forfeit(for_good=True)
            self._note("standby", 0)

    async def _lead(self) -> None:
        """Lead until the lease is over. Raises Deposed, Fenced, Unanswered."""
        server, host = self._server, self._host
        opened = await self._line.call(
            "open", lambda: server.open(self._owner, host.wall_ms(), 1, may_create=True)
        )
        self._leadership.set_epoch(opened.epoch)
        self._note("active", opened.epoch)
        self._world.leads(host, self._shard)
        self._started()
        parts = [
            host.spawn(self._write(opened.epoch)),
            host.spawn(self._leadership.hold(lambda: None)),
        ]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()

    async def _write(self, epoch: int) -> None:
        """Write again and again, as one that has work. Raises Fenced."""
        server, line = self._server, self._line
        while True:
            await passes(WRITE_S)
            try:
                await line.call("write", lambda: server._claim(epoch, self._owner, line.number))
            except Unanswered:
                continue

    async def stop(self) -> None:
        """Drain, give the shard and its lease back, end."""
        host, leadership, server = self._host, self._leadership, self._server
        leading = bool(host.epoch)
        if self._leading is not None:
            self._leading.cancel()
        if leading:
            await passes(self._world.rnd.uniform(*DRAIN_S))
            try:
                epoch = host.epoch
                await self._line.call("close", lambda: server.close(epoch, self._owner))
            except Unanswered:
                self._world.trace("unclean", host)
        host.epoch = 0
        await leadership.resign()
        host.machine.ended(host, 0)


class StandInMachine(Machine):
    """A machine whose daemons are stand-ins."""

    async def serve(self, host: ProcessHost, process: Process) -> None:
        daemon = StandIn(host, process.number, self.node, lambda: self.serves(process))
        host.terminate = lambda: host.spawn(daemon.stop())
        await daemon.run()


# --- the run -------------------------------------------------------------------------------------


class NodesWorld(Run):
    """Everything of one run."""

    make_machine: type[Machine] = StandInMachine

    def __init__(self, seed: int, loop: SimLoop) -> None:
        super().__init__(seed, loop)
        rnd = self.rnd
        self.pids = count(2)
        self.store_host = Host(loop, STORE)
        store_rnd = random.Random(f"{seed}/store")
        self.count = rnd.choice((2, 3, 4))
        self.registry = Registry(loop, self.store_host, self.net, store_rnd)
        self.shards = [
            Server(loop, self.store_host, self.net, store_rnd) for _ in range(self.count)
        ]
        self.choices: Mapping[str, Callable[[Any], None]] = FAULTS
        self.is_calm = seed % CALM_EACH == 0
        self.knows_lives = rnd.random() < 0.5
        """Whether a registrar can see that the process of another one is over."""
        self.machines = [self.make_machine(self, f"node-{letter}") for letter in "abc"]
        self.daemons: list[dict[int, ProcessHost]] = [{} for _ in range(self.count)]
        """Live processes that have led each shard."""
        self._given: dict[int, float] = {}
        """Shard that its leader was told to give back, with nothing else wrong → when."""

    # --- what is watched --------------------------------------------------------------------------

    def leads(self, host: ProcessHost, shard: int) -> None:
        """A daemon has begun to lead."""
        now_s = self.loop.time()
        self.trace("leads", host, host.epoch)
        self.counts["epochs"] += 1
        self.daemons[shard][host.pid] = host
        self.one_leads(host, shard)
        began_s = self._given.pop(shard, None)
        if began_s is not None:
            self.counts["hand_overs"] += 1
            gap_s = now_s - began_s
            if gap_s >= GAP_S:
                self.problems.append(
                    f"shard {shard} was without a leader for {gap_s:.3f} s until {now_s:.3f} s,"
                    f" and was only handed over to {host.name}"
                )

    def one_leads(self, host: ProcessHost, shard: int) -> None:
        """The lease of a daemon was renewed: nobody else may have a valid one."""
        others = [
            other
            for other in self.daemons[shard].values()
            if other is not host and other.may_deliver
        ]
        if others and host.may_deliver:
            self.problems.append(
                f"two lead shard {shard}: {host} in epoch {host.epoch}, and {others[0]} in epoch"
                f" {others[0].epoch} still, at {self.loop.time():.3f} s"
            )

    def stops(self, host: ProcessHost, shard: int, *, is_node: bool) -> None:
        """A parent asks a daemon to stop. ``is_node``: because all of its node end."""
        if not host.may_deliver:
            return
        machine, now_s = host.machine, self.loop.time()
        self.trace("gives", host, "with its node" if is_node else "")
        others = [item for item in self.machines if item.is_alive and item is not machine]
        if is_node:
            if self.is_calm and any(not other.is_leaving for other in others):
                self.problems.append(f"{host} leads still when its node ends, at {now_s:.3f} s")
            return
        heirs = {} if machine.seen is None else dict(machine.seen.nodes)
        heirs.pop(machine.name, None)
        if not any(shard in heir.standbys for heir in heirs.values()):
            self.problems.append(
                f"{host} gives its shard away, and nobody stands by: {now_s:.3f} s"
            )
        if self.is_calm:
            self._given[shard] = now_s

    def ends(self, host: ProcessHost) -> None:
        """A process is over, in whatever way."""
        for hosts in self.daemons:
            hosts.pop(host.pid, None)

    # --- where all shall be -----------------------------------------------------------------------

    def target(self) -> dict[int, str]:
        """Return the node of each shard by the actual state."""
        registry = self.registry
        there = {machine.name: machine.capacity for machine in self.machines if machine.is_alive}
        free = {name: c for name, c in there.items() if name not in registry.drained}
        return place(self.count, free or there, registry.placed)

    def leaders(self) -> dict[int, ProcessHost]:
        """Shard → the process that leads it and may deliver."""
        return {
            shard: host
            for shard, hosts in enumerate(self.daemons)
            for host in hosts.values()
            if host.may_deliver
        }

    def amiss(self) -> str:
        """Return what is still misplaced, or an empty text."""
        for machine in self.machines:
            if machine.is_leaving or machine.is_alive == machine.is_gone:
                return f"{machine.name} is on its way"
        led_by, target = self.leaders(), self.target()
        for shard, node in target.items():
            if shard not in led_by or led_by[shard].name != node:
                return f"shard {shard} is led by {led_by.get(shard)}, and {node} shall have it"
        for machine in filter(lambda one: one.is_alive, self.machines):
            shards = {shard for shard, node in target.items() if node == machine.name}
            parts = {f"shard-{shard}" for shard in shards} | {"registrar"}
            if {host.part for host in machine.hosts.values()} != parts:
                return f"{machine.name} has {list(machine.hosts.values())}, and shall have {parts}"
            for shard, node in target.items():
                address, _ = machine.member.whereabouts(shard)
                if address != settings_of_shard(node, shard).advertise:
                    return f"the route of {machine.name} for shard {shard} is {address!r}"
                part = machine.node.board.read_role(shard)
                if node == machine.name and (part is None or part.role is not Role.ACTIVE):
                    return f"the board of {machine.name} does not say that it leads {shard}"
        return ""

    async def _settle(self, after: str) -> None:
        """Wait until all is where it shall be; it must be so within the bound, and stay."""
        began_s, epochs = self.loop.time(), list[int]()
        since_s = None
        while since_s is None or self.loop.time() < since_s + STAYS_S:
            await passes(LOOK_S)
            wrong = self.amiss()
            if wrong and since_s is not None and self.is_calm:
                self.problems.append(f"all was well after {after}, and then: {wrong}")
                return
            if wrong:
                since_s = None  # what a fault has begun may come to its end later
            if wrong and self.loop.time() > began_s + BOUND_S:
                self.problems.append(f"{BOUND_S:g} s after {after}: {wrong}")
                return
            if not wrong and since_s is None:
                since_s, epochs = self.loop.time(), self._epochs()
        if self._epochs() != epochs:
            self.problems.append(f"shards were led anew behind {after}, where all was well")

    def _epochs(self) -> list[int]:
        return [shard.epoch for shard in self.shards]

    # --- one run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        first = self.machines[: self.rnd.choice((2, 3))]
        for machine in self.machines:
            machine.is_gone = machine not in first
        for machine in first:
            self.loop.call_later(self.rnd.uniform(0, 0.4), machine.start, context=Context())
        if self.is_calm:
            await self._settle("the first start")
            if self._epochs() != [1] * self.count and not self.problems:
                self.problems.append("nodes that started together took shards from each other")
            for _ in range(WISHES):
                if not self.problems:
                    await self._wish()
            return
        await passes(self.rnd.uniform(0.5, 3.0))
        until_s = self.loop.time() + FAULTS_S
        while self.loop.time() < until_s:
            name = self.rnd.choice(list(self.choices))
            self.faults[name] += 1
            self.trace("fault", name)
            self.choices[name](self)
            await passes(self.rnd.uniform(0.05, 1.2))
        self.mend()
        await self._settle("the last fault")

    async def _wish(self) -> None:
        """Let one thing happen, on purpose, and wait until it is done."""
        name = self.rnd.choice([name for name in WISHED if self._can(name)])
        before, epochs = self.target(), self._epochs()
        self.faults[name] += 1
        self.trace("wish", name)
        WISHED[name](self)
        await self._settle(name)
        after = self.target()
        for shard, epoch in enumerate(epochs):
            if before[shard] == after[shard] and self.shards[shard].epoch != epoch:
                self.problems.append(
                    f"{name}: shard {shard} moved from {before[shard]} and back, and need not have"
                )

    def _can(self, name: str) -> bool:
        alive = [machine for machine in self.machines if machine.is_alive]
        if name == "join":
            return len(alive) < len(self.machines)
        return name != "leave" or len(alive) > 1

    def mend(self) -> None:
        """End all faults."""
        self.trace("mended")
        self.net.gone.clear()
        self.net.heal()
        self.store_host.thaw()
        for server in (self.registry, *self.shards):
            server.is_slow, server.refuses = False, ""
            server.arrive_late()
        for machine in self.machines:
            machine.thaw()
            if machine.is_alive:
                for host in machine.hosts.values():
                    host.thaw()
        if all(item.is_gone or not item.is_alive for item in self.machines):
            self.machines[0].start()

    def simulate(self, lines: list[tuple[Any, ...]] | None) -> Outcome:
        """Run it, and say what came of it."""
        with self.patched():
            try:
                self.loop.run_until_complete(self.run())
            except Exception as error:
                self.problems.append(f"the run broke: {type(error).__name__}: {error}")
            if lines is not None:
                lines += self.lines
            return self.outcome()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """What nodes ask the system and the store for comes from this run."""
        machines = {item.name: item for item in self.machines}

        def is_over(life: str, here: str | None) -> bool:
            """Whether a machine sees that a process of its own is over."""
            name, _, pid = life.partition(":")
            is_own = here is not None and here.partition(":")[0] == name
            return is_own and machines[name].is_over(int(pid))

        def own() -> str | None:
            host = host_of_process()
            return f"{host.name}:{host.pid}" if self.knows_lives else None

        def open_nodes(url: str, shards: int) -> NodeRegistry:
            host = host_of_process()
            return NodeRegistry(host.machine, Line(self.registry, host, self.trace))

        def own_pid() -> int:
            host = host_here()
            return host.pid if isinstance(host, ProcessHost) else 1

        life = mock.Mock(own=own)
        with (
            mock.patch.object(registrars, "open_nodes", open_nodes),
            mock.patch.object(registrars, "Life", life),
            mock.patch.object(registrars, "is_over", is_over),
            mock.patch.object(parents, "sources", host_of_process),
            mock.patch.object(os, "getpid", own_pid),
        ):
            try:
                yield
            finally:
                for machine in self.machines:
                    machine.close()


def host_of_process() -> ProcessHost:
    """The process whose code runs at the moment."""
    host = host_here()
    assert isinstance(host, ProcessHost), "a process asks"
    return host


# --- what happens --------------------------------------------------------------------------------


def _machine(world: NodesWorld) -> Machine:
    return world.rnd.choice(
        [machine for machine in world.machines if machine.is_alive] or world.machines
    )


def _process(world: NodesWorld, kind: ProcessKind) -> ProcessHost | None:
    hosts = [
        host
        for machine in world.machines
        for host in machine.hosts.values()
        if machine.is_alive and host.process is not None and host.process.kind is kind
    ]
    return world.rnd.choice(hosts) if hosts else None


def _for_s(world: NodesWorld, low_s: float, high_s: float, end: Callable[[], object]) -> None:
    world.loop.call_later(world.rnd.uniform(low_s, high_s), end, context=Context())


def _is_last(world: NodesWorld, machine: Machine) -> bool:
    return all(item is machine or item.is_gone for item in world.machines)


def _for_good(world: NodesWorld, machine: Machine) -> bool:
    return world.rnd.random() < 0.3 and not _is_last(world, machine)


def kill_node(world: NodesWorld) -> None:
    """A machine, or the parent of its processes, is gone at once, perhaps for good."""
    machine = _machine(world)
    machine.kill(silently=world.rnd.random() < 0.5, for_good=_for_good(world, machine))


def freeze_node(world: NodesWorld) -> None:
    """A whole machine stands still."""
    machine = _machine(world)
    machine.freeze()
    _for_s(world, 0.1, 3.5, machine.thaw)


def cut_off(world: NodesWorld) -> None:
    """A machine does not reach the store, or the store not the machine."""
    name, way = _machine(world).name, world.rnd.choice(("both", "to", "from"))
    here, there = (STORE, name) if way == "from" else (name, STORE)
    world.net.block(here, there, one_way=way != "both")

    def end() -> None:
        world.net.unblock(name, STORE)
        for server in (world.registry, *world.shards):
            server.arrive_late()

    _for_s(world, 0.1, 3.5, end)


def _kill_one(world: NodesWorld, kind: ProcessKind) -> None:
    host = _process(world, kind)
    if host is not None:
        host.machine.kill_process(host)


def kill_registrar(world: NodesWorld) -> None:
    """A registrar dies alone."""
    _kill_one(world, ProcessKind.REGISTRAR)


def kill_daemon(world: NodesWorld) -> None:
    """A daemon dies alone."""
    _kill_one(world, ProcessKind.SHARD)


def freeze_process(world: NodesWorld) -> None:
    """One process of a machine stands still."""
    host = _process(world, world.rnd.choice((ProcessKind.SHARD, ProcessKind.REGISTRAR)))
    if host is not None:
        host.freeze()

        def end() -> None:
            if not host.machine.is_frozen:
                host.thaw()

        _for_s(world, 0.1, 2.5, end)


def store_away(world: NodesWorld) -> None:
    """Nobody reaches the store; it does later what it was asked meanwhile."""
    world.store_host.freeze()
    _for_s(world, 0.2, 3.0, world.store_host.thaw)


def slow_store(world: NodesWorld) -> None:
    """The store takes long for everything."""
    servers = (world.registry, *world.shards)
    for server in servers:
        server.is_slow = True

    def end() -> None:
        for server in servers:
            server.is_slow = False

    _for_s(world, 0.2, 2.0, end)


def join(world: NodesWorld) -> None:
    """A machine that is not there begins."""
    gone = [machine for machine in world.machines if not machine.is_alive]
    if gone:
        world.rnd.choice(gone).start()


def leave(world: NodesWorld) -> None:
    """A node is asked to end, for good."""
    machine = _machine(world)
    if not _is_last(world, machine):
        machine.stop(for_good=True)


def restart(world: NodesWorld) -> None:
    """A node is asked to end, and begins again."""
    _machine(world).stop(for_good=False)


def move(world: NodesWorld) -> None:
    """An operator says where a shard shall be, or takes it back."""
    shard = world.rnd.randrange(world.count)
    if world.registry.placed.pop(shard, None) is None:
        world.registry.placed[shard] = _machine(world).name


def drain(world: NodesWorld) -> None:
    """An operator says that a node shall have no shards, or takes it back."""
    world.registry.drained ^= {_machine(world).name}


FAULTS: dict[str, Callable[[NodesWorld], None]] = {
    fault.__name__: fault
    for fault in (
        kill_node, freeze_node, cut_off, kill_registrar, kill_daemon, freeze_process, store_away,
        slow_store, join, leave, restart, move, drain,
    )
}  # fmt: skip
WISHED: dict[str, Callable[[NodesWorld], None]] = {
    wish.__name__: wish for wish in (join, leave, move, drain, kill_registrar)
}


def simulate(seed: int, *, lines: list[tuple[Any, ...]] | None = None) -> Outcome:
    """One run; ``lines`` gets its trace."""
    with simulated(seed) as loop:
        return NodesWorld(seed, loop).simulate(lines)
