"""The timing wheel's behaviours, one at a time, at the shipped sizes and at small ones."""

from __future__ import annotations

import random

import pytest

from tickwheel.wheel import buckets, timing
from tickwheel.wheel.buckets import Near
from tickwheel.wheel.timing import AHEAD_MAX, WORK_MAX, TimingWheel

DAY_MS = 86_400_000
NOW_MS = 20_000 * DAY_MS


def small(now_ms: int = 0) -> TimingWheel:
    return TimingWheel(now_ms, slots=4, tick_ms=10)


def drain(wheel: TimingWheel, now_ms: int, limit: int = 5_000) -> list[tuple[int, int]]:
    """(due_ms, id) of everything that is due."""
    fired: list[tuple[int, int]] = []
    while True:
        ids, dues_ms, more = wheel.advance(now_ms, limit)
        fired += zip(dues_ms, ids, strict=True)
        if not more:
            return fired


# --- slots and cycle-num ---------------------------------------------------------------------


def test_a_task_in_3610_s_is_in_slot_11_with_one_cycle_left() -> None:
    now_ms = 3_600_000 * 7 + 1_000
    wheel = TimingWheel(now_ms)
    assert wheel.current_slot == 1
    assert wheel.slot_of(now_ms + 3_610_000) == 11
    assert wheel.cycles_left(now_ms + 3_610_000, now_ms) == 1


def test_a_task_in_2_s_from_slot_3599_is_in_slot_1() -> None:
    now_ms = 3_600_000 * 7 + 3_599_000
    wheel = TimingWheel(now_ms)
    assert wheel.current_slot == 3599
    assert wheel.slot_of(now_ms + 2_000) == 1
    assert wheel.cycles_left(now_ms + 2_000, now_ms) == 0


def test_slot_counts_cover_the_current_and_the_next_rotation() -> None:
    wheel = small()
    wheel.add_many([1, 2, 3, 4], [5, 45, 35, 500])
    wheel.advance(0, 9)
    assert wheel.slot_counts() == [2, 0, 0, 1]
    wheel.cancel(2, 45)
    assert wheel.slot_counts() == [1, 0, 0, 1]


# --- the example in the module's docstring -----------------------------------------------------


def test_the_worked_example() -> None:
    wheel = small()
    a, b, c, d = 1, 2, 3, 4
    for task_id, due_ms in ((a, 5), (b, 23), (c, 21), (d, 103)):
        wheel.add(task_id, due_ms)
    assert wheel.cycles_left(103, 0) == 2
    trace = []
    for now_ms in (0, 5, 10, 24, 40, 90, 102, 103):
        ids, _, more = wheel.advance(now_ms, 9)
        assert not more
        wheel.take_upcoming(9)
        trace.append((now_ms, ids, wheel.next_due_ms(now_ms)))
    assert trace == [
        (0, [], 5),
        (5, [a], 10),
        (10, [], 21),
        (24, [c, b], 40),
        (40, [], 90),
        (90, [], 103),
        (102, [], 103),
        (103, [d], None),
    ]


# --- advance -----------------------------------------------------------------------------------


def test_fires_at_its_millisecond_and_not_before() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add(7, NOW_MS + 1_500)
    assert drain(wheel, NOW_MS + 1_499) == []
    assert drain(wheel, NOW_MS + 1_500) == [(NOW_MS + 1_500, 7)]


def test_fires_by_due_time_and_by_arrival_within_one_millisecond() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add_many([9, 1, 5, 3], [NOW_MS + 20, NOW_MS + 10, NOW_MS + 20, NOW_MS + 10])
    wheel.advance(NOW_MS, 1)
    wheel.add(4, NOW_MS + 10)
    assert [task_id for _, task_id in drain(wheel, NOW_MS + 99)] == [1, 3, 4, 9, 5]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_returns_at_most_the_limit_and_says_whether_more_is_due(limit: int) -> None:
    wheel = small()
    wheel.add_many([1, 2, 3], [3, 3, 4])
    ids, _, more = wheel.advance(9, limit)
    assert (ids, more) == ([1, 2, 3][:limit], limit < 3)


def test_a_limit_of_zero_fires_no_task() -> None:
    wheel = small()
    wheel.add(1, 3)
    assert wheel.advance(9, 0) == ([], [], True)
    assert drain(wheel, 9) == [(3, 1)]


def test_overdue_tasks_fire_at_once_by_due_time() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS, 1)
    wheel.add_many([1, 2, 3], [NOW_MS - DAY_MS, NOW_MS, NOW_MS - 2 * DAY_MS])
    due_ms = wheel.next_due_ms(NOW_MS)
    assert due_ms is not None
    assert due_ms <= NOW_MS
    assert [task_id for _, task_id in drain(wheel, NOW_MS)] == [3, 1, 2]


