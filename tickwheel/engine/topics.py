"""Topics, groups, subscribers and leases, in memory; and tallies: how many tasks of some topics are
not finished.

Invariants:

* A task is in at most one of a group's ``ready``, ``loading``, ``waiting`` and ``flight``, and of
  the queues of its keys.
* ``delivery_attempts`` holds what counts of the earlier deliveries of tasks that are ready or
  waiting; for a task in flight its lease holds it.
* A delivery has a number, its attempt, that the group gives to no other delivery of the task while
  the daemon runs. It is in the lease, in ``delivery_attempts``, in the dead letter, or else, when
  nothing counts of a delivery that was there (it was given back unstarted, or an operator said
  that the task begins anew), in ``numbers``. After a restart the epoch of a receipt is another
  one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tickwheel.engine.queues import ReadyQueue
from tickwheel.model.records import (
    BY_DUE_ALONE,
    NO_PAST,
    SUBSCRIBER_LENGTH_MAX,
    TOPIC_ITSELF,
    GroupRow,
    GroupSettings,
    Past,
    TaskOptions,
    TaskRow,
)
from tickwheel.model.values import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.engine.queues import Bucket, Share
    from tickwheel.model.filters import Judge
    from tickwheel.model.kinds import PausedKey
    from tickwheel.model.lateness import Causes, HoldIntervals
    from tickwheel.model.policies import Merging, PolicyRef

NOTHING_SET = GroupSettings()


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """One group of a topic: its settings, its subscribers, and the tasks that it holds."""

    topic: Topic
    name: str
    since_ms: int
    since_id: int = BY_DUE_ALONE
    """The id at which the group begins: see ``ownership.py``."""
    settings: GroupSettings = NOTHING_SET
    version: int = 0
    """The version of the settings: see ``Versions``."""
    judge: Judge | None = None
    """What the filters of the group say of a task; None: it wants every task."""
    unjudged_id: int = 0
    """Tasks up to this id came due before the group was made, unseen by its filter."""
    was_restored: bool = False
    """Whether its deletion began before this start of the engine."""
    was_used: bool = True
    """Whether somebody has subscribed, or the group was made, since it was looked at last."""
    used_mono_ms: int = 0
    """When the group was last known to be used; and whether long disuse is reported."""
    is_unused: bool = False
    bucket: Bucket | None = None
    """The rate limit of the group."""
    ready: ReadyQueue = field(default_factory=ReadyQueue)
    loading: dict[int, int] = field(default_factory=dict)
    """id → priority of tasks taken from ``ready`` whose bodies are being read, and of those
    that a replay keeps for the group until it comes to them."""
    waiting: dict[int, int] = field(default_factory=dict)
    """id → wall-clock ms of the next attempt of a task that waits for it."""
    delivery_attempts: dict[int, DeliveryAttempts] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """id → attempt of the newest delivery, where nothing else remembers it; to be changed by
    ``Core`` alone, which forgets those of tasks that have ended."""
    flight: dict[int, Lease] = field(default_factory=dict)
    apart: dict[int, bool] = field(default_factory=dict)
    """Ids in ``loading`` of tasks that are to be alone on a connection → whether their rows are
    being read."""
    subscribers: dict[Subscriber, None] = field(default_factory=dict)
    able: OrderedDict[Subscriber, None] = field(default_factory=OrderedDict)
    """Subscribers in turn, the next one first: all with credit, and some that lost it since."""
    detached: Subscriber = field(init=False)
    """Stands for the consumers of leases that were taken over from before a restart."""
    expiry_mono_ms: int | None = None
    """No lease ends before this (steady ms); a scan finds the next end when it has come."""
    is_ordered: bool = False
    """Whether some of its tasks have to wait for others: see ``ordering.py``."""
    key_queues_since_ms: Callable[[], int] | None = None
    """About since when the longest waiting of those tasks waits, when there is one."""
    in_key_queues: int = 0
    """How many due tasks wait in key queues, or for a place of their value."""
    held: int = 0
    """How many order keys wait for an operator."""
    hold_intervals: HoldIntervals | None = None
    """When which cause has held the group back; None: nothing ever did."""
    paused_keys: dict[int, PausedKey] = field(default_factory=dict)
    """Mark → what is known of each key that an operator has paused."""
    key_intervals: dict[int, HoldIntervals] = field(default_factory=dict)
    """Mark → when those keys, and the last that were resumed, were paused."""
    dead: int = 0
    """How many dead letters the group has; the counts below begin at the start."""
    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    snoozed: int = 0
    retried: int = 0
    dead_lettered: int = 0
    deaths: int = 0
    expired: int = 0
    filtered: int = 0

    def __post_init__(self) -> None:
        self.detached = Subscriber(None, self, 0, 0)

    @property
    def is_held(self) -> bool:
        """Whether nothing is handed out: the group is paused, or its topic is, or it is being
        deleted."""
        return (
            self.settings.paused
            or self.topic.settings.paused
            or self.settings.closed_ms is not None
        )

    @property
    def holds_any(self) -> bool:
        """Whether the group holds some task, or a dead letter."""
        return bool(self.ready_count or self.flight or self.waiting or self.dead)

    @property
    def is_closed(self) -> bool:
        """Whether the group is being deleted."""
        return self.settings.closed_ms is not None

    def row(self) -> GroupRow:
        settings = None if self.settings == NOTHING_SET else self.settings
        return GroupRow(
            self.topic.name, self.name, self.since_ms, settings, self.since_id, self.version
        )

    def unused_ms(self, mono_ms: int) -> int | None:
        """For how long nobody has used it; None unless that is to be reported."""
        if not self.is_unused or self.was_used or self.subscribers:
            return None
        return mono_ms - self.used_mono_ms

    def oldest_since_ms(self) -> int | None:
        """Since when the ready task waits that has waited longest; None when none is ready."""
        if not self.ready_count:
            return None
        found: list[int] = []
        for level in self.ready.levels():
            while self.ready.stale and (head := level.peek(1)) and self.ready.is_stale(head[0]):
                level.take(1)
            if level.since_ms is not None and (len(level) or self.loading):
                found.append(level.since_ms)
        if self.in_key_queues and self.key_queues_since_ms is not None:
            found.append(self.key_queues_since_ms())
        return min(found, default=self.ready.emptied_since_ms)

    def credit_up_to(self, limit: int) -> int:
        """How many deliveries the subscribers would take now, counted up to ``limit``, because
        there may be thousands of subscribers."""
        found = 0
        for subscriber in self.able:
            if found >= limit:
                break
            found += max(0, subscriber.credit)
        return min(found, limit)

    @property
    def ready_count(self) -> int:
        return self.ready.count + len(self.loading) + self.in_key_queues

    def withdraw(self, task_id: int) -> None:
        """Remove a ready task without taking it from the queue."""
        if self.loading.pop(task_id, None) is None:
            self.ready.withdraw(task_id)


@dataclass(slots=True)
class PendingGroups:
    """A task that came due for several groups: which of them are not finished."""

    remaining: set[str]
    made: int
    """``Topic.made`` when it was decided which groups owe it; 0: not known any more."""
    dead_lettered: int = 0
    """How many groups keep the task as a dead letter."""


@dataclass(slots=True, eq=False)
class Replay:
    """A group that begins in the past, and how far the tasks before it have been looked at."""

    group: Group
    mark: int
    """The newest id when the group was made: tasks behind it fire with the group there."""
    made: int
    """``Topic.made`` when the group of the replay was made."""
    reached: int = 0
    """Every task up to this id has been looked at."""
    seen: set[int] = field(default_factory=set)
    """Ids of tasks behind ``reached`` that were looked at out of turn."""
    first: int = 0
    """The first id that was looked at; 0: none was."""
    looked_at: int = 0
    given: int = 0
    """How many tasks the group got by the replay."""
    is_over: bool = False

    def is_ahead(self, task_id: int) -> bool:
        """Whether the replay has still to come to this task."""
        return self.reached < task_id <= self.mark

    def claims(self, task_id: int, due_ms: int, made: int) -> bool:
        """Whether its group is owed a task that fired without it.

        ``made``: see ``PendingGroups``."""
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
        """The share of the replay that is done, from 0 to 1, estimated from ids."""
        done, whole = self.reached - self.first, self.mark - self.first
        return min(1.0, max(0.0, done / whole)) if whole > 0 else 0.0


@dataclass(slots=True, eq=False, repr=False)
class Topic:
    """One topic. Until its first group exists, what is due waits in its ``default_backlog``."""

    name: str
    settings: GroupSettings = NOTHING_SET
    version: int = 0
    """The version of the topic's own settings: see ``Versions``."""
    bucket: Bucket | None = None
    """The rate limit for all its groups together."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Oldest first; those that are being deleted stay until nothing is left of them."""
    made: int = 0
    """How many groups the topic has ever had, since the start."""
    replays: dict[Group, Replay] = field(default_factory=dict)
    """Groups with a replay under way, and the replay of each."""
    closing: int = 0
    """How many of the groups are being deleted."""
    filtering: bool = False
    """Whether some of the groups have a filter."""
    known_steps: int | None = None
    """Steps of judging one task by all groups; None: they have to be added up."""
    deferred: dict[int, int] = field(default_factory=dict)
    """id → due_ms of what came due while its last group was being deleted: it waits for the
    end of that, and counts as scheduled."""
    default_backlog: Group | None = field(init=False)
    """A group without a name that holds what is due before any group exists, and that becomes
    the first group; None while the topic has groups."""
    broadcasters: dict[Subscriber, None] = field(default_factory=dict)
    """Broadcast subscribers: they get everything that comes due, and own nothing."""
    scheduled: int = 0
    unfinished: int = 0
    """Durable tasks that are scheduled, or that a group is owed."""
    enqueued: int = 0
    delivered: int = 0
    broadcast: int = 0
    """How many of ``delivered`` went to broadcasters."""
    acked: int = 0
    cancelled: int = 0
    merged: Counter[Merging] = field(default_factory=Counter)
    """What became of tasks whose key was pending and that were not stored."""

    def __post_init__(self) -> None:
        self.default_backlog = Group(self, "", 0)

    @property
    def first_group(self) -> Group | None:
        """The oldest group. A due task that is not in ``Core.owed`` is owed to it alone."""
        return next(iter(self.groups.values()), None)

    @property
    def live_groups(self) -> list[Group]:
        """The groups that are not being deleted."""
        if not self.closing:
            return list(self.groups.values())
        return [group for group in self.groups.values() if not group.is_closed]

    @property
    def holders(self) -> list[Group]:
        """Whatever may hold tasks: all groups, or the default backlog."""
        backlog = self.default_backlog
        return list(self.groups.values()) if backlog is None else [backlog]

    def held(self) -> dict[str, int]:
        """How many due tasks and dead letters the topic holds, by state."""
        holders = self.holders
        return {
            "ready": sum(group.ready_count for group in holders),
            "in_flight": sum(len(group.flight) for group in holders),
            "waiting": sum(len(group.waiting) for group in holders),
            "dead": sum(group.dead for group in holders),
        }

    def steps(self) -> int:
        """How many steps judging one task takes at most, for all groups of the topic."""
        if self.known_steps is None:
            judges = (group.judge for group in self.groups.values())
            self.known_steps = sum(judge.steps for judge in judges if judge is not None)
        return self.known_steps

    def broadcast_steps(self) -> int:
        """How many steps judging one task takes at most, for all broadcasts of the topic."""
        return sum(one.filter_steps for one in self.broadcasters)

    def row(self) -> GroupRow | None:
        """The row of the topic's own settings; None: nothing is set."""
        if self.settings == NOTHING_SET:
            return None
        return GroupRow(self.name, TOPIC_ITSELF, 0, self.settings, version=self.version)


