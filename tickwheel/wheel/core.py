"""The state that the engine's parts share, and the few steps they have in common.

One object owns all of it, so that each part (intake, delivery, control, dead letters,
recovery) is a small class with the verbs of one concern. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque

from tickwheel.wheel.batch import Batch
from tickwheel.wheel.config import EngineConfig, Totals
from tickwheel.wheel.endings import Endings
from tickwheel.wheel.groups import Group, Lease, Owed, Subscriber, Topic
from tickwheel.wheel.ids import IdSource
from tickwheel.wheel.lifetimes import Lifetimes
from tickwheel.wheel.recording import Recorder
from tickwheel.wheel.records import (
    DEFAULT_GROUP,
    REASON_LENGTH_MAX,
    Ending,
    Failure,
    ProgressRow,
    ProgressState,
    TaskRow,
    task_bytes,
)
from tickwheel.wheel.retry import BUILT_IN, DEFAULT, PolicyRef, RetryPolicy
from tickwheel.wheel.sessions import Sessions
from tickwheel.wheel.timing import TimingWheel

__all__ = ["ROW_OVERHEAD_BYTES", "Core", "EngineConfig", "Totals", "failure_of"]

ROW_OVERHEAD_BYTES = 250
"""What a resident row costs beside its body and extras."""
MISSING_MAX = 100_000
"""So many tasks whose rows are missing do not hold up the reading of others."""


class Core:
    """Everything the engine remembers."""

    # Counts of what there is now.
    tasks = 0
    """That are durable and not finished."""
    scheduled = 0
    in_flight = 0
    dead = 0
    resident_bytes = 0
    """Of ``hot``."""
    handed_bytes = 0
    """Of at-most-once deliveries that wait for their commit."""
    group_count = 0
    subscribers = 0
    """Of groups and broadcasts; pulls are among them."""

    sealed: Batch | None = None
    landing: Batch | None = None
    """One that is durable, and whose tasks are not on the wheel yet."""
    expiry_mono_ms: int | None = None
    """No lease of any group ends before this."""
    acted_ms = 0
    """Newest due time of the tasks that were recovered with a history: they are not on the wheel,
    even if the clock went back during the restart."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        id_mark: int,
        now_ms: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.recorder = recorder
        self.epoch = epoch
        self.ids = IdSource(config.shard, id_mark)
        self.landed_id = self.wheel_id = id_mark
        """Every id up to this is durable (or refused), and a moment later on the wheel."""
        self.wheel = TimingWheel(now_ms, slots=config.slots, tick_ms=config.tick_ms)
        self.open = Batch()
        self.sessions = Sessions(config.sessions_max, config.session_idle_ms_max)
        self.endings = Endings(config.endings_max)
        self.topics: dict[str, Topic] = {}
        self.maybe_idle: dict[str, None] = {}
        """Every topic that can be forgotten is among these; see ``Grouping.forget_idle``."""
        self.hot: dict[int, TaskRow] = {}
        """Rows in memory of tasks that are scheduled soon or ready."""
        self.owed: dict[int, Owed] = {}
        self.retrying: dict[int, list[Group]] = {}
        """id → groups in which it waits for a retry."""
        self.firing: dict[int, int] = {}
        """id → due_ms of tasks whose handles fired before their rows were in memory."""
        self.unsaved: deque[Lease] = deque()
        """Deliveries that no batch holds yet, oldest first."""
        self.dirty_sessions: dict[bytes, None] = {}
        """Sessions whose row the next batch writes."""
        self.runnable: dict[Group, None] = {}
        """Groups that may be able to deliver."""
        self.missing: dict[int, None] = {}
        """Tasks that have not ended and whose rows the store does not have: they stay where they
        are, and the shell goes on looking for their rows."""
        self.wants: list[int] = []
        """Ids the shell shall read and hand to ``Delivery.loaded``."""
        self.wants_ready: dict[Group, list[int]] = {}
        """Ids of ready tasks without a row in memory, for ``Delivery.loaded_ready``."""
        self.leased: dict[Group, None] = {}
        """Groups that may have deliveries in flight."""
        self.full_topics: dict[str, None] = {}
        """Topics without a group whose backlog is at its limit."""
        self.lifetimes = Lifetimes(now_ms, config.slots, config.tick_ms)
        self.wants_lapsed: list[int] = []
        """Ids whose ttl is over, for ``Delivery.lapsed``."""
        self.throttled: dict[Group, int] = {}
        """Groups held back by a rate → when there is a token, by the steady clock."""
        self.cut: list[tuple[Subscriber, str, str]] = []
        """Subscriptions that were ended here, with an error code and a sentence, for the shell."""
        self.faults: list[tuple[str, Exception]] = []
        """What could not be processed, see ``fault``, for the shell to tell."""
        self.policies = {**BUILT_IN, **config.policies, DEFAULT: config.retry}
        self.totals = Totals()
        self.held_back: dict[Group, None] = {}
        """Groups that could deliver but for those."""

    @property
    def staged(self) -> int:
        """Tasks that are not on the wheel yet."""
        batches = (self.open, self.sealed, self.landing)
        return sum(len(batch.effects.enqueued) for batch in batches if batch is not None)

    @property
    def room(self) -> int:
        """How many more tasks may be taken."""
        config = self.config
        left = min(config.tasks_max - self.tasks, config.pending_max - self.scheduled)
        return left - self.staged

    # --- resident rows -------------------------------------------------------------------

    def keep(self, row: TaskRow) -> None:
        """Hold a row in memory (whatever the budget says: callers ask ``has_room``)."""
        known = self.hot.get(row.id)
        if known is not None:
            self.resident_bytes -= task_bytes(known) + ROW_OVERHEAD_BYTES
        self.hot[row.id] = row
        self.resident_bytes += task_bytes(row) + ROW_OVERHEAD_BYTES

    def drop(self, task_id: int) -> None:
        row = self.hot.pop(task_id, None)
        if row is not None:
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    @property
    def has_room(self) -> bool:
        return self.resident_bytes < self.config.resident_bytes_max

    @property
    def reads_ahead(self) -> bool:
        """So much room that rows may be read before somebody can take them."""
        return self.resident_bytes < self.config.resident_bytes_max * 3 // 4

    def make_room(self) -> None:
        """Before rows are kept that somebody waits for: others, the newest first, are let go of
        until the budget is kept. They are read again when they are wanted."""
        hot = self.hot
        while hot and self.resident_bytes > self.config.resident_bytes_max:
            _, row = hot.popitem()
            self.resident_bytes -= task_bytes(row) + ROW_OVERHEAD_BYTES

    # --- rows that must be there ---------------------------------------------------------

    def was_assigned(self, task_id: int) -> bool:
        return 0 < task_id <= self.landed_id and task_id % 1024 == self.config.shard

    def held(self, ids: set[int]) -> set[int]:
        """Those of ``ids`` that have certainly not ended: memory has them where only tasks are
        that have not. Others may be far away on the wheel or in a ready queue, which hold too
        many to be searched."""
        lifetimes = self.lifetimes
        found: set[int] = set()
        for holder in (self.firing, self.hot, self.retrying, self.owed, lifetimes.fired):
            found |= ids & holder.keys()
        for topic in self.topics.values():
            for group in topic.groups.values():
                if group.flight or group.loading:
                    found |= ids & group.flight.keys()
                    found |= ids & group.loading.keys()
        return found

    @property
    def missing_apart(self) -> int:
        """How many missing ones do not count against the limits of what is being read."""
        return min(len(self.missing), MISSING_MAX)

    # --- names ---------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(name)
            self.maybe_idle[name] = None
        return found

    def lost_task(self, topic: Topic) -> None:
        """One that no group held has ended: it may have been the topic's last."""
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

    def fault(self, lease: Lease, reason: str, error: Exception, now_ms: int) -> Failure:
        """Something that is worked out for this task alone failed in a way it should not.

        Only for what changes nothing in memory: after half of a change nothing may go on. The
        task goes to the dead letters, because a stop would meet it again after each restart.
        """
        self.faults.append((f"task {lease.id} of group {lease.group.name}", error))
        return failure_of(lease, f"internal: {error!r:.150}; after: {reason}", now_ms)

    # --- the end of a task ---------------------------------------------------------------

    def end(self, task_id: int, ending: Ending) -> None:
        """The task leaves for good. Its other rows leave the batch when it is sealed."""
        self.tasks -= 1
        self.open.effects.ended[task_id] = ending
        self.endings.add(task_id, ending)
        self.drop(task_id)
        self.owed.pop(task_id, None)

    def is_scheduled(self, row: TaskRow) -> bool:
        """Its due time has not come, or has not been acted on."""
        if row.id in self.retrying:
            # It may wait for its own due time again, after the clock went back.
            return False
        return (
            row.due_ms > max(self.wheel.position_ms, self.acted_ms)
            or row.id in self.firing
            or row.id in self.topic(row.topic).deferred
            or self.wheel.holds(row.id, row.due_ms)
        )

    def unschedule(self, row: TaskRow) -> None:
        """Take a scheduled task off the wheel."""
        topic = self.topic(row.topic)
        waits = self.firing.pop(row.id, None) is None and topic.deferred.pop(row.id, None) is None
        if waits:
            self.wheel.orphan(row.id, row.due_ms)
        topic.scheduled -= 1
        self.scheduled -= 1
        self.drop(row.id)

    def schedule(self, row: TaskRow, now_ms: int) -> None:
        """Put a durable or recorded task on the wheel."""
        self.topic(row.topic).scheduled += 1
        self.scheduled += 1
        self.wheel.add(row.id, row.due_ms)
        if row.due_ms <= now_ms + self.config.resident_horizon_ms and self.has_room:
            self.keep(row)

    def expires(self, group: Group, at_mono_ms: int) -> None:
        """A lease of ``group`` may end at ``at_mono_ms``."""
        self.leased[group] = None
        if group.expiry_mono_ms is None or group.expiry_mono_ms > at_mono_ms:
            group.expiry_mono_ms = at_mono_ms
        if self.expiry_mono_ms is None or self.expiry_mono_ms > at_mono_ms:
            self.expiry_mono_ms = at_mono_ms

    # --- steps of several parts ----------------------------------------------------------

    def wait(self, group: Group, task_id: int, at_ms: int) -> None:
        """``group`` gets the task again at ``at_ms``."""
        group.waiting[task_id] = at_ms
        groups = self.retrying.setdefault(task_id, [])
        if group not in groups:
            groups.append(group)
        self.wheel.add(task_id, at_ms)
        tries = group.tries.get(task_id)
        if tries is not None:
            self.open.effects.progress[task_id, group.name] = ProgressRow(
                task_id,
                group.name,
                ProgressState.WAITING,
                tries.attempt,
                at_ms,
                tries.epoch,
                tries.failures,
            )

    def leave(self, group: Group, row: TaskRow) -> None:
        """A task that is ready or waiting in ``group`` is taken out of it."""
        task_id = row.id
        group.tries.pop(task_id, None)
        self.lifetimes.end(row)
        at_ms = group.waiting.pop(task_id, None)
        if at_ms is not None:
            self.wheel.orphan(task_id, at_ms)
            self.waited(group, task_id)
            return
        group.withdraw(task_id)
        topic = group.topic
        if topic.unowned is group and group.ready_count < self.config.backlog_max:
            self.full_topics.pop(topic.name, None)

    def waited(self, group: Group, task_id: int) -> None:
        """``group`` does not wait for this task's next attempt any more."""
        groups = self.retrying[task_id]
        groups.remove(group)
        if not groups:
            del self.retrying[task_id]

    def note_done(self, task_id: int, group: Group, attempt: int, epoch: int) -> None:
        self.open.effects.progress[task_id, group.name] = ProgressRow(
            task_id, group.name, ProgressState.DONE, attempt, 0, epoch
        )

    # --- credits -------------------------------------------------------------------------

    def give_back(self, subscriber: Subscriber, count: int) -> None:
        """Return credit at once: nothing has to be confirmed to this consumer."""
        subscriber.outstanding -= count
        self.regained(subscriber)

    def regained(self, subscriber: Subscriber) -> None:
        """It may have credit that it had not."""
        group = subscriber.group
        if subscriber in group.subscribers:
            group.able[subscriber] = None
            self.wake(group)

    def wake(self, group: Group) -> None:
        if group.able and group.ready_count and group not in self.throttled:
            self.runnable[group] = None


def failure_of(lease: Lease, reason: str, now_ms: int) -> Failure:
    """The failed attempt, with its reason cut to the length that is kept."""
    return Failure(lease.attempt, now_ms, reason[:REASON_LENGTH_MAX], lease.subscriber.label)
