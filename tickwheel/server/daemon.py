"""The daemon: starts and stops the listener, the HTTP server and the role in order.

``run`` runs a daemon with given settings until a signal or an error ends it. The address is bound
first and written to the ready file. A stop sends GOODBYE, stops accepting and delivering, commits
the open batch together with the leases in flight, flushes, closes the store as clean, and releases
the leader's lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import FrameType
from tickwheel.errors import TickwheelError, TlsRequired
from tickwheel.persistence.contract import (
    Fenced,
    StoreBroken,
    StoreError,
    StoreForgot,
    StoreUnreachable,
)
from tickwheel.protocol import encode
from tickwheel.server.access.logins import Entrance
from tickwheel.server.access.tls import TlsServer
from tickwheel.server.inbox import InboxProcess
from tickwheel.server.logs import Log, LogRateLimit, configure
from tickwheel.server.metrics.observed import probe_loop
from tickwheel.server.outbound import Outbound
from tickwheel.server.roles import Roles, check_folders, readiness, status_map
from tickwheel.server.settings import Settings, split_address
from tickwheel.server.shard.operations import Operations, StandbyOperations
from tickwheel.server.tcp.listener import Listener, value_bytes
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.clock import Sources
    from tickwheel.server.companion import Companion
    from tickwheel.server.fleet.board import Member
    from tickwheel.server.http.api import Api
    from tickwheel.server.http.app import Http
    from tickwheel.server.metrics.exposition import Exposition
    from tickwheel.server.metrics.otlp import OtlpMetrics
    from tickwheel.server.shard.callers import Principal
    from tickwheel.server.shard.shard import Shard

    MakeTls = Callable[[socket.socket, Callable[[], asyncio.Protocol], bytes], TlsServer]


API_NEEDS = ("msgspec", "offapi")
"""Modules that the HTTP API needs in addition to those that serve health and metrics."""
M_ARENA_MAX = -8
"""Parameter of glibc's ``mallopt`` for the number of heaps."""
INSIDE_URL = "inside:"
"""URL of a daemon that is embedded in a program; other processes cannot connect to it."""
GOODBYE_WAIT_S = 1.0
"""Seconds after GOODBYE in which clients can still send frames."""
HANDOVER_WAIT_S = 0.03
"""The same on a node, in seconds, because another daemon waits for the shard. Clients answer
GOODBYE within a millisecond and resend later frames to the shard's next daemon."""


