"""``Once``: work that belongs to a key is done once, although its task may be delivered twice.

    once = Once()                                     # within this process
    once = Once("redis://127.0.0.1:6379/0")           # among all that use this Redis

    async with once.claim(delivery) as first:
        if first:
            ...                                       # done when the body ends without exception

``first`` is False when the key was done within the last ``ttl`` seconds. A body that raises or is
cancelled gives its claim back. **A second claim of a key that is being worked on waits** until the
first one has ended, and then is told: it is not done before it is done, so a delivery that is
acked because of ``first == False`` can never lose work. After ``wait`` seconds it gives up with
``Conflict`` (in a handler: a nack, and the task comes again).

In Redis a claim lasts ``claim`` seconds and is renewed while the body runs, so that after a crash
the next attempt gets in once that time is over. What this cannot do: when the body ended and Redis
cannot be told, ``Unreachable`` is raised and the next attempt works again. Work and mark are two
steps; who needs them to be one writes the key in the same transaction as the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from tickwheel.client.delivery import Delivery
from tickwheel.client.marks import Marks, MemoryMarks
from tickwheel.client.times import Duration, duration_ms, shown
from tickwheel.errors import BadRequest, Conflict

SIZE = 100_000
TTL_S = 86_400.0
CLAIM_S = 30.0
WAIT_S = 60.0
KEY_CHARACTERS_MAX = 1024
_SCHEMES = ("redis://", "rediss://", "unix://")


class Once:
    """Which keys are done. May be made before there is an event loop; ``close`` at the end.

    ``size``: keys that are remembered in process, the oldest are forgotten first (Redis forgets
    by ``ttl`` alone). ``namespace`` stands before every key: two groups that do different work
    for the same key must not share one (``claim(delivery)`` puts topic and group before the key).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        size: int = SIZE,
        ttl: Duration = TTL_S,
        claim: Duration = CLAIM_S,
        wait: Duration = WAIT_S,
        namespace: str = "tickwheel:once",
    ) -> None:
        if type(size) is not int or size < 1:
            raise BadRequest(f"size must be an integer of 1 or more, not {shown(size)}")
        self._wait_s = duration_ms(wait, "wait") / 1000
        self._namespace = namespace
        ttl_ms, claim_ms = _positive_ms(ttl, "ttl"), _positive_ms(claim, "claim")
        self._marks: Marks
        if url is None:
            self._marks = MemoryMarks(size, ttl_ms)
        elif url.startswith(_SCHEMES):
            from tickwheel.client.redis_marks import RedisMarks

            self._marks = RedisMarks(url, ttl_ms, claim_ms)
        else:
            raise BadRequest(f"url must be redis://HOST:PORT/DB, not {shown(url)}")

    def claim(self, key: str | Delivery) -> AbstractAsyncContextManager[bool]:
        """``async with`` it: True when the work is this caller's to do.

        ``key``: a string, or a delivery; that stands for its topic, group, and key, or for lack
        of a key its id. Raises Conflict when another one works on it for too long, Unreachable
        when the marks cannot be read or written.
        """
        return self._claim(f"{self._namespace}:{_text(key)}")

    @asynccontextmanager
    async def _claim(self, key: str) -> AsyncIterator[bool]:
        try:
            async with asyncio.timeout(self._wait_s) as limit:
                claim = await self._marks.claim(key)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Conflict(
                f"key {key!r} has been worked on elsewhere for {self._wait_s:g} s (wait)"
            ) from None
        if claim is None:
            yield False
            return
        try:
            yield True
        except BaseException:
            await self._marks.give_back(claim)
            raise
        await self._marks.done(claim)

    async def is_done(self, key: str | Delivery) -> bool:
        """Whether the key is done; it may be being worked on."""
        return await self._marks.is_done(f"{self._namespace}:{_text(key)}")

    async def forget(self, key: str | Delivery) -> None:
        """As if the key had never been done."""
        await self._marks.forget(f"{self._namespace}:{_text(key)}")

    async def close(self) -> None:
        """Close connections. Harmless twice."""
        await self._marks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _text(key: Any) -> str:
    if isinstance(key, Delivery):
        return f"{key.topic}/{key.group}/{key.key or f'#{key.id}'}"
    if not isinstance(key, str) or not key or len(key) > KEY_CHARACTERS_MAX:
        raise BadRequest(
            f"key must be a delivery or a string of 1 to {KEY_CHARACTERS_MAX} characters,"
            f" not {shown(key)}"
        )
    return key


def _positive_ms(value: Any, field: str) -> int:
    found_ms = duration_ms(value, field)
    if found_ms <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return found_ms
