"""Reading beside the writer: rows by id and pages of them, from the mirror when it is complete,
before that from Redis.

Once everything is in memory nothing here waits for Redis, so that deliveries and listings go on
while it is away. Invariant: one call sees one moment. From the mirror that is so because nothing
here waits between two looks at it. From Redis a script sees one moment, and what needs several of
them holds up commits meanwhile, with the writer's lock.

Redis is asked on a connection of its own, so that reads do not wait for batches. Every script says
what it has to see at least (incarnation, last confirmed batch); when Redis does not hold that, it
is set right before the read is tried again.

Redis orders tasks by due time only. A second ordered set of ids would cost every task about a
fifth of its enqueue and 100 bytes of Redis's memory, for listings that are rare. So the first page
of a listing reads all ids (a second for a million), and 8 bytes an id stay here until none has
gone on for long. This daemon makes every commit, so it can keep that index true. Ids that ended
stay in it: the rows are read anyway, and show it.
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
from tickwheel.persistence.redis.driver import (
    REFUSING,
    Argument,
    NoReply,
    NotConnected,
    ServerError,
)
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


class IdIndex:
    """The ids of all tasks in order, loaded when a listing first needs them."""

    def __init__(self) -> None:
        self._ids: array[int] | None = None
        self._added: list[int] | None = None
        self._used_s = 0.0

    def after(self, after_id: int, limit: int) -> list[int] | None:
        """The next ids above ``after_id``; None when the index has to be loaded first."""
        ids = self._ids
        if ids is None:
            return None
        self._used_s = asyncio.get_running_loop().time()
        if self._added:
            self._ids = ids = array("q", sorted({*ids, *self._added}))
            self._added = []
        start = bisect_right(ids, after_id)
        return list(ids[start : start + limit])

    def before(self, before_id: int, limit: int) -> list[int] | None:
        """The next ids below ``before_id``, the highest first; None as in ``after``."""
        if self.after(before_id, 0) is None or self._ids is None:
            return None
        end = bisect_left(self._ids, before_id)
        return list(self._ids[max(0, end - limit) : end])[::-1]

    def add(self, ids: Iterable[int]) -> None:
        """Add tasks that were committed."""
        if self._added is None:
            return
        if self._ids is not None and asyncio.get_running_loop().time() > self._used_s + IDLE_S:
            self._ids = self._added = None
            return
        self._added.extend(ids)

    @contextmanager
    def loading(self) -> Iterator[list[int]]:
        """A list for all ids there are, which the caller fills; ids added meanwhile are kept."""
        found: list[int] = []
        if self._added is None:
            self._added = []
        try:
            yield found
        except BaseException:
            if self._ids is None:
                self._added = None
            raise
        self._ids = array("q", sorted(set(found)))
        self._used_s = asyncio.get_running_loop().time()


TRIES = 3
PAUSE_S = 0.25


class ReadClient:
    """Reads that check what Redis holds. ``verify`` is called when it lacks a confirmed batch."""

    def __init__(
        self,
        line: Connection,
        keys: Keys,
        options: RedisOptions,
        writer: Writer,
        verify: Callable[[], Awaitable[None]],
    ) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._writer = writer
        self._verify = verify

    async def pairs(
        self, command: str, name: str, count: int, *, whole: bool = False
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Fields and values of a hash, or members and scores of a set; one may come twice.

        A cursor is of one server, and of one life of it: on another connection it begins anew.
        ``whole``: all of it is read of a Redis that holds all that was confirmed before.
        """
        cursor, connection = b"0", self._line.connections
        while True:
            if whole and cursor == b"0":
                await self.look()
                connection = self._line.connections
            key = self._keys.named[name]
            found = await self.call(command, key, cursor, "COUNT", count)
            if (whole or cursor != b"0") and self._line.connections != connection:
                cursor = b"0"
                continue
            cursor, items = found
            connection = self._line.connections
            for pair in zip(items[::2], items[1::2], strict=True):
                yield pair
            if cursor == b"0":
                return

    async def script(
        self, script: Script, args: Sequence[Argument], *, locked: bool = False
    ) -> tuple[Any, Any]:
        """Both lists of the script's reply, if Redis holds all that was confirmed. ``locked``: the
        caller has the writer's lock."""
        for attempt in range(TRIES):
            if self._writer.unsettled and not locked:
                await self._set_right()
            sees = (self._writer.incarnation, self._writer.last)
            reply = await self._trying(self._line.run, script, self._keys.all, (*sees, *args))
            status = reply[0].decode()
            if status == "ok":
                return reply[1], reply[2]
            if status == "damaged":
                raise StoreBroken(
                    f"{self._options.name}: task {int(reply[1])} has no record in"
                    f" {self._keys.shard}:task"
                )
            if locked or attempt == TRIES - 1:
                break
            await self._set_right()
        raise StoreAway(f"{self._options.name} does not hold what it confirmed ({status})")

    async def look(self, *, locked: bool = False) -> None:
        """Check that Redis holds all that was confirmed, around commands that do not check it."""
        await self.script(READ, (1,), locked=locked)

    async def glance(self) -> None:
        """Check once. Raises Away, Lost, Answer; and like ``verify`` when something is missing."""
        sees = (self._writer.incarnation, self._writer.last, 1)
        reply = await self._line.run(READ, self._keys.all, sees)
        if reply[0] != b"ok":
            await self._verify()
        self._writer.holds_all()

    async def _set_right(self) -> None:
        """Replay what is missing; raises StoreBehind, StoreLost, Fenced; StoreAway meanwhile."""
        try:
            await self._verify()
        except (NotConnected, NoReply, ServerError) as error:
            raise StoreAway(error.message) from error

    async def call(self, *args: Argument) -> Any:
        return await self._trying(self._line.call, *args)

    async def _trying(self, call: Callable[..., Any], *args: Any) -> Any:
        """Try a read again a few times when the connection breaks: reads change nothing."""
        for attempt in range(TRIES):
            try:
                return await call(*args)
            except (NotConnected, NoReply, ServerError) as error:
                if isinstance(error, ServerError) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if attempt == TRIES - 1:
                    raise StoreAway(error.message) from error
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unreachable")


