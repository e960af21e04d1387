"""The Redis of a torture run: a real server of its own, and all the ways in which it goes wrong.

Each fault is over, and Redis is well again, when its call returns. Which of them may lose what
Redis had confirmed, and so need a daemon that lives through them, stands in ``LOSSY``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from crash.store_rig import Fault, ServerRig
from support.redis_server import RedisServer
from support.waiting import rest

ALWAYS, EVERYSEC = "always", "everysec"
LOSSY = {
    ALWAYS: frozenset(("wipe",)),
    # A write that waits for a sync under way is answered before the kernel has it.
    EVERYSEC: frozenset(("kill", "truncate", "older", "wipe")),
}
ONLY_EVERYSEC = frozenset(("truncate", "older"))
TAIL_S_MAX = 1.5
"""Maximum age in seconds of truncated writes, as with a real ``everysec``."""
NOBODY = "1"
"""A port at which nobody answers."""
KEYS = ("store", "task", "prepare", "progress", "touched", "dead", "dead_record")
"""Keys of the shard that are absent when no task is pending."""


class RedisRig(ServerRig):
    """See ``faults``."""

    def __init__(self, folder: Path, query: str = "", *, proxied: bool = False) -> None:
        self.server = RedisServer(folder / "redis", appendfsync=ALWAYS)
        super().__init__(query, proxied=proxied)
        self.faults: dict[str, Fault] = {
            "stop": self._stop,
            "kill": self._kill,
            "pause": self._pause,
            "cut": self._cut,
            "full": self._full,
            "readonly": self._readonly,
            "hole": self._hole,
            "truncate": self._truncate,
            "older": self._older,
            "wipe": self._wipe,
        }

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        every = frozenset(self.faults)
        return {ALWAYS: every - ONLY_EVERYSEC, EVERYSEC: every}

    @property
    def lossy(self) -> dict[str, frozenset[str]]:
        return LOSSY

    @property
    def url(self) -> str:
        return self.through_proxy(self.server.url(self._query))

    async def answers(self) -> None:
        await self._call("PING")

    async def sync(self, mode: str) -> None:
        """``appendfsync`` from now on, restarts included."""
        self.server.options["appendfsync"] = mode
        await self._call("CONFIG", "SET", "appendfsync", mode)

    async def left(self) -> list[str]:
        """Keys that should be gone when nothing is pending."""
        names = [f"{{tw:default:0}}:{name}" for name in KEYS]
        return [name for name in names if await self._call("EXISTS", name) != b":0\r\n"]

    async def _call(self, *args: str) -> bytes:
        return await asyncio.to_thread(self.server.call, *args)

    # --- the faults ----------------------------------------------------------------------------

    async def _stop(self, rnd: random.Random, hold_s: float) -> None:
        await asyncio.to_thread(self.server.stop)
        await rest(hold_s / 2)
        await asyncio.to_thread(self.server.start)

    async def _kill(self, rnd: random.Random, hold_s: float) -> None:
        async with self._down():
            await rest(hold_s / 2)

    async def _cut(self, rnd: random.Random, hold_s: float) -> None:
        for _ in range(rnd.randint(2, 8)):
            await self._call("CLIENT", "KILL", "TYPE", "normal")
            await rest(hold_s / 8 * rnd.random())

    async def _full(self, rnd: random.Random, hold_s: float) -> None:
        await self._call("CONFIG", "SET", "maxmemory", "1")
        await rest(hold_s)
        await self._call("CONFIG", "SET", "maxmemory", "0")

    async def _readonly(self, rnd: random.Random, hold_s: float) -> None:
        await self._call("REPLICAOF", "127.0.0.1", NOBODY)
        await rest(hold_s)
        await self._call("REPLICAOF", "NO", "ONE")

    async def _truncate(self, rnd: random.Random, hold_s: float) -> None:
        """The end of its log is gone after a crash."""
        log, kept_bytes = self.server.log_tail(), os.path.getsize(self.server.log_tail())
        await rest(min(hold_s, TAIL_S_MAX))
        async with self._down():
            os.truncate(log, rnd.randint(kept_bytes, os.path.getsize(log)))

    async def _older(self, rnd: random.Random, hold_s: float) -> None:
        """As from a stale replica: what it was some seconds ago."""
        before = await asyncio.to_thread(self.server.snapshot)
        await rest(hold_s)
        await asyncio.to_thread(self.server.restart_from, before)

    async def _wipe(self, rnd: random.Random, hold_s: float) -> None:
        await rest(hold_s / 4)
        await asyncio.to_thread(self.server.restart_from, None)

    @asynccontextmanager
    async def _down(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.server.kill)
        try:
            yield
        finally:
            await asyncio.to_thread(self.server.start)
