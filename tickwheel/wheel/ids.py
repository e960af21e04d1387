"""Task ids: unique across shards, roughly ordered by time, assigned by the queue.

An id is (milliseconds since 2025, 12-bit sequence, 10-bit shard), so it stays below 2**63
until 2094 and consecutive ids of one daemon differ by ``ID_STEP``. A burst of more than 4,096
ids in a millisecond borrows from the next one; the source never goes back, not even after a
restart with the clock set back, because it starts above the stored mark.
"""

from __future__ import annotations

from tickwheel.wheel.records import ID_STEP, id_floor


class IdSource:
    """Hands out ascending ids of one shard."""

    __slots__ = ("last", "shard")

    def __init__(self, shard: int, mark: int) -> None:
        if not 0 <= shard < ID_STEP:
            raise ValueError(f"shard {shard} is not in 0..{ID_STEP - 1}")
        self.shard = shard
        behind = mark // ID_STEP * ID_STEP + shard
        self.last = behind if behind >= mark else behind + ID_STEP
        """The newest id assigned (or the mark, rounded up to this shard)."""

    def take(self, count: int, now_ms: int) -> int:
        """The first of ``count`` new ids; the others follow at steps of ``ID_STEP``."""
        first = max(self.last + ID_STEP, id_floor(now_ms, self.shard))
        self.last = first + (count - 1) * ID_STEP
        return first
