"""The restore of a store from a backup and events, with a report on how exact the result is.

``Replay`` yields the events in the order in which they were written, and ``fold`` applies them. The
backup is a SQLite store; only a copy of it is opened. The new store must be empty. A SQLite store
is filled under a temporary name and renamed at the end, so it is either complete or missing. A
shard on a server is filled in place under the leader's lease, so no daemon serves a part of it.
Unlike the rest of the history, this module and ``fold`` know the store contract and the records.
They do not know the daemon.

``python -m tickwheel.history.restore`` runs a restore in a separate process, which a daemon
watches. Standard input is a pipe from the daemon. Its first line is a JSON object with the fields
of ``Plan`` and ``now_ms``. When the pipe ends, the restore stops and removes its files. Each line
of standard output is a JSON object: ``step``, ``done`` and ``of`` during the work, then ``report``,
or ``error`` with ``code`` and ``message``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from tickwheel.errors import BadRequest, Conflict, NotFound, TickwheelError
from tickwheel.history import segments
from tickwheel.history.branches import Branch
from tickwheel.history.fold import ENDINGS_MAX, Fold, Owners, Task, is_done
from tickwheel.history.read import Replay, Replayed, Start
from tickwheel.history.segments import STATE, Event
from tickwheel.model.kinds import BULK, GROUP, RECORDED, SCHEDULE, TRANSACTION, Kind, keyed
from tickwheel.model.records import (
    ID_STEP,
    Outcome,
    ProgressRow,
    ProgressState,
    TaskRow,
    id_floor,
)
from tickwheel.persistence import (
    ON_SERVERS,
    open_administration,
    open_election,
    open_url,
    parse,
    without_secrets,
)
from tickwheel.persistence.contract import (
    Election,
    Leader,
    SmallState,
    Store,
    StoredTask,
    StoreUnusable,
)
from tickwheel.persistence.filling import PAGE, Filler, new_sqlite, pages
from tickwheel.persistence.identity import restored
from tickwheel.persistence.on_server import RESTORE_OWNERS
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.database import (
    SINCE_EPOCH,
    StoreLock,
    describe,
    make_another,
    part_name,
    remove_database,
    set_aside,
    whole_or_nothing,
)

OWNER = "restore"
LEASE_MS = 10_000


# --- the backup ------------------------------------------------------------------------------


@dataclass
class Backup:
    """The store at the time of the backup. Without a backup it is empty."""

    store: SqliteStore | None = None
    small: SmallState = field(default_factory=SmallState)
    epoch: int = 0
    """The epoch in which the backup was made."""
    mark: str = ""
    """The mark of that epoch."""
    id_mark: int = 0
    position_ms: int = 0
    """The wheel's position in the backup, which is not later than the backup."""
    since_epoch: int = 0
    """The first epoch whose events in the history are about this shard's tasks."""

    @property
    def start(self) -> Start | None:
        """The position of the backup in the history, or None if it is unknown."""
        if not self.position_ms:
            return None
        return Start(self.epoch, self.position_ms - MARGIN_MS, self.id_mark)

    async def read(self, ids: Sequence[int]) -> list[StoredTask]:
        if self.store is None or not ids:
            return []
        return list((await self.store.read(ids)).values())

    async def tasks(self) -> AsyncIterator[StoredTask]:
        """Yield all tasks of the backup, by id."""
        if self.store is not None:
            async for page in pages(self.store.scan):
                for task in page:
                    yield task


@asynccontextmanager
async def open_backup(path: str | None, scratch: str | None) -> AsyncIterator[Backup]:
    """Open a copy of a backup in the folder ``scratch``. Raise NotFound, StoreUnusable or
    OSError."""
    if path is None:
        yield Backup()
        return
    source = Path(path)
    if not source.is_file():
        raise NotFound(f"backup {path}: no such file")
    if not source.stat().st_size:
        raise StoreUnusable(f"backup {path} is empty")
    with tempfile.TemporaryDirectory(prefix=_scratch_of(os.getpid()), dir=scratch) as folder:
        copy = Path(folder) / "backup.db"
        shutil.copyfile(source, copy)
        log = source.with_name(source.name + "-wal")
        if log.exists():
            # The file is a store instead of a backup, and its log contains the last batches.
            shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
        options = SqliteOptions(reserve_bytes=0, endings_max=ENDINGS_MAX)
        store = SqliteStore(str(copy), options)
        try:
            opened = await store.open(OWNER, 0)
        except StoreUnusable as error:
            raise StoreUnusable(error.message.replace(store.path, str(path))) from error
        try:
            yield Backup(
                store,
                await store.recover_small(),
                opened.epoch - 1,
                opened.after,
                opened.id_mark,
                opened.position_ms,
                opened.since_epoch,
            )
        finally:
            await store.close(clean=True)


