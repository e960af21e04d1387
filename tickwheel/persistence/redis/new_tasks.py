"""New tasks as operations for the scripts, in bytes of the protocol at once.

All that depends on one task alone is done when it is added; what is left for ``operations`` is
to sort and to join. The due times of a batch ascend: the sorted set finds the place of each where
it just was, in memory that the processor still has at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from tickwheel.persistence.redis.drivers import Packed
from tickwheel.persistence.redis.layout import KEY
from tickwheel.persistence.redis.packing import pack_args
from tickwheel.wheel.records import TaskRow

NEW_ROWS = 500
"""New tasks of one operation: a thousand arguments."""
NEW_BYTES = 1 << 20
_DUE_MIN, _DUE_MAX = 10**12, 10**13 - 1
"""Milliseconds of thirteen digits: from 2001 to 2286."""
_ID_SIZE = len(b"$19\r\n%019d\r\n" % 0)
_PAIR_SIZE = len(b"$13\r\n%d\r\n" % _DUE_MIN) + _ID_SIZE
_NEW = pack_args((b"NEW", KEY["store"])).data
_HSET = pack_args((b"HSET", KEY["task"])).data


class NewTasks:
    """The new tasks of one batch."""

    def __init__(self) -> None:
        self._queue: list[bytes] = []
        """Due time and id of each, one behind the other."""
        self._hashed: list[Packed] = []

    def add(self, rows: Sequence[TaskRow], records: Sequence[bytes]) -> None:
        """Some more, with their records."""
        if not rows:
            return
        queue = _due_pairs(rows)
        ids = [pair[-_ID_SIZE:] for pair in queue]
        for start in range(0, len(rows), NEW_ROWS):
            stop = start + NEW_ROWS
            _hash(self._hashed, ids[start:stop], records[start:stop])
        # Ordered by the bytes is ordered by due time: the length comes first. Sorted here in
        # part, because sorting what is sorted in part is quick.
        queue.sort()
        self._queue += queue

    def operations(self) -> list[Packed]:
        """What stores them. Records come first: whoever sees a task finds what it is."""
        queue, found = self._queue, self._hashed.copy()
        queue.sort()
        for start in range(0, len(queue), NEW_ROWS):
            some = queue[start : start + NEW_ROWS]
            found.append(_operation(_NEW, len(some), b"".join(some)))
        return found


def _operation(name: bytes, pairs: int, data: bytes) -> Packed:
    size = b"%d" % (2 * pairs)
    return Packed(3 + 2 * pairs, b"%b$%d\r\n%b\r\n%b" % (name, len(size), size, data))


def _due_pairs(rows: Sequence[TaskRow]) -> list[bytes]:
    """Formatted as a whole and cut, which is quicker by half, when all are of one size."""
    dues = [row[1] for row in rows]
    if min(dues) >= _DUE_MIN and max(dues) <= _DUE_MAX:
        numbers = tuple(chain.from_iterable([(row[1], row[0]) for row in rows]))
        text = (b"$13\r\n%d\r\n$19\r\n%019d\r\n" * len(rows)) % numbers
        return [text[at : at + _PAIR_SIZE] for at in range(0, len(text), _PAIR_SIZE)]
    return [pack_args((b"%d" % row[1], b"%019d" % row[0])).data for row in rows]


def _hash(found: list[Packed], ids: Sequence[bytes], records: Sequence[bytes]) -> None:
    """``ids`` are packed already."""
    sizes = list(map(len, records))
    count = len(ids)
    if sum(sizes) > NEW_BYTES and count > 1:
        middle = count // 2
        _hash(found, ids[:middle], records[:middle])
        _hash(found, ids[middle:], records[middle:])
        return
    heads = {size: b"$%d\r\n" % size for size in set(sizes)}
    pieces = zip(ids, map(heads.__getitem__, sizes), records, repeat(b"\r\n", count), strict=True)
    found.append(_operation(_HSET, count, b"".join(chain.from_iterable(pieces))))
