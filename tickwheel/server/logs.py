"""Structured logs: one event a line on stderr, for people or for machines."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

Log = structlog.typing.FilteringBoundLogger


def configure(log_format: Literal["console", "json"], level: str) -> Log:
    """The daemon's logger. Standard-library loggers of dependencies are kept to warnings."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if log_format == "json":
        processors.append(structlog.processors.JSONRenderer())
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    log: Log = structlog.get_logger()
    return log
