"""One TCP connection: bytes to frames, frames to handlers, answers and deliveries to bytes; and
HELLO: who may speak to the daemon, in which version, and as which producer session.

Knows the conversation's rules (HELLO first, limits, the token, a peer that does not read) and
no meaning of a command: that is the operations'. The same class serves a daemon that stands by: its
operations refuse all but a few. Invariants:

* Every request is answered once, by the operation or by the error it raised.
* A client's mistake is answered and never ends in a traceback; only an unreadable stream, a
  missing or refused HELLO, or a peer that does not read, ends the connection.
* Deliveries and reading stop while more than ``out_bytes_soft`` wait for the peer.
* What came in one piece is looked at a share at a time (``shared.py``), whatever there is of it.
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
from tickwheel.model.records import ID_STEP
from tickwheel.protocol import Decoder, Frame, check_nesting, encode, encode_all
from tickwheel.server import checks
from tickwheel.server.logins import Logins
from tickwheel.server.settings import Settings
from tickwheel.server.shard.callers import NOBODY, OUTBOUND, Caller, Principal, Process
from tickwheel.server.tcp import shared
from tickwheel.server.tcp.shared import FRAME_STEPS, PLAIN_RUN_MAX, PLAIN_RUN_MIN

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.shard.operations import Conversing
    from tickwheel.server.shard.parts import Directory
    from tickwheel.server.tcp.shared import Handler, Shared, Table

STRANGERS_MAX = 512
"""Connections without HELLO; those that come while there are more have less time for it."""
CROWDED_TIMEOUT_S = 1.0
LEAD_WAIT_S = 0.5
"""How long, in seconds, the HELLO to a standby that is about to lead waits for that: as a hand-over
takes on a busy machine, and not as long as a client waits for an answer."""
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
"""Frames whose handlers check the type of every value, so that their depth needs no look."""
_HEARTBEAT = encode((int(FrameType.HEARTBEAT),))


class Connection(asyncio.Protocol):
    """One TCP connection: the ``ReplySink`` of its caller, and a protocol of the event loop."""

    def __init__(self, shared: Shared[Connection]) -> None:
        self._shared = shared
        self._operations = shared.operations
        self._settings = shared.operations.settings
        self._clock = shared.operations.clock
        self.caller = Caller(self, principal=NOBODY)
        self._table: Table = shared.table_of(NOBODY)
        """The handlers of the frames that the caller may send."""
        self.paused = False
        """Whether more than ``out_bytes_soft`` bytes wait for the peer."""
        self.heard_mono_ms = 0
        """When the last bytes came from the peer, by the steady clock."""
        self.asked_mono_ms = 0
        self.answers_heartbeats = False
        """Whether the peer said in HELLO that it answers heartbeats."""
        self.wants_lease = False
        """Whether the peer wants to know when the lease of this shard is over."""
        self.open = False
        self._answers: list[Frame] = []
        """Answers that the shard has given and that are not written yet."""
        self._encoded: list[bytes] = []
        """Such answers in encoded form: they may have had to wait, and were encoded at once."""
        self._decoder = Decoder(min(HELLO_BYTES_MAX, self._operations.frame_bytes_max))
        self._greeted = self._has_waited = False
        self._ending = self._is_ended_here = self._is_silent = False
        self._held: list[Frame] = []
        """Requests that have come and were not looked at yet."""
        self._unread_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    # --- the event loop's -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._shared.is_over:
            # It was accepted while the daemon led, and the event loop says so only now.
            self.abort()
            return
        self.open = True
        self.caller.address = _address(transport.get_extra_info("peername"))
        self.heard_mono_ms = self._clock.read().mono_ms
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
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._no_hello, timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._shared.connections.discard(self)
        self._shared.strangers.pop(self, None)
        self._stop_timer()
        self._held.clear()
        self._shared.held.pop(self, None)
        self._shared.turns.forget(self)
        self._shared.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        self._operations.closed(self.caller, self._how_it_broke())
        self._shared.logins.quotas.leave(self.caller)

    def _how_it_broke(self) -> str:
        """How the connection broke; "": this side has ended it, and not for silence."""
        if self._is_silent:
            return f"silent for {self._settings.heartbeat_timeout_s:g} s"
        if self._is_ended_here:
            return ""
        quiet_s = (self._clock.read().mono_ms - self.heard_mono_ms) / 1000
        return f"its connection broke, {quiet_s:.1f} s after it was heard last"

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self._give_up(0, error)
            return
        now = self._clock.read()
        self.heard_mono_ms = now.mono_ms
        if self.caller.presence.doubted:
            self._operations.heard(self.caller)
        self._count_unread()
        if self._held:
            self._held += frames
        else:
            self._handle_all(frames, now)

    def _count_unread(self) -> None:
        """Count the bytes of unfinished frames, which are in memory, too."""
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
            table = self._table  # another one behind HELLO
            known = table.handlers.get(frame[0], table.otherwise)
            self._handle(known if self._greeted else Connection._hello, frame, now)
            if self._ending:
                break
            if not self._greeted:  # the HELLO waits
                self._held += frames[index:]
                break
        self._operations.handled()
        if not self._held:
            self._end_if_broken()

    def _end_if_broken(self) -> None:
        """End the connection if its stream was broken behind the frames that were handled now."""
        if self._decoder.error is not None and not self._ending:
            self._give_up(0, self._decoder.error)

    def _enqueue_plain(self, frames: list[Frame], start: int, stop: int, now: Now) -> int:
        try:
            return self._table.enqueue_plain(self, frames, start, stop, now)
        except Exception as error:
            # Of many frames at once: which of them it has changed something for is not known.
            self._operations.fail(error)
            raise

    # --- a peer that asks faster than it can be answered ----------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether requests of the peer are taken at the moment."""
        return not (self.paused or self._held)

    @property
    def must_wait(self) -> bool:
        """Whether the peer does not read, or too many answers wait for the store: no more of its
        requests are looked at until that has changed."""
        return self.paused or self._operations.is_behind(self.caller)

    def _hold(self, frames: list[Frame]) -> None:
        """Keep frames until the connection's next turn, or until answers have left."""
        self._held = frames
        if self.must_wait:
            self._shared.held[self] = None
        else:
            self._shared.turns.wait(self)
        if self._transport is not None and self.open:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Look at the frames that were held, if the connection need not wait any more."""
        if not self._held:
            return
        if self.must_wait:
            self._shared.held[self] = None
            return
        frames, self._held = self._held, []
        self._shared.held.pop(self, None)
        self._shared.turns.forget(self)
        now = self._clock.read()
        self.heard_mono_ms = now.mono_ms
        self._handle_all(frames, now)
        if not self._held and not self.paused and self._transport is not None and self.open:
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
            what = f"frame of type {frame[0]} from {self.caller.address}"
            self._refuse(_request_of(frame), self._operations.contain(what, error))

    def eof_received(self) -> bool:
        """Stay open, where TLS does not forbid it, until the error that ends the connection is
        written: it may wait for the store, and the peer still reads."""
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
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._too_slow)

    def resume_writing(self) -> None:
        self._stop_timer()
        self.paused, self.heard_mono_ms = False, self._clock.read().mono_ms
        if self._transport is not None and self.open and not self._held:
            self._transport.resume_reading()
        # What the peer has sent meanwhile is read before it gets more: it may say that it wants no
        # more. Else a peer that reads as quickly as deliveries come is never heard.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._unblock)
        self.go_on()

    def _unblock(self) -> None:
        if self.open and not self.paused:
            self._operations.unblocked(self.caller)

    # --- the shard's ----------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self.caller.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        self._answers += [
            (_OK, request, (accepted_ms, (first,) if count == 1 else ids_of(first, count)))
            for request, first, count, accepted_ms in answers
        ]

    def answer_to(self, request: int, value: object) -> Sized:
        # The one without a value is frequent and as small: it is encoded with the others.
        answer = (_OK, request, value)
        return answer if value is None else self._encode(answer)

    def give(self, answer: Sized) -> None:
        given: list[Any] = self._encoded if type(answer) is bytes else self._answers
        given.append(answer)

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
        """An answer as bytes; one that msgpack cannot say becomes an error, and harms no other."""
        try:
            return encode(answer)
        except Exception as error:
            what = f"the answer to request {answer[1]} of {self.caller.address}"
            said = self._operations.survive(what, error)
            return encode((_ERROR, answer[1], InternalError.code, said.message))

    def send(self, data: bytes) -> None:
        """Write whole frames; a closed connection swallows them."""
        if not self.open or self._transport is None:
            return
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._settings.out_bytes_max:
            self._abort(f"{waiting} bytes wait for it; the limit is out_bytes_max")

    def say_goodbye(self, code: str, message: str, heir: str | None = None) -> None:
        """``heir``: the address of the daemon that has the shard next, if that is known."""
        more = () if heir is None else (heir,)
        self.send(encode((int(FrameType.GOODBYE), code, message, *more)))

    def say_lease(self) -> None:
        """Say whether the lease of the shard is held, if the peer wants to know it."""
        if self.wants_lease:
            self.send(encode((int(FrameType.LEASE), self._shared.is_leased)))

    def part(self, code: str, message: str) -> None:
        """Send GOODBYE and close; nothing that the peer has sent is looked at any more."""
        self._ending = True
        self.say_goodbye(code, message)
        self.close()

    def close(self) -> None:
        """Close the connection when what was written is flushed."""
        if self.open and self._transport is not None:
            self.open, self._is_ended_here = False, True
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once. The kernel drops what is unsent instead of keeping it for a
        peer that does not read."""
        self._is_ended_here = True
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:  # the peer may have gone long ago
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    # --- HELLO ----------------------------------------------------------------------------------

    def change_role(self, shared: Shared[Connection]) -> bool:
        """Belong to the daemon's new role, if the peer has not been told of the old one. False: it
        has greeted already, or the new role has no room for it."""
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
        elsewhere = _elsewhere(self._settings, self._operations.directory, hello.shard)
        is_ours = hello.shard is not None and elsewhere is None
        if is_ours and not self._has_waited and self._shared.is_about_to_lead():
            self._wait_for_lead(frame)
            return
        self.caller.principal = hello.principal
        self._shared.logins.quotas.enter(self.caller)
        if hello.session is not None and elsewhere is None:
            self._operations.join(self.caller, hello.session, now.now_ms)
        self.caller.name, self.caller.process = hello.name, hello.process
        self._table = self._shared.table_of(hello.principal)
        if elsewhere is not None and self._shared.elsewhere is not None:
            self._table = self._shared.elsewhere
        self._promised_heartbeats(hello.answers_heartbeats)
        self._greeted = True
        self._shared.strangers.pop(self, None)
        self._stop_timer()
        self._decoder.frame_bytes_max = self._operations.frame_bytes_max
        # It says nothing of any task, so it does not wait for the store.
        greeting = self._operations.greeting()
        if elsewhere is not None:
            greeting = {"epoch": 0, "role": "standby", "active": elsewhere or None}
        route = _route(self._operations, hello.principal)
        greeting |= route
        answer = hello_answer(self._settings, self._operations.limits, now.now_ms, greeting)
        self.send(encode((_OK, hello.request, answer)))
        self.wants_lease = hello.wants_lease and elsewhere is None
        if not self._shared.is_leased:
            self.say_lease()

    def _wait_for_lead(self, hello: Frame) -> None:
        """Answer a HELLO when this daemon leads: told that it does not yet, the client would come
        again and again."""
        self._has_waited = True
        self._held = [hello]
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(LEAD_WAIT_S, self.go_on)
        if self._transport is not None:
            self._transport.pause_reading()

    def _promised_heartbeats(self, promised: bool) -> None:
        self.answers_heartbeats = promised
        if promised and self._transport is not None:
            timeout_s = self._settings.heartbeat_timeout_s
            limit_unacknowledged(self._transport.get_extra_info("socket"), timeout_s)

    # --- ends -----------------------------------------------------------------------------------

    def _refuse(self, request: int, error: TickwheelError) -> None:
        if error.closes_connection or not self._greeted:
            self._give_up(request, error)
        else:
            self.caller.refuse(request, error)

    def _give_up(self, request: int, error: TickwheelError) -> None:
        """Answer with an error once earlier requests are answered, and close. Nothing is read."""
        self._ending = True
        self._stop_timer()
        if self._greeted:
            quiet = isinstance(error, FrameTooLarge)
            self._operations.mistake(self.caller, error, quiet=quiet)
        else:
            self._shared.strangers.pop(self, None)
            self._shared.logins.note_stranger(self.caller.address, error)

        def say_why() -> None:
            self.caller.refuse(request, error)
            self.close()

        if self._greeted:
            self._operations.after_all(say_why)
        elif isinstance(error, Unauthorized):
            self._shared.logins.later(say_why)
        else:  # no request of it waits for the store, so no descriptor shall either
            say_why()

    def _no_hello(self, timeout_s: float) -> None:
        why = "hello_timeout_s"
        if timeout_s < self._settings.hello_timeout_s:
            why = f"{STRANGERS_MAX} others waited when it came"
        self._give_up(0, HelloRequired(f"no HELLO within {timeout_s} s ({why})"))

    def _too_slow(self) -> None:
        timeout_s = self._settings.slow_reader_timeout_s
        self._abort(f"it read too little for {timeout_s} s (slow_reader_timeout_s)")

    def ask_for_life(self) -> None:
        self.send(_HEARTBEAT)

    def give_up_silent(self, quiet_ms: int) -> None:
        limit = "heartbeat_timeout_s"
        self._is_silent = True
        self._cut_off(PeerSilent(f"nothing came from it for {quiet_ms / 1000:.1f} s ({limit})"))

    def _abort(self, reason: str) -> None:
        self._cut_off(SlowReader(reason))

    def _cut_off(self, error: TickwheelError) -> None:
        """End a peer that does not read, without a frame that it would not read either."""
        if self.open:
            self.open = False
            self._operations.mistake(self.caller, error, quiet=False)
            self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def ids_of(first: int, count: int) -> tuple[int, ...]:
    """The ids of one request's tasks."""
    return (first,) if count == 1 else tuple(range(first, first + count * ID_STEP, ID_STEP))


