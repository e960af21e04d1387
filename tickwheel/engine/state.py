"""The engine's state, and the steps that several of its parts share.

``Core`` owns the state, so that each part (enqueue, delivery, settlement, groups, tasks, recovery)
is a small class with the verbs of one concern. Its components are:

* ``EngineConfig`` and ``Totals``: the settings of an engine, and its counters since the start.
* ``IdSource``: ids are (milliseconds since 2025, 12-bit sequence, 10-bit shard), below 2**63 until
  2094. Ids of one daemon differ by ``ID_STEP``. A burst of more than 4,096 ids in a millisecond
  uses ids of the next milliseconds. Ids ascend even if the clock is set back during a restart,
  because the source starts above the stored mark.
* ``Outcomes``: how recently finished tasks ended. When the young generation is full, it replaces
  the old one. So the last ``bound / 2`` to ``bound`` outcomes are kept, at O(1) per task.
* ``Lifetimes``: when waiting tasks expire. A task with a ttl has one handle for each group in which
  it is ready, loading or waiting, on a separate wheel or in ``fired``; a task in flight has no
  handle. A handle takes 16 to 24 bytes, and a delivery in time takes two O(1) steps.
* ``Batch``: the effects, and what must be done when they are durable or refused.

This module reads no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tickwheel.engine.events import DELETED, UNRECORDED, Ledger
from tickwheel.engine.keys import KeyIndex
from tickwheel.engine.ordering import NEVER_MS, KeysToAdvance, Ordering, Orderings, mark_of
from tickwheel.engine.sessions import ReplySink, Session, Sessions, StoredAnswer
from tickwheel.engine.timetables import LoadedSchedule, ScheduleHeap, Undo
from tickwheel.engine.topics import (
    Deferred,
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
from tickwheel.model.kinds import ClaimRow, Effects, R, TargetRow
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
    id_time_ms,
    task_bytes,
)
from tickwheel.wheel.timing import TimingWheel, Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tickwheel.engine.events import Recorder
    from tickwheel.model.kinds import BulkRow, Kind


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of the engine; times are in ms."""

    slots: int = 3600
    tick_ms: int = 1000
    shard: int = 0
    shards: int = 1
    """Number of shards, among which the rates of groups and topics are divided."""
    moved_id: int = 0
    """Tasks with ids up to this can be in any shard, regardless of the shard in their ids."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    policies: Mapping[str, RetryPolicy] = field(default_factory=dict)
    """Named retry policies in addition to ``BUILT_IN`` and the default policy."""
    resident_horizon_ms: int = 60_000
    """The row of a new task that is due within this time stays in memory."""
    resident_bytes_max: int = 256 * 1024 * 1024
    loading_max: int = 20_000
    """Maximum number of rows that are being read for firing."""
    lease_checkpoint_ms: int = 100
    """A delivery that is settled within this time is never written to the PrepareQueue."""
    reconnect_grace_ms: int = 5_000
    endings_max: int = 100_000
    sessions_max: int = 100_000
    session_outcomes_max: int = 1_000_000
    outcomes_per_session_max: int = 131_072
    """Maximum remembered answers per session. If the total exceeds ``session_outcomes_max``, the
    longest unused sessions are forgotten first."""
    session_idle_ms_max: int = 86_400_000
    session_evict_idle_ms_min: int = 60_000
    topics_max: int = 100_000
    groups_per_topic_max: int = 1_000
    groups_max: int = 200_000
    tasks_max: int = 100_000_000
    """Maximum unfinished tasks."""
    scheduled_max: int = 100_000_000
    """Maximum scheduled tasks."""
    backlog_max: int = 20_000_000
    """Maximum due tasks of a topic that has no group yet."""
    delivery_frame_tasks_max: int = 512
    delivery_frame_bytes_max: int = 1024 * 1024
    dispatch_bytes_max: int = 16 * 1024 * 1024
    """Bytes after which a call of ``dispatch`` stops. It can exceed this by one frame."""
    handed_bytes_max: int = 16 * 1024 * 1024
    """Bytes of at-most-once deliveries waiting for their commit that stop further frames."""
    acks_ahead_max: int = 4_096
    """Maximum number of settled deliveries of a subscription whose credit returns before the
    settlement is durable; 0 for an at-most-once subscription."""
    deaths_max: int = 3
    """Number of deaths of consumers after which a task is a dead letter, or its key is held."""
    death_retry_base_ms: int = 1_000
    """Delay after the first death of a consumer. It doubles with each further death."""
    death_retry_cap_ms: int = 60_000
    """Maximum delay after a death of a consumer."""
    snoozes_max: int = 1_000
    """Maximum number of times that a group can postpone a task."""
    trace_length_max: int = TRACE_LENGTH_MAX
    """Maximum characters of a stored trace; 0 stores no traces."""
    in_flight_max: int = 2_000_000
    """Maximum unfinished deliveries of all groups."""
    lapsing_max: int = 10_000
    """Maximum number of tasks with a passed time to live that are being looked up."""
    broadcast_tasks_max: int = 10_000
    broadcast_bytes_max: int = 32 * 1024 * 1024
    """Maximum bytes that wait for a broadcast subscription with a slow connection."""
    broadcasts_bytes_max: int = 256 * 1024 * 1024
    """Maximum bytes that wait for all broadcast subscriptions."""
    subscribers_max: int = 100_000
    """Maximum open subscriptions and pulls."""
    transactions_max: int = 10_000
    """Maximum undecided transactions."""
    transactions_bytes_max: int = 64 * 1024 * 1024
    """Maximum bytes of the half tasks of all transactions, which stay in memory."""
    transaction_tasks_max: int = 10_000
    transaction_bytes_max: int = 4 * 1024 * 1024
    """Maximum bytes of the half tasks of a transaction."""
    transaction_check_ms: int = 60_000
    """Time from the last activity of a transaction to its first check."""
    transaction_check_every_ms: int = 60_000
    """Time between two checks of a transaction."""
    transaction_checks_max: int = 15
    """Number of checks after which a transaction is parked."""
    transactions_remembered_max: int = 100_000
    """Maximum decided transactions that are remembered for repeated commits and rollbacks."""
    transactions_remembered_ms: int = 3_600_000
    """How long a decided transaction is remembered."""
    bulk_max: int = 100
    """Maximum running bulk operations."""
    bulk_remembered_max: int = 1_000
    """Maximum ended bulk operations that are remembered."""
    bulk_remembered_ms: int = 604_800_000
    """How long an ended bulk operation is remembered."""

    @property
    def deaths_alone(self) -> int:
        """Number of deaths from which a task is delivered alone: one below ``deaths_max``, but at
        least 1, because no consumer has died before the first delivery."""
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
    """Number of deliveries whose consumer died."""
    retried: int = 0
    expired: int = 0
    filtered: int = 0
    """Tasks that a group's filter excluded, counted once per group."""
    cancelled: int = 0
    leases_over: int = 0
    dead: int = 0
    dead_expired: int = 0
    """Dead letters that were deleted at the end of their retention."""
    rows_missing: int = 0
    """Number of unfinished tasks whose rows the store did not contain. It must stay 0."""
    schedules_fired: int = 0
    schedules_missed: int = 0
    schedules_overlapped: int = 0
    transactions_committed: int = 0
    transactions_rolled_back: int = 0
    transactions_checked: int = 0
    """Number of checks about transactions that reached a producer."""
    transactions_parked: int = 0
    windows: int = 0
    """Due times chosen in the due windows of tasks."""
    dropped_once: int = 0
    """At-most-once deliveries whose consumer had disconnected before they could be sent."""
    early: int = 0
    """Deliveries found not to be due by the final check before they are sent. It must stay 0."""


