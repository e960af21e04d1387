"""Where daemons are, whom to trust, and one TCP connection: frames in and out, and which request
waits for which answer.

``parse_url``: ``tcp://a:7355,b:7355`` as a list of (host, port); with ``tls://`` all of them speak
TLS. ``Trust`` makes the TLS context, once a client: trust is the system's, or a file's; the
daemon's certificate has to name the host that the client asked for. That cannot be switched off: a
certificate of one's own making is trusted by naming its file as ``ca``.

Knows HELLO, answers and deliveries by number, and nothing of what they mean. ``Signal`` and
``fail`` are the futures that all parts of the client wait with. Invariants: every request that was
written learns exactly once how it ended (``answered``, ``failed``, ``lost`` or ``expired``); what
is written in one step of the loop leaves in one piece; whatever the daemon sends, nothing escapes
into the event loop; a daemon that says it is not active is left at once.
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
from tickwheel.protocol import Decoder, encode

DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"
PLAIN, SECURE = "tcp://", "tls://"

Address = tuple[str, int]


def parse_url(url: str) -> list[Address]:
    """Every address of ``url``, in order; the scheme may stand before each, a port may be left out.

    Raises BadRequest naming what cannot be read.
    """
    if not isinstance(url, str):
        raise BadRequest(f"url must be text like {DEFAULT_URL}, not {url!r:.60}")
    parts = [part.strip() for part in url.split(",")]
    if len({_is_secure(part) for part in parts if "://" in part or part is parts[0]}) > 1:
        raise BadRequest(f"url {url!r:.200}: either all of it is {SECURE}, or nothing")
    return [_parse(part, url) for part in parts]


def is_secure(url: str) -> bool:
    """Whether the daemons of the URL speak TLS."""
    return _is_secure(url.strip())


def url_of(address: Address, *, secure: bool) -> str:
    """The URL of one address."""
    return f"{SECURE if secure else PLAIN}{address_text(address)}"


def _is_secure(part: str) -> bool:
    return part.startswith(SECURE)


def address_text(address: Address) -> str:
    """An address as it stands in a URL; IPv6 addresses are in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse(part: str, url: str) -> Address:
    scheme, mark, rest = part.rpartition("://")
    if mark and scheme + mark not in (PLAIN, SECURE):
        raise BadRequest(f"url {url!r:.200}: {scheme}:// is not spoken, only {PLAIN} and {SECURE}")
    rest = rest.rstrip("/")
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise BadRequest(f"url {url!r:.200}: {part!r:.60} has no closing bracket")
        port = port[1:]
    else:
        host, _, port = rest.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536)):
        raise BadRequest(
            f"url {url!r:.200}: {part!r:.60} must be {PLAIN}HOST:PORT with a port of 1 to 65535"
        )
    return host, int(port) if port else DEFAULT_PORT


