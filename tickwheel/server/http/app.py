"""HTTP: ``/healthz`` (the process answers), ``/readyz`` (it takes and gives), ``/metrics``.

Starlette on uvicorn, in the daemon's own event loop. Knows no engine: it asks two functions.
Health checks must get through whatever others do, or a supervisor restarts a daemon that is well:
a connection without a request is closed soon, and when there are too many, the one that has been
without one for the longest makes room for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

Readiness = Callable[[], tuple[bool, dict[str, Any]]]
"""(ready, details)"""
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The Accept header in; body and content type out."""


SCRAPES_MAX = 8
"""Requests for ``/metrics`` that wait for each other; more are refused, to be sent again later."""
REQUEST_S_MAX = 30.0
"""An answer that the peer does not read is given up after this."""
HEADER_BYTES_MAX = 16 * 1024
_places = count()


class _Connection(H11Protocol):
    """uvicorn's, which would wait for a request as long as the peer likes, and which beyond a
    number of connections, idle ones included, answers everybody with 503."""

    connections_max = 256
    idle_s = 5.0
    _timer: asyncio.TimerHandle | None = None
    _since_s = 0.0
    _place = 0
    """In the order in which they came or were last seen with another request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as theirs
        super().connection_made(transport)
        self._since_s, self._place = self.loop.time(), next(_places)
        self._seen = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._look)
        if len(self.connections) > self.connections_max:
            others = [one for one in self.connections if isinstance(one, _Connection)]
            others.remove(self)
            oldest = min(others, key=lambda one: (not one.is_idle, one._place))
            # Out of the set at once: the next one must not choose it again.
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # theirs is None to begin with
        return cycle is None or cycle.response_complete

    def _look(self) -> None:
        """Every now and then: has it asked for anything, and been answered?"""
        now_s = self.loop.time()
        if self.cycle is not self._seen:
            self._seen, self._since_s, self._place = self.cycle, now_s, next(_places)
        elif self.is_idle or now_s - self._since_s >= REQUEST_S_MAX:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.idle_s, self._look)


class _Server(uvicorn.Server):
    """Signals are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Http:
    """``start`` binds; ``stop`` may be called at any time, and twice."""

    def __init__(
        self,
        host: str,
        port: int,
        readiness: Readiness,
        metrics: Metrics,
        *,
        connections_max: int = _Connection.connections_max,
        idle_s: float = _Connection.idle_s,
    ) -> None:
        self._address = (host, port)
        limits = {"connections_max": connections_max, "idle_s": idle_s}
        self._protocol = type("Connection", (_Connection,), limits)
        self._scrapes = 0
        self._readiness = readiness
        self._metrics = metrics
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url: str | None = None

    async def start(self) -> None:
        """Raises OSError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self._address)
        except OSError:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=self._protocol,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        serving, self._serving = self._serving, None
        if serving is None or self._server is None:
            return
        self._server.should_exit = True
        await serving

    def _application(self) -> Starlette:
        async def healthz(request: Request) -> JSONResponse:
            return JSONResponse({"status": "alive"})

        async def readyz(request: Request) -> JSONResponse:
            ready, details = self._readiness()
            return JSONResponse(details, status_code=200 if ready else 503)

        async def metrics(request: Request) -> Response:
            if self._scrapes >= SCRAPES_MAX:
                return JSONResponse({"status": "busy"}, 503, {"retry-after": "1"})
            self._scrapes += 1
            try:
                body, content_type = await self._metrics(request.headers.get("accept", ""))
            finally:
                self._scrapes -= 1
            return Response(body, headers={"content-type": content_type})

        routes = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
        return Starlette(routes=[Route(path, route) for path, route in routes.items()])
