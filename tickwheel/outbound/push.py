"""The target of a push: each task is one signed POST to a URL.

What becomes of a task by the answer: 2xx acks it (202 waits for a callback, where the push has a
lease for them); 410 ends the push; 429 and 503 are what the host says of itself, and put the task
off, by ``Retry-After`` or a pause that grows; everything else, no answer included, is a failure
after which the group's retry policy decides. A 4xx is no
exception: while an endpoint is deployed anew, or its secret is changed, 401 and 404 are answers
like any other, and the policy ends in the dead letters anyway.

Invariants: no redirect is followed and no proxy is asked; at most ``ANSWER_BYTES_MAX`` of an answer
are read, within the time of the whole request; the status alone decides, so an answer that never
ends does not undo it; an address is checked by the guard whenever one is connected to.

``Host`` is one host as push sees it: how many requests it gets at a time from all groups, and a
breaker that stops asking it while it fails.

The breaker is closed until ``FAILURES_MAX`` requests in a row have failed. Then it is open: nobody
asks the host for a while that doubles with each further failure. When that is over one request goes
out, the probe; if it succeeds the breaker is closed, and all others go on. Who has to wait waits in
``enter``; leases are kept up meanwhile, and what comes due stays in the daemon.

Its times are the event loop's, in seconds.
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
from tickwheel.client.delivery import Delivery
from tickwheel.errors import NotFound, TickwheelError
from tickwheel.outbound.target import (
    ACK,
    PROPERTY,
    Message,
    Outcome,
    as_text,
    message,
    needs,
    why,
)
from tickwheel.version import __version__
from tickwheel.webhooks import Callback, ForbiddenAddress, Guard, Signer, callback_token

FAILURES_MAX: Final = 10
"""Failures in a row after which nothing is sent for a while."""
OPEN_S: Final = 1.0
OPEN_MAX_S: Final = 60.0
"""How long nothing is sent, in seconds; doubled with each probe that fails, up to the most."""
HOST_REQUESTS_MAX: Final = 256
"""Requests to one host at a time, of all groups together."""


class Host:
    """The requests to one host, of all groups."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(HOST_REQUESTS_MAX)
        self._failures = self._openings = 0
        """Failures in a row, and how often the breaker has opened since the last success."""
        self._open_until_s = 0.0
        self._is_probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, or waits for the end of its probe."""
        return self._failures >= FAILURES_MAX

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """While one request may be under way. ``succeeded`` or ``failed`` says how it ended; when
        neither does, it does not count."""
        async with self._room:
            is_probe = await self._pass()
            try:
                yield
            finally:
                if is_probe:
                    self._is_probing = False
                    self._wake()

    async def _pass(self) -> bool:
        """Wait until the breaker lets a request through; whether that is the probe."""
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
        """Take note that the host has answered."""
        self._failures = self._openings = 0
        self._wake()

    def failed(self) -> None:
        """Take note that the host did not answer, or could not do it."""
        self._failures += 1
        now_s = asyncio.get_running_loop().time()
        # Of requests that were under way when it opened, none makes it longer.
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
"""Bytes of an answer's body that are read; a longer one costs its connection."""
WIRE_BYTES_MAX: Final = 128 * 1024
"""Bytes of an answer with its headers and chunks; one with more is dropped with its connection."""
INTERIM_MAX: Final = 8
"""Interim answers (100 to 199) before the answer."""
TURN_BYTES_MAX: Final = 4 * 1024
"""Bytes of one answer that are looked at in a turn of the event loop."""
KEPT_BYTES_MAX: Final = 2 * 1024
"""Bytes of an answer's body that are remembered."""
REASON_BYTES_MAX: Final = 200
LOG_MAX: Final = 200
"""Requests that are remembered of one push."""
LOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of request bodies that are remembered of one push; older requests cannot be sent again."""
RETRY_AFTER_MAX_S: Final = 86_400.0
"""The most that an endpoint may ask for by ``Retry-After``, in seconds."""
HEADERS_BYTES_MAX: Final = 6 * 1024
"""Bytes of headers for properties of a task; those beyond are left out."""
REQUEST_S, CONNECT_S = 30.0, 5.0
KEEP_ALIVE_S: Final = 30.0
OF_THE_HOST: Final = (429, 503)
"""Answers by which a host says that it takes nothing now: they cost no task an attempt."""
HELD: Final = Outcome("held")
"""The task waits for a callback, with a lease of its own: nothing is settled now."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,100}")
_EVENT = "ce-"
"""How properties begin that hold the attributes of a CloudEvent that was enqueued."""


