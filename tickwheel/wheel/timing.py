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
fired      (gone)                      returned by ``advance``
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
  The position never goes back; in an unfinished burst it is the due_ms that fired last.
* A millisecond fires only when nothing with a lower due_ms is left in any place, and in order
  of arrival.
* One ``advance`` moves about WORK_MAX handles between places at most, however large a bucket
  is. What cannot be cut is the compaction of one bucket by ``cancel`` (see ``Ring``).

``Windows`` chooses for each task the tick of its due window that has the fewest. What ticks have is
asked of the wheel, a page of ticks at a time, and kept for ``KEPT_MS`` as a tree of minima, so that
a choice costs the logarithm of a page. A batch whose tasks share a window takes them from a heap
instead. What was chosen counts at once; until it is on the wheel its owner says it again whenever a
page is read anew (``placed``).

Decision 18 says why by tick and not by slot. Its invariants: a chosen moment is never before the
asked one and never after the end of its window; of ticks that have equally few the first is chosen;
the last tick counts when all of it lies in the window, or it is the only one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from heapq import heapify, heapreplace

from tickwheel.wheel.buckets import IdQueue, Near, Ring

WORK_MAX = 32_768
"""Handles that one ``advance`` moves at most when something is due (about 5 ms)."""
AHEAD_MAX = 4_096
"""Handles that one ``advance`` moves at most ahead of their time (under 1 ms)."""
PACE_MS = 2
"""Pause between two steps of work ahead, so that it takes only a part of the loop."""
TIME_MS_MAX = 2**62
SAMPLE_MAX = 4_096
"""Handles of a later rotation that are looked at to say how full its ticks are (under 1 ms)."""
LOAD_SAMPLE_MAX = 65_536
"""Handles of all later rotations together that ``load`` looks at (about 10 ms)."""


