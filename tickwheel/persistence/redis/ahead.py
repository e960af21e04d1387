"""New tasks encoded while Redis still works on the batch before theirs.

They are most of what a batch costs this process; done between two batches, Redis would wait for
it. Knows nothing of batches but the map that collects the tasks of the open one. Invariant: what
was encoded counts only if the map still begins with exactly those rows.
"""

from __future__ import annotations

from itertools import islice
from operator import is_
from typing import NamedTuple

from tickwheel.model.records import TaskRow
from tickwheel.persistence.codec import encode_tasks
from tickwheel.persistence.redis.drivers import Packed
from tickwheel.persistence.redis.new_tasks import NEW_ROWS, NewTasks


class Encoded(NamedTuple):
    """All new tasks of a batch, in its order."""

    records: list[bytes]
    records_bytes: int
    operations: list[Packed]
    """What stores them."""


class Ahead:
    """See the module's text."""

    def __init__(self) -> None:
        self._of: dict[int, TaskRow] = {}
        self._rows: list[TaskRow] = []
        self._records: list[bytes] = []
        self._records_bytes = 0
        self._tasks = NewTasks()

    def add(self, enqueued: dict[int, TaskRow]) -> None:
        """Encode what has come since the last call, if it is worth it."""
        if enqueued is not self._of:
            self._begin(enqueued)
        fresh = len(enqueued) - len(self._rows)
        if fresh >= NEW_ROWS:
            self._encode(fresh // NEW_ROWS * NEW_ROWS)

    def finish(self, enqueued: dict[int, TaskRow]) -> Encoded:
        """All of it."""
        if enqueued is not self._of or not (
            len(self._rows) <= len(enqueued) and all(map(is_, self._rows, enqueued.values()))
        ):
            whole = Ahead()
            whole._begin(enqueued)
            return whole.finish(enqueued)
        if len(enqueued) > len(self._rows):
            self._encode(len(enqueued) - len(self._rows))
        encoded = Encoded(self._records, self._records_bytes, self._tasks.operations())
        self._begin({})
        return encoded

    def _begin(self, enqueued: dict[int, TaskRow]) -> None:
        self._of = enqueued
        self._rows, self._records, self._records_bytes = [], [], 0
        self._tasks = NewTasks()

    def _encode(self, count: int) -> None:
        done = len(self._rows)
        rows = list(islice(self._of.values(), done, done + count))
        records = encode_tasks(rows)
        self._tasks.add(rows, records)
        self._rows += rows
        self._records += records
        self._records_bytes += sum(map(len, records))
