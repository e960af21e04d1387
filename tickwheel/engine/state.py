"""What the engine remembers, and the few steps that its parts have in common.

``Core`` owns all of it, so that each part (enqueue, delivery, settlement, groups, tasks, recovery)
is a small class with the verbs of one concern. What it is made of stands before it:

* ``EngineConfig`` and ``Totals``: what an engine gets at its start, and what it counts since.
* ``IdSource``: ids are (milliseconds since 2025, 12-bit sequence, 10-bit shard), below 2**63 until
  2094; those of one daemon differ by ``ID_STEP``. A burst of more than 4,096 in a millisecond
  borrows from the next one. The source never goes back, not even after a restart with the clock
  set back, because it starts above the stored mark.
* ``Outcomes``: how the tasks that finished last have ended. When the young generation is full it
  becomes the old one, and the former old one is forgotten, so between ``bound / 2`` and ``bound``
  of them are known, at O(1) a task.
* ``Lifetimes``: when tasks that nobody has taken expire. Every group that a task with a ttl is
  ready, being loaded or waiting in has exactly one handle, on a wheel of its own or in ``fired``;
  a task in flight has none. That is 16 to 24 bytes a task, and two steps of O(1) for one that is
  delivered in time.
* ``Batch``: the effects, and what has to happen when they are durable or refused.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tickwheel.engine.events import DELETED, UNRECORDED, Ledger
from tickwheel.engine.keys import KeyIndex
from tickwheel.engine.ordering import NEVER_MS, Ended, Ordering, Orderings, mark_of
from tickwheel.engine.sessions import ReplySink, Session, Sessions, StoredAnswer
from tickwheel.engine.timetables import Planned, ScheduleHeap, Undo
from tickwheel.engine.topics import (
    DeliveryAttempts,
    Dispatch,
    Group,
    Keep,
    Lease,
    PendingGroups,
    Presence,
    Subscriber,
    Tallies,
    Tally,
    Topic,
    Versions,
    has_order,
    key_of,
    priority_of,
    ttl_end_ms,
)
from tickwheel.engine.transaction_registry import Transaction, TransactionRegistry
from tickwheel.model.filters import STEPS_PER_TICK
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import ClaimRow, Effects, TargetRow
from tickwheel.model.policies import BUILT_IN, DEFAULT, Merging, PolicyRef, RetryPolicy
from tickwheel.model.records import (
    DEFAULT_GROUP,
    ID_STEP,
    NO_BODY,
    NO_PAST,
    REASON_LENGTH_MAX,
    TRACE_LENGTH_MAX,
    TRACES_LENGTH_MAX,
    Failure,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    TaskRow,
    id_floor,
    task_bytes,
)
from tickwheel.wheel.timing import TimingWheel, Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tickwheel.engine.events import Recorder
    from tickwheel.model.kinds import BulkRow


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of the engine; times in ms."""

    slots: int = 3600
    tick_ms: int = 1000
    shard: int = 0
    shards: int = 1
    """How many there are: rates of groups and topics are of all of them together."""
    moved_id: int = 0
    """Tasks with ids up to this may be in any shard, whatever number their ids have."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    policies: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """Retry policies that may be named, beside ``BUILT_IN`` and the default one."""
    resident_horizon_ms: int = 60_000
    """A new task due within this keeps its row in memory."""
    resident_bytes_max: int = 256 * 1024 * 1024
    loading_max: int = 20_000
    """Rows being read for firing at one time."""
    lease_checkpoint_ms: int = 100
    """A delivery that is finished sooner never touches the PrepareQueue."""
    reconnect_grace_ms: int = 5_000
    endings_max: int = 100_000
    sessions_max: int = 100_000
    session_outcomes_max: int = 1_000_000
    outcomes_per_session_max: int = 131_072
    """Remembered answers of all sessions; beyond it those of long unused sessions go first."""
    session_idle_ms_max: int = 86_400_000
    session_evict_idle_ms_min: int = 60_000
    topics_max: int = 100_000
    groups_per_topic_max: int = 1_000
    groups_max: int = 200_000
    tasks_max: int = 100_000_000
    """Tasks that are not finished."""
    scheduled_max: int = 100_000_000
    """Tasks that are scheduled."""
    backlog_max: int = 20_000_000
    """Tasks that are due on one topic that has no group yet."""
    delivery_frame_tasks_max: int = 512
    delivery_frame_bytes_max: int = 1024 * 1024
    dispatch_bytes_max: int = 16 * 1024 * 1024
    """Bytes handed out by one call of ``dispatch``, which may exceed this by one frame."""
    handed_bytes_max: int = 16 * 1024 * 1024
    """Bytes of at-most-once deliveries that wait for their commit, and one frame more."""
    acks_ahead_max: int = 4_096
    """Ends of deliveries of one subscription that give their credit back before they are durable.
    Of an at-most-once subscription none does."""
    deaths_max: int = 3
    """After so many deaths of consumers a task is a dead letter, or its key is held."""
    death_retry_base_ms: int = 1_000
    """The wait after the first death of a consumer; it doubles with each further death,"""
    death_retry_cap_ms: int = 60_000
    """and is so long at most."""
    snoozes_max: int = 1_000
    trace_length_max: int = TRACE_LENGTH_MAX
    """Characters of a kept trace; 0: traces are not kept."""
    """Times that one group may postpone one task."""
    in_flight_max: int = 2_000_000
    """Deliveries of all groups that are not finished."""
    lapsing_max: int = 10_000
    """Tasks whose time to live is over and that are being looked up at one time."""
    broadcast_tasks_max: int = 10_000
    broadcast_bytes_max: int = 32 * 1024 * 1024
    """Bytes that may wait for one broadcast subscription whose connection is behind."""
    broadcasts_bytes_max: int = 256 * 1024 * 1024
    """Bytes that may wait for all broadcast subscriptions together."""
    subscribers_max: int = 100_000
    """Subscriptions and pulls that are open."""
    transactions_max: int = 10_000
    """Transactions that are not decided."""
    transactions_bytes_max: int = 64 * 1024 * 1024
    """Bytes of the half tasks of all transactions: they stay in memory."""
    transaction_tasks_max: int = 10_000
    transaction_bytes_max: int = 4 * 1024 * 1024
    """Bytes of the half tasks of one transaction."""
    transaction_check_ms: int = 60_000
    """How long after the last sign of a transaction its producer group is asked about it,"""
    transaction_check_every_ms: int = 60_000
    """how long until it is asked again,"""
    transaction_checks_max: int = 15
    """and how often; then the transaction is parked."""
    transactions_remembered_max: int = 100_000
    """Decided transactions, for repeated commits or rollbacks; the oldest are forgotten first,"""
    transactions_remembered_ms: int = 3_600_000
    """and those that were decided so long ago."""
    bulk_max: int = 100
    """Bulk operations that are running."""
    bulk_remembered_max: int = 1_000
    """Bulk operations that are over; the oldest are forgotten first,"""
    bulk_remembered_ms: int = 604_800_000
    """and those that ended so long ago."""

    @property
    def deaths_alone(self) -> int:
        """From so many deaths on a task is handed out alone: one more ends it. Where one is enough
        there is no delivery before it that could show anything."""
        return max(1, self.deaths_max - 1)


@dataclass(slots=True)
class Totals:
    """Counts since the start of the daemon."""

    enqueued: int = 0
    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    snoozed: int = 0
    deaths: int = 0
    """Deliveries whose consumers died."""
    retried: int = 0
    expired: int = 0
    filtered: int = 0
    """Tasks that a group's filter left out, once for each group."""
    cancelled: int = 0
    leases_over: int = 0
    dead: int = 0
    dead_expired: int = 0
    """Dead letters deleted because their retention was over."""
    rows_missing: int = 0
    """Must stay 0: tasks that had not ended and whose rows a store did not have."""
    schedules_fired: int = 0
    schedules_missed: int = 0
    schedules_overlapped: int = 0
    transactions_committed: int = 0
    transactions_rolled_back: int = 0
    transactions_checked: int = 0
    """Times that a producer was asked about a transaction."""
    transactions_parked: int = 0
    windows: int = 0
    """Due times that were chosen for tasks with a due window."""
    """Occurrences of schedules: those that became tasks, and those that did not."""
    dropped_once: int = 0
    """At-most-once deliveries whose consumer was gone when they could have been written."""
    early: int = 0
    """Must stay 0: deliveries stopped at the last check because they were not due."""


