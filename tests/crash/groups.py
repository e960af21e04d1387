"""Nemesis *groups*: groups made (now, first, since a moment), deleted and made again under load.

Two topics: one with a group that stays, and one whose groups come and go altogether. One actor
for each does one thing after the other, so that the order of its answers is the order in
which it happened; ``crash.owed`` judges by that order what each group must have got.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from crash.link import Link, now_ms
from crash.plan import Plan
from crash.records import GroupLife
from crash.rough_consumers import RoughConsumer, RoughPuller
from crash.workload import TRY_AGAIN_S, Caller
from support.waiting import rest
from tickwheel.api.frames import FrameType

KEPT, FREE = "kept", "free"
KEEPER = "keeper"
TOPICS = (KEPT, FREE)
NAMES = 8
"""Few, so that a name often comes again."""
ALIVE_MAX = 4
STAYS_SHARE = 0.2
"""Share of groups that are never deleted and must get all their tasks."""
STAYS_MAX = 3
"""In a topic: a long run must not use up the names."""
REST_S_MAX = 0.5
QUIET_TRIES = 60
QUIET_MARGIN_S = 1.0
"""Seconds for due tasks that are still being read from the store."""
WORDS = ("gone", "unknown", "deleted", "expired")
"""An ack for a group that was deleted meanwhile."""
KINDS = ("now", "first", "moment", "delete", "delete when quiet", "replace")


@dataclass(slots=True, eq=False)
class _Alive:
    """A group that is there, and its consumers."""

    life: GroupLife
    stays: bool
    paused: bool = False
    until: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class _Topic:
    """The actor of one topic."""

    def __init__(self, plan: Plan, topic: str, *, late_frames: bool) -> None:
        self._plan = plan
        self._topic = topic
        self._rnd = plan.rnd(f"groups/{topic}")
        self._journal = plan.journal(f"groups/{topic}")
        self._late_frames = late_frames
        self._made = 0
        self.caller = Caller(plan)
        self.alive: list[_Alive] = []
        self.done: Counter[str] = Counter()
        self.consumers: list[asyncio.Task[None]] = []
        """Consumers of all lives of the group."""
        self.remade = 0
        """Groups that a late SUBSCRIBE has made."""

    async def begin(self) -> None:
        if self._topic == KEPT:
            await self._create("first", KEEPER, stays=True)

    async def step(self) -> None:
        """One thing; those that did not happen yet first."""
        may_go = [found for found in self.alive if not found.stays]
        kinds = [kind for kind in KINDS if may_go or ("delete" not in kind and kind != "replace")]
        if len(self.alive) >= ALIVE_MAX + self.stays():
            kinds = ["delete", "delete when quiet", "replace"]
        kind = self._rnd.choice([kind for kind in kinds if not self.done[kind]] or kinds)
        if kind in ("now", "first", "moment"):
            await self._create(kind)
        elif kind == "replace":
            # The old one goes while the new one is still given what is there.
            new = await self._create("first")
            await self._delete(self._rnd.choice([f for f in may_go if f is not new]), "delete")
        else:
            await self._delete(self._rnd.choice(may_go), kind)
        self.done[kind] += 1
        await self._unpause()

    def stays(self) -> int:
        return sum(found.stays for found in self.alive)

    async def finish(self) -> None:
        """Somebody is there for what waits, and nobody is paused."""
        while any(found.paused for found in self.alive):
            await self._unpause()
        if not self.alive:
            await self._create("now", stays=True)

    async def sweep(self) -> None:
        """Groups that were made by a SUBSCRIBE that came late go: the network may do that."""
        frame = await self.caller.ask(FrameType.STATS)
        there = frame[2]["topics"].get(self._topic, {}).get("groups", {})
        known = {found.life.group for found in self.alive}
        for name in there.keys() - known:
            self.remade += 1
            if not self._late_frames:
                self._journal.odd.append(f"group {name} of {self._topic} is there again")
            await self.caller.ask(FrameType.GROUP_DELETE, self._topic, name, True)

    # --- making ------------------------------------------------------------------------------

    def _name(self) -> str:
        self._made += 1
        if self._late_frames:
            return f"g-{self._made}"
        taken = {found.life.group for found in self.alive}
        return self._rnd.choice([f"g-{n}" for n in range(NAMES) if f"g-{n}" not in taken])

    async def _create(self, kind: str, name: str = "", *, stays: bool = False) -> _Alive:
        rnd, name = self._rnd, name or self._name()
        since: str | int = now_ms() + rnd.randint(-2_000, 1_500) if kind == "moment" else kind
        paused = rnd.random() < 0.2 and not stays
        options = {"since": since} | ({"paused": True} if paused else {})
        sent, perhaps_ms = Link.order(), 0
        frame = await self.caller.ask(FrameType.GROUP_CREATE, self._topic, name, options)
        if frame[0] != FrameType.OK:
            self._journal.odd.append(f"GROUP_CREATE {name} {options} was answered {frame}")
        elif not frame[2]["created"]:
            if not self.caller.resent:
                self.remade += 1
            # Made by the SUBSCRIBE or by an earlier request, so its start is unknown.
            perhaps_ms, since = (since if isinstance(since, int) else 0), "now"
            fields = (self._topic, name, {"paused": paused})
            await self.caller.ask(FrameType.CONFIGURE, *fields)
        life = GroupLife(self._topic, name, since, sent, Link.order(), now_ms())
        life.perhaps_since_ms = perhaps_ms
        self._journal.groups.append(life)
        may_stay = rnd.random() < STAYS_SHARE and self.stays() < STAYS_MAX
        made = _Alive(life, stays or may_stay, paused)
        self.alive.append(made)
        self._consume(made)
        return made

    def _consume(self, made: _Alive) -> None:
        fields = (self._topic, made.life.group, made.until, WORDS)
        kinds = [RoughConsumer, *([RoughPuller] if self._rnd.random() < 0.3 else [])]
        for kind in kinds:
            consumer = kind(self._plan, f"{kind.__name__}/{self._topic}/{self._made}", *fields)
            made.tasks.append(asyncio.create_task(consumer.run()))
        self.consumers += made.tasks

    async def _unpause(self) -> None:
        for found in self.alive:
            if found.paused:
                fields = (self._topic, found.life.group, {"paused": False})
                await self.caller.ask(FrameType.CONFIGURE, *fields)
                found.paused = False
                return

    # --- deleting ----------------------------------------------------------------------------

    async def _delete(self, found: _Alive, kind: str) -> None:
        life, calm = found.life, kind != "delete"
        if calm and not found.paused and await self._became_quiet(life):
            found.until.set()
            await self._ended(found)
        self.alive.remove(found)
        found.until.set()
        life.deleted = Link.order()
        fields = (self._topic, life.group, True)
        frame = await self.caller.ask(FrameType.GROUP_DELETE, *fields)
        if frame[0] != FrameType.OK and (frame[2] != "not_found" or not self.caller.resent):
            self._journal.odd.append(f"GROUP_DELETE {life.group} was answered {frame}")
        life.deleted_ms = now_ms()
        await self._ended(found)
        await self.sweep()
        if not self._late_frames:
            life.gone = Link.order()

    async def _became_quiet(self, life: GroupLife) -> bool:
        """Whether it held nothing, in a daemon that had everything in memory. Tasks that are due
        but still being read are in no group, and a jump of the clock can make many due at once: so
        the group counts as quiet for what was due a while before."""
        earlier: tuple[int, int, int, float] | None = None
        for _ in range(QUIET_TRIES):
            asked = Link.order()
            status = await self.caller.ask(FrameType.STATUS)
            epoch = self.caller.epoch
            stats = (await self.caller.ask(FrameType.STATS))[2]
            held = stats["topics"].get(self._topic, {}).get("groups", {}).get(life.group)
            if held is None:
                self._journal.odd.append(f"STATS does not know the group of {life}")
                return False
            if status[2]["state"] == "loading" or stats["epoch"] != epoch:
                earlier = None
            elif earlier is None or earlier[0] != epoch:
                earlier = epoch, asked, stats["position_ms"], time.monotonic()
            elif time.monotonic() - earlier[3] >= QUIET_MARGIN_S and not any(
                held[n] for n in ("ready", "in_flight", "waiting", "dead")
            ):
                _, life.quiet, life.quiet_ms, _ = earlier
                return True
            await rest(TRY_AGAIN_S)
        return False

    async def _ended(self, found: _Alive) -> None:
        await asyncio.gather(*found.tasks)


class GroupFaults:
    """``run`` does ``count`` things to groups; those that are left are consumed to the end."""

    def __init__(self, plan: Plan, count: int, *, late_frames: bool) -> None:
        """``late_frames``: the network may bring, much later, what was sent to a group that was
        deleted since. Then each group has a name of its own."""
        self._plan = plan
        self._count = count
        self._rnd = plan.rnd("groups")
        self._topics = [_Topic(plan, topic, late_frames=late_frames) for topic in TOPICS]
        self.problems: list[str] = []

    @property
    def done(self) -> Counter[str]:
        return sum((topic.done for topic in self._topics), Counter())

    @property
    def missed(self) -> list[str]:
        return [f"groups: {kind} never happened" for kind in KINDS if not self.done[kind]]

    def text(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))
        late = sum(topic.remade for topic in self._topics)
        return f"groups {self.done.total()} ({shown}), made by a late SUBSCRIBE {late}"

    async def begin(self) -> None:
        """Before the first task."""
        for topic in self._topics:
            await topic.begin()
        self._plan.topics += TOPICS

    async def run(self) -> None:
        await asyncio.gather(*map(self._act, self._topics))

    async def _act(self, topic: _Topic) -> None:
        for _ in range(self._count // 2):
            await self._plan.loud()
            await topic.step()
            await rest(REST_S_MAX * self._rnd.random())
        for _ in range(2 * len(KINDS)):  # what deletes may have to make a group first
            if any(not topic.done[kind] for kind in KINDS):
                await topic.step()
        await topic.finish()

    async def sweep(self) -> None:
        for topic in self._topics:
            await topic.sweep()

    def kill(self) -> None:
        """Whatever still runs of its consumers."""
        for topic in self._topics:
            for task in topic.consumers:
                task.cancel()

    async def end(self) -> None:
        """When all is consumed."""
        for topic in self._topics:
            for found in topic.alive:
                found.until.set()
            await asyncio.gather(*(task for found in topic.alive for task in found.tasks))
            topic.caller.close()