class Trust(NamedTuple):
    """Files in PEM; None: the environment's file, else none."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS context of the files. Raises BadRequest, which names the file."""
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
    """The error for a connection that failed."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        why = (problem.verify_message or str(problem)).rstrip(".")
        return TlsFailed(f"its certificate is not trusted: {why}")
    if isinstance(problem, ssl.SSLError):
        reason = problem.reason or ""
        if reason in _PLAIN:
            return TlsFailed("it does not speak TLS there; tcp:// is without")
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return Unauthorized(f"it does not take our certificate: {_reason(problem)}")
        return TlsFailed(_reason(problem))
    return Unreachable(str(problem))


def fail(future: asyncio.Future[Any], error: TickwheelError) -> bool:
    """Set the exception unless it is done; whether it was set.

    It counts as seen: a future of ``enqueue_nowait`` or ``ack_nowait`` that nobody looks at
    must not end in "exception was never retrieved". The client logs such failures itself, one
    line a frame.
    """
    if future.done():
        return False
    future.set_exception(error)
    future.exception()
    return True


class Signal:
    """Wakes all who wait at the moment; each looks again whether it was meant."""

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
            if not waiter.cancelled():  # woken, and does not look: another one may have to
                self.notify(1)
            raise
        finally:
            self._waiters.pop(waiter, None)

    def notify(self, most: int | None = None) -> None:
        """Wake all, or ``most`` of those who have waited longest."""
        waiters = self._waiters
        left = len(waiters) if most is None else most
        while waiters and left > 0:
            waiter = next(iter(waiters))
            del waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
                left -= 1


LOGGER = logging.getLogger("tickwheel.client")
LOGGER.addHandler(logging.NullHandler())  # heard only where the application sets logging up

OUT_BYTES_SOFT = 1024 * 1024
"""While more bytes than this wait to be written, only what cannot wait is added."""
LEAVE_S_MAX = 5.0
"""After so many seconds a connection that the daemon said goodbye to is closed, answered or not."""
CLOSE_S_MAX = 0.5
"""How long a closing connection may take to say its last."""
FRAME_BYTES_MAX = 64 * 1024 * 1024
"""The longest frame that is taken from the daemon: counts of very many topics are long."""

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
"""(producer group, transactions): called when the daemon asks what became of them."""


class Request:
    """A request to the daemon. Times are those of the event loop's clock, in seconds."""

    __slots__ = ("deadline_s", "sent_s")
    prompt = True
    """Whether silence after the request means that the connection is dead."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.sent_s = 0.0

    def answered(self, result: Any) -> None:
        """Take the daemon's OK. May raise on a result of the wrong shape: then it fails."""
        raise NotImplementedError

    def failed(self, error: TickwheelError) -> None:
        """Take the daemon's ERROR."""
        raise NotImplementedError

    def lost(self) -> None:
        """Take note that the connection ended before the answer."""
        raise NotImplementedError

    def expired(self) -> None:
        """Take note that the deadline passed before the answer."""
        raise NotImplementedError


