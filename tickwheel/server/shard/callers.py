"""Callers, principals and quotas, and the border between a command's checks and its changes.

A caller is the state of one connection or request, independent of the transport. An error before
the border is reported to the client. An error after it leaves memory half changed, so the daemon
must stop.

A ``Quota`` tracks how much one principal has used. Tokens with the same name share a quota over
both transports. It is checked once per request or run of plain requests, never per task. Callers
without limits have no quota. A quota reads no clock: the time is passed to it. Invariants:

* A rate is a bucket that holds one second's allowance. While the bucket is not empty, a request of
  any size is accepted; later requests wait until the bucket has refilled. So every request that
  fits a frame can be sent.
* ``pending`` counts the unfinished tasks, no matter who enqueued them, of all topics to which a
  token with this name may produce (``Scopes``). Staged and half tasks are included. The engine
  keeps this tally (``engine/topics.py``), which is always exact, even after a restart.
* The undecided transactions of one token may take at most half of the room that the others leave.
  So a single token cannot shut out the others.
* A refusal changes nothing and states when to try again.

A ``Principal`` has a name and rights for topics. The declaration of a verb names the right that it
needs (``api.verbs``), and ``guard`` checks it for every transport. A principal without limits is
never checked: its transport calls the operations directly.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar
from weakref import ref

from tickwheel.api.verb import Right
from tickwheel.engine.sessions import ReplySink, Session, StoredAnswer
from tickwheel.engine.state import ROW_OVERHEAD_BYTES
from tickwheel.engine.topics import Presence, Subscriber
from tickwheel.errors import InternalError, Overloaded, TickwheelError

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.engine import Engine
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Tally
    from tickwheel.engine.transaction_registry import Transaction
    from tickwheel.model.kinds import Half

ALL_TOPICS: Final = "*"
PRINCIPALS_KEPT_MAX: Final = 1_024
"""Maximum number of principals whose checked operations are cached, which only saves time."""


TopicFilter = Callable[[str], bool]
"""Returns whether the caller may use the topic with this name."""


class Topics:
    """The topics that match patterns: a name, a prefix followed by ``*``, or ``*``."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = frozenset(patterns)
        self.matches_all = ALL_TOPICS in self._patterns
        self._names = frozenset(p for p in self._patterns if not p.endswith(ALL_TOPICS))
        self._prefixes = tuple(sorted(p[:-1] for p in self._patterns - self._names))

    def __call__(self, topic: str) -> bool:
        return topic in self._names or topic.startswith(self._prefixes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topics) and other._patterns == self._patterns

    def __hash__(self) -> int:
        return hash(self._patterns)


Grants = tuple[tuple[Right, tuple[str, ...]], ...]
"""Each right with the patterns of its topics."""


class Quotas(NamedTuple):
    """The limits of a principal; None means no limit."""

    tasks_per_s: float | None = None
    bytes_per_s: float | None = None
    pending: int | None = None
    """Unfinished tasks on all topics that the principal may produce to."""
    connections: int | None = None
    subscriptions: int | None = None
    transactions: int | None = None
    """Undecided transactions; None allows a token to use at most half of the free ones."""


class Principal(NamedTuple):
    """A user or process with a verified identity; ``name`` is empty for anonymous callers."""

    name: str
    grants: Grants | None
    """The principal's rights; None grants all."""
    token_id: str = ""
    """The id of the principal's token in the token file, or an empty string."""
    quotas: Quotas | None = None

    @property
    def is_limited(self) -> bool:
        return self.grants is not None

    def topics(self, right: Right) -> Topics:
        """Return the topics for which the principal has ``right``."""
        return _topics(self, right)


@lru_cache(maxsize=PRINCIPALS_KEPT_MAX * len(Right))
def _topics(principal: Principal, right: Right) -> Topics:
    if principal.grants is None:
        return Topics((ALL_TOPICS,))
    return Topics(p for held, patterns in principal.grants if held == right for p in patterns)


NOBODY: Final = Principal("", ())
"""The principal of a caller before its login."""
ANONYMOUS: Final = Principal("", None)
TOKEN_TEXT: Final = re.compile(r"tw_[0-9a-f]{12}(_|$)")
"""Matches the beginning of a token's text, whether or not the token file contains it."""
TOKEN_HOLDER: Final = Principal("token", None)
OUTBOUND: Final = Principal("outbound process", None)
"""The daemon's process that sends the tasks of groups with targets."""
INBOX: Final = Principal("inbox process", None)
"""The daemon's process that takes tasks from an inbox."""


