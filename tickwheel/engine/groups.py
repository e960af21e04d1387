"""Groups and topics as things of their own: made, set, restored, reset, deleted. Topics are made
with whatever names them first and forgotten when nothing is left of them.

The first group of a topic gets everything that waits, whatever start it asks for: nothing is
discarded by making a group. A further one is owed what comes due from its start on; when that
lies in the past, the shard hands the stored tasks of the topic to ``Ownership.replayed``.

A deletion takes bounded steps, because a group with a million tasks must not make one batch.
``Closing.close`` marks the group, durably: from then on it is handed and owed nothing more. The
shard asks for some of what it still holds (``some``), reads the records, and lets ``drop`` take
them out: a task that is owed to nobody else ends as deleted, otherwise only this group's share is
gone. When nothing is left, ``finish`` removes the group. After a crash the marked group comes back
with what it still held, and the shard goes on.

The group stays in its place in ``Topic.groups`` until then, because tasks that are not in
``Core.owed`` belong to the first one. Tasks that come due meanwhile name their groups in ``owed``
even when it is only one. On a topic whose last group is being deleted they wait in
``Topic.deferred`` for the end of that, so that they get to the next first group.

The deletion of a topic, with all that it holds, takes bounded steps, too. ``TopicClosing.close``
marks the topic and all its groups, in one batch: from then on nothing is taken for it and nothing
of it is handed out. The shard lets its groups go, then gives what is left of its tasks, page by
page, to ``withdraw``: they end as deleted. ``finish`` takes the mark and every setting away, and
forgets the topic. After a crash the marked topic comes back with what is left of it, and the shard
goes on. Schedules are not its business: nobody deletes a topic that a schedule enqueues to.

A reset (``Resets``) gives a group again what it had finished, or missed, since a moment. For each
such task there is a new one, due at once, with what the former carried and
``TaskOptions.replayed``, which says what it stands for and whose alone it is (``ownership.py``,
rule 7). So it has its own attempts, retries, dead letters and end, and nobody else notices it.

A reset is a bulk operation (``tasks.py``). Unlike what other bulk operations do, new tasks may be
refused; then the bulk operation is set back to where it was before, in the same step
(``Bulks.undo``). So each task is given exactly once, whatever is refused and wherever a crash
comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.events import DELETED
from tickwheel.engine.ownership import is_done, owing
from tickwheel.engine.queues import Bucket, changed
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
    """The verbs on groups and topics; each change goes into the open batch."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- made ------------------------------------------------------------------------------

    def group(self, topic: Topic, name: str, now_ms: int) -> Group:
        """The group, made and recorded on first use. It may be one that ``is_closed``."""
        return topic.groups.get(name) or self.create_now(topic, name, now_ms)

    def create_now(
        self, topic: Topic, name: str, now_ms: int, settings: GroupSettings = NOTHING_SET
    ) -> Group:
        """Make a group that is owed what comes due from now on."""
        return self.create(topic, name, self._ownership.from_now_ms(now_ms), settings)

    def create(
        self,
        topic: Topic,
        name: str,
        since_ms: int,
        settings: GroupSettings = NOTHING_SET,
        *,
        by_due: bool = False,
    ) -> Group:
        """A group that is not there, owed what is due from ``since_ms`` on and whatever is
        enqueued from now on; ``by_due``: the start lies in the future, and only the former. Of
        ``settings`` it begins with the filter; ``set`` sets the others."""
        core, waits = self._core, 0
        if topic.default_backlog is not None:
            made, topic.default_backlog = topic.default_backlog, None
            core.full_topics.pop(topic.name, None)
            made.name = name
            waits = core.wheel_id
            self._ownership.begin_first(made, 0)
        else:
            made = Group(topic, name, since_ms)
            if topic.live_groups:
                self._ownership.begin(made, since_ms, by_due=by_due)
            else:
                # What came due while the last one was being deleted is this one's.
                ends_ms = (group.settings.closed_ms or 0 for group in topic.groups.values())
                self._ownership.begin_first(made, 1 + max(ends_ms))
                self.release(topic)
        topic.groups[name] = made
        wanted = NOTHING_SET._replace(tags=settings.tags, where=settings.where)
        self._filter(made, wanted)
        made.unjudged_id = waits if made.judge is not None else 0
        made.version = self.changed(topic.name, 0)
        core.group_count += 1
        core.open.effects.put(GROUP, made.row())
        core.recorder.group_created(made)
        if made.settings != NOTHING_SET:
            core.recorder.configured(topic, made)
        return made

    def _filter(self, group: Group, settings: GroupSettings) -> None:
        """Give the group settings with another filter."""
        self._core.filters_length += length_of(settings) - length_of(group.settings)
        group.settings, group.judge = settings, judge_of(settings)
        topic = group.topic
        topic.known_steps = None
        topic.filtering = any(one.judge is not None for one in topic.groups.values())

    def release(self, topic: Topic) -> None:
        """Let tasks that waited for the deletion of the topic's last group come due anew."""
        core, deferred = self._core, topic.deferred
        core.firing.update(deferred)
        core.wants += deferred
        topic.deferred = {}

    # --- set -------------------------------------------------------------------------------

    def changed(self, topic: str, version: int) -> int:
        """Take note of a change of a group or of a topic's settings; its version, which stays
        ``version`` unless it is at home here."""
        core = self._core
        if not core.versions.numbers(topic):
            return version
        self.count_on(core.versions.counter)
        return core.versions.counter

    def count_on(self, number: int) -> None:
        """Go on counting changes behind this number."""
        versions = self._core.versions
        versions.counter = number
        self._core.open.effects.put(COUNTER, SettingsCounter(number, versions.sure))

    def followed(self, group: Group, version: int) -> None:
        """Note that the group has the settings of its home, in this version."""
        group.version = version
        self._core.open.effects.put(GROUP, group.row())

    def followed_topic(self, topic: Topic, version: int) -> None:
        """Note that the topic has the settings of its home, in this version."""
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
        """``settings`` with another filter, which judges tasks that come due from now on."""
        former = self._ownership.former(group, now_ms)
        return settings._replace(tags=tags, where=where, former=former)

    def set(self, group: Group, settings: GroupSettings, mono_ms: int) -> None:
        """Give the group settings, durable with the open batch, in force at the next dispatch."""
        core = self._core
        if settings[1:3] != group.settings[1:3]:
            group.bucket = self._bucket(group.bucket, settings, mono_ms)
            core.throttled.pop(group, None)
        if filters_of(settings) != filters_of(group.settings):
            self._filter(group, settings)
        former, group.settings = group.settings, settings
        group.version = self.changed(group.topic.name, group.version)
        self._share(group, former, mono_ms)
        core.ledger.changed[group] = None
        core.open.effects.put(GROUP, group.row())
        core.recorder.configured(group.topic, group)
        core.wake(group)

    def _bucket(
        self, old: Bucket | None, settings: GroupSettings, mono_ms: int
    ) -> Bucket | None:  # fmt: skip
        """This shard's part of the rate and burst, which are of all shards together."""
        return changed(old, settings.rate, settings.burst, mono_ms, self._core.config.shards)

    def _share(self, group: Group, former: GroupSettings, mono_ms: int) -> None:
        """Rearrange the fair shares of the group if the settings of its sharing have changed."""
        if _sharing(group.settings) == _sharing(former):
            return
        for paused in self._core.orderings.begin(group).shared_by(former, mono_ms):
            self._core.open.effects.drop(PAUSED_KEY, PAUSED_KEY.key(paused))

    def set_topic(self, topic: Topic, settings: GroupSettings, mono_ms: int) -> None:
        core = self._core
        if settings[1:3] != topic.settings[1:3]:
            topic.bucket = self._bucket(topic.bucket, settings, mono_ms)
            for group in topic.groups.values():
                core.throttled.pop(group, None)
        self.note_settings(topic, settings)
        for group in topic.groups.values():
            core.ledger.changed[group] = None
            core.wake(group)

    def note_settings(self, topic: Topic, settings: GroupSettings) -> None:
        """Set a topic's settings, durably with the open batch."""
        core = self._core
        self.set_settings(topic, settings)
        version = self.changed(topic.name, topic.version)
        topic.version = 0 if settings == NOTHING_SET else version
        core.open.effects.change(GROUP, {(topic.name, TOPIC_ITSELF): topic.row()})
        core.recorder.configured(topic, None)
        core.lost_task(topic)

    def set_settings(self, topic: Topic, settings: GroupSettings) -> None:
        """Set a topic's settings in memory alone, with the sets of topics that enqueues look at."""
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
        """Send the tasks of a group to a target, in the place of the one before."""
        self._core.targets[row.topic, row.group] = row
        self._core.open.effects.put(TARGET, row)

    def drop_target(self, topic: str, group: str) -> TargetRow | None:
        """Take the target of a group away, which is returned; None: it has none."""
        row = self._core.targets.pop((topic, group), None)
        if row is not None:
            self._core.open.effects.drop(TARGET, (topic, group))
        return row

    # --- forgotten -------------------------------------------------------------------------

    def forget_idle(self, limit: int) -> list[str]:
        """Forget topics of which nothing is left, looking at ``limit`` at most; their names.

        Nobody can hold one of them: whoever does is a group, a broadcaster, or a task. What it
        counted since the start is in the totals.
        """
        core, forgotten = self._core, list[str]()
        for name in list(islice(core.maybe_idle, limit)):
            # One that is not idle is put here again when it may have become so.
            del core.maybe_idle[name]
            topic = core.topics.get(name)
            if topic is not None and self.is_idle(topic):
                self.forget(topic)
                forgotten.append(name)
        return forgotten

    def forget(self, topic: Topic) -> None:
        """Forget a topic that is idle."""
        if topic.default_backlog is not None:
            self._core.orderings.forget(topic.default_backlog)
        del self._core.topics[topic.name]
        self._core.full_topics.pop(topic.name, None)

    def is_idle(self, topic: Topic) -> bool:
        """Whether the topic holds nothing, has no settings, and nobody listens to it."""
        return topic.settings == NOTHING_SET and self.is_empty(topic)

    def is_empty(self, topic: Topic) -> bool:
        """Whether the topic holds nothing, and nobody listens to it."""
        core, default_backlog = self._core, topic.default_backlog
        if topic.groups or topic.broadcasters or topic.scheduled or topic.deferred:
            return False
        if default_backlog is not None and (default_backlog.ready_count or default_backlog.waiting):
            return False
        return not any(topic.name in batch.topics for batch in core.batches)

    # --- restored --------------------------------------------------------------------------

    def restore(self, row: GroupRow) -> None:
        """Restore a group or topic settings. Rows come oldest first; bursts are full again."""
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
        topic.known_steps = None
        self._core.filters_length += length_of(settings)
        if settings.shares.fair_by is not None and not group.is_closed:
            self._core.orderings.begin(group)
        group.was_restored = group.is_closed
        topic.default_backlog = None
        topic.closing += group.is_closed
        if self._ownership.begin_again(group, row.since_id):
            self._core.open.effects.put(GROUP, group.row())