def test_the_position_follows_the_clock_or_the_fired_burst() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add_many([1, 2, 3], [NOW_MS + 10, NOW_MS + 20, NOW_MS + 20])
    wheel.advance(NOW_MS + 500, 2)
    assert wheel.position_ms == NOW_MS + 20
    assert not wheel.holds(2, NOW_MS + 20)
    assert wheel.holds(3, NOW_MS + 20)
    drain(wheel, NOW_MS + 500)
    assert wheel.position_ms == NOW_MS + 500


def test_the_position_moves_without_firing() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add(1, NOW_MS + 1_500)
    wheel.add(2, NOW_MS + 3_500)
    assert drain(wheel, NOW_MS) == []
    for after_ms, position_ms in (
        (900, 900),
        (1_499, 1_499),
        (1_500, 1_499),  # due
    ):
        wheel.catch_up(NOW_MS + after_ms)
        assert wheel.position_ms == NOW_MS + position_ms
    assert drain(wheel, NOW_MS + 2_000) == [(NOW_MS + 1_500, 1)]
    wheel.cancel(2, NOW_MS + 3_500)
    wheel.add(3, NOW_MS + 4_500)
    wheel.catch_up(NOW_MS + 4_499)
    assert wheel.position_ms == NOW_MS + 2_000, "the tick of the next one has to be opened"
    assert drain(wheel, NOW_MS + 4_500) == [(NOW_MS + 4_500, 3)]


def test_a_day_without_advance_fires_in_order() -> None:
    wheel = TimingWheel(NOW_MS)
    rng = random.Random(4)
    dues_ms = [NOW_MS + rng.randrange(DAY_MS) for _ in range(5_000)]
    wheel.add_many(range(5_000), dues_ms)
    expected = sorted((due_ms, task_id) for task_id, due_ms in enumerate(dues_ms))
    assert drain(wheel, NOW_MS + DAY_MS, limit=700) == expected
    assert len(wheel) == 0


# --- the clock goes back -----------------------------------------------------------------------


def test_a_task_before_the_position_waits_for_its_due_time() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS + DAY_MS, 1)
    wheel.add(1, NOW_MS + 5_000)
    assert wheel.position_ms == NOW_MS + DAY_MS
    assert drain(wheel, NOW_MS) == []
    assert wheel.holds(1, NOW_MS + 5_000)
    assert drain(wheel, NOW_MS + 4_999) == []
    assert wheel.next_due_ms(NOW_MS + 4_999) == NOW_MS + 5_000
    assert drain(wheel, NOW_MS + 5_000) == [(NOW_MS + 5_000, 1)]


def test_a_clock_set_back_fires_no_task_again() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add(1, NOW_MS + 10)
    assert len(drain(wheel, NOW_MS + 20)) == 1
    assert drain(wheel, NOW_MS) == []
    assert drain(wheel, NOW_MS + 20) == []
    assert not wheel.holds(1, NOW_MS + 10)


# --- orphans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset_ms", [-5 * DAY_MS, 0, 500, 90_000, 5 * DAY_MS])
def test_an_orphan_never_fires_and_its_successor_does(offset_ms: int) -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS, 1)
    wheel.add(1, NOW_MS + offset_ms)
    wheel.cancel(1, NOW_MS + offset_ms)
    assert len(wheel) == 0
    assert not wheel.holds(1, NOW_MS + offset_ms)
    wheel.add(1, NOW_MS + offset_ms)
    wheel.add(1, NOW_MS + offset_ms + 1)
    assert [due for due, _ in drain(wheel, NOW_MS + 6 * DAY_MS)] == [
        NOW_MS + offset_ms,
        NOW_MS + offset_ms + 1,
    ]
    assert len(wheel) == 0


@pytest.mark.parametrize("offset_ms", [0, 90_000, 5 * DAY_MS])
def test_an_orphan_removes_one_of_two_equal_handles(offset_ms: int) -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS, 1)
    wheel.add_many([1, 1], [NOW_MS + offset_ms] * 2)
    wheel.cancel(1, NOW_MS + offset_ms)
    assert wheel.holds(1, NOW_MS + offset_ms)
    assert drain(wheel, NOW_MS + 6 * DAY_MS) == [(NOW_MS + offset_ms, 1)]


