"""A torture run over nodes that share a Redis: see ``nodes`` for what is done to them.

    python -m tests.crash.torture --nodes 4 --shards 16 --faults 100

Clients and judges are those of the other runs, each shard with its own epochs. Beside them each
shard has a schedule that fires ten times a second, and a consumer that does nothing else than take
what comes: so it is known when a shard was silent, and for how long.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

from crash.fair_clients import FairConsumer
from crash.keyed import Keyed
from crash.nodes import (
    FOUND_S_MAX,
    HANDED_S_MAX,
    LAPSE,
    LAPSED_S_MAX,
    QUIET,
    SHUT,
    TTL_S,
    Node,
    NodeFaults,
    NodesCluster,
    NodesRedis,
)
from crash.ordered import Ordering
from crash.plan import BRIEF, ONCE, SETTINGS, Plan
from crash.recurring import Asked, Occurred, Recurring
from crash.rough_consumers import Listener, OnceConsumer, RoughConsumer, RoughPuller
from crash.silences import (
    AGAIN,
    BACK,
    PATIENCE_S_MAX,
    Beat,
    Bound,
    Silence,
    Window,
    judge,
    of_fault,
    verdicts,
)
from crash.torture_run import (
    ENDINGS_MAX,
    FAULTS_ANSWER_TIMEOUT_S,
    Run,
    Victim,
)
from crash.transacting import Transacting
from crash.walls import Doors, Wall
from crash.workload import Workload
from support.daemon import Daemon
from tickwheel.client import Client, Delivery
from tickwheel.model.kinds import NAME_PROPERTY, PLANNED_PROPERTY

TOPIC, GROUP = "beats", "default"
EVERY_MS = 100
KILLED = ("kill",)
DRAINED = ("drain", "move", "stop", BACK)
"""Faults that hand shards over, and the move back."""
MOST = ((QUIET, HANDED_S_MAX), (LAPSE, LAPSED_S_MAX), (SHUT, FOUND_S_MAX))
"""How long a silence may be, in seconds, whether or not gaps are judged."""
REDIS_LATER = "redis://127.0.0.1"
"""Until the servers have begun: then their address is known."""


class Beats(Recurring):
    """A schedule for each shard, and when its tasks came."""

    what = "beats"
    topic = TOPIC

    def __init__(self, plan: Plan) -> None:
        self.asked = [_beat(plan, shard) for shard in range(plan.shards)]
        super().__init__(plan)
        self._listener = _Listener(plan, "beats", TOPIC, GROUP)
        self.consumers = [self._listener]

    @property
    def _occurred(self) -> list[Occurred]:
        return self._listener.occurred

    def text(self) -> str:
        return f"beats of {len(self.lives)} shards, {len(self._occurred)}"

    def by_shard(self) -> dict[int, list[Beat]]:
        """Return deliveries by shard, timed by the daemons' clocks."""
        return self._listener.by_shard()


class _Listener(FairConsumer):
    """It takes whatever comes, and waits for nothing."""

    prefetches = (500,)
    waits = 0.0

    def __init__(self, plan: Plan, name: str, topic: str, group: str) -> None:
        super().__init__(plan, name, topic, group)
        self.occurred: list[Occurred] = []

    def _note(self, delivery: Delivery) -> None:
        super()._note(delivery)
        name = str(delivery.properties[NAME_PROPERTY])
        planned_ms = int(delivery.properties[PLANNED_PROPERTY])
        noted = replace(self._journal.delivered[-1], token=f"{name}/{planned_ms}")
        self._journal.delivered[-1] = noted
        self.occurred.append(Occurred(name, planned_ms, delivery.id, delivery.due_ms, noted.order))

    def by_shard(self) -> dict[int, list[Beat]]:
        """What each shard delivered, in order."""
        by_shard: dict[int, list[Beat]] = {shard: [] for shard in range(self._plan.shards)}
        came = set[int]()
        for one in sorted(self._journal.delivered, key=lambda one: one.delivered_ms):
            due_ms = AGAIN if one.id in came else one.due_ms
            came.add(one.id)
            by_shard[self._plan.shard_of_id(one.id)].append(Beat(one.delivered_ms, due_ms))
        return by_shard


def _beat(plan: Plan, shard: int) -> Asked:
    """A schedule whose name belongs to this shard."""
    names = (f"beat-{shard}-{number}" for number in count())
    name = next(name for name in names if plan.shard_of(name) == shard)
    options = {"every_ms": EVERY_MS, "anchor_ms": 0, "catch_up": "all", "catch_up_ms": 86_400_000}
    return Asked(name, EVERY_MS, {"topic": TOPIC, **options})


