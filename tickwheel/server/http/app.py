"""HTTP: ``/healthz`` (the process answers), ``/readyz`` (it takes and gives), ``/metrics``, and,
where the extra ``http`` is installed, the API under ``/v1`` with its document and its page.

Starlette on uvicorn, in the daemon's own event loop. Knows no engine: it asks two functions and the
API. Health checks must get through whatever others do, or a supervisor restarts a daemon that is
well: a connection without a request is closed soon, and when there are too many, the one that has
been without one for the longest makes room for the next, then the one that is slowest to send its
own. When all wait for answers, a few more are let in, and get nothing but health and metrics.
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
    from tickwheel.server.http.api import Api
    from tickwheel.server.tls import TlsServer

Readiness = Callable[[], Awaitable[tuple[bool, dict[str, Any]]]]
"""(ready, details)"""
Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Makes the metrics: the Accept header in; body and content type out."""


MakeTls = Callable[[socket.socket, Callable[[], asyncio.Protocol], bytes], "TlsServer"]
"""Makes a TLS server of a listening socket, a maker of protocols, and the answer to plain text."""


SCRAPES_MAX = 8
"""Requests for ``/metrics`` that wait for each other; more are refused, to be sent again later."""
REQUEST_S_MAX = 30.0
"""After so many seconds an answer that the peer does not read is given up."""
HEADER_BYTES_MAX = 16 * 1024
EXTRA_CONNECTIONS_MAX = 16
"""Connections over ``connections_max``, for health checks while all others are busy."""
API_PREFIX = "/v1/"
PROBLEM_TYPE = "application/problem+json"
NO_API = (
    "this daemon has no HTTP API and no console: pip install 'tickwheel[http]' where it runs, and"
    " start it again"
)
HEADS_KEPT_MAX = 256
"""Heads of answers that are known to be right: they differ in length and second."""
OWN_NAME = "localhost"
"""The host name that, with all names that end with it, is this machine for every browser."""
_places = count()


class _Connection(H11Protocol):
    """A connection of uvicorn's with time-outs for requests and a bound: uvicorn would wait for a
    request as long as the peer likes, and beyond a number of connections, idle ones included,
    answer everybody with 503."""

    connections_max = 1_024
    idle_s = 5.0
    keep_alive_s = 10.0
    _timer: asyncio.TimerHandle | None = None
    _since_s = 0.0
    _place = 0
    """The order in which connections came, or were last seen with another request."""
    _heard = 0
    """The order in which connections were heard last."""
    _is_extra = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as theirs
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        keep_alive(sock, self.keep_alive_s)
        self._since_s, self._place = self.loop.time(), next(_places)
        self._seen = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._look)
        if len(self.connections) > self.connections_max:
            self._make_room()
        self.app_state = {
            "abort": transport.abort,
            "is_extra": self._is_extra,
            "is_whole": self._is_whole,
            "certificate": transport.get_extra_info("peercert"),
            "address": ":".join(map(str, self.client or ("?",))),
            "answer": self._answer,
        }

    def _make_room(self) -> None:
        others = [one for one in self.connections if isinstance(one, _Connection)]
        others.remove(self)
        oldest = min(others, key=_Connection._standing)
        if oldest._waits:
            # Nobody who waits for tasks is sent away for a newcomer.
            self._is_extra = True
            extra = [one for one in others if one._is_extra]
            if len(extra) < EXTRA_CONNECTIONS_MAX:
                return
            oldest = min(extra, key=lambda one: one._place)
        # Out of the set at once: the next one must not choose it again.
        self.connections.discard(oldest)
        oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, as uvicorn does, in the form of all errors here."""
        try:
            for event in _bad_request(BadRequest(msg)):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer was under way, and this cannot be said within it
        self.transport.close()

    def handle_events(self) -> None:
        before: RequestResponseCycle | None = self.cycle
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle is not before:
            headers = cast("list[tuple[bytes, bytes]]", cycle.scope["headers"])
            names = [name for name, _ in headers]
            if b"transfer-encoding" in names and b"content-length" in names:
                # Somebody before us may have gone by the length: what follows is not to be
                # taken for a request (RFC 9112, 6.1). Its handler has not begun yet.
                headers.append(_CLOSE)

    def data_received(self, data: bytes) -> None:
        self._heard = next(_places)
        super().data_received(data)

    def _answer(self, status: int, content_type: bytes, body: bytes) -> bool:
        """Write the whole answer to the current request as one piece. ASGI has head and body apart,
        and each would be a packet. False: not now; ASGI's way waits until it can be."""
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

    def _standing(self) -> tuple[bool, bool, int]:
        """The order in which connections make room: first those without a request, then those whose
        unfinished request was silent for the longest."""
        is_idle = self.is_idle
        return self._waits, not is_idle, self._place if is_idle else self._heard

    @property
    def _waits(self) -> bool:
        """Whether a whole request is here and not answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return not self.is_idle and cycle is not None and not cycle.more_body

    def _is_whole(self) -> bool:
        """Whether all of the current request has arrived."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body

    @property
    def is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # theirs is None to begin with
        return cycle is None or cycle.response_complete

    def _look(self) -> None:
        """Now and then: close the connection if it asks nothing, or its peer does not read."""
        now_s = self.loop.time()
        is_unread = self.transport.get_write_buffer_size() > 0
        if self.cycle is not self._seen:
            self._seen, self._since_s, self._place = self.cycle, now_s, next(_places)
        elif self.is_idle and not is_unread:
            self.transport.abort()
            return
        elif not is_unread:
            self._since_s = now_s  # its handler has its own limits
        elif now_s - self._since_s >= REQUEST_S_MAX:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(self.idle_s, self._look)


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
    """Whether ``host``, with or without a port, is an address, ``localhost``, or one of
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


def _said(error: TickwheelError, title: str) -> dict[str, Any]:
    """A problem as plain values, without the API's extra, which may be missing."""
    about = {"type": f"urn:tickwheel:error:{error.code}", "title": title}
    said = {"status": error.http_status, "detail": error.message, "code": error.code}
    return about | said | {"retryable": error.retryable}


