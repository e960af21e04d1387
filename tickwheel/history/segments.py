"""The history's folder and its segments: what files are called, finding them by time, their lines.

``HISTORY_DIR/dt=2026-11-21/hour=09/NODE-sSHARD-eEPOCH-NNNNNN.jsonl[.gz]`` are segments. Folders are
UTC, by the time of the event. ``HISTORY_DIR/_state/NODE-sSHARD/`` belongs to one writer: its spool,
its position and its lock.

Readers need nothing of a daemon: not its state, not its locks. A line counts when it ends with a
line feed and is a JSON object. Anything else is skipped and counted: a crash tears the last line of
an open segment, and a copy that is still being made ends early.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
LINE_BYTES_MAX = 1 << 30
"""The longest line: as long as a batch of the spool may be, because a body's size is a setting
without a limit. A longer one, or a damaged file without line feeds, is not taken into memory
whole."""
STATE = "_state"
OPEN_END, SEALED_END = ".jsonl", ".jsonl.gz"
PART = ".tmp-"
"""The beginning of the name of a file that is not whole yet."""

Event = dict[str, Any]

_EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NODE_MAX = 100
_SEGMENT = re.compile(r"(?P<node>[A-Za-z0-9._-]+)-s(\d+)-e(\d+)-(\d+)\.jsonl(?P<gz>\.gz)?")
_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")
_HOUR = re.compile(r"hour=(\d{2})")


class SegmentName(NamedTuple):
    """The parts of a segment's file name."""

    node: str
    shard: int
    epoch: int
    number: int
    sealed: bool

    def __str__(self) -> str:
        end = SEALED_END if self.sealed else OPEN_END
        return f"{self.node}-s{self.shard}-e{self.epoch}-{self.number:06d}{end}"


def safe_node(node: str) -> str:
    """A node's name in a form that is fit for file names."""
    found = _UNSAFE.sub("_", node)[:_NODE_MAX]
    # A name that begins with a dot or an underscore would hide the file from readers.
    return f"n{found}" if not found or found[0] in "._" else found


def state_folder(history_dir: str | Path, node: str, shard: int) -> Path:
    """The folder with the spool and the position of one daemon's writer."""
    return Path(history_dir) / STATE / f"{safe_node(node)}-s{shard}"


def parse_segment(name: str) -> SegmentName | None:
    found = _SEGMENT.fullmatch(name)
    if found is None or name[0] in "._":
        return None
    shard, epoch, number = map(int, found.group(2, 3, 4))
    return SegmentName(found["node"], shard, epoch, number, found["gz"] is not None)


def hour_of(time_ms: int) -> int:
    """The first millisecond of the hour of ``time_ms``."""
    return time_ms - time_ms % HOUR_MS


def hour_folder(hour_ms: int) -> str:
    """``dt=2026-11-21/hour=09``, relative to the history's folder."""
    # Not fromtimestamp: it knows fewer years.
    at = _EPOCH_START + timedelta(milliseconds=hour_ms)
    return f"dt={at.year:04d}-{at.month:02d}-{at.day:02d}/hour={at.hour:02d}"


def day_of(name: str) -> int | None:
    """The first millisecond of the day that ``dt=2026-11-21`` names; None for another folder."""
    found = _DAY.fullmatch(name)
    if found is None:
        return None
    try:
        day = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (day - _EPOCH_START) // timedelta(milliseconds=1)


def hour_in_day(name: str) -> int | None:
    """The milliseconds after midnight of ``hour=09``; None for another folder."""
    found = _HOUR.fullmatch(name)
    hour = int(found[1]) if found is not None else 24
    return hour * HOUR_MS if hour < 24 else None


# --- finding segments ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file."""

    path: Path
    name: SegmentName
    hour_ms: int


@dataclass(slots=True)
class Tally:
    """Counts of what reading came upon."""

    lines: int = 0
    torn: int = 0
    """Lines that are not whole, or are no JSON object."""
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
    """Open a segment to read its lines. Raises FileNotFoundError."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # it has all that is used
    return path.open("rb")


def raw_lines(path: Path, tally: Tally) -> Iterator[bytes]:
    """The whole lines of a segment. One that is sealed meanwhile is read on as the sealed one."""
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
    """The event in a line; None: it holds none."""
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


def last_seqs(history_dir: Path, shard: int, epochs: Collection[int]) -> dict[int, int]:
    """The highest number of an event in the segments of each of these epochs of a shard."""
    found = dict.fromkeys(epochs, 0)
    for segment in find(history_dir) if epochs else ():
        name = segment.name
        if name.shard == shard and name.epoch in found:
            seqs = (e["seq"] for e in events(segment.path, Tally()) if type(e.get("seq")) is int)
            found[name.epoch] = max(found[name.epoch], max(seqs, default=0))
    return found
