"""The client against a real daemon: everything it can ask for, and what comes of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest

from support.daemon import Daemon
from support.waiting import WAIT_S, soon
from tickwheel import Client, Delivery, Retry, Task, errors
from tickwheel.client import Subscription


async def take(subscription: Subscription, count: int = 1) -> list[Delivery]:
    return [await soon(anext(subscription)) for _ in range(count)]


# --- enqueue, deliver, ack -------------------------------------------------------------------


async def test_every_field_arrives(client: Client, topic: str) -> None:
    at = datetime.now(UTC) + timedelta(milliseconds=30)
    properties = {"s": "ä", "i": -5, "f": 1.5, "b": True}
    receipt = await client.enqueue(
        topic, b"\x00body\xff", at=at, key="k", tag="g", properties=properties, priority=7, ttl=60
    )
    assert at <= receipt.due <= at + timedelta(milliseconds=1)
    async with client.subscribe(topic, group="grp") as deliveries:
        [delivery] = await take(deliveries)
    assert (delivery.id, delivery.body, delivery.topic) == (receipt.id, b"\x00body\xff", topic)
    assert (delivery.key, delivery.tag, delivery.priority) == ("k", "g", 7)
    assert dict(delivery.properties) == properties
    assert (delivery.group, delivery.attempt) == ("grp", 1)
    assert delivery.due == receipt.due
    assert delivery.delivered_ms >= delivery.due_ms
    assert await delivery.ack() == "acked"
    assert await delivery.ack() == "acked", "an ack may be repeated"
    assert (await client.lookup(receipt.id)).state == "acked"


async def test_ten_thousand_tasks_pass_through_a_client(client: Client, topic: str) -> None:
    """Many frames, the window, acks by the hundred: each task comes once, and all come."""
    count = 10_000
    receipts = await soon(client.enqueue_many([Task(topic, b"x") for _ in range(count)]))
    assert len({receipt.id for receipt in receipts}) == count
    left = {receipt.id for receipt in receipts}
    acks = []
    async with client.subscribe(topic, prefetch=2000) as deliveries:
        while left:
            delivery = await soon(anext(deliveries))
            left.remove(delivery.id)
            acks.append(delivery.ack_nowait())
        assert set(await soon(asyncio.gather(*acks))) == {"acked"}
    counts = (await client.stats()).topics[topic]
    assert (counts.acked, counts.ready, counts.in_flight) == (count, 0, 0)


# --- ends of a delivery ----------------------------------------------------------------------


def raises() -> None:
    raise LookupError("the program's own")


def exits() -> None:
    sys.exit(3)


def is_interrupted() -> None:
    raise KeyboardInterrupt


def is_cancelled() -> None:
    raise asyncio.CancelledError


def is_done() -> None:
    """Do nothing: the program leaves in order."""


@pytest.mark.parametrize("leaves", [raises, exits, is_interrupted, is_cancelled, is_done])
@pytest.mark.parametrize("is_pulled", [False, True])
async def test_an_ending_program_releases_its_deliveries(
    running: Daemon, client: Client, topic: str, leaves: Callable[[], None], is_pulled: bool
) -> None:
    """What it has settled stays so; the rest is ready at once, in order, without a failure."""
    ids = [receipt.id for receipt in await client.enqueue_many([Task(topic, b"x")] * 6)]
    with suppress(LookupError, SystemExit, KeyboardInterrupt, asyncio.CancelledError):
        prefetch = 0 if is_pulled else 6
        async with (
            Client(running.url) as other,
            other.subscribe(topic, prefetch=prefetch) as deliveries,
        ):
            if is_pulled:
                result = await other.pull(topic, max=6, wait=WAIT_S)
            else:
                result = await take(deliveries, 6)
            result[0].ack_unwatched()
            assert await result[2].nack(3600) == "retrying"
            leaves()
    async with client.subscribe(topic) as deliveries:
        again = await take(deliveries, 4)
        assert [delivery.id for delivery in again] == [ids[1], *ids[3:]]
        assert [(d.attempt, d.failures, d.deaths) for d in again] == [(2, 0, 0)] * 4
        await asyncio.gather(*(delivery.ack() for delivery in again))
    counts = (await client.stats()).topics[topic].groups["default"]
    assert (counts.acked, counts.in_flight) == (5, 0)


# --- by id, lists, counts --------------------------------------------------------------------


async def test_a_hundred_starts_and_stops(running: Daemon) -> None:
    for _ in range(100):
        client = Client(running.url)
        await client.connect()
        await client.close()
    async with Client(running.url) as client:
        stats = await client.stats()
    assert stats.raw["sessions"] < 50, "sessions that said BYE, or were never used, are forgotten"


# --- groups and policies --------------------------------------------------------------------

ROCKETMQ_MS = (
    10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000, 360_000, 420_000, 480_000,
    540_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000,
)  # fmt: skip


async def one(client: Client, topic: str, group: str = "default") -> Delivery:
    [delivery] = await soon(client.pull(topic, group=group, max=1, wait=WAIT_S))
    result: Delivery = delivery
    return result


async def test_the_daemon_returns_policies_as_set(client: Client, topic: str) -> None:
    for policy in (
        Retry.exponential(1, 3, 50, 4, 0.5), Retry.fixed(2.5, 3), Retry.table([1, 2, 3]),
        Retry.none(),
    ):  # fmt: skip
        kept = (await client.configure(topic, retry=policy)).retry
        assert kept is not None and kept.to_wire() == policy.to_wire()
    named = (await client.configure(topic, retry=Retry.table("rocketmq"))).retry
    assert named is not None
    assert (named.name, named.kind, named.delays_ms) == ("rocketmq", "table", ROCKETMQ_MS)
    assert (await client.configure(topic, retry=None)).retry is None
    partly = (await client.configure(topic, retry=Retry.of({"kind": "fixed", "delay_ms": 5}))).retry
    assert partly is not None and (partly.delay_ms, partly.retries) == (5, 2)
    with pytest.raises(errors.BadRequest):
        await client.configure(topic, retry=Retry.named("nobody-knows-it"))


async def test_groups_start_at_the_given_position(client: Client, topic: str) -> None:
    await client.create_group(topic, "first")
    receipt = await client.enqueue(topic, b"before")
    await client.create_group(topic, "now")
    await client.create_group(topic, "all", start="first")
    await client.create_group(topic, "at", start=receipt.due)
    await client.create_group(topic, "later", start=receipt.due + timedelta(milliseconds=1))
    for group in ("first", "all", "at"):
        assert (await one(client, topic, group)).body == b"before"
    assert await client.pull(topic, group="later") == []
    since_ms = (await client.stats()).topics[topic].groups["now"].since_ms
    assert abs(since_ms - receipt.due_ms) < 60_000
    # Mostly a few milliseconds after the task, and then it is not owed it. In this very
    # millisecond it is; and so it is where the wall clock has gone back between the two.
    if since_ms > receipt.due_ms:
        assert await client.pull(topic, group="now") == []
    else:
        assert (await one(client, topic, "now")).body == b"before"


# --- drains and restarts -----------------------------------------------------------------------


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
