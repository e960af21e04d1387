"""Both clocks, and what happens when the wall clock jumps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.engine_rig import Rig
from support.steering import WallClock
from tickwheel.clock import TEST_CLOCK_ENV, Clock, Now, SteeredSources, SystemSources, sources

HOUR_MS = 3_600_000
START_MS = 1_800_000_000_000


class Sources:
    def __init__(self) -> None:
        self.wall = START_MS
        self.mono = 0

    def wall_ms(self) -> int:
        return self.wall

    def mono_ms(self) -> int:
        return self.mono

    def pass_ms(self, wall: int, mono: int | None = None) -> None:
        self.wall += wall
        self.mono += wall if mono is None else mono


def made(hold_over_ms: int = 24 * HOUR_MS) -> tuple[Clock, Sources]:
    sources = Sources()
    return Clock(hold_over_ms, sources), sources


def test_time_passes_on_both_clocks() -> None:
    clock, sources = made()
    sources.pass_ms(5)
    assert clock.read() == Now(START_MS + 5, 5)
    assert clock.jumps == 0


def test_drift_is_followed_silently() -> None:
    clock, sources = made()
    for _ in range(100):
        sources.pass_ms(1000, 999)
        assert clock.read().now_ms == sources.wall
    assert clock.jumps == 0


def test_a_jump_back_is_followed_and_counted() -> None:
    clock, sources = made()
    sources.pass_ms(-HOUR_MS, 0)
    assert clock.read().now_ms == START_MS - HOUR_MS
    assert (clock.jumps, clock.last_jump_ms, clock.held) == (1, -HOUR_MS, False)
    assert clock.read().now_ms == START_MS - HOUR_MS
    assert clock.jumps == 1


def test_a_jump_ahead_is_followed_and_counted() -> None:
    clock, sources = made()
    sources.pass_ms(HOUR_MS, 0)
    assert clock.read().now_ms == START_MS + HOUR_MS
    assert (clock.jumps, clock.last_jump_ms, clock.held) == (1, HOUR_MS, False)


def test_a_jump_ahead_above_the_limit_is_held_until_the_clock_is_back() -> None:
    clock, sources = made(hold_over_ms=HOUR_MS)
    sources.pass_ms(2 * HOUR_MS, 0)
    assert clock.read().now_ms == START_MS
    assert clock.held
    sources.pass_ms(10)
    assert clock.read().now_ms == START_MS + 10
    assert clock.jumps == 1
    sources.pass_ms(-2 * HOUR_MS, 0)
    assert clock.read().now_ms == START_MS + 10
    assert not clock.held


def test_the_limit_of_a_clock_jump_is_inclusive() -> None:
    clock, sources = made(hold_over_ms=HOUR_MS)
    sources.pass_ms(HOUR_MS, 0)
    assert clock.read().now_ms == START_MS + HOUR_MS
    assert not clock.held
    clock, sources = made(hold_over_ms=HOUR_MS)
    sources.pass_ms(HOUR_MS + 1, 0)
    assert clock.read().now_ms == START_MS
    assert clock.held


# --- what is due while it jumps -------------------------------------------------------------


class Jumping:
    """An engine whose time is the clock's, and what is known of it from outside."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock, self.sources = made(hold_over_ms=HOUR_MS)
        self.rig = Rig()
        self.consumer = self.rig.subscribe(lease_ms=10**12)
        self.believed_ms = START_MS
        """What time it is, by the rules: a jump of over an hour ahead is not believed."""
        self.due_ms: dict[int, int] = {}
        self.came: list[int] = []

    def move(self, wall_ms: int, mono_ms: int) -> None:
        self.sources.pass_ms(wall_ms, mono_ms)
        wall, expected_ms = self.sources.wall, self.believed_ms + mono_ms
        self.believed_ms = wall if wall - expected_ms <= HOUR_MS else expected_ms
        self.rig.now_ms, self.rig.mono_ms = self.clock.read()
        assert self.rig.now_ms == self.believed_ms

    def step(self) -> None:
        what = self.random.choice(["pass", "pass", "jump", "far", "back", "right", "task", "rest"])
        some_ms = self.random.choice([1, 40, 1_500, 30_000])
        if what == "pass":
            self.move(some_ms, some_ms)
        elif what == "jump":
            self.move(self.random.choice([some_ms, HOUR_MS - 1_000]), 0)
        elif what == "far":
            self.move(self.random.choice([HOUR_MS + 1, 400 * 24 * HOUR_MS]), 0)
        elif what == "back":
            self.move(-self.random.choice([some_ms, HOUR_MS, 400 * 24 * HOUR_MS]), 0)
        elif what == "right":
            self.move(self.believed_ms - self.sources.wall, 0)
        elif what == "task":
            delay_ms = self.random.choice([0, some_ms, 2 * HOUR_MS, 100 * 24 * HOUR_MS])
            task_id = self.rig.enqueue(delay_ms=delay_ms)
            self.due_ms[task_id] = self.rig.now_ms + delay_ms
        else:
            self.takes(self.random.choice([0, 1, 1_000]))
        self.tick()

    def takes(self, count: int) -> None:
        self.consumer.prefetch = count
        self.rig.core.reconsider(self.consumer)

    def tick(self) -> None:
        for got in self.rig.tick():
            assert self.due_ms[got.id] == got.due_ms <= self.believed_ms, "early"
            assert got.id not in self.came, "twice"
            assert (got.attempt, self.rig.ack(got)) == (1, "acked")
            self.came.append(got.id)
        self.rig.commit()
        if self.consumer.prefetch == 1_000:
            late = {i for i, due in self.due_ms.items() if due <= self.believed_ms}
            assert late <= set(self.came), "held back without need"


