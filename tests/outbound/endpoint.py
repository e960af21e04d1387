"""A real HTTP endpoint for pushes: it keeps what it was sent, and answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Got:
    """One request that came."""

    headers: dict[str, str]
    body: bytes
    path: str

    @property
    def task(self) -> int:
        return int(self.headers["tickwheel-id"])


@dataclass
class Endpoint:
    """``url`` of the endpoint; ``got`` what came, in order; ``answer`` what it says."""

    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """Errors of signatures."""
    answer: Answer | None = None
    url: str = ""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            Webhook(SECRET).verify(body, dict(request.headers), json_parse=False)
        except WebhookVerificationError as error:
            self.bad.append(str(error))
            return web.Response(status=401)
        self.got.append(Got({k.lower(): v for k, v in request.headers.items()}, body, request.path))
        self.arrived.set()
        if self.answer is not None:
            return await self.answer(request)
        return web.Response(status=self.status, headers=self.headers)

    async def until(self, enough: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Wait until what came is enough."""
        async with asyncio.timeout(timeout_s):
            while not enough():
                self.arrived.clear()
                await self.arrived.wait()

    async def until_count(self, count: int, timeout_s: float = 60.0) -> None:
        await self.until(lambda: len(self.got) >= count, timeout_s)


class Hostile:
    """An endpoint, or a broker, in a thread of its own: it reads something, then answers with
    ``begin`` and with ``piece`` for ever, whatever it is asked."""

    def __init__(self, begin: bytes, piece: bytes) -> None:
        self._begin, self._piece = begin, piece
        self.sent = 0
        """Bytes that the other side, or the kernel, has taken."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._flood, args=(connection,), daemon=True).start()

    def _flood(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65_536)
            connection.sendall(self._begin)
            while True:
                self.sent += connection.send(self._piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@contextlib.contextmanager
def flooding(begin: bytes, piece: bytes) -> Iterator[Hostile]:
    """While a hostile endpoint answers."""
    made = Hostile(begin, piece)
    try:
        yield made
    finally:
        made.close()


@contextlib.asynccontextmanager
async def serving(endpoint: Endpoint, port: int = 0) -> AsyncIterator[Endpoint]:
    """While the endpoint answers."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield endpoint
    finally:
        await runner.cleanup()
