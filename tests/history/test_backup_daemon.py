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
from support.waiting import comes
from tickwheel import Client, Task
from tickwheel.cli.app import run
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


def test_the_backup_of_the_day_and_the_history_since_are_the_store(
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
