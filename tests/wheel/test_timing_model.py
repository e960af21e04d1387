"""The timing wheel as a state machine against a sorted list.

The list fires by (due time, order of arrival), so the comparison is exact: never early, none
lost, none twice, no cancel, and equal due times in order of arrival. Rotations are a few ticks
long, ids are few so that handles repeat, and the clock jumps both ways. A second machine makes
every limit inside the wheel tiny, so that each step of moving handles is cut in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tickwheel.wheel import buckets, timing
from tickwheel.wheel.timing import TimingWheel

START_MS = 1_000
STEPS_MAX = 3_000

ids = st.integers(0, 6)
near_offsets = st.integers(-30, 60)
offsets = st.one_of(near_offsets, st.integers(-200, 700), st.integers(0, 20_000))
limits = st.one_of(st.integers(0, 4), st.just(1_000))
shapes = st.sampled_from([(4, 10), (1, 1), (3, 7), (1, 50), (60, 5), (3600, 1000)])

Handle = tuple[int, int, int]
"""(due_ms, number of arrival, id)"""


class TimingMachine(RuleBasedStateMachine):
    """Rules on the wheel, each with its counterpart on the list."""

    patches: ClassVar[list[tuple[object, str, int]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.before = [(module, name, getattr(module, name)) for module, name, _ in self.patches]
        for module, name, value in self.patches:
            setattr(module, name, value)
        self.now_ms = START_MS
        self.arrivals = 0
        self.live: list[Handle] = []
        self.gone: set[tuple[int, int]] = set()
        self.position_ms = START_MS
        self.idle = False
        """Nothing happened since an advance that left nothing due."""

    def teardown(self) -> None:
        for module, name, value in self.before:
            setattr(module, name, value)

    @initialize(shape=shapes)
    def start(self, shape: tuple[int, int]) -> None:
        self.wheel = TimingWheel(START_MS, slots=shape[0], tick_ms=shape[1])

    def note(self, task_id: int, due_ms: int) -> None:
        self.arrivals += 1
        self.live.append((due_ms, self.arrivals, task_id))
        self.idle = False

    # --- in and out ----------------------------------------------------------------------------

    @rule(task_id=ids, offset_ms=offsets)
    def add(self, task_id: int, offset_ms: int) -> None:
        self.wheel.add(task_id, self.now_ms + offset_ms)
        self.note(task_id, self.now_ms + offset_ms)

    @rule(pairs=st.lists(st.tuples(ids, offsets), max_size=12))
    def add_many(self, pairs: list[tuple[int, int]]) -> None:
        dues_ms = [self.now_ms + offset_ms for _, offset_ms in pairs]
        self.wheel.add_many([task_id for task_id, _ in pairs], dues_ms)
        for (task_id, _), due_ms in zip(pairs, dues_ms, strict=True):
            self.note(task_id, due_ms)

    @rule(first_id=ids, count=st.integers(1, 100), offset_ms=offsets, step_ms=st.integers(0, 3))
    def add_crowd(self, first_id: int, count: int, offset_ms: int, step_ms: int) -> None:
        for number in range(count):
            due_ms = self.now_ms + offset_ms + number * step_ms
            self.wheel.add((first_id + number) % 40, due_ms)
            self.note((first_id + number) % 40, due_ms)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 50), at_once=st.booleans())
    def cancel(self, data: st.DataObject, count: int, at_once: bool) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        some = self.live[index : index + count]
        if at_once:
            self.wheel.cancel_many([row[2] for row in some], [row[0] for row in some])
        for due_ms, _, task_id in some:
            self.drop_first(task_id, due_ms)
            if not at_once:
                self.wheel.cancel(task_id, due_ms)
        self.idle = False

    @precondition(lambda self: self.live)
    @rule(data=st.data(), offset_ms=st.none() | offsets)
    def reschedule(self, data: st.DataObject, offset_ms: int | None) -> None:
        """To another time, or to the very same."""
        due_ms, _, task_id = data.draw(st.sampled_from(self.live))
        self.drop_first(task_id, due_ms)
        self.wheel.cancel(task_id, due_ms)
        due_ms = due_ms if offset_ms is None else self.now_ms + offset_ms
        self.wheel.add(task_id, due_ms)
        self.note(task_id, due_ms)

    def drop_first(self, task_id: int, due_ms: int) -> None:
        handle = min(h for h in self.live if h[0] == due_ms and h[2] == task_id)
        self.live.remove(handle)
        self.gone.add((task_id, due_ms))

    # --- time ----------------------------------------------------------------------------------

    @rule(step_ms=near_offsets | st.integers(-500, 2_000), limit=limits)
    def one_call(self, step_ms: int, limit: int) -> None:
        """One advance, whatever is left."""
        self.now_ms += step_ms
        self.fire(limit)

    @rule(step_ms=near_offsets | st.integers(-500, 30_000), limit=st.integers(1, 60))
    def catch_up(self, step_ms: int, limit: int) -> None:
        self.now_ms += step_ms
        self.drain(limit)

    @rule(step_ms=near_offsets | st.integers(-500, 30_000))
    def move_on(self, step_ms: int) -> None:
        """Nothing fires, and the position moves unless something is due."""
        self.now_ms += step_ms
        self.wheel.catch_up(self.now_ms)
        if any(h[0] <= self.now_ms for h in self.live):
            assert self.wheel.position_ms == self.position_ms
        self.idle = False

    @rule(length_ms=st.integers(0, 300))
    def run_like_the_daemon(self, length_ms: int) -> None:
        """Advance only when the wheel asked for it: everything fires at its own millisecond."""
        self.run(length_ms, self.wheel.next_due_ms)

    @rule(length_ms=st.integers(0, 30_000))
    def run_by_jumps(self, length_ms: int) -> None:
        """Jump from one handle to the next: everything fires at its own millisecond, too."""
        self.run(length_ms, self.wheel.next_handle_ms)

    def run(self, length_ms: int, next_of: Callable[[int], int | None]) -> None:
        until_ms = self.now_ms + length_ms
        self.drain(20)
        for _ in range(STEPS_MAX):
            self.wheel.take_upcoming(1_000)
            next_ms = next_of(self.now_ms)
            if next_ms is None or next_ms > until_ms:
                return
            assert next_ms > self.now_ms
            self.now_ms = next_ms
            assert all(h[0] >= next_ms for h in self.live)
            self.drain(20)
        raise AssertionError("the wheel asks to be called again and again")

    @rule(limit=st.integers(0, 50))
    def take_upcoming(self, limit: int) -> None:
        assert len(self.wheel.take_upcoming(limit)) <= limit

    def drain(self, limit: int) -> None:
        for _ in range(STEPS_MAX):
            if not self.fire(limit):
                return
        raise AssertionError("there is always more")

    def fire(self, limit: int) -> bool:
        fired, dues_ms, more = self.wheel.advance(self.now_ms, limit)
        due = sorted(h for h in self.live if h[0] <= self.now_ms)
        assert len(fired) <= limit
        expected = due[: len(fired)]
        assert list(zip(dues_ms, fired, strict=True)) == [(h[0], h[2]) for h in expected]
        for handle in expected:
            self.live.remove(handle)
            self.gone.add((handle[2], handle[0]))
        assert more or len(fired) == len(due)
        self.idle = not more
        return more

    # --- always --------------------------------------------------------------------------------

    @invariant()
    def counts_what_is_live(self) -> None:
        assert len(self.wheel) == len(self.live)

    @invariant()
    def position_never_goes_back(self) -> None:
        assert self.wheel.position_ms >= self.position_ms
        self.position_ms = self.wheel.position_ms
        if self.idle:
            assert self.position_ms >= self.now_ms

    @invariant()
    def holds_what_has_not_fired(self) -> None:
        live = {(h[2], h[0]) for h in self.live}
        for task_id, due_ms in live:
            assert self.wheel.holds(task_id, due_ms)
        for task_id, due_ms in self.gone - live:
            assert not self.wheel.holds(task_id, due_ms)
        self.gone &= live

    @invariant()
    def next_due_is_not_late(self) -> None:
        next_ms = self.wheel.next_due_ms(self.now_ms)
        if not self.live:
            return
        assert next_ms is not None
        assert next_ms <= min(self.live)[0]
        handle_ms = self.wheel.next_handle_ms(self.now_ms)
        assert handle_ms is not None
        assert handle_ms <= min(self.live)[0]
        first_ms = self.wheel.first_ms()
        assert first_ms is not None
        assert first_ms <= min(self.live)[0]


class TinyLimitsMachine(TimingMachine):
    """The same with every limit so small that all work is cut into pieces."""

    patches: ClassVar[list[tuple[object, str, int]]] = [
        (timing, "WORK_MAX", 5),
        (timing, "AHEAD_MAX", 2),
        (buckets, "TOMBS_MIN", 2),
        (buckets, "DENSE_PER_SLOT", 1),
        (buckets, "CHUNK_ENTRIES", 4),
        (buckets, "SMALL", 2),
        (buckets, "SPENT_MIN", 1),
    ]


COMMON = settings(stateful_step_count=40, deadline=None, print_blob=True)

TestTimingMachine = TimingMachine.TestCase
TestTimingMachine.settings = settings(COMMON, max_examples=100)
TestTinyLimitsMachine = TinyLimitsMachine.TestCase
TestTinyLimitsMachine.settings = settings(COMMON, max_examples=30)


class AtLength(TinyLimitsMachine):
    """The same in more ways."""


TestTinyLimitsAtLength = pytest.mark.slow(AtLength.TestCase)
TestTinyLimitsAtLength.settings = settings(COMMON, max_examples=200)
