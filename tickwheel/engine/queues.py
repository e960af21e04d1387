"""The queues in which a group's due tasks wait for delivery.

* ``ReadyQueue``: tasks that can be delivered, at eight bytes each. Higher priorities come first
  without starving lower ones: while lower priorities wait, one of every ``FAIR_EVERY`` tasks comes
  from the lower priority that has waited longest for its turn. With n waiting priorities, each gets
  at least one of every ``FAIR_EVERY * (n - 1)`` tasks. Within a priority, tasks are taken in order
  of arrival.
* ``Bucket``: a rate limit.
* ``Order``: the tasks of an order key are delivered one at a time. One task of each key is the *key
  holder*, its *head*; the others wait in its *key queue* by due time, then by their place in the
  order of ids. A key without a queue is two numbers, a *mark* (a hash of the key) and its head:
  in a dictionary while there are few, otherwise in the table of ``keys.py`` with 18 to 28 bytes. A
  task in a key queue takes 16 bytes. Two keys with the same mark share a queue, which delays them
  but keeps their order.
* ``Share``: a value of ``fair_by``. A few of its tasks are *called*, which means that they are in
  the ready queue; the others wait here in order of arrival. So each value has about the same number
  of places in the ready queue, however many tasks it has.
* ``KeyPartitions``: the assignment of keys to consumers.
* ``DueNames``: the names of schedules or transactions, by the time of their next check.

This module is pure: it knows no groups, tasks or stores and reads no clock. The rules that use
these queues are in ``ordering.py``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from tickwheel.engine.keys import Table
from tickwheel.wheel.buckets import IdQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

FAIR_EVERY = 16
MARK_GAP_MS = 100
MARKS_MAX = 512
STALE_MIN = 1_024
"""Number of stale entries above which the queue may be scanned to drop them."""


class PriorityLevel(IdQueue):
    """The ready tasks of one priority, with the approximate age of the first entry. Instead of a
    time per entry, the queue keeps marks (number of an entry, time of its arrival), one every 100
    ms, and drops every second mark when there are too many. The reported age is accurate within 100
    ms or 1%, and never too low."""

    __slots__ = ("_gap_ms", "_marks", "_next_ms", "_taken")

    def __init__(self) -> None:
        super().__init__()
        self._marks: deque[tuple[int, int]] = deque()
        self._taken = 0
        self._next_ms = 0
        self._gap_ms = MARK_GAP_MS

    def arrive(self, task_id: int, now_ms: int) -> None:
        """Append a task that has become ready."""
        self.push(task_id)
        if now_ms >= self._next_ms:
            self._mark(now_ms)

    def arrive_all(self, ids: Sequence[int], now_ms: int) -> None:
        """Append tasks, at least one, that have become ready."""
        if now_ms >= self._next_ms:
            self.arrive(ids[0], now_ms)
            ids = ids[1:]
        self.extend(ids)

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
        """Forget the marks of entries that have left, except the last mark."""
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
        """When the first entry arrived, or shortly before. If the queue is empty, the arrival of
        the entry that left last."""
        return self._marks[0][1] if self._marks else None


class ReadyQueue:
    """The ids of ready tasks. An id can have several entries. A task that leaves other than by
    ``take`` (cancel, reschedule, ack by an earlier receipt) is withdrawn: its entry stays and is
    *stale*. Stale entries are dropped before they outnumber the others. A task that has left and
    returned has two entries. If both have the same priority, the first counts as the stale one, so
    that the task is delivered once."""

    __slots__ = (
        "_before",
        "_by_priority",
        "_picks",
        "_plain",
        "_runs",
        "_served",
        "_turn",
        "last_taken_arrival_ms",
        "stale",
        "stale_count",
    )

    def __init__(self) -> None:
        self._plain = PriorityLevel()
        self._by_priority: dict[int, PriorityLevel] = {}
        self._turn = 0
        """Number of tasks taken from the highest priority since a lower one last had its turn."""
        self._picks = 0
        self._served: dict[int, int] = {}
        """Priority → value of ``_picks`` at its last turn."""
        self._runs: list[tuple[int, int]] = []
        """(priority, count) of the ids taken last; empty if none had a priority."""
        self._before: list[tuple[int, int]] = []
        """(``_turn``, value of ``_served`` of the priority) before each of ``_runs``."""
        self.last_taken_arrival_ms: int | None = None
        """The approximate arrival of the last entry of the level that became empty last."""
        self.stale: dict[int, dict[int, int]] = {}
        """Priority → id → number of its first entries that are stale; ``stale_count`` is the
        sum."""
        self.stale_count = 0

    @property
    def count(self) -> int:
        """Number of entries that are not stale."""
        return len(self) - self.stale_count

    def withdraw(self, task_id: int, priority: int) -> None:
        """Make the first entry of a ready task with this priority stale."""
        stale = self.stale.setdefault(priority, {})
        stale[task_id] = stale.get(task_id, 0) + 1
        self.stale_count += 1
        if self.stale_count > STALE_MIN and self.stale_count * 2 > len(self):
            self.drop_stale()

    def pop_stale(self, task_id: int, priority: int) -> bool:
        """Return whether this entry, which is being taken, is stale. If so, uncount it."""
        stale = self.stale.get(priority, {})
        left = stale.pop(task_id, 0)
        if not left:
            return False
        self.stale_count -= 1
        if left > 1:
            stale[task_id] = left - 1
        elif not stale:
            del self.stale[priority]
        return True

    def push(self, task_id: int, priority: int, now_ms: int) -> None:
        if priority:
            self._level(priority).arrive(task_id, now_ms)
        else:
            self._plain.arrive(task_id, now_ms)

    def push_all(self, ids: Sequence[int], now_ms: int) -> None:
        """Call ``push`` for each of these ids without a priority."""
        if ids:
            self._plain.arrive_all(ids, now_ms)

    def push_front(self, task_id: int, priority: int) -> None:
        (self._level(priority) if priority else self._plain).push_front((task_id,))

    def take(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` ids in the order of delivery."""
        self._runs, self._before = [], []
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
        self._before.append((self._turn, self._served.get(priority, 0)))
        return taken

    def _emptied(self, level: PriorityLevel) -> None:
        if level.since_ms is not None:  # entries that were put back have no time
            self.last_taken_arrival_ms = level.since_ms

    def _take_lower(self, highest: int) -> list[int]:
        """Take an id from the priority below ``highest`` that has waited longest for its turn."""
        lower = [priority for priority in self._by_priority if priority < highest]
        if len(self._plain):
            lower.append(0)
        taken: list[int] = []
        if lower:
            priority = min(lower, key=lambda p: (self._served.get(p, 0), -p))
            taken = self._take(priority, 1)
            self._picks += 1
            self._served[priority] = self._picks
        self._turn = 0
        return taken

    def priority_at(self, index: int) -> int:
        """Return the priority of the id at ``index`` among the ids taken last."""
        for priority, count in self._runs:
            if index < count:
                return priority
            index -= count
        return 0

    def priorities(self, count: int) -> list[int]:
        """Return the priorities of the ``count`` ids taken last."""
        runs = self._runs or [(0, count)]
        return [priority for priority, length in runs for _ in range(length)]

    def put_back(self, ids: Sequence[int]) -> None:
        """Put the tail of the ids taken last back to the front of their levels, and undo the turns
        that they have used."""
        if not self._runs:
            self._plain.push_front(ids)
            return
        for (priority, count), (turn, served) in zip(
            reversed(self._runs), reversed(self._before), strict=True
        ):
            if not ids:
                return
            keep = max(0, len(ids) - count)
            (self._level(priority) if priority else self._plain).push_front(ids[keep:])
            used = turn + (max(0, count - len(ids)) if priority else 0)
            self._turn = used if used < FAIR_EVERY else 0
            self._served[priority] = served
            ids = ids[:keep]

    def drop_stale(self) -> None:
        """Remove all stale entries. This scans all entries."""
        stale, self.stale, self.stale_count = self.stale, {}, 0
        for priority, level in self.levels().items():
            if left := stale.pop(priority, {}):
                level.drop(left)
            if left:
                raise AssertionError(f"{len(left)} stale ids are not queued")
        if stale:
            raise AssertionError(f"stale ids are queued in none of the priorities {list(stale)}")
        for priority, level in list(self._by_priority.items()):
            if not len(level):
                self._emptied(level)
                del self._by_priority[priority]

    def absorb(self, other: ReadyQueue, now_ms: int) -> None:
        """Append all ids of another queue."""
        for priority, level in (*other._by_priority.items(), (0, other._plain)):
            if len(level):
                own_level = self._level(priority) if priority else self._plain
                (first,) = level.take(1)
                own_level.arrive(first, now_ms)
                own_level.extend(level)
        for priority, counts in other.stale.items():
            stale = self.stale.setdefault(priority, {})
            for task_id, count in counts.items():
                stale[task_id] = stale.get(task_id, 0) + count
        self.stale_count += other.stale_count

    def peek(self) -> int:
        """Return one of the first ids, or 0 if the queue is empty."""
        for level in self.levels().values():
            for task_id in level.peek(1):
                return task_id
        return 0

    def levels(self) -> dict[int, PriorityLevel]:
        """Return priority → level by descending priority; 0 is the level without a priority."""
        levels = {p: self._by_priority[p] for p in sorted(self._by_priority, reverse=True)}
        return levels | {0: self._plain}

    def __len__(self) -> int:
        if not self._by_priority:
            return len(self._plain)
        return len(self._plain) + sum(map(len, self._by_priority.values()))

    def _level(self, priority: int) -> PriorityLevel:
        level = self._by_priority.get(priority)
        if level is None:
            level = self._by_priority[priority] = PriorityLevel()
            # A new level counts as just served, so that a level that comes and goes gains nothing.
            self._served[priority] = max(self._served.get(priority, 0), self._picks)
        return level