@pytest.mark.parametrize("seed", range(20))
def test_clock_jumps_fire_no_task_early_or_twice(seed: int) -> None:
    jumping = Jumping(seed)
    for _ in range(150):
        jumping.step()
    jumping.takes(1_000)
    jumping.move(jumping.believed_ms - jumping.sources.wall, 0)
    for due_ms in sorted(jumping.due_ms.values()):
        wait_ms = max(0, due_ms - jumping.believed_ms)
        jumping.move(wait_ms, wait_ms)
        jumping.tick()
    assert sorted(jumping.came) == sorted(jumping.due_ms)


# --- a start -------------------------------------------------------------------------------

DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS


def test_a_start_more_than_a_week_later_is_held() -> None:
    clock, _ = made()
    assert clock.begin_at(START_MS - WEEK_MS, WEEK_MS) == 0
    assert (clock.read().now_ms, clock.held) == (START_MS, False)
    position_ms = START_MS - WEEK_MS - 1
    assert clock.begin_at(position_ms, WEEK_MS) == WEEK_MS + 1
    assert (clock.read().now_ms, clock.held, clock.held_at_start) == (position_ms, True, True)


def test_a_start_with_an_older_clock_follows_it() -> None:
    clock, _ = made()
    assert clock.begin_at(START_MS + 10 * WEEK_MS, WEEK_MS) == 0
    assert (clock.read().now_ms, clock.held) == (START_MS, False)


def test_time_passes_during_a_held_start() -> None:
    clock, sources = made()
    clock.begin_at(START_MS - 30 * DAY_MS, WEEK_MS)
    sources.pass_ms(HOUR_MS)
    assert clock.read().now_ms == START_MS - 30 * DAY_MS + HOUR_MS
    assert clock.ahead_ms == 30 * DAY_MS
    assert clock.held


@pytest.mark.parametrize("left_ms", [WEEK_MS, 2 * DAY_MS, 0, -DAY_MS])
def test_a_held_start_continues_when_the_clock_is_corrected(left_ms: int) -> None:
    """Set back to within the limit of a start, however far beyond that of a jump."""
    clock, sources = made()
    clock.begin_at(START_MS - 30 * DAY_MS, WEEK_MS)
    sources.pass_ms(-30 * DAY_MS + WEEK_MS + 1, 0)
    clock.read()
    assert clock.held
    sources.pass_ms(left_ms - WEEK_MS - 1, 0)
    assert clock.read().now_ms == START_MS - 30 * DAY_MS + left_ms
    assert not clock.held
    sources.pass_ms(DAY_MS + 1, 0)
    clock.read()
    assert clock.held, "a jump has its own limit again"


@pytest.mark.parametrize("how", ["start", "jump"])
def test_an_operator_can_accept_a_held_clock(how: str) -> None:
    clock, sources = made()
    if how == "start":
        clock.begin_at(START_MS - 30 * DAY_MS, WEEK_MS)
    else:
        sources.pass_ms(30 * DAY_MS, 0)
        clock.read()
    assert clock.held
    clock.accept()
    assert (clock.read().now_ms, clock.held) == (sources.wall, False)
    assert (clock.jumps, clock.last_jump_ms) == (2 if how == "jump" else 1, 30 * DAY_MS)
    clock.accept()
    assert clock.read().now_ms == sources.wall


