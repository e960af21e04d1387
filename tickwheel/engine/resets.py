"""Resets: a group is given again what it had finished, or missed, since a moment.

For each such task there is a new one, due at once, with what the former carried and
``TaskOptions.replayed``, which says what it stands for and whose alone it is (``ownership.py``,
rule 7). So it has its own attempts, retries, dead letters and end, and nobody else notices it.

A reset is a bulk operation (``bulk.py``). Unlike what other bulk operations do, new tasks may be
refused; then the bulk operation is set back to where it was before, in the same step
(``Bulks.undo``). So each task is given exactly once, whatever is refused and wherever a crash
comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.bulk import RESET, Step
from tickwheel.engine.ownership import is_done, owing
from tickwheel.model.records import ProgressState, Replayed, TaskOptions, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.engine.bulk import Bulks
    from tickwheel.engine.enqueue import Intake
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group
    from tickwheel.model.bulk import Bulk, BulkRow, Place
    from tickwheel.model.records import NewTask, TaskSnapshot

GIVEN, NO_BODY = "given", "no_body"
"""Words of a reset's steps: tasks that are the group's again, and those of which nobody has the
bodies."""


class Original(NamedTuple):
    """A task as it was before the reset."""

    id: int
    options: TaskOptions | None
    body: bytes


class Source(NamedTuple):
    """The enqueuer of a reset's tasks, as the history names it."""

    label: str


class Resets:
    """The resets of groups of one engine."""

    def __init__(self, core: Core, intake: Intake, bulks: Bulks) -> None:
        self._core = core
        self._intake = intake
        self._bulks = bulks

    def begin(self, group: Group, bulk: Bulk, from_ms: int) -> BulkRow:
        """Make the bulk operation of a reset, and mark its moment in the history."""
        if self._core.recorder is not None:
            self._core.recorder.group_reset(group, bulk.id, from_ms, bulk.made_ms)
        return self._bulks.make(bulk)

    def may_have(self, group: Group, known: TaskSnapshot) -> bool:
        """Whether a stored task whose due time has come may be given to the group again: the group
        has acked it or let it go, or was never owed it. What expired in the group may not. After a
        restart it may not have fired yet; the rules say who gets it then."""
        row, topic = known.row, group.topic
        if row.id > self._core.wheel_id:
            return False
        if row.options is not None and row.options.replayed is not None:
            return False
        if is_done(known, group):
            return known.progress[group.name].state is not ProgressState.EXPIRED
        return group not in owing(topic.groups, row, known.progress.keys() | known.dead.keys())

    def give(
        self,
        bulk: Bulk,
        group: str,
        originals: Sequence[Original],
        place: Place,
        looked_at: int,
        lost: int,
        now_ms: int,
    ) -> Step:
        """Stage a task for each of ``originals``; to be called in the same step as its ``BulkRow``.
        ``lost``: how many of ``looked_at`` had no body."""
        if originals:
            self._bulks.may_be_refused(bulk.id)
            new_tasks = [again(one, bulk.topic, group, now_ms) for one in originals]
            size_bytes = sum(size_of(task[2], task[3]) for task in new_tasks)
            source = Source(f"{RESET} {bulk.id}")
            ids = self._intake.stage(new_tasks, size_bytes, now_ms, source)
            self._core.open.staged.append((None, None, (0, ids[0], len(ids), now_ms)))
        matched = len(originals) + lost
        return Step(place, looked_at, matched, {GIVEN: len(originals), NO_BODY: lost})


def again(original: Original, topic: str, group: str, now_ms: int) -> NewTask:
    """The replayed task that stands for ``original`` in the group."""
    options = original.options or TaskOptions()
    options = options._replace(
        key=None,
        order_id=None,
        within_ms=None,
        asked_ms=None,
        replayed=Replayed(original.id, group, options.key),
    )
    return topic, now_ms, original.body, options
