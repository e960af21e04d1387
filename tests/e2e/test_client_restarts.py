"""The client over kills, restarts and drains of a real daemon: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from support.daemon import Daemon
from support.waiting import soon
from tickwheel import Client, Task

HOUR = 3600


async def scheduled(client: Client, topic: str) -> int:
    answer = (await client.stats()).topics.get(topic)
    return answer.scheduled if answer is not None else 0


async def test_enqueues_over_a_kill_are_stored_once(daemon: Daemon) -> None:
    async with Client(daemon.url, send_timeout=5) as client:
        stop = asyncio.Event()
        bodies: list[bytes] = []
        receipts: list[Any] = []

        async def produce(name: int) -> None:
            while not stop.is_set():
                body = b"%d-%d" % (name, len(bodies))
                bodies.append(body)
                receipts.append(await client.enqueue("t", body, delay=HOUR))

        producers = [asyncio.ensure_future(produce(name)) for name in range(20)]
        for _ in range(3):
            while len(receipts) < 200:
                await soon(asyncio.wait(producers, timeout=0.01))
            receipts_before = len(receipts)
            await daemon.arestart()
            assert len(receipts) >= receipts_before
            receipts_wanted = len(receipts) + 200
            while len(receipts) < receipts_wanted:
                await soon(asyncio.wait(producers, timeout=0.01))
        stop.set()
        await soon(asyncio.gather(*producers))
        listed = [task.body async for task in client.list_tasks(topic="t")]
        assert len(receipts) == len(bodies)
        assert sorted(listed) == sorted(bodies), "each once"


async def test_a_lost_reply_stores_the_task_once(make_daemon: Callable[..., Daemon]) -> None:
    """Killed after the commit and before the reply: the resend gets the first answer."""
    daemon = make_daemon(failpoints="commit.after=3")
    await daemon.astart()
    async with Client(daemon.url, send_timeout=10) as client:
        receipts = []
        enqueues = asyncio.ensure_future(_some(client, receipts))
        await daemon.awaited()
        await daemon.astart()
        await soon(enqueues)
        listed = [task.id async for task in client.list_tasks(topic="t")]
        assert listed == sorted(receipt.id for receipt in receipts)
        assert len(listed) == 10
        assert daemon.hits


async def _some(client: Client, receipts: list[Any]) -> None:
    for i in range(10):
        receipts.append(await client.enqueue("t", b"%d" % i, delay=HOUR))


async def test_a_consumer_goes_on_after_a_kill(daemon: Daemon) -> None:
    async with Client(daemon.url, send_timeout=5) as client:
        receipts = await client.enqueue_many([Task("t", b"%d" % i) for i in range(300)])
        wanted = {receipt.id for receipt in receipts}
        acked: set[int] = set()
        async with client.subscribe("t", prefetch=20) as deliveries:
            epochs = set()
            while acked < wanted:
                delivery = await soon(anext(deliveries))
                epochs.add(delivery.epoch)
                if await soon(delivery.ack()) in ("acked", "done"):
                    acked.add(delivery.id)
                if len(acked) == 100 and len(epochs) == 1:
                    await daemon.arestart()
            assert acked == wanted
            assert len(epochs) == 2
        assert await scheduled(client, "t") == 0


async def test_an_ack_under_way_at_a_kill_is_answered_after_it(daemon: Daemon) -> None:
    async with Client(daemon.url, send_timeout=10) as client:
        await client.enqueue("t", b"x")
        async with client.subscribe("t") as deliveries:
            delivery = await soon(anext(deliveries))
            await daemon.akill()
            ack = asyncio.ensure_future(delivery.ack())
            await daemon.astart()
            assert await soon(ack) in ("acked", "done")
            assert (await client.lookup(delivery.id)).state == "acked"


async def test_a_client_reconnects_after_a_drain(daemon: Daemon) -> None:
    async with (
        Client(daemon.url, send_timeout=10) as client,
        client.subscribe("t") as deliveries,
    ):
        await client.enqueue("t", b"before")
        first = await soon(anext(deliveries))
        stopping = asyncio.ensure_future(daemon.aterminate())
        assert await soon(first.ack()) in ("acked", "done")
        assert await soon(stopping) == 0
        during = client.enqueue_nowait("t", b"during")
        await daemon.astart()
        assert (await soon(during)).id
        second = await soon(anext(deliveries))
        assert (second.body, second.attempt) == (b"during", 1)
        assert await soon(second.ack()) == "acked"


async def test_leases_of_buffered_deliveries_survive_a_restart(daemon: Daemon) -> None:
    async with Client(daemon.url, send_timeout=10) as client:
        await client.enqueue_many([Task("t", b"%d" % i) for i in range(5)])
        async with client.subscribe("t") as deliveries:
            results = [await soon(anext(deliveries))]
            await daemon.arestart(kill=False)
            while len(results) < 5:
                results.append(await soon(anext(deliveries)))
            assert {delivery.attempt for delivery in results} == {1}
            words = await soon(asyncio.gather(*(delivery.ack() for delivery in results)))
            assert set(words) <= {"acked", "done"}
            assert len({delivery.id for delivery in results}) == 5


async def test_the_second_of_two_addresses_takes_over(make_daemon: Callable[..., Daemon]) -> None:
    first, second = make_daemon().start(), make_daemon().start()
    async with Client(f"{first.url},{second.url.removeprefix('tcp://')}") as client:
        await client.enqueue("t", b"x", delay=HOUR)
        await first.akill()
        receipt = await soon(client.enqueue("t", b"y", delay=HOUR))
        assert (await client.lookup(receipt.id)).body == b"y"
        assert await scheduled(client, "t") == 1
