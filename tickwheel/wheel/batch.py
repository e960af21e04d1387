"""A batch on its way: the effects, and what has to happen when they are durable or refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tickwheel.wheel.effects import Effects
from tickwheel.wheel.leases import Dispatch, Subscriber
from tickwheel.wheel.sessions import Outcome, Session

Staged = tuple[object, Session | None, Outcome]
"""(the shell's reply address or None, session or None, outcome): one enqueue request."""


@dataclass(slots=True)
class Batch:
    """The open batch collects; a sealed one is with the store."""

    effects: Effects = field(default_factory=Effects)
    staged: list[Staged] = field(default_factory=list)
    """Requests whose tasks are in ``effects.enqueued``, and repeats of them."""
    staged_bytes: int = 0
    updated_bytes: int = 0
    """Of the rows in ``effects.updated``, at least."""
    topics: Counter[str] = field(default_factory=Counter)
    """Of the tasks in ``effects.enqueued``."""
    credits: dict[Subscriber, int] = field(default_factory=dict)
    """Deliveries whose end this batch confirms, by subscriber."""
    handed: list[Dispatch] = field(default_factory=list)
    """At-most-once deliveries, to be written once their end is durable, before the replies."""
    handed_bytes: int = 0
    replies: list[tuple[object, bytes]] = field(default_factory=list)
    """(the shell's reply address, bytes) of answers that rest on this batch, in order."""
    notes: object = None
    """What the recorder cut off for it, once it is sealed."""

    def is_empty(self) -> bool:
        return not (self.staged or self.credits or self.replies or not self.effects.is_empty())


def strip_ended(effects: Effects) -> None:
    """Nothing of an id in ``ended`` stays in another map: the drop covers all its rows."""
    ended = effects.ended
    if not ended:
        return
    if effects.updated:
        effects.updated = {k: v for k, v in effects.updated.items() if k not in ended}
    if effects.progress:
        effects.progress = {k: v for k, v in effects.progress.items() if k[0] not in ended}
    if effects.dead:
        effects.dead = {k: v for k, v in effects.dead.items() if k[0] not in ended}


def rejoin(older: Batch, newer: Batch) -> None:
    """Put what is left of a refused batch in front of the batch that followed it.

    ``newer`` wins for every key, because states are absolute.
    """
    a, b = older.effects, newer.effects
    b.updated = a.updated | b.updated
    b.progress = a.progress | b.progress
    b.dead = a.dead | b.dead
    b.ended = a.ended | b.ended
    b.groups = a.groups | b.groups
    b.sessions = a.sessions | b.sessions
    b.id_mark = max(a.id_mark, b.id_mark)
    b.position_ms = max(a.position_ms, b.position_ms)
    for subscriber, count in older.credits.items():
        newer.credits[subscriber] = newer.credits.get(subscriber, 0) + count
    newer.handed[:0] = older.handed
    newer.handed_bytes += older.handed_bytes
    newer.updated_bytes += older.updated_bytes
    newer.replies[:0] = older.replies
