"""The batch that was with the store when the daemon was killed: its events are not lost, and are
there once.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.history_daemon import daemon_in
from support.history_rig import NODE, read_all
from support.waiting import comes
from tickwheel import Client, Task
from tickwheel.clock import Clock
from tickwheel.history.daemon import History, Recorder
from tickwheel.history.segments import STATE, Event, state_folder
from tickwheel.history.spool import PENDING, Pending, take_pending
from tickwheel.model.records import ID_STEP
from tickwheel.persistence.contract import Opened
from tickwheel.server.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = state_folder(tmp_path, NODE, 0)
    made.mkdir(parents=True)
    return made


def test_durable_batches_are_taken_in_order_and_once(tmp_path: Path, folder: Path) -> None:
    pending = Pending(folder, 3)
    pending.note(8, b"eight")
    pending.note(9, b"nine")
    pending.close()
    assert take_pending(tmp_path, 0, 4, 9) == [(8, b"eight"), (9, b"nine")]
    assert take_pending(tmp_path, 0, 4, 9) == []
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("epoch", "last_batch"), [(4, 8), (5, 9), (3, 9)])
def test_uncommitted_and_foreign_batches_are_not_taken(
    tmp_path: Path, folder: Path, epoch: int, last_batch: int
) -> None:
    pending = Pending(folder, 3)
    pending.note(9, b"nine")
    assert take_pending(tmp_path, 0, epoch, last_batch) == []
    pending.close()


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_frozen_daemon_takes_no_batches_of_its_successor(
    tmp_path: Path, folder: Path, epoch: int
) -> None:
    pending = Pending(folder, 3)
    pending.note(9, b"nine")
    assert take_pending(tmp_path, 0, epoch, 9) == []
    assert not pending.is_taken(9)
    pending.close()
    assert take_pending(tmp_path, 0, 4, 9) == [(9, b"nine")]


@pytest.mark.parametrize("data", [b"", b"\0" * 5, b"x" * 100])
def test_only_marked_batches_count_as_taken(folder: Path, data: bytes) -> None:
    """Where in doubt its daemon appends it."""
    pending = Pending(folder, 3)
    pending.note(9, b"nine")
    (path,) = (path for path in folder.iterdir() if path.stat().st_size)
    path.write_bytes(data)
    assert not pending.is_taken(9)
    path.write_bytes(bytes(100))
    assert pending.is_taken(9)
    pending.close()


def test_batches_of_another_shard_are_left_alone(tmp_path: Path, folder: Path) -> None:
    pending = Pending(folder, 3)
    pending.note(9, b"nine")
    assert take_pending(tmp_path, 1, 4, 9) == []
    assert take_pending(tmp_path, 0, 4, 9) == [(9, b"nine")]
    pending.close()


@pytest.mark.parametrize("length", [10, 2 << 20])
def test_appended_batches_are_not_taken(tmp_path: Path, folder: Path, length: int) -> None:
    pending = Pending(folder, 3)
    pending.note(8, b"x" * length)
    pending.note(9, b"nine")
    pending.discard(8)
    assert (folder / f"{PENDING}0").stat().st_size < 1 << 20
    assert take_pending(tmp_path, 0, 4, 9) == [(9, b"nine")]
    pending.close()


def test_a_shorter_batch_overwrites_a_longer_one(tmp_path: Path, folder: Path) -> None:
    pending = Pending(folder, 3)
    for n, data in ((6, b"a long one"), (8, b"short")):
        pending.note(n, data)
        if n == 6:
            pending.discard(n)
    assert take_pending(tmp_path, 0, 4, 9) == [(8, b"short")]
    pending.close()


def test_a_torn_batch_is_ignored(tmp_path: Path, folder: Path) -> None:
    pending = Pending(folder, 3)
    pending.note(8, b"eight")
    pending.close()
    os.truncate(folder / f"{PENDING}0", 30)
    assert take_pending(tmp_path, 0, 4, 9) == []


def test_disk_errors_are_ignored(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    pending = Pending(folder, 3)
    with monkeypatch.context() as patched:
        patched.setattr("tickwheel.history.spool.os.pwritev", full)
        pending.note(8, b"eight")
    assert not pending.is_taken(8)
    pending.discard(8)
    pending.close()
    assert take_pending(tmp_path, 0, 4, 9) == []
    Pending(tmp_path / "nowhere", 3).note(1, b"")


# --- the daemon's end --------------------------------------------------------------------------


class Tenure:
    """One daemon's, with batches that are prepared, and kept when it is said so."""

    def __init__(self, folder: Path, epoch: int, last_batch: int, node: str = NODE) -> None:
        settings = Settings(store="memory:", history_dir=str(folder), node=node)
        self.clock = Clock(86_400_000)
        options = settings.history(0)
        assert options is not None
        self.history = History(options, self.clock, lambda *_: None)
        opened = Opened(epoch, last_batch, 0, 0, clean=False, created=False)
        self.recorder: Recorder = self.history.begin(opened)

    def prepare(self, number: int) -> Any:
        now_ms = self.clock.read().now_ms
        ids = range(number * ID_STEP, (number + 1) * ID_STEP, ID_STEP)
        self.recorder.arrived(None, ids, [("t", now_ms, b"", None)], now_ms)
        notes = self.recorder.cut()
        self.history.prepare(number, notes)
        return notes

    async def stop(self) -> None:
        self.history.end(clean=True)
        self.history.start()
        await self.history.stop()


