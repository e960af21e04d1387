"""The HTTP API of all shards, in the process that serves HTTP for them
(``server/http/all_shards.py``).

``Gateway`` is an ASGI application with a daemon's API, OpenAPI document and console. Its handlers
use an ``AllShardsExchange`` instead of the exchange with one shard. The gateway executes nothing
itself: a ``GatewayClient`` selects the shards for a request and combines their
answers. Invariants:

* This process has no rights. It sends the token of its caller, and the daemons check the caller's
  rights. It keeps tokens only in memory.
* Each stream has a separate client, whose connections close when the stream ends. The daemons
  then see that its consumer has gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, urlsplit

from h11 import RemoteProtocolError
from starlette.applications import Starlette

from tickwheel.api.groups import MadeGroup
from tickwheel.api.verbs import VERBS
from tickwheel.client.connection import Trust
from tickwheel.client.subscription import SubscribeOptions
from tickwheel.client.tasks import FRAME_BYTES
from tickwheel.client.wire import WireClient
from tickwheel.errors import (
    BadRequest,
    Forbidden,
    LimitExceeded,
    NotFound,
    Overloaded,
    TickwheelError,
    Unreachable,
    from_wire,
)
from tickwheel.model.values import INTEGER_MAX, SHARD_BITS
from tickwheel.server import checks
from tickwheel.server.access.logins import LINK_PREFIX
from tickwheel.server.http.all_shards import NoAnswer, fetch
from tickwheel.server.http.api import Api
from tickwheel.server.http.app import API_PREFIX
from tickwheel.server.http.call import as_json
from tickwheel.server.http.deliveries import DeliveredTask
from tickwheel.server.http.exchange import Exchange, settle_fields
from tickwheel.server.http.pages import pages
from tickwheel.server.settings import local_host, split_address
from tickwheel.server.shard.callers import ANONYMOUS, NOBODY, Caller, NullSink
from tickwheel.server.shard.guard import AuditStage
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.shard.overview import report_page
from tickwheel.webhooks import read_token

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tickwheel.api.shapes import Request
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.subscription import Subscription
    from tickwheel.clock import Clock
    from tickwheel.engine.topics import DeliverySink
    from tickwheel.server.access.logins import Logins
    from tickwheel.server.http.call import Route
    from tickwheel.server.http.exchange import Answer, DeliveryRequest, Receipt, Render, RenderPull
    from tickwheel.server.http.types import RequestIdentity
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import OnEvent, Principal

CLIENTS_MAX: Final = 256
"""Maximum clients with a request in progress, one for each token. Clients of streams are not
counted."""
IDLE_MAX: Final = 64
"""Maximum idle clients that stay open."""
STREAM_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of buffered bodies at which the shards stop sending to a stream."""
IDLE_S: Final = 60.0
"""Seconds after its last request when an unused client is closed."""
CHECK_S: Final = 5.0
"""Seconds between searches for idle clients."""
LOOK_S: Final = 1.0
"""Seconds between looks whether a paused stream has ended."""
ANSWER_S: Final = 5.0
"""Maximum seconds to wait for the answer of a shard's HTTP server."""
ANSWER_BYTES_MAX: Final = 64 * 1024
NAME: Final = "http of all shards"
USE_SHARDS: Final = "send the request to a shard; /v1/shards lists their addresses"


# --- a client of all shards ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StreamOptions(SubscribeOptions):
    """Options of a stream's subscription, in wire form."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, number: int, prefetch: int) -> tuple[Any, ...]:
        return number, self.topic, self.group or None, prefetch, self.options


class GatewayClient(WireClient):
    """A client for one token."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(url, token=token, name=NAME, tls=tls)
        self.requests = 0
        """Requests in progress."""
        self.idle_since_s = 0.0
        """Time, on the loop's clock, of the last request."""

    def checked_size(self, tasks: tuple[Any, ...]) -> int:
        """Return the maximum bytes that the tasks take in a frame. Raise BadRequest, DueTooFar or
        LimitExceeded."""
        limits, size = self.limits, super().checked_size(tasks)
        for index, task in enumerate(tasks):
            if type(task[2]) is int and task[2] > INTEGER_MAX:  # a frame cannot contain it
                checks.due(task[2], None, f"tasks[{index}]", 0, limits)
        if not checks.array(tasks, "tasks", limits.tasks_per_frame_max):
            raise BadRequest("tasks has 0 elements; the minimum is 1")
        if size + FRAME_BYTES > limits.frame_bytes_max:
            raise LimitExceeded(
                f"the tasks take up to {size} bytes; the limit is {limits.frame_bytes_max}"
                " (frame_bytes_max)"
            )
        return size


