"""What the engine reports: every change of a task's state, when a history is kept, and why a
delivery is late.

The engine calls a ``Recorder`` where it makes the change; a recorder only takes notes. Notes belong
to the open batch: ``seal`` takes them along, and they are kept once that batch is durable. Without
a history there is a recorder that keeps nothing.

A group that has ready tasks and cannot hand them out is *held back* by one cause at a time. When
that changes, ``Ledger.judge`` notes when; so each cause has a *hold interval*, from its beginning
to its end. The daemon has hold intervals of its own: it was down, its store was slow, its loop was
busy. A late delivery gets the cause whose interval covers most of its wait. Where intervals
overlap, the order of ``Cause`` decides; what no interval covers is the loop's.

Costs: nothing for a delivery that is in time, two looks at the intervals for a frame of late ones.

A cause has one interval, the last one. It goes on through a gap in which the group still had some
of what it held back, so that a backlog is one interval, however long it takes to be handed out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from tickwheel.engine.topics import PLAIN, WAITED
from tickwheel.model.lateness import LATE_MS, Cause, Causes, HoldIntervals, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from tickwheel.engine.topics import Group, Item, Lease, Subscriber, Topic
    from tickwheel.model.kinds import Halves, Run, ScheduleRow, TransactionRow
    from tickwheel.model.records import NewTask, TaskRow

CANCELLED, EXPIRED, DELETED = "cancelled", "expired", "deleted"
FILTERED = "filtered"
PUT, PAUSED, RESUMED = "put", "paused", "resumed"
PREPARED, COMMITTED, ROLLED_BACK = "prepared", "committed", "rolled_back"
CHECKED, PARKED = "checked", "parked"


class Recorder(Protocol):
    """Whoever keeps the history. Every call is a change that has just been made."""

    # --- batches -----------------------------------------------------------------------------

    def cut(self) -> object:
        """The notes of the batch that is being sealed; later notes belong to the next batch."""

    def rejoin(self, notes: object, accepted: Container[int]) -> None:
        """The batch with these notes was refused: its arrivals but those of ``accepted`` tasks are
        forgotten, the rest comes before what has been noted since."""

    def forget_arrivals(self, accepted: Container[int]) -> None:
        """The tasks staged in the open batch were withdrawn, runs of schedules among them, but
        those that are ``accepted``."""

    # --- tasks -------------------------------------------------------------------------------

    def arrived(
        self, source: object, ids: range, new_tasks: Sequence[NewTask], now_ms: int
    ) -> None:
        """Tasks were staged for ``source``, the shard's producer."""

    def replaced(self, source: object, row: TaskRow, now_ms: int) -> None:
        """A pending task was replaced: it has another body, other options, another due time."""

    def merged(self, source: object, topic: str, what: str, task_id: int, now_ms: int) -> None:
        """A task of ``source`` was not stored, because this one was pending: "kept" or
        "rejected"."""

    def overtaken(self, lease: Lease) -> None:
        """A newer task with its key has replaced a task that a consumer has."""

    def delivered(
        self,
        group: Group,
        subscriber: Subscriber,
        items: Sequence[Item],
        now_ms: int,
        causes: Causes | None = None,
    ) -> None:
        """Tasks were handed out to a subscriber; a broadcast has a group without a name.
        ``causes``: why those of them are late that are; None: none is."""

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        """Tasks were finished by their consumer. Tasks in ``kept`` other groups still have."""

    def acked_idle(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        """A task was finished by the receipt of an earlier delivery."""

    def nacked(self, lease: Lease, reason: str, next_ms: int, now_ms: int) -> None:
        """An attempt failed; the next one comes at ``next_ms``."""

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        """A lease is over without an answer, and its task comes back; ``until_ms``: then, because
        its consumer died."""

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        """A task was given back, and nothing is counted; ``until_ms``: it is postponed until
        then."""

    def died(self, lease: Lease, reason: str, now_ms: int) -> None:
        """A task has become a dead letter of its group."""

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
        """A task was CANCELLED, EXPIRED, DELETED or FILTERED, in one group or (None) altogether;
        ``last``: that ended the task."""

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        """``ended`` for many tasks, each in all of its groups."""

    def rescheduled(self, row: TaskRow, due_ms: int) -> None:
        """A task was moved: its next delivery is at ``due_ms``."""

    def rescheduled_many(self, topic: str, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """``rescheduled`` for many tasks that keep their places in the order."""

    def requeued(self, topic: str, group: str, task_id: int, ttl_ms: int | None = None) -> None:
        """A task has come back from the dead letters of its group."""

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        """A group was made."""

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        """A group is to be given again what came due in that time."""

    def group_closed(self, group: Group) -> None:
        """A group is being deleted: it is owed nothing more, and what it holds is let go of."""

    def configured(self, topic: Topic, group: Group | None) -> None:
        """Settings of a group, or of the topic itself, were changed."""

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, what: str, *, same_body: bool = False) -> None:
        """A schedule was PUT, PAUSED, RESUMED or DELETED; ``same_body``: the put did not change the
        body."""

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        """The fate of a schedule's occurrences was decided; ``row`` is the schedule afterwards.
        ``staged``: their tasks are in the open batch, and all of it is forgotten if that is
        refused."""

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        """A transaction was PREPARED (with what was ``added``), COMMITTED, ROLLED_BACK, CHECKED or
        PARKED, and is as ``row`` says now. The note is forgotten if the open batch is refused."""


class _Unrecorded(Recorder):
    """A recorder that keeps nothing."""

    def cut(self) -> object:
        return None


UNRECORDED: Recorder = _Unrecorded()  # type: ignore[abstract]  # methods that do nothing are meant
"""The recorder of an engine without a history."""

STARTING_MS = 5_000
"""How long after a start absent consumers are the daemon's fault, in ms."""
SUBSCRIBERS_LOOKED_AT = 8


class Ledger:
    """Judges what holds groups back, and names the causes of late deliveries."""

    def __init__(self, throttled: Collection[Group], targets: Container[tuple[str, str]]) -> None:
        """``throttled``: the groups that a rate holds back; ``targets``: (topic, group) of those
        that are pushed or forwarded. Both are read anew each time."""
        self._throttled = throttled
        self._targets = targets
        self.daemon = HoldIntervals()
        """The intervals in which the whole daemon was held back. The shard adds to them."""
        self._back_ms = 0
        """Until this time consumers may be absent because the daemon was."""
        self.changed: dict[Group, None] = {}
        """Groups with other settings or other subscribers, to be judged when the time is known."""

    def began(self, stopped_ms: int, now_ms: int) -> None:
        """The engine was recovered; nothing was delivered since ``stopped_ms``, at least."""
        stopped_ms = min(stopped_ms, now_ms)
        self.daemon.add(Cause.UNKNOWN, 0, stopped_ms)
        self.daemon.add(Cause.DAEMON_DOWN, stopped_ms, now_ms)
        self._back_ms = now_ms + STARTING_MS

    # --- what holds a group back ---------------------------------------------------------------

    def judge_changed(self, now_ms: int) -> None:
        """Judge the groups of ``changed`` that hold tasks, or were held back."""
        changed, self.changed = self.changed, {}
        for group in changed:
            if group.hold_intervals is not None or group.ready_count:
                self.judge(group, now_ms)

    def could_go_on(self, groups: Iterable[Group], now_ms: int) -> None:
        """Judge groups that nothing holds back any more but the work that the daemon has."""
        for group in groups:
            if group.hold_intervals is not None and group.hold_intervals.current is not None:
                self.judge(group, now_ms)

    def judge(self, group: Group, now_ms: int) -> None:
        """Note what holds ``group`` back now, after something about it may have changed."""
        hold_intervals, cause = group.hold_intervals, self._holds_back(group)
        if hold_intervals is None:
            if cause is None:
                return
            hold_intervals = group.hold_intervals = HoldIntervals()
        if cause is not hold_intervals.current:
            hold_intervals.turn(cause, now_ms, group.oldest_since_ms())
            if cause is Cause.NO_SUBSCRIBER and now_ms < self._back_ms:
                hold_intervals.add(Cause.DAEMON_DOWN, now_ms, self._back_ms)
            else:
                hold_intervals.cut(Cause.DAEMON_DOWN, now_ms)

    def waits_for_connection(self, group: Group, now_ms: int) -> None:
        """Something came due for the broadcast subscription that ``group`` stands for, and its
        connection takes nothing now."""
        if group.hold_intervals is None:
            group.hold_intervals = HoldIntervals()
        if group.hold_intervals.current is None:
            group.hold_intervals.turn(Cause.NO_CREDIT, now_ms, now_ms)

    def sent(self, group: Group, now_ms: int) -> None:
        """The broadcast connection that ``group`` stands for has taken all there was."""
        if group.hold_intervals is not None:
            group.hold_intervals.turn(None, now_ms, None)

    def _holds_back(self, group: Group) -> Cause | None:
        if not group.ready_count:
            return None
        if group.is_held:
            return Cause.PAUSED
        if not group.subscribers:
            return Cause.NO_SUBSCRIBER
        if group in self._throttled:
            return Cause.RATE
        if any(one.credit > 0 for one in group.able):
            return None
        cause = _without_credit(group.subscribers)
        if cause is Cause.NO_CREDIT and (group.topic.name, group.name) in self._targets:
            return Cause.ENDPOINT
        return cause

    # --- causes of deliveries ------------------------------------------------------------------

    def causes(
        self, group: Group, items: Sequence[Item], now_ms: int, *, all_late: bool = False
    ) -> Causes | None:
        """The causes of a frame's late deliveries, of which there is at least one; None: all are in
        time. What lies between two of one cause has that cause, too. ``all_late``: the caller knows
        that all are late first deliveries."""
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
            # What else held the group back held it back, too: only the rest was for its turn.
            own = _of_keys(group, items[index][0][0]) if group.key_intervals else ()
            return cause_of(index, Cause.KEY_BUSY, own)

        def same(ask: Callable[[int], Cause]) -> Cause | None:
            cause = ask(0)
            is_same = items[0][0][1] == items[-1][0][1] or cause is ask(len(items) - 1)
            return cause if is_same else None

        if all_late and group.is_ordered:
            # A delivery that is over already (at most once) cannot say any more that it waited.
            leases = [group.flight.get(row[0]) for row, _, _ in items]
            traits = [PLAIN if lease is None else lease.traits for lease in leases]
            are_alike = traits.count(WAITED) == len(traits) and not group.key_intervals
            if are_alike and (cause := same(cause_in_line)) is not None:
                return cause
            all_late = traits.count(PLAIN) == len(traits)
        if all_late and (cause := same(cause_of)) is not None:
            return cause
        found: list[Cause | None] = [None] * len(items)
        first_ones = [i for i, (row, n, _) in enumerate(items) if n == 1 and row[1] < due_before_ms]
        fresh: list[int] = []
        in_line: list[int] = []
        for index in first_ones:
            lease = group.flight.get(items[index][0][0])
            (in_line if lease is not None and lease.traits.waited else fresh).append(index)
        _fill(found, fresh, cause_of)
        if group.key_intervals:
            for index in in_line:
                found[index] = cause_in_line(index)
        else:
            _fill(found, in_line, cause_in_line)
        return found


def _of_keys(group: Group, task_id: int) -> list[HoldIntervals]:
    """When the keys of a task that was just handed out were paused."""
    lease, intervals = group.flight.get(task_id), group.key_intervals
    if lease is None:
        return []
    share = lease.traits.share
    marks = lease.order, 0 if share is None else share.mark
    return [intervals[mark] for mark in marks if mark in intervals]


def _fill(
    found: list[Cause | None], indexes: Sequence[int], cause_of: Callable[[int], Cause]
) -> None:
    """Set the cause at each of ``indexes``, asking ``cause_of`` for few of them."""
    if not indexes:
        return
    first, last = cause_of(indexes[0]), cause_of(indexes[-1])
    if first is last or len(indexes) <= 2:
        for index in indexes:
            found[index] = first
        found[indexes[-1]] = last
        return
    half = len(indexes) // 2
    _fill(found, indexes[:half], cause_of)
    _fill(found, indexes[half:], cause_of)


def _without_credit(subscribers: Iterable[Subscriber]) -> Cause:
    """The cause when no subscriber takes more. A few stand for all, because there may be
    thousands."""
    cause = Cause.LEASE_OVER
    for one in islice(subscribers, SUBSCRIBERS_LOOKED_AT):
        if one.presence.doubted:
            continue
        if not one.blocked and one.prefetch - one.outstanding + one.unconfirmed > 0:
            return Cause.STORE  # what it is done with is not durable yet
        cause = Cause.NO_CREDIT
    return cause
