"""Recovery from Redis at a start, copies of a shard, and the rewrite of a Redis that has lost data.

Recovery reads the small tables and then every task in due order, and fills the mirror with them.
Concurrent batches take precedence over the records read. From the first chunk on, recovery waits
while Redis does not answer: the daemon already serves, and if Redis comes back with older data,
only this daemon has the tasks that it has since confirmed.

``copy_to_sqlite`` makes a consistent copy of a shard in use as a SQLite store. It reads the rows in
pages, and applies every concurrent batch to the copy in order. Effects contain absolute states, so
the finished copy has the state after the last batch. (Redis's BGSAVE and append-only file copy the
whole server; this copies one shard, and a daemon can open the copy.)

``Rewriter`` wraps the writer. If Redis has lost more than the batches that the writer keeps, a task
writes all data again from the mirror, and starts over until it succeeds. Nothing is committed
during the rewrite, so the mirror does not change. Commits detect a loss. ``Watch`` regularly checks
an idle shard, because otherwise the only copy of its data would be lost when the daemon ends. It
ignores a Redis that does not answer. Invariants:

* With a complete mirror, no caller gets StoreBehind or StoreLost. Commits are refused until the
  rewrite is complete.
* Without a mirror (``?mirror=no``), every later call gets StoreForgot, and the shard is marked so
  that no daemon opens it.
* A shard that another daemon has taken over or initialized again is never written (Fenced).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from tickwheel import failpoints
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.persistence.codec import Heads, decode_heads
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    Handles,
    Keyed,
    SmallState,
    StoreAway,
    StoreBehind,
    StoreBroken,
    StoreError,
    StoreForgot,
    StoreLost,
)
from tickwheel.persistence.redis.driver import REFUSING, ServerError
from tickwheel.persistence.redis.layout import HANDLES, Keys, id_text, split_member
from tickwheel.persistence.redis.mirror import Filling, Mirror, SmallRecords
from tickwheel.persistence.redis.reader import ReadClient, Reader
from tickwheel.persistence.redis.writer import Writer

if TYPE_CHECKING:
    from tickwheel.persistence.filling import Filler
    from tickwheel.persistence.redis.writer import Tally

ROWS_PER_SCAN = 500
BYTES_PER_CHUNK = 8 << 20
KEYS_PER_CHUNK = 10_000
BODILESS_BYTES_MIN = 256
"""Without a mirror, records of at least this many bytes are read without their bodies. For smaller
ones, removing the body takes Redis longer than sending it."""
NO_LIMIT = 1 << 53
AWAY_RETRY_S = 0.5


class _Columns(NamedTuple):
    """Ids and key hashes of the tasks that have a key."""

    ids: array[int]
    hashes: array[int]


class Recovering:
    """Reads the state for a start from Redis, and fills the mirror."""

    def __init__(
        self, read_client: ReadClient, keys: Keys, writer: Writer, mirror: Mirror, key_hash: KeyHash
    ) -> None:
        self._key_hash = key_hash
        self._keyed = _Columns(array("q"), array("Q"))
        """The tasks with keys that ``handles`` has read so far."""
        self._read_client = read_client
        self._keys = keys
        self._writer = writer
        self._mirror = mirror

    async def small(self, endings_max: int) -> SmallState:
        """See ``Store.recover_small``. No batch is applied during the read."""
        if self._mirror.complete:
            return self._mirror.small()
        await self._read_client.look()
        async with self._writer.lock:
            small = SmallRecords(
                records=await self._fields("records"),
                progress=await self._rows("progress"),
                dead=await self._rows("dead_record"),
                outcomes=await self._endings(),
            )
            # Check that Redis has not changed during the read.
            await self._read_client.look(locked=True)
            self._mirror.fill_small(small)
        return small.decoded(endings_max)

    async def _fields(self, name: str) -> list[tuple[bytes, bytes]]:
        """Return the fields and values of a hash, each once; a scan can return a field twice."""
        pairs = dict([pair async for pair in self._read_client.pairs("HSCAN", name, ROWS_PER_SCAN)])
        return list(pairs.items())

    async def _rows(self, name: str) -> list[tuple[tuple[int, str], bytes]]:
        return [(split_member(key), record) for key, record in await self._fields(name)]

    async def _endings(self) -> list[tuple[int, bytes]]:
        items = await self._read_client.call("LRANGE", self._keys.named["endings"], 0, -1)
        parts = (item.partition(b":") for item in items)
        return [(int(count), record) for count, _, record in parts]

    async def handles(self, chunk: int) -> AsyncIterator[Handles]:
        """See ``Store.recover_handles``. The chunks are read at different moments, but together
        have the state at the time of the first chunk: newer tasks are left out, tasks that have
        ended may be left out, and no due time changes before all handles are loaded."""
        filling = self._mirror.begin_filling()
        self._keyed = _Columns(array("q"), array("Q"))
        requested: asyncio.Future[list[bytes]] | None = None
        first, is_complete = True, False
        try:
            filling.ask()
            records = await self._page(None, chunk, waits=False)
            while records:
                if not first:  # after the first chunk, other reads of the daemon are more urgent
                    requested = self._after(records[-1], filling, chunk)
                    await asyncio.sleep(0)  # Redis reads the next page while this one is processed
                heads = decode_heads(records)
                changes = filling.take()
                self._mirror.fill(changes.newer, heads.ids, records)
                self._hash(heads)
                handles = _exclude_tasks(filling.created, changes.ended, heads)
                if handles.ids:
                    yield handles
                if first:
                    failpoints.hit("recovery.middle")
                    first = False
                records = await (requested or self._after(records[-1], filling, chunk))
            is_complete = True
        finally:
            if requested is not None and not (requested.cancel() or requested.cancelled()):
                requested.exception()  # marks the exception as retrieved
            self._mirror.end_filling(filling, is_complete=is_complete)

    def _after(self, last: bytes, filling: Filling, chunk: int) -> asyncio.Future[list[bytes]]:
        """Request the page after this record; it may lack batches applied from now on."""
        filling.ask()
        return asyncio.ensure_future(self._page(last, chunk, waits=True))

    def _hash(self, heads: Heads) -> None:
        """Record the key hashes of the tasks that have a key."""
        hash_of, (keyed_ids, hashes) = self._key_hash, self._keyed
        for task_id, topic, key in zip(heads.ids, heads.topics, heads.keys, strict=True):
            if key is not None:
                keyed_ids.append(task_id)
                hashes.append(hash_of(topic, key))

    async def keys(self) -> AsyncIterator[Keyed]:
        """See ``Store.recover_keys``."""
        keyed, self._keyed = self._keyed, _Columns(array("q"), array("Q"))
        for start in range(0, len(keyed.ids), KEYS_PER_CHUNK):
            stop = start + KEYS_PER_CHUNK
            yield Keyed(keyed.ids[start:stop], keyed.hashes[start:stop])

    async def _page(self, last: bytes | None, chunk: int, *, waits: bool) -> list[bytes]:
        """Return the records after ``last`` in due order (None: from the beginning). Without a
        mirror, large records have no bodies. ``waits``: retry while Redis does not answer."""
        score = member = b""
        if last is not None:
            (task_id,), (due_ms,), *_ = decode_heads([last])
            score, member = b"%d" % due_ms, id_text(task_id)
        bodiless_bytes_min = NO_LIMIT if self._mirror.keeps_records else BODILESS_BYTES_MIN
        args = (score, member, chunk, BYTES_PER_CHUNK, bodiless_bytes_min)
        while True:
            try:
                lists, _ = await self._read_client.script(HANDLES, args)
                return list(chain.from_iterable(lists))
            except StoreAway:
                if not waits:
                    raise
            await asyncio.sleep(AWAY_RETRY_S)


def _exclude_tasks(created: set[int], ended: set[int], heads: Heads) -> Handles:
    """Return the handles without tasks created or ended since the scan began."""
    ids, dues_ms, topics, _ = heads
    excluded = created | ended if ended else created
    if not excluded:
        return Handles(ids, dues_ms, topics)
    indexes = [i for i, task_id in enumerate(ids) if task_id not in excluded]
    return Handles(
        [ids[i] for i in indexes], [dues_ms[i] for i in indexes], [topics[i] for i in indexes]
    )


async def copy_to_sqlite(
    reader: Reader, small: Callable[[], Awaitable[SmallState]], writer: Writer, path: str
) -> int:
    """Copy the shard. Return the size of the copy in bytes. Raise StoreError if the file exists."""
    from tickwheel.persistence.filling import copying, pages

    # The copy can contain batches that are confirmed during the copy.
    async with copying(path, writer.identity) as filler:
        concurrent_batches: deque[Effects] = deque()
        writer.watchers.append(concurrent_batches)
        try:
            small_records = await small()
            await filler.write(Effects(ended=dict(small_records.outcomes)))
            await filler.records(small_records.records)
            async for page in pages(reader.scan):
                for task in page:
                    await filler.change(task)
                await _catch_up(filler, concurrent_batches)
            await _catch_up(filler, concurrent_batches)
            filler.id_mark, filler.position_ms = writer.id_mark, writer.position_ms
        finally:
            writer.watchers.remove(concurrent_batches)
    return os.path.getsize(path)


async def _catch_up(filler: Filler, concurrent_batches: deque[Effects]) -> None:
    """Apply the batches that were applied to the shard during the copy."""
    await filler.flush()
    while concurrent_batches:
        effects = concurrent_batches.popleft()
        # A page may already have contained a new task, so new tasks are written as updates.
        updated = effects.enqueued | effects.updated
        # The copy hashes keys with a different seed.
        await filler.write(replace(effects, enqueued={}, hashes={}, updated=updated))


log = logging.getLogger(__name__)

RETRY_S = 0.2
RETRY_S_MAX = 2.0


class Rewriter:
    """Wraps the writer's ``commit`` and ``verify``, and rewrites a Redis that has lost data."""

    def __init__(self, writer: Writer, mirror: Mirror, tally: Tally, shown_name: str) -> None:
        self._writer = writer
        self._mirror = mirror
        self._tally = tally
        self._shown_name = shown_name
        """The names of store and shard, for messages."""
        self._task: asyncio.Task[None] | None = None
        self._failed: StoreError | None = None
        self._written = self._total = 0
        self._landed = 0
        """The last batch in the mirror when the rewrite began."""
        self.commits = 0
        """Number of calls of ``commit``. Each would notice a loss, so ``Watch`` checks only while
        this number does not change."""

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def state(self) -> str:
        """The progress of the rewrite, for messages."""
        return f"{self._shown_name} is being rewritten: {self._written} of {self._total} tasks"

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``. Also raise StoreBehind and StoreLost; see the invariants."""
        self.commits += 1
        if self._failed is not None:
            raise self._failed
        if not self.active:
            try:
                return await self._writer.commit(epoch, owner, n, effects)
            except (StoreBehind, StoreLost) as error:
                await self._begin(error)
        # If a batch was applied but not replicated, the mirror contains it, and so does the
        # rewrite. The caller must commit the same batch again under this number.
        kind = CommitUnknown if n <= self._landed else CommitRefused
        raise kind(f"batch {n}: {self.state}")

    async def verify(self) -> None:
        """See ``Writer.verify``. Also raise StoreAway during a rewrite."""
        if self._failed is not None:
            raise self._failed
        if not self.active:
            try:
                await self._writer.verify()
                return
            except (StoreBehind, StoreLost) as error:
                await self._begin(error)
        raise StoreAway(self.state)

    async def _begin(self, error: StoreError) -> None:
        """Begin to rewrite the shard. Raise ``error`` if the mirror is not complete, or StoreForgot
        if there is no mirror."""
        if not self._mirror.keeps_records:
            raise await self._give_up(error)
        if not self._mirror.complete:
            raise error
        if self.active:
            return
        self._landed = self._writer.last
        counts = self._mirror.counts()
        self._written, self._total = 0, counts.tasks
        log.error("%s; it is being rewritten from memory: %s", error.message, counts)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _give_up(self, error: StoreError) -> StoreForgot:
        """Mark the shard so that no daemon, including this one after a restart, continues with the
        incomplete data. Return the error for a permanent loss."""
        self._failed = forgot = StoreForgot(
            f"{error.message}; the daemon has no copy of the data (mirror=no): run"
            " `tickwheel init --force`, then `tickwheel restore` with a backup and the history"
        )
        with contextlib.suppress(StoreError):
            await self._writer.mark_lost()
        return forgot

    async def close(self) -> None:
        """Stop a rewrite; the shard stays marked as incomplete."""
        task = self._task
        if task is not None:
            message = "%s was closed after %d of %d tasks of its rewrite"
            log.error(message, self._shown_name, self._written, self._total)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await self._write_until_complete()
        except Fenced:
            log.warning("%s was taken over by another daemon during its rewrite", self._shown_name)
        except StoreBroken as error:
            self._failed = error
        except Exception as error:
            log.exception("%s could not be rewritten", self._shown_name)
            self._failed = StoreBroken(f"{self._shown_name} could not be rewritten: {error!r}")
        else:
            self._tally.rewrites += 1
            log.warning(
                "%s was rewritten in %.1f s: %s",
                self._shown_name,
                loop.time() - started_s,
                self._mirror.counts(),
            )
        finally:
            self._task = None

    async def _write_until_complete(self) -> None:
        pause_s, is_logged = RETRY_S, False
        while True:
            try:
                await self._write()
                return
            except (Fenced, StoreBroken):
                raise
            except StoreError as error:
                if isinstance(error, ServerError) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._shown_name}: {error.message}") from error
                if not is_logged:
                    is_logged = True
                    log.warning(
                        "rewriting %s was interrupted after %d of %d tasks, and is repeated until"
                        " it succeeds: %s",
                        self._shown_name,
                        self._written,
                        self._total,
                        error.message,
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _write(self) -> None:
        """Write all batches of the mirror. Raise StoreError; the rewrite must then start again."""
        self._written = 0
        async with self._writer.write_anew() as write:
            for effects in self._mirror.batches():
                await write(effects)
                self._written += len(effects.enqueued)


PAUSE_S = 1.0


class Watch:
    """Checks an idle Redis. Call ``start`` when the shard is open, ``stop`` before it closes."""

    def __init__(self, read_client: ReadClient, rewriter: Rewriter) -> None:
        self._read_client = read_client
        self._rewriter = rewriter
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        commits = -1
        while True:
            await asyncio.sleep(PAUSE_S)
            idle = commits == self._rewriter.commits
            commits = self._rewriter.commits
            if idle and not self._rewriter.active:
                try:
                    await self._read_client.glance()
                except (Fenced, StoreForgot):
                    return  # the next commit gets the error
                except StoreError:
                    continue
