"""Tasks of one key that go one after the other, and values that take turns: what order keys and
fair shares are made of.

``Order``: of each key one task has its turn, its *head*; the others stand in its line behind it,
by due time, then by their place in the order of ids. A key that has no line is a pair of numbers,
a *mark* (a hash of the key) and its head: in a dictionary while there are few, else in the table
of ``keys.py``, at 18 to 28 bytes. A task in a line takes 16 bytes. Two keys with the same mark
share a line; that costs them time and never their order.

``Share``: a value that takes turns with others. A few of its tasks are *called*: they stand in the
group's ready queue; the others wait here in the order in which they came. So each value has about
as many places in the ready queue as any other, however many tasks it has.

Pure: knows no group, no store and no time but what it is given.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from tickwheel.engine.keys import Table
from tickwheel.engine.ready import STALE_MIN, ReadyQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tickwheel.engine.rates import Bucket

M = TypeVar("M", bound=Hashable)
FEW_MAX = 65_536
"""Heads in a dictionary, which is quick and takes five times as much as the table."""
SPENT_MIN = 64
NOBODY = -1
"""The head of a key that waits for something else than a task."""
LOTS = 64
"""Parts that keys are divided into."""


class Line:
    """A key with several tasks: its head (or ``NOBODY``), and those behind it, ascending."""

    __slots__ = ("_begin", "_dues_ms", "_ids", "head")

    def __init__(self, head: int) -> None:
        self.head = head
        self._dues_ms = array("q")
        self._ids = array("q")
        self._begin = 0
        """What stands before it is spent."""

    def __len__(self) -> int:
        return len(self._ids) - self._begin

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[self._begin :])

    def first(self) -> tuple[int, int]:
        """(due_ms, id) of the one behind the head; there must be one."""
        return self._dues_ms[self._begin], self._ids[self._begin]

    def begins_before(self, task_id: int, due_ms: int, places: dict[int, int]) -> bool:
        """The one behind the head is due before this one, or may be, as places have to be asked."""
        first_ms = self._dues_ms[self._begin]
        if first_ms != due_ms:
            return first_ms < due_ms
        return bool(places) or self._ids[self._begin] < task_id

    def insert(self, task_id: int, due_ms: int, places: dict[int, int]) -> None:
        """``places``: of those whose place is not their id."""
        dues_ms, ids = self._dues_ms, self._ids
        last_ms = dues_ms[-1] if dues_ms else -1
        if last_ms > due_ms or (last_ms == due_ms and (places or ids[-1] > task_id)):
            at = self._where(task_id, due_ms, places)
            dues_ms.insert(at, due_ms)
            ids.insert(at, task_id)
        else:
            dues_ms.append(due_ms)
            ids.append(task_id)

    def remove(self, task_id: int, due_ms: int, places: dict[int, int]) -> bool:
        """Whether it stood in the line."""
        at = self._where(task_id, due_ms, places)
        if at == len(self._ids) or self._ids[at] != task_id:
            return False
        del self._ids[at], self._dues_ms[at]
        return True

    def take(self) -> tuple[int, int]:
        """(due_ms, id) of the one behind the head, removed; there must be one."""
        at = self._begin
        taken = self._dues_ms[at], self._ids[at]
        self._begin = at = at + 1
        if at > SPENT_MIN and at * 2 > len(self._ids):
            del self._ids[:at], self._dues_ms[:at]
            self._begin = 0
        return taken

    def _where(self, task_id: int, due_ms: int, places: dict[int, int]) -> int:
        """Where it stands, or would."""
        dues_ms = self._dues_ms
        low = bisect_left(dues_ms, due_ms, self._begin)
        high = bisect_right(dues_ms, due_ms, low)
        place = places.get(task_id, task_id)
        return bisect_left(self._ids, place, low, high, key=lambda i: places.get(i, i))


class Order:
    """Whose turn it is, of each key; and who stands in line."""

    __slots__ = ("_few", "_many", "lines", "places", "waiting")

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        """Mark → the line of a key that has one."""
        self._few: dict[int, int] = {}
        self._many = Table()
        self.places: dict[int, int] = {}
        """Id → place, of those in lines whose place is not their id."""
        self.waiting = 0
        """In all lines."""

    def __len__(self) -> int:
        """Keys that are taken."""
        return len(self.lines) + len(self._few) + len(self._many)

    def head(self, mark: int) -> int:
        """Whose turn it is; 0: the key is free."""
        line = self.lines.get(mark)
        return self._alone(mark) if line is None else line.head

    def is_head(self, mark: int, task_id: int) -> bool:
        """It is this task's turn."""
        return self.head(mark) == task_id

    def _alone(self, mark: int) -> int:
        found = self._few.get(mark)
        if found is not None:
            return found
        return (self._many.find(mark) or (0,))[0] if len(self._many) else 0

    def claim(self, mark: int, task_id: int) -> bool:
        """Whether it is this task's turn: it is the head already, or the key was free."""
        head = self.head(mark)
        if head:
            return head == task_id
        if len(self._few) < FEW_MAX:
            self._few[mark] = task_id
        else:
            self._many.put(mark, task_id)
        return True

    def arrive(self, mark: int, task_id: int, due_ms: int, place: int) -> bool:
        """``claim``, else ``queue``: whether it is this task's turn."""
        if self.claim(mark, task_id):
            return True
        self.queue(mark, task_id, due_ms, place)
        return False

    def arrive_all(
        self, marks: Sequence[int], ids: Sequence[int], dues_ms: Sequence[int]
    ) -> list[int]:
        """``arrive`` of each; the place of all is their id. Those whose turn it is."""
        lines, few, places = self.lines, self._few, self.places
        turns: list[int] = []
        is_small = not len(self._many)
        for mark, task_id, due_ms in zip(marks, ids, dues_ms, strict=True):
            line = lines.get(mark)
            if line is not None:
                if line.head != task_id:
                    line.insert(task_id, due_ms, places)
                    self.waiting += 1
                    continue
            elif is_small and mark not in few and len(few) < FEW_MAX:
                few[mark] = task_id
            else:
                has_turn = self.arrive(mark, task_id, due_ms, task_id)
                is_small = not len(self._many)
                if not has_turn:
                    continue
            turns.append(task_id)
        return turns

    def queue(self, mark: int, task_id: int, due_ms: int, place: int) -> None:
        """Into the line of a key that is taken; if it is free, it waits with nobody having the
        turn."""
        line = self.lines.get(mark)
        if line is None:
            line = self.lines[mark] = Line(self._forget(mark) or NOBODY)
        if place != task_id:
            self.places[task_id] = place
        line.insert(task_id, due_ms, self.places)
        self.waiting += 1

    def remove(self, mark: int, task_id: int, due_ms: int) -> bool:
        """Whether it stood in the line of its key."""
        line = self.lines.get(mark)
        if line is None:
            return False
        found = line.remove(task_id, due_ms, self.places)
        self.places.pop(task_id, None)
        if found:
            self.waiting -= 1
            if not len(line):
                self._shrink(mark, line)
        return found

    def park(self, mark: int, head: int, due_ms: int, place: int) -> None:
        """The head goes back into the line of its key, and nobody has the turn."""
        self.queue(mark, head, due_ms, place)
        self.lines[mark].head = NOBODY

    def follow(self, mark: int) -> tuple[int, int]:
        """The head has ended: (due_ms, id) of the next one of the key, which is its head now; id 0:
        the key is free."""
        line = self.lines.get(mark)
        if line is None:
            self._forget(mark)
            return 0, 0
        due_ms, head = line.take()
        line.head = head
        self.waiting -= 1
        self.places.pop(head, None)
        if not len(line):
            self._shrink(mark, line)
        return due_ms, head

    def exchange(self, mark: int, head: int, due_ms: int, place: int) -> int:
        """The head that should be, of a key whose head nobody has had: somebody may have come
        behind it whose due time is earlier. Then that one is the head now, and ``head`` in line."""
        line = self.lines.get(mark)
        if line is None or line.head != head:
            return head
        first_ms, first = line.first()
        if (first_ms, self.places.get(first, first)) >= (due_ms, place):
            return head
        line.head = self._take(line)
        self.queue(mark, head, due_ms, place)
        return line.head

    def _take(self, line: Line) -> int:
        _, task_id = line.take()
        self.places.pop(task_id, None)
        self.waiting -= 1
        return task_id

    def _shrink(self, mark: int, line: Line) -> None:
        """Nobody is behind the head any more."""
        del self.lines[mark]
        if line.head != NOBODY:
            self.claim(mark, line.head)

    def _forget(self, mark: int) -> int:
        """The head of a key without a line, which is free now."""
        found = self._few.pop(mark, None)
        if found is not None:
            return found
        return (self._many.take(mark) or [0])[0] if len(self._many) else 0

    def pop_some(self, limit: int) -> list[int]:
        """Up to ``limit`` tasks out of lines, of whatever keys."""
        taken: list[int] = []
        while self.lines and len(taken) < limit:
            mark, line = next(iter(self.lines.items()))
            while len(line) and len(taken) < limit:
                taken.append(self._take(line))
            if not len(line):
                self._shrink(mark, line)
        return taken


