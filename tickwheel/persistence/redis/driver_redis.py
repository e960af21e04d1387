"""The default driver. ``redis.asyncio`` connects, because it supports TLS, users and the handshakes
of all server versions.

Then this module's protocol (``_Answers``) takes over the transport, and passes each answer directly
to the waiting call. The library's streams would wake a reader that wakes the caller, and would
check at each write whether the peer reads.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hiredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection

from tickwheel.persistence.on_server import NoReply, NotConnected
from tickwheel.persistence.redis.driver import (
    Argument,
    RedisOptions,
    ServerError,
    pack,
    server_error,
)

# redis-py removes the first word of errors that it knows, and gives them classes instead.
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.NoScriptError, "NOSCRIPT"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.MovedError, "MOVED"),
    (exceptions.AskError, "ASK"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.AuthenticationError, "WRONGPASS"),
    (exceptions.ExecAbortError, "EXECABORT"),
)


CLOSED = "the connection was closed"


class _Answers(asyncio.Protocol):
    """Sends one command at a time, and receives its answer."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._waiting: asyncio.Future[Any] | None = None
        self._broken = ""
        """Why the connection can no longer be used; empty if it can."""

    def ask(self, command: list[bytes]) -> asyncio.Future[Any]:
        """Return a future of the answer to a command: a value, or a ReplyError. The call and the
        future raise NoReply."""
        if self._broken:
            raise NoReply(self._broken)
        self._waiting = self._loop.create_future()
        self._transport.writelines(command)
        return self._waiting

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
        except hiredis.HiredisError as error:  # the server is not a Redis
            self._break(str(error))
            return
        if reply is False:
            return  # the answer is not complete
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._break(f"the server sent an answer without a request: {reply!r:.100}")
        elif not waiting.done():
            waiting.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.end(str(error) if error else CLOSED)

    def _break(self, reason: str) -> None:
        self.end(reason)
        self._transport.abort()

    def end(self, reason: str) -> bool:
        """Stop sending and receiving. Return whether a call was waiting for an answer."""
        self._broken = self._broken or reason
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.done():
            return False
        waiting.set_exception(NoReply(reason))
        return True


class RedisWire:
    """A ``Driver`` on the library redis."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        writer = connection._writer
        assert writer is not None, "it is connected"
        self._answers = _Answers(writer.transport)
        writer.transport.set_protocol(self._answers)

    @classmethod
    async def connect(cls, options: RedisOptions) -> RedisWire:
        common: dict[str, Any] = {
            "host": options.host,
            "port": options.port,
            "db": options.db,
            "username": options.username or None,
            "password": options.password or None,
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": None,
            "client_name": "tickwheel",
        }
        connection: AbstractConnection
        try:
            if options.tls:
                connection = SSLConnection(
                    ssl_ca_certs=options.tls_ca or None,
                    ssl_certfile=options.tls_cert or None,
                    ssl_keyfile=options.tls_key or None,
                    **common,
                )
            else:
                connection = Connection(**common)
        except OSError as error:  # redis-py opens a file, which fails without a free descriptor
            raise NotConnected(f"cannot create a connection: {error.strerror}") from error
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py has no types here
        except BaseException as error:
            await connection.disconnect(nowait=True)
            refusal = _server_error_in(error)
            if refusal is not None:
                raise refusal from error
            if isinstance(error, (exceptions.RedisError, OSError)):
                raise NotConnected(str(error)) from error
            raise
        return cls(connection)

    async def call(self, *args: Argument) -> Any:
        reply = await self._answers.ask(pack(args))
        if isinstance(reply, hiredis.ReplyError):
            raise server_error(str(reply))
        return reply

    def give_up(self) -> bool:
        return self._answers.end(CLOSED)

    async def close(self) -> None:
        self._answers.end(CLOSED)
        await self._connection.disconnect(nowait=True)


def _server_error_in(error: BaseException) -> ServerError | None:
    """Return the server's error in an exception, or None if the connection broke."""
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return ServerError(name, str(error))
    if isinstance(error, exceptions.ResponseError):
        return server_error(str(error))
    return None
