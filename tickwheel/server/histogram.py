"""A histogram that one thread fills: plain lists, no locks, one addition to note a value."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Histogram:
    """Counts by bucket. ``bounds`` are the upper ends, inclusive and ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The last one is of what lies above every bound."""
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: list[int], low: int, high: int) -> None:
        """Many at once, at least one; ``low`` and ``high`` are the least and the greatest."""
        bounds, counts = self.bounds, self.counts
        first = bisect_left(bounds, low)
        if low == high:
            counts[first] += len(values)
            self.sum += low * len(values)
            return
        self.sum += sum(values)
        if first == len(bounds) or high <= bounds[first]:
            counts[first] += len(values)
            return
        ordered = sorted(values)
        start = 0
        for index in range(first, len(bounds)):
            end = bisect_right(ordered, bounds[index], start)
            counts[index] += end - start
            start = end
            if start == len(ordered):
                return
        counts[-1] += len(ordered) - start
