"""Recovery from Redis at a start, copies of a shard, and the rewrite of a Redis that has lost data.

Recovery reads the small tables, then the StoreQueue in due order, whose scores contain all that the
wheel has of a task, and then the records: all of them to fill the mirror, or without a mirror those
of tasks with a key. Concurrent batches take precedence over the records read. From the first chunk
on, recovery waits while Redis does not answer: the daemon already serves, and if Redis comes back
with older data, only this daemon has the tasks that it has since confirmed.

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
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from tickwheel import failpoints
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskOptions, TaskRow
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
from tickwheel.persistence.redis.layout import (
    CODE_BITS,
    POSITION,
    RECORDS,
    SCORE_MIN,
    Keys,
    id_text,
    packed_ids,
    split_member,
)
from tickwheel.persistence.redis.mirror import Filling, Mirror, SmallRecords
from tickwheel.persistence.redis.reader import ReadClient, Reader
from tickwheel.persistence.redis.writer import Writer
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.persistence.filling import Filler
    from tickwheel.persistence.redis.writer import Tally

ROWS_PER_SCAN = 500
BYTES_PER_PART = 8 << 20
IDS_PER_PAGE = 10_000
OVERLAP = 500
"""Number of tasks before a page that are read again, because tasks that end move the page."""
BODILESS_BYTES_MIN = 256
"""Without a mirror, records of at least this many bytes are read without their bodies. For smaller
ones, removing the body takes Redis longer than sending it."""
NO_LIMIT = 1 << 53
AWAY_RETRY_S = 0.5
UPGRADE_LOG_S = 15.0
_CODES, _DUE_BASE = (1 << CODE_BITS) - 1, SCORE_MIN >> CODE_BITS
T = TypeVar("T")


class _Page(NamedTuple):
    """Consecutive tasks of the StoreQueue."""

    ids: list[int]
    scores: list[int]
    rank: int = 0
    """Number of tasks up to the last of these, when they were read."""


class _Head(NamedTuple):
    due_ms: int
    topic: str
    key: str | None


class Recovering:
    """Reads the state for a start from Redis, and fills the mirror."""

    def __init__(
        self,
        read_client: ReadClient,
        keys: Keys,
        writer: Writer,
        mirror: Mirror,
        key_hash: KeyHash,
        name: str,
    ) -> None:
        self._name = name
        """The names of store and shard, for messages."""
        self._key_hash = key_hash
        self._unread = array("q")
        """The tasks whose records ``keys`` reads: all to fill the mirror, else those with a key."""
        self._has_handles = False
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

    # --- the StoreQueue ------------------------------------------------------------------------

    async def upgrade(self) -> None:
        """Give all tasks of layout 1 a score of layout 2, soonest first. Call this before the shard
        is used; after an interruption it continues. Raise StoreError."""
        loop, count = asyncio.get_running_loop(), 0
        log_s = loop.time()
        while True:
            ids, scores, _ = await self._range(0, IDS_PER_PAGE if count else 1)
            ids = ids[: bisect_left(scores, SCORE_MIN)]
            if not ids:
                break
            if loop.time() >= log_s:
                log.warning("%s: changing scores to layout 2: %d tasks done", self._name, count)
                log_s += UPGRADE_LOG_S
            heads = await self._heads(ids, waits=False)
            rows = []
            for task_id in ids:
                if task_id not in heads:
                    raise self._damaged(task_id)
                due_ms, topic, key = heads[task_id]
                options = None if key is None else TaskOptions(key=key)
                rows.append(TaskRow(task_id, due_ms, topic, b"", options))
            await self._writer.rescore(rows)
            count += len(ids)
        if count:
            log.warning("%s: changed %d scores to layout 2", self._name, count)

    async def handles(self, chunk: int) -> AsyncIterator[Handles]:
        """See ``Store.recover_handles``. The chunks are read at different moments, but together
        have the state at the time of the first chunk: newer tasks are left out, tasks that have
        ended may be left out, and no due time changes before all handles are loaded."""
        filling = self._mirror.begin_filling()
        numbers, codes = self._writer.numbers, set[int]()
        names, self._unread, self._has_handles = numbers.names(), array("q"), False
        try:
            filling.ask()
            first = await self._page(None, chunk)
            handles = await self._handles_of(first, names, codes, filling, waits=False)
            if handles.ids:
                yield handles
            failpoints.hit("recovery.middle")
            if first.ids:  # only from here on are other reads of the daemon more urgent
                async for page in _ahead(self._pages(first, chunk, filling)):
                    handles = await self._handles_of(page, names, codes, filling, waits=True)
                    if handles.ids:
                        yield handles
            numbers.keep({code >> 1 for code in codes})
            self._has_handles = True
        finally:
            self._mirror.end_filling(filling, is_complete=False)

    async def _pages(
        self, after: _Page | None, count: int, filling: Filling
    ) -> AsyncGenerator[_Page, None]:
        """Yield the pages after a page (None: all). Each can lack batches that are applied after
        its ``Filling.ask``."""
        while True:
            filling.ask()
            page = await self._patient(partial(self._page, after, count))
            if not page.ids:
                return
            yield page
            after = page

    async def _page(self, after: _Page | None, count: int) -> _Page:
        """Return ``count`` tasks after a page (None: from the beginning). Only ranks can be read
        without a script, and ranks change, so some tasks before the page are read too."""
        if after is None:
            return await self._range(0, count)
        last, rank = (after.scores[-1], after.ids[-1]), after.rank
        while True:
            start = max(0, rank - OVERLAP)
            ids, scores, end = await self._range(start, count + OVERLAP)
            if start and (not ids or (scores[0], ids[0]) > last):
                args = (last[0], id_text(last[1]))
                rank, _ = await self._read_client.script(POSITION, args)
                continue
            tied = bisect_left(scores, last[0]), bisect_right(scores, last[0])
            at = bisect_right(ids, last[1], *tied)
            if at < len(ids) or len(ids) < count + OVERLAP:
                stop = min(at + count, len(ids))
                return _Page(ids[at:stop], scores[at:stop], start + stop)
            rank = end

    async def _range(self, start: int, count: int) -> _Page:
        """Return the tasks with these ranks."""
        key, stop = self._keys.named["store"], start + count - 1
        reply = await self._read_client.checked("ZRANGE", key, start, stop, "WITHSCORES")
        # Redis 7.2 and later write some numbers with an exponent.
        return _Page(
            list(map(int, reply[::2])),
            list(map(int, map(float, reply[1::2]))),
            start + len(reply) // 2,
        )

    async def _handles_of(
        self,
        page: _Page,
        names: Sequence[str | None],
        codes: set[int],
        filling: Filling,
        *,
        waits: bool,
    ) -> Handles:
        """Return the handles of a page, without tasks created or ended since its scan began. Add
        the codes in their scores to ``codes``."""
        ids, scores, _ = page
        page_codes = [score & _CODES for score in scores]
        topics = [names[code] for code in page_codes]
        dues_ms = [(score >> CODE_BITS) - _DUE_BASE for score in scores]
        codes.update(page_codes)
        unnamed = [index for index, topic in enumerate(topics) if topic is None]
        heads: dict[int, _Head] = {}
        missing = set[int]()
        if unnamed:
            heads = await self._heads([ids[index] for index in unnamed], waits=waits)
            missing = {ids[index] for index in unnamed} - heads.keys()
        if missing:  # a batch has ended them, which may still wait for its answer
            await self._check_ended(sorted(missing), waits=waits)
        reads_all = self._mirror.keeps_records and not self._mirror.complete
        created, ended = filling.created, filling.take().ended | missing
        excluded = created | ended if ended else created
        for index in unnamed:
            task_id = ids[index]
            if (head := heads.get(task_id)) is not None:
                dues_ms[index], topics[index], key = head
                if key is not None and not reads_all:
                    self._unread.append(task_id)
        if not reads_all and any(code & 1 for code in codes):
            pairs = zip(ids, page_codes, strict=True)
            self._unread.extend([task_id for task_id, code in pairs if code & 1 and code > 1])
        if not excluded.isdisjoint(ids):
            kept = [index for index, task_id in enumerate(ids) if task_id not in excluded]
            ids, dues_ms = [ids[index] for index in kept], [dues_ms[index] for index in kept]
            topics = [topics[index] for index in kept]
        if reads_all:
            self._unread.extend(ids)
        if len(set(page_codes)) > 1:  # else the scores order ties by id
            rows = sorted(zip(dues_ms, ids, topics, strict=True))
            dues_ms, ids, topics = (
                [row[0] for row in rows],
                [row[1] for row in rows],
                [row[2] for row in rows],
            )
        return Handles(ids, dues_ms, cast("list[str]", topics))

    # --- records -------------------------------------------------------------------------------

    async def keys(self) -> AsyncIterator[Keyed]:
        """See ``Store.recover_keys``. Fill the mirror on the way."""
        ids, self._unread = self._unread, array("q")
        filling, is_complete = self._mirror.begin_filling(), False
        try:
            async for heads in _ahead(self._filled(ids, filling)):
                yield self._hashed(heads)
            is_complete = self._has_handles
        finally:
            self._mirror.end_filling(filling, is_complete=is_complete)

    def _hashed(self, heads: Heads) -> Keyed:
        """Return the tasks that have a key."""
        has_key = [key is not None for key in heads.keys]
        topics = list(compress(heads.topics, has_key))
        keys = [key for key in heads.keys if key is not None]
        ids = array("q", compress(heads.ids, has_key))
        return Keyed(ids, array("Q", self._key_hash.of_many(topics, keys) if keys else ()))

    async def _filled(self, ids: Sequence[int], filling: Filling) -> AsyncGenerator[Heads, None]:
        """Yield the heads of tasks after the mirror has their records."""
        bodiless_bytes_min = NO_LIMIT if self._mirror.keeps_records else BODILESS_BYTES_MIN
        filling.ask()
        async for part, records in self._records(ids, bodiless_bytes_min):
            found, found_ids = [record for record in records if record is not None], part
            if len(found) < len(records):
                found_ids = list(compress(part, [record is not None for record in records]))
            self._mirror.fill(filling.take().newer, found_ids, found)
            filling.ask()
            if len(found) < len(records):
                await self._check_ended(sorted(set(part).difference(found_ids)), waits=True)
            yield decode_heads(found)

    async def _check_ended(self, ids: Sequence[int], *, waits: bool) -> None:
        """Raise StoreBroken if one of these tasks, which have no record, is in the StoreQueue."""
        key = self._keys.named["store"]
        read = partial(self._read_client.checked, "ZMSCORE", key, packed_ids(ids))
        scores = await (self._patient(read) if waits else read())
        for task_id, score in zip(ids, scores, strict=True):
            if score is not None:
                raise self._damaged(task_id)

    async def _heads(self, ids: Sequence[int], *, waits: bool) -> dict[int, _Head]:
        """Return the tasks that exist, by id."""
        found: dict[int, _Head] = {}
        async for _, records in self._records(ids, BODILESS_BYTES_MIN, waits=waits):
            heads = decode_heads([record for record in records if record is not None])
            rows = map(_Head, heads.dues_ms, heads.topics, heads.keys)
            found.update(zip(heads.ids, rows, strict=True))
        return found

    async def _records(
        self, ids: Sequence[int], bodiless_bytes_min: int, *, waits: bool = True
    ) -> AsyncGenerator[tuple[Sequence[int], list[bytes | None]], None]:
        """Yield ids with their records, None for a task that does not exist, in bounded parts."""
        start = 0
        while start < len(ids):
            part = ids[start : start + IDS_PER_PAGE]
            args = (BYTES_PER_PART, bodiless_bytes_min, packed_ids(part))
            read = partial(self._read_client.script, RECORDS, args)
            lists, count = await (self._patient(read) if waits else read())
            yield part[:count], list(chain.from_iterable(lists))
            start += count

    async def _patient(self, read: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read while Redis does not answer."""
        while True:
            try:
                return await read()
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    def _damaged(self, task_id: int) -> StoreBroken:
        return StoreBroken(f"{self._name}: task {task_id} has no record in {self._keys.shard}:task")


async def _ahead(source: AsyncGenerator[T, None]) -> AsyncIterator[T]:
    """Yield from ``source``, which produces the next item while one is processed."""
    following = asyncio.ensure_future(anext(source, None))
    try:
        while (item := await following) is not None:
            following = asyncio.ensure_future(anext(source, None))
            await asyncio.sleep(0)  # the request for the next item is sent
            yield item
    finally:
        await cancel_all([following])
        await source.aclose()


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
    return await asyncio.to_thread(os.path.getsize, path)


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
            await cancel_all([task])

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
            await cancel_all([task])

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
                except Exception:
                    log.exception("the check of an idle Redis failed; it is repeated")
