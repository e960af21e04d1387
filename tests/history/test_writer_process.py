"""The writer as a process: killed at any moment, stopped in order, without a disk, not alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from support.history_rig import (
    NODE,
    acked,
    delivered,
    enqueued,
    make_id,
    numbers,
    read_all,
    segment_names,
    spool_of,
    start_writer,
)
from support.waiting import until
from tickwheel.history import segments
from tickwheel.history.segments import STATE, Tally, state_folder
from tickwheel.history.spool import Spool, files
from tickwheel.history.writer import POSITION

PATIENCE_S = 120.0
"""It has a low priority: on a busy machine it gets little."""
BATCHES, EACH = 300, 40
EVENTS = BATCHES * EACH * 3


def glance(process: subprocess.Popen[bytes] | None, wait_s: float) -> None:
    if process is None:
        return
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return


def end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The daemon is gone: its pipe ends."""
    _, logged = process.communicate(timeout=PATIENCE_S)
    return process.returncode, logged.decode()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_kills_of_the_writer_neither_lose_nor_double_records(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    spool = spool_of(tmp_path, bytes_max=400_000)
    process = start_writer(tmp_path, segment_bytes=200_000)
    kills = 0
    for n in range(BATCHES):
        ids = [make_id(n * EACH + i) for i in range(EACH)]
        records = [enqueued(ids), delivered(ids), acked(ids)]
        while not spool.append(n, records):
            glance(process, 0.005)
        if rng.random() < 0.06:
            glance(process, rng.random() * 0.1)
            process.kill()
            process.communicate()
            kills += 1
            torn_only_at_the_end(tmp_path)
            process = start_writer(tmp_path, segment_bytes=200_000)
    spool.close()
    assert end(process) == (0, "")
    assert kills > 8
    tally = Tally()
    events = read_all(tmp_path, tally)
    assert tally.torn == tally.unreadable == 0
    assert sorted(numbers(events)) == [(1, seq) for seq in range(1, EVENTS + 1)]
    for kind in ("enqueued", "delivered", "acked"):
        results = [int(event["task_id"]) for event in events if event["event"] == kind]
        assert sorted(results) == [make_id(i) for i in range(BATCHES * EACH)]
    assert all(name.endswith(".gz") for name in segment_names(tmp_path))
    assert files(state_folder(tmp_path, NODE, 0)) == []


def torn_only_at_the_end(folder: Path) -> None:
    """What a reader sees at this moment: whole lines, and at most the last one torn."""
    seen = set()
    for segment in segments.find(folder):
        tally = Tally()
        for event in segments.events(segment.path, tally):
            seen.add((event["epoch"], event["seq"]))
        assert tally.unreadable == 0
        if tally.torn:
            assert tally.torn == 1 and not segment.name.sealed
            assert not segment.path.read_bytes().endswith(b"\n")
    assert len(seen) == max((seq for _, seq in seen), default=0)


def begun(folder: Path) -> tuple[Spool, subprocess.Popen[bytes]]:
    """A spool and the process that has written its first event."""
    spool = spool_of(folder)
    spool.append(1, [enqueued([make_id(1)])])
    process = start_writer(folder)
    until(lambda: len(read_all(folder)) == 1, PATIENCE_S)
    return spool, process


def test_the_pipe_wakes_and_ends_the_writer(tmp_path: Path) -> None:
    process = start_writer(tmp_path)
    assert process.stdin is not None
    spool = spool_of(tmp_path)
    for n in range(3):
        spool.append(n, [enqueued([make_id(n)])])
        process.stdin.write(b".")
        process.stdin.flush()
        until(lambda n=n: len(read_all(tmp_path)) == n + 1, PATIENCE_S)  # type: ignore[misc]  # n is bound
    spool.close(clean=True)
    assert end(process) == (0, "")
    assert [name[-3:] for name in segment_names(tmp_path)] == [".gz"]


def test_signals_for_the_daemon_do_not_end_it(tmp_path: Path) -> None:
    """A terminal's Ctrl-C and a service manager's SIGTERM reach the whole process group."""
    spool, process = begun(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    spool.append(2, [enqueued([make_id(2)])])
    until(lambda: len(read_all(tmp_path)) == 2, PATIENCE_S)
    spool.close()
    assert end(process) == (0, "")


def test_a_second_writer_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    spool, first = begun(tmp_path)
    second = start_writer(tmp_path)
    spool.append(2, [enqueued([make_id(2)])])
    until(lambda: len(read_all(tmp_path)) == 2, PATIENCE_S)
    first.kill()
    first.communicate()
    spool.append(3, [enqueued([make_id(3)])])
    until(lambda: len(read_all(tmp_path)) == 3, PATIENCE_S)
    spool.close()
    assert end(second) == (0, "")
    assert numbers(read_all(tmp_path)) == [(1, 1), (1, 2), (1, 3)]


def test_a_second_writer_ends_with_its_own_daemon(tmp_path: Path) -> None:
    """A standby of the same name: what is there is the work of the active one's writer."""
    spool, first = begun(tmp_path)
    assert end(start_writer(tmp_path)) == (0, "")
    spool.append(2, [enqueued([make_id(2)])])
    spool.close()
    assert end(first) == (0, "")
    assert numbers(read_all(tmp_path)) == [(1, 1), (1, 2)]


def test_a_second_writer_takes_over_from_a_stuck_one(tmp_path: Path) -> None:
    """The first stands still with something of a daemon that is gone before it."""
    spool = spool_of(tmp_path)
    first = start_writer(tmp_path)
    position = state_folder(tmp_path, NODE, 0) / POSITION
    until(position.exists, PATIENCE_S)
    first.send_signal(signal.SIGSTOP)
    spool.append(1, [enqueued([make_id(1)])])
    spool.close()
    second = start_writer(tmp_path)
    assert second.stdin is not None
    second.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(1)
    first.kill()
    first.communicate()
    assert second.wait(PATIENCE_S) == 0
    assert second.stderr is not None
    second.stderr.close()
    assert numbers(read_all(tmp_path)) == [(1, 1)]


def test_a_removed_history_folder_is_recreated(tmp_path: Path) -> None:
    spool, first = begun(tmp_path)
    assert not spool.is_lost()
    (tmp_path / STATE).rename(tmp_path / "away")
    assert first.wait(PATIENCE_S) == 1
    assert b"removed or moved" in first.communicate()[1]
    assert spool.is_lost()
    assert spool.append(2, [enqueued([make_id(2)])])
    assert not spool.is_lost()
    second = start_writer(tmp_path)
    until(lambda: len(read_all(tmp_path)) == 2, PATIENCE_S)
    spool.close()
    assert end(second) == (0, "")
    assert numbers(read_all(tmp_path)) == [(1, 1), (1, 2)]


def test_a_failing_disk_is_logged_once_and_retried(tmp_path: Path) -> None:
    (tmp_path / "dt=2026-11-21").write_text("in the way")
    spool = spool_of(tmp_path)
    spool.append(1, [enqueued([make_id(1)])])
    process = start_writer(tmp_path)
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    assert line.startswith("history writer: cannot write history: ") and "retrying" in line
    (tmp_path / "dt=2026-11-21").unlink()
    assert process.stderr.readline().decode() == "history writer: history is written again\n"
    assert len(read_all(tmp_path)) == 1
    spool.close()
    assert end(process) == (0, "")


def test_the_writer_has_a_low_priority(tmp_path: Path) -> None:
    process = start_writer(tmp_path)
    until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) >= 10, PATIENCE_S)
    assert end(process)[0] == 0


def test_a_writer_started_by_hand_finishes_a_spool(tmp_path: Path) -> None:
    spool = spool_of(tmp_path)
    spool.append(1, [enqueued([make_id(1)])])
    spool.close()
    assert end(start_writer(tmp_path)) == (0, "")
    assert len(read_all(tmp_path)) == 1


def test_a_writer_without_a_folder_ends_with_an_error(tmp_path: Path) -> None:
    folder = state_folder(tmp_path, NODE, 0)
    folder.parent.mkdir()
    folder.write_text("in the way")
    code, logged = end(start_writer(tmp_path))
    assert code == 1
    assert logged.startswith("history writer: cannot begin: ") and logged.count("\n") == 1