class IdSource:
    """Hands out ascending ids of one shard."""

    __slots__ = ("last", "shard")

    def __init__(self, shard: int, mark: int) -> None:
        if not 0 <= shard < ID_STEP:
            raise ValueError(f"shard {shard} is not in 0..{ID_STEP - 1}")
        self.shard = shard
        behind = mark // ID_STEP * ID_STEP + shard
        self.last = behind if behind >= mark else behind + ID_STEP
        """The newest id assigned (or the mark, rounded up to this shard)."""

    def take(self, count: int, now_ms: int) -> int:
        """Assign ``count`` ids; returns the first, the others follow at steps of ``ID_STEP``."""
        first = max(self.last + ID_STEP, id_floor(now_ms, self.shard))
        self.last = first + (count - 1) * ID_STEP
        return first


class Outcomes:
    """Id → outcome, of recently finished tasks."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, bound: int) -> None:
        self._half = max(1, bound // 2)
        self._young: dict[int, Outcome] = {}
        self._old: dict[int, Outcome] = {}

    def add(self, task_id: int, outcome: Outcome) -> None:
        self._young[task_id] = outcome
        if len(self._young) >= self._half:
            self._old = self._young
            self._young = {}

    def get(self, task_id: int) -> Outcome | None:
        found = self._young.get(task_id)
        return found if found is not None else self._old.get(task_id)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class Lifetimes:
    """The ends of tasks' times to live. What expiring means is ``Delivery.lapsed``."""

    def __init__(self, now_ms: int, slots: int, tick_ms: int) -> None:
        self.wheel = TimingWheel(now_ms, slots=slots, tick_ms=tick_ms)
        self.fired: dict[int, int] = {}
        """Id → handles of tasks whose time to live is over, while they are being looked up."""

    def begin(self, row: TaskRow) -> None:
        """The task is ready or waiting in one group more."""
        end_ms = ttl_end_ms(row.due_ms, row.options)
        if end_ms is not None:
            self.add(row.id, end_ms)

    def add(self, task_id: int, end_ms: int) -> None:
        self.wheel.add(task_id, end_ms)

    def end(self, row: TaskRow) -> None:
        """The task is ready or waiting in one group less."""
        end_ms = ttl_end_ms(row.due_ms, row.options)
        if end_ms is not None:
            self.remove(row.id, end_ms)

    def remove(self, task_id: int, end_ms: int) -> None:
        left = self.fired.get(task_id)
        if left is None:
            self.wheel.cancel(task_id, end_ms)
        elif left == 1:
            del self.fired[task_id]
        else:
            self.fired[task_id] = left - 1

    def fire(self, now_ms: int, limit: int, looked_up_max: int) -> tuple[list[int], bool]:
        """Up to ``limit`` tasks to look up, and whether more are over. At most
        ``looked_up_max`` are being looked up at a time."""
        room = looked_up_max - len(self.fired)
        if not len(self.wheel) or room <= 0:
            return [], False
        ids, _, more = self.wheel.advance(now_ms, min(limit, room))
        fresh = [task_id for task_id in dict.fromkeys(ids) if task_id not in self.fired]
        for task_id in ids:
            self.fired[task_id] = self.fired.get(task_id, 0) + 1
        return fresh, more

    def next_ms(self, now_ms: int) -> int | None:
        """When to call ``fire`` next (wall ms); None: there is nothing to wait for."""
        return self.wheel.next_due_ms(now_ms) if len(self.wheel) else None

    def __len__(self) -> int:
        return len(self.wheel) + sum(self.fired.values())