def test_each_takeover_judges_a_held_start_again() -> None:
    """Another daemon may have led in between, and its clock was believed."""
    clock, sources = made()
    clock.begin_at(START_MS - 30 * DAY_MS, WEEK_MS)
    assert clock.begin_at(START_MS - 20 * DAY_MS, WEEK_MS) == 20 * DAY_MS
    assert (clock.read().now_ms, clock.held) == (START_MS - 20 * DAY_MS, True)
    sources.pass_ms(HOUR_MS)
    assert clock.begin_at(START_MS - 20 * DAY_MS, WEEK_MS) == 20 * DAY_MS
    assert clock.read().now_ms == START_MS - 20 * DAY_MS + HOUR_MS, "not back again"
    assert clock.begin_at(START_MS, WEEK_MS) == 0
    assert (clock.read().now_ms, clock.held) == (sources.wall, False)


def test_a_standby_takes_over_at_its_held_time() -> None:
    clock, sources = made()
    sources.pass_ms(60 * DAY_MS, 0)
    assert clock.read().now_ms == START_MS
    assert clock.begin_at(START_MS - DAY_MS, WEEK_MS) == 0
    assert (clock.read().now_ms, clock.held, clock.held_at_start) == (START_MS, True, False)
    assert clock.begin_at(START_MS - 30 * DAY_MS, WEEK_MS) == 90 * DAY_MS
    assert (clock.read().now_ms, clock.held_at_start) == (START_MS - 30 * DAY_MS, True)


def test_the_machines_clocks_run() -> None:
    clock = Clock(24 * HOUR_MS, SystemSources())
    first, second = clock.read(), clock.read()
    assert second.mono_ms >= first.mono_ms
    assert first.now_ms > 1_700_000_000_000


class Steered(SteeredSources):
    """A file steers it, as a daemon under test; the machine below stands still until moved."""

    def __init__(self, path: Path) -> None:
        self.mono = 0
        super().__init__(str(path))

    def mono_ms(self) -> int:
        return self.mono


def ahead_ms(found: SteeredSources) -> int:
    """Of the machine's wall clock, to the second: it runs on while the test does."""
    return round((found.wall_ms() - SystemSources().wall_ms()) / 1000) * 1000


def test_a_clock_file_steps_only_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering = WallClock(tmp_path / "clock")
    monkeypatch.setenv(TEST_CLOCK_ENV, steering.env[TEST_CLOCK_ENV])
    result = sources()
    assert isinstance(result, SteeredSources)
    assert ahead_ms(result) == 0
    for offset_ms in (HOUR_MS, -3 * HOUR_MS, 30 * 24 * HOUR_MS, 0):
        steering.step(offset_ms - steering.offset_ms)
        assert ahead_ms(result) == offset_ms
    assert abs(result.mono_ms() - SystemSources().mono_ms()) < HOUR_MS
    assert Clock(HOUR_MS).is_steered


def test_a_rate_change_keeps_a_steered_clocks_drift(tmp_path: Path) -> None:
    steering = WallClock(tmp_path / "clock", rate=1.5)
    result = Steered(tmp_path / "clock")
    result.mono += 4 * HOUR_MS
    assert ahead_ms(result) == 2 * HOUR_MS
    steering.drift(1.0)
    result.mono += HOUR_MS
    assert ahead_ms(result) == 2 * HOUR_MS
    steering.step(HOUR_MS)
    steering.drift(0.0)
    result.mono += 2 * HOUR_MS
    assert ahead_ms(result) == HOUR_MS


def test_without_a_file_the_machines_clocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TEST_CLOCK_ENV, raising=False)
    assert type(sources()) is SystemSources
    assert not Clock(HOUR_MS).is_steered
    monkeypatch.setenv(TEST_CLOCK_ENV, str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        sources()
    (tmp_path / "short").write_bytes(b"x" * 15)
    monkeypatch.setenv(TEST_CLOCK_ENV, str(tmp_path / "short"))
    with pytest.raises(OSError, match="fewer than 16 bytes"):
        sources()
