"""What a batch of commands changes, as absolute and idempotent states: engine to store.

A store applies one ``Effects`` as one transaction. Maps hold the last state of a key within
the batch; ``None`` is a drop. Nothing here knows how a store writes, or when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tickwheel.model.bulk import BulkRow
from tickwheel.model.records import (
    DeadRow,
    GroupRow,
    Outcome,
    ProgressRow,
    SessionRow,
    TaskRow,
)
from tickwheel.model.schedules import ScheduleRow
from tickwheel.model.transactions import HEADER_PART, Halves, TransactionKey, TransactionRow

ProgressKey = tuple[int, str]
"""(task id, group)"""
SessionKey = tuple[bytes, int]
"""(session, first request of a row)"""
GroupKey = tuple[str, str]
"""(topic, group)"""


@dataclass(slots=True)
class Effects:
    """One numbered batch. Order of application does not matter: no key is in two maps."""

    enqueued: dict[int, TaskRow] = field(default_factory=dict)
    """New tasks: refused as a whole when the batch certainly failed."""
    enqueued_bytes: int = 0
    """The bytes of bodies and options of ``enqueued``, at least; 0: they were not counted."""
    updated: dict[int, TaskRow] = field(default_factory=dict)
    """Tasks whose row changed: write the whole row, but for a body that is ``NO_BODY``."""
    moved: dict[int, int] = field(default_factory=dict)
    """Id → due_ms of tasks of which only that is new. Only for a store that ``Moves``."""
    ended: dict[int, Outcome] = field(default_factory=dict)
    """Tasks that left: drop their task, progress and dead rows, remember how they ended."""
    progress: dict[ProgressKey, ProgressRow | None] = field(default_factory=dict)
    """Changed PrepareQueue rows; None drops a row. Never for an id in ``ended``."""
    dead: dict[ProgressKey, DeadRow | None] = field(default_factory=dict)
    """Changed dead letters; None drops one. Never for an id in ``ended``."""
    groups: dict[GroupKey, GroupRow | None] = field(default_factory=dict)
    sessions: dict[SessionKey, SessionRow | None] = field(default_factory=dict)
    """What producer sessions were answered; ``None`` forgets what an earlier batch had answered."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Id → key hash (``model/key_hash.py``) of those of ``enqueued`` that have a key, with the seed
    that the store gave when it was opened. A store works out those that are missing."""
    schedules: dict[str, ScheduleRow | None] = field(default_factory=dict)
    """Changed schedules by name; None deletes one. A run's task is among ``enqueued``."""
    transactions: dict[TransactionKey, TransactionRow | Halves | None] = field(default_factory=dict)
    """Changed transactions and half tasks. Of a committed transaction the tasks are among
    ``enqueued``, and its half tasks are dropped here."""
    bulks: dict[str, BulkRow | None] = field(default_factory=dict)
    """Changed bulk operations by id, in the same batch as what their steps changed."""
    id_mark: int = 0
    """No id above this has been assigned; a store never lowers it."""
    position_ms: int = 0
    """The wheel's position: every task due at or before it has been handed to its groups."""

    @property
    def makes_tasks(self) -> bool:
        """Whether the batch makes tasks or half tasks, which a store without room refuses."""
        return bool(self.enqueued) or any(
            part != HEADER_PART and row is not None for (_, part), row in self.transactions.items()
        )

    def is_empty(self) -> bool:
        """True when there is nothing a restart would miss (marks alone are nothing)."""
        return not (
            self.enqueued
            or self.updated
            or self.moved
            or self.ended
            or self.progress
            or self.dead
            or self.groups
            or self.sessions
            or self.schedules
            or self.transactions
            or self.bulks
        )
