"""The parts of a shard that its operations and background work use.

``Shard`` creates and connects these parts. Operations depend on the protocol ``Parts`` and never on
``Shard``, so they do not know how a shard starts, ticks and stops.

``SlowRequests`` queues slow requests and sends their answers. It runs one request per caller at a
time, and a few in the whole daemon. Callers take turns; a caller that cannot receive more answers
is skipped. The queue knows nothing about the requests themselves. Invariant: a waiting request of a
disconnected caller never begins.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.errors import Overloaded, Refused, TickwheelError
from tickwheel.persistence.contract import Fenced, StoreBroken, StoreBusy, StoreError
from tickwheel.server.checks import check_limit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping

    from tickwheel.clock import Clock
    from tickwheel.engine.engine import Engine
    from tickwheel.engine.state import Core
    from tickwheel.history.daemon import History
    from tickwheel.limits import Limits
    from tickwheel.persistence.contract import Store
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Border, Call, Caller, OnEvent
    from tickwheel.server.shard.committer import Committer
    from tickwheel.server.shard.reads import Commands, Reader


class Sender(Protocol):
    """Sends the tasks of groups with targets."""

    @property
    def callback_url(self) -> str | None:
        """The URL for callbacks of endpoints; None if this daemon does not serve HTTP."""
        ...

    def changed(self) -> None:
        """Reload the targets, because some were set or removed."""
        ...

    def state(self, topic: str, group: str) -> Mapping[str, Any]:
        """Return the state of a group's target: fields of ``TargetInfo``."""
        ...

    restarts: int
    """Number of restarts of the outbound process."""

    def count(self, word: str) -> int:
        """Return the number of targets in a state, or of all targets if ``word`` is empty."""
        ...

    def total(self, name: str) -> int:
        """Return the attempts of all targets since the daemon's start. ``name`` is ``sent``,
        ``acked`` or ``failed``."""
        ...

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Send the process a request and return its answer. Raise TickwheelError."""
        ...


class Directory(Protocol):
    """All nodes that share the store, and the locations of the shards."""

    shard: int | None
    """The shard of this daemon; None for a node's front door, which has no shard."""

    def whereabouts(self, shard: int) -> tuple[str, str]:
        """Return (TCP address, HTTP address) of the shard's leader; empty strings if unknown."""
        ...

    def route(self) -> tuple[int, tuple[str, ...]]:
        """Return (version, addresses of all shards in order)."""
        ...

    def doors(self) -> tuple[str, ...]:
        """Return the addresses of the front doors of nodes; only some if there are many."""
        ...

    def listing(self) -> dict[str, Any]:
        """Return the latest answer to the verb ``nodes``."""
        ...

    async def place(self, shard: int, node: str | None) -> None:
        """Record the node that must lead a shard. None allows any node. Raise BadRequest, NotFound,
        StoreError."""
        ...

    async def drain(self, node: str, *, draining: bool) -> None:
        """Record whether a node must give up its shards. Raise NotFound, StoreError."""
        ...


