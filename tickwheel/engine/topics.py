"""Topics, groups, subscribers and leases in memory, and tallies of the unfinished tasks of topics.

Invariants:

* A task is in at most one of a group's ``ready``, ``loading``, ``waiting``, ``flight`` and key
  queues.
* ``delivery_attempts`` summarizes the earlier deliveries of tasks that are ready or waiting. For a
  task in flight, the lease does.
* The number of a delivery, its attempt, is unique for the task and group while the daemon runs. It
  is recorded in the lease, in ``delivery_attempts`` or in the dead letter, or, if no delivery
  counts (it was returned unstarted, or an operator reset the task), in ``numbers``. After a restart
  receipts have another epoch.
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
    """A group of a topic with its settings, its subscribers and its tasks."""

    topic: Topic
    name: str
    since_ms: int
    since_id: int = BY_DUE_ALONE
    """The id at which the group begins; see ``ownership.py``."""
    settings: GroupSettings = NOTHING_SET
    version: int = 0
    """The version of the settings; see ``Versions``."""
    judge: Judge | None = None
    """The filters of the group; None if it has none."""
    unjudged_id: int = 0
    """Tasks up to this id came due before the group was created; its filter must judge them."""
    was_restored: bool = False
    """Whether the group's deletion began before this start of the engine."""
    was_used: bool = True
    """Whether a consumer has subscribed, or the group was created, since the last check."""
    used_mono_ms: int = 0
    """When the group was last found to be in use (steady ms)."""
    is_unused: bool = False
    """Whether the group has been unused long enough to be reported."""
    bucket: Bucket | None = None
    """The rate limit of the group."""
    ready: ReadyQueue = field(default_factory=ReadyQueue)
    loading: dict[int, int] = field(default_factory=dict)
    """Id → priority of tasks taken from ``ready`` whose rows are being read or that wait for
    isolation, and of tasks that wait for a replay or a commit."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Id → time of the next attempt of a waiting task (wall ms)."""
    withheld: dict[int, int] = field(default_factory=dict)
    """Id → priority of tasks of ``waiting`` that were ready until the clock was set back."""
    delivery_attempts: dict[int, DeliveryAttempts] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    """Id → attempt of the newest delivery, if it is recorded nowhere else. Only ``Core`` changes
    this map; it removes ended tasks."""
    flight: dict[int, Lease] = field(default_factory=dict)
    isolated: dict[int, bool] = field(default_factory=dict)
    """Id of a task in ``loading`` that must be isolated → whether its row is being read."""
    subscribers: dict[Subscriber, None] = field(default_factory=dict)
    able: OrderedDict[Subscriber, None] = field(default_factory=OrderedDict)
    """Subscribers in their turn, the next one first: all with credit, and some without."""
    detached: Subscriber = field(init=False)
    """A placeholder for the consumers of leases from before a restart."""
    expiry_mono_ms: int | None = None
    """No lease ends before this time (steady ms), at which leases are scanned for the next end."""
    is_ordered: bool = False
    """Whether some of the group's tasks must wait for others; see ``ordering.py``."""
    key_queues_since_ms: Callable[[], int] | None = None
    """Returns the approximate time at which the longest waiting of those tasks began to wait."""
    awaiting_turn: int = 0
    """Number of due tasks in key queues, waiting for a place of their value, or kept back."""
    held: int = 0
    """Number of order keys that wait for an operator."""
    hold_intervals: HoldIntervals | None = None
    """The intervals in which the group was held back, by cause; None if there are none."""
    paused_keys: dict[int, PausedKey] = field(default_factory=dict)
    """Mark → key that an operator has paused."""
    key_intervals: dict[int, HoldIntervals] = field(default_factory=dict)
    """Mark → intervals in which a paused or recently resumed key was paused."""
    dead: int = 0
    """Number of dead letters of the group. The counts below begin at 0 when the daemon starts."""
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
        """Whether the group gets no deliveries: it or its topic is paused, or it is being
        deleted."""
        return (
            self.settings.paused
            or self.topic.settings.paused
            or self.settings.closed_ms is not None
        )

    @property
    def holds_any(self) -> bool:
        """Whether the group holds a task or a dead letter."""
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
        """Return how long the group has been unused in ms, or None if it is not to be reported."""
        if not self.is_unused or self.was_used or self.subscribers:
            return None
        return mono_ms - self.used_mono_ms

    def oldest_since_ms(self) -> int | None:
        """Return when the longest waiting ready task became ready, or None if there is none."""
        if not self.ready_count:
            return None
        times_ms: list[int] = []
        for priority, level in self.ready.levels().items():
            while (
                self.ready.stale
                and (head := level.peek(1))
                and self.ready.pop_stale(head[0], priority)
            ):
                level.take(1)
            if level.since_ms is not None and (len(level) or self.loading):
                times_ms.append(level.since_ms)
        if self.awaiting_turn and self.key_queues_since_ms is not None:
            times_ms.append(self.key_queues_since_ms())
        return min(times_ms, default=self.ready.last_taken_arrival_ms)

    def credit_up_to(self, limit: int) -> int:
        """Return the total credit of the subscribers, at most ``limit``, which bounds the work if
        there are thousands of subscribers."""
        credit = 0
        for subscriber in self.able:
            if credit >= limit:
                break
            credit += max(0, subscriber.credit)
        return min(credit, limit)

    @property
    def ready_count(self) -> int:
        return self.ready.count + len(self.loading) + self.awaiting_turn

    def withdraw(self, task_id: int, priority: int) -> None:
        """Remove a ready task."""
        if self.loading.pop(task_id, None) is None:
            self.ready.withdraw(task_id, priority)


