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
