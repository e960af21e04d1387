"""Names: where history lies, what its files are called, and what their names say. Pure.

``HISTORY_DIR/dt=2026-11-21/hour=09/NODE-sSHARD-eEPOCH-NNNNNN.jsonl[.gz]`` are segments;
``HISTORY_DIR/_state/NODE-sSHARD/`` belongs to one writer: its spool and its position. Folders are
UTC, by the time of the event.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

HOUR_MS = 3_600_000
STATE = "_state"
POSITION = "position.json"
LOCK = "lock"
COUNTER = "spool-number"
"""Holds the number of the newest spool file."""
PENDING = "pending-"
"""And 0 or 1: the batches that are with the store."""
LAST_BACKUP = "_last_backup"
"""No node's folder begins like this: see safe_node."""
OPEN_END, SEALED_END = ".jsonl", ".jsonl.gz"
PART = ".tmp-"

_EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_NODE_MAX = 100
_SEGMENT = re.compile(r"(?P<node>[A-Za-z0-9._-]+)-s(\d+)-e(\d+)-(\d+)\.jsonl(?P<gz>\.gz)?")
_SPOOL = re.compile(r"spool-(\d+)-(\d+)")
_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")
_HOUR = re.compile(r"hour=(\d{2})")


class SegmentName(NamedTuple):
    """What a segment's file name says."""

    node: str
    shard: int
    epoch: int
    number: int
    sealed: bool

    def __str__(self) -> str:
        end = SEALED_END if self.sealed else OPEN_END
        return f"{self.node}-s{self.shard}-e{self.epoch}-{self.number:06d}{end}"


class SpoolName(NamedTuple):
    """What a spool file's name says; in order of writing."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"spool-{self.epoch}-{self.number:06d}"


def safe_node(node: str) -> str:
    """A node's name as it stands in file names."""
    found = _UNSAFE.sub("_", node)[:_NODE_MAX]
    # A name that begins with a dot or an underscore would hide the file from readers.
    return f"n{found}" if not found or found[0] in "._" else found


def state_folder(history_dir: str | Path, node: str, shard: int) -> Path:
    """Where the spool and the position of one daemon's writer are."""
    return Path(history_dir) / STATE / f"{safe_node(node)}-s{shard}"


def last_backup_file(history_dir: str | Path, shard: int) -> Path:
    return Path(history_dir) / STATE / f"{LAST_BACKUP}-s{shard}"


def parse_segment(name: str) -> SegmentName | None:
    found = _SEGMENT.fullmatch(name)
    if found is None or name[0] in "._":
        return None
    shard, epoch, number = map(int, found.group(2, 3, 4))
    return SegmentName(found["node"], shard, epoch, number, found["gz"] is not None)


def parse_spool(name: str) -> SpoolName | None:
    found = _SPOOL.fullmatch(name)
    return SpoolName(int(found[1]), int(found[2])) if found is not None else None


def hour_of(time_ms: int) -> int:
    """The first millisecond of its hour."""
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
