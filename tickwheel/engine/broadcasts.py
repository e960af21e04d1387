"""Broadcasts: a copy of what comes due, for whoever is connected then.

Invariants: a broadcast has no group, no lease, no ack and no retry. It owns nothing, so a task ends
as if it were not there. What its connection does not take at once waits here, up to two limits; a
subscription that reaches one is ended, because memory must not grow with somebody's slowness. What
comes due while the topic is paused is not broadcast. Rates are about groups and do not hold for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import (
    DELIVERY_BYTES,
    Dispatch,
    Group,
    Item,
    Subscriber,
    Topic,
)
from tickwheel.model.records import NO_PAST, TaskRow, task_bytes

if TYPE_CHECKING:
    from tickwheel.engine.topics import DeliverySink
    from tickwheel.model.filters import Filter


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
                if self._core.recorder is not None:
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