R = TypeVar("R")
HOST_SHOWN_MAX = 64
ENDED_SUBSCRIBERS_MIN = 64
"""Number of ended subscribers at which those without leases are dropped."""


class NullSink:
    """A sink that drops answers, for example those to a disconnected caller."""

    label = ""

    def accepted(self, answers: Sequence[StoredAnswer]) -> None: ...

    def answer_to(self, request: int, value: object) -> Sized:
        return ()

    def give(self, answer: Sized) -> None: ...

    def error(self, request: int, code: str, message: str) -> None: ...

    def flush(self) -> None: ...


_NULL_SINK = NullSink()


class Process(NamedTuple):
    """What a client reports about its process, for display; empty and None mean unknown."""

    host: str = ""
    pid: int | None = None
    version: str = ""


_numbers = count(1)


class Caller:
    """The state of one caller that operations use while it is connected."""

    def __init__(
        self, replies: ReplySink, *, principal: Principal = ANONYMOUS, address: str = "?"
    ) -> None:
        self.replies = replies
        self.principal = principal
        self.quota: Quota | None = None
        """The quota of the caller's principal, set at admission; None if it has no limits."""
        self.name = ""
        """The name that the caller has given."""
        self.address = address
        self.process = Process()
        self.number = next(_numbers)
        """A number that ascends with each caller of this process."""
        self.has_left = False
        """Whether the caller has said goodbye and thus given up its leases."""
        self.since_ms = 0
        """Wall-clock time at which the caller connected."""
        self.is_open = True
        self.is_blocked = False
        """Whether the caller does not read its answers."""
        self.session: Session | None = None
        """The session of the caller's enqueues, which makes resends harmless."""
        self.presence = Presence()
        self.subscribers: dict[int, Subscriber] = {}
        """Number chosen by the caller → its subscription."""
        self.pulls: dict[Subscriber, None] = {}
        """The caller's unanswered pulls."""
        self.ended_subscribers: list[Subscriber] = []
        """Ended pulls and subscriptions that may still have deliveries in flight."""
        self._ended_max = ENDED_SUBSCRIBERS_MIN

    def close(self) -> None:
        """Drop the sink of the caller's answers. A connection and its caller must not refer to each
        other: otherwise the connection's buffers stay until the next garbage collection, which an
        idle daemon may never run."""
        self.is_open = False
        self.replies = _NULL_SINK

    @property
    def label(self) -> str:
        """The name and address to which failed attempts are attributed."""
        return f"{self.name} {self.address}".strip()

    def describe_disconnection(self, reason: str) -> str:
        """Describe an unexpected disconnection, with the transport's ``reason``. Return an empty
        string after a goodbye."""
        if self.has_left:
            return ""
        host, pid, _ = self.process
        origin = [f"process {pid}"] if pid is not None else []
        origin += [f"on {host[:HOST_SHOWN_MAX]}"] if host else []
        return reason if not origin else f"{' '.join(origin)}: {reason}"

    @property
    def consumers(self) -> tuple[Subscriber, ...]:
        """All subscribers of the caller that can receive deliveries or have some in flight."""
        return (*self.subscribers.values(), *self.pulls, *self.ended_subscribers)

    def remember(self, subscriber: Subscriber) -> None:
        """Keep a subscriber that gets no more deliveries but may hold leases."""
        if len(self.ended_subscribers) >= self._ended_max:
            self.ended_subscribers = [s for s in self.ended_subscribers if s.outstanding > 0]
            # Doubling bounds the number of times that each subscriber is examined.
            self._ended_max = max(ENDED_SUBSCRIBERS_MIN, 2 * len(self.ended_subscribers))
        self.ended_subscribers.append(subscriber)

    def answer(self, request: int, value: object) -> None:
        """Answer at once with a value that does not depend on an uncommitted change."""
        replies = self.replies  # the answer can close this caller
        replies.give(replies.answer_to(request, value))
        replies.flush()

    def refuse(self, request: int, error: TickwheelError) -> None:
        """Answer with an error at once."""
        replies = self.replies  # the answer can close this caller
        replies.error(request, error.code, error.message)
        replies.flush()


class Call(NamedTuple, Generic[R]):
    """A checked request for an operation, with its caller and the number of the answer."""

    caller: Caller
    number: int
    request: R
    now: Now
    """The time of arrival."""
    topic_filter: TopicFilter | None = None
    """Selects the topics that the caller may use; all others are hidden. None allows all."""
    witness: ReplySink | None = None
    """A sink that receives the answer before the caller."""

    def answer(self, value: object) -> None:
        """Answer at once with a value that does not depend on an uncommitted change."""
        if self.witness is not None:
            self.witness.give(self.witness.answer_to(self.number, value))
        self.caller.answer(self.number, value)

    def refuse(self, error: TickwheelError) -> None:
        """Answer with an error at once."""
        if self.witness is not None:
            self.witness.error(self.number, error.code, error.message)
        self.caller.refuse(self.number, error)

    @property
    def replies(self) -> ReplySink:
        """The sink through which the engine answers the witness and the caller."""
        replies = self.caller.replies
        return replies if self.witness is None else _TwoSinks(self.witness, replies)


