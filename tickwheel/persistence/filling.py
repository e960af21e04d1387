"""Fills a new store with the rows of one moment. A restore computes the rows from a backup and
events (``history/restore.py``), a change of the number of shards reads them from the old databases
(``server/fleet/reshard.py``), and a backup of a store other than SQLite copies them (``copying``).

The filler writes numbered batches, bounded in rows and bytes, into a store that nobody else has
open. On success it closes the store properly, and the meta table records the origin of the rows.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from tickwheel.model.kinds import GROUP, Effects, RecordKey, keyed
from tickwheel.model.records import GroupRow, Outcome, TaskRow
from tickwheel.persistence.codec import BYTES_PER_BATCH, ROWS_PER_BATCH, in_batches
from tickwheel.persistence.contract import Opened, Store, StoreBroken, StoredTask, StoreError
from tickwheel.persistence.identity import StoreIdentity
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite.database import (
    copy_meta,
    describe,
    forget_endings,
    whole_or_nothing,
    write_meta,
)

PAGE = 1_000


async def pages(
    scan: Callable[[int, int, str | None], Awaitable[list[StoredTask]]],
) -> AsyncIterator[list[StoredTask]]:
    """Yield all tasks by id, in pages. ``scan`` is ``Store.scan`` or compatible with it."""
    after_id = -1
    while page := await scan(after_id, PAGE, None):
        yield page
        after_id = page[-1].row.id


class Filler:
    """Writes batches into an open store that has no other writer."""

    def __init__(
        self,
        store: Store,
        owner: str,
        opened: Opened,
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``renew`` is called before each batch, to keep the lease of a shared store."""
        self._store = store
        self._owner = owner
        self._epoch = opened.epoch
        self._n = opened.last_batch
        self._renew = renew
        self._effects = Effects()
        self._bytes = 0
        self.id_mark = 0
        self.position_ms = 0
        self.removed_upto = 0
        """Number of the last batch of ``remove``."""

    async def remove(self, ids: Sequence[int]) -> None:
        """Remove tasks. Their outcomes are removed when the store is closed."""
        for start in range(0, len(ids), ROWS_PER_BATCH):
            removed = dict.fromkeys(ids[start : start + ROWS_PER_BATCH], Outcome.DELETED)
            await self.write(Effects(ended=removed))
        self.removed_upto = self._n

    async def begin(
        self, groups: Iterable[GroupRow], outcomes: Iterable[tuple[int, Outcome]], id_mark: int,
        position_ms: int,
    ) -> None:  # fmt: skip
        """Write groups, outcomes and marks. Call this before adding tasks."""
        self.id_mark, self.position_ms = id_mark, position_ms
        await self.write(Effects(records=dict(keyed(GROUP, groups)), ended=dict(outcomes)))

    async def records(self, records: Mapping[RecordKey, Any]) -> None:
        for batch in in_batches(records):
            await self.write(Effects(records=batch))

    async def put(self, task: StoredTask) -> None:
        """Add a task that is not in the store."""
        self._effects.enqueued[task.row.id] = task.row
        if task.progress or task.dead:
            self._add_groups(task)
        await self._added(task.row)

    async def change(self, task: StoredTask, before: StoredTask | None = None) -> None:
        """Add a task, or replace the stored task ``before``."""
        effects = self._effects
        effects.updated[task.row.id] = task.row
        if before is not None:
            effects.progress |= {(row.id, row.group): None for row in before.progress}
            effects.dead |= {(row.id, row.group): None for row in before.dead}
        self._add_groups(task)
        await self._added(task.row)

    def _add_groups(self, task: StoredTask) -> None:
        effects = self._effects
        for row in task.progress:
            effects.progress[row.id, row.group] = row
        for letter in task.dead:
            effects.dead[letter.id, letter.group] = letter

    async def _added(self, row: TaskRow) -> None:
        effects = self._effects
        self._bytes += len(row.body)
        count = len(effects.enqueued) + len(effects.updated)
        if count >= ROWS_PER_BATCH or self._bytes >= BYTES_PER_BATCH:
            await self.flush()

    async def flush(self) -> None:
        """Write the tasks put or changed since the last flush."""
        if self._effects.enqueued or self._effects.updated:
            effects, self._effects, self._bytes = self._effects, Effects(), 0
            await self.write(effects)

    async def end(self) -> None:
        """Write the remaining tasks, and the marks."""
        await self.flush()
        await self.write(Effects())

    async def write(self, effects: Effects) -> None:
        """Write one batch with the current marks. Raise StoreError instead of StoreBroken, because
        only the new store has failed, not the store of a daemon."""
        if self._renew is not None:
            await self._renew()
        effects.id_mark, effects.position_ms = self.id_mark, self.position_ms
        self._n += 1
        try:
            await self._store.commit(self._epoch, self._owner, self._n, effects)
        except StoreBroken as error:
            raise StoreError(error.message) from error


@asynccontextmanager
async def new_sqlite(
    path: str,
    owner: str,
    now_ms: int,
    epoch_min: int,
    meta: Mapping[str, int | str],
    options: SqliteOptions | None = None,
) -> AsyncIterator[Filler]:
    """Fill a SQLite store that nobody can use before it is complete. ``meta``: values added to its
    meta table after the store was closed."""
    filled_options = replace(options or SqliteOptions(), reserve_bytes=0)
    store = await asyncio.to_thread(SqliteStore, path, filled_options)
    opened = await store.open(owner, now_ms, epoch_min=epoch_min)
    filler = Filler(store, owner, opened)
    try:
        yield filler
        await filler.end()
    except BaseException:
        await store.close(clean=False)
        raise
    await store.close(clean=True)
    if filler.removed_upto:
        await asyncio.to_thread(forget_endings, path, filler.removed_upto)
    await asyncio.to_thread(write_meta, path, meta)


@asynccontextmanager
async def copying(path: str, identity: StoreIdentity) -> AsyncIterator[Filler]:
    """Fill a SQLite database that becomes, at ``path``, the backup of a store of another kind with
    this identity. Raise StoreError if ``path`` exists. Threads make all calls to its folder, which
    a network can delay."""
    if await asyncio.to_thread(os.path.lexists, path):
        raise StoreError(f"backup: {path} already exists")
    try:
        async with _in_threads(whole_or_nothing(path)) as part:
            # The epoch stays the same, because a restore uses it to find the backup's position in
            # the history.
            meta = copy_meta(identity)
            async with new_sqlite(part, "backup", 0, identity.last.epoch, meta) as filler:
                yield filler
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"backup to {path} failed: {describe(error)}") from error


@asynccontextmanager
async def _in_threads(manager: AbstractContextManager[str]) -> AsyncIterator[str]:
    """Enter and leave ``manager`` in threads."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await asyncio.to_thread(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await asyncio.to_thread(manager.__exit__, None, None, None)
