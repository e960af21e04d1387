"""Containers of the timing wheel: flat handle arrays, the buckets of single milliseconds, and
queues of ids (``IdQueue``), in which ready tasks wait, too: a backlog of ten million costs 80 MB.

A *handle* is (id, due_ms); a flat bucket is an ``array("q")`` of id, due, id, due, … at 16
bytes a handle. A handle that was withdrawn (an *cancel*) is cancelled out by a tombstone behind
it in the same bucket: (~id, due). Ids are not negative, so a negative entry is a tombstone.

``Near`` holds what was taken out of flat buckets because its time has come near: one array of
ids for each distinct millisecond, and a heap of these milliseconds. Nothing here knows ticks,
slots or the time.

Invariants:

* A tombstone lies behind its handle, in this bucket or in one that is opened later; a bucket
  is a multiset, so it is of no matter which of two equal handles a tombstone takes away.
* A tombstone without a handle takes away nothing, and is forgotten with its millisecond.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

SMALL = 64
"""The most ids of a bucket of one millisecond that are searched and not indexed."""
SPENT_MIN = 4096
"""Fewer fired ids than this are not given back before their bucket is done."""
ENTRY_BYTES = 140
"""About how many bytes a bucket costs beside its array: dict entry, key, heap entry."""
QUEUE_SPENT_MIN = 512
"""Fewer spent entries than this are not worth giving back."""
HEADROOM_MIN = 16

Handles: TypeAlias = "array[int]"


def compacted(bucket: Handles) -> Handles:
    """The bucket without its tombstones and their handles, in order.

    Tombstones whose handles are not here stay, in front: the handles may be near already.
    """
    ids, dues = bucket[::2], bucket[1::2]
    dead: dict[int, list[int]] = {}
    for task_id, due_ms in zip(ids, dues, strict=True):
        if task_id < 0:
            dead.setdefault(~task_id, []).append(due_ms)
    live = array("q")
    append = live.append
    for task_id, due_ms in zip(ids, dues, strict=True):
        if task_id in dead and due_ms in dead[task_id]:
            dead[task_id].remove(due_ms)
        elif task_id >= 0:
            append(task_id)
            append(due_ms)
    kept = array("q")
    for task_id, dues_ms in dead.items():
        for due_ms in dues_ms:
            kept.extend((~task_id, due_ms))
    kept.extend(live)
    # Sliced, because a slice is allocated to its exact size.
    return kept[:]


def balance(bucket: Handles, start: int, task_id: int, due_ms: int) -> int:
    """How many live handles (task_id, due_ms) there are from ``start`` on."""
    tomb = ~task_id
    return sum(
        1 if found == task_id else -1
        for found, due in zip(bucket[start::2], bucket[start + 1 :: 2], strict=True)
        if due == due_ms and found in (task_id, tomb)
    )


class Near:
    """Ids by the millisecond they are due, lowest first, in order of arrival within one."""

    __slots__ = ("_buckets", "_counted", "_counted_due_ms", "_dead", "_heap", "_spent", "unmatched")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._heap: list[int] = []
        self._spent: dict[int, int] = {}
        """Due time → how many ids at the front of its bucket have been taken."""
        self._dead: dict[int, dict[int, int]] = {}
        """Due time → id → tombstones, of buckets that are too large to be searched for each."""
        self._counted_due_ms: int | None = None
        self._counted: Counter[int] = Counter()
        """How many handles each id has left in one large bucket; made on demand, see ``count``."""
        self.unmatched = 0
        """Tombstones that found no handle, for the owner's count; it sets this back to 0."""

    def push(self, task_id: int, due_ms: int) -> None:
        bucket = self._buckets.get(due_ms)
        if bucket is None:
            bucket = self._new(due_ms)
        elif due_ms == self._counted_due_ms:
            self._forget_counted()
        bucket.append(task_id)

    def push_block(self, ids: array[int], due_ms: int) -> None:
        """Add many ids of one millisecond."""
        if due_ms == self._counted_due_ms:
            self._forget_counted()
        bucket = self._buckets.get(due_ms)
        (self._new(due_ms) if bucket is None else bucket).extend(ids)

    def push_pairs(self, ids: Iterable[int], dues_ms: Iterable[int]) -> None:
        """Add handles and tombstones, in order."""
        buckets = self._buckets
        if self._counted_due_ms is not None:
            self._forget_counted()
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            if task_id < 0:
                if not self.remove(~task_id, due_ms):
                    self.unmatched += 1
                continue
            bucket = buckets.get(due_ms)
            if bucket is None:
                bucket = self._new(due_ms)
            bucket.append(task_id)

    def _new(self, due_ms: int) -> array[int]:
        bucket = self._buckets[due_ms] = array("q")
        heappush(self._heap, due_ms)
        return bucket

    def first_ms(self) -> int | None:
        """The lowest millisecond that has ids; None: there are none."""
        heap, buckets = self._heap, self._buckets
        while heap:
            if heap[0] in buckets:
                return heap[0]
            heappop(heap)
        return None

    def take(self, last_ms: int, limit: int, work: int, ids: list[int], dues_ms: list[int]) -> int:
        """Append what is due by ``last_ms`` to both lists, until ``ids`` has ``limit``.

        Returns how many withdrawn entries it met; it goes no further when they reach ``work``.
        """
        heap, buckets, spent, dead = self._heap, self._buckets, self._spent, self._dead
        left = work
        while heap and left > 0:
            due_ms = heap[0]
            if due_ms > last_ms or len(ids) >= limit:
                break
            bucket = buckets.get(due_ms)
            if bucket is None:
                heappop(heap)
            elif due_ms in spent or due_ms in dead or len(ids) + len(bucket) > limit:
                left -= self._take_part(due_ms, bucket, limit - len(ids), left, ids, dues_ms)
            else:
                if len(bucket) == 1:
                    ids.append(bucket[0])
                    dues_ms.append(due_ms)
                else:
                    ids += bucket
                    dues_ms += [due_ms] * len(bucket)
                del buckets[due_ms]
                heappop(heap)
                if due_ms == self._counted_due_ms:
                    self._forget_counted()
        return work - left

    def _take_part(
        self,
        due_ms: int,
        bucket: array[int],
        room: int,
        work: int,
        ids: list[int],
        dues_ms: list[int],
    ) -> int:
        start = self._spent.get(due_ms, 0)
        taken = live = bucket[start : start + min(room, work)].tolist()
        if due_ms == self._counted_due_ms:
            self._counted.subtract(taken)
        if due_ms in self._dead:
            live = self._without_dead(taken, self._dead[due_ms])
        ids += live
        dues_ms += [due_ms] * len(live)
        start += len(taken)
        if start == len(bucket):
            self._close(due_ms)
        elif start > SPENT_MIN and start * 2 > len(bucket):
            del bucket[:start]
            self._spent[due_ms] = 0
        else:
            self._spent[due_ms] = start
        return len(taken) - len(live)

    @staticmethod
    def _without_dead(ids: list[int], dead: dict[int, int]) -> list[int]:
        live = []
        for task_id in ids:
            tombs = dead.get(task_id)
            if tombs is None:
                live.append(task_id)
            elif tombs == 1:
                del dead[task_id]
            else:
                dead[task_id] = tombs - 1
        return live

    def _close(self, due_ms: int) -> None:
        del self._buckets[due_ms]
        self._spent.pop(due_ms, None)
        self.unmatched += sum(self._dead.pop(due_ms, {}).values())
        if due_ms == self._counted_due_ms:
            self._forget_counted()

    def _forget_counted(self) -> None:
        self._counted_due_ms, self._counted = None, Counter()

    def remove(self, task_id: int, due_ms: int) -> bool:
        """Remove one handle of this id and time. False: there is none for certain."""
        bucket = self._buckets.get(due_ms)
        if bucket is None:
            return False
        start = self._spent.get(due_ms, 0)
        if len(bucket) - start > SMALL or due_ms in self._dead:
            dead = self._dead.setdefault(due_ms, {})
            dead[task_id] = dead.get(task_id, 0) + 1
            return True
        try:
            del bucket[bucket.index(task_id, start)]
        except ValueError:
            return False
        if due_ms == self._counted_due_ms:
            self._forget_counted()
        if start == len(bucket):
            self._close(due_ms)
        return True

    def count(self, task_id: int, due_ms: int) -> int:
        """How many handles of this id and time are here and not taken away.

        A large bucket is counted once and kept counted while ids are taken from it, so that
        many questions in the middle of a burst do not each scan a million ids.
        """
        bucket = self._buckets.get(due_ms)
        if bucket is None:
            return 0
        start = self._spent.get(due_ms, 0)
        if len(bucket) - start <= SMALL:
            count = bucket[start:].count(task_id)
        else:
            if due_ms != self._counted_due_ms:
                self._counted_due_ms, self._counted = due_ms, Counter(bucket[start:])
            count = self._counted[task_id]
        return count - self._dead.get(due_ms, {}).get(task_id, 0)

    def counts(self) -> Iterable[tuple[int, int]]:
        """(due_ms, live ids) of every bucket."""
        for due_ms, bucket in self._buckets.items():
            dead = sum(self._dead.get(due_ms, {}).values())
            yield due_ms, len(bucket) - self._spent.get(due_ms, 0) - dead

    @property
    def memory_bytes(self) -> int:
        arrays = sum(bucket.__sizeof__() for bucket in self._buckets.values())
        dead = sum(map(len, self._dead.values()))
        return arrays + len(self._buckets) * ENTRY_BYTES + dead * ENTRY_BYTES


class IdQueue:
    """A queue of ids at eight bytes each, first in, first out, except for those that ``push_front``
    puts back. It does not look for duplicates.

    Invariants: ``_ids[:_head]`` is spent room and never read; everything behind it is queued, in
    order. Room is given back when more than half is spent, so that each id is moved a bounded
    number of times.
    """

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
        elif head > QUEUE_SPENT_MIN and head * 2 > len(ids):
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