def _scratch_of(pid: int) -> str:
    return f".tickwheel-restore-{pid}-"


def remove_leftovers(into: Path, pid: int) -> None:
    """Remove the files of a killed restore into a SQLite file."""
    remove_database(part_name(str(into), pid))
    for folder in into.parent.glob(f"{_scratch_of(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


# --- the new store ---------------------------------------------------------------------------


class Lease:
    """The leader's lease, held while a shared store is filled."""

    def __init__(self, election: Election, owner: str) -> None:
        self._election = election
        self._me = Leader(owner, "restore", 0, 0)
        self._renewed_s = 0.0

    async def take(self) -> None:
        await self._election.prepare()
        if not await self._election.acquire(self._me):
            leader = (await self._election.look()).leader
            holder = f"{leader.owner} at {leader.address}" if leader is not None else "a daemon"
            raise StoreUnusable(f"{holder} leads this shard; stop it, and all standbys, first")
        self._renewed_s = time.monotonic()

    async def renew(self) -> None:
        if time.monotonic() - self._renewed_s < LEASE_MS / 3_000:
            return
        if not await self._election.renew(self._me):
            raise StoreUnusable("the leader's lease was lost while the store was being filled")
        self._renewed_s = time.monotonic()

    async def release(self) -> None:
        await self._election.release(self._me)
        await self._election.close()


async def check_empty(url: str) -> None:
    """Check that the target is empty. Raise Conflict, BadRequest or StoreUnusable."""
    parsed = parse(url)
    if parsed.kind == "memory":
        raise BadRequest("--into must name a SQLite file, a Redis or a PostgreSQL, not memory:")
    if parsed.kind == "sqlite":
        if os.path.lexists(parsed.path) and not _is_empty(parsed.path):
            raise Conflict(f"{parsed.path} already exists; restore into a new store")
        folder = os.path.dirname(os.path.abspath(parsed.path))
        if not os.path.isdir(folder):
            raise BadRequest(f"--into: {folder} is not a folder; mount its volume, or create it")
        return
    target = await open_administration(url).look()
    if target.exists and not target.unused:
        raise Conflict(
            f"{target.shard} in {target.store} is {target.state}; a restore needs an empty store:"
            f" tickwheel init --force --store {without_secrets(url)} empties it"
        )


def _is_empty(path: str) -> bool:
    """Return whether this is an empty file, which may remain of a lost store."""
    return os.path.isfile(path) and not os.path.getsize(path)


def shard_of(url: str) -> int | None:
    """Return the shard in the URL of a store on a server, or None for other stores."""
    return open_administration(url).shard if parse(url).kind in ON_SERVERS else None


@asynccontextmanager
async def filling(
    url: str,
    epoch_min: int,
    now_ms: int,
    since_epoch: int = 0,
    after: str = "",
    base: Store | None = None,
) -> AsyncIterator[Filler]:
    """Open a store to fill. An error leaves no data, or its message names the data that it leaves.
    ``since_epoch`` is taken from the backup and kept by a SQLite store. ``after`` is the mark of
    the last restored epoch; the store's next epoch begins a new branch. A SQLite store begins as a
    copy of ``base``."""
    owner = f"{RESTORE_OWNERS}{uuid.uuid4().hex[:12]}"
    if parse(url).kind == "sqlite":
        path = os.path.realpath(parse(url).path)
        meta: dict[str, int | str] = {**restored(after)}
        if since_epoch:
            meta[SINCE_EPOCH] = since_epoch
        async with _sqlite(path, owner, epoch_min, now_ms, base, meta) as filler:
            yield filler
        return
    assert base is None
    election = open_election(url, LEASE_MS)
    assert election is not None
    lease = Lease(election, owner)
    try:
        await lease.take()
        store = open_url(url, resident_bytes_max=1 << 62)
        opened = await store.open(owner, now_ms, epoch_min=epoch_min)
        clean = False
        try:
            if opened.last_batch:
                raise Conflict(f"{without_secrets(url)} is no longer empty")
            filler = Filler(store, owner, opened, lease.renew)
            yield filler
            await filler.end()
            clean = True
        except TickwheelError as error:
            where = without_secrets(url)
            raise StoreUnusable(
                f"{error.message}; {where} is incomplete: tickwheel init --force --store {where}"
            ) from error
        finally:
            await store.close(clean)
        await open_administration(url).end_restore(after)
    finally:
        await lease.release()


@asynccontextmanager
async def _sqlite(
    path: str,
    owner: str,
    epoch_min: int,
    now_ms: int,
    base: Store | None,
    meta: Mapping[str, int | str],
) -> AsyncIterator[Filler]:
    try:
        with ExitStack() as stack, whole_or_nothing(path) as part:
            if base is not None:
                await base.backup(part)
                kinds = [kind.number for kind in NOT_COPIED]
                await asyncio.to_thread(make_another, part, kinds)
            async with new_sqlite(part, owner, now_ms, epoch_min, meta) as filler:
                yield filler
            lock = StoreLock(path)
            lock.acquire(owner)
            stack.callback(lock.release)
            if _is_empty(path):
                lock.close_descriptor()
                os.unlink(path)
            set_aside(path)
    except FileExistsError:
        raise Conflict(f"{path} already exists; restore into a new store") from None
    except sqlite3.Error as error:
        raise StoreUnusable(f"{path} could not be written: {describe(error)}") from error


# --- the restore ----------------------------------------------------------------------------------

EVENTS_AT_ONCE = 2_000
MARGIN_MS = 1_000
"""Events are applied from this many milliseconds before the wheel's position in the backup, because
times within a batch are not in order, and applying an event again is harmless."""
EPOCHS_AFTER_CRASH = 16
"""Number of epochs that are skipped after a crash, because starts may have left no event."""
LISTED_MAX = 100
"""Maximum number of ids of a kind that a report lists; it counts all."""
TASKS_AT_ONCE = 1_000
"""Number of tasks that are read or written between two progress reports."""

NOT_COPIED: tuple[Kind[Any], ...] = (GROUP, SCHEDULE, TRANSACTION, *RECORDED.values(), BULK)
"""Kinds of records that a restore does not copy from the backup: later events may have changed all
but the last, and bulk operations do not continue in the new store."""

Watch = Callable[[str, int, int | None], None]
"""Called repeatedly with the step (``RESTORE_STEPS`` of ``api/daemon.py``), its progress, and its
total if known. An error that the function raises ends the restore."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a restore."""

    into: str
    backup: str | None = None
    history: tuple[str, ...] = ()
    ids: frozenset[int] | None = None
    include_overdue: bool = True
    allow_missing_bodies: bool = False
    dry_run: bool = False
    shard: int | None = None


async def restore(plan: Plan, now_ms: int, watch: Watch = lambda step, done, of: None) -> Report:
    """Restore a store. Raise TickwheelError, whose message says if the target has changed."""
    if plan.backup is None and not plan.history:
        raise BadRequest("name a backup, a history, or both")
    for folder in plan.history:
        if not Path(folder).is_dir():
            raise BadRequest(f"history {folder}: no such folder")
    await check_empty(plan.into)
    watch("backup", 0, None)
    async with open_backup(plan.backup, _scratch(plan)) as backup:
        with _without_collector():
            return await _Run(plan, backup, now_ms, watch).run()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Turn off the collector of cyclic garbage, which would look at all events and tasks again and
    again. They have no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _scratch(plan: Plan) -> str | None:
    """Return the folder for the copy of the backup: the folder of the new store, which has room."""
    parsed = parse(plan.into)
    if parsed.kind != "sqlite":
        return None
    return str(Path(parsed.path).absolute().parent)


class _Run:
    def __init__(self, plan: Plan, backup: Backup, now_ms: int, watch: Watch) -> None:
        self._plan, self._backup, self._now_ms = plan, backup, now_ms
        self._watch = watch
        self._shard = _shard(plan, backup)
        folders = [Path(folder) for folder in plan.history]
        self._branch = Branch(folders, self._shard, backup.epoch, backup.mark)
        self._replay = Replay(folders, self._shard, backup.start, backup.position_ms)
        small = backup.small
        owners = Owners(small.of_kind(GROUP))
        epoch = max([backup.epoch, *(row.epoch for row in small.progress)])
        schedules, transactions = small.of_kind(SCHEDULE), small.of_kind(TRANSACTION)
        more = schedules, transactions, small.records
        self._fold = Fold(owners, backup.id_mark, epoch, *more)
        self._report = Report(
            dry_run=plan.dry_run,
            backup=plan.backup,
            backup_ms=backup.position_ms or None,
            shard=self._shard,
            history=bool(plan.history),
        )

    async def run(self) -> Report:
        if self._plan.history:
            await self._take_events()
        await self._count()
        report = self._report
        missing = report.without_body.count or report.schedules_without_body
        report.refused = bool(missing and not self._plan.allow_missing_bodies)
        if not self._plan.dry_run and not report.refused:
            await self._fill()
        return report

    # --- events --------------------------------------------------------------------------------

    async def _take_events(self) -> None:
        fold = self._fold
        epochs: set[int] = set()
        for block in self._replay.blocks():
            events = block if self._are_ours(block) else list(filter(self._is_ours, block))
            epochs.update({event["epoch"] for event in events if "epoch" in event})
            self._watch("events", self._replay.findings.events, self._replay.expected())
            for first in range(0, len(events), EVENTS_AT_ONCE):
                part = events[first : first + EVENTS_AT_ONCE]
                await self._load_tasks(part)
                fold.apply(part, self._replay.precedes_backup)
        start = self._backup.start
        if start is not None and max(epochs, default=0) > start.epoch:
            epochs.add(start.epoch)
        self._report.missing_epochs = self._branch.missing(epochs)
        self._report.branches = self._branch.notes
        self._report_events()

    def _are_ours(self, block: list[Event]) -> bool:
        """Return whether, judged by their epochs, all events are ours; see ``_is_ours``."""
        since_epoch = self._backup.since_epoch
        epochs = {event.get("epoch", since_epoch) for event in block}
        return min(epochs) >= since_epoch and all(map(self._branch.includes_whole, epochs))

    def _is_ours(self, event: Event) -> bool:
        """Return whether the event is of this shard's tasks and of the restored branch."""
        since_epoch = self._backup.since_epoch
        return event.get("epoch", since_epoch) >= since_epoch and self._branch.includes(event)

    async def _load_tasks(self, events: list[Event]) -> None:
        """Load the tasks of these events from the backup."""
        for task in await self._backup.read(self._fold.needs(events)):
            progress = {row.group: row for row in task.progress}
            self._fold.put(Task(task.row, progress, {row.group: row for row in task.dead}))

    def _report_events(self) -> None:
        findings, report = self._replay.findings, self._report
        for field_ in fields(Replayed):
            setattr(report, field_.name, getattr(findings, field_.name))
        report.torn_lines, report.unusable_events = findings.tally.torn, self._fold.unusable
        report.unreadable_segments = findings.tally.unreadable
        report.reaches_back = self._replay.reaches_back
        if (
            not findings.clean_stop
            and findings.spool_ms is not None
            and findings.last_event_ms is not None
        ):
            report.tail_ms = max(0, findings.spool_ms - findings.last_event_ms)

    # --- restored tasks --------------------------------------------------------------------------

    async def _tasks(self, *, with_later: bool = True) -> AsyncIterator[StoredTask]:
        """Yield every task to restore, with its body, in any order; see ``_changed``."""
        fold, ids = self._fold, self._plan.ids
        async for task in self._backup.tasks():
            task_id = task.row.id
            if task_id in fold.removed_ids or task_id in fold.tasks:
                continue
            if ids is None or task_id in ids:
                yield _with_released(task)
        for task in self._changed(with_later=with_later):
            yield task

    def _is_later(self, task: Task | TaskRow) -> bool:
        """Return whether a task is new, has no other event, and is not yet due: most are."""
        return isinstance(task, TaskRow) and task.due_ms > self._now_ms

    def _changed(self, *, with_later: bool = True) -> Iterator[StoredTask]:
        """Yield the tasks to restore that have events, by id; those that are ``_is_later`` only
        ``with_later``."""
        fold, ids = self._fold, self._plan.ids
        for task_id in sorted(fold.tasks):
            task = fold.tasks[task_id]
            if ids is not None and task_id not in ids:
                continue
            if not with_later and self._is_later(task):
                continue
            if isinstance(task, TaskRow):
                yield StoredTask(task, (), ())
            elif task.has_body:
                progress, dead = tuple(task.progress.values()), tuple(task.dead.values())
                yield _with_released(StoredTask(task.row, progress, dead))

    def _without_body(self) -> Iterator[tuple[int, Task]]:
        for task_id, task in self._fold.tasks.items():
            if isinstance(task, Task) and not task.has_body:
                yield task_id, task

    @property
    def _takes_all(self) -> bool:
        """Whether all tasks of the backup without events are restored."""
        return self._plan.ids is None and self._plan.include_overdue

    async def _count_unchanged(self) -> None:
        """Count the backup's tasks without events, which are all restored. Read only due tasks."""
        backup, fold, report = self._backup, self._fold, self._report
        assert backup.store is not None
        changed = fold.removed_ids | fold.tasks.keys()
        self._watch("tasks", 0, None)
        report.restored, due = await backup.store.count(self._now_ms, changed)
        for start in range(0, len(due), PAGE):
            if start:
                self._watch("tasks", start, len(due))
            tasks = await backup.read(due[start : start + PAGE])
            report.overdue += sum(map(self._is_deliverable, map(_with_released, tasks)))
        report.from_backup = report.restored
        waiting = {row.id for row in backup.small.progress if _waits(row)}
        report.waiting += len(waiting - changed)
        report.dead_letters += sum(task_id not in changed for task_id, *_ in backup.small.dead)

    def _is_deliverable(self, task: StoredTask) -> bool:
        """Return whether any group will get the task as soon as a daemon serves the new store."""
        if task.row.due_ms > self._now_ms:
            return False
        progress = {row.group: row for row in task.progress}
        held_back = {
            row.group
            for row in task.progress
            if is_done(row)
            or row.state is ProgressState.HELD
            or (_waits(row) and row.at_ms > self._now_ms)
        }
        letters = {row.group for row in task.dead}
        held_back |= letters
        owing = self._fold.owners.owing(task.row, progress.keys() | letters)
        return not (task.dead or progress) or any(group not in held_back for group in owing)

    async def _count(self) -> None:
        """Count all tasks for the report, before any task is written."""
        report, fold = self._report, self._fold
        not_found = set(self._plan.ids or ())
        if is_counted := self._takes_all and self._backup.store is not None:
            await self._count_unchanged()
        takes_each = self._plan.ids is not None
        later = 0 if takes_each else sum(map(self._is_later, fold.tasks.values()))
        report.restored += later
        report.from_history += later
        changed = self._changed(with_later=takes_each)
        tasks = _as_async(changed) if is_counted else self._tasks(with_later=takes_each)
        counted = int(is_counted)
        async for task in tasks:
            if counted % TASKS_AT_ONCE == 0:
                self._watch("tasks", counted, None)
            counted += 1
            task_id = task.row.id
            not_found.discard(task_id)
            at_once = task.row.due_ms <= self._now_ms and self._is_deliverable(task)
            if at_once and not self._plan.include_overdue:
                report.skipped_overdue.add(task_id)
                continue
            report.restored += 1
            report.overdue += at_once
            if task.progress:
                report.waiting += any(map(_waits, task.progress))
            report.dead_letters += len(task.dead)
            held = fold.tasks.get(task_id)
            is_new = isinstance(held, TaskRow) or (held is not None and held.is_new)
            report.from_backup += not is_new
            report.from_history += is_new
        for task_id, lost in self._without_body():
            if self._plan.ids is None or task_id in self._plan.ids:
                not_found.discard(task_id)
                if self._plan.include_overdue or lost.row.due_ms > self._now_ms:
                    report.without_body.add(task_id)
        for task_id in sorted(not_found):
            report.not_found.add(task_id)
        report.ended_since = fold.ended
        report.schedules = len(fold.schedules.rows())
        report.schedules_without_body = fold.schedules.without_body()
        report.transactions_lost = fold.transactions.lost()
        report.targets_lost = fold.records.targets_lost()
        report.groups = sum(
            1
            for row in fold.owners.rows()
            if row.group and not fold.owners.is_closed(row.topic, row.group)
        )
        report.epoch = fold.epoch + (1 if report.clean_stop else EPOCHS_AFTER_CRASH)
        # Ids that were assigned after the last event in the history must not be assigned again.
        newest = max(fold.id_mark, id_floor(self._now_ms, self._shard))
        report.id_mark = str(newest)

    # --- the new store ---------------------------------------------------------------------------

    async def _fill(self) -> None:
        report = self._report
        since_epoch = self._backup.since_epoch
        is_whole = report.exact and self._plan.ids is None and not report.skipped_overdue.count
        # If only some tasks are restored, the preceding epoch is unknown.
        after = (self._branch.head if is_whole else "") or secrets.token_hex(6)
        if self._takes_all and parse(self._plan.into).kind == "sqlite" and self._backup.store:
            await self._copy_and_change(self._backup.store, after)
            return
        async with filling(
            self._plan.into, report.epoch, self._now_ms, since_epoch, after
        ) as filler:
            await self._begin(filler)
            written = 0
            async for task in self._tasks():
                if self._plan.include_overdue or not self._is_deliverable(task):
                    if written % TASKS_AT_ONCE == 0:
                        self._watch("writing", written, report.restored)
                    await filler.put(task)
                    written += 1

    async def _copy_and_change(self, store: Store, after: str) -> None:
        """Fill a SQLite store by copying the backup and changing the tasks that have events. This
        takes 1.2 s, compared with 2.9 s for writing every task (100,000 tasks, 20,000 later
        events). ``filling`` explains ``after``."""
        fold, backup = self._fold, self._backup
        lost = {task_id for task_id, _ in self._without_body()}
        removed, changed = fold.removed_ids | lost, self._changed()
        total = len(fold.removed_ids) + len(fold.tasks)
        self._watch("writing", 0, total)
        async with filling(
            self._plan.into, self._report.epoch, self._now_ms, backup.since_epoch, after, store
        ) as filler:
            await filler.remove(sorted(removed))
            await self._begin(filler)
            written = len(removed)
            while part := list(islice(changed, TASKS_AT_ONCE)):
                self._watch("writing", written, total)
                written += len(part)
                backup_ids = [task.row.id for task in part if task.row.id <= backup.id_mark]
                before = await store.read(backup_ids) if backup_ids else {}
                for task in part:
                    if task.row.id <= backup.id_mark:
                        await filler.change(task, before.get(task.row.id))
                    else:
                        await filler.put(task)

    async def _begin(self, filler: Filler) -> None:
        records = self._backup.small.records
        # The wheel has at least reached the newest event; later tasks are not yet due.
        position_ms = max(self._backup.position_ms, self._report.last_event_ms or 0)
        await filler.begin(
            self._fold.owners.rows(),
            self._endings(),
            int(self._report.id_mark),
            min(position_ms, self._now_ms),
        )
        await filler.records(
            {key: row for key, row in records.items() if key[0] not in NOT_COPIED}
            | self._fold.records.records
            | keyed(SCHEDULE, self._fold.schedules.rows())
            | keyed(TRANSACTION, self._fold.transactions.rows())
        )

    def _endings(self) -> list[tuple[int, Outcome]]:
        newer = self._fold.outcomes
        older = [pair for pair in self._backup.small.outcomes if pair[0] not in newer]
        newest = [*older, *newer.items()][-ENDINGS_MAX:]
        unfinished = self._fold.tasks
        return [pair for pair in newest if pair[0] not in unfinished]


def _shard(plan: Plan, backup: Backup) -> int:
    named = {shard_of(plan.into), plan.shard} - {None}
    if backup.id_mark:
        named.add(backup.id_mark % ID_STEP)
    if len(named) > 1:
        text = ", ".join(sorted(map(str, named)))
        raise BadRequest(f"backup, target and --shard name different shards: {text}")
    for shard in named:
        assert shard is not None
        return shard
    shards = {number for folder in plan.history for number in _shards(Path(folder))}
    if len(shards) > 1:
        text = ", ".join(map(str, sorted(shards)))
        raise BadRequest(f"the history has the shards {text}; name one with --shard")
    return next(iter(shards), 0)


def _shards(history_dir: Path) -> set[int]:
    names = (path.name.rpartition("-s")[2] for path in (history_dir / STATE).glob("*-s*"))
    shards = {int(name) for name in names if name.isdecimal()}
    if not shards:
        shards = {segment.name.shard for segment in islice(segments.find(history_dir), 10_000)}
    return shards


async def _as_async(tasks: Iterator[StoredTask]) -> AsyncIterator[StoredTask]:
    for task in tasks:
        yield task


def _with_released(task: StoredTask) -> StoredTask:
    """Return the task with all deliveries released, because no consumer has it any longer."""
    if not task.progress:
        return task
    released = {ProgressState.IN_FLIGHT: ProgressState.RELEASED}
    rows = (row._replace(state=released.get(row.state, row.state)) for row in task.progress)
    return task._replace(progress=tuple(rows))


def _waits(row: ProgressRow) -> bool:
    return row.state is ProgressState.WAITING


# --- the report ------------------------------------------------------------------------------


@dataclass(slots=True)
class Listed:
    """The number of tasks of a kind, with up to ``LISTED_MAX`` of their ids."""

    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, task_id: int) -> None:
        self.count += 1
        if len(self.ids) < LISTED_MAX:
            self.ids.append(str(task_id))