@dataclass(slots=True)
class Versions:
    """The versions of the settings of groups and topics, where there are several shards.

    The settings of a topic and of its groups have their home in one shard, which numbers their
    changes: a row has the number of its last one, and the counter says the newest of all, so that
    it also rises with a deletion. The other shards follow the home, and note the versions that they
    have taken over. What is changed elsewhere than at home strays until the home is looked at.
    """

    shard: int
    shards: int
    counter: int = 0
    """The number of the newest change of those whose home this shard is."""
    sure: int | None = None
    """``SettingsCounter.sure`` of this shard."""
    follows: bool = False
    """Whether what is changed now is so at its home already."""
    strays: Counter[int] = field(default_factory=Counter)
    """Home → how often something of its topics was changed here, since the start."""

    def home_of(self, topic: str) -> int:
        """The shard where the settings of a topic and of its groups have their home."""
        return shard_of(topic, self.shards)

    def numbers(self, topic: str) -> bool:
        """Take note of a change here. True: it is at home, and has the number ``counter`` now."""
        if self.shards == 1:
            return False
        home = self.home_of(topic)
        if home == self.shard:
            self.counter += 1
            return True
        if not self.follows:
            self.strays[home] += 1
        return False


class Traits(NamedTuple):
    """What outlives the row of a task in flight and decides later; most tasks have none of it."""

    priority: int
    retry: PolicyRef | None
    ttl_end_ms: int | None
    """The first millisecond in which the time to live is over."""
    key: str | None
    share: Share | None = None
    """The share of the task's value, in a group that is shared."""
    is_again: bool = False
    """Whether the task stands for another one, and is one group's alone."""
    waited: bool = False
    """Whether the task waited for others of its key or value when it was late already."""


