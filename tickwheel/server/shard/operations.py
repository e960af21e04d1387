"""The operations of the daemon, one per verb, which every transport calls.

An operation receives a ``Call`` with the caller, the number of the answer, and a request whose
values were checked individually (``tickwheel.api``). It checks combinations of values, settings and
existing objects, executes the request, and gives the answer to the caller's ``ReplySink`` after
everything that the answer depends on is durable. Errors are raised. Verbs with handwritten decoding
receive plain values and check them. Deliveries go to the ``DeliverySink`` of the subscription. This
module knows no bytes, frames or connections. ``api.verbs.VERBS`` names the right that each
operation needs.

A transport calls ``begin()`` and then the operation. If the operation raises a ``TickwheelError``,
that is the answer; any other exception must be passed to ``contain``.

The verbs on nodes are here as well. Their data is in the store that all nodes share; a
``Directory`` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from tickwheel.api.verbs import VERBS
from tickwheel.errors import Conflict, NotActive, TickwheelError
from tickwheel.server.logs import LogRateLimit
from tickwheel.server.shard.backups import BackingUp, Restoring
from tickwheel.server.shard.bulk import Bulks
from tickwheel.server.shard.callers import OUTBOUND, survive
from tickwheel.server.shard.delivery import Consuming
from tickwheel.server.shard.enqueue import Producing
from tickwheel.server.shard.groups import Grouping, KeyOperations
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
    from tickwheel.server.shard.callers import Call, Caller, OnEvent
    from tickwheel.server.shard.enqueue import PlainTasks
    from tickwheel.server.shard.parts import Directory, Parts, SlowRequests
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.verbs import Verbs
    from tickwheel.server.shard.views import ValueBytes


def directory_of(directory: Directory | None) -> Directory:
    """Return the directory. Raise Conflict if the daemon does not belong to a node."""
    if directory is None:
        raise Conflict(
            "this daemon is not a node: its shards do not move. Nodes share a Redis or PostgreSQL,"
            " with ?shards=N in the URL of the store"
        )
    return directory


class Placing:
    """The operations on nodes."""

    def __init__(self, parts: Parts, listings: SlowRequests) -> None:
        self._parts = parts
        self._listings = listings

    def nodes(self, call: Call[Nothing]) -> None:
        """Answer with all nodes and shards, as last read by this daemon's node. Raise Conflict."""
        call.answer(directory_of(self._parts.directory).listing())

    def move_shard(self, call: Call[MoveShard]) -> None:
        """Record which node must lead a shard, and answer. Raise Conflict, Overloaded."""
        directory, shard, node = (
            directory_of(self._parts.directory),
            call.request.shard,
            call.request.node,
        )

        async def work() -> dict[str, Any]:
            await directory.place(shard, node)
            return {"shard": shard, "node": node}

        self._listings.answer(call, work, at_once=True)

    def drain_node(self, call: Call[DrainNode]) -> None:
        """Record whether a node must give up its shards, and answer. Raise Conflict, Overloaded."""
        directory, node = directory_of(self._parts.directory), call.request.node
        draining = call.request.draining

        async def work() -> dict[str, Any]:
            await directory.drain(node, draining=draining)
            return {"node": node, "draining": draining}

        self._listings.answer(call, work, at_once=True)


class ShardInterface(Protocol):
    """The interface of a leader or standby for transports, including its verbs."""

    role: str
    settings: Settings
    limits: Limits
    """The limits that HELLO announces."""
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

    def join(self, caller: Caller, session: bytes, now: Now) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None: ...

    def unblocked(self, caller: Caller) -> None: ...

    def closed(self, caller: Caller, failure: str = "") -> None: ...

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
    """Return an object with these operations, by name, as its verbs."""
    verbs = SimpleNamespace(**operations, plain_tasks=plain_tasks, unreadable=unreadable)
    return cast("Verbs", verbs)  # generated from the same declarations


def collect_verbs(parts: Iterable[object], plain_tasks: PlainTasks) -> Verbs:
    """Collect the verbs from the parts of a shard. Exactly one part must have each verb."""
    operations: dict[str, Operation] = {}
    for name in VERBS:
        [operations[name]] = [getattr(part, name) for part in parts if hasattr(part, name)]
    return table(operations, plain_tasks, _ignore_unreadable)


