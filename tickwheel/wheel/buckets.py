"""Containers of the timing wheel: flat arrays of handles, buckets of single milliseconds, the ring
of slots with the later rotations, and queues of ids (``IdQueue``). Ready tasks also wait in queues
of ids, so that a backlog of ten million tasks takes 80 MB.

A *handle* is (id, due_ms); a flat bucket is an ``array("q")`` of id, due, id, due, … with 16 bytes
per handle. A tombstone (~id, due) after a handle in the same bucket withdraws that handle. Ids are
not negative, so a negative entry is a tombstone.

``Near`` holds handles that were taken out of flat buckets shortly before they are due: one array of
ids for each distinct millisecond, and a heap of these milliseconds. ``Ring`` holds the flat buckets
of ticks and rotations. This module does not know the time.

Invariants:

* A tombstone follows its handle, in the same bucket or in one that is opened later. A bucket is
  a multiset, so a tombstone can withdraw any of several equal handles.
* A tombstone without a handle has no effect and is dropped with its millisecond.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from itertools import chain, islice
from typing import TypeAlias

SMALL = 64
"""Maximum number of ids in a millisecond's bucket that is searched; larger buckets are indexed."""
SPENT_MIN = 4096
"""Minimum number of fired ids for which memory is freed before their bucket is empty."""
ENTRY_BYTES = 140
"""Approximate bytes of a bucket in addition to its array: dict entry, key and heap entry."""
QUEUE_SPENT_MIN = 512
"""Minimum number of spent entries whose memory is freed."""
HEADROOM_MIN = 16

Handles: TypeAlias = "array[int]"


def compacted(bucket: Handles) -> Handles:
    """Return the bucket without tombstones and their handles, in order.

    Tombstones without a handle in this bucket stay, at the front, because their handles may already
    be in ``Near``.
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
    # Return a slice, because a slice is allocated with its exact size.
    return kept[:]


def balance(bucket: Handles, start: int, task_id: int, due_ms: int) -> int:
    """Return the number of handles (task_id, due_ms) minus their tombstones, from ``start`` on."""
    tomb = ~task_id
    return sum(
        1 if entry == task_id else -1
        for entry, due in zip(bucket[start::2], bucket[start + 1 :: 2], strict=True)
        if due == due_ms and entry in (task_id, tomb)
    )


class Near:
    """Ids by due millisecond, the lowest first, and in order of arrival within a millisecond."""

    __slots__ = ("_buckets", "_counted", "_counted_due_ms", "_dead", "_heap", "_spent", "unmatched")

    def __init__(self) -> None:
        self._buckets: dict[int, array[int]] = {}
        self._heap: list[int] = []
        self._spent: dict[int, int] = {}
        """Due time → number of ids taken from the front of its bucket."""
        self._dead: dict[int, dict[int, int]] = {}
        """Due time → id → tombstones, for buckets that are too large to search."""
        self._counted_due_ms: int | None = None
        self._counted: Counter[int] = Counter()
        """Id → number of handles in one large bucket. ``count`` fills it on demand."""
        self.unmatched = 0
        """Number of tombstones without a handle since the owner last set this to 0."""

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
        """Return the lowest millisecond that has ids, or None if there are no ids."""
        heap, buckets = self._heap, self._buckets
        while heap:
            if heap[0] in buckets:
                return heap[0]
            heappop(heap)
        return None

    def take(self, last_ms: int, limit: int, work: int, ids: list[int], dues_ms: list[int]) -> int:
        """Append handles due by ``last_ms`` to both lists, until ``ids`` has ``limit`` entries.

        Stop after ``work`` withdrawn entries. Return the number of withdrawn entries.
        """
        heap, buckets, spent, dead = self._heap, self._buckets, self._spent, self._dead
        work_left = work
        while heap and work_left > 0:
            due_ms = heap[0]
            if due_ms > last_ms or len(ids) >= limit:
                break
            bucket = buckets.get(due_ms)
            if bucket is None:
                heappop(heap)
            elif due_ms in spent or due_ms in dead or len(ids) + len(bucket) > limit:
                work_left -= self._take_part(
                    due_ms, bucket, limit - len(ids), work_left, ids, dues_ms
                )
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
        return work - work_left

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
        """Remove one handle with this id and time. Return False if there is certainly none."""
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
        """Return how many handles with this id and time are in ``Near`` and not withdrawn.

        The counts of a large bucket are cached, and updated while ids are taken from it, so that
        repeated calls during a burst do not each scan a million ids.
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
        """Yield (due_ms, number of live ids) of every bucket."""
        for due_ms, bucket in self._buckets.items():
            dead = sum(self._dead.get(due_ms, {}).values())
            yield due_ms, len(bucket) - self._spent.get(due_ms, 0) - dead

    @property
    def memory_bytes(self) -> int:
        arrays = sum(bucket.__sizeof__() for bucket in self._buckets.values())
        dead = sum(map(len, self._dead.values()))
        return arrays + len(self._buckets) * ENTRY_BYTES + dead * ENTRY_BYTES


