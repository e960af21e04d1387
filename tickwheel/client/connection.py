"""Addresses, TLS trust, and one TCP connection: frames in and out, and the request that waits for
each answer.

``parse_url`` turns ``tcp://a:7355,b:7355`` into a list of (host, port); ``tls://`` applies to all
addresses. ``Trust`` makes a client's TLS context, which trusts the system's certificates or a file;
the daemon's certificate must name the host that the client connects to. This check cannot be
disabled: trust a self-signed certificate by passing its file as ``ca``.

Handles HELLO, answers and deliveries by number, without their meaning. All parts of the client wait
with ``Signal`` and ``fail``. Invariants: every written request learns its end exactly once
(``answered``, ``failed``, ``lost`` or ``expired``); everything that one step of the loop writes is
sent together; no data from the daemon raises into the event loop; a connection to a daemon that
says it is not active is closed at once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from tickwheel import environment
from tickwheel.api.frames import DEFAULT_PORT, FrameType
from tickwheel.errors import (
    BadRequest,
    ConnectionLost,
    LimitExceeded,
    NotActive,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    TlsFailed,
    Unauthorized,
    Unreachable,
    from_wire,
)
from tickwheel.limits import HELLO_BYTES_MAX
from tickwheel.model.values import whole_number
from tickwheel.protocol import Decoder, encode

DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"
PLAIN, SECURE = "tcp://", "tls://"

Address = tuple[str, int]


def parse_url(url: str) -> list[Address]:
    """Return every address of ``url`` in order. Each may have a scheme, and the port is optional.

    Raise BadRequest naming the invalid part.
    """
    if not isinstance(url, str):
        raise BadRequest(f"url must be a string like {DEFAULT_URL}, not {url!r:.60}")
    parts = [part.strip() for part in url.split(",")]
    if len({_is_secure(part) for part in parts if "://" in part or part is parts[0]}) > 1:
        raise BadRequest(f"url {url!r:.200}: either all addresses or none must use {SECURE}")
    return [_parse(part, url) for part in parts]


def is_secure(url: str) -> bool:
    """Return whether the URL uses TLS."""
    return _is_secure(url.strip())


def url_of(address: Address, *, secure: bool) -> str:
    """Return the URL of one address."""
    return f"{SECURE if secure else PLAIN}{address_text(address)}"


def _is_secure(part: str) -> bool:
    return part.startswith(SECURE)


def address_text(address: Address) -> str:
    """Return an address as in a URL, with IPv6 addresses in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(part: str, url: str) -> Address:
    scheme, mark, rest = part.rpartition("://")
    if mark and scheme + mark not in (PLAIN, SECURE):
        raise BadRequest(
            f"url {url!r:.200}: the scheme must be {PLAIN} or {SECURE}, not {scheme}://"
        )
    rest = rest.rstrip("/")
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket:
            raise BadRequest(f"url {url!r:.200}: {part!r:.60} has no closing bracket")
        if port and not port.startswith(":"):
            raise BadRequest(f"url {url!r:.200}: {part!r:.60} must have :PORT after the bracket")
        port = port[1:]
    else:
        host, _, port = rest.partition(":")
    number = whole_number(port) if port else DEFAULT_PORT
    if not host or number is None or not 0 < number < 65_536:
        raise BadRequest(
            f"url {url!r:.200}: {part!r:.60} must be {PLAIN}HOST:PORT, the port between 1 and 65535"
        )
    return host, number


