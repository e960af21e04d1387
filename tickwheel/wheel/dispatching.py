"""The second half, second part: ready tasks are leased to subscribers that have credit.

Invariants: a task is handed out only if its due time has come by the ``now_ms`` of the call;
nothing of a group that is held, and nothing beyond a rate. What is delivered at most once is
finished in the open batch and written when that is durable.
"""

from __future__ import annotations

from tickwheel.wheel.broadcast import Broadcaster, Broadcasts
from tickwheel.wheel.core import Core
from tickwheel.wheel.groups import Group
from tickwheel.wheel.leases import (
    PLAIN,
    Dispatch,
    Item,
    Lease,
    Subscriber,
    priority_of,
    traits_of,
    ttl_end_ms,
)
from tickwheel.wheel.ownership import Ownership
from tickwheel.wheel.recording import EXPIRED
from tickwheel.wheel.records import Ending, Failure, TaskRow
from tickwheel.wheel.settlement import Settlement

NO_FAILURES: tuple[Failure, ...] = ()


class Dispatching:
    """From the ready queues to frames."""

    def __init__(self, core: Core, ownership: Ownership, settlement: Settlement) -> None:
        self._core = core
        self._ownership = ownership
        self._settlement = settlement
        self._broadcasts = Broadcasts(core)
        self._bytes_left = 0

    def dispatch(self, now_ms: int, mono_ms: int, limit: int) -> tuple[list[Dispatch], bool]:
        """Deliveries for subscribers with credit, about ``limit`` tasks, and whether to go on."""
        core = self._core
        out: list[Dispatch] = []
        looked_at = 0
        self._bytes_left = core.config.dispatch_bytes_max
        if core.throttled:
            self._unthrottle(mono_ms)
        self._bytes_left -= self._broadcasts.flush(out, self._bytes_left, now_ms)
        while core.runnable and looked_at < limit and self._bytes_left > 0:
            group = next(iter(core.runnable))
            # To the end of the line, so that no group waits for another's backlog.
            del core.runnable[group]
            count = self._dispatch_group(group, now_ms, mono_ms, out)
            if count:
                looked_at += count
                core.wake(group)
        return out, bool(core.runnable) or self._broadcasts.can_go_on

    def _dispatch_group(self, group: Group, now_ms: int, mono_ms: int, out: list[Dispatch]) -> int:
        """One frame at most for each subscriber; how many entries of ``ready`` it used up."""
        able = [s for s in group.subscribers if s.credit > 0]
        waiting = allowed = len(group.ready)
        if not able or not waiting or group.is_held:
            return 0
        buckets = [b for b in (group.bucket, group.topic.bucket) if b is not None]
        if buckets:
            allowed = min(bucket.left(mono_ms) for bucket in buckets)
            if allowed <= 0:
                self._core.throttled[group] = max(bucket.next_mono_ms() for bucket in buckets)
                return 0
        used = 0
        share = min(-(-waiting // len(able)), self._core.config.delivery_frame_tasks_max)
        start = group.turn % len(able)
        group.turn += 1
        for subscriber in able[start:] + able[:start]:
            ids = group.ready.take(min(subscriber.credit, share, allowed))
            if not ids:
                break
            items, back = self._lease_all(group, subscriber, ids, now_ms, mono_ms)
            used += len(ids) - back
            if not items:
                continue
            for bucket in buckets:
                bucket.take(len(items))
            allowed -= len(items)
            if subscriber.at_most_once:
                self._finish_now(group, subscriber, items)
            else:
                out.append(Dispatch(subscriber, items))
            if subscriber.once:
                self.unsubscribe(subscriber)
        return used

    def _finish_now(self, group: Group, subscriber: Subscriber, items: list[Item]) -> None:
        """At most once: the end is committed first, and the frame is written behind it."""
        core = self._core
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
            if size_left <= 0:
                self._put_back(group, ids[index:])
                break
            if group.stale and group.is_stale(task_id):
                continue
            row = hot.get(task_id)
            if row is None:
                self._set_aside(group, task_id)
                continue
            _, due_ms, _, body, extras = row
            if due_ms > now_ms or (extras is not None and _is_over(row, now_ms)):
                self._withhold(group, row, now_ms)
                continue
            attempt, failures = 1, NO_FAILURES
            if group.tries:
                tries = group.tries.pop(task_id, None)
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
            size_left -= len(body)
            if task_id not in owed:
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
        group.delivered += count
        group.topic.delivered += count
        self._core.totals.delivered += count
        self._core.expires(group, deadline_ms)

    def _put_back(self, group: Group, ids: list[int]) -> None:
        """No room left in this frame: first in line for the next."""
        for task_id in reversed(ids):
            row = self._core.hot.get(task_id)
            group.ready.push_front(task_id, priority_of(row) if row is not None else 0)

    def _set_aside(self, group: Group, task_id: int) -> None:
        """Its row is not in memory: have it read, and deliver it then."""
        tries = group.tries.get(task_id)
        group.loading[task_id] = tries.priority if tries else 0
        self._core.wants_ready.setdefault(group, []).append(task_id)

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
        last = self._ownership.finish(group, row, Ending.EXPIRED)
        if not last:
            core.note_done(task_id, group, tries.attempt if tries else 0, 0)
        if core.recorder is not None:
            core.recorder.ended(group.topic.name, group.name, EXPIRED, task_id, last=last)

    # --- subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.join(subscriber)
            return
        subscriber.group.subscribers.append(subscriber)
        self._core.wake(subscriber.group)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """No more deliveries; its leases go on."""
        if isinstance(subscriber, Broadcaster):
            self._broadcasts.leave(subscriber)
            return
        subscribers = subscriber.group.subscribers
        if subscriber in subscribers:
            subscribers.remove(subscriber)

    def disconnected(self, subscriber: Subscriber, mono_ms: int) -> None:
        """Its connection broke: leases end within the grace, unless acked from elsewhere."""
        self.unsubscribe(subscriber)
        subscriber.gone_mono_ms = mono_ms + self._core.config.reconnect_grace_ms
        self._core.expires(subscriber.group, subscriber.gone_mono_ms)


def _is_over(row: TaskRow, now_ms: int) -> bool:
    end_ms = ttl_end_ms(row.due_ms, row.extras)
    return end_ms is not None and now_ms >= end_ms