Staged = tuple[ReplySink | None, Session | None, StoredAnswer]
"""(where the answer goes, its session, the answer) of one staged enqueue request."""


Reply = tuple[ReplySink, Sized]
"""(where the answer goes, the answer in the sink's form), waiting for a batch."""


@dataclass(slots=True)
class Batch:
    """The open batch, which collects changes, or a sealed one, which is with the store."""

    effects: Effects = field(default_factory=Effects)
    staged: list[Staged] = field(default_factory=list)
    """Requests whose tasks are in ``effects.enqueued``, and repeats of them."""
    staged_bytes: int = 0
    traces_length: int = 0
    """How many characters the traces of failures in the batch have."""
    updated_bytes: int = 0
    """The bytes of what is in ``effects.updated`` and ``effects.moved``, at least."""
    topics: Counter[str] = field(default_factory=Counter)
    """How many tasks of each topic are in ``effects.enqueued``."""
    credits: dict[Subscriber, int] = field(default_factory=dict)
    """Deliveries whose end this batch confirms, by subscriber."""
    handed: list[Dispatch] = field(default_factory=list)
    """At-most-once deliveries, to be written once their end is durable, before the replies."""
    handed_bytes: int = 0
    placed: list[int] = field(default_factory=list)
    """Ticks that were chosen for tasks with a due window."""
    chosen: dict[int, list[int]] = field(default_factory=dict)
    """First id of a request with due windows → the due times of all of its tasks."""
    runs: dict[Planned, Undo] = field(default_factory=dict)
    """Schedules with tasks in ``effects.enqueued``, and how to undo these if refused."""
    transactions: dict[str, Transaction | None] = field(default_factory=dict)
    """The transactions that this batch changes, as they were before; None: it made them."""
    bulks_before: dict[str, BulkRow] = field(default_factory=dict)
    """Bulk operations that have made tasks in ``effects.enqueued``, as they were before."""
    accepted: set[int] = field(default_factory=set)
    """Ids of tasks of ``effects.enqueued`` that stay though the batch is refused: their request has
    replaced something, which is never undone."""
    replaced: dict[int, TaskRow] = field(default_factory=dict)
    """Scheduled tasks with another body; off the wheel until the batch is durable."""
    merged: Counter[tuple[str, Merging]] = field(default_factory=Counter)
    """(topic, outcome) → how many tasks of ``staged`` were not stored."""
    has_marks: bool = False
    """Whether answers are remembered for resends that nothing else in the batch says."""
    ended: list[Ended] = field(default_factory=list)
    """Order keys that go on when the batch is durable."""
    replies: list[Reply] = field(default_factory=list)
    """Answers that rest on this batch, in order."""
    notes: object = None
    """The recorder's notes of the batch, once it is sealed."""

    def is_empty(self) -> bool:
        return not (
            self.staged
            or self.credits
            or self.replies
            or self.has_marks
            or self.ended
            or not self.effects.is_empty()
        )


def strip_ended(effects: Effects) -> None:
    """Remove ended ids from all other maps: the drop of a task covers all of its rows."""
    ended = effects.ended
    if not ended:
        return
    if effects.updated:
        effects.updated = {k: v for k, v in effects.updated.items() if k not in ended}
    if effects.moved:
        effects.moved = {k: v for k, v in effects.moved.items() if k not in ended}
    if effects.progress:
        effects.progress = {k: v for k, v in effects.progress.items() if k[0] not in ended}
    if effects.dead:
        effects.dead = {k: v for k, v in effects.dead.items() if k[0] not in ended}