class Daemon:
    """One daemon. Call ``start``, then ``wait``, which returns when the daemon should stop, and
    then ``stop``."""

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        is_embedded: bool = False,
        sources: Sources | None = None,
        member: Member | None = None,
    ) -> None:
        """``is_embedded``: it runs inside another program and does not listen; ``listener`` makes
        its connections. ``sources`` replace the machine's clocks. ``member`` connects the daemon to
        its node. Raise StoreUnusable or BadRequest for unusable settings."""
        self.settings = settings
        self.member = member
        self._is_embedded = is_embedded
        self.log = log
        self.url: str | None = None
        self.draining = False
        self.started_mono_s = time.monotonic()
        self.roles: Roles = Roles(
            settings,
            log,
            on_shard=self._serve_shard,
            on_role_change=self._role_changed,
            on_deposed=self._deposed,
            on_abort=self._abort,
            on_lease_change=lambda held: self.listener.set_lease(held=held),
            status=lambda: status_map(self),
            sources=sources,
            has_process=not is_embedded,
            member=member,
        )
        self._standby = StandbyOperations(
            settings,
            settings.limits(),
            self.roles.clock,
            active=lambda: self.roles.other_leader,
            status=lambda: status_map(self),
            on_event=self.roles.on_event,
            directory=member,
        )
        roles = self.roles
        ports = ("listen", "http")
        self._entrance = Entrance(settings, roles.clock, roles.on_event, roles.observed, ports)
        self._logins = self._entrance.logins
        is_release_near = None if member is None else member.is_release_near
        self.listener = Listener(self._standby, self._logins, is_release_near)
        self.outbound: Outbound | None = None
        if not is_embedded:
            self.outbound = Outbound(
                settings,
                self._logins,
                self.roles,
                url=lambda: self.url,
                # A shard of a node can have moved by the time of a callback.
                get_callback_url=lambda: self.roles.http_url if member is None else member.http,
                connection=self.listener,
            )
        self.inbox: InboxProcess | None = None
        if settings.inbox is not None and not is_embedded:
            self.inbox = InboxProcess(
                settings.inbox, self._logins, roles, url=lambda: self.url, connection=self.listener
            )
        self._api: Api | None = None
        self._http: Http | None = None
        self._exposition: Exposition | None = None
        self._otlp: OtlpMetrics | None = None
        self._probe: asyncio.Task[None] | None = None
        self._server: asyncio.Server | TlsServer | None = None
        self._running: asyncio.Task[None] | None = None
        self._stop_requested = asyncio.Event()

    # --- lifecycle -------------------------------------------------------------------------

    async def start(self) -> None:
        """Return once the daemon is active or a standby. Raise StoreError, BadRequest for invalid
        files, or OSError if an address is in use."""
        settings, roles = self.settings, self.roles
        check_folders(settings)
        await self._entrance.start()
        if settings.http is not None:
            await self._start_http(*split_address(settings.http, "http"))
        if settings.http or settings.history_dir or settings.otlp_endpoint:
            self._probe = asyncio.create_task(probe_loop(roles.observed))
        if self._is_embedded:
            self.url = INSIDE_URL
            await roles.begin()
        else:
            await self._begin_to_listen()
        assert self.url is not None, "the listener is bound"
        self.log.info("serving", url=self.url, http=self._http and self._http.url)
        if settings.ready_file is not None:
            http = self._http.url if self._http is not None else None
            write_ready_file(Path(settings.ready_file), self.url, http)
        self._start_otlp()
        self._running = asyncio.create_task(roles.run())
        self._entrance.watch(self._principals, self._dismiss)

    def _start_otlp(self) -> None:
        """Begin to export metrics to the OpenTelemetry endpoint, if one is configured."""
        if self.roles.exports is None:
            return
        from tickwheel.server.metrics.otlp import OtlpMetrics

        exposition, interval_s = self._expose(), self.settings.otlp_interval_s
        self._otlp = OtlpMetrics(exposition, self.roles.exports, self.roles.clock, interval_s)
        self._otlp.start()

    def _expose(self) -> Exposition:
        """Return the metrics, created on first use."""
        from tickwheel.server.metrics.exposition import Exposition

        if self._exposition is None:
            self._exposition = Exposition(self)
            self.roles.observed.ended = self._exposition.detach
            if self.roles.shard is not None:
                self._exposition.attach(self.roles.shard.core)
        return self._exposition

    async def _begin_to_listen(self) -> None:
        settings, roles = self.settings, self.roles
        listener = bind(settings.listen)
        try:
            self.url = url_of(listener, "tls" if settings.speaks_tls("listen") else "tcp")
            roles.address = settings.advertise or self.url
            if not roles.shared:
                await roles.begin()
            self._server = await listen(
                listener, self.listener, settings, self._entrance.tls_server
            )
            if roles.shared:
                # Until this daemon leads, it tells clients the address of the active daemon.
                await roles.begin()
        except BaseException:
            listener.close()
            raise

    async def _start_http(self, host: str, port: int) -> None:
        # The module is imported only if there is an HTTP port.
        from tickwheel.server.http.app import Http

        exposition = self._expose()
        self._http = Http(
            host,
            port,
            self._readiness,
            exposition.render,
            connections_max=self.settings.http_connections_max,
            idle_s=self.settings.http_idle_timeout_s,
            keep_alive_s=self.settings.heartbeat_interval_s,
            api=self._make_api(),
            tls=self._entrance.tls_server if self.settings.speaks_tls("http") else None,
            names=None if self._logins.are_needed else self.settings.http_names,
        )
        await self._http.start()
        assert self._http.url is not None, "the server has started"
        self.roles.http_url = self.settings.http_for_others(self._http.url)

    async def _readiness(self) -> tuple[bool, dict[str, Any]]:
        return readiness(self)

    def _make_api(self) -> Api | None:
        """Return the HTTP API, or None if the extra ``http`` is not installed."""
        missing = [name for name in API_NEEDS if find_spec(name) is None]
        if missing:
            self.log.info(
                "no_http_api",
                detail=f"not installed: {', '.join(missing)}; run pip install 'tickwheel[http]'",
            )
            return None
        from tickwheel.server.http.api import Api

        self._api = Api(self.settings, self._standby, self._logins, self.roles.observed)
        return self._api

    @property
    def connection_count(self) -> int:
        return len(self.listener.connections)

    def ask_to_stop(self) -> None:
        """Ask the daemon to stop. A signal handler calls this."""
        self._stop_requested.set()
        self.roles.give_up()

    @property
    def shall_stop(self) -> bool:
        return self._stop_requested.is_set()

    def has_given_up(self, error: BaseException) -> bool:
        """Return whether ``start`` ended because the daemon was asked to stop while it waited for
        its store, which is a clean stop."""
        return isinstance(error, StoreUnreachable) and self.shall_stop

    def accept_clock(self) -> None:
        """Follow the wall clock, on the signal of an operator."""
        self._logins.note_signal("accept_clock")
        self.roles.accept_clock()

    async def wait(self) -> None:
        """Wait until ``ask_to_stop``. Raise the error that must end the daemon."""
        assert self._running is not None, "the daemon was not started"
        asked = asyncio.ensure_future(self._stop_requested.wait())
        futures: set[asyncio.Future[Any]] = {asked, self._running}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Drain and stop the daemon, which may not have started or may already have failed."""
        self.draining = True
        if self._running is not None:
            await cancel_all([self._running])
        self.listener.end_standby("the daemon is shutting down")
        shard, self.roles.shard = self.roles.shard, None
        clean = False
        try:
            if shard is not None and not shard.failed.done():
                await self._drain(shard)
                clean = True
        except Fenced as error:
            if not self.roles.shared:
                raise
            self.roles.on_event("deposed", error.message)
        finally:
            await self._close(shard, clean)

    async def _drain(self, shard: Shard) -> None:
        await self._stop_companions()
        shard.draining = True
        if self._server is not None:
            self._server.close()
        if self._api is not None:
            self._api.drain()
        successor = None if self.member is None else self.member.successor
        for connection in self.listener.connections:
            connection.send_goodbye("draining", "the daemon is shutting down", successor)
        shard.pause()
        await self._wait_until_closed()
        timeout_s = self.settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await shard.stop()
        except TimeoutError:
            raise StoreError(
                f"the store did not accept the last batch within {timeout_s} s (drain_timeout_s);"
                " unconfirmed changes are lost"
            ) from None
        if self._api is not None:
            self._api.stop()
        for connection in self.listener.connections:
            connection.close()
        await self._wait_until_closed()

    async def _close(self, shard: Shard | None, clean: bool) -> None:
        if self._server is not None:
            self._server.close()
        await self._stop_companions()
        try:
            await self.roles.close_shard(shard, clean)
        finally:
            await self.roles.close()
            if self._probe is not None:
                self._probe.cancel()
            if self._otlp is not None:
                await self._otlp.stop()
            if self._http is not None:
                await self._http.stop()
            await self._entrance.stop()

    # --- the daemon's own processes ----------------------------------------------------------

    @property
    def _companions(self) -> list[Companion]:
        return [process for process in (self.outbound, self.inbox) if process is not None]

    async def _stop_companions(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._companions))

    # --- connections -------------------------------------------------------------------------

    def _serve_shard(self, shard: Shard) -> None:
        shard.directory = self.member
        operations = Operations(shard, value_bytes)
        self.listener.serve(operations)
        if self._api is not None:
            self._api.serve(operations)
        if self._exposition is not None:
            self._exposition.attach(shard.core)
        if self.outbound is not None:
            self.outbound.serve(shard, operations)
        if self.inbox is not None:
            self.inbox.serve()

    def _role_changed(self, message: str) -> None:
        self.listener.leave_standby(message)

    def _deposed(self) -> None:
        for process in self._companions:
            process.stand_by()
        self.listener.stand_by()
        if self._api is not None:
            self._api.stand_by()
        self._logins.note_unanswered()

    def _abort(self) -> None:
        for process in self._companions:
            process.stand_by()
        self.listener.abort()
        if self._api is not None:
            self._api.stand_by()

    def _principals(self) -> list[Principal]:
        """Return the principals that are connected."""
        principals = [connection.caller.principal for connection in self.listener.connections]
        return principals + (self._api.principals if self._api is not None else [])

    def _dismiss(self) -> None:
        self.listener.dismiss()
        if self._api is not None:
            self._api.dismiss()

    async def _wait_until_closed(self) -> None:
        wait_s = GOODBYE_WAIT_S if self.member is None else HANDOVER_WAIT_S
        deadline = time.monotonic() + wait_s
        while self.listener.connections:  # polling suffices for such a short wait
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(0.01)


def explain(error: BaseException) -> str:
    """Return one line that tells an operator why the daemon ended."""
    if isinstance(error, StoreBroken) and not isinstance(error, StoreForgot):
        return f"the store failed and cannot be trusted: {error}. The next start recovers."
    if isinstance(error, TickwheelError):
        return f"{error.code}: {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"


BIND_RETRY_S = 0.05


def bind(address: str, wait_s: float = 0.0) -> socket.socket:
    """Return a socket bound to ``HOST:PORT``; wait up to ``wait_s`` while the address is in use.
    Raise OSError on failure. Binding before the recovery reports this immediately."""
    host, port = split_address(address, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until_s = time.monotonic() + wait_s
        while True:
            try:
                listener.bind((host, port))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
                    raise
            time.sleep(BIND_RETRY_S)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


async def listen(
    sock: socket.socket,
    make: Callable[[], asyncio.Protocol],
    settings: Settings,
    tls_server: MakeTls,
) -> asyncio.Server | TlsServer:
    """Begin to accept connections, for which ``make`` creates the protocols. ``tls_server`` creates
    the server that accepts TLS connections."""
    if not settings.speaks_tls("listen"):
        return await asyncio.get_running_loop().create_server(make, sock=sock, backlog=1024)
    message = "this port requires TLS: use tls://"
    plain = encode((int(FrameType.ERROR), 0, TlsRequired.code, message))
    server = tls_server(sock, make, plain)
    server.start()
    return server


def url_of(listener: socket.socket, scheme: str) -> str:
    """Return ``SCHEME://HOST:PORT`` with the bound port of the listener."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def write_ready_file(path: Path, url: str, http: str | None, **more: object) -> None:
    """Write the ready file atomically."""
    fields = {"url": url, "http": http, "pid": os.getpid(), **more}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(fields) + "\n")
    temporary.replace(path)


