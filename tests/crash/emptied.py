"""The end of a run without a mirror: Redis is emptied, and an operator restores.

The daemon has to end by itself, with exit code 1 and one line that says what to do; not to serve
what is left when it is started again; and to serve what the backup had after a restore.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from crash.redis_rig import RedisRig
from support.daemon import Daemon, DaemonFailed
from tickwheel import Client, Task

FAR_S = 3_600.0
COUNT = 20
NEEDS = "tickwheel restore"


async def emptied(daemon: Daemon, rig: RedisRig, rnd: random.Random, folder: Path) -> list[str]:
    """What went otherwise; the daemon was stopped, and is stopped again."""
    daemon.settings["backup_dir"] = folder
    await daemon.astart()
    async with Client(daemon.url) as client:
        receipts = await client.enqueue_many([Task("emptied", b"kept", delay=FAR_S)] * COUNT)
        backup = await client.backup("emptied.db")
        await client.enqueue("emptied", b"not in the backup", delay=FAR_S)
    said_before = len(daemon.log_text())
    await rig.suffer("wipe", rnd, 0.0)
    problems = []
    code, log = await daemon.awaited(), daemon.log_text()[said_before:]
    lines = [line for line in log.splitlines() if NEEDS in line]
    if code != 1 or len(lines) != 1:
        problems.append(f"Redis was emptied: exit code {code}, {len(lines)} lines name a restore")
    try:
        await daemon.astart()
        problems.append("it serves what is left in a Redis that was emptied")
        await daemon.aterminate()
    except DaemonFailed:
        pass
    problems += await _command("init", "--force", "--yes", "--store", daemon.store)
    problems += await _command("restore", "--from", backup.path, "--into", daemon.store)
    await daemon.astart()
    async with Client(daemon.url) as client:
        ids = {task.id async for task in client.list_tasks(topic="emptied")}
        if ids != {receipt.id for receipt in receipts}:
            problems.append(f"restored: {len(ids)} of {COUNT} tasks")
    await daemon.aterminate()
    return problems


async def _command(*args: str) -> list[str]:
    """A command of Tickwheel; what went wrong."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tickwheel", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    if process.returncode == 0:
        return []
    return [f"tickwheel {args[0]}: exit code {process.returncode}: {said.decode()}"]
