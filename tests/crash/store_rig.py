"""The store of a torture run, and what torture does to it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

from support.postgresql import PostgresServer
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.waiting import rest

Fault = Callable[[random.Random, float], Awaitable[None]]
"""What goes wrong: random numbers, and how long it lasts at most."""


class StoreRig:
    """Faults by name, each of which is over when its call returns."""

    faults: dict[str, Fault]

    def __init__(self) -> None:
        self.disturbed = 0
        """Odd while a fault is under way."""

    async def suffer(self, name: str, rnd: random.Random, hold_s: float) -> None:
        self.disturbed += 1
        try:
            await self.faults[name](rnd, hold_s)
            await self.heal()
        finally:
            self.disturbed += 1

    async def heal(self) -> None:
        """After each fault."""


class ServerRig(StoreRig):
    """One server with its own port and folder, behind a proxy when ``proxied``."""

    server: PostgresServer | RedisServer

    def __init__(self, query: str, *, proxied: bool) -> None:
        super().__init__()
        self._query = query
        self._proxied = proxied
        self._proxy: Proxy | None = None

    def through_proxy(self, url: str) -> str:
        if self._proxy is None:
            return url
        return url.replace(f":{self.server.port}", f":{self._proxy.port}")

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)
        if self._proxied:
            self._proxy = await Proxy(self.server.port).start()

    async def stop(self) -> None:
        if self._proxy is not None:
            await self._proxy.stop()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        self.server.kill()

    async def answers(self) -> None:
        """Wait for an answer of the server."""
        raise NotImplementedError

    async def _pause(self, rnd: random.Random, hold_s: float) -> None:
        self.server.signal(signal.SIGSTOP)
        await rest(hold_s)
        self.server.signal(signal.SIGCONT)
        await self.answers()

    async def _hole(self, rnd: random.Random, hold_s: float) -> None:
        """Nothing arrives; later, perhaps only on new connections at first, all of it does."""
        assert self._proxy is not None
        self._proxy.hold()
        await rest(hold_s)
        if rnd.random() < 0.5:
            self._proxy.let_new_through()
            await rest(hold_s * rnd.random())
        self._proxy.let_go()