SWITCH_INTERVAL_S = 0.000_1
"""Maximum seconds that a store thread keeps the interpreter while a task is due."""
FILES_RESERVED = 64
"""Descriptors reserved for the store, backups, history, logs and the event loop."""
NO_FILES_QUIET_S = 60.0
HTTP_FILES_MIN = 64
"""Minimum descriptors of the HTTP server, which otherwise gets a sixteenth of all."""
HTTP_FILES_EXTRA = 16
"""Descriptors of the HTTP server for health checks while all its other connections are busy."""


def run(
    settings: Settings,
    on_start: Callable[[], None] = lambda: None,
    member: Member | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Return 0 after a clean stop, or 1 after an error. ``on_start``
    is called once the daemon is active or a standby. ``member`` connects the daemon to its node."""
    log = configure(settings.log_format, settings.log_level, settings.node)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(100_000, 50, 1_000)
    use_one_arena()
    settings = within_file_limit(settings, log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, log, on_start, member))


async def _serve(
    settings: Settings, log: Log, on_start: Callable[[], None], member: Member | None
) -> int:
    daemon: Daemon | None = None
    code = 0
    try:
        daemon = Daemon(settings, log, member=member)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors(log, loop.time))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.ask_to_stop)
        loop.add_signal_handler(signal.SIGUSR1, daemon.accept_clock)
        await daemon.start()
        on_start()
        await daemon.wait()
        log.info("stopping")
    except Exception as error:
        code = 0 if daemon is not None and daemon.has_given_up(error) else _log_failure(log, error)
    try:
        if daemon is not None:
            await daemon.stop()
    except Exception as error:
        code = _log_failure(log, error)
    if code == 0:
        log.info("stopped")
    return code


class LoopErrors:
    """Handles errors of the event loop. When no file descriptor is free, asyncio cannot accept
    connections and logs this with a traceback a thousand times a second. This handler logs it at
    most once in ``NO_FILES_QUIET_S``."""

    def __init__(self, log: Log, time_s: Callable[[], float]) -> None:
        self._log = log
        self._time_s = time_s
        self._no_files = LogRateLimit(1, NO_FILES_QUIET_S)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._no_files.note(self._time_s()) is not None:
            self._log.warning("no_file_descriptors", detail=f"{context.get('message')}: {error}")


def _log_failure(log: Log, error: Exception) -> int:
    expected = isinstance(error, (TickwheelError, OSError))
    log.error("failed", detail=explain(error), exc_info=None if expected else error)
    return 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def use_one_arena() -> None:
    """Make all threads share one heap, if the C library is glibc and ``MALLOC_ARENA_MAX`` is not
    set.

    With a heap for each thread, the event loop could not reuse memory that the store's threads have
    freed, about a tenth of the daemon's memory in the long run. Contention for the shared heap does
    not matter in a process with a global interpreter lock.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def within_file_limit(settings: Settings, log: Log) -> Settings:
    """Return the settings, with connection limits reduced to the allowed file descriptors, because
    connections must never exhaust the descriptors that the store needs."""
    http = 0 if settings.http is None else settings.http_connections_max + HTTP_FILES_EXTRA
    handshakes = settings.tls_handshakes_max * sum(map(settings.speaks_tls, ("listen", "http")))
    reserved = FILES_RESERVED + handshakes
    wanted = settings.connections_max + http + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, wanted) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    http = min(http, max(HTTP_FILES_MIN, soft // 16))
    reduced = {"connections_max": max(1, min(settings.connections_max, soft - http - reserved))}
    if http:
        reduced["http_connections_max"] = max(1, http - HTTP_FILES_EXTRA)
    changes = [f"{name} is {reduced[name]}, not {getattr(settings, name)}" for name in reduced]
    log.warning(
        "few_file_descriptors",
        detail=f"the limit is {soft} descriptors, of which the daemon reserves {reserved}:"
        f" {', '.join(changes)}",
    )
    return settings.model_copy(update=reduced)
