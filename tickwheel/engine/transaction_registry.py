"""The transactions that an engine remembers, and when each is asked about.

State and the few steps that several parts have in common; the rules are ``transactions``'.
Invariants:

* A transaction that was changed in a batch that is not durable is *staged* in it. ``before`` that
  batch it was what ``Batch.transactions`` says, and what it becomes again when the batch is
  refused; nothing may rest on a change that can be undone.
* The sums, of all and of each owner, are those of the transactions in ``known``; the names of
  ``listed`` are those that are durable, in the states that are.
* When somebody is asked follows from the steady clock alone. It is not stored: a restart finds the
  whole time left, so that nobody is asked too early.

``SortedNames``: names in their order, from any of them on, which is what a page of a listing needs.
They are in runs of at most ``RUN_MAX``, so that one more or less moves a part of one run, and a
page touches the names that it shows. Adding and removing take O(log n) comparisons.
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
    """A set of names that is read in order."""

    __slots__ = ("_lasts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[str]] = []
        """Runs of names, ascending within each run and from one to the next; none is empty."""
        self._lasts: list[str] = []
        """The last name of each run."""

    def add(self, name: str) -> None:
        """Add a name; one that is there already stays once."""
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
        """Remove a name, if it is there."""
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
        """The names behind this one, in order. Nothing may be changed while they are read."""
        place = bisect_right(self._lasts, name)
        for index in range(place, len(self._runs)):
            run = self._runs[index]
            yield from islice(run, bisect_right(run, name) if index == place else 0, None)


NAMES_MAX = 10_000
"""How many names of topics are shared between transactions."""


class Changes(Protocol):
    """A batch as the registry sees it: the transactions that it changes."""

    @property
    def transactions(self) -> dict[str, Transaction | None]: ...


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction in memory. All its times are of the steady clock."""

    row: TransactionRow
    parts: dict[int, Halves]
    """The half tasks by part; a decided transaction has none."""
    check_ms: int
    """When it is time to ask about an open transaction (steady ms)."""
    decided_ms: int = 0
    """When the transaction was decided, or a start found it decided (steady ms)."""
    staged: Changes | None = None
    """The batch that changes it and is not durable."""
    is_returned: bool = False
    """Whether a member that may be asked came while the transaction was staged."""

    def copy(self) -> Transaction:
        """The transaction as it is now, before a batch changes it."""
        return Transaction(self.row, dict(self.parts), self.check_ms, self.decided_ms)


class Share:
    """What the undecided transactions of one owner take."""

    __slots__ = ("count", "size_bytes", "tasks")

    def __init__(self) -> None:
        self.count = self.tasks = self.size_bytes = 0


NO_SHARE = Share()


