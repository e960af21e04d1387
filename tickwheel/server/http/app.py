"""The HTTP server: ``/healthz`` (the process responds), ``/readyz`` (it accepts and delivers
tasks), ``/metrics``, and, with the extra ``http``, the API under ``/v1``, its OpenAPI document and
the console.

It runs Starlette on uvicorn in the daemon's event loop and does not know the engine. A supervisor
would restart a healthy daemon whose health checks fail, so they must always be answered.
Connections without a request are therefore closed soon. At the limit of connections, a new
connection replaces the one that has been idle longest, or else the one that sends its request most
slowly. When all connections wait for answers, a few extra connections are accepted for health and
metrics only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import lru_cache
from ipaddress import ip_address
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from tickwheel.errors import BadRequest, Forbidden, NotFound, TickwheelError, TlsRequired
from tickwheel.server.tcp.connection import keep_alive

if TYPE_CHECKING:
    from tickwheel.server.access.tls import TlsServer
    from tickwheel.server.http.api import Api

Readiness = Callable[[], Awaitable[tuple[bool, dict[str, Any]]]]
"""Returns whether the daemon is ready, and details for the answer."""
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Returns the metrics and their content type for an Accept header."""


MakeTls = Callable[[socket.socket, Callable[[], asyncio.Protocol], bytes], "TlsServer"]
"""Creates a TLS server from a listening socket, a protocol factory and the answer to plain text."""


SCRAPES_MAX = 8
"""Maximum concurrent requests for ``/metrics``; further requests get 503 with Retry-After."""
UNREAD_S_MAX = 30.0
"""Seconds after which the connection of a peer that does not read its answer is closed."""
HEADER_BYTES_MAX = 16 * 1024
EXTRA_CONNECTIONS_MAX = 16
"""Maximum connections above ``connections_max``, for health checks while all others are busy."""
API_PREFIX = "/v1/"
PROBLEM_TYPE = "application/problem+json"
NO_API = (
    "this daemon has no HTTP API and no console: run pip install 'tickwheel[http]' on its machine"
    " and restart it"
)
HEADS_KEPT_MAX = 256
"""Maximum number of cached heads of answers; heads differ in length and date."""
OWN_NAME = "localhost"
"""Top-level host name that means this machine in every browser, as do all names below it."""
_sequence = count()


class _Connection(H11Protocol):
    """A uvicorn connection with timeouts for requests and a limit of connections. uvicorn itself
    waits for a request forever, and at its limit, which includes idle connections, it answers every
    request with 503."""

    connections_max = 1_024
    idle_s = 5.0
    keep_alive_s = 10.0
    _timer: asyncio.TimerHandle | None = None
    _since_s = 0.0
    _last_request = 0
    """Sequence number of the start of the last request, or of the connection."""
    _last_data = 0
    """Sequence number of the last data received."""
    _is_extra = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as theirs
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        keep_alive(sock, self.keep_alive_s)
        self._since_s, self._last_request = self.loop.time(), next(_sequence)
        self._last_cycle = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._check_idle)
        if len(self.connections) > self.connections_max:
            self._make_room()
        self.app_state = {
            "abort": transport.abort,
            "is_extra": self._is_extra,
            "is_complete": self._is_complete,
            "certificate": transport.get_extra_info("peercert"),
            "address": ":".join(map(str, self.client or ("?",))),
            "answer": self._answer,
        }

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, _Connection)]
        others.remove(self)
        oldest = min(others, key=_Connection._closing_order)
        if oldest._awaits_answer:
            # A new connection must not disconnect a client that waits for its answer.
            self._is_extra = True
            extra = [other for other in others if other._is_extra]
            if len(extra) < EXTRA_CONNECTIONS_MAX:
                return
            oldest = min(extra, key=lambda other: other._last_request)
        # Remove it immediately, so that the next new connection does not choose it again.
        self.connections.discard(oldest)
        oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a problem, instead of uvicorn's plain text."""
        try:
            for event in _bad_request(BadRequest(msg)):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # another answer has already begun
        self.transport.close()

    def handle_events(self) -> None:
        before: RequestResponseCycle | None = self.cycle
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle is not before:
            headers = cast("list[tuple[bytes, bytes]]", cycle.scope["headers"])
            names = [name for name, _ in headers]
            if b"transfer-encoding" in names and b"content-length" in names:
                # A proxy may have used the length. The bytes that follow must not be read as
                # another request (RFC 9112, 6.1). The handler has not started yet.
                headers.append(_CLOSE)

    def data_received(self, data: bytes) -> None:
        self._last_data = next(_sequence)
        super().data_received(data)

    def _answer(self, status: int, content_type: bytes, body: bytes) -> bool:
        """Write the answer to the current request in one packet; ASGI would send its head and body
        separately. Return False if it cannot be written now; ASGI then waits until it can."""
        cycle: RequestResponseCycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.scope["method"] == "HEAD":
            return False
        conn = self.conn
        defaults = self.server_state.default_headers
        if _CLOSE in cycle.scope["headers"]:
            defaults = [*defaults, _CLOSE]
        head = _head(status, content_type, len(body), *defaults)
        self.transport.write(
            b"".join([conn.send(event) or b"" for event in (head, h11.Data(data=body), _END)])
        )
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if conn.our_state is h11.MUST_CLOSE or not cycle.keep_alive:
            conn.send(h11.ConnectionClosed())
            self.transport.close()
        cycle.on_response()
        return True

    def _closing_order(self) -> tuple[bool, bool, int]:
        """Return the sort key by which a connection to close is chosen: first idle connections,
        then those with an incomplete request, each beginning with the longest without activity."""
        is_idle = self.is_idle
        return self._awaits_answer, not is_idle, self._last_request if is_idle else self._last_data

    @property
    def _awaits_answer(self) -> bool:
        """Whether a request that has arrived completely is not yet answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return not self.is_idle and cycle is not None and not cycle.more_body

    def _is_complete(self) -> bool:
        """Return whether the current request has arrived completely."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body

    @property
    def is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # initially None in uvicorn
        return cycle is None or cycle.response_complete

    def _check_idle(self) -> None:
        """Close the connection if it is idle or its peer does not read. Schedule the next check."""
        now_s = self.loop.time()
        is_unread = self.transport.get_write_buffer_size() > 0
        if self.cycle is not self._last_cycle:
            self._last_cycle, self._since_s, self._last_request = self.cycle, now_s, next(_sequence)
        elif self.is_idle and not is_unread:
            self.transport.abort()
            return
        elif not is_unread:
            self._since_s = now_s  # the handler enforces its own limits
        elif now_s - self._since_s >= UNREAD_S_MAX:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.idle_s, self._check_idle)


