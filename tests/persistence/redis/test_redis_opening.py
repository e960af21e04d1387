"""Which Redis is refused at start and why, and what an opening makes of one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.redis_dump import dump
from support.redis_server import RedisServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.persistence import open_url, without_secrets
from tickwheel.persistence.contract import Standby, StoreUnusable
from tickwheel.persistence.redis import RedisOptions, RedisStore, options_from
from tickwheel.persistence.redis.store import RedisElection

DRIVERS = ("redis", "asyncio-redis")
S = "{tw:default:0}"


def _store(server: RedisServer, query: str = "", user: str = "") -> RedisStore:
    return RedisStore(options_from(server.url(query, user)))


@pytest.fixture
def clean_redis(shared_redis: RedisServer) -> RedisServer:
    shared_redis.call("FLUSHALL")
    return shared_redis


async def _refused(store: RedisStore, match: str) -> None:
    with pytest.raises(StoreUnusable, match=match):
        await store.open("me", 0)


class _Http(asyncio.Protocol):
    """Whom Redis's own address may belong to by mistake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class TestAServerThatWouldLoseTasks:
    @pytest.fixture(params=[("appendonly", "no"), ("maxmemory-policy", "allkeys-lru")])
    def volatile(
        self, request: pytest.FixtureRequest, clean_redis: RedisServer
    ) -> Iterator[tuple[RedisServer, str]]:
        name, value = request.param
        clean_redis.call("CONFIG", "SET", name, value)
        yield clean_redis, name
        clean_redis.call("CONFIG", "SET", name, clean_redis.options[name])

    @pytest.mark.parametrize("driver", DRIVERS)
    async def test_a_volatile_server_is_refused_naming_the_setting(
        self, volatile: tuple[RedisServer, str], driver: str
    ) -> None:
        server, name = volatile
        await _refused(_store(server, f"driver={driver}"), f"set `{name} (yes|noeviction)`")
        assert server.call("EXISTS", f"{S}:wheel") == b":0\r\n"
        await comes(lambda: b"name=tickwheel" not in server.call("CLIENT", "LIST"))

    async def test_may_be_insisted_on(self, volatile: tuple[RedisServer, str]) -> None:
        store = _store(volatile[0], "allow_volatile_store=1")
        assert (await store.open("me", 0)).created
        await store.close(clean=True)


class TestWhatAConfirmedTaskSurvives:
    @pytest.mark.parametrize("driver", DRIVERS)
    @pytest.mark.parametrize(
        ("setting", "warning"),
        [
            ("always", "appendfsync always: a confirmed task survives a power cut"),
            ("everysec", "a power cut of Redis's machine can lose the tasks confirmed in the last"),
            ("no", "confirmed in the last half minute, unless the daemon survives"),
        ],
    )
    async def test_follows_from_appendfsync(
        self, clean_redis: RedisServer, setting: str, warning: str, driver: str
    ) -> None:
        before = clean_redis.options["appendfsync"]
        clean_redis.call("CONFIG", "SET", "appendfsync", setting)
        try:
            store = _store(clean_redis, f"driver={driver}&wait_replicas=0")
            await store.open("me", 0)
            assert warning in store.durability
            assert f"appendfsync {setting}" in store.durability
            await store.close(clean=True)
        finally:
            clean_redis.call("CONFIG", "SET", "appendfsync", before)

    async def test_durability_of_a_volatile_server_is_reported(
        self, clean_redis: RedisServer
    ) -> None:
        clean_redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        clean_redis.call("CONFIG", "SET", "appendonly", "no")
        try:
            store = _store(clean_redis, "allow_volatile_store=1")
            await store.open("me", 0)
            assert "no append-only file" in store.durability
            assert "maxmemory-policy allkeys-lru can remove tasks" in store.durability
            await store.close(clean=True)
        finally:
            clean_redis.call("CONFIG", "SET", "appendonly", "yes")
            clean_redis.call("CONFIG", "SET", "maxmemory-policy", "noeviction")

    async def test_durability_is_unknown_without_the_config_right(
        self, clean_redis: RedisServer
    ) -> None:
        rules = ("on", ">pw", "~{tw:*", "+@all", "-config")
        clean_redis.call("ACL", "SETUSER", "plain", *rules)
        try:
            store = _store(clean_redis, "", "plain:pw@")
            await store.open("me", 0)
            assert "appendfsync could not be read" in store.durability
            await store.close(clean=True)
        finally:
            clean_redis.call("ACL", "DELUSER", "plain")


