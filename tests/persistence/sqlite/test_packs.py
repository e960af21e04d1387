"""Packs of tasks as one row, and the index that knows which of them are left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.model.records import ID_STEP, TaskOptions, TaskRow
from tickwheel.persistence.codec import RecordUnreadable
from tickwheel.persistence.sqlite.packs import (
    PACK_BYTES_MAX,
    PACK_TASKS_MAX,
    PACK_TASKS_MIN,
    Pack,
    PackIndex,
    ids_of,
    split,
)

FIRST = 1 << 50


def rows(count: int, *, first: int = FIRST, body: bytes = b"x") -> list[TaskRow]:
    return [
        TaskRow(first + n * ID_STEP, n, "t", body + bytes([n % 256]), None) for n in range(count)
    ]


def unpacked(found: list[TaskRow]) -> list[TaskRow]:
    packs, loose = split(found)
    return [row for pack in packs for row in Pack(*pack, 0).rows()] + loose


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.integers(-(2**63), 2**63 - 1),
            st.sampled_from(["a", "[", "é", '["a"]']),
            st.binary(max_size=300),
            st.sampled_from(
                [None, None, TaskOptions(), TaskOptions("k", "é", {"a": 1.5}, 255, 2**50)]
            ),
        ),
        max_size=200,
    )
)
def test_split_keeps_every_row_as_it_is(
    drawn: list[tuple[int, int, str, bytes, TaskOptions | None]],
) -> None:
    given_rows, task_id = [], FIRST
    for gap, *columns in drawn:
        # Mostly in a row, sometimes not.
        task_id += ID_STEP if gap > 1 else 5
        given_rows.append(TaskRow(task_id, *columns))
    assert sorted(unpacked(given_rows)) == sorted(given_rows)


def test_few_tasks_stay_on_their_own_and_a_crowd_is_packed() -> None:
    assert split(rows(PACK_TASKS_MIN - 1))[0] == []
    packs, loose = split(rows(PACK_TASKS_MIN))
    assert (len(packs), loose) == (1, [])
    packs, loose = split(rows(PACK_TASKS_MAX + PACK_TASKS_MIN - 1))
    assert [pack[1] for pack in packs] == [PACK_TASKS_MAX]
    assert len(loose) == PACK_TASKS_MIN - 1


def test_large_bodies_stay_on_their_own() -> None:
    most = PACK_BYTES_MAX // 10 - 1
    assert len(split(rows(10, body=b"y" * most))[0]) == 1
    assert split(rows(10, body=b"y" * (most + 1)))[0] == []


def test_a_damaged_pack_is_reported() -> None:
    (pack,), _ = split(rows(20))
    first, count, head, names, bodies, options = pack
    for wrong in (
        (first, count, head[:-1], names, bodies, options),
        (first, count, head, names, bodies[:-1], options),
        (first, count - 1, head, names, bodies, options),
        (first, count, head, "[", bodies, options),
        (first, count, head, names, bodies, b"\xc1"),
    ):
        with pytest.raises(RecordUnreadable, match=str(first)):
            Pack(*wrong, 0)


@given(
    st.lists(st.integers(PACK_TASKS_MIN, 130), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 700), max_size=80), max_size=8),
)
def test_the_pack_index_tracks_remaining_rows(sizes: list[int], batches: list[list[int]]) -> None:
    index = PackIndex()
    left: dict[int, set[int]] = {}
    first = FIRST
    for size in sizes:
        packs, _ = split(rows(size, first=first))
        index.adopt(packs, index.leaving(()))
        left |= {pack[0]: set(ids_of(pack[0], pack[1], 0)) for pack in packs}
        first += (size + 1) * ID_STEP
    counts = {pack: len(ids) for pack, ids in left.items()}
    for batch in batches:
        ids = [FIRST + n * ID_STEP + (n % 50 == 49) for n in batch]
        change = index.leaving(ids)
        results = {i for i in ids if any(i in here for here in left.values())}
        assert set(change.loose) >= set(ids) - results
        for pack, here in left.items():
            gone = here & set(ids)
            here -= gone
            if gone and not here:
                assert pack in change.done
            elif gone:
                assert set(ids_of(pack, counts[pack], change.masks[pack])) == here
            else:
                assert pack not in change.masks
                assert pack not in change.done
        index.adopt((), change)
        left = {pack: here for pack, here in left.items() if here}
        assert len(index) == len(left)


def test_a_pack_that_stays_sparse_is_named_at_the_second_look() -> None:
    index = PackIndex()
    packs, _ = split(rows(60))
    index.adopt(packs, index.leaving(()))
    ids = ids_of(FIRST, 60, 0)
    index.adopt((), index.leaving(ids[:44]))
    assert [index.sparse(), index.sparse()] == [[], []]
    index.adopt((), index.leaving(ids[44:45]))
    assert [index.sparse(), index.sparse()] == [[], [FIRST]]
    index.drop([FIRST])
    assert [index.sparse(), len(index)] == [[], 0]
    assert index.leaving(ids).loose == ids


def test_packs_of_two_shards_can_be_adjacent() -> None:
    """The setting ``shard`` may change between two starts on one database."""
    index = PackIndex()
    one = split(rows(PACK_TASKS_MIN, first=FIRST + 1))[0]
    behind = FIRST + PACK_TASKS_MIN * ID_STEP
    two = split(rows(PACK_TASKS_MIN, first=behind))[0]
    index.load([(pack[0], pack[1], 0) for pack in (*one, *two)])
    change = index.leaving([FIRST + 1, behind])
    assert change.masks == {FIRST + 1: 1, behind: 1}
    assert change.loose == []
