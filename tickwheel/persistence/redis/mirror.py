"""A copy of the shard's durable data in memory, from which a loss in Redis can be repaired.

Recovery fills the mirror, and every batch changes it once Redis has applied the batch. It contains
the same bytes as Redis, and counts them; reads decode the rows. It does not know connections or
scripts. Invariants:

* When ``complete``, it has exactly the contents of the shard after the newest confirmed batch.
* Before that, each task in it is correct, but tasks can be missing, so nothing reads it.

With ``?mirror=no``, ``NoMirror`` replaces it. It keeps nothing and is never complete, so all
reads go to Redis.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate, chain, islice
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.model.kinds import Effects, ProgressKey, RecordKey
from tickwheel.persistence.codec import (
    ROWS_PER_BATCH,
    decode_dead,
    decode_endings,
    decode_progress,
    decode_record,
    decode_task,
    in_parts,
)
from tickwheel.persistence.contract import CommitRefused, SmallState, StoredTask
from tickwheel.persistence.redis.layout import kind_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from tickwheel.model.records import DeadRow, Outcome
    from tickwheel.persistence.redis.layout import Records

BUCKETS = 128
BLOCK_BITS = 20
"""Number of low bits of an id within one dictionary: 1,024 consecutive ids share one. Because they
are filled together, in adjacent memory, they cost a third of ids in different dictionaries."""
SPREAD = 4_093
"""Number of entries in the table of dictionaries. It is prime, so that ids of busy and idle times
are spread evenly."""
PLACED_TASKS_MAX = 16
"""Maximum number of new tasks that are added to dictionaries at once. For so few, deferring the
work would cost more."""
TASK_BYTES = 144
"""Memory of a task in addition to its record, in bytes: its id, its entry, the record's object."""
ROW_BYTES = 450
"""Memory of a row of progress or a dead letter in addition to its record, in bytes."""


class TaskRecords:
    """Task id → record.

    The records are in many dictionaries of unequal size. A single dictionary would block the event
    loop for 120 ms when it grows past a million entries, and dictionaries of equal size could all
    grow in the same batch.

    The tasks added last are put into a dictionary by ``place`` or at the next access.
    """

    def __init__(self) -> None:
        buckets: list[dict[int, bytes]] = [{} for _ in range(BUCKETS)]
        boundaries = list(accumulate(2 ** (i / BUCKETS) for i in range(BUCKETS)))
        shares = ((k + 0.5) / SPREAD * boundaries[-1] for k in range(SPREAD))
        self._buckets = buckets
        self._table = [buckets[bisect_left(boundaries, share)] for share in shares]
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
        """Add new tasks, whose records have ``size_bytes`` in total. The caller must not change the
        arguments later. Ascending ids are added faster."""
        self.place()
        self.bytes_held += size_bytes + TASK_BYTES * len(records)
        if len(records) > PLACED_TASKS_MAX:
            self._added = ids, records
            return
        table = self._table
        for task_id, record in zip(ids, records, strict=True):
            table[(task_id >> BLOCK_BITS) % SPREAD][task_id] = record

    @property
    def has_to_place(self) -> bool:
        """Whether the tasks added last are not in a dictionary yet."""
        return self._added is not None

    def place(self) -> None:
        """Put the tasks added last into their dictionaries."""
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
        """Add tasks or replace their records."""
        self.place()
        table, grown = self._table, 0
        for task_id, record in zip(ids, records, strict=True):
            bucket = table[(task_id >> BLOCK_BITS) % SPREAD]
            old_record = bucket.get(task_id)
            grown += len(record) + (TASK_BYTES if old_record is None else -len(old_record))
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

    def records(self) -> Iterator[bytes]:
        """Return all records, in any order."""
        self.place()
        return chain.from_iterable(bucket.values() for bucket in self._buckets)


