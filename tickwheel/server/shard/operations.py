"""Every verb of the daemon, on plain values: what a transport calls.

An operation gets an ``Ask``: who asks, the number to answer with, and a request whose values are
checked one by one (``tickwheel.api``). It checks what only it can: values together, the daemon's
settings, what exists. It does what it says, and gives the answer to the caller's ``ReplySink`` when
everything that the answer rests on is durable. What is wrong is raised, from the error table. Verbs
whose frames are read by hand get plain values instead, and check them. Deliveries go to the
``DeliverySink`` that the transport gave with its subscription. Nothing here knows bytes, frames or
connections; ``api.verbs.VERBS`` names the right that each operation needs.

A transport wraps each request like this: ``begin()``, then the operation; a ``TickwheelError`` is
the answer, any other exception goes to ``contain``.

The verbs about nodes (which there are, where operators want shards to be, who is drained) stand
here. What they say is in the store that all nodes share, and is read and written by a
``Directory``; here is only what a caller is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from tickwheel.api.verbs import VERBS
from tickwheel.errors import Conflict, InternalError, NotActive, TickwheelError
from tickwheel.server.logs import Sparing
from tickwheel.server.shard.backups import BackingUp, Restoring
from tickwheel.server.shard.bulk import Bulks
from tickwheel.server.shard.callers import OUTBOUND
from tickwheel.server.shard.delivery import Consuming
from tickwheel.server.shard.enqueue import Producing
from tickwheel.server.shard.groups import Grouping, Lining
from tickwheel.server.shard.names import Naming
from tickwheel.server.shard.overview import Watching
from tickwheel.server.shard.resets import Resetting
from tickwheel.server.shard.schedules import Scheduling
from tickwheel.server.shard.settlement import Settling
from tickwheel.server.shard.targets import Targeting
from tickwheel.server.shard.tasks import Controlling, Explaining, TaskPages
from tickwheel.server.shard.transactions import Transacting

if TYPE_CHECKING:
    from tickwheel.api.daemon import Nothing
    from tickwheel.api.nodes import DrainNode, MoveShard
    from tickwheel.clock import Clock, Now
    from tickwheel.limits import Limits
    from tickwheel.persistence.contract import Leader
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Ask, Caller, OnEvent
    from tickwheel.server.shard.enqueue import PlainTasks
    from tickwheel.server.shard.parts import Directory, Listings, Parts
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.verbs import Verbs
    from tickwheel.server.shard.views import ValueBytes


def known(directory: Directory | None) -> Directory:
    """The directory. Raises Conflict where the daemon is not one of a node."""
    if directory is None:
        raise Conflict(
            "this daemon is not a node: its shards do not move. Nodes share a Redis, with ?shards=N"
            " in the URL of its store"
        )
    return directory


class Placing:
    """The operations about nodes."""

    def __init__(self, parts: Parts, listings: Listings) -> None:
        self._parts = parts
        self._listings = listings

    def nodes(self, ask: Ask[Nothing]) -> None:
        """Answer all nodes and shards, as this daemon's node saw them last. Raises Conflict."""
        ask.answer(known(self._parts.directory).listing())

    def move_shard(self, ask: Ask[MoveShard]) -> None:
        """Note where a shard shall be, then answer. Raises Conflict, Overloaded."""
        directory, shard, node = known(self._parts.directory), ask.request.shard, ask.request.node

        async def work() -> dict[str, Any]:
            await directory.place(shard, node)
            return {"shard": shard, "node": node}

        self._listings.answer(ask, work, at_once=True)

    def drain_node(self, ask: Ask[DrainNode]) -> None:
        """Note whether a node shall have shards, then answer. Raises Conflict, Overloaded."""
        directory, node = known(self._parts.directory), ask.request.node
        draining = ask.request.draining

        async def work() -> dict[str, Any]:
            await directory.drain(node, draining=draining)
            return {"node": node, "draining": draining}

        self._listings.answer(ask, work, at_once=True)


class Conversing(Protocol):
    """The daemon's part in a conversation, as a leader and a standby have it, and the verbs."""

    role: str
    settings: Settings
    limits: Limits
    """The limits of the daemon, as HELLO announces them."""
    frame_bytes_max: int
    clock: Clock

    @property
    def verbs(self) -> Verbs: ...

    def begin(self) -> None: ...

    def contain(self, what: str, error: Exception) -> TickwheelError: ...

    def survive(self, what: str, error: Exception) -> TickwheelError: ...

    def fail(self, error: BaseException) -> None: ...

    def greeting(self) -> dict[str, Any]: ...

    @property
    def directory(self) -> Directory | None: ...

    def opened(self, caller: Caller) -> None: ...

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None: ...

    def unblocked(self, caller: Caller) -> None: ...

    def closed(self, caller: Caller, broke: str = "") -> None: ...

    def finished(self, caller: Caller) -> None: ...

    def is_behind(self, caller: Caller) -> bool: ...

    def handled(self) -> None: ...

    def after_all(self, act: Callable[[], None]) -> None: ...

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None: ...