def _request_of(frame: tuple[Any, ...]) -> int:
    """The number to answer with; 0 when there is none that could be answered."""
    number = frame[1] if len(frame) > 1 else 0
    return number if type(number) is int and 0 <= number <= REQUEST_MAX else 0


def _address(peername: Any) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        return f"{peername[0]}:{peername[1]}"
    return str(peername or "?")


# --- signs of life -------------------------------------------------------------------------------


SWEEPS_PER_INTERVAL = 4
SWEEP_S_MAX = 1.0
PROBES = 3
"""Keepalive probes without an answer before the kernel gives a host up."""


class Peer(Protocol):
    """What heartbeats need to know of a connection."""

    answers_heartbeats: bool
    heard_mono_ms: int
    asked_mono_ms: int
    """When HEARTBEAT was sent last (steady ms); 0: never."""

    @property
    def is_read(self) -> bool:
        """Whether what the peer sends is taken at the moment."""
        ...

    def ask_for_life(self) -> None: ...

    def give_up_silent(self, quiet_ms: int) -> None: ...


class Heartbeats:
    """Finds silent peers: looks at all connections now and then."""

    def __init__(
        self, peers: Collection[Peer], clock: Clock, *, interval_s: float, timeout_s: float
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._interval_ms = int(interval_s * 1000)
        self._timeout_ms = int(timeout_s * 1000)
        self.pause_s = min(SWEEP_S_MAX, interval_s / SWEEPS_PER_INTERVAL)
        self._swept_mono_ms = self._since_mono_ms = clock.read().mono_ms

    async def run(self) -> None:
        """Look at all connections again and again, for ever."""
        while True:
            await asyncio.sleep(self.pause_s)
            self.sweep()

    def sweep(self) -> None:
        mono_ms = self._clock.read().mono_ms
        if mono_ms - self._swept_mono_ms > 2 * self.pause_s * 1000:
            # What they said meanwhile may lie unread.
            self._since_mono_ms = mono_ms
        self._swept_mono_ms = mono_ms
        for peer in list(self._peers):
            if not (peer.answers_heartbeats and peer.is_read):
                continue
            quiet_ms = mono_ms - max(peer.heard_mono_ms, self._since_mono_ms)
            if quiet_ms >= self._timeout_ms:
                peer.give_up_silent(quiet_ms)
            elif quiet_ms >= self._interval_ms:
                if mono_ms - peer.asked_mono_ms >= self._interval_ms:
                    peer.asked_mono_ms = mono_ms
                    peer.ask_for_life()


def keep_alive(sock: Any, interval_s: float) -> None:
    """Let the kernel probe whether the peer's host is there, where the interval can be set."""
    if sock is None:
        return
    every_s = max(1, round(interval_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", every_s), ("INTVL", every_s), ("CNT", PROBES)):
        option = getattr(socket, f"TCP_KEEP{name}", None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_unacknowledged(sock: Any, timeout_s: float) -> None:
    """End the connection when the peer's kernel leaves sent bytes unacknowledged for so long.

    Also a receive window that stays closed so long: only for peers that are known to read.
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
    """What a peer said in HELLO, checked."""

    request: int
    principal: Principal
    name: str
    session: bytes | None
    answers_heartbeats: bool
    process: Process
    shard: int | None
    """The shard that it looks for; None: whichever this is."""
    wants_lease: bool
    """Whether it wants to know when the lease of its shard is over."""


def read_hello(
    frame: Frame, logins: Logins, peer: Mapping[str, Any] | None = None, address: str = "somebody"
) -> Hello:
    """A checked HELLO from an address; ``peer`` is the certificate, if there is one. Raises what
    forbids it."""
    if frame[0] != FrameType.HELLO:
        raise HelloRequired("the first frame must be HELLO (1)")
    check_nesting(frame)
    shared.arity(frame, 1, "options")
    request = checks.integer(frame[1], "request", 1, REQUEST_MAX)
    options = checks.options(frame[2], HELLO_OPTIONS)
    version = options.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"v {checks.shown(version)} is not spoken here; known: {PROTOCOL_VERSION}"
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
        session = _own(principal, session)
    shard = options.get("shard")
    if shard is not None:
        shard = checks.integer(shard, "shard", 0, SHARDS_MAX - 1)
    process = _process(options)
    return Hello(request, principal, name, session, heartbeat, process, shard, wants_lease)


def _process(options: Mapping[str, Any]) -> Process:
    """The process that the peer names, if it does."""
    pid = options.get("pid")
    return Process(
        checks.text(options.get("host", ""), "host", TEXT_LENGTH_MAX),
        None if pid is None else checks.integer(pid, "pid", 0, PID_MAX),
        checks.text(options.get("version", ""), "version", TEXT_LENGTH_MAX),
    )


def _own(principal: Principal, session: bytes) -> bytes:
    """The key of a session under the name that the peer gave it. It depends on the principal: else
    one with few rights could name another's session, be it one of an idempotency key, and answer
    for it."""
    named = principal.name.encode() + session
    return hashlib.blake2b(named, digest_size=SESSION_BYTES, person=b"tw-tcp-session").digest()


def _elsewhere(settings: Settings, directory: Directory | None, shard: int | None) -> str | None:
    """Where the shard is that a peer looks for, empty where nobody is known to have it; None: it
    is here, or the peer looks for none."""
    urls = settings.shard_urls
    if shard is None or (directory is None and not urls):
        return None
    if directory is not None:
        return None if shard == directory.shard else directory.whereabouts(shard)[0]
    if shard == settings.shard:
        return None
    return urls[shard] if shard < len(urls) else ""


def _route(operations: Conversing, principal: Principal) -> dict[str, Any]:
    """Which shard this daemon has, and where all of them are; empty where there is only one. The
    process that sends to targets is one for each shard, and is not told of others."""
    settings, directory = operations.settings, operations.directory
    if principal == OUTBOUND:
        return {}
    if directory is not None:
        version, urls = directory.route()
        said = {"route_version": version, "doors": directory.doors()}
        if directory.shard is None:
            return {"shards": urls, **said}
        own, shards = directory.shard, list(urls)
        if operations.role == "active":
            shards[own] = str(settings.advertise)  # others may not know that yet
        return {"shard": own, "shards": shards, **said}
    if not settings.shard_urls:
        return {}
    moved = {"moved_id": settings.moved_id} if settings.moved_id else {}
    return {"shard": settings.shard, "shards": settings.shard_urls, **moved}


def hello_answer(
    settings: Settings, limits: Limits, now_ms: int, greeting: dict[str, Any]
) -> dict[str, Any]:
    """The answer to HELLO; ``greeting`` has the daemon's part among others."""
    return {
        "v": PROTOCOL_VERSION,
        "node": settings.node,
        **greeting,
        "now_ms": now_ms,
        "heartbeat": {
            "interval_ms": int(settings.heartbeat_interval_s * 1000),
            "timeout_ms": int(settings.heartbeat_timeout_s * 1000),
        },
        "limits": limits.to_wire(),
        "delay_levels_ms": settings.delay_levels_ms,
        "ack_gather_ms": settings.ack_gather_ms,
    }
