"""A caller: one connection's conversation with the shard, whatever the transport is; the border
inside each of its commands; and how much one principal may take of a daemon that it shares.

Before a command has changed anything, what goes wrong is about what a client sent and is answered;
behind the border, a failure leaves a change half done, and memory is the truth: that must end the
daemon.

A ``Quota`` is what one principal has used: its tokens of one name share it, over both transports.
It is asked once a request or a run of plain ones, never once a task, and not at all where there
are no quotas: then a caller has none. Knows no clock. Invariants:

* Rates are buckets of a second. A request goes through while something is left, however large it
  is, and the next ones wait until it is paid: nothing that fits a frame can never be sent.
* ``pending`` is a count of topics, not of who enqueued: what is not finished in those that the
  tokens of its name may produce to (``Scopes``), staged tasks and half tasks included. It is a
  tally of the engine (``engine/topics.py``): exact at any moment, also after a restart.
* What is not decided of one token's transactions leaves as much room as it takes: whatever others
  hold, nobody is shut out by one of them.
* A refusal leaves no mark, and says when to come again.

A ``Principal`` is who asks, with which rights for which topics. Which right a verb needs, its
declaration says (``api.verbs``); ``guard`` checks it for every transport. A principal without
limits is never checked: its transport calls the operations themselves.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

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
"""How many principals' operations are kept ready; more tokens in use only cost time."""


Only = Callable[[str], bool]
"""Whether the topic of this name may be touched."""


class Topics:
    """The topics that patterns name: a whole name, the beginning of one and ``*``, or ``*``."""

    def __init__(self, patterns: Iterable[str]) -> None:
        found = frozenset(patterns)
        self.are_all = ALL_TOPICS in found
        self._patterns = found
        self._names = frozenset(p for p in found if not p.endswith(ALL_TOPICS))
        self._beginnings = tuple(sorted(p[:-1] for p in found - self._names))

    def __call__(self, topic: str) -> bool:
        return topic in self._names or topic.startswith(self._beginnings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topics) and other._patterns == self._patterns

    def __hash__(self) -> int:
        return hash(self._patterns)


Grants = tuple[tuple[Right, tuple[str, ...]], ...]
"""Each right with the patterns of the topics that it is for."""


class Quotas(NamedTuple):
    """How much a principal may take; None: as much as the daemon has."""

    tasks_per_s: float | None = None
    bytes_per_s: float | None = None
    pending: int | None = None
    """Unfinished tasks on all topics that the principal may produce to."""
    connections: int | None = None
    subscriptions: int | None = None
    transactions: int | None = None
    """Undecided transactions; None: as many as are left for others."""


class Principal(NamedTuple):
    """Somebody whose identity has been checked; ``name`` is "" for anonymous."""

    name: str
    grants: Grants | None
    """The principal's rights; None: it may do all."""
    token_id: str = ""
    """The id of its token in the file of tokens; empty: it has none."""
    quotas: Quotas | None = None

    @property
    def is_limited(self) -> bool:
        return self.grants is not None

    def topics(self, right: Right) -> Topics:
        """The topics for which the principal has ``right``."""
        return _topics(self, right)


@lru_cache(maxsize=PRINCIPALS_KEPT_MAX * len(Right))
def _topics(principal: Principal, right: Right) -> Topics:
    if principal.grants is None:
        return Topics((ALL_TOPICS,))
    return Topics(p for held, patterns in principal.grants if held == right for p in patterns)


NOBODY: Final = Principal("", ())
"""The principal of a caller who has not said yet who it is."""
ANONYMOUS: Final = Principal("", None)
TOKEN_TEXT: Final = re.compile(r"tw_[0-9a-f]{12}(_|$)")
"""How the text of a file's token begins, whether that token is there or not."""
TOKEN_HOLDER: Final = Principal("token", None)
OUTBOUND: Final = Principal("outbound process", None)
"""The daemon's own process that sends the tasks of groups with targets."""


