"""Both clocks, and what happens when the wall clock jumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.steering import WallClock
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


class Steered(SteeredSources):
    """A file steers it, as a daemon under test; the machine below stands still unless told."""

    def __init__(self, path: Path) -> None:
        self.mono = 0
        super().__init__(str(path))

    def mono_ms(self) -> int:
        return self.mono


def ahead_ms(found: SteeredSources) -> int:
    """Of the machine's wall clock, to the second: it runs on while the test does."""
    return round((found.wall_ms() - SystemSources().wall_ms()) / 1000) * 1000


def test_a_file_steps_the_wall_clock_of_one_process_and_not_its_steady_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steering = WallClock(tmp_path / "clock")
    monkeypatch.setenv(TEST_CLOCK_ENV, steering.env[TEST_CLOCK_ENV])
    found = sources()
    assert isinstance(found, SteeredSources)
    assert ahead_ms(found) == 0
    for offset_ms in (HOUR_MS, -3 * HOUR_MS, 30 * 24 * HOUR_MS, 0):
        steering.step(offset_ms - steering.offset_ms)
        assert ahead_ms(found) == offset_ms
    assert abs(found.mono_ms() - SystemSources().mono_ms()) < HOUR_MS
    assert Clock(HOUR_MS).steered


def test_what_a_steered_clock_has_drifted_stays_when_the_rate_changes(tmp_path: Path) -> None:
    steering = WallClock(tmp_path / "clock", rate=1.5)
    found = Steered(tmp_path / "clock")
    found.mono += 4 * HOUR_MS
    assert ahead_ms(found) == 2 * HOUR_MS
    steering.drift(1.0)
    found.mono += HOUR_MS
    assert ahead_ms(found) == 2 * HOUR_MS
    steering.step(HOUR_MS)
    steering.drift(0.0)
    found.mono += 2 * HOUR_MS
    assert ahead_ms(found) == HOUR_MS


def test_without_a_file_the_machines_clocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TEST_CLOCK_ENV, raising=False)
    assert type(sources()) is SystemSources
    assert not Clock(HOUR_MS).steered
    monkeypatch.setenv(TEST_CLOCK_ENV, str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        sources()
    (tmp_path / "short").write_bytes(b"x" * 15)
    monkeypatch.setenv(TEST_CLOCK_ENV, str(tmp_path / "short"))
    with pytest.raises(OSError, match="less than 16 bytes"):
        sources()
