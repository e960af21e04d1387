"""Bulk operations as values: what is done to everything of a topic that a selection names, and how
far it is.

Pure data. A bulk operation has a *moment*: what was enqueued, or has died, after it was made is
none of its business. What one step changes and how far the bulk operation is then are one commit,
so a bulk operation that is cut off goes on where it was: it never does anything twice. What each
kind does is said in ``engine/tasks.py`` and ``server/shard/bulk.py``; one that needs more than a
selection puts it into ``Bulk.arguments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

Argument = str | int | float | bool
Place = tuple[int, str]
"""Where a bulk operation is: for tasks (id, ""), for dead letters (id, group), for other kinds what
they want it to be. It only rises."""
START: Place = (0, "")
REFUSALS_MAX = 32
"""How many different reasons (words) of a refusal one bulk operation counts."""


class BulkState(IntEnum):
    """The state of a bulk operation. All states but the first are final."""

    RUNNING = 1
    DONE = 2
    CANCELLED = 3
    FAILED = 4
    """The bulk operation could not go on; ``BulkRow.note`` says why."""

    @property
    def is_over(self) -> bool:
        return self is not BulkState.RUNNING


class Selection(NamedTuple):
    """The tasks or dead letters of a topic for which all of the given fields hold."""

    tags: str | None = None
    where: str | None = None
    """A condition; ``tags`` and ``where`` are in the language of filters (``model/filters.py``)."""
    key_prefix: str = ""
    due_from_ms: int | None = None
    """Tasks due at this time or later,"""
    due_to_ms: int | None = None
    """and before this time."""
    state: str | None = None
    """The state of a task: scheduled, ready, in_flight, waiting or dead."""
    group: str | None = None
    """The group whose dead letters are selected."""
    reason: str = ""
    """What the reason of a dead letter contains; case does not matter."""


class Bulk(NamedTuple):
    """What a bulk operation was asked to do."""

    id: str
    kind: str
    topic: str
    selection: Selection
    arguments: tuple[tuple[str, Argument], ...]
    """The arguments of the kind of bulk operation, by name."""
    rate: float | None
    """Changes a second at most; None: as many as the other work allows."""
    made_ms: int
    until_id: int
    """Tasks enqueued before the operation have ids up to this; dead letters made before it died
    behind an id below it."""
    by: str = ""
    """Who asked for the bulk operation."""

    def argument(self, name: str) -> Argument | None:
        return next((value for known, value in self.arguments if known == name), None)

    def is_same(self, other: Bulk) -> bool:
        """Whether the other asks for the same, at whatever time and by whomever."""
        return self[:6] == other[:6]


def at_once(kind: str, arguments: Mapping[str, Argument], now_ms: int) -> Bulk:
    """What a command does to the few tasks that it names, as a bulk operation that nobody keeps."""
    return Bulk("", kind, "", Selection(), tuple(arguments.items()), None, now_ms, 0)


class BulkRow(NamedTuple):
    """A bulk operation, and how far it is."""

    bulk: Bulk
    state: BulkState = BulkState.RUNNING
    place: Place = START
    """Every task or dead letter up to this place has been looked at."""
    looked_at: int = 0
    matched: int = 0
    changed: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    """(reason, count) of those that matched and were not changed."""
    ended_ms: int = 0
    note: str = ""