def _sharing(settings: GroupSettings) -> tuple[object, ...]:
    return settings.shares.fair_by, settings.shares.limit_each, settings.shares.rate_each


@dataclass(eq=False)
class Closing:
    """Deletes groups in bounded steps: the engine's part of GROUP_DELETE."""

    _core: Core
    _ownership: Ownership
    _dead_letters: DeadLetters
    _settlement: Settlement
    _grouping: Grouping

    def close(self, group: Group) -> None:
        """Mark the group as being deleted, and end its subscriptions."""
        core, topic = self._core, group.topic
        self._ownership.end(group)
        self._grouping.changed(topic.name, group.version)
        core.open.effects.put(GROUP, group.row())
        for paused in group.paused_keys.values():
            core.open.effects.drop(PAUSED_KEY, PAUSED_KEY.key(paused))
        group.paused_keys.clear()
        self._grouping.drop_target(topic.name, group.name)
        core.recorder.group_closed(group)
        core.runnable.pop(group, None)
        core.throttled.pop(group, None)
        core.let_in(group)
        for subscriber in group.subscribers:
            message = f"group {group.name} of topic {topic.name} was deleted"
            core.cut.append((subscriber, "not_found", message))
        core.subscribers -= len(group.subscribers)
        group.subscribers.clear()
        group.able.clear()

    def some(self, group: Group, limit: int) -> list[int]:
        """Up to ``limit`` tasks that the group holds, without dead letters and tasks whose rows are
        missing."""
        missing = self._core.missing
        held = chain(group.flight, group.waiting, group.loading)
        ids = list(islice((i for i in held if i not in missing), limit))
        taken = [i for i in group.ready.take(limit - len(ids)) if not group.ready.is_stale(i)]
        if group.is_ordered:
            taken += self._core.orderings.of[group].some(limit - len(ids) - len(taken))
        for task_id in taken:
            # Where cancels and acks find it while its record is read.
            group.loading[task_id] = 0
        return ids + taken

    def drop(self, group: Group, asked: Iterable[int], known: Mapping[int, TaskSnapshot]) -> None:
        """Take these tasks out of the group, as far as it still holds them."""
        for task_id in asked:
            found = known.get(task_id)
            if found is None or not self._take_out(group, found):
                continue
            if is_done(found, group):
                self._ownership.finish_done(group, found)
            else:
                self._forget(group, found.row)

    def _take_out(self, group: Group, found: TaskSnapshot) -> bool:
        core, task_id = self._core, found.row.id
        if found.row.topic != group.topic.name:
            return False
        lease = group.flight.get(task_id)
        if lease is not None:
            self._settlement.group_closed(lease)
        elif task_id in group.waiting or task_id in group.loading:
            core.leave(group, found.row)
        elif group.name in found.dead:
            self._dead_letters.drop(group, task_id)
        else:
            return False
        return True

    def _forget(self, group: Group, row: TaskRow) -> None:
        core = self._core
        last = self._ownership.finish(group, row, Outcome.DELETED)
        if not last:
            core.open.effects.progress[row.id, group.name] = None
        core.recorder.ended(group.topic.name, group.name, DELETED, row.id, last=last)

    def is_drained(self, group: Group) -> bool:
        """Whether the group is empty. After a restart its tasks may first have to fire anew."""
        return not group.holds_any and self._ownership.is_past(group)

    def finish(self, group: Group) -> None:
        """Forget a group that is drained."""
        core, topic = self._core, group.topic
        if group.holds_any:
            raise AssertionError(f"group {group.name} of {topic.name} holds tasks")
        del topic.groups[group.name]
        topic.known_steps = None
        topic.filtering = any(one.judge is not None for one in topic.groups.values())
        core.filters_length -= length_of(group.settings)
        topic.closing -= 1
        core.group_count -= 1
        core.open.effects.drop(GROUP, (topic.name, group.name))
        core.leased.pop(group, None)
        core.runnable.pop(group, None)
        core.numbered.pop(group, None)
        core.let_in(group)
        core.orderings.forget(group)
        if not topic.groups:
            topic.default_backlog = Group(topic, "", 0)
            self._grouping.release(topic)
            core.lost_task(topic)


