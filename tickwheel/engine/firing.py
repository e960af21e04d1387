"""The second half, first part: what is due becomes ready, or expires; broadcasts get what comes due
while they are connected.

``Firing`` takes due handles from the wheel, a task at a time; tasks of one topic that come due one
after the other, and about which nothing has to be decided one by one, become ready in one step
(``DueBatch``), to the same end.

Invariants of broadcasts (``Broadcasts``): a broadcast has no group, no lease, no ack and no retry.
It owns nothing, so a task ends as if it were not there. What its connection does not take at once
waits here, up to two limits; a subscription that reaches one is ended, because memory must not grow
with somebody's slowness. What comes due while the topic is paused is not broadcast. Rates are about
groups and do not hold for it.
"""

from __future__ import annotations

from collections import deque
from itertools import filterfalse
from typing import TYPE_CHECKING

from tickwheel.engine.events import EXPIRED
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import (
    DELIVERY_BYTES,
    Dispatch,
    Group,
    Item,
    Subscriber,
    Topic,
    has_order,
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
    order_of,
    task_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tickwheel.engine.ownership import Ownership
    from tickwheel.engine.topics import DeliverySink
    from tickwheel.model.filters import Filter


class Firing:
    """Makes due tasks ready or expired."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership
        self.broadcasts = Broadcasts(core)

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
            self.broadcasts.offer(topic, row, now_ms)
            self.expire(topic.default_backlog, row)
            return
        self.make_ready(topic, row, now_ms)
        if topic.broadcasters and (row.options is None or row.options.replayed is None):
            self.broadcasts.offer(topic, row, now_ms)

    def make_ready(self, topic: Topic, row: TaskRow, now_ms: int) -> None:
        """The task is owed to the groups of its topic from now on."""
        core = self._core
        if not core.has_room or row.body is NO_BODY:
            core.drop(row.id)
        elif row.id not in core.resident_rows:
            core.keep(row)
        priority, ordered, replayed = 0, False, False
        if row.options is not None:
            priority, ordered = row.options.priority, row.options.order_key is not None
            replayed = row.options.replayed is not None
            core.lifetimes.begin(row)
        if replayed:
            groups = self._ownership.assign_again(topic, row)
        elif topic.default_backlog is not None:
            self._wait_for_group(topic.default_backlog, row, now_ms)
            return
        else:
            groups = topic.live_groups
            if len(groups) > 1 or topic.closing or topic.filtering:
                groups = self._ownership.assign(topic, groups, row)
        for group in groups:
            if ordered or group.is_ordered:
                core.come(group, row, now_ms)
            else:
                group.ready.push(row.id, priority, now_ms)
            _has_more(core, group, now_ms)

    def _wait_for_group(self, default_backlog: Group, row: TaskRow, now_ms: int) -> None:
        """A task is due whose topic has no group yet: it waits in the topic's default backlog."""
        core = self._core
        core.come(default_backlog, row, now_ms)
        if default_backlog.hold_intervals is None:
            core.ledger.judge(default_backlog, now_ms)
        if default_backlog.ready_count >= core.config.backlog_max:
            core.full_topics[default_backlog.topic.name] = None

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
        core.recorder.ended(group.topic.name, group.name, EXPIRED, task_id, last=last)


class DueBatch:
    """Due tasks of a topic with one group, which takes all of them, or those that its filter lets
    pass. It is a step of the tick, and not a batch of the store."""

    __slots__ = ("_core", "_group", "_now_ms", "_ownership", "_rows", "_steps", "_topic")

    def __init__(self, core: Core, ownership: Ownership, now_ms: int) -> None:
        self._core = core
        self._ownership = ownership
        self._now_ms = now_ms
        self._steps = 0
        """The steps that judging one task of the topic takes."""
        self._topic = ""
        self._group: Group | None = None
        """The only group of that topic; None: each of its tasks has to be looked at."""
        self._rows: list[TaskRow] = []

    def add(self, row: TaskRow) -> bool:
        """Take a due task into the batch. False: it has to come due by itself, when those before
        it have."""
        _, due_ms, name, _, options = row
        if name != self._topic:
            self.flush()
            topic = self._core.topic(name)
            self._topic, self._group = name, _only_group(topic)
            self._steps = topic.steps() if topic.filtering else 0
        if self._group is None or due_ms > self._now_ms:
            return False
        if options is not None and (options.ttl_ms is not None or options.replayed is not None):
            return False
        self._core.steps_left -= self._steps
        self._rows.append(row)
        return True

    def flush(self) -> None:
        """Make all tasks that were added ready, or end those that nobody wants."""
        rows, group = self._rows, self._group
        if not rows or group is None:
            return
        self._rows = []
        core, now_ms = self._core, self._now_ms
        core.scheduled -= len(rows)
        group.topic.scheduled -= len(rows)
        rows = self._ownership.divide(group, rows)
        if not core.has_room:
            for row in rows:
                if not core.has_room:
                    core.drop(row.id)
        core.come_all(group, rows, now_ms)
        _has_more(core, group, now_ms)


def _has_more(core: Core, group: Group, now_ms: int) -> None:
    """Tasks have become ready in the group: it delivers, or something holds it back."""
    if group.able:
        core.runnable[group] = None
    elif group.hold_intervals is None or group.hold_intervals.current is None:
        core.ledger.judge(group, now_ms)


def _only_group(topic: Topic) -> Group | None:
    """The group that every task of the topic is owed to when it comes due, if that is all there
    is to decide."""
    if topic.default_backlog is not None or topic.closing or topic.broadcasters:
        return None
    groups = topic.live_groups
    return groups[0] if len(groups) == 1 and groups[0] is topic.first_group else None


class Broadcaster(Subscriber):
    """One broadcast subscription. Its group is a stand-in that holds no task."""

    __slots__ = ("buffer", "filter", "offered_ms", "size_bytes")

    def __init__(
        self,
        sink: DeliverySink | None,
        topic: Topic,
        prefetch: int,
        label: str = "",
        wanted: Filter | None = None,
    ) -> None:
        super().__init__(sink, Group(topic, "", 0), prefetch, 0, label=label)
        self.filter = wanted
        """The broadcaster's filter while it is connected; None: every task passes."""
        self.buffer: deque[TaskRow] = deque()
        self.offered_ms = 0
        """The highest time at which something in the buffer was offered."""
        self.size_bytes = 0

    @property
    def filter_steps(self) -> int:
        return 0 if self.filter is None else self.filter.steps

    @property
    def is_subscribed(self) -> bool:
        return self in self.group.topic.broadcasters

    @property
    def is_open(self) -> bool:
        """Whether the connection takes frames: not behind, nor paused by ``prefetch`` 0."""
        return not self.blocked and self.prefetch > 0


class Broadcasts:
    """All broadcast subscriptions of one engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[Broadcaster, None] = {}
        """The broadcasters with rows in their buffers."""
        self.waiting_bytes = 0
        """The bytes in all buffers; a row in several counts in each, but is in memory once."""

    def join(self, broadcaster: Broadcaster) -> None:
        broadcaster.group.topic.broadcasters[broadcaster] = None
        self._core.subscribers += 1

    def leave(self, broadcaster: Broadcaster) -> None:
        broadcasters = broadcaster.group.topic.broadcasters
        if broadcaster in broadcasters:
            del broadcasters[broadcaster]
            self._core.subscribers -= 1
            self._core.lost_task(broadcaster.group.topic)
        self._waiting.pop(broadcaster, None)
        broadcaster.buffer.clear()
        self.waiting_bytes -= broadcaster.size_bytes
        broadcaster.size_bytes = 0

    def offer(self, topic: Topic, row: TaskRow, now_ms: int) -> None:
        """Put a task that has come due into the buffer of each broadcaster of its topic."""
        if topic.settings.paused:
            return
        config = self._core.config
        size_bytes = task_bytes(row) + ROW_OVERHEAD_BYTES
        for one in list(topic.broadcasters):
            assert isinstance(one, Broadcaster)
            if not one.is_subscribed:
                continue  # cut to make room
            if one.filter is not None:
                self._core.steps_left -= one.filter_steps
                if not one.filter.passes(row):
                    continue
            one.offered_ms = max(one.offered_ms, now_ms) if one.buffer else now_ms
            one.buffer.append(row)
            one.size_bytes += size_bytes
            self.waiting_bytes += size_bytes
            self._waiting[one] = None
            if not one.is_open:
                self._core.ledger.waits_for_connection(one.group, now_ms)
            if len(one.buffer) > config.broadcast_tasks_max:
                self._cut(one, f"{len(one.buffer)} tasks wait for it", "broadcast_tasks_max")
            elif one.size_bytes > config.broadcast_bytes_max and len(one.buffer) > 1:
                self._cut(one, f"{one.size_bytes} bytes wait for it", "broadcast_bytes_max")
            elif self.waiting_bytes > config.broadcasts_bytes_max:
                self._cut_largest()

    def _cut_largest(self) -> None:
        """End the broadcast subscription with the largest buffer, to make room for all others."""
        largest = max(self._waiting, key=lambda one: one.size_bytes)
        if len(largest.buffer) > 1:
            found = f"{self.waiting_bytes} bytes wait for it and others"
            self._cut(largest, found, "broadcasts_bytes_max")

    def _cut(self, one: Broadcaster, found: str, limit: str) -> None:
        self.leave(one)
        allowed = getattr(self._core.config, limit)
        said = f"the broadcast of {one.group.topic.name}: {found}; the limit is {allowed}"
        self._core.cut.append((one, "limit_exceeded", f"{said} ({limit})"))

    def flush(self, out: list[Dispatch], bytes_max: int, now_ms: int) -> int:
        """Add frames for broadcasters whose connections take them; returns how many bytes."""
        total_bytes = 0
        for one in [one for one in self._waiting if one.is_open]:
            while one.buffer and total_bytes < bytes_max:
                items, size_bytes = self._frame(one)
                causes = None
                if self._core.is_recorded:
                    causes = self._core.ledger.causes(one.group, items, now_ms)
                    self._core.recorder.delivered(one.group, one, items, now_ms, causes)
                out.append(Dispatch(one, items, one.offered_ms, causes))
                total_bytes += size_bytes
            if not one.buffer:
                self._core.ledger.sent(one.group, now_ms)
            # The others first the next time, if the bytes did not suffice for all.
            del self._waiting[one]
            if one.buffer:
                self._waiting[one] = None
        return total_bytes

    def _frame(self, one: Broadcaster) -> tuple[list[Item], int]:
        config, core = self._core.config, self._core
        items: list[Item] = []
        size_bytes = 0
        while one.buffer and len(items) < config.delivery_frame_tasks_max:
            row_bytes = task_bytes(one.buffer[0])
            framed_bytes = size_bytes + row_bytes + (len(items) + 1) * DELIVERY_BYTES
            if items and framed_bytes > config.delivery_frame_bytes_max:
                break
            items.append((one.buffer.popleft(), 1, NO_PAST))
            size_bytes += row_bytes
        held_bytes = size_bytes + len(items) * ROW_OVERHEAD_BYTES
        one.size_bytes -= held_bytes
        self.waiting_bytes -= held_bytes
        one.group.topic.delivered += len(items)
        one.group.topic.broadcast += len(items)
        core.totals.delivered += len(items)
        return items, size_bytes

    @property
    def can_go_on(self) -> bool:
        """Whether a buffer holds rows whose connection takes them now."""
        return any(one.is_open for one in self._waiting)
