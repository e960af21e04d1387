"""The index of keys: (topic, key) → ids of unfinished tasks.

The index stores 16 bytes per task, a hash and the id, in one of many small buckets. A bucket is a
bytearray, which is searched in C and returns memory that it does not need. The number of buckets
follows the number of tasks in small steps (linear hashing), so that growth never stops the event
loop. With overhead this takes 18 to 28 bytes per task with a key.

A key of very many tasks would make its bucket long. Such a *crowd* has a separate table, whose
places (see ``Table``) follow from the ids.

Hashes are 64 bits of a secret function (``model/key_hash.py``). Two keys can have the same hash, so
``find`` can return ids of another key; the caller compares the key in the row before it changes a
task. Invariant: after loading, ``find`` returns every unfinished task that landed with the key.

For the keys of a bounded number of recently ended tasks, the index remembers the newest id, so that
"finished" and "unknown" are different answers. A restart forgets these ids.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from itertools import chain
from operator import iconcat
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from tickwheel.model.key_hash import KeyHash

ENTRY_BYTES = 16
PLACE_BYTES = 8
FILL_MAX = 128
"""Average entries per bucket at which buckets are divided. A search reads a whole bucket."""
FILL_MIN = 8
"""Average entries per bucket at which buckets are united. A bucket has 100 bytes of overhead."""
ADDS_PER_DIVISION = 16
"""New entries per divided bucket. All buckets are divided before entries grow by an eighth."""
RESERVED_AT_ONCE = 512
"""Maximum number of buckets that a call of ``reserve`` divides, in a few milliseconds."""
BUCKETS_MIN = 8
LONG_BYTES = 1 << 14
"""A bucket is searched for a crowd when it reaches a multiple of this size (1,024 entries)."""
CROWD_MIN = 256
"""Minimum number of tasks of a key for a separate table."""
_SPREAD = 0x9E37_79B9_7F4A_7C15
_MASK = 2**64 - 1

assert array("Q", (1,)).tobytes()[0] == 1, "the code assumes little-endian arrays"
_entry = Struct("<QQ").pack
_place = Struct("<Q").pack
_entries = Struct(f"{ENTRY_BYTES}s").iter_unpack


class Table:
    """Pairs (place, id) of 64-bit numbers. A place can have several ids. The low bits of places
    must be evenly distributed."""

    __slots__ = ("_count", "_directory", "_low", "_next")

    def __init__(self) -> None:
        self._low = BUCKETS_MIN
        """The number of buckets before division, a power of two."""
        self._next = 0
        """The index of the next bucket to divide. Each bucket before it is divided into four."""
        self._directory = [bytearray() for _ in range(BUCKETS_MIN)] * 4
        """Low bits of a place → bucket. An undivided bucket has four entries."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, places: Sequence[int], ids: Sequence[int]) -> list[bytearray]:
        """Add new pairs. Return the buckets that have become long."""
        mask = len(self._directory) - 1
        buckets = map(self._directory.__getitem__, [place & mask for place in places])
        grown: list[bytearray] = list(map(iconcat, buckets, map(_entry, places, ids)))
        self._count += len(grown)
        long = max(map(len, grown), default=0) >= LONG_BYTES
        self._grow(len(grown))
        return _passed_long(grown) if long else []

    def put(self, place: int, task_id: int) -> None:
        """Add one pair without checking for long buckets."""
        bucket = self._bucket(place)
        bucket += _entry(place, task_id)
        self._count += 1
        self._grow(1)

    def take(self, place: int) -> list[int]:
        """Remove and return the ids of a place."""
        bucket, taken = self._bucket(place), self.find(place)
        others = [at for at, other in enumerate(_words(bucket)[::2]) if other != place]
        bucket[:] = b"".join([bucket[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES] for at in others])
        self._count -= len(taken)
        return taken

    def remove(self, place: int, task_id: int) -> bool:
        """Remove a pair. Return whether it was in the table."""
        bucket = self._bucket(place)
        at = _index(bucket, _entry(place, task_id))
        if at < 0:
            return False
        last = bucket[-ENTRY_BYTES:]
        bucket[at : at + ENTRY_BYTES] = last
        del bucket[-ENTRY_BYTES:]
        self._count -= 1
        if self._count < (self._low + 3 * self._next) * FILL_MIN:
            self._unite()
        return True

    def find(self, place: int) -> list[int]:
        """Return the ids of a place, in no order."""
        bucket, wanted = self._bucket(place), _place(place)
        ids: list[int] = []
        at = _index(bucket, wanted)
        while at >= 0:
            end = at + ENTRY_BYTES
            ids.append(int.from_bytes(bucket[at + PLACE_BYTES : end], "little"))
            at = _index(bucket, wanted, end)
        return ids

    def reserve(self, count: int) -> None:
        """Divide buckets in advance for a total of ``count`` pairs, a bounded number per call."""
        for _ in range(RESERVED_AT_ONCE):
            if self._next == 0 and self._low * FILL_MAX >= count:
                return
            self._divide()

    def ids(self) -> Iterable[int]:
        """Return all ids of the table, in no order."""
        for bucket in self.buckets():
            yield from _words(bucket)[1::2]

    def buckets(self) -> Iterable[bytearray]:
        """Return each bucket of the table once."""
        low, directory = self._low, self._directory
        starts = range(low, 4 * low, low)
        return chain(directory[:low], *(directory[at : at + self._next] for at in starts))

    def _bucket(self, place: int) -> bytearray:
        return self._directory[place & len(self._directory) - 1]

    def _grow(self, added: int) -> None:
        """Divide some buckets if the average has reached ``FILL_MAX``, until all are divided."""
        steps = -(-added // ADDS_PER_DIVISION)
        while True:
            full = self._low * FILL_MAX
            if self._count <= (full // 2 if self._next else full):
                return
            if steps <= 0 and self._count <= 2 * full:
                return
            self._divide()
            steps -= 1

    def _divide(self) -> None:
        """Divide a bucket into four."""
        at, low, directory = self._next, self._low, self._directory
        bucket = directory[at]
        parts = [bytearray() for _ in range(4)]
        shift = low.bit_length() - 1
        goals = map(parts.__getitem__, [place >> shift & 3 for place in _words(bucket)[::2]])
        deque(map(iconcat, goals, chain.from_iterable(_entries(bucket))), maxlen=0)
        directory[at::low] = parts
        self._next += 1
        if self._next == low:
            self._directory = directory * 4
            self._low, self._next = 4 * low, 0

    def _unite(self) -> None:
        """Undo the last division, and unite four buckets."""
        if self._next == 0:
            if self._low == BUCKETS_MIN:
                return
            del self._directory[self._low :]
            self._low //= 4
            self._next = self._low
        self._next -= 1
        parts = self._directory[self._next :: self._low]
        self._directory[self._next :: self._low] = [bytearray().join(parts)] * 4


def _passed_long(grown: Iterable[bytearray]) -> list[bytearray]:
    """Return the buckets of ``grown`` that have passed a multiple of ``LONG_BYTES``. ``grown``
    contains a bucket once for each entry that was added to it."""
    buckets: dict[int, bytearray] = {}
    added: Counter[int] = Counter()
    for bucket in grown:
        buckets[id(bucket)] = bucket
        added[id(bucket)] += ENTRY_BYTES
    return [
        bucket
        for key, bucket in buckets.items()
        if len(bucket) // LONG_BYTES > (len(bucket) - added[key]) // LONG_BYTES
    ]


def _index(bucket: bytearray, wanted: bytes, start: int = 0) -> int:
    """Return the index of an entry that begins with ``wanted``, or -1."""
    at = bucket.find(wanted, start)
    while at > 0 and at % ENTRY_BYTES:
        at = bucket.find(wanted, at + 1)
    return at


def _words(bucket: bytearray) -> array[int]:
    return array("Q", bytes(bucket))


def _place_of(task_id: int) -> int:
    """Return the place of an id in a crowd's table. It differs from the id, because ids differ by
    multiples of a power of two."""
    return (task_id * _SPREAD & _MASK) >> 20


class Finished:
    """Hash → newest ended id, for the last ``bound / 2`` to ``bound`` hashes."""

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, bound: int) -> None:
        self._half = max(1, bound // 2)
        self._young, self._old = Table(), Table()

    def add(self, key_hash: int, task_id: int) -> None:
        self._young.put(key_hash, task_id)
        if len(self._young) >= self._half:
            self._young, self._old = Table(), self._young

    def get(self, key_hash: int) -> int | None:
        return max((*self._young.find(key_hash), *self._old.find(key_hash)), default=None)


class KeyIndex:
    """The index of keys: (topic, key) → ids of unfinished tasks."""

    def __init__(self, key_hash: KeyHash, finished_max: int) -> None:
        self.hash = key_hash
        self._table = Table()
        self._crowds: dict[int, Table] = {}
        """Hash of a key with many tasks → table of (place of the id, id)."""
        self._tasks_in_crowds = 0
        self._finished = Finished(finished_max)
        self._ended_early: set[int] | None = None
        """During a recovery, the ids of tasks that ended before they were loaded."""

    def __len__(self) -> int:
        return len(self._table) + self._tasks_in_crowds

    def add(self, hashes: Mapping[int, int]) -> None:
        """Add landed tasks. ``hashes`` maps id to hash."""
        self._add(list(hashes), list(hashes.values()))

    def _add(self, ids: Sequence[int], hashes: Sequence[int]) -> None:
        crowds = self._crowds
        if crowds and not crowds.keys().isdisjoint(hashes):
            for task_id, key_hash in zip(ids, hashes, strict=True):
                if key_hash in crowds:
                    crowds[key_hash].put(_place_of(task_id), task_id)
                    self._tasks_in_crowds += 1
            alone = [at for at, key_hash in enumerate(hashes) if key_hash not in crowds]
            ids, hashes = [ids[at] for at in alone], [hashes[at] for at in alone]
        for bucket in self._table.add(hashes, ids):
            self._separate_crowd(bucket)

    def _separate_crowd(self, bucket: bytearray) -> None:
        """Move the most frequent hash of a long bucket to a separate table if it is a crowd."""
        if len(bucket) < LONG_BYTES:  # the bucket's crowd was already moved
            return
        ((key_hash, count),) = Counter(_words(bucket)[::2]).most_common(1)
        if count < CROWD_MIN or key_hash in self._crowds:
            return
        ids = self._table.take(key_hash)
        crowd = self._crowds[key_hash] = Table()
        crowd.add([_place_of(task_id) for task_id in ids], ids)
        self._tasks_in_crowds += len(ids)

    def ended(self, topic: str, key: str, task_id: int) -> None:
        """Remove an ended task."""
        self._ended(self.hash(topic, key), task_id)

    def ended_many(self, topic: str, keys: Mapping[int, str]) -> None:
        """Remove ended tasks of a topic. ``keys`` maps id to key."""
        hashes = self.hash.of_many([topic] * len(keys), list(keys.values()))
        for task_id, key_hash in zip(keys, hashes, strict=True):
            self._ended(key_hash, task_id)

    def _ended(self, key_hash: int, task_id: int) -> None:
        crowd = self._crowds.get(key_hash)
        if crowd is None:
            was_here = self._table.remove(key_hash, task_id)
        else:
            was_here = crowd.remove(_place_of(task_id), task_id)
            self._tasks_in_crowds -= was_here
            if not len(crowd):
                del self._crowds[key_hash]
        if not was_here and self._ended_early is not None:
            self._ended_early.add(task_id)
        self._finished.add(key_hash, task_id)

    def count(self, topic: str, key: str) -> int:
        """Return the number of ids that ``find`` returns."""
        key_hash = self.hash(topic, key)
        crowd = self._crowds.get(key_hash)
        return len(self._table.find(key_hash)) if crowd is None else len(crowd)

    def find(self, topic: str, key: str) -> list[int]:
        """Return the ids of tasks with the key, ascending, and possibly some of other keys."""
        key_hash = self.hash(topic, key)
        crowd = self._crowds.get(key_hash)
        return sorted(self._table.find(key_hash) if crowd is None else crowd.ids())

    def find_up_to(self, topic: str, key: str, limit: int) -> list[int] | None:
        """Return the same as ``find``, or None without a search if it has more than ``limit`` ids.
        Sorting the ids of a crowd would block the event loop."""
        key_hash = self.hash(topic, key)
        crowd = self._crowds.get(key_hash)
        if crowd is not None:
            return None if len(crowd) > limit else sorted(crowd.ids())
        ids = self._table.find(key_hash)
        return None if len(ids) > limit else sorted(ids)

    def finished(self, topic: str, key: str) -> int | None:
        """Return the id of the newest recently ended task with the key, or None."""
        return self._finished.get(self.hash(topic, key))

    # --- recovery ----------------------------------------------------------------------------

    def begin_loading(self) -> None:
        """Begin a recovery, during which tasks can end before they are loaded."""
        self._ended_early = set()

    def load(
        self,
        ids: Sequence[int],
        hashes: Sequence[int],
        without: AbstractSet[int] = frozenset(),
        expected: int = 0,
    ) -> None:
        """Add stored tasks, except those in ``without`` and those that have ended since
        ``begin_loading``. ``expected`` is the maximum total to load, or 0 if unknown."""
        self._table.reserve(expected)
        ended = self._ended_early or frozenset[int]()
        if not (without or ended) or (without.isdisjoint(ids) and ended.isdisjoint(ids)):
            self._add(ids, hashes)
            return
        gone = ended | without
        kept = [at for at, task_id in enumerate(ids) if task_id not in gone]
        self._add([ids[at] for at in kept], [hashes[at] for at in kept])

    def loaded(self) -> None:
        """End the recovery."""
        self._ended_early = None
