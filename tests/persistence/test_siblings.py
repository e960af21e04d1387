"""What every store with several shards must do for a shard that reads another one."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from persistence.store_subject import Subject
from support.ports import free_port
from support.postgresql import PostgresServer
from support.redis_groups import Cluster, ask, slot_of
from support.redis_server import RedisServer
from support.store_rows import GROUPS, SCHEDULES, TRANSACTIONS, everything
from support.waiting import comes, until
from tickwheel.model.kinds import (
    CLAIM,
    COUNTER,
    GROUP,
    SCHEDULE,
    TRANSACTION,
    Effects,
    RecordKey,
    keyed,
)
from tickwheel.model.records import GroupRow, SettingsCounter
from tickwheel.persistence import ShardFolder, open_siblings, open_url, shard_url
from tickwheel.persistence.contract import Siblings, StoreAway
from tickwheel.persistence.on_server import RESTORE_OWNERS
from tickwheel.persistence.redis import siblings as redis_siblings
from tickwheel.persistence.redis.connection import Connection

GROUP_ROW = GroupRow("t", "g", 5, None, 7, 1)
Request = pytest.FixtureRequest
Urls = Callable[[int], str]
"""Shard → the URL of its store."""


def _sqlite(folder: Path, request: Request) -> Urls:
    return ShardFolder(f"{folder}/").url


def _redis(folder: Path, request: Request) -> Urls:
    server: RedisServer = request.getfixturevalue("shared_redis")
    server.call("FLUSHALL")
    return lambda shard: shard_url(server.url(), shard)


def _cluster(folder: Path, request: Request) -> Urls:
    cluster: Cluster = request.getfixturevalue("shared_cluster")
    for node in cluster.nodes:
        node.call("FLUSHALL")
    return lambda shard: shard_url(cluster.url(), shard)


def _postgresql(folder: Path, request: Request) -> Urls:
    server: PostgresServer = request.getfixturevalue("shared_postgres")
    url = server.url()
    return lambda shard: shard_url(url, shard)


STORES = {"sqlite": _sqlite, "redis": _redis, "cluster": _cluster, "postgresql": _postgresql}


@pytest.fixture(params=sorted(STORES))
def urls(request: Request, tmp_path: Path) -> Urls:
    return STORES[request.param](tmp_path, request)


@pytest.fixture
async def siblings(urls: Urls) -> AsyncIterator[Siblings]:
    """As the first shard sees the others."""
    result = open_siblings(urls(0))
    assert result is not None
    yield result
    await result.close()


@pytest.fixture
async def subject(urls: Urls) -> AsyncIterator[Subject]:
    """Another shard, open."""
    result = Subject(open_url(urls(2)))
    await result.open()
    yield result
    await result.store.close(clean=True)


def numbered(number: int, *rows: GroupRow) -> Effects:
    return Effects(records=keyed(GROUP, rows) | keyed(COUNTER, [SettingsCounter(number)]))


async def test_a_shard_without_versions_has_no_settings(
    subject: Subject, siblings: Siblings
) -> None:
    assert await siblings.settings(2, None) == (SettingsCounter(), [])
    assert await siblings.settings(2, 0) == (SettingsCounter(), None)


async def test_committed_settings_are_read_by_siblings(
    subject: Subject, siblings: Siblings
) -> None:
    await subject.commit(numbered(1, GROUP_ROW))
    assert await siblings.settings(2, 0) == (SettingsCounter(1), [GROUP_ROW])
    assert await siblings.settings(2, 1) == (SettingsCounter(1), None), "nothing has changed"
    changed = GROUP_ROW._replace(version=2)
    await subject.commit(numbered(2, changed))
    assert await siblings.settings(2, 1) == (SettingsCounter(2), [changed])


async def test_all_settings_rows_are_read(subject: Subject, siblings: Siblings) -> None:
    await subject.commit(everything())
    counter, rows = await siblings.settings(2, None)
    assert rows is not None
    assert (counter.number, sorted(map(repr, rows))) == (0, sorted(map(repr, GROUPS)))


async def test_which_records_are_there(subject: Subject, siblings: Siblings) -> None:
    rows = {GROUP: GROUPS[0], SCHEDULE: SCHEDULES[0], TRANSACTION: TRANSACTIONS[0]}
    there: list[RecordKey] = [(kind, kind.key(row)) for kind, row in rows.items()]
    await subject.commit(Effects(records=dict(zip(there, rows.values(), strict=True))))
    absent: list[RecordKey] = [(SCHEDULE, "nobody has this"), (CLAIM, there[0][1])]
    assert list(await siblings.contains(2, [*there, *absent])) == [True, True, True, False, False]


async def test_a_shard_without_data_proves_no_record_absent(urls: Urls, siblings: Siblings) -> None:
    filling = open_url(urls(3))
    await filling.open(f"{RESTORE_OWNERS}1", 0)
    if "sqlite" not in urls(3):  # a restored file appears when it is complete
        with pytest.raises(StoreAway, match="no daemon uses it"):
            await siblings.contains(3, [(SCHEDULE, "s")])
    await filling.close(clean=True)
    with pytest.raises(StoreAway, match="no daemon uses it|cannot read"):
        await siblings.contains(4, [(SCHEDULE, "s")])


@pytest.mark.parametrize("at_once", [100, 10_000])
async def test_many_rows(
    subject: Subject, siblings: Siblings, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(redis_siblings, "ROWS_PER_SCAN", at_once)
    many = [GroupRow("t", f"g{n}", 0, None, 0, n) for n in range(1, 3_001)]
    await subject.commit(numbered(3_000, *many))
    counter, rows = await siblings.settings(2, None)
    assert rows is not None and (counter.number, len(rows), set(rows)) == (3_000, 3_000, set(many))


async def test_settings_are_read_after_preparations(subject: Subject, siblings: Siblings) -> None:
    siblings.prepare()
    siblings.prepare()
    await subject.commit(numbered(1, GROUP_ROW))
    assert await siblings.settings(2, None) == (SettingsCounter(1), [GROUP_ROW])


@pytest.mark.parametrize("clean", [False, True])
async def test_settings_of_an_unserved_shard_are_read(
    subject: Subject, siblings: Siblings, *, clean: bool
) -> None:
    await subject.commit(numbered(1, GROUP_ROW))
    await subject.store.close(clean)
    assert await siblings.settings(2, None) == (SettingsCounter(1), [GROUP_ROW])
    opened = await subject.open()
    assert (opened.clean, opened.last_batch) == (clean, 1), "the look has changed nothing"


async def test_settings_are_separate_per_shard(
    urls: Urls, subject: Subject, siblings: Siblings
) -> None:
    other = Subject(open_url(urls(3)))
    await other.open()
    await subject.commit(numbered(1, GROUP_ROW))
    await other.commit(numbered(5, GROUP_ROW._replace(version=5)))
    assert await siblings.settings(2, None) == (SettingsCounter(1), [GROUP_ROW])
    assert await siblings.settings(3, None) == (SettingsCounter(5), [GROUP_ROW._replace(version=5)])
    await other.store.close(clean=True)


async def test_siblings_report_a_missing_database(tmp_path: Path) -> None:
    siblings = open_siblings(ShardFolder(f"{tmp_path}/").url(0))
    assert siblings is not None
    with pytest.raises(StoreAway, match=r"shard-2\.db"):
        await siblings.settings(2, None)
    assert not list(tmp_path.iterdir()), "nor was it made"
    await siblings.close()


async def test_siblings_report_an_unreachable_redis(redis_server: RedisServer) -> None:
    siblings = open_siblings(shard_url(redis_server.url("connect_ms=100&call_ms=100"), 0))
    assert siblings is not None
    redis_server.kill()
    with pytest.raises(StoreAway):
        await siblings.settings(2, None)
    redis_server.start()
    await siblings.close()


def named_lines(cluster: Cluster) -> int:
    """How many connections of daemons there are to all nodes."""
    return sum(ask(node, "CLIENT", "LIST").count(b"name=tickwheel") for node in cluster.nodes)


async def test_cluster_siblings_use_one_connection_per_master(shared_cluster: Cluster) -> None:
    siblings = open_siblings(shard_url(shared_cluster.url(), 0))
    assert siblings is not None
    before = named_lines(shared_cluster)
    await asyncio.gather(*(siblings.settings(shard, 0) for shard in range(1, 64)))
    await comes(lambda: named_lines(shared_cluster) <= before + 1 + len(shared_cluster.nodes))
    await siblings.close()


async def test_preparations_connect_to_all_masters_until_close(shared_cluster: Cluster) -> None:
    before, all_of_them = named_lines(shared_cluster), 1 + len(shared_cluster.nodes)
    siblings = open_siblings(shard_url(shared_cluster.url(), 0))
    assert siblings is not None
    siblings.prepare()
    await comes(lambda: named_lines(shared_cluster) == before + all_of_them)
    await siblings.close()
    await comes(lambda: named_lines(shared_cluster) <= before)
    siblings = open_siblings(shard_url(shared_cluster.url(), 0))
    assert siblings is not None
    siblings.prepare()
    await asyncio.sleep(0)
    await siblings.close()
    await comes(lambda: named_lines(shared_cluster) <= before)


async def test_preparations_without_redis_do_not_raise() -> None:
    siblings = open_siblings(shard_url(f"redis://127.0.0.1:{free_port()}/0", 0))
    assert siblings is not None
    siblings.prepare()
    with pytest.raises(StoreAway):
        await siblings.settings(1, None)
    await siblings.close()


async def test_a_migrating_shard_is_found_at_its_new_master(shared_cluster: Cluster) -> None:
    url, slot = shard_url(shared_cluster.url(), 2), slot_of("tw:default:2")
    subject = Subject(open_url(url))
    await subject.open()
    await subject.commit(numbered(1, GROUP_ROW))
    siblings = open_siblings(shard_url(shared_cluster.url("call_ms=30000"), 0))
    assert siblings is not None
    assert await siblings.settings(2, None) == (SettingsCounter(1), [GROUP_ROW])
    source = shared_cluster.owner_of(slot)
    assert source is not None
    (to, *_) = (node for node in shared_cluster.masters() if node is not source)
    gone = threading.Event()

    def asked() -> int:
        match = re.search(rb"errorstat_ASK:count=(\d+)", source.call("INFO", "errorstats"))
        return int(match[1]) if match else 0

    def between(step: str) -> None:
        if step == "all":
            before = asked()
            gone.set()
            until(lambda: asked() > before)

    try:
        moving = asyncio.create_task(
            asyncio.to_thread(shared_cluster.migrate, slot, to, between=between)
        )
        await comes(gone.is_set)
        assert await siblings.settings(2, None) == (SettingsCounter(1), [GROUP_ROW])
        await moving
        assert await siblings.settings(2, 0) == (SettingsCounter(1), [GROUP_ROW])
    finally:
        await asyncio.to_thread(shared_cluster.migrate, slot, source)
    assert await siblings.settings(2, 0) == (SettingsCounter(1), [GROUP_ROW])
    await siblings.close()
    await subject.store.close(clean=True)


async def test_a_frozen_redis_is_waited_for_once(redis_server: RedisServer) -> None:
    """Not by each shard in its turn."""
    siblings = open_siblings(shard_url(redis_server.url("connect_ms=400&call_ms=400"), 0))
    assert siblings is not None
    assert await siblings.settings(1, 0) == (SettingsCounter(), None)
    redis_server.pause()
    result = await asyncio.gather(
        *(siblings.settings(shard, 0) for shard in range(1, 64)), return_exceptions=True
    )
    assert all(isinstance(item, StoreAway) for item in result)
    assert sum("another shard" in str(item) for item in result) >= 32
    redis_server.go_on()

    async def answers() -> bool:
        try:
            return await siblings.settings(1, 0) == (SettingsCounter(), None)
        except StoreAway:
            return False

    await comes(answers)
    await siblings.close()


async def test_changes_during_a_scan_are_read_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that goes and comes again meanwhile need not be in what the scan finds."""
    subject = Subject(open_url(shard_url(redis_server.url(), 2)))
    await subject.open()
    siblings = open_siblings(shard_url(redis_server.url(), 0))
    assert siblings is not None
    monkeypatch.setattr(redis_siblings, "ROWS_PER_SCAN", 1)  # there are more records than that
    scan, changes = redis_siblings._scan, [2]

    async def busy_scan(line: Connection, records: bytes) -> list[GroupRow]:
        rows = await scan(line, records)
        if changes:
            number = changes.pop()
            await subject.commit(numbered(number, GROUP_ROW._replace(version=number)))
        return rows

    monkeypatch.setattr(redis_siblings, "_scan", busy_scan)
    await subject.commit(numbered(1, GROUP_ROW))
    assert await siblings.settings(2, None) == (SettingsCounter(2), [GROUP_ROW._replace(version=2)])
    changes += [9, 8, 7, 6, 5, 4, 3]
    with pytest.raises(StoreAway, match="changed during each of"):
        await siblings.settings(2, None)
    await siblings.close()
    await subject.store.close(clean=True)