def test_orphans_inside_a_burst_do_not_fire() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS, 1)
    wheel.add_many(range(1_000), [NOW_MS] * 1_000)
    wheel.advance(NOW_MS, 300)
    for task_id in range(300, 1_000, 2):
        assert wheel.holds(task_id, NOW_MS)
        wheel.cancel(task_id, NOW_MS)
        assert not wheel.holds(task_id, NOW_MS)
    assert not wheel.holds(299, NOW_MS)
    assert [task_id for _, task_id in drain(wheel, NOW_MS, 50)] == list(range(301, 1_000, 2))
    assert len(wheel) == 0


@pytest.mark.parametrize("offset_ms", [0, 90_000, 5 * DAY_MS])
def test_an_orphan_without_a_handle_keeps_the_count(offset_ms: int) -> None:
    """It is a caller's mistake, but must not hide the tasks that are there."""
    wheel = TimingWheel(NOW_MS)
    wheel.advance(NOW_MS, 1)
    wheel.add_many(range(200), [NOW_MS + offset_ms] * 200)
    wheel.cancel(999, NOW_MS + offset_ms)
    wheel.cancel(999, NOW_MS + offset_ms + 1)
    assert len(drain(wheel, NOW_MS + 6 * DAY_MS)) == 200
    assert len(wheel) == 0


def test_an_orphan_in_a_half_opened_tick_does_not_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "AHEAD_MAX", 2)
    wheel = small()
    wheel.advance(1_000, 1)
    wheel.add_many([1, 2], [41, 41])
    wheel.cancel(1, 41)
    wheel.add(1, 41)
    wheel.advance(30, 1)
    wheel.cancel(1, 41)
    assert not wheel.holds(1, 41)
    assert drain(wheel, 50) == [(41, 2)]
    assert len(wheel) == 0


# --- when to come back ---------------------------------------------------------------------------


def test_an_empty_wheel_has_no_next_due_time() -> None:
    assert TimingWheel(NOW_MS).next_due_ms(NOW_MS) is None


@pytest.mark.parametrize("offset_ms", [0, 1, 999, 1_000, 7_777, 3_600_000, 400 * DAY_MS])
def test_following_next_due_meets_a_lone_task_in_few_steps(offset_ms: int) -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add(1, NOW_MS + offset_ms)
    now_ms: int | None = NOW_MS
    for _ in range(8):
        assert now_ms is not None
        assert now_ms <= NOW_MS + offset_ms
        if wheel.advance(now_ms, 1)[0]:
            break
        wheel.take_upcoming(1)
        now_ms = wheel.next_due_ms(now_ms)
    assert now_ms == NOW_MS + offset_ms


def test_upcoming_ids_are_returned_once() -> None:
    wheel = TimingWheel(NOW_MS)
    wheel.add_many([1, 2, 3], [NOW_MS + 9_100, NOW_MS + 9_050, NOW_MS + 60_000])
    wheel.add(4, NOW_MS + 9_000)
    wheel.cancel(4, NOW_MS + 9_000)
    assert wheel.advance(NOW_MS + 8_000, 9)[0] == []
    assert wheel.take_upcoming(1) == [1]
    assert {2} <= set(wheel.take_upcoming(9)) <= {2, 4}
    assert wheel.take_upcoming(9) == []


# --- bounds --------------------------------------------------------------------------------------


def test_an_advance_moves_a_bounded_number_of_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = 0
    push_pairs = Near.push_pairs

    def counting(self: Near, ids: list[int], dues_ms: list[int]) -> None:
        nonlocal moved
        moved += len(ids)
        push_pairs(self, ids, dues_ms)

    monkeypatch.setattr(Near, "push_pairs", counting)
    wheel, count = TimingWheel(NOW_MS), 3 * WORK_MAX
    wheel.add_many(range(count), [NOW_MS + 10_000 + k % 900 for k in range(count)])
    assert wheel.advance(NOW_MS + 9_000, 100) == ([], [], False)
    assert 0 < moved <= AHEAD_MAX
    assert wheel.advance(NOW_MS + 10_000, 100) == ([], [], True)
    assert moved <= 2 * AHEAD_MAX + WORK_MAX
    assert len(drain(wheel, NOW_MS + 11_000)) == count


def test_a_rotation_enters_the_ring_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "AHEAD_MAX", 10)
    monkeypatch.setattr(buckets, "CHUNK_ENTRIES", 16)
    wheel = small()
    wheel.add_many(range(100), [100 + k % 7 for k in range(100)])
    now_ms, steps = 40, 0
    wheel.advance(now_ms, 1)
    while (next_ms := wheel.next_due_ms(now_ms)) is not None and next_ms < 80:
        now_ms, steps = next_ms, steps + 1
        assert wheel.advance(now_ms, 1) == ([], [], False)
    assert steps >= 5
    assert len(drain(wheel, 107)) == 100


