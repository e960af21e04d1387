"""SQLite's disk used beyond ``disk_refuse``: no new tasks, everything else, and back again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.stand_in import stand_in
from support.store_rows import HALVES, dropped, tasks
from tickwheel import disk
from tickwheel.model.kinds import TRANSACTION, Effects, key_of, keyed
from tickwheel.model.records import Outcome
from tickwheel.persistence.contract import CommitRefused, StoreUnusable
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore, database, options_from
from tickwheel.persistence.sqlite.database import REFUSE_MARGIN, Disk

LIMIT = 0.9
SMALL_LOG = 64 << 10


class Use:
    """A disk with plenty of free bytes that is as full as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0.5
        monkeypatch.setattr(database, "measure", lambda _: Disk(1 << 40, self.used))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    return Use(monkeypatch)


def made(folder: Path, **options: float) -> Subject:
    wanted = {"wal_bytes": SMALL_LOG, "reserve_bytes": 0, "disk_refuse": LIMIT} | options
    return Subject(SqliteStore(str(folder / "store.db"), SqliteOptions(**wanted)))  # type: ignore[arg-type]  # a test's numbers


async def test_tasks_are_refused_over_disk_refuse_until_clearly_below(
    tmp_path: Path, use: Use
) -> None:
    subject = made(tmp_path)
    assert (await subject.open()).has_room
    use.used = LIMIT
    assert await subject.commit(tasks([1, 2]))
    use.used = 0.93
    with pytest.raises(CommitRefused) as refused:
        await subject.commit(tasks([3]))
    assert refused.value.full
    assert "its disk is 93.0% full; the limit is 90.0% (disk_refuse)" in refused.value.message
    assert await subject.commit(Effects(ended={1: Outcome.ACKED}))
    for used in (0.93, LIMIT, LIMIT - REFUSE_MARGIN / 2):
        use.used = used
        assert await subject.store.probe_room() is False
    with pytest.raises(CommitRefused, match="disk_refuse"):
        await subject.commit(tasks([3]))
    use.used = LIMIT - REFUSE_MARGIN * 1.01
    assert await subject.store.probe_room() is True
    use.used = LIMIT
    assert await subject.commit(tasks([3]))
    assert await subject.ids() == [2, 3]
    await subject.store.close(clean=True)


async def test_a_full_disk_refuses_prepared_tasks_but_accepts_decisions(
    tmp_path: Path, use: Use
) -> None:
    subject = made(tmp_path)
    await subject.open()
    assert await subject.commit(Effects(records=keyed(TRANSACTION, HALVES)))
    use.used = 0.93
    with pytest.raises(CommitRefused) as refused:
        await subject.commit(Effects(records=keyed(TRANSACTION, HALVES)))
    assert refused.value.full
    assert await subject.commit(Effects(records=dropped(TRANSACTION, *map(key_of, HALVES))))
    assert (await subject.small()).of_kind(TRANSACTION) == []
    await subject.store.close(clean=True)


async def test_a_store_opened_over_the_limit_names_the_reason(tmp_path: Path, use: Use) -> None:
    use.used = 0.905
    subject = made(tmp_path)
    opened = await subject.open()
    assert (opened.has_room, opened.no_room) == (
        False,
        "its disk is 90.5% full; the limit is 90.0% (disk_refuse)",
    )
    use.used = 0.5
    assert await subject.store.probe_room() is True
    assert await subject.commit(tasks([1]))
    await subject.store.close(clean=True)


async def test_disk_refuse_1_disables_the_check(tmp_path: Path, use: Use) -> None:
    use.used = 1.0
    subject = made(tmp_path, disk_refuse=1.0)
    assert (await subject.open()).has_room
    assert await subject.commit(tasks([1]))
    await subject.store.close(clean=True)


async def test_free_pages_of_the_database_count_as_room(tmp_path: Path, use: Use) -> None:
    subject = made(tmp_path)
    await subject.open()
    await subject.commit(tasks(range(1, 1_000), body=b"b" * 400))
    await subject.commit(Effects(ended=dict.fromkeys(range(1, 1_000), Outcome.ACKED)))
    size = Path(str(tmp_path / "store.db")).stat().st_size
    use.used = 0.99
    with pytest.raises(CommitRefused, match="disk_refuse"):
        await subject.commit(tasks([2_000]))
    assert await subject.store.probe_room() is True
    taken = 0
    with pytest.raises(CommitRefused, match="disk_refuse"):
        for first in range(3_000, 13_000, 50):
            await subject.commit(tasks(range(first, first + 50), body=b"c" * 400))
            taken += 50
    assert 200 <= taken < 1_000
    assert Path(str(tmp_path / "store.db")).stat().st_size <= size
    await subject.store.close(clean=True)


async def test_the_reserve_is_kept(tmp_path: Path, use: Use) -> None:
    subject = made(tmp_path, reserve_bytes=1 << 20)
    use.used = 0.95
    assert not (await subject.open()).has_room
    assert (tmp_path / "store.db.reserve").stat().st_size == 1 << 20
    await subject.store.close(clean=True)


def test_disk_refuse_is_not_a_url_option() -> None:
    with pytest.raises(StoreUnusable, match="unknown setting 'disk_refuse'"):
        options_from("sqlite:///x.db?disk_refuse=1", [("disk_refuse", 1)])


def test_disk_use_equals_that_of_df(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        f_frsize, f_blocks, f_bfree, f_bavail = 4096, 1000, 300, 100

    monkeypatch.setattr(disk, "os", stand_in(os, statvfs=lambda _: Usage))
    assert database.measure(str(tmp_path / "x")) == Disk(100 * 4096, 0.875)

    def fails(_: str) -> None:
        raise OSError

    monkeypatch.setattr(disk, "os", stand_in(os, statvfs=fails))
    assert database.measure(str(tmp_path / "x")) == Disk(0, 1.0)
