"""What the daemon does beside its work, in bounded steps: deleting groups and topics, handing
stored tasks to a new group, sweeping dead letters whose retention is over, looking at groups.

Each runs as a task of its own, a chunk at a time with a commit between, so that nothing of it
makes a large batch or holds a delivery up for long. All of it can be cut off anywhere: what a
restart finds half done it goes on with.

Groups that nobody uses are reported after a while and, by setting, end. A group is used while it
has a subscriber, a waiting pull or a delivery that is not finished. What counts is the steady clock
of this tenure: a start or a takeover begins anew for every group, so a group may be found later
than it should be, and is never ended too early. What was used between two looks has left a mark
(``Group.was_used``).

How far each group was behind in the last hour (what was ready, and for how long the oldest of it
had waited, every ten seconds) is what the console draws of a group. One that had nothing ready all
the time takes no memory. Invariants:

* At most ``GROUPS_KEPT_MAX`` groups are kept, of each ``SAMPLES`` samples of 12 bytes, whatever
  clients make: 4 MiB.
* What is not known is None and never 0: for a group that there was no room for, and for as long as
  that may have been so.
* It begins anew with each tenure.
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
from tickwheel.persistence.contract import OnDisk
from tickwheel.server.shard.backups import DailyBackups
from tickwheel.server.shard.reads import when_back

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tickwheel.clock import Clock
    from tickwheel.engine.state import Core
    from tickwheel.engine.timetables import Planned
    from tickwheel.engine.topics import Group, Replay, Topic
    from tickwheel.model.kinds import ProgressKey
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.parts import Parts

CHUNK = 500
READ_BYTES = 16 << 20
"""Bytes at which a read of rows with their bodies ends."""
READS_AT_A_TIME = 4
"""Reads at one time for all groups that are being deleted."""
COMING_DUE_S = 0.05
"""How often, in seconds, a group's deletion looks whether its tasks came due anew."""
DISK_S = 15.0
"""How often, in seconds, the disk is measured."""
SWEEP_S_MIN = 1.0
SWEEP_S_MAX = 600.0
SOON, AGAIN = 0.25, 0.005
"""In the last quarter of its retention the oldest dead letter is looked for each 200th of it (14
days: every 1.7 hours)."""


