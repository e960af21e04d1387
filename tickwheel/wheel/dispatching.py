"""The second half, second part: ready tasks are leased to subscribers that have credit.

Invariants: a task is handed out only if its due time has come by the ``now_ms`` of the call;
nothing of a group that is held, and nothing beyond a rate. What is delivered at most once is
finished in the open batch and written when that is durable.
"""

from __future__ import annotations

from collections.abc import Iterable

from tickwheel.wheel.broadcast import Broadcaster, Broadcasts
from tickwheel.wheel.core import Core
from tickwheel.wheel.groups import Group
from tickwheel.wheel.leases import (
    DELIVERY_BYTES,
    PLAIN,
    Dispatch,
    Item,
    Lease,
    Presence,
    Subscriber,
    traits_of,
    ttl_end_ms,
)
from tickwheel.wheel.ownership import Ownership
from tickwheel.wheel.recording import EXPIRED
from tickwheel.wheel.records import Ending, Failure, TaskRow, extras_bytes
from tickwheel.wheel.settlement import Settlement

NO_FAILURES: tuple[Failure, ...] = ()
READ_AHEAD_TASKS = 1_000
"""Rows of a group's backlog that are read beyond what its subscribers can take now."""


class Dispatching:
    """From the ready queues to frames."""

    def __init__(self, core: Core, ownership: Ownership, settlement: Settlement) -> None:
        self._core = core
        self._ownership = ownership
        self._settlement = settlement
        self._broadcasts = Broadcasts(core)
        self._bytes_left = 0
        self._aside_left: int | None = None
        """How many tasks more of the group at hand may be set aside to be read; None: nobody has
        counted yet."""
        self._allowed = 0
        """How many of that group rates let go now."""

    def dispatch(self, now_ms: int, mono_ms: int, limit: int) -> tuple[list[Dispatch], bool]:
        """Deliveries for subscribers with credit, about ``limit`` tasks, and whether to go on."""
        core = self._core
        out: list[Dispatch] = []
        looked_at = 0
        self._bytes_left = core.config.dispatch_bytes_max
        if core.throttled:
            self._unthrottle(mono_ms)
        self._bytes_left -= self._broadcasts.flush(out, self._bytes_left, now_ms)
        while core.runnable and looked_at < limit and self._bytes_left > 0 and self._may_lease:
            group = next(iter(core.runnable))
            # To the end of the line, so that no group waits for another's backlog.
            del core.runnable[group]
            count = self._dispatch_group(group, now_ms, mono_ms, out)
            if count:
                looked_at += count
                core.wake(group)
        unfinished = bool(core.runnable) and self._may_lease
        return out, unfinished or self._broadcasts.can_go_on

    @property
    def _may_lease(self) -> bool:
        return self._core.in_flight < self._core.config.in_flight_max

    def _dispatch_group(self, group: Group, now_ms: int, mono_ms: int, out: list[Dispatch]) -> int:
        """One frame at most for each subscriber; how many entries of ``ready`` it used up."""
        core, able = self._core, group.able
        waiting = allowed = len(group.ready)
        if not able or not waiting or group.is_held:
            return 0
        buckets = [b for b in (group.bucket, group.topic.bucket) if b is not None]
        if buckets:
            allowed = min(bucket.left(mono_ms) for bucket in buckets)
            if allowed <= 0:
                core.throttled[group] = max(bucket.next_mono_ms() for bucket in buckets)
                return 0
        used = 0
        share = min(-(-waiting // len(able)), core.config.delivery_frame_tasks_max)
        allowed = min(allowed, core.config.in_flight_max - core.in_flight)
        self._aside_left, self._allowed = None, allowed
        for _ in range(len(able)):
            if not len(group.ready) or allowed <= 0 or self._bytes_left <= 0:
                break
            subscriber, _ = able.popitem(last=False)
            if subscriber.credit <= 0:
                continue  # until it has regained some
            able[subscriber] = None
            if subscriber.at_most_once and core.handed_bytes >= core.config.handed_bytes_max:
                core.held_back[group] = None
                continue
            ids = group.ready.take(min(subscriber.credit, share, allowed))
            items, back = self._hand_out(group, subscriber, ids, now_ms, mono_ms, out)
            used += len(ids) - back
            allowed -= items
            for bucket in buckets:
                bucket.take(items)
            if back and not items:
                break  # the next in line has to be read first
        if self._aside_left is not None and core.reads_ahead:
            self._read_ahead(group)
        return used

    def _hand_out(
        self,
        group: Group,
        subscriber: Subscriber,
        ids: list[int],
        now_ms: int,
        mono_ms: int,
        out: list[Dispatch],
    ) -> tuple[int, int]:
        """One frame; how many deliveries are in it, and how many of ``ids`` were put back."""
        bytes_before = self._bytes_left
        items, back = self._lease_all(group, subscriber, ids, now_ms, mono_ms)
        if not items:
            return 0, back
        if subscriber.at_most_once:
            self._finish_now(group, subscriber, items, bytes_before - self._bytes_left)
        else:
            out.append(Dispatch(subscriber, items))
        if subscriber.once:
            self.unsubscribe(subscriber)
        return len(items), back

    def _finish_now(
        self, group: Group, subscriber: Subscriber, items: list[Item], size_bytes: int
    ) -> None:
        """At most once: the end is committed first, and the frame is written behind it."""
        core = self._core
        core.handed_bytes += size_bytes
        core.open.handed_bytes += size_bytes
        ids = [row.id for row, _ in items]
        unresolved = self._settlement.ack(group, core.epoch, ids, [n for _, n in items])
        if unresolved:
            raise AssertionError("a delivery of this very call is not in flight")
        core.open.handed.append(Dispatch(subscriber, items))

    def _unthrottle(self, mono_ms: int) -> None:
        """Groups whose next token has come may deliver again, longest waiting first."""
        core = self._core
        for group in [g for g, at_ms in core.throttled.items() if at_ms <= mono_ms]:
            del core.throttled[group]
            core.wake(group)

    def next_token_mono_ms(self) -> int | None:
        """When a rate lets the next delivery go, if one is held back by it."""
        return min(self._core.throttled.values(), default=None)

    def _lease_all(
        self, group: Group, subscriber: Subscriber, ids: list[int], now_ms: int, mono_ms: int
    ) -> tuple[list[Item], int]:
        """Lease what can be delivered now of ``ids``; the number put back for lack of room."""
        core = self._core
        hot, owed, flight, unsaved = core.hot, core.owed, group.flight, core.unsaved
        deadline_ms = mono_ms + subscriber.lease_ms
        items: list[Item] = []
        size_left = core.config.delivery_frame_bytes_max
        for index, task_id in enumerate(ids):
            row = hot.get(task_id)
            if row is None and self._left_to_set_aside(group) <= 0:
                group.ready.put_back(ids[index:])
                break
            if group.stale and group.is_stale(task_id):
                continue
            if row is None:
                self._set_aside(group, task_id, group.ready.priority_at(index))
                continue
            _, due_ms, _, body, extras = row
            size = len(body) + DELIVERY_BYTES + (0 if extras is None else extras_bytes(extras))
            if size > size_left and items:
                group.ready.put_back(ids[index:])
                break
            if due_ms > now_ms or (extras is not None and _is_over(row, now_ms)):
                self._withhold(group, row, now_ms)
                continue
            attempt, failures = 1, NO_FAILURES
            tries = group.tries.pop(task_id, None) if group.tries else None
            if tries is not None:
                attempt, failures = tries.attempt + 1, tries.failures
            traits = PLAIN
            if extras is not None:
                traits = traits_of(row)
                core.lifetimes.end(row)
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
                failures,
            )
            unsaved.append(lease)
            items.append((row, attempt))
            size_left -= size
            if task_id not in owed or not core.has_room:
                core.drop(task_id)
        else:
            index = len(ids)
        self._bytes_left -= core.config.delivery_frame_bytes_max - size_left
        if items:
            self._count_delivered(group, subscriber, len(items), deadline_ms)
            if core.recorder is not None:
                core.recorder.delivered(group, subscriber, items, now_ms)
        return items, len(ids) - index

    def _count_delivered(
        self, group: Group, subscriber: Subscriber, count: int, deadline_ms: int
    ) -> None:
        subscriber.outstanding += count
        self._core.in_flight += count
        group.delivered += count
        group.topic.delivered += count
        self._core.totals.delivered += count
        self._core.expires(group, deadline_ms)

    # --- rows that have to be read -----------------------------------------------------------

    def _left_to_set_aside(self, group: Group) -> int:
        """Rows are read for as many tasks as can be delivered: what is being read counts against
        the credit of the subscribers. A row that is missing does not, or one would stop a group."""
        if self._aside_left is None:
            config, reading = self._core.config, self._being_read(group)
            most = min(self._allowed, config.loading_max, reading + config.delivery_frame_tasks_max)
            self._aside_left = group.credit_up_to(most) - reading
        return self._aside_left

    def _being_read(self, group: Group) -> int:
        missing = self._core.missing
        if not missing:
            return len(group.loading)
        return sum(task_id not in missing for task_id in group.loading)

    def _set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Its row is not in memory: have it read, and deliver it then."""
        if self._aside_left is not None:
            self._aside_left -= 1
        group.loading[task_id] = priority
        self._core.wants_ready.setdefault(group, []).append(task_id)

    def _read_ahead(self, group: Group) -> None:
        """There is room: the next rows of the backlog are read with those that are wanted now, so
        that a subscriber with little credit does not wait for the store each time."""
        ids = group.ready.take(max(0, READ_AHEAD_TASKS - self._being_read(group)))
        for index, task_id in enumerate(ids):
            if group.stale and group.is_stale(task_id):
                continue
            if task_id in self._core.hot:
                group.ready.put_back(ids[index:])
                return
            self._set_aside(group, task_id, group.ready.priority_at(index))

    def _withhold(self, group: Group, row: TaskRow, now_ms: int) -> None:
        """Taken from the queue, but not to be delivered now."""
        if row.due_ms > now_ms:
            # The clock went back below its due time: it waits again, as if for a retry.
            self._core.wait(group, row.id, row.due_ms)
            return
        self._core.lifetimes.end(row)
        self.expire(group, row)

    def expire(self, group: Group, row: TaskRow) -> None:
        """Nobody in ``group``, which it was taken out of, wants it any more."""
        core, task_id = self._core, row.id
        core.totals.expired += 1
        group.expired += 1
        tries = group.tries.pop(task_id, None)
        last = self._ownership.finish_row(group, row, Ending.EXPIRED)
        core.lost_task(group.topic)
        if not last:
            core.note_done(task_id, group, tries.attempt if tries else 0, 0)
        if core.recorder is not None:
            core.recorder.ended(group.topic.name, group.name, EXPIRED, task_id, last=last)

    # --- subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.join(subscriber)
            return
        subscriber.group.subscribers[subscriber] = None
        self._core.subscribers += 1
        self._core.regained(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """No more deliveries; its leases go on."""
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.leave(subscriber)
            return
        group = subscriber.group
        if subscriber in group.subscribers:
            del group.subscribers[subscriber]
            group.able.pop(subscriber, None)
            self._core.subscribers -= 1

    def heard(self, presence: Presence, subscribers: Iterable[Subscriber]) -> None:
        """Its consumer has shown life: it is handed tasks again."""
        presence.doubted = False
        for subscriber in subscribers:
            self._core.regained(subscriber)

    def disconnected(self, subscriber: Subscriber, mono_ms: int) -> None:
        """Its connection broke: leases end within the grace, unless acked from elsewhere."""
        self.unsubscribe(subscriber)
        subscriber.gone_mono_ms = mono_ms + self._core.config.reconnect_grace_ms
        self._core.expires(subscriber.group, subscriber.gone_mono_ms)


def _is_over(row: TaskRow, now_ms: int) -> bool:
    end_ms = ttl_end_ms(row.due_ms, row.extras)
    return end_ms is not None and now_ms >= end_ms
