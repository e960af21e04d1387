"""The only place that reads clocks.

``now_ms`` is wall time, floored to the millisecond, so that nothing is early. ``mono_ms``
counts steadily, through suspension too where the system offers that. Wall time may jump; a
jump is noticed by comparing both. A jump back is followed (the wheel never refires). A jump
forward is followed too, unless it is larger than ``hold_over_ms``: then the clock goes on
from the time before the jump and ``held`` stays true until the wall clock is back or somebody
accepts it, because firing a year's tasks on a broken clock cannot be undone. A start is held in
the same way when the store's last time is too long ago.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple, Protocol

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
JUMP_MS_MIN = 1_000
"""Smaller differences between the two clocks are drift (NTP slew), and followed silently."""
TEST_CLOCK_ENV = "TICKWHEEL_TEST_CLOCK"
"""For tests: names a file that steers this process's wall clock. See ``SteeredSources``."""


class Now(NamedTuple):
    """One reading of both clocks."""

    now_ms: int
    mono_ms: int


class Sources(Protocol):
    """Reads clocks; tests put their own here."""

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

    The file holds 16 bytes, little-endian: ``offset_ms`` (int64), which is added to the
    machine's wall clock, and ``rate`` (float64): how many milliseconds the wall clock goes on in
    one of the machine; 1.0 is no drift. It is mapped, so a change counts from the next reading
    on. What has drifted is kept when the rate changes, and begins at nothing with each process.
    The steady clock is not affected.
    """

    LAYOUT = struct.Struct("<qd")

    def __init__(self, path: str) -> None:
        """Raises OSError when the file is not there or too short."""
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.LAYOUT.size:
                raise OSError(f"{TEST_CLOCK_ENV}: {path} has less than {self.LAYOUT.size} bytes")
            self._map = mmap.mmap(file.fileno(), self.LAYOUT.size, access=mmap.ACCESS_READ)
        self._drift_ms = 0.0
        self._seen_mono_ms = self.mono_ms()

    def wall_ms(self) -> int:
        offset_ms, rate = self.LAYOUT.unpack_from(self._map)
        mono_ms = self.mono_ms()
        self._drift_ms += (mono_ms - self._seen_mono_ms) * (rate - 1.0)
        self._seen_mono_ms = mono_ms
        return super().wall_ms() + int(offset_ms) + int(self._drift_ms)


class StandingSources:
    """A clock that stands still until it is moved, for ``tickwheel.testing``."""

    def __init__(self, now_ms: int) -> None:
        self._began_ms = self.now_ms = now_ms

    def wall_ms(self) -> int:
        return self.now_ms

    def mono_ms(self) -> int:
        return self.now_ms - self._began_ms


def sources() -> Sources:
    """The clocks of this process. Raises OSError if a test's file cannot be used."""
    path = os.environ.get(TEST_CLOCK_ENV)
    return SteeredSources(path) if path else SystemSources()


class Clock:
    """Readings with jumps noticed. ``jumps`` counts them; ``last_jump_ms`` is signed."""

    def __init__(self, hold_over_ms: int, given: Sources | None = None) -> None:
        self._sources = given or sources()
        self._hold_over_ms = hold_over_ms
        self._limit_ms = hold_over_ms
        """How far, in ms, the wall clock may be ahead; another limit while a start is held."""
        self.steered = isinstance(self._sources, SteeredSources)
        """Whether a test steers the time."""
        self.stands = isinstance(self._sources, StandingSources)
        """Whether no time passes by itself, so that no timer is worth setting."""
        self._has_fractions = isinstance(self._sources, SystemSources)
        self._offset_ms = self._sources.wall_ms() - self._sources.mono_ms()
        self.jumps = 0
        self.last_jump_ms = 0
        self.held = False
        self.held_at_start = False
        """Whether a start holds the clock: it is too far ahead of what the store has seen."""

    def read(self) -> Now:
        mono_ms = self._sources.mono_ms()
        wall_ms = self._sources.wall_ms()
        jump_ms = wall_ms - mono_ms - self._offset_ms
        if -JUMP_MS_MIN < jump_ms < JUMP_MS_MIN:
            self._follow(jump_ms)
            return Now(wall_ms, mono_ms)
        return Now(self._jumped(wall_ms, mono_ms, jump_ms), mono_ms)

    def into_ms_ns(self) -> int:
        """How many nanoseconds the wall clock is into its millisecond; 0 for a test's clock, which
        counts milliseconds."""
        return time.time_ns() % 1_000_000 if self._has_fractions else 0

    def begin_at(self, position_ms: int, limit_ms: int) -> int:
        """A store is taken over that saw ``position_ms`` last: if that is more than ``limit_ms``
        ago, time goes on from there, held. By how much the wall clock is ahead then, else 0.

        One reading cannot distinguish a long absence from a wrong clock, and what fires cannot be
        undone.
        """
        now_ms, mono_ms = self.read()
        # What an earlier start has held is judged anew: others may have led since.
        known_ms = self._sources.wall_ms() if self.held_at_start else now_ms
        if known_ms - position_ms <= limit_ms:
            if self.held_at_start:
                self.accept()
            return 0
        if not self.held_at_start or now_ms < position_ms:
            self._offset_ms = position_ms - mono_ms
        self._limit_ms = limit_ms
        self.held = self.held_at_start = True
        return self.ahead_ms

    def accept(self) -> None:
        """Trust the wall clock, as somebody says who knows."""
        if self.held:
            jump_ms = self.ahead_ms
            self._count(jump_ms)
            self._follow(jump_ms)

    @property
    def ahead_ms(self) -> int:
        """How far, in ms, the wall clock is ahead of the time that is given out."""
        return self._sources.wall_ms() - self._sources.mono_ms() - self._offset_ms

    def _jumped(self, wall_ms: int, mono_ms: int, jump_ms: int) -> int:
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
