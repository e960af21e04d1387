"""A task that one more death of a consumer makes a dead letter is handed out alone: no task ends
because of another one that its consumer had besides. After earlier deaths it is not: who kills
cannot be told from who was there, and thousands may have been.

Such a task is ready, and lies in ``Group.loading`` until a connection has nothing else. One that
has is taken at once. Otherwise one is kept free: it is handed nothing more until what it has is
settled, for ``KEEP_MS`` at most, and then none is for as long, so that work that lasts does not
cost a connection. What was alone is followed by others, if there are some, before the next one is
alone on that connection.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.engine.topics import Keep

if TYPE_CHECKING:
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Presence, Subscriber

KEEP_MS = 60_000
LOOKED_AT_MAX = 64
"""How many subscribers of a group, and how many tasks that wait to be alone, one look takes in."""


class Apart:
    """The lone deliveries of one engine. ``Core.keeps`` has the connections kept free for them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._deaths_alone = core.config.deaths_alone

    def is_last(self, deaths: int) -> bool:
        """Whether one more death of a consumer makes a task with ``deaths`` a dead letter."""
        return deaths >= self._deaths_alone

    def set_aside(self, group: Group, task_id: int, priority: int) -> None:
        """Keep a task, whose turn came among others, until a connection can have it alone."""
        group.loading[task_id] = priority
        group.apart[task_id] = False

    def next(self, group: Group, mono_ms: int) -> tuple[int, Subscriber] | None:
        """The next lone task and a subscriber whose connection is free; None: wait for both."""
        task_id = self._first(group)
        if task_id is None:
            self._core.let_in(group)
            return None
        subscriber = self._free(group, mono_ms)
        return None if subscriber is None else (task_id, subscriber)

    def _first(self, group: Group) -> int | None:
        """The loaded task that has waited longest to be alone. Tasks that have left are dropped on
        the way."""
        for task_id in list(islice(group.apart, LOOKED_AT_MAX)):
            if task_id not in group.loading:
                del group.apart[task_id]
            elif task_id not in self._core.missing:
                return task_id
        return None

    def _free(self, group: Group, mono_ms: int) -> Subscriber | None:
        keep, best = self._core.keeps.get(group), None
        for one in islice(group.able, LOOKED_AT_MAX):
            presence = one.presence
            is_kept = keep is not None and keep.presence is presence
            if one.room <= 0 or (presence.kept_for is not None and not is_kept):
                continue
            if presence.was_alone and len(group.ready) and not is_kept:
                continue
            if not presence.unsettled:
                return one
            if best is None or presence.unsettled < best.presence.unsettled:
                best = one
        if keep is None and best is not None:
            self.keep_free(group, best.presence, mono_ms)
        return None

    def keep_free(self, group: Group, presence: Presence, mono_ms: int) -> None:
        """Keep a connection free for the group's next lone task, for ``KEEP_MS`` at most."""
        if presence.kept_for is None:
            self._core.let_in(group)
            presence.kept_for = group
            self._core.keeps[group] = Keep(presence, mono_ms + KEEP_MS)

    def handed_out(self, group: Group, subscriber: Subscriber) -> None:
        """The connection has the task alone until the delivery is settled."""
        self._core.let_in(group)
        presence = subscriber.presence
        if presence.unsettled:  # else it was delivered at most once, and is over
            presence.kept_for = group

    def tick(self, mono_ms: int) -> None:
        """End the keeping free of connections that has lasted too long."""
        core = self._core
        for group, keep in [(g, k) for g, k in core.keeps.items() if k.until_mono_ms <= mono_ms]:
            core.let_in(group)
            if keep.presence is not None and group.apart:
                core.keeps[group] = Keep(None, mono_ms + KEEP_MS)
            core.wake(group)
