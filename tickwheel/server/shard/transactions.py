"""Transactions: prepare, commit, roll back, list, show, and who is asked about them.

A command on a transaction whose decision is not durable yet waits for that, because it may still be
undone. That wait is one commit. ``only``: a transaction with a task of another topic is as if it
were not there.

A producer says which producer groups it answers for; it is asked until it is gone. A *member* for a
transaction is who says its group and may produce to every topic of its tasks, because it could
decide about it unasked as well; whoever may not is a stranger, and as if it were not there. The
transaction's owner is asked first: the connection that prepared it, because it knows best, then
others of its name, in turn; then the other members, in turn. What is asked leaves with the tick in
which its time came, in frames of many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from tickwheel.api.verb import Right
from tickwheel.engine.state import ROW_OVERHEAD_BYTES
from tickwheel.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    LimitExceeded,
    Overloaded,
    TickwheelError,
    TransactionCommitted,
    TransactionRolledBack,
    UnknownTransaction,
)
from tickwheel.model.kinds import (
    OF_TRANSACTION,
    PART_MAX,
    TRANSACTION,
    Half,
    Halves,
    Reach,
    TransactionRow,
    TransactionState,
)
from tickwheel.model.records import ID_STEP, TaskOptions
from tickwheel.model.values import INTEGER_MAX
from tickwheel.persistence.codec import encode_record
from tickwheel.server import checks
from tickwheel.server.shard.callers import Caller, check_share
from tickwheel.server.shard.groups import make_topic_room
from tickwheel.server.shard.names import check_new_name
from tickwheel.server.shard.new_tasks import check_stays
from tickwheel.server.shard.parts import when_free
from tickwheel.server.shard.views import Page

if TYPE_CHECKING:
    from tickwheel.api.transactions import TransactionName, TransactionsPage
    from tickwheel.clock import Now
    from tickwheel.engine.transaction_registry import Transaction
    from tickwheel.model.records import NewTask
    from tickwheel.server.shard.callers import Ask, Only, Principal
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Listings, Parts
    from tickwheel.server.shard.views import ValueBytes

PREPARE_OPTIONS = ("from", "claim")
COUNTED_FROM = ("enqueue", "commit")
STATES = {state.name.lower(): state for state in TransactionState}
NO_OPTIONS = TaskOptions()
NAMES_PER_STEP = 500
"""How many transactions a listing looks at in one step."""
TRANSACTION_TOPICS_MAX = 100
"""How many topics the tasks of one transaction may have."""
CHECKED_GROUPS_MAX = 1_000
"""How many producer groups one connection may answer for."""


@dataclass(eq=False)
class Transacting:
    """The operations on transactions."""

    _parts: Parts
    _checkbacks: CheckBacks
    _new_tasks: NewTasks
    _listings: Listings
    _value_bytes: ValueBytes
    _check_door: Callable[[], None]
    """Raises what keeps every new task out."""
    _checked: Callable[[object], Sequence[Any]]
    """The tasks of one request."""

    def __post_init__(self) -> None:
        self._core, self._config = self._parts.core, self._parts.core.config
        self._registry = self._core.transaction_registry
        self._transactions = self._parts.engine.transactions

    # --- producers -------------------------------------------------------------------------------

    def prepare(
        self,
        caller: Caller,
        request: int,
        transaction: object,
        group: object,
        part: object,
        tasks: Sequence[Any],
        options: dict[str, Any],
        now: Now,
    ) -> None:
        """Keep half tasks of a transaction, which is made with its first ones; the sink's
        ``accepted`` gets no ids. ``part`` is the number of these in the transaction, from 1 on: the
        same number with the same tasks again is a resend. ``from``: what the delays count from,
        "enqueue" or "commit". Raises as an enqueue, and Conflict, Forbidden, TransactionCommitted,
        TransactionRolledBack."""
        name = checks.name(transaction, "transaction")
        members = checks.name(group, "group")
        number = checks.integer(part, "part", 1, PART_MAX)
        counted_from = options.get("from", "enqueue")
        if type(counted_from) is not str or counted_from not in COUNTED_FROM:
            checks.wrong("from", f"one of {', '.join(COUNTED_FROM)}", counted_from)
        claim = options.get("claim")
        if claim is not None:
            claim = checks.integer(claim, "claim", 1, INTEGER_MAX)

        def act() -> None:
            found = self._registry.known.get(name)
            if found is not None:
                self._check_open(found, members, caller)
            else:
                check_new_name(self._core, OF_TRANSACTION, name, claim)
            halves: tuple[Half, ...] = ()
            if found is not None and (former := found.parts.get(number)) is not None:
                self._check_same(former, tasks, from_commit=counted_from == "commit")
            else:
                self._check_door()
                if caller.quota is not None:
                    caller.quota.check(self._core, now.mono_ms)
                halves = self._halves(tasks, now.now_ms, from_commit=counted_from == "commit")
                self._check_limits(name, found, halves)
                check_share(caller.principal, self._core, found, halves)
                if caller.quota is not None:
                    caller.quota.check_count(self._core, len(halves))
                    caller.quota.charge(len(halves), sum(half.size_bytes for half in halves))
            transactions, owner = self._parts.border.act().transactions, caller.principal.name
            transactions.prepare(
                name, members, number, halves, caller.replies, request, *now, owner
            )
            self._checkbacks.prepared(self._registry.known[name].row, caller)

        self._when_free(caller, name, act, partial(caller.refuse, request))

    def _check_open(self, found: Transaction, group: str, caller: Caller) -> None:
        row, topics = found.row, caller.principal.topics(Right.PRODUCE)
        if not all(map(topics, row.topics)):
            raise Forbidden(
                f"transaction {row.id} is not this caller's to add to; choose another name"
            )
        if row.group != group:
            raise Conflict(f"transaction {row.id} is of producer group {row.group}, not of {group}")
        if row.state is TransactionState.COMMITTED:
            raise TransactionCommitted(f"transaction {row.id} was committed")
        if row.state is TransactionState.ROLLED_BACK:
            raise TransactionRolledBack(f"transaction {row.id} was rolled back")

    def _check_same(self, former: Halves, tasks: object, *, from_commit: bool) -> None:
        """Check that a part that comes again has the tasks that it had. Raises Conflict."""
        given = self._checked(tasks)
        at_ms = former.prepared_ms  # so that delays end when they did
        halves = [
            _half(
                self._new_tasks.careful(task, f"tasks[{index}]", at_ms),
                at_ms,
                counted=from_commit and not _has_moment(task),
            )
            for index, task in enumerate(given)
        ]
        if _contents(former.transaction, halves) != _contents(former.transaction, former.halves):
            raise Conflict(
                f"part {former.part} of transaction {former.transaction} has other tasks; a resend"
                " must have the same, and another request needs another part"
            )

    def _halves(self, tasks: object, now_ms: int, *, from_commit: bool) -> tuple[Half, ...]:
        given = self._checked(tasks)
        new_tasks, _, rules = self._new_tasks.parse(given, now_ms)
        if rules is not None:
            index = next(i for i, rule in enumerate(rules) if rule is not None)
            raise BadRequest(
                f"tasks[{index}] has a rule for a pending key (if_pending, its own or its topic's):"
                " a half task may wait for long, and what is pending now may not be then; enqueue"
                " it without a transaction"
            )
        return tuple(
            _half(new_task, now_ms, counted=from_commit and not _has_moment(task))
            for new_task, task in zip(new_tasks, given, strict=True)
        )

    def _check_limits(self, name: str, found: Transaction | None, halves: tuple[Half, ...]) -> None:
        config, registry = self._config, self._registry
        if found is None:
            count, said = registry.undecided, "transactions are not decided"
            checks.room(Overloaded, count, said, config, "transactions_max")
        size_bytes = sum(half.size_bytes for half in halves)
        held_bytes = registry.size_bytes + registry.tasks * ROW_OVERHEAD_BYTES
        more_bytes = size_bytes + len(halves) * ROW_OVERHEAD_BYTES
        if held_bytes + more_bytes > config.transactions_bytes_max:
            raise Overloaded(
                f"half tasks take {held_bytes} bytes, and {more_bytes} more would be too many;"
                f" the limit is {config.transactions_bytes_max} (transactions_bytes_max)"
            )
        row = None if found is None else found.row
        count = len(halves) + (0 if row is None else row.tasks)
        if count > config.transaction_tasks_max:
            raise LimitExceeded(
                f"transaction {name} would have {count} tasks; the limit is"
                f" {config.transaction_tasks_max} (transaction_tasks_max)"
            )
        total_bytes = size_bytes + (0 if row is None else row.size_bytes)
        if total_bytes > config.transaction_bytes_max:
            raise LimitExceeded(
                f"transaction {name} would have {total_bytes} bytes; the limit is"
                f" {config.transaction_bytes_max} (transaction_bytes_max)"
            )
        topics = {half.topic for half in halves}.union(() if row is None else row.topics)
        if len(topics) > TRANSACTION_TOPICS_MAX:
            raise LimitExceeded(
                f"transaction {name} would have tasks of {len(topics)} topics; the limit is"
                f" {TRANSACTION_TOPICS_MAX} (TRANSACTION_TOPICS_MAX)"
            )

    # --- decisions -------------------------------------------------------------------------------

    def commit_transaction(self, ask: Ask[TransactionName]) -> None:
        """Make the half tasks tasks; the answer has their ids, in the order of the parts. A
        repeated commit has the same answer. Raises UnknownTransaction, TransactionRolledBack, and
        as an enqueue what may be tried again."""
        name = ask.request.transaction

        def act() -> None:
            found = self._found(name, ask.only)
            row = found.row
            if row.state is TransactionState.ROLLED_BACK:
                raise TransactionRolledBack(
                    f"transaction {name} was rolled back; its tasks are gone"
                )
            if row.state is TransactionState.COMMITTED:
                ids = tuple(range(row.first_id, row.first_id + row.tasks * ID_STEP, ID_STEP))
                self._parts.committer.answer(ask, (row.decided_ms, ids))
                return
            self._check_door()
            self._check_topics(row)
            transactions = self._parts.border.act().transactions
            transactions.commit(found, ask.replies, ask.number, *ask.now)
            self._checkbacks.decided(name)

        self._when_free(ask.caller, name, act, ask.refuse)

    def _check_topics(self, row: TransactionRow) -> None:
        """Check, and make, the topics of a prepared transaction, which may be gone by now."""
        for topic in row.topics:
            check_stays(self._core, topic)
        make_topic_room(self._parts, row.topics)
        for topic in row.topics:
            self._core.topic(topic)

    def rollback_transaction(self, ask: Ask[TransactionName]) -> None:
        """Drop the half tasks. A repeated rollback has the same answer. Raises UnknownTransaction,
        TransactionCommitted."""
        name = ask.request.transaction

        def act() -> None:
            found = self._found(name, ask.only)
            row = found.row
            if row.state is TransactionState.COMMITTED:
                raise TransactionCommitted(
                    f"transaction {name} was committed; its {row.tasks} tasks are there"
                )
            if row.state is TransactionState.ROLLED_BACK:
                self._parts.committer.answer(ask, (row.decided_ms, ()))
                return
            transactions = self._parts.border.act().transactions
            transactions.rollback(found, ask.replies, ask.number, *ask.now)
            self._checkbacks.decided(name)

        self._when_free(ask.caller, name, act, ask.refuse)

    # --- who is asked ----------------------------------------------------------------------------

    def answer_checks(
        self,
        caller: Caller,
        request: int,
        groups: object,
        sink: CheckSink,
        *,
        only: Only | None = None,
    ) -> None:
        """Ask the caller about transactions of these producer groups from now on, and of no others;
        first about those whose owner the last question did not reach. Raises BadRequest,
        LimitExceeded."""
        names = [
            checks.name(group, f"groups[{index}]")
            for index, group in enumerate(checks.array(groups, "groups", CHECKED_GROUPS_MAX))
        ]
        transactions = self._parts.border.act().transactions
        self._checkbacks.register(caller, names, sink, only)
        for name in dict.fromkeys(names):
            transactions.came(name)
        self._parts.wake()
        caller.answer(request, None)

    # --- looking ---------------------------------------------------------------------------------

    def list_transactions(self, ask: Ask[TransactionsPage]) -> None:
        """Answer a page of transactions by name, by default of those that are not decided. Raises
        Overloaded."""
        state, asked = ask.request.state, ask.request
        wanted = _Wanted(None if state is None else STATES[state], asked.group, ask.only)
        page = partial(self._page, asked.after or "", asked.limit, wanted)
        self._listings.answer(ask, page, at_once=True)

    async def _page(self, after: str, limit: int, wanted: _Wanted) -> dict[str, Any]:
        """A page of matching transactions, looked for in steps, between which the loop goes on."""
        page = Page(self._parts, limit, self._value_bytes)
        while True:
            names = list(islice(self._registry.listed(after, wanted.state), NAMES_PER_STEP))
            for name in names:
                one = self._registry.durable(name)
                if one is None or not wanted.fits(one.row):
                    continue
                if not page.take(transaction_map(one.row)):
                    return {"transactions": page.found, "next": page.found[-1]["id"]}
            if len(names) < NAMES_PER_STEP:
                return {"transactions": page.found, "next": None}
            after = names[-1]
            await asyncio.sleep(0)

    def show_transaction(self, ask: Ask[TransactionName]) -> None:
        """Answer a transaction, and its half tasks without bodies. Raises UnknownTransaction."""
        name = ask.request.transaction
        self._found(name, ask.only)
        found = self._registry.durable(name)
        if found is None:
            raise _unknown(name)
        bytes_left = self._parts.limits.frame_bytes_max // 2
        halves: list[dict[str, Any]] = []
        for part in sorted(found.parts):
            for half in found.parts[part].halves:
                one = _half_map(half)
                bytes_left -= self._value_bytes(one)
                if bytes_left >= 0:
                    halves.append(one)
        answer = transaction_map(found.row) | {"halves": halves}
        self._parts.committer.answer(ask, answer)

    # --- what these have in common ---------------------------------------------------------------

    def _found(self, name: str, only: Only | None) -> Transaction:
        found = self._registry.known.get(name)
        if found is None or not _is_seen(found.row, only):
            raise _unknown(name)
        return found

    def _when_free(
        self,
        caller: Caller,
        name: str,
        act: Callable[[], None],
        refuse: Callable[[TickwheelError], None],
    ) -> None:
        def is_free() -> bool:
            found = self._registry.known.get(name)
            return found is None or self._transactions.is_free(found)

        when_free(self._parts, caller, "a command on a transaction", is_free, act, refuse)


def transaction_map(row: TransactionRow) -> dict[str, Any]:
    """A transaction as every answer has it."""
    return {
        "id": row.id,
        "group": row.group,
        "state": row.state.name.lower(),
        "began_ms": row.began_ms,
        "touched_ms": row.touched_ms,
        "tasks": row.tasks,
        "bytes": row.size_bytes,
        "topics": row.topics,
        "checks": row.checks,
        "asked": row.asked,
        "checked_ms": row.checked_ms or None,
        "decided_ms": row.decided_ms or None,
        "first_id": row.first_id or None,
    }


def _half_map(half: Half) -> dict[str, Any]:
    options = half.options
    return {
        "topic": half.topic,
        "due_ms": half.due_ms if half.delay_ms is None else None,
        "delay_ms": half.delay_ms,
        "bytes": half.size_bytes,
        "key": None if options is None else options.key,
        "tag": None if options is None else options.tag,
    }


def _is_seen(row: TransactionRow, only: Only | None) -> bool:
    return only is None or all(map(only, row.topics))


class _Wanted(NamedTuple):
    """The conditions of a listing of transactions."""

    state: TransactionState | None
    """The state that is listed; None: those that are not decided."""
    group: str | None
    only: Only | None

    def fits(self, row: TransactionRow) -> bool:
        """Whether a transaction of that state is listed."""
        return (self.group is None or row.group == self.group) and _is_seen(row, self.only)


def _unknown(name: str) -> UnknownTransaction:
    return UnknownTransaction(
        f"there is no transaction {name}, or it was decided so long ago that it is forgotten"
    )


def _has_moment(task: Any) -> bool:
    """Whether the task has a fixed due time."""
    return len(task) == 4 and type(task[3]) is dict and task[3].get("due_ms") is not None


def _half(new_task: NewTask, now_ms: int, *, counted: bool) -> Half:
    topic, due_ms, body, options = new_task
    return Half(topic, due_ms, due_ms - now_ms if counted else None, body, options)


def _contents(name: str, halves: Iterable[Half]) -> bytes:
    """All that half tasks say but their traces, which may be of the request."""
    same: list[Half] = []
    for half in halves:
        options = None if half.options is None else half.options._replace(trace=None)
        same.append(half._replace(options=None if options == NO_OPTIONS else options))
    return encode_record(TRANSACTION, Halves(name, 0, 0, tuple(same)))


# --- who is asked --------------------------------------------------------------------------------

CHECKS_PER_TICK = 256
"""Transactions that one tick of the shard asks about."""


class CheckSink(Protocol):
    """Asks one caller about transactions."""

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        """Ask what became of these transactions."""


class _Line:
    """The members of one producer group with one principal, and so the same rights."""

    __slots__ = ("only", "sinks")

    def __init__(self, only: Only | None) -> None:
        self.only = only
        self.sinks: dict[Caller, CheckSink] = {}
        """Members by caller; the one who was asked last is at the end."""

    def is_of(self, row: TransactionRow) -> bool:
        """Whether these members may be asked about the transaction."""
        return self.only is None or all(map(self.only, row.topics))

    def next(self, preparer: Caller | None) -> Caller | None:
        """The member who is asked next: the preparer, if it is there; None: nobody is."""
        if preparer is not None and preparer in self.sinks and _is_there(preparer):
            return preparer
        return next(filter(_is_there, self.sinks), None)


class CheckBacks:
    """The members of producer groups on one shard, who are asked about transactions."""

    def __init__(self) -> None:
        self._members: dict[str, dict[Principal, _Line]] = {}
        """By producer group: its members by principal; the principal asked last is at the end."""
        self._groups: dict[Caller, tuple[str, ...]] = {}
        self._preparers: WeakValueDictionary[str, Caller] = WeakValueDictionary()
        """Transaction → the caller that prepared it as its owner."""
        self._waiting: dict[tuple[Caller, str], list[TransactionRow]] = {}

    def register(
        self, caller: Caller, groups: Sequence[str], sink: CheckSink, only: Only | None
    ) -> None:
        """Register the caller as a member of these producer groups, and of no others."""
        self.closed(caller)
        principal = caller.principal
        for group in groups:
            lines = self._members.setdefault(group, {})
            line = lines.get(principal)
            if line is None:
                line = lines[principal] = _Line(only)
            line.sinks[caller] = sink
        if groups:
            self._groups[caller] = tuple(groups)

    def closed(self, caller: Caller) -> None:
        """Forget a caller that is gone."""
        for group in self._groups.pop(caller, ()):
            lines = self._members.get(group, {})
            line = lines.get(caller.principal)
            if line is None:
                continue
            line.sinks.pop(caller, None)
            if not line.sinks:
                del lines[caller.principal]
            if not lines:
                del self._members[group]

    def groups_of(self, caller: Caller) -> Sequence[str]:
        """The producer groups that the caller is a member of."""
        return self._groups.get(caller, ())

    def prepared(self, row: TransactionRow, caller: Caller) -> None:
        """Note that the caller prepared the transaction, or more of it."""
        if caller.principal.name == row.owner:
            self._preparers[row.id] = caller

    def decided(self, name: str) -> None:
        """Forget who prepared a transaction that is decided."""
        self._preparers.pop(name, None)

    def is_own(self, caller: Caller, row: TransactionRow) -> bool:
        """Whether the caller decides as the owner: its connection prepared the transaction, or is a
        member of its producer group, and has the owner's name. Being asked makes nobody the
        owner."""
        if caller.principal.name != row.owner:
            return False
        return self._preparers.get(row.id) is caller or row.group in self.groups_of(caller)

    @property
    def members(self) -> int:
        """How many connections are members of producer groups."""
        return len(self._groups)

    def ask(self, row: TransactionRow, above: Reach) -> Reach:
        """Choose whom the next ``flush`` asks about the transaction, if that one is nearer to it
        than ``above``; returns whom it reaches, else NOBODY."""
        lines = self._members.get(row.group, {})
        for reach in (Reach.OWN, Reach.ANOTHER):
            if reach <= above:
                break
            for principal, line in lines.items():
                is_owner = principal.name == row.owner
                if is_owner != (reach is Reach.OWN) or not line.is_of(row):
                    continue
                caller = line.next(self._preparers.get(row.id))
                if caller is not None:
                    line.sinks[caller] = line.sinks.pop(caller)
                    lines[principal] = lines.pop(principal)
                    self._waiting.setdefault((caller, row.group), []).append(row)
                    return reach
        return Reach.NOBODY

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Send the questions. One that cannot be written is ``failed``, and asked again."""
        waiting, self._waiting = self._waiting, {}
        for (caller, group), rows in waiting.items():
            line = self._members.get(group, {}).get(caller.principal)
            sink = None if line is None else line.sinks.get(caller)
            if sink is None:
                continue
            try:
                sink.ask(group, rows)
            except Exception as error:
                failed(error)


def _is_there(caller: Caller) -> bool:
    return caller.is_open and not caller.is_blocked