class Share:
    """One value of what a group is shared by."""

    __slots__ = (
        "_stale_count",
        "bucket",
        "called",
        "in_flight",
        "is_paced",
        "mark",
        "queue",
        "stale",
    )

    def __init__(self, mark: int, bucket: Bucket | None) -> None:
        self.mark = mark
        self.bucket = bucket
        self.called = 0
        """Its tasks in the ready queue."""
        self.in_flight = 0
        self.queue: ReadyQueue | None = None
        """Those that wait for their turn."""
        self.stale: dict[int, int] = {}
        """Id → entries of ``queue`` that stand for nothing any more: the first ones."""
        self._stale_count = 0
        self.is_paced = False
        """A token is waited for."""

    @property
    def waiting(self) -> int:
        return 0 if self.queue is None else len(self.queue) - self._stale_count

    @property
    def is_idle(self) -> bool:
        return not (self.called or self.in_flight or self.queue is not None)

    def put(self, task_id: int, priority: int, now_ms: int, *, front: bool) -> None:
        """It waits for its turn."""
        if self.queue is None:
            self.queue = ReadyQueue()
        if front:
            self.queue.push_front(task_id, priority)
        else:
            self.queue.push(task_id, priority, now_ms)

    def withdraw(self, task_id: int) -> None:
        """One that waits leaves. As in a group's own queue, what stands for nothing is dropped
        before it outnumbers the others."""
        assert self.queue is not None
        self.stale[task_id] = self.stale.get(task_id, 0) + 1
        self._stale_count += 1
        if not self.waiting:
            self.clear()
        elif self._stale_count > STALE_MIN and self._stale_count * 2 > len(self.queue):
            self.queue.drop(self.stale)
            self.stale, self._stale_count = {}, 0

    def clear(self) -> None:
        """Nobody waits any more."""
        self.queue, self.stale, self._stale_count = None, {}, 0

    def next(self) -> tuple[int, int] | None:
        """(id, priority) of the one whose turn it is, removed; None: nobody waits."""
        while self.queue is not None:
            (task_id,) = self.queue.take(1)
            priority = self.queue.priority_at(0)
            left = self.stale.pop(task_id, 0)
            if left:
                self._stale_count -= 1
                if left > 1:
                    self.stale[task_id] = left - 1
            if not self.waiting:
                self.clear()
            if not left:
                return task_id, priority
        return None


