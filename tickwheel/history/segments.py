"""The history's folder and its segments: what files are called, finding them by time, their lines.

``HISTORY_DIR/dt=2026-11-21/hour=09/NODE-sSHARD-eEPOCH-NNNNNN.jsonl[.gz]`` are segments. Folders are
UTC, by the time of the event. ``HISTORY_DIR/_state/NODE-sSHARD/`` belongs to one writer: its spool,
its position and its lock.

Readers need nothing of a daemon: not its state, not its locks. A line counts when it ends with a
line feed and is a JSON object. Anything else is skipped and counted: a crash tears the last line of
an open segment, and a copy that is still being made ends early.

What is older than its time is removed, and the oldest when there is too much: whole hours by age,
single segments by size. Never removed are what a restore from the last backup needs, and an open
segment of the writer that cleans. Others may clean the same folder at the same time: what is gone
already is no error.

``Upkeep`` knows when: by age and size at a set hour, by size whenever a segment is sealed, by the
use of the disk then and once a minute. The disk is used by others too: what is removed here may
not help. So only as much is removed as the disk is over its limit, counted by what the files take
on it. The next look shows the rest: some file systems give blocks back later.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tickwheel.disk import Use, measure

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


def state_folders(history_dir: Path, shard: int) -> list[Path]:
    """The state folders that the writers of a shard have, one for each node."""
    found = sorted((history_dir / STATE).glob(f"*-s{shard}"))
    return [folder for folder in found if folder.is_dir()]  # not the mark of the last backup


def replace_file(path: Path, text: str) -> None:
    """Write a small file that readers see as a whole. Raises OSError; then the former one is still
    there."""
    part = path.with_name(f"{PART}{path.name}")
    try:
        part.write_text(text)
        part.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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
    history_dir: Path,
    since_ms: int | None = None,
    until_ms: int | None = None,
    *,
    shard: int | None = None,
) -> list[Segment]:
    """Segments that may hold events of the time from ``since_ms`` to before ``until_ms``, in the
    order of their hours; of a sealed one that also lies there open, the sealed one. ``shard``: only
    those of this shard."""
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
    return [one for one in found if shard in (None, one.name.shard)]


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
    for segment in find(history_dir, shard=shard) if epochs else ():
        epoch = segment.name.epoch
        if epoch in found:
            seqs = (e["seq"] for e in events(segment.path, Tally()) if type(e.get("seq")) is int)
            found[epoch] = max(found[epoch], max(seqs, default=0))
    return found


# --- retention -----------------------------------------------------------------------------------

LAST_BACKUP = "_last_backup"
"""Begins a name that no node's folder has: see safe_node."""
LOOK_MS = 60_000
"""How often the use of the disk is measured."""
BACKUP_MARGIN_MS = HOUR_MS
"""How long before its backup, in ms, a restore begins to read: clocks are not exact."""


@dataclass(slots=True)
class Cleaned:
    """The segments that a clean-up removed, and those over the limit that it had to keep."""

    segments: int = 0
    bytes: int = 0
    """The bytes of the removed segments."""
    kept_segments: int = 0
    """Segments over the limit that are newer than the last backup, or are being written."""
    left_bytes: int = 0
    missing_bytes: int = 0
    """Bytes that had to be freed, and could not be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the history; None: no limit."""

    retention_ms: int | None = 72 * HOUR_MS
    bytes_max: int | None = None
    disk_warn: float = 1.0
    """The shares of the disk that may be used; 1: no limit."""
    disk_clean: float = 1.0


@dataclass(slots=True)
class _Found:
    segment: Segment
    size: int
    taken: int
    """The bytes of the disk that the file takes; at least, where a file system does not say."""
    is_busy: bool
    is_needed: bool
    """Whether a restore from the last backup needs it."""

    @property
    def may_go(self) -> bool:
        """Whether it may be removed for its size."""
        return self.segment.name.sealed and not self.is_busy and not self.is_needed


def clean(
    history_dir: Path, limits: Limits, now_ms: int, busy: AbstractSet[Path] = frozenset()
) -> Cleaned:
    """Remove what is over the limits of age and size. Raises OSError."""
    cleaned = Cleaned()
    left: list[_Found] = []
    for found in _measure(history_dir, busy):
        end_ms = found.segment.hour_ms + HOUR_MS
        if limits.retention_ms is not None and end_ms <= now_ms - limits.retention_ms:
            if not found.is_busy and not found.is_needed:
                _remove(found, cleaned)
                continue
            cleaned.kept_segments += not found.is_busy
        left.append(found)
    cleaned.left_bytes = sum(found.size for found in left)
    if limits.bytes_max is not None:
        for found in left:
            if cleaned.left_bytes <= limits.bytes_max:
                break
            if found.may_go:
                _remove(found, cleaned)
                cleaned.left_bytes -= found.size
        if cleaned.left_bytes > limits.bytes_max:
            cleaned.kept_segments += sum(not found.may_go for found in left)
    return cleaned


def free(history_dir: Path, bytes_: int, busy: AbstractSet[Path] = frozenset()) -> Cleaned:
    """Remove the oldest sealed segments until so many bytes of the disk are free. Raises
    OSError."""
    cleaned = Cleaned(missing_bytes=bytes_)
    for found in _measure(history_dir, busy):
        if cleaned.missing_bytes <= 0:
            break
        if found.may_go:
            _remove(found, cleaned)
            cleaned.missing_bytes -= found.taken
        else:
            cleaned.kept_segments += 1
    return cleaned