class GroupRecords:
    """Task id and group → record."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, bytes]] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def ids(self) -> Collection[int]:
        return self._rows

    def get(self, task_id: int) -> list[bytes]:
        """Return the records of a task, ordered by group."""
        groups = self._rows.get(task_id)
        return [groups[group] for group in sorted(groups)] if groups else []

    def change(self, keys: Iterable[ProgressKey], records: Sequence[bytes | None]) -> None:
        """Set the records of these keys; None removes a record."""
        rows, grown = self._rows, 0
        for (task_id, group), record in zip(keys, records, strict=True):
            groups = rows.get(task_id)
            old_record = groups.get(group) if groups is not None else None
            if old_record is not None:
                grown -= len(old_record) + ROW_BYTES
            if record is not None:
                grown += len(record) + ROW_BYTES
                if groups is None:
                    rows[task_id] = {group: record}
                else:
                    groups[group] = record
            elif groups is not None and old_record is not None:
                del groups[group]
                if not groups:
                    del rows[task_id]
        self.bytes_held += grown

    def drop(self, ids: Iterable[int]) -> None:
        """Remove all records of these tasks."""
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
        """Return all records, in any order."""
        for groups in self._rows.values():
            yield from groups.values()


ROOM_DIVISOR = 64
"""Fraction of the limit (1/64) that must be free for enqueues."""


class Counts(NamedTuple):
    """The number of rows of each kind that a rewrite of the shard writes."""

    tasks: int
    progress: int
    dead: int
    records: int
    """Number of records of all other kinds."""

    def __str__(self) -> str:
        return (
            f"{self.tasks} tasks, {self.progress} rows of progress, {self.dead} dead letters,"
            f" {self.records} records of groups, sessions and others"
        )


class SmallRecords(NamedTuple):
    """The encoded records of a shard without its tasks."""

    records: list[tuple[bytes, bytes]]
    """(field of the hash, record)."""
    progress: list[tuple[ProgressKey, bytes]]
    dead: list[tuple[ProgressKey, bytes]]
    outcomes: list[tuple[int, bytes]]

    def decoded(self, endings_max: int) -> SmallState:
        """See ``Store.recover_small``."""
        outcomes = chain.from_iterable(decode_endings(record) for _, record in self.outcomes)
        return small_state(
            self.records,
            (record for _, record in self.progress),
            (record for _, record in self.dead),
            list(outcomes)[-endings_max:],
        )


class Changes(NamedTuple):
    """The tasks that batches changed after a chunk was requested; it may lack these changes."""

    newer: set[int]
    """Ids of all tasks in these batches."""
    ended: set[int]
    """Ids of the tasks that ended in these batches."""


class Filling:
    """The state of a scan that reads all tasks from Redis, concurrently with commits."""

    def __init__(self) -> None:
        self.created: set[int] = set()
        """Ids of the tasks created since the scan began."""
        self.chunks: deque[Changes] = deque()
        """The changes of each requested chunk, oldest first."""

    def ask(self) -> None:
        """Record the request of a chunk."""
        self.chunks.append(Changes(set(), set()))

    def take(self) -> Changes:
        """Return the changes since the request of the oldest chunk, and forget the request."""
        return self.chunks.popleft()


class Mirror:
    """The records of a shard in memory."""

    keeps_records = True
    """Whether a complete mirror can restore all data in Redis."""

    def __init__(self, endings_max: int, bytes_max: int) -> None:
        self._tasks = TaskRecords()
        self._progress = GroupRecords()
        self._dead = GroupRecords()
        self._records: dict[bytes, bytes] = {}
        """Records of all kinds, by the field of the hash in Redis."""
        self._endings: deque[tuple[int, bytes]] = deque()
        self._endings_count = 0
        self._endings_max = endings_max
        self._bytes_max = bytes_max
        self._fillings: list[Filling] = []
        self._has_small = self._has_tasks = False
        self._expected_bytes = 0

    @property
    def complete(self) -> bool:
        return self._has_small and self._has_tasks

    @property
    def bytes_held(self) -> int:
        """Approximate size of the mirror in bytes; while it is filled, an estimate."""
        rows_bytes = self._progress.bytes_held + self._dead.bytes_held
        return max(self._tasks.bytes_held, self._expected_bytes) + rows_bytes

    @property
    def has_room(self) -> bool:
        """Whether at least ``1 / ROOM_DIVISOR`` of the limit is free."""
        return self.bytes_held <= self._bytes_max - self._bytes_max // ROOM_DIVISOR

    def admit(self, n: int, records: Records) -> None:
        """Raise CommitRefused if the new tasks of batch ``n`` would exceed the limit."""
        new_bytes = records.enqueued_bytes + TASK_BYTES * len(records.enqueued)
        needed = self.bytes_held + new_bytes
        if needed > self._bytes_max:
            raise CommitRefused(
                f"batch {n}: tasks in memory would take {needed} bytes;"
                f" the limit is {self._bytes_max} (resident_bytes_max)",
                full=True,
            )

    def counts(self) -> Counts:
        return Counts(
            len(self._tasks),
            len(self._progress),
            len(self._dead),
            len(self._records),
        )

    # --- batches -----------------------------------------------------------------------------

    def landed(self, effects: Effects, records: Records) -> None:
        """Apply a batch that was applied to the shard."""
        self._note_changes(effects)
        if effects.enqueued:
            # While the mirror is filled, the scan may already have added these tasks.
            ids = list(effects.enqueued)
            if self._has_tasks:
                self._tasks.add(ids, records.enqueued, records.enqueued_bytes)
            else:
                self._tasks.put(ids, records.enqueued)
        if effects.updated:
            self._tasks.put(effects.updated, records.updated)
        if effects.progress:
            self._progress.change(effects.progress, records.progress)
        if effects.dead:
            self._dead.change(effects.dead, records.dead)
        for field, record in records.fields:
            if record is None:
                self._records.pop(field, None)
            else:
                self._records[field] = record
        if records.outcomes is not None:
            self._tasks.drop(effects.ended)
            self._progress.drop(effects.ended)
            self._dead.drop(effects.ended)
            self._remember(*records.outcomes)

    def _note_changes(self, effects: Effects) -> None:
        """Record the changes of a batch in all current scans."""
        for filling in self._fillings:
            filling.created.update(effects.enqueued)
            for newer, ended in filling.chunks:
                newer.update(effects.enqueued, effects.updated, effects.ended)
                ended.update(effects.ended)

    @property
    def has_to_place(self) -> bool:
        """Whether the last batch has left work for ``place``."""
        return self._tasks.has_to_place

    def place(self) -> None:
        """Do the deferred work of the last batch; call it while the next one is being sent."""
        self._tasks.place()

    def _remember(self, count: int, record: bytes) -> None:
        """Add a batch of outcomes, and drop the oldest batches that exceed ``endings_max``."""
        self._endings.append((count, record))
        self._endings_count += count
        while self._endings_count - self._endings[0][0] >= self._endings_max:
            self._endings_count -= self._endings.popleft()[0]

    # --- filling -----------------------------------------------------------------------------

    def mark_complete(self) -> None:
        """Mark the empty mirror of a new shard as complete."""
        self._has_small = self._has_tasks = True

    def expect(self, size_bytes: int) -> None:
        """Set the estimated size of the tasks in bytes."""
        self._expected_bytes = size_bytes

    def begin_filling(self) -> Filling:
        filling = Filling()
        self._fillings.append(filling)
        return filling

    def fill(self, newer: set[int], ids: Sequence[int], records: Sequence[bytes]) -> None:
        """Add a chunk of tasks, except those that later batches have changed (``newer``)."""
        if self._has_tasks:
            return
        if not newer.isdisjoint(ids):
            unchanged = [i for i, task_id in enumerate(ids) if task_id not in newer]
            ids, records = [ids[i] for i in unchanged], [records[i] for i in unchanged]
        self._tasks.put(ids, records)

    def end_filling(self, filling: Filling, *, is_complete: bool) -> None:
        """End a scan. ``is_complete``: it has added all tasks."""
        self._fillings.remove(filling)
        if is_complete:
            self._has_tasks, self._expected_bytes = True, 0

    def fill_small(self, small: SmallRecords) -> None:
        """Set all records except tasks. No batch may have been applied while they were read."""
        if self._has_small:
            return
        self._records = dict(small.records)
        for rows, pairs in ((self._progress, small.progress), (self._dead, small.dead)):
            rows.clear()
            rows.change([key for key, _ in pairs], [record for _, record in pairs])
        self._endings.clear()
        self._endings_count = 0
        for count, record in small.outcomes:
            self._remember(count, record)
        self._has_small = True

    # --- reading -----------------------------------------------------------------------------

    def read(self, ids: Iterable[int]) -> dict[int, StoredTask]:
        """See ``Store.read``."""
        tasks: dict[int, StoredTask] = {}
        get, progress, dead = self._tasks.get, self._progress, self._dead
        for task_id in ids:
            record = get(task_id)
            if record is not None:
                tasks[task_id] = StoredTask(
                    decode_task(record),
                    tuple(map(decode_progress, progress.get(task_id))),
                    tuple(map(decode_dead, dead.get(task_id))),
                )
        return tasks

    def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        """See ``Store.read_some``. ``bytes_max`` limits the size of the records."""
        size, get = 0, self._tasks.get
        for index, task_id in enumerate(ids):
            if size >= bytes_max:
                return self.read(ids[:index]), ids[index:]
            size += len(get(task_id) or b"")
        return self.read(ids), ()

    def ids(self) -> Iterable[int]:
        return self._tasks

    def dead_ids(self) -> Collection[int]:
        """Return the ids of the tasks that have a dead letter."""
        return self._dead.ids()

    def dead(self, task_id: int) -> list[DeadRow]:
        """Return the dead letters of a task, ordered by group."""
        return [decode_dead(record) for record in self._dead.get(task_id)]

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Return the newest outcomes, oldest first."""
        outcomes = chain.from_iterable(decode_endings(record) for _, record in self._endings)
        return islice(outcomes, max(0, self._endings_count - self._endings_max), None)

    def small(self) -> SmallState:
        """See ``Store.recover_small``."""
        outcomes = list(self.outcomes())
        return small_state(self._records.items(), self._progress, self._dead, outcomes)

    def batches(self) -> Iterator[Effects]:
        """Yield all records in bounded batches. No batch may be applied during the iteration."""
        ended: dict[int, Outcome] = {}
        for task_id, outcome in self.outcomes():
            if task_id in ended or len(ended) >= ROWS_PER_BATCH:
                yield Effects(ended=ended)
                ended = {}
            ended[task_id] = outcome
        yield Effects(ended=ended)
        for part in in_parts(self._records.items(), lambda pair: len(pair[1])):
            yield Effects(records=decode_records(part))
        for records in in_parts(self._tasks.records(), len):
            rows = map(decode_task, records)
            yield Effects(enqueued={row.id: row for row in rows})
        for some_progress in in_parts(self._progress, len):
            rows_of_progress = map(decode_progress, some_progress)
            yield Effects(progress={(row.id, row.group): row for row in rows_of_progress})
        for some_dead in in_parts(self._dead, len):
            yield Effects(dead={(row.id, row.group): row for row in map(decode_dead, some_dead)})


