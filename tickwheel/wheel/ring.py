"""The ring of slots and what lies beyond it: flat buckets by tick and by rotation.

A slot of the ring stands for two ticks, one of the current and one of the next rotation. It is
kept sparse: a dict from tick to bucket, and a heap of the ticks that have one. Ticks behind the
wheel's position (the clock went back) are ticks like any other. Later rotations have one bucket
each, which ``enter`` scatters over ticks, some handles at a time, when their turn comes near.

Buckets are those of ``buckets.py``; the time is not known here, only tick numbers.

Invariants:

* ``end`` is the first rotation that is not in the ring; no bucket of a lower one is in ``_far``.
* A bucket is emptied front to back while new handles join its end, so that equal due times stay
  in order of arrival; only an empty bucket is left for the next coarser place's content.
* Compaction, the one step whose cost is not cut into pieces, costs about 0.2 µs a handle of one
  tick, or of one rotation with at most ``DENSE_PER_SLOT`` handles a slot. A rotation with more
  is spread over ticks instead, early.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from tickwheel.wheel.buckets import ENTRY_BYTES, Handles, balance, compacted

TOMBS_MIN = 32
"""Fewer tombstones are not worth a compaction."""
ENTRIES_PER_TOMB_MAX = 5
"""A bucket is compacted when one entry in five is a tombstone: a third of its handles."""
DENSE_PER_SLOT = 64

Key = tuple[bool, int]
"""(whether a rotation, number of the tick or rotation)"""


class Ring:
    """Flat buckets, and their way from rotations to ticks to the caller."""

    __slots__ = (
        "_dense",
        "_far",
        "_far_heap",
        "_moved",
        "_rotation_ms",
        "_slots",
        "_spreading",
        "_tick_heap",
        "_tick_ms",
        "_ticks",
        "_tombs",
        "end",
    )

    def __init__(self, slots: int, tick_ms: int, end: int) -> None:
        self._slots, self._tick_ms, self._rotation_ms = slots, tick_ms, slots * tick_ms
        self.end = end
        self._ticks: dict[int, Handles] = {}
        self._tick_heap: list[int] = []
        self._far: dict[int, Handles] = {}
        self._far_heap: list[int] = []
        self._dense: set[int] = set()
        """Rotations from ``end`` on whose handles are kept by tick already."""
        self._spreading: list[int] = []
        """Rotations on their way to ``_dense``."""
        self._moved: dict[Key, int] = {}
        """Entries at the front of a bucket that have moved on."""
        self._tombs: dict[Key, int] = {}
        """Tombstones in a bucket."""

    # --- in ------------------------------------------------------------------------------------

    def add(self, task_id: int, due_ms: int) -> None:
        rotation = due_ms // self._rotation_ms
        if rotation < self.end or rotation in self._dense:
            tick = due_ms // self._tick_ms
            bucket = self._ticks.get(tick) or self._tick_bucket(tick)
        else:
            bucket = self._far.get(rotation) or self._far_bucket(rotation)
        bucket.append(task_id)
        bucket.append(due_ms)

    def add_many(
        self,
        ids: Sequence[int],
        dues_ms: Sequence[int],
        low_ms: int,
        high_ms: int,
        otherwise: Callable[[int, int], None],
    ) -> None:
        """Add the handles whose times are not in [low_ms, high_ms); the others go ``otherwise``."""
        tick_ms, rotation_ms, dense = self._tick_ms, self._rotation_ms, self._dense
        ticks, far, end_ms = self._ticks, self._far, self.end * self._rotation_ms
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            if due_ms >= end_ms and (rotation := due_ms // rotation_ms) not in dense:
                bucket = far.get(rotation) or self._far_bucket(rotation)
            elif low_ms <= due_ms < high_ms:
                otherwise(task_id, due_ms)
                continue
            else:
                tick = due_ms // tick_ms
                bucket = ticks.get(tick) or self._tick_bucket(tick)
            bucket.append(task_id)
            bucket.append(due_ms)

    def _tick_bucket(self, tick: int) -> Handles:
        bucket = self._ticks.get(tick)
        if bucket is None:
            bucket = self._ticks[tick] = array("q")
            heappush(self._tick_heap, tick)
        return bucket

    def _far_bucket(self, rotation: int) -> Handles:
        bucket = self._far.get(rotation)
        if bucket is None:
            bucket = self._far[rotation] = array("q")
            heappush(self._far_heap, rotation)
        return bucket

    def _place(self, due_ms: int) -> tuple[Key, Handles | None]:
        """Where a handle of this time would be added."""
        tick, rotation = due_ms // self._tick_ms, due_ms // self._rotation_ms
        if rotation < self.end or rotation in self._dense:
            return (False, tick), self._ticks.get(tick)
        return (True, rotation), self._far.get(rotation)

    # --- withdrawn -----------------------------------------------------------------------------

    def bury(self, task_id: int, due_ms: int) -> int:
        """Tombstone one handle; how many fewer handles there are (below 1: some had none)."""
        key, bucket = self._place(due_ms)
        if not bucket:
            return 0
        bucket.append(~task_id)
        bucket.append(due_ms)
        tombs = self._tombs[key] = self._tombs.get(key, 0) + 1
        full = tombs >= TOMBS_MIN and tombs * 2 * ENTRIES_PER_TOMB_MAX > len(bucket)
        if not full or key in self._moved:
            return 1
        is_far, number = key
        if is_far and len(bucket) > 2 * DENSE_PER_SLOT * self._slots:
            self._moved[key] = 0
            self._spreading.append(number)
            return 1
        kept, unmatched = compacted(bucket)
        (self._far if is_far else self._ticks)[number] = kept
        del self._tombs[key]
        return 1 - unmatched

    # --- onwards -------------------------------------------------------------------------------

    def first_tick(self) -> int | None:
        """The lowest tick that has a bucket."""
        heap, ticks = self._tick_heap, self._ticks
        while heap and heap[0] not in ticks:
            heappop(heap)
        return heap[0] if heap else None

    def first_far(self) -> int | None:
        """The lowest rotation that has a bucket."""
        heap, far = self._far_heap, self._far
        while heap and heap[0] not in far:
            heappop(heap)
        return heap[0] if heap else None

    def unopened(self, end: int) -> int:
        """The first tick that has a bucket, or may have behind the ring; ``end`` at most."""
        first = self.first_tick()
        tick = min(self.end * self._slots, end)
        return tick if first is None else min(first, tick)

    def take(self, tick: int, count: int) -> tuple[Handles, Handles, bool]:
        """The next ``count`` entries of a tick: (ids or tombstones, dues_ms, whether the last)."""
        key, bucket = (False, tick), self._ticks[tick]
        start = self._moved.get(key, 0)
        end = min(len(bucket), start + 2 * count)
        last = end == len(bucket)
        if last:
            del self._ticks[tick]
            self._moved.pop(key, None)
            self._tombs.pop(key, None)
        else:
            self._moved[key] = end
        return bucket[start:end:2], bucket[start + 1 : end : 2], last

    def enter(self, wanted_end: int, count: int) -> int:
        """One step towards ``end`` = ``wanted_end``: moves some handles (their number, or 1)."""
        if self.end in self._far:
            return self._scatter(self.end, count)
        first = self.first_far()
        self.end = wanted_end if first is None else min(wanted_end, first)
        if self._dense:
            self._dense = {rotation for rotation in self._dense if rotation >= self.end}
        return 1

    def spread(self, count: int) -> int:
        """One step of spreading dense rotations: how many handles it moved; 0: all is done."""
        while self._spreading:
            if self._spreading[0] in self._far:
                return self._scatter(self._spreading[0], count)
            del self._spreading[0]
        return 0

    @property
    def is_spreading(self) -> bool:
        return bool(self._spreading)

    def _scatter(self, rotation: int, count: int) -> int:
        """Move some handles of a rotation to their ticks; the last ones settle it."""
        key, bucket = (True, rotation), self._far[rotation]
        start = self._moved.get(key, 0)
        end = min(len(bucket), start + 2 * count)
        ticks, tick_ms, tombs = self._ticks, self._tick_ms, self._tombs
        for task_id, due_ms in zip(bucket[start:end:2], bucket[start + 1 : end : 2], strict=True):
            tick = due_ms // tick_ms
            into = ticks.get(tick) or self._tick_bucket(tick)
            into.append(task_id)
            into.append(due_ms)
            if task_id < 0:
                tombs[False, tick] = tombs.get((False, tick), 0) + 1
        if end < len(bucket):
            self._moved[key] = end
            return count
        del self._far[rotation]
        self._moved.pop(key, None)
        tombs.pop(key, None)
        if rotation == self.end:
            self.end += 1
        else:
            self._dense.add(rotation)
        return (end - start) // 2 or 1

    # --- questions -----------------------------------------------------------------------------

    def balance(self, task_id: int, due_ms: int) -> int:
        """Handles (task_id, due_ms) here, less tombstones for it; scans what could hold it."""
        total = 0
        tick, rotation = due_ms // self._tick_ms, due_ms // self._rotation_ms
        for key, bucket in (
            ((False, tick), self._ticks.get(tick)),
            ((True, rotation), self._far.get(rotation)),
        ):
            if bucket:
                total += balance(bucket, self._moved.get(key, 0), task_id, due_ms)
        return total

    def counts(self) -> Iterator[tuple[int, int]]:
        """(tick, handles) of the ticks that have a bucket."""
        for tick, bucket in self._ticks.items():
            key = (False, tick)
            entries = (len(bucket) - self._moved.get(key, 0)) // 2
            yield tick, max(0, entries - 2 * self._tombs.get(key, 0))

    @property
    def memory_bytes(self) -> int:
        """About what all of it occupies."""
        buckets = [*self._ticks.values(), *self._far.values()]
        return sum(bucket.__sizeof__() for bucket in buckets) + len(buckets) * ENTRY_BYTES
