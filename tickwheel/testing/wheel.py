"""The test wheel: the real daemon with the memory store, in the test's process and event loop.

Its clock stands still until the test advances it. This module makes no decisions about tasks. Time
advances in steps to the next moment at which the shard has work. A step ends only after all work
that is due by then, including handlers. Invariants:

* The clock stands still while a handler runs, so handlers take no time.
* Only durable state survives a simulated crash.

``SyncTestWheel`` is for blocking code and runs in the thread of its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
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
from tickwheel.inside import InProcessDaemon, InsideClient
from tickwheel.persistence.contract import CommitRefused
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import Decoder
from tickwheel.server.settings import Settings
from tickwheel.waiting import finish_despite_cancellation

if TYPE_CHECKING:
    from tickwheel.api.tasks import DeadLetter, TaskInfo
    from tickwheel.api.times import Duration
    from tickwheel.engine.topics import Lease
    from tickwheel.inside import End
    from tickwheel.server.shard.shard import Shard

RESIDENT_S = 1e9
"""Setting ``resident_horizon_s``: practically all tasks stay in memory."""
PATIENCE_S = 10.0
"""Maximum real seconds that the test wheel waits for work such as a handler."""
PAUSE_S = 0.0005
"""Real seconds between two checks of work that a thread does."""
TURNS_UNTIMED = 64
"""Number of turns of the event loop between two readings of the real clock."""
STEPS_UNTURNED = 500
"""Number of idle steps after which the event loop gets a turn."""
QUIET_TURNS = 8
"""Number of idle turns that end ``settle`` if the event loop does not show its waiting
callbacks."""
FRAME_BYTES_MAX = 64 * 1024 * 1024


class StillBusy(AssertionError):
    """Work did not end within the time limit of the test wheel."""


class TestWheel:
    """A daemon in this process whose clock the test advances.

    ``now`` is the initial time (default: the present). ``settings`` are settings of the daemon
    (docs/settings.md), such as ``backlog_max=10``. ``client`` is a connected ``Client``;
    ``new_client`` creates more.
    """

    __test__ = False  # pytest would otherwise collect the class because of its name

    def __init__(self, now: datetime | None = None, **settings: Any) -> None:
        begin = datetime.now(UTC) if now is None else now
        self._sources = StandingSources(moment_ms(begin, "now"))
        self._settings = Settings(
            **{
                "store": "memory:",
                "node": "test",
                "accept_clock": True,  # a test can skip years
                "ack_gather_ms": 0,  # this delay would be real time
                "resident_horizon_s": RESIDENT_S,
                **settings,
            }
        )
        if self._settings.store != "memory:":
            raise BadRequest(
                f"in a test wheel, store must be 'memory:', not {self._settings.store!r:.60}"
            )
        self._losses = self._duplicates = 0
        self._begin(None)

    def _begin(self, store: MemoryStore | None) -> None:
        """Reset the wheel to a stopped state, with the data in ``store`` or without data."""
        self._inside = InProcessDaemon(self._settings, self._sources)
        self._inside.first_store = store
        self._inside.on_connection = self._watch
        self._clients: list[_WheelClient] = []
        self._working: list[Worker] = []
        self._wait_ms: int | None = None
        """Milliseconds until the shard's next work, as computed by the last ``settle``."""
        self._client: Client | None = None

    # --- lifecycle ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self.client.connect()
        except BaseException:
            await finish_despite_cancellation(self.close())
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await finish_despite_cancellation(self.close())

    async def close(self) -> None:
        """Close the clients and stop the daemon."""
        for client in self._clients:
            await client.close()
        await self._inside.stop()

    @property
    def client(self) -> Client:
        """The client of this wheel. It connects with its first call."""
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self, **options: Any) -> Client:
        """Return another client of this wheel, with a separate connection.

        ``options`` are those of ``Client``."""
        client = _WheelClient(self._inside, pauses=False, **options)  # crashes need none
        client.wheel = self
        self._clients.append(client)
        return client

    @asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[TestWheel]:
        """Yield the wheel for an application that runs on the current event loop."""
        if self._inside.daemon is not None and self._inside.loop is not asyncio.get_running_loop():
            raise BadRequest(
                "the application runs on another event loop than this wheel, which is blocked"
                " meanwhile: with TestClient use the fixture tickwheel_sync (SyncTestWheel)"
            )
        yield self

    async def _rest(self) -> None:
        """Stop the daemon cleanly and keep its data, to start again on any event loop."""
        for client in self._clients:
            await client.close()
        await self.settle()
        store = self._store.copy()
        await self._inside.stop()
        self._begin(store)

    def serving(self, app: Any) -> AbstractContextManager[None]:
        """Run the application's ``tickwheel.contrib.fastapi`` lifespan, with client and worker, on
        this wheel instead of a daemon.

        The application must use the event loop of the test. ``TestClient`` has a separate loop: use
        ``SyncTestWheel`` with it."""
        return _serving(app, self)

    @asynccontextmanager
    async def working(self, *workers: Worker) -> AsyncIterator[None]:
        """Run the handlers of these workers on this wheel, instead of with the workers' own
        clients.

        They stop at the end of the context."""
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(self._running(worker))
            yield

    @asynccontextmanager
    async def _running(self, worker: Worker) -> AsyncIterator[None]:
        client = self._client_for(worker)
        await client.connect()
        copy = joined(client, [worker], signals=False)
        running = asyncio.ensure_future(copy.run())
        self._working.append(copy)
        try:
            await _until(lambda: running.done() or copy.started.is_set())
            yield
        finally:
            copy.stop()
            self._working.remove(copy)
            await running

    def _client_for(self, worker: Worker) -> Client:
        """Return this wheel's client, or a new one with the worker's encoding of bodies."""
        codec = worker.client.codec
        if not codec.packs or codec is self.client.codec:
            return self.client
        return self.new_client(codec=codec)

    # --- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The current time on this wheel's clock."""
        return moment(self._sources.now_ms)

    @property
    def due_next(self) -> datetime | None:
        """The due time of the next scheduled task, or None."""
        core = self._shard.core
        dues_ms = [row.due_ms for row in self._store.rows if core.is_scheduled(row)]
        return moment(min(dues_ms)) if dues_ms else None

    async def advance(self, by: Duration | str) -> None:
        """Advance the clock by seconds, a timedelta, or a text such as "30m".

        Tasks that come due are delivered in order, each in its due millisecond, and their handlers
        end before time advances further. Raise StillBusy if a handler does not end."""
        await self._advance_to(self._sources.now_ms + duration_ms(by, "duration"))

    async def _advance_to(self, until_ms: int) -> None:
        await self.settle()
        ready = _waiting_callbacks()
        steps = 0
        while self._sources.now_ms < until_ms:
            steps += 1
            if steps % STEPS_UNTURNED == 0:
                await asyncio.sleep(0)  # allows cancellation, and lets the loop drop old timers
            left_ms = until_ms - self._sources.now_ms
            wait_ms = left_ms if self._wait_ms is None else max(1, self._wait_ms)
            self._sources.now_ms += min(left_ms, wait_ms)
            self._shard.tick()  # without a turn of the loop, since most steps are idle
            if ready is None or ready or self._busy_with():  # this step has started work
                await self.settle()

    async def run_until_idle(self, within: Duration | str = "365d") -> None:
        """Advance the clock until no task waits for its due time or next attempt.

        Future runs of schedules do not count. Raise StillBusy if tasks still wait after
        ``within``."""
        until_ms = self._sources.now_ms + duration_ms(within, "within")
        await self.settle()
        while waiting := self._shard.core.scheduled + self._shard.core.waiting_for_attempts:
            wait_ms = self._next_wait_ms()
            if wait_ms is None or self._sources.now_ms + wait_ms > until_ms:
                tasks = "1 task is" if waiting == 1 else f"{waiting} tasks are"
                raise StillBusy(f"{tasks} still waiting after {within}")
            await self._advance_to(self._sources.now_ms + max(1, wait_ms))

    def _next_wait_ms(self) -> int | None:
        """Return the milliseconds until the shard's next work, or None if it has none."""
        shard = self._shard
        now = shard.clock.read()
        wait_ms = shard.engine.wake_in_ms(*now)
        due_ms = shard.core.wheel.next_handle_ms(now.now_ms)
        if due_ms is None:
            return wait_ms
        due_in_ms = due_ms - now.now_ms
        return due_in_ms if wait_ms is None else min(due_in_ms, wait_ms)

    async def settle(self) -> None:
        """Wait until requests are durable and answered, due tasks are delivered, and handlers have
        ended. Raise StillBusy if that takes too long."""
        await self._inside.is_up.wait()
        loop = asyncio.get_running_loop()
        ready, until_s, turns, quiet = _waiting_callbacks(), 0.0, 0, 0
        while True:
            await asyncio.sleep(0)
            turns += 1
            if turns % TURNS_UNTIMED == 0:
                until_s = until_s or loop.time() + PATIENCE_S
                if loop.time() > until_s:
                    waits_for = self._busy_with() or "the event loop, which is never idle"
                    raise StillBusy(
                        f"after {PATIENCE_S:g} s the test wheel still waits for {waits_for}"
                    )
            if ready:
                continue  # other callbacks are waiting
            if not self._busy_with():
                quiet += 1
                if ready is not None or quiet >= QUIET_TURNS:
                    return
                continue
            quiet = 0
            if ready is not None and not ready:
                await asyncio.sleep(PAUSE_S)  # for a thread, or for a pause in real time

    def _busy_with(self) -> str:
        """Return a description of work that is not finished, or an empty string."""
        for end in self._inside.ends:
            if end.is_busy:
                return "a connection"
        is_up = self._inside.is_up.is_set()
        if is_up and self._shard.committer.trouble is None:  # a failing store delays answers
            for client in self._clients:
                if client.is_asking:
                    return "an answer of the daemon"
        for worker in self._working:
            if busy := worker.busy:
                return f"a handler of {busy[0]}"
        return self._unfinished() if is_up else "the daemon's start"

    def _unfinished(self) -> str:
        """Return a description of the shard's unfinished work, and cause the shard to continue it.

        If there is none, return an empty string and set ``_wait_ms``."""
        shard = self._shard
        core, committer = shard.core, shard.committer
        if shard.failed.done():
            failure = shard.failed.exception()
            raise RuntimeError("the daemon of the test wheel has failed") from failure
        if core.sealed is not None or not core.open.is_empty():
            if committer.trouble is not None:
                self._wait_ms = self._next_wait_ms()
                return ""  # the test has made the store fail
            committer.kick()
            return "a batch"
        if core.firing or shard.is_woken:
            return "a tick"
        if shard.commands.waiting or shard.coalescing.waiting:
            return "a command"
        for queue in shard.request_queues:
            if queue.count:
                return "a listing"
        self._wait_ms = self._next_wait_ms()
        is_due = self._wait_ms is not None and self._wait_ms <= 0
        if core.runnable or core.refiring or is_due:
            asyncio.get_running_loop().call_soon(shard.on_timer)
            return "a due task"
        return ""

    # --- inspection -----------------------------------------------------------------------------

    async def enqueued(self, topic: str | None = None, *, key: str | None = None) -> list[TaskInfo]:
        """Return unfinished tasks by due time, optionally only those of a topic or with a key.

        Tasks that are dead letters in every group are not included."""
        listed = self.client.list_tasks(topic=topic, key=key)
        tasks = [task async for task in listed if task.state != "dead"]
        return sorted(tasks, key=lambda task: (task.due_ms or 0, task.id))

    async def assert_enqueued(
        self,
        topic: str,
        *,
        key: str | None = None,
        body: bytes | None = None,
        within: Duration | str | None = None,
    ) -> TaskInfo:
        """Return the first unfinished task of the topic that has this key and body and is due
        ``within`` this time. If there is none, raise AssertionError, which lists the tasks."""
        tasks = await self.enqueued(topic)
        until_ms = None if within is None else self._sources.now_ms + duration_ms(within, "within")
        for task in tasks:
            is_in_time = until_ms is None or (task.due_ms or 0) <= until_ms
            if key in (None, task.key) and body in (None, self._body(task)) and is_in_time:
                return task
        conditions = {"key": key, "body": body, "within": within}
        expected = ", ".join(f"{name} {v!r}" for name, v in conditions.items() if v is not None)
        existing = "; ".join(self._described(task) for task in tasks) or "nothing"
        of_topic = f"no task of {topic!r}" + (f" with {expected}" if expected else "")
        raise AssertionError(f"{of_topic}; enqueued: {existing}")

    def _described(self, task: TaskInfo) -> str:
        in_s = ((task.due_ms or 0) - self._sources.now_ms) / 1000
        return f"key {task.key!r}, body {self._body(task)!r:.60}, due in {in_s:g} s"

    def _body(self, task: TaskInfo) -> bytes | None:
        """Return the body of a task, decoded by the first client that can decode it."""
        for client in self._clients:
            with suppress(Undecodable):
                return client.body_of(task)
        return task.body

    async def dead_letters(
        self, topic: str | None = None, group: str | None = None
    ) -> list[DeadLetter]:
        """Return the dead letters of a topic or group, or all dead letters."""
        return [letter async for letter in self.client.dead_list(topic=topic, group=group)]

    # --- faults ---------------------------------------------------------------------------------

    async def crash(self) -> None:
        """Kill the daemon as with ``kill -9``, and start a new one with the durable state.

        Return when clients are connected again. Unacknowledged tasks are delivered again."""
        self._inside.is_up.clear()  # clients that reconnect wait for the new daemon
        store, ends = self._store.copy(), self._inside.ends
        for end in ends:
            end.abort()
        await _until(lambda: not any(end.is_busy for end in ends))
        if vars(self._store).pop("commit", None) is not None:  # ``stop`` would wait for it
            cast(Any, store).commit = _refuse
        await self._inside.stop()
        await self._inside.start(store)
        for client in self._clients:
            await client.wait_connected(PATIENCE_S)

    async def lapse(self, topic: str | None = None, group: str | None = None) -> int:
        """End the leases of deliveries of a topic or group, or of all deliveries.

        The tasks are delivered again while their first consumers still work on them, as if these
        had become silent. Return the number of leases."""

        def matches(lease: Lease) -> bool:
            in_group = lease.group
            return topic in (None, in_group.topic.name) and group in (None, in_group.name)

        lapsed, core = self._lapse(matches), self._shard.core
        settlement = self._shard.engine.settlement

        def are_over() -> bool:
            expiry_mono_ms = core.expiry_mono_ms
            is_searched = expiry_mono_ms is None or expiry_mono_ms > self._sources.mono_ms()
            return is_searched and not settlement.is_expiring

        await _until(are_over)
        return lapsed

    def lose_replies(self, count: int = 1) -> None:
        """Lose the next ``count`` answers of the daemon together with their connections.

        The daemon executes the requests, but the client has to resend them on a new connection."""
        self._losses = count

    def duplicate(self, count: int = 1) -> None:
        """Duplicate the tasks of the next ``count`` DELIVER frames.

        Their leases expire at once, so each task is delivered again, as the next attempt, while its
        first consumer works on it. A subscription with ``prefetch=1`` gets no second delivery."""
        self._duplicates = count

    @contextmanager
    def failing_store(self) -> Iterator[None]:
        """Cause the store to refuse all batches, so that producers are refused and acks wait until
        the context ends."""
        cast(Any, self._store).commit = _refuse
        try:
            yield
        finally:
            vars(self._store).pop("commit", None)

    # --- details --------------------------------------------------------------------------------

    @property
    def _shard(self) -> Shard:
        daemon = self._inside.daemon
        if daemon is None or daemon.roles.shard is None:
            raise RuntimeError("the test wheel is not running: use it as a context manager")
        return daemon.roles.shard

    @property
    def _store(self) -> MemoryStore:
        assert self._inside.daemon is not None, "the daemon is running"
        return cast(MemoryStore, self._inside.daemon.roles.store)

    def _watch(self, end: End) -> None:
        end.is_lost = self._faults_of_a_connection()

    def _faults_of_a_connection(self) -> Callable[[bytes], bool]:
        """Return a function that injects faults into the data written to one connection.

        The function returns whether the data is lost. The answer to HELLO is never lost."""
        is_greeted = False

        def loses(data: bytes) -> bool:
            nonlocal is_greeted
            was_greeted, is_greeted = is_greeted, True  # the first data is the answer to HELLO
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

    def _lapse(self, matches: Callable[[Lease], bool]) -> int:
        """Cause matching leases to expire with the next tick. Return their number."""
        shard, mono_ms, lapsed = self._shard, self._sources.mono_ms(), 0
        for group in list(shard.core.leased):
            leases = [lease for lease in group.flight.values() if matches(lease)]
            for lease in leases:
                lease.deadline_mono_ms = mono_ms
            if leases:
                shard.core.expires(group, mono_ms)
                lapsed += len(leases)
        shard.wake()
        return lapsed


