"""For how long shards deliver nothing although something is due, and which fault that is of.

A run writes down when each fault lasted (``Timeline``) and when each shard's beats came (``Beat``).
A silence begins with the first beat that is due and does not come, and ends with the next delivery
of its shard: a shard that has nothing due is not silent. It is of the fault during which, or
shortly before which, it began, and counts as that one's only if nothing else was under way
meanwhile: no other fault, no shard on its way back after one.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import NamedTuple

from crash.link import now_ms
from support.waiting import busy_s, rest

BACK = "back"
"""The return of all shards to their nodes, which is not a fault."""
BEFORE_MS = 300
"""A silence that began so shortly before a fault is that one's."""
ASIDE_MS = 200
"""What another fault and a silence may have in common without a word about it: beats are 100 ms
apart, so as much of it is none."""
LOOK_S = 0.1
PATIENCE_S_MAX = 30.0
SHOWN_MAX = 10


class Beat(NamedTuple):
    """A delivery of a shard."""

    came_ms: int
    due_ms: int
    """When it was due, if it came for the first time; else ``AGAIN``: nothing waited for it."""


AGAIN = sys.maxsize


class Silence(NamedTuple):
    """A shard delivered nothing, although something was due."""

    seconds: float
    since_ms: int
    shard: int

    @property
    def until_ms(self) -> int:
        return self.since_ms + round(self.seconds * 1_000)

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s of shard {self.shard} at {clock(self.since_ms)}"


def clock(at_ms: int) -> str:
    """A time of the day, in UTC, as logs have it."""
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%H:%M:%S.%f}"[:-3]


def silences(
    beats: Sequence[Beat], shard: int, began_ms: int = 0, next_ms: int = AGAIN
) -> list[Silence]:
    """Those of a shard that are of a fault which began at ``began_ms``, up to the fault after it.
    ``beats``: all of the shard, as they came."""
    waiting_ms = list(accumulate((beat.due_ms for beat in reversed(beats)), min))[::-1]
    """By beat: since when the first one waits of those that have not come before it."""
    came_ms = [beat.came_ms for beat in beats]
    first = bisect_left(came_ms, began_ms - BEFORE_MS)
    last = bisect_left(came_ms, next_ms - BEFORE_MS)
    results = []
    for at in range(first, min(last, len(beats) - 1)):
        since_ms, until_ms = max(came_ms[at], waiting_ms[at + 1]), came_ms[at + 1]
        if until_ms > max(since_ms, began_ms):
            results.append(Silence((until_ms - since_ms) / 1_000, since_ms, shard))
    return results


# --- what happened when --------------------------------------------------------------------------


@dataclass(slots=True)
class Window:
    """A fault from its begin until all serves again."""

    kind: str
    began_ms: int
    is_clean: bool
    """Nothing else was under way when it began."""
    ended_ms: int = AGAIN
    patience_s: float = 0.0
    """Seconds in which some process waited for a processor."""

    def is_in(self, silence: Silence) -> bool:
        """Whether it was under way during a silence."""
        common_ms = min(self.ended_ms, silence.until_ms) - max(self.began_ms, silence.since_ms)
        return common_ms > ASIDE_MS


