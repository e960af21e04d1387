"""The second half, first part: what is due becomes ready, or expires.

Handing out is ``Dispatching``'s, which this class adds to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tickwheel.wheel.dispatching import Dispatching
from tickwheel.wheel.groups import Group, Topic
from tickwheel.wheel.leases import Dispatch, Item, priority_of, ttl_end_ms
from tickwheel.wheel.records import Known, TaskRow

__all__ = ["Delivery", "Dispatch", "Item", "priority_of"]


class Delivery(Dispatching):
    """Due, ttl over; dispatch and subscribers by inheritance."""

    # --- due -------------------------------------------------------------------------------

    def fire(self, now_ms: int, limit: int) -> bool:
        """Hand up to ``limit`` due handles to their groups. True: call again at once."""
        core = self._core
        room = core.config.loading_max + core.missing_apart - len(core.firing)
        if room <= 0:
            return False
        ids, dues, more = core.wheel.advance(now_ms, min(limit, room))
        hot, retrying = core.hot, core.retrying
        for task_id, due_ms in zip(ids, dues, strict=True):
            if task_id in retrying and self._retry_due(task_id, due_ms, now_ms):
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
        """Rows that ``wants`` asked for, as they are now. One that is due and has no row has not
        left, or its handle would have: it stays, until its row is found."""
        core = self._core
        for task_id in asked:
            row = rows.get(task_id)
            if row is None:
                continue
            due_ms = core.firing.pop(task_id, None)
            if due_ms is not None:
                if row.due_ms == due_ms:
                    self._due(row, now_ms)
            elif core.has_room and row.due_ms > now_ms and core.is_scheduled(row):
                core.keep(row)

    def loaded_ready(self, group: Group, asked: Iterable[int], rows: dict[int, TaskRow]) -> None:
        """Rows of ready tasks whose turn had come without a body in memory.

        Those that can be delivered at once are kept, whatever the budget: a load is bounded.
        Others as long as there is room. A task that is still being loaded and has no row is
        missing: it stays until that is found."""
        core, asked = self._core, list(asked)
        wanted = group.credit_up_to(len(asked))
        core.make_room()
        back: list[tuple[int, int]] = []
        for task_id in asked:
            row = rows.get(task_id)
            if row is None or group.loading.pop(task_id, None) is None:
                continue
            if wanted > 0 or core.has_room:
                core.keep(row)
                wanted -= 1
            back.append((task_id, priority_of(row)))
        for task_id, priority in reversed(back):
            group.ready.push_front(task_id, priority)
        core.wake(group)

    def not_loaded(self, group: Group, ids: Sequence[int]) -> None:
        """Nobody can take these now, and there is no room for them: ready without a row again."""
        for task_id in reversed(ids):
            priority = group.loading.pop(task_id, None)
            if priority is not None:
                group.ready.push_front(task_id, priority)
        self._core.wake(group)

    def found_again(self, known: Known, now_ms: int) -> None:
        """The row of a task that was missing: whatever waited for it goes on."""
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
        topic = core.topic(row.topic)
        if topic.closing and not topic.live_groups and not self._ownership.was_closed(topic, row):
            topic.deferred[row.id] = row.due_ms
            core.drop(row.id)
            return
        topic.scheduled -= 1
        core.scheduled -= 1
        self.make_ready(topic, row, now_ms)
        if topic.broadcasters:
            self._broadcasts.offer(topic, row)

    def make_ready(self, topic: Topic, row: TaskRow, now_ms: int) -> None:
        """The task is owed to the groups of its topic from now on."""
        core = self._core
        if not core.has_room:
            core.drop(row.id)
        elif row.id not in core.hot:
            core.keep(row)
        priority = 0
        if row.extras is not None:
            priority = row.extras.priority
            core.lifetimes.begin(row)
        if topic.unowned is not None:
            topic.unowned.ready.push(row.id, priority, now_ms)
            if topic.unowned.ready_count >= core.config.backlog_max:
                core.full_topics[topic.name] = None
            return
        groups = topic.live_groups
        if len(groups) > 1 or topic.closing:
            groups = self._ownership.assign(topic, groups, row)
        for group in groups:
            group.ready.push(row.id, priority, now_ms)
            if group.able:
                core.runnable[group] = None

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
        tries = group.tries.get(task_id)
        group.ready.push(task_id, tries.priority if tries else 0, now_ms)
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

    def lapsed(self, asked: Iterable[int], known: Mapping[int, Known], now_ms: int) -> None:
        """Records that ``wants_lapsed`` asked for: what is ready or waiting expires."""
        core = self._core
        lifetimes = core.lifetimes
        for task_id in asked:
            found = known.get(task_id)
            if task_id not in lifetimes.fired or found is None:
                # It has left in another way, or its row is missing: then it stays where it is.
                continue
            end_ms = ttl_end_ms(found.row.due_ms, found.row.extras)
            if end_ms is None or now_ms < end_ms:
                # The clock went back while it was looked up.
                for _ in range(lifetimes.fired.pop(task_id)):
                    lifetimes.begin(found.row)
                continue
            for group in self._ownership.groups_of(found):
                if task_id not in group.flight and task_id in lifetimes.fired:
                    tries = group.tries.get(task_id)
                    core.leave(group, found.row)
                    if tries is not None:
                        group.tries[task_id] = tries
                    self.expire(group, found.row)
