"""The only place that reads clocks.

``now_ms`` is wall time, floored to the millisecond, so that nothing is early. ``mono_ms``
counts steadily, through suspension too where the system offers that. Wall time may jump; a
jump is noticed by comparing both. A jump back is followed (the wheel never refires). A jump
forward is followed too, unless it is larger than ``hold_over_ms``: then the clock goes on
from the time before the jump and ``held`` stays true until the wall clock is back or the
daemon is restarted, because firing a year's tasks on a broken clock cannot be undone.
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
"""For tests: the file that steers this process's wall clock. See ``SteeredSources``."""


class Now(NamedTuple):
    """One reading of both clocks."""

    now_ms: int
    mono_ms: int


class Sources(Protocol):
    """Where readings come from; tests put their own here."""

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


def sources() -> Sources:
    """The clocks of this process. Raises OSError: a test's file cannot be used."""
    path = os.environ.get(TEST_CLOCK_ENV)
    return SteeredSources(path) if path else SystemSources()


class Clock:
    """Readings with jumps noticed. ``jumps`` counts them; ``last_jump_ms`` is signed."""

    def __init__(self, hold_over_ms: int, given: Sources | None = None) -> None:
        self._sources = given or sources()
        self._hold_over_ms = hold_over_ms
        self.steered = isinstance(self._sources, SteeredSources)
        """By a test: this is not the machine's time."""
        self._offset_ms = self._sources.wall_ms() - self._sources.mono_ms()
        self.jumps = 0
        self.last_jump_ms = 0
        self.held = False

    def read(self) -> Now:
        mono_ms = self._sources.mono_ms()
        wall_ms = self._sources.wall_ms()
        jump_ms = wall_ms - mono_ms - self._offset_ms
        if -JUMP_MS_MIN < jump_ms < JUMP_MS_MIN:
            self._offset_ms += jump_ms
            self.held = False
            return Now(wall_ms, mono_ms)
        return Now(self._jumped(wall_ms, mono_ms, jump_ms), mono_ms)

    def _jumped(self, wall_ms: int, mono_ms: int, jump_ms: int) -> int:
        if jump_ms > self._hold_over_ms:
            if not self.held:
                self.held = True
                self._count(jump_ms)
            return mono_ms + self._offset_ms
        self._count(jump_ms)
        self.held = False
        self._offset_ms += jump_ms
        return wall_ms

    def _count(self, jump_ms: int) -> None:
        self.jumps += 1
        self.last_jump_ms = jump_ms
