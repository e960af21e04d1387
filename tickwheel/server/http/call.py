"""One HTTP request: reads its body within limits, and writes its answer, or its error as
``application/problem+json``. Handlers execute it through an ``Exchange`` (``exchange.py``).

Invariant: reading a body is bounded in bytes and in time. A body that is too large is refused
because of its ``Content-Length`` before it is read, or else as soon as it exceeds the limit. The
decompressed size of a compressed body counts. All bodies in memory together also have a limit.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from tickwheel.api.verbs import VERBS
from tickwheel.errors import (
    BadRequest,
    BodyTooLarge,
    ConnectionLost,
    Overloaded,
    RequestTimeout,
    SendTimeout,
    SlowReader,
    StoreFull,
    TickwheelError,
    Unauthorized,
    UnsupportedMediaType,
    shown,
)
from tickwheel.server.http import types

if TYPE_CHECKING:
    from tickwheel.server.access.logins import Sessions
    from tickwheel.server.http.exchange import Exchange
    from tickwheel.server.http.types import Reader
    from tickwheel.server.shard.callers import Principal

_encoder = msgspec.json.Encoder()
as_json = _encoder.encode
JSON = "application/json"
JSON_TYPE = JSON.encode()


def put_body(answer: dict[str, Any], body: bytes) -> None:
    """Put a body into an answer: as text if it is UTF-8, otherwise as base64."""
    try:
        answer["body"] = body.decode()
    except UnicodeDecodeError:
        answer["body_base64"] = body


# --- errors as problems --------------------------------------------------------------------------


PROBLEM_TYPE = b"application/problem+json"
RETRY_AFTER_S = 1
RETRY_AFTER_FULL_S = 5
"""Seconds in Retry-After when a disk is full, because freeing space takes longer."""
_CLIENT_ERRORS = (ConnectionLost, SendTimeout)

Headers = list[tuple[bytes, bytes]]


def problem(
    error: TickwheelError, *, active: str | None = None, active_http: str | None = None
) -> tuple[int, Headers, bytes]:
    """Return the status, headers and body for an error. ``active`` and ``active_http`` are the
    address and HTTP URL of the active daemon."""
    fields = types.Problem(
        type=f"urn:tickwheel:error:{error.code}",
        title=(type(error).__doc__ or error.code).strip().partition("\n")[0],
        status=error.http_status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        active=active or msgspec.UNSET,
        active_http=active_http or msgspec.UNSET,
    )
    headers: Headers = [(b"content-type", PROBLEM_TYPE)]
    if error.retryable and not isinstance(error, _CLIENT_ERRORS):
        full = isinstance(error, StoreFull)
        after_s = RETRY_AFTER_FULL_S if full else RETRY_AFTER_S
        if isinstance(error, Overloaded):
            after_s = max(1, ceil(error.after_s))
        headers.append((b"retry-after", b"%d" % after_s))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b'Bearer realm="tickwheel"'))
    return error.http_status, headers, as_json(fields)


def line(error: TickwheelError, number: int | None = None) -> dict[str, object]:
    """Return the fields of an error in a stream of lines. ``number`` is the number of the line; the
    first line is 1, and empty lines count."""
    fields: dict[str, object] = {} if number is None else {"line": number}
    return fields | {"code": error.code, "detail": error.message, "retryable": error.retryable}


assert Overloaded.http_status == 429


# --- routes --------------------------------------------------------------------------------------

Handler = Callable[[Any], Awaitable[None]]
"""Handles one ``Call``."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    tag: str
    summary: str
    operations: tuple[str, ...]
    """Operations that the handler calls. The route requires the rights of these operations."""
    answer: Any = None
    """Type of the answer; None if the answer is empty or not JSON."""
    status: int = 200
    body: Any = None
    """Type of the JSON body, or a union of types."""
    query: type[Struct] = types.NoQuery
    headers: tuple[tuple[str, str], ...] = ()
    """Name and description of each header that the handler reads."""
    raw: tuple[str, ...] = ()
    """Content types that the route accepts in addition to JSON."""
    streams: tuple[str, ...] = ()
    """Content types of a streamed answer."""
    codes: tuple[str, ...] = ()
    """Error codes of the route, in addition to those of every request."""
    standby: bool = False
    """Whether a standby also serves the route."""
    public: bool = False
    """Whether the route needs no login, because it reveals nothing about tasks."""
    page: bool = False
    """Whether a browser opens the route as a page, with a cookie and without the console's
    header."""


