"""Why a delivery was late: one word for each cause, in metrics, history and documents; and the
intervals in which each cause held deliveries back (``HoldIntervals``), which know neither groups
nor tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

LATE_MS = 100
"""A first delivery is late when it leaves more than this after its due time; only then has it a
cause. The objective of ``grafana/prometheus`` is the same number."""

SLOW_MS = 50
"""A shorter hold-up of the whole daemon, in ms, is not noted."""


class Cause(StrEnum):
    """What a late delivery has waited for. The order decides when several held it at once: the
    first one counts."""

    KEY_PAUSED = "key_paused"
    """An operator had paused the order key, or the value that shares the group; known across
    restarts, unlike all others."""
    UNKNOWN = "unknown"
    """The task was waiting before the daemon's start, and nothing says for what."""
    PAUSED = "paused"
    """The group or its topic was paused."""
    RATE = "rate"
    """A rate limit held the group back."""
    DAEMON_DOWN = "daemon_down"
    """No daemon was active, or it was so lately that consumers were not back."""
    NO_SUBSCRIBER = "no_subscriber"
    """The group had no subscriber."""
    CLOCK = "clock"
    """The wall clock jumped ahead, or was held."""
    STORE = "store"
    """The store was slow or away."""
    LOOP_BUSY = "loop_busy"
    """The daemon had too much to do; also the cause when nothing else explains the wait."""
    LEASE_OVER = "lease_over"
    """The group's consumers let their leases end, and nobody else was there."""
    NO_CREDIT = "no_credit"
    """The group's consumers held as many deliveries as they had asked for."""
    ENDPOINT = "endpoint"
    """The group is pushed or forwarded, and its endpoint was slow or away: as many deliveries
    waited for its answer as may wait at a time."""
    KEY_BUSY = "key_busy"
    """An earlier task of the order key was not done, or its fair share had no place."""


DAEMONS_CAUSES = (Cause.DAEMON_DOWN, Cause.CLOCK, Cause.STORE, Cause.LOOP_BUSY)
"""The causes that lie with the daemon and its machine; the others lie with its users."""


Causes = Cause | list[Cause | None]
"""The causes of the deliveries of a frame: one for all, or one for each; None: that delivery is in
time, or not the first one of its task."""
_ONGOING_MS = 1 << 62
_BY_RANK = list(Cause)
_RANKS = {cause: rank for rank, cause in enumerate(_BY_RANK)}


class HoldIntervals:
    """The last interval in which each cause held deliveries back, in ms of the wall clock."""

    __slots__ = ("_ends_ms", "_starts_ms", "current")

    def __init__(self) -> None:
        self.current: Cause | None = None
        """The cause that holds deliveries back now; None: nothing does."""
        self._starts_ms: dict[Cause, int] = {}
        self._ends_ms: dict[Cause, int] = {}

    def turn(self, cause: Cause | None, now_ms: int, since_ms: int | None) -> None:
        """From now on ``cause`` holds back, or (None) nothing does. ``since_ms``: when the first
        task that waits became ready; an interval of the cause that ended after that goes on."""
        if self.current is not None:
            self._ends_ms[self.current] = now_ms
        self.current = cause
        if cause is not None:
            joins_ms = now_ms if since_ms is None else since_ms
            self.add(cause, now_ms, _ONGOING_MS, joins_ms)

    def add(self, cause: Cause, from_ms: int, until_ms: int, joins_ms: int | None = None) -> None:
        """``cause`` held deliveries back in this time. It joins an interval that ended at
        ``joins_ms`` or later; by default: one that it overlaps."""
        end_ms = self._ends_ms.get(cause)
        if end_ms is None or end_ms < (from_ms if joins_ms is None else joins_ms):
            self._starts_ms[cause] = from_ms
            self._ends_ms[cause] = until_ms
            return
        self._starts_ms[cause] = min(from_ms, self._starts_ms[cause])
        self._ends_ms[cause] = max(until_ms, end_ms)

    def cut(self, cause: Cause, now_ms: int) -> None:
        """``cause`` holds back no longer, whatever was said before."""
        if cause in self._ends_ms:
            self._ends_ms[cause] = min(self._ends_ms[cause], now_ms)

    def of(self, cause: Cause) -> tuple[int, int] | None:
        """(first ms, ms after the last) of the interval of ``cause``, if there was one."""
        start_ms = self._starts_ms.get(cause)
        return None if start_ms is None else (start_ms, self._ends_ms[cause])

    def within(self, from_ms: int, until_ms: int) -> list[tuple[int, int, int]]:
        """(place of the cause in their order, first ms, ms after the last) of those intervals that
        have a part of this time."""
        ends_ms = self._ends_ms
        return [
            (_RANKS[cause], start_ms, end_ms)
            for cause, start_ms in self._starts_ms.items()
            if start_ms < until_ms and (end_ms := ends_ms[cause]) > from_ms
        ]


def shares(
    from_ms: int,
    until_ms: int,
    all_intervals: Sequence[HoldIntervals],
    rest: Cause = Cause.LOOP_BUSY,
) -> dict[Cause, int]:
    """The milliseconds of a wait by cause; their sum is the wait. ``rest`` is the cause of what no
    interval covers."""
    overlapping = [interval for one in all_intervals for interval in one.within(from_ms, until_ms)]
    if not overlapping:
        return {rest: until_ms - from_ms}
    found: dict[Cause, int] = {}
    left = [(from_ms, until_ms)]
    for rank, start_ms, end_ms in sorted(overlapping):
        covered_ms, left = _cut(left, start_ms, end_ms)
        cause = _BY_RANK[rank]
        found[cause] = found.get(cause, 0) + covered_ms
    rest_ms = sum(end - start for start, end in left)
    found[rest] = found.get(rest, 0) + rest_ms
    return found


def _cut(
    parts: Iterable[tuple[int, int]], from_ms: int, until_ms: int
) -> tuple[int, list[tuple[int, int]]]:
    """How much of ``parts`` an interval covers, and what is left of them."""
    covered_ms, left = 0, []
    for start, end in parts:
        low, high = max(start, from_ms), min(end, until_ms)
        if low >= high:
            left.append((start, end))
            continue
        covered_ms += high - low
        if start < low:
            left.append((start, low))
        if high < end:
            left.append((high, end))
    return covered_ms, left
