"""Runs background work in bounded steps: deletions, replays, the expiry of dead letters, checks of
groups.

Each kind of work runs as a separate asyncio task, a chunk at a time with a commit in between. So it
creates no large batches and delays deliveries only briefly. It can be interrupted at any point, and
continues after a restart.

Unused groups are reported after ``group_unused_report_s`` and, if configured, deleted. A group is
in use while it has a subscriber, a waiting pull or a delivery in flight. Times are measured by the
steady clock, from the start or takeover of this daemon. So a group can be reported late, but is
never deleted early. ``Group.was_used`` records use between two checks.

The console displays the lag of each group in the last hour: the number of ready tasks and the age
of the oldest one, sampled every ten seconds. A group without ready tasks takes no memory.
Invariants:

* Samples of at most ``GROUPS_KEPT_MAX`` groups are kept, ``SAMPLES`` samples of 12 bytes each: 4
  MiB.
* An unknown value is None and never 0. This includes the values of groups for which there may have
  been no room.
* Sampling restarts with each start or takeover.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tickwheel import disk
from tickwheel.model.filters import STEPS_PER_TICK
from tickwheel.model.policies import duration_ms
from tickwheel.persistence.contract import OnDisk
from tickwheel.server.shard.backups import DailyBackups
from tickwheel.server.shard.reads import when_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tickwheel.clock import Clock
    from tickwheel.engine.state import Core
    from tickwheel.engine.timetables import LoadedSchedule
    from tickwheel.engine.topics import Group, Replay, Topic
    from tickwheel.model.kinds import ProgressKey
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.metrics.observed import Lateness
    from tickwheel.server.shard.parts import Parts

CHUNK = 500
READ_BYTES = 16 << 20
"""Bytes after which a read of rows with their bodies stops. The last row can exceed them."""
READS_AT_A_TIME = 4
"""Maximum number of running reads for all groups that are being deleted."""
RECHECK_S = 0.05
"""Seconds after which a deletion checks again whether tasks of the group have come due."""
DISK_S = 15.0
"""Seconds between two measurements of the disk."""
SWEEP_S_MIN = 1.0
SWEEP_S_MAX = 600.0
LAST_SHARE, INTERVAL_SHARE = 0.25, 0.005
"""Shares of the retention: in its last quarter, the oldest dead letter is looked up at intervals of
1/200 of it (every 1.7 hours for 14 days)."""


class Upkeep:
    """Deletes groups and topics, replays tasks, sweeps dead letters; ``start`` after loading."""

    def __init__(self, parts: Parts, backup_folder: Path) -> None:
        self._parts = parts
        self._backup_folder = backup_folder
        self._reads = asyncio.Semaphore(READS_AT_A_TIME)
        self._drains: dict[Group, asyncio.Task[None]] = {}
        self._retention_ms = duration_ms(parts.settings.dead_retention_s)
        self.unused = UnusedGroups(parts, self.end_group)
        self.lags = Lags(parts.core, parts.clock, parts.observed.lateness)

    def start(self) -> None:
        """Continue the deletions that were running when the daemon last ended."""
        for topic in self._parts.core.topics.values():
            for group in topic.groups.values():
                if group.is_closed:
                    self.drain(group)
            if topic.settings.closed_ms is not None:
                self.withdraw(topic)
            elif topic.settings.broadcast_only:
                self.end_backlog(topic)
        self._parts.spawn(self._sweep_forever())
        self._parts.observed.groups_unused = 0
        self._parts.spawn(self.unused.run())
        self._parts.spawn(self.lags.run())
        if self._parts.history is not None:
            self._parts.spawn(self._parts.history.flush_for_ever(self._parts.core))
        hour = self._parts.settings.backup_daily_hour
        if hour is not None:
            self._parts.spawn(DailyBackups(self._parts, self._backup_folder, hour).run())

    async def measure_disk_forever(self) -> None:
        """Record how full the database's disk is. If it hangs, only one thread is blocked."""
        store, observed = self._parts.store, self._parts.observed
        while isinstance(store, OnDisk):
            with contextlib.suppress(OSError):
                folder = os.path.dirname(store.path)
                use = await asyncio.to_thread(disk.measure, folder)
                observed.disk_used, observed.disk_free_bytes = use.share, use.free_bytes
            await asyncio.sleep(DISK_S)

    # --- deleting a group ----------------------------------------------------------------------

    def end_group(self, group: Group) -> None:
        """Delete the group with its tasks."""
        closing = self._parts.engine.closing
        closing.close(group)
        if closing.is_drained(group):
            closing.finish(group)
        else:
            self.drain(group)
        self._parts.committer.kick()

    def drain(self, group: Group) -> None:
        """Release the tasks of a closed group in the background, then forget the group."""
        self._drains[group] = self._parts.spawn(self._drain(group))

    async def _drain(self, group: Group) -> None:
        closing = self._parts.engine.closing
        await self._parts.loaded.wait()
        place = (0, "")
        while not closing.is_drained(group):
            ids = closing.take_some_tasks(group, CHUNK)
            if not ids and group.dead:
                ids = await self._some_dead(group, place)
                # Start again after the last page, because tasks may have died at earlier positions.
                place = (ids[-1], group.name) if ids else (0, "")
            if not ids:
                await asyncio.sleep(RECHECK_S)
                continue
            async with self._reads, self._parts.reader.read_some(ids, READ_BYTES) as (view, rest):
                read_ids = ids[: len(ids) - len(rest)]
                closing.drop(group, read_ids, view(read_ids))
            self._parts.committer.kick()
            await self._parts.committer.barrier()
        closing.finish(group)
        del self._drains[group]
        self._parts.committer.kick()
        self._parts.wake()

    # --- deleting a topic ----------------------------------------------------------------------

    def withdraw(self, topic: Topic) -> None:
        """End the tasks of a closed topic after its groups are deleted, then forget the topic."""
        self._parts.spawn(self._withdraw(topic))

    async def _withdraw(self, topic: Topic) -> None:
        closing, grouping = self._parts.engine.topic_closing, self._parts.engine.grouping
        await self._parts.loaded.wait()
        await asyncio.gather(*(self._drains[group] for group in topic.groups.values()))
        found = 1
        while found and not grouping.is_empty(topic):
            # After this, tasks that were staged when the topic was closed are stored.
            await self._parts.committer.barrier()
            found = 0
            after: int | None = 0
            while after is not None:
                page, after = await self._page(after, topic.name)
                found += len(page)
                closing.withdraw(page)
                self._parts.committer.kick()
                await self._parts.committer.barrier()
        closing.finish(topic)
        self._parts.observed.lateness.forget([topic.name])
        self._parts.committer.kick()

    # --- topics for broadcasts only ------------------------------------------------------------

    def end_backlog(self, topic: Topic) -> None:
        """End the due tasks that wait for a group of a topic that has become broadcast-only."""
        if topic.default_backlog is not None and topic.default_backlog.ready_count:
            self._parts.spawn(self._end_backlog(topic))

    async def _end_backlog(self, topic: Topic) -> None:
        await self._parts.loaded.wait()
        after: int | None = 0
        while after is not None and topic.settings.broadcast_only:
            page, after = await self._page(after, topic.name)
            for task in page:
                if topic.settings.broadcast_only:
                    self._parts.engine.firing.expire_backlogged(task)
            self._parts.committer.kick()
            await self._parts.committer.barrier()

    async def _page(
        self, after: int, topic: str, limit: int = CHUNK
    ) -> tuple[list[TaskSnapshot], int | None]:
        """Return the next stored tasks of a topic, and the id after which to continue, or None."""
        return await when_back(partial(self._parts.reader.scan, after, limit, topic))

    async def _some_dead(self, group: Group, after: ProgressKey) -> list[int]:
        """Return the ids of the group's next dead letters, of which only the store has a list."""
        await self._parts.committer.barrier()
        scan = self._parts.store.scan_dead
        rows = await when_back(partial(scan, after, CHUNK, group.topic.name, group.name))
        return [row.id for row in rows]

    # --- tasks for a new group -----------------------------------------------------------------

    def replay(self) -> None:
        """Give older tasks to groups that were created with a start in the past."""
        ownership = self._parts.engine.ownership
        replays, ownership.replays = ownership.replays, []
        for replay in replays:
            self._parts.spawn(self._replay(replay))

    async def _replay(self, replay: Replay) -> None:
        topic = replay.group.topic
        await self._parts.loaded.wait()
        while topic.replays.get(replay.group) is replay:
            judge = replay.group.judge
            limit = CHUNK if judge is None else min(CHUNK, max(1, STEPS_PER_TICK // judge.steps))
            page, following = await self._page(replay.reached, topic.name, limit)
            now_ms = self._parts.clock.read().now_ms
            self._parts.engine.ownership.examine_page(replay, page, following, now_ms)
            self._parts.wake()
            await asyncio.sleep(0)

    # --- schedules -----------------------------------------------------------------------------

    def cancel_previous(self) -> None:
        """Cancel unfinished tasks of schedules whose next occurrence replaces them."""
        schedule_heap = self._parts.core.schedule_heap
        wanted, schedule_heap.to_cancel = schedule_heap.to_cancel, []
        for entry in wanted:
            self._parts.spawn(self._cancel_previous(entry))

    async def _cancel_previous(self, entry: LoadedSchedule) -> None:
        await self._parts.loaded.wait()
        task_id = entry.row.last_id
        async with self._reads, self._parts.reader.read_some([task_id], READ_BYTES) as (view, _):
            self._parts.engine.schedules.replace(entry, task_id, view([task_id]).get(task_id))
        self._parts.committer.kick()
        self._parts.wake()

    # --- dead letters --------------------------------------------------------------------------

    async def _sweep_forever(self) -> None:
        """Sweep when the oldest dead letter may have expired, and sometimes earlier: if the oldest
        one was requeued, no warning of its expiry must be given."""
        pause_s = min(SWEEP_S_MAX, max(SWEEP_S_MIN, self._retention_ms / 10_000))
        next_ms = swept_ms = 0
        while True:
            now_ms = self._parts.clock.read().now_ms
            is_near = next_ms - now_ms < self._retention_ms * LAST_SHARE
            is_early_sweep = is_near and now_ms - swept_ms >= self._retention_ms * INTERVAL_SHARE
            if self._parts.core.dead and (now_ms >= next_ms or is_early_sweep):
                swept_ms = now_ms
                next_ms = await self.sweep_dead(now_ms) + self._retention_ms
            self._parts.observed.dead_expire_s = next_ms / 1000 if self._parts.core.dead else 0.0
            await asyncio.sleep(pause_s)

    async def sweep_dead(self, now_ms: int) -> int:
        """Delete dead letters that are older than the retention at ``now_ms``. Return the time at
        which the oldest remaining one died, or ``now_ms`` if none remains."""
        oldest_ms = now_ms
        await self._parts.committer.barrier()
        after = (0, "")
        while True:
            rows = await when_back(partial(self._parts.store.scan_dead, after, CHUNK, None, None))
            if not rows:
                return oldest_ms
            after = rows[-1].id, rows[-1].group
            limit_ms = now_ms - self._retention_ms
            expired = [(row.id, row.group) for row in rows if row.died_ms <= limit_ms]
            remaining_ms = (row.died_ms for row in rows if row.died_ms > limit_ms)
            oldest_ms = min([oldest_ms, *remaining_ms])
            if expired:
                await self._delete_expired(expired, limit_ms)

    async def _delete_expired(self, keys: list[tuple[int, str]], limit_ms: int) -> None:
        """Delete these dead letters unless they were requeued after ``limit_ms``."""
        while keys:
            ids = list(dict.fromkeys(task_id for task_id, _ in keys))
            async with self._parts.reader.read_some(ids, READ_BYTES) as (view, rest):
                unread = set(rest)
                for task_id, group in keys:
                    if task_id in unread:
                        continue
                    # View each task again, because deleting another dead letter may have changed
                    # it.
                    task = view([task_id]).get(task_id)
                    dead = None if task is None else task.dead.get(group)
                    if task is None or dead is None or dead.died_ms > limit_ms:
                        continue
                    word = self._parts.engine.dead_letters.delete(task, group)
                    self._parts.core.totals.dead_expired += word == "deleted"
            keys = [key for key in keys if key[0] in unread]
            self._parts.committer.kick()
            await self._parts.committer.barrier()


# --- unused groups -------------------------------------------------------------------------------

CHECK_S_MIN, CHECK_S_MAX = 0.1, 60.0
CHECKS = 10
"""Number of checks within ``group_unused_report_s``."""
GROUPS_AT_A_TIME = 1_000


class UnusedGroups:
    """Reports and deletes unused groups while ``run`` is active."""

    def __init__(self, parts: Parts, end: Callable[[Group], None]) -> None:
        """``end`` deletes a group with its tasks."""
        self._parts = parts
        self._end = end
        settings = parts.settings
        report_s, end_s = settings.group_unused_report_s, settings.group_unused_end_s
        self._report_ms = duration_ms(report_s)
        self._end_ms = None if end_s is None else duration_ms(end_s)
        self._pause_s = min(CHECK_S_MAX, max(CHECK_S_MIN, report_s / CHECKS))

    async def run(self) -> None:
        """Check all groups repeatedly, forever."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_s)

    async def look(self) -> None:
        """Check every group once."""
        unused = examined = 0
        for topic in list(self._parts.core.topics.values()):
            for group in topic.live_groups:
                if not group.is_closed:
                    unused += self._is_unused(group, self._parts.clock.read().mono_ms)
                examined += 1
                if examined % GROUPS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
        self._parts.observed.groups_unused = unused

    def _is_unused(self, group: Group, mono_ms: int) -> bool:
        if group.was_used or group.subscribers or group.flight:
            group.was_used = group.is_unused = False
            group.used_mono_ms = mono_ms
            return False
        unused_ms = mono_ms - group.used_mono_ms
        label = f"group {group.name} of topic {group.topic.name}"
        if self._end_ms is not None and unused_ms >= self._end_ms and not self._follows(group):
            self._parts.on_event(
                "group_ended",
                f"{label}: not used for {unused_ms / 1000:.0f} s (group_unused_end_s); it"
                f" held {group.ready_count} ready, {len(group.waiting)} waiting,"
                f" {group.dead} dead",
            )
            self._end(group)
            return False
        if unused_ms < self._report_ms:
            return False
        if not group.is_unused:
            group.is_unused = True
            self._parts.on_event(
                "group_unused",
                f"{label}: not used for {unused_ms / 1000:.0f} s; it holds"
                f" {group.ready_count} ready; delete it with `tickwheel groups delete` if it is"
                " not needed",
            )
        return True

    def _follows(self, group: Group) -> bool:
        """Return whether another shard is the home of the group's settings, and so deletes it."""
        versions = self._parts.core.versions
        return group.version > 0 and versions.home_of(group.topic.name) != versions.shard


# --- lag of groups -------------------------------------------------------------------------------

SAMPLE_S: Final = 10
SAMPLES: Final = 360
GROUPS_KEPT_MAX: Final = 1_000
SAMPLED_AT_A_TIME: Final = 100
RECENT_SAMPLES: Final = 6
"""Samples in which lateness counts as recent: about a minute."""
READY_SHOWN_MAX: Final = 2**32 - 1
"""Maximum backlog that is displayed. Larger ones are displayed as this number."""
_SLOTS: Final = SAMPLES + 1
"""Number of slots for samples: one more than those shown, so that no incomplete one is read."""


class _Samples:
    """The samples of one group. The index of a sample is its number modulo ``_SLOTS``."""

    __slots__ = ("ages_ms", "last", "ready", "since")

    def __init__(self, number: int) -> None:
        self.since = self.last = number
        """The numbers of the first sample, and of the last sample with ready tasks."""
        self.ready = array("I", [0]) * _SLOTS
        self.ages_ms = array("Q", [0]) * _SLOTS

    def take(self, number: int, ready: int, since_ms: int | None, now_ms: int) -> None:
        """Record a sample. ``since_ms`` is the time at which the oldest ready task became ready."""
        if ready:
            self.last = number
        index = number % _SLOTS
        self.ready[index] = min(ready, READY_SHOWN_MAX)
        self.ages_ms[index] = 0 if since_ms is None else max(0, now_ms - since_ms)


class Lags:
    """Samples the lag of all groups, and the lateness of deliveries, while ``run`` is active."""

    def __init__(self, core: Core, clock: Clock, lateness: Lateness) -> None:
        self._core = core
        self._clock = clock
        self._lateness = lateness
        self._late_counts: deque[list[int]] = deque(maxlen=RECENT_SAMPLES)
        self._taken_ms: deque[int] = deque(maxlen=SAMPLES)
        self._number = 0
        """The number of the newest complete sample; numbers begin with 1."""
        self._samples: dict[Group, _Samples] = {}
        self._crowded = 0
        """The number of the last sample for which a group had no room."""

    async def run(self) -> None:
        """Take a sample every ``SAMPLE_S`` seconds, forever."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        """Take a sample of every group."""
        now, number = self._clock.read(), self._number + 1
        self._late_counts.append(self._lateness.counts)
        examined = 0
        room = GROUPS_KEPT_MAX - len(self._samples)
        kept: dict[Group, _Samples] = {}
        for topic in list(self._core.topics.values()):
            for group in topic.live_groups:
                examined += 1
                if examined % SAMPLED_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                ready = group.ready_count
                samples = self._samples.get(group)
                if samples is None and ready:
                    if room <= 0:
                        self._crowded = number
                        continue
                    room -= 1
                    samples = _Samples(number)
                if samples is None or (not ready and number - samples.last >= SAMPLES):
                    continue
                samples.take(number, ready, group.oldest_since_ms(), now.now_ms)
                kept[group] = samples
        self._samples, self._number = kept, number
        self._taken_ms.append(now.now_ms)

    def recent_lateness(self) -> dict[str, int]:
        """Return the lateness of deliveries in about the last minute."""
        counts = self._lateness.counts
        earlier = self._late_counts[0] if self._late_counts else counts
        recent = [count - before for count, before in zip(counts, earlier, strict=True)]
        return {
            "recent_p50_ms": self._lateness.percentile_ms(0.50, recent),
            "recent_p99_ms": self._lateness.percentile_ms(0.99, recent),
            "recent_count": sum(recent),
        }

    def of(self, group: Group) -> dict[str, Any]:
        """Return the group's samples, oldest first, as the answer contains them."""
        samples, newest = self._samples.get(group), self._number
        numbers = range(newest - len(self._taken_ms) + 1, newest + 1)
        ready: list[int | None] = []
        ages_ms: list[int | None] = []
        for number in numbers:
            if samples is not None and number >= samples.since:
                index = number % _SLOTS
                ready.append(samples.ready[index])
                ages_ms.append(samples.ages_ms[index])
            else:
                default = 0 if number > self._crowded else None
                ready.append(default)
                ages_ms.append(default)
        return {
            "every_ms": SAMPLE_S * 1000,
            "taken_ms": list(self._taken_ms),
            "ready": ready,
            "oldest_ready_ms": ages_ms,
        }
