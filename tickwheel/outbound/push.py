"""The target of a push: each task is one signed POST to a URL.

The status of the answer decides the outcome. 2xx acknowledges the task; 202 waits for a callback if
the push has a callback lease. 410 ends the push. 429 and 503 describe the host: they postpone the
task, by ``Retry-After`` or a growing pause, without a failed attempt. Any other status, or a
missing answer, is a failure, to which the group's retry policy applies. This includes 4xx, because
an endpoint may answer 401 or 404 during a deployment or a change of its secret; the policy ends in
dead letters anyway.

Invariants: redirects and proxies are not used. At most ``ANSWER_BYTES_MAX`` of an answer are read,
within the time limit of the request. Only the status decides, so an endless answer does not change
the outcome. The guard checks the address of every connection.

``Host`` limits the requests of all groups to one host, and has a breaker. The breaker is closed
until ``FAILURES_MAX`` requests in a row have failed. Then it is open, and no requests are sent for
a time that doubles with each further failure. After that time one request is sent as a probe; if it
succeeds, the breaker closes. Requests wait in ``entered``. While they wait, their leases are
extended, and further due tasks stay in the daemon. Times are in seconds of the event loop's clock.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import blake2s
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from urllib.parse import quote, urlsplit
from weakref import WeakValueDictionary

from tickwheel.api import cloudevents
from tickwheel.api.targets import shown_url
from tickwheel.client.delivery import Delivery
from tickwheel.errors import NotFound, TickwheelError
from tickwheel.outbound.target import (
    ACK,
    PROPERTY,
    Message,
    Outcome,
    as_text,
    error_text,
    message,
    needs,
)
from tickwheel.version import __version__
from tickwheel.webhooks import Callback, ForbiddenAddress, Guard, Signer, callback_token

FAILURES_MAX: Final = 10
"""Consecutive failures that open the breaker."""
OPEN_S: Final = 1.0
OPEN_MAX_S: Final = 60.0
"""Seconds for which the breaker stays open, initially and at most."""
HOST_REQUESTS_MAX: Final = 256
"""Maximum number of running requests to one host, for all groups together."""


class Host:
    """The limit and the breaker of one host, shared by all groups."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(HOST_REQUESTS_MAX)
        self._failures = self._openings = 0
        """Number of consecutive failures, and of openings of the breaker since the last success."""
        self._open_until_s = 0.0
        self._is_probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, or waits for the result of a probe."""
        return self._failures >= FAILURES_MAX

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Wait until a request may be sent, and count it as running inside the context.

        Call ``succeeded`` or ``failed`` inside it; otherwise the request does not count."""
        async with self._room:
            is_probe = await self._pass()
            try:
                yield
            finally:
                if is_probe:
                    self._is_probing = False
                    self._wake()

    async def _pass(self) -> bool:
        """Wait until the breaker admits the request. Return whether it is a probe."""
        while self.is_open:
            left_s = self._open_until_s - asyncio.get_running_loop().time()
            if left_s <= 0 and not self._is_probing:
                self._is_probing = True
                return True
            changed = self._changed
            try:
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await changed.wait()
            except TimeoutError:
                continue
        return False

    def succeeded(self) -> None:
        """Record that the host has answered."""
        self._failures = self._openings = 0
        self._wake()

    def failed(self) -> None:
        """Record that the host has not answered or has answered with an error."""
        self._failures += 1
        now_s = asyncio.get_running_loop().time()
        # Requests that were running when the breaker opened do not extend its open time.
        if self._failures >= FAILURES_MAX and now_s >= self._open_until_s:
            open_s = min(OPEN_MAX_S, OPEN_S * 2.0 ** min(self._openings, 16))
            self._openings += 1
            self._open_until_s = now_s + open_s

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


with needs("push"):
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.client_proto import ResponseHandler

