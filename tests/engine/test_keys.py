"""The index of keys against a dictionary of sets, and what it costs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.engine import keys
from tickwheel.engine.keys import Finished, KeyIndex, Table
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.records import ID_STEP

TOPICS = ("orders", "mails")
FIRST_ID = 10**15 // ID_STEP * ID_STEP


class Slow:
    """What must be true, kept as plain as possible."""

    def __init__(self, seed: int, key_hash: KeyHash) -> None:
        self.rnd = random.Random(seed)
        self.index = KeyIndex(key_hash, finished_max=20)
        self.live: dict[int, tuple[str, str]] = {}
        self.ended: list[tuple[int, tuple[str, str]]] = []
        self.next_id = FIRST_ID

    def some_key(self) -> tuple[str, str]:
        spread = self.rnd.choice((1, 3, 50, 5_000))
        return self.rnd.choice(TOPICS), f"k{self.rnd.randrange(spread)}"

    def land(self, count: int) -> None:
        one = self.some_key() if self.rnd.random() < 0.3 else None
        fresh = {}
        for _ in range(count):
            self.next_id += ID_STEP * self.rnd.choice((1, 1, 1, 7))
            fresh[self.next_id] = one or self.some_key()
        self.index.add({task_id: self.index.hash(*pair) for task_id, pair in fresh.items()})
        self.live |= fresh

    def end(self, count: int) -> None:
        for task_id in self.rnd.sample(sorted(self.live), min(count, len(self.live))):
            pair = self.live.pop(task_id)
            self.index.ended(*pair, task_id)
            self.ended.append((task_id, pair))

    def restart(self) -> None:
        """Tasks end while the stored ones are loaded, in some order, beside new ones."""
        self.index = KeyIndex(self.index.hash, finished_max=20)
        self.index.begin_loading()
        self.ended.clear()
        stored = dict(self.live)
        special = set(self.rnd.sample(sorted(stored), len(stored) // 10))
        self.load(special, stored)
        rest = list(stored)
        self.rnd.shuffle(rest)
        while rest:
            self.end(self.rnd.choice((0, 5)))
            some, rest = rest[:100], rest[100:]
            self.load(some, stored, special)
        self.index.loaded()

    def load(
        self,
        ids: Collection[int],
        stored: dict[int, tuple[str, str]],
        without: AbstractSet[int] = frozenset(),
    ) -> None:
        hashes = [self.index.hash(*stored[i]) for i in ids]
        expected = self.rnd.choice((0, len(stored), 9 * len(stored)))
        self.index.load(list(ids), hashes, without, expected)

    def check(self) -> None:
        by_key: dict[tuple[str, str], list[int]] = {}
        for task_id, pair in self.live.items():
            by_key.setdefault(pair, []).append(task_id)
        assert len(self.index) == len(self.live)
        for pair in [*by_key, *(pair for _, pair in self.ended[-10:]), ("orders", "never")]:
            assert self.index.find(*pair) == sorted(by_key.get(pair, []))
            assert self.index.count(*pair) == len(by_key.get(pair, []))
        for task_id, pair in self.ended[-10:]:
            newest = self.index.finished(*pair)
            assert newest is not None and newest >= task_id
            assert (newest, pair) in self.ended


@given(st.integers(0, 2**32))
def test_the_key_index_equals_a_dictionary(seed: int) -> None:
    slow = Slow(seed, KeyHash(b"model"))
    for _ in range(12):
        step = slow.rnd.choice(("land", "land", "end", "restart"))
        if step == "land":
            slow.land(slow.rnd.choice((1, 40, 600)))
        elif step == "end":
            slow.end(slow.rnd.choice((1, 40, 900)))
        else:
            slow.restart()
        slow.check()


class _Few(KeyHash):
    """A hash with 4 values: everything collides."""

    def __call__(self, topic: str, key: str) -> int:
        return super().__call__(topic, key) % 4 + 1

    def of_many(self, topics: Sequence[str], keys: Sequence[str]) -> list[int]:
        return [hashed % 4 + 1 for hashed in super().of_many(topics, keys)]


def test_keys_that_collide_are_found_with_their_neighbours() -> None:
    index = KeyIndex(_Few(b""), finished_max=10)
    ids = [FIRST_ID + n * ID_STEP for n in range(1_000)]
    index.add({task_id: index.hash("t", f"k{n}") for n, task_id in enumerate(ids)})
    for n, task_id in enumerate(ids):
        assert task_id in index.find("t", f"k{n}")
    for n, task_id in enumerate(ids):
        index.ended("t", f"k{n}", task_id)
    assert len(index) == 0
    assert index.find("t", "k0") == []


@pytest.mark.parametrize("count", [keys.LONG_BYTES // keys.ENTRY_BYTES - 1, 20_000])
def test_a_key_with_many_tasks_moves_to_its_own_table_and_back(count: int) -> None:
    """Below the limit it lies with the others, from it on in a table of its own."""
    index = KeyIndex(KeyHash(b""), finished_max=10)
    ids = [FIRST_ID + n * ID_STEP for n in range(count)]
    crowded = index.hash("t", "crowd")
    for start in range(0, count, 5_000):
        index.add(dict.fromkeys(ids[start : start + 5_000], crowded))
    index.add({FIRST_ID - ID_STEP: index.hash("t", "alone")})
    assert bool(index._crowds) == (count >= keys.LONG_BYTES // keys.ENTRY_BYTES)
    assert index.find("t", "crowd") == ids
    assert index.find("t", "alone") == [FIRST_ID - ID_STEP]
    assert index.count("t", "crowd") == count
    random.Random(1).shuffle(ids)
    for task_id in ids:
        index.ended("t", "crowd", task_id)
    assert (len(index), len(index._crowds), index.find("t", "crowd")) == (1, 0, [])


def test_the_bucket_count_follows_the_task_count() -> None:
    """Whether tasks come one or many at a time, and while they go."""
    for at_once in (1, 700, 20_000):
        table, rnd = Table(), random.Random(2)
        pairs = [(rnd.randrange(2**64), task_id) for task_id in range(20_000)]
        for start in range(0, len(pairs), at_once):
            some = pairs[start : start + at_once]
            if at_once == 1:
                table.put(*some[0])
            else:
                table.add([place for place, _ in some], [task_id for _, task_id in some])
            if start % 50 == 0:
                _check_buckets(table)
        assert sorted(table.ids()) == list(range(20_000))
        rnd.shuffle(pairs)
        for place, task_id in pairs:
            assert table.remove(place, task_id)
            assert not table.remove(place, task_id)
            if len(table) % 50 == 0:
                _check_buckets(table)
        assert len(list(table.buckets())) == keys.BUCKETS_MIN


def test_reserved_buckets_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made some at a time, and those that came before are found in them."""
    table, rnd = Table(), random.Random(3)
    places = [rnd.randrange(2**64) for _ in range(600_000)]
    table.add(places[:5_000], range(5_000))
    made = [len(list(table.buckets()))]
    while not made[1:] or made[-1] > made[-2]:
        table.reserve(len(places))
        made.append(len(list(table.buckets())))
        assert made[-1] - made[-2] <= 3 * keys.RESERVED_AT_ONCE
    assert keys.FILL_MAX // 4 <= len(places) // made[-1] <= keys.FILL_MAX
    monkeypatch.delattr(Table, "_divide")
    for start in range(5_000, len(places), 5_000):
        table.add(places[start : start + 5_000], range(start, start + 5_000))
    assert all(table.find(places[task_id]) == [task_id] for task_id in range(0, 600_000, 997))


