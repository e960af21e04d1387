"""Make backups, restore them, and read restored stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.history_rig import HOUR_MS, NOW_MS, Record
from tickwheel.history.lines import EventKind
from tickwheel.history.restore import Plan, Report, restore
from tickwheel.model.kinds import GROUP, Effects, RecordKey, keyed
from tickwheel.model.records import BY_DUE_ALONE, DeadRow, GroupRow, ProgressRow, TaskRow
from tickwheel.persistence import open_url
from tickwheel.persistence.contract import Opened, SmallState, StoredTask
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

BACKUP_MS = NOW_MS
LATER_MS = NOW_MS + HOUR_MS
"""A time after every event of these tests."""
OWNER = "tester"
STARTED: Record = [EventKind.DAEMON, NOW_MS - 10, "started", {"clean": True}]


def stopped(time_ms: int = LATER_MS - 1) -> Record:
    return [EventKind.DAEMON, time_ms, "stopped", {"clean": True}]


def group(name: str = "g", topic: str = "t", since_ms: int = 0) -> Record:
    since = {"since_ms": since_ms, "since_id": str(BY_DUE_ALONE)}
    return [EventKind.GROUP, NOW_MS - 5, topic, name, "created", since]


async def make_backup(
    folder: Path,
    tasks: Iterable[TaskRow] = (),
    *,
    progress: Iterable[ProgressRow] = (),
    dead: Iterable[DeadRow] = (),
    groups: Iterable[GroupRow] = (GroupRow("t", "g", 0),),
    records: Mapping[RecordKey, Any] = MappingProxyType({}),
    position_ms: int = BACKUP_MS,
    opens: int = 1,
    **more: Any,
) -> str:
    """Return the path of a backup of a store with these rows that was opened `opens` times."""
    rows = {row.id: row for row in tasks}
    effects = Effects(
        enqueued=rows,
        progress={(row.id, row.group): row for row in progress},
        dead={(row.id, row.group): row for row in dead},
        records=keyed(GROUP, groups) | dict(records),
        id_mark=max(rows, default=0),
        position_ms=position_ms,
        **more,
    )
    store = SqliteStore(str(folder / "first.db"), SqliteOptions(reserve_bytes=0))
    for _ in range(opens - 1):
        await store.open(OWNER, NOW_MS)
        await store.close(clean=True)
    opened = await store.open(OWNER, NOW_MS)
    await store.commit(opened.epoch, OWNER, opened.last_batch + 1, effects)
    path = str(folder / "backup.db")
    await store.backup(path)
    await store.close(clean=True)
    return path


async def run(
    folder: Path, backup: str | None, *, now_ms: int = LATER_MS, **options: Any
) -> Report:
    """Restore into a new file, by default with the history of `folder`."""
    plan: dict[str, Any] = {"into": url(folder), "backup": backup, "history": (str(folder),)}
    return await restore(Plan(**(plan | options)), now_ms)


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'new.db'}"


class Held:
    """The content of a restored store."""

    def __init__(self, opened: Opened, small: SmallState, tasks: Sequence[StoredTask]) -> None:
        self.opened = opened
        self.small = small
        self.rows = {task.row.id: task.row for task in tasks}
        self.progress = {(p.id, p.group): p for task in tasks for p in task.progress}
        self.dead = {(d.id, d.group): d for task in tasks for d in task.dead}
        self.groups = {row[:2]: row for row in small.of_kind(GROUP)}
        self.outcomes = dict(small.outcomes)


async def restored(folder: Path, backup: str | None, **options: Any) -> tuple[Report, Held]:
    """Return the report of a restore and the content of the new store."""
    report = await run(folder, backup, **options)
    return report, await held(url(folder))


async def held(store_url: str) -> Held:
    store = open_url(store_url)
    opened = await store.open(OWNER, LATER_MS)
    result = Held(opened, await store.recover_small(), await store.scan(-1, 100_000, None))
    assert len(result.small.progress) == len(result.progress)
    await store.close(clean=True)
    return result
