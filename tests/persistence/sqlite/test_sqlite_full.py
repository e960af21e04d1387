"""SQLite on a full disk: enqueues are refused, acks go through, and it goes on with room.

On a real small file system where this process may mount one, and everywhere with SQLite's own
limit on the number of pages, which gives the same error.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persistence.store_subject import Subject
from support.mounts import may_mount, mount
from support.store_rows import ended, in_flight, tasks
from tickwheel.model.kinds import SESSION, Effects, RecordKey, keyed
from tickwheel.model.records import SessionRow
from tickwheel.persistence.contract import CommitRefused
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

DISK_BYTES = 16 << 20
BATCH = 200
BODY = b"b" * 400


MOUNTED = [DISK_BYTES] if may_mount() else []


@pytest.fixture(params=MOUNTED, ids=lambda size: f"{size >> 20}MiB")
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    assert mount(folder, request.param)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def _fill(subject: Subject, first: int = 1) -> int:
    """Enqueue until it is refused; the first id that was not taken."""
    for start in range(first, 10_000_000, BATCH):
        try:
            await subject.commit(tasks(range(start, start + BATCH), body=BODY))
        except CommitRefused as refused:
            assert refused.full
            return start
    raise AssertionError("the disk never became full")


async def _end_all(subject: Subject, end: int, step: int = 50) -> None:
    for start in range(1, end, step):
        ids = range(start, min(start + step, end))
        await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in ids}))
        await subject.commit(ended(ids))


class TestOnASmallDisk:
    async def test_acks_go_through_and_enqueues_wait(self, disk: Path) -> None:
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        end = await _fill(subject)
        assert end > 5_000
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(tasks([end]))
        assert refused.value.full
        assert await subject.store.probe_room() is False
        await _end_all(subject, end - 400)
        assert await subject.ids() == list(range(end - 400, end))
        await subject.store.close(clean=True)
        assert (await subject.open()).clean is True
        await subject.store.close(clean=True)

    async def test_goes_on_when_others_have_freed_space(self, disk: Path) -> None:
        filler = disk / "filler"
        filler.write_bytes(bytes(DISK_BYTES // 2))
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        end = await _fill(subject)
        assert await subject.store.probe_room() is False
        filler.unlink()
        assert await subject.store.probe_room() is True
        assert await subject.commit(tasks([end])) is True
        assert await _fill(subject, end + 1) > end + 5_000
        await subject.store.close(clean=True)

    async def test_goes_on_when_its_own_backlog_is_worked_off(self, disk: Path) -> None:
        """The file stays as large as it was; new tasks fit inside it."""
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        end = await _fill(subject)
        for _ in range(3):
            await _end_all(subject, end)
            assert await subject.ids() == []
            assert await subject.store.probe_room() is True
            again = await _fill(subject)
            assert again > end // 3
            end = again
        await subject.store.close(clean=True)

    async def test_survives_others_taking_everything(self, disk: Path) -> None:
        """Acks go through with nothing left on the disk."""
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        await subject.commit(tasks(range(1, 2_001), body=BODY))
        _take_everything(disk / "filler")
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(tasks(range(5_000, 6_000), body=BODY))
        assert refused.value.full
        await _end_all(subject, 500)
        assert await subject.store.probe_room() is False
        await _end_all(subject, 2_001)
        assert await subject.ids() == []
        (disk / "filler").unlink()
        assert await subject.store.probe_room() is True
        assert await subject.commit(tasks(range(5_000, 6_000), body=BODY)) is True
        await subject.store.close(clean=True)

    async def test_the_reserve_is_used_for_batches_without_tasks(self, disk: Path) -> None:
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        reserve = disk / "store.db.reserve"
        assert reserve.stat().st_blocks * 512 == DISK_BYTES // 8
        await subject.commit(tasks(range(1, 101)))
        _take_everything(disk / "filler")
        sessions = _sessions(200)
        assert await subject.commit(Effects(records=sessions)) is True
        assert not reserve.exists()
        assert len((await subject.small()).of_kind(SESSION)) == 200
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([5_000]))
        await _end_all(subject, 101, step=1)
        assert await subject.ids() == []
        (disk / "filler").unlink()
        assert await subject.store.probe_room() is True
        assert reserve.stat().st_blocks * 512 == DISK_BYTES // 8
        await subject.store.close(clean=True)

    async def test_can_be_killed_and_opened_again_while_it_is_full(self, disk: Path) -> None:
        subject = Subject(SqliteStore(str(disk / "store.db")))
        await subject.open()
        await subject.commit(tasks(range(1, 2_001), body=BODY))
        _take_everything(disk / "filler")
        for _ in range(3):
            await subject.reopen(clean=False)
            assert len(await subject.ids()) == 2_000
            assert sum([len(handles.ids) for handles in await subject.handles()]) == 2_000
        store = subject.store
        assert isinstance(store, SqliteStore)
        assert store.has_room is False
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([5_000]))
        await _end_all(subject, 2_001)
        await subject.store.close(clean=True)


def _take_everything(filler: Path) -> None:
    """Write until there is not one block left."""
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(bytes(4_096))


def _limit_pages(subject: Subject, pages: int) -> None:
    store = subject.store
    assert isinstance(store, SqliteStore)
    connection = store._writer._connection
    assert connection
    (now,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {now + pages}")


class TestWithAPageLimit:
    async def test_a_batch_with_tasks_is_refused_whole(self, tmp_path: Path) -> None:
        subject = Subject(SqliteStore(str(tmp_path / "store.db")))
        await subject.open()
        await subject.commit(tasks(range(1, 1_000)))
        _limit_pages(subject, 10)
        mixed = tasks(range(5_000, 9_000), body=BODY)
        mixed.ended = ended(range(1, 10)).ended
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(mixed)
        assert refused.value.full
        assert await subject.ids() == list(range(1, 1_000))
        assert await subject.commit(ended(range(1, 10))) is True
        assert await subject.ids() == list(range(10, 1_000))
        assert await subject.store.probe_room() is True
        assert await subject.commit(tasks([5_000])) is True
        await subject.store.close(clean=True)

    async def test_a_repeated_batch_is_recognised_on_a_full_disk(self, tmp_path: Path) -> None:
        subject = Subject(SqliteStore(str(tmp_path / "store.db")))
        opened = await subject.open()
        await subject.commit(tasks([1]))
        _limit_pages(subject, 5)
        with pytest.raises(CommitRefused):
            await subject.commit(tasks(range(10, 5_000)))
        again = await subject.store.commit(opened.epoch, "tester", 1, tasks([1]))
        assert again is False
        await subject.store.close(clean=True)

    async def test_a_batch_without_tasks_is_refused_only_as_a_last_resort(
        self, tmp_path: Path
    ) -> None:
        subject = Subject(SqliteStore(str(tmp_path / "store.db"), SqliteOptions()))
        await subject.open()
        _limit_pages(subject, 1)
        sessions = _sessions(200)
        with pytest.raises(CommitRefused) as refused:
            await subject.commit(Effects(records=sessions))
        assert refused.value.full
        assert (await subject.small()).of_kind(SESSION) == []
        await subject.store.close(clean=True)


def _sessions(count: int) -> dict[RecordKey, Any]:
    """A few KiB each."""
    outcomes = tuple((j, j, 1, 2**40) for j in range(100))
    rows = [SessionRow(bytes([i] * 16), 0, 0, outcomes) for i in range(count)]
    return dict(keyed(SESSION, rows))