@dataclass(eq=False)
class TopicClosing:
    """Deletes topics in bounded steps: the engine's part of TOPIC_DELETE."""

    _core: Core
    _grouping: Grouping
    _closing: Closing
    _control: Control
    _subscriptions: Subscriptions

    def held(self, topic: Topic) -> dict[str, int]:
        """What a deletion takes: tasks by state (those not durable count as scheduled), and
        groups."""
        scheduled = topic.scheduled + self._core.staged_on(topic.name)
        return {"scheduled": scheduled, **topic.held(), "groups": len(topic.live_groups)}

    def close(self, topic: Topic, now_ms: int) -> list[Group]:
        """Mark a topic as being deleted and close its groups, which are returned."""
        closed = topic.live_groups
        for group in closed:
            self._closing.close(group)
        self._subscriptions.end_broadcasts(topic, f"topic {topic.name} was deleted")
        self._set(topic, now_ms)
        return closed

    def withdraw(self, page: Iterable[TaskSnapshot]) -> int:
        """End these tasks of a topic whose groups are gone; returns how many have ended."""
        return sum(self._control.delete(known) for known in page)

    def finish(self, topic: Topic) -> None:
        """End the deletion of a topic whose groups and tasks are gone."""
        self._set(topic, None)
        topic.bucket = None
        if self._grouping.is_empty(topic):
            self._grouping.forget(topic)

    def _set(self, topic: Topic, closed_ms: int | None) -> None:
        """Mark the topic as being deleted since ``closed_ms``; None: remove all of its settings."""
        settings = NOTHING_SET
        if closed_ms is not None:
            settings = topic.settings._replace(closed_ms=closed_ms)
        self._grouping.note_settings(topic, settings)


