"""Daemons for these tests; whatever a test leaves running is killed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """``make(lease_default_s=1, …)``: a running daemon with these settings."""
    made: list[Daemon] = []

    def start(**options: Any) -> Daemon:
        made.append(Daemon(tmp_path / f"daemon-{len(made)}", **options).start())
        return made[-1]

    yield start
    for daemon in made:
        daemon.kill()
