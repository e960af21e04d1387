"""Bulk operations as values: what is done to everything of a topic that a selection names, and how
far it is.

Pure data. A bulk operation has a *moment*: what was enqueued, or has died, after it was made is
none of its business. What one step changes and how far the bulk operation is then are one commit,
so a bulk operation that is cut off goes on where it was: it never does anything twice. What each
kind does is said in ``engine/bulk.py`` and ``server/shard/bulk.py``; one that needs more than a
selection puts it into ``Bulk.arguments``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

Argument = str | int | float | bool
Place = tuple[int, str]
"""Where a bulk operation is: for tasks (id, ""), for dead letters (id, group), for other kinds what
they want it to be. It only rises."""
START: Place = (0, "")
REFUSALS_MAX = 32
"""Reasons that one bulk operation counts, each by a word."""


class BulkState(IntEnum):
    """How far a bulk operation is. All but the first are for ever."""

    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4
    """It could not go on; ``BulkRow.note`` says why."""

    @property
    def is_over(self) -> bool:
        return self is not BulkState.RUNNING


class Selection(NamedTuple):
    """Which tasks, or dead letters, of the topic: those of which all of it is true."""

    tags: str | None = None
    where: str | None = None
    """Both as a group's filter has them: ``model/filters/``."""
    key_prefix: str = ""
    due_from_ms: int | None = None
    """Due then or later,"""
    due_to_ms: int | None = None
    """and before then."""
    state: str | None = None
    """Of a task: scheduled, ready, in_flight, waiting, dead."""
    group: str | None = None
    """Whose dead letters."""
    reason: str = ""
    """What the reason of a dead letter contains, in whatever case."""


class Bulk(NamedTuple):
    """What was asked for."""

    id: str
    kind: str
    topic: str
    selection: Selection
    arguments: tuple[tuple[str, Argument], ...]
    """Of the kind, by name."""
    rate: float | None
    """Changes a second at most; None: as many as go beside the other work."""
    made_ms: int
    until_id: int
    """What was enqueued by then has an id up to this; what was a dead letter by then died behind
    an id before it."""
    by: str = ""
    """Who asked."""

    def argument(self, name: str) -> Argument | None:
        return next((value for known, value in self.arguments if known == name), None)

    def is_same(self, other: Bulk) -> bool:
        """The same was asked for, at whatever time and by whomever."""
        return self[:6] == other[:6]


class BulkRow(NamedTuple):
    """A bulk operation, and how far it is."""

    bulk: Bulk
    state: BulkState = BulkState.RUNNING
    place: Place = START
    """Everything up to it has been looked at."""
    looked_at: int = 0
    matched: int = 0
    changed: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    """(why, how many) of those that matched and were not changed."""
    ended_ms: int = 0
    note: str = ""
