"""The set of tasks equals the set of commits, whatever dies.

An application runs transactions, of which it rolls back a third, and each writes an order and its
tasks. Meanwhile takers, daemons and connections die at random moments. In the end each order that
is in the database has each of its tasks exactly once, and there is no other task.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from inbox.conftest import Taking
from support.daemon import Daemon
from support.postgresql import PostgresServer
from support.waiting import LOOK_S, WAIT_S, Patience, comes
from tickwheel import Client, Delivery, Retry, StaleReceipt, Task, sql

TOPIC = "orders.close"
PRODUCERS = 4
LOST = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors of a connection whose server or session died."""


class Checker:
    """The application, and what dies."""

    def __init__(self, url: str, transactions: int, seed: int) -> None:
        self.url = url
        self.left = transactions
        self.rng = random.Random(seed)
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"order-{self._names}"

    async def produce(self) -> None:
        """Run transactions until none is left. A lost connection is replaced; the outcome of its
        transaction is in the database."""
        while self.left > 0:
            with contextlib.suppress(*LOST):
                connection = await asyncpg.connect(self.url)
                try:
                    while self.left > 0:
                        self.left -= 1
                        await self._transact(connection)
                finally:
                    connection.terminate()
            await asyncio.sleep(0)

    async def _transact(self, connection: Any) -> None:
        name, count = self.name(), self.rng.randint(1, 3)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("INSERT INTO orders VALUES ($1, $2)", name, count)
        for number in range(count):
            await sql.enqueue(connection, self.task(name, number))
        if self.rng.random() < 0.1:  # a slow transaction, which others overtake
            await asyncio.sleep(self.rng.random() / 20)  # real time: of other processes
        if self.rng.random() < 1 / 3:
            await transaction.rollback()
        else:
            await transaction.commit()

    @staticmethod
    def task(name: str, number: int) -> Task:
        return Task(TOPIC, b"", delay=3600, key=f"{name}/{number}")

    async def orders(self) -> dict[str, int]:
        connection = await asyncpg.connect(self.url)
        rows = await connection.fetch("SELECT name, count FROM orders")
        await connection.close()
        return {row["name"]: row["count"] for row in rows}


def wanted_keys(orders: dict[str, int]) -> Counter[str]:
    return Counter(f"{name}/{n}" for name, count in orders.items() for n in range(count))


async def keys(client: Client) -> Counter[str]:
    return Counter([str(task.key) async for task in client.list_tasks(topic=TOPIC)])


async def compare(daemon: Daemon, orders: dict[str, int]) -> None:
    """Wait until the daemon has the tasks of these orders, and check that it has no others."""
    wanted, found, patience = wanted_keys(orders), Counter[str](), Patience(WAIT_S)
    async with Client(daemon.url) as client:
        while not patience.is_over:
            found = await keys(client)
            if found.total() >= wanted.total():
                break
            await asyncio.sleep(LOOK_S)  # real time: other processes
    assert found - wanted == Counter()
    assert wanted - found == Counter()


async def _cut(url: str) -> None:
    """End the taker's session in the database."""
    with contextlib.suppress(*LOST):
        connection = await asyncpg.connect(url)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'tickwheel inbox'"
        )
        await connection.close()


@contextlib.asynccontextmanager
async def running(checker: Checker) -> AsyncIterator[asyncio.Future[Any]]:
    """Run the producers; the task ends when all transactions are over."""
    connection = await asyncpg.connect(checker.url)
    await connection.execute("CREATE TABLE orders (name text PRIMARY KEY, count integer)")
    await connection.execute(sql.postgresql_sql())
    await connection.close()
    producing = asyncio.gather(*(checker.produce() for _ in range(PRODUCERS)))
    try:
        yield producing
    finally:
        producing.cancel()
        await asyncio.gather(producing, return_exceptions=True)


async def die(
    checker: Checker, daemon: Daemon, made: Taking, server: PostgresServer | None
) -> None:
    """Let something die at a random moment."""
    rng = checker.rng
    await asyncio.sleep(rng.random() / 10)  # real time: a moment in the work of other processes
    victim = rng.choice(("taker", "taker", "session", "daemon", "server"))
    if victim == "taker":
        await made.kill()
        made.start()
    elif victim == "session":
        await _cut(checker.url)
    elif victim == "daemon":
        daemon.kill()
        await asyncio.to_thread(daemon.start)
    elif server is not None:
        server.kill()
        await asyncio.to_thread(server.start)


