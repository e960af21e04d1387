"""What a start needs from Redis: the small tables whole, then every task in due order.

All of it goes into the mirror as it passes. Batches may land meanwhile: they know better. From the
first chunk on a Redis that is away is waited for: this daemon serves, and what it has confirmed
since is kept by it alone if Redis comes back older.

``copy_to_sqlite`` makes a consistent copy of a shard as a SQLite store, while it is in use. Rows
are read in pages while batches go on; every batch that lands meanwhile is laid over the copy in
order before it is finished. Effects say absolute states, so the copy ends as the shard was when
the last of them landed: one moment, though its pages are not. (Redis's own means, BGSAVE and the
append-only file, copy the whole server; this one copies one shard, and a daemon can be started on
it.)

``Rewriter`` is for a Redis that lacks more than the batches kept: everything is written again,
from the mirror. It stands before the writer. While a shard is written anew nothing is committed,
so the mirror stands still; one task does it, again from the beginning when Redis goes away in the
middle, until it is done. A commit notices a Redis that lost the shard by itself; without commits
nobody would, until this daemon ends and what only it still knew is gone with it. So an idle shard
is looked at now and then. That Redis is away is not reported here: who needs it does that.
Invariants:

* With the mirror complete nobody gets StoreBehind or StoreLost: commits are refused meanwhile.
* Without a mirror (``?mirror=no``) everybody gets StoreForgot from then on, and the shard is marked
  so that nobody opens it.
* A shard that another daemon has taken over or laid out anew is never written (Fenced).
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
from tickwheel.persistence.codec import (
    Heads,
    decode_heads,
)
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    Handles,
    Keyed,
    Small,
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

ROWS_A_SCAN = 500
BYTES_A_CHUNK = 8 << 20
KEYS_AT_ONCE = 10_000
WHOLE_BYTES = 256
"""Records of so many bytes come without their bodies, if nothing keeps these: to cut a record takes
Redis longer than to send a small one."""
NEVER = 1 << 53
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
        return small.decoded(endings_max)

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
        asked: asyncio.Future[list[bytes]] | None = None
        first, whole = True, False
        try:
            filling.ask()
            records = await self._page(None, chunk, waits=False)
            while records:
                if not first:  # a daemon whose first tasks are there has more urgent questions
                    asked = self._after(records[-1], filling, chunk)
                    await asyncio.sleep(0)  # Redis reads the next page while this one is taken over
                heads = decode_heads(records)
                changes = filling.take()
                self._mirror.fill(changes.newer, heads.ids, records)
                self._hash(heads)
                handles = _without(filling.new, changes.ended, heads)
                if handles.ids:
                    yield handles
                if first:
                    failpoints.hit("recovery.middle")
                    first = False
                records = await (asked or self._after(records[-1], filling, chunk))
            whole = True
        finally:
            if asked is not None and not (asked.cancel() or asked.cancelled()):
                asked.exception()  # nobody asks for it any more
            self._mirror.end_filling(filling, whole=whole)

    def _after(self, last: bytes, filling: Filling, chunk: int) -> asyncio.Future[list[bytes]]:
        """Ask for the page after this record: what lands from now on may not be in it."""
        filling.ask()
        return asyncio.ensure_future(self._page(last, chunk, waits=True))

    def _hash(self, heads: Heads) -> None:
        """Note the key hashes of those of the tasks that have a key."""
        hash_of, (keyed_ids, hashes) = self._key_hash, self._keyed
        for task_id, topic, key in zip(heads.ids, heads.topics, heads.keys, strict=True):
            if key is not None:
                keyed_ids.append(task_id)
                hashes.append(hash_of(topic, key))

    async def keys(self) -> AsyncIterator[Keyed]:
        """See ``Store.recover_keys``."""
        keyed, self._keyed = self._keyed, _Columns(array("q"), array("Q"))
        for start in range(0, len(keyed.ids), KEYS_AT_ONCE):
            stop = start + KEYS_AT_ONCE
            yield Keyed(keyed.ids[start:stop], keyed.hashes[start:stop])

    async def _page(self, last: bytes | None, chunk: int, *, waits: bool) -> list[bytes]:
        """The records, in due order, behind this one (None: from the beginning); large ones are
        without their bodies, if nothing keeps these. ``waits``: for a Redis that is away."""
        score = member = b""
        if last is not None:
            (task_id,), (due_ms,), *_ = decode_heads([last])
            score, member = b"%d" % due_ms, id_text(task_id)
        whole = NEVER if self._mirror.keeps_records else WHOLE_BYTES
        args = (score, member, chunk, BYTES_A_CHUNK, whole)
        while True:
            try:
                lists, _ = await self._asker.script(HANDLES, args)
                return list(chain.from_iterable(lists))
            except StoreAway:
                if not waits:
                    raise
            await asyncio.sleep(AWAY_RETRY_S)


def _without(new: set[int], ended: set[int], heads: Heads) -> Handles:
    """The handles without tasks that were made since the stream began, or have ended since."""
    ids, dues_ms, topics, _ = heads
    gone = new | ended if ended else new
    if not gone:
        return Handles(ids, dues_ms, topics)
    kept = [i for i, task_id in enumerate(ids) if task_id not in gone]
    return Handles([ids[i] for i in kept], [dues_ms[i] for i in kept], [topics[i] for i in kept])


async def copy_to_sqlite(
    reader: Reader, small: Callable[[], Awaitable[Small]], writer: Writer, path: str
) -> int:
    """Copy the shard; returns the copy's bytes. Raises StoreError if the file exists."""
    from tickwheel.persistence.filling import copying, pages

    # What is confirmed meanwhile may be in the copy, or not.
    async with copying(path, writer.held) as filler:
        meanwhile: deque[Effects] = deque()
        writer.watchers.append(meanwhile)
        try:
            found = await small()
            await filler.write(Effects(ended=dict(found.outcomes)))
            await filler.records(found.records)
            async for page in pages(reader.scan):
                for task in page:
                    await filler.change(task)
                await _catch_up(filler, meanwhile)
            await _catch_up(filler, meanwhile)
            filler.id_mark, filler.position_ms = writer.id_mark, writer.position_ms
        finally:
            writer.watchers.remove(meanwhile)
    return os.path.getsize(path)


