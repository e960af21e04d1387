"""Makes due tasks ready or expires them, and broadcasts them to connected broadcast subscriptions.

``Firing`` takes due handles from the wheel, task by task. Successive tasks of one topic that need
no individual decisions become ready in one step with the same result (``DueBatch``).

Invariants of broadcasts (``Broadcasts``): a broadcast has no group, lease, ack or retry. It is owed
no tasks, so it does not affect how a task ends. Tasks that its connection cannot take at once wait
in a buffer that is limited in tasks and bytes. A subscription that reaches a limit is ended,
because slow clients must not make memory grow. Tasks that come due while the topic is paused are
not broadcast. Rates apply to groups only.
"""

from __future__ import annotations

from collections import deque
from itertools import filterfalse, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from tickwheel.engine.events import EXPIRED
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import (
    DELIVERY_BYTES,
    Deferred,
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
        """Pass up to ``limit`` due tasks to their groups. Return whether to repeat this at once."""
        core = self._core
        core.ids.note_time(now_ms)
        core.steps_left = STEPS_PER_TICK
        if core.orderings.delayed and self._catch_up(now_ms):
            return True  # each tick sorts the delayed tasks, so there should not be more
        if core.refiring:
            self._refire(min(limit, max(1, core.config.loading_max // 2)))
        room = core.config.loading_max + core.uncounted_missing - len(core.firing)
        if room <= 0:
            return False
        ids, dues, has_more = core.wheel.advance(now_ms, min(limit, room))
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
                core.rows_to_read.append(task_id)
            elif row[1] == due_ms:
                # A task with an order key could overtake a task that is due before it.
                is_early = (firing or is_unloaded) and row[4] is not None and has_order(row)
                if is_early or core.steps_left <= 0:
                    core.orderings.delayed[task_id] = row
                    firing[task_id] = due_ms
                elif not due_batch.add(row):
                    due_batch.flush()
                    self._due(row, now_ms)
        due_batch.flush()
        upcoming = core.wheel.take_upcoming(limit)
        if upcoming and core.has_room:
            not_resident = filterfalse(resident.__contains__, upcoming)
            core.rows_to_read += [task_id for task_id in not_resident if task_id not in retrying]
        return has_more or core.steps_left <= 0

    def _refire(self, reading_max: int) -> None:
        """Fire deferred tasks again while at most ``reading_max`` rows are being read, so that the
        tasks of other topics do not wait for all of them."""
        core = self._core
        for topic, deferred in list(islice(core.refiring.items(), reading_max)):
            room = reading_max + core.uncounted_missing - len(core.firing)
            if room <= 0:
                return
            for _ in range(min(room, len(deferred.released))):
                task_id, due_ms = deferred.released.popitem(last=False)
                core.firing[task_id] = due_ms
                core.rows_to_read.append(task_id)
                deferred.refired.add(task_id)
            core.regain_room(topic)
            if not deferred.released:
                deferred.refired.clear()
                del core.refiring[topic]

    def process_rows(self, requested: Iterable[int], rows: dict[int, TaskRow], now_ms: int) -> None:
        """Process the rows of ``Core.rows_to_read``. A due task waits until its row is found."""
        core = self._core
        core.steps_left = STEPS_PER_TICK
        for task_id in requested:
            row = rows.get(task_id)
            if row is None:
                continue
            due_ms = core.firing.get(task_id)
            if due_ms is None:
                if core.has_room and row.due_ms > now_ms and core.is_scheduled(row):
                    core.keep(row)
            elif row.due_ms == due_ms and (has_order(row) or core.steps_left <= 0):
                self._delay(row)
            else:
                del core.firing[task_id]
                if row.due_ms == due_ms:
                    self._due(row, now_ms)
        if core.orderings.delayed:
            self._catch_up(now_ms)

    def _delay(self, row: TaskRow) -> None:
        """Delay a fired task whose row was read. Without room, its body is read again later."""
        core = self._core
        if core.has_room:
            core.keep(row)
        elif not core.topic(row.topic).broadcasters:
            row = row._replace(body=NO_BODY)
        core.orderings.delayed[row.id] = row

    def _catch_up(self, now_ms: int) -> bool:
        """Process delayed tasks in order. A task with an order key waits until the rows of all
        earlier tasks have been read. Return whether no steps are left."""
        core = self._core
        firing, delayed, missing = core.firing, core.orderings.delayed, core.missing
        for task_id in [i for i, row in delayed.items() if firing.get(i) != row.due_ms]:
            del delayed[task_id]  # the task has left in another way
        unread_ms = (at for i, at in firing.items() if i not in delayed and i not in missing)
        until_ms = min(unread_ms, default=ID_MAX)
        if self._ownership.unloaded_ms is not None:
            until_ms = min(until_ms, self._ownership.unloaded_ms)
        to_process = [
            row for row in delayed.values() if row.due_ms < until_ms or not has_order(row)
        ]
        for row in sorted(to_process, key=lambda row: (row.due_ms, order_of(row))):
            if core.steps_left <= 0:
                return True
            del delayed[row.id]
            if row.body is NO_BODY and core.topic(row.topic).broadcasters:
                core.rows_to_read.append(row.id)  # the body is needed now
                continue
            del firing[row.id]
            self._due(row, now_ms)
        return False

    def _due(self, row: TaskRow, now_ms: int) -> None:
        core = self._core
        if row.due_ms > now_ms:
            # The clock went back while the row was read, so the task fires again when it is due.
            core.wheel.add(row.id, row.due_ms)
            return
        topic = core.topic(row.topic)
        deferred = topic.deferred
        if topic in core.refiring and deferred is not None:
            if has_order(row) and row.id not in deferred.refired:
                # An earlier task of its order key can be among the deferred tasks.
                deferred.released[row.id] = row.due_ms
                core.drop(row.id)
                return
            deferred.refired.discard(row.id)
        if (
            topic.closing
            and not topic.live_groups
            and not self._ownership.owners_are_closed(topic, row)
        ):
            if deferred is None:
                deferred = topic.deferred = Deferred()
            deferred.waiting[row.id] = row.due_ms
            core.drop(row.id)
            core.use_room(topic)
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
        """Give a due task to the groups of its topic that are owed it."""
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
            groups = self._ownership.assign_replayed(topic, row)
        elif topic.default_backlog is not None:
            self._wait_for_group(topic.default_backlog, row, now_ms)
            return
        else:
            groups = topic.live_groups
            if len(groups) > 1 or topic.closing or topic.filtering:
                groups = self._ownership.assign(topic, groups, row)
        for group in groups:
            if ordered or group.is_ordered:
                core.add_due(group, row, now_ms)
            else:
                group.ready.push(row.id, priority, now_ms)
            _wake_or_judge(core, group, now_ms)

    def _wait_for_group(self, default_backlog: Group, row: TaskRow, now_ms: int) -> None:
        """Put a due task into the default backlog of its topic, which has no group."""
        core = self._core
        core.add_due(default_backlog, row, now_ms)
        if default_backlog.hold_intervals is None:
            core.ledger.judge(default_backlog, now_ms)
        core.use_room(default_backlog.topic)

    def _retry_due(self, task_id: int, at_ms: int, now_ms: int) -> bool:
        """Make a task ready in a group that is waiting to retry it at ``at_ms``. Return whether
        there was such a group."""
        core = self._core
        for group in core.retrying[task_id]:
            if group.waiting.get(task_id) == at_ms:
                break
        else:
            return False
        del group.waiting[task_id]
        core.stop_waiting(group, task_id)
        attempts, withheld = group.delivery_attempts.get(task_id), group.withheld.pop(task_id, 0)
        priority = attempts.priority if attempts else withheld
        if group.is_ordered:
            core.orderings.by_group[group].retry(task_id, priority, now_ms)
        else:
            group.ready.push(task_id, priority, now_ms)
        group.retried += 1
        core.totals.retried += 1
        core.wake(group)
        return True

    # --- times to live ---------------------------------------------------------------------

    def request_lapsed(self, now_ms: int, limit: int) -> bool:
        """Request the records of up to ``limit`` undelivered tasks whose time to live has passed.
        Return whether to call this again at once."""
        core = self._core
        ids, has_more = core.lifetimes.fire(
            now_ms, limit, core.config.lapsing_max + core.uncounted_missing
        )
        core.lapsed_rows_to_read += ids
        return has_more

    def expire_lapsed(
        self, ids: Iterable[int], snapshots: Mapping[int, TaskSnapshot], now_ms: int
    ) -> None:
        """Expire the ready and waiting ones among these tasks. ``snapshots`` contains the records
        of ``Core.lapsed_rows_to_read``."""
        core = self._core
        lifetimes = core.lifetimes
        for task_id in ids:
            snapshot = snapshots.get(task_id)
            if task_id not in lifetimes.fired or snapshot is None:
                # The task has left in another way, or stays because its row is missing.
                continue
            end_ms = ttl_end_ms(snapshot.row.due_ms, snapshot.row.options)
            if end_ms is None or now_ms < end_ms:
                # The clock went back while the record was read.
                for _ in range(lifetimes.fired.pop(task_id)):
                    lifetimes.begin(snapshot.row)
                continue
            for group in self._ownership.groups_of(snapshot):
                if task_id not in group.flight and task_id in lifetimes.fired:
                    attempts = group.delivery_attempts.get(task_id)
                    core.leave(group, snapshot.row)
                    if attempts is not None:
                        group.delivery_attempts[task_id] = attempts
                    self.expire(group, snapshot.row)

    def expire_backlogged(self, snapshot: TaskSnapshot) -> None:
        """End a task that came due before its topic became ``broadcast_only``."""
        topic = self._core.topic(snapshot.row.topic)
        if topic.default_backlog is None or self._core.is_scheduled(snapshot.row):
            return
        self._core.leave(topic.default_backlog, snapshot.row)
        self.expire(topic.default_backlog, snapshot.row)

    def expire(self, group: Group, row: TaskRow) -> None:
        """Finish an expired task for ``group``, from whose queues it must have been removed."""
        core, task_id = self._core, row.id
        core.totals.expired += 1
        group.expired += 1
        attempts = group.delivery_attempts.pop(task_id, None)
        attempt = core.take_number(group, task_id) if attempts is None else attempts.attempt
        is_last = self._ownership.finish(group, row, Outcome.EXPIRED)
        core.lost_task(group.topic)
        if not is_last:
            core.note_done(task_id, group, attempt, 0, ProgressState.EXPIRED)
        core.recorder.ended(group.topic.name, group.name, EXPIRED, task_id, last=is_last)


class DueBatch:
    """Due tasks of a topic with a single group, which gets all tasks that its filter selects. A due
    batch is part of a tick of the shard, and not a batch of the store."""

    __slots__ = ("_core", "_group", "_now_ms", "_ownership", "_rows", "_steps", "_topic")

    def __init__(self, core: Core, ownership: Ownership, now_ms: int) -> None:
        self._core = core
        self._ownership = ownership
        self._now_ms = now_ms
        self._steps = 0
        """The number of filter steps that a task of the topic takes."""
        self._topic = ""
        self._group: Group | None = None
        """The only group of the topic; None if its tasks need individual decisions."""
        self._rows: list[TaskRow] = []

    def add(self, row: TaskRow) -> bool:
        """Add a due task, or return False if it needs an individual decision after ``flush``."""
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
        """Make the added tasks ready, and end tasks that the filter excludes."""
        rows, group = self._rows, self._group
        if not rows or group is None:
            return
        self._rows = []
        core, now_ms = self._core, self._now_ms
        core.scheduled -= len(rows)
        group.topic.scheduled -= len(rows)
        rows = self._ownership.exclude_by_filter(group, rows)
        if not core.has_room:
            for row in rows:
                if not core.has_room:
                    core.drop(row.id)
        core.add_due_all(group, rows, now_ms)
        _wake_or_judge(core, group, now_ms)


def _wake_or_judge(core: Core, group: Group, now_ms: int) -> None:
    """Wake a group that has new ready tasks, or judge why it cannot deliver."""
    if group.able:
        core.runnable[group] = None
    elif group.hold_intervals is None or group.hold_intervals.current is None:
        core.ledger.judge(group, now_ms)


def _only_group(topic: Topic) -> Group | None:
    """Return the group that is owed every due task of the topic; None if tasks need decisions."""
    if topic.default_backlog is not None or topic.closing or topic.broadcasters:
        return None
    groups = topic.live_groups
    return groups[0] if len(groups) == 1 and groups[0] is topic.first_group else None


class Broadcaster(Subscriber):
    """A broadcast subscription. Its ``group`` is a placeholder without tasks."""

    __slots__ = ("buffer", "filter", "offered_ms", "size_bytes")

    def __init__(
        self,
        sink: DeliverySink | None,
        topic: Topic,
        prefetch: int,
        label: str = "",
        task_filter: Filter | None = None,
    ) -> None:
        super().__init__(sink, Group(topic, "", 0), prefetch, 0, label=label)
        self.filter = task_filter
        """The subscription's filter, or None for all tasks."""
        self.buffer: deque[TaskRow] = deque()
        self.offered_ms = 0
        """The latest time at which a buffered task was offered."""
        self.size_bytes = 0

    @property
    def filter_steps(self) -> int:
        return 0 if self.filter is None else self.filter.steps

    @property
    def is_subscribed(self) -> bool:
        return self in self.group.topic.broadcasters

    @property
    def is_open(self) -> bool:
        """Whether the connection accepts frames: its buffer has room, and ``prefetch`` is not 0."""
        return not self.blocked and self.prefetch > 0


class Broadcasts:
    """All broadcast subscriptions of an engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[Broadcaster, None] = {}
        """Broadcasters whose buffers contain rows."""
        self.waiting_bytes = 0
        """Total bytes of all buffers. A row in several buffers counts in each."""

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
        """Put a due task into the buffer of each broadcaster of its topic."""
        if topic.settings.paused:
            return
        config = self._core.config
        self._core.steps_left -= len(topic.broadcasters)
        size_bytes = task_bytes(row) + ROW_OVERHEAD_BYTES
        for broadcaster in list(topic.broadcasters):
            assert isinstance(broadcaster, Broadcaster)
            if not broadcaster.is_subscribed:
                continue  # the subscription was ended to make room
            if broadcaster.filter is not None:
                self._core.steps_left -= broadcaster.filter_steps
                if not broadcaster.filter.passes(row):
                    continue
            broadcaster.offered_ms = (
                max(broadcaster.offered_ms, now_ms) if broadcaster.buffer else now_ms
            )
            broadcaster.buffer.append(row)
            broadcaster.size_bytes += size_bytes
            self.waiting_bytes += size_bytes
            self._waiting[broadcaster] = None
            if not broadcaster.is_open:
                self._core.ledger.note_blocked(broadcaster.group, now_ms)
            if len(broadcaster.buffer) > config.broadcast_tasks_max:
                self._cut(
                    broadcaster,
                    f"has {len(broadcaster.buffer)} unsent tasks",
                    "broadcast_tasks_max",
                )
            elif (
                broadcaster.size_bytes > config.broadcast_bytes_max and len(broadcaster.buffer) > 1
            ):
                self._cut(
                    broadcaster,
                    f"has {broadcaster.size_bytes} unsent bytes",
                    "broadcast_bytes_max",
                )
        if self.waiting_bytes > config.broadcasts_bytes_max:
            self._cut_largest()

    def _cut_largest(self) -> None:
        """End the broadcast subscriptions with the largest buffers until the others are within the
        limit of bytes. Stop at a buffer of one row, which others can share."""
        bytes_max = self._core.config.broadcasts_bytes_max
        for largest in sorted(self._waiting, key=attrgetter("size_bytes"), reverse=True):
            if self.waiting_bytes <= bytes_max or len(largest.buffer) <= 1:
                return
            excess = f"is one of several that have {self.waiting_bytes} unsent bytes"
            self._cut(largest, excess, "broadcasts_bytes_max")

    def _cut(self, broadcaster: Broadcaster, excess: str, limit: str) -> None:
        self.leave(broadcaster)
        allowed = getattr(self._core.config, limit)
        message = (
            f"the broadcast subscription to {broadcaster.group.topic.name} {excess}; the limit is"
            f" {allowed}"
        )
        self._core.cut.append((broadcaster, "limit_exceeded", f"{message} ({limit})"))

    def flush(self, out: list[Dispatch], bytes_max: int, now_ms: int) -> int:
        """Append frames for broadcasters whose connections accept them to ``out``. Return the size
        of the frames in bytes."""
        total_bytes = 0
        for broadcaster in [broadcaster for broadcaster in self._waiting if broadcaster.is_open]:
            while broadcaster.buffer and total_bytes < bytes_max:
                items, size_bytes = self._frame(broadcaster)
                causes = None
                if self._core.is_recorded:
                    causes = self._core.ledger.causes(broadcaster.group, items, now_ms)
                    self._core.recorder.delivered(
                        broadcaster.group, broadcaster, items, now_ms, causes
                    )
                out.append(Dispatch(broadcaster, items, broadcaster.offered_ms, causes))
                total_bytes += size_bytes
            if not broadcaster.buffer:
                self._core.ledger.note_unblocked(broadcaster.group, now_ms)
            # If ``bytes_max`` was reached, the remaining broadcasters come first next time.
            del self._waiting[broadcaster]
            if broadcaster.buffer:
                self._waiting[broadcaster] = None
        return total_bytes

    def _frame(self, broadcaster: Broadcaster) -> tuple[list[Item], int]:
        config, core = self._core.config, self._core
        items: list[Item] = []
        size_bytes = 0
        while broadcaster.buffer and len(items) < config.delivery_frame_tasks_max:
            row_bytes = task_bytes(broadcaster.buffer[0])
            framed_bytes = size_bytes + row_bytes + (len(items) + 1) * DELIVERY_BYTES
            if items and framed_bytes > config.delivery_frame_bytes_max:
                break
            items.append((broadcaster.buffer.popleft(), 1, NO_PAST))
            size_bytes += row_bytes
        held_bytes = size_bytes + len(items) * ROW_OVERHEAD_BYTES
        broadcaster.size_bytes -= held_bytes
        self.waiting_bytes -= held_bytes
        broadcaster.group.topic.delivered += len(items)
        broadcaster.group.topic.broadcast += len(items)
        core.totals.delivered += len(items)
        return items, size_bytes

    @property
    def can_send(self) -> bool:
        """Whether a buffer has rows that its connection accepts now."""
        return any(broadcaster.is_open for broadcaster in self._waiting)