def _ignore_unreadable(caller: Caller, verb: str, error: TickwheelError) -> None:
    """Do not log a request that cannot be read."""


class Operations:
    """The interface of one shard for transports, including its verbs. ``value_bytes`` returns the
    size of a value in an answer."""

    role = "active"

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self.shard = shard
        self.settings = shard.settings
        self.limits = shard.limits
        self.frame_bytes_max = shard.limits.frame_bytes_max
        self.clock = shard.clock
        self.epoch = shard.epoch
        self._mistakes = LogRateLimit()
        self.begin = shard.border.begin
        self.contain = shard.border.contain
        self.survive = shard.border.survive
        self.fail = shard.fail

        new_tasks, checkbacks, listings = shard.new_tasks, shard.checkbacks, shard.listings
        lags = shard.upkeep.lags
        produce = Producing(shard, new_tasks, shard.coalescing)
        check_accepting, check_tasks = produce.check_accepting, produce.checked
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
            KeyOperations(shard, value_bytes),
            Scheduling(shard, new_tasks, value_bytes, check_accepting),
            Transacting(
                shard, checkbacks, new_tasks, listings, value_bytes, check_accepting, check_tasks
            ),
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
        self.verbs = collect_verbs(parts, produce.plain_tasks)

    @property
    def directory(self) -> Directory | None:
        """The locations of all shards; None if shards do not move between nodes."""
        return self.shard.directory

    # --- callers ---------------------------------------------------------------------------------

    def opened(self, caller: Caller) -> None:
        """Register a new caller."""
        caller.since_ms = self.shard.clock.read().now_ms
        self.shard.callers.add(caller)

    def heard(self, caller: Caller) -> None:
        """Record that the caller has sent something, which proves that it is alive."""
        if caller.presence.doubted:
            self.shard.engine.subscriptions.consumer_responded(caller.presence, caller.consumers)
            self.shard.wake()

    def blocked(self, caller: Caller) -> None:
        """Stop deliveries to a caller that does not read, until ``unblocked`` is called."""
        caller.is_blocked = True
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = True

    def unblocked(self, caller: Caller) -> None:
        """Resume deliveries to a caller that reads again."""
        caller.is_blocked = False
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = False
            self.shard.core.reconsider(subscriber)
        for group in self.shard.checkbacks.groups_of(caller):
            self.shard.engine.transactions.member_connected(group)
        self.shard.wake()
        self.shard.begin_slow_requests()

    def finished(self, caller: Caller) -> None:
        """End a caller that sends no more requests. Unlike after ``closed``, its leases last until
        their deadlines, because the client can settle them through another caller."""
        caller.ended_subscribers.clear()
        if caller.subscribers or caller.pulls:
            self.closed(caller)
            return
        caller.close()
        self.shard.callers.discard(caller)
        self._end_session(caller)

    def closed(self, caller: Caller, failure: str = "") -> None:
        """End a disconnected caller: its leases end soon, and its waiting requests never begin.
        ``failure`` describes how a connection broke that neither side had closed."""
        shard = self.shard
        # The outbound process runs no user code, so no task can be the cause of its death.
        is_ours = caller.principal == OUTBOUND
        death = (
            caller.describe_disconnection(failure)
            if failure and not shard.draining and not is_ours
            else ""
        )
        caller.close()
        shard.callers.discard(caller)
        for queue in shard.request_queues:
            queue.closed(caller)
        shard.checkbacks.closed(caller)
        mono_ms = shard.clock.read().mono_ms
        for subscriber in caller.consumers:
            if subscriber.sink is not None:
                subscriber.sink.closed()
                subscriber.sink = None  # a group can remember the subscriber for its order keys
            shard.engine.subscriptions.disconnected(subscriber, mono_ms, death)
        caller.subscribers.clear()
        caller.pulls.clear()
        caller.ended_subscribers.clear()
        self._end_session(caller)
        shard.wake()

    # --- all callers -----------------------------------------------------------------------------

    def is_own(self, caller: Caller, transaction: str) -> bool:
        """Return whether the caller decides the transaction as its owner."""
        entry = self.shard.core.transaction_registry.by_name.get(transaction)
        return entry is not None and self.shard.checkbacks.is_own(caller, entry.row)

    def is_behind(self, caller: Caller) -> bool:
        """Return whether the caller's waiting answers have reached a limit."""
        return self.shard.committer.is_behind(caller.replies)

    def handled(self) -> None:
        """Commit the changes of requests handled together, and deliver their tasks."""
        self.shard.committer.begin()
        if self.shard.core.runnable:
            self.shard.wake()

    def after_all(self, act: Callable[[], None]) -> None:
        """Call ``act`` once all answers that are waiting now have been sent."""
        self.shard.committer.after_all(act)

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None:
        """Log that a connection is closed because of its caller's mistake."""
        suffix = self._mistakes.note(self.clock.read().mono_ms / 1000)
        if suffix is not None:
            event = "connection_closed_quietly" if quiet else "connection_closed"
            self.shard.on_event(event, f"{caller.address}: {error}{suffix}")

    def greeting(self) -> dict[str, Any]:
        """Return the daemon's role for the answer to HELLO."""
        return {"epoch": self.epoch, "role": self.role, "active": None}


