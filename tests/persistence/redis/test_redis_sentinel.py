"""The store on a master under Sentinels: it is found, and followed to wherever it moves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from persistence.conftest import QUICK
from persistence.redis.subjects import Make, address, commit, refused, store
from persistence.store_subject import OWNER, Subject
from support.redis_groups import NAME, SentinelGroup, ask, asked, catch_up
from support.redis_server import RedisServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.persistence import open_url
from tickwheel.persistence.contract import (
    CommitRefused,
    Leader,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.persistence.on_server import NoReply
from tickwheel.persistence.redis import RedisStore, options_from
from tickwheel.persistence.redis.store import RedisElection


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    made = SentinelGroup(tmp_path_factory.mktemp("group"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
async def make(group: SentinelGroup) -> AsyncIterator[Make]:
    """Makes stores on the group, which is whole and empty; whatever happens, they are closed."""
    await asyncio.to_thread(group.heal)
    ask(group.master, "FLUSHALL")
    made: list[Subject] = []

    def make_one(query: str = "") -> Subject:
        made.append(Subject(RedisStore(options_from(group.url(f"{QUICK}&{query}")))))
        return made[-1]

    yield make_one
    for subject in made:
        await subject.store.close(clean=False)


@pytest.fixture
async def elect(make: Make, group: SentinelGroup) -> AsyncIterator[RedisElection]:
    made = RedisElection(options_from(group.url(QUICK)), 3_000)
    yield made
    await made.close()


def _replicas(group: SentinelGroup) -> list[RedisServer]:
    master = group.master
    return [server for server in group.servers if server is not master]


async def test_the_master_is_found_and_written_to(group: SentinelGroup, make: Make) -> None:
    subject = make()
    assert (await subject.open()).created
    await subject.commit(tasks(range(100)))
    assert ask(group.master, "ZCARD", "{tw:default:0}:store") == 100
    assert store(subject).address == address(group.master)
    await subject.reopen()
    assert await subject.ids() == list(range(100))


@pytest.mark.parametrize(
    ("how", "wait_replicas"),
    [
        ("kill", 1),
        ("freeze", 1),
        pytest.param("kill", 0, marks=pytest.mark.slow),
        pytest.param("switch", 0, marks=pytest.mark.slow),
    ],
)
async def test_a_failover_loses_no_batch(
    group: SentinelGroup, make: Make, how: str, wait_replicas: int
) -> None:
    subject = make(f"wait_replicas={wait_replicas}")
    await subject.open()
    await commit(subject, 0)
    before = group.master
    if not wait_replicas:  # else one may be promoted that has what was there before
        await asyncio.to_thread(catch_up, before, *_replicas(group))
    if how == "switch":
        await asyncio.to_thread(group.switch)
    elif how == "kill":
        before.kill()
    else:
        before.pause()
    await commit(subject, 100)
    now = await asyncio.to_thread(group.moved_from, before)
    before.go_on()
    await asyncio.to_thread(group.heal)  # a master that gives way takes batches until it knows it
    await commit(subject, 200)
    assert store(subject).address == address(now) != address(before)
    assert store(subject).server_changes == 1
    assert ask(now, "ZCARD", "{tw:default:0}:store") == 30
    await subject.reopen()
    assert len(await subject.ids()) == 30


@pytest.mark.parametrize("mirror", ["yes", pytest.param("no", marks=pytest.mark.slow)])
async def test_batches_missing_in_the_promoted_master_are_replayed(
    group: SentinelGroup, make: Make, mirror: str
) -> None:
    """Confirmed without ``wait_replicas``, and not replicated when the master died."""
    subject = make(f"mirror={mirror}")
    await subject.open()
    await commit(subject, 0)
    before, replicas = group.master, _replicas(group)
    await asyncio.to_thread(catch_up, before, *replicas)
    for replica in replicas:
        replica.pause()
    ask(before, "CLIENT", "KILL", "TYPE", "replica")
    await subject.commit(tasks(range(100, 110)))
    before.kill()
    for replica in replicas:
        replica.go_on()
    await asyncio.to_thread(group.moved_from, before)
    await commit(subject, 200)
    assert store(subject).replays == 1
    assert ask(group.master, "ZCARD", "{tw:default:0}:store") == 30


async def test_a_demoted_master_is_left_at_once(group: SentinelGroup, make: Make) -> None:
    """Also when it lets its clients stay."""
    subject = make()
    await subject.open()
    await commit(subject, 0)
    before, (replica, *_) = group.master, _replicas(group)
    await asyncio.to_thread(catch_up, before, replica)  # else it may have what was there before
    ask(replica, "REPLICAOF", "NO", "ONE")
    ask(before, "REPLICAOF", "127.0.0.1", replica.port)
    with pytest.raises(CommitRefused, match="but it is a replica"):
        await subject.commit(tasks(range(100, 110)))
    await asyncio.to_thread(group.heal)
    await commit(subject, 100)
    assert ask(group.master, "ZCARD", "{tw:default:0}:store") == 20


async def test_a_master_that_was_cut_off_is_doubted(group: SentinelGroup, make: Make) -> None:
    """From all but this client: with ``wait_replicas`` it confirms nothing any more, and its client
    goes to the one that the sentinels name as soon as they do."""
    subject = make("wait_replicas=1&wait_ms=200")
    await subject.open()
    await commit(subject, 0)
    before = group.master
    # Whoever is connected stays, and nobody comes in any more.
    ask(before, "CONFIG", "SET", "requirepass", "cut off")
    for row in asked(before.port, "cut off", "CLIENT", "LIST").decode().splitlines():
        client = dict(pair.split("=", 1) for pair in row.split())
        if client["name"] != "tickwheel":
            asked(before.port, "cut off", "CLIENT", "KILL", "ID", client["id"])
    try:
        await commit(subject, 100)
        now = await asyncio.to_thread(group.moved_from, before)
        await commit(subject, 200)
    finally:
        asked(before.port, "cut off", "CONFIG", "SET", "requirepass", "")
    assert store(subject).address == address(now)
    await asyncio.to_thread(group.heal)
    assert ask(group.master, "ZCARD", "{tw:default:0}:store") == 30


async def test_the_lease_follows_a_failover(group: SentinelGroup, elect: RedisElection) -> None:
    me = Leader(OWNER, "tcp://here:1", 0, 0)
    await elect.prepare()
    assert await elect.acquire(me)
    before, at = elect.connections, elect.address
    now = await asyncio.to_thread(group.switch)
    await asyncio.to_thread(group.heal)

    async def again() -> bool:
        with contextlib.suppress(NoReply):  # of the connection that was closed
            return await elect.acquire(me)
        return False

    await comes(again)
    assert elect.connections > before
    assert (at != elect.address) and elect.address == address(now)


async def test_a_promoted_replica_delays_the_next_leader(
    group: SentinelGroup, make: Make, elect: RedisElection
) -> None:
    """Its last owner may live, and have what was not replicated: it gets the time of a lease."""
    subject = make()
    await subject.open()
    await commit(subject, 0)
    await asyncio.to_thread(catch_up, group.master, *_replicas(group))
    await asyncio.to_thread(group.switch)
    seen = await elect.look()
    assert (seen.leader, seen.clean, seen.up_s, seen.leased_here) == (None, False, 0, False)


async def test_a_leader_marks_a_promoted_replica(
    group: SentinelGroup, make: Make, elect: RedisElection
) -> None:
    """So that the next one need not wait for anybody else."""
    me = Leader(OWNER, "tcp://here:1", 0, 0)
    subject = make()
    await subject.open()
    assert await elect.acquire(me)
    assert (await elect.look()).leased_here
    await asyncio.to_thread(group.switch)
    await asyncio.to_thread(group.heal)

    async def there() -> bool:
        with contextlib.suppress(NoReply):  # of the connection that was closed
            return bool((await elect.look()).incarnation)
        return False

    await comes(there)
    assert not (await elect.look()).leased_here
    assert await elect.acquire(me)
    assert (await elect.look()).leased_here


async def test_silent_and_dead_sentinels_are_done_without(group: SentinelGroup, make: Make) -> None:
    silent = group.sentinels[0]
    silent.signal(signal.SIGSTOP)
    try:
        await make().open()
    finally:
        silent.signal(signal.SIGCONT)
    dead = group.url(QUICK).replace(f":{group.sentinels[0].port}", ":1")
    subject = Subject(RedisStore(options_from(dead.replace(f":{group.sentinels[1].port}", ":2"))))
    await subject.open()
    await subject.store.close(clean=True)


async def test_invalid_sentinel_setups_are_refused(
    group: SentinelGroup, shared_redis: RedisServer
) -> None:
    wrong = group.url().replace(NAME, "other")
    await refused(wrong, "it does not know the master 'other' .master=.", StoreUnreachable)
    plain = f"redis+sentinel://127.0.0.1:{shared_redis.port}/0?master={NAME}"
    await refused(plain, "unknown command .*SENTINEL", StoreUnreachable)
    await refused("redis+sentinel://127.0.0.1:1/0?master=m", "127.0.0.1:1: ", StoreUnreachable)


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_sentinels_have_users_of_their_own(
    group: SentinelGroup, tmp_path: Path, driver: str
) -> None:
    file = tmp_path / "password"
    file.write_text("of the sentinels\n")
    for sentinel in group.sentinels:
        sentinel.ask("ACL", "SETUSER", "watcher", "on", ">of the sentinels", "nocommands",
                "+sentinel|get-master-addr-by-name", "+client|setname")  # fmt: skip
    ask(group.master, "ACL", "SETUSER", "wheel", "on", ">of the store", "allkeys", "+@all")
    url = group.url(f"driver={driver}&sentinel_user=watcher&", "wheel:of%20the%20store@")
    subject = Subject(RedisStore(options_from(f"{url}sentinel_password_file={file}")))
    await subject.open()
    await subject.store.close(clean=True)
    file.write_text("another")
    await refused(f"{url}sentinel_password_file={file}", "WRONGPASS", StoreUnreachable)
    await refused(f"{url}sentinel_password_file={tmp_path}/gone", "the file .*gone does not exist")


class TestUrls:
    def test_name_everything(self) -> None:
        options = options_from(
            "rediss+sentinel://user:p%40ss@[::1]:7000,b,c:7002/3?master=m&sentinel_user=s"
            "&sentinel_password_file=/f&wait_replicas=1"
        )
        assert [str(seed) for seed in options.seeds] == ["[::1]:7000", "b:26379", "c:7002"]
        assert (options.username, options.password, options.db) == ("user", "p@ss", 3)
        assert (options.master, options.sentinel_user, options.tls) == ("m", "s", True)
        assert options.name == "rediss+sentinel://[::1]:7000,b:26379,c:7002/3?master=m"

    @pytest.mark.parametrize(
        ("url", "match"),
        [
            ("redis+sentinel://h/0", "master= is missing"),
            ("redis+sentinel://h/mymaster?master=m", "a database number, not 'mymaster'"),
            ("redis+sentinel://h,b:99999/0?master=m", "the port of 'b:99999' must be a number"),
            ("redis+sentinel://h/0?master=m&sentinel_user=u", "needs sentinel_password_file="),
            (
                "redis+sentinel://" + ",".join("h" * 33) + "/0?master=m",
                "it has 33 addresses; the maximum is 32",
            ),
            ("redis://a,b/0", "it has 2 addresses; the maximum is 1"),
            ("redis://a/0?master=m", "unknown setting 'master'"),
            ("redis+sentinels://h/0", "unknown kind"),
        ],
    )
    def test_invalid_urls_name_the_reason(self, url: str, match: str) -> None:
        with pytest.raises(StoreUnusable, match=match) as error:
            open_url(url.replace("//", "//user:secret@"))
        assert "secret" not in str(error.value)
