"""Which groups owe a task an end: the engine's rule, over what is known of groups.

A group owes what comes due from its start on, and, when it was deleted, what was there before
that. The only group of a topic owes everything; a task that no group's start covers is owed by
all. Groups that were deleted are kept here: what they had is not another's.
"""

from __future__ import annotations

from collections.abc import Iterable

from tickwheel.history.restore.values import settings_of
from tickwheel.history.segments import Event
from tickwheel.wheel.records import TOPIC_ITSELF, GroupRow, TaskRow


class Owners:
    """Topics with their groups."""

    def __init__(self, rows: Iterable[GroupRow]) -> None:
        self._topics: dict[str, dict[str, GroupRow]] = {}
        self._closed: dict[tuple[str, str], tuple[int, int]] = {}
        """(topic, group) → when it was deleted, and the newest id then."""
        self._own: dict[str, GroupRow] = {}
        """Topics' own settings."""
        for row in rows:
            if row.group == TOPIC_ITSELF:
                self._own[row.topic] = row
                continue
            self._topics.setdefault(row.topic, {})[row.group] = row
            if row.settings is not None and row.settings.closed_ms is not None:
                self._closed[row[:2]] = row.settings.closed_ms, row.settings.closed_id

    def rows(self) -> list[GroupRow]:
        """Those that are there, settings of topics included."""
        groups = [row for rows in self._topics.values() for row in rows.values()]
        return [*self._own.values(), *(row for row in groups if row[:2] not in self._closed)]

    def knows(self, topic: str, group: str) -> bool:
        """It exists, or did."""
        return group in self._topics.get(topic, ())

    def is_there(self, topic: str, group: str) -> bool:
        return self.knows(topic, group) and (topic, group) not in self._closed

    def owing(self, row: TaskRow, standing: Iterable[str]) -> list[str]:
        """The groups that owe the task, or did; ``standing`` have a record of it."""
        topic = self._topics.get(row.topic, {})
        there = [name for name in topic if (row.topic, name) not in self._closed]
        if len(there) == 1 and len(topic) == 1:
            return there
        owed = [name for name, group in topic.items() if self._owes(group, row)] or there
        return [name for name in topic if name in owed or name in standing]

    def _owes(self, group: GroupRow, row: TaskRow) -> bool:
        closed = self._closed.get(group[:2])
        if closed is not None and (row.due_ms > closed[0] or row.id > closed[1]):
            return False
        return group.since_ms <= row.due_ms

    # --- events ------------------------------------------------------------------------------

    def created(self, event: Event) -> None:
        topic, group = event["topic"], event["group"]
        since_ms = event.get("since_ms")
        if since_ms is None and self.is_there(topic, group):
            return
        if since_ms is None:
            alone = not any(self.is_there(topic, name) for name in self._topics.get(topic, ()))
            since_ms = 0 if alone else event["time_ms"]
        self._closed.pop((topic, group), None)
        row = GroupRow(topic, group, since_ms, settings_of(event.get("settings")))
        self._topics.setdefault(topic, {})[group] = row

    def ensure(self, row: TaskRow, group: str) -> None:
        """An event of this group and task came; how the group was made may be lost."""
        if not self.knows(row.topic, group):
            since_ms = row.due_ms if self._topics.get(row.topic) else 0
            self._topics.setdefault(row.topic, {})[group] = GroupRow(row.topic, group, since_ms)

    def configured(self, event: Event) -> None:
        topic, group = event["topic"], event.get("group", TOPIC_ITSELF)
        settings = settings_of(event.get("settings"))
        if group == TOPIC_ITSELF:
            self._own[topic] = GroupRow(topic, group, 0, settings)
        elif self.knows(topic, group):
            self._topics[topic][group] = self._topics[topic][group]._replace(settings=settings)

    def deleted(self, event: Event, id_mark: int) -> None:
        topic, group = event["topic"], event["group"]
        if self.is_there(topic, group):
            self._closed[topic, group] = event["time_ms"], id_mark
