"""Reports over the delivery history, computed by Spark.

Bird's eye::

    history segments ──load──► table/events (Parquet by date and topic)      what happened
                                  │  new rows only
                                  ├─rollups──► table/facts, reasons, …   exact, additive counts
                                  └─journeys─► table/journeys            one row a task and group
    table ──metrics──► metrics/*.parquet, csv/*.csv, report.html

Only :mod:`~tickwheel.reports.table` writes the table, one numbered run after another; a run is
there when its manifest is. Metrics are functions from DataFrame to DataFrame and write nothing.
No code of ours runs on a cluster's executors: everything is column expressions, so it needs nothing
installed. This package imports nothing else of ours, and importing it does not import
pyspark: here is what a report is asked for, and what is wrong with the asking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
            raise ReportError(f"{text!r} is not an SLO; write for example 'orders.*=50ms@99.9%'")
        pattern, number, unit, share = found.groups()
        objective = OBJECTIVE if share is None else float(share) / 100
        return cls(pattern, int(number) * _UNITS_MS[unit], objective)


@dataclass(frozen=True)
class ReportSettings:
    """One report. Paths are anything that Hadoop's file systems know; plain ones are local."""

    history: tuple[str, ...]
    """The folders of one store's history. What lies in several of them counts once."""
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
        since_ms, until_ms = self.since_ms, self.until_ms
        if since_ms is not None and until_ms is not None and since_ms >= until_ms:
            raise ReportError("since must be before until")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ReportError(f"{self.timezone!r} is not a time zone; write for example "
                              "Europe/Berlin") from None  # fmt: skip
        if not self.history:
            raise ReportError("history: name at least 1 folder; none was named")
        for place in (*self.history, self.out):
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
            history=tuple(options["history"]), out=options["out"],
            since_ms=at_ms(options["since"], timezone), until_ms=at_ms(options["until"], timezone),
            topics=tuple(options["topic"] or ()), timezone=timezone,
            slos=tuple(map(Slo.parse, options["slo"] or ())), stuck_after_ms=stuck_after_ms,
            open_segments=not options["sealed_only"], batch_bytes=options["batch_mb"] << 20,
            top=options["top"],
        )  # fmt: skip

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the history, each once, without a slash at the end."""
        return tuple(dict.fromkeys(place.rstrip("/") for place in self.history))

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


_TIME = re.compile(
    r"[0-9]{4}(-?)[0-9]{2}\1[0-9]{2}"
    r"(?:[T ][0-9]{2}(?::?[0-9]{2}(?::?[0-9]{2}(?:[.,][0-9]{1,6})?)?)?"
    r"(?:Z|[+-][0-9]{2}(?::?[0-5][0-9])?)?)?",
    re.IGNORECASE,
)
"""The forms that every command reads (``api/times.py``, which is not here where reports run)."""


def at_ms(text: str | None, timezone: str) -> int | None:
    """Milliseconds of an ISO-8601 text; without an offset it is in the report's time zone."""
    if text is None:
        return None
    try:
        if _TIME.fullmatch(text.strip()) is None:
            raise ValueError
        found = datetime.fromisoformat(text.strip().upper())
        if found.tzinfo is None:
            found = found.replace(tzinfo=ZoneInfo(timezone))
        return round(found.timestamp() * 1000)
    except (ValueError, OverflowError, KeyError):
        raise ReportError(
            f"{text!r} is not an ISO-8601 time; write for example 2030-01-31 or 2030-01-31T09:00"
        ) from None
