"""Real daemons for the end-to-end tests; whatever a test leaves running is ended after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.redis_server import RedisServer
from tickwheel import Client


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """``make_daemon(lease_default_s=1, …)``: a Daemon with these settings, not started yet."""
    made: list[Daemon] = []

    def make(kind: type[Daemon] = Daemon, **options: Any) -> Daemon:
        made.append(kind(tmp_path / f"daemon-{len(made)}", **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A running daemon on the embedded store, with HTTP, all settings at their defaults."""
    return make_daemon(http=True).start()


@pytest.fixture
async def client(running: Daemon) -> AsyncIterator[Client]:
    """A client of the daemon that a module's tests share."""
    async with Client(running.url) as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """One of its own for each test."""
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start()
    yield made
    made.kill()
