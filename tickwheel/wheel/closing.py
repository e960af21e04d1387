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
from itertools import chain, islice

from tickwheel.wheel.control import Known
from tickwheel.wheel.core import Core
from tickwheel.wheel.grouping import Grouping
from tickwheel.wheel.groups import Group
from tickwheel.wheel.recording import DELETED
from tickwheel.wheel.records import Ending


class Closing:
    """The engine's part of GROUP_DELETE."""

    def __init__(self, core: Core, grouping: Grouping) -> None:
        self._core = core
        self._grouping = grouping

    def close(self, group: Group, now_ms: int) -> None:
        """Mark it. Its subscriptions end."""
        core, topic = self._core, group.topic
        fired_ms = max(now_ms, core.wheel.position_ms, core.acted_ms)
        group.settings = group.settings._replace(closed_ms=fired_ms, closed_id=core.ids.last)
        topic.closing += 1
        core.open.effects.groups[topic.name, group.name] = group.row()
        if core.recorder is not None:
            core.recorder.group_closed(group)
        core.runnable.pop(group, None)
        core.throttled.pop(group, None)
        for subscriber in group.subscribers:
            told = f"group {group.name} of topic {topic.name} was deleted"
            core.cut.append((subscriber, "not_found", told))
        core.subscribers -= len(group.subscribers)
        group.subscribers.clear()
        group.able.clear()

    def some(self, group: Group, limit: int) -> list[int]:
        """Up to ``limit`` tasks that it holds, dead letters not among them, nor those whose
        records are missing: they are held until these are found."""
        missing = self._core.missing
        held = chain(group.flight, group.waiting, group.loading)
        ids = list(islice((i for i in held if i not in missing), limit))
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
                self._forget(group, task_id)

    def _take_out(self, group: Group, found: Known) -> bool:
        core, task_id, name = self._core, found.row.id, group.name
        if found.row.topic != group.topic.name:
            return False
        lease = group.flight.pop(task_id, None)
        if lease is not None:
            lease.live = False
            core.in_flight -= 1
            core.give_back(lease.subscriber, 1)
        elif task_id in group.waiting or task_id in group.loading:
            core.leave(group, found.row)
        elif name in found.dead:
            core.open.effects.dead[task_id, name] = None
            group.dead -= 1
            core.dead -= 1
            if task_id in core.owed:
                core.owed[task_id].buried -= 1
        else:
            return False
        return True

    def _forget(self, group: Group, task_id: int) -> None:
        core = self._core
        owed = core.owed.get(task_id)
        if owed is not None:
            owed.remaining.discard(group.name)
            if not owed.remaining:
                core.drop(task_id)
        last = owed is None or not (owed.remaining or owed.buried)
        if last:
            core.end(task_id, Ending.DELETED)
        else:
            core.open.effects.progress[task_id, group.name] = None
        if core.recorder is not None:
            core.recorder.ended(group.topic.name, group.name, DELETED, task_id, last=last)

    def is_drained(self, group: Group, now_ms: int) -> bool:
        """Nothing is left of it. After a restart what it held unrecorded comes due anew first."""
        if self._holds(group):
            return False
        closed_ms, core = group.settings.closed_ms, self._core
        if not group.was_restored or closed_ms is None:
            return True
        next_ms = core.wheel.next_due_ms(now_ms)
        if next_ms is not None and next_ms <= closed_ms:
            return False
        return all(due_ms > closed_ms for due_ms in core.firing.values())

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
        core.group_count -= 1
        core.open.effects.groups[topic.name, group.name] = None
        core.leased.pop(group, None)
        core.runnable.pop(group, None)
        if not topic.groups:
            topic.unowned = Group(topic, "", 0)
            self._grouping.release(topic)
            core.lost_task(topic)
