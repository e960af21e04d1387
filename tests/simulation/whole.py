"""The whole in one run: nodes with real daemons and front doors, and clients of all their shards.

Machines, the list of nodes and what happens to them are those of the runs of nodes; each process of
a shard is the product's ``Daemon`` on the simulated store of its shard, the registrar has its
``FrontDoor``, and clients find the shards by the routes that these tell. The judge is that of the
other runs, over all shards, and knows besides in which shard a key belongs.

Each fourth run is calm: shards move, and nodes come and go, in order. There nothing comes twice,
and a shard is without a leader for ``GAP_S`` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from crash.clocks import Clocks
from simulation import faults, judge
from simulation.crowd import TASKS, Crowd
from simulation.loop import Host, SimLoop, passes, simulated
from simulation.machines import Machine, ProcessHost
from simulation.nodes import FAULTS as NODE_FAULTS
from simulation.nodes import FAULTS_S, NodesWorld, host_of_process
from simulation.store import settings_in
from simulation.world import PORT, Log, Outcome, daemon_of, watched
from tickwheel.clock import Clock
from tickwheel.model.records import GroupRow, GroupSettings
from tickwheel.model.values import shard_of
from tickwheel.persistence.contract import StoreError
from tickwheel.server import daemon as daemons
from tickwheel.server import roles
from tickwheel.server.fleet import lease as leases
from tickwheel.server.fleet import registrar as registrars
from tickwheel.server.fleet.board import Member
from tickwheel.server.fleet.registrar import FrontDoor
from tickwheel.server.settings import Settings, split_address

if TYPE_CHECKING:
    from simulation.network import Listening
    from tickwheel.server.daemon import Daemon
    from tickwheel.server.fleet.processes import Process

CALM_S = 10.0
"""So long calm runs have something to do, all wishes being done by then,"""
CALM_TASKS = 25
"""so many tasks of each producer."""
FOLLOWED_S = 20
"""Maximum seconds after the work until every shard has the home shards' settings."""
KEYS = ("c", "d", "e", "f")
"""Order keys beside the usual ones, so that each shard has some."""


class SimMember(Member):
    """A daemon's side of its node, which also tells the simulation."""

    def __init__(self, host: ProcessHost, shard: int) -> None:
        super().__init__(host.machine.node, shard)
        self._host = host

    def note(self, role: str, epoch: int, since_ms: int) -> None:
        super().note(role, epoch, since_ms)
        host, is_active = self._host, role == "active"
        host.epoch = epoch if is_active else 0
        if is_active:
            assert self.shard is not None
            host.machine.world.leads(host, self.shard)


class WholeMachine(Machine):
    """A machine whose daemons are real, and whose front door is open."""

    async def serve(self, host: ProcessHost, process: Process) -> None:
        """What ``daemon._serve`` does."""
        daemon = self._make(host, process)
        host.terminate = daemon.ask_to_stop
        code = 0
        try:
            await daemon.start()
            self.serves(process)
            await daemon.wait()
        except Exception as error:
            if not daemon.has_given_up(error):
                code = 1
                self.world.problems.append(f"{host} ended: {type(error).__name__}: {error}")
        try:
            # A task of its own: at the end of a run one that hangs in a ``finally`` can be closed.
            await host.spawn(daemon.stop())
        except StoreError as error:
            # The store did not take the last batch, or could not be asked: the next start recovers.
            self.world.trace("stop", host, type(error).__name__)
            code, self.was_hit = 1, True
        except Exception as error:
            code = 1
            self.world.problems.append(f"{host} did not stop: {type(error).__name__}: {error}")
        self.ended(host, code)

    def _make(self, host: ProcessHost, process: Process) -> Daemon:
        world, shard = self.world, process.number
        settings = self.node.shards[shard]
        member = SimMember(host, shard)
        daemon = daemon_of(world, host, settings, world.shards[shard], member, world.shards)

        def licence(mono_ms: int) -> bool:
            """What the shard itself asks before it delivers."""
            asks = daemon.roles.shard and daemon.roles.shard._may_deliver
            return daemon.roles.shard is not None and (asks is None or asks(mono_ms))

        host.licence = licence
        daemon._server = cast(Any, _listen(settings, daemon.listener))
        return daemon

    def door(self, host: ProcessHost) -> FrontDoor | None:
        return FrontDoor(self.node, cast(Any, Log(self.world, host)))


def _said(row: GroupRow | None) -> object:
    """The settings of a group and their version; None: there is no such group."""
    if row is None:
        return None
    return row.version, (row.settings or GroupSettings())._replace(former=())


def _listen(settings: Settings, make: Callable[[], Any]) -> Listening:
    """Let the process whose code runs take connections where its settings say."""
    host = host_of_process()
    address = split_address(settings.listen, "listen")
    return host.machine.world.net.listen(address, host, make)


