"""The HTTP server for all shards of a machine: their readiness, metrics and addresses, and the API
and the console, which the first request for them loads.

It runs in a separate process, which ``processes.py`` starts next to the daemons. It reads the
processes' state from a ``Board`` and requests everything else from the daemons' HTTP ports. It has
no tasks, no store and no state. Invariants:

* A shard that is down or slow delays an answer by a bounded time, and the answer includes the other
  shards.
* Answers of shards are bounded in bytes. Concurrent requests share one request to the shards.
* The API is a client of the shards (``tickwheel/gateway.py``). The first request for the API
  imports it in a thread; requests for anything else do not wait for the import.
* Metrics are copied without parsing: samples of all shards are grouped by family, and each sample
  gets the label ``shard``.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import ssl
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import h11
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tickwheel.clock import Clock
from tickwheel.errors import NotFound, TickwheelError, Unauthorized
from tickwheel.model.policies import duration_ms
from tickwheel.server import daemon
from tickwheel.server.access.logins import Entrance
from tickwheel.server.fleet.board import State, how_ended
from tickwheel.server.http.app import NO_API, Http, refusal
from tickwheel.server.logs import Log, configure, log_event
from tickwheel.server.metrics import catalogue
from tickwheel.server.metrics.exposition import OPENMETRICS_TYPE, TEXT_TYPE, Family, lines
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.settings import local_host, split_address

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tickwheel.server.fleet.board import Board, ProcessState
    from tickwheel.server.settings import Settings

READY_S: Final = 0.8
"""Seconds to wait for a shard's ``/readyz``; probes usually wait one second."""
METRICS_S: Final = 3.0
"""Seconds to wait for a shard's ``/metrics``; Prometheus waits ten by default."""
READY_BYTES_MAX: Final = 64 * 1024
METRICS_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum bytes of all shards' metrics, divided equally between the shards."""
CONNECTIONS_MAX: Final = 256
READ_BYTES: Final = 256 * 1024
GATEWAY: Final = "tickwheel.gateway"
"""Module of the API. It is imported on demand, because it loads both the client and the daemon."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tickwheel: shards</title>
<link rel="icon" href="data:,">
</head>
<body>
<h1>Shards</h1>
<p><a href="/console/">Console of all shards</a></p>
<ul>
{shards}
</ul>
</body>
</html>
"""
P = ParamSpec("P")
T = TypeVar("T")


def run(
    settings: Settings,
    shards: list[Settings],
    board: Board,
    on_start: Callable[[], None],
    local_shards: Callable[[], Sequence[int]] | None = None,
    http_of: Callable[[int], str] | None = None,
) -> int:
    """Serve all shards at ``settings.http`` until SIGTERM or SIGINT, and return the exit code.
    ``shards`` are the settings of the daemons. ``on_start`` is called when the server listens. On a
    node, ``local_shards`` returns the shards that have a daemon here, and ``http_of`` returns the
    URL of a shard's HTTP server on any node, or "" if it is unknown."""
    log = configure(settings.log_format, settings.log_level, settings.node)
    daemon.use_one_arena()
    changes = {
        # Each shard gets a connection for readiness, and one for each of the two metrics formats.
        "connections_max": 3 * len(shards),
        "http_connections_max": min(settings.http_connections_max, CONNECTIONS_MAX),
    }
    own = daemon.within_file_limit(settings.model_copy(update=changes), log)
    # The API announces the daemons' limit of connections.
    own = own.model_copy(update={"connections_max": settings.connections_max})
    with asyncio.Runner() as runner:
        server = AllShardsServer(own, shards, board, log, local_shards, http_of)
        return runner.run(_serve(server, log, on_start))