_ROUNDING = 1e-6
"""Maximum rounding error at which a sum of fractions counts as a whole token."""


class Bucket:
    """A token bucket with ``rate`` tokens per second and at most ``burst`` tokens; full at first. A
    delivery takes a token. By default ``burst`` equals the tokens of a second, but at least 1."""

    __slots__ = ("_at_mono_ms", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float | None, mono_ms: int) -> None:
        self.rate = rate
        self.burst = max(1.0, rate if burst is None else burst)
        self._tokens = self.burst
        self._at_mono_ms = mono_ms

    def left(self, mono_ms: int) -> int:
        """Return the number of whole tokens now."""
        passed_ms = mono_ms - self._at_mono_ms
        if passed_ms > 0:
            self._tokens = min(self.burst, self._tokens + passed_ms * self.rate / 1000)
            self._at_mono_ms = mono_ms
        return int(self._tokens + _ROUNDING)

    def take(self, count: int) -> None:
        """Remove tokens, at most the number that ``left`` has just returned."""
        self._tokens -= count

    def next_mono_ms(self) -> int:
        """Return when the next token is available (steady clock) if ``left`` has returned 0."""
        lacking = max(0.0, 1.0 - _ROUNDING - self._tokens)
        return self._at_mono_ms + max(1, ceil(lacking * 1000 / self.rate))


