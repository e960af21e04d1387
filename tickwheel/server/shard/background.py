"""What the daemon does beside its work, in bounded steps: deleting groups and topics, handing
stored tasks to a new group, sweeping dead letters whose retention is over, daily backups.

Each runs as a task of its own, a chunk at a time with a commit between, so that nothing of it
makes a large batch or holds a delivery up for long. All of it can be cut off anywhere: what a
restart finds half done it goes on with.

A daily backup is a copy of the store at a set hour, so many kept, and a mark for the history. One
that was missed (the daemon did not run, or it failed) is made up for. Only files named here are
ever removed, and only after a newer one is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tickwheel.history.retention import write_last_backup
from tickwheel.model.filters import STEPS_PER_TICK
from tickwheel.persistence.contract import StoreAway, StoreError
from tickwheel.server.shard.lags import Lags
from tickwheel.server.shard.unused import UnusedGroups

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tickwheel.engine.timetables import Planned
    from tickwheel.engine.topics import Group, Replay, Topic
    from tickwheel.model.effects import ProgressKey
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.parts import Parts


CHUNK = 500
READ_BYTES = 16 << 20
"""Bytes at which a read of rows with their bodies ends."""
READS_AT_A_TIME = 4
"""Reads at one time for all groups that are being deleted."""
AWAY_RETRY_S = 0.5
COMING_DUE_S = 0.05
"""How often, in seconds, a group's deletion looks whether its tasks came due anew."""
SWEEP_S_MIN = 1.0
SWEEP_S_MAX = 600.0
SOON, AGAIN = 0.25, 0.005
"""In the last quarter of its retention the oldest dead letter is looked for each 200th of it (14
days: every 1.7 hours)."""