_END = h11.EndOfMessage()
_CLOSE = (b"connection", b"close")


@lru_cache(maxsize=HEADS_KEPT_MAX)
def _head(
    status: int, content_type: bytes, length: int, *defaults: tuple[bytes, bytes]
) -> h11.Response:
    headers = [*defaults, (b"content-type", content_type), (b"content-length", b"%d" % length)]
    return h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])


@lru_cache(maxsize=256)
def is_named(host: bytes, names: frozenset[str]) -> bool:
    """Return whether ``host``, with or without a port, is an IP address, ``localhost``, or in
    ``names``."""
    try:
        name = (urlsplit(b"//" + host).hostname or b"").decode("ascii").rstrip(".")
    except ValueError:
        return False
    if name == OWN_NAME or name.endswith(f".{OWN_NAME}") or name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _problem(error: TickwheelError, title: str) -> dict[str, Any]:
    """Return the fields of a problem. This function works without the extra ``http``."""
    return {
        "type": f"urn:tickwheel:error:{error.code}",
        "title": title,
        "status": error.http_status,
        "detail": error.message,
        "code": error.code,
        "retryable": error.retryable,
    }


def refusal(error: TickwheelError, title: str) -> Response:
    """Return the HTTP answer for an error."""
    return JSONResponse(_problem(error, title), error.http_status, media_type=PROBLEM_TYPE)


def not_found_route(message: str) -> BaseRoute:
    """Return the last route, which answers every other path with 404 and ``message``."""

    async def answer(request: Request) -> Response:
        return refusal(NotFound(message), "Not found")

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Route("/{path:path}", answer, methods=methods)


def _bad_request(error: TickwheelError) -> tuple[h11.Event, ...]:
    body = json.dumps(_problem(error, "Bad request")).encode()
    headers = [(b"content-type", PROBLEM_TYPE.encode())]
    headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
    return head, h11.Data(data=body), h11.EndOfMessage()


def _plain_refused() -> bytes:
    """Return the answer to a plain HTTP request on a port that requires TLS."""
    writer = h11.Connection(h11.SERVER)
    events = _bad_request(TlsRequired("this port requires TLS: use https://"))
    return b"".join(writer.send(event) or b"" for event in events)


