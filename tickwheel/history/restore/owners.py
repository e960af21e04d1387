"""Which groups owe a task an end: the engine's rules (``engine/ownership.py``), over what events
say of groups.

Groups that were deleted stay here, and are restored as being deleted: a daemon that starts on
them lets go of what they still held, if there is any, and then of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tickwheel.engine.ownership import is_closed, moved_before, owing
from tickwheel.history.restore.event_values import settings_of
from tickwheel.history.segments import Event
from tickwheel.model.records import (
    TOPIC_ITSELF,
    GroupRow,
    GroupSettings,
    TaskRow,
)


class Owners:
    """The groups of all topics."""

    def __init__(self, rows: Iterable[GroupRow]) -> None:
        self._topics: dict[str, dict[str, GroupRow]] = {}
        """Topic → its groups, the oldest first."""
        self._own: dict[str, GroupRow] = {}
        """Topic → the row of its own settings."""
        for row in sorted(rows, key=lambda row: row.since_ms):
            if row.group == TOPIC_ITSELF:
                self._own[row.topic] = row
            else:
                self._topics.setdefault(row.topic, {})[row.group] = row

    def rows(self) -> list[GroupRow]:
        """The rows of all groups, and of settings of topics."""
        groups = [row for rows in self._topics.values() for row in rows.values()]
        return [*self._own.values(), *groups]

    def knows(self, topic: str, group: str) -> bool:
        return group in self._topics.get(topic, ())

    def is_closed(self, topic: str, group: str) -> bool:
        """Whether the group is being deleted, or was."""
        row = self._topics.get(topic, {}).get(group)
        return row is not None and is_closed(row)

    def owing(self, row: TaskRow, recorded: Iterable[str]) -> list[str]:
        """The groups that owe the task, or did; ``recorded``: groups with a record of the task."""
        groups = self._topics.get(row.topic, {})
        return [group.group for group in owing(groups, row, set(recorded))]

    # --- events ------------------------------------------------------------------------------

    def created(self, event: Event) -> None:
        topic, name = event["topic"], event["group"]
        if self.knows(topic, name) and not self.is_closed(topic, name):
            return  # the backup has it already, and what became of it
        since_ms, since_id = event["since_ms"], int(event["since_id"])
        groups = self._topics.setdefault(topic, {})
        before, before_ms = moved_before(groups.values(), since_ms)
        for row in before:
            self._put(row._replace(since_ms=before_ms))
        groups.pop(name, None)
        self._put(GroupRow(topic, name, since_ms, None, since_id))

    def ensure(self, task: TaskRow, name: str) -> None:
        """Make the group of an event: the event of its making may be lost."""
        since_ms = task.due_ms if self._topics.get(task.topic) else 0
        self._put(GroupRow(task.topic, name, since_ms))

    def configured(self, event: Event) -> None:
        topic, name = event["topic"], event.get("group", TOPIC_ITSELF)
        settings = settings_of(event.get("settings"))
        if name == TOPIC_ITSELF:
            self._own[topic] = GroupRow(topic, name, 0, settings)
        elif self.knows(topic, name) and not self.is_closed(topic, name):
            self._put(self._topics[topic][name]._replace(settings=settings))

    def deleted(self, event: Event) -> None:
        topic, name = event["topic"], event["group"]
        if not self.knows(topic, name) or self.is_closed(topic, name):
            return
        row, closing = self._topics[topic][name], event["settings"]
        settings = (row.settings or GroupSettings())._replace(
            closed_ms=closing["closed_ms"], closed_id=int(closing["closed_id"])
        )
        self._put(row._replace(settings=settings))

    def _put(self, row: GroupRow) -> None:
        self._topics.setdefault(row.topic, {})[row.group] = row
