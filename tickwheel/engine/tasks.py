"""Commands on tasks that are there: on single ones, on all that a selection names, and on the tasks
of order keys that are held.

Single tasks (``Control``): cancel, reschedule, run now, look up; dead letters by id. The shard
reads what the store holds of the ids, lays over it what is not committed yet, and passes the result
here as ``TaskSnapshot``; engine memory says the rest.

Bulk operations (``Bulks``): which there are, how far each is, and what one step of those over tasks
does. The shell (``server/shard/bulk.py``) reads the tasks of a step and says how long it may last;
here is what a bulk operation's selection says of a task, what its kind does to it, and the row that
says so in the same batch. Nothing of that is ever undone: like an ack it stays when a batch is
refused. A kind that makes new tasks, which may be refused, says so before each step
(``may_be_refused``).

| kind | what it goes through | what it does | what it refuses |
|---|---|---|---|
| cancel | tasks | they end | in_flight, dead |
| reschedule | tasks | another due time (``_due_ms``) | in_flight, dead, due_too_far |
| spread | tasks | the emptiest ticks of a due window (``_spread``) | all but scheduled |
| run_now | tasks | due at once | in_flight, dead |
| requeue | dead letters | delivered again, failures counted anew | ttl_over |
| delete | dead letters | gone | |
| reset | what came due since a moment | it is the group's again (``groups.Resets``) | no_body |

Held keys (``KeyControl``): an order key is held when its task has failed for good, unless its group
says something else (``order_failure``): somebody has to look. Everything behind it waits until the
task is released, skipped, cancelled or moved. The rules of key holders are in ``ordering.py``. A
key that is paused is an operator's own will, and waits until it is resumed (``ordering.py``).
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
"""The word for what became of a task, and its new due time when it was moved."""
DuesOf = Callable[[Mapping[int, int]], Mapping[int, int]]
"""When tasks come next, by id → when they come from then on; those that stay are left out."""


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
                    state, at_ms = "held", self._core.orderings.of[group].held[task_id]
            views[group.name] = GroupView(
                state,
                attempt,
                known.row.due_ms if at_ms is None else at_ms,
                past.failures,
                self._core.policy(own, group).retries_left(past.failed + (lease is not None)),
                past.snoozes,
                past.deaths,
            )
        for name, progress in known.progress.items():
            if progress.state.is_over:
                word = progress.outcome.name.lower()
                views[name] = GroupView(word, progress.attempt, progress.at_ms, (), 0)
        for group in topic.live_groups if topic.filtering else ():
            if group.name not in views and owes(group, known.row) and not wants(group, known.row):
                views[group.name] = GroupView("filtered", 0, known.row.due_ms, (), 0)
        return views

    # --- cancel, reschedule --------------------------------------------------------------

    def too_late(self, task_id: int) -> str:
        """What a command that would change a task says of one of which no record is left."""
        state = self.absent(task_id)
        return "already_cancelled" if state == "cancelled" else state

    def cancel(self, task_id: int, known: TaskSnapshot | None) -> str:
        if known is None:
            return self.too_late(task_id)
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
        core.recorder.ended(topic.name, None, how, known.row.id, last=True)
        return None

    def reschedule(
        self, task_id: int, due_ms: int, known: TaskSnapshot | None, now_ms: int
    ) -> tuple[str, int | None]:
        """Move the next delivery to ``due_ms`` (not in the past: the shard clips it)."""
        if known is None:
            return self.too_late(task_id), None
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
            core.recorder.rescheduled(row, due_ms)
        else:
            self._ownership.look_ahead(known, now_ms)
            if task_id in core.open.effects.ended:
                # A former group of a replay's name had acked it, and so has everybody else.
                return self.absent(task_id), None
            self._postpone(known, due_ms)
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
        core.recorder.replaced(source, row, now_ms)

    def give_way(self, known: TaskSnapshot, by: int) -> None:
        """The newer task ``by`` replaces one that groups have had. It ends at once in each group
        where no consumer has it, and in the others when the delivery ends without an ack."""
        core, row = self._core, known.row
        for group in self._ownership.groups_of(known):
            lease = group.flight.get(row.id)
            if group.is_closed:
                continue
            if lease is not None:
                lease.past = lease.past._replace(replaced_by=by)
                core.replaced_leases.append(lease)
                core.recorder.overtaken(lease)
                continue
            attempts = group.delivery_attempts.get(row.id)
            attempt = core.number(group, row.id) if attempts is None else attempts.attempt
            core.leave(group, row)
            self._ownership.give_way(group, row, attempt, by)

    def gives_way(self, known: TaskSnapshot) -> bool:
        """Whether a newer task has replaced this one already, wherever a group is owed it."""
        groups = [one for one in self._ownership.groups_of(known) if not one.is_closed]
        leases = [group.flight.get(known.row.id) for group in groups]
        return all(lease is not None and lease.past.replaced_by for lease in leases)

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
        core.recorder.ended_many(name, CANCELLED, list(far))
        return far

    def reschedule_many(
        self, name: str, found: Mapping[int, int], dues_of: DuesOf
    ) -> Mapping[int, int]:
        """Move the tasks of ``found`` that ``cancel_many`` would cancel, and for which ``dues_of``
        has new times. Returns id → due_ms of those that were moved."""
        core = self._core
        far = self._far(found)
        if not far or not keeps_place(core.topic(name).groups.values(), min(far)):
            return {}
        moved = dues_of(far)
        ids, new_ms = list(moved), list(moved.values())
        core.wheel.cancel_many(ids, [far[task_id] for task_id in ids])
        for task_id in moved.keys() & core.resident_rows.keys():
            core.drop(task_id)
        core.open.effects.moved |= moved
        core.open.updated_bytes += len(moved) * MOVE_BYTES
        core.wheel.add_many(ids, new_ms)
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

    def settle_dead(
        self,
        kind: str,
        task_id: int,
        name: str,
        known: TaskSnapshot | None,
        now_ms: int,
        ttl_ms: int | None = None,
    ) -> str:
        """Requeue or delete a dead letter of the group ``name``; returns the word for what became
        of it. ``ttl_ms``: the new time to live of what is requeued."""
        if known is None:
            return self.absent(task_id)
        if kind == "requeue":
            return self._dead_letters.requeue(known, name, now_ms, ttl_ms)
        return self._dead_letters.delete(known, name)

    def says_no_to_dead(
        self, kind: str, known: TaskSnapshot, now_ms: int, ttl_ms: int | None
    ) -> str | None:
        """Why ``settle_dead`` would leave a dead letter where it is; None: it would not."""
        if kind == "requeue" and self._dead_letters.is_over(known, ttl_ms, now_ms):
            return TTL_OVER
        return None


OF_TASKS = ("cancel", "reschedule", "spread", "run_now")
OF_DEAD_LETTERS = ("requeue", "delete")
RESET = "reset"
KINDS = (*OF_TASKS, *OF_DEAD_LETTERS, RESET)
_DONE = frozenset(("cancelled", "scheduled", "requeued", "deleted", "given"))
"""Words for what was changed; every other one is the reason why not."""
TOO_FAR = "due_too_far"
_CANCELLED: Done = ("cancelled", None)
_BUSY = frozenset((State.IN_FLIGHT, State.DEAD))
_NOT_SCHEDULED = frozenset(State) - {State.SCHEDULED}
FORGET_MAX = 1_000
"""How many ended bulk operations are forgotten at a time."""


class Step(NamedTuple):
    """What one step of a bulk operation has done."""

    place: Place
    """Every task or dead letter up to this place has been looked at."""
    looked_at: int
    matched: int
    words: Mapping[str, int]
    """How many of the matching tasks have had each outcome, by the word of the verb."""


class Bulks:
    """All bulk operations of one engine."""

    def __init__(self, core: Core, control: Control) -> None:
        self._core = core
        self._control = control
        self.known: dict[str, BulkRow] = {}
        """Bulk operations by id, oldest first: running ones, and a limited number of ended ones."""

    # --- their lives -------------------------------------------------------------------------

    def make(self, bulk: Bulk) -> BulkRow:
        """Make a bulk operation whose id is new. It may begin when the open batch is durable."""
        self._core.bulk_running += 1
        return self._write(BulkRow(bulk))

    def end(self, name: str, state: BulkState, now_ms: int, note: str = "") -> BulkRow:
        """End a running bulk operation: it takes no further step."""
        self._core.bulk_running -= 1
        row = self._write(self.known[name]._replace(state=state, ended_ms=now_ms, note=note))
        over = len(self.known) - self._core.bulk_running - self._core.config.bulk_remembered_max
        if over > 0:
            self._forget(now_ms, min(over, FORGET_MAX))
        return row

    def stepped(self, name: str, step: Step) -> BulkRow:
        """Record a step of a running bulk operation in the open batch."""
        row, refused = self.known[name], {}
        changed = sum(count for word, count in step.words.items() if word in _DONE)
        if changed < step.matched:
            refused = {word: n for word, n in step.words.items() if word not in _DONE}
        return self._write(
            row._replace(
                place=step.place,
                looked_at=row.looked_at + step.looked_at,
                matched=row.matched + step.matched,
                changed=row.changed + changed,
                refused=_added(row.refused, refused) if refused else row.refused,
            )
        )

    def may_be_refused(self, name: str) -> None:
        """Remember a bulk operation whose next step makes tasks, which may be refused."""
        self._core.open.bulks_before.setdefault(name, self.known[name])

    def undo(self, batch: Batch) -> None:
        """The new tasks of that batch are forgotten: the bulk operations that made them stand where
        they stood before, unless for having been ended meanwhile."""
        before, batch.bulks_before = batch.bulks_before, {}
        for name, old in before.items():
            batch.effects.records.pop((BULK, name), None)
            row = self.known.get(name)
            if row is None:
                continue
            self._write(old._replace(state=row.state, ended_ms=row.ended_ms, note=row.note))

    def restore(self, rows: Iterable[BulkRow]) -> None:
        """Take over the rows of bulk operations that a store had."""
        for row in sorted(rows, key=lambda row: (row.bulk.made_ms, row.bulk.id)):
            self.known[row.bulk.id] = row
            self._core.bulk_running += not row.state.is_over

    def sweep(self, now_ms: int) -> None:
        """Forget bulk operations that ended too long ago; called once in a while."""
        self._forget(now_ms - self._core.config.bulk_remembered_ms, FORGET_MAX)

    def _forget(self, until_ms: int, most: int) -> None:
        over = (row for row in self.known.values() if row.state.is_over)
        ended = sorted((row.ended_ms, row.bulk.id) for row in over)
        for ended_ms, name in ended[:most]:
            if ended_ms > until_ms:
                return
            del self.known[name]
            self._core.open.effects.drop(BULK, name)

    def _write(self, row: BulkRow) -> BulkRow:
        self.known[row.bulk.id] = row
        self._core.open.effects.put(BULK, row)
        return row

    # --- what a command does to tasks, at once or as a bulk operation ------------------------

    def says_no(
        self, bulk: Bulk, known: TaskSnapshot, now_ms: int, delay_ms_max: int
    ) -> str | None:
        """Why the bulk operation would not change a task that matches, as things are; None: it
        would."""
        state = self._control.state(known)
        if state in (_BUSY if bulk.kind != "spread" else _NOT_SCHEDULED):
            return state.value
        if bulk.argument("shift_ms") is None:
            return None
        times_ms = {known.row.id: self._control.next_ms(known)}
        return None if self._dues(bulk, times_ms, now_ms, delay_ms_max) else TOO_FAR

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
        """Do to these tasks what the bulk operation is for; returns what became of each, by its id.
        ``plain``: id → due_ms of those, all on ``topic``, of which nothing else is recorded but
        ``keys``; what can be done to many of them at once needs none of their snapshots."""
        done: dict[int, Done] = {}
        if plain:
            done = self._act_plain(bulk, topic, plain, keys, now_ms, delay_ms_max)
        for known in matched:
            if known.row.id not in done:
                done[known.row.id] = self._act_one(bulk, known, now_ms, delay_ms_max)
        return done

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

        def dues_of(times_ms: Mapping[int, int]) -> dict[int, int]:
            return self._dues(bulk, times_ms, now_ms, delay_ms_max)

        moved = self._control.reschedule_many(topic, plain, dues_of)
        return {task_id: ("scheduled", due_ms) for task_id, due_ms in moved.items()}

    def _act_one(self, bulk: Bulk, known: TaskSnapshot, now_ms: int, delay_ms_max: int) -> Done:
        task_id = known.row.id
        if bulk.kind == "cancel":
            return self._control.cancel(task_id, known), None
        no = bulk.kind == "spread" and self.says_no(bulk, known, now_ms, delay_ms_max)
        if no:
            return no, None  # before a tick is chosen for it
        times_ms = {task_id: self._control.next_ms(known)}
        dues_ms = self._dues(bulk, times_ms, now_ms, delay_ms_max)
        if dues_ms:
            return self._control.reschedule(task_id, dues_ms[task_id], known, now_ms)
        return self.says_no(bulk, known, now_ms, delay_ms_max) or TOO_FAR, None

    def _dues(
        self, bulk: Bulk, times_ms: Mapping[int, int], now_ms: int, delay_ms_max: int
    ) -> dict[int, int]:
        """Where the bulk operation moves tasks that come next at ``times_ms``, by id; those that
        would be too far away are left out."""
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
        """One of the emptiest ticks of its window for each task: the window of all, or the one that
        begins at the task's own due time. What is left of a window begins now."""
        core, found = self._core, dict[int, int]()
        start_ms, within_ms = bulk.argument("start_ms"), int(bulk.argument("within_ms") or 1)
        alike: dict[int, list[int]] = {}
        for task_id, at_ms in times_ms.items():
            alike.setdefault(at_ms if start_ms is None else int(start_ms), []).append(task_id)
        core.windows.begin()
        for begin_ms, ids in alike.items():
            first_ms = max(now_ms, begin_ms)
            last_ms = max(first_ms, begin_ms + within_ms - 1)
            moments_ms = core.windows.choose(first_ms, last_ms, len(ids), now_ms)
            found.update(zip(ids, moments_ms, strict=True))
        core.totals.windows += len(found)
        return found


