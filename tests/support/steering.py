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
    """``offset_ms`` and ``rate`` as they stand in the file."""

    def __init__(self, path: Path, offset_ms: int = 0, rate: float = 1.0) -> None:
        path.write_bytes(SteeredSources.LAYOUT.pack(offset_ms, rate))
        self.path = path
        self.offset_ms = offset_ms
        self.rate = rate

    @property
    def env(self) -> dict[str, str]:
        """For the process that is to follow it."""
        return {TEST_CLOCK_ENV: str(self.path)}

    def step(self, by_ms: int) -> None:
        """Jump."""
        self.offset_ms += by_ms
        self._write()

    def drift(self, rate: float) -> None:
        """From now on so many milliseconds for each of the machine's."""
        self.rate = rate
        self._write()

    def _write(self) -> None:
        # In place: the process has mapped this very file.
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, SteeredSources.LAYOUT.pack(self.offset_ms, self.rate), 0)
        finally:
            os.close(fd)
