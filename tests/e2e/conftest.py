"""Real daemons for the end-to-end tests; whatever a test leaves running is ended after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.redis_server import RedisServer


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon on the embedded store, with HTTP, all settings at their defaults."""
    return make_daemon(http=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start()
    yield made
    made.kill()