def refusal(error: TickwheelError, title: str) -> Response:
    """An error as an answer."""
    return JSONResponse(_said(error, title), error.http_status, media_type=PROBLEM_TYPE)


def anything_else(message: str) -> BaseRoute:
    """The last route: all that no other has is not found, for the reason that ``message`` says;
    also a browser and ``tickwheel console`` are told so."""

    async def answer(request: Request) -> Response:
        return refusal(NotFound(message), "Not found")

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Route("/{path:path}", answer, methods=methods)


def _bad_request(error: TickwheelError) -> tuple[h11.Event, ...]:
    body = json.dumps(_said(error, "Bad request")).encode()
    headers = [(b"content-type", PROBLEM_TYPE.encode())]
    headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
    return head, h11.Data(data=body), h11.EndOfMessage()


def _plain_refused() -> bytes:
    """The answer to a request without TLS on a port that speaks TLS."""
    writer = h11.Connection(h11.SERVER)
    events = _bad_request(TlsRequired("this port speaks TLS: https://"))
    return b"".join(writer.send(event) or b"" for event in events)


PLAIN_REFUSED = _plain_refused()


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which are the daemon's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _OverTls(_Server):
    """A server whose connections come through a ``TlsServer``."""

    def __init__(self, config: uvicorn.Config, tls: MakeTls) -> None:
        super().__init__(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup(sockets=[])
        config, state = self.config, self.server_state

        def make() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            made: asyncio.Protocol = kind(config=config, server_state=state, app_state={})
            return made

        server = self._tls(sockets[0], make, PLAIN_REFUSED)
        server.start()
        servers: list[Any] = [server]
        self.servers = servers


class Http:
    """The HTTP server: ``start`` binds; ``stop`` may be called at any time, and twice."""

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
        rest: Sequence[BaseRoute] | None = None,
        beyond: ASGIApp | None = None,
        tls: MakeTls | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        """``rest``: the routes beside health and metrics of who has no API, by whole paths;
        ``beyond`` answers for all other paths, where there is one. ``tls`` makes what
        accepts connections in place of the event loop. ``names``: those by which the daemon may be
        asked, beside addresses and ``localhost``; None: any name."""
        self._rest, self._beyond = rest, beyond
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
        """Bind and serve. Raises OSError if the address cannot be had."""
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
            # Its warnings are what strangers send: they could fill a disk with them.
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
        self._server = _Server(config) if self._tls is None else _OverTls(config, self._tls)
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
            # Who replaces daemons one by one would wait for ever for a standby to lead.
            stands_by = (
                details["status"] == "standby" and request.query_params.get("standby") == "ok"
            )
            return JSONResponse(details, status_code=200 if ready or stands_by else 503)

        async def metrics(request: Request) -> Response:
            if self._scrapes >= SCRAPES_MAX:
                return JSONResponse({"status": "busy"}, 503, {"retry-after": "1"})
            self._scrapes += 1
            try:
                body, content_type = await self._metrics(request.headers.get("accept", ""))
            finally:
                self._scrapes -= 1
            return Response(body, headers={"content-type": content_type})

        about = {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}
        routes: list[BaseRoute] = [Route(path, route) for path, route in about.items()]
        return self._named(self._by_path(routes))

    def _named(self, application: ASGIApp) -> ASGIApp:
        """The application for requests by a name of ours only. A page of another site may give its
        own name our address; the browser then takes what we say for that site's."""
        names = self._names
        if names is None:
            return application

        def checked(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            for name, value in scope["headers"]:
                if name == b"host" and not is_named(value, names):
                    break
            else:
                return application(scope, receive, send)
            error = Forbidden("Host is not a name of this daemon's: see http_hosts")
            return refusal(error, "Forbidden")(scope, receive, send)

        return checked

    def _by_path(self, routes: list[BaseRoute]) -> ASGIApp:
        api = self.api
        if api is None:
            more = [anything_else(NO_API)] if self._rest is None else self._rest
            beyond, known = self._beyond, {getattr(route, "path", "") for route in (*routes, *more)}
            own = Starlette(routes=[*routes, *more])
            if beyond is None:
                return own
            return lambda scope, receive, send: (own if scope["path"] in known else beyond)(
                scope, receive, send
            )
        # Nothing of the API is imported without its extra.
        from tickwheel.server.http.pages import pages

        rest = Starlette(routes=[*routes, *pages(wait_ms_max=api.wait_ms_max)])

        def application(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            is_api = scope["path"].startswith(API_PREFIX)
            return (api if is_api else rest)(scope, receive, send)

        return application