class TestAServerThatCannotBeUsed:
    @pytest.mark.parametrize("driver", DRIVERS)
    async def test_an_unreachable_server_is_refused(self, tmp_path: Path, driver: str) -> None:
        server = RedisServer(tmp_path / "never")
        await _refused(_store(server, f"driver={driver}"), f"127.0.0.1:{server.port}")

    @pytest.mark.parametrize("driver", DRIVERS)
    async def test_a_wrong_password_is_refused(self, tmp_path: Path, driver: str) -> None:
        server = RedisServer(tmp_path / "redis", requirepass="secret").start()
        try:
            query = f"driver={driver}"
            await _refused(_store(server, query), "refused user 'default'.*check user")
            await _refused(_store(server, query, ":wrong@"), "refused user 'default'")
            await _refused(_store(server, query, "who:secret@"), "refused user 'who'")
            store = _store(server, query, ":secret@")
            assert (await store.open("me", 0)).created
            await store.close(clean=True)
            server.call("ACL", "SETUSER", "tick", "on", ">pw:@/", "~{tw:*", "+@all", "-@dangerous")
            await _refused(_store(server, query, "tick:pw%3A%40%2F@"), "ACL")
            server.call("ACL", "SETUSER", "tick", "+info")
            store = _store(server, query, "tick:pw%3A%40%2F@")
            assert (await store.open("me", 0)).epoch == 2
            await store.close(clean=True)
        finally:
            server.kill()

    async def test_a_replica_is_refused(self, clean_redis: RedisServer) -> None:
        election = RedisElection(options_from(clean_redis.url()), 3_000)
        assert not (await election.look()).is_replica
        clean_redis.call("REPLICAOF", "127.0.0.1", "1")
        try:
            assert (await election.look()).is_replica
            await election.close()
            await _refused(_store(clean_redis), "replica of 127.0.0.1:1; name the primary")
        finally:
            clean_redis.call("REPLICAOF", "NO", "ONE")

    async def test_standbys_from_before_a_restart_are_forgotten(
        self, clean_redis: RedisServer
    ) -> None:
        """Their times are those of a server that had run for longer."""
        clean_redis.call("ZADD", f"{S}:standbys", 1 << 40, "old|tcp://old:1|0|")
        election = RedisElection(options_from(clean_redis.url()), 3_000)
        await election.look(Standby("me", "tcp://me:1", "", 0))
        assert [standby.node for standby in election.standbys] == ["me"]
        assert clean_redis.call("ZCARD", f"{S}:standbys") == b":1\r\n"
        await election.close()

    async def test_a_loading_server_is_waited_for(
        self, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        subject = Subject(_store(redis_server))
        await subject.open()
        redis_server.call("MSET", *(word for i in range(1_000) for word in (f"theirs:{i}", i)))
        for i in range(100):
            await subject.commit(tasks([i + 1]))
        redis_server.rewrite()
        await subject.store.close(clean=True)
        redis_server.kill()
        redis_server.options |= {
            "key-load-delay": "500",
            "loading-process-events-interval-bytes": "1024",
        }
        redis_server.start(loaded=False)
        await _refused(_store(redis_server, "load_ms=1"), "LOADING|loading")
        assert (await subject.open()).last_batch == 100
        assert "waiting for Redis, which is loading its data" in caplog.text
        assert caplog.text.count("waiting for Redis") == 1
        await subject.store.close(clean=True)

    @pytest.mark.parametrize("driver", DRIVERS)
    async def test_a_server_that_is_not_redis_is_refused(
        self, driver: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = await asyncio.get_running_loop().create_server(_Http, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        store = RedisStore(options_from(f"redis://127.0.0.1:{port}/0?driver={driver}"))
        await _refused(store, 'Protocol error, got "H"')
        other.close()
        assert "Traceback" not in caplog.text

    async def test_a_database_there_is_not(self, clean_redis: RedisServer) -> None:
        url = clean_redis.url().replace("/0", "/99")
        for driver in DRIVERS:
            await _refused(RedisStore(options_from(f"{url}?driver={driver}")), "(?i)index")


class TestAShardThatIsNotOurs:
    @pytest.mark.parametrize("name", ["wheel", "store", "task", "endings", "records"])
    async def test_a_key_of_another_type(self, clean_redis: RedisServer, name: str) -> None:
        clean_redis.call("SET", f"{S}:{name}", "theirs")
        await _refused(_store(clean_redis), f"{S}:{name} belongs to another program")
        assert clean_redis.call("GET", f"{S}:{name}") == b"$6\r\ntheirs\r\n"

    async def test_rows_without_a_wheel(self, clean_redis: RedisServer) -> None:
        clean_redis.call("ZADD", f"{S}:store", 1, "x")
        await _refused(_store(clean_redis), "choose another")

    async def test_a_foreign_key_next_to_our_wheel_is_refused(
        self, clean_redis: RedisServer
    ) -> None:
        store = _store(clean_redis)
        await store.open("me", 0)
        await store.close(clean=True)
        clean_redis.call("SET", f"{S}:dead", "theirs")
        await _refused(store, f"{S}:dead belongs to another program")

    async def test_a_layout_from_before_the_first_release_is_refused(
        self, clean_redis: RedisServer
    ) -> None:
        wheel = ("layout", 1, "epoch", 3, "incarnation", "f", "last", 7)
        clean_redis.call("HSET", f"{S}:wheel", *wheel)
        before = await dump(clean_redis.url(), masked=())
        await _refused(_store(clean_redis), "before the first release.*choose another")
        assert await dump(clean_redis.url(), masked=()) == before

    async def test_a_hash_that_is_not_a_wheel_is_refused(self, clean_redis: RedisServer) -> None:
        clean_redis.call("HSET", f"{S}:wheel", "spokes", 32)
        await _refused(_store(clean_redis), "wheel belongs to another program")

    @pytest.mark.parametrize(
        ("command", "match"),
        [
            (("HSET", f"{S}:wheel", "format", 3), "layout 3.*up to 2.*newer"),
            (("HDEL", f"{S}:wheel", "last"), "lacks fields"),
            (("HSET", f"{S}:wheel", "rewriting", "node/7"), "because node/7 was rewriting it"),
        ],
    )
    async def test_an_unreadable_layout_is_refused(
        self, clean_redis: RedisServer, command: tuple[str, ...], match: str
    ) -> None:
        store = _store(clean_redis)
        await store.open("me", 0)
        await store.close(clean=True)
        clean_redis.call(*command)
        await _refused(store, match)

    async def test_shards_do_not_see_each_other(self, clean_redis: RedisServer) -> None:
        results = []
        for query in ("", "shard=1", "namespace=other", "prefix=tw2"):
            subject = Subject(_store(clean_redis, query))
            assert (await subject.open()).created
            await subject.commit(tasks([len(results) + 1]))
            results.append(subject)
        for i, subject in enumerate(results):
            assert await subject.ids() == [i + 1]
            await subject.store.close(clean=True)


class TestOpening:
    async def test_an_empty_shard_is_created_only_if_allowed(
        self, clean_redis: RedisServer
    ) -> None:
        store = _store(clean_redis)
        with pytest.raises(StoreUnusable, match="is empty, and another daemon may still have"):
            await store.open("standby", 0, may_create=False)
        await store.open("first", 0)
        incarnation = store.incarnation
        await store.close(clean=True)
        assert (await store.open("standby", 0, may_create=False)).epoch == 2
        assert store.incarnation == incarnation
        await store.close(clean=True)

    async def test_goes_through_without_memory(self, clean_redis: RedisServer) -> None:
        store = _store(clean_redis)
        await store.open("me", 0)
        await store.close(clean=True)
        clean_redis.call("CONFIG", "SET", "maxmemory", "1")
        try:
            assert (await store.open("me", 0)).clean
            await store.close(clean=True)
            assert (await store.open("me", 0)).clean
            await store.close(clean=False)
        finally:
            clean_redis.call("CONFIG", "SET", "maxmemory", "0")

    async def test_closing_without_redis_is_not_clean(self, redis_server: RedisServer) -> None:
        store = _store(redis_server)
        await store.open("me", 0)
        redis_server.kill()
        await store.close(clean=True)
        redis_server.start()
        assert (await store.open("me", 0)).clean is False
        await store.close(clean=True)


class TestUrls:
    def test_name_everything(self) -> None:
        options = options_from(
            "rediss://user:p%40ss@[::1]:7000/3?wait_replicas=2&namespace=a.b-c&shard=7"
        )
        assert options == RedisOptions(
            host="::1", port=7000, db=3, username="user", password="p@ss", tls=True,
            namespace="a.b-c", shard=7, wait_replicas=2,
        )  # fmt: skip
        assert options.name == "rediss://[::1]:7000/3"
        assert options_from("redis://h") == RedisOptions(host="h")
        assert isinstance(open_url("redis://h?allow_volatile_store=1"), RedisStore)

    @pytest.mark.parametrize(
        ("url", "match"),
        [
            ("redis://h/x", "a database number"),
            (f"redis://h/{'9' * 5_000}", "a database number"),
            ("redis://h:99999", "the port"),
            ("redis://h?wait_replica=1", "unknown setting 'wait_replica'"),
            ("redis://h?wait_replicas=many", "not a whole number"),
            ("redis://h?endings_max=0", "endings_max must be at least 1"),
            ("redis://h?wait_replicas=1&wait_ms=0", "wait_ms must be at least 1"),
            ("redis://h?call_ms=0", "call_ms must be at least 1"),
            ("redis://h?shard=1024", "shard must be between 0 and 1023, not 1024"),
            ("redis://h?driver=aioredis", "not one of redis, asyncio-redis"),
            ("redis://h?namespace=a:b", "must be 1 to 64"),
            ("redis://h?prefix=", "must be 1 to 64"),
        ],
    )
    def test_invalid_urls_name_the_reason(self, url: str, match: str) -> None:
        with pytest.raises(StoreUnusable, match=match):
            open_url(url.replace("//", "//user:secret@"))
        with pytest.raises(StoreUnusable) as error:
            open_url(url.replace("//", "//user:secret@"))
        assert "secret" not in str(error.value)

    def test_secrets_are_left_out(self) -> None:
        assert without_secrets("redis://user:pw@h:1/0?shard=1") == "redis://h:1/0?shard=1"
        assert "pw" not in repr(options_from("redis://user:pw@h"))

    async def test_the_second_driver_has_no_tls(self) -> None:
        store = open_url("rediss://127.0.0.1:1?driver=asyncio-redis")
        with pytest.raises(StoreUnusable, match="asyncio-redis does not support TLS"):
            await store.open("me", 0)

    @pytest.mark.parametrize(
        ("driver", "missing"), [("redis", "redis"), ("asyncio-redis", "asyncio_redis")]
    )
    def test_a_missing_driver_names_the_package(self, driver: str, missing: str) -> None:
        code = (
            f"import sys, asyncio; sys.modules[{missing!r}] = None\n"
            "from tickwheel.persistence import open_url\n"
            f"store = open_url('redis://127.0.0.1:1?driver={driver}')\n"
            "try: asyncio.run(store.open('me', 0))\n"
            "except Exception as error: print(type(error).__name__, error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("StoreUnusable")
        assert f"pip install 'tickwheel[{driver}]'" in done.stdout
