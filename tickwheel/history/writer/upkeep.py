"""When retention is enforced, and what is said of it: by age and size at a set hour, by size
whenever a segment is sealed, by the use of the disk then and once a minute.

The use of the disk is everybody's: what is removed here may not help. So only as much is removed
as the disk is over its limit, by what the files take, and the next look shows the rest: some file
systems give blocks back later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from tickwheel.disk import Use, measure
from tickwheel.history.names import HOUR_MS
from tickwheel.history.writer.retention import Cleaned, Limits, clean, free

LOOK_MS = 60_000
DAY_MS = 24 * HOUR_MS


class Upkeep:
    """Of one history's folder."""

    def __init__(
        self,
        history_dir: Path,
        limits: Limits,
        *,
        clean_hour: int,
        log: Callable[[str], None],
        measured: Callable[[Path], Use] = measure,
    ) -> None:
        self._dir = history_dir
        self._limits = limits
        self._clean_hour = clean_hour
        self._log = log
        self._measured = measured
        self._looked_ms: int | None = None
        self._full_told = 0
        self._warned = False
        self._stuck_told = False

    def is_hour(self, now_ms: int, cleaned_ms: int) -> bool:
        """At the set hour by this machine's clock, and when a day was missed."""
        since_ms = now_ms - cleaned_ms
        is_hour = time.localtime(now_ms / 1000).tm_hour == self._clean_hour
        return since_ms >= HOUR_MS and (is_hour or since_ms >= DAY_MS)

    def daily(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Raises OSError."""
        self._clean(self._limits, now_ms, busy)

    def sealed(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """There is a segment more. Raises OSError."""
        if self._limits.bytes_max is not None:
            self._clean(Limits(None, self._limits.bytes_max), now_ms, busy)
        self._look(now_ms, busy)

    def now_and_then(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Raises OSError."""
        if self._looked_ms is None or abs(now_ms - self._looked_ms) >= LOOK_MS:
            self._look(now_ms, busy)

    def _clean(self, limits: Limits, now_ms: int, busy: AbstractSet[Path]) -> None:
        cleaned = clean(self._dir, limits, now_ms, busy)
        if cleaned.segments:
            self._log(_removed(cleaned))
        if cleaned.kept_segments > self._full_told:
            self._log(
                f"{cleaned.kept_segments} segments are over the limit, and kept because they are"
                " newer than the last backup, or being written"
            )
        self._full_told = cleaned.kept_segments

    def _look(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """How full the disk is, and what that asks for."""
        warn, limit = self._limits.disk_warn, self._limits.disk_clean
        if warn >= 1 and limit >= 1:
            return
        self._looked_ms = now_ms
        use = self._measured(self._dir)
        if warn < 1 and use.share > warn and not self._warned:
            self._log(
                f"the disk of {self._dir} is {use.share:.1%} full; above {warn:.1%}"
                " (history_disk_warn)"
            )
        self._warned = use.share > warn
        over_bytes = use.used_bytes - int(limit * use.bytes)
        if limit >= 1 or over_bytes <= 0:
            self._stuck_told = False
            return
        cleaned = free(self._dir, over_bytes, busy)
        why = f"the disk was {use.share:.1%} full, above {limit:.1%} (history_disk_clean)"
        if cleaned.segments:
            self._log(f"{_removed(cleaned)}: {why}")
        if cleaned.missing_bytes <= 0:
            self._stuck_told = False
        elif not self._stuck_told:
            self._stuck_told = True
            self._log(
                f"{why}, and no history is left that may be removed: {cleaned.kept_segments}"
                " segments are newer than the last backup, or being written"
            )


def _removed(cleaned: Cleaned) -> str:
    return f"removed {cleaned.segments} segments, {cleaned.bytes} bytes"
