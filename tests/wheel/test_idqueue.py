"""The id queue against a list, its order, and that it gives memory back."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.wheel.buckets import IdQueue

ID_MAX = 2**63 - 1

blocks = st.lists(st.integers(0, ID_MAX), max_size=40)
steps = st.one_of(
    st.tuples(st.just("push"), st.integers(0, ID_MAX)),
    st.tuples(st.just("extend"), blocks),
    st.tuples(st.just("push_front"), blocks),
    st.tuples(st.just("take"), st.integers(-1, 50)),
    st.tuples(st.just("peek"), st.integers(-1, 50)),
)


@given(st.lists(steps, max_size=60))
def test_an_id_queue_behaves_like_a_list(script: list[tuple[str, int | list[int]]]) -> None:
    queue, model = IdQueue(), list[int]()
    for verb, value in script:
        if isinstance(value, list):
            getattr(queue, verb)(value)
            model = model + value if verb == "extend" else value + model
        elif verb == "push":
            queue.push(value)
            model.append(value)
        else:
            limit = max(0, value)
            assert getattr(queue, verb)(value) == model[:limit]
            if verb == "take":
                model = model[limit:]
        assert len(queue) == len(model)
    assert queue.take(len(model) + 1) == model


def test_returned_ids_come_first_in_order() -> None:
    queue = IdQueue([1, 2, 3, 4])
    taken = queue.take(3)
    queue.push_front(taken)
    assert queue.take(4) == [1, 2, 3, 4]


def test_put_back_before_an_untouched_queue() -> None:
    queue = IdQueue([5])
    queue.push_front((3, 4))
    queue.push_front([2])
    assert queue.peek(9) == [2, 3, 4, 5]


def test_extends_by_an_array_and_holds_the_largest_id() -> None:
    queue = IdQueue()
    queue.extend(array("q", [ID_MAX]))
    assert queue.take(1) == [ID_MAX]


def test_draining_an_id_queue_frees_its_memory() -> None:
    queue = IdQueue(range(100_000))
    empty_bytes = IdQueue().memory_bytes
    assert queue.memory_bytes < 8.6 * 100_000
    for _ in range(90):
        queue.take(1_000)
    assert queue.memory_bytes < 8.6 * 30_000
    queue.take(10_000)
    assert queue.memory_bytes == empty_bytes


def test_single_ids_put_back_in_turn_do_not_each_move_the_queue() -> None:
    queue = IdQueue(range(10_000))
    sizes = set()
    for task_id in range(1_000):
        queue.push_front((task_id,))
        sizes.add(queue.memory_bytes)
    assert len(sizes) < 5
    assert queue.take(2) == [999, 998]
