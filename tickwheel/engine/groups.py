"""Creates, configures, restores, resets and deletes groups and topics. A topic is created by its
first use, and forgotten when it is empty.

The first group of a topic gets all waiting tasks, whatever start was requested, so that creating a
group discards nothing. A further group is owed the tasks that come due from its start on. If the
start is in the past, the shard passes the stored tasks of the topic to ``Ownership.examine_page``.

A group is deleted in bounded steps, because a million tasks do not fit into one batch.
``Closing.close`` marks the group durably; from then on it gets no deliveries and is owed no new
tasks. The shard repeatedly takes some of its tasks (``take_some_tasks``), reads their records, and
passes them to ``drop``: a task that no other group is owed ends as deleted; any other task leaves
only this group. ``finish`` removes the empty group. After a crash, the marked group and its
remaining tasks are restored, and the shard continues.

Until ``finish`` removes it, the group keeps its position in ``Topic.groups``, because tasks that
are not in ``Core.owed`` belong to the first group. The groups of tasks that come due in the
meantime are recorded in ``owed``, even if there is only one. While the last group of a topic is
being deleted, due tasks wait in ``Topic.deferred`` until a new group is created.

A topic is also deleted in bounded steps. ``TopicClosing.close`` marks the topic and all its groups
in one batch; from then on the topic takes no tasks and delivers none. The shard deletes its groups
and passes its remaining tasks, page by page, to ``withdraw``, which ends them as deleted.
``finish`` removes the mark and all settings, and forgets the topic. After a crash the marked topic
is restored, and the shard continues. A topic that a schedule enqueues to is never deleted.

A reset (``Resets``) gives a group again the tasks that it has finished or missed since a given
moment. For each of them it creates a new task, due now, with ``TaskOptions.replayed``, which names
the original and the only group that is owed the new task (``ownership.py``, rule 7). The new task
has its own attempts, retries, dead letters and end, and does not affect other groups.

A reset is a bulk operation (``tasks.py``). Its new tasks can be refused; then the progress of the
bulk operation is restored in the same step (``Bulks.undo``). So each task is repeated exactly once,
even after refusals and crashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.events import DELETED
from tickwheel.engine.ownership import is_done, owing
from tickwheel.engine.queues import Bucket, adjusted_bucket
from tickwheel.engine.sessions import Source
from tickwheel.engine.tasks import RESET, Step
from tickwheel.engine.topics import NOTHING_SET, Group, Topic
from tickwheel.model.filters import filters_of, judge_of, length_of
from tickwheel.model.kinds import COUNTER, GROUP, PAUSED_KEY, TARGET
from tickwheel.model.records import (
    TOPIC_ITSELF,
    GroupRow,
    GroupSettings,
    Outcome,
    ProgressState,
    Replayed,
    SettingsCounter,
    TaskOptions,
    TaskRow,
    TaskSnapshot,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.engine.delivery import Subscriptions
    from tickwheel.engine.enqueue import Intake
    from tickwheel.engine.ownership import Ownership
    from tickwheel.engine.settlement import DeadLetters, Settlement
    from tickwheel.engine.state import Core
    from tickwheel.engine.tasks import Bulks, Control
    from tickwheel.model.kinds import Bulk, BulkRow, Place, TargetRow
    from tickwheel.model.records import NewTask


class Grouping:
    """The verbs on groups and topics. Each change is recorded in the open batch."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- create ----------------------------------------------------------------------------

    def group(self, topic: Topic, name: str, now_ms: int) -> Group:
        """Return the group, creating it if it does not exist. It may be in deletion."""
        return topic.groups.get(name) or self.create_now(topic, name, now_ms)

    def create_now(
        self, topic: Topic, name: str, now_ms: int, settings: GroupSettings = NOTHING_SET
    ) -> Group:
        """Create a group that is owed tasks that come due from now on."""
        return self.create(topic, name, self._ownership.start_from_now_ms(now_ms), settings)

    def create(
        self,
        topic: Topic,
        name: str,
        since_ms: int,
        settings: GroupSettings = NOTHING_SET,
        *,
        by_due: bool = False,
    ) -> Group:
        """Create a group that is owed the tasks due from ``since_ms`` on and the tasks enqueued
        from now on. With ``by_due`` the start is in the future, and only due times count. The
        filter in ``settings`` applies at once; ``set`` applies the rest."""
        core, last_waiting_id = self._core, 0
        core.full_topics.pop(topic.name, None)
        if topic.default_backlog is not None:
            group, topic.default_backlog = topic.default_backlog, None
            group.name = name
            last_waiting_id = core.wheel_id
            self._ownership.begin_first(group, 0)
        else:
            group = Group(topic, name, since_ms)
            if topic.live_groups:
                self._ownership.begin(group, since_ms, by_due=by_due)
            else:
                # The group gets the tasks that came due while the last group was being deleted.
                ends_ms = (other.settings.closed_ms or 0 for other in topic.groups.values())
                self._ownership.begin_first(group, 1 + max(ends_ms))
                self.release(topic)
        topic.groups[name] = group
        filter_only = NOTHING_SET._replace(tags=settings.tags, where=settings.where)
        self._set_filter(group, filter_only)
        group.unjudged_id = last_waiting_id if group.judge is not None else 0
        group.version = self.record_change(topic.name, 0)
        core.group_count += 1
        core.open.effects.put(GROUP, group.row())
        core.recorder.group_created(group)
        if group.settings != NOTHING_SET:
            core.recorder.configured(topic, group)
        return group

    def _set_filter(self, group: Group, settings: GroupSettings) -> None:
        """Set the group's settings, whose filter has changed."""
        self._core.filters_length += length_of(settings) - length_of(group.settings)
        group.settings, group.judge = settings, judge_of(settings)
        topic = group.topic
        topic.cached_steps = None
        topic.filtering = any(each.judge is not None for each in topic.groups.values())

    def release(self, topic: Topic) -> None:
        """Fire again the tasks that waited for the deletion of the topic's last group."""
        if topic.deferred:
            topic.deferred.release()
            self._core.refiring[topic] = topic.deferred

    # --- set -------------------------------------------------------------------------------

    def record_change(self, topic: str, version: int) -> int:
        """Record a change of a group or of a topic's settings. Return the new version if this shard
        is the topic's home, otherwise ``version``."""
        core = self._core
        if not core.versions.record_change(topic):
            return version
        self.set_counter(core.versions.counter)
        return core.versions.counter

    def set_counter(self, number: int) -> None:
        """Set the number of the last change of settings."""
        versions = self._core.versions
        versions.counter = number
        self._core.open.effects.put(COUNTER, SettingsCounter(number, versions.number_at_start))

    def adopt_version(self, group: Group, version: int) -> None:
        """Record that the group has adopted this version of the settings at its topic's home."""
        group.version = version
        self._core.open.effects.put(GROUP, group.row())

    def adopt_topic_version(self, topic: Topic, version: int) -> None:
        """Record that the topic has adopted this version of the settings at its home."""
        topic.version = version
        self._core.open.effects.change(GROUP, {(topic.name, TOPIC_ITSELF): topic.row()})

    def with_filter(
        self,
        group: Group,
        settings: GroupSettings,
        tags: str | None,
        where: str | None,
        now_ms: int,
    ) -> GroupSettings:
        """Return ``settings`` with a new filter for the tasks that come due from now on."""
        former = self._ownership.former_filters(group, now_ms)
        return settings._replace(tags=tags, where=where, former=former)

    def set(self, group: Group, settings: GroupSettings, mono_ms: int) -> None:
        """Set the group's settings, in the open batch too. They apply from the next dispatch on."""
        core = self._core
        if (settings.rate, settings.burst) != (group.settings.rate, group.settings.burst):
            group.bucket = self._bucket(group.bucket, settings, mono_ms)
            core.throttled.pop(group, None)
        if filters_of(settings) != filters_of(group.settings):
            self._set_filter(group, settings)
        former, group.settings = group.settings, settings
        group.version = self.record_change(group.topic.name, group.version)
        self._share(group, former, mono_ms)
        core.ledger.changed[group] = None
        core.open.effects.put(GROUP, group.row())
        core.recorder.configured(group.topic, group)
        core.wake(group)

    def _bucket(
        self, old: Bucket | None, settings: GroupSettings, mono_ms: int
    ) -> Bucket | None:  # fmt: skip
        """Return a bucket with this shard's part of the rate and burst, which are totals."""
        return adjusted_bucket(
            old, settings.rate, settings.burst, mono_ms, self._core.config.shards
        )

    def _share(self, group: Group, former: GroupSettings, mono_ms: int) -> None:
        """Rearrange the fair shares of the group if their settings have changed."""
        if _sharing(group.settings) == _sharing(former):
            return
        for paused in self._core.orderings.begin(group).apply_settings(former, mono_ms):
            self._core.drop_record(PAUSED_KEY, paused)

    def set_topic(self, topic: Topic, settings: GroupSettings, mono_ms: int) -> None:
        core = self._core
        if (settings.rate, settings.burst) != (topic.settings.rate, topic.settings.burst):
            topic.bucket = self._bucket(topic.bucket, settings, mono_ms)
            for group in topic.groups.values():
                core.throttled.pop(group, None)
        self.note_settings(topic, settings)
        for group in topic.groups.values():
            core.ledger.changed[group] = None
            core.wake(group)

    def note_settings(self, topic: Topic, settings: GroupSettings) -> None:
        """Set a topic's settings in memory and in the open batch."""
        core = self._core
        self.set_settings(topic, settings)
        version = self.record_change(topic.name, topic.version)
        topic.version = 0 if settings == NOTHING_SET else version
        core.open.effects.change(GROUP, {(topic.name, TOPIC_ITSELF): topic.row()})
        core.recorder.configured(topic, None)
        core.lost_task(topic)

    def set_settings(self, topic: Topic, settings: GroupSettings) -> None:
        """Set a topic's settings in memory, and update the sets of topics that enqueues check."""
        core, topic.settings = self._core, settings
        for holds, names in (
            (settings.if_pending is not None, core.ruled_topics),
            (settings.closed_ms is not None, core.closing_topics),
        ):
            if holds:
                names.add(topic.name)
            else:
                names.discard(topic.name)

    # --- targets ---------------------------------------------------------------------------

    def set_target(self, row: TargetRow) -> None:
        """Set or replace the target of a group."""
        before = self._core.targets.get((row.topic, row.group))
        self._core.targets[row.topic, row.group] = row
        self._core.put_record(TARGET, row, before)

    def drop_target(self, topic: str, group: str) -> TargetRow | None:
        """Remove and return the target of a group, or return None if it has none."""
        row = self._core.targets.pop((topic, group), None)
        if row is not None:
            self._core.drop_record(TARGET, row)
        return row

    # --- forget ----------------------------------------------------------------------------

    def forget_idle(self, limit: int) -> list[str]:
        """Forget idle topics, examining at most ``limit``, and return their names. No object refers
        to an idle topic, because it has no groups, broadcasters or tasks."""
        core, forgotten = self._core, list[str]()
        for name in list(islice(core.maybe_idle, limit)):
            # A topic that is not idle now is added again when it might be idle.
            del core.maybe_idle[name]
            topic = core.topics.get(name)
            if topic is not None and self.is_idle(topic):
                self.forget(topic)
                forgotten.append(name)
        return forgotten

    def forget(self, topic: Topic) -> None:
        """Forget an idle topic."""
        if topic.default_backlog is not None:
            self._core.orderings.forget(topic.default_backlog)
        del self._core.topics[topic.name]
        self._core.full_topics.pop(topic.name, None)

    def is_idle(self, topic: Topic) -> bool:
        """Return whether the topic has no tasks, groups, broadcasters or settings."""
        return topic.settings == NOTHING_SET and self.is_empty(topic)

    def is_empty(self, topic: Topic) -> bool:
        """Return whether the topic has no tasks, groups or broadcasters."""
        core, default_backlog = self._core, topic.default_backlog
        if topic.groups or topic.broadcasters or topic.scheduled:
            return False
        if default_backlog is not None and (default_backlog.ready_count or default_backlog.waiting):
            return False
        return not any(topic.name in batch.topics for batch in core.batches)

    # --- restore ---------------------------------------------------------------------------

    def restore(self, row: GroupRow) -> None:
        """Restore a group or a topic's settings, oldest row first. Rate buckets start full."""
        topic, settings = self._core.topic(row.topic), row.settings or NOTHING_SET
        bucket = self._bucket(None, settings, 0)
        if row.group == TOPIC_ITSELF:
            self.set_settings(topic, settings)
            topic.bucket, topic.version = bucket, row.version
            return
        group = topic.groups[row.group] = Group(topic, row.group, row.since_ms)
        self._core.group_count += 1
        group.settings, group.bucket, group.judge = settings, bucket, judge_of(settings)
        group.version = row.version
        topic.filtering |= group.judge is not None
        topic.cached_steps = None
        self._core.filters_length += length_of(settings)
        if settings.shares.fair_by is not None and not group.is_closed:
            self._core.orderings.begin(group)
        group.was_restored = group.is_closed
        topic.default_backlog = None
        topic.closing += group.is_closed
        if self._ownership.restore_start(group, row.since_id):
            self._core.open.effects.put(GROUP, group.row())


