"""Retention: what is older than its time goes, and the oldest when there is too much.

Whole hours by age, single segments by size; never what a restore from the last backup needs, and
never an open segment of the writer that cleans. Others may clean the same folder at the same
time: what is gone already is no error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.history import segments
from tickwheel.history.names import HOUR_MS, LAST_BACKUP, PART, STATE, last_backup_file

BACKUP_MARGIN_MS = HOUR_MS
"""A restore begins to read so long before its backup: clocks and batches are not exact."""


@dataclass(slots=True)
class Cleaned:
    """What was removed, and what should have been."""

    segments: int = 0
    bytes: int = 0
    """What the removed ones took."""
    kept_segments: int = 0
    """Over the limit, but newer than the last backup, or being written."""
    left_bytes: int = 0
    missing_bytes: int = 0
    """Were to be freed, and could not be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    retention_ms: int | None = 72 * HOUR_MS
    bytes_max: int | None = None
    disk_warn: float = 1.0
    """Shares of the disk that may be used; 1: no limit."""
    disk_clean: float = 1.0


@dataclass(slots=True)
class _Found:
    segment: segments.Segment
    size: int
    taken: int
    """Of the disk; rather too much than too little, where a file system does not say."""
    removable: bool = field(default=True)


def clean(
    history_dir: Path, limits: Limits, now_ms: int, busy: AbstractSet[Path] = frozenset()
) -> Cleaned:
    """Enforce both limits. Raises OSError."""
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
    """Remove the oldest sealed segments until so much of the disk is free; no more than that.
    Raises OSError."""
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
    """When the last backup of this shard was begun."""
    return _read(last_backup_file(history_dir, shard))


def needed_since_ms(history_dir: Path) -> int | None:
    """History from then on is needed by a restore of some shard; None: by none."""
    marks = list((history_dir / STATE).glob(f"{LAST_BACKUP}-s*"))
    # A mark that cannot be read still says that there is a backup: nothing goes until it can be.
    times = [_read(mark) or 0 for mark in marks if os.path.lexists(mark)]
    return min(times) - BACKUP_MARGIN_MS if times else None


def _read(file: Path) -> int | None:
    try:
        return int(json.loads(file.read_bytes())["time_ms"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
