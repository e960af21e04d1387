"""The TCP connections of a daemon, role after role."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING

from tickwheel.errors import NotActive, Unauthorized
from tickwheel.server.logins import REVOKED
from tickwheel.server.shard.access import PRINCIPALS_KEPT_MAX
from tickwheel.server.shard.guard import Guards
from tickwheel.server.tcp.commands import command_table, standby_table
from tickwheel.server.tcp.connection import Connection, Heartbeats
from tickwheel.server.tcp.shared import Shared

if TYPE_CHECKING:
    from tickwheel.server.logins import Logins
    from tickwheel.server.shard.access import Principal
    from tickwheel.server.shard.operations import Operations, StandbyOperations
    from tickwheel.server.tcp.shared import Table

GOODBYE_WAIT_S = 1.0
"""How long, in seconds, a peer that does not read has until it is cut off."""


class Listener:
    """Makes connections, and ends them when the daemon's role changes."""

    def __init__(self, standby: StandbyOperations, logins: Logins) -> None:
        table = standby_table(standby)
        self._logins = logins
        self._standby = Shared[Connection](standby, lambda _: table, logins)
        self._active: Shared[Connection] | None = None

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections of both roles."""
        active = self._active.connections if self._active is not None else ()
        return (*self._standby.connections, *active)

    def __call__(self) -> Connection:
        """A protocol for a new connection."""
        return Connection(self._active or self._standby)

    def serve(self, operations: Operations) -> None:
        """Begin to lead: new connections get these operations."""
        settings = operations.settings
        guards = Guards(operations, self._logins.refused, self._logins.audit)

        @lru_cache(maxsize=PRINCIPALS_KEPT_MAX)
        def table_of(principal: Principal) -> Table:
            return command_table(guards.of(principal))

        self._active = shared = Shared[Connection](operations, table_of, self._logins)
        operations.shard.on_landed = shared.landed
        heartbeats = Heartbeats(
            shared.connections,
            operations.clock,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
        )
        operations.shard.spawn(heartbeats.run())

    def end_standby(self, message: str) -> None:
        """End the connections of a standby: clients connect again and learn who leads now."""
        for connection in list(self._standby.connections):
            connection.say_goodbye(NotActive.code, message)
            connection.close()

    def stand_by(self) -> None:
        """End the connections of a daemon that does not lead any more."""
        active, self._active = self._active, None
        if active is not None:
            active.is_over = True
        for connection in list(active.connections) if active is not None else ():
            message = "this daemon is not the active one any more"
            self._end(connection, NotActive.code, message)

    def dismiss(self) -> None:
        """End the connections of callers whose principals are no longer valid."""
        for connection in self.connections:
            if not self._logins.is_valid(connection.caller.principal):
                self._end(connection, Unauthorized.code, REVOKED)

    @staticmethod
    def _end(connection: Connection, code: str, message: str) -> None:
        """End a connection, whether its peer reads the GOODBYE or not."""
        connection.part(code, message)
        asyncio.get_running_loop().call_later(GOODBYE_WAIT_S, connection.abort)

    def abort(self) -> None:
        """Cut off all connections to the daemon that leads."""
        for connection in list(self._active.connections) if self._active is not None else ():
            connection.abort()
