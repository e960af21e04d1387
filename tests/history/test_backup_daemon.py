"""A daemon that makes its daily backup by itself, and the restore from it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.history_daemon import daemon_in, metric
from support.restore_rig import held, url
from support.waiting import comes, until
from tickwheel import Client, Task
from tickwheel.cli.app import run
from tickwheel.errors import Conflict
from tickwheel.history.segments import last_backup_file, last_backup_ms

FAR = 3_600.0


async def enqueue(daemon: Daemon, count: int) -> set[int]:
    async with Client(daemon.url) as client:
        receipts = await client.enqueue_many([Task("t", b"body", delay=FAR)] * count)
        return {receipt.id for receipt in receipts}


async def living(folder: Path) -> tuple[set[int], set[int]]:
    """Ids from before the backup, and from after it."""
    history = folder / "history"
    daemon = daemon_in(folder, http=True)
    async with daemon:
        before = await enqueue(daemon, 2)
        assert await daemon.aterminate() == 0
    daemon.settings["backup_daily_hour"] = time.localtime().tm_hour
    async with daemon:
        await comes(last_backup_file(history, 0).exists)
        made_s = (last_backup_ms(history, 0) or 0) // 1000
        assert made_s > 0
        success = "tickwheel_backup_last_success_timestamp_seconds"
        await comes(lambda: metric(daemon, success) == made_s)
        after = await enqueue(daemon, 3)
        assert await daemon.aterminate() == 0
    return before, after


def test_a_daily_backup_and_later_history_equal_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = asyncio.run(living(tmp_path))
    (backup,) = tmp_path.glob("tickwheel-s0-*.db")
    source = ["--from", str(backup), "--history", str(tmp_path / "history")]
    assert run(["restore", *source, "--into", url(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exact"] is True
    assert (report["from_backup"], report["from_history"]) == (2, 3)
    assert asyncio.run(held(url(tmp_path))).rows.keys() == before | after


# --- folders that are not there ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [("backup_dir", "none"), ("audit_file", "none/audit.jsonl"), ("history_dir", "none/history")],
)
def test_a_missing_backup_folder_stops_the_start(
    tmp_path: Path, setting: str, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A volume that is not mounted must not become a folder of another disk."""
    path = tmp_path / value
    arguments = ["serve", "--store", "memory:", "--listen", "tcp://127.0.0.1:0"]
    assert run([*arguments, "--set", f"{setting}={path}"]) == 1
    told: list[str] = []  # a thread writes it

    def is_named() -> bool:
        told.append(capfd.readouterr().err)
        return f"setting {setting}: " in "".join(told)

    until(is_named)
    assert not (tmp_path / "none").exists()


async def test_a_lost_backup_folder_fails_backups_by_name(tmp_path: Path) -> None:
    """The daily one is tried again, one that a client asks for is refused; neither makes it."""
    backups = tmp_path / "backups"
    backups.mkdir()
    daemon = daemon_in(
        tmp_path, http=True, backup_dir=backups, backup_daily_hour=time.localtime().tm_hour
    )
    async with daemon, Client(daemon.url) as client:
        await comes(lambda: any(backups.iterdir()))
        await comes(lambda: "backup_made" in daemon.log_text())
        for path in backups.iterdir():
            path.unlink()
        backups.rmdir()
        with pytest.raises(Conflict, match=f"backup_dir {backups} is not a folder"):
            await client.backup("now.db")
        assert not backups.exists()
        assert await daemon.aterminate() == 0


def test_a_restore_into_a_missing_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = f"sqlite:///{tmp_path / 'none' / 'new.db'}"
    assert run(["restore", "--history", str(tmp_path), "--into", into]) == 2
    assert f"{tmp_path / 'none'} is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
