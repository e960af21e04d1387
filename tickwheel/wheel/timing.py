"""The timing wheel, which finds due handles at O(1) per insert and O(1) per fired handle.

A hashed timing wheel after Varghese and Lauck, "Hashed and Hierarchical Timing Wheels" (SOSP 1987),
schemes 6 and 7: a tick is ``due_ms // tick_ms``, its slot is ``tick % slots``, and the cycle-num of
a task is the number of rotations before the one in which it is due. In scheme 6, each visit to a
slot decrements the cycle-num of tasks of later rotations. Here each rotation has a flat array, so
that those tasks are not touched before they are due.

A handle (id, due_ms) moves through up to four stages, from coarse to fine:

=========  ==========================  ===================================================
far        rotation → flat bucket      rotations after the next one
ring       tick → flat bucket          the current and the next rotation, two ticks per
                                       slot, sparse; also ticks before the position, if
                                       the clock was set back
near       millisecond → ids           the current and the next tick (``Near``)
fired      (gone)                      returned by ``advance``
=========  ==========================  ===================================================

Example: slots=4, tick_ms=10, now_ms=0, so a rotation is 40 ms. ``add`` of four tasks:

    A due 5: tick 0, slot 0      B due 23: tick 2, slot 2      C due 21: tick 2, slot 2
    D due 103: tick 10, slot 2, cycle-num 2: rotation 2 is neither 0 nor 1, so it goes to far

    advance(0)    opens tick 0 (A → near) and, ahead of time, tick 1 (empty). Nothing is due.
                  Next due: 5, exact.
    advance(5)    fires A. Next step: at 10, when tick 2 is opened ahead.
    advance(10)   opens tick 2: near holds 21: [C], 23: [B]. Next due: 21, exact.
    advance(24)   fires C, B: by due time, although B was added first. Next step: at 40, when
                  rotation 1 begins and rotation 2 has to be in the ring.
    advance(40)   moves D from far to the ring, at tick 10. Next step: at 90.
    advance(90)   opens tick 10 ahead. Next due: 103, exact.
    advance(102)  fires nothing.     advance(103)  fires D.

Time is an argument. The wheel runs no callbacks and does not know what an id means.

Invariants:

* ``advance(now_ms)`` returns no handle with due_ms > now_ms, even if an earlier call had a later
  time.
* Every handle with due_ms < ``position_ms`` has fired or been withdrawn, unless it was added after
  the position had passed its due_ms; a later ``advance`` fires it. The position never goes back; in
  a burst it is the due_ms of the last handle fired, and others due then may follow.
* The handles of a millisecond fire in order of arrival, and only when no stage has a handle with a
  lower due_ms.
* One ``advance`` moves at most about WORK_MAX handles between stages, even if a bucket is
  larger. Only the compaction of one bucket by ``cancel`` cannot be divided (see ``Ring``).

``Windows`` chooses for each task the tick of its due window that has the fewest tasks. It reads the
counts of ticks from the wheel in pages, and keeps each page for ``KEPT_MS`` as a tree of minima, so
that the time for a choice is logarithmic in the size of a page. A batch whose tasks share a window
uses a heap instead. A chosen task is counted at once. Until the task is on the wheel, ``placed``
returns its tick whenever a page is read again.

Decision 18 explains why ticks, not slots, are compared. Invariants: a chosen moment is never before
the requested moment and never after the end of the window; among ticks with equal counts the first
is chosen; the last tick is used only if it lies completely in the window, or is the only tick.
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
"""Maximum number of handles that one ``advance`` moves while handles are due (about 5 ms)."""
AHEAD_MAX = 4_096
"""Maximum number of handles that one ``advance`` moves ahead of time (under 1 ms)."""
PACE_MS = 2
"""Pause between two steps of work ahead of time, so that the event loop can do other work."""
TIME_MS_MAX = 2**62
SAMPLE_MAX = 4_096
"""Maximum number of a later rotation's handles that are read to estimate its ticks (under 1 ms)."""
LOAD_SAMPLE_MAX = 65_536
"""Maximum number of handles of all later rotations that ``load`` reads (about 10 ms)."""


