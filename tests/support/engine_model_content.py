"""The content of the engine's model: standings, tasks, and what a batch adds."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import TRANSITIONS, Event, GroupRow, GroupSettings, State

ACTIVE = (State.READY, State.IN_FLIGHT, State.WAITING)
FINISHED = (State.ACKED, State.EXPIRED, State.DELETED)


Row = tuple[str, int, int, int]
"""(word, attempt, failed, deaths)"""


class Start(NamedTuple):
    """The start of a group: a due time, and a place in the order of tasks."""

    ms: int
    id: int


@dataclass
class Standing:
    """The state of a due task in one group."""

    state: State = State.READY
    coming: bool = False
    """A replay has not reached it, so the engine need not show it."""
    attempt: int = 0
    """Number of the newest delivery."""
    failed: int = 0
    deaths: int = 0
    epoch: int = 0
    at_ms: int = 0
    """Time of the next attempt."""
    since_mono_ms: int = 0
    end_mono_ms: int = 0
    row: Row | None = None
    """The row that the store is to have."""

    def move(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def noted(self, word: str) -> Row:
        return word, self.attempt, self.failed, self.deaths

    def come(self) -> None:
        """Make a task ready for its next attempt."""
        self.move(Event.DUE)


@dataclass
class Task:
    id: int
    topic: str
    due_ms: int
    ttl_ms: int | None
    retry: RetryPolicy | None = None
    standings: dict[str, Standing] | None = None
    """Standings by group; None until the task is due."""
    place: int = 0
    """Place in the order, if it is not the id."""

    @property
    def order(self) -> int:
        return self.place or self.id

    def move_all(self, event: Event) -> None:
        for standing in (self.standings or {}).values():
            if standing.state in (*ACTIVE, State.DEAD):
                standing.move(event)

    def is_over(self, now_ms: int) -> bool:
        """Return whether no group wants the task any more."""
        return self.ttl_ms is not None and now_ms > self.due_ms + self.ttl_ms

    def views(self) -> dict[str, tuple[str, int]]:
        """Return (word, attempt) for each group, as LOOKUP does."""
        return {
            group: (
                s.state.value,
                s.attempt,
            )
            for group, s in (self.standings or {}).items()
            if not s.coming
        }

    def holds(self) -> bool:
        """Return whether a group owes the task or keeps it as a dead letter."""
        return any(s.state not in FINISHED for s in (self.standings or {}).values())

    def active(self) -> dict[str, Standing]:
        return {g: s for g, s in (self.standings or {}).items() if s.state in ACTIVE}

    @property
    def state(self) -> State:
        """Return the state of the task over all groups."""
        if self.standings is None:
            return State.SCHEDULED
        states = {s.state for s in self.standings.values() if not s.coming}
        for state in (State.IN_FLIGHT, State.WAITING):
            if state in states:
                return state
        return State.DEAD if State.DEAD in states and State.READY not in states else State.READY


@dataclass
class Content:
    """Everything that a store keeps."""

    tasks: dict[int, Task] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    groups: dict[str, dict[str, Start]] = field(default_factory=dict)
    """Start of each group by topic and name, oldest first."""
    restored: set[tuple[str, str]] = field(default_factory=set)
    """Groups whose deletion began before the last restart."""
    settings: dict[tuple[str, str], GroupSettings] = field(default_factory=dict)
    """Settings by (topic, group) and (topic, ""). ``closed_ms`` marks a deletion."""
    requests: dict[int, int] = field(default_factory=dict)
    """Answered requests of the only session, with the id of their task."""

    def set(self, topic: str, group: str) -> GroupSettings:
        return self.settings.get((topic, group), GroupSettings())

    def is_closed(self, topic: str, group: str) -> bool:
        return self.set(topic, group).closed_ms is not None

    def is_held(self, topic: str, group: str) -> bool:
        """Return whether deliveries are paused."""
        paused = self.set(topic, "").paused or self.set(topic, group).paused
        return paused or self.is_closed(topic, group)

    def live(self, topic: str) -> list[str]:
        return [name for name in self.groups.get(topic, {}) if not self.is_closed(topic, name)]

    def begins_by(self, task: Task, name: str) -> bool:
        start = self.groups[task.topic][name]
        return task.order > start.id or task.due_ms >= start.ms

    def owed_groups(self, task: Task) -> list[str]:
        """Return the groups that a task due now is owed to."""
        live = [name for name in self.live(task.topic) if self.begins_by(task, name)]
        return live or self.earliest(task.topic)

    def ever_owed(self, task: Task) -> list[str]:
        """Return the groups that owed a task when it was due, including those being deleted."""
        results = []
        for name in self.groups.get(task.topic, {}):
            closed_ms, closed_id = self.set(task.topic, name)[4:6]
            if not self.begins_by(task, name):
                continue
            if closed_ms is None or (task.due_ms <= closed_ms and task.order <= closed_id):
                results.append(name)
        return results or self.earliest(task.topic)

    def earliest(self, topic: str) -> list[str]:
        """Return the groups with the earliest start."""
        groups, live = self.groups.get(topic, {}), self.live(topic)
        since_ms = min((groups[name].ms for name in live), default=0)
        return [name for name in live if groups[name].ms == since_ms]

    def rows_of_groups(self) -> set[GroupRow]:
        results = {
            GroupRow(topic, name, start.ms, self.settings.get((topic, name)), start.id)
            for topic, groups in self.groups.items()
            for name, start in groups.items()
        }
        topics = {key: value for key, value in self.settings.items() if not key[1]}
        return results | {GroupRow(topic, "", 0, value) for (topic, _), value in topics.items()}

    def change(self, topic: str, group: str, after: GroupSettings) -> None:
        self.settings.pop((topic, group), None)
        if after != GroupSettings():
            self.settings[topic, group] = after

    def rows(self) -> dict[tuple[int, str], Row]:
        """Return the recorded progress of each group."""
        return {key: s.row for key, s in self._standings().items() if s.row is not None}

    def dead(self) -> set[tuple[int, str]]:
        return {key for key, s in self._standings().items() if s.state is State.DEAD}

    def places(self) -> dict[tuple[int, str], str]:
        """Return every due, unfinished task."""
        places = {
            key: s.state.value
            for key, s in self._standings().items()
            if s.state in ACTIVE and not s.coming
        }
        for task in self.tasks.values():
            if task.standings is not None and not self.groups.get(task.topic):
                places[task.id, ""] = "ready"
        return places

    def coming(self) -> set[tuple[int, str]]:
        return {key for key, s in self._standings().items() if s.coming}

    def _standings(self) -> dict[tuple[int, str], Standing]:
        return {
            (task.id, group): standing
            for task in self.tasks.values()
            for group, standing in (task.standings or {}).items()
        }


@dataclass
class Staged:
    """The changes of a batch that is not refused."""

    tasks: dict[int, Task] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)

    def merge_into(self, content: Content) -> None:
        content.tasks |= deepcopy(self.tasks)
        content.requests |= self.requests