PLAIN = Traits(0, None, None, None)
WAITED = PLAIN._replace(waited=True)


Item = tuple[TaskRow, int, Past]
"""One delivery of a frame: (row, attempt, what counts of the earlier deliveries)."""


class DeliverySink(Protocol):
    """Where the deliveries of one subscription, or the one answer of a pull, go: what a transport
    gives to the shard. It is called in the step of the event loop in which something is known, and
    must not block. What cannot be written any more (its peer is gone) is dropped in silence."""

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        """Send all of these deliveries at once. Raises before any is written if one cannot be."""

    def check(self, item: Item) -> None:
        """Raises the error that keeps this delivery from being written."""

    def ended(self, code: str, message: str) -> None:
        """The shard has ended the subscription, with a code of the error table."""

    def closed(self) -> None:
        """The subscription's caller is gone."""


DELIVERY_BYTES = 60
"""The most bytes that a delivery takes in a frame beside its body and extras: its numbers, and how
many before it have failed, or had their consumers die."""
FRAME_HEAD_BYTES = 40
"""The most bytes that a frame takes beside its deliveries."""


class Dispatch(NamedTuple):
    """Deliveries to write to one subscriber, as one frame."""

    subscriber: Subscriber
    items: list[Item]
    taken_ms: int = 0
    """When the deliveries were taken (wall ms), if they may be written later than that."""
    causes: Causes | None = None
    """Why late deliveries of the frame are late, if a history has asked already."""


