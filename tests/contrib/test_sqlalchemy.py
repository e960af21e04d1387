"""``SqlOnce`` on SQLite and on a PostgreSQL: the mark and the work are one transaction."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.postgres_server import Postgres, find_postgres
from support.frameworks import need
from support.waiting import soon
from tickwheel import Delivery, Retry, Worker, errors
from tickwheel.testing import SyncTestWheel, TestWheel

need("sqlalchemy", "asyncpg", "greenlet")

from sqlalchemy import (  # noqa: E402  # noqa: E402
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine  # noqa: E402
from sqlalchemy.orm import Session, scoped_session, sessionmaker  # noqa: E402
from sqlalchemy.pool import NullPool  # noqa: E402

from tickwheel.contrib import sqlalchemy as contrib  # noqa: E402
from tickwheel.contrib.sqlalchemy import SqlOnce  # noqa: E402

METADATA = MetaData()
CHARGED = Table("charged", METADATA, Column("number", String))
Run = Callable[..., Awaitable[Any]]
"""Calls a function with the connection of a transaction, and what else it is given."""
WAITS_S = 0.2


class Database:
    """A database, by ``engine``, with or without an event loop."""

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self.engine = engine

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[Run]:
        """A transaction; it is committed at the end, or rolled back by an error."""
        if isinstance(self.engine, Engine):
            with self.engine.begin() as connection:
                yield lambda work, *given, **said: asyncio.to_thread(
                    partial(work, connection, *given, **said)
                )
        else:
            async with self.engine.begin() as asynchronous:
                yield asynchronous.run_sync

    def autocommit(self) -> Database:
        return Database(self.engine.execution_options(isolation_level="AUTOCOMMIT"))

    async def run(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Do this in a transaction of its own."""
        async with self.begun() as run:
            return await run(work, *arguments, **options)

    async def once(self, **options: Any) -> SqlOnce:
        """Marks in a table that is made now."""
        once = SqlOnce(**options)
        await self.run(once.table.create)
        return once


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    result = find_postgres()
    if result is None:
        assert not os.environ.get("CI"), "PostgreSQL is not installed"
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)  # pytest's own folder may be entered by this test's user alone
        server = Postgres(Path(folder) / "server", result[0])
        yield server
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    if request.param == "sqlite":
        engine = sqlite_engine(tmp_path)
        yield Database(engine)
        engine.dispose()
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = f"postgresql+asyncpg://postgres@127.0.0.1:{server.port}/postgres"
    asynchronous = create_async_engine(url, poolclass=NullPool)
    yield Database(asynchronous)
    async with asynchronous.begin() as connection:
        await connection.execute(text("DROP TABLE IF EXISTS tickwheel_once, charged"))
    await asynchronous.dispose()


def sqlite_engine(folder: Path, **options: Any) -> Engine:
    return create_engine(f"sqlite:///{folder}/app.db", connect_args={"timeout": 30}, **options)


async def test_only_committed_claims_are_done(database: Database) -> None:
    once = await database.once()
    with pytest.raises(LookupError):
        async with database.begun() as run:
            assert await run(once.claim, "a")
            assert not await run(once.claim, "a"), "its own claim counts"
            raise LookupError
    assert not await database.run(once.is_done, "a")
    results = [await database.run(once.claim, key) for key in ("a", "a", "b", "a", "x" * 1024)]
    assert results == [True, False, True, False, True]
    assert await database.run(once.is_done, "a") and not await database.run(once.is_done, "c")
    await database.run(once.forget, "a")
    assert await database.run(once.claim, "a")


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_second_claim_waits_for_the_first_transaction(
    database: Database, is_committed: bool
) -> None:
    once = await database.once()
    with pytest.raises(LookupError):
        async with database.begun() as run:
            assert await run(once.claim, "a")
            waiting = asyncio.ensure_future(database.run(once.claim, "a"))
            await asyncio.wait((waiting,), timeout=WAITS_S)
            assert not waiting.done()
            if not is_committed:
                raise LookupError
        raise LookupError
    assert await soon(waiting) is not is_committed