def batches(events: list[Event]) -> list[int]:
    results = sorted(events, key=lambda event: (event["epoch"], event["seq"]))
    return [int(e["task_id"]) // ID_STEP for e in results if e["event"] == "enqueued"]


@pytest.mark.parametrize(("last_batch", "expected"), [(2, [1, 2, 3]), (1, [1, 3])])
async def test_a_pending_batch_is_appended_by_the_next_daemon(
    tmp_path: Path, last_batch: int, expected: list[int]
) -> None:
    first = Tenure(tmp_path, 1, 0)
    first.history.keep(1, first.prepare(1))
    first.prepare(2)
    first.history.end(clean=False)
    second = Tenure(tmp_path, 2, last_batch)
    second.history.keep(3, second.prepare(3))
    await second.stop()
    left = (tmp_path / STATE).glob(f"*/{PENDING}*")
    assert [path.stat().st_size for path in left] == [0, 0]
    assert batches(read_all(tmp_path)) == expected


async def test_a_frozen_daemon_does_not_append_a_batch_twice(tmp_path: Path) -> None:
    first = Tenure(tmp_path, 1, 0)
    notes = first.prepare(1)
    second = Tenure(tmp_path, 2, 1, node="other")
    first.history.keep(1, notes)
    first.history.end(clean=False)
    await first.stop()
    await second.stop()
    assert batches(read_all(tmp_path)) == [1]


async def test_a_resend_is_answered_only_with_recorded_tasks(tmp_path: Path) -> None:
    """The store had the batch, and the daemon was killed before it could do anything with that."""
    daemon = daemon_in(tmp_path)
    async with daemon, Client(daemon.url, name="shop") as client:
        await client.create_group("t", "g")
        await daemon.akill()
        daemon.failpoints = "commit.after=4"
        await daemon.astart()
        receipts = []
        while not daemon.hits:
            sent = client.enqueue_many([Task("t", b"x", delay=60.0) for _ in range(3)])
            receipts += await _over_a_kill(daemon, sent)
        await daemon.aterminate()
    events = read_all(tmp_path / "history")
    results = [int(event["task_id"]) for event in events if event["event"] == "enqueued"]
    assert sorted(results) == sorted(receipt.id for receipt in receipts)


async def _over_a_kill(daemon: Daemon, sent: Any) -> Any:
    """The answer, from the daemon that was killed or from the next one."""
    answer = asyncio.ensure_future(sent)
    await comes(lambda: answer.done() or not daemon.alive)
    if not daemon.alive:
        await daemon.astart()
    return await answer
