"""Retention: what is older than its time is removed, and the oldest when there is too much.

Whole hours by age, single segments by size. Never removed are what a restore from the last backup
needs, and an open segment of the writer that cleans. Others may clean the same folder at the same
time: what is gone already is no error.

``Upkeep`` knows when: by age and size at a set hour, by size whenever a segment is sealed, by the
use of the disk then and once a minute. The disk is used by others too: what is removed here may
not help. So only as much is removed as the disk is over its limit, counted by what the files take
on it. The next look shows the rest: some file systems give blocks back later.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.disk import Use, measure
from tickwheel.history import segments
from tickwheel.history.segments import DAY_MS, HOUR_MS, PART, STATE

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
    segment: segments.Segment
    size: int
    taken: int
    """The bytes of the disk that the file takes; at least, where a file system does not say."""
    removable: bool = field(default=True)


def clean(
    history_dir: Path, limits: Limits, now_ms: int, busy: AbstractSet[Path] = frozenset()
) -> Cleaned:
    """Remove what is over the limits of age and size. Raises OSError."""
    keep_ms = needed_since_ms(history_dir)
    cleaned = Cleaned()
    left: list[_Found] = []
    for found in _measure(history_dir, busy):
        end_ms = found.segment.hour_ms + HOUR_MS
        needed = keep_ms is not None and end_ms > keep_ms
        if limits.retention_ms is not None and end_ms <= now_ms - limits.retention_ms:
            if found.removable and not needed:
                _remove(found, cleaned)
                continue
            cleaned.kept_segments += found.removable
        found.removable = found.removable and not needed and found.segment.name.sealed
        left.append(found)
    cleaned.left_bytes = sum(found.size for found in left)
    if limits.bytes_max is not None:
        for found in left:
            if cleaned.left_bytes <= limits.bytes_max:
                break
            if found.removable:
                _remove(found, cleaned)
                cleaned.left_bytes -= found.size
        if cleaned.left_bytes > limits.bytes_max:
            cleaned.kept_segments += sum(1 for found in left if not found.removable)
    return cleaned


def free(history_dir: Path, bytes_: int, busy: AbstractSet[Path] = frozenset()) -> Cleaned:
    """Remove the oldest sealed segments until so many bytes of the disk are free. Raises
    OSError."""
    keep_ms = needed_since_ms(history_dir)
    cleaned = Cleaned(missing_bytes=bytes_)
    for found in _measure(history_dir, busy):
        if cleaned.missing_bytes <= 0:
            break
        needed = keep_ms is not None and found.segment.hour_ms + HOUR_MS > keep_ms
        if found.removable and not needed and found.segment.name.sealed:
            _remove(found, cleaned)
            cleaned.missing_bytes -= found.taken
        else:
            cleaned.kept_segments += 1
    return cleaned


def total_bytes(history_dir: Path) -> int:
    return sum(found.size for found in _measure(history_dir, frozenset()))


def _measure(history_dir: Path, busy: AbstractSet[Path]) -> list[_Found]:
    found = []
    for segment in segments.find(history_dir):
        with contextlib.suppress(FileNotFoundError):
            status = segment.path.stat()
            taken = max(status.st_size, status.st_blocks * 512)
            found.append(_Found(segment, status.st_size, taken, segment.path not in busy))
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
    part = file.with_name(f"{PART}{file.name}.{os.getpid()}")
    part.write_text(json.dumps({"time_ms": time_ms, "path": path}) + "\n")
    part.rename(file)


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
