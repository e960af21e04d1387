"""The transactions of an engine, and the times of their next checks.

This module holds the state and the common operations on it; the rules are in ``transactions.py``.
Invariants:

* A transaction that was changed in a batch that is not durable is *staged* in it.
  ``Batch.transactions`` contains its previous state, which is restored if the batch is refused.
  Nothing may depend on a change that can be undone.
* The sums, in total and per owner, are those of the transactions in ``by_name``. ``listed`` yields
  the names of durable transactions according to their durable states.
* The time of a check depends only on the steady clock and is not stored. After a restart the full
  interval must pass again, so that no producer is asked too early.

``SortedNames`` is a sorted set that can be read from any name on, as paged listings require. Names
are stored in runs of at most ``RUN_MAX``, so that a change moves only a part of one run. Adding and
removing take O(log n) comparisons.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from tickwheel.engine.queues import DueNames
from tickwheel.model.kinds import TransactionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tickwheel.engine.topics import Tallies
    from tickwheel.model.kinds import Halves, TransactionRow

RUN_MAX = 512


class SortedNames:
    """A sorted set of names."""

    __slots__ = ("_lasts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[str]] = []
        """Runs of names, ascending within and between runs. No run is empty."""
        self._lasts: list[str] = []
        """The last name of each run."""

    def add(self, name: str) -> None:
        """Add a name if it is not in the set."""
        if not self._runs:
            self._runs, self._lasts = [[name]], [name]
            return
        place = min(bisect_left(self._lasts, name), len(self._runs) - 1)
        run = self._runs[place]
        at = bisect_left(run, name)
        if at < len(run) and run[at] == name:
            return
        insort(run, name)
        if len(run) > RUN_MAX:
            half = len(run) // 2
            self._runs[place : place + 1] = [run[:half], run[half:]]
            self._lasts[place : place + 1] = [run[half - 1], run[-1]]
        else:
            self._lasts[place] = run[-1]

    def discard(self, name: str) -> None:
        """Remove a name if it is in the set."""
        place = bisect_left(self._lasts, name)
        if place == len(self._runs):
            return
        run = self._runs[place]
        at = bisect_left(run, name)
        if run[at] != name:
            return
        del run[at]
        if run:
            self._lasts[place] = run[-1]
        else:
            del self._runs[place], self._lasts[place]

    def after(self, name: str) -> Iterator[str]:
        """Yield the names after this one, in order. The set must not change during iteration."""
        place = bisect_right(self._lasts, name)
        for index in range(place, len(self._runs)):
            run = self._runs[index]
            yield from islice(run, bisect_right(run, name) if index == place else 0, None)


NAMES_MAX = 10_000
"""Maximum number of topic names that transactions share as objects."""


class Changes(Protocol):
    """The part of a batch that the registry uses: the transactions that it changes."""

    @property
    def transactions(self) -> dict[str, Transaction | None]: ...


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction in memory. Its times are read from the steady clock."""

    row: TransactionRow
    parts: dict[int, Halves]
    """Part → half tasks; empty once decided."""
    check_ms: int
    """When the next check of an open transaction is due (steady ms)."""
    decided_ms: int = 0
    """When the transaction was decided, or restored as decided (steady ms)."""
    staged: Changes | None = None
    """The batch that contains a change of the transaction and is not durable, or None."""
    has_returning_member: bool = False
    """Whether a member connected while the transaction was staged."""

    def copy(self) -> Transaction:
        """Return a copy of the transaction before a batch changes it."""
        return Transaction(self.row, dict(self.parts), self.check_ms, self.decided_ms)


class Share:
    """The total size of the undecided transactions of an owner."""

    __slots__ = ("count", "size_bytes", "tasks")

    def __init__(self) -> None:
        self.count = self.tasks = self.size_bytes = 0


NO_SHARE = Share()