GIVEN, NO_BODY = "given", "no_body"
"""Words of a reset's steps: tasks that are the group's again, and those of which nobody has the
bodies."""


class Original(NamedTuple):
    """A task as it was before the reset."""

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
        """Make the bulk operation of a reset, and mark its moment in the history."""
        self._core.recorder.group_reset(group, bulk.id, from_ms, bulk.made_ms)
        return self._bulks.make(bulk)

    def may_have(self, group: Group, known: TaskSnapshot) -> bool:
        """Whether a stored task whose due time has come may be given to the group again: the group
        has acked it or let it go, or was never owed it. What expired in the group may not. After a
        restart it may not have fired yet; the rules say who gets it then."""
        row, topic = known.row, group.topic
        if row.id > self._core.wheel_id:
            return False
        if row.options is not None and row.options.replayed is not None:
            return False
        if is_done(known, group):
            return known.progress[group.name].state is not ProgressState.EXPIRED
        return group not in owing(topic.groups, row, known.progress.keys() | known.dead.keys())

    def give(
        self,
        bulk: Bulk,
        group: str,
        originals: Sequence[Original],
        place: Place,
        looked_at: int,
        lost: int,
        now_ms: int,
    ) -> Step:
        """Stage a task for each of ``originals``; to be called in the same step as its ``BulkRow``.
        ``lost``: how many of ``looked_at`` had no body."""
        if originals:
            self._bulks.may_be_refused(bulk.id)
            new_tasks = [again(one, bulk.topic, group, now_ms) for one in originals]
            size_bytes = sum(size_of(task[2], task[3]) for task in new_tasks)
            source = Source(f"{RESET} {bulk.id}")
            ids = self._intake.stage(new_tasks, size_bytes, now_ms, source)
            self._core.open.staged.append((None, None, (0, ids[0], len(ids), now_ms)))
        matched = len(originals) + lost
        return Step(place, looked_at, matched, {GIVEN: len(originals), NO_BODY: lost})


def again(original: Original, topic: str, group: str, now_ms: int) -> NewTask:
    """The replayed task that stands for ``original`` in the group."""
    options = original.options or TaskOptions()
    options = options._replace(
        key=None,
        order_id=None,
        within_ms=None,
        asked_ms=None,
        replayed=Replayed(original.id, group, options.key),
    )
    return topic, now_ms, original.body, options
