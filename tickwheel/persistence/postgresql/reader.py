"""Reads concurrent with the writer: tasks by id, pages of tasks, pages of dead letters, and
everything that a start or a backup reads.

Invariant: each call reads a snapshot of whole batches. A read by id is one statement; other reads
are a transaction with one snapshot. The tables of a shard change while a read runs: a read whose
snapshot may be newer than the tables that it names is repeated (``_TablesChanged``), and so is one
that meets a dropped table. Every snapshot is compared with the last confirmed batch, because after
a failover a connection can still reach the former primary.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tickwheel import failpoints
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.model.records import ID_MAX, TaskRow, task_bytes
from tickwheel.persistence.codec import (
    decode_dead,
    decode_endings,
    decode_progress,
    decode_record,
    kind_of,
)
from tickwheel.persistence.contract import (
    SCAN_BYTES_MAX,
    Handles,
    Keyed,
    SmallState,
    StoreAway,
    StoreBroken,
    StoredTask,
    StoreError,
)
from tickwheel.persistence.on_server import NoReply, ServerTrouble
from tickwheel.persistence.postgresql.driver import (
    LONG_CALL_MS,
    LOOKUPS,
    REFUSING,
    SNAPSHOT,
    UNFIT,
    Link,
    ServerError,
    is_table_dropped,
)
from tickwheel.persistence.postgresql.layout import (
    DEAD,
    ENDED,
    LAST_BATCH,
    PROGRESS,
    SQL,
    TASK,
    Parts,
    handles_statement,
    options_from,
    read_statement,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from tickwheel.model.kinds import ProgressKey
    from tickwheel.model.records import DeadRow, ProgressRow
    from tickwheel.persistence.postgresql.driver import PostgresOptions
    from tickwheel.persistence.postgresql.writer import Writer

READERS: Final = 3
"""Maximum connections for reads."""
TRIES: Final = 3
PAUSE_S: Final = 0.25
FEW_PARTS: Final = 3
"""A read of more parts names all parts, so that its statement is prepared only once."""
NO_LIMIT: Final = 2**62
DEAD_PAGE_MIN: Final = 100
PAGE_CALL_MS: Final = 20_000
"""Maximum milliseconds of a statement for a page, which can look at many tasks of other topics."""
SOON_MS: Final = 600_000
"""A start reads tasks due within this time first; sorting them needs no long scan."""
_T = TypeVar("_T")


class _TablesChanged(Exception):
    """The tables changed before the snapshot was taken."""


class Reader:
    """Reads of an open shard: those of ``contract.Reads``, of a start and of a backup."""

    def __init__(self, options: PostgresOptions, writer: Writer) -> None:
        self._options = options
        self._writer = writer
        self._places = asyncio.Semaphore(READERS)
        self._idle: list[Link] = []
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()

    # --- connections -------------------------------------------------------------------------

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        async with self._places:
            link = self._idle.pop() if self._idle else Link(self._options, LOOKUPS)
            try:
                yield link
            except NoReply:
                link.drop()  # it may reach a former primary, which lacks batches
                raise
            finally:
                self._idle.append(link)
                if self._is_closed:
                    await self.close()

    async def _trying(self, read: Callable[[Link], Awaitable[_T]]) -> _T:
        """Repeat a read whose tables have changed, and for some time one without an answer."""
        attempt = 0
        while True:
            parts = self._writer.parts
            try:
                async with self._link() as link:
                    return await read(link)
            except (_TablesChanged, ServerTrouble) as error:
                if await self._is_outdated(error, parts):
                    continue
                attempt += 1
                failure = _failure(error)
                if attempt == TRIES or not isinstance(failure, StoreAway):
                    raise failure from error
            await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def snapshot(self, link: Link, *, is_long: bool = False) -> AsyncIterator[Parts]:
        """Begin a transaction with one snapshot, and yield the tables that it sees. ``is_long``:
        none of them can be dropped before its end."""
        writer = self._writer
        parts, known = writer.parts, writer.last
        async with link.transaction(SNAPSHOT):
            if is_long:
                await link.execute(f"LOCK TABLE {', '.join(parts.tables)} IN ACCESS SHARE MODE")
            ((last, _, _),) = await link.fetch(SQL["last"].format(at=parts.at))
            self._check(parts, last, known)
            yield parts

    def _check(self, parts: Parts, last: int, known: int) -> None:
        """Raise _TablesChanged if a snapshot may be newer than ``parts``, or NoReply if its
        ``last`` batch shows that it lacks a confirmed one."""
        if parts is not self._writer.parts:
            raise _TablesChanged
        if last < known:
            raise NoReply(
                f"{self._options.name} lacks confirmed batches: its last is {last}, not {known}"
            )

    # --- rows --------------------------------------------------------------------------------

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        return (await self.read_some(ids, NO_LIMIT))[0]

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        wanted = [task_id for task_id in dict.fromkeys(ids) if 0 <= task_id <= ID_MAX]
        if not wanted:
            return {}, ()

        async def read(link: Link) -> tuple[dict[int, StoredTask], Sequence[int]]:
            parts, known = self._writer.parts, self._writer.last
            tasks, unread, last = await read_rows(link, parts, wanted, bytes_max)
            self._check(parts, last, known)
            return tasks, unread

        return await self._trying(read)

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        return await self._page(after_id, limit, topic) if after_id < ID_MAX else []

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        last_id = min(before_id - 1, ID_MAX)
        return await self._page(last_id, limit, topic, back=True) if last_id >= 0 else []

    async def _page(
        self, position: int, limit: int, topic: str | None, *, back: bool = False
    ) -> list[StoredTask]:
        async def read(link: Link) -> list[StoredTask]:
            async with self.snapshot(link) as parts:
                return await read_page(link, parts, position, limit, topic, back=back)

        return await self._trying(read)

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        if after[0] > ID_MAX:
            return []

        async def read(link: Link) -> list[DeadRow]:
            async with self.snapshot(link) as parts:
                return await _read_dead(link, parts, after, limit, topic, group)

        return await self._trying(read)

    # --- a start -----------------------------------------------------------------------------

    async def small(self) -> SmallState:
        async with self._long_snapshot() as (link, parts):
            return await read_small(link, parts, self._options.endings_max)

    @asynccontextmanager
    async def _long_snapshot(self) -> AsyncIterator[tuple[Link, Parts]]:
        """Yield a connection for reads of whole tables, none of which can be dropped before the
        end, and the tables."""
        while True:
            known, link = self._writer.parts, Link(self._options)
            try:
                async with self.snapshot(link, is_long=True) as parts:
                    yield link, parts
                return
            except (_TablesChanged, ServerTrouble) as error:
                # It is outdated only before the tables are locked, so never after the yield.
                if not await self._is_outdated(error, known):
                    raise _failure(error) from error
            finally:
                await link.close()

    async def _is_outdated(self, error: Exception, parts: Parts) -> bool:
        """Return whether a read has failed because it began with these tables. Raise Fenced if a
        successor of this daemon has dropped one of them."""
        if isinstance(error, _TablesChanged):
            return True
        if is_table_dropped(error) and parts is self._writer.parts:
            with suppress(ServerTrouble):
                await self._writer.verify()
        return is_table_dropped(error) and parts is not self._writer.parts

    async def handles(self, chunk: int, now_ms: int, keyed: KeyedTasks) -> AsyncIterator[Handles]:
        """Yield the rows of ``recover_handles``. Add the tasks with a key to ``keyed``. Sorting
        tasks that are due later takes time, so those due soon come from a statement of their
        own."""
        waiting: list[Any] = []
        is_first = True
        async with self._long_snapshot() as (link, parts):
            for late in (False, True):
                statement = handles_statement(parts.shard, parts.numbers, late=late)
                following = await link.cursor(statement, now_ms + SOON_MS)
                while True:
                    rows = await following(chunk - len(waiting))
                    waiting += rows
                    # A small store comes in one chunk.
                    is_over = not rows and (late or not is_first)
                    if waiting and (is_over or len(waiting) == chunk):
                        ids, dues_ms, topics, keys = zip(*waiting, strict=True)
                        keyed.add(ids, topics, keys)
                        yield Handles(ids, dues_ms, topics)
                        waiting = []
                        if is_first:
                            failpoints.hit("recovery.middle")
                            is_first = False
                    if not rows:
                        break

    async def backup(self, path: str) -> int:
        """Write a backup of one snapshot."""
        from tickwheel.persistence.filling import copying, pages

        # The copy may be newer than its identity, never older.
        async with (
            copying(path, self._writer.identity) as filler,
            self._long_snapshot() as (link, parts),
        ):
            small = await read_small(link, parts, self._options.endings_max)
            await filler.write(Effects(ended=dict(small.outcomes)))
            await filler.records(small.records)
            async for page in pages(partial(read_page, link, parts)):
                for task in page:
                    await filler.put(task)
            ((_, filler.id_mark, filler.position_ms),) = await link.fetch(
                SQL["last"].format(at=parts.at)
            )
        return await asyncio.to_thread(os.path.getsize, path)


class KeyedTasks:
    """The tasks with a key that ``handles`` has read."""

    def __init__(self, key_seed: bytes) -> None:
        self._key_hash = KeyHash(key_seed)
        self._ids, self._hashes = array("q"), array("Q")

    def add(self, ids: Sequence[int], topics: Sequence[str], keys: Sequence[bytes | None]) -> None:
        keyed = [(place, key.decode()) for place, key in enumerate(keys) if key is not None]
        if keyed:
            places, texts = zip(*keyed, strict=True)
            self._ids.extend([ids[place] for place in places])
            self._hashes.extend(self._key_hash.of_many([topics[place] for place in places], texts))

    def chunks(self, size: int = 10_000) -> list[Keyed]:
        return [
            Keyed(self._ids[at : at + size], self._hashes[at : at + size])
            for at in range(0, len(self._ids), size)
        ]


def _failure(error: Exception) -> StoreError:
    """Return the error of a read that was not answered, or that PostgreSQL refused."""
    if isinstance(error, ServerError) and error.state not in REFUSING:
        is_unfit = error.state.startswith(UNFIT)
        return StoreError(error.message) if is_unfit else StoreBroken(error.message)
    return StoreAway(str(error))


async def read_rows(
    link: Link, parts: Parts, ids: Sequence[int], bytes_max: int
) -> tuple[dict[int, StoredTask], Sequence[int], int]:
    """Read the first tasks of ``ids`` up to ``bytes_max`` with one statement. Return them, the ids
    that were not read, and the last batch of the snapshot."""
    places = {task_id: place for place, task_id in enumerate(ids)}
    by_part = parts.split(ids)
    numbers = tuple(sorted(by_part)) if len(by_part) <= FEW_PARTS else parts.numbers
    columns: list[object] = []
    for number in numbers:
        part_ids = by_part.get(number, [])
        columns += [part_ids, [places[task_id] for task_id in part_ids]]
    statement = read_statement(parts.shard, parts.generation, numbers)
    rows = await link.fetch(statement, min(bytes_max, NO_LIMIT), *columns)
    tasks: dict[int, TaskRow] = {}
    notes: dict[tuple[int, int, str], tuple[int, bytes | None]] = {}
    last, cut = 0, len(ids)
    for kind, task_id, number, name, key, extras, data in rows:
        if kind == TASK and data is None:
            cut = min(cut, places[task_id])
        elif kind == TASK:
            tasks[task_id] = TaskRow(task_id, number, name, data, options_from(key, extras))
        elif kind == LAST_BATCH:
            last = task_id or 0
        elif number > notes.get((task_id, kind, name), (0, None))[0]:
            notes[task_id, kind, name] = (number, data)
    progress: dict[int, list[ProgressRow]] = {}
    dead: dict[int, list[DeadRow]] = {}
    for (task_id, kind, _), (number, note) in sorted(notes.items()):
        if number <= notes.get((task_id, ENDED, ""), (0, None))[0]:
            continue  # of an earlier task with this id
        if note is not None and kind == PROGRESS:
            progress.setdefault(task_id, []).append(decode_progress(note))
        elif note is not None:
            dead.setdefault(task_id, []).append(decode_dead(note))
    stored = {
        task_id: StoredTask(
            tasks[task_id], tuple(progress.get(task_id, ())), tuple(dead.get(task_id, ()))
        )
        for task_id in ids
        if task_id in tasks
    }
    return stored, ids[cut:], last


async def read_page(
    link: Link, parts: Parts, position: int, limit: int, topic: str | None, *, back: bool = False
) -> list[StoredTask]:
    """Return a page of tasks, as ``Store.scan`` does. Call it inside a snapshot."""
    ids: list[int] = []
    position = max(-1, position)
    for number in parts.upto(position) if back else parts.since(position):
        statement = SQL["ids_back" if back else "ids"].format(at=f"{parts.shard}_{number}")
        rows = await link.fetch(
            statement, position, topic, limit - len(ids), timeout_ms=PAGE_CALL_MS
        )
        ids += [row[0] for row in rows]
        if len(ids) == limit:
            break
    if not ids:
        return []
    page: list[StoredTask] = []
    left_bytes = SCAN_BYTES_MAX
    while ids:
        # PostgreSQL counts bytes as they are stored, which differ from those of ``task_bytes``.
        tasks, unread, _ = await read_rows(link, parts, ids, left_bytes)
        ids = list(unread)
        for task in tasks.values():
            page.append(task)
            left_bytes -= task_bytes(task.row)
            if left_bytes <= 0:
                return page
    return page


async def _read_dead(
    link: Link, parts: Parts, after: ProgressKey, limit: int, topic: str | None, group: str | None
) -> list[DeadRow]:
    """Return a page of dead letters, as ``Store.scan_dead`` does. The topic is in the row."""
    page: list[DeadRow] = []
    task_id, name = after
    for number in parts.since(task_id):
        statement, is_read = SQL["dead"].format(at=f"{parts.shard}_{number}"), False
        count = max(limit - len(page), DEAD_PAGE_MIN)
        while not is_read and len(page) < limit:
            rows = await link.fetch(
                statement, max(-1, task_id), name, group, count, timeout_ms=PAGE_CALL_MS
            )
            dead = [decode_dead(row[0]) for row in rows]
            page += [row for row in dead if topic in (None, row.topic)]
            is_read = len(rows) < count
            if dead:
                task_id, name = dead[-1].id, dead[-1].group
    return page[:limit]


async def read_small(link: Link, parts: Parts, endings_max: int) -> SmallState:
    """Read as ``Store.recover_small`` does, inside a snapshot."""
    small, statement = SmallState(), SQL["records"].format(at=parts.at)
    for number, _, data in await link.fetch(statement, timeout_ms=LONG_CALL_MS):
        kind = kind_of(number)
        row = decode_record(kind, data)
        small.records[kind, kind.key(row)] = row
    for part in parts.numbers:
        statement = SQL["notes"].format(at=f"{parts.shard}_{part}")
        for number, data in await link.fetch(statement, timeout_ms=LONG_CALL_MS):
            if number == DEAD:
                dead = decode_dead(data)
                small.dead.append((dead.id, dead.group, dead.topic))
            else:
                small.progress.append(decode_progress(data))
    for (data,) in await link.fetch(SQL["outcomes"].format(at=parts.at), endings_max):
        small.outcomes += decode_endings(data)
    del small.outcomes[:-endings_max]
    return small
