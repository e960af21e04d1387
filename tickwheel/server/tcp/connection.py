"""One TCP connection: converts bytes to frames for handlers, and answers and deliveries to bytes.
It answers HELLO, which checks the token and the version and selects the producer session.

This module knows the rules of a connection (HELLO first, limits, the token, a peer that does not
read), but not what commands do; the operations know that. The same class serves a standby, whose
operations refuse most commands. Invariants:

* Every request is answered once, by its operation or with the error that the operation raised.
* A client's mistake is answered and never causes a traceback. Only an unreadable stream, a missing
  or refused HELLO, or a peer that does not read ends the connection.
* Deliveries and reading stop while more than ``out_bytes_soft`` bytes wait for the peer.
* Frames that arrive together are handled in limited portions (``shared.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from tickwheel.api.frames import PROTOCOL_VERSION, REQUEST_MAX, SESSION_BYTES, FrameType
from tickwheel.clock import Clock
from tickwheel.errors import (
    BadRequest,
    FrameTooLarge,
    HelloRequired,
    InternalError,
    Overloaded,
    PeerSilent,
    ProtocolError,
    SlowReader,
    TickwheelError,
    TooManyConnections,
    Unauthorized,
    VersionUnsupported,
)
from tickwheel.limits import HELLO_BYTES_MAX, SHARDS_MAX, Limits
from tickwheel.model.policies import duration_ms
from tickwheel.model.records import ID_STEP
from tickwheel.protocol import Decoder, Frame, check_nesting, encode, encode_all
from tickwheel.server import checks
from tickwheel.server.access.logins import Logins
from tickwheel.server.settings import Settings
from tickwheel.server.shard.callers import NOBODY, OUTBOUND, Caller, Principal, Process
from tickwheel.server.tcp import shared
from tickwheel.server.tcp.shared import FRAME_STEPS, PLAIN_RUN_MAX, PLAIN_RUN_MIN

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.shard.operations import ShardInterface
    from tickwheel.server.shard.parts import Directory
    from tickwheel.server.tcp.shared import Handler, Shared, Table

STRANGERS_MAX = 512
"""Number of connections without HELLO above which a new connection has ``CROWDED_TIMEOUT_S``."""
CROWDED_TIMEOUT_S = 1.0
LEAD_WAIT_S = 0.5
"""Maximum seconds for which a standby that is about to lead delays the answer to HELLO. A handover
on a busy machine takes less, and clients wait longer for an answer."""
_ERROR, _OK = int(FrameType.ERROR), int(FrameType.OK)
_FLAT = frozenset(
    int(kind)
    for kind in (
        FrameType.ENQUEUE,
        FrameType.ENQUEUE_COLUMNS,
        FrameType.ONEWAY,
        FrameType.ACK,
        FrameType.NACK,
        FrameType.REJECT,
        FrameType.EXTEND,
        FrameType.RELEASE,
        FrameType.CANCEL,
        FrameType.RESCHEDULE,
        FrameType.RUN_NOW,
        FrameType.LOOKUP,
    )
)
"""Frames whose handlers check the type of every value, so that their nesting need not be
checked."""
_HEARTBEAT = encode((int(FrameType.HEARTBEAT),))


class Connection(asyncio.Protocol):
    """One TCP connection. It is the ``ReplySink`` of its caller and a protocol of the event
    loop."""

    def __init__(self, shared: Shared[Connection]) -> None:
        self._shared = shared
        self._operations = shared.operations
        self._settings = shared.operations.settings
        self._clock = shared.operations.clock
        self.caller = Caller(self, principal=NOBODY)
        self._table: Table = shared.table_of(NOBODY)
        """Handlers of the frames that the caller can send."""
        self.paused = False
        """Whether more than ``out_bytes_soft`` bytes wait for the peer."""
        self.last_data_mono_ms = 0
        """Time, on the steady clock, when the peer last sent bytes."""
        self.last_heartbeat_mono_ms = 0
        self.answers_heartbeats = False
        """Whether the peer announced in HELLO that it answers heartbeats."""
        self.wants_lease = False
        """Whether the peer asked to be told when the lease of this shard expires."""
        self.open = False
        self._answers: list[Frame] = []
        """Answers of the shard that are not yet written."""
        self._encoded: list[bytes] = []
        """Unwritten answers, encoded by ``answer_to`` so that their size counts while they wait."""
        self._decoder = Decoder(min(HELLO_BYTES_MAX, self._operations.frame_bytes_max))
        self._greeted = self._has_waited = False
        self._ending = self._is_ended_here = self._is_silent = False
        self._frames: list[Frame] = []
        """Received frames that are not yet handled."""
        self._unread_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._shared.is_over:
            # It was accepted while the daemon led, but the event loop reports it only now.
            self.abort()
            return
        self.open = True
        self.caller.address = _address(transport.get_extra_info("peername"))
        self.last_data_mono_ms = self._clock.read().mono_ms
        keep_alive(transport.get_extra_info("socket"), self._settings.heartbeat_interval_s)
        connections_max = self._operations.limits.connections_max
        if len(self._shared.connections) >= connections_max:
            self._give_up(
                0,
                TooManyConnections(
                    f"{len(self._shared.connections)} connections are open; the limit is"
                    f" {connections_max} (connections_max)"
                ),
            )
            return
        self._shared.connections.add(self)
        self._operations.opened(self.caller)
        self._transport.set_write_buffer_limits(high=self._settings.out_bytes_stop)
        timeout_s = self._settings.hello_timeout_s
        if len(self._shared.strangers) >= STRANGERS_MAX:
            timeout_s = min(CROWDED_TIMEOUT_S, timeout_s)
        self._shared.strangers[self] = None
        self._timer = asyncio.get_running_loop().call_later(
            timeout_s, self._end_stranger, timeout_s
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._shared.connections.discard(self)
        self._shared.strangers.pop(self, None)
        self._stop_timer()
        self._frames.clear()
        self._shared.waiting.pop(self, None)
        self._shared.turns.forget(self)
        self._shared.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        self._operations.closed(self.caller, self._disconnect_reason())
        self._shared.logins.quotas.leave(self.caller)

    def _disconnect_reason(self) -> str:
        """Return how the connection broke, or "" if this side closed it for a reason other than the
        peer's silence."""
        if self._is_silent:
            return f"silent for {self._settings.heartbeat_timeout_s:g} s"
        if self._is_ended_here:
            return ""
        silent_s = (self._clock.read().mono_ms - self.last_data_mono_ms) / 1000
        return f"its connection broke {silent_s:.1f} s after its last message"

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._give_up(0, error)
            return
        now = self._clock.read()
        self.last_data_mono_ms = now.mono_ms
        if self.caller.presence.doubted:
            self._operations.heard(self.caller)
        self._count_unread()
        if self._frames:
            self._frames += frames
        else:
            self._handle_all(frames, now)

    def _count_unread(self) -> None:
        """Count the bytes of unfinished frames. End the connection if those of all connections
        exceed ``unread_bytes_max``."""
        shared, before = self._shared, self._unread_bytes
        self._unread_bytes = self._decoder.pending_bytes
        shared.unread_bytes += self._unread_bytes - before
        limit = self._settings.unread_bytes_max
        if self._unread_bytes > before and shared.unread_bytes > limit:
            self._give_up(
                0,
                Overloaded(
                    f"{shared.unread_bytes} bytes of unfinished frames are in memory; the limit is"
                    f" {limit} (unread_bytes_max)"
                ),
            )

    def _handle_all(self, frames: list[Frame], now: Now) -> None:
        if self._ending:
            return
        turns, used, run = self._shared.turns, 0, PLAIN_RUN_MAX
        index, count = 0, len(frames)
        while index < count:
            if self._greeted:
                if self.must_wait or turns.is_over(used):
                    self._hold(frames[index:])
                    break
                start, stop = index, min(count, index + run)
                index = self._enqueue_plain(frames, start, stop, now)
                turns.take(index - start)
                used += index - start
                if index == stop:
                    run = min(PLAIN_RUN_MAX, 4 * run)
                    continue
                run = PLAIN_RUN_MIN
            frame = frames[index]
            index += 1
            turns.take(FRAME_STEPS)
            used += FRAME_STEPS
            table = self._table  # HELLO replaces it
            handler = table.handlers.get(frame[0], table.otherwise)
            self._handle(handler if self._greeted else Connection._hello, frame, now)
            if self._ending:
                break
            if not self._greeted:  # HELLO waits until this daemon leads
                self._frames += frames[index:]
                break
        self._operations.handled()
        if not self._frames:
            self._end_if_broken()

    def _end_if_broken(self) -> None:
        """End the connection if the bytes after the frames that were handled are not a frame."""
        if self._decoder.error is not None and not self._ending:
            self._give_up(0, self._decoder.error)

    def _enqueue_plain(self, frames: list[Frame], start: int, stop: int, now: Now) -> int:
        try:
            return self._table.enqueue_plain(self, frames, start, stop, now)
        except Exception as error:
            # Some frames of the run have already changed the state, so the daemon must end.
            self._operations.fail(error)
            raise

    # --- back pressure --------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether requests of the peer are currently read."""
        return not (self.paused or self._frames)

    @property
    def must_wait(self) -> bool:
        """Whether requests of the peer must wait, because it does not read or too many of its
        answers wait for the store."""
        return self.paused or self._operations.is_behind(self.caller)

    def _hold(self, frames: list[Frame]) -> None:
        """Keep unhandled frames until the connection's next turn, or until answers are written."""
        self._frames = frames
        if self.must_wait:
            self._shared.waiting[self] = None
        else:
            self._shared.turns.wait(self)
        if self._transport is not None and self.open:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Handle the held frames if the connection no longer has to wait."""
        if not self._frames:
            return
        if self.must_wait:
            self._shared.waiting[self] = None
            return
        frames, self._frames = self._frames, []
        self._shared.waiting.pop(self, None)
        self._shared.turns.forget(self)
        now = self._clock.read()
        self.last_data_mono_ms = now.mono_ms
        self._handle_all(frames, now)
        if not self._frames and not self.paused and self._transport is not None and self.open:
            self._transport.resume_reading()

    def _handle(self, handler: Handler, frame: Frame, now: Now) -> None:
        self._operations.begin()
        try:
            if frame[0] not in _FLAT:
                check_nesting(frame)
            handler(self, frame, now)
        except TickwheelError as error:
            self._refuse(_request_of(frame), error)
        except Exception as error:
            source = f"frame of type {frame[0]} from {self.caller.address}"
            self._refuse(_request_of(frame), self._operations.contain(source, error))

    def eof_received(self) -> bool:
        """Keep a connection without TLS open until its last error is written: the error can wait
        for the store, and the peer may still read. TLS does not allow this."""
        transport = self._transport
        is_plain = transport is not None and transport.get_extra_info("sslcontext") is None
        return self._ending and self.open and is_plain

    def pause_writing(self) -> None:
        self.paused = True
        self._operations.blocked(self.caller)
        if self._transport is not None and self.open:
            self._transport.pause_reading()
        self._stop_timer()
        timeout_s = self._settings.slow_reader_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._abort_slow_reader)

    def resume_writing(self) -> None:
        if self.open:
            self._stop_timer()
        self.paused, self.last_data_mono_ms = False, self._clock.read().mono_ms
        if self._transport is not None and self.open and not self._frames:
            self._transport.resume_reading()
        # Read the peer's frames before sending more, because they can stop the deliveries.
        # Otherwise frames of a peer that reads as fast as deliveries arrive would never be read.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._unblock)
        self.resume()

    def _unblock(self) -> None:
        if self.open and not self.paused:
            self._operations.unblocked(self.caller)

    # --- called by the shard --------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self.caller.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        self._answers += [
            (_OK, request, (accepted_ms, (first,) if count == 1 else ids_of(first, count)))
            for request, first, count, accepted_ms in answers
        ]

    def answer_to(self, request: int, value: object) -> Sized:
        # Answers without a value are frequent and small, so ``flush`` encodes them together.
        answer = (_OK, request, value)
        return answer if value is None else self._encode(answer)

    def give(self, answer: Sized) -> None:
        answers: list[Any] = self._encoded if type(answer) is bytes else self._answers
        answers.append(answer)

    def error(self, request: int, code: str, message: str) -> None:
        self._answers.append((_ERROR, request, code, message))

    def flush(self) -> None:
        answers, self._answers = self._answers, []
        try:
            data = encode_all(answers)
        except Exception:
            data = b"".join(map(self._encode, answers))
        if self._encoded:
            data = b"".join((data, *self._encoded))
            self._encoded = []
        self.send(data)

    def _encode(self, answer: Frame) -> bytes:
        """Return the bytes of an answer, or of an error if msgpack cannot represent the answer."""
        try:
            return encode(answer)
        except Exception as error:
            source = f"the answer to request {answer[1]} of {self.caller.address}"
            internal = self._operations.survive(source, error)
            return encode((_ERROR, answer[1], InternalError.code, internal.message))

    def send(self, data: bytes) -> None:
        """Write whole frames, or discard them if the connection is closed."""
        if not self.open or self._transport is None:
            return
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._settings.out_bytes_max:
            limit = self._settings.out_bytes_max
            self._abort_as_slow(
                f"{waiting} bytes wait for the peer; the limit is {limit} (out_bytes_max)"
            )

    def send_goodbye(self, code: str, message: str, successor: str | None = None) -> None:
        """Send GOODBYE. ``successor`` is the address of the shard's next daemon, if it is known."""
        extra = () if successor is None else (successor,)
        self.send(encode((int(FrameType.GOODBYE), code, message, *extra)))

    def send_lease(self) -> None:
        """If the peer asked for it, send whether this daemon holds the lease of the shard."""
        if self.wants_lease:
            self.send(encode((int(FrameType.LEASE), self._shared.is_leased)))

    def end(self, code: str, message: str) -> None:
        """Send GOODBYE and close. Further frames of the peer are ignored."""
        self._ending = True
        self.send_goodbye(code, message)
        self.close()

    def close(self) -> None:
        """Close the connection after the written data is flushed, or abort it if the peer does not
        read that data in time."""
        if self.open and self._transport is not None:
            self.open, self._is_ended_here = False, True
            self._stop_timer()
            self._transport.close()
            if self._transport.get_write_buffer_size():
                timeout_s = self._settings.slow_reader_timeout_s
                self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)

    def abort(self) -> None:
        """Close the connection immediately. The kernel discards unsent data, instead of keeping it
        for a peer that does not read."""
        self._is_ended_here = True
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:  # the socket can already be closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    # --- HELLO ----------------------------------------------------------------------------------

    def change_role(self, shared: Shared[Connection]) -> bool:
        """Move the connection to the daemon's new role. Return False if HELLO was already answered
        or the new role has too many connections."""
        limit = shared.operations.limits.connections_max
        if self._greeted or self._ending or not self.open or len(shared.connections) >= limit:
            return False
        self._shared.connections.discard(self)
        self._shared.strangers.pop(self, None)
        shared.strangers[self] = None
        self._shared.unread_bytes -= self._unread_bytes
        self._shared, self._operations = shared, shared.operations
        self._table = shared.table_of(NOBODY)
        shared.connections.add(self)
        shared.unread_bytes += self._unread_bytes
        self._operations.opened(self.caller)
        return True

    def _hello(self, frame: Frame, now: Now) -> None:
        transport = self._transport
        peer = None if transport is None else transport.get_extra_info("peercert")
        hello = read_hello(frame, self._shared.logins, peer, self.caller.address)
        elsewhere = _other_address(self._settings, self._operations.directory, hello.shard)
        is_ours = hello.shard is not None and elsewhere is None
        if is_ours and not self._has_waited and self._shared.is_about_to_lead():
            self._wait_for_lead(frame)
            return
        self.caller.principal = hello.principal
        self._shared.logins.quotas.enter(self.caller)
        if hello.session is not None and elsewhere is None:
            self._operations.join(self.caller, hello.session, now)
        self.caller.name, self.caller.process = hello.name, hello.process
        self._table = self._shared.table_of(hello.principal)
        if elsewhere is not None and self._shared.elsewhere is not None:
            self._table = self._shared.elsewhere
        self._set_heartbeats(hello.answers_heartbeats)
        self._greeted = True
        self._shared.strangers.pop(self, None)
        self._stop_timer()
        self._decoder.frame_bytes_max = self._operations.frame_bytes_max
        # The answer contains nothing about tasks, so it need not wait for the store.
        greeting = self._operations.greeting()
        if elsewhere is not None:
            greeting = {"epoch": 0, "role": "standby", "active": elsewhere or None}
        route = _route(self._operations, hello.principal)
        greeting |= route
        answer = hello_answer(self._settings, self._operations.limits, now.now_ms, greeting)
        self.send(encode((_OK, hello.request, answer)))
        self.wants_lease = hello.wants_lease and elsewhere is None
        if not self._shared.is_leased:
            self.send_lease()

    def _wait_for_lead(self, hello: Frame) -> None:
        """Delay the answer to HELLO until this daemon leads, because a client that is refused now
        would reconnect repeatedly."""
        self._has_waited = True
        self._frames = [hello]
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(LEAD_WAIT_S, self.resume)
        if self._transport is not None:
            self._transport.pause_reading()

    def _set_heartbeats(self, are_answered: bool) -> None:
        self.answers_heartbeats = are_answered
        if are_answered and self._transport is not None:
            timeout_s = self._settings.heartbeat_timeout_s
            limit_unacknowledged(self._transport.get_extra_info("socket"), timeout_s)

    # --- ending the connection ------------------------------------------------------------------

    def _refuse(self, request: int, error: TickwheelError) -> None:
        if error.closes_connection or not self._greeted:
            self._give_up(request, error)
        else:
            self.caller.refuse(request, error)

    def _give_up(self, request: int, error: TickwheelError) -> None:
        """Stop reading. Answer with the error once all earlier requests are answered, and close."""
        self._ending = True
        self._stop_timer()
        if self._greeted:
            quiet = isinstance(error, FrameTooLarge)
            self._operations.mistake(self.caller, error, quiet=quiet)
        else:
            self._shared.strangers.pop(self, None)
            self._shared.logins.note_stranger(self.caller.address, error)

        def send_error() -> None:
            self.caller.refuse(request, error)
            self.close()

        if self._greeted:
            self._operations.after_all(send_error)
        elif isinstance(error, Unauthorized):
            self._shared.logins.answer_later(send_error)
        else:  # no request of this peer waits for the store, so the descriptor can be released now
            send_error()

    def _end_stranger(self, timeout_s: float) -> None:
        cause = "hello_timeout_s"
        if timeout_s < self._settings.hello_timeout_s:
            cause = f"shortened, because {STRANGERS_MAX} other connections had not sent HELLO"
        self._give_up(0, HelloRequired(f"no HELLO within {timeout_s} s ({cause})"))

    def _abort_slow_reader(self) -> None:
        timeout_s = self._settings.slow_reader_timeout_s
        self._abort_as_slow(f"the peer read too little for {timeout_s} s (slow_reader_timeout_s)")

    def send_heartbeat(self) -> None:
        self.send(_HEARTBEAT)

    def end_silent(self, silent_ms: int) -> None:
        self._is_silent, silent_s = True, silent_ms / 1000
        error = f"the peer sent nothing for {silent_s:.1f} s (heartbeat_timeout_s)"
        self._abort_with(PeerSilent(error))

    def _abort_as_slow(self, reason: str) -> None:
        self._abort_with(SlowReader(reason))

    def _abort_with(self, error: TickwheelError) -> None:
        """Abort the connection of a slow or silent peer, without sending an error."""
        if self.open:
            self.open = False
            self._operations.mistake(self.caller, error, quiet=False)
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def ids_of(first: int, count: int) -> tuple[int, ...]:
    """Return the ids of the ``count`` tasks of a request, beginning with ``first``."""
    return (first,) if count == 1 else tuple(range(first, first + count * ID_STEP, ID_STEP))