class NoMirror(Mirror):
    """A mirror that keeps no records: it is never complete, always has room, and only records
    changes that are concurrent with a scan."""

    keeps_records = False

    def __init__(self) -> None:
        super().__init__(endings_max=0, bytes_max=0)

    @property
    def has_room(self) -> bool:
        return True

    def admit(self, n: int, records: Records) -> None:
        pass

    def landed(self, effects: Effects, records: Records) -> None:
        self._note_changes(effects)

    def mark_complete(self) -> None:
        pass

    def expect(self, size_bytes: int) -> None:
        pass

    def fill(self, newer: set[int], ids: Sequence[int], records: Sequence[bytes]) -> None:
        pass

    def end_filling(self, filling: Filling, *, is_complete: bool) -> None:
        super().end_filling(filling, is_complete=False)

    def fill_small(self, small: SmallRecords) -> None:
        pass


def small_state(
    records: Iterable[tuple[bytes, bytes]],
    progress: Iterable[bytes],
    dead: Iterable[bytes],
    outcomes: list[tuple[int, Outcome]],
) -> SmallState:
    return SmallState(
        records=decode_records(records),
        progress=list(map(decode_progress, progress)),
        dead=sorted((row.id, row.group, row.topic) for row in map(decode_dead, dead)),
        outcomes=outcomes,
    )


def decode_records(pairs: Iterable[tuple[bytes, bytes]]) -> dict[RecordKey, Any]:
    """Decode pairs of hash field and record. Return the records of all kinds by key."""
    records: dict[RecordKey, Any] = {}
    for field, record in pairs:
        kind = kind_in(field)
        row = decode_record(kind, record)
        records[kind, kind.key(row)] = row
    return records