@pytest.mark.parametrize("field", ["rewriting", "parts"])
@pytest.mark.parametrize("at_once", [1, 10_000])
async def test_settings_of_an_incomplete_shard_are_not_read(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, at_once: int, field: str
) -> None:
    """It can have its counter already, and lack groups that were not deleted."""
    monkeypatch.setattr(redis_siblings, "ROWS_PER_SCAN", at_once)
    subject = Subject(open_url(shard_url(redis_server.url(), 2)))
    await subject.open()
    await subject.commit(numbered(2, GROUP_ROW))
    siblings = open_siblings(shard_url(redis_server.url(), 0))
    assert siblings is not None
    redis_server.call("HSET", "{tw:default:2}:wheel", field, "1")
    with pytest.raises(StoreAway, match="is incomplete at the moment"):
        await siblings.settings(2, 1)
    redis_server.call("HDEL", "{tw:default:2}:wheel", field)
    assert await siblings.settings(2, 1) == (SettingsCounter(2), [GROUP_ROW])
    await siblings.close()
    await subject.store.close(clean=True)


@pytest.mark.parametrize("url", ["memory:", "sqlite:///store.db", "sqlite:////a/shard-x.db"])
def test_stores_without_shards_have_no_siblings(url: str) -> None:
    assert open_siblings(url) is None