R = TypeVar("R")
HOST_SHOWN_MAX = 64
OTHERS_MIN = 64
"""How many ended subscribers are kept before those that no longer matter are dropped."""


class Nobody:
    """A sink that drops answers, such as that of a caller that is gone."""

    label = ""

    def accepted(self, answers: Sequence[StoredAnswer]) -> None: ...

    def answer_to(self, request: int, value: object) -> Sized:
        return ()

    def give(self, answer: Sized) -> None: ...

    def error(self, request: int, code: str, message: str) -> None: ...

    def flush(self) -> None: ...


_NOBODY = Nobody()


class Process(NamedTuple):
    """What a client says of its process, for people; "" and None: nothing."""

    host: str = ""
    pid: int | None = None
    version: str = ""


_numbers = count(1)


class Caller:
    """What the operations remember of one caller while it is there."""

    def __init__(
        self, replies: ReplySink, *, principal: Principal = ANONYMOUS, address: str = "?"
    ) -> None:
        self.replies = replies
        self.principal = principal
        self.quota: Quota | None = None
        """The use of the caller's principal, once let in; None: no limits of its own."""
        self.name = ""
        """The caller's name, as it calls itself."""
        self.address = address
        self.process = Process()
        self.number = next(_numbers)
        """A number that rises with each caller of this process."""
        self.has_left = False
        """Whether the caller said goodbye, and so gave up what it still has."""
        self.since_ms = 0
        """When the caller came, by the wall clock."""
        self.is_open = True
        self.is_blocked = False
        """Whether the caller does not read what it is sent."""
        self.session: Session | None = None
        """The session of the caller's enqueues, which makes a resend harmless."""
        self.presence = Presence()
        self.subscribers: dict[int, Subscriber] = {}
        """The caller's subscriptions, by the number that it chose."""
        self.pulls: dict[Subscriber, None] = {}
        """The caller's pulls that are not answered yet."""
        self.others: list[Subscriber] = []
        """Ended pulls and subscriptions that may have deliveries in flight."""
        self._others_max = OTHERS_MIN

    def close(self) -> None:
        """Forget the caller's sinks. A connection and its caller must not hold each other: what was
        read and not understood yet would stay until the next collection of garbage, which may never
        come in a daemon that has little to do."""
        self.is_open = False
        self.replies = _NOBODY

    @property
    def label(self) -> str:
        """The name and address to which failed attempts are put down."""
        return f"{self.name} {self.address}".strip()

    def death(self, how: str) -> str:
        """What is known of an end that nobody meant, with ``how`` from the transport; "": a
        goodbye."""
        if self.has_left:
            return ""
        host, pid, _ = self.process
        named = [f"process {pid}"] if pid is not None else []
        named += [f"on {host[:HOST_SHOWN_MAX]}"] if host else []
        return how if not named else f"{' '.join(named)}: {how}"

    @property
    def consumers(self) -> tuple[Subscriber, ...]:
        """All subscribers of the caller that may get deliveries, or have some in flight."""
        return (*self.subscribers.values(), *self.pulls, *self.others)

    def remember(self, subscriber: Subscriber) -> None:
        """Keep a subscriber that gets no more deliveries but may hold leases."""
        if len(self.others) >= self._others_max:
            self.others = [s for s in self.others if s.outstanding > 0]
            # Each is looked at a bounded number of times, however many stay.
            self._others_max = max(OTHERS_MIN, 2 * len(self.others))
        self.others.append(subscriber)

    def answer(self, request: int, value: object) -> None:
        """Answer at once, with a value that rests on nothing that the store has to keep."""
        self.replies.give(self.replies.answer_to(request, value))
        self.replies.flush()

    def refuse(self, request: int, error: TickwheelError) -> None:
        """Answer with an error at once."""
        self.replies.error(request, error.code, error.message)
        self.replies.flush()