@dataclass(slots=True)
class PendingGroups:
    """The groups that have not finished a task that came due for several groups."""

    remaining: set[str]
    made: int
    """``Topic.made`` when the groups were determined, or 0 if that is no longer known."""
    dead_lettered: int = 0
    """Number of groups that keep the task as a dead letter."""


@dataclass(slots=True, eq=False)
class Replay:
    """The search for earlier tasks that a group which begins in the past is owed."""

    group: Group
    mark: int
    """The newest id when the group was created. Later tasks fire for the group without a replay."""
    made: int
    """``Topic.made`` when the group was created."""
    reached: int = 0
    """Every task up to this id has been examined."""
    seen: set[int] = field(default_factory=set)
    """Ids above ``reached`` that were already examined."""
    first: int = 0
    """The first examined id, or 0."""
    looked_at: int = 0
    given: int = 0
    """Number of tasks that the replay has given to the group."""
    is_over: bool = False

    def is_ahead(self, task_id: int) -> bool:
        """Return whether the replay has not reached this task."""
        return self.reached < task_id <= self.mark

    def claims(self, task_id: int, due_ms: int, made: int) -> bool:
        """Return whether the replay has yet to examine a task that fired without the group and that
        the group might be owed. ``made`` is the one of ``PendingGroups``."""
        return (
            made < self.made
            and self.is_ahead(task_id)
            and due_ms >= self.group.since_ms
            and task_id not in self.seen
        )

    def note_page(self, first: int, count: int, last: int | None) -> None:
        """Record that ``count`` tasks from ``first`` to ``last`` (None: the end) were examined."""
        self.first = self.first or first
        self.looked_at += count
        if last is None or last >= self.mark:
            self.is_over = True
        else:
            self.reached = last
            self.seen = {task_id for task_id in self.seen if task_id > last}

    @property
    def share(self) -> float:
        """The finished share of the replay, 0 to 1, estimated from ids."""
        done, whole = self.reached - self.first, self.mark - self.first
        return min(1.0, max(0.0, done / whole)) if whole > 0 else 0.0


class Deferred:
    """The tasks of a topic that came due while its last group was being deleted. They wait until
    a group is created or the deletion is finished, then fire again in the same order, some in each
    tick of the shard. They count as scheduled."""

    __slots__ = ("refired", "released", "waiting")

    def __init__(self) -> None:
        self.waiting = OrderedDict[int, int]()
        """Id → due_ms of tasks that wait for the end of the deletion."""
        self.released = OrderedDict[int, int]()
        """Id → due_ms of tasks that are to fire again."""
        self.refired = set[int]()
        """Ids of tasks that have fired again before others of ``released``, and are in
        ``Core.firing``."""

    def release(self) -> None:
        """Let the waiting tasks fire again, before those that were released earlier."""
        if not self.released:
            self.released, self.waiting = self.waiting, self.released
        while self.waiting:
            task_id, due_ms = self.waiting.popitem()
            self.released[task_id] = due_ms
            self.released.move_to_end(task_id, last=False)

    def remove(self, task_id: int) -> bool:
        """Remove a task. Return whether it has yet to fire again."""
        self.refired.discard(task_id)
        held = (self.waiting, self.released)
        return any(ids.pop(task_id, None) is not None for ids in held)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self.waiting or task_id in self.released

    def __len__(self) -> int:
        return len(self.waiting) + len(self.released)