# --- standby -------------------------------------------------------------------------------------

FRAME_BYTES_MAX = 64 * 1024
"""Maximum bytes of a request to a standby. Clients that know its role do not send larger ones."""


class StandbyOperations:
    """The operations of a standby: ``ping``, ``status``, ``nodes`` and ``leave``. All others are
    answered with ``not_active``."""

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
        """``active`` returns the leader, or None if it is unknown."""
        self.settings = settings
        self.limits = limits
        self.clock = clock
        self._active = active
        self._status = status
        self._on_event = on_event
        self.directory = directory
        own = {name: getattr(self, name) for name in VERBS if hasattr(self, name)}
        self.verbs = table(own, None, _ignore_unreadable)

    def refusal(self) -> NotActive:
        """Return the answer to requests that only the leader can execute."""
        leader = self._active()
        if leader is None:
            return NotActive("this daemon is a standby; the active daemon is not known")
        http = f" (HTTP: {leader.http})" if leader.http else ""
        return NotActive(f"this daemon is a standby; the active daemon is {leader.address}{http}")

    def whereabouts(self) -> tuple[str | None, str | None]:
        """Return (TCP address, HTTP URL) of the leader; None where unknown."""
        leader = self._active()
        return (None, None) if leader is None else (leader.address, leader.http or None)

    def ping(self, call: Call[Nothing]) -> None:
        """Answer without a value."""
        call.answer(None)

    def status(self, call: Call[Nothing]) -> None:
        """Answer with the daemon's status."""
        call.answer(self._status())

    def nodes(self, call: Call[Nothing]) -> None:
        """Answer with all nodes and shards, as last read by this daemon's node. Raise Conflict."""
        call.answer(directory_of(self.directory).listing())

    def leave(self, caller: Caller, request: int, now: Now) -> None:
        """Acknowledge the goodbye of a caller. A standby keeps no state of callers."""
        caller.answer(request, None)

    def greeting(self) -> dict[str, Any]:
        """Return the daemon's role for the answer to HELLO."""
        return {"epoch": 0, "role": self.role, "active": self.whereabouts()[0]}

    # --- callers without state -------------------------------------------------------------------

    def begin(self) -> None: ...

    def contain(self, what: str, error: Exception) -> TickwheelError:
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        return survive(self._on_event, what, error)

    def fail(self, error: BaseException) -> None:
        raise error

    def opened(self, caller: Caller) -> None: ...

    def join(self, caller: Caller, session: bytes, now: Now) -> None: ...

    def heard(self, caller: Caller) -> None: ...

    def blocked(self, caller: Caller) -> None:
        caller.is_blocked = True

    def unblocked(self, caller: Caller) -> None:
        caller.is_blocked = False

    def closed(self, caller: Caller, failure: str = "") -> None:
        caller.close()

    def finished(self, caller: Caller) -> None:
        caller.close()

    def is_behind(self, caller: Caller) -> bool:
        return False

    def handled(self) -> None: ...

    def after_all(self, act: Callable[[], None]) -> None:
        act()

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None: ...
