"""Dead letters: tasks that a group has given up on, until an operator says what becomes of them.

The body of a dead letter stays in the task's row, so a task is there as long as one group keeps it
as a dead letter or owes it an end. What a dead letter consists of is in the store; memory has
numbers only (``Group.dead``, ``Core.dead``), and every change of them is made here. Which groups
still owe a task an end is the business of ``ownership``.
"""

from __future__ import annotations

from tickwheel.engine.events import DELETED
from tickwheel.engine.ownership import Ownership
from tickwheel.engine.state import Core
from tickwheel.engine.topics import Group, Lease
from tickwheel.model.records import DeadRow, Failure, Outcome, TaskSnapshot


class DeadLetters:
    """The dead letters of all groups. ``requeue`` and ``delete`` answer with protocol words."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- they come -------------------------------------------------------------------------

    def to_dead_letters(self, lease: Lease, failure: Failure, now_ms: int) -> None:
        """Make the task of an ended delivery a dead letter. Its past counts ``failure``, without
        the trace."""
        core, group, key = self._core, lease.group, (lease.id, lease.group.name)
        core.open.effects.dead[key] = DeadRow(
            lease.id,
            group.name,
            group.topic.name,
            now_ms,
            lease.attempt,
            failure.summary,
            (*lease.past.failures[:-1], failure),
            lease.past.failed,
            core.ids.last,
            lease.past.deaths,
        )
        core.open.effects.progress[key] = None
        self._count(group, 1)
        group.dead_lettered += 1
        core.totals.dead += 1
        self._ownership.to_dead_letters(group, lease.id)
        if core.recorder is not None:
            core.recorder.died(lease, failure.reason, now_ms)

    def restore(self, known: TaskSnapshot) -> None:
        """Count a task's dead letters after a restart, for each group that still exists."""
        for group in self._ownership.keepers(known):
            self._count(group, 1)

    # --- they go ---------------------------------------------------------------------------

    def requeue(self, known: TaskSnapshot, name: str, now_ms: int) -> str:
        """Make a dead letter ready in its group at once, with failures counted anew."""
        core, row, group = self._core, known.row, self._keeper(known, name)
        if group is None:
            return "unknown"
        self._take_out(group, row.id, owes_it=True)
        core.begins_anew(group, row.id, known.dead[name].attempt)
        core.come(group, row, now_ms)
        core.lifetimes.begin(row)
        core.wake(group)
        if core.recorder is not None:
            core.recorder.requeued(row.topic, name, row.id)
        return "requeued"

    def delete(self, known: TaskSnapshot, name: str) -> str:
        """Delete a dead letter; the task ends when no group keeps or owes it."""
        core, row, group = self._core, known.row, self._keeper(known, name)
        if group is None:
            return "unknown"
        self._take_out(group, row.id, owes_it=False)
        last = self._ownership.finish(group, row, Outcome.DELETED)
        if not last:
            core.note_done(row.id, group, known.dead[name].attempt, 0)
        if core.recorder is not None:
            core.recorder.ended(row.topic, name, DELETED, row.id, last=last)
        return "deleted"

    def drop(self, group: Group, task_id: int) -> None:
        """Drop a dead letter of a closing group; the caller ends the group's share of the task."""
        self._take_out(group, task_id, owes_it=False)

    def task_ends(self, known: TaskSnapshot) -> None:
        """The task ends, and all of its dead letters with it."""
        for group in self._ownership.keepers(known):
            self._count(group, -1)

    # --- what these have in common -----------------------------------------------------------

    def _keeper(self, known: TaskSnapshot, name: str) -> Group | None:
        """The group of that name, if it keeps the task as a dead letter; else None."""
        if name not in known.dead:
            return None
        return self._core.topic(known.row.topic).groups.get(name)

    def _take_out(self, group: Group, task_id: int, *, owes_it: bool) -> None:
        self._core.open.effects.dead[task_id, group.name] = None
        self._count(group, -1)
        self._ownership.from_dead_letters(group, task_id, owes_it=owes_it)

    def _count(self, group: Group, change: int) -> None:
        group.dead += change
        self._core.dead += change
