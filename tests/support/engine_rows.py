"""A store of dictionaries for engine tests: it applies effects, and says when they are wrong.

Synchronous, unlike the stores of the package, so that a test decides when a batch lands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tickwheel.model.kinds import (
    BULK,
    CLAIM,
    COUNTER,
    GROUP,
    PAUSED_KEY,
    SCHEDULE,
    SESSION,
    TARGET,
    TRANSACTION,
    BulkRow,
    ClaimRow,
    Effects,
    Halves,
    Kind,
    PausedKey,
    ProgressKey,
    ScheduleRow,
    TargetRow,
    TransactionKey,
    TransactionRow,
)
from tickwheel.model.records import (
    DeadRow,
    GroupRow,
    Outcome,
    ProgressRow,
    SessionKey,
    SessionRow,
    SettingsCounter,
    TaskRow,
    TaskSnapshot,
)

K = TypeVar("K")
V = TypeVar("V")


class Rows:
    """The durable state."""

    def __init__(self) -> None:
        self.tasks: dict[int, TaskRow] = {}
        self.progress: dict[ProgressKey, ProgressRow] = {}
        self.dead: dict[ProgressKey, DeadRow] = {}
        self.groups: dict[tuple[str, str], GroupRow] = {}
        self.sessions: dict[SessionKey, SessionRow] = {}
        self.schedules: dict[str, ScheduleRow] = {}
        self.transactions: dict[TransactionKey, TransactionRow | Halves] = {}
        self.bulks: dict[str, BulkRow] = {}
        self.paused_keys: dict[tuple[str, ...], PausedKey] = {}
        self.targets: dict[tuple[str, str], TargetRow] = {}
        self.counter: dict[str, SettingsCounter] = {}
        self.claims: dict[tuple[str, str], ClaimRow] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.id_mark = 0
        self.position_ms = 0

    def answered(self, session: bytes) -> dict[int, int]:
        """Return the answered requests of a session, ascending, with their first ids."""
        rows = [row for row in self.sessions.values() if row.session == session]
        floor = max((row.floor for row in rows), default=0)
        results = sorted(answer[:2] for row in rows for answer in row.answers if answer[0] >= floor)
        assert len(dict(results)) == len(results), "a request has two answers"
        return dict(results)

    @property
    def _records(self) -> dict[Kind[Any], dict[Any, Any]]:
        return {
            GROUP: self.groups,
            SESSION: self.sessions,
            SCHEDULE: self.schedules,
            TRANSACTION: self.transactions,
            BULK: self.bulks,
            PAUSED_KEY: self.paused_keys,
            TARGET: self.targets,
            COUNTER: self.counter,
            CLAIM: self.claims,
        }

    def of_kind(self, kind: Kind[Any]) -> list[Any]:
        """Return the records of a kind."""
        return list(self._records[kind].values())

    def is_empty(self) -> bool:
        """Return whether no task and no record of one is left."""
        return not (self.tasks or self.progress or self.dead)

    def apply(self, effects: Effects) -> None:
        check_effects(effects)
        assert not effects.enqueued.keys() & self.tasks.keys(), "an id was assigned twice"
        assert not effects.enqueued.keys() & self.outcomes.keys(), "an id came again"
        assert effects.updated.keys() <= self.tasks.keys(), "an update of a task that is not there"
        assert effects.moved.keys() <= self.tasks.keys(), "a move of a task that is not there"
        self.tasks |= effects.enqueued | effects.updated
        _move(self.tasks, effects.moved)
        for task_id, outcome in effects.ended.items():
            del self.tasks[task_id]
            self.outcomes[task_id] = outcome
        for key in [key for key in self.progress if key[0] in effects.ended]:
            del self.progress[key]
        for key in [key for key in self.dead if key[0] in effects.ended]:
            del self.dead[key]
        _change(self.progress, effects.progress)
        _change(self.dead, effects.dead)
        for kind, rows in self._records.items():
            _change(rows, effects.of_kind(kind))
        for task_id, _ in (*self.progress, *self.dead):
            assert task_id in self.tasks, "a row of a task that is not there"
        assert effects.id_mark >= max(self.tasks, default=0)
        self.id_mark = max(self.id_mark, effects.id_mark)
        self.position_ms = effects.position_ms

    def known(self, ids: Iterable[int], *overlays: Effects) -> dict[int, TaskSnapshot]:
        """Return the records of those of `ids` that exist, with effects applied in order."""
        wanted = set(ids)
        tasks = {i: self.tasks[i] for i in wanted if i in self.tasks}
        progress: dict[ProgressKey, ProgressRow] = dict(self.progress)
        dead: dict[ProgressKey, DeadRow] = dict(self.dead)
        for effects in overlays:
            tasks |= {i: row for i, row in effects.updated.items() if i in tasks}
            _move(tasks, effects.moved)
            _change(progress, effects.progress)
            _change(dead, effects.dead)
            for task_id in effects.ended:
                tasks.pop(task_id, None)
        return {
            task_id: TaskSnapshot(
                row,
                {group: p for (i, group), p in progress.items() if i == task_id},
                {group: d for (i, group), d in dead.items() if i == task_id},
            )
            for task_id, row in tasks.items()
        }


def _move(tasks: dict[int, TaskRow], moved: dict[int, int]) -> None:
    for task_id in tasks.keys() & moved.keys():
        tasks[task_id] = tasks[task_id]._replace(due_ms=moved[task_id])


def check_effects(effects: Effects) -> None:
    """Check the promises that ``Effects`` makes to every store."""
    assert not effects.moved.keys() & (effects.enqueued.keys() | effects.updated.keys())
    assert not effects.moved.keys() & effects.ended.keys()
    assert not effects.enqueued.keys() & effects.updated.keys()
    assert not effects.enqueued.keys() & effects.ended.keys()
    assert not effects.updated.keys() & effects.ended.keys()
    for task_id, group in (*effects.progress, *effects.dead):
        assert task_id not in effects.ended, f"{task_id} has ended, and {group} has a row of it"
    for key, progress in effects.progress.items():
        assert progress is None or key == (progress.id, progress.group)
    for key, dead in effects.dead.items():
        assert dead is None or key == (dead.id, dead.group)


def _change(rows: dict[K, V], changes: dict[K, V | None]) -> None:
    for key, row in changes.items():
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row