def rejoin(older: Batch, newer: Batch) -> None:
    """Put what is left of a refused batch in front of the batch that followed it.

    ``newer`` wins for every key, because states are absolute.
    """
    a, b = older.effects, newer.effects
    for task_id in a.updated.keys() & b.moved.keys():
        b.updated[task_id] = a.updated[task_id]._replace(due_ms=b.moved.pop(task_id))
    b.moved = {k: v for k, v in a.moved.items() if k not in b.updated} | b.moved
    b.updated = a.updated | b.updated
    b.progress = a.progress | b.progress
    b.dead = a.dead | b.dead
    b.ended = a.ended | b.ended
    b.records = a.records | b.records
    b.id_mark = max(a.id_mark, b.id_mark)
    b.position_ms = max(a.position_ms, b.position_ms)
    for subscriber, count in older.credits.items():
        newer.credits[subscriber] = newer.credits.get(subscriber, 0) + count
    newer.handed[:0] = older.handed
    newer.handed_bytes += older.handed_bytes
    newer.updated_bytes += older.updated_bytes
    newer.traces_length += older.traces_length
    newer.replies[:0] = older.replies
    newer.ended[:0] = older.ended
    newer.replaced = older.replaced | newer.replaced
    newer.has_marks |= older.has_marks


ROW_OVERHEAD_BYTES = 250
"""What a resident row costs beside its body and extras."""
MOVE_BYTES = 150
"""What a new due time costs in a batch."""
MISSING_MAX = 100_000
"""How many tasks with missing rows do not hold up the reading of other rows."""


