"""The history's folder: names of segments, finding them by time, their lines, and retention.

Segments are ``HISTORY_DIR/dt=2026-11-21/hour=09/NODE-sSHARD-eEPOCH-NNNNNN.jsonl[.gz]``, in folders
by the UTC time of the event. ``HISTORY_DIR/_state/NODE-sSHARD/`` has the spool, the position and
the lock of one writer.

Readers do not need a daemon's state or locks. A line is valid if it ends with a line feed and is a
JSON object. Other lines are skipped and counted: a crash tears the last line of an open segment,
and an unfinished copy ends early.

Retention removes whole hours that are too old, and the oldest segments when the history is too
large. It keeps the segments that a restore from the last backup needs, and open segments of the
writer that runs it. Several writers can clean the same folder concurrently; a missing file is not
an error.

``Upkeep`` enforces the limits of age and size daily at a set hour, the size limit whenever a
segment is sealed, and the disk limit whenever a segment is sealed and once a minute. Other programs
also use the disk, so removing history does not always help. ``Upkeep`` therefore frees only as many
bytes as exceed the limit, measured as blocks on the disk. Some file systems release blocks later;
the next check notices them.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tickwheel.disk import Use, measure

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
LINE_BYTES_MAX = 1 << 30
"""Maximum bytes of a line. It equals the limit for a batch in the spool, because ``body_bytes_max``
has no upper limit. It bounds memory for damaged files without line feeds."""
BLOCK_BYTES = 1 << 20
STATE = "_state"
OPEN_SUFFIX, SEALED_SUFFIX = ".jsonl", ".jsonl.gz"
PARTIAL_PREFIX = ".tmp-"
"""Prefix of the name of an incomplete file."""

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
        suffix = SEALED_SUFFIX if self.sealed else OPEN_SUFFIX
        return f"{self.node}-s{self.shard}-e{self.epoch}-{self.number:06d}{suffix}"


def safe_node(node: str) -> str:
    """Return a node's name in a form that is valid in file names."""
    name = _UNSAFE.sub("_", node)[:_NODE_MAX]
    # Readers ignore files whose names begin with a dot or an underscore.
    return f"n{name}" if not name or name[0] in "._" else name


def state_folder(history_dir: str | Path, node: str, shard: int) -> Path:
    """Return the folder with the spool and the position of one daemon's writer."""
    return Path(history_dir) / STATE / f"{safe_node(node)}-s{shard}"


def state_folders(history_dir: Path, shard: int) -> list[Path]:
    """Return the state folders of a shard's writers, one for each node."""
    paths = sorted((history_dir / STATE).glob(f"*-s{shard}"))
    return [path for path in paths if path.is_dir()]  # skips the file that records the last backup


def replace_file(path: Path, text: str) -> None:
    """Replace a small file atomically. If that fails, raise OSError and keep the old file."""
    part = path.with_name(f"{PARTIAL_PREFIX}{path.name}")
    try:
        part.write_text(text)
        part.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def parse_segment(name: str) -> SegmentName | None:
    match = _SEGMENT.fullmatch(name)
    if match is None or name[0] in "._":
        return None
    shard, epoch, number = map(int, match.group(2, 3, 4))
    return SegmentName(match["node"], shard, epoch, number, match["gz"] is not None)


def hour_of(time_ms: int) -> int:
    """Return the first millisecond of the hour of ``time_ms``."""
    return time_ms - time_ms % HOUR_MS


def hour_folder(hour_ms: int) -> str:
    """Return an hour's path in the history's folder, such as ``dt=2026-11-21/hour=09``."""
    # ``datetime.fromtimestamp`` supports fewer years.
    start = _EPOCH_START + timedelta(milliseconds=hour_ms)
    return f"dt={start.year:04d}-{start.month:02d}-{start.day:02d}/hour={start.hour:02d}"


def day_of(name: str) -> int | None:
    """Return the first millisecond of the day ``dt=2026-11-21``, or None for another folder."""
    match = _DAY.fullmatch(name)
    if match is None:
        return None
    try:
        day = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (day - _EPOCH_START) // timedelta(milliseconds=1)


