"""The leader's lease and the registry of nodes in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from persistence.postgresql.conftest import Make
from persistence.test_redis_nodes import SHARDS, A, B
from support.ports import free_port
from support.postgresql import PostgresServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.persistence import open_election, open_nodes, shard_count, shard_url
from tickwheel.persistence.contract import (
    Claim,
    Election,
    Leader,
    NodeRegistry,
    Standby,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.postgresql import election as postgres_election
from tickwheel.persistence.postgresql import options_from

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


# --- nodes ---------------------------------------------------------------------------------------


@pytest.fixture
async def registry(url: str) -> AsyncIterator[NodeRegistry]:
    found = open_nodes(url, SHARDS)
    yield found
    await found.close()


async def test_a_beat_publishes_all_fields_of_a_node(registry: NodeRegistry) -> None:
    await registry.beat(B)
    seen = await registry.beat(A)
    assert seen.nodes == {"a": A, "b": B}
    assert seen.seen_ms["b"] <= seen.seen_ms["a"] <= seen.now_ms
    assert (seen.placed, seen.drained, seen.namesake) == ({}, frozenset(), None)
    await registry.leave(A)
    assert (await registry.beat(B)).nodes.keys() == {"b"}


async def test_a_silent_node_expires(registry: NodeRegistry) -> None:
    await registry.beat(replace(A, ttl_ms=50))

    async def is_alone() -> bool:
        return (await registry.beat(B)).nodes.keys() == {"b"}

    await comes(is_alone)


async def test_the_version_grows_when_a_shard_is_led_by_another_daemon(
    registry: NodeRegistry,
) -> None:
    assert (await registry.beat(A)).version == len(A.claims)
    assert (await registry.beat(A)).version == len(A.claims), "nothing is new"
    taken = replace(B, claims=(Claim(0, 4, "tcp://b:7356", 20),))
    assert (await registry.beat(taken)).version == len(A.claims) + 1
    assert (await registry.beat(A)).version == len(A.claims) + 1, "it is deposed"


async def test_a_second_node_of_a_name_is_refused(registry: NodeRegistry) -> None:
    await registry.beat(A)
    other = replace(A, run="run-9", address="tcp://c:7355", claims=())
    seen = await registry.beat(other)
    assert (seen.nodes, seen.namesake) == ({}, A)
    await registry.leave(other)
    assert (await registry.beat(A)).nodes == {"a": A}, "it took nothing from it"
    assert (await registry.beat(other, instead_of="run-1")).nodes == {"a": other}


async def test_placements_and_drains_persist(registry: NodeRegistry) -> None:
    await registry.beat(A)
    await registry.place(2, "b")
    await registry.place(2, "a")
    await registry.place(3, "a")
    await registry.place(3, None)
    await registry.drain("a", draining=True)
    await registry.drain("a", draining=True)
    await registry.drain("b", draining=True)
    await registry.drain("b", draining=False)
    seen = await registry.beat(B)
    assert (seen.placed, seen.drained) == ({2: "a"}, {"a"})


async def test_the_numbers_of_nodes_and_shards_are_limited(
    url: str, registry: NodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_election, "NODES_MAX", 2)
    await registry.beat(A)
    await registry.beat(B)
    third = replace(B, name="c", run="run-3")
    with pytest.raises(StoreUnusable, match=r"it has 2 nodes; the limit is 2 \(NODES_MAX\)"):
        await registry.beat(third)
    assert (await registry.beat(A)).nodes.keys() == {"a", "b"}
    other = open_nodes(url, SHARDS + 1)
    with pytest.raises(StoreUnusable, match="for 4 shards, but the setting shards is 5"):
        await other.beat(third)
    await other.close()


def test_the_url_of_a_shard_names_that_shard_alone() -> None:
    url = "postgresql://me@h/app?schema=x&shards=4"
    assert shard_count(url) == SHARDS
    assert options_from(shard_url(url, 3)).shard == 3
    assert options_from(shard_url(url, 3)).schema == "x"
