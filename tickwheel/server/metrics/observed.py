"""Metrics that are recorded when an event happens, because the engine's state does not contain
them.

A value is recorded once per batch, probe or frame, never once per task. Values are kept until the
process ends, even if the daemon stops leading and leads again.

``Lateness`` records the lateness of first deliveries: a fine table for the whole daemon, from which
STATS computes p50 and p99, and a coarse histogram per topic for ``/metrics``. The number of topics
with a separate histogram is limited, because each series costs the monitoring system. The other
topics share one. Only one thread fills a ``Histogram``, so it needs no locks.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

from tickwheel.engine.tasks import KINDS
from tickwheel.model.lateness import LATE_MS, SLOW_MS, Cause
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Item
    from tickwheel.model.kinds import Effects

COMMIT_BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
BATCH_BOUNDS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 50_000)
LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PROBE_S = 0.1
BUSY_SHARE = 0.9
"""Fraction of CPU time at which an event loop counts as busy, even if it is not late."""
REFUSED, FULL, UNKNOWN, ELECTION = "refused", "full", "unknown", "election"
STORE_ERROR_KINDS = (REFUSED, FULL, UNKNOWN, ELECTION)
EVENT_COUNTERS = {
    "deposed": "deposed", "same_node_name": "namesakes", "backup_failed": "backup_failures",
    "internal_error": "internal_errors",
}  # fmt: skip
"""Event of the shard → counter that it increments."""


class Observed:
    """Values that the committer, deliveries, roles and the probe of the event loop record."""

    disk_used = 0.0
    """Used fraction, from 0 to 1, of the disk that contains the database; 0 if unknown."""
    disk_free_bytes: int | None = None
    """Free bytes of that disk; None if unknown."""

    def __init__(self, lateness_topics_max: int = 100) -> None:
        self.lateness = Lateness(lateness_topics_max)
        self.commit_s = Histogram(COMMIT_BOUNDS_S)
        """Seconds from handing a batch to the store until it is durable, including retries."""
        self.batch_changes = Histogram(BATCH_BOUNDS)
        self.loop_lag_s = Histogram(LAG_BOUNDS_S)
        self.store_errors = dict.fromkeys(STORE_ERROR_KINDS, 0)
        self.bulk_changes = Counter(dict.fromkeys(KINDS, 0))
        """Number of tasks that bulk operations have changed, by kind of operation."""
        self.election_trouble = False
        self.failovers = 0
        self.deposed = 0
        self.namesakes = 0
        self.recovery_s = 0.0
        """Seconds from the last takeover until the daemon served."""
        self.load_s = 0.0
        """Seconds from the last takeover until all records were in memory."""
        self.backup_s = 0.0
        """When the newest daily backup began (Unix time, seconds); 0 if unknown."""
        self.backup_failures = 0
        self.dead_expire_s = 0.0
        """When the retention of the next dead letter ends (Unix time, seconds); 0 if unknown."""
        self.groups_unused = 0
        """Number of groups that are reported as unused."""
        self.settings_followed = 0
        """Number of changes of groups and topics that were copied from their home shard."""
        self.internal_errors = 0
        """Number of unexpected exceptions in requests or tasks that did not end the daemon."""
        self.login_failures = 0
        self.forbidden = 0
        """Number of requests from authenticated principals without the required right."""
        self.tokens_file_ok = True
        self.audit_ok = True
        self.tls_failures = 0
        """Number of failed TLS handshakes."""
        self.certificate_ok = True
        self.certificate_until_s = 0.0
        """When the certificate expires (Unix time, seconds); 0 without a certificate."""
        self.http_requests = 0
        """Number of answered requests to the HTTP API."""
        self.http_client_errors = 0
        self.http_server_errors = 0
        self.http_under_way = 0
        """Number of HTTP requests in progress, including streams and waiting pulls."""
        self.schedule_late_ms = Histogram(BOUNDS_MS)
        self.scrape_s = 0.0
        """Duration of the last scrape of ``/metrics`` in seconds."""
        self.loop_busy: Callable[[int], None] = lambda passed_ms: None
        """Called with how long, in ms, the event loop was busy."""
        self.ended: Callable[[Core], None] = lambda core: None
        """Called when the daemon stops leading, before its engine is released."""

    def note_commit(self, effects: Effects, elapsed_s: float) -> None:
        """Record that a batch is durable; its commit took ``elapsed_s``."""
        self.commit_s.observe(elapsed_s)
        self.batch_changes.observe(
            len(effects.enqueued)
            + len(effects.updated)
            + len(effects.moved)
            + len(effects.ended)
            + len(effects.progress)
            + len(effects.dead)
            + len(effects.records)
        )

    def note_late_schedules(self, late_ms: list[int]) -> None:
        """Record the lateness, in ms, of occurrences that became tasks."""
        for late in late_ms:
            self.schedule_late_ms.observe(max(0, late))

    def note_store_error(self, error: StoreError) -> None:
        """Count a commit whose first attempt failed."""
        if isinstance(error, CommitUnknown):
            kind = UNKNOWN
        else:
            kind = FULL if isinstance(error, CommitRefused) and error.full else REFUSED
        self.store_errors[kind] += 1

    def note_event(self, event: str) -> None:
        """Count an event of the shard."""
        if (counter := EVENT_COUNTERS.get(event)) is not None:
            setattr(self, counter, getattr(self, counter) + 1)
        elif event == "election_trouble":
            self.store_errors[ELECTION] += 1
            self.election_trouble = True
        elif event == "election_works_again":
            self.election_trouble = False

    def note_backup(self, begun_s: float) -> None:
        """Record that the daily backup that began at ``begun_s`` (Unix time) is complete."""
        self.backup_s = begun_s


async def probe_loop(observed: Observed) -> None:
    """Measure the delay of the event loop, and whether it was busy, until this is cancelled."""
    while True:
        began_s, used_s = time.monotonic(), time.thread_time()
        await asyncio.sleep(PROBE_S)
        passed_s = time.monotonic() - began_s
        lag_s = max(0.0, passed_s - PROBE_S)
        observed.loop_lag_s.observe(lag_s)
        is_full = time.thread_time() - used_s >= BUSY_SHARE * passed_s
        if is_full or lag_s * 1000 >= SLOW_MS:
            observed.loop_busy(round(passed_s * 1000))


BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
)  # fmt: skip
"""Inclusive upper bounds. The clock counts milliseconds, so no value is between 0 and 1 ms."""
BOUNDS_MS = tuple(round(bound_s * 1000) for bound_s in BOUNDS_S)
OTHER = "_other"
"""Label of the topics without a separate histogram."""
_EXACT_MS = 1024
_SIZE = _EXACT_MS + 54


class Lateness:
    """Counts of first deliveries by lateness, in steps of 1 ms up to 1,024 ms, then powers of
    two."""

    def __init__(self, topics_max: int = 100) -> None:
        self._topics_max = topics_max
        self._counts = [0] * _SIZE
        self.by_topic: dict[str, Histogram] = {}
        """Topic → lateness in ms, by ``BOUNDS_MS``."""
        self.by_cause = {cause: Histogram(BOUNDS_MS) for cause in Cause}
        """Cause → lateness in ms of deliveries that were late by more than ``LATE_MS``."""
        self.count = 0
        self.max_ms = 0

    def note(self, topic: str, late_ms: list[int]) -> tuple[int, int]:
        """Record the first deliveries of a frame, at least one. Return the least and the greatest
        lateness.

        Tasks that came due together are equally late, and are recorded as fast as one task.
        """
        counts = self._counts
        low = high = late_ms[0]
        if len(late_ms) > 1:
            low, high = min(late_ms), max(late_ms)
        if low == high:
            counts[_index(low)] += len(late_ms)
        else:
            for late in late_ms:
                counts[late if late < _EXACT_MS else _index(late)] += 1
        self.count += len(late_ms)
        if high > self.max_ms:
            self.max_ms = high
        (self.by_topic.get(topic) or self._histogram(topic)).observe_all(late_ms, low, high)
        return low, high

    def note_causes(
        self, items: Sequence[Item], causes: Sequence[Cause | None], now_ms: int
    ) -> None:
        """Record the causes of a frame's late deliveries. A delivery that was in time when it was
        taken (None) has waited for the store since, because only at-most-once deliveries wait after
        that."""
        late_by_cause: dict[Cause, list[int]] = {}
        for (row, attempt, _), cause in zip(items, causes, strict=True):
            late_ms = now_ms - row[1]
            if attempt == 1 and late_ms > LATE_MS:
                late_by_cause.setdefault(cause or Cause.STORE, []).append(late_ms)
        for cause, all_ms in late_by_cause.items():
            self.by_cause[cause].observe_all(all_ms, min(all_ms), max(all_ms))

    def _histogram(self, topic: str) -> Histogram:
        by_topic = self.by_topic
        name = topic if len(by_topic) - (OTHER in by_topic) < self._topics_max else OTHER
        return by_topic.get(name) or by_topic.setdefault(name, Histogram(BOUNDS_MS))

    def forget(self, topics: Iterable[str]) -> None:
        """Free the histograms of deleted topics."""
        for name in topics:
            self.by_topic.pop(name, None)

    @property
    def counts(self) -> list[int]:
        """A copy of the current counts, for ``percentile_ms``."""
        return list(self._counts)

    def percentile_ms(self, share: float, counts: Sequence[int] | None = None) -> int:
        """Return the upper bound, in ms, of the bucket in which this share of the deliveries in
        ``counts``, or of all deliveries, is reached."""
        counts = self._counts if counts is None else counts
        wanted, reached = share * sum(counts), 0
        for index, count in enumerate(counts):
            reached += count
            if count and reached >= wanted:
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


def _index(late_ms: int) -> int:
    return late_ms if late_ms < _EXACT_MS else _EXACT_MS + late_ms.bit_length() - 11


class Histogram:
    """Counts by bucket. ``bounds`` are the inclusive upper bounds, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The counts by bucket; the last bucket has the values above all bounds."""
        self.sum: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: list[int], low: int, high: int) -> None:
        """Count at least one value; ``low`` and ``high`` are the least and the greatest."""
        bounds, counts = self.bounds, self.counts
        first = bisect_left(bounds, low)
        if low == high:
            counts[first] += len(values)
            self.sum += low * len(values)
            return
        self.sum += sum(values)
        if first == len(bounds) or high <= bounds[first]:
            counts[first] += len(values)
            return
        ordered = sorted(values)
        start = 0
        for index in range(first, len(bounds)):
            end = bisect_right(ordered, bounds[index], start)
            counts[index] += end - start
            start = end
            if start == len(ordered):
                return
        counts[-1] += len(ordered) - start