class Ask(NamedTuple, Generic[R]):
    """One request for an operation: who asks, the number to answer with, and what, checked."""

    caller: Caller
    number: int
    request: R
    now: Now
    """When the request came."""
    only: Only | None = None
    """The topics that the caller may touch: anything else is as if it were not there. None: all."""
    witness: ReplySink | None = None
    """A sink that is given the answer before the caller is."""

    def answer(self, value: object) -> None:
        """Answer at once, with a value that rests on nothing that the store has to keep."""
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
        """The sink for an answer that the engine gives, to the witness and to the caller."""
        replies = self.caller.replies
        return replies if self.witness is None else _InTurn(self.witness, replies)


class _InTurn:
    """A sink that gives each answer to two others, one after the other."""

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
    """The same answer in the form of each sink; its length is that of all of them."""

    __slots__ = ()

    def __len__(self) -> int:
        return sum(map(len, self))


# --- quotas --------------------------------------------------------------------------------------

FULL_WAIT_S: Final = 1.0
"""When to come again, in seconds, if no clock says when a limit ends."""
USED_MAX: Final = 10_000
"""Principals whose use is remembered; those without connections are forgotten first."""


def part_of(most: int, core: Core) -> int:
    """The part of a limit of all shards together that one shard has: at least 1."""
    each, extra = divmod(most, core.config.shards)
    return max(1, each + (core.config.shard < extra))


def _said(most: int, core: Core) -> str:
    """The part of a limit, for messages."""
    if core.config.shards == 1:
        return str(most)
    return f"{part_of(most, core)} in this shard, of {most} in all"


class Allowance:
    """What a quota allows in a second. Unlike the bucket of a rate it may be overdrawn."""

    def __init__(self, name: str, rate: float) -> None:
        self._name = name
        self._rate = rate
        self._left = float(rate)
        self._at_ms = 0

    def wait_s(self, mono_ms: int) -> float:
        """Seconds until something is left; 0: something is."""
        elapsed_ms, self._at_ms = mono_ms - self._at_ms, mono_ms
        self._left = min(self._rate, self._left + max(0, elapsed_ms) * self._rate / 1000)
        return 0.0 if self._left > 0 else max(0.001, -self._left / self._rate)

    def take(self, count: int) -> None:
        self._left -= count

    def refusal(self, who: str, wait_s: float) -> Overloaded:
        return over(f"{who} has used its {self._name} ({self._rate:g})", wait_s)


def over(why: str, wait_s: float) -> Overloaded:
    """The error ``overloaded``, with when to come again."""
    error = Overloaded(f"{why}; come again in {wait_s:.3f} s")
    error.after_s = wait_s
    return error


class Scopes:
    """Which topics all tokens of a name with a quota ``pending`` may produce to together: what was
    put there with one token counts for the one that replaces it, whatever its scope is."""

    def __init__(self) -> None:
        self._of: Mapping[str, Topics] = {}

    def put(self, principals: Iterable[Principal]) -> None:
        """Set all principals that there are. In one step: another thread may ask meanwhile."""
        patterns: dict[str, dict[str, None]] = {}
        for principal in principals:
            if principal.quotas is None or principal.quotas.pending is None:
                continue
            found = patterns.setdefault(principal.name, {})
            for right, some in principal.grants or ():
                found.update(dict.fromkeys(some) if right == Right.PRODUCE else {})
        topics = {name: Topics(some) for name, some in patterns.items()}
        before = self._of
        self._of = {n: before[n] if before.get(n) == t else t for n, t in topics.items()}

    def of(self, name: str) -> Topics:
        """The topics of a name: the same object while nothing has changed."""
        return self._of.get(name, NO_TOPICS)


NO_TOPICS: Final = Topics(())


