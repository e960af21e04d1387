"""Bulk operations: which there are, how far each is, and what one step of those over tasks does.

Pure. The shell (``server/shard/bulk.py``) reads the tasks of a step and says how long it may last;
here is what a bulk operation's selection says of a task, what its kind does to it, and the row that
says so in the same batch. Nothing of that is ever undone: like an ack it stays when a batch is
refused. A kind that makes new tasks, which may be refused, says so before each step
(``may_be_refused``).

| kind | what it goes through | what it does | what it refuses |
|---|---|---|---|
| cancel | tasks | they end | in_flight, dead |
| reschedule | tasks | another due time (``_due_ms``) | in_flight, dead, due_too_far |
| run_now | tasks | due at once | in_flight, dead |
| requeue | dead letters | delivered again, failures counted anew | |
| delete | dead letters | gone | |
| reset | what came due since a moment | it is the group's again (``resets.py``) | no_body |
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.model.bulk import REFUSALS_MAX, Bulk, BulkRow, BulkState
from tickwheel.model.filters.filter import Filter
from tickwheel.model.kinds import BULK
from tickwheel.model.states import State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tickwheel.engine.state import Batch, Core
    from tickwheel.engine.tasks import Control
    from tickwheel.model.bulk import Place, Selection
    from tickwheel.model.records import TaskRow, TaskSnapshot

OF_TASKS = ("cancel", "reschedule", "run_now")
OF_DEAD_LETTERS = ("requeue", "delete")
RESET = "reset"
KINDS = (*OF_TASKS, *OF_DEAD_LETTERS, RESET)
_DONE = frozenset(("cancelled", "scheduled", "requeued", "deleted", "given"))
"""Words for what was changed; every other one is the reason why not."""
_BUSY = frozenset((State.IN_FLIGHT, State.DEAD))
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
            self._write(
                row._replace(
                    place=old.place,
                    looked_at=old.looked_at,
                    matched=old.matched,
                    changed=old.changed,
                    refused=old.refused,
                )
            )

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

    # --- what a bulk operation's kind does to tasks
    # ---------------------------------------------------------

    def says_no(
        self, bulk: Bulk, known: TaskSnapshot, now_ms: int, delay_ms_max: int
    ) -> str | None:
        """Why the bulk operation would not change a task that matches, as things are; None: it
        would."""
        state = self._control.state(known)
        if state in _BUSY:
            return state.value
        shift_ms = bulk.argument("shift_ms")
        if shift_ms is not None and self._shifted(known, int(shift_ms)) > now_ms + delay_ms_max:
            return "due_too_far"
        return None

    def act(
        self,
        bulk: Bulk,
        matched: Sequence[TaskSnapshot],
        plain: Mapping[int, int],
        keys: Mapping[int, str],
        now_ms: int,
        delay_ms_max: int,
    ) -> Counter[str]:
        """Do to these tasks what the bulk operation is for: how many there are of each word.
        ``plain``: id → due_ms of those of which nothing else is recorded but ``keys``."""
        if bulk.kind == "cancel":
            return self._cancel(bulk.topic, matched, plain, keys)
        return self._reschedule(bulk, matched, plain, now_ms, delay_ms_max)

    def _cancel(
        self,
        topic: str,
        matched: Sequence[TaskSnapshot],
        plain: Mapping[int, int],
        keys: Mapping[int, str],
    ) -> Counter[str]:
        done: Collection[int] = ()
        if plain:
            done = self._control.cancel_many(topic, plain, keys)
        words = Counter({"cancelled": len(done)})
        for known in matched:
            if known.row.id not in done:
                words[self._control.cancel(known.row.id, known)] += 1
        return words

    def _reschedule(
        self,
        bulk: Bulk,
        matched: Sequence[TaskSnapshot],
        plain: Mapping[int, int],
        now_ms: int,
        delay_ms_max: int,
    ) -> Counter[str]:
        dues_ms = {known.row.id: self._due_ms(bulk, known, now_ms) for known in matched}
        latest_ms = now_ms + delay_ms_max
        if bulk.argument("shift_ms") is not None:
            plain = {i: at for i, at in plain.items() if dues_ms[i] <= latest_ms}
        done: Collection[int] = ()
        if plain:
            done = self._control.reschedule_many(bulk.topic, plain, dues_ms, now_ms)
        words = Counter({"scheduled": len(done)})
        for known in matched:
            task_id = known.row.id
            if task_id in done:
                continue
            if dues_ms[task_id] > latest_ms and self._control.state(known) not in _BUSY:
                words["due_too_far"] += 1
                continue
            words[self._control.reschedule(task_id, dues_ms[task_id], known, now_ms)[0]] += 1
        return words

    def _due_ms(self, bulk: Bulk, known: TaskSnapshot, now_ms: int) -> int:
        shift_ms, delay_ms = bulk.argument("shift_ms"), bulk.argument("delay_ms")
        if shift_ms is not None:
            return max(now_ms, self._shifted(known, int(shift_ms)))
        due_ms = bulk.argument("due_ms") if delay_ms is None else bulk.made_ms + int(delay_ms)
        return now_ms if due_ms is None else max(now_ms, int(due_ms))

    def _shifted(self, known: TaskSnapshot, shift_ms: int) -> int:
        """The due time, in ms, that a shift of ``shift_ms`` (negative: earlier) gives a task."""
        return self._control.next_ms(known) + shift_ms

    # --- what it does to dead letters ------------------------------------------------------------

    def settle_dead(self, kind: str, known: TaskSnapshot, group: str, now_ms: int) -> str:
        """Requeue or delete a dead letter of the group; returns the word for what became of it."""
        if kind == "requeue":
            return self._control.requeue(known.row.id, group, known, now_ms)
        return self._control.delete_dead(known.row.id, group, known)


def _added(
    before: tuple[tuple[str, int], ...], more: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    words = Counter(dict(before))
    for word, count in more.items():
        words[word if word in words or len(words) < REFUSALS_MAX else "other"] += count
    return tuple(sorted(words.items()))


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
