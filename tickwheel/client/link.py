"""The conversation with a daemon over any number of connections.

Keeps one connection open, with backoff and over several addresses; says HELLO; numbers
requests, ascending over reconnects; matches answers; sends what is unanswered again after a
reconnect. Knows no command: producers and subscriptions hook in.

Invariants: a request keeps its number for its whole life; every request ends exactly once, by
its answer, its deadline, or the end of the link.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

from tickwheel.client.address import Address
from tickwheel.client.wire import Wire
from tickwheel.errors import (
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    Unauthorized,
    Unreachable,
    VersionUnsupported,
    from_wire,
)
from tickwheel.protocol.codec import Frame, encode
from tickwheel.protocol.frames import PROTOCOL_VERSION, SESSION_BYTES, FrameType, Limits

BACKOFF_S = (0.05, 5.0)
SWEEP_S = 0.1
LEAVE_S = 0.5
"""After GOODBYE, how long answers are waited for before the connection is closed."""
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""A daemon's frames are bounded by its own limits; this is against one that is none."""
_OK, _ERROR = int(FrameType.OK), int(FrameType.ERROR)
_DELIVER, _GOODBYE = int(FrameType.DELIVER), int(FrameType.GOODBYE)

Answered = Callable[[Any, TickwheelError | None], None]


class Request:
    """One request that waits for its answer."""

    __slots__ = ("answered", "data", "deadline_s", "lasting", "sent")

    def __init__(self, data: bytes, deadline_s: float, answered: Answered, lasting: bool) -> None:
        self.data = data
        self.deadline_s = deadline_s
        self.answered = answered
        self.lasting = lasting
        """Sent again after a reconnect; otherwise it fails with the connection."""
        self.sent = False
        """It was written to some connection, so the daemon may have seen it."""


