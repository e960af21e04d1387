"""The containers of the mirror: records by task, and by task and group, with their bytes counted.

They know ids, groups and bytes; not what is in a record.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import lt

from tickwheel.model.effects import ProgressKey

BUCKETS = 128
BLOCK_BITS = 20
"""1,024 ids that a daemon assigns in a row lie in one dictionary: filled at once, and in one
neighbourhood of memory, they cost a third of what they would cost apart."""
SPREAD = 4_093
"""A prime, so that the ids of busy and of idle times spread alike."""
TASK_BYTES = 144
"""What a task costs beside its record: its id, its place, the object around the record."""
ROW_BYTES = 450
"""The same for a row of one group."""


class TaskRecords:
    """Task id → record.

    They lie in many dictionaries of unequal shares: one alone would stop the event loop for
    120 ms when it grows past a million, and equal ones might all grow in the same batch.

    What was added last counts and is found like all the rest, but has no place in them yet:
    ``place`` does that, or whoever asks for something first.
    """

    def __init__(self) -> None:
        buckets: list[dict[int, bytes]] = [{} for _ in range(BUCKETS)]
        ends = list(accumulate(2 ** (i / BUCKETS) for i in range(BUCKETS)))
        shares = ((k + 0.5) / SPREAD * ends[-1] for k in range(SPREAD))
        self._buckets = buckets
        self._table = [buckets[bisect_left(ends, share)] for share in shares]
        self._added: tuple[Sequence[int], Sequence[bytes]] | None = None
        self.bytes_held = 0

    def __len__(self) -> int:
        self.place()
        return sum(map(len, self._buckets))

    def __iter__(self) -> Iterator[int]:
        self.place()
        for bucket in self._buckets:
            yield from bucket

    def get(self, task_id: int) -> bytes | None:
        if self._added is not None:
            self.place()
        return self._table[(task_id >> BLOCK_BITS) % SPREAD].get(task_id)

    def add(self, ids: Sequence[int], records: Sequence[bytes], size_bytes: int) -> None:
        """Tasks that are certainly not here, and the size of their records. None of the three
        changes any more. Ids come in order, or it takes longer."""
        self.place()
        self._added = ids, records
        self.bytes_held += size_bytes + TASK_BYTES * len(records)

    def place(self) -> None:
        """Make room for what was added last."""
        if self._added is None:
            return
        (ids, records), self._added = self._added, None
        if not all(map(lt, ids, islice(ids, 1, None))):
            for task_id, record in zip(ids, records, strict=True):
                self._table[(task_id >> BLOCK_BITS) % SPREAD][task_id] = record
            return
        start, count = 0, len(ids)
        while start < count:
            block = ids[start] >> BLOCK_BITS
            stop = bisect_left(ids, (block + 1) << BLOCK_BITS, start)
            pairs = zip(ids[start:stop], records[start:stop], strict=True)
            self._table[block % SPREAD].update(pairs)
            start = stop

    def put(self, ids: Iterable[int], records: Sequence[bytes]) -> None:
        """Tasks that may be here."""
        self.place()
        table, grown = self._table, 0
        for task_id, record in zip(ids, records, strict=True):
            bucket = table[(task_id >> BLOCK_BITS) % SPREAD]
            old = bucket.get(task_id)
            grown += len(record) + (TASK_BYTES if old is None else -len(old))
            bucket[task_id] = record
        self.bytes_held += grown

    def drop(self, ids: Iterable[int]) -> None:
        self.place()
        table, freed = self._table, 0
        for task_id in ids:
            record = table[(task_id >> BLOCK_BITS) % SPREAD].pop(task_id, None)
            if record is not None:
                freed += len(record) + TASK_BYTES
        self.bytes_held -= freed

    def chunks(self, rows: int, size_bytes: int) -> Iterator[list[bytes]]:
        """All records, about ``rows`` or ``size_bytes`` at a time."""
        self.place()
        some: list[bytes] = []
        size = 0
        for bucket in self._buckets:
            for record in bucket.values():
                some.append(record)
                size += len(record)
                if len(some) >= rows or size >= size_bytes:
                    yield some
                    some, size = [], 0
        if some:
            yield some


class GroupRecords:
    """Task id and group → record."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, bytes]] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def ids(self) -> Iterable[int]:
        return self._rows

    def get(self, task_id: int) -> list[bytes]:
        """The records of a task by group."""
        groups = self._rows.get(task_id)
        return [groups[group] for group in sorted(groups)] if groups else []

    def change(self, keys: Iterable[ProgressKey], records: Sequence[bytes | None]) -> None:
        """A record that is None is dropped."""
        rows, grown = self._rows, 0
        for (task_id, group), record in zip(keys, records, strict=True):
            groups = rows.get(task_id)
            old = groups.get(group) if groups is not None else None
            if old is not None:
                grown -= len(old) + ROW_BYTES
            if record is not None:
                grown += len(record) + ROW_BYTES
                if groups is None:
                    rows[task_id] = {group: record}
                else:
                    groups[group] = record
            elif groups is not None and old is not None:
                del groups[group]
                if not groups:
                    del rows[task_id]
        self.bytes_held += grown

    def drop(self, ids: Iterable[int]) -> None:
        """Whatever there is of these tasks."""
        rows, freed = self._rows, 0
        if not rows:
            return
        for task_id in ids:
            groups = rows.pop(task_id, None)
            if groups is not None:
                freed += sum(map(len, groups.values())) + ROW_BYTES * len(groups)
        self.bytes_held -= freed

    def clear(self) -> None:
        self._rows.clear()
        self.bytes_held = 0

    def __iter__(self) -> Iterator[bytes]:
        """All records."""
        for groups in self._rows.values():
            yield from groups.values()
