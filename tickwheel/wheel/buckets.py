"""Containers of the timing wheel: flat handle arrays, and the buckets of single milliseconds.

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
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TypeAlias

SMALL = 64
"""The most ids of a bucket of one millisecond that are searched and not indexed."""
SPENT_MIN = 4096
"""Fewer fired ids than this are not given back before their bucket is done."""
ENTRY_BYTES = 140
"""About how many bytes a bucket costs beside its array: dict entry, key, heap entry."""

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