@dataclass(slots=True)
class Report(Replayed):
    """The result of a restore. Times are in milliseconds since 1970; tasks are counts."""

    dry_run: bool = False
    backup: str | None = None
    backup_ms: int | None = None
    """The backup contains all changes before this time."""
    shard: int = 0
    # the history
    history: bool = False
    reaches_back: bool = True
    """Whether the history begins before the backup was made."""
    torn_lines: int = 0
    unreadable_segments: int = 0
    unusable_events: int = 0
    missing_epochs: int = 0
    """Number of epochs without events between epochs with events."""
    branches: list[str] = field(default_factory=list)
    """Why the branch of some events is uncertain, in sentences."""
    tail_ms: int | None = None
    """Milliseconds from the newest event to the last append to a spool."""
    # the tasks
    restored: int = 0
    from_backup: int = 0
    from_history: int = 0
    """Number of restored tasks that were enqueued after the backup."""
    ended_since: int = 0
    """Number of tasks that ended after the backup, whenever they were enqueued."""
    overdue: int = 0
    """Number of restored tasks that are already due, and will be delivered at once."""
    waiting: int = 0
    dead_letters: int = 0
    groups: int = 0
    schedules: int = 0
    schedules_without_body: list[str] = field(default_factory=list)
    """Names of schedules put after the backup whose bodies are not in the history."""
    transactions_lost: list[str] = field(default_factory=list)
    """Names of undecided transactions with half tasks that were prepared after the backup, which
    the history does not contain."""
    targets_lost: list[str] = field(default_factory=list)
    """Groups, as "topic group", whose targets got new secrets, or a URL with new hidden values,
    after the backup. The history contains neither, so these groups have no target."""
    skipped_overdue: Listed = field(default_factory=Listed)
    without_body: Listed = field(default_factory=Listed)
    """Tasks that cannot be restored, because they were enqueued after the backup and the history
    lacks their bodies."""
    not_found: Listed = field(default_factory=Listed)
    """Requested ids that were not found."""
    refused: bool = False
    """Whether nothing was written because tasks or schedules without a body would be missing."""
    epoch: int = 0
    id_mark: str = "0"

    @property
    def exact(self) -> bool:
        """Whether, as far as is known, the restored store equals the original at its last write,
        apart from requested omissions."""
        lost = self.schedules_without_body or self.transactions_lost or self.targets_lost
        missing = self.without_body.count or lost
        return self.history and self.clean_stop and not self.gaps and not missing

    @property
    def gaps(self) -> list[str]:
        """The known gaps of the history, as sentences."""
        gaps = []
        if self.history and not self.reaches_back:
            gaps.append("it begins after the backup was made")
        if self.missing_events:
            gaps.append(f"{self.missing_events:,} events are missing from its files")
        if self.unreadable_segments:
            gaps.append(f"{self.unreadable_segments:,} of its segments are damaged or missing")
        if self.missing_epochs:
            gaps.append(
                f"{self.missing_epochs:,} epochs between others have no events in any folder (a"
                " start that failed, or a machine whose folder was not named)"
            )
        gaps += self.branches
        if self.drops:
            gaps.append(f"the daemon dropped at least {self.dropped_events:,} events")
        if self.crashes:
            gaps.append(
                f"a daemon crashed since the backup ({self.crashes}); the last batch before the"
                " crash can be missing"
            )
        if self.lost_bytes:
            gaps.append(f"{self.lost_bytes:,} bytes of a spool are torn or damaged")
        if self.unusable_events:
            gaps.append(f"{self.unusable_events:,} events lack fields")
        return gaps

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report for ``--json``."""
        return {**asdict(self), "exact": self.exact, "gaps": self.gaps}


# --- the process ---------------------------------------------------------------------------------


NICE = 10
REPORT_S = 0.2
"""Seconds between two progress reports."""
PLAN_BYTES_MAX = 4 * 1024 * 1024
STDIN, STDOUT = 0, 1


class _Stopped(Exception):
    """The daemon has stopped the restore, or has ended."""


class _Watch:
    """Reports the progress of the restore. Raises _Stopped when standard input has ended."""

    def __init__(self) -> None:
        self._reported_s = -REPORT_S
        self._step = ""
        self._ended = threading.Event()
        threading.Thread(target=self._until_the_end, daemon=True).start()

    def _until_the_end(self) -> None:
        while os.read(STDIN, 4_096):
            pass
        self._ended.set()

    def __call__(self, step: str, done: int, of: int | None) -> None:
        if self._ended.is_set():
            raise _Stopped
        now_s = time.monotonic()
        if step != self._step or now_s - self._reported_s >= REPORT_S:
            self._step, self._reported_s = step, now_s
            _write_line({"step": step, "done": done, "of": of})


def _write_line(fields: dict[str, Any]) -> None:
    data = json.dumps(fields).encode() + b"\n"
    try:
        while data:
            data = data[os.write(STDOUT, data) :]
    except BrokenPipeError:
        raise _Stopped from None


def _read_plan() -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(STDIN, 65_536)
        if not more or len(data) > PLAN_BYTES_MAX:
            raise _Stopped
        data += more
    plan: dict[str, Any] = json.loads(data)
    return plan


def _fields(report: Report) -> dict[str, Any]:
    """Return the fields of the report, with at most ``LISTED_MAX`` names of each kind."""
    fields = report.fields()
    for name in ("schedules_without_body", "transactions_lost", "targets_lost"):
        names = fields[name]
        fields[name] = {"count": len(names), "names": names[:LISTED_MAX]}
    return fields


def main() -> int:
    """Run the restore. Return 0 if its result was reported, 3 if it was stopped."""
    os.nice(NICE)
    try:
        options = _read_plan()
        now_ms = options.pop("now_ms")
        ids = options.pop("ids")
        plan = Plan(
            **options | {"history": tuple(options["history"])},
            ids=None if ids is None else frozenset(ids),
        )
        try:
            report = asyncio.run(restore(plan, now_ms, _Watch()))
        except (TickwheelError, OSError) as error:
            code = error.code if isinstance(error, TickwheelError) else "store_error"
            _write_line({"error": {"code": code, "message": str(error)}})
        else:
            _write_line({"report": _fields(report)})
    except _Stopped:
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
