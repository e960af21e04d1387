"""From spool to segments: in order, once, sealed, whatever breaks in between."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.history_rig import (
    HOUR_MS,
    NODE,
    NOW_MS,
    Clock,
    acked,
    delivered,
    drain,
    enqueued,
    fill,
    make_id,
    numbers,
    read_all,
    segment_names,
    spool_of,
    write,
    writer_of,
)
from support.stand_in import stand_in
from tickwheel.history import segments
from tickwheel.history import writer as writing
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import Tally, hour_folder, parse_segment, safe_node, state_folder
from tickwheel.history.spool import files
from tickwheel.history.writer import POSITION

FOLDER = hour_folder(NOW_MS)


def batches(count: int, each: int = 3, first: int = 0) -> list[list[Any]]:
    return [[enqueued([make_id(first + n * each + i) for i in range(each)])] for n in range(count)]


def test_a_clean_stop_leaves_sealed_segments_and_no_spool(tmp_path: Path) -> None:
    ids = [make_id(i) for i in range(5)]
    write(tmp_path, [[enqueued(ids)], [delivered(ids), acked(ids)]])
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl.gz"]
    assert FOLDER == "dt=2026-11-21/hour=10"
    with gzip.open(tmp_path / FOLDER / segment_names(tmp_path)[0]) as file:
        events = [json.loads(line) for line in file]
    assert [event["seq"] for event in events] == list(range(1, 16))
    assert [event["event"] for event in events[::5]] == ["enqueued", "delivered", "acked"]
    assert files(state_folder(tmp_path, NODE, 0)) == []


def test_segments_stay_open_while_the_daemon_lives(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    writer = writer_of(tmp_path)
    for n, records in enumerate(batches(3), 1):
        assert spool.append(n, records)
        assert writer.step()
        assert len(read_all(tmp_path)) == 3 * n
    assert not writer.step()
    assert not writer.finish()  # it might append more
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl"]
    spool.close()
    assert writer.finish()
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl.gz"]
    writer.close()


def test_events_are_stored_in_the_folder_of_their_hour(tmp_path: Path) -> None:
    times = [NOW_MS - 1, NOW_MS, NOW_MS + HOUR_MS, NOW_MS + 5]
    write(tmp_path, [[enqueued([make_id(n)], time_ms=at)] for n, at in enumerate(times)])
    result = {
        str(segment.path.parent.relative_to(tmp_path)): numbers(
            segments.events(segment.path, Tally())
        )
        for segment in segments.find(tmp_path)
    }
    assert result == {
        "dt=2026-11-21/hour=09": [(1, 1)],
        "dt=2026-11-21/hour=10": [(1, 2), (1, 4)],
        "dt=2026-11-21/hour=11": [(1, 3)],
    }


def test_a_full_segment_is_sealed_and_the_next_begun(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    writer = writer_of(tmp_path, segment_bytes=1_000)
    for n, records in enumerate(batches(6), 1):
        spool.append(n, records)
        while writer.step():
            pass
    names = [parse_segment(name) for name in segment_names(tmp_path)]
    assert [name.number for name in names if name] == list(range(1, len(names) + 1))
    assert all(name.sealed for name in names[:-1] if name) and len(names) == 3
    assert numbers(read_all(tmp_path)) == [(1, seq) for seq in range(1, 19)]
    writer.close()


def test_a_clock_that_was_set_back_begins_a_segment(tmp_path: Path) -> None:
    set_back = [EventKind.DAEMON, NOW_MS, "clock_set_back", {"position_ms": NOW_MS + 9}]
    records = [enqueued([make_id(1)]), set_back, enqueued([make_id(2)]), set_back]
    write(tmp_path, [[record] for record in records])
    found = [numbers(segments.events(s.path, Tally())) for s in segments.find(tmp_path)]
    assert found == [[(1, 1)], [(1, 2), (1, 3)], [(1, 4)]]


def test_an_hour_is_sealed_when_it_is_over(tmp_path: Path) -> None:
    spool, clock = spool_of(tmp_path), Clock()
    spool.append(1, [enqueued([make_id(1)])])
    writer = writer_of(tmp_path, clock=clock)
    while writer.step():
        pass
    clock.now_ms = NOW_MS + HOUR_MS + writing.LATE_MS - 1
    writer.step()
    assert segment_names(tmp_path)[0].endswith(".jsonl")
    clock.now_ms += 1
    while writer.step():
        pass
    assert segment_names(tmp_path)[0].endswith(".gz")
    writer.close()


def test_an_hour_stays_open_while_the_daemon_does_not_follow_the_wall_clock(tmp_path: Path) -> None:
    """A wall clock that is a month ahead says that every hour is over."""
    spool, clock = spool_of(tmp_path), Clock()
    clock.ahead_ms = 30 * 24 * HOUR_MS
    writer = writer_of(tmp_path, clock=clock)
    for n in range(5):
        spool.append(n, [enqueued([make_id(n)], time_ms=clock.now_ms)])
        while writer.step():
            pass
        clock.now_ms += 100
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl"]
    clock.now_ms += HOUR_MS + writing.LATE_MS
    while writer.step():
        pass
    assert segment_names(tmp_path) == [f"{NODE}-s0-e1-000001.jsonl.gz"]
    writer.close()


def test_a_new_epoch_seals_the_previous_segment(tmp_path: Path) -> None:
    fill(tmp_path, batches(2), epoch=1)
    fill(tmp_path, batches(2, first=50), epoch=2)
    spool = spool_of(tmp_path, 3)
    spool.append(1, [enqueued([make_id(99)])])
    writer = writer_of(tmp_path)
    while writer.step():
        pass
    ends = [
        (name.epoch, name.sealed) for f in segment_names(tmp_path) if (name := parse_segment(f))
    ]
    assert ends == [(1, True), (2, True), (3, False)]
    assert numbers(read_all(tmp_path)) == [
        *((1, seq) for seq in range(1, 7)), *((2, seq) for seq in range(1, 7)), (3, 1)
    ]  # fmt: skip
    writer.close()


def test_appends_of_a_deposed_daemon_are_written(tmp_path: Path) -> None:
    old, new = spool_of(tmp_path, 1), spool_of(tmp_path, 2)
    old.append(1, [enqueued([make_id(1)])])
    new.append(1, [enqueued([make_id(2)])])
    writer = writer_of(tmp_path)
    while writer.step():
        pass
    old.append(2, [enqueued([make_id(3)])])
    old.close()
    new.close()
    assert writer.finish()
    writer.close()
    assert sorted(numbers(read_all(tmp_path))) == [(1, 1), (1, 2), (2, 1)]


def test_a_writer_resumes_where_its_predecessor_stopped(tmp_path: Path) -> None:
    """Cut off after the lines and before the position: the same lines are written again."""
    fill(tmp_path, batches(4))
    writer = writer_of(tmp_path)
    writer.follower._chunk_bytes = 40
    assert writer.follower.step() and writer.follower.step()
    saved = (state_folder(tmp_path, NODE, 0) / POSITION).read_bytes()
    assert writer.follower.step()
    (path,) = [segment.path for segment in segments.find(tmp_path)]
    with path.open("ab") as file:
        file.write(b'{"v":1,"time_ms":17952')
    writer.close()
    (state_folder(tmp_path, NODE, 0) / POSITION).write_bytes(saved)
    drain(tmp_path)
    tally = Tally()
    assert numbers(read_all(tmp_path, tally)) == [(1, seq) for seq in range(1, 13)]
    assert tally.torn == 0


def test_a_segment_unknown_to_the_position_is_rewritten(tmp_path: Path) -> None:
    fill(tmp_path, batches(4))
    writer = writer_of(tmp_path)
    saved = (state_folder(tmp_path, NODE, 0) / POSITION).read_bytes()
    assert writer.follower.step()
    writer.close()
    (state_folder(tmp_path, NODE, 0) / POSITION).write_bytes(saved)
    drain(tmp_path)
    assert numbers(read_all(tmp_path)) == [(1, seq) for seq in range(1, 13)]


def test_numbers_continue_without_a_position(tmp_path: Path) -> None:
    write(tmp_path, batches(2))
    (state_folder(tmp_path, NODE, 0) / POSITION).unlink()
    write(tmp_path, batches(1))
    assert numbers(read_all(tmp_path)) == [(1, seq) for seq in range(1, 10)]


def test_a_reused_epoch_continues_its_numbers(tmp_path: Path) -> None:
    """A new store in an old history: (epoch, seq) must stay unique."""
    write(tmp_path, batches(2))
    write(tmp_path, batches(2))
    assert numbers(read_all(tmp_path)) == [(1, seq) for seq in range(1, 13)]


def test_the_current_epoch_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new store begins with epoch 1 again, below all that is remembered."""
    monkeypatch.setattr(writing, "EPOCHS_MAX", 3)
    for epoch in (50, 51, 52, 53, 1):
        write(tmp_path, batches(2), epoch)
    write(tmp_path, batches(1), 1)
    assert sorted(numbers(read_all(tmp_path)))[:9] == [(1, seq) for seq in range(1, 10)]
    kept = writing.load_position(state_folder(tmp_path, NODE, 0))
    assert kept is not None and list(kept.epochs) == [52, 53, 1]


