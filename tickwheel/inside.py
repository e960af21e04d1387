"""A daemon that runs in a program: ``embedded``, and the base of the test wheel.

It opens no port or socket, and only the store uses threads.

``End`` is one end of a connection within a process. The other end reads its data in the next step
of the event loop. As with TCP, bytes arrive in order or not at all. Bytes wait while the peer does
not read, and the writer is paused above a limit. Data that was written before ``close`` arrives;
data that still waits when ``abort`` is called is lost.

The guarantees are those of a separate daemon, because the code is the same (lock file, epochs, a
sync before each answer). A failed daemon never ends the program; every later call raises its error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Self, cast

from tickwheel import sync
from tickwheel.client import Client
from tickwheel.client.delivery import mark_retrieved
from tickwheel.client.wire import LinkedClient
from tickwheel.errors import BadRequest, TickwheelError, module_needs_extra
from tickwheel.persistence.contract import StoreBroken, StoreUnusable
from tickwheel.waiting import finish_despite_cancellation

with module_needs_extra("tickwheel.embedded", "server"):
    from tickwheel.server.daemon import Daemon
    from tickwheel.server.settings import Settings

if TYPE_CHECKING:
    import ssl

    from tickwheel.client.connection import Address, Connection
    from tickwheel.clock import Sources
    from tickwheel.persistence.contract import Leader, Store
    from tickwheel.server.logs import Log
    from tickwheel.server.shard.shard import Shard

__all__ = ["Embedded", "StoreBroken", "embedded"]

LOGGER = logging.getLogger("tickwheel.inside")
NOWHERE = "tcp://127.0.0.1"
"""A placeholder address of clients that connect through ``open_to``."""

# --- connections ---------------------------------------------------------------------------------

HIGH_BYTES = 64 * 1024


def join(
    loop: asyncio.AbstractEventLoop, here: asyncio.Protocol, there: asyncio.Protocol, name: str
) -> tuple[End, End]:
    """Connect two protocols, and return both ends. Each reports ``name`` as its peer's address."""
    first, second = End(loop, here, name), End(loop, there, name)
    first.peer, second.peer = second, first
    there.connection_made(second)
    here.connection_made(first)
    return first, second


class End(asyncio.Transport):
    """One end of a connection, which is the transport of its protocol."""

    peer: End

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, name: str
    ) -> None:
        super().__init__({"peername": (name, 0)})
        self._loop = loop
        self._protocol: asyncio.Protocol = protocol
        self._waiting = bytearray()
        self._high_bytes = HIGH_BYTES
        self._is_reading = True
        self._is_full = self._is_moving = self._is_closing = False
        self.is_over = False
        """Whether ``connection_lost`` was called."""
        self.is_lost: Callable[[bytes], bool] | None = None
        """Returns whether the data to write is lost together with the connection."""

    # --- asyncio.Transport ---------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closing or self.is_over:
            return
        if self.is_lost is not None and self.is_lost(bytes(data)):
            self.abort()
            return
        self._waiting += data
        if len(self._waiting) > self._high_bytes and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()
        self._move_soon()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._waiting)

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.peer._move_soon()

    def is_closing(self) -> bool:
        return self._is_closing or self.is_over

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._move_soon()

    def abort(self) -> None:
        self._is_closing = True
        self._waiting.clear()
        self._move_soon()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    # --- transfer to the other end --------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether data or the end of the connection is about to be transferred."""
        return self._is_moving

    def _move_soon(self) -> None:
        if not (self._is_moving or self.is_over):
            self._is_moving = True
            self._loop.call_soon(self._move)

    def _move(self) -> None:
        self._is_moving = False
        if self._waiting and self.peer._is_reading and not self.peer.is_over:
            data = bytes(self._waiting)
            self._waiting.clear()
            self.peer._protocol.data_received(data)
            if self._is_full:
                self._is_full = False
                self._protocol.resume_writing()
        if self._is_closing and not self._waiting:
            self._end()
            self.peer._end()

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = self._is_closing = True
        self._waiting.clear()
        self._protocol.connection_lost(None)


