"""Handlers: their options, checked at registration, and the runner that calls a handler with one
delivery and settles the delivery by how the handler ended.

Invariants: a delivery that the handler settled is left alone; a delivery whose lease was lost is
not acked; an error is logged and never ends the worker.

``Reject``, ``RetryLater`` and ``Snooze`` tell the runner how to settle the delivery; they are not
``TickwheelError``s and are never sent as such. ``Threads`` run handlers that are plain functions. A
``ThreadPoolExecutor`` would be joined when the interpreter ends, so a handler that hangs would keep
a stopped worker from ending. Threads are reused, so that the thread-local storage of a handler (a
database connection) is kept; there are at most as many as calls ran at the same time.
"""

from __future__ import annotations

import ast
import asyncio
import contextvars
import inspect
import logging
import textwrap
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack, cast

from tickwheel.api.groups import GroupFields
from tickwheel.api.kinds import integer
from tickwheel.api.policies import Retry, policy_wire
from tickwheel.api.times import Duration, duration_ms
from tickwheel.client.delivery import Delivery, unpack_aside
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.subscription import reason_of
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import BadBody, BadRequest, TickwheelError, Undecodable, shown, text_of

if TYPE_CHECKING:
    from tickwheel.client.leases import Leases
    from tickwheel.client.subscription import OnMismatch


Handler = Callable[[Delivery], Awaitable[Any]] | Callable[[Delivery], Any]
OnSettled = Callable[[Delivery, str, float, BaseException | None], object]
"""Called with a delivery, its outcome, the start of its handler, and the handler's exception."""
CONCURRENCY_DEFAULT = 32
CONCURRENCY_MAX = 65_535
"""Maximum deliveries in flight of a subscription."""


class HandlerKeywords(GroupKeywords, total=False):
    """How to run a handler, and the settings of its group. A new group gets these settings; if an
    existing group differs, the worker's ``on_mismatch`` decides."""

    group: str
    """The group whose tasks the handler gets; default "default"."""

    concurrency: int
    """Maximum calls of the handler at a time; default 32."""

    retry: Retry | None
    """The policy of a group that has none; if the group has a different one, ``on_mismatch``
    decides. It does not apply to tasks with an order key: the first such task ends the worker
    (BadRequest), unless one of the three ``order_...`` options is given as well."""

    timeout: Duration | None
    """Maximum time of a call, which then fails; default unlimited."""

    prefetch: int | None
    """Maximum deliveries here, running or waiting. The default is ``concurrency`` plus the
    deliveries that handlers start within 5 ms, so that none waits here while another worker is
    idle."""

    lease: Duration | None
    """Time without a sign of life from this worker after which others get the task; default the
    daemon's 30 s. The worker extends the lease while a handler runs."""


@dataclass(frozen=True, slots=True)
class Route:
    """One handler with its topic, group, concurrency and time limit."""

    handler: Handler
    is_async: bool
    """Whether to await the handler; otherwise it runs in a thread."""
    topic: str
    group: str
    concurrency: int
    prefetch: int | None
    """Maximum deliveries here; None: as the handlers' speed requires (``Ahead``)."""
    retry: Retry | None
    timeout_s: float | None
    lease: Duration | None
    settings: GroupKeywords
    on_mismatch: OnMismatch | None = None
    """What to do when the group's settings differ."""

    @property
    def name(self) -> str:
        """The topic and group, for logs."""
        return f"{self.topic} ({self.group})"

    @property
    def is_for_plain_tasks(self) -> bool:
        """Whether ``retry`` is the only retry option, which does not apply to order keys."""
        order_options = (
            self.settings.get(f"order_{option}") for option in ("retry", "attempts", "failure")
        )
        return self.retry is not None and all(value is None for value in order_options)

    def unfit(self, delivery: Delivery) -> BadRequest | None:
        """Return why the handler cannot work on the delivery; None: it can."""
        if not self.is_for_plain_tasks or delivery.order_key is None:
            return None
        return BadRequest(
            f"the handler of {self.name} has retry, which does not apply to order keys, but task"
            f" {delivery.id} has an order key: add order_retry, order_attempts or order_failure,"
            " or omit retry"
        )

    def limited(self, concurrency: int | None) -> Route:
        """Return the route with another concurrency; None keeps its own."""
        if concurrency is None:
            return self
        return replace(self, concurrency=checked_concurrency(concurrency))


