"""The two stores of a restore: the backup that it begins with, the new store that it fills.

The backup is a SQLite store. It is read from a copy and never changed. The new store must be empty;
it is there as a whole or not at all where that can be had: SQLite is filled under another name and
gets its own at the end. A shard in Redis is filled in its place, under the leader's lease, so that
no daemon begins to serve a half of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tickwheel import disk
from tickwheel.errors import BadRequest, Conflict, NotFound, TickwheelError
from tickwheel.model.effects import Effects, RecordKey, keyed
from tickwheel.model.kinds import GROUP
from tickwheel.model.records import GroupRow, Outcome
from tickwheel.persistence import open_election, open_url, parse, without_secrets
from tickwheel.persistence.codec import in_batches
from tickwheel.persistence.contract import (
    Election,
    Leader,
    Opened,
    Small,
    Store,
    StoredTask,
    StoreUnusable,
)
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.database import SINCE_EPOCH, write_meta

PAGE = 1_000
OWNER = "restore"
ENDINGS_MAX = 100_000
TASKS_A_BATCH = 1_000
BYTES_A_BATCH = 4 << 20
LEASE_MS = 10_000


# --- the backup ------------------------------------------------------------------------------


@dataclass
class Backup:
    """The store as it was when the backup was made; an empty one stands for no backup."""

    store: Store | None = None
    small: Small = field(default_factory=Small)
    epoch: int = 0
    """The epoch of the daemon that made it; 1 in copies of other kinds of stores."""
    id_mark: int = 0
    position_ms: int = 0
    """The wheel's position at that time: not after the moment of the backup."""
    since_epoch: int = 0
    """The history of earlier epochs says nothing about this shard's tasks."""

    async def read(self, ids: Sequence[int]) -> list[StoredTask]:
        if self.store is None or not ids:
            return []
        return list((await self.store.read(ids)).values())

    async def tasks(self) -> AsyncIterator[list[StoredTask]]:
        """All tasks of the backup, by id, in pages."""
        after_id = -1
        while self.store is not None:
            page = await self.store.scan(after_id, PAGE, None)
            if not page:
                return
            yield page
            after_id = page[-1].row.id


@asynccontextmanager
async def open_backup(path: str | None, scratch: str | None) -> AsyncIterator[Backup]:
    """A copy of a backup in the folder ``scratch``. Raises NotFound, StoreUnusable, OSError."""
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
            # A store that was in use, not a backup: what it had committed last is in here.
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
                opened.id_mark,
                opened.position_ms,
                opened.since_epoch,
            )
        finally:
            await store.close(clean=True)


def _scratch_of(pid: int) -> str:
    return f".tickwheel-restore-{pid}-"


