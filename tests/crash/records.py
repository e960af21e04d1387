"""What a client of the torture writes down: its own view, and all that the checker may use.

Pure data. ``*_ms`` without another word is the wall clock of the machine, which clients and
daemon share; ``order`` counts what this process received, and says something only between two
records of one ``connection``, where the bytes came in the order in which they were written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NO_CONNECTION = -1
"""The real client hands deliveries over later than it read them: their order says nothing."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """An enqueue request was answered OK: its tasks are promised from here on."""

    topic: str
    tokens: tuple[str, ...]
    """What each body says; one token is one task that somebody wanted."""
    ids: tuple[int, ...]
    dues_ms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """An enqueue request was answered with an error that says that nothing of it was kept."""

    tokens: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivery that a client received."""

    id: int
    group: str
    token: str
    epoch: int
    attempt: int
    due_ms: int
    delivered_ms: int
    """The daemon's stamp."""
    got_ms: int
    connection: int
    order: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The daemon confirmed that a task is over, for one group or (cancel) for all."""

    id: int
    group: str | None
    how: str
    """``acked``, ``cancelled`` or ``dead``."""
    epoch: int
    """Of the daemon that confirmed, or a later one: never an earlier one."""
    got_ms: int
    connection: int
    order: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A reschedule to ``due_ms`` was sent (``got_ms`` is None: nobody knows whether and when it
    was applied; a time that is past by then counts as now), or one was confirmed to be that."""

    id: int
    due_ms: int
    got_ms: int | None


@dataclass(frozen=True, slots=True)
class Retry:
    """A nack was confirmed: the next delivery does not come before ``not_before_ms``."""

    id: int
    group: str
    not_before_ms: int
    epoch: int
    got_ms: int
    connection: int
    order: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """A requeue from the dead letters was sent at ``sent_ms``."""

    id: int
    group: str
    sent_ms: int


@dataclass(slots=True)
class Journal:
    """Everything one client noticed, in its order."""

    client: str
    accepted: list[Accepted] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    retries: list[Retry] = field(default_factory=list)
    requeued: list[Requeued] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """Answers that no correct daemon gives."""
    resent: int = 0
    """Requests sent again because their answer was lost."""
