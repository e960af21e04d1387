"""Transactions: prepare, commit, roll back, list and show them, and send check-backs.

A command on a transaction waits while an earlier decision, or a change in the sealed batch, can
still be undone. A caller's topic filter hides transactions that have a task of another topic.

A producer announces the producer groups for which it answers, and receives check-backs until it
disconnects. A *member* for a transaction has announced the transaction's group and may produce to
every topic of its tasks, so it could decide the transaction without a check-back. Other callers
receive no check-backs. The owner is asked first: the connection that prepared the transaction, then
other connections with the owner's name, in turn. The other members follow, in turn. Each tick sends
the due check-backs, several per frame.
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
    PART_MAX,
    TRANSACTION,
    TRANSACTION_NAMES,
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
from tickwheel.server.shard.groups import reserve_topics
from tickwheel.server.shard.names import check_new_name
from tickwheel.server.shard.new_tasks import check_stays
from tickwheel.server.shard.parts import when_free
from tickwheel.server.shard.views import Page

if TYPE_CHECKING:
    from tickwheel.api.transactions import TransactionName, TransactionsPage
    from tickwheel.clock import Now
    from tickwheel.engine.transaction_registry import Transaction
    from tickwheel.model.records import NewTask
    from tickwheel.server.shard.callers import Call, Principal, TopicFilter
    from tickwheel.server.shard.new_tasks import NewTasks
    from tickwheel.server.shard.parts import Parts, SlowRequests
    from tickwheel.server.shard.views import ValueBytes

PREPARE_OPTIONS = ("from", "claim")
COUNTED_FROM = ("enqueue", "commit")
STATES = {state.name.lower(): state for state in TransactionState}
NO_OPTIONS = TaskOptions()
NAMES_PER_STEP = 500
"""Number of transactions that a listing examines in one step of the loop."""
TRANSACTION_TOPICS_MAX = 100
"""Maximum number of topics of a transaction's tasks."""
CHECKED_GROUPS_MAX = 1_000
"""Maximum number of producer groups for which a connection answers."""


