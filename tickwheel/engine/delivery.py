"""Delivers ready tasks to subscribers with credit.

* ``Delivery`` serves groups in turn, and the subscribers of a group in turn, within credit, pauses
  and rates.
* ``Leasing`` leases one frame to one subscriber, task by task, or with the same result in one step
  if no task needs an individual decision (``LeaseBatch``).
* ``RowReading`` tracks the rows that must be read before their tasks can be delivered.
* ``Isolation`` selects connections for tasks that must be delivered alone, because one more death
  of a consumer would make them dead letters.
* ``Subscriptions`` tracks the consumers that can get deliveries.

Invariants:

* A task is delivered only if it is due at the ``now_ms`` of the call. A group that is held gets no
  deliveries, and rates are not exceeded.
* An at-most-once delivery is settled in the open batch, and sent when that batch is durable.

Isolation: a task must not become a dead letter because another task killed its consumer. After the
first deaths of its consumers, a task is still delivered together with others, because any of
thousands of tasks might be the cause. When one more death would make it a dead letter, it waits in
``Group.loading`` for a connection without other deliveries. If there is none, one connection is
kept free: it gets no deliveries until its present ones are settled, for at most ``KEEP_MS``. For
the same time after that, no connection is kept free, so that long work does not block a connection
permanently. After an isolated delivery, a connection gets other deliveries, if there are any,
before the next isolated one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.ordering import Ordering, mark_of, marks_of
from tickwheel.engine.ownership import wants
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import (
    DELIVERY_BYTES,
    PLAIN,
    Dispatch,
    Group,
    Item,
    Keep,
    Lease,
    Presence,
    Subscriber,
    Topic,
    Traits,
    priority_of,
    traits_of,
    ttl_end_ms,
)
from tickwheel.model.filters import STEPS_PER_TICK
from tickwheel.model.records import (
    NO_PAST,
    TaskRow,
    TaskSnapshot,
    columns_bytes,
    columns_of,
    is_absent,
    options_bytes,
    task_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.engine.firing import Broadcasts, Firing
    from tickwheel.engine.ownership import Ownership
    from tickwheel.engine.queues import Bucket
    from tickwheel.engine.settlement import Settlement

PREFERRED_MAX = 64
"""Maximum number of subscribers among which the preferences of order keys choose."""
DISPATCHED_MAX = 1 << 30
READ_AHEAD_TASKS = 1_000
"""Maximum number of backlog rows that are read beyond the credit of the group's subscribers."""
KEEP_MS = 60_000
"""Maximum time for which a connection is kept free, and minimum time until the next one."""
EXAMINED_MAX = 64
"""Maximum number of subscribers, and of tasks that wait for isolation, examined at once."""


