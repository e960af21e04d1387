"""``Once`` among processes: marks and claims in a Redis.

One key each: ``done``, or ``claim:TOKEN`` while somebody works. Invariants: a claim is taken and
removed by its own token only; a claim that is not renewed ends after ``claim_ms``; what was done is
marked whoever has the claim by then. Knows no Tickwheel daemon; this Redis need not be its store.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from tickwheel.client.connection import LOGGER
from tickwheel.errors import BadRequest, Unreachable

DONE = b"done"
TIMEOUT_S = 5.0
"""Of one call to Redis."""
POLL_S_MIN = 0.02
POLL_S_MAX = 0.5
MARK_TRIES = 4
"""The work is done when it is marked: a short trouble must not make it be done again."""
RENEWALS_PER_CLAIM = 3

# KEYS[1] the key, ARGV[1] our value, ARGV[2] for how long in ms (0: remove it).
_IF_OURS = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class _Claim(NamedTuple):
    key: str
    value: bytes
    renewing: asyncio.Task[None]


class RedisMarks:
    """See ``marks.Marks``."""

    def __init__(self, url: str, ttl_ms: int, claim_ms: int) -> None:
        try:
            # By name: the client's modules import no extra, and linters hold them to it.
            redis = import_module("redis.asyncio")
        except ModuleNotFoundError as error:
            raise BadRequest(
                f"Once({url.partition('://')[0]}://…) needs the package redis:"
                f" pip install 'tickwheel[redis]' (missing: {error.name})"
            ) from None
        self._errors: tuple[type[Exception], ...] = (import_module("redis").RedisError, OSError)
        self._redis: Any = redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        self._if_ours: Any = self._redis.register_script(_IF_OURS)
        self._ttl_ms = ttl_ms
        self._claim_ms = claim_ms

    async def claim(self, key: str) -> _Claim | None:
        value, pause_s = b"claim:" + secrets.token_bytes(12), POLL_S_MIN
        while True:
            if await self._ask(self._redis.set(key, value, nx=True, px=self._claim_ms)):
                renewing = asyncio.get_running_loop().create_task(self._renew(key, value))
                return _Claim(key, value, renewing)
            if await self.is_done(key):
                return None
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(POLL_S_MAX, pause_s * 2)

    async def done(self, claim: _Claim) -> None:
        claim.renewing.cancel()
        for tries in range(MARK_TRIES):
            try:
                await self._ask(self._redis.set(claim.key, DONE, px=self._ttl_ms))
                return
            except Unreachable:
                if tries == MARK_TRIES - 1:
                    raise
                await asyncio.sleep(POLL_S_MIN * 4**tries)

    async def give_back(self, claim: _Claim) -> None:
        claim.renewing.cancel()
        with suppress(Unreachable):
            await self._ask(self._if_ours(keys=[claim.key], args=[claim.value, 0]))

    async def is_done(self, key: str) -> bool:
        return bool(await self._ask(self._redis.get(key)) == DONE)

    async def forget(self, key: str) -> None:
        await self._ask(self._redis.delete(key))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _renew(self, key: str, value: bytes) -> None:
        """While the body runs. When the claim is gone another one may work on it too; the body
        is not ended for that: a second attempt is what its lease allows as well."""
        while True:
            await asyncio.sleep(self._claim_ms / 1000 / RENEWALS_PER_CLAIM)
            try:
                kept = await self._ask(self._if_ours(keys=[key], args=[value, self._claim_ms]))
            except Unreachable as error:
                LOGGER.warning("a claim was not renewed: %s", error)
                continue
            if not kept:
                LOGGER.warning("the claim of %r was lost while it was worked on", key)
                return

    async def _ask(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except self._errors as error:
            raise Unreachable(f"Redis: {error}") from None
