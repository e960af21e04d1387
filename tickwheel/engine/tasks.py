"""Commands on existing tasks: on tasks by id, on all tasks of a selection, and on the tasks of held
order keys.

Tasks by id (``Control``): cancel, reschedule, run now and look up tasks, settle dead letters. The
shard reads the records of the ids from the store, overlays changes that are not committed, and
passes the results as ``TaskSnapshot``. The rest of a task's state is in the engine's memory.

Bulk operations (``Bulks``): their rows, their progress, and the effect of a step on tasks. The
caller (``server/shard/bulk.py``) reads the tasks of a step and bounds its time. This module matches
a selection, applies the kind's effect, and writes the row of the bulk operation in the same batch.
Like acks, these changes stay even if a batch is refused. Only a kind that creates new tasks can be
refused; it calls ``save_before_step`` before each step.

| kind | items | effect | refused states and reasons |
|---|---|---|---|
| cancel | tasks | end | in_flight, dead |
| reschedule | tasks | another due time (``_new_due_times``) | in_flight, dead, due_too_far |
| spread | tasks | the emptiest ticks of a due window (``_spread``) | all except scheduled |
| run_now | tasks | due now | in_flight, dead |
| requeue | dead letters | delivered again, failures reset | ttl_over |
| delete | dead letters | deleted | |
| reset | tasks due since a moment | given to the group again (``groups.Resets``) | no_body |

Held keys (``KeyControl``): with ``order_failure=hold`` (the default), an order key is held when its
task has failed for good. Its later tasks wait until an operator releases, skips, cancels or
reschedules the failed task. A paused key waits until an operator resumes it. See ``ordering.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.events import CANCELLED, DELETED
from tickwheel.engine.ordering import NEVER_MS, mark_of_key
from tickwheel.engine.ownership import Ownership, keeps_place, owes, wants
from tickwheel.engine.settlement import TTL_OVER, DeadLetters
from tickwheel.engine.state import MOVE_BYTES, Core
from tickwheel.engine.topics import (
    DeliveryAttempts,
    Group,
    Lease,
    has_order,
    key_of,
    priority_of,
    traits_of,
)
from tickwheel.model.filters import Filter
from tickwheel.model.kinds import (
    BULK,
    PAUSED_KEY,
    REFUSALS_MAX,
    Bulk,
    BulkRow,
    BulkState,
    PausedKey,
)
from tickwheel.model.records import (
    NO_PAST,
    Failure,
    OrderRules,
    Outcome,
    State,
    TaskOptions,
    TaskRow,
    TaskSnapshot,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.engine.ordering import Ordering
    from tickwheel.engine.queues import Share
    from tickwheel.engine.state import Batch
    from tickwheel.model.kinds import Place, Selection

__all__ = ["Control", "GroupView", "TaskSnapshot"]


Done = tuple[str, int | None]
"""(outcome word, new due time if the task was moved)"""
ReschedulePlan = Callable[[Mapping[int, int]], Mapping[int, int]]
"""Maps (id → time of the next attempt) to (id → new due time), without tasks that do not move."""


class GroupView(NamedTuple):
    """The state of a task in a group, as answers show it."""

    state: str
    attempt: int
    at_ms: int
    failures: tuple[Failure, ...]
    retries_left: int | None
    """None if their number has no limit."""
    snoozes: int = 0
    deaths: int = 0


class Control:
    """The verbs on tasks by id. Answers are words of the protocol."""

    def __init__(self, core: Core, ownership: Ownership, dead_letters: DeadLetters) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters

    # --- states ------------------------------------------------------------------------------

    def absent(self, task_id: int) -> str:
        """Return the state of a task that has no record, as a word of the protocol."""
        outcome = self._core.outcomes.get(task_id)
        if outcome is not None:
            return outcome.name.lower()
        return "gone" if self._core.was_assigned(task_id) else "unknown"

    def state(self, snapshot: TaskSnapshot) -> State:
        """Return the state of a task in its most active group."""
        core, task_id = self._core, snapshot.row.id
        groups = self._ownership.groups_of(snapshot)
        if any(task_id in group.flight for group in groups):
            return State.IN_FLIGHT
        if task_id in core.retrying:
            return State.WAITING
        if not groups and self._ownership.keepers(snapshot):
            return State.DEAD
        if core.is_scheduled(snapshot.row):
            return State.SCHEDULED
        return State.READY

    def is_owed(self, snapshot: TaskSnapshot) -> bool:
        """Return whether a group is still owed the task. Dead letters do not count."""
        return bool(self._ownership.groups_of(snapshot))

    def view(self, snapshot: TaskSnapshot, mono_to_wall_ms: int) -> dict[str, GroupView]:
        """Return the task's state in each group; ``mono_to_wall_ms`` converts lease ends."""
        task_id = snapshot.row.id
        views: dict[str, GroupView] = {}
        for name, dead in snapshot.dead.items():
            views[name] = GroupView(
                "dead", dead.attempt, dead.died_ms, dead.failures, 0, deaths=dead.deaths
            )
        topic = self._core.topic(snapshot.row.topic)
        if self._core.is_scheduled(snapshot.row):
            return views
        for group in self._ownership.groups_of(snapshot):
            if group is topic.default_backlog:
                continue
            lease, attempts = group.flight.get(task_id), group.delivery_attempts.get(task_id)
            at_ms: int | None
            if lease is not None:
                at_ms = lease.deadline_mono_ms + mono_to_wall_ms
                state, attempt, past = "in_flight", lease.attempt, lease.past
            else:
                attempt, past = group.numbers.get(task_id, 0), NO_PAST
                if attempts is not None:
                    attempt, past = attempts.attempt, attempts.past
                at_ms = group.waiting.get(task_id)
                state = "ready" if at_ms is None else "waiting"
                if at_ms == NEVER_MS:
                    state, at_ms = "held", self._core.orderings.by_group[group].held[task_id]
            views[group.name] = GroupView(
                state,
                attempt,
                snapshot.row.due_ms if at_ms is None else at_ms,
                past.failures,
                0
                if state == "held"
                else self._retries_left(group, snapshot.row, past.failed + (lease is not None)),
                past.snoozes,
                past.deaths,
            )
        for name, progress in snapshot.progress.items():
            if progress.state.is_over:
                word = progress.outcome.name.lower()
                views[name] = GroupView(word, progress.attempt, progress.at_ms, (), 0)
        for group in topic.live_groups if topic.filtering else ():
            if (
                group.name not in views
                and owes(group, snapshot.row)
                and not wants(group, snapshot.row)
            ):
                views[group.name] = GroupView("filtered", 0, snapshot.row.due_ms, (), 0)
        return views

    def _retries_left(self, group: Group, row: TaskRow, counted: int) -> int | None:
        """Return how many retries are left after ``counted`` failed or unfinished deliveries; None
        if there is no limit. For a task with an order key, order settings replace the policy."""
        if has_order(row):
            attempts_max = OrderRules.of(group.settings.order).attempts
            return None if attempts_max is None else max(0, attempts_max - max(1, counted))
        own = row.options.retry if row.options is not None else None
        return self._core.policy(own, group).retries_left(counted)

    # --- cancel, reschedule --------------------------------------------------------------

    def too_late(self, task_id: int) -> str:
        """Return the answer of a command that cannot change a task because it has no record."""
        state = self.absent(task_id)
        return "already_cancelled" if state == "cancelled" else state

    def cancel(self, task_id: int, snapshot: TaskSnapshot | None) -> str:
        if snapshot is None:
            return self.too_late(task_id)
        blocking_state = self._end(snapshot, Outcome.CANCELLED, CANCELLED)
        if blocking_state is not None:
            return blocking_state.value
        self._core.totals.cancelled += 1
        self._core.topic(snapshot.row.topic).cancelled += 1
        return "cancelled"

    def delete(self, snapshot: TaskSnapshot) -> bool:
        """End a task of a topic in deletion. Return False if the task is in flight or dead."""
        return self._end(snapshot, Outcome.DELETED, DELETED) is None

    def _end(self, snapshot: TaskSnapshot, outcome: Outcome, event: str) -> State | None:
        """End a task. Return the state that prevents it, or None."""
        core, topic = self._core, self._core.topic(snapshot.row.topic)
        state = State.SCHEDULED if self._is_only_on_wheel(snapshot) else self.state(snapshot)
        if state in (State.IN_FLIGHT, State.DEAD):
            return state
        if state is State.SCHEDULED:
            core.unschedule(snapshot.row)
        else:
            self._take_out_everywhere(snapshot)
        self._dead_letters.task_ends(snapshot)
        core.end(snapshot.row.id, outcome, topic.name, key_of(snapshot.row))
        core.lost_task(topic)
        core.recorder.ended(topic.name, None, event, snapshot.row.id, last=True)
        return None

    def reschedule(
        self, task_id: int, due_ms: int, snapshot: TaskSnapshot | None, now_ms: int
    ) -> tuple[str, int | None]:
        """Move the next delivery to ``due_ms``, which must not be in the past. Return (state, new
        due time), or (state, None) if the task was not moved."""
        if snapshot is None:
            return self.too_late(task_id), None
        core = self._core
        if self._is_only_on_wheel(snapshot):
            self._move(snapshot.row, due_ms, now_ms)
            return "scheduled", due_ms
        state = self.state(snapshot)
        if state in (State.IN_FLIGHT, State.DEAD):
            return state.value, None
        if state is State.SCHEDULED or not self.has_history(snapshot):
            is_held = task_id in core.replaced
            self._unplace(snapshot, state)
            row = self._ownership.with_place(snapshot.row._replace(due_ms=due_ms), now_ms)
            core.write(row, is_moved=row.options is snapshot.row.options)
            if is_held:
                core.hold(row)
            else:
                core.schedule(row, now_ms)
            core.recorder.rescheduled(row, due_ms)
        else:
            self._ownership.examine_ahead(snapshot, now_ms)
            if task_id in core.open.effects.ended:
                # Looking ahead found that every group has acked the task.
                return self.absent(task_id), None
            self._postpone(snapshot, due_ms)
            core.recorder.rescheduled(snapshot.row, due_ms)
        return "scheduled", due_ms

    def replace(
        self,
        snapshot: TaskSnapshot,
        due_ms: int,
        body: bytes,
        options: TaskOptions | None,
        source: object,
        now_ms: int,
    ) -> None:
        """Replace the body, options and due time of a task that this start has not delivered, for
        ``source``. The task is not delivered before the change is durable."""
        core, task_id, former = self._core, snapshot.row.id, snapshot.row.options
        self._unplace(snapshot, self.state(snapshot))
        order_id = None if former is None else former.order_id
        if order_id is None and task_id <= core.earlier_id:
            order_id = task_id  # so that no receipt of an earlier start is valid
        if order_id is not None:
            options = (options or TaskOptions())._replace(order_id=order_id)
        row = TaskRow(task_id, due_ms, snapshot.row.topic, body, options)
        row = self._ownership.with_place(row, now_ms)
        core.write(row, is_moved=False)
        core.hold(row)
        core.recorder.replaced(source, row, now_ms)

    def give_way(self, snapshot: TaskSnapshot, newer_id: int, now_ms: int) -> None:
        """Let the task ``newer_id`` replace a task that groups have already received. Where it is
        in flight, it ends when its delivery ends without an ack; elsewhere at once."""
        core, row = self._core, snapshot.row
        self._ownership.examine_ahead(snapshot, now_ms)
        if row.id in core.open.effects.ended:
            return  # looking ahead found that every group has finished the task
        for group in self._ownership.groups_of(snapshot):
            lease = group.flight.get(row.id)
            if group.is_closed:
                continue
            if lease is not None:
                lease.past = lease.past._replace(replaced_by=newer_id)
                core.replaced_leases.append(lease)
                core.recorder.overtaken(lease)
                continue
            attempts = group.delivery_attempts.get(row.id)
            attempt = core.take_number(group, row.id) if attempts is None else attempts.attempt
            core.leave(group, row)
            self._ownership.give_way(group, row, attempt, newer_id)

    def is_fully_replaced(self, snapshot: TaskSnapshot) -> bool:
        """Return whether a newer task has replaced this task in every group that is owed it."""
        groups = [group for group in self._ownership.groups_of(snapshot) if not group.is_closed]
        leases = [group.flight.get(snapshot.row.id) for group in groups]
        return all(lease is not None and lease.past.replaced_by for lease in leases)

    def next_ms(self, snapshot: TaskSnapshot) -> int:
        """Return the earliest next attempt (wall ms) of a task that is not in flight, which is its
        due time if it is ready in a group."""
        task_id, due_ms = snapshot.row.id, snapshot.row.due_ms
        groups = self._ownership.groups_of(snapshot)
        times = (group.waiting.get(task_id, due_ms) for group in groups)
        return min((at_ms for at_ms in times if at_ms != NEVER_MS), default=due_ms)

    def _unplace(self, snapshot: TaskSnapshot, state: State) -> None:
        """Remove a task that has no attempts from the wheel or its groups."""
        if state is State.SCHEDULED:
            self._core.unschedule(snapshot.row)
        else:
            self._take_out_everywhere(snapshot)
            self._ownership.forget(snapshot.row.id)
            self._core.drop(snapshot.row.id)

    def _is_only_on_wheel(self, snapshot: TaskSnapshot) -> bool:
        """Return whether the task is only on the wheel, and so has certainly not fired."""
        row, core = snapshot.row, self._core
        return (
            row.due_ms > core.wheel.position_ms
            and row.due_ms > core.acted_ms
            and row.id not in core.retrying
            and row.id not in core.replaced
            and not snapshot.progress
            and not snapshot.dead
        )

    def _move(self, row: TaskRow, due_ms: int, now_ms: int) -> None:
        """Move a task that ``_is_only_on_wheel`` to another due time."""
        core = self._core
        core.wheel.cancel(row.id, row.due_ms)
        if row.id in core.resident_rows:
            core.drop(row.id)
        if has_order(row):
            core.hold_order(row)
        moved = TaskRow(row.id, due_ms, row.topic, row.body, row.options)
        if core.topics[row.topic].groups:
            moved = self._ownership.with_place(moved, now_ms)
        core.write(moved, is_moved=moved.options is row.options)
        core.put_on_wheel(moved, now_ms)
        core.recorder.rescheduled(moved, due_ms)

    # --- many at once ------------------------------------------------------------------------
    #
    # These verbs change tasks that have only a due time, a body and a key. They skip tasks that
    # might have fired or have more state; the verbs above change those.

    def cancel_many(
        self, name: str, dues_ms: Mapping[int, int], keys: Mapping[int, str]
    ) -> Collection[int]:
        """Cancel those tasks of ``dues_ms`` (id → due_ms, of the topic ``name``) that are certainly
        only on the wheel. Return their ids. ``keys`` (id → key) contains at least their keys."""
        core, topic = self._core, self._core.topic(name)
        unfired = self._only_on_wheel(dues_ms)
        if not unfired:
            return ()
        core.wheel.cancel_many(list(unfired), list(unfired.values()))
        for task_id in unfired.keys() & core.resident_rows.keys():
            core.drop(task_id)
        topic.scheduled -= len(unfired)
        core.scheduled -= len(unfired)
        if keys:
            keys = {task_id: keys[task_id] for task_id in unfired if task_id in keys}
        core.end_plain(unfired, Outcome.CANCELLED, name, keys)
        core.totals.cancelled += len(unfired)
        topic.cancelled += len(unfired)
        core.lost_task(topic)
        core.recorder.ended_many(name, CANCELLED, list(unfired))
        return unfired

    def reschedule_many(
        self, name: str, dues_ms: Mapping[int, int], new_due_times: ReschedulePlan
    ) -> Mapping[int, int]:
        """Move those tasks of ``dues_ms`` that ``cancel_many`` would cancel and for which
        ``new_due_times`` returns new times. Return id → due_ms of the moved tasks."""
        core = self._core
        unfired = self._only_on_wheel(dues_ms)
        if not unfired or not keeps_place(core.topic(name).groups.values(), min(unfired)):
            return {}
        moved = new_due_times(unfired)
        ids, new_ms = list(moved), list(moved.values())
        core.wheel.cancel_many(ids, [unfired[task_id] for task_id in ids])
        for task_id in moved.keys() & core.resident_rows.keys():
            core.drop(task_id)
        core.open.effects.moved |= moved
        core.open.updated_bytes += len(moved) * MOVE_BYTES
        core.wheel.add_many(ids, new_ms)
        core.recorder.rescheduled_many(name, ids, new_ms)
        return moved

    def _only_on_wheel(self, dues_ms: Mapping[int, int]) -> Mapping[int, int]:
        """Return the tasks of ``dues_ms`` that have certainly not fired."""
        core = self._core
        after_ms = max(core.wheel.position_ms, core.acted_ms)
        if min(dues_ms.values(), default=0) > after_ms and core.retrying.keys().isdisjoint(dues_ms):
            return dues_ms
        return {i: at for i, at in dues_ms.items() if at > after_ms and i not in core.retrying}

    def has_history(self, snapshot: TaskSnapshot) -> bool:
        """Return whether a group has attempts or a dead letter of the task, or has finished it."""
        if snapshot.dead or any(p.state.is_over for p in snapshot.progress.values()):
            return True
        task_id = snapshot.row.id
        # A task without attempts can be waiting only because the clock went back.
        return any(
            task_id in group.delivery_attempts for group in self._ownership.groups_of(snapshot)
        )

    def was_delivered(self, snapshot: TaskSnapshot) -> bool:
        """Return whether this start has delivered the task, or a record says that an earlier one
        has. Deliveries that were returned unstarted or reset by an operator count."""
        groups = self._core.numbered.get(snapshot.row.topic, ())
        return self.has_history(snapshot) or any(snapshot.row.id in g.numbers for g in groups)

    def _take_out_everywhere(self, snapshot: TaskSnapshot) -> None:
        for group in self._ownership.groups_of(snapshot):
            self._core.leave(group, snapshot.row)

    def _postpone(self, snapshot: TaskSnapshot, due_ms: int) -> None:
        core, task_id = self._core, snapshot.row.id
        for group in self._ownership.groups_of(snapshot):
            if task_id in group.flight:
                continue
            attempts = group.delivery_attempts.get(task_id)
            if attempts is None:
                attempts = DeliveryAttempts(
                    core.take_number(group, task_id), 0, priority_of(snapshot.row)
                )
            # A task that was attempted remains the holder of its order key.
            core.leave(group, snapshot.row, stays_holder=attempts.was_attempted)
            group.delivery_attempts[task_id] = attempts
            core.lifetimes.begin(snapshot.row)
            core.wait(group, task_id, due_ms)
            if group.is_ordered:
                self._core.orderings.by_group[group].note_wait(snapshot.row)

    # --- dead letters ------------------------------------------------------------------------

    def settle_dead(
        self,
        kind: str,
        task_id: int,
        name: str,
        snapshot: TaskSnapshot | None,
        now_ms: int,
        ttl_ms: int | None = None,
    ) -> str:
        """Requeue or delete a dead letter of the group ``name``. Return the outcome word.
        ``ttl_ms`` is the new time to live of a requeued task, or None to keep its own."""
        if snapshot is None:
            return self.absent(task_id)
        if kind == "requeue":
            return self._dead_letters.requeue(snapshot, name, now_ms, ttl_ms)
        return self._dead_letters.delete(snapshot, name)

    def dead_letter_refusal_reason(
        self, kind: str, snapshot: TaskSnapshot, now_ms: int, ttl_ms: int | None
    ) -> str | None:
        """Return why ``settle_dead`` would not change a dead letter, or None if it would."""
        if kind == "requeue" and self._dead_letters.would_expire(snapshot, ttl_ms, now_ms):
            return TTL_OVER
        return None


