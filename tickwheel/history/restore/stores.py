"""The new store: must be empty, and is there as a whole or not at all where that can be had.

A SQLite store is filled under another name and gets its own at the end. A shard in Redis is
filled in its place, under the leader's lease, so that no daemon begins to serve a half of it.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from tickwheel.errors import BadRequest, Conflict, TickwheelError
from tickwheel.persistence.election import Election, Leader, open_election
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.store import Opened, Store, StoredTask, StoreUnusable
from tickwheel.persistence.urls import open_url, parse, without_secrets
from tickwheel.wheel.effects import Effects
from tickwheel.wheel.records import Ending, GroupRow, SessionRow

TASKS_A_BATCH = 1_000
BYTES_A_BATCH = 4 << 20
SESSIONS_A_BATCH = 100
LEASE_MS = 10_000


class Filler:
    """Batches into an open, empty store."""

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
        self, groups: Iterable[GroupRow], endings: Iterable[tuple[int, Ending]], id_mark: int,
        position_ms: int,
    ) -> None:  # fmt: skip
        """What all tasks rest on."""
        self._id_mark, self._position_ms = id_mark, position_ms
        self._effects.groups = {(row.topic, row.group): row for row in groups}
        self._effects.ended = dict(endings)
        await self._flush()

    async def sessions(self, rows: list[SessionRow]) -> None:
        for start in range(0, len(rows), SESSIONS_A_BATCH):
            some = rows[start : start + SESSIONS_A_BATCH]
            self._effects.sessions = {row.session: row for row in some}
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
    """The leader's, while a shared store is being filled."""

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
    """Raises Conflict, BadRequest, StoreUnusable."""
    parsed = parse(url)
    if parsed.kind == "memory":
        raise BadRequest("--into memory: would be gone at once; name a SQLite file or a Redis")
    if parsed.kind == "sqlite":
        if os.path.lexists(parsed.path):
            raise Conflict(f"{parsed.path} exists already; a restore goes into a new store")
        return
    from tickwheel.persistence.redis import initialise, options_from

    found = await initialise.look(options_from(url))
    if found.exists and not found.unused:
        raise Conflict(
            f"{found.shard} in {found.store} is {found.state}; a restore goes into an empty store:"
            f" tickwheel init --force --store {without_secrets(url)} empties it"
        )


def shard_of(url: str) -> int | None:
    """The shard that the address names; None where it names none."""
    if parse(url).kind != "redis":
        return None
    from tickwheel.persistence.redis import options_from

    return options_from(url).shard


@asynccontextmanager
async def filling(url: str, epoch_min: int, now_ms: int) -> AsyncIterator[Filler]:
    """An open store to fill. An error on the way leaves nothing behind, or says what it left."""
    owner = f"restore/{uuid.uuid4().hex[:12]}"
    if parse(url).kind == "sqlite":
        async with _sqlite(url, owner, epoch_min, now_ms) as filler:
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
async def _sqlite(url: str, owner: str, epoch_min: int, now_ms: int) -> AsyncIterator[Filler]:
    path = os.path.abspath(parse(url).path)
    part = f"{path}.restore-{os.getpid()}"
    store = SqliteStore(part, replace(SqliteOptions(), reserve_bytes=0))
    try:
        opened = await store.open(owner, now_ms, epoch_min=epoch_min)
        try:
            yield Filler(store, owner, opened, None)
        except BaseException:
            await store.close(clean=False)
            raise
        await store.close(clean=True)
        try:
            os.link(part, path)
        except FileExistsError:
            raise Conflict(f"{path} exists already; a restore goes into a new store") from None
        _sync_folder(os.path.dirname(path))
    finally:
        for rest in ("", ".lock", ".reserve", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{part}{rest}")


def _sync_folder(folder: str) -> None:
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
