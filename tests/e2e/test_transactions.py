"""Transactions of a real daemon: half tasks, decisions, and producers that die between the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from e2e.stores import killed_on
from support.daemon import Daemon
from support.waiting import rest
from tickwheel import (
    Check,
    Client,
    TransactionCommitted,
    UnknownTransaction,
)
from tickwheel.sync import Client as SyncClient


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(
        tmp_path_factory.mktemp("daemon"),
        http=True,
        transaction_tasks_max=20,
        transaction_bytes_max=2_000,
        transactions_max=30,
    ) as daemon:
        yield daemon


CHECKS = {"transaction_check_s": 0.2, "transaction_check_every_s": 0.2}
killed = killed_on("asyncio-redis", "redis", "sqlite", "postgresql", settings=lambda _, __: CHECKS)


async def _bodies(client: Client, topic: str, count: int) -> list[bytes]:
    """Ack the topic's deliveries and return their bodies. Check that no task is left."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        deliveries = await client.pull(topic, max=count, wait=10)
        assert deliveries, f"{len(bodies)} of {count} came"
        for delivery in deliveries:
            bodies.append(delivery.body)
            await delivery.ack()
    return bodies


async def _pending(client: Client, topic: str) -> int:
    return len([task async for task in client.list_tasks(topic=topic)])


async def test_a_decision_is_answered_again(client: Client, topic: str) -> None:
    tx = client.transaction("payments")
    await tx.enqueue(topic, b"1")
    ids = await client.commit_transaction(tx.id)
    assert await client.commit_transaction(tx.id) == ids
    assert [receipt.id for receipt in await tx.commit()] == ids
    with pytest.raises(TransactionCommitted):
        await client.rollback_transaction(tx.id)
    with pytest.raises(TransactionCommitted):
        await tx.enqueue(topic, b"2")
    with pytest.raises(UnknownTransaction):
        await client.commit_transaction("never-heard-of")
    with pytest.raises(UnknownTransaction):
        await client.rollback_transaction("never-heard-of")
    assert await _bodies(client, topic, 1) == [b"1"]


async def test_concurrent_decisions_agree(client: Client, topic: str) -> None:
    """Decisions of one transaction arrive before it is durable."""
    tx = client.transaction("payments")
    await asyncio.gather(*(tx.enqueue(topic, b"%d" % i) for i in range(10)))
    results = await asyncio.gather(
        *(client.commit_transaction(tx.id) for _ in range(5)),
        *(client.rollback_transaction(tx.id) for _ in range(5)),
        return_exceptions=True,
    )
    ids = [found for found in results if isinstance(found, list)]
    assert len(ids) == 5
    assert all(found == ids[0] for found in ids)
    assert all(isinstance(found, TransactionCommitted) for found in results[5:])
    assert len(await _bodies(client, topic, 10)) == 10


async def test_delays_count_from_prepare_or_commit(client: Client, topic: str) -> None:
    early = client.transaction("payments")
    late = client.transaction("payments", count_from="commit")
    await early.enqueue(topic, b"1", delay=3600)
    await late.enqueue(topic, b"1", delay=3600)
    await late.enqueue(topic, b"2", delay=3600, within=60)
    began_ms = (await client.show_transaction(late.id)).raw["began_ms"]
    await rest(0.05)
    (before,) = await early.commit()
    after, placed = await late.commit()
    assert before.due_ms < began_ms + 3_600_000 + 50
    assert after.due_ms >= began_ms + 3_600_050
    assert after.due_ms <= placed.due_ms <= after.due_ms + 60_000
    for receipt in (before, after, placed):
        assert (await client.lookup(receipt.id)).due_ms == receipt.due_ms
    assert [(r.id, r.due_ms) for r in await late.commit()] == [
        (r.id, r.due_ms) for r in (after, placed)
    ]