PLAIN_REFUSED = _plain_refused()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because the daemon handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _TlsServer(_Server):
    """A uvicorn server that accepts connections through a ``TlsServer``."""

    def __init__(self, config: uvicorn.Config, tls: MakeTls) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup(sockets=[])
        config, state = self.config, self.server_state

        def make() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            protocol: asyncio.Protocol = kind(config=config, server_state=state, app_state={})
            return protocol

        server = self._tls(sockets[0], make, PLAIN_REFUSED)
        server.start()
        servers: list[Any] = [server]
        self.servers = servers


class Http:
    """The HTTP server. ``start`` binds its address; ``stop`` can always be called."""

    def __init__(
        self,
        host: str,
        port: int,
        readiness: Readiness,
        metrics: Metrics,
        *,
        connections_max: int = _Connection.connections_max,
        idle_s: float = _Connection.idle_s,
        keep_alive_s: float = _Connection.keep_alive_s,
        api: Api | None = None,
        routes: Sequence[BaseRoute] | None = None,
        other_paths: ASGIApp | None = None,
        tls: MakeTls | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        """``routes`` are those of a server without an API, in addition to health and metrics.
        ``other_paths`` handles all other paths. ``tls`` creates the server that accepts connections
        in place of the event loop. ``names`` are the accepted host names, in addition to IP
        addresses and ``localhost``; None accepts any name."""
        self._routes, self._other_paths = routes, other_paths
        self._tls = tls
        self._names = names
        self._address = (host, port)
        limits = {
            "connections_max": connections_max,
            "idle_s": idle_s,
            "keep_alive_s": keep_alive_s,
        }
        self.api = api
        self._protocol = type("Connection", (_Connection,), limits)
        self._scrapes = 0
        self._readiness = readiness
        self._metrics = metrics
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url: str | None = None

    async def start(self) -> None:
        """Bind and serve. Raise OSError if the address is unavailable."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self._address)
        except OSError:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            # Any client can cause warnings, and they could fill a disk.
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            http=self._protocol,
            interface="asgi3",
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            timeout_graceful_shutdown=1,
            server_header=False,
            proxy_headers=False,
        )
        self._server = _Server(config) if self._tls is None else _TlsServer(config, self._tls)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        serving, self._serving = self._serving, None
        if serving is None or self._server is None:
            return
        self._server.should_exit = True
        await serving

    def _application(self) -> ASGIApp:
        async def healthz(request: Request) -> JSONResponse:
            return JSONResponse({"status": "alive"})

        async def readyz(request: Request) -> JSONResponse:
            ready, details = await self._readiness()
            # A rolling update would wait forever for a standby to become active.
            standby_is_ok = (
                details["status"] == "standby" and request.query_params.get("standby") == "ok"
            )
            return JSONResponse(details, status_code=200 if ready or standby_is_ok else 503)

        async def metrics(request: Request) -> Response:
            if self._scrapes >= SCRAPES_MAX:
                return JSONResponse({"status": "busy"}, 503, {"retry-after": "1"})
            self._scrapes += 1
            try:
                body, content_type = await self._metrics(request.headers.get("accept", ""))
            finally:
                self._scrapes -= 1
            return Response(body, headers={"content-type": content_type})

        endpoints = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
        routes: list[BaseRoute] = [Route(path, endpoint) for path, endpoint in endpoints.items()]
        return self._restricted_to_names(self._by_path(routes))

    def _restricted_to_names(self, application: ASGIApp) -> ASGIApp:
        """Return the application, restricted to requests that use a name of this daemon. Without
        the restriction, a page of another site could point its own name to this address (DNS
        rebinding) and read the answers."""
        names = self._names
        if names is None:
            return application

        def checked(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            for name, value in scope["headers"]:
                if name == b"host" and not is_named(value, names):
                    break
            else:
                return application(scope, receive, send)
            error = Forbidden("the header Host is not a name of this daemon (http_hosts)")
            return refusal(error, "Forbidden")(scope, receive, send)

        return checked

    def _by_path(self, routes: list[BaseRoute]) -> ASGIApp:
        api = self.api
        if api is None:
            fixed_routes = [not_found_route(NO_API)] if self._routes is None else self._routes
            own_routes = [*routes, *fixed_routes]
            paths = {getattr(route, "path", "") for route in own_routes}
            own, other = Starlette(routes=own_routes), self._other_paths
            if other is None:
                return own
            return lambda scope, receive, send: (own if scope["path"] in paths else other)(
                scope, receive, send
            )
        # Import the API only if its extra is installed.
        from tickwheel.server.http.pages import pages

        pages_application = Starlette(routes=[*routes, *pages(wait_ms_max=api.wait_ms_max)])

        def application(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            is_api = scope["path"].startswith(API_PREFIX)
            return (api if is_api else pages_application)(scope, receive, send)

        return application
