"""Commands on single tasks: cancel, reschedule, run now, look up; dead letters by id.

The shard reads what the store holds of the ids, lays over it what is not committed yet, and
passes the result here as ``TaskSnapshot``; engine memory says the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from tickwheel.engine.dead_letters import DeadLetters
from tickwheel.engine.events import CANCELLED, DELETED
from tickwheel.engine.ordering import NEVER_MS
from tickwheel.engine.ownership import Ownership, keeps_place, owes, wants
from tickwheel.engine.state import MOVE_BYTES, Core
from tickwheel.engine.topics import DeliveryAttempts, has_order, key_of, priority_of
from tickwheel.model.records import (
    NO_PAST,
    Failure,
    Outcome,
    ProgressState,
    TaskOptions,
    TaskRow,
    TaskSnapshot,
)
from tickwheel.model.states import State

__all__ = ["Control", "GroupView", "TaskSnapshot"]


class GroupView(NamedTuple):
    """One group's standing with a task, for an answer."""

    state: str
    attempt: int
    at_ms: int
    failures: tuple[Failure, ...]
    retries_left: int
    snoozes: int = 0
    deaths: int = 0


class Control:
    """The verbs on tasks by id. Every answer is a word of the protocol."""

    def __init__(self, core: Core, ownership: Ownership, dead_letters: DeadLetters) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters

    # --- where it stands ---------------------------------------------------------------------

    def absent(self, task_id: int) -> str:
        """The state of a task of which no record is left."""
        outcome = self._core.outcomes.get(task_id)
        if outcome is not None:
            return outcome.name.lower()
        return "gone" if self._core.was_assigned(task_id) else "unknown"

    def state(self, known: TaskSnapshot) -> State:
        """The state of the whole task in one word: that of its most active group."""
        core, task_id = self._core, known.row.id
        groups = self._ownership.groups_of(known)
        if any(task_id in group.flight for group in groups):
            return State.IN_FLIGHT
        if task_id in core.retrying:
            return State.WAITING
        if not groups and self._ownership.keepers(known):
            return State.DEAD
        if core.is_scheduled(known.row):
            return State.SCHEDULED
        return State.READY

    def is_wanted(self, known: TaskSnapshot) -> bool:
        """Whether a group is still owed the task; not when only dead letters are left."""
        return bool(self._ownership.groups_of(known))

    def view(self, known: TaskSnapshot, mono_to_wall_ms: int) -> dict[str, GroupView]:
        """Each group's standing; ``mono_to_wall_ms`` turns lease ends into wall time."""
        task_id = known.row.id
        own = known.row.options.retry if known.row.options is not None else None
        views: dict[str, GroupView] = {}
        for name, dead in known.dead.items():
            views[name] = GroupView(
                "dead", dead.attempt, dead.died_ms, dead.failures, 0, deaths=dead.deaths
            )
        topic = self._core.topic(known.row.topic)
        if self._core.is_scheduled(known.row):
            return views
        for group in self._ownership.groups_of(known):
            if group is topic.default_backlog:
                continue
            policy = self._core.policy(own, group)
            lease, attempts = group.flight.get(task_id), group.delivery_attempts.get(task_id)
            if lease is not None:
                views[group.name] = GroupView(
                    "in_flight",
                    lease.attempt,
                    lease.deadline_mono_ms + mono_to_wall_ms,
                    lease.past.failures,
                    policy.retries_left(lease.past.failed + 1),
                    lease.past.snoozes,
                    lease.past.deaths,
                )
                continue
            attempt, past = group.numbers.get(task_id, 0), NO_PAST
            if attempts is not None:
                attempt, past = attempts.attempt, attempts.past
            at_ms = group.waiting.get(task_id)
            state = "ready" if at_ms is None else "waiting"
            if at_ms == NEVER_MS:
                state, at_ms = "held", self._core.orderings.of[group].held[task_id]
            views[group.name] = GroupView(
                state,
                attempt,
                known.row.due_ms if at_ms is None else at_ms,
                past.failures,
                policy.retries_left(past.failed),
                past.snoozes,
                past.deaths,
            )
        for name, progress in known.progress.items():
            if progress.state.is_over:
                word = "expired" if progress.state is ProgressState.EXPIRED else "acked"
                views[name] = GroupView(word, progress.attempt, progress.at_ms, (), 0)
        for group in topic.live_groups if topic.filtering else ():
            if group.name not in views and owes(group, known.row) and not wants(group, known.row):
                views[group.name] = GroupView("filtered", 0, known.row.due_ms, (), 0)
        return views

    # --- cancel, reschedule --------------------------------------------------------------

    def cancel(self, task_id: int, known: TaskSnapshot | None) -> str:
        if known is None:
            state = self.absent(task_id)
            return "already_cancelled" if state == "cancelled" else state
        kept = self._end(known, Outcome.CANCELLED, CANCELLED)
        if kept is not None:
            return kept.value
        self._core.totals.cancelled += 1
        self._core.topic(known.row.topic).cancelled += 1
        return "cancelled"

    def delete(self, known: TaskSnapshot) -> bool:
        """End a task of a topic that is being deleted. False: a consumer has it, or it is dead."""
        return self._end(known, Outcome.DELETED, DELETED) is None

    def _end(self, known: TaskSnapshot, outcome: Outcome, how: str) -> State | None:
        """End the task, wherever it is; returns the state that it is too late in, or None."""
        core, topic = self._core, self._core.topic(known.row.topic)
        state = State.SCHEDULED if self._is_far(known) else self.state(known)
        if state in (State.IN_FLIGHT, State.DEAD):
            return state
        if state is State.SCHEDULED:
            core.unschedule(known.row)
        else:
            self._take_out_everywhere(known)
        self._dead_letters.task_ends(known)
        core.end(known.row.id, outcome, topic.name, key_of(known.row))
        core.lost_task(topic)
        if core.recorder is not None:
            core.recorder.ended(topic.name, None, how, known.row.id, last=True)
        return None

    def reschedule(
        self, task_id: int, due_ms: int, known: TaskSnapshot | None, now_ms: int
    ) -> tuple[str, int | None]:
        """Move the next delivery to ``due_ms`` (not in the past: the shard clips it)."""
        if known is None:
            state = self.absent(task_id)
            return ("already_cancelled" if state == "cancelled" else state), None
        core = self._core
        if self._is_far(known):
            self._move(known.row, due_ms, now_ms)
            return "scheduled", due_ms
        state = self.state(known)
        if state in (State.IN_FLIGHT, State.DEAD):
            return state.value, None
        if state is State.SCHEDULED or not self.has_history(known):
            is_held = task_id in core.replaced
            self._take_back(known, state)
            row = self._ownership.moved(known.row._replace(due_ms=due_ms), now_ms)
            core.write(row, is_moved=row.options is known.row.options)
            if is_held:
                core.hold(row)
            else:
                core.schedule(row, now_ms)
            if core.recorder is not None:
                core.recorder.rescheduled(row, due_ms)
        else:
            self._ownership.look_ahead(known, now_ms)
            if task_id in core.open.effects.ended:
                # A former group of a replay's name had acked it, and so has everybody else.
                return self.absent(task_id), None
            self._postpone(known, due_ms)
            if core.recorder is not None:
                core.recorder.rescheduled(known.row, due_ms)
        return "scheduled", due_ms

    def replace(
        self,
        known: TaskSnapshot,
        due_ms: int,
        body: bytes,
        options: TaskOptions | None,
        source: object,
        now_ms: int,
    ) -> None:
        """Replace the body, options and due time of a task that nobody has had, by the will of
        ``source``. It is delivered when that is durable, and not before."""
        core = self._core
        self._take_back(known, self.state(known))
        former = known.row.options
        if former is not None and former.order_id is not None:
            options = (options or TaskOptions())._replace(order_id=former.order_id)
        row = TaskRow(known.row.id, due_ms, known.row.topic, body, options)
        row = self._ownership.moved(row, now_ms)
        core.write(row, is_moved=False)
        core.hold(row)
        if core.recorder is not None:
            core.recorder.replaced(source, row, now_ms)

    def next_ms(self, known: TaskSnapshot) -> int:
        """When a task that groups have had, and nobody has now, comes next; at least (wall ms)."""
        task_id = known.row.id
        waits = (group.waiting.get(task_id) for group in self._ownership.groups_of(known))
        times = (at_ms for at_ms in waits if at_ms is not None and at_ms != NEVER_MS)
        return min(times, default=known.row.due_ms)

    def _take_back(self, known: TaskSnapshot, state: State) -> None:
        """Take a task that nobody has had from where it is, to be scheduled anew."""
        if state is State.SCHEDULED:
            self._core.unschedule(known.row)
        else:
            self._take_out_everywhere(known)
            self._ownership.forget(known.row.id)
            self._core.drop(known.row.id)

    def _is_far(self, known: TaskSnapshot) -> bool:
        """Whether the task has certainly not fired: it is on the wheel, and nowhere else."""
        row, core = known.row, self._core
        return (
            row.due_ms > core.wheel.position_ms
            and row.due_ms > core.acted_ms
            and row.id not in core.retrying
            and row.id not in core.replaced
            and not known.progress
            and not known.dead
        )

    def _move(self, row: TaskRow, due_ms: int, now_ms: int) -> None:
        """Move a task that ``_is_far`` to another due time."""
        core = self._core
        core.wheel.cancel(row.id, row.due_ms)
        if row.id in core.resident_rows:
            core.drop(row.id)
        if has_order(row):
            core.hold_order(row)
        moved = TaskRow(row.id, due_ms, row.topic, row.body, row.options)
        if core.topics[row.topic].groups:
            moved = self._ownership.moved(moved, now_ms)
        core.write(moved, is_moved=moved.options is row.options)
        core.put_on_wheel(moved, now_ms)
        if core.recorder is not None:
            core.recorder.rescheduled(moved, due_ms)

    # --- many at once ------------------------------------------------------------------------
    #
    # Of tasks of which nothing is recorded but due time, body and key, as columns. Those that may
    # have fired, and what else is not usual, are left to the verbs above.

    def cancel_many(
        self, name: str, found: Mapping[int, int], keys: Mapping[int, str]
    ) -> Collection[int]:
        """Cancel the tasks of ``found`` (id → due_ms, on the topic ``name``) that certainly wait on
        the wheel and nowhere else; returns their ids. ``keys``: id → key of all that have one, and
        maybe of others."""
        core, topic = self._core, self._core.topic(name)
        far = self._far(found)
        if not far:
            return ()
        core.wheel.cancel_many(list(far), list(far.values()))
        for task_id in far.keys() & core.resident_rows.keys():
            core.drop(task_id)
        topic.scheduled -= len(far)
        core.scheduled -= len(far)
        if keys:
            keys = {task_id: keys[task_id] for task_id in far if task_id in keys}
        core.end_plain(far, Outcome.CANCELLED, name, keys)
        core.totals.cancelled += len(far)
        topic.cancelled += len(far)
        core.lost_task(topic)
        if core.recorder is not None:
            core.recorder.ended_many(name, CANCELLED, list(far))
        return far

    def reschedule_many(
        self, name: str, found: Mapping[int, int], dues_ms: Mapping[int, int], now_ms: int
    ) -> Mapping[int, int]:
        """Move the tasks of ``found`` that ``cancel_many`` would cancel; ``dues_ms`` has the new
        times of all. Returns id → due_ms of those that were moved."""
        core = self._core
        far = self._far(found)
        if not far or not keeps_place(core.topic(name).groups.values(), min(far)):
            return {}
        moved = {task_id: dues_ms[task_id] for task_id in far}
        ids, new_ms = list(moved), list(moved.values())
        core.wheel.cancel_many(ids, list(far.values()))
        for task_id in far.keys() & core.resident_rows.keys():
            core.drop(task_id)
        core.open.effects.moved |= moved
        core.open.updated_bytes += len(moved) * MOVE_BYTES
        core.wheel.add_many(ids, new_ms)
        if core.recorder is not None:
            core.recorder.rescheduled_many(name, ids, new_ms)
        return moved

    def _far(self, found: Mapping[int, int]) -> Mapping[int, int]:
        """The tasks of ``found`` that have certainly not fired, as in ``_is_far``."""
        core = self._core
        after_ms = max(core.wheel.position_ms, core.acted_ms)
        if min(found.values(), default=0) > after_ms and core.retrying.keys().isdisjoint(found):
            return found
        return {i: at for i, at in found.items() if at > after_ms and i not in core.retrying}

    def has_history(self, known: TaskSnapshot) -> bool:
        """Whether some group has attempts, an ack or a dead letter of the task to remember."""
        if known.dead or any(p.state.is_over for p in known.progress.values()):
            return True
        task_id = known.row.id
        # One that waits without an attempt does so because the clock went back.
        return any(task_id in group.delivery_attempts for group in self._ownership.groups_of(known))

    def _take_out_everywhere(self, known: TaskSnapshot) -> None:
        for group in self._ownership.groups_of(known):
            self._core.leave(group, known.row)

    def _postpone(self, known: TaskSnapshot, due_ms: int) -> None:
        core, task_id = self._core, known.row.id
        for group in self._ownership.groups_of(known):
            if task_id in group.flight:
                continue
            attempts = group.delivery_attempts.get(task_id)
            if attempts is None:
                attempts = DeliveryAttempts(core.number(group, task_id), 0, priority_of(known.row))
            # One of which a delivery counts stays the holder of its order key.
            core.leave(group, known.row, stays_holder=attempts.was_had)
            group.delivery_attempts[task_id] = attempts
            core.lifetimes.begin(known.row)
            core.wait(group, task_id, due_ms)
            if group.is_ordered:
                self._core.orderings.of[group].waits(known.row)

    # --- dead letters ------------------------------------------------------------------------

    def requeue(self, task_id: int, name: str, known: TaskSnapshot | None, now_ms: int) -> str:
        """Requeue a dead letter of the group ``name``; returns the word for what became of it."""
        if known is None:
            return self.absent(task_id)
        return self._dead_letters.requeue(known, name, now_ms)

    def delete_dead(self, task_id: int, name: str, known: TaskSnapshot | None) -> str:
        """Delete a dead letter of the group ``name``; returns the word for what became of it."""
        return self.absent(task_id) if known is None else self._dead_letters.delete(known, name)
