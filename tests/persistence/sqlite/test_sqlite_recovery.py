"""What a start reads of a SQLite database: first what is due soonest, in little time."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from persistence.store_subject import Subject
from support.store_rows import ended
from tickwheel.model.kinds import Effects
from tickwheel.model.records import ID_STEP, TaskOptions, TaskRow
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite import store as sqlite_recovery
from tickwheel.persistence.sqlite.packs import PACK_TASKS_MAX, SPARSE_EVERY_BATCHES
from tickwheel.persistence.sqlite.rows import PACKS_AT_ONCE
from tickwheel.persistence.sqlite.store import HandleReader

TOPICS = ("a", "b", "[c")


def _subject(tmp_path: Path) -> Subject:
    return Subject(SqliteStore(str(tmp_path / "store.db"), SqliteOptions(reserve_bytes=0)))


def _rows(seed: int, first: int, count: int, dues_ms: list[int]) -> dict[int, TaskRow]:
    random = Random(seed)
    ids = range(first, first + count * ID_STEP, ID_STEP)
    return {i: TaskRow(i, random.choice(dues_ms), random.choice(TOPICS), b"") for i in ids}


async def _found(subject: Subject, chunk: int) -> list[tuple[int, int, str]]:
    return [
        (due_ms, task_id, topic)
        for handles in await subject.handles(chunk)
        for task_id, due_ms, topic in zip(handles.ids, handles.dues_ms, handles.topics, strict=True)
    ]


async def test_the_first_chunk_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = _subject(tmp_path)
    await subject.open()
    rows = _rows(1, ID_STEP, 500, list(range(1_000)))
    await subject.commit(Effects(enqueued=rows, id_mark=max(rows)))
    steps: list[str] = []
    sort = HandleReader.sort
    monkeypatch.setattr(HandleReader, "sort", lambda reader: (steps.append("sort"), sort(reader)))
    soonest = sorted((row.due_ms, row.id) for row in rows.values())
    async for handles in subject.store.recover_handles(20):
        steps.append("chunk")
        if len(steps) == 1:
            assert list(zip(handles.dues_ms, handles.ids, strict=True)) == soonest[:20]
    assert steps == ["chunk", "sort", *["chunk"] * 24]
    await subject.store.close(clean=True)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2_000])
@pytest.mark.parametrize("dues_ms", [[5], [5, 6], list(range(300)), [0, 2**62, -(2**62)]])
async def test_due_order_over_rows_and_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dues_ms: list[int]
) -> None:
    """Rows of their own lie before, between and behind packs, of which some tasks have left."""
    monkeypatch.setattr(sqlite_recovery, "HANDLES_PER_PART", 16)
    monkeypatch.setattr(sqlite_recovery, "HANDLES_PER_DEAL", 64)
    monkeypatch.setattr(sqlite_recovery, "PACKS_AT_ONCE", 2)
    monkeypatch.setattr(sqlite_recovery, "ROWS_AT_ONCE", 3)
    subject = _subject(tmp_path)
    await subject.open()
    kept: dict[int, TaskRow] = {}
    for batch in range(8):
        count = 5 if batch % 2 else 150
        rows = _rows(batch, (batch * 1_000 + 1) * ID_STEP, count, dues_ms)
        await subject.commit(Effects(enqueued=rows, id_mark=max(rows)))
        kept |= rows
    moved = {i: row._replace(due_ms=row.due_ms // 2) for i, row in list(kept.items())[::9]}
    await subject.commit(Effects(updated=moved, id_mark=max(kept)))
    kept |= moved
    expected = sorted((row.due_ms, row.id, row.topic) for row in kept.values())
    assert await _found(subject, chunk) == expected
    await subject.store.close(clean=True)


async def test_a_due_time_far_ahead_brings_no_handle_twice(tmp_path: Path) -> None:
    subject, dues_ms = _subject(tmp_path), [*range(1, 61), 2**58]
    await subject.open()
    rows = {n * ID_STEP: TaskRow(n * ID_STEP, due, "a", b"") for n, due in enumerate(dues_ms, 1)}
    await subject.commit(Effects(enqueued=rows, id_mark=max(rows)))
    assert [due_ms for due_ms, *_ in await _found(subject, 10)] == dues_ms
    await subject.store.close(clean=True)


async def test_a_pack_that_is_taken_apart_meanwhile_brings_no_key_twice(tmp_path: Path) -> None:
    subject, size = _subject(tmp_path), PACK_TASKS_MAX
    await subject.open()
    ids = range(ID_STEP, (PACKS_AT_ONCE + 50) * size * ID_STEP, ID_STEP)
    rows = {i: TaskRow(i, 5, "t", b"", TaskOptions(f"k{i}")) for i in ids}
    await subject.commit(Effects(enqueued=rows, id_mark=max(rows)))
    await subject.commit(ended(ids[: size - 10]))
    await subject.commit(Effects(updated={ids[size]: rows[ids[size]]}))  # it has left its pack
    keys = aiter(subject.store.recover_keys())
    found = list((await anext(keys)).ids)
    await subject.commit(Effects(updated={ids[size + 1]: rows[ids[size + 1]]}))
    for _ in range(2 * SPARSE_EVERY_BATCHES):
        await subject.commit(Effects())
    found += [task_id async for keyed in keys for task_id in keyed.ids]
    assert sorted(found) == list(ids[size - 10 :])
    await subject.store.close(clean=True)
