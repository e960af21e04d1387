"""A daemon that follows a test's script, a client of it, and the connection of the two."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.fake_daemon import FakeDaemon, Peer
from tickwheel import Client


@pytest.fixture
async def daemon() -> AsyncIterator[FakeDaemon]:
    async with FakeDaemon() as made:
        yield made


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[Client]:
    async with daemon.client() as made:
        yield made


@pytest.fixture
async def peer(daemon: FakeDaemon, client: Client) -> Peer:
    return await daemon.peer()
