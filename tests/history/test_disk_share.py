"""The disk of the history: a warning, the oldest removed, and nothing that a restore needs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.history_rig import (
    HOUR_MS,
    NODE,
    NOW_MS,
    Clock,
    enqueued,
    make_id,
    segment_names,
    spool_of,
    start_writer,
    write,
    writer_of,
)
from support.raw import Raw
from support.stand_in import stand_in
from support.waiting import until
from tickwheel import disk
from tickwheel.disk import Use, measure
from tickwheel.history import segments
from tickwheel.history.segments import (
    DISK_CHECK_MS,
    STATE,
    Limits,
    Segment,
    clean,
    free,
    last_backup_file,
    write_last_backup,
)

BLOCK = 4096
ANY = "0.0000001"
LIMITS = Limits(None, None, disk_warn=0.75, disk_clean=0.85)
DISK_BYTES = 1_000_000


class Disk:
    """A disk with a history on it, which is as full as a test says, less what was removed."""

    def __init__(self, folder: Path, used: float) -> None:
        self.folder = folder
        self.use(used)
        self.looks = 0

    def use(self, used: float) -> None:
        self._others = round(used * DISK_BYTES) - taken(self.folder)

    def __call__(self, folder: Path) -> Use:
        assert folder == self.folder
        self.looks += 1
        return Use(self._others + taken(folder), DISK_BYTES)


def taken(folder: Path) -> int:
    return sum(bytes_of(segment) for segment in segments.find(folder))


def bytes_of(segment: Segment) -> int:
    status = segment.path.stat()
    return max(status.st_size, status.st_blocks * 512)


def hours(folder: Path) -> list[int]:
    """How long before now the segments' hours began."""
    return [(NOW_MS - segment.hour_ms) // HOUR_MS for segment in segments.find(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five hours of history, a segment each."""
    ids = [make_id(n, NOW_MS - ago * HOUR_MS) for n, ago in enumerate(range(5, 0, -1))]
    batches = [
        [enqueued([one], time_ms=NOW_MS - ago * HOUR_MS)]
        for one, ago in zip(ids, range(5, 0, -1), strict=True)
    ]
    write(tmp_path, batches)
    assert hours(tmp_path) == [5, 4, 3, 2, 1]
    return tmp_path


def stepped(
    folder: Path, disk: Disk, limits: Limits = LIMITS, steps_ms: tuple[int, ...] = (0,)
) -> list[str]:
    """What a writer says that has nothing to write, one step at each of these times."""
    clock, log = Clock(), list[str]()
    writer = writer_of(folder, limits=limits, clock=clock, log=log, disk=disk)
    for step_ms in steps_ms:
        clock.now_ms = NOW_MS + step_ms
        writer.step()
    writer.close()
    return log


def test_use_below_the_limits_has_no_effect(folder: Path) -> None:
    disk = Disk(folder, 0.75)
    assert stepped(folder, disk) == []
    assert (disk.looks, len(hours(folder))) == (1, 5)


def test_disk_use_is_warned_about_once(folder: Path) -> None:
    clock, log, disk = Clock(), list[str](), Disk(folder, 0.7512)
    writer = writer_of(folder, limits=LIMITS, clock=clock, log=log, disk=disk)
    warning = f"the disk of {folder} is 75.1% full; the limit is 75.0% (history_disk_warn)"
    for used, warnings in ((0.7512, 1), (0.85, 1), (0.75, 1), (0.7512, 2), (0.7512, 2)):
        disk.use(used)
        writer.step()
        assert log == [warning] * warnings
        clock.now_ms += DISK_CHECK_MS
    writer.close()
    assert len(hours(folder)) == 5


def test_disk_use_is_measured_once_a_minute(folder: Path) -> None:
    disk = Disk(folder, 0.5)
    minute_ms = DISK_CHECK_MS
    stepped(folder, disk, steps_ms=(0, 1_000, 59_000, minute_ms, 61_000, 119_000, 2 * minute_ms))
    assert disk.looks == 3


def test_disabled_limits_measure_no_disk(folder: Path) -> None:
    disk = Disk(folder, 1.0)
    assert stepped(folder, disk, Limits(None, None)) == []
    assert (disk.looks, len(hours(folder))) == (0, 5)


@pytest.mark.parametrize(("over", "left"), [(0, 5), (1, 4), (BLOCK, 4), (BLOCK + 1, 3)])
def test_the_oldest_segments_are_removed_as_needed(folder: Path, over: int, left: int) -> None:
    assert {bytes_of(segment) for segment in segments.find(folder)} == {BLOCK}
    limits = Limits(None, None, disk_clean=0.85)
    log = stepped(folder, Disk(folder, 0.85 + over / DISK_BYTES), limits)
    assert hours(folder) == [5, 4, 3, 2, 1][5 - left :]
    if left == 5:
        assert log == []
    else:
        assert len(log) == 1
        assert log[0].startswith(f"removed {5 - left} segments, ")
        assert log[0].endswith(" full, above 85.0% (history_disk_clean)")


def test_a_slow_disk_removes_the_excess_at_each_look(folder: Path) -> None:
    looks = 0

    def stubborn(_: Path) -> Use:
        nonlocal looks
        looks += 1
        return Use(850_001, DISK_BYTES)

    clock = Clock()
    writer = writer_of(folder, limits=LIMITS, clock=clock, disk=stubborn)
    for _ in range(3):
        writer.step()
        assert len(hours(folder)) == 5 - looks
        writer.step()
        clock.now_ms += DISK_CHECK_MS
    writer.close()
    assert looks == 3


def test_segments_needed_by_a_restore_are_kept(folder: Path) -> None:
    # A restore reads from an hour before its backup on.
    write_last_backup(folder, 0, NOW_MS - 2 * HOUR_MS, "backup.db")
    limits = Limits(None, None, disk_clean=0.85)
    log = stepped(folder, Disk(folder, 0.99), limits, (0, DISK_CHECK_MS, 2 * DISK_CHECK_MS))
    assert hours(folder) == [3, 2, 1]
    why = "the disk was 99.0% full, above 85.0% (history_disk_clean)"
    assert log[0].startswith("removed 2 segments, ") and log[0].endswith(why)
    assert log[1:] == [
        f"{why}, and no history is left that may be removed: 3 segments are newer than the last"
        " backup, or being written"
    ]


def test_a_mark_of_a_backup_that_cannot_be_read_keeps_everything(folder: Path) -> None:
    mark = last_backup_file(folder, 0)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text('{"time_')
    assert free(folder, 1).segments == 0
    assert clean(folder, Limits(HOUR_MS, 1), NOW_MS + 24 * HOUR_MS).segments == 0
    mark.unlink()
    assert free(folder, 1).segments == 1


def test_an_open_segment_is_kept(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    assert spool.append(1, [enqueued([make_id(1)])])
    clock, log = Clock(), list[str]()
    writer = writer_of(tmp_path, limits=LIMITS, clock=clock, log=log, disk=Disk(tmp_path, 0.99))
    assert writer.step()
    clock.now_ms += DISK_CHECK_MS
    writer.step()
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl"]
    cleaned = free(tmp_path, 1)
    assert (cleaned.segments, cleaned.kept_segments, cleaned.missing_bytes) == (0, 1, 1)
    assert len(log) == 2  # the warning, and that nothing may go
    writer.close()
    spool.close()


def test_disk_use_is_measured_when_a_segment_is_sealed(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    log, disk = list[str](), Disk(tmp_path, 0.5)
    writer = writer_of(tmp_path, segment_bytes=10, limits=LIMITS, log=log, disk=disk)
    while writer.step():
        pass
    assert disk.looks == 1
    disk.use(0.9)
    for n in range(3):
        assert spool.append(n + 1, [enqueued([make_id(n)])])
        while writer.step():
            pass
        assert disk.looks == 2 + n
        assert [name for name in segment_names(tmp_path) if name.endswith(".gz")] == []
    removed = [line for line in log if line.startswith("removed 1 segments, ")]
    assert len(removed) == writer.sealer.sealed == 3
    writer.close()
    spool.close()


def test_disk_use_equals_that_of_df(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Measured:
        f_frsize, f_blocks, f_bfree, f_bavail = 4096, 1000, 300, 100

    monkeypatch.setattr(disk, "os", stand_in(os, statvfs=lambda _: Measured))
    assert measure(tmp_path) == Use(700 * 4096, 800 * 4096)
    assert measure(tmp_path).share == 0.875


# --- real processes ----------------------------------------------------------------------------


def test_the_writer_process_cleans_up(folder: Path) -> None:
    """The smallest limit makes any disk too full."""
    write_last_backup(folder, 0, NOW_MS - 2 * HOUR_MS, "backup.db")
    process = start_writer(folder, disk_warn=float(ANY), disk_clean=float(ANY))
    code, logged = ended(process)
    assert code == 0
    assert hours(folder) == [3, 2, 1]
    lines = logged.splitlines()
    assert len(lines) == 3
    assert "(history_disk_warn)" in lines[0]
    assert "removed 2 segments, " in lines[1]
    assert "3 segments are newer than the last backup, or being written" in lines[2]


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, logged = process.communicate(timeout=120)
    return process.returncode, logged.decode()


def test_the_daemon_passes_limits_and_logs_the_cleaning(folder: Path) -> None:
    shares = {"history_disk_warn": ANY, "history_disk_clean": ANY}
    last_backup_file(folder, 0).unlink(missing_ok=True)
    with Daemon(folder / STATE / "daemon", history_dir=folder, node=NODE, **shares) as daemon:
        until(
            lambda: "no history is left that may be removed" in daemon.log_text(),
            log=daemon.log_text,
        )
        with Raw(daemon.port) as raw:
            assert raw.enqueue(("t", b"x", HOUR_MS))[0] == 65
        assert daemon.terminate() == 0
    text = daemon.log_text()
    assert text.count("(history_disk_warn)") == 1
    assert "history_writer" in text
    assert "removed 5 segments" in text
    assert not {5, 4, 3, 2, 1} & set(hours(folder))
