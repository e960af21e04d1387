"""``Once``: a task's work is done once, although the task may be delivered twice.

    once = Once()                                     # within this process
    once = Once("redis://127.0.0.1:6379/0")           # among all that use this Redis

    async with once.claim(delivery) as first:
        if first:
            ...                                       # done when the body ends without exception

A delivery's claim goes by the task's id: two tasks are two claims, whatever their keys. Tasks that
ask for the same work share a claim only where the handler says what makes it the same:
``once.claim(delivery, key=delivery.key)``. An id is unique within one store: daemons that share a
Redis need a ``namespace`` each.

``first`` is False when the work was done within the last ``ttl`` seconds. A body that raises or is
cancelled gives its claim back. **A second claim of a key that is being worked on waits** until the
first one has ended, and then knows: it is not done before it is done, so a delivery that is
acked because of ``first == False`` can never lose work. After ``wait`` seconds it gives up with
``Conflict`` (in a handler: a nack, and the task comes again).

In Redis a claim lasts ``claim`` seconds and is renewed while the body runs, so that after a crash
the next attempt gets in once that time is over. What this cannot do: when the body ended and Redis
cannot be reached, ``Unreachable`` is raised and the next attempt works again. Work and mark are two
steps; ``tickwheel.contrib.sqlalchemy.SqlOnce`` makes them one, in a transaction of SQL.

``DedupStore`` is where it keeps what is done, in this process or in a Redis: one key each,
``done``, or ``claim:TOKEN`` while somebody works. Invariants: of all claims of one key that is not
done at most one is held, the next waits for it; a claim is taken and removed by its own token
only; one that is not renewed ends after ``claim_ms``; what was done is marked whoever has the claim
by then. Knows no Tickwheel daemon; this Redis need not be its store.
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
    """Which keys are done. May be made before there is an event loop; ``close`` at the end.

    ``size``: keys that are remembered in process, the oldest are forgotten first (Redis forgets
    by ``ttl`` alone). ``namespace`` stands before every key. The claim of a delivery has its topic
    and group as well; two handlers that claim the same text for different work need a namespace
    each.
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
        """``async with`` it: True when the work is this caller's to do.

        ``work``: a delivery, which stands for its task in its topic and group, or any text.
        ``key``: with a delivery, what the work belongs to instead of the task: all tasks of the
        topic and group with the same key are one claim. None: the task's id. Raises Conflict when
        another one works on it for too long, Unreachable when the marks cannot be read or written.
        """
        return self._claim(f"{self._namespace}:{name_of(work, key)}")

    @asynccontextmanager
    async def _claim(self, key: str) -> AsyncIterator[bool]:
        try:
            claim = await self._marks.claim(key, self._wait_s)
        except TimeoutError:
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

    async def is_done(self, work: str | Delivered, *, key: str | None = None) -> bool:
        """Whether the work is done; it may be being worked on."""
        return await self._marks.is_done(f"{self._namespace}:{name_of(work, key)}")

    async def forget(self, work: str | Delivered, *, key: str | None = None) -> None:
        """Forget the work, as if it had never been done."""
        await self._marks.forget(f"{self._namespace}:{name_of(work, key)}")

    async def close(self) -> None:
        """Close connections. It may be called twice."""
        await self._marks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def name_of(work: Any, key: Any = None) -> str:
    """What a claim is known by: the text ``work``, or of a delivery its topic, group, and ``key``
    or the task's id. Raises BadRequest."""
    if not isinstance(work, Delivered):
        if key is not None:
            raise BadRequest("key goes with a delivery; a text is the key itself")
        return _checked(work, "work must be a delivery or")
    # No name of a topic or group has "#" or "=", so no two pieces of work share a text.
    of = f"{work.topic}#{work.group}"
    return f"{of}#{work.id}" if key is None else f"{of}={_checked(key, 'key must be')}"


def _checked(text: Any, what: str) -> str:
    if not isinstance(text, str) or not text or len(text) > KEY_CHARACTERS_MAX:
        raise BadRequest(
            f"{what} a string of 1 to {KEY_CHARACTERS_MAX} characters, not {shown(text)}"
        )
    if not is_utf8(text):
        raise BadRequest(f"{what} text that UTF-8 can say, not {shown(text)}")
    return text


def positive_ms(value: Any, field: str) -> int:
    found_ms = duration_ms(value, field)
    if found_ms <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return found_ms


class DedupStore(Protocol):
    """Keeps the marks of keys. Keys are text; a claim is whatever ``claim`` returned."""

    async def claim(self, key: str, wait_s: float) -> Any:
        """Claim a key; None: its work is done.

        While another one holds the key it waits; TimeoutError after ``wait_s`` seconds.
        """

    async def done(self, claim: Any) -> None:
        """Mark the key of a claim as done."""

    async def give_back(self, claim: Any) -> None:
        """Give a claim back after a failure. Raises nothing: a claim ends by itself, too."""

    async def is_done(self, key: str) -> bool:
        """Whether the key is done, and not forgotten."""

    async def forget(self, key: str) -> None:
        """Forget that the key was done."""

    async def close(self) -> None:
        """Close connections. It may be called twice."""


class MemoryDedupStore:
    """Marks in memory: the last ``size`` keys that were done, each for ``ttl_ms``."""

    def __init__(self, size: int, ttl_ms: int) -> None:
        self._size = size
        self._ttl_s = ttl_ms / 1000
        self._done: OrderedDict[str, float] = OrderedDict()
        """Key → until when it counts as done, by the monotonic clock; the oldest first."""
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
        self._let_go(claim)

    async def give_back(self, claim: str) -> None:
        self._let_go(claim)

    def _let_go(self, claim: str) -> None:
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
        """Do nothing: there is nothing to close."""


DONE = b"done"
TIMEOUT_S = 5.0
"""How long one call to Redis may take, in seconds."""
POLL_S_MIN = 0.02
POLL_S_MAX = 0.5
MARK_TRIES = 4
"""How often a mark is tried: the work is done, and short trouble must not make it be done again."""
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


class RedisDedupStore:
    """Marks in a Redis, of all processes that use it."""

    def __init__(self, url: str, ttl_ms: int, claim_ms: int) -> None:
        with needs_extra(f"Once({url.partition('://')[0]}://…)", "redis"):
            # By name: the client's modules import no extra, and linters hold them to it.
            redis = import_module("redis.asyncio")
        self._errors: tuple[type[Exception], ...] = (import_module("redis").RedisError, OSError)
        self._redis: Any = redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        self._if_ours: Any = self._redis.register_script(_IF_OURS)
        self._ttl_ms = ttl_ms
        self._claim_ms = claim_ms

    async def claim(self, key: str, wait_s: float) -> _Claim | None:
        # A time-out by cancellation could be lost: `asyncio.wait_for`, in which the Redis client
        # sends, swallows a cancellation that meets its result (Python 3.11, gh-86296).
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
        """Renew a claim while the body runs. If the claim is gone another one may work, too; the
        body goes on: a second attempt is what its lease allows as well."""
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
