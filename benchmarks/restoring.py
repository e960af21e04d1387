"""Cost of a restore by events before the backup, later events, and the tasks that they change.

    python -m benchmarks.restoring [--before 1000000] [--after 20000] [--batch 500]

A store gets ``--before`` tasks in the ten minutes before its backup. Half of the ``--after``
events since are new tasks, half are acks of old ones. The backup, the files of the history and the
restore are made by what a daemon and an operator use; each restore is a process of its own. Seconds
and MB (the most memory that the process held) of the backup and of two restores: with the backup,
and of the history alone, which reads every event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environment import choose_folder
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import state_folder
from tickwheel.history.spool import Spool
from tickwheel.history.writer import WriterOptions
from tickwheel.model.kinds import GROUP, Effects, keyed
from tickwheel.model.records import ID_STEP, GroupRow, TaskRow, id_floor
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

NODE, TOPIC, GROUP_NAME, OWNER = "bench", "orders", "billing", "bench/1"
BEFORE_MS = 600_000
"""Time from the first enqueue to the backup."""
LATER_MS = 24 * 3_600_000
"""Time from the enqueue of tasks until they are due."""
BODY = b"x" * 64


def batch_of(first: int, count: int, time_ms: int) -> tuple[list[TaskRow], list[object]]:
    """Return new tasks and their record in the spool."""
    ids = list(range(first, first + count * ID_STEP, ID_STEP))
    rows = [TaskRow(task_id, time_ms + LATER_MS, TOPIC, BODY) for task_id in ids]
    bodies = [BODY] * count
    dues = [row.due_ms for row in rows]
    return rows, [EventKind.ENQUEUED, time_ms, "shop@10.0.0.1:40000", ids, dues, TOPIC, {}, bodies]


async def make(folder: Path, before: int, after: int, batch: int) -> tuple[float, int]:
    """Make the backup and a spool. Return the backup's seconds and bytes."""
    now_ms = int(time.time() * 1000)
    begin_ms, first = now_ms - BEFORE_MS, id_floor(now_ms - BEFORE_MS, 0)
    store = SqliteStore(str(folder / "store.db"), SqliteOptions(reserve_bytes=0))
    opened = await store.open(OWNER, begin_ms)
    history = folder / "history"
    spool = Spool(state_folder(history, NODE, 0), opened.epoch, bytes_max=1 << 40)
    spool.append(0, [[EventKind.DAEMON, begin_ms, "started", {"clean": True}]])
    batches = before // batch
    for n in range(1, batches + 1):
        time_ms = begin_ms + BEFORE_MS * n // batches
        rows, record = batch_of(first, batch, time_ms)
        first += batch * ID_STEP
        effects = Effects({row.id: row for row in rows}, id_mark=rows[-1].id, position_ms=time_ms)
        if n == 1:
            effects.records = keyed(GROUP, [GroupRow(TOPIC, GROUP_NAME, 0)])
        await store.commit(opened.epoch, OWNER, n, effects)
        spool.append(n, [record])
    began_s = time.perf_counter()
    size_bytes = await store.backup(str(folder / "backup.db"))
    spent_s = time.perf_counter() - began_s
    await store.close(clean=True)
    _append_later(spool, now_ms, first, batches, after, batch)
    spool.close()
    return spent_s, size_bytes


def _append_later(
    spool: Spool, now_ms: int, first: int, batches: int, after: int, batch: int
) -> None:
    old = id_floor(now_ms - BEFORE_MS, 0)
    for n in range(after // batch):
        time_ms = now_ms + 1_000 + n
        if n % 2:
            ids = list(range(old, old + batch * ID_STEP, ID_STEP))
            old += batch * ID_STEP
            ones = [1] * batch
            record: list[object] = [
                EventKind.ACKED, time_ms, TOPIC, GROUP_NAME, "billing-1@10.0.0.3:50124", 1, ids,
                ones,
                [time_ms] * batch, True,
            ]  # fmt: skip
        else:
            _, record = batch_of(first, batch, time_ms)
            first += batch * ID_STEP
        spool.append(batches + n + 1, [record])
    end_ms = now_ms + 2_000 + after // batch
    spool.append(
        batches + after // batch + 1, [[EventKind.DAEMON, end_ms, "stopped", {"clean": True}]]
    )


def restored(folder: Path, name: str, *options: str) -> tuple[float, float, dict[str, object]]:
    """Restore. Return the seconds, the MB and the report."""
    command = (
        sys.executable, "-m", "tickwheel", "restore", "--json", "--history",
        str(folder / "history"), "--into", f"sqlite:///{folder / name}", *options,
    )  # fmt: skip
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"the restore ended with {process.returncode}")
    return time.perf_counter() - began_s, used.ru_maxrss / 1024, json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=int, default=1_000_000)
    parser.add_argument("--after", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=500)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=choose_folder(None)) as name:
        folder = Path(name)
        spent_s, size = asyncio.run(make(folder, asked.before, asked.after, asked.batch))
        print(f"backup of {asked.before:,} tasks: {spent_s:.1f} s, {size / 2**20:.0f} MB")
        writer = WriterOptions(str(folder / "history"), NODE)
        subprocess.run(writer.command(), stdin=subprocess.DEVNULL, check=True)
        _show("restore of backup and history", *restored(
            folder, "new.db", "--from", str(folder / "backup.db"),
        ))  # fmt: skip
        _show("restore of the history alone", *restored(folder, "alone.db"))


def _show(what: str, spent_s: float, used_mb: float, report: dict[str, object]) -> None:
    print(
        f"{what}: {report['events']:,} events applied, {report['restored']:,} tasks,"
        f" exact: {report['exact']}; {spent_s:.1f} s, {used_mb:.0f} MB"
    )


if __name__ == "__main__":
    main()
