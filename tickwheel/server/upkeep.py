"""What the daemon does beside its work, in bounded steps: deleting groups, handing stored tasks
to a new group, sweeping dead letters whose retention is over, daily backups.

Each runs as a task of its own, a chunk at a time with a commit between, so that nothing of it
makes a large batch or holds a delivery up for long. All of it can be cut off anywhere: what a
restart finds half done it goes on with.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tickwheel.engine.topics import Group, Replay
from tickwheel.model.effects import ProgressKey
from tickwheel.persistence.store import StoreAway
from tickwheel.server.backups import DailyBackups

if TYPE_CHECKING:
    from tickwheel.server.shell import Shell

CHUNK = 500
READ_BYTES = 16 << 20
"""Rows are read with their bodies: a chunk may end at so many bytes."""
READS_AT_A_TIME = 4
"""However many groups are being deleted."""
AWAY_RETRY_S = 0.5
COMING_DUE_S = 0.05
"""A group that is being deleted waits for what it held before a restart to come due anew."""
SWEEP_S_MIN = 1.0
SWEEP_S_MAX = 600.0


class Upkeep:
    """``start`` once everything is loaded."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._reads = asyncio.Semaphore(READS_AT_A_TIME)
        self._retention_ms = int(shell.settings.dead_retention_s * 1000)

    def start(self) -> None:
        """Go on with what was under way when the daemon ended last."""
        for topic in self._shell.core.topics.values():
            for group in topic.groups.values():
                if group.is_closed:
                    self.drain(group)
        self._shell.spawn(self._sweep_for_ever())
        if self._shell.history is not None:
            self._shell.spawn(self._shell.history.flush_for_ever(self._shell.core))
        if self._shell.settings.backup_daily_hour is not None:
            self._shell.spawn(self._daily_backups(self._shell.settings.backup_daily_hour).run())

    def _daily_backups(self, hour: int) -> DailyBackups:
        shell = self._shell

        async def backup(path: str) -> int:
            await shell.committer.barrier()
            return await shell.store.backup(path)

        return DailyBackups(
            backup,
            shell.backup_folder(),
            hour=hour,
            keep=shell.settings.backup_keep,
            shard=shell.core.config.shard,
            history_dir=shell.settings.history_dir,
            now_ms=lambda: shell.clock.read().now_ms,
            noticed=shell.noticed,
            made=shell.observed.backed_up,
        )

    # --- deleting a group ----------------------------------------------------------------------

    def drain(self, group: Group) -> None:
        """``group`` was closed: let go of what it holds, then of the group."""
        self._shell.spawn(self._drain(group))

    async def _drain(self, group: Group) -> None:
        shell, closing = self._shell, self._shell.engine.closing
        await shell.loaded.wait()
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
            async with self._reads, shell.reader.read_some(ids, READ_BYTES) as (view, rest):
                some = ids[: len(ids) - len(rest)]
                closing.drop(group, some, view(some))
            shell.committer.kick()
            await shell.committer.barrier()
        closing.finish(group)
        shell.committer.kick()
        shell.poke()

    async def _some_dead(self, group: Group, after: ProgressKey) -> list[int]:
        """Ids of its next dead letters, which only the store knows."""
        shell = self._shell
        await shell.committer.barrier()
        while True:
            try:
                rows = await shell.store.scan_dead(after, CHUNK, group.topic.name, group.name)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
            else:
                return [row.id for row in rows]

    # --- tasks for a new group -----------------------------------------------------------------

    def replay(self) -> None:
        """Groups were made that begin in the past: look at the tasks from before them."""
        ownership = self._shell.engine.ownership
        replays, ownership.replays = ownership.replays, []
        for replay in replays:
            self._shell.spawn(self._replay(replay))

    async def _replay(self, replay: Replay) -> None:
        shell, topic = self._shell, replay.group.topic
        await shell.loaded.wait()
        while topic.replays.get(replay.group) is replay:
            try:
                page, following = await shell.reader.scan(replay.reached, CHUNK, topic.name)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
                continue
            now_ms = shell.clock.read().now_ms
            shell.engine.ownership.replayed(replay, page, following, now_ms)
            shell.poke()
            await asyncio.sleep(0)

    # --- dead letters --------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        """Scan when the oldest letter can have become too old, and not otherwise."""
        shell = self._shell
        pause_s = min(SWEEP_S_MAX, max(SWEEP_S_MIN, self._retention_ms / 10_000))
        next_ms = 0
        while True:
            now_ms = shell.clock.read().now_ms
            if shell.core.dead and now_ms >= next_ms:
                next_ms = await self.sweep_dead(now_ms) + self._retention_ms
            await asyncio.sleep(pause_s)

    async def sweep_dead(self, now_ms: int) -> int:
        """Delete what died more than the retention before ``now_ms``; when the oldest of the
        others died (or ``now_ms``)."""
        shell, oldest_ms = self._shell, now_ms
        await shell.committer.barrier()
        after = (0, "")
        while True:
            try:
                rows = await shell.store.scan_dead(after, CHUNK, None, None)
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
        """Those of them that died by ``limit_ms`` and have not come back since."""
        shell = self._shell
        while keys:
            ids = list(dict.fromkeys(task_id for task_id, _ in keys))
            async with shell.reader.read_some(ids, READ_BYTES) as (view, rest):
                unread = set(rest)
                for task_id, group in keys:
                    if task_id in unread:
                        continue
                    # One by one: a task with letters of two groups changes with the first.
                    found = view([task_id]).get(task_id)
                    dead = found.dead.get(group) if found is not None else None
                    if dead is None or dead.died_ms > limit_ms:
                        continue
                    if shell.engine.control.delete_dead(task_id, group, found) == "deleted":
                        shell.core.totals.dead_expired += 1
            keys = [key for key in keys if key[0] in unread]
            shell.committer.kick()
            await shell.committer.barrier()
