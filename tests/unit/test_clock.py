"""Both clocks, and what happens when the wall clock jumps."""

from __future__ import annotations

from tickwheel.clock import Clock, Now, SystemSources

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


def test_a_jump_at_the_limit_is_followed_and_one_ms_more_is_held() -> None:
    clock, sources = made(hold_over_ms=HOUR_MS)
    sources.pass_ms(HOUR_MS, 0)
    assert clock.read().now_ms == START_MS + HOUR_MS
    assert not clock.held
    clock, sources = made(hold_over_ms=HOUR_MS)
    sources.pass_ms(HOUR_MS + 1, 0)
    assert clock.read().now_ms == START_MS
    assert clock.held


def test_the_machines_clocks_run() -> None:
    clock = Clock(24 * HOUR_MS, SystemSources())
    first, second = clock.read(), clock.read()
    assert second.mono_ms >= first.mono_ms
    assert first.now_ms > 1_700_000_000_000