@dataclass(slots=True, eq=False, repr=False)
class Topic:
    """A topic. While it has no groups, due tasks wait in its ``default_backlog``."""

    name: str
    settings: GroupSettings = NOTHING_SET
    version: int = 0
    """The version of the topic's settings; see ``Versions``."""
    bucket: Bucket | None = None
    """The common rate limit of all its groups."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Name → group, oldest first. Groups that are being deleted stay until they are empty."""
    made: int = 0
    """Number of groups that were created since the start."""
    replays: dict[Group, Replay] = field(default_factory=dict)
    """Group → its running replay."""
    closing: int = 0
    """Number of groups that are being deleted."""
    filtering: bool = False
    """Whether a group has a filter."""
    cached_steps: int | None = None
    """The number of steps for judging a task by all groups, if it is cached."""
    deferred: Deferred | None = None
    """None if no task was deferred."""
    default_backlog: Group | None = field(init=False)
    """The nameless group of due tasks that becomes the first group; None while groups exist."""
    broadcasters: dict[Subscriber, None] = field(default_factory=dict)
    """Broadcast subscribers, which get all due tasks and are owed none."""
    scheduled: int = 0
    unfinished: int = 0
    """Number of durable tasks that are scheduled or owed to a group."""
    enqueued: int = 0
    delivered: int = 0
    broadcast: int = 0
    """The part of ``delivered`` that went to broadcasters."""
    acked: int = 0
    cancelled: int = 0
    merged: Counter[Merging] = field(default_factory=Counter)
    """Outcome → number of tasks that were not stored because their key was pending."""

    def __post_init__(self) -> None:
        self.default_backlog = Group(self, "", 0)

    @property
    def waiting_for_group(self) -> int:
        """Number of due tasks of a topic without a live group that wait for one."""
        deferred = 0 if self.deferred is None else len(self.deferred)
        backlog = self.default_backlog
        return deferred if backlog is None else deferred + backlog.ready_count

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
        """All groups, or the default backlog."""
        backlog = self.default_backlog
        return list(self.groups.values()) if backlog is None else [backlog]

    def held(self) -> dict[str, int]:
        """Return the number of due tasks and dead letters of the topic, by state."""
        holders = self.holders
        return {
            "ready": sum(group.ready_count for group in holders),
            "in_flight": sum(len(group.flight) for group in holders),
            "waiting": sum(len(group.waiting) for group in holders),
            "dead": sum(group.dead for group in holders),
        }

    def steps(self) -> int:
        """Return the maximum number of steps for judging a task by all groups of the topic."""
        if self.cached_steps is None:
            judges = (group.judge for group in self.groups.values())
            self.cached_steps = sum(judge.steps for judge in judges if judge is not None)
        return self.cached_steps

    def broadcast_steps(self) -> int:
        """Return the maximum number of steps for judging a task by all broadcasts of the topic."""
        return sum(broadcaster.filter_steps for broadcaster in self.broadcasters)

    def row(self) -> GroupRow | None:
        """Return the row of the topic's settings, or None if nothing is set."""
        if self.settings == NOTHING_SET:
            return None
        return GroupRow(self.name, TOPIC_ITSELF, 0, self.settings, version=self.version)


@dataclass(slots=True)
class Versions:
    """The versions of the settings of groups and topics among several shards. The home shard of a
    topic numbers the changes of its settings and of its groups' settings. A row contains the number
    of its last change; the counter contains the number of the newest change, and so also grows with
    a deletion. Other shards follow the home and record the versions that they have adopted. A
    change made in another shard than the home is a stray until that shard reads the home."""

    shard: int
    shards: int
    counter: int = 0
    """The number of the newest change that this home shard has numbered."""
    number_at_start: int | None = None
    """``SettingsCounter.number_at_start`` of this shard."""
    follows: bool = False
    """Whether the current changes were already made at their home."""
    strays: Counter[int] = field(default_factory=Counter)
    """Home shard → number of stray changes of its topics in this shard since the start."""

    def home_of(self, topic: str) -> int:
        """Return the home shard of the settings of a topic and its groups."""
        return shard_of(topic, self.shards)

    def record_change(self, topic: str) -> bool:
        """Record a change in this shard. Return whether this shard is the home; if so, ``counter``
        is the number of the change."""
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
    """Properties of a task in flight that are needed after its row is released, often ``PLAIN``."""

    priority: int
    retry: PolicyRef | None
    ttl_end_ms: int | None
    """The first millisecond after the time to live."""
    key: str | None
    share: Share | None = None
    """The share of the task's value of ``fair_by``."""
    is_replayed: bool = False
    """Whether a reset created the task, for one group only."""
    waited: bool = False
    """Whether the task became late while it waited for other tasks of its key or value."""