TASK_KINDS = ("cancel", "reschedule", "spread", "run_now")
DEAD_LETTER_KINDS = ("requeue", "delete")
RESET = "reset"
KINDS = (*TASK_KINDS, *DEAD_LETTER_KINDS, RESET)
_DONE = frozenset(("cancelled", "scheduled", "requeued", "deleted", "repeated"))
"""Outcome words of items that were changed. Every other word is the reason for a refusal."""
TOO_FAR = "due_too_far"
_CANCELLED: Done = ("cancelled", None)
_NOT_CHANGEABLE = frozenset((State.IN_FLIGHT, State.DEAD))
_NOT_SCHEDULED = frozenset(State) - {State.SCHEDULED}
FORGET_MAX = 1_000
"""Maximum number of ended bulk operations that are forgotten in one step."""


class Step(NamedTuple):
    """The result of a step of a bulk operation."""

    place: Place
    """Every task or dead letter up to this place has been examined."""
    looked_at: int
    matched: int
    words: Mapping[str, int]
    """Outcome word → number of matching tasks."""


class Bulks:
    """All bulk operations of one engine."""

    def __init__(self, core: Core, control: Control) -> None:
        self._core = core
        self._control = control
        self.rows: dict[str, BulkRow] = {}
        """Running and recently ended bulk operations by id, oldest first."""
        self._ended_mono_ms: dict[str, int] = {}
        """Ended bulk operation → when it ended, by steady time."""

    # --- start and end -----------------------------------------------------------------------

    def make(self, bulk: Bulk) -> BulkRow:
        """Create a bulk operation with a new id. It can begin when the open batch is durable."""
        self._core.bulk_running += 1
        return self._write(BulkRow(bulk))

    def end(
        self, name: str, state: BulkState, now_ms: int, mono_ms: int, note: str = ""
    ) -> BulkRow:
        """End a running bulk operation."""
        self._core.bulk_running -= 1
        self._ended_mono_ms[name] = mono_ms
        row = self._write(self.rows[name]._replace(state=state, ended_ms=now_ms, note=note))
        excess = len(self.rows) - self._core.bulk_running - self._core.config.bulk_remembered_max
        if excess > 0:
            self._forget(mono_ms, min(excess, FORGET_MAX))
        return row

    def record_step(self, name: str, step: Step) -> BulkRow:
        """Record a step of a running bulk operation in the open batch."""
        row, refused = self.rows[name], {}
        changed = sum(count for word, count in step.words.items() if word in _DONE)
        if changed < step.matched:
            refused = {word: n for word, n in step.words.items() if word not in _DONE}
        return self._write(
            row._replace(
                place=step.place,
                looked_at=row.looked_at + step.looked_at,
                matched=row.matched + step.matched,
                changed=row.changed + changed,
                refused=_merged_refusals(row.refused, refused) if refused else row.refused,
            )
        )

    def save_before_step(self, name: str) -> None:
        """Save the state of a bulk operation whose next step creates tasks, so that ``undo`` can
        restore it if the tasks are refused."""
        self._core.open.bulks_before.setdefault(name, self.rows[name])

    def undo(self, batch: Batch) -> None:
        """Restore the progress of bulk operations whose new tasks were refused with the batch.
        Operations that have ended since then stay ended."""
        before, batch.bulks_before = batch.bulks_before, {}
        for name, old in before.items():
            batch.effects.records.pop((BULK, name), None)
            row = self.rows.get(name)
            if row is None:
                continue
            self._write(old._replace(state=row.state, ended_ms=row.ended_ms, note=row.note))

    def restore(self, rows: Iterable[BulkRow], now_ms: int, mono_ms: int) -> None:
        """Restore bulk operations from stored rows."""
        for row in sorted(rows, key=lambda row: (row.bulk.made_ms, row.bulk.id)):
            self.rows[row.bulk.id] = row
            self._core.bulk_running += not row.state.is_over
            if row.state.is_over:
                self._ended_mono_ms[row.bulk.id] = mono_ms - max(0, now_ms - row.ended_ms)

    def sweep(self, mono_ms: int) -> None:
        """Forget bulk operations that ended too long ago. Call this periodically."""
        self._forget(mono_ms - self._core.config.bulk_remembered_ms, FORGET_MAX)

    def _forget(self, until_mono_ms: int, limit: int) -> None:
        ended = sorted((mono_ms, name) for name, mono_ms in self._ended_mono_ms.items())
        for ended_mono_ms, name in ended[:limit]:
            if ended_mono_ms > until_mono_ms:
                return
            del self.rows[name], self._ended_mono_ms[name]
            self._core.open.effects.drop(BULK, name)

    def _write(self, row: BulkRow) -> BulkRow:
        self.rows[row.bulk.id] = row
        self._core.open.effects.put(BULK, row)
        return row

    # --- effects on tasks, of a command or a bulk operation ----------------------------------

    def refusal_reason(
        self, bulk: Bulk, snapshot: TaskSnapshot, now_ms: int, delay_ms_max: int
    ) -> str | None:
        """Return why the operation would not change a matching task now, or None if it would."""
        state = self._control.state(snapshot)
        if state in (_NOT_CHANGEABLE if bulk.kind != "spread" else _NOT_SCHEDULED):
            return state.value
        if bulk.argument("shift_ms") is None:
            return None
        times_ms = {snapshot.row.id: self._control.next_ms(snapshot)}
        return None if self._new_due_times(bulk, times_ms, now_ms, delay_ms_max) else TOO_FAR

    def act(
        self,
        bulk: Bulk,
        matched: Iterable[TaskSnapshot],
        topic: str,
        plain: Mapping[int, int],
        keys: Mapping[int, str],
        now_ms: int,
        delay_ms_max: int,
    ) -> dict[int, Done]:
        """Apply the bulk operation to tasks. Return id → outcome. ``plain`` (id → due_ms) are tasks
        of ``topic`` that have no records except those in ``keys``, and can be changed together
        without their snapshots."""
        results: dict[int, Done] = {}
        if plain:
            results = self._act_plain(bulk, topic, plain, keys, now_ms, delay_ms_max)
        for snapshot in matched:
            if snapshot.row.id not in results:
                results[snapshot.row.id] = self._act_one(bulk, snapshot, now_ms, delay_ms_max)
        return results

    def _act_plain(
        self,
        bulk: Bulk,
        topic: str,
        plain: Mapping[int, int],
        keys: Mapping[int, str],
        now_ms: int,
        delay_ms_max: int,
    ) -> dict[int, Done]:
        if bulk.kind == "cancel":
            return dict.fromkeys(self._control.cancel_many(topic, plain, keys), _CANCELLED)

        def new_due_times(times_ms: Mapping[int, int]) -> dict[int, int]:
            return self._new_due_times(bulk, times_ms, now_ms, delay_ms_max)

        moved = self._control.reschedule_many(topic, plain, new_due_times)
        return {task_id: ("scheduled", due_ms) for task_id, due_ms in moved.items()}

    def _act_one(self, bulk: Bulk, snapshot: TaskSnapshot, now_ms: int, delay_ms_max: int) -> Done:
        task_id = snapshot.row.id
        if bulk.kind == "cancel":
            return self._control.cancel(task_id, snapshot), None
        reason = bulk.kind == "spread" and self.refusal_reason(bulk, snapshot, now_ms, delay_ms_max)
        if reason:
            return reason, None  # no tick is chosen for this task
        times_ms = {task_id: self._control.next_ms(snapshot)}
        dues_ms = self._new_due_times(bulk, times_ms, now_ms, delay_ms_max)
        if dues_ms:
            return self._control.reschedule(task_id, dues_ms[task_id], snapshot, now_ms)
        return self.refusal_reason(bulk, snapshot, now_ms, delay_ms_max) or TOO_FAR, None

    def _new_due_times(
        self, bulk: Bulk, times_ms: Mapping[int, int], now_ms: int, delay_ms_max: int
    ) -> dict[int, int]:
        """Return id → new due time for the tasks of ``times_ms`` (id → time of the next attempt),
        without tasks that would be due too far in the future."""
        if bulk.kind == "spread":
            return self._spread(bulk, times_ms, now_ms)
        shift_ms, delay_ms = bulk.argument("shift_ms"), bulk.argument("delay_ms")
        if shift_ms is not None:
            shift_ms, latest_ms = int(shift_ms), now_ms + delay_ms_max
            moved = {task_id: max(now_ms, at_ms + shift_ms) for task_id, at_ms in times_ms.items()}
            return {task_id: due_ms for task_id, due_ms in moved.items() if due_ms <= latest_ms}
        due_ms = bulk.argument("due_ms") if delay_ms is None else bulk.made_ms + int(delay_ms)
        return dict.fromkeys(times_ms, now_ms if due_ms is None else max(now_ms, int(due_ms)))

    def _spread(self, bulk: Bulk, times_ms: Mapping[int, int], now_ms: int) -> dict[int, int]:
        """Choose one of the emptiest ticks of the window for each task. All tasks share one window,
        or each window begins at its task's due time. The past part of a window is ignored."""
        core, dues_ms = self._core, dict[int, int]()
        start_ms, within_ms = bulk.argument("start_ms"), int(bulk.argument("within_ms") or 1)
        by_begin: dict[int, list[int]] = {}
        for task_id, at_ms in times_ms.items():
            by_begin.setdefault(at_ms if start_ms is None else int(start_ms), []).append(task_id)
        core.windows.begin()
        for begin_ms, ids in by_begin.items():
            first_ms = max(now_ms, begin_ms)
            last_ms = max(first_ms, begin_ms + within_ms - 1)
            moments_ms = core.windows.choose(first_ms, last_ms, len(ids), now_ms)
            dues_ms.update(zip(ids, moments_ms, strict=True))
        core.totals.windows += len(dues_ms)
        return dues_ms


