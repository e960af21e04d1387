"""SQLite: what an error means. Only certainty lets the daemon go on."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from persistence.store_subject import OWNER, Subject
from support.store_rows import ended, tasks
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskRow
from tickwheel.persistence.contract import (
    CommitRefused,
    StoreBroken,
    StoreBusy,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite import store as store_module
from tickwheel.persistence.sqlite.database import connect_reader
from tickwheel.persistence.sqlite.store import copy_database


class Failing:
    """A connection whose statements of one kind fail, as SQLite would report it."""

    def __init__(self, connection: sqlite3.Connection, begins_with: str, name: str) -> None:
        self._connection = connection
        self._begins_with = begins_with
        self._name = name
        self.failures = 0

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement.startswith(self._begins_with):
            self.failures += 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = self._name
            raise error
        return self._connection.execute(statement, *parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _fail(subject: Subject, begins_with: str, name: str) -> Failing:
    store = subject.store
    assert isinstance(store, SqliteStore)
    writer = store._writer
    assert writer._connection and writer._upkeep
    failing = Failing(writer._connection, begins_with, name)
    writer._connection = failing  # type: ignore[assignment]  # stands in for a failing disk
    writer._upkeep._connection = failing  # type: ignore[assignment]  # the same one
    return failing


async def _opened(path: Path, options: SqliteOptions | None = None) -> Subject:
    subject = Subject(SqliteStore(str(path), options))
    await subject.open()
    await subject.commit(tasks([1]))
    return subject


@pytest.mark.parametrize(
    ("begins_with", "name", "ids"),
    [
        ("COMMIT", "SQLITE_IOERR_FSYNC", [2, 3]),
        ("COMMIT", "SQLITE_IOERR_WRITE", [2, 3]),
        ("INSERT", "SQLITE_CORRUPT", [2, 3]),
        ("BEGIN", "SQLITE_IOERR_READ", [2, 3]),
        ("UPDATE", "SQLITE_NOMEM", [2, 3]),
        # A small batch is one statement.
        ("INSERT", "SQLITE_IOERR_FSYNC", [2]),
        ("INSERT", "SQLITE_CORRUPT", [2]),
    ],
)
async def test_a_failing_disk_stops_the_store(
    tmp_path: Path, begins_with: str, name: str, ids: list[int]
) -> None:
    subject = await _opened(tmp_path / "store.db")
    failing = _fail(subject, begins_with, name)
    with pytest.raises(StoreBroken, match=name):
        await subject.commit(tasks(ids))
    assert failing.failures == 1, "never tried again"
    failing._begins_with = "no such statement"
    for refused in (
        subject.commit(ended([1])),
        subject.store.read([1]),
        subject.store.scan(-1, 1, None),
        subject.store.probe_room(),
        subject.store.recover_small(),
        subject.store.backup(str(tmp_path / "copy.db")),
    ):
        with pytest.raises(StoreBroken, match=name):
            await refused
    await subject.store.close(clean=True)
    opened = await subject.open()
    assert opened.clean is False
    assert await subject.ids() == [1]
    await subject.store.close(clean=True)


async def test_a_real_write_error_stops_the_store(tmp_path: Path) -> None:
    """EFBIG from a limit on file sizes: not ENOSPC, so nobody knows what it means."""
    subject = await _opened(tmp_path / "store.db")
    log_bytes = os.path.getsize(tmp_path / "store.db-wal")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log_bytes, limits[1]))
    try:
        with pytest.raises(StoreBroken, match="SQLITE_IOERR_WRITE"):
            await subject.commit(tasks([2], body=b"x" * 100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await subject.store.close(clean=True)
    await subject.open()
    assert await subject.ids() == [1]
    await subject.store.close(clean=True)


async def test_a_failed_checkpoint_keeps_its_batch_and_stops_the_next(tmp_path: Path) -> None:
    subject = await _opened(tmp_path / "store.db", SqliteOptions(wal_bytes=65_536))
    _fail(subject, "PRAGMA wal_checkpoint", "SQLITE_IOERR_FSYNC")
    assert await subject.commit(tasks([2], body=b"x" * 100_000)) is True
    with pytest.raises(StoreBroken, match="IOERR_FSYNC"):
        await subject.commit(tasks([3]))
    await subject.store.close(clean=True)
    await subject.open()
    assert await subject.ids() == [1, 2]
    await subject.store.close(clean=True)


@pytest.mark.parametrize(
    "effects",
    [
        Effects(enqueued={2: TaskRow(2, 2**63, "t", b"")}),
        Effects(enqueued={2: TaskRow(2, 1, "\ud800", b"")}),
        Effects(enqueued={2: TaskRow(2, 1, "t", b""), 1: TaskRow(1, 1, "t", b"")}),
        Effects(enqueued={2: TaskRow(2, 1, object(), b"")}),  # type: ignore[arg-type]  # a bug
        Effects(ended={2**63: 1}),  # type: ignore[dict-item]  # a bug
    ],
)
async def test_an_invalid_batch_breaks_the_store_without_effects(
    tmp_path: Path, effects: Effects
) -> None:
    subject = await _opened(tmp_path / "store.db")
    effects.records = {}
    with pytest.raises(StoreBroken):
        await subject.commit(effects)
    await subject.store.close(clean=True)
    assert (await subject.open()).last_batch == 1
    assert await subject.ids() == [1]
    await subject.store.close(clean=True)


async def test_another_writer_refuses_only_a_batch(tmp_path: Path) -> None:
    subject = await _opened(tmp_path / "store.db", SqliteOptions(busy_ms=50))
    shell = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    shell.execute("BEGIN IMMEDIATE")
    with pytest.raises(CommitRefused, match="another process") as refused:
        await subject.commit(tasks([2]))
    assert refused.value.full is False
    shell.execute("ROLLBACK")
    shell.close()
    assert await subject.commit(tasks([2])) is True
    await subject.store.close(clean=True)


async def test_listings_work_without_another_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot have one says so, without taking the store for broken."""
    subject = await _opened(tmp_path / "store.db")
    await subject.commit(tasks([2, 3]))
    store = subject.store
    with monkeypatch.context() as patched:
        nowhere = str(tmp_path / "missing" / "store.db")
        patched.setattr(
            store_module, "connect_reader", lambda path, *rest: connect_reader(nowhere, *rest)
        )
        # More of them than there are threads.
        pages = await asyncio.gather(*(store.scan(0, 10, None) for _ in range(10)))
        assert all([task.row.id for task in page] == [1, 2, 3] for page in pages)
        assert await store.scan_dead((0, ""), 10, None, None) == []
        with pytest.raises(StoreBusy, match="SQLITE_CANTOPEN") as busy:
            await store.backup(str(tmp_path / "copy.db"))
        assert busy.value.retryable
    assert await store.backup(str(tmp_path / "copy.db")) > 0
    assert await subject.commit(tasks([4])) is True
    await store.close(clean=True)