Operation = Callable[..., Any]
Unreadable = Callable[["Caller", str, TickwheelError], None]


def table(
    operations: Mapping[str, Operation], plain_tasks: PlainTasks | None, unreadable: Unreadable
) -> Verbs:
    """Make the verbs of operations by their names."""
    found = SimpleNamespace(**operations, plain_tasks=plain_tasks, unreadable=unreadable)
    return cast("Verbs", found)  # generated from the same declarations


def gathered(parts: Iterable[object], plain_tasks: PlainTasks) -> Verbs:
    """Gather the verbs from the parts of a shard; exactly one part has each."""
    found: dict[str, Operation] = {}
    for name in VERBS:
        [found[name]] = [getattr(part, name) for part in parts if hasattr(part, name)]
    return table(found, plain_tasks, _unnoted)


def _unnoted(caller: Caller, verb: str, error: TickwheelError) -> None:
    """Take no note of a request that cannot be read."""


class Operations:
    """One shard's part in conversations, and its verbs. ``value_bytes`` says what a value takes in
    an answer."""

    role = "active"

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self.shard = shard
        self.settings = shard.settings
        self.limits = shard.limits
        self.frame_bytes_max = shard.limits.frame_bytes_max
        self.clock = shard.clock
        self.epoch = shard.epoch
        self._mistakes = Sparing()
        self.begin = shard.border.begin
        self.contain = shard.border.contain
        self.survive = shard.border.survive
        self.fail = shard.fail

        new_tasks, checkbacks, listings = shard.new_tasks, shard.checkbacks, shard.listings
        lags = shard.upkeep.lags
        produce = Producing(shard, new_tasks, shard.coalescing)
        door, tasks = produce.check_door, produce.checked
        self.join, self._end_session = produce.join, produce.end_session
        settling = Settling(shard)
        self.targeting = Targeting(shard, settling)
        parts = (
            produce,
            Consuming(shard),
            settling,
            Controlling(shard, value_bytes),
            Grouping(shard, shard.upkeep),
            Resetting(shard, shard.bulks, shard.resets),
            Lining(shard, value_bytes),
            Scheduling(shard, new_tasks, value_bytes, door),
            Transacting(shard, checkbacks, new_tasks, listings, value_bytes, door, tasks),
            Bulks(shard, shard.bulks, listings, value_bytes),
            TaskPages(shard, listings, value_bytes),
            BackingUp(shard, shard.backups, shard.backup_folder),
            Explaining(shard, shard.stories.of if shard.stories.is_kept else None, shard.lookups),
            Watching(shard, lags, shard.stories, listings, shard.lookups, value_bytes),
            Restoring(shard, shard.restores, listings),
            Placing(shard, listings),
            Naming(shard),
            self.targeting,
        )
        self.verbs = gathered(parts, produce.plain_tasks)

    @property
    def directory(self) -> Directory | None:
        """Where all shards are, where they move between nodes."""
        return self.shard.directory

    # --- about the caller itself -----------------------------------------------------------------

    def opened(self, caller: Caller) -> None:
        """Take note of a caller that has come."""
        caller.since_ms = self.shard.clock.read().now_ms
        self.shard.callers.add(caller)

    def heard(self, caller: Caller) -> None:
        """Take note of a sign of life from the caller."""
        if caller.presence.doubted:
            self.shard.engine.subscriptions.heard(caller.presence, caller.consumers)
            self.shard.wake()

    def blocked(self, caller: Caller) -> None:
        """Stop deliveries to a caller that does not read, until ``unblocked``."""
        caller.is_blocked = True
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = True

    def unblocked(self, caller: Caller) -> None:
        """Let deliveries go on to a caller that reads again."""
        caller.is_blocked = False
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = False
            self.shard.core.regained(subscriber)
        for group in self.shard.checkbacks.groups_of(caller):
            self.shard.engine.transactions.came(group)
        self.shard.wake()
        self.shard.begin_listings()

    def finished(self, caller: Caller) -> None:
        """End a caller that asks no more. Unlike one that is gone, it keeps each lease to the
        lease's end: it is somewhere, and may settle as another caller."""
        caller.others.clear()
        if caller.subscribers or caller.pulls:
            self.closed(caller)
            return
        caller.close()
        self.shard.callers.discard(caller)
        self._end_session(caller)

    def closed(self, caller: Caller, broke: str = "") -> None:
        """End a caller that is gone: its leases end soon, and its waiting requests are not begun.
        ``broke``: how its connection did, if neither side has ended it."""
        shard = self.shard
        # The process that sends runs nobody's code: no task is the cause of its end.
        is_ours = caller.principal == OUTBOUND
        death = caller.death(broke) if broke and not shard.draining and not is_ours else ""
        caller.close()
        shard.callers.discard(caller)
        for queue in shard.request_queues:
            queue.closed(caller)
        shard.checkbacks.closed(caller)
        mono_ms = shard.clock.read().mono_ms
        for subscriber in caller.consumers:
            if subscriber.sink is not None:
                subscriber.sink.closed()
            shard.engine.subscriptions.disconnected(subscriber, mono_ms, death)
        caller.subscribers.clear()
        caller.pulls.clear()
        caller.others.clear()
        self._end_session(caller)
        shard.wake()

    # --- about the work of all -------------------------------------------------------------------

    def is_own(self, caller: Caller, transaction: str) -> bool:
        """Whether a transaction is the caller's own to decide."""
        found = self.shard.core.transaction_registry.known.get(transaction)
        return found is not None and self.shard.checkbacks.is_own(caller, found.row)

    def is_behind(self, caller: Caller) -> bool:
        """Whether so many answers wait for the store that the caller should ask no more for now."""
        return self.shard.committer.is_behind(caller.replies)

    def handled(self) -> None:
        """Commit and deliver what came of requests that were handled together."""
        self.shard.committer.begin()
        if self.shard.core.runnable:
            self.shard.wake()

    def after_all(self, act: Callable[[], None]) -> None:
        """Call ``act`` behind all answers that are owed by now."""
        self.shard.committer.after_all(act)

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None:
        """Log that a conversation is ended for what its caller did."""
        rest = self._mistakes.note(self.clock.read().mono_ms / 1000)
        if rest is not None:
            event = "connection_closed_quietly" if quiet else "connection_closed"
            self.shard.on_event(event, f"{caller.address}: {error}{rest}")

    def greeting(self) -> dict[str, Any]:
        """The daemon's part in the cluster, with which a conversation begins."""
        return {"epoch": self.epoch, "role": self.role, "active": None}


