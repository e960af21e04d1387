"""Transactions as values: their half tasks, and where each stands.

A half task is stored and is no task yet: no wheel, no group and no index knows it. When its
transaction is committed it becomes one, with an id of that moment; so a task's id still says when
it came to be, and every rule that rests on the order of ids holds for it as for any other.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tickwheel.model.records import NewTask, TaskOptions, size_of

HEADER_PART = 0
"""In a ``TransactionKey``: of the row that says where the transaction stands."""
PART_MAX = 2**31 - 1

TransactionKey = tuple[str, int]
"""(transaction, part): part 0 is its ``TransactionRow``, the others its ``Halves``."""


class TransactionState(IntEnum):
    """How far a transaction is. The last two are for ever."""

    OPEN = 1
    """Its producer decides, or whoever of its producer group is asked."""
    PARKED = 2
    """Everybody who could be asked was asked often enough: an operator decides, or a producer
    after all."""
    COMMITTED = 3
    ROLLED_BACK = 4

    @property
    def is_decided(self) -> bool:
        return self >= TransactionState.COMMITTED


class Reach(IntEnum):
    """Whom a question about a transaction has reached."""

    NOBODY = 0
    ANOTHER = 1
    """Somebody of its producer group who may decide about it, and has not prepared it."""
    OWN = 2
    """Its owner: the connection that prepared it, or one with the same name before the daemon."""


class Half(NamedTuple):
    """One half task."""

    topic: str
    due_ms: int
    """When it is due, if it was counted from its own enqueue."""
    delay_ms: int | None
    """Not None: it is counted from the commit, and this is how much later it is due."""
    body: bytes
    options: TaskOptions | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.body, self.options)

    def task(self, now_ms: int) -> NewTask:
        """The task that it becomes when it is committed now."""
        due_ms = self.due_ms if self.delay_ms is None else now_ms + self.delay_ms
        options = self.options
        if options is not None and options.within_ms is not None:
            options = options._replace(asked_ms=due_ms)
        return self.topic, max(now_ms, due_ms), self.body, options


class Halves(NamedTuple):
    """The half tasks that one request prepared."""

    transaction: str
    part: int
    """The number that the producer gave the request, from 1 on: a resend has the same."""
    prepared_ms: int
    halves: tuple[Half, ...]


class TransactionRow(NamedTuple):
    """Where one transaction stands."""

    id: str
    group: str
    """The producer group whose members are asked about it."""
    state: TransactionState
    began_ms: int
    touched_ms: int
    """When its producer was heard of it last."""
    tasks: int = 0
    size_bytes: int = 0
    """Of its half tasks, which are gone once it is decided."""
    topics: tuple[str, ...] = ()
    checks: int = 0
    """How often it was time to ask for it."""
    asked: int = 0
    """How many of these reached somebody, in time or when somebody came."""
    checked_ms: int = 0
    """When it was last time to."""
    decided_ms: int = 0
    first_id: int = 0
    """Of its tasks, which have ids in a row, once it is committed."""
    owner: str = ""
    """Whose it is: the name of the principal that began it; "" where there are no tokens."""
    reached: Reach = Reach.NOBODY
    """Whom the last check has reached, or somebody who came since."""

    @property
    def waits_for_members(self) -> bool:
        """Its last check did not reach its owner: whoever comes and is nearer is asked."""
        is_missed = self.checks > 0 and self.reached < Reach.OWN
        return is_missed and not self.state.is_decided


def key_of(row: TransactionRow | Halves) -> TransactionKey:
    """Where a store has it."""
    return (row.transaction, row.part) if isinstance(row, Halves) else (row.id, HEADER_PART)
