"""The batches applied last, kept for a Redis that comes back without them.

A Redis that syncs its log once a second may lose the last two seconds of what it confirmed, a
stale replica somewhat more. Bounded by time and by bytes, whichever comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tickwheel.wheel.effects import Effects

BATCH_BYTES = 200
"""A batch beside what it holds."""


@dataclass(slots=True)
class Tally:
    """How often Redis had lost something, over all openings of a store."""

    replays: int = 0
    """The batches kept were enough."""
    rewrites: int = 0
    """Everything was written anew from memory."""


class History:
    """Batches in order, without gaps; the newest is always kept unless it is too large."""

    def __init__(self, keep_ms: int, keep_bytes: int) -> None:
        self._keep_s = keep_ms / 1000
        self._keep_bytes = keep_bytes
        self._batches: deque[tuple[int, Effects, int, float]] = deque()
        self._bytes = 0

    def add(self, n: int, effects: Effects, size_bytes: int, now_s: float) -> None:
        """Batch ``n`` was applied; the one before it is the newest here, or none is."""
        size_bytes += BATCH_BYTES
        self._batches.append((n, effects, size_bytes, now_s))
        self._bytes += size_bytes
        while self._batches and (
            self._bytes > self._keep_bytes or self._batches[0][3] < now_s - self._keep_s
        ):
            self._bytes -= self._batches.popleft()[2]

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0

    def covers(self, first: int, last: int) -> bool:
        """Whether every batch from ``first`` to ``last`` is here."""
        batches = self._batches
        return bool(batches) and batches[0][0] <= first and last <= batches[-1][0]

    def since(self, first: int) -> Iterator[tuple[int, Effects]]:
        """A copy, so that it may be replayed over awaits."""
        return iter([(n, effects) for n, effects, _, _ in self._batches if n >= first])
