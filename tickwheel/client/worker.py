"""Workers: handlers by topic and group, run as tasks come due.

    worker = Worker(Client())

    @worker.on("orders.close", group="billing", concurrency=32, timeout=30.0)
    async def close(delivery: Delivery) -> None:
        ...                                   # return: acked; exception: retried

    await worker.run()                        # or: tickwheel work module:worker

``Worker`` runs the lanes; a lane is one handler's subscription. ``jobs.py`` checks handlers and
runs one delivery in a handler.

Invariants: after ``stop`` no handler is started; ``run`` returns when every handler has ended or
was abandoned and every settlement is answered, at most a few seconds after ``grace``. A lane runs
at most ``concurrency`` handlers and takes a delivery only when a handler can start. The other
deliveries stay in the subscription, which extends their leases and releases them at the end. The
first SIGTERM or SIGINT stops a running worker, the second ends the grace.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from tickwheel.api.times import Duration
from tickwheel.client.client import Client
from tickwheel.client.connection import Signal
from tickwheel.client.jobs import (
    LOGGER,
    Handler,
    HandlerKeywords,
    OnSettled,
    Reject,
    RetryLater,
    Route,
    Runner,
    Snooze,
    Threads,
    route,
    seconds,
)
from tickwheel.client.subscription import Mismatch, OnMismatch, checked_on_mismatch, log_new_group
from tickwheel.client.tasks import refuse_unknown, spelled_out
from tickwheel.client.typed import Definition, Format, TypedArguments, Typing, Upcaster, define
from tickwheel.errors import BadRequest, ClientClosed, NotActive, TickwheelError, Unreachable, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tickwheel.client.delivery import Delivery
    from tickwheel.client.jobs import Observer
    from tickwheel.client.leases import InHand, Leases


__all__ = ["Handler", "Reject", "RetryLater", "Snooze", "Worker"]

AHEAD_S = 0.005
"""Seconds that a delivery is expected to wait here for a handler."""
AHEAD_MAX = 256
CHANGE = 1.25
"""Minimum factor between the current and the wanted prefetch for a request to change it."""


class Ahead:
    """The prefetch of one lane, between ``least`` and ``most``, by how fast its handlers end."""

    def __init__(self, least: int, most: int, now_s: float) -> None:
        self._least, self._most = least, most
        self.prefetch = least
        self._ended = 0
        """Handlers that have ended since the last measurement."""
        self._since_s = now_s

    @property
    def is_ahead(self) -> bool:
        """Whether the lane asks for more deliveries than ``least``."""
        return self.prefetch > self._least

    def ended(self, now_s: float) -> bool:
        """Count a handler that ended. Return whether ``prefetch`` has changed."""
        self._ended += 1
        return self._ended >= self.prefetch and self.look(now_s)

    def look(self, now_s: float) -> bool:
        """Compute ``prefetch`` from the rate since the last measurement. Return whether it
        changed."""
        rate = self._ended / max(now_s - self._since_s, 1e-6)
        self._ended, self._since_s = 0, now_s
        wanted = min(self._most, self._least + int(rate * AHEAD_S))
        if self.prefetch / CHANGE < wanted < self.prefetch * CHANGE:
            return False
        changed = wanted != self.prefetch
        self.prefetch = wanted
        return changed


GRACE_S = 30.0
WAIT_S = 0.5
"""Seconds between two attempts to find a daemon; each also takes the client's connect_timeout."""

H = TypeVar("H", bound=Handler)
A = TypeVar("A", bound=TypedArguments[...])


