"""One TCP connection: bytes to frames, frames to handlers, answers and deliveries to bytes.

Knows the conversation's rules (HELLO first, limits, the token, a peer that does not read) and
no meaning of a command: that is the handlers'. Invariants:

* Every request is answered once, by the handler or by the error it raised.
* A client's mistake is answered and never ends in a traceback; only an unreadable stream, a
  missing or refused HELLO, or a peer that does not read, ends the connection.
* Deliveries and reading stop while more than ``out_bytes_soft`` wait for the peer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from tickwheel.clock import Now
from tickwheel.engine.sessions import Session
from tickwheel.engine.topics import Presence, Subscriber
from tickwheel.errors import (
    FrameTooLarge,
    HelloRequired,
    Overloaded,
    PeerSilent,
    ProtocolError,
    SlowReader,
    TickwheelError,
    TooManyConnections,
    UnknownType,
)
from tickwheel.protocol.codec import Decoder, Frame, check_nesting, encode
from tickwheel.protocol.frames import REQUEST_MAX, FrameType
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp.greeting import greet
from tickwheel.server.tcp.heartbeats import keep_alive, limit_unacknowledged

BEFORE_HELLO_BYTES_MAX = 64 * 1024
"""Strangers may not make the daemon buffer more."""
OTHERS_MIN = 64
"""So many subscribers that are over are kept before it is looked which of them still matter."""
_ERROR, _OK = int(FrameType.ERROR), int(FrameType.OK)
_FLAT = frozenset(
    int(kind)
    for kind in (
        FrameType.ENQUEUE,
        FrameType.ONEWAY,
        FrameType.ACK,
        FrameType.NACK,
        FrameType.REJECT,
        FrameType.EXTEND,
        FrameType.RELEASE,
    )
)
"""Their handlers check the type of every value there is in them, so depth needs no look."""
_HEARTBEAT = encode((int(FrameType.HEARTBEAT),))

Handler = Callable[["Connection", tuple[Any, ...], Now], None]
RunHandler = Callable[["Connection", list[Frame], int, Now], int]
"""Takes as many frames as it can from an index on; returns the index that it came to."""


class Connection(asyncio.Protocol):
    """``send`` and ``deliver`` are for the shell; everything else is the event loop's."""

    def __init__(
        self,
        shell: Shell,
        handlers: dict[int, Handler],
        enqueue_run: RunHandler,
        connections: set[Connection],
    ) -> None:
        self.shell = shell
        self.subscribers: dict[int, Subscriber] = {}
        """By the number the client chose."""
        self.pulls: dict[Subscriber, None] = {}
        """PULLs that are not answered yet."""
        self.others: list[Subscriber] = []
        """Pulls and subscriptions that are over and may have deliveries in flight."""
        self._others_max = OTHERS_MIN
        self.paused = False
        """More than ``out_bytes_soft`` wait for the peer."""
        self.presence = Presence()
        self.heard_mono_ms = 0
        """When the last bytes came from the peer, by the steady clock."""
        self.asked_mono_ms = 0
        self.answers_heartbeats = False
        """It said so in HELLO."""
        self.session: Session | None = None
        self.name = ""
        self.peer = "?"
        self.open = False
        self._handlers = handlers
        self._enqueue_run = enqueue_run
        self._connections = connections
        self._decoder = Decoder(min(BEFORE_HELLO_BYTES_MAX, shell.limits.frame_bytes_max))
        self._greeted = False
        self._ending = False
        self._held: list[Frame] = []
        """Requests that came and are not looked at yet."""
        self._unread_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    # --- the event loop's -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True
        self.peer = _address(transport.get_extra_info("peername"))
        self.heard_mono_ms = self.shell.clock.read().mono_ms
        keep_alive(transport.get_extra_info("socket"), self.shell.settings.heartbeat_interval_s)
        connections_max = self.shell.limits.connections_max
        if len(self._connections) >= connections_max:
            self._give_up(
                0,
                TooManyConnections(
                    f"{len(self._connections)} connections are open; the limit is"
                    f" {connections_max} (connections_max)"
                ),
            )
            return
        self._connections.add(self)
        self._transport.set_write_buffer_limits(high=self.shell.settings.out_bytes_stop)
        timeout_s = self.shell.settings.hello_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._no_hello)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._connections.discard(self)
        self._stop_timer()
        self._held.clear()
        self.shell.held.pop(self, None)
        self.shell.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        self.shell.listings.closed(self)
        self.shell.backups.closed(self)
        mono_ms = self.shell.clock.read().mono_ms
        delivery = self.shell.engine.delivery
        for subscriber in self.consumers:
            subscriber.owner.closed()  # type: ignore[attr-defined]  # see consuming.py
            delivery.disconnected(subscriber, mono_ms)
        self.subscribers.clear()
        self.pulls.clear()
        self.others.clear()
        self._leave_session()
        self.shell.poke()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._give_up(0, error)
            return
        self.heard_mono_ms = self.shell.clock.read().mono_ms
        if self.presence.doubted:
            self.shell.engine.delivery.heard(self.presence, self.consumers)
        self._count_unread()
        if self._held:
            self._held += frames
        else:
            self._handle_all(frames)

    def _count_unread(self) -> None:
        """Frames that have not come to their ends are in memory, too."""
        shell, before = self.shell, self._unread_bytes
        self._unread_bytes = self._decoder.pending_bytes
        shell.unread_bytes += self._unread_bytes - before
        if self._unread_bytes > before and shell.unread_bytes > shell.settings.unread_bytes_max:
            told = (
                f"{shell.unread_bytes} bytes of unfinished frames are in memory; the limit is"
                f" {shell.settings.unread_bytes_max} (unread_bytes_max)"
            )
            self._give_up(0, Overloaded(told))

    def _handle_all(self, frames: list[Frame]) -> None:
        if self._ending:
            return
        shell, handlers = self.shell, self._handlers
        now = shell.clock.read()
        index, count = 0, len(frames)
        while index < count:
            if self._greeted:
                if self.must_wait:
                    self._hold(frames[index:])
                    break
                index = self._run_enqueues(frames, index, now)
                if index == count:
                    break
            frame = frames[index]
            index += 1
            handler = handlers.get(frame[0]) if self._greeted else self._hello
            self._handle(handler, frame, now)
            if self._ending:
                break
        if not shell.core.open.is_empty():
            shell.committer.kick()
        if shell.core.runnable:
            shell.poke()
        if not self._held:
            self._end_if_broken()

    def _end_if_broken(self) -> None:
        """The stream was, after the frames that were handled now."""
        if self._decoder.error is not None and not self._ending:
            self._give_up(0, self._decoder.error)

    def _run_enqueues(self, frames: list[Frame], index: int, now: Now) -> int:
        try:
            return self._enqueue_run(self, frames, index, now)
        except Exception as error:
            # Of many frames at once: which of them it has changed something for is not known.
            self.shell.fail(error)
            raise

    # --- a peer that asks faster than it can be answered ----------------------------------------

    @property
    def is_read(self) -> bool:
        """What it sends is taken at the moment."""
        return not (self.paused or self._held)

    @property
    def must_wait(self) -> bool:
        """It does not read, or too many answers wait for the store: no more of its requests are
        looked at until that has changed."""
        return self.paused or self.shell.committer.is_behind(self)

    def _hold(self, frames: list[Frame]) -> None:
        self._held = frames
        self.shell.held[self] = None
        if self._transport is not None and self.open:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Look at what was held, if it need not wait any more."""
        if not self._held or self.must_wait:
            return
        frames, self._held = self._held, []
        self.shell.held.pop(self, None)
        self.heard_mono_ms = self.shell.clock.read().mono_ms
        self._handle_all(frames)
        if not self._held and not self.paused and self._transport is not None and self.open:
            self._transport.resume_reading()

    def _handle(self, handler: Handler | None, frame: Frame, now: Now) -> None:
        self.shell.acting = False
        try:
            if handler is None:
                raise UnknownType(f"frame type {frame[0]} is not known to this version")
            if frame[0] not in _FLAT:
                check_nesting(frame)
            handler(self, frame, now)
        except TickwheelError as error:
            self._refuse(_request_of(frame), error)
        except Exception as error:
            told = self.shell.contain(f"frame of type {frame[0]} from {self.peer}", error)
            self._refuse(_request_of(frame), told)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.paused = True
        for subscriber in (*self.subscribers.values(), *self.pulls):
            subscriber.blocked = True
        if self._transport is not None and self.open:
            self._transport.pause_reading()
        self._stop_timer()
        timeout_s = self.shell.settings.slow_reader_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._too_slow)

    def resume_writing(self) -> None:
        self._stop_timer()
        self.paused, self.heard_mono_ms = False, self.shell.clock.read().mono_ms
        if self._transport is not None and self.open and not self._held:
            self._transport.resume_reading()
        for subscriber in (*self.subscribers.values(), *self.pulls):
            subscriber.blocked = False
            self.shell.core.regained(subscriber)
        self.shell.poke()
        self.shell.listings.go_on()
        self.go_on()

    @property
    def consumers(self) -> tuple[Subscriber, ...]:
        """All who may get deliveries here, or have some in flight."""
        return (*self.subscribers.values(), *self.pulls, *self.others)

    # --- the shell's ----------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Write whole frames; a closed connection swallows them."""
        if not self.open or self._transport is None:
            return
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > self.shell.settings.out_bytes_max:
            self._abort(f"{waiting} bytes wait for it; the limit is out_bytes_max")

    def ok(self, request: int, result: Any) -> None:
        """Answer when everything that the command saw is durable."""
        self.shell.committer.reply(self, encode((_OK, request, result)))

    def refuse(self, request: int, error: TickwheelError) -> None:
        """Answer with an error at once."""
        self.send(encode((_ERROR, request, error.code, error.message)))

    def say_goodbye(self, code: str, message: str) -> None:
        self.send(encode((int(FrameType.GOODBYE), code, message)))

    def close(self) -> None:
        """Close when what was written is flushed."""
        if self.open and self._transport is not None:
            self.open = False
            self._transport.close()

    def abort(self) -> None:
        """Close at once. The kernel drops what is unsent instead of keeping it for a peer that
        does not read."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:  # the peer may have gone long ago
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def remember(self, subscriber: Subscriber) -> None:
        """Keep a subscriber that gets no more deliveries but may hold leases."""
        if len(self.others) >= self._others_max:
            self.others = [s for s in self.others if s.outstanding > 0]
            # Each is looked at a bounded number of times, however many stay.
            self._others_max = max(OTHERS_MIN, 2 * len(self.others))
        self.others.append(subscriber)

    # --- HELLO ----------------------------------------------------------------------------------

    def _hello(self, _: Connection, frame: Frame, now: Now) -> None:
        greeting = greet(self.shell, frame, now)
        self.session, self.name = greeting.session, greeting.name
        self._promised_heartbeats(greeting.answers_heartbeats)
        self._greeted = True
        self._stop_timer()
        self._decoder.frame_bytes_max = self.shell.limits.frame_bytes_max
        # It says nothing of any task, so it does not wait for the store.
        self.send(encode((_OK, greeting.request, greeting.answer)))

    def _promised_heartbeats(self, promised: bool) -> None:
        self.answers_heartbeats = promised
        if promised and self._transport is not None:
            timeout_s = self.shell.settings.heartbeat_timeout_s
            limit_unacknowledged(self._transport.get_extra_info("socket"), timeout_s)

    def _leave_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            self.shell.leave_session(session)

    # --- ends -----------------------------------------------------------------------------------

    def _refuse(self, request: int, error: TickwheelError) -> None:
        if error.closes_connection or not self._greeted:
            self._give_up(request, error)
        else:
            self.refuse(request, error)

    def _give_up(self, request: int, error: TickwheelError) -> None:
        """Answer and close, once the requests before it are answered. Nothing more is read."""
        self._ending = True
        self._stop_timer()
        known = isinstance(error, (FrameTooLarge, TooManyConnections))
        self.shell.mistake(self.peer, error, quiet=known)
        farewell = encode((_ERROR, request, error.code, error.message))
        if self._greeted:
            self.shell.committer.reply(_Farewell(self), farewell)
        else:  # no request of it waits for the store, so no descriptor shall either
            _Farewell(self).send(farewell)

    def _no_hello(self) -> None:
        timeout_s = self.shell.settings.hello_timeout_s
        self._give_up(0, HelloRequired(f"no HELLO within {timeout_s} s (hello_timeout_s)"))

    def _too_slow(self) -> None:
        timeout_s = self.shell.settings.slow_reader_timeout_s
        self._abort(f"it read too little for {timeout_s} s (slow_reader_timeout_s)")

    def ask_for_life(self) -> None:
        self.send(_HEARTBEAT)

    def give_up_silent(self, quiet_ms: int) -> None:
        limit = "heartbeat_timeout_s"
        self._cut_off(PeerSilent(f"nothing came from it for {quiet_ms / 1000:.1f} s ({limit})"))

    def _abort(self, reason: str) -> None:
        self._cut_off(SlowReader(reason))

    def _cut_off(self, error: TickwheelError) -> None:
        """A peer that does not read would not read a frame that says so either."""
        if self.open:
            self.open = False
            self.shell.mistake(self.peer, error, quiet=False)
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Farewell:
    """Where the last frame of a connection goes: it is written, then the connection closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        self._connection.send(data)
        self._connection.close()


def _request_of(frame: tuple[Any, ...]) -> int:
    """The number to answer with; 0 when there is none that could be answered."""
    number = frame[1] if len(frame) > 1 else 0
    return number if type(number) is int and 0 <= number <= REQUEST_MAX else 0


def _address(peername: Any) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        return f"{peername[0]}:{peername[1]}"
    return str(peername or "?")
