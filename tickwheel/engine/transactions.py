"""Transactions: half tasks that become tasks together, or not at all.

Pure; what is remembered is ``transaction_registry``'s. A commit is one step: in the same effects
the half tasks are dropped, their tasks are new ones, and the transaction says that it was
committed. So a store has all of it or nothing, and what holds for an enqueue (staged, landed,
refused) holds for it.

| state | a producer prepares | commits | rolls back | its time comes |
|---|---|---|---|---|
| open | open | committed | rolled back | asked about; after so many times parked |
| parked | open | committed | rolled back | |
| committed | refused | the same answer again | refused | forgotten |
| rolled back | refused | refused | the same answer again | forgotten |

Invariants:

* A change in a batch that is refused is undone, with its answer: whoever asked is told, and asks
  again. Until a decision is durable nobody else may rest on it (``is_free``).
* Half tasks have their room from the beginning: a commit is never refused for lack of it.
* A transaction that nobody decides is never dropped. While its last check has not reached its
  owner, it is asked about as soon as somebody comes who is nearer, parked or not.
* Times to ask are of the steady clock, and each counts, whomever it reached. What is asked because
  somebody came is the last of them made up for, and does not count as another.
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

Ask = Callable[[TransactionRow, Reach], Reach]
"""Asks a member who is nearer than the given reach; returns that member's, or ``NOBODY``."""
FORGET_MAX = 10_000
"""How many decided transactions are forgotten at a time."""
_OPEN, _PARKED = TransactionState.OPEN, TransactionState.PARKED