def _sharing(settings: GroupSettings) -> tuple[object, ...]:
    return settings.shares.fair_by, settings.shares.limit_each, settings.shares.rate_each


@dataclass(eq=False)
class Closing:
    """The engine's part of GROUP_DELETE, which deletes groups in bounded steps."""

    _core: Core
    _ownership: Ownership
    _dead_letters: DeadLetters
    _settlement: Settlement
    _grouping: Grouping

    def close(self, group: Group) -> None:
        """Mark the group as being deleted, and end its subscriptions."""
        core, topic = self._core, group.topic
        self._ownership.end(group)
        self._grouping.record_change(topic.name, group.version)
        core.open.effects.put(GROUP, group.row())
        for paused in group.paused_keys.values():
            core.drop_record(PAUSED_KEY, paused)
        group.paused_keys.clear()
        self._grouping.drop_target(topic.name, group.name)
        core.recorder.group_closed(group)
        core.runnable.pop(group, None)
        core.throttled.pop(group, None)
        core.stop_keeping_free(group)
        for subscriber in group.subscribers:
            message = f"group {group.name} of topic {topic.name} was deleted"
            core.cut.append((subscriber, "not_found", message))
        core.subscribers -= len(group.subscribers)
        group.subscribers.clear()
        group.able.clear()

    def take_some_tasks(self, group: Group, limit: int) -> list[int]:
        """Return the ids of up to ``limit`` tasks that the group holds, except dead letters and
        tasks with missing rows. Ready tasks leave their queues."""
        missing = self._core.missing
        held_ids = chain(group.flight, group.waiting, group.loading)
        ids = list(islice((i for i in held_ids if i not in missing), limit))
        taken = group.ready.take(limit - len(ids))
        entries = zip(taken, group.ready.priorities(len(taken)), strict=True)
        ready_ids = [i for i, priority in entries if not group.ready.pop_stale(i, priority)]
        if group.is_ordered:
            ready_ids += self._core.orderings.by_group[group].take_some(
                limit - len(ids) - len(ready_ids)
            )
        for task_id in ready_ids:
            # Cancels and acks find the task here while its record is read.
            group.loading[task_id] = 0
        return ids + ready_ids

    def drop(self, group: Group, ids: Iterable[int], snapshots: Mapping[int, TaskSnapshot]) -> None:
        """Remove these tasks from the group if it still holds them."""
        for task_id in ids:
            snapshot = snapshots.get(task_id)
            if snapshot is None or not self._take_out(group, snapshot):
                continue
            if is_done(snapshot, group):
                self._ownership.finish_done(group, snapshot)
            else:
                self._forget(group, snapshot.row)

    def _take_out(self, group: Group, snapshot: TaskSnapshot) -> bool:
        core, task_id = self._core, snapshot.row.id
        if snapshot.row.topic != group.topic.name:
            return False
        lease = group.flight.get(task_id)
        if lease is not None:
            self._settlement.group_closed(lease)
        elif task_id in group.waiting or task_id in group.loading:
            core.leave(group, snapshot.row)
        elif group.name in snapshot.dead:
            self._dead_letters.drop(group, task_id)
        else:
            return False
        return True

    def _forget(self, group: Group, row: TaskRow) -> None:
        core = self._core
        is_last = self._ownership.finish(group, row, Outcome.DELETED)
        if not is_last:
            core.open.effects.progress[row.id, group.name] = None
        core.recorder.ended(group.topic.name, group.name, DELETED, row.id, last=is_last)

    def is_drained(self, group: Group) -> bool:
        """Return whether the group is empty, and no restored task can still fire for it."""
        return not group.holds_any and self._ownership.has_fired_all(group)

    def finish(self, group: Group) -> None:
        """Forget a drained group."""
        core, topic = self._core, group.topic
        if group.holds_any:
            raise AssertionError(f"group {group.name} of {topic.name} holds tasks")
        del topic.groups[group.name]
        topic.cached_steps = None
        topic.filtering = any(each.judge is not None for each in topic.groups.values())
        core.filters_length -= length_of(group.settings)
        topic.closing -= 1
        core.group_count -= 1
        core.open.effects.drop(GROUP, (topic.name, group.name))
        core.leased.pop(group, None)
        core.runnable.pop(group, None)
        core.forget_numbered(group)
        core.stop_keeping_free(group)
        core.orderings.forget(group)
        if not topic.groups:
            topic.default_backlog = Group(topic, "", 0)
            self._grouping.release(topic)
            core.lost_task(topic)


