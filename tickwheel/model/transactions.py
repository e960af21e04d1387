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
"""The part of a ``TransactionKey`` that stands for the ``TransactionRow``."""
PART_MAX = 2**31 - 1

TransactionKey = tuple[str, int]
"""(transaction, part): part 0 is its ``TransactionRow``, the others its ``Halves``."""


class TransactionState(IntEnum):
    """The state of a transaction. The last two states are final."""

    OPEN = 1
    """The producer decides, or a member of its producer group who is asked."""
    PARKED = 2
    """Nobody is asked any more: an operator decides, or a producer after all."""
    COMMITTED = 3
    ROLLED_BACK = 4

    @property
    def is_decided(self) -> bool:
        return self >= TransactionState.COMMITTED


class Reach(IntEnum):
    """Whom a question about a transaction has reached."""

    NOBODY = 0
    ANOTHER = 1
    """A member of the producer group who may decide, and has not prepared the transaction."""
    OWN = 2
    """The owner: the connection that prepared it, or one with the same name before."""


class Half(NamedTuple):
    """One half task."""

    topic: str
    due_ms: int
    """When the half task is due, if that counts from its own enqueue."""
    delay_ms: int | None
    """How long after the commit the half task is due; None: ``due_ms`` counts."""
    body: bytes
    options: TaskOptions | None

    @property
    def size_bytes(self) -> int:
        return size_of(self.body, self.options)

    def task(self, now_ms: int) -> NewTask:
        """The task that a commit at ``now_ms`` makes of the half task."""
        due_ms = self.due_ms if self.delay_ms is None else now_ms + self.delay_ms
        options = self.options
        if options is not None and options.within_ms is not None:
            options = options._replace(asked_ms=due_ms)
        return self.topic, max(now_ms, due_ms), self.body, options


class Halves(NamedTuple):
    """The half tasks that one request prepared."""

    transaction: str
    part: int
    """The number of the request, from 1 on, that its producer chose; a resend has the same."""
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
    """When the producer was last heard of about the transaction."""
    tasks: int = 0
    size_bytes: int = 0
    """The bytes of the half tasks, which are gone once it is decided."""
    topics: tuple[str, ...] = ()
    checks: int = 0
    """How often the time to ask about the transaction has come."""
    asked: int = 0
    """How many of these checks reached somebody, at once or when somebody came."""
    checked_ms: int = 0
    """When the newest check was."""
    decided_ms: int = 0
    first_id: int = 0
    """The first id of the tasks of a committed transaction; the others follow it."""
    owner: str = ""
    """The principal that began the transaction; "" where there are no tokens."""
    reached: Reach = Reach.NOBODY
    """The nearest member that the last check has reached, or that came since."""

    @property
    def waits_for_members(self) -> bool:
        """Whether the last check missed the owner, so that whoever comes and is nearer is asked."""
        is_missed = self.checks > 0 and self.reached < Reach.OWN
        return is_missed and not self.state.is_decided


def key_of(row: TransactionRow | Halves) -> TransactionKey:
    """The key under which a store has the row."""
    return (row.transaction, row.part) if isinstance(row, Halves) else (row.id, HEADER_PART)
