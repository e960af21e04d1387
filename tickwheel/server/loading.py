"""Rows that are not in memory when their time has come: read, and handed to the engine.

One load is under way at a time, and it is bounded in rows and in bytes: that is what may be in
memory beside the budget. Rows that are missing in the store (see ``reader``) are looked for again
and again, at a bounded pace, until they are found or their tasks have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.engine.tasks import Known
from tickwheel.engine.topics import Group
from tickwheel.server.reader import Reader

ROWS_PER_LOAD = 1_000
LOAD_BYTES_MAX = 8 << 20
LOAD_BYTES_MIN = 1 << 20
LOAD_SHARE = 8
"""A load is an eighth of ``resident_bytes_max``, within the two above."""
MISSING_RETRY_S = 1.0
MISSING_PER_ROUND = 1_000


def load_bytes(resident_bytes_max: int) -> int:
    """Bodies of one load, about; the last one may be larger."""
    return max(LOAD_BYTES_MIN, min(LOAD_BYTES_MAX, resident_bytes_max // LOAD_SHARE))


class Loader:
    """``load`` takes over whatever the engine wants; each load asks for a pulse. What is wanted
    while a load is under way is in the next one, whoever wants it."""

    def __init__(
        self,
        engine: Engine,
        reader: Reader,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        poke: Callable[[], None],
    ) -> None:
        self._core = engine.core
        self._delivery = engine.delivery
        self._reader = reader
        self._clock = clock
        self._spawn = spawn
        self._poke = poke
        self._bytes_max = load_bytes(self._core.config.resident_bytes_max)
        self._turn = asyncio.Lock()
        self._loads = self._looks = False
        self._due: list[int] = []
        self._over: list[int] = []
        """Their ttl is."""
        self._ready: dict[Group, list[int]] = {}
        """The group that was served longest ago first."""

    @property
    def reads_most(self) -> bool:
        """As many rows are being read for firing as may be: firing waits for them."""
        core = self._core
        return len(core.firing) >= core.config.loading_max + core.missing_apart

    def load(self) -> None:
        core = self._core
        if core.missing and not self._looks:
            self._looks = True
            self._spawn(self._look_for_missing())
        if not (core.wants or core.wants_lapsed or core.wants_ready):
            return
        self._due += core.wants
        self._over += core.wants_lapsed
        for group, ids in core.wants_ready.items():
            self._ready.setdefault(group, []).extend(ids)
        core.wants, core.wants_lapsed, core.wants_ready = [], [], {}
        if not self._loads:
            self._loads = True
            self._spawn(self._load())

    async def _load(self) -> None:
        while self._due or self._over or self._ready:
            await self._load_some()
        self._loads = False

    async def _load_some(self) -> None:
        """One load: what is due or over first, but groups get half of it."""
        share = ROWS_PER_LOAD // 2 if self._ready else ROWS_PER_LOAD
        due, self._due = self._due[:share], self._due[share:]
        share -= len(due)
        over, self._over = self._over[:share], self._over[share:]
        room, parts = ROWS_PER_LOAD - len(due) - len(over), list[tuple[Group, list[int]]]()
        for group in list(self._ready):
            ids = self._ready.pop(group)
            if len(ids) > room:
                self._ready = {group: ids[room:], **self._ready}
            parts.append((group, ids[:room]))
            room -= len(ids)
            if room <= 0:
                break
        known, left = await self._next([*due, *over, *(i for _, ids in parts for i in ids)])
        now_ms = self._clock.read().now_ms
        rows = {task_id: found.row for task_id, found in known.items()}
        self._due = [*(i for i in due if i in left), *self._due]
        self._over = [*(i for i in over if i in left), *self._over]
        self._delivery.loaded([i for i in due if i not in left], rows, now_ms)
        self._delivery.lapsed([i for i in over if i not in left], known, now_ms)
        for group, ids in parts:
            self._delivery.loaded_ready(group, [i for i in ids if i not in left], rows)
        del known, rows
        await self._let_go()
        for group, ids in parts:
            self._load_more(group, [i for i in ids if i in left])

    def _load_more(self, group: Group, ids: list[int]) -> None:
        """As many rows as can be delivered or kept: what came last may have changed how many
        these are."""
        ids += self._ready.pop(group, ())
        if not ids:
            return
        if group.is_held or not (group.credit_up_to(1) or self._core.reads_ahead):
            self._delivery.not_loaded(group, ids)
        else:
            self._ready[group] = ids

    async def _next(self, ids: list[int]) -> tuple[dict[int, Known], set[int]]:
        """The records of those that a load has room for, and the ids that are left."""
        wanted = list(dict.fromkeys(ids))
        async with self._turn, self._reader.read_some(wanted, self._bytes_max) as (view, left):
            return view(wanted[: len(wanted) - len(left)]), set(left)

    async def _let_go(self) -> None:
        """What was loaded leaves with the next pulse, before more is loaded."""
        self._poke()
        await asyncio.sleep(0)

    async def _look_for_missing(self) -> None:
        """Some of them at a time, those that were looked for last at the end."""
        missing = self._core.missing
        while missing:
            await asyncio.sleep(MISSING_RETRY_S)
            ids = list(islice(missing, MISSING_PER_ROUND))
            known, left = await self._next(ids)
            for found in known.values():
                self._delivery.found_again(found, self._clock.read().now_ms)
            for task_id in ids:
                if task_id in missing and task_id not in left:
                    del missing[task_id]
                    missing[task_id] = None
            await self._let_go()
        self._looks = False
