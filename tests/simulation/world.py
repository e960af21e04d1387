"""One run of the simulation: daemons, store, clients and faults, all from a seed, and its verdict.

A run has faults for some seconds of its own time, then everything is mended. From there on every
confirmed task must be delivered and acked within ``BOUND_S``.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from crash.clocks import Clocks, Piece
from simulation import judge
from simulation.crowd import Crowd
from simulation.loop import EPOCH_MS, Host, SimLoop, host_here, passes, simulated
from simulation.network import Network
from simulation.store import STORE, Line, NodeElection, NodeSiblings, NodeStore, Server
from tickwheel.persistence.contract import StoreError
from tickwheel.server import roles
from tickwheel.server.daemon import Daemon
from tickwheel.server.settings import Settings
from tickwheel.server.shard.shard import Delivering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.engine.topics import Dispatch
    from tickwheel.server.fleet.board import Member

PORT = 7355
TTL_S = 1.2
"""The leader's lease."""
FAULTS_S = 3.0
"""How long a run has faults, in seconds of its own."""
RESTART_S = (0.1, 1.5)
JUMP_MS = (-3_000, 3_000)
GENTLE_EACH = 4
"""One in this number of seeds is a run without kills."""
FAILING_OVER_EACH = 8
"""One in this number of seeds is a run whose store loses confirmed batches."""


DAEMON: dict[str, Any] = {
    "leader_ttl_s": TTL_S,
    "reconnect_grace_s": 1.0,
    "deaths_max": 1_000,
    "death_retry_base_s": 0.1,
    "death_retry_cap_s": 0.5,
    "retry_base_s": 0.2,
    "retry_cap_s": 1.0,
    "retry_max": 1_000,
    "drain_timeout_s": 2.0,
    "heartbeat_interval_s": 1.0,
    "heartbeat_timeout_s": 3.0,
    "outcome_timeout_s": 1.5,
}
"""Settings of all daemons: a run is short."""


@cache
def settings_of(name: str) -> Settings:
    address = f"tcp://{name}:{PORT}"
    return Settings(**DAEMON, store="memory:", node=name, advertise=address)


