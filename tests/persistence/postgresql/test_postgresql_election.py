"""The leader's lease in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from persistence.postgresql.conftest import Make
from support.ports import free_port
from support.postgresql import PostgresServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.persistence import open_election
from tickwheel.persistence.contract import (
    Election,
    Leader,
    Standby,
    StoreError,
)

ME = Leader("a/1", "a:7355", 17, 0, "boot/1/2/3", "http://a")
OTHER = Leader("b/2", "b:7355", 18, 0)
TTL_MS = 60_000


async def elect(url: str, ttl_ms: int = TTL_MS) -> Election:
    found = open_election(url, ttl_ms)
    assert found is not None
    await found.prepare()
    return found


@pytest.fixture
def url(shared_postgres: PostgresServer) -> str:
    return shared_postgres.url()


@pytest.fixture
async def election(url: str) -> AsyncIterator[Election]:
    found = await elect(url)
    yield found
    await found.close()


async def test_one_daemon_has_the_lease(url: str, election: Election) -> None:
    other = await elect(url)
    assert (await election.look()).leader is None
    assert await election.acquire(ME) is True
    assert await election.acquire(ME) is True, "the first answer may have been lost"
    assert await other.acquire(OTHER) is False
    state = await other.look()
    assert state.leader == ME
    assert 0 < state.ttl_ms <= TTL_MS
    assert state.leased_here and state.is_durable and not state.is_replica
    assert await election.renew(replace(ME, epoch=5)) is True
    assert (await other.look()).leader == replace(ME, epoch=5)
    assert await other.renew(OTHER) is False
    await other.release(OTHER)
    assert (await other.look()).leader is not None, "only its owner ends it"
    await election.release(ME)
    assert (await other.look()).leader is None
    assert await other.acquire(OTHER) is True
    assert await election.renew(ME) is False
    await other.close()


async def test_the_lease_of_an_ended_process_is_replaced(url: str, election: Election) -> None:
    await election.acquire(ME)
    other = await elect(url)
    assert await other.acquire(OTHER, Leader("c/3", "c:1", 0, 0)) is False
    assert await other.acquire(OTHER, ME) is True
    assert await election.renew(ME) is False
    await other.close()


async def test_the_lease_ends_by_the_clock_of_the_server(url: str) -> None:
    short, other = await elect(url, 200), await elect(url)
    assert await short.acquire(ME) is True

    async def is_free() -> bool:
        return await other.acquire(OTHER)

    await comes(is_free)
    assert await short.renew(ME) is False
    await short.close()
    await other.close()


async def test_the_state_of_the_store_and_its_standbys(
    url: str, election: Election, make: Make
) -> None:
    state = await election.look()
    assert (state.incarnation, state.epoch, state.clean) == ("", 0, True)
    subject = make(url)
    opened = await subject.open("a/1")
    await subject.commit_as("a/1", tasks([1]))
    await election.acquire(ME)
    standby = Standby("b", "b:7355", "http://b", 19)
    other = await elect(url)
    state = await other.look(standby)
    assert (state.incarnation, state.epoch, state.owner) == (opened.incarnation, 1, "a/1")
    assert state.clean is False
    assert state.known_leader == replace(ME, epoch=1)
    assert other.standbys == (standby,)
    await election.renew(ME)
    assert election.standbys == (standby,)
    assert other.address.startswith("127.0.0.1:")
    await other.close()


async def test_a_server_that_does_not_answer_is_an_error() -> None:
    found = open_election(f"postgresql://127.0.0.1:{free_port()}/app", TTL_MS)
    assert found is not None
    with pytest.raises(StoreError):
        await found.prepare()
    with pytest.raises(StoreError):
        await found.look()
    with pytest.raises(StoreError):
        await found.acquire(ME)
    await found.close()
