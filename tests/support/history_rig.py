"""Records as a daemon makes them, a history writer, and the contents of its files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tickwheel.disk import Use, measure
from tickwheel.history import segments
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import Event, Limits, Tally, state_folder
from tickwheel.history.spool import Spool
from tickwheel.history.writer import Writer, WriterOptions
from tickwheel.model.records import id_floor

NODE = "node-1"
HOUR_MS = 3_600_000
NOW_MS = 1_795_255_200_000
"""2026-11-21T10:00:00Z: the beginning of an hour."""

Record = Sequence[Any]


def make_id(index: int, at_ms: int = NOW_MS) -> int:
    """Return a task id of that time."""
    return id_floor(at_ms, 0) + index * 1024


def enqueued(
    ids: Sequence[int],
    due_ms: int = NOW_MS,
    topic: Any = "t",
    *,
    time_ms: int = NOW_MS,
    options: dict[int, Any] | None = None,
    bodies: Sequence[bytes] | None = None,
) -> Record:
    dues = [due_ms] * len(ids)
    return [
        EventKind.ENQUEUED,
        time_ms,
        "shop@1.2.3.4:5",
        list(ids),
        dues,
        topic,
        options or {},
        bodies,
    ]


def delivered(
    ids: Sequence[int], attempt: int = 1, *, group: str = "g", topic: str = "t",
    time_ms: int = NOW_MS + 2, due_ms: int = NOW_MS
) -> Record:  # fmt: skip
    count = len(ids)
    return [EventKind.DELIVERED, time_ms, topic, group, "w@1", list(ids), [attempt] * count,
            [due_ms] * count]  # fmt: skip


def acked(
    ids: Sequence[int], attempt: int = 1, *, group: str = "g", topic: str = "t",
    time_ms: int = NOW_MS + 5, delivered_ms: int | None = NOW_MS + 2, epoch: int = 1,
    ended: bool = True
) -> Record:  # fmt: skip
    count = len(ids)
    return [EventKind.ACKED, time_ms, topic, group, "w@1", epoch, list(ids), [attempt] * count,
            [delivered_ms] * count, ended]  # fmt: skip


def spool_of(
    folder: Path, epoch: int = 1, *, shard: int = 0, bytes_max: int = 64 << 20, node: str = NODE
) -> Spool:
    return Spool(state_folder(folder, node, shard), epoch, bytes_max)


def fill(
    folder: Path, batches: Iterable[Sequence[Record]], epoch: int = 1, *, node: str = NODE
) -> None:
    """Write batches into a spool and close it."""
    spool = spool_of(folder, epoch, node=node)
    for n, records in enumerate(batches, 1):
        assert spool.append(n, records)
    spool.close()


class Clock:
    """A clock that only the test moves."""

    def __init__(self, now_ms: int = NOW_MS) -> None:
        self.now_ms = now_ms
        self.ahead_ms = 0
        """How far the wall clock alone is ahead."""

    def wall_ms(self) -> int:
        return self.now_ms + self.ahead_ms

    def mono_ms(self) -> int:
        return self.now_ms


def writer_of(
    folder: Path, *, segment_bytes: int = 64 << 20, limits: Limits | None = None,
    clock: Clock | None = None, log: list[str] | None = None, clean_hour: int = 4,
    disk: Callable[[Path], Use] = measure, node: str = NODE
) -> Writer:  # fmt: skip
    """Return a writer in this process."""
    state_folder(folder, node, 0).mkdir(parents=True, exist_ok=True)
    lines = log if log is not None else []
    limits = limits or Limits(None, None)
    options = WriterOptions(
        str(folder), node, segment_bytes=segment_bytes, clean_hour=clean_hour,
        retention_s=None if limits.retention_ms is None else limits.retention_ms / 1000,
        bytes_max=limits.bytes_max, disk_warn=limits.disk_warn, disk_clean=limits.disk_clean,
    )  # fmt: skip
    return Writer(options, lines.append, clocks=clock or Clock(), measured=disk)


def drain(folder: Path, **options: Any) -> list[str]:
    """Convert and seal all spools. Return what the writer logged."""
    log: list[str] = []
    writer = writer_of(folder, log=log, **options)
    assert writer.finish()
    writer.close()
    return log


def write(
    folder: Path, batches: Iterable[Sequence[Record]], epoch: int = 1, *, node: str = NODE
) -> None:
    """Write batches as sealed segments."""
    fill(folder, batches, epoch, node=node)
    drain(folder, node=node)


def start_writer(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a writer process with a pipe to its standard input."""
    command = WriterOptions(str(folder), NODE, **options).command()
    assert command[0] == sys.executable
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def read_all(folder: Path, tally: Tally | None = None) -> list[Event]:
    """Return every line of every segment."""
    tally = tally if tally is not None else Tally()
    return [
        event for segment in segments.find(folder) for event in segments.events(segment.path, tally)
    ]


def numbers(events: Iterable[Event]) -> list[tuple[int, int]]:
    return [(event["epoch"], event["seq"]) for event in events]


def segment_names(folder: Path) -> list[str]:
    """Return the names of all files outside ``_state``."""
    return sorted(path.name for path in folder.glob("dt=*/hour=*/*"))