def _merged_refusals(
    before: tuple[tuple[str, int], ...], added: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    counts = Counter(dict(before))
    for word, count in added.items():
        counts[word if word in counts or len(counts) < REFUSALS_MAX else "other"] += count
    return tuple(sorted(counts.items()))


TASKS_PER_STEP_MAX: Mapping[str, int] = {"spread": 500}
"""Kind → maximum tasks of a step, for kinds that search a window for each task."""


class Selector:
    """A parsed selection, which matches tasks by their row and state."""

    def __init__(self, selection: Selection) -> None:
        """Raise FilterError if the selection's filter is not valid."""
        self.state = selection.state
        self.reason = selection.reason.casefold()
        self._prefix = selection.key_prefix
        self._from_ms = selection.due_from_ms
        self._to_ms = selection.due_to_ms
        self._filter: Filter | None = None
        if selection.tags is not None or selection.where is not None:
            self._filter = Filter(selection.tags, selection.where)

    def fits(self, row: TaskRow) -> bool:
        """Return whether the task matches the selection, ignoring its state."""
        if self._from_ms is not None and row.due_ms < self._from_ms:
            return False
        if self._to_ms is not None and row.due_ms >= self._to_ms:
            return False
        if self._prefix:
            key = None if row.options is None else row.options.key
            if key is None or not key.startswith(self._prefix):
                return False
        return self._filter is None or self._filter.passes(row)


HELD_SHOWN_MAX = 1_000
QUEUES_RANKED_MAX = 50_000
"""Maximum number of key queues that are searched for those with the most tasks."""
QUEUES_CHECKED_MAX = 256
"""Maximum number of key queues that are searched for a failing key."""


class KeyQueueState(NamedTuple):
    """The waiting tasks of an order key or of a value of ``fair_by``."""

    task_id: int
    """One task of the key or value."""
    state: str
    """The state of that task, or why the value waits, such as "limited" or "throttled"."""
    in_flight: int
    waiting: int
    kind: str
    """"order" or "fair"."""


class HeldKey(NamedTuple):
    """An order key whose group holds it until an operator acts."""

    task_id: int
    since_ms: int
    attempt: int
    waiting: int
    """Number of tasks that wait for the held task."""


class PausedKeyState(NamedTuple):
    """A paused key, and the number of its due tasks that are waiting."""

    key: PausedKey
    waiting: int


class FailingKey(NamedTuple):
    """An order key whose first task fails repeatedly."""

    task_id: int
    failures: int
    waiting: int
    """Number of tasks that wait for the failing task."""
    reason: str
    """The reason of the last failure."""


class KeyControl:
    """The operators' view of a group's order keys and fair shares; releases and skips held keys,
    pauses and resumes keys."""

    def __init__(self, core: Core, dead_letters: DeadLetters) -> None:
        self._core = core
        self._dead_letters = dead_letters

    def listing_steps(self, group: Group) -> int:
        """Return an upper bound of the steps that listing the keys of a group takes."""
        ordering = self._core.orderings.by_group.get(group)
        if ordering is None:
            return 0
        queues, shares = ordering.keys.order.queues, ordering.shares.by_mark
        return len(queues) + len(shares) + len(ordering.pauses.kept_back) + len(group.paused_keys)

    def held_keys(self, group: Group, limit: int = HELD_SHOWN_MAX) -> list[HeldKey]:
        """Return up to ``limit`` held order keys, oldest first."""
        ordering, keys = self._core.orderings.by_group.get(group), list[HeldKey]()
        if ordering is None:
            return keys
        for task_id, since_ms in islice(ordering.held.items(), limit):
            attempts, waiting = group.delivery_attempts.get(task_id), ordering.waiting.get(task_id)
            queue = ordering.keys.order.queues.get(waiting.key_mark) if waiting else None
            attempt = attempts.attempt if attempts is not None else 0
            keys.append(HeldKey(task_id, since_ms, attempt, 0 if queue is None else queue.waiting))
        return keys

    def held_tasks(self, group: Group, order_key: str) -> list[int]:
        """Return the ids of the held tasks that may have this order key."""
        ordering, mark = self._core.orderings.by_group.get(group), mark_of_key(None, order_key)
        if ordering is None:
            return []
        return [i for i in ordering.held if ordering.waiting[i].key_mark == mark]

    def longest_queues(self, group: Group, limit: int) -> list[KeyQueueState]:
        """Return the order keys and values with the most waiting tasks among the first
        ``QUEUES_RANKED_MAX`` of each."""
        ordering = self._core.orderings.by_group.get(group)
        if ordering is None:
            return []
        queues = islice(ordering.keys.order.queues.items(), QUEUES_RANKED_MAX)
        shares = islice(ordering.shares.by_mark.values(), QUEUES_RANKED_MAX)
        states = [
            KeyQueueState(
                queue.head, _state(group, ordering, mark, queue.head), 0, queue.waiting, "order"
            )
            for mark, queue in nlargest(limit, queues, key=lambda item: item[1].waiting)
        ]
        for share in nlargest(limit, shares, key=lambda share: share.waiting):
            if share.queue is not None and (head := share.queue.peek()):
                held_back = _held_back(group, share)
                states.append(
                    KeyQueueState(head, held_back, share.in_flight, share.waiting, "fair")
                )
        states = [
            state._replace(in_flight=1) if state.state == "in_flight" else state for state in states
        ]
        return sorted(states, key=lambda state: -state.waiting)[:limit]

    def release(self, group: Group, snapshot: TaskSnapshot, now_ms: int) -> str:
        """Make the task of a held order key ready again at once, and reset its failures."""
        core, task_id = self._core, snapshot.row.id
        ordering = core.orderings.by_group.get(group)
        if ordering is None or task_id not in ordering.held:
            return "not_held"
        core.forget_deliveries(group, task_id, self._take_out(group, task_id).attempt)
        core.open.effects.progress[task_id, group.name] = None
        ordering.release_held(task_id, priority_of(snapshot.row), now_ms)
        core.wake(group)
        core.recorder.requeued(snapshot.row.topic, group.name, task_id)
        return "released"

    def skip(self, group: Group, snapshot: TaskSnapshot, now_ms: int) -> str:
        """Make the task of a held order key a dead letter, so that the key can advance."""
        core, row = self._core, snapshot.row
        ordering = core.orderings.by_group.get(group)
        if ordering is None or row.id not in ordering.held:
            return "not_held"
        attempts = self._take_out(group, row.id)
        core.lifetimes.end(row)
        ordering.skip_held(row.id)
        failure = Failure(attempts.attempt, now_ms, "skipped: its key was held", "")
        lease = Lease(
            row.id,
            group,
            group.detached,
            attempts.attempt,
            attempts.epoch,
            0,
            0,
            row.due_ms,
            traits_of(row),
            attempts.past.with_failure(failure),
        )
        self._dead_letters.to_dead_letters(lease, failure, now_ms)
        return "skipped"

    # --- paused keys -------------------------------------------------------------------------

    def pause(self, group: Group, key: PausedKey) -> PausedKey:
        """Pause a key of the group. The pause becomes durable with the open batch. Return ``key``,
        or the existing pause if the key is already paused."""
        mark = mark_of_key(key.fair_by, key.value)
        if mark not in group.paused_keys:
            self._core.orderings.begin(group).pauses.pause(mark, key)
            self._core.put_record(PAUSED_KEY, key)
        return group.paused_keys[mark]

    def resume(
        self, group: Group, fair_by: str | None, value: object, now_ms: int
    ) -> PausedKey | None:
        """Resume a key. Return its former pause, or None if it was not paused."""
        core, mark = self._core, mark_of_key(fair_by, value)
        paused_key = group.paused_keys.get(mark)
        if paused_key is not None:
            core.orderings.by_group[group].pauses.resume(mark, now_ms)
            core.drop_record(PAUSED_KEY, paused_key)
            core.wake(group)
        return paused_key

    def paused_keys(self, group: Group) -> list[PausedKeyState]:
        """Return the paused keys of the group, oldest first."""
        if not group.paused_keys:
            return []
        ordering = self._core.orderings.by_group[group]
        kept_back = Counter(task.mark for task in ordering.pauses.kept_back.values())
        keys: list[PausedKeyState] = []
        for mark, key in group.paused_keys.items():
            if key.fair_by is None:
                queue, head = ordering.keys.order.queues.get(mark), ordering.keys.order.head(mark)
                waiting = int(head > 0 and head not in group.flight)
                waiting += 0 if queue is None else queue.waiting
            else:
                share = ordering.shares.by_mark.get(mark)
                waiting = kept_back[mark] + (0 if share is None else share.waiting + share.called)
            keys.append(PausedKeyState(key, waiting))
        return sorted(keys, key=lambda paused: paused.key.since_ms)

    def restore(self, rows: Iterable[PausedKey]) -> None:
        """Restore the paused keys of groups that still have the same ``fair_by``; drop others."""
        for row in sorted(rows, key=lambda row: row.since_ms):
            group = self._core.find_group(row.topic, row.group)
            if (
                group is None
                or group.is_closed
                or row.fair_by not in (None, group.settings.shares.fair_by)
            ):
                self._core.drop_record(PAUSED_KEY, row)
                continue
            mark = mark_of_key(row.fair_by, row.value)
            self._core.orderings.begin(group).pauses.pause(mark, row)

    def _take_out(self, group: Group, task_id: int) -> DeliveryAttempts:
        del group.waiting[task_id]
        self._core.stop_waiting(group, task_id)
        return group.delivery_attempts.pop(task_id)


def _state(group: Group, ordering: Ordering, mark: int, task_id: int) -> str:
    if task_id in group.flight:
        return "in_flight"
    if mark in group.paused_keys:
        return "paused"
    if task_id in ordering.held:
        return "held"
    return "retrying" if task_id in group.waiting else "ready"


def _held_back(group: Group, share: Share) -> str:
    if share.mark in group.paused_keys:
        return "paused"
    limit = group.settings.shares.limit_each
    if limit is not None and share.called + share.in_flight >= limit:
        return "limited"
    return "throttled" if share.is_paced else "ready"


def failing_key(core: Core, group: Group, failures_min: int) -> FailingKey | None:
    """Return the key with the most waiting tasks among the keys whose first task has at least
    ``failures_min`` failures and is not held. Only the ``QUEUES_CHECKED_MAX`` oldest queues are
    examined; a stuck key is always among them."""
    ordering, worst = core.orderings.by_group.get(group), None
    if ordering is None:
        return None
    for queue in islice(ordering.keys.order.queues.values(), QUEUES_CHECKED_MAX):
        head = queue.head
        if head in ordering.held or (worst is not None and queue.waiting <= worst.waiting):
            continue
        attempts = group.flight.get(head) or group.delivery_attempts.get(head)
        if attempts is None or attempts.past.failed < failures_min:
            continue
        past = attempts.past
        reason = past.failures[-1].reason if past.failures else ""
        worst = FailingKey(head, past.failed, queue.waiting, reason)
    return worst
