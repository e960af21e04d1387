"""Structured logs: one event a line on stderr, for people or for machines.

What stores and libraries say through ``logging`` comes out the same way, from warnings on.
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
    )
)  # fmt: skip
"""Events that are logged as warnings; others are for information."""
REPEATING = frozenset(
    (
        "election_trouble", "election_works_again", "store_trouble", "store_works_again",
        "store_full", "store_has_room", "takeover_failed", "waiting", "deposed",
    )
)  # fmt: skip
"""Events that can repeat, in turn and for ever, without anybody's doing: see ``Sparing``."""
ERRORS = frozenset(("internal_error",))
"""Events that should not have happened, and are logged as errors."""


def say(log: Log, event: str, text: str) -> None:
    """Log an event by how grave it is."""
    write = log.error if event in ERRORS else log.warning if event in WARNINGS else log.info
    write(event, detail=text)


LINES_MAX: Final = 10
LINES_S: Final = 60.0
"""Lines about events of one kind, and the seconds in which there are so many at most."""


class Sparing:
    """Lets some events of a kind into the log and counts the others: for what a stranger can cause
    as often as it likes, and for what repeats by itself."""

    def __init__(self, events_max: int = LINES_MAX, every_s: float = LINES_S) -> None:
        self._most = events_max
        self._every_s = every_s
        self.left_out = 0
        """Events that were left out before the one that was logged last."""
        self._logged = self._quiet = 0
        self._since_s = -every_s

    def note(self, now_s: float) -> str | None:
        """Note an event, by the steady clock. Return the end of its line; None: leave it out."""
        if now_s - self._since_s >= self._every_s:
            self._logged, self._since_s = 0, now_s
        if self._logged >= self._most:
            self._quiet += 1
            return None
        self._logged += 1
        self.left_out, self._quiet = self._quiet, 0
        said = f"; {self.left_out} more like it were not logged" if self.left_out else ""
        return said + ("; the next ones are only counted" if self._logged == self._most else "")


_TRACEPARENT = re.compile(f"{TRACE_PATTERN[1:-1]}(?:(?<!^00.{{53}})-.*)?")
"""Versions to come may go on behind a -; of version 00 there is no more."""


def traced(traceparent: str | None) -> AbstractContextManager[Any]:
    """A block whose records have ``trace_id`` and ``span_id``, if the text is a traceparent."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return nullcontext()
    _, trace_id, span_id, *_ = traceparent.split("-")
    said: Mapping[str, str] = {"trace_id": trace_id, "span_id": span_id}
    return structlog.contextvars.bound_contextvars(**said)


def configure(log_format: Literal["console", "json"], level: str, node: str = "") -> Log:
    """The daemon's logger; standard-library loggers are kept to warnings. ``node``: said by every
    line."""
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
        # A line in one piece: the daemons of several shards may write to the same file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    log: Log = structlog.get_logger()
    said = {"node": node} if node else {}
    if (writer := writer_of(sys.stderr)) is not None:
        context = structlog.contextvars.get_contextvars() | said  # a thread has none
        writer.line_of_dropped = _LineOfDropped([*before, *after], context)
    return log.bind(**said)


class _LineOfDropped:
    """Makes the line that says how many lines of the log nobody has taken."""

    def __init__(self, processors: Sequence[structlog.typing.Processor], said: Any) -> None:
        self._log = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors,
            structlog.BoundLogger,
            cache_logger_on_first_use=False,
        ).bind(**said)

    def __call__(self, count: int) -> bytes:
        detail = "whoever reads this log stood still"
        line: str = self._log.warning("log_lines_dropped", count=count, detail=detail)
        return f"{line}\n".encode(errors="backslashreplace")


def dropped() -> int:
    """Return how many lines of this process's log were dropped."""
    writer = writer_of(sys.stderr)
    return 0 if writer is None else writer.dropped
