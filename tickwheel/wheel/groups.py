"""Topics and groups: who is owed what, in memory.

Invariants:

* A task is in at most one of a group's ``ready``, ``loading``, ``waiting`` and ``flight``.
* ``ready`` may hold entries of tasks that left it some other way (cancel, reschedule, ack by
  an earlier receipt); ``stale`` counts them, so that ``ready_count`` stays true in O(1). They are
  dropped before they outnumber the others. A task that left and came back has two entries: the
  first one to be met counts as the stale one, so that it is handed out once.
* ``tries`` holds what is known of the earlier attempts of tasks that are ready or waiting;
  for a task in flight its lease holds it.
"""

from __future__ import annotations

from collections import OrderedDict

from tickwheel.wheel.leases import PLAIN, Lease, Subscriber, Traits, Tries
from tickwheel.wheel.rates import Bucket
from tickwheel.wheel.ready import ReadyQueue
from tickwheel.wheel.records import TOPIC_ITSELF, GroupRow, GroupSettings, TaskRow

__all__ = ["PLAIN", "Group", "Lease", "Owed", "Subscriber", "Topic", "Traits", "Tries"]


NOTHING_SET = GroupSettings()
STALE_MIN = 1_024
"""Stale entries below this number are not worth a walk through the queue."""


class Group:
    """One group of a topic."""

    __slots__ = (
        "able",
        "acked",
        "bucket",
        "buried",
        "dead",
        "delivered",
        "detached",
        "expired",
        "expiry_mono_ms",
        "flight",
        "loading",
        "nacked",
        "name",
        "ready",
        "retried",
        "settings",
        "since_ms",
        "stale",
        "stale_count",
        "subscribers",
        "topic",
        "tries",
        "waiting",
        "was_restored",
    )

    def __init__(self, topic: Topic, name: str, since_ms: int) -> None:
        self.topic = topic
        self.name = name
        self.since_ms = since_ms
        self.settings = NOTHING_SET
        self.was_restored = False
        """Its deletion began before this start of the engine."""
        self.bucket: Bucket | None = None
        """Its rate limit."""
        self.ready = ReadyQueue()
        self.stale: dict[int, int] = {}
        self.stale_count = 0
        self.loading: dict[int, int] = {}
        """id → priority of tasks taken from ``ready`` whose bodies are being read."""
        self.waiting: dict[int, int] = {}
        """id → wall-clock ms of the next attempt."""
        self.tries: dict[int, Tries] = {}
        self.flight: dict[int, Lease] = {}
        self.subscribers: dict[Subscriber, None] = {}
        self.able: OrderedDict[Subscriber, None] = OrderedDict()
        """Those whose turn may come, the next one first: all that have credit, and some that
        have lost it since."""
        self.detached = Subscriber(None, self, 0, 0)
        """Stands for consumers of leases taken over from before a restart."""
        self.expiry_mono_ms: int | None = None
        """No lease ends before this; found again by a scan when it has come."""
        self.dead = 0
        """Dead letters that it has; what follows counts since the start."""
        self.delivered = 0
        self.acked = 0
        self.nacked = 0
        self.retried = 0
        self.buried = 0
        self.expired = 0

    @property
    def is_held(self) -> bool:
        """Nothing is handed out: it is paused, or its topic is, or it is being deleted."""
        return (
            self.settings.paused
            or self.topic.settings.paused
            or self.settings.closed_ms is not None
        )

    @property
    def is_closed(self) -> bool:
        """It is being deleted."""
        return self.settings.closed_ms is not None

    def owes(self, row: TaskRow) -> bool:
        """Whether it is owed the task when that comes due."""
        closed_ms, closed_id = self.settings[4:]
        if closed_ms is not None and (row.due_ms > closed_ms or row.id > closed_id):
            return False
        return self.since_ms <= row.due_ms

    def row(self) -> GroupRow:
        settings = None if self.settings == NOTHING_SET else self.settings
        return GroupRow(self.topic.name, self.name, self.since_ms, settings)

    def oldest_since_ms(self) -> int | None:
        """Since when the ready task waits that has waited longest; None when none is ready."""
        if not self.ready_count:
            return None
        found: list[int] = []
        for line in self.ready.lines():
            while self.stale and (head := line.peek(1)) and self.is_stale(head[0]):
                line.take(1)
            if line.since_ms is not None and (len(line) or self.loading):
                found.append(line.since_ms)
        return min(found, default=self.ready.emptied_since_ms)

    def credit_up_to(self, limit: int) -> int:
        """How many deliveries its subscribers would take now; counted no further than asked for,
        because there may be thousands of them."""
        found = 0
        for subscriber in self.able:
            if found >= limit:
                break
            found += max(0, subscriber.credit)
        return min(found, limit)

    @property
    def ready_count(self) -> int:
        return len(self.ready) + len(self.loading) - self.stale_count

    def withdraw(self, task_id: int) -> None:
        """A task that is ready leaves without being taken from the queue."""
        if self.loading.pop(task_id, None) is None:
            self.stale[task_id] = self.stale.get(task_id, 0) + 1
            self.stale_count += 1
            if self.stale_count > STALE_MIN and self.stale_count * 2 > len(self.ready):
                self.ready.drop(self.stale)
                self.stale, self.stale_count = {}, 0

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
        "broadcast",
        "broadcasters",
        "bucket",
        "cancelled",
        "closing",
        "deferred",
        "delivered",
        "enqueued",
        "groups",
        "name",
        "scheduled",
        "settings",
        "unowned",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = NOTHING_SET
        self.bucket: Bucket | None = None
        """The rate limit for all its groups together."""
        self.groups: dict[str, Group] = {}
        """Oldest first; those that are being deleted stay until nothing is left of them."""
        self.closing = 0
        """How many of them are being deleted."""
        self.deferred: dict[int, int] = {}
        """id → due_ms of what came due while its last group was being deleted: it waits for the
        end of that, and counts as scheduled."""
        self.unowned: Group | None = Group(self, "", 0)
        """Holder of what is due before any group exists; becomes the first group."""
        self.broadcasters: dict[Subscriber, None] = {}
        """They get everything that comes due, and own nothing."""
        self.scheduled = 0
        self.enqueued = 0
        self.delivered = 0
        self.broadcast = 0
        """How many of ``delivered`` went to broadcasters."""
        self.acked = 0
        self.cancelled = 0

    @property
    def first_group(self) -> Group | None:
        """The oldest one. A task that is due and not in ``Core.owed`` is owed to it alone."""
        return next(iter(self.groups.values()), None)

    @property
    def live_groups(self) -> list[Group]:
        """Those that are not being deleted."""
        if not self.closing:
            return list(self.groups.values())
        return [group for group in self.groups.values() if not group.is_closed]

    @property
    def earliest(self) -> list[Group]:
        """The live groups that begin first: what came due before all of them is theirs."""
        groups = self.live_groups
        since_ms = min((group.since_ms for group in groups), default=0)
        return [group for group in groups if group.since_ms == since_ms]

    def row(self) -> GroupRow | None:
        """The row of its own settings, if there are any."""
        if self.settings == NOTHING_SET:
            return None
        return GroupRow(self.name, TOPIC_ITSELF, 0, self.settings)