async def test_tasks_equal_commits(
    database: str, make_daemon: Callable[..., Daemon], taking: Callable[..., Taking]
) -> None:
    daemon = make_daemon().start()
    checker = Checker(database, 400, seed=1)
    async with running(checker) as producing:
        made = taking(daemon.url, database)
        for _ in range(8):
            await die(checker, daemon, made, None)
        await producing
        await compare(daemon, await checker.orders())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
async def test_tasks_equal_commits_over_many_deaths(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], seed: int
) -> None:
    """PostgreSQL dies as well; then the commit of a transaction can be unknown to the program."""
    with PostgresServer.running() as server:
        daemon = make_daemon().start()
        checker = Checker(server.database_url(), 25_000, seed)
        async with running(checker) as producing:
            made = taking(daemon.url, server.database_url())
            while not producing.done():
                await die(checker, daemon, made, server)
            await producing
            await compare(daemon, await checker.orders())


async def test_each_task_has_its_effect_once(
    database: str, make_daemon: Callable[..., Daemon], taking: Callable[..., Taking]
) -> None:
    """Handlers are slower than their leases, fail, and acknowledge in their transactions only."""
    daemon = make_daemon(lease_default_s=0.3).start()
    rng, count = random.Random(5), 30
    connection = await asyncpg.connect(database)
    await connection.execute("CREATE TABLE effects (task bigint)")
    await connection.execute(sql.postgresql_sql())
    attempts = 0

    async def handle(delivery: Delivery, own: Any) -> None:
        nonlocal attempts
        attempts += 1
        transaction = own.transaction()
        await transaction.start()
        try:
            await own.execute("INSERT INTO effects VALUES ($1)", delivery.id)
            await asyncio.sleep(rng.random() / 2)  # real time: leases of another process end
            if rng.random() < 0.5:
                await delivery.ack_in(own)
            else:
                await sql.ack(own, delivery)
            if rng.random() < 0.2:
                raise ZeroDivisionError
        except (StaleReceipt, ZeroDivisionError):
            await transaction.rollback()
            await delivery.nack(0)
        else:
            await transaction.commit()

    async def consume() -> None:
        own = await asyncpg.connect(database)
        try:
            async with (
                Client(daemon.url) as client,
                client.subscribe(TOPIC, group="g", prefetch=1) as deliveries,
            ):
                async for delivery in deliveries:
                    await handle(delivery, own)
        finally:
            own.terminate()

    async with Client(daemon.url) as client:
        tasks = [Task(TOPIC, b"", retry=Retry.fixed(0, retries=1000)) for _ in range(count)]
        ids = [receipt.id for receipt in await client.enqueue_many(tasks)]
        taking(daemon.url, database)
        consumers = [asyncio.create_task(consume()) for _ in range(4)]

        async def are_finished() -> bool:
            return not [task async for task in client.list_tasks(topic=TOPIC)]

        await comes(are_finished)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    effects = [row["task"] for row in await connection.fetch("SELECT task FROM effects")]
    await connection.close()
    assert sorted(effects) == sorted(ids)
    assert attempts > count


async def test_tasks_equal_commits_in_sqlite(
    tmp_path: Path, make_daemon: Callable[..., Daemon], taking: Callable[..., Taking]
) -> None:
    daemon = make_daemon().start()
    rng, orders = random.Random(4), dict[str, int]()
    connection = sqlite3.connect(tmp_path / "app.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(sql.sqlite_sql())
    made = taking(daemon.url, f"sqlite:///{tmp_path / 'app.db'}")
    for number in range(300):
        name, count = f"order-{number}", rng.randint(1, 3)
        for n in range(count):
            sql.enqueue(connection, Checker.task(name, n))
        if rng.random() < 1 / 3:
            connection.rollback()
        else:
            connection.commit()
            orders[name] = count
        if number % 40 == 39:
            await made.kill()
            if rng.random() < 0.5:
                daemon.kill()
                await asyncio.to_thread(daemon.start)
            made.start()
        await asyncio.sleep(rng.random() / 200)  # real time: the taker works meanwhile
    connection.close()
    await compare(daemon, orders)