def _check_buckets(table: Table) -> None:
    count = len(list(table.buckets()))
    assert count == len(set(map(id, table.buckets())))
    assert count == keys.BUCKETS_MIN or len(table) >= keys.FILL_MIN * count
    assert len(table) <= 2 * keys.FILL_MAX * count
    if count > keys.BUCKETS_MIN:
        assert max(map(len, table.buckets())) < 3 * keys.FILL_MAX * keys.ENTRY_BYTES


def test_a_keyed_task_costs_little_memory() -> None:
    index = KeyIndex(KeyHash(b""), finished_max=1_000)
    count = 20_000
    hashes = [index.hash("t", f"order-{n}") for n in range(count)]
    tracemalloc.start()
    try:
        ids = range(FIRST_ID, FIRST_ID + count * ID_STEP, ID_STEP)
        index.add(dict(zip(ids, hashes, strict=True)))
        first, _ = tracemalloc.get_traced_memory()
        for n, task_id in enumerate(ids):
            index.ended("t", f"order-{n}", task_id)
            index.add({task_id + count * ID_STEP: hashes[n]})
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count
    assert first / count < 30
    assert after / count < 40


def test_ended_keys_are_remembered_up_to_the_bound() -> None:
    finished = Finished(bound=100)
    for task_id in range(1_000):
        finished.add(task_id % 7 + 1 + task_id * 1_000, task_id)
    known = [finished.get(task_id % 7 + 1 + task_id * 1_000) for task_id in range(1_000)]
    assert known[950:] == list(range(950, 1_000))
    assert 50 <= sum(found is not None for found in known) <= 100


def test_a_key_ended_twice_has_the_newest_id() -> None:
    index = KeyIndex(KeyHash(b""), finished_max=10)
    index.ended("t", "k", 5)
    index.ended("t", "k", 3)
    assert index.finished("t", "k") == 5
    assert index.finished("t", "other") is None
