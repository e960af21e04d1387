"""The reports of the engine: every change of a task's state, for the history, and the causes of
late deliveries.

The engine calls a ``Recorder`` at each change; a recorder only takes notes. Notes belong to the
open batch and are written once that batch is durable. Without a history, the recorder keeps
nothing.

If a group has ready tasks but cannot deliver them, it is *held back* by one cause at a time.
``Ledger.judge`` records each change of the cause, so each cause has a *hold interval* with a start
and an end. The daemon also has hold intervals: it was down, its store was slow, its event loop was
busy. A late delivery gets the cause whose interval covers most of its wait. If intervals overlap,
the order of ``Cause`` decides; time that no interval covers counts as LOOP_BUSY, or as KEY_BUSY if
the task waited for its key or value.

A frame of late deliveries costs two lookups of the intervals; deliveries in time cost nothing.

Only the last interval of a cause is kept. It continues across gaps while the group still has some
of the delayed tasks, so that a backlog has one interval until it is delivered.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.engine.topics import PLAIN, WAITED
from tickwheel.model.lateness import LATE_MS, Cause, Causes, HoldIntervals, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from tickwheel.engine.topics import Group, Item, Lease, Subscriber, Topic
    from tickwheel.model.kinds import Halves, Kind, Run, ScheduleRow, TransactionRow
    from tickwheel.model.records import NewTask, TaskRow

CANCELLED, EXPIRED, DELETED = "cancelled", "expired", "deleted"
FILTERED = "filtered"
PUT, PAUSED, RESUMED = "put", "paused", "resumed"
PREPARED, COMMITTED, ROLLED_BACK = "prepared", "committed", "rolled_back"
CHECKED, PARKED = "checked", "parked"


class Recorder(Protocol):
    """The recorder of the history. Every call reports a change that has just been made."""

    # --- batches -----------------------------------------------------------------------------

    def cut(self) -> object:
        """Return the notes of the batch that is being sealed, and begin those of the next one."""

    def rejoin(self, notes: object, accepted: Container[int]) -> None:
        """Report that the batch with these notes was refused. Forget its arrivals, except those of
        ``accepted`` tasks, and put the other notes before later ones."""

    def forget_arrivals(self, accepted: Container[int]) -> None:
        """Report that the staged tasks of the open batch, including runs of schedules, were
        withdrawn, except ``accepted`` tasks."""

    # --- tasks -------------------------------------------------------------------------------

    def arrived(
        self, source: object, ids: range, new_tasks: Sequence[NewTask], now_ms: int
    ) -> None:
        """Report that tasks of ``source`` were staged."""

    def replaced(self, source: object, row: TaskRow, now_ms: int) -> None:
        """Report that the body, options and due time of a pending task were replaced."""

    def not_stored(self, source: object, topic: str, what: str, task_id: int, now_ms: int) -> None:
        """Report that a task of ``source`` was not stored because the task ``task_id`` was pending.
        ``what`` is "kept" or "rejected"."""

    def overtaken(self, lease: Lease) -> None:
        """Report that a newer task with the same key has replaced a task in flight."""

    def delivered(
        self,
        group: Group,
        subscriber: Subscriber,
        items: Sequence[Item],
        now_ms: int,
        causes: Causes | None = None,
    ) -> None:
        """Report deliveries to a subscriber. For a broadcast, ``group`` has no name. ``causes`` are
        the causes of late deliveries, or None if all are in time."""

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        """Report acks. Other groups have not finished the tasks in ``kept``."""

    def acked_without_lease(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        """Report that a group has finished a task that it did not have in flight."""

    def nacked(self, lease: Lease, reason: str, next_ms: int | None, now_ms: int) -> None:
        """Report a failed attempt; the next attempt is at ``next_ms``, or never by itself (None),
        because the task's order key is held."""

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        """Report a lease that ended without an answer. If its consumer died, the task waits until
        ``until_ms``; otherwise it is ready at once."""

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        """Report that a delivery was returned unstarted, or its task postponed to ``until_ms``."""

    def dead_lettered(self, lease: Lease, reason: str, now_ms: int) -> None:
        """Report that a task has become a dead letter of its group."""

    def ended(
        self,
        topic: str,
        group: str | None,
        how: str,
        task_id: int,
        *,
        last: bool,
        reason: str | None = None,
    ) -> None:
        """Report that a task was CANCELLED, EXPIRED, DELETED or FILTERED in a group, or (None) in
        all groups. ``last`` means that this ended the task."""

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        """Report the ends of many tasks in all of their groups."""

    def rescheduled(self, row: TaskRow, due_ms: int) -> None:
        """Report that a task's next delivery was moved to ``due_ms``."""

    def rescheduled_many(self, topic: str, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """Report the new due times of many tasks, none of which gets a new ``order_id``."""

    def requeued(self, topic: str, group: str, task_id: int, ttl_ms: int | None = None) -> None:
        """Report that a dead letter was requeued in its group."""

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        """Report a new group."""

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        """Report a reset: the tasks due from ``from_ms`` to ``until_ms`` are repeated."""

    def group_closed(self, group: Group) -> None:
        """Report that a group is being deleted."""

    def configured(self, topic: Topic, group: Group | None) -> None:
        """Report changed settings of a group, or of the topic itself."""

    # --- records -----------------------------------------------------------------------------

    def record_put(self, kind: Kind[Any], row: Any, before: Any = None) -> None:
        """Report that a record of a RECORDED kind was created or changed. ``before``: the preceding
        record, which only targets need."""

    def record_dropped(self, kind: Kind[Any], row: Any) -> None:
        """Report that a record of a RECORDED kind was removed."""

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, what: str, *, same_body: bool = False) -> None:
        """Report that a schedule was PUT, PAUSED, RESUMED or DELETED. ``same_body`` means that the
        put did not change the body."""

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        """Report decided occurrences of a schedule, whose new row is ``row``. ``staged`` means that
        their tasks are in the open batch; if that is refused, the report is forgotten."""

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        """Report that a transaction, now ``row``, was PREPARED (with the ``added`` half tasks),
        COMMITTED, ROLLED_BACK, CHECKED or PARKED. If the open batch is refused, forget this."""


