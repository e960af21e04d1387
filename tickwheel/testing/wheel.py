"""The test wheel: daemon, committer, engine and memory store of the product, inside the test's own
process and event loop, on a clock that stands still until the test moves it.

Nothing here decides anything about a task: time goes on in steps to the next moment at which the
shard has something to do, and after each step everything happens that can happen, handlers
included, before it goes on. Invariants:

* Handlers take no time of the test's clock: while one runs the clock stands.
* What a crash leaves is what was durable, and nothing else.

``SyncTestWheel`` is the same for programs without an event loop: it runs in the thread of its
client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast

from tickwheel import sync
from tickwheel.api.frames import FrameType
from tickwheel.api.times import duration_ms, moment, moment_ms
from tickwheel.client import Client
from tickwheel.client.worker import Worker, joined
from tickwheel.clock import StandingSources
from tickwheel.errors import BadRequest, Undecodable
from tickwheel.inside import Inside, InsideClient
from tickwheel.persistence.contract import CommitRefused
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import Decoder
from tickwheel.server.settings import Settings
from tickwheel.waiting import to_its_end

if TYPE_CHECKING:
    from tickwheel.api.tasks import DeadLetter, TaskInfo
    from tickwheel.api.times import Duration
    from tickwheel.engine.topics import Lease
    from tickwheel.inside import End
    from tickwheel.server.shard.shard import Shard

RESIDENT_S = 1e9
"""Tasks that are due so soon, in seconds, stay in memory: all of them. There is no other store."""
PATIENCE_S = 10.0
"""How long, in real seconds, the clock stands for a handler before that is an error."""
PAUSE_S = 0.0005
"""A look at threads that are waited for, in real seconds."""
TURNS_UNTIMED = 64
"""Turns of the event loop between two looks at the real time."""
STEPS_UNTURNED = 500
"""So many steps in which nothing happens the event loop is not given back."""
QUIET_TURNS = 8
"""So many turns without anything happening are the end, where the loop does not say what waits."""
FRAME_BYTES_MAX = 64 * 1024 * 1024


class StillBusy(AssertionError):
    """Something did not come to rest in the time that a test has."""


class TestWheel:
    """A daemon in this process whose time passes when the test says so.

    ``now``: where its clock begins (default: the present). ``settings`` are those of the daemon
    (docs/settings.md), such as ``backlog_max=10``. ``client`` is a connected ``Client``;
    ``new_client`` makes more.
    """

    __test__ = False  # its name begins as pytest's classes do

    def __init__(self, now: datetime | None = None, **settings: Any) -> None:
        begin = datetime.now(UTC) if now is None else now
        self._sources = StandingSources(moment_ms(begin, "now"))
        self._settings = Settings(
            **{
                "store": "memory:",
                "node": "test",
                "accept_clock": True,  # a test may let years pass
                "ack_gather_ms": 0,  # real time, which nobody waits for
                "resident_horizon_s": RESIDENT_S,
                **settings,
            }
        )
        if self._settings.store != "memory:":
            raise BadRequest(f"store is memory: in a test wheel, not {self._settings.store!r:.60}")
        self._losses = self._duplicates = 0
        self._begin(None)

    def _begin(self, store: MemoryStore | None) -> None:
        """Be a wheel that has not started yet, on any event loop: on ``store``, or on nothing."""
        self._inside = Inside(self._settings, self._sources)
        self._inside.first = store
        self._inside.connected = self._watch
        self._clients: list[_WheelClient] = []
        self._working: list[Worker] = []
        self._wait_ms: int | None = None
        """In how many ms the shard had something to do when it last came to rest."""
        self._mine: Client | None = None

    # --- life -----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.client.connect()
        except BaseException:
            await to_its_end(self.close())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_its_end(self.close())

    async def close(self) -> None:
        """End the clients and the daemon."""
        for client in self._clients:
            await client.close()
        await self._inside.stop()

    @property
    def client(self) -> Client:
        """A client of this wheel; it is connected with its first call."""
        if self._mine is None:
            self._mine = self.new_client()
        return self._mine

    def new_client(self, **options: Any) -> Client:
        """Another client of this wheel, with a connection of its own. ``options`` are Client's."""
        client = _WheelClient(self._inside, **options)
        client.wheel = self
        self._clients.append(client)
        return client

    @asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[TestWheel]:
        """The wheel, for an application that is to run on it, on the event loop that runs."""
        if self._inside.daemon is not None and self._inside.loop is not asyncio.get_running_loop():
            raise BadRequest(
                "the application runs on another event loop than this wheel, which stands still"
                " meanwhile: with TestClient use the fixture tickwheel_sync (SyncTestWheel)"
            )
        yield self

    async def _rest(self) -> None:
        """End the daemon in order, and be ready to start on what it had, on any event loop."""
        for client in self._clients:
            await client.close()
        await self.settle()
        store = self._store.copy()
        await self._inside.stop()
        self._begin(store)

    def serving(self, app: Any) -> AbstractContextManager[None]:
        """Let the lifespan of ``tickwheel.contrib.fastapi`` run this application on the wheel
        instead of a daemon, client and worker included. The application is on the test's own event
        loop; for ``TestClient``, which has another one, see ``SyncTestWheel``."""
        return _serving(app, self)

    @asynccontextmanager
    async def working(self, *workers: Worker) -> AsyncIterator[None]:
        """Let handlers work on this wheel: those that are registered with these workers, whatever
        client the workers have. They are stopped at the end."""
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(self._running(worker))
            yield

    @asynccontextmanager
    async def _running(self, worker: Worker) -> AsyncIterator[None]:
        client = self._client_for(worker)
        await client.connect()
        copy = joined(client, [worker], signals=False)
        before, worker._stand_in = worker._stand_in, client
        running = asyncio.ensure_future(copy.run())
        self._working.append(copy)
        try:
            await _until(lambda: running.done() or _reads(copy))
            yield
        finally:
            copy.stop()
            self._working.remove(copy)
            worker._stand_in = before
            await running

    def _client_for(self, worker: Worker) -> Client:
        """This wheel's client, or, where the worker's packs bodies, another one that does so."""
        codec = worker._client._codec
        if not codec.packs or codec is self.client._codec:
            return self.client
        client = self.new_client()
        client._use(codec)
        return client

    # --- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of this wheel."""
        return moment(self._sources.now_ms)

    @property
    def due_next(self) -> datetime | None:
        """When the next task is due that is not due yet; None: there is none."""
        core, store = self._shard.core, self._store
        dues_ms = [row.due_ms for row in store._tasks.values() if core.is_scheduled(row)]
        return moment(min(dues_ms)) if dues_ms else None

    async def advance(self, by: Duration | str) -> None:
        """Let time pass: seconds, a timedelta, or text such as "30m". What comes due on the way is
        delivered at its millisecond, in order, and handlers have ended when time goes on. Raises
        StillBusy when one does not end."""
        await self._advance_to(self._sources.now_ms + duration_ms(by, "duration"))

    async def _advance_to(self, until_ms: int) -> None:
        await self.settle()
        ready = getattr(asyncio.get_running_loop(), "_ready", None)
        steps = 0
        while self._sources.now_ms < until_ms:
            steps += 1
            if steps % STEPS_UNTURNED == 0:
                await asyncio.sleep(0)  # others may cancel this, and the loop forgets its timers
            left_ms = until_ms - self._sources.now_ms
            wait_ms = left_ms if self._wait_ms is None else max(1, self._wait_ms)
            self._sources.now_ms += min(left_ms, wait_ms)
            self._shard._tick()  # at once: at most steps the wheel only looks ahead
            if ready is None or ready or self._busy_with():  # something has begun with this step
                await self.settle()

    async def run_until_idle(self, within: Duration | str = "365d") -> None:
        """Let time pass until no task waits for its time or its next attempt; what a schedule will
        enqueue is no task yet. Raises StillBusy when some still wait after ``within``."""
        until_ms = self._sources.now_ms + duration_ms(within, "within")
        await self.settle()
        while (core := self._shard.core).scheduled or core.retrying:
            wait_ms = self._next_wait_ms()
            if wait_ms is None or self._sources.now_ms + wait_ms > until_ms:
                waiting = core.scheduled + len(core.retrying)
                some = "1 task still waits" if waiting == 1 else f"{waiting} tasks still wait"
                raise StillBusy(f"{some} {within} later")
            await self._advance_to(self._sources.now_ms + max(1, wait_ms))

    def _next_wait_ms(self) -> int | None:
        """In how many ms the shard has something to do; None: it has nothing to do."""
        shard = self._shard
        now = shard.clock.read()
        wait_ms = shard.engine.wake_in_ms(*now)
        due_ms = shard.core.wheel.next_handle_ms(now.now_ms)
        if due_ms is None:
            return wait_ms
        due_in_ms = due_ms - now.now_ms
        return due_in_ms if wait_ms is None else min(due_in_ms, wait_ms)

    async def settle(self) -> None:
        """Let everything happen that can happen now: what was sent is durable and answered, what
        is due is delivered, handlers have ended. Raises StillBusy when that has no end."""
        await self._inside.is_up.wait()
        loop = asyncio.get_running_loop()
        ready, until_s, turns, quiet = getattr(loop, "_ready", None), 0.0, 0, 0
        while True:
            await asyncio.sleep(0)
            turns += 1
            if turns % TURNS_UNTIMED == 0:
                until_s = until_s or loop.time() + PATIENCE_S
                if loop.time() > until_s:
                    waits_for = self._busy_with() or "the event loop, which is never idle"
                    raise StillBusy(f"after {PATIENCE_S:g} s it still waits for {waits_for}")
            if ready:
                continue  # somebody else has something to do
            if not self._busy_with():
                quiet += 1
                if ready is not None or quiet >= QUIET_TURNS:
                    return
                continue
            quiet = 0
            if ready is not None and not ready:
                await asyncio.sleep(PAUSE_S)  # for a thread, or for a pause in real time

    def _busy_with(self) -> str:
        """What is under way; empty: nothing is."""
        for end in self._inside.ends:
            if end.is_busy:
                return "a connection"
        is_up = self._inside.is_up.is_set()
        if is_up and self._shard.committer.trouble is None:  # else no answer comes, as it was asked
            for client in self._clients:
                if client.is_asking:
                    return "an answer of the daemon"
        for worker in self._working:
            for lane in worker._lanes:
                if lane.running:
                    return f"a handler of {lane.route.name}"
        return self._unfinished() if is_up else "the daemon's start"

    def _unfinished(self) -> str:
        """What the shard has begun and not ended; empty: nothing, until ``_wait_ms`` from now.
        Wakes what may go on."""
        shard = self._shard
        core, committer = shard.core, shard.committer
        if shard.failed.done():
            failure = shard.failed.exception()
            raise RuntimeError("the daemon of the test wheel has failed") from failure
        if core.sealed is not None or not core.open.is_empty():
            if committer.trouble is not None:
                self._wait_ms = self._next_wait_ms()
                return ""  # a failing store, by the test's wish
            committer.kick()
            return "a batch"
        if core.firing or shard._woken:
            return "a tick"
        if shard.commands._waiting or shard.coalescing._waiting:
            return "a command"
        for line in shard.lines:
            if line.count:
                return "a listing"
        self._wait_ms = self._next_wait_ms()
        if core.runnable or (self._wait_ms is not None and self._wait_ms <= 0):
            asyncio.get_running_loop().call_soon(shard.timer_over)
            return "what is due"
        return ""

    # --- what there is --------------------------------------------------------------------------

    async def enqueued(self, topic: str | None = None, *, key: str | None = None) -> list[TaskInfo]:
        """The tasks that are not finished, of a topic, with a key, or all, by their due time; those
        that are dead letters in every group are not among them."""
        tasks = self.client.list_tasks(topic=topic, key=key)
        found = [task async for task in tasks if task.state != "dead"]
        return sorted(found, key=lambda task: (task.due_ms or 0, task.id))

    async def assert_enqueued(
        self,
        topic: str,
        *,
        key: str | None = None,
        body: bytes | None = None,
        within: Duration | str | None = None,
    ) -> TaskInfo:
        """The first unfinished task of the topic, with this key and body, that is due within this
        time from now. Raises AssertionError, which says what is there instead."""
        there = await self.enqueued(topic)
        until_ms = None if within is None else self._sources.now_ms + duration_ms(within, "within")
        for task in there:
            is_in_time = until_ms is None or (task.due_ms or 0) <= until_ms
            if key in (None, task.key) and body in (None, self._body(task)) and is_in_time:
                return task
        given = {"key": key, "body": body, "within": within}
        wanted = ", ".join(f"{name} {one!r}" for name, one in given.items() if one is not None)
        found = "; ".join(self._told(task) for task in there) or "nothing"
        raise AssertionError(f"no task of {topic!r} with {wanted or 'anything'}; there is: {found}")

    def _told(self, task: TaskInfo) -> str:
        in_s = ((task.due_ms or 0) - self._sources.now_ms) / 1000
        return f"key {task.key!r}, body {self._body(task)!r:.60}, due in {in_s:g} s"

    def _body(self, task: TaskInfo) -> bytes | None:
        """The body of a task, unpacked by whichever client of this wheel can."""
        for client in self._clients:
            with suppress(Undecodable):
                return client.body_of(task)
        return task.body

    async def dead_letters(
        self, topic: str | None = None, group: str | None = None
    ) -> list[DeadLetter]:
        """The dead letters, of a topic, of a group, or all."""
        return [letter async for letter in self.client.dead_list(topic=topic, group=group)]

    # --- what may go wrong ----------------------------------------------------------------------

    async def crash(self) -> None:
        """End the daemon as ``kill -9`` does, and start the next one on what was durable. Clients
        have connected again when it returns; deliveries that were not acked come again."""
        store, ends = self._store.copy(), self._inside.ends
        for end in ends:
            end.abort()
        await _until(lambda: not any(end.is_busy for end in ends))
        await self._inside.stop()
        await self._inside.start(store)
        for client in self._clients:
            await client.is_back()

    async def lapse(self, topic: str | None = None, group: str | None = None) -> int:
        """End the leases of the deliveries that are out, of a topic, of a group, or all, as if
        their consumers had been silent for too long: the tasks are delivered again, while the first
        consumers still work on them. Returns how many."""

        def is_meant(lease: Lease) -> bool:
            of = lease.group
            return topic in (None, of.topic.name) and group in (None, of.name)

        lapsed, core = self._lapse(is_meant), self._shard.core
        await _until(
            lambda: core.expiry_mono_ms is None or core.expiry_mono_ms > self._sources.mono_ms()
        )
        return lapsed

    def lose_replies(self, count: int = 1) -> None:
        """Lose the next ``count`` answers of the daemon, each with its connection: what was asked
        is done, and the client cannot know. It asks again on a new connection."""
        self._losses = count

    def duplicate(self, count: int = 1) -> None:
        """Let the next ``count`` DELIVER frames come twice: their leases lapse at once, so that
        each task is delivered again, with the next attempt, while its first consumer has it. Where
        a subscription may have no second delivery (``prefetch=1``) there is none."""
        self._duplicates = count

    @contextmanager
    def failing_store(self) -> Iterator[None]:
        """Let the store take nothing: producers are refused, acks wait until it ends."""
        store = cast(Any, self._store)
        store.commit = _refuse
        try:
            yield
        finally:
            del store.commit

    # --- details --------------------------------------------------------------------------------

    @property
    def _shard(self) -> Shard:
        daemon = self._inside.daemon
        if daemon is None or daemon.roles.shard is None:
            raise RuntimeError("the test wheel does not run: use it as a context manager")
        return daemon.roles.shard

    @property
    def _store(self) -> MemoryStore:
        assert self._inside.daemon is not None, "it runs"
        return cast(MemoryStore, self._inside.daemon.roles.store)

    def _watch(self, end: End) -> None:
        end.loses = self._faults_of_a_connection()

    def _faults_of_a_connection(self) -> Callable[[bytes], bool]:
        """Looks at what the daemon writes to one connection, while faults are asked for; returns
        whether it is lost. The greeting never is."""
        is_greeted = False

        def loses(data: bytes) -> bool:
            nonlocal is_greeted
            was_greeted, is_greeted = is_greeted, True  # by the first thing that is written
            if not (was_greeted and (self._losses or self._duplicates)):
                return False
            frames = Decoder(FRAME_BYTES_MAX).feed(data)
            for frame in frames:
                if self._duplicates and frame[0] == FrameType.DELIVER:
                    self._duplicates -= 1
                    ids = frozenset(item[0] for item in frame[4])
                    asyncio.get_running_loop().call_soon(self._lapse_some, ids)
            if not (self._losses and any(frame[0] == FrameType.OK for frame in frames)):
                return False
            self._losses -= 1
            return True

        return loses

    def _lapse_some(self, ids: frozenset[int]) -> None:
        self._lapse(lambda lease: lease.id in ids)

    def _lapse(self, which: Callable[[Lease], bool]) -> int:
        """Let leases be over with the next tick; returns how many."""
        shard, mono_ms, lapsed = self._shard, self._sources.mono_ms(), 0
        for group in list(shard.core.leased):
            some = [lease for lease in group.flight.values() if which(lease)]
            for lease in some:
                lease.deadline_mono_ms = mono_ms
            if some:
                shard.core.expires(group, mono_ms)
                lapsed += len(some)
        shard.wake()
        return lapsed


