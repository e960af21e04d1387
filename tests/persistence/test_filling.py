"""The filler of a new store: how it forms batches; a new database is whole, or not there."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest

from tickwheel.model.kinds import GROUP, Effects, RecordKey
from tickwheel.model.records import GroupRow, Outcome, ProgressRow, ProgressState, TaskRow
from tickwheel.persistence import codec, filling
from tickwheel.persistence.contract import StoreBroken, StoredTask, StoreError
from tickwheel.persistence.filling import Filler, copying, new_sqlite, pages
from tickwheel.persistence.identity import EpochRecord, StoreIdentity
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.sqlite import SqliteStore
from tickwheel.persistence.sqlite.database import part_name

OWNER = "filler"
HELD = StoreIdentity(EpochRecord(7, "mark", 12), "incarnation")


def task(task_id: int, body: bytes = b"") -> StoredTask:
    return StoredTask(TaskRow(task_id, 10, "t", body), (), ())


class Noted(MemoryStore):
    """Notes the batches that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, list[int], int]] = []

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        self.batches.append((n, list(effects.enqueued), effects.id_mark))
        return await super().commit(epoch, owner, n, effects)


async def test_filling_batches_are_bounded_and_set_the_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filling, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(filling, "BYTES_PER_BATCH", 10)
    renewed: list[int] = []

    async def renew() -> None:
        renewed.append(len(store.batches))

    store = Noted()
    filler = Filler(store, OWNER, await store.open(OWNER, 0), renew)
    await filler.begin([GroupRow("t", "g", 0)], [(9, Outcome.ACKED)], id_mark=99, position_ms=5)
    for number in (1, 2, 3, 4):
        await filler.put(task(number))
    await filler.put(task(5, b"x" * 10))
    await filler.put(task(6))
    await filler.end()
    ids = [some for _, some, _ in store.batches]
    assert ids == [[], [1, 2, 3], [4, 5], [6], []]
    assert [n for n, _, _ in store.batches] == [1, 2, 3, 4, 5]
    assert {mark for _, _, mark in store.batches} == {99}
    assert renewed == [0, 1, 2, 3, 4], "the lease is looked after before each batch"
    assert [len(page) async for page in pages(store.scan)] == [6]


async def test_a_changed_task_loses_its_former_rows(tmp_path: Path) -> None:
    had = ProgressRow(1, "old", ProgressState.WAITING, 1, 10, 1)
    now = had._replace(group="new")
    before, after = task(1)._replace(progress=(had,)), task(1)._replace(progress=(now,))
    async with new_sqlite(str(tmp_path / "a.db"), OWNER, 0, 1, {}) as filler:
        await filler.put(before)
        await filler.flush()
        await filler.change(after, before)
        await filler.put(task(2))
        await filler.flush()
        await filler.remove([2])
    store = SqliteStore(str(tmp_path / "a.db"))
    opened = await store.open("reader", 0)
    assert (await store.read([1, 2])) == {1: after}
    assert (await store.recover_small()).outcomes == [], "one that was removed has not ended"
    assert opened.clean and opened.epoch == 2
    await store.close(clean=True)


async def test_a_copy_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "copy.db"
    async with copying(str(path), HELD) as filler:
        await filler.put(task(1))
        await filler.flush()
        assert not path.exists()
    assert list(tmp_path.iterdir()) == [path]


async def test_a_failed_copy_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> bool:
        raise StoreBroken("the disk is gone")

    monkeypatch.setattr(SqliteStore, "commit", broken)
    with pytest.raises(StoreError, match="the disk is gone") as failed:
        async with copying(str(tmp_path / "copy.db"), HELD) as filler:
            await filler.put(task(1))
    assert not isinstance(failed.value, StoreBroken), "the store that is copied is well"
    assert not list(tmp_path.iterdir())


async def test_a_copy_whose_log_remains_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk became full: the database alone would lack the last batches."""

    def leave_the_log(path: str, meta: Mapping[str, int | str]) -> None:
        Path(f"{path}-wal").write_bytes(b"frames")

    monkeypatch.setattr(filling, "write_meta", leave_the_log)
    with pytest.raises(StoreError, match="its log"):
        async with copying(str(tmp_path / "copy.db"), HELD) as filler:
            await filler.put(task(1))
    assert not list(tmp_path.iterdir())


async def test_a_disk_that_is_full_in_the_end_fails_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, meta: Mapping[str, int | str]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(filling, "write_meta", full)
    with pytest.raises(StoreError, match="disk is full"):
        async with copying(str(tmp_path / "copy.db"), HELD) as filler:
            await filler.put(task(1))
    assert not list(tmp_path.iterdir())


async def test_a_copy_contains_nothing_that_a_killed_process_left(tmp_path: Path) -> None:
    """In a container, processes have the same number again."""
    path = str(tmp_path / "copy.db")
    async with new_sqlite(part_name(path, os.getpid()), OWNER, 0, 1, {}) as filler:
        await filler.put(task(1))
    async with copying(path, HELD) as filler:
        await filler.change(task(2))
    store = SqliteStore(path)
    await store.open("reader", 0)
    assert [stored.row.id for stored in await store.scan(-1, 9, None)] == [2]
    await store.close(clean=True)


async def test_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "copy.db"
    with pytest.raises(StoreError, match="exists"):
        async with copying(str(path), HELD) as filler:
            await filler.put(task(1))
            path.write_bytes(b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_records_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROWS_PER_BATCH", 2)
    rows = [GroupRow("t", str(n), 0) for n in range(5)]
    records: dict[RecordKey, object] = {(GROUP, GROUP.key(row)): row for row in rows}
    parts = list(codec.in_batches(records))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert {key: row for part in parts for key, row in part.items()} == records
