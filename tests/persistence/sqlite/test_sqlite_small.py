"""Small batches on SQLite: one statement with the effects of the many, and a log whose room is
written ahead."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import tickwheel
from persistence.store_subject import Subject
from support.stand_in import stand_in
from support.store_rows import dropped, ended, in_flight, tasks
from tickwheel.model.kinds import SESSION, Effects, keyed
from tickwheel.model.records import ID_STEP, DeadRow, Outcome, SessionRow, TaskOptions, TaskRow
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore, database, packs
from tickwheel.persistence.sqlite.database import PAGE_BYTES
from tickwheel.persistence.sqlite.writer import (
    AHEAD_BYTES,
    FRAME_HEADER_BYTES,
    HEADER_BYTES,
    LOOK_EVERY_BATCHES,
    Writer,
)

PACK_IDS = range(1_000, 1_000 + 32 * ID_STEP, ID_STEP)
ENDINGS_MAX = 70
FRAME_BYTES = FRAME_HEADER_BYTES + PAGE_BYTES


@pytest.fixture(autouse=True)
def seldom_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look for sparse packs, which other tests make frequent, is never part of a small batch."""
    monkeypatch.setattr(packs, "SPARSE_EVERY_BATCHES", 64)


def session(number: int) -> SessionRow:
    return SessionRow(b"s" * 16, number, number, ((number, number * ID_STEP, 1, number),), ())


def with_options(task_id: int, options: TaskOptions) -> Effects:
    return Effects(enqueued={task_id: TaskRow(task_id, 1_000, "t", b"body", options)})


def batches() -> Iterator[Effects]:
    """Small ones of every kind, and between them those that make tables have rows."""
    dead = DeadRow(3, "g", "orders", 5, 2, "why", newest_id=9)
    yield tasks([1])
    yield with_options(2, TaskOptions(key="k-2"))
    yield with_options(3, TaskOptions(tag="blue", priority=4))
    yield Effects(records=keyed(SESSION, [session(1)]))
    yield Effects(enqueued=tasks([4]).enqueued, records=keyed(SESSION, [session(2)]))
    yield Effects(progress={(1, "default"): in_flight(1)})
    yield Effects(dead={(3, "g"): dead})
    yield ended([1])
    yield Effects(enqueued=tasks([5]).enqueued, ended=ended([2, 3], Outcome.EXPIRED).ended)
    yield Effects(records=dropped(SESSION, session(1).key))
    yield Effects(records=keyed(SESSION, [session(3)]) | dropped(SESSION, session(2).key))
    yield Effects(records=keyed(SESSION, [session(4), session(5)]))
    yield Effects(records=dropped(SESSION, session(4).key, session(5).key))
    yield tasks(PACK_IDS)
    yield ended([PACK_IDS[3], 4])
    yield ended(PACK_IDS)
    for number in range(2_000, 2_000 + LOOK_EVERY_BATCHES * 2):
        yield Effects(
            enqueued=tasks([number + 1]).enqueued,
            ended=ended([number] if number > 2_000 else [5]).ended,
        )


async def content(folder: Path) -> list[str]:
    """What the database of all ``batches`` holds, but for what differs from start to start."""
    folder.mkdir()
    subject = Subject(SqliteStore(str(folder / "store.db"), SqliteOptions(endings_max=ENDINGS_MAX)))
    await subject.open()
    for effects in batches():
        effects.id_mark, effects.position_ms = 10_000, 77
        assert await subject.commit(effects)
    await subject.store.close(clean=True)
    with sqlite3.connect(folder / "store.db") as shell:
        lines = list(shell.iterdump())
        (last,) = shell.execute("SELECT value FROM meta WHERE key = 'last_batch'").fetchone()
    shell.close()
    assert last == len(list(batches()))
    return [line for line in lines if 'INTO "meta" VALUES(\'' not in line]


async def test_a_single_statement_equals_many_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote: list[bool] = []
    small = Writer._small_transaction

    def counted(*arguments: object) -> bool | None:
        applied = small(*arguments)  # type: ignore[arg-type]  # they are passed on
        wrote.append(applied is not None)
        return applied

    # Hashes of keys differ with the seed of each database.
    seeded = stand_in(secrets, token_bytes=lambda count: b"x" * count)
    monkeypatch.setattr(database, "secrets", seeded)
    monkeypatch.setattr(Writer, "_small_transaction", counted)
    by_one = await content(tmp_path / "one")
    assert wrote.count(True) > LOOK_EVERY_BATCHES
    assert wrote.count(False) >= 5
    monkeypatch.setattr(Writer, "_small_transaction", lambda *_: None)
    assert await content(tmp_path / "many") == by_one
    assert sum('INTO "ending"' in line for line in by_one) <= ENDINGS_MAX + 1


