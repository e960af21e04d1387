"""The daemon: listener, HTTP and the role that it has, started and stopped in order.

Order of a stop: say goodbye, stop accepting and delivering, commit what is open together with
the leases in flight, flush, close the store as clean, give the leader's lease back.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel.errors import TickwheelError
from tickwheel.persistence.store import Fenced, StoreBroken, StoreError
from tickwheel.server.connection import Connection, Handler, RunHandler
from tickwheel.server.handlers import command_table
from tickwheel.server.http import Http
from tickwheel.server.listener import bind, url_of, write_ready_file
from tickwheel.server.logs import Log
from tickwheel.server.observing import probe_loop
from tickwheel.server.roles import Roles
from tickwheel.server.settings import Settings, split_address
from tickwheel.server.shell import Shell
from tickwheel.server.standby import Standby, StandbyConnection
from tickwheel.server.status import readiness, status_map

if TYPE_CHECKING:
    from tickwheel.server.exposition import Exposition

GOODBYE_WAIT_S = 1.0
"""After GOODBYE, clients get this long to send what they still have."""


class Daemon:
    """``start``, ``wait`` until it should end, ``stop``."""

    def __init__(self, settings: Settings, log: Log) -> None:
        """Raises StoreUnusable, BadRequest."""
        self.settings = settings
        self.log = log
        self.url: str | None = None
        self.draining = False
        self.started_mono_s = time.monotonic()
        self.roles: Roles = Roles(
            settings,
            log,
            serving=self._serving,
            changed=self._role_changed,
            status=lambda: status_map(self),
        )
        self._standby = Standby(
            settings,
            settings.limits(),
            active=lambda: self.roles.other_leader,
            status=lambda: status_map(self),
            now_ms=lambda: self.roles.clock.read().now_ms,
        )
        self._handlers: tuple[dict[int, Handler], RunHandler] = ({}, lambda *_: 0)
        self._http: Http | None = None
        self._exposition: Exposition | None = None
        self._probe: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until it serves, or stands by. Raises StoreError, OSError (an address is taken)."""
        settings, roles = self.settings, self.roles
        if settings.http is not None:
            await self._start_http(*split_address(settings.http, "http"))
        listener = bind(settings.listen)
        try:
            self.url = url_of(listener)
            roles.address = settings.advertise or self.url
            loop = asyncio.get_running_loop()
            if not roles.shared:
                await roles.begin()
            self._server = await loop.create_server(self._protocol, sock=listener, backlog=1024)
            if roles.shared:
                # Others are told meanwhile who is active.
                await roles.begin()
        except BaseException:
            listener.close()
            raise
        self.log.info("serving", url=self.url, http=self._http and self._http.url)
        if settings.ready_file is not None:
            http = self._http.url if self._http is not None else None
            write_ready_file(Path(settings.ready_file), self.url, http)
        self._running = asyncio.create_task(roles.run())

    async def _start_http(self, host: str, port: int) -> None:
        # prometheus-client is not imported where nobody can scrape.
        from tickwheel.server.exposition import Exposition

        observed = self.roles.observed
        self._exposition = Exposition(self)
        observed.ended = self._exposition.ended
        self._probe = asyncio.create_task(probe_loop(observed.loop_lag_s))
        self._http = Http(
            host,
            port,
            lambda: readiness(self),
            self._exposition.render,
            connections_max=self.settings.http_connections_max,
            idle_s=self.settings.http_idle_timeout_s,
        )
        await self._http.start()

    @property
    def connection_count(self) -> int:
        shell = self.roles.shell
        return len(self._standby.connections) + (len(shell.connections) if shell else 0)

    def ask_to_stop(self) -> None:
        """From a signal handler."""
        self._stop_asked.set()

    def accept_clock(self) -> None:
        """From a signal handler: an operator trusts the clock."""
        self.roles.accept_clock()

    async def wait(self) -> None:
        """Until ``ask_to_stop``; raises what made it impossible to go on."""
        assert self._running is not None, "not started"
        asked = asyncio.ensure_future(self._stop_asked.wait())
        either: set[asyncio.Future[Any]] = {asked, self._running}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Drain. Tolerates a daemon that never started; calling it twice does nothing."""
        self.draining = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._standby.end("the daemon is shutting down")
        shell, self.roles.shell = self.roles.shell, None
        clean = False
        try:
            if shell is not None and not shell.failed.done():
                await self._drain(shell)
                clean = True
        except Fenced as error:
            if not self.roles.shared:
                raise
            self.roles.noticed("deposed", error.message)
        finally:
            await self._close(shell, clean)

    async def _drain(self, shell: Shell) -> None:
        shell.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(shell.connections):
            connection.say_goodbye("draining", "the daemon is shutting down")
        shell.pause()
        await _until_closed(shell)
        timeout_s = self.settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await shell.stop()
        except TimeoutError:
            raise StoreError(
                f"the store did not take the last batch within {timeout_s} s (drain_timeout_s);"
                " what was not confirmed is not kept"
            ) from None
        for connection in list(shell.connections):
            connection.close()
        await _until_closed(shell)

    async def _close(self, shell: Shell | None, clean: bool) -> None:
        if self._server is not None:
            self._server.close()
        try:
            await self.roles.close_shard(shell, clean)
        finally:
            await self.roles.close()
            if self._probe is not None:
                self._probe.cancel()
            if self._http is not None:
                await self._http.stop()

    # --- connections -------------------------------------------------------------------------

    def _serving(self, shell: Shell) -> None:
        self._handlers = command_table(shell)
        if self._exposition is not None:
            self._exposition.serves(shell.core)

    def _role_changed(self, message: str) -> None:
        self._standby.end(message)

    def _protocol(self) -> asyncio.Protocol:
        shell = self.roles.shell
        if shell is None:
            return StandbyConnection(self._standby)
        return Connection(shell, *self._handlers, shell.connections)


async def _until_closed(shell: Shell) -> None:
    deadline = time.monotonic() + GOODBYE_WAIT_S
    while shell.connections:  # they end one by one, and nobody waits long
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(0.01)


def explain(error: BaseException) -> str:
    """One line for an operator about what ended the daemon."""
    if isinstance(error, StoreBroken):
        return f"the store failed and cannot be trusted: {error}. The next start recovers."
    if isinstance(error, TickwheelError):
        return f"{error.code}: {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
