"""Packs (rows that contain several tasks of one batch with consecutive ids), and their index.

Most tasks arrive in large batches, and those of a batch are read and finished at similar times. A
row of up to ``PACK_TASKS_MAX`` tasks costs a tenth of what single rows cost. A pack never changes.
Table ``gone`` has a bit for each task that has left the pack, and table ``moved`` has all due times
of a pack once one of them has changed. A pack's columns: first id, count, head (due times of 8
bytes each, then body lengths of 4 bytes each, little-endian), topics (one name, or a JSON array of
names), concatenated bodies, extras (NULL, or a msgpack array from ``codec.encode_extras_of``).

``PackIndex`` is the writer's list of packs, in memory, at two bytes for ten tasks. It finds the
packs of the tasks that a batch removes, and computes how the packs change. Changes are prepared,
written by the caller in its transaction, and adopted after COMMIT. A sparse pack, most of whose
tasks have left, still contains their bodies. After a while the caller turns it into single rows
(``sparse``), so that packs never use more than four times the space they need for long.

This module knows no SQL.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import msgpack

from tickwheel.model.records import ID_STEP, TaskRow
from tickwheel.persistence.codec import RecordUnreadable, decode_extras_of, encode_extras_of
from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PACK_TASKS_MAX = 60
"""Maximum number of tasks in a pack. Their bits fit into a signed 64-bit number, and with 100 bytes
each they fill two pages."""
PACK_TASKS_MIN = 8
"""Minimum number of tasks in a pack. A smaller pack would cost more than single rows."""
PACK_BYTES_MAX = 64 * 1024

DUE_BYTES = 8
SIZE_BYTES = 4
"""Bytes of a due time, and of a body's length, in a pack's head."""

PackValues = tuple[int, int, bytes, str, bytes, bytes | None]
assert sys.byteorder == "little", "arrays are written in their memory layout"


def split(rows: Sequence[TaskRow]) -> tuple[list[PackValues], list[TaskRow]]:
    """Divide new tasks, which are in order of their ids, into (packs, single rows)."""
    packs: list[PackValues] = []
    loose: list[TaskRow] = []
    for start, end in _runs([row[0] for row in rows]):
        for begin in range(start, end, PACK_TASKS_MAX):
            part = rows[begin : min(end, begin + PACK_TASKS_MAX)]
            pack = _pack(part) if len(part) >= PACK_TASKS_MIN else None
            if pack is None:
                loose += part
            else:
                packs.append(pack)
    return packs, loose


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield index ranges in which each id is ``ID_STEP`` above the preceding id."""
    if in_a_row(ids):
        yield 0, len(ids)
        return
    start = 0
    for index, (task_id, following) in enumerate(pairwise(ids), 1):
        if following - task_id != ID_STEP:
            yield start, index
            start = index
    if ids:
        yield start, len(ids)


def in_a_row(ids: Sequence[int]) -> bool:
    """Return whether ids are consecutive, as they usually are, without a Python loop."""
    return len(ids) > 0 and ids == list(range(ids[0], ids[0] + len(ids) * ID_STEP, ID_STEP))


def _pack(rows: Sequence[TaskRow]) -> PackValues | None:
    """Return these tasks as a pack, or None if they exceed ``PACK_BYTES_MAX``."""
    ids, dues_ms, topics, bodies, options = zip(*rows, strict=True)
    joined = b"".join(bodies)
    head = array("q", dues_ms).tobytes() + array("I", map(len, bodies)).tobytes()
    alike = topics.count(topics[0]) == len(topics) and not topics[0].startswith("[")
    names = topics[0] if alike else json.dumps(topics)
    packed = msgpack.packb(encode_extras_of(options)) if any(options) else None
    if len(joined) + len(packed or b"") > PACK_BYTES_MAX:
        return None
    return ids[0], len(rows), head, names, joined, packed


def pack_bytes(pack: PackValues) -> int:
    return len(pack[2]) + len(pack[4]) + len(pack[5] or b"") + 64


def mask_of(count: int) -> int:
    """Return the mask of a pack of ``count`` tasks that have all left."""
    return (1 << count) - 1


def ids_of(first: int, count: int, mask: int) -> list[int]:
    """Return the ids of the tasks that are still in the pack."""
    ids = range(first, first + count * ID_STEP, ID_STEP)
    if not mask:
        return list(ids)
    return [task_id for bit, task_id in enumerate(ids) if not mask >> bit & 1]


def topics_of(names: str, count: int) -> Sequence[str]:
    if not names.startswith("["):
        return [names] * count
    topics: list[str] = json.loads(names)
    return topics


def dues_of(head: bytes, count: int) -> Sequence[int]:
    dues_ms = array("q")
    dues_ms.frombytes(head[: 8 * count])
    return dues_ms


def _moved_dues(moved: bytes) -> Sequence[int]:
    return dues_of(moved, len(moved))