class IdQueue:
    """A first-in, first-out queue of ids, which take eight bytes each. ``push_front`` puts ids back
    at the front. Duplicates are allowed.

    Invariants: ``_ids[:_head]`` is spent and never read; the entries after it are queued, in order.
    Memory is freed when more than half of the entries are spent, so that each id is moved a bounded
    number of times.
    """

    __slots__ = ("_head", "_ids")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("q", ids)
        self._head = 0

    def __len__(self) -> int:
        return len(self._ids) - self._head

    def push(self, task_id: int) -> None:
        self._ids.append(task_id)

    def extend(self, ids: Iterable[int] | IdQueue) -> None:
        """Append all ``ids``. An ``array("q")`` or another queue is copied as one block."""
        self._ids.extend(ids._ids[ids._head :] if isinstance(ids, IdQueue) else ids)

    def push_front(self, ids: Iterable[int]) -> None:
        """Insert ``ids`` at the front, in their order."""
        block = array("q", ids)
        head, count = self._head, len(block)
        if head < count:
            # Reserve an eighth more, so that ids that are put back one by one rarely move the
            # whole queue.
            room = max(count, HEADROOM_MIN, len(self) >> 3)
            self._ids[:head] = array("q", bytes(8 * room))
            head = room
        self._ids[head - count : head] = block
        self._head = head - count

    def take(self, limit: int) -> list[int]:
        """Remove up to ``limit`` ids from the front and return them."""
        if limit <= 0:
            return []
        ids, head = self._ids, self._head
        front_ids = ids[head : head + limit].tolist()
        head += len(front_ids)
        if head == len(ids):
            self._ids, head = array("q"), 0
        elif head > QUEUE_SPENT_MIN and head * 2 > len(ids):
            del ids[:head]
            head = 0
        self._head = head
        return front_ids

    def peek(self, limit: int) -> list[int]:
        """Return up to ``limit`` ids from the front without removing them."""
        return self._ids[self._head : self._head + max(0, limit)].tolist()

    def thin(self, left: dict[int, int], places: Sequence[int]) -> list[int]:
        """Drop the first ``left[id]`` entries of each id, and count ``left[id]`` down. Return the
        new indexes of the entries at ``places``, which must be ascending."""
        ids, remaining, moved = self._ids[self._head :], array("q"), []
        begin = 0
        for place in (*places, len(ids)):
            for task_id in ids[begin:place]:
                count = left.get(task_id)
                if count is None:
                    remaining.append(task_id)
                elif count == 1:
                    del left[task_id]
                else:
                    left[task_id] = count - 1
            moved.append(len(remaining))
            begin = place
        self._ids, self._head = remaining, 0
        return moved[:-1]

    @property
    def memory_bytes(self) -> int:
        return self._ids.__sizeof__()


# --- the ring of slots ----------------------------------------------------------------------------

TOMBS_MIN = 32
"""Minimum number of tombstones at which a bucket is compacted."""
ENTRIES_PER_TOMB_MAX = 5
"""A bucket is compacted when at least every fifth entry is a tombstone."""
DENSE_PER_SLOT = 64
CHUNK_ENTRIES = 1024  # of a rotation: 512 handles, 8 KiB

Counts = dict[int, int]
"""Tick → number of handles."""
Key = tuple[bool, int]
"""The key of a bucket: (whether it is that of a rotation, number of the rotation or tick)."""


