"""One request on its way through a handler: what it says, decoded, and how it is answered."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from tickwheel.api.verbs import VERBS
from tickwheel.errors import BadRequest, TickwheelError, UnsupportedMediaType, shown
from tickwheel.server.http.encode import JSON, JSON_TYPE, as_json
from tickwheel.server.shard.callers import Ask

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.server.http.bodies import Body
    from tickwheel.server.http.client import Client
    from tickwheel.server.http.exchange import Exchange
    from tickwheel.server.http.problems import Headers
    from tickwheel.server.http.routes import Route
    from tickwheel.server.http.turns import Turns
    from tickwheel.server.shard.operations import Operations

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
        "_query_string", "_turns", "client", "content_type", "exchange", "headers", "incoming",
        "is_encrypted", "named", "route",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        exchange: Exchange,
        named: dict[str, str],
        headers: dict[bytes, bytes],
        query_string: bytes,
        body: Body,
        client: Client,
        turns: Turns,
        *,
        is_encrypted: bool = False,
    ) -> None:
        self.route = route
        self.exchange = exchange
        self.named = named
        self.headers = headers
        self.incoming = body
        self.client = client
        self.content_type = media_type(headers.get(b"content-type", b""))
        """The content type without its parameters; "": there is none."""
        self.is_encrypted = is_encrypted
        """Whether nobody on the way can read a cookie."""
        self._turns = turns
        self._query_string = query_string

    @property
    def operations(self) -> Operations:
        return self.exchange.operations

    @property
    def now(self) -> Now:
        return self.exchange.operations.clock.read()

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
        exchange, now, operations = self.exchange, self.now, self.operations
        request = VERBS[verb].request
        assert request is not None, verb
        try:
            asked = request.checked(said, operations.limits)
        except TickwheelError as error:
            operations.unreadable(exchange.caller, verb, error)
            raise
        act = getattr(operations, verb)
        return await exchange.ask(
            lambda number: act(Ask(exchange.caller, number, asked, now)), render=render
        )

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
        if not self._turns.taken():
            await self._turns.mine()
        await self.client.answer(status, headers, data)

    async def begin(self, content_type: bytes, status: int = 200) -> None:
        """Begin an answer that comes piece by piece."""
        headers = [
            (b"content-type", content_type),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await self.client.begin(status, headers)

    async def piece(self, data: bytes, *, more: bool = True) -> None:
        await self.client.piece(data, more=more)

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
        raise BadRequest(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()
