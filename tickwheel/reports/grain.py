"""How long the buckets of a report's charts are: from a second to a day, by the span shown.

Knows no Spark: the figures and the page ask the same question and get the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tickwheel.reports.settings import HOUR_MS, QUARTER_MS, ReportSettings

if TYPE_CHECKING:
    from tickwheel.reports.manifest import Manifest

STEPS_MS = (1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 180_000, 300_000, QUARTER_MS)
"""Lengths of steps. Each divides a quarter of an hour, so none crosses a local hour."""
BUCKETS_MAX = 240
HOURS_MAX = 24 * 15
"""More buckets than this are no picture: longer ones are drawn instead."""
FINE_ROWS_MAX = 2_000_000
"""Up to so many events figures below the quarter of an hour are counted from the events themselves;
with more in the table, the quarter is the shortest step."""


@dataclass(frozen=True)
class Grain:
    """The buckets of the charts."""

    name: str
    """``step``, ``hour`` or ``day``: the figures that are drawn are those ``by_`` this."""
    step_ms: int
    """The length of a step; of hours and days, about their length."""

    @property
    def is_fine(self) -> bool:
        """Whether buckets are shorter than those that figures are kept by."""
        return self.step_ms < QUARTER_MS

    @property
    def text(self) -> str:
        """The length as people say it: ``5 seconds``, ``quarter of an hour``, ``hour``."""
        if self.name != "step":
            return self.name
        size, unit = (self.step_ms // 60_000, "minute")
        if not size:
            size, unit = (self.step_ms // 1_000, "second")
        return unit if size == 1 else f"{size} {unit}s"


def grain(manifest: Manifest, settings: ReportSettings) -> Grain:
    """The shortest buckets of which there are not too many over the time shown."""
    first_ms, last_ms = manifest.first_ms or 0, manifest.last_ms or 0
    begin_ms = first_ms if settings.since_ms is None else max(first_ms, settings.since_ms)
    end_ms = last_ms if settings.until_ms is None else min(last_ms, settings.until_ms)
    span_ms = max(0, end_ms - begin_ms)
    for step_ms in STEPS_MS:
        if step_ms < QUARTER_MS and manifest.rows > FINE_ROWS_MAX:
            continue
        if span_ms < step_ms * BUCKETS_MAX:
            return Grain("step", step_ms)
    if span_ms <= HOURS_MAX * HOUR_MS:
        return Grain("hour", HOUR_MS)
    return Grain("day", 24 * HOUR_MS)
