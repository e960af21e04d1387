"""Due windows against a slow model: the first of the emptiest ticks, never early, never late."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tickwheel.wheel import timing
from tickwheel.wheel.timing import KEPT_MS, SAMPLE_MAX, SHARED_MIN, TimingWheel, Windows

NOW_MS = 1_795_255_200_000
"""Begins an hour."""
HOUR_MS = 3_600_000
SHAPES = [(4, 10), (1, 1), (60, 7), (3600, 1000)]
offsets = st.integers(0, 3_000)
asks = st.tuples(offsets, st.integers(0, 500), st.sampled_from([1, 2, SHARED_MIN, 60]))


class Chooser(Windows):
    """Each choice is a request of its own."""

    def choose(self, asked_ms: int, end_ms: int, count: int, now_ms: int) -> list[int]:
        self.begin()
        return super().choose(asked_ms, end_ms, count, now_ms)


def made(wheel: TimingWheel) -> Windows:
    return Chooser(wheel, lambda: ())


@given(
    st.sampled_from(SHAPES), st.lists(offsets, max_size=30), st.lists(asks, min_size=1, max_size=6),
    st.sampled_from([12, 4]),
)  # fmt: skip
@example(
    (1, 1), [], [(882, 0, 1), (583, 498, 1), (0, 338, 1), (402, 500, 60), (882, 500, 60)], 4
).via("more pages than are kept at a time")
def test_each_task_gets_the_first_of_the_emptiest_ticks(
    shape: tuple[int, int], there: list[int], asked: list[tuple[int, int, int]], page_bits: int
) -> None:
    slots, tick_ms = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "PAGE_BITS", page_bits)
        patch.setattr(timing, "PAGE", 1 << page_bits)
        wheel = TimingWheel(NOW_MS, slots=slots, tick_ms=tick_ms)
        wheel.add_many(list(range(len(there))), [NOW_MS + ms for ms in there])
        counts = Counter((NOW_MS + ms) // tick_ms for ms in there)
        chosen: list[int] = []
        chooser = Chooser(wheel, lambda: chosen)
        for after_ms, within_ms, count in asked:
            low_ms, high_ms = NOW_MS + after_ms, NOW_MS + after_ms + within_ms
            first = low_ms // tick_ms
            whole = range(first + 1, (high_ms + 1) // tick_ms)
            ticks = [first, *whole]
            # Of a window of very many ticks only the first are looked at.
            ticks = ticks[: timing.WINDOW_TICKS_MAX]
            moments = chooser.choose(low_ms, high_ms, count, NOW_MS)
            assert len(moments) == count
            for moment_ms in moments:
                assert low_ms <= moment_ms <= high_ms
                expected = min(ticks, key=lambda tick: (counts[tick], tick))
                assert moment_ms // tick_ms == expected
                counts[expected] += 1
                chosen.append(expected)


def test_an_empty_wheel_keeps_the_requested_time() -> None:
    chooser = made(TimingWheel(NOW_MS))
    assert chooser.choose(NOW_MS + 1_234, NOW_MS + 61_234, 1, NOW_MS) == [NOW_MS + 1_234]


@pytest.mark.parametrize("after_ms", [0, HOUR_MS // 2, 50 * HOUR_MS])
def test_a_hundred_thousand_tasks_spread(after_ms: int) -> None:
    """At nine, within ten minutes: also over the end of a rotation, and far away."""
    wheel = TimingWheel(NOW_MS)
    chooser = made(wheel)
    low_ms = NOW_MS + after_ms + 55 * 60_000
    results: list[int] = []
    for _ in range(20):
        results += chooser.choose(low_ms, low_ms + 600_000, 5_000, NOW_MS)
    assert min(results) == low_ms and max(results) <= low_ms + 600_000
    each = Counter(moment_ms // 1000 for moment_ms in results)
    assert max(each.values()) == ceil(100_000 / 600)
    assert max(Counter(results).values()) == 1, "spread within a tick, too"


def test_a_crowd_is_avoided_wherever_it_is() -> None:
    for hour in (0, 1, 2, 30):
        wheel = TimingWheel(NOW_MS)
        nine_ms = NOW_MS + hour * HOUR_MS + 600_000
        count = 2 * SAMPLE_MAX
        wheel.add_many(list(range(count)), [nine_ms] * count)
        counts, exact = wheel.counts_between(nine_ms // 1000, nine_ms // 1000 + 10)
        assert exact == (hour < 2) and list(counts) == [nine_ms // 1000]
        assert 0.9 * count <= counts[nine_ms // 1000] <= 1.1 * count
        moments = made(wheel).choose(nine_ms, nine_ms + 60_000, 120, NOW_MS)
        assert sorted(Counter(ms // 1000 - nine_ms // 1000 for ms in moments)) == list(range(1, 60))


def test_withdrawn_tasks_free_their_ticks() -> None:
    for hour in (0, 30):
        wheel = TimingWheel(NOW_MS)
        due_ms = NOW_MS + hour * HOUR_MS + 600_000
        wheel.add_many(list(range(40)), [due_ms] * 40)
        wheel.cancel_many(list(range(40)), [due_ms] * 40)
        assert made(wheel).choose(due_ms, due_ms + 60_000, 1, NOW_MS) == [due_ms]


def test_chosen_times_count_before_they_are_on_the_wheel() -> None:
    wheel, placed = TimingWheel(NOW_MS), list[int]()
    chooser = Chooser(wheel, lambda: placed)
    window = NOW_MS + 60_000, NOW_MS + 69_999
    for now_ms in range(NOW_MS, NOW_MS + 10 * KEPT_MS, KEPT_MS):
        (moment_ms,) = chooser.choose(*window, 1, now_ms)
        placed.append(moment_ms // 1000)
    assert sorted(placed) == list(range(window[0] // 1000, window[0] // 1000 + 10))


def test_tasks_added_meanwhile_are_counted() -> None:
    wheel = TimingWheel(NOW_MS)
    chooser = made(wheel)
    due_ms = NOW_MS + 60_000
    assert chooser.choose(due_ms, due_ms + 5_000, 1, NOW_MS) == [due_ms]
    wheel.add_many([1, 2, 3], [due_ms + 1_000, due_ms + 1_001, due_ms + 2_000])
    (moment_ms,) = chooser.choose(due_ms + 1_000, due_ms + 5_000, 1, NOW_MS + KEPT_MS)
    assert moment_ms == due_ms + 3_000


def test_pages_are_bounded() -> None:
    chooser = made(TimingWheel(NOW_MS))
    for day in range(3 * timing.PAGES_MAX):
        due_ms = NOW_MS + day * 24 * HOUR_MS
        chooser.choose(due_ms, due_ms + 60_000, 1, NOW_MS)
    assert len(chooser._pages) == timing.PAGES_MAX


def test_pages_read_per_request_are_limited() -> None:
    """Of a thousand days, one each: behind the limit tasks are due when they asked to be."""
    wheel = TimingWheel(NOW_MS)
    wheel.add_many(list(range(1_000)), [NOW_MS + day * 24 * HOUR_MS for day in range(1_000)])
    chooser = Windows(wheel, lambda: ())
    chooser.begin()
    asked = [NOW_MS + day * 24 * HOUR_MS for day in range(1_000)]
    results = [chooser.choose(at_ms, at_ms + 10_000, 1, NOW_MS)[0] for at_ms in asked]
    later = [moment_ms - at_ms for moment_ms, at_ms in zip(results, asked, strict=True)]
    assert later == [1_000] * timing.READS_MAX + [0] * (1_000 - timing.READS_MAX)
    assert chooser.choose(asked[-1], asked[-1] + 10_000, 40, NOW_MS) == [
        asked[-1] + n * 617 % 1_000 for n in range(40)
    ]
    chooser.begin()
    assert chooser.choose(asked[-1], asked[-1] + 10_000, 1, NOW_MS) == [asked[-1] + 1_000]


def test_few_tasks_in_a_long_window_need_no_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request may have hundreds of windows with some tasks each."""
    sorted_ticks = list[int]()
    shared = timing._shared

    def counted(pages: list[timing._Page], first: int, last: int, n: int) -> list[tuple[int, int]]:
        sorted_ticks.append(last - first)
        return shared(pages, first, last, n)

    monkeypatch.setattr(timing, "_shared", counted)
    chooser = Chooser(TimingWheel(NOW_MS), lambda: ())
    day_ms = 24 * HOUR_MS
    few, many = 2 * SHARED_MIN, day_ms // 1_000 // timing.SHARED_TICKS
    moments = chooser.choose(NOW_MS, NOW_MS + day_ms - 1, few, NOW_MS)
    assert len({moment_ms // 1_000 for moment_ms in moments}) == few
    assert not sorted_ticks
    chooser.choose(NOW_MS, NOW_MS + day_ms - 1, many, NOW_MS)
    assert len(sorted_ticks) == 1


def test_a_partly_known_window_is_chosen_from_correctly() -> None:
    wheel = TimingWheel(NOW_MS)
    chooser = Windows(wheel, lambda: ())
    page_ms = timing.PAGE * 1_000
    third_ms = NOW_MS // page_ms * page_ms + 2 * page_ms
    chooser.begin()
    for at_ms in (third_ms, third_ms + page_ms):
        chooser.choose(at_ms, at_ms + page_ms - 1, 40, NOW_MS)
    chooser._reads_left = 0
    for count in (1, 40):
        moments = chooser.choose(NOW_MS, third_ms + page_ms - 1, count, NOW_MS)
        assert min(moments) >= third_ms and max(Counter(moments).values()) == 1


@given(
    st.sampled_from(SHAPES), st.lists(st.integers(0, 40_000), max_size=60),
    st.integers(1, 50), st.integers(1, 30), st.integers(0, 50),
)  # fmt: skip
def test_load_counts_the_tasks_due_in_each_span(
    shape: tuple[int, int], there: list[int], step_ticks: int, steps: int, first_tick: int
) -> None:
    slots, tick_ms = shape
    now_ms = NOW_MS // tick_ms * tick_ms
    wheel = TimingWheel(now_ms, slots=slots, tick_ms=tick_ms)
    wheel.add_many(list(range(len(there))), [now_ms + ms for ms in there])
    wheel.cancel_many(list(range(0, len(there), 3)), [now_ms + ms for ms in there[::3]])
    left = [ms for n, ms in enumerate(there) if n % 3]
    first_ms, step_ms = now_ms + first_tick * tick_ms, step_ticks * tick_ms
    found, exact = wheel.load(first_ms, step_ms, steps)
    assert exact
    assert found == [
        sum(0 <= now_ms + ms - first_ms - n * step_ms < step_ms for ms in left)
        for n in range(steps)
    ]