class Ring:
    """The flat buckets of ticks and rotations. Handles move from rotations to ticks and from ticks
    to the caller.

    A slot of the ring contains two ticks, one of the current and one of the next rotation. The ring
    is sparse: a dict from tick to bucket, and a heap of the ticks that have a bucket. Ticks before
    the position (if the clock was set back) are treated alike. A later rotation has one bucket,
    which ``enter`` distributes over ticks in steps shortly before the rotation begins. The bucket
    is a list of chunks of equal size, because hundreds of arrays that grow in parallel fragment the
    heap (measured: 22.7 bytes of memory per handle instead of 17.8).

    Invariants:

    * ``end`` is the first rotation that is not in the ring; ``_far`` has no bucket of a lower
      rotation.
    * A bucket is emptied from the front while new handles are appended, so equal due times stay in
      order of arrival. New handles go directly to a tick only once its rotation's bucket is empty.
    * ``_far`` holds a rotation's open chunk, ``_full`` its earlier chunks of CHUNK_ENTRIES.
    * Compaction is the only step that cannot be divided. It takes about 0.2 µs per handle of a
      tick, or of a rotation with at most ``DENSE_PER_SLOT`` handles per slot. The handles of a
      larger rotation are distributed early instead.
    """

    __slots__ = (
        "_dense",
        "_far",
        "_far_heap",
        "_full",
        "_moved",
        "_rotation_ms",
        "_scattering",
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
        self._full: dict[int, deque[Handles]] = {}
        self._dense: set[int] = set()
        """Later rotations whose handles are already in buckets of ticks."""
        self._spreading: list[int] = []
        """Rotations whose handles are being moved to ticks, and which then become ``_dense``."""
        self._scattering: set[int] = set()
        """Rotations of which some handles have been moved to ticks."""
        self._moved: dict[int, int] = {}
        """Tick → number of entries taken from the front of its bucket."""
        self._tombs: dict[Key, int] = {}
        """Bucket → number of tombstones."""

    # --- insertion -----------------------------------------------------------------------------

    def add(self, task_id: int, due_ms: int) -> None:
        rotation = due_ms // self._rotation_ms
        if rotation < self.end or rotation in self._dense:
            tick = due_ms // self._tick_ms
            bucket = self._ticks.get(tick) or self._tick_bucket(tick)
        else:
            bucket = self._far_chunk(rotation)
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
        """Add handles with times outside [low_ms, high_ms); pass the others to ``otherwise``."""
        tick_ms, rotation_ms, dense = self._tick_ms, self._rotation_ms, self._dense
        ticks, far, end_ms = self._ticks, self._far.get, self.end * self._rotation_ms
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            if due_ms >= end_ms and (rotation := due_ms // rotation_ms) not in dense:
                bucket = far(rotation)
                if bucket is None or len(bucket) >= CHUNK_ENTRIES:
                    bucket = self._far_chunk(rotation)
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

    def _far_chunk(self, rotation: int) -> Handles:
        """Return the open chunk of a rotation, which has room."""
        chunk = self._far.get(rotation)
        if chunk is None:
            heappush(self._far_heap, rotation)
        elif len(chunk) < CHUNK_ENTRIES:
            return chunk
        else:
            self._full.setdefault(rotation, deque()).append(chunk)
        chunk = self._far[rotation] = array("q")
        return chunk

    def _chunks(self, rotation: int) -> Iterator[Handles]:
        yield from self._full.get(rotation, ())
        if rotation in self._far:
            yield self._far[rotation]

    # --- withdrawal ----------------------------------------------------------------------------

    def has(self, tick: int) -> bool:
        return tick in self._ticks

    def cancel(self, task_id: int, due_ms: int) -> bool:
        """Add a tombstone for one handle. Return False if no bucket can contain that handle."""
        tick, rotation = due_ms // self._tick_ms, due_ms // self._rotation_ms
        is_far = rotation >= self.end and rotation not in self._dense
        if is_far:
            if rotation not in self._far:
                return False
            bucket = self._far_chunk(rotation)
        elif tick in self._ticks:
            bucket = self._ticks[tick]
        else:
            return False
        bucket.append(~task_id)
        bucket.append(due_ms)
        self._buried((is_far, rotation if is_far else tick), 1)
        return True

    def cancel_many(self, ids: Sequence[int], dues_ms: Sequence[int]) -> int:
        """Add a tombstone for each of many handles, as ``cancel`` does. Return how many were
        added."""
        rotation_ms, dense, end, far = self._rotation_ms, self._dense, self.end, self._far
        added: dict[int, int] = {}
        count = 0
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            rotation = due_ms // rotation_ms
            chunk = far.get(rotation)
            if rotation < end or rotation in dense or chunk is None:
                count += self.cancel(task_id, due_ms)
                continue
            if len(chunk) >= CHUNK_ENTRIES:
                chunk = self._far_chunk(rotation)
            chunk.append(~task_id)
            chunk.append(due_ms)
            added[rotation] = added.get(rotation, 0) + 1
        for rotation, tombs in added.items():
            count += tombs
            self._buried((True, rotation), tombs)
        return count

    def _buried(self, key: Key, added: int) -> None:
        """Count new tombstones of a bucket, and compact the bucket if it has too many."""
        is_far, number = key
        tombs = self._tombs[key] = self._tombs.get(key, 0) + added
        if is_far:
            entries = len(self._full.get(number, ())) * CHUNK_ENTRIES + len(self._far[number])
            busy = number in self._scattering
        else:
            entries, busy = len(self._ticks[number]), number in self._moved
        if not busy and tombs >= TOMBS_MIN and tombs * 2 * ENTRIES_PER_TOMB_MAX > entries:
            self._compact(key, entries)

    def _compact(self, key: Key, entries: int) -> None:
        """Drop the tombstones of a bucket with their handles."""
        is_far, number = key
        if not is_far:
            self._ticks[number] = compacted(self._ticks[number])
        elif entries > 2 * DENSE_PER_SLOT * self._slots:
            self._scattering.add(number)
            self._spreading.append(number)
            return
        else:
            live = array("q")
            for chunk in self._chunks(number):
                live.extend(chunk)
            live = compacted(live)
            starts = range(0, len(live), CHUNK_ENTRIES)
            chunks = deque(live[at : at + CHUNK_ENTRIES] for at in starts)
            self._far[number] = chunks.pop() if chunks else array("q")
            self._full[number] = chunks
        # Do not count the remaining tombstones, so that they do not trigger the next compaction.
        del self._tombs[key]

    # --- movement towards ``Near`` -------------------------------------------------------------

    def first_tick(self) -> int | None:
        """Return the lowest tick that has a bucket, or None."""
        heap, ticks = self._tick_heap, self._ticks
        while heap and heap[0] not in ticks:
            heappop(heap)
        return heap[0] if heap else None

    def first_ms_in(self, tick: int) -> int:
        """Return the lowest due time in the bucket of a tick, including withdrawn handles, or the
        start of the tick if the bucket is empty."""
        dues_ms = self._ticks[tick][self._moved.get(tick, 0) + 1 :: 2]
        return min(dues_ms, default=tick * self._tick_ms)

    def first_far(self) -> int | None:
        """Return the lowest rotation that has a bucket, or None."""
        heap, far = self._far_heap, self._far
        while heap and heap[0] not in far:
            heappop(heap)
        return heap[0] if heap else None

    def unopened(self, end: int) -> int:
        """Return the first tick that has a bucket, or the first tick after the ring; at most
        ``end``."""
        first = self.first_tick()
        tick = min(self.end * self._slots, end)
        return tick if first is None else min(first, tick)

    def take(self, tick: int, count: int) -> tuple[Handles, Handles, bool]:
        """Take up to ``count`` entries of a tick. Return (ids or tombstones, dues_ms, whether the
        tick is now empty)."""
        bucket, key = self._ticks[tick], (False, tick)
        start = self._moved.get(tick, 0)
        end = min(len(bucket), start + 2 * count)
        last = end == len(bucket)
        if last:
            del self._ticks[tick]
            self._moved.pop(tick, None)
            self._tombs.pop(key, None)
        else:
            self._moved[tick] = end
        ids = bucket[start:end:2]
        if key in self._tombs:
            self._tombs[key] -= sum(1 for task_id in ids if task_id < 0)
        return ids, bucket[start + 1 : end : 2], last

    def enter(self, wanted_end: int, count: int) -> int:
        """Do one step of moving ``end`` to ``wanted_end``. Return the number of handles moved, at
        least 1."""
        if self.end in self._far:
            return self._scatter(self.end, count)
        first = self.first_far()
        self.end = wanted_end if first is None else min(wanted_end, first)
        if self._dense:
            self._dense = {rotation for rotation in self._dense if rotation >= self.end}
        return 1

    def spread(self, count: int) -> int:
        """Do one step of spreading dense rotations. Return the number of handles moved, or 0 if
        there is nothing left to do."""
        while self._spreading:
            if self._spreading[0] in self._far:
                return self._scatter(self._spreading[0], count)
            del self._spreading[0]
        return 0

    @property
    def is_spreading(self) -> bool:
        return bool(self._spreading)

    def _scatter(self, rotation: int, count: int) -> int:
        """Move at least ``count`` handles of a rotation to ticks, in whole chunks. The rotation
        enters the ring, or becomes dense, with its last chunk."""
        full, moved = self._full.get(rotation), 0
        self._scattering.add(rotation)
        while full and moved < count:
            moved += self._to_ticks(full.popleft())
        if full or moved >= count:
            return moved
        moved += self._to_ticks(self._far.pop(rotation))
        self._full.pop(rotation, None)
        self._scattering.discard(rotation)
        self._tombs.pop((True, rotation), None)
        if rotation == self.end:
            self.end += 1
        else:
            self._dense.add(rotation)
        return moved or 1

    def _to_ticks(self, chunk: Handles) -> int:
        ticks, tick_ms, tombs = self._ticks, self._tick_ms, self._tombs
        for task_id, due_ms in zip(chunk[::2], chunk[1::2], strict=True):
            tick = due_ms // tick_ms
            bucket = ticks.get(tick) or self._tick_bucket(tick)
            bucket.append(task_id)
            bucket.append(due_ms)
            if task_id < 0:
                tombs[False, tick] = tombs.get((False, tick), 0) + 1
        return len(chunk) // 2

    # --- queries -------------------------------------------------------------------------------

    def balance(self, task_id: int, due_ms: int) -> int:
        """Return the number of handles (task_id, due_ms) minus their tombstones. All buckets that
        can contain them are scanned."""
        tick, rotation = due_ms // self._tick_ms, due_ms // self._rotation_ms
        total = sum(balance(chunk, 0, task_id, due_ms) for chunk in self._chunks(rotation))
        if tick in self._ticks:
            total += balance(self._ticks[tick], self._moved.get(tick, 0), task_id, due_ms)
        return total

    def counts(self) -> Iterator[tuple[int, int]]:
        """Yield (tick, handles minus withdrawn handles) of the ticks that have a bucket."""
        for tick, bucket in self._ticks.items():
            entries = (len(bucket) - self._moved.get(tick, 0)) // 2
            yield tick, entries - 2 * self._tombs.get((False, tick), 0)

    def counts_between(
        self, first: int, end: int, sample_max: int, without: AbstractSet[int] = frozenset()
    ) -> tuple[Counts, bool]:
        """Return (tick → number of handles, whether all numbers are exact) for the ticks from
        ``first`` up to but excluding ``end``. A later rotation with more than ``sample_max``
        handles is estimated from a sample of about that size. Rotations in ``without`` are left
        out."""
        ticks = self._ticks
        near: Iterable[int] = range(first, end)
        if first >= self.end * self._slots and not self._dense and not self._scattering:
            near = ()
        elif end - first > len(ticks):
            near = [tick for tick in ticks if first <= tick < end]
        counts: Counts = {}
        for tick in near:
            if (bucket := ticks.get(tick)) is not None:
                entries = (len(bucket) - self._moved.get(tick, 0)) // 2
                counts[tick] = entries - 2 * self._tombs.get((False, tick), 0)
        exact = True
        for rotation in set(self.rotations_between(first, end)) - without:
            stride = -(-self.handles_in(rotation) // sample_max)
            exact &= stride <= 1
            self._sample(rotation, max(1, stride), first, end, counts)
        return counts, exact

    def rotations_between(self, first: int, end: int) -> list[int]:
        """Return the later rotations that have a bucket and overlap the ticks from ``first`` up to
        but excluding ``end``."""
        low, high = first // self._slots, (end - 1) // self._slots
        if high - low < len(self._far):
            return [r for r in range(low, high + 1) if r in self._far]
        return sorted(r for r in self._far if low <= r <= high)

    def handles_in(self, rotation: int) -> int:
        """Return the number of handles and tombstones of a later rotation."""
        return (len(self._full.get(rotation, ())) * CHUNK_ENTRIES + len(self._far[rotation])) // 2

    def live_in(self, rotation: int) -> int:
        """Return how many handles of a later rotation are not withdrawn."""
        return self.handles_in(rotation) - 2 * self._tombs.get((True, rotation), 0)

    def _sample(self, rotation: int, stride: int, first: int, end: int, counts: Counts) -> None:
        """Add estimates to ``counts``, in which every ``stride``-th handle counts ``stride``
        times."""
        tick_ms, get = self._tick_ms, counts.get
        within = min(stride, CHUNK_ENTRIES // 2)
        for chunk in islice(self._chunks(rotation), 0, None, stride // within):
            step = 2 * within
            for task_id, due_ms in zip(chunk[::step], chunk[1::step], strict=True):
                if first <= (tick := due_ms // tick_ms) < end:
                    counts[tick] = get(tick, 0) + (stride if task_id >= 0 else -stride)

    @property
    def memory_bytes(self) -> int:
        """Approximate size of all buckets in memory, in bytes."""
        full = chain.from_iterable(self._full.values())
        buckets = [*self._ticks.values(), *self._far.values(), *full]
        return sum(bucket.__sizeof__() for bucket in buckets) + len(buckets) * ENTRY_BYTES
