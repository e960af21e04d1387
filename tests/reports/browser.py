"""Chromium without a window: the page as its script leaves it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# The shell has no windows to draw: a quarter less processor time for the console's tests.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0


class Browser:
    """One program; every page is a process of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        self._program, self._profile = program, profile

    def dom(self, page: Path) -> str:
        """The document after its script ran; no request leaves the machine."""
        done = subprocess.run(
            [
                self._program, "--headless", "--disable-gpu", "--no-first-run",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                f"--user-data-dir={self._profile}", "--host-resolver-rules=MAP * ~NOTFOUND",
                "--window-size=1280,1600", "--virtual-time-budget=5000", "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        return done.stdout


def found(profile: Path) -> Browser:
    """Fails where CI is set and there is none; skips elsewhere."""
    for name in NAMES:
        program = shutil.which(name)
        if program is not None:
            return Browser(program, profile)
    reason = "no chromium: apt install chromium-headless-shell"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
