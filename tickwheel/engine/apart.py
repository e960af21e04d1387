"""Tasks whose consumers have died are handed out alone: whatever else a consumer has would die with
it, as often as the task is tried.

Such a task is ready, and lies in ``Group.loading`` until a connection has nothing else. One that
has is taken at once. Otherwise one is kept free: it is handed nothing more until what it has is
settled, for ``KEEP_MS`` at most, and then none is for as long, so that work that lasts does not
cost a connection. What was alone is followed by others, if there are some, before the next one is
alone on that connection.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.engine.topics import NEVER_MONO_MS, Keep

if TYPE_CHECKING:
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Subscriber

KEEP_MS = 60_000
LOOKED_AT_MAX = 64
"""Subscribers of a group that one look takes in."""


class Apart:
    """Of one engine. ``Core.keeps`` has what is kept."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Its turn has come, among others."""
        group.loading[task_id] = priority
        group.apart[task_id] = None

    def next(self, group: Group, mono_ms: int) -> tuple[int, Subscriber] | None:
        """Which task goes to whom now. None: nobody is free, and somebody is kept so."""
        task_id = self._first(group)
        if task_id is None:
            self._core.let_in(group)
            return None
        subscriber = self._free(group, mono_ms)
        return None if subscriber is None else (task_id, subscriber)

    def _first(self, group: Group) -> int | None:
        """The one that has waited longest; some may have left in another way."""
        while group.apart:
            task_id = next(iter(group.apart))
            if task_id in group.loading:
                return task_id
            del group.apart[task_id]
        return None

    def _free(self, group: Group, mono_ms: int) -> Subscriber | None:
        keep, best = self._core.keeps.get(group), None
        for one in islice(group.able, LOOKED_AT_MAX):
            presence = one.presence
            if one.room <= 0 or presence.kept_for not in (None, group):
                continue
            if presence.was_alone and len(group.ready):
                continue
            if not presence.unsettled:
                return one
            if best is None or presence.unsettled < best.presence.unsettled:
                best = one
        if keep is None and best is not None:
            best.presence.kept_for = group
            self._core.keeps[group] = Keep(best.presence, mono_ms + KEEP_MS)
        return None

    def handed_out(self, group: Group, subscriber: Subscriber) -> None:
        """It has the task alone, until that is settled."""
        self._core.let_in(group)
        presence = subscriber.presence
        if presence.unsettled:  # else it was delivered at most once, and is over
            presence.kept_for = group
            self._core.keeps[group] = Keep(presence, NEVER_MONO_MS)

    def tick(self, mono_ms: int) -> None:
        """Some were kept free for too long."""
        core = self._core
        for group, keep in [(g, k) for g, k in core.keeps.items() if k.until_mono_ms <= mono_ms]:
            core.let_in(group)
            if keep.presence is not None and group.apart:
                core.keeps[group] = Keep(None, mono_ms + KEEP_MS)
            core.wake(group)