def priority_of(row: TaskRow) -> int:
    return row.options.priority if row.options is not None else 0


def has_order(row: TaskRow) -> bool:
    """Whether the task has an order key."""
    return row.options is not None and row.options.order_key is not None


def key_of(row: TaskRow) -> str | None:
    return row.options.key if row.options is not None else None


def traits_of(row: TaskRow) -> Traits:
    options = row.options
    if options is None:
        return PLAIN
    key, priority, ttl_ms, retry, replayed = _of_traits(options)
    if key is None and ttl_ms is None and retry is None and replayed is None and not priority:
        return PLAIN  # as most are that have a tag or properties
    end_ms = ttl_end_ms(row.due_ms, options)
    return Traits(priority, retry, end_ms, key, is_again=replayed is not None)


_of_traits = itemgetter(
    *map(TaskOptions._fields.index, ("key", "priority", "ttl_ms", "retry", "replayed"))
)


def ttl_end_ms(due_ms: int, options: TaskOptions | None) -> int | None:
    """The first millisecond in which nobody wants the task any more; None: it has no end."""
    if options is None or options.ttl_ms is None:
        return None
    return due_ms + options.ttl_ms + 1


class DeliveryAttempts(NamedTuple):
    """What counts of the earlier deliveries of one task to one group, while it is not in flight.

    An *attempt* is the number of one delivery; this is the sum of all of them.
    """

    attempt: int
    """The number of the newest delivery."""
    epoch: int
    """The epoch of the newest delivery; 0: no answer to it counts any more."""
    priority: int
    """The priority of the task."""
    past: Past = NO_PAST

    @property
    def was_had(self) -> bool:
        """Whether a delivery of the task to the group counts. A task that was given back was not
        had, nor one that was only moved after others had it."""
        return self.past != NO_PAST