async def test_a_store_without_readers_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(str(tmp_path / "store.db"))
    with monkeypatch.context() as patched:
        nowhere = str(tmp_path / "missing" / "store.db")
        patched.setattr(
            store_module, "connect_reader", lambda path, *rest: connect_reader(nowhere, *rest)
        )
        with pytest.raises(StoreUnusable, match="unable to open"):
            await store.open("me", 1)
    assert (await store.open("me", 1)).epoch == 2
    await store.close(clean=True)


async def test_opening_an_unreadable_database_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    subject = await _opened(path)
    await subject.commit(tasks(range(10, 5_000)))
    await subject.store.close(clean=True)
    content = bytearray(path.read_bytes())
    content[100:4_096] = b"\xff" * 3_996
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match="malformed|corrupt"):
        await subject.open()
    with pytest.raises(StoreUnusable, match="malformed|corrupt"):
        await subject.open()


async def test_a_cancelled_commit_is_found_applied(tmp_path: Path) -> None:
    """The number shows it: the thread finishes what it began."""
    subject = await _opened(tmp_path / "store.db")
    waiting = subject.store.commit(subject.opened.epoch, OWNER, 2, tasks([2]))
    waiting.send(None)  # starts it, then drops it
    waiting.close()  # as a cancelled task would
    applied_now = await subject.store.commit(subject.opened.epoch, OWNER, 2, tasks([2]))
    assert applied_now is False
    assert await subject.ids() == [1, 2]
    await subject.store.close(clean=True)


async def test_a_backup_ends_when_the_store_closes(tmp_path: Path) -> None:
    subject = await _opened(tmp_path / "store.db")
    await subject.commit(tasks(range(10, 5_000), body=b"x" * 200))
    source = connect_reader(str(tmp_path / "store.db"), 1 << 16, 1_000)
    with pytest.raises(StoreError, match="closing"):
        copy_database(source, str(tmp_path / "copy.db"), 0, lambda: True)
    assert not list(tmp_path.glob("copy.db*"))
    assert copy_database(source, str(tmp_path / "copy.db"), 0, lambda: False) > 1_000_000
    source.close()
    await subject.store.close(clean=True)


async def test_a_backup_that_would_fill_the_disk_is_not_begun(tmp_path: Path) -> None:
    subject = await _opened(tmp_path / "store.db")
    source = connect_reader(str(tmp_path / "store.db"), 1 << 16, 1_000)
    with pytest.raises(StoreError, match="no room"):
        copy_database(source, str(tmp_path / "copy.db"), 1 << 60, lambda: False)
    source.close()
    assert not list(tmp_path.glob("copy.db*"))
    await subject.store.close(clean=True)