def adjusted_bucket(
    old: Bucket | None, rate: float | None, burst: int | None, mono_ms: int, shards: int = 1
) -> Bucket | None:
    """Return a bucket with a new rate and burst, no fuller than ``old``, or None if ``rate`` is
    None. The rate and the burst are divided equally among ``shards`` buckets."""
    if rate is None:
        return None
    fresh = Bucket(rate / shards, None if burst is None else burst / shards, mono_ms)
    if old is not None:
        fresh.take(max(0, int(fresh.burst) - old.left(mono_ms)))
    return fresh


class DueNames:
    """Names by the time of their next check, the earliest first."""

    __slots__ = ("_heap", "_times_ms")

    def __init__(self) -> None:
        self._times_ms: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """(time, name). An entry is stale if its name has another time now."""

    def set(self, name: str, at_ms: int | None) -> None:
        """Set the time of a name. None removes the name."""
        if at_ms == self._times_ms.get(name):
            return
        if at_ms is None:
            del self._times_ms[name]
            return
        self._times_ms[name] = at_ms
        heappush(self._heap, (at_ms, name))
        if len(self._heap) > 2 * len(self._times_ms) + DUE_STALE_MAX:
            self._heap = sorted((at_ms, name) for name, at_ms in self._times_ms.items())

    def next_ms(self) -> int | None:
        """Return the time of the next name, or None if there are no names."""
        heap = self._heap
        while heap and self._times_ms.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now_ms: int) -> str | None:
        """Remove and return the next name whose time has come, or None."""
        at_ms = self.next_ms()
        if at_ms is None or at_ms > now_ms:
            return None
        _, name = heappop(self._heap)
        del self._times_ms[name]
        return name


M = TypeVar("M", bound=Hashable)
DUE_STALE_MAX = 64
"""Maximum number of stale entries of a heap of names, in addition to one per name."""
FEW_MAX = 65_536
"""Maximum key holders in the dictionary, which is faster than the table but five times as large."""
SPENT_MIN = 128
"""Number of spent entries of a key queue's array above which it may be compacted."""
NOBODY = -1
"""The head of a key that has no holder but whose queue must wait."""
PARTITIONS = 64
"""Number of partitions of keys."""
_MASK = 2**64 - 1
"""The bits of a key's mark in the table. Marks come from ``hash`` and can be negative."""


