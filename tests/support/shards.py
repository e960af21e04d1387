"""Several daemons that are the shards of one store, in this process, and clients of them.

    async with Shards(3) as shards:
        client = shards.client()                # finds all by the address of one
        shards.pass_time(1_000)

With a folder they are those of a SQLite store, which may stop and start, and follow each other.
``Shards(1)`` is a daemon that says nothing of shards. The clock of all stands still.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from tickwheel import Client
from tickwheel.client.connection import Connection
from tickwheel.clock import StandingSources
from tickwheel.inside import InProcessDaemon
from tickwheel.persistence import ShardFolder
from tickwheel.server.settings import Settings
from tickwheel.server.shard.shard import Shard

NOW_MS = 1_800_000_000_000


def key_in(shard: int, count: int, name: str = "k") -> str:
    """Return a key whose tasks belong to shard `shard` of `count`."""
    return next(
        key for key in (f"{name}{n}" for n in range(10_000)) if crc32(key.encode()) % count == shard
    )


class Shards:
    """The daemons of all shards. Connections to those in `away` are refused."""

    def __init__(self, count: int, folder: Path | None = None, **settings: Any) -> None:
        self.count = count
        self.folder = None if folder is None else ShardFolder(f"{folder}/")
        self.sources = StandingSources(NOW_MS)
        self.urls = [f"tcp://shard-{shard}:7355" for shard in range(count)]
        route = ",".join(self.urls) if count > 1 else ""
        self.insides = [
            InProcessDaemon(
                Settings(
                    store="memory:" if self.folder is None else self.folder.url(shard),
                    node=f"n{shard}",
                    shard=shard,
                    route=route,
                    **settings,
                ),
                self.sources,
            )
            for shard in range(count)
        ]
        self.away: set[int] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for inside in self.insides:
            await inside.begin()
            self._stack.push_async_callback(inside.stop)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def client(self, shard: int = 0, **options: Any) -> Client:
        """Return a client that knows the address of one shard."""
        client = Client(self.urls[shard], **options)
        client._options.open_to = self._open_to
        self._stack.push_async_callback(client.close)
        return client

    async def _open_to(self, connection: Connection, address: Any, tls: Any) -> None:
        shard = int(str(address[0]).removeprefix("shard-"))
        if shard in self.away:
            raise ConnectionRefusedError(f"shard {shard} is away")
        await self.insides[shard].connect_client(connection, address, tls)

    def lose(self, shard: int) -> None:
        """Break a shard's connections and refuse new ones."""
        self.away.add(shard)
        for end in self.insides[shard].ends:
            end.abort()

    async def stop(self, shard: int) -> None:
        """Stop the daemon of a shard in order. Connections are refused until it starts again."""
        self.away.add(shard)
        await self.insides[shard].stop()

    async def start(self, shard: int) -> None:
        await self.insides[shard].start()
        self.away.discard(shard)

    def shard(self, number: int) -> Shard:
        """Return a running shard."""
        daemon = self.insides[number].daemon
        assert daemon is not None and daemon.roles.shard is not None
        return daemon.roles.shard

    def pass_time(self, ms: int) -> None:
        self.sources.now_ms += ms
        for number in range(self.count):
            if self.insides[number].daemon is not None:
                self.shard(number).wake()

    async def settle(self) -> None:
        """Wait until daemons and clients have done what is possible at once."""
        for _ in range(50):
            await asyncio.sleep(0)


def alone(client: Client, shard: int) -> Client:
    """Return a client of one shard that uses the link of a client of all shards."""
    assert client._shards is not None
    one = Client()
    one._link = client._shards.opened(client._shards.links[shard])
    return one