def _measure(history_dir: Path, busy: AbstractSet[Path]) -> list[_Found]:
    keep_ms = needed_since_ms(history_dir)
    found = []
    for segment in find(history_dir):
        with contextlib.suppress(FileNotFoundError):
            status = segment.path.stat()
            taken = max(status.st_size, status.st_blocks * 512)
            is_needed = keep_ms is not None and segment.hour_ms + HOUR_MS > keep_ms
            is_busy = segment.path in busy
            found.append(_Found(segment, status.st_size, taken, is_busy, is_needed))
    return found


def _remove(found: _Found, cleaned: Cleaned) -> None:
    path = found.segment.path
    path.unlink(missing_ok=True)
    cleaned.segments += 1
    cleaned.bytes += found.size
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()  # only when it is empty


# --- the last backup -------------------------------------------------------------------------


def last_backup_file(history_dir: str | Path, shard: int) -> Path:
    return Path(history_dir) / STATE / f"{LAST_BACKUP}-s{shard}"


def write_last_backup(history_dir: str | Path, shard: int, time_ms: int, path: str) -> None:
    """A backup was begun at ``time_ms`` and is whole now: what came after it is needed.

    Raises OSError.
    """
    file = last_backup_file(history_dir, shard)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps({"time_ms": time_ms, "path": path}) + "\n")


def last_backup_ms(history_dir: str | Path, shard: int) -> int | None:
    """When the last backup of this shard was begun; None: none is noted."""
    return _read(last_backup_file(history_dir, shard))


def needed_since_ms(history_dir: Path) -> int | None:
    """From when on some shard's restore needs the history; None: none does."""
    marks = list((history_dir / STATE).glob(f"{LAST_BACKUP}-s*"))
    # A mark that cannot be read still says that there is a backup: nothing goes until it can be.
    times = [_read(mark) or 0 for mark in marks if os.path.lexists(mark)]
    return min(times) - BACKUP_MARGIN_MS if times else None


def _read(file: Path) -> int | None:
    try:
        return int(json.loads(file.read_bytes())["time_ms"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- when, and what is logged ----------------------------------------------------------------


class Upkeep:
    """Keeps one history's folder within its limits."""

    def __init__(
        self, history_dir: Path, limits: Limits, clean_hour: int, log: Callable[[str], None],
        measured: Callable[[Path], Use] = measure,
    ) -> None:  # fmt: skip
        self._dir = history_dir
        self._limits = limits
        self._clean_hour = clean_hour
        self._log = log
        self._measured = measured
        self._looked_ms: int | None = None
        self._full_logged = 0
        """How many segments were over the limit and kept when that was logged last."""
        self._warned = False
        self._stuck_logged = False

    def is_hour(self, now_ms: int, cleaned_ms: int) -> bool:
        """Whether it is the set hour by this machine's clock, or a day was missed."""
        since_ms = now_ms - cleaned_ms
        is_hour = time.localtime(now_ms / 1000).tm_hour == self._clean_hour
        return since_ms >= HOUR_MS and (is_hour or since_ms >= DAY_MS)

    def daily(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Enforce the limits once a day. Raises OSError."""
        self._clean(self._limits, now_ms, busy)

    def sealed(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Enforce the size, after a segment more was sealed. Raises OSError."""
        if self._limits.bytes_max is not None:
            self._clean(Limits(None, self._limits.bytes_max), now_ms, busy)
        self._look(now_ms, busy)

    def now_and_then(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Look at the disk, if the last look was long ago. Raises OSError."""
        if self._looked_ms is None or abs(now_ms - self._looked_ms) >= LOOK_MS:
            self._look(now_ms, busy)

    def _clean(self, limits: Limits, now_ms: int, busy: AbstractSet[Path]) -> None:
        cleaned = clean(self._dir, limits, now_ms, busy)
        if cleaned.segments:
            self._log(_removed(cleaned))
        if cleaned.kept_segments > self._full_logged:
            self._log(
                f"{cleaned.kept_segments} segments are over the limit, and kept because they are"
                " newer than the last backup, or being written"
            )
        self._full_logged = cleaned.kept_segments

    def _look(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Measure how full the disk is, and warn or remove segments."""
        warn, limit = self._limits.disk_warn, self._limits.disk_clean
        if warn >= 1 and limit >= 1:
            return
        self._looked_ms = now_ms
        use = self._measured(self._dir)
        if warn < 1 and use.share > warn and not self._warned:
            self._log(
                f"the disk of {self._dir} is {use.share:.1%} full; above {warn:.1%}"
                " (history_disk_warn)"
            )
        self._warned = use.share > warn
        over_bytes = use.used_bytes - int(limit * use.bytes)
        if limit >= 1 or over_bytes <= 0:
            self._stuck_logged = False
            return
        cleaned = free(self._dir, over_bytes, busy)
        why = f"the disk was {use.share:.1%} full, above {limit:.1%} (history_disk_clean)"
        if cleaned.segments:
            self._log(f"{_removed(cleaned)}: {why}")
        if cleaned.missing_bytes <= 0:
            self._stuck_logged = False
        elif not self._stuck_logged:
            self._stuck_logged = True
            self._log(
                f"{why}, and no history is left that may be removed: {cleaned.kept_segments}"
                " segments are newer than the last backup, or being written"
            )


def _removed(cleaned: Cleaned) -> str:
    return f"removed {cleaned.segments} segments, {cleaned.bytes} bytes"
