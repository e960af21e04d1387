"""Daily backups: their hour, how many are kept, and the mark that protects the history."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.history_rig import HOUR_MS, NODE, Clock, enqueued, make_id, write
from support.waiting import comes
from tickwheel.clock import Now
from tickwheel.history.segments import last_backup_file, last_backup_ms
from tickwheel.persistence import filling
from tickwheel.persistence.contract import StoreError
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.server.shard import backups
from tickwheel.server.shard.backups import DailyBackups
from tickwheel.server.shard.parts import Parts

START_MS = 1_795_255_200_000  # 2026-11-21T10:00:00Z


pytestmark = pytest.mark.usefixtures("in_utc")


class BackupRig:
    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.clock = Clock(START_MS)
        self.notices: list[tuple[str, str]] = []
        self.folder = folder / "backups"
        self.folder.mkdir(exist_ok=True)
        self.fail: Exception | None = None
        self.made_s: list[float] = []
        self.store = SimpleNamespace(backup=self._backup)
        self.daily = DailyBackups(cast(Parts, self._parts(folder, keep)), self.folder, hour=3)

    def _parts(self, folder: Path, keep: int) -> SimpleNamespace:
        async def barrier(*, is_timed: bool) -> None:
            """Nothing waits for the store."""

        return SimpleNamespace(
            core=SimpleNamespace(config=SimpleNamespace(shard=0)),
            clock=SimpleNamespace(read=lambda: Now(self.clock.wall_ms(), 0)),
            settings=SimpleNamespace(backup_keep=keep, history_dir=str(folder / "history")),
            committer=SimpleNamespace(barrier=barrier),
            store=self.store,
            on_event=lambda event, text: self.notices.append((event, text)),
            observed=SimpleNamespace(note_backup=self.made_s.append),
        )

    async def _backup(self, path: str) -> int:
        if self.fail is not None:
            raise self.fail
        Path(path).write_text("backup")
        return 6

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


async def test_the_first_backup_is_made_at_once_and_the_next_at_the_hour(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path)
    assert await rig.daily.is_due()
    assert await rig.daily.once()
    assert rig.names == ["tickwheel-s0-20261121T100000Z.db"]
    assert last_backup_ms(tmp_path / "history", 0) == START_MS
    for hours, due in ((1, False), (16, False), (17, True), (40, True)):
        rig.clock.now_ms = START_MS + hours * HOUR_MS
        assert await rig.daily.is_due() is due
    assert await rig.daily.once()
    assert not await rig.daily.is_due()
    assert rig.made_s == [START_MS / 1000, START_MS / 1000 + 40 * 3600]


async def test_a_backup_of_an_earlier_process_is_not_repeated(tmp_path: Path) -> None:
    await BackupRig(tmp_path).daily.once()
    rig = BackupRig(tmp_path)
    rig.clock.now_ms += HOUR_MS
    running = asyncio.create_task(rig.daily.run())
    await comes(lambda: rig.made_s)
    running.cancel()
    assert rig.made_s == [START_MS / 1000]
    assert rig.notices == []


async def test_old_backups_are_deleted_and_other_files_kept(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path, keep=2)
    for other in ("mine.db", "tickwheel-s1-20200101T000000Z.db", "tickwheel-s0-x.db"):
        (rig.folder / other).write_text("")
    for day in range(4):
        rig.clock.now_ms = START_MS + day * 24 * HOUR_MS
        await rig.daily.once()
    assert rig.names == [
        "mine.db",
        "tickwheel-s0-20261123T100000Z.db",
        "tickwheel-s0-20261124T100000Z.db",
        "tickwheel-s0-x.db",
        "tickwheel-s1-20200101T000000Z.db",
    ]


async def test_a_clock_that_was_ahead_delays_no_backup(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path, keep=1)
    await rig.daily.once()
    rig.clock.now_ms = START_MS + 20 * HOUR_MS
    assert await rig.daily.once()
    rig.clock.now_ms = START_MS + HOUR_MS
    assert await rig.daily.is_due()
    assert await rig.daily.once()
    assert rig.names == ["tickwheel-s0-20261121T110000Z.db"]
    for hours, due in ((1, False), (16, False), (17, True)):
        rig.clock.now_ms = START_MS + hours * HOUR_MS
        assert await rig.daily.is_due() is due
    assert rig.made_s == [START_MS / 1000 + hours * 3600 for hours in (0, 20, 1)]


async def test_the_age_of_backups_is_right_soon_after_a_clock_was_ahead(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path)
    for hours in (0, 20):
        rig.clock.now_ms = START_MS + hours * HOUR_MS
        await rig.daily.once()
    rig.clock.now_ms = START_MS + HOUR_MS
    running = asyncio.create_task(rig.daily.run())
    await comes(lambda: len(rig.made_s) == 3)
    running.cancel()
    assert rig.made_s[-1] == START_MS / 1000 and len(rig.names) == 2


@pytest.mark.parametrize("error", [StoreError("no room"), OSError(28, "No space left on device")])
async def test_a_failed_backup_keeps_older_backups_and_the_mark(
    tmp_path: Path, error: Exception
) -> None:
    rig = BackupRig(tmp_path, keep=1)
    await rig.daily.once()
    rig.clock.now_ms += 24 * HOUR_MS
    rig.fail = error
    assert not await rig.daily.once()
    assert await rig.daily.is_due()
    assert [event for event, _ in rig.notices] == ["backup_made", "backup_failed"]
    assert rig.made_s == [START_MS / 1000]
    assert rig.names == ["tickwheel-s0-20261121T100000Z.db"]
    assert last_backup_ms(tmp_path / "history", 0) == START_MS


async def test_a_backup_records_the_segments_that_came_before_it(tmp_path: Path) -> None:
    rig, history = BackupRig(tmp_path), tmp_path / "history"
    write(history, [[enqueued([make_id(1)])]])
    await rig.daily.once()
    assert json.loads(last_backup_file(history, 0).read_text())["numbers"] == {NODE: 2}


async def test_a_missing_backup_folder_is_not_created(tmp_path: Path) -> None:
    """As that of a volume which is not mounted any more."""
    rig = BackupRig(tmp_path)
    rig.folder.rmdir()
    assert not await rig.daily.once()
    assert not rig.folder.exists() and await rig.daily.is_due()
    ((event, text),) = rig.notices
    assert event == "backup_failed" and f"backup_dir {rig.folder} is not a folder" in text
    rig.folder.mkdir()
    assert await rig.daily.once()


async def test_a_backup_without_a_written_mark_is_repeated(tmp_path: Path) -> None:
    """As when the history's disk is full, and that of the backups is not."""
    rig = BackupRig(tmp_path)
    in_the_way = tmp_path / "history"
    in_the_way.write_text("")
    assert not await rig.daily.once()
    assert await rig.daily.is_due()
    in_the_way.unlink()
    rig.clock.now_ms += 600_000
    assert await rig.daily.once()
    assert not await rig.daily.is_due()
    assert last_backup_ms(in_the_way, 0) == START_MS + 600_000