class NodesRun(Run):
    """One run over nodes."""

    workloads: ClassVar[tuple[type[Workload], ...]] = (
        Keyed,
        Recurring,
        Transacting,
        Ordering,
        Beats,
    )
    havoc_on_nodes: NodeFaults
    rig: NodesCluster | NodesRedis
    _gaps: Sequence[str] = ()
    """Results for the bounds."""

    async def go(self) -> None:
        try:
            await super().go()
        finally:
            await self._wall.stop()
            await self._doors.stop()
        self.problems += self._too_silent()
        judged = judge(self.havoc_on_nodes.timeline, self._beats(), self._bounds())
        self._gaps = list(verdicts(self.havoc_on_nodes.timeline, judged))
        if self.options.judge_gaps and any(item.broken for item in judged):
            self.problems.append("a shard was silent for too long: see the gaps")

    # --- the beginning -------------------------------------------------------------------------

    def _make_daemons(self) -> list[Daemon]:
        options, folder = self.options, self._folder
        query = f"shards={options.shards}&driver={options.driver}&endings_max={ENDINGS_MAX}"
        query += "" if options.mirror else "&mirror=no"
        kind = NodesCluster if options.store == "cluster" else NodesRedis
        self.redis = self.rig = kind(folder, query, options.shards)
        settings: dict[str, Any] = dict(SETTINGS)
        for load in self._workloads:
            settings |= load.settings
        settings |= {"leader_ttl_s": TTL_S, "endings_max": ENDINGS_MAX}
        self._doors = doors = Doors(options.seed, options.shards + 1)
        of_all = REDIS_LATER, options.shards, doors
        return [
            Node(folder / f"node-{number}", f"n{number}", *of_all, **settings)
            for number in range(options.nodes)
        ]

    def _make_victim(self, redis: object) -> Victim:
        self.plan.answer_timeout_s = FAULTS_ANSWER_TIMEOUT_S
        self._wall = Wall(self.rig.servers)
        nodes = [daemon for daemon in self.daemons if isinstance(daemon, Node)]
        self.havoc_on_nodes = NodeFaults(
            nodes, self.rig, self._wall, self._doors, self.plan, self.options.kills
        )
        return self.havoc_on_nodes

    async def _start_nets(self) -> None:
        await super()._start_nets()
        await self._wall.start()
        await self._doors.start()
        self.daemons[-1].store = self._wall.url(self.daemons[-1].store)

    async def _begin(self) -> None:
        for node in self.daemons:
            node.spawn()
        for node in self.daemons:
            await asyncio.to_thread(node.wait_ready)
        self.plan.ports = [node.door for node in self.daemons if isinstance(node, Node)]
        self.plan.homes = {}
        self.plan.operator = Client(self.plan.url, send_timeout=1.0, name="operator")

    def _rough_consumers(self, shard: int) -> list[Any]:
        """What only they consume; and one more, of any manners."""
        plan = self.plan
        more = (
            lambda: RoughConsumer(plan, "rough-work", "work", "default", shard=shard),
            lambda: RoughConsumer(plan, "rough-billing", "shared", "billing", shard=shard),
            lambda: RoughConsumer(plan, "rough-brief", BRIEF, "default", None, ("expired",), shard),
            lambda: RoughPuller(plan, "puller-rough", "rough", "default", shard=shard),
            lambda: RoughPuller(plan, "puller-audit", "shared", "audit", shard=shard),
            lambda: Listener(plan, "listener", "shared", shard),
        )
        return [
            RoughConsumer(plan, "rough-1", "rough", "default", shard=shard),
            OnceConsumer(plan, "once-1", ONCE, "default", shard=shard),
            more[shard % len(more)](),
        ]

    # --- the end -------------------------------------------------------------------------------

    def _happened(self) -> int:
        """Return the number of log lines that a shard can cause."""
        lines = super()._happened() + self.havoc_on_nodes.done.total()
        return lines * max(1, self.options.shards // 2)

    def _bounds(self) -> list[Bound]:
        options = self.options
        return [
            Bound("a killed node", KILLED, options.gap_killed_s),
            Bound("a drained node", DRAINED, options.gap_drained_s),
        ]

    def _beats(self) -> dict[int, list[Beat]]:
        (beats,) = (load for load in self._workloads if isinstance(load, Beats))
        return beats.by_shard()

    def _silences(self) -> dict[str, list[tuple[Silence, Window]]]:
        """By kind of fault: the longest silence of each when nothing else was under way."""
        found, beats, timeline = defaultdict(list), self._beats(), self.havoc_on_nodes.timeline
        for window, next_ms in timeline.ends():
            silences = of_fault(beats, window, next_ms)
            if alone := [silence for silence in silences if not timeline.beside(window, silence)]:
                found[window.kind].append((max(alone), window))
        return found

    def _too_silent(self) -> Iterable[str]:
        """By far: whatever the machine has to do besides."""
        for kind, found in self._silences().items():
            most_s = next((most_s for kinds, most_s in MOST if kind in kinds), math.inf)
            for silence, window in found:
                patience_s = min(PATIENCE_S_MAX, window.patience_s)
                if silence.seconds > most_s + patience_s:
                    yield f"{kind}: {silence} was longer than {most_s:g} s"

    def report(self) -> str:
        shown = []
        for kind, found in sorted(self._silences().items()):
            silences = sorted(silence for silence, _ in found)
            half_s = silences[len(silences) // 2].seconds
            shown.append(f"{kind} {silences[-1]} (half of {len(silences)} below {half_s:.2f} s)")
        silent = "the longest silences of a shard: " + ", ".join(shown)
        return "\n".join([silent, *self._gaps, super().report()])
