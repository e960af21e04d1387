"""What a client of the torture writes down: its own view, and all that the checker may use.

Pure data. ``*_ms`` without another word is the wall clock of the machine, which clients and
daemon share; ``order`` counts what this process received, and says something only between two
records of one ``connection``, where the bytes came in the order in which they were written.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

VAIN_MAX = 500

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
    sent: int = 0
    """The place of its first sending among all that this process sent or received."""
    order: int = 0
    """That of its first answer."""
    ttl_ms: int | None = None
    """TTL of each task."""
    priority: int = 0
    within_ms: int = 0
    """What the real client says of a due window whose first answer was lost, and whose task has
    ended, is what was asked for: any moment of the window is right."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An enqueue request was answered with an error which says that no part of it was kept."""

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
    since_ms: int = 0
    """The connection is not older: the daemon wrote the frame in between."""
    once: bool = False
    """To a subscriber of the kind at most once."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The daemon confirmed that a task is over, for one group or (cancel) for all."""

    id: int
    group: str | None
    how: str
    """``acked``, ``cancelled`` or ``dead``."""
    epoch: int
    """Epoch of the confirming daemon or a later one."""
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


@dataclass(frozen=True, slots=True)
class Looked:
    """How a task stands, asked with LOOKUP after everything was settled."""

    id: int
    state: str
    got_ms: int


@dataclass(slots=True)
class GroupLife:
    """One life of a group, from GROUP_CREATE to GROUP_DELETE. Numbers are places in the order
    of all that the one who made it sent and received; None: it never came to that."""

    topic: str
    group: str
    since: str | int
    """``now``, ``first``, or a due time from which on."""
    sent: int
    confirmed: int
    confirmed_ms: int
    deleted: int | None = None
    """The deletion was asked: nothing more is required of it."""
    deleted_ms: int = 0
    """The deletion was confirmed."""
    gone: int | None = None
    """The daemon did not know it any more."""
    quiet: int | None = None
    """Before its deletion: it held nothing ..."""
    quiet_ms: int = 0
    """... and all that was due until then had fired, by the daemon's clock."""
    perhaps_since_ms: int = 0
    """Perhaps it is owed nothing that is due before this: its GROUP_CREATE named this moment, and
    nobody knows whether that or a SUBSCRIBE has made it."""


@dataclass(slots=True)
class Cast:
    """One connection of a broadcast subscription: what came on it, and when it counted."""

    topic: str
    epoch: int
    confirmed: int
    """The place of the OK of its SUBSCRIBE."""
    lost: bool = False
    """It broke: what was on its way is lost, and nobody promised otherwise."""
    delivered: list[Delivered] = field(default_factory=list)
    shard: int | None = None
    """Shard of the tasks; None if there is only one."""


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
    looked: list[Looked] = field(default_factory=list)
    groups: list[GroupLife] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """Answers that no correct daemon gives."""
    vain: deque[tuple[Any, str]] = field(default_factory=lambda: deque(maxlen=VAIN_MAX))
    """The latest receipts whose ack did not count, and the word for it."""
    placed: int = 0
    """Tasks with a due window that got a later moment than the one they asked for."""
    resent: int = 0
    """Requests sent again because their answer was lost."""
