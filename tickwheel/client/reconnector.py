"""One connection to the active daemon, reopened while the client is open.

``Reconnector`` numbers requests, sends HELLO, and lets the sources of frames write once in each
step of the event loop; ``search.py`` finds the daemon. ``Heartbeat`` looks for expired deadlines
and for dead connections. Only HELLO and PING are known here. Invariants:

* Request numbers ascend over all connections. A connection to a standby is never used. While a
  connection is open, no other is tried, except in the next case:
* A daemon reports when its lease has ended and its store does not answer. It knows nothing more, so
  the connection stays open while the client searches for another daemon. It is closed only for a
  daemon with a later epoch, and then handled like one that broke.
* A client of several shards names its shard in HELLO, so that a daemon with another shard answers
  like a standby, with a hint. An older daemon that refuses the option gets a HELLO without it.
* A stopped process and a broken line look alike: nothing arrives. A connection that is quiet for a
  heartbeat is therefore sent a PING, which a daemon answers even while its store is stuck. Anything
  that arrives counts as an answer. A connection from which nothing arrives for 2.5 heartbeats is
  closed (sooner if ``send_timeout_s`` is below a heartbeat and a request waits). The time in which
  a slow line is still sending the PING, or bytes before it, does not count. Immediately
  after the event loop was blocked, no connection is closed: answers may be unread.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.client.connection import (
    LOGGER,
    Address,
    Asked,
    Connection,
    Deliver,
    Ended,
    Open,
    Question,
    explain,
    hello,
)
from tickwheel.client.search import (
    Elsewhere,
    Finder,
    Greeted,
    ShardAddresses,
    Silent,
    address_named,
    redirect_error,
)
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    Unreachable,
)
from tickwheel.limits import DELAY_LEVELS, Limits, levels_of_wire, parse_delay_levels
from tickwheel.protocol import encode

NEWER_OPTIONS = "lease", "shard", "heartbeat"
"""Options of HELLO that older daemons refuse, the newest first."""
STEADY_S = 1.0
"""Seconds after which a connection counts as good: the next pause is then the shortest again."""


@dataclass(slots=True)
class ConnectOptions:
    """Options of a client's connections."""

    addresses: Sequence[Address]
    open_to: Open
    """Opens a connection to an address; the test wheel connects to a daemon in the same process."""
    tls: ssl.SSLContext | None
    """The context for every address; None: plain TCP."""
    send_timeout_s: float
    connect_timeout_s: float
    active_timeout_s: float
    heartbeat_s: float


class Source:
    """A part of the client that writes frames. Each method does nothing unless it is overridden."""

    def up(self) -> None:
        """Handle a new connection, after the old one's requests were marked as lost."""

    def down(self) -> None:
        """Handle the end of the connection, before its requests are marked as lost."""

    def collect(self, connection: Connection) -> None:
        """Write waiting frames, within the connection's limits."""

    def sweep(self, now_s: float) -> None:
        """Fail waiting requests with expired deadlines."""

    def stop(self, error: TickwheelError) -> None:
        """Fail all waiting requests: the client was closed, or could not connect."""