class Parts(Protocol):
    """The parts of a running shard."""

    settings: Settings
    limits: Limits
    epoch: int
    engine: Engine
    core: Core
    """The engine's state."""
    store: Store
    clock: Clock
    border: Border
    reader: Reader
    committer: Committer
    commands: Commands
    history: History | None
    outbound: Sender | None
    """Sends the tasks of groups with targets; None if this daemon sends none."""
    directory: Directory | None
    """All nodes; None if this daemon does not belong to a node."""
    observed: Observed
    on_event: OnEvent
    status: Callable[[], dict[str, Any]]
    """Returns the answer to STATUS."""
    callers: set[Caller]
    loaded: asyncio.Event
    """Set when every stored task is in memory. Commands on tasks wait for it."""
    draining: bool
    """Whether the daemon is shutting down and refuses new tasks."""
    started_mono_ms: int

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background. An error stops the daemon."""
        ...

    def wake(self) -> None:
        """Request a tick."""
        ...

    def can_receive(self, caller: Caller) -> bool:
        """Return whether the caller can be sent another answer."""
        ...

    def may_begin_command(self, caller: Caller) -> bool:
        """Return whether changes by commands and answers to this caller are within limits."""
        ...

    def accepts_tasks(self) -> bool:
        """Return whether schedules and resets can currently create tasks."""
        ...


Work = Callable[[], Coroutine[Any, Any, None]]


class SlowRequests:
    """A queue of slow requests. When a request ends, the next one begins."""

    def __init__(
        self, parts: Parts, caller_max: str, all_max: str = "", *, at_a_time: int = 1
    ) -> None:
        """``caller_max`` and ``all_max`` name the settings that limit the requests of one caller
        and of all callers (by default the same setting)."""
        self._parts = parts
        self._limits = caller_max, all_max or caller_max
        self._at_a_time = at_a_time
        self._waiting: OrderedDict[Caller, deque[Work]] = OrderedDict()
        self._busy: set[Caller] = set()
        self.count = 0
        """Number of requests that wait or run."""

    def answer(
        self,
        call: Call[Any],
        work: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        *,
        at_once: bool = False,
    ) -> None:
        """Queue ``work``, and answer with its result. Raise Overloaded if the queue is full. With
        ``at_once``, the request does not wait until all tasks are loaded after a start."""
        parts = self._parts

        async def run() -> None:
            try:
                if not at_once:
                    await parts.loaded.wait()
                result = await work()
            except TickwheelError as error:
                if isinstance(error, (Fenced, StoreBroken)):
                    raise  # ends the daemon
                if isinstance(error, StoreBusy):
                    error = Overloaded(error.message)
                elif isinstance(error, StoreError):
                    error = Refused(f"the store could not execute the request: {error.message}")
                call.refuse(error)
            except Exception as error:
                call.refuse(parts.border.survive(f"a look-up of {call.caller.address}", error))
            else:
                parts.committer.answer(call, result)

        self._put(call.caller, run)

    def _put(self, caller: Caller, work: Work) -> None:
        queue = self._waiting.get(caller)
        of_caller = (len(queue) if queue else 0) + (caller in self._busy)
        settings, (caller_max, all_max) = self._parts.settings, self._limits
        subject = "such requests of this connection are unanswered"
        check_limit(Overloaded, of_caller, subject, settings, caller_max)
        check_limit(Overloaded, self.count, "such requests are unanswered", settings, all_max)
        self.count += 1
        if queue is None:
            queue = self._waiting[caller] = deque()
        queue.append(work)
        self.begin_waiting()

    def begin_waiting(self) -> None:
        """Begin waiting requests while more can run."""
        while self._waiting and len(self._busy) < self._at_a_time:
            caller = next((caller for caller in self._waiting if self._may_begin(caller)), None)
            if caller is None:
                return
            queue = self._waiting.pop(caller)
            work = queue.popleft()
            if queue:
                self._waiting[caller] = queue  # its next turn comes last
            self._busy.add(caller)
            self._parts.spawn(self._do(caller, work))

    def _may_begin(self, caller: Caller) -> bool:
        return caller not in self._busy and self._parts.can_receive(caller)

    def closed(self, caller: Caller) -> None:
        """Drop the waiting requests of a disconnected caller."""
        self.count -= len(self._waiting.pop(caller, ()))

    async def _do(self, caller: Caller, work: Work) -> None:
        try:
            await work()
        finally:
            self._busy.discard(caller)
            self.count -= 1
            self.begin_waiting()


def when_free(
    parts: Parts,
    caller: Caller,
    what: str,
    is_free: Callable[[], bool],
    act: Callable[[], None],
    refuse: Callable[[TickwheelError], None],
) -> None:
    """Call ``act`` as soon as ``is_free`` returns True, which a batch that lands can change. Do
    nothing if the caller has disconnected by then. ``what`` names the command in the log."""
    if is_free():
        act()
        return

    def again() -> None:
        if caller.is_open:
            parts.border.run(
                what, lambda: when_free(parts, caller, what, is_free, act, refuse), refuse
            )

    parts.committer.after_all(again)