class Link:
    """``start``, then ``call`` and ``send``; ``stop`` ends everything that waits."""

    def __init__(
        self,
        addresses: list[Address],
        token: str | None,
        name: str,
        connect_timeout_s: float,
    ) -> None:
        self._addresses = addresses
        self._token = token
        self._name = name
        self._connect_timeout_s = connect_timeout_s
        self.session = os.urandom(SESSION_BYTES)
        self.limits = Limits()
        self.server_info: dict[str, Any] = {}
        self.pending: dict[int, Request] = {}
        self.deliver: dict[int, Callable[[int, int, Any], None]] = {}
        """Subscription number → what takes its deliveries."""
        self.on_connected: list[Callable[[], None]] = []
        self.on_lost: list[Callable[[], None]] = []
        self.on_drained: list[Callable[[], None]] = []
        self.on_sweep: list[Callable[[float], None]] = []
        self.failed: TickwheelError | None = None
        """Why there is no use in trying again: wrong token, closed, …"""
        self._wire: Wire | None = None
        self._greeted = False
        self._leaving = False
        self._request = 0
        self._running: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # --- life ------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._greeted

    @property
    def writable(self) -> bool:
        """Connected, and the daemon takes more."""
        return (
            self._greeted and not self._leaving and self._wire is not None and not self._wire.full
        )

    async def start(self) -> None:
        """Connect. Raises Unreachable when no address answers within the connect timeout."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._sweep()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                while not self._greeted:
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            shown = ", ".join(map(str, self._addresses))
            raise Unreachable(
                f"no daemon answers at {shown} within {self._connect_timeout_s} s"
                f" (connect_timeout){self._last_reason}"
            ) from None

    async def stop(self) -> None:
        """Close the connection; whatever still waits fails with ClientClosed."""
        self._fail(ClientClosed("the client is closed"))
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._wire is not None:
            self._wire.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def check(self) -> None:
        """Raise what makes every call useless, if anything does."""
        if self.failed is not None:
            raise type(self.failed)(self.failed.message)

    # --- requests --------------------------------------------------------------------------

    def next_request(self) -> int:
        self._request += 1
        return self._request

    def post(
        self,
        kind: FrameType,
        fields: tuple[Any, ...],
        deadline_s: float,
        answered: Answered,
        *,
        lasting: bool = True,
    ) -> None:
        """Send a request, now or when connected; ``answered(result, error)`` is called once."""
        number = self.next_request()
        data = encode((int(kind), number, *fields))
        request = Request(data, deadline_s, answered, lasting)
        self.pending[number] = request
        if self._greeted:
            self._write(request)

    async def call(
        self, kind: FrameType, *fields: Any, timeout_s: float, lasting: bool = True
    ) -> Any:
        """The answer's result. Raises the daemon's error, SendTimeout, Unreachable, …"""
        self.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def answered(result: Any, error: TickwheelError | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        self.post(kind, fields, loop.time() + timeout_s, answered, lasting=lasting)
        return await future

    def expect(self, number: int, answered: Answered) -> None:
        """An answer to a request that somebody else sends, sends again, and gives up."""
        self.pending[number] = Request(b"", float("inf"), answered, lasting=True)

    def send(self, data: bytes) -> None:
        """Write a frame that has no answer. Raises ConnectionLost when there is no connection."""
        if self._wire is None or not self._greeted:
            raise ConnectionLost("there is no connection to the daemon at the moment")
        self._wire.write(data)

    def _write(self, request: Request) -> None:
        if self._wire is not None and request.data:
            request.sent = True
            self._wire.write(request.data)

    # --- connections -----------------------------------------------------------------------

    async def _run(self) -> None:
        attempt = 0
        self._last_reason = ""
        while self.failed is None:
            address = self._addresses[attempt % len(self._addresses)]
            try:
                wire = await self._open(address)
            except (Unauthorized, VersionUnsupported) as error:
                self._fail(error)
                return
            except (OSError, TimeoutError, TickwheelError) as error:
                self._last_reason = f": {error}" if str(error) else ""
                attempt += 1
                if attempt % len(self._addresses) == 0:
                    await asyncio.sleep(_pause_s(attempt // len(self._addresses)))
                continue
            attempt = 0
            self._joined()
            await wire.lost
            self._left()

    async def _open(self, address: Address) -> Wire:
        """A connection whose HELLO was accepted."""
        loop = asyncio.get_running_loop()
        hello: asyncio.Future[Frame] = loop.create_future()

        def first(frames: list[Frame]) -> None:
            if frames and not hello.done():
                hello.set_result(frames[0])

        async with asyncio.timeout(self._connect_timeout_s):
            _, wire = await loop.create_connection(lambda: Wire(first, FRAME_BYTES_MAX), *address)
            self._wire, self._leaving = wire, False
            try:
                said = {
                    "v": PROTOCOL_VERSION,
                    "session": self.session,
                    "token": self._token,
                    "client": self._name,
                }
                wire.write(encode((int(FrameType.HELLO), self.next_request(), said)))
                wire.lost.add_done_callback(
                    lambda lost: None if hello.done() else hello.set_exception(lost.result())
                )
                self._welcome(await hello)
            except BaseException:
                wire.abort()
                raise
        wire.on_frames = self._frames
        wire.on_drained = self._drained
        return wire

    def _welcome(self, frame: Frame) -> None:
        if frame[0] == _ERROR:
            raise from_wire(str(frame[2]), str(frame[3]))
        if frame[0] == _GOODBYE:
            raise ConnectionLost(f"the daemon says goodbye: {frame[2]}")
        if frame[0] != _OK or not isinstance(frame[2], dict):
            raise ProtocolError(f"HELLO was answered by a frame of type {frame[0]}")
        self.server_info = dict(frame[2])
        self.limits = Limits.from_wire(frame[2].get("limits"))

    def _joined(self) -> None:
        self._greeted = True
        for request in list(self.pending.values()):
            self._write(request)
        for hook in self.on_connected:
            hook()
        self._changed.set()

    def _left(self) -> None:
        self._greeted = False
        self._wire = None
        for number, request in list(self.pending.items()):
            if request.sent and not request.lasting:
                del self.pending[number]
                request.answered(None, ConnectionLost("the connection broke before the answer"))
        for hook in self.on_lost:
            hook()

    # --- frames ----------------------------------------------------------------------------

    def _frames(self, frames: list[Frame]) -> None:
        pending = self.pending
        for frame in frames:
            kind = frame[0]
            if kind == _DELIVER:
                taker = self.deliver.get(frame[1])
                if taker is not None:
                    taker(frame[2], frame[3], frame[4])
            elif kind == _OK:
                request = pending.pop(frame[1], None)
                if request is not None:
                    request.answered(frame[2], None)
            elif kind == _ERROR:
                request = pending.pop(frame[1], None)
                if request is not None:
                    request.answered(None, from_wire(str(frame[2]), str(frame[3])))
            elif kind == _GOODBYE:
                self._leave()
        if self._leaving and not pending:
            self._close_wire()

    def _leave(self) -> None:
        """The daemon is about to close: send nothing new, take the answers, go."""
        self._leaving = True
        asyncio.get_running_loop().call_later(LEAVE_S, self._close_wire)

    def _close_wire(self) -> None:
        if self._leaving and self._wire is not None:
            self._wire.close()

    def _drained(self) -> None:
        for hook in self.on_drained:
            hook()

    # --- ends ------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Requests whose time is over. One timer for all: acks come by the thousand."""
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        now_s = loop.time()
        over = [n for n, request in self.pending.items() if request.deadline_s <= now_s]
        for number in over:
            request = self.pending.pop(number)
            request.answered(None, self.timed_out(sent=request.sent))
        for hook in self.on_sweep:
            hook(now_s)

    def timed_out(self, *, sent: bool) -> TickwheelError:
        """What to tell a caller whose time is over."""
        if sent:
            return SendTimeout("no answer within send_timeout and its retries")
        shown = ", ".join(map(str, self._addresses))
        return Unreachable(f"no daemon answers at {shown}{self._last_reason}")

    def _fail(self, error: TickwheelError) -> None:
        if self.failed is None:
            self.failed = error
        pending, self.pending = self.pending, {}
        for request in pending.values():
            request.answered(None, error)
        for hook in self.on_lost:
            hook()
        self._changed.set()

    _last_reason = ""


def _pause_s(rounds: int) -> float:
    """Exponential backoff with full jitter above half."""
    low, high = BACKOFF_S
    longest = min(high, low * 2.0 ** min(rounds - 1, 16))
    return longest * (0.5 + random.random() / 2)