async def test_a_done_mark_expires(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1_000_000
    monkeypatch.setattr(contrib, "_now_ms", lambda: now_ms)
    monkeypatch.setattr(contrib, "SWEPT_MAX", 2)
    once = await database.once(ttl=10)

    async def marks() -> int:
        return int(
            await database.run(
                lambda connection: connection.scalar(select(func.count()).select_from(once.table))
            )
        )

    for key in "abcd":
        assert await database.run(once.claim, key)
    now_ms += 9_999
    assert not await database.run(once.claim, "a")
    now_ms += 1
    assert not await database.run(once.is_done, "a")
    assert await database.run(once.claim, "a"), "what is over counts as not there"
    assert not await database.run(once.claim, "a")
    assert await marks() == 4
    for number in range(contrib.SWEEP_EVERY - 7):
        await database.run(once.claim, f"{number % 2}")
    assert await marks() == 6
    await database.run(once.claim, "0")
    assert await marks() == 4, "two of b, c, d"


async def test_groups_and_namespaces_separate_claims(database: Database) -> None:
    once = await database.once()
    other = SqlOnce(namespace="other")
    assert await database.run(once.claim, "a") and await database.run(other.claim, "a")


async def test_a_failed_handler_frees_its_claim(tickwheel: TestWheel, database: Database) -> None:
    once = await database.once()
    await database.run(METADATA.create_all)
    before, after = [ConnectionError("before the commit")], [ConnectionError("after it")]
    skipped = []
    worker = Worker(tickwheel.client)

    def charge(connection: Connection, delivery: Delivery) -> None:
        if not once.claim(connection, delivery):
            skipped.append(delivery.key)
            return
        connection.execute(insert(CHARGED).values(number=delivery.key))
        if before:
            raise before.pop()

    @worker.on("charge", retry=Retry.fixed(0.1))
    async def handle(delivery: Delivery) -> None:
        await database.run(charge, delivery)
        if after:
            raise after.pop()

    for _ in range(2):  # two tasks with the same key are two
        await tickwheel.client.enqueue("charge", b"", key="ann")
    async with tickwheel.working(worker):
        await tickwheel.advance("5s")
    rows = await database.run(lambda connection: connection.scalars(select(CHARGED.c.number)).all())
    assert rows == ["ann", "ann"]
    assert skipped == ["ann"] and await tickwheel.enqueued() == []


def test_claims_work_with_synchronous_sessions(
    tickwheel_sync: SyncTestWheel, tmp_path: Path
) -> None:
    metadata = MetaData()
    engine, once = sqlite_engine(tmp_path), SqlOnce(metadata=metadata)
    metadata.create_all(engine)
    tickwheel_sync.client.enqueue("t", b"", key="ann")
    with tickwheel_sync.client.subscribe("t") as deliveries:
        delivery = next(deliveries)
        for make in (sessionmaker(engine), scoped_session(sessionmaker(engine))):
            for key in (None, "ann"):
                with make() as session, session.begin():
                    is_first = once.claim(session, delivery, key=key)
                    assert is_first is isinstance(make, sessionmaker)
        delivery.ack()
    engine.dispose()


async def test_a_connection_that_commits_each_statement_is_refused(database: Database) -> None:
    once = await database.once()
    with pytest.raises(errors.BadRequest, match="AUTOCOMMIT"):
        await database.autocommit().run(once.claim, "a")
    assert not await database.run(once.is_done, "a")


def test_sqlite_programs_that_send_begin_are_supported(tmp_path: Path) -> None:
    """As SQLAlchemy's documents advise it, for savepoints."""
    engine, once = sqlite_engine(tmp_path), SqlOnce()

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    once.table.create(engine)
    with engine.connect() as connection:
        assert once.claim(connection, "a")
        connection.rollback()
        assert once.claim(connection, "a")
        connection.commit()
        assert not once.claim(connection, "a")
    engine.dispose()


def test_unsupported_connections_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, once = sqlite_engine(tmp_path), SqlOnce()
    for wrong in (None, engine, AsyncSession(), object.__new__(AsyncConnection)):
        with pytest.raises(errors.BadRequest, match=r"await session\.run_sync\(once\.claim"):
            once.claim(wrong, "a")  # type: ignore[arg-type]
    with engine.begin() as connection:
        with pytest.raises(errors.BadRequest, match="work must be a delivery or"):
            once.claim(connection, "")
        monkeypatch.delitem(contrib.INSERTS, "sqlite")
        with pytest.raises(errors.BadRequest, match="SqlOnce supports postgresql, not 'sqlite'"):
            once.claim(connection, "a")
    with pytest.raises(errors.BadRequest, match="ttl"):
        SqlOnce(ttl=0)
    engine.dispose()
    with Session() as unbound, pytest.raises(Exception, match="bind"):
        once.claim(unbound, "a")
