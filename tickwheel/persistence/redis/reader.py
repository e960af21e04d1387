"""Reads rows by id and in pages, concurrently with the writer: from the mirror once it is complete,
before that from Redis.

With a complete mirror no read waits for Redis, so deliveries and listings continue while Redis does
not answer. Invariant: each call reads a snapshot. Reads of the mirror do not await between two
accesses, or then read again what they have found. A Redis script is atomic, and a read with several
scripts holds the writer's lock, which delays commits.

Reads have a separate connection and do not wait for batches. Every script checks that Redis has the
current incarnation and the last confirmed batch. If it does not, Redis is repaired before the read
is retried.

Redis orders tasks by due time only. A second ordered set of ids would make each enqueue 20% slower
and take 100 bytes of Redis's memory per task, although listings are rare. So the first page of a
listing reads all ids (one second for a million). They stay in ``IdIndex``, at 8 bytes each, until
no listing has used them for a while. This daemon updates the index at every commit. The index keeps
the ids of ended tasks, because reading the rows shows that they have ended, until they are half of
its ids.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from tickwheel.model.records import DeadRow, task_bytes
from tickwheel.persistence.codec import decode_dead, decode_progress, decode_task
from tickwheel.persistence.contract import SCAN_BYTES_MAX, StoreAway, StoreBroken, StoredTask
from tickwheel.persistence.on_server import ServerTrouble
from tickwheel.persistence.redis.driver import REFUSING, Argument, ServerError
from tickwheel.persistence.redis.layout import (
    DEAD_PAGE,
    ID_MAX,
    READ,
    Keys,
    Script,
    id_text,
    member,
    split_member,
)

if TYPE_CHECKING:
    from tickwheel.model.kinds import Effects, ProgressKey
    from tickwheel.persistence.redis.connection import Connection
    from tickwheel.persistence.redis.driver import RedisOptions
    from tickwheel.persistence.redis.mirror import Mirror
    from tickwheel.persistence.redis.writer import Writer

IDLE_S = 30.0
ENDED_MIN = 100_000
"""Minimum number of ended tasks for which an index is loaded again."""


class IdIndex:
    """The ids of all tasks in order, loaded when a listing first needs them."""

    def __init__(self) -> None:
        self._ids: array[int] | None = None
        self._added: list[int] | None = None
        self._ended = 0
        self._used_s = 0.0

    def __len__(self) -> int:
        return len(self._ids or ())

    def after(self, after_id: int, limit: int) -> list[int] | None:
        """Return the next ids above ``after_id``, or None if the index must be loaded first."""
        ids = self._ids
        if ids is None:
            return None
        self._used_s = asyncio.get_running_loop().time()
        if self._added:
            # Usually all are new tasks, with the highest ids.
            start = bisect_left(ids, min(self._added))
            later = ids[start:]
            del ids[start:]
            ids.extend(dict.fromkeys(sorted([*later, *self._added])))
            self._added = []
        start = bisect_right(ids, after_id)
        return list(ids[start : start + limit])

    def before(self, before_id: int, limit: int) -> list[int] | None:
        """Return the next ids below ``before_id``, highest first, or None as ``after`` does."""
        if self.after(before_id, 0) is None or self._ids is None:
            return None
        end = bisect_left(self._ids, before_id)
        return list(self._ids[max(0, end - limit) : end])[::-1]

    def add(self, ids: Iterable[int]) -> None:
        """Add tasks that were committed."""
        if self._added is None:
            return
        if self._ids is not None and asyncio.get_running_loop().time() > self._used_s + IDLE_S:
            self.drop()
            return
        self._added.extend(ids)

    def end(self, count: int) -> None:
        """Note that tasks have ended. Drop the index if they are half of its ids."""
        self._ended += count
        if self._ended > max(ENDED_MIN, len(self) // 2):
            self.drop()

    def drop(self) -> None:
        """Forget the ids. An index that is being loaded keeps those that were added."""
        if self._ids is not None:
            self._ids = self._added = None

    @contextmanager
    def loading(self) -> Iterator[list[int]]:
        """Yield a list that the caller fills with all ids. Ids added concurrently are kept."""
        ids: list[int] = []
        self._ended = 0
        if self._added is None:
            self._added = []
        try:
            yield ids
        except BaseException:
            if self._ids is None:
                self._added = None
            raise
        self._ids = array("q", sorted(set(ids)))
        self._used_s = asyncio.get_running_loop().time()


TRIES = 3
PAUSE_S = 0.25


class ReadClient:
    """Reads from Redis, and calls ``verify`` if Redis lacks the last confirmed batch."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        options: RedisOptions,
        writer: Writer,
        verify: Callable[[], Awaitable[None]],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._options = options
        self._writer = writer
        self._verify = verify

    async def pairs(
        self, command: str, name: str, count: int, *, verified: bool = False
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Yield fields and values of a hash, or members and scores of a set. Some can be
        yielded twice. A cursor is valid for one run of a server, so a new connection starts the
        scan again. ``verified``: check that Redis has all confirmed batches throughout the scan."""
        cursor, connections_before = b"0", self._connection.connections
        while True:
            if verified and cursor == b"0":
                await self.look()
                connections_before = self._connection.connections
            key = self._keys.named[name]
            reply = await self.call(command, key, cursor, "COUNT", count)
            if (verified or cursor != b"0") and self._connection.connections != connections_before:
                cursor = b"0"
                continue
            cursor, items = reply
            connections_before = self._connection.connections
            for pair in zip(items[::2], items[1::2], strict=True):
                yield pair
            if cursor == b"0":
                return

    async def script(
        self, script: Script, args: Sequence[Argument], *, locked: bool = False
    ) -> tuple[Any, Any]:
        """Return both lists of the script's reply, from a Redis with all confirmed batches.
        ``locked``: the caller holds the writer's lock."""
        for attempt in range(TRIES):
            if self._writer.unsettled and not locked:
                await self._repair()
            expected = (self._writer.incarnation, self._writer.last)
            arguments = (*expected, *args)
            reply = await self._trying(self._connection.run, script, self._keys.all, arguments)
            status = reply[0].decode()
            if status == "ok":
                return reply[1], reply[2]
            if locked or attempt == TRIES - 1:
                break
            await self._repair()
        raise StoreAway(f"{self._options.name} lacks confirmed batches ({status})")

    async def checked(self, *command: Argument) -> Any:
        """Return the reply to a command from a Redis with all confirmed batches."""
        connection = self._connection
        for _ in range(TRIES):
            if self._writer.unsettled:
                await self._repair()
            args = (self._writer.incarnation, self._writer.last, 1)
            reply = await self.call(*command)
            connections = connection.connections
            status = (await self._trying(connection.run, READ, self._keys.all, args))[0]
            if connection.connections != connections:
                continue
            if status == b"ok":
                return reply
            await self._repair()
        raise StoreAway(f"{self._options.name} lacks confirmed batches")

    async def look(self, *, locked: bool = False) -> None:
        """Check that Redis has all confirmed batches, before commands that do not check this."""
        await self.script(READ, (1,), locked=locked)

    async def glance(self) -> None:
        """Check once. Raise NotConnected, NoReply, ServerError or, if a batch is missing, any error
        of ``verify``."""
        args = (self._writer.incarnation, self._writer.last, 1)
        reply = await self._connection.run(READ, self._keys.all, args)
        if reply[0] != b"ok":
            await self._verify()
        self._writer.note_complete()

    async def _repair(self) -> None:
        """Replay missing batches. Raise StoreBehind, StoreLost, Fenced or StoreAway."""
        try:
            await self._verify()
        except ServerTrouble as error:
            raise StoreAway(error.message) from error

    async def call(self, *args: Argument) -> Any:
        return await self._trying(self._connection.call, *args)

    async def _trying(self, call: Callable[..., Any], *args: Any) -> Any:
        """Retry a read a few times if the connection breaks, because reads change nothing."""
        for attempt in range(TRIES):
            try:
                return await call(*args)
            except ServerTrouble as error:
                if isinstance(error, ServerError) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if attempt == TRIES - 1:
                    raise StoreAway(error.message) from error
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unreachable")


IDS_PER_SCRIPT = 1_000
"""Number of ids per script: as many as a load of due rows has, so that a load is one round trip."""
BYTES_PER_SCRIPT = 8 << 20
IDS_PER_SCAN = 5_000
PAGE_MAX = 1_000
IDS_PER_TURN = 4_000
"""Number of ids in the mirror that a listing examines before the event loop runs other work."""

NextIds = Callable[[int, int], list[int] | None]
"""(position, limit) → ids in order, or None if the index must be loaded first."""


class Reader:
    """Reads tasks by id and in pages, from the mirror if it is complete, else from Redis."""

    def __init__(self, read_client: ReadClient, writer: Writer, mirror: Mirror) -> None:
        self._read_client = read_client
        self._writer = writer
        self._mirror = mirror
        self._index = IdIndex()
        self._loading = asyncio.Lock()
        """Held while the ids of all tasks are read from Redis."""
        self._dead_index = IdIndex()
        self._dead_scans: list[list[ProgressKey]] = []
        """For each scan of dead letters in progress, those that were put meanwhile."""

    def landed(self, effects: Effects) -> None:
        """Note a batch's tasks and dead letters in the indexes at once, so that a listing shows
        either all changes of the batch or none."""
        if effects.enqueued:
            self._index.add(effects.enqueued)
        self._index.end(len(effects.ended))
        if effects.dead:
            self._dead_index.add(task_id for task_id, _ in effects.dead)
            for put in self._dead_scans:
                put += [key for key, letter in effects.dead.items() if letter is not None]

    # --- rows --------------------------------------------------------------------------------

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """See ``Store.read``."""
        possible_ids = _possible(ids)
        if self._mirror.complete:
            return self._mirror.read(possible_ids)
        tasks: dict[int, StoredTask] = {}
        if not possible_ids:
            return tasks
        unread = await self._read_part(tasks, possible_ids)
        if unread:
            async with self._writer.lock:
                tasks = await self._read_all(possible_ids)
        return tasks

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """See ``Store.read_some``; runs at most one script."""
        possible_ids = _possible(ids)
        if self._mirror.complete:
            return self._mirror.read_some(possible_ids, bytes_max)
        tasks: dict[int, StoredTask] = {}
        unread = (
            await self._read_part(tasks, possible_ids, min(bytes_max, BYTES_PER_SCRIPT))
            if possible_ids
            else []
        )
        return tasks, unread

    async def _read_all(self, ids: list[int]) -> dict[int, StoredTask]:
        """Read as ``read`` does. The caller must hold the writer's lock."""
        tasks: dict[int, StoredTask] = {}
        while ids:
            ids = await self._read_part(tasks, ids, locked=True)
        return tasks

    async def _read_part(
        self,
        into: dict[int, StoredTask],
        ids: list[int],
        bytes_max: int = BYTES_PER_SCRIPT,
        *,
        locked: bool = False,
    ) -> list[int]:
        """Read the first of ``ids`` and add the tasks to ``into``. Return the ids not read."""
        part = ids[:IDS_PER_SCRIPT]
        args: list[Argument] = [bytes_max, *map(id_text, part)]
        tasks, rows = await self._read_client.script(READ, args, locked=locked)
        for task_id, record in zip(part, tasks, strict=False):
            if record is not None:
                into[task_id] = StoredTask(decode_task(record), (), ())
        for name, progress, dead in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            task_id, _ = split_member(name)
            task = into[task_id]
            if progress is not None:
                task = task._replace(progress=(*task.progress, decode_progress(progress)))
            if dead is not None:
                task = task._replace(dead=(*task.dead, decode_dead(dead)))
            into[task_id] = task
        for task_id in {split_member(name)[0] for name in rows[::3]}:
            task = into[task_id]
            into[task_id] = task._replace(
                progress=tuple(sorted(task.progress)), dead=tuple(sorted(task.dead))
            )
        return ids[len(tasks) :]

    # --- pages -------------------------------------------------------------------------------

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """See ``Store.scan``; the first page of a listing reads all ids."""
        return await self._page(self._index.after, min(after_id, ID_MAX), limit, topic)

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """See ``Store.scan_back``; the first page of a listing reads all ids."""
        return await self._page(self._index.before, min(before_id, ID_MAX + 1), limit, topic)

    async def _page(
        self, next_ids: NextIds, position: int, limit: int, topic: str | None
    ) -> list[StoredTask]:
        while True:
            # Commits continue while all ids are read; ``landed`` adds their ids.
            if next_ids(position, 0) is None:
                async with self._loading:
                    if next_ids(position, 0) is None:
                        await self._load_index()
            async with self._one_moment():
                page = await self._ids_to_rows(next_ids, position, limit, topic)
            if page is not None:
                return page

    @asynccontextmanager
    async def _one_moment(self) -> AsyncIterator[None]:
        """Make several reads one snapshot: commits wait for reads of Redis, but not for reads of
        the mirror."""
        if self._mirror.complete:
            yield
            return
        await self._read_client.look()  # before taking the lock, because a repair needs it
        async with self._writer.lock:
            yield

    async def _ids_to_rows(
        self, next_ids: NextIds, position: int, limit: int, topic: str | None
    ) -> list[StoredTask] | None:
        """Return the rows of a page, or None if the index has been dropped."""
        page: list[StoredTask] = []
        bytes_left, examined = SCAN_BYTES_MAX, 0
        while len(page) < limit and bytes_left > 0:
            ids = next_ids(position, PAGE_MAX)
            if ids is None:
                return None
            if not ids:
                break
            if topic is None:
                ids = ids[: limit - len(page)]
            stored, unread = await self._first(ids, bytes_left)
            ids = ids[: len(ids) - len(unread)]
            position = ids[-1]
            examined += len(ids)
            tasks = (stored[task_id] for task_id in ids if task_id in stored)
            for task in tasks:
                if topic in (None, task.row.topic) and len(page) < limit:
                    page.append(task)
                    bytes_left -= task_bytes(task.row)
            if examined >= IDS_PER_TURN and self._mirror.complete:
                examined = 0
                await asyncio.sleep(0)
                # Batches may have landed: read the page of this moment.
                page = list(self._mirror.read([task.row.id for task in page]).values())
                bytes_left = SCAN_BYTES_MAX - sum(task_bytes(task.row) for task in page)
        return page

    async def _first(
        self, ids: list[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """Read as ``read_some`` does, inside ``_one_moment``."""
        if self._mirror.complete:
            return self._mirror.read_some(ids, bytes_max)
        tasks: dict[int, StoredTask] = {}
        return tasks, await self._read_part(
            tasks, ids, min(bytes_max, BYTES_PER_SCRIPT), locked=True
        )

    async def _load_index(self) -> None:
        with self._index.loading() as ids:
            if self._mirror.complete:
                ids.extend(self._mirror.ids())
                return
            async for name, _ in self._read_client.pairs(
                "ZSCAN", "store", IDS_PER_SCAN, verified=True
            ):
                ids.append(int(name))

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """See ``Store.scan_dead``."""
        if after[0] > ID_MAX:
            return []

        def matches(row: DeadRow) -> bool:
            return topic in (None, row.topic) and group in (None, row.group)

        put: list[ProgressKey] = []
        async with self._one_moment():
            self._dead_scans.append(put)
            try:
                return await self._dead_rows(after, limit, matches, put)
            finally:
                self._dead_scans = [other for other in self._dead_scans if other is not put]

    async def _dead_rows(
        self, begin: ProgressKey, limit: int, matches: Callable[[DeadRow], bool],
        put: list[ProgressKey],
    ) -> list[DeadRow]:  # fmt: skip
        """``put``: the dead letters that batches have put since this call."""
        matching: list[DeadRow] = []
        after = begin
        while len(matching) < limit:
            page = self._dead_page(after) if self._mirror.complete else await self._ask_dead(after)
            if page is None:
                break
            rows, after = page
            matching += filter(matches, rows)
            if self._mirror.complete and len(matching) < limit:  # a filter can exclude all
                await asyncio.sleep(0)
                # Batches may have landed: take the rows of this moment.
                keys = {row[:2] for row in matching}
                keys.update(key for key in put if begin < key < after)
                put.clear()
                ids = sorted({task_id for task_id, _ in keys})
                found = (row for task_id in ids for row in self._mirror.dead(task_id))
                matching = [row for row in found if row[:2] in keys and matches(row)]
        return matching[:limit]

    def _dead_page(self, after: ProgressKey) -> tuple[list[DeadRow], ProgressKey] | None:
        """Return dead letters after ``after`` and the next position, or None at the end."""
        index, dead_ids = self._dead_index, self._mirror.dead_ids()
        if len(index) > ENDED_MIN + 2 * len(dead_ids):
            index.drop()
        ids = index.after(after[0] - 1, PAGE_MAX)
        if ids is None:
            with index.loading() as all_ids:
                all_ids.extend(dead_ids)
            ids = index.after(after[0] - 1, PAGE_MAX) or []
        if not ids:
            return None
        rows = [row for task_id in ids for row in self._mirror.dead(task_id)]
        return [row for row in rows if (row.id, row.group) > after], (ids[-1] + 1, "")

    async def _ask_dead(self, after: ProgressKey) -> tuple[list[DeadRow], ProgressKey] | None:
        """Read a page of dead letters after ``after`` from Redis. Return it and the next position,
        or None at the end."""
        start = b"(" + member(*after) if after[0] >= 0 else b"-"
        names, records = await self._read_client.script(DEAD_PAGE, (start, PAGE_MAX), locked=True)
        if not names:
            return None
        return list(map(decode_dead, records)), split_member(names[-1])


def _possible(ids: Sequence[int]) -> list[int]:
    """Return the ids that may exist in Redis, each once."""
    return [task_id for task_id in dict.fromkeys(ids) if 0 <= task_id <= ID_MAX]
