"""Transactions. Either all half tasks of a transaction become tasks together, or none does.

The module is pure; ``transaction_registry`` holds the state. A commit is one step: the same effects
drop the half tasks, add the new tasks, and mark the transaction as committed. So a store contains
all of this or nothing, and a commit is staged, landed or refused like an enqueue.

| state | prepare | commit | rollback | timeout |
|---|---|---|---|---|
| open | open | committed | rolled back | a check; parked after ``transaction_checks_max`` |
| parked | open | committed | rolled back | |
| committed | refused | the same answer again | refused | forgotten |
| rolled back | refused | refused | the same answer again | forgotten |

Invariants:

* If a batch is refused, its changes are undone, and its callers get an error and can try again.
  Until a decision is durable, nothing else may depend on it (``is_free``).
* Half tasks take up room from the start, so a commit is never refused for lack of room.
* An undecided transaction is never dropped. Until its last check has reached its owner, any member
  with a higher ``Reach`` than those asked so far is asked as soon as it connects, even if the
  transaction is parked.
* The times of checks follow the steady clock. Every check counts, whether or not it reaches a
  member. Asking a member that connects is part of the last check and does not count again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tickwheel.engine.events import CHECKED, COMMITTED, PARKED, PREPARED, ROLLED_BACK
from tickwheel.engine.state import ROW_OVERHEAD_BYTES
from tickwheel.engine.transaction_registry import Transaction
from tickwheel.model.kinds import (
    HEADER_PART,
    TRANSACTION,
    Half,
    Halves,
    Reach,
    TransactionRow,
    TransactionState,
)
from tickwheel.model.records import size_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.engine.enqueue import Intake
    from tickwheel.engine.sessions import ReplySink
    from tickwheel.engine.state import Core
    from tickwheel.model.records import NewTask

AskMember = Callable[[TransactionRow, Reach], Reach]
"""Asks a member whose ``Reach`` is higher than the given one. Returns the member's ``Reach``, or
``NOBODY`` if there is none."""
FORGET_MAX = 10_000
"""Maximum number of decided transactions that are forgotten in one step."""
_OPEN, _PARKED = TransactionState.OPEN, TransactionState.PARKED


class Transactions:
    """The verbs on transactions. Callers check limits and ``is_free`` first."""

    def __init__(self, core: Core, intake: Intake) -> None:
        self._core = core
        self._registry = core.transaction_registry
        self._intake = intake

    # --- verbs of producers and operators --------------------------------------------------

    def is_free(self, transaction: Transaction) -> bool:
        """Return whether a verb can change the transaction now. It cannot while a decision, or a
        change in the sealed batch, can still be undone."""
        staged = transaction.staged
        is_decided = transaction.row.state.is_decided
        return staged is None or (staged is self._core.open and not is_decided)

    def prepare(
        self,
        name: str,
        group: str,
        part: int,
        halves: tuple[Half, ...],
        address: ReplySink,
        request: int,
        now_ms: int,
        mono_ms: int,
        owner: str = "",
    ) -> None:
        """Store half tasks. ``address`` gets an answer without ids when they are durable. A part
        that is already stored is not stored again. ``owner`` is the owner of a new transaction."""
        transaction = self._registry.by_name.get(name)
        if transaction is None or part not in transaction.parts:
            prepared = Halves(name, part, now_ms, halves)
            self._prepare(transaction, group, prepared, address, now_ms, mono_ms, owner)
        self._core.open.staged.append((address, None, (request, 0, 0, now_ms)))

    def _prepare(
        self,
        transaction: Transaction | None,
        group: str,
        halves: Halves,
        address: ReplySink,
        now_ms: int,
        mono_ms: int,
        owner: str,
    ) -> None:
        name, check_ms = halves.transaction, mono_ms + self._core.config.transaction_check_ms
        size_bytes = sum(half.size_bytes for half in halves.halves)
        self._intake.stage_bytes(size_bytes + len(halves.halves) * ROW_OVERHEAD_BYTES)
        if transaction is None:
            row = TransactionRow(name, group, _OPEN, now_ms, now_ms, owner=owner)
            transaction = Transaction(row, {}, check_ms)
            self._core.open.transactions.setdefault(name, None)
            transaction.staged = self._core.open
            self._registry.put(name, transaction)
        else:
            self._stage(transaction)
        self._registry.add_part(transaction, halves)
        transaction.check_ms = check_ms
        row = transaction.row
        row = row._replace(
            state=_OPEN,
            touched_ms=now_ms,
            tasks=row.tasks + len(halves.halves),
            size_bytes=row.size_bytes + size_bytes,
            topics=self._registry.with_names(row.topics, (half.topic for half in halves.halves)),
            checks=0,
            asked=0,
            checked_ms=0,
            reached=Reach.NOBODY,
        )
        self._core.open.effects.put(TRANSACTION, halves)
        self._write(transaction, row)
        self._record(address, row, PREPARED, now_ms, halves)

    def commit(
        self, transaction: Transaction, address: ReplySink, request: int, now_ms: int, mono_ms: int
    ) -> None:
        """Turn the half tasks into tasks. ``address`` gets their ids and due times once durable."""
        core = self._core
        new_tasks = self._tasks(transaction, now_ms)
        self._stage(transaction)
        size_bytes = sum(size_of(task[2], task[3]) for task in new_tasks)
        ids = self._intake.stage(new_tasks, size_bytes, now_ms, address)
        core.open.staged.append((address, None, (request, ids[0], len(ids), now_ms)))
        core.open.chosen[ids[0]] = [task[1] for task in new_tasks]
        self._decide(transaction, TransactionState.COMMITTED, now_ms, mono_ms, ids[0])
        self._record(address, transaction.row, COMMITTED, now_ms)

    def _tasks(self, transaction: Transaction, now_ms: int) -> list[NewTask]:
        parts = (transaction.parts[part] for part in sorted(transaction.parts))
        tasks = [half.task(now_ms) for part in parts for half in part.halves]
        if any(task[3] is not None and task[3].within_ms is not None for task in tasks):
            return self._intake.place(tasks, now_ms)
        return tasks

    def rollback(
        self, transaction: Transaction, address: ReplySink, request: int, now_ms: int, mono_ms: int
    ) -> None:
        """Drop the half tasks. ``address`` gets an answer without ids once that is durable."""
        self._stage(transaction)
        self._core.open.staged.append((address, None, (request, 0, 0, now_ms)))
        self._decide(transaction, TransactionState.ROLLED_BACK, now_ms, mono_ms, 0)
        self._record(address, transaction.row, ROLLED_BACK, now_ms)

    def _decide(
        self,
        transaction: Transaction,
        state: TransactionState,
        now_ms: int,
        mono_ms: int,
        first_id: int,
    ) -> None:
        name, effects = transaction.row.id, self._core.open.effects
        for part in transaction.parts:
            effects.drop(TRANSACTION, (name, part))
        self._registry.drop_parts(transaction)
        transaction.decided_ms = mono_ms
        row = transaction.row._replace(state=state, decided_ms=now_ms, first_id=first_id)
        self._write(transaction, row)
        excess = len(self._registry.decided) - self._core.config.transactions_remembered_max
        if excess > 0:
            self._forget(mono_ms, min(excess, FORGET_MAX))

    # --- asking ------------------------------------------------------------------------------

    def check(self, now_ms: int, mono_ms: int, limit: int, ask: AskMember) -> bool:
        """Send checks about up to ``limit`` transactions that are due for a check or for which a
        member has connected. Return whether to call this again at once."""
        for _ in range(limit):
            transaction = self._registry.pop_returning()
            if transaction is not None:
                self._ask_again(transaction, now_ms, mono_ms, ask)
                continue
            transaction = self._registry.pop(mono_ms)
            if transaction is None:
                return False
            self._ask_on_schedule(transaction, now_ms, mono_ms, ask)
        return True

    def _ask_on_schedule(
        self, transaction: Transaction, now_ms: int, mono_ms: int, ask: AskMember
    ) -> None:
        row = transaction.row
        if row.checks >= self._core.config.transaction_checks_max:
            self._stage(transaction)
            self._write(transaction, row._replace(state=_PARKED))
            self._core.totals.transactions_parked += 1
            self._record(None, transaction.row, PARKED, now_ms)
            return
        reached = ask(row, Reach.NOBODY)
        asked = row.asked + (reached > Reach.NOBODY)
        row = row._replace(checks=row.checks + 1, asked=asked, reached=reached)
        self._record_check(transaction, row, now_ms, mono_ms)

    def _ask_again(
        self, transaction: Transaction, now_ms: int, mono_ms: int, ask: AskMember
    ) -> None:
        """Ask a member that has connected about a transaction whose last check did not reach its
        owner. Nothing changes if no connected member has a higher ``Reach``."""
        row = transaction.row
        reached = ask(row._replace(checks=row.checks - 1), row.reached)  # the row of the last check
        if reached <= row.reached:
            return
        if row.state is _PARKED:
            row = row._replace(state=_OPEN, checks=1, asked=1, reached=reached)
        else:
            asked = row.asked + (row.reached is Reach.NOBODY)
            row = row._replace(asked=asked, reached=reached)
        self._record_check(transaction, row, now_ms, mono_ms)

    def _record_check(
        self, transaction: Transaction, row: TransactionRow, now_ms: int, mono_ms: int
    ) -> None:
        self._stage(transaction)
        self._core.totals.transactions_checked += row.reached > Reach.NOBODY
        transaction.check_ms = mono_ms + self._core.config.transaction_check_every_ms
        row = row._replace(checked_ms=now_ms)
        self._write(transaction, row)
        self._record(None, row, CHECKED, now_ms)

    def member_connected(self, group: str) -> None:
        """Record that a member of the producer group has connected. The next ``check`` asks it
        about transactions whose last check did not reach their owner."""
        self._registry.member_connected(group)

    # --- the end -----------------------------------------------------------------------------

    def sweep(self, mono_ms: int) -> None:
        """Forget decided transactions after the configured time. Call this periodically."""
        self._forget(mono_ms - self._core.config.transactions_remembered_ms, FORGET_MAX)

    def _forget(self, until_ms: int, limit: int) -> None:
        registry, forgotten = self._registry, list[str]()
        for name in registry.decided:
            transaction = registry.by_name[name]
            if len(forgotten) >= limit or transaction.decided_ms > until_ms:
                break
            if transaction.staged is None:
                forgotten.append(name)
        for name in forgotten:
            self._stage(registry.by_name[name])
            self._core.open.effects.drop(TRANSACTION, (name, HEADER_PART))
            registry.put(name, None)

    # --- a start -----------------------------------------------------------------------------

    def restore(self, rows: Iterable[TransactionRow | Halves], mono_ms: int) -> None:
        """Restore stored transactions. All timers restart, so that a change of the wall clock makes
        no check early or late."""
        config = self._core.config
        parts: dict[str, dict[int, Halves]] = {}
        headers: list[TransactionRow] = []
        for row in rows:
            if isinstance(row, Halves):
                parts.setdefault(row.transaction, {})[row.part] = row
            else:
                headers.append(row)
        for row in sorted(headers, key=lambda row: (row.decided_ms, row.id)):
            header = row._replace(topics=self._registry.with_names((), row.topics))
            check_in_ms = (
                config.transaction_check_every_ms if row.checks else config.transaction_check_ms
            )
            transaction = Transaction(
                header, parts.get(header.id, {}), mono_ms + check_in_ms, mono_ms
            )
            self._registry.restore(transaction)

    # --- common steps ------------------------------------------------------------------------

    def _stage(self, transaction: Transaction) -> None:
        """Save the state of the transaction before the open batch changes it."""
        batch, name = self._core.open, transaction.row.id
        if transaction.staged is batch:
            return
        batch.transactions.setdefault(name, transaction.copy())
        transaction.staged = batch

    def _record(
        self,
        source: object,
        row: TransactionRow,
        event: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        self._core.recorder.transacted(source, row, event, now_ms, added)

    def _write(self, transaction: Transaction, row: TransactionRow) -> None:
        self._core.open.effects.put(TRANSACTION, row)
        self._registry.change(transaction, row)