class _Unrecorded(Recorder):
    """A recorder that keeps nothing."""

    def cut(self) -> object:
        return None


UNRECORDED: Recorder = _Unrecorded()  # type: ignore[abstract]  # methods that do nothing are intended
"""The recorder of an engine without a history."""

STARTING_MS = 5_000
"""Milliseconds after a start in which missing consumers still count as the daemon's downtime."""
SUBSCRIBERS_EXAMINED_MAX = 8


class Ledger:
    """Determines the causes that hold groups back, and the causes of late deliveries."""

    def __init__(self, throttled: Collection[Group], targets: Container[tuple[str, str]]) -> None:
        """``throttled`` contains the groups that a rate delays, ``targets`` the (topic, group) of
        pushed and forwarded groups. Both are live views."""
        self._throttled = throttled
        self._targets = targets
        self.daemon = HoldIntervals()
        """The intervals in which the whole daemon was held back. The shard adds them."""
        self._reconnect_until_ms = 0
        """The time until which consumers may be missing because the daemon was down."""
        self.changed: dict[Group, None] = {}
        """Groups with changed settings or subscribers, which are judged at the next dispatch."""

    def begin(self, stopped_ms: int, now_ms: int) -> None:
        """Record that the engine was recovered and has delivered nothing since ``stopped_ms``."""
        stopped_ms = min(stopped_ms, now_ms)
        self.daemon.add(Cause.UNKNOWN, 0, stopped_ms)
        self.daemon.add(Cause.DAEMON_DOWN, stopped_ms, now_ms)
        self._reconnect_until_ms = now_ms + STARTING_MS

    # --- causes that hold a group back ---------------------------------------------------------

    def judge_changed(self, now_ms: int) -> None:
        """Judge the groups of ``changed`` that have tasks or were held back."""
        changed, self.changed = self.changed, {}
        for group in changed:
            if group.hold_intervals is not None or group.ready_count:
                self.judge(group, now_ms)

    def judge_runnable(self, groups: Iterable[Group], now_ms: int) -> None:
        """Judge runnable groups with a cause: only the daemon's other work delays them now."""
        for group in groups:
            if group.hold_intervals is not None and group.hold_intervals.current is not None:
                self.judge(group, now_ms)

    def judge(self, group: Group, now_ms: int) -> None:
        """Record the cause that holds ``group`` back now."""
        hold_intervals, cause = group.hold_intervals, self._current_cause(group)
        if hold_intervals is None:
            if cause is None:
                return
            hold_intervals = group.hold_intervals = HoldIntervals()
        if cause is not hold_intervals.current:
            hold_intervals.set_current(cause, now_ms, group.oldest_since_ms())
            if cause is Cause.NO_SUBSCRIBER and now_ms < self._reconnect_until_ms:
                hold_intervals.add(Cause.DAEMON_DOWN, now_ms, self._reconnect_until_ms)
            else:
                hold_intervals.cut(Cause.DAEMON_DOWN, now_ms)

    def note_blocked(self, group: Group, now_ms: int) -> None:
        """Record that the connection of a broadcast subscription does not accept a due task.
        ``group`` is the subscription's placeholder."""
        if group.hold_intervals is None:
            group.hold_intervals = HoldIntervals()
        if group.hold_intervals.current is None:
            group.hold_intervals.set_current(Cause.NO_CREDIT, now_ms, now_ms)

    def note_unblocked(self, group: Group, now_ms: int) -> None:
        """Record that the connection of a broadcast subscription, whose placeholder is ``group``,
        has accepted all tasks."""
        if group.hold_intervals is not None:
            group.hold_intervals.set_current(None, now_ms, None)

    def _current_cause(self, group: Group) -> Cause | None:
        if not group.ready_count:
            return None
        if group.is_held:
            return Cause.PAUSED
        if not group.subscribers:
            return Cause.NO_SUBSCRIBER
        if group in self._throttled:
            return Cause.RATE
        if any(subscriber.credit > 0 for subscriber in group.able):
            return None
        cause = _cause_without_credit(group.subscribers)
        if cause is Cause.NO_CREDIT and (group.topic.name, group.name) in self._targets:
            return Cause.ENDPOINT
        return cause

    # --- causes of deliveries ------------------------------------------------------------------

    def causes(
        self, group: Group, items: Sequence[Item], now_ms: int, *, all_late: bool = False
    ) -> Causes | None:
        """Return the causes of a frame's late deliveries, or None if all are in time. Deliveries
        between two deliveries with the same cause are assumed to have that cause. ``all_late``
        means that all are late first deliveries."""
        due_before_ms = now_ms - LATE_MS
        if not all_late:
            dues_ms = [row[1] for row, _, _ in items]
            if min(dues_ms) >= due_before_ms:
                return None
            all_late = max(dues_ms) < due_before_ms and all(n == 1 for _, n, _ in items)
        all_intervals = (
            [self.daemon] if group.hold_intervals is None else [group.hold_intervals, self.daemon]
        )

        def cause_of(
            index: int, rest: Cause = Cause.LOOP_BUSY, own: Sequence[HoldIntervals] = ()
        ) -> Cause:
            by_cause = shares(items[index][0][1], now_ms, [*own, *all_intervals], rest)
            return max(by_cause, key=by_cause.__getitem__)

        def cause_in_line(index: int) -> Cause:
            # Other causes of the group take precedence; only the remaining time counts as waiting
            # for the key.
            own = _key_intervals_of(group, items[index][0][0]) if group.key_intervals else ()
            return cause_of(index, Cause.KEY_BUSY, own)

        def same(ask: Callable[[int], Cause]) -> Cause | None:
            cause = ask(0)
            is_same = items[0][0][1] == items[-1][0][1] or cause is ask(len(items) - 1)
            return cause if is_same else None

        if all_late and group.is_ordered:
            # An at-most-once delivery is already settled, so it has no lease that says whether it
            # waited.
            leases = [group.flight.get(row[0]) for row, _, _ in items]
            traits = [PLAIN if lease is None else lease.traits for lease in leases]
            are_alike = traits.count(WAITED) == len(traits) and not group.key_intervals
            if are_alike and (cause := same(cause_in_line)) is not None:
                return cause
            all_late = traits.count(PLAIN) == len(traits)
        if all_late and (cause := same(cause_of)) is not None:
            return cause
        by_index: list[Cause | None] = [None] * len(items)
        first_ones = [i for i, (row, n, _) in enumerate(items) if n == 1 and row[1] < due_before_ms]
        fresh: list[int] = []
        in_line: list[int] = []
        for index in first_ones:
            lease = group.flight.get(items[index][0][0])
            (in_line if lease is not None and lease.traits.waited else fresh).append(index)
        _fill(by_index, fresh, cause_of)
        if group.key_intervals:
            for index in in_line:
                by_index[index] = cause_in_line(index)
        else:
            _fill(by_index, in_line, cause_in_line)
        return by_index