if TYPE_CHECKING:
    _Numbers = array[int]
else:
    _Numbers = array


class KeyQueue(_Numbers):
    """The tasks of a key: its head (or ``NOBODY``), and the due time and id of each queued task,
    ascending by due time and place. The class is itself an array, which halves the time. For
    many keys, ``Order`` accesses the array directly."""

    __slots__ = ("begin", "head")

    def __new__(cls, head: int) -> Self:
        return super().__new__(cls, "q")  # type: ignore[return-value]  # typeshed: array[int]

    def __init__(self, head: int) -> None:
        self.head = head
        self.begin = 0
        """The index of the first queued task. Entries before it are spent."""

    @property
    def waiting(self) -> int:
        """Number of queued tasks."""
        return (len(self) - self.begin) // 2

    def ids(self) -> Sequence[int]:
        """Return the ids of the queued tasks."""
        return self[self.begin + 1 :: 2]

    def first(self) -> tuple[int, int]:
        """Return (due_ms, id) of the first queued task, which must exist."""
        return self[self.begin], self[self.begin + 1]

    def add(self, task_id: int, due_ms: int, places: dict[int, int]) -> None:
        """Queue a task. ``places`` contains the places of tasks whose place is not their id."""
        last_ms = self[-2] if len(self) else -1
        if last_ms > due_ms or (last_ms == due_ms and (places or self[-1] > task_id)):
            at = self._where(task_id, due_ms, places)
            self[at:at] = array("q", (due_ms, task_id))
        else:
            self.extend((due_ms, task_id))

    def drop(self, task_id: int, due_ms: int, places: dict[int, int]) -> bool:
        """Remove a task. Return whether it was queued."""
        at = self._where(task_id, due_ms, places)
        if at == len(self) or self[at + 1] != task_id:
            return False
        del self[at : at + 2]
        return True

    def take(self) -> int:
        """Remove and return the first queued task, which must exist."""
        task_id = self[self.begin + 1]
        self.begin += 2
        if self.begin > SPENT_MIN:
            self.compact()
        return task_id

    def compact(self) -> None:
        """Drop the spent entries of the array if they are more than half of it."""
        if self.begin * 2 > len(self):
            del self[: self.begin]
            self.begin = 0

    def _where(self, task_id: int, due_ms: int, places: dict[int, int]) -> int:
        """Return the index of a task in the array, or the index at which to insert it."""

        def key(at: int) -> tuple[int, int]:
            return self[at], places.get(self[at + 1], self[at + 1])

        place = places.get(task_id, task_id)
        all_places = range(self.begin, len(self), 2)
        return self.begin + 2 * bisect_left(all_places, (due_ms, place), key=key)


