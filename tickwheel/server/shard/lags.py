"""How far each group was behind in the last hour: what was ready, and for how long the oldest of it
had waited, every ten seconds. What the console draws of a group.

Looked at some groups at a time, so that no delivery waits for it. A group that had nothing ready
all the time takes no memory. Knows nothing of who asks. Invariants:

* At most ``GROUPS_KEPT_MAX`` groups are kept, of each ``SAMPLES`` samples of 12 bytes, whatever
  clients make: 4 MiB.
* What is not known is None and never 0: for a group that there was no room for, and for as long as
  that may have been so.
* It begins anew with each tenure.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group

SAMPLE_S: Final = 10
SAMPLES: Final = 360
GROUPS_KEPT_MAX: Final = 1_000
GROUPS_AT_A_TIME: Final = 100
READY_SHOWN_MAX: Final = 2**32 - 1
"""The longest backlog that is shown; a longer one is shown as this long."""
_PLACES: Final = SAMPLES + 1
"""Places for samples: one more than are shown, so that no sample is seen half taken."""


class _Line:
    """The samples of one group; the place of a sample is its number modulo ``_PLACES``."""

    __slots__ = ("ages_ms", "last", "ready", "since")

    def __init__(self, number: int) -> None:
        self.since = self.last = number
        """The numbers of the first sample, and of the last one that had something ready."""
        self.ready = array("I", [0]) * _PLACES
        self.ages_ms = array("Q", [0]) * _PLACES

    def take(self, number: int, ready: int, since_ms: int | None, now_ms: int) -> None:
        """Take one sample; ``since_ms`` is when the oldest ready task became ready."""
        if ready:
            self.last = number
        place = number % _PLACES
        self.ready[place] = min(ready, READY_SHOWN_MAX)
        self.ages_ms[place] = 0 if since_ms is None else max(0, now_ms - since_ms)


class Lags:
    """Samples of all groups; ``run`` it as a task for as long as this daemon leads the shard."""

    def __init__(self, core: Core, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        self._taken_ms: deque[int] = deque(maxlen=SAMPLES)
        self._number = 0
        """The number of the newest whole sample; the first one has 1."""
        self._lines: dict[Group, _Line] = {}
        self._crowded = 0
        """The number of the last sample in which some group had no room."""

    async def run(self) -> None:
        """Take a sample every ``SAMPLE_S`` seconds, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        """Take a sample of every group."""
        now, number = self._clock.read(), self._number + 1
        looked_at = 0
        room = GROUPS_KEPT_MAX - len(self._lines)
        kept: dict[Group, _Line] = {}
        for topic in list(self._core.topics.values()):
            for group in topic.live_groups:
                looked_at += 1
                if looked_at % GROUPS_AT_A_TIME == 0:
                    await asyncio.sleep(0)
                ready = group.ready_count
                line = self._lines.get(group)
                if line is None and ready:
                    if room <= 0:
                        self._crowded = number
                        continue
                    room -= 1
                    line = _Line(number)
                if line is None or (not ready and number - line.last >= SAMPLES):
                    continue
                line.take(number, ready, group.oldest_since_ms(), now.now_ms)
                kept[group] = line
        self._lines, self._number = kept, number
        self._taken_ms.append(now.now_ms)

    def of(self, group: Group) -> dict[str, Any]:
        """The group's samples in the form of the answer, the oldest first."""
        line, newest = self._lines.get(group), self._number
        numbers = range(newest - len(self._taken_ms) + 1, newest + 1)
        ready: list[int | None] = []
        ages_ms: list[int | None] = []
        for number in numbers:
            if line is not None and number >= line.since:
                place = number % _PLACES
                ready.append(line.ready[place])
                ages_ms.append(line.ages_ms[place])
            else:
                known = 0 if number > self._crowded else None
                ready.append(known)
                ages_ms.append(known)
        return {
            "every_ms": SAMPLE_S * 1000,
            "taken_ms": list(self._taken_ms),
            "ready": ready,
            "oldest_ready_ms": ages_ms,
        }
