"""A store that does not find what it holds, when a test says so."""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.persistence.contract import StoredTask
from tickwheel.persistence.memory import MemoryStore


class HoleyStore(MemoryStore):
    """Reads leave out the tasks that are ``hidden``, the next ``reads_left`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()
        self.reads_left = 10**9
        self.reads: list[list[int]] = []

    def _without(self, ids: Sequence[int], found: dict[int, StoredTask]) -> dict[int, StoredTask]:
        self.reads.append(list(ids))
        self.reads_left -= 1
        if self.reads_left < 0:
            return found
        return {task_id: task for task_id, task in found.items() if task_id not in self.hidden}

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        return self._without(ids, await super().read(ids))

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        found, left = await super().read_some(ids, bytes_max)
        return self._without(ids, found), left
