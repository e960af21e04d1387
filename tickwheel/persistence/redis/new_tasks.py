"""New tasks as operations for the scripts: a thousand arguments packed into one.

That one is a msgpack array, which Lua inside Redis takes apart in one call; as arguments of the
protocol each would become an object of Redis before it becomes one of Lua, which costs 0.3 µs a
task. Only forms that every version of it reads are used.

All that depends on one task alone is done when it is added; what is left for ``operations`` is
to sort and to join. The due times of a batch ascend: the sorted set finds the place of each where
it just was, in memory that the processor still has at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tickwheel.model.records import TaskRow
from tickwheel.persistence.redis.drivers import Packed
from tickwheel.persistence.redis.layout import KEY
from tickwheel.persistence.redis.packing import pack_args

NEW_ROWS = 500
"""New tasks of one operation: a thousand arguments."""
NEW_BYTES = 1 << 20
_DUE_MIN, _DUE_MAX = 10**12, 10**13 - 1
"""Milliseconds of thirteen digits: from 2001 to 2286."""
_ID_SIZE, _PAIR_SIZE = 1 + 19, 1 + 13 + 1 + 19
_NEW = pack_args((b"NEW", KEY["store"], b"1")).data
_RECORDS = pack_args((b"RECORDS", KEY["task"], b"1")).data


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
    size = (2 * pairs).to_bytes(2, "big")
    packed = b"%b$%d\r\n\xdc%b%b\r\n" % (name, len(data) + 3, size, data)
    return Packed(4, packed, weight=3 + 2 * pairs)


def _head(size: int) -> bytes:
    """What a string of this size begins with."""
    if size < 1 << 16:
        return b"\xda" + size.to_bytes(2, "big")
    return b"\xdb" + size.to_bytes(4, "big")


def _short(text: bytes) -> bytes:
    """Up to 31 bytes."""
    return bytes((0xA0 | len(text),)) + text


def _due_pairs(rows: Sequence[TaskRow]) -> list[bytes]:
    """Formatted as a whole and cut, which is quicker by half, when all are of one size."""
    dues = [row[1] for row in rows]
    if min(dues) >= _DUE_MIN and max(dues) <= _DUE_MAX:
        numbers = tuple(chain.from_iterable([(row[1], row[0]) for row in rows]))
        text = (b"\xad%d\xb3%019d" * len(rows)) % numbers
        return [text[at : at + _PAIR_SIZE] for at in range(0, len(text), _PAIR_SIZE)]
    return [_short(b"%d" % row[1]) + _short(b"%019d" % row[0]) for row in rows]


def _hash(found: list[Packed], ids: Sequence[bytes], records: Sequence[bytes]) -> None:
    """``ids`` are packed already."""
    sizes = list(map(len, records))
    count = len(ids)
    if sum(sizes) > NEW_BYTES and count > 1:
        middle = count // 2
        _hash(found, ids[:middle], records[:middle])
        _hash(found, ids[middle:], records[middle:])
        return
    heads = {size: _head(size) for size in set(sizes)}
    pieces = zip(ids, map(heads.__getitem__, sizes), records, strict=True)
    found.append(_operation(_RECORDS, count, b"".join(chain.from_iterable(pieces))))
