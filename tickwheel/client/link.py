"""One connection to the daemon, made again for ever while the client is open.

Numbers requests, says HELLO, and lets the sources of frames write once in each step of the event
loop. Knows no frame but HELLO. Invariants: request numbers ascend over all connections; while
one connection is up no other is tried.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tickwheel.client.addresses import Address, shown
from tickwheel.client.connection import LOGGER, Connection, Deliver, Request, hello
from tickwheel.client.futures import fail
from tickwheel.client.watch import Watch
from tickwheel.errors import (
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    Unreachable,
)
from tickwheel.protocol.frames import PROTOCOL_VERSION, Limits

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
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
        deliver: Deliver,
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
        self._addresses = list(addresses)
        self._next = 0
        self._hello_options = {"v": PROTOCOL_VERSION, **hello_options}
        self._connect_timeout_s = connect_timeout_s
        self._deliver = deliver
        self._greeted = greeted
        self._number = 0
        self._flushing = False
        self._backoff_s = BACKOFF_S_MIN
        self._watch = Watch(self, send_timeout_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._greeted_once = False
        self._runner: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Until the first connection stands. Raises Unreachable, or what the daemon objects to."""
        self._runner = self.loop.create_task(self._run())
        up = self.loop.create_task(self._first_stands())
        try:
            await asyncio.wait(
                (self._runner, up),
                timeout=self._connect_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            up.cancel()
        if self._runner.done():
            self._runner.result()
        if self.connection is None:
            raise self.unreachable(self._connect_timeout_s)
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
        if connection is None:
            return
        for source in self.sources:
            source.collect(connection)
        connection.flush()

    def unreachable(self, waited_s: float) -> Unreachable:
        where = ", ".join(map(shown, self._addresses))
        return Unreachable(
            f"no daemon at {where} within {waited_s:g} s: {self.trouble.code}:"
            f" {self.trouble.message}"
        )

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
        """A connection. Raises Unreachable."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        if self.connection is None:
            raise self.unreachable(timeout_s)
        return self.connection

    # --- connecting -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            connection = await self._connect()
            began_s = self.loop.time()
            self._stand(connection)
            self.trouble = await asyncio.shield(connection.closed)
            LOGGER.info("connection ended: %s: %s", self.trouble.code, self.trouble.message)
            self._fall(connection)
            if self.loop.time() - began_s >= STEADY_S:
                self._backoff_s = BACKOFF_S_MIN
            else:
                await self._wait_a_bit()

    def _stand(self, connection: Connection) -> None:
        self.connection = connection
        self._greeted_once = True
        self._up.set()
        for source in self.sources:
            source.up()
        self.wake()

    def _fall(self, connection: Connection) -> None:
        self.connection = None
        self._up.clear()
        self._next += 1  # another address first
        for source in self.sources:
            source.down()
        connection.give_up_requests()

    async def _connect(self) -> Connection:
        """Each address in turn, then a pause that grows, for ever."""
        while True:
            for _ in self._addresses:
                address = self._addresses[self._next % len(self._addresses)]
                try:
                    return await self._greet(address)
                except TickwheelError as error:
                    self.trouble = error
                    if not error.retryable:
                        LOGGER.warning("%s: %s: %s", shown(address), error.code, error.message)
                self._next += 1
            if not self._greeted_once and not self.trouble.retryable:
                raise self.trouble
            await self._wait_a_bit()

    async def _wait_a_bit(self) -> None:
        await asyncio.sleep(self._backoff_s * random.uniform(0.5, 1.0))
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)

    async def _greet(self, address: Address) -> Connection:
        """One attempt at one address. Raises a TickwheelError."""
        connection = Connection(self._deliver, self.wake)
        # A share for each, so that a silent one leaves time for the others.
        timeout_s = self._connect_timeout_s / len(self._addresses)
        try:
            async with asyncio.timeout(timeout_s):
                await self.loop.create_connection(lambda: connection, *address)
                await self._say_hello(connection)
            return connection
        except TimeoutError:
            error: TickwheelError = Unreachable(
                f"{shown(address)} did not answer within {timeout_s:g} s"
            )
        except (OSError, UnicodeError) as problem:  # UnicodeError: no host name at all
            error = Unreachable(f"{shown(address)}: {problem}")
        except TickwheelError as problem:
            error = problem
        except BaseException:
            connection.abort(ClientClosed())
            raise
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
        info = request.done.result()
        if not isinstance(info, dict):
            raise ProtocolError("HELLO's answer is no map")
        self.limits = Limits.from_wire(info.get("limits"))
        self.info = info
        self._greeted(self.limits)
