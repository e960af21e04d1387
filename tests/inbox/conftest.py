"""One PostgreSQL server for all tests of inboxes of a process; each test has its own database. The
daemons and takers of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import asyncpg
import pytest

from support.postgresql import PostgresServer
from tickwheel.inbox import open_inbox
from tickwheel.inbox.taker import Taker
from tickwheel.waiting import cancel_all

_numbers = count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with PostgresServer.running(max_prepared_transactions="4") as running:
        yield running


@pytest.fixture
async def database(server: PostgresServer) -> AsyncIterator[str]:
    """The URL of an empty database."""
    name = f"app{next(_numbers)}"
    admin = await asyncpg.connect(server.database_url())
    try:
        await admin.execute(f"CREATE DATABASE {name}")
        yield server.database_url(name)
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


class Taking:
    """A taker in this process, which can be killed and started again."""

    def __init__(self, url: str, inbox: str) -> None:
        self._url = url
        self._inbox = inbox
        self.options: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        self.taker = Taker(open_inbox(self._inbox), self._url, **self.options)
        self._task = asyncio.create_task(self.taker.run())

    async def kill(self) -> None:
        """End it at once, wherever it is."""
        await cancel_all([self._task])

    async def stop(self) -> None:
        self.taker.stop()
        await self._task

    async def end(self) -> None:
        """Wait until it ends by itself, and raise its error."""
        await self._task


@pytest.fixture
async def taking() -> AsyncIterator[Callable[..., Taking]]:
    """``taking(url, inbox)``: a taker that is running."""
    made: list[Taking] = []

    def make(url: str, inbox: str) -> Taking:
        made.append(Taking(url, inbox))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(BaseException):
            await one.kill()
