"""The registry of nodes in a store: who is there, until when, and what operators want."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from support.postgresql import PostgresServer
from support.redis_server import RedisServer
from support.waiting import comes
from tickwheel.persistence import open_nodes, shard_count, shard_url
from tickwheel.persistence.contract import (
    Claim,
    NodeRecord,
    NodeRegistry,
    StoreError,
    StoreUnusable,
)
from tickwheel.persistence.postgresql import election as postgres_election
from tickwheel.persistence.postgresql import options_from as postgres_options_from
from tickwheel.persistence.redis import store as redis_store
from tickwheel.persistence.redis.driver import options_from

SHARDS = 4
A = NodeRecord(
    "a", "run-1", "tcp://a:7355", "1.0", 1.5, 17, 60_000, life="boot/1/2/3", http="http://a:1",
    claims=(Claim(0, 3, "tcp://a:7356", 18, "http://a:2"), Claim(1, 1, "tcp://a:7357", 19)),
    standbys={2: "tcp://a:7358", 3: "tcp://a:7359"},
)  # fmt: skip
B = replace(A, name="b", run="run-2", claims=(), standbys={})


@pytest.fixture(params=["redis", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "postgresql":
        postgres: PostgresServer = request.getfixturevalue("shared_postgres")
        return postgres.url()
    redis: RedisServer = request.getfixturevalue("shared_redis")
    redis.call("FLUSHALL")
    return redis.url()


@pytest.fixture
async def registry(url: str) -> AsyncIterator[NodeRegistry]:
    result = open_nodes(url, SHARDS)
    yield result
    await result.close()


only_redis = pytest.mark.parametrize("url", ["redis"], indirect=True)


async def test_a_beat_publishes_all_fields_of_a_node(registry: NodeRegistry, url: str) -> None:
    await registry.beat(B)
    seen = await registry.beat(A)
    assert seen.nodes == {"a": A, "b": B}
    # A script of Redis has one time; the statements of PostgreSQL have their own.
    assert seen.seen_ms["b"] <= seen.seen_ms["a"] <= seen.now_ms
    assert seen.seen_ms["a"] == seen.now_ms or url.startswith("postgresql:")
    assert (seen.placed, seen.drained, seen.namesake) == ({}, frozenset(), None)
    await registry.leave(A)
    assert (await registry.beat(B)).nodes.keys() == {"b"}


async def test_a_silent_node_expires_by_the_stores_clock(registry: NodeRegistry) -> None:
    await registry.beat(replace(A, ttl_ms=50))
    await registry.beat(B)

    async def is_alone() -> bool:
        return (await registry.beat(B)).nodes.keys() == {"b"}

    await comes(is_alone)


async def test_the_version_grows_when_a_shard_is_led_by_another_daemon(
    registry: NodeRegistry,
) -> None:
    first = (await registry.beat(A)).version
    assert first >= len(A.claims)
    assert (await registry.beat(A)).version == first, "nothing is new"
    taken = replace(B, claims=(Claim(0, 4, "tcp://b:7356", 20),))
    assert (await registry.beat(taken)).version == first + 1
    assert (await registry.beat(A)).version == first + 1, "it is deposed"


@only_redis
async def test_the_version_grows_when_the_registry_is_lost(
    registry: NodeRegistry, shared_redis: RedisServer
) -> None:
    """Clients ignore lower versions, and the addresses that come with them."""
    await registry.beat(A)
    shared_redis.call("HSET", "{tw:default:nodes}:route", "version", 10_000)
    shared_redis.call("FLUSHALL")
    assert (await registry.beat(A)).version > 10_000


async def test_a_second_node_of_a_name_is_refused(registry: NodeRegistry) -> None:
    await registry.beat(A)
    other = replace(A, run="run-9", address="tcp://c:7355", claims=())
    seen = await registry.beat(other)
    assert (seen.nodes, seen.namesake) == ({}, A)
    assert (await registry.beat(A)).nodes == {"a": A}, "it took nothing from it"
    await registry.leave(other)
    assert (await registry.beat(A)).nodes == {"a": A}
    assert (await registry.beat(other, instead_of="run-1")).nodes == {"a": other}


async def test_nodes_of_a_store_are_limited(
    registry: NodeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in (redis_store, postgres_election):
        monkeypatch.setattr(store, "NODES_MAX", 2)
    await registry.beat(replace(A, ttl_ms=1500))
    await registry.beat(B)
    third = replace(B, name="c", run="run-3")
    with pytest.raises(StoreUnusable, match=r"it has 2 nodes; the limit is 2 \(NODES_MAX\)"):
        await registry.beat(third)
    await registry.leave(third)
    assert "c" not in (await registry.beat(B)).nodes, "it has left no trace"

    async def has_room() -> bool:
        try:
            return (await registry.beat(third)).nodes.keys() == {"b", "c"}
        except StoreUnusable:
            return False

    await comes(has_room)


async def test_placements_and_drains_persist(registry: NodeRegistry) -> None:
    await registry.place(2, "a")
    await registry.place(2, "b")
    await registry.place(3, "a")
    await registry.place(3, None)
    for name in "aab":
        await registry.drain(name, draining=True)
    await registry.drain("b", draining=False)
    await registry.leave(A)
    seen = await registry.beat(B)
    assert (seen.placed, seen.drained) == ({2: "b"}, {"a"})


async def test_a_node_with_another_number_of_shards_is_refused(
    registry: NodeRegistry, url: str
) -> None:
    await registry.beat(A)
    other = open_nodes(url, SHARDS + 1)
    try:
        with pytest.raises(StoreUnusable, match="for 4 shards, but the setting shards is 5"):
            await other.beat(B)
    finally:
        await other.close()
    assert (await registry.beat(A)).nodes == {"a": A}


@only_redis
async def test_unreadable_nodes_are_ignored(
    registry: NodeRegistry, shared_redis: RedisServer
) -> None:
    key = "{tw:default:nodes}:nodes"
    shared_redis.call("HSET", key, "new", 'r|{"format": 2}', "odd", "r|[", "none", "")
    for name in ("new", "odd", "none"):
        shared_redis.call("HSET", "{tw:default:nodes}:until", name, 9_999_999_999_999)
    assert (await registry.beat(A)).nodes == {"a": A}


@only_redis
async def test_a_full_store_accepts_beats(
    registry: NodeRegistry, shared_redis: RedisServer
) -> None:
    await registry.beat(A)
    shared_redis.call("CONFIG", "SET", "maxmemory", 1)
    try:
        assert (await registry.beat(A)).nodes == {"a": A}
    finally:
        shared_redis.call("CONFIG", "SET", "maxmemory", 0)


async def test_an_unreachable_store_is_an_error() -> None:
    registry = open_nodes("redis://127.0.0.1:1/0", SHARDS)
    with pytest.raises(StoreError):
        await asyncio.wait_for(registry.beat(A), 10)
    await registry.close()


@pytest.mark.parametrize("url", ["redis://h/0?shards=4", "redis+cluster://h,i/?mirror=no&shards=4"])
def test_the_url_of_a_shard_names_that_shard_alone(url: str) -> None:
    assert shard_count(url) == SHARDS
    assert options_from(shard_url(url, 3)).shard == 3
    assert options_from(shard_url(url, 3)).mirror is ("mirror" not in url)
    assert shard_count("redis://h/0?shard=4") is None
    with pytest.raises(StoreUnusable, match="shards must be between 1 and 64"):
        shard_count("redis://h/0?shards=" + "9" * 5_000)
    with pytest.raises(StoreUnusable, match="shards= is only for nodes"):
        options_from(url)


def test_the_url_of_a_shard_keeps_its_schema() -> None:
    url = "postgresql://me@h/app?schema=x&shards=4"
    assert shard_count(url) == SHARDS
    options = postgres_options_from(shard_url(url, 3))
    assert (options.shard, options.schema) == (3, "x")
