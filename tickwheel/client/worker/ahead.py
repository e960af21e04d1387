"""How many deliveries a worker asks for: as many as may run, and what it starts within some
milliseconds, so that a fast handler need not wait for the daemon each time.

By Little's law that is its rate times those milliseconds. Invariant: beside a handler that takes
long nothing waits here while another worker is idle. Times are given, in seconds.
"""

from __future__ import annotations

AHEAD_S = 0.005
"""About how long, in seconds, a delivery may wait here for a handler."""
AHEAD_MAX = 256
CHANGE = 1.25
"""By which factor the wanted prefetch must differ before it is asked for."""


class Ahead:
    """The prefetch of one lane: ``least`` to ``most``, by how fast its handlers end."""

    def __init__(self, least: int, most: int, now_s: float) -> None:
        self._least, self._most = least, most
        self.prefetch = least
        self._ended = 0
        """How many handlers have ended since the last look."""
        self._since_s = now_s

    @property
    def is_ahead(self) -> bool:
        """Whether more deliveries than the least are asked for."""
        return self.prefetch > self._least

    def ended(self, now_s: float) -> bool:
        """Count a handler that ended; whether ``prefetch`` has changed."""
        self._ended += 1
        return self._ended >= self.prefetch and self.look(now_s)

    def look(self, now_s: float) -> bool:
        """Work out ``prefetch`` from the rate since the last look; whether it has changed."""
        rate = self._ended / max(now_s - self._since_s, 1e-6)
        self._ended, self._since_s = 0, now_s
        wanted = min(self._most, self._least + int(rate * AHEAD_S))
        if self.prefetch / CHANGE < wanted < self.prefetch * CHANGE:
            return False
        changed = wanted != self.prefetch
        self.prefetch = wanted
        return changed
