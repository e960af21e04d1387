"""Deleting groups, in bounded steps: a group with a million tasks must not make one batch.

``close`` marks the group, durably: from then on it is handed and owed nothing more. The shell
asks for some of what the group still holds (``some``), reads the records, and lets ``drop`` take
them out: a task that is owed to nobody else ends as deleted, otherwise only this group's share
is gone. When nothing is left, ``finish`` removes the group. After a crash the marked group comes
back with what it still held, and the shell goes on.

The group stays in its place in ``Topic.groups`` until then, because tasks that are not in
``Core.owed`` belong to the first one. Tasks that come due meanwhile name their groups in ``owed``
even when it is only one; on a topic whose last group is being deleted they wait in
``Topic.deferred`` for the end of that, so that they get to the next first group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from tickwheel.wheel.core import Core
from tickwheel.wheel.grouping import Grouping
from tickwheel.wheel.groups import Group
from tickwheel.wheel.ownership import Ownership
from tickwheel.wheel.recording import DELETED
from tickwheel.wheel.records import Ending, Known, TaskRow


class Closing:
    """The engine's part of GROUP_DELETE."""

    def __init__(self, core: Core, ownership: Ownership, grouping: Grouping) -> None:
        self._core = core
        self._ownership = ownership
        self._grouping = grouping

    def close(self, group: Group) -> None:
        """Mark it. Its subscriptions end."""
        core, topic = self._core, group.topic
        self._ownership.end(group)
        core.open.effects.groups[topic.name, group.name] = group.row()
        if core.recorder is not None:
            core.recorder.group_closed(group)
        core.runnable.pop(group, None)
        core.throttled.pop(group, None)
        for subscriber in group.subscribers:
            told = f"group {group.name} of topic {topic.name} was deleted"
            core.cut.append((subscriber, "not_found", told))
        group.subscribers = []

    def some(self, group: Group, limit: int) -> list[int]:
        """Up to ``limit`` tasks that it holds, dead letters not among them."""
        ids = list(islice(group.flight, limit))
        ids += islice(group.waiting, limit - len(ids))
        ids += islice(group.loading, limit - len(ids))
        for task_id in group.ready.take(limit - len(ids)):
            if not group.is_stale(task_id):
                # Where cancels and acks find it while its record is read.
                group.loading[task_id] = 0
                ids.append(task_id)
        return ids

    def drop(self, group: Group, asked: Iterable[int], known: Mapping[int, Known]) -> None:
        """Take these out, as far as the group still holds them."""
        for task_id in asked:
            found = known.get(task_id)
            if found is not None and self._take_out(group, found):
                self._forget(group, found.row)

    def _take_out(self, group: Group, found: Known) -> bool:
        core, task_id, name = self._core, found.row.id, group.name
        if found.row.topic != group.topic.name:
            return False
        lease = group.flight.pop(task_id, None)
        if lease is not None:
            lease.live = False
            core.give_back(lease.subscriber, 1)
        elif task_id in group.waiting or task_id in group.loading:
            core.leave(group, found.row)
        elif name in found.dead:
            core.open.effects.dead[task_id, name] = None
            group.dead -= 1
            core.dead -= 1
            self._ownership.exhume(group, task_id, owes_it=False)
        else:
            return False
        return True

    def _forget(self, group: Group, row: TaskRow) -> None:
        core = self._core
        last = self._ownership.finish(group, row, Ending.DELETED)
        if not last:
            core.open.effects.progress[row.id, group.name] = None
        if core.recorder is not None:
            core.recorder.ended(group.topic.name, group.name, DELETED, row.id, last=last)

    def is_drained(self, group: Group) -> bool:
        """Nothing is left of it. After a restart what it held unrecorded comes due anew first."""
        return not self._holds(group) and self._ownership.is_past(group)

    @staticmethod
    def _holds(group: Group) -> bool:
        return bool(group.ready_count or group.flight or group.waiting or group.dead)

    def finish(self, group: Group) -> None:
        """Nothing is left of it."""
        core, topic = self._core, group.topic
        if self._holds(group):
            raise AssertionError(f"group {group.name} of {topic.name} holds tasks")
        del topic.groups[group.name]
        topic.closing -= 1
        core.open.effects.groups[topic.name, group.name] = None
        core.leased.pop(group, None)
        core.runnable.pop(group, None)
        if not topic.groups:
            topic.unowned = Group(topic, "", 0)
            self._grouping.release(topic)
