"""The offline check finds what does not fit, and changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.store_rows import DEAD, PROGRESS, SESSIONS, TASKS, ended, everything, tasks
from tickwheel.model.kinds import GROUP, Effects, keyed
from tickwheel.model.records import (
    ID_STEP,
    GroupRow,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence.audit import check
from tickwheel.persistence.contract import Audit, StoreUnusable
from tickwheel.persistence.sqlite import SqliteStore


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """A store that was closed cleanly, with everything in it."""
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    await subject.commit(everything())
    await subject.commit(ended([1]))
    await subject.store.close(clean=True)
    return path


def _check(path: Path) -> Audit:
    return check(f"sqlite:///{path}")


def _problems_after(path: Path, statement: str) -> str:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()
    return "\n".join(_check(path).problems)


async def test_a_sound_store_has_no_problems(path: Path) -> None:
    before = path.read_bytes()
    assert _check(path) == Audit(
        tasks=len(TASKS) - 1, progress=len(PROGRESS), dead=len(DEAD), sessions=len(SESSIONS)
    )
    assert path.read_bytes() == before


async def test_a_crashed_store_is_read_with_its_log(path: Path, tmp_path: Path) -> None:
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    await subject.commit(tasks([100]))
    crashed = tmp_path / "crashed.db"
    crashed.write_bytes(path.read_bytes())
    log = Path(f"{path}-wal").read_bytes()
    Path(f"{crashed}-wal").write_bytes(log)
    await subject.store.close(clean=False)
    audit = _check(crashed)
    assert (audit.tasks, audit.problems) == (len(TASKS), [])
    assert Path(f"{crashed}-wal").read_bytes() == log


ANSWERED = "kind = 2 AND key LIKE '% 5'"
"""The row of a session whose first request is 5."""


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM task WHERE id = 3", "progress of group 'default' with task 3, which is not"),
        ("DELETE FROM task WHERE id = 3", "dead letter of group 'billing' for task 3, which is"),
        ("UPDATE meta SET value = 5 WHERE key = 'id_mark'", "above the id mark 5"),
        ("UPDATE task SET extras = x'920701' WHERE id = 3", "extras: version 7"),
        ("UPDATE prepare SET state = 9 WHERE id = 3", "unknown state 9"),
        ("UPDATE task_key SET hash = 7 WHERE id = 3", "the stored hash of task 3 does not match"),
        ("DELETE FROM task_key WHERE id = 32", "the stored hash of task 32 does not match"),
        ("INSERT INTO task_key VALUES (99, 7)", "the stored hash of task 99 does not match"),
        ("UPDATE record SET data = x'c1' WHERE kind = 2", "session: not a msgpack value"),
        (f"UPDATE record SET key = 'x 8' WHERE {ANSWERED}", " 5' is stored as 'x 8'"),
        (
            f"INSERT INTO record SELECT 2, 'x 9', data FROM record WHERE {ANSWERED}",
            "request 6 was answered twice",
        ),
        ("UPDATE record SET kind = 99 WHERE kind = 1", "does not know the record kind 99"),
        ("UPDATE ending SET data = x'9101'", "ending of batch 1: endings: wrong fields"),
        ("UPDATE ending SET upto = 9 WHERE batch = 2", "counts 9, expected 4"),
        ("INSERT INTO task VALUES (1, 1, 't', x'', NULL)", "task 1 ended in batch 2 and is still"),
        ("INSERT INTO prepare SELECT id, grp, 1, 1, 1, 1, NULL FROM dead", "both dead and in"),
    ],
)
async def test_inconsistent_rows_are_found(path: Path, statement: str, problem: str) -> None:
    assert problem in _problems_after(path, statement)


async def test_damaged_pages_are_found(path: Path) -> None:
    connection = sqlite3.connect(path)
    (page,) = connection.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'prepare'"
    ).fetchone()
    connection.close()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : (page - 1) * 4096 + 64] = bytes(64)
    path.write_bytes(content)
    assert any(problem.startswith("SQLite: ") for problem in _check(path).problems)


async def test_a_task_owed_to_no_group_is_found(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path)))
    await subject.open()

    def done(group: str) -> ProgressRow:
        return ProgressRow(1, group, ProgressState.DONE, 1, 0)

    await subject.commit(tasks([1], due_ms=10))
    await subject.commit(
        Effects(
            progress={(1, "a"): done("a")},
            records=keyed(GROUP, [GroupRow("t", "a", 0), GroupRow("t", "b", 5)]),
            id_mark=1,
            position_ms=50,
        )
    )
    await subject.store.close(clean=True)
    assert _check(path).problems == []
    await subject.open()
    await subject.commit(Effects(progress={(1, "b"): done("b")}, position_ms=50))
    await subject.store.close(clean=True)
    assert _check(path).problems == ["task 1 is finished in every group and is still stored"]


@pytest.mark.parametrize("placed", ["id", "packed", "loose"])
async def test_groups_owed_a_task_by_place_are_recognised(tmp_path: Path, placed: str) -> None:
    """Done for one group; the other begins later by due time, and before it in the order."""
    path = tmp_path / "store.db"
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    ids = range(ID_STEP, 10 * ID_STEP, ID_STEP)
    task_id, mark = ids[6], ids[-1]
    since_id, options = (
        (0, None) if placed == "id" else (mark, TaskOptions(order_id=mark + ID_STEP))
    )
    rows = {i: TaskRow(i, 10, "t", b"", options if i == task_id else None) for i in ids}
    moved = {task_id: rows[task_id]}
    if placed == "loose":
        rows[task_id] = rows[task_id]._replace(options=None)
    await subject.commit(Effects(enqueued=rows, id_mark=mark))
    if placed == "loose":
        await subject.commit(Effects(updated=moved, id_mark=mark))
    groups = (GroupRow("t", "a", 0, None, 0), GroupRow("t", "b", 50, None, since_id))
    done = ProgressRow(task_id, "a", ProgressState.DONE, 1, 0)
    effects = Effects(progress={(task_id, "a"): done}, id_mark=mark, position_ms=40)
    effects.records |= keyed(GROUP, groups)
    await subject.commit(effects)
    await subject.store.close(clean=True)
    assert _check(path).problems == []


async def test_a_store_in_use_is_refused(path: Path) -> None:
    subject = Subject(SqliteStore(str(path)))
    await subject.open()
    with pytest.raises(StoreUnusable, match="in use by pid"):
        _check(path)
    assert await subject.commit(tasks([100])) is True
    await subject.store.close(clean=True)
    _check(path)


async def test_files_that_are_not_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"):
        _check(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreUnusable, match="empty"):
        _check(tmp_path / "empty.db")
    (tmp_path / "text").write_text("text" * 1_000)
    with pytest.raises(StoreUnusable):
        _check(tmp_path / "text")
    with pytest.raises(StoreUnusable, match="only a SQLite store can be checked"):
        check("memory:")