def hour_in_day(name: str) -> int | None:
    """Return the milliseconds after midnight of ``hour=09``, or None for another folder."""
    match = _HOUR.fullmatch(name)
    hour = int(match[1]) if match is not None else 24
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
    """Counts of a pass over segments."""

    lines: int = 0
    torn: int = 0
    """Number of lines that are incomplete, or not a JSON object."""
    unreadable: int = 0
    """Number of segments that are truncated, damaged or missing."""


def find(
    history_dir: Path,
    since_ms: int | None = None,
    until_ms: int | None = None,
    *,
    shard: int | None = None,
) -> list[Segment]:
    """Return the segments that may contain events from ``since_ms`` up to but excluding
    ``until_ms``, in the order of their hours, optionally only those of ``shard``. If a segment
    exists both sealed and open, return the sealed one."""
    low = None if since_ms is None else hour_of(since_ms)
    files: list[Segment] = []
    for day_ms, day in _folders(history_dir, day_of):
        if (low is not None and day_ms + DAY_MS <= low) or (
            until_ms is not None and day_ms >= until_ms
        ):
            continue
        for in_day_ms, folder in _folders(day, hour_in_day):
            hour_ms = day_ms + in_day_ms
            if (low is None or hour_ms >= low) and (until_ms is None or hour_ms < until_ms):
                files += _in_folder(folder, hour_ms)
    return [segment for segment in files if shard in (None, segment.name.shard)]


def find_later(history_dir: Path, hour_ms: int) -> list[Segment]:
    """Return the segments of hours before ``hour_ms`` that were begun after a segment of this or a
    later hour, because the clock was set back, in the order of their hours."""
    begun: dict[int, tuple[int, int]] = {}
    earlier = []
    for segment in find(history_dir):
        _, shard, epoch, number, _ = segment.name
        if segment.hour_ms < hour_ms:
            earlier.append(segment)
        else:
            begun[shard] = min(begun.get(shard, (epoch, number)), (epoch, number))
    return [s for s in earlier if s.name.shard in begun and s.name[2:4] > begun[s.name.shard]]


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
        also_sealed = {n for n in files if not n.sealed and n._replace(sealed=True) in files}
        chosen = sorted(files.keys() - also_sealed)
        return [Segment(folder / files[name], name, hour_ms) for name in chosen]
    return []


# --- lines -----------------------------------------------------------------------------------


def open_segment(path: Path) -> io.BufferedIOBase:
    """Open a segment to read its lines. Raise FileNotFoundError."""
    if path.suffix == ".gz":
        return gzip.GzipFile(path, "rb")
    return path.open("rb")


def raw_lines(path: Path, tally: Tally) -> Iterator[bytes]:
    """Yield the complete lines of a segment, without their ends, even if it is sealed before it is
    opened."""
    return chain.from_iterable(_blocks(path, tally))


def _blocks(path: Path, tally: Tally) -> Iterator[list[bytes]]:
    """Yield the complete lines of a segment, at most about ``BLOCK_BYTES`` at once."""
    try:
        file = open_segment(path)
    except FileNotFoundError:
        try:
            file = open_segment(path.with_name(path.name + ".gz"))
        except FileNotFoundError:
            tally.unreadable += 1
            return
    begun: list[bytes] = []
    """The parts of the next line."""
    begun_bytes = 0
    with file:
        try:
            while block := file.read1(BLOCK_BYTES):
                complete, end, rest = block.rpartition(b"\n")
                if not end:
                    begun.append(rest)
                    begun_bytes += len(rest)
                    if begun_bytes > LINE_BYTES_MAX:
                        begun, begun_bytes = [], 0
                        tally.torn += 1
                    continue
                yield b"".join((*begun, complete)).split(b"\n")
                begun, begun_bytes = [rest] if rest else [], len(rest)
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError):
            tally.unreadable += 1
            return
    tally.torn += bool(begun)


def _choose_decoders() -> tuple[Callable[[bytes | str], Any], Callable[[bytes], list[Any]] | None]:
    """Return a decoder of JSON, 0.5 µs a line, or 2.6 µs without the extras http and typed; and, if
    there is one, a decoder of lines."""
    try:
        from msgspec.json import Decoder, decode
    except ImportError:
        return json.loads, None
    return decode, Decoder().decode_lines


decode_json, _decode_lines = _choose_decoders()


