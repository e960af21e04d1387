"""A line to Redis: one connection at a time, time-outs, scripts, reconnecting when used; and the
settings of the Redis store, with their units and reasons, and how a URL says them.

One call at a time, in order. Invariant: after a call whose answer did not come the connection
is closed, so that an answer is never taken for another call's. ``connect`` and ``check`` choose
the driver; Sentinel and Cluster would be further ways to find the address that they get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tickwheel.model.records import SHARD_BITS
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.redis.driver import Argument, Driver, NoReply, NotConnected, ServerError
from tickwheel.persistence.redis.layout import Script

MIB = 1 << 20
PORT = 6379
DRIVERS = ("redis", "asyncio-redis")
NAME_LENGTH_MAX = 64
NEVER_ZERO = ("call_ms", "connect_ms", "wait_ms", "resident_bytes_max", "endings_max")
"""Options that must not be 0: WAIT takes 0 for ever, and each batch keeps its own endings."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the Redis store, which its URL may set: ``redis://host/0?wait_replicas=1``."""

    host: str = "127.0.0.1"
    port: int = PORT
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    """A file with the authorities to trust; empty: the system's."""
    tls_cert: str = ""
    tls_key: str = ""
    driver: str = "redis"
    prefix: str = "tw"
    namespace: str = "default"
    shard: int = 0
    allow_volatile_store: bool = False
    """Whether a Redis may be used that can lose or evict its data."""
    wait_replicas: int = 0
    """How many replicas must have a batch before it counts as durable."""
    wait_ms: int = 1_000
    """How long to wait for replicas, in ms; then the fate of the batch counts as unknown."""
    connect_ms: int = 750
    call_ms: int = 1_000
    """A producer gets an answer within 3 s; two more tries to connect fit in them."""
    load_ms: int = 60_000
    """How long an opening waits for a Redis that is still loading its data."""
    keep_ms: int = 10_000
    """Applied batches are kept this long, to be replayed to a Redis that lost them."""
    keep_bytes: int = 64 * MIB
    resident_bytes_max: int = 2 << 30
    """Everything that Redis holds is kept in memory too, up to this much of it."""
    endings_max: int = 100_000
    """For how many finished tasks the ending is remembered."""

    @property
    def name(self) -> str:
        """The address without secrets, for messages."""
        scheme = "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.db}"


_IN_QUERY = {
    item.name: item.type
    for item in fields(RedisOptions)
    if item.name not in ("host", "port", "db", "username", "password", "tls")
}


def options_from(url: str) -> RedisOptions:
    """Options from a URL; raises StoreUnusable, never naming the password."""
    parts = urlsplit(url)
    name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def wrong(why: str) -> StoreUnusable:
        return StoreUnusable(f"store {name!r}: {why}")

    try:
        port = parts.port or PORT
    except ValueError:
        raise wrong("the port is not a number of 1 to 65535") from None
    db = parts.path.strip("/") or "0"
    if not db.isdecimal():
        raise wrong(f"the path is the number of the database, not {db!r}")
    options = RedisOptions(
        host=parts.hostname or "127.0.0.1",
        port=port,
        db=int(db),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme == "rediss",
    )
    given: dict[str, Any] = {}
    for key, text in parse_qsl(parts.query, keep_blank_values=True):
        kind = _IN_QUERY.get(key)
        if kind is None:
            raise wrong(f"unknown setting {key!r}; known are {', '.join(sorted(_IN_QUERY))}")
        if kind == "str":
            given[key] = text
        elif not text.isdecimal():
            raise wrong(f"{key}={text!r} is not a whole number")
        elif key in NEVER_ZERO and not int(text):
            raise wrong(f"{key} must be at least 1")
        else:
            given[key] = bool(int(text)) if kind == "bool" else int(text)
    options = replace(options, **given)
    why = _objection(options)
    if why:
        raise wrong(why)
    return options


def _objection(options: RedisOptions) -> str:
    """What is wrong with the options; empty: nothing."""
    if options.driver not in DRIVERS:
        return f"driver={options.driver!r} is not one of {', '.join(DRIVERS)}"
    if options.shard >> SHARD_BITS:
        return f"shard={options.shard} must be 0 to {(1 << SHARD_BITS) - 1}"
    for key in ("prefix", "namespace"):
        text = getattr(options, key)
        if (
            not 0 < len(text) <= NAME_LENGTH_MAX
            or set(text) & set("{}:*?[]\\ ")
            or not text.isascii()
        ):
            return f"{key}={text!r} must be 1 to {NAME_LENGTH_MAX} letters, digits, . _ or -"
    return ""