@dataclass(eq=False)
class TopicClosing:
    """The engine's part of TOPIC_DELETE, which deletes topics in bounded steps."""

    _core: Core
    _grouping: Grouping
    _closing: Closing
    _control: Control
    _subscriptions: Subscriptions

    def held(self, topic: Topic) -> dict[str, int]:
        """Return the tasks that a deletion removes, by state, and the number of groups. Tasks that
        are not durable count as scheduled."""
        scheduled = topic.scheduled + self._core.staged_on(topic.name)
        return {"scheduled": scheduled, **topic.held(), "groups": len(topic.live_groups)}

    def close(self, topic: Topic, now_ms: int) -> list[Group]:
        """Mark a topic as being deleted, close its groups, and return them."""
        closed = topic.live_groups
        for group in closed:
            self._closing.close(group)
        self._subscriptions.end_broadcasts(topic, f"topic {topic.name} was deleted")
        self._set(topic, now_ms)
        return closed

    def withdraw(self, page: Iterable[TaskSnapshot]) -> int:
        """End these tasks of a topic that has no groups. Return how many ended."""
        return sum(self._control.delete(snapshot) for snapshot in page)

    def finish(self, topic: Topic) -> None:
        """Complete the deletion of a topic that has no groups and no tasks."""
        self._set(topic, None)
        topic.bucket = None
        if self._grouping.is_empty(topic):
            self._grouping.forget(topic)

    def _set(self, topic: Topic, closed_ms: int | None) -> None:
        """Mark the topic as being deleted since ``closed_ms``. With None, remove its settings."""
        settings = NOTHING_SET
        if closed_ms is not None:
            settings = topic.settings._replace(closed_ms=closed_ms)
        self._grouping.note_settings(topic, settings)


