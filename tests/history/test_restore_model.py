"""Restoring against the engine itself: whatever it does, events lead to what its store holds.

The engine's own state machine, with a rig that keeps records of everything that is durable. Now
and then a copy of the store is kept as a backup; events since, or since somewhat earlier, must
lead from there to the store of the present.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from engine.test_engine_model import EngineMachine
from history.recording_rig import RecordingRig
from support.engine_model import Model
from tickwheel.engine.state import EngineConfig
from tickwheel.history.daemon import settings_map
from tickwheel.history.fold import Fold, Owners, Task
from tickwheel.history.lines import Renderer, policy_map
from tickwheel.model.policies import PolicyRef, RetryPolicy
from tickwheel.model.records import (
    DeadRow,
    GroupRow,
    GroupSettings,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
)

S = ProgressState
AT_ONCE = 7


class Copy(NamedTuple):
    """A backup, and how many records there were when it was made."""

    tasks: dict[int, TaskRow]
    progress: list[ProgressRow]
    dead: list[DeadRow]
    groups: list[GroupRow]
    id_mark: int
    records: int

    def task(self, task_id: int) -> Task:
        progress = {row.group: row for row in self.progress if row.id == task_id}
        dead = {row.group: row for row in self.dead if row.id == task_id}
        return Task(self.tasks[task_id], progress, dead)


NOTHING = Copy({}, [], [], [], 0, 0)


class RestoreMachine(EngineMachine):
    """Adds backups and restores to what the engine goes through."""

    FUTURE = False  # no event says when such a group gets its place

    def begin(self, config: EngineConfig) -> None:
        super().begin(config)
        self.rig: RecordingRig = RecordingRig(config)
        self.model = Model(config.retry)
        self.copies = [NOTHING]

    @rule()
    def back_up(self) -> None:
        rows = self.rig.rows
        self.copies.append(
            Copy(
                dict(rows.tasks), list(rows.progress.values()), list(rows.dead.values()),
                list(rows.groups.values()), rows.id_mark, len(self.rig.history),
            )
        )  # fmt: skip

    @precondition(lambda self: self.rig.history)
    @rule(pick=st.integers(0, 100), earlier=st.sampled_from([0, 0, 1, 5, 1_000]))
    def restore(self, pick: int, earlier: int) -> None:
        copy = self.copies[pick % len(self.copies)]
        start = max(0, copy.records - earlier)
        fold = Fold(Owners(copy.groups), copy.id_mark, 0)
        older, newer = self.rig.history[start : copy.records], self.rig.history[copy.records :]
        for some, is_old in ((lines(older), True), (lines(newer), False)):
            for at in range(0, len(some), AT_ONCE):
                self.apply(fold, copy, some[at : at + AT_ONCE], is_old)
        assert fold.unusable == 0
        left = {i: copy.task(i) for i in copy.tasks if i not in fold.removed_ids}
        found = {i: Task(t) if isinstance(t, TaskRow) else t for i, t in fold.tasks.items()}
        self.compare(left | found, fold)

    def apply(self, fold: Fold, copy: Copy, some: list[dict[str, Any]], is_old: bool) -> None:
        for task_id in fold.needs(some):
            if task_id in copy.tasks:
                fold.put(copy.task(task_id))
        fold.apply(some, lambda event: is_old)

    def compare(self, found: dict[int, Task], fold: Fold) -> None:
        rows = self.rig.rows
        assert {i: comparable(self.moved(task)) for i, task in found.items()} == {
            i: comparable(row) for i, row in rows.tasks.items()
        }
        dead = {(i, g): d for i, task in found.items() for g, d in task.dead.items()}
        assert {k: d._replace(failures=(), newest_id=0) for k, d in dead.items()} == {
            k: d._replace(failures=(), newest_id=0) for k, d in rows.dead.items()
        }
        # Events do not say it; a dead letter that comes from the backup as it was has it.
        assert all(d.newest_id in (0, rows.dead[k].newest_id) for k, d in dead.items())
        self.compare_progress(found, fold)
        groups = {row[:2]: row for row in fold.owners.rows()}
        for key, row in rows.groups.items():
            assert comparable_group(groups[key]) == comparable_group(row)
        gone = groups.keys() - rows.groups.keys()
        assert all(not group or fold.owners.is_closed(topic, group) for topic, group in gone)
        assert fold.id_mark <= rows.id_mark

    def moved(self, task: Task) -> TaskRow:
        """A crash forgot a delivery, so what was rescheduled then was the task and not a retry."""
        stored = self.rig.rows.tasks.get(task.row.id)
        if stored is None or stored.due_ms == task.row.due_ms:
            return task.row
        assert {(row.state, row.at_ms) for row in task.progress.values()} == {
            (S.WAITING, stored.due_ms)
        }
        return task.row._replace(due_ms=stored.due_ms)

    def compare_progress(self, found: dict[int, Task], fold: Fold) -> None:
        """What the store does not know of deliveries under way, events may; never less."""
        rows = self.rig.rows
        mine = {
            (i, group): row for i, task in found.items() for group, row in task.progress.items()
        }
        for key, row in rows.progress.items():
            own, topic = mine.get(key), rows.tasks[key[0]].topic
            if fold.owners.is_closed(topic, key[1]):
                continue  # it is let go of again, whatever it says
            if own is None or own.state is not row.state or own.at_ms != row.at_ms:
                # Given back, and the next delivery is not recorded yet; or the clock went back.
                went_back = row.state is S.WAITING and row.at_ms == rows.tasks[key[0]].due_ms
                newer = own is not None and own.attempt > row.attempt
                assert row.state in (S.IN_FLIGHT, S.RELEASED) or went_back or newer, (own, row)
            if own is not None and own.state is row.state and row.state in (S.WAITING, S.DONE):
                assert own.attempt >= row.attempt
        done = {key for key, row in mine.items() if row.state is S.DONE}
        stored = {key for key, row in rows.progress.items() if row.state is S.DONE}
        there = {(i, g) for i, g in done if (rows.tasks[i].topic, g) in rows.groups}
        assert there <= stored

    def teardown(self) -> None:
        super().teardown()
        self.restore(0, 0)
        self.restore(len(self.copies) - 1, 5)


def lines(history: Iterable[tuple[int, list[Any]]]) -> list[dict[str, Any]]:
    """As events that were written to files and read again."""
    results: list[dict[str, Any]] = []
    for epoch, record in history:
        rendered = Renderer("n", 0, epoch).render(record, len(results) + 1)
        results += map(json.loads, rendered)
    return results


def comparable(row: TaskRow) -> tuple[Any, ...]:
    """A policy has fields that its kind does not look at."""
    options = row.options or TaskOptions()
    return (*row[:4], *options[:5], comparable_policy(options.retry), options.order_id)


def comparable_policy(policy: PolicyRef | None) -> Any:
    return policy_map(policy) if isinstance(policy, RetryPolicy) else policy


def comparable_group(row: GroupRow) -> tuple[Any, ...]:
    result = row.settings or GroupSettings()
    settings_found = settings_map(result) | {"retry": comparable_policy(result.retry)}
    return (*row[:3], row.since_id, settings_found, *result[4:])


TestRestore = RestoreMachine.TestCase
TestRestore.settings = settings(
    max_examples=60, stateful_step_count=50, phases=[Phase.generate], report_multiple_bugs=False
)
