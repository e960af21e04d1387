"""Broadcast subscriptions: everything of a topic that comes due while they are connected.

No group, no lease, no ack, no retry: they own nothing, so a task ends as if they were not there.
What a connection does not take at once waits here, up to two limits; a subscription that reaches
one is ended, because memory must not grow with somebody's slowness. What comes due while the
topic is paused is not broadcast. Rates are about groups and do not hold here.
"""

from __future__ import annotations

from collections import deque

from tickwheel.wheel.core import ROW_OVERHEAD_BYTES, Core
from tickwheel.wheel.groups import Group, Topic
from tickwheel.wheel.leases import Dispatch, Item, Subscriber
from tickwheel.wheel.records import TaskRow


class Broadcaster(Subscriber):
    """One of them. Its group is a stand-in that holds nothing."""

    __slots__ = ("buffer", "size_bytes")

    def __init__(self, owner: object, topic: Topic, prefetch: int, label: str = "") -> None:
        super().__init__(owner, Group(topic, "", 0), prefetch, 0, label=label)
        self.buffer: deque[TaskRow] = deque()
        self.size_bytes = 0

    @property
    def is_subscribed(self) -> bool:
        return self in self.group.topic.broadcasters

    @property
    def is_open(self) -> bool:
        """It takes what there is: not behind, and not paused by ``prefetch`` 0."""
        return not self.blocked and self.prefetch > 0


class Broadcasts:
    """All of one engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[Broadcaster, None] = {}
        """Those with something in their buffers."""

    def join(self, broadcaster: Broadcaster) -> None:
        broadcaster.group.topic.broadcasters[broadcaster] = None

    def leave(self, broadcaster: Broadcaster) -> None:
        broadcaster.group.topic.broadcasters.pop(broadcaster, None)
        self._waiting.pop(broadcaster, None)
        broadcaster.buffer.clear()
        broadcaster.size_bytes = 0

    def offer(self, topic: Topic, row: TaskRow) -> None:
        """The task has come due."""
        if topic.settings.paused:
            return
        config = self._core.config
        size_bytes = len(row.body) + ROW_OVERHEAD_BYTES
        for one in list(topic.broadcasters):
            assert isinstance(one, Broadcaster)
            one.buffer.append(row)
            one.size_bytes += size_bytes
            self._waiting[one] = None
            if len(one.buffer) > config.broadcast_tasks_max:
                self._cut(one, f"{len(one.buffer)} tasks wait for it", "broadcast_tasks_max")
            elif one.size_bytes > config.broadcast_bytes_max and len(one.buffer) > 1:
                self._cut(one, f"{one.size_bytes} bytes wait for it", "broadcast_bytes_max")

    def _cut(self, one: Broadcaster, found: str, limit: str) -> None:
        self.leave(one)
        allowed = getattr(self._core.config, limit)
        said = f"the broadcast of {one.group.topic.name}: {found}; the limit is {allowed}"
        self._core.cut.append((one, "limit_exceeded", f"{said} ({limit})"))

    def flush(self, out: list[Dispatch], bytes_max: int, now_ms: int) -> int:
        """Frames for those whose connections take them; the bytes in them."""
        total_bytes = 0
        for one in [one for one in self._waiting if one.is_open]:
            while one.buffer and total_bytes < bytes_max:
                items, size_bytes = self._frame(one)
                if self._core.recorder is not None:
                    self._core.recorder.delivered(one.group, one, items, now_ms)
                out.append(Dispatch(one, items))
                total_bytes += size_bytes
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
            if size_bytes >= config.delivery_frame_bytes_max:
                break
            row = one.buffer.popleft()
            items.append((row, 1))
            size_bytes += len(row.body)
        one.size_bytes -= size_bytes + len(items) * ROW_OVERHEAD_BYTES
        one.group.topic.delivered += len(items)
        one.group.topic.broadcast += len(items)
        core.totals.delivered += len(items)
        return items, size_bytes

    @property
    def can_go_on(self) -> bool:
        """Something waits for a connection that takes it."""
        return any(one.is_open for one in self._waiting)