REPEATED, NO_BODY = "repeated", "no_body"
"""Outcomes of a reset's items: given to the group again, or refused because the body is lost."""


class Original(NamedTuple):
    """A task that a reset repeats."""

    id: int
    options: TaskOptions | None
    body: bytes


class Resets:
    """The resets of groups of one engine."""

    def __init__(self, core: Core, intake: Intake, bulks: Bulks) -> None:
        self._core = core
        self._intake = intake
        self._bulks = bulks

    def begin(self, group: Group, bulk: Bulk, from_ms: int) -> BulkRow:
        """Create the bulk operation of a reset that begins at ``from_ms``, and report it."""
        self._core.recorder.group_reset(group, bulk.id, from_ms, bulk.made_ms)
        return self._bulks.make(bulk)

    def can_repeat(self, group: Group, snapshot: TaskSnapshot) -> bool:
        """Return whether a stored due task can be given to the group again, because the group has
        finished it (unless it expired or was replaced) or was never owed it. The rules of ownership
        also apply to tasks that have not yet fired again after a restart."""
        row, topic = snapshot.row, group.topic
        if row.id > self._core.wheel_id:
            return False
        if row.options is not None and row.options.replayed is not None:
            return False
        if is_done(snapshot, group):
            return snapshot.progress[group.name].state is ProgressState.DONE
        return group not in owing(
            topic.groups, row, snapshot.progress.keys() | snapshot.dead.keys()
        )

    def repeat(
        self,
        bulk: Bulk,
        group: str,
        originals: Sequence[Original],
        place: Place,
        examined: int,
        lost: int,
        now_ms: int,
    ) -> Step:
        """Stage a new task for each of ``originals``. The ``BulkRow`` of ``bulk`` must be written
        in the same step. ``lost`` is the number of examined tasks without a body."""
        if originals:
            self._bulks.save_before_step(bulk.id)
            new_tasks = [
                repeated_task(original, bulk.topic, group, now_ms) for original in originals
            ]
            size_bytes = sum(size_of(task[2], task[3]) for task in new_tasks)
            source = Source(f"{RESET} {bulk.id}")
            ids = self._intake.stage(new_tasks, size_bytes, now_ms, source)
            self._core.open.staged.append((None, None, (0, ids[0], len(ids), now_ms)))
        matched = len(originals) + lost
        return Step(place, examined, matched, {REPEATED: len(originals), NO_BODY: lost})


def repeated_task(original: Original, topic: str, group: str, now_ms: int) -> NewTask:
    """Return the new task that gives ``original`` to the group again."""
    options = original.options or TaskOptions()
    options = options._replace(
        key=None,
        order_id=None,
        within_ms=None,
        asked_ms=None,
        replayed=Replayed(original.id, group, options.key),
    )
    return topic, now_ms, original.body, options
