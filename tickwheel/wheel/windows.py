"""Due windows: for each task the tick of its window that has the fewest.

What ticks have is asked of the wheel, a page of ticks at a time, and kept for ``KEPT_MS`` as a tree
of minima, so that a choice costs the logarithm of a page. A batch whose tasks share a window takes
them from a heap instead. What was chosen counts at once; until it is on the wheel its owner says it
again whenever a page is read anew (``placed``).

Decision 18 says why by tick and not by slot. Pure; time is an argument.

Invariants: a chosen moment is never before the asked one and never after the end of its window;
of ticks that have equally few the first is chosen; the last tick counts when all of it lies in the
window, or it is the only one.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heapify, heapreplace

from tickwheel.wheel.timing import TimingWheel

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