def test_a_position_behind_its_segment_loses_no_numbers(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    spool.append(1, batches(1)[0])
    writer = writer_of(tmp_path)
    writer.step()
    (path,) = [segment.path for segment in segments.find(tmp_path)]
    writer.close()
    path.write_bytes(path.read_bytes()[:-30])
    spool.append(2, batches(1, first=9)[0])
    spool.close()
    drain(tmp_path)
    assert numbers(read_all(tmp_path)) == [(1, 1), (1, 2), (1, 4), (1, 5), (1, 6)]


def test_a_torn_spool_is_reported_and_counted_as_dropped(tmp_path: Path) -> None:
    fill(tmp_path, batches(2))
    (path,) = state_folder(tmp_path, NODE, 0).glob("spool-1-*")
    path.write_bytes(path.read_bytes()[:-5])
    log = drain(tmp_path)
    events = read_all(tmp_path)
    assert [event["event"] for event in events] == ["enqueued"] * 3 + ["dropped"]
    assert "torn" in events[-1]["reason"] and events[-1]["time_ms"] == NOW_MS
    assert len(log) == 1 and "are lost" in log[0]
    assert list(state_folder(tmp_path, NODE, 0).glob("spool-1-*")) == []


def test_a_damaged_spool_is_skipped_to_its_next_file(tmp_path: Path) -> None:
    fill(tmp_path, batches(2))
    (path,) = state_folder(tmp_path, NODE, 0).glob("spool-1-*")
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    fill(tmp_path, batches(1, first=20))
    drain(tmp_path)
    assert [event["event"] for event in read_all(tmp_path)] == [
        *["enqueued"] * 6, "dropped", *["enqueued"] * 3
    ]  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        [99, NOW_MS],
        [EventKind.DELIVERED, NOW_MS],
        "text",
        [],
        [EventKind.DROPPED, -1, 1],
        [2, 10**18, 1],
        [EventKind.DELIVERED, NOW_MS, "t", "g", "w", [1, 2], [1, 1], [NOW_MS]],
    ],
)
def test_an_unknown_record_is_counted_as_dropped(tmp_path: Path, record: Any) -> None:
    write(tmp_path, [[record, *batches(1)[0]]])
    events = read_all(tmp_path)
    assert [event["event"] for event in events] == ["dropped", *["enqueued"] * 3]
    assert [event["seq"] for event in events] == [1, 2, 3, 4]