class Upkeep:
    """Deletes groups and topics, replays, sweeps; ``start`` it once everything is loaded."""

    def __init__(self, parts: Parts, backup_folder: Path) -> None:
        self._parts = parts
        self._backup_folder = backup_folder
        self._reads = asyncio.Semaphore(READS_AT_A_TIME)
        self._drains: dict[Group, asyncio.Task[None]] = {}
        self._retention_ms = int(parts.settings.dead_retention_s * 1000)
        self.unused = UnusedGroups(parts, self.end_group)
        self.lags = Lags(parts.core, parts.clock)

    def start(self) -> None:
        """Go on with the deletions that were under way when the daemon ended last."""
        for topic in self._parts.core.topics.values():
            for group in topic.groups.values():
                if group.is_closed:
                    self.drain(group)
            if topic.settings.closed_ms is not None:
                self.withdraw(topic)
            elif topic.settings.broadcast_only:
                self.let_go(topic)
        self._parts.spawn(self._sweep_for_ever())
        self._parts.observed.groups_unused = 0
        self._parts.spawn(self.unused.run())
        self._parts.spawn(self.lags.run())
        if self._parts.history is not None:
            self._parts.spawn(self._parts.history.flush_for_ever(self._parts.core))
        self._parts.spawn(self._measure_disk_for_ever())
        hour = self._parts.settings.backup_daily_hour
        if hour is not None:
            self._parts.spawn(DailyBackups(self._parts, self._backup_folder, hour).run())

    async def _measure_disk_for_ever(self) -> None:
        """Note how full the disk with the database is; a disk that hangs holds one thread."""
        store, observed = self._parts.store, self._parts.observed
        while isinstance(store, OnDisk):
            with contextlib.suppress(OSError):
                folder = os.path.dirname(store.path)
                observed.disk_used = (await asyncio.to_thread(disk.measure, folder)).share
            await asyncio.sleep(DISK_S)

    # --- deleting a group ----------------------------------------------------------------------

    def end_group(self, group: Group) -> None:
        """Delete the group, whatever it holds."""
        closing = self._parts.engine.closing
        closing.close(group)
        if closing.is_drained(group):
            closing.finish(group)
        else:
            self.drain(group)
        self._parts.committer.kick()

    def drain(self, group: Group) -> None:
        """Let go of what a closed group holds, in the background, and then of the group."""
        self._drains[group] = self._parts.spawn(self._drain(group))

    async def _drain(self, group: Group) -> None:
        closing = self._parts.engine.closing
        await self._parts.loaded.wait()
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
            async with self._reads, self._parts.reader.read_some(ids, READ_BYTES) as (view, rest):
                some = ids[: len(ids) - len(rest)]
                closing.drop(group, some, view(some))
            self._parts.committer.kick()
            await self._parts.committer.barrier()
        closing.finish(group)
        del self._drains[group]
        self._parts.committer.kick()
        self._parts.wake()

    # --- deleting a topic ----------------------------------------------------------------------

    def withdraw(self, topic: Topic) -> None:
        """End the tasks of a closed topic once its groups are gone, and then forget the topic."""
        self._parts.spawn(self._withdraw(topic))

    async def _withdraw(self, topic: Topic) -> None:
        closing, grouping = self._parts.engine.topic_closing, self._parts.engine.grouping
        await self._parts.loaded.wait()
        await asyncio.gather(*(self._drains[group] for group in topic.groups.values()))
        seen = 1
        while seen and not grouping.is_empty(topic):
            # What was staged when it was closed is stored then.
            await self._parts.committer.barrier()
            seen = 0
            after: int | None = 0
            while after is not None:
                page, after = await self._page(after, topic.name)
                seen += len(page)
                closing.withdraw(page)
                self._parts.committer.kick()
                await self._parts.committer.barrier()
        closing.finish(topic)
        self._parts.observed.lateness.forget([topic.name])
        self._parts.committer.kick()

    # --- topics for broadcasts only ------------------------------------------------------------

    def let_go(self, topic: Topic) -> None:
        """End the tasks that came due and wait for a group on a topic for broadcasts alone."""
        if topic.default_backlog is not None and topic.default_backlog.ready_count:
            self._parts.spawn(self._let_go(topic))

    async def _let_go(self, topic: Topic) -> None:
        await self._parts.loaded.wait()
        after: int | None = 0
        while after is not None and topic.settings.broadcast_only:
            page, after = await self._page(after, topic.name)
            for known in page:
                if topic.settings.broadcast_only:
                    self._parts.engine.firing.let_go(known)
            self._parts.committer.kick()
            await self._parts.committer.barrier()

    async def _page(
        self, after: int, topic: str, limit: int = CHUNK
    ) -> tuple[list[TaskSnapshot], int | None]:
        """The next stored tasks of a topic, and the id to go on after (None: there are no more)."""
        return await when_back(partial(self._parts.reader.scan, after, limit, topic))

    async def _some_dead(self, group: Group, after: ProgressKey) -> list[int]:
        """The ids of the group's next dead letters, which only the store knows."""
        await self._parts.committer.barrier()
        scan = self._parts.store.scan_dead
        rows = await when_back(partial(scan, after, CHUNK, group.topic.name, group.name))
        return [row.id for row in rows]

    # --- tasks for a new group -----------------------------------------------------------------

    def replay(self) -> None:
        """Look at older tasks for groups that were made with a start in the past."""
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
            self._parts.engine.ownership.replayed(replay, page, following, now_ms)
            self._parts.wake()
            await asyncio.sleep(0)

    # --- schedules -----------------------------------------------------------------------------

    def cancel_previous(self) -> None:
        """Cancel unfinished tasks of schedules whose next occurrence replaces them."""
        schedule_heap = self._parts.core.schedule_heap
        wanted, schedule_heap.wants_cancel = schedule_heap.wants_cancel, []
        for planned in wanted:
            self._parts.spawn(self._cancel_previous(planned))

    async def _cancel_previous(self, planned: Planned) -> None:
        await self._parts.loaded.wait()
        task_id = planned.row.last_id
        async with self._reads, self._parts.reader.read_some([task_id], READ_BYTES) as (view, _):
            self._parts.engine.schedules.replace(planned, task_id, view([task_id]).get(task_id))
        self._parts.committer.kick()
        self._parts.wake()

    # --- dead letters --------------------------------------------------------------------------

    async def _sweep_for_ever(self) -> None:
        """Sweep when the oldest dead letter may be over, and now and then before: it may have been
        requeued, and nobody is to be warned of its end."""
        pause_s = min(SWEEP_S_MAX, max(SWEEP_S_MIN, self._retention_ms / 10_000))
        next_ms = looked_ms = 0
        while True:
            now_ms = self._parts.clock.read().now_ms
            soon = next_ms - now_ms < self._retention_ms * SOON
            again = soon and now_ms - looked_ms >= self._retention_ms * AGAIN
            if self._parts.core.dead and (now_ms >= next_ms or again):
                looked_ms = now_ms
                next_ms = await self.sweep_dead(now_ms) + self._retention_ms
            self._parts.observed.dead_expire_s = next_ms / 1000 if self._parts.core.dead else 0.0
            await asyncio.sleep(pause_s)

    async def sweep_dead(self, now_ms: int) -> int:
        """Delete dead letters that died more than the retention before ``now_ms``; returns when the
        oldest of the others died (or ``now_ms``)."""
        oldest_ms = now_ms
        await self._parts.committer.barrier()
        after = (0, "")
        while True:
            rows = await when_back(partial(self._parts.store.scan_dead, after, CHUNK, None, None))
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
            async with self._parts.reader.read_some(ids, READ_BYTES) as (view, rest):
                unread = set(rest)
                for task_id, group in keys:
                    if task_id in unread:
                        continue
                    # One by one: a task with letters of two groups changes with the first.
                    found = view([task_id]).get(task_id)
                    dead = None if found is None else found.dead.get(group)
                    if found is None or dead is None or dead.died_ms > limit_ms:
                        continue
                    word = self._parts.engine.dead_letters.delete(found, group)
                    self._parts.core.totals.dead_expired += word == "deleted"
            keys = [key for key in keys if key[0] in unread]
            self._parts.committer.kick()
            await self._parts.committer.barrier()


