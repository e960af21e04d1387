"""The batches applied last, kept for a Redis that comes back without them.

A Redis that syncs its log once a second may lose the last two seconds of what it confirmed, a
stale replica somewhat more. Bounded by time and by bytes, whichever comes first.

Of new tasks only the records are kept, which the mirror holds anyway: their rows would take as
much memory again, all of it fresh, for ten seconds of enqueues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tickwheel.model.effects import Effects
from tickwheel.persistence.codec import decode_task

BATCH_BYTES = 200
"""A batch beside what it holds."""


@dataclass(slots=True)
class Tally:
    """How often Redis had lost something, over all openings of a store."""

    replays: int = 0
    """The batches kept were enough."""
    rewrites: int = 0
    """Everything was written anew from memory."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One batch."""

    n: int
    rest: Effects
    """All but its new tasks."""
    enqueued: Sequence[bytes]
    """Their records."""
    size_bytes: int
    at_s: float

    def effects(self) -> Effects:
        rows = map(decode_task, self.enqueued)
        return replace(self.rest, enqueued={row.id: row for row in rows})


class History:
    """Batches in order, without gaps; the newest is always kept unless it is too large."""

    def __init__(self, keep_ms: int, keep_bytes: int) -> None:
        self._keep_s = keep_ms / 1000
        self._keep_bytes = keep_bytes
        self._batches: deque[_Kept] = deque()
        self._bytes = 0

    def add(
        self, n: int, effects: Effects, enqueued: Sequence[bytes], size_bytes: int, now_s: float
    ) -> None:
        """Batch ``n`` was applied; the one before it is the newest here, or none is.

        ``enqueued``: the records of its new tasks.
        """
        size_bytes += BATCH_BYTES
        rest = replace(effects, enqueued={})
        self._batches.append(_Kept(n, rest, enqueued, size_bytes, now_s))
        self._bytes += size_bytes
        while self._batches and (
            self._bytes > self._keep_bytes or self._batches[0].at_s < now_s - self._keep_s
        ):
            self._bytes -= self._batches.popleft().size_bytes

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0

    def covers(self, first: int, last: int) -> bool:
        """Whether every batch from ``first`` to ``last`` is here."""
        batches = self._batches
        return bool(batches) and batches[0].n <= first and last <= batches[-1].n

    def since(self, first: int) -> Iterator[tuple[int, Effects]]:
        """A copy, so that it may be replayed over awaits; decoded one after the other."""
        kept = [batch for batch in self._batches if batch.n >= first]
        return ((batch.n, batch.effects()) for batch in kept)
