"""A line to Redis: one connection at a time, time-outs, scripts, reconnecting when used.

One call at a time, in order. Invariant: after a call whose answer did not come the connection
is closed, so that an answer is never taken for another call's. ``check`` looks at the driver and
at files that the options name.

Where the server is, is ``locator``'s business. If it moves, what a server refuses because it is not
the one any more (MOVED, READONLY) is sent once more to the one that is; and what it cannot take for
a while (a slot under way to another node, a Cluster without a master) waits for as long as a call
may take. Both are safe for every command here: Redis says so before the first write, so that
nothing was changed, and nothing else is under way on the connection.
"""

from __future__ import annotations

import asyncio
import logging
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
from tickwheel.persistence.redis.locator import place_of

log = logging.getLogger(__name__)

ELSEWHERE = frozenset(("READONLY", "MOVED", "MASTERDOWN", "LOADING", "NOAUTH"))
"""Errors after which the next call connects anew, as another server may answer."""
NOT_THE_ONE = frozenset(("READONLY", "MOVED", "MASTERDOWN"))
"""Of these: those that say that another server has the shard now."""
NOT_NOW = frozenset(("ASK", "TRYAGAIN", "CLUSTERDOWN"))
"""Errors of a Cluster that pass. While a slot is on its way to another node, the one that has it
answers ASK or TRYAGAIN to each script, from the beginning to the end: the keys of a script are
partly here and partly there, and some exist nowhere. Nor would the other node take it, for the same
reason; so an ASK is not followed, but waited for, until it is MOVED."""
NOT_NOW_RETRY_S = 0.02
FOLLOWED_MAX = 3
"""How often one call is sent to another server."""
RETRY_S = 0.2
"""How long after a failed try to connect nobody tries again, in seconds."""


class Connection:
    """One connection to Redis at a time, which is made anew when it is used after a failure."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._place = place_of(options)
        self._wire: Driver | None = None
        self._lock = asyncio.Lock()
        self._failed_s = float("-inf")
        self._why = ""
        self.connections = 0
        """How many connections there have been: a shard has to be claimed on each new one."""
        self.at = ""
        """The server of the last connection; empty: there was none."""
        self._since_s = 0.0
        self.moves = 0
        """How often a connection was to another server than the one before."""
        self._patience = _Patience()

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def connected_s(self) -> int:
        """How old the connection is, in seconds, rounded down."""
        return int(asyncio.get_running_loop().time() - self._since_s) if self.connected else 0

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
        loop, followed = asyncio.get_running_loop(), 0
        until_s = loop.time() + timeout_ms / 1000
        async with self._lock:
            while True:
                wire = self._wire or await self._connect()
                try:
                    return await self._call(wire, args, timeout_ms)
                except ServerError as error:
                    if not self._place.moves:
                        raise
                    if error.kind in NOT_THE_ONE and followed < FOLLOWED_MAX:
                        followed += 1
                    elif error.kind not in NOT_NOW:
                        raise
                    elif loop.time() >= until_s:
                        await self._drop(error.message)  # another node may know better by now
                        raise
                    else:
                        await asyncio.sleep(NOT_NOW_RETRY_S)
                        if self._wire is not wire:
                            raise NotConnected(f"{self._options.name}: {self._why}") from None

    async def _call(self, wire: Driver, args: tuple[Argument, ...], timeout_ms: int) -> Any:
        patience = self._patience
        patience.begin(wire, timeout_ms / 1000)
        try:
            return await wire.call(*args)
        except ServerError as error:
            if error.kind in ELSEWHERE:
                self._place.is_elsewhere(error)
                await self._drop(error.message)
            raise
        except BaseException as error:
            if patience.is_over and isinstance(error, NoReply):
                await self._drop("it did not answer in time")
                message = f"{self._named} did not answer within {timeout_ms} ms"
                raise NoReply(message, silent=True) from None
            await self._drop(str(error))
            raise
        finally:
            patience.end()

    @property
    def _named(self) -> str:
        """The store, and the server if there are several, for messages."""
        return f"{self._options.name} at {self.at}" if self._place.moves else self._options.name

    async def doubt(self) -> None:
        """Find out anew where the shard is, before the next call: this server did not do what a
        master does."""
        if self._place.moves:
            await self._drop(f"{self.at} is in doubt")

    async def _connect(self) -> Driver:
        options, loop = self._options, asyncio.get_running_loop()
        if loop.time() < self._failed_s + RETRY_S:
            raise NotConnected(f"{options.name}: {self._why}")
        try:
            async with asyncio.timeout(options.connect_ms / 1000):
                address, self._wire = await self._place.connect()
        except TimeoutError:
            doing = f", {self._place.doing}" if self._place.doing else ""
            self._why = f"no connection within {options.connect_ms} ms{doing}"
        except (NotConnected, NoReply) as error:
            self._why = error.message
        except ServerError as error:
            self._failed_s, self._why = loop.time(), error.message
            if error.kind != "ERR":  # such as: max number of clients reached
                raise
        else:
            self.connections += 1
            self._since_s = loop.time()
            self._note(str(address))
            return self._wire
        self._failed_s = loop.time()
        raise NotConnected(f"{options.name}: {self._why}")

    def _note(self, at: str) -> None:
        before, self.at = self.at, at
        if before and before != at:
            self.moves += 1
            log.warning("store %s: moved from %s to %s", self._options.name, before, at)

    async def _drop(self, why: str) -> None:
        wire, self._wire = self._wire, None
        self._why = why
        if wire is not None:
            await wire.close()

    async def close(self) -> None:
        """Close the connection, and end a call under way."""
        self._patience.close()
        await self._drop("the store is closed")


class _Patience:
    """How long one call after the other may take, with one timer for many of them: it rings at the
    end of a call that is over by then, and is set anew for the one that is under way."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the call under way, or the last one, took too long."""
        self._wire: Driver | None = None
        """Has the call under way; None: there is none."""
        self._until_s = self._rings_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wire: Driver, patience_s: float) -> None:
        """A call begins, which may take so long."""
        loop = asyncio.get_running_loop()
        self._wire, self.is_over = wire, False
        self._until_s = until_s = loop.time() + patience_s
        if self._timer is None or until_s < self._rings_s:
            self._set(loop)

    def end(self) -> None:
        """The call is over."""
        self._wire = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._rings_s = self._until_s
        self._timer = loop.call_at(self._rings_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._wire is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._set(loop)
        else:
            self.is_over = self._wire.give_up()

    def close(self) -> None:
        """No timer is left."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


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
    for setting in ("tls_ca", "tls_cert", "tls_key", "sentinel_password_file"):
        path = getattr(options, setting)
        if path and setting.startswith("tls") and not options.tls:
            raise StoreUnusable(
                f"store {options.name}: {setting} is for TLS; use rediss://, or leave it out"
            )
        if path and not Path(path).is_file():
            raise StoreUnusable(f"store {options.name}: {setting}: there is no file {path}")
