"""Stores on a PostgreSQL: the one that tests share, or one of the test's own, to stop and break."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from persistence.store_subject import Subject
from support.postgresql import PostgresServer
from tickwheel.persistence.postgresql import PostgresStore, options_from

QUICK = "call_ms=1000&connect_ms=1000"
Make = Callable[..., Subject]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of the test's own."""
    with PostgresServer.running() as running:
        yield running


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes stores by their URL; whatever happens, they are closed."""
    made: list[Subject] = []

    def make_one(url: str) -> Subject:
        made.append(Subject(PostgresStore(options_from(url))))
        return made[-1]

    yield make_one
    for subject in made:
        await subject.store.close(clean=False)


@pytest.fixture
async def subject(make: Make, shared_postgres: PostgresServer) -> Subject:
    """An open store on the shared server, with small parts."""
    found = make(shared_postgres.url("part_rows=100"))
    await found.open()
    return found


def store(subject: Subject) -> PostgresStore:
    assert isinstance(subject.store, PostgresStore)
    return subject.store
