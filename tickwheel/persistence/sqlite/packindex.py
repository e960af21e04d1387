"""Where packed tasks are, in the writer's memory: two bytes for ten tasks.

Says for the ids that leave a batch which packs they are in, and what that makes of the packs.
Changes are prepared, written by the caller in its transaction, and adopted after COMMIT.
Knows no SQL.

A pack most of whose tasks have left holds their bodies still; when it has been so for a while
the caller is asked to take it apart (``sparse``), so that space is wasted by a factor of four at
most, for a bounded time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tickwheel.model.records import ID_STEP, TaskRow
from tickwheel.persistence.sqlite.packs import PackValues, in_a_row, mask_of, split
from tickwheel.persistence.store import StoreError

SPARSE_AT_ONCE_MAX = 64
SPARSE_EVERY_BATCHES = 64
"""How often some packs with few tasks left are taken apart."""
FULL = -1
"""Stands for the mask of a pack that is not there any more."""


@dataclass(slots=True)
class Change:
    """What a batch does to packs."""

    masks: dict[int, int] = field(default_factory=dict)
    """first → new mask, of packs that stay."""
    done: list[int] = field(default_factory=list)
    """Packs without any task left."""
    loose: list[int] = field(default_factory=list)
    """Ids that are in no pack: they have a row of their own, if any."""


class PackIndex:
    """Of one open database."""

    def __init__(self) -> None:
        self._batches = 0
        self.load(())

    def load(self, packs: Iterable[tuple[int, int, int]]) -> None:
        """(first, count, mask) of every pack, by first id: what the database holds."""
        self._firsts = array("q")
        self._counts = bytearray()
        self._masks: dict[int, int] = {}
        self._passed = 0
        """Entries of ``_firsts`` whose pack is gone."""
        self._young: dict[int, None] = {}
        """Packs that became sparse since the last look, and before it."""
        self._old: dict[int, None] = {}
        for first, count, mask in packs:
            self._firsts.append(first)
            self._counts.append(count)
            if mask:
                self._masks[first] = mask
                self._note_sparse(first, count, mask)

    def __len__(self) -> int:
        return len(self._firsts) - self._passed

    def split(self, enqueued: dict[int, TaskRow]) -> tuple[list[PackValues], list[TaskRow]]:
        """(packs, rows that stay on their own) for new tasks. Raises StoreError for an id that
        is in a pack already."""
        if not enqueued:
            return [], []
        ids, rows = list(enqueued), list(enqueued.values())
        if self._holds_any(ids):
            raise StoreError(f"an id of {ids[0]} to {ids[-1]} was assigned twice")
        newest = self._firsts[-1] if self._firsts else -1
        # Ids that do not ascend, or lie below known packs, would not be found in a pack.
        if ids[0] <= newest or not (in_a_row(ids) or ids == sorted(ids)):
            return [], rows
        return split(rows)

    def _holds_any(self, ids: Sequence[int]) -> bool:
        """Whether one of the ids (ascending) is already in a pack."""
        if not self._firsts or ids[0] >= self._firsts[-1] + self._counts[-1] * ID_STEP:
            return False
        change = self.leaving(ids)
        return bool(change.masks or change.done)

    def leaving(self, ids: Iterable[int]) -> Change:
        """What it means for packs that the tasks ``ids`` leave them."""
        change = Change()
        firsts, counts, masks, loose = self._firsts, self._counts, self._masks, change.loose
        changed: dict[int, list[int]] = {}
        first, end, mask = 0, 0, FULL
        entry: list[int] = []
        for task_id in ids:
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
            bit, odd = divmod(task_id - first, ID_STEP)
            if odd or mask == FULL or mask >> bit & 1:
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

    def adopt(self, added: Iterable[PackValues], change: Change) -> None:
        """The batch is committed."""
        for pack in added:
            self._firsts.append(pack[0])
            self._counts.append(pack[1])
        for first, mask in change.masks.items():
            self._masks[first] = mask
            self._note_sparse(first, self._count(first), mask)
        self.drop(change.done)

    def drop(self, firsts: Iterable[int]) -> None:
        """These packs are gone."""
        for first in firsts:
            self._masks[first] = FULL
            self._passed += 1
            self._young.pop(first, None)
            self._old.pop(first, None)
        if self._passed > 64 and self._passed * 2 > len(self._firsts):
            self._squeeze()

    def sparse_now(self, change: Change) -> list[int]:
        """Now and then: packs to take apart, which ``change`` does not touch."""
        self._batches += 1
        if self._batches % SPARSE_EVERY_BATCHES:
            return []
        touched = change.masks.keys() | set(change.done)
        return [first for first in self.sparse() if first not in touched]

    def sparse(self) -> list[int]:
        """Some packs that were sparse at the call before this one already."""
        found = list(self._old)[:SPARSE_AT_ONCE_MAX]
        if len(found) == len(self._old):
            self._old |= self._young
            self._young = {}
        return found

    def _note_sparse(self, first: int, count: int, mask: int) -> None:
        if mask.bit_count() * 4 >= count * 3 and first not in self._old:
            self._young[first] = None

    def _count(self, first: int) -> int:
        return self._counts[bisect_right(self._firsts, first) - 1]

    def _squeeze(self) -> None:
        masks = self._masks
        kept = [i for i, first in enumerate(self._firsts) if masks.get(first) != FULL]
        self._firsts = array("q", [self._firsts[i] for i in kept])
        self._counts = bytearray(self._counts[i] for i in kept)
        self._masks = {first: mask for first, mask in masks.items() if mask != FULL}
        self._passed = 0