async def _catch_up(filler: Filler, meanwhile: deque[Effects]) -> None:
    """Lay the batches over the copy that landed meanwhile."""
    await filler.flush()
    while meanwhile:
        effects = meanwhile.popleft()
        # The page may have shown a task already: what is new is written over it.
        updated = effects.enqueued | effects.updated
        # The copy hashes keys by a seed of its own.
        await filler.write(replace(effects, enqueued={}, hashes={}, updated=updated))


log = logging.getLogger(__name__)

RETRY_S = 0.2
RETRY_S_MAX = 2.0


class Rewriter:
    """A writer's ``commit`` and ``verify`` over a Redis that may lose everything."""

    def __init__(self, writer: Writer, mirror: Mirror, tally: Tally, what: str) -> None:
        self._writer = writer
        self._mirror = mirror
        self._tally = tally
        self._what = what
        """The names of store and shard, for messages."""
        self._task: asyncio.Task[None] | None = None
        self._failed: StoreError | None = None
        self._written = self._total = 0
        self._landed = 0
        """The last batch that memory has, of those that are written anew."""
        self.commits = 0
        """How many calls of ``commit`` there were: whoever commits notices what is wrong."""

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def state(self) -> str:
        """How far the writing anew is, for messages."""
        return f"{self._what} is being written anew: {self._written} of {self._total} tasks"

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``; also raises StoreBehind and StoreLost, see the invariants."""
        self.commits += 1
        if self._failed is not None:
            raise self._failed
        if not self.active:
            try:
                return await self._writer.commit(epoch, owner, n, effects)
            except (StoreBehind, StoreLost) as error:
                await self._begin(error)
        # One that landed and was not replicated yet is in memory, and so among what is written: it
        # must come again, and nothing else may come under its number.
        kind = CommitUnknown if n <= self._landed else CommitRefused
        raise kind(f"batch {n}: {self.state}")

    async def verify(self) -> None:
        """See ``Writer.verify``; also raises StoreAway while the shard is written anew."""
        if self._failed is not None:
            raise self._failed
        if not self.active:
            try:
                await self._writer.verify()
                return
            except (StoreBehind, StoreLost) as error:
                await self._begin(error)
        raise StoreAway(self.state)

    async def _begin(self, why: StoreError) -> None:
        """Begin to write the shard anew; raises ``why`` if the mirror is not complete, and
        StoreForgot if there is none."""
        if not self._mirror.keeps_records:
            raise await self._give_up(why)
        if not self._mirror.complete:
            raise why
        if self.active:
            return
        self._landed = self._writer.last
        counts = self._mirror.counts()
        self._written, self._total = 0, counts.tasks
        log.error("%s; it is written anew from memory: %s", why.message, counts)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _give_up(self, why: StoreError) -> StoreForgot:
        """End for good, since nobody has what is missing; and see to it that nobody, this daemon
        after a restart included, goes on with what is left as if it were all."""
        self._failed = error = StoreForgot(
            f"{why.message}; the daemon has no copy of it (mirror=no): `tickwheel init --force`,"
            " then `tickwheel restore` from backup and history"
        )
        with contextlib.suppress(StoreError):
            await self._writer.mark_lost()
        return error

    async def close(self) -> None:
        """Stop a writing anew; the shard stays marked as not whole."""
        task = self._task
        if task is not None:
            log.error("%s was closed before it was whole again: %s", self._what, self.state)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await self._until_whole()
        except Fenced:
            log.warning("%s was taken over by another daemon meanwhile", self._what)
        except StoreBroken as error:
            self._failed = error
        except Exception as error:
            log.exception("%s could not be written anew", self._what)
            self._failed = StoreBroken(f"{self._what} could not be written anew: {error!r}")
        else:
            self._tally.rewrites += 1
            log.warning(
                "%s was written anew in %.1f s: %s",
                self._what,
                loop.time() - started_s,
                self._mirror.counts(),
            )
        finally:
            self._task = None

    async def _until_whole(self) -> None:
        pause_s, is_logged = RETRY_S, False
        while True:
            try:
                await self._write()
                return
            except (Fenced, StoreBroken):
                raise
            except StoreError as error:
                if isinstance(error, ServerError) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._what}: {error.message}") from error
                if not is_logged:
                    is_logged = True
                    log.warning(
                        "writing %s anew was cut short after %d of %d tasks, and will begin again"
                        " until it succeeds: %s",
                        self._what,
                        self._written,
                        self._total,
                        error.message,
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _write(self) -> None:
        """Write all batches of the mirror. Raises StoreError; nothing written counts then."""
        self._written = 0
        async with self._writer.write_anew() as write:
            for effects in self._mirror.batches():
                await write(effects)
                self._written += len(effects.enqueued)


PAUSE_S = 1.0


class Watch:
    """Looks at an idle Redis: ``start`` when the shard is open, ``stop`` before it closes."""

    def __init__(self, asker: ReadClient, rewriter: Rewriter) -> None:
        self._asker = asker
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
                    await self._asker.glance()
                except (Fenced, StoreForgot):
                    return  # the next commit gets the error
                except StoreError:
                    continue
