"""How late first deliveries were, as a fixed table of counts: O(1) to note, O(table) to ask."""

from __future__ import annotations

from typing import Any

_EXACT_MS = 1024
_SIZE = _EXACT_MS + 54


class Lateness:
    """Counts by millisecond up to 1,024 ms, by powers of two above."""

    def __init__(self) -> None:
        self._counts = [0] * _SIZE
        self.count = 0
        self.max_ms = 0

    def note(self, late_ms: int) -> None:
        self._counts[late_ms if late_ms < _EXACT_MS else _EXACT_MS + late_ms.bit_length() - 11] += 1
        self.count += 1
        if late_ms > self.max_ms:
            self.max_ms = late_ms

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
