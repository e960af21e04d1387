"""From the store back to a working engine: first what is due soonest, the rest beside the work.

``begin`` restores groups, sessions, everything that was handed out before, and the first handles
in due order: after it the shard can serve. ``rest`` loads the other handles, then the keys, while
deliveries, enqueues and acks go on; commands that name tasks or keys wait for its end
(``Shard.loaded``), because a task that is not loaded has no place in memory that they could change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.engine.timetables import BadTiming, Timetable
from tickwheel.model.kinds import SCHEDULE
from tickwheel.model.records import TaskSnapshot
from tickwheel.persistence.contract import Handles, Opened, Store
from tickwheel.server.logs import Log

IDS_PER_READ = 1_000
FIRST_CHUNK = 10_000
RUNS_BYTES = 16 << 20
_NO_TIMING: dict[str, Any] = {"cron": "@yearly", "timezone": "UTC", "every_ms": None}


class Recovering:
    """The recovery of one engine from its store."""

    def __init__(
        self, store: Store, engine: Engine, opened: Opened, clock: Clock, grace_ms: int
    ) -> None:
        self._store = store
        self._engine = engine
        self._opened = opened
        self._clock = clock
        self._grace_ms = grace_ms
        self._special: set[int] = set()
        self._chunks: AsyncIterator[Handles] | None = None
        self.loaded = 0
        """How many handles were loaded so far."""
        self.rows_missing = 0
        """Tasks with progress or dead letters whose rows the store lacks: it is damaged."""
        self.schedules_held: list[str] = []
        """Schedules that this machine cannot plan, and so are paused, each with the reason."""

    async def begin(self) -> None:
        """Load all but the rest of the handles. Raises StoreError."""
        recovery = self._engine.recovery
        self._engine.core.keys.begin_loading()
        recovery.stopped_ms = self._opened.position_ms
        small = await self._store.recover_small()
        recovery.records(small.of_kind, self._clock.read().mono_ms)
        recovery.outcomes(small.outcomes)
        schedules = self._engine.schedules
        for row in small.of_kind(SCHEDULE):
            try:
                schedules.restore(row, Timetable(row.schedule))
            except BadTiming as error:
                # Its zone is not known on this machine: it waits for somebody to put that right.
                self.schedules_held.append(f"{row.schedule.name}: {error.field} {error}")
                stopped = row._replace(paused=True)
                schedules.restore(stopped, Timetable(row.schedule._replace(**_NO_TIMING)))
        self._special = {row.id for row in small.progress} | {row[0] for row in small.dead}
        # After a crash consumers may be gone; before a clean stop they got GOODBYE and wait.
        grace_ms = None if self._opened.clean else self._grace_ms
        ids = sorted(self._special)
        for start in range(0, len(ids), IDS_PER_READ):
            # Those without a row (there should be none) are not left out of the handles.
            self._special -= set(ids[start : start + IDS_PER_READ])
            for task in (await self._store.read(ids[start : start + IDS_PER_READ])).values():
                known = TaskSnapshot(
                    task.row, {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
                )
                self._special.add(task.row.id)
                now = self._clock.read()
                recovery.with_history(known, now.now_ms, now.mono_ms, grace_ms)
        self.rows_missing = len(ids) - len(self._special)
        recovery.arrived(self._clock.read().now_ms)
        await self._look_at_runs()
        self._chunks = aiter(self._store.recover_handles(FIRST_CHUNK))
        first = await anext(self._chunks, None)
        if first is not None:
            self._add(first)
        if self.is_small:
            await self._load()

    async def _look_at_runs(self) -> None:
        """Learn whether the newest tasks of schedules have ended."""
        rest: Sequence[int] = self._engine.core.schedule_heap.watched_ids()
        while rest:
            asked = rest
            found, rest = await self._store.read_some(asked, RUNS_BYTES)
            looked_at = asked[: len(asked) - len(rest)]
            known = {
                i: TaskSnapshot(
                    task.row, {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
                )
                for i, task in found.items()
            }
            self._engine.schedules.found(looked_at, known)

    def log_summary(self, log: Log, store: str, elapsed_s: float) -> None:
        """Log what ``begin`` found, and what it did not find, in one line each."""
        if self.rows_missing:
            log.error("rows_missing", store=store, tasks=self.rows_missing, see="tickwheel check")
        for held in self.schedules_held:
            log.error("schedule_paused", schedule=held)
        core, is_clean = self._engine.core, self._opened.clean
        groups = [group for topic in core.topics.values() for group in topic.groups.values()]
        (log.info if is_clean else log.warning)(
            "recovered" if is_clean else "recovered_after_unclean_stop",
            store=store,
            epoch=self._opened.epoch,
            pending=core.scheduled,
            leases_kept=self._engine.recovery.leases_kept,
            ready=sum(group.ready_count for group in groups),
            dead=core.dead,
            seconds=round(elapsed_s, 3),
        )

    @property
    def is_small(self) -> bool:
        """Whether ``begin`` has loaded all tasks."""
        return self.loaded < FIRST_CHUNK

    @property
    def found_nothing(self) -> bool:
        """Whether the store has no task, not even a dead letter."""
        return self.is_small and not self.loaded and not self._special

    async def rest(self) -> None:
        """Load the tasks that ``begin`` did not load. Raises StoreError."""
        if not self.is_small:
            await self._load()

    async def _load(self) -> None:
        assert self._chunks is not None
        async for chunk in self._chunks:
            self._add(chunk)
            await asyncio.sleep(0)
        self._engine.recovery.has_handles(None)
        async for ids, hashes, expected in self._store.recover_keys():
            self._add_keys(ids, hashes, expected)
            await asyncio.sleep(0)
        self._engine.core.keys.loaded()

    def _add_keys(self, ids: Sequence[int], hashes: Sequence[int], expected: int) -> None:
        mark = self._opened.id_mark
        if ids and max(ids) > mark:
            # Enqueued since this recovery began, and in the index already.
            kept = [index for index, task_id in enumerate(ids) if task_id <= mark]
            ids, hashes = [ids[index] for index in kept], [hashes[index] for index in kept]
        self._engine.recovery.keys(ids, hashes, self._special, expected)

    def _add(self, chunk: Handles) -> None:
        ids, dues_ms, topics = chunk.ids, chunk.dues_ms, chunk.topics
        mark = self._opened.id_mark
        if ids and max(ids) > mark:
            # Enqueued since this recovery began, and on the wheel already.
            kept = [index for index, task_id in enumerate(ids) if task_id <= mark]
            ids = [ids[index] for index in kept]
            dues_ms = [dues_ms[index] for index in kept]
            topics = [topics[index] for index in kept]
        self._engine.recovery.handles(ids, dues_ms, topics, self._special)
        if chunk.dues_ms:
            self._engine.recovery.has_handles(chunk.dues_ms[-1])
        self.loaded += len(ids)
