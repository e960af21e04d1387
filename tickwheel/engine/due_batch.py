"""Tasks of one topic that come due one after the other and become ready in one step. For speed
alone: one about which something has to be decided comes due by itself, to the same end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.engine.ownership import Ownership
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.model.records import TaskRow


class DueBatch:
    """Due tasks of a topic with one group, which takes all of them, or those that its filter lets
    pass. It is a step of the tick, and not a batch of the store."""

    __slots__ = ("_core", "_group", "_now_ms", "_ownership", "_rows", "_steps", "_topic")

    def __init__(self, core: Core, ownership: Ownership, now_ms: int) -> None:
        self._core = core
        self._ownership = ownership
        self._now_ms = now_ms
        self._steps = 0
        """The steps that judging one task of the topic takes."""
        self._topic = ""
        self._group: Group | None = None
        """The only group of that topic; None: each of its tasks has to be looked at."""
        self._rows: list[TaskRow] = []

    def add(self, row: TaskRow) -> bool:
        """Take a due task into the batch. False: it has to come due by itself, when those before
        it have."""
        _, due_ms, name, _, options = row
        if name != self._topic:
            self.flush()
            topic = self._core.topic(name)
            self._topic, self._group = name, _only_group(topic)
            self._steps = topic.steps() if topic.filtering else 0
        if self._group is None or due_ms > self._now_ms:
            return False
        if options is not None and (options.ttl_ms is not None or options.replayed is not None):
            return False
        self._core.steps_left -= self._steps
        self._rows.append(row)
        return True

    def flush(self) -> None:
        """Make all tasks that were added ready, or end those that nobody wants."""
        rows, group = self._rows, self._group
        if not rows or group is None:
            return
        self._rows = []
        core, now_ms = self._core, self._now_ms
        core.scheduled -= len(rows)
        group.topic.scheduled -= len(rows)
        rows = self._ownership.divide(group, rows)
        if not core.has_room:
            for row in rows:
                if not core.has_room:
                    core.drop(row.id)
        core.come_all(group, rows, now_ms)
        if group.able:
            core.runnable[group] = None
        elif group.hold_intervals is None or group.hold_intervals.current is None:
            core.ledger.judge(group, now_ms)


def _only_group(topic: Topic) -> Group | None:
    """The group that every task of the topic is owed to when it comes due, if that is all there
    is to decide."""
    if topic.default_backlog is not None or topic.closing or topic.broadcasters:
        return None
    groups = topic.live_groups
    return groups[0] if len(groups) == 1 and groups[0] is topic.first_group else None