class Worker:
    """Runs handlers as tasks come due.

    A handler is ``async def`` (or a plain function, which runs in a thread) and receives the
    ``Delivery``. The end of the handler settles the delivery:

    ============================  ==========================================================
    it returns                    ack
    it raises an exception        nack with reason "Type: text"; the retry policy decides
    ``raise RetryLater(delay)``   nack with this delay
    ``raise Snooze(delay)``       postponed; not counted as a failure
    ``raise Reject("why")``       dead letter at once
    it exceeds ``timeout``        cancelled; nack, "timed out after 30 s"
    it does so in a thread        the task stays here until the function returns
    its lease is lost             cancelled; not settled: another consumer may have the task
    it settled the delivery       nothing more
    ============================  ==========================================================

    Handlers may run one after the other in one asyncio task, but never share context variables.
    The worker extends the lease while a handler runs. A function in a thread cannot be stopped:
    when it exceeds ``timeout``, the worker logs that and keeps the lease, so that the task never
    runs twice at the same time.

    The worker connects a ``client`` that is not connected and closes it at the end; it leaves a
    connected client open. ``grace``: seconds that running handlers have after ``stop``.
    ``signals``: whether SIGTERM and SIGINT stop the worker (the second one ends the grace). A
    handler that raises SystemExit or KeyboardInterrupt has failed; the worker releases all other
    deliveries at once, and ``run`` raises the exception.
    ``on_settled`` is called after each delivery with the delivery, its outcome, the start of its
    handler by the event loop's clock, and the handler's exception or None. The outcome is the
    word that Delivery's method returned, or "settled" (by the handler), "lost" (its lease), or
    "unsettled" (the task will be delivered again). ``on_mismatch``: what to do when a handler names
    settings (``retry``, ``tags``, ``where``, ``order_...``, ``fair_by``, …) that differ from those
    of its group.
    "refuse": the worker ends with Conflict. "warn": it uses the group's settings, and logs the
    difference and the command that resolves it. "update": at its start it changes the group, which
    needs the right to operate; on a later connection it warns. The default is "warn" if only
    ``retry`` differs, and "refuse" otherwise.
    """

    def __init__(
        self,
        client: Client,
        *,
        grace: Duration = GRACE_S,
        signals: bool = True,
        on_settled: OnSettled | None = None,
        on_mismatch: OnMismatch | None = None,
    ) -> None:
        if not isinstance(client, Client):
            raise BadRequest(f"client must be a Client, not {shown(client)}")
        self._on_mismatch = checked_on_mismatch(on_mismatch)
        self._client = client
        self._grace_s = seconds(grace, "grace", zero=True)
        self._signals = signals
        self.on_settled = on_settled
        """Called after each delivery; set before ``run``."""
        self._routes: list[Route] = []
        self.observers: list[Observer] = []
        """Called before and after each attempt (``tickwheel.client.jobs.Observer``); set before
        ``run``."""
        self._stopping = False
        self._lanes: list[Lane] = []
        self._run_by: Worker | None = None
        """The worker of ``joined`` that runs these handlers now."""
        self._sources: tuple[Worker, ...] = ()
        """The workers whose handlers these are, if ``joined`` made this worker."""
        self._exit: BaseException | None = None
        """The SystemExit or KeyboardInterrupt of a handler that ``run`` raises at its end."""
        self._stop_requested: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None
        self.started = asyncio.Event()
        """Set once all handlers are subscribed."""

    @spelled_out(HandlerKeywords)
    def on(self, topic: str, **options: Unpack[HandlerKeywords]) -> Callable[[H], H]:
        """Register a handler for ``topic``. For ``options`` see HandlerKeywords."""
        refuse_unknown(options, HandlerKeywords, "Worker.on")
        if self._stop_requested is not None:
            raise BadRequest("the worker is already running; register handlers before run")

        def register(handler: H) -> H:
            new = replace(route(handler, topic, **options), on_mismatch=self._on_mismatch)
            if any((r.topic, r.group) == (new.topic, new.group) for r in self._routes):
                raise BadRequest(f"topic {topic!r}, group {new.group!r} already has a handler")
            self._routes.append(new)
            return handler

        return register

    @spelled_out(HandlerKeywords)
    def task(
        self,
        topic: str,
        *,
        version: int = 1,
        upcasters: Mapping[int, Upcaster] | None = None,
        encoding: Format = "json",
        **options: Unpack[HandlerKeywords],
    ) -> Typing:
        """Turn a function into a ``TypedTask`` and register it: ``@worker.task("orders.close")``.

        The first four parameters are those of ``tickwheel.task``, ``options`` those of ``on``."""
        refuse_unknown(options, HandlerKeywords, "Worker.task")

        def decorate(function: Callable[..., Any]) -> Any:
            names = sys._getframe(1).f_locals  # for annotations that are local to the caller
            typed = define(function, names, topic, version, upcasters, encoding)
            return self.register(typed, **options)

        return cast("Typing", decorate)

    @spelled_out(HandlerKeywords)
    def register(self, task: A, **options: Unpack[HandlerKeywords]) -> A:
        """Register a typed task that ``tickwheel.task`` made, and return it. Its ``enqueue`` uses
        this worker's client from now on, unless another worker registered it first. ``options`` are
        those of ``on``."""
        refuse_unknown(options, HandlerKeywords, "Worker.register")
        definition = getattr(task, "_definition", None)
        if not isinstance(definition, Definition):
            raise BadRequest(f"task must be a typed task, not {shown(task)}")
        self.on(definition.topic, **options)(definition.handler)
        if definition.client_of_worker is None:
            definition.client_of_worker = self._enqueuing_client
        return task

    def _enqueuing_client(self) -> Client:
        """Return the client that enqueues typed tasks."""
        return (self._run_by or self)._client

    @contextmanager
    def _running_in(self, merged: Worker) -> Iterator[None]:
        """Let another worker run this worker's handlers during the block. It enqueues the typed
        tasks as well."""
        before, self._run_by = self._run_by, merged
        try:
            yield
        finally:
            self._run_by, self.started = before, asyncio.Event()

    @property
    def _own_lanes(self) -> list[Lane]:
        names = {(route.topic, route.group) for route in self._routes}
        lanes = (self._run_by or self)._lanes
        return [lane for lane in lanes if (lane.route.topic, lane.route.group) in names]

    @property
    def client(self) -> Client:
        """The worker's client."""
        return self._client

    @property
    def in_hand(self) -> list[Delivery]:
        """The deliveries with a running handler."""
        return [delivery for lane in self._own_lanes for delivery, *_ in lane._in_hand()]

    @property
    def busy(self) -> list[str]:
        """The topics and groups with a handler that runs or whose delivery is being settled."""
        return [lane.route.name for lane in self._own_lanes if lane.running]

    def stop(self) -> None:
        """Start no more handlers and let running ones finish. Returns at once. Can be called at any
        time from the event loop's thread."""
        if self._run_by is not None:
            self._run_by.stop()
            return
        self._stopping = True
        for lane in self._lanes:
            lane.stop()
        if self._stop_requested is not None:
            self._stop_requested.set()

    async def run(
        self, *, concurrency: int | None = None, grace: Duration | None = None, wait: bool = False
    ) -> None:
        """Work until ``stop`` or a signal. A worker runs once. ``concurrency`` and ``grace``
        replace the values of the handlers and the worker. ``wait``: keep trying until a daemon
        answers.

        Raise the daemon's refusal of a subscription, at the start or later (NotFound: the group
        was deleted), and, without ``wait``, Unreachable when there is no connection at the start.
        """
        if self._stop_requested is not None:
            raise BadRequest("a worker runs once; create a new one")
        if not self._routes:
            raise BadRequest("the worker has no handlers: register some with @worker.on(topic)")
        routes = [route.limited(concurrency) for route in self._routes]
        if grace is not None:
            self._grace_s = seconds(grace, "grace", zero=True)
        self._stop_requested, self._hurry = asyncio.Event(), asyncio.Event()
        if self._stopping:
            return
        with ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source._running_in(self))
            owns_connection = self._client._state == "new"
            if owns_connection and not await self._connect(wait=wait):
                return
            try:
                watched = on_signals(self.stop, self._hurry.set) if self._signals else nullcontext()
                with watched:
                    await self._work(routes)
            finally:
                if owns_connection:
                    await self._client.close()
        if self._exit is not None:
            raise self._exit

    def _exits(self, error: BaseException) -> None:
        """End the worker with this exception, without grace."""
        self._exit = self._exit or error
        self.stop()
        if self._hurry is not None:
            self._hurry.set()

    async def _connect(self, *, wait: bool) -> bool:
        """Connect. Return False if the worker was stopped first."""
        has_warned = False
        while not self._stopping:
            try:
                await self._client.connect()
                return True
            except (Unreachable, NotActive) as error:
                if not wait:
                    raise
                if not has_warned:
                    LOGGER.warning("waiting for a daemon: %s: %s", error.code, error.message)
                    has_warned = True
            assert self._stop_requested is not None, "the worker runs"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), WAIT_S)
        return False

    async def _work(self, routes: Iterable[Route]) -> None:
        threads = Threads("tickwheel-worker")
        owners = {(r.topic, r.group): source for source in self._sources for r in source._routes}
        self._lanes = lanes = list[Lane]()
        for r in routes:
            owner = owners.get((r.topic, r.group), self)
            listeners = tuple(owner.observers), owner.on_settled, self._exits
            lanes.append(Lane(self._client, r, threads, *listeners))
        try:
            await _all(lane.start() for lane in lanes)
            for lane in lanes:
                LOGGER.info("working on %s, %d at a time", lane.route.name, lane.route.concurrency)
            for worker in (self, *self._sources):
                worker.started.set()
            await self._read(lanes)
            await self._wind_down(lanes)
        finally:
            # Also after a cancellation or a failed start, without any grace.
            await _all((lane.close() for lane in lanes), quiet=True)
            await _all((lane.finish() for lane in lanes), quiet=True)
            threads.stop()

    async def _read(self, lanes: list[Lane]) -> None:
        """Read deliveries until ``stop``. Raise a lane's error after the grace."""
        assert self._stop_requested is not None, "the worker runs"
        readers = [asyncio.create_task(lane.read()) for lane in lanes]
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((*readers, stopping), return_when=asyncio.FIRST_COMPLETED)
            failed = [r.exception() for r in readers if r.done() and not r.cancelled()]
        finally:
            for task in (*readers, stopping):
                task.cancel()
            await asyncio.gather(*readers, stopping, return_exceptions=True)
        for error in filter(None, failed):
            LOGGER.error("stopping: %s", error)
            await self._wind_down(lanes)
            raise error

    async def _wind_down(self, lanes: list[Lane]) -> None:
        """Take no more deliveries, release those not started, and wait for running handlers."""
        assert self._hurry is not None, "the worker runs"
        running = sum(lane.running for lane in lanes)
        LOGGER.info("stopping; handlers running: %d; grace period: %g s", running, self._grace_s)
        closing = asyncio.create_task(_all((lane.close() for lane in lanes), quiet=True))
        drained = asyncio.create_task(_all(lane.drained() for lane in lanes))
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait(
                (drained, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not drained.done():
                left = sum(lane.running for lane in lanes)
                LOGGER.warning("the grace period is over; handlers cancelled: %d", left)
            await closing
        finally:
            for task in (closing, drained, hurry):
                task.cancel()
            await asyncio.gather(closing, drained, hurry, return_exceptions=True)


def joined(
    client: Client,
    workers: Iterable[Worker],
    *,
    signals: bool,
    adapt: Callable[[Route], Route] = lambda route: route,
) -> Worker:
    """Return one worker on another client with the handlers of all ``workers``. While it runs,
    their typed tasks are enqueued with this client, and ``stop`` of any of them stops it. ``adapt``
    returns the route to use for a handler. Raise BadRequest when two handlers have the same topic
    and group."""
    workers = list(workers)
    merged = Worker(client, grace=max(w._grace_s for w in workers), signals=signals)
    merged._sources = tuple(workers)
    for r in (r for worker in workers for r in worker._routes):
        if any((m.topic, m.group) == (r.topic, r.group) for m in merged._routes):
            raise BadRequest(f"topic {r.topic!r}, group {r.group!r} has two handlers")
        merged._routes.append(adapt(r))
    return merged


async def _all(works: Iterable[Any], *, quiet: bool = False) -> None:
    """Run all coroutines concurrently to their ends. Raise the first error, unless ``quiet``."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not (quiet and isinstance(end, TickwheelError)):
            raise end


ABANDON_S = 5.0
"""Maximum seconds that a cancelled handler has to end."""
WAITING_MAX = 256
"""Maximum idle runners of a lane."""
LOOK_S = 0.5
"""Seconds between two measurements of a lane that is ahead."""


class Lane:
    """One route at work. Call ``start``, then ``read`` until an error or a cancellation, then
    ``close`` and ``finish``."""

    def __init__(
        self,
        client: Client,
        route: Route,
        threads: Threads,
        observers: Sequence[Observer] = (),
        on_settled: OnSettled | None = None,
        exits: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self.route = route
        self._client = client
        self._on_settled = on_settled
        self._exits = exits
        self._threads = threads
        self._observers = observers
        self._free = route.concurrency
        """Handlers that can still be started."""
        self._freed = Signal()
        self._runners: set[Runner] = set()
        self._waiting: list[Runner] = []
        """The idle runners."""
        self._loop = asyncio.get_running_loop()
        prefetch_max = client.limits.prefetch_max
        self._ahead = Ahead(
            route.prefetch or min(route.concurrency, prefetch_max),
            route.prefetch or min(route.concurrency + AHEAD_MAX, prefetch_max),
            self._loop.time(),
        )
        self._stopping = self._closed = self._finished = False
        self._look_timer: asyncio.TimerHandle | None = None
        self._prefetch_request: asyncio.Task[None] | None = None
        self._subscription = client.subscribe(
            route.topic,
            group=route.group,
            prefetch=self._ahead.prefetch,
            lease=route.lease,
            retry=route.retry,
            **route.settings,
        )
        self._leases: Leases | None = None

    async def start(self) -> None:
        """Subscribe. Raise the daemon's refusal; ``on_mismatch`` decides when settings differ from
        the group's."""
        mismatch = Mismatch(self.route.on_mismatch, self._update_group)
        self._subscription.mismatch = mismatch
        subscription = await self._subscription.start()
        mismatch.has_started = True
        new = subscription.new_group
        if new is not None:
            log_new_group(LOGGER, new, subscription.topic, subscription.group)
        self._leases = subscription.keep_leases(self._in_hand)

    async def _update_group(self) -> None:
        """Give the group the settings that the handler names."""
        route = self.route
        settings: dict[str, Any] = {n: v for n, v in route.settings.items() if v is not None}
        if settings.keys() & {"tags", "where"}:  # together they are one filter
            settings = {"tags": None, "where": None} | settings
        if route.retry is not None:
            settings["retry"] = route.retry
        await self._client.configure(route.topic, route.group, **settings)

    async def read(self) -> None:
        """Pass each delivery to a runner, without end. Raise the error that ends the
        subscription."""
        async for delivery in self._subscription:
            self._begin(delivery)
            while self._free <= 0 or self._stopping:
                await self._freed.wait()
        raise ClientClosed("the client was closed while the worker was running")

    def _begin(self, delivery: Delivery) -> None:
        """Start a delivery in an idle runner or a new one. A stopped runner releases it."""
        assert self._leases is not None, "started"
        self._free -= 1
        self._leases.begin()
        while self._waiting:
            runner = self._waiting.pop()
            if runner.go_on(delivery):
                break
        else:
            runner = Runner(
                self.route, self._threads, self._leases, delivery, self._settled, self._observers,
                self._on_settled, self._exits,
            )  # fmt: skip
            self._runners.add(runner)
            runner.task.add_done_callback(partial(self._ended, runner))
        if self._stopping:
            runner.stop()

    def _settled(self, runner: Runner) -> Delivery | None:
        """Note that a delivery is settled. Return the next one for its runner, or None."""
        self._check_able(runner)
        if self._ahead.ended(self._loop.time()):
            self._request_prefetch()
        delivery = None if self._stopping else self._subscription.take_now()
        if delivery is None:
            self._release()
            if self._finished or len(self._waiting) >= WAITING_MAX:
                self._loop.call_soon(runner.go_on, None)
            else:
                self._waiting.append(runner)
        return delivery

    def _check_able(self, runner: Runner) -> None:
        """End the subscription if this worker cannot work on the runner's delivery."""
        if runner.delivery is not None and (why := self.route.unfit(runner.delivery)) is not None:
            self._subscription.ended(why)
        if runner.unable is not None:
            self._subscription.ended(runner.unable)

    def _ended(self, runner: Runner, task: asyncio.Task[None]) -> None:
        """Forget a runner whose task has ended."""
        self._runners.discard(runner)
        if runner.delivery is None:
            return
        self._check_able(runner)
        if not runner.is_settling and self._leases is not None:
            self._leases.drop(runner.delivery)
        if self._ahead.ended(self._loop.time()):
            self._request_prefetch()
        if runner.call is None or runner.call.ended.done():
            self._release()
        else:
            LOGGER.warning("%r: the function is still running in a thread", runner.delivery)
            runner.call.ended.add_done_callback(lambda _: self._release())
            self._freed.notify()
        if not task.cancelled() and (bug := task.exception()) is not None:
            LOGGER.error("%r: unexpected %r", runner.delivery, bug, exc_info=bug)

    def _release(self) -> None:
        """Allow one more handler to run."""
        self._free += 1
        self._freed.notify()

    def _in_hand(self) -> Iterator[InHand]:
        for runner in self._runners:
            if runner.delivery is not None and not runner.is_settling:
                yield runner.delivery, runner.until_s, runner.lose

    # --- prefetch -------------------------------------------------------------------------------

    def _request_prefetch(self) -> None:
        """Send a changed prefetch once the last request is answered."""
        if self._closed:
            return
        if self._prefetch_request is None or self._prefetch_request.done():
            self._prefetch_request = self._loop.create_task(self._send_prefetch())
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    async def _send_prefetch(self) -> None:
        sent = None
        with suppress(TickwheelError):  # a new connection sends the prefetch itself
            while sent != self._ahead.prefetch:
                sent = self._ahead.prefetch
                await self._subscription.set_prefetch(sent)
            if not self._ahead.is_ahead:
                await self._subscription.give_back()

    def _look(self) -> None:
        """Measure the rate again: when no handler ends, release waiting deliveries to others."""
        self._look_timer = None
        if self._ahead.look(self._loop.time()):
            self._request_prefetch()
        elif self._ahead.is_ahead:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    # --- the end --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of running handlers."""
        return sum(runner.delivery is not None for runner in self._runners)

    def stop(self) -> None:
        """Start no more handlers. Returns at once."""
        self._stopping = True
        for runner in self._runners:
            if not runner.is_handling:
                runner.stop()

    async def close(self) -> None:
        """Take no more deliveries, and release those not started."""
        self.stop()
        self._closed = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._prefetch_request is not None:
            self._prefetch_request.cancel()
        await self._subscription.close()

    async def drained(self) -> None:
        """Wait until no handler runs."""
        while self.running:
            await self._freed.wait()

    async def finish(self) -> None:
        """Cancel running handlers, release their deliveries, and wait for all acks."""
        for runner in self._runners:
            runner.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                await self.drained()
        for runner in self._runners:
            if runner.delivery is not None:
                LOGGER.error("%r: the handler ignored its cancellation", runner.delivery)
        self._finished = True
        for runner in self._waiting:
            runner.go_on(None)
        if self._waiting:
            await asyncio.wait([runner.task for runner in self._waiting])
        await self._client.flush_acks()
        if self._leases is not None:
            self._leases.close()


SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first signal during the block and ``hurry`` at the second, where the
    platform allows it."""
    loop = asyncio.get_running_loop()
    is_stopping = False

    def handle() -> None:
        nonlocal is_stopping
        (hurry if is_stopping else stop)()
        is_stopping = True

    previous = {}
    for number in SIGNALS:
        try:
            previous[number] = signal.getsignal(number)
            loop.add_signal_handler(number, handle)
        except (NotImplementedError, RuntimeError, ValueError):
            previous.pop(number, None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: not installed from Python
                signal.signal(number, handler)
