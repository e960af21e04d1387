"""The only module that reads clocks.

``now_ms`` is wall time, rounded down to the millisecond because rounding up would fire tasks early.
``mono_ms`` is steady time, which includes suspension where the system supports it. A comparison of
the two detects jumps of wall time. The clock follows every jump back (the wheel never fires a task
twice) and jumps forward of up to ``hold_over_ms``. After a larger jump it is *held*: it continues
from the time before the jump, because tasks that a broken clock fires cannot be recalled. ``held``
stays true until wall time returns or an operator accepts it. A clock that is too far ahead of the
last time in the store is held in the same way at a start.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple, Protocol

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
JUMP_MS_MIN = 1_000
"""Minimum difference between the clocks that counts as a jump. The clock silently follows smaller
differences, which are drift (NTP slew)."""
TEST_CLOCK_ENV = "TICKWHEEL_TEST_CLOCK"
"""Environment variable that contains the path of a test's clock file. See ``SteeredSources``."""


class Now(NamedTuple):
    """One reading of both clocks."""

    now_ms: int
    mono_ms: int


class Sources(Protocol):
    """The source of both times, which tests can replace."""

    def wall_ms(self) -> int: ...

    def mono_ms(self) -> int: ...


class SystemSources:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def mono_ms(self) -> int:
        return time.clock_gettime_ns(_STEADY) // 1_000_000


class SteeredSources(SystemSources):
    """The machine's clocks, with a wall clock that a test moves while the process runs.

    The file contains 16 bytes, little-endian: ``offset_ms`` (int64), which is added to the
    machine's wall clock, and ``rate`` (float64), the wall clock's speed relative to the machine's;
    1.0 means no drift. The file is memory-mapped, so a change takes effect at the next reading.
    Accumulated drift starts at 0 in each process and is kept when the rate changes. Steady time is
    not affected.
    """

    LAYOUT = struct.Struct("<qd")

    def __init__(self, path: str) -> None:
        """Raise OSError if the file is missing or too short."""
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.LAYOUT.size:
                raise OSError(f"{TEST_CLOCK_ENV}: {path} has fewer than {self.LAYOUT.size} bytes")
            self._map = mmap.mmap(file.fileno(), self.LAYOUT.size, access=mmap.ACCESS_READ)
        self._drift_ms = 0.0
        self._last_mono_ms = self.mono_ms()

    def wall_ms(self) -> int:
        offset_ms, rate = self.LAYOUT.unpack_from(self._map)
        mono_ms = self.mono_ms()
        self._drift_ms += (mono_ms - self._last_mono_ms) * (rate - 1.0)
        self._last_mono_ms = mono_ms
        return super().wall_ms() + int(offset_ms) + int(self._drift_ms)


class StandingSources:
    """Clocks that stand still until a test moves them, for ``tickwheel.testing``."""

    def __init__(self, now_ms: int) -> None:
        self._began_ms = self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def mono_ms(self) -> int:
        return self.now_ms - self._began_ms


def sources() -> Sources:
    """Return the clocks of this process. Raise OSError if a test's clock file is unusable."""
    path = os.environ.get(TEST_CLOCK_ENV)
    return SteeredSources(path) if path else SystemSources()


class Clock:
    """Reads both clocks and detects jumps. ``jumps`` counts jumps; ``last_jump_ms`` is signed."""

    def __init__(self, hold_over_ms: int, clock_sources: Sources | None = None) -> None:
        self._sources = clock_sources or sources()
        self._hold_over_ms = hold_over_ms
        self._limit_ms = hold_over_ms
        """How many milliseconds the wall clock can be ahead before the clock is held."""
        self.is_steered = isinstance(self._sources, SteeredSources)
        """Whether a test's clock file moves the wall clock."""
        self.is_standing = isinstance(self._sources, StandingSources)
        """Whether time moves only when a test moves it, so that timers are useless."""
        self._has_fractions = isinstance(self._sources, SystemSources)
        self._offset_ms = self._sources.wall_ms() - self._sources.mono_ms()
        self.jumps = 0
        self.last_jump_ms = 0
        self.held = False
        self.held_at_start = False
        """Whether the clock has been held since a start, because the store's time is too old."""

    def read(self) -> Now:
        mono_ms = self._sources.mono_ms()
        wall_ms = self._sources.wall_ms()
        jump_ms = wall_ms - mono_ms - self._offset_ms
        if -JUMP_MS_MIN < jump_ms < JUMP_MS_MIN:
            self._follow(jump_ms)
            return Now(wall_ms, mono_ms)
        return Now(self._after_jump(wall_ms, mono_ms, jump_ms), mono_ms)

    def ns_within_ms(self) -> int:
        """Return how many nanoseconds of the current millisecond of wall time have passed, or 0 for
        a test's clock, which counts whole milliseconds."""
        return time.time_ns() % 1_000_000 if self._has_fractions else 0

    def begin_at(self, position_ms: int, limit_ms: int) -> int:
        """Hold the clock at ``position_ms``, the last time in the store, if that is more than
        ``limit_ms`` ago. Return how far, in ms, the wall clock is ahead, or 0 if it is not held.

        A single reading cannot tell whether the daemon was down for long or the clock is wrong, and
        fired tasks cannot be recalled.
        """
        now_ms, mono_ms = self.read()
        # Repeat a decision of an earlier start, because another leader may have run since then.
        wall_ms = self._sources.wall_ms() if self.held_at_start else now_ms
        if wall_ms - position_ms <= limit_ms:
            if self.held_at_start:
                self.accept()
            return 0
        if not self.held_at_start or now_ms < position_ms:
            self._offset_ms = position_ms - mono_ms
        self._limit_ms = limit_ms
        self.held = self.held_at_start = True
        return self.ahead_ms

    def accept(self) -> None:
        """Follow the wall clock, on the command of an operator."""
        if self.held:
            jump_ms = self.ahead_ms
            self._count(jump_ms)
            self._follow(jump_ms)

    @property
    def ahead_ms(self) -> int:
        """How many milliseconds the wall clock is ahead of the time that ``read`` returns."""
        return self._sources.wall_ms() - self._sources.mono_ms() - self._offset_ms

    def _after_jump(self, wall_ms: int, mono_ms: int, jump_ms: int) -> int:
        if jump_ms > self._limit_ms:
            if not self.held:
                self.held = True
                self._count(jump_ms)
            return mono_ms + self._offset_ms
        self._count(jump_ms)
        self._follow(jump_ms)
        return wall_ms

    def _follow(self, jump_ms: int) -> None:
        self._offset_ms += jump_ms
        self.held = self.held_at_start = False
        self._limit_ms = self._hold_over_ms

    def _count(self, jump_ms: int) -> None:
        self.jumps += 1
        self.last_jump_ms = jump_ms
