"""The second driver: ``asyncio-redis`` 0.16, its last release (June 2020).

The library has no TLS and no time-outs, ignores a wrong password, and builds replies value by
value. So this driver only uses its protocol: one command at a time, with hiredis's replies, and
with its own AUTH and SELECT. This part of the library runs on every supported Python version.
"""

from __future__ import annotations

from typing import Any

import hiredis
from asyncio_redis import Connection, HiRedisProtocol
from asyncio_redis.encoders import BytesEncoder
from asyncio_redis.exceptions import ConnectionLostError, ErrorReply, NotConnectedError
from asyncio_redis.protocol import _NoTransaction

from tickwheel.persistence.on_server import NoReply, NotConnected
from tickwheel.persistence.redis.driver import Argument, RedisOptions, pack, server_error


class _Protocol(HiRedisProtocol):  # type: ignore[misc]  # the library ships no types
    """A protocol that returns hiredis's replies: bytes, int, None and lists of these."""

    def _send_command(self, args: tuple[Argument, ...]) -> None:
        self.transport.writelines(pack(args))

    broken = "the connection was closed"

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except hiredis.HiredisError as error:  # the server is not a Redis
            self.broken = str(error)
            self.transport.abort()

    def _process_hiredis_item(self, item: Any, cb: Any) -> None:
        # A caller that timed out has cancelled or removed its future, and then closes the
        # connection.
        if not self._queue or self._queue[0].done():
            self._queue.clear()
            return
        cb(ErrorReply(str(item)) if isinstance(item, hiredis.ReplyError) else item)


class AsyncioRedisWire:
    """A ``Driver`` on the library asyncio-redis."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, options: RedisOptions) -> AsyncioRedisWire:
        try:
            wire = cls(
                await Connection.create(
                    options.host,
                    options.port,
                    encoder=BytesEncoder(),
                    auto_reconnect=False,
                    protocol_class=_Protocol,
                )
            )
        except OSError as error:
            raise NotConnected(str(error)) from error
        try:
            if options.password:
                user = (options.username,) if options.username else ()
                await wire.call("AUTH", *user, options.password)
            if options.db:
                await wire.call("SELECT", options.db)
            await wire.call("CLIENT", "SETNAME", "tickwheel")
        except BaseException:
            await wire.close()
            raise
        return wire

    async def call(self, *args: Argument) -> Any:
        protocol = self._connection.protocol
        try:
            return await protocol._query(_NoTransaction, *args)
        except ErrorReply as error:
            raise server_error(str(error)) from error
        except (ConnectionLostError, NotConnectedError, OSError) as error:
            raise NoReply(protocol.broken) from error

    def give_up(self) -> bool:
        waiting = self._connection.protocol._queue
        if not waiting or waiting[0].done():
            return False
        waiting.popleft().set_exception(NoReply("the connection was closed"))
        return True

    async def close(self) -> None:
        transport = self._connection.transport
        if transport is not None:
            transport.abort()
