"""The client of one request: what it is answered, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tickwheel.server.http.bodies import Receive, Send
    from tickwheel.server.http.problems import Headers

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
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

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
