"""Looks at the link now and then: deadlines that are over, a connection that has died silently.

A stopped process and a cut line look alike: nothing comes any more. Who only subscribes would
wait for ever, so the connection is asked with PING when it was quiet for a heartbeat; a daemon
answers that even while its store is stuck. Invariants: anything that comes counts as an answer;
a connection from which nothing came for 2.5 heartbeats is given up (sooner with a
``send_timeout_s`` below a heartbeat and a request waiting), not counting the time in which the
PING still moves forward behind other bytes on a slow line; nothing is judged in the moment after
the event loop was blocked, when answers may lie unread.
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

HEARTBEAT_S = 1.0
PATIENCE_HEARTBEATS = 1.5
"""How long a PING may go without anything coming."""
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

    def __init__(self, link: Link, send_timeout_s: float, heartbeat_s: float) -> None:
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._shortest_s = min(heartbeat_s, send_timeout_s)
        """As ``heartbeat_s``, while an answer is due."""
        self._patience_s = min(PATIENCE_HEARTBEATS * heartbeat_s, send_timeout_s)
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._asked: Connection | None = None
        """Found quiet; has it heard nothing since ``_asked_s``?"""
        self._asked_s = 0.0
        self._moved_s = 0.0
        """When the PING left, or something before it."""
        self._ping_at = self._left = 0
        """Bytes of the connection up to the PING's end; that have left so far."""

    def start(self) -> None:
        self.stop()
        loop = self._link.loop
        self._due_s = loop.time() + min(SWEEP_S_MAX, self._shortest_s / SWEEPS_PER_TIMEOUT)
        self._timer = loop.call_at(self._due_s, self._sweep)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now_s = self._link.loop.time()
        late_s = now_s - self._due_s
        self.start()
        if late_s >= min(BLOCKED_S, self._patience_s / 2):
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
        """Ask a quiet connection, and give it up when still nothing comes."""
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
        number = self._link.next_number()
        connection.ask(number, _Probe(float("inf")), encode((int(FrameType.PING), number)))
        connection.flush()
        self._asked, self._asked_s, self._moved_s = connection, now_s, now_s
        self._ping_at, self._left = connection.given_bytes, connection.left_bytes
