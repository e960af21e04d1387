"""A worker: handlers by topic and group, run as tasks come due.

    worker = Worker(Client())

    @worker.on("orders.close", group="billing", concurrency=32, timeout=30.0)
    async def close(delivery: Delivery) -> None:
        ...                                   # returned: acked; raised: retried

    await worker.run()                        # or: tickwheel work module:worker

``Worker`` is the whole, a lane one handler's subscription; ``jobs.py`` has what is handled how,
and one delivery in a handler.

Invariants: after ``stop`` nothing new is begun; ``run`` returns when every handler has ended or was
given up, and every settlement is answered; it takes at most ``grace`` seconds and a few more.
At most ``concurrency`` handlers of a lane run, and a delivery is taken only when one may start:
what waits is the subscription's, which keeps its lease up and gives it back at the end. The first
SIGTERM or SIGINT asks a running worker to stop, the second to hurry.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
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
from tickwheel.client.subscription import (
    Mismatch,
    OnMismatch,
    checked_on_mismatch,
    log_new_group,
)
from tickwheel.client.tasks import refuse_unknown, spelled_out
from tickwheel.client.typed import Definition, Format, TypedArguments, Typing, Upcaster, define
from tickwheel.errors import BadRequest, ClientClosed, NotActive, TickwheelError, Unreachable, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tickwheel.client.delivery import Delivery
    from tickwheel.client.jobs import Observer
    from tickwheel.client.leases import InHand, Leases


__all__ = ["Handler", "Reject", "RetryLater", "Snooze", "Worker"]

AHEAD_S = 0.005
"""About how long, in seconds, a delivery may wait here for a handler."""
AHEAD_MAX = 256
CHANGE = 1.25
"""By which factor the wanted prefetch must differ before it is asked for."""


class Ahead:
    """The prefetch of one lane: ``least`` to ``most``, by how fast its handlers end."""

    def __init__(self, least: int, most: int, now_s: float) -> None:
        self._least, self._most = least, most
        self.prefetch = least
        self._ended = 0
        """How many handlers have ended since the last look."""
        self._since_s = now_s

    @property
    def is_ahead(self) -> bool:
        """Whether more deliveries than the least are asked for."""
        return self.prefetch > self._least

    def ended(self, now_s: float) -> bool:
        """Count a handler that ended; whether ``prefetch`` has changed."""
        self._ended += 1
        return self._ended >= self.prefetch and self.look(now_s)

    def look(self, now_s: float) -> bool:
        """Work out ``prefetch`` from the rate since the last look; whether it has changed."""
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
"""Seconds between two tries to find a daemon; each takes the client's connect_timeout, too."""

H = TypeVar("H", bound=Handler)
A = TypeVar("A", bound=TypedArguments[...])


