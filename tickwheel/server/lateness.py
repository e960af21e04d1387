"""How late first deliveries were: fixed tables of counts, noted a frame at a time.

One fine table for the whole daemon, from which STATS tells p50 and p99; one coarse histogram for
each topic, from which ``/metrics`` does. So many topics have their own, in order of their first
delivery; the others share one, because a series for each is what a monitoring system pays for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.server.histogram import Histogram

BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
)  # fmt: skip
"""Upper bounds, inclusive. The clock counts milliseconds, so nothing lies between 0 and 1."""
BOUNDS_MS = tuple(round(bound_s * 1000) for bound_s in BOUNDS_S)
OTHER = "_other"
"""Stands for the topics without a histogram of their own."""
_EXACT_MS = 1024
_SIZE = _EXACT_MS + 54


class Lateness:
    """The fine table counts by millisecond up to 1,024 ms, by powers of two above."""

    def __init__(self, topics_max: int = 100) -> None:
        self._topics_max = topics_max
        self._counts = [0] * _SIZE
        self.by_topic: dict[str, Histogram] = {}
        """Milliseconds, by ``BOUNDS_MS``."""
        self.count = 0
        self.max_ms = 0

    def note(self, topic: str, late_ms: list[int]) -> None:
        """First deliveries of one frame, at least one, none of them negative.

        What came due together is equally late, and costs as much as one task does.
        """
        counts = self._counts
        low = high = late_ms[0]
        if len(late_ms) > 1:
            low, high = min(late_ms), max(late_ms)
        if low == high:
            counts[_index(low)] += len(late_ms)
        else:
            for late in late_ms:
                counts[late if late < _EXACT_MS else _index(late)] += 1
        self.count += len(late_ms)
        if high > self.max_ms:
            self.max_ms = high
        (self.by_topic.get(topic) or self._histogram(topic)).observe_all(late_ms, low, high)

    def _histogram(self, topic: str) -> Histogram:
        known = self.by_topic
        name = topic if len(known) - (OTHER in known) < self._topics_max else OTHER
        return known.get(name) or known.setdefault(name, Histogram(BOUNDS_MS))

    def forget(self, topics: Iterable[str]) -> None:
        """These are gone: their places become free."""
        for name in topics:
            self.by_topic.pop(name, None)

    def percentile_ms(self, share: float) -> int:
        """Upper bound of the bucket in which that share of the deliveries is reached."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                if index < _EXACT_MS:
                    return index
                return min(self.max_ms, (1 << (index - _EXACT_MS + 11)) - 1)
        return 0

    def summary(self) -> dict[str, Any]:
        return {
            "p50_ms": self.percentile_ms(0.50),
            "p99_ms": self.percentile_ms(0.99),
            "max_ms": self.max_ms,
            "count": self.count,
        }


def _index(late_ms: int) -> int:
    return late_ms if late_ms < _EXACT_MS else _EXACT_MS + late_ms.bit_length() - 11
