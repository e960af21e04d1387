"""The reference store, which implements the contract with dictionaries only.

It passes the same conformance suite as every other store. Its data survives ``close`` and ``open``
of the same object, but not the process: it is for tests, models and experiments. No call awaits
between two rows, so every call returns a snapshot.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from tickwheel import failpoints
from tickwheel.model.key_hash import SEED_BYTES, KeyHash
from tickwheel.model.kinds import Effects, ProgressKey, RecordKey
from tickwheel.model.records import (
    NO_BODY,
    DeadRow,
    Outcome,
    ProgressRow,
    TaskRow,
    is_key_alone,
    task_bytes,
)
from tickwheel.persistence.contract import (
    SCAN_BYTES_MAX,
    CommitRefused,
    Evidence,
    Fenced,
    Handles,
    Heads,
    Keyed,
    Opened,
    SmallState,
    StoreBroken,
    StoredTask,
)
from tickwheel.persistence.identity import EpochRecord, StoreIdentity, mark_of

ENDINGS_MAX = 100_000

_R = TypeVar("_R")


class MemoryStore:
    """The reference store, in memory: see ``contract.Store``."""

    def __init__(self, endings_max: int = ENDINGS_MAX) -> None:
        self._tasks: dict[int, TaskRow] = {}
        # Ascending ids. Ids of ended tasks are removed once they make up more than half of the
        # list.
        self._ids: list[int] = []
        self._progress: dict[int, dict[str, ProgressRow]] = {}
        self._dead: dict[int, dict[str, DeadRow]] = {}
        self._records: dict[RecordKey, Any] = {}
        self._endings: deque[tuple[int, Outcome]] = deque(maxlen=endings_max)
        self._key_seed = secrets.token_bytes(SEED_BYTES)
        self._epoch = 0
        self._owner = ""
        self._last_batch = 0
        self._id_mark = 0
        self._position_ms = 0
        self._clean = True
        self._is_open = False

    def copy(self) -> MemoryStore:
        """Return an independent, closed store with the same data. Rows are immutable and shared."""
        copy = MemoryStore(self._endings.maxlen or 0)
        copy._tasks = dict(self._tasks)
        copy._ids = list(self._ids)
        copy._progress = {task_id: dict(rows) for task_id, rows in self._progress.items()}
        copy._dead = {task_id: dict(rows) for task_id, rows in self._dead.items()}
        copy._records = dict(self._records)
        copy._endings.extend(self._endings)
        copy._key_seed = self._key_seed
        copy._epoch = self._epoch
        copy._owner = self._owner
        copy._last_batch = self._last_batch
        copy._id_mark = self._id_mark
        copy._position_ms = self._position_ms
        copy._clean = self._clean
        return copy

    @property
    def rows(self) -> Iterable[TaskRow]:
        """The rows of all tasks."""
        return self._tasks.values()

    @property
    def durability(self) -> str:
        """See ``Store.durability``."""
        return "kept in memory: nothing survives the end of the daemon"

    async def open(
        self, owner: str, now_ms: int, *, epoch_min: int = 1, evidence: Sequence[Evidence] = ()
    ) -> Opened:
        created = self._epoch == 0
        clean = self._clean
        # A history may contain epochs of earlier memory stores, whose loss is normal.
        self._epoch = max(self._epoch + 1, epoch_min, *(fact.epoch + 1 for fact in evidence))
        self._owner = owner
        self._clean = False
        self._is_open = True
        return Opened(
            epoch=self._epoch,
            last_batch=self._last_batch,
            id_mark=self._id_mark,
            position_ms=self._position_ms,
            clean=clean,
            created=created,
            key_seed=self._key_seed,
            mark=mark_of(owner),
        )

    async def recover_small(self) -> SmallState:
        self._check_open()
        return SmallState(
            records=dict(self._records),
            progress=[row for rows in self._progress.values() for row in rows.values()],
            dead=[
                (row.id, row.group, row.topic)
                for rows in self._dead.values()
                for row in rows.values()
            ],
            outcomes=list(self._endings),
        )

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        self._check_open()
        ordered = sorted((row.due_ms, row.id, row.topic) for row in self._tasks.values())
        for start in range(0, len(ordered), chunk):
            dues_ms, ids, topics = zip(*ordered[start : start + chunk], strict=True)
            yield Handles(ids=ids, dues_ms=dues_ms, topics=topics)
            if start == 0:
                failpoints.hit("recovery.middle")

    async def recover_keys(self) -> AsyncIterator[Keyed]:
        self._check_open()
        hashes = KeyHash(self._key_seed).of_rows(self._tasks.values())
        yield Keyed(list(hashes), list(hashes.values()))

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        self._check_open()
        if (epoch, owner) != (self._epoch, self._owner):
            raise Fenced(
                f"epoch {epoch} of {owner!r} ended: epoch {self._epoch} of {self._owner!r} began"
            )
        if n <= self._last_batch:
            return False
        if n != self._last_batch + 1:
            raise CommitRefused(f"batch {n} does not follow batch {self._last_batch}")
        twice = effects.enqueued.keys() & self._tasks.keys()
        if twice:
            raise StoreBroken(f"id {min(twice)} was assigned twice")
        self._apply(effects)
        self._last_batch = n
        return True

    def _apply(self, effects: Effects) -> None:
        self._tasks |= effects.enqueued
        for task_id in effects.enqueued:
            self._add_id(task_id)
        for task_id, row in effects.updated.items():
            if row.body is NO_BODY:
                row = row._replace(body=self._tasks[task_id].body)
            self._tasks[task_id] = row
        for task_id, due_ms in effects.moved.items():
            self._tasks[task_id] = self._tasks[task_id]._replace(due_ms=due_ms)
        for task_id, outcome in effects.ended.items():
            self._tasks.pop(task_id, None)
            self._progress.pop(task_id, None)
            self._dead.pop(task_id, None)
            self._endings.append((task_id, outcome))
        if len(self._ids) > 2 * len(self._tasks):
            self._ids = sorted(self._tasks)
        _change_rows(self._progress, effects.progress.items())
        _change_rows(self._dead, effects.dead.items())
        for key, record in effects.records.items():
            if record is None:
                self._records.pop(key, None)
            else:
                self._records[key] = record
        self._id_mark = max(self._id_mark, effects.id_mark)
        self._position_ms = effects.position_ms

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        self._check_open()
        return {i: self._stored(self._tasks[i]) for i in ids if i in self._tasks}

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        self._check_open()
        tasks: dict[int, StoredTask] = {}
        size = 0
        for index, task_id in enumerate(ids):
            if size >= bytes_max:
                return tasks, ids[index:]
            if task_id in self._tasks:
                tasks[task_id] = self._stored(self._tasks[task_id])
                size += task_bytes(tasks[task_id].row)
        return tasks, ()

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        tasks, unread = await self.read_some(ids, bytes_max)
        heads = Heads()
        for task_id, task in tasks.items():
            row = task.row
            if row.options is not None and not is_key_alone(row.options):
                heads.others[task_id] = task
            elif task.progress or task.dead:
                heads.others[task_id] = task._replace(row=row._replace(body=NO_BODY))
            else:
                heads.plain.setdefault(row.topic, {})[task_id] = row.due_ms
                if row.options is not None and row.options.key is not None:
                    heads.keys[task_id] = row.options.key
        return heads, unread

    def _add_id(self, task_id: int) -> None:
        ids = self._ids
        if not ids or task_id > ids[-1]:
            ids.append(task_id)
            return
        index = bisect.bisect_left(ids, task_id)
        if ids[index] != task_id:  # an ended task's id can still be in the list
            ids.insert(index, task_id)

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        start = bisect.bisect_right(self._ids, after_id)
        return await self._page(range(start, len(self._ids)), limit, topic)

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        end = bisect.bisect_left(self._ids, before_id)
        return await self._page(range(end - 1, -1, -1), limit, topic)

    async def _page(self, indexes: range, limit: int, topic: str | None) -> list[StoredTask]:
        """Return the first ``limit`` stored tasks of the topic at these indexes of ``_ids``."""
        self._check_open()
        ids = map(self._ids.__getitem__, indexes)
        rows = (self._tasks[task_id] for task_id in ids if task_id in self._tasks)
        matching = (row.id for row in rows if topic in (None, row.topic))
        page, _ = await self.read_some(list(islice(matching, limit)), SCAN_BYTES_MAX)
        return list(page.values())

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        self._check_open()
        return heapq.nsmallest(
            limit,
            (
                row
                for rows in self._dead.values()
                for row in rows.values()
                if (row.id, row.group) > after
                and topic in (None, row.topic)
                and group in (None, row.group)
            ),
            key=lambda row: (row.id, row.group),
        )

    async def backup(self, path: str) -> int:
        """Copy the data to a SQLite database, which a daemon can open as its store."""
        self._check_open()
        from tickwheel.persistence.filling import copying

        last = EpochRecord(self._epoch, mark_of(self._owner), self._last_batch)
        async with copying(path, StoreIdentity(last, "memory")) as filler:
            filler.id_mark, filler.position_ms = self._id_mark, self._position_ms
            await filler.write(self._all_effects())
        return await asyncio.to_thread(os.path.getsize, path)

    def _all_effects(self) -> Effects:
        return Effects(
            enqueued=dict(self._tasks),
            ended=dict(self._endings),
            progress={
                (r.id, r.group): r for rows in self._progress.values() for r in rows.values()
            },
            dead={(r.id, r.group): r for rows in self._dead.values() for r in rows.values()},
            records=dict(self._records),
        )

    async def probe_room(self) -> bool:
        return True

    async def verify(self) -> None:
        """Return at once, because only this process changes the store."""

    async def close(self, clean: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._clean = clean

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreBroken("the store is not open")

    def _stored(self, row: TaskRow) -> StoredTask:
        progress = self._progress.get(row.id, {})
        dead = self._dead.get(row.id, {})
        return StoredTask(
            row,
            tuple(progress[group] for group in sorted(progress)),
            tuple(dead[group] for group in sorted(dead)),
        )


def _change_rows(
    rows: dict[int, dict[str, _R]], changes: Iterable[tuple[ProgressKey, _R | None]]
) -> None:
    for (task_id, group), row in changes:
        if row is not None:
            rows.setdefault(task_id, {})[group] = row
        elif task_id in rows:
            rows[task_id].pop(group, None)
            if not rows[task_id]:
                del rows[task_id]
