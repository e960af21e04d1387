"""Groups as things of their own: made, set, and owed what was there before them; and topics, which
are made with whatever names them first, and forgotten when nothing is left of them.

The first group of a topic gets everything that waits, whatever start it asks for: nothing is
discarded by making a group. A further one is owed what comes due from its start on; when that
lies in the past, the shell hands the stored tasks of the topic to ``join``.
"""

from __future__ import annotations

from itertools import islice

from tickwheel.wheel.control import Control, Known, is_done
from tickwheel.wheel.core import Core
from tickwheel.wheel.groups import NOTHING_SET, Group, Owed, Topic
from tickwheel.wheel.leases import priority_of
from tickwheel.wheel.rates import changed
from tickwheel.wheel.records import TOPIC_ITSELF, GroupRow, GroupSettings


class Grouping:
    """Verbs on groups and topics; all of them go into the open batch."""

    def __init__(self, core: Core, control: Control) -> None:
        self._core = core
        self._control = control

    # --- made ------------------------------------------------------------------------------

    def group(self, topic: Topic, name: str, now_ms: int) -> Group:
        """The group, made and recorded on first use. May be one that ``is_closed``."""
        return topic.groups.get(name) or self.create(topic, name, now_ms)

    def create(self, topic: Topic, name: str, since_ms: int) -> Group:
        """A group that is not there, owed what comes due from ``since_ms`` on."""
        core = self._core
        if topic.unowned is not None:
            made, topic.unowned = topic.unowned, None
            core.full_topics.pop(topic.name, None)
            made.name, made.since_ms = name, 0
        else:
            made = Group(topic, name, since_ms)
            self._stay_earliest(topic, since_ms)
        is_first = not topic.live_groups
        topic.groups[name] = made
        core.group_count += 1
        if is_first and topic.closing:
            # What came due while the last one was being deleted is this one's.
            made.since_ms = 1 + max(group.settings.closed_ms or 0 for group in closed(topic))
            self.release(topic)
        core.open.effects.groups[topic.name, name] = made.row()
        if core.recorder is not None:
            core.recorder.group_created(made)
        return made

    def _stay_earliest(self, topic: Topic, since_ms: int) -> None:
        """What came due before all groups and went to the earliest stays theirs, when a new one
        begins before them."""
        for group in topic.earliest:
            if group.since_ms > since_ms:
                group.since_ms = since_ms
                self._core.open.effects.groups[topic.name, group.name] = group.row()

    def release(self, topic: Topic) -> None:
        """There is somebody again for what came due: it comes due anew."""
        core, deferred = self._core, topic.deferred
        core.firing.update(deferred)
        core.wants += deferred
        topic.deferred = {}

    def join(self, group: Group, known: Known, now_ms: int) -> None:
        """A task that may have come due before ``group`` was made: is it owed it, too?"""
        core, row, name = self._core, known.row, group.name
        if group.is_closed or row.topic != group.topic.name or row.due_ms < group.since_ms:
            return
        if name in known.dead or is_done(known, group) or core.is_scheduled(row):
            return
        owed = core.owed.get(row.id)
        if owed is None:
            owners = self._control.groups_of(known)
            if group in owners:
                return
            owed = Owed({owner.name for owner in owners})
            owed.buried = len(known.dead)
            core.owed[row.id] = owed
        elif name in owed.remaining:
            return
        owed.remaining.add(name)
        group.ready.push(row.id, priority_of(row), now_ms)
        core.lifetimes.begin(row)
        core.wake(group)

    # --- set -------------------------------------------------------------------------------

    def set(self, group: Group, settings: GroupSettings, mono_ms: int) -> None:
        """Durable with the open batch; what it allows goes out with the next dispatch."""
        core = self._core
        if settings[1:3] != group.settings[1:3]:
            group.bucket = changed(group.bucket, settings.rate, settings.burst, mono_ms)
            core.throttled.pop(group, None)
        group.settings = settings
        core.open.effects.groups[group.topic.name, group.name] = group.row()
        if core.recorder is not None:
            core.recorder.configured(group.topic, group)
        core.wake(group)

    def set_topic(self, topic: Topic, settings: GroupSettings, mono_ms: int) -> None:
        core = self._core
        if settings[1:3] != topic.settings[1:3]:
            topic.bucket = changed(topic.bucket, settings.rate, settings.burst, mono_ms)
            for group in topic.groups.values():
                core.throttled.pop(group, None)
        topic.settings = settings
        core.open.effects.groups[topic.name, TOPIC_ITSELF] = topic.row()
        if core.recorder is not None:
            core.recorder.configured(topic, None)
        core.lost_task(topic)
        for group in topic.groups.values():
            core.wake(group)

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
                del core.topics[name]
                core.full_topics.pop(name, None)
                forgotten.append(name)
        return forgotten

    def is_idle(self, topic: Topic) -> bool:
        """It holds nothing, nothing was set for it, and nobody listens to it."""
        core, unowned = self._core, topic.unowned
        if topic.groups or topic.broadcasters or topic.scheduled or topic.deferred:
            return False
        if unowned is not None and (unowned.ready_count or unowned.waiting):
            return False
        if topic.settings != NOTHING_SET:
            return False
        batches = (core.open, core.sealed, core.landing)
        return not any(batch is not None and topic.name in batch.topics for batch in batches)

    # --- restored --------------------------------------------------------------------------

    def restore(self, row: GroupRow) -> None:
        """Rows come oldest first. Rates begin with a full burst."""
        topic, settings = self._core.topic(row.topic), row.settings or NOTHING_SET
        bucket = changed(None, settings.rate, settings.burst, 0)
        if row.group == TOPIC_ITSELF:
            topic.settings, topic.bucket = settings, bucket
            return
        group = topic.groups[row.group] = Group(topic, row.group, row.since_ms)
        self._core.group_count += 1
        group.settings, group.bucket = settings, bucket
        group.was_restored = group.is_closed
        topic.unowned = None
        topic.closing += group.is_closed


def closed(topic: Topic) -> list[Group]:
    return [group for group in topic.groups.values() if group.is_closed]