if TYPE_CHECKING:
    from tickwheel.api.tasks import Value

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Bytes of an answer's body that are read. The connection of a longer answer is closed."""
WIRE_BYTES_MAX: Final = 128 * 1024
"""Maximum bytes of an answer with headers and chunks. A larger answer closes the connection."""
INTERIM_MAX: Final = 8
"""Maximum number of interim answers (100 to 199) before the answer."""
TURN_BYTES_MAX: Final = 4 * 1024
"""Maximum bytes of an answer that are parsed in one turn of the event loop."""
KEPT_BYTES_MAX: Final = 2 * 1024
"""Maximum bytes of an answer's body that are kept."""
REASON_BYTES_MAX: Final = 200
LOG_MAX: Final = 200
"""Maximum number of requests kept per push."""
LOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum bytes of request bodies kept per push. Requests whose body is not kept cannot be
resent."""
LOGS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of request bodies kept for all pushes, which have equal shares."""
RETRY_AFTER_MAX_S: Final = 86_400.0
"""Maximum seconds of ``Retry-After``."""
HEADERS_BYTES_MAX: Final = 6 * 1024
"""Maximum bytes of headers for properties of a task; further properties are left out."""
REQUEST_S, CONNECT_S = 30.0, 5.0
KEEP_ALIVE_S: Final = 30.0
HOST_STATUSES: Final = (429, 503)
"""Statuses of a host that currently accepts no requests. They do not count as failed attempts."""
HELD: Final = Outcome("held")
"""The outcome of a task that waits, with a longer lease, for a callback."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_EVENT = "ce-"
"""The prefix of properties that contain the attributes of an enqueued CloudEvent."""


class GuardedResolver(AbstractResolver):
    """Resolves host names and leaves out forbidden addresses."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=address_family, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address_family, address in await self._guard.resolve(host, port, family)
        ]  # fmt: skip

    async def close(self) -> None: ...


class Response(aiohttp.ClientResponse):
    """An answer that knows the address of its sender."""

    peer: str | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        peername = connection.transport and connection.transport.get_extra_info("peername")
        self.peer = str(peername[0]) if peername else None
        return await super().start(connection)


class AnswerTooLarge(aiohttp.ClientError):
    """The answer of an endpoint exceeds a limit."""


class Wire(ResponseHandler):
    """A connection that limits the bytes and interim answers of an answer, and the bytes that are
    read in one turn of the loop."""

    requests = 0
    """Number of requests on this connection."""
    _read = _answers = 0
    """Number of bytes, and of answers including interim ones, received since the last request."""

    @property
    def is_stale(self) -> bool:
        """Whether the connection was used before and has not answered its last request."""
        return self.requests > 1 and not self._read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport.max_size = TURN_BYTES_MAX  # type: ignore[attr-defined]  # bytes per turn

    def set_response_params(self, **params: Any) -> None:
        self.requests += 1
        self._read = self._answers = 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if not data:  # no new data: the parser continues with buffered data
            super().data_received(data)
        for start in range(0, len(data), TURN_BYTES_MAX):  # TLS can pass more
            piece = data[start : start + TURN_BYTES_MAX]
            self._read += len(piece)
            if self._read > WIRE_BYTES_MAX:
                self._drop(f"more than {WIRE_BYTES_MAX} bytes (WIRE_BYTES_MAX)")
                return
            super().data_received(piece)
            if self._answers > INTERIM_MAX + 1:
                self._drop(f"more than {INTERIM_MAX} interim answers (INTERIM_MAX)")
                return

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._answers += 1
        super().feed_data(data, size)

    def _drop(self, excess: str) -> None:
        self.set_exception(AnswerTooLarge(f"the endpoint answers with {excess}"))
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()


_USED: ContextVar[Wire | None] = ContextVar("_USED", default=None)
"""The connection of the current request."""


