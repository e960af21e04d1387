"""The parts of a shard that its operations, and what it does beside its work, use.

``Shard`` makes them and puts all together. Whoever works on a shard names this protocol and never
the shard: so an operation can stand beside what it is about, and none knows how a shard starts,
ticks and stops.

``Listings`` is the part that several operations have of their own: requests that take a while, who
may have how many, whose turn it is, and their answers. Each caller has one of them under way at a
time, the daemon a few; the others wait in line, the callers in turn, those that can take no more
answers not at all. Knows nothing of what is asked. Invariant: what waits of a caller that is gone
is never begun.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.errors import Overloaded, Refused, TickwheelError
from tickwheel.persistence.contract import Fenced, StoreBroken, StoreBusy, StoreError
from tickwheel.server.checks import room

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
    from tickwheel.server.shard.callers import Ask, Border, Caller, OnEvent
    from tickwheel.server.shard.committer import Committer
    from tickwheel.server.shard.reads import Commands, Reader


class Sender(Protocol):
    """What sends the tasks of groups with targets."""

    @property
    def callbacks(self) -> str | None:
        """Where callbacks of endpoints go to; None: this daemon has no HTTP."""
        ...

    def changed(self) -> None:
        """Take note that targets were set, or taken away."""
        ...

    def state(self, topic: str, group: str) -> Mapping[str, Any]:
        """How a target goes: fields of ``TargetInfo``."""
        ...

    restarts: int
    """How often its process was started again."""

    def count(self, word: str) -> int:
        """How many targets are in a state; "": how many there are."""
        ...

    def total(self, name: str) -> int:
        """Attempts of all targets since the daemon began: ``sent``, ``acked`` or ``failed``."""
        ...

    async def ask(self, what: str, **said: Any) -> dict[str, Any]:
        """The answer of the process to a question. Raises TickwheelError."""
        ...


class Directory(Protocol):
    """All nodes that share the store, and where the shards are."""

    shard: int | None
    """The shard of this daemon; None: it is a node's front door, which has none."""

    def whereabouts(self, shard: int) -> tuple[str, str]:
        """(address, HTTP) of the daemon that leads a shard; empty where that is not known."""
        ...

    def route(self) -> tuple[int, tuple[str, ...]]:
        """(version, the addresses of all shards in their order)."""
        ...

    def doors(self) -> tuple[str, ...]:
        """The front doors of the nodes that are there, some of many."""
        ...

    def listing(self) -> dict[str, Any]:
        """What the verb ``nodes`` answers, as it was seen last."""
        ...

    async def place(self, shard: int, node: str | None) -> None:
        """Note where a shard shall be; None: anywhere. Raises BadRequest, NotFound, StoreError."""
        ...

    async def drain(self, node: str, *, draining: bool) -> None:
        """Note whether a node shall have no shards. Raises NotFound, StoreError."""
        ...


class Parts(Protocol):
    """The parts of one shard at work."""

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
    """What sends the tasks of groups with targets; None: nothing does."""
    directory: Directory | None
    """All nodes; None: this daemon is not one of a node."""
    observed: Observed
    on_event: OnEvent
    status: Callable[[], dict[str, Any]]
    """What STATUS answers, worked out when it is asked."""
    callers: set[Caller]
    loaded: asyncio.Event
    """Set when every stored task is in memory: commands that name tasks may run."""
    draining: bool
    """Whether the daemon is shutting down, so that nothing new is taken."""
    started_mono_ms: int

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the shard; an error of it ends the daemon."""
        ...

    def wake(self) -> None:
        """Ask for a tick: something may be due."""
        ...

    def takes_more(self, caller: Caller) -> bool:
        """Whether the caller may be sent another answer."""
        ...

    def has_room(self, caller: Caller) -> bool:
        """Whether changes by commands, and this caller's answers, may wait for the store in such
        numbers."""
        ...

    def takes_tasks(self) -> bool:
        """Whether tasks that nobody waits for may be made: those of schedules, and of resets."""
        ...


Work = Callable[[], Coroutine[Any, Any, None]]


class Listings:
    """A queue of slow requests: ``answer`` begins what there is room for, each end begins the
    next."""

    def __init__(
        self, parts: Parts, caller_max: str, all_max: str = "", *, at_a_time: int = 1
    ) -> None:
        """``caller_max`` and ``all_max`` are settings: the limits of a caller and of all (default:
        the same)."""
        self._parts = parts
        self._limits = caller_max, all_max or caller_max
        self._at_a_time = at_a_time
        self._waiting: OrderedDict[Caller, deque[Work]] = OrderedDict()
        self._busy: set[Caller] = set()
        self.count = 0
        """How many requests wait or are under way."""

    def answer(
        self,
        ask: Ask[Any],
        work: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        *,
        at_once: bool = False,
    ) -> None:
        """Do ``work`` when its turn comes, then answer with what it returns. ``at_once``: it needs
        none of the tasks that a start is still loading. Raises Overloaded."""
        parts = self._parts

        async def run() -> None:
            try:
                if not at_once:
                    await parts.loaded.wait()
                result = await work()
            except TickwheelError as error:
                if isinstance(error, (Fenced, StoreBroken)):
                    raise  # it ends the daemon
                if isinstance(error, StoreBusy):
                    error = Overloaded(error.message)
                elif isinstance(error, StoreError):
                    error = Refused(f"the store could not do it: {error.message}")
                ask.refuse(error)
            except Exception as error:
                ask.refuse(parts.border.survive(f"a look-up of {ask.caller.address}", error))
            else:
                parts.committer.answer(ask, result)

        self._put(ask.caller, run)

    def _put(self, caller: Caller, work: Work) -> None:
        line = self._waiting.get(caller)
        of_caller = (len(line) if line else 0) + (caller in self._busy)
        settings, (caller_max, all_max) = self._parts.settings, self._limits
        said = "such requests of this connection are not answered"
        room(Overloaded, of_caller, said, settings, caller_max)
        room(Overloaded, self.count, "such requests are not answered", settings, all_max)
        self.count += 1
        if line is None:
            line = self._waiting[caller] = deque()
        line.append(work)
        self.go_on()

    def go_on(self) -> None:
        """Begin waiting requests while there is room for more."""
        while self._waiting and len(self._busy) < self._at_a_time:
            caller = next((one for one in self._waiting if self._may_begin(one)), None)
            if caller is None:
                return
            line = self._waiting.pop(caller)
            work = line.popleft()
            if line:
                self._waiting[caller] = line  # behind the others
            self._busy.add(caller)
            self._parts.spawn(self._do(caller, work))

    def _may_begin(self, caller: Caller) -> bool:
        return caller not in self._busy and self._parts.takes_more(caller)

    def closed(self, caller: Caller) -> None:
        """Drop the waiting requests of a caller that is gone."""
        self.count -= len(self._waiting.pop(caller, ()))

    async def _do(self, caller: Caller, work: Work) -> None:
        try:
            await work()
        finally:
            self._busy.discard(caller)
            self.count -= 1
            self.go_on()


def when_free(
    parts: Parts,
    caller: Caller,
    what: str,
    is_free: Callable[[], bool],
    act: Callable[[], None],
    refuse: Callable[[TickwheelError], None],
) -> None:
    """``act`` when ``is_free``: at once, or behind the batches that hold what may still be undone.
    A caller that is gone by then is forgotten. ``what``: the command, for the log."""
    if is_free():
        act()
        return

    def again() -> None:
        if caller.is_open:
            parts.border.run(
                what, lambda: when_free(parts, caller, what, is_free, act, refuse), refuse
            )

    parts.committer.after_all(again)
