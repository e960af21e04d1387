"""A queue of task ids at eight bytes each.

Ready tasks that no subscriber has credit for wait here, so a backlog of ten million costs
80 MB. It knows nothing of tasks, and does not look for duplicates.

Invariants: ``_ids[:_head]`` is spent room and never read; everything behind it is queued, in
order. Room is given back when more than half is spent, so that each id is moved a bounded
number of times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

SPENT_MIN = 512
"""Fewer spent entries than this are not worth giving back."""
HEADROOM_MIN = 16


class IdQueue:
    """A queue of ids, first in, first out, except for those that ``push_front`` puts back."""

    __slots__ = ("_head", "_ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("q", ids)
        self._head = 0

    def __len__(self) -> int:
        return len(self._ids) - self._head

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._ids[self._head :]

    def push(self, task_id: int) -> None:
        self._ids.append(task_id)

    def extend(self, ids: Iterable[int] | IdQueue) -> None:
        """Append all of ``ids`` (an ``array("q")``, or another queue, is copied as one block)."""
        self._ids.extend(ids._ids[ids._head :] if isinstance(ids, IdQueue) else ids)

    def push_front(self, ids: Iterable[int]) -> None:
        """Put ``ids`` before everything else; they come out in the order given."""
        block = array("q", ids)
        head, count = self._head, len(block)
        if head < count:
            # Room for an eighth more, so that single ids put back one after the other cost
            # a move of the whole queue only now and then.
            room = max(count, HEADROOM_MIN, len(self) >> 3)
            self._ids[:head] = array("q", bytes(8 * room))
            head = room
        self._ids[head - count : head] = block
        self._head = head - count

    def take(self, limit: int) -> list[int]:
        """Up to ``limit`` ids from the front, removed."""
        if limit <= 0:
            return []
        ids, head = self._ids, self._head
        taken = ids[head : head + limit].tolist()
        head += len(taken)
        if head == len(ids):
            self._ids, head = array("q"), 0
        elif head > SPENT_MIN and head * 2 > len(ids):
            del ids[:head]
            head = 0
        self._head = head
        return taken

    def peek(self, limit: int) -> list[int]:
        """Up to ``limit`` ids from the front, which stay in the queue."""
        return self._ids[self._head : self._head + max(0, limit)].tolist()

    def thin(self, left: dict[int, int], places: Sequence[int]) -> list[int]:
        """Drop the first entries of each id in ``left``, as many as it says, and count them off
        there. Returns where the entries at ``places``, which rise, are then."""
        ids, kept, moved = self._ids[self._head :], array("q"), []
        begin = 0
        for place in (*places, len(ids)):
            for task_id in ids[begin:place]:
                count = left.get(task_id)
                if count is None:
                    kept.append(task_id)
                elif count == 1:
                    del left[task_id]
                else:
                    left[task_id] = count - 1
            moved.append(len(kept))
            begin = place
        self._ids, self._head = kept, 0
        return moved[:-1]

    @property
    def memory_bytes(self) -> int:
        return self._ids.__sizeof__()
