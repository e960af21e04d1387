"""Reads at random ids decode only the requested rows of a pack."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from persistence.store_subject import Subject
from tickwheel.model.kinds import Effects
from tickwheel.model.records import (
    ID_STEP,
    NO_BODY,
    DeadRow,
    Outcome,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
    is_key_alone,
)
from tickwheel.persistence.contract import StoredTask, head_row
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.packs import Pack

OPTIONS = TaskOptions("key", priority=3)


def options_of(batch: int, n: int) -> TaskOptions | None:
    """Some in packs 4 and 8; a key alone in some of pack 7, and of 5 and 8, between all others."""
    if batch % 4 == 0 and n % 7 == 0:
        return OPTIONS
    return TaskOptions(f"k{n}") if batch in (5, 7, 8) and n % 3 else None


@pytest.fixture
async def filled(tmp_path: Path) -> tuple[Subject, dict[int, TaskRow]]:
    """Packs with and without options, of one topic and of several; some of it moved or left."""
    subject = Subject(SqliteStore(str(tmp_path / "store.db"), SqliteOptions(reserve_bytes=0)))
    await subject.open()
    random = Random(1)
    rows: dict[int, TaskRow] = {}
    for batch in range(1, 9):
        first = batch * 10_000 * ID_STEP
        fresh = [
            TaskRow(
                first + n * ID_STEP,
                random.randrange(10_000),
                "[a" if batch % 2 else random.choice("ab"),
                random.randbytes(random.randrange(40)),
                options_of(batch, n),
            )
            for n in range(5 if batch == 5 else 500)
        ]
        await subject.commit(Effects(enqueued={row.id: row for row in fresh}, id_mark=fresh[-1].id))
        rows |= {row.id: row for row in fresh}
    ended = random.sample(sorted(rows), 300)
    for task_id in ended:
        del rows[task_id]
    moved = {i: random.randrange(10_000) for i in random.sample(sorted(rows), 900)}
    placed = random.sample(sorted(rows.keys() - moved.keys()), 20)
    options = TaskOptions(order_id=7)
    updated = {i: rows[i]._replace(due_ms=1, body=NO_BODY, options=options) for i in placed}
    ending = dict.fromkeys(ended, Outcome.ACKED)
    await subject.commit(Effects(ended=ending, moved=moved, updated=updated, id_mark=max(rows)))
    rows |= {i: rows[i]._replace(due_ms=due_ms) for i, due_ms in moved.items()}
    rows |= {i: rows[i]._replace(due_ms=1, options=options) for i in placed}
    return subject, rows


async def test_the_same_rows_as_when_packs_are_read_whole(
    filled: tuple[Subject, dict[int, TaskRow]],
) -> None:
    subject, rows = filled
    by_pack: dict[int, list[int]] = {}
    for task_id in range(min(rows), max(rows) + ID_STEP, ID_STEP):
        by_pack.setdefault(task_id // (61 * ID_STEP), []).append(task_id)
    random = Random(2)
    for _ in range(5):
        ids = [random.choice(some) for number, some in by_pack.items() if number % 2]
        ids += [task_id for task_id in random.sample(sorted(rows), 30) if task_id not in ids]
        random.shuffle(ids)
        expected = {i: StoredTask(rows[i], (), ()) for i in ids if i in rows}
        assert await subject.store.read(ids) == expected
        assert (await subject.store.read_some(ids, 1 << 20))[0] == expected
    await subject.store.close(clean=True)


async def test_packs_without_options_are_read_in_part(
    filled: tuple[Subject, dict[int, TaskRow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, rows = filled
    monkeypatch.delattr(Pack, "rows")
    plain = [task_id for task_id, row in rows.items() if row.options is None]
    ids = [task_id for task_id in plain if task_id < 40_000 * ID_STEP][::99]
    result = await subject.store.read(ids)
    assert result == {i: StoredTask(rows[i], (), ()) for i in ids}
    await subject.store.close(clean=True)


async def test_keyed_tasks_are_read_without_bodies(
    filled: tuple[Subject, dict[int, TaskRow]], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, rows = filled
    history = ProgressRow(max(rows), "g", ProgressState.WAITING, 1, 2, 3)
    await subject.commit(Effects(progress={(max(rows), "g"): history}, id_mark=max(rows)))
    wanted = {i: r for i, r in rows.items() if r.options is None or is_key_alone(r.options)}
    monkeypatch.delattr(Pack, "rows")
    found, rest = await subject.store.read_heads(list(wanted), 1)
    assert not rest
    assert sum(map(len, found.plain.values())) == len(wanted) - 1
    for topic, dues_ms in found.plain.items():
        for task_id, due_ms in dues_ms.items():
            row = head_row(task_id, due_ms, topic, found.keys)
            assert row == wanted[task_id]._replace(body=NO_BODY)
    assert found.others[max(rows)].row == rows[max(rows)]._replace(body=NO_BODY)
    await subject.store.close(clean=True)


async def test_progress_and_dead_letters_come_with_them(
    filled: tuple[Subject, dict[int, TaskRow]],
) -> None:
    subject, rows = filled
    ids = sorted(rows)[::97]
    progress = ProgressRow(ids[2], "g", ProgressState.DONE, 1, 2, 3)
    dead = DeadRow(ids[4], "h", "a", 1, 2, "why")
    effects = Effects(progress={(ids[2], "g"): progress}, dead={(ids[4], "h"): dead})
    effects.id_mark = max(rows)
    await subject.commit(effects)
    result = await subject.store.read(ids)
    assert result[ids[2]] == StoredTask(rows[ids[2]], (progress,), ())
    assert result[ids[4]] == StoredTask(rows[ids[4]], (), (dead,))
    await subject.store.close(clean=True)
