"""A daemon that the tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.daemon import Daemon
from tickwheel import Client


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("contrib")
    with Daemon(folder, retry_base_s=0.05, retry_jitter=0, retry_max=2) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
async def client(running: Daemon) -> AsyncIterator[Client]:
    async with Client(running.url) as client:
        yield client
