"""The store on a Redis Cluster: its node is found, and followed when the slot moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from persistence.conftest import QUICK
from persistence.redis.subjects import Make, address, commit, refused, store
from persistence.store_subject import OWNER, Subject
from support.redis_groups import Cluster, ask, asking, catch_up, slot_of
from support.redis_server import RedisServer
from support.store_rows import everything, in_flight, tasks
from support.waiting import comes
from tickwheel.model.kinds import Effects
from tickwheel.persistence import open_url
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Leader,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.persistence.redis import RedisStore, options_from
from tickwheel.persistence.redis.layout import COMMIT, Keys
from tickwheel.persistence.redis.store import RedisElection

S = "{tw:default:0}"
SLOT = slot_of("tw:default:0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
async def make(cluster: Cluster) -> AsyncIterator[Make]:
    """Makes stores on the Cluster, which is whole and empty; whatever happens, they are closed."""
    await asyncio.to_thread(cluster.heal)
    ask(owner(cluster), "FLUSHALL")
    made: list[Subject] = []

    def make_one(query: str = "") -> Subject:
        made.append(Subject(RedisStore(options_from(cluster.url(f"{QUICK}&{query}")))))
        return made[-1]

    yield make_one
    for subject in made:
        await subject.store.close(clean=False)


def owner(cluster: Cluster) -> RedisServer:
    result = cluster.owner_of(SLOT)
    assert result is not None
    return result


def another(cluster: Cluster) -> RedisServer:
    """A master that does not have the slot."""
    return next(node for node in cluster.masters() if node is not owner(cluster))


def pending(cluster: Cluster) -> int:
    return int(ask(owner(cluster), "ZCARD", f"{S}:store"))


@pytest.mark.parametrize("tag", ["tw:default:0", "other:a.b:7", "tw:default:1023"])
async def test_the_node_that_has_the_slot_is_found(cluster: Cluster, tag: str, make: Make) -> None:
    prefix, namespace, shard = tag.split(":")
    subject = make(f"prefix={prefix}&namespace={namespace}&shard={shard}")
    assert (await subject.open()).created
    await subject.commit(tasks(range(100)))
    node = cluster.owner_of(slot_of(tag))
    assert node is not None
    assert store(subject).address == address(node)
    assert ask(node, "ZCARD", f"{{{tag}}}:store") == 100
    assert ask(node, "CLUSTER", "KEYSLOT", f"{{{tag}}}:store") == slot_of(tag)
    assert Keys(prefix, namespace, int(shard)).shard == f"{{{store(subject).options.tag}}}"
    await subject.reopen()
    assert await subject.ids() == list(range(100))


@pytest.mark.parametrize(
    ("how", "wait_replicas"),
    [
        ("kill", 1),
        pytest.param("freeze", 1, marks=pytest.mark.slow),  # test_redis_sentinel.py freezes one
        pytest.param("kill", 0, marks=pytest.mark.slow),
        pytest.param("switch", 0, marks=pytest.mark.slow),
    ],
)
async def test_a_failover_loses_no_batch(
    cluster: Cluster, make: Make, how: str, wait_replicas: int
) -> None:
    subject = make(f"wait_replicas={wait_replicas}")
    await subject.open()
    await commit(subject, 0)
    before = owner(cluster)
    if not wait_replicas:  # else one may be promoted that has what was there before
        await asyncio.to_thread(catch_up, before, cluster.replica_of(before))
    if how == "switch":
        await asyncio.to_thread(cluster.switch, SLOT)
    elif how == "kill":
        before.kill()
    else:
        before.pause()
    now = await asyncio.to_thread(cluster.moved_from, before, SLOT)
    if wait_replicas and how != "switch":
        # Its only replica is the master now: nothing is confirmed without another one.
        await comes(lambda: _is_unconfirmed(subject))
    before.go_on()
    await asyncio.to_thread(cluster.heal)
    await commit(subject, 100)
    assert store(subject).address == address(now) != address(before)
    assert store(subject).server_changes == 1
    assert pending(cluster) == 20
    await subject.reopen()
    assert len(await subject.ids()) == 20


async def _is_unconfirmed(subject: Subject) -> bool:
    """Whether a batch is on the master and on too few replicas."""
    with pytest.raises((CommitRefused, CommitUnknown)) as error:
        await commit(subject, 100, tries=1)
    return "only 0 of 1 replicas" in str(error.value)


@pytest.mark.parametrize("mirror", ["yes", pytest.param("no", marks=pytest.mark.slow)])
async def test_batches_missing_in_the_promoted_master_are_replayed(
    cluster: Cluster, make: Make, mirror: str
) -> None:
    subject = make(f"mirror={mirror}")
    await subject.open()
    await commit(subject, 0)
    before = owner(cluster)
    replica = cluster.replica_of(before)
    await asyncio.to_thread(catch_up, before, replica)
    replica.pause()
    ask(before, "CLIENT", "KILL", "TYPE", "replica")
    await subject.commit(tasks(range(100, 110)))
    before.kill()
    replica.go_on()
    await asyncio.to_thread(cluster.moved_from, before, SLOT)
    await commit(subject, 200)
    assert store(subject).replays == 1
    assert pending(cluster) == 30


class TestASlotOnItsWay:
    """All keys of a shard are in one slot, which an operator may move while batches run."""

    async def test_a_migrating_slot_loses_no_batch(self, cluster: Cluster, make: Make) -> None:
        subject = make()
        await subject.open()
        await commit(subject, 0)
        before, to = owner(cluster), another(cluster)
        going_on = True

        async def batches() -> int:
            done = 0
            while going_on:
                await commit(subject, 100 + 10 * done)
                done += 1
            return done

        committing = asyncio.create_task(batches())
        for target in (to, before, to):
            # One key at a time: some are here and some there for a while.
            await asyncio.to_thread(cluster.migrate, SLOT, target, keys_at_once=1)
        going_on = False
        done = await committing
        assert done > 0
        await commit(subject, 100_000)
        assert store(subject).address == address(to)
        assert store(subject).server_changes >= 1
        assert pending(cluster) == 10 * (done + 2)
        await subject.reopen()
        assert len(await subject.ids()) == 10 * (done + 2)

    async def test_a_batch_that_cannot_wait_is_refused_and_repeated(
        self, cluster: Cluster, make: Make
    ) -> None:
        subject = make()
        await subject.open()
        await commit(subject, 0)
        loop = asyncio.get_running_loop()
        steps: list[str] = []

        def tried(step: str) -> None:
            steps.append(step)
            with pytest.raises(CommitRefused, match="TRYAGAIN|ASK"):
                asyncio.run_coroutine_threadsafe(commit(subject, 100, tries=1), loop).result()

        await asyncio.to_thread(
            cluster.migrate, SLOT, another(cluster), keys_at_once=3, between=tried
        )
        assert {"marked", "some", "all"} <= set(steps)
        await commit(subject, 100)
        assert pending(cluster) == 20

    async def test_redis_refuses_scripts_during_a_migration(
        self, cluster: Cluster, make: Make
    ) -> None:
        """What the waiting rests on: from the first step to the last no node runs a script of ours,
        not even the one to which ASK points."""
        subject = make()
        await subject.open()
        await subject.commit(everything())
        source, to = owner(cluster), another(cluster)
        keys = Keys("tw", "default", 0).all
        script = ("EVAL", COMMIT.text, len(keys), *keys, "1", "nobody", "0", "1", "0", "", "", "")

        def look(step: str) -> None:
            here, there = str(ask(source, *script)), str(asking(to, *script))
            assert here.startswith(("TRYAGAIN", "ASK")), (step, here)
            assert there.startswith("TRYAGAIN"), (step, there)

        assert ask(source, *script)[0] == b"fenced"
        await asyncio.to_thread(cluster.migrate, SLOT, to, keys_at_once=2, between=look)
        assert ask(to, *script)[0] == b"fenced"
        assert str(ask(source, *script)).startswith(f"MOVED {SLOT}")

    async def test_a_start_in_the_middle_waits_and_reads_all(
        self, cluster: Cluster, make: Make
    ) -> None:
        """A cursor of one node says nothing to another one: what was read of a table counts only if
        all of it came over one connection."""
        subject = make()
        await subject.open()
        ids = range(10_000, 15_000)
        await subject.commit(tasks(ids))
        await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in ids}))
        await subject.commit(everything())
        expected = await subject.small(), await subject.ids()
        await subject.store.close(clean=True)
        again = make()
        await again.open()
        read_client = store(again)._recovering._read_client
        calls = 0
        call = read_client.call

        async def moving(*args: str | bytes | int) -> object:
            nonlocal calls
            calls += 1
            if calls in (4, 8):  # of about a dozen, most of them for the table of progress
                await asyncio.to_thread(cluster.migrate, SLOT, another(cluster))
            return await call(*args)

        read_client.call = moving  # type: ignore[method-assign]  # where a node leaves it
        result = await again.small()
        assert calls > 12
        assert [handles async for handles in again.store.recover_handles(500)]
        assert (result, await again.ids()) == expected


async def test_the_lease_follows_a_failover(cluster: Cluster, make: Make) -> None:
    me = Leader(OWNER, "tcp://here:1", 0, 0)
    election = RedisElection(options_from(cluster.url(QUICK)), 3_000)
    try:
        await election.prepare()
        assert await election.acquire(me)
        at = election.address
        await asyncio.to_thread(cluster.migrate, SLOT, another(cluster))
        assert await election.renew(me)
        assert at != election.address == address(owner(cluster))
        await asyncio.to_thread(cluster.switch, SLOT)

        async def has_moved() -> bool:
            """The node that has it no more may take one renewal before it knows."""
            assert await election.renew(me)
            return election.address == address(owner(cluster))

        assert await comes(has_moved)
    finally:
        await election.close()


async def test_nodes_missing_in_the_url_are_discovered(cluster: Cluster, make: Make) -> None:
    """Nobody of the URL is there any more when the slot's master dies."""
    before = owner(cluster)
    seed = next(node for node in cluster.masters() if node is not before)
    url = f"redis+cluster://127.0.0.1:{seed.port}/?{QUICK}"
    subject = Subject(RedisStore(options_from(url)))
    await subject.open()
    await commit(subject, 0)
    seed.kill()
    await asyncio.to_thread(cluster.switch, SLOT)
    before.kill()
    await commit(subject, 100)
    await subject.store.close(clean=True)