class WheelCase:
    """For a ``unittest.IsolatedAsyncioTestCase``: each test has a ``TestWheel`` as ``wheel``.

    class OrderTest(WheelCase, IsolatedAsyncioTestCase): ...
    """

    wheel: TestWheel

    async def asyncSetUp(self) -> None:
        self.wheel = await cast(Any, self).enterAsyncContext(TestWheel())


class _WheelClient(InsideClient):
    """A client that waits for nothing in real time where it need not."""

    wheel: TestWheel

    def _begin(self) -> None:
        super()._begin()
        self._reconnector._search.backoff_s = 0.0  # crashes are meant, and nobody waits

    @property
    def is_asking(self) -> bool:
        """Whether something is to be sent, or an answer is due."""
        return self._state == "open" and self._reconnector.is_asking

    async def is_back(self) -> None:
        """Wait until the client is connected, if it was ever."""
        if self._state == "open":
            await self._reconnector.wait_up(PATIENCE_S)


async def _refuse(*_: Any) -> bool:
    raise CommitRefused("the test's store takes nothing")


async def _until(done: Callable[[], bool]) -> None:
    """Let the event loop turn until it is so."""
    while not done():  # noqa: ASYNC110  # it is told to nobody
        await asyncio.sleep(0)


def _reads(worker: Worker) -> bool:
    """Whether all handlers of the worker are subscribed."""
    return bool(worker._lanes) and all(lane._leases is not None for lane in worker._lanes)


