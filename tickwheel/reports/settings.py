"""What a report is asked for, what is wrong with the asking, and how long the buckets of its charts
are. Knows no Spark: the figures and the page ask the same question and get the same answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.reports.state import Manifest

QUARTER_MS = 900_000
"""The grain of all figures, in ms. Every time zone is a whole number of quarters off UTC."""
HOUR_MS = 3_600_000
TARGET_MS = 100
OBJECTIVE = 0.99
_GLOB = frozenset("*?[]{}\\")
"""Characters that Spark reads as patterns wherever it is given a path."""
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS}


Row = dict[str, Any]
"""A row of a figure: column → value."""
Rows = list[Row]


def pattern_regex(pattern: str) -> str:
    """A topic pattern as a regular expression that Python and Java read alike: ``*`` is any text,
    every other character stands for itself."""
    return "".join(".*" if c == "*" else c if c.isalnum() else f"\\{c}" for c in pattern)


def _matches(topic: str, pattern: str) -> bool:
    return re.fullmatch(pattern_regex(pattern), topic) is not None


class ReportError(Exception):
    """A report cannot be made; the message says why and what to change."""


@dataclass(frozen=True)
class Slo:
    """An objective: deliveries of the topics that match are on time in this share of cases."""

    pattern: str
    target_ms: int
    objective: float = OBJECTIVE

    def __post_init__(self) -> None:
        if self.target_ms < 0 or not 0 < self.objective <= 1:
            raise ReportError(f"SLO {self.pattern}: the target is not negative, the share 0-100 %")

    @classmethod
    def parse(cls, text: str) -> Slo:
        """The objective in ``TOPIC=TARGET`` or ``TOPIC=TARGET@SHARE%``; ``*`` is any text."""
        found = re.fullmatch(r"([^=\s]+)=(\d+)(ms|s|m|h)(?:@(\d+(?:\.\d+)?)%)?", text.strip())
        if found is None:
            raise ReportError(f"{text!r} is no SLO; write for example 'orders.*=50ms@99.9%'")
        pattern, number, unit, share = found.groups()
        objective = OBJECTIVE if share is None else float(share) / 100
        return cls(pattern, int(number) * _UNITS_MS[unit], objective)


@dataclass(frozen=True)
class ReportSettings:
    """One report. Paths are anything that Hadoop's file systems know; plain ones are local."""

    history: str
    out: str
    since_ms: int | None = None
    until_ms: int | None = None
    topics: tuple[str, ...] = ()
    """Names or patterns with ``*``; none means all."""
    timezone: str = "UTC"
    """Hours and days of the report are this zone's."""
    slos: tuple[Slo, ...] = ()
    """Objectives, the first match counts; ``TARGET_MS`` and ``OBJECTIVE`` are for other topics."""
    stuck_after_ms: int = HOUR_MS
    open_segments: bool = True
    """Whether to read also segments that are still being written."""
    batch_bytes: int = 256 << 20
    """Bytes of history (as they lie there) that a run loads in one batch; each is kept."""
    top: int = 20
    """How many of the slowest are listed."""

    def __post_init__(self) -> None:
        for name in ("since_ms", "until_ms"):
            value = getattr(self, name)
            if value is not None and value % QUARTER_MS:
                raise ReportError(f"{name[:5]}: figures are kept by the quarter of an hour; "
                                  "name a time at :00, :15, :30 or :45")  # fmt: skip
        if None not in {self.since_ms, self.until_ms} and self.since_ms >= self.until_ms:  # type: ignore[operator]  # neither is None here
            raise ReportError("since must be before until")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ReportError(f"{self.timezone!r} is no time zone; write for example "
                              "Europe/Berlin") from None  # fmt: skip
        for place in (self.history, self.out):
            if _GLOB & set(place):
                raise ReportError(f"{place}: Spark takes * ? [ ] {{ }} and \\ in a path for a "
                                  "pattern; name a folder without them")  # fmt: skip
        if self.batch_bytes < 1 or self.top < 1 or self.stuck_after_ms < 0:
            raise ReportError("batch_bytes and top are at least 1, stuck_after is not negative")

    @classmethod
    def of(cls, options: Mapping[str, Any], stuck_after_ms: int) -> Self:
        """The settings of a command line's options, by name."""
        timezone = options["timezone"]
        return cls(
            history=options["history"], out=options["out"],
            since_ms=at_ms(options["since"], timezone), until_ms=at_ms(options["until"], timezone),
            topics=tuple(options["topic"] or ()), timezone=timezone,
            slos=tuple(map(Slo.parse, options["slo"] or ())), stuck_after_ms=stuck_after_ms,
            open_segments=not options["sealed_only"], batch_bytes=options["batch_mb"] << 20,
            top=options["top"],
        )  # fmt: skip

    @property
    def table(self) -> str:
        return f"{self.out.rstrip('/')}/table"

    def wants(self, topic: str) -> bool:
        return not self.topics or any(_matches(topic, pattern) for pattern in self.topics)

    def slo_of(self, topic: str) -> Slo:
        for slo in self.slos:
            if _matches(topic, slo.pattern):
                return slo
        return Slo(topic, TARGET_MS)


def at_ms(text: str | None, timezone: str) -> int | None:
    """Milliseconds of an ISO-8601 text; without an offset it is in the report's time zone."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.strip())
        if found.tzinfo is None:
            found = found.replace(tzinfo=ZoneInfo(timezone))
        return round(found.timestamp() * 1000)
    except (ValueError, OverflowError, KeyError):
        raise ReportError(
            f"{text!r} is no ISO-8601 time; write for example 2030-01-31 or 2030-01-31T09:00"
        ) from None


# --- the buckets of the charts, from a second to a day, by the span shown ------------------------


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
