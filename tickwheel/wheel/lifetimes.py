"""Times to live: when tasks that nobody has taken are to expire, without anybody asking.

Every group that a task with a ttl is ready or waiting in has one handle here, on a wheel of its
own; a task in flight has none. So what lies for nobody, or behind a pause, is found at its end,
at 16 to 24 bytes a task, and a task that is delivered in time costs two steps of O(1).

Invariant: handles on the wheel and in ``fired`` are one for each (task with a ttl, group) that
is ready, being loaded or waiting.
"""

from __future__ import annotations

from tickwheel.wheel.leases import ttl_end_ms
from tickwheel.wheel.records import TaskRow
from tickwheel.wheel.timing import TimingWheel


class Lifetimes:
    """Handles only: what expiring means is ``Delivery.lapsed``."""

    def __init__(self, now_ms: int, slots: int, tick_ms: int) -> None:
        self.wheel = TimingWheel(now_ms, slots=slots, tick_ms=tick_ms)
        self.fired: dict[int, int] = {}
        """id → handles whose time has come, while the task is being looked up."""

    def begin(self, row: TaskRow) -> None:
        """The task is ready or waiting in one group more."""
        end_ms = ttl_end_ms(row.due_ms, row.extras)
        if end_ms is not None:
            self.add(row.id, end_ms)

    def add(self, task_id: int, end_ms: int) -> None:
        self.wheel.add(task_id, end_ms)

    def end(self, row: TaskRow) -> None:
        """The task is ready or waiting in one group less."""
        end_ms = ttl_end_ms(row.due_ms, row.extras)
        if end_ms is not None:
            self.remove(row.id, end_ms)

    def remove(self, task_id: int, end_ms: int) -> None:
        left = self.fired.get(task_id)
        if left is None:
            self.wheel.orphan(task_id, end_ms)
        elif left == 1:
            del self.fired[task_id]
        else:
            self.fired[task_id] = left - 1

    def fire(self, now_ms: int, limit: int, looked_up_max: int) -> tuple[list[int], bool]:
        """Up to ``limit`` tasks to look up, and whether more are over. At most
        ``looked_up_max`` are being looked up at a time."""
        room = looked_up_max - len(self.fired)
        if not len(self.wheel) or room <= 0:
            return [], False
        ids, _, more = self.wheel.advance(now_ms, min(limit, room))
        fresh = [task_id for task_id in dict.fromkeys(ids) if task_id not in self.fired]
        for task_id in ids:
            self.fired[task_id] = self.fired.get(task_id, 0) + 1
        return fresh, more

    def next_ms(self, now_ms: int) -> int | None:
        """When to call ``fire`` next."""
        return self.wheel.next_due_ms(now_ms) if len(self.wheel) else None

    def __len__(self) -> int:
        return len(self.wheel) + sum(self.fired.values())
