"""The Redis of a torture run that moves: a group under Sentinels, or a Cluster, and what is done to
it. Masters die, freeze and are told to give way; connections are cut; a Cluster's slot goes from
node to node with its keys, one by one or at once.

Batches are confirmed when a replica has them, so nothing that was confirmed is lost, whoever is
killed beside; with one exception, which the daemon has to live through: see ``SentinelRig``. Each
fault is over, and all servers are well, when its call returns.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from crash.redis_rig import KEYS
from crash.store_rig import Fault, StoreRig
from support.redis_groups import Cluster, SentinelGroup, ask, slot_of
from support.redis_server import RedisServer
from support.waiting import rest

MOVING = ("sentinel", "cluster")
QUERY = "wait_replicas=1"
TAG = "tw:default:0"
MODE = "replicas"
"""There is one way in which the servers are set: a batch waits for a replica."""


def moving_rig(kind: str, folder: Path, query: str) -> MovingRig:
    """The rig of this kind."""
    return ClusterRig(folder, query) if kind == "cluster" else SentinelRig(folder, query)


class MovingRig(StoreRig):
    """What both kinds have in common."""

    group: SentinelGroup | Cluster

    def __init__(self, query: str) -> None:
        super().__init__()
        self._query = f"{query}&{QUERY}"
        self.faults: dict[str, Fault] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "switch": self._switch,
            "cut": self._cut,
        }

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        return {MODE: frozenset(self.faults)}

    @property
    def lossy(self) -> dict[str, frozenset[str]]:
        return {MODE: frozenset()}

    @property
    def url(self) -> str:
        return self.group.url(self._query)

    async def start(self) -> None:
        await asyncio.to_thread(self.group.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self.group.stop)

    async def sync(self, mode: str) -> None:
        """There is one way only."""

    async def left(self) -> list[str]:
        master = await asyncio.to_thread(self._master)
        names = [f"{{{TAG}}}:{name}" for name in KEYS]
        return [name for name in names if await asyncio.to_thread(ask, master, "EXISTS", name)]

    def _master(self) -> RedisServer:
        raise NotImplementedError

    def _moved_from(self, before: RedisServer) -> RedisServer:
        raise NotImplementedError

    def _give_way(self, rnd: random.Random) -> None:
        raise NotImplementedError

    async def heal(self) -> None:
        await asyncio.to_thread(self.group.heal)

    # --- the faults ----------------------------------------------------------------------------

    async def _kill(self, rnd: random.Random, hold_s: float) -> None:
        """Half of the times it is there again before anybody has noticed, or nearly."""
        master = await asyncio.to_thread(self._master)
        await asyncio.to_thread(master.kill)
        if rnd.random() < 0.75:
            await asyncio.to_thread(self._moved_from, master)
        await rest(hold_s / 4 * rnd.random())

    async def _freeze(self, rnd: random.Random, hold_s: float) -> None:
        """It goes on as if it were the master still, when another one is."""
        master = await asyncio.to_thread(self._master)
        master.pause()
        try:
            await asyncio.to_thread(self._moved_from, master)
            await rest(hold_s / 2 * rnd.random())
        finally:
            master.go_on()

    async def _switch(self, rnd: random.Random, hold_s: float) -> None:
        await asyncio.to_thread(self._give_way, rnd)

    async def _cut(self, rnd: random.Random, hold_s: float) -> None:
        for _ in range(rnd.randint(2, 8)):
            master = await asyncio.to_thread(self._master)
            await asyncio.to_thread(ask, master, "CLIENT", "KILL", "TYPE", "normal")
            await rest(hold_s / 8 * rnd.random())


class SentinelRig(MovingRig):
    """A master, two replicas, three Sentinels.

    When a Sentinel is told to fail over, the former master goes on with the other replica for a
    second: what both have then is lost with them, and only the daemon can write it again.
    """

    def __init__(self, folder: Path, query: str) -> None:
        super().__init__(query)
        self.group: SentinelGroup = SentinelGroup(folder / "group")

    @property
    def lossy(self) -> dict[str, frozenset[str]]:
        return {MODE: frozenset(("switch",))}

    def _master(self) -> RedisServer:
        return self.group.master

    def _moved_from(self, before: RedisServer) -> RedisServer:
        return self.group.moved_from(before)

    def _give_way(self, rnd: random.Random) -> None:
        self.group.switch()


class ClusterRig(MovingRig):
    """Three masters with a replica each, between which the shard's slot also moves."""

    def __init__(self, folder: Path, query: str) -> None:
        super().__init__(query)
        self.group: Cluster = Cluster(folder / "group")
        self._slot = slot_of(TAG)
        self.faults |= {"migrate": self._migrate, "halt": self._halt}

    def _master(self) -> RedisServer:
        owner = self.group.owner_of(self._slot)
        assert owner is not None
        return owner

    def _moved_from(self, before: RedisServer) -> RedisServer:
        return self.group.moved_from(before, self._slot)

    def _give_way(self, rnd: random.Random) -> None:
        self.group.switch(self._slot, rnd.choice(("", "FORCE")))

    def _target(self, rnd: random.Random) -> RedisServer:
        owner = self._master()
        return rnd.choice([node for node in self.group.masters() if node is not owner])

    async def _migrate(self, rnd: random.Random, hold_s: float) -> None:
        """To another master, as ``redis-cli --cluster reshard`` does it."""
        to = await asyncio.to_thread(self._target, rnd)
        await asyncio.to_thread(self.group.migrate, self._slot, to)

    async def _halt(self, rnd: random.Random, hold_s: float) -> None:
        """The same, key by key, and slow: batches are refused meanwhile."""
        to = await asyncio.to_thread(self._target, rnd)
        pause_s = hold_s / 24

        def between(step: str) -> None:
            asyncio.run_coroutine_threadsafe(rest(pause_s * rnd.random()), loop).result()

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.group.migrate, self._slot, to, keys_at_once=1, between=between)
