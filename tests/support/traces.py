"""Traceparents at and beyond their limits, for tests of every way in."""

from __future__ import annotations

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
LOWEST = f"00-{'1'.zfill(32)}-{'1'.zfill(16)}-00"
HIGHEST = f"fe-{'f' * 32}-{'f' * 16}-ff"
RIGHT = (TRACE, LOWEST, HIGHEST)
WRONG_TEXTS = (
    TRACE[:-1],
    TRACE + "0",
    TRACE + "\n",
    TRACE + "-00",
    TRACE.upper(),
    TRACE.replace("-", "_"),
    TRACE.replace("a", "g", 1),
    TRACE.replace("7", "\N{ARABIC-INDIC DIGIT SEVEN}", 1),
    "ff" + TRACE[2:],
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    "x",
)
WRONG = (*WRONG_TEXTS, "", TRACE.encode(), 7, True)
MUST_BE = "trace must be a W3C traceparent (55 characters"
"""The end of each trace error, after the name of the task."""
