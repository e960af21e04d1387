"""Retry policies: how often a failed task is tried again, and how long it waits for that.

Values and arithmetic only. The jitter is taken from the task's id and attempt, so the same
inputs give the same delay and the engine stays pure. Which policy holds for a task is decided
by ``Core.policy``: the task's own, its group's, its topic's, the daemon's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""

KINDS = ("exponential", "fixed", "table", "none")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """By ``kind``, before retry n:

    * exponential: ``base_ms * factor ** (n - 1)``, at most ``cap_ms``;
    * fixed: ``base_ms``;
    * table: entry n of ``delays_ms``, beyond the table its last one;
    * none: there is no retry.

    After ``retries_max`` retries the task is dead. ``jitter`` is the largest share by which a
    delay is shortened or lengthened (0 to 1).
    """

    base_ms: int = 10_000
    factor: float = 2.0
    cap_ms: int = 7_200_000
    retries_max: int = 16
    jitter: float = 0.1
    kind: str = "exponential"
    delays_ms: tuple[int, ...] = ()

    def allows(self, attempt: int) -> bool:
        """May there be another attempt after ``attempt`` of them failed?"""
        return attempt <= self.retries_max

    def retries_left(self, attempt: int) -> int:
        """After ``attempt`` deliveries: from ``retries_max`` at the first down to 0."""
        return max(0, self.retries_max - max(0, attempt - 1))

    def delay_ms(self, attempt: int, task_id: int) -> int:
        """Time from the failure of ``attempt`` (1 is the first) to the next one."""
        plain, cap_ms = self._plain_ms(attempt), float(self.cap_ms)
        if not self.jitter:
            return int(plain)
        hashed = ((task_id * _SPREAD + attempt * 0xD1B54A32D192ED03) >> 11) & 0xFFFFF
        swing = (hashed / 0xFFFFF * 2.0 - 1.0) * self.jitter
        swung = plain * (1.0 + swing)
        return max(0, int(min(swung, cap_ms) if self.kind == "exponential" else swung))

    def _plain_ms(self, attempt: int) -> float:
        if self.kind == "fixed":
            return float(self.base_ms)
        if self.kind == "table":
            return float(self.delays_ms[min(attempt, len(self.delays_ms)) - 1])
        return self._grown_ms(attempt - 1)

    def _grown_ms(self, steps: int) -> float:
        """``base_ms * factor ** steps`` up to the cap. The power is only taken where it stays
        near the cap: a float ends at 1e308, which a large factor passes after 52 steps."""
        base_ms, cap_ms = float(self.base_ms), float(self.cap_ms)
        if not base_ms or base_ms >= cap_ms:
            return min(base_ms, cap_ms)
        if self.factor <= 1.0 or steps <= 0:
            return base_ms
        if steps * math.log(self.factor) > math.log(cap_ms / base_ms):
            return cap_ms
        return min(base_ms * self.factor**steps, cap_ms)


PolicyRef = str | RetryPolicy
"""A policy by its name, which is looked up when it is used, or by its numbers."""

_S, _MIN, _H = 1_000, 60_000, 3_600_000
ROCKETMQ_MS = (
    10 * _S, 30 * _S, 1 * _MIN, 2 * _MIN, 3 * _MIN, 4 * _MIN, 5 * _MIN, 6 * _MIN, 7 * _MIN,
    8 * _MIN, 9 * _MIN, 10 * _MIN, 20 * _MIN, 30 * _MIN, 1 * _H, 2 * _H,
)  # fmt: skip
"""The retry steps of RocketMQ's consumers."""
BUILT_IN = {
    "rocketmq": RetryPolicy(
        base_ms=0, factor=1.0, cap_ms=0, retries_max=16, jitter=0.0, kind="table",
        delays_ms=ROCKETMQ_MS,
    ),
    "none": RetryPolicy(base_ms=0, factor=1.0, cap_ms=0, retries_max=0, jitter=0.0, kind="none"),
}  # fmt: skip
DEFAULT = "default"
"""The name of the daemon's own policy, which its settings ``retry_…`` make."""
