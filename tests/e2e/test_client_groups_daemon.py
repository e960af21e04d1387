"""The client's groups, policies and kinds of subscriptions against a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from support.daemon import Daemon
from support.waiting import WAIT_S, soon
from tickwheel import Client, Delivery, Retry, Task, errors

ROCKETMQ_MS = (
    10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000, 360_000, 420_000, 480_000,
    540_000, 600_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("groups"), retry_base_s=0.05, retry_jitter=0) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


async def one(client: Client, topic: str, group: str = "default") -> Delivery:
    [delivery] = await soon(client.pull(topic, group=group, max=1, wait=WAIT_S))
    result: Delivery = delivery
    return result


# --- policies --------------------------------------------------------------------------------


async def test_a_tasks_policy_wins_over_its_groups_and_topics(client: Client, topic: str) -> None:
    await client.configure(topic, retry=Retry.fixed(0.01, 2))
    await client.create_group(topic, "g", retry=Retry.fixed(0.01, 1))
    for policy, attempts in ((None, 2), (Retry.none(), 1), (Retry.fixed(0.01, 3), 4)):
        receipt = await client.enqueue(topic, b"x", retry=policy)
        words, left = [], []
        while not words or words[-1] != "dead":
            delivery = await one(client, topic, "g")
            left.append((await client.lookup(receipt.id)).groups["g"].retries_left)
            words.append(await delivery.nack(reason="no"))
        assert words == ["retrying"] * (attempts - 1) + ["dead"]
        assert left == list(range(attempts))[::-1]


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
    assert partly is not None and (partly.delay_ms, partly.retries) == (5, 16)
    with pytest.raises(errors.BadRequest):
        await client.configure(topic, retry=Retry.named("nobody-knows-it"))


async def test_a_subscriber_sets_the_policy_of_a_new_group(client: Client, topic: str) -> None:
    async with client.subscribe(topic, group="g", retry=Retry.fixed(9, 1)):
        stats = (await client.stats()).topics[topic].groups["g"]
        assert stats.retry is not None and stats.retry.delay_ms == 9000
        async with client.subscribe(topic, group="g", retry=Retry.fixed(9, 1)):
            pass
        with pytest.raises(errors.Conflict, match="9000"):
            await client.subscribe(topic, group="g", retry=Retry.none()).start()


async def test_a_changed_policy_ends_the_subscription_on_reconnect(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon().start()
    async with Client(daemon.url) as client, Client(daemon.url) as other:
        subscription = client.subscribe("t", group="g", retry=Retry.fixed(9, 1))
        await subscription.start()
        reading = asyncio.ensure_future(anext(subscription))
        await other.configure("t", "g", retry=Retry.none())
        await daemon.arestart()
        with pytest.raises(errors.Conflict):
            await soon(reading)


# --- groups ----------------------------------------------------------------------------------


async def test_subscribers_of_a_deleted_group_get_an_error(client: Client, topic: str) -> None:
    async with client.subscribe(topic, group="g") as deliveries:
        reading = asyncio.ensure_future(anext(deliveries))
        await client.delete_group(topic, "g", force=True)
        with pytest.raises(errors.NotFound):
            await soon(reading)


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


# --- kinds of subscriptions ------------------------------------------------------------------


async def test_at_most_once_ends_the_task_on_delivery(client: Client, topic: str) -> None:
    receipts = await client.enqueue_many(Task(topic, b"%d" % i) for i in range(2000))
    got: list[int] = []
    async with client.subscribe(topic, ack="on_delivery", prefetch=50) as deliveries:
        async for delivery in deliveries:
            got.append(delivery.id)
            if len(got) == 1:
                assert (await client.lookup(delivery.id)).state == "acked", "before it is seen"
                assert await delivery.nack() == "done"
            if len(got) == len(receipts):
                break
    assert sorted(got) == sorted(receipt.id for receipt in receipts)
    counts = (await client.stats()).topics[topic]
    assert (counts.ready, counts.in_flight, counts.acked) == (0, 0, 2000)


async def test_a_broadcast_reaches_all_listeners(client: Client, topic: str) -> None:
    async with (
        client.subscribe(topic, broadcast=True) as first,
        client.subscribe(topic, broadcast=True) as second,
        client.subscribe(topic, group="g") as member,
    ):
        assert (await client.stats()).topics[topic].broadcasters == 2
        receipt = await client.enqueue(topic, b"x", key="k")
        for subscription in (first, second, member):
            delivery = await soon(anext(subscription))
            assert (delivery.id, delivery.key, delivery.attempt) == (receipt.id, "k", 1)
            await delivery.ack()
        assert (await client.lookup(receipt.id)).state == "acked"


async def test_auto_ack_acks_and_nacks(client: Client, topic: str) -> None:
    receipts = await client.enqueue_many(Task(topic, b"%d" % i) for i in range(5))

    async def consume() -> None:
        async with client.subscribe(topic, auto_ack=True) as deliveries:
            async for delivery in deliveries:
                if delivery.body == b"4":
                    raise ValueError("no such order")

    with pytest.raises(ValueError, match="no such order"):
        await soon(consume())
    again = await one(client, topic)
    tasks = await client.lookup_many(receipt.id for receipt in receipts)
    assert [task.state for task in tasks] == ["acked"] * 4 + ["in_flight"]
    assert (again.body, again.failures) == (b"4", 1)
    assert tasks[4].groups["default"].failures[0][2] == "ValueError: no such order"