def route(handler: Handler, topic: str, **options: Unpack[HandlerKeywords]) -> Route:
    """Return a checked route. Raise BadRequest naming field and value."""
    check_handler(handler)
    checker = TaskChecker()
    concurrency = checked_concurrency(options.get("concurrency", CONCURRENCY_DEFAULT))
    prefetch, retry, timeout = options.get("prefetch"), options.get("retry"), options.get("timeout")
    if prefetch is not None:
        integer(prefetch, "prefetch", 1, checker.limits.prefetch_max)
    if retry is not None:
        policy_wire(retry, "retry")
    lease = options.get("lease")
    if lease is not None:
        duration_ms(lease, "lease")
    group_options = GroupKeywords.__optional_keys__
    settings = cast(
        "GroupKeywords", {n: value for n, value in options.items() if n in group_options}
    )
    GroupFields.of_keywords(settings)
    return Route(
        handler,
        _is_async(handler),
        checker.name(topic, "topic"),
        checker.name(options.get("group", "default"), "group"),
        concurrency,
        prefetch,
        retry,
        None if timeout is None else seconds(timeout, "timeout"),
        lease,
        settings,
    )


AWAITED = frozenset(("ack", "nack", "reject", "release", "extend", "snooze"))
"""Verbs of a delivery that have no effect unless they are awaited."""


def check_handler(handler: Any) -> None:
    """Raise BadRequest if the handler cannot be called with one delivery, or is a plain function
    that calls an awaitable verb: its delivery would be acked regardless of that call."""
    check_function(handler, "a handler", " of a delivery")
    name = getattr(handler, "__qualname__", None) or repr(handler)
    try:
        inspect.signature(handler).bind(None)
    except TypeError as problem:
        raise BadRequest(
            f"{name} cannot be called with one argument, the delivery: {problem}"
        ) from None
    except ValueError:  # the signature of a builtin may be unknown
        return
    if not _is_async(handler):
        check_awaits(handler, name)


def check_function(handler: Any, what: str, detail: str = "") -> None:
    """Raise BadRequest if the handler is not a function that runs to its end when it is called."""
    if not callable(handler):
        raise BadRequest(f"{what} must be a function{detail}, not {shown(handler)}")
    name = getattr(handler, "__qualname__", None) or repr(handler)
    if isinstance(handler, type):
        raise BadRequest(f"{what} must be a function{detail}, not the class {name}")
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise BadRequest(f"{name} must not be a generator: a handler must run in one call")


def check_awaits(handler: Any, name: str) -> None:
    """Raise BadRequest for a plain function that calls a verb that must be awaited."""
    if (verb := _awaited_verb(handler)) is not None:
        raise BadRequest(
            f"{name} is a plain function and calls delivery.{verb}, which must be awaited: write"
            f" async def {name}, raise Reject, RetryLater or Snooze, or return, which acks"
        )