NOTE_GAP_MS = 1_000
"""Minimum time between two notes about ids that are ahead of the clock, and how far ahead."""
NOTES_MAX = 100_000
"""Maximum number of notes about ids, enough for more than a day."""


class IdSource:
    """Assigns ascending ids of one shard. If the clock is set back, the times in new ids stay ahead
    of it; ``note_time`` notes the true ones."""

    __slots__ = ("_noted_ids", "_noted_ms", "last", "shard")

    def __init__(self, shard: int, mark: int) -> None:
        if not 0 <= shard < ID_STEP:
            raise ValueError(f"shard {shard} is not in 0..{ID_STEP - 1}")
        self.shard = shard
        candidate = mark // ID_STEP * ID_STEP + shard
        self.last = candidate if candidate >= mark else candidate + ID_STEP
        """The newest assigned id, or the mark rounded up to this shard."""
        self._noted_ids, self._noted_ms = array("q"), array("q")
        """Ids, ascending, and times at which they and all lower ids had been assigned."""

    def take(self, count: int, now_ms: int) -> int:
        """Assign ``count`` ids, in steps of ``ID_STEP``. Return the first."""
        first = max(self.last + ID_STEP, id_floor(now_ms, self.shard))
        self.last = first + (count - 1) * ID_STEP
        return first

    def note_time(self, now_ms: int) -> None:
        """Note the time if the newest id is ahead of it. Call this in each tick."""
        if id_time_ms(self.last) < now_ms + NOTE_GAP_MS:
            return
        ids, times_ms = self._noted_ids, self._noted_ms
        while times_ms and times_ms[-1] > now_ms:  # the clock was set back again
            ids.pop()
            times_ms.pop()
        if ids and (ids[-1] == self.last or now_ms - times_ms[-1] < NOTE_GAP_MS):
            return
        ids.append(self.last)
        times_ms.append(now_ms)
        if len(ids) > NOTES_MAX:
            del ids[: NOTES_MAX // 2], times_ms[: NOTES_MAX // 2]

    def assigned_ms(self, task_id: int, now_ms: int) -> int:
        """Return when an id was assigned. If the clock was set back since or was then behind the
        id, this is the time of the next note, within ``NOTE_GAP_MS``."""
        at = bisect_left(self._noted_ids, task_id)
        return min(id_time_ms(task_id), now_ms, *self._noted_ms[at : at + 1])

    def first_since(self, since_ms: int) -> int:
        """Return the lowest id that ``assigned_ms`` can have at ``since_ms`` or later."""
        at = bisect_left(self._noted_ms, since_ms)
        first = id_floor(since_ms, 0)
        return max(first, self._noted_ids[at - 1] + 1) if at else first


class Outcomes:
    """Id → outcome of recently finished tasks."""

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
        outcome = self._young.get(task_id)
        return outcome if outcome is not None else self._old.get(task_id)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class Lifetimes:
    """The ends of tasks' times to live. ``Firing.expire_lapsed`` expires the tasks."""

    def __init__(self, now_ms: int, slots: int, tick_ms: int) -> None:
        self.wheel = TimingWheel(now_ms, slots=slots, tick_ms=tick_ms)
        self.fired: dict[int, int] = {}
        """Id → number of handles of tasks with a passed time to live that are being looked up."""

    def begin(self, row: TaskRow) -> None:
        """Add a handle, because the task is ready or waiting in one more group."""
        end_ms = ttl_end_ms(row.due_ms, row.options)
        if end_ms is not None:
            self.add(row.id, end_ms)

    def add(self, task_id: int, end_ms: int) -> None:
        self.wheel.add(task_id, end_ms)

    def end(self, row: TaskRow) -> None:
        """Remove a handle, because the task is ready or waiting in one group less."""
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
        """Return (up to ``limit`` tasks to look up, whether the time to live of more tasks has
        passed). At most ``looked_up_max`` tasks are looked up at the same time."""
        room = looked_up_max - len(self.fired)
        if not len(self.wheel) or room <= 0:
            return [], False
        ids, _, more = self.wheel.advance(now_ms, min(limit, room))
        fresh = [task_id for task_id in dict.fromkeys(ids) if task_id not in self.fired]
        for task_id in ids:
            self.fired[task_id] = self.fired.get(task_id, 0) + 1
        return fresh, more

    def next_ms(self, now_ms: int) -> int | None:
        """Return when to call ``fire`` next (wall ms), or None if there are no handles."""
        return self.wheel.next_due_ms(now_ms) if len(self.wheel) else None

    def __len__(self) -> int:
        return len(self.wheel) + sum(self.fired.values())


Staged = tuple[ReplySink | None, Session | None, StoredAnswer]
"""(sink of the answer, session, answer) of a staged enqueue request."""


Reply = tuple[ReplySink, Sized]
"""(sink, encoded answer) that waits for a batch."""


@dataclass(slots=True)
class Batch:
    """The open batch, which collects changes, or a sealed batch, which the store is writing."""

    effects: Effects = field(default_factory=Effects)
    staged: list[Staged] = field(default_factory=list)
    """Requests with tasks in ``effects.enqueued``, and repeats of these requests."""
    staged_bytes: int = 0
    traces_length: int = 0
    """Characters of the traces of failures in the batch."""
    updated_bytes: int = 0
    """Upper bound on the bytes of ``effects.updated`` and ``effects.moved``."""
    topics: Counter[str] = field(default_factory=Counter)
    """Topic → number of its tasks in ``effects.enqueued``."""
    credits: dict[Subscriber, int] = field(default_factory=dict)
    """Subscriber → number of its deliveries whose end becomes durable with this batch."""
    handed: list[Dispatch] = field(default_factory=list)
    """At-most-once deliveries, which are sent before the replies once they are durable."""
    handed_bytes: int = 0
    placed: list[int] = field(default_factory=list)
    """The ticks that were chosen for tasks with a due window."""
    chosen: dict[int, list[int]] = field(default_factory=dict)
    """First id of a request with due windows → due times of all its tasks."""
    runs: dict[LoadedSchedule, Undo] = field(default_factory=dict)
    """Schedule with tasks in ``effects.enqueued`` → how to undo its runs."""
    transactions: dict[str, Transaction | None] = field(default_factory=dict)
    """Transaction that this batch changes → its previous state, or None if the batch created it."""
    bulks_before: dict[str, BulkRow] = field(default_factory=dict)
    """Bulk operation that has created tasks in ``effects.enqueued`` → its previous state."""
    accepted: set[int] = field(default_factory=set)
    """Ids in ``effects.enqueued`` that are kept even if the batch is refused, because their request
    has replaced a task, and a replacement is never undone."""
    replaced: dict[int, TaskRow] = field(default_factory=dict)
    """Scheduled tasks with a new body, which are off the wheel until the batch is durable."""
    merged: Counter[tuple[str, Merging]] = field(default_factory=Counter)
    """(topic, outcome) → number of tasks of ``staged`` that were not stored."""
    has_marks: bool = False
    """Whether the batch contains answers that are remembered for resends."""
    ended: list[KeysToAdvance] = field(default_factory=list)
    """Order keys whose next task can become holder when the batch is durable."""
    replies: list[Reply] = field(default_factory=list)
    """Answers that wait for this batch, in order."""
    notes: object = None
    """The recorder's notes of the sealed batch."""

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
    """Remove ended ids from all other maps, because dropping a task drops all of its rows."""
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
    """Merge the rest of a refused batch into the following batch. ``newer`` overrides ``older`` for
    every key, because states are absolute."""
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
"""Size of a resident row in addition to its body and options."""
MOVE_BYTES = 150
"""Size of a new due time in a batch."""
MISSING_MAX = 100_000
"""Maximum number of missing rows that do not count against the limits on reading."""


class Core:
    """The state of a shard's engine."""

    # Current counts.
    tasks = 0
    """Number of durable, unfinished tasks."""
    scheduled = 0
    in_flight = 0
    dead = 0
    resident_bytes = 0
    """Bytes of ``resident_rows``."""
    handed_bytes = 0
    """Bytes of at-most-once deliveries that wait for their commit."""
    group_count = 0
    steps_left = STEPS_PER_TICK
    """Number of steps left in this tick of the shard. A due task that several groups or broadcasts
    get takes a step for each of them and the steps of their filters."""
    bulk_running = 0
    filters_length = 0
    """Characters of the filters of all groups."""
    subscribers = 0
    """Number of subscribers of groups and broadcasts, including pulls."""

    sealed: Batch | None = None
    landing: Batch | None = None
    """A durable batch whose tasks are not on the wheel yet."""
    expiry_mono_ms: int | None = None
    """No lease of any group ends before this."""
    acted_ms = 0
    """The latest due time of the tasks that were recovered with a history. These tasks are not on
    the wheel, even if the clock went back during the restart."""

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
        self.landed_id = self.wheel_id = self.earlier_id = id_mark
        """Ids up to ``landed_id`` are durable or refused; up to ``wheel_id`` they were on the
        wheel; up to ``earlier_id`` they were assigned before this start."""
        self.wheel = TimingWheel(now_ms, slots=config.slots, tick_ms=config.tick_ms)
        self.open, self.windows = Batch(), Windows(self.wheel, self._placed)
        self.sessions = Sessions(config.sessions_max, config.session_idle_ms_max)
        self.outcomes = Outcomes(config.endings_max)
        self.keys = KeyIndex(KeyHash(key_seed), config.endings_max)
        # ``targets``: (topic, group) → the target that gets its tasks instead of subscribers.
        # ``claims``: (kind of the named object, name) → the shard that uses the name.
        self.topics, self.targets = dict[str, Topic](), dict[tuple[str, str], TargetRow]()
        self.claims, self.maybe_idle = dict[tuple[str, str], ClaimRow](), dict[str, None]()
        """All idle topics, and some that might be idle; see ``Grouping.forget_idle``."""
        self.resident_rows: dict[int, TaskRow] = {}
        """Id → row of tasks that are ready or will soon be due, if it is in memory."""
        self.owed = dict[int, PendingGroups]()
        self.numbered: dict[str, dict[Group, None]] = {}
        """Topic → its groups that might have ``numbers``."""
        self.retrying: dict[int, list[Group]] = {}
        """Id → groups in which the task waits for a retry."""
        self.firing: dict[int, int] = {}
        """Id → due_ms of tasks whose handles fired before their rows were in memory."""
        # Scheduled tasks that are off the wheel until their new bodies are durable; topics with a
        # rule for tasks whose key is pending; topics that are being deleted.
        self.replaced, self.ruled_topics = dict[int, TaskRow](), set[str]()
        self.closing_topics: set[str] = set()
        # Deliveries that no batch contains yet, the oldest first; and deliveries of tasks that were
        # just replaced, which the open batch must contain.
        self.unsaved, self.replaced_leases = deque[Lease](), list[Lease]()
        self.lease_offsets_ms = 2**62, -(2**62)
        """The lowest and the highest difference between wall and steady time by which the ends of
        checkpointed leases were written."""
        self.dirty_sessions, self.runnable = dict[bytes, None](), dict[Group, None]()
        """Sessions whose row the next batch writes; groups that might be able to deliver."""
        self.missing: dict[int, None] = {}
        """Unfinished tasks whose rows the store does not have. They keep their state, and the shard
        continues to look for the rows."""
        self.rows_to_read: list[int] = []
        """Ids whose rows the shard must read and pass to ``Firing.process_rows``."""
        self.ready_rows_to_read: dict[Group, list[int]] = {}
        """Ids of ready tasks whose rows the shard must read and pass to
        ``RowReading.process_rows``."""
        self.leased: dict[Group, None] = {}
        """Groups that might have deliveries in flight."""
        self.full_topics: dict[str, None] = {}
        """Topics without a group, or whose last group is being deleted, that have ``backlog_max``
        due tasks."""
        self.refiring: dict[Topic, Deferred] = {}
        """The deferred tasks of topics, some of which are to fire again."""
        self.lifetimes = Lifetimes(now_ms, config.slots, config.tick_ms)
        self.lapsed_rows_to_read: list[int] = []
        """Ids of tasks whose time to live has passed. Their records must be passed to
        ``Firing.expire_lapsed``."""
        self.schedule_heap = ScheduleHeap()
        self.orderings = Orderings(self.wake, self._call_when_durable)
        self.transaction_registry, self.tallies = TransactionRegistry(tallies := Tallies()), tallies
        # ``kept_connections``: groups for whose tasks a connection is kept free, see ``Isolation``.
        self.kept_connections, self.throttled = dict[Group, Keep](), dict[Group, int]()
        """Group delayed by a rate → when the next token is available (steady clock)."""
        self.cut: list[tuple[Subscriber, str, str]] = []
        """Subscriptions ended by the engine, each with an error code and a message."""
        self.faults: list[tuple[str, Exception, str | None]] = []
        """Processing errors of single tasks (see ``fault``), which the shard reports."""
        self.policies = {**BUILT_IN, **config.policies, DEFAULT: config.retry}
        self.totals, self.versions = Totals(), Versions(config.shard, config.shards)
        # ``held_back``: groups that wait only for at-most-once deliveries to be committed.
        self.ledger, self.held_back = Ledger(self.throttled, self.targets), dict[Group, None]()

    @property
    def batches(self) -> list[Batch]:
        """Batches whose tasks are not on the wheel yet, the newest first."""
        batches = (self.open, self.sealed, self.landing)
        return [batch for batch in batches if batch is not None]

    def _placed(self) -> Iterator[int]:
        """Yield the ticks chosen for tasks with a due window that are not on the wheel yet."""
        for batch in reversed(self.batches):
            yield from batch.placed

    @property
    def staged(self) -> int:
        """Number of tasks that are not on the wheel yet."""
        return sum(len(batch.effects.enqueued) for batch in self.batches)

    def staged_on(self, topic: str) -> int:
        """Return how many tasks of a topic are not on the wheel yet."""
        return sum(batch.topics[topic] for batch in self.batches)

    @property
    def room(self) -> int:
        """The number of tasks that can still be accepted. Half tasks take up room."""
        config = self.config
        left = min(config.tasks_max - self.tasks, config.scheduled_max - self.scheduled)
        return left - self.staged - self.transaction_registry.tasks

    # --- records -------------------------------------------------------------------------

    def put_record(self, kind: Kind[R], row: R, before: R | None = None) -> None:
        """Store a record of a RECORDED kind with the open batch, and report it to the history;
        ``Recorder.record_put`` explains ``before``."""
        self.open.effects.put(kind, row)
        self.recorder.record_put(kind, row, before)

    def drop_record(self, kind: Kind[R], row: R) -> None:
        """Remove a record of a RECORDED kind with the open batch, and report it."""
        self.open.effects.drop(kind, kind.key(row))
        self.recorder.record_dropped(kind, row)

    # --- resident rows -------------------------------------------------------------------

    def keep(self, row: TaskRow) -> None:
        """Keep a row resident. Callers must check ``has_room`` first."""
        former = self.resident_rows.get(row.id)
        if former is not None:
            self.resident_bytes -= task_bytes(former) + ROW_OVERHEAD_BYTES
        self.resident_rows[row.id] = row
        self.resident_bytes += task_bytes(row) + ROW_OVERHEAD_BYTES

    def drop(self, task_id: int) -> None:
        """Release the row of a task if it is resident."""
        row = self.resident_rows.pop(task_id, None)
        if row is not None:
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    @property
    def has_room(self) -> bool:
        """Whether another row can become resident."""
        return self.resident_bytes < self.config.resident_bytes_max

    @property
    def reads_ahead(self) -> bool:
        """Whether there is enough room to read rows ahead of the consumers' credit."""
        return self.resident_bytes < self.config.resident_bytes_max * 3 // 4

    def make_room(self) -> None:
        """Release resident rows, the newest first, until the others are within the budget. Released
        rows are read again when they are needed."""
        resident = self.resident_rows
        while resident and self.resident_bytes > self.config.resident_bytes_max:
            _, row = resident.popitem()
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    # --- rows that must exist ------------------------------------------------------------

    def was_assigned(self, task_id: int) -> bool:
        """Return whether a task of this shard might have had this id."""
        config = self.config
        is_ours = task_id % ID_STEP == config.shard or task_id <= config.moved_id
        return 0 < task_id <= self.landed_id and is_ours

    def unfinished_among(self, ids: set[int]) -> set[int]:
        """Return those of ``ids`` that are found among unfinished tasks, and so have certainly not
        ended. The wheel and the ready queues are not searched, because they are too large."""
        lifetimes = self.lifetimes
        unfinished: set[int] = set()
        for holder in (
            self.firing,
            self.replaced,
            self.resident_rows,
            self.retrying,
            self.owed,
            lifetimes.fired,
        ):
            unfinished |= ids & holder.keys()
        for topic in self.topics.values():
            for group in topic.groups.values():
                if group.flight or group.loading:
                    unfinished |= ids & group.flight.keys()
                    unfinished |= ids & group.loading.keys()
        return unfinished

    @property
    def uncounted_missing(self) -> int:
        """Number of missing rows that do not count against the limits of reading."""
        return min(len(self.missing), MISSING_MAX)

    # --- names ---------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return the topic, creating it if it does not exist."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = Topic(name)
            self.maybe_idle[name] = None
        return topic

    def lost_task(self, topic: Topic) -> None:
        """Record that a topic might be idle, because a task that no group held has ended."""
        if not topic.groups:
            self.maybe_idle[topic.name] = None

    def use_room(self, topic: Topic) -> None:
        """Record that a topic without a live group has one more due task."""
        if topic.waiting_for_group >= self.config.backlog_max:
            self.full_topics[topic.name] = None

    def regain_room(self, topic: Topic) -> None:
        """Record that due tasks might have left a topic."""
        if topic.name in self.full_topics and topic.waiting_for_group < self.config.backlog_max:
            del self.full_topics[topic.name]

    def find_group(self, topic_name: str, group: str) -> Group | None:
        topic = self.topics.get(topic_name)
        return topic.groups.get(group or DEFAULT_GROUP) if topic is not None else None

    def policy(self, own: PolicyRef | None, group: Group) -> RetryPolicy:
        """Return the first policy that is set: the task's own, its group's, its topic's or the
        daemon's. A name that the settings no longer define means the daemon's policy."""
        policy = own or group.settings.retry or group.topic.settings.retry
        if policy is None:
            return self.config.retry
        if isinstance(policy, RetryPolicy):
            return policy
        return self.policies.get(policy, self.config.retry)

    def fault(
        self, lease: Lease, reason: str, error: Exception, now_ms: int, trace: str | None = None
    ) -> Failure:
        """Return a failure for an unexpected error in a computation for a single task, which then
        becomes a dead letter, because the error would recur after a restart. The computation must
        not have changed memory, because a half-done change must stop the daemon."""
        self.faults.append((f"task {lease.id} of group {lease.group.name}", error, trace))
        return self.failure(lease, f"internal: {error!r:.150}; after: {reason}", now_ms)

    def failure(self, lease: Lease, reason: str, now_ms: int) -> Failure:
        """Return the failure of an attempt, with reason and trace cut to the stored lengths."""
        summary, _, trace = reason.partition("\n")
        summary = summary[:REASON_LENGTH_MAX]
        if trace:
            room = TRACES_LENGTH_MAX - self.open.traces_length
            length = min(self.config.trace_length_max, room)
            if length > 0:
                self.open.traces_length += min(length, len(trace))
                summary += f"\n{trace[-length:]}"
        return Failure(lease.attempt, now_ms, summary, lease.subscriber.label)

    # --- counts --------------------------------------------------------------------------

    def tally(self, has: Callable[[str], bool]) -> Tally:
        """Count the unfinished tasks of all topics for which ``has`` is true, and keep the count up
        to date. The first count takes O(topics)."""
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
        """End a task. Sealing removes its other rows from the batch. The code repeats ``end_plain``
        for a single task, which makes an ack of a task of two groups 5% faster."""
        self.tasks -= 1
        self.count_unfinished(topic, -1)
        if key is not None:
            self.keys.ended(topic, key, task_id)
        self.open.effects.ended[task_id] = outcome
        self.outcomes.add(task_id, outcome)
        self.drop(task_id)
        self.owed.pop(task_id, None)
        self.schedule_heap.ended((task_id,))
        if topic in self.numbered:
            self._forget_numbers(topic, (task_id,))

    def end_unowed(self, row: TaskRow) -> None:
        """End a task that was owed only to groups that are deleted or being deleted."""
        self.end(row.id, Outcome.DELETED, row.topic, key_of(row))
        self.recorder.ended(row.topic, None, DELETED, row.id, last=True)

    def end_plain(
        self, ids: Collection[int], outcome: Outcome, topic: str, keys: Mapping[int, str]
    ) -> None:
        """End tasks of ``topic`` that have no other state in memory than ``keys`` (id → key)."""
        self.tasks -= len(ids)
        self.count_unfinished(topic, -len(ids))
        if keys:
            self.keys.ended_many(topic, keys)
        ended, outcomes = self.open.effects.ended, self.outcomes
        for task_id in ids:
            ended[task_id] = outcome
            outcomes.add(task_id, outcome)
        self.schedule_heap.ended(ids)
        if topic in self.numbered:
            self._forget_numbers(topic, ids)

    def is_scheduled(self, row: TaskRow) -> bool:
        """Return whether a task is not yet due, or is due but has not reached its groups."""
        if row.id in self.retrying:
            # After the clock went back, such a task can be waiting for its due time again.
            return False
        return (
            row.due_ms > max(self.wheel.position_ms, self.acted_ms)
            or row.id in self.firing
            or row.id in self.replaced
            or row.id in (self.topic(row.topic).deferred or ())
            or self.wheel.holds(row.id, row.due_ms)
        )

    def unschedule(self, row: TaskRow) -> None:
        """Take a scheduled task off the wheel."""
        topic = self.topic(row.topic)
        is_elsewhere = (
            (topic.deferred is not None and topic.deferred.remove(row.id))
            or self.firing.pop(row.id, None) is not None
            or self.replaced.pop(row.id, None) is not None
        )
        if not is_elsewhere:
            self.wheel.cancel(row.id, row.due_ms)
        topic.scheduled -= 1
        self.scheduled -= 1
        self.drop(row.id)
        self.regain_room(topic)
        if has_order(row):
            self.hold_order(row)

    def hold_order(self, row: TaskRow) -> None:
        """Delay later tasks of a scheduled task's order key until its removal is durable, because a
        crash would undo the removal."""
        for group in self.topic(row.topic).holders:
            ordering = self.ordering_for(group, row)
            if ordering is not None:
                ordering.keys.hold_until_durable(mark_of(row))

    def schedule(self, row: TaskRow, now_ms: int) -> None:
        """Schedule a task that is durable, or recorded in the open batch."""
        self.topic(row.topic).scheduled += 1
        self.scheduled += 1
        self.put_on_wheel(row, now_ms)

    def hold(self, row: TaskRow) -> None:
        """Schedule a task with a new body as soon as the open batch is durable."""
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
        """Write the row into the open batch. ``is_moved``: only the due time has changed."""
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
        """Record that a lease of ``group`` ends at ``at_mono_ms``."""
        self.leased[group] = None
        if group.expiry_mono_ms is None or group.expiry_mono_ms > at_mono_ms:
            group.expiry_mono_ms = at_mono_ms
        if self.expiry_mono_ms is None or self.expiry_mono_ms > at_mono_ms:
            self.expiry_mono_ms = at_mono_ms

    def _call_when_durable(self, ended: KeysToAdvance) -> None:
        """Advance these order keys when the open batch is durable."""
        self.open.ended.append(ended)

    # --- steps of several parts ----------------------------------------------------------

    def add_due(self, group: Group, row: TaskRow, now_ms: int) -> None:
        """Give a due task to ``group``. It becomes ready when it is its key's holder."""
        ordering = self.ordering_for(group, row)
        if ordering is None:
            group.ready.push(row.id, priority_of(row), now_ms)
        else:
            ordering.arrive(row, now_ms)

    def add_due_all(self, group: Group, rows: Sequence[TaskRow], now_ms: int) -> None:
        """Call ``add_due`` for each of these tasks. ``rows`` may be empty."""
        if not rows:
            return
        if not group.is_ordered:
            all_options = [row[4] for row in rows if row[4] is not None]
            if not any(
                options.priority or options.order_key is not None for options in all_options
            ):
                group.ready.push_all([row[0] for row in rows], now_ms)
                return
            if group.is_closed or not any(map(has_order, rows)):
                for row in rows:
                    group.ready.push(row.id, priority_of(row), now_ms)
                return
        self.orderings.begin(group).arrive_all(rows, now_ms)

    def ordering_for(self, group: Group, row: TaskRow) -> Ordering | None:
        """Return the group's ordering if it applies to the task, otherwise None."""
        if not group.is_ordered and (not has_order(row) or group.is_closed):
            return None
        return self.orderings.begin(group)

    def wait(self, group: Group, task_id: int, at_ms: int) -> None:
        """Schedule the task's next attempt in ``group`` at ``at_ms``."""
        group.waiting[task_id] = at_ms
        groups = self.retrying.setdefault(task_id, [])
        if group not in groups:
            groups.append(group)
        self.wheel.add(task_id, at_ms)
        attempts = group.delivery_attempts.get(task_id)
        if attempts is not None:
            self.note_attempts(group, task_id, ProgressState.WAITING, at_ms)

    def leave(self, group: Group, row: TaskRow, *, stays_holder: bool = False) -> None:
        """Remove a ready or waiting task from the queues of ``group``. With ``stays_holder`` it
        leaves only to wait and remains the holder of its order key."""
        task_id = row.id
        group.delivery_attempts.pop(task_id, None)
        self.lifetimes.end(row)
        has_left = group.is_ordered and self.orderings.by_group[group].leave(
            row, stays_holder=stays_holder
        )
        at_ms = None if has_left else group.waiting.pop(task_id, None)
        if at_ms is not None:
            group.withheld.pop(task_id, None)
            if at_ms != NEVER_MS:
                self.wheel.cancel(task_id, at_ms)
            self.stop_waiting(group, task_id)
        elif not has_left:
            group.withdraw(task_id, priority_of(row))
            if task_id in group.isolated:
                self.end_isolation(group, task_id)
        if group.topic.default_backlog is group:
            self.regain_room(group.topic)

    @property
    def waiting_for_attempts(self) -> int:
        """Number of tasks that wait for their next attempt, without those of held order keys."""
        return sum(
            any(group.waiting[task_id] != NEVER_MS for group in groups)
            for task_id, groups in self.retrying.items()
        )

    def hold_key(self, group: Group, task_id: int, attempts: DeliveryAttempts, now_ms: int) -> None:
        """Keep the task waiting in ``group`` until an operator resolves its held key."""
        group.delivery_attempts[task_id] = attempts
        group.waiting[task_id] = NEVER_MS
        self.retrying.setdefault(task_id, []).append(group)
        self.note_attempts(group, task_id, ProgressState.HELD, now_ms)

    def stop_waiting(self, group: Group, task_id: int) -> None:
        """Record that ``group`` no longer waits for the task's next attempt."""
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

    def note_lease_offset(self, offset_ms: int) -> None:
        """Include the offset in ``lease_offsets_ms``."""
        low_ms, high_ms = self.lease_offsets_ms
        self.lease_offsets_ms = min(low_ms, offset_ms), max(high_ms, offset_ms)

    def note_done(
        self,
        task_id: int,
        group: Group,
        attempt: int,
        epoch: int,
        state: ProgressState = ProgressState.DONE,
    ) -> None:
        """Record that the group has finished a task that other groups have not finished. ``epoch``
        is the one of the acked delivery, or 0 if there was no ack."""
        self.open.effects.progress[task_id, group.name] = ProgressRow(
            task_id, group.name, state, attempt, 0, epoch
        )

    # --- numbers of deliveries -----------------------------------------------------------

    def forget_deliveries(self, group: Group, task_id: int, attempt: int) -> None:
        """Forget earlier deliveries of the task, except the newest number ``attempt``, which must
        not be reused. It is not stored, because a restart has a new epoch."""
        if attempt:
            group.numbers[task_id] = attempt
            self.numbered.setdefault(group.topic.name, {})[group] = None

    def take_number(self, group: Group, task_id: int) -> int:
        """Remove and return the newest number of the task's forgotten deliveries, or return 0."""
        return group.numbers.pop(task_id, 0) if group.numbers else 0

    def _forget_numbers(self, topic: str, ended: Collection[int]) -> None:
        """Forget the delivery numbers of tasks of a topic that have ended."""
        for group in list(self.numbered[topic]):
            for task_id in group.numbers.keys() & ended:
                del group.numbers[task_id]
            if not group.numbers:
                self.forget_numbered(group)

    def forget_numbered(self, group: Group) -> None:
        """Record that the group has no ``numbers`` or is gone."""
        groups = self.numbered.get(group.topic.name, {})
        groups.pop(group, None)
        if not groups:
            self.numbered.pop(group.topic.name, None)

    def next_delivery(self, group: Group, task_id: int) -> tuple[int, Past]:
        """Remove from the group and return (attempt, past) for the next delivery."""
        attempts = group.delivery_attempts.pop(task_id, None) if group.delivery_attempts else None
        if attempts is None:
            return self.take_number(group, task_id) + 1, NO_PAST
        return attempts.attempt + 1, attempts.past

    # --- credits -------------------------------------------------------------------------

    def unconfirmed(self, subscriber: Subscriber, count: int) -> None:
        """Count ended deliveries whose end becomes durable with the open batch."""
        credits = self.open.credits
        credits[subscriber] = credits.get(subscriber, 0) + count
        subscriber.unconfirmed += count
        if subscriber.acks_ahead_max:
            self.reconsider(subscriber)

    def give_back(self, subscriber: Subscriber, count: int) -> None:
        """Return credit at once, because the consumer did not request the end."""
        subscriber.outstanding -= count
        self.reconsider(subscriber)

    def settled(self, presence: Presence, count: int) -> None:
        """Count ended deliveries on one connection."""
        presence.unsettled -= count
        group = presence.kept_for
        if group is None or presence.unsettled:
            return
        if not self.is_kept_free(presence):
            presence.kept_for = None  # the isolated delivery has ended
            presence.was_alone = True
        for subscriber in presence.subscribers:
            self.reconsider(subscriber)

    def is_kept_free(self, presence: Presence) -> bool:
        """Return whether the connection is kept free for an isolated task."""
        keep = None if presence.kept_for is None else self.kept_connections.get(presence.kept_for)
        return keep is not None and keep.presence is presence

    def end_isolation(self, group: Group, task_id: int) -> None:
        """Record that the task no longer waits for isolation."""
        del group.isolated[task_id]
        if not group.isolated:
            self.stop_keeping_free(group)

    def stop_keeping_free(self, group: Group) -> None:
        """Stop keeping a connection free for the group's isolated tasks."""
        keep = self.kept_connections.pop(group, None)
        if keep is not None and keep.presence is not None:
            keep.presence.kept_for = None
            for subscriber in keep.presence.subscribers:
                self.reconsider(subscriber)

    def reconsider(self, subscriber: Subscriber) -> None:
        """Consider a subscriber for deliveries again, because it might have credit now."""
        group = subscriber.group
        if subscriber in group.subscribers:
            group.able[subscriber] = None
            self.wake(group)

    def wake(self, group: Group) -> None:
        if group.able and group.ready_count > group.awaiting_turn and group not in self.throttled:
            self.runnable[group] = None