class Trust(NamedTuple):
    """Files in PEM; None: the file named in the environment, or none."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of the files. Raise BadRequest naming an invalid file."""
        ca = self.ca or environment.value("TICKWHEEL_CA")
        cert = self.cert or environment.value("TICKWHEEL_CLIENT_CERT")
        key = self.key or environment.value("TICKWHEEL_CLIENT_KEY")
        for name, path in (("ca", ca), ("client_cert", cert), ("client_key", key)):
            _check(name, path)
        if key is not None and cert is None:
            raise BadRequest("client_key needs client_cert")
        try:
            context = ssl.create_default_context(cafile=ca)
        except ssl.SSLError as error:
            raise BadRequest(f"ca {ca}: {_reason(error)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert is not None:
            try:
                context.load_cert_chain(cert, key, password=lambda: "")
            except ssl.SSLError as error:
                files = cert if key is None else f"{cert} with client_key {key}"
                raise BadRequest(f"client_cert {files}: {_reason(error)}") from None
        return context


def _check(name: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise BadRequest(f"{name} {path}: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or error.strerror or str(error)).replace("_", " ").lower()


_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""TLS errors that mean the peer speaks plain text."""


def explain(problem: OSError | UnicodeError) -> TickwheelError:
    """Return the error for a failed connection."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        why = (problem.verify_message or str(problem)).rstrip(".")
        return TlsFailed(f"the daemon's certificate is not trusted: {why}")
    if isinstance(problem, ssl.SSLError):
        reason = problem.reason or ""
        if reason in _PLAIN:
            return TlsFailed("the daemon does not use TLS; use tcp:// instead of tls://")
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return Unauthorized(f"the daemon refused the client's certificate: {_reason(problem)}")
        return TlsFailed(_reason(problem))
    return Unreachable(str(problem))


def fail(future: asyncio.Future[Any], error: TickwheelError) -> bool:
    """Set an exception on a future unless it is done. Return whether it was set.

    The exception counts as retrieved: a future of ``enqueue_nowait`` or ``ack_nowait`` that nobody
    awaits must not end in "exception was never retrieved". The client logs such failures itself,
    one line for each frame.
    """
    if future.done():
        return False
    future.set_exception(error)
    future.exception()
    return True


class Signal:
    """Wakes all current waiters; each checks its condition again."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Wait until the next ``notify``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # this waiter was woken in vain: wake another
                self.notify(1)
            raise
        finally:
            self._waiters.pop(waiter, None)

    def notify(self, count: int | None = None) -> None:
        """Wake all waiters, or the ``count`` that have waited longest."""
        waiters = self._waiters
        left = len(waiters) if count is None else count
        while waiters and left > 0:
            waiter = next(iter(waiters))
            del waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
                left -= 1


LOGGER = logging.getLogger("tickwheel.client")
LOGGER.addHandler(logging.NullHandler())  # silent unless the application configures logging

OUT_BYTES_SOFT = 1024 * 1024
"""Bytes waiting to be written above which only urgent frames are added."""
LEAVE_S_MAX = 5.0
"""Maximum seconds that a connection waits for its answers after the daemon's GOODBYE."""
CLOSE_S_MAX = 0.5
"""Maximum seconds for a connection to close."""
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of a frame from the daemon; statistics of many topics are long."""

_OK, _ERROR = int(FrameType.OK), int(FrameType.ERROR)
_CHECK = int(FrameType.CHECK)
_DELIVER, _GOODBYE, _ENDED, _HEARTBEAT, _LEASE = (
    int(FrameType.DELIVER),
    int(FrameType.GOODBYE),
    int(FrameType.ENDED),
    int(FrameType.HEARTBEAT),
    int(FrameType.LEASE),
)
_ALIVE = encode((int(FrameType.ALIVE), 0))

Deliver = Callable[[int, int, int, tuple[Any, ...]], None]
"""(sub, epoch, delivered_ms, deliveries)"""
Ended = Callable[[int, TickwheelError], None]
"""(sub, error): called when the daemon ended a subscription."""
Asked = Callable[[str, tuple[Any, ...]], None]
"""(producer group, transactions): called when the daemon checks the state of transactions."""


class Request:
    """A request to the daemon. Times are those of the event loop's clock, in seconds."""

    __slots__ = ("deadline_s", "sent_s")
    prompt = True
    """Whether a missing answer means that the connection is dead."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.sent_s = 0.0

    def answered(self, result: Any) -> None:
        """Handle the daemon's OK. An exception for a malformed result fails the request."""
        raise NotImplementedError

    def failed(self, error: TickwheelError) -> None:
        """Handle the daemon's ERROR."""
        raise NotImplementedError

    def lost(self) -> None:
        """Handle the end of the connection before the answer."""
        raise NotImplementedError

    def expired(self) -> None:
        """Handle the end of the deadline before the answer."""
        raise NotImplementedError


class Question(Request):
    """A request whose answer is awaited on one connection, and lost with it."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        super().__init__(float("inf"))
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, result: Any) -> None:
        self.answer.set_result(result)

    def failed(self, error: TickwheelError) -> None:
        fail(self.answer, error)

    def lost(self) -> None: ...

    def expired(self) -> None: ...


class Connection(asyncio.Protocol):
    """One connection, from TCP's handshake to its end. ``closed`` then has the reason."""

    def __init__(
        self,
        deliver: Deliver,
        wake: Callable[[], None],
        ended: Ended | None = None,
        asked: Asked | None = None,
        leased: Callable[[Connection], None] | None = None,
    ) -> None:
        """``leased`` is called when the daemon reports that its lease has ended or is held
        again."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._ended = ended
        self._asked = asked
        self._leased = leased
        self.is_leased = True
        """Whether the daemon has its shard's lease, as last reported."""
        self._wake = wake
        self._decoder = Decoder(FRAME_BYTES_MAX)
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._leave: asyncio.TimerHandle | None = None
        self.out_bytes = 0
        self.written_bytes = 0
        """Total bytes passed to the transport."""
        self.paused = False
        self.leaving = False
        """Whether the daemon is about to close the connection, so that it gets no new requests."""
        self.requests: dict[int, Request] = {}
        self._room = Signal()
        self.heard_s = self._loop.time()
        self.silent = False
        """Whether the connection was closed because nothing arrived any more."""
        self.successor: Any = None
        """The next daemon of the shard, as the GOODBYE names it; None: not named."""
        self.error: TickwheelError | None = None
        self.closed: asyncio.Future[TickwheelError] = self._loop.create_future()

    # --- called by the event loop-----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=OUT_BYTES_SOFT)

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._loop.time()
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
            if self._decoder.error is not None:
                raise self._decoder.error
        except ProtocolError as error:
            self.abort(error)
        except Exception as error:  # a frame of a shape that version 1 does not have
            problem = f"{type(error).__name__}: {error}"
            self.abort(ProtocolError(f"the daemon sent an invalid frame: {problem:.200}"))
        if self.leaving:
            self._close_if_done()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leave is not None:
            self._leave.cancel()
        if self.error is None and isinstance(exc, ssl.SSLError):
            self.error = explain(exc)  # in TLS 1.3 a certificate is refused after the handshake
        if self.error is None:
            self.error = ConnectionLost(f"the connection broke: {exc or 'closed by the daemon'}")
        if not self.closed.done():
            self.closed.set_result(self.error)
        self.paused = False
        self._room.notify()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._room.notify()
        self._wake()

    # --- writing --------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether more may be written now; ``wake`` is called when that changes."""
        return not self.paused and self.out_bytes < OUT_BYTES_SOFT

    async def wait_room(self, timeout_s: float) -> None:
        """Wait until the written frames were sent. Raise SendTimeout if the daemon does not
        read."""
        self.flush()
        try:
            async with asyncio.timeout(timeout_s):
                while self.paused:
                    await self._room.wait()
        except TimeoutError:
            raise SendTimeout(f"the daemon has read nothing for {timeout_s:g} s") from None

    @property
    def ending(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._transport is None or self._transport.is_closing()

    def ask(self, number: int, request: Request, data: bytes) -> None:
        """Write a request at the next ``flush``. The request learns its end."""
        request.sent_s = self._loop.time()
        self.requests[number] = request
        self.put(data)

    async def answer_to(self, number: int, data: bytes) -> Any:
        """Return the answer to a request that is written now. Raise the daemon's error, or why the
        connection has ended."""
        question = Question()
        self.ask(number, question, data)
        self.flush()
        ends: tuple[asyncio.Future[Any], ...] = (question.answer, self.closed)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not question.answer.done():
            raise self.closed.result()
        return question.answer.result()

    def put(self, data: bytes) -> None:
        """Write a frame at the next ``flush``."""
        self._out.append(data)
        self.out_bytes += len(data)

    def flush(self) -> None:
        """Pass the written frames to the transport."""
        if not self._out or self._transport is None:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self.out_bytes = 0
        if not self._transport.is_closing():
            self.written_bytes += len(data)
            self._transport.write(data)

    @property
    def sent_bytes(self) -> int:
        """Written bytes that have reached the system's buffers."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.written_bytes - waiting

    # --- ends -----------------------------------------------------------------------------------

    def leave(self, reason: TickwheelError) -> None:
        """Close the connection once all answers have arrived, or at once: a standby sends none."""
        if isinstance(reason, NotActive):
            self.abort(reason)
        if self.leaving:
            return
        self.leaving = True
        self.error = self.error or reason
        self._leave = self._loop.call_later(LEAVE_S_MAX, self.close)
        self._loop.call_soon(self._close_if_done)

    def _close_if_done(self) -> None:
        if not any(request.prompt for request in self.requests.values()) and not self._out:
            self.close()

    @property
    def peer(self) -> str:
        """The daemon's address as reported by the socket."""
        peername = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{peername[0]}:{peername[1]}" if isinstance(peername, tuple) else "a daemon"

    def fileno(self) -> int:
        """Return the descriptor of the socket, or -1 without one."""
        if self._transport is None or self._transport.is_closing():
            return -1
        sock = self._transport.get_extra_info("socket")  # None: the daemon is in this process
        return -1 if sock is None else int(sock.fileno())

    def close(self) -> None:
        """Close the connection once the written frames are sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    async def finish(self, error: TickwheelError) -> None:
        """After ``close``, wait until the socket is closed; abort it if that takes too long."""
        try:
            await asyncio.wait((self.closed,), timeout=CLOSE_S_MAX)
        finally:
            if not self.closed.done():
                self.abort(error)
        await asyncio.wait((self.closed,), timeout=CLOSE_S_MAX)

    def abort(self, error: TickwheelError) -> None:
        """Close the connection at once, for this reason."""
        self.error = self.error or error
        if self._transport is not None:
            self._transport.abort()

    def give_up_requests(self) -> None:
        """Mark every waiting request as lost, in the order of numbers."""
        requests, self.requests = self.requests, {}
        for number in sorted(requests):
            requests[number].lost()

    # --- reading --------------------------------------------------------------------------------

    def _take(self, frame: tuple[Any, ...]) -> None:
        kind = frame[0]
        if kind == _OK:
            request = self.requests.pop(frame[1], None)
            if request is not None:
                self._answer(request, frame[2])
        elif kind == _DELIVER:
            _, sub, epoch, delivered_ms, deliveries = frame
            self._deliver(sub, epoch, delivered_ms, deliveries)
        elif kind == _ERROR:
            self._take_error(*frame[1:4])
        elif kind == _GOODBYE:
            self.successor = frame[3] if len(frame) > 3 else None
            self.leave(from_wire(str(frame[1]), str(frame[2])))
        elif kind == _ENDED and self._ended is not None:
            self._ended(frame[1], from_wire(str(frame[2]), str(frame[3])))
        elif kind == _CHECK and self._asked is not None:
            self._asked(frame[1], frame[2])
        elif kind == _LEASE and self._leased is not None:
            self.is_leased = bool(frame[1])
            self._leased(self)
        elif kind == _HEARTBEAT:
            # Flush at once: the next flush may be far away.
            self.put(_ALIVE)
            self.flush()
        # Ignore types of a newer daemon: they require no answer.

    def _answer(self, request: Request, result: Any) -> None:
        try:
            request.answered(result)
        except (TypeError, ValueError, LookupError, AttributeError) as problem:
            error = ProtocolError(f"the daemon sent an invalid answer: {problem!s:.200}")
            request.failed(error)
            raise error from None

    def _take_error(self, number: int, code: str, message: str) -> None:
        error = from_wire(str(code), str(message))
        request = self.requests.pop(number, None) if number else None
        if error.closes_connection:
            self.error = error
        elif isinstance(error, NotActive):
            self.abort(error)
        if request is not None:
            request.failed(error)
        elif number == 0 and not error.closes_connection:
            self.unasked(error)

    def unasked(self, error: TickwheelError) -> None:
        """Log an error without a request: oneway tasks were refused."""
        LOGGER.warning("the daemon refused oneway tasks: %s: %s", error.code, error.message)


Open = Callable[[Connection, Address, ssl.SSLContext | None], Awaitable[None]]


async def connect(connection: Connection, address: Address, tls: ssl.SSLContext | None) -> None:
    """Connect to an address. Raise OSError, or UnicodeError for an invalid host name."""
    loop = asyncio.get_running_loop()
    if tls is None:
        await loop.create_connection(lambda: connection, *address)
    else:
        await loop.create_connection(
            lambda: connection, *address, ssl=tls, ssl_shutdown_timeout=CLOSE_S_MAX
        )


def hello(number: int, options: dict[str, Any], frame_bytes_max: int) -> bytes:
    """Return the frame of a HELLO. Raise LimitExceeded if the frame is too large: before HELLO the
    daemon accepts smaller frames."""
    data = encode((int(FrameType.HELLO), number, options))
    if len(data) > min(frame_bytes_max, HELLO_BYTES_MAX):
        name, limit = "HELLO_BYTES_MAX", HELLO_BYTES_MAX
        if frame_bytes_max < HELLO_BYTES_MAX:
            name, limit = "frame_bytes_max", frame_bytes_max
        raise LimitExceeded(
            f"HELLO with the token and the client's name has {len(data)} bytes; the limit is"
            f" {limit} ({name})"
        )
    return data