class TransactionRegistry:
    """All transactions of an engine by name, by owner, by state, and by their next check."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self.by_name: dict[str, Transaction] = {}
        self.decided: dict[str, None] = {}
        """Names of decided transactions in the order of the decisions."""
        self.unasked: dict[str, dict[str, None]] = {}
        """Producer group → transactions whose last check did not reach their owner."""
        self.returning: dict[str, None] = {}
        """Transactions in ``unasked`` for which a member has connected since."""
        self.shares: dict[str, Share] = {}
        """Owner → size of its undecided transactions, for owners that have any."""
        self.topics: Counter[str] = Counter()
        """Topic → number of half tasks."""
        self.tasks = 0
        """Number of half tasks of undecided transactions."""
        self.size_bytes = 0
        """Bytes of the half tasks of undecided transactions."""
        self.parked = 0
        """Number of parked transactions."""
        self._listed = {state: SortedNames() for state in TransactionState}
        self._names: dict[str, str] = {}
        self._due = DueNames()

    def with_names(self, known: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
        """Return the names of ``known`` and ``more`` without duplicates, one object per name."""
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        return tuple(dict.fromkeys((*known, *(self._names.setdefault(n, n) for n in more))))

    @property
    def undecided(self) -> int:
        """Number of transactions that are neither committed nor rolled back."""
        return len(self.by_name) - len(self.decided)

    def share(self, owner: str) -> Share:
        """Return the size of an owner's undecided transactions. The caller must not change it."""
        return self.shares.get(owner, NO_SHARE)

    # --- changes ---------------------------------------------------------------------------

    def put(self, name: str, transaction: Transaction | None) -> None:
        """Set the transaction of this name. None forgets it."""
        before = self.by_name.pop(name, None)
        if before is not None:
            self._count(before.row, -1)
            self._count_halves(before.parts.values(), -1)
            self.decided.pop(name, None)
        if transaction is None:
            self._due.set(name, None)
            return
        self.by_name[name] = transaction
        self._count(transaction.row, 1)
        self._count_halves(transaction.parts.values(), 1)
        if transaction.row.state.is_decided:
            self.decided[name] = None
        self.arm(transaction)

    def change(self, transaction: Transaction, row: TransactionRow) -> None:
        """Set the row of the transaction."""
        self._count(transaction.row, -1)
        transaction.row = row
        self._count(row, 1)
        if row.state.is_decided:
            self.decided[row.id] = None
        self.arm(transaction)

    def add_part(self, transaction: Transaction, halves: Halves) -> None:
        """Add half tasks. The caller must then change the row."""
        transaction.parts[halves.part] = halves
        self._count_halves((halves,), 1)

    def drop_parts(self, transaction: Transaction) -> None:
        """Drop the half tasks. The caller must then change the row."""
        self._count_halves(transaction.parts.values(), -1)
        transaction.parts = {}

    def _count(self, row: TransactionRow, sign: int) -> None:
        waiting = self.unasked.get(row.group)
        if sign > 0 and row.waits_for_members:
            self.unasked.setdefault(row.group, {})[row.id] = None
        elif waiting is not None:
            waiting.pop(row.id, None)
            if not waiting:
                del self.unasked[row.group]
        if row.state.is_decided:
            return
        self.tasks += sign * row.tasks
        self.size_bytes += sign * row.size_bytes
        self.parked += sign * (row.state is TransactionState.PARKED)
        share = self.shares.get(row.owner)
        if share is None:
            share = self.shares[row.owner] = Share()
        share.count += sign
        share.tasks += sign * row.tasks
        share.size_bytes += sign * row.size_bytes
        if not share.count:
            del self.shares[row.owner]

    def _count_halves(self, parts: Iterable[Halves], sign: int) -> None:
        counts = Counter(half.topic for part in parts for half in part.halves)
        for topic, count in counts.items():
            self.topics[topic] += sign * count
            if not self.topics[topic]:
                del self.topics[topic]
        self._tallies.count_all(counts, sign)

    # --- durable states --------------------------------------------------------------------

    def durable_state(self, name: str) -> Transaction | None:
        """Return the transaction in its durable state, or None if it has none."""
        transaction = self.by_name.get(name)
        return (
            transaction
            if transaction is None or transaction.staged is None
            else transaction.staged.transactions[name]
        )

    def listed(self, after: str, state: TransactionState | None) -> Iterator[str]:
        """Yield the names after ``after``, in order, of durable transactions in ``state``, or of
        undecided transactions (None). The registry must not change during the iteration."""
        if state is not None:
            return self._listed[state].after(after)
        undecided = (state for state in TransactionState if not state.is_decided)
        return heapq.merge(*(self._listed[state].after(after) for state in undecided))

    def restore(self, transaction: Transaction) -> None:
        """Restore a stored transaction."""
        self.put(transaction.row.id, transaction)
        self._listed[transaction.row.state].add(transaction.row.id)

    # --- durable and refused changes -------------------------------------------------------

    def landed(self, batch: Changes) -> tuple[int, int]:
        """Record that the batch is durable. Return its numbers of commits and rollbacks."""
        committed = rolled_back = 0
        for name, before in batch.transactions.items():
            transaction = self.by_name.get(name)
            if before is not None:
                self._listed[before.row.state].discard(name)
            if transaction is None or transaction.staged is not batch:
                continue  # the transaction was forgotten, and its name may be in use again
            self._listed[transaction.row.state].add(name)
            transaction.staged = None
            self.arm(transaction)
            if transaction.has_returning_member:
                transaction.has_returning_member = False
                self.returning[name] = None
            if before is None or not before.row.state.is_decided:
                committed += transaction.row.state is TransactionState.COMMITTED
                rolled_back += transaction.row.state is TransactionState.ROLLED_BACK
        return committed, rolled_back

    def undo(self, batch: Changes) -> None:
        """Restore the previous states of the transactions that a refused batch changed."""
        for name, before in batch.transactions.items():
            transaction = self.by_name.get(name)
            if transaction is None or transaction.staged is batch:
                self.put(name, before)

    # --- times -----------------------------------------------------------------------------

    def arm(self, transaction: Transaction) -> None:
        """Update the heap after a transaction has changed."""
        is_open = transaction.row.state is TransactionState.OPEN
        wanted_ms = transaction.check_ms if is_open and transaction.staged is None else None
        self._due.set(transaction.row.id, wanted_ms)

    def wait_ms(self, mono_ms: int) -> int | None:
        """Return the time until the next check in ms, or None if there is none."""
        if self.returning:
            return 0
        due_ms = self._due.next_ms()
        return None if due_ms is None else due_ms - mono_ms

    def pop(self, mono_ms: int) -> Transaction | None:
        """Remove and return the next transaction due for a check. Then change or ``arm`` it."""
        name = self._due.pop(mono_ms)
        return None if name is None else self.by_name[name]

    # --- members connect -------------------------------------------------------------------

    def member_connected(self, group: str) -> None:
        """Record that a member of this producer group has connected."""
        self.returning.update(self.unasked.get(group, {}))

    def pop_returning(self) -> Transaction | None:
        """Remove and return the next unstaged transaction for which a member has connected."""
        while self.returning:
            name = next(iter(self.returning))
            del self.returning[name]
            transaction = self.by_name.get(name)
            if transaction is None or not transaction.row.waits_for_members:
                continue
            if transaction.staged is None:
                return transaction
            transaction.has_returning_member = True  # the member is asked when the batch is durable
        return None
