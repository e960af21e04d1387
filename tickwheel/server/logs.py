"""Structured logs on stderr, with one event per line, for people or for machines.

Warnings and errors that stores and libraries log through ``logging`` have the same format.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal

import structlog

from tickwheel.api.kinds import TRACE_PATTERN
from tickwheel.log_writer import writer_of

Log = structlog.typing.FilteringBoundLogger
WARNINGS = frozenset(
    (
        "store_trouble", "store_full", "clock_jumped", "connection_closed", "deposed",
        "election_trouble", "store_came_back_empty", "takeover_failed", "history_dropped",
        "history_writer_ended", "history_unfinished", "backup_failed", "store_is_partial",
        "same_node_name", "clock_held",
        "rows_missing", "tokens_file_broken", "tokens_used_unwritable", "audit_unwritable",
        "audit_unfinished", "certificate_broken", "otlp_failed", "push_ended", "outbound_ended",
        "inbox_ended", "inbox_trouble",
    )
)  # fmt: skip
"""Events that are logged as warnings; most other events have the level info."""
REPEATING = frozenset(
    (
        "election_trouble", "election_works_again", "store_trouble", "store_works_again",
        "store_full", "store_has_room", "takeover_failed", "waiting", "deposed", "inbox_ended",
        "inbox_trouble", "inbox_works_again",
    )
)  # fmt: skip
"""Events that can repeat endlessly by themselves; ``LogRateLimit`` limits their lines."""
ERRORS = frozenset(("internal_error",))
"""Events that are logged as errors."""


def log_event(log: Log, event: str, text: str) -> None:
    """Log an event at its level."""
    write = log.error if event in ERRORS else log.warning if event in WARNINGS else log.info
    write(event, detail=text)


LINES_MAX: Final = 10
LINES_S: Final = 60.0
"""Maximum log lines about events of one kind in ``LINES_S`` seconds."""


class LogRateLimit:
    """Limits the log lines about events that any client can cause, or that repeat by themselves,
    and counts the events that are not logged."""

    def __init__(self, events_max: int = LINES_MAX, every_s: float = LINES_S) -> None:
        self._events_max = events_max
        self._every_s = every_s
        self.left_out = 0
        """Number of events that were not logged before the last logged event."""
        self._logged = self._suppressed = 0
        self._since_s = -every_s

    def note(self, now_s: float) -> str | None:
        """Count an event at ``now_s`` of the steady clock. Return the text to append to its log
        line, or None if it must not be logged."""
        if now_s - self._since_s >= self._every_s:
            self._logged, self._since_s = 0, now_s
        if self._logged >= self._events_max:
            self._suppressed += 1
            return None
        self._logged += 1
        self.left_out, self._suppressed = self._suppressed, 0
        text = f"; {self.left_out} more like it were not logged" if self.left_out else ""
        is_last = self._logged == self._events_max
        return text + ("; further events are only counted" if is_last else "")


_TRACEPARENT = re.compile(f"{TRACE_PATTERN[1:-1]}(?:(?<!^00.{{53}})-.*)?")
"""A valid traceparent. Versions after 00 can have further fields after another hyphen."""


def bind_trace(traceparent: str | None) -> AbstractContextManager[Any]:
    """Add ``trace_id`` and ``span_id`` to log records of the block if ``traceparent`` is valid."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return nullcontext()
    _, trace_id, span_id, *_ = traceparent.split("-")
    fields: Mapping[str, str] = {"trace_id": trace_id, "span_id": span_id}
    return structlog.contextvars.bound_contextvars(**fields)


def configure(log_format: Literal["console", "json"], level: str, node: str = "") -> Log:
    """Configure logging and return the daemon's logger. Loggers of the standard library log only
    warnings and errors. Every line has the field ``node``, unless ``node`` is empty."""
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    after: list[structlog.typing.Processor] = [structlog.processors.format_exc_info]
    if log_format == "json":
        after.append(structlog.processors.JSONRenderer())
    else:
        after.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *after],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    structlog.configure(
        processors=[*before, *after],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Write each line at once: the daemons of several shards can share the file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    log: Log = structlog.get_logger()
    fields = {"node": node} if node else {}
    if (writer := writer_of(sys.stderr)) is not None:
        context = structlog.contextvars.get_contextvars() | fields  # the thread has no context
        writer.format_dropped = DroppedLinesFormatter([*before, *after], context)
    return log.bind(**fields)


class DroppedLinesFormatter:
    """Formats the log line that reports dropped lines."""

    def __init__(self, processors: Sequence[structlog.typing.Processor], fields: Any) -> None:
        self._log = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors,
            structlog.BoundLogger,
            cache_logger_on_first_use=False,
        ).bind(**fields)

    def __call__(self, count: int) -> bytes:
        detail = "the reader of this log was blocked"
        line: str = self._log.warning("log_lines_dropped", count=count, detail=detail)
        return f"{line}\n".encode(errors="backslashreplace")


def dropped() -> int:
    """Return how many lines of this process's log were dropped."""
    writer = writer_of(sys.stderr)
    return 0 if writer is None else writer.dropped
