"""What is recorded of a task *now*: the store's word, overlaid with what is not committed yet.

A read runs beside commits. Effects are absolute and idempotent, so laying every batch that was
not durable when the read began over its result, in order, gives the present state whatever
part of them the read has seen. Each read under way notes what batches that land say of the ids
it asked for, and nothing else: its notes are bounded by these ids, and end with it.

This is also where a row that must be there and is not is noticed, for everybody who reads. A task
that memory holds has not ended, so a read without its row is wrong: the row is read again a few
times, and if it stays away that is logged, counted and told by ``/readyz``, and whoever asked
for it is told that it is missing, never that it has left. Invariant: of ``ids`` that were read,
those that are neither found nor in ``Core.missing`` have left, as far as memory can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from tickwheel.engine.state import Core
from tickwheel.engine.tasks import Known
from tickwheel.model.effects import Effects, ProgressKey
from tickwheel.persistence.store import Store, StoreAway, StoredTask, is_cut

AWAY_RETRY_S = 0.2
READS_MAX = 64
"""Reads under way: others wait for one of them to end, because each batch that lands is looked
through by all of them."""
SCANS_AT_A_TIME = 4
"""Each may bring a page of many bytes: listings, and groups that begin in the past."""
READS_AGAIN_MAX = 4
"""How often rows that must be there are read again before they are called missing."""
AGAIN_S = 0.05
IDS_LOGGED_MAX = 10
NO_LIMIT = 1 << 62

View = Callable[[Sequence[int]], dict[int, Known]]
Notice = Callable[[str, str], None]


class _UnderWay:
    """One read, and what landed since it began of the tasks that it asked for."""

    __slots__ = ("since", "wanted")

    def __init__(self, ids: Iterable[int]) -> None:
        self.wanted = frozenset(ids)
        self.since = Effects()

    def landed(self, effects: Effects) -> None:
        """Maps hold the last state, so that many batches come to one."""
        wanted, since = self.wanted, self.since
        for task_id in wanted & effects.enqueued.keys():
            since.enqueued[task_id] = effects.enqueued[task_id]
        for task_id in wanted & effects.updated.keys():
            since.updated[task_id] = effects.updated[task_id]
        for task_id in wanted & effects.ended.keys():
            since.ended[task_id] = effects.ended[task_id]
        since.progress |= {k: row for k, row in effects.progress.items() if k[0] in wanted}
        since.dead |= {k: row for k, row in effects.dead.items() if k[0] in wanted}


class Reader:
    """Reads for the engine. Use a result before the next await."""

    def __init__(
        self, core: Core, store: Store, noticed: Notice = lambda event, text: None
    ) -> None:
        self._core = core
        self._store = store
        self._noticed = noticed
        self._under_way: set[_UnderWay] = set()
        self._places = asyncio.Semaphore(READS_MAX)
        self._scans = asyncio.Semaphore(SCANS_AT_A_TIME)

    def landed(self, effects: Effects) -> None:
        """A batch is durable: reads under way may or may not have seen it."""
        for read in self._under_way:
            read.landed(effects)

    async def known(self, ids: Sequence[int]) -> dict[int, Known]:
        """The records of those of ``ids`` that exist now."""
        async with self.read(ids) as view:
            return view(ids)

    @asynccontextmanager
    async def read(self, ids: Sequence[int]) -> AsyncIterator[View]:
        """Read once, look several times: the view given shows any of ``ids`` as of its call,
        with the effects of what was commanded meanwhile."""
        async with self.read_some(ids, NO_LIMIT) as (view, _):
            yield view

    @asynccontextmanager
    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> AsyncIterator[tuple[View, Sequence[int]]]:
        """``read`` of the first of ``ids``, which are distinct, until their rows reach
        ``bytes_max``; the others are given beside the view, for another read."""
        async with self._reading(ids) as read:
            stored, rest = await self._stored(ids, bytes_max) if ids else ({}, ())
            rest = await self._look_again(read, stored, ids, rest, bytes_max)
            yield (
                lambda some: self._overlay(read, [stored[i] for i in some if i in stored], some),
                rest,
            )

    async def scan(
        self, after_id: int, limit: int, topic: str | None, *, back: bool = False
    ) -> tuple[list[Known], int | None]:
        """A page of tasks by id, and the id to go on after (None: this was the last page).

        ``back``: those below ``after_id``, the highest first. Which tasks these are is known only
        when the store has answered, so what landed meanwhile is not noted: they are read again by
        their ids.
        """
        scan = self._store.scan_back if back else self._store.scan
        async with self._scans:
            stored = await scan(after_id, limit, topic)
            ids = [task.row.id for task in stored]
            following = ids[-1] if len(ids) >= limit or is_cut(stored) else None
            del stored  # the bodies of a page are here once
            found = await self.known(ids)
        return [found[i] for i in ids if i in found], following

    @asynccontextmanager
    async def _reading(self, ids: Iterable[int]) -> AsyncIterator[_UnderWay]:
        read = _UnderWay(ids)
        async with self._places:
            self._under_way.add(read)
            try:
                yield read
            finally:
                self._under_way.remove(read)

    async def _stored(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """While the store is away, commands and tasks that are due wait for it."""
        while True:
            try:
                if bytes_max == NO_LIMIT:
                    return await self._store.read(ids), ()
                return await self._store.read_some(ids, bytes_max)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    # --- rows that are missing -------------------------------------------------------------------

    async def _look_again(
        self,
        read: _UnderWay,
        stored: dict[int, StoredTask],
        ids: Sequence[int],
        rest: Sequence[int],
        bytes_max: int,
    ) -> Sequence[int]:
        """Add to ``stored`` what must be there and was not found at first, and note what is
        missing; the ids that are left then."""
        asked = ids[: len(ids) - len(rest)]
        absent = self._unexplained(read, set(asked) - stored.keys())
        # Of some of these only the store could say that they have not ended: once more for all.
        turn = 0
        while absent and turn <= READS_AGAIN_MAX:
            if turn:
                await asyncio.sleep(AGAIN_S)
            wanted = [task_id for task_id in asked if task_id in absent]
            found, left = await self._stored(wanted, bytes_max)
            stored |= found
            if left:  # all that come after the first of them wait for another read
                asked = asked[: asked.index(left[0])]
                for task_id in stored.keys() - set(asked):
                    del stored[task_id]
            turn += 1
            absent = self._core.held(self._unexplained(read, set(asked) - stored.keys()))
            absent -= self._core.missing.keys()
        if absent or self._core.missing:
            here = set(asked)
            self._note(here, self._core.held(self._unexplained(read, here - stored.keys())))
        return ids[len(asked) :]

    def _unexplained(self, read: _UnderWay, absent: set[int]) -> set[int]:
        """Those of them that exist or are long forgotten, as far as is known without the store."""
        core = self._core
        return {
            task_id
            for task_id in absent
            if core.was_assigned(task_id)
            and task_id not in read.since.enqueued
            and task_id not in read.since.ended
            and core.endings.get(task_id) is None
        }

    def _note(self, asked: set[int], absent: set[int]) -> None:
        missing = self._core.missing
        again = (asked & missing.keys()) - absent
        for task_id in again:
            del missing[task_id]
        if again:
            self._noticed("rows_found_again", _told(again, "are there again, or have ended"))
        fresh = absent - missing.keys()
        if fresh:
            missing.update(dict.fromkeys(fresh))
            self._core.totals.rows_missing += len(fresh)
            why = "have not ended, and the store does not have their rows; they wait for them"
            self._noticed("rows_missing", _told(fresh, why))

    def missing(self, ids: Iterable[int]) -> list[int]:
        """Those of ``ids`` of which the last read that asked for them found no row, though they
        have not ended."""
        missing = self._core.missing
        return [task_id for task_id in ids if task_id in missing] if missing else []

    # --- what is not committed yet ---------------------------------------------------------------

    def _overlay(
        self, read: _UnderWay, stored: Iterable[StoredTask], ids: Iterable[int]
    ) -> dict[int, Known]:
        found = {
            task.row.id: Known(
                task.row, {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
            )
            for task in stored
            # The store may be a step ahead: a task whose batch has not landed here is unseen.
            if task.row.id <= self._core.landed_id
        }
        wanted = frozenset(ids)
        for task_id in wanted & read.since.enqueued.keys():
            found.setdefault(task_id, Known(read.since.enqueued[task_id], {}, {}))
        self._lay_over(found, wanted, read.since)
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


def _told(ids: set[int], what: str) -> str:
    named = ", ".join(map(str, sorted(ids)[:IDS_LOGGED_MAX]))
    more = f" and {len(ids) - IDS_LOGGED_MAX} more" if len(ids) > IDS_LOGGED_MAX else ""
    return f"{len(ids)} tasks {what}: {named}{more}"


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
