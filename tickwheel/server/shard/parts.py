"""The parts of a shard that its operations, and what it does beside its work, use.

``Shard`` makes them and puts all together. Whoever works on a shard names this protocol and never
the shard: so an operation can stand beside what it is about, and none knows how a shard starts,
ticks and stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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
    from tickwheel.server.shard.callers import Border, Caller, OnEvent
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