class GuardedResolver(AbstractResolver):
    """Looks hosts up, and leaves out what may not be asked: what is left is connected to."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=one, proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for one, address in await self._guard.resolve(host, port, family)
        ]  # fmt: skip

    async def close(self) -> None: ...


class Response(aiohttp.ClientResponse):
    """An answer that knows which address has given it."""

    peer: str | None = None

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        found = connection.transport and connection.transport.get_extra_info("peername")
        self.peer = str(found[0]) if found else None
        return await super().start(connection)


class AnswerTooLarge(aiohttp.ClientError):
    """An endpoint answers with more than may be read."""


class Wire(ResponseHandler):
    """One connection. It drops an answer that has more bytes than may be read, or more interim
    answers, and reads a bounded piece in one turn of the loop."""

    requests = 0
    """How many requests the connection was used for."""
    _read = _answers = 0
    """Bytes that have come since the last request, and answers, interim ones included."""

    @property
    def is_stale(self) -> bool:
        """Whether the connection was used before, and has answered nothing to its last request."""
        return self.requests > 1 and not self._read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport.max_size = TURN_BYTES_MAX  # type: ignore[attr-defined]  # what it reads in a turn

    def set_response_params(self, **params: Any) -> None:
        self.requests += 1
        self._read = self._answers = 0
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if not data:  # the parser goes on with what it has
            super().data_received(data)
        for start in range(0, len(data), TURN_BYTES_MAX):  # TLS has more than a piece at a time
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

    def _drop(self, what: str) -> None:
        self.set_exception(AnswerTooLarge(f"the endpoint answers with {what}"))
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()


_USED: ContextVar[Wire | None] = ContextVar("_USED", default=None)
"""The connection of the present request."""


class Connector(aiohttp.TCPConnector):
    """Makes connections with bounds, and notes which one a request has got."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        made: Any = partial(Wire, loop=asyncio.get_running_loop())
        self._factory = made

    async def connect(self, *args: Any, **options: Any) -> Any:
        _USED.set(None)
        found = await super().connect(*args, **options)
        _USED.set(found.protocol if isinstance(found.protocol, Wire) else None)
        return found


class Http:
    """The connections of all pushes of this process, and what is known of their hosts."""

    def __init__(self, guard: Guard) -> None:
        self.session = _session(guard, keepalive_timeout=KEEP_ALIVE_S)
        self.fresh = _session(guard, force_close=True)
        """Makes a connection for each request."""
        self._hosts: WeakValueDictionary[str, Host] = WeakValueDictionary()

    def host(self, url: str) -> Host:
        """What is known of the host of a URL, as long as somebody keeps it."""
        return self._hosts.setdefault(urlsplit(url).netloc.lower(), Host())

    async def close(self) -> None:
        await self.session.close()
        await self.fresh.close()


def _session(guard: Guard, **options: Any) -> aiohttp.ClientSession:
    connector = Connector(limit=0, resolver=GuardedResolver(guard), **options)
    # Cookies of one endpoint must not reach another, and nothing of the environment counts.
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False,
        auto_decompress=False, response_class=Response,
        headers={"user-agent": f"tickwheel/{__version__}"},
    )  # fmt: skip


class Request(NamedTuple):
    """One POST before it is signed."""

    url: str
    message_id: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """What came of one POST."""

    status: int | None
    """None: there was no answer."""
    error: str | None
    retry_after: str | None
    body: bytes
    address: str | None


class Sent(NamedTuple):
    """One of the last requests of a push."""

    number: int
    request: Request
    delivery: tuple[int, int]
    """(task, attempt)."""
    found: dict[str, Any]
    """The fields of ``PushSent``."""


class Spans(NamedTuple):
    """How long things may take, in seconds."""

    request_s: float = REQUEST_S
    connect_s: float = CONNECT_S


async def post(http: Http, request: Request, signer: Signer, spans: Spans) -> Answer:
    """Send a request, and read a bounded answer. Raises nothing but a cancel.

    A connection that was kept may have been closed by the endpoint just now, which is nobody's
    failure: where one ends before any byte of an answer, the request is sent on a new one.
    """
    began_s = time.monotonic()
    try:
        return await _post(http.session, request, signer, spans)
    except ClosedWhileIdle:
        left_s = max(0.001, spans.request_s - (time.monotonic() - began_s))
        return await _post(http.fresh, request, signer, spans._replace(request_s=left_s))


class ClosedWhileIdle(Exception):
    """A connection that was used before has ended without any byte of an answer."""


