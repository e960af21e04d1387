"""Requests that one caller waits for: sent, sent again after a broken connection, or given up.

Not for ENQUEUE and ACK, which go out many in a frame (``producer.py``, ``acks.py``). Knows no
frame's meaning; the caller says whether a repeat is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tickwheel.api.frames import FrameType
from tickwheel.client.connection import Connection, fail
from tickwheel.client.reconnector import Reconnector
from tickwheel.client.resending import Outbox, Resendable
from tickwheel.errors import (
    ConnectionLost,
    Draining,
    InternalError,
    NotActive,
    Overloaded,
    TickwheelError,
)
from tickwheel.protocol.codec import encode

CALLS_MAX = 65_536
"""How many calls may wait for answers."""


class Call(Resendable):
    """One request of one caller; its number is new on every connection."""

    __slots__ = ("_calls", "fields", "future", "kind", "orphaned", "prompt", "repeat")

    def __init__(
        self, calls: Calls, kind: FrameType, fields: tuple[Any, ...], time_s: float
    ) -> None:
        began_s = calls.reconnector.loop.time()
        super().__init__(began_s, began_s + time_s)
        self._calls = calls
        self.kind = kind
        self.fields = fields
        self.future: asyncio.Future[Any] = calls.reconnector.loop.create_future()
        self.prompt = True
        self.repeat = True
        self.orphaned: Callable[[Any], None] | None = None

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
            self._calls.outbox.add(self)
        else:
            fail(
                self.future,
                ConnectionLost(f"the connection broke before {self.kind.name} was answered"),
            )

    def expired(self) -> None:
        if not self.future.done():
            fail(self.future, self.overdue(self._calls.reconnector, self.kind.name))


class Calls:
    """All calls of one client."""

    def __init__(self, reconnector: Reconnector, total_s: float, retries: int) -> None:
        self.reconnector = reconnector
        self._total_s = total_s
        self._retries = retries
        self.outbox: Outbox[Call] = Outbox(reconnector)
        self._count = 0
        self._stopped: TickwheelError | None = None

    async def call(
        self,
        kind: FrameType,
        *fields: Any,
        extra_s: float = 0.0,
        until_s: float | None = None,
        prompt: bool = True,
        repeat: bool = True,
        orphaned: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of a request. Raises the daemon's error, or why there is no answer.

        ``extra_s``: how much longer than usual an answer may take. ``until_s``: instead, when the
        caller's own time is over, by the loop's clock. ``prompt``: whether silence
        after it means a dead connection. ``repeat``: whether it is asked again on a new one.
        ``orphaned`` gets a result that comes when the caller has been cancelled.
        """
        if self._stopped is not None:
            raise self._stopped
        if self._count >= CALLS_MAX:
            raise Overloaded(f"{self._count} calls wait for an answer; the limit is {CALLS_MAX}")
        call = Call(self, kind, fields, self._total_s + extra_s)
        timer = None
        if until_s is not None:
            call.deadline_s = until_s
            timer = self.reconnector.loop.call_at(until_s, call.expired)
        call.prompt, call.repeat, call.orphaned = prompt, repeat, orphaned
        self._count += 1
        try:
            self.outbox.add(call)
            return await call.future
        finally:
            self._count -= 1
            call.future.cancel()
            if timer is not None:
                timer.cancel()

    def again(self, call: Call, error: TickwheelError) -> None:
        """Try a call again that was refused for now: after a pause, or on the next connection."""
        if isinstance(error, NotActive):
            self.outbox.add_again(call)
        elif isinstance(error, Draining):
            call.refusal = error
            if self.reconnector.connection is not None:
                self.reconnector.connection.leave(error)
            self.outbox.add(call)
        elif call.tries >= self._retries:
            fail(call.future, error)
        else:
            self.outbox.pause(call, error)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Do nothing: calls that were lost wait to be sent already."""

    def down(self) -> None:
        """Do nothing: each call that was sent learns that it is lost."""

    def collect(self, connection: Connection) -> None:
        held: list[Call] = []
        for call in self.outbox.take():
            if call.future.done():
                continue
            if connection.leaving and isinstance(call.refusal, Draining):
                held.append(call)
                continue
            number = self.reconnector.next_number()
            try:
                data = encode((int(call.kind), number, *call.fields))
            except TickwheelError as error:
                fail(call.future, error)
                continue
            call.sent += 1
            call.refusal = None
            connection.ask(number, call, data)
        self.outbox.extend(held)

    def sweep(self, now_s: float) -> None:
        for call in self.outbox.take_overdue(now_s):
            call.expired()

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        for call in self.outbox.take_all():
            fail(call.future, error)
