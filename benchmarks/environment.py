"""The environment of a run: machine, versions, and the sync latency of the disk."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import time
from pathlib import Path
from typing import Any

_VOLATILE = ("tmpfs", "ramfs", "devtmpfs")
_SYNCS = 200
_PLACES = 256
_LOOK_S = 1.0
_IDLE = 0.85


class NoDisk(Exception):
    """The folder is in memory, where syncs cost nothing."""


def file_system(folder: Path) -> str:
    """Return the type of the file system of ``folder``, by the longest mount point."""
    wanted = folder.resolve()
    best, kind = Path("/"), "?"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, fs_type = line.split()[:3]
        point = Path(mount.replace("\\040", " "))
        if (point == wanted or point in wanted.parents) and len(str(point)) >= len(str(best)):
            best, kind = point, fs_type
    return kind


def choose_folder(asked: str | None) -> Path:
    """Return the folder for databases and logs. Raise NoDisk if it is in memory."""
    candidates = [asked] if asked is not None else ["/var/tmp", str(Path.cwd())]
    for candidate in candidates:
        folder = Path(candidate)
        if folder.is_dir() and file_system(folder) not in _VOLATILE:
            return folder
    raise NoDisk(f"{' and '.join(candidates)}: no folder on a real disk; name one with --dir")


def sync_latency_ms(folder: Path) -> dict[str, float]:
    """Return median and p99 of an append of 4 KiB with fdatasync."""
    took = [seconds * 1000 for seconds in syncs_s(folder, _SYNCS)]
    return {"median": statistics.median(took), "p99": sorted(took)[int(_SYNCS * 0.99)]}


def syncs_s(folder: Path, count: int, *, in_place: bool = False) -> list[float]:
    """Return the seconds of each append of 4 KiB with fdatasync. ``in_place`` overwrites existing
    bytes instead, so that the sync does not have to store a new length."""
    path, block, took = folder / "sync-probe", os.urandom(4096), []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    places = _PLACES if in_place else count
    try:
        if in_place:
            os.write(descriptor, block * places)
            os.fsync(descriptor)
        for number in range(count):
            started_s = time.perf_counter()
            os.pwrite(descriptor, block, number % places * len(block))
            os.fdatasync(descriptor)
            took.append(time.perf_counter() - started_s)
    finally:
        os.close(descriptor)
        path.unlink()
    return took


def wait_until_idle(patience_s: float) -> bool:
    """Wait until other programs leave the CPUs idle for a second, or until the patience ends."""
    deadline_s = time.monotonic() + patience_s
    while True:
        before = _processor_times()
        time.sleep(_LOOK_S)
        idle, total = (b - a for a, b in zip(before, _processor_times(), strict=True))
        if idle >= _IDLE * total:
            return True
        if time.monotonic() > deadline_s:
            return False


def _processor_times() -> tuple[int, int]:
    """Return the idle CPU ticks and all CPU ticks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def describe(folder: Path) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "file_system": file_system(folder),
        "fdatasync_4k_ms": sync_latency_ms(folder),
        "load_average": os.getloadavg()[0],
    }