async def test_backups_without_a_written_mark_do_not_pile_up(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path, keep=2)
    (tmp_path / "history").write_text("")
    for _ in range(5):
        rig.clock.now_ms += 600_000
        assert not await rig.daily.once()
    assert len(rig.names) == 2


async def test_unfinished_backups_of_killed_daemons_are_removed(tmp_path: Path) -> None:
    rig = BackupRig(tmp_path)
    ended = subprocess.Popen(("true",))
    ended.wait()
    ours, name = os.getpid(), "tickwheel-s0-20261120T030000Z.db"
    for pid in (ours, ended.pid):
        for suffix in ("", "-journal", "-wal", ".lock"):
            (rig.folder / f"{name}.part-{pid}{suffix}").write_text("")
    kept = {name, f"{name}.part-1", f"{name.replace('s0', 's1')}.part-{ended.pid}", "x.part-2"}
    for other in kept:
        (rig.folder / other).write_text("")
    rig.clock.now_ms = START_MS - 24 * HOUR_MS  # no backup is due
    running = asyncio.create_task(rig.daily.run())
    await comes(lambda: rig.made_s)
    running.cancel()
    assert set(rig.names) == kept


async def test_a_hanging_folder_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return original(*given, **options)

        monkeypatch.setattr(owner, name, call)

    rig = BackupRig(tmp_path, keep=1)
    store = MemoryStore()
    await store.open("tester", START_MS)
    rig.store.backup = store.backup  # as stores on servers create backups
    for name in ("iterdir", "is_dir", "unlink"):
        watch(Path, name)
    for name in ("lexists", "getsize"):
        watch(os.path, name)
    watch(os, "link")
    watch(filling, "write_meta")
    watch(backups, "write_last_backup")
    await rig.daily.once()
    rig.clock.now_ms += 24 * HOUR_MS
    running = asyncio.create_task(rig.daily.run())
    await comes(lambda: len(rig.made_s) == 3 and len(os.listdir(rig.folder)) == 1)
    running.cancel()
    assert len(threads) == 8
    assert threading.get_ident() not in set().union(*threads.values())


async def test_a_store_backup_can_be_opened(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), SqliteOptions(reserve_bytes=0))
    await store.open("tester", START_MS)
    rig = BackupRig(tmp_path)
    rig.store.backup = store.backup
    assert await rig.daily.once()
    await store.close(clean=True)
    copy = SqliteStore(str(rig.folder / rig.names[0]), SqliteOptions(reserve_bytes=0))
    assert not (await copy.open("tester", START_MS)).created
    await copy.close(clean=True)