class TimingWheel:
    """The handles of tasks, by due time in ms. Ids are int64 and not negative."""

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
        """The first tick whose handles are in near; ``_opened_end`` is the end of these ticks. New
        handles of lower ticks, which are rare, wait in the ring until their tick is opened."""
        self._opened_end = now_tick
        self._upcoming = IdQueue()

    # --- insertion and withdrawal --------------------------------------------------------------

    def add(self, task_id: int, due_ms: int) -> None:
        if task_id < 0 or not -TIME_MS_MAX < due_ms < TIME_MS_MAX:
            raise ValueError(f"not a valid handle: id {task_id}, due_ms {due_ms}")
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
            raise ValueError(
                f"invalid handles: lowest id {min(ids)}, due_ms {first_ms} to {last_ms}"
            )
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

        The caller must not withdraw a handle that does not exist. This is not detected while the
        due time is far away, and an equal handle that is added later would be withdrawn instead.
        """
        tick = due_ms // self.tick_ms
        # The handles of a tick before the position can be partly in near and partly in the ring.
        # The tombstone must then follow the handles in the ring.
        is_near = tick < self._opened_end and (tick >= self._low or not self._ring.has(tick))
        withdraw = self._near.remove if is_near else self._ring.cancel
        if withdraw(task_id, due_ms):
            self._live -= 1

    def cancel_many(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """Withdraw the handle (``ids[i]``, ``dues_ms[i]``) for each i, as ``cancel`` does."""
        if not ids:
            return
        if min(dues_ms) // self.tick_ms >= self._opened_end:
            self._live -= self._ring.cancel_many(ids, dues_ms)
            return
        for task_id, due_ms in zip(ids, dues_ms, strict=True):
            self.cancel(task_id, due_ms)

    # --- time ----------------------------------------------------------------------------------

    def advance(self, now_ms: int, limit: int) -> tuple[list[int], list[int], bool]:
        """Return up to ``limit`` due handles by due time: (ids, dues_ms, whether more are due).

        After a jump of the clock, or if one tick has very many handles, a call may only move
        handles. It then returns few or no handles and True, and the next call continues.
        """
        near, ring, now_tick = self._near, self._ring, now_ms // self.tick_ms
        ids: list[int] = []
        dues_ms: list[int] = []
        work, more = WORK_MAX, True
        while work > 0:
            tick = ring.unopened(now_tick + 1)
            # ``limit`` bounds the fired handles; withdrawn handles among them count as work.
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
        """Move the position to ``now_ms``, unless ``advance`` has handles to fire or ticks to
        open."""
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
        """Do one step of opening ``tick``: move its handles to near, or a later rotation to the
        ring. Return the number of handles moved, at least 1."""
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
        """Open the next tick and move rotations to the ring, after all due handles have fired."""
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
        """Return the time for the next call of ``advance``, or None if the wheel is empty.

        The time is never later than the first due_ms, and equal to it if that lies in an opened
        tick (the current or the next tick).
        """
        times = self._work_times(now_ms)
        if (tick := self._ring.first_tick()) is not None:
            times.append(self._open_ahead_ms(tick * self.tick_ms, self.tick_ms, now_ms))
        return min(times, default=None)

    def next_handle_ms(self, now_ms: int) -> int | None:
        """Return ``next_due_ms`` for a caller that sets its clock to the result: the times at which
        ticks are opened ahead are ignored. The result is exact unless the first handle is in a
        later rotation. This reads a whole tick."""
        times = self._work_times(now_ms)
        if (tick := self._ring.first_tick()) is not None:
            times.append(self._ring.first_ms_in(tick))
        return min(times, default=None)

    def _work_times(self, now_ms: int) -> list[int]:
        """Return the times of the next steps that do not open ticks."""
        first_ms, rotation = self._near.first_ms(), self._ring.first_far()
        times = [] if first_ms is None else [first_ms]
        if rotation is not None:
            length_ms = self.tick_ms * self.slots
            times.append(self._open_ahead_ms(rotation * length_ms, length_ms, now_ms))
        if self._ring.is_spreading or len(self._upcoming):
            times.append(now_ms + PACE_MS)
        return times

    @staticmethod
    def _open_ahead_ms(start_ms: int, length_ms: int, now_ms: int) -> int:
        """Return when to open a tick or rotation that begins at ``start_ms``: one length before its
        start, but not during the pause after the last step."""
        return min(start_ms, max(start_ms - length_ms, now_ms + PACE_MS))

    def _firsts(self) -> tuple[int | None, int | None]:
        return self._ring.first_tick(), self._ring.first_far()

    def first_ms(self) -> int | None:
        """Return a time before which no handle is due, or None if there is no handle. The time is
        exact if the first handle is in near."""
        times = [] if (first_ms := self._near.first_ms()) is None else [first_ms]
        tick, rotation = self._firsts()
        for number, length_ms in ((tick, self.tick_ms), (rotation, self.tick_ms * self.slots)):
            if number is not None:
                times.append(number * length_ms)
        return min(times, default=None)

    def take_upcoming(self, limit: int) -> list[int]:
        """Return up to ``limit`` distinct ids of the current and the next tick, so that their
        bodies can be read ahead.

        Handles that were added after their tick was opened are not included. Some ids may have
        fired or been withdrawn in the meantime.
        """
        return self._upcoming.take(limit)

    # --- queries -------------------------------------------------------------------------------

    def holds(self, task_id: int, due_ms: int) -> bool:
        """Return whether this handle has neither fired nor been withdrawn.

        The call scans the handles of a tick or rotation, unless the handle is in near or has fired.
        """
        # Add both balances, because the tombstone of a handle in near can still be in the ring.
        return self._near.count(task_id, due_ms) + self._ring.balance(task_id, due_ms) > 0

    def slot_of(self, due_ms: int) -> int:
        return due_ms // self.tick_ms % self.slots

    def cycles_left(self, due_ms: int, now_ms: int) -> int:
        """Return the cycle-num: the number of rotations before the one in which the task is due."""
        return (due_ms // self.tick_ms - now_ms // self.tick_ms) // self.slots

    @property
    def current_slot(self) -> int:
        return self.slot_of(self.position_ms)

    def slot_counts(self) -> list[int]:
        """Return the number of handles in each slot, for the current and the next rotation and
        dense later rotations.

        Withdrawn handles of a rotation that is entering the ring are still counted.
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
        """Return (tick → number of handles, whether all numbers are exact) for the ticks that have
        handles, from ``first`` up to but excluding ``end``. See ``Ring.counts_between`` for the
        estimates."""
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
        """Return (number of handles due in each span, whether all numbers are exact) for ``steps``
        spans of ``step_ms`` from ``first_ms`` on. Both must be multiples of a tick. A later
        rotation within one span is counted without reading its handles."""
        due, ring, tick_ms = [0] * steps, self._ring, self.tick_ms
        first, end = first_ms // tick_ms, (first_ms + steps * step_ms) // tick_ms
        whole_rotations: set[int] = set()
        rotations = ring.rotations_between(first, end)
        for rotation in rotations:
            begin_ms, length_ms = rotation * self.slots * tick_ms, self.slots * tick_ms
            step = (begin_ms - first_ms) // step_ms
            if 0 <= step == (begin_ms + length_ms - 1 - first_ms) // step_ms < steps:
                due[step] += max(0, ring.live_in(rotation))
                whole_rotations.add(rotation)
        sample_max = max(1, LOAD_SAMPLE_MAX // max(1, len(rotations) - len(whole_rotations)))
        counts, exact = self._counts(first, end, sample_max, whole_rotations)
        for tick, count in counts.items():
            due[(tick * tick_ms - first_ms) // step_ms] += count
        return due, exact

    @property
    def memory_bytes(self) -> int:
        """Approximate size of the handles in memory, in bytes."""
        return self._ring.memory_bytes + self._near.memory_bytes + self._upcoming.memory_bytes

    def __len__(self) -> int:
        """Return how many handles have neither fired nor been withdrawn."""
        return self._live


PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
"""Number of ticks in one page."""
PAGES_MAX = 64
"""Maximum number of pages in memory, 64 KiB each."""
WINDOW_TICKS_MAX = 32 * PAGE
"""Maximum number of a window's ticks that are compared, counted from its start."""
KEPT_MS = 1_000
"""How long a page counts as fresh."""
READS_MAX = 64
"""Maximum number of new pages that one request reads; a full page takes about 1 ms. The ticks of
further pages cannot be chosen."""
READ_AGAIN_MAX = 4
"""Maximum number of outdated pages that one request reads again. It uses further pages as they
are."""
SPARSE_MAX = 256
"""A page with at most this many ticks with tasks is built from their counts one by one."""
SHARED_MIN = 24
"""Minimum number of tasks with a common window at which a heap of its ticks is built."""
SHARED_TICKS = 128
"""Maximum ticks per task in such a heap. Adding that many takes about as long as one search for
the emptiest tick, so for few tasks with a long window it is searched once per task."""
_MOMENT_STEP_MS = 617
"""Step in ms between the moments of tasks within a tick. The step is prime and close to the golden
section of a second, so that successive moments are far apart and all moments are used."""


class Windows:
    """Chooses due times in the due windows of tasks on one wheel."""

    def __init__(self, wheel: TimingWheel, placed: Callable[[], Iterable[int]]) -> None:
        """``placed`` returns the chosen ticks of tasks that are not yet on the wheel, one entry per
        task."""
        self._wheel = wheel
        self._placed = placed
        self._pages: dict[int, _Page] = {}
        """Pages by number, the most recently used page last."""
        self._reads_left = self._rereads_left = 0

    def begin(self) -> None:
        """Begin another request with a new budget of page reads."""
        self._reads_left, self._rereads_left = READS_MAX, READ_AGAIN_MAX

    def choose(self, asked_ms: int, end_ms: int, count: int, now_ms: int) -> list[int]:
        """Choose due times from ``asked_ms`` to ``end_ms``, both inclusive, for ``count`` tasks.
        Call ``begin`` first."""
        tick_ms = self._wheel.tick_ms
        first = asked_ms // tick_ms
        # In a tick that is partly outside the window, all tasks would crowd into the part inside.
        last = max(first, (end_ms + 1) // tick_ms - 1)
        last = min(last, first + WINDOW_TICKS_MAX - 1)
        numbers = range(first >> PAGE_BITS, (last >> PAGE_BITS) + 1)
        pages = [page for n in numbers if (page := self._page(n, now_ms)) is not None]
        if not pages:
            chosen = [(first, n) for n in range(count)]
        elif first == last:
            chosen = [(first, pages[0].count(first) + n) for n in range(count)]
            pages[0].add(first, count)
        elif count < max(SHARED_MIN, (last - first) // SHARED_TICKS):
            chosen = [_emptiest(pages, first, last) for _ in range(count)]
        else:
            chosen = _shared(pages, first, last, count)
        moments = []
        for tick, before in chosen:
            low_ms, high_ms = max(asked_ms, tick * tick_ms), min(end_ms, (tick + 1) * tick_ms - 1)
            moments.append(low_ms + before * _MOMENT_STEP_MS % (high_ms - low_ms + 1))
        return moments

    def _page(self, number: int, now_ms: int) -> _Page | None:
        page = self._pages.pop(number, None)
        if page is None:
            if self._reads_left <= 0:
                return None
            self._reads_left -= 1
            page = self._read(number, now_ms)
        elif self._rereads_left > 0 and not 0 <= now_ms - page.read_ms < KEPT_MS:
            self._rereads_left -= 1
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
    """The counts of a page's ticks, as a tree of minima. A leaf combines the count and the index of
    a tick, so that the minimum is the first of the emptiest ticks."""

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
        """Return the counts of the page's ticks from ``first`` to ``last``."""
        low, high = max(first - self.first, 0), min(last - self.first, PAGE - 1)
        return [leaf >> PAGE_BITS for leaf in self._tree[PAGE + low : PAGE + high + 1]]

    def add(self, tick: int, count: int) -> None:
        tree, at = self._tree, PAGE + tick - self.first
        tree[at] += count << PAGE_BITS
        while at > 1:
            at >>= 1
            tree[at] = min(tree[2 * at], tree[2 * at + 1])

    def emptiest(self, first: int, last: int) -> tuple[int, int]:
        """Return (count, tick) of the emptiest tick of this page from ``first`` to ``last``."""
        tree = self._tree
        low, high = PAGE + max(first - self.first, 0), PAGE + min(last - self.first, PAGE - 1) + 1
        if high - low == PAGE:
            minimum = tree[1]
        else:
            minimum = tree[low]
            while low < high:
                if low & 1:
                    minimum = min(minimum, tree[low])
                    low += 1
                if high & 1:
                    high -= 1
                    minimum = min(minimum, tree[high])
                low >>= 1
                high >>= 1
        return minimum >> PAGE_BITS, self.first + (minimum & (PAGE - 1))


def _tree(level: list[int]) -> array[int]:
    """Return the tree of minima over the leaves of a page."""
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
    """Choose the emptiest tick for one task. Return (tick, number of tasks already in it)."""
    chosen, emptiest = pages[0], pages[0].emptiest(first, last)
    for page in pages[1:]:
        if (candidate := page.emptiest(first, last)) < emptiest:
            chosen, emptiest = page, candidate
    count, tick = emptiest
    chosen.add(tick, 1)
    return tick, count


def _shared(pages: Sequence[_Page], first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Choose the emptiest ticks for many tasks. Return (tick, number of tasks already in it) for
    each task."""
    bits = (last - first).bit_length()
    heap = [
        tasks << bits | (n + max(0, page.first - first))
        for page in pages
        for n, tasks in enumerate(page.counts(first, last))
    ]
    heapify(heap)
    mask, step = (1 << bits) - 1, 1 << bits
    taken = []
    for _ in range(count):
        emptiest = heap[0]
        heapreplace(heap, emptiest + step)
        taken.append((first + (emptiest & mask), emptiest >> bits))
    by_first = {page.first: page for page in pages}
    for tick, more in Counter(tick for tick, _ in taken).items():
        by_first[tick & -PAGE].add(tick, more)
    return taken
