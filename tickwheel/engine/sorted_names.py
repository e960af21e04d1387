"""Names in their order, from any of them on: what a page of a listing needs.

The names are in runs of at most ``RUN_MAX``, so that one more or less moves a part of one run,
and a page touches the names that it shows. Adding and removing take O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_MAX = 512


class SortedNames:
    """A set of names that is read in order."""

    __slots__ = ("_lasts", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[str]] = []
        """Runs of names, ascending within each run and from one to the next; none is empty."""
        self._lasts: list[str] = []
        """The last name of each run."""

    def add(self, name: str) -> None:
        """Add a name; one that is there already stays once."""
        if not self._runs:
            self._runs, self._lasts = [[name]], [name]
            return
        place = min(bisect_left(self._lasts, name), len(self._runs) - 1)
        run = self._runs[place]
        at = bisect_left(run, name)
        if at < len(run) and run[at] == name:
            return
        insort(run, name)
        if len(run) > RUN_MAX:
            half = len(run) // 2
            self._runs[place : place + 1] = [run[:half], run[half:]]
            self._lasts[place : place + 1] = [run[half - 1], run[-1]]
        else:
            self._lasts[place] = run[-1]

    def discard(self, name: str) -> None:
        """Remove a name, if it is there."""
        place = bisect_left(self._lasts, name)
        if place == len(self._runs):
            return
        run = self._runs[place]
        at = bisect_left(run, name)
        if run[at] != name:
            return
        del run[at]
        if run:
            self._lasts[place] = run[-1]
        else:
            del self._runs[place], self._lasts[place]

    def after(self, name: str) -> Iterator[str]:
        """The names behind this one, in order. Nothing may be changed while they are read."""
        place = bisect_right(self._lasts, name)
        for index in range(place, len(self._runs)):
            run = self._runs[index]
            yield from islice(run, bisect_right(run, name) if index == place else 0, None)