def parse_line(line: bytes, tally: Tally) -> Event | None:
    """Return the event in a line, or None if the line is invalid."""
    try:
        event = decode_json(line)
    except (ValueError, RecursionError):
        event = _decode_unusual(line)
    if type(event) is not dict or type(event.get("time_ms")) is not int:
        tally.torn += 1
        return None
    return event


def _decode_unusual(line: bytes) -> Any:
    """Return the value of JSON that ``json`` alone accepts, such as half a surrogate pair; None: of
    no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def events(path: Path, tally: Tally, needles: Iterable[bytes] = ()) -> Iterator[Event]:
    """Yield the events of one file, in order. ``needles``: parse only lines that contain one of
    these texts, which is many times faster."""
    return chain.from_iterable(event_blocks(path, tally, needles))


def event_blocks(path: Path, tally: Tally, needles: Iterable[bytes] = ()) -> Iterator[list[Event]]:
    """Yield the events of one file as ``events`` does, many at once."""
    needles_tuple = tuple(needles)
    for lines in _blocks(path, tally):
        tally.lines += len(lines)
        if needles_tuple:
            lines = [line for line in lines if any(needle in line for needle in needles_tuple)]
        yield _parse(lines, tally)


def _parse(lines: list[bytes], tally: Tally) -> list[Event]:
    """Return the events in lines. Decoded at once they take half of the time."""
    try:
        found = _decode_lines(b"\n".join(lines)) if _decode_lines is not None else []
    except (ValueError, RecursionError):
        found = []
    are_events = [type(event) is dict and type(event.get("time_ms")) is int for event in found]
    if len(found) == len(lines) and all(are_events):
        return found
    parsed = [parse_line(line, tally) for line in lines]
    return [event for event in parsed if event is not None]


def last_seqs(history_dir: Path, shard: int, epochs: Collection[int]) -> dict[int, int]:
    """Return, for each of these epochs of a shard, the highest event number in its segments."""
    last = dict.fromkeys(epochs, 0)
    for segment in find(history_dir, shard=shard) if epochs else ():
        epoch = segment.name.epoch
        if epoch in last:
            seqs = (e["seq"] for e in events(segment.path, Tally()) if type(e.get("seq")) is int)
            last[epoch] = max(last[epoch], max(seqs, default=0))
    return last


# --- retention -----------------------------------------------------------------------------------

LAST_BACKUP = "_last_backup"
"""Prefix of the name of the file that records the last backup. No node's folder can have such a
name; see ``safe_node``."""
DISK_CHECK_MS = 60_000
"""Milliseconds between two measurements of the disk."""
BACKUP_MARGIN_MS = HOUR_MS
"""A restore starts reading this many milliseconds before its backup began: clocks are inexact."""


@dataclass(slots=True)
class Cleaned:
    """The result of a clean-up."""

    segments: int = 0
    bytes: int = 0
    """Bytes of the removed segments."""
    kept_segments: int = 0
    """Number of excess segments that are newer than the last backup, or being written."""
    left_bytes: int = 0
    missing_bytes: int = 0
    """Bytes that could not be freed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the history; None: no limit."""

    retention_ms: int | None = 72 * HOUR_MS
    bytes_max: int | None = None
    disk_warn: float = 1.0
    """Used share of the disk above which a warning is logged; 1: no limit."""
    disk_clean: float = 1.0
    """Used share of the disk above which history is removed; 1: no limit."""


@dataclass(slots=True)
class _Measured:
    segment: Segment
    size: int
    disk_bytes: int
    """Bytes that the file occupies on the disk, at least ``size``."""
    is_busy: bool
    is_needed: bool
    """Whether a restore from the last backup needs the segment."""

    @property
    def is_removable(self) -> bool:
        """Whether the segment can be removed to free space."""
        return self.segment.name.sealed and not self.is_busy and not self.is_needed


def clean(
    history_dir: Path, limits: Limits, now_ms: int, busy: AbstractSet[Path] = frozenset()
) -> Cleaned:
    """Remove segments that exceed the limits of age and size. Raise OSError."""
    cleaned = Cleaned()
    remaining: list[_Measured] = []
    for file in _measure(history_dir, busy):
        end_ms = file.segment.hour_ms + HOUR_MS
        if limits.retention_ms is not None and end_ms <= now_ms - limits.retention_ms:
            if not file.is_busy and not file.is_needed:
                _remove(file, cleaned)
                continue
            cleaned.kept_segments += not file.is_busy
        remaining.append(file)
    cleaned.left_bytes = sum(file.size for file in remaining)
    if limits.bytes_max is not None:
        for file in remaining:
            if cleaned.left_bytes <= limits.bytes_max:
                break
            if file.is_removable:
                _remove(file, cleaned)
                cleaned.left_bytes -= file.size
        if cleaned.left_bytes > limits.bytes_max:
            cleaned.kept_segments += sum(not file.is_removable for file in remaining)
    return cleaned


def free(history_dir: Path, bytes_: int, busy: AbstractSet[Path] = frozenset()) -> Cleaned:
    """Remove the oldest sealed segments to free ``bytes_`` bytes of the disk. Raise OSError."""
    cleaned = Cleaned(missing_bytes=bytes_)
    for file in _measure(history_dir, busy):
        if cleaned.missing_bytes <= 0:
            break
        if file.is_removable:
            _remove(file, cleaned)
            cleaned.missing_bytes -= file.disk_bytes
        else:
            cleaned.kept_segments += 1
    return cleaned


def _measure(history_dir: Path, busy: AbstractSet[Path]) -> list[_Measured]:
    keep_ms, needed_numbers = needed_since_ms(history_dir), _needed_numbers(history_dir)
    measured = []
    for segment in find(history_dir):
        with contextlib.suppress(FileNotFoundError):
            status = segment.path.stat()
            disk_bytes = max(status.st_size, status.st_blocks * 512)
            is_needed = keep_ms is not None and segment.hour_ms + HOUR_MS > keep_ms
            if (numbers := needed_numbers.get(segment.name.shard)) is not None:
                is_needed |= segment.name.number >= numbers.get(segment.name.node, 0)
            is_busy = segment.path in busy
            measured.append(_Measured(segment, status.st_size, disk_bytes, is_busy, is_needed))
    return measured


def _remove(file: _Measured, cleaned: Cleaned) -> None:
    path = file.segment.path
    path.unlink(missing_ok=True)
    cleaned.segments += 1
    cleaned.bytes += file.size
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()  # fails unless it is empty


# --- the last backup -------------------------------------------------------------------------


def last_backup_file(history_dir: str | Path, shard: int) -> Path:
    return Path(history_dir) / STATE / f"{LAST_BACKUP}-s{shard}"


def unsealed_numbers(history_dir: str | Path, shard: int) -> dict[str, int]:
    """Return, for each node, the lowest number of a segment of the shard that can get further
    events: the number of a segment that is not sealed, or the next one."""
    names = [segment.name for segment in find(Path(history_dir), shard=shard)]
    numbers = {name.node: name.number + 1 for name in sorted(names, key=attrgetter("number"))}
    for name in names:
        if not name.sealed:
            numbers[name.node] = min(numbers[name.node], name.number)
    return numbers


def write_last_backup(
    history_dir: str | Path,
    shard: int,
    time_ms: int,
    path: str,
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Record a complete backup that began at ``time_ms``. A restore from it needs all later events,
    and, because the clock can be set back, all segments from ``numbers`` on, which were
    ``unsealed_numbers`` before the backup. Raise OSError."""
    file = last_backup_file(history_dir, shard)
    file.parent.mkdir(parents=True, exist_ok=True)
    mark = {"time_ms": time_ms, "path": path, "numbers": numbers}
    replace_file(file, json.dumps(mark) + "\n")


