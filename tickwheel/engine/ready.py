"""Ready tasks in the order in which they are handed out: small handles, eight bytes each.

Higher priorities first, but nobody starves: as long as tasks of lower priorities wait, one of
every ``FAIR_EVERY`` taken is of a lower one, of that whose turn was longest ago. With n
priorities waiting, each gets at least one of every ``FAIR_EVERY * (n - 1)`` taken. Within a
priority tasks go in order of arrival. Time is an argument; knows nothing of tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tickwheel.wheel.idqueue import IdQueue

FAIR_EVERY = 16
MARK_GAP_MS = 100
MARKS_MAX = 512
STALE_MIN = 1_024
"""Below this many stale entries a walk through the queue to drop them is not worth it."""


class PriorityLevel(IdQueue):
    """The ready tasks of one priority: a queue that knows about since when its first entry has
    waited.

    Instead of a time for each entry it keeps marks (number of an entry, time of its arrival),
    one every 100 ms, and half as many whenever there are too many: the age it reports is right
    within 100 ms or a hundredth, and never too low.
    """

    __slots__ = ("_gap_ms", "_marks", "_next_ms", "_taken")

    def __init__(self) -> None:
        super().__init__()
        self._marks: deque[tuple[int, int]] = deque()
        self._taken = 0
        self._next_ms = 0
        self._gap_ms = MARK_GAP_MS

    def arrive(self, task_id: int, now_ms: int) -> None:
        """Append a task that has become ready."""
        self._ids.append(task_id)
        if now_ms >= self._next_ms:
            self._mark(now_ms)

    def arrive_all(self, ids: Sequence[int], now_ms: int) -> None:
        """Append at least one task that has become ready."""
        if now_ms >= self._next_ms:
            self.arrive(ids[0], now_ms)
            ids = ids[1:]
        self._ids.extend(ids)

    def _mark(self, now_ms: int) -> None:
        marks = self._marks
        if len(self) == 1:
            marks.clear()
            self._gap_ms = MARK_GAP_MS
        marks.append((self._taken + len(self) - 1, now_ms))
        if len(marks) > MARKS_MAX:
            self._marks = deque(mark for i, mark in enumerate(marks) if i % 2 == 0)
            self._gap_ms = max(2 * self._gap_ms, 2 * (now_ms - marks[0][1]) // MARKS_MAX)
        self._next_ms = now_ms + self._gap_ms

    def take(self, limit: int) -> list[int]:
        taken = super().take(limit)
        self._taken += len(taken)
        self._forget_marks()
        return taken

    def _forget_marks(self) -> None:
        """Forget the marks of entries that have left, except the last of these marks."""
        if not len(self):
            self._next_ms = 0
        marks = self._marks
        while len(marks) > 1 and marks[1][0] <= self._taken:
            marks.popleft()

    def drop(self, left: dict[int, int]) -> None:
        """See ``IdQueue.thin``."""
        places = [max(0, number - self._taken) for number, _ in self._marks]
        moved = self.thin(left, places)
        self._marks = deque(
            (self._taken + place, at_ms)
            for place, (_, at_ms) in zip(moved, self._marks, strict=True)
        )
        self._forget_marks()

    def push_front(self, ids: Iterable[int]) -> None:
        before = len(self)
        super().push_front(ids)
        self._taken -= len(self) - before

    @property
    def since_ms(self) -> int | None:
        """When the first entry arrived, or shortly before; if empty, the one that left last."""
        return self._marks[0][1] if self._marks else None


class ReadyQueue:
    """The ids of ready tasks; an id may stand in it more than once (see ``Group.stale``)."""

    __slots__ = (
        "_by_priority",
        "_picks",
        "_plain",
        "_runs",
        "_served",
        "_turn",
        "emptied_since_ms",
    )

    def __init__(self) -> None:
        self._plain = PriorityLevel()
        self._by_priority: dict[int, PriorityLevel] = {}
        self._turn = 0
        """How many were taken from the highest priority since a lower one had its turn."""
        self._picks = 0
        self._served: dict[int, int] = {}
        """priority → number of the pick at which it had its turn."""
        self._runs: list[tuple[int, int]] = []
        """(priority, how many) of the ids taken last; empty when none had a priority."""
        self.emptied_since_ms: int | None = None
        """About since when the last entry of the level that ran empty last had waited."""

    def push(self, task_id: int, priority: int, now_ms: int) -> None:
        if priority:
            self._level(priority).arrive(task_id, now_ms)
        else:
            self._plain.arrive(task_id, now_ms)

    def push_all(self, ids: Sequence[int], now_ms: int) -> None:
        """``push`` each of these ids without a priority."""
        if ids:
            self._plain.arrive_all(ids, now_ms)

    def push_front(self, task_id: int, priority: int) -> None:
        (self._level(priority) if priority else self._plain).push_front((task_id,))

    def take(self, limit: int) -> list[int]:
        """Remove up to ``limit`` ids in the order of delivery, and return them."""
        self._runs = []
        if not self._by_priority:
            return self._plain.take(limit)
        taken: list[int] = []
        while len(taken) < limit and self._by_priority:
            highest = max(self._by_priority)
            if len(self._by_priority) == 1 and not len(self._plain):
                taken += self._take(highest, limit - len(taken))
                self._turn = 0
                continue
            some = self._take(highest, min(limit - len(taken), FAIR_EVERY - 1 - self._turn))
            taken += some
            self._turn += len(some)
            if self._turn >= FAIR_EVERY - 1 and len(taken) < limit:
                taken += self._take_lower(highest)
        return taken + self._take(0, limit - len(taken))

    def _take(self, priority: int, limit: int) -> list[int]:
        level = self._by_priority[priority] if priority else self._plain
        taken = level.take(limit)
        if priority and not len(level):
            self._emptied(level)
            del self._by_priority[priority]
        self._runs.append((priority, len(taken)))
        return taken

    def _emptied(self, level: PriorityLevel) -> None:
        if level.since_ms is not None:  # one that was only put back has no time of its own
            self.emptied_since_ms = level.since_ms

    def _take_lower(self, highest: int) -> list[int]:
        """Take one id of the priority below ``highest`` whose turn was longest ago."""
        self._turn = 0
        lower = [priority for priority in self._by_priority if priority < highest]
        if len(self._plain):
            lower.append(0)
        if not lower:
            return []
        priority = min(lower, key=lambda p: (self._served.get(p, 0), -p))
        self._picks += 1
        self._served[priority] = self._picks
        return self._take(priority, 1)

    def priority_at(self, index: int) -> int:
        """The priority of the id at ``index`` among those that were taken last."""
        for priority, count in self._runs:
            if index < count:
                return priority
            index -= count
        return 0

    def priorities(self, ids: Sequence[int]) -> dict[int, int]:
        """Id → priority, of the ids that were taken last."""
        found = dict.fromkeys(ids, 0)
        at = 0
        for priority, count in self._runs:
            if priority:
                found.update(dict.fromkeys(ids[at : at + count], priority))
            at += count
        return found

    def put_back(self, ids: Sequence[int]) -> None:
        """Put the last of the ids taken last back to the front of their levels."""
        for priority, count in reversed(self._runs or [(0, len(ids))]):
            keep = max(0, len(ids) - count)
            (self._level(priority) if priority else self._plain).push_front(ids[keep:])
            ids = ids[:keep]
            if not ids:
                return

    def drop(self, stale: dict[int, int]) -> None:
        """Remove the first entries of each id, as many as ``stale`` says. All must be there."""
        left = dict(stale)
        for level in self.levels():
            level.drop(left)
        if left:
            raise AssertionError(f"{len(left)} ids that are stale are not queued")
        for priority, level in list(self._by_priority.items()):
            if not len(level):
                self._emptied(level)
                del self._by_priority[priority]

    def absorb(self, other: ReadyQueue, now_ms: int) -> None:
        """Append all ids of another queue behind those of this one."""
        for priority, level in (*other._by_priority.items(), (0, other._plain)):
            if len(level):
                mine = self._level(priority) if priority else self._plain
                (first,) = level.take(1)
                mine.arrive(first, now_ms)
                mine.extend(level)

    def holds(self, task_id: int) -> bool:
        """Whether an entry of this id is in the queue; looks through all entries."""
        return any(task_id in level for level in self.levels())

    def peek(self) -> int:
        """One of the ids that come first; 0: the queue is empty."""
        for level in self.levels():
            for task_id in level.peek(1):
                return task_id
        return 0

    def levels(self) -> list[PriorityLevel]:
        """The levels that hold tasks, the one of the highest priority first, and last the one of
        tasks without a priority."""
        priorities = sorted(self._by_priority, reverse=True)
        return [*(self._by_priority[priority] for priority in priorities), self._plain]

    def __len__(self) -> int:
        if not self._by_priority:
            return len(self._plain)
        return len(self._plain) + sum(map(len, self._by_priority.values()))

    def _level(self, priority: int) -> PriorityLevel:
        level = self._by_priority.get(priority)
        if level is None:
            level = self._by_priority[priority] = PriorityLevel()
            # As if it had just had its turn: one that comes and goes must not push in.
            self._served[priority] = max(self._served.get(priority, 0), self._picks)
        return level