@dataclass(slots=True, eq=False)
class Lease:
    """One delivery that is not settled."""

    id: int
    group: Group
    subscriber: Subscriber
    attempt: int
    epoch: int
    since_mono_ms: int
    deadline_mono_ms: int
    due_ms: int
    traits: Traits
    past: Past = NO_PAST
    """The counts of the earlier deliveries of the task to the group, without this one."""
    order: int = 0
    """The mark of the task's order key; 0: it has none."""
    live: bool = True
    checkpointed: bool = False
    """Whether a batch that was sealed holds this delivery's progress row."""


@dataclass(slots=True, eq=False, repr=False)
class Presence:
    """Whether the consumer behind some subscribers, those of one connection, is there.

    A connection that stands says nothing: its peer may be stopped, or without power. A lease of
    its that ends by time puts it in doubt, and whatever it sends ends the doubt.
    """

    subscribers: dict[Subscriber, None] = field(default_factory=dict)
    """The subscribers that may get deliveries on the connection."""
    unsettled: int = 0
    """How many deliveries of the connection are not settled."""
    kept_for: Group | None = None
    """The group of the task that it has alone, or is kept free for: see ``Apart``."""
    was_alone: bool = False
    """Whether the task that it was handed last was alone on it."""
    doubted: bool = False
    """Whether a lease ended by time and nothing was heard since: it gets no deliveries."""
    doubted_mono_ms: int = 0
    """When the newest delivery whose lease ended by time was made (steady ms)."""

    def doubt(self, lease: Lease) -> None:
        """Doubt the consumer: this lease has ended by time."""
        self.doubted = True
        self.doubted_mono_ms = max(self.doubted_mono_ms, lease.since_mono_ms)


class Keep(NamedTuple):
    """That a group has tasks that are to be alone on a connection: see ``Apart``."""

    presence: Presence | None
    """The connection that is kept free; None: none is, until then."""
    until_mono_ms: int