def _added(
    before: tuple[tuple[str, int], ...], more: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    words = Counter(dict(before))
    for word, count in more.items():
        words[word if word in words or len(words) < REFUSALS_MAX else "other"] += count
    return tuple(sorted(words.items()))


AT_ONCE: Mapping[str, int] = {"spread": 500}
"""How many tasks one step changes, of kinds whose every task costs a search; of all others as many
as were read."""


class Selector:
    """A selection ready to judge. What it says of a task depends on the task's row and state."""

    def __init__(self, selection: Selection) -> None:
        """Raises FilterError for a filter of the selection that cannot be read."""
        self.state = selection.state
        self.reason = selection.reason.casefold()
        self._prefix = selection.key_prefix
        self._from_ms = selection.due_from_ms
        self._to_ms = selection.due_to_ms
        self._filter: Filter | None = None
        if selection.tags is not None or selection.where is not None:
            self._filter = Filter(selection.tags, selection.where)

    def fits(self, row: TaskRow) -> bool:
        """Whether the task matches all parts of the selection but the state."""
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
QUEUES_LOOKED_AT, FIRST_LOOKED_AT = 50_000, 256
"""How many key queues one look takes in to find those with most tasks, and a key that fails."""


class KeyQueueState(NamedTuple):
    """How many tasks wait for one order key, or for one value of a fairly shared group."""

    task_id: int
    """One task of the key or value."""
    state: str
    """The state of that task, or what holds back the value: "limited", "throttled"."""
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
    """How many tasks wait behind the held task."""


class KeyOfPause(NamedTuple):
    """A key that an operator has paused, and how many of its due tasks wait."""

    key: PausedKey
    waiting: int


class FailingKey(NamedTuple):
    """An order key whose first task fails again and again."""

    task_id: int
    failures: int
    waiting: int
    """How many tasks wait behind the failing task."""
    reason: str
    """The reason of the last failure."""


class KeyControl:
    """Shows an operator order keys and fair shares of a group; releases and skips held keys, pauses
    and resumes any."""

    def __init__(self, core: Core, dead_letters: DeadLetters) -> None:
        self._core = core
        self._dead_letters = dead_letters

    def held(self, group: Group, limit: int = HELD_SHOWN_MAX) -> list[HeldKey]:
        """Up to ``limit`` order keys that are held, oldest first."""
        ordering, found = self._core.orderings.of.get(group), list[HeldKey]()
        if ordering is None:
            return found
        for task_id, since_ms in islice(ordering.held.items(), limit):
            attempts, known = group.delivery_attempts.get(task_id), ordering.waiting.get(task_id)
            queue = ordering.keys.order.queues.get(known.order) if known is not None else None
            attempt = attempts.attempt if attempts is not None else 0
            found.append(HeldKey(task_id, since_ms, attempt, 0 if queue is None else queue.waiting))
        return found

    def queues(self, group: Group, limit: int) -> list[KeyQueueState]:
        """The order keys and fair-share values for which most tasks wait, of so many as a look may
        take."""
        ordering = self._core.orderings.of.get(group)
        if ordering is None:
            return []
        queues = islice(ordering.keys.order.queues.items(), QUEUES_LOOKED_AT)
        shares = islice(ordering.shares.of.values(), QUEUES_LOOKED_AT)
        found = [
            KeyQueueState(
                queue.head, _state(group, ordering, mark, queue.head), 0, queue.waiting, "order"
            )
            for mark, queue in nlargest(limit, queues, key=lambda one: one[1].waiting)
        ]
        for share in nlargest(limit, shares, key=lambda share: share.waiting):
            if share.queue is not None and (head := share.queue.peek()):
                held_back = _held_back(group, share)
                found.append(KeyQueueState(head, held_back, share.in_flight, share.waiting, "fair"))
        found = [one._replace(in_flight=1) if one.state == "in_flight" else one for one in found]
        return sorted(found, key=lambda one: -one.waiting)[:limit]

    def release(self, group: Group, known: TaskSnapshot, now_ms: int) -> str:
        """Try the task of a held order key again at once, with failures counted anew."""
        core, task_id = self._core, known.row.id
        ordering = core.orderings.of.get(group)
        if ordering is None or task_id not in ordering.held:
            return "not_held"
        core.begins_anew(group, task_id, self._take_out(group, task_id).attempt)
        core.open.effects.progress[task_id, group.name] = None
        ordering.release(task_id, priority_of(known.row), now_ms)
        core.wake(group)
        core.recorder.requeued(known.row.topic, group.name, task_id)
        return "released"

    def skip(self, group: Group, known: TaskSnapshot, now_ms: int) -> str:
        """Make the task of a held order key a dead letter, and let the key go on."""
        core, row = self._core, known.row
        ordering = core.orderings.of.get(group)
        if ordering is None or row.id not in ordering.held:
            return "not_held"
        attempts = self._take_out(group, row.id)
        core.lifetimes.end(row)
        ordering.let_go(row.id)
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
        """Keep the tasks of a key of the group back from now on, durable with the open batch. What
        holds: ``key``, or what was said when it was paused before."""
        mark = mark_of_key(key.fair_by, key.value)
        if mark not in group.paused_keys:
            self._core.orderings.begin(group).pauses.pause(mark, key)
            self._core.open.effects.put(PAUSED_KEY, key)
        return group.paused_keys[mark]

    def resume(
        self, group: Group, fair_by: str | None, value: object, now_ms: int
    ) -> PausedKey | None:
        """Let the tasks of a key go on; what was known of its pause, or None: it is not paused."""
        core, mark = self._core, mark_of_key(fair_by, value)
        found = group.paused_keys.get(mark)
        if found is not None:
            core.orderings.of[group].pauses.resume(mark, now_ms)
            core.open.effects.drop(PAUSED_KEY, PAUSED_KEY.key(found))
            core.wake(group)
        return found

    def paused(self, group: Group) -> list[KeyOfPause]:
        """The paused keys of the group, oldest first."""
        if not group.paused_keys:
            return []
        ordering = self._core.orderings.of[group]
        kept = Counter(one.mark for one in ordering.pauses.kept.values())
        found: list[KeyOfPause] = []
        for mark, key in group.paused_keys.items():
            if key.fair_by is None:
                queue, head = ordering.keys.order.queues.get(mark), ordering.keys.order.head(mark)
                waiting = int(head > 0 and head not in group.flight)
                waiting += 0 if queue is None else queue.waiting
            else:
                share = ordering.shares.of.get(mark)
                waiting = kept[mark] + (0 if share is None else share.waiting + share.called)
            found.append(KeyOfPause(key, waiting))
        return sorted(found, key=lambda one: one.key.since_ms)

    def restore(self, rows: Iterable[PausedKey]) -> None:
        """Restore the paused keys of groups that are there, and are shared as they were."""
        for row in sorted(rows, key=lambda row: row.since_ms):
            group = self._core.find_group(row.topic, row.group)
            if (
                group is None
                or group.is_closed
                or row.fair_by not in (None, group.settings.shares.fair_by)
            ):
                self._core.open.effects.drop(PAUSED_KEY, PAUSED_KEY.key(row))
                continue
            mark = mark_of_key(row.fair_by, row.value)
            self._core.orderings.begin(group).pauses.pause(mark, row)

    def _take_out(self, group: Group, task_id: int) -> DeliveryAttempts:
        del group.waiting[task_id]
        self._core.waited(group, task_id)
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
    """Of the keys whose first task has failed so often and is not held, the one behind which
    most tasks wait. So many keys are looked at, those first that have had a queue for
    longest: one that is stuck is among them."""
    ordering, found = core.orderings.of.get(group), None
    if ordering is None:
        return None
    for queue in islice(ordering.keys.order.queues.values(), FIRST_LOOKED_AT):
        head = queue.head
        if head in ordering.held or (found is not None and queue.waiting <= found.waiting):
            continue
        of = group.flight.get(head) or group.delivery_attempts.get(head)
        if of is None or of.past.failed < failures_min:
            continue
        reason = of.past.failures[-1].reason if of.past.failures else ""
        found = FailingKey(head, of.past.failed, queue.waiting, reason)
    return found
