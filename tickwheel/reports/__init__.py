"""Reports on the delivery history, computed by Spark.

Overview::

    history segments ──load──► table/events (Parquet by date and topic)      what happened
                                  │  new rows only
                                  ├─rollups──► table/facts, reasons, …   exact, additive counts
                                  └─journeys─► table/journeys            one row per task and group
    table ──metrics──► metrics/*.parquet, csv/*.csv, report.html

Only :mod:`~tickwheel.reports.table` writes the table, in numbered runs; a run exists when its
manifest exists. Metrics are functions from DataFrame to DataFrame and write nothing. A cluster's
executors need nothing installed, because everything is column expressions. This package imports
nothing else from Tickwheel. This module defines the settings of a report and their errors.
Importing it does not import pyspark.
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
"""The interval of all figures, in milliseconds: a quarter of an hour, because the offsets of all
time zones are multiples of it."""
HOUR_MS = 3_600_000
TARGET_MS = 100
OBJECTIVE = 0.99
_GLOB = frozenset("*?[]{}\\")
"""Characters that have a special meaning for Spark in paths."""
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS}


Row = dict[str, Any]
"""One row of a metric's result: column → value."""
Rows = list[Row]


def pattern_regex(pattern: str) -> str:
    """Return a topic pattern as a regular expression with the same meaning in Python and Java:
    ``*`` matches any text, and every other character matches itself."""
    return "".join(".*" if c == "*" else c if c.isalnum() else f"\\{c}" for c in pattern)


def _matches(topic: str, pattern: str) -> bool:
    return re.fullmatch(pattern_regex(pattern), topic) is not None


class ReportError(Exception):
    """A report cannot be made. The message says why, and what to change."""


@dataclass(frozen=True)
class Slo:
    """An objective: the share of first deliveries of matching topics that must be on time."""

    pattern: str
    target_ms: int
    objective: float = OBJECTIVE

    def __post_init__(self) -> None:
        if self.target_ms < 0 or not 0 < self.objective <= 1:
            raise ReportError(
                f"SLO {self.pattern}: the target must be at least 0 ms and the share above 0 % and"
                f" at most 100 %, not {self.target_ms} ms and {100 * self.objective:g} %"
            )

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse ``TOPIC=TARGET`` or ``TOPIC=TARGET@SHARE%``, where ``*`` matches any text."""
        match = re.fullmatch(r"([^=\s]+)=(\d{1,15})(ms|s|m|h)(?:@(\d+(?:\.\d+)?)%)?", text.strip())
        if match is None:
            raise ReportError(f"{text!r} is not an SLO; write for example 'orders.*=50ms@99.9%'")
        pattern, number, unit, share = match.groups()
        objective = OBJECTIVE if share is None else float(share) / 100
        return cls(pattern, int(number) * _UNITS_MS[unit], objective)


@dataclass(frozen=True)
class ReportSettings:
    """The settings of one report. Paths can be on any Hadoop file system; plain paths are local."""

    history: tuple[str, ...]
    """The folders of one store's history. An event in several of them counts once."""
    out: str
    since_ms: int | None = None
    until_ms: int | None = None
    topics: tuple[str, ...] = ()
    """Names, or patterns with ``*``; empty: all topics."""
    timezone: str = "UTC"
    """Time zone of the report's hours and days."""
    slos: tuple[Slo, ...] = ()
    """Objectives, of which the first match applies. Other topics have ``TARGET_MS`` and
    ``OBJECTIVE``."""
    stuck_after_ms: int = HOUR_MS
    open_segments: bool = True
    """Whether to read segments that are still being written."""
    batch_bytes: int = 256 << 20
    """Bytes of history files that a run loads in one batch. Each batch is saved."""
    top: int = 20
    """Number of keys, producers and subscribers in the lists of the slowest."""

    def __post_init__(self) -> None:
        for name in ("since_ms", "until_ms"):
            value = getattr(self, name)
            if value is not None and value % QUARTER_MS:
                raise ReportError(f"{name[:5]}: figures are kept per quarter of an hour;"
                                  " use a time at :00, :15, :30 or :45")  # fmt: skip
        since_ms, until_ms = self.since_ms, self.until_ms
        if since_ms is not None and until_ms is not None and since_ms >= until_ms:
            raise ReportError("since must be before until")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ReportError(f"{self.timezone!r} is not a time zone; write for example "
                              "Europe/Berlin") from None  # fmt: skip
        if not self.history:
            raise ReportError("history must have at least 1 folder")
        for path in (*self.history, self.out):
            if _GLOB & set(path):
                raise ReportError(f"{path}: Spark reads * ? [ ] {{ }} and \\ in a path as a "
                                  "pattern; name a folder without them")  # fmt: skip
        if self.batch_bytes < 1 or self.top < 1 or self.stuck_after_ms < 0:
            raise ReportError(
                f"batch_bytes ({self.batch_bytes}) and top ({self.top}) must be at least 1, and"
                f" stuck_after_ms ({self.stuck_after_ms}) at least 0"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any], stuck_after_ms: int) -> Self:
        """Build the settings from command-line options, given by name."""
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
        """The distinct folders of the history, without a trailing slash."""
        return tuple(dict.fromkeys(path.rstrip("/") for path in self.history))

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
"""The time formats of all commands, repeated because reports run without ``api/times.py``."""


def at_ms(text: str | None, timezone: str) -> int | None:
    """Return an ISO-8601 time in milliseconds since 1970. A time without an offset is in
    ``timezone``. Raise ReportError."""
    if text is None:
        return None
    try:
        if _TIME.fullmatch(text.strip()) is None:
            raise ValueError
        time = datetime.fromisoformat(text.strip().upper())
        if time.tzinfo is None:
            time = time.replace(tzinfo=ZoneInfo(timezone))
        return round(time.timestamp() * 1000)
    except (ValueError, OverflowError, KeyError):
        raise ReportError(
            f"{text!r} is not an ISO-8601 time; write for example 2030-01-31 or 2030-01-31T09:00"
        ) from None
