"""SQLite's write-ahead log: bounded, and cut anywhere it yields whole batches only."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.store_rows import ended, in_flight, tasks
from tickwheel import failpoints
from tickwheel.model.kinds import Effects
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.database import connect_reader

LOG_BYTES = 256 * 1024
SMALL = SqliteOptions(wal_bytes=LOG_BYTES, reserve_bytes=0)
BATCHES = 24


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


async def test_is_bounded_under_constant_load_with_readers(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path), SMALL))
    await subject.open()
    largest = 0
    for i in range(300):
        ids = range(i * 100, i * 100 + 100)
        await subject.commit(tasks(ids, body=b"b" * 200))
        assert len(await subject.store.read(list(ids))) == 100
        if i > 10:
            await subject.commit(ended(range((i - 10) * 100, (i - 10) * 100 + 100)))
        largest = max(largest, _log(path).stat().st_size)
    assert LOG_BYTES < largest < LOG_BYTES * 1.5
    await subject.store.close(clean=True)


async def test_a_long_reader_only_delays_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path), SMALL))
    await subject.open()
    await subject.commit(tasks([1]))
    reader = connect_reader(str(path), 1 << 16, 1_000)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM task").fetchone() == (1,)
    for i in range(1, 60):
        await subject.commit(tasks(range(i * 100, i * 100 + 100), body=b"b" * 200))
    assert reader.execute("SELECT count(*) FROM task").fetchone() == (1,)
    assert _log(path).stat().st_size > LOG_BYTES * 2
    reader.close()
    for i in range(60, 120):
        await subject.commit(tasks(range(i * 100, i * 100 + 100), body=b"b" * 200))
    assert _log(path).stat().st_size < LOG_BYTES * 1.5
    await subject.store.close(clean=True)


async def test_recovery_under_way_does_not_hold_it_up(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path), SMALL))
    await subject.open()
    await subject.commit(tasks(range(1, 1_001)))
    result = 0
    async for handles in subject.store.recover_handles(chunk=100):
        result += len(handles.ids)
        for i in range(12):
            start = 10_000 + result * 100 + i * 100
            await subject.commit(tasks(range(start, start + 100), body=b"b" * 200))
    assert result == 1_000
    assert _log(path).stat().st_size < LOG_BYTES * 1.5
    await subject.store.close(clean=True)


async def test_passes_its_failpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "hit", passed.append)
    subject = Subject(SqliteStore(str(tmp_path / "store.db"), SMALL))
    await subject.open()
    passed.clear()
    for i in range(20):
        await subject.commit(tasks(range(i * 100, i * 100 + 100), body=b"b" * 200))
    assert "sqlite.checkpoint" in passed
    assert len(await subject.handles(chunk=100)) == 20
    assert passed.count("recovery.middle") == 1
    await subject.store.close(clean=True)


async def _fill(subject: Subject) -> None:
    """Batch k makes tasks k*10 … k*10+9, puts one in flight, and ends some of batch k-1."""
    for k in range(1, BATCHES + 1):
        effects = tasks(range(k * 10, k * 10 + 10), body=bytes([k]) * (37 * k))
        effects.progress[(k * 10, "g")] = in_flight(k * 10, "g", k)
        if k > 1:
            effects.ended = ended(range(k * 10 - 5, k * 10)).ended
        effects.position_ms = k
        assert await subject.commit(effects)


def _ids_after(k: int) -> list[int]:
    whole = list(range(k * 10, k * 10 + 10)) if k else []
    return [i for j in range(1, k) for i in range(j * 10, j * 10 + 5)] + whole


async def _batches_in(folder: Path) -> int:
    """How many batches a store recovers to; fails if one of them is there in part."""
    subject = Subject(SqliteStore(str(folder / "store.db"), SMALL))
    opened = await subject.open()
    try:
        k = opened.last_batch
        assert await subject.ids() == _ids_after(k)
        assert opened.position_ms == k
        assert opened.id_mark == (k * 10 + 9 if k else 0)
        small = await subject.small()
        assert [(row.id, row.attempt) for row in small.progress] == [
            (j * 10, j) for j in range(1, k + 1)
        ]
        assert [i for i, _ in small.outcomes] == [
            i for j in range(2, k + 1) for i in range(j * 10 - 5, j * 10)
        ]
        assert await subject.commit(Effects(position_ms=k)) is True
        return k
    finally:
        await subject.store.close(clean=False)


def _offsets(size: int, frame_bytes: int, seed: int) -> list[int]:
    """Around every frame's edges, and at random."""
    edges = {
        edge + delta
        for edge in range(32, size + 1, frame_bytes)
        for delta in (-1, 0, 1, 24)
        if 0 <= edge + delta <= size
    }
    rnd = random.Random(seed)
    return sorted(
        {0, 1, 31, size}
        | set(rnd.sample(sorted(edges), min(90, len(edges))))
        | {rnd.randrange(size) for _ in range(40)}
    )


@pytest.mark.parametrize(
    "damage", ["cut", "garbage", pytest.param("zeros", marks=pytest.mark.slow)]
)
async def test_damaged_anywhere_yields_whole_batches_only(tmp_path: Path, damage: str) -> None:
    subject = Subject(SqliteStore(str(tmp_path / "store.db"), SqliteOptions(reserve_bytes=0)))
    await subject.open()
    await _fill(subject)
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in ("store.db", "store.db-wal"):
        shutil.copy(tmp_path / name, crashed / name)
    await subject.store.close(clean=True)
    log = (crashed / "store.db-wal").read_bytes()
    seed = 20_261_120
    rnd = random.Random(seed)
    recovered = []
    for offset in _offsets(len(log), 24 + 4096, seed):
        again = tmp_path / f"at-{offset}"
        again.mkdir()
        shutil.copy(crashed / "store.db", again / "store.db")
        tail = {
            "cut": b"",
            "garbage": rnd.randbytes(len(log) - offset),
            "zeros": bytes(len(log) - offset),
        }[damage]
        (again / "store.db-wal").write_bytes(log[:offset] + tail)
        recovered.append(await _batches_in(again))
        shutil.rmtree(again)
    assert recovered == sorted(recovered), f"seed {seed}"
    assert recovered[0] == 0
    assert recovered[-1] == BATCHES
    assert len(set(recovered)) == BATCHES + 1
