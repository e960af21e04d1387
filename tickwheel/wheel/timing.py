"""The timing wheel: which handles are due, at O(1) an insert and O(1) a task that fires.

A hashed timing wheel after Varghese and Lauck, "Hashed and Hierarchical Timing Wheels"
(SOSP 1987), schemes 6 and 7: a tick is ``due_ms // tick_ms``, its slot ``tick % slots``, and a
task whose slot comes round n times before its turn has cycle-num n. In scheme 6 every turn of
a slot visits the tasks of later rotations too, to decrement their cycle-num; here a rotation is
the key of its own flat array, so that such tasks are not touched before their time.

A handle (id, due_ms) passes through up to four places, each coarser than the next:

=========  ==========================  ===================================================
far        rotation → flat bucket      rotations after the next one
ring       tick → flat bucket          the current and the next rotation: two ticks a slot,
                                       kept sparse. Ticks that lie behind the position
                                       because the clock went back are here too
near       millisecond → ids           the current and the next tick (``Near``)
fired      –                           returned by ``advance``
=========  ==========================  ===================================================

Example: slots=4, tick_ms=10, now_ms=0, so a rotation is 40 ms. ``add`` of four tasks:

    A due 5: tick 0, slot 0      B due 23: tick 2, slot 2      C due 21: tick 2, slot 2
    D due 103: tick 10, slot 2, cycle-num 2: rotation 2 is neither 0 nor 1, so it goes to far

    advance(0)    opens tick 0 (A → near) and, ahead of its time, tick 1 (empty). Nothing due.
                  Next due: 5, exact.
    advance(5)    fires A. Next to do: at 10, when tick 2 is opened ahead.
    advance(10)   opens tick 2: near holds 21: [C], 23: [B]. Next due: 21, exact.
    advance(24)   fires C, B: by due time, although B came first. Next to do: at 40, when
                  rotation 1 begins and rotation 2 has to be in the ring.
    advance(40)   moves D from far to the ring, at tick 10. Next to do: at 90.
    advance(90)   opens tick 10 ahead. Next due: 103, exact.
    advance(102)  fires nothing.     advance(103)  fires D.

Time is an argument. The wheel runs nothing, and must not know what an id stands for.

Invariants:

* ``advance(now_ms)`` returns nothing with due_ms > now_ms, whatever ``now_ms`` was before.
* Every handle with due_ms ≤ ``position_ms`` has fired, but for those that ``holds`` confirms.
  The position never goes back; in an unfinished burst it is the due_ms fired last.
* A millisecond fires only when nothing with a lower due_ms is left in any place.
* All handles of one (id, due_ms) are in one place; a bucket is emptied front to back while
  new handles join its end, so equal due times stay in order of arrival.
* One ``advance`` moves at most WORK_MAX handles between places, however large a bucket is. An
  operation that cannot be cut is the compaction of one bucket in ``orphan``: about 0.15 µs a
  handle of that rotation (at most DENSE_PER_SLOT a slot) or of that tick.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush

from tickwheel.wheel.buckets import ENTRY_BYTES, Handles, Near, balance, compacted
from tickwheel.wheel.idqueue import IdQueue

WORK_MAX = 32_768
"""Handles that one ``advance`` moves at most when something is due (about 5 ms)."""
AHEAD_MAX = 4_096
"""Handles that one ``advance`` moves at most ahead of their time (under 1 ms)."""
PACE_MS = 2
"""Pause between two steps of work ahead, so that it takes a part of the loop only."""
TOMBS_MIN = 32
DENSE_PER_SLOT = 64
"""A far rotation with more handles is spread over ticks when it would be compacted."""
TIME_MS_MAX = 2**62


class TimingWheel:
    """Handles of int64 ids (not negative) and due times in ms."""

    __slots__ = (
        "_closed",
        "_dense",
        "_far",
        "_far_heap",
        "_live",
        "_low",
        "_moved",
        "_near",
        "_opened_end",
        "_ring_end",
        "_rotation_ms",
        "_spreading",
        "_tick_heap",
        "_tombs",
        "_upcoming",
        "position_ms",
        "slots",
        "tick_ms",
    )

    def __init__(self, now_ms: int, *, slots: int = 3600, tick_ms: int = 1000) -> None:
        if slots < 1 or tick_ms < 1:
            raise ValueError(f"slots {slots} and tick_ms {tick_ms} must be at least 1")
        self.slots, self.tick_ms = slots, tick_ms
        self.position_ms = now_ms
        now_tick = now_ms // tick_ms
        self._rotation_ms = slots * tick_ms
        self._live = 0
        self._near = Near()
        self._low = now_tick - 1
        """New handles of ticks from here to ``_opened_end`` go to near at once."""
        self._opened_end = now_tick
        """Ticks below it have been opened."""
        self._ring_end = now_tick // slots + 2
        """Rotations below it are in the ring."""
        self._closed: dict[int, Handles] = {}
        """tick → bucket: the ring."""
        self._tick_heap: list[int] = []
        self._far: dict[int, Handles] = {}
        """rotation → bucket."""
        self._far_heap: list[int] = []
        self._dense: set[int] = set()
        """Rotations at or after ``_ring_end`` whose handles are kept by tick."""
        self._spreading: list[int] = []
        """Rotations on their way to ``_dense``."""
        self._moved: dict[tuple[bool, int], int] = {}
        """(is far, key) → entries at the front of a bucket that moved on already."""
        self._tombs: dict[tuple[bool, int], int] = {}
        """(is far, key) → tombstones in a bucket."""
        self._upcoming = IdQueue()

    # --- in and out --------------------------------------------------------------------------

    def add(self, task_id: int, due_ms: int) -> None:
        """Insert one handle."""
        if task_id < 0 or due_ms > TIME_MS_MAX:
            raise ValueError(f"no handle: id {task_id}, due_ms {due_ms}")
        tick = due_ms // self.tick_ms
        if self._low <= tick < self._opened_end:
            self._near.push(task_id, due_ms)
        else:
            rotation = tick // self.slots
            if rotation < self._ring_end or rotation in self._dense:
                bucket = self._closed.get(tick) or self._tick_bucket(tick)
            else:
                bucket = self._far.get(rotation) or self._far_bucket(rotation)
            bucket.append(task_id)
            bucket.append(due_ms)
        self._live += 1

    def add_many(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """Insert handles, ``dues_ms[i]`` for ``ids[i]``."""
        if len(ids) != len(dues_ms):
            raise ValueError(f"{len(ids)} ids with {len(dues_ms)} due times")
        if not ids:
            return
        first_ms, last_ms = min(dues_ms), max(dues_ms)
        if min(ids) < 0 or last_ms > TIME_MS_MAX:
            raise ValueError(f"no handles: lowest id {min(ids)}, last due_ms {last_ms}")
        low_ms, opened_end_ms = self._low * self.tick_ms, self._opened_end * self.tick_ms
        if first_ms == last_ms and low_ms <= first_ms < opened_end_ms:
            self._near.push_block(array("q", ids), first_ms)
        elif low_ms <= first_ms and last_ms < opened_end_ms:
            self._near.push_pairs(ids, dues_ms)
        else:
            self._spread(ids, dues_ms)
        self._live += len(ids)

    def _spread(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        tick_ms, rotation_ms, dense = self.tick_ms, self._rotation_ms, self._dense
        closed, far = self._closed, self._far
        low_ms, opened_end_ms = self._low * tick_ms, self._opened_end * tick_ms
        ring_end_ms = self._ring_end * rotation_ms
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            if due_ms >= ring_end_ms and (rotation := due_ms // rotation_ms) not in dense:
                bucket = far.get(rotation) or self._far_bucket(rotation)
            elif low_ms <= due_ms < opened_end_ms:
                self._near.push(task_id, due_ms)
                continue
            else:
                tick = due_ms // tick_ms
                bucket = closed.get(tick) or self._tick_bucket(tick)
            bucket.append(task_id)
            bucket.append(due_ms)

    def _tick_bucket(self, tick: int) -> Handles:
        bucket = self._closed.get(tick)
        if bucket is None:
            bucket = self._closed[tick] = array("q")
            heappush(self._tick_heap, tick)
        return bucket

    def _far_bucket(self, rotation: int) -> Handles:
        bucket = self._far.get(rotation)
        if bucket is None:
            bucket = self._far[rotation] = array("q")
            heappush(self._far_heap, rotation)
        return bucket

    def orphan(self, task_id: int, due_ms: int) -> None:
        """Withdraw one handle that was added with exactly this id and time and has not fired."""
        tick = due_ms // self.tick_ms
        rotation = tick // self.slots
        if tick < self._opened_end and self._near.remove(task_id, due_ms):
            self._live -= 1
            return
        if self._low <= tick < self._opened_end:
            return
        is_far = rotation >= self._ring_end and rotation not in self._dense
        key = (is_far, rotation if is_far else tick)
        bucket = (self._far if is_far else self._closed).get(key[1])
        if not bucket:
            return
        bucket.append(~task_id)
        bucket.append(due_ms)
        self._live -= 1
        tombs = self._tombs[key] = self._tombs.get(key, 0) + 1
        if tombs >= TOMBS_MIN and tombs * 10 > len(bucket) and key not in self._moved:
            self._compact(key, bucket)

    def _compact(self, key: tuple[bool, int], bucket: Handles) -> None:
        """A fifth of the entries are tombstones: drop them, at amortised O(1) an orphan."""
        is_far, number = key
        if is_far and len(bucket) > 2 * DENSE_PER_SLOT * self.slots:
            self._moved[key] = 0
            self._spreading.append(number)
            return
        kept, unmatched = compacted(bucket)
        (self._far if is_far else self._closed)[number] = kept
        del self._tombs[key]
        self._live += unmatched

    # --- time ----------------------------------------------------------------------------------

    def advance(self, now_ms: int, limit: int) -> tuple[list[int], list[int], bool]:
        """Up to ``limit`` due handles by due time: (ids, dues_ms, whether more are due).

        After a burst or a jump it may return fewer, even none, with more to come: then this
        call went into moving handles, and the next one goes on.
        """
        near, now_tick = self._near, now_ms // self.tick_ms
        ids: list[int] = []
        dues_ms: list[int] = []
        work, more = WORK_MAX, True
        while work > 0:
            tick = self._next_closed(now_tick + 1)
            first_ms = near.first_ms()
            if first_ms is not None and first_ms <= now_ms and first_ms < tick * self.tick_ms:
                if len(ids) >= limit:
                    break
                fired, due_ms, used = near.take(min(limit - len(ids), work))
                ids += fired
                dues_ms += [due_ms] * len(fired)
                # What fires is bounded by the limit; only tombstones count as work.
                work -= used - len(fired)
            elif tick <= now_tick:
                work -= self._open(tick, now_tick)
            else:
                more = False
                break
        self._live += near.unmatched - len(ids)
        near.unmatched = 0
        if not more:
            self._move_to(now_ms)
            self._work_ahead(now_tick)
        elif dues_ms:
            self._move_to(dues_ms[-1])
        return ids, dues_ms, more

    def _move_to(self, position_ms: int) -> None:
        if position_ms > self.position_ms:
            self.position_ms = position_ms
            self._low = position_ms // self.tick_ms - 1

    def _next_closed(self, end: int) -> int:
        """The first tick that has something unopened, or may have; at most ``end``."""
        heap, closed = self._tick_heap, self._closed
        while heap and heap[0] not in closed:
            heappop(heap)
        tick = min(self._ring_end * self.slots, end)
        return min(heap[0], tick) if heap else tick

    def _open(self, tick: int, now_tick: int) -> int:
        """One step towards having ``tick`` in near; how many handles it moved, or 1."""
        bucket = self._closed.get(tick)
        if tick >= self._ring_end * self.slots:
            return self._enter_ring(now_tick // self.slots + 2, AHEAD_MAX)
        if bucket is None:
            raise AssertionError(f"tick {tick} has no bucket")
        key = (False, tick)
        start = self._moved.get(key, 0)
        end = min(len(bucket), start + 2 * AHEAD_MAX)
        ids = bucket[start:end:2]
        self._near.push_pairs(ids, bucket[start + 1 : end : 2])
        if tick >= now_tick:
            self._upcoming.extend(ids if not self._tombs.get(key) else (i for i in ids if i >= 0))
        if end == len(bucket):
            del self._closed[tick]
            self._moved.pop(key, None)
            self._tombs.pop(key, None)
            if self._low <= tick:
                self._opened_end = max(self._opened_end, tick + 1)
        else:
            self._moved[key] = end
        return len(ids) or 1

    def _enter_ring(self, wanted_end: int, count: int) -> int:
        """One step towards ``_ring_end`` = ``wanted_end``; how many handles it moved, or 1."""
        rotation = self._ring_end
        if rotation in self._far:
            return self._scatter(rotation, count)
        self._dense.discard(rotation)
        first = self._first_far()
        self._ring_end = wanted_end if first is None else min(wanted_end, first)
        if self._ring_end == rotation:
            raise AssertionError(f"rotation {rotation} does not enter the ring")
        for passed in [r for r in self._dense if r < self._ring_end]:
            self._dense.discard(passed)
        return 1

    def _scatter(self, rotation: int, count: int) -> int:
        """Move some handles of a far rotation to their ticks; the last ones settle it."""
        key, bucket = (True, rotation), self._far[rotation]
        start = self._moved.get(key, 0)
        end = min(len(bucket), start + 2 * count)
        closed, tick_ms, tombs = self._closed, self.tick_ms, self._tombs
        for task_id, due_ms in zip(bucket[start:end:2], bucket[start + 1 : end : 2], strict=True):
            tick = due_ms // tick_ms
            ticks = closed.get(tick) or self._tick_bucket(tick)
            ticks.append(task_id)
            ticks.append(due_ms)
            if task_id < 0:
                tombs[False, tick] = tombs.get((False, tick), 0) + 1
        self._moved[key] = end
        if end == len(bucket):
            del self._far[rotation], self._moved[key]
            tombs.pop(key, None)
            if rotation == self._ring_end:
                self._ring_end += 1
            else:
                self._dense.add(rotation)
        return (end - start) // 2 or 1

    def _first_far(self) -> int | None:
        heap, far = self._far_heap, self._far
        while heap and heap[0] not in far:
            heappop(heap)
        return heap[0] if heap else None

    def _work_ahead(self, now_tick: int) -> None:
        """Everything due has fired: open the next tick, bring rotations nearer."""
        work, ring_end = AHEAD_MAX, now_tick // self.slots + 2
        while work > 0:
            tick = self._next_closed(now_tick + 2)
            if tick <= now_tick + 1:
                work -= self._open(tick, now_tick)
                continue
            self._opened_end = max(self._opened_end, now_tick + 2)
            if self._ring_end < ring_end:
                work -= self._enter_ring(ring_end, work)
            elif self._spreading:
                if self._spreading[0] in self._far:
                    work -= self._scatter(self._spreading[0], work)
                else:
                    del self._spreading[0]
            else:
                return

    def next_due_ms(self, now_ms: int) -> int | None:
        """When to call ``advance`` next, never later than the first due_ms; None when empty.

        Exact when that lies in the current or the next tick, as far as these are opened.
        """
        times = []
        soon_ms = now_ms + PACE_MS
        first_ms = self._near.first_ms()
        if first_ms is not None:
            times.append(first_ms)
        tick, rotation = self._next_closed(TIME_MS_MAX), self._first_far()
        if tick in self._closed:
            start_ms = tick * self.tick_ms
            times.append(min(start_ms, max(start_ms - self.tick_ms, soon_ms)))
        if rotation is not None:
            start_ms = rotation * self._rotation_ms
            times.append(min(start_ms, max(start_ms - self._rotation_ms, soon_ms)))
        if self._spreading or len(self._upcoming):
            times.append(soon_ms)
        return min(times, default=None)

    def take_upcoming(self, limit: int) -> list[int]:
        """Ids that come due in this tick or the next, each once, soon after it was opened.

        For reading bodies ahead. Handles that were added later than that are not among them,
        and some may have fired or been withdrawn meanwhile.
        """
        return self._upcoming.take(limit)

    # --- questions ---------------------------------------------------------------------------

    def holds(self, task_id: int, due_ms: int) -> bool:
        """Whether such a handle has neither fired nor been withdrawn.

        Quick for what is near, and for what has fired; else it scans one bucket.
        """
        if self._near.holds(task_id, due_ms):
            return True
        tick = due_ms // self.tick_ms
        rotation = tick // self.slots
        # All of it: what moved on and its tombstones behind it have to be set off together.
        for key, bucket in (
            ((False, tick), self._closed.get(tick)),
            ((True, rotation), self._far.get(rotation)),
        ):
            if bucket and balance(bucket, self._moved.get(key, 0), task_id, due_ms) > 0:
                return True
        return False

    def slot_of(self, due_ms: int) -> int:
        return due_ms // self.tick_ms % self.slots

    def cycles_left(self, due_ms: int, now_ms: int) -> int:
        """Cycle-num: how often the task's slot has its turn before the task's own turn."""
        return (due_ms // self.tick_ms - now_ms // self.tick_ms) // self.slots

    @property
    def current_slot(self) -> int:
        return self.slot_of(self.position_ms)

    def slot_counts(self) -> list[int]:
        """Handles in each slot, of the current and the next rotation."""
        counts = [0] * self.slots
        for due_ms, count in self._near.counts():
            counts[self.slot_of(due_ms)] += count
        for tick, bucket in self._closed.items():
            key = (False, tick)
            entries = (len(bucket) - self._moved.get(key, 0)) // 2
            counts[tick % self.slots] += max(0, entries - 2 * self._tombs.get(key, 0))
        return counts

    @property
    def memory_bytes(self) -> int:
        """About what the handles occupy."""
        flat = [*self._closed.values(), *self._far.values()]
        sizes = sum(bucket.__sizeof__() for bucket in flat) + len(flat) * ENTRY_BYTES
        return sizes + self._near.memory_bytes + self._upcoming.memory_bytes

    def __len__(self) -> int:
        """Handles that have neither fired nor been withdrawn."""
        return self._live