class Connector(aiohttp.TCPConnector):
    """Creates ``Wire`` connections, and records the connection of each request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        factory: Any = partial(Wire, loop=asyncio.get_running_loop())
        self._factory = factory

    async def connect(self, *args: Any, **options: Any) -> Any:
        _USED.set(None)
        connection = await super().connect(*args, **options)
        _USED.set(connection.protocol if isinstance(connection.protocol, Wire) else None)
        return connection


class Http:
    """The connections of all pushes of this process, and the state of their hosts."""

    def __init__(self, guard: Guard) -> None:
        self.session = _session(guard, keepalive_timeout=KEEP_ALIVE_S)
        self.fresh = _session(guard, force_close=True)
        """A session that opens a connection for each request."""
        self._hosts: WeakValueDictionary[str, Host] = WeakValueDictionary()

    def host(self, url: str) -> Host:
        """Return the state of the URL's host. Pushes to the same host share it."""
        return self._hosts.setdefault(urlsplit(url).netloc.lower(), Host())

    async def close(self) -> None:
        await self.session.close()
        await self.fresh.close()


def _session(guard: Guard, **options: Any) -> aiohttp.ClientSession:
    connector = Connector(limit=0, resolver=GuardedResolver(guard), **options)
    # Do not send cookies to other endpoints, and ignore environment variables.
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
        auto_decompress=False, response_class=Response,
        headers={"user-agent": f"tickwheel/{__version__}"},
    )  # fmt: skip


class Request(NamedTuple):
    """A POST before it is signed."""

    url: str
    message_id: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """The result of a POST."""

    status: int | None
    """The status, or None if there was no answer."""
    error: str | None
    retry_after: str | None
    body: bytes
    address: str | None


class Sent(NamedTuple):
    """A recent request of a push."""

    number: int
    request: Request
    delivery: tuple[int, int]
    """(task, attempt)."""
    fields: dict[str, Any]
    """The fields of ``PushSent``."""


class TimeLimits(NamedTuple):
    """Time limits in seconds."""

    request_s: float = REQUEST_S
    connect_s: float = CONNECT_S


async def post(http: Http, request: Request, signer: Signer, time_limits: TimeLimits) -> Answer:
    """Send a request and return its bounded answer. Raise only CancelledError.

    The endpoint may just have closed a kept connection, which is not a failure. If a kept
    connection ends before any byte of an answer, the request is sent again on a new connection.
    """
    began_s = time.monotonic()
    try:
        return await _post(http.session, request, signer, time_limits)
    except ClosedWhileIdle:
        left_s = max(0.001, time_limits.request_s - (time.monotonic() - began_s))
        return await _post(http.fresh, request, signer, time_limits._replace(request_s=left_s))


class ClosedWhileIdle(Exception):
    """A reused connection has ended without any byte of an answer."""


async def _post(
    session: aiohttp.ClientSession, request: Request, signer: Signer, time_limits: TimeLimits
) -> Answer:
    headers = request.headers | signer.headers(request.message_id, int(time.time()), request.body)
    timeout = aiohttp.ClientTimeout(total=time_limits.request_s, sock_connect=time_limits.connect_s)
    status: int | None = None
    body, address, retry_after, error = b"", None, None, None
    try:
        async with session.post(
            request.url, data=request.body, headers=headers, timeout=timeout,
            allow_redirects=False,
        ) as response:  # fmt: skip
            status, retry_after = response.status, response.headers.get("retry-after")
            address = response.peer if isinstance(response, Response) else None
            body = await _read(response)
    except TimeoutError:
        error = None if status is not None else f"no answer within {time_limits.request_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as problem:
        used = _USED.get()
        is_closed = isinstance(problem, (aiohttp.ServerDisconnectedError, OSError))
        if status is None and is_closed and used is not None and used.is_stale:
            raise ClosedWhileIdle from None
        error = None if status is not None else _trouble(problem, request.url)
    return Answer(status, error, retry_after, body, address)


