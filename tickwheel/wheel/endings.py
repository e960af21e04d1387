"""How the most recently finished tasks ended, within a fixed bound.

Two generations: when the young one is full it becomes the old one and the former old one is
forgotten. Between ``bound / 2`` and ``bound`` endings are known at any time, at O(1) a task.
"""

from __future__ import annotations

from collections.abc import Iterable

from tickwheel.wheel.records import Ending


class Endings:
    """id → Ending of recently finished tasks."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, bound: int) -> None:
        self._half = max(1, bound // 2)
        self._young: dict[int, Ending] = {}
        self._old: dict[int, Ending] = {}

    def add(self, task_id: int, ending: Ending) -> None:
        self._young[task_id] = ending
        if len(self._young) >= self._half:
            self._old = self._young
            self._young = {}

    def add_all(self, pairs: Iterable[tuple[int, Ending]]) -> None:
        for task_id, ending in pairs:
            self.add(task_id, ending)

    def get(self, task_id: int) -> Ending | None:
        found = self._young.get(task_id)
        return found if found is not None else self._old.get(task_id)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
