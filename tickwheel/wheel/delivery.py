"""The second half, first part: what is due becomes ready and is leased to subscribers.

Invariant: a task is handed out only if its due time has come by the ``now_ms`` of the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tickwheel.wheel.core import Core
from tickwheel.wheel.groups import Group, Lease, Owed, Subscriber, Topic
from tickwheel.wheel.records import Ending, Failure, TaskRow

NO_FAILURES: tuple[Failure, ...] = ()
Item = tuple[TaskRow, int]
"""(row, attempt)"""


class Dispatch(NamedTuple):
    """Deliveries to write to one subscriber, as one frame."""

    subscriber: Subscriber
    items: list[Item]


def priority_of(row: TaskRow) -> int:
    return row.extras.priority if row.extras is not None else 0


class Delivery:
    """Due, dispatch, subscribers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._bytes_left = 0

    # --- due -------------------------------------------------------------------------------

    def fire(self, now_ms: int, limit: int) -> bool:
        """Hand up to ``limit`` due handles to their groups. True: call again at once."""
        core = self._core
        room = core.config.loading_max - len(core.firing)
        if room <= 0:
            return False
        ids, dues, more = core.wheel.advance(now_ms, min(limit, room))
        hot, retrying = core.hot, core.retrying
        for task_id, due_ms in zip(ids, dues, strict=True):
            if task_id in retrying and self._retry_due(task_id, due_ms):
                continue
            row = hot.get(task_id)
            if row is None:
                core.firing[task_id] = due_ms
                core.wants.append(task_id)
            elif row.due_ms == due_ms:
                self._due(row, now_ms)
        upcoming = core.wheel.take_upcoming(limit)
        if upcoming and core.has_room:
            core.wants += [i for i in upcoming if i not in hot and i not in retrying]
        return more

    def loaded(self, asked: Iterable[int], rows: dict[int, TaskRow], now_ms: int) -> None:
        """Rows that ``wants`` asked for, as they are now; a missing one has left."""
        core = self._core
        for task_id in asked:
            row = rows.get(task_id)
            due_ms = core.firing.pop(task_id, None)
            if row is None:
                core.drop(task_id)
            elif due_ms is not None:
                if row.due_ms == due_ms:
                    self._due(row, now_ms)
            elif core.has_room and row.due_ms > now_ms and core.is_scheduled(row):
                core.keep(row)

    def loaded_ready(self, group: Group, asked: Iterable[int], rows: dict[int, TaskRow]) -> None:
        """Rows of ready tasks whose turn had come without a body in memory."""
        core = self._core
        for task_id in reversed(list(asked)):
            if group.loading.pop(task_id, None) is None:
                continue
            row = rows.get(task_id)
            if row is not None:
                core.keep(row)
                group.ready.push_front(task_id, priority_of(row))
        core.wake(group)

    def _due(self, row: TaskRow, now_ms: int) -> None:
        core = self._core
        topic = core.topic(row.topic)
        topic.scheduled -= 1
        core.scheduled -= 1
        self.make_ready(topic, row)

    def make_ready(self, topic: Topic, row: TaskRow) -> None:
        """The task is owed to the groups of its topic from now on."""
        core = self._core
        if not core.has_room:
            core.drop(row.id)
        elif row.id not in core.hot:
            core.keep(row)
        priority = priority_of(row)
        if topic.unowned is not None:
            topic.unowned.ready.push(row.id, priority)
            if topic.unowned.ready_count >= core.config.backlog_max:
                core.full_topics[topic.name] = None
            return
        groups = self.groups_owed(topic, row.due_ms)
        if len(groups) > 1:
            core.owed[row.id] = Owed({group.name for group in groups})
        for group in groups:
            group.ready.push(row.id, priority)
            if group.subscribers:
                core.runnable[group] = None

    @staticmethod
    def groups_owed(topic: Topic, due_ms: int) -> list[Group]:
        """The groups that existed when it came due (the first one is owed everything)."""
        groups = topic.groups
        if len(groups) == 1:
            return list(groups.values())
        owed = [group for group in groups.values() if group.since_ms <= due_ms]
        return owed or list(groups.values())

    def _retry_due(self, task_id: int, at_ms: int) -> bool:
        """A handle fired: the group whose wait it ends, if there is one, gets the task again."""
        core = self._core
        for group in core.retrying[task_id]:
            if group.waiting.get(task_id) == at_ms:
                break
        else:
            return False
        del group.waiting[task_id]
        core.waited(group, task_id)
        tries = group.tries.get(task_id)
        group.ready.push(task_id, tries.priority if tries else 0)
        core.totals.retried += 1
        core.wake(group)
        return True

    # --- dispatch --------------------------------------------------------------------------

    def dispatch(self, now_ms: int, mono_ms: int, limit: int) -> tuple[list[Dispatch], bool]:
        """Deliveries for subscribers with credit, about ``limit`` tasks, and whether to go on."""
        core = self._core
        out: list[Dispatch] = []
        looked_at = 0
        self._bytes_left = core.config.dispatch_bytes_max
        while core.runnable and looked_at < limit and self._bytes_left > 0:
            group = next(iter(core.runnable))
            # To the end of the line, so that no group waits for another's backlog.
            del core.runnable[group]
            count = self._dispatch_group(group, now_ms, mono_ms, out)
            if count:
                looked_at += count
                core.wake(group)
        return out, bool(core.runnable)

    def _dispatch_group(self, group: Group, now_ms: int, mono_ms: int, out: list[Dispatch]) -> int:
        """One frame at most for each subscriber; how many entries of ``ready`` it used up."""
        able = [s for s in group.subscribers if s.credit > 0]
        waiting = len(group.ready)
        if not able or not waiting:
            return 0
        used = 0
        share = min(-(-waiting // len(able)), self._core.config.delivery_frame_tasks_max)
        start = group.turn % len(able)
        group.turn += 1
        for subscriber in able[start:] + able[:start]:
            ids = group.ready.take(min(subscriber.credit, share))
            if not ids:
                break
            items, back = self._lease_all(group, subscriber, ids, now_ms, mono_ms)
            used += len(ids) - back
            if items:
                out.append(Dispatch(subscriber, items))
                if subscriber.once:
                    self.unsubscribe(subscriber)
        return used

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
            if due_ms > now_ms or (extras is not None and self._expired(row, now_ms)):
                self._withhold(group, row, now_ms)
                continue
            attempt, failures = 1, NO_FAILURES
            if group.tries:
                tries = group.tries.pop(task_id, None)
                if tries is not None:
                    attempt, failures = tries.attempt + 1, tries.failures
            priority = extras.priority if extras is not None else 0
            flight[task_id] = lease = Lease(
                task_id,
                group,
                subscriber,
                attempt,
                core.epoch,
                mono_ms,
                deadline_ms,
                priority,
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
        self._count_delivered(group, subscriber, len(items), deadline_ms)
        return items, len(ids) - index

    def _count_delivered(
        self, group: Group, subscriber: Subscriber, count: int, deadline_ms: int
    ) -> None:
        if count:
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

    def _expired(self, row: TaskRow, now_ms: int) -> bool:
        ttl_ms = row.extras.ttl_ms if row.extras is not None else None
        return ttl_ms is not None and now_ms > row.due_ms + ttl_ms

    def _withhold(self, group: Group, row: TaskRow, now_ms: int) -> None:
        """Taken from the queue, but not to be delivered now."""
        if row.due_ms > now_ms:
            # The clock went back below its due time: it waits again, as if for a retry.
            self._core.wait(group, row.id, row.due_ms)
            return
        self._core.totals.expired += 1
        tries = group.tries.pop(row.id, None)
        if not self._core.finish(row.id, group, Ending.EXPIRED):
            self._core.note_done(row.id, group, tries.attempt if tries else 0, 0)

    # --- subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        subscriber.group.subscribers.append(subscriber)
        self._core.wake(subscriber.group)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """No more deliveries; its leases go on."""
        subscribers = subscriber.group.subscribers
        if subscriber in subscribers:
            subscribers.remove(subscriber)

    def disconnected(self, subscriber: Subscriber, mono_ms: int) -> None:
        """Its connection broke: leases end within the grace, unless acked from elsewhere."""
        self.unsubscribe(subscriber)
        subscriber.gone_mono_ms = mono_ms + self._core.config.reconnect_grace_ms
        self._core.expires(subscriber.group, subscriber.gone_mono_ms)
