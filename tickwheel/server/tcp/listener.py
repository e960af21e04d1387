"""The TCP connections of a daemon, role after role."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tickwheel.errors import NotActive
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.handlers import command_table, standby_table
from tickwheel.server.tcp.heartbeats import Heartbeats
from tickwheel.server.tcp.shared import Shared

if TYPE_CHECKING:
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.operations.standby import StandbyOperations

GOODBYE_WAIT_S = 1.0
"""For peers that do not read it."""


class Listener:
    """Makes the connections, and ends them when the daemon's role changes."""

    def __init__(self, standby: StandbyOperations) -> None:
        self._standby = Shared[Connection](standby, standby_table(standby))
        self._active: Shared[Connection] | None = None

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All of them."""
        active = self._active.connections if self._active is not None else ()
        return (*self._standby.connections, *active)

    def __call__(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self._active or self._standby)

    def serve(self, operations: Operations) -> None:
        """The daemon leads: connections get these operations from now on."""
        settings = operations.settings
        self._active = shared = Shared[Connection](operations, command_table(operations))
        operations.shard.on_landed = shared.landed
        heartbeats = Heartbeats(
            shared.connections,
            operations.clock,
            interval_s=settings.heartbeat_interval_s,
            timeout_s=settings.heartbeat_timeout_s,
        )
        operations.shard.spawn(heartbeats.run())

    def end_standby(self, message: str) -> None:
        """The daemon leads, or stops: clients connect again and learn who leads now."""
        for connection in list(self._standby.connections):
            connection.say_goodbye(NotActive.code, message)
            connection.close()

    def stand_by(self) -> None:
        """The daemon does not lead any more."""
        active, self._active = self._active, None
        if active is not None:
            active.is_over = True
        for connection in list(active.connections) if active is not None else ():
            connection.say_goodbye(NotActive.code, "this daemon is not the active one any more")
            connection.close()
            asyncio.get_running_loop().call_later(GOODBYE_WAIT_S, connection.abort)

    def abort(self) -> None:
        """Cut off what is connected to the daemon that leads."""
        for connection in list(self._active.connections) if self._active is not None else ():
            connection.abort()
