"""The HTTP API of a daemon, active or standby: an ASGI application under ``/v1``.

For each request, it finds the route, authenticates the caller, reads the body within its limits,
calls the handler, and answers an error with a problem document. Invariants:

* A request is checked in this order: path, token, origin, body. The body of an unauthenticated
  request is never read.
* Every request gets an answer, never a traceback. An unexpected error is answered as ``internal``
  and logged; it ends the daemon only if it occurs in an operation.
* Leases of an answered pull outlive its connection. Leases of an unanswered pull, and of a stream,
  end soon after the connection closes, as on TCP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tickwheel.errors import (
    Draining,
    Forbidden,
    NotActive,
    SlowReader,
    TickwheelError,
    TooManyConnections,
    Unauthorized,
)
from tickwheel.model.policies import duration_ms
from tickwheel.server.access.logins import LINK_PREFIX, REVOKED, Logins, Sessions, cookie_of
from tickwheel.server.http import types
from tickwheel.server.http.call import (
    Body,
    Call,
    Client,
    ClientGone,
    Common,
    Message,
    Receive,
    Room,
    Route,
    Send,
    Streams,
    Turns,
    problem,
    single_headers,
)
from tickwheel.server.http.exchange import Exchange, ShardExchange
from tickwheel.server.http.routes import LINKS_PATH, ROUTES, SESSIONS_PATH, Router, allowed_by
from tickwheel.server.http.types import Reader
from tickwheel.server.logs import bind_trace
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.shard.callers import NOBODY
from tickwheel.server.shard.guard import Pipeline

if TYPE_CHECKING:
    from tickwheel.server.access.logins import Session
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Principal
    from tickwheel.server.shard.operations import Operations, StandbyOperations

Scope = Message
CONSOLE_HEADER = b"tickwheel-console"
"""Header required with a cookie, because pages of other sites cannot send it."""
KEEP_ALIVE_S_MAX = 15.0
AT_A_TIME = 8
"""Maximum requests begun and answers written in one turn of the event loop."""
_BEARER = b"bearer "
_LOGIN = ("POST", SESSIONS_PATH)
_LOGIN_PATHS = (SESSIONS_PATH, LINKS_PATH)
"""Paths that refuse sessions, because a session must not begin another, which would outlive it."""
SESSION_CHECK_S = 1.0
"""Seconds between two checks whether the sessions of requests in progress have ended."""
SESSION_OVER = "the session has ended: log in again"
_OWN_SITE = (b"same-origin", b"none")
"""Values of Sec-Fetch-Site for a page of this daemon and for an address that the user typed."""


class Api:
    """The API of a daemon. Call ``serve`` when the daemon begins to lead, and ``stand_by`` when it
    stops leading."""

    def __init__(
        self,
        settings: Settings,
        standby: StandbyOperations,
        logins: Logins,
        observed: Observed | None = None,
    ) -> None:
        """Requests are counted in ``observed``."""
        self._settings = settings
        self._observed = observed or Observed()
        self._standby = standby
        self._logins = logins
        self._begin: Callable[[Principal, str], Exchange] | None = None
        """Creates the exchange of a request; None if the daemon is not active."""
        self._draining = False
        self._exchanges: dict[Exchange, str | None] = {}
        """Each request in progress, with the text of its cookie if it belongs to a session."""
        self._session_check: asyncio.TimerHandle | None = None
        self._turns = Turns(AT_A_TIME)
        self._room = Room(settings.http_bodies_bytes_max)
        self._body_limits = settings.http_body_bytes, settings.http_body_timeout_s
        self._sessions = Sessions(logins, standby.clock)
        self.wait_ms_max = duration_ms(settings.http_wait_max_s)
        self._common = Common(
            self._turns,
            Streams(),
            self._sessions,
            Reader(settings.delay_levels_ms),
            min(KEEP_ALIVE_S_MAX, settings.heartbeat_interval_s),
            self.wait_ms_max,
        )
        self._router = Router(ROUTES)

    # --- roles -----------------------------------------------------------------------------------

    def serve(self, operations: Operations) -> None:
        """Serve requests as the active daemon."""
        verbs_of = Pipeline(operations, self._logins.note_forbidden, self._logins.audit).of
        self.serve_with(
            lambda principal, address: ShardExchange(
                operations, verbs_of(principal), principal, address
            )
        )

    def serve_with(self, begin: Callable[[Principal, str], Exchange]) -> None:
        """Serve requests with exchanges that ``begin`` creates for a principal and address."""
        self._begin = begin

    def stand_by(self) -> None:
        """Answer requests as a standby. Requests in progress fail: those that the shard executes
        with an unknown outcome, the others with NotActive."""
        self._begin = None
        self._end_all(NotActive("this daemon is no longer active"))

    def drain(self) -> None:
        """Refuse new requests and end those that only wait for tasks. Requests that wait for the
        store are still answered."""
        self._draining = True
        error = Draining("the daemon is shutting down")
        for exchange in list(self._exchanges):
            if exchange.only_waits:
                exchange.end(error)

    def stop(self) -> None:
        """End all requests in progress, because the shard no longer answers."""
        self._begin = None
        self._end_all(Draining("the daemon is shutting down"))

    def dismiss(self) -> None:
        """End the requests, such as streams and uploads, of principals that are no longer valid."""
        error, is_valid = Unauthorized(REVOKED), self._logins.is_valid
        self._end_all(error, lambda exchange: not is_valid(exchange.caller.principal))

    @property
    def principals(self) -> list[Principal]:
        """Principals with requests in progress."""
        return [exchange.caller.principal for exchange in self._exchanges]

    def _check_sessions(self) -> None:
        """End the requests of sessions that have ended, until no request belongs to a session."""
        self._session_check, texts, find = None, self._exchanges, self._sessions.find

        def is_over(exchange: Exchange) -> bool:
            return texts[exchange] is not None and find(texts[exchange]) is None

        self._end_all(Unauthorized(SESSION_OVER), is_over)
        if any(texts.values()):
            self._check_sessions_later()

    def _check_sessions_later(self) -> None:
        if self._session_check is None:
            loop = asyncio.get_running_loop()
            self._session_check = loop.call_later(SESSION_CHECK_S, self._check_sessions)

    def _end_all(
        self, error: TickwheelError, selects: Callable[[Exchange], bool] = lambda exchange: True
    ) -> None:
        for exchange in filter(selects, list(self._exchanges)):
            exchange.end(error)

    # --- a request -------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope["state"], receive, send)
        self._observed.http_under_way += 1
        try:
            if not self._turns.try_take():
                await self._turns.wait_for_turn()
            parents = [value for name, value in scope["headers"] if name == b"traceparent"]
            # W3C Trace Context: a repeated traceparent is ignored.
            with bind_trace(parents[0].decode("latin-1") if len(parents) == 1 else None):
                await self._answer(scope, receive, client)
        finally:
            self._observed.http_under_way -= 1
            self._count(client.status)

    def _count(self, status: int) -> None:
        observed = self._observed
        observed.http_requests += status > 0  # 0: the client disconnected first
        if status >= 400:
            observed.http_client_errors += status <= 499
            observed.http_server_errors += status >= 500

    async def _answer(self, scope: Scope, receive: Receive, client: Client) -> None:
        connection = scope["state"]
        address: str = connection["address"]
        try:
            if connection.get("is_extra"):
                raise TooManyConnections(
                    f"all {self._settings.http_connections_max} connections are busy"
                    " (http_connections_max)"
                )
            headers = single_headers(scope["headers"])
            route, path_values = self._router.find(scope["method"], scope["raw_path"])
            cookie_text, peer = _session_text(route, headers), connection.get("certificate")
            session = self._sessions.find(cookie_text)
            principal = self.principal_of(route, headers, session, peer, address)
            _check_origin(headers)
            exchange = self._new_exchange(route, principal, address)
        except Unauthorized as error:
            if (scope["method"], scope["path"]) == _LOGIN:
                self._logins.note_failed_console_login(address, error)
            await self._refuse_slowly(client, error)
            return
        except TickwheelError as error:
            await self._refuse(client, error)
            return
        self._exchanges[exchange] = cookie_text if session is not None else None
        if session is not None:
            self._check_sessions_later()
        body: Body | None = None
        call: Call | None = None
        try:
            self._logins.quotas.enter(exchange.caller)
            has_arrived = connection["is_complete"]
            body = Body(receive, headers, self._room, *self._body_limits, has_arrived=has_arrived)
            call = Call(self._common, route, exchange, path_values, headers, scope, body, client)
            if route.query is types.NoQuery and scope["query_string"]:
                call.query(types.NoQuery)
            if scope["method"] == "HEAD" and route.streams:
                # Answer only the head: the stream itself would lease tasks or never end.
                await call.reply(200, [(b"content-type", route.streams[0].encode())], b"")
            else:
                await route.handler(call)
            self._finish_exchange(exchange, client)
        except TickwheelError as error:
            if call is not None and not call.is_readable and not isinstance(error, ClientGone):
                for verb in route.operations:
                    exchange.unreadable(verb, error)
            exchange.close()
            await self._fail(client, error)
        except Exception as error:
            exchange.close()
            request_text = f"{scope['method']} {route.path} from {address}"
            await self._fail(client, exchange.survive(request_text, error))
        except BaseException:
            exchange.close()
            raise
        finally:
            self._exchanges.pop(exchange, None)
            self._logins.quotas.leave(exchange.caller)
            client.stop()
            if body is not None:
                body.close()

    def _new_exchange(self, route: Route, principal: Principal, address: str) -> Exchange:
        if self._draining:
            raise Draining("the daemon is shutting down")
        if self._begin is not None:
            return self._begin(principal, address)
        if route.standby:
            return ShardExchange(self._standby, self._standby.verbs, principal, address)
        raise self._standby.refusal()

    def principal_of(
        self, route: Route, headers: dict[bytes, bytes], session: Session | None, peer: Any,
        address: str,
    ) -> Principal:  # fmt: skip
        """Return the caller, authenticated by token, certificate, login link or browser session.
        Raise Unauthorized if none of these is valid."""
        if not route.public:
            self._logins.check_certificate(peer)
        authorization = headers.get(b"authorization", b"")
        if authorization[: len(_BEARER)].lower() == _BEARER:
            token = authorization[len(_BEARER) :].strip().decode("utf-8", "replace")
            if token.startswith(LINK_PREFIX) and (route.method, route.path) == _LOGIN:
                _check_origin(headers)  # before it redeems the link, which works only once
                return self._sessions.redeem(token)
            return self._logins.authenticate(token, peer, address)
        if session is not None:
            return session.principal
        if route.public and self._sessions.are_needed and not peer:
            return NOBODY
        try:
            return self._logins.authenticate(None, peer)
        except Unauthorized:
            if route.public:  # no rule names the certificate, but a login can follow
                return NOBODY
            raise

    @staticmethod
    def _finish_exchange(exchange: Exchange, client: Client) -> None:
        if client.is_gone:
            exchange.close("its stream was interrupted")
        else:
            exchange.finish()

    async def _fail(self, client: Client, error: TickwheelError) -> None:
        if client.status or isinstance(error, (ClientGone, SlowReader)):
            # A partial answer must not look complete.
            await client.abort()
        else:
            await self._refuse(client, error)

    async def _refuse_slowly(self, client: Client, error: Unauthorized) -> None:
        waited = asyncio.Event()
        self._logins.answer_later(waited.set)
        await waited.wait()
        await self._refuse(client, error)

    async def _refuse(self, client: Client, error: TickwheelError) -> None:
        is_standby = isinstance(error, NotActive)
        active, active_http = self._standby.whereabouts() if is_standby else (None, None)
        status, headers, body = problem(error, active=active, active_http=active_http)
        allowed = allowed_by(error)
        if allowed is not None:
            headers.append((b"allow", allowed))
        # Keep the connection after 413: closing it while the client still sends would reset it
        # before the client reads the answer. The rest of the body is dropped, and the connection
        # is closed soon.
        if status in (401, 408, 503) or error.closes_connection:
            headers.append((b"connection", b"close"))
        await client.answer(status, headers, body)


def _session_text(route: Route, headers: dict[bytes, bytes]) -> str | None:
    """Return the text of the cookie with which a request without a token is authenticated, or
    None."""
    if not (route.page or CONSOLE_HEADER in headers) or route.path in _LOGIN_PATHS:
        return None
    has_token = headers.get(b"authorization", b"")[: len(_BEARER)].lower() == _BEARER
    return None if has_token else cookie_of(headers)


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """Raise Forbidden if a page of another site sent the request. On a daemon without tokens,
    nothing else prevents such a page from using its visitor's daemon. A request for an image has no
    Origin, but it has Sec-Fetch-Site."""
    if headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
        raise Forbidden("requests from pages of other sites are refused (Sec-Fetch-Site)")
    origin = headers.get(b"origin")
    if origin is None:
        return
    try:
        origin_host = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        origin_host = ""
    if not origin_host or origin_host.encode("latin-1") != headers.get(b"host"):
        raise Forbidden("requests from pages of other sites are refused (Origin differs from Host)")