class Worker:
    """Runs handlers as tasks come due.

    A handler is ``async def`` (or a plain function, which runs in a thread) and gets the
    ``Delivery``. What becomes of it:

    ============================  ==========================================================
    it returns                    ack
    it raises an exception        nack, "Type: text" as the reason; the retry policy decides
    ``raise RetryLater(delay)``   nack with a delay of its own
    ``raise Snooze(delay)``       postponed; counts as no failure
    ``raise Reject("why")``       to the dead letters at once
    it takes over ``timeout``     cancelled; nack, "timed out after 30 s"
    it does, in a thread          the task stays here until it returns; what it returns counts
    its lease is lost             cancelled; nothing: another one has the task by now
    it settled the delivery       nothing more
    ============================  ==========================================================

    Handlers share tasks of the event loop, one after the other; none finds what another one set
    in its context variables. While it runs its lease is kept up. A function in a thread cannot be
    stopped: when it takes over ``timeout`` that is logged, and the task stays leased, so that it
    never runs a second time beside itself.

    ``client``: one that is not connected is connected, and closed at the end; one that is stays
    open. ``grace``: how long running handlers may take after ``stop``. ``signals``: whether
    SIGTERM and SIGINT stop it (the second one ends the grace). A handler that raises SystemExit or
    KeyboardInterrupt has failed; the worker gives all others back at once, and ``run`` raises it.
    ``on_settled``: is called after
    each delivery with it, the word of what became of it, when its handler began, by the event
    loop's clock, and what the handler raised. The words are those of Delivery's verbs, and
    "settled" (by the handler), "lost" (its lease), "unsettled" (it comes again by itself).
    ``on_mismatch``: what becomes of settings (``retry``, ``tags``, ``where``, ``order_...``,
    ``fair_by``, …) that a handler names and its group has otherwise. "refuse": the worker ends with
    Conflict. "warn": it works with those of the group, and logs the difference and the command that
    ends it. "update": at its start it gives the group its own, which needs the right to operate; on
    a later connection it warns. By default "warn" where only ``retry`` differs, else "refuse".
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
            raise BadRequest(f"a worker needs a Client, not {shown(client)}")
        self._on_mismatch = checked_on_mismatch(on_mismatch)
        self._client = client
        self._grace_s = seconds(grace, "grace", zero=True)
        self._signals = signals
        self.on_settled = on_settled
        """Called after each delivery; set before ``run``."""
        self._routes: list[Route] = []
        self._tracing: Observer | None = None
        self._stopping = False
        self._lanes: list[Lane] = []
        self._stand_in: Client | None = None
        """The client that typed tasks are enqueued by instead, while a test works on a wheel."""
        self._exit: BaseException | None = None
        """What ``run`` ends by: the SystemExit or KeyboardInterrupt of a handler."""
        self._asked: asyncio.Event | None = None
        self._hurry: asyncio.Event | None = None
        self.started = asyncio.Event()
        """Set once all handlers are subscribed."""

    @spelled_out(HandlerKeywords)
    def on(self, topic: str, **said: Unpack[HandlerKeywords]) -> Callable[[H], H]:
        """Register a handler for what comes due on ``topic``; ``said`` is HandlerKeywords."""
        refuse_unknown(said, HandlerKeywords, "Worker.on")
        if self._asked is not None:
            raise BadRequest("the worker runs already; register handlers before")

        def register(handler: H) -> H:
            made = replace(route(handler, topic, **said), on_mismatch=self._on_mismatch)
            if any((r.topic, r.group) == (made.topic, made.group) for r in self._routes):
                raise BadRequest(f"topic {topic!r}, group {made.group!r} has a handler already")
            self._routes.append(made)
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
        **said: Unpack[HandlerKeywords],
    ) -> Typing:
        """``@worker.task("orders.close")``: the function becomes a ``TypedTask``, whose arguments
        are enqueued, and is registered here. The first four are those of ``tickwheel.task``, the
        others those of ``on``."""
        refuse_unknown(said, HandlerKeywords, "Worker.task")

        def decorate(function: Callable[..., Any]) -> Any:
            names = sys._getframe(1).f_locals  # of annotations that are local to the caller
            made = define(function, names, topic, version, upcasters, encoding)
            return self.register(made, **said)

        return cast("Typing", decorate)

    @spelled_out(HandlerKeywords)
    def register(self, task: A, **said: Unpack[HandlerKeywords]) -> A:
        """Work on a typed task that was made apart from the worker, by ``tickwheel.task``; its
        ``enqueue`` uses this worker's client from then on, unless another worker came first. What
        else is said is as in ``on``. Returns the task."""
        refuse_unknown(said, HandlerKeywords, "Worker.register")
        definition = getattr(task, "_definition", None)
        if not isinstance(definition, Definition):
            raise BadRequest(f"register takes a typed task, not {shown(task)}")
        self.on(definition.topic, **said)(definition.handler)
        if definition.client_of_worker is None:
            definition.client_of_worker = self._enqueues_by
        return task

    def _enqueues_by(self) -> Client:
        """The client that typed tasks are enqueued by."""
        return self._stand_in or self._client

    @property
    def client(self) -> Client:
        """The client that the worker was made with."""
        return self._client

    @property
    def in_hand(self) -> list[Delivery]:
        """The deliveries whose handlers run."""
        return [delivery for lane in self._lanes for delivery, *_ in lane._in_hand()]

    def stop(self) -> None:
        """Take no more, let what runs finish. Returns at once; harmless at any time, from the
        event loop's thread."""
        self._stopping = True
        for lane in self._lanes:
            lane.stop()
        if self._asked is not None:
            self._asked.set()

    async def run(
        self,
        *,
        concurrency: int | None = None,
        grace: Duration | None = None,
        wait: bool = False,
    ) -> None:
        """Work until ``stop`` or a signal; once. ``concurrency`` and ``grace``: instead of what
        handlers and worker were made with. ``wait``: for a daemon that is not there yet.

        Raises what the daemon objects to when it subscribes, then or later (NotFound: the group
        was deleted), and, unless it is to ``wait``, Unreachable when there is no connection at
        the start.
        """
        if self._asked is not None:
            raise BadRequest("a worker runs once; make a new one")
        if not self._routes:
            raise BadRequest("the worker has no handlers: register some with @worker.on(topic)")
        routes = [found.limited(concurrency) for found in self._routes]
        if grace is not None:
            self._grace_s = seconds(grace, "grace", zero=True)
        self._asked, self._hurry = asyncio.Event(), asyncio.Event()
        if self._stopping:
            return
        ours = self._client._state == "new"
        if ours and not await self._connect(wait=wait):
            return
        try:
            watched = on_signals(self.stop, self._hurry.set) if self._signals else nullcontext()
            with watched:
                await self._work(routes)
        finally:
            if ours:
                await self._client.close()
        if self._exit is not None:
            raise self._exit

    def _exits(self, error: BaseException) -> None:
        """End by this, without any grace."""
        self._exit = self._exit or error
        self.stop()
        if self._hurry is not None:
            self._hurry.set()

    async def _connect(self, *, wait: bool) -> bool:
        """Connect; whether there is a connection. A worker that is stopped waits no longer."""
        said = False
        while not self._stopping:
            try:
                await self._client.connect()
                return True
            except (Unreachable, NotActive) as error:
                if not wait:
                    raise
                if not said:
                    LOGGER.warning("waits for a daemon: %s: %s", error.code, error.message)
                    said = True
            assert self._asked is not None, "it runs"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), WAIT_S)
        return False

    async def _work(self, routes: Iterable[Route]) -> None:
        threads = Threads("tickwheel-worker")
        told = self._tracing, self.on_settled, self._exits
        self._lanes = lanes = [Lane(self._client, found, threads, *told) for found in routes]
        try:
            await _all(lane.start() for lane in lanes)
            for lane in lanes:
                LOGGER.info("works on %s, %d at a time", lane.route.name, lane.route.concurrency)
            self.started.set()
            await self._read(lanes)
            await self._wind_down(lanes)
        finally:
            # Also when it was cancelled, or could not begin: then without any grace.
            await _all((lane.close() for lane in lanes), quiet=True)
            await _all((lane.finish() for lane in lanes), quiet=True)
            threads.stop()

    async def _read(self, lanes: list[Lane]) -> None:
        """Read deliveries until the worker is to stop. Raises a lane's error, after the grace."""
        assert self._asked is not None, "it runs"
        readers = [asyncio.create_task(lane.read()) for lane in lanes]
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((*readers, asked), return_when=asyncio.FIRST_COMPLETED)
            failed = [r.exception() for r in readers if r.done() and not r.cancelled()]
        finally:
            for task in (*readers, asked):
                task.cancel()
            await asyncio.gather(*readers, asked, return_exceptions=True)
        for error in filter(None, failed):
            LOGGER.error("stops: %s", error)
            await self._wind_down(lanes)
            raise error

    async def _wind_down(self, lanes: list[Lane]) -> None:
        """Take no more, give back what was not started, and wait for running handlers."""
        assert self._hurry is not None, "it runs"
        running = sum(lane.running for lane in lanes)
        LOGGER.info("stops; %d handlers run, grace %g s", running, self._grace_s)
        closing = asyncio.create_task(_all((lane.close() for lane in lanes), quiet=True))
        drained = asyncio.create_task(_all(lane.drained() for lane in lanes))
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            await asyncio.wait(
                (drained, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not drained.done():
                left = sum(lane.running for lane in lanes)
                LOGGER.warning("%d handlers are not done; they are cancelled", left)
            await closing
        finally:
            for task in (closing, drained, hurry):
                task.cancel()
            await asyncio.gather(closing, drained, hurry, return_exceptions=True)


def joined(client: Client, workers: Iterable[Worker], *, signals: bool) -> Worker:
    """One worker with the handlers of all these, on another client; they stay as they are. Raises
    BadRequest for a topic and group that two of them have."""
    workers = list(workers)
    made = Worker(client, grace=max(one._grace_s for one in workers), signals=signals)
    for found in (found for one in workers for found in one._routes):
        if any((r.topic, r.group) == (found.topic, found.group) for r in made._routes):
            raise BadRequest(f"topic {found.topic!r}, group {found.group!r} has two handlers")
        made._routes.append(found)
    made._tracing = next((one._tracing for one in workers if one._tracing is not None), None)
    callbacks = [one.on_settled for one in workers if one.on_settled is not None]
    if callbacks:
        made.on_settled = lambda *told: [call(*told) for call in callbacks]
    return made


async def _all(works: Iterable[Any], *, quiet: bool = False) -> None:
    """Run all to their ends at once; raises the first error, unless ``quiet``."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not (quiet and isinstance(end, TickwheelError)):
            raise end


ABANDON_S = 5.0
"""How long a cancelled handler may take to end, in seconds."""
WAITING_MAX = 256
"""Idle runners that a lane keeps."""
LOOK_S = 0.5
"""How often, in seconds, a lane that is ahead looks whether its handlers still end."""


class Lane:
    """One route at work: ``start``, ``read`` until an error or a cancel, ``close``, ``finish``."""

    def __init__(
        self,
        client: Client,
        route: Route,
        threads: Threads,
        tracing: Observer | None = None,
        on_settled: OnSettled | None = None,
        exits: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self.route = route
        self._client = client
        self._on_settled = on_settled
        self._exits = exits
        self._threads = threads
        self._tracing = tracing
        self._free = route.concurrency
        """How many more handlers may run."""
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
        self._asking: asyncio.Task[None] | None = None
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
        """Subscribe. Raises what the daemon objects to; of settings that the group has otherwise
        ``on_mismatch`` decides."""
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
        """Hand each delivery to a runner, for ever. Raises why there are no more."""
        async for delivery in self._subscription:
            self._begin(delivery)
            while self._free <= 0 or self._stopping:
                await self._freed.wait()
        raise ClientClosed("the client was closed while the worker ran")

    def _begin(self, delivery: Delivery) -> None:
        """Work on a delivery in an idle runner, or a new one."""
        assert self._leases is not None, "started"
        self._free -= 1
        self._leases.begin()
        while self._waiting:
            if self._waiting.pop().go_on(delivery):
                return
        runner = Runner(
            self.route, self._threads, self._leases, delivery, self._settled, self._tracing,
            self._on_settled, self._exits,
        )  # fmt: skip
        self._runners.add(runner)
        runner.task.add_done_callback(partial(self._gone, runner))

    def _settled(self, runner: Runner) -> Delivery | None:
        """Note that a delivery is settled; the next one for its runner, if one is here."""
        if runner.delivery is not None and (why := self.route.unfit(runner.delivery)) is not None:
            self._subscription.ended(why)
        if runner.unable is not None:
            self._subscription.ended(runner.unable)
        if self._ahead.ended(self._loop.time()):
            self._ask()
        delivery = None if self._stopping else self._subscription.take_now()
        if delivery is None:
            self._release()
            if self._finished or len(self._waiting) >= WAITING_MAX:
                self._loop.call_soon(runner.go_on, None)
            else:
                self._waiting.append(runner)
        return delivery

    def _gone(self, runner: Runner, task: asyncio.Task[None]) -> None:
        """Forget a runner whose task has ended."""
        self._runners.discard(runner)
        if runner.delivery is None:
            return
        if not runner.is_settling and self._leases is not None:
            self._leases.drop(runner.delivery)
        if self._ahead.ended(self._loop.time()):
            self._ask()
        if runner.call is None or runner.call.ended.done():
            self._release()
        else:
            LOGGER.warning("%r: its function still runs in a thread", runner.delivery)
            runner.call.ended.add_done_callback(lambda _: self._release())
            self._freed.notify()
        if not task.cancelled() and (bug := task.exception()) is not None:
            LOGGER.error("%r: %r", runner.delivery, bug, exc_info=bug)

    def _release(self) -> None:
        """Let one more handler run."""
        self._free += 1
        self._freed.notify()

    def _in_hand(self) -> Iterator[InHand]:
        for runner in self._runners:
            if runner.delivery is not None and not runner.is_settling:
                yield runner.delivery, runner.until_s, runner.lose

    # --- how much to ask for --------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask for another prefetch, once the last request is answered."""
        if self._closed:
            return
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._send_prefetch())
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    async def _send_prefetch(self) -> None:
        asked = None
        with suppress(TickwheelError):  # a new connection asks for it by itself
            while asked != self._ahead.prefetch:
                asked = self._ahead.prefetch
                await self._subscription.set_prefetch(asked)
            if not self._ahead.is_ahead:
                await self._subscription.give_back()

    def _look(self) -> None:
        """Look again at the rate: if handlers stop ending, waiting deliveries are for others."""
        self._look_timer = None
        if self._ahead.look(self._loop.time()):
            self._ask()
        elif self._ahead.is_ahead:
            self._look_timer = self._loop.call_later(LOOK_S, self._look)

    # --- the end --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many handlers run."""
        return sum(runner.delivery is not None for runner in self._runners)

    def stop(self) -> None:
        """Begin no more handlers. Returns at once."""
        self._stopping = True

    async def close(self) -> None:
        """Take no more deliveries, and give back what was not started."""
        self._stopping = self._closed = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        await self._subscription.close()

    async def drained(self) -> None:
        """Wait until no handler runs."""
        while self.running:
            await self._freed.wait()

    async def finish(self) -> None:
        """Cancel running handlers, give their deliveries back, and wait for all acks."""
        for runner in self._runners:
            runner.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                await self.drained()
        for runner in self._runners:
            if runner.delivery is not None:
                LOGGER.error("%r: its handler does not let itself be cancelled", runner.delivery)
        self._finished = True
        for runner in self._waiting:
            runner.go_on(None)
        if self._waiting:
            await asyncio.wait([runner.task for runner in self._waiting])
        await self._client._flush_acks()
        if self._leases is not None:
            self._leases.close()


SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Call ``stop``, then ``hurry``, on signals during the block, where the platform allows it."""
    loop = asyncio.get_running_loop()
    asked = False

    def heard() -> None:
        nonlocal asked
        (hurry if asked else stop)()
        asked = True

    before = {}
    for number in SIGNALS:
        try:
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, heard)
        except (NotImplementedError, RuntimeError, ValueError):
            before.pop(number, None)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: installed by something that is not Python
                signal.signal(number, handler)