def remove_leftovers(into: Path, pid: int) -> None:
    """Remove what a killed restore into a SQLite file left; one that ended leaves nothing."""
    _remove_part(_part_of(str(into), pid))
    for folder in into.parent.glob(f"{_scratch_of(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _part_of(path: str, pid: int) -> str:
    """The name under which a new store is filled."""
    return f"{path}.restore-{pid}"


def _remove_part(part: str) -> None:
    for rest in ("", ".lock", ".reserve", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{part}{rest}")


# --- the new store ---------------------------------------------------------------------------


class Filler:
    """Writes batches into an open, empty store."""

    def __init__(self, store: Store, owner: str, opened: Opened, lease: Lease | None) -> None:
        self._store = store
        self._owner = owner
        self._epoch = opened.epoch
        self._n = opened.last_batch
        self._lease = lease
        self._id_mark = 0
        self._position_ms = 0
        self._effects = Effects()
        self._bytes = 0

    async def begin(
        self, groups: Iterable[GroupRow], outcomes: Iterable[tuple[int, Outcome]], id_mark: int,
        position_ms: int,
    ) -> None:  # fmt: skip
        """Write what all tasks rest on: groups, outcomes and marks."""
        self._id_mark, self._position_ms = id_mark, position_ms
        self._effects.records = dict(keyed(GROUP, groups))
        self._effects.ended = dict(outcomes)
        await self._flush()

    async def records(self, records: Mapping[RecordKey, Any]) -> None:
        for some in in_batches(records):
            self._effects.records = some
            await self._flush()

    async def put(self, task: StoredTask) -> None:
        effects = self._effects
        effects.enqueued[task.row.id] = task.row
        for progress in task.progress:
            effects.progress[progress.id, progress.group] = progress
        for dead in task.dead:
            effects.dead[dead.id, dead.group] = dead
        self._bytes += len(task.row.body)
        if len(effects.enqueued) >= TASKS_A_BATCH or self._bytes >= BYTES_A_BATCH:
            await self._flush()

    async def end(self) -> None:
        await self._flush()

    async def _flush(self) -> None:
        if self._lease is not None:
            await self._lease.renew()
        self._effects.id_mark, self._effects.position_ms = self._id_mark, self._position_ms
        self._n += 1
        await self._store.commit(self._epoch, self._owner, self._n, self._effects)
        self._effects, self._bytes = Effects(), 0


class Lease:
    """The leader's lease, held while a shared store is being filled."""

    def __init__(self, election: Election, owner: str) -> None:
        self._election = election
        self._me = Leader(owner, "restore", 0, 0)
        self._renewed_s = 0.0

    async def take(self) -> None:
        await self._election.prepare()
        if not await self._election.acquire(self._me):
            leader = (await self._election.look()).leader
            who = f"{leader.owner} at {leader.address}" if leader is not None else "a daemon"
            raise StoreUnusable(f"{who} leads this shard; stop it, and all that stand by, first")
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
    """Check that the target is empty. Raises Conflict, BadRequest, StoreUnusable."""
    parsed = parse(url)
    if parsed.kind == "memory":
        raise BadRequest("--into memory: would be gone at once; name a SQLite file or a Redis")
    if parsed.kind == "sqlite":
        if os.path.lexists(parsed.path):
            raise Conflict(f"{parsed.path} exists already; a restore goes into a new store")
        return
    from tickwheel.persistence.redis import opening, options_from

    found = await opening.look(options_from(url))
    if found.exists and not found.unused:
        raise Conflict(
            f"{found.shard} in {found.store} is {found.state}; a restore goes into an empty store:"
            f" tickwheel init --force --store {without_secrets(url)} empties it"
        )


def shard_of(url: str) -> int | None:
    """The shard that a store's URL names; None: it names none."""
    if parse(url).kind != "redis":
        return None
    from tickwheel.persistence.redis import options_from

    return options_from(url).shard


@asynccontextmanager
async def filling(
    url: str, epoch_min: int, now_ms: int, since_epoch: int = 0
) -> AsyncIterator[Filler]:
    """An open store to fill. An error meanwhile leaves nothing behind, or says what is left.
    ``since_epoch``: that of the backup, which a SQLite store keeps."""
    owner = f"restore/{uuid.uuid4().hex[:12]}"
    if parse(url).kind == "sqlite":
        async with _sqlite(url, owner, epoch_min, now_ms, since_epoch) as filler:
            yield filler
        return
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
                raise Conflict(f"{without_secrets(url)} is not empty any more")
            yield Filler(store, owner, opened, lease)
            clean = True
        except TickwheelError as error:
            where = without_secrets(url)
            raise StoreUnusable(
                f"{error.message}; {where} is half filled: tickwheel init --force --store {where}"
            ) from error
        finally:
            await store.close(clean)
    finally:
        await lease.release()


@asynccontextmanager
async def _sqlite(
    url: str, owner: str, epoch_min: int, now_ms: int, since_epoch: int
) -> AsyncIterator[Filler]:
    path = os.path.abspath(parse(url).path)
    part = _part_of(path, os.getpid())
    store = SqliteStore(part, replace(SqliteOptions(), reserve_bytes=0))
    try:
        opened = await store.open(owner, now_ms, epoch_min=epoch_min)
        try:
            yield Filler(store, owner, opened, None)
        except BaseException:
            await store.close(clean=False)
            raise
        await store.close(clean=True)
        if since_epoch:
            write_meta(part, {SINCE_EPOCH: since_epoch})
        try:
            os.link(part, path)
        except FileExistsError:
            raise Conflict(f"{path} exists already; a restore goes into a new store") from None
        disk.sync(os.path.dirname(path) or ".")
    finally:
        _remove_part(part)
