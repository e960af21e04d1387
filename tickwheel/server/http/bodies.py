"""Reading what a client sends: never more than the limits say, and not for ever.

A body is refused by its ``Content-Length`` before any of it is read, else as soon as it has grown
over the limit; a packed one by what it unpacks to. All bodies in memory together have a limit, too.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from tickwheel.errors import (
    BadRequest,
    BodyTooLarge,
    ConnectionLost,
    Overloaded,
    RequestTimeout,
    UnsupportedMediaType,
    shown,
)

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
        *,
        bytes_max: int,
        timeout_s: float,
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
            raise BadRequest(f"the body is no gzip: {error}") from None
        if self._unpack.unused_data:
            raise BadRequest("the body is no gzip: it goes on behind its end")
        return data, self._unpack.unconsumed_tail

    def _check_end(self) -> None:
        assert self._unpack is not None
        if not self._unpack.eof:
            raise BadRequest("the body is no gzip: it ends too early")

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
        raise ConnectionLost("the client has gone")
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