@dataclass(eq=False)
class Transacting:
    """The operations on transactions."""

    _parts: Parts
    _checkbacks: CheckBacks
    _new_tasks: NewTasks
    _listings: SlowRequests
    _value_bytes: ValueBytes
    _check_accepting: Callable[[], None]
    """Raises an error if new tasks are currently refused."""
    _checked: Callable[[object], Sequence[Any]]
    """Checks the number of a request's tasks, and returns them."""

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
        """Store half tasks of a transaction. The first part creates the transaction. The sink's
        ``accepted`` gets no ids. ``part`` numbers the parts of the transaction from 1; the same
        part with the same tasks is a resend. The option ``from`` states whether delays count from
        "enqueue" or "commit". Raise Conflict, Forbidden, TransactionCommitted,
        TransactionRolledBack, or any error of an enqueue."""
        name = checks.name(transaction, "transaction")
        producer_group = checks.name(group, "group")
        number = checks.integer(part, "part", 1, PART_MAX)
        counted_from = options.get("from", "enqueue")
        if type(counted_from) is not str or counted_from not in COUNTED_FROM:
            checks.wrong("from", f"one of {', '.join(COUNTED_FROM)}", counted_from)
        claim = options.get("claim")
        if claim is not None:
            claim = checks.integer(claim, "claim", 1, INTEGER_MAX)

        def act() -> None:
            existing = self._registry.by_name.get(name)
            if existing is not None:
                self._check_open(existing, producer_group, caller)
            else:
                check_new_name(self._core, TRANSACTION_NAMES, name, claim)
            halves: tuple[Half, ...] = ()
            if existing is not None and (former := existing.parts.get(number)) is not None:
                self._check_same(former, tasks, from_commit=counted_from == "commit")
            else:
                self._check_accepting()
                if caller.quota is not None:
                    caller.quota.check(self._core, now.mono_ms)
                halves = self._halves(tasks, now.now_ms, from_commit=counted_from == "commit")
                self._check_limits(name, existing, halves)
                check_share(caller.principal, self._core, existing, halves)
                if caller.quota is not None:
                    caller.quota.check_count(self._core, len(halves))
                    caller.quota.charge(len(halves), sum(half.size_bytes for half in halves))
            transactions, owner = self._parts.border.act().transactions, caller.principal.name
            transactions.prepare(
                name, producer_group, number, halves, caller.replies, request, *now, owner
            )
            self._checkbacks.prepared(self._registry.by_name[name].row, caller)

        self._when_free(caller, name, act, partial(caller.refuse, request))

    def _check_open(self, transaction: Transaction, group: str, caller: Caller) -> None:
        row, topics = transaction.row, caller.principal.topics(Right.PRODUCE)
        if not all(map(topics, row.topics)):
            raise Forbidden(
                f"this caller may not add tasks to transaction {row.id}; choose another name"
            )
        if row.group != group:
            raise Conflict(f"transaction {row.id} has the producer group {row.group}, not {group}")
        if row.state is TransactionState.COMMITTED:
            raise TransactionCommitted(f"transaction {row.id} was committed")
        if row.state is TransactionState.ROLLED_BACK:
            raise TransactionRolledBack(f"transaction {row.id} was rolled back")

    def _check_same(self, former: Halves, tasks: object, *, from_commit: bool) -> None:
        """Raise Conflict if a resent part has different tasks."""
        checked_tasks = self._checked(tasks)
        at_ms = former.prepared_ms  # so that delays end at the same times as before
        halves = [
            _half(
                self._new_tasks.check_task(task, f"tasks[{index}]", at_ms),
                at_ms,
                from_commit=from_commit and not _has_moment(task),
            )
            for index, task in enumerate(checked_tasks)
        ]
        if _contents(former.transaction, halves) != _contents(former.transaction, former.halves):
            raise Conflict(
                f"part {former.part} of transaction {former.transaction} was already sent with"
                " different tasks; resend the same tasks, or use a new part number"
            )

    def _halves(self, tasks: object, now_ms: int, *, from_commit: bool) -> tuple[Half, ...]:
        checked_tasks = self._checked(tasks)
        new_tasks, _, rules = self._new_tasks.parse(checked_tasks, now_ms)
        if rules is not None:
            index = next(i for i, rule in enumerate(rules) if rule is not None)
            raise BadRequest(
                f"tasks[{index}] is subject to if_pending (its own or its topic's), which does not"
                " apply to half tasks because pending tasks can change before the commit; enqueue"
                " it without a transaction"
            )
        return tuple(
            _half(new_task, now_ms, from_commit=from_commit and not _has_moment(task))
            for new_task, task in zip(new_tasks, checked_tasks, strict=True)
        )

    def _check_limits(
        self, name: str, transaction: Transaction | None, halves: tuple[Half, ...]
    ) -> None:
        config, registry = self._config, self._registry
        if transaction is None:
            count, subject = registry.undecided, "transactions are undecided"
            checks.check_limit(Overloaded, count, subject, config, "transactions_max")
        size_bytes = sum(half.size_bytes for half in halves)
        held_bytes = registry.size_bytes + registry.tasks * ROW_OVERHEAD_BYTES
        more_bytes = size_bytes + len(halves) * ROW_OVERHEAD_BYTES
        if held_bytes + more_bytes > config.transactions_bytes_max:
            raise Overloaded(
                f"half tasks take {held_bytes} bytes; {more_bytes} more would exceed the limit"
                f" {config.transactions_bytes_max} (transactions_bytes_max)"
            )
        row = None if transaction is None else transaction.row
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

    def commit_transaction(self, call: Call[TransactionName]) -> None:
        """Turn the half tasks into tasks, and answer with their ids in the order of the parts. A
        repeated commit has the same answer. Raise UnknownTransaction, TransactionRolledBack, and
        the retryable errors of an enqueue."""
        name = call.request.transaction

        def act() -> None:
            entry = self._find(name, call.topic_filter)
            row = entry.row
            if row.state is TransactionState.ROLLED_BACK:
                raise TransactionRolledBack(
                    f"transaction {name} was rolled back; its tasks are gone"
                )
            if row.state is TransactionState.COMMITTED:
                ids = tuple(range(row.first_id, row.first_id + row.tasks * ID_STEP, ID_STEP))
                self._parts.committer.answer(call, (row.decided_ms, ids))
                return
            self._check_accepting()
            self._ensure_topics(row)
            transactions = self._parts.border.act().transactions
            transactions.commit(entry, call.replies, call.number, *call.now)
            self._checkbacks.decided(name)

        self._when_free(call.caller, name, act, call.refuse)

    def _ensure_topics(self, row: TransactionRow) -> None:
        """Check the topics of a prepared transaction, and create those that no longer exist."""
        for topic in row.topics:
            check_stays(self._core, topic)
        reserve_topics(self._parts, row.topics)
        for topic in row.topics:
            self._core.topic(topic)

    def rollback_transaction(self, call: Call[TransactionName]) -> None:
        """Drop the half tasks. A repeated rollback has the same answer. Raise UnknownTransaction,
        TransactionCommitted."""
        name = call.request.transaction

        def act() -> None:
            entry = self._find(name, call.topic_filter)
            row = entry.row
            if row.state is TransactionState.COMMITTED:
                raise TransactionCommitted(
                    f"transaction {name} was committed; its {row.tasks} tasks exist"
                )
            if row.state is TransactionState.ROLLED_BACK:
                self._parts.committer.answer(call, (row.decided_ms, ()))
                return
            transactions = self._parts.border.act().transactions
            transactions.rollback(entry, call.replies, call.number, *call.now)
            self._checkbacks.decided(name)

        self._when_free(call.caller, name, act, call.refuse)

    # --- check-backs -----------------------------------------------------------------------------

    def answer_checks(
        self,
        caller: Caller,
        request: int,
        groups: object,
        sink: CheckSink,
        *,
        topic_filter: TopicFilter | None = None,
    ) -> None:
        """Send the caller check-backs for these producer groups, and no longer for any others. It
        is asked at once about transactions whose last check-back did not reach their owner. Raise
        BadRequest, LimitExceeded."""
        names = [
            checks.name(group, f"groups[{index}]")
            for index, group in enumerate(checks.array(groups, "groups", CHECKED_GROUPS_MAX))
        ]
        transactions = self._parts.border.act().transactions
        self._checkbacks.register(caller, names, sink, topic_filter)
        for name in dict.fromkeys(names):
            transactions.member_connected(name)
        self._parts.wake()
        caller.answer(request, None)

    # --- reads -----------------------------------------------------------------------------------

    def list_transactions(self, call: Call[TransactionsPage]) -> None:
        """Answer with a page of transactions, sorted by name; by default only undecided ones. Raise
        Overloaded."""
        state, request = call.request.state, call.request
        wanted = _Conditions(
            None if state is None else STATES[state], request.group, call.topic_filter
        )
        page = partial(self._page, request.after or "", request.limit, wanted)
        self._listings.answer(call, page, at_once=True)

    async def _page(self, after: str, limit: int, wanted: _Conditions) -> dict[str, Any]:
        """Return a page of matching transactions, searching in steps between which the loop
        runs."""
        page = Page(self._parts, limit, self._value_bytes)
        while True:
            names = list(islice(self._registry.listed(after, wanted.state), NAMES_PER_STEP))
            for name in names:
                transaction = self._registry.durable_state(name)
                if transaction is None or not wanted.fits(transaction.row):
                    continue
                if not page.take(transaction_map(transaction.row)):
                    return {"transactions": page.items, "next": page.items[-1]["id"]}
            if len(names) < NAMES_PER_STEP:
                return {"transactions": page.items, "next": None}
            after = names[-1]
            await asyncio.sleep(0)

    def show_transaction(self, call: Call[TransactionName]) -> None:
        """Answer with a transaction and its half tasks without bodies. Raise UnknownTransaction."""
        name = call.request.transaction
        self._find(name, call.topic_filter)
        transaction = self._registry.durable_state(name)
        if transaction is None:
            raise _unknown(name)
        bytes_left = self._parts.limits.frame_bytes_max // 2
        halves: list[dict[str, Any]] = []
        for part in sorted(transaction.parts):
            for half in transaction.parts[part].halves:
                fields = _half_map(half)
                bytes_left -= self._value_bytes(fields)
                if bytes_left >= 0:
                    halves.append(fields)
        answer = transaction_map(transaction.row) | {"halves": halves}
        self._parts.committer.answer(call, answer)

    # --- shared ----------------------------------------------------------------------------------

    def _find(self, name: str, topic_filter: TopicFilter | None) -> Transaction:
        entry = self._registry.by_name.get(name)
        if entry is None or not _is_visible(entry.row, topic_filter):
            raise _unknown(name)
        return entry

    def _when_free(
        self,
        caller: Caller,
        name: str,
        act: Callable[[], None],
        refuse: Callable[[TickwheelError], None],
    ) -> None:
        def is_free() -> bool:
            transaction = self._registry.by_name.get(name)
            return transaction is None or self._transactions.is_free(transaction)

        when_free(self._parts, caller, "a command on a transaction", is_free, act, refuse)


