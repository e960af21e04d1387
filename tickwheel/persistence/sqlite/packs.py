"""Packs: tasks of one batch whose ids follow each other, as one row.

Most tasks arrive many to a batch and are read and finished near to each other. A row of up to
``PACK_TASKS_MAX`` of them costs a tenth of as many rows of their own. A pack never changes;
which of its tasks have left stands in table ``gone``, a bit for each.

Pure: lists of rows to columns and back. A pack's columns: first id, count, head (due times as
8 bytes each, then lengths of the bodies as 4 bytes each, little-endian), topics (one name, or a
JSON array of names), bodies end to end, extras (NULL, or a msgpack array of what
``codec.encode_extras`` makes).
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgpack

from tickwheel.model.records import ID_STEP, TaskRow
from tickwheel.persistence.codec import RecordUnreadable, decode_extras, encode_extras

PACK_TASKS_MAX = 60
"""Bits of a signed 64-bit number are 63; 60 tasks of 100 bytes fill two pages."""
PACK_TASKS_MIN = 8
"""Fewer are cheaper as rows of their own."""
PACK_BYTES_MAX = 64 * 1024

HEAD_BYTES = 12
"""Of a task: due time and length."""

PackValues = tuple[int, int, bytes, str, bytes, bytes | None]
assert sys.byteorder == "little", "arrays are written as they lie in memory"


def split(rows: Sequence[TaskRow]) -> tuple[list[PackValues], list[TaskRow]]:
    """(packs, rows that stay on their own) for new tasks in order of their ids."""
    packs: list[PackValues] = []
    loose: list[TaskRow] = []
    for start, end in _runs([row[0] for row in rows]):
        for begin in range(start, end, PACK_TASKS_MAX):
            some = rows[begin : min(end, begin + PACK_TASKS_MAX)]
            pack = _pack(some) if len(some) >= PACK_TASKS_MIN else None
            if pack is None:
                loose += some
            else:
                packs.append(pack)
    return packs, loose


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges in which each id is ``ID_STEP`` above the one before."""
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
    """The usual case, found without looking at each id in Python."""
    return len(ids) > 0 and ids == list(range(ids[0], ids[0] + len(ids) * ID_STEP, ID_STEP))


def _pack(rows: Sequence[TaskRow]) -> PackValues | None:
    """None when bodies or extras are large: they are better read alone."""
    ids, dues_ms, topics, bodies, extras = zip(*rows, strict=True)
    joined = b"".join(bodies)
    head = array("q", dues_ms).tobytes() + array("I", map(len, bodies)).tobytes()
    alike = topics.count(topics[0]) == len(topics) and not topics[0].startswith("[")
    names = topics[0] if alike else json.dumps(topics)
    packed = msgpack.packb(tuple(map(encode_extras, extras))) if any(extras) else None
    if len(joined) + len(packed or b"") > PACK_BYTES_MAX:
        return None
    return ids[0], len(rows), head, names, joined, packed


def pack_bytes(pack: PackValues) -> int:
    return len(pack[2]) + len(pack[4]) + len(pack[5] or b"") + 64


def mask_of(count: int) -> int:
    """All bits of a pack of ``count`` tasks."""
    return (1 << count) - 1


def ids_of(first: int, count: int, mask: int) -> list[int]:
    """Ids of the tasks that are still there."""
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


class Pack:
    """A pack that was read."""

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
    ) -> None:
        """Raises RecordUnreadable."""
        self.first = first
        self.count = count
        self.mask = mask
        try:
            self.dues_ms = dues_of(head, count)
            sizes = array("I")
            sizes.frombytes(head[8 * count :])
            self.topics = topics_of(names, count)
            self._extras: Sequence[Any] | None = (
                msgpack.unpackb(extras, use_list=False) if extras else None
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RecordUnreadable(f"pack {first}: {error!r}") from error
        self._ends = list(accumulate(sizes, initial=0))
        self._bodies = bodies
        lengths = {count, len(self.dues_ms), len(sizes), len(self.topics)}
        if self._extras is not None:
            lengths.add(len(self._extras))
        if len(lengths) != 1 or self._ends[-1] != len(bodies):
            raise RecordUnreadable(f"pack {first}: its columns have different lengths")

    def rows(self, ids: Sequence[int] | None = None) -> Iterator[TaskRow]:
        """Those of ``ids`` (which lie in the pack), or all, that are still there."""
        wanted = ids if ids is not None else ids_of(self.first, self.count, self.mask)
        first, mask, ends, bodies = self.first, self.mask, self._ends, self._bodies
        extras = self._extras
        for task_id in wanted:
            bit, odd = divmod(task_id - first, ID_STEP)
            if odd or not 0 <= bit < self.count or mask >> bit & 1:
                continue
            yield TaskRow(
                task_id,
                self.dues_ms[bit],
                self.topics[bit],
                bodies[ends[bit] : ends[bit + 1]],
                decode_extras(extras[bit]) if extras is not None else None,
            )