class _TwoSinks:
    """A sink that passes each answer to two sinks in order."""

    def __init__(self, first: ReplySink, second: ReplySink) -> None:
        self._both = first, second
        self.label = second.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for sink in self._both:
            sink.accepted(answers)

    def answer_to(self, request: int, value: object) -> _Answers:
        return _Answers(sink.answer_to(request, value) for sink in self._both)

    def give(self, answer: Any) -> None:
        for sink, own in zip(self._both, answer, strict=True):
            sink.give(own)

    def error(self, request: int, code: str, message: str) -> None:
        for sink in self._both:
            sink.error(request, code, message)

    def flush(self) -> None:
        for sink in self._both:
            sink.flush()


class _Answers(tuple[Sized, ...]):
    """The same answer in the format of each sink; its length is the sum of their lengths."""

    __slots__ = ()

    def __len__(self) -> int:
        return sum(map(len, self))


# --- quotas --------------------------------------------------------------------------------------

FULL_WAIT_S: Final = 1.0
"""Seconds until the next try if it is not known when the limit will allow one."""
QUOTAS_KEPT_MAX: Final = 10_000
"""Maximum number of quotas that are remembered; those without callers are forgotten first."""


def share_of_limit(limit: int, core: Core) -> int:
    """Return this shard's part, at least 1, of a limit for all shards together."""
    each, extra = divmod(limit, core.config.shards)
    return max(1, each + (core.config.shard < extra))


def _part_text(limit: int, core: Core) -> str:
    """Return this shard's part of a limit as text for messages."""
    if core.config.shards == 1:
        return str(limit)
    return f"{share_of_limit(limit, core)} in this shard, of {limit} in all"


class Allowance:
    """A quota per second. Unlike the token bucket of a group's rate, it can be overdrawn."""

    def __init__(self, name: str, rate: float) -> None:
        self._name = name
        self._rate = rate
        self._left = float(rate)
        self._at_ms = 0

    def wait_s(self, mono_ms: int) -> float:
        """Return the seconds until part of the allowance is available, or 0 if some is now. The
        time can be earlier than the last one: a request that had to wait passes its arrival."""
        elapsed_ms = max(0, mono_ms - self._at_ms)
        self._at_ms += elapsed_ms
        self._left = min(self._rate, self._left + elapsed_ms * self._rate / 1000)
        return 0.0 if self._left > 0 else max(0.001, -self._left / self._rate)

    def take(self, count: int) -> None:
        self._left -= count

    def refusal(self, who: str, wait_s: float) -> Overloaded:
        return overloaded(f"{who} has used its {self._name} ({self._rate:g})", wait_s)


def overloaded(reason: str, wait_s: float) -> Overloaded:
    """Return an ``overloaded`` error that names the seconds until the next try."""
    error = Overloaded(f"{reason}; try again in {wait_s:.3f} s")
    error.after_s = wait_s
    return error


class Scopes:
    """For each token name with the quota ``pending``: the topics to which its tokens may produce.
    So tasks enqueued with one token also count for other tokens of that name."""

    def __init__(self) -> None:
        self._topics: Mapping[str, Topics] = {}

    def put(self, principals: Iterable[Principal]) -> None:
        """Replace all principals in one step, because other threads read concurrently."""
        patterns: dict[str, dict[str, None]] = {}
        for principal in principals:
            if principal.quotas is None or principal.quotas.pending is None:
                continue
            own = patterns.setdefault(principal.name, {})
            for right, granted in principal.grants or ():
                own.update(dict.fromkeys(granted) if right == Right.PRODUCE else {})
        topics = {name: Topics(own) for name, own in patterns.items()}
        before = self._topics
        self._topics = {n: before[n] if before.get(n) == t else t for n, t in topics.items()}

    def of(self, name: str) -> Topics:
        """Return the topics of a name. The object stays the same until the topics change."""
        return self._topics.get(name, NO_TOPICS)


NO_TOPICS: Final = Topics(())