# --- fairness between requests in one turn of the event loop -------------------------------------


class Turns:
    """Limits the work in one turn of the event loop. Before each piece, await
    ``wait_for_turn()``."""

    def __init__(self, at_a_time: int) -> None:
        self._at_a_time = self._left = at_a_time
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_armed = False

    def try_take(self) -> bool:
        """Take a place in this turn of the loop. Return False if there is none."""
        if self._left <= 0 or self._waiting:
            return False
        self._left -= 1
        self._arm()
        return True

    async def wait_for_turn(self) -> None:
        """Wait for a place in a turn of the loop. Places are given in the order of the calls."""
        if self.try_take():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._arm()
        await turn

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_armed = False
        self._left = self._at_a_time
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # its request was not cancelled in the meantime
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._arm()


# --- reading a request ---------------------------------------------------------------------------


_LISTS = {b"accept": b", ", b"accept-encoding": b", ", b"cookie": b"; "}
"""Headers that can be repeated, and the separator that joins their values."""


def single_headers(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name, with repeated list headers joined. Raise BadRequest if any other
    header that the API reads is repeated, because the sender's intention is then unclear."""
    headers = dict(pairs)
    if len(headers) == len(pairs):
        return headers
    headers.clear()
    for name, value in pairs:
        if name not in headers:
            headers[name] = value
        elif name in _LISTS:
            headers[name] += _LISTS[name] + value
        elif name in _SINGLE or name.startswith(_SINGLE_PREFIXES):
            raise BadRequest(f"header {name.decode('latin-1')} was sent more than once")
    return headers


_SINGLE = frozenset(
    (
        b"authorization", b"content-encoding", b"content-type", b"host", b"idempotency-key",
        b"origin", b"sec-fetch-site",
    )
)  # fmt: skip
_SINGLE_PREFIXES = (b"ce-", b"tickwheel-")


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GZIP_WINDOW = 16 + zlib.MAX_WBITS
PIECE_BYTES = 256 * 1024
"""Maximum bytes that one step of decompressing a stream produces."""


class Room:
    """Bounds the memory for the bodies of all requests in progress."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def take(self, count: int) -> None:
        """Reserve ``count`` bytes, or release them if negative. Raise Overloaded if they exceed the
        limit."""
        if self.bytes + count > self.bytes_max:
            raise Overloaded(
                f"the bodies of HTTP requests would take {self.bytes + count} bytes of memory; the"
                f" limit is {self.bytes_max} (http_bodies_bytes_max)"
            )
        self.bytes += count


class Body:
    """The body of one request. Call ``close`` when the request ends."""

    __slots__ = (
        "_bytes_held", "_bytes_max", "_content_length", "_decompressor", "_has_arrived", "_receive",
        "_room", "_timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        receive: Receive,
        headers: dict[bytes, bytes],
        room: Room,
        bytes_max: int,
        timeout_s: float,
        *,
        has_arrived: Callable[[], bool],
    ) -> None:
        """``has_arrived`` returns whether the whole body has arrived. Raise UnsupportedMediaType
        for an unknown content encoding."""
        self._has_arrived = has_arrived
        self._receive = receive
        self._room = room
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._bytes_held = 0
        encoding = headers.get(b"content-encoding")
        self._decompressor = None if encoding is None else _new_decompressor(encoding)
        length = headers.get(b"content-length", b"0")
        # h11 ensures that the length has only digits, but not that it is short.
        self._content_length = int(length) if length.isdigit() and len(length) < 20 else 1 << 62

    def close(self) -> None:
        """Release the memory reserved for the body."""
        self.hold(0)

    async def read(self) -> bytes:
        """Return the whole body. Raise BodyTooLarge, RequestTimeout, Overloaded, BadRequest or
        ConnectionLost."""
        if self._content_length > self._bytes_max:
            raise self._too_large(self._content_length)
        # The common case: a timer would add a tenth to the cost of a small request.
        if self._has_arrived():
            return await self._read_all()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read_all()
        except TimeoutError:
            raise self._too_slow() from None

    async def _read_all(self) -> bytes:
        parts: list[bytes] = []
        more = True
        while more:
            message = await self._receive()
            parts.append(self._part(message))
            self._count(len(parts[-1]))
            more = message.get("more_body", False)
        return b"".join(parts)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield a body of any length in pieces. Raise RequestTimeout if a piece takes too long. The
        caller declares with ``hold`` how much it keeps of the pieces."""
        more = True
        while more:
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise self._too_slow() from None
            part = _content(message)
            more = message.get("more_body", False)
            if self._decompressor is None:
                if part:
                    yield part
                continue
            while part:
                unpacked, part = self._decompress(part, PIECE_BYTES)
                yield unpacked
            if not more:
                self._check_end()

    def hold(self, size: int) -> None:
        """Reserve memory for ``size`` bytes in place of those reserved before. Raise Overloaded."""
        self._room.take(size - self._bytes_held)
        self._bytes_held = size

    def _part(self, message: Message) -> bytes:
        part = _content(message)
        if self._decompressor is None:
            return part
        part, rest = self._decompress(part, self._bytes_max - self._bytes_held + 1)
        if rest:
            raise self._too_large(self._bytes_max + 1)
        if not message.get("more_body", False):
            self._check_end()
        return part

    def _decompress(self, part: bytes, bytes_max: int) -> tuple[bytes, bytes]:
        """Return up to ``bytes_max`` decompressed bytes, and the rest of ``part``."""
        assert self._decompressor is not None
        try:
            data = self._decompressor.decompress(part, bytes_max)
        except zlib.error as error:
            raise BadRequest(f"the body is not valid gzip: {error}") from None
        if self._decompressor.unused_data:
            raise BadRequest("the body is not valid gzip: data follows its end")
        return data, self._decompressor.unconsumed_tail

    def _check_end(self) -> None:
        assert self._decompressor is not None
        if not self._decompressor.eof:
            raise BadRequest("the body is not valid gzip: it ends too early")

    def _count(self, count: int) -> None:
        size = self._bytes_held + count
        if size > self._bytes_max:
            raise self._too_large(size)
        self.hold(size)

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request's body has at least {size} bytes; the limit is {self._bytes_max}"
            " (http_body_bytes_max)"
        )

    def _too_slow(self) -> RequestTimeout:
        return RequestTimeout(
            f"the request's body did not arrive within {self._timeout_s:g} s (http_body_timeout_s)"
        )