PLAIN = Traits(0, None, None, None)
WAITED = PLAIN._replace(waited=True)


Item = tuple[TaskRow, int, Past]
"""One delivery of a frame: (row, attempt, earlier deliveries)."""


class DeliverySink(Protocol):
    """The destination of a subscription's deliveries, or of a pull's answer. A transport provides
    it. Its methods are called synchronously and must not block. If the peer has disconnected, they
    do nothing."""

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        """Send all deliveries. If one cannot be sent, raise an error before any is written."""

    def check(self, item: Item) -> None:
        """Raise an error if this delivery cannot be sent."""

    def ended(self, code: str, message: str) -> None:
        """Report that the shard has ended the subscription. ``code`` is one of the error table."""

    def closed(self) -> None:
        """Report that the subscription's caller has disconnected."""


DELIVERY_BYTES = 60
"""Maximum bytes of a delivery in a frame, without body and options."""
FRAME_HEAD_BYTES = 40
"""Maximum bytes of a frame without its deliveries."""


class Dispatch(NamedTuple):
    """Deliveries for one subscriber in one frame."""

    subscriber: Subscriber
    items: list[Item]
    taken_ms: int = 0
    """When the deliveries were leased (wall ms), if they are sent later."""
    causes: Causes | None = None
    """The causes of late deliveries, if they have been determined for the history."""


def priority_of(row: TaskRow) -> int:
    return row.options.priority if row.options is not None else 0


def has_order(row: TaskRow) -> bool:
    """Return whether the task has an order key."""
    return row.options is not None and row.options.order_key is not None


def key_of(row: TaskRow) -> str | None:
    return row.options.key if row.options is not None else None


def traits_of(row: TaskRow) -> Traits:
    options = row.options
    if options is None:
        return PLAIN
    key, priority, ttl_ms, retry, replayed = _trait_fields(options)
    if key is None and ttl_ms is None and retry is None and replayed is None and not priority:
        return PLAIN  # the usual case for tasks with a tag or properties
    end_ms = ttl_end_ms(row.due_ms, options)
    return Traits(priority, retry, end_ms, key, is_replayed=replayed is not None)


_trait_fields = itemgetter(
    *map(TaskOptions._fields.index, ("key", "priority", "ttl_ms", "retry", "replayed"))
)


def ttl_end_ms(due_ms: int, options: TaskOptions | None) -> int | None:
    """Return the first millisecond after the time to live, or None without a time to live."""
    if options is None or options.ttl_ms is None:
        return None
    return due_ms + options.ttl_ms + 1


class DeliveryAttempts(NamedTuple):
    """The earlier deliveries of a task to a group, while the task is not in flight. An *attempt* is
    the number of one delivery; this object summarizes all of them."""

    attempt: int
    """The number of the newest delivery."""
    epoch: int
    """The epoch of the newest delivery; 0 if its receipt is no longer valid."""
    priority: int
    past: Past = NO_PAST

    @property
    def was_attempted(self) -> bool:
        """Whether a delivery of the task to the group counts as an attempt. A delivery that was
        returned unstarted does not."""
        return self.past != NO_PAST


@dataclass(slots=True, eq=False)
class Lease:
    """An unsettled delivery."""

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
    """The earlier deliveries of the task to the group."""
    order: int = 0
    """The mark of the task's order key, or 0 if it has none."""
    live: bool = True
    checkpointed: bool = False
    """Whether a sealed batch contains this delivery's progress row."""


@dataclass(slots=True, eq=False, repr=False)
class Presence:
    """Whether the consumer of a connection, with all its subscribers, is alive. An open connection
    does not prove it, because the peer can be stopped or without power. A timed-out lease puts the
    connection in doubt; any message from the peer ends the doubt."""

    subscribers: dict[Subscriber, None] = field(default_factory=dict)
    """The connection's subscribers that can get deliveries."""
    unsettled: int = 0
    """Number of unsettled deliveries of the connection."""
    kept_for: Group | None = None
    """The group of the isolated task that is on the connection, or for which the connection is kept
    free; see ``Isolation``."""
    was_alone: bool = False
    """Whether the connection's last delivery was isolated."""
    doubted: bool = False
    """Whether a lease has timed out without a later message, which stops deliveries."""
    doubted_mono_ms: int = 0
    """When the newest of the timed-out leases began (steady ms)."""

    def doubt(self, lease: Lease) -> None:
        """Put the connection in doubt, because this lease has timed out."""
        self.doubted = True
        self.doubted_mono_ms = max(self.doubted_mono_ms, lease.since_mono_ms)


