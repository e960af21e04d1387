"""HTTP: ``/healthz`` (the process answers), ``/readyz`` (it takes and gives), ``/metrics``.

Starlette on uvicorn, in the daemon's own event loop. Knows no engine: it asks two functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Readiness = Callable[[], tuple[bool, dict[str, Any]]]
"""(ready, details)"""
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The Accept header in; body and content type out."""


class _Server(uvicorn.Server):
    """Signals are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Http:
    """``start`` binds; ``stop`` may be called at any time, and twice."""

    def __init__(self, host: str, port: int, readiness: Readiness, metrics: Metrics) -> None:
        self._address = (host, port)
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
            limit_concurrency=64,
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
            body, content_type = await self._metrics(request.headers.get("accept", ""))
            return Response(body, headers={"content-type": content_type})

        routes = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
        return Starlette(routes=[Route(path, route) for path, route in routes.items()])