# --- groups that nobody uses ---------------------------------------------------------------------

LOOK_S_MIN, LOOK_S_MAX = 0.1, 60.0
LOOKS = 10
"""How many looks there are, at least, in the shortest of the times that are set."""
GROUPS_AT_A_TIME = 1_000


class UnusedGroups:
    """Reports and ends unused groups; ``run`` it for as long as this daemon leads the shard."""

    def __init__(self, parts: Parts, end: Callable[[Group], None]) -> None:
        """``end`` deletes a group and lets go of what it holds."""
        self._parts = parts
        self._end = end
        settings = parts.settings
        report_s, end_s = settings.group_unused_report_s, settings.group_unused_end_s
        self._report_ms = int(report_s * 1000)
        self._end_ms = None if end_s is None else int(end_s * 1000)
        self._pause_s = min(LOOK_S_MAX, max(LOOK_S_MIN, report_s / LOOKS))

    async def run(self) -> None:
        """Look at all groups again and again, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_s)

    async def look(self) -> None:
        """Look at every group once."""
        found = looked_at = 0
        for topic in list(self._parts.core.topics.values()):
            for group in topic.live_groups:
                if not group.is_closed:
                    found += self._is_unused(group, self._parts.clock.read().mono_ms)
                looked_at += 1
                if looked_at % GROUPS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
        self._parts.observed.groups_unused = found

    def _is_unused(self, group: Group, mono_ms: int) -> bool:
        if group.was_used or group.subscribers or group.flight:
            group.was_used = group.is_unused = False
            group.used_mono_ms = mono_ms
            return False
        unused_ms = mono_ms - group.used_mono_ms
        named = f"group {group.name} of topic {group.topic.name}"
        if self._end_ms is not None and unused_ms >= self._end_ms and not self._follows(group):
            self._parts.on_event(
                "group_ended",
                f"{named}: nobody used it for {unused_ms / 1000:.0f} s (group_unused_end_s); it"
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
                f"{named}: nobody used it for {unused_ms / 1000:.0f} s; it holds"
                f" {group.ready_count} ready; `tickwheel groups delete` if it is not wanted",
            )
        return True

    def _follows(self, group: Group) -> bool:
        """Whether the group ends when it ends in another shard, where its settings have their
        home."""
        versions = self._parts.core.versions
        return group.version > 0 and versions.home_of(group.topic.name) != versions.shard


# --- how far groups were behind ------------------------------------------------------------------

SAMPLE_S: Final = 10
SAMPLES: Final = 360
GROUPS_KEPT_MAX: Final = 1_000
SAMPLED_AT_A_TIME: Final = 100
READY_SHOWN_MAX: Final = 2**32 - 1
"""The longest backlog that is shown; a longer one is shown as this long."""
_PLACES: Final = SAMPLES + 1
"""Places for samples: one more than are shown, so that no sample is seen half taken."""


class _Line:
    """The samples of one group; the place of a sample is its number modulo ``_PLACES``."""

    __slots__ = ("ages_ms", "last", "ready", "since")

    def __init__(self, number: int) -> None:
        self.since = self.last = number
        """The numbers of the first sample, and of the last one that had something ready."""
        self.ready = array("I", [0]) * _PLACES
        self.ages_ms = array("Q", [0]) * _PLACES

    def take(self, number: int, ready: int, since_ms: int | None, now_ms: int) -> None:
        """Take one sample; ``since_ms`` is when the oldest ready task became ready."""
        if ready:
            self.last = number
        place = number % _PLACES
        self.ready[place] = min(ready, READY_SHOWN_MAX)
        self.ages_ms[place] = 0 if since_ms is None else max(0, now_ms - since_ms)


class Lags:
    """Samples of all groups; ``run`` it as a task for as long as this daemon leads the shard."""

    def __init__(self, core: Core, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._taken_ms: deque[int] = deque(maxlen=SAMPLES)
        self._number = 0
        """The number of the newest whole sample; the first one has 1."""
        self._lines: dict[Group, _Line] = {}
        self._crowded = 0
        """The number of the last sample in which some group had no room."""

    async def run(self) -> None:
        """Take a sample every ``SAMPLE_S`` seconds, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        """Take a sample of every group."""
        now, number = self._clock.read(), self._number + 1
        looked_at = 0
        room = GROUPS_KEPT_MAX - len(self._lines)
        kept: dict[Group, _Line] = {}
        for topic in list(self._core.topics.values()):
            for group in topic.live_groups:
                looked_at += 1
                if looked_at % SAMPLED_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                ready = group.ready_count
                line = self._lines.get(group)
                if line is None and ready:
                    if room <= 0:
                        self._crowded = number
                        continue
                    room -= 1
                    line = _Line(number)
                if line is None or (not ready and number - line.last >= SAMPLES):
                    continue
                line.take(number, ready, group.oldest_since_ms(), now.now_ms)
                kept[group] = line
        self._lines, self._number = kept, number
        self._taken_ms.append(now.now_ms)

    def of(self, group: Group) -> dict[str, Any]:
        """The group's samples in the form of the answer, the oldest first."""
        line, newest = self._lines.get(group), self._number
        numbers = range(newest - len(self._taken_ms) + 1, newest + 1)
        ready: list[int | None] = []
        ages_ms: list[int | None] = []
        for number in numbers:
            if line is not None and number >= line.since:
                place = number % _PLACES
                ready.append(line.ready[place])
                ages_ms.append(line.ages_ms[place])
            else:
                known = 0 if number > self._crowded else None
                ready.append(known)
                ages_ms.append(known)
        return {
            "every_ms": SAMPLE_S * 1000,
            "taken_ms": list(self._taken_ms),
            "ready": ready,
            "oldest_ready_ms": ages_ms,
        }