def _key_intervals_of(group: Group, task_id: int) -> list[HoldIntervals]:
    """Return the intervals in which the keys of a task that was just delivered were paused."""
    lease, intervals = group.flight.get(task_id), group.key_intervals
    if lease is None:
        return []
    share = lease.traits.share
    marks = lease.order, 0 if share is None else share.mark
    return [intervals[mark] for mark in marks if mark in intervals]


def _fill(
    by_index: list[Cause | None], indexes: Sequence[int], cause_of: Callable[[int], Cause]
) -> None:
    """Set the cause at each of ``indexes``, calling ``cause_of`` for as few of them as possible."""
    if not indexes:
        return
    first, last = cause_of(indexes[0]), cause_of(indexes[-1])
    if first is last or len(indexes) <= 2:
        for index in indexes:
            by_index[index] = first
        by_index[indexes[-1]] = last
        return
    half = len(indexes) // 2
    _fill(by_index, indexes[:half], cause_of)
    _fill(by_index, indexes[half:], cause_of)


def _cause_without_credit(subscribers: Iterable[Subscriber]) -> Cause:
    """Return the cause if no subscriber has credit. Only a sample of the subscribers is examined,
    because there can be thousands."""
    cause = Cause.LEASE_OVER
    for subscriber in islice(subscribers, SUBSCRIBERS_EXAMINED_MAX):
        if subscriber.presence.doubted:
            continue
        if (
            not subscriber.blocked
            and subscriber.prefetch - subscriber.outstanding + subscriber.unconfirmed > 0
        ):
            return Cause.STORE  # its settled deliveries are not durable yet
        cause = Cause.NO_CREDIT
    return cause
