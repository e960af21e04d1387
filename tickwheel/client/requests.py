"""Requests that one caller waits for: sent, sent again after a broken connection, or given up.

Not for ENQUEUE and ACK, which go out many in a frame (``producer.py``, ``acks.py``). Knows no
frame's meaning; the caller says whether a repeat is harmless.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tickwheel.client.connection import Connection, Request, fail
from tickwheel.client.reconnector import Reconnector
from tickwheel.errors import (
    ConnectionLost,
    Draining,
    InternalError,
    NotActive,
    Overloaded,
    TickwheelError,
)
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType

CALLS_MAX = 65_536
"""Calls without an answer."""
RETRY_S = 0.1
RETRY_S_MAX = 2.0


def retry_pause_s(tries: int) -> float:
    """How long to wait before the next try of what was refused ``tries`` times."""
    return min(RETRY_S_MAX, RETRY_S * 2.0 ** min(tries, 8)) * random.uniform(0.5, 1.0)


class Call(Request):
    """One request of one caller; its number is new on every connection."""

    __slots__ = ("_calls", "asked_s", "error", "fields", "future", "kind", "orphaned", "prompt",
                 "repeat", "sent", "tries")  # fmt: skip

    def __init__(
        self, calls: Calls, kind: FrameType, fields: tuple[Any, ...], deadline_s: float
    ) -> None:
        super().__init__(deadline_s)
        self._calls = calls
        self.kind = kind
        self.fields = fields
        self.asked_s = calls.reconnector.loop.time()
        self.future: asyncio.Future[Any] = calls.reconnector.loop.create_future()
        self.prompt = True
        self.repeat = True
        self.orphaned: Callable[[Any], None] | None = None
        self.sent = 0
        """How often, but for those times that a daemon said it is not active."""
        self.tries = 0
        self.error: TickwheelError | None = None
        """What refused the last try, when that is certain."""

    def answered(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)
        elif self.orphaned is not None:
            self.orphaned(result)

    def failed(self, error: TickwheelError) -> None:
        if self.future.done():
            return
        if error.closes_connection and error.retryable:
            self.lost()
        elif error.retryable and not isinstance(error, InternalError):
            self._calls.again(self, error)
        else:
            fail(self.future, error)

    def lost(self) -> None:
        if self.future.done():
            return
        if self.repeat:
            self._calls.wait(self)
        else:
            fail(
                self.future,
                ConnectionLost(f"the connection broke before {self.kind.name} was answered"),
            )

    def expired(self) -> None:
        if self.future.done():
            return
        reconnector = self._calls.reconnector
        waited_s = reconnector.loop.time() - self.asked_s
        fail(
            self.future,
            self.error
            or reconnector.overdue(self.kind.name, round(waited_s, 1), written=self.sent > 0),
        )


class Calls:
    """All of one client."""

    def __init__(self, reconnector: Reconnector, total_s: float, retries: int) -> None:
        self.reconnector = reconnector
        self._total_s = total_s
        self._retries = retries
        self._waiting: deque[Call] = deque()
        self._pausing: set[Call] = set()
        self._count = 0
        self._stopped: TickwheelError | None = None

    async def call(
        self,
        kind: FrameType,
        *fields: Any,
        extra_s: float = 0.0,
        prompt: bool = True,
        repeat: bool = True,
        orphaned: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of a request. Raises the daemon's error, or why there is no answer.

        ``extra_s``: how much longer than usual an answer may take. ``prompt``: whether silence
        after it means a dead connection. ``repeat``: whether it is asked again on a new one.
        ``orphaned`` gets a result that comes when the caller has been cancelled.
        """
        if self._stopped is not None:
            raise self._stopped
        if self._count >= CALLS_MAX:
            raise Overloaded(f"{self._count} calls wait for an answer; the limit is {CALLS_MAX}")
        call = Call(self, kind, fields, self.reconnector.loop.time() + self._total_s + extra_s)
        call.prompt, call.repeat, call.orphaned = prompt, repeat, orphaned
        self._count += 1
        try:
            self.wait(call)
            return await call.future
        finally:
            self._count -= 1
            call.future.cancel()

    def wait(self, call: Call) -> None:
        self._waiting.append(call)
        self.reconnector.wake()

    def again(self, call: Call, error: TickwheelError) -> None:
        """Refused, retryable: try again after a pause, or on the next connection."""
        if isinstance(error, NotActive):
            call.sent -= 1
            self.wait(call)
            return
        call.error = error
        if isinstance(error, Draining):
            if self.reconnector.connection is not None:
                self.reconnector.connection.leave(error)
            self.wait(call)
            return
        if call.tries >= self._retries:
            fail(call.future, error)
            return
        self._pausing.add(call)
        self.reconnector.loop.call_later(retry_pause_s(call.tries), self._resume, call)
        call.tries += 1

    def _resume(self, call: Call) -> None:
        if call in self._pausing:
            self._pausing.discard(call)
            self.wait(call)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Nothing to do: what was lost waits already."""

    def down(self) -> None:
        """Nothing to do: what was sent learns that it is lost."""

    def collect(self, connection: Connection) -> None:
        held: list[Call] = []
        while self._waiting:
            call = self._waiting.popleft()
            if call.future.done():
                continue
            if connection.leaving and isinstance(call.error, Draining):
                held.append(call)
                continue
            number = self.reconnector.next_number()
            try:
                data = encode((int(call.kind), number, *call.fields))
            except TickwheelError as error:
                fail(call.future, error)
                continue
            call.sent += 1
            call.error = None
            connection.ask(number, call, data)
        self._waiting.extend(held)

    def sweep(self, now_s: float) -> None:
        over = [c for c in (*self._waiting, *self._pausing) if c.deadline_s <= now_s]
        for call in over:
            call.expired()
            self._pausing.discard(call)
        if over:
            self._waiting = deque(c for c in self._waiting if not c.future.done())

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        for call in (*self._waiting, *self._pausing):
            if not call.future.done():
                fail(call.future, error)
        self._waiting.clear()
        self._pausing.clear()
