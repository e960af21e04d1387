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
    """Bodies and options of ``enqueued``, at least; 0: nobody has counted them."""
    updated: dict[int, TaskRow] = field(default_factory=dict)
    """Tasks whose row changed: write the whole row, but for a body that is ``NO_BODY``."""
    moved: dict[int, int] = field(default_factory=dict)
    """id → due_ms of tasks of whose row nothing else changed. Only for a store that ``Moves``."""
    ended: dict[int, Outcome] = field(default_factory=dict)
    """Tasks that left: drop their task, progress and dead rows, remember how they ended."""
    progress: dict[ProgressKey, ProgressRow | None] = field(default_factory=dict)
    """PrepareQueue changes. Never for an id in ``ended``."""
    dead: dict[ProgressKey, DeadRow | None] = field(default_factory=dict)
    """Dead-letter changes. Never for an id in ``ended``."""
    groups: dict[GroupKey, GroupRow | None] = field(default_factory=dict)
    sessions: dict[SessionKey, SessionRow | None] = field(default_factory=dict)
    """What producer sessions were answered; ``None`` forgets what an earlier batch had answered."""
    hashes: dict[int, int] = field(default_factory=dict)
    """id → hash of topic and key (``model/key_hash.py``) of those of ``enqueued`` that have a key.
    Worked out by the seed that the store gave when it was opened, so that a store need not do it
    again; one that lacks some works them out."""
    schedules: dict[str, ScheduleRow | None] = field(default_factory=dict)
    """By name; a run's task is among ``enqueued``."""
    transactions: dict[TransactionKey, TransactionRow | Halves | None] = field(default_factory=dict)
    """Where transactions stand, and their half tasks. Of a committed one the tasks are among
    ``enqueued``, and its half tasks are dropped here."""
    bulks: dict[str, BulkRow | None] = field(default_factory=dict)
    """By id: how far each is, with what its step changed."""
    id_mark: int = 0
    """No id above this was assigned so far; never lowered by a store."""
    position_ms: int = 0
    """The wheel's position: every task due at or before it has been handed to its groups."""

    @property
    def makes_tasks(self) -> bool:
        """Whether there are new tasks in it, or new half tasks: a store without room refuses it."""
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
