"""What an operator sees of order keys and fair shares, and does about keys that are held.

A key is held when its task has failed for good, unless its group says something else
(``order_failure``): somebody has to look. Everything behind it waits until the task is released,
skipped, cancelled or moved. The rules of key holders are in ``ordering.py``.
"""

from __future__ import annotations

from tickwheel.engine.dead_letters import DeadLetters
from tickwheel.engine.ordering import HeldKey, KeyQueueState
from tickwheel.engine.state import Core
from tickwheel.engine.topics import DeliveryAttempts, Group, Lease, priority_of, traits_of
from tickwheel.model.records import Failure, TaskSnapshot

HELD_SHOWN_MAX = 1_000


class KeyControl:
    """Shows an operator order keys and fair shares of a group, and releases or skips held keys."""

    def __init__(self, core: Core, dead_letters: DeadLetters) -> None:
        self._core = core
        self._dead_letters = dead_letters

    def held(self, group: Group, limit: int = HELD_SHOWN_MAX) -> list[HeldKey]:
        """Up to ``limit`` order keys that are held, oldest first."""
        ordering = self._core.orderings.of.get(group)
        return [] if ordering is None else ordering.held_keys(limit)

    def queues(self, group: Group, limit: int) -> list[KeyQueueState]:
        """The order keys and fair-share values for which most tasks wait."""
        ordering = self._core.orderings.of.get(group)
        return [] if ordering is None else ordering.key_queues(limit)

    def release(self, group: Group, known: TaskSnapshot, now_ms: int) -> str:
        """Try the task of a held order key again at once, with failures counted anew."""
        core, task_id = self._core, known.row.id
        ordering = core.orderings.of.get(group)
        if ordering is None or task_id not in ordering.held:
            return "not_held"
        core.begins_anew(group, task_id, self._take_out(group, task_id).attempt)
        core.open.effects.progress[task_id, group.name] = None
        ordering.release(task_id, priority_of(known.row), now_ms)
        core.wake(group)
        if core.recorder is not None:
            core.recorder.requeued(known.row.topic, group.name, task_id)
        return "released"

    def skip(self, group: Group, known: TaskSnapshot, now_ms: int) -> str:
        """Make the task of a held order key a dead letter, and let the key go on."""
        core, row = self._core, known.row
        ordering = core.orderings.of.get(group)
        if ordering is None or row.id not in ordering.held:
            return "not_held"
        attempts = self._take_out(group, row.id)
        core.lifetimes.end(row)
        ordering.let_go(row.id)
        failure = Failure(attempts.attempt, now_ms, "skipped: its key was held", "")
        lease = Lease(
            row.id,
            group,
            group.detached,
            attempts.attempt,
            attempts.epoch,
            0,
            0,
            row.due_ms,
            traits_of(row),
            attempts.past.with_failure(failure),
        )
        self._dead_letters.to_dead_letters(lease, failure, now_ms)
        return "skipped"

    def _take_out(self, group: Group, task_id: int) -> DeliveryAttempts:
        del group.waiting[task_id]
        self._core.waited(group, task_id)
        return group.delivery_attempts.pop(task_id)
