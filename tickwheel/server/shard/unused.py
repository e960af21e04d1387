"""Groups that nobody uses: they are reported after a while and, by setting, end.

A group is used while it has a subscriber, a waiting pull or a delivery that is not finished. What
counts is the steady clock of this tenure: a start or a takeover begins anew for every group, so a
group may be found later than it should be, and is never ended too early. Looked at now and then,
some groups at a time; what was used between two looks has left a mark (``Group.was_used``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.engine.topics import Group
    from tickwheel.server.shard.parts import Parts

LOOK_S_MIN, LOOK_S_MAX = 0.1, 60.0
LOOKS = 10
"""How many looks there are, at least, in the shortest of the times that are set."""
GROUPS_AT_A_TIME = 1_000


class UnusedGroups:
    """Reports and ends unused groups; ``run`` it for as long as this daemon leads the shard."""

    def __init__(self, parts: Parts, end: Callable[[Group], None]) -> None:
        """``end`` deletes a group and lets go of what it holds."""
        self._core = parts.core
        self._clock = parts.clock
        self._on_event = parts.on_event
        self._observed = parts.observed
        self._end = end
        settings = parts.settings
        report_s, end_s = settings.group_unused_report_s, settings.group_unused_end_s
        self._report_ms = int(report_s * 1000)
        self._end_ms = None if end_s is None else int(end_s * 1000)
        self._pause_s = min(LOOK_S_MAX, max(LOOK_S_MIN, report_s / LOOKS))

    async def run(self) -> None:
        """Look at all groups again and again, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._pause_s)

    async def look(self) -> None:
        """Look at every group once."""
        found = looked_at = 0
        for topic in list(self._core.topics.values()):
            for group in topic.live_groups:
                if not group.is_closed:
                    found += self._is_unused(group, self._clock.read().mono_ms)
                looked_at += 1
                if looked_at % GROUPS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
        self._observed.groups_unused = found

    def _is_unused(self, group: Group, mono_ms: int) -> bool:
        if group.was_used or group.subscribers or group.flight:
            group.was_used = group.is_unused = False
            group.used_mono_ms = mono_ms
            return False
        unused_ms = mono_ms - group.used_mono_ms
        named = f"group {group.name} of topic {group.topic.name}"
        if self._end_ms is not None and unused_ms >= self._end_ms:
            self._on_event(
                "group_ended",
                f"{named}: nobody used it for {unused_ms / 1000:.0f} s (group_unused_end_s); it"
                f" held {group.ready_count} ready, {len(group.waiting)} waiting,"
                f" {group.dead} dead",
            )
            self._end(group)
            return False
        if unused_ms < self._report_ms:
            return False
        if not group.is_unused:
            group.is_unused = True
            self._on_event(
                "group_unused",
                f"{named}: nobody used it for {unused_ms / 1000:.0f} s; it holds"
                f" {group.ready_count} ready; `tickwheel groups delete` if it is not wanted",
            )
        return True
