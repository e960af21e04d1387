"""Keys of a group that an operator has paused: none of their tasks is handed out meanwhile.

A key is an order key, or a value that shares the group. Its tasks come due and wait for their turn
as ever; one that is about to be handed out is *kept back* instead, until its key is resumed. What
is in flight stays so, and its end counts. A key that is *held* is another thing: its task has
failed for good, and that task waits (``Ordering.held``). A key may be both.

Invariants:

* A task that is kept back counts as ready (``Group.in_key_queues``), is in no queue of the group,
  and has no place of its value. It stays the holder of its order key, if it is.
* Nothing of this is looked at while no key of the group is paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tickwheel.model.lateness import Cause, HoldIntervals

if TYPE_CHECKING:
    from collections.abc import Collection

    from tickwheel.engine.topics import Group
    from tickwheel.model.kinds import PausedKey
    from tickwheel.model.records import TaskRow

REMEMBERED_MAX = 64
"""How many keys of a group that were resumed have the time of their pause remembered, which says
why their tasks are late."""


class Shares(Protocol):
    """The fair shares of the group (``ordering.py``), as far as pauses change them."""

    waited: set[int]
    now_ms: int

    def mark_of(self, row: TaskRow) -> int: ...

    def taken(self, task_id: int) -> None: ...

    def call(self, task_id: int, mark: int, priority: int, *, front: bool) -> None: ...

    def resumed(self, mark: int) -> None: ...


class KeptBack(NamedTuple):
    """A task that would have been handed out, and waits until a key is resumed."""

    mark: int
    """Of the paused key."""
    share: int
    """The mark of the task's value; 0: it has none."""
    priority: int
    due_ms: int


class KeyPauses:
    """The paused keys of one group, and their tasks that are kept back."""

    __slots__ = ("_group", "_shares", "kept")

    def __init__(self, group: Group, shares: Shares) -> None:
        self._group = group
        self._shares = shares
        self.kept: dict[int, KeptBack] = {}
        """Id → what is known of a task that is kept back, in the order of their turns."""

    # --- a key is paused and resumed ----------------------------------------------------------

    def pause(self, mark: int, key: PausedKey) -> None:
        """Keep the tasks of a key back from now on, or since before a restart."""
        group = self._group
        group.paused_keys[mark] = key
        intervals = group.key_intervals.setdefault(mark, HoldIntervals())
        intervals.turn(Cause.KEY_PAUSED, key.since_ms, None)

    def resume(self, mark: int, now_ms: int) -> None:
        """Let the tasks of a paused key be handed out again."""
        group = self._group
        del group.paused_keys[mark]
        intervals = group.key_intervals.pop(mark)
        intervals.turn(None, now_ms, None)
        group.key_intervals[mark] = intervals  # behind those that ended before
        if len(group.key_intervals) - len(group.paused_keys) > REMEMBERED_MAX:
            oldest = next(m for m in group.key_intervals if m not in group.paused_keys)
            del group.key_intervals[oldest]
        self._let_go([i for i, kept in self.kept.items() if kept.mark == mark])
        self._shares.resumed(mark)

    def are_odd(self, marks: Collection[int]) -> bool:
        """Whether one of these order keys is paused."""
        paused = self._group.paused_keys
        return bool(paused) and not paused.keys().isdisjoint(marks)

    # --- a task comes, and leaves -------------------------------------------------------------

    def keeps(self, row: TaskRow, order: int) -> bool:
        """Whether a task that was taken from the ready queue is kept back. ``order``: the mark of
        its order key, or 0."""
        paused, share = self._group.paused_keys, self._shares.mark_of(row)
        mark = order if order in paused else share
        if mark not in paused:
            return False
        self._shares.taken(row.id)
        priority = 0 if row.options is None else row.options.priority
        self.kept[row.id] = KeptBack(mark, share, priority, row.due_ms)
        self._group.in_key_queues += 1
        return True

    def leave(self, task_id: int) -> bool:
        """A task leaves the group's queues; whether it was kept back."""
        if self.kept.pop(task_id, None) is None:
            return False
        self._group.in_key_queues -= 1
        return True

    def some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks that were kept back, for a group that is being deleted."""
        taken = list(self.kept)[: max(0, limit)]
        for task_id in taken:
            self.leave(task_id)
        return taken

    def forget_shares(self) -> list[PausedKey]:
        """The group is shared by something else, and its tasks have no shares any more: its values
        go on, and those of them that were paused are returned."""
        values = {mark: key for mark, key in self._group.paused_keys.items() if key.fair_by}
        for mark in values:
            self.resume(mark, self._shares.now_ms)
        self.kept = {i: kept._replace(share=0) for i, kept in self.kept.items()}
        return list(values.values())

    def _let_go(self, ids: list[int]) -> None:
        """These tasks are ready before all others, and in the order of their turns."""
        for task_id in reversed(ids):
            kept = self.kept.pop(task_id)
            self._group.in_key_queues -= 1
            self._shares.waited.add(task_id)
            self._shares.call(task_id, kept.share, kept.priority, front=True)
