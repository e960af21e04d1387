"""Tasks whose key is pending, with a real daemon on each store, over kills."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from e2e.stores import killed_on
from support.daemon import Daemon
from support.waiting import soon
from tickwheel import Client, IfPending, Task

HOUR = 3600


killed = killed_on("redis", "sqlite", "asyncio-redis", "postgresql")


@pytest.fixture
def daemon(killed: Daemon) -> Daemon:
    return killed.start()


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with Client(daemon.url, send_timeout=10) as made:
        yield made


async def bodies(client: Client, topic: str, count: int) -> dict[int, bytes]:
    """Ack `count` deliveries and return their bodies by id."""
    result: dict[int, bytes] = {}
    async with client.subscribe(topic, group="g") as deliveries:
        async for delivery in deliveries:
            result[delivery.id] = delivery.body
            await delivery.ack()
            if len(result) == count:
                return result
    raise AssertionError("the subscription ended")


async def test_the_four_actions_over_a_kill(daemon: Daemon, client: Client) -> None:
    """The tasks arrived with many others and are not in memory."""
    many = [Task("t", b"%d" % n, delay=HOUR, key=f"k{n}") for n in range(100)]
    stored = await client.enqueue_many(many)
    await daemon.arestart()
    rules = {"k3": "keep", "k4": "reject", "k5": "replace", "new": "keep"}
    tasks = [Task("t", b"2", key=key, if_pending=rule) for key, rule in rules.items()]
    receipts = await client.enqueue_many(tasks)
    assert [receipt.outcome for receipt in receipts] == ["kept", "rejected", "replaced", "stored"]
    assert [receipt.id for receipt in receipts[:3]] == [stored[n].id for n in (3, 4, 5)]
    assert receipts[0].due_ms == stored[3].due_ms
    due = IfPending("replace", replaces="due")
    moved = await client.enqueue("t", b"unused", key="k6", if_pending=due)
    assert (moved.outcome, moved.id) == ("replaced", stored[6].id)
    await daemon.arestart()
    assert (await client.enqueue("t", b"3", key="k5", if_pending="keep")).id == stored[5].id
    got = await soon(bodies(client, "t", 3))
    assert got == {stored[5].id: b"2", stored[6].id: b"6", receipts[3].id: b"2"}
    for key, status in (("k5", "acked"), ("k3", "cancelled")):
        (outcome,) = await client.cancel(topic="t", key=key)
        assert outcome.status == status
    again = await client.enqueue("t", b"4", key="k5", delay=HOUR, if_pending="keep")
    assert again.outcome == "stored"
    assert (await client.stats()).topics["t"].scheduled == 102 - 3 - 1


async def test_a_delivered_task_is_cancelled_by_its_replacement(
    daemon: Daemon, client: Client
) -> None:
    first = await client.enqueue("t", b"old", key="k")
    (delivery,) = await client.pull("t", group="g", wait=20)
    await delivery.nack(HOUR)
    await daemon.arestart()
    second = await client.enqueue("t", b"new", key="k", if_pending="replace")
    assert second.outcome == "replaced" and second.id != first.id
    await daemon.arestart()
    assert (await client.lookup(first.id)).state == "cancelled"
    assert await soon(bodies(client, "t", 1)) == {second.id: b"new"}
    assert (await client.stats()).topics["t"].waiting == 0


async def test_a_topics_rule_is_kept_over_a_kill(daemon: Daemon, client: Client) -> None:
    rule = IfPending("keep", window=HOUR)
    assert (await client.configure("t", if_pending=rule)).if_pending == rule
    await daemon.arestart()
    tasks = [Task("t", b"x", delay=HOUR, key="k") for _ in range(3)]
    outcomes = [receipt.outcome for receipt in await client.enqueue_many(tasks)]
    assert outcomes == ["stored", "kept", "kept"]
    stats = (await client.stats()).topics["t"].raw
    assert (stats["kept"], stats["if_pending"]["action"]) == (2, "keep")