class Quota:
    """What one principal may take, and has taken."""

    def __init__(self, who: str, quotas: Quotas, scopes: Scopes) -> None:
        self.quotas = quotas
        self._who = who
        self._scopes = scopes
        self.callers: set[Caller] = set()
        """Connections of the principal, and its requests over HTTP that are under way."""
        self._allowances: dict[str, Allowance] | None = None
        """What is allowed in a second; None: nobody has asked yet."""
        self._core: Core | None = None
        self._topics: Topics | None = None
        self._tally: Tally | None = None

    # --- a conversation --------------------------------------------------------------------------

    def enter(self, caller: Caller) -> None:
        """Count a caller in. Raises Overloaded if it is one too many."""
        most = self.quotas.connections
        if most is not None and len(self.callers) >= most:
            raise over(f"{self._who} has {most} connections (connections)", FULL_WAIT_S)
        self.callers.add(caller)
        caller.quota = self

    def leave(self, caller: Caller) -> None:
        """Count a caller out, if it was counted."""
        self.callers.discard(caller)

    def check_subscription(self) -> None:
        """Raises Overloaded if one more subscription is too many."""
        most = self.quotas.subscriptions
        if most is None:
            return
        if sum(len(one.subscribers) + len(one.pulls) for one in self.callers) >= most:
            raise over(f"{self._who} has {most} subscriptions (subscriptions)", FULL_WAIT_S)

    # --- enqueues --------------------------------------------------------------------------------

    def check(self, core: Core, mono_ms: int) -> None:
        """Raises Overloaded if no task may be taken at the moment."""
        if self._allowances is None:
            self._allowances = self._allowed(core.config.shards)
        for allowance in self._allowances.values():
            if wait_s := allowance.wait_s(mono_ms):
                raise allowance.refusal(self._who, wait_s)
        most = self.quotas.pending
        if most is None:
            return
        count = self._pending(core)
        if count >= part_of(most, core):
            raise over(
                f"{self._who} has {count} tasks that are not finished; the limit is"
                f" {_said(most, core)} (pending)",
                FULL_WAIT_S,
            )

    def _allowed(self, shards: int) -> dict[str, Allowance]:
        """What is allowed in a second, of which each shard has an equal part."""
        rates = {"tasks_per_s": self.quotas.tasks_per_s, "bytes_per_s": self.quotas.bytes_per_s}
        said = {name: rate for name, rate in rates.items() if rate is not None}
        return {name: Allowance(name, rate / shards) for name, rate in said.items()}

    def room(self, core: Core, mono_ms: int) -> int:
        """How many plain tasks may be taken now."""
        try:
            self.check(core, mono_ms)
        except Overloaded:
            return 0
        most = self.quotas.pending
        return core.config.tasks_max if most is None else part_of(most, core) - self._pending(core)

    def check_count(self, core: Core, count: int) -> None:
        """Raises Overloaded if ``count`` tasks are too many, though ``check`` has passed."""
        most = self.quotas.pending
        if most is not None and self._pending(core) + count > part_of(most, core):
            raise over(
                f"{self._who} has {self._pending(core)} tasks that are not finished, and {count}"
                f" more are over {_said(most, core)} (pending)",
                FULL_WAIT_S,
            )

    def charge(self, count: int, size_bytes: int) -> None:
        """Charge tasks that are taken now; ``pending`` counts them by their topics."""
        used = {"tasks_per_s": count, "bytes_per_s": size_bytes}
        for name, allowance in (self._allowances or {}).items():
            allowance.take(used[name])

    def _pending(self, core: Core) -> int:
        topics = self._scopes.of(self._who)
        if self._tally is None or core is not self._core or topics is not self._topics:
            self.end_count()
            self._core, self._topics, self._tally = core, topics, core.tally(topics)
        return self._tally.tasks

    def end_count(self) -> None:
        """Stop counting the unfinished tasks until somebody asks again."""
        if self._tally is not None and self._core is not None:
            self._core.tallies.remove(self._tally)
        self._tally = None