# --- standing by ---------------------------------------------------------------------------------

FRAME_BYTES_MAX = 64 * 1024
"""Bytes of a request that are looked at: nobody who knows the role sends more."""


class StandbyOperations:
    """The operations of a standby: ``ping``, ``status``, ``nodes``, ``leave``; others are
    ``not_active``."""

    role = "standby"
    frame_bytes_max = FRAME_BYTES_MAX

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        clock: Clock,
        *,
        active: Callable[[], Leader | None],
        status: Callable[[], dict[str, Any]],
        on_event: OnEvent,
        directory: Directory | None = None,
    ) -> None:
        """``active`` returns the daemon that leads, as far as is known."""
        self.settings = settings
        self.limits = limits
        self.clock = clock
        self._active = active
        self._status = status
        self._on_event = on_event
        self.directory = directory
        own = {name: getattr(self, name) for name in VERBS if hasattr(self, name)}
        self.verbs = table(own, None, _unnoted)

    def refusal(self) -> NotActive:
        """The answer to all that only the leader can do."""
        leader = self._active()
        if leader is None:
            return NotActive("this daemon stands by; none is known to be active")
        http = f" (HTTP: {leader.http})" if leader.http else ""
        return NotActive(f"this daemon stands by; the active one is {leader.address}{http}")

    def whereabouts(self) -> tuple[str | None, str | None]:
        """(address, HTTP URL) of the leader, as far as they are known."""
        leader = self._active()
        return (None, None) if leader is None else (leader.address, leader.http or None)

    def ping(self, ask: Ask[Nothing]) -> None:
        """Say that the daemon is there."""
        ask.answer(None)

    def status(self, ask: Ask[Nothing]) -> None:
        """Answer what the daemon says of itself."""
        ask.answer(self._status())

    def nodes(self, ask: Ask[Nothing]) -> None:
        """Answer all nodes and shards, as this daemon's node saw them last. Raises Conflict."""
        ask.answer(known(self.directory).listing())

    def leave(self, caller: Caller, request: int, now: Now) -> None:
        """Let the caller go; there is nothing to forget."""
        caller.answer(request, None)

    def greeting(self) -> dict[str, Any]:
        """The daemon's part in the cluster, with which a conversation begins."""
        return {"epoch": 0, "role": self.role, "active": self.whereabouts()[0]}

    # --- a conversation, of which nothing is remembered ------------------------------------------

    def begin(self) -> None: ...

    def contain(self, what: str, error: Exception) -> TickwheelError:
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        self._on_event("internal_error", f"{what}: {type(error).__name__}: {error}")
        return InternalError(f"{type(error).__name__}; see the daemon's log")

    def fail(self, error: BaseException) -> None:
        raise error

    def opened(self, caller: Caller) -> None: ...

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None:
        caller.is_blocked = True

    def unblocked(self, caller: Caller) -> None:
        caller.is_blocked = False

    def closed(self, caller: Caller, broke: str = "") -> None:
        caller.close()

    def finished(self, caller: Caller) -> None:
        caller.close()

    def is_behind(self, caller: Caller) -> bool:
        return False

    def handled(self) -> None: ...

    def after_all(self, act: Callable[[], None]) -> None:
        act()

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None: ...