class Keep(NamedTuple):
    """The connection that is kept free for a group; see ``Isolation``."""

    presence: Presence | None
    """The connection, or None if no connection may be kept free before ``until_mono_ms``."""
    until_mono_ms: int


@dataclass(slots=True, eq=False, repr=False)
class Subscriber:
    """A consumer of a group: a subscription of a connection, or a pull. The engine passes ``sink``
    on without using it. ``outstanding`` counts deliveries whose end is not durable; ``unconfirmed``
    is the part of them that is settled. Up to ``acks_ahead_max`` unconfirmed deliveries do not
    count against ``prefetch``. So a consumer does not wait for each commit, but stops if the store
    does."""

    sink: DeliverySink | None
    group: Group
    prefetch: int
    lease_ms: int
    _: KW_ONLY
    once: bool = False
    """Whether this is a pull, which leaves after its first delivery."""
    at_most_once: bool = False
    """Whether deliveries are settled before they are sent."""
    acks_ahead_max: int = 0
    label: str = ""
    """The name of the consumer in the records of failed attempts."""
    asked_mono_ms: int | None = None
    """When a pull was requested (steady ms), which proves that its consumer was alive."""
    presence: Presence = field(default_factory=Presence)
    """The presence of the connection, shared by all of its subscribers."""
    held: dict[int, Lease] = field(default_factory=dict)
    """Id → unsettled delivery."""
    outstanding: int = 0
    unconfirmed: int = 0
    blocked: bool = False
    """Whether the connection's buffer is full."""
    gone_mono_ms: int | None = None
    """The time (steady ms) by which the subscriber's leases end after its connection broke; None
    while the connection is open."""
    death: str = ""
    """The cause of the consumer's death as text; "" if it is not known to have died."""

    def __post_init__(self) -> None:
        self.label = self.label[:SUBSCRIBER_LENGTH_MAX]
        if self.at_most_once:
            self.acks_ahead_max = 0

    @property
    def filter_steps(self) -> int:
        """Maximum steps of the subscriber's filter for a task."""
        return 0

    @property
    def is_subscribed(self) -> bool:
        """Whether the subscriber can still get deliveries."""
        return self in self.group.subscribers

    @property
    def credit(self) -> int:
        return 0 if self.presence.kept_for is not None else self.room

    @property
    def room(self) -> int:
        """The credit, ignoring whether the connection is kept free for an isolated task."""
        if self.blocked or (self.presence.doubted and not self._asked_since):
            return 0
        return self.prefetch - self.in_flight

    @property
    def in_flight(self) -> int:
        """Number of deliveries that count against ``prefetch``."""
        return self.outstanding - min(self.unconfirmed, self.acks_ahead_max)

    @property
    def _asked_since(self) -> bool:
        """Whether this pull was requested after the deliveries that put its consumer in doubt."""
        asked_mono_ms = self.asked_mono_ms
        return asked_mono_ms is not None and asked_mono_ms >= self.presence.doubted_mono_ms


NAMES_MAX = 100_000
"""Maximum number of topics whose tallies are cached."""


@dataclass(slots=True, eq=False)
class Tally:
    """The number of unfinished tasks of some topics. It counts staged tasks, durable tasks that a
    group is or will be owed, and half tasks, but no dead letters. It is updated with every staged
    batch and every ended task, so reading it costs nothing, and it is exact right after a
    restart."""

    has: Callable[[str], bool]
    """Returns whether a topic is counted."""
    tasks: int = 0


class Tallies:
    """All tallies of one engine."""

    def __init__(self) -> None:
        self.all: list[Tally] = []
        self._of: dict[str, tuple[Tally, ...]] = {}

    def add(self, tally: Tally) -> None:
        """Keep ``tally``, which must be exact now, up to date."""
        self.all.append(tally)
        self._of.clear()

    def remove(self, tally: Tally) -> None:
        """Stop updating a tally."""
        self.all.remove(tally)
        self._of.clear()

    def count(self, topic: str, change: int) -> None:
        """Change the number of tasks of one topic."""
        if not self.all:
            return
        tallies = self._of.get(topic)
        if tallies is None:
            if len(self._of) >= NAMES_MAX:
                self._of.clear()
            tallies = self._of[topic] = tuple(tally for tally in self.all if tally.has(topic))
        for tally in tallies:
            tally.tasks += change

    def count_all(self, topics: Mapping[str, int], sign: int) -> None:
        """Change the numbers of tasks of many topics. ``sign`` is 1 to add and -1 to subtract."""
        if self.all:
            for topic, change in topics.items():
                self.count(topic, sign * change)