class Upkeep:
    """Deletes groups and topics, replays, sweeps; ``start`` it once everything is loaded."""

    def __init__(self, parts: Parts, backup_folder: Path) -> None:
        self._parts = parts
        self._settings = settings = parts.settings
        self._engine = parts.engine
        self._core = parts.core
        self._store = parts.store
        self._reader = parts.reader
        self._committer = parts.committer
        self._clock = parts.clock
        self._loaded = parts.loaded
        self._spawn = parts.spawn
        self._wake = parts.wake
        self._observed = parts.observed
        self._backup_folder = backup_folder
        self._reads = asyncio.Semaphore(READS_AT_A_TIME)
        self._drains: dict[Group, asyncio.Task[None]] = {}
        self._retention_ms = int(settings.dead_retention_s * 1000)
        self.unused = UnusedGroups(parts, self.end_group)
        self.lags = Lags(parts.core, parts.clock)

    def start(self) -> None:
        """Go on with the deletions that were under way when the daemon ended last."""
        for topic in self._core.topics.values():
            for group in topic.groups.values():
                if group.is_closed:
                    self.drain(group)
            if topic.settings.closed_ms is not None:
                self.withdraw(topic)
            elif topic.settings.broadcast_only:
                self.let_go(topic)
        self._spawn(self._sweep_for_ever())
        self._observed.groups_unused = 0
        self._spawn(self.unused.run())
        self._spawn(self.lags.run())
        if self._parts.history is not None:
            self._spawn(self._parts.history.flush_for_ever(self._core))
        if self._settings.backup_daily_hour is not None:
            self._spawn(self._daily_backups(self._settings.backup_daily_hour).run())

    def _daily_backups(self, hour: int) -> DailyBackups:
        async def backup(path: str) -> int:
            await self._committer.barrier()
            return await self._store.backup(path)

        return DailyBackups(
            backup,
            self._backup_folder,
            hour=hour,
            keep=self._settings.backup_keep,
            shard=self._core.config.shard,
            history_dir=self._settings.history_dir,
            now_ms=lambda: self._clock.read().now_ms,
            on_event=self._parts.on_event,
            made=self._observed.backed_up,
        )

    # --- deleting a group ----------------------------------------------------------------------

    def end_group(self, group: Group) -> None:
        """Delete the group, whatever it holds."""
        closing = self._engine.closing
        closing.close(group)
        if closing.is_drained(group):
            closing.finish(group)
        else:
            self.drain(group)
        self._committer.kick()

    def drain(self, group: Group) -> None:
        """Let go of what a closed group holds, in the background, and then of the group."""
        self._drains[group] = self._spawn(self._drain(group))

    async def _drain(self, group: Group) -> None:
        closing = self._engine.closing
        await self._loaded.wait()
        place = (0, "")
        while not closing.is_drained(group):
            ids = closing.some(group, CHUNK)
            if not ids and group.dead:
                ids = await self._some_dead(group, place)
                # From the beginning again, when a task died behind the place.
                place = (ids[-1], group.name) if ids else (0, "")
            if not ids:
                await asyncio.sleep(COMING_DUE_S)
                continue
            async with self._reads, self._reader.read_some(ids, READ_BYTES) as (view, rest):
                some = ids[: len(ids) - len(rest)]
                closing.drop(group, some, view(some))
            self._committer.kick()
            await self._committer.barrier()
        closing.finish(group)
        del self._drains[group]
        self._committer.kick()
        self._wake()

    # --- deleting a topic ----------------------------------------------------------------------

    def withdraw(self, topic: Topic) -> None:
        """End the tasks of a closed topic once its groups are gone, and then forget the topic."""
        self._spawn(self._withdraw(topic))

    async def _withdraw(self, topic: Topic) -> None:
        closing, grouping = self._engine.topic_closing, self._engine.grouping
        await self._loaded.wait()
        await asyncio.gather(*(self._drains[group] for group in topic.groups.values()))
        seen = 1
        while seen and not grouping.is_empty(topic):
            # What was staged when it was closed is stored then.
            await self._committer.barrier()
            seen = 0
            after: int | None = 0
            while after is not None:
                page, after = await self._page(after, topic.name)
                seen += len(page)
                closing.withdraw(page)
                self._committer.kick()
                await self._committer.barrier()
        closing.finish(topic)
        self._observed.lateness.forget([topic.name])
        self._committer.kick()

    # --- topics for broadcasts only ------------------------------------------------------------

    def let_go(self, topic: Topic) -> None:
        """End the tasks that came due and wait for a group on a topic for broadcasts alone."""
        if topic.default_backlog is not None and topic.default_backlog.ready_count:
            self._spawn(self._let_go(topic))

    async def _let_go(self, topic: Topic) -> None:
        await self._loaded.wait()
        after: int | None = 0
        while after is not None and topic.settings.broadcast_only:
            page, after = await self._page(after, topic.name)
            for known in page:
                if topic.settings.broadcast_only:
                    self._engine.firing.let_go(known)
            self._committer.kick()
            await self._committer.barrier()

    async def _page(
        self, after: int, topic: str, limit: int = CHUNK
    ) -> tuple[list[TaskSnapshot], int | None]:
        """The next stored tasks of a topic, and the id to go on after (None: there are no more)."""
        while True:
            try:
                return await self._reader.scan(after, limit, topic)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    async def _some_dead(self, group: Group, after: ProgressKey) -> list[int]:
        """The ids of the group's next dead letters, which only the store knows."""
        await self._committer.barrier()
        while True:
            try:
                rows = await self._store.scan_dead(after, CHUNK, group.topic.name, group.name)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
            else:
                return [row.id for row in rows]

    # --- tasks for a new group -----------------------------------------------------------------

    def replay(self) -> None:
        """Look at older tasks for groups that were made with a start in the past."""
        ownership = self._engine.ownership
        replays, ownership.replays = ownership.replays, []
        for replay in replays:
            self._spawn(self._replay(replay))

    async def _replay(self, replay: Replay) -> None:
        topic = replay.group.topic
        await self._loaded.wait()
        while topic.replays.get(replay.group) is replay:
            judge = replay.group.judge
            limit = CHUNK if judge is None else min(CHUNK, max(1, STEPS_PER_TICK // judge.steps))
            page, following = await self._page(replay.reached, topic.name, limit)
            now_ms = self._clock.read().now_ms
            self._engine.ownership.replayed(replay, page, following, now_ms)
            self._wake()
            await asyncio.sleep(0)

    # --- schedules -----------------------------------------------------------------------------

    def cancel_previous(self) -> None:
        """Cancel unfinished tasks of schedules whose next occurrence replaces them."""
        schedule_heap = self._core.schedule_heap
        wanted, schedule_heap.wants_cancel = schedule_heap.wants_cancel, []
        for planned in wanted:
            self._spawn(self._cancel_previous(planned))

    async def _cancel_previous(self, planned: Planned) -> None:
        await self._loaded.wait()
        task_id = planned.row.last_id
        async with self._reads, self._reader.read_some([task_id], READ_BYTES) as (view, _):
            self._engine.schedules.replace(planned, task_id, view([task_id]).get(task_id))
        self._committer.kick()
        self._wake()

    # --- dead letters --------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        """Sweep when the oldest dead letter may be over, and now and then before: it may have been
        requeued, and nobody is to be warned of its end."""
        pause_s = min(SWEEP_S_MAX, max(SWEEP_S_MIN, self._retention_ms / 10_000))
        next_ms = looked_ms = 0
        while True:
            now_ms = self._clock.read().now_ms
            soon = next_ms - now_ms < self._retention_ms * SOON
            again = soon and now_ms - looked_ms >= self._retention_ms * AGAIN
            if self._core.dead and (now_ms >= next_ms or again):
                looked_ms = now_ms
                next_ms = await self.sweep_dead(now_ms) + self._retention_ms
            self._observed.dead_expire_s = next_ms / 1000 if self._core.dead else 0.0
            await asyncio.sleep(pause_s)

    async def sweep_dead(self, now_ms: int) -> int:
        """Delete dead letters that died more than the retention before ``now_ms``; returns when the
        oldest of the others died (or ``now_ms``)."""
        oldest_ms = now_ms
        await self._committer.barrier()
        after = (0, "")
        while True:
            try:
                rows = await self._store.scan_dead(after, CHUNK, None, None)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
                continue
            if not rows:
                return oldest_ms
            after = rows[-1].id, rows[-1].group
            limit_ms = now_ms - self._retention_ms
            over = [(row.id, row.group) for row in rows if row.died_ms <= limit_ms]
            kept_ms = (row.died_ms for row in rows if row.died_ms > limit_ms)
            oldest_ms = min([oldest_ms, *kept_ms])
            if over:
                await self._delete_over(over, limit_ms)

    async def _delete_over(self, keys: list[tuple[int, str]], limit_ms: int) -> None:
        """Delete dead letters that died by ``limit_ms`` and have not come back since."""
        while keys:
            ids = list(dict.fromkeys(task_id for task_id, _ in keys))
            async with self._reader.read_some(ids, READ_BYTES) as (view, rest):
                unread = set(rest)
                for task_id, group in keys:
                    if task_id in unread:
                        continue
                    # One by one: a task with letters of two groups changes with the first.
                    found = view([task_id]).get(task_id)
                    dead = found.dead.get(group) if found is not None else None
                    if dead is None or dead.died_ms > limit_ms:
                        continue
                    if self._engine.control.delete_dead(task_id, group, found) == "deleted":
                        self._core.totals.dead_expired += 1
            keys = [key for key in keys if key[0] in unread]
            self._committer.kick()
            await self._committer.barrier()


LOOK_S = 60.0
"""How often the clock, which may be set meanwhile, is looked at, in seconds."""
RETRY_S = 600.0
_STAMP = "%Y%m%dT%H%M%SZ"


class DailyBackups:
    """Makes daily backups; ``run`` it as a task for as long as this daemon leads the shard."""

    def __init__(
        self,
        backup: Callable[[str], Awaitable[int]],
        folder: Path,
        *,
        hour: int,
        keep: int,
        shard: int,
        history_dir: str | None,
        now_ms: Callable[[], int],
        on_event: Callable[[str, str], None],
        made: Callable[[float], None] = lambda begun_s: None,
    ) -> None:
        """``backup`` is the store's; ``hour`` is by this machine's local time. ``made`` gets
        the time when the newest one was begun (Unix time), at the start and after each one."""
        self._backup = backup
        self._folder = folder
        self._hour = hour
        self._keep = keep
        self._shard = shard
        self._history_dir = history_dir
        self._now_ms = now_ms
        self._on_event = on_event
        self._report_made = made
        self._failed = False
        self._name = re.compile(rf"tickwheel-s{shard}-(\d{{8}}T\d{{6}}Z)\.db")

    async def run(self) -> None:
        """Make a backup each day, for ever."""
        self._report_newest()
        while True:
            pause_s = LOOK_S
            if self.is_due() and not await self.once():
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    def is_due(self) -> bool:
        """Whether the hour has come since the newest backup, or the last one failed (one that is
        there without its mark has failed, too)."""
        made = self._made()
        return self._failed or not made or made[-1][0] < self._last_hour()

    async def once(self) -> bool:
        """Make a backup now; whether it was made. Never raises for what a disk or a store does."""
        begun_ms = self._now_ms()
        at = datetime.fromtimestamp(begun_ms // 1000, UTC)
        path = self._folder / f"tickwheel-s{self._shard}-{at.strftime(_STAMP)}.db"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            size_bytes = await self._backup(str(path))
            if self._history_dir is not None:
                write_last_backup(self._history_dir, self._shard, begun_ms, str(path))
        except (StoreError, OSError) as error:
            self._failed = True
            self._on_event("backup_failed", f"daily backup to {path}: {error}")
            return False
        self._failed = False
        self._on_event("backup_made", f"{path}, {size_bytes} bytes")
        self._report_newest()
        self._rotate()
        return True

    def _report_newest(self) -> None:
        made = self._made()
        if made:
            self._report_made(made[-1][0].timestamp())

    def _rotate(self) -> None:
        for _, path in self._made()[: -self._keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _made(self) -> list[tuple[datetime, Path]]:
        """(time, path) of the backups in the folder, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                name = self._name.fullmatch(path.name)
                if name is not None:
                    with contextlib.suppress(ValueError):
                        at = datetime.strptime(name[1], _STAMP).replace(tzinfo=UTC)
                        found.append((at, path))
        return sorted(found)

    def _last_hour(self) -> datetime:
        """The last time that it was the set hour, by local time."""
        now = datetime.fromtimestamp(self._now_ms() / 1000, UTC).astimezone()
        at = now.replace(hour=self._hour, minute=0, second=0, microsecond=0)
        return at if at <= now else at - timedelta(days=1)
