"""Groups as things of their own: made, set, restored.

The first group of a topic gets everything that waits, whatever start it asks for: nothing is
discarded by making a group. A further one is owed what comes due from its start on; when that
lies in the past, the shell hands the stored tasks of the topic to ``Ownership.replayed``.
"""

from __future__ import annotations

from tickwheel.wheel.core import Core
from tickwheel.wheel.groups import NOTHING_SET, Group, Topic
from tickwheel.wheel.ownership import Ownership
from tickwheel.wheel.rates import changed
from tickwheel.wheel.records import TOPIC_ITSELF, GroupRow, GroupSettings


class Grouping:
    """Verbs on groups and topics; all of them go into the open batch."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- made ------------------------------------------------------------------------------

    def group(self, topic: Topic, name: str, now_ms: int) -> Group:
        """The group, made and recorded on first use. May be one that ``is_closed``."""
        return topic.groups.get(name) or self.create_now(topic, name, now_ms)

    def create_now(self, topic: Topic, name: str, now_ms: int) -> Group:
        """A group that is not there, owed what comes due from now on."""
        return self.create(topic, name, self._ownership.from_now_ms(now_ms))

    def create(self, topic: Topic, name: str, since_ms: int, *, by_due: bool = False) -> Group:
        """A group that is not there, owed what is due from ``since_ms`` on and whatever is
        enqueued from now on; ``by_due``: the start lies in the future, and only the former."""
        core = self._core
        if topic.unowned is not None:
            made, topic.unowned = topic.unowned, None
            core.full_topics.pop(topic.name, None)
            made.name = name
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
        core.open.effects.groups[topic.name, name] = made.row()
        if core.recorder is not None:
            core.recorder.group_created(made)
        return made

    def release(self, topic: Topic) -> None:
        """There is somebody again for what came due: it comes due anew."""
        core, deferred = self._core, topic.deferred
        core.firing.update(deferred)
        core.wants += deferred
        topic.deferred = {}

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
        for group in topic.groups.values():
            core.wake(group)

    # --- restored --------------------------------------------------------------------------

    def restore(self, row: GroupRow) -> None:
        """Rows come oldest first. Rates begin with a full burst."""
        topic, settings = self._core.topic(row.topic), row.settings or NOTHING_SET
        bucket = changed(None, settings.rate, settings.burst, 0)
        if row.group == TOPIC_ITSELF:
            topic.settings, topic.bucket = settings, bucket
            return
        group = topic.groups[row.group] = Group(topic, row.group, row.since_ms)
        group.settings, group.bucket = settings, bucket
        group.was_restored = group.is_closed
        topic.unowned = None
        topic.closing += group.is_closed
        if self._ownership.begin_again(group, row.since_id):
            self._core.open.effects.groups[row.topic, row.group] = group.row()