# --- the daemon ----------------------------------------------------------------------------------


class InProcessDaemon:
    """Runs one daemon at a time in this process and event loop.

    ``connect_client`` connects a client, and starts the first daemon if necessary."""

    def __init__(self, settings: Settings, sources: Sources | None = None) -> None:
        """``sources`` are the time sources of the daemons' clock."""
        self._settings, self._sources = settings, sources
        self.daemon: Daemon | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the daemon."""
        self.first_store: Store | None = None
        """The first daemon's store; None for the store that the settings name."""
        self.is_up = asyncio.Event()
        self.ends: list[End] = []
        """Both ends of each connection."""
        self.on_connection: Callable[[End], None] = lambda end: None
        """Is called with the daemon's end of a new connection."""
        self.on_failure: Callable[[TickwheelError], None] = lambda error: None
        """Is called after a failure of the daemon."""
        self._starting: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[Shard] | None = None
        """Opens a daemon. It continues after a cancelled start, because a thread opens the
        store."""
        self._watching: asyncio.Task[None] | None = None
        self._numbers = count(1)

    async def begin(self) -> None:
        """Start the first daemon unless it was already started. Raise StoreError if it fails."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.start(self.first_store))
        await asyncio.shield(self._starting)

    async def start(self, store: Store | None = None) -> None:
        """Start a daemon on ``store``; None is the settings' store. Return once all tasks are
        loaded. Raise StoreError if it fails."""
        daemon = Daemon(
            self._settings, cast("Log", _Log()), is_embedded=True, sources=self._sources
        )
        if store is not None:
            daemon.roles.store = store
        self._opening = asyncio.ensure_future(self._open(daemon))
        shard = await asyncio.shield(self._opening)
        self._watching = asyncio.ensure_future(self._watch(daemon))
        loaded = asyncio.ensure_future(shard.loaded.wait())
        try:
            await asyncio.wait((loaded, shard.loading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loaded.cancel()
        if not shard.loaded.is_set():
            if shard.loading.cancelled():
                raise StoreUnusable("the daemon lost the store while reading it; another may lead")
            raise _failure_of(shard.loading.exception())
        self.is_up.set()

    async def _open(self, daemon: Daemon) -> Shard:
        try:
            await daemon.start()
            shard = daemon.roles.shard
            if shard is None:
                raise _not_leading(daemon.roles.leader)
        except BaseException:
            await daemon.stop()
            raise
        self.daemon, self.loop = daemon, asyncio.get_running_loop()
        return shard

    async def _watch(self, daemon: Daemon) -> None:
        """Report a failure of the daemon."""
        try:
            await daemon.wait()
        except Exception as error:
            LOGGER.error("the daemon inside this program has failed: %s", error)
            self.on_failure(_failure_of(error))

    async def stop(self) -> None:
        """Drain and stop the running or starting daemon, if any. Raise the error of its stop."""
        if self._starting is not None:
            self._starting.cancel()
        for task in (self._starting, self._opening):
            if task is not None:
                await asyncio.wait((task,))
                mark_retrieved(task)
        daemon, self.daemon = self.daemon, None
        self.is_up.clear()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        if daemon is not None:
            await daemon.stop()

    async def connect_client(
        self, connection: Connection, address: Address, tls: ssl.SSLContext | None
    ) -> None:
        """Connect a client to the daemon, which is started if necessary; passed as ``open_to``."""
        await self.begin()
        await self.is_up.wait()
        assert self.daemon is not None, "the daemon is up"
        name, loop = f"inside-{next(self._numbers)}", asyncio.get_running_loop()
        here, there = join(loop, connection, self.daemon.listener(), name)
        self.ends = [*(end for end in self.ends if not end.is_over), here, there]
        self.on_connection(there)


def _failure_of(error: BaseException | None) -> TickwheelError:
    """Return the error that tells clients why their daemon has failed."""
    return error if isinstance(error, TickwheelError) else StoreBroken(str(error))


def _not_leading(leader: Leader | None) -> StoreUnusable:
    """Return the error of a daemon that has become a standby."""
    if leader is None:
        return StoreUnusable("the store cannot be taken over; the log (tickwheel.inside) says why")
    return StoreUnusable(f"{leader.owner} at {leader.address} leads this store; stop it first")


class InsideClient(LinkedClient):
    """A client that connects inside the process."""

    def __init__(self, inside: InProcessDaemon, **options: Any) -> None:
        super().__init__(NOWHERE, open_to=inside.connect_client, **options)
        self._inside = inside

    async def connect(self) -> Self:
        """Start the daemon, which takes as long as its store needs, then connect. Raise the error
        of the start."""
        if self.is_new:
            await self._inside.begin()
        return await super().connect()


# --- for programs --------------------------------------------------------------------------------


def embedded(store: str = "sqlite:///tickwheel.db", **settings: Any) -> Embedded:
    """Return a context manager that runs a daemon in this program and yields a connected client.

    ``async with embedded("sqlite:///app.db") as client`` runs it on the current event loop.
    ``with embedded(…) as client`` runs it in a thread, with the synchronous client. ``settings``
    are settings of the daemon (docs/settings.md), such as ``backlog_max=10``. The daemon opens no
    port; only this client can use it. The store stays locked until the context ends. Afterwards
    ``tickwheel serve`` can use the same store.

    Raise StoreUnusable if another daemon uses the store. After a failed write that endangers
    durability, every call raises StoreBroken, and the program continues.
    """
    return Embedded(store, settings)


class Embedded:
    """The context manager of ``embedded``."""

    def __init__(self, store: str, settings: dict[str, Any]) -> None:
        try:
            self._settings = Settings(**{"store": store, **settings})
        except ValueError as error:
            raise BadRequest(f"embedded: {error}") from None
        self._inside: InProcessDaemon | None = None
        self._client: InsideClient | None = None
        self._blocking: _Blocking | None = None
        self._failing: asyncio.Future[None] | None = None
        """The task that reports a failure of the daemon to the client."""

    def _new_client(self) -> InsideClient:
        """Return a new client. Call this on the event loop of the daemon."""
        self._inside = InProcessDaemon(self._settings)
        self._client = client = InsideClient(self._inside)

        def failed(error: TickwheelError) -> None:
            self._failing = asyncio.ensure_future(client.fail(error))

        self._inside.on_failure = failed
        return client

    async def __aenter__(self) -> Client:
        client = self._new_client()
        try:
            return await client.connect()
        except BaseException:
            # Finish even if this is cancelled again, because the store would stay locked.
            await finish_despite_cancellation(self._close())
            raise

    async def __aexit__(self, *_: object) -> None:
        await finish_despite_cancellation(self._close())

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._inside is not None:
            with suppress(StoreBroken):  # calls have already raised it
                await self._inside.stop()

    def __enter__(self) -> sync.Client:
        self._blocking = blocking = _Blocking(self._new_client, self._close)
        try:
            return blocking.connect()
        except BaseException:
            blocking.close()
            raise

    def __exit__(self, *_: object) -> None:
        assert self._blocking is not None, "__enter__ was called first"
        self._blocking.close()


class _Blocking(sync.HostedClient):
    """A synchronous client in whose thread the daemon runs."""

    def __init__(
        self, make: Callable[[], Client], closing: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(make)
        self._closing = closing
        """Closes the asynchronous client and stops the daemon."""

    def close(self, timeout: float | None = None) -> None:
        """Disconnect, stop the daemon, and end the thread. Do nothing if the client is closed."""
        runtime = self.runtime
        try:
            if runtime is not None:
                runtime.run(self._closing)
        finally:
            super().close(timeout)


class _Log:
    """Passes the daemon's log to the logger ``tickwheel.inside``."""

    def __getattr__(self, level: str) -> Callable[..., None]:
        number = logging.getLevelNamesMapping()[level.upper()]

        def write(event: str, **fields: Any) -> None:
            LOGGER.log(number, "%s %s", event, fields)

        return write
