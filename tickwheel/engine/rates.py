"""Rate limits: a token bucket on the engine's steady clock, which is an argument."""

from __future__ import annotations

from math import ceil

_ROUNDING = 1e-6
"""By how much a sum of fractions of a token may miss a whole one and count as one."""


class Bucket:
    """``rate`` tokens a second, of which ``burst`` may pile up; full at first.

    A delivery takes a token. ``burst`` None: what a second brings, at least one.
    """

    __slots__ = ("_at_mono_ms", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: int | None, mono_ms: int) -> None:
        self.rate = rate
        self.burst = max(1.0, rate) if burst is None else float(burst)
        self._tokens = self.burst
        self._at_mono_ms = mono_ms

    def left(self, mono_ms: int) -> int:
        """How many whole tokens the bucket holds now."""
        passed_ms = mono_ms - self._at_mono_ms
        if passed_ms > 0:
            self._tokens = min(self.burst, self._tokens + passed_ms * self.rate / 1000)
            self._at_mono_ms = mono_ms
        return int(self._tokens + _ROUNDING)

    def take(self, count: int) -> None:
        """Remove tokens: at most as many as ``left`` has just returned."""
        self._tokens -= count

    def next_mono_ms(self) -> int:
        """When the next token comes (steady clock), if there was none at the last look."""
        lacking = max(0.0, 1.0 - _ROUNDING - self._tokens)
        return self._at_mono_ms + max(1, ceil(lacking * 1000 / self.rate))


def changed(
    old: Bucket | None, rate: float | None, burst: int | None, mono_ms: int
) -> Bucket | None:
    """A bucket with another rate and burst, no fuller than the old one; None: there is no rate."""
    if rate is None:
        return None
    fresh = Bucket(rate, burst, mono_ms)
    if old is not None:
        fresh.take(max(0, int(fresh.burst) - old.left(mono_ms)))
    return fresh