def _trouble(problem: Exception, url: str) -> str:
    """Return the reason for a missing answer; for a forbidden address, the guard's message. It does
    not contain the values of the URL's query, unlike the texts of some errors."""
    cause = problem.os_error if isinstance(problem, aiohttp.ClientConnectorError) else problem
    if isinstance(cause, ForbiddenAddress):
        return str(cause)
    if isinstance(problem, aiohttp.ClientResponseError):
        return " ".join(["the answer is not valid HTTP:", *problem.message.split()])
    return error_text(problem).replace(url, shown_url(url))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the beginning of the body. If the body is longer, close the connection."""
    read, beginning = 0, b""
    async for piece in response.content.iter_any():
        read += len(piece)
        beginning = (beginning + piece)[:KEPT_BYTES_MAX]
        if read > ANSWER_BYTES_MAX:
            response.close()
            break
    return beginning


class PushTarget:
    """Sends tasks to one URL. ``ended`` is called when the endpoint answers 410."""

    batch_max = 1

    def __init__(
        self,
        http: Http,
        url: str,
        secrets: Sequence[str],
        options: Mapping[str, Any],
        *,
        callbacks: str | None,
        ended: Callable[[str], None],
        log_bytes_max: Callable[[], int] = lambda: LOG_BYTES_MAX,
    ) -> None:
        """``callbacks`` is the prefix of callback URLs; with None, requests have no callback URL.
        ``log_bytes_max`` returns the maximum bytes of request bodies in the log."""
        self.concurrency = int(options.get("concurrency", 32))
        self.log: deque[Sent] = deque(maxlen=LOG_MAX)
        self.sent = self.acked = self.failed = self.in_flight = 0
        self.last: dict[str, Any] = {}
        """The result of the last attempt: fields of ``TargetInfo``."""
        self.is_failing = False
        self.time_limits = TimeLimits(
            options.get("request_timeout_ms", REQUEST_S * 1000) / 1000,
            options.get("connect_timeout_ms", CONNECT_S * 1000) / 1000,
        )
        self._http = http
        self.host = http.host(url)
        self._url = url
        self._secrets = secrets
        self._signer = Signer(secrets)
        self._is_event = options.get("format") == "cloudevents"
        self._callback_s = options.get("callback_lease_ms", 0) / 1000
        self._callbacks = callbacks
        self._ended = ended
        self._is_over = False
        self._log_bytes, self._log_bytes_max = 0, log_bytes_max
        self._number = 0

    async def connect(self) -> None:
        """Do nothing, because requests open connections."""

    async def close(self) -> None:
        """Do nothing, because all pushes share the connections."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        """Send one task. Wait while the breaker of its host is open."""
        (delivery,) = deliveries
        async with self.host.entered():
            if self._is_over:
                return (Outcome("later"),)
            return (await self._send(delivery),)

    async def _send(self, delivery: Delivery) -> Outcome:
        request = self._request(delivery)
        self.in_flight += 1
        began_s = time.time()
        try:
            answer = await post(self._http, request, self._signer, self.time_limits)
        finally:
            self.in_flight -= 1
        outcome, result = await self._judge(delivery, answer)
        self._note(request, delivery, answer, result, began_s, outcome.reason)
        return outcome

    # --- outcomes --------------------------------------------------------------------------------

    async def _judge(self, delivery: Delivery, answer: Answer) -> tuple[Outcome, str]:
        """Return the outcome of the task, and the word that stands for it in the log."""
        status = answer.status
        if status is None or status >= 500:
            self.host.failed()
        else:
            self.host.succeeded()
        if status == 410:
            self._is_over = True
            self._ended("the endpoint answered 410")
            return Outcome("later"), "ended"
        if status == 202 and self._callback_s:
            return await self._hold(delivery)
        if status is not None and 200 <= status < 300:
            return ACK, "acked"
        if status in HOST_STATUSES:
            asked_s = retry_after_s(answer.retry_after, time.time())
            pause_s = _pause_s(delivery.attempt) if asked_s is None else max(OPEN_S, asked_s)
            return Outcome("later", pause_s, _reason(answer)), "retry"
        return Outcome("retry", reason=_reason(answer)), "retry"

    async def _hold(self, delivery: Delivery) -> tuple[Outcome, str]:
        try:
            await delivery.extend(self._callback_s)  # fails if the task was settled
        except TickwheelError as error:
            return Outcome("retry", reason=f"202, but no lease for a callback: {error}"), "retry"
        return HELD, "callback"

    def _note(
        self,
        request: Request,
        delivery: Delivery,
        answer: Answer,
        result: str,
        began_s: float,
        reason: str | None,
    ) -> None:
        self.sent += 1
        self.acked += result == "acked"
        self.is_failing = result == "retry"
        self.failed += self.is_failing
        self._number += 1
        fields = sent_fields(answer, result, began_s, self._number)
        fields |= {"id": delivery.id, "attempt": delivery.attempt}
        self.last["last_ms"] = fields["at_ms"] + int(fields["duration_ms"])
        self.last["last_status"] = answer.status
        if reason is not None:
            self.last["last_error"] = reason
        self._keep(Sent(self._number, request, (delivery.id, delivery.attempt), fields))

    def _keep(self, sent: Sent) -> None:
        if len(self.log) == LOG_MAX:
            self._log_bytes -= len(self.log[0].request.body)
        self.log.append(sent)
        self._log_bytes += len(sent.request.body)
        self.trim_log()

    def trim_log(self) -> None:
        """Forget the oldest request bodies beyond the limit."""
        bytes_max = self._log_bytes_max()
        for index, entry in enumerate(self.log):
            if self._log_bytes <= bytes_max:
                break
            self._log_bytes -= len(entry.request.body)
            request = entry.request._replace(body=b"")
            self.log[index] = entry._replace(request=request, delivery=(0, 0))

    async def resend(self, number: int) -> dict[str, Any]:
        """Resend a recent request without settling its task. Raise NotFound."""
        sent = next((entry for entry in self.log if entry.number == number), None)
        if sent is None or not sent.delivery[0]:
            raise NotFound(f"request {number} or its body is no longer kept")
        began_s = time.time()
        answer = await post(self._http, sent.request, self._signer, self.time_limits)
        self._number += 1
        result = "acked" if answer.status is not None and 200 <= answer.status < 300 else "retry"
        fields = sent_fields(answer, result, began_s, self._number) | {"again": True}
        fields |= {"id": sent.delivery[0], "attempt": sent.delivery[1]}
        self._keep(Sent(self._number, sent.request, sent.delivery, fields))
        return fields

    # --- the request -----------------------------------------------------------------------------

    def _request(self, delivery: Delivery) -> Request:
        task_message = message(delivery)
        group = blake2s(f"{delivery.topic} {delivery.group}".encode(), digest_size=4).hexdigest()
        message_id = f"{delivery.id}-{group}"
        headers = headers_of(task_message.headers) | {"tickwheel-group": delivery.group}
        body = task_message.body
        if self._is_event:
            body = event(delivery, task_message, message_id)
            headers["content-type"] = "application/cloudevents+json; charset=utf-8"
        if self._callback_s and self._callbacks is not None:
            callback = Callback(
                delivery.topic, delivery.group, delivery.id, delivery.epoch, delivery.attempt
            )
            token = callback_token(callback, self._secrets[0])
            headers["tickwheel-callback"] = f"{self._callbacks}/v1/callbacks/{token}"
        return Request(self._url, message_id, headers, body)


def sent_fields(answer: Answer, result: str, began_s: float, number: int) -> dict[str, Any]:
    """Return the fields of ``PushSent`` for one POST."""
    return {
        "number": number,
        "at_ms": int(began_s * 1000),
        "duration_ms": round((time.time() - began_s) * 1000, 3),
        "result": result,
        "status": answer.status,
        "error": answer.error if answer.status is None else None,
        "body": answer.body.decode("utf-8", "replace"),
        "address": answer.address,
    }


def _pause_s(attempt: int) -> float:
    """Return the pause, in seconds, before a task is sent again to a host that refuses requests."""
    return min(OPEN_MAX_S, OPEN_S * 2.0 ** min(attempt - 1, 16))


def _reason(answer: Answer) -> str:
    if answer.status is None:
        return answer.error or "no answer"
    if 300 <= answer.status < 400:
        return f"answer {answer.status}: redirects are not followed"
    text = " ".join(answer.body[:REASON_BYTES_MAX].decode("utf-8", "replace").split())
    return f"answer {answer.status}" + (f": {text}" if text.isprintable() and text else "")


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """Return the seconds of a ``Retry-After`` header, at most ``RETRY_AFTER_MAX_S``.

    Return None if the header is absent or neither a number nor a date."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:12]), RETRY_AFTER_MAX_S)
    try:
        when = parsedate_to_datetime(text)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        at_s = when.timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(max(0.0, at_s - now_s), RETRY_AFTER_MAX_S)


