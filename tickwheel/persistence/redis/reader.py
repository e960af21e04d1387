"""Reading from Redis beside the writer: rows by id, pages, and what a start needs.

On a line of its own, so that reads do not wait for batches. Every script says what it has to
see at least (incarnation, last confirmed batch); when Redis does not hold that, the writer is
asked to set it right before the read is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tickwheel import failpoints
from tickwheel.persistence.codec import (
    decode_dead,
    decode_endings,
    decode_group,
    decode_progress,
    decode_session,
    decode_task,
)
from tickwheel.persistence.redis.drivers import Answer, Argument, Away, Lost
from tickwheel.persistence.redis.ids import IdIndex
from tickwheel.persistence.redis.layout import ID_MAX, Keys, id_text, member, split_member
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.lua import Script
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.scripts_read import DEAD_PAGE, HANDLES, READ
from tickwheel.persistence.redis.writer import REFUSING, Writer
from tickwheel.persistence.store import Handles, Small, StoreAway, StoreBroken, StoredTask
from tickwheel.wheel.effects import ProgressKey
from tickwheel.wheel.records import DeadRow, Ending

IDS_A_SCRIPT = 500
BYTES_A_SCRIPT = 8 << 20
ROWS_A_SCAN = 500
IDS_A_SCAN = 5_000
PAGE_MAX = 1_000
TRIES = 3
PAUSE_S = 0.25


class Reader:
    """See the module's text."""

    def __init__(self, line: Line, keys: Keys, options: RedisOptions, writer: Writer) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._writer = writer
        self._index = IdIndex()
        self._recovering: list[set[int]] = []

    def committed(self, enqueued: Sequence[int] | dict[int, Any]) -> None:
        """New tasks were committed: listings under way have to know, recoveries must not."""
        self._index.add(enqueued)
        for seen in self._recovering:
            seen.update(enqueued)

    # --- rows --------------------------------------------------------------------------------

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """See ``Store.read``. More than one script reads with commits held up."""
        wanted = [task_id for task_id in dict.fromkeys(ids) if 0 <= task_id <= ID_MAX]
        found: dict[int, StoredTask] = {}
        if not wanted:
            return found
        rest = await self._some(found, wanted)
        if rest:
            async with self._writer.lock:
                found.clear()
                rest = wanted
                while rest:
                    rest = await self._some(found, rest, locked=True)
        return found

    async def _some(
        self, found: dict[int, StoredTask], ids: list[int], *, locked: bool = False
    ) -> list[int]:
        """Read some of ``ids`` into ``found``; the ones that are left."""
        some = ids[:IDS_A_SCRIPT]
        args: list[Argument] = [BYTES_A_SCRIPT, *map(id_text, some)]
        tasks, rows = await self._script(READ, args, locked=locked)
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
        """See ``Store.scan``; the first page of a listing reads all ids once."""
        found: list[StoredTask] = []
        while len(found) < limit and after_id < ID_MAX:
            ids = self._index.after(after_id, PAGE_MAX)
            if ids is None:
                await self._load_index()
                continue
            if not ids:
                break
            if topic is None:
                ids = ids[: limit - len(found)]
            stored = await self.read(ids)
            after_id = ids[-1]
            tasks = (stored[task_id] for task_id in ids if task_id in stored)
            found += [task for task in tasks if topic in (None, task.row.topic)]
        return found[:limit]

    async def _load_index(self) -> None:
        await self._look()
        with self._index.loading() as ids:
            async for name, _ in self._pairs("ZSCAN", "store", IDS_A_SCAN):
                ids.append(int(name))

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        if after[0] > ID_MAX:
            return []
        start = b"(" + member(*after) if after[0] >= 0 else b"-"
        found: list[DeadRow] = []
        while len(found) < limit:
            names, records = await self._script(DEAD_PAGE, (start, PAGE_MAX))
            rows = map(decode_dead, records)
            found += [
                row for row in rows if topic in (None, row.topic) and group in (None, row.group)
            ]
            if len(names) < PAGE_MAX:
                break
            start = b"(" + names[-1]
        return found[:limit]

    # --- recovery ----------------------------------------------------------------------------

    async def small(self) -> Small:
        await self._look()
        dead = [
            (row.id, row.group, row.topic)
            async for _, record in self._pairs("HSCAN", "dead_record", ROWS_A_SCAN)
            for row in (decode_dead(record),)
        ]
        # A scan may show a row twice.
        return Small(
            groups=await self._rows("groups", decode_group),
            sessions=await self._rows("sessions", decode_session),
            progress=await self._rows("progress", decode_progress),
            dead=sorted(set(dead)),
            endings=await self._endings(),
        )

    async def _rows(self, name: str, decode: Callable[[bytes], Any]) -> list[Any]:
        found = {key: record async for key, record in self._pairs("HSCAN", name, ROWS_A_SCAN)}
        return [decode(record) for record in found.values()]

    async def _endings(self) -> list[tuple[int, Ending]]:
        found: list[tuple[int, Ending]] = []
        for item in await self._call("LRANGE", self._keys.named["endings"], 0, -1):
            found += decode_endings(item.partition(b":")[2])
        return found[-self._options.endings_max :]

    async def handles(self, chunk: int) -> AsyncIterator[Handles]:
        """See ``Store.recover_handles``. Tasks committed meanwhile are left out."""
        score, name = b"", b""
        topics: dict[bytes, str] = {}
        fresh: set[int] = set()
        self._recovering.append(fresh)
        first = True
        try:
            while True:
                pairs, texts = await self._script(HANDLES, (score, name, chunk))
                pairs = pairs[: 2 * len(texts)]
                if not pairs:
                    return
                name, score = pairs[-2], pairs[-1]
                ids, dues_ms = list(map(int, pairs[::2])), list(map(int, pairs[1::2]))
                for text in set(texts):
                    topics.setdefault(text, text.decode())
                named = [topics[text] for text in texts]
                if fresh:
                    kept = [i for i, task_id in enumerate(ids) if task_id not in fresh]
                    ids, dues_ms = [ids[i] for i in kept], [dues_ms[i] for i in kept]
                    named = [named[i] for i in kept]
                if ids:
                    yield Handles(ids=ids, dues_ms=dues_ms, topics=named)
                if first:
                    failpoints.hit("recovery.middle")
                    first = False
        finally:
            self._recovering.remove(fresh)

    # --- calls -------------------------------------------------------------------------------

    async def _pairs(
        self, command: str, name: str, count: int
    ) -> AsyncIterator[tuple[bytes, bytes]]:
        """Fields and values of a hash, or members and scores; one may come twice."""
        cursor = b"0"
        while True:
            key = self._keys.named[name]
            cursor, items = await self._call(command, key, cursor, "COUNT", count)
            for pair in zip(items[::2], items[1::2], strict=True):
                yield pair
            if cursor == b"0":
                return

    async def _script(
        self, script: Script, args: Sequence[Argument], *, locked: bool = False
    ) -> tuple[Any, Any]:
        """Both lists of the reply, when Redis holds what was confirmed."""
        for attempt in range(TRIES):
            if self._writer.staged and not locked:
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

    async def _look(self) -> None:
        """Before commands that do not look themselves: what was confirmed is there, and whole."""
        await self._script(READ, (BYTES_A_SCRIPT,))

    async def _set_right(self) -> None:
        """Let the writer look again: it replays, or raises StoreBehind, StoreLost, Fenced."""
        try:
            await self._writer.verify()
        except (Away, Lost, Answer) as error:
            raise StoreAway(error.message) from error

    async def _call(self, *args: Argument) -> Any:
        return await self._trying(self._line.call, *args)

    async def _trying(self, call: Callable[..., Any], *args: Any) -> Any:
        """Reads change nothing, so a broken connection is tried again a few times."""
        for attempt in range(TRIES):
            try:
                return await call(*args)
            except (Away, Lost, Answer) as error:
                if isinstance(error, Answer) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if attempt == TRIES - 1:
                    raise StoreAway(error.message) from error
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("unreachable")
