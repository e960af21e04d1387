"""One connection to the active daemon, made again for ever while the client is open.

Numbers requests, says HELLO, and lets the sources of frames write once in each step of the event
loop; which address is tried when is ``search``'s. Knows no frame but HELLO. Invariants: request
numbers ascend over all connections; while one connection is up no other is tried; one to a
standby never stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tickwheel.client.addresses import Address
from tickwheel.client.connection import LOGGER, Connection, Deliver, Ended, Request, hello
from tickwheel.client.futures import fail
from tickwheel.client.search import Search, Silent, standby
from tickwheel.client.watch import Watch
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    Unreachable,
)
from tickwheel.protocol.frames import PROTOCOL_VERSION, Limits

STEADY_S = 1.0
"""A connection that lived so long was a good one: the next wait is the shortest again."""


class Source(Protocol):
    """A part of the client that writes frames."""

    def up(self) -> None:
        """A new connection stands; what was lost with the old one was told before."""

    def down(self) -> None:
        """The connection has ended; its requests are told next."""

    def collect(self, connection: Connection) -> None:
        """Write what waits and may be written."""

    def sweep(self, now_s: float) -> None:
        """Fail what waits and whose deadline is over."""

    def stop(self, error: TickwheelError) -> None:
        """Fail all that waits."""


class _Hello(Request):
    __slots__ = ("done",)

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, result: Any) -> None:
        self.done.set_result(result)

    def failed(self, error: TickwheelError) -> None:
        fail(self.done, error)


class Link:
    """``start`` once, ``stop`` at the end; in between ``connection`` is there or is coming."""

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
        greeted: Callable[[Limits], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.limits = Limits()
        self.info: dict[str, Any] = {}
        """The daemon's answer to the last HELLO."""
        self.connection: Connection | None = None
        self.sources: list[Source] = []
        self.trouble: TickwheelError = Unreachable("not connected yet")
        """Why the last attempt or connection failed."""
        self._search = Search(addresses, self._greet, connect_timeout_s)
        self._hello_options = {"v": PROTOCOL_VERSION, "heartbeat": True, **hello_options}
        self._connect_timeout_s = connect_timeout_s
        self._active_timeout_s = max(active_timeout_s, connect_timeout_s)
        self._deliver = deliver
        self._ended = ended
        self._greeted = greeted
        self._number = 0
        self._flushing = False
        self._watch = Watch(self, send_timeout_s, heartbeat_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until the first connection stands. Raises Unreachable, NotActive, or what the daemon
        objects to."""
        self._runner = self.loop.create_task(self._run())
        up = self.loop.create_task(self._first_stands())
        ends, waited_s = (self._runner, up), self._connect_timeout_s
        try:
            done, _ = await asyncio.wait(
                ends, timeout=waited_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and self._search.any_standby:
                # Daemons are there: one of them is about to lead.
                rest_s, waited_s = self._active_timeout_s - waited_s, self._active_timeout_s
                await asyncio.wait(ends, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._runner.done():
            self._runner.result()
        if self.connection is None:
            raise self.unreachable(waited_s)
        self._watch.start()

    async def _first_stands(self) -> None:
        """Until there is a connection; one that ended at once does not count."""
        while self.connection is None:
            await self._up.wait()

    async def stop(self, error: TickwheelError) -> None:
        """Close; whatever still waits fails with ``error``."""
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
        # A runner that failed at the start was reported there.
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            await connection.finish(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the link at the latest."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- for sources ----------------------------------------------------------------------------

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def wake(self) -> None:
        """Something waits to be written: let all sources write in the next step of the loop."""
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

    def unreachable(self, waited_s: float) -> TickwheelError:
        """Unreachable, or NotActive when a daemon is there and stands by."""
        return self._search.failure(waited_s)

    def overdue(self, what: str, waited_s: float, *, written: bool) -> TickwheelError:
        """Why there is no answer: never sent, connection broken, or plain silence."""
        if not written:
            return self.unreachable(waited_s)
        if self.connection is None:
            return ConnectionLost(
                f"{what} was sent, then the connection broke, and for {waited_s:g} s there was no"
                f" answer: {self.trouble.message}"
            )
        return SendTimeout(f"{what} was sent and not answered within {waited_s:g} s")

    async def wait_up(self, timeout_s: float) -> Connection:
        """A connection. Raises Unreachable or NotActive."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        if self.connection is None:
            raise self.unreachable(timeout_s)
        return self.connection

    # --- connecting -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            connection = await self._search.find()
            began_s = self.loop.time()
            self._stand(connection)
            self.trouble = await asyncio.shield(connection.closed)
            LOGGER.info("connection ended: %s: %s", self.trouble.code, self.trouble.message)
            steady = self.loop.time() - began_s >= STEADY_S
            self._search.ended(self.trouble, silent=connection.silent, steady=steady)
            self._fall(connection)
            if not steady:
                await self._search.pause()

    def _stand(self, connection: Connection) -> None:
        self.connection = connection
        self._up.set()
        for source in self.sources:
            source.up()
        self.wake()

    def _fall(self, connection: Connection) -> None:
        self.connection = None
        self._up.clear()
        for source in self.sources:
            source.down()
        connection.give_up_requests()

    async def _greet(self, address: Address, timeout_s: float) -> Connection:
        """One attempt at one address. Raises a TickwheelError; Standby and Silent mean that."""
        connection = Connection(self._deliver, self.wake, self._ended)
        try:
            async with asyncio.timeout(timeout_s):
                await self.loop.create_connection(lambda: connection, *address)
                await self._say_hello(connection)
            return connection
        except TimeoutError:
            error: TickwheelError = Silent(f"did not answer within {timeout_s:g} s")
        except (OSError, UnicodeError) as problem:  # UnicodeError: no host name at all
            error = Unreachable(str(problem))
        except TickwheelError as problem:
            error = problem
        except BaseException:
            connection.abort(ClientClosed())
            raise
        self.trouble = error
        connection.abort(error)
        raise error

    async def _say_hello(self, connection: Connection) -> None:
        request = _Hello(0.0)
        number = self.next_number()
        connection.ask(number, request, hello(number, self._hello_options))
        connection.flush()
        await asyncio.wait((request.done, connection.closed), return_when=asyncio.FIRST_COMPLETED)
        if not request.done.done():
            raise connection.closed.result()
        try:
            info = request.done.result()
        except BadRequest as error:
            if self._hello_options.pop("heartbeat", None) is None:
                raise
            # A daemon from before heartbeats refuses what it does not know in a HELLO.
            raise ConnectionLost(f"HELLO was refused: {error.message}; once more without") from None
        if not isinstance(info, dict):
            raise ProtocolError("HELLO's answer is no map")
        not_active = standby(info)
        if not_active is not None:
            raise not_active
        self.limits = Limits.from_wire(info.get("limits"))
        self.info = info
        self._greeted(self.limits)