class Delivery:
    """Delivers ready tasks to the subscribers of their groups, in turn."""

    def __init__(
        self,
        core: Core,
        ownership: Ownership,
        settlement: Settlement,
        firing: Firing,
        subscriptions: Subscriptions,
    ) -> None:
        self._core = core
        self._firing = firing
        self._broadcasts = firing.broadcasts
        self._leasing = leasing = Leasing(core, ownership, settlement, firing, subscriptions)
        self.reading, self._isolation = leasing.reading, leasing.isolation

    def resume_missing(self, snapshot: TaskSnapshot, now_ms: int) -> None:
        """Continue all work that waited for the row of a missing task."""
        row, core = snapshot.row, self._core
        rows = {row.id: row}
        if row.id in core.firing:
            self._firing.process_rows([row.id], rows, now_ms)
        if row.id in core.lifetimes.fired:
            self._firing.expire_lapsed([row.id], {row.id: snapshot}, now_ms)
        for group in core.topic(row.topic).groups.values():
            if row.id in group.loading:
                self.reading.process_rows(group, [row.id], rows)

    def dispatch(self, now_ms: int, mono_ms: int, limit: int) -> tuple[list[Dispatch], bool]:
        """Deliver about ``limit`` tasks. Return (their frames, whether more can follow at once)."""
        core, leasing, examined = self._core, self._leasing, 0
        leasing.begin(now_ms, mono_ms)
        core.steps_left = STEPS_PER_TICK
        if core.ledger.changed:
            core.ledger.judge_changed(now_ms)
        if core.throttled:
            self._unthrottle(mono_ms)
        core.orderings.tick(limit, now_ms, mono_ms)
        if core.kept_connections:
            self._isolation.tick(mono_ms)
        leasing.bytes_left -= self._broadcasts.flush(leasing.out, leasing.bytes_left, now_ms)
        while core.runnable and examined < limit and leasing.bytes_left > 0 and self._may_lease:
            if core.steps_left <= 0:
                break
            group = next(iter(core.runnable))
            # Move to the end, so that no group waits for another group's backlog.
            del core.runnable[group]
            count = self._dispatch_group(group)
            examined += max(1, count)  # a group without deliveries counts, which bounds the tick
            if not count or (group.hold_intervals is not None and not len(group.ready)):
                core.ledger.judge(group, now_ms)
            if count:
                core.wake(group)
        core.ledger.judge_runnable(core.runnable, now_ms)
        unfinished = bool(core.orderings.to_advance) or (bool(core.runnable) and self._may_lease)
        out, leasing.out = leasing.out, []
        return out, unfinished or self._broadcasts.can_send

    @property
    def _may_lease(self) -> bool:
        return self._core.in_flight < self._core.config.in_flight_max

    def _dispatch_group(self, group: Group) -> int:
        """Lease at most one frame to each subscriber. Return how many ready entries were used."""
        core, able, leasing = self._core, group.able, self._leasing
        waiting = allowed = len(group.ready)
        if not able or not (waiting or group.isolated) or group.is_held:
            return 0
        buckets = _buckets(group)
        if buckets:
            allowed = min(bucket.left(leasing.mono_ms) for bucket in buckets)
            if allowed <= 0:
                core.throttled[group] = max(bucket.next_mono_ms() for bucket in buckets)
                return 0
        used = self._dispatch_alone(group) if group.isolated else 0
        allowed -= used
        if not waiting or not able or allowed <= 0:
            return used
        share = min(-(-waiting // len(able)), core.config.delivery_frame_tasks_max)
        allowed = min(
            allowed, core.config.in_flight_max - core.in_flight, self._judgeable_count(group)
        )
        self.reading.begin(allowed)
        if group.is_ordered and core.orderings.by_group[group].has_preferences:
            return used + self._dispatch_preferred(group, allowed)
        for _ in range(len(able)):
            if not len(group.ready) or min(allowed, leasing.bytes_left, core.steps_left) <= 0:
                break
            subscriber = _next_able(group)
            if subscriber is None:
                continue
            if subscriber.at_most_once and core.handed_bytes >= core.config.handed_bytes_max:
                core.held_back[group] = None
                continue
            ids = group.ready.take(min(subscriber.credit, share, allowed))
            items, back = leasing.hand_out(group, subscriber, ids)
            used += len(ids) - back
            allowed -= items
            if back and not items:
                break  # the row of the next task must be read first
        self.reading.read_ahead(group)
        return used

    def _judgeable_count(self, group: Group) -> int:
        """Return how many tasks the group's filter can judge in this dispatch."""
        if not group.unjudged_id or group.judge is None:
            return DISPATCHED_MAX
        return max(1, self._core.steps_left // group.judge.steps)

    def _dispatch_alone(self, group: Group) -> int:
        """Lease an isolated task to a connection without other deliveries. Return the number of
        tasks that were tried, 0 or 1."""
        mono_ms = self._leasing.mono_ms
        pair = self._isolation.next(group, mono_ms)
        if pair is None:
            return 0
        task_id, subscriber = pair
        if task_id not in self._core.resident_rows:
            self._isolation.keep_free(group, subscriber.presence, mono_ms)
            if not group.isolated[task_id]:
                group.isolated[task_id] = True
                self._core.ready_rows_to_read.setdefault(group, []).append(task_id)
            return 0
        del group.isolated[task_id]
        priorities = [group.loading.pop(task_id)]
        self.reading.begin(1)
        items, _ = self._leasing.hand_out_picked(
            group, subscriber, [task_id], priorities, is_alone=True
        )
        if items:
            self._isolation.reserve(group, subscriber)
        return 1

    def _dispatch_preferred(self, group: Group, allowed: int) -> int:
        """Dispatch to a group in which order keys prefer subscribers with credit."""
        ordering, room = self._core.orderings.by_group[group], self._room(group)
        ids = group.ready.take(min(allowed, sum(room.values())))
        lease_batch = self._leasing.lease_batch(group, ids)
        if lease_batch is None:
            return self._divide(group, ordering, ids, room)
        preferred: Sequence[Subscriber | None] = [None] * len(ids)
        are_last = False
        if lease_batch.marks is not None:
            preferred, are_last = ordering.preferences.preferred(lease_batch.marks)
        parts, has_others = share_out(preferred, room)
        self._leasing.take(group, lease_batch)
        for subscriber, places in parts.items():
            part = lease_batch.part(places)
            if part.marks is not None and (has_others or not are_last):
                ordering.preferences.remember(part.marks, subscriber)
            group.able.move_to_end(subscriber)
            self._leasing.lease_as_batch(group, subscriber, part)
        return len(ids)

    def _divide(
        self, group: Group, ordering: Ordering, ids: list[int], room: dict[Subscriber, int]
    ) -> int:
        """Lease tasks from the ready queue to their preferred subscribers if some tasks need
        individual decisions. Return how many tasks were used."""
        resident, used = self._core.resident_rows, 0
        priorities = group.ready.priorities(len(ids))
        marks = [0 if (row := resident.get(i)) is None else mark_of(row) for i in ids]
        preferred, _ = ordering.preferences.preferred(marks)
        parts, _ = share_out(preferred, room)
        for subscriber, places in parts.items():
            group.able.move_to_end(subscriber)
            some, levels = [ids[at] for at in places], [priorities[at] for at in places]
            if self._leasing.bytes_left <= 0 or not subscriber.is_subscribed:
                _put_back(group, some, levels)
                continue
            _, back = self._leasing.hand_out_picked(group, subscriber, some, levels)
            used += len(some) - back
        self.reading.read_ahead(group)
        return used

    def _room(self, group: Group) -> dict[Subscriber, int]:
        """Return how many tasks each of the group's subscribers can take now in one frame, for at
        most ``PREFERRED_MAX`` subscribers."""
        config = self._core.config
        room: dict[Subscriber, int] = {}
        for subscriber in group.able:
            if subscriber.at_most_once and self._core.handed_bytes >= config.handed_bytes_max:
                self._core.held_back[group] = None
            elif subscriber.credit > 0:
                room[subscriber] = min(subscriber.credit, config.delivery_frame_tasks_max)
            if len(room) >= PREFERRED_MAX:
                break
        return room

    def _unthrottle(self, mono_ms: int) -> None:
        """Wake the groups that have a token again, in the order in which they were throttled."""
        core = self._core
        for group in [g for g, at_ms in core.throttled.items() if at_ms <= mono_ms]:
            del core.throttled[group]
            core.wake(group)

    def next_token_mono_ms(self) -> int | None:
        """Return when the next token allows a delivery (steady clock); None if no rate delays
        one."""
        times = chain(self._core.throttled.values(), self._core.orderings.next_tokens.values())
        return min(times, default=None)


@dataclass(eq=False)
class Leasing:
    """Leases ready tasks of a group to one of its subscribers, a frame at a time."""

    _core: Core
    _ownership: Ownership
    _settlement: Settlement
    _firing: Firing
    _subscriptions: Subscriptions

    def __post_init__(self) -> None:
        self.reading, self.isolation = RowReading(self._core), Isolation(self._core)
        self._is_alone = False
        """Whether the task that is being leased has the connection alone."""
        self.now_ms = self.mono_ms = self.bytes_left = 0
        """The times of this dispatch, and the bytes that it can still deliver."""
        self.out: list[Dispatch] = []
        """The frames of this dispatch."""
        self._picked: Sequence[int] | None = None
        """The priorities of the tasks that are being leased; None if they were just taken from the
        ready queue, which then knows their priorities."""

    def begin(self, now_ms: int, mono_ms: int) -> None:
        """Begin a dispatch at the given times."""
        self.now_ms, self.mono_ms = now_ms, mono_ms
        self.bytes_left = self._core.config.dispatch_bytes_max

    def hand_out_picked(
        self,
        group: Group,
        subscriber: Subscriber,
        ids: list[int],
        priorities: Sequence[int],
        *,
        is_alone: bool = False,
    ) -> tuple[int, int]:
        """Call ``hand_out`` for tasks that are not exactly those last taken from the ready queue.
        ``is_alone`` means that ``ids`` is a single task that has the connection alone."""
        self._picked, self._is_alone = priorities, is_alone
        items, back = self.hand_out(group, subscriber, ids)
        self._picked, self._is_alone = None, False
        return items, back

    def hand_out(self, group: Group, subscriber: Subscriber, ids: list[int]) -> tuple[int, int]:
        """Lease one frame. Return (number of its tasks, number of ``ids`` that were put back)."""
        lease_batch = self.lease_batch(group, ids)
        if lease_batch is None:
            items, back = self._lease_all(group, subscriber, ids)
            if items:
                self._send_frame(group, subscriber, items)
            return len(items), back
        self.take(group, lease_batch)
        if lease_batch.marks is not None:
            self._core.orderings.by_group[group].preferences.remember(lease_batch.marks, subscriber)
        self.lease_as_batch(group, subscriber, lease_batch)
        return len(ids), 0

    def lease_batch(self, group: Group, ids: Sequence[int]) -> LeaseBatch | None:
        """Return these tasks as a batch, or None if one needs a decision or they exceed a frame."""
        core = self._core
        ordering = core.orderings.by_group[group] if group.is_ordered else None
        if self._ownership.may_share(group) or (ordering is not None and ordering.shares.may_apply):
            return None
        lease_batch = lease_batch_of(core.resident_rows, group, ids, self.now_ms)
        if lease_batch is None or (
            ordering is not None and not ordering.can_lease_together(lease_batch.marks)
        ):
            return None
        size_bytes = lease_batch.size_bytes + len(ids) * DELIVERY_BYTES
        return lease_batch if size_bytes <= core.config.delivery_frame_bytes_max else None

    def take(self, group: Group, lease_batch: LeaseBatch) -> None:
        """Release the resident rows of a batch that is about to be leased."""
        core, resident, count = self._core, self._core.resident_rows, len(lease_batch.ids)
        for task_id in lease_batch.ids:
            del resident[task_id]
        core.resident_bytes -= lease_batch.size_bytes + count * ROW_OVERHEAD_BYTES
        self.bytes_left -= lease_batch.size_bytes + count * DELIVERY_BYTES
        if group.is_ordered:
            ordering = core.orderings.by_group[group]
            lease_batch.traits = ordering.hand_out_all(lease_batch.ids, lease_batch.traits)

    def lease_as_batch(self, group: Group, subscriber: Subscriber, lease_batch: LeaseBatch) -> None:
        """Lease the tasks of a batch whose rows ``take`` has released, as one frame. This takes
        0.6 µs per task; ``_lease_all`` takes 1.0 µs."""
        leases = lease_batch.leases(group, subscriber, self._core.epoch, self.mono_ms)
        group.flight |= leases
        subscriber.held |= leases
        self._core.unsaved += leases.values()
        self._send_frame(group, subscriber, [(row, 1, NO_PAST) for row in lease_batch.rows])

    def _send_frame(self, group: Group, subscriber: Subscriber, items: list[Item]) -> None:
        """Count leased deliveries, at least one, and put them into a frame for the subscriber."""
        core = self._core
        for bucket in _buckets(group):
            bucket.take(len(items))
        self._count_delivered(group, subscriber, len(items))
        causes = None
        if core.is_recorded:
            causes = core.ledger.causes(group, items, self.now_ms)
            core.recorder.delivered(group, subscriber, items, self.now_ms, causes)
        if subscriber.at_most_once:
            self._finish_now(group, Dispatch(subscriber, items, self.now_ms, causes))
        else:
            self.out.append(Dispatch(subscriber, items, causes=causes))
        if subscriber.once:
            self._subscriptions.unsubscribe(subscriber)

    def _finish_now(self, group: Group, dispatch: Dispatch) -> None:
        """Settle at-most-once deliveries. Their frame is sent when the settlement is durable."""
        core = self._core
        size_bytes = sum(task_bytes(row) + DELIVERY_BYTES for row, _, _ in dispatch.items)
        core.handed_bytes += size_bytes
        core.open.handed_bytes += size_bytes
        ids, attempts = [row.id for row, _, _ in dispatch.items], [n for _, n, _ in dispatch.items]
        unresolved = self._settlement.ack(group, core.epoch, ids, attempts)
        if unresolved:
            raise AssertionError("a delivery of this call is not in flight")
        core.open.handed.append(dispatch)

    def _lease_all(
        self, group: Group, subscriber: Subscriber, ids: list[int]
    ) -> tuple[list[Item], int]:
        """Lease the tasks of ``ids`` that can be delivered. Return (their deliveries, number of
        tasks that were put back for lack of room)."""
        core, now_ms, mono_ms = self._core, self.now_ms, self.mono_ms
        resident, flight, unsaved = core.resident_rows, group.flight, core.unsaved
        held = subscriber.held
        unjudged_id = group.unjudged_id
        ordering = core.orderings.by_group[group] if group.is_ordered else None
        shared = self._ownership.shared_ids()
        deadline_ms = mono_ms + subscriber.lease_ms
        items: list[Item] = []
        size_left, mark = core.config.delivery_frame_bytes_max, 0
        for index, task_id in enumerate(ids):
            row = resident.get(task_id)
            if (
                row is None
                or group.ready.stale
                or task_id <= unjudged_id
                or group.delivery_attempts
            ):
                if row is None and self.reading.room_to_set_aside(group) <= 0:
                    self._put_back(group, ids[index:])
                    break
                row = self._leasable_row(group, task_id, row, index)
                if row is None:
                    continue
            _, due_ms, _, body, options = row
            size = len(body) + DELIVERY_BYTES + (0 if options is None else options_bytes(options))
            if size > size_left and items:
                self._put_back(group, ids[index:])
                break
            is_mortal = options is not None and options.ttl_ms is not None
            if due_ms > now_ms or (is_mortal and _is_expired(row, now_ms)):
                self._withhold(group, row)
                continue
            attempts = group.delivery_attempts.get(task_id) if group.delivery_attempts else None
            traits: Traits | None
            if ordering is None:
                traits = PLAIN if options is None else traits_of(row)
            else:
                mark, is_first = mark_of(row), attempts is None or not attempts.was_attempted
                traits = ordering.hand_out(row, mark, subscriber, mono_ms, is_first=is_first)
            if traits is None:
                continue  # its key is paused, or an earlier task of its key goes first
            if is_mortal:
                core.lifetimes.end(row)
            attempt, past = core.next_delivery(group, task_id)
            flight[task_id] = held[task_id] = lease = Lease(
                task_id,
                group,
                subscriber,
                attempt,
                core.epoch,
                mono_ms,
                deadline_ms,
                due_ms,
                traits,
                past,
                mark,
            )
            unsaved.append(lease)
            items.append((row, attempt, past))
            size_left -= size
            if task_id not in shared or not core.has_room:
                del resident[task_id]
                core.resident_bytes -= size - DELIVERY_BYTES + ROW_OVERHEAD_BYTES
        else:
            index = len(ids)
        self.bytes_left -= core.config.delivery_frame_bytes_max - size_left
        return items, len(ids) - index

    def _leasable_row(
        self, group: Group, task_id: int, row: TaskRow | None, index: int
    ) -> TaskRow | None:
        """Return the row of a task that can be leased now. Return None if the task has left, its
        row must be read, the filter excludes it, or it must be isolated."""
        stale = group.ready.stale
        if stale and group.ready.pop_stale(task_id, self._priority_at(group, index)):
            return None
        if row is None:
            self.reading.set_aside(group, task_id, self._priority_at(group, index))
            return None
        is_left_out = task_id <= group.unjudged_id and self._is_excluded(group, row)
        return None if is_left_out or self._waits_to_be_alone(group, task_id, index) else row

    def _waits_to_be_alone(self, group: Group, task_id: int, index: int) -> bool:
        attempts = group.delivery_attempts.get(task_id)
        if attempts is None or self._is_alone or not self.isolation.is_last(attempts.past.deaths):
            return False
        self.isolation.set_aside(group, task_id, self._priority_at(group, index))
        return True

    def _is_excluded(self, group: Group, row: TaskRow) -> bool:
        """Judge a task by the group's filter for the first time. Return whether it is excluded."""
        self._core.steps_left -= 0 if group.judge is None else group.judge.steps
        if wants(group, row):
            return False
        if group.is_ordered:
            self._core.orderings.by_group[group].drop_undelivered(row)
        self._ownership.exclude(group, row)
        return True

    def _count_delivered(self, group: Group, subscriber: Subscriber, count: int) -> None:
        subscriber.outstanding += count
        subscriber.presence.unsettled += count
        subscriber.presence.was_alone = self._is_alone
        self._core.in_flight += count
        group.delivered += count
        group.topic.delivered += count
        self._core.totals.delivered += count
        self._core.expires(group, self.mono_ms + subscriber.lease_ms)

    def _withhold(self, group: Group, row: TaskRow) -> None:
        """Delay or expire a task that was taken from the ready queue and must not be delivered."""
        ordering, must_wait = self._core.orderings.by_group.get(group), row.due_ms > self.now_ms
        if ordering is not None:
            ordering.drop_undelivered(row, stays_holder=must_wait)
        if must_wait:
            # The clock went back to before the due time, so the task waits as if for a retry.
            self._core.wait(group, row.id, row.due_ms)
            group.withheld[row.id] = priority_of(row)
            if ordering is not None:
                ordering.note_wait(row)
            return
        self._core.lifetimes.end(row)
        self._firing.expire(group, row)

    def _put_back(self, group: Group, ids: list[int]) -> None:
        """Put the tasks for which ``_lease_all`` has no room back into the ready queue."""
        if self._picked is None:
            group.ready.put_back(ids)
        else:
            _put_back(group, ids, self._picked[-len(ids) :])

    def _priority_at(self, group: Group, index: int) -> int:
        return group.ready.priority_at(index) if self._picked is None else self._picked[index]


@dataclass(slots=True, eq=False)
class LeaseBatch:
    """Tasks that are leased in one step: due tasks just taken from a group's ready queue, with rows
    in memory, without earlier attempts or a time to live. It is not a batch of the store."""

    ids: Sequence[int]
    rows: list[TaskRow]
    size_bytes: int
    """The sum of ``task_bytes`` of all tasks of the batch."""
    marks: list[int] | None
    """The marks of the tasks' order keys; None if no task has an order key."""
    traits: list[Traits] | None
    """The traits of the tasks; None if all are ``PLAIN``."""

    def part(self, places: Sequence[int]) -> LeaseBatch:
        """Return a batch of the tasks at these indexes, with the ``size_bytes`` of the whole."""
        marks, traits = self.marks, self.traits
        return LeaseBatch(
            list(map(self.ids.__getitem__, places)),
            list(map(self.rows.__getitem__, places)),
            self.size_bytes,
            None if marks is None else list(map(marks.__getitem__, places)),
            None if traits is None else list(map(traits.__getitem__, places)),
        )

    def leases(
        self, group: Group, subscriber: Subscriber, epoch: int, mono_ms: int
    ) -> dict[int, Lease]:
        """Return id → new lease for the first delivery of each task, beginning now."""
        leases = map(
            Lease,
            self.ids,
            repeat(group),
            repeat(subscriber),
            repeat(1),
            repeat(epoch),
            repeat(mono_ms),
            repeat(mono_ms + subscriber.lease_ms),
            [row[1] for row in self.rows],
            repeat(PLAIN) if self.traits is None else self.traits,
            repeat(NO_PAST),
            repeat(0) if self.marks is None else self.marks,
        )
        return dict(zip(self.ids, leases, strict=True))


def lease_batch_of(
    resident: Mapping[int, TaskRow], group: Group, ids: Sequence[int], now_ms: int
) -> LeaseBatch | None:
    """Return these ready tasks of a group as a batch, or None if some need individual decisions.
    ``resident`` contains the rows in memory."""
    if not ids or group.ready.stale or not _are_first_attempts(group, ids):
        return None
    if group.unjudged_id and min(ids) <= group.unjudged_id:
        return None
    rows: list[Any] = list(map(resident.get, ids))
    if not all(rows):
        return None
    _, dues_ms, _, bodies, options = zip(*rows, strict=True)
    if max(dues_ms) > now_ms:
        return None
    size_bytes = sum(map(len, bodies))
    if not any(options):
        return LeaseBatch(ids, rows, size_bytes, None, None)
    if not all(options):
        return None
    columns = columns_of(options)
    marks = marks_of(columns)
    if not is_absent(columns.ttl_ms) or (marks is not None and not all(marks)):
        return None
    traits: list[Traits] | None = None
    others = (columns.key, columns.retry, columns.replayed)
    if any(columns.priority) or not all(map(is_absent, others)):
        traits = list(map(traits_of, rows))
    return LeaseBatch(ids, rows, size_bytes + columns_bytes(columns, options), marks, traits)


def _are_first_attempts(group: Group, ids: Sequence[int]) -> bool:
    """Return whether none of these tasks has had an attempt in the group."""
    attempts, numbers = group.delivery_attempts, group.numbers
    return (not attempts or attempts.keys().isdisjoint(ids)) and (
        not numbers or numbers.keys().isdisjoint(ids)
    )


def share_out(
    preferred: Sequence[Subscriber | None], room: Mapping[Subscriber, int]
) -> tuple[dict[Subscriber, list[int]], bool]:
    """Distribute the indexes of ``preferred`` among subscribers: each goes to its preferred
    subscriber if that has room, otherwise to another one. Return (subscriber → indexes, whether an
    index went to another one). ``room`` must suffice for all indexes."""
    numbers: dict[Any, int] = {subscriber: number for number, subscriber in enumerate(room)}
    choices: Any = list(map(numbers.get, preferred, repeat(len(room))))
    places = sorted(range(len(preferred)), key=choices.__getitem__)
    counts, begin = Counter(choices), 0
    parts: dict[Subscriber, list[int]] = {}
    others: list[int] = []
    for subscriber, number in numbers.items():
        end = begin + min(counts[number], room[subscriber])
        parts[subscriber] = places[begin:end]
        begin += counts[number]
        others += places[end:begin]
    others = sorted(others + places[begin:])
    has_others = bool(others)
    while others:
        left = {s: count for s in room if (count := room[s] - len(parts[s]))}
        share = -(-len(others) // len(left))
        for subscriber, count in left.items():
            parts[subscriber] += others[: min(share, count)]
            del others[: min(share, count)]
    return {s: places for s, places in parts.items() if places}, has_others


class RowReading:
    """Tracks the rows of ready tasks that must be read because they are not in memory."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._aside_left: int | None = None
        """How many more tasks of the current group can be set aside; None if not yet computed."""
        self._allowed = 0
        """How many deliveries the rates of the current group allow now."""

    def begin(self, allowed: int) -> None:
        """Begin with a new current group, which can get ``allowed`` deliveries now."""
        self._aside_left, self._allowed = None, allowed

    def room_to_set_aside(self, group: Group) -> int:
        """Return how many more rows the group's credit allows to read, ignoring missing ones."""
        if self._aside_left is None:
            config, reading = self._core.config, self._being_read(group)
            limit = min(
                self._allowed, config.loading_max, reading + config.delivery_frame_tasks_max
            )
            self._aside_left = group.credit_up_to(limit) - reading
        return self._aside_left

    def _being_read(self, group: Group) -> int:
        missing, replay = self._core.missing, group.topic.replays.get(group)
        if not missing and replay is None and not group.isolated:
            return len(group.loading)
        # Tasks that a replay has not reached, and tasks that wait to be alone, are not being read.
        return sum(
            task_id not in missing
            and task_id not in group.isolated
            and not (replay is not None and replay.is_ahead(task_id))
            for task_id in group.loading
        )

    def set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Set aside a ready task until its row is read."""
        if self._aside_left is not None:
            self._aside_left -= 1
        group.loading[task_id] = priority
        self._core.ready_rows_to_read.setdefault(group, []).append(task_id)

    def read_ahead(self, group: Group) -> None:
        """Read more rows of the current group's backlog than its subscribers have credit for, if
        rows of the group must be read and there is room."""
        if self._aside_left is None or not self._core.reads_ahead:
            return
        ids = group.ready.take(max(0, READ_AHEAD_TASKS - self._being_read(group)))
        for index, task_id in enumerate(ids):
            priority = group.ready.priority_at(index)
            if group.ready.stale and group.ready.pop_stale(task_id, priority):
                continue
            if task_id in self._core.resident_rows:
                group.ready.put_back(ids[index:])
                return
            self.set_aside(group, task_id, priority)

    def process_rows(self, group: Group, ids: Iterable[int], rows: dict[int, TaskRow]) -> None:
        """Make tasks that were set aside ready again. ``rows`` contains the rows that were read.
        Rows of tasks that can be delivered at once stay in memory regardless of the budget, because
        a read is bounded; other rows stay while there is room. A task without a row is missing and
        stays set aside until its row is found."""
        core, ids = self._core, list(ids)
        credit, rejoining = group.credit_up_to(len(ids)), core.orderings.rejoining_ids(group)
        core.make_room()
        back: list[tuple[int, int]] = []
        for task_id in ids:
            row = rows.get(task_id)
            if row is not None and task_id in group.isolated:
                group.isolated[task_id] = False
                core.keep(row)
                continue
            if row is None or task_id in rejoining or group.loading.pop(task_id, None) is None:
                continue
            if credit > 0 or core.has_room:
                core.keep(row)
                credit -= 1
            back.append((task_id, priority_of(row)))
        for task_id, priority in reversed(back):
            group.ready.push_front(task_id, priority)
        core.wake(group)

    def return_unread(self, group: Group, ids: Sequence[int]) -> None:
        """Make tasks that were set aside ready again without reading their rows, because no
        subscriber can take them now."""
        rejoining = self._core.orderings.rejoining_ids(group)
        for task_id in reversed(ids):
            if task_id in group.isolated:
                group.isolated[task_id] = False
                continue
            priority = None if task_id in rejoining else group.loading.pop(task_id, None)
            if priority is not None:
                group.ready.push_front(task_id, priority)
        self._core.wake(group)


class Isolation:
    """Selects connections for deliveries that must be alone on a connection.
    ``Core.kept_connections`` contains the connections that are kept free for them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._deaths_alone = core.config.deaths_alone

    def is_last(self, deaths: int) -> bool:
        """Return whether one more death makes a task with ``deaths`` a dead letter."""
        return deaths >= self._deaths_alone

    def set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Set a task aside until a connection can take it alone."""
        group.loading[task_id] = priority
        group.isolated[task_id] = False

    def next(self, group: Group, mono_ms: int) -> tuple[int, Subscriber] | None:
        """Return the next task and a subscriber with a free connection, or None."""
        task_id = self._first(group)
        if task_id is None:
            self._core.stop_keeping_free(group)
            return None
        subscriber = self._free(group, mono_ms)
        return None if subscriber is None else (task_id, subscriber)

    def _first(self, group: Group) -> int | None:
        """Return the task that has waited longest for isolation. Drop tasks that have left."""
        for task_id in list(islice(group.isolated, EXAMINED_MAX)):
            if task_id not in group.loading:
                del group.isolated[task_id]
            elif task_id not in self._core.missing:
                return task_id
        return None

    def _free(self, group: Group, mono_ms: int) -> Subscriber | None:
        keep, best = self._core.kept_connections.get(group), None
        for subscriber in islice(group.able, EXAMINED_MAX):
            presence = subscriber.presence
            is_kept = keep is not None and keep.presence is presence
            if subscriber.room <= 0 or (presence.kept_for is not None and not is_kept):
                continue
            if presence.was_alone and len(group.ready) and not is_kept:
                continue
            if not presence.unsettled:
                return subscriber
            if best is None or presence.unsettled < best.presence.unsettled:
                best = subscriber
        if keep is None and best is not None:
            self.keep_free(group, best.presence, mono_ms)
        return None

    def keep_free(self, group: Group, presence: Presence, mono_ms: int) -> None:
        """Keep a connection free for the group's next isolated task, for at most ``KEEP_MS``. The
        group keeps at most one connection free."""
        keep = self._core.kept_connections.get(group)
        if presence.kept_for is None and (keep is None or keep.presence is None):
            presence.kept_for = group
            self._core.kept_connections[group] = Keep(presence, mono_ms + KEEP_MS)

    def reserve(self, group: Group, subscriber: Subscriber) -> None:
        """Reserve the connection for the task until its delivery is settled."""
        self._core.stop_keeping_free(group)
        presence = subscriber.presence
        if presence.unsettled:  # an at-most-once delivery is already settled
            presence.kept_for = group

    def tick(self, mono_ms: int) -> None:
        """Stop keeping connections free that have been kept free for ``KEEP_MS``."""
        core = self._core
        kept = core.kept_connections
        for group, keep in [(g, k) for g, k in kept.items() if k.until_mono_ms <= mono_ms]:
            core.stop_keeping_free(group)
            if keep.presence is not None and group.isolated:
                kept[group] = Keep(None, mono_ms + KEEP_MS)
            core.wake(group)


class Subscriptions:
    """The subscriptions and pulls that can get deliveries, and the state of their connections."""

    def __init__(self, core: Core, broadcasts: Broadcasts) -> None:
        self._core = core
        self._broadcasts = broadcasts

    def subscribe(self, subscriber: Subscriber) -> None:
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.join(subscriber)
            return
        subscriber.group.subscribers[subscriber] = None
        subscriber.presence.subscribers[subscriber] = None
        if subscriber.group.is_ordered:
            self._core.orderings.by_group[subscriber.group].preferences.join(subscriber)
        self._core.ledger.changed[subscriber.group] = None
        self._core.subscribers += 1
        self._core.reconsider(subscriber)
        subscriber.group.was_used = True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a subscription. It gets no more deliveries, but keeps its leases."""
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.leave(subscriber)
            return
        group = subscriber.group
        subscriber.presence.subscribers.pop(subscriber, None)
        if subscriber in group.subscribers:
            del group.subscribers[subscriber]
            group.able.pop(subscriber, None)
            if group.is_ordered:
                self._core.orderings.by_group[group].preferences.leave(subscriber)
            self._core.ledger.changed[group] = None
            self._core.subscribers -= 1

    def end_broadcasts(self, topic: Topic, message: str) -> None:
        """End the broadcast subscriptions of a deleted topic."""
        for broadcaster in list(topic.broadcasters):
            self.unsubscribe(broadcaster)
            self._core.cut.append((broadcaster, "not_found", message))

    def consumer_responded(self, presence: Presence, subscribers: Iterable[Subscriber]) -> None:
        """Resume deliveries to the subscribers of a connection whose consumer has responded."""
        presence.doubted = False
        for subscriber in subscribers:
            self._core.reconsider(subscriber)

    def disconnected(self, subscriber: Subscriber, mono_ms: int, death: str = "") -> None:
        """End the subscription of a broken connection. Its leases end after the grace time unless
        they are settled on another connection. ``death`` describes the cause if the connection was
        not closed deliberately."""
        self.unsubscribe(subscriber)
        subscriber.death = death
        presence = subscriber.presence
        if presence.kept_for is not None and self._core.is_kept_free(presence):
            self._core.stop_keeping_free(presence.kept_for)
        presence.kept_for = None
        subscriber.gone_mono_ms = mono_ms + self._core.config.reconnect_grace_ms
        self._core.expires(subscriber.group, subscriber.gone_mono_ms)


def _buckets(group: Group) -> list[Bucket]:
    """Return the token buckets of the group and of its topic."""
    return [bucket for bucket in (group.bucket, group.topic.bucket) if bucket is not None]


def _next_able(group: Group) -> Subscriber | None:
    """Return the next subscriber if it has credit, otherwise None. Rotate it, or remove it if
    full."""
    subscriber, _ = group.able.popitem(last=False)
    if subscriber.room <= 0:
        return None  # it is added again when it regains credit
    group.able[subscriber] = None
    return subscriber if subscriber.credit > 0 else None  # else it is kept free


def _put_back(group: Group, ids: Sequence[int], priorities: Sequence[int]) -> None:
    for task_id, priority in zip(reversed(ids), reversed(priorities), strict=True):
        group.ready.push_front(task_id, priority)


def _is_expired(row: TaskRow, now_ms: int) -> bool:
    end_ms = ttl_end_ms(row.due_ms, row.options)
    return end_ms is not None and now_ms >= end_ms
