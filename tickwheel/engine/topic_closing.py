"""The deletion of a topic, with all that it holds.

It takes bounded steps, like that of a group (``groups.py``). ``close`` marks the topic and all its
groups, in one batch: from then on nothing is taken for it and nothing of it is handed out. The
shard lets its groups go, then gives what is left of its tasks, page by page, to ``withdraw``: they
end as deleted. ``finish`` takes the mark and every setting away, and forgets the topic. After a
crash the marked topic comes back with what is left of it, and the shard goes on.

Schedules are not its business: nobody deletes a topic that a schedule enqueues to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.engine.topics import NOTHING_SET
from tickwheel.model.kinds import GROUP
from tickwheel.model.records import TOPIC_ITSELF

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.engine.delivery import Delivery
    from tickwheel.engine.groups import Closing, Grouping
    from tickwheel.engine.state import Core
    from tickwheel.engine.tasks import Control
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.model.records import TaskSnapshot


class TopicClosing:
    """Deletes topics in bounded steps: the engine's part of TOPIC_DELETE."""

    def __init__(
        self,
        core: Core,
        grouping: Grouping,
        closing: Closing,
        control: Control,
        delivery: Delivery,
    ) -> None:
        self._core = core
        self._grouping = grouping
        self._closing = closing
        self._control = control
        self._delivery = delivery

    def held(self, topic: Topic) -> dict[str, int]:
        """What a deletion takes: tasks by state (those not durable count as pending), and
        groups."""
        holders: list[Group] = list(topic.groups.values())
        if topic.default_backlog is not None:
            holders.append(topic.default_backlog)
        return {
            "pending": topic.scheduled + self._core.staged_on(topic.name),
            "ready": sum(group.ready_count for group in holders),
            "in_flight": sum(len(group.flight) for group in holders),
            "waiting": sum(len(group.waiting) for group in holders),
            "dead": sum(group.dead for group in holders),
            "groups": len(topic.live_groups),
        }

    def close(self, topic: Topic, now_ms: int) -> list[Group]:
        """Mark a topic as being deleted and close its groups, which are returned."""
        closed = topic.live_groups
        for group in closed:
            self._closing.close(group)
        self._delivery.end_broadcasts(topic, f"topic {topic.name} was deleted")
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
        core = self._core
        settings = NOTHING_SET
        if closed_ms is not None:
            settings = topic.settings._replace(closed_ms=closed_ms)
        self._grouping.set_settings(topic, settings)
        core.open.effects.change(GROUP, {(topic.name, TOPIC_ITSELF): topic.row()})
        if core.recorder is not None:
            core.recorder.configured(topic, None)
        core.lost_task(topic)