def test_the_synchronous_client_runs_transactions(running: Daemon, topic: str) -> None:
    with SyncClient(running.url) as client:
        with client.transaction("payments") as tx:
            tx.enqueue(topic, b"1")
            assert list(client.list_tasks(topic=topic)) == []
        assert len(tx.receipts) == 1
        with pytest.raises(ZeroDivisionError), client.transaction("payments") as tx:
            tx.enqueue(topic, b"2")
            raise ZeroDivisionError
        (delivery,) = client.pull(topic, wait=20)
        assert delivery.body == b"1"
        delivery.ack()
        assert client.pull(topic, wait=0) == []


class Producer:
    """Another process of the group: it knows by name what became of each transaction."""

    def __init__(self, client: Client, decisions: dict[str, str]) -> None:
        self.asked: list[Check] = []
        self._decisions = decisions
        client.on_check("payments")(self.answer)

    async def answer(self, check: Check) -> str:
        self.asked.append(check)
        return self._decisions.get(check.transaction, "unknown")


async def test_another_producer_is_asked_after_kills(killed: Daemon) -> None:
    """Both are killed between prepare and commit."""
    daemon = killed
    await daemon.astart()
    producer = Client(daemon.url)
    await producer.connect()
    for name in ("paid", "refused", "nobody-knows"):
        tx = producer.transaction("payments", id=name)
        await tx.enqueue("orders", name.encode(), delay=0)
        await tx.enqueue("orders", name.encode() + b"-2", delay=0)
    daemon.kill()
    await producer.close(timeout=0)
    await daemon.astart()
    async with Client(daemon.url, send_timeout=10) as client:
        assert await _pending(client, "orders") == 0
        other = Producer(client, {"paid": "commit", "refused": "rollback"})
        assert sorted(await _bodies(client, "orders", 2)) == [b"paid", b"paid-2"]
        while (await client.show_transaction("refused")).state != "rolled_back":
            await rest(0.02)
        while len([c for c in other.asked if c.transaction == "nobody-knows"]) < 2:
            await rest(0.02)
        assert [transaction.id async for transaction in client.list_transactions()] == [
            "nobody-knows"
        ]
        check = next(c for c in other.asked if c.transaction == "paid")
        assert (check.group, check.tasks) == ("payments", 2)
        await daemon.arestart()
        assert await client.pull("orders", wait=0) == []
        assert (await client.show_transaction("paid")).state == "committed"
        assert (await client.show_transaction("refused")).state == "rolled_back"
        await client.rollback_transaction("nobody-knows")


async def test_an_undecided_transaction_is_parked(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(
        transaction_check_s=0.05, transaction_check_every_s=0.05, transaction_checks_max=2
    )
    await daemon.astart()
    async with Client(daemon.url) as client:
        tx = client.transaction("payments", id="lost")
        await tx.enqueue("orders", b"1", delay=0)
        while (await client.show_transaction("lost")).state != "parked":
            await rest(0.02)
        (parked,) = [transaction async for transaction in client.list_transactions(state="parked")]
        assert (parked.id, parked.checks, parked.asked) == ("lost", 2, 0)
        await daemon.arestart()
        assert (await client.show_transaction("lost")).state == "parked"
        # Nobody was there to be asked: who comes now is.
        Producer(client, {"lost": "commit"})
        assert await _bodies(client, "orders", 1) == [b"1"]


async def test_a_producer_is_not_asked_about_open_transactions(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(transaction_check_s=0.05, transaction_check_every_s=0.05)
    await daemon.astart()
    async with Client(daemon.url) as client:
        own = Producer(client, {})
        async with client.transaction("payments") as tx:
            await tx.enqueue("orders", b"1", delay=0)
            while (await client.show_transaction(tx.id)).asked < 3:
                await rest(0.02)
        assert own.asked == []
        assert await _bodies(client, "orders", 1) == [b"1"]


@pytest.fixture
async def client(running: Daemon) -> AsyncIterator[Client]:
    async with Client(running.url) as connected:
        yield connected
