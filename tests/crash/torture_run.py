"""One torture run from seed to verdict: clients, killer, drain, checker, audit.

What is done to the daemon and its store is a ``Havoc``: kills, or faults of Redis, and beside
them any of the nemeses; everything else is the same in all runs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from crash import groups, resources
from crash.checker import Verdict, check
from crash.clocks import Clocked, ClockFaults
from crash.emptied import emptied
from crash.failover import Failover
from crash.fair_clients import FairConsumer, FairProducer
from crash.groups import GroupFaults
from crash.http_clients import HttpConsumer, HttpProducer, HttpStreamer
from crash.keyed import Keyed
from crash.killer import Killer
from crash.link import now_ms
from crash.moving_rig import MOVING, moving_rig
from crash.network import Frozen, Net, NetworkFaults
from crash.nodes import NodeFaults
from crash.ordered import Ordering
from crash.plan import BRIEF, DRAIN_LEASE_MS, GROUPS, ONCE, SETTINGS, Plan
from crash.postgresql_rig import PostgresRig
from crash.records import Looked, Requeued
from crash.recurring import Recurring
from crash.redis_faults import RedisFaults, Rig
from crash.redis_rig import RedisRig
from crash.resources import ResourceFaults
from crash.rough_consumers import Listener, OnceConsumer, RoughConsumer, RoughPuller
from crash.rough_producer import RoughProducer
from crash.shard_killer import ShardKiller
from crash.transacting import Transacting
from crash.watch import Watch
from crash.workload import Caller, Workload
from support.daemon import Daemon
from support.ports import free_ports
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.client import Client
from tickwheel.persistence import audit, shard_folder

SQLITE = "wal_bytes=131072&reserve_bytes=0"
"""A small log, so that it is written back many times in a run."""
ENDINGS_MAX = 1_000_000
"""Outcomes to remember, enough for all tasks of a run."""
DRAIN_TIMEOUT_S = 60.0
"""Seconds without the end of any remaining task after which the run is stuck."""
DRAIN_ALL_S = 300.0
LEFT_SHOWN = 5
"""Tasks, and what their consumers know of each, when some are left."""
SETTLED_S = 300.0
"""Seconds after which an unanswered request will never be answered."""
SHOWN_WITHIN_S = 60.0
ENDED_S = 20.0
"""Seconds after which nobody starts a daemon again that has ended."""
LOG_SHOWN = 2_000
LOOK_S = 0.05
TTL_AGAIN_MS = 60_000
"""The time to live of a dead letter that had used its own up, from its requeue on."""
COUNTS = ("scheduled", "ready", "in_flight", "waiting", "dead")
FAULTS_ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for answers while Redis can be away."""
KEEP_MS = 600
"""So that a Redis that came back older is mended in both ways, by the batches and from memory."""
KEEP_ALL_MS = 120_000
"""Without the mirror: longer than several faults in a row may take what was confirmed."""
WIPE = "wipe"
"""The fault that the daemon survives with its mirror only; without, an operator restores."""
LINES_MAX = 25
"""In the log about one start or one fault."""
GAP_KILLED_S, GAP_DRAINED_S = 5.0, 0.5
"""Maximum seconds without deliveries of a shard after a kill and after a handover."""
LEADER_TTL_S = 1.0
"""Seconds that a successor waits after a kill."""
REDIS = ("redis", *MOVING)
POSTGRESQL = "postgresql"
SERVERS = (*REDIS, POSTGRESQL)
"""Stores of a run's own servers, on which faults are made and several daemons may be."""
KILLS, GROUPS_, CLOCK, NETWORK, RESOURCES, WATCH = NEMESES = (
    "kills",
    "groups",
    "clock",
    "network",
    "resources",
    "watch",
)
GUARD_S = 0.2
CROWDED_MAX = 1_500
DEAD_MAX = 100
"""Dead letters that an operator leaves where they are while a nemesis takes the store's room."""
ASKED_ABOUT = 1_000


