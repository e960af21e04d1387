"""Segments as they lie in their folders: finding them by time, and reading their lines.

Readers need nothing of a daemon: not its state, not its locks. A line counts when it ends with a
line feed and is a JSON object; anything else is skipped and counted (a crash tears the last line
of an open segment, a copy that is under way ends early).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tickwheel.history.names import (
    HOUR_MS,
    SegmentName,
    day_of,
    hour_in_day,
    hour_of,
    parse_segment,
)

DAY_MS = 24 * HOUR_MS
LINE_BYTES_MAX = 1 << 30
"""As long as a batch of the spool may be: how large a body is, is a setting without a limit. What
is longer, or a damaged file without line feeds, is not taken into memory whole."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """One file."""

    path: Path
    name: SegmentName
    hour_ms: int


@dataclass(slots=True)
class Tally:
    """What reading came upon."""

    lines: int = 0
    torn: int = 0
    """Lines that are not whole, or no JSON object."""
    unreadable: int = 0
    """Segments that end in the middle of their compression, or went away."""


def find(
    history_dir: Path, since_ms: int | None = None, until_ms: int | None = None
) -> list[Segment]:
    """Segments that may hold events of the time from ``since_ms`` to before ``until_ms``, in the
    order of their hours; of a sealed one that also lies there open, the sealed one."""
    low = None if since_ms is None else hour_of(since_ms)
    found: list[Segment] = []
    for day_ms, day in _folders(history_dir, day_of):
        if (low is not None and day_ms + DAY_MS <= low) or (
            until_ms is not None and day_ms >= until_ms
        ):
            continue
        for in_day_ms, folder in _folders(day, hour_in_day):
            hour_ms = day_ms + in_day_ms
            if (low is None or hour_ms >= low) and (until_ms is None or hour_ms < until_ms):
                found += _in_folder(folder, hour_ms)
    return found


def _folders(parent: Path, parse: Any) -> list[tuple[int, Path]]:
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    pairs = ((parse(name), parent / name) for name in names)
    return sorted((at_ms, path) for at_ms, path in pairs if at_ms is not None)


def _in_folder(folder: Path, hour_ms: int) -> list[Segment]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        files = {name: file for file in os.listdir(folder) if (name := parse_segment(file))}
        both = {n for n in files if not n.sealed and n._replace(sealed=True) in files}
        kept = sorted(files.keys() - both)
        return [Segment(folder / files[name], name, hour_ms) for name in kept]
    return []


# --- lines -----------------------------------------------------------------------------------


def open_segment(path: Path) -> BinaryIO:
    """Raises FileNotFoundError."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # it has all that is used
    return path.open("rb")


def raw_lines(path: Path, tally: Tally) -> Iterator[bytes]:
    """Whole lines. A segment that is sealed meanwhile is read on as the sealed one."""
    try:
        file = open_segment(path)
    except FileNotFoundError:
        try:
            path = path.with_name(path.name + ".gz")
            file = open_segment(path)
        except FileNotFoundError:
            tally.unreadable += 1
            return
    with file:
        try:
            while line := file.readline(LINE_BYTES_MAX):
                if line.endswith(b"\n"):
                    yield line
                else:
                    tally.torn += 1
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError):
            tally.unreadable += 1


def parse_line(line: bytes, tally: Tally) -> Event | None:
    """The event; None for what is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if type(event) is not dict or type(event.get("time_ms")) is not int:
        tally.torn += 1
        return None
    return event


def events(path: Path, tally: Tally, needles: Iterable[bytes] = ()) -> Iterator[Event]:
    """The events of one file, in order. ``needles``: only lines that hold one of these are looked
    at (a search that parses few lines is many times as fast)."""
    wanted = tuple(needles)
    for line in raw_lines(path, tally):
        tally.lines += 1
        if wanted and not any(needle in line for needle in wanted):
            continue
        event = parse_line(line, tally)
        if event is not None:
            yield event


def last_seq(path: Path) -> int:
    """The highest number in a file, 0 when there is none."""
    return max((e["seq"] for e in events(path, Tally()) if type(e.get("seq")) is int), default=0)
