"""Laying out a shard on an operator's word, and ``tickwheel init`` around it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from persistence.store_subject import OWNER, Subject
from support.redis_server import RedisServer
from support.store_rows import ended, everything, tasks
from support.waiting import comes
from tickwheel.cli.app import run
from tickwheel.persistence.contract import Fenced, StoreUnusable
from tickwheel.persistence.redis import RedisOptions, RedisStore, options_from
from tickwheel.persistence.redis.layout import INIT_LAY_OUT
from tickwheel.persistence.redis.opening import RedisAdministration, StoredShard
from tickwheel.persistence.sqlite import SqliteStore

S = "{tw:default:0}"
NOW_MS = 1_700_000_000_000
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server(shared_redis: RedisServer) -> RedisServer:
    shared_redis.call("FLUSHALL")
    return shared_redis


@pytest.fixture(params=["redis", "asyncio-redis"])
def options(server: RedisServer, request: pytest.FixtureRequest) -> RedisOptions:
    # Laying out does not wait for the server as a daemon does, and the machine may be busy.
    return options_from(server.url(f"driver={request.param}&connect_ms=10000&call_ms=10000"))


async def filled(server: RedisServer) -> Subject:
    """A shard with something in every key, still open."""
    subject = Subject(RedisStore(options_from(server.url())))
    await subject.open()
    await subject.commit(everything())
    await subject.commit(tasks([50, 51, 52]))
    await subject.commit(ended([50]))
    return subject


async def keys_of(server: RedisServer) -> set[str]:
    async with Redis.from_url(server.url(), decode_responses=True) as redis:
        return set(await redis.keys("*"))


async def look(options: RedisOptions) -> StoredShard:
    return await RedisAdministration(options).look()


async def anew(options: RedisOptions, found: StoredShard | None = None) -> str:
    found = found or await look(options)
    return await RedisAdministration(options).lay_out(found, NOW_MS, watch_s=0)


# --- an empty shard --------------------------------------------------------------------------


async def test_an_initialised_shard_opens_as_a_new_one(
    options: RedisOptions, server: RedisServer
) -> None:
    result = await look(options)
    assert (result.exists, result.state) == (False, "empty")
    incarnation = await anew(options, result)
    store = RedisStore(options)
    opened = await store.open(OWNER, NOW_MS)
    assert (opened.epoch, opened.last_batch, opened.id_mark, opened.clean) == (1, 0, 0, True)
    assert store.incarnation == incarnation
    subject = Subject(RedisStore(options))
    await store.close(clean=True)
    await subject.open()
    assert await subject.commit(tasks([1]))
    assert await subject.ids() == [1]
    await subject.store.close(clean=True)
    assert await keys_of(server) >= {f"{S}:wheel", f"{S}:task"}


async def test_concurrent_inits_of_a_shard_conflict(options: RedisOptions) -> None:
    result = await look(options)
    await anew(options, result)
    with pytest.raises(StoreUnusable, match="has changed since it was read"):
        await anew(options, result)


# --- one that holds something ----------------------------------------------------------------


async def test_a_look_counts_the_rows_of_a_shard(
    options: RedisOptions, server: RedisServer
) -> None:
    subject = await filled(server)
    result = await look(options)
    assert result.counts["tasks"] == len(await subject.ids())
    await subject.store.close(clean=True)
    assert result.exists
    assert result.is_complete
    assert (result.epoch, result.rewriting) == (1, "")
    assert result.counts["records"] > 0
    assert "initialized (epoch 1): " in result.state


async def test_init_removes_only_the_shards_keys(
    options: RedisOptions, server: RedisServer
) -> None:
    subject = await filled(server)
    await subject.store.close(clean=True)
    server.call("SET", "theirs", "1")
    server.call("RPUSH", f"{S}:stage:1", "x")
    server.call("RPUSH", f"{S}:stage:2", "x")
    before = await look(options)
    incarnation = await anew(options)
    assert incarnation != before.incarnation
    assert await keys_of(server) == {f"{S}:wheel", "theirs"}
    after = await look(options)
    assert not any(after.counts.values())
    assert after.epoch == before.epoch + 1


async def test_init_fences_the_former_owner(options: RedisOptions, server: RedisServer) -> None:
    subject = await filled(server)
    await anew(options)
    with pytest.raises(Fenced):
        await subject.commit(tasks([60]))
    assert not (await look(options)).counts["tasks"]
    await subject.store.close(clean=True)


async def test_init_fences_the_former_owner_of_an_emptied_redis(
    options: RedisOptions, server: RedisServer
) -> None:
    subject = await filled(server)
    server.call("FLUSHALL")
    await anew(options)
    with pytest.raises(Fenced):
        await subject.commit(tasks([60]))
    assert not (await look(options)).counts["tasks"]
    await subject.store.close(clean=True)


async def test_a_late_script_is_refused(options: RedisOptions, server: RedisServer) -> None:
    """The same layout twice: the second one comes when the shard is in use already."""
    result = await look(options)
    await anew(options, result)
    subject = Subject(RedisStore(options))
    await subject.open()
    await subject.commit(tasks([1]))
    for stale in (result, replace(result, exists=True)):
        with pytest.raises(StoreUnusable, match="has changed"):
            await anew(options, stale)
    assert await subject.ids() == [1]
    await subject.store.close(clean=True)


# --- one that no daemon opens ----------------------------------------------------------------


async def test_a_damaged_shard_is_reported_and_can_be_initialised(
    options: RedisOptions, server: RedisServer
) -> None:
    subject = await filled(server)
    await subject.store.close(clean=True)
    server.call("HSET", f"{S}:wheel", "rewriting", "somebody/1")
    server.call("HDEL", f"{S}:wheel", "last")
    result = await look(options)
    assert result.rewriting == "somebody/1"
    assert not result.is_complete
    assert "it is damaged; it is incomplete, because somebody/1 was rewriting it" in result.state
    await anew(options, result)
    store = RedisStore(options)
    assert (await store.open(OWNER, NOW_MS)).epoch == result.epoch + 2
    await store.close(clean=True)


async def test_a_shard_without_its_wheel_is_damaged(
    options: RedisOptions, server: RedisServer
) -> None:
    subject = await filled(server)
    await subject.store.close(clean=True)
    server.call("DEL", f"{S}:wheel")
    result = await look(options)
    assert (result.exists, result.is_complete) == (True, False)
    await anew(options, result)
    assert (await look(options)).is_complete


@pytest.mark.parametrize("name", ["wheel", "task", "endings"])
async def test_foreign_keys_are_left_alone(
    name: str, options: RedisOptions, server: RedisServer
) -> None:
    server.call("SET", f"{S}:{name}", "theirs")
    with pytest.raises(StoreUnusable, match=f"{name} belongs to another program"):
        await look(options)
    result = StoredShard(options.name, S, True, True, "", 0, "", {})
    with pytest.raises(StoreUnusable, match=f"{name} belongs to another program"):
        await anew(options, result)
    assert server.call("GET", f"{S}:{name}").endswith(b"theirs\r\n")


async def test_a_newer_layout_is_left_alone(options: RedisOptions, server: RedisServer) -> None:
    server.call("HSET", f"{S}:wheel", "format", "99")
    with pytest.raises(StoreUnusable, match="layout 99.*newer release"):
        await look(options)


# --- while a daemon leads --------------------------------------------------------------------


async def test_init_refuses_while_a_daemon_leads(
    options: RedisOptions, server: RedisServer
) -> None:
    result = await look(options)
    server.call("SET", f"{S}:leader", "left/1a2b|tcp://10.0.0.7:7355|1|4")
    with pytest.raises(StoreUnusable, match="left/1a2b at tcp://10.0.0.7:7355 leads"):
        await anew(options, result)
    assert not (await look(options)).exists


async def test_init_stops_if_a_leader_returns(options: RedisOptions, server: RedisServer) -> None:
    """A Redis that came back empty has forgotten the lease of a daemon that lives."""
    result = await look(options)
    server.call("CONFIG", "RESETSTAT")
    laying = asyncio.ensure_future(
        RedisAdministration(options).lay_out(result, NOW_MS, watch_s=60.0)
    )
    await comes(lambda: b"cmdstat_get:" in server.call("INFO", "commandstats"))  # its first look
    server.call("SET", f"{S}:leader", "left|tcp://a:1|1|4")
    with pytest.raises(StoreUnusable, match="left at tcp://a:1 leads"):
        await laying
    assert not (await look(options)).exists


async def test_a_leader_that_comes_between_look_and_script_stops_it(
    options: RedisOptions, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the script itself."""
    result = await look(options)

    async def blind(*_: Any) -> None:
        server.call("SET", f"{S}:leader", "left|tcp://a:1|1|4")

    monkeypatch.setattr("tickwheel.persistence.redis.opening.watch_lease", blind)
    with pytest.raises(StoreUnusable, match="left at tcp://a:1 leads"):
        await anew(options, result)
    assert "'led'" in INIT_LAY_OUT.text


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' daemons do not come back."""
    monkeypatch.setattr("tickwheel.persistence.on_server.LEADER_WATCH_S", 0.0)


