"""One request: its body, read within bounds; its answer, or its error as
``application/problem+json``. Whom its handler asks is an ``Exchange`` (``exchange.py``).

Invariants:

* Never more of a body is read than the limits say, and not for ever. A body is refused by its
  ``Content-Length`` before any of it is read, else as soon as it has grown over the limit; a packed
  one by what it unpacks to. All bodies in memory together have a limit, too.
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
    from tickwheel.server.http.exchange import Exchange
    from tickwheel.server.http.types import Reader
    from tickwheel.server.logins import Sessions
    from tickwheel.server.shard.callers import Principal

_encoder = msgspec.json.Encoder()
as_json = _encoder.encode
JSON = "application/json"
JSON_TYPE = JSON.encode()


def put_body(into: dict[str, Any], body: bytes) -> None:
    """Put a body into an answer: as text if it is UTF-8, else as base64."""
    try:
        into["body"] = body.decode()
    except UnicodeDecodeError:
        into["body_base64"] = body


# --- errors as problems: one row of the error table, one status ----------------------------------


PROBLEM_TYPE = b"application/problem+json"
RETRY_AFTER_S = 1
RETRY_AFTER_FULL_S = 5
"""Seconds after which to come again when a disk is full: its room returns more slowly."""
_OF_CLIENTS = (ConnectionLost, SendTimeout)

Headers = list[tuple[bytes, bytes]]


def problem(
    error: TickwheelError, *, active: str | None = None, active_http: str | None = None
) -> tuple[int, Headers, bytes]:
    """(status, headers, body) of an error. ``active``, ``active_http``: the address and HTTP URL of
    the daemon that leads."""
    said = types.Problem(
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
    if error.retryable and not isinstance(error, _OF_CLIENTS):
        full = isinstance(error, StoreFull)
        after_s = RETRY_AFTER_FULL_S if full else RETRY_AFTER_S
        if isinstance(error, Overloaded):
            after_s = max(1, ceil(error.after_s))
        headers.append((b"retry-after", b"%d" % after_s))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b'Bearer realm="tickwheel"'))
    return error.http_status, headers, as_json(said)


def line(error: TickwheelError, number: int | None = None) -> dict[str, object]:
    """An error within a stream of lines. ``number``: that of its line, from 1 on, empty ones
    counted."""
    said: dict[str, object] = {} if number is None else {"line": number}
    return said | {"code": error.code, "detail": error.message, "retryable": error.retryable}


assert Overloaded.http_status == 429


# --- what a request is for -----------------------------------------------------------------------

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
    """The operations that the handler calls: the route's rights are theirs."""
    answer: Any = None
    """The type of the answer; None: there is none, or no JSON."""
    status: int = 200
    body: Any = None
    """The type of the JSON body; a union: any of its types."""
    query: type[Struct] = types.NoQuery
    headers: tuple[tuple[str, str], ...] = ()
    """(name, what it says) of the headers that the handler reads."""
    raw: tuple[str, ...] = ()
    """Content types that the route takes beside JSON."""
    streams: tuple[str, ...] = ()
    """Content types that the route answers with, line by line."""
    codes: tuple[str, ...] = ()
    """Error codes of the route, beside those that every request may get."""
    standby: bool = False
    """Whether a standby answers the route, too."""
    public: bool = False
    """Whether the route needs no login: it says nothing of any task."""
    page: bool = False
    """Whether a browser opens the route as a page, with a cookie and no header of ours."""


# --- how many requests are worked on in one turn of the event loop -------------------------------


class Turns:
    """The turns of requests: ``await mine()`` before each piece of work, unless ``taken()``."""

    def __init__(self, at_a_time: int) -> None:
        self._at_a_time = self._left = at_a_time
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_armed = False

    def taken(self) -> bool:
        """Whether the request may work at once, which takes one place of this turn."""
        if self._left <= 0 or self._waiting:
            return False
        self._left -= 1
        self._arm()
        return True

    async def mine(self) -> None:
        """Wait for a turn, in the order of the calls."""
        if self.taken():
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
            if not turn.done():  # its request was not cut off meanwhile
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._arm()


# --- reading what a client sends -----------------------------------------------------------------