def check_share(
    principal: Principal, core: Core, found: Transaction | None, halves: Sequence[Half]
) -> None:
    """Check whether half tasks may begin a transaction, or be added to ``found``. Only for a token
    of the file: nobody else shares the daemon with strangers. Raises Overloaded."""
    if not principal.token_id:
        return
    config, registry, owner = core.config, core.transaction_registry, principal.name
    if found is None:
        count, own = registry.share(owner).count, principal.quotas and principal.quotas.transactions
        most = part_of(own, core) if own else config.transactions_max - registry.undecided
        if count >= most:
            said = _said(own, core) if own else f"{most}, as many as are left for others"
            raise over(
                f"{owner} has {count} transactions that are not decided; the limit is"
                f" {said} (transactions)",
                FULL_WAIT_S,
            )
    owner = owner if found is None else found.row.owner
    share = registry.share(owner)
    more_bytes = sum(half.size_bytes + ROW_OVERHEAD_BYTES for half in halves)
    size_bytes = share.size_bytes + share.tasks * ROW_OVERHEAD_BYTES + more_bytes
    held_bytes = registry.size_bytes + registry.tasks * ROW_OVERHEAD_BYTES + more_bytes
    left_bytes = config.transactions_bytes_max - held_bytes
    if size_bytes > left_bytes:
        raise over(
            f"half tasks of {owner} would take {size_bytes} bytes; the limit is {left_bytes}, as"
            " many as would be left for others (transactions_bytes_max)",
            FULL_WAIT_S,
        )


class Used(NamedTuple):
    """The key of a principal's quota: the name and the limits."""

    name: str
    quotas: Quotas


class QuotaBook:
    """The quotas of all principals that have one."""

    def __init__(self) -> None:
        self._known: dict[Used, Quota] = {}
        self.scopes = Scopes()

    def enter(self, caller: Caller) -> None:
        """Count a caller in with its principal's quota. Raises Overloaded."""
        quota = self._of(caller.principal)
        if quota is not None:
            quota.enter(caller)

    @staticmethod
    def leave(caller: Caller) -> None:
        """Count a caller out, if it was let in."""
        if caller.quota is not None:
            caller.quota.leave(caller)

    def _of(self, principal: Principal) -> Quota | None:
        """The quota of the principal; None: it has no limits."""
        quotas = principal.quotas
        if quotas is None:
            return None
        key = Used(principal.name, quotas)
        found = self._known.pop(key, None) or Quota(key.name, quotas, self.scopes)
        self._known[key] = found  # the last one used is the last one to go
        if len(self._known) > USED_MAX:
            idle = next((k for k, quota in self._known.items() if not quota.callers), None)
            if idle is not None:
                self._known.pop(idle).end_count()
        return found


OnEvent = Callable[[str, str], None]


# --- the border ----------------------------------------------------------------------------------


class Border:
    """``begin`` each command, ``act`` when it has been checked and changes something from there
    on, ``contain`` what it raised and should not have."""

    def __init__(self, engine: Engine, on_event: OnEvent) -> None:
        self._engine = engine
        self._on_event = on_event
        self._acting = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that has to stop the daemon."""
        # One that comes after the first is of no interest.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())

    def begin(self) -> None:
        """Begin a command, which has changed nothing yet."""
        self._acting = False

    def act(self) -> Engine:
        """The engine, for a command that may change something from here on."""
        self._acting = True
        return self._engine

    def fail(self, error: BaseException) -> None:
        """Stop the daemon: something broke that must not be survived."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def run(
        self, what: str, act: Callable[[], None], refuse: Callable[[TickwheelError], None]
    ) -> None:
        """Begin a command that has waited, and ``refuse`` what it raises."""
        self.begin()
        try:
            act()
        except TickwheelError as error:
            refuse(error)
        except Exception as error:
            refuse(self.contain(what, error))

    def contain(self, what: str, error: Exception) -> TickwheelError:
        """The answer to a command that failed in a way it should not before it changed anything;
        it is logged with its traceback. Raises ``error``, and fails, if it did change something."""
        if self._acting:
            self.fail(error)
            raise error
        return self.survive(what, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        """The answer where something failed that changes nothing: what reads, or says an answer. It
        is logged with its traceback."""
        self.report(what, error)
        return InternalError(f"{type(error).__name__}: the daemon's log says more")

    def report(self, what: str, error: Exception) -> None:
        """Log an error that is survived and should not have been."""
        text = "".join(traceback.format_exception(error))
        self._on_event("internal_error", f"{what}: {text}")
