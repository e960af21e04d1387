"""A consistent copy of a shard as a SQLite store, made while it is in use.

Rows are read in pages while batches go on; every batch that lands meanwhile is laid over the
copy in order before it is finished. Effects say absolute states, so the copy ends as the shard
was when the last of them landed: one moment, though its pages are not. (Redis's own means, BGSAVE
and the append-only file, copy the whole server; this one copies one shard, and a daemon can be
started on it.)
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tickwheel.model.effects import Effects
from tickwheel.persistence.codec import in_batches
from tickwheel.persistence.contract import Small, Store, StoreBroken, StoreError
from tickwheel.persistence.redis.reader import Reader
from tickwheel.persistence.redis.writer import Writer

PAGE = 1_000
OWNER = "backup"

Put = Callable[[Effects], Awaitable[None]]

_T = TypeVar("_T")


async def copy_to_sqlite(
    reader: Reader, small: Callable[[], Awaitable[Small]], writer: Writer, path: str
) -> int:
    """Copy the shard; returns the copy's bytes. Raises StoreError if the file exists."""
    from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

    if os.path.lexists(path):
        raise StoreError(f"backup: {path} exists already")
    part = f"{path}.part-{os.getpid()}"
    target = SqliteStore(part, SqliteOptions(reserve_bytes=0))
    try:
        await _copy(reader, small, writer, target)
        size_bytes = os.path.getsize(part)
        os.link(part, path)
    except OSError as error:
        raise StoreError(f"backup to {path} failed: {error}") from error
    finally:
        for rest in ("", ".lock", ".reserve", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{part}{rest}")
    return size_bytes


async def _copy(
    reader: Reader, small: Callable[[], Awaitable[Small]], writer: Writer, target: Store
) -> None:
    epoch = (await target.open(OWNER, 0)).epoch
    meanwhile: deque[Effects] = deque()
    n = 0

    async def put(effects: Effects) -> None:
        nonlocal n
        n += 1
        try:
            await target.commit(epoch, OWNER, n, effects)
        except StoreBroken as error:
            # The copy's file failed, not the store that the daemon lives on.
            raise StoreError(f"backup: {error.message}") from error

    async def catch_up() -> None:
        while meanwhile:
            effects = meanwhile.popleft()
            # The page may have shown a task already: what is new is written over it.
            updated = effects.enqueued | effects.updated
            # The copy hashes keys by a seed of its own.
            await put(replace(effects, enqueued={}, hashes={}, updated=updated))

    writer.watchers.append(meanwhile)
    try:
        await _copy_small(reader, await small(), put)
        after_id = -1
        while page := await reader.scan(after_id, PAGE, None):
            after_id = page[-1].row.id
            await put(Effects(updated={task.row.id: task.row for task in page}))
            await catch_up()
        await catch_up()
        await put(Effects(id_mark=writer.id_mark, position_ms=writer.position_ms))
    finally:
        writer.watchers.remove(meanwhile)
        await target.close(clean=True)


async def _copy_small(reader: Reader, small: Small, put: Put) -> None:
    await put(Effects(ended=dict(small.outcomes)))
    progress = {(row.id, row.group): row for row in small.progress}
    for keys in _chunks(list(progress), PAGE):
        await put(Effects(progress={key: progress[key] for key in keys}))
    for records in in_batches(small.records):
        await put(Effects(records=records))
    after = (-1, "")
    while dead := await reader.scan_dead(after, PAGE, None, None):
        after = (dead[-1].id, dead[-1].group)
        await put(Effects(dead={(row.id, row.group): row for row in dead}))


def _chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