class Quota:
    """The limits of one principal, and how much of them it has used."""

    def __init__(self, who: str, quotas: Quotas, scopes: Scopes) -> None:
        self.quotas = quotas
        self._who = who
        self._scopes = scopes
        self.callers: set[Caller] = set()
        """The principal's connections and running HTTP requests."""
        self._allowances: dict[str, Allowance] | None = None
        """The quotas per second; None before the first check."""
        self._core: Callable[[], Core | None] = lambda: None
        """Returns the core of ``_tally``, to which the reference is weak, so that a daemon that no
        longer leads frees its tasks."""
        self._topics: Topics | None = None
        self._tally: Tally | None = None

    # --- connections and subscriptions -----------------------------------------------------------

    def enter(self, caller: Caller) -> None:
        """Count a new caller. Raise Overloaded if the limit of connections is reached."""
        limit = self.quotas.connections
        if limit is not None and len(self.callers) >= limit:
            raise overloaded(
                f"{self._who} already has {limit} connections (connections)", FULL_WAIT_S
            )
        self.callers.add(caller)
        caller.quota = self

    def leave(self, caller: Caller) -> None:
        """Stop counting a caller."""
        self.callers.discard(caller)

    def check_subscription(self) -> None:
        """Raise Overloaded if the limit of subscriptions is reached."""
        limit = self.quotas.subscriptions
        if limit is None:
            return
        count = sum(len(caller.subscribers) + len(caller.pulls) for caller in self.callers)
        if count >= limit:
            raise overloaded(
                f"{self._who} already has {limit} subscriptions (subscriptions)", FULL_WAIT_S
            )

    # --- enqueues --------------------------------------------------------------------------------

    def check(self, core: Core, mono_ms: int) -> None:
        """Raise Overloaded if the quota currently admits no task."""
        if self._allowances is None:
            self._allowances = self._new_allowances(core.config.shards)
        for allowance in self._allowances.values():
            if wait_s := allowance.wait_s(mono_ms):
                raise allowance.refusal(self._who, wait_s)
        limit = self.quotas.pending
        if limit is None:
            return
        count = self._pending(core)
        if count >= share_of_limit(limit, core):
            raise overloaded(
                f"{self._who} has {count} unfinished tasks; the limit is"
                f" {_part_text(limit, core)} (pending)",
                FULL_WAIT_S,
            )

    def _new_allowances(self, shards: int) -> dict[str, Allowance]:
        """Return the quotas per second. Each shard gets an equal part of them."""
        quotas = {"tasks_per_s": self.quotas.tasks_per_s, "bytes_per_s": self.quotas.bytes_per_s}
        rates = {name: rate for name, rate in quotas.items() if rate is not None}
        return {name: Allowance(name, rate / shards) for name, rate in rates.items()}

    def room(self, core: Core, mono_ms: int) -> int:
        """Return the number of plain tasks that the quota admits now."""
        try:
            self.check(core, mono_ms)
        except Overloaded:
            return 0
        limit = self.quotas.pending
        return (
            core.config.tasks_max
            if limit is None
            else share_of_limit(limit, core) - self._pending(core)
        )

    def check_count(self, core: Core, count: int) -> None:
        """Raise Overloaded if ``count`` more tasks exceed ``pending``. Call it after ``check``."""
        limit = self.quotas.pending
        if limit is not None and self._pending(core) + count > share_of_limit(limit, core):
            raise overloaded(
                f"{self._who} has {self._pending(core)} unfinished tasks; {count} more would"
                f" exceed the limit {_part_text(limit, core)} (pending)",
                FULL_WAIT_S,
            )

    def charge(self, count: int, size_bytes: int) -> None:
        """Charge accepted tasks to the rates, or refund them if the numbers are negative;
        ``pending`` counts tasks by topic."""
        used = {"tasks_per_s": count, "bytes_per_s": size_bytes}
        for name, allowance in (self._allowances or {}).items():
            allowance.take(used[name])

    def _pending(self, core: Core) -> int:
        topics = self._scopes.of(self._who)
        if self._tally is None or core is not self._core() or topics is not self._topics:
            self.end_count()
            self._core, self._topics, self._tally = ref(core), topics, core.tally(topics)
        return self._tally.tasks

    def end_count(self) -> None:
        """Stop counting unfinished tasks until the next check."""
        core = self._core()
        if self._tally is not None and core is not None:
            core.tallies.remove(self._tally)
        self._tally = None