@dataclass(slots=True)
class Timeline:
    """All faults in their order, their steps, and how busy the machine was."""

    windows: list[Window] = field(default_factory=list)
    over_ms: int = AGAIN
    """When all was settled after the last fault: later, clients are silent by themselves."""
    _steps: list[tuple[int, str]] = field(default_factory=list)
    _looks: list[tuple[int, float]] = field(default_factory=list)
    """(when, for how long somebody had waited for a processor by then)"""
    _late: list[tuple[int, int]] = field(default_factory=list)
    """(when, by how many milliseconds this process was late, in which all clients are)"""

    @contextmanager
    def window(self, kind: str, *, is_clean: bool) -> Iterator[None]:
        """A fault is under way in this block."""
        made, busy_before_s = Window(kind, now_ms(), is_clean), busy_s()
        self.windows.append(made)
        yield
        made.ended_ms, made.patience_s = now_ms(), busy_s() - busy_before_s

    def note(self, step: str) -> None:
        """Something is done now."""
        self._steps.append((now_ms(), step))

    async def watch(self) -> None:
        """Look how busy the machine and this process are, until cancelled."""
        while True:
            self._looks.append((now_ms(), busy_s()))
            await rest(LOOK_S)
            self._late.append((now_ms(), now_ms() - self._looks[-1][0] - round(LOOK_S * 1_000)))

    def ends(self) -> Iterator[tuple[Window, int]]:
        """Each fault that is over, and when the next one began."""
        nexts = [*(window.began_ms for window in self.windows[1:]), self.over_ms]
        pairs = zip(self.windows, nexts, strict=False)
        return ((window, next_ms) for window, next_ms in pairs if window.ended_ms < AGAIN)

    def beside(self, window: Window, silence: Silence) -> list[str]:
        """What else was under way during a silence of this fault. That shards go back after it is
        a part of it."""
        at = self.windows.index(window)
        others = self.windows[:at] + self.windows[at + 1 :]
        if others[at:] and others[at].kind == BACK:
            del others[at]
        kinds = [other.kind for other in others if other.is_in(silence)]
        if not window.is_clean:
            before = self.windows[at - 1].kind
            kinds.append(f"shards on their way after {before}")
        return kinds

    def during(self, window: Window, silence: Silence) -> str:
        """The steps of faults since this one began, up to the silence's end, and how busy the
        machine and the clients were in the silence."""
        since_ms = min(window.began_ms, silence.since_ms)
        shown = [
            f"{step} at {clock(at_ms)}"
            for at_ms, step in self._steps
            if since_ms <= at_ms <= silence.until_ms
        ]
        waited_s = self._busy_at_s(silence.until_ms) - self._busy_at_s(silence.since_ms)
        shown.append(f"processes waited {waited_s:.2f} s for a processor")
        late_ms = [ms for at_ms, ms in self._late if silence.since_ms <= at_ms <= silence.until_ms]
        shown.append(f"clients were late by {max(late_ms, default=0)} ms at most")
        return "; ".join(shown)

    def _busy_at_s(self, at_ms: int) -> float:
        """As the last look before said, or the first one."""
        if not self._looks:
            return 0.0
        place = bisect_right(self._looks, at_ms, key=lambda look: look[0])
        return self._looks[max(0, place - 1)][1]


# --- the judge -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """For how long a shard may be silent by faults of these kinds."""

    name: str
    kinds: Sequence[str]
    seconds: float


@dataclass(slots=True)
class Judged:
    """The result for a bound."""

    bound: Bound
    alone: list[tuple[Silence, Window]] = field(default_factory=list)
    """The longest silence of each fault without another fault."""
    mixed: list[tuple[Silence, Window]] = field(default_factory=list)
    """Those over the bound in which something else was."""

    @property
    def broken(self) -> list[tuple[Silence, Window]]:
        return [row for row in self.alone if row[0].seconds >= self.bound.seconds]


def judge(
    timeline: Timeline, beats: Mapping[int, Sequence[Beat]], bounds: Sequence[Bound]
) -> list[Judged]:
    """``beats``: by shard."""
    results = [Judged(bound) for bound in bounds]
    for window, next_ms in timeline.ends():
        for judged in results:
            if window.kind not in judged.bound.kinds:
                continue
            longest: Silence | None = None
            for silence in of_fault(beats, window, next_ms):
                if not timeline.beside(window, silence):
                    longest = max(longest or silence, silence)
                elif silence.seconds >= judged.bound.seconds:
                    judged.mixed.append((silence, window))
            if longest is not None:
                judged.alone.append((longest, window))
    return results


def of_fault(beats: Mapping[int, Sequence[Beat]], window: Window, next_ms: int) -> list[Silence]:
    """Return the silences of all shards."""
    return [
        silence
        for shard, of_shard in beats.items()
        for silence in silences(of_shard, shard, window.began_ms, next_ms)
    ]


def verdicts(timeline: Timeline, judged: Sequence[Judged]) -> Iterator[str]:
    """A line about each bound, and one about each silence that is over it."""

    def shown(silence: Silence, window: Window) -> str:
        return f"{silence}, by {window.kind} ({timeline.during(window, silence)})"

    for item in judged:
        bound, broken = item.bound, sorted(item.broken, reverse=True, key=lambda pair: pair[0])
        what = f"gap of {bound.name}, < {bound.seconds:g} s ({', '.join(bound.kinds)})"
        if not item.alone:
            yield f"{what}: nothing to judge, no such fault was alone"
        elif not broken:
            longest = max(item.alone, key=lambda pair: pair[0])
            yield f"{what}: held by {len(item.alone)} faults, longest {shown(*longest)}"
        else:
            over_s = broken[0][0].seconds - bound.seconds
            yield f"{what}: broken by {over_s:.2f} s, by {len(broken)} of {len(item.alone)} faults"
            yield from (f"  broken: {shown(*pair)}" for pair in broken[:SHOWN_MAX])
        for silence, window in sorted(item.mixed, reverse=True, key=lambda pair: pair[0])[
            :SHOWN_MAX
        ]:
            beside = ", ".join(timeline.beside(window, silence))
            yield f"  not judged, beside {beside}: {shown(silence, window)}"
