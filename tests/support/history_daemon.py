"""Start a real daemon with a history, and wait for its files."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

from support.daemon import Daemon
from support.waiting import comes
from tickwheel.history import spool
from tickwheel.history.segments import STATE

PATIENCE_S = 60.0


def daemon_in(folder: Path, **settings: Any) -> Daemon:
    history = {"history_dir": folder / "history", "history_bodies": "true"}
    return Daemon(folder, **(history | settings))


async def taken_up(history: Path) -> None:
    """Wait until the writer has converted every spool file."""
    await comes(lambda: not spools(history))


def spools(history: Path) -> list[Path]:
    """Return the remaining spool files."""
    folders = [path for path in (history / STATE).iterdir() if path.is_dir()]
    return [folder / str(name) for folder in folders for name in spool.files(folder)]


def metric(daemon: Daemon, name: str) -> float:
    """Return the current value of a metric without labels."""
    with urllib.request.urlopen(f"{daemon.http}/metrics", timeout=60) as answer:  # noqa: S310  # our own address
        match = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert match is not None
    return float(match[1])