@pytest.mark.usefixtures("at_once")
class TestTheCommand:
    def test_lays_out_an_empty_shard_once(self, server: RedisServer, capsys: Capture) -> None:
        assert run(["init", "--store", server.url()]) == 0
        assert f"{S} in redis://127.0.0.1:{server.port}/0 was created" in capsys.readouterr().out
        assert run(["init", "--store", server.url()]) == 1
        error = capsys.readouterr().err
        assert "is initialized (epoch 0): 0 tasks" in error
        assert "--force" in error
        assert error.count("\n") == 1

    def test_init_force_shows_counts_and_needs_a_yes(
        self, server: RedisServer, capsys: Capture
    ) -> None:
        async def fill() -> None:
            subject = await filled(server)
            await subject.store.close(clean=True)

        asyncio.run(fill())
        assert run(["init", "--store", server.url(), "--force"]) == 1
        error = capsys.readouterr().err
        assert "tasks, " in error
        assert "add --yes" in error
        assert server.call("HLEN", f"{S}:task") != b":0\r\n"
        assert run(["init", "--store", server.url(), "--force", "--yes", "--json"]) == 0
        captured = capsys.readouterr()
        answer = json.loads(captured.out)
        assert answer["removed"]["tasks"] > 0
        assert answer["shard"] == S
        assert "tasks, " in captured.err
        assert server.call("HLEN", f"{S}:task") == b":0\r\n"

    def test_init_force_on_an_empty_shard_does_not_ask(self, server: RedisServer) -> None:
        assert run(["init", "--store", server.url(), "--force"]) == 0

    def test_a_leader_is_named(self, server: RedisServer, capsys: Capture) -> None:
        server.call("SET", f"{S}:leader", "left|tcp://a:1|1|4")
        assert run(["init", "--store", server.url(), "--force", "--yes"]) == 1
        assert "left at tcp://a:1 leads" in capsys.readouterr().err

    def test_a_redis_that_forgets_has_to_be_insisted_on(
        self, server: RedisServer, capsys: Capture
    ) -> None:
        server.call("CONFIG", "SET", "appendonly", "no")
        try:
            assert run(["init", "--store", server.url()]) == 1
            assert "appendonly yes" in capsys.readouterr().err
            assert run(["init", "--store", server.url(), "--allow-volatile-store"]) == 0
        finally:
            server.call("CONFIG", "SET", "appendonly", "yes")

    def test_init_shows_no_password(self, server: RedisServer, capsys: Capture) -> None:
        url = server.url(user="who:secret@")
        assert run(["init", "--store", url]) == 1
        captured = capsys.readouterr()
        assert "secret" not in captured.err + captured.out


def test_a_sqlite_file_is_made_once(tmp_path: Path, capsys: Capture) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    assert run(["init", "--store", url]) == 0
    assert (tmp_path / "a.db").stat().st_size > 0
    assert run(["check", "--store", url]) == 0
    assert run(["init", "--store", url]) == 1
    assert "already exists" in capsys.readouterr().err
    assert run(["init", "--store", url, "--force"]) == 0  # it was never used

    async def use() -> None:
        subject = Subject(SqliteStore(str(tmp_path / "a.db")))
        await subject.open()
        await subject.commit(tasks([1]))
        await subject.store.close(clean=True)

    asyncio.run(use())
    assert run(["init", "--store", url, "--force"]) == 1
    assert "is a store with" in capsys.readouterr().err


def test_init_refuses_a_memory_store(capsys: Capture) -> None:
    assert run(["init", "--store", "memory:"]) == 2
    assert "memory:" in capsys.readouterr().err
