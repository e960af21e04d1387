"""A line to Redis: one connection at a time, time-outs, scripts, reconnecting when used.

One call at a time, in order. Invariant: after a call whose answer did not come the connection
is closed, so that an answer is never taken for another call's. ``connect`` and ``check`` choose
the driver; Sentinel and Cluster would be further ways to find the address that they get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.redis.driver import (
    Argument,
    Driver,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
)
from tickwheel.persistence.redis.layout import Script

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