class TimingWheel:
    """The handles of tasks, by due time in ms; ids are int64 and not negative."""

    __slots__ = (
        "_live",
        "_low",
        "_near",
        "_opened_end",
        "_ring",
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
        self._live = 0
        self._near = Near()
        self._ring = Ring(slots, tick_ms, now_tick // slots + 2)
        self._low = now_tick - 1
        """Handles of ticks from here to ``_opened_end`` are near; new ones of lower ticks,
        which are rare, wait in the ring for being opened."""
        self._opened_end = now_tick
        self._upcoming = IdQueue()

    # --- in and out ----------------------------------------------------------------------------

    def add(self, task_id: int, due_ms: int) -> None:
        """Insert one handle."""
        if task_id < 0 or not -TIME_MS_MAX < due_ms < TIME_MS_MAX:
            raise ValueError(f"no handle: id {task_id}, due_ms {due_ms}")
        if self._low <= due_ms // self.tick_ms < self._opened_end:
            self._near.push(task_id, due_ms)
        else:
            self._ring.add(task_id, due_ms)
        self._live += 1

    def add_many(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """Insert handles, ``dues_ms[i]`` for ``ids[i]``."""
        if len(ids) != len(dues_ms):
            raise ValueError(f"{len(ids)} ids with {len(dues_ms)} due times")
        if not ids:
            return
        first_ms, last_ms = min(dues_ms), max(dues_ms)
        if min(ids) < 0 or not -TIME_MS_MAX < first_ms <= last_ms < TIME_MS_MAX:
            raise ValueError(f"no handles: lowest id {min(ids)}, due_ms {first_ms} to {last_ms}")
        low_ms, opened_end_ms = self._low * self.tick_ms, self._opened_end * self.tick_ms
        if first_ms < low_ms or last_ms >= opened_end_ms:
            self._ring.add_many(ids, dues_ms, low_ms, opened_end_ms, self._near.push)
        elif first_ms == last_ms:
            self._near.push_block(array("q", ids), first_ms)
        else:
            self._near.push_pairs(ids, dues_ms)
        self._live += len(ids)

    def cancel(self, task_id: int, due_ms: int) -> None:
        """Withdraw one handle that was added with exactly this id and time and has not fired.

        Of a handle that is not there, the caller must not say so: while its time is far away
        that is not noticed, and one that is added before then would be withdrawn instead.
        """
        tick = due_ms // self.tick_ms
        # A tick behind the position may be near in part, and have more of it in the ring: then
        # the tombstone has to stand behind all of that.
        is_near = tick < self._opened_end and (tick >= self._low or not self._ring.has(tick))
        where = self._near.remove if is_near else self._ring.cancel
        if where(task_id, due_ms):
            self._live -= 1

    def cancel_many(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """``cancel`` each handle of ``dues_ms[i]`` for ``ids[i]``."""
        if not ids:
            return
        if min(dues_ms) // self.tick_ms >= self._opened_end:
            self._live -= self._ring.cancel_many(ids, dues_ms)
            return
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            self.cancel(task_id, due_ms)

    # --- time ----------------------------------------------------------------------------------

    def advance(self, now_ms: int, limit: int) -> tuple[list[int], list[int], bool]:
        """Up to ``limit`` due handles by due time: (ids, dues_ms, whether more are due).

        After a jump, or with a great many handles in one tick, it may return few or none and
        say that there are more: the call went into moving handles, and the next one goes on.
        """
        near, ring, now_tick = self._near, self._ring, now_ms // self.tick_ms
        ids: list[int] = []
        dues_ms: list[int] = []
        work, more = WORK_MAX, True
        while work > 0:
            tick = ring.unopened(now_tick + 1)
            # What fires is bounded by the limit; withdrawn handles in between count as work.
            work -= near.take(min(now_ms, tick * self.tick_ms - 1), limit, work, ids, dues_ms)
            if len(ids) >= limit:
                more = self._is_due(tick, now_ms)
                break
            if tick > now_tick:
                more = work <= 0
                break
            work -= self._open(tick, now_tick)
        self._live += near.unmatched - len(ids)
        near.unmatched = 0
        if not more:
            self._move_to(now_ms)
            self._work_ahead(now_tick)
        elif dues_ms:
            self._move_to(dues_ms[-1])
        return ids, dues_ms, more

    def catch_up(self, now_ms: int) -> None:
        """Move the position to ``now_ms`` as ``advance`` does, unless there is something to fire or
        to open, which is left to ``advance``."""
        if not self._is_due(self._ring.unopened(now_ms // self.tick_ms + 1), now_ms):
            self._move_to(now_ms)

    def _is_due(self, unopened: int, now_ms: int) -> bool:
        first_ms = self._near.first_ms()
        return unopened * self.tick_ms <= now_ms or (first_ms is not None and first_ms <= now_ms)

    def _move_to(self, position_ms: int) -> None:
        if position_ms > self.position_ms:
            self.position_ms = position_ms
            self._low = position_ms // self.tick_ms - 1

    def _open(self, tick: int, now_tick: int) -> int:
        """One step towards having ``tick`` in near; how many handles it moved, or 1."""
        ring = self._ring
        if tick >= ring.end * self.slots:
            return ring.enter(now_tick // self.slots + 2, AHEAD_MAX)
        ids, dues_ms, last = ring.take(tick, AHEAD_MAX)
        self._near.push_pairs(ids, dues_ms)
        if tick >= now_tick:
            self._upcoming.extend(i for i in ids if i >= 0)
        if last and tick >= self._low:
            self._opened_end = max(self._opened_end, tick + 1)
        return len(ids) or 1

    def _work_ahead(self, now_tick: int) -> None:
        """Open the next tick and bring rotations nearer, after everything due has fired."""
        ring, work, wanted_end = self._ring, AHEAD_MAX, now_tick // self.slots + 2
        while work > 0:
            tick = ring.unopened(now_tick + 2)
            if tick < now_tick + 2:
                work -= self._open(tick, now_tick)
                continue
            self._opened_end = max(self._opened_end, tick)
            if ring.end < wanted_end:
                work -= ring.enter(wanted_end, work)
            elif ring.is_spreading:
                work -= ring.spread(work)
            else:
                return

    def next_due_ms(self, now_ms: int) -> int | None:
        """When to call ``advance`` next, never later than the first due_ms; None when empty.

        Exact when that lies in the current or the next tick, as far as these are opened.
        """
        times = self._work_times(now_ms)
        if (tick := self._ring.first_tick()) is not None:
            times.append(self._ahead_of(tick * self.tick_ms, self.tick_ms, now_ms))
        return min(times, default=None)

    def next_handle_ms(self, now_ms: int) -> int | None:
        """``next_due_ms`` for a caller that jumps to it: exact unless the first handle is in a
        rotation to come, without a stop before its tick to open that. Looks at a whole tick."""
        times = self._work_times(now_ms)
        if (tick := self._ring.first_tick()) is not None:
            times.append(self._ring.first_ms_in(tick))
        return min(times, default=None)

    def _work_times(self, now_ms: int) -> list[int]:
        """When there is something to do beside the opening of ticks."""
        first_ms, rotation = self._near.first_ms(), self._ring.first_far()
        times = [] if first_ms is None else [first_ms]
        if rotation is not None:
            length_ms = self.tick_ms * self.slots
            times.append(self._ahead_of(rotation * length_ms, length_ms, now_ms))
        if self._ring.is_spreading or len(self._upcoming):
            times.append(now_ms + PACE_MS)
        return times

    @staticmethod
    def _ahead_of(start_ms: int, length_ms: int, now_ms: int) -> int:
        """When to open what begins at ``start_ms``: its length before that, paced."""
        return min(start_ms, max(start_ms - length_ms, now_ms + PACE_MS))

    def _firsts(self) -> tuple[int | None, int | None]:
        return self._ring.first_tick(), self._ring.first_far()

    def first_ms(self) -> int | None:
        """The time before which no handle is due; None: there are none. Exact where it is near."""
        times = [] if (first_ms := self._near.first_ms()) is None else [first_ms]
        tick, rotation = self._firsts()
        for number, length_ms in ((tick, self.tick_ms), (rotation, self.tick_ms * self.slots)):
            if number is not None:
                times.append(number * length_ms)
        return min(times, default=None)

    def take_upcoming(self, limit: int) -> list[int]:
        """Ids that come due in this tick or the next, each once, soon after it was opened.

        For reading bodies ahead. Handles added later than that are not among them, and some
        may have fired or been withdrawn meanwhile.
        """
        return self._upcoming.take(limit)

    # --- questions -----------------------------------------------------------------------------

    def holds(self, task_id: int, due_ms: int) -> bool:
        """Whether such a handle has neither fired nor been withdrawn.

        Quick for what is near or has fired; otherwise it scans the handles of a tick or rotation.
        """
        # Summed, because a tombstone may still be in the ring when its handle is near already.
        return self._near.count(task_id, due_ms) + self._ring.balance(task_id, due_ms) > 0

    def slot_of(self, due_ms: int) -> int:
        return due_ms // self.tick_ms % self.slots

    def cycles_left(self, due_ms: int, now_ms: int) -> int:
        """Cycle-num: how often the task's slot has its turn before the task's own turn."""
        return (due_ms // self.tick_ms - now_ms // self.tick_ms) // self.slots

    @property
    def current_slot(self) -> int:
        return self.slot_of(self.position_ms)

    def slot_counts(self) -> list[int]:
        """Handles in each slot, of the current and the next rotation (and dense later ones).

        Those withdrawn from a rotation that is entering the ring just now are still counted.
        """
        counts = [0] * self.slots
        for due_ms, count in self._near.counts():
            counts[self.slot_of(due_ms)] += count
        for tick, count in self._ring.counts():
            counts[tick % self.slots] += count
        return [max(0, count) for count in counts]

    def counts_between(
        self, first: int, end: int, sample_max: int = SAMPLE_MAX
    ) -> tuple[dict[int, int], bool]:
        """How many handles each tick from ``first`` to before ``end`` has, those with none left
        out; False: some of it is an estimate, see ``Ring.counts_between``."""
        return self._counts(first, end, sample_max, frozenset())

    def _counts(
        self, first: int, end: int, sample_max: int, without: AbstractSet[int]
    ) -> tuple[dict[int, int], bool]:
        counts, exact = self._ring.counts_between(first, end, sample_max, without)
        if first < self._opened_end:
            for due_ms, count in self._near.counts():
                if first <= (tick := due_ms // self.tick_ms) < end:
                    counts[tick] = counts.get(tick, 0) + count
        return {tick: count for tick, count in counts.items() if count > 0}, exact

    def load(self, first_ms: int, step_ms: int, steps: int) -> tuple[list[int], bool]:
        """How many handles are due in each of so many spans of ``step_ms`` from ``first_ms`` on,
        both whole ticks; False: estimates are among them. A later rotation that lies within one
        span is not looked into."""
        found, ring, tick_ms = [0] * steps, self._ring, self.tick_ms
        first, end = first_ms // tick_ms, (first_ms + steps * step_ms) // tick_ms
        whole: set[int] = set()
        rotations = ring.rotations_between(first, end)
        for rotation in rotations:
            begin_ms, length_ms = rotation * self.slots * tick_ms, self.slots * tick_ms
            step = (begin_ms - first_ms) // step_ms
            if 0 <= step == (begin_ms + length_ms - 1 - first_ms) // step_ms < steps:
                found[step] += max(0, ring.live_in(rotation))
                whole.add(rotation)
        sample_max = max(1, LOAD_SAMPLE_MAX // max(1, len(rotations) - len(whole)))
        counts, exact = self._counts(first, end, sample_max, whole)
        for tick, count in counts.items():
            found[(tick * tick_ms - first_ms) // step_ms] += count
        return found, exact

    @property
    def memory_bytes(self) -> int:
        """About how many bytes the handles occupy."""
        return self._ring.memory_bytes + self._near.memory_bytes + self._upcoming.memory_bytes

    def __len__(self) -> int:
        """How many handles have neither fired nor been withdrawn."""
        return self._live


PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
"""Ticks of one page."""
PAGES_MAX = 64
"""Pages that are kept at a time, 64 KiB each."""
WINDOW_TICKS_MAX = 32 * PAGE
"""Ticks of a window that are looked at: the first ones of a longer window."""
KEPT_MS = 1_000
READS_MAX = 64
"""Pages that are read for one request, each about a millisecond when it is full. Ticks of others
that are not kept are not chosen from."""
READ_AGAIN_MAX = 4
"""Kept pages that are read anew for one request; other old pages have to do once more."""
SPARSE_MAX = 256
"""Ticks with tasks that are put into an empty page one by one, at most."""
SHARED_MIN = 24
"""From so many tasks with one window on a heap of its ticks is worth its cost,"""
SHARED_TICKS = 128
"""or from one task for so many ticks: the heap costs as much for each of these as one look for the
emptiest. Many tasks with windows of their own, a few with each, must not cost a heap each."""
_WITHIN = 617
"""The step between moments of tasks within a tick: prime, and near the golden section of a second,
so that moments that follow each other are far apart and all are used."""


class Windows:
    """Chooses due times in the due windows of tasks on one wheel."""

    def __init__(self, wheel: TimingWheel, placed: Callable[[], Iterable[int]]) -> None:
        """``placed``: the chosen ticks that are not on the wheel yet, each as often as chosen."""
        self._wheel = wheel
        self._placed = placed
        self._pages: dict[int, _Page] = {}
        """Pages by number, the page that was used last at the end."""
        self._reads_left = self._again_left = 0

    def begin(self) -> None:
        """Begin another request, which may read so many pages again."""
        self._reads_left, self._again_left = READS_MAX, READ_AGAIN_MAX

    def choose(self, asked_ms: int, end_ms: int, count: int, now_ms: int) -> list[int]:
        """Due times from ``asked_ms`` to ``end_ms``, both included, for ``count`` tasks. Call
        ``begin`` before."""
        tick_ms = self._wheel.tick_ms
        first = asked_ms // tick_ms
        # A tick of which the window has only a part would be crowded into that part.
        last = max(first, (end_ms + 1) // tick_ms - 1)
        last = min(last, first + WINDOW_TICKS_MAX - 1)
        numbers = range(first >> PAGE_BITS, (last >> PAGE_BITS) + 1)
        pages = [page for n in numbers if (page := self._page(n, now_ms)) is not None]
        if not pages:
            found = [(first, n) for n in range(count)]
        elif first == last:
            found = [(first, pages[0].count(first) + n) for n in range(count)]
            pages[0].add(first, count)
        elif count < max(SHARED_MIN, (last - first) // SHARED_TICKS):
            found = [_emptiest(pages, first, last) for _ in range(count)]
        else:
            found = _shared(pages, first, last, count)
        moments = []
        for tick, before in found:
            low_ms, high_ms = max(asked_ms, tick * tick_ms), min(end_ms, (tick + 1) * tick_ms - 1)
            moments.append(low_ms + before * _WITHIN % (high_ms - low_ms + 1))
        return moments

    def _page(self, number: int, now_ms: int) -> _Page | None:
        page = self._pages.pop(number, None)
        if page is None:
            if self._reads_left <= 0:
                return None
            self._reads_left -= 1
            page = self._read(number, now_ms)
        elif self._again_left > 0 and not 0 <= now_ms - page.read_ms < KEPT_MS:
            self._again_left -= 1
            page = self._read(number, now_ms)
        self._pages[number] = page
        if len(self._pages) > PAGES_MAX:
            del self._pages[next(iter(self._pages))]
        return page

    def _read(self, number: int, now_ms: int) -> _Page:
        first = number << PAGE_BITS
        counts = Counter(self._wheel.counts_between(first, first + PAGE)[0])
        counts.update(tick for tick in self._placed() if tick >> PAGE_BITS == number)
        return _Page(first, counts, now_ms)


class _Page:
    """The counts of a page's ticks as a tree of minima. A leaf is the tick's count and its place,
    so that a minimum is the first of the emptiest."""

    def __init__(self, first: int, counts: dict[int, int], read_ms: int) -> None:
        self.first = first
        self.read_ms = read_ms
        if len(counts) > SPARSE_MAX:
            self._tree = _tree([counts.get(first + n, 0) << PAGE_BITS | n for n in range(PAGE)])
            return
        self._tree = _empty_tree(PAGE)[:]
        for tick, count in counts.items():
            self.add(tick, count)

    def count(self, tick: int) -> int:
        return self._tree[PAGE + tick - self.first] >> PAGE_BITS

    def counts(self, first: int, last: int) -> Sequence[int]:
        """The counts of the page's ticks from ``first`` to ``last``."""
        low, high = max(first - self.first, 0), min(last - self.first, PAGE - 1)
        return [leaf >> PAGE_BITS for leaf in self._tree[PAGE + low : PAGE + high + 1]]

    def add(self, tick: int, count: int) -> None:
        tree, at = self._tree, PAGE + tick - self.first
        tree[at] += count << PAGE_BITS
        while at > 1:
            at >>= 1
            tree[at] = min(tree[2 * at], tree[2 * at + 1])

    def least(self, first: int, last: int) -> tuple[int, int]:
        """(count, tick) of the emptiest tick from ``first`` to ``last``, as far as on this page."""
        tree = self._tree
        low, high = PAGE + max(first - self.first, 0), PAGE + min(last - self.first, PAGE - 1) + 1
        if high - low == PAGE:
            found = tree[1]
        else:
            found = tree[low]
            while low < high:
                if low & 1:
                    found = min(found, tree[low])
                    low += 1
                if high & 1:
                    high -= 1
                    found = min(found, tree[high])
                low >>= 1
                high >>= 1
        return found >> PAGE_BITS, self.first + (found & (PAGE - 1))


def _tree(level: list[int]) -> array[int]:
    """The tree of minima over these leaves, as many as a page has."""
    levels = [level]
    while len(level) > 1:
        level = list(map(min, level[::2], level[1::2]))
        levels.append(level)
    tree = array("q", (0,))
    for level in reversed(levels):
        tree.extend(level)
    return tree


@cache
def _empty_tree(count: int) -> array[int]:
    return _tree(list(range(count)))


def _emptiest(pages: Sequence[_Page], first: int, last: int) -> tuple[int, int]:
    """(tick, how many tasks it had) for one more task."""
    chosen, found = pages[0], pages[0].least(first, last)
    for page in pages[1:]:
        if (least := page.least(first, last)) < found:
            chosen, found = page, least
    count, tick = found
    chosen.add(tick, 1)
    return tick, count


def _shared(pages: Sequence[_Page], first: int, last: int, count: int) -> list[tuple[int, int]]:
    """(tick, count) of the emptiest ticks for many tasks at once."""
    bits = (last - first).bit_length()
    heap = [
        found << bits | (n + max(0, page.first - first))
        for page in pages
        for n, found in enumerate(page.counts(first, last))
    ]
    heapify(heap)
    mask, step = (1 << bits) - 1, 1 << bits
    taken = []
    for _ in range(count):
        least = heap[0]
        heapreplace(heap, least + step)
        taken.append((first + (least & mask), least >> bits))
    by_first = {page.first: page for page in pages}
    for tick, more in Counter(tick for tick, _ in taken).items():
        by_first[tick & -PAGE].add(tick, more)
    return taken