class Core:
    """Everything that an engine remembers of its shard."""

    # Counts of what there is now.
    tasks = 0
    """How many tasks are durable and not finished."""
    scheduled = 0
    in_flight = 0
    dead = 0
    resident_bytes = 0
    """How many bytes the rows of ``resident_rows`` take."""
    handed_bytes = 0
    """The bytes of at-most-once deliveries that wait for their commit."""
    group_count = 0
    steps_left = STEPS_PER_TICK
    """How many steps filters may still take in this look at what is due."""
    bulk_running = 0
    filters_length = 0
    """How many characters the filters of all groups have."""
    subscribers = 0
    """How many subscribers groups and broadcasts have; pulls are among them."""

    sealed: Batch | None = None
    landing: Batch | None = None
    """A batch that is durable, and whose tasks are not on the wheel yet."""
    expiry_mono_ms: int | None = None
    """No lease of any group ends before this."""
    acted_ms = 0
    """The newest due time of the tasks recovered with a history: these are not on the wheel, even
    if the clock went back during the restart."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        id_mark: int,
        now_ms: int,
        recorder: Recorder | None = None,
        key_seed: bytes = b"",
    ) -> None:
        self.config, self.epoch, self.ids = config, epoch, IdSource(config.shard, id_mark)
        self.recorder, self.is_recorded = recorder or UNRECORDED, recorder is not None
        self.landed_id = self.wheel_id = id_mark
        """Every id up to this is durable (or refused), and a moment later on the wheel."""
        self.wheel = TimingWheel(now_ms, slots=config.slots, tick_ms=config.tick_ms)
        self.open, self.windows = Batch(), Windows(self.wheel, self._placed)
        self.sessions = Sessions(config.sessions_max, config.session_idle_ms_max)
        self.outcomes = Outcomes(config.endings_max)
        self.keys = KeyIndex(KeyHash(key_seed), config.endings_max)
        # ``targets``: (topic, group) → where its tasks are sent to, instead of to subscribers.
        # ``claims``: (what is named, name) → in which shard the name is in use.
        self.topics, self.targets = dict[str, Topic](), dict[tuple[str, str], TargetRow]()
        self.claims, self.maybe_idle = dict[tuple[str, str], ClaimRow](), dict[str, None]()
        """Topics that may be idle, among them all that are; see ``Grouping.forget_idle``."""
        self.resident_rows: dict[int, TaskRow] = {}
        """Rows in memory of tasks that are scheduled soon or ready."""
        # ``numbered``: groups that may have ``numbers``.
        self.owed, self.numbered = dict[int, PendingGroups](), dict[Group, None]()
        self.retrying: dict[int, list[Group]] = {}
        """id → groups in which the task waits for a retry."""
        self.firing: dict[int, int] = {}
        """id → due_ms of tasks whose handles fired before their rows were in memory."""
        # Scheduled tasks that are off the wheel until their new bodies are durable; topics with a
        # rule for tasks whose key is pending; topics that are being deleted.
        self.replaced, self.ruled_topics = dict[int, TaskRow](), set[str]()
        self.closing_topics: set[str] = set()
        # Deliveries that no batch holds yet, the oldest first; and those whose tasks were replaced
        # just now, which the open batch has to say.
        self.unsaved, self.replaced_leases = deque[Lease](), list[Lease]()
        self.dirty_sessions, self.runnable = dict[bytes, None](), dict[Group, None]()
        """Sessions whose row the next batch writes; groups that may be able to deliver."""
        self.missing: dict[int, None] = {}
        """Unfinished tasks whose rows the store does not have: they stay where they are, and the
        shard goes on looking for the rows."""
        self.wants: list[int] = []
        """Ids whose rows the shard shall read and hand to ``Delivery.loaded``."""
        self.wants_ready: dict[Group, list[int]] = {}
        """Ids of ready tasks without a row in memory, for ``Delivery.loaded_ready``."""
        self.leased: dict[Group, None] = {}
        """Groups that may have deliveries in flight."""
        self.full_topics: dict[str, None] = {}
        """Topics without a group whose backlog is at its limit."""
        self.lifetimes = Lifetimes(now_ms, config.slots, config.tick_ms)
        self.wants_lapsed: list[int] = []
        """Ids of tasks whose time to live is over, for ``Delivery.lapsed``."""
        self.schedule_heap, self.orderings = ScheduleHeap(), Orderings(self.wake, self._goes_on)
        self.transaction_registry, self.tallies = TransactionRegistry(tallies := Tallies()), tallies
        # ``keeps``: groups for whose tasks a connection is kept free, see ``Apart``.
        self.keeps, self.throttled = dict[Group, Keep](), dict[Group, int]()
        """Groups held back by a rate → when there is a token, by the steady clock."""
        self.cut: list[tuple[Subscriber, str, str]] = []
        """Subscriptions ended by the engine, each with an error code and a sentence."""
        self.faults: list[tuple[str, Exception, str | None]] = []
        """What could not be processed (see ``fault``), for the shard to report."""
        self.policies = {**BUILT_IN, **config.policies, DEFAULT: config.retry}
        self.totals, self.versions = Totals(), Versions(config.shard, config.shards)
        # ``held_back``: groups that only wait for the commit of at-most-once deliveries.
        self.ledger, self.held_back = Ledger(self.throttled, self.targets), dict[Group, None]()

    @property
    def batches(self) -> list[Batch]:
        """The batches with tasks that are not on the wheel yet, the newest first."""
        batches = (self.open, self.sealed, self.landing)
        return [batch for batch in batches if batch is not None]

    def _placed(self) -> Iterator[int]:
        """The ticks chosen for tasks with a due window that are not on the wheel yet."""
        for batch in reversed(self.batches):
            yield from batch.placed

    @property
    def staged(self) -> int:
        """How many tasks are not on the wheel yet."""
        return sum(len(batch.effects.enqueued) for batch in self.batches)

    def staged_on(self, topic: str) -> int:
        """How many tasks of a topic are not on the wheel yet."""
        return sum(batch.topics[topic] for batch in self.batches)

    @property
    def room(self) -> int:
        """How many more tasks may be taken. Half tasks count as taken."""
        config = self.config
        left = min(config.tasks_max - self.tasks, config.scheduled_max - self.scheduled)
        return left - self.staged - self.transaction_registry.tasks

    # --- resident rows -------------------------------------------------------------------

    def keep(self, row: TaskRow) -> None:
        """Keep a row resident (whatever the budget says: callers ask ``has_room``)."""
        known = self.resident_rows.get(row.id)
        if known is not None:
            self.resident_bytes -= task_bytes(known) + ROW_OVERHEAD_BYTES
        self.resident_rows[row.id] = row
        self.resident_bytes += task_bytes(row) + ROW_OVERHEAD_BYTES

    def drop(self, task_id: int) -> None:
        """Let go of the row of a task, if it is resident."""
        row = self.resident_rows.pop(task_id, None)
        if row is not None:
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    @property
    def has_room(self) -> bool:
        """Whether another row may become resident."""
        return self.resident_bytes < self.config.resident_bytes_max

    @property
    def reads_ahead(self) -> bool:
        """Whether there is so much room that rows may be read before somebody can take them."""
        return self.resident_bytes < self.config.resident_bytes_max * 3 // 4

    def make_room(self) -> None:
        """Release resident rows, the newest first, until the budget is kept, before rows are kept
        that somebody waits for. They are read again when they are wanted."""
        resident = self.resident_rows
        while resident and self.resident_bytes > self.config.resident_bytes_max:
            _, row = resident.popitem()
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    # --- rows that must be there ---------------------------------------------------------

    def was_assigned(self, task_id: int) -> bool:
        """Whether the shard may have had a task with this id."""
        config = self.config
        is_ours = task_id % ID_STEP == config.shard or task_id <= config.moved_id
        return 0 < task_id <= self.landed_id and is_ours

    def held(self, ids: set[int]) -> set[int]:
        """The tasks of ``ids`` that have certainly not ended: memory has them where only unfinished
        ones are. Others may be far away on the wheel or in a ready queue, which hold too many to
        be searched."""
        lifetimes = self.lifetimes
        found: set[int] = set()
        for holder in (
            self.firing,
            self.replaced,
            self.resident_rows,
            self.retrying,
            self.owed,
            lifetimes.fired,
        ):
            found |= ids & holder.keys()
        for topic in self.topics.values():
            for group in topic.groups.values():
                if group.flight or group.loading:
                    found |= ids & group.flight.keys()
                    found |= ids & group.loading.keys()
        return found

    @property
    def missing_apart(self) -> int:
        """How many missing rows do not count against the limits of what is being read."""
        return min(len(self.missing), MISSING_MAX)

    # --- names ---------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(name)
            self.maybe_idle[name] = None
        return found

    def lost_task(self, topic: Topic) -> None:
        """A task that no group held has ended: note a topic that may be idle now."""
        if not topic.groups:
            self.maybe_idle[topic.name] = None

    def find_group(self, topic: str, group: str) -> Group | None:
        found = self.topics.get(topic)
        return found.groups.get(group or DEFAULT_GROUP) if found is not None else None

    def policy(self, own: PolicyRef | None, group: Group) -> RetryPolicy:
        """The task's own policy, its group's, its topic's, the daemon's: the first there is.

        A name that the settings do not define any more stands for the daemon's.
        """
        wanted = own or group.settings.retry or group.topic.settings.retry
        if wanted is None:
            return self.config.retry
        if isinstance(wanted, RetryPolicy):
            return wanted
        return self.policies.get(wanted, self.config.retry)

    def fault(
        self, lease: Lease, reason: str, error: Exception, now_ms: int, trace: str | None = None
    ) -> Failure:
        """Something that is worked out for this task alone failed in a way it should not.

        Only for what changes nothing in memory: after half of a change nothing may go on. The
        task goes to the dead letters, because a stop would meet it again after each restart.
        """
        self.faults.append((f"task {lease.id} of group {lease.group.name}", error, trace))
        return self.failure(lease, f"internal: {error!r:.150}; after: {reason}", now_ms)

    def failure(self, lease: Lease, reason: str, now_ms: int) -> Failure:
        """The failed attempt, with its reason and trace cut to the lengths that are kept."""
        summary, _, trace = reason.partition("\n")
        summary = summary[:REASON_LENGTH_MAX]
        if trace:
            room = TRACES_LENGTH_MAX - self.open.traces_length
            length = min(self.config.trace_length_max, room)
            if length > 0:
                self.open.traces_length += min(length, len(trace))
                summary += f"\n{trace[-length:]}"
        return Failure(lease.attempt, now_ms, summary, lease.subscriber.label)

    # --- how many there are --------------------------------------------------------------

    def tally(self, has: Callable[[str], bool]) -> Tally:
        """Count the unfinished tasks of all topics for which ``has`` is true, from now on. Takes as
        long as there are topics, once."""
        tally = Tally(has)
        tally.tasks = sum(topic.unfinished for name, topic in self.topics.items() if has(name))
        staged = (batch.topics for batch in self.batches)
        for counts in (*staged, self.transaction_registry.topics):
            tally.tasks += sum(count for name, count in counts.items() if has(name))
        self.tallies.add(tally)
        return tally

    def count_unfinished(self, topic: str, change: int) -> None:
        """Change the number of durable unfinished tasks of a topic."""
        self.topics[topic].unfinished += change
        self.tallies.count(topic, change)

    # --- the end of a task ---------------------------------------------------------------

    def end(self, task_id: int, outcome: Outcome, topic: str, key: str | None) -> None:
        """End a task for good. Its other rows leave the batch when that is sealed. Written out for
        one task: by ``end_plain`` an ack of one that two groups had takes 13.8 µs, not 13.1."""
        self.tasks -= 1
        self.count_unfinished(topic, -1)
        if key is not None:
            self.keys.ended(topic, key, task_id)
        self.open.effects.ended[task_id] = outcome
        self.outcomes.add(task_id, outcome)
        self.drop(task_id)
        self.owed.pop(task_id, None)
        self.schedule_heap.ended((task_id,))
        if self.numbered:
            self._forget_numbers(topic, (task_id,))

    def end_unowed(self, row: TaskRow) -> None:
        """End a task that only groups were owed that are gone, or are being deleted."""
        self.end(row.id, Outcome.DELETED, row.topic, key_of(row))
        self.recorder.ended(row.topic, None, DELETED, row.id, last=True)

    def end_plain(
        self, ids: Collection[int], outcome: Outcome, topic: str, keys: Mapping[int, str]
    ) -> None:
        """``end`` for tasks of ``topic`` of which nothing else is in memory but ``keys``: id → key
        of those that have one."""
        self.tasks -= len(ids)
        self.count_unfinished(topic, -len(ids))
        if keys:
            self.keys.ended_many(topic, keys)
        ended, outcomes = self.open.effects.ended, self.outcomes
        for task_id in ids:
            ended[task_id] = outcome
            outcomes.add(task_id, outcome)
        self.schedule_heap.ended(ids)
        if self.numbered:
            self._forget_numbers(topic, ids)

    def is_scheduled(self, row: TaskRow) -> bool:
        """Whether a task's due time has not come, or has not been acted on."""
        if row.id in self.retrying:
            # It may wait for its own due time again, after the clock went back.
            return False
        return (
            row.due_ms > max(self.wheel.position_ms, self.acted_ms)
            or row.id in self.firing
            or row.id in self.replaced
            or row.id in self.topic(row.topic).deferred
            or self.wheel.holds(row.id, row.due_ms)
        )

    def unschedule(self, row: TaskRow) -> None:
        """Take a scheduled task off the wheel."""
        topic = self.topic(row.topic)
        is_elsewhere = (
            self.firing.pop(row.id, None) is not None
            or topic.deferred.pop(row.id, None) is not None
            or self.replaced.pop(row.id, None) is not None
        )
        if not is_elsewhere:
            self.wheel.cancel(row.id, row.due_ms)
        topic.scheduled -= 1
        self.scheduled -= 1
        self.drop(row.id)
        if has_order(row):
            self.hold_order(row)

    def hold_order(self, row: TaskRow) -> None:
        """Let tasks behind a scheduled one with an order key wait until its leaving is durable: a
        crash would put it back."""
        for group in self.topic(row.topic).holders:
            ordering = self.ordering_for(group, row)
            if ordering is not None:
                ordering.keys.keep_from_going_on(mark_of(row))

    def schedule(self, row: TaskRow, now_ms: int) -> None:
        """Put a durable or recorded task on the wheel."""
        self.topic(row.topic).scheduled += 1
        self.scheduled += 1
        self.put_on_wheel(row, now_ms)

    def hold(self, row: TaskRow) -> None:
        """``schedule`` a task whose body is new as soon as the open batch is durable."""
        self.topic(row.topic).scheduled += 1
        self.scheduled += 1
        self.replaced[row.id] = self.open.replaced[row.id] = row

    def put_on_wheel(self, row: TaskRow, now_ms: int) -> None:
        """Put a task that is counted as scheduled onto the wheel."""
        self.wheel.add(row.id, row.due_ms)
        is_soon = row.due_ms <= now_ms + self.config.resident_horizon_ms
        if is_soon and row.body is not NO_BODY and self.has_room:
            self.keep(row)

    def write(self, row: TaskRow, *, is_moved: bool) -> None:
        """Write the row into the open batch; ``is_moved``: only the due time is new."""
        effects, task_id = self.open.effects, row.id
        if not is_moved or row.body is not NO_BODY:
            effects.moved.pop(task_id, None)
            effects.updated[task_id] = row
            self.open.updated_bytes += task_bytes(row) + ROW_OVERHEAD_BYTES
            return
        if task_id in effects.updated:
            effects.updated[task_id] = effects.updated[task_id]._replace(due_ms=row.due_ms)
        else:
            effects.moved[task_id] = row.due_ms
        self.open.updated_bytes += MOVE_BYTES

    def expires(self, group: Group, at_mono_ms: int) -> None:
        """Note that a lease of ``group`` may end at ``at_mono_ms``."""
        self.leased[group] = None
        if group.expiry_mono_ms is None or group.expiry_mono_ms > at_mono_ms:
            group.expiry_mono_ms = at_mono_ms
        if self.expiry_mono_ms is None or self.expiry_mono_ms > at_mono_ms:
            self.expiry_mono_ms = at_mono_ms

    def _goes_on(self, ended: Ended) -> None:
        """Let an order key go on when the open batch is durable."""
        self.open.ended.append(ended)

    # --- steps of several parts ----------------------------------------------------------

    def come(self, group: Group, row: TaskRow, now_ms: int) -> None:
        """The task is due for ``group``: ready, as soon as it is the key holder."""
        ordering = self.ordering_for(group, row)
        if ordering is None:
            group.ready.push(row.id, priority_of(row), now_ms)
        else:
            ordering.arrive(row, now_ms)

    def come_all(self, group: Group, rows: Sequence[TaskRow], now_ms: int) -> None:
        """``come`` for each of these tasks; a filter may have left out all of them."""
        if not rows:
            return
        if not group.is_ordered:
            options = [row[4] for row in rows if row[4] is not None]
            if not any(one.priority or one.order_key is not None for one in options):
                group.ready.push_all([row[0] for row in rows], now_ms)
                return
            if group.is_closed or not any(map(has_order, rows)):
                for row in rows:
                    group.ready.push(row.id, priority_of(row), now_ms)
                return
        self.orderings.begin(group).arrive_all(rows, now_ms)

    def ordering_for(self, group: Group, row: TaskRow) -> Ordering | None:
        """The group's order keys and shares, if they decide about the task; else None."""
        if not group.is_ordered and (not has_order(row) or group.is_closed):
            return None
        return self.orderings.begin(group)

    def wait(self, group: Group, task_id: int, at_ms: int) -> None:
        """Let ``group`` get the task again at ``at_ms``."""
        group.waiting[task_id] = at_ms
        groups = self.retrying.setdefault(task_id, [])
        if group not in groups:
            groups.append(group)
        self.wheel.add(task_id, at_ms)
        attempts = group.delivery_attempts.get(task_id)
        if attempts is not None:
            self.note_attempts(group, task_id, ProgressState.WAITING, at_ms)

    def leave(self, group: Group, row: TaskRow, *, stays_holder: bool = False) -> None:
        """A task that is ready or waiting in ``group`` is taken out of it; ``stays_holder``: only
        to wait, and its order key waits with it."""
        task_id = row.id
        group.delivery_attempts.pop(task_id, None)
        self.lifetimes.end(row)
        if group.is_ordered and self.orderings.of[group].leave(row, stays_holder=stays_holder):
            return
        at_ms = group.waiting.pop(task_id, None)
        if at_ms is not None:
            if at_ms != NEVER_MS:
                self.wheel.cancel(task_id, at_ms)
            self.waited(group, task_id)
            return
        group.withdraw(task_id)
        if task_id in group.apart:
            self.not_apart(group, task_id)
        topic = group.topic
        if topic.default_backlog is group and group.ready_count < self.config.backlog_max:
            self.full_topics.pop(topic.name, None)

    def hold_key(self, group: Group, task_id: int, attempts: DeliveryAttempts, now_ms: int) -> None:
        """Let the task wait in ``group`` until an operator acts on its order key."""
        group.delivery_attempts[task_id] = attempts
        group.waiting[task_id] = NEVER_MS
        self.retrying.setdefault(task_id, []).append(group)
        self.note_attempts(group, task_id, ProgressState.HELD, now_ms)

    def waited(self, group: Group, task_id: int) -> None:
        """``group`` does not wait for this task's next attempt any more."""
        groups = self.retrying[task_id]
        groups.remove(group)
        if not groups:
            del self.retrying[task_id]

    def note_attempts(self, group: Group, task_id: int, state: ProgressState, at_ms: int) -> None:
        """Record the group's ``delivery_attempts`` of the task in the open batch."""
        attempt, epoch, _, past = group.delivery_attempts[task_id]
        self.open.effects.progress[task_id, group.name] = ProgressRow(
            task_id, group.name, state, attempt, at_ms, epoch, *past
        )

    def note_done(
        self,
        task_id: int,
        group: Group,
        attempt: int,
        epoch: int,
        state: ProgressState = ProgressState.DONE,
    ) -> None:
        """The group's share of a task is over while others still owe an end; ``epoch``: of the
        delivery that was acked, 0 when none was."""
        self.open.effects.progress[task_id, group.name] = ProgressRow(
            task_id, group.name, state, attempt, 0, epoch
        )

    # --- numbers of deliveries -----------------------------------------------------------

    def begins_anew(self, group: Group, task_id: int, attempt: int) -> None:
        """Forget earlier deliveries of the task, except that ``attempt`` was the newest: no other
        one may have the same number. A store need not know: a restart has another epoch."""
        if attempt:
            group.numbers[task_id] = attempt
            self.numbered[group] = None

    def number(self, group: Group, task_id: int) -> int:
        """Remove and return the newest number of the task's deliveries that do not count; 0:
        none."""
        return group.numbers.pop(task_id, 0) if group.numbers else 0

    def _forget_numbers(self, topic: str, ended: Collection[int]) -> None:
        """Forget the delivery numbers of tasks of a topic that have ended."""
        for group in [group for group in self.numbered if group.topic.name == topic]:
            for task_id in group.numbers.keys() & ended:
                del group.numbers[task_id]
            if not group.numbers:
                del self.numbered[group]

    def next_delivery(self, group: Group, task_id: int) -> tuple[int, Past]:
        """Remove and return (attempt, past) for the lease of the next delivery."""
        attempts = group.delivery_attempts.pop(task_id, None) if group.delivery_attempts else None
        if attempts is None:
            return self.number(group, task_id) + 1, NO_PAST
        return attempts.attempt + 1, attempts.past

    # --- credits -------------------------------------------------------------------------

    def unconfirmed(self, subscriber: Subscriber, count: int) -> None:
        """Count deliveries that have ended and that the open batch will confirm."""
        credits = self.open.credits
        credits[subscriber] = credits.get(subscriber, 0) + count
        subscriber.unconfirmed += count
        if subscriber.acks_ahead_max:
            self.regained(subscriber)

    def give_back(self, subscriber: Subscriber, count: int) -> None:
        """Return credit at once: nothing has to be confirmed to this consumer."""
        subscriber.outstanding -= count
        self.regained(subscriber)

    def settled(self, presence: Presence, count: int) -> None:
        """Count ended deliveries on one connection."""
        presence.unsettled -= count
        group = presence.kept_for
        if group is None or presence.unsettled:
            return
        if not self.is_kept_free(presence):
            presence.kept_for = None  # what was alone is over
            presence.was_alone = True
        for subscriber in presence.subscribers:
            self.regained(subscriber)

    def is_kept_free(self, presence: Presence) -> bool:
        """Whether the connection is kept free for a task that is to be alone on it."""
        keep = None if presence.kept_for is None else self.keeps.get(presence.kept_for)
        return keep is not None and keep.presence is presence

    def not_apart(self, group: Group, task_id: int) -> None:
        """The task no longer waits to be alone on a connection."""
        del group.apart[task_id]
        if not group.apart:
            self.let_in(group)

    def let_in(self, group: Group) -> None:
        """No connection is kept free for ``group`` any more."""
        keep = self.keeps.pop(group, None)
        if keep is not None and keep.presence is not None:
            keep.presence.kept_for = None
            for subscriber in keep.presence.subscribers:
                self.regained(subscriber)

    def regained(self, subscriber: Subscriber) -> None:
        """Look at a subscriber again that may have credit now."""
        group = subscriber.group
        if subscriber in group.subscribers:
            group.able[subscriber] = None
            self.wake(group)

    def wake(self, group: Group) -> None:
        if group.able and group.ready_count > group.in_key_queues and group not in self.throttled:
            self.runnable[group] = None
