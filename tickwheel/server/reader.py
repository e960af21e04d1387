"""What is recorded of a task *now*: the store's word, overlaid with what is not committed yet.

A read runs beside commits. Effects are absolute and idempotent, so laying every batch that was
not durable when the read began over its result, in order, gives the present state whatever
part of them the read has seen. Batches that land during a read are kept until it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from tickwheel.persistence.store import Store, StoreAway, StoredTask, is_cut
from tickwheel.wheel.control import Known
from tickwheel.wheel.core import Core
from tickwheel.wheel.effects import Effects, ProgressKey

AWAY_RETRY_S = 0.2
SCANS_AT_A_TIME = 4
"""Each may bring a page of many bytes: listings, and groups that begin in the past."""
View = Callable[[Sequence[int]], dict[int, Known]]


class Reader:
    """Reads for the engine. Use a result before the next await."""

    def __init__(self, core: Core, store: Store) -> None:
        self._core = core
        self._store = store
        self._reading = 0
        self._scans = asyncio.Semaphore(SCANS_AT_A_TIME)
        self._landed_meanwhile: list[Effects] = []

    def landed(self, effects: Effects) -> None:
        """A batch is durable: reads under way may or may not have seen it."""
        if self._reading:
            self._landed_meanwhile.append(effects)

    async def known(self, ids: Sequence[int]) -> dict[int, Known]:
        """The records of those of ``ids`` that exist now."""
        async with self.read(ids) as view:
            return view(ids)

    @asynccontextmanager
    async def read(self, ids: Sequence[int]) -> AsyncIterator[View]:
        """Read once, look several times: the view given shows any of ``ids`` as of its call,
        with the effects of what was commanded meanwhile."""
        self._reading += 1
        try:
            stored = await self._read(ids) if ids else {}
            yield lambda some: self._overlay([stored[i] for i in some if i in stored], some)
        finally:
            self._done()

    @asynccontextmanager
    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> AsyncIterator[tuple[View, Sequence[int]]]:
        """``read`` of the first of ``ids``, until their rows reach ``bytes_max``; the others are
        given beside the view, for another read."""
        self._reading += 1
        try:
            stored, rest = await self._read_some(ids, bytes_max) if ids else ({}, ())
            yield lambda some: self._overlay([stored[i] for i in some if i in stored], some), rest
        finally:
            self._done()

    async def _read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        while True:
            try:
                return await self._store.read_some(ids, bytes_max)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    async def _read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        """While the store is away, commands and tasks that are due wait for it."""
        while True:
            try:
                return await self._store.read(ids)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    async def scan(
        self, after_id: int, limit: int, topic: str | None, *, back: bool = False
    ) -> tuple[list[Known], int | None]:
        """A page of tasks by id, and the id to go on after (None: this was the last page).

        ``back``: those below ``after_id``, the highest first.
        """
        scan = self._store.scan_back if back else self._store.scan
        self._reading += 1
        try:
            async with self._scans:
                stored = await scan(after_id, limit, topic)
            ids = [task.row.id for task in stored]
            found = self._overlay(stored, ids)
            following = ids[-1] if len(ids) >= limit or is_cut(stored) else None
            return [found[i] for i in ids if i in found], following
        finally:
            self._done()

    def _done(self) -> None:
        self._reading -= 1
        if not self._reading:
            self._landed_meanwhile.clear()

    def _overlay(self, stored: Iterable[StoredTask], ids: Iterable[int]) -> dict[int, Known]:
        found = {
            task.row.id: Known(
                task.row, {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
            )
            for task in stored
            # The store may be a step ahead: a task whose batch has not landed here is unseen.
            if task.row.id <= self._core.landed_id
        }
        wanted = frozenset(ids)
        for effects in self._landed_meanwhile:
            for task_id in wanted & effects.enqueued.keys():
                found.setdefault(task_id, Known(effects.enqueued[task_id], {}, {}))
            self._lay_over(found, wanted, effects)
        if self._core.sealed is not None:
            self._lay_over(found, wanted, self._core.sealed.effects)
        self._lay_over(found, wanted, self._core.open.effects)
        return found

    def _lay_over(self, found: dict[int, Known], wanted: frozenset[int], effects: Effects) -> None:
        """Apply one batch to records already found; tasks that are only staged stay unseen."""
        for task_id in wanted & effects.updated.keys():
            if task_id in found:
                found[task_id] = found[task_id]._replace(row=effects.updated[task_id])
        if effects.progress or effects.dead:
            for task_id, known in found.items():
                topic = self._core.topics.get(known.row.topic)
                for group in topic.groups if topic is not None else ():
                    known = _with_group(known, (task_id, group), effects)
                found[task_id] = known
        for task_id in wanted & effects.ended.keys():
            found.pop(task_id, None)


def _with_group(known: Known, key: ProgressKey, effects: Effects) -> Known:
    if key in effects.progress:
        rows = {g: p for g, p in known.progress.items() if g != key[1]}
        progress = effects.progress[key]
        if progress is not None:
            rows[key[1]] = progress
        known = known._replace(progress=rows)
    if key in effects.dead:
        letters = {g: d for g, d in known.dead.items() if g != key[1]}
        dead = effects.dead[key]
        if dead is not None:
            letters[key[1]] = dead
        known = known._replace(dead=letters)
    return known