async def test_invalid_cluster_setups_are_refused(
    cluster: Cluster, shared_redis: RedisServer
) -> None:
    plain = f"redis+cluster://127.0.0.1:{shared_redis.port}/"
    await refused(plain, "cluster support disabled", StoreUnreachable)
    await refused("redis+cluster://127.0.0.1:1/", "127.0.0.1:1: ", StoreUnreachable)
    node = f"redis://127.0.0.1:{owner(cluster).port}/0"
    await refused(node, r"node of a Redis Cluster; name it with redis\+cluster://")


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_users_of_their_own(cluster: Cluster, make: Make, driver: str) -> None:
    root = Path(__file__).parents[3]
    text = (root / "docs/operations.md").read_text()
    rule = next(row for row in text.splitlines() if row.startswith("ACL SETUSER tickwheel "))
    for node in cluster.nodes:
        assert ask(node, *rule.split()) == b"OK"
    url = cluster.url(f"driver={driver}&wait_replicas=1", "tickwheel:SECRET@")
    subject = Subject(RedisStore(options_from(url)))
    await subject.open()
    await commit(subject, 0)
    await asyncio.to_thread(cluster.migrate, SLOT, another(cluster))
    await commit(subject, 100)
    await subject.store.close(clean=True)


class TestUrls:
    def test_name_everything(self) -> None:
        options = options_from("rediss+cluster://u:p@a,b:7001/?wait_replicas=1&shard=3")
        assert [str(seed) for seed in options.seeds] == ["a:6379", "b:7001"]
        assert (options.tls, options.tag, options.db) == (True, "tw:default:3", 0)
        assert options.name == "rediss+cluster://a:6379,b:7001/0"

    @pytest.mark.parametrize(
        ("url", "match"),
        [
            ("redis+cluster://h/1", "the database of a Redis Cluster must be 0, not 1"),
            ("redis+cluster://h/?master=m", "unknown setting 'master'"),
            ("redis+cluster://[::1", "the URL is not valid"),
        ],
    )
    def test_invalid_urls_name_the_reason(self, url: str, match: str) -> None:
        with pytest.raises(StoreUnusable, match=match) as error:
            open_url(url.replace("//", "//user:secret@"))
        assert "secret" not in str(error.value)
