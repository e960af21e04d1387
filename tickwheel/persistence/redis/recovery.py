"""What a start needs from Redis: the small tables whole, then every task in due order.

All of it goes into the mirror as it passes. Batches may land meanwhile: they know better. From the
first chunk on a Redis that is away is waited for: this daemon serves, and what it has confirmed
since is kept by it alone if Redis comes back older.

A consistent copy of a shard as a SQLite store, made while it is in use.

Rows are read in pages while batches go on; every batch that lands meanwhile is laid over the
copy in order before it is finished. Effects say absolute states, so the copy ends as the shard
was when the last of them landed: one moment, though its pages are not. (Redis's own means, BGSAVE
and the append-only file, copy the whole server; this one copies one shard, and a daemon can be
started on it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tickwheel import failpoints
from tickwheel.model.effects import Effects
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.records import Outcome
from tickwheel.persistence.codec import decode_dead, decode_endings, decode_progress, in_batches
from tickwheel.persistence.contract import (
    Handles,
    Keyed,
    Small,
    Store,
    StoreAway,
    StoreBroken,
    StoreError,
)
from tickwheel.persistence.redis.driver import Argument
from tickwheel.persistence.redis.layout import HANDLES, Keys, split_member
from tickwheel.persistence.redis.mirror import Filling, Mirror, SmallRecords, decode_records
from tickwheel.persistence.redis.reader import ReadClient, Reader
from tickwheel.persistence.redis.writer import Writer

ROWS_A_SCAN = 500
BYTES_A_CHUNK = 8 << 20
KEYS_AT_ONCE = 10_000
AWAY_RETRY_S = 0.5


class _Columns(NamedTuple):
    """Ids and key hashes of tasks that have a key."""

    ids: array[int]
    hashes: array[int]


class Recovering:
    """Reads what a start needs from Redis, and fills the mirror with it."""

    def __init__(
        self, asker: ReadClient, keys: Keys, writer: Writer, mirror: Mirror, key_hash: KeyHash
    ) -> None:
        self._key_hash = key_hash
        self._keyed = _Columns(array("q"), array("Q"))
        """The keyed tasks among the records that the stream has brought."""
        self._asker = asker
        self._keys = keys
        self._writer = writer
        self._mirror = mirror

    async def small(self, endings_max: int) -> Small:
        """See ``Store.recover_small``. No batch lands while it is read."""
        if self._mirror.complete:
            return self._mirror.small()
        await self._asker.look()
        async with self._writer.lock:
            small = SmallRecords(
                records=await self._fields("records"),
                progress=await self._rows("progress"),
                dead=await self._rows("dead_record"),
                outcomes=await self._endings(),
            )
            # What was there at the beginning is still there.
            await self._asker.look(locked=True)
            self._mirror.fill_small(small)
        outcomes: list[tuple[int, Outcome]] = []
        for _, record in small.outcomes:
            outcomes += decode_endings(record)
        return Small(
            records=decode_records(small.records),
            progress=[decode_progress(record) for _, record in small.progress],
            dead=sorted(
                (row.id, row.group, row.topic)
                for row in (decode_dead(record) for _, record in small.dead)
            ),
            outcomes=outcomes[-endings_max:],
        )

    async def _fields(self, name: str) -> list[tuple[bytes, bytes]]:
        """The fields of a hash with their values, each once: a scan may show one twice."""
        pairs = dict([pair async for pair in self._asker.pairs("HSCAN", name, ROWS_A_SCAN)])
        return list(pairs.items())

    async def _rows(self, name: str) -> list[tuple[tuple[int, str], bytes]]:
        return [(split_member(key), record) for key, record in await self._fields(name)]

    async def _endings(self) -> list[tuple[int, bytes]]:
        items = await self._asker.call("LRANGE", self._keys.named["endings"], 0, -1)
        parts = (item.partition(b":") for item in items)
        return [(int(count), record) for count, _, record in parts]

    async def handles(self, chunk: int) -> AsyncIterator[Handles]:
        """See ``Store.recover_handles``. Its chunks are not of one moment, but come to the same
        as the first was: tasks made meanwhile are left out, ended ones may be, and nobody changes
        a due time before all are loaded."""
        filling = self._mirror.begin_filling()
        self._keyed = _Columns(array("q"), array("Q"))
        whole = False
        score, name = b"", b""
        topics: dict[bytes, str] = {}
        first = True
        try:
            while True:
                filling.ask()
                args = (score, name, chunk, BYTES_A_CHUNK)
                pairs, values = await self._page(args, waits=not first)
                texts, records, keys = values[::3], values[1::3], values[2::3]
                pairs = pairs[: 2 * len(texts)]
                if not pairs:
                    whole = True
                    return
                name, score = pairs[-2], pairs[-1]
                ids, dues_ms = list(map(int, pairs[::2])), list(map(int, pairs[1::2]))
                self._mirror.fill(filling, ids, records)
                for text in set(texts):
                    topics.setdefault(text, text.decode())
                if keys.count(None) < len(keys):
                    self._hash(ids, [topics[text] for text in texts], keys)
                handles = _without(filling, Handles(ids, dues_ms, [topics[text] for text in texts]))
                if handles.ids:
                    yield handles
                if first:
                    failpoints.hit("recovery.middle")
                    first = False
        finally:
            self._mirror.end_filling(filling, whole=whole)

    def _hash(
        self, ids: Sequence[int], topics: Sequence[str], keys: Sequence[bytes | None]
    ) -> None:
        """Note the key hashes of those of the tasks that have a key."""
        hash_of, (keyed_ids, hashes) = self._key_hash, self._keyed
        for task_id, topic, key in zip(ids, topics, keys, strict=True):
            if key is not None:
                keyed_ids.append(task_id)
                hashes.append(hash_of(topic, key.decode("utf-8", "surrogatepass")))

    async def keys(self) -> AsyncIterator[Keyed]:
        """See ``Store.recover_keys``."""
        keyed, self._keyed = self._keyed, _Columns(array("q"), array("Q"))
        for start in range(0, len(keyed.ids), KEYS_AT_ONCE):
            stop = start + KEYS_AT_ONCE
            yield Keyed(keyed.ids[start:stop], keyed.hashes[start:stop])

    async def _page(self, args: Sequence[Argument], *, waits: bool) -> tuple[Any, Any]:
        while True:
            try:
                return await self._asker.script(HANDLES, args)
            except StoreAway:
                if not waits:
                    raise
            await asyncio.sleep(AWAY_RETRY_S)


def _without(filling: Filling, handles: Handles) -> Handles:
    """The handles without tasks that were made since the stream began, or have ended since."""
    gone: Any = filling.new | filling.ended if filling.ended else filling.new
    if not gone:
        return handles
    kept = [i for i, task_id in enumerate(handles.ids) if task_id not in gone]
    return Handles(
        [handles.ids[i] for i in kept],
        [handles.dues_ms[i] for i in kept],
        [handles.topics[i] for i in kept],
    )


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