async def _serve(server: AllShardsServer, log: Log, on_start: Callable[[], None]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(daemon.LoopErrors(log, loop.time))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    code = 0
    try:
        await server.start()
        on_start()
        await stopping.wait()
    except (TickwheelError, OSError) as error:
        log.error("failed", detail=daemon.explain(error))
        code = 1
    await server.stop()
    return code


class NoAnswer(Exception):
    """A shard did not answer correctly or in time. The message tells the cause."""


class ShardState(NamedTuple):
    """The state of a shard at the time of a request."""

    shard: int
    process: ProcessState
    is_ready: bool
    state: str
    """The status of ``/readyz``, or ``down``, ``starting`` or ``silent``."""
    reason: str | None

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return f"shard {self.shard}: {self.state}{reason}"


class AllShardsServer:
    """The server. Call ``start`` once; ``stop`` works even if it was not started."""

    def __init__(
        self,
        settings: Settings,
        shards: list[Settings],
        board: Board,
        log: Log,
        local_shards: Callable[[], Sequence[int]] | None = None,
        http_of: Callable[[int], str] | None = None,
    ) -> None:
        self._settings = settings
        self._current_http_of = http_of or (
            lambda shard: self._http_of(shard) if shard < board.count else ""
        )
        self._local_shards = local_shards or (lambda: range(board.count))
        self._is_node = local_shards is not None
        # On a node, a standby is a normal state of a daemon.
        self._ready_path = "/readyz" if local_shards is None else "/readyz?standby=ok"
        self._shards = shards
        self._board = board
        self._log = log
        self._observed = Observed()
        self._clock = clock = Clock(duration_ms(settings.clock_hold_over_s))
        self._entrance = Entrance(settings, clock, self._on_event, self._observed, ("http",))
        self._logins = self._entrance.logins
        # Certificates are not verified: requests carry no secret and go to daemons on this machine.
        self._trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._trust.check_hostname = False
        self._trust.verify_mode = ssl.CERT_NONE
        self._states = SharedCalls(self._states_of_all)
        self._scrape = SharedCalls(self._collect)
        self._without_metrics: set[int] = set()
        """Shards whose metrics are missing, which was logged."""
        self._http: Http | None = None
        self._make_api = SharedCalls(self._import_api)
        self._api: Any = None
        """The API of all shards, a ``Gateway``; None until the first request for it."""

    async def start(self) -> None:
        """Begin to listen. Raise OSError if the address is in use, or BadRequest for an invalid
        file of tokens or certificates."""
        settings = self._settings
        await self._entrance.start()
        self._entrance.watch(
            lambda: () if self._api is None else self._api.active_principals,
            lambda: None if self._api is None else self._api.dismiss(),
        )
        host, port = split_address(str(settings.http), "http_all")
        http = Http(
            host,
            port,
            self.readiness,
            self.metrics,
            connections_max=settings.http_connections_max,
            idle_s=settings.http_idle_timeout_s,
            keep_alive_s=settings.heartbeat_interval_s,
            routes=self._routes(),
            other_paths=self._serve_api,
            tls=self._entrance.tls_server if settings.speaks_tls("http") else None,
            names=None if self._logins.are_needed else settings.http_names,
        )
        await http.start()
        self._http = http

    async def stop(self) -> None:
        if self._api is not None:
            await self._api.stop()
        if self._http is not None:
            await self._http.stop()
        await self._entrance.stop()

    def _on_event(self, event: str, text: str) -> None:
        self._observed.note_event(event)
        log_event(self._log, event, text)

    # --- readiness -------------------------------------------------------------------------------

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether all shards are ready, and details with the reason for each that is not."""
        states = await self._states()
        not_ready = [str(state) for state in states if not state.is_ready]
        details: dict[str, Any] = {"status": "not_ready" if not_ready else "ready"}
        if not_ready:
            details["reason"] = "; ".join(not_ready)
        details["shards"] = {str(state.shard): state.state for state in states}
        return not not_ready, details

    async def _states_of_all(self) -> list[ShardState]:
        return await asyncio.gather(*map(self._state_of, self._local_shards()))

    async def _state_of(self, shard: int) -> ShardState:
        process = self._board.read(shard)
        if not process.pid:
            reason = f"{how_ended(process.ended)}; restarted {process.restarts} times"
            return ShardState(shard, process, False, "down", reason)
        try:
            status, body = await self._get(shard, self._ready_path, "*/*", READY_S, READY_BYTES_MAX)
            answer = json.loads(body)
            return ShardState(shard, process, status == 200, answer["status"], answer.get("reason"))
        except NoAnswer as error:
            state = "starting" if process.state is State.STARTING else "silent"
            return ShardState(shard, process, False, state, str(error))
        except (ValueError, LookupError, TypeError, AttributeError):
            return ShardState(shard, process, False, "silent", "the answer of /readyz is not valid")

    async def _get(
        self, shard: int, path: str, accept: str, timeout_s: float, bytes_max: int
    ) -> tuple[int, bytes]:
        """Send a GET to a shard and return the status and the body. Raise NoAnswer on failure."""
        settings = self._shards[shard]
        host, port = split_address(str(settings.http), "http")
        tls = self._trust if settings.speaks_tls("http") else None
        try:
            async with asyncio.timeout(timeout_s):
                return await fetch(local_host(host), port, path, accept, bytes_max, tls)
        except TimeoutError:
            raise NoAnswer(f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise NoAnswer(error.strerror or str(error)) from None
        except h11.RemoteProtocolError as error:
            raise NoAnswer(f"the answer is not valid HTTP: {error}") from None

    # --- metrics ---------------------------------------------------------------------------------

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics of all shards and their content type."""
        is_openmetrics = "application/openmetrics-text" in accept
        return await self._scrape(is_openmetrics), OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE

    async def _collect(self, is_openmetrics: bool) -> bytes:
        numbers = self._local_shards()
        accept = OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE
        texts = await asyncio.gather(*(self._metrics_of(shard, accept) for shard in numbers))
        families: dict[bytes, list[bytes]] = {}
        for shard, text in zip(numbers, texts, strict=True):
            if text is not None:
                add_shard_metrics(families, shard, text)
                await asyncio.sleep(0)  # so that health checks can run
        own_text = "".join(
            chunk
            for family in self._own_metrics()
            for chunk in lines(family, is_openmetrics=is_openmetrics)
        )
        add_shard_metrics(families, "http", own_text.encode())
        labels = [f'{{shard="{shard}"}}' for shard in numbers]
        keys = [(str(shard),) for shard in numbers]
        ups = [int(text is not None) for text in texts]
        restarts = [self._board.read(shard).restarts for shard in numbers]
        own = []
        for (name, about), values in zip(catalogue.SHARD_METRICS, (ups, restarts), strict=True):
            kind = catalogue.kind_of(name)
            family = Family(name, kind, about, ("shard",), keys, labels, values)
            own += [chunk.encode() for chunk in lines(family, is_openmetrics=is_openmetrics)]
        parts = [part for family in families.values() for part in family]
        return b"".join([*own, *parts, *([_EOF] if is_openmetrics else [])])

    def _own_metrics(self) -> Iterator[Family]:
        """Yield the metrics of this process's own connections, logins and requests."""
        for name, about, counter in catalogue.CONNECTION_METRICS:
            values = [float(getattr(self._observed, counter))]
            yield Family(name, catalogue.kind_of(name), about, (), [()], [""], values)

    async def _metrics_of(self, shard: int, accept: str) -> bytes | None:
        """Return the metrics of a shard, or None if it is down or too slow."""
        if not self._board.read(shard).pid:
            return None
        bytes_max = METRICS_BYTES_MAX // self._board.count
        try:
            status, body = await self._get(shard, "/metrics", accept, METRICS_S, bytes_max)
            if status != 200:
                raise NoAnswer(f"/metrics answered with status {status}")
        except NoAnswer as error:
            if shard not in self._without_metrics:
                self._without_metrics.add(shard)
                self._log.warning("shard_without_metrics", shard=shard, detail=str(error))
            return None
        self._without_metrics.discard(shard)
        return body

    # --- the API and the console -----------------------------------------------------------------

    async def _serve_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            api = self._api or await self._make_api()
        except ImportError:  # the extra is not installed
            await refusal(NotFound(NO_API), "Not found")(scope, receive, send)
            return
        await api(scope, receive, send)

    async def _import_api(self) -> Any:
        module = await asyncio.to_thread(import_module, GATEWAY)
        # On a node, the shared address leads to all shards; elsewhere each daemon knows them.
        daemons = [self._settings] if self._is_node else self._shards
        api = module.Gateway(
            self._settings, daemons, self._current_http_of, self._logins, self._clock,
            self._observed, self._on_event,
        )  # fmt: skip
        api.start()
        self._api = api
        return api

    # --- addresses of the shards -----------------------------------------------------------------

    def _routes(self) -> list[BaseRoute]:
        async def shards(request: Request) -> Response:
            try:
                state = request.scope["state"]
                self._logins.authenticate(_token(request), state["certificate"], state["address"])
            except Unauthorized as error:
                waited = asyncio.Event()
                self._logins.answer_later(waited.set)
                await waited.wait()
                answer = refusal(error, "Unauthorized")
                answer.headers["www-authenticate"] = 'Bearer realm="tickwheel"'
                return answer
            return JSONResponse({"shards": list(map(self._fields, await self._states()))})

        async def page(request: Request) -> Response:
            items = [
                f'<li><a href="{escape(self._http_of(shard))}/console/">shard {shard}</a>'
                f": {escape(state)}</li>"
                for shard, _, _, state, _ in await self._states()
            ]
            return HTMLResponse(_PAGE.format(shards="\n".join(items)), headers=_HEADERS)

        return [Route("/v1/shards", shards), Route("/", page)]

    def _fields(self, state: ShardState) -> dict[str, Any]:
        shard, process = state.shard, state.process
        return {
            "shard": shard,
            "url": self._shards[shard].advertise,
            "http": self._http_of(shard),
            "pid": process.pid or None,
            "state": state.state,
            "reason": state.reason,
            "since_ms": process.since_ms,
            "restarts": process.restarts,
        }

    def _http_of(self, shard: int) -> str:
        """Return the URL at which other machines find a shard's HTTP server."""
        settings = self._shards[shard]
        return settings.http_for_others(str(settings.http_url))


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


# --- helpers -------------------------------------------------------------------------------------


class SharedCalls(Generic[P, T]):
    """Wraps an async function. Concurrent calls with the same arguments share one execution."""

    def __init__(self, work: Callable[P, Awaitable[T]]) -> None:
        self._work = work
        self._running: dict[Hashable, asyncio.Task[T]] = {}

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        task = self._running.get(args)
        if task is None:

            async def work() -> T:
                return await self._work(*args, **kwargs)

            task = self._running[args] = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._running.pop(args))
        return await asyncio.shield(task)  # cancelling one caller must not cancel the others