class Connection(asyncio.Protocol):
    """One connection, from TCP's handshake to its end. ``closed`` is done then, with the reason."""

    def __init__(
        self,
        deliver: Deliver,
        wake: Callable[[], None],
        ended: Ended | None = None,
        asked: Asked | None = None,
        leased: Callable[[Connection], None] | None = None,
    ) -> None:
        """``leased`` is called when the daemon says that its lease is over, or is held again."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._ended = ended
        self._asked = asked
        self._leased = leased
        self.is_leased = True
        """Whether the daemon has the lease of its shard, as far as it knows."""
        self._wake = wake
        self._decoder = Decoder(FRAME_BYTES_MAX)
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._leave: asyncio.TimerHandle | None = None
        self.out_bytes = 0
        self.given_bytes = 0
        """The bytes that the transport was ever given."""
        self.paused = False
        self.leaving = False
        """Whether the daemon is about to close, so that it gets no new work."""
        self.requests: dict[int, Request] = {}
        self._room = Signal()
        self.heard_s = self._loop.time()
        self.silent = False
        """Whether the connection was given up because nothing came any more."""
        self.heir: Any = None
        """Where the daemon's shard is next, as its GOODBYE names it; None: it has not named it."""
        self.error: TickwheelError | None = None
        self.closed: asyncio.Future[TickwheelError] = self._loop.create_future()

    # --- the event loop's -----------------------------------------------------------------------

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
            self.abort(ProtocolError(f"the daemon sent what cannot be understood: {problem:.200}"))
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
        """Whether more may be added now; ``wake`` is called when that changes."""
        return not self.paused and self.out_bytes < OUT_BYTES_SOFT

    async def wait_room(self, timeout_s: float) -> None:
        """Wait until what was put has left. Raises SendTimeout if the daemon does not read it."""
        self.flush()
        try:
            async with asyncio.timeout(timeout_s):
                while self.paused:
                    await self._room.wait()
        except TimeoutError:
            raise SendTimeout(f"the daemon has read nothing for {timeout_s:g} s") from None

    @property
    def ending(self) -> bool:
        """Whether the connection is closed, or about to be, so that writing is in vain."""
        return self._transport is None or self._transport.is_closing()

    def ask(self, number: int, request: Request, data: bytes) -> None:
        """Write a request at the next ``flush``; the request learns of its end."""
        request.sent_s = self._loop.time()
        self.requests[number] = request
        self.put(data)

    def put(self, data: bytes) -> None:
        """Write a frame at the next ``flush``."""
        self._out.append(data)
        self.out_bytes += len(data)

    def flush(self) -> None:
        """Hand the frames that were put to the transport."""
        if not self._out or self._transport is None:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out.clear()
        self.out_bytes = 0
        if not self._transport.is_closing():
            self.given_bytes += len(data)
            self._transport.write(data)

    @property
    def left_bytes(self) -> int:
        """How many of the given bytes have left for the system's buffers."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self.given_bytes - waiting

    # --- ends -----------------------------------------------------------------------------------

    def leave(self, reason: TickwheelError) -> None:
        """Close the connection when all answers are there. A standby has none to give."""
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
        """The daemon's address, as the socket has it."""
        found = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{found[0]}:{found[1]}" if isinstance(found, tuple) else "a daemon"

    def fileno(self) -> int:
        """The descriptor of the socket; -1: there is none."""
        if self._transport is None or self._transport.is_closing():
            return -1
        found = self._transport.get_extra_info("socket")  # None: the daemon is in this process
        return -1 if found is None else int(found.fileno())

    def close(self) -> None:
        """Close the connection when what was written has left."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    async def finish(self, error: TickwheelError) -> None:
        """Wait, after ``close``, until the socket is closed, by force if it takes too long."""
        try:
            await asyncio.wait((self.closed,), timeout=CLOSE_S_MAX)
        finally:
            if not self.closed.done():
                self.abort(error)
        await asyncio.wait((self.closed,), timeout=CLOSE_S_MAX)

    def abort(self, error: TickwheelError) -> None:
        """Close the connection at once, with ``error`` as the reason."""
        self.error = self.error or error
        if self._transport is not None:
            self._transport.abort()

    def give_up_requests(self) -> None:
        """Fail every waiting request as lost, in the order of their numbers."""
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
            self.heir = frame[3] if len(frame) > 3 else None
            self.leave(from_wire(str(frame[1]), str(frame[2])))
        elif kind == _ENDED and self._ended is not None:
            self._ended(frame[1], from_wire(str(frame[2]), str(frame[3])))
        elif kind == _CHECK and self._asked is not None:
            self._asked(frame[1], frame[2])
        elif kind == _LEASE and self._leased is not None:
            self.is_leased = bool(frame[1])
            self._leased(self)
        elif kind == _HEARTBEAT:
            # At once, not at the next flush: nothing else may be on its way for long.
            self.put(_ALIVE)
            self.flush()
        # Types of a newer daemon are passed over: they ask for nothing.

    def _answer(self, request: Request, result: Any) -> None:
        try:
            request.answered(result)
        except (TypeError, ValueError, LookupError, AttributeError) as problem:
            error = ProtocolError(f"the daemon's answer cannot be understood: {problem!s:.200}")
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
        """Log an error that belongs to no request: a oneway task was not taken."""
        LOGGER.warning("the daemon refused oneway tasks: %s: %s", error.code, error.message)


Open = Callable[[Connection, Address, ssl.SSLContext | None], Awaitable[None]]


async def connect(connection: Connection, address: Address, tls: ssl.SSLContext | None) -> None:
    """Connect to an address. Raises OSError; UnicodeError if it is no host name at all."""
    loop = asyncio.get_running_loop()
    if tls is None:
        await loop.create_connection(lambda: connection, *address)
    else:
        await loop.create_connection(
            lambda: connection, *address, ssl=tls, ssl_shutdown_timeout=CLOSE_S_MAX
        )


def hello(number: int, options: dict[str, Any], frame_bytes_max: int) -> bytes:
    """The frame of a HELLO. Raises LimitExceeded for one that the daemon would not read: before it
    the daemon keeps less of a peer than after."""
    data = encode((int(FrameType.HELLO), number, options))
    if len(data) > min(frame_bytes_max, HELLO_BYTES_MAX):
        name, limit = "HELLO_BYTES_MAX", HELLO_BYTES_MAX
        if frame_bytes_max < HELLO_BYTES_MAX:
            name, limit = "frame_bytes_max", frame_bytes_max
        raise LimitExceeded(
            f"HELLO, with the token and the client's name, takes a frame of {len(data)} bytes; the"
            f" limit is {limit} ({name})"
        )
    return data