def check_share(
    principal: Principal, core: Core, transaction: Transaction | None, halves: Sequence[Half]
) -> None:
    """Raise Overloaded if half tasks may not begin a transaction or join ``transaction``. Only
    tokens from the token file are checked, because other callers do not share the daemon with
    untrusted users."""
    if not principal.token_id:
        return
    config, registry, owner = core.config, core.transaction_registry, principal.name
    if transaction is None:
        count, own_limit = (
            registry.share(owner).count,
            principal.quotas and principal.quotas.transactions,
        )
        limit = (
            share_of_limit(own_limit, core)
            if own_limit
            else config.transactions_max - registry.undecided
        )
        if count >= limit:
            limit_text = (
                _part_text(own_limit, core)
                if own_limit
                else f"{limit}, so that as many remain for others"
            )
            raise overloaded(
                f"{owner} has {count} undecided transactions; the limit is {limit_text}"
                " (transactions)",
                FULL_WAIT_S,
            )
    owner = owner if transaction is None else transaction.row.owner
    share = registry.share(owner)
    more_bytes = sum(half.size_bytes + ROW_OVERHEAD_BYTES for half in halves)
    size_bytes = share.size_bytes + share.tasks * ROW_OVERHEAD_BYTES + more_bytes
    held_bytes = registry.size_bytes + registry.tasks * ROW_OVERHEAD_BYTES + more_bytes
    left_bytes = config.transactions_bytes_max - held_bytes
    if size_bytes > left_bytes:
        raise overloaded(
            f"half tasks of {owner} would take {size_bytes} bytes, more than the"
            f" {left_bytes} that would remain for others (transactions_bytes_max)",
            FULL_WAIT_S,
        )


class QuotaKey(NamedTuple):
    """The key of a principal's quota: its name and limits."""

    name: str
    quotas: Quotas


class QuotaBook:
    """The quotas of all principals that have one."""

    def __init__(self) -> None:
        self._quotas: dict[QuotaKey, Quota] = {}
        self.scopes = Scopes()

    def enter(self, caller: Caller) -> None:
        """Count a caller in its principal's quota. Raise Overloaded."""
        quota = self._quota_of(caller.principal)
        if quota is not None:
            quota.enter(caller)

    @staticmethod
    def leave(caller: Caller) -> None:
        """Stop counting a caller, if it was counted."""
        if caller.quota is not None:
            caller.quota.leave(caller)

    def _quota_of(self, principal: Principal) -> Quota | None:
        """Return the quota of the principal; None if it has no limits."""
        quotas = principal.quotas
        if quotas is None:
            return None
        key = QuotaKey(principal.name, quotas)
        quota = self._quotas.pop(key, None) or Quota(key.name, quotas, self.scopes)
        self._quotas[key] = quota  # the most recently used quota is forgotten last
        if len(self._quotas) > QUOTAS_KEPT_MAX:
            idle = next((k for k, quota in self._quotas.items() if not quota.callers), None)
            if idle is not None:
                self._quotas.pop(idle).end_count()
        return quota


OnEvent = Callable[[str, str], None]


def survive(on_event: OnEvent, what: str, error: Exception) -> TickwheelError:
    """Log an unexpected error with its traceback, and return the answer."""
    on_event("internal_error", f"{what}: {''.join(traceback.format_exception(error))}")
    return InternalError(f"{type(error).__name__}; see the daemon's log")


# --- the border ----------------------------------------------------------------------------------


class Border:
    """Separates the checks of a command from its changes. Call ``begin`` before a command, ``act``
    before its first change, and ``contain`` with an unexpected error."""

    def __init__(self, engine: Engine, on_event: OnEvent) -> None:
        self._engine = engine
        self._on_event = on_event
        self._acting = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the exception that must stop the daemon."""
        # Retrieve the exception, so that asyncio does not report it.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())

    def begin(self) -> None:
        """Begin a command, which has not changed anything yet."""
        self._acting = False

    def act(self) -> Engine:
        """Return the engine to a command that is about to change something."""
        self._acting = True
        return self._engine

    def fail(self, error: BaseException) -> None:
        """Stop the daemon after an error that leaves its state unreliable."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def run(
        self, what: str, act: Callable[[], None], refuse: Callable[[TickwheelError], None]
    ) -> None:
        """Run a command that was queued. Pass its error, if any, to ``refuse``."""
        self.begin()
        try:
            act()
        except TickwheelError as error:
            refuse(error)
        except Exception as error:
            refuse(self.contain(what, error))

    def contain(self, what: str, error: Exception) -> TickwheelError:
        """Log an unexpected error of a command, and return the answer to its caller. If the command
        may have changed something, stop the daemon and raise ``error``."""
        if self._acting:
            self.fail(error)
            raise error
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        """Log an unexpected error of an operation that changes nothing, and return the answer."""
        return survive(self._on_event, what, error)

    def report(self, what: str, error: Exception) -> None:
        """Log an unexpected error that the daemon survives, with its traceback."""
        survive(self._on_event, what, error)