def _request_of(frame: tuple[Any, ...]) -> int:
    """Return the frame's request number, or 0 if it has no valid number."""
    number = frame[1] if len(frame) > 1 else 0
    return number if type(number) is int and 0 <= number <= REQUEST_MAX else 0


def _address(peername: Any) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        return f"{peername[0]}:{peername[1]}"
    return str(peername or "?")


# --- heartbeats ----------------------------------------------------------------------------------


SWEEPS_PER_INTERVAL = 4
SWEEP_S_MAX = 1.0
PROBES = 3
"""Number of unanswered keepalive probes after which the kernel ends the connection."""


class Peer(Protocol):
    """The interface of a connection that ``Heartbeats`` uses."""

    answers_heartbeats: bool
    last_data_mono_ms: int
    last_heartbeat_mono_ms: int
    """Steady time of the last HEARTBEAT; 0 if none was sent."""

    @property
    def is_read(self) -> bool:
        """Whether frames of the peer are currently read."""
        ...

    def send_heartbeat(self) -> None: ...

    def end_silent(self, silent_ms: int) -> None: ...


class Heartbeats:
    """Finds silent peers by checking all connections periodically."""

    def __init__(
        self, peers: Collection[Peer], clock: Clock, *, interval_s: float, timeout_s: float
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._interval_ms = duration_ms(interval_s)
        self._timeout_ms = duration_ms(timeout_s)
        self.pause_s = min(SWEEP_S_MAX, interval_s / SWEEPS_PER_INTERVAL)
        self._swept_mono_ms = self._since_mono_ms = clock.read().mono_ms

    async def run(self) -> None:
        """Check all connections periodically, forever."""
        while True:
            await asyncio.sleep(self.pause_s)
            self.sweep()

    def sweep(self) -> None:
        mono_ms = self._clock.read().mono_ms
        if mono_ms - self._swept_mono_ms > 2 * self.pause_s * 1000:
            # The loop was blocked, so frames that arrived meanwhile may be unread.
            self._since_mono_ms = mono_ms
        self._swept_mono_ms = mono_ms
        for peer in list(self._peers):
            if not (peer.answers_heartbeats and peer.is_read):
                continue
            silent_ms = mono_ms - max(peer.last_data_mono_ms, self._since_mono_ms)
            if silent_ms >= self._timeout_ms:
                peer.end_silent(silent_ms)
            elif silent_ms >= self._interval_ms:
                if mono_ms - peer.last_heartbeat_mono_ms >= self._interval_ms:
                    peer.last_heartbeat_mono_ms = mono_ms
                    peer.send_heartbeat()


def keep_alive(sock: Any, interval_s: float) -> None:
    """Enable TCP keepalive, with this interval where the system supports it."""
    if sock is None:
        return
    every_s = max(1, round(interval_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", every_s), ("INTVL", every_s), ("CNT", PROBES)):
        option = getattr(socket, f"TCP_KEEP{name}", None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_unacknowledged(sock: Any, timeout_s: float) -> None:
    """Make the kernel end the connection if sent bytes stay unacknowledged for ``timeout_s``.

    A receive window that stays closed has the same effect, so call this only for peers that read.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, round(timeout_s * 1000))


# --- HELLO ---------------------------------------------------------------------------------------

HELLO_OPTIONS = (
    "v", "session", "token", "client", "heartbeat", "host", "pid", "version", "shard", "lease",
)  # fmt: skip
TEXT_LENGTH_MAX = 255
PID_MAX = 2**32 - 1


class Hello(NamedTuple):
    """The checked fields of HELLO."""

    request: int
    principal: Principal
    name: str
    session: bytes | None
    answers_heartbeats: bool
    process: Process
    shard: int | None
    """The shard that the peer requests; None accepts any shard."""
    wants_lease: bool
    """Whether the peer asked to be told when the lease of its shard expires."""


def read_hello(
    frame: Frame, logins: Logins, peer: Mapping[str, Any] | None = None, address: str = "unknown"
) -> Hello:
    """Return the checked fields of HELLO. ``peer`` is the client's certificate, if any. Raise the
    error of an invalid or unauthorized HELLO."""
    if frame[0] != FrameType.HELLO:
        raise HelloRequired("the first frame must be HELLO (1)")
    check_nesting(frame)
    shared.arity(frame, 1, "options")
    request = checks.integer(frame[1], "request", 1, REQUEST_MAX)
    options = checks.options(frame[2], HELLO_OPTIONS)
    version = options.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"protocol version v must be {PROTOCOL_VERSION}, not {checks.shown(version)}"
        )
    principal = logins.authenticate(options.get("token"), peer, address)
    name = checks.text(options.get("client", ""), "client", TEXT_LENGTH_MAX)
    session = options.get("session")
    if session is not None and (type(session) is not bytes or len(session) != SESSION_BYTES):
        raise BadRequest(f"session must be {SESSION_BYTES} bytes, not {checks.shown(session)}")
    heartbeat = options.get("heartbeat", False)
    if type(heartbeat) is not bool:
        raise BadRequest(f"heartbeat must be true or false, not {checks.shown(heartbeat)}")
    wants_lease = options.get("lease", False)
    if type(wants_lease) is not bool:
        raise BadRequest(f"lease must be true or false, not {checks.shown(wants_lease)}")
    if session is not None and principal.is_limited:
        session = _own_session(principal, session)
    shard = options.get("shard")
    if shard is not None:
        shard = checks.integer(shard, "shard", 0, SHARDS_MAX - 1)
    process = _process(options)
    return Hello(request, principal, name, session, heartbeat, process, shard, wants_lease)


def _process(options: Mapping[str, Any]) -> Process:
    """Return the process named in HELLO, whose fields are optional."""
    pid = options.get("pid")
    return Process(
        checks.text(options.get("host", ""), "host", TEXT_LENGTH_MAX),
        None if pid is None else checks.integer(pid, "pid", 0, PID_MAX),
        checks.text(options.get("version", ""), "version", TEXT_LENGTH_MAX),
    )


def _own_session(principal: Principal, session: bytes) -> bytes:
    """Return a session key that depends on the principal. Without it, a principal with few rights
    could use the session of another principal, or of an idempotency key, by its name."""
    name = principal.name.encode() + session
    return hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"tw-tcp-session").digest()


def _other_address(
    settings: Settings, directory: Directory | None, shard: int | None
) -> str | None:
    """Return the address of the requested shard if another daemon has it, or "" if the address is
    unknown. Return None if this daemon has the shard or none was requested."""
    urls = settings.shard_urls
    if shard is None or (directory is None and not urls):
        return None
    if directory is not None:
        return None if shard == directory.shard else directory.whereabouts(shard)[0]
    if shard == settings.shard:
        return None
    return urls[shard] if shard < len(urls) else ""


def _route(operations: ShardInterface, principal: Principal) -> dict[str, Any]:
    """Return this daemon's shard and the addresses of all shards, or nothing if there is only one
    shard. The outbound process serves a single shard and does not get the addresses."""
    settings, directory = operations.settings, operations.directory
    if principal == OUTBOUND:
        return {}
    if directory is not None:
        version, urls = directory.route()
        common = {"route_version": version, "doors": directory.doors()}
        if directory.shard is None:
            return {"shards": urls, **common}
        own, shards = directory.shard, list(urls)
        if operations.role == "active":
            shards[own] = str(settings.advertise)  # the route may not contain it yet
        return {"shard": own, "shards": shards, **common}
    if not settings.shard_urls:
        return {}
    moved = {"moved_id": settings.moved_id} if settings.moved_id else {}
    return {"shard": settings.shard, "shards": settings.shard_urls, **moved}


def hello_answer(
    settings: Settings, limits: Limits, now_ms: int, greeting: dict[str, Any]
) -> dict[str, Any]:
    """Return the answer to HELLO. ``greeting`` contains the fields about the daemon's role and
    route."""
    return {
        "v": PROTOCOL_VERSION,
        "node": settings.node,
        **greeting,
        "now_ms": now_ms,
        "heartbeat": {
            "interval_ms": duration_ms(settings.heartbeat_interval_s),
            "timeout_ms": duration_ms(settings.heartbeat_timeout_s),
        },
        "limits": limits.to_wire(),
        "delay_levels_ms": settings.delay_levels_ms,
        "ack_gather_ms": settings.ack_gather_ms,
    }
