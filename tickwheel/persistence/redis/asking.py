"""Asking Redis beside the writer: scripts and commands that only read.

On a line of its own, so that reads do not wait for batches. Every script says what it has to
see at least (incarnation, last confirmed batch); when Redis does not hold that, it is set right
before the read is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from tickwheel.persistence.redis.drivers import REFUSING, Answer, Argument, Away, Lost
from tickwheel.persistence.redis.layout import Keys
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.lua import Script
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.scripts_read import READ
from tickwheel.persistence.redis.writer import Writer
from tickwheel.persistence.store import StoreAway, StoreBroken

TRIES = 3
PAUSE_S = 0.25


class Asker:
    """See the module's text. ``verify`` is called when Redis lacks what it confirmed."""

    def __init__(
        self,
        line: Line,
        keys: Keys,
        options: RedisOptions,
        writer: Writer,
        verify: Callable[[], Awaitable[None]],
    ) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._writer = writer
        self._verify = verify

    async def pairs(
        self, command: str, name: str, count: int
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Fields and values of a hash, or members and scores; one may come twice."""
        cursor = b"0"
        while True:
            key = self._keys.named[name]
            cursor, items = await self.call(command, key, cursor, "COUNT", count)
            for pair in zip(items[::2], items[1::2], strict=True):
                yield pair
            if cursor == b"0":
                return

    async def script(
        self, script: Script, args: Sequence[Argument], *, locked: bool = False
    ) -> tuple[Any, Any]:
        """Both lists of the reply, when Redis holds what was confirmed. ``locked``: the caller
        has the writer's lock."""
        for attempt in range(TRIES):
            if self._writer.unsettled and not locked:
                await self._set_right()
            sees = (self._writer.incarnation, self._writer.last)
            reply = await self._trying(self._line.run, script, self._keys.all, (*sees, *args))
            status = reply[0].decode()
            if status == "ok":
                return reply[1], reply[2]
            if status == "damaged":
                raise StoreBroken(
                    f"{self._options.name}: task {int(reply[1])} has no record in"
                    f" {self._keys.shard}:task"
                )
            if locked or attempt == TRIES - 1:
                break
            await self._set_right()
        raise StoreAway(f"{self._options.name} does not hold what it confirmed ({status})")

    async def look(self, *, locked: bool = False) -> None:
        """Around commands that do not look themselves: what was confirmed is there, and whole."""
        await self.script(READ, (1,), locked=locked)

    async def glance(self) -> None:
        """One short look. Raises Away, Lost, Answer; like ``verify`` when it lacks something."""
        sees = (self._writer.incarnation, self._writer.last, 1)
        reply = await self._line.run(READ, self._keys.all, sees)
        if reply[0] != b"ok":
            await self._verify()

    async def _set_right(self) -> None:
        """Replayed, or StoreBehind, StoreLost, Fenced; StoreAway while it is written anew."""
        try:
            await self._verify()
        except (Away, Lost, Answer) as error:
            raise StoreAway(error.message) from error

    async def call(self, *args: Argument) -> Any:
        return await self._trying(self._line.call, *args)

    async def _trying(self, call: Callable[..., Any], *args: Any) -> Any:
        """Reads change nothing, so a broken connection is tried again a few times."""
        for attempt in range(TRIES):
            try:
                return await call(*args)
            except (Away, Lost, Answer) as error:
                if isinstance(error, Answer) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if attempt == TRIES - 1:
                    raise StoreAway(error.message) from error
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unreachable")