_LISTS = {b"accept": b", ", b"accept-encoding": b", ", b"cookie": b"; "}
"""Headers of which the values of several lines are one list, and what stands between them."""


def single_headers(pairs: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name, those that are lists as one value. Raise BadRequest if another one
    that is read here has two lines: each might be the one that its sender means."""
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
"""Bytes to which a packed stream is unpacked at a time."""


class Room:
    """The bytes that bodies of all requests take in memory while they are read or worked on."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def take(self, count: int) -> None:
        """Take room for ``count`` bytes. Raises Overloaded."""
        if self.bytes + count > self.bytes_max:
            raise Overloaded(
                f"{self.bytes} bytes of requests over HTTP are in memory, and {count} more would"
                f" be too many; the limit is {self.bytes_max} (http_bodies_bytes_max)"
            )
        self.bytes += count

    def give_back(self, count: int) -> None:
        self.bytes -= count


class Body:
    """The body of one request; ``close`` it when the request is over."""

    __slots__ = (
        "_announced", "_bytes_max", "_is_here", "_receive", "_room", "_taken", "_timeout_s",
        "_unpack",
    )  # fmt: skip

    def __init__(
        self,
        receive: Receive,
        headers: dict[bytes, bytes],
        room: Room,
        bytes_max: int,
        timeout_s: float,
        *,
        is_here: Callable[[], bool],
    ) -> None:
        """``is_here``: whether the whole body has arrived. Raises UnsupportedMediaType,
        BadRequest."""
        self._is_here = is_here
        self._receive = receive
        self._room = room
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._taken = 0
        encoding = headers.get(b"content-encoding")
        self._unpack = None if encoding is None else _unpacker(encoding)
        length = headers.get(b"content-length", b"0")
        # h11 lets only digits through; a number of a thousand of them is one, too.
        self._announced = int(length) if length.isdigit() and len(length) < 20 else 1 << 62

    def close(self) -> None:
        """Give the room of the body back."""
        self._room.give_back(self._taken)
        self._taken = 0

    async def read(self) -> bytes:
        """The whole body. Raises BodyTooLarge, RequestTimeout, Overloaded, BadRequest,
        ConnectionLost."""
        if self._announced > self._bytes_max:
            raise self._too_large(self._announced)
        if self._is_here():  # usual, and a timer is a tenth of what a small request costs
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
        """The body piece by piece, of any length; each piece must come in time."""
        more = True
        while more:
            try:
                async with asyncio.timeout(self._timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise self._too_slow() from None
            part = _content(message)
            more = message.get("more_body", False)
            if self._unpack is None:
                if part:
                    yield part
                continue
            while part:
                unpacked, part = self._unpacked(part, PIECE_BYTES)
                yield unpacked
            if not more:
                self._check_end()

    def _part(self, message: Message) -> bytes:
        part = _content(message)
        if self._unpack is None:
            return part
        part, rest = self._unpacked(part, self._bytes_max - self._taken + 1)
        if rest:
            raise self._too_large(self._bytes_max + 1)
        if not message.get("more_body", False):
            self._check_end()
        return part

    def _unpacked(self, part: bytes, bytes_max: int) -> tuple[bytes, bytes]:
        """(unpacked bytes, the part of ``part`` that is still packed)."""
        assert self._unpack is not None
        try:
            data = self._unpack.decompress(part, bytes_max)
        except zlib.error as error:
            raise BadRequest(f"the body is not valid gzip: {error}") from None
        if self._unpack.unused_data:
            raise BadRequest("the body is not valid gzip: it goes on behind its end")
        return data, self._unpack.unconsumed_tail

    def _check_end(self) -> None:
        assert self._unpack is not None
        if not self._unpack.eof:
            raise BadRequest("the body is not valid gzip: it ends too early")

    def _count(self, count: int) -> None:
        if self._taken + count > self._bytes_max:
            raise self._too_large(self._taken + count)
        self._room.take(count)
        self._taken += count

    def _too_large(self, size: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request's body has {size} bytes or more; the limit is {self._bytes_max}"
            " (http_body_bytes_max)"
        )

    def _too_slow(self) -> RequestTimeout:
        return RequestTimeout(
            f"the request's body did not come within {self._timeout_s:g} s (http_body_timeout_s)"
        )


def _content(message: Message) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone("the client has gone")
    content: bytes = message.get("body", b"")
    return content


def _unpacker(encoding: bytes) -> Any:
    """An unpacker for the content encoding; None: the body is not packed."""
    word = encoding.strip().lower()
    if word in (b"", b"identity"):
        return None
    if word in (b"gzip", b"x-gzip"):
        return zlib.decompressobj(GZIP_WINDOW)
    raise UnsupportedMediaType(
        f"content-encoding must be gzip or identity, not {shown(encoding.decode('latin-1'))}"
    )


# --- the client of a request: what it is answered, and whether it is there -----------------------


class ClientGone(ConnectionLost):
    """The client of a request has gone: nobody waits for its answer."""


Whole = Callable[[int, bytes, bytes], bool]
"""Writes a whole answer: status, content type, body; False: it has to wait."""


class Client:
    """Gets the answer: ``answer`` it, or ``begin`` and send ``piece`` by piece. Then ``stop``."""

    __slots__ = ("_connection", "_receive", "_send", "_watch", "status")

    def __init__(self, connection: dict[str, Any], receive: Receive, send: Send) -> None:
        self._connection = connection
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None
        self.status = 0
        """The status of the answer that has begun; 0: none has."""

    # --- out -------------------------------------------------------------------------------------

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; its length is not among ``headers``. One with a content type alone
        is usual, and is written as one piece where the connection can."""
        self.status = status
        if len(headers) == 1 and headers[0][0] == b"content-type":
            whole: Whole | None = self._connection.get("answer")
            if whole is not None and whole(status, headers[0][1], body):
                return
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.piece(body, more=False)

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def cut_off(self) -> None:
        """End the connection without the end of the answer."""
        abort = self._connection.get("abort")
        if abort is not None:
            abort()
        await self._until_gone()

    # --- there, or not: only to be asked once the body has been read ------------------------------

    def gone(self) -> asyncio.Future[None]:
        """A future that is done when the client has gone."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._until_gone())
        return self._watch

    @property
    def is_gone(self) -> bool:
        return self._watch is not None and self._watch.done()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


# --- what all requests have in common -----------------------------------------------------------


class Streams:
    """The open streams by their numbers, which receipts name."""

    def __init__(self) -> None:
        self._open: dict[int, Exchange] = {}
        self._last = 0

    def opened(self, exchange: Exchange) -> int:
        self._last += 1
        self._open[self._last] = exchange
        return self._last

    def closed(self, number: int) -> None:
        del self._open[number]

    def heard(self, number: int, principal: Principal) -> None:
        """Note a sign of life of a stream's consumer, whose principal settles a delivery of it."""
        exchange = self._open.get(number)
        if exchange is not None and exchange.caller.principal.name == principal.name:
            exchange.heard()


@dataclass(frozen=True, slots=True)
class Common:
    """What all requests of one API have in common."""

    turns: Turns
    streams: Streams
    sessions: Sessions
    reader: Reader
    keep_alive_s: float
    """How often, in seconds, a stream says something at least."""
    wait_ms_max: int
    """How long, in milliseconds, a pull may wait at most."""


# --- a request on its way through a handler ------------------------------------------------------


T = TypeVar("T")
GZIP_BYTES_MIN = 1_024
"""Bytes from which on an answer is packed: a smaller one does not get smaller."""
GZIP_THREAD_BYTES = 32 * 1024
"""Bytes from which on an answer is packed in a thread: the loop has tasks to deliver."""
GZIP_LEVEL = 1
QUERY_FIELDS_MAX = 64
MEDIA_TYPES_KEPT_MAX = 64


class Call:
    """One request as handlers see it: ``json``, ``query``, ``named`` in; ``answer`` out."""

    __slots__ = (
        "_query_string", "client", "common", "content_type", "exchange", "headers", "incoming",
        "is_encrypted", "named", "route",
    )  # fmt: skip

    def __init__(
        self,
        common: Common,
        route: Route,
        exchange: Exchange,
        named: dict[str, str],
        headers: dict[bytes, bytes],
        scope: Message,
        body: Body,
        client: Client,
    ) -> None:
        self.common = common
        self.route = route
        self.exchange = exchange
        self.named = named
        self.headers = headers
        self.incoming = body
        self.client = client
        self.content_type = media_type(headers.get(b"content-type", b""))
        """The content type without its parameters; "": there is none."""
        self.is_encrypted = scope.get("scheme") == "https"
        """Whether nobody on the way can read a cookie."""
        self._query_string: bytes = scope["query_string"]

    def header(self, name: bytes) -> str | None:
        """The value of the header of this lower-case name; None: there is none."""
        found = self.headers.get(name)
        return None if found is None else found.decode("latin-1")

    # --- in --------------------------------------------------------------------------------------

    def query(self, kind: type[T]) -> T:
        """The query as ``kind``. Raises BadRequest."""
        try:
            pairs = parse_qsl(
                self._query_string.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=QUERY_FIELDS_MAX,
            )
        except ValueError as error:
            raise BadRequest(f"the query cannot be read: {error}") from None
        given = dict(pairs)
        if len(given) != len(pairs):
            raise BadRequest("the query has a field twice")
        try:
            found = msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequest(f"query: {error}") from None
        for name, text in given.items():
            if getattr(found, name) is None:  # the word null, for what is no text
                raise BadRequest(f"query: {name} has no value: {shown(text)}")
        return found

    async def json(self, decoder: msgspec.json.Decoder[T]) -> T:
        """The decoded body. Raises BadRequest, UnsupportedMediaType, and what reading it raises."""
        if self.content_type not in (JSON, ""):
            raise UnsupportedMediaType(
                f"content-type must be {JSON}, not {shown(self.content_type)}"
            )
        return decoded(await self.incoming.read(), decoder)

    # --- on --------------------------------------------------------------------------------------

    async def ask(
        self, verb: str, said: Mapping[str, Any], render: Callable[[Any], Any] | None = None
    ) -> Any:
        """What a declared verb answers to values in the form of the wire; ``render`` makes JSON of
        it in the same step. Raises what the values' kinds and the operation do."""
        try:
            asked = VERBS[verb].asked.checked(said, self.exchange.limits)
        except TickwheelError as error:
            self.exchange.unreadable(verb, error)
            raise
        return await self.exchange.ask(verb, asked, render)

    # --- out -------------------------------------------------------------------------------------

    async def answer(
        self, value: Any, status: int | None = None, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        """Answer with JSON: ``value`` is its bytes, or becomes them."""
        data = value if isinstance(value, bytes) else as_json(value)
        found = [(b"content-type", JSON_TYPE)]
        if headers:
            found += headers.items()
        await self.reply(status or self.route.status, found, data)

    async def reply(self, status: int, headers: Headers, data: bytes) -> None:
        """Send the whole answer, packed where that is worth it."""
        if len(data) >= GZIP_BYTES_MIN and self.takes_gzip:
            large = len(data) >= GZIP_THREAD_BYTES
            data = await asyncio.to_thread(_gzip, data) if large else _gzip(data)
            headers = [*headers, (b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
        if not self.common.turns.taken():
            await self.common.turns.mine()
        await self.client.answer(status, headers, data)

    async def begin(self, content_type: str, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Begin an answer that comes piece by piece; ``more``: other headers."""
        headers = [
            (b"content-type", content_type.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            *more,
        ]
        await self.client.begin(200, headers)

    async def piece(self, data: bytes, *, more: bool = True) -> None:
        await self.client.piece(data, more=more)

    async def piece_in_time(self, data: bytes) -> None:
        """Send a piece. Raises SlowReader when the client does not read it in time."""
        timeout_s = self.exchange.settings.slow_reader_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.piece(data)
        except TimeoutError:
            raise SlowReader(
                f"it read too little for {timeout_s} s (slow_reader_timeout_s)"
            ) from None

    @property
    def takes_gzip(self) -> bool:
        accepted = self.headers.get(b"accept-encoding", b"").lower()
        for one in accepted.split(b","):
            coding, _, weight = one.partition(b";")
            if coding.strip() == b"gzip":
                return weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
        return False


@lru_cache(maxsize=MEDIA_TYPES_KEPT_MAX)
def media_type(header: bytes) -> str:
    """The type of a Content-Type header, without parameters."""
    return header.decode("latin-1").partition(";")[0].strip().lower()


def decoded(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded JSON. Raises BadRequest."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()
