"""Looks at the link now and then: deadlines that are over, a connection that has died silently.

Invariants: a connection from which nothing comes for ``send_timeout_s`` although an answer is due
is asked with PING, which a daemon answers even while its store is stuck, and given up when that
is not answered within half that time; nothing is judged in the moment after the event loop was
blocked, when answers may lie unread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tickwheel.client.connection import Connection, Request
from tickwheel.errors import ConnectionLost, TickwheelError
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType

if TYPE_CHECKING:
    from tickwheel.client.link import Link

KEEPALIVE_S = 10.0
"""After so long without a byte from the daemon it is asked whether it is there."""
SWEEPS_PER_TIMEOUT = 4
SWEEP_S_MAX = 0.25
BLOCKED_S = 0.5
"""A sweep that is so late tells that the loop was blocked."""


class _Probe(Request):
    """A PING nobody waits for: that something comes is all that counts."""

    __slots__ = ()

    def answered(self, result: Any) -> None: ...

    def failed(self, error: TickwheelError) -> None: ...

    def lost(self) -> None: ...

    def expired(self) -> None: ...


class Watch:
    """One timer, from ``start`` to ``stop``; both may be left out or come twice."""

    def __init__(self, link: Link, send_timeout_s: float) -> None:
        self._link = link
        self._send_timeout_s = send_timeout_s
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._silent: Connection | None = None
        """Found silent by the last sweep, and asked."""
        self._asked_s = 0.0

    def start(self) -> None:
        self.stop()
        loop = self._link.loop
        self._due_s = loop.time() + min(SWEEP_S_MAX, self._send_timeout_s / SWEEPS_PER_TIMEOUT)
        self._timer = loop.call_at(self._due_s, self._sweep)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self._link.loop.time()
        late_s = now_s - self._due_s
        self.start()
        if late_s >= BLOCKED_S:
            return
        connection = self._link.connection
        if connection is not None:
            self._expire(connection, now_s)
            self._check_alive(connection, now_s)
        for source in self._link.sources:
            source.sweep(now_s)

    @staticmethod
    def _expire(connection: Connection, now_s: float) -> None:
        over = [n for n, r in connection.requests.items() if r.deadline_s <= now_s]
        for number in over:
            connection.requests.pop(number).expired()

    def _check_alive(self, connection: Connection, now_s: float) -> None:
        """Ask a silent connection, and give it up when that is not answered either."""
        since_s = next((r.sent_s for r in connection.requests.values() if r.prompt), None)
        if since_s is None:
            self._silent = None
            if now_s - connection.heard_s >= KEEPALIVE_S and not connection.leaving:
                self._ask(connection)
        elif now_s - max(since_s, connection.heard_s) < self._send_timeout_s:
            self._silent = None
        elif self._silent is not connection:
            self._silent, self._asked_s = connection, now_s
            self._ask(connection)
        elif now_s - self._asked_s >= self._send_timeout_s / 2:
            connection.abort(
                ConnectionLost(f"no answer for {self._send_timeout_s:g} s (send_timeout)")
            )

    def _ask(self, connection: Connection) -> None:
        number = self._link.next_number()
        connection.ask(number, _Probe(float("inf")), encode((int(FrameType.PING), number)))
        connection.flush()
