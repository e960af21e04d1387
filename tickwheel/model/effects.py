"""What a batch of commands changes, as absolute and idempotent states: engine to store.

A store applies one ``Effects`` as one transaction. Maps hold the last state of a key within
the batch; ``None`` is a drop. Nothing here knows how a store writes, or when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tickwheel.model.kinds import Key, Kind
from tickwheel.model.records import DeadRow, Outcome, ProgressRow, TaskRow

R = TypeVar("R")
ProgressKey = tuple[int, str]
"""(task id, group)"""
RecordKey = tuple[Kind[Any], Key]
"""What tells all records apart: a kind, and a key of this kind."""


def keyed(kind: Kind[R], rows: Iterable[R]) -> dict[RecordKey, R]:
    """These rows of one kind by their keys."""
    return {(kind, kind.key(row)): row for row in rows}


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
    records: dict[RecordKey, Any] = field(default_factory=dict)
    """Changed records of every kind (``model/kinds.py``): each a row of its kind; None drops it."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Id → key hash (``model/key_hash.py``) of those of ``enqueued`` that have a key, with the seed
    that the store gave when it was opened. A store works out those that are missing."""
    id_mark: int = 0
    """No id above this has been assigned; a store never lowers it."""
    position_ms: int = 0
    """The wheel's position: every task due at or before it has been handed to its groups."""

    def put(self, kind: Kind[R], row: R) -> None:
        """Write a record: its row is this one from now on."""
        self.records[kind, kind.key(row)] = row

    def drop(self, kind: Kind[Any], key: Key) -> None:
        """Drop a record, whether or not there is one."""
        self.records[kind, key] = None

    def change(self, kind: Kind[R], changes: Mapping[Any, R | None]) -> None:
        """Write or drop the records of one kind, by key."""
        for key, row in changes.items():
            self.records[kind, key] = row

    def of_kind(self, kind: Kind[R]) -> dict[Any, R | None]:
        """The changed records of one kind, by key."""
        return {key: row for (other, key), row in self.records.items() if other is kind}

    def forget(self, kind: Kind[R]) -> dict[Any, R | None]:
        """Take all changes of one kind out of the batch; returns them, by key."""
        forgotten = self.of_kind(kind)
        for key in forgotten:
            del self.records[kind, key]
        return forgotten

    def half_tasks(self) -> list[int]:
        """The bytes of each half task in the written records."""
        return [
            size_bytes
            for (kind, _), row in self.records.items()
            if row is not None
            for size_bytes in kind.half_tasks(row)
        ]

    @property
    def makes_tasks(self) -> bool:
        """Whether the batch makes tasks or half tasks, which a store without room refuses."""
        return bool(self.enqueued) or bool(self.half_tasks())

    def is_empty(self) -> bool:
        """True when there is nothing a restart would miss (marks alone are nothing)."""
        return not (
            self.enqueued
            or self.updated
            or self.moved
            or self.ended
            or self.progress
            or self.dead
            or self.records
        )