@dataclass(slots=True, eq=False, repr=False)
class Subscriber:
    """One consumer of one group: a subscription of a connection, or one pull.

    ``sink`` is the transport's, and never used here. ``outstanding`` counts deliveries whose end
    is not confirmed yet, ``unconfirmed`` those of them that have one. What has no end may not
    exceed ``prefetch``, and ``acks_ahead_max`` of the unconfirmed ones count no more: a consumer
    need not wait for the store each time, and cannot run away from a store that stands.
    """

    sink: DeliverySink | None
    group: Group
    prefetch: int
    lease_ms: int
    _: KW_ONLY
    once: bool = False
    """Whether this is a pull, which leaves after its first delivery."""
    at_most_once: bool = False
    """Whether a delivery is finished before it is written."""
    acks_ahead_max: int = 0
    label: str = ""
    """The name of the consumer, for the records of failed attempts."""
    asked_mono_ms: int | None = None
    """When a pull was asked for (steady ms): a sign of life behind earlier deliveries."""
    presence: Presence = field(default_factory=Presence)
    """The presence of the connection, shared by all of its subscribers."""
    held: dict[int, Lease] = field(default_factory=dict)
    """Id → its delivery that is not settled."""
    outstanding: int = 0
    unconfirmed: int = 0
    blocked: bool = False
    """Whether the connection's buffer is full."""
    gone_mono_ms: int | None = None
    """When leases end at the latest, as the connection broke (steady ms); None: it stands."""
    death: str = ""
    """How the consumer died, for people; "": it did not, as far as is known."""

    def __post_init__(self) -> None:
        self.label = self.label[:SUBSCRIBER_LENGTH_MAX]
        if self.at_most_once:
            self.acks_ahead_max = 0

    @property
    def filter_steps(self) -> int:
        """The steps that a filter of the subscriber's own takes at most for one task."""
        return 0

    @property
    def is_subscribed(self) -> bool:
        """Whether the subscriber may still get deliveries."""
        return self in self.group.subscribers

    @property
    def credit(self) -> int:
        return 0 if self.presence.kept_for is not None else self.room

    @property
    def room(self) -> int:
        """How many more deliveries fit, were the connection not kept free for a lone task."""
        if self.blocked or (self.presence.doubted and not self._asked_since):
            return 0
        return self.prefetch - self.in_flight

    @property
    def in_flight(self) -> int:
        """How many deliveries count against ``prefetch``."""
        return self.outstanding - min(self.unconfirmed, self.acks_ahead_max)

    @property
    def _asked_since(self) -> bool:
        """Whether this pull was asked for after the deliveries that put its consumer in doubt."""
        asked_mono_ms = self.asked_mono_ms
        return asked_mono_ms is not None and asked_mono_ms >= self.presence.doubted_mono_ms


NAMES_MAX = 100_000
"""How many topics have their tallies remembered."""


@dataclass(slots=True, eq=False)
class Tally:
    """A count of the unfinished tasks of some topics.

    It counts tasks that are staged, tasks that are durable and that a group is owed or will be
    owed, and half tasks: what has been taken and has not ended. Dead letters are not among them. It
    is changed with every batch that is staged and every task that ends, so asking costs nothing,
    and it is right at once after a restart. Nothing is done where nobody asks.
    """

    has: Callable[[str], bool]
    """Whether a topic, by its name, is counted."""
    tasks: int = 0


class Tallies:
    """All tallies of one engine."""

    def __init__(self) -> None:
        self.all: list[Tally] = []
        self._of: dict[str, tuple[Tally, ...]] = {}

    def add(self, tally: Tally) -> None:
        """Keep ``tally``, which is right at the moment, up to date from now on."""
        self.all.append(tally)
        self._of.clear()

    def remove(self, tally: Tally) -> None:
        """Drop a tally that nobody asks for any more."""
        self.all.remove(tally)
        self._of.clear()

    def count(self, topic: str, change: int) -> None:
        """Change the number of tasks of one topic."""
        if not self.all:
            return
        found = self._of.get(topic)
        if found is None:
            if len(self._of) >= NAMES_MAX:
                self._of.clear()
            found = self._of[topic] = tuple(tally for tally in self.all if tally.has(topic))
        for tally in found:
            tally.tasks += change

    def count_all(self, topics: Mapping[str, int], sign: int) -> None:
        """Change the numbers of tasks of many topics; ``sign``: 1 adds, -1 subtracts."""
        if self.all:
            for topic, change in topics.items():
                self.count(topic, sign * change)