async def _post(
    session: aiohttp.ClientSession, request: Request, signer: Signer, spans: Spans
) -> Answer:
    headers = request.headers | signer.headers(request.message_id, int(time.time()), request.body)
    timeout = aiohttp.ClientTimeout(total=spans.request_s, sock_connect=spans.connect_s)
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
        error = None if status is not None else f"no answer within {spans.request_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as problem:
        used = _USED.get()
        is_closed = isinstance(problem, (aiohttp.ServerDisconnectedError, OSError))
        if status is None and is_closed and used is not None and used.is_stale:
            raise ClosedWhileIdle from None
        error = None if status is not None else _trouble(problem)
    return Answer(status, error, retry_after, body, address)


def _trouble(problem: Exception) -> str:
    """Why there was no answer; of a forbidden address the guard's own words."""
    cause = problem.os_error if isinstance(problem, aiohttp.ClientConnectorError) else problem
    return str(cause) if isinstance(cause, ForbiddenAddress) else why(problem)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The beginning of the body; a connection with more of it is not used again."""
    read, kept = 0, b""
    async for piece in response.content.iter_any():
        read += len(piece)
        kept = (kept + piece)[:KEPT_BYTES_MAX]
        if read > ANSWER_BYTES_MAX:
            response.close()
            break
    return kept


class PushTarget:
    """Sends tasks to one URL. ``ended`` is called when the endpoint says that it wants no more."""

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
    ) -> None:
        """``callbacks``: the URL that callbacks begin with; None: there are none."""
        self.concurrency = int(options.get("concurrency", 32))
        self.log: deque[Sent] = deque(maxlen=LOG_MAX)
        self.sent = self.acked = self.failed = self.in_flight = self.held = 0
        self.last: dict[str, Any] = {}
        """The end of the last attempt: fields of ``TargetInfo``."""
        self.is_failing = False
        self.spans = Spans(
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
        self._log_bytes = 0
        self._number = 0

    async def connect(self) -> None:
        """Do nothing: connections are made with requests, and kept."""

    async def close(self) -> None:
        """Do nothing: the connections belong to all pushes."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        """Send one task. It waits while its host is not asked."""
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
            answer = await post(self._http, request, self._signer, self.spans)
        finally:
            self.in_flight -= 1
        outcome, result = await self._judge(delivery, answer)
        self._note(request, delivery, answer, result, began_s, outcome.reason)
        return outcome

    # --- what becomes of it ----------------------------------------------------------------------

    async def _judge(self, delivery: Delivery, answer: Answer) -> tuple[Outcome, str]:
        """What becomes of the task, and the word for it in the log."""
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
        if status in OF_THE_HOST:
            asked_s = retry_after_s(answer.retry_after, time.time())
            pause_s = _pause_s(delivery.attempt) if asked_s is None else max(OPEN_S, asked_s)
            return Outcome("later", pause_s, _reason(answer)), "retry"
        return Outcome("retry", reason=_reason(answer)), "retry"

    async def _hold(self, delivery: Delivery) -> tuple[Outcome, str]:
        try:
            await delivery.extend(self._callback_s)  # in vain if something has settled it meanwhile
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
        found = said(answer, result, began_s, self._number)
        found |= {"id": delivery.id, "attempt": delivery.attempt}
        self.last["last_ms"] = found["at_ms"] + int(found["duration_ms"])
        self.last["last_status"] = answer.status
        if reason is not None:
            self.last["last_error"] = reason
        self._keep(Sent(self._number, request, (delivery.id, delivery.attempt), found))

    def _keep(self, sent: Sent) -> None:
        if len(self.log) == LOG_MAX:
            self._log_bytes -= len(self.log[0].request.body)
        self.log.append(sent)
        self._log_bytes += len(sent.request.body)
        for index, one in enumerate(self.log):
            if self._log_bytes <= LOG_BYTES_MAX or one is sent:
                break
            self._log_bytes -= len(one.request.body)
            self.log[index] = one._replace(request=one.request._replace(body=b""), delivery=(0, 0))

    async def again(self, number: int) -> dict[str, Any]:
        """Send one of the last requests once more; nothing becomes of its task. Raises NotFound."""
        sent = next((one for one in self.log if one.number == number), None)
        if sent is None or not sent.delivery[0]:
            raise NotFound(f"the request {number} is not remembered, or its body is not any more")
        began_s = time.time()
        answer = await post(self._http, sent.request, self._signer, self.spans)
        self._number += 1
        word = "acked" if answer.status is not None and 200 <= answer.status < 300 else "retry"
        found = said(answer, word, began_s, self._number) | {"again": True}
        found |= {"id": sent.delivery[0], "attempt": sent.delivery[1]}
        self._keep(Sent(self._number, sent.request, sent.delivery, found))
        return found

    # --- the request -----------------------------------------------------------------------------

    def _request(self, delivery: Delivery) -> Request:
        told = message(delivery)
        group = blake2s(f"{delivery.topic} {delivery.group}".encode(), digest_size=4).hexdigest()
        message_id = f"{delivery.id}-{group}"
        headers = headers_of(told.headers) | {"tickwheel-group": delivery.group}
        body = told.body
        if self._is_event:
            body = event(delivery, told, message_id)
            headers["content-type"] = "application/cloudevents+json; charset=utf-8"
        if self._callback_s and self._callbacks is not None:
            settles = Callback(
                delivery.topic, delivery.group, delivery.id, delivery.epoch, delivery.attempt
            )
            token = callback_token(settles, self._secrets[0])
            headers["tickwheel-callback"] = f"{self._callbacks}/v1/callbacks/{token}"
        return Request(self._url, message_id, headers, body)


def said(answer: Answer, result: str, began_s: float, number: int) -> dict[str, Any]:
    """The fields of ``PushSent`` for one POST."""
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
    """The seconds before a task goes again to a host that takes nothing now."""
    return min(OPEN_MAX_S, OPEN_S * 2.0 ** min(attempt - 1, 16))


def _reason(answer: Answer) -> str:
    if answer.status is None:
        return answer.error or "no answer"
    if 300 <= answer.status < 400:
        return f"answer {answer.status}: redirects are not followed"
    text = " ".join(answer.body[:REASON_BYTES_MAX].decode("utf-8", "replace").split())
    return f"answer {answer.status}" + (f": {text}" if text.isprintable() and text else "")


def retry_after_s(text: str | None, now_s: float) -> float | None:
    """The seconds that a header ``Retry-After`` asks for, of at most ``RETRY_AFTER_MAX_S``; None:
    it is absent, or no number and no date."""
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


def headers_of(told: Mapping[str, Value]) -> dict[str, str]:
    """Headers as HTTP can say them: what is not ASCII is percent-encoded as UTF-8; properties get
    the prefix ``tickwheel-``, and are left out when their names are no names of headers, or they
    are too many."""
    headers = {"content-type": "application/octet-stream"}
    left = HEADERS_BYTES_MAX
    for name, value in told.items():
        text = quote(as_text(value), safe=_SAFE)
        if not name.startswith(PROPERTY):
            headers[name] = text
            continue
        left -= len(name) + len(text) + 16
        if left >= 0 and _TOKEN.fullmatch(name):
            headers[f"tickwheel-{name}"] = text
    kind = told.get(f"{PROPERTY}{_EVENT}datacontenttype")
    if isinstance(kind, str) and kind.isascii() and kind.isprintable():
        headers["content-type"] = kind
    return headers


_SAFE: Final = "".join(chr(one) for one in range(0x21, 0x7F) if chr(one) != "%") + " "


def event(delivery: Delivery, told: Message, message_id: str) -> bytes:
    """Return the task as a CloudEvent in JSON. One that was enqueued as a CloudEvent has its
    attributes again, and no type of its data that it did not have."""
    own = {
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
        "datacontenttype": None if "specversion" in own else told.headers.get("content-type"),
        "traceparent": delivery.trace,
        "tickwheelid": str(delivery.id),
        "tickwheelgroup": delivery.group,
        "tickwheelattempt": delivery.attempt,
    }
    properties = delivery.properties.items()
    others = {name: value for name, value in properties if name not in attributes}
    found: dict[str, Any] = {"specversion": cloudevents.VERSION}
    # Any producer may set properties of any name, and integers of 64 bits: those that cannot be
    # attributes are left out, and numbers that cannot be are written as text.
    for name, value in (*attributes.items(), *others.items(), *own.items()):
        forms = (value,) if isinstance(value, str) or value is None else (value, as_text(value))
        for form in forms:
            if cloudevents.wrong_with(name, form) is None:
                found[name] = form
                break
    kind = str(found.get("datacontenttype") or "").partition(";")[0].lower()
    body = told.body
    if kind.endswith("json") and _is_json(body):
        return json.dumps(found)[:-1].encode() + b', "data": ' + body + b"}"
    return json.dumps(found | {"data_base64": base64.b64encode(body).decode()}).encode()


def _is_json(body: bytes) -> bool:
    """Whether a body can stand in a JSON document as it is."""
    try:
        json.loads(body.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> NoReturn:
    """``NaN`` and the infinities, which Python reads, are no JSON."""
    raise ValueError(word)
