"""The ready queue: priorities, fairness, and since when the first one has waited."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.engine.queues import FAIR_EVERY, MARK_GAP_MS, MARKS_MAX, PriorityLevel, ReadyQueue


def filled(*entries: tuple[int, int]) -> ReadyQueue:
    """(id, priority) in order of arrival."""
    queue = ReadyQueue()
    for task_id, priority in entries:
        queue.push(task_id, priority, 0)
    return queue


def test_higher_priorities_are_first_and_equal_in_order() -> None:
    queue = filled((1, 0), (2, 5), (3, 255), (4, 5), (5, 0))
    assert queue.take(3) == [3, 2, 4]
    assert queue.take(9) == [1, 5]
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("step", "fits"),
    [(1, 1), (3, 3), (7, 7), (16, 16), (100, 100), (1_000, 1_000), (16, 15), (100, 20), (512, 4)],
)
def test_one_of_sixteen_is_of_a_lower_priority(step: int, fits: int) -> None:
    queue = filled(*((i, 9) for i in range(300)), *((1_000 + i, 0) for i in range(300)))
    taken: list[int] = []
    while len(taken) < 160:
        ids = queue.take(step)
        taken += ids[:fits]
        queue.put_back(ids[fits:])
    low = [index for index, task_id in enumerate(taken[:160]) if task_id >= 1_000]
    assert low == [15 + FAIR_EVERY * i for i in range(10)]
    assert [taken[i] for i in low] == list(range(1_000, 1_010))


def test_lower_priorities_take_turns() -> None:
    queue = filled(
        *((i, 9) for i in range(300)),
        *((1_000 + i, 1) for i in range(100)),
        *((2_000 + i, 2) for i in range(100)),
        *((3_000 + i, 0) for i in range(100)),
    )
    low = [task_id for task_id in queue.take(96) if task_id >= 1_000]
    assert low == [2_000, 1_000, 3_000, 2_001, 1_001, 3_001]


def test_a_sporadic_priority_does_not_use_others_turns() -> None:
    """A single task of priority 5 now and then must not use up the turns of priority 0."""
    queue = filled(*((i, 9) for i in range(2_000)), *((5_000 + i, 0) for i in range(50)))
    low: list[int] = []
    for round_ in range(20):
        queue.push(10_000 + round_, 5, 0)
        low += [task_id for task_id in queue.take(FAIR_EVERY) if task_id >= 5_000]
    plain = [task_id for task_id in low if task_id < 10_000]
    assert len(plain) >= 9


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from([0, 0, 1, 7, 255])),
            st.tuples(st.just("take"), st.integers(0, 40)),
            st.tuples(st.just("back"), st.just(0)),
        ),
        max_size=80,
    )
)
def test_every_task_is_taken_once_and_no_priority_starves(steps: list[tuple[str, int]]) -> None:
    queue, waiting = ReadyQueue(), {p: deque[int]() for p in (0, 1, 7, 255)}
    priority_of: dict[int, int] = {}
    top_in_a_row, newest = 0, []
    for number, (step, value) in enumerate(steps):
        if step == "push":
            queue.push(number, value, number)
            waiting[value].append(number)
            priority_of[number] = value
        elif step == "back" and newest:
            task_id = newest.pop()
            queue.push_front(task_id, priority_of[task_id])
            waiting[priority_of[task_id]].appendleft(task_id)
        elif step == "take":
            newest = queue.take(value)
            for task_id in newest:
                priority = priority_of[task_id]
                assert waiting[priority].popleft() == task_id, "in order of arrival"
                higher = any(waiting[p] for p in waiting if p > priority)
                lower = any(waiting[p] for p in waiting if p < priority)
                top_in_a_row = 0 if higher or not lower else top_in_a_row + 1
                assert top_in_a_row < FAIR_EVERY
        assert len(queue) == sum(map(len, waiting.values()))


# --- ages --------------------------------------------------------------------------------------


def test_an_age_is_right_within_a_hundred_milliseconds() -> None:
    level = PriorityLevel()
    arrived: deque[int] = deque()
    for now_ms in range(0, 5_000, 7):
        level.arrive(now_ms, now_ms)
        arrived.append(now_ms)
        if now_ms % 3 == 0 and len(level) > 1:
            level.take(1)
            arrived.popleft()
        since_ms = level.since_ms
        assert since_ms is not None
        assert arrived[0] - MARK_GAP_MS <= since_ms <= arrived[0]


def test_a_long_backlog_costs_few_marks_and_stays_nearly_right() -> None:
    level, day_ms = PriorityLevel(), 86_400_000
    for now_ms in range(0, 7 * day_ms, 60_000):
        level.arrive(now_ms, now_ms)
    assert len(level._marks) <= MARKS_MAX + 1
    now_ms = 7 * day_ms
    while len(level) > 1:
        level.take(97)
        head_ms = level.peek(1)[0] if len(level) else now_ms
        since_ms = level.since_ms
        assert since_ms is not None
        assert since_ms <= head_ms
        assert head_ms - since_ms <= 7 * day_ms // 100


def test_an_emptied_level_restarts_its_age() -> None:
    level = PriorityLevel()
    level.arrive(1, 1_000)
    assert level.take(5) == [1]
    level.arrive(2, 9_000)
    assert level.since_ms == 9_000
    level.take(1)
    level.push_front((2,))
    assert level.since_ms == 9_000, "put back, it has waited all along"
