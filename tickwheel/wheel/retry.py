"""Retry arithmetic: how long a failed attempt waits for the next.

Exponential backoff with a cap; the jitter is taken from the task's id and attempt, so the
same inputs give the same delay and the engine stays pure.
"""

from __future__ import annotations

from dataclasses import dataclass

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``base_ms * factor ** (n - 1)`` before retry n, at most ``cap_ms``; then dead.

    ``jitter`` is the largest share by which a delay is shortened or lengthened (0 to 1).
    """

    base_ms: int = 10_000
    factor: float = 2.0
    cap_ms: int = 7_200_000
    retries_max: int = 16
    jitter: float = 0.1

    def allows(self, attempt: int) -> bool:
        """May there be another attempt after ``attempt`` of them failed?"""
        return attempt <= self.retries_max

    def delay_ms(self, attempt: int, task_id: int) -> int:
        """Time from the failure of ``attempt`` (1 is the first) to the next one."""
        # Above 2**40 the cap has long been reached; the bound keeps the power finite.
        grown = self.base_ms * min(self.factor ** min(attempt - 1, 64), 2.0**40)
        plain = min(grown, float(self.cap_ms))
        if not self.jitter:
            return int(plain)
        hashed = ((task_id * _SPREAD + attempt * 0xD1B54A32D192ED03) >> 11) & 0xFFFFF
        swing = (hashed / 0xFFFFF * 2.0 - 1.0) * self.jitter
        return max(0, int(min(plain * (1.0 + swing), float(self.cap_ms))))