def _fail_once_in(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, every: int) -> list[int]:
    """``module.os.name`` fails at every call but each ``every``-th, half done."""
    real = getattr(os, name)
    calls = [0]

    def failing(fd: int, data: Any, *rest: Any) -> int:
        calls[0] += 1
        if calls[0] % every:
            real(fd, bytes(data)[: len(data) // 2], *rest)
            raise OSError(errno.ENOSPC, "No space left on device")
        written: int = real(fd, data, *rest)
        return written

    monkeypatch.setattr(module, "os", stand_in(os, **{name: failing}))
    return calls


def test_a_full_disk_delays_lines_without_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, batches(10))
    writer = writer_of(tmp_path)
    writer.follower._chunk_bytes = 100
    calls = _fail_once_in(monkeypatch, writing, "pwrite", 4)
    failed = 0
    while True:
        try:
            if not writer.step():
                break
        except OSError:
            failed += 1
    assert failed > 3 and calls[0] > failed
    monkeypatch.undo()
    assert writer.finish()
    writer.close()
    tally = Tally()
    assert numbers(read_all(tmp_path, tally)) == [(1, seq) for seq in range(1, 31)]
    assert tally.torn == 0


def test_a_position_that_cannot_be_saved_repeats_the_same_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, batches(2))
    writer = writer_of(tmp_path)

    def full(self: writing.Position, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.Position, "save", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            writer.step()
    monkeypatch.undo()
    assert writer.finish()
    writer.close()
    assert numbers(read_all(tmp_path)) == [(1, seq) for seq in range(1, 7)]


def test_node_names_become_valid_file_names() -> None:
    assert safe_node("a b/c:1") == "a_b_c_1"
    assert safe_node(".hidden") == "n.hidden"
    assert safe_node("") == "n"
    assert len(safe_node("x" * 300)) == 100


@pytest.mark.parametrize("name", ["_x-s0-e1-000001.jsonl", ".x-s0-e1-1.jsonl", "x.jsonl", "a.gz"])
def test_other_file_names_are_not_segments(name: str) -> None:
    assert parse_segment(name) is None


def test_a_removed_open_segment_is_replaced(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    writer = writer_of(tmp_path)
    for n in (1, 2):
        spool.append(n, [enqueued([make_id(n)])])
        assert writer.step()
        (segment,) = segments.find(tmp_path)
        if n == 1:
            segment.path.unlink()
    spool.close()
    writer.finish()
    writer.close()
    assert numbers(read_all(tmp_path)) == [(1, 2)]
