"""``Once``: does a task's work once, even if the task is delivered twice.

    once = Once()                                     # within this process
    once = Once("redis://127.0.0.1:6379/0")           # among all users of this Redis

    async with once.claim(delivery) as first:
        if first:
            ...                                       # done when the block ends without exception

The claim of a delivery is identified by the task's id: two tasks have two claims, whatever their
keys. Tasks for the same work share a claim only if the handler names it:
``once.claim(delivery, key=delivery.key)``. An id is unique within one store: daemons that share a
Redis need different ``namespace``s.

``first`` is False if the work was done within the last ``ttl`` seconds. A body that raises or is
cancelled releases its claim. **A second claim of the same key waits** until the first has ended.
Work is marked only after it has ended without an exception, so acking a delivery because of
``first == False`` never loses work. After ``wait`` seconds the second claim raises ``Conflict`` (in
a handler: a nack, and the task is delivered again).

In Redis a claim lasts ``claim`` seconds and is renewed while the body runs, so that after a crash
the next attempt can start once that time is over. There is one limit: if Redis cannot be reached
when the body has ended, ``Unreachable`` is raised and the next attempt repeats the work. Work and
mark are two steps; ``tickwheel.contrib.sqlalchemy.SqlOnce`` combines them in one SQL transaction.

``DedupStore`` keeps the marks, in this process or in Redis: each key is ``done``, or
``claim:TOKEN`` during the work. Invariants: of all claims of an unfinished key at most one is held,
and the next waits for it; a claim is renewed and removed only with its own token; a claim that is
not renewed ends after ``claim_ms``; finished work is marked even if the claim was lost. This
module knows no daemon; its Redis need not be a daemon's store.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from tickwheel.api.times import Duration, duration_ms
from tickwheel.client.connection import LOGGER
from tickwheel.client.delivery import Delivered
from tickwheel.errors import BadRequest, Conflict, Unreachable, needs_extra, shown
from tickwheel.model.values import is_utf8

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

SIZE = 100_000
TTL_S = 86_400.0
CLAIM_S = 30.0
WAIT_S = 60.0
KEY_CHARACTERS_MAX = 1024
_SCHEMES = ("redis://", "rediss://", "unix://")


class Once:
    """Remembers finished work by key. Can be created without an event loop; call ``close`` at the
    end.

    ``size``: maximum keys remembered in process; the oldest are forgotten first (Redis forgets only
    by ``ttl``). ``namespace`` is the prefix of every key. The key of a delivery's claim contains
    its topic and group; two handlers that claim the same text for different work need different
    namespaces.
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
            raise BadRequest(f"size must be a positive integer, not {shown(size)}")
        self._wait_s = duration_ms(wait, "wait") / 1000
        self._namespace = namespace
        ttl_ms, claim_ms = positive_ms(ttl, "ttl"), positive_ms(claim, "claim")
        self._marks: DedupStore
        if url is None:
            self._marks = MemoryDedupStore(size, ttl_ms)
        elif url.startswith(_SCHEMES):
            self._marks = RedisDedupStore(url, ttl_ms, claim_ms)
        else:
            raise BadRequest(f"url must be redis://HOST:PORT/DB, not {shown(url)}")

    def claim(
        self, work: str | Delivered, *, key: str | None = None
    ) -> AbstractAsyncContextManager[bool]:
        """Return a context manager, which enters with True if this caller should do the work.

        ``work``: a delivery, which identifies its task in its topic and group, or any text.
        ``key``: identifies a delivery's work instead of the task's id: all tasks of the topic and
        group with the same key share a claim. Raise Conflict if another caller holds the claim for
        longer than ``wait``, Unreachable if the marks cannot be read or written.
        """
        return self._claim(f"{self._namespace}:{name_of(work, key)}")

    @asynccontextmanager
    async def _claim(self, key: str) -> AsyncIterator[bool]:
        try:
            claim = await self._marks.claim(key, self._wait_s)
        except TimeoutError:
            raise Conflict(
                f"another caller has held key {key!r} for {self._wait_s:g} s (wait)"
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

    async def is_done(self, work: str | Delivered, *, key: str | None = None) -> bool:
        """Return whether the work is done; if not, it may be in progress."""
        return await self._marks.is_done(f"{self._namespace}:{name_of(work, key)}")

    async def forget(self, work: str | Delivered, *, key: str | None = None) -> None:
        """Forget that the work was done."""
        await self._marks.forget(f"{self._namespace}:{name_of(work, key)}")

    async def close(self) -> None:
        """Close connections. Can be called twice."""
        await self._marks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def name_of(work: Any, key: Any = None) -> str:
    """Return the key of a claim: the text ``work``, or a delivery's topic, group, and ``key`` or
    task id. Raise BadRequest."""
    if not isinstance(work, Delivered):
        if key is not None:
            raise BadRequest("key is only valid with a delivery; a string is itself the key")
        return _checked(work, "work must be a delivery or", "work")
    # Names of topics and groups contain neither "#" nor "=", so different work never shares a key.
    prefix = f"{work.topic}#{work.group}"
    if key is None:
        return f"{prefix}#{work.id}"
    return f"{prefix}={_checked(key, 'key must be', 'key')}"


def _checked(text: Any, subject: str, field: str) -> str:
    if not isinstance(text, str) or not text or len(text) > KEY_CHARACTERS_MAX:
        raise BadRequest(
            f"{subject} a string of 1 to {KEY_CHARACTERS_MAX} characters, not {shown(text)}"
        )
    if not is_utf8(text):
        raise BadRequest(f"{field} must be valid UTF-8, not {shown(text)}")
    return text


def positive_ms(value: Any, field: str) -> int:
    value_ms = duration_ms(value, field)
    if value_ms <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return value_ms


class DedupStore(Protocol):
    """Keeps the marks of keys. Keys are text; a claim is the result of ``claim``."""

    async def claim(self, key: str, wait_s: float) -> Any:
        """Claim a key; None: its work is done.

        Waits while another caller holds the key. Raise TimeoutError after ``wait_s`` seconds.
        """

    async def done(self, claim: Any) -> None:
        """Mark the key of a claim as done."""

    async def give_back(self, claim: Any) -> None:
        """Release a claim after a failure. Ignore errors: a claim also ends by itself."""

    async def is_done(self, key: str) -> bool:
        """Return whether the key is marked as done."""

    async def forget(self, key: str) -> None:
        """Remove the mark of the key."""

    async def close(self) -> None:
        """Close connections. Can be called twice."""


class MemoryDedupStore:
    """Marks in memory: the last ``size`` keys that were done, each for ``ttl_ms``."""

    def __init__(self, size: int, ttl_ms: int) -> None:
        self._size = size
        self._ttl_s = ttl_ms / 1000
        self._done: OrderedDict[str, float] = OrderedDict()
        """Key → end of its mark by the monotonic clock, the oldest first."""
        self._claims: dict[str, asyncio.Future[None]] = {}

    async def claim(self, key: str, wait_s: float) -> str | None:
        async with asyncio.timeout(wait_s):
            while not await self.is_done(key):
                held = self._claims.get(key)
                if held is None:
                    self._claims[key] = asyncio.get_running_loop().create_future()
                    return key
                await asyncio.shield(held)
        return None

    async def done(self, claim: str) -> None:
        self._done[claim] = time.monotonic() + self._ttl_s
        self._done.move_to_end(claim)
        if len(self._done) > self._size:
            self._done.popitem(last=False)
        self._release(claim)

    async def give_back(self, claim: str) -> None:
        self._release(claim)

    def _release(self, claim: str) -> None:
        held = self._claims.pop(claim)
        if not held.done():
            held.set_result(None)

    async def is_done(self, key: str) -> bool:
        until_s = self._done.get(key)
        if until_s is None:
            return False
        if time.monotonic() < until_s:
            return True
        del self._done[key]
        return False

    async def forget(self, key: str) -> None:
        self._done.pop(key, None)

    async def close(self) -> None:
        """Do nothing: there are no connections."""


DONE = b"done"
TIMEOUT_S = 5.0
"""Maximum seconds of one call to Redis."""
POLL_S_MIN = 0.02
POLL_S_MAX = 0.5
MARK_TRIES = 4
"""Attempts to set a mark: the work is done, and a short failure must not cause a repetition."""
RENEWALS_PER_CLAIM = 3

# KEYS[1]: the key; ARGV[1]: our value; ARGV[2]: the new time to live in ms (0: delete the key).
_IF_OURS = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class _Claim(NamedTuple):
    key: str
    value: bytes
    renewing: asyncio.Task[None]


class RedisDedupStore:
    """Marks in a Redis, shared by all processes that use it."""

    def __init__(self, url: str, ttl_ms: int, claim_ms: int) -> None:
        with needs_extra(f"Once({url.partition('://')[0]}://…)", "redis"):
            # Imported by name: the client's modules import no extras, and linters enforce that.
            redis = import_module("redis.asyncio")
        self._errors: tuple[type[Exception], ...] = (import_module("redis").RedisError, OSError)
        self._redis: Any = redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        self._if_ours: Any = self._redis.register_script(_IF_OURS)
        self._ttl_ms = ttl_ms
        self._claim_ms = claim_ms

    async def claim(self, key: str, wait_s: float) -> _Claim | None:
        # A timeout by cancellation could be lost: `asyncio.wait_for`, in which the Redis client
        # sends, swallows a cancellation that coincides with its result (Python 3.11, gh-86296).
        value, pause_s = b"claim:" + secrets.token_bytes(12), POLL_S_MIN
        until_s = time.monotonic() + wait_s
        while True:
            if await self._ask(self._redis.set(key, value, nx=True, px=self._claim_ms)):
                renewing = asyncio.get_running_loop().create_task(self._renew(key, value))
                return _Claim(key, value, renewing)
            if await self.is_done(key):
                return None
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
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
        """Renew a claim while the body runs. If the claim is lost, another caller may start as
        well, like after a lost lease; the body continues."""
        while True:
            await asyncio.sleep(self._claim_ms / 1000 / RENEWALS_PER_CLAIM)
            try:
                kept = await self._ask(self._if_ours(keys=[key], args=[value, self._claim_ms]))
            except Unreachable as error:
                LOGGER.warning("a claim was not renewed: %s", error)
                continue
            if not kept:
                LOGGER.warning("the claim of %r was lost during the work", key)
                return

    async def _ask(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except self._errors as error:
            raise Unreachable(f"Redis: {error}") from None
