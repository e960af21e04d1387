"""Rows that are not in memory when their time has come: read, and handed to the engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tickwheel.clock import Clock
from tickwheel.server.reader import Reader
from tickwheel.wheel.engine import Engine
from tickwheel.wheel.groups import Group
from tickwheel.wheel.records import TaskRow

ROWS_PER_LOAD = 1_000
"""Rows of one read: so many bodies may be in memory beside the budget."""


class Loader:
    """``load`` starts reads for whatever the engine wants; each end asks for a pulse."""

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

    @property
    def reads_most(self) -> bool:
        """As many rows are being read for firing as may be: firing waits for them."""
        return len(self._core.firing) >= self._core.config.loading_max

    def load(self) -> None:
        core = self._core
        if core.wants:
            ids = list(dict.fromkeys(core.wants))
            core.wants = []
            self._spawn(self._for_firing(ids))
        if core.wants_lapsed:
            ids, core.wants_lapsed = core.wants_lapsed, []
            self._spawn(self._for_lapsing(ids))
        if core.wants_ready:
            wanted, core.wants_ready = core.wants_ready, {}
            for group, ids in wanted.items():
                self._spawn(self._for_group(group, ids))

    async def _for_firing(self, ids: list[int]) -> None:
        for start in range(0, len(ids), ROWS_PER_LOAD):
            some = ids[start : start + ROWS_PER_LOAD]
            self._delivery.loaded(some, await self._rows(some), self._clock.read().now_ms)
            self._poke()

    async def _for_lapsing(self, ids: list[int]) -> None:
        for start in range(0, len(ids), ROWS_PER_LOAD):
            some = ids[start : start + ROWS_PER_LOAD]
            known = await self._reader.known(some)
            self._delivery.lapsed(some, known, self._clock.read().now_ms)
            self._poke()

    async def _for_group(self, group: Group, ids: list[int]) -> None:
        for start in range(0, len(ids), ROWS_PER_LOAD):
            some = ids[start : start + ROWS_PER_LOAD]
            self._delivery.loaded_ready(group, some, await self._rows(some))
            self._poke()

    async def _rows(self, ids: list[int]) -> dict[int, TaskRow]:
        known = await self._reader.known(ids)
        return {task_id: found.row for task_id, found in known.items()}