def last_backup_ms(history_dir: str | Path, shard: int) -> int | None:
    """Return the time at which this shard's last backup began, or None if no backup is recorded."""
    return _read(last_backup_file(history_dir, shard))


def needed_since_ms(history_dir: Path) -> int | None:
    """Return the earliest time from which a restore of any shard needs the history, or None if no
    backup is recorded."""
    marks = list((history_dir / STATE).glob(f"{LAST_BACKUP}-s*"))
    # An unreadable file still proves a backup, so nothing is removed until it is readable.
    times = [_read(mark) or 0 for mark in marks if os.path.lexists(mark)]
    return min(times) - BACKUP_MARGIN_MS if times else None


def _needed_numbers(history_dir: Path) -> dict[int, dict[str, int]]:
    """Return shard → node → the lowest number of the segments that a restore needs."""
    needed: dict[int, dict[str, int]] = {}
    for mark in (history_dir / STATE).glob(f"{LAST_BACKUP}-s*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            numbers = json.loads(mark.read_bytes())["numbers"]
            shard = int(mark.name.rpartition("-s")[2])
            needed[shard] = {str(node): int(number) for node, number in numbers.items()}
    return needed


def _read(file: Path) -> int | None:
    try:
        return int(json.loads(file.read_bytes())["time_ms"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- when limits are enforced, and what is logged --------------------------------------------


class Upkeep:
    """Enforces the limits of one history's folder."""

    def __init__(
        self, history_dir: Path, limits: Limits, clean_hour: int, log: Callable[[str], None],
        measured: Callable[[Path], Use] = measure,
    ) -> None:  # fmt: skip
        self._dir = history_dir
        self._limits = limits
        self._clean_hour = clean_hour
        self._log = log
        self._measured = measured
        self._checked_ms: int | None = None
        self._kept_logged = 0
        """Number of kept segments over the limit in the last log line about them."""
        self._warned = False
        self._stuck_logged = False

    def is_daily_due(self, now_ms: int, cleaned_ms: int) -> bool:
        """Return whether it is ``clean_hour`` in local time, or the last clean-up was a day ago, or
        before the clock was set back."""
        since_ms = now_ms - cleaned_ms
        is_clean_hour = time.localtime(now_ms / 1000).tm_hour == self._clean_hour
        is_day_over = since_ms >= DAY_MS or since_ms < 0
        return is_day_over or (is_clean_hour and since_ms >= HOUR_MS)

    def daily(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Enforce the limits of age and size. Raise OSError."""
        self._clean(self._limits, now_ms, busy)

    def sealed(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Enforce the limits of size and disk after a segment was sealed. Raise OSError."""
        if self._limits.bytes_max is not None:
            self._clean(Limits(None, self._limits.bytes_max), now_ms, busy)
        self._check_disk(now_ms, busy)

    def check_disk_if_due(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Check the disk if the last check is at least ``DISK_CHECK_MS`` ago. Raise OSError."""
        if self._checked_ms is None or abs(now_ms - self._checked_ms) >= DISK_CHECK_MS:
            self._check_disk(now_ms, busy)

    def _clean(self, limits: Limits, now_ms: int, busy: AbstractSet[Path]) -> None:
        cleaned = clean(self._dir, limits, now_ms, busy)
        if cleaned.segments:
            self._log(_removed(cleaned))
        if cleaned.kept_segments > self._kept_logged:
            self._log(
                f"{cleaned.kept_segments} segments are over the limit, but are kept because they"
                " are newer than the last backup, or being written"
            )
        self._kept_logged = cleaned.kept_segments

    def _check_disk(self, now_ms: int, busy: AbstractSet[Path]) -> None:
        """Measure the use of the disk, and warn or remove segments."""
        warn, limit = self._limits.disk_warn, self._limits.disk_clean
        if warn >= 1 and limit >= 1:
            return
        self._checked_ms = now_ms
        use = self._measured(self._dir)
        if warn < 1 and use.share > warn and not self._warned:
            self._log(
                f"the disk of {self._dir} is {use.share:.1%} full; the limit is"
                f" {warn:.1%} (history_disk_warn)"
            )
        self._warned = use.share > warn
        over_bytes = use.used_bytes - int(limit * use.bytes)
        if limit >= 1 or over_bytes <= 0:
            self._stuck_logged = False
            return
        cleaned = free(self._dir, over_bytes, busy)
        reason = f"the disk was {use.share:.1%} full, above {limit:.1%} (history_disk_clean)"
        if cleaned.segments:
            self._log(f"{_removed(cleaned)}: {reason}")
        if cleaned.missing_bytes <= 0:
            self._stuck_logged = False
        elif not self._stuck_logged:
            self._stuck_logged = True
            self._log(
                f"{reason}, and no history is left that may be removed: {cleaned.kept_segments}"
                " segments are newer than the last backup, or being written"
            )


def _removed(cleaned: Cleaned) -> str:
    return f"removed {cleaned.segments} segments, {cleaned.bytes} bytes"
