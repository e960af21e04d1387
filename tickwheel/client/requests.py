"""Requests that wait for their answer.

``Outbox`` holds requests until they can be sent; ``Pauses`` holds requests until their next
attempt. Enqueues and acks use both as well. ``Calls`` are requests of one caller each; when the
connection breaks, a call is sent again or fails. No verb is known here. Invariant: a request is in
one state only: waiting, pausing or sent.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from tickwheel.api import shapes
from tickwheel.client.connection import Connection, Request, fail
from tickwheel.client.reconnector import Source
from tickwheel.client.tasks import refuse_unknown
from tickwheel.errors import (
    BadRequest,
    ConnectionLost,
    Draining,
    InternalError,
    LimitExceeded,
    NotActive,
    OutcomeUnknown,
    Overloaded,
    ProtocolError,
    Refused,
    TickwheelError,
    shown,
)
from tickwheel.protocol import encode

if TYPE_CHECKING:
    from tickwheel.api.frames import FrameType
    from tickwheel.client.reconnector import Reconnector
    from tickwheel.limits import Limits

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

CALLS_MAX = 65_536
"""Maximum calls without an answer."""
SETTLEMENT_BYTES = 600
"""Maximum bytes of a settlement frame besides its items, mostly the names."""
RETRY_S = 0.1
RETRY_S_MAX = 2.0


def needs_loop(function: F, name: str, instead: str) -> F:
    """Wrap the coroutine function ``name`` so that a call in a thread without a running event loop
    raises BadRequest: nobody could await the coroutine there. ``instead`` says what to call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise BadRequest(
                f"{name} is asynchronous, and no event loop runs in this thread,"
                f" so nothing could await it: {instead}"
            ) from None
        return function(*args, **kwargs)

    # Mocks with a specification, and other code that inspects it, still see a coroutine function.
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(call)
    else:
        call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return cast("F", call)


def verbs_need_loop(kind: C) -> C:
    """Apply ``needs_loop`` to all coroutine functions of a class except ``connect`` and ``close``,
    which lose nothing when they are not awaited."""
    for name, verb in inspect.getmembers(kind, inspect.iscoroutinefunction):
        if not name.startswith("_") and name not in ("connect", "close"):
            setattr(kind, name, needs_loop(verb, f"{kind.__name__}.{name}", SYNCHRONOUS))
    return kind


SYNCHRONOUS = (
    "use tickwheel.sync.Client; in a plain def endpoint of FastAPI, SyncTickwheelClient of"
    " tickwheel.contrib.fastapi"
)


def retry_pause_s(tries: int) -> float:
    """Return the seconds before the next attempt of a request that was refused ``tries`` times."""
    return min(RETRY_S_MAX, RETRY_S * 2.0 ** min(tries, 8)) * random.uniform(0.5, 1.0)


