"""The default driver: one connection of ``redis.asyncio``, parsed by hiredis when it is there."""

from __future__ import annotations

from typing import Any

from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection

from tickwheel.persistence.redis.driver import (
    Argument,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
    answer,
    pack,
)

# redis-py takes the first word off the errors it knows and gives them classes instead.
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


class RedisWire:
    """A ``Driver`` on the library redis."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection

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
        except OSError as error:  # redis-py reads a file of its own there: none may be left
            raise NotConnected(f"no connection can be made: {error.strerror}") from error
        try:
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py left it so
        except BaseException as error:
            await connection.disconnect(nowait=True)
            known = _answer(error)
            if known is not None:
                raise known from error
            if isinstance(error, (exceptions.RedisError, OSError)):
                raise NotConnected(str(error)) from error
            raise
        return cls(connection)

    async def call(self, *args: Argument) -> Any:
        connection = self._connection
        if not connection.is_connected:
            raise NoReply("the connection was closed")
        try:
            await connection.send_packed_command(pack(args), check_health=False)
            return await connection.read_response()
        except (exceptions.RedisError, OSError) as error:
            known = _answer(error)
            if known is not None:
                raise known from error
            raise NoReply(str(error)) from error

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)


def _answer(error: BaseException) -> ServerError | None:
    """The server's error in an exception; None: the connection broke."""
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return ServerError(name, str(error))
    if isinstance(error, exceptions.ResponseError):
        return answer(str(error))
    return None