class Order:
    """The holder and the queue of each key."""

    __slots__ = ("_few", "_many", "_newest", "overtaken", "places", "queues", "waiting")

    def __init__(self) -> None:
        self.queues: dict[int, KeyQueue] = {}
        """Mark → queue."""
        self._few: dict[int, int] = {}
        self._many = Table()
        self.places: dict[int, int] = {}
        """Id → place of tasks in key queues whose place is not their id."""
        self.waiting = 0
        """Number of tasks in all key queues."""
        self._newest = (0, 0)
        """The highest (due_ms, place) of all tasks so far."""
        self.overtaken: set[int] = set()
        """Marks of keys with a queued task that might be due before the head."""

    def __len__(self) -> int:
        """Return the number of keys with a holder or a queue."""
        return len(self.queues) + len(self._few) + len(self._many)

    def head(self, mark: int) -> int:
        """Return the holder of the key, or 0 if the key is free."""
        queue = self.queues.get(mark)
        return self._head_without_queue(mark) if queue is None else queue.head

    def _head_without_queue(self, mark: int) -> int:
        head = self._few.get(mark)
        if head is not None:
            return head
        return (self._many.find(mark & _MASK) or (0,))[0] if len(self._many) else 0

    def claim(self, mark: int, task_id: int) -> bool:
        """Make a task the holder if the key is free. Return whether the task is the holder."""
        head = self.head(mark)
        if head:
            return head == task_id
        if len(self._few) < FEW_MAX:
            self._few[mark] = task_id
        else:
            self._many.put(mark & _MASK, task_id)
        return True

    def arrive(self, mark: int, task_id: int, due_ms: int, place: int) -> bool:
        """Claim the key or queue the task. Return whether the task is the holder."""
        if not self.claim(mark, task_id):
            self.queue(mark, task_id, due_ms, place)
            return False
        self._newest = max(self._newest, (due_ms, place))
        if mark in self.queues:  # the task may already have been the head
            self.overtaken.add(mark)
        return True

    def arrive_all(
        self, marks: Sequence[int], ids: Sequence[int], dues_ms: Sequence[int]
    ) -> list[int]:
        """Call ``arrive`` for tasks, at least one, whose place is their id. Return the holders."""
        few, holders = self._few, list[int]()
        arrivals = zip(marks, ids, dues_ms, strict=True)
        if (
            len(self._many)
            or len(few) + len(marks) > FEW_MAX
            or self.places
            or (dues_ms[0], ids[0]) < self._newest
            or not (_ascends(dues_ms) and _ascends(ids))
        ):
            for mark, task_id, due_ms in arrivals:
                if self.arrive(mark, task_id, due_ms, task_id):
                    holders.append(task_id)
            return holders
        # Each task is due after all tasks that arrived before.
        self._newest = (dues_ms[-1], ids[-1])
        get, alone, waiting = self.queues.get, few.setdefault, 0
        for mark, task_id, due_ms in arrivals:
            queue = get(mark)
            if queue is None:
                head = alone(mark, task_id)
                if head == task_id:
                    holders.append(task_id)
                    continue
                queue = self.queues[mark] = KeyQueue(head)
                del few[mark]
            elif queue.head == task_id:
                holders.append(task_id)
                self.overtaken.add(mark)
                continue
            queue.append(due_ms)
            queue.append(task_id)
            waiting += 1
        self.waiting += waiting
        return holders

    def queue(self, mark: int, task_id: int, due_ms: int, place: int) -> None:
        """Queue a task. If the key is free, it stays without a holder."""
        queue = self.queues.get(mark)
        if queue is None:
            queue = self.queues[mark] = KeyQueue(self._forget(mark) or NOBODY)
        if place != task_id:
            self.places[task_id] = place
        if (due_ms, place) < self._newest:
            self.overtaken.add(mark)
        else:
            self._newest = (due_ms, place)
        queue.add(task_id, due_ms, self.places)
        self.waiting += 1

    def remove(self, mark: int, task_id: int, due_ms: int) -> bool:
        """Remove a task. Return whether it was in the queue of its key."""
        queue = self.queues.get(mark)
        if queue is None:
            return False
        was_queued = queue.drop(task_id, due_ms, self.places)
        self.places.pop(task_id, None)
        if was_queued:
            self.waiting -= 1
            if not queue.waiting:
                self._shrink(mark, queue)
        return was_queued

    def park(self, mark: int, head: int, due_ms: int, place: int) -> None:
        """Put the head of a key back into the key's queue. The key then has no holder."""
        self.queue(mark, head, due_ms, place)
        self.queues[mark].head = NOBODY

    def promote(self, marks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Make the next task the head of each key whose head has ended. Return the new heads' ids
        and due times. A key without a queue becomes free."""
        queues, few = self.queues, self._few
        heads: list[int] = []
        dues_ms: list[int] = []
        get = queues.get
        for mark in marks:
            queue = get(mark)
            if queue is None:
                if few.pop(mark, None) is None:
                    self._forget(mark)
                continue
            at = queue.begin
            dues_ms.append(queue[at])
            queue.head = head = queue[at + 1]
            heads.append(head)
            queue.begin = at = at + 2
            if at == len(queue):
                del queues[mark]
                if len(few) < FEW_MAX:
                    few[mark] = head
                else:
                    self._many.put(mark & _MASK, head)
            elif at > SPENT_MIN:
                queue.compact()
        self.waiting -= len(heads)
        if self.places:
            for head in heads:
                self.places.pop(head, None)
        if self.overtaken:
            self.overtaken.difference_update(marks)
        return heads, dues_ms

    def exchange(self, mark: int, head: int, due_ms: int, place: int) -> int:
        """Exchange ``head`` (unattempted) with a queued earlier task. Return the key's head."""
        queue = self.queues.get(mark)
        if queue is None or queue.head != head:
            return head
        first_ms, first = queue.first()
        if (first_ms, self.places.get(first, first)) >= (due_ms, place):
            return head
        queue.head = self._take(queue)
        self.queue(mark, head, due_ms, place)
        return queue.head

    def _take(self, queue: KeyQueue) -> int:
        task_id = queue.take()
        self.places.pop(task_id, None)
        self.waiting -= 1
        return task_id

    def _shrink(self, mark: int, queue: KeyQueue) -> None:
        """Drop the empty queue of a key."""
        del self.queues[mark]
        if queue.head != NOBODY:
            self.claim(mark, queue.head)

    def _forget(self, mark: int) -> int:
        """Free a key without a queue, and return its head."""
        head = self._few.pop(mark, None)
        if head is not None:
            return head
        return (self._many.take(mark & _MASK) or [0])[0] if len(self._many) else 0

    def take_some(self, limit: int) -> list[int]:
        """Remove and return up to ``limit`` tasks from the queues of any keys."""
        taken: list[int] = []
        while self.queues and len(taken) < limit:
            mark, queue = next(iter(self.queues.items()))
            while queue.waiting and len(taken) < limit:
                taken.append(self._take(queue))
            if not queue.waiting:
                self._shrink(mark, queue)
        return taken


def _ascends(numbers: Sequence[int]) -> bool:
    return list(numbers) == sorted(numbers)


@dataclass(slots=True, eq=False)
class Share:
    """A value of ``fair_by``: its waiting tasks and the counts of its other tasks."""

    mark: int
    bucket: Bucket | None
    called: int = 0
    """Number of tasks of the value in the ready queue."""
    in_flight: int = 0
    queue: ReadyQueue | None = None
    """The tasks of the value that wait to be called, or None if there are none."""
    is_paced: bool = False
    """Whether the value waits for a token of its rate."""

    @property
    def waiting(self) -> int:
        return 0 if self.queue is None else self.queue.count

    @property
    def is_idle(self) -> bool:
        return not (self.called or self.in_flight or self.queue is not None)

    def put(self, task_id: int, priority: int, now_ms: int, *, front: bool) -> None:
        """Add a task that waits to be called."""
        if self.queue is None:
            self.queue = ReadyQueue()
        if front:
            self.queue.push_front(task_id, priority)
        else:
            self.queue.push(task_id, priority, now_ms)

    def withdraw(self, task_id: int, priority: int) -> None:
        """Remove a waiting task."""
        assert self.queue is not None
        self.queue.withdraw(task_id, priority)
        if not self.queue.count:
            self.queue = None

    def next(self) -> tuple[int, int] | None:
        """Remove and return (id, priority) of the task to call next, or None."""
        while (queue := self.queue) is not None:
            (task_id,) = queue.take(1)
            priority = queue.priority_at(0)
            is_stale = queue.pop_stale(task_id, priority)
            if not queue.count:
                self.queue = None
            if not is_stale:
                return task_id, priority
        return None


class KeyPartitions(Generic[M]):
    """Assigns keys to members. Keys are divided into ``PARTITIONS`` partitions. Each partition
    belongs to the member for which a hash of both is highest (rendezvous hashing: Thaler and
    Ravishankar, 1998). A joining member takes partitions from all others; the partitions of a
    leaving member go to all others."""

    __slots__ = ("_best", "_members", "_number")

    def __init__(self) -> None:
        self._members: dict[M, int] = {}
        self._best: list[tuple[int, M] | None] = [None] * PARTITIONS
        self._number = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._members

    def join(self, member: M) -> None:
        self._number += 1
        number = self._members[member] = self._number
        for partition, best in enumerate(self._best):
            score = hash((partition, number, "partition"))
            if best is None or score > best[0]:
                self._best[partition] = (score, member)

    def leave(self, member: M) -> None:
        if self._members.pop(member, None) is None:
            return
        for partition, best in enumerate(self._best):
            if best is not None and best[1] is member:
                self._best[partition] = max(
                    (
                        (hash((partition, number, "partition")), other)
                        for other, number in self._members.items()
                    ),
                    key=lambda pair: pair[0],
                    default=None,
                )

    def has_all(self, some: Iterable[M | None]) -> bool:
        """Return whether all of ``some`` are members."""
        return self._members.keys() >= set(some)

    def of(self, marks: Sequence[int], preferred: Mapping[int, M]) -> list[M | None]:
        """Return the owner of each mark: its value in ``preferred`` if that is a member, otherwise
        the member of its partition; None for mark 0."""
        members = self._members
        owners = [None if best is None else best[1] for best in self._best]
        return [
            None if not mark else member if member in members else owners[mark % PARTITIONS]
            for mark, member in zip(marks, map(preferred.get, marks), strict=True)
        ]