IDS_A_SCRIPT = 1_000
"""As many as a load of rows that come due: one round trip."""
BYTES_A_SCRIPT = 8 << 20
IDS_A_SCAN = 5_000
PAGE_MAX = 1_000

NextIds = Callable[[int, int], list[int] | None]
"""(position, limit) → ids in order; None: the index has to be loaded first."""


class Reader:
    """Reads tasks by id and in pages, from the mirror if it is complete, else from Redis."""

    def __init__(self, asker: ReadClient, writer: Writer, mirror: Mirror) -> None:
        self._asker = asker
        self._writer = writer
        self._mirror = mirror
        self._index = IdIndex()
        self._loading = asyncio.Lock()
        """Held while the ids of all tasks are read from Redis."""
        self._dead_index = IdIndex()

    def landed(self, effects: Effects) -> None:
        """Let listings find the new tasks of a batch that is in the mirror at once, or they would
        show only that half of the batch that changed other tasks."""
        if effects.enqueued:
            self._index.add(effects.enqueued)
        if effects.dead:
            self._dead_index.add(task_id for task_id, _ in effects.dead)

    # --- rows --------------------------------------------------------------------------------

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """See ``Store.read``."""
        wanted = _possible(ids)
        if self._mirror.complete:
            return self._mirror.read(wanted)
        found: dict[int, StoredTask] = {}
        if not wanted:
            return found
        rest = await self._some(found, wanted)
        if rest:
            async with self._writer.lock:
                found = await self._all(wanted)
        return found

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """See ``Store.read_some``; runs one script at most."""
        wanted = _possible(ids)
        if self._mirror.complete:
            return self._mirror.read_some(wanted, bytes_max)
        found: dict[int, StoredTask] = {}
        rest = await self._some(found, wanted, min(bytes_max, BYTES_A_SCRIPT)) if wanted else []
        return found, rest

    async def _all(self, ids: list[int]) -> dict[int, StoredTask]:
        """``read`` with the writer's lock held."""
        found: dict[int, StoredTask] = {}
        while ids:
            ids = await self._some(found, ids, locked=True)
        return found

    async def _some(
        self,
        found: dict[int, StoredTask],
        ids: list[int],
        bytes_max: int = BYTES_A_SCRIPT,
        *,
        locked: bool = False,
    ) -> list[int]:
        """Read some of ``ids`` into ``found``; returns the ids that are left."""
        some = ids[:IDS_A_SCRIPT]
        args: list[Argument] = [bytes_max, *map(id_text, some)]
        tasks, rows = await self._asker.script(READ, args, locked=locked)
        for task_id, record in zip(some, tasks, strict=False):
            if record is not None:
                found[task_id] = StoredTask(decode_task(record), (), ())
        for name, progress, dead in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            task_id, _ = split_member(name)
            task = found[task_id]
            if progress is not None:
                task = task._replace(progress=(*task.progress, decode_progress(progress)))
            if dead is not None:
                task = task._replace(dead=(*task.dead, decode_dead(dead)))
            found[task_id] = task
        for task_id in {split_member(name)[0] for name in rows[::3]}:
            task = found[task_id]
            found[task_id] = task._replace(
                progress=tuple(sorted(task.progress)), dead=tuple(sorted(task.dead))
            )
        return ids[len(tasks) :]

    # --- pages -------------------------------------------------------------------------------

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """See ``Store.scan``; the first page of a listing looks at all ids once."""
        return await self._page(self._index.after, min(after_id, ID_MAX), limit, topic)

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        """See ``Store.scan_back``; the first page of a listing looks at all ids once."""
        return await self._page(self._index.before, min(before_id, ID_MAX + 1), limit, topic)

    async def _page(
        self, next_ids: NextIds, position: int, limit: int, topic: str | None
    ) -> list[StoredTask]:
        while True:
            # Commits do not wait while all ids are read: the index learns of them.
            if next_ids(position, 0) is None:
                async with self._loading:
                    if next_ids(position, 0) is None:
                        await self._load_index()
            async with self._one_moment():
                found = await self._ids_to_rows(next_ids, position, limit, topic)
            if found is not None:
                return found

    @asynccontextmanager
    async def _one_moment(self) -> AsyncIterator[None]:
        """Make several reads see one moment: the mirror does not change between them, and commits
        to Redis wait."""
        if self._mirror.complete:
            yield
            return
        await self._asker.look()  # sets right what is missing, which needs the lock
        async with self._writer.lock:
            yield

    async def _ids_to_rows(
        self, next_ids: NextIds, position: int, limit: int, topic: str | None
    ) -> list[StoredTask] | None:
        """The rows of a page; None: the index has been dropped meanwhile."""
        found: list[StoredTask] = []
        left = SCAN_BYTES_MAX
        while len(found) < limit and left > 0:
            ids = next_ids(position, PAGE_MAX)
            if ids is None:
                return None
            if not ids:
                break
            if topic is None:
                ids = ids[: limit - len(found)]
            stored, rest = await self._first(ids, left)
            ids = ids[: len(ids) - len(rest)]
            position = ids[-1]
            tasks = (stored[task_id] for task_id in ids if task_id in stored)
            for task in tasks:
                if topic in (None, task.row.topic) and len(found) < limit:
                    found.append(task)
                    left -= task_bytes(task.row)
        return found

    async def _first(
        self, ids: list[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """``read_some`` inside of ``_one_moment``."""
        if self._mirror.complete:
            return self._mirror.read_some(ids, bytes_max)
        found: dict[int, StoredTask] = {}
        return found, await self._some(found, ids, min(bytes_max, BYTES_A_SCRIPT), locked=True)

    async def _load_index(self) -> None:
        with self._index.loading() as ids:
            if self._mirror.complete:
                ids.extend(self._mirror.ids())
                return
            async for name, _ in self._asker.pairs("ZSCAN", "store", IDS_A_SCAN, whole=True):
                ids.append(int(name))

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        """See ``Store.scan_dead``."""
        if after[0] > ID_MAX:
            return []
        async with self._one_moment():
            return await self._dead_rows(after, limit, topic, group)

    async def _dead_rows(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        found: list[DeadRow] = []
        while len(found) < limit:
            page = self._dead_page(after) if self._mirror.complete else await self._ask_dead(after)
            if page is None:
                break
            rows, after = page
            found += [
                row for row in rows if topic in (None, row.topic) and group in (None, row.group)
            ]
        return found[:limit]

    def _dead_page(self, after: ProgressKey) -> tuple[list[DeadRow], ProgressKey] | None:
        """Dead letters after ``after``, and where to go on; None when there are no more."""
        ids = self._dead_index.after(after[0] - 1, PAGE_MAX)
        if ids is None:
            with self._dead_index.loading() as every:
                every.extend(self._mirror.dead_ids())
            ids = self._dead_index.after(after[0] - 1, PAGE_MAX) or []
        if not ids:
            return None
        rows = [row for task_id in ids for row in self._mirror.dead(task_id)]
        return [row for row in rows if (row.id, row.group) > after], (ids[-1] + 1, "")

    async def _ask_dead(self, after: ProgressKey) -> tuple[list[DeadRow], ProgressKey] | None:
        """A page of dead letters behind ``after``, read from Redis, and where the next one begins;
        None: there are no more."""
        start = b"(" + member(*after) if after[0] >= 0 else b"-"
        names, records = await self._asker.script(DEAD_PAGE, (start, PAGE_MAX), locked=True)
        if not names:
            return None
        return list(map(decode_dead, records)), split_member(names[-1])


def _possible(ids: Sequence[int]) -> list[int]:
    """The ids that Redis can hold, each once."""
    return [task_id for task_id in dict.fromkeys(ids) if 0 <= task_id <= ID_MAX]
