"""How a later release reads what this one has written, shown with a format that is made up here."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from persistence.store_subject import Subject
from support.golden import GOLDEN, cases, content, fill, load_dump, stored_tasks
from support.postgresql import PostgresServer
from support.redis_server import RedisServer
from tickwheel.model.records import DeadRow, Failure
from tickwheel.persistence import codec, on_server, open_election, open_url, upgrade
from tickwheel.persistence.audit import check
from tickwheel.persistence.contract import Leader, StoreUnusable
from tickwheel.persistence.postgresql import opening as postgresql_opening
from tickwheel.persistence.postgresql import writer as postgresql_writer
from tickwheel.persistence.redis import opening
from tickwheel.persistence.sqlite import database
from tickwheel.upgrades import Upgrade

V1 = GOLDEN / "v1"
UPGRADE = (
    "CREATE TABLE remark(id INTEGER PRIMARY KEY, text TEXT)",
    "INSERT INTO remark SELECT id, reason FROM dead WHERE grp = 'billing'",
)
UPGRADE_SQL = """
CREATE TABLE remark (shard int, text text);
INSERT INTO remark SELECT number, incarnation FROM shard;
UPDATE layout SET format = 2;
"""


@dataclass
class Store:
    """One that this release wrote; ``subject`` is not open."""

    subject: Subject
    url: str
    layout: Callable[[], Awaitable[int]]
    """Returns the layout version of the store."""
    written: int = 1
    path: Path | None = None


def _sqlite(path: Path) -> Store:
    load_dump(V1 / "sqlite.sql", path)

    async def layout() -> int:
        connection = sqlite3.connect(path)
        (found,) = connection.execute("SELECT value FROM meta WHERE key = 'layout'").fetchone()
        (header,) = connection.execute("PRAGMA user_version").fetchone()
        connection.close()
        assert found == header
        return int(found)

    url = f"sqlite:///{path}"
    return Store(Subject(open_url(url)), url, layout, path=path)


async def _redis(server: RedisServer) -> Store:
    server.call("FLUSHALL")
    url = server.url()
    await fill(open_url(url))

    async def layout() -> int:
        async with Redis.from_url(url) as redis:
            return int(await redis.hget("{tw:default:0}:wheel", "format"))

    return Store(Subject(open_url(url)), url, layout, opening.LAYOUT)


async def _postgresql(server: PostgresServer) -> Store:
    schema = server.new_schema()
    url = server.url(schema=schema)
    await fill(open_url(url))

    async def layout() -> int:
        return int(server.sql(f"SELECT format FROM {schema}.layout")[0][0])

    return Store(Subject(open_url(url)), url, layout)


@pytest.fixture(params=["sqlite", "redis", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        result = _sqlite(tmp_path / "store.db")
    elif request.param == "redis":
        result = await _redis(request.getfixturevalue("shared_redis"))
    else:
        result = await _postgresql(request.getfixturevalue("shared_postgres"))
    yield result
    await result.subject.store.close(clean=True)


Later = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def later(tmp_path_factory: pytest.TempPathFactory) -> Later:
    """``with later():`` as if this were a release that knows one layout more."""
    folder = tmp_path_factory.mktemp("sql")
    (folder / "upgrade-2.sql").write_text(UPGRADE_SQL)

    @contextmanager
    def next_layout(*upgrade: str) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database, "UPGRADES", {1: upgrade or UPGRADE})
            patch.setattr(postgresql_opening, "FOLDER", folder)
            patch.setattr(on_server, "LEADER_WATCH_S", 0.0)
            for module in (database, opening, postgresql_opening, postgresql_writer):
                patch.setattr(module, "LAYOUT", vars(module)["LAYOUT"] + 1)
            yield

    return next_layout


async def test_a_store_is_upgraded_when_it_is_opened(store: Store, later: Later) -> None:
    """Nothing is lost, and the release before refuses it from then on."""
    subject, written = store.subject, store.written
    with later():
        opened = await subject.open()
        assert (opened.epoch, opened.last_batch, opened.created) == (2, 5, False)
        assert await store.layout() == written + 1
        rows = await subject.store.read(list(stored_tasks()))
        assert {i: task.row for i, task in rows.items()} == stored_tasks()
        assert (await subject.small()).records == content().records
        await subject.reopen()
        if store.path is not None:
            remarks = sqlite3.connect(store.path).execute("SELECT * FROM remark").fetchall()
            letters = [row for row in content().dead.values() if row.group == "billing"]
            assert sorted(remarks) == sorted((row.id, row.reason) for row in letters)
        await subject.store.close(clean=True)
    with pytest.raises(
        StoreUnusable, match=f"layout {written + 1}.*up to {written}.*newer release"
    ):
        await subject.store.open("me", 0)
    assert await store.layout() == written + 1


async def upgraded(url: str, *, dry_run: bool = False) -> Upgrade:
    (result,) = [one async for one in upgrade(url, dry_run=dry_run)]
    return result


async def test_an_upgrade_by_command_needs_no_daemon(store: Store, later: Later) -> None:
    found, written = await upgraded(store.url), store.written
    assert (found.layout, found.needed, found.steps) == (written, written, ())
    with later():
        planned = await upgraded(store.url, dry_run=True)
        assert (planned.layout, planned.needed) == (written, written + 1)
        assert await store.layout() == written
        assert planned.steps
        assert await upgraded(store.url) == planned
        assert await store.layout() == written + 1
        assert (await upgraded(store.url)).steps == ()
        opened = await store.subject.open()
        assert (opened.epoch, opened.last_batch) == (2, 5)
        assert set(await store.subject.ids()) == stored_tasks().keys()
        await store.subject.store.close(clean=True)
    with pytest.raises(
        StoreUnusable, match=f"layout {written + 1}.*up to {written}.*newer release"
    ):
        await upgraded(store.url)


async def test_an_upgrade_by_command_is_refused_while_a_daemon_runs(
    store: Store, later: Later
) -> None:
    election = open_election(store.url, 60_000)
    await store.subject.open("node/1")
    if election is not None:
        await election.prepare()
        assert await election.acquire(Leader("node/1", "host:1", 0, 0))
    with later():
        with pytest.raises(StoreUnusable, match="is in use by|node/1 at host:1 leads"):
            await upgraded(store.url)
        assert await store.layout() == store.written
    if election is not None:
        await election.close()


async def test_a_store_without_a_layout_has_no_upgrade(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="memory: .*no layout"):
        await upgraded("memory:")
    empty = await upgraded(f"sqlite:///{tmp_path}/none.db")
    assert (empty.layout, empty.steps) == (0, ())
    assert list(tmp_path.iterdir()) == []


async def test_an_upgrade_is_atomic(tmp_path: Path, later: Later) -> None:
    path = tmp_path / "store.db"
    subject = _sqlite(path).subject
    with later(*UPGRADE, "INSERT INTO remark SELECT id, reason FROM dead"):
        with pytest.raises(StoreUnusable):  # the same ids twice
            await subject.store.open("me", 0)
        with pytest.raises(StoreUnusable, match="cannot upgrade"):
            await upgraded(f"sqlite:///{path}")
    assert check(f"sqlite:///{path}").problems == []
    assert (await subject.open()).epoch == 2
    await subject.store.close(clean=True)
    tables = sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall()
    assert ("remark",) not in tables


def _first(*fields: Any) -> tuple[DeadRow, str]:
    """A dead letter, and who signed it: of version 1 nobody has."""
    failures, *counts = fields[6:]
    return DeadRow(*fields[:6], tuple(Failure(*failure) for failure in failures), *counts), "nobody"


def _second(*fields: Any) -> tuple[DeadRow, str]:
    *first, signed = fields
    return _first(*first)[0], str(signed)


def test_records_of_format_1_are_read_with_later_versions() -> None:
    """A kind of record gets one more build, and those before it stay."""
    written: dict[str, str] = json.loads((V1 / "records.json").read_text("utf-8"))
    letters = {name: case[0] for name, case in cases().items() if name.startswith("dead")}
    assert letters
    for name, row in letters.items():
        former = bytes.fromhex(written[name])
        assert codec.unpack("dead letter", former, _first, _second) == (row, "nobody")
        later = codec.pack(*row, "me", version=2)
        assert codec.unpack("dead letter", later, _first, _second) == (row, "me")
        with pytest.raises(codec.RecordUnreadable, match=r"version 2.*reads version 1; a newer"):
            codec.decode_dead(later)
        newest = codec.pack(*row, version=3)
        with pytest.raises(codec.RecordUnreadable, match="version 3.*reads versions 1 to 2"):
            codec.unpack("dead letter", newest, _first, _second)