def transaction_map(row: TransactionRow) -> dict[str, Any]:
    """Return a transaction as the map that all answers use."""
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


def _is_visible(row: TransactionRow, topic_filter: TopicFilter | None) -> bool:
    # The topics are unknown if an older release wrote the history of a restored transaction.
    is_known = bool(row.topics) or not row.tasks
    return topic_filter is None or (is_known and all(map(topic_filter, row.topics)))


class _Conditions(NamedTuple):
    """The conditions of a listing of transactions."""

    state: TransactionState | None
    """The state of the listed transactions; None lists undecided ones."""
    group: str | None
    topic_filter: TopicFilter | None

    def fits(self, row: TransactionRow) -> bool:
        """Return whether a transaction with the listed state meets the other conditions."""
        return (self.group is None or row.group == self.group) and _is_visible(
            row, self.topic_filter
        )


def _unknown(name: str) -> UnknownTransaction:
    return UnknownTransaction(
        f"there is no transaction {name}, or it was decided so long ago that its record was removed"
    )


def _has_moment(task: Any) -> bool:
    """Return whether the task has a fixed due time."""
    return len(task) == 4 and type(task[3]) is dict and task[3].get("due_ms") is not None


def _half(new_task: NewTask, now_ms: int, *, from_commit: bool) -> Half:
    topic, due_ms, body, options = new_task
    return Half(topic, due_ms, due_ms - now_ms if from_commit else None, body, options)