P = ParamSpec("P")
R = TypeVar("R")


class SyncTestWheel:
    """``TestWheel`` for blocking code: ``client`` is a ``tickwheel.sync.Client``, and every call
    returns when it is done. The only thread is the client's own."""

    __test__ = False

    def __init__(self, now: datetime | None = None, **settings: Any) -> None:
        self._wheel = TestWheel(now, **settings)
        self.client: sync.Client = _SyncClient(self._wheel, self)

    def __enter__(self) -> Self:
        self.client.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon and the client."""
        self._call(TestWheel.close)
        self.client.close()

    def serving(self, app: Any) -> AbstractContextManager[None]:
        """``with wheel.serving(app), TestClient(app) as http:`` lets the lifespan of
        ``tickwheel.contrib.fastapi`` run on the wheel instead of a daemon, client and worker
        included. Subscriptions and deliveries of before end with the application's start."""
        return _serving(app, self)

    def new_client(self, **options: Any) -> sync.Client:
        """Another client of this wheel, with a connection of its own, in the thread of ``client``.
        ``options`` are Client's."""

        async def beside(wheel: TestWheel) -> sync.BesideLoop:
            inner = await wheel.new_client(**options).connect()
            return sync.BesideLoop(inner, asyncio.get_running_loop())

        client = sync.Client()
        client._made = self._call(beside)
        return client

    @contextmanager
    def working(self, *workers: Worker) -> Iterator[None]:
        """See ``TestWheel.working``. Handlers run in the thread of ``client``, and plain functions
        in a worker's own threads."""
        running = self._wheel.working(*workers)
        self._call(lambda _: running.__aenter__())
        try:
            yield
        finally:
            self._call(lambda _: running.__aexit__(None, None, None))

    @asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[TestWheel]:
        """The wheel on the event loop that runs, for an application that is to run on it: it goes
        on there, and back to a thread of its own at the end. Calls go to where it is."""
        await asyncio.to_thread(self._leave_thread)
        client = await self._wheel.client.connect()
        self.client._made = sync.BesideLoop(client, asyncio.get_running_loop())
        try:
            yield self._wheel
        finally:
            await to_its_end(self._wheel._rest())
            self.client._made = None  # the next call makes a thread

    def _leave_thread(self) -> None:
        self._call(TestWheel._rest)
        runtime, self.client._made = self.client._made, None
        if runtime is not None:
            runtime.close(None)

    @property
    def now(self) -> datetime:
        """See ``TestWheel.now``."""
        return self._wheel.now

    @property
    def due_next(self) -> datetime | None:
        """See ``TestWheel.due_next``."""
        return self._call(_due_next)

    advance = sync.waits(TestWheel.advance)
    settle = sync.waits(TestWheel.settle)
    run_until_idle = sync.waits(TestWheel.run_until_idle)
    crash = sync.waits(TestWheel.crash)
    lapse = sync.waits(TestWheel.lapse)
    enqueued = sync.waits(TestWheel.enqueued)
    assert_enqueued = sync.waits(TestWheel.assert_enqueued)
    dead_letters = sync.waits(TestWheel.dead_letters)

    def lose_replies(self, count: int = 1) -> None:
        """See ``TestWheel.lose_replies``."""
        self._wheel.lose_replies(count)

    def duplicate(self, count: int = 1) -> None:
        """See ``TestWheel.duplicate``."""
        self._wheel.duplicate(count)

    def failing_store(self) -> AbstractContextManager[None]:
        """See ``TestWheel.failing_store``."""
        return self._wheel.failing_store()

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self.client._call(lambda _: method(self._wheel, *arguments, **options))


class _SyncClient(sync.Client):
    def __init__(self, inner: TestWheel, wheel: SyncTestWheel) -> None:
        super().__init__()
        self._make = inner.new_client
        self.wheel = wheel


@contextmanager
def _serving(app: Any, wheel: TestWheel | SyncTestWheel) -> Iterator[None]:
    app.state.tickwheel_wheel = wheel
    try:
        yield
    finally:
        del app.state.tickwheel_wheel


async def _due_next(wheel: TestWheel) -> datetime | None:
    return wheel.due_next