def test_a_handle_costs_16_to_20_bytes_over_a_week() -> None:
    wheel, rng, count = TimingWheel(NOW_MS), random.Random(5), 200_000
    for start in range(0, count, 500):
        ids = range(start, start + 500)
        wheel.add_many(ids, [NOW_MS + rng.randrange(7 * DAY_MS) for _ in ids])
    # A fifth of a million, so that the ring's sparse ticks weigh five times what they will.
    assert wheel.memory_bytes < 24 * count


def test_rescheduled_tasks_leave_little_memory_behind() -> None:
    wheel, rng, count = TimingWheel(NOW_MS), random.Random(6), 100_000
    dues_ms = [NOW_MS + DAY_MS + rng.randrange(DAY_MS) for _ in range(count)]
    wheel.add_many(range(count), dues_ms)
    for task_id, due_ms in enumerate(dues_ms):
        wheel.cancel(task_id, due_ms)
        wheel.add(task_id, NOW_MS + DAY_MS + rng.randrange(DAY_MS))
    assert len(wheel) == count
    assert wheel.memory_bytes < 34 * count


def test_cancelling_everything_gives_the_memory_back() -> None:
    wheel, count = TimingWheel(NOW_MS, slots=4), 20_000
    dues_ms = [NOW_MS + DAY_MS + k % 3_000 for k in range(count)]
    wheel.add_many(range(count), dues_ms)
    for task_id, due_ms in enumerate(dues_ms):
        wheel.cancel(task_id, due_ms)
        if task_id % 500 == 0:
            wheel.advance(NOW_MS, 1)
    assert len(wheel) == 0
    assert wheel.memory_bytes < 5_000
    assert drain(wheel, NOW_MS + 2 * DAY_MS) == []


def test_a_dense_rotation_is_spread_over_ticks_and_stays_exact() -> None:
    wheel, count = small(), 2_000
    dues_ms = [200 + k % 40 for k in range(count)]
    wheel.add_many(range(count), dues_ms)
    for task_id in range(0, count, 2):
        wheel.cancel(task_id, dues_ms[task_id])
        wheel.advance(0, 1)
    assert sum(wheel.slot_counts()) == len(wheel) == count // 2
    wheel.add(count, 205)
    wheel.cancel(1, dues_ms[1])
    assert not wheel.holds(1, dues_ms[1])
    assert wheel.next_due_ms(0) is not None
    kept = [(dues_ms[k], k) for k in range(3, count, 2)]
    assert drain(wheel, 300) == sorted([*kept, (205, count)])


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task_id", "due_ms"), [(-1, NOW_MS), (1, 2**62), (1, -(2**62))])
def test_an_invalid_handle_refuses_the_whole_call(task_id: int, due_ms: int) -> None:
    wheel = TimingWheel(NOW_MS)
    with pytest.raises(ValueError, match="not a valid handle"):
        wheel.add(task_id, due_ms)
    with pytest.raises(ValueError, match="invalid handles"):
        wheel.add_many([1, task_id], [NOW_MS, due_ms])
    with pytest.raises(ValueError, match="2 ids with 1 due"):
        wheel.add_many([1, 2], [NOW_MS])
    assert len(wheel) == 0
    assert wheel.next_due_ms(NOW_MS) is None


@pytest.mark.parametrize(("slots", "tick_ms"), [(0, 10), (4, 0)])
def test_a_wheel_without_slots_or_ticks_is_refused(slots: int, tick_ms: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TimingWheel(NOW_MS, slots=slots, tick_ms=tick_ms)


def test_first_ms_is_exact_if_near_and_never_late() -> None:
    wheel = TimingWheel(NOW_MS, slots=4, tick_ms=10)
    assert wheel.first_ms() is None
    wheel.add(1, NOW_MS + 3)
    wheel.add(2, NOW_MS + 1_003)
    wheel.advance(NOW_MS, 10)
    assert wheel.first_ms() == NOW_MS + 3
    assert wheel.advance(NOW_MS + 5, 10)[0] == [1]
    first_ms = wheel.first_ms()
    assert first_ms is not None and NOW_MS + 5 < first_ms <= NOW_MS + 1_003
    wheel.add(3, NOW_MS - 700)  # the clock went back
    first_ms = wheel.first_ms()
    assert first_ms is not None and NOW_MS - 710 < first_ms <= NOW_MS - 700