def _awaited_verb(function: Any) -> str | None:
    """Return the first verb of AWAITED that the function calls on its first argument without using
    the result. None: it calls none, or its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):
        return None
    names = [arg.arg for arg in (*definition.args.posonlyargs, *definition.args.args)]
    delivery_names = names[int(inspect.ismethod(function)) :][:1]
    for node in ast.walk(definition):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), verb))):
                if [name] == delivery_names and verb in AWAITED:
                    return verb
    return None


def _is_async(handler: Handler) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004  # objects with async __call__
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)


def checked_concurrency(value: Any) -> int:
    return integer(value, "concurrency", 1, CONCURRENCY_MAX)


def seconds(value: Any, field: str, *, zero: bool = False) -> float:
    """Convert a duration to seconds. Raise BadRequest."""
    value_ms = duration_ms(value, field)
    if value_ms <= 0 and not zero:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return value_ms / 1000


LOGGER = logging.getLogger("tickwheel.worker")
LOGGER.addHandler(logging.NullHandler())  # silent unless the application configures logging


class Outcome(NamedTuple):
    """How to settle a delivery after its handler."""

    verb: str
    reason: str | None = None
    delay: Duration | None = None


CANCELLED_S = 1.0
"""Maximum seconds that a runner cancelled from outside waits for the release of its delivery."""
ACK = Outcome("ack")
NOTHING = Outcome("nothing")


class Attempt(Protocol):
    """One attempt, observed from outside the handler."""

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """Note that the handler has ended, by ``error`` if it raised one. ``outcome`` is the verb
        that settles the delivery ("nothing": it stays unsettled), or "settled" if the handler
        settled it."""


class Observer(Protocol):
    """Observes attempts, for example ``tickwheel.otel``. Its errors are logged and change
    nothing."""

    def begin(self, delivery: Delivery) -> Attempt | None:
        """Begin an attempt, in the task of its handler; None: do not observe it."""


OBSERVERS: list[Observer] = []
"""Observers of all workers of this process."""


class Runner:
    """A task that works on one delivery after the other: it runs the handler, watches and settles.

    A runner is reused, because a task costs more than a short handler. It is not reused when the
    last handler left something in it: a cancellation, context variables, a running thread.
    """

    def __init__(
        self,
        route: Route,
        threads: Threads,
        leases: Leases,
        delivery: Delivery,
        settled: Callable[[Runner], Delivery | None],
        observers: Sequence[Observer] = (),
        on_settled: OnSettled | None = None,
        exits: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        """``settled`` returns the next delivery after each one, or None: the runner then waits for
        ``go_on``. ``exits`` is called with a handler's SystemExit or KeyboardInterrupt."""
        self.delivery: Delivery | None = delivery
        """The current delivery."""
        self.until_s = delivery.lease_until_s
        """The delivery's ``lease_until_s`` when it was received."""
        self.is_handling = False
        """Whether the handler has begun and not ended."""
        self.is_settling = False
        """Whether the handler has ended."""
        self.unable: Undecodable | None = None
        """Why this client cannot unpack the body; another client may be able to."""
        self.call: Call | None = None
        """The call of a handler that is a plain function; it may outlive this runner."""
        self._route = route
        self._threads = threads
        self._leases = leases
        self._settled = settled
        self._observers = observers
        self._on_settled = on_settled
        self._exits = exits
        self._limit: asyncio.Timeout | None = None
        self._lost: str | None = None
        self._stopped = False
        self._cancellation: asyncio.CancelledError | None = None
        """A cancellation from outside, such as the end of the event loop."""
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[Delivery | None] = self._loop.create_future()
        self.task = self._loop.create_task(self._run(), name=route.name)

    def go_on(self, delivery: Delivery | None) -> bool:
        """Continue with a delivery after a wait; None: end. Return False if the task was cancelled
        in the meantime."""
        if self._next.done():
            return False
        self.delivery = delivery
        if delivery is not None:  # at once: the runner's task continues later
            self.until_s = delivery.lease_until_s
        self._next.set_result(delivery)
        return True

    def stop(self) -> None:
        """Cancel the handler; its delivery is released, without a failure."""
        if not self._stopped:
            self._stopped = True
            if self.is_handling:
                self.task.cancel()

    def lose(self, word: str) -> None:
        """Cancel the handler because its lease was lost: another consumer may have the task."""
        self._lost = word
        LOGGER.warning("%r lost its lease (%s) and will not be acked", self.delivery, word)
        if self.is_handling:
            self.task.cancel()

    async def _run(self) -> None:
        before = contextvars.copy_context()
        delivery = self.delivery
        while delivery is not None:
            self.until_s = delivery.lease_until_s
            await self._work_on(delivery)
            if self._is_spent(before):
                return
            self.is_settling = False
            self.delivery = delivery = self._settled(self)
            if delivery is None:
                self._next = self._loop.create_future()
                delivery = await self._next

    async def _work_on(self, delivery: Delivery) -> None:
        outcome, route = ACK, self._route
        attempts: Sequence[Attempt] = ()
        began_s = 0.0 if self._on_settled is None else self._loop.time()
        failure: BaseException | None = None
        self.is_handling = True
        try:
            if self._stopped or self._lost is not None or route.unfit(delivery) is not None:
                # Before the handler began.
                outcome = Outcome("release")
            elif self._observers or OBSERVERS:
                attempts = self._observed(delivery)
                await self._handle(delivery)
            elif route.is_async and route.timeout_s is None and delivery.encoding is None:
                _check_ended(await cast("Any", route.handler(delivery)))
            else:
                await self._handle(delivery)
        except GeneratorExit:
            if not self._is_running:
                raise  # the loop no longer runs: nothing can be awaited
            outcome = Outcome("nack", "GeneratorExit")
        except BaseException as error:
            # If an exit left this task, it would end the event loop and abandon other deliveries.
            failure, outcome = error, self._outcome_of(error)
            self._exit_by(error)
        finally:
            self.is_handling, self.is_settling = False, True
            self._leases.drop(delivery)
            for attempt in reversed(attempts):
                self._end(attempt, delivery, outcome, failure)
        word = "settled" if self._lost is None else "lost"
        if self._lost is None and not delivery.settled:
            word = await self._settle_as(delivery, outcome)
        if self._on_settled is not None:
            self._report(self._on_settled, delivery, word, began_s, failure)
        failure = None  # its traceback refers to this frame
        if self._cancellation is not None:
            raise self._cancellation

    async def _settle_as(self, delivery: Delivery, outcome: Outcome) -> str:
        """Settle the delivery. Return the outcome's word for ``on_settled``."""
        try:
            if outcome is ACK:
                delivery.ack_unwatched()
                return "acked"
            if self._cancellation is None:
                return await self._settle(delivery, outcome)
            async with asyncio.timeout(CANCELLED_S):
                return await self._settle(delivery, outcome)
        except TickwheelError as error:  # the lease ends by itself, and the task is delivered again
            LOGGER.warning("%r was not settled: %s: %s", delivery, error.code, error.message)
        except Exception as bug:
            LOGGER.error("%r: unexpected %r", delivery, bug, exc_info=bug)
        return "unsettled"

    @property
    def _is_running(self) -> bool:
        """Whether the event loop runs this code."""
        try:
            return asyncio.current_task() is self.task
        except RuntimeError:
            return False

    def _observed(self, delivery: Delivery) -> list[Attempt]:
        """Begin the attempt at all observers; it ends in reverse order."""
        attempts = []
        for observer in (*OBSERVERS, *self._observers):
            try:
                attempt = observer.begin(delivery)
            except Exception as bug:
                LOGGER.error("%r: the observer failed: %r", delivery, bug, exc_info=bug)
            else:
                attempts += [] if attempt is None else [attempt]
        return attempts

    @staticmethod
    def _end(
        attempt: Attempt, delivery: Delivery, outcome: Outcome, failure: BaseException | None
    ) -> None:
        try:
            attempt.end("settled" if delivery.settled else outcome.verb, failure)
        except Exception as bug:
            LOGGER.error("%r: the observer failed: %r", delivery, bug, exc_info=bug)

    def _report(self, on_settled: OnSettled, delivery: Delivery, *event: Any) -> None:
        try:
            on_settled(delivery, *event)
        except BaseException as bug:
            LOGGER.error("%r: on_settled failed: %r", delivery, bug, exc_info=bug)
            self._exit_by(bug)

    def _exit_by(self, error: BaseException) -> None:
        """Ask the worker to end if the exception is a SystemExit or KeyboardInterrupt."""
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            LOGGER.error("%r: the handler stopped the worker with %r", self.delivery, error)
            self._exits(error)

    def _is_spent(self, before: contextvars.Context) -> bool:
        """Return whether the last handler left something in the task."""
        if self._stopped or self._lost is not None or self.task.cancelling():
            return True
        if self.call is not None and not self.call.ended.done():
            return True
        try:
            return contextvars.copy_context() != before
        except Exception:  # values that cannot be compared are new
            return True

    # --- the handler ----------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        """Run the handler, in a thread or with a time limit."""
        self._limit = None
        if not self._route.is_async:
            await self._call(delivery)
        else:
            async with asyncio.timeout(self._route.timeout_s) as self._limit:
                if delivery.encoding is not None:
                    await unpack_aside(delivery)
                _check_ended(await cast("Any", self._route.handler(delivery)))

    async def _call(self, delivery: Delivery) -> None:
        """Wait until the function has returned, regardless of the time limit: if its task were
        released earlier, two consumers would work on it at the same time."""
        self.call = self._threads.start(self._route.handler, delivery)
        timeout_s = self._route.timeout_s
        if timeout_s is not None:
            done, _ = await asyncio.wait((self.call.result,), timeout=timeout_s)
            if not done:
                LOGGER.warning(
                    "%r is taking longer than %g s; a function in a thread cannot be stopped, so"
                    " its task stays here until it returns", delivery, timeout_s,
                )  # fmt: skip
        _check_ended(await self.call.result)

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return how to settle the delivery after an exception. The exception may be malformed: a
        subclass of Reject may lack its reason."""
        try:
            return self._outcome(error)
        except Exception as bug:
            LOGGER.error("%r: unexpected %r", self.delivery, bug, exc_info=bug)
            return Outcome("nack", type(error).__name__)

    def _outcome(self, error: BaseException) -> Outcome:
        """Return how to settle the delivery after an exception."""
        delivery, limit = self.delivery, self._limit
        if isinstance(error, asyncio.CancelledError):
            return self._cancelled(error)
        assert delivery is not None, "the runner has a delivery"
        if isinstance(error, BadBody):
            return Outcome("reject", f"{type(error).__name__}: {text_of(error)}")
        if isinstance(error, Undecodable):
            self.unable = error
            return Outcome("release")
        is_late = limit is not None and limit.expired() and isinstance(error, TimeoutError)
        if delivery.encrypted_with is not None and not is_late:
            return self._outcome_of_encrypted(error, delivery)
        if isinstance(error, Reject):
            LOGGER.info("%r was rejected: %s", delivery, _first_line(text_of(error)))
            return Outcome("reject", _reason_text(error.reason))
        if isinstance(error, Snooze):
            LOGGER.info("%r was postponed: %s", delivery, _first_line(text_of(error)))
            return Outcome("snooze", text_of(error), error.delay)
        if isinstance(error, RetryLater):
            LOGGER.info("%r will be delivered again: %s", delivery, _first_line(text_of(error)))
            return Outcome("nack", _reason_text(error.reason), error.delay)
        if is_late:
            reason = f"timed out after {self._route.timeout_s:g} s"
            LOGGER.warning("%r %s", delivery, reason)
        else:
            reason = reason_of(error, delivery)
            LOGGER.warning("%r failed: %s", delivery, _first_line(reason), exc_info=error)
        return Outcome("nack", reason)

    def _outcome_of_encrypted(self, error: BaseException, delivery: Delivery) -> Outcome:
        """Return how to settle an encrypted task after an exception. The log and the daemon receive
        only the types of exceptions and their lines, since texts may quote the body."""
        reason = reason_of(error, delivery)
        LOGGER.warning("%r failed (encrypted, so without texts): %s", delivery, reason)
        if isinstance(error, Unfit):
            return Outcome("reject", f"{type(error).__name__}: {error.place}")
        if isinstance(error, Reject):
            return Outcome("reject", reason)
        if isinstance(error, Snooze):
            return Outcome("snooze", text_of(error), error.delay)
        return Outcome("nack", reason, error.delay if isinstance(error, RetryLater) else None)

    def _cancelled(self, error: asyncio.CancelledError) -> Outcome:
        if self._lost is not None:
            return NOTHING
        if self._stopped:
            self.task.uncancel()
            if self.call is not None and not self.call.ended.done():
                LOGGER.warning("%r still runs in a thread; its lease will expire", self.delivery)
                return NOTHING
            LOGGER.warning("%r was stopped before it was done", self.delivery)
            return Outcome("release")
        if self.task.cancelling():  # cancelled from outside: the event loop ends
            self.task.uncancel()
            self._cancellation = error
            is_ended = self.call is None or self.call.ended.done()
            return Outcome("release") if is_ended else NOTHING
        LOGGER.warning("%r failed: the handler raised CancelledError", self.delivery)
        assert self.delivery is not None, "the runner has a delivery"
        return Outcome("nack", reason_of(error, self.delivery))

    # --- settlement -----------------------------------------------------------------------------

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> str:
        """Settle the delivery. Return the daemon's answer."""
        verb, reason, delay = outcome
        word: str = "unsettled"
        if verb == "nack":
            word = await delivery.nack(delay, reason)
        elif verb == "snooze" and delay is not None:
            word = await delivery.snooze(delay)
            if word == "too_often":
                word = await delivery.nack(delay, f"postponed too often; {reason}")
        elif verb == "reject":
            word = await delivery.reject(reason)
        elif verb == "release":
            word = await delivery.release()
        if word == "dead":
            LOGGER.error("%r is a dead letter: %s", delivery, _first_line(reason or ""))
        else:
            LOGGER.debug("%r: %s", delivery, word)
        return word


