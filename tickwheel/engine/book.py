"""The transactions that an engine remembers, and when each is asked about.

State and the few steps that several parts have in common; the rules are ``transactions``'.
Invariants:

* A transaction that was changed in a batch that is not durable is *staged* in it. ``before`` that
  batch it was what ``Batch.transactions`` says, and what it becomes again when the batch is
  refused; nothing may rest on a change that can be undone.
* The sums are those of the transactions in ``known``.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from tickwheel.model.transactions import TransactionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tickwheel.model.transactions import Halves, TransactionRow

STALE_MAX = 64
"""Entries of the heap that do not count any more, beside one for each transaction."""
NAMES_MAX = 10_000
"""So many names of topics are shared."""


class Changes(Protocol):
    """A batch, as it is known here."""

    @property
    def transactions(self) -> dict[str, Transaction | None]: ...


class Transaction:
    """One transaction in memory."""

    __slots__ = ("due_ms", "parts", "row", "staged")

    def __init__(self, row: TransactionRow, parts: dict[int, Halves]) -> None:
        self.row = row
        self.parts = parts
        """Its half tasks by part; none of a decided one."""
        self.staged: Changes | None = None
        """The batch that changes it and is not durable."""
        self.due_ms: int | None = None
        """When it is looked at next; None: not before something happens."""


class Book:
    """All of one engine."""

    def __init__(self, check_ms: int, every_ms: int) -> None:
        self._check_ms = check_ms
        self._every_ms = every_ms
        self.known: dict[str, Transaction] = {}
        self.decided: dict[str, None] = {}
        """Those that are over, in the order in which they were decided."""
        self.unasked: dict[str, dict[str, None]] = {}
        """By producer group: those about which nobody could be asked the last time."""
        self.tasks = 0
        """Half tasks, of those that are not decided;"""
        self.size_bytes = 0
        """and their bytes."""
        self.parked = 0
        self._names: dict[str, str] = {}
        self._heap: list[tuple[int, str]] = []

    def with_topics(self, known: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
        """Each once; one object for a name, however many transactions have it."""
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        return tuple(dict.fromkeys((*known, *(self._names.setdefault(n, n) for n in more))))

    @property
    def undecided(self) -> int:
        return len(self.known) - len(self.decided)

    # --- what is there ---------------------------------------------------------------------

    def put(self, name: str, transaction: Transaction | None) -> None:
        """It is so from now on; None: it is forgotten."""
        before = self.known.pop(name, None)
        if before is not None:
            self._count(before.row, -1)
            self.decided.pop(name, None)
        if transaction is None:
            return
        self.known[name] = transaction
        self._count(transaction.row, 1)
        if transaction.row.state.is_decided:
            self.decided[name] = None
        self.arm(transaction)

    def change(self, transaction: Transaction, row: TransactionRow) -> None:
        """It has another row."""
        self._count(transaction.row, -1)
        transaction.row = row
        self._count(row, 1)
        if row.state.is_decided:
            self.decided[row.id] = None
        self.arm(transaction)

    def _count(self, row: TransactionRow, sign: int) -> None:
        if not row.state.is_decided:
            self.tasks += sign * row.tasks
            self.size_bytes += sign * row.size_bytes
            self.parked += sign * (row.state is TransactionState.PARKED)

    def durable(self, name: str) -> Transaction | None:
        """As the store has it, or will have it for certain."""
        found = self.known.get(name)
        return found if found is None or found.staged is None else found.staged.transactions[name]

    # --- the fate of changes ---------------------------------------------------------------

    def landed(self, changed: Mapping[str, Transaction | None]) -> tuple[int, int]:
        """Their batch is durable; how many of them were committed by it, and rolled back."""
        committed = rolled_back = 0
        for name, before in changed.items():
            found = self.known.get(name)
            if found is None:
                continue
            found.staged = None
            self.arm(found)
            if before is None or not before.row.state.is_decided:
                committed += found.row.state is TransactionState.COMMITTED
                rolled_back += found.row.state is TransactionState.ROLLED_BACK
        return committed, rolled_back

    def undo(self, batch: Changes) -> None:
        """The batch was refused: each is as it was before."""
        for name, before in batch.transactions.items():
            found = self.known.get(name)
            if found is None or found.staged is batch:
                self.put(name, before)

    # --- when ------------------------------------------------------------------------------

    def wanted_ms(self, transaction: Transaction) -> int | None:
        """When it is to be asked about."""
        row = transaction.row
        if transaction.staged is not None or row.state is not TransactionState.OPEN:
            return None
        if not row.checks:
            return row.touched_ms + self._check_ms
        return row.checked_ms + self._every_ms

    def arm(self, transaction: Transaction) -> None:
        """Something about it has changed: look at it when its time comes."""
        wanted_ms = self.wanted_ms(transaction)
        if wanted_ms == transaction.due_ms:
            return
        transaction.due_ms = wanted_ms
        if wanted_ms is None:
            return
        heapq.heappush(self._heap, (wanted_ms, transaction.row.id))
        if len(self._heap) > 2 * self.undecided + STALE_MAX:
            found = ((t.due_ms, name) for name, t in self.known.items() if t.due_ms is not None)
            self._heap = sorted(found)

    def next_ms(self) -> int | None:
        """When the next one wants to be looked at."""
        heap = self._heap
        while heap:
            due_ms, name = heap[0]
            found = self.known.get(name)
            if found is not None and found.due_ms == due_ms:
                return due_ms
            heapq.heappop(heap)
        return None

    def pop(self, now_ms: int) -> Transaction | None:
        """The next one that is due by ``now_ms``; whoever gets it changes it, or arms it again."""
        due_ms = self.next_ms()
        if due_ms is None or due_ms > now_ms:
            return None
        found = self.known[heapq.heappop(self._heap)[1]]
        found.due_ms = None
        return found