class Havoc(Protocol):
    """What goes wrong in a run; afterwards a daemon serves."""

    @property
    def problems(self) -> list[str]: ...

    @property
    def missed(self) -> list[str]:
        """What should have happened at least once and did not."""
        ...

    async def run(self) -> None: ...

    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is like. ``kills`` counts kills of the daemon, or faults of its store."""

    kills: int
    seed: int
    store: str = "sqlite"
    """``sqlite``, ``redis`` or ``postgresql`` (a server of the run's own), ``sentinel`` or
    ``cluster`` (a group of them), or a store URL."""
    faults: bool = False
    """Redis goes wrong too."""
    daemons: int = 1
    processes: int = 1
    """Number of shards of ``serve --processes``, on SQLite."""
    nodes: int = 0
    """On one Redis, which have ``shards`` together; ``kills`` counts what is done to them: see
    ``nodes_run``."""
    shards: int = 1
    gap_killed_s: float = GAP_KILLED_S
    """Of nodes: a shard of one that was killed delivers again before that;"""
    gap_drained_s: float = GAP_DRAINED_S
    """and one that is handed over, before that."""
    judge_gaps: bool = False
    """Whether that is a promise of this run: a busy machine is slow by itself."""
    driver: str = "redis"
    mirror: bool = True
    """Whether the daemon keeps all records of Redis in memory."""
    every_place: bool = True
    """Each failpoint has to kill once."""
    hold_s_max: float = 6.0
    """How long a fault lasts at most."""
    without: frozenset[str] = frozenset()
    """Faults that are left out."""
    nemeses: frozenset[str] = frozenset((KILLS,))
    """Each does ``kills`` things."""
    http: bool = False
    """Half of the clients go over HTTP; with one daemon."""
    watch_s: float = 20.0
    """How long the nemesis *watch* watches."""

    def __post_init__(self) -> None:
        unknown = self.nemeses - set(NEMESES)
        if unknown:
            raise ValueError(f"no nemesis is called {', '.join(sorted(unknown))}: {NEMESES}")
        beside = self.nemeses - {WATCH, GROUPS_}
        if WATCH in self.nemeses and (beside or self.daemons > 1 or self.faults):
            raise ValueError("watch goes with groups only: it judges a life that nothing disturbs")
        alone = self.nemeses == {KILLS} and self.daemons == 1 and not self.http
        if self.processes > 1 and not (alone and self.store == "sqlite"):
            raise ValueError("processes go with kills alone, on sqlite")
        if not self.mirror and self.store not in REDIS:
            raise ValueError(f"mirror=no needs a store of {', '.join(REDIS)}")
        if self.nodes and not (alone and self.store in ("redis", "cluster")):
            raise ValueError("nodes go with kills alone, on redis or cluster")

    @property
    def kills_daemons(self) -> bool:
        return KILLS in self.nemeses or self.daemons > 1 or self.faults


Victim = Killer | Failover | RedisFaults | ShardKiller | NodeFaults


class Together:
    """The nemeses of a run, all at once; each has its own random numbers.

    While nobody is to kill the daemon it must not end: a guard looks all the time.
    """

    def __init__(self, victim: Victim, *, killed: bool) -> None:
        self.victim = victim
        self.others: list[Any] = []
        self._killed = killed
        self._at_work = asyncio.Lock()

    @property
    def problems(self) -> list[str]:
        return [text for part in self._parts for text in part.problems]

    @property
    def missed(self) -> list[str]:
        return [text for part in self._parts for text in part.missed]

    @property
    def _parts(self) -> list[Any]:
        return [self.victim, *self.others]

    def text(self) -> str:
        return "\n".join(part.text() for part in self._parts)

    async def run(self) -> None:
        guard = None if self._killed else asyncio.create_task(self._guard())
        async with asyncio.TaskGroup() as group:
            for part in self.others:
                group.create_task(part.run())
            if self._killed:
                group.create_task(self.victim.run())
        if guard is not None:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)
            await self.victim.look("while nothing killed it")
            await self.victim.run()

    async def restart(self, daemon: Daemon) -> None:
        """In order; for those who need a start while nobody kills."""
        assert not isinstance(self.victim, ShardKiller | NodeFaults), "its parent starts them"
        async with self._at_work:
            await daemon.aterminate()
            await self.victim.start()

    async def _guard(self) -> None:
        while True:
            async with self._at_work:
                await self.victim.look("while nothing killed it")
            await rest(GUARD_S)


class Run:
    """One run; ``verdict`` and ``problems`` after ``go``."""

    workloads: ClassVar[tuple[type[Workload], ...]] = (Keyed, Recurring, Transacting, Ordering)

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.plan = Plan(
            options.seed,
            large=options.store in REDIS and not options.nodes,
            shards=max(options.processes, options.shards),
        )
        self.plan.may_break = WATCH not in options.nemeses
        self.plan.may_be_full = RESOURCES in options.nemeses
        self._operator = self.plan.journal("operator")
        self.redis: Rig | None = None
        self._folder = folder
        self._disk: resources.SmallDisk | None = None
        self._nets: list[Net] = []
        self._store_net: Net | None = None
        self._frozen = Frozen(self.plan, "work", "default")
        self._fair: list[FairConsumer] = []
        self._workloads: list[Workload] = []
        if not options.nemeses & {CLOCK, WATCH}:
            # Where time goes its way: a day that is jumped over is half a million occurrences, and
            # far tasks must not come due. And what these do on purpose is a disturbance.
            self._workloads = [kind(self.plan) for kind in self.workloads]
        self.daemons = self._make_daemons()
        self._groups: GroupFaults | None = None
        self._resources: ResourceFaults | None = None
        self._network: NetworkFaults | None = None
        victim = self._make_victim(self.redis)
        self.havoc = Together(victim, killed=options.kills_daemons)
        self.verdict = Verdict()
        self.problems: list[str] = []

    def _has(self, nemesis: str) -> bool:
        return nemesis in self.options.nemeses

    async def go(self) -> None:
        try:
            if self.redis is not None:
                await self.redis.start()
            await self._start_nets()
            await self._go()
        finally:
            self.problems += self.havoc.problems  # often why a client failed
            self._frozen.kill()
            for load in self._workloads:
                load.caller.close()
            if self.plan.operator is not None:
                await self.plan.operator.close(0)
            if self._groups is not None:
                self._groups.kill()
            for daemon in self.daemons:
                await daemon.akill()
            for net in (*self._nets, *([self._store_net] if self._store_net else [])):
                await net.stop()
            if self.redis is not None:
                await self.redis.stop()
            if self._disk is not None:
                self._disk.remove()
        self.verdict = check(
            self.plan.journals,
            GROUPS,
            once={ONCE},
            clocks=self.plan.clocks,
            unbroken=self._has(WATCH),
        )
        self.problems += self.havoc.missed
        self.problems += [text for load in self._workloads for text in load.problems()]
        self._look_at_logs()
        if not (self.verdict.tasks and self.verdict.duplicates and self.verdict.resent):
            self.problems.append(f"the run shows nothing: {self.verdict.text()}")

    # --- the beginning -----------------------------------------------------------------------

    def _make_daemons(self) -> list[Daemon]:
        options, folder = self.options, self._folder
        store, settings, env = options.store, dict(SETTINGS), {}
        query = f"{SQLITE}&endings_max={ENDINGS_MAX}"
        if store in REDIS:
            keep = f"keep_ms={KEEP_MS}" if options.mirror else f"mirror=no&keep_ms={KEEP_ALL_MS}"
            query = f"driver={options.driver}&{keep}&endings_max={ENDINGS_MAX}"
        if store == POSTGRESQL:
            query = f"part_rows=200&call_ms=2000&endings_max={ENDINGS_MAX}"
            self.redis = PostgresRig(folder, query, proxied=options.faults)
        elif store == "redis":
            self.redis = RedisRig(folder, query, proxied=options.faults)
        elif store in MOVING:
            self.redis = moving_rig(store, folder, query)
        elif store == "sqlite" and self._has(RESOURCES):
            self._disk = resources.disk_at(folder / "disk")
            query = query.replace("&reserve_bytes=0", "")
            store, env = f"sqlite:///{folder / 'disk' / 'store.db'}?{query}", self._disk.env
        elif store == "sqlite":
            name = "shards/" if options.processes > 1 else "store.db"
            store = f"sqlite:///{folder}/{name}?{query}"
        if self._has(RESOURCES):
            settings |= resources.SETTINGS
        if options.http:
            # A stream says so often that it is there.
            settings |= {"heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 30.0}
        for load in self._workloads:
            settings |= load.settings
        settings |= {"leader_ttl_s": LEADER_TTL_S, "endings_max": ENDINGS_MAX}
        return [
            self._make_daemon(number, {"store": store, **settings}, env)
            for number in range(options.daemons)
        ]

    def _make_daemon(self, number: int, how: dict[str, Any], env: dict[str, str]) -> Daemon:
        folder = self._folder / f"daemon-{number}"
        if self.options.processes > 1:
            count = self.options.processes
            listen = f"tcp://127.0.0.1:{free_ports(count)}"
            how["args"] = ("--processes", str(count), "--listen", listen)
        if not self._has(CLOCK):
            return Daemon(folder, env=env, http=self.options.http, **how)
        daemon = Clocked(folder, self.plan.clocks, number, **how)
        daemon.env |= env
        return daemon

    async def _start_nets(self) -> None:
        """Between the daemons and Redis; the other ones need to know the daemons' ports."""
        redis = self.redis
        if redis is None:
            return
        url = redis.url
        if (
            isinstance(redis, RedisRig | PostgresRig)
            and self._has(NETWORK)
            and not self.options.faults
        ):
            rnd = self.plan.rnd("network/store")
            self._store_net = await Net(rnd, redis.server.port).start()
            url = url.replace(f":{redis.server.port}", f":{self._store_net.port}")
        for daemon in self.daemons:
            daemon.store = url

    def _make_victim(self, redis: Rig | None) -> Victim:
        options, plan = self.options, self.plan
        killed = KILLS in options.nemeses or options.daemons > 1
        kills = options.kills if killed and not options.faults else 0
        common = (plan, kills, self._disturbed)
        every = options.every_place and killed
        if {NETWORK, RESOURCES} & options.nemeses:
            plan.answer_timeout_s = FAULTS_ANSWER_TIMEOUT_S
        if options.processes > 1:
            return ShardKiller(self.daemons[0], plan, kills)
        victim: Killer | Failover
        if options.daemons > 1:
            # One that is frozen until the other has taken over answers when it goes on.
            plan.answer_timeout_s = FAULTS_ANSWER_TIMEOUT_S
            victim = Failover(self.daemons, *common, ttl_s=LEADER_TTL_S, every_place=every)
        else:
            victim = Killer(self.daemons[0], *common, every_place=every)
        if redis is None or not options.faults:
            return victim
        plan.answer_timeout_s = FAULTS_ANSWER_TIMEOUT_S
        return RedisFaults(
            redis,
            victim,
            plan,
            options.kills,
            hold_s_max=options.hold_s_max,
            without=options.without if options.mirror else options.without | {WIPE},
        )

    def _disturbed(self) -> int:
        """Odd while something is done to what a start needs."""
        counts = [part.disturbed for part in (self.redis, self._network, self._resources) if part]
        return 2 * sum((count + 1) // 2 for count in counts) + any(count % 2 for count in counts)

    async def _make_nemeses(self) -> None:
        """Each has what it needs: the daemons serve, and no client is there yet."""
        options, plan, others = self.options, self.plan, self.havoc.others
        killed = options.kills_daemons
        if self._has(GROUPS_):
            self._groups = GroupFaults(plan, options.kills, late_frames=self._has(NETWORK))
            await self._groups.begin()
            others.append(self._groups)
        if self._has(CLOCK):
            restart = None if killed else self.havoc.restart
            daemons = [daemon for daemon in self.daemons if isinstance(daemon, Clocked)]
            others.append(ClockFaults(daemons, plan, options.kills, restart))
        if self._has(NETWORK):
            stores = [self._store_net] if self._store_net else []
            nets = [*self._nets, *stores]
            self._network = NetworkFaults(
                nets, stores, self._frozen, plan, options.kills, options.hold_s_max
            )
            others.append(self._network)
            await self._frozen.start()
        if self._has(RESOURCES):
            self._resources = ResourceFaults(
                self.daemons,
                plan,
                options.kills,
                disk=self._disk,
                killed=killed,
                bounded=self.redis is None,
            )
            others.append(self._resources)

    async def _begin(self) -> None:
        """The daemons serve, and clients know where."""
        for daemon in self.daemons:
            await daemon.astart()
        self.plan.ports = [daemon.port for daemon in self.daemons]
        if self.options.processes > 1:
            first = self.daemons[0].port
            self.plan.ports = list(range(first, first + self.options.processes))
            self.plan.operator = Client(self.plan.url, send_timeout=1.0, name="operator")
        if self.options.http:
            self.plan.http_port = int(self.daemons[0].http.rsplit(":", 1)[1])
        if self._has(NETWORK):
            for daemon in self.daemons:
                rnd = self.plan.rnd(f"network/{daemon.port}")
                self._nets.append(await Net(rnd, daemon.port).start())
            self.plan.ports = [net.port for net in self._nets]

    async def _go(self) -> None:
        await self._begin()
        await self._make_groups()
        await self._make_nemeses()
        async with asyncio.TaskGroup() as everybody:
            producers = [everybody.create_task(p.run()) for p in self._producers()]
            for consumer in self._consumers():
                everybody.create_task(consumer.run())
            everybody.create_task(self._govern())
            if self._has(WATCH):
                self.havoc.others.append(Watch(self.plan, self._fair, self.options.watch_s))
            await self.havoc.run()
            watching = everybody.create_task(self._fail_without_daemons())
            await self._shown()
            self.plan.producing = False
            await self._settled(producers)
            self.plan.misbehaving = False
            await self._drain()
            await self._look_up()
            for load in self._workloads:
                await load.look()
            self.plan.consumed.set()
            if self._groups is not None:
                await self._groups.end()
            if self._has(NETWORK):
                await self._frozen.end()
            watching.cancel()
        await self._look_at_what_is_left()

    async def _fail_without_daemons(self) -> None:
        """Raise AssertionError when all daemons have ended by themselves after the last kill. Their
        clients would wait for them for ever."""
        seen_s = time.monotonic()
        while time.monotonic() < seen_s + ENDED_S:
            if any(daemon.alive for daemon in self.daemons):
                seen_s = time.monotonic()
            await rest(LOOK_S)
        raise AssertionError(f"all daemons ended: {self.daemons[0].log_text()[-LOG_SHOWN:]}")

    async def _shown(self) -> None:
        """On a busy machine little may have come between two kills: there is time now."""
        enough_s = time.monotonic() + SHOWN_WITHIN_S
        while time.monotonic() < enough_s and not all(
            workload.shows_enough for workload in self._workloads
        ):
            await rest(LOOK_S)

    def _producers(self) -> list[Any]:
        plan = self.plan
        rough: list[Any] = [RoughProducer(plan, f"rough-producer-{i}", i) for i in range(3)]
        if self.options.http:
            rough[1:] = [HttpProducer(plan, f"http-producer-{i}") for i in range(2)]
        return [*rough, FairProducer(plan, "fair-producer"), *self._workloads]

    def _consumers(self) -> list[Any]:
        plan = self.plan
        self._fair = [
            FairConsumer(plan, f"fair-{topic}-{group}", topic, group)
            for topic, groups in GROUPS.items()
            if topic not in ("rough", ONCE)
            for group in groups
        ]
        return [
            *self._fair,
            *(self._over_http() if self.options.http else ()),
            *(
                consumer
                for shard in range(plan.shards)
                for consumer in self._rough_consumers(shard)
            ),
            *(consumer for load in self._workloads for consumer in load.consumers),
        ]

    def _rough_consumers(self, shard: int) -> list[Any]:
        """They speak to one daemon each."""
        plan = self.plan
        return [
            RoughConsumer(plan, "rough-work", "work", "default", shard=shard),
            RoughConsumer(plan, "rough-billing", "shared", "billing", shard=shard),
            RoughConsumer(plan, "rough-1", "rough", "default", shard=shard),
            RoughConsumer(plan, "rough-2", "rough", "default", shard=shard),
            RoughConsumer(plan, "rough-brief", BRIEF, "default", None, ("expired",), shard),
            RoughPuller(plan, "puller-rough", "rough", "default", shard=shard),
            RoughPuller(plan, "puller-audit", "shared", "audit", shard=shard),
            OnceConsumer(plan, "once-1", ONCE, "default", shard=shard),
            OnceConsumer(plan, "once-2", ONCE, "default", shard=shard),
            Listener(plan, "listener", "shared", shard),
        ]

    def _over_http(self) -> list[Any]:
        plan = self.plan
        return [
            HttpConsumer(plan, "http-rough", "rough", "default"),
            HttpConsumer(plan, "http-audit", "shared", "audit"),
            HttpConsumer(plan, "http-brief", BRIEF, "default"),
            HttpStreamer(plan, "http-work", "work", "default"),
            HttpStreamer(plan, "http-billing", "shared", "billing"),
        ]

    async def _govern(self) -> None:
        """Producers wait while consumers are behind."""
        caller = Caller(self.plan)
        while self.plan.producing:
            stats = (await caller.ask(FrameType.STATS))[2]
            self.plan.crowded = stats["ready"] + stats["in_flight"] > CROWDED_MAX
            if self.plan.may_be_full and stats["dead"] > DEAD_MAX:
                await self._requeue(caller)
            await rest(GUARD_S)
        caller.close()

    async def _settled(self, producers: Iterable[asyncio.Task[None]]) -> None:
        """Until all requests are answered for good. Nobody is told "no room" for ever."""
        caller, deadline = Caller(self.plan), time.monotonic() + SETTLED_S
        while left := (await asyncio.wait(producers, timeout=LOOK_S))[1]:
            if time.monotonic() > deadline:
                raise AssertionError(f"not settled within {SETTLED_S} s: {left}")
            if self.plan.may_be_full:
                await self._requeue(caller)
        caller.close()

    async def _make_groups(self) -> None:
        """Before the first task, so that all of them are owed every task."""
        caller = Caller(self.plan)
        pairs = [(topic, group) for topic, groups in GROUPS.items() for group in groups]
        for number, (topic, group) in enumerate(pairs):
            await caller.get(FrameType.SUBSCRIBE, number, topic, group, 0, {})
        caller.close()
        for load in self._workloads:
            await load.begin()
            load.caller.close()

    # --- the end ---------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Until the daemon says that nothing is left; dead letters are brought back. Who leads may
        change meanwhile: a standby takes over from one that a busy machine was slow to run."""
        least = sys.maxsize
        deadline = stuck = time.monotonic() + DRAIN_ALL_S
        caller = Caller(self.plan)
        while True:
            if self._groups is not None:
                await self._groups.sweep()
            if self._resources is not None:
                await self._resources.sweep()
            counts = await self._counts(caller)
            if not any(counts.values()):
                return caller.close()
            if sum(counts.values()) < least:
                least, stuck = sum(counts.values()), time.monotonic() + DRAIN_TIMEOUT_S
            if time.monotonic() > min(deadline, stuck):
                self.problems.append(f"still there, no less for {DRAIN_TIMEOUT_S} s: {counts}")
                await self._tell_what_is_left(caller)
                return caller.close()
            if counts["dead"]:
                await self._requeue(caller)
            await rest(LOOK_S)

    async def _tell_what_is_left(self, caller: Caller) -> None:
        """Of some tasks where they stand, twice, with what their consumers were told last; and who
        is connected."""
        for _ in range(2):
            listed = (await caller.ask(FrameType.LIST, {"limit": LEFT_SHOWN}))[2]["tasks"]
            for task in listed:
                shown = {name: task.get(name) for name in ("id", "topic", "state", "groups")}
                self.problems.append(f"left: {shown}")
            await rest(2 * DRAIN_LEASE_MS / 1_000)
        ids = {task["id"] for task in listed}
        for journal in self.plan.journals:
            came = [item for item in journal.delivered if item.id in ids][-LEFT_SHOWN:]
            self.problems += [f"left: {journal.client} got {item}" for item in came]
            told = [(word, receipt) for receipt, word in journal.vain if receipt.id in ids]
            self.problems += [
                f"left: {journal.client} was told {item}" for item in told[-LEFT_SHOWN:]
            ]
        consumers = (await caller.ask(FrameType.CONSUMER_LIST, {}))[2]["consumers"]
        self.problems += [f"connected: {consumer}" for consumer in consumers]

    async def _requeue(self, caller: Caller) -> None:
        """Dead letters come back; their bodies take the room that producers need."""
        listed = await caller.ask(FrameType.DEAD_LIST, {"limit": 1000})
        if listed[0] != FrameType.OK:
            return
        letters = [(letter["id"], letter["group"]) for letter in listed[2]["dead"]]
        if not letters:
            return
        self._operator.requeued += [Requeued(i, group, now_ms()) for i, group in letters]
        answer = await caller.ask(FrameType.DEAD_REQUEUE, letters)
        if answer[0] != FrameType.OK:
            return
        over = [one for one, word in zip(letters, answer[2], strict=True) if word == "ttl_over"]
        if over:
            await caller.ask(FrameType.DEAD_REQUEUE, over, {"ttl_ms": TTL_AGAIN_MS})

    async def _look_up(self) -> None:
        """How those ended that need no ack."""
        journal = self.plan.journal("looking up")
        topics = (BRIEF, ONCE, *groups.TOPICS)
        accepted = [a for j in self.plan.journals for a in j.accepted if a.topic in topics]
        ids = sorted({task_id for a in accepted for task_id in a.ids})
        caller = Caller(self.plan)
        for at in range(0, len(ids), ASKED_ABOUT):
            frame = await caller.ask(FrameType.LOOKUP, ids[at : at + ASKED_ABOUT])
            assert frame[0] == FrameType.OK, frame
            journal.looked += [Looked(task["id"], task["state"], now_ms()) for task in frame[2]]
        caller.close()

    async def _counts(self, caller: Caller) -> dict[str, int]:
        result = (await caller.ask(FrameType.STATS))[2]
        if result["early"]:
            self.problems.append(f"the daemon held back {result['early']} early deliveries")
        return {name: result[name] for name in COUNTS}

    async def _look_at_what_is_left(self) -> None:
        """Still nothing after everything was settled, after a stop, and in the file itself."""
        caller = Caller(self.plan)
        counts = await self._counts(caller)
        caller.close()
        if any(counts.values()):
            self.problems.append(f"left in the daemon at the end: {counts}")
        for daemon in self.daemons:
            if (code := await daemon.aterminate()) != 0:
                self.problems.append(f"SIGTERM at the end: exit code {code}")
        if self.redis is not None:
            self.problems += [f"left in the store: {name}" for name in await self.redis.left()]
        if isinstance(self.redis, RedisRig) and not self.options.mirror:
            rnd = self.plan.rnd("emptied")
            self.problems += await emptied(self.daemons[0], self.redis, rnd, self._folder)
        store = self.daemons[0].store
        if not store.startswith("sqlite:"):
            return
        folder = shard_folder(store)
        stores = [store] if folder is None else map(folder.url, range(self.plan.shards))
        for store in stores:
            result = audit.check(store)
            self.problems += [f"audit: {problem}" for problem in result.problems]
            if result.tasks or result.progress or result.dead:
                self.problems.append(f"left in the store: {result}")

    def _look_at_logs(self) -> None:
        text = self.log_text()
        if "Traceback" in text:
            self.problems.append("there is a traceback in the daemon's log")
        happened, lines = self._happened(), text.count("\n")
        if lines > happened * LINES_MAX:
            self.problems.append(f"{lines} lines of log about {happened} starts and faults")

    def _happened(self) -> int:
        """Starts and faults that the log may speak of."""
        happened: int = sum(daemon.starts for daemon in self.daemons) + self._disturbed() // 2
        happened += sum(part.done.total() for part in self.havoc.others if hasattr(part, "done"))
        if isinstance(self.havoc.victim, ShardKiller):
            happened += self.havoc.victim.done.total()
        return happened

    def log_text(self) -> str:
        """What the daemons wrote."""
        return "\n".join(daemon.log_text() for daemon in self.daemons)

    def report(self) -> str:
        lines = [
            f"seed {self.plan.seed}: {self.havoc.text()}",
            *(f"PROBLEM {problem}" for problem in self.problems),
            self.verdict.text(),
            *(load.text() for load in self._workloads),
        ]
        return "\n".join([*lines, "torture: " + ("all promises held" if self.good else "FAILED")])

    @property
    def good(self) -> bool:
        return not self.problems and not self.verdict.violations