class Resendable(Request):
    """A request that can be sent more than once."""

    __slots__ = ("began_s", "is_unsure", "refusal", "sent", "tries")

    def __init__(self, began_s: float, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.began_s = began_s
        self.sent = 0
        """Times sent, not counting daemons that were not active."""
        self.tries = 0
        """Times refused temporarily."""
        self.refusal: TickwheelError | None = None
        """The error of the last attempt, if it certainly had no effect."""
        self.is_unsure = False
        """Whether an earlier attempt may have had an effect."""

    def overdue(self, reconnector: Reconnector, what: str) -> TickwheelError:
        """Return the error for a request without an answer by its deadline."""
        if self.refusal is not None:
            return self.final(self.refusal)
        waited_s = round(reconnector.loop.time() - self.began_s, 1)
        return reconnector.overdue(what, waited_s, written=self.sent > 0)

    def final(self, refusal: TickwheelError) -> TickwheelError:
        """Return the caller's error after a refusal of the last attempt."""
        if not self.is_unsure or isinstance(refusal, OutcomeUnknown):
            return refusal
        return ConnectionLost(
            "an earlier attempt was not answered and may have been executed; the last one was"
            f" refused: {refusal.code}: {refusal.message}"
        )


def is_final(
    request: Resendable, error: TickwheelError, retries: int, refused_until_s: float
) -> bool:
    """Return whether a refusal is final. A store that accepts no writes now (``refused``), for
    example during a failover, is asked until ``refused_until_s``. A full store or a used-up quota
    lasts longer, so the caller gets that error after ``retries`` attempts. With 0 retries every
    refusal is final."""
    if request.tries < retries:
        return False
    now_s = asyncio.get_running_loop().time()
    return type(error) is not Refused or retries == 0 or now_s >= refused_until_s


R = TypeVar("R", bound=Resendable)


class Pauses(Generic[R]):
    """Requests that pause; ``resume`` gets each when its pause is over."""

    def __init__(self, reconnector: Reconnector, resume: Callable[[R], None]) -> None:
        self._reconnector = reconnector
        self._resume = resume
        self._pausing: set[R] = set()

    def begin(self, request: R) -> None:
        self._pausing.add(request)
        pause_s = retry_pause_s(request.tries)
        self._reconnector.loop.call_later(pause_s, self._resume_paused, request)
        request.tries += 1

    def forget(self, request: R) -> None:
        """End the pause of a request that has its outcome, if it pauses."""
        self._pausing.discard(request)

    def clear(self) -> None:
        self._pausing.clear()

    def __contains__(self, request: R) -> bool:
        return request in self._pausing

    def __iter__(self) -> Iterator[R]:
        return iter(self._pausing)

    def _resume_paused(self, request: R) -> None:
        if request in self._pausing:
            self._pausing.discard(request)
            self._resume(request)


class Outbox(Generic[R]):
    """Requests in the order of sending, and requests that pause before that."""

    def __init__(self, reconnector: Reconnector) -> None:
        self._reconnector = reconnector
        self._waiting: deque[R] = deque()
        self._pauses: Pauses[R] = Pauses(reconnector, self.add)

    def add(self, request: R) -> None:
        """Send a request in the next step of the loop, or on the next connection."""
        self._waiting.append(request)
        self._reconnector.wake()

    def extend(self, requests: Iterable[R]) -> None:
        """``add`` many requests while the sources write, without a wake-up."""
        self._waiting.extend(requests)

    def add_again(self, request: R) -> None:
        """Send a request again without counting the attempt: the daemon was a standby."""
        request.sent -= 1
        self.add(request)

    def pause(self, request: R, refusal: TickwheelError) -> None:
        """Send a request again after a pause, because it was refused temporarily."""
        request.refusal = refusal
        request.is_unsure |= isinstance(refusal, OutcomeUnknown)
        self._pauses.begin(request)

    def forget(self, request: R) -> None:
        """Forget a request that has its outcome; ``take`` may still return it."""
        self._pauses.forget(request)

    def take(self) -> Iterator[R]:
        """Remove the waiting requests, oldest first."""
        while self._waiting:
            yield self._waiting.popleft()

    def take_overdue(self, now_s: float) -> list[R]:
        """Remove and return the waiting and pausing requests that are past their deadlines."""
        overdue = [r for r in (*self._waiting, *self._pauses) if r.deadline_s <= now_s]
        if overdue:
            self._waiting = deque(r for r in self._waiting if r.deadline_s > now_s)
        for request in overdue:
            self._pauses.forget(request)
        return overdue

    def take_all(self) -> list[R]:
        """Remove and return all requests, to be failed."""
        requests = [*self._waiting, *self._pauses]
        self._waiting.clear()
        self._pauses.clear()
        return requests


# --- calls ---------------------------------------------------------------------------------------


class Call(Resendable):
    """One caller's request, which gets a new number on every connection."""

    __slots__ = ("_calls", "fields", "future", "kind", "orphaned", "prompt", "repeat")

    def __init__(
        self, calls: Calls, kind: FrameType, fields: tuple[Any, ...], time_s: float
    ) -> None:
        began_s = calls.reconnector.loop.time()
        super().__init__(began_s, began_s + time_s)
        self._calls = calls
        self.kind = kind
        self.fields = fields
        self.future: asyncio.Future[Any] = calls.reconnector.loop.create_future()
        self.prompt = True
        self.repeat = True
        self.orphaned: Callable[[Any], None] | None = None

    def answered(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)
        elif self.orphaned is not None:
            self.orphaned(result)

    def failed(self, error: TickwheelError) -> None:
        if self.future.done():
            return
        can_repeat = self.repeat or not isinstance(error, OutcomeUnknown)
        if error.closes_connection and error.retryable:
            self.lost()
        elif error.retryable and can_repeat and not isinstance(error, InternalError):
            self._calls.retry(self, error)
        else:
            fail(self.future, error)

    def lost(self) -> None:
        if self.future.done():
            return
        if self.repeat:
            self.is_unsure = True
            self._calls.outbox.add(self)
        else:
            fail(
                self.future,
                ConnectionLost(f"the connection broke before {_word(self.kind)} was answered"),
            )

    def expired(self) -> None:
        if not self.future.done():
            fail(self.future, self.overdue(self._calls.reconnector, _word(self.kind)))


def _word(kind: FrameType) -> str:
    """Return the name of a kind of request as the client's methods spell it."""
    return kind.name.lower()


def check_frame(data: bytes, what: str, limits: Limits) -> None:
    """Raise LimitExceeded for a frame for which the daemon would close the connection."""
    if len(data) > limits.frame_bytes_max:
        raise LimitExceeded(
            f"the frame of {what} has {len(data)} bytes; the limit is {limits.frame_bytes_max}"
            " (frame_bytes_max)"
        )


class Calls(Source):
    """All calls of one client."""

    def __init__(self, reconnector: Reconnector, total_s: float, retries: int) -> None:
        self.reconnector = reconnector
        self._total_s = total_s
        self._retries = retries
        self.outbox: Outbox[Call] = Outbox(reconnector)
        self.count = 0
        """Calls without an answer."""
        self._stopped: TickwheelError | None = None

    @property
    def limits(self) -> Limits:
        """The limits of the daemon."""
        return self.reconnector.limits

    async def call(
        self,
        kind: FrameType,
        *fields: Any,
        extra_s: float = 0.0,
        until_s: float | None = None,
        prompt: bool = True,
        repeat: bool = True,
        orphaned: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return the result of a request. Raise the daemon's error, or why there is no answer.

        ``extra_s``: additional seconds for the answer. ``until_s``: the caller's deadline by the
        loop's clock, which replaces the usual one. ``prompt``: whether a missing answer means a
        dead connection. ``repeat``: whether to send the request again although it may have been
        executed. ``orphaned`` gets the result of a caller that was cancelled or whose deadline has
        passed, if it arrives within the usual time.
        """
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        self.reconnector.check_loop()
        if self.count >= CALLS_MAX:
            raise Overloaded(f"{self.count} calls wait for an answer; the limit is {CALLS_MAX}")
        call = Call(self, kind, fields, self._total_s + extra_s)
        timer = None
        if until_s is not None:
            call.deadline_s = until_s if orphaned is None else max(until_s, call.deadline_s)
            timer = self.reconnector.loop.call_at(until_s, call.expired)
        call.prompt, call.repeat, call.orphaned = prompt, repeat, orphaned
        self.count += 1
        try:
            self.outbox.add(call)
            return await call.future
        except asyncio.CancelledError:
            future = call.future  # the answer may have come in the same step of the loop
            if orphaned is not None and not future.cancelled() and future.exception() is None:
                with suppress(ProtocolError):
                    read(orphaned, future.result())
            raise
        finally:
            self.count -= 1
            call.future.cancel()
            if timer is not None:
                timer.cancel()

    def retry(self, call: Call, error: TickwheelError) -> None:
        """Send a call again that was refused temporarily: after a pause, or on the next
        connection."""
        if isinstance(error, NotActive):
            self.outbox.add_again(call)
        elif isinstance(error, Draining):
            call.refusal = error
            if self.reconnector.connection is not None:
                self.reconnector.connection.leave(error)
            self.outbox.add(call)
        elif is_final(call, error, self._retries, call.began_s + self._total_s):
            fail(call.future, call.final(error))
        else:
            self.outbox.pause(call, error)

    # --- a source of the reconnector ------------------------------------------------------------

    def collect(self, connection: Connection) -> None:
        held: list[Call] = []
        for call in self.outbox.take():
            if call.future.done():
                continue
            if connection.leaving and isinstance(call.refusal, Draining):
                held.append(call)
                continue
            number = self.reconnector.next_number()
            try:
                data = encode((int(call.kind), number, *call.fields))
                check_frame(data, _word(call.kind), self.reconnector.limits)
            except TickwheelError as error:
                fail(call.future, error)
                continue
            call.sent += 1
            call.refusal = None
            connection.ask(number, call, data)
        self.outbox.extend(held)

    def sweep(self, now_s: float) -> None:
        for call in self.outbox.take_overdue(now_s):
            call.expired()

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        for call in self.outbox.take_all():
            fail(call.future, error)


# --- arguments and answers ----------------------------------------------------------------------


def read(parse: Callable[[Any], T], answer: Any) -> T:
    """Return ``parse(answer)``. Raise ProtocolError for an answer of an unexpected shape."""
    try:
        return parse(answer)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise ProtocolError(
            f"the daemon sent an invalid answer: {type(problem).__name__}: {problem!s:.200}"
        ) from None


def raise_first(ends: Iterable[Any]) -> None:
    """Raise the first exception in the results of a ``gather``."""
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def list_of(answer: Any, count: int, kind: Any) -> list[Any]:
    """Return the answer as a list of ``count`` items of this kind. Raise ProtocolError."""
    if not isinstance(answer, tuple) or len(answer) != count:
        raise ProtocolError(f"the daemon's answer must have {count} elements, not {answer!r:.100}")
    items: list[Any] = read(shapes.reader_of(kind), answer)
    return items


def check_filter(value: Any, block: Any, method: str) -> None:
    """Raise BadRequest for a filter that is not a map, and TypeError for a key not in ``block``."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"filter must be a dict of selection fields, not {shown(value)}")
    refuse_unknown(value, block, f"the filter of Client.{method}")


def own_name(kind: str) -> str:
    """Return a unique name, so that repeating a request creates no second object."""
    return f"{kind}-{os.urandom(6).hex()}"


def own_number() -> int:
    """Return a unique number, for the same purpose."""
    return int.from_bytes(os.urandom(6))
