"""A queue of task ids at eight bytes each.

Ready tasks that no subscriber has credit for wait here, so a backlog of ten million costs
80 MB. It knows nothing of tasks, and does not look for duplicates.

Invariants: ``_ids[:_head]`` is spent room and never read; everything behind it is queued, in
order. Room is given back when more than half is spent, so that each id is moved a bounded
number of times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

SPENT_MIN = 512
"""Spent entries below this number are not worth giving back."""
HEADROOM_MIN = 16


class IdQueue:
    """First in, first out, except for what ``push_front`` puts back."""

    __slots__ = ("_head", "_ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("q", ids)
        self._head = 0

    def __len__(self) -> int:
        return len(self._ids) - self._head

    def push(self, task_id: int) -> None:
        self._ids.append(task_id)

    def extend(self, ids: Iterable[int]) -> None:
        """Append all of ``ids`` (an ``array("q")`` is copied as one block)."""
        self._ids.extend(ids)

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
        """Up to ``limit`` ids from the front, left where they are."""
        return self._ids[self._head : self._head + max(0, limit)].tolist()

    @property
    def memory_bytes(self) -> int:
        return self._ids.__sizeof__()
