"""How many deliveries a worker asks for: as many as may run, and what it starts within some
milliseconds, so that a fast handler need not wait for the daemon each time.

By Little's law that is its rate times those milliseconds. Invariant: beside a handler that takes
long nothing waits here while another worker is idle. Times are given, in seconds.
"""

from __future__ import annotations

AHEAD_S = 0.005
"""So long a delivery may wait here for a handler, about."""
AHEAD_MAX = 256
CHANGE = 1.25
"""It is asked for more, or less, when that differs by this factor."""


class Ahead:
    """Of one lane. ``prefetch`` is what is asked for now: ``least`` to ``most``."""

    def __init__(self, least: int, most: int, now_s: float) -> None:
        self._least, self._most = least, most
        self.prefetch = least
        self._ended = 0
        """Handlers, since the last look."""
        self._since_s = now_s

    @property
    def is_ahead(self) -> bool:
        """More than the least is asked for."""
        return self.prefetch > self._least

    def ended(self, now_s: float) -> bool:
        """A handler has; whether ``prefetch`` is another now."""
        self._ended += 1
        return self._ended >= self.prefetch and self.look(now_s)

    def look(self, now_s: float) -> bool:
        """At the rate since the last look; whether ``prefetch`` is another now."""
        rate = self._ended / max(now_s - self._since_s, 1e-6)
        self._ended, self._since_s = 0, now_s
        wanted = min(self._most, self._least + int(rate * AHEAD_S))
        if self.prefetch / CHANGE < wanted < self.prefetch * CHANGE:
            return False
        changed = wanted != self.prefetch
        self.prefetch = wanted
        return changed