def headers_of(fields: Mapping[str, Value]) -> dict[str, str]:
    """Return HTTP headers, in which non-ASCII characters are percent-encoded as UTF-8.

    Properties get the prefix ``tickwheel-``. A property is left out if its name is not a valid
    header name, or if there is no room for it."""
    headers = {"content-type": "application/octet-stream"}
    bytes_left = HEADERS_BYTES_MAX
    for name, value in fields.items():
        text = quote(as_text(value), safe=_SAFE)
        if not name.startswith(PROPERTY):
            headers[name] = text
            continue
        bytes_left -= len(name) + len(text) + 16
        if bytes_left >= 0 and _TOKEN.fullmatch(name):
            headers[f"tickwheel-{name}"] = text
    kind = fields.get(f"{PROPERTY}{_EVENT}datacontenttype")
    if isinstance(kind, str) and kind.isascii() and kind.isprintable():
        headers["content-type"] = kind
    return headers


_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%") + " "


def event(delivery: Delivery, task_message: Message, message_id: str) -> bytes:
    """Return the task as a CloudEvent in JSON.

    A task that was enqueued as a CloudEvent keeps its attributes and gets no other data type."""
    original = {
        name.removeprefix(_EVENT): value
        for name, value in delivery.properties.items()
        if name.startswith(_EVENT)
    }
    due = datetime.fromtimestamp(delivery.due_ms / 1000, UTC)
    attributes: dict[str, Any] = {
        "id": message_id,
        "source": f"/topics/{delivery.topic}",
        "type": "tickwheel.task",
        "time": due.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "subject": delivery.key,
        "datacontenttype": None
        if "specversion" in original
        else task_message.headers.get("content-type"),
        "traceparent": delivery.trace,
        "tickwheelid": str(delivery.id),
        "tickwheelgroup": delivery.group,
        "tickwheelattempt": delivery.attempt,
    }
    properties = delivery.properties.items()
    extensions = {name: value for name, value in properties if name not in attributes}
    fields: dict[str, Any] = {"specversion": cloudevents.VERSION}
    # Producers can set properties with any names and with 64-bit integers. Names that are not valid
    # attributes are left out, and numbers outside the range of attributes are written as text.
    for name, value in (*attributes.items(), *extensions.items(), *original.items()):
        forms = (value,) if isinstance(value, str) or value is None else (value, as_text(value))
        for form in forms:
            if cloudevents.invalid_reason(name, form) is None:
                fields[name] = form
                break
    kind = str(fields.get("datacontenttype") or "").partition(";")[0].lower()
    body = task_message.body
    if kind.endswith("json") and _is_json(body):
        return json.dumps(fields)[:-1].encode() + b', "data": ' + body + b"}"
    return json.dumps(fields | {"data_base64": base64.b64encode(body).decode()}).encode()


def _is_json(body: bytes) -> bool:
    """Return whether a body can be embedded unchanged in a JSON document."""
    try:
        json.loads(body.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> NoReturn:
    """Refuse ``NaN`` and infinities, which Python accepts but JSON does not contain."""
    raise ValueError(name)
