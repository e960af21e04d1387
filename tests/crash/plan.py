"""What all parts of one torture run share: its seed, topics, times, and when it is over."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

from crash.clocks import Clocks
from crash.link import TRY_AGAIN_S, Elsewhere, Link, Lost, Numbers
from crash.records import Journal
from support.waiting import rest
from tickwheel.client import Client
from tickwheel.model.records import ID_STEP

GROUPS = {
    "work": ("default",),
    "shared": ("billing", "audit"),
    "rough": ("default",),
    "brief": ("default",),
    "once": ("default",),
}
"""Topics and the groups that are owed their tasks: those exist before the first enqueue."""
BRIEF = "brief"
"""The topic whose tasks have a ttl."""
ONCE = "once"
"""The topic whose group takes its tasks at most once."""
LEASE_MS = 400
DRAIN_LEASE_MS = 5_000
"""When producers have ended: with leases that end before a busy machine has read their acks,
redeliveries alone keep consumers busy, and nothing is ever worked off."""
SETTINGS = {
    "lease_default_s": 0.4,
    "lease_checkpoint_s": 0.02,
    "reconnect_grace_s": 0.3,
    "retry_base_s": 0.1,
    "retry_cap_s": 0.5,
    "retry_max": 12,
    "resident_horizon_s": 0.5,
    "slots": 4,
    "tick_ms": 100,
    "log_format": "json",
}
"""Of the daemon: short, so that a run sees many of each; a wheel so small that tasks live for
several rotations; rows that are read from the store shortly before they are due."""


@dataclass(slots=True)
class Plan:
    """One run. ``rnd(name)`` gives each actor random numbers of its own, so that the seed
    reproduces its decisions however the others are scheduled."""

    seed: int
    ports: list[int] = field(default_factory=list)
    """Ports of all daemons. One is active, unless they are shards or nodes."""
    homes: dict[int, int] | None = None
    """Last known port of each shard with nodes, whose front doors are `ports`."""
    shards: int = 1
    """How many daemons serve at the same time, each its part of the tasks."""
    operator: Client | None = None
    """The real client of several shards."""
    http_port: int = 0
    """HTTP port of the only daemon; 0 without HTTP clients."""
    answer_timeout_s: float = 10.0
    """A daemon that is silent for longer, on a connection that stands, has failed."""
    large: bool = False
    """Some batches hold thousands of tasks."""
    may_be_full: bool = False
    """Something takes the room that the store has: it may refuse tasks while that lasts."""
    topics: list[str] = field(default_factory=lambda: list(GROUPS))
    """What producers choose from."""
    clocks: Clocks = field(default_factory=Clocks)
    """What the daemons' clocks have shown; clients and checker have the machine's."""
    quiet: bool = False
    """For a while nobody begins anything."""
    crowded: bool = False
    """More is ready than these consumers work off: on a busy machine leases would end before
    their acks are read, and nothing but redeliveries would go on."""
    journals: list[Journal] = field(default_factory=list)
    producing: bool = True
    """Until the last kill; then producers settle what is open and end."""
    may_break: bool = True
    """Clients break connections that carry what is delivered at most once."""
    misbehaving: bool = True
    """Until producers have ended; then consumers work everything off."""
    consumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is pending any more: consumers settle what was not answered and end."""

    @property
    def lease_ms(self) -> int:
        """What consumers ask for."""
        return LEASE_MS if self.misbehaving else DRAIN_LEASE_MS

    @property
    def is_making(self) -> bool:
        """Whether producers begin new requests."""
        return self.producing and not self.quiet and not self.crowded

    async def loud(self) -> None:
        """Wait until the quiet moment is over."""
        while True:
            if not self.quiet:
                return
            await rest(TRY_AGAIN_S)

    def named(self, name: str, shard: int) -> str:
        """The name of a client that there is once for each shard."""
        return name if self.shards == 1 else f"{name}-of-{shard}"

    def rnd(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    @property
    def url(self) -> str:
        return ",".join(f"tcp://127.0.0.1:{port}" for port in self.ports)

    def journal(self, client: str) -> Journal:
        self.journals.append(Journal(client))
        return self.journals[-1]

    def shard_of(self, basis: str) -> int:
        """Where the tasks of a key, an order key or a name belong."""
        return crc32(basis.encode()) % self.shards

    def shard_of_id(self, task_id: int) -> int:
        return task_id % ID_STEP if self.shards > 1 else 0

    async def link(self, numbers: Numbers, shard: int = 0, **options: object) -> Link:
        """Connected, however often that takes: the daemon is killed all the time."""
        while True:
            if self.homes is not None:
                if (link := await self._found(self.homes, shard, numbers, options)) is not None:
                    return link
            else:
                for port in self.ports if self.shards == 1 else self.ports[shard : shard + 1]:
                    with suppress(Lost):
                        return await self.try_link(port, numbers, **options)
            await rest(TRY_AGAIN_S)

    async def _found(
        self, homes: dict[int, int], shard: int, numbers: Numbers, options: dict[str, object]
    ) -> Link | None:
        """One round in search of a shard: where it was last, then the front doors, in any order,
        and where each of these says that it is."""
        waiting = random.sample(self.ports, len(self.ports))  # no decision of the seed's
        waiting.append(homes.get(shard, waiting[-1]))
        asked = set[int]()
        while waiting:
            if (port := waiting.pop()) in asked:
                continue
            asked.add(port)
            try:
                link = await self.try_link(port, numbers, shard=shard, **options)
            except Elsewhere as hint:
                waiting.append(hint.port)
            except Lost:
                if homes.get(shard) == port:
                    del homes[shard]
            else:
                homes[shard] = port
                return link
        return None

    async def try_link(self, port: int, numbers: Numbers, **options: object) -> Link:
        """One try at one daemon. Raises Lost."""
        link = await Link.open(port, numbers, **options)  # type: ignore[arg-type]  # open's own
        link.answer_timeout_s = self.answer_timeout_s
        return link