class Transactions:
    """The verbs on transactions. Callers check limits and ``is_free`` first."""

    def __init__(self, core: Core, intake: Intake) -> None:
        self._core = core
        self._registry = core.transaction_registry
        self._intake = intake

    # --- what producers and operators do ---------------------------------------------------

    def is_free(self, transaction: Transaction) -> bool:
        """Whether a verb may change the transaction now: not while a decision, or anything in the
        batch that the store has, may still be undone."""
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
        """Keep half tasks; ``address`` gets an answer without ids when they are durable. A known
        part is only answered. ``owner``: whose the transaction is, if it begins now."""
        found = self._registry.known.get(name)
        if found is None or part not in found.parts:
            prepared = Halves(name, part, now_ms, halves)
            self._prepare(found, group, prepared, address, now_ms, mono_ms, owner)
        self._core.open.staged.append((address, None, (request, 0, 0, now_ms)))

    def _prepare(
        self,
        found: Transaction | None,
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
        if found is None:
            row = TransactionRow(name, group, _OPEN, now_ms, now_ms, owner=owner)
            found = Transaction(row, {}, check_ms)
            self._core.open.transactions.setdefault(name, None)
            found.staged = self._core.open
            self._registry.put(name, found)
        else:
            self._stage(found)
        self._registry.add_part(found, halves)
        found.check_ms = check_ms
        row = found.row
        row = row._replace(
            state=_OPEN,
            touched_ms=now_ms,
            tasks=row.tasks + len(halves.halves),
            size_bytes=row.size_bytes + size_bytes,
            topics=self._registry.with_topics(row.topics, (half.topic for half in halves.halves)),
            checks=0,
            asked=0,
            checked_ms=0,
            reached=Reach.NOBODY,
        )
        self._core.open.effects.put(TRANSACTION, halves)
        self._write(found, row)
        self._note(address, row, PREPARED, now_ms, halves)

    def commit(
        self, transaction: Transaction, address: ReplySink, request: int, now_ms: int, mono_ms: int
    ) -> None:
        """Make tasks of the half tasks; ``address`` gets their ids and due times once durable."""
        core = self._core
        new_tasks = self._tasks(transaction, now_ms)
        self._stage(transaction)
        size_bytes = sum(size_of(task[2], task[3]) for task in new_tasks)
        ids = self._intake.stage(new_tasks, size_bytes, now_ms, address)
        core.open.staged.append((address, None, (request, ids[0], len(ids), now_ms)))
        core.open.chosen[ids[0]] = [task[1] for task in new_tasks]
        self._decide(transaction, TransactionState.COMMITTED, now_ms, mono_ms, ids[0])
        self._note(address, transaction.row, COMMITTED, now_ms)

    def _tasks(self, transaction: Transaction, now_ms: int) -> list[NewTask]:
        parts = (transaction.parts[part] for part in sorted(transaction.parts))
        tasks = [half.task(now_ms) for part in parts for half in part.halves]
        if any(task[3] is not None and task[3].within_ms is not None for task in tasks):
            return self._intake.place(tasks, now_ms)
        return tasks

    def rollback(
        self, transaction: Transaction, address: ReplySink, request: int, now_ms: int, mono_ms: int
    ) -> None:
        """Drop the half tasks; ``address`` gets an answer without ids once that is durable."""
        self._stage(transaction)
        self._core.open.staged.append((address, None, (request, 0, 0, now_ms)))
        self._decide(transaction, TransactionState.ROLLED_BACK, now_ms, mono_ms, 0)
        self._note(address, transaction.row, ROLLED_BACK, now_ms)

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
        over = len(self._registry.decided) - self._core.config.transactions_remembered_max
        if over > 0:
            self._forget(mono_ms, min(over, FORGET_MAX))

    # --- asking ------------------------------------------------------------------------------

    def check(self, now_ms: int, mono_ms: int, limit: int, ask: Ask) -> bool:
        """Ask about up to ``limit`` transactions that somebody came for or whose time has come.
        True: call again at once."""
        for _ in range(limit):
            found = self._registry.pop_returning()
            if found is not None:
                self._ask_again(found, now_ms, mono_ms, ask)
                continue
            found = self._registry.pop(mono_ms)
            if found is None:
                return False
            self._ask_in_time(found, now_ms, mono_ms, ask)
        return True

    def _ask_in_time(self, found: Transaction, now_ms: int, mono_ms: int, ask: Ask) -> None:
        row = found.row
        if row.checks >= self._core.config.transaction_checks_max:
            self._stage(found)
            self._write(found, row._replace(state=_PARKED))
            self._core.totals.transactions_parked += 1
            self._note(None, found.row, PARKED, now_ms)
            return
        reached = ask(row, Reach.NOBODY)
        asked = row.asked + (reached > Reach.NOBODY)
        row = row._replace(checks=row.checks + 1, asked=asked, reached=reached)
        self._checked(found, row, now_ms, mono_ms)

    def _ask_again(self, found: Transaction, now_ms: int, mono_ms: int, ask: Ask) -> None:
        """Ask again about a transaction whose last check did not reach its owner, now that somebody
        came. If that one is no nearer, nothing changes."""
        row = found.row
        reached = ask(row._replace(checks=row.checks - 1), row.reached)  # as it was then
        if reached <= row.reached:
            return
        if row.state is _PARKED:
            row = row._replace(state=_OPEN, checks=1, asked=1, reached=reached)
        else:
            asked = row.asked + (row.reached is Reach.NOBODY)
            row = row._replace(asked=asked, reached=reached)
        self._checked(found, row, now_ms, mono_ms)

    def _checked(self, found: Transaction, row: TransactionRow, now_ms: int, mono_ms: int) -> None:
        self._stage(found)
        self._core.totals.transactions_checked += row.reached > Reach.NOBODY
        found.check_ms = mono_ms + self._core.config.transaction_check_every_ms
        row = row._replace(checked_ms=now_ms)
        self._write(found, row)
        self._note(None, row, CHECKED, now_ms)

    def came(self, group: str) -> None:
        """A member of the producer group came: transactions that its members could not be asked
        about are asked with the next ``check``, if the member may be asked."""
        self._registry.came(group)

    # --- the end -----------------------------------------------------------------------------

    def sweep(self, mono_ms: int) -> None:
        """Forget decided transactions that nobody asks about any more; called once in a while."""
        self._forget(mono_ms - self._core.config.transactions_remembered_ms, FORGET_MAX)

    def _forget(self, until_ms: int, most: int) -> None:
        registry, gone = self._registry, list[str]()
        for name in registry.decided:
            found = registry.known[name]
            if len(gone) >= most or found.decided_ms > until_ms:
                break
            if found.staged is None:
                gone.append(name)
        for name in gone:
            self._stage(registry.known[name])
            self._core.open.effects.drop(TRANSACTION, (name, HEADER_PART))
            registry.put(name, None)

    # --- a start -----------------------------------------------------------------------------

    def restore(self, rows: Iterable[TransactionRow | Halves], mono_ms: int) -> None:
        """Restore the transactions of a store. All times begin anew: a clock that was put forward
        must have nobody asked too early, and one that was put back nobody too late."""
        config = self._core.config
        parts: dict[str, dict[int, Halves]] = {}
        heads: list[TransactionRow] = []
        for row in rows:
            if isinstance(row, Halves):
                parts.setdefault(row.transaction, {})[row.part] = row
            else:
                heads.append(row)
        for row in sorted(heads, key=lambda row: (row.decided_ms, row.id)):
            head = row._replace(topics=self._registry.with_topics((), row.topics))
            left_ms = (
                config.transaction_check_every_ms if row.checks else config.transaction_check_ms
            )
            found = Transaction(head, parts.get(head.id, {}), mono_ms + left_ms, mono_ms)
            self._registry.restore(found)

    # --- what these have in common -----------------------------------------------------------

    def _stage(self, transaction: Transaction) -> None:
        """Remember the transaction as it was before the open batch changes it."""
        batch, name = self._core.open, transaction.row.id
        if transaction.staged is batch:
            return
        batch.transactions.setdefault(name, transaction.copy())
        transaction.staged = batch

    def _note(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        self._core.recorder.transacted(source, row, what, now_ms, added)

    def _write(self, transaction: Transaction, row: TransactionRow) -> None:
        self._core.open.effects.put(TRANSACTION, row)
        self._registry.change(transaction, row)