async def fetch(
    host: str,
    port: int,
    path: str,
    accept: str,
    bytes_max: int,
    tls: ssl.SSLContext | None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Send a GET, or a POST of the JSON ``body``, and return the status and body of the answer.
    Raise OSError, h11.RemoteProtocolError, or NoAnswer if the answer has more than ``bytes_max``
    bytes. The caller must set a timeout."""
    reader, writer = await asyncio.open_connection(host, port, ssl=tls, limit=READ_BYTES)
    try:
        conn = h11.Connection(h11.CLIENT)
        name = f"[{host}]" if ":" in host else host
        headers = [("host", f"{name}:{port}"), ("accept", accept), ("connection", "close")]
        method = "GET" if body is None else "POST"
        if body is not None:
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        writer.write(conn.send(h11.Request(method=method, target=path, headers=headers)) or b"")
        if body is not None:
            writer.write(conn.send(h11.Data(data=body)) or b"")
        status, parts, size = 0, [], 0
        while True:
            event = conn.next_event()
            if event is h11.NEED_DATA:
                conn.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > bytes_max:
                    raise NoAnswer(f"the answer to {path} has more than {bytes_max} bytes")
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return status, b"".join(parts)
    finally:
        writer.transport.abort()


_EOF = b"# EOF\n"
_FAMILY = re.compile(rb"^(?=# HELP )", re.MULTILINE)
_HEAD = re.compile(rb"# HELP (\S+)[^\n]*\n(?:#[^\n]*\n)*")
_LABELLED = re.compile(rb"^([a-zA-Z_:][\w:]*)\{", re.MULTILINE)
_PLAIN = re.compile(rb"^([a-zA-Z_:][\w:]*) ", re.MULTILINE)


def add_shard_metrics(families: dict[bytes, list[bytes]], shard: int | str, text: bytes) -> None:
    """Add the metrics of a shard to ``families``, which contains, by name, the head of each family
    followed by the samples of one shard after another. Each sample gets ``shard``, a number or a
    name, as its first label.

    ``a 1`` becomes ``a{shard="0"} 1``; ``a{b="c"} 1`` becomes ``a{shard="0",b="c"} 1``. Other lines
    do not occur, because line breaks in labels and descriptions are escaped.
    """
    label = f'shard="{shard}"'.encode()
    text = _LABELLED.sub(rb"\1{" + label + b",", text.removesuffix(_EOF))
    text = _PLAIN.sub(rb"\1{" + label + b"} ", text)
    for family in _FAMILY.split(text):
        head = _HEAD.match(family)
        if head is not None:
            parts = families.setdefault(head[1], [])
            parts.append(family[head.end() :] if parts else family)
