"""The schedules that an engine remembers: which is due next, which wait for a task to end.

State and the few steps that several parts have in common; the rules are ``schedules``'. Invariants:

* A schedule with a run in a batch that is not durable is *staged*: nothing else happens to it until
  the batch has landed, or was refused and the run undone. So an undone run leaves no trace: what
  it changed is as before, what it counted is not counted, and what it left alone is as it is now.
* A schedule that is due and may be looked at has exactly one entry on the heap that counts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tickwheel.engine.timetables import Timetable
    from tickwheel.model.schedules import ScheduleRow


STALE_MAX = 64
"""Stale entries that the heap may hold beside one for each schedule."""


@dataclass(slots=True)
class Undo:
    """What a batch with tasks of a schedule has changed about the schedule."""

    before: ScheduleRow
    missed: int = 0
    overlapped: int = 0
    """Occurrences that overlapped in the same step; counted when the batch is durable."""
    late_ms: list[int] = field(default_factory=list)
    """How late the occurrences have fired, in ms."""


class Planned:
    """One schedule in memory: its row, its timetable, and what holds it up at the moment."""

    __slots__ = ("cancelling", "due_ms", "row", "staged", "table", "unfinished")

    def __init__(self, row: ScheduleRow, table: Timetable) -> None:
        self.row = row
        self.table = table
        self.staged = False
        """Whether a run of the schedule is in a batch that is not durable."""
        self.cancelling = False
        """Whether the task of the previous run is being looked up, to be cancelled."""
        self.unfinished = False
        """Whether the task of the newest run has not ended."""
        self.due_ms: int | None = None
        """When the schedule is looked at next (wall ms); None: not before something happens."""

    @property
    def name(self) -> str:
        return self.row.schedule.name

    @property
    def wanted_ms(self) -> int | None:
        """When the schedule has to be looked at; None: not before something happens."""
        if self.row.paused or self.staged or self.cancelling:
            return None
        if self.row.queued_ms is not None and not self.unfinished:
            return self.row.queued_ms
        return self.row.next_ms


class ScheduleHeap:
    """All schedules of one engine, with a heap of those that wait for a moment."""

    def __init__(self) -> None:
        self.known: dict[str, Planned] = {}
        self._heap: list[tuple[int, str]] = []
        self._watched: dict[int, Planned] = {}
        """Id of an unfinished task → the schedule that it is the newest run of."""
        self.wants_cancel: list[Planned] = []
        """The schedules whose unfinished task is to be looked up, for ``Schedules.replace``."""
        self.held_until_ms = 0
        """No schedule fires before this moment, because tasks are not accepted just now."""
        self.late_ms: list[int] = []
        """How late occurrences have fired; whoever counts them takes the list away."""

    # --- when ------------------------------------------------------------------------------

    def arm(self, planned: Planned) -> None:
        """A schedule has changed: from now on the heap has it at the moment that it wants."""
        wanted_ms = planned.wanted_ms
        if wanted_ms == planned.due_ms:
            return
        planned.due_ms = wanted_ms
        if wanted_ms is None:
            return
        heapq.heappush(self._heap, (wanted_ms, planned.name))
        if len(self._heap) > 2 * len(self.known) + STALE_MAX:
            found = ((p.due_ms, p.name) for p in self.known.values() if p.due_ms is not None)
            self._heap = sorted(found)

    def next_ms(self) -> int | None:
        """When the next schedule wants to be looked at; None: none waits for a moment."""
        heap = self._heap
        while heap:
            due_ms, name = heap[0]
            planned = self.known.get(name)
            if planned is not None and planned.due_ms == due_ms:
                return max(due_ms, self.held_until_ms)
            heapq.heappop(heap)
        return None

    def pop(self, now_ms: int) -> Planned | None:
        """The next schedule that is due by ``now_ms``; whoever gets it arms it again."""
        due_ms = self.next_ms()
        if due_ms is None or due_ms > now_ms:
            return None
        planned = self.known[heapq.heappop(self._heap)[1]]
        planned.due_ms = None
        return planned

    # --- the fate of runs ------------------------------------------------------------------

    def landed(self, runs: Mapping[Planned, Undo]) -> None:
        """The batch with these runs is durable: their schedules are free again."""
        for planned, undo in runs.items():
            self.late_ms += undo.late_ms
            planned.staged = False
            self.arm(planned)

    def undo(self, runs: Mapping[Planned, Undo]) -> None:
        """The batch with these runs was refused: each schedule is as it was before. A task that
        was unfinished then, and has not ended meanwhile, is so still; a run on demand does not
        touch it."""
        for planned, undo in runs.items():
            if planned.row.last_id != undo.before.last_id:
                # The newest task is forgotten. It was made because none before it was unfinished.
                self.unwatch(planned)
            planned.row = undo.before
            planned.staged = False
            self.arm(planned)

    def row(self, name: str) -> ScheduleRow | None:
        """The schedule of this name as a store shall have it; None: it is deleted."""
        planned = self.known.get(name)
        return None if planned is None else planned.row

    # --- the task of the newest run --------------------------------------------------------

    def watch(self, planned: Planned) -> None:
        """Note that the newest task of the schedule has not ended."""
        self.unwatch(planned)
        planned.unfinished = True
        self._watched[planned.row.last_id] = planned

    def unwatch(self, planned: Planned) -> None:
        """The newest task of the schedule has ended, or is not waited for any more."""
        planned.unfinished = False
        self._watched.pop(planned.row.last_id, None)

    def ended(self, ids: Collection[int]) -> None:
        """These tasks have ended, or only their dead letters are left."""
        watched = self._watched
        if not watched:
            return
        found: Iterable[int]
        if len(ids) < len(watched):
            found = [i for i in ids if i in watched]
        else:
            found = [i for i in watched if i in ids]
        for task_id in found:
            planned = watched.pop(task_id)
            planned.unfinished = False
            self.arm(planned)

    def watched_ids(self) -> list[int]:
        """The ids of the unfinished tasks of schedules, which a restart has to look up."""
        return list(self._watched)
