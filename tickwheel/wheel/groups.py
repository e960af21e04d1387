"""Topics, groups, subscribers and leases: who is owed what, in memory.

Invariants:

* A task is in at most one of a group's ``ready``, ``loading``, ``waiting`` and ``flight``.
* ``ready`` may hold entries of tasks that left it some other way (cancel, reschedule, ack by
  an earlier receipt); ``stale`` counts them, so that ``ready_count`` stays true in O(1).
* ``tries`` holds what is known of the earlier attempts of tasks that are ready or waiting;
  for a task in flight its lease holds it.
"""

from __future__ import annotations

from typing import NamedTuple

from tickwheel.wheel.idqueue import IdQueue
from tickwheel.wheel.records import Failure


class Tries(NamedTuple):
    """Earlier attempts of a task that is not in flight now."""

    attempt: int
    epoch: int
    priority: int
    failures: tuple[Failure, ...]


class ReadyQueue:
    """Ids that are due, highest priority first, in order of arrival within a priority."""

    __slots__ = ("_by_priority", "_plain")

    def __init__(self) -> None:
        self._plain = IdQueue()
        self._by_priority: dict[int, IdQueue] = {}

    def push(self, task_id: int, priority: int) -> None:
        if priority:
            self._level(priority).push(task_id)
        else:
            self._plain.push(task_id)

    def push_front(self, task_id: int, priority: int) -> None:
        (self._level(priority) if priority else self._plain).push_front((task_id,))

    def take(self, limit: int) -> list[int]:
        """Up to ``limit`` ids, removed."""
        if not self._by_priority:
            return self._plain.take(limit)
        taken: list[int] = []
        for priority in sorted(self._by_priority, reverse=True):
            level = self._by_priority[priority]
            taken += level.take(limit - len(taken))
            if not len(level):
                del self._by_priority[priority]
            if len(taken) >= limit:
                return taken
        return taken + self._plain.take(limit - len(taken))

    def __len__(self) -> int:
        return len(self._plain) + sum(map(len, self._by_priority.values()))

    def _level(self, priority: int) -> IdQueue:
        level = self._by_priority.get(priority)
        if level is None:
            level = self._by_priority[priority] = IdQueue()
        return level


class Lease:
    """One delivery that is not finished."""

    __slots__ = (
        "attempt",
        "checkpointed",
        "deadline_mono_ms",
        "epoch",
        "failures",
        "group",
        "id",
        "live",
        "priority",
        "since_mono_ms",
        "subscriber",
    )

    def __init__(
        self,
        task_id: int,
        group: Group,
        subscriber: Subscriber,
        attempt: int,
        epoch: int,
        since_mono_ms: int,
        deadline_mono_ms: int,
        priority: int,
        failures: tuple[Failure, ...],
    ) -> None:
        self.id = task_id
        self.group = group
        self.subscriber = subscriber
        self.attempt = attempt
        self.epoch = epoch
        self.since_mono_ms = since_mono_ms
        self.deadline_mono_ms = deadline_mono_ms
        self.priority = priority
        self.failures = failures
        self.live = True
        self.checkpointed = False
        """Whether a batch that was sealed holds this delivery's progress row."""


class Subscriber:
    """One consumer of one group: a subscription of a connection, or one pull.

    ``owner`` belongs to the shell and is never looked at here. ``outstanding`` counts
    deliveries whose end is not confirmed yet; it may not exceed ``prefetch``.
    """

    __slots__ = (
        "blocked",
        "gone_mono_ms",
        "group",
        "lease_ms",
        "once",
        "outstanding",
        "owner",
        "prefetch",
    )

    def __init__(
        self, owner: object, group: Group, prefetch: int, lease_ms: int, *, once: bool = False
    ) -> None:
        self.owner = owner
        self.group = group
        self.prefetch = prefetch
        self.lease_ms = lease_ms
        self.once = once
        """A pull: it leaves after its first delivery."""
        self.outstanding = 0
        self.blocked = False
        """The connection's buffer is full."""
        self.gone_mono_ms: int | None = None
        """Its connection broke: leases end then at the latest."""

    @property
    def is_subscribed(self) -> bool:
        """It may still get deliveries."""
        return self in self.group.subscribers

    @property
    def credit(self) -> int:
        return 0 if self.blocked else self.prefetch - self.outstanding


class Group:
    """One group of a topic."""

    __slots__ = (
        "acked",
        "dead",
        "delivered",
        "detached",
        "expiry_mono_ms",
        "flight",
        "loading",
        "name",
        "ready",
        "since_ms",
        "stale",
        "stale_count",
        "subscribers",
        "topic",
        "tries",
        "turn",
        "waiting",
    )

    def __init__(self, topic: Topic, name: str, since_ms: int) -> None:
        self.topic = topic
        self.name = name
        self.since_ms = since_ms
        self.ready = ReadyQueue()
        self.stale: dict[int, int] = {}
        self.stale_count = 0
        self.loading: dict[int, int] = {}
        """id → priority of tasks taken from ``ready`` whose bodies are being read."""
        self.waiting: dict[int, int] = {}
        """id → wall-clock ms of the next attempt."""
        self.tries: dict[int, Tries] = {}
        self.flight: dict[int, Lease] = {}
        self.subscribers: list[Subscriber] = []
        self.turn = 0
        self.detached = Subscriber(None, self, 0, 0)
        """Stands for consumers of leases taken over from before a restart."""
        self.expiry_mono_ms: int | None = None
        """No lease ends before this; found again by a scan when it has come."""
        self.dead = 0
        self.delivered = 0
        self.acked = 0

    @property
    def ready_count(self) -> int:
        return len(self.ready) + len(self.loading) - self.stale_count

    def withdraw(self, task_id: int) -> None:
        """A task that is ready leaves without being taken from the queue."""
        if self.loading.pop(task_id, None) is None:
            self.stale[task_id] = self.stale.get(task_id, 0) + 1
            self.stale_count += 1

    def is_stale(self, task_id: int) -> bool:
        """Whether this entry of ``ready``, just taken, stands for nothing any more."""
        left = self.stale.get(task_id)
        if left is None:
            return False
        self.stale_count -= 1
        if left == 1:
            del self.stale[task_id]
        else:
            self.stale[task_id] = left - 1
        return True


class Owed:
    """A task that came due for several groups: which of them are not finished."""

    __slots__ = ("buried", "remaining")

    def __init__(self, remaining: set[str]) -> None:
        self.remaining = remaining
        self.buried = 0
        """How many groups keep it as a dead letter."""


class Topic:
    """One topic. Until its first group exists, what is due waits in ``unowned``."""

    __slots__ = (
        "acked",
        "cancelled",
        "delivered",
        "enqueued",
        "groups",
        "name",
        "scheduled",
        "unowned",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: dict[str, Group] = {}
        self.unowned: Group | None = Group(self, "", 0)
        """Holder of what is due before any group exists; becomes the first group."""
        self.scheduled = 0
        self.enqueued = 0
        self.delivered = 0
        self.acked = 0
        self.cancelled = 0

    @property
    def first_group(self) -> Group | None:
        """The oldest one, which is owed everything. A task that is due and not in ``Core.owed``
        is owed to it alone."""
        return next(iter(self.groups.values()), None)