class WheelCase:
    """A base class that gives each test a ``TestWheel`` as ``self.wheel``.

    class OrderTest(WheelCase, IsolatedAsyncioTestCase): ...
    """

    wheel: TestWheel

    async def asyncSetUp(self) -> None:
        self.wheel = await cast(Any, self).enterAsyncContext(TestWheel())


class _WheelClient(InsideClient):
    """A client that knows its wheel."""

    wheel: TestWheel


def _waiting_callbacks() -> Collection[Any] | None:
    """Return the callbacks that wait for a turn of the event loop. None: the loop hides them."""
    return getattr(asyncio.get_running_loop(), "_ready", None)


async def _refuse(*_: Any) -> bool:
    raise CommitRefused("the test makes the store refuse all batches")


async def _until(done: Callable[[], bool]) -> None:
    """Let the event loop run until ``done`` returns True."""
    while not done():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)


P = ParamSpec("P")
R = TypeVar("R")


class SyncTestWheel:
    """A ``TestWheel`` for blocking code.

    ``client`` is a ``tickwheel.sync.Client``, and every call blocks until it is complete. The only
    additional thread is that of the client."""

    __test__ = False

    def __init__(self, now: datetime | None = None, **settings: Any) -> None:
        self._wheel = TestWheel(now, **settings)
        self._hosted = _SyncClient(self._wheel, self)
        self.client: sync.Client = self._hosted

    def __enter__(self) -> Self:
        self.client.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the daemon and close the client."""
        self._call(TestWheel.close)
        self.client.close()

    def serving(self, app: Any) -> AbstractContextManager[None]:
        """Run the application's ``tickwheel.contrib.fastapi`` lifespan, with client and worker, on
        this wheel instead of a daemon: ``with wheel.serving(app), TestClient(app) as http:``.

        Earlier subscriptions and deliveries end when the application starts."""
        return _serving(app, self)

    def new_client(self, **options: Any) -> sync.Client:
        """Return another client of this wheel, with a separate connection, in the thread of
        ``client``. ``options`` are those of ``Client``."""

        async def connect(wheel: TestWheel) -> sync.Client:
            inner = await wheel.new_client(**options).connect()
            return sync.on_loop(inner, asyncio.get_running_loop())

        return self._call(connect)

    @contextmanager
    def working(self, *workers: Worker) -> Iterator[None]:
        """See ``TestWheel.working``. Asynchronous handlers run in the thread of ``client``, plain
        functions in threads of the worker."""
        running = self._wheel.working(*workers)
        self._call(lambda _: running.__aenter__())
        try:
            yield
        finally:
            self._call(lambda _: running.__aexit__(None, None, None))

    @asynccontextmanager
    async def on_this_loop(self) -> AsyncIterator[TestWheel]:
        """Move the wheel to the current event loop for an application, and move it back at the end.

        Calls of this object use the wheel on either loop."""
        await asyncio.to_thread(self._leave_thread)
        client = await self._wheel.client.connect()
        self._hosted.runtime = sync.ForeignLoop(client, asyncio.get_running_loop())
        try:
            yield self._wheel
        finally:
            await finish_despite_cancellation(self._wheel._rest())
            self._hosted.runtime = None  # the next call starts a thread

    def _leave_thread(self) -> None:
        self._call(TestWheel._rest)
        runtime, self._hosted.runtime = self._hosted.runtime, None
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
        return self._hosted.call(lambda _: method(self._wheel, *arguments, **options))


class _SyncClient(sync.HostedClient):
    def __init__(self, inner: TestWheel, wheel: SyncTestWheel) -> None:
        super().__init__(inner.new_client)
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