def extras_of(first: int, packed: bytes) -> Sequence[Any]:
    """Decode a pack's column ``extras`` into an element for each task, as in
    ``codec.encode_extras_of``. Raise RecordUnreadable."""
    try:
        extras: Sequence[Any] = msgpack.unpackb(packed, use_list=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RecordUnreadable(f"pack {first}: {error!r}") from error
    return extras


class Pack:
    """A pack read from the database."""

    __slots__ = ("_bodies", "_ends", "_extras", "count", "dues_ms", "first", "mask", "topics")

    def __init__(
        self,
        first: int,
        count: int,
        head: bytes,
        names: str,
        bodies: bytes,
        extras: bytes | None,
        mask: int,
        moved: bytes | None = None,
    ) -> None:
        """``moved``: the due times of all tasks, if any has changed. Raise RecordUnreadable."""
        self.first = first
        self.count = count
        self.mask = mask
        try:
            self.dues_ms = dues_of(head, count) if moved is None else _moved_dues(moved)
            sizes = array("I")
            sizes.frombytes(head[8 * count :])
            self.topics = topics_of(names, count)
        except (ValueError, TypeError) as error:
            raise RecordUnreadable(f"pack {first}: {error!r}") from error
        self._extras = extras_of(first, extras) if extras else None
        self._ends = list(accumulate(sizes, initial=0))
        self._bodies = bodies
        lengths = {count, len(self.dues_ms), len(sizes), len(self.topics)}
        if self._extras is not None:
            lengths.add(len(self._extras))
        if len(lengths) != 1 or self._ends[-1] != len(bodies):
            raise RecordUnreadable(f"pack {first}: its columns have different lengths")

    def rows(self, ids: Sequence[int] | None = None) -> Iterator[TaskRow]:
        """Yield the tasks still in the pack: those of ``ids``, or all."""
        requested = ids if ids is not None else ids_of(self.first, self.count, self.mask)
        first, mask, ends, bodies = self.first, self.mask, self._ends, self._bodies
        options = self._extras
        for task_id in requested:
            bit, rest = divmod(task_id - first, ID_STEP)
            if rest or not 0 <= bit < self.count or mask >> bit & 1:
                continue
            yield TaskRow(
                task_id,
                self.dues_ms[bit],
                self.topics[bit],
                bodies[ends[bit] : ends[bit + 1]],
                decode_extras_of(options[bit]) if options is not None else None,
            )


SPARSE_PACKS_MAX = 64
SPARSE_EVERY_BATCHES = 64
"""Number of batches between two searches for sparse packs."""
DELETED = -1
"""The mask of a pack that was deleted."""


@dataclass(slots=True)
class Change:
    """The changes of packs in a batch."""

    masks: dict[int, int] = field(default_factory=dict)
    """First id of a remaining pack → its new mask."""
    done: list[int] = field(default_factory=list)
    """First ids of packs that no longer have any tasks."""
    loose: list[int] = field(default_factory=list)
    """Ids that are in no pack. Each of them has a single row or does not exist."""


class PackIndex:
    """The packs of an open database, with the masks of the tasks that have left them."""

    def __init__(self) -> None:
        self._batches = 0
        self.load(())

    def load(self, packs: Iterable[tuple[int, int, int]]) -> None:
        """Replace the index with (first, count, mask) of every pack, in order of first ids."""
        self._firsts = array("q")
        self._counts = bytearray()
        self._masks: dict[int, int] = {}
        self._deleted_entries = 0
        """Number of entries of ``_firsts`` whose packs were deleted."""
        self._young: dict[int, None] = {}
        """Packs that became sparse after the last search."""
        self._old: dict[int, None] = {}
        """Packs that became sparse before the last search."""
        for first, count, mask in packs:
            self._firsts.append(first)
            self._counts.append(count)
            if mask:
                self._masks[first] = mask
                self._note_sparse(first, count, mask)

    def __len__(self) -> int:
        return len(self._firsts) - self._deleted_entries

    def split(self, enqueued: dict[int, TaskRow]) -> tuple[list[PackValues], list[TaskRow]]:
        """Divide new tasks into (packs, single rows). Raise StoreError for an id that is already in
        a pack."""
        if not enqueued:
            return [], []
        ids, rows = list(enqueued), list(enqueued.values())
        if self._holds_any(ids):
            raise StoreError(f"an id between {ids[0]} and {ids[-1]} was assigned twice")
        newest = self._firsts[-1] if self._firsts else -1
        # The index finds ids only in ascending packs, so ids in any other order get single rows.
        if ids[0] <= newest or not (in_a_row(ids) or ids == sorted(ids)):
            return [], rows
        return split(rows)

    def _holds_any(self, ids: Sequence[int]) -> bool:
        """Return whether any of the ids (ascending) is already in a pack."""
        if not self._firsts or ids[0] >= self._firsts[-1] + self._counts[-1] * ID_STEP:
            return False
        change = self.leaving(ids)
        return bool(change.masks or change.done)

    def leaving(self, ids: Iterable[int]) -> Change:
        """Return how packs change when the tasks ``ids`` leave them. Look up each pack once."""
        change = Change()
        firsts, counts, masks, loose = self._firsts, self._counts, self._masks, change.loose
        changed: dict[int, list[int]] = {}
        first, end, mask = 0, 0, DELETED
        entry: list[int] = []
        for task_id in sorted(ids):
            if not first <= task_id < end:
                index = bisect_right(firsts, task_id) - 1
                if index < 0:
                    loose.append(task_id)
                    continue
                first = firsts[index]
                count = counts[index]
                end = first + (count - 1) * ID_STEP + 1
                entry = changed.get(first) or [masks.get(first, 0), count]
                if task_id >= end:
                    loose.append(task_id)
                    continue
            mask = entry[0]
            bit, rest = divmod(task_id - first, ID_STEP)
            if rest or mask == DELETED or mask >> bit & 1:
                loose.append(task_id)
                continue
            entry[0] = mask | 1 << bit
            changed[first] = entry
        for first, (mask, count) in changed.items():
            if mask == mask_of(count):
                change.done.append(first)
            else:
                change.masks[first] = mask
        return change

    def places(self, ids: Iterable[int]) -> tuple[dict[int, list[int]], list[int]]:
        """Return (first id of a pack → the ids in it, the ids in no pack)."""
        firsts, counts, masks = self._firsts, self._counts, self._masks
        packed: dict[int, list[int]] = {}
        loose: list[int] = []
        for task_id in ids:
            index = bisect_right(firsts, task_id) - 1
            if index >= 0:
                first = firsts[index]
                bit, rest = divmod(task_id - first, ID_STEP)
                mask = masks.get(first, 0)
                if not rest and bit < counts[index] and mask != DELETED and not mask >> bit & 1:
                    if first in packed:
                        packed[first].append(task_id)
                    else:
                        packed[first] = [task_id]
                    continue
            loose.append(task_id)
        return packed, loose

    def loose(self, ids: Iterable[int]) -> list[int]:
        """Return the ids that are in no pack."""
        firsts, counts, masks = self._firsts, self._counts, self._masks
        loose: list[int] = []
        for task_id in ids:
            index = bisect_right(firsts, task_id) - 1
            bit, rest = divmod(task_id - firsts[index], ID_STEP) if index >= 0 else (0, 1)
            if rest or bit >= counts[index] or (masks and masks.get(firsts[index], 0) >> bit & 1):
                loose.append(task_id)
        return loose

    def adopt(self, added: Iterable[PackValues], change: Change) -> None:
        """Apply the change of a committed batch."""
        for pack in added:
            self._firsts.append(pack[0])
            self._counts.append(pack[1])
        for first, mask in change.masks.items():
            self._masks[first] = mask
            self._note_sparse(first, self._count(first), mask)
        self.drop(change.done)

    def drop(self, firsts: Iterable[int]) -> None:
        """Forget deleted packs."""
        for first in firsts:
            self._masks[first] = DELETED
            self._deleted_entries += 1
            self._young.pop(first, None)
            self._old.pop(first, None)
        if self._deleted_entries > 64 and self._deleted_entries * 2 > len(self._firsts):
            self._squeeze()

    @property
    def searches_next(self) -> bool:
        """Whether the next call of ``sparse_now`` will search for sparse packs."""
        return (self._batches + 1) % SPARSE_EVERY_BATCHES == 0

    def sparse_now(self, change: Change) -> list[int]:
        """Every ``SPARSE_EVERY_BATCHES`` calls, return sparse packs to turn into single rows,
        except those in ``change``. Return none in other calls."""
        self._batches += 1
        if self._batches % SPARSE_EVERY_BATCHES:
            return []
        touched = change.masks.keys() | set(change.done)
        return [first for first in self.sparse() if first not in touched]

    def sparse(self) -> list[int]:
        """Return up to ``SPARSE_PACKS_MAX`` packs that were sparse before the last search."""
        firsts = list(self._old)[:SPARSE_PACKS_MAX]
        if len(firsts) == len(self._old):
            self._old |= self._young
            self._young = {}
        return firsts

    def _note_sparse(self, first: int, count: int, mask: int) -> None:
        if mask.bit_count() * 4 >= count * 3 and first not in self._old:
            self._young[first] = None

    def _count(self, first: int) -> int:
        return self._counts[bisect_right(self._firsts, first) - 1]

    def _squeeze(self) -> None:
        masks = self._masks
        remaining = [i for i, first in enumerate(self._firsts) if masks.get(first) != DELETED]
        self._firsts = array("q", [self._firsts[i] for i in remaining])
        self._counts = bytearray(self._counts[i] for i in remaining)
        self._masks = {first: mask for first, mask in masks.items() if mask != DELETED}
        self._deleted_entries = 0