class Lots(Generic[M]):
    """Which member a key falls to: keys are divided into ``LOTS`` parts, and each part belongs
    to the member for which a hash of both is highest (rendezvous hashing: Thaler and Ravishankar,
    1998). A member that joins takes its parts from all others, and one that leaves gives its own
    to all others."""

    __slots__ = ("_best", "_members", "_number")

    def __init__(self) -> None:
        self._members: dict[M, int] = {}
        self._best: list[tuple[int, M] | None] = [None] * LOTS
        self._number = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def join(self, member: M) -> None:
        self._number += 1
        number = self._members[member] = self._number
        for lot, best in enumerate(self._best):
            score = hash((lot, number, "lot"))
            if best is None or score > best[0]:
                self._best[lot] = (score, member)

    def part(self, member: M) -> None:
        if self._members.pop(member, None) is None:
            return
        for lot, best in enumerate(self._best):
            if best is not None and best[1] is member:
                self._best[lot] = max(
                    ((hash((lot, number, "lot")), one) for one, number in self._members.items()),
                    key=lambda found: found[0],
                    default=None,
                )

    def of(self, marks: Iterable[int], known: Mapping[int, M]) -> list[M | None]:
        """Whom each falls to: whom ``known`` names, if it is there, else its lot. Of mark 0:
        nobody."""
        members = self._members
        lots = [None if best is None else best[1] for best in self._best]
        return [
            None if not mark else one if (one := known.get(mark)) in members else lots[mark % LOTS]
            for mark in marks
        ]