def _content(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone("the client has disconnected")
    content: bytes = message.get("body", b"")
    return content


def _new_decompressor(encoding: bytes) -> Any:
    """Return a decompressor for the content encoding, or None for an uncompressed body."""
    coding = encoding.strip().lower()
    if coding in (b"", b"identity"):
        return None
    if coding in (b"gzip", b"x-gzip"):
        return zlib.decompressobj(GZIP_WINDOW)
    raise UnsupportedMediaType(
        f"content-encoding must be gzip or identity, not {shown(encoding.decode('latin-1'))}"
    )


# --- the client of a request ---------------------------------------------------------------------


class ClientGone(ConnectionLost):
    """The client disconnected before it was answered."""


WriteAnswer = Callable[[int, bytes, bytes], bool]
"""Writes a whole answer: status, content type and body. Returns False if it would have to wait."""


class Client:
    """The client of a request. Send it the whole answer with ``answer``, or parts with ``begin``
    and ``piece``, and call ``stop`` at the end."""

    __slots__ = ("_connection", "_receive", "_send", "_watch", "status")

    def __init__(self, connection: dict[str, Any], receive: Receive, send: Send) -> None:
        self._connection = connection
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.status = 0
        """Status of the answer once it has begun, else 0."""

    # --- sending ---------------------------------------------------------------------------------

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer and its content length. An answer whose only header is the content
        type, the common case, is written at once if the connection allows it."""
        self.status = status
        if len(headers) == 1 and headers[0][0] == b"content-type":
            write: WriteAnswer | None = self._connection.get("answer")
            if write is not None and write(status, headers[0][1], body):
                return
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.piece(body, more=False)

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def abort(self) -> None:
        """Close the connection, because the answer cannot be completed."""
        abort = self._connection.get("abort")
        if abort is not None:
            abort()
        await self._wait_until_gone()

    # --- disconnections, which are visible only once the body has been read -----------------------

    def disconnection(self) -> asyncio.Future[None]:
        """Return a future that completes when the client disconnects."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._wait_until_gone())
        return self._watch

    @property
    def is_gone(self) -> bool:
        return self._watch is not None and self._watch.done()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


# --- shared by all requests ----------------------------------------------------------------------


class Streams:
    """The open streams, by the numbers that receipts contain."""

    def __init__(self) -> None:
        self._open: dict[int, Exchange] = {}
        self._last = 0

    def add(self, exchange: Exchange) -> int:
        self._last += 1
        self._open[self._last] = exchange
        return self._last

    def remove(self, number: int) -> None:
        del self._open[number]

    def note_activity(self, number: int, principal: Principal, ids: Sequence[int]) -> None:
        """Record that a stream's consumer is alive if ``principal``, which has settled or extended
        deliveries of the tasks ``ids``, owns the stream."""
        exchange = self._open.get(number)
        if exchange is not None and exchange.caller.principal.name == principal.name:
            exchange.note_activity(ids)


@dataclass(frozen=True, slots=True)
class Common:
    """State shared by all requests of one API."""

    turns: Turns
    streams: Streams
    sessions: Sessions
    reader: Reader
    keep_alive_s: float
    """Maximum seconds of silence in a stream."""
    wait_ms_max: int
    """Maximum milliseconds that a pull can wait."""


# --- a request in a handler ----------------------------------------------------------------------


T = TypeVar("T")
GZIP_BYTES_MIN = 1_024
"""Minimum bytes of an answer that is compressed; compressing a smaller one has no benefit."""
GZIP_THREAD_BYTES = 32 * 1024
"""Minimum bytes of an answer that is compressed in a thread, so that the event loop can go on."""
GZIP_LEVEL = 1
QUERY_FIELDS_MAX = 64
MEDIA_TYPES_KEPT_MAX = 64


class Call:
    """One request, as its handler sees it: ``json``, ``query`` and ``path_values`` return its
    input, ``answer`` sends its output."""

    __slots__ = (
        "_query_string", "body", "client", "common", "content_type", "exchange", "headers",
        "is_encrypted", "is_readable", "path_values", "route",
    )  # fmt: skip

    def __init__(
        self,
        common: Common,
        route: Route,
        exchange: Exchange,
        path_values: dict[str, str],
        headers: dict[bytes, bytes],
        scope: Message,
        body: Body,
        client: Client,
    ) -> None:
        self.common = common
        self.route = route
        self.exchange = exchange
        self.path_values = path_values
        self.headers = headers
        self.body = body
        self.client = client
        self.content_type = media_type(headers.get(b"content-type", b""))
        """Content type without its parameters; "" if the header is missing."""
        self.is_encrypted = scope.get("scheme") == "https"
        """Whether a cookie is protected in transit."""
        self.is_readable = False
        """Whether the values of a declared verb were valid, so that its operation was called."""
        self._query_string: bytes = scope["query_string"]

    def header(self, name: bytes) -> str | None:
        """Return the value of the header with this lower-case name, or None."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    # --- input -----------------------------------------------------------------------------------

    def query(self, kind: type[T]) -> T:
        """Return the query string as ``kind``. Raise BadRequest if it is invalid."""
        try:
            pairs = parse_qsl(
                self._query_string.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=QUERY_FIELDS_MAX,
            )
        except ValueError as error:
            raise BadRequest(f"the query string is not valid: {error}") from None
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"query: {shown(repeated)} occurs more than once")
        try:
            query = msgspec.convert(fields, kind, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequest(f"query: {error}") from None
        for name, text in fields.items():
            if getattr(query, name) is None:  # msgspec converts the text "null" to None
                raise BadRequest(f"query: {name} is not valid: {shown(text)}")
        return query

    async def json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Return the decoded body. Raise BadRequest, UnsupportedMediaType, or the errors of
        ``Body.read``."""
        if self.content_type not in (JSON, ""):
            raise UnsupportedMediaType(
                f"content-type must be {JSON}, not {shown(self.content_type)}"
            )
        return decoded(await self.body.read(), decoder)

    # --- execution -------------------------------------------------------------------------------

    async def ask(
        self, verb: str, values: Mapping[str, Any], render: Callable[[Any], Any] | None = None
    ) -> Any:
        """Execute a declared verb with values in wire form and return its answer, which ``render``
        converts to JSON in the same step of the loop. Raise the errors of the checks and of the
        operation."""
        request = VERBS[verb].request_type.checked(values, self.exchange.limits)
        self.is_readable = True
        return await self.exchange.ask(verb, request, render)

    # --- output ----------------------------------------------------------------------------------

    async def answer(
        self, value: Any, status: int | None = None, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        """Answer with ``value`` as JSON. If ``value`` is bytes, it is already encoded."""
        data = value if isinstance(value, bytes) else as_json(value)
        all_headers = [(b"content-type", JSON_TYPE)]
        if headers:
            all_headers += headers.items()
        await self.reply(status or self.route.status, all_headers, data)

    async def reply(self, status: int, headers: Headers, data: bytes) -> None:
        """Send the whole answer, compressed if it is large and the client accepts it."""
        if len(data) >= GZIP_BYTES_MIN and self.takes_gzip:
            large = len(data) >= GZIP_THREAD_BYTES
            data = await asyncio.to_thread(_gzip, data) if large else _gzip(data)
            headers = [*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        if not self.common.turns.try_take():
            await self.common.turns.wait_for_turn()
        await self.client.answer(status, headers, data)

    async def begin(
        self, content_type: str, extra_headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Begin a streamed answer."""
        headers = [
            (b"content-type", content_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            *extra_headers,
        ]
        await self.client.begin(200, headers)

    async def piece(self, data: bytes, *, more: bool = True) -> None:
        await self.client.piece(data, more=more)

    async def piece_in_time(self, data: bytes) -> None:
        """Send a piece. Raise SlowReader if the client does not read it in time."""
        timeout_s = self.exchange.settings.slow_reader_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.piece(data)
        except TimeoutError:
            raise SlowReader(
                f"the client read too little for {timeout_s} s (slow_reader_timeout_s)"
            ) from None

    @property
    def takes_gzip(self) -> bool:
        accepted = self.headers.get(b"accept-encoding", b"").lower()
        for item in accepted.split(b","):
            coding, _, weight = item.partition(b";")
            if coding.strip() == b"gzip":
                return weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
        return False


@lru_cache(maxsize=MEDIA_TYPES_KEPT_MAX)
def media_type(header: bytes) -> str:
    """Return the media type of a Content-Type header, without parameters."""
    return header.decode("latin-1").partition(";")[0].strip().lower()


def decoded(data: bytes, decoder: msgspec.json.Decoder[T], *, unique: bool = True) -> T:
    """Return the decoded JSON. Raise BadRequest if it is invalid, or if an object in it repeats a
    member and members must be ``unique``."""
    try:
        value = decoder.decode(data)
        if unique:
            types.check_members(data, "the body")
        return value
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()
