"""Causes of late deliveries, which have the same names in metrics, history and documents, and the
intervals in which each cause delayed deliveries (``HoldIntervals``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

LATE_MS = 100
"""A first delivery is late, and has a cause, if it is sent more than this after its due time, in
milliseconds. The objective in ``grafana/prometheus`` is the same number."""

SLOW_MS = 50
"""Minimum length, in milliseconds, of a recorded interval in which the whole daemon was delayed."""


class Cause(StrEnum):
    """The cause of a late delivery. If several causes apply at the same time, the first in this
    order counts."""

    KEY_PAUSED = "key_paused"
    """An operator had paused the order key or the value of ``fair_by``. Only this cause is known
    across restarts."""
    UNKNOWN = "unknown"
    """The task waited before the daemon started, for an unknown reason."""
    PAUSED = "paused"
    """The group or its topic was paused."""
    RATE = "rate"
    """A rate limit delayed the group."""
    DAEMON_DOWN = "daemon_down"
    """No daemon was active, or consumers had not yet reconnected."""
    NO_SUBSCRIBER = "no_subscriber"
    """The group had no subscriber."""
    CLOCK = "clock"
    """The wall clock jumped ahead, and the daemon's clock followed it."""
    STORE = "store"
    """The store was slow or unavailable."""
    LOOP_BUSY = "loop_busy"
    """The daemon was overloaded, or no other cause applies."""
    LEASE_OVER = "lease_over"
    """The group's consumers let their leases end, and there was no other consumer."""
    NO_CREDIT = "no_credit"
    """The group's consumers had used up their prefetch."""
    ENDPOINT = "endpoint"
    """The group is pushed or forwarded, and its endpoint was slow or unavailable, so that the
    maximum number of deliveries was waiting for its answers."""
    KEY_BUSY = "key_busy"
    """An earlier task of the order key was not finished, or the task's fair share was used up."""


DAEMON_CAUSES = (Cause.DAEMON_DOWN, Cause.CLOCK, Cause.STORE, Cause.LOOP_BUSY)
"""Causes that lie in the daemon or its machine. Users are responsible for the others."""


Causes = Cause | list[Cause | None]
"""The cause of all deliveries of a frame, or the cause of each. None means that a delivery is on
time, or is not the first delivery of its task."""
_ONGOING_MS = 1 << 62
_BY_RANK = list(Cause)
_RANKS = {cause: rank for rank, cause in enumerate(_BY_RANK)}


class HoldIntervals:
    """The last interval in which each cause delayed deliveries, in ms of the wall clock."""

    __slots__ = ("_ends_ms", "_starts_ms", "current")

    def __init__(self) -> None:
        self.current: Cause | None = None
        """The cause that delays deliveries now, or None."""
        self._starts_ms: dict[Cause, int] = {}
        self._ends_ms: dict[Cause, int] = {}

    def set_current(self, cause: Cause | None, now_ms: int, since_ms: int | None) -> None:
        """Set the current cause, or None. ``since_ms`` is the time at which the first waiting task
        became ready. An interval of the cause that ended later is continued."""
        if self.current is not None:
            self._ends_ms[self.current] = now_ms
        self.current = cause
        if cause is not None:
            joins_ms = now_ms if since_ms is None else since_ms
            self.add(cause, now_ms, _ONGOING_MS, joins_ms)

    def add(self, cause: Cause, from_ms: int, until_ms: int, joins_ms: int | None = None) -> None:
        """Add an interval of ``cause``. It is joined with the previous interval if that ended at
        ``joins_ms`` or later; by default, if they overlap."""
        end_ms = self._ends_ms.get(cause)
        if end_ms is None or end_ms < (from_ms if joins_ms is None else joins_ms):
            self._starts_ms[cause] = from_ms
            self._ends_ms[cause] = until_ms
            return
        self._starts_ms[cause] = min(from_ms, self._starts_ms[cause])
        self._ends_ms[cause] = max(until_ms, end_ms)

    def cut(self, cause: Cause, now_ms: int) -> None:
        """End the interval of ``cause`` at ``now_ms``, unless it ends earlier."""
        if cause in self._ends_ms:
            self._ends_ms[cause] = min(self._ends_ms[cause], now_ms)

    def interval_of(self, cause: Cause) -> tuple[int, int] | None:
        """Return (first ms, ms after the last) of the interval of ``cause``, or None."""
        start_ms = self._starts_ms.get(cause)
        return None if start_ms is None else (start_ms, self._ends_ms[cause])

    def within(self, from_ms: int, until_ms: int) -> list[tuple[int, int, int]]:
        """Return (rank of the cause, first ms, ms after the last) of each interval that overlaps
        this time."""
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
    """Return the milliseconds of a wait by cause. Their sum is the length of the wait. ``rest`` is
    the cause of the time that no interval covers."""
    overlapping = [
        interval for intervals in all_intervals for interval in intervals.within(from_ms, until_ms)
    ]
    if not overlapping:
        return {rest: until_ms - from_ms}
    by_cause: dict[Cause, int] = {}
    uncovered = [(from_ms, until_ms)]
    for rank, start_ms, end_ms in sorted(overlapping):
        covered_ms, uncovered = _cut(uncovered, start_ms, end_ms)
        cause = _BY_RANK[rank]
        by_cause[cause] = by_cause.get(cause, 0) + covered_ms
    rest_ms = sum(end - start for start, end in uncovered)
    by_cause[rest] = by_cause.get(rest, 0) + rest_ms
    return by_cause


def _cut(
    parts: Iterable[tuple[int, int]], from_ms: int, until_ms: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return (ms of ``parts`` that the interval covers, the parts that it does not cover)."""
    covered_ms, uncovered = 0, []
    for start, end in parts:
        low, high = max(start, from_ms), min(end, until_ms)
        if low >= high:
            uncovered.append((start, end))
            continue
        covered_ms += high - low
        if start < low:
            uncovered.append((start, low))
        if high < end:
            uncovered.append((high, end))
    return covered_ms, uncovered
