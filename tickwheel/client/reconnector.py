"""One connection to the active daemon, made again for ever while the client is open.

Two parts: ``Reconnector`` numbers requests, says HELLO, and lets the sources of frames write
once in each step of the event loop; where it looks for a daemon is ``search.py``'s. ``Heartbeat``
looks for deadlines that are over and for a connection that has died silently. Knows no frame but
HELLO and PING. Invariants:

* Request numbers ascend over all connections; a connection to a standby never stands; while one
  connection stands no other is tried, but for this:
* A daemon says when its lease is over and its store does not answer. It cannot know more; so the
  connection stays, and another daemon is looked for beside it. Only for one that serves in a later
  epoch is the connection given up, and then all is as after one that broke.
* A client of one of several shards says in HELLO which shard it means, so that a daemon of another
  one answers as a standby does, with a hint; a daemon that refuses to hear that is greeted without.
* A stopped process and a cut line look alike: nothing comes any more. So a connection that was
  quiet for a heartbeat is asked with PING, which a daemon answers even while its store is stuck.
  Anything that comes counts as an answer. A connection from which nothing came for 2.5 heartbeats
  is given up (sooner with a ``send_timeout_s`` below a heartbeat and a request waiting), not
  counting the time in which the PING still moves forward behind other bytes on a slow line.
  Nothing is judged in the moment after the event loop was blocked, when answers may lie unread.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.client.connection import (
    LOGGER,
    Address,
    Asked,
    Connection,
    Deliver,
    Ended,
    Open,
    Request,
    connect,
    explain,
    fail,
    hello,
)
from tickwheel.client.search import (
    Beside,
    Elsewhere,
    Given,
    Greeted,
    Route,
    Search,
    Silent,
    address_named,
    standby,
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

NEWER_WORDS = "lease", "shard", "heartbeat"
"""Options of HELLO that older daemons refuse, the newest first."""
STEADY_S = 1.0
"""After so many seconds a connection was a good one: the next wait is the shortest again."""


class Source(Protocol):
    """A part of the client that writes frames."""

    def up(self) -> None:
        """A new connection stands; requests of the old one were told before that they are lost."""

    def down(self) -> None:
        """The connection has ended; its requests are told next."""

    def collect(self, connection: Connection) -> None:
        """Write waiting frames, as far as they may be written."""

    def sweep(self, now_s: float) -> None:
        """Fail waiting requests whose deadline is over."""

    def stop(self, error: TickwheelError) -> None:
        """Fail all requests that wait: the client was closed, or could not connect."""


class _Hello(Request):
    __slots__ = ("done",)

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, result: Any) -> None:
        self.done.set_result(result)

    def failed(self, error: TickwheelError) -> None:
        fail(self.done, error)


class Reconnector:
    """Keeps one connection up: ``start`` it once, ``stop`` it at the end."""

    def __init__(
        self,
        addresses: Sequence[Address],
        hello_options: dict[str, Any],
        *,
        send_timeout_s: float,
        connect_timeout_s: float,
        active_timeout_s: float,
        heartbeat_s: float,
        deliver: Deliver,
        ended: Ended,
        asked: Asked | None = None,
        greeted: Callable[[Limits], None],
        tls: ssl.SSLContext | None = None,
        open_to: Open = connect,
        route: Route | None = None,
    ) -> None:
        """``tls``: the context for every address; None: plain TCP. ``open_to`` opens a connection
        to an address. ``route``: where the one shard is that this is about; None: there is one
        only, or it is not known yet."""
        self._tls, self._open_to = tls, open_to
        self.loop = asyncio.get_running_loop()
        self.limits = Limits()
        self.delay_levels_ms: Sequence[int] = parse_delay_levels(DELAY_LEVELS)
        """The daemon's delay levels, in ms; older ones know none, and refuse tasks that name
        one."""
        self.info: dict[str, Any] = {}
        """The daemon's answer to the last HELLO."""
        self.connection: Connection | None = None
        self.sources: list[Source] = []
        self.trouble: TickwheelError = Unreachable("not connected yet")
        """Why the last attempt or connection failed."""
        self._search = Search(addresses, self._greet, self._choose, connect_timeout_s)
        words = {"heartbeat": True, "lease": True}
        self._hello_options = {"v": PROTOCOL_VERSION, **words, **hello_options}
        self._refused: dict[Address, set[str]] = {}
        """Options of HELLO that the daemon at an address refused."""
        self._given = Given(addresses)
        self._route: Route | None = None
        if route is not None:
            self.follow(route)
        self._connect_timeout_s = connect_timeout_s
        self._active_timeout_s = max(active_timeout_s, connect_timeout_s)
        self._deliver = deliver
        self._ended = ended
        self._asked = asked
        self._greeted = greeted
        self._number = 0
        self._flushing = False
        self._watch = Heartbeat(self, send_timeout_s, heartbeat_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        """Looks for the next daemon while the lease of the one that is connected is over."""
        self._newer: tuple[Greeted, Address | None] | None = None
        """That daemon, once it was found, and its address."""

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until the first connection stands. Raises Unreachable, NotActive, or what the daemon
        objects to."""
        self._runner = self.loop.create_task(self._run())
        waited_s = self._connect_timeout_s
        await self._wait_connected(waited_s)
        if self.connection is None and not self._runner.done() and self._search.any_standby:
            # Daemons are there: one of them is about to lead.
            rest_s, waited_s = self._active_timeout_s - waited_s, self._active_timeout_s
            await self._wait_connected(rest_s)
        if self._runner.done():
            self._runner.result()
        if self.connection is None:
            raise self.unreachable(waited_s)
        self._watch.start()

    async def _wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a connection, or looking for one has ended, or the time is over. A
        connection that ends before this goes on does not count."""
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
        """Close the connection; whatever still waits fails with ``error``."""
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
        # A runner that failed at the start was reported there.
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            await connection.finish(error)

    def follow(self, route: Route) -> None:
        """From now on, connect to the shard of this route and to no other."""
        self._route = route
        self._search.follow(route)
        self._hello_options["shard"] = route.shard

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the reconnector at the latest."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- for sources ----------------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def wake(self) -> None:
        """Let all sources write in the next step of the loop, because something waits."""
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        connection = self.connection
        if connection is None or connection.ending:
            return  # the next one will take it
        for source in self.sources:
            source.collect(connection)
        connection.flush()

    @property
    def is_asking(self) -> bool:
        """Whether there will be a connection, something is about to be written to it, or an answer
        is due that is given at once."""
        connection = self.connection
        if connection is None:
            return self._runner is not None and not self._runner.done()
        return self._flushing or any(one.prompt for one in connection.requests.values())

    def unreachable(self, waited_s: float) -> TickwheelError:
        """The error for no connection: Unreachable, or NotActive when only standbys are there."""
        return self._search.failure(waited_s)

    def overdue(self, what: str, waited_s: float, *, written: bool) -> TickwheelError:
        """The error for no answer: never sent, connection broken, or plain silence."""
        if not written:
            return self.unreachable(waited_s)
        if self.connection is None:
            return ConnectionLost(
                f"{what} was sent, then the connection broke, and for {waited_s:g} s there was no"
                f" answer: {self.trouble.message}"
            )
        return SendTimeout(f"{what} was sent and not answered within {waited_s:g} s")

    async def wait_up(self, timeout_s: float) -> Connection:
        """The connection, once there is one. Raises Unreachable or NotActive."""
        await self._wait_connected(timeout_s)
        if self.connection is None:
            raise self.unreachable(timeout_s)
        return self.connection

    # --- connecting -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            connection = self._take_newer() or await self._search.find()
            began_s = self.loop.time()
            LOGGER.info("connected to %s", connection.peer)
            self._stand(connection)
            self.trouble = await asyncio.shield(connection.closed)
            LOGGER.info("connection ended: %s: %s", self.trouble.code, self.trouble.message)
            steady = self.loop.time() - began_s >= STEADY_S
            heir = address_named(connection.heir, secure=self._tls is not None)
            self._search.ended(self.trouble, silent=connection.silent, steady=steady, heir=heir)
            self._fall(connection)
            if not steady and self._newer is None:
                await self._search.pause()

    def _stand(self, connection: Connection) -> None:
        self.connection = connection
        self._refused.clear()  # another daemon may be there by the next time
        where = self._where
        where.stands(self._search.at)
        where.seen.nodes[where.shard] = str(self.info.get("node"))
        self._leased(connection)
        self._up.set()
        for source in self.sources:
            source.up()
        self.wake()

    def _fall(self, connection: Connection) -> None:
        self.connection = None
        self._up.clear()
        self._look_no_more()
        where = self._where
        where.stands(None)
        where.seen.nodes.pop(where.shard, None)
        for source in self.sources:
            source.down()
        connection.give_up_requests()

    # --- another daemon, while a connection stands ----------------------------------------------

    @property
    def _where(self) -> Route:
        """Where the daemon is looked for while a connection stands."""
        return self._given if self._route is None else self._route

    def _leased(self, connection: Connection) -> None:
        """Take note of what the daemon says of its lease. While that is over another one may serve;
        as long as none is found, the connection stays."""
        if connection is not self.connection:
            return  # an attempt: it is asked when it stands
        if connection.is_leased:
            if self._looking is not None:
                LOGGER.info("%s has its lease again", connection.peer)
            self._look_no_more()
        elif self._looking is None:
            LOGGER.info(
                "%s cannot reach its store, and its lease is over: is there another daemon?",
                connection.peer,
            )
            where = self._where
            where.seen.unleased.add(where.shard)
            self._looking = self.spawn(self._look_beside(connection, where))

    def _look_no_more(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
        self._where.seen.unleased.discard(self._where.shard)

    async def _look_beside(self, connection: Connection, route: Route) -> None:
        """Look for another daemon that serves the shard, and end the connection for it."""
        newer: list[Greeted] = []

        def choose(greeted: Greeted) -> None:
            self._check_newer(greeted)
            newer.append(greeted)

        search = Beside(self._search.at, route, self._greet, choose, self._connect_timeout_s)
        await search.find()
        self._looking, self._newer = None, (newer[-1], search.at)
        connection.abort(ConnectionLost("another daemon serves the shard now"))

    def _check_newer(self, greeted: Greeted) -> None:
        """Raises Elsewhere for a daemon that does not lead later than the connected one: it may be
        the same one, or have stood still."""
        epoch, own = greeted.info.get("epoch"), self.info.get("epoch")
        if type(epoch) is int and type(own) is int and epoch > own:
            return
        error = Elsewhere(f"its epoch {epoch} is not above {own}, that of the connected one", None)
        greeted.connection.abort(error)
        raise error

    def _take_newer(self) -> Connection | None:
        """The connection to the daemon that was found beside the last one."""
        newer, self._newer = self._newer, None
        if newer is None:
            return None
        greeted, self._search.at = newer
        try:
            self._choose(greeted)
        except TickwheelError:
            return None
        return greeted.connection

    # --- HELLO ----------------------------------------------------------------------------------

    async def _greet(self, address: Address, timeout_s: float) -> Greeted:
        """Try one address, beside others. Raises a TickwheelError: Standby and Silent mean what
        they say."""
        connection = Connection(self._deliver, self.wake, self._ended, self._asked, self._leased)
        try:
            async with asyncio.timeout(timeout_s):
                await self._open_to(connection, address, self._tls)
                return Greeted(connection, await self._say_hello(connection, address))
        except TimeoutError:
            error: TickwheelError = Silent(f"did not answer within {timeout_s:g} s")
        except (OSError, UnicodeError) as problem:  # UnicodeError: no host name at all
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
        """Let this daemon be the one. Raises ConnectionLost where it has not the shard that the
        client has begun with."""
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
        return ConnectionLost(f"{error.message}, before HELLO: does it take our certificate?")

    async def _say_hello(self, connection: Connection, address: Address) -> dict[str, Any]:
        """The answer of a daemon that is active and has the shard. Raises a TickwheelError."""
        request = _Hello(0.0)
        number = self.next_number()
        refused = self._refused.get(address, ())
        options = {w: said for w, said in self._hello_options.items() if w not in refused}
        connection.ask(number, request, hello(number, options, self.limits.frame_bytes_max))
        connection.flush()
        await asyncio.wait((request.done, connection.closed), return_when=asyncio.FIRST_COMPLETED)
        if not request.done.done():
            raise self._unanswered(connection.closed.result())
        try:
            info = request.done.result()
        except BadRequest as error:
            # An older daemon refuses what it does not know in a HELLO.
            word = next((word for word in NEWER_WORDS if word in options), None)
            if word is None:
                raise
            if word == "heartbeat":
                self._hello_options.pop(word)
            else:
                self._refused.setdefault(address, set()).add(word)
            said = f"the daemon refused the connection: {error.message}; once more without"
            raise ConnectionLost(said) from None
        if not isinstance(info, dict):
            raise ProtocolError("HELLO's answer is not a map")
        if self._route is not None:
            self._route.learn(info)
        shard = None if self._route is None else self._route.shard
        not_active = standby(info, secure=self._tls is not None, shard=shard)
        if not_active is not None:
            raise not_active
        return info


HEARTBEAT_S = 1.0
PATIENCE_HEARTBEATS = 1.5
"""How long a PING may go unanswered, in heartbeats, while nothing comes."""
SWEEPS_PER_TIMEOUT = 4
SWEEP_S_MAX = 0.25
BLOCKED_S = 0.5
"""A sweep that is late by so many seconds shows that the loop was blocked."""


class _Probe(Request):
    """A PING that nobody waits for: that something comes is all that counts."""

    __slots__ = ()

    def answered(self, result: Any) -> None: ...

    def failed(self, error: TickwheelError) -> None: ...

    def lost(self) -> None: ...

    def expired(self) -> None: ...


class Heartbeat:
    """The timer that asks quiet daemons for a sign of life; ``start`` and ``stop`` may repeat."""

    def __init__(self, reconnector: Reconnector, send_timeout_s: float, heartbeat_s: float) -> None:
        self._reconnector = reconnector
        self._heartbeat_s = heartbeat_s
        self._shortest_s = min(heartbeat_s, send_timeout_s)
        """The heartbeat in seconds while an answer is due."""
        self._patience_s = min(PATIENCE_HEARTBEATS * heartbeat_s, send_timeout_s)
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._asked: Connection | None = None
        """The quiet connection that was asked, if it has been silent since ``_asked_s``."""
        self._asked_s = 0.0
        self._moved_s = 0.0
        """When the PING, or something before it, left last."""
        self._ping_at = self._left = 0
        """Bytes of the connection up to the PING's end, and bytes that have left so far."""

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
        """Ask a quiet connection, and give it up if still nothing comes."""
        if self._asked is connection and connection.heard_s < self._asked_s:
            left = connection.left_bytes
            if self._left < self._ping_at and left > self._left:
                self._moved_s = now_s
            self._left = left
            if now_s - self._moved_s >= self._patience_s:
                self._give_up(connection, now_s)
            return
        self._asked = None
        since_s = next((r.sent_s for r in connection.requests.values() if r.prompt), None)
        if since_s is not None:
            quiet_s, limit_s = now_s - max(since_s, connection.heard_s), self._shortest_s
        else:
            quiet_s, limit_s = now_s - connection.heard_s, self._heartbeat_s
        if quiet_s >= limit_s:
            self._ask(connection, now_s)

    def _give_up(self, connection: Connection, now_s: float) -> None:
        connection.silent = True
        quiet_s = now_s - connection.heard_s
        connection.abort(ConnectionLost(f"nothing came for {quiet_s:.1f} s, and PING no answer"))

    def _ask(self, connection: Connection, now_s: float) -> None:
        number = self._reconnector.next_number()
        connection.ask(number, _Probe(float("inf")), encode((int(FrameType.PING), number)))
        connection.flush()
        self._asked, self._asked_s, self._moved_s = connection, now_s, now_s
        self._ping_at, self._left = connection.given_bytes, connection.left_bytes