class TransactionRegistry:
    """All transactions of one engine: by name, by owner, by state, and by when to ask."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self.known: dict[str, Transaction] = {}
        self.decided: dict[str, None] = {}
        """The transactions that are decided, in the order in which that happened."""
        self.unasked: dict[str, dict[str, None]] = {}
        """By producer group: the transactions whose last check did not reach their owner."""
        self.returning: dict[str, None] = {}
        """The unasked transactions for which somebody came since."""
        self.shares: dict[str, Share] = {}
        """What the undecided transactions of each owner take; an owner without any has no share."""
        self.topics: Counter[str] = Counter()
        """How many half tasks there are of each topic."""
        self.tasks = 0
        """How many half tasks the undecided transactions have."""
        self.size_bytes = 0
        """The bytes of the half tasks that the undecided transactions have."""
        self.parked = 0
        """How many undecided transactions are parked."""
        self._listed = {state: SortedNames() for state in TransactionState}
        self._names: dict[str, str] = {}
        self._due = DueNames()

    def with_topics(self, known: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
        """The names ``known`` and ``more``, each once. There is one object for a name, however
        many transactions have it."""
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        return tuple(dict.fromkeys((*known, *(self._names.setdefault(n, n) for n in more))))

    @property
    def undecided(self) -> int:
        """How many transactions are neither committed nor rolled back."""
        return len(self.known) - len(self.decided)

    def share(self, owner: str) -> Share:
        """What the undecided transactions of this owner take; whoever asks must not change it."""
        return self.shares.get(owner, NO_SHARE)

    # --- what is there ---------------------------------------------------------------------

    def put(self, name: str, transaction: Transaction | None) -> None:
        """The transaction of this name is this one from now on; None: it is forgotten."""
        before = self.known.pop(name, None)
        if before is not None:
            self._count(before.row, -1)
            self._count_halves(before.parts.values(), -1)
            self.decided.pop(name, None)
        if transaction is None:
            self._due.set(name, None)
            return
        self.known[name] = transaction
        self._count(transaction.row, 1)
        self._count_halves(transaction.parts.values(), 1)
        if transaction.row.state.is_decided:
            self.decided[name] = None
        self.arm(transaction)

    def change(self, transaction: Transaction, row: TransactionRow) -> None:
        """The transaction has this row from now on."""
        self._count(transaction.row, -1)
        transaction.row = row
        self._count(row, 1)
        if row.state.is_decided:
            self.decided[row.id] = None
        self.arm(transaction)

    def add_part(self, transaction: Transaction, halves: Halves) -> None:
        """The transaction has these half tasks more; its row says so next."""
        transaction.parts[halves.part] = halves
        self._count_halves((halves,), 1)

    def drop_parts(self, transaction: Transaction) -> None:
        """The half tasks of the transaction are gone; its row says so next."""
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

    # --- what is durable -------------------------------------------------------------------

    def durable(self, name: str) -> Transaction | None:
        """The transaction as the store has it, or will have it for certain."""
        found = self.known.get(name)
        return found if found is None or found.staged is None else found.staged.transactions[name]

    def listed(self, after: str, state: TransactionState | None) -> Iterator[str]:
        """The names behind this one of those that are durable, in order; of one state, or of all
        that are not decided. Nothing may be changed while they are read."""
        if state is not None:
            return self._listed[state].after(after)
        undecided = (state for state in TransactionState if not state.is_decided)
        return heapq.merge(*(self._listed[state].after(after) for state in undecided))

    def restore(self, transaction: Transaction) -> None:
        """A store had this transaction, and an engine that starts has it again."""
        self.put(transaction.row.id, transaction)
        self._listed[transaction.row.state].add(transaction.row.id)

    # --- the fate of changes ---------------------------------------------------------------

    def landed(self, batch: Changes) -> tuple[int, int]:
        """The batch is durable; how many transactions were committed by it, and rolled back."""
        committed = rolled_back = 0
        for name, before in batch.transactions.items():
            found = self.known.get(name)
            if before is not None:
                self._listed[before.row.state].discard(name)
            if found is None or found.staged is not batch:
                continue  # it was forgotten, and its name may be in use again
            self._listed[found.row.state].add(name)
            found.staged = None
            self.arm(found)
            if found.is_returned:
                found.is_returned = False
                self.returning[name] = None
            if before is None or not before.row.state.is_decided:
                committed += found.row.state is TransactionState.COMMITTED
                rolled_back += found.row.state is TransactionState.ROLLED_BACK
        return committed, rolled_back

    def undo(self, batch: Changes) -> None:
        """The batch was refused: each transaction that it changed is as it was before."""
        for name, before in batch.transactions.items():
            found = self.known.get(name)
            if found is None or found.staged is batch:
                self.put(name, before)

    # --- when ------------------------------------------------------------------------------

    def arm(self, transaction: Transaction) -> None:
        """A transaction has changed: from now on the heap has it at the time to ask about it."""
        is_open = transaction.row.state is TransactionState.OPEN
        wanted_ms = transaction.check_ms if is_open and transaction.staged is None else None
        self._due.set(transaction.row.id, wanted_ms)

    def wait_ms(self, mono_ms: int) -> int | None:
        """How long until somebody is to be asked about a transaction; None: no time is set."""
        if self.returning:
            return 0
        due_ms = self._due.next_ms()
        return None if due_ms is None else due_ms - mono_ms

    def pop(self, mono_ms: int) -> Transaction | None:
        """The next transaction whose time has come; whoever gets it changes it, or arms it
        again."""
        name = self._due.pop(mono_ms)
        return None if name is None else self.known[name]

    # --- somebody comes --------------------------------------------------------------------

    def came(self, group: str) -> None:
        """Somebody of this producer group is there to be asked."""
        self.returning.update(self.unasked.get(group, {}))

    def pop_returning(self) -> Transaction | None:
        """The next transaction that somebody came for, and that is not staged."""
        while self.returning:
            name = next(iter(self.returning))
            del self.returning[name]
            found = self.known.get(name)
            if found is None or not found.row.waits_for_members:
                continue
            if found.staged is None:
                return found
            found.is_returned = True  # when that is durable
        return None