ELSEWHERE = frozenset(("READONLY", "MOVED", "ASK", "MASTERDOWN", "LOADING", "NOAUTH"))
"""Errors after which the next call connects anew, as another server may answer."""
RETRY_S = 0.2
"""How long after a failed try to connect nobody tries again, in seconds."""


class Connection:
    """One connection to Redis at a time, which is made anew when it is used after a failure."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._wire: Driver | None = None
        self._lock = asyncio.Lock()
        self._failed_s = float("-inf")
        self._why = ""
        self.connections = 0
        """How many connections there have been: a shard has to be claimed on each new one."""

    @property
    def connected(self) -> bool:
        return self._wire is not None

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[Argument],
        *,
        patience: int = 1,
    ) -> Any:
        """A script's reply, waited for ``patience`` times as long as for a command.

        Raises Away (nothing was sent), Lost, Answer.
        """
        rest = (len(keys), *keys, *args)
        timeout_ms = patience * self._options.call_ms
        try:
            return await self.call("EVALSHA", script.sha, *rest, timeout_ms=timeout_ms)
        except ServerError as error:
            if error.kind != "NOSCRIPT":
                raise
        return await self.call("EVAL", script.text, *rest, timeout_ms=timeout_ms)

    async def call(self, *args: Argument, timeout_ms: int = 0) -> Any:
        """Run one command, connecting first if need be. Raises Away, Lost, Answer."""
        timeout_ms = timeout_ms or self._options.call_ms
        async with self._lock:
            wire = self._wire or await self._connect()
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    return await wire.call(*args)
            except ServerError as error:
                if error.kind in ELSEWHERE:
                    await self._drop(error.message)
                raise
            except TimeoutError:
                await self._drop("it did not answer in time")
                raise NoReply(
                    f"{self._options.name} did not answer within {timeout_ms} ms",
                    silent=True,
                ) from None
            except BaseException as error:
                await self._drop(str(error))
                raise

    async def _connect(self) -> Driver:
        options, loop = self._options, asyncio.get_running_loop()
        if loop.time() < self._failed_s + RETRY_S:
            raise NotConnected(f"{options.name}: {self._why}")
        try:
            async with asyncio.timeout(options.connect_ms / 1000):
                self._wire = await connect(options)
        except TimeoutError:
            self._why = f"no connection within {options.connect_ms} ms"
        except (NotConnected, NoReply) as error:
            self._why = error.message
        except ServerError as error:
            self._failed_s, self._why = loop.time(), error.message
            if error.kind != "ERR":  # such as: max number of clients reached
                raise
        else:
            self.connections += 1
            return self._wire
        self._failed_s = loop.time()
        raise NotConnected(f"{options.name}: {self._why}")

    async def _drop(self, why: str) -> None:
        wire, self._wire = self._wire, None
        self._why = why
        if wire is not None:
            await wire.close()

    async def close(self) -> None:
        """Close the connection, and end a call under way."""
        await self._drop("the store is closed")


async def connect(options: RedisOptions) -> Driver:
    """A connected, authenticated driver with the database selected. Raises Away or Answer."""
    if options.driver == "asyncio-redis":
        from tickwheel.persistence.redis.driver_asyncio_redis import AsyncioRedisWire

        return await AsyncioRedisWire.connect(options)
    from tickwheel.persistence.redis.driver_redis import RedisWire

    return await RedisWire.connect(options)


def check(options: RedisOptions) -> None:
    """Raises StoreUnusable if the driver is not installed or cannot do what the options ask."""
    try:
        if options.driver == "asyncio-redis":
            import tickwheel.persistence.redis.driver_asyncio_redis
        else:
            import tickwheel.persistence.redis.driver_redis  # noqa: F401
    except ModuleNotFoundError as error:
        raise StoreUnusable(
            f"store {options.name}: the module {error.name!r} is missing;"
            f" install tickwheel[{options.driver}]"
        ) from error
    if options.driver == "asyncio-redis" and options.tls:
        raise StoreUnusable(
            f"store {options.name}: the driver asyncio-redis has no TLS;"
            " leave ?driver=asyncio-redis out, or use redis://"
        )
    for setting in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(options, setting)
        if path and not options.tls:
            raise StoreUnusable(
                f"store {options.name}: {setting} is for TLS; use rediss://, or leave it out"
            )
        if path and not Path(path).is_file():
            raise StoreUnusable(f"store {options.name}: {setting}: there is no file {path}")