class Reconnector:
    """Keeps one connection open: ``start`` it once, ``stop`` it at the end."""

    def __init__(
        self,
        options: ConnectOptions,
        shard_addresses: ShardAddresses,
        shard: int,
        hello_options: dict[str, Any],
        *,
        deliver: Deliver,
        ended: Ended,
        asked: Asked | None = None,
        greeted: Callable[[Limits], None],
    ) -> None:
        self._tls, self._open_to = options.tls, options.open_to
        self.loop = asyncio.get_running_loop()
        self.limits = Limits()
        self.delay_levels_ms: Sequence[int] = parse_delay_levels(DELAY_LEVELS)
        """The daemon's delay levels in ms; older daemons have none and refuse tasks with a
        level."""
        self.info: dict[str, Any] = {}
        """The daemon's last answer to HELLO."""
        self.connection: Connection | None = None
        self.sources: list[Source] = []
        self.trouble: TickwheelError = Unreachable("not connected yet")
        """The error of the last attempt or connection."""
        self._connect_timeout_s = options.connect_timeout_s
        self._active_timeout_s = max(options.active_timeout_s, options.connect_timeout_s)
        self._finder = Finder(
            shard_addresses, shard, self._greet, self._choose, self._connect_timeout_s
        )
        words = {"heartbeat": True, "lease": True}
        self._hello_options = {"v": PROTOCOL_VERSION, **words, **hello_options}
        self.follow(shard_addresses, shard)
        self._refused: dict[Address, set[str]] = {}
        """Options of HELLO that the daemon at an address refused."""
        self._deliver = deliver
        self._ended = ended
        self._asked = asked
        self._greeted = greeted
        self._number = 0
        self._flushing = False
        self._watch = Heartbeat(self, options.send_timeout_s, options.heartbeat_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._searching: asyncio.Task[None] | None = None
        """The search for the next daemon while the connected daemon's lease has ended."""
        self._newer: tuple[Greeted, Address | None] | None = None
        """The daemon that this search found, and its address."""

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait for the first connection. Raise Unreachable, NotActive, or the daemon's refusal."""
        self._runner = self.loop.create_task(self._run())
        waited_s = self._connect_timeout_s
        await self._wait_connected(waited_s)
        if self.connection is None and not self._runner.done() and self._finder.any_redirect:
            # Daemons answer: one of them may lead soon.
            rest_s, waited_s = self._active_timeout_s - waited_s, self._active_timeout_s
            await self._wait_connected(rest_s)
        if self._runner.done():
            self._runner.result()
        if self.connection is None:
            raise self.unreachable(waited_s)
        self._watch.start()

    async def _wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a connection, the search has ended, or the time is over. A connection
        that ends before this coroutine resumes does not count."""
        until_s = self.loop.time() + timeout_s
        ends = () if self._runner is None else (self._runner,)
        while self.connection is None and not any(task.done() for task in ends):
            rest_s = until_s - self.loop.time()
            if rest_s <= 0:
                return
            up = self.loop.create_task(self._up.wait())
            try:
                await asyncio.wait((*ends, up), timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                up.cancel()

    async def stop(self, error: TickwheelError) -> None:
        """Close the connection; all waiting requests fail with ``error``."""
        self._watch.stop()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        tasks = [task for task in (self._runner, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        if connection is not None:
            connection.give_up_requests()
        for source in self.sources:
            source.stop(error)
        if self._newer is not None:
            self._newer[0].connection.abort(error)
        # A failed runner was already reported by ``start``.
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            await connection.finish(error)

    def follow(self, shard_addresses: ShardAddresses, shard: int) -> None:
        """Connect only to this shard from now on."""
        self._finder.shard_addresses, self._finder.shard = shard_addresses, shard
        if shard_addresses.is_many:
            self._hello_options["shard"] = shard

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends at the latest with the reconnector."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def omit_pauses(self) -> None:
        """Do not pause between two attempts to connect."""
        self._finder.backoff_s = 0.0

    # --- for sources ----------------------------------------------------------------------------

    def number_from(self, first: int) -> None:
        """Number the next frames from ``first``."""
        self._number = first - 1

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def wake(self) -> None:
        """Let all sources write in the next step of the loop."""
        if not self._flushing:
            self.check_loop()
            self._flushing = True
            self.loop.call_soon(self._flush)

    def check_loop(self) -> None:
        """Raise ClientClosed if the event loop has ended."""
        if self.loop.is_closed():
            raise ClientClosed("the client's event loop has ended; create a client in each loop")

    def _flush(self) -> None:
        self._flushing = False
        connection = self.connection
        if connection is None or connection.ending:
            return  # the next connection sends the frames
        for source in self.sources:
            source.collect(connection)
        connection.flush()

    @property
    def is_asking(self) -> bool:
        """Whether a connection is expected, frames are about to be written, or a prompt answer is
        pending."""
        connection = self.connection
        if connection is None:
            return self._runner is not None and not self._runner.done()
        return self._flushing or any(request.prompt for request in connection.requests.values())

    def unreachable(self, waited_s: float) -> TickwheelError:
        """Return the error for no connection: Unreachable, or NotActive if only standbys answer."""
        return self._finder.failure(waited_s)

    def overdue(self, what: str, waited_s: float, *, written: bool) -> TickwheelError:
        """Return the error for no answer: never sent, connection broken, or silence."""
        if not written:
            return self.unreachable(waited_s)
        if self.connection is None:
            return ConnectionLost(
                f"{what} was sent, but the connection broke and no answer came within"
                f" {waited_s:g} s: {self.trouble.message}"
            )
        return SendTimeout(f"{what} was sent but not answered within {waited_s:g} s")

    async def wait_up(self, timeout_s: float) -> Connection:
        """Return the connection once there is one. Raise Unreachable or NotActive."""
        await self._wait_connected(timeout_s)
        if self.connection is None:
            raise self.unreachable(timeout_s)
        return self.connection

    # --- connecting -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            connection = self._take_newer() or await self._finder.find()
            began_s = self.loop.time()
            LOGGER.info("connected to %s", connection.peer)
            self._connected(connection)
            self.trouble = await asyncio.shield(connection.closed)
            LOGGER.info("connection ended: %s: %s", self.trouble.code, self.trouble.message)
            steady = self.loop.time() - began_s >= STEADY_S
            successor = address_named(connection.successor, secure=self._tls is not None)
            self._finder.ended(
                self.trouble, silent=connection.silent, steady=steady, successor=successor
            )
            self._disconnected(connection)
            if not steady and self._newer is None:
                await self._finder.pause()

    def _connected(self, connection: Connection) -> None:
        self.connection = connection
        self._refused.clear()  # another daemon may listen there by the next attempt
        finder = self._finder
        finder.shard_addresses.connected_at(finder.shard, finder.at, str(self.info.get("node")))
        self._lease_changed(connection)
        self._up.set()
        for source in self.sources:
            source.up()
        self.wake()

    def _disconnected(self, connection: Connection) -> None:
        self.connection = None
        self._up.clear()
        self._end_search()
        self._finder.shard_addresses.connected_at(self._finder.shard, None)
        for source in self.sources:
            source.down()
        connection.give_up_requests()

    # --- another daemon beside an open connection -----------------------------------------------

    def _lease_changed(self, connection: Connection) -> None:
        """Handle a report of the daemon's lease. While the lease has ended, another daemon may
        serve; until that is found, the connection stays open."""
        if connection is not self.connection:
            return  # an attempt: ``_connected`` calls this again
        if connection.is_leased:
            if self._searching is not None:
                LOGGER.info("%s holds its lease again", connection.peer)
            self._end_search()
        elif self._searching is None:
            LOGGER.info(
                "%s cannot reach its store, and its lease has ended: searching for another daemon",
                connection.peer,
            )
            self._finder.shard_addresses.unleased.add(self._finder.shard)
            self._searching = self.spawn(self._search_beside(connection))

    def _end_search(self) -> None:
        searching, self._searching = self._searching, None
        if searching is not None:
            searching.cancel()
        self._finder.shard_addresses.unleased.discard(self._finder.shard)

    async def _search_beside(self, connection: Connection) -> None:
        """Search for another daemon that serves the shard, and close the connection for it."""
        newer: list[Greeted] = []

        def choose(greeted: Greeted) -> None:
            self._check_newer(greeted)
            newer.append(greeted)

        own = self._finder
        finder = Finder(
            own.shard_addresses, own.shard, self._greet, choose, self._connect_timeout_s,
            beside=own.at,
        )  # fmt: skip
        await finder.find()
        self._searching, self._newer = None, (newer[-1], finder.at)
        connection.abort(ConnectionLost("another daemon serves the shard now"))

    def _check_newer(self, greeted: Greeted) -> None:
        """Raise Elsewhere if a daemon does not lead in a later epoch than the connected one: it may
        be the same daemon, or may have been stopped for a while."""
        epoch, own = greeted.info.get("epoch"), self.info.get("epoch")
        if type(epoch) is int and type(own) is int and epoch > own:
            return
        error = Elsewhere(f"its epoch {epoch} must be above {own}, the connected daemon's", None)
        greeted.connection.abort(error)
        raise error

    def _take_newer(self) -> Connection | None:
        """Return the connection to the daemon that was found beside the last connection."""
        newer, self._newer = self._newer, None
        if newer is None:
            return None
        greeted, self._finder.at = newer
        try:
            self._choose(greeted)
        except TickwheelError:
            return None
        return greeted.connection

    # --- HELLO ----------------------------------------------------------------------------------

    async def _greet(self, address: Address, timeout_s: float) -> Greeted:
        """Try one address, concurrently with others. Raise a TickwheelError, including Standby and
        Silent."""
        connection = Connection(
            self._deliver, self.wake, self._ended, self._asked, self._lease_changed
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._open_to(connection, address, self._tls)
                return Greeted(connection, await self._say_hello(connection, address))
        except TimeoutError:
            error: TickwheelError = Silent(f"did not answer within {timeout_s:g} s")
        except (OSError, UnicodeError) as problem:  # UnicodeError: invalid host name
            error = explain(problem)
        except TickwheelError as problem:
            error = problem
        except BaseException:
            connection.abort(ClientClosed())
            raise
        self.trouble = error
        connection.abort(error)
        raise error

    def _choose(self, greeted: Greeted) -> None:
        """Accept this daemon. Raise ConnectionLost if it lacks the shard that the client began
        with."""
        connection, info = greeted
        self.limits = Limits.from_wire(info.get("limits"))
        levels_ms = info.get("delay_levels_ms")
        if levels_ms is not None:
            self.delay_levels_ms = levels_of_wire(levels_ms)
        self.info = info
        try:
            self._greeted(self.limits)
        except TickwheelError as error:
            self.trouble = error
            connection.abort(error)
            raise

    def _unanswered(self, error: TickwheelError) -> TickwheelError:
        if self._tls is None or type(error) is not ConnectionLost:
            return error
        # With TLS 1.3 a daemon that refuses a certificate can only hang up.
        return ConnectionLost(
            f"{error.message}, before HELLO: does the daemon accept the client's certificate?"
        )

    async def _say_hello(self, connection: Connection, address: Address) -> dict[str, Any]:
        """Return the answer of an active daemon that has the shard. Raise a TickwheelError."""
        number = self.next_number()
        refused = self._refused.get(address, ())
        options = {name: v for name, v in self._hello_options.items() if name not in refused}
        data = hello(number, options, self.limits.frame_bytes_max)
        try:
            info = await connection.answer_to(number, data)
        except ConnectionLost as error:
            raise self._unanswered(error) from None
        except BadRequest as error:
            # An older daemon refuses a HELLO with unknown options.
            word = next((word for word in NEWER_OPTIONS if word in options), None)
            if word is None:
                raise
            if word == "heartbeat":
                self._hello_options.pop(word)
            else:
                self._refused.setdefault(address, set()).add(word)
            message = f"the daemon refused the connection: {error.message}; trying without {word}"
            raise ConnectionLost(message) from None
        if not isinstance(info, dict):
            raise ProtocolError("HELLO's answer is not a map")
        shard_addresses = self._finder.shard_addresses
        shard_addresses.learn(info)
        shard = self._finder.shard if shard_addresses.is_many else None
        not_active = redirect_error(info, secure=self._tls is not None, shard=shard)
        if not_active is not None:
            raise not_active
        return info


HEARTBEAT_S = 1.0
PATIENCE_HEARTBEATS = 1.5
"""Heartbeats that a PING may remain unanswered while nothing else arrives."""
SWEEPS_PER_TIMEOUT = 4
SWEEP_S_MAX = 0.25
BLOCKED_S = 0.5
"""Delay of a sweep in seconds that shows that the event loop was blocked."""


class Heartbeat:
    """The timer that pings quiet daemons; ``start`` and ``stop`` can be repeated."""

    def __init__(self, reconnector: Reconnector, send_timeout_s: float, heartbeat_s: float) -> None:
        self._reconnector = reconnector
        self._heartbeat_s = heartbeat_s
        self._shortest_s = min(heartbeat_s, send_timeout_s)
        """Seconds of quiet that are allowed while an answer is pending."""
        self._patience_s = min(PATIENCE_HEARTBEATS * heartbeat_s, send_timeout_s)
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pinged: Connection | None = None
        """The quiet connection that was pinged, if it has been silent since ``_pinged_s``."""
        self._pinged_s = 0.0
        self._moved_s = 0.0
        """When bytes up to the PING's end were last sent."""
        self._ping_end = self._sent = 0
        """The connection's bytes up to the PING's end, and its bytes sent so far."""

    def start(self) -> None:
        self.stop()
        loop = self._reconnector.loop
        self._due_s = loop.time() + min(SWEEP_S_MAX, self._shortest_s / SWEEPS_PER_TIMEOUT)
        self._timer = loop.call_at(self._due_s, self._sweep)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self._reconnector.loop.time()
        late_s = now_s - self._due_s
        self.start()
        if late_s >= min(BLOCKED_S, self._patience_s / 2):
            return
        connection = self._reconnector.connection
        if connection is not None:
            self._expire(connection, now_s)
            self._check_alive(connection, now_s)
        for source in self._reconnector.sources:
            source.sweep(now_s)

    @staticmethod
    def _expire(connection: Connection, now_s: float) -> None:
        over = [n for n, r in connection.requests.items() if r.deadline_s <= now_s]
        for number in over:
            connection.requests.pop(number).expired()

    def _check_alive(self, connection: Connection, now_s: float) -> None:
        """Ping a quiet connection, and close it if still nothing arrives."""
        if self._pinged is connection and connection.heard_s < self._pinged_s:
            sent = connection.sent_bytes
            if self._sent < self._ping_end and sent > self._sent:
                self._moved_s = now_s
            self._sent = sent
            if now_s - self._moved_s >= self._patience_s:
                self._give_up(connection, now_s)
            return
        self._pinged = None
        since_s = next((r.sent_s for r in connection.requests.values() if r.prompt), None)
        if since_s is not None:
            quiet_s, limit_s = now_s - max(since_s, connection.heard_s), self._shortest_s
        else:
            quiet_s, limit_s = now_s - connection.heard_s, self._heartbeat_s
        if quiet_s >= limit_s:
            self._ping(connection, now_s)

    def _give_up(self, connection: Connection, now_s: float) -> None:
        connection.silent = True
        quiet_s = now_s - connection.heard_s
        connection.abort(
            ConnectionLost(f"nothing arrived for {quiet_s:.1f} s, not even an answer to PING")
        )

    def _ping(self, connection: Connection, now_s: float) -> None:
        number = self._reconnector.next_number()
        # Nobody waits for the answer: only the arrival of some data counts.
        connection.ask(number, Question(), encode((int(FrameType.PING), number)))
        connection.flush()
        self._pinged, self._pinged_s, self._moved_s = connection, now_s, now_s
        self._ping_end, self._sent = connection.written_bytes, connection.sent_bytes