class Node:
    """A machine with a daemon on it, which a supervisor starts again."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.host = Host(world.loop, name)
        self.daemon: Daemon | None = None
        self.offset_ms = 0
        self.is_wanted = True
        """Whether it is to run: False between a kill and the next start."""

    def start(self) -> None:
        world = self.world
        self.is_wanted = True
        self.host = host = Host(world.loop, self.name)
        host.offset_ms = self.offset_ms
        host.context.copy().run(self._make)
        assert self.daemon is not None
        world.net.listen((self.name, PORT), host, self.daemon.listener)
        world.net.is_back(self.name)
        host.spawn(self._life(self.daemon))

    def _make(self) -> None:
        world = self.world
        self.daemon = daemon_of(world, self.host, settings_of(self.name), world.server)

    async def _life(self, daemon: Daemon) -> None:
        host = self.host
        try:
            await daemon.start()
            await daemon.wait()
        except Exception as error:
            if not daemon.has_given_up(error):
                self.world.problems.append(
                    f"the daemon of {self.name} ended: {type(error).__name__}: {error}"
                )
        try:
            # A task of its own: at the end of a run one that hangs in a ``finally`` can be closed.
            await host.spawn(daemon.stop())
        except StoreError as error:
            # The store did not take the last batch, or could not be asked: the next start recovers.
            self.world.trace("stop", host, type(error).__name__)
        except Exception as error:
            self.world.problems.append(
                f"the daemon of {self.name} did not stop: {type(error).__name__}: {error}"
            )
        self.world.trace("stopped", host)
        self.world.net.died(host, silently=False)
        host.kill()
        self._start_later()

    def _start_later(self) -> None:
        self.is_wanted = False
        after_s = self.world.rnd.uniform(*RESTART_S)
        # Whoever starts it is not the process that has just ended, of which nothing runs any more.
        self.world.loop.call_later(after_s, self.restart, context=Context())

    def restart(self) -> None:
        """Start it, unless it runs."""
        if not self.is_wanted:
            self.start()

    def kill(self, *, silently: bool) -> None:
        if not self.host.is_alive:
            return
        self.host.kill()
        self.world.net.died(self.host, silently=silently)
        self._start_later()

    def drain(self) -> None:
        """SIGTERM."""
        if self.host.is_alive and self.daemon is not None:
            self.host.context.copy().run(self.daemon.ask_to_stop)

    def jump(self, offset_ms: int) -> None:
        self.world.clock_changed(self, offset_ms)
        self.offset_ms = self.host.offset_ms = offset_ms


def daemon_of(
    run: Run,
    host: Host,
    settings: Settings,
    server: Server,
    member: Member | None = None,
    shards: Sequence[Server] = (),
) -> Daemon:
    """A daemon, with the store of the simulation where it would open its own. ``shards``: the
    servers of all shards, where there are several."""
    store = NodeStore(Line(server, host, run.trace))
    siblings = NodeSiblings([Line(shard, host, run.trace) for shard in shards])
    election = NodeElection(Line(server, host, run.trace), int(TTL_S * 1000))
    with (
        mock.patch.object(roles, "open_store", lambda given: (store, given.engine())),
        mock.patch.object(roles, "open_election", return_value=election),
        mock.patch.object(roles, "open_siblings", return_value=siblings),
    ):
        log = cast(Any, Log(run, host))
        return Daemon(settings, log, is_embedded=True, sources=host, member=member)


class Log:
    """What a daemon logs goes into the trace."""

    def __init__(self, world: Any, host: Host) -> None:
        self._world, self._host = world, host

    def __getattr__(self, level: str) -> Any:
        def write(event: str, **fields: Any) -> None:
            self._world.trace("log", self._host, level, event)
            self._world.events[event] += 1
            if event == "internal_error":
                self._world.problems.append(f"{self._host}: {event}: {fields}")

        return write


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    problems: list[str]
    """Problems; empty if the run holds."""
    trace_hash: str
    lines: int
    """Lines of the trace."""
    virtual_s: float
    faults: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class Run:
    """What every run has, of whatever kind."""

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self.seed, self.loop = seed, loop
        self.rnd = random.Random(f"{seed}/world")
        self.lines: list[tuple[Any, ...]] = []
        self.problems: list[str] = []
        self.events, self.faults, self.counts = Counter[str](), Counter[str](), Counter[str]()
        self.net = Network(loop, random.Random(f"{seed}/network"), self.trace)

    def trace(self, *what: object) -> None:
        """A line of the trace: two runs of one seed have the same ones."""
        self.lines.append((self.loop.time(), *what))

    def outcome(self) -> Outcome:
        """Return the result after the run."""
        digest = hashlib.blake2b(digest_size=12)
        for line in self.lines:
            digest.update(f"{line}\n".encode())
        return Outcome(
            self.seed, [*self.problems, *self.loop.errors], digest.hexdigest(), len(self.lines),
            self.loop.time(), self.faults, self.events, self.counts,
        )  # fmt: skip


@contextmanager
def watched(delivers: Callable[[Host, int], None]) -> Iterator[None]:
    """A block in which it is noted who writes deliveries, where the product writes them, and in
    which epoch."""
    write = Delivering.write

    def noting(self: Delivering, dispatch: Dispatch, now_ms: int) -> None:
        host = host_here()
        assert host is not None
        delivers(host, self._core.epoch)
        write(self, dispatch, now_ms)

    with mock.patch.object(Delivering, "write", noting):
        yield


class World(Run):
    """Everything of one run. ``nodes``: how many daemons; 0 lets the seed choose two or three."""

    def __init__(self, seed: int, loop: SimLoop, *, nodes: int = 0, faults: bool = True) -> None:
        super().__init__(seed, loop)
        store_host = Host(loop, STORE)
        self.server = Server(loop, store_host, self.net, random.Random(f"{seed}/store"))
        self._pieces: list[Piece] = []
        names = [f"node-{letter}" for letter in "abc"[: nodes or self.rnd.choice((2, 2, 3))]]
        self.nodes = [Node(self, name) for name in names]
        url = ",".join(f"tcp://{name}:{PORT}" for name in names)
        self.crowd = Crowd(self, url, FAULTS_S)
        self.programs = self.crowd.programs
        self._has_faults = faults
        self.is_gentle = seed % GENTLE_EACH == 0
        """Daemons are stopped in order and nothing else happens: then nothing comes twice."""
        self.server.keeps_copies = seed % FAILING_OVER_EACH == FAILING_OVER_EACH - 1
        if self.is_gentle:
            self.crowd.be_gentle()

    # --- clocks ---------------------------------------------------------------------------------

    def clock_changed(self, node: Node, offset_ms: int) -> None:
        """Write down what the clocks show from now on, for the judge."""
        index, now_ms = self.nodes.index(node), EPOCH_MS + int(self.loop.time() * 1000)
        if not self._pieces:
            self._pieces = [Piece(n, EPOCH_MS, 0, 1.0, 2) for n in range(len(self.nodes))]
        for piece in self._pieces:
            if piece.daemon == index and piece.until_ms is None:
                piece.until_ms = now_ms
        self._pieces.append(Piece(index, now_ms, offset_ms, 1.0, 2))

    def clocks(self) -> Clocks:
        now_ms = EPOCH_MS + int(self.loop.time() * 1000)
        for piece in self._pieces:
            piece.until_ms = now_ms if piece.until_ms is None else piece.until_ms
        return Clocks(self._pieces)

    # --- the run --------------------------------------------------------------------------------

    async def run(self) -> None:
        with watched(self.delivers):
            for node in self.nodes:
                self.loop.call_later(self.rnd.uniform(0, 0.05), node.start)
            self.crowd.start()
            if self._has_faults:
                await self._fault()
            else:
                await passes(FAULTS_S)
            self.mend()
            await self.crowd.until_over()

    def delivers(self, host: Host, epoch: int) -> None:
        """A daemon writes deliveries: nobody else may have begun to lead."""
        if epoch != self.server.epoch:
            self.problems.append(
                f"two lead: {host} delivers in epoch {epoch} at {self.loop.time():.3f} s, and epoch"
                f" {self.server.epoch} has begun"
            )

    async def _fault(self) -> None:
        """Let things go wrong, several at a time perhaps."""
        from simulation.faults import FAILING_OVER, FAULTS, GENTLE

        await passes(self.rnd.uniform(0.4, 1.0))
        low_s = 1.0 if self.is_gentle else 0.05
        choices = FAULTS
        if self.is_gentle:
            choices = GENTLE
        elif self.server.keeps_copies:
            choices = FAILING_OVER
        while self.loop.time() < FAULTS_S:
            name = self.rnd.choice(list(choices))
            self.faults[name] += 1
            self.trace("fault", name)
            choices[name](self)
            await passes(self.rnd.uniform(low_s, 1.2))

    def mend(self) -> None:
        """End all faults."""
        self.trace("mended")
        self.net.gone.clear()
        self.net.heal()
        server = self.server
        server.is_slow, server.refuses = False, ""
        server.host.thaw()
        server.arrive_late()
        for node in self.nodes:
            node.host.thaw()
            if node.offset_ms:
                node.jump(0)
            node.restart()
        self.crowd.behave()

    def outcome(self) -> Outcome:
        self.problems += self.crowd.judge([self.server], self.clocks())
        if self.is_gentle:
            self.problems += judge.nothing_twice(self.crowd.records)
        self.counts += self.crowd.counts([self.server])
        return super().outcome()


def simulate(
    seed: int, *, nodes: int = 0, faults: bool = True, lines: list[tuple[Any, ...]] | None = None
) -> Outcome:
    """One run; ``lines`` gets its trace."""
    with simulated(seed) as loop:
        world = World(seed, loop, nodes=nodes, faults=faults)
        try:
            loop.run_until_complete(world.run())
        except Exception as error:
            world.problems.append(f"the run broke: {type(error).__name__}: {error}")
        if lines is not None:
            lines += world.lines
        return world.outcome()
