"""Topics and groups: who is owed what, in memory.

Invariants:

* A task is in at most one of a group's ``ready``, ``loading``, ``waiting`` and ``flight``.
* ``ready`` may hold entries of tasks that left it some other way (cancel, reschedule, ack by
  an earlier receipt); ``stale`` counts them, so that ``ready_count`` stays true in O(1).
* ``tries`` holds what is known of the earlier attempts of tasks that are ready or waiting;
  for a task in flight its lease holds it.
"""

from __future__ import annotations

from tickwheel.wheel.leases import PLAIN, Lease, Subscriber, Traits, Tries
from tickwheel.wheel.rates import Bucket
from tickwheel.wheel.ready import ReadyQueue
from tickwheel.wheel.records import BY_DUE_ALONE, TOPIC_ITSELF, GroupRow, GroupSettings

__all__ = [
    "PLAIN", "Group", "Lease", "Owed", "Replay", "Subscriber", "Topic", "Traits", "Tries",
]  # fmt: skip


NOTHING_SET = GroupSettings()


class Group:
    """One group of a topic."""

    __slots__ = (
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
        "since_id",
        "since_ms",
        "stale",
        "stale_count",
        "subscribers",
        "topic",
        "tries",
        "turn",
        "waiting",
        "was_restored",
    )

    def __init__(self, topic: Topic, name: str, since_ms: int) -> None:
        self.topic = topic
        self.name = name
        self.since_ms = since_ms
        self.since_id = BY_DUE_ALONE
        """Where it begins: see ``ownership.py``."""
        self.settings = NOTHING_SET
        self.was_restored = False
        """Its deletion began before this start of the engine."""
        self.bucket: Bucket | None = None
        """Its rate limit."""
        self.ready = ReadyQueue()
        self.stale: dict[int, int] = {}
        self.stale_count = 0
        self.loading: dict[int, int] = {}
        """id → priority of tasks taken from ``ready`` whose bodies are being read, and of those
        that a replay keeps for the group until it comes to them."""
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

    def row(self) -> GroupRow:
        settings = None if self.settings == NOTHING_SET else self.settings
        return GroupRow(self.topic.name, self.name, self.since_ms, settings, self.since_id)

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
        return min(found, default=None)

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

    __slots__ = ("buried", "made", "remaining")

    def __init__(self, remaining: set[str], made: int) -> None:
        self.remaining = remaining
        self.made = made
        """``Topic.made`` when it was decided who owes it; 0: not known any more."""
        self.buried = 0
        """How many groups keep it as a dead letter."""


class Replay:
    """A group that begins in the past, and how far the tasks before it have been looked at."""

    __slots__ = (
        "first",
        "given",
        "group",
        "is_over",
        "looked_at",
        "made",
        "mark",
        "reached",
        "seen",
    )

    def __init__(self, group: Group, mark: int, made: int) -> None:
        self.group = group
        self.mark = mark
        """The newest id when the group was made: what is behind it fires with the group there."""
        self.made = made
        """``Topic.made`` with this group."""
        self.reached = 0
        """Every task up to this id has been looked at."""
        self.seen: set[int] = set()
        """Those behind it that were looked at out of turn."""
        self.first = 0
        """The first id there was."""
        self.looked_at = 0
        self.given = 0
        """How many tasks the group got by it."""
        self.is_over = False

    def is_ahead(self, task_id: int) -> bool:
        """It has still to come to this task."""
        return self.reached < task_id <= self.mark

    def claims(self, task_id: int, due_ms: int, made: int) -> bool:
        """Whether its group is owed a task that fired without it; ``made``: see ``Owed``."""
        return (
            made < self.made
            and self.is_ahead(task_id)
            and due_ms >= self.group.since_ms
            and task_id not in self.seen
        )

    def passed(self, first: int, count: int, following: int | None) -> None:
        """A page of ``count`` tasks from ``first`` on was looked at; ``following``: its last."""
        self.first = self.first or first
        self.looked_at += count
        if following is None or following >= self.mark:
            self.is_over = True
        else:
            self.reached = following
            self.seen = {task_id for task_id in self.seen if task_id > following}

    @property
    def share(self) -> float:
        """How far it is, from 0 to 1, as far as ids tell."""
        done, whole = self.reached - self.first, self.mark - self.first
        return min(1.0, max(0.0, done / whole)) if whole > 0 else 0.0


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
        "made",
        "name",
        "replays",
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
        self.made = 0
        """How many there have ever been, since the start."""
        self.replays: dict[Group, Replay] = {}
        """Those of them that tasks from before are still being looked at for."""
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

    def row(self) -> GroupRow | None:
        """The row of its own settings, if there are any."""
        if self.settings == NOTHING_SET:
            return None
        return GroupRow(self.name, TOPIC_ITSELF, 0, self.settings)