def _contents(name: str, halves: Iterable[Half]) -> bytes:
    """Encode half tasks for comparison, without traces, because a trace can belong to the
    request."""
    traceless: list[Half] = []
    for half in halves:
        options = None if half.options is None else half.options._replace(trace=None)
        traceless.append(half._replace(options=None if options == NO_OPTIONS else options))
    return encode_record(TRANSACTION, Halves(name, 0, 0, tuple(traceless)))


# --- check-backs ---------------------------------------------------------------------------------

CHECKS_PER_TICK = 256
"""Maximum number of check-backs in one tick."""


class CheckSink(Protocol):
    """Sends check-backs to one caller."""

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        """Ask for the decisions on these transactions."""


class _Members:
    """The members of one producer group that have the same principal, and therefore the same
    rights."""

    __slots__ = ("sinks", "topic_filter")

    def __init__(self, topic_filter: TopicFilter | None) -> None:
        self.topic_filter = topic_filter
        self.sinks: dict[Caller, CheckSink] = {}
        """Caller → sink of each member; the most recently asked caller is last."""

    def may_decide(self, row: TransactionRow) -> bool:
        """Return whether these members may decide the transaction."""
        return self.topic_filter is None or all(map(self.topic_filter, row.topics))

    def next(self, preparer: Caller | None) -> Caller | None:
        """Return the member to ask next, preferably the preparer, or None if no member is
        reachable."""
        if preparer is not None and preparer in self.sinks and _is_reachable(preparer):
            return preparer
        return next(filter(_is_reachable, self.sinks), None)


