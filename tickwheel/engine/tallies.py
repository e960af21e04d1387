"""How many tasks of some topics are not finished: counts that somebody asks for again and again.

A tally counts tasks that are staged, tasks that are durable and that a group is owed or will be
owed, and half tasks: what has been taken and has not ended. Dead letters are not among them. It is
changed with every batch that is staged and every task that ends, so asking costs nothing, and it
is right at once after a restart. Nothing is done where nobody asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAMES_MAX = 100_000
"""How many topics have their tallies remembered."""


class Tally:
    """A count of the unfinished tasks of some topics."""

    __slots__ = ("has", "tasks")

    def __init__(self, has: Callable[[str], bool]) -> None:
        self.has = has
        """Whether a topic, by its name, is counted."""
        self.tasks = 0


class Tallies:
    """All tallies of one engine."""

    def __init__(self) -> None:
        self.all: list[Tally] = []
        self._of: dict[str, tuple[Tally, ...]] = {}

    def add(self, tally: Tally) -> None:
        """Keep ``tally``, which is right at the moment, up to date from now on."""
        self.all.append(tally)
        self._of.clear()

    def remove(self, tally: Tally) -> None:
        """Drop a tally that nobody asks for any more."""
        self.all.remove(tally)
        self._of.clear()

    def count(self, topic: str, change: int) -> None:
        """Change the number of tasks of one topic."""
        if not self.all:
            return
        found = self._of.get(topic)
        if found is None:
            if len(self._of) >= NAMES_MAX:
                self._of.clear()
            found = self._of[topic] = tuple(tally for tally in self.all if tally.has(topic))
        for tally in found:
            tally.tasks += change

    def count_all(self, topics: Mapping[str, int], sign: int) -> None:
        """Change the numbers of tasks of many topics; ``sign``: 1 adds, -1 subtracts."""
        if self.all:
            for topic, change in topics.items():
                self.count(topic, sign * change)