# --- a request -----------------------------------------------------------------------------------


class AllShardsExchange(Exchange):
    """An exchange with all shards, through the client of the caller's principal."""

    def __init__(self, gateway: Gateway, principal: Principal, address: str) -> None:
        super().__init__(Caller(NullSink(), principal=principal, address=address))
        self._gateway = gateway
        self.settings, self.limits = gateway.settings, gateway.limits
        self.clock = gateway.clock
        self._work: dict[Answer, asyncio.Task[None]] = {}
        self._pulls = 0
        """Number of pulls that wait for a delivery."""
        self._pulled: list[Delivery] = []
        """The deliveries of a pull whose answer has not been sent."""
        self._is_reading = asyncio.Event()
        """Set while the client of the stream keeps reading."""
        self._is_reading.set()
        self._unsettled: dict[int, float] = {}
        """Id → earliest end of the lease, on the loop's clock, of each delivery of the stream that
        its consumer has neither settled nor extended, the oldest first."""
        self._heard = asyncio.Event()
        """Set when the consumer settles or extends a delivery."""

    def unanswered(self) -> Sequence[Answer]:
        return list(self._work)

    # --- requests of handlers --------------------------------------------------------------------

    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        def work() -> Awaitable[Any]:
            answer, audit = self._answer_of(verb, request), self._gateway.audit
            return answer if audit is None else audit.relayed(self.caller, verb, request, answer)

        return self._begin(work, render)

    async def _answer_of(self, verb: str, request: Request) -> Any:
        if verb == "settle_callback":
            return await self._settle_callback(request)
        async with self._gateway.client_of(self.caller.principal) as client:
            if verb == "status":
                return await client.fetch_status()  # includes the shards that do not answer
            if verb == "report":
                return await self._report(client)
            return await client.execute(VERBS[verb], request)

    async def _report(self, client: GatewayClient) -> dict[str, bytes]:
        """Return the page of the last report, which is a local file. Raise Forbidden unless the
        caller may read all topics."""
        folder = self.settings.report_dir
        if folder is None:
            raise NotFound("there is no report: the setting report_dir is not set")
        verb = VERBS["load"]  # requires the same right
        await client.execute(verb, verb.request_type.checked({"steps": 1}, self.limits))
        return {"page": await asyncio.to_thread(report_page, Path(folder) / "report.html")}

    async def _settle_callback(self, request: Request) -> Any:
        """Forward a callback to the shard of its task. Its token proves that it is genuine, so it
        needs neither a client nor a right."""
        values = request.values()
        token = values.pop("token")
        shard = read_token(token)[0].id & ((1 << SHARD_BITS) - 1)
        return await self._gateway.post(shard, f"/v1/callbacks/{quote(token)}", values)

    def enqueue(self, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put(tasks))

    def enqueue_each(self, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put_each(tasks))

    def enqueue_once(self, identity: RequestIdentity, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put_once(*identity, tasks))

    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        return self._ask(lambda client: client.prepare(name, group, part, tasks, options))

    def pull(self, request: DeliveryRequest, wait_ms: int, render: RenderPull) -> Answer:
        checks.integer(request.limit, "max", 1, self.limits.pull_max)
        topic = checks.name(request.topic, "topic")
        group = checks.group_name(request.group)
        options = {key: value for key, value in request.options.items() if value is not None}
        self._lease_ms(options)
        options["untied"] = True  # the consumer may live longer than this process

        async def take(client: GatewayClient) -> bytes:
            new_groups: list[MadeGroup] = []
            self._pulls += 1
            try:
                deliveries = await client.take(
                    topic, group, request.limit, wait_ms, options, new_groups.append
                )
            finally:
                self._pulls -= 1
            self._pulled = deliveries
            new_group = MadeGroup.joined(new_groups)
            return render(
                [
                    (_delivered_task(delivery), topic, group, delivery.epoch, delivery.delivered_ms)
                    for delivery in deliveries
                ],
                None if new_group is None else dict(new_group.raw),
            )

        return self._ask(take)

    def _lease_ms(self, options: Mapping[str, Any]) -> int | None:
        """Return the checked lease of a pull or stream; None if the options have none."""
        lease_ms = options.get("lease_ms")
        return None if lease_ms is None else checks.lease(lease_ms, self.limits)

    def settle(self, verb: str, receipts: Sequence[Receipt], arguments: tuple[Any, ...]) -> Answer:
        if verb == "extend":
            checks.lease(arguments[-1], self.limits)

        def fields_of(indexes: Sequence[int]) -> tuple[Any, ...]:
            return settle_fields(verb, [receipts[index] for index in indexes], arguments)

        ids = [receipt.id for receipt in receipts]
        return self._ask(lambda client: client.settle(verb, ids, fields_of))

    # --- streams ---------------------------------------------------------------------------------

    def subscribe(self, request: DeliveryRequest, sink: DeliverySink) -> Answer:
        checks.integer(request.limit, "prefetch", 0, self.limits.prefetch_max)
        options = {key: value for key, value in request.options.items() if value is not None}
        is_broadcast = bool(options.get("broadcast"))
        stream_options = _StreamOptions(
            checks.name(request.topic, "topic"),
            (request.group or "") if is_broadcast else checks.group_name(request.group),
            None if is_broadcast else self._lease_ms(options),
            ack=options["ack"], broadcast=is_broadcast, options=options,
        )  # fmt: skip
        subscribed = self._new_answer()
        client = self._gateway.new_client(self.caller.principal)
        work = self._stream(subscribed, client, stream_options, request.limit, sink)
        return self._keep(subscribed, work)

    async def _stream(
        self,
        subscribed: Answer,
        client: GatewayClient,
        options: _StreamOptions,
        credit: int,
        sink: DeliverySink,
    ) -> None:
        """Send deliveries of all shards to ``sink``, through the client of the stream."""
        try:
            await client.connect()
            subscription = client.new_subscription(options, credit, STREAM_BYTES_MAX)
            await subscription.start()
            new_group = subscription.new_group
            _complete(subscribed, {} if new_group is None else {"new_group": dict(new_group.raw)})
            async for batch in subscription.batches():
                if self._is_silent:
                    await self._pause_until_heard(subscription, batch, credit)
                    continue
                for delivery in batch:
                    if options.leased:
                        self._unsettled.pop(delivery.id, None)
                        self._unsettled[delivery.id] = delivery.lease_until_s
                    items = cast("Any", [_delivered_task(delivery)])
                    sink.deliver(delivery.epoch, delivery.delivered_ms, items)
                    await self._is_reading.wait()
        except Exception as error:
            failure = self._error_of(error)
            if subscribed.done():
                sink.ended(failure.code, failure.message)
            else:
                subscribed.set_exception(failure)
        finally:
            await client.close(0)  # without BYE, so the daemons end its leases soon

    @property
    def _is_silent(self) -> bool:
        """Whether a lease of the stream has ended since the last sign of life of its consumer."""
        return next(iter(self._unsettled.values()), inf) <= _now_s()

    async def _pause_until_heard(
        self, subscription: Subscription, unread: Sequence[Delivery], credit: int
    ) -> None:
        """Give deliveries back until the stream's consumer gives a sign of life. The shards cannot
        tell that it is silent, because the client answers their heartbeats."""
        self._heard.clear()
        with suppress(TickwheelError):  # the next connection requests as few
            await subscription.set_prefetch(0)
        releases = (delivery.release() for delivery in reversed(unread))
        await asyncio.gather(*releases, subscription.give_back(), return_exceptions=True)
        while not (self._heard.is_set() or subscription.closed):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), LOOK_S)
        with suppress(TickwheelError):
            await subscription.set_prefetch(credit)

    def pause(self) -> None:
        self._is_reading.clear()

    def resume(self) -> None:
        self._is_reading.set()

    # --- the work --------------------------------------------------------------------------------

    def _ask(self, work: Callable[[GatewayClient], Awaitable[Any]]) -> Answer:
        """Return a future of the result of ``work`` with the principal's client."""

        async def ask() -> Any:
            async with self._gateway.client_of(self.caller.principal) as client:
                return await work(client)

        return self._begin(ask)

    def _begin(self, work: Callable[[], Awaitable[Any]], render: Render | None = None) -> Answer:
        """Return a future of the result of ``work``, converted by ``render``."""
        answer = self._new_answer()

        async def end() -> None:
            try:
                result = await work()
                value = result if render is None else render(result)
            except Exception as error:
                value = self._error_of(error)
            _complete(answer, value)

        return self._keep(answer, end())

    def _error_of(self, error: Exception) -> TickwheelError:
        """Return the error for the client, and log it if it is unexpected."""
        if isinstance(error, TickwheelError):
            return error
        return self.survive(f"a request over HTTP from {self.caller.address}", error)

    def _new_answer(self) -> Answer:
        """Return the future of a new answer. If the exchange has ended, raise the reason."""
        if self.ended is not None:
            raise self.ended
        return asyncio.get_running_loop().create_future()

    def _keep(self, answer: Answer, work: Coroutine[Any, Any, None]) -> Answer:
        """Run the work until it ends or the exchange is closed."""
        self._work[answer] = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._work.pop(answer, None))
        return answer

    # --- lifecycle -------------------------------------------------------------------------------

    @property
    def only_waits(self) -> bool:
        return self._pulls > 0 or super().only_waits

    def note_activity(self, ids: Iterable[int]) -> None:
        for task_id in ids:
            self._unsettled.pop(task_id, None)
        while self._is_silent:
            del self._unsettled[next(iter(self._unsettled))]
        self._heard.set()

    def unreadable(self, verb: str, error: TickwheelError) -> None:
        if self._gateway.audit is not None:
            self._gateway.audit.unreadable(self.caller, verb, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        return self._gateway.standby.survive(what, error)

    def finish(self) -> None:
        self._pulled = []
        self.close()

    def close(self, reason: str = "") -> None:
        work, self._work = self._work, {}
        for task in work.values():
            task.cancel()
        pulled, self._pulled = self._pulled, []
        if pulled:  # each goes to the front of the queue, so the last is released first
            releases = [delivery.release() for delivery in reversed(pulled)]
            self._gateway.keep(asyncio.gather(*releases, return_exceptions=True))
        self.caller.close()


def _complete(answer: Answer, value: Any) -> None:
    """Complete the future of an answer with a value or an error, unless it is already complete."""
    if answer.done():
        return
    if isinstance(value, TickwheelError):
        answer.set_exception(value)
    else:
        answer.set_result(value)


def _delivered_task(delivery: Delivery) -> DeliveredTask:
    task_id, attempt, due_ms, body, *options = delivery.raw
    return DeliveredTask(task_id, attempt, due_ms, body, dict(options[0]) if options else {})


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# --- the application -----------------------------------------------------------------------------


class _Api(Api):
    """The API. It also remembers the token of each principal."""

    def __init__(self, gateway: Gateway, logins: Logins, observed: Observed) -> None:
        super().__init__(gateway.settings, gateway.standby, logins, observed)
        self._gateway = gateway

    def principal_of(
        self, route: Route, headers: dict[bytes, bytes], *credentials: Any
    ) -> Principal:
        principal = super().principal_of(route, headers, *credentials)
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and not token.strip().startswith(LINK_PREFIX.encode()):
            self._gateway.tokens[principal] = token.strip().decode("utf-8", "replace")
        return principal


class Gateway:
    """The ASGI application, with ``start`` and ``stop``."""

    def __init__(
        self,
        settings: Settings,
        daemons: Iterable[Settings],
        http_of: Callable[[int], str],
        logins: Logins,
        clock: Clock,
        observed: Observed,
        on_event: OnEvent,
    ) -> None:
        """Clients find the shards at the addresses in ``daemons``. ``http_of`` returns the current
        URL of a shard's HTTP server, or "" if it is unknown."""
        self.settings, self.limits, self.clock = settings, settings.limits(), clock
        self._logins = logins
        self.audit = None if logins.audit is None else AuditStage(logins.audit)
        """Logs the addresses of callers, because the shards only see that of this process."""
        self._url = ",".join(dict.fromkeys(url for daemon in daemons for url in urls_of(daemon)))
        self._http_of = http_of
        self._tls: tuple[int, ssl.SSLContext] | None = None
        """Modification time of the certificate file, in ns, and a context that trusts it."""
        self.tokens: dict[Principal, str] = {}
        """The valid token that each principal has sent."""
        self._clients: dict[Principal, GatewayClient] = {}
        """The client of each principal; the most recently used is last."""
        self._closing: set[asyncio.Future[Any]] = set()
        self.standby = StandbyOperations(
            settings, self.limits, clock, active=lambda: None, status=dict, on_event=on_event
        )
        self._api = _Api(self, logins, observed)
        self._api.serve_with(partial(AllShardsExchange, self))
        self._pages = Starlette(routes=pages(wait_ms_max=self._api.wait_ms_max))
        self._idle_closer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._idle_closer = asyncio.get_running_loop().create_task(self._close_idle())

    async def stop(self) -> None:
        self._api.stop()
        if self._idle_closer is not None:
            self._idle_closer.cancel()
        clients, self._clients = self._clients, {}
        closing = (*map(GatewayClient.close, clients.values()), *self._closing)
        await asyncio.gather(*closing, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["path"].startswith(API_PREFIX)
        await (self._api if is_api else self._pages)(scope, receive, send)

    # --- principals ------------------------------------------------------------------------------

    @property
    def active_principals(self) -> Sequence[Principal]:
        """Principals with a request in progress, a remembered token or a client."""
        return (*self._api.principals, *self.tokens, *self._clients)

    def dismiss(self) -> None:
        """Disconnect principals that are no longer valid, and forget their tokens."""
        self._api.dismiss()
        for principal in {*self.tokens, *self._clients}:
            if not self._logins.is_valid(principal):
                self.tokens.pop(principal, None)
                self._close(principal)

    # --- clients ---------------------------------------------------------------------------------

    def new_client(self, principal: Principal) -> GatewayClient:
        """Return a new client with the token of a principal. Raise Forbidden if the principal has
        only a certificate."""
        token = self.tokens.get(principal)
        if token is None:
            if principal not in (ANONYMOUS, NOBODY):
                raise Forbidden(
                    "a certificate cannot be forwarded to the shards: send a token as well, or"
                    f" {USE_SHARDS}"
                )
            token = ""
        return GatewayClient(self._url, token, self._trust())

    @asynccontextmanager
    async def client_of(self, principal: Principal) -> AsyncIterator[GatewayClient]:
        """Provide the client of a principal and keep it for the next request. Raise Overloaded if
        too many clients are in use."""
        client = self._clients.pop(principal, None)
        if client is None:
            self._close_excess_idle()
            client = self.new_client(principal)
        self._clients[principal] = client
        client.requests += 1
        try:
            yield client
        finally:
            client.requests -= 1
            client.idle_since_s = _now_s()

    def _close_excess_idle(self) -> None:
        """If too many clients are idle, close the one that has been idle longest. Raise Overloaded
        if too many are in use."""
        idle = [principal for principal, client in self._clients.items() if not client.requests]
        in_use = len(self._clients) - len(idle)
        if in_use >= CLIENTS_MAX:
            raise Overloaded(
                f"{in_use} tokens have requests in progress; the limit is {CLIENTS_MAX}"
                " (CLIENTS_MAX)"
            )
        if len(idle) >= IDLE_MAX:
            self._close(min(idle, key=lambda principal: self._clients[principal].idle_since_s))

    def _close(self, principal: Principal) -> None:
        """Close the client of a principal, if it has one."""
        client = self._clients.pop(principal, None)
        if client is not None:
            self.keep(asyncio.get_running_loop().create_task(client.close()))

    def keep(self, closing: asyncio.Future[Any]) -> None:
        """Remember work that closes something, so that ``stop`` waits for it."""
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_idle(self) -> None:
        """Close clients that have been idle for ``IDLE_S``, forever."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = _now_s()
            for principal, client in list(self._clients.items()):
                if not client.requests and client.idle_since_s + IDLE_S <= now_s:
                    self._close(principal)

    def _trust(self) -> ssl.SSLContext | None:
        return self._context() if self.settings.speaks_tls("listen") else None

    def _context(self) -> ssl.SSLContext:
        """Return a context that trusts the certificates that clients on this machine trust, and
        also the daemons' own certificate, even if it is self-signed."""
        own = self.settings.tls_cert
        written_ns = 0 if own is None else os.stat(own).st_mtime_ns
        if self._tls is None or self._tls[0] != written_ns:
            context = Trust().context()
            if own is not None:
                context.load_verify_locations(own)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._tls = written_ns, context
        return self._tls[1]

    async def post(self, shard: int, path: str, fields: Mapping[str, Any]) -> Any:
        """POST to the HTTP server of a shard and return its answer. Raise Unreachable, or the error
        in the shard's answer."""
        url = urlsplit(self._http_of(shard))
        if url.hostname is None or url.port is None:
            raise Unreachable(f"the address of shard {shard} is not known")
        tls = self._context() if url.scheme == "https" else None
        request = url.hostname, url.port, path, "application/json", ANSWER_BYTES_MAX, tls
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await fetch(*request, body=as_json(fields))
            answer = json.loads(body)
            if status == HTTPStatus.OK:
                return answer
            error = from_wire(answer["code"], answer["detail"])
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            NoAnswer,
            RemoteProtocolError,
        ) as problem:
            cause = str(problem) or type(problem).__name__
            text = f"shard {shard} at {url.netloc} gave no valid answer: {cause}"
            raise Unreachable(text) from None
        raise error


def urls_of(daemon: Settings) -> Sequence[str]:
    """Return the URLs of a local daemon: its listening address, then its advertised address. With
    TLS only the latter, because the certificate is valid only for the advertised name."""
    urls = [daemon.advertise or daemon.listen]
    if not daemon.speaks_tls("listen"):
        host, port = split_address(daemon.listen, "listen")
        host = local_host(host)
        urls.insert(0, f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
    return urls
