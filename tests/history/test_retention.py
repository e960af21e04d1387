"""Retention: by age, by size, at its hour; and only what may be removed is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.history_rig import (
    HOUR_MS,
    NODE,
    NOW_MS,
    Clock,
    enqueued,
    fill,
    make_id,
    read_all,
    segment_names,
    spool_of,
    write,
    writer_of,
)
from tickwheel.history import segments
from tickwheel.history.segments import (
    BACKUP_MARGIN_MS,
    DAY_MS,
    Limits,
    Upkeep,
    clean,
    last_backup_file,
    last_backup_ms,
    needed_since_ms,
    state_folder,
    unsealed_numbers,
    write_last_backup,
)


def history_of_hours(folder: Path, hours: int) -> list[int]:
    """A sealed segment in each of the last hours; when they began, oldest first."""
    starts = [NOW_MS - n * HOUR_MS for n in reversed(range(hours))]
    write(folder, [[enqueued([make_id(n)], time_ms=at)] for n, at in enumerate(starts)])
    return starts


def hours_left(folder: Path) -> list[int]:
    return [segment.hour_ms for segment in segments.find(folder)]


def test_hours_older_than_the_retention_are_removed(tmp_path: Path) -> None:
    starts = history_of_hours(tmp_path, 6)
    cleaned = clean(tmp_path, Limits(2 * HOUR_MS), NOW_MS)
    assert hours_left(tmp_path) == starts[3:]
    assert cleaned.segments == 3 and cleaned.bytes > 0 and cleaned.kept_segments == 0
    clean(tmp_path, Limits(2 * HOUR_MS), NOW_MS + HOUR_MS - 1)
    assert hours_left(tmp_path) == starts[3:]
    clean(tmp_path, Limits(2 * HOUR_MS), NOW_MS + HOUR_MS)
    assert hours_left(tmp_path) == starts[4:]


def test_empty_folders_are_removed_and_other_files_kept(tmp_path: Path) -> None:
    history_of_hours(tmp_path, 14)
    other = tmp_path / "dt=2026-11-20" / "hour=23" / "notes.txt"
    other.write_text("mine")
    clean(tmp_path, Limits(0), NOW_MS + 48 * HOUR_MS)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("dt=*/**/*"))
    assert left == ["dt=2026-11-20/hour=23", "dt=2026-11-20/hour=23/notes.txt"]


def test_the_oldest_segments_are_removed_over_the_size_limit(tmp_path: Path) -> None:
    starts = history_of_hours(tmp_path, 5)
    sizes = [segment.path.stat().st_size for segment in segments.find(tmp_path)]
    limit = sum(sizes[3:])
    cleaned = clean(tmp_path, Limits(None, limit), NOW_MS)
    assert hours_left(tmp_path) == starts[3:] and cleaned.left_bytes == limit
    cleaned = clean(tmp_path, Limits(None, limit - 1), NOW_MS)
    assert hours_left(tmp_path) == starts[4:]
    assert cleaned.left_bytes == sizes[4]


def test_segments_needed_by_a_restore_are_never_removed(tmp_path: Path) -> None:
    starts = history_of_hours(tmp_path, 6)
    write_last_backup(tmp_path, 0, starts[3] + BACKUP_MARGIN_MS + 5, "/b/1.db")
    assert last_backup_ms(tmp_path, 0) == starts[3] + BACKUP_MARGIN_MS + 5
    cleaned = clean(tmp_path, Limits(0, 0), NOW_MS + 90 * HOUR_MS)
    assert hours_left(tmp_path) == starts[3:]
    assert cleaned.kept_segments >= 3
    write_last_backup(tmp_path, 7, starts[2], "/b/other-shard.db")
    assert needed_since_ms(tmp_path) == starts[2] - BACKUP_MARGIN_MS
    assert last_backup_ms(tmp_path, 3) is None


def test_segments_written_after_a_backup_are_never_removed(tmp_path: Path) -> None:
    """Their hours are earlier, because the clock was set back after the backup."""
    starts = history_of_hours(tmp_path, 6)
    spool = spool_of(tmp_path, 2)
    spool.append(1, [enqueued([make_id(50)], time_ms=starts[2])])
    writer = writer_of(tmp_path, clock=Clock(starts[2]))
    while writer.step():
        pass
    numbers = unsealed_numbers(tmp_path, 0)
    assert numbers == {NODE: 7} and unsealed_numbers(tmp_path, 3) == {}
    spool.close()
    assert writer.finish()
    writer.close()
    assert unsealed_numbers(tmp_path, 0) == {NODE: 8}
    write_last_backup(tmp_path, 0, starts[5], "/b/1.db", numbers)
    for node in (NODE, "other"):
        record = enqueued([make_id(51)], time_ms=starts[1])
        write(tmp_path, [[record]], 3 if node == NODE else 4, node=node)
    clean(tmp_path, Limits(0, 0), NOW_MS + 90 * HOUR_MS)
    left = [(s.hour_ms, s.name.node, s.name.number) for s in segments.find(tmp_path)]
    assert left == [
        (starts[1], NODE, 8), (starts[1], "other", 1), (starts[2], NODE, 7),
        (starts[4], NODE, 5), (starts[5], NODE, 6),
    ]  # fmt: skip


def test_a_mark_that_cannot_be_read_needs_everything(tmp_path: Path) -> None:
    write_last_backup(tmp_path, 0, NOW_MS, "x")
    last_backup_file(tmp_path, 0).write_text("{")
    since_ms = needed_since_ms(tmp_path)
    assert since_ms is not None and since_ms <= 0


@pytest.mark.parametrize("node", ["last_backup", "_last_backup"])
def test_backup_marks_do_not_collide_with_node_folders(tmp_path: Path, node: str) -> None:
    assert state_folder(tmp_path, node, 0) != last_backup_file(tmp_path, 0)


def test_open_segments_of_the_writer_stay(tmp_path: Path) -> None:
    spool, clock = spool_of(tmp_path), Clock()
    spool.append(1, [enqueued([make_id(1)])])
    writer = writer_of(tmp_path, limits=Limits(HOUR_MS, 1), clock=clock)
    while writer.step():
        pass
    assert len(read_all(tmp_path)) == 1
    writer.close()


@pytest.mark.usefixtures("in_utc")
def test_the_writer_cleans_at_its_hour_once(tmp_path: Path) -> None:
    starts = history_of_hours(tmp_path, 4)
    clock, log = Clock(NOW_MS), list[str]()
    writer = writer_of(tmp_path, clock=clock, log=log, clean_hour=14, limits=Limits(3 * HOUR_MS))
    writer.step()
    assert hours_left(tmp_path) == starts  # nothing is old enough; it had never been cleaned
    clock.now_ms += 3 * HOUR_MS + 5
    writer.step()
    assert hours_left(tmp_path) == starts  # 13 h
    clock.now_ms += HOUR_MS
    writer.step()
    assert hours_left(tmp_path) == []
    assert [text.split()[:3] for text in log] == [["removed", "4", "segments,"]]
    write(tmp_path, [[enqueued([make_id(9)], time_ms=starts[0])]])
    clock.now_ms += 2_000
    writer.step()
    assert hours_left(tmp_path) == [starts[0]]
    writer.close()


@pytest.mark.usefixtures("in_utc")
def test_a_wall_clock_that_is_wrong_for_a_moment_removes_nothing(tmp_path: Path) -> None:
    starts = history_of_hours(tmp_path, 4)
    clock = Clock(NOW_MS)
    writer = writer_of(tmp_path, clock=clock, clean_hour=14, limits=Limits(3 * HOUR_MS))
    for ahead_ms in (0, 30 * DAY_MS, 0):
        clock.now_ms, clock.ahead_ms = clock.now_ms + 2_000, ahead_ms
        writer.step()
        assert hours_left(tmp_path) == starts
    clock.now_ms += 4 * HOUR_MS
    writer.step()
    assert hours_left(tmp_path) == []
    writer.close()


def test_a_clock_set_back_before_the_last_clean_up_makes_the_next_due(tmp_path: Path) -> None:
    upkeep = Upkeep(tmp_path, Limits(), 4, pytest.fail)
    assert upkeep.is_daily_due(NOW_MS, NOW_MS + 30 * DAY_MS)
    assert not upkeep.is_daily_due(NOW_MS, NOW_MS)


@pytest.mark.usefixtures("in_utc")
def test_the_writer_enforces_the_size_when_it_has_sealed(tmp_path: Path) -> None:
    history_of_hours(tmp_path, 3)
    log = list[str]()
    fill(tmp_path, [[enqueued([make_id(50)])]])
    writer = writer_of(tmp_path, segment_bytes=10, limits=Limits(None, 1), log=log)
    assert writer.finish()
    writer.close()
    assert len(segment_names(tmp_path)) == 0
    assert log and log[0].startswith("removed ")