LINE_CHARACTERS_MAX = 1000
"""Maximum characters of a reason in a log line."""


def _first_line(reason: str) -> str:
    return reason[:LINE_CHARACTERS_MAX].partition("\n")[0]


def _reason_text(reason: object) -> str | None:
    """Return the reason of an exception as text; it may be any object."""
    return None if reason is None else text_of(reason)


def _check_ended(returned: Any) -> None:
    """Raise TypeError for a coroutine: its work is not done, and an ack would lose the task."""
    if returned is not None and inspect.iscoroutine(returned):
        name = returned.__qualname__
        returned.close()
        raise TypeError(f"the handler returned the coroutine {name}, which was never awaited")


class Reject(Exception):
    """A permanent failure: the task becomes a dead letter at once, even with retries left."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "rejected")
        self.reason = reason


class Unfit(Reject):
    """The arguments of a typed task do not fit its function."""

    def __init__(self, place: str, why: str, *, below: str = "") -> None:
        """``place``: a path in the arguments; ``below`` may contain names from their values."""
        super().__init__(f"{place}{below}: {why}")
        self.place = place


class RetryLater(Exception):
    """Deliver the task again after ``delay`` (seconds, a timedelta or text), as one of its
    retries."""

    def __init__(self, delay: Duration, reason: str | None = None) -> None:
        duration_ms(delay, "delay")  # an invalid delay fails here, not in the worker
        super().__init__(reason or f"retry after {delay}")
        self.delay = delay
        self.reason = reason


class Snooze(Exception):
    """Deliver the task again after ``delay`` (seconds, a timedelta or text), not counted as a
    failure. Beyond the daemon's limit of postponements it acts like ``RetryLater``."""

    def __init__(self, delay: Duration) -> None:
        duration_ms(delay, "delay")  # an invalid delay fails here, not in the worker
        super().__init__(f"snoozed for {delay}")
        self.delay = delay