class CheckBacks:
    """The members of producer groups in one shard, which receive check-backs."""

    def __init__(self) -> None:
        self._members: dict[str, dict[Principal, _Members]] = {}
        """Producer group → principal → members; the most recently asked principal is last."""
        self._groups: dict[Caller, tuple[str, ...]] = {}
        self._preparers: WeakValueDictionary[str, Caller] = WeakValueDictionary()
        """Transaction → the caller that prepared it as its owner."""
        self._waiting: dict[tuple[Caller, str], list[TransactionRow]] = {}

    def register(
        self,
        caller: Caller,
        groups: Sequence[str],
        sink: CheckSink,
        topic_filter: TopicFilter | None,
    ) -> None:
        """Register the caller as a member of these producer groups, and of no others."""
        self.closed(caller)
        principal = caller.principal
        for group in groups:
            by_principal = self._members.setdefault(group, {})
            members = by_principal.get(principal)
            if members is None:
                members = by_principal[principal] = _Members(topic_filter)
            members.sinks[caller] = sink
        if groups:
            self._groups[caller] = tuple(groups)

    def closed(self, caller: Caller) -> None:
        """Forget a disconnected caller."""
        for group in self._groups.pop(caller, ()):
            by_principal = self._members.get(group, {})
            members = by_principal.get(caller.principal)
            if members is None:
                continue
            members.sinks.pop(caller, None)
            if not members.sinks:
                del by_principal[caller.principal]
            if not by_principal:
                del self._members[group]

    def groups_of(self, caller: Caller) -> Sequence[str]:
        """Return the producer groups of which the caller is a member."""
        return self._groups.get(caller, ())

    def prepared(self, row: TransactionRow, caller: Caller) -> None:
        """Record that the caller prepared a part of the transaction."""
        if caller.principal.name == row.owner:
            self._preparers[row.id] = caller

    def decided(self, name: str) -> None:
        """Forget the preparer of a decided transaction."""
        self._preparers.pop(name, None)

    def is_own(self, caller: Caller, row: TransactionRow) -> bool:
        """Return whether the caller decides as the owner. The owner has the name of the preparer,
        and its connection has prepared the transaction or is a member of its producer group.
        Receiving a check-back does not make a caller the owner."""
        if caller.principal.name != row.owner:
            return False
        return self._preparers.get(row.id) is caller or row.group in self.groups_of(caller)

    @property
    def members(self) -> int:
        """Number of connections that are members of producer groups."""
        return len(self._groups)

    def ask(self, row: TransactionRow, above: Reach) -> Reach:
        """Choose the member that the next ``flush`` asks about the transaction. Only a member with
        a higher reach than ``above`` is chosen. Return its reach, or NOBODY."""
        by_principal = self._members.get(row.group, {})
        for reach in (Reach.OWN, Reach.ANOTHER):
            if reach <= above:
                break
            for principal, members in by_principal.items():
                is_owner = principal.name == row.owner
                if is_owner != (reach is Reach.OWN) or not members.may_decide(row):
                    continue
                caller = members.next(self._preparers.get(row.id))
                if caller is not None:
                    members.sinks[caller] = members.sinks.pop(caller)
                    by_principal[principal] = by_principal.pop(principal)
                    self._waiting.setdefault((caller, row.group), []).append(row)
                    return reach
        return Reach.NOBODY

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Send the check-backs. If one cannot be written, pass the error to ``failed``; that
        check-back is sent again later."""
        waiting, self._waiting = self._waiting, {}
        for (caller, group), rows in waiting.items():
            members = self._members.get(group, {}).get(caller.principal)
            sink = None if members is None else members.sinks.get(caller)
            if sink is None:
                continue
            try:
                sink.ask(group, rows)
            except Exception as error:
                failed(error)


def _is_reachable(caller: Caller) -> bool:
    return caller.is_open and not caller.is_blocked
