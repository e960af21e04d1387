"""The wall clock of one daemon process, moved by a test: see ``tickwheel.clock``.

clock = WallClock(folder / "clock")
daemon = Daemon(folder, env=clock.env)
... clock.step(HOUR_MS) ... clock.drift(1.001)
"""

from __future__ import annotations

import os
from pathlib import Path

from tickwheel.clock import TEST_CLOCK_ENV, SteeredSources


class WallClock:
    """Write `offset_ms` and `rate` into the file."""

    def __init__(self, path: Path, offset_ms: int = 0, rate: float = 1.0) -> None:
        path.write_bytes(SteeredSources.LAYOUT.pack(offset_ms, rate))
        self.path = path
        self.offset_ms = offset_ms
        self.rate = rate

    @property
    def env(self) -> dict[str, str]:
        """Return the environment of a process that is to follow the file."""
        return {TEST_CLOCK_ENV: str(self.path)}

    def step(self, by_ms: int) -> None:
        """Jump by `by_ms` milliseconds."""
        self.offset_ms += by_ms
        self._write()

    def drift(self, rate: float) -> None:
        """Let the clock run at `rate` times the machine's from now on."""
        self.rate = rate
        self._write()

    def _write(self) -> None:
        # In place: the process has mapped this very file.
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, SteeredSources.LAYOUT.pack(self.offset_ms, self.rate), 0)
        finally:
            os.close(fd)