class Call:
    """One call of a function in a thread. ``ended`` is set at its return and never cancelled."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._function = function
        self._arguments = arguments
        self.result: asyncio.Future[Any] = self._loop.create_future()
        """The function's result or exception; a caller that awaits this may be cancelled."""
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def run(self, before_end: Callable[[], object]) -> None:
        """Run the function in its thread. ``before_end`` is called after it has returned, and
        before ``result`` and ``ended`` are set."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._context.run(self._function, *self._arguments)
        except BaseException as problem:
            error = problem
        before_end()
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(self._finish, value, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self.ended.set_result(None)
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, (Exception, asyncio.CancelledError)):
            self.result.set_exception(_awaitable(error))
            self.result.exception()  # mark as retrieved: the runner may have ended
        else:  # SystemExit in a thread ends the thread's call, not the program
            self.result.set_exception(RuntimeError(f"{type(error).__name__}: {text_of(error)}"))
            self.result.exception()


class Threads:
    """Runs calls in threads that never keep the process alive; ``stop`` ends idle threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def start(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Call a function in a thread, with the current context variables."""
        call = Call(function, arguments)
        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return call

    def stop(self) -> None:
        """End each thread after its call."""
        for _ in range(self._count):
            self._calls.put(None)
        self._count = 0

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self._idle.release)
            del call


def _awaitable(error: BaseException) -> BaseException:
    """Convert an error that a future cannot hold: StopIteration or a cancellation."""
    if isinstance(error, (StopIteration, asyncio.CancelledError)):
        return RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    return error
