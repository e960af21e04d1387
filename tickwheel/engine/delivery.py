"""The second half: what is due becomes ready, or expires; what is ready is leased to subscribers
that have credit; broadcasts (``broadcasts.py``) get what comes due while they are connected.

Invariants:

* A task is handed out only if its due time has come by the ``now_ms`` of the call; nothing of a
  group that is held, and nothing beyond a rate.
* What is delivered at most once is finished in the open batch and written when that is durable.
"""

from __future__ import annotations

from itertools import chain, filterfalse
from typing import TYPE_CHECKING

from tickwheel.engine.apart import Apart
from tickwheel.engine.broadcasts import Broadcaster, Broadcasts
from tickwheel.engine.due_batch import DueBatch
from tickwheel.engine.events import EXPIRED
from tickwheel.engine.lease_batch import LeaseBatch, lease_batch_of, share_out
from tickwheel.engine.ownership import wants
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import (
    DELIVERY_BYTES,
    PLAIN,
    Dispatch,
    Group,
    Item,
    Lease,
    Presence,
    Subscriber,
    Topic,
    Traits,
    has_order,
    priority_of,
    traits_of,
    ttl_end_ms,
)
from tickwheel.model.filters import STEPS_PER_TICK
from tickwheel.model.records import (
    ID_MAX,
    NO_BODY,
    NO_PAST,
    Outcome,
    ProgressState,
    TaskRow,
    TaskSnapshot,
    options_bytes,
    order_of,
    task_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.engine.ordering import Ordering
    from tickwheel.engine.ownership import Ownership
    from tickwheel.engine.queues import Bucket
    from tickwheel.engine.settlement import Settlement

PREFERRED_MAX = 64
"""How many subscribers are considered when order keys prefer one of them."""
DISPATCHED_MAX = 1 << 30
READ_AHEAD_TASKS = 1_000
"""How many rows of a backlog are read beyond what the group's subscribers can take now."""


class Delivery:
    """Makes due tasks ready or expired, and leases ready ones to subscribers in turn."""

    def __init__(self, core: Core, ownership: Ownership, settlement: Settlement) -> None:
        self._core = core
        self._ownership = ownership
        self._settlement = settlement
        self._broadcasts = Broadcasts(core)
        self._apart = Apart(core)
        self._is_alone = False
        """Whether the task that is being leased may be one whose consumers have died."""
        self._bytes_left = 0
        self._aside_left: int | None = None
        """How many more tasks of the group at hand may be set aside to be read; None: not counted
        yet."""
        self._allowed = 0
        """How many deliveries the rates of the group at hand allow now."""
        self._picked: dict[int, int] | None = None
        """Id → priority of picked tasks that are being leased; None: those last taken from the
        ready queue."""

    # --- due -------------------------------------------------------------------------------

    def fire(self, now_ms: int, limit: int) -> bool:
        """Hand up to ``limit`` due handles to their groups. True: call again at once."""
        core = self._core
        core.steps_left = STEPS_PER_TICK
        more_behind = bool(core.orderings.behind) and self._catch_up(now_ms)
        room = core.config.loading_max + core.missing_apart - len(core.firing)
        if room <= 0:
            return more_behind
        ids, dues, more = core.wheel.advance(now_ms, min(limit, room))
        resident, retrying = core.resident_rows, core.retrying
        firing = core.firing
        is_unloaded = self._ownership.unloaded_ms is not None
        due_batch = DueBatch(core, self._ownership, now_ms)
        for task_id, due_ms in zip(ids, dues, strict=True):
            if task_id in retrying:
                due_batch.flush()
                if self._retry_due(task_id, due_ms, now_ms):
                    continue
            row = resident.get(task_id)
            if row is None:
                firing[task_id] = due_ms
                core.wants.append(task_id)
            elif row[1] == due_ms:
                # One with an order key may come before another that is due before it.
                is_early = (firing or is_unloaded) and row[4] is not None and has_order(row)
                if is_early or core.steps_left <= 0:
                    core.orderings.behind[task_id] = row
                    firing[task_id] = due_ms
                elif not due_batch.add(row):
                    due_batch.flush()
                    self._due(row, now_ms)
        due_batch.flush()
        upcoming = core.wheel.take_upcoming(limit)
        if upcoming and core.has_room:
            not_resident = filterfalse(resident.__contains__, upcoming)
            core.wants += [task_id for task_id in not_resident if task_id not in retrying]
        return more or more_behind or core.steps_left <= 0

    def loaded(self, asked: Iterable[int], rows: dict[int, TaskRow], now_ms: int) -> None:
        """Take the rows that ``wants`` asked for. A due task whose row is missing stays until it is
        found."""
        core = self._core
        core.steps_left = STEPS_PER_TICK
        for task_id in asked:
            row = rows.get(task_id)
            if row is None:
                continue
            due_ms = core.firing.get(task_id)
            if due_ms is None:
                if core.has_room and row.due_ms > now_ms and core.is_scheduled(row):
                    core.keep(row)
            elif row.due_ms == due_ms and (has_order(row) or core.steps_left <= 0):
                self._fall_behind(row)
            else:
                del core.firing[task_id]
                if row.due_ms == due_ms:
                    self._due(row, now_ms)
        if core.orderings.behind:
            self._catch_up(now_ms)

    def _fall_behind(self, row: TaskRow) -> None:
        """Let a task with its row come due later. Without room, its body is read again then."""
        core = self._core
        if core.has_room:
            core.keep(row)
        elif not core.topic(row.topic).broadcasters:
            row = row._replace(body=NO_BODY)
        core.orderings.behind[row.id] = row

    def _catch_up(self, now_ms: int) -> bool:
        """Tasks that have fired and waited come due, in order. Those with an order key not before
        all that are due before them have their rows, or those may come behind them. Whether there
        was too much to judge for this time."""
        core = self._core
        firing, behind, missing = core.firing, core.orderings.behind, core.missing
        for task_id in [i for i, row in behind.items() if firing.get(i) != row.due_ms]:
            del behind[task_id]  # it has left in another way
        reading = (at for i, at in firing.items() if i not in behind and i not in missing)
        until_ms = min(reading, default=ID_MAX)
        if self._ownership.unloaded_ms is not None:
            until_ms = min(until_ms, self._ownership.unloaded_ms)
        ready = [row for row in behind.values() if row.due_ms < until_ms or not has_order(row)]
        for row in sorted(ready, key=lambda row: (row.due_ms, order_of(row))):
            if core.steps_left <= 0:
                return True
            del behind[row.id]
            if row.body is NO_BODY and core.topic(row.topic).broadcasters:
                core.wants.append(row.id)  # somebody wants the body since
                continue
            del firing[row.id]
            self._due(row, now_ms)
        return False

    def found_again(self, known: TaskSnapshot, now_ms: int) -> None:
        """The row of a missing task was found: whatever waited for it goes on."""
        row, core = known.row, self._core
        rows = {row.id: row}
        if row.id in core.firing:
            self.loaded([row.id], rows, now_ms)
        if row.id in core.lifetimes.fired:
            self.lapsed([row.id], {row.id: known}, now_ms)
        for group in core.topic(row.topic).groups.values():
            if row.id in group.loading:
                self.loaded_ready(group, [row.id], rows)

    def _due(self, row: TaskRow, now_ms: int) -> None:
        core = self._core
        if row.due_ms > now_ms:
            # The clock went back while the row was read: it fires again when it is due.
            core.wheel.add(row.id, row.due_ms)
            return
        topic = core.topic(row.topic)
        if topic.closing and not topic.live_groups and not self._ownership.was_closed(topic, row):
            topic.deferred[row.id] = row.due_ms
            core.drop(row.id)
            return
        topic.scheduled -= 1
        core.scheduled -= 1
        if topic.default_backlog is not None and topic.settings.broadcast_only:
            self._broadcasts.offer(topic, row, now_ms)
            self.expire(topic.default_backlog, row)
            return
        self.make_ready(topic, row, now_ms)
        if topic.broadcasters and (row.options is None or row.options.replayed is None):
            self._broadcasts.offer(topic, row, now_ms)

    def make_ready(self, topic: Topic, row: TaskRow, now_ms: int) -> None:
        """The task is owed to the groups of its topic from now on."""
        core = self._core
        if not core.has_room or row.body is NO_BODY:
            core.drop(row.id)
        elif row.id not in core.resident_rows:
            core.keep(row)
        priority, ordered = 0, False
        if row.options is not None:
            priority, ordered = row.options.priority, row.options.order_key is not None
            core.lifetimes.begin(row)
            if row.options.replayed is not None:
                self._ready_again(topic, row, now_ms)
                return
        if topic.default_backlog is not None:
            self._wait_for_group(topic.default_backlog, row, now_ms)
            return
        groups = topic.live_groups
        if len(groups) > 1 or topic.closing or topic.filtering:
            groups = self._ownership.assign(topic, groups, row)
        for group in groups:
            if ordered or group.is_ordered:
                core.come(group, row, now_ms)
            else:
                group.ready.push(row.id, priority, now_ms)
            if group.able:
                core.runnable[group] = None
            elif group.hold_intervals is None or group.hold_intervals.current is None:
                core.ledger.judge(group, now_ms)

    def _wait_for_group(self, default_backlog: Group, row: TaskRow, now_ms: int) -> None:
        """A task is due whose topic has no group yet: it waits in the topic's default backlog."""
        core = self._core
        core.come(default_backlog, row, now_ms)
        if default_backlog.hold_intervals is None:
            core.ledger.judge(default_backlog, now_ms)
        if default_backlog.ready_count >= core.config.backlog_max:
            core.full_topics[default_backlog.topic.name] = None

    def _ready_again(self, topic: Topic, row: TaskRow, now_ms: int) -> None:
        """Make a replayed task, which stands for another, ready in its group if that wants it."""
        core = self._core
        for group in self._ownership.assign_again(topic, row):
            core.come(group, row, now_ms)
            if group.able:
                core.runnable[group] = None
            elif group.hold_intervals is None or group.hold_intervals.current is None:
                core.ledger.judge(group, now_ms)

    def _retry_due(self, task_id: int, at_ms: int, now_ms: int) -> bool:
        """A handle fired: the group whose wait it ends, if there is one, gets the task again."""
        core = self._core
        for group in core.retrying[task_id]:
            if group.waiting.get(task_id) == at_ms:
                break
        else:
            return False
        del group.waiting[task_id]
        core.waited(group, task_id)
        attempts = group.delivery_attempts.get(task_id)
        priority = attempts.priority if attempts else 0
        if group.is_ordered:
            core.orderings.of[group].retry(task_id, priority, now_ms)
        else:
            group.ready.push(task_id, priority, now_ms)
        group.retried += 1
        core.totals.retried += 1
        core.wake(group)
        return True

    # --- times to live ---------------------------------------------------------------------

    def lapse(self, now_ms: int, limit: int) -> bool:
        """Ask for the records of up to ``limit`` tasks whose ttl is over while nobody has taken
        them. True: call again at once."""
        core = self._core
        ids, more = core.lifetimes.fire(now_ms, limit, core.config.lapsing_max + core.missing_apart)
        core.wants_lapsed += ids
        return more

    def lapsed(self, asked: Iterable[int], known: Mapping[int, TaskSnapshot], now_ms: int) -> None:
        """Expire ready and waiting tasks whose records ``wants_lapsed`` asked for."""
        core = self._core
        lifetimes = core.lifetimes
        for task_id in asked:
            found = known.get(task_id)
            if task_id not in lifetimes.fired or found is None:
                # It has left in another way, or its row is missing: then it stays where it is.
                continue
            end_ms = ttl_end_ms(found.row.due_ms, found.row.options)
            if end_ms is None or now_ms < end_ms:
                # The clock went back while it was looked up.
                for _ in range(lifetimes.fired.pop(task_id)):
                    lifetimes.begin(found.row)
                continue
            for group in self._ownership.groups_of(found):
                if task_id not in group.flight and task_id in lifetimes.fired:
                    attempts = group.delivery_attempts.get(task_id)
                    core.leave(group, found.row)
                    if attempts is not None:
                        group.delivery_attempts[task_id] = attempts
                    self.expire(group, found.row)

    def let_go(self, known: TaskSnapshot) -> None:
        """End a task that came due before its topic became one for broadcasts alone."""
        topic = self._core.topic(known.row.topic)
        if topic.default_backlog is None or self._core.is_scheduled(known.row):
            return
        self._core.leave(topic.default_backlog, known.row)
        self.expire(topic.default_backlog, known.row)

    def expire(self, group: Group, row: TaskRow) -> None:
        """End the share of ``group`` in a task whose time to live is over; it is out already."""
        core, task_id = self._core, row.id
        core.totals.expired += 1
        group.expired += 1
        attempts = group.delivery_attempts.pop(task_id, None)
        attempt = core.number(group, task_id) if attempts is None else attempts.attempt
        last = self._ownership.finish(group, row, Outcome.EXPIRED)
        core.lost_task(group.topic)
        if not last:
            core.note_done(task_id, group, attempt, 0, ProgressState.EXPIRED)
        if core.recorder is not None:
            core.recorder.ended(group.topic.name, group.name, EXPIRED, task_id, last=last)

    # --- dispatch ----------------------------------------------------------------------------

    def dispatch(self, now_ms: int, mono_ms: int, limit: int) -> tuple[list[Dispatch], bool]:
        """Deliveries of about ``limit`` tasks, and whether there is more to deliver at once."""
        core = self._core
        out: list[Dispatch] = []
        looked_at = 0
        self._bytes_left = core.config.dispatch_bytes_max
        core.steps_left = STEPS_PER_TICK
        if core.ledger.changed:
            core.ledger.judge_changed(now_ms)
        if core.throttled:
            self._unthrottle(mono_ms)
        core.orderings.tick(limit, now_ms, mono_ms)
        if core.keeps:
            self._apart.tick(mono_ms)
        self._bytes_left -= self._broadcasts.flush(out, self._bytes_left, now_ms)
        while core.runnable and looked_at < limit and self._bytes_left > 0 and self._may_lease:
            if core.steps_left <= 0:
                break
            group = next(iter(core.runnable))
            # To the end of the line, so that no group waits for another's backlog.
            del core.runnable[group]
            count = self._dispatch_group(group, now_ms, mono_ms, out)
            if not count or (group.hold_intervals is not None and not len(group.ready)):
                core.ledger.judge(group, now_ms)
            if count:
                looked_at += count
                core.wake(group)
        core.ledger.could_go_on(core.runnable, now_ms)
        unfinished = bool(core.orderings.gathered) or (bool(core.runnable) and self._may_lease)
        return out, unfinished or self._broadcasts.can_go_on

    @property
    def _may_lease(self) -> bool:
        return self._core.in_flight < self._core.config.in_flight_max

    def _dispatch_group(self, group: Group, now_ms: int, mono_ms: int, out: list[Dispatch]) -> int:
        """Lease at most one frame to each subscriber; how many ready entries were used up."""
        core, able = self._core, group.able
        waiting = allowed = len(group.ready)
        if not able or not (waiting or group.apart) or group.is_held:
            return 0
        buckets = _buckets(group)
        if buckets:
            allowed = min(bucket.left(mono_ms) for bucket in buckets)
            if allowed <= 0:
                core.throttled[group] = max(bucket.next_mono_ms() for bucket in buckets)
                return 0
        used = self._dispatch_alone(group, now_ms, mono_ms, out) if group.apart else 0
        allowed -= used
        if not waiting or not able or allowed <= 0:
            return used
        share = min(-(-waiting // len(able)), core.config.delivery_frame_tasks_max)
        allowed = min(
            allowed, core.config.in_flight_max - core.in_flight, self._judged_at_once(group)
        )
        self._aside_left, self._allowed = None, allowed
        if group.is_ordered and core.orderings.of[group].has_preferences:
            return used + self._dispatch_preferred(group, allowed, now_ms, mono_ms, out)
        for _ in range(len(able)):
            if not len(group.ready) or min(allowed, self._bytes_left, core.steps_left) <= 0:
                break
            subscriber = _next_able(group)
            if subscriber is None:
                continue
            if subscriber.at_most_once and core.handed_bytes >= core.config.handed_bytes_max:
                core.held_back[group] = None
                continue
            ids = group.ready.take(min(subscriber.credit, share, allowed))
            items, back = self._hand_out(group, subscriber, ids, now_ms, mono_ms, out)
            used += len(ids) - back
            allowed -= items
            if back and not items:
                break  # the next in line has to be read first
        if self._aside_left is not None and core.reads_ahead:
            self._read_ahead(group)
        return used

    def _judged_at_once(self, group: Group) -> int:
        """How many tasks the group's filter may have to judge in this dispatch."""
        if not group.unjudged_id or group.judge is None:
            return DISPATCHED_MAX
        return max(1, self._core.steps_left // group.judge.steps)

    def _dispatch_alone(self, group: Group, now_ms: int, mono_ms: int, out: list[Dispatch]) -> int:
        """Lease a task whose consumers have died to a connection of its own; returns how many were
        tried."""
        found = self._apart.next(group, mono_ms)
        if found is None:
            return 0
        task_id, subscriber = found
        if task_id not in self._core.resident_rows:
            self._apart.keep_free(group, subscriber.presence, mono_ms)
            if not group.apart[task_id]:
                group.apart[task_id] = True
                self._core.wants_ready.setdefault(group, []).append(task_id)
            return 0
        del group.apart[task_id]
        self._picked, self._is_alone = {task_id: group.loading.pop(task_id)}, True
        self._aside_left, self._allowed = None, 1
        items, _ = self._hand_out(group, subscriber, [task_id], now_ms, mono_ms, out)
        self._picked, self._is_alone = None, False
        if items:
            self._apart.handed_out(group, subscriber)
        return 1

    def _dispatch_preferred(
        self, group: Group, allowed: int, now_ms: int, mono_ms: int, out: list[Dispatch]
    ) -> int:
        """``_dispatch_group`` where a key's tasks go to its last subscriber, if that has credit."""
        ordering, room = self._core.orderings.of[group], self._room(group)
        ids = group.ready.take(min(allowed, sum(room.values())))
        lease_batch = self._lease_batch(group, ids, now_ms)
        if lease_batch is None:
            return self._divide(group, ordering, ids, room, now_ms, mono_ms, out)
        wanted: Sequence[Subscriber | None] = [None] * len(ids)
        had_them = False
        if lease_batch.marks is not None:
            wanted, had_them = ordering.preferred(lease_batch.marks)
        parts, has_others = share_out(wanted, room)
        self._take(group, lease_batch)
        for subscriber, places in parts.items():
            part = lease_batch.part(places)
            if part.marks is not None and (has_others or not had_them):
                ordering.remember(part.marks, subscriber)
            group.able.move_to_end(subscriber)
            items = self._lease_as_batch(group, subscriber, part, mono_ms)
            self._handed(group, subscriber, items, now_ms, mono_ms, out)
        return len(ids)

    def _divide(
        self,
        group: Group,
        ordering: Ordering,
        ids: list[int],
        room: dict[Subscriber, int],
        now_ms: int,
        mono_ms: int,
        out: list[Dispatch],
    ) -> int:
        """Lease tasks from the ready queue of which some have to be looked at one by one."""
        core, resident, used = self._core, self._core.resident_rows, 0
        priorities = group.ready.priorities(ids)
        marks = [0 if (row := resident.get(i)) is None else ordering.order_of(row) for i in ids]
        wanted, _ = ordering.preferred(marks)
        parts, _ = share_out(wanted, room)
        for subscriber, places in parts.items():
            group.able.move_to_end(subscriber)
            some = [ids[at] for at in places]
            if self._bytes_left <= 0 or not subscriber.is_subscribed:
                _put_back(group, some, priorities)
                continue
            self._picked = priorities
            _, back = self._hand_out(group, subscriber, some, now_ms, mono_ms, out)
            self._picked = None
            used += len(some) - back
        if self._aside_left is not None and core.reads_ahead:
            self._read_ahead(group)
        return used

    def _room(self, group: Group) -> dict[Subscriber, int]:
        """How many tasks each of the group's subscribers can take now, in one frame each."""
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

    def _hand_out(
        self,
        group: Group,
        subscriber: Subscriber,
        ids: list[int],
        now_ms: int,
        mono_ms: int,
        out: list[Dispatch],
    ) -> tuple[int, int]:
        """Lease one frame; how many tasks are in it, and how many of ``ids`` were put back."""
        lease_batch, back = self._lease_batch(group, ids, now_ms), 0
        if lease_batch is None:
            items, back = self._lease_all(group, subscriber, ids, now_ms, mono_ms)
            if not items:
                return 0, back
        else:
            self._take(group, lease_batch)
            if lease_batch.marks is not None:
                self._core.orderings.of[group].remember(lease_batch.marks, subscriber)
            items = self._lease_as_batch(group, subscriber, lease_batch, mono_ms)
        self._handed(group, subscriber, items, now_ms, mono_ms, out)
        return len(items), back

    def _lease_batch(self, group: Group, ids: Sequence[int], now_ms: int) -> LeaseBatch | None:
        """These tasks as a lease batch, if they can be handed out as one and fit into a frame."""
        core = self._core
        ordering = core.orderings.of[group] if group.is_ordered else None
        if self._ownership.may_share(group) or (ordering is not None and ordering.has_shares):
            return None
        lease_batch = lease_batch_of(core.resident_rows, group, ids, now_ms)
        if lease_batch is None or (ordering is not None and not ordering.takes(lease_batch)):
            return None
        size_bytes = lease_batch.size_bytes + len(ids) * DELIVERY_BYTES
        return lease_batch if size_bytes <= core.config.delivery_frame_bytes_max else None

    def _take(self, group: Group, lease_batch: LeaseBatch) -> None:
        """Release the resident rows of a batch that is about to be leased."""
        core, resident, count = self._core, self._core.resident_rows, len(lease_batch.ids)
        for task_id in lease_batch.ids:
            del resident[task_id]
        core.resident_bytes -= lease_batch.size_bytes + count * ROW_OVERHEAD_BYTES
        self._bytes_left -= lease_batch.size_bytes + count * DELIVERY_BYTES
        if group.is_ordered:
            core.orderings.of[group].hand_out_all(lease_batch)

    def _lease_as_batch(
        self, group: Group, subscriber: Subscriber, lease_batch: LeaseBatch, mono_ms: int
    ) -> list[Item]:
        """Lease the tasks of a batch whose rows ``_take`` has released."""
        leases = lease_batch.leases(group, subscriber, self._core.epoch, mono_ms)
        group.flight |= leases
        self._core.unsaved += leases.values()
        return [(row, 1, NO_PAST) for row in lease_batch.rows]

    def _handed(
        self,
        group: Group,
        subscriber: Subscriber,
        items: list[Item],
        now_ms: int,
        mono_ms: int,
        out: list[Dispatch],
    ) -> None:
        """Make a frame of at least one delivery that was leased to one subscriber."""
        core = self._core
        for bucket in _buckets(group):
            bucket.take(len(items))
        self._count_delivered(group, subscriber, len(items), mono_ms + subscriber.lease_ms)
        causes = None
        if core.recorder is not None:
            causes = core.ledger.causes(group, items, now_ms)
            core.recorder.delivered(group, subscriber, items, now_ms, causes)
        if subscriber.at_most_once:
            self._finish_now(group, Dispatch(subscriber, items, now_ms, causes))
        else:
            out.append(Dispatch(subscriber, items, causes=causes))
        if subscriber.once:
            self.unsubscribe(subscriber)

    def _finish_now(self, group: Group, dispatch: Dispatch) -> None:
        """End at-most-once deliveries; their frame is written once the ends are durable."""
        core = self._core
        size_bytes = sum(task_bytes(row) + DELIVERY_BYTES for row, _, _ in dispatch.items)
        core.handed_bytes += size_bytes
        core.open.handed_bytes += size_bytes
        ids, attempts = [row.id for row, _, _ in dispatch.items], [n for _, n, _ in dispatch.items]
        unresolved = self._settlement.ack(group, core.epoch, ids, attempts)
        if unresolved:
            raise AssertionError("a delivery of this very call is not in flight")
        core.open.handed.append(dispatch)

    def _unthrottle(self, mono_ms: int) -> None:
        """Groups whose next token has come may deliver again, longest waiting first."""
        core = self._core
        for group in [g for g, at_ms in core.throttled.items() if at_ms <= mono_ms]:
            del core.throttled[group]
            core.wake(group)

    def next_token_mono_ms(self) -> int | None:
        """When the next token lets a delivery go (steady clock); None: no rate holds one back."""
        times = chain(self._core.throttled.values(), self._core.orderings.paced.values())
        return min(times, default=None)

    def _lease_all(
        self, group: Group, subscriber: Subscriber, ids: list[int], now_ms: int, mono_ms: int
    ) -> tuple[list[Item], int]:
        """Lease what can be delivered of ``ids``, and count what is put back for lack of room."""
        core = self._core
        resident, flight, unsaved = core.resident_rows, group.flight, core.unsaved
        unjudged_id = group.unjudged_id
        ordering = core.orderings.of[group] if group.is_ordered else None
        shared = self._ownership.shared()
        deadline_ms = mono_ms + subscriber.lease_ms
        items: list[Item] = []
        size_left, mark = core.config.delivery_frame_bytes_max, 0
        for index, task_id in enumerate(ids):
            row = resident.get(task_id)
            if row is None or group.stale or task_id <= unjudged_id or group.delivery_attempts:
                if row is None and self._left_to_set_aside(group) <= 0:
                    self._put_back(group, ids[index:])
                    break
                row = self._looked_at(group, task_id, row, index)
                if row is None:
                    continue
            _, due_ms, _, body, options = row
            size = len(body) + DELIVERY_BYTES + (0 if options is None else options_bytes(options))
            if size > size_left and items:
                self._put_back(group, ids[index:])
                break
            is_mortal = options is not None and options.ttl_ms is not None
            if due_ms > now_ms or (is_mortal and _is_over(row, now_ms)):
                self._withhold(group, row, now_ms)
                continue
            attempts = group.delivery_attempts.get(task_id) if group.delivery_attempts else None
            traits: Traits | None
            if ordering is None:
                traits = PLAIN if options is None else traits_of(row)
            else:
                mark, is_first = ordering.order_of(row), attempts is None or not attempts.was_had
                traits = ordering.hand_out(row, mark, subscriber, mono_ms, is_first=is_first)
            if traits is None:
                continue  # another one of its order key comes first
            if is_mortal:
                core.lifetimes.end(row)
            attempt, past = core.next_delivery(group, task_id)
            flight[task_id] = lease = Lease(
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
        self._bytes_left -= core.config.delivery_frame_bytes_max - size_left
        return items, len(ids) - index

    def _looked_at(
        self, group: Group, task_id: int, row: TaskRow | None, index: int
    ) -> TaskRow | None:
        """The row, if its task can be leased now; None: it has left, is to be read, is unwanted or
        lone."""
        if group.stale and group.is_stale(task_id):
            return None
        if row is None:
            self._set_aside(group, task_id, self._priority_at(group, index, task_id))
            return None
        is_left_out = task_id <= group.unjudged_id and self._is_left_out(group, row)
        return None if is_left_out or self._waits_to_be_alone(group, task_id, index) else row

    def _waits_to_be_alone(self, group: Group, task_id: int, index: int) -> bool:
        attempts = group.delivery_attempts.get(task_id)
        if attempts is None or self._is_alone or not self._apart.is_last(attempts.past.deaths):
            return False
        self._apart.set_aside(group, task_id, self._priority_at(group, index, task_id))
        return True

    def _is_left_out(self, group: Group, row: TaskRow) -> bool:
        """Whether the group's filter, which sees the task for the first time, leaves it out."""
        self._core.steps_left -= 0 if group.judge is None else group.judge.steps
        if wants(group, row):
            return False
        if group.is_ordered:
            self._core.orderings.of[group].taken(row)
        self._ownership.leave_out(group, row)
        return True

    def _count_delivered(
        self, group: Group, subscriber: Subscriber, count: int, deadline_ms: int
    ) -> None:
        subscriber.outstanding += count
        subscriber.presence.unsettled += count
        subscriber.presence.was_alone = self._is_alone
        self._core.in_flight += count
        group.delivered += count
        group.topic.delivered += count
        self._core.totals.delivered += count
        self._core.expires(group, deadline_ms)

    def _withhold(self, group: Group, row: TaskRow, now_ms: int) -> None:
        """Keep back a task that was taken from the ready queue and must not be delivered now."""
        ordering, must_wait = self._core.orderings.of.get(group), row.due_ms > now_ms
        if ordering is not None:
            ordering.taken(row, stays_holder=must_wait)
        if must_wait:
            # The clock went back below its due time: it waits again, as if for a retry.
            self._core.wait(group, row.id, row.due_ms)
            if ordering is not None:
                ordering.waits(row)
            return
        self._core.lifetimes.end(row)
        self.expire(group, row)

    def _put_back(self, group: Group, ids: list[int]) -> None:
        """Put the last tasks of ``_lease_all`` back into the ready queue, for lack of room."""
        if self._picked is None:
            group.ready.put_back(ids)
        else:
            _put_back(group, ids, self._picked)

    def _priority_at(self, group: Group, index: int, task_id: int) -> int:
        if self._picked is None:
            return group.ready.priority_at(index)
        return self._picked[task_id]

    # --- rows that have to be read -----------------------------------------------------------

    def _left_to_set_aside(self, group: Group) -> int:
        """How many more rows may be read: as many as the group has credit for. Missing rows do not
        count."""
        if self._aside_left is None:
            config, reading = self._core.config, self._being_read(group)
            most = min(self._allowed, config.loading_max, reading + config.delivery_frame_tasks_max)
            self._aside_left = group.credit_up_to(most) - reading
        return self._aside_left

    def _being_read(self, group: Group) -> int:
        missing, replay = self._core.missing, group.topic.replays.get(group)
        if not missing and replay is None and not group.apart:
            return len(group.loading)
        # What a replay keeps there until it comes to it is not being read either, nor is what waits
        # to be alone.
        return sum(
            task_id not in missing
            and task_id not in group.apart
            and not (replay is not None and replay.is_ahead(task_id))
            for task_id in group.loading
        )

    def _set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Set aside a ready task without a row in memory, to be delivered once that is read."""
        if self._aside_left is not None:
            self._aside_left -= 1
        group.loading[task_id] = priority
        self._core.wants_ready.setdefault(group, []).append(task_id)

    def _read_ahead(self, group: Group) -> None:
        """Read the next rows of the backlog, if there is room, before subscribers have credit for
        them."""
        ids = group.ready.take(max(0, READ_AHEAD_TASKS - self._being_read(group)))
        for index, task_id in enumerate(ids):
            if group.stale and group.is_stale(task_id):
                continue
            if task_id in self._core.resident_rows:
                group.ready.put_back(ids[index:])
                return
            self._set_aside(group, task_id, group.ready.priority_at(index))

    def loaded_ready(self, group: Group, asked: Iterable[int], rows: dict[int, TaskRow]) -> None:
        """Rows of ready tasks whose turn had come without a body in memory.

        Those that can be delivered at once are kept, whatever the budget: a load is bounded.
        Others as long as there is room. A task that is still being loaded and has no row is
        missing: it stays until that is found."""
        core, asked = self._core, list(asked)
        wanted, coming = group.credit_up_to(len(asked)), core.orderings.coming(group)
        core.make_room()
        back: list[tuple[int, int]] = []
        for task_id in asked:
            row = rows.get(task_id)
            if row is not None and task_id in group.apart:
                group.apart[task_id] = False
                core.keep(row)
                continue
            if row is None or task_id in coming or group.loading.pop(task_id, None) is None:
                continue
            if wanted > 0 or core.has_room:
                core.keep(row)
                wanted -= 1
            back.append((task_id, priority_of(row)))
        for task_id, priority in reversed(back):
            group.ready.push_front(task_id, priority)
        core.wake(group)

    def not_loaded(self, group: Group, ids: Sequence[int]) -> None:
        """Make tasks that nobody can take now ready again, without their rows in memory."""
        coming = self._core.orderings.coming(group)
        for task_id in reversed(ids):
            if task_id in group.apart:
                group.apart[task_id] = False
                continue
            priority = None if task_id in coming else group.loading.pop(task_id, None)
            if priority is not None:
                group.ready.push_front(task_id, priority)
        self._core.wake(group)

    # --- subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.join(subscriber)
            return
        subscriber.group.subscribers[subscriber] = None
        subscriber.presence.subscribers[subscriber] = None
        if subscriber.group.is_ordered:
            self._core.orderings.of[subscriber.group].join(subscriber)
        self._core.ledger.changed[subscriber.group] = None
        self._core.subscribers += 1
        self._core.regained(subscriber)
        subscriber.group.was_used = True

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a subscription: it gets no more deliveries, and its leases stay."""
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.leave(subscriber)
            return
        group = subscriber.group
        subscriber.presence.subscribers.pop(subscriber, None)
        if subscriber in group.subscribers:
            del group.subscribers[subscriber]
            group.able.pop(subscriber, None)
            if group.is_ordered:
                self._core.orderings.of[group].part(subscriber)
            self._core.ledger.changed[group] = None
            self._core.subscribers -= 1

    def end_broadcasts(self, topic: Topic, message: str) -> None:
        """End the broadcast subscriptions of a topic that is gone."""
        for one in list(topic.broadcasters):
            self.unsubscribe(one)
            self._core.cut.append((one, "not_found", message))

    def heard(self, presence: Presence, subscribers: Iterable[Subscriber]) -> None:
        """The consumer behind a connection shows life: its subscribers are handed tasks again."""
        presence.doubted = False
        for subscriber in subscribers:
            self._core.regained(subscriber)

    def disconnected(self, subscriber: Subscriber, mono_ms: int, death: str = "") -> None:
        """The subscriber's connection broke: its leases end within the grace, unless they are acked
        from elsewhere. ``death``: what is known of the cause, if nobody meant the connection to
        end."""
        self.unsubscribe(subscriber)
        subscriber.death = death
        presence = subscriber.presence
        if presence.kept_for is not None and self._core.is_kept_free(presence):
            self._core.let_in(presence.kept_for)
        presence.kept_for = None
        subscriber.gone_mono_ms = mono_ms + self._core.config.reconnect_grace_ms
        self._core.expires(subscriber.group, subscriber.gone_mono_ms)


def _buckets(group: Group) -> list[Bucket]:
    """The token buckets of the group and of its topic."""
    return [bucket for bucket in (group.bucket, group.topic.bucket) if bucket is not None]


def _next_able(group: Group) -> Subscriber | None:
    """The next subscriber in line, if it has credit; None otherwise."""
    subscriber, _ = group.able.popitem(last=False)
    if subscriber.room <= 0:
        return None  # until it has regained some
    group.able[subscriber] = None
    return subscriber if subscriber.credit > 0 else None  # only what is to be alone


def _put_back(group: Group, ids: Sequence[int], priorities: Mapping[int, int]) -> None:
    for task_id in reversed(ids):
        group.ready.push_front(task_id, priorities[task_id])


def _is_over(row: TaskRow, now_ms: int) -> bool:
    end_ms = ttl_end_ms(row.due_ms, row.options)
    return end_ms is not None and now_ms >= end_ms