class WholeWorld(NodesWorld):
    """Everything of one run."""

    make_machine = WholeMachine

    def __init__(self, seed: int, loop: SimLoop) -> None:
        super().__init__(seed, loop)
        url = ",".join(f"tcp://{machine.name}:{PORT}" for machine in self.machines)
        span_s, tasks = (CALM_S, CALM_TASKS) if self.is_calm else (FAULTS_S, TASKS)
        self.crowd = Crowd(self, url, span_s, tasks=tasks, keys=KEYS)
        self.programs = self.crowd.programs
        self.choices = NODE_FAULTS | FAULTS
        self._all_over: asyncio.Task[None] | None = None
        """Waits until all is delivered, from the end of the faults on."""
        if self.is_calm:
            self.crowd.be_gentle()

    def delivers(self, host: Host, epoch: int) -> None:
        """A daemon writes deliveries: nobody else may have begun to lead its shard."""
        assert isinstance(host, ProcessHost) and host.process is not None
        shard = host.process.number
        newest = self.shards[shard].epoch
        if epoch != newest:
            self.problems.append(
                f"two lead shard {shard}: {host} delivers in epoch {epoch} at"
                f" {self.loop.time():.3f} s, and epoch {newest} has begun"
            )

    async def run(self) -> None:
        with watched(self.delivers):
            self.crowd.start()
            await super().run()
            await (self._all_over or self._until_over())
            await self._until_followed()

    def mend(self) -> None:
        super().mend()
        self.crowd.behave()
        self._all_over = self.loop.create_task(self._until_over())

    async def _until_over(self) -> None:
        """Wait until all tasks have ended, including those of a last producer in each shard."""
        names = (f"last-{number}" for number in count())
        self.crowd.probe([
            next(name for name in names if shard_of(name, self.count) == shard)
            for shard in range(self.count)
        ])  # fmt: skip
        await self.crowd.until_over()

    async def _until_followed(self) -> None:
        """Wait until every shard has the settings that their homes have."""
        for _ in range(FOLLOWED_S):
            if not self._not_followed():
                return
            await passes(1)
        self.problems += self._not_followed()

    def _not_followed(self) -> list[str]:
        """Groups that are not everywhere what they are at home."""
        results = [
            {(row.topic, row.group): row for row in settings_in(server).rows or ()}
            for server in self.shards
        ]
        return [
            f"group {row.group} of topic {row.topic} is {there} in shard {shard}, and {row} at home"
            for home, rows in enumerate(results)
            for row in rows.values()
            if shard_of(row.topic, self.count) == home and not row.is_closed
            for shard, others in enumerate(results)
            if _said(there := others.get((row.topic, row.group))) != _said(row)
        ]

    @contextmanager
    def patched(self) -> Iterator[None]:
        async def listen(sock: str, make: Any, settings: Settings, tls: Any) -> Listening:
            return _listen(settings, make)

        def make_clock(hold_over_ms: int) -> Clock:
            return Clock(hold_over_ms, host_of_process())

        with super().patched(), ExitStack() as stack:
            for owner, name, value in (
                (daemons, "bind", lambda address: address),
                (daemons, "listen", listen),
                (daemons, "within_file_limit", lambda settings, log: settings),
                (registrars, "Clock", make_clock),
                (roles, "Life", registrars.Life),
                (leases, "is_over", registrars.is_over),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def outcome(self) -> Outcome:
        self.problems += self.crowd.judge(self.shards, Clocks())
        if self.is_calm:
            self.problems += judge.nothing_twice(self.crowd.records)
            self.problems += [
                f"{text}; and nothing had happened but hand-overs"
                for text in self.crowd.records.errors
            ]
        self.counts += self.crowd.counts(self.shards)
        return super().outcome()


# --- what happens besides ------------------------------------------------------------------------


def cut_off_from_client(world: WholeWorld) -> None:
    """A client and a machine do not reach each other, or only one the other."""
    here, there = world.rnd.choice(world.machines).name, world.rnd.choice(world.programs).name
    world.net.block(here, there, one_way=world.rnd.random() < 0.3)
    faults.for_s(world, 0.1, 3.0, lambda: world.net.unblock(here, there))


def cut(world: WholeWorld) -> None:
    """All connections of a machine break."""
    world.net.cut(world.rnd.choice(world.machines).name)


def refusing_store(world: WholeWorld) -> None:
    """The store takes no batch of a shard."""
    server = world.rnd.choice(world.shards)
    server.refuses = "it takes none at the moment"
    faults.for_s(world, 0.1, 1.5, lambda: setattr(server, "refuses", ""))


def freeze_leader(world: WholeWorld) -> None:
    """A daemon that leads stands still, mostly for longer than its lease."""
    leading = [host for host in world.leaders().values() if not host.is_frozen]
    if leading:
        host = world.rnd.choice(leading)
        host.freeze()
        faults.for_s(world, 1.0, 3.5, lambda: host.machine.is_frozen or host.thaw())


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        cut, refusing_store, freeze_leader, cut_off_from_client, faults.slow_network,
        faults.kill_client, faults.freeze_client,
    )
}  # fmt: skip


def simulate(seed: int, *, lines: list[tuple[Any, ...]] | None = None) -> Outcome:
    """One run; ``lines`` gets its trace."""
    with simulated(seed) as loop:
        return WholeWorld(seed, loop).simulate(lines)