async def test_a_lone_task_and_its_end_are_a_statement_each(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store.db"))
    subject = Subject(store)
    await subject.open()
    connection = store._writer._connection
    assert connection is not None
    texts: list[str] = []
    connection.set_trace_callback(texts.append)
    both = Effects(enqueued=tasks([1]).enqueued, records=keyed(SESSION, [session(1)]))
    both.records |= dropped(SESSION, session(0).key)
    assert await subject.commit(both)
    assert await subject.commit(ended([1]))
    connection.set_trace_callback(None)
    # The text comes once more for each statement of the trigger.
    assert {tuple(text.split()[:3]) for text in texts} == {("INSERT", "INTO", "small")}
    await store.close(clean=True)


async def test_small_transactions_leave_no_schema_objects(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    await subject.commit(tasks([1]))
    await subject.store.close(clean=True)
    with sqlite3.connect(path) as shell:
        kinds = {kind for (kind,) in shell.execute("SELECT type FROM sqlite_master")}
    shell.close()
    assert kinds <= {"table", "index"}


async def test_the_room_of_the_log_is_written_ahead(tmp_path: Path) -> None:
    """Its file grows in large steps, up to the limit, and small batches write over zeros."""
    path, limit_bytes = tmp_path / "store.db", 2 << 20
    log = path.with_name(path.name + "-wal")
    subject = Subject(SqliteStore(str(path), SqliteOptions(wal_bytes=limit_bytes, reserve_bytes=0)))
    await subject.open()
    sizes: list[int] = []
    for number in range(1, 400):
        await subject.commit(tasks([number]))
        sizes.append(log.stat().st_size)
    grew = [after - before for before, after in pairwise(sizes) if after > before]
    assert 1 <= len(grew) <= limit_bytes // AHEAD_BYTES + 1
    assert max(sizes) <= limit_bytes + AHEAD_BYTES
    await subject.store.close(clean=True)


def end_of_last(before: bytes, after: bytes) -> int:
    """Where the last frame of the log ends that differs from ``before``."""
    before = before.ljust(len(after), b"\0")
    last = max(at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    frames = -(-(last + 1 - HEADER_BYTES) // FRAME_BYTES)
    return HEADER_BYTES + frames * FRAME_BYTES


async def test_zeros_after_the_log_mark_its_end(tmp_path: Path) -> None:
    """What a crash leaves is read to the last batch, also where one is torn into the zeros."""
    path = tmp_path / "store.db"
    log = path.with_name(path.name + "-wal")
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    ends: list[int] = []
    for number in range(1, 9):
        before = log.read_bytes()
        await subject.commit(tasks([number]))
        ends.append(end_of_last(before, log.read_bytes()))
    data, base = log.read_bytes(), path.read_bytes()
    assert len(data) > ends[-1] + AHEAD_BYTES // 2
    await subject.store.close(clean=False)
    for count, end in enumerate(ends, 1):
        for cut, expected in ((end, count), (end - 3_000, count - 1)):
            folder = tmp_path / f"cut-{cut}"
            folder.mkdir()
            (folder / "store.db").write_bytes(base)
            torn = data[:cut] + bytes(len(data) - cut)
            (folder / "store.db-wal").write_bytes(torn)
            again = Subject(SqliteStore(str(folder / "store.db")))
            opened = await again.open()
            assert opened.last_batch == expected
            assert await again.ids() == list(range(1, expected + 1))
            await again.store.close(clean=True)


async def test_sequential_calls_make_small_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are those of a real daemon, its memory of the producer's session included."""
    wrote: list[bool] = []
    small = Writer._small_transaction

    def counted(*arguments: object) -> bool | None:
        applied = small(*arguments)  # type: ignore[arg-type]  # they are passed on
        wrote.append(applied is not None)
        return applied

    async with tickwheel.embedded(f"sqlite:///{tmp_path / 'store.db'}") as client:
        await client.create_group("t", "g")
        await client.enqueue("t", b"first")
        monkeypatch.setattr(Writer, "_small_transaction", counted)
        for number in range(10):
            await client.enqueue("t", b"body", key=f"k-{number}")
        async with client.subscribe("t", group="g") as deliveries:
            for _ in range(10):
                assert await (await anext(deliveries)).ack() == "acked"
    assert wrote.count(True) >= 18
    assert wrote.count(False) <= 3
